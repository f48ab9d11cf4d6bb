"""A data plane whose clears take as long as one likes, and that keeps an exact account of every key.

A put and a clear are one remote call each: the calling thread sleeps, without the interpreter's lock, however many keys
there are. Calls of different threads run beside each other, as against a store with room for all of them.

Rule: every key is staged once, becomes obsolete once and has to be cleared once, and nothing may be put or cleared while a
checkpoint's window is open; whatever breaks that is counted, not raised, so that a broken way of clearing is seen to the
end. Yield rule: :meth:`ReplyPlane.put`, :meth:`ReplyPlane.clear` and :meth:`ReplyPlane.window` block the thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from quiesce.types import RowKey

__all__ = ["Account", "ReplyPlane"]


@dataclass(frozen=True, slots=True)
class Account:
    """What became of every key.

    Attributes:
        obsolete: Chunk keys whose final row was put.
        cleared: Of these, cleared.
        lost: Of these, still there; and final rows and chunk rows in use that are gone.
        twice: Keys in a clear that were cleared already.
        clears: Clears.
        peak_backlog: The most keys that were ever obsolete and not cleared.
        in_window: Puts and clears that ran while a window was open.
    """

    obsolete: int
    cleared: int
    lost: int
    twice: int
    clears: int
    peak_backlog: int
    in_window: int

    @property
    def keys_per_clear(self) -> float:
        """How many keys a clear had on average; 0 without any."""
        return (self.cleared + self.twice) / self.clears if self.clears else 0.0


class ReplyPlane:
    """Rows in memory, behind two slow calls.

    Args:
        put_seconds: How long a put takes.
        clear_seconds: How long a clear takes.
    """

    def __init__(self, put_seconds: float, clear_seconds: float) -> None:
        self.put_seconds = put_seconds
        self.clear_seconds = clear_seconds
        self._lock = threading.Lock()
        self._rows: set[RowKey] = set()
        self._obsolete: set[RowKey] = set()
        self._cleared: set[RowKey] = set()
        self._missing = 0
        self._twice = 0
        self._clears = 0
        self._peak_backlog = 0
        self._at_work = 0
        self._window = False
        self._in_window = 0
        self._took: list[tuple[float, float]] = []

    def stage(self, keys: Sequence[RowKey]) -> None:
        """Have chunk rows, as a call stages them while it generates; takes no time."""
        with self._lock:
            self._rows.update(keys)

    def put(self, final: RowKey, obsolete: Sequence[RowKey]) -> None:
        """Put a call's final row, which makes its chunk rows obsolete."""
        self._begin()
        time.sleep(self.put_seconds)
        with self._lock:
            self._at_work -= 1
            self._rows.add(final)
            self._obsolete.update(obsolete)
            self._peak_backlog = max(self._peak_backlog, len(self._obsolete) - len(self._cleared))

    def clear(self, keys: Sequence[RowKey]) -> None:
        """Delete rows."""
        since = time.perf_counter()
        self._begin()
        time.sleep(self.clear_seconds)
        with self._lock:
            self._took.append((since, time.perf_counter()))
            self._at_work -= 1
            self._clears += 1
            for key in keys:
                if key in self._cleared:
                    self._twice += 1
                elif key in self._obsolete:
                    self._cleared.add(key)
                else:  # somebody still needs it
                    self._missing += 1
                self._rows.discard(key)

    @contextmanager
    def window(self) -> Iterator[None]:
        """Be saved: whatever is put or cleared until the end is counted."""
        with self._lock:
            self._window = True
            self._in_window += self._at_work
        try:
            yield
        finally:
            with self._lock:
                self._window = False

    def ended_between(self, since: float, until: float) -> tuple[float, ...]:
        """Return how long each clear took that ended in that time, in seconds; by the performance counter."""
        with self._lock:
            return tuple(end - begin for begin, end in self._took if since < end <= until)

    def account(self) -> Account:
        """Return what became of every key so far."""
        with self._lock:
            return Account(
                obsolete=len(self._obsolete),
                cleared=len(self._cleared),
                lost=len(self._obsolete) - len(self._cleared) + self._missing,
                twice=self._twice,
                clears=self._clears,
                peak_backlog=self._peak_backlog,
                in_window=self._in_window,
            )

    def _begin(self) -> None:
        with self._lock:
            self._at_work += 1
            self._in_window += self._window
