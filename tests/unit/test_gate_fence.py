"""Claims about the fence over gates: a cut is taken only between gates that were closed throughout, and all reopen."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any

import pytest

from quiesce.barrier import DataPlaneCheckpointBarrier
from quiesce.errors import (
    DuplicateWorkerError,
    FenceError,
    GateRetiredError,
    LockOrderError,
    PermitTimeoutError,
    WorkerGoneError,
)
from quiesce.gate_fence import GateFence, LocalGate
from quiesce.observers import Hub
from quiesce.snapshot_gate import Epoch, PermitHolder, SnapshotGate
from quiesce.testing import in_virtual_time, settle, strict_hub
from tests.gates import PATIENCE, RemoteGate, Writer, eventually, started
from tests.save_rig import Rig


def local(worker: str) -> LocalGate:
    """Return the handle of a new gate of this process."""
    return LocalGate(SnapshotGate(worker, hub=strict_hub()))


def fence_over(*handles: LocalGate | RemoteGate, incarnation: int = 5) -> GateFence:
    """Return a fence with these workers."""
    fence = GateFence(incarnation, hub=strict_hub())
    for handle in handles:
        fence.register(handle)
    return fence


def is_open(handle: LocalGate | RemoteGate) -> bool:
    """Tell whether a permit can be had at once."""
    try:
        handle.gate.enter(timeout=0).release()
    except PermitTimeoutError:
        return False
    return True


def now() -> float:
    """Return the loop's time."""
    return asyncio.get_running_loop().time()


# ------------------------------------------------------------------------------------------- closing, reopening


@in_virtual_time
async def test_a_fence_closes_every_worker_and_reopens_every_worker() -> None:
    """Control fans out: all gates are closed in the window, in one epoch, and open after it."""
    handles: list[LocalGate | RemoteGate] = [local("0"), local("1"), RemoteGate("2"), RemoteGate("3")]
    fence = fence_over(*handles)
    await fence.close("cut", timeout=5)
    assert [handle.gate.closed_in(Epoch(5, 1)) for handle in handles] == [True] * 4
    await fence.verify()
    assert not any(is_open(handle) for handle in handles)
    await fence.reopen()
    await settle()
    assert all(is_open(handle) for handle in handles)
    assert fence.statistics().reopening == ()


async def test_a_close_waits_for_the_write_that_is_under_way() -> None:
    """The worker's thread makes its rows final, then the fence is closed."""
    handle = local("0")
    fence = fence_over(handle)
    writer = Writer(handle.gate).entered()
    closing = asyncio.create_task(fence.close("cut", timeout=PATIENCE))
    await asyncio.to_thread(eventually, lambda: handle.gate.statistics().closed)
    assert not closing.done()
    writer.finish()
    await closing
    await fence.verify()
    await fence.reopen()
    await fence.aclose()


async def test_a_fence_does_not_pause_decoding() -> None:
    """A generation call goes on in the window; only its terminal write waits for the reopening."""
    handle = local("0")
    fence = fence_over(handle)
    decoding, decoded = threading.Event(), threading.Event()

    def generate() -> str:
        decoding.set()
        tokens = [started(lambda number=number: number).result(PATIENCE) for number in range(8)]  # type: ignore[misc] # bound early
        decoded.set()
        with handle.gate.permit():
            return f"{len(tokens)} tokens are final"

    await fence.close("cut", timeout=5)
    call = started(generate)
    assert await asyncio.to_thread(decoded.wait, PATIENCE)
    assert not call.done()
    await fence.verify()
    await fence.reopen()
    assert await asyncio.to_thread(call.result, PATIENCE) == "8 tokens are final"
    await fence.aclose()


async def test_a_fence_is_not_queued_behind_whatever_else_runs_in_threads() -> None:
    """Neither a cut's thread nor a full default executor keeps a close from being sent."""
    handle, barrier = local("0"), DataPlaneCheckpointBarrier(hub=strict_hub())
    fence, go_on = fence_over(handle), threading.Event()
    loop = asyncio.get_running_loop()
    blocked = [loop.run_in_executor(None, go_on.wait) for _ in range(64)]

    async def cut() -> None:
        async with barrier.mutation("retry") as token:
            await barrier.run_in_cut(token, go_on.wait)

    running = asyncio.create_task(cut())
    await asyncio.sleep(0)
    await fence.close("cut", timeout=PATIENCE)
    await fence.verify()
    await fence.reopen()
    assert not running.done()
    go_on.set()
    await running
    await asyncio.wait(blocked)
    await fence.aclose()


@in_virtual_time
async def test_closes_run_side_by_side_under_one_deadline() -> None:
    """Three workers that take most of the time each take it together."""

    class Slow(RemoteGate):
        async def close(self, epoch: Epoch, timeout: float) -> object:  # type: ignore[override] # loosely
            await asyncio.sleep(0.9 * timeout)
            return await super().close(epoch, timeout)

    fence = fence_over(Slow("0"), Slow("1"), Slow("2"))
    await fence.close("cut", timeout=10)
    assert now() == pytest.approx(9)
    await fence.reopen()
    await fence.aclose()


