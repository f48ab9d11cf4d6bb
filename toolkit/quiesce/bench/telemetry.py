"""What telemetry costs: a slot with everything on, slots at a steady rate with every span exported, a training run.

Rule: a slot's cost is the processor time of the thread that runs the event loop; what other threads and processes
spend on it is reported in a column of its own, and in the open loop all of it counts. Blocks; nothing here suspends.

==============================================  ======================================================================
bar                                             what it is
==============================================  ======================================================================
``slot_on_vs_bare``                             a slot with everything on, over a bare one
``slot_on_vs_upstream_shape``                   the same, over the shape that was replaced, which has no telemetry
``slot_obvious_vs_on``                          SDK spans and prometheus_client histograms, over everything on
``open_loop_10k_cpu_us_per_slot``               processor time of a slot, load and export process included
``open_loop_10k_extra_lag_p99_ms``              how much later the event loop is, against no telemetry
``open_loop_10k_accounted_ratio``               spans that arrived or were sampled out, over slots
``train_telemetry_cpu_ratio``                   telemetry's processor time over the reference run's, in its steps
==============================================  ======================================================================
"""

from __future__ import annotations

import asyncio
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from quiesce.bench.report import Table, shown, shown_spread
from quiesce.bench.stats import Spread, ratios
from quiesce.bench.telemetry_open import WAYS, OpenLoop, measure_open_loop
from quiesce.bench.telemetry_slots import MODES, SlotCosts, measure_slots
from quiesce.bench.telemetry_training import TrainingCosts, measure_training

__all__ = ["AT_LEAST", "TARGETS", "TelemetryCosts", "measure_telemetry"]

TARGETS: Final = {
    "slot_on_vs_bare": 2.5,
    "slot_on_vs_upstream_shape": 0.45,
    "slot_obvious_vs_on": 15,
    "open_loop_10k_cpu_us_per_slot": 20,
    "open_loop_10k_extra_lag_p99_ms": 4,
    "open_loop_10k_accounted_ratio": 0.999,
    "train_telemetry_cpu_ratio": 0.01,
}
"""The target of each bar."""

AT_LEAST: Final = frozenset({"slot_obvious_vs_on", "open_loop_10k_accounted_ratio"})
"""The bars whose target is a least value."""

_FAST: Final = 10_000
_BARRED: Final = WAYS[-1]
_MODES: Final = {
    "bare": "bare",
    "on": "everything on",
    "upstream_shape": "upstream shape, no telemetry",
    "obvious": "SDK span and prometheus_client",
}
_STUDENT_95: Final = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365}
"""Two-sided 95 % quantiles of Student's t by the number of pairs."""


@dataclass(frozen=True, slots=True)
class _Plan:
    rounds: int
    slots: int
    obvious_slots: int
    rates: tuple[int, ...]
    open_rounds: int
    open_seconds: float
    pairs: int
    steps: int
    warm_up: int


