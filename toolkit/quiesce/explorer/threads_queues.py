"""What stands in for ``queue`` while threads are explored. Each operation is one step, as a whole.

Rule and yield rule: as :mod:`quiesce.explorer.threads_standins`.
"""

from __future__ import annotations

import heapq
import queue
from typing import Any, Final, Generic, TypeVar

from quiesce.explorer.threads_standins import Primitive, StandIn

__all__ = ["QUEUE", "LifoQueue", "PriorityQueue", "Queue", "SimpleQueue"]

T = TypeVar("T")


class SimpleQueue(Primitive, Generic[T]):
    """As ``queue.SimpleQueue``."""

    def __init__(self) -> None:
        super().__init__()
        self._items: list[T] = []

    def put(self, item: T, block: bool = True, timeout: float | None = None) -> None:  # noqa: FBT001, FBT002 - as the original
        """Add an item; never waits."""
        self._run.point(f"put into {self._label}")
        self._run.change(self._key)
        self._insert(item)
        self._run.point(f"go on, {self._label} filled")

    def put_nowait(self, item: T) -> None:
        """Add an item."""
        self.put(item, block=False)

    def get(self, block: bool = True, timeout: float | None = None) -> T:  # noqa: FBT001, FBT002 - as the original
        """Return and remove an item.

        Raises:
            queue.Empty: If none came in time.
            ValueError: If the timeout is negative.
        """
        if block and timeout is not None and timeout < 0:
            raise ValueError("'timeout' must be a non-negative number")
        if block:
            deadline = None if timeout is None else self._run.deadline(timeout)
            self._run.point(f"get from {self._label}", self._filled, deadline)
        else:
            self._run.point(f"try to get from {self._label}")
        self._run.change(self._key)
        if not self._items:
            raise queue.Empty
        return self._remove()

    def get_nowait(self) -> T:
        """Return and remove an item, if there is one."""
        return self.get(block=False)

    def empty(self) -> bool:
        """Return whether nothing is queued."""
        return self.qsize() == 0

    def qsize(self) -> int:
        """Return how many are queued."""
        self._run.point(f"look at {self._label}")
        self._run.read(self._key)
        return len(self._items)

    def _filled(self) -> bool:
        return bool(self._items)

    def _insert(self, item: T) -> None:
        self._items.append(item)

    def _remove(self) -> T:
        return self._items.pop(0)

    def why(self) -> str:
        """Return how full it is."""
        return ", which is empty," if not self._items else ", which is full,"


class Queue(SimpleQueue[T]):
    """As ``queue.Queue``."""

    def __init__(self, maxsize: int = 0) -> None:
        super().__init__()
        self.maxsize = maxsize
        self.unfinished_tasks = 0

    def put(self, item: T, block: bool = True, timeout: float | None = None) -> None:  # noqa: FBT001, FBT002 - as the original
        """Add an item.

        Raises:
            queue.Full: If there was no room in time.
            ValueError: If the timeout is negative.
        """
        if self.maxsize > 0 and block and timeout is not None and timeout < 0:
            raise ValueError("'timeout' must be a non-negative number")
        if block:
            deadline = None if timeout is None else self._run.deadline(timeout)
            self._run.point(f"put into {self._label}", self._roomy, deadline)
        else:
            self._run.point(f"try to put into {self._label}")
        self._run.change(self._key)
        if not self._roomy():
            raise queue.Full
        self._insert(item)
        self.unfinished_tasks += 1
        self._run.point(f"go on, {self._label} filled")

    def get(self, block: bool = True, timeout: float | None = None) -> T:  # noqa: FBT001, FBT002 - as the original
        """Return and remove an item; see :meth:`SimpleQueue.get`."""
        item = super().get(block, timeout)
        if self.maxsize > 0:
            self._run.point(f"go on, {self._label} has room")
        return item

    def full(self) -> bool:
        """Return whether there is no room."""
        return 0 < self.maxsize <= self.qsize()

    def task_done(self) -> None:
        """Tell that an item was dealt with.

        Raises:
            ValueError: If that was told too often.
        """
        self._run.point(f"finish an item of {self._label}")
        self._run.change(self._key)
        if self.unfinished_tasks == 0:
            raise ValueError("task_done() called too many times")
        self.unfinished_tasks -= 1
        self._run.point(f"go on, an item of {self._label} finished")

    def join(self) -> None:
        """Wait until every item was dealt with."""
        self._run.point(f"join {self._label}", self._finished)
        self._run.read(self._key)

    def _roomy(self) -> bool:
        return self.maxsize <= 0 or len(self._items) < self.maxsize

    def _finished(self) -> bool:
        return self.unfinished_tasks == 0


class LifoQueue(Queue[T]):
    """As ``queue.LifoQueue``."""

    def _remove(self) -> T:
        return self._items.pop()


class PriorityQueue(Queue[T]):
    """As ``queue.PriorityQueue``."""

    _items: list[Any]

    def _insert(self, item: T) -> None:
        heapq.heappush(self._items, item)

    def _remove(self) -> T:
        first: T = heapq.heappop(self._items)
        return first


QUEUE: Final = StandIn(
    queue,
    {"SimpleQueue": SimpleQueue, "Queue": Queue, "LifoQueue": LifoQueue, "PriorityQueue": PriorityQueue},
    {"_PySimpleQueue"},
)
"""In place of ``queue``; ``Empty`` and ``Full`` are the original ones."""
