"""Counts windows, phases, attempts to save, restores, and what all of that costs.

Rule: as :mod:`quiesce.telemetry.metrics`. Drain and exclusive phase are the barrier's to report, because it
measures them exactly, and also where nothing is saved. Nothing here suspends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from quiesce.telemetry import names
from quiesce.telemetry.families import Families
from quiesce.telemetry.histogram import known
from quiesce.telemetry.slots import SlotBook
from quiesce.types import OWNERS, PHASES

__all__ = ["CheckpointMetrics", "blame_ns"]

_REMEMBERED_CUTS: Final = 64
"""Cuts whose outcome may still be unknown. A program that uses the barrier alone never reports one."""

_WINDOW_PHASES: Final = frozenset(names.WINDOW_PHASES)

_NOT_SAVED: Final = frozenset({"failed", "refused"})
"""Outcomes of attempts that were meant to end in a checkpoint and did not; one that was skipped or cancelled was not."""


class CheckpointMetrics(Families):
    """Counts what saving and restoring report.

    Args:
        book: Counts slots; its kinds are the ones that windows are blamed on.
        clock: Unix time in seconds.
        monotonic: Monotonic seconds.

    Attributes:
        book: What was given.
        objectives: Seconds that a phase of the window is meant to stay under; may be set before the first window.
    """

    def __init__(
        self,
        book: SlotBook,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(clock=clock, monotonic=monotonic)
        self.book = book
        self.objectives: Mapping[str, float] = names.OBJECTIVES
        self._phase_seconds = self._histogram(names.CHECKPOINT_PHASE_SECONDS)
        self._phase_last = self._number(names.CHECKPOINT_PHASE_LAST)
        self._phase_now = self._number(names.CHECKPOINT_PHASE)
        self._phase_started = self._number(names.CHECKPOINT_PHASE_STARTED)
        self._cut_part = self._number(names.CUT_PART)
        self._attempts = self._number(names.CHECKPOINT_ATTEMPTS)
        self._failures = self._number(names.CHECKPOINT_FAILURES)
        self._bytes = self._number(names.CHECKPOINT_BYTES)
        self._groups_saved = self._number(names.CHECKPOINT_GROUPS)
        self._rows_saved = self._number(names.CHECKPOINT_ROWS)
        self._last_success = self._number(names.CHECKPOINT_LAST_SUCCESS)
        self._expected_interval = self._number(names.CHECKPOINT_EXPECTED_INTERVAL)
        self._steps_at_risk = self._number(names.STEPS_SINCE_CHECKPOINT)
        self._groups_at_risk = self._number(names.GROUPS_SINCE_CHECKPOINT)
        self._blame = self._number(names.WINDOW_BLAME)
        self._closed = self._number(names.WINDOW_CLOSED)
        self._over_objective = self._number(names.WINDOW_OVER_OBJECTIVE)
        self._stall = self._number(names.TRAINER_STALL)
        self._restore_seconds = self._number(names.RESTORE_SECONDS)
        self._restored = self._number(names.RESTORE_GROUPS)
        self._refusals = self._number(names.RESTORE_REFUSALS)

        # Phases in progress: phase -> cut id -> Unix time of its start.
        self._running: dict[str, dict[str, float]] = {phase: {} for phase in PHASES}
        # Cut id -> (steps, groups) that were done by then.
        self._work_at_cut: dict[str, tuple[float, float]] = {}
        self._steps_done = 0.0
        self._groups_done = 0.0
        self._work_saved = (0.0, 0.0)
        self._step_spacing = 0.0
        self._interval = (0.0, 0.0)  # seconds, steps

        for label in book.numbers:
            self._blame_kind(label)
        book.added = self._blame_kind

    def _blame_kind(self, label: str) -> None:
        self._blame.values.setdefault((label,), 0.0)

    # ---------------------------------------------------------------------------------------------- windows

    def window_requested(self, window_id: str, asked_ns: int) -> None:
        """Begin the drain."""
        self._begin("drain", window_id)

    def window_opened(
        self,
        window_id: str,
        drain_ns: int,
        delayed_by: tuple[tuple[str, str, int, int], ...],
        opened_ns: int,
    ) -> None:
        """End the drain, begin the exclusive phase, and note how many steps the cut covers."""
        self._end("drain", window_id, drain_ns, "completed")
        self._begin("exclusive", window_id)
        self._add_blame(delayed_by)
        while len(self._work_at_cut) >= _REMEMBERED_CUTS:
            del self._work_at_cut[next(iter(self._work_at_cut))]
        self._work_at_cut[window_id] = (self._steps_done, self._groups_done)

    def window_closed(
        self, window_id: str, drain_ns: int, exclusive_ns: int, outcome: str, closed_ns: int
    ) -> None:
        """End the exclusive phase, and note how many groups the cut covers: none changed hands inside."""
        if window_id in self._work_at_cut:
            self._work_at_cut[window_id] = (self._work_at_cut[window_id][0], self._groups_done)
        self._end("exclusive", window_id, exclusive_ns, outcome)
        self._closed.add((drain_ns + exclusive_ns) / 1e9)

    def window_abandoned(
        self,
        window_id: str,
        drain_ns: int,
        outcome: str,
        delayed_by: tuple[tuple[str, str, int, int], ...],
        ended_ns: int,
    ) -> None:
        """End a drain that led to nothing; it kept writers out all the same."""
        self._end("drain", window_id, drain_ns, outcome)
        self._add_blame(delayed_by)
        self._closed.add(drain_ns / 1e9)

    def _add_blame(self, delayed_by: tuple[tuple[str, str, int, int], ...]) -> None:
        for kind, nanoseconds in blame_ns(delayed_by).items():
            self._blame.add(nanoseconds / 1e9, self.book.label(kind))

    # ------------------------------------------------------------------------------------------- checkpoint

    def phase_started(self, cut_id: str, phase: str) -> None:
        """Begin a phase; drain and exclusive are the barrier's to report, also where nothing is saved."""
        if phase not in _WINDOW_PHASES:
            self._begin(phase, cut_id)

    def phase_ended(self, cut_id: str, phase: str, ns: int, outcome: str) -> None:
        """End a phase; see :meth:`phase_started`."""
        if phase not in _WINDOW_PHASES:
            self._end(phase, cut_id, ns, outcome)

    def _begin(self, phase: str, cut_id: str) -> None:
        running = self._running[phase]
        running[cut_id] = self._clock()
        self._phase_now.set(1.0, phase)
        self._phase_started.set(min(running.values()), phase)

    def _end(self, phase: str, cut_id: str, ns: int, outcome: str) -> None:
        self._forget(phase, cut_id)
        self._phase_seconds.observe(ns, phase, outcome if outcome in names.ENDED else "failed")
        self._phase_last.set(ns / 1e9, phase)
        objective = self.objectives.get(phase)
        if objective is not None and ns > objective * 1e9:
            self._over_objective.add(1, phase)

    def _forget(self, phase: str, cut_id: str) -> None:
        running = self._running[phase]
        if running.pop(cut_id, None) is None:
            return
        if running:
            self._phase_started.set(min(running.values()), phase)
        else:
            self._phase_now.set(0.0, phase)

    def cut_part_captured(self, cut_id: str, part: str, ns: int) -> None:
        """Note how long a part of the cut took."""
        self._cut_part.set(ns / 1e9, part)

    def checkpoint_ended(
        self,
        cut_id: str,
        step: int,
        outcome: str,
        reason: str,
        groups: Mapping[str, int],
        rows: int,
        num_bytes: int,
    ) -> None:
        """Count an attempt; a completed one moves what a crash would cost back to what came after its cut."""
        for phase in self._running:
            self._forget(phase, cut_id)
        work = self._work_at_cut.pop(cut_id, None)
        if outcome != "completed":
            label = known(reason, names.CHECKPOINT_REASONS) if reason else names.OTHER
            self._attempts.add(1, outcome, label)
            if outcome in _NOT_SAVED:
                self._failures.add(1)
            return
        self._attempts.add(1, "completed", "")
        self._failures.set(0.0)
        self._last_success.set(self._clock())
        self._rows_saved.set(rows)
        self._bytes.set(num_bytes, "all")
        for owner in OWNERS:
            self._groups_saved.set(groups.get(owner, 0), owner)
        if work is not None:
            self._work_saved = work
            self._note_risk()

    def saved(self, part_bytes: Mapping[str, int]) -> None:
        """Take what a checkpointer says about the parts of the last checkpoint; called at every scrape."""
        for part, num_bytes in part_bytes.items():
            self._bytes.set(num_bytes, part)

    def trainer_stalled(self, cause: str, ns: int) -> None:
        """Add up what saving cost the trainer."""
        self._stall.add(ns / 1e9, cause)

    def expect_checkpoints(self, *, seconds: float = 0.0, steps: float = 0.0) -> None:
        """Say how often the run means to save: in seconds, or in steps, whose pace then tells the seconds."""
        self._interval = (seconds, steps)
        self._note_interval()

    def _note_interval(self) -> None:
        seconds, steps = self._interval
        self._expected_interval.set(seconds or steps * self._step_spacing)

    def _note_risk(self) -> None:
        steps, groups = self._work_saved
        self._steps_at_risk.set(self._steps_done - steps)
        self._groups_at_risk.set(self._groups_done - groups)

    def restore_ended(
        self, outcome: str, reason: str, parts: Mapping[str, int], groups: Mapping[str, int]
    ) -> None:
        """Count a restore."""
        seconds = dict.fromkeys(names.RESTORE_PARTS, 0.0)
        for part, ns in parts.items():
            seconds[known(part, names.RESTORE_PARTS)] += ns / 1e9
        for part, value in seconds.items():
            self._restore_seconds.set(value, part)
        if outcome != "completed":
            self._refusals.add(1, known(reason, names.RESTORE_REASONS))
            return
        for owner, count in groups.items():
            self._restored.add(count, owner)


def blame_ns(delayed_by: Iterable[tuple[str, str, int, int]]) -> dict[str, int]:
    """Return for how long at least one slot of each kind was open while a window drained.

    Args:
        delayed_by: (kind, task name, from ns, to ns) of each slot that was waited for.

    Returns:
        Nanoseconds by kind. Slots of one kind that overlap are charged once; kinds overlap each other.
    """
    spans: dict[str, list[tuple[int, int]]] = {}
    for kind, _, start, end in delayed_by:
        spans.setdefault(kind, []).append((start, end))
    blame: dict[str, int] = {}
    for kind, intervals in spans.items():
        total = 0
        reached = 0
        for start, end in sorted(intervals):
            total += max(0, end - max(start, reached))
            reached = max(reached, end)
        blame[kind] = total
    return blame
