"""The gate between the threads of a worker that make rows final and the checkpoint that reads rows.

A worker's thread takes a *permit* for as long as it makes rows final; a checkpoint closes the gate for an
*epoch*, waits until no permit is out, reads, and reopens it. Decoding takes no permit, and goes on meanwhile.

Rule: epochs are issued by the fence's driver and only ever grow; a gate receives them, in whatever order they
arrive. ``reopen(epoch)`` releases that epoch and all before it, also those that have not arrived yet, and no
later one. So whatever is late, is harmless::

    close 7 ......... arrives, drains, answers `closed`       the window of checkpoint 7
    reopen 7 ........ opens                                   or arrives first: then close 7 is `superseded`
    close 8 ......... arrives, drains, answers `closed`
    reopen 7, again . says nothing about 8: stays closed
    close 7, again .. was released: `superseded`, changes nothing

======================  ==========================================  ===========================================
who                     waits for                                   unblocked by
======================  ==========================================  ===========================================
:meth:`enter`           the reopening of a closed gate              reopen, retirement, its timeout
:meth:`close_and_wait`  permits that are out                        their release, a reopen that covers it, a
                                                                    later close, retirement, its timeout
======================  ==========================================  ===========================================

Nobody else waits; nothing here is held while a hook runs. A reopen lets in whoever waited for it, at once and
in the order of asking, so that closes in quick succession cannot keep a thread out for ever.

What a thread left half done stays so: the permit of a thread that *ended* is kept, since nobody can tell what
it guarded, and since another thread may have been asked to release it. A close that meets one times out, and
says that the holder has ended. Its worker is then given up (:meth:`retire`): its attempts count no more, so
neither does what it wrote. A gate in a forked child is a copy that no checkpoint ever closes: it is retired.

Yield rule: blocking calls, for threads. Lock order: permit before slot, and one permit at a time.
"""

# Gate and permits are one protocol in one module, so they see each other's private state.
# ruff: noqa: SLF001

from __future__ import annotations

import asyncio
import os
import secrets
import threading
import time
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from quiesce.barrier import require_no_cut
from quiesce.errors import (
    GateRetiredError,
    GateTimeoutError,
    NestedPermitError,
    PermitReleasedError,
    PermitTimeoutError,
    WouldBlockLoopError,
)
from quiesce.observers import Hub, default_hub

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from types import TracebackType

__all__ = [
    "SEQUENCES_PER_GATE",
    "CloseAnswer",
    "Epoch",
    "GateStatistics",
    "Permit",
    "PermitHolder",
    "SnapshotGate",
    "holds_permit",
    "on_a_loop",
]

CloseAnswer = Literal["closed", "superseded"]
"""What a close answers: no permit is out and none will be; or the epoch was released before that."""

SEQUENCES_PER_GATE: Final = 1 << 40
"""Sequence numbers of one gate; the next gate of a hub starts above, so that a restarted worker's numbers go on growing."""

_WAITING: Final = 0
_LIVE: Final = 1
_RELEASED: Final = 2
_FORGOTTEN: Final = 3  # by retirement; its holder does not know yet


class Epoch(NamedTuple):
    """One closing of gates, named by the driver that issues it; ordered, across restarts of the driver too.

    Attributes:
        incarnation: The driver's.
        number: Grows with each close; 0 is before the first one.
    """

    incarnation: int
    number: int

    def __str__(self) -> str:
        """Return it as hooks and messages have it."""
        return f"{self.incarnation}.{self.number}"

    @classmethod
    def parse(cls, text: str) -> Epoch:
        """Return the epoch that a hook named.

        Raises:
            ValueError: If the text is none.
        """
        incarnation, _, number = text.partition(".")
        return cls(int(incarnation), int(number))


@dataclass(frozen=True, slots=True)
class PermitHolder:
    """Who holds a permit.

    Attributes:
        thread: Name of the thread that took it.
        age_seconds: How long it has been out.
        ended: Whether that thread has ended since.
    """

    thread: str
    age_seconds: float
    ended: bool

    def __str__(self) -> str:
        """Return one readable clause for error messages."""
        suffix = (
            " (it has ended: nobody will release the permit unless it was handed on)" if self.ended else ""
        )
        return f"thread {self.thread!r} for {self.age_seconds:.3f} s{suffix}"


