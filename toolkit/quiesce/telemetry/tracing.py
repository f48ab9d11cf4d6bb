"""How spans are made: as finished values of our own; with :mod:`quiesce.telemetry.provider`, as an application's.

Rule: whoever makes spans says when they began and ended; nothing here reads a clock, and nothing is attached
to a context, so a save that hops through tasks and threads is one trace because its parts name their parent.
One thread makes spans (the converter), so nothing here takes a lock. Nothing here suspends.

Identifiers come from a generator of our own, seeded by the operating system and again after a fork: the
global generators of :mod:`random`, NumPy and torch are never drawn from. OpenTelemetry is used only where the
application has loaded it; it is never imported for this.
"""

from __future__ import annotations

import os
import random
import sys
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from quiesce.telemetry.finished import (
    CUT_OFF,
    ERROR,
    NO_ATTRIBUTES,
    OUTCOME,
    AttributeValue,
    FinishedSpan,
    Link,
    SpanEvent,
)
from quiesce.telemetry.slot_spans import SlotColumns

if TYPE_CHECKING:
    import asyncio

__all__ = [
    "RESTORE",
    "Attributes",
    "Ending",
    "Identifiers",
    "Identities",
    "OwnTracing",
    "Parent",
    "SpanHandle",
    "Tracing",
    "context_of",
    "context_reader",
    "parent_before",
    "parent_in",
    "status_of",
]

RESTORE: Final = "restore"
"""What the restore that goes on, or was the last one, is known by."""

_REMEMBERED: Final = 64
"""Cuts whose identifiers are remembered."""

_SPAN_BITS: Final = 64
_SPAN_MASK: Final = (1 << _SPAN_BITS) - 1
_BOTH_BITS: Final = 128 + _SPAN_BITS
_FAILED: Final = frozenset({"failed", "refused"})

Attributes = Mapping[str, AttributeValue]
"""Attributes of a span, by dotted key."""

# A named tuple's own constructor is written in Python, and costs as much as all the rest of a span.
_new: Final[Callable[..., Any]] = tuple.__new__


class SpanHandle:
    """A span that is open, or was: what a child, a link or an exemplar needs to know about it.

    Attributes:
        trace_id: 128 bits.
        span_id: 64 bits.
        sampled: Whether the span goes anywhere; an exemplar may name it only then.
        open: What the tracing keeps about it while it is open.
    """

    __slots__ = ("open", "sampled", "span_id", "trace_id")

    def __init__(self, trace_id: int, span_id: int, *, sampled: bool = True, open_: Any = None) -> None:  # noqa: ANN401 - the tracing's own
        self.trace_id = trace_id
        self.span_id = span_id
        self.sampled = sampled
        self.open = open_

    @property
    def link(self) -> Link:
        """Its identifiers."""
        return self.trace_id, self.span_id


class Parent(NamedTuple):
    """The span of the application that a root of ours belongs under.

    Attributes:
        trace_id: 128 bits.
        span_id: 64 bits.
        sampled: Whether the application records its trace.
        context: The OpenTelemetry context that it is the current span of.
    """

    trace_id: int
    span_id: int
    sampled: bool
    context: object


