"""Background cleanup with a fence of its own beside the gate: what cleanup under a gate's permit is measured against.

A call reserves a place before it enters the gate, and hands its keys over inside of it. One daemon thread collects
calls and clears their keys together. A checkpoint has to know about it: it pauses cleanup before it closes the gate,
waits for the clear in progress after that, and resumes after it has reopened the gate. This is a correct cleanup (tests
hold it to that), written from a description of its rules, in the most direct way that threads offer.

Rule: nothing in here is made slow on purpose; where the description leaves a choice, the cheaper one is taken. One lock
guards everything, and whoever waits is woken by a condition of its own kind: work, room or rest. Yield rule:
:meth:`OwnFenceCleanup.reserve`, :meth:`OwnFenceCleanup.wait_paused` and :meth:`OwnFenceCleanup.close` block the thread.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from quiesce.types import RowKey

__all__ = ["OwnFenceCleanup", "OwnFenceStatistics", "Reservation"]


@dataclass(frozen=True, slots=True)
class OwnFenceStatistics:
    """The state of a cleanup.

    Attributes:
        requests: Calls that handed keys over.
        batches: Clears that ended well.
        keys: Keys of those clears.
        pending: Calls that hold a place: reserved, queued, or in the clear in progress.
        queued: Calls that wait for a clear.
        peak_pending: The most that were ever pending.
        active: Calls in the clear in progress.
        paused: Whether a checkpoint holds clears back.
        failed_keys: Keys of the clear that failed.
        oldest_queued_seconds: How long the oldest queued call has been waiting.
    """

    requests: int
    batches: int
    keys: int
    pending: int
    queued: int
    peak_pending: int
    active: int
    paused: bool
    failed_keys: int
    oldest_queued_seconds: float


class Reservation:
    """A place in the queue, for one hand-over.

    Args:
        cleanup: Whose place it is.
    """

    __slots__ = ("_cleanup", "_used")

    def __init__(self, cleanup: OwnFenceCleanup) -> None:
        self._cleanup = cleanup
        self._used = False

    def submit(self, keys: Iterable[RowKey]) -> None:
        """Hand keys over; without any the place is free again. Never waits, and may be called while paused.

        Raises:
            RuntimeError: If the reservation was used already.
        """
        if self._used:
            raise RuntimeError("this reservation was used")
        self._used = True
        self._cleanup.accept(tuple(dict.fromkeys(keys)))

    def close(self) -> None:
        """Give the place back if it was not used."""
        if not self._used:
            self._used = True
            self._cleanup.accept(())


class OwnFenceCleanup:
    """Clears obsolete rows in a thread, unless a checkpoint has paused it.

    The first clear that raises ends it: the error is kept, and raised by whatever is asked of it from then on.

    Args:
        clear: Deletes rows; blocks.
        batch_size: Calls that are cleared together at most.
        max_pending: Places.
        wait_seconds: How long the oldest call waits for others to be cleared with.

    Raises:
        ValueError: If a limit makes no sense.
    """

    def __init__(
        self,
        clear: Callable[[Sequence[RowKey]], object],
        *,
        batch_size: int = 32,
        max_pending: int = 128,
        wait_seconds: float = 0.01,
    ) -> None:
        if batch_size < 1 or max_pending < batch_size or not 0 <= wait_seconds < float("inf"):
            raise ValueError("batch_size >= 1, max_pending >= batch_size and wait_seconds >= 0 are needed")
        self._clear = clear
        self._batch_size = batch_size
        self._max_pending = max_pending
        self._wait_seconds = wait_seconds
        lock = threading.Lock()
        self._work = threading.Condition(lock)
        self._room = threading.Condition(lock)
        self._rest = threading.Condition(lock)
        self._queue: deque[tuple[float, tuple[RowKey, ...]]] = deque()
        self._pending = 0
        self._active = 0
        self._epoch = 0
        self._released = 0
        self._closed = False
        self._error: Exception | None = None
        self._requests = self._batches = self._keys = self._peak_pending = self._failed_keys = 0
        self._thread = threading.Thread(target=self._drain, name="quiesce-bench-own-fence", daemon=True)
        self._thread.start()

    def reserve(self) -> Reservation:
        """Take a place; blocks while there is none. Called before the gate is entered.

        Raises:
            RuntimeError: If it is closed, or a clear has failed.
        """
        with self._room:
            while self._pending >= self._max_pending and not self._closed and self._error is None:
                self._room.wait()
            self._check()
            if self._closed:
                raise RuntimeError("cleanup is closed")
            self._pending += 1
            self._peak_pending = max(self._peak_pending, self._pending)
        return Reservation(self)

    def accept(self, keys: tuple[RowKey, ...]) -> None:
        """Take a reservation's keys, or its place back if there are none."""
        with self._work:
            if not keys:
                self._pending -= 1
                self._room.notify()
                if self._closed:
                    self._work.notify()
                return
            self._requests += 1
            self._queue.append((time.monotonic(), keys))
            if len(self._queue) in {1, self._batch_size}:  # the thread waits for the first, then for the last
                self._work.notify()

    def pause(self, epoch: int) -> None:
        """Let no further clear begin, unless that epoch was released already; returns at once."""
        with self._work:
            self._epoch = max(self._epoch, epoch)

    def wait_paused(self, epoch: int) -> None:
        """Wait for the clear in progress, unless the epoch is released.

        Raises:
            RuntimeError: If a clear has failed.
        """
        with self._rest:
            while self._active and epoch > self._released and self._error is None:
                self._rest.wait()
            self._check()

    def resume(self) -> None:
        """Release every epoch so far."""
        with self._work:
            self._released = self._epoch
            self._work.notify()
            self._rest.notify_all()

    def close(self, *, wait: bool = True) -> None:
        """Take no further reservations; optionally clear what is left, and wait for that.

        Raises:
            RuntimeError: If it is to wait while a checkpoint has paused it, or a clear has failed.
        """
        with self._work:
            if wait and self._epoch > self._released:
                raise RuntimeError("a checkpoint is being taken: resume first")
            self._closed = True
            self._work.notify()
            self._room.notify_all()
        if wait:
            self._thread.join()
            with self._work:
                self._check()

    def statistics(self) -> OwnFenceStatistics:
        """Return the counts; may be called from any thread."""
        with self._work:
            return OwnFenceStatistics(
                requests=self._requests,
                batches=self._batches,
                keys=self._keys,
                pending=self._pending,
                queued=len(self._queue),
                peak_pending=self._peak_pending,
                active=self._active,
                paused=self._epoch > self._released,
                failed_keys=self._failed_keys,
                oldest_queued_seconds=time.monotonic() - self._queue[0][0] if self._queue else 0.0,
            )

    def _check(self) -> None:
        if self._error is not None:
            raise RuntimeError("a clear has failed") from self._error

    def _drain(self) -> None:
        while batch := self._next_batch():
            keys = list(dict.fromkeys(key for _, keys in batch for key in keys))
            try:
                self._clear(keys)
            except Exception as error:  # noqa: BLE001 - whatever it is: it is kept, and raised to everybody who asks
                with self._work:
                    self._error = error
                    self._active = 0
                    self._failed_keys = len(keys)
                    self._room.notify_all()
                    self._rest.notify_all()
                return
            with self._work:
                self._active = 0
                self._pending -= len(batch)
                self._batches += 1
                self._keys += len(keys)
                self._room.notify(len(batch))
                self._rest.notify_all()

    def _next_batch(self) -> list[tuple[float, tuple[RowKey, ...]]]:
        """Wait until a batch is due and nothing is paused; an empty one means that this is the end."""
        with self._work:
            while True:
                due = self._due_in()
                if due is not None and due <= 0:
                    break
                if self._closed and not self._pending:
                    return []
                self._work.wait(due)
            batch = [self._queue.popleft() for _ in range(min(self._batch_size, len(self._queue)))]
            self._active = len(batch)
            return batch

    def _due_in(self) -> float | None:
        """Return the seconds until the next batch; None if something else has to happen first."""
        if not self._queue or self._epoch > self._released:
            return None
        if len(self._queue) >= self._batch_size or self._closed:
            return 0.0
        return self._queue[0][0] + self._wait_seconds - time.monotonic()
