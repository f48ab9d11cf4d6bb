"""Claims about the snapshot gate: permits are released once, and no late message disturbs another checkpoint."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress

import pytest

from quiesce.barrier import DataPlaneCheckpointBarrier
from quiesce.errors import (
    FenceError,
    GateRetiredError,
    GateTimeoutError,
    LockOrderError,
    NestedPermitError,
    PermitReleasedError,
    PermitTimeoutError,
    WouldBlockLoopError,
)
from quiesce.invariants.gate_events import GateEventLog, gate_is_respected
from quiesce.observers import Hub
from quiesce.snapshot_gate import SEQUENCES_PER_GATE, Epoch, Permit, SnapshotGate, holds_permit
from quiesce.testing import EventRecorder, FakeClock, strict_hub
from tests.gates import PATIENCE, Closings, Writer, eventually, started


def make(worker: str = "0", *observers: object) -> SnapshotGate:
    """Return a gate with a hub of its own."""
    return SnapshotGate(worker, hub=strict_hub(*observers))


def epoch(number: int, incarnation: int = 3) -> Epoch:
    """Return an epoch."""
    return Epoch(incarnation, number)


# ---------------------------------------------------------------------------------------------------- permits


def test_permits_do_not_exclude_each_other() -> None:
    """Writers work side by side; only a close excludes them."""
    gate = make()
    first, second = Writer(gate).entered(), Writer(gate).entered()
    assert gate.statistics().permits == 2
    first.finish()
    second.finish()
    assert gate.statistics().permits == 0


def test_a_permit_is_released_exactly_once() -> None:
    """A second release is an error, and does not let a close past the permit of somebody else."""
    gate = make()
    other = Writer(gate).entered()
    permit = gate.enter()
    permit.release()
    with pytest.raises(PermitReleasedError, match="worker '0'"):
        permit.release()
    with pytest.raises(GateTimeoutError):
        gate.close_and_wait(epoch(1), timeout=0)
    other.finish()
    assert gate.close_and_wait(epoch(1), timeout=0) == "closed"


def test_a_permit_may_be_released_by_another_thread() -> None:
    """It is handed on with the work that it covers; its first thread can then take another one."""
    gate = make()
    permit = gate.enter()
    started(permit.release).result(PATIENCE)
    assert not permit.live
    assert not holds_permit()
    gate.enter().release()


def test_exit_releases_the_permit_of_this_thread_only() -> None:
    """A thread without one is told so, whatever others hold."""
    gate = make()
    writer = Writer(gate).entered()
    with pytest.raises(PermitReleasedError, match="MainThread"):
        gate.exit()
    gate.enter()
    gate.exit()
    with pytest.raises(PermitReleasedError):
        gate.exit()
    assert gate.statistics().permits == 1
    writer.finish()


def test_exit_of_another_gate_releases_nothing() -> None:
    """The permit names its gate."""
    gate, other = make("0"), make("1")
    gate.enter()
    with pytest.raises(PermitReleasedError, match="worker '1'"):
        other.exit()
    assert gate.statistics().permits == 1
    gate.exit()


def test_the_with_form_releases_also_when_the_body_raises() -> None:
    """What is raised goes on."""
    gate = make()
    with pytest.raises(OSError, match="disk"), gate.permit() as permit:
        assert permit.live
        assert holds_permit()
        raise OSError("disk")
    assert gate.statistics().permits == 0
    assert not holds_permit()


def test_a_permit_released_inside_its_own_section_is_an_error_at_the_end() -> None:
    """Exactly once means that the body leaves it to the section."""
    gate = make()
    with pytest.raises(PermitReleasedError), gate.permit() as permit:
        permit.release()


@pytest.mark.parametrize("other", [False, True])
def test_a_thread_that_holds_a_permit_cannot_take_another(*, other: bool) -> None:
    """A close of the one gate would wait for a thread that waits for the other, which is closed too."""
    gate = make("0")
    second = make("1") if other else gate
    with gate.permit(), pytest.raises(NestedPermitError, match=r"still holds <permit 1 of worker '0'"):
        second.enter()
    assert second.statistics().permits == 0
    second.enter().release()


async def test_a_permit_cannot_be_asked_for_while_a_live_cut_is_held() -> None:
    """The lock order is permit before slot: a window may wait for that slot while the gate is closed for it."""
    gate, barrier = make(), DataPlaneCheckpointBarrier(hub=strict_hub())
    async with barrier.mutation("retry") as cut:
        with pytest.raises(LockOrderError, match="a permit of worker '0'"):
            gate.enter(timeout=0)
        with pytest.raises(LockOrderError):
            await barrier.run_in_cut(cut, gate.enter, 0)
    assert gate.statistics().permits == 0
    gate.enter().release()


def test_a_closed_gate_lets_nobody_in_until_it_is_reopened() -> None:
    """The writer waits, and is in when the reopening is over."""
    gate = make()
    assert gate.close_and_wait(epoch(1)) == "closed"
    writer = Writer(gate).waiting()
    assert not writer.inside.is_set()
    gate.reopen(epoch(1))
    assert gate.statistics().permits == 1
    writer.entered().finish()


def test_a_writer_that_waited_gets_in_between_two_closes_however_close_they_are() -> None:
    """The reopening grants the permit itself, so a close that follows in the same step waits for the writer."""
    gate = make()
    gate.close_and_wait(epoch(1))
    writer = Writer(gate).waiting()
    gate.reopen(epoch(1))
    with pytest.raises(GateTimeoutError):
        gate.close_and_wait(epoch(2), timeout=0)
    writer.entered().finish()
    assert gate.close_and_wait(epoch(2), timeout=0) == "closed"


def test_writers_are_let_in_in_the_order_of_asking() -> None:
    """First come, first granted."""
    gate = make()
    gate.close_and_wait(epoch(1))
    writers: list[Writer] = []
    for _ in range(4):
        writers.append(Writer(gate))
        eventually(lambda: gate.statistics().waiting == len(writers))
    gate.reopen(epoch(1))
    permits = [writer.entered().permit for writer in writers]
    sequences = [permit.sequence for permit in permits if permit is not None]
    assert sequences == list(range(sequences[0], sequences[0] + 4))
    for writer in writers:
        writer.finish()


@pytest.mark.parametrize("timeout", [0, 0.01])
def test_a_writer_gives_up_at_a_gate_that_stays_closed(timeout: float) -> None:
    """The error names worker, time and epoch, and nothing is left behind."""
    gate = make("7")
    gate.close_and_wait(epoch(12))
    with pytest.raises(
        PermitTimeoutError, match=r"worker '7' within .* s: its gate is closed in epoch 3\.12"
    ):
        gate.enter(timeout)
    assert gate.statistics().waiting == 0
    gate.reopen(epoch(12))
    assert gate.statistics().permits == 0
    gate.enter(0).release()


def test_a_timeout_cannot_be_negative() -> None:
    """Neither a writer's, if it would wait, nor a close's."""
    gate = make()
    with pytest.raises(ValueError, match="-1"):
        gate.close_and_wait(epoch(1), -1)
    assert gate.close_and_wait(epoch(1)) == "closed"
    with pytest.raises(ValueError, match="-1"):
        gate.enter(-1)


async def test_a_thread_that_runs_an_event_loop_never_waits_at_a_gate() -> None:
    """The loop may be the one that is to reopen it; a permit that needs no waiting is granted."""
    gate = make()
    gate.enter().release()
    gate.close_and_wait(epoch(1))
    with pytest.raises(WouldBlockLoopError, match=threading.current_thread().name):
        gate.enter(PATIENCE)
    with pytest.raises(PermitTimeoutError):
        gate.enter(timeout=0)
    assert gate.statistics().waiting == 0


def test_who_is_let_in_and_interrupted_gives_the_permit_back() -> None:
    """Nobody would release a permit that its thread does not know."""

    class Interrupted(threading.Condition):
        def wait(self, timeout: float | None = None) -> bool:
            super().wait(timeout)
            raise KeyboardInterrupt

    log = GateEventLog()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading, "Condition", Interrupted)
        gate = make("0", log)
    gate.close_and_wait(epoch(1))
    entering = started(gate.enter)
    eventually(lambda: gate.statistics().waiting == 1)
    gate.reopen(epoch(1))
    assert isinstance(entering.exception(PATIENCE), KeyboardInterrupt)
    assert gate.statistics().permits == 0
    assert gate_is_respected(log.events) == []


def test_a_permit_may_be_released_out_of_the_middle_of_any_other_call() -> None:
    """Collecting garbage may finalize a generator that holds one, in the very thread that has the lock."""
    finalize: list[Permit] = []

    def clock() -> int:
        while finalize:
            finalize.pop().release()
        return 0

    gate = SnapshotGate("0", hub=strict_hub(), clock=clock)
    calls: tuple[Callable[[], object], ...] = (
        gate.holders,
        gate.statistics,
        lambda: gate.reopen(epoch(3)),
    )
    for number, call in enumerate(calls, start=1):
        permit = gate.enter()
        with pytest.raises(GateTimeoutError):
            started(gate.close_and_wait, epoch(number), 0).result(PATIENCE)
        finalize.append(permit)
        started(call).result(PATIENCE)
        assert gate.statistics().permits == 0
        gate.reopen(epoch(number))


def test_who_holds_permits_is_told_the_oldest_first() -> None:
    """With thread and age; younger ones can be left out."""
    clock = FakeClock()
    gate = SnapshotGate("0", hub=strict_hub(), clock=clock)
    old = Writer(gate, "generate-4").entered()
    clock.advance(5)
    young = Writer(gate, "generate-1").entered()
    clock.advance(1)
    assert [str(holder) for holder in gate.holders()] == [
        "thread 'generate-4' for 6.000 s",
        "thread 'generate-1' for 1.000 s",
    ]
    assert [holder.thread for holder in gate.holders(older_than=6)] == ["generate-4"]
    assert old.permit is not None
    assert (old.permit.thread, old.permit.age_seconds) == ("generate-4", 6.0)
    old.finish()
    young.finish()


# ------------------------------------------------------------------------------------------ threads that died


def dead_holder(gate: SnapshotGate) -> None:
    """Have a thread take a permit and end."""
    thread = threading.Thread(target=gate.enter, name="died")
    thread.start()
    thread.join(PATIENCE)


def test_a_thread_that_died_with_its_permit_keeps_the_gate_from_closing() -> None:
    """What it left half done stays so: the close refuses, and says that the holder has ended."""
    gate = make()
    dead_holder(gate)
    (holder,) = gate.holders()
    assert (holder.thread, holder.ended) == ("died", True)
    with pytest.raises(GateTimeoutError, match=r"thread 'died' for .* \(it has ended"):
        gate.close_and_wait(epoch(1), timeout=0)
    gate.retire("its thread died")
    assert gate.close_and_wait(epoch(1), timeout=0) == "closed"


def test_a_new_thread_is_not_taken_for_the_dead_one_whose_number_it_got() -> None:
    """Operating systems use thread numbers again, at once."""
    gate = make()
    for count in range(1, 21):
        dead_holder(gate)
        assert gate.statistics().permits == count


def test_a_permit_of_a_dead_thread_can_still_be_released_by_whoever_has_it() -> None:
    """It may have been handed on."""
    gate = make()
    permits = list[object]()
    thread = threading.Thread(target=lambda: permits.append(gate.enter()))
    thread.start()
    thread.join(PATIENCE)
    (permit,) = permits
    permit.release()  # type: ignore[attr-defined] # a permit
    assert gate.close_and_wait(epoch(1), timeout=0) == "closed"


# ----------------------------------------------------------------------------------------------------- epochs


def test_epochs_are_ordered_by_driver_first() -> None:
    """A later driver's first epoch is later than an earlier one's last."""
    assert Epoch(1, 99) < Epoch(2, 0) < Epoch(2, 1)
    assert str(Epoch(2, 7)) == "2.7"
    assert Epoch.parse("2.7") == Epoch(2, 7)


def test_a_close_waits_for_the_permits_that_are_out_and_lets_no_more_out() -> None:
    """Closing means: closed to new ones at once, closed for good when the last is back."""
    closings = Closings()
    gate = make("0", closings)
    writer = Writer(gate).entered()
    close = started(gate.close_and_wait, epoch(1))
    assert closings.of(epoch(1)).wait(PATIENCE)
    with pytest.raises(PermitTimeoutError):
        gate.enter(timeout=0)
    assert not close.done()
    assert not gate.closed_in(epoch(1))
    writer.finish()
    assert close.result(PATIENCE) == "closed"
    assert gate.closed_in(epoch(1))


def test_a_close_after_its_release_changes_nothing() -> None:
    """Its checkpoint is over: the gate stays open."""
    gate = make()
    gate.reopen(epoch(1))
    assert gate.close_and_wait(epoch(1)) == "superseded"
    gate.enter(timeout=0).release()
    assert not gate.statistics().closed


def test_a_reopening_releases_every_epoch_before_it_too() -> None:
    """Closes that were overtaken by it never close; the next one does."""
    gate = make()
    gate.reopen(epoch(2))
    assert gate.close_and_wait(epoch(1)) == "superseded"
    assert gate.close_and_wait(epoch(2)) == "superseded"
    assert gate.close_and_wait(epoch(3)) == "closed"


def test_a_reopening_ends_a_close_that_still_drains() -> None:
    """The close is told that it was superseded, and writers get in although the old permit is still out."""
    closings = Closings()
    gate = make("0", closings)
    writer = Writer(gate).entered()
    close = started(gate.close_and_wait, epoch(1))
    assert closings.of(epoch(1)).wait(PATIENCE)
    gate.reopen(epoch(1))
    assert close.result(PATIENCE) == "superseded"
    gate.enter(timeout=0).release()
    writer.finish()


def test_a_late_reopening_does_not_open_the_next_checkpoints_window() -> None:
    """Epoch 1's second reopening says nothing about epoch 2."""
    gate = make()
    assert gate.close_and_wait(epoch(1)) == "closed"
    gate.reopen(epoch(1))
    assert gate.close_and_wait(epoch(2)) == "closed"
    gate.reopen(epoch(1))
    assert gate.closed_in(epoch(2))
    with pytest.raises(PermitTimeoutError):
        gate.enter(timeout=0)


