"""Counts what is reported often off the run's steps: a hook only says that it was called.

Rule: a hook here makes one tuple and appends it; the observer's own method is called with it later, by whoever wants the
numbers first: the converter's thread now and then, a scrape before it reads them, or the hook itself once so many wait, so
what waits is bounded where there is neither. A hook that runs once in a hundred milliseconds finds nothing of itself
in the processor's caches, and counting then takes ten times as long as it does in a row of hundreds. Hooks that look at a
clock, and those about single cuts, are counted at once, after what was reported before them. Nothing here suspends.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from quiesce.observers import HOOK_ERRORS
from quiesce.telemetry.metrics import MetricsObserver
from quiesce.telemetry.slots import SlotBook

__all__ = ["DEFERRED_HOOKS", "MOST_WAITING", "DeferredMetrics"]

DEFERRED_HOOKS: Final = (
    "owner_moved",
    "dataplane_operated",
    "permit_granted",
    "reply_sent",
    "rollout_ended",
    "admission_waited",
    "admission_committed",
    "train_idled",
)
"""Hooks that only add up, and do so for each group, row or call."""

_AFTER_OTHERS: Final = ("window_opened", "checkpoint_ended")
"""Hooks that look at what those have added up."""

MOST_WAITING: Final = 1_024
"""What may wait: a fifth of a millisecond's work."""

_PATIENCE_SECONDS: Final = 0.2

_Call = tuple[str, Callable[..., None], tuple[object, ...]]


class DeferredMetrics(MetricsObserver):
    """Counts as :class:`MetricsObserver` does, some of it later.

    Args:
        raised: Told of a hook that raised, as a hub is: its name, the method, the error.
        clock: Unix time in seconds.
        monotonic: Monotonic seconds.
        book: Counts slots, at once.
    """

    def __init__(
        self,
        raised: Callable[[str, Callable[..., None], BaseException], None],
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        book: SlotBook | None = None,
    ) -> None:
        super().__init__(clock=clock, monotonic=monotonic, book=book)
        self._raised = raised
        self._waiting: deque[_Call] = deque()
        self._counting = threading.Lock()
        for hook in DEFERRED_HOOKS:
            setattr(self, hook, self._later(hook, getattr(self, hook)))
        for hook in _AFTER_OTHERS:
            setattr(self, hook, partial(self._after_others, getattr(self, hook)))

    def catch_up(self) -> None:
        """Count what waits; may be called from any thread."""
        # With a limit, because a signal may have interrupted, for good, whoever is counting.
        if self._waiting and self._counting.acquire(timeout=_PATIENCE_SECONDS):
            self._count()

    def _count(self) -> None:
        """Count what waits, and let go of the lock that the caller has taken."""
        try:
            following = self._waiting.popleft
            for _ in range(len(self._waiting)):
                hook, method, args = following()
                try:
                    method(*args)
                except HOOK_ERRORS as error:
                    self._raised(hook, method, error)
        finally:
            self._counting.release()

    def _later(self, hook: str, method: Callable[..., None]) -> Callable[..., None]:
        waiting = self._waiting
        add = waiting.append

        def note(*args: object) -> None:
            add((hook, method, args))
            if len(waiting) >= MOST_WAITING and self._counting.acquire(blocking=False):
                self._count()

        return note

    def _after_others(self, method: Callable[..., None], *args: Any) -> None:  # noqa: ANN401 - whatever the hook takes
        self.catch_up()
        method(*args)
