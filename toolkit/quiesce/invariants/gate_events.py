"""``gate_is_respected``: what the log of the snapshot gates' events has to look like.

Hooks are fired after a gate's lock is released, so events of several threads arrive in any order. Each but a
clear carries a number of its own, assigned under the lock: that is the order in which things happened. A clear
carries the number of the permit that it runs under.

Rule: a function of the events alone. :func:`gate_is_respected` judges a whole log; :class:`GateChecker` does
the same an event at a time, at a cost that does not grow. Nothing here suspends.

===================================  ================================================================
what is wrong                        how it shows
===================================  ================================================================
a closed gate grants a permit        a grant between a closing and the reopening
a close does not wait                it was answered ``closed`` while permits were out
a clear runs beside the cut          it starts although a close was answered ``closed`` since its
                                     permit was granted, or in a thread that holds no such permit
                                     (judged live: if its grant would have been heard, because the
                                     gate's first event was, or anything of the thread)
an epoch goes back                   a closing for an epoch that is not later than the one before
a late reopen opens a later close    a reopening of an epoch before the one that closed the gate
a permit is given back twice         more releases than grants
the order is none                    a number twice, or one thread reports a lower one after a higher
===================================  ================================================================
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from quiesce.invariants.violation import Violation
from quiesce.snapshot_gate import SEQUENCES_PER_GATE

__all__ = ["GATE_HOOKS", "GateChecker", "GateEvent", "GateEventLog", "gate_is_respected"]

NAME: Final = "gate_is_respected"

GATE_HOOKS: Final = (
    "permit_granted",
    "permit_released",
    "gate_closing",
    "gate_closed",
    "gate_reopened",
    "clear_started",
)
"""The hooks that a log of gate events is made of."""

MAX_EARLY: Final = 256
"""How many events a live checker keeps because one before them has not arrived; then it goes on without that one."""


class GateEvent(NamedTuple):
    """One event of one gate; a plain tuple of the same fields does as well.

    Attributes:
        hook: One of :data:`GATE_HOOKS`.
        worker: The gate's label.
        sequence: Its number; of a clear, the number of the permit's grant.
        epoch: The epoch that it names, as text, or "".
        outcome: Of a close, what was answered.
        thread: The thread that reported it, as a number; 0 if that is not known.
    """

    hook: str
    worker: str
    sequence: int
    epoch: str = ""
    outcome: str = ""
    thread: int = 0


class GateEventLog:
    """An observer that writes gate events down, from any thread, in the order of their arrival.

    Attributes:
        events: What was written down.
    """

    def __init__(self) -> None:
        self.events: list[GateEvent] = []

    def permit_granted(self, worker: str, sequence: int, wait_ns: int) -> None:
        """Write it down."""
        self._add("permit_granted", worker, sequence)

    def permit_released(self, worker: str, sequence: int, hold_ns: int) -> None:
        """Write it down."""
        self._add("permit_released", worker, sequence)

    def gate_closing(self, worker: str, sequence: int, epoch: str) -> None:
        """Write it down."""
        self._add("gate_closing", worker, sequence, epoch)

    def gate_closed(self, worker: str, sequence: int, epoch: str, ns: int, outcome: str) -> None:
        """Write it down."""
        self._add("gate_closed", worker, sequence, epoch, outcome)

    def gate_reopened(self, worker: str, sequence: int, epoch: str, closed_ns: int) -> None:
        """Write it down."""
        self._add("gate_reopened", worker, sequence, epoch)

    def clear_started(self, worker: str, sequence: int, keys: int) -> None:
        """Write it down."""
        self._add("clear_started", worker, sequence)

    def _add(self, hook: str, worker: str, sequence: int, epoch: str = "", outcome: str = "") -> None:
        self.events.append(GateEvent(hook, worker, sequence, epoch, outcome, threading.get_ident()))


_Event = tuple[str, str, int, str, str, int]


@dataclass(slots=True)
class _Gate:
    """What is known of the gate that has a label now."""

    # In the order of sequence numbers.
    last: int = -1
    whole: bool = False
    """Whether its log is there from its first event on."""
    out: int = 0
    closing: str = ""
    """The epoch that it is closed in, as text, or ""."""
    latest: str = ""
    latest_incarnation: str = ""
    latest_number: int = -1
    # In the order of arrival.
    early: list[tuple[int, int, _Event]] = field(default_factory=list)
    missing: set[int] = field(default_factory=set)
    reported: dict[int, int] = field(default_factory=dict)
    holding: dict[int, int] = field(default_factory=dict)
    answered: int = -1


class GateChecker:
    """Judges gate events one at a time, of any number of gates, in the order of their arrival.

    Args:
        max_early: How many events of one gate are kept because one before them has not arrived; None keeps
            all, until :meth:`flush`: the log is a whole one.
    """

    def __init__(self, max_early: int | None = MAX_EARLY) -> None:
        self._max_early = max_early
        self._gates: dict[str, _Gate] = {}
        self._arrived = 0

    def see(self, event: _Event) -> list[Violation]:
        """Take one event; return what is found wrong by now."""
        hook, worker, sequence, _, outcome, thread = event
        gate = self._gates.get(worker)
        if gate is None:
            gate = self._gates[worker] = _Gate()
        found: list[Violation] = []
        if hook == "clear_started":
            if gate.answered > sequence or (
                thread
                and gate.holding.get(thread) != sequence
                # Where somebody may have begun to listen later, its grant may have come before.
                and (self._max_early is None or gate.whole or thread in gate.reported)
            ):
                self._clear(gate, event, found)
            return found
        in_order = sequence == gate.last + 1 and sequence and not gate.early  # as nearly all are
        if thread:
            if not in_order and sequence < gate.reported.get(thread, -1):
                self._reported(gate, event, found)
            gate.reported[thread] = sequence
            if hook == "permit_granted":
                gate.holding[thread] = sequence
            elif hook == "permit_released":
                gate.holding.pop(thread, None)
        if outcome == "closed" and sequence > gate.answered:
            gate.answered = sequence
        if in_order:
            gate.last = sequence
            self._judge(gate, event, found)
            return found
        self._arrived += 1
        heapq.heappush(gate.early, (sequence, self._arrived, event))
        while gate.early and self._is_next(gate, gate.early[0][0]):
            self._step(gate, heapq.heappop(gate.early)[2], found)
        return found

    def flush(self) -> list[Violation]:
        """Judge what is still kept: nothing before it will arrive."""
        found: list[Violation] = []
        for gate in self._gates.values():
            while gate.early:
                self._step(gate, heapq.heappop(gate.early)[2], found)
        return found

    def _is_next(self, gate: _Gate, sequence: int) -> bool:
        return (
            sequence <= gate.last + 1
            or sequence % SEQUENCES_PER_GATE == 1  # the first one of a gate
            or (self._max_early is not None and len(gate.early) > self._max_early)
        )

    # -------------------------------------------------------------------------------- in the order of arrival

    @staticmethod
    def _reported(gate: _Gate, event: _Event, found: list[Violation]) -> None:
        """A thread reports what it did when it has done it, so what one thread reports is in order."""
        before = gate.reported[event[5]]
        problem = f"reported event {event[2]} after event {before}, in one thread"
        found.append(_violation(event, problem, before=before))

    @staticmethod
    def _clear(gate: _Gate, event: _Event, found: list[Violation]) -> None:
        """A close that waits for the clear's permit is not answered before the clear has started."""
        _, _, permit, _, _, thread = event
        if gate.answered > permit:
            found.append(
                _violation(
                    event,
                    f"started a clear under permit {permit} after a close was answered (event {gate.answered})",
                    answered=gate.answered,
                )
            )
        else:
            found.append(
                _violation(
                    event,
                    f"started a clear under permit {permit}, which its thread does not hold",
                    holds=gate.holding.get(thread),
                )
            )

    # ----------------------------------------------------------------------------- in the order of the numbers

    def _step(self, gate: _Gate, event: _Event, found: list[Violation]) -> None:
        sequence = event[2]
        index, before = sequence // SEQUENCES_PER_GATE, gate.last // SEQUENCES_PER_GATE
        if gate.last >= 0 and index < before:
            return  # of a gate that has been replaced, and late
        if gate.last < 0 or index > before:
            gate.whole = sequence % SEQUENCES_PER_GATE == 1
            gate.out, gate.closing, gate.latest = 0, "", ""
            gate.missing.clear()
        elif sequence in gate.missing:
            gate.missing.discard(sequence)  # given up before, and here after all: too late to be judged
            return
        elif sequence <= gate.last:
            found.append(_violation(event, f"used sequence number {sequence} twice"))
            return
        elif sequence > gate.last + 1:
            gate.whole = False
            if self._max_early is not None:
                gate.missing.update(range(gate.last + 1, min(sequence, gate.last + 1 + self._max_early)))
        gate.last = sequence
        self._judge(gate, event, found)

    @staticmethod
    def _judge(gate: _Gate, event: _Event, found: list[Violation]) -> None:
        hook, _, _, epoch, outcome, _ = event
        if hook == "permit_granted":
            gate.out += 1
            if gate.closing:
                found.append(_violation(event, f"granted a permit while {_state(gate)}"))
        elif hook == "permit_released":
            if gate.out:
                gate.out -= 1
            elif gate.whole:
                found.append(_violation(event, "released more permits than it granted"))
        elif hook == "gate_closing":
            gate.closing = epoch
            incarnation, _, tail = epoch.partition(".")
            number = int(tail)
            if gate.latest and (
                number <= gate.latest_number
                if incarnation == gate.latest_incarnation
                else _number(epoch) <= _number(gate.latest)
            ):
                found.append(_violation(event, f"closed for epoch {epoch} after epoch {gate.latest}"))
            else:
                gate.latest, gate.latest_incarnation, gate.latest_number = epoch, incarnation, number
        elif hook == "gate_closed":
            if outcome == "closed" and (gate.out or gate.closing != epoch):
                _judge_answer(gate, event, found)
        elif hook == "gate_reopened":
            if gate.closing not in {"", epoch} and _number(epoch) < _number(gate.closing):
                found.append(
                    _violation(event, f"was opened by a reopen of epoch {epoch} while {_state(gate)}")
                )
            gate.closing = ""


