"""Slots at a steady rate, in a process of its own, so that all processor time that they cost can be counted.

Rule: the load is open: a slot is entered when its time has come by the clock, whatever happened before, so what is
late shows as lateness and is not left out. Processor time is counted from the first slot until every span has been
sent or given up. Blocks; this is a program, run by :mod:`quiesce.bench.telemetry_open`.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from quiesce.barrier import DataPlaneCheckpointBarrier
from quiesce.observers import Hub
from quiesce.telemetry.assembly import RunTelemetry
from quiesce.telemetry.sinks import SinkContext, find_sink

__all__ = ["WAYS", "main"]

WAYS: Final = ("no telemetry", "exported by this process", "exported by a process of its own")
_KIND: Final = "group_commit"
_TICK_NS: Final = 5_000_000
_WARM_UP: Final = 2_000
_WARM_UP_RATE: Final = 10_000
_PATIENCE_SECONDS: Final = 10.0


def main() -> int:
    """Be the program: the first argument is a JSON object with ``way``, ``rate`` (slots a second) and ``seconds``."""
    told = json.loads(sys.argv[1])
    found = asyncio.run(_measure(told["way"], told["rate"], told["seconds"]))
    sys.stdout.write(json.dumps(found) + "\n")
    return 0


async def _measure(way: str, rate: int, seconds: float) -> dict[str, Any]:
    hub = Hub()
    barrier = DataPlaneCheckpointBarrier(hub=hub)
    telemetry: RunTelemetry | None = None
    exporter: int | None = None
    if way != WAYS[0]:
        own_process = way == WAYS[2]
        settings = {"own_process": own_process}
        resource = {"service.name": "bench"}
        sink = find_sink("otlp")(SinkContext("bench", "controller", None, resource, settings))
        exporter = getattr(sink, "process_id", None)
        if own_process != (exporter is not None):
            raise RuntimeError("the export process could not be started")
        telemetry = RunTelemetry(hub, sinks={"otlp": sink}, budget=None)
        telemetry.start()
    try:
        await _load(barrier, _WARM_UP_RATE, _WARM_UP)
        await _flush(telemetry)
        here, there = time.process_time_ns(), _cpu_ns(exporter)
        slots = round(rate * seconds)
        found = await _load(barrier, rate, slots)
        await _flush(telemetry)
        here, there = time.process_time_ns() - here, _cpu_ns(exporter) - there
    finally:
        if telemetry is not None:
            telemetry.close()
    totals = {} if telemetry is None else telemetry.totals()
    return {
        "slots": slots,
        "slots_with_warm_up": slots + _WARM_UP,
        "cpu_us_per_slot": (here + there) / slots / 1e3,
        "this_process_us_per_slot": here / slots / 1e3,
        "export_process_us_per_slot": there / slots / 1e3,
        **found,
        "spans": {fate: int(totals.get(fate, 0)) for fate in ("exported", "sampled", "dropped", "failed")},
    }


async def _load(barrier: DataPlaneCheckpointBarrier, rate: int, slots: int) -> dict[str, float]:
    """Enter slots at a rate; return how long they took, how late they were, and how late the loop was."""
    clock, mutation = time.perf_counter_ns, barrier.mutation
    took, late, lags = array("q"), array("q"), array("q")
    period = 1_000_000_000 // rate
    began = clock()
    ticking = asyncio.ensure_future(_tick(lags))
    entered = 0
    while entered < slots:
        now = clock()
        while entered < slots and (due := began + entered * period) <= now:
            asked = clock()
            async with mutation(_KIND):
                pass
            left = clock()
            took.append(left - asked)
            late.append(left - due)
            entered += 1
        await asyncio.sleep(max(0, began + entered * period - clock()) / 1e9)
    ticking.cancel()
    await asyncio.wait([ticking])
    return {
        "slot_p50_us": _quantile(took, 0.5) / 1e3,
        "slot_p99_us": _quantile(took, 0.99) / 1e3,
        "late_p99_ms": _quantile(late, 0.99) / 1e6,
        "loop_lag_p50_ms": _quantile(lags, 0.5) / 1e6,
        "loop_lag_p99_ms": _quantile(lags, 0.99) / 1e6,
    }


async def _tick(lags: array[int]) -> None:
    """Want to run every few milliseconds, and note how late it was each time; a tick that was passed over counts, too."""
    clock = time.perf_counter_ns
    due = clock() + _TICK_NS
    while True:
        await asyncio.sleep(max(0, due - clock()) / 1e9)
        now = clock()
        while due <= now:
            lags.append(now - due)
            due += _TICK_NS


async def _flush(telemetry: RunTelemetry | None) -> None:
    if telemetry is not None:
        await asyncio.to_thread(telemetry.flush, _PATIENCE_SECONDS)


def _quantile(values: Sequence[int], share: float) -> int:
    found = sorted(values)
    return found[min(len(found) - 1, int(share * len(found)))] if found else 0


def _cpu_ns(process: int | None) -> int:
    """Return the processor time of another process, all its threads together; Linux."""
    if process is None:
        return 0
    tasks = Path(f"/proc/{process}/task")
    return sum(int((task / "schedstat").read_text(encoding="ascii").split()[0]) for task in tasks.iterdir())


if __name__ == "__main__":
    sys.exit(main())
