"""Background cleanup: replies do not wait for it, checkpoints do, and no key is forgotten."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

import pytest

from quiesce.barrier import DataPlaneCheckpointBarrier
from quiesce.cleanup import CLEAR_KEYS, BackgroundCleanup
from quiesce.errors import CleanupClosedError, GateTimeoutError, LockOrderError, WouldBlockLoopError
from quiesce.snapshot_gate import Epoch, SnapshotGate
from quiesce.testing import EventRecorder, FakeClock, cancelled_at, in_virtual_time, strict_hub
from quiesce.types import RowKey
from tests.gates import cleanups

P = ParamSpec("P")
T = TypeVar("T")

PATIENCE = 30.0
"""Seconds after which a thread that should have come is taken to hang."""

LONG = 1e6
"""Seconds that no test waits: a batch of a cleanup that lingers so long goes when it is full."""


def keys(count: int, group: str = "e000-p0000001") -> list[RowKey]:
    """Return so many keys of a group."""
    return [RowKey(1, group, number, 0, 0) for number in range(count)]


def call(number: int, count: int = 2) -> list[RowKey]:
    """Return the keys of one finishing call, which no other call has."""
    return keys(count, f"e000-p{number:07d}")


class Store:
    """Notes what it is asked to clear; each clear can be held, or fail."""

    def __init__(self, failures: int = 0) -> None:
        self.batches: list[list[RowKey]] = []
        self.threads: set[str] = set()
        self.failures = failures
        self.begun = threading.Semaphore(0)
        self._may_end = threading.Event()
        self._may_end.set()

    def hold(self) -> None:
        """Let no clear end."""
        self._may_end.clear()

    def let_go(self) -> None:
        """Let clears end."""
        self._may_end.set()

    def clear(self, wanted: Sequence[RowKey]) -> int:
        """Clear, or fail."""
        self.begun.release()
        assert self._may_end.wait(PATIENCE)
        self.threads.add(threading.current_thread().name)
        if self.failures:
            self.failures -= 1
            raise OSError("the store is away")
        self.batches.append(list(wanted))
        return len(wanted)

    def cleared(self) -> Counter[RowKey]:
        """Return how often each key was cleared."""
        return Counter(key for batch in self.batches for key in batch)


class Noticed(threading.Condition):
    """A condition that tells when a thread waits for it."""

    def __init__(self, lock: threading.RLock) -> None:
        super().__init__(lock)
        self.waiting = threading.Semaphore(0)

    def wait(self, timeout: float | None = None) -> bool:
        """Tell, and wait: the lock is held until this thread does."""
        self.waiting.release()
        return super().wait(timeout)


class Blocked(deque[tuple[int, threading.Event]]):
    """Who waits for room; tells when one more does."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting = threading.Semaphore(0)

    def append(self, item: tuple[int, threading.Event], /) -> None:
        """Tell: from here on the submitter waits for its event and nothing else."""
        super().append(item)
        self.waiting.release()


class Worker:
    """A generation worker as cleanup sees one: a gate, a store, and threads that finish calls."""

    def __init__(self, **options: float) -> None:
        self.recorder = EventRecorder()
        self.hub = strict_hub(self.recorder)
        self.gate = SnapshotGate("0", hub=self.hub)
        self.store = Store(int(options.pop("failures", 0)))
        self.cleanup = BackgroundCleanup(self.gate, self.store.clear, hub=self.hub, **options)  # type: ignore[arg-type] # passed on
        self.full = self.cleanup._blocked = Blocked()  # noqa: SLF001 - who waits for room is in no statistics
        self._epochs = 0

    def finish(self, wanted: Sequence[RowKey]) -> str:
        """Finish a generation call: its final row under a permit, the obsolete rows to cleanup, the reply."""
        with self.gate.permit(PATIENCE):
            pass  # the final row is put here
        self.cleanup.submit(wanted)
        return "reply"

    def epoch(self) -> Epoch:
        """Issue an epoch, as the fence's driver does."""
        self._epochs += 1
        return Epoch(1, self._epochs)

    def close(self, timeout: float = PATIENCE) -> Epoch:
        """Close the gate for a checkpoint."""
        epoch = self.epoch()
        assert self.gate.close_and_wait(epoch, timeout) == "closed"
        return epoch

    def drained(self) -> None:
        """Wait until everything is cleared or given up."""
        assert asyncio.run(self.cleanup.drain(PATIENCE))


@pytest.fixture
def at_end() -> Iterator[list[Callable[[], object]]]:
    """Call these at the end, last first."""
    calls: list[Callable[[], object]] = []
    yield calls
    for function in reversed(calls):
        function()


