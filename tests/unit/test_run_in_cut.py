"""Claims about blocking calls inside a section: the section outlives its caller, never its thread."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextvars import ContextVar

import pytest

from quiesce.barrier import held_cut, require_no_cut
from quiesce.errors import (
    BarrierPoisonedError,
    CutExpiredError,
    DrainTimeoutError,
    ForeignCutError,
    LockOrderError,
)
from quiesce.testing import EventRecorder, VirtualTimeLoop, in_virtual_time, settle, strict_hub
from tests.barriers import Barrier, Visitor, make, pristine

MARK: ContextVar[str] = ContextVar("mark", default="unset")


class Work:
    """A blocking call that a test starts, sees started, and lets finish."""

    def __init__(self, result: object = "done") -> None:
        self.started = threading.Event()
        self.go = threading.Event()
        self._result = result

    def __call__(self) -> object:
        """Block until told to go on; raise the result if it is an exception."""
        self.started.set()
        assert self.go.wait(20)
        if isinstance(self._result, BaseException):
            raise self._result
        return self._result

    async def until_started(self) -> None:
        """Wait until a thread is inside."""
        assert await asyncio.to_thread(self.started.wait, 20)


@pytest.fixture
def work() -> Generator[Work, None, None]:
    """A blocking call that is let go at the end, whatever the test did."""
    made = Work()
    yield made
    made.go.set()


async def enter_and_run(barrier: Barrier, call: Work, recorded: list[object] | None = None) -> object:
    """Open a slot and run the call in it."""
    async with barrier.mutation("retry") as cut:
        return await barrier.run_in_cut(cut, call, record=None if recorded is None else recorded.append)


@in_virtual_time
async def test_the_result_comes_back() -> None:
    """Arguments go in, the result comes out and is recorded once."""
    barrier, recorded = make(), list[int]()
    async with barrier.mutation("retry") as cut:
        assert await barrier.run_in_cut(cut, divmod, 7, 2, record=recorded.extend) == (
            3,
            1,
        )
    assert recorded == [3, 1]


@in_virtual_time
async def test_an_error_comes_back_and_nothing_is_recorded() -> None:
    """What the call raises its caller gets."""
    barrier, recorded = make(), list[object]()
    with pytest.raises(ZeroDivisionError):
        async with barrier.mutation("retry") as cut:
            await barrier.run_in_cut(cut, divmod, 1, 0, record=recorded.append)
    assert recorded == []
    assert pristine(barrier)


@in_virtual_time
async def test_an_exhausted_iterator_is_an_error_and_no_hang() -> None:
    """StopIteration cannot travel through a future; it comes back as a RuntimeError."""
    barrier = make()
    async with barrier.mutation("retry") as cut:
        with pytest.raises(RuntimeError, match="raised StopIteration"):
            await barrier.run_in_cut(cut, next, iter(()))


@in_virtual_time
async def test_the_callers_context_travels_into_the_thread() -> None:
    """Spans and the held cut are seen there."""
    barrier = make()
    MARK.set("here")
    async with barrier.mutation("retry") as cut:
        assert await barrier.run_in_cut(cut, MARK.get) == "here"
        assert await barrier.run_in_cut(cut, held_cut) is cut


@in_virtual_time
async def test_the_context_travels_through_an_executor_that_does_not_carry_it() -> None:
    """An executor of one's own needs no knowledge of contexts."""
    with ThreadPoolExecutor(1) as executor:
        barrier = make(executor=executor)
        MARK.set("here")
        async with barrier.mutation("retry") as cut:
            assert await barrier.run_in_cut(cut, MARK.get) == "here"


@in_virtual_time
async def test_a_permit_may_not_be_taken_in_the_thread_either() -> None:
    """The lock order holds inside the thread of a section too."""
    barrier = make()
    async with barrier.mutation("retry") as cut:
        with pytest.raises(LockOrderError):
            await barrier.run_in_cut(cut, require_no_cut, "a permit")


