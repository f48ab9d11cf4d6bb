"""Telemetry with spans, put together: recorder, observers, converter and pipeline over one hub.

Rule: without a destination (a sink, an application's tracer provider) no span is made and no slot recorded: there
are numbers only. What is made here is switched on by :meth:`RunTelemetry.start` and off by :meth:`RunTelemetry.close`, which
takes its deadline and not more. Nothing here suspends.

What a slot's hook costs is measured, not guessed: at the start the same hook is called a few hundred times on a
recorder of its own, and what it took counts for every slot. Every 32nd call of any other hook is timed by the hub.
The threads' processor time is the operating system's.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from quiesce.observers import HOOKS
from quiesce.telemetry.convert import SPAN_BUDGET, Converter, OpenSlot
from quiesce.telemetry.deferred import DeferredMetrics
from quiesce.telemetry.following import FollowingTracing
from quiesce.telemetry.pipeline import CLOSE_SECONDS, Pipeline, takes_spans
from quiesce.telemetry.provider import ProviderTracing
from quiesce.telemetry.slots import SlotBook, SlotRecorder
from quiesce.telemetry.spans import SpanObserver
from quiesce.telemetry.tracing import Identifiers, Identities, OwnTracing

if TYPE_CHECKING:
    from types import FrameType

    from prometheus_client.metrics_core import Metric

    from quiesce.observers import Hub
    from quiesce.telemetry.event_log import EventLog
    from quiesce.telemetry.sinks import Sink
    from quiesce.telemetry.story_windows import Delay

__all__ = ["RunTelemetry", "look_for_providers", "slot_cost_ns"]

_CALLS: Final = 200
_ROUNDS: Final = 5
"""Rounds of so many calls; the first one runs code that CPython has not specialised yet."""

_FLUSH_SECONDS: Final = 1.0
"""What an application's provider is told at SIGTERM."""

_LOOK_SECONDS: Final = 0.5
"""How often it is asked whether the application has a tracer provider, where there is nowhere else for spans to go."""

_PATIENCE_SECONDS: Final = 0.2
"""How long all converters may take to let somebody look for a provider when the main thread has ended."""

_URGENT: Final = frozenset({"error", "critical"})

_MARGIN_SECONDS: Final = 0.3
"""What closing may take beside the sinks' deadline before a process that was told to end does."""