class Tracing(ABC):
    """Makes spans.

    What a span is told is put together here, once; whose it is, is a matter of :meth:`begin` and :meth:`finish`.

    Attributes:
        slots: Where spans of ordinary slots are collected; None where each has to be made for itself.
    """

    slots: SlotColumns | None = None

    def look(self) -> None:  # noqa: B027 - most have nothing to look for
        """Use what the application has installed by now."""

    def unseen(self) -> bool:
        """Return whether the application has installed something that is not used yet; from any thread.

        Raises:
            Exception: Whatever the application's set-up of OpenTelemetry raises when it is asked.
        """
        return False

    def start(
        self,
        name: str,
        *,
        parent: SpanHandle | Parent | None,
        start_ns: int,
        attributes: Attributes = NO_ATTRIBUTES,
        links: Sequence[Link] = (),
        identity: Link | None = None,
    ) -> SpanHandle:
        """Open a span; without a parent it begins a trace.

        ``identity`` are the identifiers that it is to have, where they can be chosen.
        """
        return self.begin(name, parent, start_ns, attributes, links, identity)

    def end(
        self,
        handle: SpanHandle,
        end_ns: int,
        *,
        outcome: str,
        attributes: Attributes = NO_ATTRIBUTES,
        events: Sequence[SpanEvent] = (),
        links: Sequence[Link] = (),
        error: str = "",
        cut_off: bool = False,
    ) -> None:
        """End it; what is given here is added to what it was opened with. Twice is once."""
        opened = handle.open
        if opened is None:
            return
        handle.open = None
        said = _said(NO_ATTRIBUTES, attributes, outcome, error, cut_off=cut_off)
        self.finish(handle, opened, _new(Ending, (end_ns, said, events, links, status_of(outcome), cut_off)))

    def emit(
        self,
        name: str,
        *,
        parent: SpanHandle | Parent | None,
        start_ns: int,
        end_ns: int,
        outcome: str,
        attributes: Attributes = NO_ATTRIBUTES,
        links: Sequence[Link] = (),
    ) -> SpanHandle:
        """Make a span that is over already."""
        handle = self.begin(name, parent, start_ns, attributes, links, None)
        opened, handle.open = handle.open, None
        said: dict[str, AttributeValue] = {OUTCOME: outcome}
        ending = _new(Ending, (max(start_ns, end_ns), said, (), (), status_of(outcome), False))
        self.finish(handle, opened, ending)
        return handle

    @abstractmethod
    def begin(
        self,
        name: str,
        parent: SpanHandle | Parent | None,
        start_ns: int,
        attributes: Attributes,
        links: Sequence[Link],
        identity: Link | None,
    ) -> SpanHandle:
        """Open a span; what is to be known at its end is the handle's ``open``."""

    @abstractmethod
    def finish(self, handle: SpanHandle, opened: Any, ending: Ending) -> None:  # noqa: ANN401 - what begin() kept
        """End it, for good."""

    @abstractmethod
    def take(self) -> list[FinishedSpan]:
        """Return the spans that have ended since the last call, and that sinks are to be given; ``slots`` beside."""


class Ending(NamedTuple):
    """How a span ended.

    Attributes:
        end_ns: When.
        said: Attributes beside those that it was opened with.
        events: What happened while it was open.
        links: Links beside those that it was opened with.
        status: Its status.
        cut_off: Whether the process ended it.
    """

    end_ns: int
    said: dict[str, AttributeValue]
    events: Sequence[SpanEvent]
    links: Sequence[Link]
    status: str
    cut_off: bool


def _said(
    known: Attributes, more: Attributes, outcome: str, error: str, *, cut_off: bool
) -> dict[str, AttributeValue]:
    """Return the attributes of a span that ends: those it was opened with, those that its end adds, and how it ended."""
    said = {**known, **more}
    if outcome:
        said[OUTCOME] = outcome
    if error:
        said[ERROR] = error
    if cut_off:
        said[CUT_OFF] = True
    return said


def status_of(outcome: str) -> str:
    """Return a span's status: what failed is an error, what was cancelled or skipped is not.

    Args:
        outcome: How what the span covers ended.
    """
    if outcome in _FAILED:
        return "error"
    return "ok" if outcome == "completed" else ""


class Identifiers:
    """Draws identifiers of traces and spans."""

    __slots__ = ("__weakref__", "_bits")

    def __init__(self) -> None:
        self.reseed()
        _GENERATORS.add(self)

    def reseed(self) -> None:
        """Begin a sequence that nobody else has."""
        self._bits = random.Random(os.urandom(32)).getrandbits

    def bits(self, count: int) -> int:
        """Return so many bits."""
        return self._bits(count)

    def trace(self) -> int:
        """Return 128 bits, not all of them 0."""
        return self._bits(128) or 1

    def span(self) -> int:
        """Return 64 bits, not all of them 0."""
        return self._bits(64) or 1

    def both(self) -> Link:
        """Return the identifiers of a trace and of its first span."""
        drawn = self._bits(_BOTH_BITS)
        return drawn >> _SPAN_BITS or 1, drawn & _SPAN_MASK or 1


_GENERATORS: weakref.WeakSet[Identifiers] = weakref.WeakSet()


def _after_fork() -> None:
    for generator in list(_GENERATORS):
        generator.reseed()


os.register_at_fork(after_in_child=_after_fork)


