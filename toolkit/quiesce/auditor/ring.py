"""The last events of a run, in one bounded ring: what a violation shows as evidence of how it came about.

Rule: one ring for everything, so its size does not depend on how many groups there are; it is searched only when something
is wrong. Nothing here suspends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import Any, Final, NamedTuple

__all__ = ["RING_SIZE", "SHOWN", "EventRing", "RingEvent"]

RING_SIZE: Final = 512
"""Events that are kept; at a thousand groups that is the most of what an auditor costs in memory."""

SHOWN: Final = 32
"""Events that a violation shows."""


class RingEvent(NamedTuple):
    """One event: a move of a group, or of the run if it names none.

    Attributes:
        ns: When, in nanoseconds of a monotonic clock; of a move, when its slot opened.
        group_id: The group, or "".
        source: Who had it; for an event of the run, the hook.
        target: Who has it now, or what the event said.
        reason: Why.
    """

    ns: int
    group_id: str
    source: str
    target: Any
    reason: Any


class EventRing:
    """Keeps the last events.

    Args:
        size: How many.
    """

    def __init__(self, size: int = RING_SIZE) -> None:
        self._events: deque[tuple[int, str, str, Any, Any]] = deque(maxlen=size)
        self.append = self._events.append
        """Takes one event as a plain tuple; from any thread."""

    def of(self, groups: Collection[str], limit: int = SHOWN) -> list[dict[str, Any]]:
        """Return the newest events of some groups, oldest first, as JSON values; of the run if no group is named."""
        named = frozenset(groups)
        found = [
            event
            for event in map(RingEvent._make, tuple(self._events))
            if (event.group_id in named if named else not event.group_id)
        ]
        return [event._asdict() for event in found[-limit:]]

    def __len__(self) -> int:
        """How many are kept now."""
        return len(self._events)
