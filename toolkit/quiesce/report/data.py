"""What a recording holds that the page shows: a fixed amount, however long the run was.

Rule: these are plain values; what the recording does not have is absent, never invented. Nothing here suspends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from quiesce.auditor import ViolationRecord
from quiesce.report.cutoffs import CutOff
from quiesce.report.timeline import Increases, Timeline, Values
from quiesce.telemetry import names

__all__ = ["REUSED", "BucketCounts", "Note", "Restore", "RunData", "Save", "SlowSlot"]

REUSED: Final = f"{names.PREFIX}restore_tokens_reused_total"
"""Tokens that resumed generation calls went on from."""


@dataclass(slots=True)
class Save:
    """An attempt to save, or a window without one.

    Attributes:
        cut_id: Its id.
        unix_time: When it began, as far as is known.
        outcome: How it ended.
        reason: Why otherwise than completed.
        step: The trainer's step, or None.
        phases: Seconds by phase.
        groups: Captured groups.
        rows: Rows.
        num_bytes: Size on disk.
        cut_off: Whether the process ended while it went on; the phases are those that had ended before.
        whole: Whether more than its window and its phases is known of it.
    """

    cut_id: str
    unix_time: float
    outcome: str = ""
    reason: str = ""
    step: int | None = None
    phases: dict[str, float] = field(default_factory=dict)
    groups: int = 0
    rows: int = 0
    num_bytes: int = 0
    cut_off: bool = False
    whole: bool = False


@dataclass(frozen=True, slots=True)
class Restore:
    """A restore: when, how it ended and why, seconds by part, groups by owner."""

    unix_time: float
    incarnation: int
    outcome: str
    reason: str
    parts: Mapping[str, float]
    groups: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class SlowSlot:
    """A slot that waited long: when it was asked for, its kind, seconds, and the cut it waited for ("": unknown)."""

    unix_time: float
    kind: str
    wait_seconds: float
    outcome: str
    cut_id: str


@dataclass(frozen=True, slots=True)
class Note:
    """A line of the log that is a warning or worse."""

    unix_time: float
    level: str
    event: str
    text: str


@dataclass(slots=True)
class BucketCounts:
    """A histogram over time: by upper bound, the growth of its cumulative count."""

    buckets: dict[float, Increases] = field(default_factory=dict)
    seconds: float = 0.0
    count: float = 0.0


@dataclass(slots=True)
class RunData:
    """What the page shows.

    Attributes:
        run: The run's name.
        role: Whose numbers these are.
        started: Unix seconds of the first thing that was recorded.
        ended: Of the last.
        sampled: Of the last sample; 0 without one.
        timeline: The bins.
        info: Labels of ``quiesce_run_info``.
        starts: The incarnation of each process that recorded, in their order.
        counters: By name and label value.
        gauges: By name and label value.
        latest: The last value of every gauge.
        slots: Histograms by name and kind.
        saves: In the order of time.
        thinned: Of how many saves each one stands for.
        restores: In the order of time.
        slow: The slots that waited longest.
        notes: The last warnings and errors.
        loud: Lines of the log by level, of warnings and worse.
        remarks: What has to be known about the recording itself.
        violations: What the auditor found, in all incarnations; those that are open first.
        logged: Whether a log was recorded at all.
        cut_offs: The last saves that the end of their process cut off.
        unended: How many there were, by what is said of their outcome.
        cut_seconds: What counters of seconds lack because a window was cut off: by their name and label value.
    """

    run: str
    role: str
    started: float
    ended: float
    timeline: Timeline
    sampled: float = 0.0
    info: dict[str, str] = field(default_factory=dict)
    starts: list[int] = field(default_factory=list)
    counters: dict[str, dict[str, Increases]] = field(default_factory=dict)
    gauges: dict[str, dict[str, Values]] = field(default_factory=dict)
    latest: dict[str, dict[str, float]] = field(default_factory=dict)
    slots: dict[str, dict[str, BucketCounts]] = field(default_factory=dict)
    saves: list[Save] = field(default_factory=list)
    thinned: int = 1
    restores: list[Restore] = field(default_factory=list)
    slow: list[SlowSlot] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    loud: Counter[str] = field(default_factory=Counter)
    remarks: list[str] = field(default_factory=list)
    violations: list[ViolationRecord] = field(default_factory=list)
    logged: bool = False
    cut_offs: list[CutOff] = field(default_factory=list)
    unended: Counter[str] = field(default_factory=Counter)
    cut_seconds: dict[str, dict[str, Increases]] = field(default_factory=dict)

    @property
    def outcomes(self) -> dict[str, int]:
        """Saves by outcome: as they were counted, else as they were seen; those that were cut off come last."""
        counted = self.counters.get(names.CHECKPOINT_ATTEMPTS.name, {})
        found = {outcome: round(grown.total) for outcome, grown in counted.items() if grown.total}
        seen = Counter(save.outcome for save in self.saves if save.outcome and not save.cut_off)
        return {**(found or seen), **self.unended}