@in_virtual_time
async def test_the_loops_default_executor_is_not_used() -> None:
    """Calls that block the default executor cannot keep a section's call from running."""
    loop = asyncio.get_running_loop()
    blocked, release = threading.Event(), threading.Event()

    def block() -> None:
        blocked.set()
        release.wait(20)

    with ThreadPoolExecutor(1) as full:
        loop.set_default_executor(full)
        waiting = loop.run_in_executor(None, block)
        try:
            barrier = make()
            async with barrier.mutation("retry") as cut:
                assert await barrier.run_in_cut(cut, str.upper, "ran") == "RAN"
        finally:
            release.set()
        await waiting


@in_virtual_time
async def test_a_cut_that_is_over_runs_nothing() -> None:
    """The call needs the live cut of this barrier."""
    barrier, ran = make(), list[int]()
    async with barrier.mutation("retry") as cut:
        with pytest.raises(ForeignCutError):
            await make(name="other").run_in_cut(cut, ran.append, 1)
    with pytest.raises(CutExpiredError):
        await barrier.run_in_cut(cut, ran.append, 1)
    assert ran == []


@in_virtual_time
async def test_running_a_call_in_a_window_is_no_change_by_itself() -> None:
    """What changes state in the thread checks the cut for itself."""
    barrier = make()
    async with barrier.checkpoint() as cut:
        await barrier.run_in_cut(cut, int)
    assert barrier.mutation_version == 0
    async with barrier.checkpoint() as cut:
        await barrier.run_in_cut(cut, cut.check, barrier)
    assert barrier.mutation_version == 1


def test_a_window_is_held_while_its_thread_runs(work: Work) -> None:
    """A cancelled save that still writes keeps the writers out."""

    @in_virtual_time
    async def run() -> None:
        barrier, order = make(), list[str]()

        async def save() -> None:
            async with barrier.checkpoint() as cut:
                await barrier.run_in_cut(cut, work)

        saving = asyncio.create_task(save())
        await work.until_started()
        slot = Visitor(order, "w", barrier.mutation("retry"))
        saving.cancel()
        await settle()
        assert order == []
        assert barrier.statistics().phase == "exclusive"
        work.go.set()
        await asyncio.wait({saving})
        await settle()
        assert saving.cancelled()
        assert order == ["w"]
        slot.leave()
        await settle()
        assert pristine(barrier)

    run()


def test_every_cancellation_waits_for_the_thread(work: Work) -> None:
    """A second cancellation does not get through either, and the task ends as cancelled once."""

    @in_virtual_time
    async def run() -> None:
        barrier, recorded = make(), list[object]()
        task = asyncio.create_task(enter_and_run(barrier, work, recorded))
        await work.until_started()
        for _ in range(3):
            task.cancel()
            await settle()
            assert not task.done()
        work.go.set()
        await asyncio.wait({task})
        assert task.cancelled()
        assert recorded == ["done"]
        assert pristine(barrier)

    run()


def test_a_timeout_around_the_call_is_a_timeout(work: Work) -> None:
    """`asyncio.timeout` sees its own cancellation come back."""

    @in_virtual_time
    async def run() -> None:
        barrier, recorded = make(), list[object]()
        loop = asyncio.get_running_loop()

        async def body() -> None:
            async with asyncio.timeout(None) as scope:
                asyncio.get_running_loop().call_soon(scope.reschedule, loop.time())
                await enter_and_run(barrier, work, recorded)

        task = asyncio.create_task(body())
        await work.until_started()
        await settle()
        assert not task.done()
        work.go.set()
        with pytest.raises(TimeoutError):
            await task
        assert recorded == ["done"]

    run()


