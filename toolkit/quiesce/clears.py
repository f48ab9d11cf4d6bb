"""Clearing rows that nobody owns any more, in the background.

Whoever ends a group's ownership hands its row keys over in the same await-free step: an append to an unbounded deque,
which never waits. One task clears them in batches in a thread of its own. A failed clear is tried again, then counted
and kept by name: it costs nothing but extra rows, which the inventory can explain.

Rule: a hand-over never waits, and a key is never forgotten. Yield rule: only :meth:`RowClears.drain` and the task suspend.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from quiesce.barrier import detached
from quiesce.signals import Changed
from quiesce.threads import DaemonExecutor

if TYPE_CHECKING:
    from collections.abc import Iterable

    from quiesce.types import RowKey

__all__ = ["ClearStatistics", "RowClears"]

_LOG: Final = logging.getLogger("quiesce.clears")

BATCH_KEYS: Final = 1024
"""Keys of one clear; bounds how long a single clear holds the store's writer lock."""

MAX_TRIES: Final = 3
"""How often a clear is tried before its keys are given up as extra rows."""


class _Clearable(Protocol):
    def clear(self, keys: Iterable[RowKey]) -> int: ...


@dataclass(frozen=True, slots=True)
class ClearStatistics:
    """The state of background clearing.

    Attributes:
        pending: Keys that wait, the batch in progress included.
        cleared: Keys cleared.
        failures: Clears that raised.
        abandoned: Keys whose clear failed too often; their rows are extras.
    """

    pending: int
    cleared: int
    failures: int
    abandoned: int


class RowClears:
    """Clears rows of one data plane in the background.

    Args:
        rows: The data plane.
    """

    def __init__(self, rows: _Clearable) -> None:
        self._rows = rows
        self._queue: deque[tuple[RowKey, int]] = deque()
        self._changed = Changed()
        self._executor = DaemonExecutor("quiesce-clears", 1)
        self._task: asyncio.Task[None] | None = None
        self._busy: tuple[tuple[RowKey, int], ...] = ()
        self._cleared = 0
        self._failures = 0
        self._abandoned: list[RowKey] = []

    def start(self) -> None:
        """Start the clearing task on the running loop."""
        if self._task is None:
            self._task = detached(self._run(), name="quiesce-clears")

    def add(self, keys: Iterable[RowKey]) -> None:
        """Hand rows over; never waits."""
        self._queue.extend((key, 1) for key in keys)
        self._changed.notify()

    def outstanding(self) -> tuple[RowKey, ...]:
        """Return keys whose rows may still be there although nobody owns them: queued, in progress or given up."""
        return (
            *(key for key, _ in self._queue),
            *(key for key, _ in self._busy),
            *self._abandoned,
        )

    async def drain(self, timeout_seconds: float) -> bool:
        """Wait until nothing is pending, up to a deadline.

        Returns:
            Whether everything was cleared or given up in time.
        """
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._changed.wait_until(lambda: not self._queue and not self._busy)
        except TimeoutError:
            return False
        return True

    async def close(self, timeout_seconds: float = 5.0) -> None:
        """Drain within a deadline, then stop; what is left stays as extra rows."""
        if self._task is None:
            return
        await self.drain(timeout_seconds)
        self._task.cancel()
        await asyncio.wait({self._task})
        self._task = None
        self._executor.shutdown(wait=False)

    def statistics(self) -> ClearStatistics:
        """Return the counts; may be called from any thread."""
        return ClearStatistics(
            len(self._queue) + len(self._busy), self._cleared, self._failures, len(self._abandoned)
        )

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._changed.wait_until(lambda: bool(self._queue))
            self._busy = tuple(self._queue.popleft() for _ in range(min(BATCH_KEYS, len(self._queue))))
            try:
                await loop.run_in_executor(self._executor, self._rows.clear, [key for key, _ in self._busy])
            except Exception:  # noqa: BLE001 - whatever a backend raises: the keys are kept, and tried again
                self._failures += 1
                _LOG.exception("clearing %d rows failed, the first is %s", len(self._busy), self._busy[0][0])
                for key, tries in self._busy:
                    if tries < MAX_TRIES:
                        self._queue.append((key, tries + 1))
                    else:
                        self._abandoned.append(key)
            else:
                self._cleared += len(self._busy)
            self._busy = ()
            self._changed.notify()