class RunTelemetry:
    """Counts, and makes spans of, everything that a hub reports.

    Args:
        hub: What to listen to.
        sinks: Where spans go, by name; with a tracer provider, where they go beside it.
        collect: Returns the metric families that sinks are given samples of.
        provider: The application's own tracer provider: spans are then its spans.
        find_provider: Returns the provider that the application has installed by now, if it has; where spans are made
            without one, it is asked again and again.
        withheld: Sinks that get no more spans once there is one.
        budget: Spans of slots a second beside the interesting ones; 0 or None: no limit.
        sample_seconds: Period of samples; None lets it grow with the run.
        clock: Monotonic nanoseconds; the same clock as the barriers'.

    Attributes:
        observer: Counts hooks; give it to a collector.
        spans: Notes hooks.
        pipeline: In front of the sinks.
        converter: Makes spans.
        awaiting: The thread that waits for the application's provider where spans have nowhere else to go.
    """

    def __init__(
        self,
        hub: Hub,
        *,
        sinks: Mapping[str, Sink] | None = None,
        collect: Callable[[], Iterable[Metric]] | None = None,
        provider: Any = None,  # noqa: ANN401 - any object of OpenTelemetry's API
        find_provider: Callable[[], Any] | None = None,
        withheld: Iterable[str] = (),
        budget: float | None = SPAN_BUDGET,
        sample_seconds: float | None = None,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._hub = hub
        self._closed = False
        self._log: EventLog | None = None
        wanted = any(takes_spans(sink) for sink in (sinks or {}).values())
        self._makes_spans = wanted or provider is not None
        # What slots are counted in from the beginning can be told to record them later.
        self.recorder = SlotRecorder(recording=self._makes_spans)
        self.observer = DeferredMetrics(hub.raised, book=self.recorder)
        self._find_provider = find_provider
        self._ended = threading.Event()
        self.awaiting = threading.Thread(target=self._await_provider, name="quiesce-provider", daemon=True)
        self._switching = threading.RLock()  # reentrant: a signal handler may close us
        identifiers: Identifiers | None = None
        tracing: OwnTracing | ProviderTracing | FollowingTracing
        if provider is None:
            identifiers = Identifiers()
            tracing = OwnTracing(identifiers)
            if find_provider is not None:
                tracing = FollowingTracing(tracing, find_provider, self._follow)
        else:
            tracing = ProviderTracing(provider, copies=wanted)
        self._tracing = tracing
        self._withheld = tuple(withheld)
        self._before_provider = 0
        self.spans = SpanObserver(self.recorder, Identities(identifiers), clock=clock)
        if self._makes_spans:
            self.observer.share(self.spans)
        # What a sink hears itself, it need not wait for: an alert goes out at once.
        self._hearing = [
            sink
            for sink in (sinks or {}).values()
            if any(callable(getattr(sink, hook, None)) for hook in HOOKS)
        ]
        self.pipeline = Pipeline(
            sinks or {},
            collect=collect,
            sample_seconds=sample_seconds,
            exported=self.observer.export_seconds.children[()].observe,
        )
        self.converter = Converter(
            self.recorder,
            self.spans,
            tracing,
            self.pipeline if wanted or provider is None else None,
            catch_up=self.observer.catch_up,
            open_slots=self._slots_now,
            draining=self._draining_now,
            families=self.observer.families,
            budget=budget,
            clock=clock,
        )
        self._handler: _OnTerminate | None = None
        self._at_exit: Callable[[], None] = self.close
        self._ends_at_exit = False
        _RUNNING.add(self)

    def start(self, *, thread: bool = True) -> None:
        """Listen, and convert.

        Args:
            thread: Whether to start the converter's thread; without it, call its ``convert()``.
        """
        self.observer.slot_cost_ns = slot_cost_ns(SlotRecorder(recording=self._makes_spans))
        if self._makes_spans:  # first, because what both are told is counted from what this one notes
            self._hub.subscribe(self.spans, timed=True)
        self._hub.subscribe(self.observer, timed=True)
        for sink in self._hearing:
            self._hub.subscribe(sink, timed=True)
        if self._makes_spans:
            self._trace(thread=thread)
        elif thread and self._find_provider is not None:
            self.awaiting.start()

    def _trace(self, *, thread: bool) -> None:
        """Note what spans are made of, and make them."""
        self._hub.subscribe(self.spans, timed=True)
        self._hub.attach("tracing", self)
        if thread:
            self.converter.start()

    def _await_provider(self) -> None:
        """Begin to make spans once the application has installed a tracer provider: until then they have nowhere to go."""
        find = self._find_provider
        while find is not None and not self._ended.wait(_LOOK_SECONDS):
            if find() is None:
                continue
            self.observer.slot_cost_ns = slot_cost_ns(SlotRecorder())
            with self._switching:
                if not self._closed:
                    self._makes_spans = True
                    self.recorder.record()
                    self._trace(thread=True)
            return

    def trace_of(self, names: Iterable[str]) -> str:
        """Return the trace that tells the first of some groups and cuts of which one is known, or ""; from any thread."""
        return self.converter.trace_of(names)

    def _slots_now(self) -> list[OpenSlot]:
        barriers = [barrier for barrier in self._hub.sources("barrier") if hasattr(barrier, "slots_now")]
        return [slot for barrier in barriers for slot in barrier.slots_now()]

    def _draining_now(self, now_ns: int) -> list[tuple[str, tuple[Delay, ...]]]:
        barriers = [barrier for barrier in self._hub.sources("barrier") if hasattr(barrier, "draining_now")]
        return [window for barrier in barriers for window in barrier.draining_now(now_ns)]

    def connect(self, log: EventLog) -> None:
        """Let a log's events name the trace that they belong to, and hand them to the sinks: those of the last one alone."""
        if self._log is not None and self._log is not log:
            self._log.also = None
        self._log = log
        log.identify = self.converter.link_of
        log.also = self._hand_event

    def _hand_event(self, event: Mapping[str, object]) -> None:
        """Hand an event to the sinks: one of something wrong at once, because the process may be killed for it."""
        self.pipeline.put_event(event)
        if event.get("level") in _URGENT:
            self.pipeline.flush(0.0)

    def close_at_exit(self, close: Callable[[], None] | None = None) -> None:
        """Have telemetry closed when the process ends: at exit, and at SIGTERM.

        Args:
            close: What closes it; None takes :meth:`close`. Twice must be once, and it must call :meth:`close`.

        A SIGTERM handler is installed only where there is none, and only from the main thread: an
        application that handles the signal itself ends in its own way, and then at exit.
        """
        self.end_with(self.close if close is None else close)
        if threading.current_thread() is threading.main_thread() and (
            signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        ):
            self._handler = _OnTerminate(partial(self._terminate, self._at_exit))
            signal.signal(signal.SIGTERM, self._handler)

    def _terminate(self, close: Callable[[], None]) -> None:
        """Close, and have the application's provider send what it holds, which it would do at exit."""
        close()
        foreign = self._foreign
        if foreign is not None:
            foreign.flush(_FLUSH_SECONDS)

    @property
    def _foreign(self) -> ProviderTracing | None:
        tracing = self._tracing.foreign if isinstance(self._tracing, FollowingTracing) else self._tracing
        return tracing if isinstance(tracing, ProviderTracing) else None

    def end_with(self, close: Callable[[], None]) -> None:
        """Have something else called at exit; see :meth:`close_at_exit`. At SIGTERM it is not."""
        atexit.unregister(self._at_exit)
        self._at_exit = close
        self._ends_at_exit = True
        atexit.register(close)

    def _follow(self) -> bool:
        """Leave spans to the application's provider; return whether sinks are still given copies."""
        now = self.converter.statistics()
        self._before_provider = now.made + now.others
        for name in self._withheld:
            self.pipeline.withhold(name)
        self.spans.identities.leave_to_provider()
        # Its own handler was registered after ours, so at exit it would be shut down before it has our last spans.
        if self._ends_at_exit:
            self.end_with(self._at_exit)
        return self.pipeline.has_sinks

    def look(self, patience_seconds: float) -> None:
        """Use the application's provider from now on, if it has one by now; see :meth:`Converter.look`."""
        if self._makes_spans and not self._closed:
            self.converter.look(patience_seconds)

    def close(self, deadline_seconds: float = CLOSE_SECONDS) -> None:
        """Stop listening, end what is open as cut off, and send what there is. Twice is once.

        Args:
            deadline_seconds: For all of it, whatever the sinks do.
        """
        with self._switching:
            if self._closed:
                return
            self._closed = True
        self._ended.set()
        _RUNNING.discard(self)
        until = time.monotonic() + deadline_seconds
        self._hub.unsubscribe(self.observer)
        self._hub.unsubscribe(self.spans)
        for sink in self._hearing:
            self._hub.unsubscribe(sink)
        if self._makes_spans:
            self.converter.close(deadline_seconds / 2)
        self.pipeline.close(max(0.0, until - time.monotonic()))
        atexit.unregister(self._at_exit)
        if self._handler is not None:
            self._handler.remove()

    def forget(self) -> None:
        """In a forked child: be closed, and do not listen."""
        self._closed = True
        self._switching = threading.RLock()
        self._hub.renew()
        self._hub.unsubscribe(self.observer)
        self._hub.unsubscribe(self.spans)
        for sink in self._hearing:
            self._hub.unsubscribe(sink)

    def flush(self, deadline_seconds: float = CLOSE_SECONDS) -> bool:
        """Wait until what happened before this call has been sent, or the deadline is over.

        Returns:
            Whether everything was.
        """
        until = time.monotonic() + deadline_seconds
        converted = self.converter.flush(deadline_seconds)
        return self.pipeline.flush(max(0.0, until - time.monotonic())) and converted

    def totals(self) -> dict[str, float]:
        """Return spans by fate, and the processor time of the threads as ``cpu_seconds``."""
        now = self.converter.statistics()
        fates = self.pipeline.fates()
        foreign = self._foreign
        exported = fates.get("exported", 0)
        return {
            "exported": exported
            if foreign is None
            else foreign.exported + min(exported, self._before_provider),
            "sampled": now.sampled + (0 if foreign is None else foreign.unheard),
            # A note that found no room, or could not be told, is a span that is not there, or lacks something.
            "dropped": now.lost
            + now.notes_dropped
            + now.errors
            + (fates.get("dropped", 0) if foreign is None else 0),
            "failed": fates.get("failed", 0) if foreign is None else 0,
            "cpu_seconds": (now.cpu_ns + self.pipeline.cpu_ns) / 1e9,
        }


def slot_cost_ns(book: SlotBook, calls: int = _CALLS) -> float:
    """Measure what telemetry adds to a slot: the hook, the loop that calls it, and the clock at the end.

    Args:
        book: What counts, or records, slots; not a run's own.
        calls: Calls of a round; the median of a few rounds' means counts.
    """
    hooks = (book.slot_closed,)
    clock = time.perf_counter_ns
    found = []
    for _ in range(_ROUNDS):
        since = time.thread_time_ns()
        for _ in range(calls):
            ended = clock()
            for hook in hooks:
                hook("retry", 0, 1_000, "completed", ended)
        found.append((time.thread_time_ns() - since) / calls)
    return median(found)


class _OnTerminate:
    """Ends telemetry at SIGTERM, and then the process as it would have ended without.

    A handler runs between any two instructions of the main thread, which may hold any lock then, so closing is
    another thread's; whatever that one waits for, the process ends in time.
    """

    def __init__(self, close: Callable[[], None]) -> None:
        self._close = close

    def __call__(self, number: int, frame: FrameType | None) -> None:
        closed = _thread.allocate_lock()
        closed.acquire()

        def close() -> None:
            try:
                self._close()
            finally:
                closed.release()

        with contextlib.suppress(RuntimeError):  # the interpreter is ending, and closes at exit
            # Not a Thread, whose start() takes locks and waits.
            _thread.start_new_thread(close, ())
            closed.acquire(timeout=CLOSE_SECONDS + _MARGIN_SECONDS)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)

    def remove(self) -> None:
        """Take the handler out, if it is still the one."""
        if signal.getsignal(signal.SIGTERM) is self and (
            threading.current_thread() is threading.main_thread()
        ):
            signal.signal(signal.SIGTERM, signal.SIG_DFL)


_RUNNING: weakref.WeakSet[RunTelemetry] = weakref.WeakSet()


def look_for_providers() -> None:
    """Use, in all telemetry that runs, a provider that was installed a moment ago.

    Called when the main thread has ended: at exit the provider would be shut down before it has our last spans. Must not
    raise: the interpreter would then not wait for the application's threads.
    """
    until = time.monotonic() + _PATIENCE_SECONDS
    for running in list(_RUNNING):
        running.look(until - time.monotonic())


def _when_main_thread_ends(call: Callable[[], None]) -> None:
    """Have something called before all of ``atexit``, as ``concurrent.futures`` does; where there is no way, never."""
    with contextlib.suppress(RuntimeError):  # it has ended
        getattr(threading, "_register_atexit", lambda _: None)(call)


_when_main_thread_ends(look_for_providers)


def _after_fork() -> None:
    for running in list(_RUNNING):
        running.forget()


os.register_at_fork(after_in_child=_after_fork)