@dataclass(frozen=True, slots=True)
class GateStatistics:
    """What a gate is doing right now.

    Attributes:
        worker: The gate's label.
        instance: Which gate of that label.
        closed: Whether it grants no permits because of an epoch.
        epoch: The latest epoch that closed it; (0, 0) before the first.
        released: The latest epoch up to which all are released.
        permits: Permits that are out.
        oldest_permit_seconds: Age of the oldest one, 0 if none is out.
        waiting: Threads that wait for a permit.
        longest_wait_seconds: The longest current wait, 0 if nobody waits.
        retired: Why the gate was retired, or "".
    """

    worker: str
    instance: str
    closed: bool
    epoch: Epoch
    released: Epoch
    permits: int
    oldest_permit_seconds: float
    waiting: int
    longest_wait_seconds: float
    retired: str


class Permit:
    """The right to make rows final, until it is released; made by :meth:`SnapshotGate.enter`.

    Attributes:
        gate: Whose permit it is.
        sequence: Where its grant stands among the gate's events.
    """

    __slots__ = ("_asked_ns", "_granted_ns", "_state", "_thread", "gate", "sequence")

    def __init__(self, gate: SnapshotGate, asked_ns: int) -> None:
        self.gate = gate
        self.sequence = 0
        self._asked_ns = self._granted_ns = asked_ns
        self._thread = threading.current_thread()
        self._state = _WAITING

    @property
    def thread(self) -> str:
        """Name of the thread that took it."""
        return self._thread.name

    @property
    def live(self) -> bool:
        """Whether it still keeps the gate from closing."""
        return self._state == _LIVE

    @property
    def age_seconds(self) -> float:
        """How long ago it was granted."""
        return max(0, self.gate._clock() - self._granted_ns) / 1e9

    def release(self) -> None:
        """Give it back, once; from any thread.

        If the gate was retired meanwhile there is nothing left to give back, and that is no error.

        Raises:
            PermitReleasedError: If it was released before.
        """
        gate = self.gate
        with gate._lock:
            state = self._state
            self._state = _RELEASED
            if state == _LIVE:
                del gate._permits[self]
                sequence = gate._sequence = gate._sequence + 1
                if gate._draining and not gate._permits:
                    gate._drained.notify_all()
        if _THREAD.permit is self:
            _THREAD.permit = None
        if state == _LIVE:
            if gate.hub.permit_released:
                gate.hub.fire("permit_released", gate.worker, sequence, gate._clock() - self._granted_ns)
        elif state == _RELEASED:
            raise PermitReleasedError(gate.worker, f"{self!r} was released before")

    def __repr__(self) -> str:
        """Name gate, thread and state."""
        state = ("waiting", "live", "released", "forgotten")[self._state]
        return f"<permit {self.sequence} of worker {self.gate.worker!r}, thread {self.thread!r}, {state}>"

    def _holder(self, now: int) -> PermitHolder:
        age = max(0, now - self._granted_ns) / 1e9
        return PermitHolder(self._thread.name, age, not self._thread.is_alive())


class _Thread(threading.local):
    """What this thread holds; a permit that is no longer live counts as none."""

    permit: Permit | None = None


_THREAD: Final = _Thread()


class _Section:
    """``with gate.permit():``."""

    __slots__ = ("_gate", "_permit", "_timeout")

    _permit: Permit

    def __init__(self, gate: SnapshotGate, timeout: float | None) -> None:
        self._gate = gate
        self._timeout = timeout

    def __enter__(self) -> Permit:
        self._permit = self._gate.enter(self._timeout)
        return self._permit

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._permit.release()


