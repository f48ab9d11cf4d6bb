"""What the parts of a story share: spans made of notes, values for exemplars, tables with a bound.

Rule: for the one thread that tells the story. Times come in by the monotonic clock and go out as Unix nanoseconds.
Nothing here suspends.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Final, TypeVar

from quiesce.telemetry import names
from quiesce.telemetry.finished import NO_ATTRIBUTES

if TYPE_CHECKING:
    from quiesce.telemetry.finished import AttributeValue, Link, SpanEvent
    from quiesce.telemetry.spans import Note
    from quiesce.telemetry.tracing import Identities, Parent, SpanHandle, Tracing

__all__ = ["LINKS", "WORKERS", "Attributes", "Begun", "Maker", "Told", "put"]

K = TypeVar("K")
T = TypeVar("T")

LINKS: Final = 64
"""Links of one span, at most."""

WORKERS: Final = 4_096
"""Workers of which something may have begun."""

Attributes = dict[str, "AttributeValue"]

Told = tuple[str, tuple[str, ...], int, "SpanHandle", int]
"""A value that a span shows: metric, labels, nanoseconds (or a count), span, Unix nanoseconds of its end."""

Begun = tuple["Note", Attributes]
"""What has begun, and is made a span of when it ends: what was noted, and attributes for the case that it never does."""


class Maker:
    """Makes the spans of a story.

    Args:
        tracing: Makes spans.
        unix: Turns the monotonic clock's nanoseconds into Unix nanoseconds.
        identities: The identifiers of a cut's outermost span, which the log names.

    Attributes:
        tracing: The same.
        unix: The same.
        told: Values that spans show, for exemplars; whoever takes them puts an empty list there.
    """

    def __init__(self, tracing: Tracing, unix: Callable[[int], int], identities: Identities) -> None:
        self.tracing = tracing
        self.unix = unix
        self.told: list[Told] = []
        self._identities = identities

    def start(
        self,
        name: str,
        parent: SpanHandle | Parent | None,
        start_ns: int,
        attributes: Mapping[str, AttributeValue],
    ) -> SpanHandle:
        """Open a span; ``start_ns`` is in Unix nanoseconds."""
        return self.tracing.begin(name, parent, start_ns, attributes, (), None)

    def start_cut(
        self, name: str, cut_id: str, parent: SpanHandle | Parent | None, start_ns: int
    ) -> SpanHandle:
        """Open a cut's outermost span, with the identifiers that lines of the log name already."""
        handle = self.tracing.start(
            name,
            parent=parent,
            start_ns=start_ns,
            attributes={"quiesce.cut_id": cut_id},
            identity=self._identities.of(cut_id),
        )
        self._identities.know(cut_id, handle.link)
        return handle

    def emit(
        self,
        name: str,
        parent: SpanHandle | Parent | None,
        at_ns: int,
        ns: int,
        outcome: str,
        attributes: Mapping[str, AttributeValue],
        links: Iterable[Link] = (),
    ) -> SpanHandle:
        """Make a span of something that took so long, and was over at that time."""
        end = self.unix(at_ns)
        return self.tracing.emit(
            name,
            parent=parent,
            start_ns=end - ns,
            end_ns=end,
            outcome=outcome,
            attributes=attributes,
            links=tuple(links),
        )

    def end_phase(
        self,
        handle: SpanHandle,
        phase: str,
        ns: int,
        at_ns: int,
        outcome: str,
        attributes: Mapping[str, AttributeValue],
    ) -> None:
        """End a phase of a save, whose time is told."""
        end = self.unix(at_ns)
        self.tracing.end(handle, end, outcome=outcome, attributes=attributes)
        label = outcome if outcome in names.ENDED else "failed"
        self.told.append((names.CHECKPOINT_PHASE_SECONDS.name, (phase, label), ns, handle, end))

    def cut(
        self,
        handle: SpanHandle,
        at_ns: int,
        events: Iterable[SpanEvent] = (),
        attributes: Mapping[str, AttributeValue] = NO_ATTRIBUTES,
    ) -> None:
        """End a span as cut off, if it is open."""
        end = self.unix(at_ns)
        self.tracing.end(handle, end, outcome="", attributes=attributes, events=tuple(events), cut_off=True)

    def cut_begun(
        self,
        name: str,
        parent: SpanHandle | Parent | None,
        begun: Begun,
        at_ns: int,
        identity: Link | None = None,
    ) -> None:
        """Tell what began, and has not ended; its span is made only now."""
        note, about = begun
        self.cut(self.tracing.begin(name, parent, self.unix(note.at_ns), about, (), identity), at_ns)


def put(table: OrderedDict[K, T], key: K, value: T, limit: int) -> T | None:
    """Put something into a bounded table, and return what was pushed out: the oldest."""
    pushed_out = table.popitem(last=False)[1] if len(table) >= limit and key not in table else None
    table[key] = value
    return pushed_out
