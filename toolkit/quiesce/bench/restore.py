"""How long a resume takes: finding, proving and reading a checkpoint, filling a store, handing every group over.

Rule: what is measured is what a run does: the newest checkpoint is verified byte by byte, its rows go into an empty
store of a new incarnation, and all control state moves in one slot. Sizes that are compared take turns. The files
were written just before, so they are read from memory: what a disk adds is its reading speed. Yield rule:
:func:`run_restore` runs an event loop and blocks.
"""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from quiesce.accounting import Accounting
from quiesce.barrier import DataPlaneCheckpointBarrier
from quiesce.bench.machine import describe, load_average
from quiesce.bench.report import BenchReport, Table, shown, shown_spread
from quiesce.bench.stats import Spread, quiet_collector, ratios
from quiesce.bench.world import Size, World, require, shown_bytes
from quiesce.buffer import ReplayBuffer
from quiesce.checkpoint.restore import RestoredRun, RestoreTargets, load_newest, restore_into
from quiesce.checkpoint.saver import Checkpointer
from quiesce.checkpoint.shielding import in_thread
from quiesce.checkpoint.trainer_state import NoTrainerState
from quiesce.dataplane.lmdb import LmdbDataPlane
from quiesce.ledger import RolloutLedger
from quiesce.observers import Hub
from quiesce.samplers import WindowedSampler
from quiesce.spares import SparePool
from quiesce.threads import DaemonExecutor

__all__ = ["run_restore"]

_TARGETS: Final = {"restore_cost_per_group_10x": 1.5}
_PARTS: Final = ("verify", "rows", "documents")


@dataclass(frozen=True, slots=True)
class _Plan:
    groups: tuple[Size, ...]
    by_bytes: tuple[Size, ...]
    rounds: int


_FULL: Final = _Plan(
    groups=(Size(1_000, 4, 4 << 10), Size(10_000, 4, 4 << 10)),
    by_bytes=tuple(Size(8192, 8, row) for row in (256, 4 << 10, 16 << 10)),
    rounds=5,
)
_QUICK: Final = _Plan(
    groups=(Size(20, 2, 256), Size(200, 2, 256)), by_bytes=(Size(16, 2, 256), Size(16, 2, 4 << 10)), rounds=2
)


@dataclass(frozen=True, slots=True)
class _Took:
    total_s: float
    parts: dict[str, float]


def run_restore(*, quick: bool = False, folder: Path | None = None) -> BenchReport:
    """Measure resumes.

    Args:
        quick: Cut sizes and rounds down, to see that it works; the bar keeps its name.
        folder: Where stores and checkpoints go meanwhile (about 6 GiB); None means the system's temporary folder.

    Raises:
        ConfigError: If numpy or torch is not installed.
        OSError: If the disk refuses.
    """
    require("numpy", "torch")
    plan = _QUICK if quick else _FULL
    with tempfile.TemporaryDirectory(prefix="quiesce-bench-", dir=folder) as name:
        place = Path(name)
        machine = describe(place)
        groups = asyncio.run(_sweep(place / "groups", plan.groups, plan.rounds))
        by_bytes = asyncio.run(_sweep(place / "bytes", plan.by_bytes, plan.rounds))
        machine["load_average_after"] = load_average()
    small, large = plan.groups
    bar = ratios(
        [took.total_s / large.groups for took in groups[large]],
        [took.total_s / small.groups for took in groups[small]],
    )
    found = [("groups", size, took) for size, took in groups.items()]
    found += [("bytes", size, took) for size, took in by_bytes.items()]
    return BenchReport(
        bench="restore",
        quick=quick,
        machine=machine,
        results=[_result(*one) for one in found],
        bars={"restore_cost_per_group_10x": bar.median},
        spreads={"restore_cost_per_group_10x": bar},
        targets=_TARGETS,
        at_least=frozenset(),
        tables=(
            Table(
                "Resuming",
                (
                    "groups",
                    "rows",
                    "bytes of rows",
                    "seconds (quartiles)",
                    "µs per group",
                    "MiB/s",
                    "verify, s",
                    "fill rows, s",
                    "hand over, s",
                ),
                tuple(_row(size, took) for _, size, took in found),
            ),
        ),
    )