class Identities:
    """Identifiers of the spans that a cut's lines in the log name, known before the spans are made.

    A line about a save is written in the step in which it happens, and its span is made later, off the loop;
    so the identifiers are drawn when the save begins. Those of an application's provider cannot be chosen:
    they are known once its span is there.

    Args:
        identifiers: Where they come from; None where they are a provider's.
    """

    __slots__ = ("_identifiers", "_known")

    def __init__(self, identifiers: Identifiers | None) -> None:
        self._identifiers = identifiers
        self._known: dict[str, Link] = {}

    def draw(self, cut_id: str, context: object) -> bool:
        """Choose the identifiers of a cut's outermost span, unless it has some.

        Args:
            cut_id: The cut.
            context: The application's OpenTelemetry context, whose current span it belongs under.

        Returns:
            Whether they were known before: a provider's are only once the span is made.
        """
        if cut_id in self._known:
            return True
        if self._identifiers is None:
            return False
        parent = parent_in(context)
        trace_id = self._identifiers.trace() if parent is None else parent.trace_id
        self.know(cut_id, (trace_id, self._identifiers.span()))
        return False

    def forget(self, name: str) -> None:
        """Forget a name that something else is known by from now on."""
        self._known.pop(name, None)

    def leave_to_provider(self) -> None:
        """Draw no more: from now on identifiers are a provider's."""
        self._identifiers = None

    def know(self, cut_id: str, link: Link) -> None:
        """Remember the identifiers of a cut's outermost span."""
        while len(self._known) >= _REMEMBERED:
            self._known.pop(next(iter(self._known)), None)
        self._known[cut_id] = link

    def of(self, cut_id: str) -> Link | None:
        """Return trace and span identifier of a cut's outermost span, if they are known."""
        return self._known.get(cut_id)


class _Open(NamedTuple):
    name: str
    parent_id: int
    start_ns: int
    attributes: Attributes
    links: tuple[Link, ...]


class OwnTracing(Tracing):
    """Makes finished spans with identifiers of our own.

    Args:
        identifiers: Where they come from.
    """

    def __init__(self, identifiers: Identifiers | None = None) -> None:
        self._identifiers = Identifiers() if identifiers is None else identifiers
        self._ended: list[FinishedSpan] = []
        self.slots = SlotColumns(self._identifiers.bits)

    def begin(
        self,
        name: str,
        parent: SpanHandle | Parent | None,
        start_ns: int,
        attributes: Attributes,
        links: Sequence[Link],
        identity: Link | None,
    ) -> SpanHandle:
        """Open a span."""
        parent_id = 0 if parent is None else parent.span_id
        if identity is not None:
            handle = SpanHandle(*identity)
        elif parent is None:
            handle = SpanHandle(*self._identifiers.both())
        else:
            handle = SpanHandle(parent.trace_id, self._identifiers.span())
        handle.open = _new(_Open, (name, parent_id, start_ns, attributes, tuple(links)))
        return handle

    def finish(self, handle: SpanHandle, opened: _Open, ending: Ending) -> None:
        """End a span."""
        end_ns, said, events, links, status, cut_off = ending
        self._finish(handle, opened, end_ns, {**opened.attributes, **said}, events, links, status, cut_off)

    def _finish(
        self,
        handle: SpanHandle,
        opened: _Open,
        end_ns: int,
        attributes: dict[str, AttributeValue],
        events: Sequence[SpanEvent],
        more: Sequence[Link],
        status: str,
        cut_off: bool,  # noqa: FBT001 - called from here alone, for each span
    ) -> None:
        name, parent_id, start_ns, _, links = opened
        self._ended.append(
            _new(
                FinishedSpan,
                (
                    name,
                    handle.trace_id,
                    handle.span_id,
                    parent_id,
                    start_ns,
                    end_ns if end_ns > start_ns else start_ns,  # noqa: FURB136 - a call of max() takes longer
                    attributes,
                    (*links, *more) if more else links,
                    tuple(events),
                    status,
                    cut_off,
                ),
            )
        )

    # The two below do what those of the base do, for most spans of a run, with nothing made that is only passed on.

    def end(
        self,
        handle: SpanHandle,
        end_ns: int,
        *,
        outcome: str,
        attributes: Attributes = NO_ATTRIBUTES,
        events: Sequence[SpanEvent] = (),
        links: Sequence[Link] = (),
        error: str = "",
        cut_off: bool = False,
    ) -> None:
        """End a span. Twice is once."""
        opened = handle.open
        if opened is None:
            return
        handle.open = None
        said = _said(opened.attributes, attributes, outcome, error, cut_off=cut_off)
        self._finish(handle, opened, end_ns, said, events, links, status_of(outcome), cut_off)

    def emit(
        self,
        name: str,
        *,
        parent: SpanHandle | Parent | None,
        start_ns: int,
        end_ns: int,
        outcome: str,
        attributes: Attributes = NO_ATTRIBUTES,
        links: Sequence[Link] = (),
    ) -> SpanHandle:
        """Make a span that is over already."""
        if parent is None:
            trace_id, span_id = self._identifiers.both()
            parent_id = 0
        else:
            trace_id, span_id = parent.trace_id, self._identifiers.span()
            parent_id = parent.span_id
        self._ended.append(
            _new(
                FinishedSpan,
                (
                    name,
                    trace_id,
                    span_id,
                    parent_id,
                    start_ns,
                    end_ns if end_ns > start_ns else start_ns,  # noqa: FURB136 - a call of max() takes longer
                    {**attributes, OUTCOME: outcome},
                    tuple(links),
                    (),
                    status_of(outcome),
                    False,
                ),
            )
        )
        return SpanHandle(trace_id, span_id)

    @staticmethod
    def is_own(opened: object) -> bool:
        """Return whether an open span is one of these."""
        return isinstance(opened, _Open)

    def take(self) -> list[FinishedSpan]:
        """Return what has ended."""
        ended, self._ended = self._ended, []
        return ended