@in_virtual_time
async def test_a_worker_that_never_answers_refuses_the_cut_at_the_deadline() -> None:
    """Whatever its handle does with the timeout that it was given."""
    silent, other = RemoteGate("0"), local("1")
    silent.hold["close"] = asyncio.Event()
    fence = fence_over(silent, other)
    with pytest.raises(FenceError, match=r"cut abc.*worker '0' did not answer within 11 s"):
        await fence.close("abc", timeout=10)
    assert now() == pytest.approx(11)
    assert is_open(other)
    await fence.aclose()


@in_virtual_time
async def test_a_handle_that_swallows_its_cancellation_holds_nobody_up() -> None:
    """The deadline is the fence's own."""

    class Stubborn(RemoteGate):
        async def close(self, epoch: Epoch, timeout: float) -> object:  # type: ignore[override] # loosely
            try:
                await asyncio.sleep(1000)
            except asyncio.CancelledError:
                await asyncio.sleep(50)
            return "closed"

    fence = fence_over(Stubborn("0"))
    with pytest.raises(FenceError, match="worker '0'"):
        await fence.close("cut", timeout=10)
    assert now() == pytest.approx(11)
    await asyncio.sleep(60)


async def test_a_permit_that_stays_out_refuses_the_cut_and_names_its_holder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Worker, thread and age; and every gate is open when the error is there."""
    # A late answer would be replaced by an error that cannot name the thread.
    monkeypatch.setattr("quiesce.gate_fence.CLOSE_GRACE_SECONDS", PATIENCE)
    hung, other = local("0"), local("1")
    fence = fence_over(hung, other)
    writer = Writer(hung.gate, "generate-7").entered()
    with pytest.raises(FenceError, match=r"cut abc: .*worker '0'.*thread 'generate-7' for"):
        await fence.close("abc", timeout=0.05)
    assert is_open(hung)
    assert is_open(other)
    writer.finish()
    await fence.close("next", timeout=5)
    await fence.verify()
    await fence.reopen()
    await fence.aclose()


@in_virtual_time
async def test_the_first_refusal_ends_a_close() -> None:
    """The cut is refused anyway: no worker is kept closed, and no trainer held, for what others might say."""
    lost, slow = RemoteGate("0"), RemoteGate("1")
    lost.lose["close"] = 1
    slow.hold["close"] = asyncio.Event()
    fence = fence_over(lost, slow)
    with pytest.raises(
        FenceError, match=r"worker '0' could not be asked \(ConnectionError: close was lost\)"
    ):
        await fence.close("cut", timeout=60)
    assert now() == 0
    await settle()
    assert ("reopen", Epoch(5, 1)) in lost.calls
    assert ("reopen", Epoch(5, 1)) in slow.calls


@in_virtual_time
async def test_one_worker_that_fails_does_not_keep_others_from_being_asked_or_reopened() -> None:
    """All are asked at once, all are told to reopen."""
    lost = RemoteGate("0")
    lost.lose["close"] = 1
    handles: list[LocalGate | RemoteGate] = [lost, RemoteGate("1"), local("2")]
    fence = fence_over(*handles)
    with pytest.raises(FenceError):
        await fence.close("cut", timeout=60)
    await settle()
    assert all(is_open(handle) for handle in handles)
    for handle in handles:
        assert handle.gate.close_and_wait(Epoch(5, 1)) == "superseded"


@pytest.mark.parametrize("answer", ["superseded", "yes", None])
@in_virtual_time
async def test_any_answer_but_closed_refuses_the_cut(answer: object) -> None:
    """It names worker, answer and epoch."""
    worker = RemoteGate("4")
    worker.answers["close"] = answer
    fence = fence_over(worker)
    with pytest.raises(FenceError, match=rf"worker '4' answered {answer!r} to the close of epoch 5\.1"):
        await fence.close("cut", timeout=5)
    await settle()
    assert is_open(worker)


@in_virtual_time
async def test_a_fence_that_is_reopened_while_it_closes_refuses_the_cut() -> None:
    """Whatever the worker answers: somebody opened the gates that were closed by then."""
    worker = RemoteGate("0")
    worker.hold["close"] = asyncio.Event()
    worker.answers["close"] = "closed"
    fence = fence_over(worker)
    closing = asyncio.create_task(fence.close("cut", timeout=5))
    await settle()
    await fence.reopen()
    worker.hold["close"].set()
    with pytest.raises(FenceError, match="it was reopened meanwhile"):
        await closing


@in_virtual_time
async def test_a_close_that_had_to_wait_for_its_thread_waits_no_longer_for_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The deadline counts from the asking."""
    monotonic, seconds = time.monotonic, 0.0

    class Busy(Executor):
        def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:  # noqa: ANN401 - Executor's
            nonlocal seconds
            seconds = 100.0
            future: Future[Any] = Future()
            try:
                future.set_result(fn(*args, **kwargs))
            except FenceError as error:
                future.set_exception(error)
            return future

    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + seconds)
    handle = LocalGate(SnapshotGate("0", hub=strict_hub()), executor=Busy())
    writer = Writer(handle.gate).entered()
    with pytest.raises(FenceError, match="was not empty within 0 s"):
        await handle.close(Epoch(5, 1), timeout=60)
    writer.finish()
    handle.shutdown()


