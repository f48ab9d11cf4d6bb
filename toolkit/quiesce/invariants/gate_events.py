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
from typing import Any, Final

from quiesce.invariants.violation import Violation
from quiesce.snapshot_gate import SEQUENCES_PER_GATE, Epoch

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


@dataclass(frozen=True, slots=True)
class GateEvent:
    """One event of one gate.

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


@dataclass(slots=True)
class _Gate:
    """What is known of the gate that has a label now."""

    # In the order of sequence numbers.
    last: int = -1
    whole: bool = False
    """Whether its log is there from its first event on."""
    out: int = 0
    closing: Epoch | None = None
    latest: Epoch | None = None
    # In the order of arrival.
    early: list[tuple[int, int, GateEvent]] = field(default_factory=list)
    missing: set[int] = field(default_factory=set)
    reported: dict[int, int] = field(default_factory=dict)
    holding: dict[int, int] = field(default_factory=dict)
    answered: int = -1


class GateChecker:
    """Judges gate events one at a time, of any number of gates, in the order of their arrival.

    Args:
        max_early: How many events of one gate are kept because one before them has not arrived; None keeps
            all, until :meth:`flush`.
    """

    def __init__(self, max_early: int | None = MAX_EARLY) -> None:
        self._max_early = max_early
        self._gates: dict[str, _Gate] = {}
        self._arrived = 0

    def see(self, event: GateEvent) -> list[Violation]:
        """Take one event; return what is found wrong by now."""
        gate = self._gates.setdefault(event.worker, _Gate())
        found: list[Violation] = []
        if event.hook == "clear_started":
            self._clear(gate, event, found)
            return found
        self._arrival(gate, event, found)
        self._arrived += 1
        heapq.heappush(gate.early, (event.sequence, self._arrived, event))
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
    def _arrival(gate: _Gate, event: GateEvent, found: list[Violation]) -> None:
        """A thread reports what it did when it has done it, so what one thread reports is in order."""
        if event.hook == "gate_closed" and event.outcome == "closed":
            gate.answered = max(gate.answered, event.sequence)
        if not event.thread:
            return
        before = gate.reported.get(event.thread, -1)
        if event.sequence < before:
            found.append(
                _violation(
                    event,
                    f"reported event {event.sequence} after event {before}, in one thread",
                    before=before,
                )
            )
        gate.reported[event.thread] = event.sequence
        if event.hook == "permit_granted":
            gate.holding[event.thread] = event.sequence
        elif event.hook == "permit_released":
            gate.holding.pop(event.thread, None)

    @staticmethod
    def _clear(gate: _Gate, event: GateEvent, found: list[Violation]) -> None:
        """A close that waits for the clear's permit is not answered before the clear has started."""
        if gate.answered > event.sequence:
            found.append(
                _violation(
                    event,
                    f"started a clear under permit {event.sequence} after a close was answered (event {gate.answered})",
                    answered=gate.answered,
                )
            )
        elif event.thread and gate.holding.get(event.thread) != event.sequence:
            found.append(
                _violation(
                    event,
                    f"started a clear under permit {event.sequence}, which its thread does not hold",
                    holds=gate.holding.get(event.thread),
                )
            )

    # ----------------------------------------------------------------------------- in the order of the numbers

    def _step(self, gate: _Gate, event: GateEvent, found: list[Violation]) -> None:
        sequence = event.sequence
        index, before = sequence // SEQUENCES_PER_GATE, gate.last // SEQUENCES_PER_GATE
        if gate.last >= 0 and index < before:
            return  # of a gate that has been replaced, and late
        if gate.last < 0 or index > before:
            gate.whole = sequence % SEQUENCES_PER_GATE == 1
            gate.out, gate.closing, gate.latest = 0, None, None
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
    def _judge(gate: _Gate, event: GateEvent, found: list[Violation]) -> None:
        if event.hook == "permit_granted":
            gate.out += 1
            if gate.closing is not None:
                found.append(_violation(event, f"granted a permit while {_state(gate.closing)}"))
        elif event.hook == "permit_released":
            if gate.out == 0 and gate.whole:
                found.append(_violation(event, "released more permits than it granted"))
            gate.out = max(0, gate.out - 1)
        elif event.hook == "gate_closing":
            epoch = Epoch.parse(event.epoch)
            if gate.latest is not None and epoch <= gate.latest:
                found.append(_violation(event, f"closed for epoch {epoch} after epoch {gate.latest}"))
            gate.closing = epoch
            gate.latest = epoch if gate.latest is None else max(epoch, gate.latest)
        elif event.hook == "gate_closed":
            _judge_answer(gate, event, found)
        elif event.hook == "gate_reopened":
            if gate.closing is not None and Epoch.parse(event.epoch) < gate.closing:
                problem = f"was opened by a reopen of epoch {event.epoch} while {_state(gate.closing)}"
                found.append(_violation(event, problem))
            gate.closing = None


def _judge_answer(gate: _Gate, event: GateEvent, found: list[Violation]) -> None:
    if event.outcome != "closed":
        return
    if gate.out:
        problem = f"answered `closed` to epoch {event.epoch} with {gate.out} permits out"
        found.append(_violation(event, problem, out=gate.out))
    if gate.whole and (gate.closing is None or str(gate.closing) != event.epoch):
        problem = f"answered `closed` to epoch {event.epoch} while {_state(gate.closing)}"
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


def _state(closing: Epoch | None) -> str:
    return "open" if closing is None else f"closed in epoch {closing}"


def _violation(event: GateEvent, what: str, **evidence: Any) -> Violation:  # noqa: ANN401 - JSON values
    return Violation(
        NAME,
        "critical",
        f"the gate of worker {event.worker!r} {what}",
        evidence={"worker": event.worker, "hook": event.hook, "sequence": event.sequence, **evidence},
    )