def test_a_first_reopening_that_is_overtaken_by_the_next_close_does_not_open_it_either() -> None:
    """The message was lost for a while, and the next close came before it."""
    gate = make()
    gate.close_and_wait(epoch(1))
    gate.close_and_wait(epoch(2))
    gate.reopen(epoch(1))
    assert gate.closed_in(epoch(2))
    with pytest.raises(PermitTimeoutError):
        gate.enter(timeout=0)
    gate.reopen(epoch(2))
    gate.enter(timeout=0).release()


def test_a_late_close_neither_reports_nor_moves_a_later_one() -> None:
    """Epoch 2 is closed and stays what the gate is closed in, although epoch 1 was never released."""
    gate = make()
    assert gate.close_and_wait(epoch(2)) == "closed"
    assert gate.close_and_wait(epoch(1)) == "superseded"
    assert gate.closed_in(epoch(2))
    gate.reopen(epoch(2))
    gate.enter(timeout=0).release()


def test_a_draining_close_is_superseded_by_a_later_one() -> None:
    """Only the latest one is what the gate will be closed in."""
    closings = Closings()
    gate = make("0", closings)
    writer = Writer(gate).entered()
    first = started(gate.close_and_wait, epoch(1))
    assert closings.of(epoch(1)).wait(PATIENCE)
    second = started(gate.close_and_wait, epoch(2))
    assert first.result(PATIENCE) == "superseded"
    writer.finish()
    assert second.result(PATIENCE) == "closed"


