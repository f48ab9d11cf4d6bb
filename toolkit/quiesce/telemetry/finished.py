"""A span that has ended, as plain data: what every way out of the process is given.

Rule: a finished span is a value. It holds no reference to whoever made it, so it can wait in a queue, be
written to a file or cross to another process, and it never changes. Nothing here suspends.

Identifiers are OpenTelemetry's: a trace has 128 bits and a span 64, 0 means "none". Times are Unix
nanoseconds. Attribute keys are dotted (``quiesce.cut_id``); the catalogue lists the spans and their keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

__all__ = [
    "CUT_OFF",
    "ERROR",
    "NO_ATTRIBUTES",
    "OUTCOME",
    "AttributeValue",
    "FinishedSpan",
    "Link",
    "SpanEvent",
]

AttributeValue = str | int | float | bool
"""What an attribute of a span can be."""

Link = tuple[int, int]
"""Another span: its trace and its span identifier."""

SpanEvent = tuple[str, int, Mapping[str, AttributeValue]]
"""Something that happened while the span was open: name, Unix nanoseconds, attributes."""

OUTCOME: Final = "quiesce.outcome"
"""Attribute: how what the span covers ended (``completed``, ``failed``, ``cancelled``, …)."""

ERROR: Final = "quiesce.error"
"""Attribute of a span whose status is ``error``: what went wrong, in words."""

CUT_OFF: Final = "quiesce.cut_off"
"""Attribute of a span that was still open when the process ended: true. Its duration says nothing."""

NO_ATTRIBUTES: Final[Mapping[str, AttributeValue]] = {}
"""The attributes of a span that has none; shared, so never changed."""


class FinishedSpan(NamedTuple):
    """One span.

    Attributes:
        name: Its name in the catalogue.
        trace_id: 128 bits, never 0.
        span_id: 64 bits, never 0.
        parent_id: The parent's span identifier, in the same trace; 0 for a root.
        start_ns: Unix nanoseconds.
        end_ns: Unix nanoseconds, not before the start.
        attributes: By dotted key.
        links: Spans that this one has to do with, in whatever trace.
        events: What happened while it was open.
        status: "" (not said), ``ok``, or ``error`` when what it covers failed. A cancelled one has "" and
            the outcome ``cancelled``.
        cut_off: Whether it was open at the end of the process, which ended it here.
    """

    name: str
    trace_id: int
    span_id: int
    parent_id: int
    start_ns: int
    end_ns: int
    attributes: Mapping[str, AttributeValue] = NO_ATTRIBUTES
    links: tuple[Link, ...] = ()
    events: tuple[SpanEvent, ...] = ()
    status: str = ""
    cut_off: bool = False