@in_virtual_time
async def test_a_close_that_arrives_after_its_release_leaves_the_gate_open() -> None:
    """The message was under way while the save was given up."""
    worker = RemoteGate("0")
    fence = fence_over(worker)
    worker.hold["close"] = asyncio.Event()
    late = asyncio.create_task(worker.close(Epoch(5, 1), 60))
    closing = asyncio.create_task(fence.close("cut", timeout=60))
    await settle()
    closing.cancel()
    await settle()
    assert worker.calls == [("reopen", Epoch(5, 1))]
    worker.hold["close"].set()
    assert await late == "superseded"
    assert is_open(worker)


async def test_no_fence_is_closed_while_a_cut_is_held() -> None:
    """Awaiting a worker inside a section could wait for a thread that waits for that section."""
    fence, barrier = fence_over(local("0")), DataPlaneCheckpointBarrier(hub=strict_hub())
    async with barrier.mutation("retry"):
        with pytest.raises(LockOrderError):
            await fence.close("cut", timeout=5)
        with pytest.raises(LockOrderError):
            await fence.verify()
        with pytest.raises(LockOrderError):
            await fence.adopt(RemoteGate("1"))
    assert fence.statistics().closes == 0


@in_virtual_time
async def test_verifying_an_open_fence_is_refused() -> None:
    """There is nothing that it could prove."""
    fence = fence_over(local("0"))
    with pytest.raises(FenceError, match="it is not closed"):
        await fence.verify()


@in_virtual_time
async def test_a_close_that_was_never_reopened_is_released_by_the_next_one() -> None:
    """Its epoch is over, whoever forgot it; the new window is the new epoch's alone."""
    worker = RemoteGate("0")
    fence = fence_over(worker)
    await fence.close("first", timeout=5)
    await fence.close("second", timeout=5)
    await settle()
    assert worker.gate.closed_in(Epoch(5, 2))
    assert worker.gate.statistics().released == Epoch(5, 1)
    await fence.reopen()
    await settle()
    assert is_open(worker)


# --------------------------------------------------------------------------------------------- what verify sees


@in_virtual_time
async def test_a_gate_that_was_opened_inside_the_window_refuses_the_cut() -> None:
    """By a later driver, for example, that adopted the worker."""
    worker, other = RemoteGate("0"), local("1")
    fence = fence_over(worker, other)
    await fence.close("cut", timeout=5)
    worker.gate.reopen(Epoch(6, 0))
    with pytest.raises(FenceError, match=r"worker '0' is not closed in epoch 5\.1 any more"):
        await fence.verify()
    assert is_open(other)


@in_virtual_time
async def test_a_worker_that_does_not_answer_the_verification_refuses_the_cut() -> None:
    """Within the time of an answer, not of a close."""
    worker = RemoteGate("0")
    fence = fence_over(worker)
    await fence.close("cut", timeout=600)
    worker.hold["closed_in"] = asyncio.Event()
    with pytest.raises(FenceError, match="worker '0' did not answer within 5 s"):
        await fence.verify()
    assert now() == pytest.approx(5)


@in_virtual_time
async def test_a_dead_worker_counts_as_closed() -> None:
    """Before the close, while it is being closed, and in the window: it makes nothing final any more."""
    dead, dying, later, alive = RemoteGate("0"), RemoteGate("1"), RemoteGate("2"), RemoteGate("3")
    dead.alive = False
    dying.hold["close"] = asyncio.Event()
    fence = fence_over(dead, dying, later, alive)
    closing = asyncio.create_task(fence.close("cut", timeout=60))
    await settle()
    dying.alive = False
    await closing
    assert now() < 1
    later.alive = False
    later.hold["closed_in"] = asyncio.Event()
    await fence.verify()
    assert ("close", Epoch(5, 1)) not in dead.calls
    await fence.reopen()
    await settle()
    assert is_open(alive)
    assert fence.statistics().reopening == ()


@in_virtual_time
async def test_a_worker_that_fails_to_answer_because_it_died_counts_as_closed() -> None:
    """Its connection broke with it."""

    class Dying(RemoteGate):
        async def close(self, epoch: Epoch, timeout: float) -> object:  # type: ignore[override] # loosely
            self.alive = False
            raise ConnectionResetError

    fence = fence_over(Dying("0"))
    await fence.close("cut", timeout=5)
    await fence.verify()