def _result(sweep: str, size: Size, took: list[_Took]) -> dict[str, Any]:
    total = Spread.of([one.total_s for one in took])
    return {
        "sweep": sweep,
        "groups": size.groups,
        "in_flight": size.in_flight,
        "rows": size.rows,
        "row_bytes": size.row_bytes,
        "restore_s": total.to_json(),
        "us_per_group": total.median * 1e6 / size.groups,
        "parts_s": {part: Spread.of([one.parts[part] for one in took]).to_json() for part in _PARTS},
    }


def _row(size: Size, took: list[_Took]) -> tuple[str, ...]:
    total = Spread.of([one.total_s for one in took])
    parts = [shown(Spread.of([one.parts[part] for one in took]).median) for part in _PARTS]
    return (
        f"{size.groups:,}",
        f"{size.rows:,}",
        shown_bytes(size.num_bytes),
        shown_spread(total),
        shown(total.median * 1e6 / size.groups),
        shown(size.num_bytes / total.median / (1 << 20)),
        *parts,
    )


async def _sweep(place: Path, sizes: tuple[Size, ...], rounds: int) -> dict[Size, list[_Took]]:
    runs = {size: await _saved(place / str(number), size) for number, size in enumerate(sizes)}
    took: dict[Size, list[_Took]] = {size: [] for size in sizes}
    await _restore(
        runs[sizes[0]], place / "target"
    )  # once before it counts: torch is imported, caches are filled
    for number in range(rounds):
        for turn in range(len(sizes)):
            size = sizes[(turn + number) % len(sizes)]
            with quiet_collector():
                took[size].append(await _restore(runs[size], place / "target"))
    return took


async def _saved(folder: Path, size: Size) -> Path:
    """Fill a run, save it, and leave only its run folder; return that."""
    world = World(folder, size)
    saver = Checkpointer(world.sources, NoTrainerState(), world.run)
    try:
        await world.fill()
        await saver.save(step=0, trainer_version=0)
        result = await saver.wait()
        if result is None or result.outcome != "completed":
            raise RuntimeError(f"the checkpoint to restore could not be saved: {result}")
    finally:
        await saver.close()
        world.close()
        shutil.rmtree(world.plane.directory)
    return world.run.path


async def _restore(run: Path, target: Path) -> _Took:
    """Restore the newest checkpoint of a run into fresh primitives, which are thrown away."""
    hub = Hub(strict=True)
    barrier = DataPlaneCheckpointBarrier(hub=hub)
    ledger = RolloutLedger(barrier)
    incarnation = 2
    plane = LmdbDataPlane(target, incarnation, tensors="numpy", hub=hub)
    executor = DaemonExecutor("quiesce-bench-restore", 1)
    targets = RestoreTargets(
        barrier=barrier,
        sampler=WindowedSampler(barrier),
        accounting=Accounting(barrier),
        spares=SparePool(barrier),
        buffer=ReplayBuffer(barrier, ledger, plane),
        ledger=ledger,
        dataplane=plane,
    )
    try:
        begun = time.perf_counter()
        loaded = await in_thread(executor, _load, run, hub)
        restored: RestoredRun = await restore_into(loaded, targets, incarnation=incarnation)
        total = time.perf_counter() - begun
    finally:
        plane.close()
        executor.shutdown(wait=False)
        shutil.rmtree(target)
    return _Took(total, {part: ns / 1e9 for part, ns in restored.parts.items()})


def _load(run: Path, hub: Hub) -> Any:  # noqa: ANN401 - what load_newest returns
    return load_newest(run, rename_corrupt=False, hub=hub)