@pytest.mark.parametrize("fails", ["the call", "the record"])
def test_a_cancellation_goes_on_although_something_failed(fails: str) -> None:
    """The task ends as cancelled, and the failure is the cancellation's cause."""
    work = Work(ValueError("call") if fails == "the call" else "done")

    @in_virtual_time
    async def run() -> BaseException | None:
        barrier = make()
        causes: list[BaseException | None] = []

        def record(_: object) -> None:
            raise ValueError("record")

        async def body() -> None:
            async with barrier.mutation("retry") as cut:
                try:
                    await barrier.run_in_cut(cut, work, record=record)
                except asyncio.CancelledError as error:
                    causes.append(error.__cause__)
                    raise

        task = asyncio.create_task(body())
        await work.until_started()
        task.cancel()
        await settle()
        work.go.set()
        await asyncio.wait({task})
        assert task.cancelled()
        assert pristine(barrier)
        (cause,) = causes
        return cause

    try:
        cause = run()
    finally:
        work.go.set()
    assert isinstance(cause, ValueError)
    assert str(cause) == fails.removeprefix("the ")


def test_a_body_that_leaves_is_held_open_by_the_thread_of_a_child(work: Work) -> None:
    """The cut is dead for everybody, but the section is not released before the thread ends."""

    @in_virtual_time
    async def run() -> None:
        recorder = EventRecorder()
        barrier, order = make(hub=strict_hub(recorder)), list[str]()
        async with barrier.mutation("retry") as cut:
            child = asyncio.create_task(barrier.run_in_cut(cut, work))
            await work.until_started()
        assert not cut.live
        assert barrier.statistics().active["retry"] == 1
        assert recorder.of("slot_closed") == []
        window = asyncio.create_task(open_window(barrier, order))
        await settle()
        assert order == []
        work.go.set()
        await child
        await window
        assert order == ["C"]
        assert [args[-2] for args in recorder.of("slot_closed")] == ["completed"]
        assert pristine(barrier)

    run()


async def open_window(barrier: Barrier, order: list[str], drain_timeout: float | None = None) -> None:
    """Open a window and note it."""
    async with barrier.checkpoint(drain_timeout):
        order.append("C")


def test_a_section_waits_for_each_of_its_threads() -> None:
    """With two threads in one section the last one to end releases it."""
    works = [Work(), Work()]

    @in_virtual_time
    async def run() -> None:
        barrier = make()
        async with barrier.mutation("retry") as cut:
            children = [asyncio.create_task(barrier.run_in_cut(cut, work)) for work in works]
            for work in works:
                await work.until_started()
        for work, child in zip(works, children, strict=True):
            assert barrier.statistics().active["retry"] == 1
            work.go.set()
            await child
        await settle()
        assert pristine(barrier)

    try:
        run()
    finally:
        for work in works:
            work.go.set()


def test_a_drain_timeout_names_a_section_that_only_its_thread_holds(work: Work) -> None:
    """The holder is still named when its body is gone."""

    @in_virtual_time
    async def run() -> None:
        barrier = make()
        task = asyncio.create_task(enter_and_run(barrier, work), name="writer")
        await work.until_started()
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        loop.threads_hang = True
        with pytest.raises(DrainTimeoutError) as caught:
            await open_window(barrier, [], drain_timeout=5.0)
        loop.threads_hang = False
        assert [(holder.kind, holder.task) for holder in caught.value.holders] == [("retry", "writer")]
        work.go.set()
        assert await task == "done"

    run()


def test_a_hung_thread_poisons_although_its_caller_was_cancelled(work: Work) -> None:
    """Cancelling the caller does not stop the watch over its thread."""

    @in_virtual_time
    async def run() -> None:
        barrier = make(hung_thread_timeout=300.0)
        task = asyncio.create_task(enter_and_run(barrier, work))
        await work.until_started()
        task.cancel()
        await settle()
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        loop.threads_hang = True
        began = loop.time()
        await asyncio.wait({task})
        assert isinstance(task.exception(), BarrierPoisonedError)
        assert loop.time() - began >= 299.0
        assert barrier.statistics().phase == "poisoned"

    run()


def test_an_executor_that_is_closed_leaves_the_section_clean() -> None:
    """A call that cannot even start does not hold its section."""

    @in_virtual_time
    async def run() -> None:
        executor = ThreadPoolExecutor(1)
        executor.shutdown()
        barrier = make(executor=executor)
        with pytest.raises(RuntimeError, match="shutdown"):
            async with barrier.mutation("retry") as cut:
                await barrier.run_in_cut(cut, int)
        assert pristine(barrier)

    run()