@in_virtual_time
async def test_a_worker_that_was_taken_for_dead_and_is_alive_refuses_the_cut() -> None:
    """It was never closed."""
    worker = RemoteGate("0")
    worker.alive = False
    fence = fence_over(worker)
    await fence.close("cut", timeout=5)
    worker.alive = True
    with pytest.raises(FenceError, match="worker '0' was taken for dead, and is alive"):
        await fence.verify()


@pytest.mark.parametrize("answers", [True, False])
@in_virtual_time
async def test_a_worker_that_was_restarted_in_the_window_refuses_the_cut(*, answers: bool) -> None:
    """Also if the new one claims to be closed: nobody fenced it while the cut was taken."""
    worker = RemoteGate("6")
    fence = fence_over(worker)
    await fence.close("cut", timeout=5)
    worker.restart()
    if answers:
        worker.answers["closed_in"] = True
    with pytest.raises(FenceError, match="worker '6' was restarted meanwhile"):
        await fence.verify()
    await settle()
    assert ("reopen", Epoch(5, 1)) in worker.calls  # the close may yet reach the new one


@in_virtual_time
async def test_a_worker_that_died_and_was_restarted_in_the_window_refuses_the_cut() -> None:
    """Dead would count as closed; its successor does not."""
    worker = RemoteGate("6")
    fence = fence_over(worker)
    await fence.close("cut", timeout=5)
    worker.restart()
    worker.alive = False
    with pytest.raises(FenceError, match="worker '6' was restarted meanwhile"):
        await fence.verify()


@in_virtual_time
async def test_a_successor_that_is_registered_in_the_window_refuses_the_cut() -> None:
    """The same, where a restarted worker comes with a handle of its own."""
    worker = RemoteGate("6")
    fence = fence_over(worker)
    await fence.close("cut", timeout=5)
    worker.alive = False
    fence.register(RemoteGate("6"))
    with pytest.raises(FenceError, match="worker '6' was restarted meanwhile"):
        await fence.verify()


@in_virtual_time
async def test_a_successor_is_told_to_reopen_too() -> None:
    """The close of the dead worker may yet reach whoever has its address now; nobody else would open that gate."""
    worker, successor = RemoteGate("6"), RemoteGate("6")
    fence = fence_over(worker)
    await fence.close("cut", timeout=5)
    worker.alive = False
    fence.register(successor)
    await fence.reopen()
    await settle()
    assert successor.calls == [("reopen", Epoch(5, 1))]
    assert successor.gate.close_and_wait(Epoch(5, 1)) == "superseded"


@in_virtual_time
async def test_a_worker_that_was_restarted_while_it_was_closed_refuses_the_cut_before_the_window() -> None:
    """There is no use in taking it."""
    worker = RemoteGate("6")
    worker.hold["close"] = asyncio.Event()
    fence = fence_over(worker)
    closing = asyncio.create_task(fence.close("cut", timeout=5))
    await settle()
    worker.restart()
    worker.hold["close"].set()
    with pytest.raises(FenceError, match="worker '6' was restarted meanwhile"):
        await closing
    await settle()
    assert is_open(worker)


@in_virtual_time
async def test_a_worker_that_joins_while_the_fence_is_closed_refuses_the_cut() -> None:
    """Its gate was open throughout; from the next close on it is fenced."""
    fence, joining = fence_over(RemoteGate("0")), RemoteGate("1")
    await fence.close("cut", timeout=5)
    fence.register(joining)
    with pytest.raises(FenceError, match="worker '1' joined meanwhile"):
        await fence.verify()
    await fence.reopen()
    await fence.close("next", timeout=5)
    assert joining.gate.closed_in(Epoch(5, 2))
    await fence.verify()
    await fence.reopen()
    await fence.aclose()


@in_virtual_time
async def test_a_worker_that_joins_during_the_close_refuses_the_cut_before_the_window() -> None:
    """There is no use in taking it."""
    slow = RemoteGate("0")
    slow.hold["close"] = asyncio.Event()
    fence = fence_over(slow)
    closing = asyncio.create_task(fence.close("cut", timeout=5))
    await settle()
    fence.register(RemoteGate("1"))
    slow.hold["close"].set()
    with pytest.raises(FenceError, match="worker '1' joined meanwhile"):
        await closing


@in_virtual_time
async def test_a_worker_that_is_unregistered_in_the_window_still_counts_and_is_reopened() -> None:
    """It was closed for this cut; leaving the next one out of it changes nothing about that."""
    leaving, staying = RemoteGate("0"), local("1")
    fence = fence_over(leaving, staying)
    await fence.close("cut", timeout=5)
    fence.unregister("0")
    fence.unregister("nobody")
    leaving.gate.reopen(Epoch(6, 0))
    with pytest.raises(FenceError, match="worker '0' is not closed"):
        await fence.verify()
    await settle()
    assert ("reopen", Epoch(5, 1)) in leaving.calls
    await fence.close("next", timeout=5)
    assert leaving.calls[-1][0] == "reopen"
    await fence.reopen()
    await fence.aclose()


