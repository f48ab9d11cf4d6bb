"""The explorer finds what depends on the order, misses nothing that a real loop can do, and repeats itself."""

from __future__ import annotations

import asyncio
import random
import sys
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from quiesce.explorer import (
    ExplorationFailedError,
    Report,
    explore,
    pause,
    pause_thread,
    replay,
    watch,
)
from quiesce.testing import DeadlockError
from quiesce.threads import DaemonExecutor

Program = Callable[[list[str]], Coroutine[Any, Any, None]]


class Account:
    """An account whose deposits can be lost."""

    def __init__(self) -> None:
        self.balance = 0

    async def deposit(self, amount: int) -> None:
        """Read, wait, write."""
        before = self.balance
        await pause("store")
        self.balance = before + amount


async def lost_update() -> None:
    """Break as soon as both read before either writes."""
    account = Account()

    async def later(amount: int) -> None:
        await pause("request")
        await account.deposit(amount)

    await asyncio.gather(later(1), later(2))
    assert account.balance == 3


@pytest.mark.parametrize("strategy", ["exhaustive", "random", "pct"])
def test_every_strategy_finds_a_lost_update(strategy: Any) -> None:  # noqa: ANN401 - a literal
    """The report has a schedule that a replay repeats, and its steps."""
    report = explore(lost_update, strategy=strategy)
    assert report.failure is not None
    assert isinstance(report.failure.error, AssertionError)
    with pytest.raises(AssertionError):
        replay(lost_update, report.failure.schedule)
    assert any("request" in step for step in report.failure.trace)
    with pytest.raises(ExplorationFailedError, match="schedule"):
        report.check()


def outcomes(program: Program, **options: Any) -> tuple[set[tuple[str, ...]], Report]:  # noqa: ANN401 - of explore()
    """Return every log that an exploration sees."""
    seen: set[tuple[str, ...]] = set()

    async def scenario() -> None:
        log: list[str] = []
        await program(log)
        seen.add(tuple(log))

    report = explore(scenario, max_schedules=20_000, **options).check()
    return seen, report


def program_of(seed: int) -> Program:
    """Return a random program of three tasks that pause, yield, wake each other, and use threads."""
    draw = random.Random(seed)
    scripts = [[draw.choice("ppynst") for _ in range(draw.randrange(1, 4))] for _ in range(3)]

    async def program(log: list[str]) -> None:
        event = asyncio.Event()

        async def run(name: str, script: list[str]) -> None:
            for number, step in enumerate(script):
                if step == "p":
                    await pause()
                elif step == "y":
                    await asyncio.sleep(0)
                elif step == "s":
                    event.set()
                elif step == "t":
                    await asyncio.to_thread(log.append, f"{name}{number}t")
                log.append(f"{name}{number}{int(event.is_set())}")

        await asyncio.gather(*(run(name, script) for name, script in zip("abc", scripts, strict=True)))

    return program


@pytest.mark.parametrize("seed", range(12))
def test_the_reduction_loses_no_outcome(seed: int) -> None:
    """With and without sleep sets the same logs are seen; with them in no more schedules."""
    program = program_of(seed)
    every, plain = outcomes(program, reduce=False)
    some, reduced = outcomes(program)
    assert plain.exhausted
    assert reduced.exhausted
    assert some == every
    assert reduced.schedules <= plain.schedules