class SnapshotGate:
    """Permits for the threads of one worker; see the module's docstring for the protocol.

    Example::

        gate = SnapshotGate("0")

        with gate.permit(timeout=300):      # a generation thread, once decoding is over
            dataplane.put(final_rows)

        gate.close_and_wait(epoch, timeout=60)   # the checkpoint, through the fence
        gate.reopen(epoch)

    Args:
        worker: The worker's label, stable across restarts.
        hub: Where hooks go; None means the process-wide hub.
        clock: Monotonic nanoseconds, for durations. Deadlines are kept by ``time.monotonic``.

    Attributes:
        worker: The label.
        instance: Tells this gate from the one that a restarted worker has under the same label.
        hub: Where hooks go.
    """

    def __init__(
        self, worker: str, *, hub: Hub | None = None, clock: Callable[[], int] = time.perf_counter_ns
    ) -> None:
        self.worker = worker
        self.instance = secrets.token_hex(8)
        self.hub = default_hub() if hub is None else hub
        self._clock = clock
        self._wanted = f"a permit of worker {worker!r}"
        self._forget_threads()
        # The protocol's state, under the lock. A waiting permit is in _waiting, a granted one in _permits.
        self._epoch = self._released = Epoch(0, 0)
        self._closed = False
        self._closed_ns = 0
        self._retired = ""
        self._granting = True  # neither closed nor retired: what the fast path looks at
        self._sequence = _first_sequence(self.hub)
        self.hub.attach("snapshot_gate", self)
        _GATES.add(self)

    # ------------------------------------------------------------------------------------------------ permits

    def enter(self, timeout: float | None = None) -> Permit:
        """Take a permit; blocks while the gate is closed.

        Args:
            timeout: Seconds to wait at most; None waits as long as it takes, 0 never waits.

        Returns:
            The permit. Whoever has it releases it once; :meth:`exit` does so for this thread's.

        Raises:
            PermitTimeoutError: If the gate stayed closed for that long.
            GateRetiredError: If the worker was given up, also while this waited.
            LockOrderError: If this context holds a live cut: a checkpoint may wait for that cut while this
                waits for the checkpoint.
            NestedPermitError: If this thread holds a permit, of this gate or another one, that a close waits
                for.
            WouldBlockLoopError: If it would have to wait in the thread of a running event loop.
            ValueError: If the timeout is negative.
        """
        require_no_cut(self._wanted)
        mine = _THREAD.permit
        if mine is not None and mine._state == _LIVE:
            raise NestedPermitError(self.worker, repr(mine))
        permit = Permit(self, self._clock())
        try:
            with self._lock:
                if self._granting:
                    permit.sequence = self._sequence = self._sequence + 1
                    permit._state = _LIVE
                    self._permits[permit] = None
                else:
                    self._wait(permit, timeout)
            _THREAD.permit = permit
            if self.hub.permit_granted:
                wait_ns = permit._granted_ns - permit._asked_ns
                self.hub.fire("permit_granted", self.worker, permit.sequence, wait_ns)
        except BaseException:
            # Interrupted after the grant, or a strict observer: the caller does not get to know the permit.
            if permit._state == _LIVE:
                permit.release()
            raise
        return permit

    def exit(self) -> None:
        """Release this thread's permit.

        Raises:
            PermitReleasedError: If it has none of this gate.
        """
        permit = _THREAD.permit
        if permit is None or permit.gate is not self:
            raise PermitReleasedError(
                self.worker, f"thread {threading.current_thread().name!r} holds no permit of it"
            )
        permit.release()

    def permit(self, timeout: float | None = None) -> AbstractContextManager[Permit]:
        """Return ``with``'s form of :meth:`enter` and the release."""
        return _Section(self, timeout)

    # ------------------------------------------------------------------------------------------------- epochs

    def close_and_wait(self, epoch: Epoch, timeout: float | None = None) -> CloseAnswer:
        """Stop granting permits for an epoch, then wait until none is out.

        Args:
            epoch: As the fence's driver issued it.
            timeout: Seconds to wait at most; None waits as long as it takes. Past it the gate *stays* closed
                until its epoch is released: the driver that gives the cut up reopens every gate.

        Returns:
            ``closed``, or ``superseded``: the epoch was released, or a later one has closed the gate; then
            this close changed nothing, or changes nothing any more.

        Raises:
            GateTimeoutError: If permits are still out by then; it names who holds them.
            NestedPermitError: If this thread holds one of them.
            ValueError: If the timeout is negative.
        """
        deadline = _deadline(timeout)
        mine = _THREAD.permit
        if mine is not None and mine.gate is self and mine._state == _LIVE:
            raise NestedPermitError(self.worker, repr(mine))
        epoch = Epoch(*epoch)
        asked = self._clock()
        holders: tuple[PermitHolder, ...] = ()
        closing = ended = 0
        with self._lock:
            if epoch > self._released and epoch > self._epoch:
                self._epoch = epoch
                if not self._closed:
                    self._closed, self._closed_ns = True, asked
                    self._granting = False
                closing = self._sequence = self._sequence + 1
                self._drained.notify_all()  # whoever drains for an epoch before this one is superseded
        if closing and self.hub.gate_closing:
            self.hub.fire("gate_closing", self.worker, closing, str(epoch))
        outcome = "failed"
        try:
            with self._lock:
                self._draining += 1
                try:
                    while self._is_current(epoch) and self._permits:
                        left = None if deadline is None else deadline - time.monotonic()
                        if left is not None and left <= 0:
                            now = self._clock()
                            holders = tuple(permit._holder(now) for permit in list(self._permits))
                            break
                        self._drained.wait(left)
                    else:
                        outcome = "closed" if self._is_current(epoch) else "superseded"
                finally:
                    self._draining -= 1
                    ended = self._sequence = self._sequence + 1
        finally:
            if ended and self.hub.gate_closed:
                self.hub.fire("gate_closed", self.worker, ended, str(epoch), self._clock() - asked, outcome)
        if holders:
            raise GateTimeoutError(self.worker, str(epoch), timeout or 0.0, holders)
        return "closed" if outcome == "closed" else "superseded"

    def reopen(self, epoch: Epoch) -> None:
        """Release an epoch and all before it, also those that have not arrived; never blocks.

        Who waits for a permit gets it, unless a later epoch keeps the gate closed.
        """
        epoch = Epoch(*epoch)
        reopened = 0
        with self._lock:
            if epoch <= self._released:
                return
            self._released = epoch
            if self._draining:
                self._drained.notify_all()  # a close that is covered ends as superseded
            if self._closed and self._epoch <= epoch:
                now = self._clock()
                self._closed = False
                self._granting = not self._retired
                reopened = self._sequence = self._sequence + 1
                closed_ns = now - self._closed_ns
                if self._waiting:
                    self._let_in(now)
        if reopened and self.hub.gate_reopened:
            self.hub.fire("gate_reopened", self.worker, reopened, str(epoch), closed_ns)

    def closed_in(self, epoch: Epoch) -> bool:
        """Return whether the gate is closed by exactly that epoch, with no permit out.

        True proves that no row was made final through this gate since its close answered ``closed``. A
        retired gate counts as closed in every epoch.
        """
        with self._lock:
            return bool(self._retired) or (self._closed and self._is_current(epoch) and not self._permits)

    def retire(self, reason: str) -> None:
        """Give the worker up, for good: it counts as closed, and permits that are out are forgotten.

        What is still running under such a permit cannot be stopped. So first see to it that it counts for
        nothing (retire its attempts: the exact attempt in the ledger decides about a row), then retire.

        Args:
            reason: A clause for errors and statistics, like "its call hung".
        """
        with self._lock:
            if self._retired:
                return
            self._retired = reason or "it was given up"
            self._granting = False
            forgotten = []
            while self._permits:
                permit, _ = self._permits.popitem()
                permit._state = _FORGOTTEN
                self._sequence += 1
                forgotten.append((self._sequence, permit._granted_ns))
            self._opened.notify_all()
            self._drained.notify_all()
        now = self._clock()
        for sequence, granted_ns in forgotten:
            if self.hub.permit_released:
                self.hub.fire("permit_released", self.worker, sequence, now - granted_ns)

    @property
    def retired(self) -> str:
        """Why the gate was retired, or ""."""
        return self._retired

    # ------------------------------------------------------------------------------------------- who holds it

    def holders(self, older_than: float = 0.0) -> tuple[PermitHolder, ...]:
        """Return who holds permits, the oldest first.

        Args:
            older_than: Leaves out younger ones; seconds.
        """
        with self._lock:
            now = self._clock()
            holders = [permit._holder(now) for permit in list(self._permits)]
        return tuple(
            sorted(
                (holder for holder in holders if holder.age_seconds >= older_than),
                key=lambda holder: -holder.age_seconds,
            )
        )

    def statistics(self) -> GateStatistics:
        """Return what the gate is doing right now; may be called from any thread."""
        with self._lock:
            now = self._clock()
            oldest = min((permit._granted_ns for permit in list(self._permits)), default=now)
            asked = min((permit._asked_ns for permit in self._waiting), default=now)
            return GateStatistics(
                worker=self.worker,
                instance=self.instance,
                closed=self._closed,
                epoch=self._epoch,
                released=self._released,
                permits=len(self._permits),
                oldest_permit_seconds=max(0, now - oldest) / 1e9,
                waiting=len(self._waiting),
                longest_wait_seconds=max(0, now - asked) / 1e9,
                retired=self._retired,
            )

    # ------------------------------------------------------------------------------------------- the protocol

    def _is_current(self, epoch: Epoch) -> bool:
        """With the lock held: whether the gate is closed by exactly this epoch."""
        return epoch == self._epoch and epoch > self._released

    def _wait(self, permit: Permit, timeout: float | None) -> None:
        """With the lock held: queue up until a reopen has granted the permit."""
        deadline = _deadline(timeout)
        if timeout != 0 and not self._retired and on_a_loop():
            raise WouldBlockLoopError(self._wanted, threading.current_thread().name)
        self._waiting[permit] = None
        try:
            while permit._state == _WAITING:
                if self._retired:
                    raise GateRetiredError(self.worker, self._retired)
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0:
                    raise PermitTimeoutError(self.worker, timeout or 0.0, str(self._epoch))
                self._opened.wait(left)
        finally:
            self._waiting.pop(permit, None)

    def _let_in(self, now: int) -> None:
        """With the lock held: grant what waits, first come first; the next close waits for them."""
        for permit in self._waiting:
            permit.sequence = self._sequence = self._sequence + 1
            permit._granted_ns = now
            permit._state = _LIVE
            self._permits[permit] = None
        self._waiting.clear()
        self._opened.notify_all()

    def _forget_threads(self) -> None:
        """Start with locks that nobody has, and nobody inside."""
        # Reentrant, because collecting garbage may finalize a generator that releases a permit right in here: so
        # nothing below iterates over the permits themselves.
        self._lock = threading.RLock()
        self._opened = threading.Condition(self._lock)
        self._drained = threading.Condition(self._lock)
        self._permits: dict[Permit, None] = {}
        self._waiting: dict[Permit, None] = {}
        self._draining = 0

    def _after_fork(self) -> None:
        """In a forked child: the other threads are gone, perhaps with the lock, and nobody fences this copy."""
        for permit in list(self._permits):
            permit._state = _FORGOTTEN
        self._forget_threads()
        self._retired = f"it belongs to process {os.getppid()}, and this is a forked child of it"
        self._granting = False


def holds_permit() -> bool:
    """Return whether the current thread holds a permit, of whatever gate, that a close would wait for."""
    permit = _THREAD.permit
    return permit is not None and permit._state == _LIVE


def _deadline(timeout: float | None) -> float | None:
    if timeout is None:
        return None
    if timeout < 0:
        message = f"a timeout cannot be {timeout}: it is seconds, or None to wait as long as it takes"
        raise ValueError(message)
    return time.monotonic() + timeout


def on_a_loop() -> bool:
    """Return whether the current thread runs an event loop, so that it must not wait for anybody."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


_GATES: Final[weakref.WeakSet[SnapshotGate]] = weakref.WeakSet()
_BUILT: Final[weakref.WeakKeyDictionary[Hub, int]] = weakref.WeakKeyDictionary()


def _first_sequence(hub: Hub) -> int:
    built = _BUILT[hub] = _BUILT.get(hub, -1) + 1
    return built * SEQUENCES_PER_GATE


def _after_fork() -> None:
    for gate in list(_GATES):
        gate._after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
