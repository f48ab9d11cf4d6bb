"""The barrier against a model, over random schedules of entering, leaving, cancelling, failing and waiting."""

from __future__ import annotations

import asyncio
import random
from collections import deque

import pytest

from quiesce.errors import QuiesceError
from quiesce.testing import DeadlockError, FakeClock, in_virtual_time, settle
from tests.barriers import Barrier, Visitor, make, pristine
from tests.unit.test_broken_barriers import (
    DrainStaysShut,
    LastInFirstOut,
    LeavesNothing,
    NoHandOver,
    SlotsExclude,
    SlotsOvertake,
    WindowsShare,
)

BROKEN = (
    DrainStaysShut,
    LastInFirstOut,
    LeavesNothing,
    NoHandOver,
    SlotsExclude,
    SlotsOvertake,
    WindowsShare,
)


class Model:
    """What the barrier promises, without any of its mechanics: one queue, slots together, windows alone."""

    def __init__(self) -> None:
        self.queue: deque[str] = deque()
        self.inside: list[str] = []
        self.entered: list[str] = []

    def ask(self, name: str) -> None:
        """Queue up, and enter at once if that is possible."""
        self.queue.append(name)
        self._serve()

    def gone(self, name: str) -> None:
        """Leave the section, or the queue."""
        (self.inside if name in self.inside else self.queue).remove(name)
        self._serve()

    def _serve(self) -> None:
        while self.queue:
            window_inside = any(name.startswith("C") for name in self.inside)
            if window_inside or (self.queue[0].startswith("C") and self.inside):
                return
            name = self.queue.popleft()
            self.inside.append(name)
            self.entered.append(name)


@in_virtual_time
async def run_schedule(seed: int, moves: int, cls: type[Barrier] = Barrier) -> None:
    """Make random moves, settling after each one; after every one barrier and model agree."""
    draw = random.Random(seed)
    barrier, model, order = make(cls, clock=FakeClock()), Model(), list[str]()
    visitors: dict[str, Visitor] = {}
    for number in range(moves):
        move = draw.random()
        if move < 0.5 or not visitors:
            name = f"{draw.choice('wwC')}{number}"
            section = barrier.checkpoint(None) if name[0] == "C" else barrier.mutation("retry")
            visitors[name] = Visitor(order, name, section)
            model.ask(name)
        elif move < 0.8 and model.inside:
            name = draw.choice(model.inside)
            visitors.pop(name).leave()
            model.gone(name)
        else:
            name = draw.choice(list(visitors))
            visitors.pop(name).task.cancel()
            model.gone(name)
        await settle()
        assert order == model.entered
        now = barrier.statistics()
        assert now.active["retry"] == sum(name.startswith("w") for name in model.inside)
        assert now.waiting["retry"] == sum(name.startswith("w") for name in model.queue)
        assert now.waiting_checkpoints == sum(name.startswith("C") for name in model.queue)
        assert (now.phase == "exclusive") == any(name.startswith("C") for name in model.inside)
        assert (now.phase == "drain") == (now.phase != "exclusive" and now.waiting_checkpoints > 0)
    while visitors:
        for name in model.inside[:]:
            visitors.pop(name).leave()
            model.gone(name)
        await settle()
    assert order == model.entered
    assert pristine(barrier)


@pytest.mark.parametrize("seed", range(60))
def test_a_random_schedule_agrees_with_the_model(seed: int) -> None:
    """Entry order, counts and phase are the model's after every move."""
    run_schedule(seed, 60)


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_the_model_notices_a_barrier_without_a_rule(broken: type[Barrier]) -> None:
    """One of the schedules shows that it is broken."""

    def every_seed() -> None:
        for seed in range(60):
            run_schedule(seed, 60, broken)

    with pytest.raises((AssertionError, DeadlockError, KeyError, QuiesceError)):
        every_seed()


@in_virtual_time
async def run_storm(seed: int) -> None:
    """Let many tasks go through sections at will, with cancellations and failures in between, without settling."""
    draw = random.Random(seed)
    barrier = make(clock=FakeClock())
    inside = {"slots": 0, "windows": 0}
    violations: list[str] = []

    async def pause() -> None:
        for _ in range(draw.randrange(3)):
            await asyncio.sleep(0)

    async def body(side: str, other: tuple[str, ...]) -> None:
        inside[side] += 1
        try:
            if any(inside[name] for name in other) or inside["windows"] > 1:
                violations.append(f"{side} with {inside}")
            await pause()
            if draw.random() < 0.1:
                raise ValueError("body")
        finally:
            inside[side] -= 1

    async def writer() -> None:
        for _ in range(10):
            await pause()
            async with barrier.mutation("retry"):
                await body("slots", ("windows",))

    async def saver() -> None:
        for _ in range(10):
            await pause()
            async with barrier.checkpoint(None):
                await body("windows", ("slots",))

    tasks = [asyncio.create_task(writer() if number % 4 else saver()) for number in range(40)]
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        if draw.random() < 0.2:
            draw.choice(tasks).cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert violations == []
    assert {type(result) for result in results} <= {type(None), ValueError, asyncio.CancelledError}
    assert pristine(barrier)


@pytest.mark.parametrize("seed", range(30))
def test_a_storm_of_tasks_never_breaks_the_exclusion(seed: int) -> None:
    """No slot is open in a window, no two windows are, and the barrier is as new afterwards."""
    run_storm(seed)


@pytest.mark.parametrize("seed", range(20))
def test_everybody_gets_in(seed: int) -> None:
    """Tasks that open sections back to back starve nobody: each section enters in the order in which it asked."""

    @in_virtual_time
    async def run() -> None:
        draw = random.Random(seed)
        barrier = make(clock=FakeClock())
        asked: list[int] = []
        entered: list[int] = []
        number = iter(range(10**6))

        async def visit(*, window: bool) -> None:
            for _ in range(20):
                mine = next(number)
                asked.append(mine)
                async with barrier.checkpoint(None) if window else barrier.mutation("retry"):
                    entered.append(mine)
                    for _ in range(draw.randrange(3)):
                        await asyncio.sleep(0)

        await asyncio.gather(*(visit(window=task % 3 == 0) for task in range(9)))
        assert sorted(entered) == asked
        assert entered == asked
        assert pristine(barrier)

    run()