@pytest.mark.parametrize("seed", range(12))
def test_what_a_real_loop_does_was_explored(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever order a real loop with real threads takes, at random delays, is among the explored ones."""
    program = program_of(seed)
    explored, _ = outcomes(program)
    draw = random.Random(seed)

    async def real_pause(label: str = "") -> None:
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        delay = draw.choice([0.0, 0.0, 0.0005, 0.001])

        def arrive() -> None:
            time.sleep(delay)
            loop.call_soon_threadsafe(future.set_result, None)

        threading.Thread(target=arrive).start()
        await future

    monkeypatch.setattr(f"{__name__}.pause", real_pause)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(60.0)  # a callback of the loop is one step, as it is for the explorer
    try:
        for _ in range(20):
            log: list[str] = []
            asyncio.run(program(log))
            assert tuple(log) in explored
    finally:
        sys.setswitchinterval(interval)


def test_callbacks_of_a_loop_stay_first_in_first_out() -> None:
    """With nothing outside the loop there is one order; code that depends on it is not blamed."""

    async def program(log: list[str]) -> None:
        async def say(name: str) -> None:
            log.append(name)

        await asyncio.gather(say("a"), say("b"), say("c"))

    seen, report = outcomes(program)
    assert seen == {("a", "b", "c")}
    assert report.schedules == 1
    free, _ = outcomes(program, freedom="any")
    assert len(free) == 6


def test_a_thread_is_overtaken_where_it_says_so() -> None:
    """A blocking call in pieces, between which the loop goes on; in a pool of one worker calls keep their order."""
    pool = DaemonExecutor("one", 1)

    async def program(log: list[str]) -> None:
        def work() -> None:
            log.append("begin")
            pause_thread("middle")
            log.append("end")

        async def beside() -> None:
            await pause()
            log.append("loop")

        loop = asyncio.get_running_loop()
        await asyncio.gather(
            loop.run_in_executor(pool, work), beside(), loop.run_in_executor(pool, log.append, "second")
        )

    seen, report = outcomes(program)
    assert report.exhausted
    assert seen == {
        ("loop", "begin", "end", "second"),
        ("begin", "loop", "end", "second"),
        ("begin", "end", "loop", "second"),
        ("begin", "end", "second", "loop"),
    }


def test_timers_fire_when_idle_or_whenever() -> None:
    """Code takes no time, or any."""

    async def program(log: list[str]) -> None:
        try:
            async with asyncio.timeout(1.0):
                await pause()
                log.append("in time")
        except TimeoutError:
            log.append("too late")

    assert outcomes(program)[0] == {("in time",)}
    assert outcomes(program, timers="any")[0] == {("in time",), ("too late",)}


def test_a_deadlock_an_endless_run_and_an_unhandled_error_are_failures() -> None:
    """Each with its own error."""

    async def stuck() -> None:
        await asyncio.Event().wait()

    async def endless() -> None:
        while True:  # noqa: ASYNC110 - endless on purpose
            await asyncio.sleep(0)

    async def unhandled() -> None:
        asyncio.get_running_loop().call_soon(int, "no number")
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    for scenario, error in ((stuck, DeadlockError), (endless, TimeoutError), (unhandled, ValueError)):
        failure = explore(scenario, max_steps=200).failure
        assert failure is not None
        assert isinstance(failure.error, error)


def test_a_watcher_sees_every_step() -> None:
    """What holds at the end but not in between is found."""

    async def scenario() -> None:
        state = [0, 0]
        watch(lambda: _same(state))
        state[0] = 1
        await asyncio.sleep(0)
        state[1] = 1

    failure = explore(scenario).failure
    assert failure is not None
    assert "differ" in str(failure.error)


def _same(state: list[int]) -> None:
    assert state[0] == state[1], "they differ"


def test_a_failing_schedule_is_shrunk() -> None:
    """A random find has many choices that do not matter; few are left."""

    async def scenario() -> None:
        log: list[int] = []

        async def say(number: int) -> None:
            await pause()
            log.append(number)

        await asyncio.gather(*(say(number) for number in range(6)))
        assert log.index(5) > log.index(0)

    failure = explore(scenario, strategy="random").failure
    assert failure is not None
    changed = [choice for choice in failure.schedule.split(":")[2].split(".") if choice != "0"]
    found = [choice for choice in failure.found_as.split(":")[2].split(".") if choice != "0"]
    assert len(changed) < len(found)


def test_a_bound_explores_the_few_deviations() -> None:
    """Fewer schedules, and the report says within what."""
    full, every = outcomes(program_of(3))
    few, bounded = outcomes(program_of(3), bound=1)
    assert bounded.exhausted
    assert bounded.bound == 1
    assert bounded.schedules < every.schedules
    assert few < full
    assert "at most 1" in str(bounded)


def test_a_seed_repeats_itself() -> None:
    """The same seed explores the same schedules."""
    first, second = (explore(lost_update, strategy="random", seed=7) for _ in range(2))
    assert first.failure is not None
    assert second.failure is not None
    assert (first.schedules, first.failure.found_as) == (second.schedules, second.failure.found_as)


@pytest.mark.parametrize("text", ["", "asyncio", "asyncio:idle:x", "real:idle:0", "asyncio:now:0"])
def test_what_is_no_schedule_is_refused(text: str) -> None:
    """The message says what one looks like."""
    with pytest.raises(ValueError, match="asyncio:idle"):
        replay(lost_update, text)


async def test_exploring_inside_a_loop_is_refused() -> None:
    """It runs loops of its own."""
    with pytest.raises(RuntimeError, match="plain code"):
        explore(lost_update)