def test_a_close_that_is_sent_twice_is_answered_twice() -> None:
    """A transport may repeat it."""
    gate = make()
    assert gate.close_and_wait(epoch(1)) == "closed"
    assert gate.close_and_wait(epoch(1)) == "closed"
    gate.reopen(epoch(1))
    assert not gate.statistics().closed


def test_a_new_driver_releases_whatever_older_ones_closed() -> None:
    """Its epoch 0 opens the gate, supersedes their late closes, and leaves its own first close alone."""
    gate = make()
    gate.close_and_wait(Epoch(3, 17))
    gate.reopen(Epoch(4, 0))
    gate.enter(timeout=0).release()
    assert gate.close_and_wait(Epoch(3, 18)) == "superseded"
    assert gate.close_and_wait(Epoch(4, 1)) == "closed"
    gate.reopen(Epoch(3, 18))
    assert gate.closed_in(Epoch(4, 1))


def test_closed_in_names_one_epoch() -> None:
    """Neither the one before nor the one after, and not once it is open again."""
    gate = make()
    assert not gate.closed_in(epoch(0))
    gate.close_and_wait(epoch(2))
    assert [gate.closed_in(epoch(number)) for number in (1, 2, 3)] == [False, True, False]
    gate.reopen(epoch(2))
    assert not gate.closed_in(epoch(2))


