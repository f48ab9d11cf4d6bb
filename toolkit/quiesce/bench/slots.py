"""A bare mutation slot, and the drain of queued waiters, against the shape that they replace; and what telemetry adds.

Rule: both barriers are measured in every round, in turns, by the processor time of this thread: a slot that does
not wait is pure computing, so what other processes take from it is not its cost. The time of the clock on the wall
is reported beside it. Yield rule: :func:`run_slots` runs an event loop and blocks.

What a slot costs with telemetry is measured by :mod:`quiesce.bench.telemetry`, in the same call.
"""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from quiesce.barrier import DataPlaneCheckpointBarrier, detached
from quiesce.bench.machine import describe, load_average
from quiesce.bench.report import BenchReport, Table, shown_spread
from quiesce.bench.stats import Spread, quiet_collector, ratios
from quiesce.bench.upstream_shape import UpstreamShapeBarrier
from quiesce.observers import Hub

__all__ = ["run_slots"]

_KIND: Final = "group_commit"
_TARGETS: Final = {"slot_bare_vs_upstream_shape": 0.22, "drain_cost_10k_vs_1k": 1.5}


@dataclass(frozen=True, slots=True)
class _Plan:
    rounds: int
    slots: int
    drain_rounds: int
    few: int
    many: int


_FULL: Final = _Plan(rounds=300, slots=1000, drain_rounds=25, few=1000, many=10_000)
_QUICK: Final = _Plan(rounds=15, slots=200, drain_rounds=3, few=100, many=1000)

Barrier = DataPlaneCheckpointBarrier | UpstreamShapeBarrier
Name = TypeVar("Name")


@dataclass(frozen=True, slots=True)
class _Took:
    """What some work took, in nanoseconds."""

    cpu: int
    wall: int


def run_slots(*, quick: bool = False) -> BenchReport:
    """Measure slots and drains.

    Args:
        quick: Cut rounds and sizes down, to see that it works.
    """
    from quiesce.bench import telemetry as added  # not for the other benchmarks: it loads OpenTelemetry

    plan = _QUICK if quick else _FULL
    machine = describe(Path(tempfile.gettempdir()))
    slots, drains = asyncio.run(_measure(plan))
    costs = added.measure_telemetry(quick=quick)
    machine["load_average_after"] = load_average()
    quiet = slots["quiesce"], slots["upstream_shape"]
    bar = ratios([took.cpu for took in quiet[0]], [took.cpu for took in quiet[1]])
    scaling = ratios(
        [took.cpu / plan.many for took in drains["quiesce", plan.many]],
        [took.cpu / plan.few for took in drains["quiesce", plan.few]],
    )
    results: list[dict[str, Any]] = []
    rows: list[tuple[str, ...]] = []

    def add(what: str, barrier: str, count: int, found: list[_Took]) -> None:
        cpu = Spread.of([took.cpu for took in found], 1 / count)
        wall = Spread.of([took.wall for took in found], 1 / count)
        results.append(
            {
                "operation": what,
                "barrier": barrier,
                "count": count,
                "cpu_ns": cpu.to_json(),
                "wall_ns": wall.to_json(),
            }
        )
        rows.append(
            (f"{what}, {barrier}", f"{count:,}", shown_spread(cpu), shown_spread(wall), str(cpu.rounds))
        )

    for barrier, found in slots.items():
        add("slot", barrier, plan.slots, found)
    for (barrier, count), found in drains.items():
        add("drain of one waiter", barrier, count, found)
    own = BenchReport(
        bench="slots",
        quick=quick,
        machine=machine,
        results=results,
        bars={"slot_bare_vs_upstream_shape": bar.median, "drain_cost_10k_vs_1k": scaling.median},
        spreads={"slot_bare_vs_upstream_shape": bar, "drain_cost_10k_vs_1k": scaling},
        targets=_TARGETS,
        at_least=frozenset(),
        tables=(
            Table(
                "Slots and drains",
                ("operation", "at once", "ns of processor time", "ns on the wall", "rounds"),
                tuple(rows),
            ),
        ),
    )
    of_telemetry = BenchReport(
        bench="telemetry",
        quick=quick,
        machine=machine,
        results=costs.results,
        bars=costs.bars,
        spreads=costs.spreads,
        targets={name: target for name, target in added.TARGETS.items() if name in costs.bars},
        at_least=added.AT_LEAST,
        tables=costs.tables,
    )
    return BenchReport(
        bench="slots",
        quick=quick,
        machine=machine,
        results=[*own.results, *of_telemetry.results],
        bars={**own.bars, **of_telemetry.bars},
        spreads={**own.spreads, **of_telemetry.spreads},
        targets={**own.targets, **of_telemetry.targets},
        at_least=of_telemetry.at_least,
        tables=(*own.tables, *of_telemetry.tables),
        parts=(own, of_telemetry),
    )


async def _measure(plan: _Plan) -> tuple[dict[str, list[_Took]], dict[tuple[str, int], list[_Took]]]:
    barriers: dict[str, Barrier] = {
        "quiesce": DataPlaneCheckpointBarrier(hub=Hub()),
        "upstream_shape": UpstreamShapeBarrier(),
    }
    slots: dict[str, list[_Took]] = {name: [] for name in barriers}
    drains: dict[tuple[str, int], list[_Took]] = {
        (name, count): [] for name in barriers for count in (plan.few, plan.many)
    }
    for barrier in barriers.values():  # once before it counts: caches, lazily built state
        await _slots(barrier, plan.slots)
    with quiet_collector():
        for number in range(plan.rounds):
            for name in _turn(tuple(barriers), number):
                slots[name].append(await _timed(_slots, barriers[name], plan.slots))
    for number in range(plan.drain_rounds):
        for name, count in _turn(tuple(drains), number):
            with quiet_collector():
                drains[name, count].append(await _drain(barriers[name], count))
    return slots, drains


def _turn(names: tuple[Name, ...], number: int) -> tuple[Name, ...]:
    """Let each come first in turns."""
    first = number % len(names)
    return names[first:] + names[:first]


async def _timed(work: Callable[[Barrier, int], Awaitable[None]], barrier: Barrier, count: int) -> _Took:
    wall, cpu = time.perf_counter_ns(), time.thread_time_ns()
    await work(barrier, count)
    return _Took(time.thread_time_ns() - cpu, time.perf_counter_ns() - wall)


async def _slots(barrier: Barrier, count: int) -> None:
    """Enter and leave slots, one after the other; nothing waits."""
    mutation = barrier.mutation
    for _ in range(count):
        async with mutation(_KIND):
            pass


async def _drain(barrier: Barrier, waiters: int) -> _Took:
    """Queue tasks up behind a checkpoint, and measure from its end until the last one is through its slot."""

    async def waiter() -> None:
        async with barrier.mutation(_KIND):
            pass

    async with barrier.checkpoint():
        tasks = [detached(waiter()) for _ in range(waiters)]
        await asyncio.sleep(0)  # each runs until it waits
        wall, cpu = time.perf_counter_ns(), time.thread_time_ns()
    for task in tasks:
        await task
    return _Took(time.thread_time_ns() - cpu, time.perf_counter_ns() - wall)
