"""The thread that turns records of slots, and notes of rarer things, into spans and exemplars.

Rule: it takes what is there in small batches and sleeps in between, because while it computes the event loop's
thread waits for the GIL; it makes nobody wait, and what it raises ends neither it nor the run. Nothing here
suspends; :meth:`Converter.close` blocks, up to its deadline.

Which slots get a span: all, up to a budget of spans a second. Past it every *interesting* one (it waited, was
slow, failed or was cancelled, or was open while a window asked) and as many of the rest as the budget still
pays for. Each slot has one fate, and all of them are counted: ``made`` into a span, ``sampled`` out, or ``lost``
because its record was overwritten before it was read, or something raised.

A slot's span covers its wait and its hold. It is linked to the windows that it waited for; the windows' spans
are linked to the slots that delayed them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
import weakref
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from quiesce.telemetry import names
from quiesce.telemetry.histogram import HistogramFamily, bounds_ns
from quiesce.telemetry.slots import NEVER_HELD
from quiesce.telemetry.story import Story
from quiesce.telemetry.tracing import Parent, context_of, context_reader, parent_before, parent_in

if TYPE_CHECKING:
    import asyncio

    from quiesce.telemetry.finished import AttributeValue, FinishedSpan, Link
    from quiesce.telemetry.histogram import NumberFamily
    from quiesce.telemetry.pipeline import Pipeline
    from quiesce.telemetry.slot_spans import SlotColumns
    from quiesce.telemetry.slots import RawRecord, SlotNumbers, SlotRecorder
    from quiesce.telemetry.spans import SpanObserver
    from quiesce.telemetry.story_windows import Delay
    from quiesce.telemetry.tracing import SpanHandle, Tracing

__all__ = ["SLOW_SECONDS", "SPAN_BUDGET", "Converter", "ConverterStatistics", "OpenSlot"]

SPAN_BUDGET: Final = 1_000.0
"""Spans of slots a second, beside the interesting ones."""

SLOW_SECONDS: Final = 0.01
"""A slot that is held for longer is interesting: it should last microseconds, and a window waits for it."""

_BATCH: Final = 512
_LARGEST_BATCH: Final = 2_048
_NOTES: Final = 1_024
_KEPT: Final = 256
_BREATH_SECONDS: Final = 0.001
_WORTH_WAKING: Final = 1_024
"""Slots that a rest is meant for: waking up costs as much as some hundred of them."""
_REST_SECONDS: Final = (0.05, 0.5)
"""The least and the most. The ring holds what comes in the most at 65,000 slots a second."""
_LONGEST_REST_SECONDS: Final = 1.0
_CUT_OFF_SLOTS: Final = 1_024
_RESYNC_NS: Final = 10_000_000_000
_EXEMPLAR_SPACING_NS: Final = 100_000_000
_BOUNDS: Final = bounds_ns(names.SLOT_BUCKETS)
_LOG: Final = logging.getLogger("quiesce.telemetry")

OpenSlot = tuple[str, int, int | None, "asyncio.Task[Any] | None"]
"""A slot that is open, or waits: its kind, when it asked and opened (None: it waits), and its task."""

_Plain = tuple[int, "SlotNumbers | None", list[int]] | tuple[()]
"""Of a kind: the number of its spans' shape, its numbers, and from when on each bucket of its holds wants an exemplar;
nothing where its spans have no shape."""


@dataclass(frozen=True, slots=True)
class ConverterStatistics:
    """What became of slots and notes.

    Attributes:
        made: Slots with a span.
        sampled: Slots without one, past the budget.
        lost: Slots whose record was overwritten before it was read, or could not be told.
        waiting: Slots whose record is still to be read.
        others: Spans of anything else that were handed to the pipeline.
        notes_dropped: Hooks that found no room to be noted.
        errors: Notes that could not be told, and batches in which something else failed.
        cpu_ns: Processor time of the thread.
    """

    made: int
    sampled: int
    lost: int
    waiting: int
    others: int
    notes_dropped: int
    errors: int
    cpu_ns: int


class Converter:
    """See the module's docstring.

    Args:
        recorder: Where slots are recorded.
        observer: Where other hooks are noted.
        tracing: Makes spans.
        pipeline: Takes finished spans; None where the tracing has a way out of its own.
        catch_up: Called before each batch: whatever else is to be done off the loop now and then.
        families: Histograms of the metrics observer by name, which get exemplars.
        open_slots: Returns the slots that are open, or wait, right now: kind, when each asked and opened (None:
            it waits), by the clock, and its task.
        draining: Returns the windows that wait right now, each with what has delayed it until the moment that is
            given, by the clock.
        budget: Spans of slots a second; 0 or None: no limit.
        clock: Monotonic nanoseconds; the same clock as the barriers'.
        unix_clock: Unix nanoseconds.
    """

    def __init__(
        self,
        recorder: SlotRecorder,
        observer: SpanObserver,
        tracing: Tracing,
        pipeline: Pipeline | None,
        *,
        catch_up: Callable[[], None] | None = None,
        families: dict[str, HistogramFamily | NumberFamily] | None = None,
        open_slots: Callable[[], Iterable[OpenSlot]] | None = None,
        draining: Callable[[int], Iterable[tuple[str, tuple[Delay, ...]]]] | None = None,
        budget: float | None = SPAN_BUDGET,
        slow_seconds: float = SLOW_SECONDS,
        clock: Callable[[], int] = time.perf_counter_ns,
        unix_clock: Callable[[], int] = time.time_ns,
    ) -> None:
        self._recorder = recorder
        self._observer = observer
        self._tracing = tracing
        self._pipeline = pipeline
        self._catch_up = catch_up
        self._families = {} if families is None else families
        self._open_slots = open_slots
        self._draining = draining
        self._clock = clock
        self._unix_clock = unix_clock
        self._budget = budget or 0.0
        self._per_ns = self._budget / 1e9
        self._tokens = self._budget
        self._refilled_ns = clock()
        self._slow_ns = int(slow_seconds * 1e9)
        self._offset_ns = unix_clock() - clock()
        self._synced_ns = clock()
        self._story = Story(tracing, self._unix, observer.identities)
        self._windows = self._story.windows
        self._told = 0
        self._done = (0, 0)
        self._made = 0
        self._sampled = 0
        self._lost = 0
        self._handed = 0
        self._errors = 0
        self._complained = False
        self._cpu_ns = 0
        self._read = 0
        self._lit: list[tuple[SlotNumbers, int, int, SpanHandle, int]] = []
        self._plain: dict[str, _Plain] = {}
        self._plain_lit: list[tuple[int, SlotNumbers, int, int]] = []
        self._rested: tuple[int, float] = (0, time.monotonic())
        self._bell = threading.Lock()  # taken, but for a moment after somebody has rung
        self._bell.acquire()
        self._stopping = False
        self._closed = False
        # For who converts, or changes the tracing: the thread, whoever closes after it, whoever looks.
        self._one = threading.Lock()
        self._said: dict[tuple[str, str], Mapping[str, AttributeValue]] = {}
        self._parents: dict[int, tuple[object, Parent | None]] = {}
        self._thread = threading.Thread(target=self._run, name="quiesce-spans", daemon=True)
        observer.begun = self._cut_begun
        _CONVERTERS.add(self)

    def start(self) -> None:
        """Start the thread."""
        self._find_context()
        self._thread.start()

    def close(self, deadline_seconds: float = 1.0) -> None:
        """Convert what is there, end what is open as cut off, and stop; within a deadline. Twice is once.

        The pipeline is not closed.
        """
        if self._closed:
            return
        self._closed = True
        _CONVERTERS.discard(self)
        until = time.monotonic() + deadline_seconds
        self._stopping = True
        self._ring()
        if self._thread.is_alive():
            self._thread.join(deadline_seconds)
        if not self._one.acquire(timeout=max(0.0, until - time.monotonic())):
            return
        try:
            while self.convert() and time.monotonic() < until:
                pass
            self._end()
        finally:
            self._one.release()

    def flush(self, deadline_seconds: float = 1.0) -> bool:
        """Wait until what happened before this call is converted and handed to the pipeline.

        Returns:
            Whether it was, within the deadline.
        """
        until = time.monotonic() + deadline_seconds
        slots, notes = self._recorder.position, self._observer.noted - self._observer.dropped
        while self._done[0] < slots or self._done[1] < notes:
            if time.monotonic() >= until or not self._thread.is_alive():
                return False
            self._ring()
            time.sleep(_BREATH_SECONDS)
        return True

    def forget(self) -> None:
        """In a forked child: be dead; the thread was not inherited."""
        self._closed = True

    def look(self, patience_seconds: float) -> None:
        """Use the application's provider from now on, if it has one by now; from any thread, and never raises.

        Args:
            patience_seconds: How long to wait for a batch that is being converted, perhaps inside a provider. Nothing
                is done then.
        """
        if not self._one.acquire(timeout=max(0.0, patience_seconds)):
            return
        try:
            self._look()
        finally:
            self._one.release()

    def link_of(self, name: str) -> Link | None:
        """Return the span of a cut, of a group, of the last step (``step 7``) or of the last ``restore``; from any thread.

        None where there is none, or where it is not known yet.
        """
        return self._observer.identities.of(name) or self._story.link_of(name)

    def trace_of(self, names: Iterable[str]) -> str:
        """Return the trace that tells the first of some groups and cuts of which one is known, or ""; from any thread."""
        found = next(filter(None, map(self.link_of, names)), None)
        return "" if found is None else f"{found[0]:032x}"

    def statistics(self) -> ConverterStatistics:
        """Return the counts; may be called from any thread."""
        return ConverterStatistics(
            made=self._made,
            sampled=self._sampled,
            lost=self._lost,
            waiting=self._recorder.position - self._read,
            others=max(0, self._handed - self._made),
            notes_dropped=self._observer.dropped,
            errors=self._errors,
            cpu_ns=self._cpu_ns,
        )

    # -------------------------------------------------------------------------------------------- the thread

    def _run(self) -> None:
        while not self._stopping:
            with self._one:
                more = self.convert()
                self._cpu_ns = time.thread_time_ns()
            if more:
                time.sleep(_BREATH_SECONDS)
            else:
                self._rest()

    def _rest(self) -> None:
        """Sleep until there is a batch worth waking caches up for, or what there is has waited long enough."""
        now = time.monotonic()
        read, since = self._rested
        self._rested = self._read, now
        rate = (self._read - read) / max(now - since, _BREATH_SECONDS)
        shortest, longest = _REST_SECONDS
        pause = max(shortest, min(longest, _WORTH_WAKING / rate)) if rate else longest
        until = now + _LONGEST_REST_SECONDS
        while not self._bell.acquire(timeout=pause) and time.monotonic() < until:
            if self._recorder.waiting >= _BATCH or self._observer.waiting >= _NOTES:
                break

    def _cut_begun(self, cut_id: str) -> None:
        """Convert at once where a cut's identifiers are a provider's: lines in the log name them.

        Where they are ours nothing is in a hurry, and what converts beside a window contends with it.
        """
        with contextlib.suppress(Exception):  # of the application's; the thread meets it as well, and says so
            if self._tracing.unseen():
                self._observer.identities.forget(cut_id)  # drawn a moment ago, and no span will have them
        if self._observer.identities.of(cut_id) is None:
            self._ring()

    def _ring(self) -> None:
        """End the rest, or leave the next one out. A bare lock, because an event's wait is a dozen calls in Python."""
        with contextlib.suppress(RuntimeError):  # it has been rung, and not been heard yet
            self._bell.release()

    def convert(self) -> bool:
        """Take a batch; return whether there is more. The thread does this; without one, anybody may.

        What was recorded by now is read after all notes have been told, because whoever looks at a slot has to
        know the windows that asked before it ended; and a window is finished after the slots that delayed it.
        """
        try:
            self._find_context()
            if self._catch_up is not None:
                self._catch_up()
            head = self._recorder.position
            notes = self._observer.take(_NOTES)
            self._story.tell(notes, partial(self._wrong, "a note of %s could not be told"))
            self._told += len(notes)
            more = len(notes) == _NOTES
            if not more:
                more = self._convert_slots(head)
                self._windows.finish(self._read)
            self._hand_over()
        except Exception:  # noqa: BLE001 - whatever a foreign provider raises, say
            self._wrong("spans could not be made")
            return False
        finally:
            # For flush(), only now: what was read may not have been handed over before.
            self._done = self._read, self._told
        return more

    def _wrong(self, what: str, *args: object) -> None:
        self._errors += 1
        self._complain(what, *args)

    def _complain(self, what: str, *args: object) -> None:
        """Log an error that is being handled, if it is the first one."""
        if not self._complained:
            self._complained = True
            _LOG.exception(f"{what} (logged once)", *args)

    def _convert_slots(self, head: int) -> bool:
        waiting = head - self._read
        if waiting <= 0:
            return False
        limit = min(_LARGEST_BATCH, max(_BATCH, waiting // 4))
        records, lost = self._recorder.take(limit, head)
        columns = self._tracing.slots
        before = self._made + self._sampled
        left = iter(records)
        while True:
            try:
                if columns is None:
                    for record in left:
                        self._convert_slot(record)
                else:
                    self._collect(left, columns)
            except Exception:  # noqa: BLE001 - as in convert(); the slots after this one go on
                self._complain("a slot could not be told")
            else:
                break
        self._lost += lost + len(records) - (self._made + self._sampled - before)
        self._read += len(records) + lost
        return self._read < head

    def _collect(self, records: Iterable[RawRecord], columns: SlotColumns) -> None:
        """Convert slots; those to which nothing happened are collected in columns, without a call for each."""
        add, add_time = columns.which.append, columns.times.append
        plain, lit, offset = self._plain, self._plain_lit, self._offset_ns
        asked, slow, limited = self._windows.last_asked_ns, self._slow_ns, bool(self._budget)
        before = len(columns.which)
        try:
            for record in records:
                _, kind, wait_ns, hold_ns, outcome, ended_ns, context = record
                opened_ns = ended_ns - hold_ns
                known = plain.get(kind)
                if known is None:
                    known = self._meet(kind, columns)
                if (
                    wait_ns
                    or context
                    or outcome != "completed"
                    or opened_ns <= asked
                    or hold_ns < 0
                    or not known
                ):
                    self._convert_slot(record)
                    continue
                if limited and not self._affords(ended_ns) and hold_ns < slow:
                    self._sampled += 1
                    continue
                number, numbers, due = known
                add(number)
                add_time(opened_ns + offset)
                add_time(ended_ns + offset)
                if numbers is not None and ended_ns >= due[bucket := bisect_left(_BOUNDS, hold_ns)]:
                    due[bucket] = ended_ns + _EXEMPLAR_SPACING_NS
                    lit.append((len(columns.which) - 1, numbers, hold_ns, ended_ns + offset))
        finally:
            self._made += len(columns.which) - before

    def _meet(self, kind: str, columns: SlotColumns) -> _Plain:
        """Note what is the same for all slots of a kind."""
        if len(self._plain) >= _KEPT:
            return ()
        number = columns.number(kind)
        if number is None:
            found: _Plain = ()
        else:
            found = number, self._recorder.numbers.get(kind), [0] * (len(_BOUNDS) + 1)
        self._plain[kind] = found
        return found

    def _affords(self, ended_ns: int) -> bool:
        """Take a span out of the budget, if there is one left."""
        if ended_ns > self._refilled_ns:
            passed = ended_ns - self._refilled_ns
            self._refilled_ns = ended_ns
            self._tokens = min(self._budget, self._tokens + passed * self._per_ns)
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True

    def _convert_slot(self, record: RawRecord) -> None:
        _, kind, wait_ns, hold_ns, outcome, ended_ns, context = record
        opened_ns = ended_ns if hold_ns == NEVER_HELD else ended_ns - hold_ns
        windows = self._windows
        overlapped = opened_ns <= windows.last_asked_ns and windows.overlapped(opened_ns, ended_ns)
        if (
            self._budget
            and not self._affords(ended_ns)
            and not (wait_ns or overlapped or hold_ns >= self._slow_ns or outcome != "completed")
        ):
            self._sampled += 1
            return
        about = self._said.get((kind, outcome))
        if about is None:
            about = self._say(kind, outcome)
        links: tuple[tuple[int, int], ...] = ()
        if wait_ns:
            about = {**about, "quiesce.wait_seconds": wait_ns / 1e9}
            links = windows.blockers(opened_ns - wait_ns, opened_ns)
        if hold_ns == NEVER_HELD:
            about = {**about, "quiesce.held": False}
        end = ended_ns + self._offset_ns
        handle = self._tracing.emit(
            "quiesce.slot",
            parent=self._parent(context) if context else None,
            start_ns=opened_ns - wait_ns + self._offset_ns,
            end_ns=end,
            outcome=outcome,
            attributes=about,
            links=links,
        )
        self._made += 1
        if overlapped:
            windows.note_delayer(kind, ended_ns, handle.link)
        numbers = self._recorder.numbers.get(kind)
        if numbers is not None and handle.sampled:
            self._lit.append((numbers, wait_ns, hold_ns, handle, end))

    def _say(self, kind: str, outcome: str) -> Mapping[str, AttributeValue]:
        """Return what slots of a kind that ended so have in common: one dictionary, which nobody changes."""
        if len(self._said) >= _KEPT:
            self._said.clear()
        said: dict[str, AttributeValue] = {"quiesce.kind": kind}
        self._said[kind, outcome] = said
        return said

    def _parent(self, context: object) -> Parent | None:
        """Find the current span of a context; slots of one task share one, so the last answers are kept."""
        known = self._parents.get(id(context))
        if known is not None and known[0] is context:
            return known[1]
        found = parent_in(context)
        if len(self._parents) >= _KEPT:
            self._parents.clear()
        self._parents[id(context)] = (context, found)
        return found

    def _hand_over(self) -> None:
        """Give finished spans to the sinks, and name those that went somewhere in exemplars."""
        lit, self._lit = self._lit, []
        plain_lit, self._plain_lit = self._plain_lit, []
        told = self._story.take_told()
        columns = self._tracing.slots
        slots = None if columns is None else columns.take()
        if slots is not None and self._put(slots):
            for index, numbers, hold_ns, end in plain_lit:
                numbers.hold.light(hold_ns, slots.link(index), end, _EXEMPLAR_SPACING_NS)
        if not self._put(self._tracing.take()):
            return
        for numbers, wait_ns, hold_ns, handle, end in lit:
            if hold_ns != NEVER_HELD:
                numbers.hold.light(hold_ns, handle.link, end, _EXEMPLAR_SPACING_NS)
            if wait_ns:
                numbers.wait.light(wait_ns, handle.link, end, _EXEMPLAR_SPACING_NS)
        for name, labels, ns, handle, end in told:
            family = self._families.get(name)
            if isinstance(family, HistogramFamily) and handle.sampled and labels in family.children:
                family.children[labels].light(ns, handle.link, end, _EXEMPLAR_SPACING_NS)

    def _put(self, spans: Sequence[FinishedSpan]) -> bool:
        """Give spans to the sinks; return whether they are on their way, here or by the tracing's own means."""
        if self._pipeline is None or not spans:
            return True
        self._handed += len(spans)
        return bool(self._pipeline.put_spans(spans))

    def _end(self) -> None:
        self._windows.finish(self._read)
        now = self._clock()
        self._cut_off_slots(now)
        self._story.cut_off(now, self._still_draining(now))
        self._hand_over()

    def _still_draining(self, now_ns: int) -> list[tuple[str, tuple[Delay, ...]]]:
        """Return what delays the windows that wait as the process ends."""
        try:
            return list(self._draining(now_ns) if self._draining else ())
        except Exception:  # noqa: BLE001 - as below
            self._wrong("what delays a window could not be told")
            return []

    def _cut_off_slots(self, now_ns: int) -> None:
        """End the spans of slots that are open, or wait, as the process ends."""
        try:
            slots = list(islice(self._open_slots() if self._open_slots else (), _CUT_OFF_SLOTS))
        except Exception:  # noqa: BLE001 - a barrier of somebody's own may answer anything, and the end goes on
            self._wrong("open slots could not be told")
            return
        for kind, asked_ns, opened_ns, task in slots:
            about: dict[str, AttributeValue] = {"quiesce.kind": kind}
            waited = opened_ns is None or opened_ns > asked_ns
            if opened_ns is None:
                about["quiesce.held"] = False
            elif waited:
                about["quiesce.wait_seconds"] = (opened_ns - asked_ns) / 1e9
            until = now_ns if opened_ns is None else opened_ns
            start = self._unix(asked_ns)
            handle = self._tracing.start(
                "quiesce.slot",
                parent=parent_before(context_of(task), start),
                start_ns=start,
                attributes=about,
                links=self._windows.blockers(asked_ns, until) if waited else (),
            )
            self._tracing.end(handle, self._unix(now_ns), outcome="", cut_off=True)
            if opened_ns is not None and self._windows.overlapped(opened_ns, now_ns):
                self._windows.note_delayer(kind, now_ns, handle.link)

    def _unix(self, ns: int) -> int:
        return ns + self._offset_ns

    def _look(self) -> None:
        """Look for the application's provider. Where it cannot be used, spans go on being what they were."""
        try:
            self._tracing.look()
        except Exception:  # noqa: BLE001 - whatever the application's set-up of OpenTelemetry raises
            self._complain("the application's tracer provider could not be used")

    def _find_context(self) -> None:
        """Look for OpenTelemetry, which may be loaded late, for its provider, and for a clock that was set."""
        self._look()
        if self._recorder.current is None:
            reader = context_reader()
            if reader is not None:
                self._recorder.current = self._observer.current = reader
        now = self._clock()
        if now - self._synced_ns > _RESYNC_NS:
            self._synced_ns = now
            self._offset_ns = self._unix_clock() - self._clock()


_CONVERTERS: weakref.WeakSet[Converter] = weakref.WeakSet()


def _after_fork() -> None:
    for converter in list(_CONVERTERS):
        converter.forget()


os.register_at_fork(after_in_child=_after_fork)
