"""How long a save keeps everybody else out: against groups, bytes and the file system's latency, in three modes.

Rule: the modes take turns on one run, round after round, each beside the same writer; so do runs of different size
that are compared. Ratios are taken within a round. Whatever a mode does outside the window is reported beside it:
how long the trainer stood still, when the checkpoint was durable, how long a writer waited, how late the loop was.
Yield rule: :func:`run_window` runs an event loop and blocks.

======================================  ===================================================================
bar                                     is
======================================  ===================================================================
window_exclusive_ms_at_10k_groups       the window of ours, of a run with 10,000 finished groups
window_ns_per_group                     how much it grows with each further group, from 100 to 100,000
window_exclusive_1gib_vs_16mib          how much longer it is with 64 times the bytes, in as many groups
window_inside_vs_ours_at_1gib           how much longer it is if 1 GiB is written inside
window_inside_vs_ours_at_50ms           how much longer it is if 16 MiB are, to a file system of 50 ms latency
durable_ours_vs_inside_at_1gib          how much later the checkpoint is durable
write_vs_sequential                     writing its rows and documents, against writing as many bytes to a file
======================================  ===================================================================
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from quiesce.bench.machine import describe, load_average
from quiesce.bench.modes import MODES, Sample, Saves
from quiesce.bench.report import BenchReport, Table, shown, shown_spread
from quiesce.bench.stats import Spread, quiet_collector, ratios
from quiesce.bench.world import Size, World, noise, require, shown_bytes

__all__ = ["SWEEPS", "run_window"]

SWEEPS: Final = ("groups", "bytes", "latency")

_TARGETS: Final = {
    "window_exclusive_ms_at_10k_groups": 1.0,
    "window_ns_per_group": 100.0,
    "window_exclusive_1gib_vs_16mib": 2.0,
    "window_inside_vs_ours_at_1gib": 100.0,
    "window_inside_vs_ours_at_50ms": 100.0,
    "durable_ours_vs_inside_at_1gib": 1.2,
    "write_vs_sequential": 2.0,
}
_AT_LEAST: Final = frozenset({"window_inside_vs_ours_at_1gib", "window_inside_vs_ours_at_50ms"})
_SEQUENTIAL: Final = "sequential"
_SEQUENTIAL_CHUNK_BYTES: Final = 4 << 20
_SECONDS: Final = (
    "exclusive_s",
    "trainer_stall_s",
    "time_to_durable_s",
    "write_s",
    "slot_wait_s",
    "loop_lag_s",
)


@dataclass(frozen=True, slots=True)
class _Plan:
    groups: tuple[Size, ...]
    group_rounds: int
    most_rounds: int  # of the run with the most groups, whose saves take the longest
    by_bytes: tuple[Size, ...]
    byte_rounds: int
    slow: Size
    latencies: tuple[float, ...]
    slow_rounds: int
    windows: int


_FULL: Final = _Plan(
    # The most groups have the fewest bytes each: 16 MiB in all, but for the rows' own overhead.
    groups=tuple(Size(count, 2, (16 << 20) // (2 * count)) for count in (100, 1_000, 10_000, 100_000)),
    group_rounds=7,
    most_rounds=3,
    by_bytes=tuple(Size(8192, 8, row) for row in (256, 1 << 10, 4 << 10, 16 << 10)),
    byte_rounds=4,
    slow=Size(128, 8, 16 << 10),
    latencies=(0.0, 0.05),
    slow_rounds=7,
    windows=60,
)
_QUICK: Final = _Plan(
    groups=tuple(Size(count, 2, 64) for count in (10, 100, 1_000, 2_000)),
    group_rounds=1,
    most_rounds=1,
    by_bytes=(Size(64, 2, 256), Size(64, 2, 16 << 10)),
    byte_rounds=1,
    slow=Size(16, 2, 1 << 10),
    latencies=(0.0, 0.002),
    slow_rounds=1,
    windows=3,
)

_Key = tuple[str, int, float]  # mode, number of the size, latency


@dataclass(frozen=True, slots=True)
class _Sweep:
    """What was measured over some sizes and latencies."""

    sizes: tuple[Size, ...]
    samples: dict[_Key, list[Sample]]
    windows: dict[int, list[float]]
    sequential: dict[int, list[float]]

    def values(self, name: str, mode: str, size: int = -1, latency: float = 0.0) -> list[float]:
        """Return one number of each round."""
        return [getattr(sample, name) for sample in self.samples[mode, size % len(self.sizes), latency]]


def run_window(*, quick: bool = False, folder: Path | None = None) -> BenchReport:
    """Measure the window.

    Args:
        quick: Cut sizes and rounds down, to see that it works; the bars keep their names.
        folder: Where stores and checkpoints go meanwhile (about 20 GiB); None means the system's temporary folder.

    Raises:
        ConfigError: If numpy is not installed.
        OSError: If the disk refuses.
    """
    require("numpy")
    plan = _QUICK if quick else _FULL
    with tempfile.TemporaryDirectory(prefix="quiesce-bench-", dir=folder) as name:
        place = Path(name)
        machine = describe(place)
        groups = asyncio.run(
            _sweep(
                place / "groups",
                plan.groups,
                (0.0,),
                plan.group_rounds,
                plan.windows,
                most_rounds=plan.most_rounds,
            )
        )
        by_bytes = asyncio.run(
            _sweep(
                place / "bytes",
                plan.by_bytes,
                (0.0,),
                plan.byte_rounds,
                plan.windows,
                sequential=True,
            )
        )
        latency = asyncio.run(
            _sweep(place / "latency", (plan.slow,), plan.latencies, plan.slow_rounds, plan.windows)
        )
        machine["load_average_after"] = load_average()
    sweeps = dict(zip(SWEEPS, (groups, by_bytes, latency), strict=True))
    spreads = _bars(groups, by_bytes, latency, plan.latencies[-1])
    return BenchReport(
        bench="window",
        quick=quick,
        machine=machine,
        results=[result for name, sweep in sweeps.items() for result in _results(name, sweep)],
        bars={name: spread.median for name, spread in spreads.items()},
        spreads=spreads,
        targets=_TARGETS,
        at_least=_AT_LEAST,
        tables=tuple(_table(name, sweep) for name, sweep in sweeps.items()),
    )


async def _sweep(
    place: Path,
    sizes: tuple[Size, ...],
    latencies: Sequence[float],
    rounds: int,
    windows: int,
    *,
    most_rounds: int | None = None,
    sequential: bool = False,
) -> _Sweep:
    """Measure every mode at every size and latency, in turns; the last size in the first ``most_rounds`` alone."""
    found = _Sweep(sizes, defaultdict(list), defaultdict(list), defaultdict(list))
    turns = (*MODES, _SEQUENTIAL) if sequential else MODES
    chunk = memoryview(noise(_SEQUENTIAL_CHUNK_BYTES).tobytes())
    async with contextlib.AsyncExitStack() as stack:
        saves: list[Saves] = []
        for number, size in enumerate(sizes):
            world = World(place / str(number), size)
            stack.callback(world.close)
            await world.fill()
            saves.append(await stack.enter_async_context(Saves(world)))
        with quiet_collector():
            # Once before it counts: caches, threads, lazily imported modules.
            sizes_of = [(await one.measure("ours")).num_bytes for one in saves]
            for number in range(rounds):
                for which, one in enumerate(saves):
                    if most_rounds is not None and number >= most_rounds and which == len(saves) - 1:
                        continue
                    for latency in latencies:
                        for turn in range(len(turns)):
                            mode = turns[(turn + number) % len(turns)]
                            if mode == _SEQUENTIAL:
                                found.sequential[which].append(await one.sequential(sizes_of[which], chunk))
                                continue
                            found.samples[mode, which, latency].append(await one.measure(mode, latency))
            for _ in range(windows):
                for which, one in enumerate(saves):
                    found.windows[which].append(await one.window())
    return found


def _bars(groups: _Sweep, by_bytes: _Sweep, latency: _Sweep, slow: float) -> dict[str, Spread]:
    """Return each bar with its spread."""
    few, most = groups.sizes[0].groups, groups.sizes[-1].groups
    at_10k = groups.values("exclusive_s", "ours", 2)
    growth = [
        (large - small) * 1e9 / (most - few)
        for small, large in zip(
            groups.values("exclusive_s", "ours", 0),
            groups.values("exclusive_s", "ours"),
            strict=False,  # the last size has fewer rounds: the first ones
        )
    ]
    ours = by_bytes.values("exclusive_s", "ours")
    return {
        "window_exclusive_ms_at_10k_groups": Spread.of(at_10k, 1e3),
        "window_ns_per_group": Spread.of(growth),
        "window_exclusive_1gib_vs_16mib": ratios(ours, by_bytes.values("exclusive_s", "ours", 0)),
        "window_inside_vs_ours_at_1gib": ratios(by_bytes.values("exclusive_s", "inside"), ours),
        "window_inside_vs_ours_at_50ms": ratios(
            latency.values("exclusive_s", "inside", latency=slow),
            latency.values("exclusive_s", "ours", latency=slow),
        ),
        "durable_ours_vs_inside_at_1gib": ratios(
            by_bytes.values("time_to_durable_s", "ours"), by_bytes.values("time_to_durable_s", "inside")
        ),
        "write_vs_sequential": ratios(
            by_bytes.values("write_s", "ours"), by_bytes.sequential[len(by_bytes.sizes) - 1]
        ),
    }


def _results(name: str, sweep: _Sweep) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = []
    for (mode, number, latency), samples in sweep.samples.items():
        size, last = sweep.sizes[number], samples[-1]
        result: dict[str, Any] = {
            "sweep": name,
            "mode": mode,
            "groups": size.groups,
            "in_flight": size.in_flight,
            "rows": size.rows,
            "row_bytes": size.row_bytes,
            "latency_s": latency,
            "checkpoint_bytes": last.num_bytes,
            "operations": last.operations,
            "groups_written_meanwhile": Spread.of([sample.groups_written for sample in samples]).to_json(),
        }
        result |= {
            field: Spread.of([getattr(sample, field) for sample in samples]).to_json() for field in _SECONDS
        }
        if mode == "ours":
            result["window_alone_s"] = Spread.of(sweep.windows[number]).to_json()
            if number in sweep.sequential:
                result["sequential_s"] = Spread.of(sweep.sequential[number]).to_json()
        results.append(result)
    return results


def _table(name: str, sweep: _Sweep) -> Table:
    rows = []
    for (mode, number, latency), samples in sorted(
        sweep.samples.items(), key=lambda item: (item[0][1], item[0][2], MODES.index(item[0][0]))
    ):
        size = sweep.sizes[number]

        def median(field: str, scale: float = 1.0, samples: list[Sample] = samples) -> str:
            return shown(Spread.of([getattr(sample, field) for sample in samples], scale).median)

        rows.append(
            (
                f"{size.groups:,}",
                shown_bytes(size.num_bytes),
                f"{latency * 1e3:g} ms",
                mode,
                shown_spread(Spread.of([sample.exclusive_s for sample in samples], 1e3)),
                str(samples[-1].operations["window"]),
                median("slot_wait_s", 1e3),
                median("loop_lag_s", 1e3),
                median("trainer_stall_s"),
                median("time_to_durable_s"),
            )
        )
    columns = (
        "groups",
        "rows",
        "latency",
        "mode",
        "exclusive, ms (quartiles)",
        "file operations inside",
        "a writer waited, ms",
        "loop late, ms",
        "trainer stood still, s",
        "durable after, s",
    )
    return Table(f"The window against {name}", columns, tuple(rows))