def test_epochs_may_come_as_plain_pairs() -> None:
    """As a transport delivers them."""
    gate = make()
    assert gate.close_and_wait((3, 1)) == "closed"  # type: ignore[arg-type] # the point
    gate.reopen([3, 1])  # type: ignore[arg-type] # the point
    assert gate.statistics().released == Epoch(3, 1)


def test_whatever_order_messages_arrive_in_each_checkpoint_keeps_its_own_window() -> None:
    """Two closes and two reopenings, one of each twice, in all 720 orders: shut throughout a window, open at the end."""
    messages = [("close", 1), ("reopen", 1), ("close", 2), ("reopen", 2), ("close", 1), ("reopen", 1)]
    for delivered in itertools.permutations(messages):
        gate = make()
        window: Epoch | None = None
        for kind, number in delivered:
            target = epoch(number)
            if kind == "close":
                if gate.close_and_wait(target, timeout=0) == "closed":
                    window = target
            else:
                gate.reopen(target)
                if window is not None and window <= target:
                    window = None
            assert gate.statistics().closed == (window is not None), delivered
            assert window is None or gate.closed_in(window), delivered
        assert window is None, delivered


def test_a_close_names_who_holds_permits_when_its_time_is_up() -> None:
    """Thread and age; it is the error of a fence, and of a timeout; the gate stays closed until it is reopened."""
    clock = FakeClock()
    gate = SnapshotGate("3", hub=strict_hub(), clock=clock)
    writer = Writer(gate, "generate-2").entered()
    clock.advance(42)
    with pytest.raises(GateTimeoutError, match=r"worker '3'.*thread 'generate-2' for 42\.000 s") as raised:
        gate.close_and_wait(epoch(1), timeout=0.01)
    assert isinstance(raised.value, FenceError)
    assert isinstance(raised.value, TimeoutError)
    assert [holder.thread for holder in raised.value.holders] == ["generate-2"]
    assert gate.statistics().closed
    gate.reopen(epoch(1))
    gate.enter(timeout=0).release()
    writer.finish()


