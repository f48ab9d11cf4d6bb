"""A day of a run that never was, from the catalogue: saves ten minutes apart, four of them over their objective.

Every family of the catalogue is in it, with plausible values, so a metric that is added is in it too. One scrape in two
minutes and four kinds of slots keep it small.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from typing import Final

from quiesce.barrier import KINDS
from quiesce.telemetry import names
from tests.dashboards.recorded import selector

__all__ = ["DAY", "RUN", "SCRAPE", "STATE", "day"]

RUN: Final = "long"
DAY: Final = 86_400
SCRAPE: Final = 120
SAVE_EVERY: Final = 5
"""Scrapes from save to save."""

VIOLATED_AT: Final = DAY - 900
"""Seconds into the day at which one invariant is violated, so that its alert fires at the end."""

STATE: Final = "running"
"""The state that the run is in all day."""

STEP: Final = 45.0
"""Seconds of a trainer step."""

CONSTANT: Final = {
    "sampler": "InOrderSampler",
    "dataplane": "MemoryDataPlane",
    "engine": "TinyEngine",
    "version": "1.0",
    "worker": "0",
}

EXTRA: Final = {"run": RUN, "role": "controller", "instance": "node-7:9464", "job": "quiesce"}


def day(end: float) -> Iterator[str]:
    """Yield the lines.

    Args:
        end: Unix time of the last scrape.
    """
    begin = end - DAY
    moments = [begin + SCRAPE * n for n in range(DAY // SCRAPE + 1)]
    for metric in names.METRICS.values():
        for labels in _label_sets(metric):
            if _unlikely(metric, labels):
                continue
            yield from _told(metric, labels, moments)
    for n, at in enumerate(moments):
        yield f"{selector({'__name__': 'up', 'instance': EXTRA['instance'], 'job': 'quiesce'})} 1 {at:.0f}\n"
        if SCRAPE * n >= VIOLATED_AT:
            alert = {
                "__name__": "ALERTS",
                "alertname": "QuiesceOwnershipConflict",
                "alertstate": "firing",
                "severity": "critical",
                "invariant": "single_owner",
                **EXTRA,
            }
            yield f"{selector(alert)} 1 {at:.0f}\n"


def _label_sets(metric: names.Metric) -> list[dict[str, str]]:
    if any(label.constant for label in metric.labels):
        return [{name: CONSTANT[name] for name in metric.label_names}]
    sets = metric.label_sets(KINDS[:4])
    return [dict(zip(metric.label_names, values, strict=True)) for values in sets]


def _unlikely(metric: names.Metric, labels: dict[str, str]) -> bool:
    """Tell whether nothing of the kind happens on a good day; zeros would only make the files longer."""
    if metric.type == "histogram":
        return labels.get("outcome", "completed") != "completed"
    return labels.get("outcome") in names.ENDED[1:] and labels.get("reason", "io") != "io"


def _told(metric: names.Metric, labels: dict[str, str], moments: list[float]) -> Iterator[str]:
    everything = {"__name__": metric.name, **EXTRA, **labels}
    if metric.type != "histogram":
        series = selector(everything)
        for n, at in enumerate(moments):
            yield f"{series} {_value(metric, labels, n, moments[0]):.6g} {at:.0f}\n"
        return
    total = everything | {"__name__": f"{metric.name}_sum"}
    count = everything | {"__name__": f"{metric.name}_count"}
    # A quarter of the observations in the bucket above the usual one, so that quantiles differ.
    usual = metric.buckets[len(metric.buckets) // 2 + _seed(labels) % 3 - 1]
    counts = [_events(metric, labels, n) for n in range(len(moments))]
    for series, weight in ((selector(total), usual), (selector(count), 1.0)):
        for events, at in zip(counts, moments, strict=True):
            yield f"{series} {events * weight:.10g} {at:.0f}\n"
    for bound in (*metric.buckets, math.inf):
        le = "+Inf" if bound == math.inf else str(float(bound))
        series = selector(everything | {"__name__": f"{metric.name}_bucket", "le": le})
        for events, at in zip(counts, moments, strict=True):
            told = 0 if bound < usual else events * 3 // 4 if bound == usual else events
            yield f"{series} {told} {at:.0f}\n"


def _seed(labels: dict[str, str]) -> int:
    return zlib.crc32(repr(sorted(labels.items())).encode())


def _saves(n: int) -> int:
    return n // SAVE_EVERY


def _events(metric: names.Metric, labels: dict[str, str], n: int) -> int:
    """Return how often something has happened by the n-th scrape."""
    if "checkpoint" in metric.name or "close" in metric.name:
        return _saves(n)
    return n * (1 + _seed(labels) % 50)


def _value(metric: names.Metric, labels: dict[str, str], n: int, begin: float) -> float:
    saved = begin + SCRAPE * SAVE_EVERY * _saves(n)
    name = metric.name.removeprefix(names.PREFIX)
    chosen: dict[str, float] = {
        "run_started_timestamp_seconds": begin,
        "checkpoint_last_success_timestamp_seconds": saved if _saves(n) else 0,
        "checkpoint_phase_started_timestamp_seconds": saved if _saves(n) else 0,
        "checkpoint_expected_interval_seconds": SCRAPE * SAVE_EVERY,
        "invariant_active": 1,
        "capability": 1,
        "run_info": 1,
        "run_state": labels.get("state") == STATE,
        "invariant_violations_total": labels.get("invariant") == "single_owner" and n * SCRAPE >= VIOLATED_AT,
        "checkpoint_phase": 0,
        "checkpoint_failures_since_success": 0,
        "snapshot_gate_closed": 0,
        "telemetry_observer_errors_total": 0,
        "trainer_version": n * SCRAPE // STEP,
        "dispatch_cursor": n * SCRAPE // STEP + 1,
        "target_step_max": n * SCRAPE // STEP + 1,
        "steps_since_checkpoint": n % SAVE_EVERY * SCRAPE // STEP,
    }
    violated = labels.get("invariant") == "single_owner" and n * SCRAPE >= VIOLATED_AT
    if name == "invariant_last_violation_timestamp_seconds":
        return begin + VIOLATED_AT if violated else 0
    if name in chosen:
        return float(chosen[name])
    if name == "window_over_objective_total":
        return _saves(n) // 36
    if metric.type == "counter":
        if name.startswith(("checkpoint_", "window_", "trainer_stall")):
            return _saves(n) * (0.001 if "seconds" in name else 1)
        return n * (0.01 if "seconds" in name else 1 + _seed(labels) % 7)
    wave = 0.5 + 0.4 * math.sin(2 * math.pi * n / 360)
    if metric.unit == "ratio" or name.startswith("train_"):
        return wave
    if metric.unit == "seconds":
        return 0.01 * wave
    return float(int((1e9 if metric.unit == "bytes" else 30) * wave))
