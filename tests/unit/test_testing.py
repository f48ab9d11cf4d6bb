"""Claims about the public test helpers: time that jumps, order without sleeping, cancellation at every step."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from quiesce.testing import (
    DeadlockError,
    EventRecorder,
    FakeClock,
    VirtualTimeLoop,
    all_waiting,
    cancelled_at,
    in_virtual_time,
    settle,
    strict_hub,
)


@in_virtual_time
async def test_time_jumps_when_nothing_is_ready() -> None:
    """A day passes at once, on the loop's clock."""
    began, loop = time.monotonic(), asyncio.get_running_loop()
    await asyncio.sleep(86_400)
    assert loop.time() >= 86_400
    assert time.monotonic() - began < 10


@in_virtual_time
async def test_timers_fire_in_their_order() -> None:
    """Whatever the order in which they were set."""
    order: list[int] = []
    loop = asyncio.get_running_loop()
    for delay in (3, 1, 2):
        loop.call_later(delay, order.append, delay)
    await asyncio.sleep(4)
    assert order == [1, 2, 3]


@in_virtual_time
async def test_settling_takes_no_time_and_lets_everybody_go_as_far_as_they_can() -> None:
    """Tasks run through any number of steps, timers do not."""
    steps = 0

    async def walk() -> None:
        nonlocal steps
        for _ in range(1_000):
            await asyncio.sleep(0)
            steps += 1
        await asyncio.sleep(1)
        steps += 1

    task, loop = asyncio.create_task(walk()), asyncio.get_running_loop()
    assert await all_waiting(task)
    assert (steps, loop.time()) == (1_000, 0.0)
    await task
    assert not await all_waiting(task)


def test_settling_needs_virtual_time() -> None:
    """Elsewhere it says what is missing."""
    with pytest.raises(TypeError, match="needs a VirtualTimeLoop"):
        asyncio.run(settle())


def test_a_deadlock_is_an_error_that_names_the_tasks() -> None:
    """Where a real loop would hang for ever."""

    @in_virtual_time
    async def run() -> None:
        await asyncio.create_task(asyncio.Event().wait(), name="stuck")

    with pytest.raises(DeadlockError, match="stuck"):
        run()


@in_virtual_time
async def test_a_call_in_a_thread_is_waited_for_in_real_time() -> None:
    """No timer fires early because a thread is slow."""
    fired: list[str] = []
    loop, go = asyncio.get_running_loop(), threading.Event()
    loop.call_later(1, fired.append, "timer")
    call = asyncio.create_task(asyncio.to_thread(go.wait, 20))
    await settle()
    threading.Timer(0.05, go.set).start()
    assert await call
    assert fired == []


@in_virtual_time
async def test_a_hung_thread_lets_time_jump_when_the_test_says_so() -> None:
    """So that the deadline of a hung call can be tested."""
    loop, go = asyncio.get_running_loop(), threading.Event()
    assert isinstance(loop, VirtualTimeLoop)
    loop.threads_hang = True
    call = asyncio.create_task(asyncio.to_thread(go.wait, 20))
    await asyncio.sleep(3600)
    assert not call.done()
    go.set()
    loop.threads_hang = False
    assert await call


def test_a_decorated_function_returns_and_takes_arguments() -> None:
    """It is an ordinary function with the same signature."""

    @in_virtual_time
    async def add(one: int, *, other: int) -> int:
        await asyncio.sleep(1)
        return one + other

    assert add(1, other=2) == 3


async def two_steps(done: list[str]) -> None:
    """Suspend twice."""
    await asyncio.sleep(1)
    done.append("first")
    await asyncio.sleep(0)
    done.append("second")


@pytest.mark.parametrize(
    "step, late, outcome, reached, done",
    [
        (0, False, "cancelled", True, []),
        (1, False, "cancelled", True, []),
        (2, False, "cancelled", True, ["first"]),
        (3, False, "completed", False, ["first", "second"]),
        (1, True, "cancelled", True, []),
        (2, True, "cancelled", True, ["first"]),
        (3, True, "completed", False, ["first", "second"]),
    ],
)
def test_a_coroutine_is_cancelled_at_each_suspension(
    step: int, outcome: str, done: list[str], *, late: bool, reached: bool
) -> None:
    """Before its first step, at its n-th suspension, and never."""
    noted: list[str] = []
    stopped = in_virtual_time(cancelled_at)(two_steps(noted), step, late=late)
    assert (stopped.outcome, stopped.reached, noted) == (outcome, reached, done)


@pytest.mark.parametrize("late", [False, True])
def test_a_late_cancellation_comes_after_what_was_awaited(*, late: bool) -> None:
    """The future is complete, and still its waiter is cancelled."""

    @in_virtual_time
    async def run() -> tuple[str, bool]:
        future = asyncio.get_running_loop().create_future()

        async def wait() -> None:
            await future

        cancelling = asyncio.create_task(cancelled_at(wait(), 1, late=late))
        await settle()
        if not future.done():
            future.set_result(None)
        return (await cancelling).outcome, future.cancelled()

    assert run() == ("cancelled", not late)


@in_virtual_time
async def test_a_failing_coroutine_gives_its_error() -> None:
    """It is returned, not raised."""

    async def fail() -> None:
        raise ValueError("failed")

    stopped = await cancelled_at(fail(), 1)
    assert (stopped.outcome, str(stopped.error)) == ("failed", "failed")


def test_a_fake_clock_moves_by_hand_and_never_back() -> None:
    """In seconds, told in nanoseconds."""
    clock = FakeClock(5)
    clock.advance(1.5)
    assert clock() == 1_500_000_005
    with pytest.raises(ValueError, match="does not go back"):
        clock.advance(-1.0)


def test_a_recorder_gives_calls_by_hook_in_order() -> None:
    """An unknown hook is a typo of the test."""
    recorder = EventRecorder()
    hub = strict_hub(recorder)
    hub.fire("prompts_read", 1)
    hub.fire("version_advanced", 2)
    hub.fire("prompts_read", 3)
    assert recorder.of("prompts_read") == [(1,), (3,)]
    assert recorder.hooks() == ["prompts_read", "version_advanced", "prompts_read"]
    with pytest.raises(ValueError, match="no hook 'prompt_read'"):
        recorder.of("prompt_read")
    recorder.clear()
    assert recorder.events == []