def test_a_thread_cannot_close_a_gate_that_waits_for_itself() -> None:
    """Instead of a close that waits for its own thread until its time is up."""
    gate = make()
    with gate.permit(), pytest.raises(NestedPermitError):
        gate.close_and_wait(epoch(1))
    assert not gate.statistics().closed


# ------------------------------------------------------------------------------------------------- retirement


def test_a_retired_gate_counts_as_closed_and_lets_nobody_in() -> None:
    """The worker was given up; the first reason stands."""
    gate = make()
    writer = Writer(gate).entered()
    gate.retire("its call hung")
    gate.retire("again")
    assert gate.retired == "its call hung"
    assert gate.closed_in(epoch(9))
    assert gate.close_and_wait(epoch(1), timeout=0) == "closed"
    gate.reopen(epoch(1))
    with pytest.raises(GateRetiredError, match="worker '0' is retired: its call hung"):
        gate.enter()
    writer.finish()  # its permit was forgotten: there is nothing to give back, and that is no error


def test_retiring_ends_whatever_waits_at_the_gate() -> None:
    """A writer is refused; a close that drained is answered."""
    closings = Closings()
    gate = make("0", closings)
    holder = Writer(gate).entered()
    close = started(gate.close_and_wait, epoch(1))
    assert closings.of(epoch(1)).wait(PATIENCE)
    entering = started(gate.enter)
    eventually(lambda: gate.statistics().waiting == 1)
    gate.retire("it hung")
    assert isinstance(entering.exception(PATIENCE), GateRetiredError)
    assert close.result(PATIENCE) == "closed"
    assert gate.statistics().waiting == 0
    holder.finish()


def test_a_forgotten_permit_is_no_longer_held_and_still_released_only_once() -> None:
    """The thread that comes back finds nothing to release, once."""
    gate = make()
    permit = gate.enter()
    gate.retire("it hung")
    assert not permit.live
    assert not holds_permit()
    permit.release()
    with pytest.raises(PermitReleasedError):
        permit.release()


