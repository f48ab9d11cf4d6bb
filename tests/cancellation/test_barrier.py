"""A section that is cancelled at any suspension point, before or after its grant, leaves the barrier as new."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from quiesce.barrier import BarrierStatistics, Cut, detached
from quiesce.errors import QuiesceError
from quiesce.testing import (
    DeadlockError,
    EventRecorder,
    FakeClock,
    Stopped,
    cancelled_at,
    in_virtual_time,
    settle,
    strict_hub,
)
from tests.barriers import Barrier, Visitor, closed, make

Scene = Callable[[Barrier, list[str]], Coroutine[Any, Any, object]]
"""What is cancelled; it gets the barrier and a list to note in what it did."""


async def enter_slot(barrier: Barrier, done: list[str]) -> None:
    """Enter a slot behind a window, and leave it at once."""
    async with barrier.mutation("retry"):
        done.append("in")


async def enter_window(barrier: Barrier, done: list[str]) -> None:
    """Enter a window behind an open slot and another window, and leave it at once."""
    async with barrier.checkpoint():
        done.append("in")


async def slot_with_awaits(barrier: Barrier, done: list[str]) -> None:
    """Suspend several times inside a slot."""
    async with barrier.mutation("retry"):
        for number in range(3):
            await asyncio.sleep(0 if number else 1.0)
            done.append(str(number))


async def window_with_awaits(barrier: Barrier, done: list[str]) -> None:
    """Suspend several times inside a window."""
    async with barrier.checkpoint() as cut:
        for number in range(3):
            await asyncio.sleep(0 if number else 1.0)
            cut.check(barrier)
            done.append(str(number))


async def several_sections(barrier: Barrier, done: list[str]) -> None:
    """Go through slots and windows, one after the other."""
    for number in range(2):
        async with barrier.mutation("retry"):
            await asyncio.sleep(0)
        async with barrier.checkpoint():
            await asyncio.sleep(0)
        done.append(str(number))


async def sections_of_two_barriers(barrier: Barrier, done: list[str]) -> None:
    """Hold a slot of another barrier around a section of this one."""
    other = make(name="other")
    try:
        async with other.mutation("admission"), barrier.mutation("retry"):
            await asyncio.sleep(0)
            done.append("in")
    finally:
        assert as_new(other)


async def run_a_thread(barrier: Barrier, done: list[str]) -> None:
    """Run a blocking call inside a slot and inside a window; what it did is always noted."""
    async with barrier.mutation("retry") as cut:
        ran: list[str] = []
        try:
            await barrier.run_in_cut(cut, ran.append, "slot", record=lambda _: done.append("slot"))
        finally:
            assert done == ran
    async with barrier.checkpoint() as cut:
        try:
            await barrier.run_in_cut(cut, ran.append, "window", record=lambda _: done.append("window"))
        finally:
            assert done == ran


async def run_a_thread_in_a_child(barrier: Barrier, done: list[str]) -> None:
    """Leave the body while the thread of a child task still runs."""
    go = threading.Event()
    async with barrier.mutation("retry") as cut:
        child = asyncio.create_task(barrier.run_in_cut(cut, go.wait, 20))
        try:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        finally:
            go.set()
    await child
    done.append("child")


SCENES: tuple[Scene, ...] = (
    enter_slot,
    enter_window,
    slot_with_awaits,
    window_with_awaits,
    several_sections,
    sections_of_two_barriers,
    run_a_thread,
    run_a_thread_in_a_child,
)


def as_new(barrier: Barrier) -> bool:
    """Tell whether a barrier's statistics are those of a new one, but for what only grows."""
    fresh = make(kinds=barrier.kinds, clock=FakeClock()).statistics()
    now = barrier.statistics()
    return comparable(now) == comparable(fresh)


def comparable(now: BarrierStatistics) -> tuple[object, ...]:
    """Return what does not grow by itself."""
    return (
        now.phase,
        now.active,
        now.waiting,
        now.waiting_checkpoints,
        now.oldest_active_seconds,
        now.longest_wait_seconds,
        now.oldest_holder,
    )


async def cancel_in_traffic(scene: Scene, step: int, *, late: bool, cls: type[Barrier] = Barrier) -> Stopped:
    """Cancel a scene at one step, with sections before, beside and behind it; check that all of them get through."""
    barrier, done, order = make(cls), list[str](), list[str]()
    before = [Visitor(order, "C0", barrier.checkpoint()), Visitor(order, "w0", barrier.mutation("retry"))]
    await settle()
    cancelling = detached(cancelled_at(scene(barrier, done), step, late=late))
    await settle()
    behind = [Visitor(order, "C1", barrier.checkpoint(None)), Visitor(order, "w1", barrier.mutation("retry"))]
    for visitor in (*before, *behind):
        await settle()
        visitor.leave()
    stopped = await cancelling
    await asyncio.gather(*(visitor.task for visitor in (*before, *behind)))
    await closed(barrier)
    assert order == ["C0", "w0", "C1", "w1"]
    assert as_new(barrier)
    async with barrier.checkpoint(0.0):  # and it is not only said to be as new
        pass
    return stopped


