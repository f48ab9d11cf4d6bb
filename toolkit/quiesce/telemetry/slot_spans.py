"""Spans of ordinary mutation slots, as columns: what thousands of them a second are kept in on their way out.

Rule: a slot that nothing happened to (it did not wait, it completed, no window met it, nothing is its parent)
differs from its neighbours in identifiers and times alone. So its span is two numbers in a list and a number for
the rest, which is made once for its kind; its identifiers are drawn for the whole batch in one piece.
:class:`SlotSpans` is all the same a sequence of :class:`~quiesce.telemetry.finished.FinishedSpan`, which are made
when somebody asks for them: a sink may treat it as any batch. Those that encode spans by the thousand read the
columns. Nothing here suspends.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Final, NamedTuple, SupportsIndex, TypeVar, cast, overload

from quiesce.telemetry.finished import OUTCOME, FinishedSpan, Link

if TYPE_CHECKING:
    from collections.abc import Callable

    from quiesce.telemetry.finished import AttributeValue

__all__ = [
    "IDS_BYTES",
    "MOST_SHAPES",
    "PlainColumns",
    "SlotColumns",
    "SlotShape",
    "SlotSpans",
    "SpanParts",
    "parts_of",
]

IDS_BYTES: Final = 24
"""Bytes of a span's identifiers: 16 of its trace, 8 of its own, each with the most significant byte first."""

MOST_SHAPES: Final = 255
"""Kinds of slots that have a shape; the number of one is a byte."""

_T = TypeVar("_T")
_TRACE_BYTES: Final = 16
_SLOT: Final = "quiesce.slot"
_ZERO: Final = bytes(8)

PlainColumns = tuple[list[tuple[str, dict[str, "AttributeValue"], str]], bytes, bytes, bytes]
"""The columns as plain values, for another process: shapes, the number of each span's, times (start and end of each, Unix
nanoseconds in 8 bytes, the least significant first), identifiers."""


class SlotShape(NamedTuple):
    """What the spans of slots of one kind have in common.

    Attributes:
        name: The spans' name.
        attributes: Their attributes; one dictionary, which nobody changes.
        status: Their status.
    """

    name: str
    attributes: dict[str, AttributeValue]
    status: str


class _Made(Sequence[FinishedSpan]):
    """A sequence of spans that are made when they are asked for."""

    __slots__ = ()

    def __iter__(self) -> Iterator[FinishedSpan]:
        raise NotImplementedError

    @overload
    def __getitem__(self, index: SupportsIndex) -> FinishedSpan: ...

    @overload
    def __getitem__(self, index: slice) -> list[FinishedSpan]: ...

    def __getitem__(self, index: SupportsIndex | slice) -> FinishedSpan | list[FinishedSpan]:
        """Return one span, or some of them."""
        return list(self)[index]


class SlotSpans(_Made):
    """A batch of such spans; a value, which does not change.

    Args:
        shapes: What they may have in common.
        which: Of each span, the number of its shape.
        times: Start and end of each, one after the other, in Unix nanoseconds.
        ids: Trace and span identifier of each, :data:`IDS_BYTES` together.
    """

    __slots__ = ("ids", "shapes", "times", "which")

    def __init__(self, shapes: Sequence[SlotShape], which: bytes, times: array[int], ids: bytes) -> None:
        self.shapes = shapes
        self.which = which
        self.times = times
        self.ids = ids

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self.which)

    def __iter__(self) -> Iterator[FinishedSpan]:
        """Make them, one after the other."""
        shapes, ids, times = self.shapes, self.ids, iter(self.times)
        number = int.from_bytes
        for index, (which, start, end) in enumerate(zip(self.which, times, times, strict=True)):
            name, attributes, status = shapes[which]
            at = index * IDS_BYTES
            middle = at + _TRACE_BYTES
            trace_id, span_id = number(ids[at:middle], "big"), number(ids[middle : at + IDS_BYTES], "big")
            yield FinishedSpan(name, trace_id, span_id, 0, start, end, attributes, (), (), status)

    def link(self, index: int) -> Link:
        """Return the identifiers of one span."""
        at = index * IDS_BYTES
        middle = at + _TRACE_BYTES
        number = int.from_bytes
        return number(self.ids[at:middle], "big"), number(self.ids[middle : at + IDS_BYTES], "big")

    def plain(self) -> PlainColumns:
        """Return the columns as values that ``marshal`` takes."""
        times = self.times
        if sys.byteorder == "big":
            times = array("q", times)
            times.byteswap()
        shapes = [(shape.name, shape.attributes, shape.status) for shape in self.shapes]
        return shapes, self.which, times.tobytes(), self.ids


class SlotColumns:
    """Where spans are collected; belongs to one thread.

    Args:
        draw: Draws so many bits.

    Attributes:
        numbers: Number of the shape of each kind that has one.
        which: As :class:`SlotSpans` has it, of the batch that is being collected.
        times: As above.
    """

    __slots__ = ("_draw", "_shapes", "numbers", "times", "which")

    def __init__(self, draw: Callable[[int], int]) -> None:
        self._draw = draw
        self._shapes: list[SlotShape] = []
        self.numbers: dict[str, int] = {}
        self.which = bytearray()
        self.times = array("q")

    def number(self, kind: str) -> int | None:
        """Return the number of a kind's shape, made if need be; None once there are too many."""
        known = self.numbers.get(kind)
        if known is not None or len(self._shapes) >= MOST_SHAPES:
            return known
        self._shapes.append(SlotShape(_SLOT, {"quiesce.kind": kind, OUTCOME: "completed"}, "ok"))
        self.numbers[kind] = len(self._shapes) - 1
        return self.numbers[kind]

    def take(self) -> SlotSpans | None:
        """Return what was collected, if there is anything."""
        if not self.which:
            return None
        which, times = bytes(self.which), self.times
        self.which, self.times = bytearray(), array("q")
        size = len(which) * IDS_BYTES
        ids = _ZERO
        while _ZERO in ids:  # an identifier must not be 0; this many zeros are drawn once in an eternity
            ids = self._draw(size * 8).to_bytes(size, "big")
        return SlotSpans(tuple(self._shapes), which, times, ids)


class SpanParts(_Made):
    """Several batches as one.

    Args:
        parts: The batches, in order.
    """

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[Sequence[FinishedSpan]]) -> None:
        self.parts = parts

    def __len__(self) -> int:
        """Return how many spans there are."""
        return sum(map(len, self.parts))

    def __iter__(self) -> Iterator[FinishedSpan]:
        """Return the spans, one after the other."""
        return chain.from_iterable(self.parts)

    @classmethod
    def of(cls, parts: Sequence[Sequence[FinishedSpan]]) -> Sequence[FinishedSpan]:
        """Return batches as one, in the simplest way that there is."""
        if len(parts) == 1:
            return parts[0]
        if all(isinstance(part, list) for part in parts):
            return list(chain.from_iterable(parts))
        return cls(parts)


def parts_of(batch: Iterable[_T]) -> Iterable[Iterable[_T]]:
    """Return the batches that a batch consists of, for whoever reads columns."""
    return cast("Iterable[Iterable[_T]]", batch.parts) if isinstance(batch, SpanParts) else (batch,)
