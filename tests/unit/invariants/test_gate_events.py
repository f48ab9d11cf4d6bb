"""Claims about `gate_is_respected`: it passes what a gate does, and finds what a gate must never do."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from quiesce.errors import GateTimeoutError, PermitTimeoutError
from quiesce.invariants import Violation
from quiesce.invariants.gate_events import (
    GATE_HOOKS,
    GateChecker,
    GateEvent,
    GateEventLog,
    gate_is_respected,
)
from quiesce.observers import HOOKS
from quiesce.snapshot_gate import SEQUENCES_PER_GATE, Epoch, SnapshotGate
from quiesce.testing import strict_hub
from tests.gates import broken_gate, started


def granted(sequence: int, worker: str = "0", thread: int = 0) -> GateEvent:
    """A grant."""
    return GateEvent("permit_granted", worker, sequence, thread=thread)


def released(sequence: int, worker: str = "0", thread: int = 0) -> GateEvent:
    """A release."""
    return GateEvent("permit_released", worker, sequence, thread=thread)


def closing(sequence: int, epoch: str = "1.1", worker: str = "0") -> GateEvent:
    """A closing."""
    return GateEvent("gate_closing", worker, sequence, epoch)


def closed(sequence: int, epoch: str = "1.1", outcome: str = "closed", worker: str = "0") -> GateEvent:
    """The answer to a close."""
    return GateEvent("gate_closed", worker, sequence, epoch, outcome)


def reopened(sequence: int, epoch: str = "1.1", worker: str = "0") -> GateEvent:
    """A reopening."""
    return GateEvent("gate_reopened", worker, sequence, epoch)


def clear(permit: int, worker: str = "0", thread: int = 0) -> GateEvent:
    """The start of a clear."""
    return GateEvent("clear_started", worker, permit, thread=thread)


def messages(events: list[GateEvent]) -> list[str]:
    """Return what is found, in words."""
    found = gate_is_respected(events)
    assert {(violation.invariant, violation.severity) for violation in found} <= {
        ("gate_is_respected", "critical")
    }
    return [violation.message for violation in found]


WHOLE = [
    granted(1),
    closing(2),
    released(3),
    closed(4),
    reopened(5),
    granted(6),
    clear(6),
    released(7),
    closing(8, "1.2"),
    closed(9, "1.2"),
    closed(10, "1.1", "superseded"),
    closing(11, "1.3"),
    closed(12, "1.3"),
    reopened(13, "2.0"),
    granted(14),
    closing(15, "2.1"),
    closed(16, "2.1", "failed"),
    reopened(17, "2.1"),
    released(18),
]


def test_a_gate_that_keeps_its_rules_passes() -> None:
    """Late closes, a later close on top of one, a new driver, a close that failed: all of that is allowed."""
    assert messages(WHOLE) == []


def test_the_order_of_arrival_does_not_matter() -> None:
    """Hooks of several threads overtake each other; only a clear is told before its own permit is back."""
    events = [event for event in WHOLE if event.hook != "clear_started"]
    for seed in range(50):
        shuffled = random.Random(seed).sample(events, len(events))
        assert messages(shuffled) == []
        checker = GateChecker()
        assert [found for event in shuffled for found in checker.see(event)] + checker.flush() == []


def test_gates_are_judged_each_by_itself() -> None:
    """One worker's permit is not granted by another one's closed gate."""
    assert messages([closing(1), closed(2), granted(1, "1"), reopened(3), released(2, "1")]) == []


def test_a_grant_of_a_closed_gate_is_found() -> None:
    """Wherever it arrived."""
    expected = ["the gate of worker '0' granted a permit while closed in epoch 1.1"]
    assert messages([closing(1), granted(2), reopened(3)]) == expected
    assert messages([closing(1), reopened(3), granted(2)]) == expected
    assert messages([closing(1), reopened(2), granted(3)]) == []


def test_a_close_that_did_not_wait_is_found() -> None:
    """It was answered with permits out."""
    events = [granted(1), granted(2), released(3), closing(4), closed(5)]
    assert messages(events) == ["the gate of worker '0' answered `closed` to epoch 1.1 with 1 permits out"]
    assert messages([*events[:-1], closed(5, outcome="failed")]) == []
    assert messages([*events[:-1], closed(5, outcome="superseded")]) == []


def test_a_close_that_is_answered_by_an_open_gate_is_found() -> None:
    """It never closed, or for another epoch."""
    assert messages([granted(1), released(2), closed(3)]) == [
        "the gate of worker '0' answered `closed` to epoch 1.1 while open"
    ]
    assert messages([closing(1, "1.2"), closed(2, "1.1")]) == [
        "the gate of worker '0' answered `closed` to epoch 1.1 while closed in epoch 1.2"
    ]


def test_an_epoch_that_goes_back_is_found() -> None:
    """By number, by driver, and when it is there again."""
    for later, earlier in (("1.10", "1.9"), ("2.1", "1.5"), ("1.1", "1.1")):
        events = [closing(1, later), reopened(2, later), closing(3, earlier)]
        assert messages(events) == [f"the gate of worker '0' closed for epoch {earlier} after epoch {later}"]


def test_a_late_reopening_that_opens_a_later_close_is_found() -> None:
    """It names an epoch before the one that closed the gate."""
    assert messages([closing(1, "1.2"), closed(2, "1.2"), reopened(3, "1.1")]) == [
        "the gate of worker '0' was opened by a reopen of epoch 1.1 while closed in epoch 1.2"
    ]


def test_a_permit_that_is_given_back_twice_is_found() -> None:
    """It would count for somebody else's."""
    assert messages([granted(1), released(2), released(3)]) == [
        "the gate of worker '0' released more permits than it granted"
    ]