_FULL: Final = _Plan(200, 1000, 200, (1_000, _FAST), 3, 3.0, 4, 120, 40)
_QUICK: Final = _Plan(8, 200, 50, (_FAST,), 1, 0.3, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class TelemetryCosts:
    """Everything for a report.

    Attributes:
        results: What was measured.
        bars: The numbers with a target.
        spreads: The spread behind each.
        tables: The same for people.
    """

    results: list[dict[str, Any]]
    bars: Mapping[str, float]
    spreads: Mapping[str, Spread]
    tables: tuple[Table, ...]


def measure_telemetry(*, quick: bool = False) -> TelemetryCosts:
    """Measure all of it.

    Args:
        quick: Cut rounds and sizes down, and leave the training run out, to see that it works.
    """
    plan = _QUICK if quick else _FULL
    slots = asyncio.run(measure_slots(plan.rounds, plan.slots, plan.obvious_slots))
    load = measure_open_loop(plan.rates, plan.open_rounds, plan.open_seconds)
    training = measure_training(plan.pairs, plan.steps, plan.warm_up) if plan.pairs else None
    spreads = {
        "slot_on_vs_bare": ratios(slots.slot_ns["on"], slots.slot_ns["bare"]),
        "slot_on_vs_upstream_shape": ratios(slots.slot_ns["on"], slots.slot_ns["upstream_shape"]),
        "slot_obvious_vs_on": ratios(slots.slot_ns["obvious"], slots.slot_ns["on"]),
        "open_loop_10k_cpu_us_per_slot": load.spread(_FAST, _BARRED, "cpu_us_per_slot"),
        "open_loop_10k_extra_lag_p99_ms": load.over_none(_FAST, _BARRED, "loop_lag_p99_ms"),
    }
    if training is not None:
        spreads["train_telemetry_cpu_ratio"] = Spread.of(training.cpu_ratio)
    accounted = {"open_loop_10k_accounted_ratio": load.accounted(_FAST, _BARRED)}
    found = {name: spread.median for name, spread in spreads.items()} | accounted
    return TelemetryCosts(
        results=[*_slot_results(slots), *_load_results(load), *_training_results(training)],
        bars={name: found[name] for name in TARGETS if name in found},
        spreads=spreads,
        tables=(_slot_table(slots), _load_table(load), *_training_tables(training)),
    )


def _slot_results(slots: SlotCosts) -> list[dict[str, Any]]:
    return [
        {
            "operation": "slot with telemetry",
            "mode": mode,
            "cpu_ns": Spread.of(slots.slot_ns[mode]).to_json(),
            "wall_ns": Spread.of(slots.wall_ns[mode]).to_json(),
            "other_threads_cpu_ns": slots.telemetry_ns if mode == "on" else None,
            "spans_per_slot": slots.spans / slots.slots if mode == "on" else None,
        }
        for mode in MODES
    ]


def _slot_table(slots: SlotCosts) -> Table:
    bare = slots.slot_ns["bare"]
    rows = []
    for mode in MODES:
        own = slots.slot_ns[mode]
        rows.append(
            (
                _MODES[mode],
                shown_spread(Spread.of(own)),
                "1" if mode == "bare" else shown(ratios(own, bare).median),
                shown(slots.telemetry_ns) if mode == "on" else "–" if mode == "obvious" else "0",
                str(len(own)),
            )
        )
    return Table(
        "A slot, and what is put around it",
        ("slot", "ns of the loop's thread", "× bare", "ns of other threads", "rounds"),
        tuple(rows),
    )


_LOAD: Final = (
    "cpu_us_per_slot",
    "this_process_us_per_slot",
    "export_process_us_per_slot",
    "slot_p50_us",
    "slot_p99_us",
    "late_p99_ms",
    "loop_lag_p50_ms",
    "loop_lag_p99_ms",
)


def _load_results(load: OpenLoop) -> list[dict[str, Any]]:
    return [
        {
            "operation": "open loop",
            "slots_per_second": rate,
            "way": way,
            "slots": sum(run["slots_with_warm_up"] for run in runs),
            **{name: load.spread(rate, way, name).to_json() for name in _LOAD},
            "extra_lag_p99_ms": load.over_none(rate, way, "loop_lag_p99_ms").to_json(),
            "spans": {
                "arrived": sum(run["arrived"] for run in runs),
                **{fate: sum(run["spans"][fate] for run in runs) for fate in runs[0]["spans"]},
            },
        }
        for (rate, way), runs in load.runs.items()
    ]


def _load_table(load: OpenLoop) -> Table:
    rows = []
    for (rate, way), runs in load.runs.items():
        slots = sum(run["slots_with_warm_up"] for run in runs)
        spans = {name: sum(run["spans"][name] for run in runs) for name in ("sampled", "dropped", "failed")}
        arrived = sum(run["arrived"] for run in runs) / slots
        rows.append(
            (
                f"{rate:,}/s, {way}",
                shown_spread(load.spread(rate, way, "cpu_us_per_slot")),
                shown(load.spread(rate, way, "export_process_us_per_slot").median),
                shown(load.spread(rate, way, "slot_p50_us").median),
                shown(load.spread(rate, way, "slot_p99_us").median),
                shown_spread(load.spread(rate, way, "loop_lag_p99_ms")),
                "–" if way == WAYS[0] else f"{arrived:.1%}",
                "–" if way == WAYS[0] else f"{spans['sampled']:,} / {spans['dropped'] + spans['failed']:,}",
            )
        )
    return Table(
        "Slots at a steady rate, every span exported",
        (
            "slots",
            "µs of processor time a slot",
            "of it the export process",
            "slot p50, µs",
            "slot p99, µs",
            "loop lag p99, ms",
            "arrived",
            "sampled out / lost",
        ),
        tuple(rows),
    )


def _training_results(training: TrainingCosts | None) -> list[dict[str, Any]]:
    if training is None:
        return []
    ratio, low, high = _interval([on / off for on, off in training.steps_per_second])
    return [
        {
            "operation": "training",
            "steps": training.steps,
            "pairs": [
                {"steps_per_s_on": on, "steps_per_s_off": off, "telemetry_cpu_ratio": cpu}
                for (on, off), cpu in zip(training.steps_per_second, training.cpu_ratio, strict=True)
            ],
            "throughput_on_vs_off": {"mean": ratio, "low_95": low, "high_95": high},
        }
    ]


def _training_tables(training: TrainingCosts | None) -> tuple[Table, ...]:
    if training is None:
        return ()
    ratio, low, high = _interval([on / off for on, off in training.steps_per_second])
    rows = [
        (f"pair {number}", shown(on), shown(off), shown(on / off), f"{cpu:.2%}")
        for number, ((on, off), cpu) in enumerate(
            zip(training.steps_per_second, training.cpu_ratio, strict=True), 1
        )
    ]
    rows.append(
        (
            "all, with the 95 % interval of the mean",
            "",
            "",
            f"{shown(ratio)} ({shown(low)} … {shown(high)})",
            f"{statistics.median(training.cpu_ratio):.2%}",
        )
    )
    return (
        Table(
            f"The reference run, {training.steps} steps",
            ("pair", "steps/s with telemetry", "without", "with over without", "telemetry's processor time"),
            tuple(rows),
        ),
    )


def _interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the geometric mean of ratios with its 95 % interval (Student's t over the logarithms)."""
    logs = [math.log(value) for value in values]
    mean = statistics.fmean(logs)
    if len(logs) not in _STUDENT_95:
        return math.exp(mean), math.exp(min(logs)), math.exp(max(logs))
    off = _STUDENT_95[len(logs)] * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean), math.exp(mean - off), math.exp(mean + off)