FORKS = """
import os, signal, threading
from quiesce.errors import GateRetiredError
from quiesce.snapshot_gate import SnapshotGate, holds_permit
gate = SnapshotGate("0")
held = threading.Event()
def hold():
    with gate._lock:
        held.set()
        threading.Event().wait()
threading.Thread(target=hold, daemon=True).start()
held.wait()
permitted = SnapshotGate("1")
permit = permitted.enter()
child = os.fork()
if child == 0:
    signal.alarm(20)
    try:
        gate.enter()
    except GateRetiredError as error:
        assert f"process {os.getppid()}" in str(error), error
        assert not holds_permit()
        permit.release()
        assert permitted.statistics().permits == 0
        os._exit(7)
    os._exit(1)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
assert permitted.statistics().permits == 1 and not permitted.retired
permit.release()
permitted.enter().release()
"""


def test_a_gate_in_a_forked_child_is_retired_also_if_a_thread_held_its_lock() -> None:
    """No checkpoint closes the copy, so nothing may be made final through it; the parent's gate is untouched."""
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKS],
        timeout=40,
        check=False,
        capture_output=True,
        text=True,
    )
    assert (ended.returncode, ended.stderr) == (0, "")


# -------------------------------------------------------------------------------------------- what is reported


def test_events_carry_one_number_each_in_the_order_of_what_happened() -> None:
    """Numbers are assigned under the lock; durations are measured once."""
    clock, recorder = FakeClock(), EventRecorder()
    gate = SnapshotGate("0", hub=strict_hub(recorder), clock=clock)
    permit = gate.enter()
    clock.advance(2)
    permit.release()
    gate.close_and_wait(epoch(1))
    writer = Writer(gate).waiting()
    clock.advance(3)
    gate.reopen(epoch(1))
    writer.entered().finish()
    gate.close_and_wait(epoch(1))
    expected = [
        ("permit_granted", ("0", 1, 0)),
        ("permit_released", ("0", 2, 2_000_000_000)),
        ("gate_closing", ("0", 3, "3.1")),
        ("gate_closed", ("0", 4, "3.1", 0, "closed")),
        ("gate_reopened", ("0", 5, "3.1", 3_000_000_000)),
        ("permit_granted", ("0", 6, 3_000_000_000)),
        ("permit_released", ("0", 7, 0)),
        ("gate_closed", ("0", 8, "3.1", 0, "superseded")),
    ]
    assert sorted(recorder.events, key=lambda event: int(event.args[1])) == expected


def test_a_close_that_times_out_is_reported_as_failed() -> None:
    """The outcome tells it from one that was answered."""
    recorder = EventRecorder()
    gate = make("0", recorder)
    writer = Writer(gate).entered()
    with pytest.raises(GateTimeoutError):
        gate.close_and_wait(epoch(1), timeout=0)
    assert [args[-1] for args in recorder.of("gate_closed")] == ["failed"]
    writer.finish()


def test_the_next_gate_of_a_hub_numbers_its_events_above_the_one_before() -> None:
    """So the numbers of a label go on growing when its worker is restarted."""
    recorder = EventRecorder()
    hub = strict_hub(recorder)
    for _ in range(2):
        SnapshotGate("0", hub=hub).enter().release()
    numbers = [args[1] for args in recorder.of("permit_granted")]
    assert numbers == [1, SEQUENCES_PER_GATE + 1]


@pytest.mark.parametrize(
    "hook", ["permit_granted", "permit_released", "gate_closing", "gate_closed", "gate_reopened"]
)
def test_hooks_are_fired_without_the_lock(hook: str) -> None:
    """An observer that another thread waits for can hold nobody up at the gate."""

    class Looks:
        looked = 0

        def __init__(self) -> None:
            setattr(self, hook, self._look)

        def _look(self, *args: object) -> None:
            assert started(gate.statistics).result(PATIENCE) is not None
            self.looked += 1

    looks = Looks()
    gate = make("0", looks)
    gate.enter().release()
    gate.close_and_wait(epoch(1))
    gate.reopen(epoch(1))
    assert looks.looked == 1


