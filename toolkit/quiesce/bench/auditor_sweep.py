"""How much later the event loop is while the auditor sweeps a run of a million groups with a store on disk.

Rule: a tick wants to run every few milliseconds, and a tick that was passed over counts too; rounds without and with the
sweep take turns, and the difference is taken within a round. Yield rule: :func:`measure_sweep` suspends throughout.
"""

from __future__ import annotations

import asyncio
import gc
import tempfile
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from quiesce.auditor import Auditor
from quiesce.auditor.sweep import SLICE
from quiesce.barrier import detached
from quiesce.bench.auditor_world import fill, owners_of, store
from quiesce.bench.stats import Spread
from quiesce.observers import Hub

__all__ = ["SweepCosts", "measure_sweep"]

_TICK_NS: Final = 2_000_000
_FINISHED_SHARE: Final = 10
_ROWS_PER_GROUP: Final = 8


@dataclass(frozen=True, slots=True)
class SweepCosts:
    """What the sweep did to the loop.

    Attributes:
        groups: Groups of the run.
        rows: Rows in its store; those that are swept first have all of them.
        p99_off_ms: One number a round: how late 99 of 100 ticks were at most, without the sweep.
        p99_on_ms: The same with it.
        longest_slice_ms: The longest that a slice held the loop.
        slices_per_second: How many there were.
        pass_seconds: How long a pass over everything would take at that pace, were all groups finished.
        seed_seconds: How long the auditor took to take over everything, once, before anything was dispatched.
    """

    groups: int
    rows: int
    p99_off_ms: Sequence[float]
    p99_on_ms: Sequence[float]
    longest_slice_ms: float
    slices_per_second: float
    pass_seconds: float
    seed_seconds: float

    @property
    def extra_ms(self) -> Spread:
        """How much later it was with the sweep, by round."""
        return Spread.of([on - off for on, off in zip(self.p99_on_ms, self.p99_off_ms, strict=True)])


async def measure_sweep(groups: int, rounds: int, seconds: float, folder: Path | None = None) -> SweepCosts:
    """Measure it.

    Args:
        groups: Groups of the run; the first tenth of them is finished and has rows.
        rounds: Rounds.
        seconds: How long each half of a round takes.
        folder: Where the store goes; None means the system's temporary folder.

    Raises:
        RuntimeError: If the sweep found something, or a part of it failed: then something else was measured.
    """
    with tempfile.TemporaryDirectory(prefix="quiesce-bench-", dir=folder) as name:
        hub = Hub(strict=True)
        with store(Path(name), hub) as plane:
            owners = owners_of(hub, plane)
            finished = groups // _FINISHED_SHARE
            await fill(owners, groups, finished, _ROWS_PER_GROUP, plane)
            gc.collect()
            gc.freeze()  # a run's groups have been there for long; a collection of them would be no sweep's doing
            try:
                since = time.perf_counter()
                auditor = Auditor(owners, dataplane=plane)
                seed_seconds = time.perf_counter() - since
                auditor.start(sweeping=False)
                off, on, slices = list[float](), list[float](), 0
                for _ in range(rounds):
                    off.append(await _p99(seconds))
                    before = auditor.sweep.slices
                    sweeping = detached(auditor.sweep.run(), name="sweep")
                    on.append(await _p99(seconds))
                    slices += auditor.sweep.slices - before
                    sweeping.cancel()
                    await asyncio.wait({sweeping})
                statistics = auditor.statistics()
                await auditor.aclose()
            finally:
                gc.unfreeze()
    if statistics.findings or statistics.sweep_failures or not slices:
        raise RuntimeError(f"the sweep did not do what it is measured for: {statistics}")
    per_second = slices / (rounds * seconds)
    return SweepCosts(
        groups=groups,
        rows=finished * _ROWS_PER_GROUP,
        p99_off_ms=off,
        p99_on_ms=on,
        longest_slice_ms=statistics.longest_step_seconds * 1e3,
        slices_per_second=per_second,
        pass_seconds=groups / SLICE / per_second,
        seed_seconds=seed_seconds,
    )


async def _p99(seconds: float) -> float:
    """Return how late 99 of 100 ticks were at most, in milliseconds."""
    clock, lags = time.perf_counter_ns, array("q")
    due = clock() + _TICK_NS
    until = due + int(seconds * 1e9)
    while due < until:
        await asyncio.sleep(max(0, due - clock()) / 1e9)
        now = clock()
        while due <= now:
            lags.append(now - due)
            due += _TICK_NS
    return sorted(lags)[len(lags) * 99 // 100] / 1e6
