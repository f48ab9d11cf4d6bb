"""Reads a recording once and keeps what the page shows: a fixed amount, however long the run was.

Rule: what is kept is bounded (bins over time, a number of saves, of restores, of lines), and what the
recording does not have is simply absent. Only the numbers of one role are shown, the controller's if it
recorded. Nothing here suspends; it blocks for as long as reading takes.
"""

from __future__ import annotations

import heapq
import math
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from quiesce.auditor import ViolationRecord, read_violations
from quiesce.report.timeline import Increases, Timeline, Values
from quiesce.telemetry import names
from quiesce.telemetry.finished import ERROR, OUTCOME, FinishedSpan
from quiesce.telemetry.recording import FOLDER, RecordedEvent, Recording, Sample, series
from quiesce.types import PHASES

__all__ = ["MOST_SAVES", "BucketCounts", "Note", "Restore", "RunData", "Save", "SlowSlot", "collect"]

MOST_SAVES: Final = 20_000
"""Saves that are kept one by one; of more, one in two, in four, …."""

MOST_ROWS: Final = 12
"""Rows of tables of what stands out: slots that waited longest, the last warnings, restores."""

REUSED: Final = f"{names.PREFIX}restore_tokens_reused_total"
"""Tokens that resumed generation calls went on from."""

_COUNTERS: Final[Mapping[str, str]] = {
    names.WINDOW_BLAME.name: "kind",
    names.WINDOW_BLOCKED.name: "kind",
    names.TRAINER_STALL.name: "cause",
    names.TRAIN_IDLE.name: "cause",
    names.TOKENS_GENERATED.name: "",
    names.GROUPS_TRAINED.name: "",
    names.WINDOW_CLOSED.name: "",
    names.CHECKPOINT_ATTEMPTS.name: "outcome",
    names.MUTATION_SECTIONS.name: "kind",
    names.INVARIANT_CHECKS.name: "invariant",
    names.INVARIANT_VIOLATIONS.name: "invariant",
    REUSED: "",
}
"""Counters that are shown, with the label that they are told apart by."""

_GAUGES: Final[Mapping[str, str]] = {
    names.GROUPS.name: "owner",
    names.DISPATCH_CURSOR.name: "",
    names.TRAINER_VERSION.name: "",
    names.TARGET_STEP_MAX.name: "owner",
    names.TRAIN_REWARD.name: "",
    names.TRAIN_LOSS.name: "",
    names.TRAIN_KL.name: "",
    names.INVARIANT_ACTIVE.name: "invariant",
    names.INVARIANT_LAST_VIOLATION.name: "invariant",
    names.PROMPTS_READ.name: "",
    names.PROMPTS_TRAINED.name: "",
    names.RUN_STATE.name: "state",
}
"""Numbers whose values are shown."""

_STEP_NUMBERS: Final[Mapping[str, str]] = {
    names.TRAIN_REWARD.name: "reward",
    names.TRAIN_LOSS.name: "loss",
    names.TRAIN_KL.name: "kl",
}
"""What a step may say of itself, by the gauge that says the same."""

_HISTOGRAMS: Final = (names.MUTATION_WAIT.name, names.MUTATION_HOLD.name)
_INFO: Final = names.RUN_INFO.name
_SAVE_EVENTS: Final = ("checkpoint.published", "checkpoint.not_published", "checkpoint.skipped")
_LOUD: Final = ("warning", "error", "critical")
_PHASE_PREFIX: Final = "quiesce.checkpoint."
_CUT: Final = "quiesce.cut_id"


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
        cut_off: Whether the process ended while it went on, so that its times say nothing.
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

    @property
    def outcomes(self) -> dict[str, int]:
        """Saves by outcome: as they were counted, else as they were seen."""
        counted = self.counters.get(names.CHECKPOINT_ATTEMPTS.name, {})
        found = {outcome: round(grown.total) for outcome, grown in counted.items() if grown.total}
        return found or dict(Counter(save.outcome for save in self.saves if save.outcome))


