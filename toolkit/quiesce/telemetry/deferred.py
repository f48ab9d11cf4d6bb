"""Counts what is reported often off the run's steps: a hook only says that it was called.

Rule: a hook here appends its arguments to a queue of its own; they are counted later, many at once, by whoever wants the
numbers first: the converter's thread now and then, a scrape before it reads them, or the hook itself once so many wait, so
what waits is bounded where there is neither. Hooks that spans are made of are noted for that anyhow, and counted from those
notes. A hook that runs once in a hundred milliseconds finds nothing of itself
in the processor's caches, and counting then takes ten times as long as it does in a row of hundreds. Hooks that look at a
clock, and those about single cuts, are counted at once, after what was reported before them. Nothing here suspends.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from quiesce.observers import HOOK_ERRORS
from quiesce.telemetry.metrics import MetricsObserver
from quiesce.telemetry.slots import SlotBook
from quiesce.telemetry.spans import NOTED_HOOKS, RawNote, SpanObserver

__all__ = ["DEFERRED_HOOKS", "MOST_WAITING", "DeferredMetrics"]

DEFERRED_HOOKS: Final = {
    "owner_moved": "owners_moved",
    "dataplane_operated": "dataplane_operations",
    "permit_granted": "permits_granted",
    "reply_sent": "replies_sent",
    "rollout_ended": "rollouts_ended",
    "admission_waited": "",
    "admission_committed": "",
    "train_idled": "",
    "clear_ended": "",
}
"""Hooks that only add up, and do so for each group, row, call or batch; of each the method that counts many calls, if there
is one, which counts all that it is given or raises."""

_AFTER_OTHERS: Final = ("window_closed", "checkpoint_ended")
"""Hooks that look at what those have added up; none of them is called inside a window, where counting would prolong it."""

MOST_WAITING: Final = 1_024
"""Calls of one hook that may wait: a fifth of a millisecond's work."""

_PATIENCE_SECONDS: Final = 0.2

_Args = tuple[Any, ...]


class _Queue:
    """Calls of one hook that wait, and what counts them."""

    __slots__ = ("calls", "hook", "many", "one")

    def __init__(
        self, hook: str, one: Callable[..., None], many: Callable[[list[_Args]], None] | None
    ) -> None:
        self.hook = hook
        self.one = one
        self.many = many
        self.calls: deque[_Args] = deque()


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
        self._queues = [
            _Queue(hook, getattr(self, hook), getattr(self, many) if many else None)
            for hook, many in DEFERRED_HOOKS.items()
        ]
        self._counting = threading.Lock()
        self._gather: Callable[[], None] | None = None
        for queue in self._queues:
            setattr(self, queue.hook, self._later(queue.calls))
        for hook in _AFTER_OTHERS:
            setattr(self, hook, partial(self._after_others, getattr(self, hook)))

    def share(self, notes: SpanObserver) -> None:
        """Leave the hooks that another observer notes to it, and count them from its notes.

        Args:
            notes: The observer; it has to be subscribed with this one, or before.
        """
        shared = {queue.hook: queue for queue in self._queues if queue.hook in NOTED_HOOKS}
        for hook in shared:
            setattr(self, hook, None)  # a hub passes it over

        def count(noted: Sequence[RawNote]) -> None:
            calls: dict[str, list[_Args]] = {hook: [] for hook in shared}
            for note in noted:
                if (of_hook := calls.get(note[0])) is not None:
                    of_hook.append(note[1])
            for hook, queue in shared.items():
                if calls[hook]:
                    self._count_calls(queue, calls[hook])

        notes.count = count
        self._gather = notes.gather

    def catch_up(self) -> None:
        """Count what waits; may be called from any thread."""
        if self._gather is not None:
            self._gather()
        # With a limit, because a signal may have interrupted, for good, whoever is counting.
        if self._counting.acquire(timeout=_PATIENCE_SECONDS):
            self._count()

    def _count(self) -> None:
        """Count what waits, and let go of the lock that the caller has taken."""
        try:
            for queue in self._queues:
                following = queue.calls.popleft
                calls = [following() for _ in range(len(queue.calls))]
                if calls:
                    self._count_calls(queue, calls)
        finally:
            self._counting.release()

    def _count_calls(self, queue: _Queue, calls: list[_Args]) -> None:
        if queue.many is not None:
            try:
                queue.many(calls)
            except HOOK_ERRORS:
                pass  # nothing was counted, and which one it was is found out below
            else:
                return
        for args in calls:
            try:
                queue.one(*args)
            except HOOK_ERRORS as error:
                self._raised(queue.hook, queue.one, error)

    def _later(self, calls: deque[_Args]) -> Callable[..., None]:
        add = calls.append

        def note(*args: object) -> None:
            add(args)
            if len(calls) >= MOST_WAITING and self._counting.acquire(blocking=False):
                self._count()

        return note

    def _after_others(self, method: Callable[..., None], *args: Any) -> None:  # noqa: ANN401 - whatever the hook takes
        self.catch_up()
        method(*args)
