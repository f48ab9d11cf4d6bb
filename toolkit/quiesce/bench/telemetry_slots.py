"""A mutation slot with everything on, against the bare one, the shape that it replaces, and the obvious way.

Rule: all are measured in every round, in turns, by the processor time of the thread that runs the event loop,
because that is what a slot is made to wait for; what the converter's thread spends on the same slots is reported
beside it, and never hidden in it. Yield rule: :func:`measure_slots` is to be awaited; it blocks the loop meanwhile.

*Everything on* is :class:`~quiesce.telemetry.assembly.RunTelemetry` as a run starts it, its converter's thread
running: wait and hold histograms, a span for every slot (the budget is lifted), exemplars, a sink that takes spans
and drops them. OpenTelemetry is loaded here, so each slot also reads the application's context.

*The obvious way* is what its documentation suggests: ``start_as_current_span`` of the OpenTelemetry SDK with a
batch processor and an exporter that drops, and ``observe`` of two prometheus_client histograms, with children that
were looked up before and the bucket bounds that ours have.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import prometheus_client
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from quiesce.barrier import DataPlaneCheckpointBarrier
from quiesce.bench.stats import quiet_collector
from quiesce.bench.upstream_shape import UpstreamShapeBarrier
from quiesce.observers import Hub
from quiesce.telemetry import names
from quiesce.telemetry.assembly import RunTelemetry

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from quiesce.telemetry.finished import FinishedSpan

__all__ = ["MODES", "Dropping", "SlotCosts", "measure_slots"]

MODES: Final = ("bare", "on", "upstream_shape", "obvious")
_KIND: Final = "group_commit"
_PATIENCE_SECONDS: Final = 10.0


class Dropping:
    """A sink that takes everything and keeps nothing.

    Attributes:
        taken: Spans that it was given.
    """

    def __init__(self) -> None:
        self.taken = 0

    def spans(self, batch: Sequence[FinishedSpan]) -> None:
        """Drop spans."""
        self.taken += len(batch)

    def samples(self, families: Sequence[Metric], unix_time: float) -> None:
        """Drop a snapshot."""

    def events(self, events: Sequence[Mapping[str, object]]) -> None:
        """Drop log events."""

    def close(self, deadline_seconds: float) -> None:
        """There is nothing to finish."""


class _DroppingExporter(SpanExporter):
    def export(self, spans: Sequence[Any]) -> SpanExportResult:
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class SlotCosts:
    """What slots took.

    Attributes:
        slot_ns: By mode, one number a round: the loop thread's processor time for a slot.
        wall_ns: The same by the clock on the wall.
        telemetry_ns: For the mode ``on``: processor time of the converter's and the sink's threads for a slot.
        spans: For the mode ``on``: slots that ended as a span in the sink.
        slots: For the mode ``on``: slots.
    """

    slot_ns: Mapping[str, Sequence[float]]
    wall_ns: Mapping[str, Sequence[float]]
    telemetry_ns: float
    spans: int
    slots: int


async def measure_slots(rounds: int, slots: int, obvious_slots: int) -> SlotCosts:
    """Measure a slot in each mode.

    Args:
        rounds: Rounds; each mode comes first in turn.
        slots: Slots of a mode in a round.
        obvious_slots: Slots of the mode ``obvious`` in a round, which is a great deal slower.
    """
    silent, heard = Hub(), Hub()
    bare, on = DataPlaneCheckpointBarrier(hub=silent), DataPlaneCheckpointBarrier(hub=heard)
    upstream = UpstreamShapeBarrier()
    dropping = Dropping()
    obvious = _Obvious(DataPlaneCheckpointBarrier(hub=silent))
    telemetry = RunTelemetry(heard, sinks={"dropping": dropping}, budget=None)
    telemetry.start()

    async def settle() -> None:
        # The threads finish what this round gave them before the next mode is measured.
        await asyncio.to_thread(telemetry.flush, _PATIENCE_SECONDS)

    async def settle_obvious() -> None:
        await asyncio.to_thread(obvious.flush)

    async def nothing() -> None:
        pass

    work: dict[str, tuple[Callable[[int], Awaitable[None]], int, Callable[[], Awaitable[None]]]] = {
        "bare": (lambda count: _slots(bare, count), slots, nothing),
        "on": (lambda count: _slots(on, count), slots, settle),
        "upstream_shape": (lambda count: _slots(upstream, count), slots, nothing),
        "obvious": (obvious.slots, obvious_slots, settle_obvious),
    }
    cpu: dict[str, list[float]] = {mode: [] for mode in MODES}
    wall: dict[str, list[float]] = {mode: [] for mode in MODES}
    try:
        for run, count, after in work.values():  # once before it counts
            await run(count)
            await after()
        before = telemetry.totals()["cpu_seconds"], dropping.taken
        with quiet_collector():
            for number in range(rounds):
                first = number % len(MODES)
                for mode in MODES[first:] + MODES[:first]:
                    run, count, after = work[mode]
                    wall_ns, cpu_ns = time.perf_counter_ns(), time.thread_time_ns()
                    await run(count)
                    cpu[mode].append((time.thread_time_ns() - cpu_ns) / count)
                    wall[mode].append((time.perf_counter_ns() - wall_ns) / count)
                    await after()
        threads = (telemetry.totals()["cpu_seconds"] - before[0]) * 1e9
        return SlotCosts(cpu, wall, threads / (rounds * slots), dropping.taken - before[1], rounds * slots)
    finally:
        telemetry.close()
        obvious.close()


async def _slots(barrier: DataPlaneCheckpointBarrier | UpstreamShapeBarrier, count: int) -> None:
    """Enter and leave slots, one after the other; nothing waits."""
    mutation = barrier.mutation
    for _ in range(count):
        async with mutation(_KIND):
            pass


class _Obvious:
    """A span around each slot, and its wait and hold in histograms, by the libraries' own means."""

    def __init__(self, barrier: DataPlaneCheckpointBarrier) -> None:
        self._barrier = barrier
        self._provider = TracerProvider(shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(_DroppingExporter()))
        registry = prometheus_client.CollectorRegistry()
        self._wait, self._hold = (
            prometheus_client.Histogram(
                name, "Seconds.", ["kind"], registry=registry, buckets=names.SLOT_BUCKETS
            ).labels(_KIND)
            for name in ("slot_wait_seconds", "slot_hold_seconds")
        )

    async def slots(self, count: int) -> None:
        mutation, start = self._barrier.mutation, self._provider.get_tracer("bench").start_as_current_span
        observe_wait, observe_hold, clock = self._wait.observe, self._hold.observe, time.perf_counter
        for _ in range(count):
            asked = clock()
            with start("quiesce.slot", attributes={"quiesce.kind": _KIND}) as span:
                async with mutation(_KIND):
                    opened = clock()
                closed = clock()
                span.set_attribute("quiesce.outcome", "completed")
            observe_wait(opened - asked)
            observe_hold(closed - opened)

    def flush(self) -> None:
        self._provider.force_flush()

    def close(self) -> None:
        self._provider.shutdown()
