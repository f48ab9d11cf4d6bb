"""Clearing rows that nobody owns any more, in the background, under a permit of the snapshot gate.

==============  ==================================  ===================================================
who             waits for                           unblocked by
==============  ==================================  ===================================================
``submit``      room among the queued calls         the thread taking a batch; the cleanup's end
``hand_over``   nothing
the thread      keys, then more keys for a while    the calls above
the thread      a permit                            the gate's reopening
a checkpoint    the clear under way, if there is    the permit's release
==============  ==================================  ===================================================

A clear holds a permit of the gate. So a checkpoint, which closes it, waits for the clear under way and holds the next one
back; that is all the fence there is, and checkpoint code does not know that cleanup exists. A batch is made once the permit
is there, of what has been queued by then.

Rule: what was taken is queued, in a batch, given up or cleared: never in two of these, never in none. A lost clear costs
nothing but extra rows. Yield rule: ``submit`` blocks a worker's thread, outside of every gate; ``hand_over`` never waits, so
that it can be part of a slot's await-free step; only ``drain`` suspends.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from quiesce.barrier import require_no_cut
from quiesce.errors import (
    CleanupClosedError,
    GateRetiredError,
    LockOrderError,
    PermitTimeoutError,
    WouldBlockLoopError,
)
from quiesce.observers import Hub, default_hub
from quiesce.snapshot_gate import holds_permit, on_a_loop
from quiesce.threads import DaemonExecutor

if TYPE_CHECKING:
    from quiesce.snapshot_gate import Permit, SnapshotGate
    from quiesce.types import RowKey

__all__ = ["BackgroundCleanup", "CleanupStatistics"]

_LOG: Final = logging.getLogger("quiesce.cleanup")

CLEAR_KEYS: Final = 1024
"""Keys of one clear, at most: bounds how long it holds its permit, and the store's writer lock."""

RETRY_PAUSE_SECONDS: Final = 0.1
"""Pause before a failed clear is tried again: what ails a store for a moment should not cost all its tries."""


@dataclass(frozen=True, slots=True)
class CleanupStatistics:
    """The state of a background cleanup.

    Attributes:
        worker: Whose it is; its gate's label.
        pending_calls: Calls that wait, those of the batch in progress included.
        pending_keys: Their keys.
        cleared: Keys cleared.
        batches: Clears that worked.
        failures: Clears that raised.
        abandoned: Keys that were given up; their rows are extras.
        oldest_queued_seconds: How long the oldest call has waited to be taken.
    """

    worker: str
    pending_calls: int
    pending_keys: int
    cleared: int
    batches: int
    failures: int
    abandoned: int
    oldest_queued_seconds: float


@dataclass(frozen=True, slots=True)
class _Call:
    keys: tuple[RowKey, ...]
    at_ns: int
    submitted: bool  # and so counted against the bound


@dataclass(slots=True)
class _Batch:
    calls: tuple[_Call, ...]
    keys: tuple[RowKey, ...]  # each once
    tries: int = 0
    busy: bool = True  # being cleared; otherwise it is to be tried again