def collect(recording: Recording) -> RunData:
    """Read a recording.

    Args:
        recording: An opened one.
    """
    roles = [writer.role for writer in recording.writers]
    role = "controller" if "controller" in roles else roles[0]
    own = {writer.ident for writer in recording.writers if writer.role == role}
    first = min(file.unix_ns for file in recording.files) / 1e9
    data = RunData(recording.files[0].writer.run, role, first, first, Timeline(first))
    data.starts = [writer.incarnation for writer in recording.writers if writer.ident in own]
    _Samples(data, own).read(recording.samples())
    saves = _Saves(data)
    for span in recording.spans():
        saves.span(span)
    for event in recording.events():
        if event.writer.ident in own:
            saves.event(event)
    saves.finish()
    _remark(data, recording)
    try:
        found = read_violations(
            recording.folder.parent if recording.folder.name == FOLDER else recording.folder
        )
        data.violations = sorted(found, key=lambda record: not record.open)
    except OSError as error:
        data.remarks.append(f"What the auditor found could not be read: {error}.")
    return data


class _Samples:
    """Puts samples into bins."""

    def __init__(self, data: RunData, own: set[str]) -> None:
        self._data = data
        self._own = own
        self._before: dict[str, dict[str, float]] = {}  # writer -> counter's key -> value
        self._gauges: dict[str, tuple[Values, dict[str, float], str] | None] = {}
        self._counters: dict[str, Increases | None] = {}
        self._infos: set[str] = set()

    def read(self, samples: Iterable[Sample]) -> None:
        """Read all of them."""
        data = self._data
        for sample in samples:
            writer = sample.file.writer
            if writer.ident not in self._own:
                continue
            index = data.timeline.index(sample.unix_time)
            data.started = min(data.started, sample.unix_time)
            data.ended = max(data.ended, sample.unix_time)
            data.sampled = max(data.sampled, sample.unix_time)
            before = self._before.get(writer.ident)
            counted = True
            if before is None:
                # A counter begins at 0 with its process, unless its first file is gone.
                before = self._before[writer.ident] = {}
                counted = sample.file.sequence == 0
                self._away(index)
            for key, value in sample.values.items():
                self._put(index, key, value, before, counted=counted)

    def _away(self, index: int) -> None:
        """A new process: a gauge that it does not tell is not what the last one said."""
        for gauge in self._gauges.values():
            if gauge is not None:
                gauge[0].set(index, math.nan)

    def _put(
        self, index: int, key: str, value: float | None, before: dict[str, float], *, counted: bool
    ) -> None:
        if key in self._counters:
            grown = self._counters[key]
            if grown is not None and value is not None:
                last = before.get(key, 0.0)
                before[key] = value
                if counted and value != last:
                    grown.add(index, value - last if value >= last else value)
        elif key in self._gauges:
            gauge = self._gauges[key]
            if gauge is not None:
                gauge[0].set(index, math.nan if value is None else value)
                if value is not None:
                    gauge[1][gauge[2]] = value
        elif not self._learn(key):
            self._gauges[key] = None
        else:
            self._put(index, key, value, before, counted=counted)

    def _learn(self, key: str) -> bool:
        """Decide what a series is for; return whether it is shown at all."""
        data = self._data
        name, labels = series(key)
        label = _COUNTERS.get(name)
        if label is not None:
            children = data.counters.setdefault(name, {})
            child = labels.get(label, "")
            if child not in children:
                children[child] = data.timeline.increases()
            self._counters[key] = children[child]
            return True
        label = _GAUGES.get(name)
        if label is not None:
            child = labels.get(label, "")
            bins = data.gauges.setdefault(name, {}).setdefault(child, data.timeline.values())
            self._gauges[key] = (bins, data.latest.setdefault(name, {}), child)
            return True
        if name == _INFO:
            data.info.update(labels)
            return False
        for histogram in _HISTOGRAMS:
            if name.startswith(histogram):
                counts = data.slots.setdefault(histogram, {}).setdefault(
                    labels.get("kind", ""), BucketCounts()
                )
                if name == f"{histogram}_bucket":
                    bound = float(labels["le"])
                    self._counters[key] = counts.buckets.setdefault(bound, data.timeline.increases())
                    return True
        return False


