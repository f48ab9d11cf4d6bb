"""Every invariant that events can show, judged an event at a time, at a cost that does not grow with the run.

It is an observer: each hook updates a few counters, or one byte of the shadow, and compares them. What contradicts is
handed to ``report`` and the shadow takes the newer word, so that one fault is one finding.

====================================  =========================================================================
event                                 what is compared
====================================  =========================================================================
a move                                where the shadow has the group; that a slot is open and no window
a slot, a window                      that they exclude each other
an admission                          cursor + 1 = admissions; the gate; the stamp, and that nobody has it
a part of a cut                       that its window is open; one mutation version; at the end, all six
a version                             that it grew
a phase of a checkpoint               its budget
a gate's event                        see :mod:`quiesce.invariants.gate_events`; a fraction of a second later
====================================  =========================================================================

Rule: hooks report, and call nothing back. Nothing here suspends; only gate hooks come from other threads.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, Final

from quiesce.auditor.ring import EventRing
from quiesce.auditor.shadow import BUFFER, CODES, LEDGER, LOST, NAMES, NONE, OWNED, Shadow
from quiesce.checkpoint.cut import PARTS
from quiesce.invariants.gate_events import GateChecker
from quiesce.invariants.violation import Severity, Violation
from quiesce.types import OWNERS

if TYPE_CHECKING:
    from quiesce.auditor.record import Origin
    from quiesce.owners import Owners
    from quiesce.types import BufferEntry, GroupRecord

__all__ = ["PHASE_BUDGETS", "Incremental"]

PHASE_BUDGETS: Final = {"drain": 60.0, "exclusive": 5.0, "write": 600.0}
"""Seconds that a phase of a checkpoint may take: what its deadlines allow, so an objective is stricter."""

DIRTY: Final = 1024
"""Groups that the sweep is asked to look at first."""

GATE_LOG: Final = 256
"""Gate events that wait for the sweep; at more than that whoever reports the next one has them judged."""

_get_ident: Final = threading.get_ident

Report = Callable[[Violation, "Origin"], None]


def _unheard(_event: tuple[str, str, int, str, str, int]) -> None:
    """Stand for the log of gate events while nobody listens."""


class Incremental:
    """Judges events.

    Args:
        owners: The owners, for what events do not carry: a cursor or a version is read, never an owner of a group.
        report: Takes findings; from any thread.
        known: Tells whether a group was found at fault before, by an invariant.
        ring: Takes the last events; None makes one.
        gate_window: How far the cursor may be ahead of the trainer version; None for a sampler without a gate.
        budgets: Seconds by phase.
        clock: Monotonic nanoseconds.

    Attributes:
        shadow: Who owns what, as far as events say.
        ring: The last events.
        dirty: Groups whose rows may just have become wrong.
    """

    def __init__(
        self,
        owners: Owners,
        *,
        report: Report,
        known: Callable[[str, str], bool],
        ring: EventRing | None = None,
        gate_window: int | None = None,
        budgets: Mapping[str, float] | None = None,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self.shadow = Shadow()
        self._move = self.shadow.move
        self.ring = EventRing() if ring is None else ring
        self.dirty: deque[str] = deque(maxlen=DIRTY)
        self.window = ""
        self.gates_seen = False
        self.cursor = owners.sampler.dispatch_cursor
        self._owners = owners
        self._barrier = owners.barrier
        self._report = report
        self._known = known
        self._gate_window = gate_window
        self._budgets = dict(PHASE_BUDGETS if budgets is None else budgets)
        self._clock = clock
        self._note = self.ring.append
        self._now = clock()  # of the slot that opened last: asking for each move would be a tenth of its cost
        statistics = self._barrier.statistics()
        self._slots = sum(statistics.active.values())
        self._certain = self._slots == 0
        self._reads_due = 0
        self.hunt = False
        self.reserved = 0
        self.version = owners.versions.value
        self.step = owners.step
        self.mutation_version = self._barrier.mutation_version
        self._stamped: dict[int, int] = {}
        self._parts: list[str] = []
        self._cut_version = 0
        self._phases: dict[tuple[str, str], int] = {}
        self._late: set[tuple[str, str]] = set()
        self._gates = GateChecker()
        self._gate_log: deque[tuple[str, str, int, str, str, int]] = deque()
        self._log_gate: Callable[[tuple[str, str, int, str, str, int]], None] = _unheard
        self._gate_lock = threading.Lock()
        self._seed()

    # ---------------------------------------------------------------------------------------------------- owners

    def owner_moved(self, group_id: str, source: str, target: str, reason: str) -> None:
        """Compare a move with where the shadow has the group."""
        if self._slots and not self.window:
            self._note((self._now, group_id, source, target, reason))
        else:
            self._note((self._clock(), group_id, source, target, reason))
            self._outside(f"group {group_id} moved from {source} to {target}", (group_id,))
        code = CODES[target]
        before = self._move(group_id, code)
        if source == "read":
            self._reads_due -= 1
            if code == LEDGER:
                self.reserved += 1
        elif code == BUFFER:
            self.dirty.append(group_id)
        elif code == LEDGER:
            self._from_spares(group_id)
        if before != CODES[source]:
            self._contradiction(group_id, before, source, target)

    def prompts_read(self, count: int) -> None:
        """Note that so many prompts need an owner before their slot is over."""
        self._reads_due += count

    def _from_spares(self, group_id: str) -> None:
        record = self._owners.ledger.find(group_id)
        self.reserved += record is not None and record.phase == "reserved"

    def _contradiction(self, group_id: str, before: int, source: str, target: str) -> None:
        if before == LOST or self._known("single_owner", group_id):
            return  # what follows from a fault that was reported is no further one
        evidence: dict[str, Any] = {"shadow": NAMES[before], "source": source, "target": target}
        if before in OWNED:
            other = target if source == "read" else source
            owners = tuple(owner for owner in OWNERS if owner in {NAMES[before], other})
            what = f"moved from {source} to {target} although {NAMES[before]} owns it"
            self._found("single_owner", f"group {group_id} {what}", (group_id,), owners=owners, **evidence)
            return
        what = "was never read" if before == NONE else f"was {NAMES[before]} already"
        message = f"group {group_id} moved from {source} to {target}, but it {what}"
        self._found("conservation", message, (group_id,), **evidence)

    # -------------------------------------------------------------------------------------------- slots, windows

    def slot_opened(self, kind: str, wait_ns: int, opened_ns: int) -> None:
        """Count it; none opens inside a window."""
        self._now = opened_ns
        self._slots += 1
        if self.window:
            self._outside(f"a {kind} slot opened", ())

    def slot_closed(self, kind: str, wait_ns: int, hold_ns: int, outcome: str, ended_ns: int) -> None:
        """Count it; whatever was read in it has an owner now."""
        if self._slots:
            self._slots -= 1
        if self._reads_due:
            self._reads_due = 0
            self.hunt = True  # which prompts they are, the sweep finds out, and finds at once

    def window_opened(
        self, window_id: str, drain_ns: int, delayed_by: tuple[tuple[str, str, int, int], ...], opened_ns: int
    ) -> None:
        """No slot is open, and no other window."""
        self._note((self._clock(), "", "window_opened", window_id, ""))
        if not self._certain:
            self._slots, self._certain = 0, True  # the auditor came while slots were open
        elif self._slots or self.window:
            self._found(
                "window_is_exclusive",
                f"window {window_id} opened with {self._slots} slots open"
                + (f" inside window {self.window}" if self.window else ""),
                cut_id=window_id,
                slots=self._slots,
                window=self.window,
            )
        self.window = window_id
        self._parts.clear()
        self._cut_version = self._version_now()

    def window_closed(
        self, window_id: str, drain_ns: int, exclusive_ns: int, outcome: str, closed_ns: int
    ) -> None:
        """Whoever captured a part has captured all of them."""
        self._note((self._clock(), "", "window_closed", window_id, outcome))
        missing = [part for part in PARTS if part not in self._parts]
        if outcome == "completed" and self._parts and missing:
            message = f"cut {window_id} was captured without {', '.join(missing)}"
            self._found("cut_is_one_instant", message, cut_id=window_id, parts=dict.fromkeys(missing))
        self.window = ""
        self._parts.clear()

    def cut_part_captured(self, cut_id: str, part: str, ns: int) -> None:
        """It is a part of the open window's cut, and nothing has changed since the window opened."""
        now = self._version_now()
        self._parts.append(part)
        if cut_id != self.window or now != self._cut_version:
            told = {part: {"cut_id": cut_id, "mutation_version": now}}
            self._found(
                "cut_is_one_instant",
                f"{part} of cut {cut_id} was captured at mutation version {now}, in window {self.window or 'none'} "
                f"that opened at {self._cut_version}",
                cut_id=cut_id,
                mutation_version=self._cut_version,
                parts=told,
            )

    def _outside(self, what: str, groups: tuple[str, ...]) -> None:
        if self.window:
            where = f"inside the exclusive window {self.window}"
        elif self._certain:
            where = "in no slot, so that nothing keeps it out of a window"
        else:
            return
        self._found("window_is_exclusive", f"{what} {where}", groups, cut_id=self.window, window=self.window)

    # ------------------------------------------------------------------------------------- admission, versions

    def admission_committed(self, path: str, cursor: int, target_step: int | None, groups: int) -> None:
        """One more admission: the cursor is one further, its gate was open, its stamp is new."""
        self._note((self._clock(), "", "admission_committed", cursor, target_step))
        if self.window or not self._slots:
            self._outside(f"admission {cursor} was committed", ())
        if cursor != self.cursor + 1:
            self._found(
                "cursor_within_lookahead",
                f"the dispatch cursor is {cursor} after {self.cursor + 2} committed admissions",
                cursor=cursor,
                admissions=self.cursor + 2,
            )
        self.cursor = cursor
        window = self._gate_window
        if window is not None and cursor > self.version + window:
            self._found(
                "cursor_within_lookahead",
                f"admission {cursor} was committed, but at trainer version {self.version} the gate shuts at "
                f"{self.version + window}",
                cursor=cursor,
                trainer_version=self.version,
                gate_window=window,
            )
        if groups > self.reserved:
            self._found(
                "cursor_within_lookahead",
                f"admission {cursor} has {groups} groups, but only {self.reserved} were reserved: some were admitted twice",
                groups_admitted=groups,
                groups_reserved=self.reserved,
            )
        self.reserved = self.reserved - groups if groups < self.reserved else 0
        if target_step is not None:
            if target_step <= cursor and target_step not in self._stamped:
                self._stamped[target_step] = cursor
            else:
                self._stamp(cursor, target_step)

    def _stamp(self, cursor: int, step: int) -> None:
        if step > cursor:
            records = self._owners.ledger.records()
            self._found(
                "cursor_covers_buffer",
                f"the dispatch cursor is {cursor}, but its admission is stamped with step {step}",
                [record.group_id for record in records if record.target_step == step],
                cursor=cursor,
                target_steps={"admitted": step},
            )
            return  # that its proper admission comes later is no second fault
        if step in self._stamped:
            self._found(
                "cursor_within_lookahead",
                f"step {step} is stamped for admission {self._stamped[step]} and for admission {cursor}",
                target_step=step,
                admissions=[self._stamped[step], cursor],
            )
        self._stamped[step] = cursor

    def version_advanced(self, version: int) -> None:
        """It grew."""
        self._note((self._clock(), "", "version_advanced", version, ""))
        if version <= self.version:
            self.went_back("trainer version", self.version, version)
        self.version = version
        while self._stamped and (step := next(iter(self._stamped))) < version:
            del self._stamped[step]  # admissions stamp steps in order, so the oldest is first

    def went_back(self, what: str, before: int, now: int, origin: Origin = "live") -> None:
        """Report a counter that only grows."""
        self._found(
            "versions_grow",
            f"the {what} went back from {before} to {now}",
            origin=origin,
            back={what: {"before": before, "now": now}},
        )

    def _version_now(self) -> int:
        now = self._barrier.mutation_version
        if now < self.mutation_version:
            self.went_back("mutation version", self.mutation_version, now)
        self.mutation_version = now
        return now

    # -------------------------------------------------------------------------------------------------- progress

    def phase_started(self, cut_id: str, phase: str) -> None:
        """Note when."""
        self._note((self._clock(), "", "phase_started", phase, cut_id))
        if phase in self._budgets:
            self._phases[cut_id, phase] = self._clock()

    def phase_ended(self, cut_id: str, phase: str, ns: int, outcome: str) -> None:
        """It took no longer than it may."""
        began = self._phases.pop((cut_id, phase), None)
        if (cut_id, phase) in self._late:
            self._late.discard((cut_id, phase))
        elif began is not None:
            self._progress(cut_id, phase, ns, "took")

    def look_at_phases(self) -> None:
        """Report the phases in progress that are late; each once."""
        now = self._clock()
        for (cut_id, phase), began in list(self._phases.items()):
            if (cut_id, phase) not in self._late and self._progress(
                cut_id, phase, now - began, "has taken", "sweep"
            ):
                self._late.add((cut_id, phase))

    def _progress(self, cut_id: str, phase: str, ns: int, took: str, origin: Origin = "live") -> bool:
        seconds, budget = ns / 1e9, self._budgets[phase]
        if seconds <= budget:
            return False
        self._found(
            "checkpoint_progress",
            f"{phase} of cut {cut_id} {took} {seconds:.1f} s, its budget is {budget:g} s",
            origin=origin,
            severity="warning",
            cut_id=cut_id,
            phase=phase,
            seconds=seconds,
            budget=budget,
        )
        return True

    # ----------------------------------------------------------------------------------------------------- gates

    def hear_gates(self, heard: bool) -> None:  # noqa: FBT001 - on or off
        """Begin or cease to write down what gates report, all their hooks at one moment.

        A hub adds and removes an observer's hooks one after the other, and threads go on reporting meanwhile: one whose
        grant was not heard and whose clear was would seem to clear without a permit.
        """
        self._log_gate = self._gate_log.append if heard else _unheard

    def permit_granted(self, worker: str, sequence: int, wait_ns: int) -> None:
        """Write it down, in the order of arrival; a writer does not wait for its judgement."""
        self._log_gate(("permit_granted", worker, sequence, "", "", _get_ident()))
        if len(self._gate_log) > GATE_LOG:
            self.judge_gates()

    def permit_released(self, worker: str, sequence: int, hold_ns: int) -> None:
        """Write it down."""
        self._log_gate(("permit_released", worker, sequence, "", "", _get_ident()))
        if len(self._gate_log) > GATE_LOG:
            self.judge_gates()

    def gate_closing(self, worker: str, sequence: int, epoch: str) -> None:
        """Write it down."""
        self._log_gate(("gate_closing", worker, sequence, epoch, "", _get_ident()))

    def gate_closed(self, worker: str, sequence: int, epoch: str, ns: int, outcome: str) -> None:
        """Write it down."""
        self._log_gate(("gate_closed", worker, sequence, epoch, outcome, _get_ident()))

    def gate_reopened(self, worker: str, sequence: int, epoch: str, closed_ns: int) -> None:
        """Write it down."""
        self._log_gate(("gate_reopened", worker, sequence, epoch, "", _get_ident()))
        if len(self._gate_log) > GATE_LOG:
            self.judge_gates()

    def clear_started(self, worker: str, sequence: int, keys: int) -> None:
        """Write it down."""
        self._log_gate(("clear_started", worker, sequence, "", "", _get_ident()))

    def clear_ended(
        self,
        worker: str,
        calls: int,
        keys: int,
        ns: int,
        outcome: str,
        rollouts: tuple[tuple[str, int], ...],
    ) -> None:
        """Have the rows of whatever was cleared looked at, should the buffer own it."""
        self.dirty.extend(group_id for group_id, _ in rollouts[:DIRTY])

    @property
    def gates_waiting(self) -> bool:
        """Whether gate events wait for their judgement."""
        return bool(self._gate_log)

    def judge_gates(self) -> None:
        """Judge the gate events that wait; from any thread. The sweep has it done several times a second."""
        log, see = self._gate_log, self._gates.see
        with self._gate_lock:
            self.gates_seen = self.gates_seen or bool(log)
            while log:
                for violation in see(log.popleft()):
                    self._report(violation, "live")

    # --------------------------------------------------------------------------------------------------- helpers

    def _seed(self) -> None:
        """Take over what there is now; two owners of one group are a finding already."""
        owners = self._owners
        claimed = [entry for claim in owners.buffer.claims() for entry in claim.entries]
        records, ready = owners.ledger.records(), owners.buffer.ready()
        twice = self.shadow.seed(owners.accounting.capture(), records, owners.spares.refs(), ready, claimed)
        for group_id, first, second in twice:
            self._contradiction(group_id, first, "read", NAMES[second])
        self.reserved = sum(record.phase == "reserved" for record in records)
        items: tuple[GroupRecord | BufferEntry, ...] = (*records, *ready, *claimed)
        for item in items:
            if item.target_step is not None:
                self._stamped.setdefault(item.target_step, item.admission_id)

    def _found(
        self,
        invariant: str,
        message: str,
        groups: Collection[str] = (),
        *,
        origin: Origin = "live",
        severity: Severity = "critical",
        owners: tuple[str, ...] = (),
        cut_id: str = "",
        **evidence: Any,  # noqa: ANN401 - JSON values
    ) -> None:
        self._report(Violation(invariant, severity, message, tuple(groups), owners, cut_id, evidence), origin)