@in_virtual_time
async def test_two_live_workers_cannot_have_one_label() -> None:
    """One of them would not be fenced; a dead one is replaced."""
    first, second = RemoteGate("0"), RemoteGate("0")
    fence = fence_over(first)
    fence.register(first)
    with pytest.raises(DuplicateWorkerError, match="worker '0'"):
        fence.register(second)
    first.alive = False
    fence.register(second)
    await fence.close("cut", timeout=5)
    assert second.gate.closed_in(Epoch(5, 1))
    await fence.reopen()
    await fence.aclose()


# --------------------------------------------------------------------------------------------------- reopening


@in_virtual_time
async def test_reopening_never_suspends() -> None:
    """However slow workers are; gates of this process are open when it returns."""
    slow, here = RemoteGate("0"), local("1")
    fence = fence_over(slow, here)
    await fence.close("cut", timeout=5)
    slow.hold["reopen"] = asyncio.Event()
    with pytest.raises(StopIteration):
        fence.reopen().send(None)
    assert is_open(here)
    assert fence.statistics().reopening == ("0",)
    await fence.reopen()
    await fence.aclose()


@in_virtual_time
async def test_reopening_is_repeated_until_it_is_acknowledged() -> None:
    """With growing pauses; a message that is lost once would keep the worker closed until the next checkpoint."""
    worker = RemoteGate("0")
    fence = fence_over(worker)
    await fence.close("cut", timeout=5)
    worker.times.clear()
    worker.lose["reopen"] = 9
    await fence.reopen()
    await asyncio.sleep(30)
    assert fence.statistics().reopening == ()
    assert is_open(worker)
    pauses = [later - before for before, later in zip(worker.times, worker.times[1:], strict=False)]
    assert pauses == pytest.approx([0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 2, 2, 2])


@in_virtual_time
async def test_a_reopening_that_is_not_answered_is_sent_again() -> None:
    """Silence is no acknowledgement."""
    worker = RemoteGate("0")
    fence = fence_over(worker)
    await fence.close("cut", timeout=5)
    worker.hold["reopen"] = asyncio.Event()
    await fence.reopen()
    await asyncio.sleep(4.9)
    del worker.hold["reopen"]
    assert not is_open(worker)
    await asyncio.sleep(1)
    assert is_open(worker)
    assert fence.statistics().reopening == ()


@in_virtual_time
async def test_a_handle_that_cancels_its_own_call_has_not_answered() -> None:
    """The reopening goes on; only the fence's own cancellation ends it."""

    class Cancels(RemoteGate):
        async def reopen(self, epoch: Epoch) -> None:
            if not self.calls or self.calls[-1][0] != "cancelled":
                self.calls.append(("cancelled", epoch))
                raise asyncio.CancelledError
            await super().reopen(epoch)

    worker = Cancels("0")
    fence = fence_over(worker)
    await fence.close("cut", timeout=5)
    await fence.reopen()
    await asyncio.sleep(1)
    assert is_open(worker)


@in_virtual_time
async def test_reopening_ends_when_the_worker_is_dead() -> None:
    """Nobody waits at its gate any more."""
    worker = RemoteGate("0")
    fence = fence_over(worker)
    await fence.close("cut", timeout=5)
    worker.lose["reopen"] = 1000
    await fence.reopen()
    await asyncio.sleep(10)
    assert fence.statistics().reopening == ("0",)
    worker.alive = False
    await asyncio.sleep(3)
    assert fence.statistics().reopening == ()


@in_virtual_time
async def test_the_next_close_does_not_wait_for_a_reopening_and_is_not_disturbed_by_it() -> None:
    """The first reopening arrives inside the second window, says nothing about it, and is followed by the second."""
    worker = RemoteGate("0")
    fence = fence_over(worker)
    await fence.close("first", timeout=5)
    worker.hold["reopen"] = asyncio.Event()
    await fence.reopen()
    await settle()
    await fence.close("second", timeout=5)
    assert now() == 0
    worker.hold["reopen"].set()
    await settle()
    assert ("reopen", Epoch(5, 1)) in worker.calls
    assert worker.gate.closed_in(Epoch(5, 2))
    await fence.verify()
    await fence.reopen()
    await settle()
    assert is_open(worker)


@in_virtual_time
async def test_a_reopening_that_is_still_under_way_takes_the_next_one_along() -> None:
    """The lost first message does not delay the second until its own pause is over."""
    worker = RemoteGate("0")
    fence = fence_over(worker)
    await fence.close("first", timeout=5)
    worker.lose["reopen"] = 7
    await fence.reopen()
    await asyncio.sleep(3.2)  # the next attempt is two seconds off
    worker.lose["reopen"] = 0
    await fence.close("second", timeout=5)
    await fence.reopen()
    await settle()
    assert is_open(worker)
    assert worker.calls[-1] == ("reopen", Epoch(5, 2))