class _Saves:
    """Puts together what spans and log events say of saves, restores and slots."""

    def __init__(self, data: RunData) -> None:
        self._data = data
        self._saves: dict[str, Save] = {}
        self._seen = 0
        self._slow: list[tuple[float, int, SlowSlot, tuple[tuple[int, int], ...]]] = []
        self._windows: dict[tuple[int, int], str] = {}
        self._span_restores: list[Restore] = []
        self._told: dict[str, float] = {}
        self._parts: dict[tuple[int, int], dict[str, float]] = {}

    def span(self, span: FinishedSpan) -> None:
        """Take one span."""
        data = self._data
        name = span.name
        data.ended = max(data.ended, span.end_ns / 1e9)
        if name == "quiesce.slot":
            self._slot(span)
        elif name in {"quiesce.checkpoint", "quiesce.window"}:
            self._attempt(span)
        elif name.startswith(_PHASE_PREFIX) and name[len(_PHASE_PREFIX) :] in PHASES:
            if _CUT in span.attributes and not span.cut_off:
                save = self._save(str(span.attributes[_CUT]), span.start_ns / 1e9)
                save.phases[name[len(_PHASE_PREFIX) :]] = (span.end_ns - span.start_ns) / 1e9
        elif name == "quiesce.train.step":
            self._step(
                span.end_ns / 1e9, {key.rpartition(".")[2]: value for key, value in span.attributes.items()}
            )
        elif name == "quiesce.restore.part":
            parts = self._parts.setdefault((span.trace_id, span.parent_id), {})
            parts[str(span.attributes.get("quiesce.part", ""))] = (span.end_ns - span.start_ns) / 1e9
        elif name == "quiesce.restore":
            parts = self._parts.pop((span.trace_id, span.span_id), {})
            outcome = str(span.attributes.get(OUTCOME, ""))
            reason = str(span.attributes.get("quiesce.reason", span.attributes.get(ERROR, "")))
            self._span_restores.append(Restore(span.start_ns / 1e9, 0, outcome, reason, parts, {}))

    def _step(self, unix_time: float, said: Mapping[str, object]) -> None:
        """Take what a step says of itself: it is exact where a sample is a little late."""
        data = self._data
        for name, key in _STEP_NUMBERS.items():
            value = said.get(key)
            if isinstance(value, int | float) and not isinstance(value, bool):
                children = data.gauges.setdefault(name, {})
                if "" not in children:
                    children[""] = data.timeline.values()
                index = data.timeline.index(unix_time)
                children[""].set(index, float(value))
                if unix_time >= self._told.get(name, data.sampled):
                    self._told[name] = unix_time
                    data.latest.setdefault(name, {})[""] = float(value)

    def _attempt(self, span: FinishedSpan) -> None:
        cut_id = str(span.attributes.get(_CUT, ""))
        if span.name == "quiesce.window":
            self._windows[span.trace_id, span.span_id] = cut_id
            while len(self._windows) > 4 * MOST_SAVES:
                del self._windows[next(iter(self._windows))]
        if not cut_id:
            return
        save = self._save(cut_id, span.start_ns / 1e9)
        save.unix_time = min(save.unix_time, span.start_ns / 1e9)
        save.cut_off = save.cut_off or span.cut_off
        save.outcome = save.outcome or str(span.attributes.get(OUTCOME, ""))
        if span.name == "quiesce.checkpoint":
            save.outcome = str(span.attributes.get(OUTCOME, save.outcome))
            save.reason = str(span.attributes.get("quiesce.reason", save.reason))
            save.step = _whole(span.attributes.get("quiesce.step"), save.step)
            save.rows = _whole(span.attributes.get("quiesce.rows"), save.rows) or 0
            save.num_bytes = _whole(span.attributes.get("quiesce.bytes"), save.num_bytes) or 0
            save.groups = _whole(span.attributes.get("quiesce.groups"), save.groups) or 0

    def _slot(self, span: FinishedSpan) -> None:
        wait = span.attributes.get("quiesce.wait_seconds")
        if not isinstance(wait, int | float):
            return
        if len(self._slow) == MOST_ROWS and wait <= self._slow[0][0]:
            return
        slot = SlowSlot(
            span.start_ns / 1e9,
            str(span.attributes.get("quiesce.kind", "")),
            float(wait),
            str(span.attributes.get(OUTCOME, "")),
            "",
        )
        self._seen += 1
        heapq.heappush(self._slow, (float(wait), self._seen, slot, span.links))
        if len(self._slow) > MOST_ROWS:
            heapq.heappop(self._slow)

    def event(self, event: RecordedEvent) -> None:
        """Take one log event."""
        data = self._data
        data.ended = max(data.ended, event.unix_time)
        fields = event.fields
        name = str(fields.get("event", ""))
        if name in _SAVE_EVENTS:
            self._saved(event, name)
        elif name in {"restore.completed", "restore.refused"}:
            data.restores.append(
                Restore(
                    event.unix_time,
                    event.writer.incarnation,
                    str(fields.get("outcome", "completed")),
                    str(fields.get("reason", "")),
                    _numbers(fields.get("parts")),
                    {owner: int(count) for owner, count in _numbers(fields.get("groups")).items()},
                )
            )
            data.restores = data.restores[-MOST_ROWS:]
        elif name == "train.step":
            self._step(event.unix_time, _numbers(fields.get("metrics")))
        level = str(fields.get("level", ""))
        if level in _LOUD:
            data.loud[level] += 1
            data.notes = [*data.notes[1 - MOST_ROWS :], Note(event.unix_time, level, name, _said(fields))]

    def _saved(self, event: RecordedEvent, name: str) -> None:
        fields = event.fields
        cut_id = str(fields.get("cut_id", "")) or f"{event.writer.ident} {event.unix_time}"
        phases = _numbers(fields.get("phases"))
        save = self._save(cut_id, event.unix_time - sum(phases.values()))
        for phase, seconds in phases.items():
            save.phases.setdefault(phase, seconds)
        default = {_SAVE_EVENTS[0]: "completed", _SAVE_EVENTS[2]: "skipped"}.get(name, "failed")
        save.outcome = str(fields.get("outcome", default))
        save.reason = str(fields.get("reason", save.reason))
        save.step = _whole(fields.get("step"), save.step)
        save.rows = _whole(fields.get("rows"), save.rows) or 0
        save.num_bytes = _whole(fields.get("bytes"), save.num_bytes) or 0
        save.groups = int(sum(_numbers(fields.get("groups")).values())) or save.groups
        save.cut_off = False

    def _save(self, cut_id: str, unix_time: float) -> Save:
        save = self._saves.get(cut_id)
        if save is None:
            save = Save(cut_id, unix_time)
            if self._is_kept(cut_id):
                self._saves[cut_id] = save
            while len(self._saves) > MOST_SAVES:
                self._data.thinned *= 2
                self._saves = {name: kept for name, kept in self._saves.items() if self._is_kept(name)}
        return save

    def _is_kept(self, cut_id: str) -> bool:
        """Choose by the id, so that all that is told of a save is kept, or none of it."""
        return zlib.crc32(cut_id.encode(errors="replace")) % self._data.thinned == 0

    def finish(self) -> None:
        """Hand over what was put together."""
        data = self._data
        data.saves = sorted(self._saves.values(), key=lambda save: save.unix_time)
        if not data.restores:
            data.restores = self._span_restores[-MOST_ROWS:]
        for _, _, slot, links in sorted(self._slow, reverse=True):
            cut_id = next((self._windows[link] for link in links if link in self._windows), "")
            data.slow.append(SlowSlot(slot.unix_time, slot.kind, slot.wait_seconds, slot.outcome, cut_id))


