"""Counts what snapshot gates, cleanup and answers to generation calls report.

Rule: as :mod:`quiesce.telemetry.metrics`. These hooks are called on workers' threads. Nothing here suspends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from quiesce.telemetry import names
from quiesce.telemetry.families import Families

__all__ = ["GateMetrics"]


class GateMetrics(Families):
    """Counts gates, cleanup and replies.

    Args:
        clock: Unix time in seconds.
        monotonic: Monotonic seconds.
    """

    def __init__(
        self, *, clock: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__(clock=clock, monotonic=monotonic)
        self._gate_wait = self._histogram(names.GATE_WAIT)
        self._gate_close = self._histogram(names.GATE_CLOSE)
        self._cleanup_batch = self._histogram(names.CLEANUP_BATCH)
        self._cleanup_clear = self._histogram(names.CLEANUP_CLEAR)
        self._cleanup_keys = self._number(names.CLEANUP_KEYS)
        self._cleanup_failures = self._number(names.CLEANUP_FAILURES)
        self._reply = self._histogram(names.REPLY_SECONDS)
        self._reused = self._number(names.RESTORE_TOKENS_REUSED)

    def permit_granted(self, worker: str, sequence: int, wait_ns: int) -> None:
        """Count a permit's wait."""
        self.permits_granted([(worker, sequence, wait_ns)])

    def permits_granted(self, calls: Sequence[tuple[str, int, int]]) -> None:
        """Count the waits of permits."""
        self._gate_wait.observe_all([wait_ns for _, _, wait_ns in calls])

    def gate_closed(self, worker: str, sequence: int, epoch: str, ns: int, outcome: str) -> None:
        """Count a close, whatever it came to."""
        self._gate_close.observe(ns)

    def clear_ended(
        self,
        worker: str,
        calls: int,
        keys: int,
        ns: int,
        outcome: str,
        rollouts: Sequence[tuple[str, int]],
    ) -> None:
        """Count a batch of cleanup, or a try that failed."""
        self._cleanup_clear.observe(ns)
        if outcome == "completed":
            self._cleanup_batch.observe(calls)
            self._cleanup_keys.add(keys)
        else:
            self._cleanup_failures.add(1)

    def reply_sent(self, worker: str, ns: int) -> None:
        """Count an answer."""
        self.replies_sent([(worker, ns)])

    def replies_sent(self, calls: Sequence[tuple[str, int]]) -> None:
        """Count answers."""
        self.seen.add("engine")
        self._reply.observe_all([ns for _, ns in calls])

    def tokens_reused(self, group_id: str, tokens: int) -> None:
        """Add up tokens that were not generated again."""
        self._reused.add(tokens)