@in_virtual_time
async def test_a_reopening_does_not_queue_behind_an_earlier_one_that_is_stuck_on_its_way() -> None:
    """The later one covers it, and is sent at once."""
    worker = RemoteGate("0")
    fence = fence_over(worker)
    await fence.close("first", timeout=5)
    worker.hold["reopen"] = asyncio.Event()
    await fence.reopen()
    await settle()
    await fence.close("second", timeout=5)
    del worker.hold["reopen"]  # for the messages to come
    await fence.reopen()
    await settle()
    assert now() == 0
    assert is_open(worker)
    assert [call for call in worker.calls if call[0] == "reopen"] == [("reopen", Epoch(5, 2))]


@in_virtual_time
async def test_an_answer_to_an_earlier_reopening_is_none_to_a_later_one() -> None:
    """Although its call could not be stopped, and was answered after the later one was due."""

    class Unstoppable(RemoteGate):
        async def reopen(self, epoch: Epoch) -> None:
            task = asyncio.ensure_future(super().reopen(epoch))
            while not task.done():
                try:
                    await asyncio.shield(task)
                except asyncio.CancelledError:
                    continue

    worker = Unstoppable("0")
    fence = fence_over(worker)
    await fence.close("first", timeout=5)
    worker.hold["reopen"] = asyncio.Event()
    await fence.reopen()
    await settle()
    await fence.close("second", timeout=5)
    await fence.reopen()
    worker.hold["reopen"].set()
    await settle()
    assert is_open(worker)
    assert fence.statistics().reopening == ()


@in_virtual_time
async def test_a_strict_observer_that_raises_keeps_no_gate_shut() -> None:
    """Every gate is reopened first."""

    class Raises:
        def gate_reopened(self, worker: str, sequence: int, epoch: str, closed_ns: int) -> None:
            raise RuntimeError("observer")

    handles = [LocalGate(SnapshotGate(str(number), hub=strict_hub(Raises()))) for number in range(3)]
    fence = fence_over(*handles)
    await fence.close("cut", timeout=5)
    with pytest.raises(RuntimeError, match="observer"):
        await fence.reopen()
    assert all(is_open(handle) for handle in handles)


@in_virtual_time
async def test_closing_the_fence_for_good_opens_every_gate_and_stops_telling() -> None:
    """What has not answered by then is adopted by the next driver."""
    here, there = local("0"), RemoteGate("1")
    fence = fence_over(here, there)
    await fence.close("cut", timeout=5)
    there.lose["reopen"] = 1000
    await fence.aclose()
    assert is_open(here)
    assert fence.statistics().reopening == ()
    await asyncio.sleep(10)
    assert there.lose["reopen"] >= 999
    await fence.aclose()


# ---------------------------------------------------------------------------------------------------- adoption


@in_virtual_time
async def test_an_adopted_worker_is_open_whatever_its_earlier_driver_left() -> None:
    """The answer is awaited, before anything is dispatched; then the worker is fenced like every other."""
    worker, fence = RemoteGate("0"), fence_over(incarnation=6)
    worker.gate.close_and_wait(Epoch(5, 88))
    await fence.adopt(worker)
    assert worker.calls == [("reopen", Epoch(6, 0))]
    assert is_open(worker)
    assert worker.gate.close_and_wait(Epoch(5, 89)) == "superseded"
    await fence.close("cut", timeout=5)
    assert worker.gate.closed_in(Epoch(6, 1))
    await fence.reopen()
    await fence.aclose()


@in_virtual_time
async def test_adoption_releases_what_is_over_and_nothing_else() -> None:
    """A worker that was restarted: late closes of finished checkpoints pass it by, the one in progress does not."""
    fence, worker, other = fence_over(RemoteGate("0")), RemoteGate("1"), RemoteGate("2")
    await fence.close("first", timeout=5)
    await fence.reopen()
    await fence.adopt(worker)
    assert worker.calls == [("reopen", Epoch(5, 1))]
    assert worker.gate.close_and_wait(Epoch(5, 1)) == "superseded"
    await fence.close("second", timeout=5)
    await fence.adopt(other)
    assert other.calls == [("reopen", Epoch(5, 1))]
    assert worker.gate.closed_in(Epoch(5, 2))
    await fence.reopen()
    await fence.aclose()


@in_virtual_time
async def test_adoption_waits_until_the_worker_answers() -> None:
    """Lost and unanswered messages are repeated."""
    worker, fence = RemoteGate("0"), fence_over()
    worker.lose["reopen"] = 2
    worker.hold["reopen"] = asyncio.Event()
    adopting = asyncio.create_task(fence.adopt(worker))
    await asyncio.sleep(4)
    assert not adopting.done()
    assert fence.statistics().workers == 0
    worker.hold["reopen"].set()
    await adopting
    assert fence.statistics().workers == 1


