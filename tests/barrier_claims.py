"""The barrier's rules as claims about any class of barrier, so that a broken one can be shown to fail them."""

from __future__ import annotations

import asyncio
import threading

import pytest

from quiesce.errors import (
    DrainTimeoutError,
    NestedCutError,
    WrongLoopError,
)
from quiesce.testing import (
    settle,
)
from tests.barriers import Barrier, Visitor, make, pristine, until


async def slots_share(cls: type[Barrier]) -> None:
    """Slots do not exclude each other."""
    barrier, order = make(cls), list[str]()
    visitors = [Visitor(order, f"w{i}", barrier.mutation("retry")) for i in range(3)]
    await settle()
    assert order == ["w0", "w1", "w2"]
    for visitor in visitors:
        visitor.leave()
    await settle()
    assert pristine(barrier)


async def windows_exclude(cls: type[Barrier]) -> None:
    """A window waits for the open slots, and a slot waits for the window."""
    barrier, order = make(cls), list[str]()
    first = Visitor(order, "w1", barrier.mutation("retry"))
    await settle()
    window = Visitor(order, "C", barrier.checkpoint())
    await settle()
    assert order == ["w1"]
    first.leave()
    await settle()
    second = Visitor(order, "w2", barrier.mutation("retry"))
    await settle()
    assert order == ["w1", "C"]
    window.leave()
    await settle()
    assert order == ["w1", "C", "w2"]
    second.leave()
    await settle()
    assert pristine(barrier)


async def one_queue(cls: type[Barrier]) -> None:
    """Behind a window, the waiters w1, C2, w2 enter in the order in which they asked."""
    barrier, order = make(cls), list[str]()
    c1 = Visitor(order, "C1", barrier.checkpoint())
    await settle()
    names = ("w1", "C2", "w2")
    waiters = {
        name: Visitor(order, name, barrier.checkpoint() if name[0] == "C" else barrier.mutation("retry"))
        for name in names
    }
    await settle()
    c1.leave()
    for name in names:
        await settle()
        assert order[-1] == name
        waiters[name].leave()
    await settle()
    assert order == ["C1", *names]
    assert pristine(barrier)


async def a_drain_holds_slots_back(cls: type[Barrier]) -> None:
    """A slot that asks while a checkpoint drains waits, so arriving writers cannot starve it."""
    barrier, order = make(cls), list[str]()
    w1 = Visitor(order, "w1", barrier.mutation("retry"))
    await settle()
    window = Visitor(order, "C", barrier.checkpoint())
    await settle()
    w2 = Visitor(order, "w2", barrier.mutation("retry"))
    await settle()
    assert order == ["w1"]
    for visitor in (w1, window, w2):
        visitor.leave()
    await settle()
    assert order == ["w1", "C", "w2"]


async def back_to_back_windows_let_slots_in(cls: type[Barrier]) -> None:
    """A task that opens windows back to back, without suspending in between, does not starve a queued slot."""
    barrier, order, go = make(cls), list[str](), asyncio.Event()

    async def rounds() -> None:
        for number in range(3):
            async with barrier.checkpoint():
                order.append(f"C{number}")
                await go.wait()

    windows = asyncio.create_task(rounds())
    await settle()
    slot = Visitor(order, "w", barrier.mutation("retry"))
    slot.leave()
    await settle()
    go.set()
    await settle()
    assert windows.done()
    assert order == ["C0", "w", "C1", "C2"]


async def a_cancelled_drain_reopens(cls: type[Barrier]) -> None:
    """A draining checkpoint that is cancelled lets the slots behind it in, in the same step."""
    barrier, order = make(cls), list[str]()
    w1 = Visitor(order, "w1", barrier.mutation("retry"))
    await settle()
    window = Visitor(order, "C", barrier.checkpoint())
    await settle()
    w2 = Visitor(order, "w2", barrier.mutation("retry"))
    await settle()
    window.task.cancel()
    await settle()
    assert order == ["w1", "w2"]
    w1.leave()
    w2.leave()
    await settle()
    assert pristine(barrier)


async def a_grant_is_given_back(cls: type[Barrier]) -> None:
    """A waiter that is granted and cancelled before it goes on gives the grant back."""
    barrier, order = make(cls), list[str]()
    window = Visitor(order, "C", barrier.checkpoint())
    await settle()
    slot = Visitor(order, "w", barrier.mutation("retry"))
    after = Visitor(order, "C2", barrier.checkpoint())
    await settle()
    window.leave()
    await asyncio.sleep(0)  # the window's task runs: it releases, which grants the slot
    slot.task.cancel()
    await settle()
    assert slot.task.cancelled()
    assert order == ["C", "C2"]
    after.leave()
    await settle()
    assert pristine(barrier)


async def a_granted_window_is_given_back(cls: type[Barrier]) -> None:
    """A checkpoint that is granted and cancelled before it goes on gives the window back."""
    barrier, order = make(cls), list[str]()
    slot = Visitor(order, "w1", barrier.mutation("retry"))
    await settle()
    window = Visitor(order, "C", barrier.checkpoint())
    after = Visitor(order, "w2", barrier.mutation("retry"))
    await settle()
    slot.leave()
    await asyncio.sleep(0)
    window.task.cancel()
    await settle()
    assert window.task.cancelled()
    assert order == ["w1", "w2"]
    after.leave()
    await settle()
    assert pristine(barrier)