class Raises:
    """An observer that fails in one hook."""

    def __init__(self, hook: str) -> None:
        setattr(self, hook, self._fail)

    def _fail(self, *args: object) -> None:
        raise RuntimeError("observer")


def close_and_reopen(gate: SnapshotGate) -> None:
    """Close a gate and reopen it."""
    gate.close_and_wait(epoch(1), 0)
    gate.reopen(epoch(1))


OPERATIONS: dict[str, Callable[[SnapshotGate], object]] = {
    "permit_granted": lambda gate: gate.enter(0),
    "permit_released": lambda gate: gate.enter(0).release(),
    "gate_closing": lambda gate: gate.close_and_wait(epoch(1), 0),
    "gate_closed": lambda gate: gate.close_and_wait(epoch(1), 0),
    "gate_reopened": close_and_reopen,
}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("hook", sorted(OPERATIONS))
def test_an_observer_that_raises_costs_neither_the_permit_nor_the_gate(hook: str, *, strict: bool) -> None:
    """The state is what it is without it; a permit whose grant could not be reported is given back."""
    hub = Hub(strict=strict)
    observer = Raises(hook)
    hub.subscribe(observer)
    gate = SnapshotGate("0", hub=hub)
    if strict:
        with pytest.raises(RuntimeError, match="observer"):
            OPERATIONS[hook](gate)
    else:
        OPERATIONS[hook](gate)
    assert hub.errors[hook] == 1
    hub.unsubscribe(observer)
    if hook == "permit_granted" and not strict:
        assert gate.statistics().permits == 1
        gate.exit()
    assert gate.statistics().permits == 0
    assert not holds_permit()
    assert gate.statistics().closed == (hook in {"gate_closing", "gate_closed"})
    gate.reopen(epoch(1))
    gate.enter(0).release()
    assert gate.close_and_wait(epoch(2), 0) == "closed"


def test_statistics_tell_what_a_gate_is_doing() -> None:
    """Every figure moves with what it counts, and back."""
    clock = FakeClock()
    gate = SnapshotGate("5", hub=strict_hub(), clock=clock)
    assert gate.statistics().epoch == Epoch(0, 0)
    holder = Writer(gate).entered()
    clock.advance(1)
    with pytest.raises(GateTimeoutError):
        gate.close_and_wait(epoch(4), timeout=0)
    waiter = Writer(gate).waiting()
    clock.advance(2)
    now = gate.statistics()
    assert (now.worker, now.instance, now.retired) == ("5", gate.instance, "")
    assert (now.closed, now.epoch, now.released) == (True, epoch(4), Epoch(0, 0))
    assert (now.permits, now.oldest_permit_seconds) == (1, 3.0)
    assert (now.waiting, now.longest_wait_seconds) == (1, 2.0)
    holder.finish()
    gate.reopen(epoch(4))
    waiter.entered().finish()
    now = gate.statistics()
    assert (now.closed, now.released, now.permits, now.waiting) == (False, epoch(4), 0, 0)
    assert (now.oldest_permit_seconds, now.longest_wait_seconds) == (0.0, 0.0)


def test_a_gate_is_found_by_collectors() -> None:
    """Under its role, on its hub."""
    hub = Hub()
    gate = SnapshotGate("0", hub=hub)
    assert hub.sources("snapshot_gate") == [gate]


def test_many_threads_and_closes_leave_a_log_in_which_the_gate_is_respected() -> None:
    """Writers, closes, early and late reopenings, all at once: no permit is out while a close is answered."""
    log = GateEventLog()
    gate = make("0", log)
    stop = threading.Event()
    inside = 0
    guard = threading.Lock()

    def write() -> None:
        nonlocal inside
        while not stop.is_set():
            with suppress(PermitTimeoutError), gate.permit(timeout=0.001):
                with guard:
                    inside += 1
                with guard:
                    inside -= 1

    writers = [started(write) for _ in range(4)]
    for number in range(1, 101):
        answer = gate.close_and_wait(epoch(number), PATIENCE)
        assert (answer, inside) == ("closed", 0)
        gate.reopen(epoch(number - 1))
        assert inside == 0
        gate.reopen(epoch(number))
    stop.set()
    for writer in writers:
        writer.result(PATIENCE)
    assert gate_is_respected(log.events) == []
    assert sorted(event.sequence for event in log.events) == list(range(1, len(log.events) + 1))