@in_virtual_time
async def test_a_worker_that_is_restarted_while_it_is_adopted_is_asked_again() -> None:
    """The answer came from the one that is gone."""
    worker, fence = RemoteGate("0"), fence_over()
    worker.hold["reopen"] = asyncio.Event()
    adopting = asyncio.create_task(fence.adopt(worker))
    await settle()
    worker.restart()
    worker.gate.close_and_wait(Epoch(4, 3))
    worker.hold["reopen"].set()
    await adopting
    assert len(worker.calls) == 2
    assert is_open(worker)


@in_virtual_time
async def test_a_dead_worker_cannot_be_adopted() -> None:
    """It would never answer."""
    worker, fence = RemoteGate("0"), fence_over()
    worker.alive = False
    with pytest.raises(WorkerGoneError, match="worker '0' cannot be adopted: it is dead"):
        await fence.adopt(worker)
    assert fence.statistics().workers == 0


@in_virtual_time
async def test_adoption_gives_up_at_its_deadline() -> None:
    """It says why, and registers nothing."""
    worker, fence = RemoteGate("0"), fence_over()
    worker.lose["reopen"] = 1000
    with pytest.raises(WorkerGoneError, match=r"no answer within 3 s \(ConnectionError: reopen was lost\)"):
        await fence.adopt(worker, timeout=3)
    assert now() <= 3
    assert fence.statistics().workers == 0


# -------------------------------------------------------------------------------------------- permit deadlines


def in_loop_time(
    worker: str, deadline: float, give_up: Callable[[tuple[PermitHolder, ...]], None] | None = None
) -> LocalGate:
    """Return a handle whose gate and deadline run in the loop's time."""
    loop = asyncio.get_running_loop()
    gate = SnapshotGate(worker, hub=strict_hub(), clock=lambda: round(loop.time() * 1e9))
    return LocalGate(gate, permit_deadline=deadline, give_up=give_up)


@in_virtual_time
async def test_a_permit_past_its_deadline_has_its_worker_given_up_without_any_checkpoint() -> None:
    """The attempts go first, then the gate: what the thread still does counts for nothing."""
    order: list[str] = []

    def give_up(holders: tuple[PermitHolder, ...]) -> None:
        order.append(f"{holders[0].thread}, retired: {handle.gate.retired!r}")

    handle = in_loop_time("0", 30, give_up)
    fence = fence_over(handle)
    writer = Writer(handle.gate, "generate-3").entered()
    await asyncio.sleep(29)
    assert order == []
    await asyncio.sleep(2)
    assert order == ["generate-3, retired: ''"]
    with pytest.raises(GateRetiredError, match=r"overran its deadline of 30 s: thread 'generate-3'"):
        handle.gate.enter()
    await fence.close("cut", timeout=5)  # a dead worker counts as closed
    await fence.verify()
    await fence.reopen()
    assert fence.statistics().alive == 0
    writer.finish()
    await fence.aclose()


@in_virtual_time
async def test_permits_within_their_deadline_are_left_alone() -> None:
    """Each has its own deadline, from its own grant."""
    handle = in_loop_time("0", 10)
    fence = fence_over(handle)
    for _ in range(5):
        writer = Writer(handle.gate).entered()
        await asyncio.sleep(8)
        writer.finish()
    assert handle.alive
    await fence.aclose()


@in_virtual_time
async def test_a_shorter_deadline_that_is_registered_later_is_kept_too() -> None:
    """The watch does not sleep through it."""
    first, second = in_loop_time("0", 1000), in_loop_time("1", 1)
    fence = fence_over(first)
    await settle()
    fence.register(second)
    writer = Writer(second.gate).entered()
    await asyncio.sleep(1.5)
    assert not second.alive
    assert first.alive
    writer.finish()
    await fence.aclose()