@pytest.mark.parametrize("late", [False, True], ids=["waiting", "granted"])
@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_cancelled_at_any_step_a_section_leaves_no_trace(scene: Scene, *, late: bool) -> None:
    """For every suspension point of the scene: statistics as new, nobody stranded, order kept."""
    steps = 0
    while in_virtual_time(cancel_in_traffic)(scene, steps, late=late).reached:
        steps += 1
        assert steps < 100, "the scene never ends"
    assert steps >= 2  # before its first step, and where it waits


@pytest.mark.parametrize("late", [False, True], ids=["waiting", "granted"])
@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_a_cancelled_scene_ends_as_cancelled(scene: Scene, *, late: bool) -> None:
    """No cancellation is swallowed, and none turns into another error."""
    step = 0
    while True:
        stopped = in_virtual_time(cancel_in_traffic)(scene, step, late=late)
        if not stopped.reached:
            break
        assert stopped.outcome == "cancelled", (step, stopped)
        step += 1
    assert stopped.outcome == "completed"


@pytest.mark.parametrize("late", [False, True], ids=["waiting", "granted"])
@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_every_section_that_opened_is_reported_closed(scene: Scene, *, late: bool) -> None:
    """Hooks come in pairs wherever the scene was cancelled."""

    @in_virtual_time
    async def run(step: int) -> bool:
        recorder = EventRecorder()
        barrier = make(hub=strict_hub(recorder))
        order: list[str] = []
        window = Visitor(order, "C", barrier.checkpoint())
        await settle()
        cancelling = detached(cancelled_at(scene(barrier, []), step, late=late))
        await settle()
        window.leave()
        stopped = await cancelling
        await closed(barrier)
        await settle()
        assert len(recorder.of("slot_opened")) == len(recorder.of("slot_closed"))
        assert len(recorder.of("window_opened")) == len(recorder.of("window_closed"))
        assert len(recorder.of("window_requested")) == sum(
            len(recorder.of(hook)) for hook in ("window_opened", "window_abandoned")
        )
        assert as_new(barrier)
        return stopped.reached

    step = 0
    while run(step):
        step += 1
    assert step >= 2


class GrantIsKept(Barrier):
    """A waiter that is cancelled after its grant just goes."""

    def _release(self, cut: Cut, outcome: str, *, entered: bool = True) -> None:
        if entered:
            super()._release(cut, outcome)


class CancelledBodyKeepsItsSection(Barrier):
    """A cancelled body is not released."""

    def _release(self, cut: Cut, outcome: str, *, entered: bool = True) -> None:
        if outcome != "cancelled" or not entered:
            super()._release(cut, outcome, entered=entered)


class CancellationIsSwallowed(Barrier):
    """A call in a thread returns although its caller was cancelled."""

    async def _outlast(self, future: asyncio.Future[Any], what: str) -> asyncio.CancelledError | None:
        await super()._outlast(future, what)
        return None


@pytest.mark.parametrize(
    "broken, scene, late",
    [
        (GrantIsKept, enter_slot, True),
        (GrantIsKept, enter_window, True),
        (CancelledBodyKeepsItsSection, window_with_awaits, False),
        (CancellationIsSwallowed, run_a_thread, False),
    ],
    ids=lambda given: getattr(given, "__name__", str(given)),
)
def test_a_barrier_that_strands_somebody_is_noticed(
    broken: type[Barrier], scene: Scene, *, late: bool
) -> None:
    """Some step of the scene shows it: these checks can fail."""

    def every_step() -> None:
        for step in range(20):
            stopped = in_virtual_time(cancel_in_traffic)(scene, step, late=late, cls=broken)
            assert stopped.outcome == "cancelled" or not stopped.reached

    with pytest.raises((AssertionError, DeadlockError, QuiesceError)):
        every_step()


@in_virtual_time
async def test_a_drain_that_times_out_and_is_cancelled_at_once_leaves_no_trace() -> None:
    """Both reasons to give up in one moment."""
    barrier, order = make(), list[str]()
    slot = Visitor(order, "w", barrier.mutation("retry"))
    await settle()
    window = Visitor(order, "C", barrier.checkpoint(drain_timeout=1.0))
    await settle()
    asyncio.get_running_loop().call_later(1.0, window.task.cancel)
    await asyncio.wait({window.task})
    slot.leave()
    await settle()
    assert as_new(barrier)


@in_virtual_time
async def test_cancelling_every_waiter_at_once_leaves_no_trace() -> None:
    """Whoever is behind them is served."""
    barrier, order = make(), list[str]()
    window = Visitor(order, "C", barrier.checkpoint())
    await settle()
    waiters = [
        Visitor(order, f"{number}", barrier.checkpoint() if number % 3 else barrier.mutation("retry"))
        for number in range(30)
    ]
    last = Visitor(order, "last", barrier.mutation("retry"))
    await settle()
    window.leave()
    await asyncio.sleep(0)
    for waiter in waiters:
        waiter.task.cancel()
    await settle()
    assert order == ["C", "last"]
    last.leave()
    await settle()
    assert as_new(barrier)
