"""The observer that turns hooks into numbers.

Rule: a slot's hook bumps plain lists and returns; everything rarer may bump a dict. A hook that runs for each group or row
has a sibling that counts many of its calls at once, for whoever has kept them. Nothing is formatted, timed or locked
here, and no object of a metrics library is touched: the collector does that when somebody scrapes. Nothing here suspends.

``slot_opened`` is not implemented on purpose. ``slot_closed`` carries the wait as well, so one call per slot
is enough; slots that still wait or are still held are seen in the barrier's own statistics.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from quiesce.telemetry import names
from quiesce.telemetry.checkpoint_metrics import CheckpointMetrics, blame_ns
from quiesce.telemetry.families import Named
from quiesce.telemetry.gate_metrics import GateMetrics
from quiesce.telemetry.slots import KIND_LIMIT, SlotBook, SlotNumbers

__all__ = ["KIND_LIMIT", "MetricsObserver", "SlotNumbers", "blame_ns"]

_SMOOTHING: Final = 0.2
"""Weight of the newest step in the smoothed time from step to step; about the last ten steps count."""


class MetricsObserver(CheckpointMetrics, GateMetrics):
    """Counts what hooks report. Subscribe it to a hub, and give it to a collector.

    Args:
        clock: Unix time in seconds.
        monotonic: Monotonic seconds.
        book: Counts slots: a :class:`~quiesce.telemetry.slots.SlotRecorder` keeps a record of each as well.

    Attributes:
        slots: Numbers of each kind of slot.
        slot_closed: The book's own hook, so that a slot pays for one call.
        slot_wait_abandoned: The book's own hook.
        export_seconds: Time that sinks take, for whoever calls them.
        slot_cost_ns: What this costs a slot, as far as somebody has measured it.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        book: SlotBook | None = None,
    ) -> None:
        book = SlotBook() if book is None else book
        CheckpointMetrics.__init__(self, book, clock=clock, monotonic=monotonic)
        self.slots = book.numbers
        self.slot_cost_ns = 0.0
        self.slot_closed = book.slot_closed
        self.slot_wait_abandoned = book.slot_wait_abandoned
        self.add_kinds = book.add_kinds

        self._admission_wait = self._histogram(names.ADMISSION_WAIT)
        self._dataplane_op = self._histogram(names.DATAPLANE_OP)
        self._staleness = self._histogram(names.STALENESS)
        self._step_seconds = self._histogram(names.TRAIN_STEP_SECONDS)
        self._idle = self._number(names.TRAIN_IDLE)
        self._commits = self._number(names.ADMISSION_COMMITS)
        self._moved = self._number(names.GROUPS_MOVED)
        self._active = self._number(names.INVARIANT_ACTIVE)
        self._checks = self._number(names.INVARIANT_CHECKS)
        self._violations = self._number(names.INVARIANT_VIOLATIONS)
        self._last_violation = self._number(names.INVARIANT_LAST_VIOLATION)
        self._invariants = Named(
            names.INVARIANTS, self._active, self._checks, self._violations, self._last_violation
        )
        self._reward = self._number(names.TRAIN_REWARD, float("nan"))
        self._loss = self._number(names.TRAIN_LOSS, float("nan"))
        self._kl = self._number(names.TRAIN_KL, float("nan"))
        self._tokens = self._number(names.TOKENS_GENERATED)
        self._trained = self._number(names.GROUPS_TRAINED)
        self._run_state = self._number(names.RUN_STATE)
        self.export_seconds = self._histogram(names.TELEMETRY_EXPORT)
        started = self._number(names.RUN_STARTED)
        started.set(clock())
        self._step_ended_at: float | None = None

    # ------------------------------------------------------------------------------ ownership and data plane

    def owner_moved(self, group_id: str, source: str, target: str, reason: str) -> None:
        """Count a move."""
        self.owners_moved([(group_id, source, target, reason)])

    def owners_moved(self, calls: Sequence[tuple[str, str, str, str]]) -> None:
        """Count moves, all of them or, where the catalogue does not know one, none."""
        self.seen.add("ledger")
        moves = Counter([(source, target) for _, source, target, _ in calls])
        unknown = moves.keys() - self._moved.values.keys()
        if unknown:
            raise KeyError(*unknown)
        done = 0
        for labels, count in moves.items():
            self._moved.add(count, *labels)
            if labels[1] == "buffer":
                done += count
        if done:
            self._groups_done += done
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
        self.dataplane_operations([(op, ns, rows, outcome)])

    def dataplane_operations(self, calls: Sequence[tuple[str, int, int, str]]) -> None:
        """Count operations, all of them or, where the catalogue does not know one, none."""
        self.seen.add("dataplane")
        by_op: dict[str, list[int]] = {}
        for op, ns, _, _ in calls:
            by_op.setdefault(op, []).append(ns)
        found = [(self._dataplane_op.children[op,], took) for op, took in by_op.items()]
        for histogram, took in found:
            histogram.observe_all(took)

    # ------------------------------------------------------------------------------------------- invariants

    def invariant_checked(self, name: str) -> None:
        """Count a check; from now on it is known that the invariant is looked at."""
        label = self._invariants.label(name)
        self._checks.add(1, label)
        self._active.set(1.0, label)

    def invariant_violated(self, violation: Any) -> None:  # noqa: ANN401 - a Violation, as the hook says
        """Count a fault: whoever reports one that lasts, does so once."""
        label = self._invariants.label(str(violation.invariant))
        self._violations.add(1, label)
        self._last_violation.set(self._clock(), label)
        self._active.set(1.0, label)

    def audited(self, active: Iterable[str], last_seen: Mapping[str, float]) -> None:
        """Take what an auditor knows beside what it reported; called at every scrape.

        Args:
            active: The invariants that it watches.
            last_seen: Unix time at which an open record was seen last, by invariant: also of records of earlier
                incarnations, and of faults that are seen again and again.
        """
        for name in active:
            self._active.set(1.0, self._invariants.label(name))
        for name, unix_time in last_seen.items():
            label = self._invariants.label(name)
            self._active.set(1.0, label)
            self._last_violation.set(max(unix_time, self._last_violation.values[label,]), label)

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
        self.rollouts_ended([(group_id, attempt, ns, outcome, tokens)])

    def rollouts_ended(self, calls: Sequence[tuple[str, int, int, str, int]]) -> None:
        """Add up the generated tokens of rollouts."""
        self.seen.add("trainer_version")
        self._tokens.add(sum([tokens for *_, tokens in calls]))

    def run_state_changed(self, state: str) -> None:
        """Keep the state."""
        self._run_state.set_only(state)
