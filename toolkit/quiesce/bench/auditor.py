"""What the auditor costs: an event, a group that it keeps book of, a group of a cut that is judged, the sweep.

Rule: each bar is the worst of the sizes, and of the kinds of events; nothing is averaged away. Blocks; nothing here
suspends.

==========================================  ==========================================================================
bar                                         what it is
==========================================  ==========================================================================
``auditor_event_vs_bare_slot``              processor time of one event of the dearest kind, over a bare mutation slot
``auditor_bytes_per_group``                 what the auditor keeps, its bounded logs full, over the groups
``auditor_cut_check_us_per_group``          processor time of judging a cut by every invariant, over its groups
``auditor_sweep_extra_lag_p99_ms``          how much later 99 of 100 ticks of the loop are while it sweeps
==========================================  ==========================================================================
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from quiesce.bench.auditor_cut import CutCosts, measure_cut
from quiesce.bench.auditor_events import KINDS, EventCosts, Kept, measure_events, measure_kept
from quiesce.bench.auditor_sweep import SweepCosts, measure_sweep
from quiesce.bench.machine import describe, load_average
from quiesce.bench.report import BenchReport, Table, shown, shown_spread
from quiesce.bench.stats import Spread, ratios
from quiesce.bench.world import require

__all__ = ["TARGETS", "run_auditor"]

TARGETS: Final = {
    "auditor_event_vs_bare_slot": 1,
    "auditor_bytes_per_group": 256,
    "auditor_cut_check_us_per_group": 2,
    "auditor_sweep_extra_lag_p99_ms": 5,
}
"""The target of each bar: at most that."""

_ROWS_PER_GROUP: Final = 2


@dataclass(frozen=True, slots=True)
class _Plan:
    groups: tuple[int, ...]
    rounds: int
    count: int
    cuts: Mapping[int, int]  # rounds, by groups
    many_rows: int  # of a group, at all sizes but the last; beside the bar
    sweep_groups: int
    sweep_rounds: int
    sweep_seconds: float


_FULL: Final = _Plan(
    groups=(1_000, 100_000, 1_000_000),
    rounds=60,
    count=400,
    cuts={1_000: 200, 100_000: 15, 1_000_000: 5},
    many_rows=8,
    sweep_groups=1_000_000,
    sweep_rounds=6,
    sweep_seconds=5.0,
)
_QUICK: Final = _Plan(
    groups=(100, 1_000),
    rounds=5,
    count=80,
    cuts={100: 5, 1_000: 3},
    many_rows=8,
    sweep_groups=1_000,
    sweep_rounds=1,
    sweep_seconds=0.2,
)


def run_auditor(*, quick: bool = False, folder: Path | None = None) -> BenchReport:
    """Measure all of it.

    Args:
        quick: Cut rounds and sizes down, to see that it works.
        folder: Where the sweep's store goes meanwhile; None means the system's temporary folder.

    Raises:
        ConfigError: If a package that the store needs is missing.
    """
    require("lmdb", "numpy")
    plan = _QUICK if quick else _FULL
    machine = describe(Path(tempfile.gettempdir()) if folder is None else folder)
    events = {groups: asyncio.run(measure_events(groups, plan.rounds, plan.count)) for groups in plan.groups}
    kept = {groups: asyncio.run(measure_kept(groups)) for groups in plan.groups}
    cuts = [measure_cut(groups, _ROWS_PER_GROUP, plan.cuts[groups]) for groups in plan.groups]
    cuts += [measure_cut(groups, plan.many_rows, plan.cuts[groups]) for groups in plan.groups[:-1]]
    sweep = asyncio.run(measure_sweep(plan.sweep_groups, plan.sweep_rounds, plan.sweep_seconds, folder))
    machine["load_average_after"] = load_average()
    of_events = {
        (groups, kind): ratios(costs.event_ns[kind], costs.slot_ns)
        for groups, costs in events.items()
        for kind in KINDS
    }
    barred = cuts[: len(plan.groups)]
    spreads = {
        "auditor_event_vs_bare_slot": _worst(of_events.values()),
        "auditor_cut_check_us_per_group": _worst(_per_group(costs, costs.check_ns) for costs in barred),
        "auditor_sweep_extra_lag_p99_ms": sweep.extra_ms,
    }
    bars = {name: spread.median for name, spread in spreads.items()}
    bars["auditor_bytes_per_group"] = max(found.num_bytes / groups for groups, found in kept.items())
    return BenchReport(
        bench="auditor",
        quick=quick,
        machine=machine,
        results=[
            *_event_results(events, of_events),
            *_kept_results(kept),
            *_cut_results(cuts),
            _sweep_result(sweep),
        ],
        bars={name: bars[name] for name in TARGETS},
        spreads=spreads,
        targets=TARGETS,
        at_least=frozenset(),
        tables=(_event_table(events, of_events), _kept_table(kept), _cut_table(cuts), _sweep_table(sweep)),
    )


def _worst(spreads: Any) -> Spread:  # noqa: ANN401 - an iterable of spreads
    worst: Spread = max(spreads, key=lambda spread: spread.median)
    return worst


def _per_group(costs: CutCosts, took: Sequence[float]) -> Spread:
    """Return microseconds per group."""
    return Spread.of(took, 1e-3 / costs.groups)


# --------------------------------------------------------------------------------------------------------- events


def _event_results(
    events: Mapping[int, EventCosts], found: Mapping[tuple[int, str], Spread]
) -> list[dict[str, Any]]:
    return [
        {
            "measured": "event",
            "groups": groups,
            "kind": kind,
            "event_ns": Spread.of(events[groups].event_ns[kind]).to_json(),
            "slot_ns": Spread.of(events[groups].slot_ns).to_json(),
            "event_vs_bare_slot": spread.to_json(),
        }
        for (groups, kind), spread in found.items()
    ]


def _event_table(events: Mapping[int, EventCosts], found: Mapping[tuple[int, str], Spread]) -> Table:
    rows = [
        (
            "a bare slot, ns",
            *(shown_spread(Spread.of(costs.slot_ns)) for costs in events.values()),
            "",
        )
    ]
    for kind in KINDS:
        ratio = _worst(found[groups, kind] for groups in events)
        rows.append(
            (
                f"{kind}, ns an event",
                *(shown_spread(Spread.of(costs.event_ns[kind])) for costs in events.values()),
                shown(ratio.median),
            )
        )
    columns = ("event", *(f"{groups:,} groups" for groups in events), "worst over a bare slot")
    return Table("Events", columns, tuple(rows))


# --------------------------------------------------------------------------------------------------------- memory


def _kept_results(kept: Mapping[int, Kept]) -> list[dict[str, Any]]:
    return [
        {
            "measured": "memory",
            "groups": groups,
            "bytes": found.num_bytes,
            "bytes_per_group": found.num_bytes / groups,
            "bytes_of_a_record_of_each_invariant": found.records_bytes,
        }
        for groups, found in kept.items()
    ]


def _kept_table(kept: Mapping[int, Kept]) -> Table:
    rows = [
        (
            f"{groups:,} groups",
            f"{found.num_bytes:,}",
            shown(found.num_bytes / groups),
            f"{found.records_bytes:,}",
        )
        for groups, found in kept.items()
    ]
    columns = ("run", "bytes", "bytes a group", "bytes more with a record of every invariant")
    return Table("Memory", columns, tuple(rows))


# ----------------------------------------------------------------------------------------------------------- cuts


def _cut_results(cuts: Sequence[CutCosts]) -> list[dict[str, Any]]:
    return [
        {
            "measured": "cut check",
            "groups": costs.groups,
            "rows": costs.rows,
            "us_per_group": _per_group(costs, costs.check_ns).to_json(),
            "index_us_per_group": _per_group(costs, costs.index_ns).to_json(),
        }
        for costs in cuts
    ]


def _cut_table(cuts: Sequence[CutCosts]) -> Table:
    rows = [
        (
            f"{costs.groups:,} groups, {costs.rows:,} rows",
            shown_spread(_per_group(costs, costs.check_ns)),
            shown_spread(_per_group(costs, costs.index_ns)),
            str(len(costs.check_ns)),
        )
        for costs in cuts
    ]
    columns = ("cut", "us a group, all checks", "us a group, the look-up table of its rows", "rounds")
    return Table("Judging a cut", columns, tuple(rows))


# ---------------------------------------------------------------------------------------------------------- sweep


def _sweep_result(sweep: SweepCosts) -> dict[str, Any]:
    return {
        "measured": "sweep",
        "groups": sweep.groups,
        "rows": sweep.rows,
        "loop_lag_p99_ms_without": Spread.of(sweep.p99_off_ms).to_json(),
        "loop_lag_p99_ms_with": Spread.of(sweep.p99_on_ms).to_json(),
        "longest_slice_ms": sweep.longest_slice_ms,
        "slices_per_second": sweep.slices_per_second,
        "pass_seconds": sweep.pass_seconds,
        "seed_seconds": sweep.seed_seconds,
    }


def _sweep_table(sweep: SweepCosts) -> Table:
    return Table(
        f"The sweep of {sweep.groups:,} groups, {sweep.rows:,} rows in a store on disk",
        ("measured", "value"),
        (
            ("lag p99 without the sweep, ms", shown_spread(Spread.of(sweep.p99_off_ms))),
            ("lag p99 with it, ms", shown_spread(Spread.of(sweep.p99_on_ms))),
            ("longest that a slice of it held the loop, ms", shown(sweep.longest_slice_ms)),
            ("slices of a hundred groups a second", shown(sweep.slices_per_second)),
            ("a pass, were all groups finished, s", shown(sweep.pass_seconds)),
            ("taking everything over at the start, s, once", shown(sweep.seed_seconds)),
        ),
    )