def _number(epoch: str) -> tuple[int, int]:
    """Return what orders epochs; as :meth:`quiesce.snapshot_gate.Epoch.parse` does."""
    incarnation, _, number = epoch.partition(".")
    return int(incarnation), int(number)


def _judge_answer(gate: _Gate, event: _Event, found: list[Violation]) -> None:
    epoch = event[3]
    if gate.out:
        problem = f"answered `closed` to epoch {epoch} with {gate.out} permits out"
        found.append(_violation(event, problem, out=gate.out))
    if gate.whole and gate.closing != epoch:
        problem = f"answered `closed` to epoch {epoch} while {_state(gate)}"
        found.append(_violation(event, problem))


def gate_is_respected(events: Iterable[GateEvent]) -> list[Violation]:
    """No permit is granted while a gate is closed, no clear under that gate's permit starts then; epochs only grow.

    Args:
        events: Of any number of gates, in the order in which hooks reported them.

    Returns:
        What contradicts that.
    """
    checker = GateChecker(max_early=None)
    found = [violation for event in events for violation in checker.see(event)]
    return found + checker.flush()


def _state(gate: _Gate) -> str:
    return f"closed in epoch {gate.closing}" if gate.closing else "open"


def _violation(event: _Event, what: str, **evidence: Any) -> Violation:  # noqa: ANN401 - JSON values
    hook, worker, sequence, _, _, _ = event
    return Violation(
        NAME,
        "critical",
        f"the gate of worker {worker!r} {what}",
        evidence={"worker": worker, "hook": hook, "sequence": sequence, **evidence},
    )