def context_reader() -> Callable[[], object] | None:
    """Return what reads the application's OpenTelemetry context, or None while it has not loaded OpenTelemetry.

    Where OpenTelemetry keeps its context in a context variable, which is what it does by default, the variable
    is read directly: that costs a fifth of the call that its API offers.
    """
    module = sys.modules.get("opentelemetry.context")
    if module is None or sys.modules.get("opentelemetry.trace") is None:
        return None
    variable = getattr(getattr(module, "_RUNTIME_CONTEXT", None), "_current_context", None)
    get = getattr(variable, "get", None)
    reader = module.get_current if get is None else get
    try:
        reader()
    except LookupError:  # a variable without a default
        return lambda: variable.get(None)  # type: ignore[union-attr] # it has get(), or there were no LookupError
    return reader  # type: ignore[no-any-return] # OpenTelemetry's, looked up by name


def parent_in(context: object) -> Parent | None:
    """Return the span that is current in an OpenTelemetry context, if there is a valid one."""
    if not context:
        return None
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return None
    known = trace.get_current_span(context).get_span_context()
    if not known.is_valid:
        return None
    return Parent(known.trace_id, known.span_id, bool(known.trace_flags.sampled), context)


def context_of(task: asyncio.Task[Any] | None) -> object:
    """Return the OpenTelemetry context that a suspended task goes on in, or None; may be called from any thread.

    Python 3.11 shows a task's context only where the task waits for something that is not there yet.
    """
    reader = context_reader()
    if task is None or reader is None:
        return None
    show = getattr(task, "get_context", None)
    if show is not None:
        contexts = [show()]
    else:
        calls = getattr(getattr(task, "_fut_waiter", None), "_callbacks", None) or ()
        contexts = [context for call, context in calls if getattr(call, "__self__", None) is task]
    # In a copy, because the task's own may be entered at any moment by the task.
    return contexts[0].copy().run(reader) if contexts else None


def parent_before(context: object, start_ns: int) -> Parent | None:
    """Return the span that is current in an OpenTelemetry context, or the one around it if it began only later.

    Args:
        context: The context, as it is now.
        start_ns: When what the parent is for began, in Unix nanoseconds.
    """
    found = parent_in(context)
    if found is None:
        return None
    trace = sys.modules["opentelemetry.trace"]
    span = trace.get_current_span(context)
    began = getattr(span, "start_time", None)
    if not isinstance(began, int) or began <= start_ns:
        return found
    around = getattr(span, "parent", None)
    if around is None or not around.is_valid:
        return None
    known = trace.set_span_in_context(trace.NonRecordingSpan(around), context)
    return Parent(around.trace_id, around.span_id, found.sampled, known)
