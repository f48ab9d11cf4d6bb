"""The observer that turns hooks into numbers.

Rule: a slot's hook bumps plain lists and returns; everything rarer may bump a dict. Nothing is formatted,
timed or locked here, and no object of a metrics library is touched: the collector does that when somebody
scrapes. Nothing here suspends.

``slot_opened`` is not implemented on purpose. ``slot_closed`` carries the wait as well, so one call per slot
is enough; slots that still wait or are still held are seen in the barrier's own statistics.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from quiesce.barrier import KINDS
from quiesce.telemetry import names
from quiesce.telemetry.histogram import (
    NANOSECONDS,
    Histogram,
    HistogramFamily,
    NumberFamily,
    bounds_ns,
    known,
)
from quiesce.types import OWNERS, PHASES

if TYPE_CHECKING:
    from quiesce.telemetry.names import Metric

__all__ = ["KIND_LIMIT", "MetricsObserver", "SlotNumbers", "blame_ns"]

KIND_LIMIT: Final = 20
"""Kinds of slots with series of their own, the built-in ones included; further ones are counted as ``other``.
A kind costs about 65 series, and a controller has 2,000."""

_REMEMBERED_CUTS: Final = 64
"""Cuts whose outcome may still be unknown. A program that uses the barrier alone never reports one."""

_SMOOTHING: Final = 0.2
"""Weight of the newest step in the smoothed time from step to step; about the last ten steps count."""

_SLOT_BOUNDS: Final = bounds_ns(names.SLOT_BUCKETS)
_WINDOW_PHASES: Final = frozenset(names.WINDOW_PHASES)


# Where a slot's numbers lie in the one list of its kind: wait counts and their sum, hold counts and their
# sum, outcomes.
_WAIT_SUM: Final = len(_SLOT_BOUNDS) + 1
_HOLD: Final = _WAIT_SUM + 1
_HOLD_SUM: Final = _HOLD + len(_SLOT_BOUNDS) + 1
_ENDED: Final = {outcome: _HOLD_SUM + 1 + index for index, outcome in enumerate(names.ENDED)}
_COMPLETED: Final = _ENDED["completed"]


class SlotNumbers:
    """What is counted about the slots of one kind, all in one list.

    Attributes:
        cells: The list.
        wait: Waits, in nanoseconds.
        hold: Holds, in nanoseconds.
    """

    __slots__ = ("cells", "hold", "wait")

    def __init__(self) -> None:
        self.cells: list[float] = [0] * (_HOLD_SUM + 1 + len(_ENDED))
        self.wait = Histogram(names.SLOT_BUCKETS, scale=NANOSECONDS, cells=self.cells)
        self.hold = Histogram(names.SLOT_BUCKETS, scale=NANOSECONDS, cells=self.cells, start=_HOLD)

    @property
    def ended(self) -> dict[str, int]:
        """Slots by outcome."""
        return {outcome: int(self.cells[index]) for outcome, index in _ENDED.items()}


class MetricsObserver:
    """Counts what hooks report. Subscribe it to a hub, and give it to a collector.

    Args:
        clock: Unix time in seconds.
        monotonic: Monotonic seconds.

    Attributes:
        slots: Numbers of each kind of slot.
        families: Every family that hooks feed, by metric name.
        seen: Roles of whose primitives a hook has reported.
    """

    def __init__(
        self, *, clock: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._monotonic = monotonic
        self.families: dict[str, HistogramFamily | NumberFamily] = {}
        self.seen: set[str] = set()
        self.slots: dict[str, SlotNumbers] = {}
        self._cells: dict[str, list[float]] = {}  # by kind; kinds past the limit share one list

        self._phase_seconds = self._histogram(names.CHECKPOINT_PHASE_SECONDS)
        self._admission_wait = self._histogram(names.ADMISSION_WAIT)
        self._dataplane_op = self._histogram(names.DATAPLANE_OP)
        self._staleness = self._histogram(names.STALENESS)
        self._step_seconds = self._histogram(names.TRAIN_STEP_SECONDS)

        self._phase_last = self._number(names.CHECKPOINT_PHASE_LAST)
        self._phase_now = self._number(names.CHECKPOINT_PHASE)
        self._phase_started = self._number(names.CHECKPOINT_PHASE_STARTED)
        self._cut_part = self._number(names.CUT_PART)
        self._attempts = self._number(names.CHECKPOINT_ATTEMPTS)
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
        self._idle = self._number(names.TRAIN_IDLE)
        self._restore_seconds = self._number(names.RESTORE_SECONDS)
        self._restored = self._number(names.RESTORE_GROUPS)
        self._refusals = self._number(names.RESTORE_REFUSALS)
        self._commits = self._number(names.ADMISSION_COMMITS)
        self._moved = self._number(names.GROUPS_MOVED)
        self._active = self._number(names.INVARIANT_ACTIVE)
        self._checks = self._number(names.INVARIANT_CHECKS)
        self._violations = self._number(names.INVARIANT_VIOLATIONS)
        self._last_violation = self._number(names.INVARIANT_LAST_VIOLATION)
        self._reward = self._number(names.TRAIN_REWARD, float("nan"))
        self._loss = self._number(names.TRAIN_LOSS, float("nan"))
        self._kl = self._number(names.TRAIN_KL, float("nan"))
        self._tokens = self._number(names.TOKENS_GENERATED)
        self._trained = self._number(names.GROUPS_TRAINED)
        self._run_state = self._number(names.RUN_STATE)
        started = self._number(names.RUN_STARTED)
        started.set(clock())

        # Phases in progress: phase -> cut id -> Unix time of its start.
        self._running: dict[str, dict[str, float]] = {phase: {} for phase in PHASES}
        self._work_at_cut: dict[
            str, tuple[float, float]
        ] = {}  # cut id -> (steps, groups) that were done by then
        self._steps_done = 0.0
        self._groups_done = 0.0
        self._work_saved = (0.0, 0.0)
        self._step_ended_at: float | None = None
        self._step_spacing = 0.0
        self._interval = (0.0, 0.0)  # seconds, steps

        self.add_kinds(KINDS)

    def _histogram(self, metric: Metric) -> HistogramFamily:
        family = self.families[metric.name] = HistogramFamily(metric)
        return family

    def _number(self, metric: Metric, value: float = 0.0) -> NumberFamily:
        family = self.families[metric.name] = NumberFamily(metric, value)
        return family

    # ------------------------------------------------------------------------------------------------ slots

    def add_kinds(self, kinds: Iterable[str]) -> None:
        """Make the numbers of further kinds of slots, at zero."""
        for kind in kinds:
            if kind not in self._cells:
                self._add_kind(kind)

    def _add_kind(self, kind: str) -> str:
        """Make room for a kind, and return the label under which it is counted."""
        label = kind if len(self.slots) < KIND_LIMIT or kind in self.slots else names.OTHER
        # setdefault: two threads may meet here, and both must bump the same lists.
        numbers = self.slots.setdefault(label, SlotNumbers())
        self._blame.values.setdefault((label,), 0.0)
        self._cells[kind] = numbers.cells
        return label

    def slot_closed(self, kind: str, wait_ns: int, hold_ns: int, outcome: str) -> None:
        """Count a slot: the one hook that may be called thousands of times a second."""
        cells = self._cells.get(kind)
        if cells is None:
            self._add_kind(kind)
            cells = self._cells[kind]
        # Each number is bumped by itself and none is derived from others: a scrape between two bumps must
        # never see one that is taken back later, which Prometheus would read as a restart of the counter.
        if wait_ns:
            cells[bisect_left(_SLOT_BOUNDS, wait_ns)] += 1
            cells[_WAIT_SUM] += wait_ns
        else:
            cells[0] += 1
        cells[_HOLD + bisect_left(_SLOT_BOUNDS, hold_ns)] += 1
        cells[_HOLD_SUM] += hold_ns
        if outcome == "completed":
            cells[_COMPLETED] += 1
        else:
            cells[_ENDED[outcome]] += 1

    def slot_wait_abandoned(self, kind: str, wait_ns: int, outcome: str) -> None:
        """Count a slot that was never held."""
        self.add_kinds((kind,))
        cells = self._cells[kind]
        cells[bisect_left(_SLOT_BOUNDS, wait_ns)] += 1
        cells[_WAIT_SUM] += wait_ns
        cells[_ENDED[outcome]] += 1

    # ---------------------------------------------------------------------------------------------- windows

    def window_requested(self, window_id: str) -> None:
        """Begin the drain."""
        self._begin("drain", window_id)

    def window_opened(
        self, window_id: str, drain_ns: int, delayed_by: tuple[tuple[str, str, int, int], ...]
    ) -> None:
        """End the drain, begin the exclusive phase, and note how much work the cut covers."""
        self._end("drain", window_id, drain_ns, "completed")
        self._begin("exclusive", window_id)
        self._add_blame(delayed_by)
        while len(self._work_at_cut) >= _REMEMBERED_CUTS:
            del self._work_at_cut[next(iter(self._work_at_cut))]
        self._work_at_cut[window_id] = (self._steps_done, self._groups_done)

    def window_closed(self, window_id: str, drain_ns: int, exclusive_ns: int, outcome: str) -> None:
        """End the exclusive phase."""
        self._end("exclusive", window_id, exclusive_ns, outcome)
        self._closed.add((drain_ns + exclusive_ns) / 1e9)

    def window_abandoned(
        self, window_id: str, drain_ns: int, outcome: str, delayed_by: tuple[tuple[str, str, int, int], ...]
    ) -> None:
        """End a drain that led to nothing; it kept writers out all the same."""
        self._end("drain", window_id, drain_ns, outcome)
        self._add_blame(delayed_by)
        self._closed.add(drain_ns / 1e9)

    def _add_blame(self, delayed_by: tuple[tuple[str, str, int, int], ...]) -> None:
        for kind, nanoseconds in blame_ns(delayed_by).items():
            label = kind if kind in self.slots else self._add_kind(kind)
            self._blame.add(nanoseconds / 1e9, label)

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
        objective = names.OBJECTIVES.get(phase)
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
            return
        self._attempts.add(1, "completed", "")
        self._last_success.set(self._clock())
        self._rows_saved.set(rows)
        self._bytes.set(num_bytes, "all")
        for owner in OWNERS:
            self._groups_saved.set(groups.get(owner, 0), owner)
        if work is not None:
            self._work_saved = work
            self._note_risk()

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

    # ------------------------------------------------------------------------------ ownership and data plane

    def owner_moved(self, group_id: str, source: str, target: str, reason: str) -> None:
        """Count a move."""
        self.seen.add("ledger")
        self._moved.add(1, source, target)
        if target == "buffer":
            self._groups_done += 1
            self._note_risk()

    def admission_waited(self, ns: int) -> None:
        """Count a wait at the gate."""
        self.seen.add("sampler")
        self._admission_wait.observe(ns)

    def admission_committed(self, path: str, cursor: int, target_step: int | None, groups: int) -> None:
        """Count an admitted batch."""
        self.seen.add("sampler")
        self._commits.add(1, path)

    def dataplane_operated(self, op: str, ns: int, rows: int, outcome: str) -> None:
        """Count an operation."""
        self.seen.add("dataplane")
        self._dataplane_op.observe(ns, op)

    # ------------------------------------------------------------------------------------------- invariants

    def invariant_checked(self, name: str) -> None:
        """Count a check; from now on it is known that the invariant is looked at."""
        self._checks.add(1, name)
        self._active.set(1.0, name)

    def invariant_violated(self, violation: Any) -> None:  # noqa: ANN401 - a Violation, as the hook says
        """Count a violation."""
        name = str(violation.invariant)
        self._violations.add(1, name)
        self._last_violation.set(self._clock(), name)
        self._active.set(1.0, name)

    # --------------------------------------------------------------------------------------------- training

    def train_step_ended(
        self, step: int, version: int, ns: int, groups: int, outcome: str, metrics: Mapping[str, float]
    ) -> None:
        """Count a step, and keep what it reports."""
        self.seen.add("trainer_version")
        now = self._monotonic()
        if self._step_ended_at is not None:
            spacing = now - self._step_ended_at
            known_spacing = self._step_spacing or spacing
            self._step_spacing = known_spacing + _SMOOTHING * (spacing - known_spacing)
            self._note_interval()
        self._step_ended_at = now
        if outcome in {"completed", "skipped"}:
            self._steps_done += 1
            self._note_risk()
        if outcome != "completed":
            return
        self._step_seconds.observe(ns)
        self._trained.add(groups)
        for name, family in (("reward", self._reward), ("loss", self._loss), ("kl", self._kl)):
            if name in metrics:
                family.set(float(metrics[name]))
        if "staleness" in metrics:
            self._staleness.observe(float(metrics["staleness"]))

    def train_idled(self, cause: str, ns: int) -> None:
        """Add up what the trainer waited for."""
        self.seen.add("trainer_version")
        self._idle.add(ns / 1e9, cause)

    def rollout_ended(self, group_id: str, attempt: int, ns: int, outcome: str, tokens: int) -> None:
        """Add up generated tokens."""
        self.seen.add("trainer_version")
        self._tokens.add(tokens)

    def run_state_changed(self, state: str) -> None:
        """Keep the state."""
        self._run_state.set_only(state)


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
