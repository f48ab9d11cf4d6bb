"""What is written down about every mutation slot: bucket counts in a plain list, one small record in a ring.

Rule: a slot's hook takes no lock, makes no object but one tuple, measures nothing and calls nobody but
``bisect``; whatever costs more (spans, identifiers, attributes, sampling) is done by the converter, off the
loop. A record that was overwritten before anybody read it is counted: records carry a sequence number, and
:meth:`SlotRecorder.take` says how many are missing. Nothing here suspends.

The counts and the ring are changed by statements during which CPython does not switch threads (no call, no
backward jump), so slots of several loops add up and get different sequence numbers under the GIL.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

from quiesce.barrier import KINDS
from quiesce.telemetry import names
from quiesce.telemetry.histogram import NANOSECONDS, Histogram, bounds_ns

__all__ = ["KIND_LIMIT", "NEVER_HELD", "RING_SLOTS", "SlotBook", "SlotNumbers", "SlotRecord", "SlotRecorder"]

KIND_LIMIT: Final = 14
"""Kinds of slots with series of their own, the built-in ones included; further ones are counted as ``other``.
A kind costs 54 series, and a controller has 2,000."""

RING_SLOTS: Final = 1 << 15
"""Records that may wait for the converter: three seconds of 10,000 slots a second, and at most 8 MiB."""

NEVER_HELD: Final = -1
"""The hold of a slot that was given up while it still waited."""

_MASK: Final = RING_SLOTS - 1
_WAIT_BOUNDS: Final = bounds_ns(names.WAIT_BUCKETS)
_HOLD_BOUNDS: Final = bounds_ns(names.SLOT_BUCKETS)

# Where a slot's numbers lie in the one list of its kind: wait counts and their sum, hold counts and their
# sum, outcomes.
_WAIT_SUM: Final = len(_WAIT_BOUNDS) + 1
_HOLD: Final = _WAIT_SUM + 1
_HOLD_SUM: Final = _HOLD + len(_HOLD_BOUNDS) + 1
_ENDED: Final = {outcome: _HOLD_SUM + 1 + index for index, outcome in enumerate(names.ENDED)}
_COMPLETED: Final = _ENDED["completed"]


class SlotNumbers:
    """What is counted about the slots of one kind, all in one list.

    Attributes:
        cells: The list.
        wait: Waits, in nanoseconds.
        hold: Holds, in nanoseconds.
    """

    __slots__ = ("cells", "hold", "wait")

    def __init__(self) -> None:
        self.cells: list[float] = [0] * (_HOLD_SUM + 1 + len(_ENDED))
        self.wait = Histogram(names.WAIT_BUCKETS, scale=NANOSECONDS, cells=self.cells)
        self.hold = Histogram(names.SLOT_BUCKETS, scale=NANOSECONDS, cells=self.cells, start=_HOLD)

    @property
    def ended(self) -> dict[str, int]:
        """Slots by outcome."""
        return {outcome: int(self.cells[index]) for outcome, index in _ENDED.items()}


class SlotBook:
    """The numbers of every kind of slot; its two hooks count, and keep records where there is a ring for them.

    Attributes:
        numbers: By label, which is the kind or ``other``.
        added: Called with a label that is new.
        position: Sequence number of the next record.
        current: Returns the OpenTelemetry context that a slot's span belongs in; None while the application
            has not loaded OpenTelemetry.
    """

    __slots__ = ("__weakref__", "_cells", "_ring", "added", "current", "numbers", "position")

    def __init__(self) -> None:
        self.numbers: dict[str, SlotNumbers] = {}
        self.added: Callable[[str], None] | None = None
        self.position = 0
        self.current: Callable[[], object] | None = None
        self._ring: list[RawRecord | None] | None = None
        self._cells: dict[str, list[float]] = {}  # by kind; kinds past the limit share one list
        self.add_kinds(KINDS)

    @property
    def closed(self) -> int:
        """Slots that ended, given-up waits included."""
        return sum(sum(numbers.ended.values()) for numbers in self.numbers.copy().values())

    def add_kinds(self, kinds: Iterable[str]) -> None:
        """Make the numbers of further kinds of slots, at zero."""
        for kind in kinds:
            if kind not in self._cells:
                self.add_kind(kind)

    def add_kind(self, kind: str) -> str:
        """Make room for a kind, and return the label under which it is counted."""
        label = kind if len(self.numbers) < KIND_LIMIT or kind in self.numbers else names.OTHER
        # setdefault: two threads may meet here, and both must bump the same lists.
        self._cells[kind] = self.numbers.setdefault(label, SlotNumbers()).cells
        if self.added is not None:
            self.added(label)
        return label

    def label(self, kind: str) -> str:
        """Return the label under which a kind is counted."""
        return kind if kind in self.numbers else names.OTHER

    def slot_closed(self, kind: str, wait_ns: int, hold_ns: int, outcome: str, ended_ns: int) -> None:
        """Count a slot: the one hook that may be called thousands of times a second."""
        try:
            cells = self._cells[kind]
        except KeyError:
            self.add_kind(kind)
            cells = self._cells[kind]
        # Each number is bumped by itself and none is derived from others: a scrape between two bumps must
        # never see one that is taken back later, which Prometheus would read as a restart of the counter.
        if wait_ns:
            cells[bisect_left(_WAIT_BOUNDS, wait_ns)] += 1
            cells[_WAIT_SUM] += wait_ns
        else:
            cells[0] += 1
        cells[_HOLD + bisect_left(_HOLD_BOUNDS, hold_ns)] += 1
        cells[_HOLD_SUM] += hold_ns
        if outcome == "completed":
            cells[_COMPLETED] += 1
        else:
            cells[_ENDED[outcome]] += 1
        # Not a method of the recorder's that calls this one: a call costs a tenth of a slot.
        if (ring := self._ring) is not None:
            context = None if (current := self.current) is None else current()
            self.position = (position := self.position) + 1
            ring[position & _MASK] = (position, kind, wait_ns, hold_ns, outcome, ended_ns, context)

    def slot_wait_abandoned(self, kind: str, wait_ns: int, outcome: str, ended_ns: int) -> None:
        """Count a slot that was never held, and keep its record where there is a ring."""
        self.add_kinds((kind,))
        cells = self._cells[kind]
        cells[bisect_left(_WAIT_BOUNDS, wait_ns)] += 1
        cells[_WAIT_SUM] += wait_ns
        cells[_ENDED[outcome]] += 1
        if (ring := self._ring) is not None:
            context = None if self.current is None else self.current()
            self.position = (position := self.position) + 1
            ring[position & _MASK] = (position, kind, wait_ns, NEVER_HELD, outcome, ended_ns, context)


class SlotRecord(NamedTuple):
    """What a record in the ring says; there it is a plain tuple, which is cheaper to make.

    Attributes:
        sequence: Number of the slot among all.
        kind: Its kind.
        wait_ns: How long it waited.
        hold_ns: How long it was held, or :data:`NEVER_HELD`.
        outcome: How its body ended.
        ended_ns: When, by the barrier's clock.
        context: The application's OpenTelemetry context, or None where there is none.
    """

    sequence: int
    kind: str
    wait_ns: int
    hold_ns: int
    outcome: str
    ended_ns: int
    context: object


RawRecord = tuple[int, str, int, int, str, int, object]


class SlotRecorder(SlotBook):
    """Counts slots, and keeps a record of each for the converter.

    Args:
        recording: Whether it does from the beginning, or counts only until it is told to :meth:`record`.
    """

    __slots__ = ("_read",)

    def __init__(self, *, recording: bool = True) -> None:
        super().__init__()
        self._read = 0
        if recording:
            self.record()

    def record(self) -> None:
        """Keep a record of each slot from now on."""
        if self._ring is None:
            self._ring = [None] * RING_SLOTS

    @property
    def waiting(self) -> int:
        """Records that nobody has taken yet, overwritten ones included."""
        return self.position - self._read

    def take(self, limit: int, until: int) -> tuple[list[RawRecord], int]:
        """Take the oldest records; for one thread at a time.

        Args:
            limit: How many at most.
            until: Sequence number of the first that is not wanted yet.

        Returns:
            The records, in order, and how many before or between them were overwritten unread.
        """
        start, lost = self._read, 0
        if self.position - start > RING_SLOTS:
            lost = self.position - RING_SLOTS - start
            start += lost
        count = max(0, min(limit, until - start))
        at = start & _MASK
        first = min(count, RING_SLOTS - at)
        ring = self._ring
        if ring is None:
            return [], 0
        found = ring[at : at + first]
        ring[at : at + first] = [None] * first  # let go of what the records refer to
        if first < count:
            found += ring[: count - first]
            ring[: count - first] = [None] * (count - first)
        self._read = start + count
        if self.position - start <= RING_SLOTS:
            return found, lost  # type: ignore[return-value] # nobody came round: none is None
        # The writers came round meanwhile. A newer record that was met here is gone with the older one that it
        # overwrote; when its own turn comes its place is found empty, and it is counted then.
        kept = [
            record
            for sequence, record in enumerate(found, start)
            if record is not None and record[0] == sequence
        ]
        return kept, lost + count - len(kept)
