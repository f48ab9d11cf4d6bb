"""Claims about what the barrier reports, about observers that misbehave, and about a poisoned barrier."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from quiesce.errors import (
    BarrierPoisonedError,
    DrainTimeoutError,
)
from quiesce.observers import Hub
from quiesce.testing import (
    EventRecorder,
    FakeClock,
    VirtualTimeLoop,
    in_virtual_time,
    settle,
    strict_hub,
)
from tests.barriers import Visitor, closed, enter_window, make, pristine, until

# -------------------------------------------------------------------------------------------------- hooks


@in_virtual_time
async def test_a_slot_reports_opening_and_closing_with_one_measurement() -> None:
    """Wait and hold are measured once, by the barrier."""
    clock, recorder = FakeClock(), EventRecorder()
    barrier, order = make(hub=strict_hub(recorder), clock=clock, window_ids=lambda: "cut"), list[str]()
    window = Visitor(order, "C", barrier.checkpoint())
    await settle()
    slot = Visitor(order, "w", barrier.mutation("retry"))
    await settle()
    clock.advance(2.0)
    window.leave()
    await settle()
    clock.advance(3.0)
    slot.leave()
    await settle()
    assert recorder.events == [
        ("window_requested", ("cut", 0)),
        ("window_opened", ("cut", 0, (), 0)),
        ("window_closed", ("cut", 0, 2_000_000_000, "completed", 2_000_000_000)),
        ("slot_opened", ("retry", 2_000_000_000, 2_000_000_000)),
        ("slot_closed", ("retry", 2_000_000_000, 3_000_000_000, "completed", 5_000_000_000)),
    ]


@pytest.mark.parametrize("how", ["completed", "failed", "cancelled"])
@pytest.mark.parametrize("section", ["slot", "window"])
def test_a_section_reports_how_its_body_ended(how: str, section: str) -> None:
    """The outcome is completed, failed or cancelled."""

    @in_virtual_time
    async def run() -> list[Any]:
        recorder = EventRecorder()
        barrier = make(hub=strict_hub(recorder))

        async def body() -> None:
            async with barrier.mutation("retry") if section == "slot" else barrier.checkpoint():
                if how == "failed":
                    raise ZeroDivisionError
                if how == "cancelled":
                    await asyncio.Event().wait()

        task = asyncio.create_task(body())
        await settle()
        task.cancel()
        await asyncio.wait({task})
        assert task.cancelled() or task.exception() is None or how == "failed"
        return [args[-2] for args in recorder.of(f"{section}_closed")]

    assert run() == [how]


@in_virtual_time
async def test_a_wait_that_was_given_up_is_reported() -> None:
    """A cancelled waiter leaves no trace but its recorded wait."""
    clock, recorder = FakeClock(), EventRecorder()
    barrier, order = make(hub=strict_hub(recorder), clock=clock), list[str]()
    window = Visitor(order, "C", barrier.checkpoint())
    await settle()
    slot = Visitor(order, "w", barrier.mutation("retry"))
    await settle()
    clock.advance(2.0)
    slot.task.cancel()
    await settle()
    assert recorder.of("slot_wait_abandoned") == [("retry", 2_000_000_000, "cancelled", 2_000_000_000)]
    assert recorder.of("slot_closed") == []
    window.leave()


@in_virtual_time
async def test_a_window_names_the_slots_that_delayed_it() -> None:
    """Each with the part of the drain, counted from the request, in which it was open."""
    clock, recorder = FakeClock(), EventRecorder()
    barrier, order = make(hub=strict_hub(recorder), clock=clock), list[str]()
    slots = [Visitor(order, f"w{i}", barrier.mutation("retry")) for i in range(2)]
    await settle()
    clock.advance(5.0)
    window = Visitor(order, "C", barrier.checkpoint())
    await settle()
    for slot in slots:
        clock.advance(1.0)
        slot.leave()
        await settle()
    ((_, drain_ns, delayed_by, opened_ns),) = recorder.of("window_opened")
    assert opened_ns == 7_000_000_000
    assert drain_ns == 2_000_000_000
    assert delayed_by == (("retry", "w0", 0, 1_000_000_000), ("retry", "w1", 0, 2_000_000_000))
    window.leave()


@in_virtual_time
async def test_an_abandoned_window_names_also_the_slots_that_are_still_open() -> None:
    """A drain timeout reports who was waited for so far and who still is."""
    recorder = EventRecorder()
    barrier, order = make(hub=strict_hub(recorder)), list[str]()
    quick, slow = (Visitor(order, name, barrier.mutation("retry")) for name in ("quick", "slow"))
    await settle()
    window = Visitor(order, "C", barrier.checkpoint(drain_timeout=1.0))
    await settle()
    quick.leave()
    await asyncio.wait({window.task})
    assert isinstance(window.task.exception(), DrainTimeoutError)
    ((_, _, outcome, delayed_by, _),) = recorder.of("window_abandoned")
    assert outcome == "failed"
    assert [name for _, name, _, _ in delayed_by] == ["quick", "slow"]
    assert recorder.of("window_closed") == []
    slow.leave()


class Hostile:
    """Raises in the hooks that it is given."""

    def __init__(self, *hooks: str, error: BaseException | None = None) -> None:
        self.calls = 0
        self._error = RuntimeError("hostile") if error is None else error
        for hook in hooks:
            setattr(self, hook, self._raise)

    def _raise(self, *_: object) -> None:
        self.calls += 1
        raise self._error


@pytest.mark.parametrize(
    "hook, section",
    [
        ("slot_opened", "slot"),
        ("slot_closed", "slot"),
        ("window_requested", "window"),
        ("window_opened", "window"),
        ("window_closed", "window"),
    ],
)
def test_a_hook_that_raises_leaves_the_barrier_clean(hook: str, section: str) -> None:
    """With a strict hub the section fails, and the barrier is as new."""

    @in_virtual_time
    async def run() -> None:
        hostile = Hostile(hook)
        barrier = make(hub=strict_hub(hostile))
        with pytest.raises(RuntimeError, match="hostile"):
            async with barrier.mutation("retry") if section == "slot" else barrier.checkpoint():
                pass
        assert hostile.calls == 1
        assert pristine(barrier)
        barrier.hub.unsubscribe(hostile)
        await enter_window(barrier, 0.0)

    run()


@pytest.mark.parametrize("hook", ["slot_wait_abandoned", "window_abandoned"])
def test_a_hook_that_raises_in_an_abandoned_wait_leaves_the_barrier_clean(hook: str) -> None:
    """The waiter has left the queue before its hook is called."""

    @in_virtual_time
    async def run() -> None:
        hostile = Hostile(hook)
        barrier, order = make(hub=strict_hub(hostile)), list[str]()
        window = Visitor(order, "C", barrier.checkpoint())
        await settle()
        waiters = [Visitor(order, "w", barrier.mutation("retry")), Visitor(order, "C2", barrier.checkpoint())]
        await settle()
        for waiter in waiters:
            waiter.task.cancel()
        window.leave()
        await asyncio.wait({waiter.task for waiter in waiters})
        await settle()
        assert hostile.calls == 1
        assert [waiter.task.cancelled() for waiter in waiters].count(False) == 1
        assert any(not waiter.task.cancelled() and waiter.task.exception() for waiter in waiters)
        assert pristine(barrier)

    run()


@pytest.mark.parametrize(
    "error", [RuntimeError("hostile"), asyncio.CancelledError()], ids=["error", "cancelled"]
)
def test_a_hostile_observer_changes_nothing(error: BaseException) -> None:
    """Whatever every hook raises, sections run as without it, and the errors are counted."""

    @in_virtual_time
    async def run() -> None:
        hub = Hub()
        hub.subscribe(
            Hostile(
                "slot_opened",
                "slot_closed",
                "window_requested",
                "window_opened",
                "window_closed",
                error=error,
            )
        )
        barrier, order = make(hub=hub), list[str]()
        visitors = [
            Visitor(order, "w1", barrier.mutation("retry")),
            Visitor(order, "C", barrier.checkpoint()),
            Visitor(order, "w2", barrier.mutation("retry")),
        ]
        for visitor in visitors:
            visitor.leave()
        await asyncio.gather(*(visitor.task for visitor in visitors))
        assert order == ["w1", "C", "w2"]
        assert hub.errors == {
            "slot_opened": 2,
            "slot_closed": 2,
            "window_requested": 1,
            "window_opened": 1,
            "window_closed": 1,
        }
        assert pristine(barrier)

    run()


@in_virtual_time
async def test_an_observer_may_look_at_the_barrier_from_its_hooks() -> None:
    """Statistics are consistent at every hook: the release comes before the report."""
    seen: list[tuple[str, int, int]] = []

    class Looker:
        def slot_opened(self, *_: object) -> None:
            self._note("opened")

        def slot_closed(self, *_: object) -> None:
            self._note("closed")

        def _note(self, what: str) -> None:
            seen.append((what, barrier.statistics().active["retry"], barrier.mutation_version))

    barrier = make(hub=strict_hub(Looker()))
    async with barrier.mutation("retry"):
        pass
    assert seen == [("opened", 1, 0), ("closed", 0, 1)]


# ------------------------------------------------------------------------------------------------- poison


@in_virtual_time
async def test_a_poisoned_barrier_fails_whoever_waits_and_whoever_comes() -> None:
    """It halts, naming the hung call, and never reopens, not even when the call ends after all."""
    barrier, order, go = make(hung_thread_timeout=300.0), list[str](), threading.Event()
    started = threading.Event()

    def hang() -> None:
        started.set()
        assert go.wait(20)

    async def body() -> None:
        async with barrier.mutation("retry") as cut:
            await barrier.run_in_cut(cut, hang)

    try:
        task = asyncio.create_task(body(), name="stuck")
        await asyncio.sleep(0)
        window = Visitor(order, "C", barrier.checkpoint(drain_timeout=None))
        slot = Visitor(order, "w", barrier.mutation("retry"))
        await until(started)
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        loop.threads_hang = True
        await asyncio.wait({task, window.task, slot.task})
        for failed in (task, window.task, slot.task):
            with pytest.raises(BarrierPoisonedError, match="hang"):
                failed.result()
        now = barrier.statistics()
        assert (now.phase, now.waiting_checkpoints, sum(now.waiting.values())) == ("poisoned", 0, 0)
        with pytest.raises(BarrierPoisonedError):
            barrier_section = barrier.mutation("retry")
            await barrier_section.__aenter__()
        with pytest.raises(BarrierPoisonedError):
            await enter_window(barrier, 1.0)
    finally:
        go.set()
    await closed(barrier)
    assert barrier.statistics().phase == "poisoned"
    with pytest.raises(BarrierPoisonedError):
        await enter_window(barrier, 1.0)
    assert order == []