class BackgroundCleanup:
    """Clears the keys of many calls together, in a thread of its own.

    Args:
        gate: Each clear holds a permit of it.
        clear: Deletes the rows of keys; absent ones are passed over.
        batch_size: Calls of one clear, at most.
        linger_seconds: A batch that is not full is cleared once nothing more has come for so long.
        max_pending: Submitted calls that may be queued before a submitter has to wait.
        max_tries: How often a clear is tried before its keys are given up.
        hub: Where ``clear_started`` and ``clear_ended`` are reported.
        clock: Monotonic nanoseconds.

    Raises:
        ValueError: If a limit is none.
    """

    def __init__(
        self,
        gate: SnapshotGate,
        clear: Callable[[Sequence[RowKey]], object],
        *,
        batch_size: int = 32,
        linger_seconds: float = 0.01,
        max_pending: int = 128,
        max_tries: int = 3,
        hub: Hub | None = None,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        for name, value in (
            ("batch_size", batch_size),
            ("max_pending", max_pending),
            ("max_tries", max_tries),
        ):
            if value < 1:
                message = f"{name} is at least 1, not {value}"
                raise ValueError(message)
        if not (linger_seconds >= 0 and math.isfinite(linger_seconds)):
            message = f"linger_seconds is a finite number of seconds, not {linger_seconds}"
            raise ValueError(message)
        self.worker = gate.worker
        self._gate = gate
        self._clear = clear
        self._batch_size = batch_size
        self._linger_seconds = linger_seconds
        self._max_pending = max_pending
        self._max_tries = max_tries
        self._hub = default_hub() if hub is None else hub
        self._clock = clock
        self._process = os.getpid()
        self._thread: threading.Thread | None = None
        # All that follows is changed under one lock, which is never held while anything else is waited for. Reentrant,
        # because collecting garbage may finalize a rollout that hands its rows over right in here.
        self._lock = threading.RLock()
        self._work = threading.Condition(self._lock)  # something came, or the end did
        self._blocked: deque[tuple[int, threading.Event]] = deque()  # who waits for room, by ticket
        self._idle = threading.Condition(self._lock)  # a batch was cleared or given up
        self._calls: deque[_Call] = deque()
        self._queued_keys = 0
        self._came = False  # since the thread last looked
        self._submitted = 0
        self._taken = 0
        self._batch: _Batch | None = None
        self._cleared = 0
        self._batches = 0
        self._failures = 0
        self._abandoned: list[RowKey] = []
        self._closed_because: str | None = None
        self._over = False
        self._hub.attach("cleanup", self)

    # ------------------------------------------------------------------------------------------------ taking keys

    def submit(self, keys: Iterable[RowKey]) -> None:
        """Queue the keys of a finishing call; for worker threads, after their permit.

        The keys are queued at once. Then the call waits until fewer than ``max_pending`` submitted calls are queued before
        it, or the cleanup ends; so many waiting calls still make full batches, and one that is interrupted loses nothing.

        Args:
            keys: Copied; without any, nothing happens.

        Raises:
            LockOrderError: If this thread holds a permit, or its context a live cut: a checkpoint would wait for this call,
                and this call for the checkpoint.
            WouldBlockLoopError: If it would have to wait in the thread of a running event loop.
            CleanupClosedError: If nobody will clear them: the cleanup was closed, or this is a forked child.
        """
        require_no_cut("a submission to cleanup")
        if holds_permit():
            raise LockOrderError("a submission to cleanup", "a permit of this thread")
        self._require_process()
        owned = tuple(keys)
        if not owned:
            return
        with self._lock:
            if self._closed_because is not None:
                raise CleanupClosedError(self.worker, self._closed_because)
            room = self._taken + self._max_pending - self._submitted
            if room < 1 and on_a_loop():
                raise WouldBlockLoopError("a submission to cleanup", threading.current_thread().name)
            self._append(owned, submitted=True)
            if self._submitted <= self._taken + self._max_pending:
                return
            # An event for each, so that a batch wakes only those that have room now: all of them at once would fight
            # for the interpreter just while a checkpoint waits for that batch.
            turn = threading.Event()
            self._blocked.append((self._submitted, turn))
        turn.wait()

    def hand_over(self, keys: Iterable[RowKey]) -> None:
        """Queue keys without waiting, however many are queued; for the event loop, inside a slot's await-free step.

        After the end of the cleanup they are kept by name, as given up: whoever ends an owner's hold on its rows must not
        fail half-way.

        Args:
            keys: Copied; without any, nothing happens.

        Raises:
            CleanupClosedError: In a forked child.
        """
        self._require_process()
        owned = tuple(keys)
        if not owned:
            return
        with self._lock:
            if self._over:
                self._abandoned += owned
            else:
                self._append(owned, submitted=False)

    def _append(self, keys: tuple[RowKey, ...], *, submitted: bool) -> None:
        now = self._clock()
        for at in range(0, len(keys), CLEAR_KEYS):
            self._calls.append(_Call(keys[at : at + CLEAR_KEYS], now, submitted))
            self._submitted += submitted
        self._queued_keys += len(keys)
        self._came = True
        self._work.notify()

    def _require_process(self) -> None:
        # First of all: a lock that a thread held when this process was forked is never released in the child.
        if os.getpid() != self._process:
            raise CleanupClosedError(
                self.worker, f"process {os.getpid()} was forked off {self._process}, whose thread clears"
            )

    # --------------------------------------------------------------------------------------------------- clearing

    def start(self) -> None:
        """Start the thread; once it runs, nothing.

        Raises:
            CleanupClosedError: If the cleanup was closed, or this is a forked child.
        """
        self._require_process()
        with self._lock:
            if self._closed_because is not None:
                raise CleanupClosedError(self.worker, self._closed_because)
            if self._thread is not None:
                return
            self._thread = threading.Thread(
                target=self._run, name=f"quiesce-cleanup-{self.worker}", daemon=True
            )
        self._thread.start()

    def _run(self) -> None:
        try:
            while self.step(block=True):
                pass
        except BaseException as error:
            with self._lock:
                if self._batch is not None:
                    self._batch.busy = False
            self._end(f"its thread ended with {error!r}")
            raise

    def step(self, *, block: bool) -> bool:
        """Clear one batch, or try once more to clear the last one; by one thread at a time.

        Args:
            block: Whether to wait for keys, for more keys, and for the gate. Otherwise what is queued is cleared if the
                gate is open.

        Returns:
            Whether to step again: with ``block`` until the cleanup has ended, otherwise until nothing more can be done now.
        """
        if not self._gathered(block=block):
            return False
        try:
            with self._gate.permit(None if block else 0.0) as permit:
                batch = self._take()
                if batch is not None:
                    self._clear_batch(batch, permit)
        except PermitTimeoutError:
            return False
        except GateRetiredError as error:
            self._end(str(error))
            return False
        return True

    def _gathered(self, *, block: bool) -> bool:
        """Wait for keys, and for more to come with them; return whether there are any, and they are to be cleared."""
        with self._lock:
            if block and self._batch is not None:
                self._work.wait_for(self._ending, RETRY_PAUSE_SECONDS)
            elif block:
                self._work.wait_for(lambda: self._calls or self._ending())
                while len(self._calls) < self._batch_size and not self._ending():
                    self._came = False
                    if not self._work.wait_for(lambda: self._came or self._ending(), self._linger_seconds):
                        break
            return not self._nothing_pending()

    def _ending(self) -> bool:
        return self._closed_because is not None

    def _take(self) -> _Batch | None:
        """Take the batch that is to be tried again, or a new one; None if it was given up meanwhile."""
        with self._lock:
            if self._batch is None and self._calls:
                calls = [self._calls.popleft()]
                size = len(calls[0].keys)
                while self._calls and len(calls) < self._batch_size:
                    size += len(self._calls[0].keys)
                    if size > CLEAR_KEYS:
                        break
                    calls.append(self._calls.popleft())
                keys = [key for call in calls for key in call.keys]
                self._queued_keys -= len(keys)
                self._taken += sum(call.submitted for call in calls)
                self._batch = _Batch(tuple(calls), tuple(dict.fromkeys(keys)))
                self._wake_up_to(self._taken + self._max_pending)
            elif self._batch is not None:
                self._batch.busy = True
            return self._batch

    def _wake_up_to(self, ticket: int) -> None:
        """With the lock held: let the submissions up to that ticket go on."""
        while self._blocked and self._blocked[0][0] <= ticket:
            self._blocked.popleft()[1].set()

    def _clear_batch(self, batch: _Batch, permit: Permit) -> None:
        if self._hub.clear_started:
            self._hub.fire("clear_started", self.worker, permit.sequence, len(batch.keys))
        since = self._clock()
        try:
            self._clear(batch.keys)
        except Exception:  # noqa: BLE001 - whatever a backend raises: the keys are kept, and tried again
            outcome = "failed"
            _LOG.exception(
                "cleanup of worker %s: try %d of %d to clear %d rows failed, the first is %s",
                self.worker,
                batch.tries + 1,
                self._max_tries,
                len(batch.keys),
                batch.keys[0].encode(),
            )
        else:
            outcome = "completed"
        took = self._clock() - since
        self._settle(batch, cleared=outcome == "completed")
        if self._hub.clear_ended:
            rollouts = tuple(dict.fromkeys((key.group_id, key.attempt) for key in batch.keys))
            self._hub.fire(
                "clear_ended", self.worker, len(batch.calls), len(batch.keys), took, outcome, rollouts
            )

    def _settle(self, batch: _Batch, *, cleared: bool) -> None:
        with self._lock:
            batch.tries += 1
            if cleared:
                self._cleared += len(batch.keys)
                self._batches += 1
            else:
                self._failures += 1
                if batch.tries < self._max_tries and not self._over:
                    batch.busy = False  # it stays, and is tried again
                    return
                self._abandoned += batch.keys
            self._batch = None
            self._idle.notify_all()

    # ------------------------------------------------------------------------------------------------ looking, ending

    def outstanding(self) -> tuple[RowKey, ...]:
        """Return keys whose rows may still be there although nobody owns them: queued, in progress or given up."""
        self._require_process()
        with self._lock:
            waiting = [key for call in tuple(self._calls) for key in call.keys]
            busy = () if self._batch is None else self._batch.keys
            return tuple(dict.fromkeys((*busy, *waiting, *self._abandoned)))

    async def drain(self, timeout_seconds: float) -> bool:
        """Wait until nothing is queued or in progress, up to a deadline.

        Returns:
            Whether everything was cleared or given up in time.

        Raises:
            LockOrderError: If a live cut is held.
        """
        require_no_cut("a drain of cleanup")
        self._require_process()
        executor = DaemonExecutor(f"quiesce-drain-{self.worker}", 1)
        left = threading.Event()
        try:
            return await asyncio.get_running_loop().run_in_executor(
                executor, functools.partial(self._wait_idle, timeout_seconds, left)
            )
        finally:
            left.set()
            with self._lock:
                self._idle.notify_all()
            executor.shutdown(wait=False)

    def _wait_idle(self, timeout_seconds: float, left: threading.Event) -> bool:
        with self._lock:
            self._idle.wait_for(lambda: self._nothing_pending() or left.is_set(), timeout_seconds)
            return self._nothing_pending()

    def _nothing_pending(self) -> bool:
        return not self._calls and self._batch is None

    def close(self, deadline_seconds: float = 5.0) -> int:
        """Take no more submissions, drain within a deadline, then give the rest up; blocks, and may be called again.

        A clear that is under way at the deadline goes on in its thread, and a thread that waits at a closed gate stays
        there until it opens; then both see that it is over.

        Args:
            deadline_seconds: How long to wait for what is queued; 0 does not wait.

        Returns:
            How many keys are left uncleared, those that were given up before included; 0 in a forked child, which has none.
        """
        if os.getpid() != self._process:
            return 0
        with self._lock:
            self._refuse("it was closed")
            thread = self._thread
            if thread is not None and not self._over:
                self._idle.wait_for(lambda: self._nothing_pending() or self._over, deadline_seconds)
            drained = self._nothing_pending() and not self._over
        self._end("it was closed")
        if drained and thread is not None:
            thread.join()  # it has nothing left to wait for
        left = len(self.outstanding())
        if left:
            _LOG.warning(
                "cleanup of worker %s ended with %d rows uncleared; they are extras", self.worker, left
            )
        return left

    def _refuse(self, why: str) -> None:
        """Take no more submissions, and let go of those that wait: their keys are queued."""
        if self._closed_because is None:
            self._closed_because = why
        self._work.notify_all()
        self._wake_up_to(self._submitted)

    def _end(self, why: str) -> None:
        """Give up what is queued, and what is to be tried again."""
        with self._lock:
            self._refuse(why)
            self._over = True
            while self._calls:
                self._abandoned += self._calls.popleft().keys
            self._queued_keys = 0
            if self._batch is not None and not self._batch.busy:
                self._abandoned += self._batch.keys
                self._batch = None
            self._idle.notify_all()

    def statistics(self) -> CleanupStatistics:
        """Return the counts; may be called from any thread.

        Raises:
            CleanupClosedError: In a forked child.
        """
        self._require_process()
        with self._lock:
            batch, calls = self._batch, self._calls
            return CleanupStatistics(
                worker=self.worker,
                pending_calls=len(calls) + (0 if batch is None else len(batch.calls)),
                pending_keys=self._queued_keys + (0 if batch is None else len(batch.keys)),
                cleared=self._cleared,
                batches=self._batches,
                failures=self._failures,
                abandoned=len(self._abandoned),
                oldest_queued_seconds=(self._clock() - calls[0].at_ns) / 1e9 if calls else 0.0,
            )