Build = Callable[..., Worker]


@pytest.fixture
def build(at_end: list[Callable[[], object]]) -> Build:
    """Build workers whose cleanups are over at the end of the test."""

    def built(**options: float) -> Worker:
        worker = Worker(**options)
        at_end.append(lambda: worker.cleanup.close(PATIENCE))
        at_end.append(worker.store.let_go)
        at_end.append(lambda: worker.gate.reopen(Epoch(2, 0)))
        return worker

    return built


def beside(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
    """Call something in a thread of its own, which ends with the call."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(function(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001 - the caller gets it through the future
            future.set_exception(error)

    threading.Thread(target=run, name="beside", daemon=True).start()
    return future


def comes(condition: Callable[[], object]) -> None:
    """Let other threads run until something that no event tells has come to hold; the test's own limit ends it."""
    while not condition():
        os.sched_yield()


# ------------------------------------------------------------------------------ what a checkpoint and a reply see


def test_a_reply_returns_while_a_clear_is_still_running(build: Build) -> None:
    """However long the store takes, a finishing call queues its keys and is answered."""
    worker = build(linger_seconds=0.0)
    worker.store.hold()
    worker.cleanup.start()
    assert worker.finish(call(0)) == "reply"
    assert worker.store.begun.acquire(timeout=PATIENCE)

    assert worker.finish(call(1)) == "reply"

    assert worker.store.batches == []  # the clear of the first one is still at it
    worker.store.let_go()
    worker.drained()
    assert worker.store.batches == [call(0), call(1)]


def test_a_checkpoint_waits_for_the_clear_under_way(build: Build) -> None:
    """The clear holds a permit: a close with no time names its thread, a close with time ends when it does."""
    worker = build(linger_seconds=0.0)
    worker.store.hold()
    worker.cleanup.start()
    worker.finish(call(0))
    assert worker.store.begun.acquire(timeout=PATIENCE)

    with pytest.raises(GateTimeoutError, match="quiesce-cleanup-0"):
        worker.close(timeout=0.0)
    closing = beside(worker.gate.close_and_wait, worker.epoch(), PATIENCE)
    worker.store.let_go()

    assert closing.result(PATIENCE) == "closed"
    assert worker.store.batches == [call(0)]


def test_no_clear_starts_while_the_gate_is_closed(build: Build) -> None:
    """What is queued while a checkpoint reads rows is cleared after it."""
    worker = build(linger_seconds=0.0)
    worker.cleanup.start()
    epoch = worker.close()
    worker.cleanup.submit(call(0))  # by a call that had its permit before the close

    assert not worker.cleanup.step(block=False)
    assert worker.store.batches == []
    assert worker.gate.closed_in(epoch)
    worker.gate.reopen(epoch)
    worker.drained()

    assert worker.store.batches == [call(0)]
    order = [
        (args[1], hook)
        for hook, args in worker.recorder.events
        if hook in {"gate_closed", "gate_reopened", "clear_started"}
    ]
    assert [hook for _, hook in sorted(order)] == ["gate_closed", "gate_reopened", "clear_started"]


def test_a_checkpoint_waits_only_for_the_batch_under_way_and_the_rest_follows(build: Build) -> None:
    """The queue behind the clear stays where it is until the gate opens again."""
    worker = build(batch_size=2, linger_seconds=LONG)
    worker.store.hold()
    for number in range(4):
        worker.finish(call(number))
    worker.cleanup.start()
    assert worker.store.begun.acquire(timeout=PATIENCE)
    epoch = worker.epoch()
    closing = beside(worker.gate.close_and_wait, epoch, PATIENCE)
    comes(lambda: worker.recorder.of("gate_closing"))
    worker.store.let_go()

    assert closing.result(PATIENCE) == "closed"
    assert worker.store.batches == [call(0) + call(1)]
    assert worker.cleanup.outstanding() == (*call(2), *call(3))

    worker.gate.reopen(epoch)
    worker.drained()
    assert worker.store.batches[1:] == [call(2) + call(3)]


def test_a_close_whose_epoch_was_released_does_not_wait_for_later_clears(build: Build) -> None:
    """A late close is superseded, whatever is being cleared."""
    worker = build(linger_seconds=0.0)
    worker.store.hold()
    late = worker.epoch()
    worker.gate.reopen(late)
    worker.cleanup.start()
    worker.finish(call(0))
    assert worker.store.begun.acquire(timeout=PATIENCE)

    assert worker.gate.close_and_wait(late, PATIENCE) == "superseded"

    assert worker.store.batches == []


def test_what_waits_at_a_closed_gate_is_cleared_together(build: Build) -> None:
    """A batch is made once the permit is there, so a closed gate costs no extra clears."""
    worker = build(linger_seconds=0.0)
    worker.cleanup.start()
    epoch = worker.close()
    worker.cleanup.submit(call(0))
    waits_at_the_gate(worker)
    for number in range(1, 32):
        worker.cleanup.submit(call(number))

    worker.gate.reopen(epoch)
    worker.drained()

    assert worker.store.batches == [[key for number in range(32) for key in call(number)]]


def waits_at_the_gate(worker: Worker) -> None:
    """Wait until the cleanup's thread waits for a permit."""
    comes(lambda: worker.gate.statistics().waiting)


# ----------------------------------------------------------------------------------------- many calls, full queues


def test_a_thousand_calls_at_a_full_queue_and_two_checkpoints_do_not_deadlock(build: Build) -> None:
    """Calls that wait for room hold no permit: checkpoints close at once, and then every call is answered."""
    worker = build()
    calls = [beside(worker.finish, call(number)) for number in range(1024)]
    for _ in range(1024 - 128):
        assert worker.full.waiting.acquire(timeout=PATIENCE)
    assert sum(done.done() for done in calls) <= 128

    first = worker.close()
    worker.cleanup.start()
    waits_at_the_gate(worker)
    second = worker.epoch()
    closing = beside(worker.gate.close_and_wait, second, PATIENCE)
    comes(lambda: len(worker.recorder.of("gate_closing")) == 2)
    worker.gate.reopen(first)  # a late reopen, which says nothing about the second checkpoint
    assert closing.result(PATIENCE) == "closed"
    assert worker.store.batches == []
    worker.gate.reopen(second)
    third = worker.close()
    worker.gate.reopen(third)

    assert [done.result(PATIENCE) for done in calls] == ["reply"] * 1024
    worker.drained()
    assert len(worker.store.batches) == 32
    assert worker.store.cleared() == Counter(key for number in range(1024) for key in call(number))


def test_2048_keys_of_1024_calls_are_cleared_in_exactly_32_clears(build: Build) -> None:
    """Thirty-two calls to a clear, each key once, whoever submits how fast."""
    worker = build(linger_seconds=LONG)
    worker.cleanup.start()

    def some(first: int) -> None:
        for number in range(first, first + 128):
            worker.finish(call(number))

    for done in [beside(some, first) for first in range(0, 1024, 128)]:
        done.result(PATIENCE)
    worker.drained()

    assert [len(batch) for batch in worker.store.batches] == [64] * 32
    assert worker.store.cleared() == Counter(key for number in range(1024) for key in call(number))
    statistics = worker.cleanup.statistics()
    assert (statistics.batches, statistics.cleared, statistics.pending_calls) == (32, 2048, 0)
    assert worker.store.threads == {"quiesce-cleanup-0"}


def test_a_full_queue_holds_its_submitter_and_no_permit(build: Build) -> None:
    """The call that finds no room waits until a batch was taken; a checkpoint does not wait for it."""
    worker = build(max_pending=1, linger_seconds=0.0)
    assert worker.finish(call(0)) == "reply"
    waiting = beside(worker.finish, call(1))
    assert worker.full.waiting.acquire(timeout=PATIENCE)
    assert not waiting.done()

    epoch = worker.close(timeout=0.0)
    worker.gate.reopen(epoch)
    assert worker.cleanup.step(block=False)

    assert waiting.result(PATIENCE) == "reply"
    assert worker.store.batches == [call(0) + call(1)]


def test_hand_overs_take_no_room_from_submitters(build: Build) -> None:
    """What the event loop hands over is not counted against the bound, which is there to slow workers down."""
    worker = build(max_pending=1)
    for number in range(300):
        worker.cleanup.hand_over(call(number))

    assert worker.finish(call(300)) == "reply"

    assert worker.cleanup.statistics().pending_calls == 301


def test_a_call_without_keys_takes_no_room(build: Build) -> None:
    """There is nothing to clear: it does not wait, and makes no batch."""
    worker = build(max_pending=1)
    worker.finish(call(0))

    worker.cleanup.submit([])
    worker.cleanup.hand_over(())

    assert worker.cleanup.statistics().pending_calls == 1


def test_waiting_for_room_inside_a_permit_or_a_slot_is_an_error() -> None:
    """A submitter that a checkpoint waits for, and that waits for cleanup, which waits for the checkpoint."""
    worker = Worker()
    with worker.gate.permit(), pytest.raises(LockOrderError, match="permit"):
        worker.cleanup.submit(call(0))

    async def in_a_slot() -> None:
        barrier = DataPlaneCheckpointBarrier(hub=strict_hub())
        async with barrier.mutation("sample_clear") as cut:
            with pytest.raises(LockOrderError, match="sample_clear"):
                worker.cleanup.submit(call(0))
            with pytest.raises(LockOrderError, match="sample_clear"):
                await worker.cleanup.drain(1.0)
            with pytest.raises(LockOrderError, match="sample_clear"):
                await barrier.run_in_cut(cut, worker.cleanup.submit, call(0))

    asyncio.run(in_a_slot())
    assert worker.cleanup.outstanding() == ()


def test_an_event_loop_is_never_blocked() -> None:
    """A submission that would have to wait in the loop's own thread is refused, and has taken nothing."""
    worker = Worker(max_pending=1)

    async def twice() -> None:
        worker.cleanup.submit(call(0))
        with pytest.raises(WouldBlockLoopError):
            worker.cleanup.submit(call(1))

    asyncio.run(twice())
    assert worker.cleanup.outstanding() == tuple(call(0))


async def test_finishing_calls_that_fill_every_executor_leave_a_slot_its_thread(build: Build) -> None:
    """Calls blocked at a closed gate and at a full queue fill the default executor; a slot's thread is none of those."""
    worker = build(max_pending=1, linger_seconds=0.0)
    worker.cleanup.start()
    barrier = DataPlaneCheckpointBarrier(hub=worker.hub)
    epoch = worker.close()
    inside = threading.Semaphore(0)

    def blocked(number: int) -> str:
        inside.release()
        if number % 2:
            return worker.finish(call(number))
        worker.cleanup.submit(call(number))
        return "reply"

    # More calls than the loop's default executor has threads.
    calls = [asyncio.create_task(asyncio.to_thread(blocked, number)) for number in range(64)]
    await asyncio.sleep(0)
    for _ in range(min(32, (os.cpu_count() or 1) + 4)):
        assert inside.acquire(timeout=PATIENCE)

    async with asyncio.timeout(PATIENCE), barrier.mutation("sample_clear") as cut:
        assert await barrier.run_in_cut(cut, lambda: "done") == "done"
        worker.cleanup.hand_over(call(1000))
    async with barrier.checkpoint(PATIENCE):
        assert worker.store.batches == []
    worker.gate.reopen(epoch)

    assert set(await asyncio.gather(*calls)) == {"reply"}
    assert await worker.cleanup.drain(PATIENCE)
    assert worker.store.cleared() == Counter(key for number in (*range(64), 1000) for key in call(number))


# ------------------------------------------------------------------------------------------------------- hand-over


class Bounded(BackgroundCleanup):
    """Lacks the rule: handing over into a full queue waits for whoever drains it."""

    def hand_over(self, keys: Iterable[RowKey]) -> None:
        """Refuse where a bounded queue would block the event loop for good."""
        if len(self.outstanding()) >= 2:
            raise BlockingIOError("the loop would wait for the store, and the store may wait for the loop")
        super().hand_over(keys)


async def handing_over_never_waits(kind: type[BackgroundCleanup]) -> None:
    """However much is pending while the gate is closed, a slot hands over in its own step, and a window opens."""
    store, gate = Store(), SnapshotGate("controller", hub=strict_hub())
    barrier = DataPlaneCheckpointBarrier(hub=strict_hub())
    cleanup = kind(gate, store.clear, hub=strict_hub())
    cleanup.start()
    gate.close_and_wait(Epoch(1, 1), PATIENCE)
    try:
        for number in range(50):
            async with barrier.mutation("sample_clear"):
                cleanup.hand_over(keys(3, f"g{number}"))
        async with barrier.checkpoint(drain_timeout=1.0):
            assert len(cleanup.outstanding()) == 150
    finally:
        gate.reopen(Epoch(1, 1))
        await asyncio.to_thread(cleanup.close, PATIENCE)
    assert sum(len(batch) for batch in store.batches) == 150


@in_virtual_time
async def test_a_hand_over_never_waits_for_the_gate_or_the_store() -> None:
    """A hand-over from the event loop appends and returns, whatever is pending; nothing is bounded."""
    await handing_over_never_waits(BackgroundCleanup)


@in_virtual_time
async def test_a_bounded_hand_over_is_noticed() -> None:
    """The same check fails for a cleanup with a bound for everybody."""
    with pytest.raises(BlockingIOError):
        await handing_over_never_waits(Bounded)


def test_a_large_hand_over_is_cleared_in_pieces(build: Build) -> None:
    """No clear holds its permit, and the store's writer lock, for more than so many keys."""
    worker = build()
    wanted = keys(2 * CLEAR_KEYS + 5)
    worker.cleanup.hand_over(wanted)
    worker.cleanup.hand_over(call(9))
    worker.cleanup.start()
    worker.drained()

    assert [len(batch) for batch in worker.store.batches] == [CLEAR_KEYS, CLEAR_KEYS, 7]
    assert [key for batch in worker.store.batches for key in batch] == wanted + call(9)


# --------------------------------------------------------------------------------------------------------- batches


def test_a_batch_that_is_not_full_goes_once_nothing_more_comes(build: Build) -> None:
    """Nobody waits for a batch to fill up for longer than it lingers."""
    worker = build(linger_seconds=0.001)
    worker.cleanup.start()

    worker.finish(call(0))
    worker.drained()

    assert worker.store.batches == [call(0)]


def test_keys_are_cleared_once_in_a_batch_and_none_is_lost_at_its_bound(build: Build) -> None:
    """De-duplication is within a batch; the call after a full batch begins the next one."""
    worker = build(batch_size=2)
    same, other = call(1), call(2)
    for wanted in (same, same + other, other):
        worker.cleanup.submit(wanted)

    while worker.cleanup.step(block=False):
        pass

    assert worker.store.batches == [same + other, other]


def test_submitted_keys_are_copied(build: Build) -> None:
    """What becomes of the caller's list afterwards does not matter, and a generator is read at once."""
    worker = build()
    wanted = call(1)
    worker.cleanup.submit(wanted)
    wanted.clear()
    worker.cleanup.hand_over(key for key in call(2))

    assert worker.cleanup.outstanding() == (*call(1), *call(2))


@pytest.mark.parametrize(
    "limits",
    [
        {"batch_size": 0},
        {"max_pending": 0},
        {"max_tries": 0},
        {"linger_seconds": -1.0},
        {"linger_seconds": float("inf")},
        {"linger_seconds": float("nan")},
    ],
)
def test_limits_that_are_none_are_refused(limits: dict[str, float]) -> None:
    """They are named before any thread is started."""
    (name,) = limits
    with pytest.raises(ValueError, match=name):
        Worker(**limits)


def test_a_clear_is_reported_with_its_permit(build: Build) -> None:
    """Hooks come in pairs, tell how many calls and keys, and carry the permit's place among the gate's events."""
    worker = build()
    worker.cleanup.submit(call(1))
    worker.cleanup.submit(call(2))
    worker.cleanup.step(block=False)

    ((_, sequence, _),) = worker.recorder.of("permit_granted")
    assert worker.recorder.of("clear_started") == [("0", sequence, 4)]
    ((label, calls, count, _, outcome, rollouts),) = worker.recorder.of("clear_ended")
    assert (label, calls, count, outcome) == ("0", 2, 4, "completed")
    assert rollouts == ((call(1)[0].group_id, 0), (call(2)[0].group_id, 0))
    assert worker.recorder.hooks() == ["permit_granted", "clear_started", "clear_ended", "permit_released"]
    assert worker.hub.sources("cleanup") == [worker.cleanup]


def test_statistics_tell_how_long_the_oldest_call_has_waited() -> None:
    """The age is that of the first call that nobody has taken yet."""
    clock = FakeClock()
    cleanup = BackgroundCleanup(SnapshotGate("0", hub=strict_hub()), len, hub=strict_hub(), clock=clock)
    assert cleanup.statistics().oldest_queued_seconds == 0.0
    cleanup.submit(call(0))
    clock.advance(2.0)
    cleanup.submit(call(1))
    clock.advance(1.0)

    statistics = cleanup.statistics()

    assert (statistics.worker, statistics.pending_calls, statistics.pending_keys) == ("0", 2, 4)
    assert statistics.oldest_queued_seconds == pytest.approx(3.0)


# ---------------------------------------------------------------------------------------------------- failed clears


def test_a_failed_clear_is_tried_again_under_a_fresh_permit(build: Build) -> None:
    """A store that is away for a moment costs nothing; between two tries a checkpoint may pass."""
    worker = build(failures=2)
    worker.cleanup.submit(call(0))

    assert worker.cleanup.step(block=False)
    epoch = worker.close(timeout=0.0)
    assert not worker.cleanup.step(block=False)
    assert worker.cleanup.outstanding() == tuple(call(0))
    worker.gate.reopen(epoch)
    assert worker.cleanup.step(block=False)
    assert worker.cleanup.step(block=False)

    assert worker.store.batches == [call(0)]
    assert not worker.cleanup.step(block=False)
    statistics = worker.cleanup.statistics()
    assert (statistics.failures, statistics.batches, statistics.cleared, statistics.abandoned) == (2, 1, 2, 0)
    assert [ended[4] for ended in worker.recorder.of("clear_ended")] == ["failed", "failed", "completed"]
    assert len({sequence for _, sequence, _ in worker.recorder.of("clear_started")}) == 3
    assert worker.cleanup.outstanding() == ()


def test_keys_whose_clear_keeps_failing_are_given_up_by_name(
    build: Build, caplog: pytest.LogCaptureFixture
) -> None:
    """No failure is latched: after the last try the rows stay as extras that the inventory can explain, and others go on."""
    worker = build(failures=3, batch_size=1, linger_seconds=0.0)
    worker.cleanup.start()

    worker.finish(call(0))
    worker.finish(call(1))
    worker.drained()

    assert worker.store.batches == [call(1)]
    assert worker.cleanup.outstanding() == tuple(call(0))
    statistics = worker.cleanup.statistics()
    assert (statistics.failures, statistics.abandoned, statistics.cleared) == (3, 2, 2)
    assert "try 3 of 3" in caplog.text
    assert call(0)[0].encode() in caplog.text
    assert worker.cleanup.close() == 2


def test_keys_in_progress_are_outstanding(build: Build) -> None:
    """Between the queue and the store a key is never in neither."""
    worker = build(linger_seconds=0.0)
    worker.store.hold()
    worker.cleanup.start()
    worker.cleanup.hand_over(keys(3))
    assert worker.store.begun.acquire(timeout=PATIENCE)

    assert worker.cleanup.outstanding() == tuple(keys(3))
    assert worker.cleanup.statistics().pending_keys == 3

    worker.store.let_go()
    worker.drained()
    assert worker.cleanup.outstanding() == ()


async def test_draining_waits_for_what_comes_meanwhile(build: Build) -> None:
    """Drain returns once nothing is pending at all, and not before its time is up if something is."""
    worker = build(linger_seconds=0.0)
    worker.store.hold()
    worker.cleanup.start()
    worker.cleanup.hand_over(call(0))
    assert worker.store.begun.acquire(timeout=PATIENCE)  # what comes now is of another batch
    assert not await worker.cleanup.drain(0.0)
    draining = asyncio.create_task(worker.cleanup.drain(PATIENCE))
    await asyncio.sleep(0)
    worker.cleanup.hand_over(call(1))
    worker.store.let_go()

    assert await draining
    assert worker.store.batches == [call(0), call(1)]


@in_virtual_time
async def test_a_drain_that_is_cancelled_leaves_no_thread_waiting() -> None:
    """The thread that waits for the end of cleanup ends with its caller, whether it waits already or not."""
    worker = Worker()
    worker.cleanup.hand_over(call(0))
    waiting = worker.cleanup._idle = Noticed(worker.cleanup._lock)  # noqa: SLF001 - as above
    for step in (0, 1):
        stopped = await cancelled_at(worker.cleanup.drain(PATIENCE * 100), step)
        assert (stopped.outcome, stopped.reached) == ("cancelled", True)
    waiting.waiting = threading.Semaphore(0)
    drained = asyncio.create_task(worker.cleanup.drain(PATIENCE * 100))
    await asyncio.sleep(0)
    assert waiting.waiting.acquire(timeout=PATIENCE)
    drained.cancel()
    with pytest.raises(asyncio.CancelledError):
        await drained
    for thread in threading.enumerate():
        if thread.name.startswith("quiesce-drain"):
            thread.join(PATIENCE)
            assert not thread.is_alive()


# ------------------------------------------------------------------------------------------------------------- ends


def test_closing_drains_what_is_queued(build: Build) -> None:
    """A store that keeps up leaves nothing, the thread has ended, and closing again changes nothing."""
    worker = build(linger_seconds=LONG)  # an end does not linger
    before = cleanups()
    worker.cleanup.start()
    worker.finish(call(0))

    assert worker.cleanup.close(PATIENCE) == 0

    assert worker.store.batches == [call(0)]
    assert not cleanups() - before
    assert worker.cleanup.close(PATIENCE) == 0


def test_closing_against_a_closed_gate_gives_up_and_deletes_nothing_later(build: Build) -> None:
    """Under a snapshot nothing is deleted, also not by a cleanup that ends; what is left is named."""
    worker = build(linger_seconds=0.0)
    before = cleanups()
    worker.cleanup.start()
    (thread,) = cleanups() - before
    epoch = worker.close()
    worker.cleanup.submit(call(0))
    waits_at_the_gate(worker)

    assert worker.cleanup.close(0.01) == 2

    worker.gate.reopen(epoch)
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert worker.store.batches == []
    assert worker.cleanup.outstanding() == tuple(call(0))
    assert worker.cleanup.statistics().abandoned == 2


def test_closing_at_once_does_not_wait_for_a_hung_clear(
    build: Build, caplog: pytest.LogCaptureFixture
) -> None:
    """The clear goes on in its thread; what was queued behind it is given up, and counted."""
    worker = build(linger_seconds=0.0)
    worker.store.hold()
    worker.cleanup.start()
    worker.finish(call(0))
    assert worker.store.begun.acquire(timeout=PATIENCE)
    worker.finish(call(1))

    assert worker.cleanup.close(0.0) == 4

    assert worker.cleanup.outstanding() == (*call(0), *call(1))
    assert "ended with 4 rows uncleared" in caplog.text
    worker.store.let_go()
    worker.drained()
    assert worker.cleanup.close(0.0) == 2
    assert worker.store.batches == [call(0)]


def test_a_clear_that_fails_after_the_end_is_not_tried_again(build: Build) -> None:
    """Its keys are given up with the others."""
    worker = build(failures=1, linger_seconds=0.0)
    worker.store.hold()
    worker.cleanup.start()
    worker.finish(call(0))
    assert worker.store.begun.acquire(timeout=PATIENCE)
    worker.cleanup.close(0.0)
    worker.store.let_go()
    worker.drained()

    assert worker.cleanup.outstanding() == tuple(call(0))
    assert worker.cleanup.statistics().failures == 1


def test_closing_lets_go_of_a_submitter_that_waits_for_room(build: Build) -> None:
    """Its keys are queued already, so it is answered; who comes later is refused."""
    worker = build(max_pending=1)
    worker.finish(call(0))
    waiting = beside(worker.finish, call(1))
    assert worker.full.waiting.acquire(timeout=PATIENCE)

    assert worker.cleanup.close(PATIENCE) == 4  # it was never started

    assert waiting.result(PATIENCE) == "reply"
    with pytest.raises(CleanupClosedError, match=r"'0'.*closed"):
        worker.cleanup.submit(call(2))
    with pytest.raises(CleanupClosedError):
        worker.cleanup.start()


def test_a_hand_over_after_the_end_is_kept_by_name(build: Build) -> None:
    """Whoever ends a group's ownership cannot fail half-way because nobody clears any more."""
    worker = build()
    worker.cleanup.start()
    worker.cleanup.close(PATIENCE)

    worker.cleanup.hand_over(call(0))

    assert worker.cleanup.outstanding() == tuple(call(0))
    assert worker.cleanup.statistics().abandoned == 2
    assert worker.cleanup.close() == 2


def test_starting_twice_starts_one_thread(build: Build) -> None:
    """There is one that clears."""
    worker = build()
    before = cleanups()
    worker.cleanup.start()
    worker.cleanup.start()

    assert len(cleanups() - before) == 1


def test_a_retired_gate_ends_the_cleanup(build: Build) -> None:
    """A worker that was given up clears nothing more: its keys are named, and nobody waits for room for ever."""
    worker = build(max_pending=1, linger_seconds=0.0)
    worker.close()
    worker.cleanup.submit(call(0))
    waiting = beside(worker.cleanup.submit, call(1))
    assert worker.full.waiting.acquire(timeout=PATIENCE)
    worker.cleanup.start()
    waits_at_the_gate(worker)

    worker.gate.retire("its call hung")

    waiting.result(PATIENCE)
    worker.drained()
    assert worker.cleanup.outstanding() == (*call(0), *call(1))
    with pytest.raises(CleanupClosedError, match="its call hung"):
        worker.cleanup.submit(call(2))
    assert worker.store.batches == []


def test_a_worker_thread_that_dies_with_its_permit_stops_checkpoints_and_not_cleanup(build: Build) -> None:
    """Nobody can tell what its permit guarded, so a close names it in vain; obsolete rows are cleared all the same."""
    worker = build(linger_seconds=0.0)
    worker.cleanup.start()
    dead = threading.Thread(target=worker.gate.enter, name="died with it")
    dead.start()
    dead.join()

    worker.finish(call(0))
    worker.drained()
    epoch = worker.epoch()
    with pytest.raises(GateTimeoutError, match=r"died with it.*ended"):
        worker.gate.close_and_wait(epoch, 0.0)
    worker.gate.reopen(epoch)
    worker.finish(call(1))
    worker.drained()

    assert worker.store.batches == [call(0), call(1)]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("where", ["clear", "hook"])
def test_a_cleanup_thread_that_dies_gives_its_permit_back_and_says_so(where: str, build: Build) -> None:
    """Its keys are named, checkpoints close, and submitters are told instead of waiting for ever."""
    worker = build(max_pending=1, linger_seconds=0.0)

    def die(*_: object) -> int:
        raise SystemExit("somebody ended the thread")

    if where == "clear":
        worker.cleanup._clear = die  # noqa: SLF001 - the store that does it
    else:
        worker.recorder.clear_started = die  # type: ignore[attr-defined] # a hook that is no hook
        worker.hub._rebuild()  # noqa: SLF001 - as if it had come with it
    worker.finish(call(0))
    waiting = beside(worker.finish, call(1))
    assert worker.full.waiting.acquire(timeout=PATIENCE)

    worker.cleanup.start()

    assert waiting.result(PATIENCE) == "reply"
    thread = worker.cleanup._thread  # noqa: SLF001 - that it has ended
    assert thread is not None
    thread.join(PATIENCE)
    assert set(worker.cleanup.outstanding()) == {*call(0), *call(1)}
    statistics = worker.cleanup.statistics()
    assert (statistics.pending_calls, statistics.abandoned) == (0, 4)
    worker.close()
    with pytest.raises(CleanupClosedError, match="somebody ended the thread"):
        worker.cleanup.submit(call(2))


def test_a_process_with_a_full_queue_exits(build: Build) -> None:
    """Neither the cleanup's thread at a closed gate nor submitters that wait for room keep the interpreter."""
    program = (
        "import threading\n"
        "from quiesce.cleanup import BackgroundCleanup\n"
        "from quiesce.snapshot_gate import Epoch, SnapshotGate\n"
        "from quiesce.threads import DaemonExecutor\n"
        "from quiesce.types import RowKey\n"
        "gate = SnapshotGate('0'); cleanup = BackgroundCleanup(gate, print, max_pending=1)\n"
        "gate.close_and_wait(Epoch(1, 1)); cleanup.start()\n"
        "pool = DaemonExecutor('calls', 8)\n"
        "for number in range(8): pool.submit(cleanup.submit, [RowKey(1, 'g', number, 0, 0)])\n"
        "while cleanup.statistics().pending_calls < 8 or not gate.statistics().waiting: pass\n"
        "print('end')\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], timeout=40, check=False, capture_output=True, text=True
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "end\n", "")


def test_a_forked_child_is_refused_instead_of_blocked() -> None:
    """The child has no thread that clears, and perhaps a lock that nobody gives back; the parent's cleanup goes on."""
    program = (
        "import os, signal, threading\n"
        "from quiesce.cleanup import BackgroundCleanup\n"
        "from quiesce.errors import CleanupClosedError\n"
        "from quiesce.snapshot_gate import SnapshotGate\n"
        "from quiesce.types import RowKey\n"
        "keys = [RowKey(1, 'g', 0, 0, 0)]\n"
        "cleanup = BackgroundCleanup(SnapshotGate('0'), len); cleanup.start()\n"
        "locked, over = threading.Event(), threading.Event()\n"
        "def hold():\n"
        "    with cleanup._lock: locked.set(); over.wait()\n"
        "threading.Thread(target=hold, daemon=True).start(); locked.wait()\n"
        "pid = os.fork()\n"
        "if not pid:\n"
        "    signal.alarm(20)\n"
        "    refused = 0\n"
        "    uses = (lambda: cleanup.submit(keys), lambda: cleanup.hand_over(keys), cleanup.start,\n"
        "            cleanup.outstanding, cleanup.statistics)\n"
        "    for use in uses:\n"
        "        try: use()\n"
        "        except CleanupClosedError as error: refused += f'forked off {os.getppid()}' in str(error)\n"
        "    os._exit(refused + cleanup.close(5.0))\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
        "over.set(); cleanup.submit(keys); print(cleanup.close(20.0), cleanup.statistics().cleared)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        timeout=40,
        check=False,
        capture_output=True,
        text=True,
    )
    assert (ended.stdout, ended.returncode) == ("5\n0 1\n", 0), ended.stderr