@in_virtual_time
async def test_a_worker_whose_attempts_cannot_be_retired_is_given_up_all_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Loudly; and the watch goes on for the others."""

    def give_up(holders: tuple[PermitHolder, ...]) -> None:
        raise LookupError("no such attempt")

    first, second = in_loop_time("0", 1, give_up), in_loop_time("1", 2)
    fence = fence_over(first, second)
    writers = [Writer(first.gate).entered(), Writer(second.gate).entered()]
    await asyncio.sleep(3)
    assert [first.alive, second.alive] == [False, False]
    assert "the attempts of worker '0' could not be retired" in caplog.text
    for writer in writers:
        writer.finish()
    await fence.aclose()


def test_a_fence_can_be_built_and_filled_before_its_loop_runs() -> None:
    """Deadlines are watched from the first close on, at the latest."""
    gate = SnapshotGate("0", hub=strict_hub())
    fence = fence_over(LocalGate(gate, permit_deadline=1))

    async def run() -> None:
        await fence.close("cut", timeout=5)
        await fence.verify()
        await fence.reopen()
        await fence.aclose()

    asyncio.run(run())
    with pytest.raises(ValueError, match="permit_deadline"):
        LocalGate(gate, permit_deadline=0)


# -------------------------------------------------------------------------------------------------- statistics


@in_virtual_time
async def test_statistics_tell_what_a_fence_is_doing() -> None:
    """Every figure moves with what it counts."""
    loop = asyncio.get_running_loop()
    hub = Hub()
    fence = GateFence(5, hub=hub, clock=lambda: round(loop.time() * 1e9))
    dead, alive = RemoteGate("0"), RemoteGate("1")
    dead.alive = False
    fence.register(dead)
    fence.register(alive)
    assert hub.sources("gate_fence") == [fence]
    assert (fence.statistics().workers, fence.statistics().alive) == (2, 1)
    await fence.close("cut", timeout=5)
    await asyncio.sleep(2)
    assert fence.statistics().closed_seconds == pytest.approx(2)
    assert (fence.statistics().epoch, fence.statistics().closes) == (Epoch(5, 1), 1)
    alive.restart()
    with pytest.raises(FenceError):
        await fence.verify()
    assert (fence.statistics().closed_seconds, fence.statistics().refused) == (0.0, 1)
    await fence.aclose()


# --------------------------------------------------------------------------------------------------- with a save


class Watcher:
    """Notes, at each artifact that is captured, whether every gate is closed."""

    def __init__(self, *handles: LocalGate) -> None:
        self.seen: set[bool] = set()
        self._handles = handles

    def cut_part_captured(self, cut_id: str, part: str, ns: int) -> None:
        """Look at the gates."""
        self.seen.add(all(handle.gate.statistics().closed for handle in self._handles))


async def test_a_save_captures_its_cut_between_closed_gates_and_leaves_them_open(tmp_path: Path) -> None:
    """The whole way: close, window, verify, reopen."""
    handles = (local("0"), local("1"))
    fence = fence_over(*handles)
    rig = Rig(tmp_path / "run", fence=fence)
    watcher = Watcher(*handles)
    rig.hub.subscribe(watcher)
    await rig.finished()
    assert (await rig.save()).outcome == "completed"
    assert watcher.seen == {True}
    assert all(is_open(handle) for handle in handles)
    await rig.close()
    await fence.aclose()


async def test_a_save_is_refused_when_one_worker_cannot_be_fenced_and_nothing_is_half_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No window, no snapshot, no folder; every gate is open again, and the next save is published."""
    # A late answer would be replaced by an error that cannot name the thread.
    monkeypatch.setattr("quiesce.gate_fence.CLOSE_GRACE_SECONDS", PATIENCE)
    monkeypatch.setattr("quiesce.checkpoint.saver.FENCE_GRACE_SECONDS", 2 * PATIENCE)
    hung, other = local("0"), local("1")
    fence = fence_over(hung, other)
    rig = Rig(tmp_path / "run", fence=fence, fence_timeout=0.05)
    await rig.finished()
    writer = Writer(hung.gate, "generate-1").entered()
    result = await rig.save()
    assert (result.outcome, result.reason) == ("refused", "error")
    assert "worker '0'" in str(result.error)
    assert "thread 'generate-1'" in str(result.error)
    assert rig.seen.started == ["fence"]
    assert rig.barrier.statistics().phase == "open"
    assert rig.plane.statistics().open_snapshots == 0
    assert rig.names() == []
    assert is_open(hung)
    assert is_open(other)
    writer.finish()
    assert (await rig.save()).outcome == "completed"
    assert rig.names() == ["step_0"]
    await rig.close()
    await fence.aclose()


@pytest.mark.parametrize("what", ["restarted", "joined", "opened"])
async def test_a_cut_whose_fence_was_broken_in_the_window_is_not_published(tmp_path: Path, what: str) -> None:
    """The snapshot is released, nothing is written, and the run goes on."""
    worker, here = RemoteGate("0"), local("1")
    fence = fence_over(worker, here)
    rig = Rig(tmp_path / "run", fence=fence)

    class Breaks:
        def window_closed(self, *args: object) -> None:
            if what == "restarted":
                worker.restart()
            elif what == "joined":
                fence.register(RemoteGate("2"))
            else:
                worker.gate.reopen(Epoch(99, 0))

    breaks = Breaks()
    rig.hub.subscribe(breaks)
    await rig.finished()
    result = await rig.save()
    rig.hub.unsubscribe(breaks)
    assert (result.outcome, result.reason) == ("refused", "error")
    assert rig.plane.statistics().open_snapshots == 0
    assert rig.names() == []
    assert is_open(here)
    await rig.close()
    await fence.aclose()
