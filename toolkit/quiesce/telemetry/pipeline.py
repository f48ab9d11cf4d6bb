"""Carries spans, samples and log events to the sinks, each on a thread of its own, and never waits for one.

Rule: putting something in takes no lock, makes nobody wait and never raises; a queue that is full drops what
comes, and counts it. A sink that raises loses that batch, is left alone for a while that doubles, and is
tried again. Closing takes its deadline and not more, whatever the sinks do: a thread that does not end by
then is left behind (it is a daemon). Nothing here suspends; only :meth:`Pipeline.flush` and
:meth:`Pipeline.close` block.

The last sample of metrics says what became of the last spans at every sink, so sinks that take spans wait with it for one
another: until all have been sent everything, or half a second is left.

A span has one fate: ``exported`` if any sink took it, else ``failed`` if any raised over it or refused it, else
``dropped`` (every queue was full, or time was up). So the fates of all spans that were put in add up to their number
once nothing waits any more. What became of it at each sink is counted beside that: a collector that is away loses
spans, also where a recorder has them. A sink that refuses some of a batch does not say which; they count as spread over
what it was called with, first come first, and as the same ones that another sink refused.

In a forked child the pipeline is dead and silent: its threads were not inherited, and what waited is the
parent's to send.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from quiesce.telemetry.finished import FinishedSpan
from quiesce.telemetry.slot_spans import SlotSpans, SpanParts

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from quiesce.telemetry.sinks import Sink

__all__ = ["CLOSE_SECONDS", "QUEUE_SPANS", "SAMPLES_OF_A_RUN", "SAMPLE_SECONDS", "Pipeline", "takes_spans"]

CLOSE_SECONDS: Final = 1.2
"""How long a process that ends waits for its telemetry, all of it together. It is to be gone within two seconds; what is
left of them is the interpreter's, and a helper's that ends after its parent."""

QUEUE_SPANS: Final = 1 << 16
"""Spans that may wait for one sink."""

QUEUE_EVENTS: Final = 1 << 13
"""Log events that may wait for one sink."""

SAMPLE_SECONDS: Final = (5.0, 15.0)
"""Period of metric samples: at first, and in the end, which is what Prometheus scrapes by default, rounded."""

SAMPLES_OF_A_RUN: Final = 40
"""In between, the period is so many-th of the time since the beginning: a run of a minute is worth a curve, too."""

_BATCH_WEIGHT: Final = 512
_COLUMNS_WEIGH: Final = 0.25
"""What a span in columns weighs in a batch: encoding it takes that much of encoding another, at most."""
_LINGER_SECONDS: Final = 1.0
_BACKOFF_SECONDS: Final = (0.1, 5.0)
_LAST_SAMPLE_SECONDS: Final = 0.5
"""What is left of the time to close for the last sample, which is to say what became of the last spans at each sink."""
_COUNTED_AS: Final = {"exported": "delivered", "failed": "failed", "dropped": "dropped"}
"""What a lane calls what becomes of a span at its sink."""
_LOG: Final = logging.getLogger("quiesce.telemetry")

Families = Sequence["Metric"]


class _Batch:
    """Spans that were put in together, and how many sinks have yet to say what became of them."""

    __slots__ = ("failed", "left", "lock", "spans", "taken", "weight")

    def __init__(self, spans: Sequence[FinishedSpan], sinks: int) -> None:
        self.spans = spans
        self.weight = len(spans) * (_COLUMNS_WEIGH if isinstance(spans, SlotSpans) else 1)
        self.left = sinks
        self.taken = 0  # spans, by the sink that took most of them
        self.failed = 0  # by the one that refused most
        self.lock = threading.RLock()


class _Lane:
    """The queue and the thread of one sink."""

    def __init__(self, pipeline: Pipeline, name: str, sink: Sink) -> None:
        self.name = name
        self.sink = sink
        self.takes_spans = takes_spans(sink)
        self._pipeline = pipeline
        self._batches: deque[_Batch] = deque()
        self._events: deque[Mapping[str, object]] = deque()
        self._put_in = 0  # spans, ever; changed by the one thread that puts
        self._taken_out = 0  # changed by this lane's thread
        self._in_hand: list[_Batch] = []  # what the sink has been called with
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._idle = threading.Event()
        self._idle.set()
        self.spent = threading.Event()  # everything was sent, and nothing comes any more
        self.spent_at = 0.0
        self._deadline = 0.0
        self._next_sample = time.monotonic() + pipeline.sample_period()
        self.counts: Counter[str] = (
            Counter()
        )  # of spans: delivered, failed, dropped; of events: events_dropped
        self.export_ns = 0
        self.cpu_ns = 0
        self._apart_ns = 0
        self.failing = False
        self.thread = threading.Thread(target=self._run, name=f"quiesce-sink-{name}", daemon=True)

    def put(self, batch: _Batch) -> bool:
        """Queue a batch, unless it does not fit."""
        if self._put_in - self._taken_out + len(batch.spans) > QUEUE_SPANS or self._stop.is_set():
            self.counts["dropped"] += len(batch.spans)
            return False
        self._put_in += len(batch.spans)
        self._batches.append(batch)
        self._idle.clear()  # after it, or the thread, which has just found nothing, could say so in between
        return True

    def put_event(self, event: Mapping[str, object]) -> None:
        """Queue a log event, unless the queue is full."""
        if len(self._events) >= QUEUE_EVENTS or self._stop.is_set():
            self.counts["events_dropped"] += 1
            return
        self._events.append(event)
        self._idle.clear()

    def flush(self) -> None:
        """Send what waits now, without waiting for more to come."""
        self._wake.set()

    def idle(self, seconds: float) -> bool:
        """Wait until nothing waits any more."""
        return self._idle.wait(max(0.0, seconds))

    def stop(self, deadline: float) -> None:
        """Let the thread end, by that time of the monotonic clock."""
        self._deadline = deadline
        self._stop.set()
        self._wake.set()

    def abandon(self) -> None:
        """Give up what still waits."""
        while self._batches:
            try:
                batch = self._batches.popleft()
            except IndexError:  # the thread was faster
                break
            self.counts["dropped"] += len(batch.spans)
            self._pipeline.settle(batch)
        self._settle_in_hand(None)  # the sink still has it; nobody will hear what became of it

    def _settle_in_hand(self, refused: int | None) -> None:
        """Settle what the sink was called with: the thread does, or whoever has stopped waiting for it.

        Args:
            refused: How many spans were refused; None is all of them.
        """
        in_hand, self._in_hand = self._in_hand, []
        for batch in in_hand:
            count = len(batch.spans)
            failed = count if refused is None else min(count, refused)
            if refused is not None:
                refused -= failed
            for fate, spans in (("delivered", count - failed), ("failed", failed)):
                if spans:
                    self.counts[fate] += spans
            self._pipeline.settle(batch, taken=count - failed, failed=failed)

    # ------------------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        backoff = 0.0
        while True:
            if not self._stop.is_set():
                until_sample = max(0.001, self._next_sample - time.monotonic())
                self._wake.wait(backoff or min(_LINGER_SECONDS, until_sample))
                self._wake.clear()
            ended = self._stop.is_set()
            if ended and time.monotonic() >= self._deadline:
                self.abandon()
                break
            well = self._send(ended)
            backoff = (
                0.0 if well else min(_BACKOFF_SECONDS[1], backoff * 2) if backoff else _BACKOFF_SECONDS[0]
            )
            self.failing = not well
            if not self._batches and not self._events:
                self._idle.set()
                if self._batches or self._events:  # put in between the two lines
                    self._idle.clear()
                elif ended:
                    self._sample_last()
                    break
        try:
            self.sink.close(max(0.0, self._deadline - time.monotonic()))
        except Exception:  # noqa: BLE001 - a sink may raise anything, and the run is over
            _LOG.debug("sink %s could not be closed", self.name, exc_info=True)
        self.cpu_ns = time.thread_time_ns() - self._apart_ns

    def _send(self, ended: bool) -> bool:  # noqa: FBT001 - what the loop above knows
        """Hand over everything that waits; return whether the sink took it."""
        well = True
        while self._batches and well:
            if ended and time.monotonic() >= self._deadline:
                return False
            parts: list[Sequence[FinishedSpan]] = []
            count = 0
            weight = 0.0
            while self._batches and (not parts or weight + self._batches[0].weight <= _BATCH_WEIGHT):
                batch = self._batches.popleft()
                self._in_hand.append(batch)
                parts.append(batch.spans)
                count += len(batch.spans)
                weight += batch.weight
            self._taken_out += count
            well, refused = self._call(self.sink.spans, SpanParts.of(parts))
            self._settle_in_hand(_count(refused) if well else None)
            self.cpu_ns = time.thread_time_ns() - self._apart_ns
        if self._events:
            events = [self._events.popleft() for _ in range(len(self._events))]
            if not self._call(self.sink.events, events)[0]:
                self.counts["events_dropped"] += len(events)
                well = False
        now = time.monotonic()
        if now >= self._next_sample and not ended:
            self._next_sample = now + self._pipeline.sample_period()
            well = self._sample() and well
        self.cpu_ns = time.thread_time_ns() - self._apart_ns
        return well

    def _sample_last(self) -> None:
        """Hand over what the metrics say in the end."""
        self.spent_at = time.monotonic()
        self.spent.set()
        if self.takes_spans:
            self._sample(self._pipeline.await_spent(self._deadline - _LAST_SAMPLE_SECONDS))
        else:
            self._sample(self.spent_at)

    def _sample(self, after: float | None = None) -> bool:
        """Hand over what the metrics say; return whether the sink took it. See :meth:`Pipeline.families`."""
        since = time.thread_time_ns()
        families, at = self._pipeline.families(after)
        self._apart_ns += time.thread_time_ns() - since  # the collector's own account has it
        return not families or self._call(self.sink.samples, families, at)[0]

    def _call(self, method: Callable[..., object], *args: Any) -> tuple[bool, object]:  # noqa: ANN401 - whatever the method takes
        """Call the sink; return whether it took what it was given, and what it said."""
        since = time.perf_counter_ns()
        try:
            said = method(*args)
        except Exception as error:  # noqa: BLE001 - a sink may raise anything
            if not self.failing:
                _LOG.warning(
                    "sink %s does not take what it is given: %r; it is tried again", self.name, error
                )
            self.failing = True
            return False, None
        finally:
            took = time.perf_counter_ns() - since
            self.export_ns += took
            self._pipeline.exported(took)
        return True, said


class Pipeline:
    """Queues in front of sinks. See the module's docstring for the rule.

    Args:
        sinks: By name.
        collect: Returns the metric families that sinks are given samples of; None gives them none.
        sample_seconds: The period of samples; None lets it grow with the run, see :data:`SAMPLE_SECONDS`.
        exported: Told the nanoseconds of each call of a sink.
    """

    def __init__(
        self,
        sinks: Mapping[str, Sink],
        *,
        collect: Callable[[], Iterable[Metric]] | None = None,
        sample_seconds: float | None = None,
        exported: Callable[[int], None] | None = None,
    ) -> None:
        self._sample_seconds = sample_seconds
        self._began = time.monotonic()
        self.exported = exported or _nothing
        self._collect = collect
        self._snapshot: tuple[Families, float] = ((), 0.0)
        self._read_at = -math.inf  # by the monotonic clock
        self._snapshot_lock = threading.Lock()
        self._fates: Counter[str] = Counter()
        self._fates_lock = threading.RLock()  # reentrant: a signal handler may close us
        self._closed = False
        self._dead = False
        self._lanes = tuple(_Lane(self, name, sink) for name, sink in sinks.items())
        self._span_lanes = tuple(lane for lane in self._lanes if lane.takes_spans)
        for lane in self._lanes:
            lane.thread.start()
        _PIPELINES.add(self)

    @property
    def has_sinks(self) -> bool:
        """Whether spans that are put in go anywhere."""
        return bool(self._span_lanes) and not self._closed

    def put_spans(self, spans: Sequence[FinishedSpan]) -> int:
        """Hand spans over to every sink; for one thread at a time.

        Returns:
            How many spans are on their way to at least one sink: all, or none.
        """
        if not spans or self._dead:
            return 0
        batch = _Batch(spans, len(self._span_lanes) or 1)
        queued = 0
        for lane in self._span_lanes:
            if lane.put(batch):
                queued += 1
            else:
                self.settle(batch)
        if not self._span_lanes:
            self.settle(batch)
        return len(spans) if queued else 0

    def withhold(self, name: str) -> None:
        """Give a sink no further spans; for the thread that puts them."""
        self._span_lanes = tuple(lane for lane in self._span_lanes if lane.name != name)

    def put_event(self, event: Mapping[str, object]) -> None:
        """Hand a line of the run's log over to every sink."""
        if not self._dead:
            for lane in self._lanes:
                lane.put_event(event)

    def settle(self, batch: _Batch, *, taken: int = 0, failed: int = 0) -> None:
        """Note how many spans of a batch one sink took, and refused; it had no room for the rest. The last one decides."""
        with batch.lock:
            batch.taken = max(batch.taken, taken)
            batch.failed = max(batch.failed, failed)
            batch.left -= 1
            if batch.left:
                return
        lost = len(batch.spans) - batch.taken
        refused = min(lost, batch.failed)
        with self._fates_lock:
            for fate, count in (("exported", batch.taken), ("failed", refused), ("dropped", lost - refused)):
                if count:
                    self._fates[fate] += count

    def families(self, after: float | None = None) -> tuple[Families, float]:
        """Return the metric families and when they were read: once a period, for all sinks together.

        Args:
            after: They are to have been read since that time of the monotonic clock; None takes half a period ago.
        """
        if self._collect is None:
            return (), 0.0
        with self._snapshot_lock:
            now = time.monotonic()
            if self._read_at < (now - self.sample_period() / 2 if after is None else after):
                try:
                    unix = time.time()
                    self._snapshot = (tuple(self._collect()), unix)
                    self._read_at = now
                except Exception:  # noqa: BLE001 - a collector of the application's may raise anything
                    _LOG.exception("metrics could not be read for the sinks")
                    return (), 0.0
            return self._snapshot

    def await_spent(self, until: float) -> float:
        """Wait until every sink that takes spans has been sent all; return when that was, the same for all that wait.

        Args:
            until: When to go on anyway, by the monotonic clock.
        """
        lanes = [lane for lane in self._lanes if lane.takes_spans]
        if all(lane.spent.wait(max(0.0, until - time.monotonic())) for lane in lanes):
            return max(lane.spent_at for lane in lanes)
        return until

    def sample_period(self) -> float:
        """Return seconds from one sample to the next."""
        if self._sample_seconds is not None:
            return self._sample_seconds
        least, most = SAMPLE_SECONDS
        return min(most, max(least, (time.monotonic() - self._began) / SAMPLES_OF_A_RUN))

    def fates(self) -> dict[str, int]:
        """Return spans by fate: ``exported``, ``failed``, ``dropped``; those that wait have none yet."""
        with self._fates_lock:
            return dict(self._fates)

    def lanes(self) -> dict[str, dict[str, int]]:
        """Return what each sink did, by name: spans ``delivered``, ``failed``, ``dropped``; ``events_dropped``."""
        return {lane.name: dict(lane.counts) for lane in self._lanes}

    def sink_fates(self) -> dict[tuple[str, str], int]:
        """Return spans by sink and by fate there: ``exported``, ``failed``, ``dropped``; those that wait have none yet."""
        return {
            (name, fate): counts[counted]
            for name, counts in self.lanes().items()
            for fate, counted in _COUNTED_AS.items()
            if counted in counts
        }

    @property
    def cpu_ns(self) -> int:
        """Processor time of the sinks' threads, but for reading metrics, which is a scrape like any other."""
        return sum(lane.cpu_ns for lane in self._lanes)

    def flush(self, deadline_seconds: float = CLOSE_SECONDS) -> bool:
        """Wait until nothing waits in any queue, up to a deadline.

        Returns:
            Whether the queues are empty; what was in them was taken, or failed.
        """
        if self._dead:
            return True
        until = time.monotonic() + deadline_seconds
        for lane in self._lanes:
            lane.flush()
        idle = [lane.idle(until - time.monotonic()) for lane in self._lanes]
        return all(idle)

    def close(self, deadline_seconds: float = CLOSE_SECONDS) -> None:
        """Send what waits, close the sinks and end the threads, within a deadline. Twice is once."""
        if self._closed or self._dead:
            return
        self._closed = True
        _PIPELINES.discard(self)
        until = time.monotonic() + deadline_seconds
        for lane in self._lanes:
            lane.stop(until)
        for lane in self._lanes:
            lane.thread.join(max(0.0, until - time.monotonic()))
        for lane in self._lanes:
            lane.abandon()

    def forget(self) -> None:
        """In a forked child: be dead."""
        self._dead = self._closed = True
        self._lanes = self._span_lanes = ()


def takes_spans(sink: Sink) -> bool:
    """Return whether a sink wants spans; most do."""
    return bool(getattr(sink, "takes_spans", True))


def _count(said: object) -> int:
    """Return how many spans a sink refused; one that is not ours may return anything."""
    return max(0, said) if isinstance(said, int) and not isinstance(said, bool) else 0


def _nothing(_: int) -> None:
    """Do nothing."""


_PIPELINES: weakref.WeakSet[Pipeline] = weakref.WeakSet()


def _after_fork() -> None:
    for pipeline in list(_PIPELINES):
        pipeline.forget()


os.register_at_fork(after_in_child=_after_fork)