def _remark(data: RunData, recording: Recording) -> None:
    others = sorted({writer.role for writer in recording.writers} - {data.role})
    if others:
        data.remarks.append(f"Numbers are of the role {data.role}; {', '.join(others)} recorded too.")
    for stream, counts in recording.removed.items():
        gone, thin = counts.get("files", 0), counts.get("thinned", 0)
        parts = [f"{gone} files of {stream} were removed"] if gone else []
        if thin:
            parts.append(f"{thin} times a file of {stream} was thinned out")
        if parts:
            data.remarks.append(f"To keep the recording below its limit, {' and '.join(parts)}.")
    if data.thinned > 1:
        data.remarks.append(f"Of the saves, about one in {data.thinned} is shown.")
    if recording.torn:
        data.remarks.append(f"{recording.torn} lines were cut short, as a killed process leaves them.")
    for name, why in sorted(recording.broken.items()):
        data.remarks.append(f"{name} could not be read to its end: {why}.")


def _numbers(value: Any) -> dict[str, float]:  # noqa: ANN401 - whatever a log line holds
    if not isinstance(value, Mapping):
        return {}
    return {str(key): float(number) for key, number in value.items() if isinstance(number, int | float)}


def _whole(value: Any, default: int | None) -> int | None:  # noqa: ANN401 - whatever a log line holds
    return value if isinstance(value, int) and not isinstance(value, bool) else default


_TIMELESS: Final = frozenset({"timestamp", "level", "event", "run", "role"})
_LONGEST: Final = 300


def _said(fields: Mapping[str, Any]) -> str:
    """Return what a line says beside its event, in one line."""
    message = fields.get("message")
    if isinstance(message, str):
        text = message
    else:
        text = ", ".join(f"{key} {value}" for key, value in fields.items() if key not in _TIMELESS)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