def test_a_sequence_number_that_is_used_twice_is_found() -> None:
    """Then there is no order."""
    assert messages([granted(1), released(2), granted(2)]) == [
        "the gate of worker '0' used sequence number 2 twice"
    ]


def test_a_thread_that_reports_its_events_out_of_order_is_found() -> None:
    """It reports what it did when it has done it: a lower number later was not assigned when it should have been."""
    events = [granted(2, thread=7), released(1, thread=7)]
    assert "reported event 1 after event 2, in one thread" in messages(events)[0]
    assert messages([granted(1, thread=8), released(3, thread=7), granted(2, thread=7)]) != []
    assert messages([released(2, thread=8), granted(1, thread=7)]) == []


def test_a_clear_after_the_gate_was_closed_is_found() -> None:
    """Its permit was granted before a close that has been answered since: that close did not wait for it."""
    events = [granted(1), closing(2), released(3), closed(4), clear(1)]
    assert messages(events) == [
        "the gate of worker '0' started a clear under permit 1 after a close was answered (event 4)"
    ]
    assert messages([granted(1), clear(1), closing(2), released(3), closed(4)]) == []


def test_a_clear_under_no_permit_of_its_thread_is_found() -> None:
    """Another thread's permit, one that was given back, or none at all."""
    for events in (
        [clear(1, thread=7)],
        [granted(1, thread=8), clear(1, thread=7)],
        [granted(1, thread=7), released(2, thread=7), clear(1, thread=7)],
        [granted(1, thread=7), released(2, thread=7), granted(3, thread=7), clear(1, thread=7)],
    ):
        assert messages(events) == [
            "the gate of worker '0' started a clear under permit 1, which its thread does not hold"
        ]
    assert messages([granted(1, thread=7), clear(1, thread=7)]) == []


def test_the_gate_of_a_restarted_worker_starts_anew() -> None:
    """Its numbers go on above; what the one before left closed, or late, says nothing about it."""
    new = SEQUENCES_PER_GATE
    assert messages([granted(1), closing(2, "1.5"), granted(new + 1), closing(new + 2, "1.1")]) == []
    checker = GateChecker()
    events = [granted(1), granted(new + 1), released(2), released(new + 2)]
    assert [found for event in events for found in checker.see(event)] == []


def test_a_log_that_starts_in_the_middle_is_not_blamed_for_what_it_lacks() -> None:
    """A release or an answer whose beginning was not seen is no finding; what is seen whole is still judged."""
    assert messages([released(41), closed(42), reopened(43)]) == []
    assert len(messages([released(41), closing(42), granted(43)])) == 1


def test_a_thread_that_held_its_permit_before_anybody_listened_is_not_blamed() -> None:
    """Its grant is in no log that begins later; once something of it is, or of the gate's beginning, all is."""

    def live(*events: GateEvent) -> list[str]:
        checker = GateChecker()
        return [found.message for event in events for found in checker.see(event)]

    before = clear(5, thread=1)
    assert live(before) == []
    assert live(before, released(6, thread=1), granted(7, thread=1), clear(7, thread=1)) == []
    unheld = "the gate of worker '0' started a clear under permit 5, which its thread does not hold"
    assert live(released(4, thread=1), before) == [unheld]
    assert live(granted(1, thread=2), before) == [unheld]