async def a_drain_times_out(cls: type[Barrier]) -> None:
    """Past its timeout a checkpoint gives up, and the slots behind it enter."""
    barrier, order = make(cls), list[str]()
    slot = Visitor(order, "w1", barrier.mutation("retry"))
    await settle()
    window = Visitor(order, "C", barrier.checkpoint(drain_timeout=7.0))
    behind = Visitor(order, "w2", barrier.mutation("retry"))
    await asyncio.sleep(6.9)
    assert not window.task.done()
    await asyncio.sleep(0.2)
    assert window.task.done()
    assert isinstance(window.task.exception(), DrainTimeoutError)
    assert order == ["w1", "w2"]
    slot.leave()
    behind.leave()
    await settle()
    assert pristine(barrier)


async def sections_do_not_nest(cls: type[Barrier]) -> None:
    """Opening a section while the task holds one of the same barrier is an error at once."""
    barrier = make(cls)
    for outer in (barrier.mutation, lambda _: barrier.checkpoint()):
        for inner in (barrier.mutation, lambda _: barrier.checkpoint(drain_timeout=1.0)):
            async with outer("retry"):
                with pytest.raises(NestedCutError, match="pass the cut that you hold"):
                    async with inner("retry"):
                        pass
    assert pristine(barrier)


async def child_tasks_do_not_nest(cls: type[Barrier]) -> None:
    """A task started inside a section may not open another one while that one is held."""
    barrier = make(cls)

    async def child() -> None:
        async with barrier.mutation("retry"):
            pass

    async with barrier.mutation("retry"):
        with pytest.raises(NestedCutError):
            await asyncio.create_task(child())
    assert pristine(barrier)


async def only_liveness_counts(cls: type[Barrier]) -> None:
    """A task that was started inside a section opens sections freely once that one is left."""
    barrier, go = make(cls), asyncio.Event()

    async def child() -> None:
        await go.wait()
        async with barrier.mutation("retry"):
            pass

    async with barrier.mutation("retry"):
        task = asyncio.create_task(child())
        await settle()
    go.set()
    await task
    assert pristine(barrier)


async def versions_grow_with_slots(cls: type[Barrier]) -> None:
    """Every slot moves the mutation version, also one whose body failed."""
    barrier = make(cls)
    async with barrier.mutation("retry"):
        pass
    after_one = barrier.mutation_version
    with pytest.raises(ZeroDivisionError):
        async with barrier.mutation("retry"):
            raise ZeroDivisionError
    assert 0 < after_one < barrier.mutation_version


async def versions_grow_with_windows(cls: type[Barrier]) -> None:
    """A window in which state was changed moves the mutation version too; one that only read does not."""
    barrier = make(cls)
    async with barrier.checkpoint() as cut:
        cut.check(barrier, changes=False)
    assert barrier.mutation_version == 0
    async with barrier.checkpoint() as cut:
        cut.check(barrier)
    assert barrier.mutation_version == 1


async def leaving_does_not_suspend(cls: type[Barrier]) -> None:
    """A body that is cancelled is released in the very step in which the cancellation arrives."""
    barrier, order = make(cls), list[str]()
    slot = Visitor(order, "w", barrier.mutation("retry"))
    await settle()
    slot.task.cancel()
    await asyncio.sleep(0)
    assert slot.task.done()
    assert pristine(barrier)


async def a_thread_keeps_its_section(cls: type[Barrier]) -> None:
    """A section whose body was cancelled is not released before the thread that it started ends."""
    barrier, started, go = make(cls), threading.Event(), threading.Event()

    def work() -> str:
        started.set()
        assert go.wait(20)
        return "done"

    async def body() -> None:
        async with barrier.mutation("retry") as cut:
            await barrier.run_in_cut(cut, work)

    task = asyncio.create_task(body())
    try:
        await until(started)
        task.cancel()
        await settle()
        held = barrier.statistics().active["retry"]
    finally:
        go.set()
    await asyncio.wait({task})
    assert held == 1
    assert task.cancelled()
    assert pristine(barrier)


async def a_finished_call_is_recorded(cls: type[Barrier]) -> None:
    """What a shielded call did is recorded before the cancellation of its caller goes on."""
    barrier, started, go = make(cls), threading.Event(), threading.Event()
    recorded: list[str] = []

    def work() -> str:
        started.set()
        assert go.wait(20)
        return "done"

    async def body() -> None:
        async with barrier.mutation("retry") as cut:
            await barrier.run_in_cut(cut, work, record=recorded.append)

    task = asyncio.create_task(body())
    try:
        await until(started)
        task.cancel()
        await settle()
    finally:
        go.set()
    await asyncio.wait({task})
    assert task.cancelled()
    assert recorded == ["done"]


async def a_foreign_thread_is_told(cls: type[Barrier]) -> None:
    """A section asked for from another thread, with an event loop of its own, is an error that says so."""
    barrier, caught = make(cls), list[BaseException]()
    async with barrier.mutation("retry"):
        pass

    async def enter() -> None:
        async with barrier.mutation("retry"):
            pass

    def elsewhere() -> None:
        try:
            asyncio.run(enter())
        except BaseException as error:  # noqa: BLE001 - handed to the test
            caught.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert [type(error) for error in caught] == [WrongLoopError]
    assert pristine(barrier)


CLAIMS = (
    slots_share,
    windows_exclude,
    one_queue,
    a_drain_holds_slots_back,
    back_to_back_windows_let_slots_in,
    a_cancelled_drain_reopens,
    a_grant_is_given_back,
    a_granted_window_is_given_back,
    a_drain_times_out,
    sections_do_not_nest,
    child_tasks_do_not_nest,
    only_liveness_counts,
    versions_grow_with_slots,
    versions_grow_with_windows,
    leaving_does_not_suspend,
    a_thread_keeps_its_section,
    a_finished_call_is_recorded,
    a_foreign_thread_is_told,
)