def test_an_event_that_never_arrives_does_not_stop_a_live_checker() -> None:
    """It goes on without it, keeps no more than it was told to, and ignores the event if it comes after all."""
    checker = GateChecker(max_early=4)
    seen: list[Violation] = []
    for event in (granted(1), granted(3), released(4), granted(5), released(6), closing(7), granted(8)):
        seen += checker.see(event)
    assert [found.evidence["sequence"] for found in seen] == [8]
    assert checker.see(released(2)) == []
    assert checker.see(granted(9)) != []


def test_evidence_names_worker_event_and_number() -> None:
    """JSON values, enough to find the place."""
    (found,) = gate_is_respected([granted(1), closing(2), closed(3)])
    assert found.evidence == {"worker": "0", "hook": "gate_closed", "sequence": 3, "out": 1}
    assert found.to_json()["invariant"] == "gate_is_respected"


def test_the_log_listens_to_hooks_that_exist() -> None:
    """And to each of those that it is made of."""
    assert set(GATE_HOOKS) <= set(HOOKS)
    assert all(callable(getattr(GateEventLog(), hook)) for hook in GATE_HOOKS)


# ----------------------------------------------------------------------------------------------- broken gates


def drive(gate: Any) -> None:  # noqa: ANN401 - a gate, perhaps a broken one
    """Do a bit of everything with a gate, without ever waiting."""

    def enter() -> None:
        with suppress(PermitTimeoutError):
            gate.enter(0).release()

    def close(number: int) -> None:
        with suppress(GateTimeoutError):
            gate.close_and_wait(Epoch(1, number), 0)

    enter()
    close(2)
    enter()
    close(1)
    close(3)
    gate.reopen(Epoch(1, 2))
    enter()
    gate.reopen(Epoch(1, 3))
    permit = gate.enter(0)
    started(close, 4).result(20)
    gate.reopen(Epoch(1, 4))
    permit.release()
    enter()


BROKEN: dict[str, tuple[str, str]] = {
    "a close does not wait": ("while self._is_current(epoch) and self._permits:", "while False:"),
    "a closed gate grants": ("                if self._granting:\n", "                if True:\n"),
    "an earlier epoch closes": (
        "if epoch > self._released and epoch > self._epoch:",
        "if epoch > self._released:",
    ),
    "a late reopening opens": ("if self._closed and self._epoch <= epoch:", "if self._closed:"),
    "grants share a number": (
        "                    permit.sequence = self._sequence = self._sequence + 1\n",
        "                    permit.sequence = self._sequence + 1\n",
    ),
    "numbers go back": ("sequence = gate._sequence = gate._sequence + 1", "sequence = gate._sequence - 1"),
}


def test_a_sound_gate_passes_what_the_broken_ones_fail() -> None:
    """The scenario itself breaks nothing."""
    log = GateEventLog()
    drive(SnapshotGate("0", hub=strict_hub(log)))
    assert gate_is_respected(log.events) == []
    assert len(log.events) > 12


@pytest.mark.parametrize("name", sorted(BROKEN))
def test_a_broken_gate_is_found_out(name: str) -> None:
    """By what it reports."""
    log = GateEventLog()
    drive(broken_gate(*BROKEN[name]).SnapshotGate("0", hub=strict_hub(log)))
    assert gate_is_respected(log.events) != []


@pytest.mark.parametrize("when", ["before its permit", "after its permit", "in the window"])
def test_a_cleanup_that_does_not_keep_to_its_permit_is_found_out(when: str) -> None:
    """Whenever it clears instead."""
    log = GateEventLog()
    hub = strict_hub(log)
    gate = SnapshotGate("0", hub=hub)
    run: list[Callable[[], object]] = [
        lambda: hub.fire("clear_started", "0", 1, 3),
        lambda: gate.enter().release(),
    ]
    if when == "in the window":
        run += [lambda: gate.close_and_wait(Epoch(1, 1), 0)]
    if when != "before its permit":
        run = [*run[1:], run[0]]
    for step in run:
        step()
    assert len(gate_is_respected(log.events)) == 1
