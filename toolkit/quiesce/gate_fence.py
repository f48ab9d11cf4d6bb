"""The fence over the snapshot gates of all workers: closed before a window, verified after it, reopened always.

Rule: a cut is taken only if every worker that could make a row final was kept from it throughout: each gate
answered ``closed``, in this fence's epoch, and still says so, of the same instance, when the snapshot has
been taken. Whatever leaves that in doubt refuses the cut, never the run, and names the worker.

===========================================  ============================================================
a worker that                                means
===========================================  ============================================================
answers ``closed``, and still is closed      it is fenced
answers ``superseded``, or not in time,      the cut is refused
or fails to answer
is dead (``alive`` is false)                 it counts as closed: it makes nothing final any more
is dead at the close, and alive later        the cut is refused: it was taken for dead, and was not
was restarted (another ``instance``)         the cut is refused: nobody fenced the new one
is registered while the fence is closed      the cut is refused, for the same reason
===========================================  ============================================================

A close that is refused, is cancelled or fails reopens what it closed in the same step. Reopening never waits:
gates of this process are open when :meth:`GateFence.reopen` returns; the others are told in the background,
again and again, until they answer or are dead. Neither the save nor the next close waits for that: a late
reopen says nothing about a later epoch.

Yield rule: ``close``, ``verify``, ``adopt`` and ``aclose`` suspend, each up to a deadline; ``reopen`` does
not suspend. All state is changed on the loop's thread only.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Final

from quiesce.barrier import detached, require_no_cut
from quiesce.errors import DuplicateWorkerError, FenceError, WorkerGoneError
from quiesce.gate_handles import GateHandle, LocalGate, PermitWatch
from quiesce.observers import Hub, default_hub
from quiesce.snapshot_gate import Epoch

__all__ = ["FenceStatistics", "GateFence", "GateHandle", "LocalGate"]

_LOG: Final = logging.getLogger("quiesce.gates")

ANSWER_TIMEOUT_SECONDS: Final = 5.0
"""How long a worker may take to answer what it answers at once: whether it is closed, and that it reopened."""

CLOSE_GRACE_SECONDS: Final = 1.0
"""How much longer than a close's timeout its answer may take: it tells who held the permits."""

ALIVE_POLL_SECONDS: Final = 0.25
"""How often a close that waits looks whether a worker that has not answered is dead."""

RETRY_SECONDS: Final = 0.05
MAX_RETRY_SECONDS: Final = 2.0
"""Between two attempts to reopen a gate: from the first to the second figure, doubling."""


@dataclass(frozen=True, slots=True)
class FenceStatistics:
    """What a fence is doing right now.

    Attributes:
        workers: Registered workers.
        alive: Those that are not dead.
        closed_seconds: How long ago its current close began; 0 while it is open.
        epoch: The latest epoch that it issued.
        closes: Closes so far.
        refused: Those that were refused, at the close or when they were verified.
        reopening: Labels of workers that have not yet answered that they reopened.
    """

    workers: int
    alive: int
    closed_seconds: float
    epoch: Epoch
    closes: int
    refused: int
    reopening: tuple[str, ...]


@dataclass(slots=True)
class _Member:
    """One worker in one round of closing."""

    handle: GateHandle
    instance: str
    dead: bool
    """Whether it was dead, so that nothing was asked of it."""


@dataclass(slots=True)
class _Round:
    """One closing of the fence."""

    cut_id: str
    epoch: Epoch
    members: dict[str, _Member]
    since_ns: int
    problems: list[str] = field(default_factory=list)
    cause: BaseException | None = None


@dataclass(slots=True)
class _Reopening:
    """A worker that is being told to reopen."""

    handle: GateHandle
    epoch: Epoch
    again: asyncio.Event
    task: asyncio.Task[None] | None = None
    under_way: asyncio.Task[object] | None = None


class GateFence:
    """Keeps the workers' gates closed while a cut is taken; a :class:`quiesce.checkpoint.fence.Fence`.

    Example::

        fence = GateFence(run_folder.incarnation)
        fence.register(LocalGate(gate))
        checkpointer = Checkpointer(..., fence=fence)

    Args:
        incarnation: This driver's; later ones release what earlier ones closed.
        hub: Where collectors find it; None means the process-wide hub.
        answer_timeout: Seconds that a worker may take to answer what needs no waiting.
        clock: Monotonic nanoseconds.
    """

    def __init__(
        self,
        incarnation: int,
        *,
        hub: Hub | None = None,
        answer_timeout: float = ANSWER_TIMEOUT_SECONDS,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self.incarnation = incarnation
        self.hub = default_hub() if hub is None else hub
        self._clock = clock
        self._answer_timeout = answer_timeout
        self._epoch = Epoch(incarnation, 0)
        self._handles: dict[str, GateHandle] = {}
        self._round: _Round | None = None
        self._reopening: dict[int, _Reopening] = {}
        self._asking: set[asyncio.Task[object]] = set()
        self._watch = PermitWatch()
        self._closes = 0
        self._refused = 0
        self.hub.attach("gate_fence", self)

    # ------------------------------------------------------------------------------------------------ workers

    def register(self, handle: GateHandle) -> None:
        """Fence this worker too, from the next close on.

        While the fence is closed, or being closed, the cut in progress is refused: nobody kept this worker
        from making rows final. A worker of an earlier driver is adopted instead (:meth:`adopt`). A handle
        serves one fence, once.

        Raises:
            DuplicateWorkerError: If another worker of that label is registered and not dead.
        """
        known = self._handles.get(handle.worker)
        if known is not None and known.instance != handle.instance and known.alive:
            raise DuplicateWorkerError(handle.worker, known.instance, handle.instance)
        self._handles[handle.worker] = handle
        self._watch.look_after(self._handles.values())

    async def adopt(self, handle: GateHandle, timeout: float | None = None) -> None:
        """Take over a worker that may have been fenced before: release whatever is over, then register it.

        Nothing is dispatched to the worker before this returns: it might wait at a gate that an earlier
        driver closed, or a late message of this one, and that nobody would reopen.

        Args:
            handle: The worker.
            timeout: Seconds; None asks until the worker answers or is dead.

        Raises:
            WorkerGoneError: If it is dead, or has not answered in time; it is not registered then.
            DuplicateWorkerError: As :meth:`register`.
            LockOrderError: If a live cut is held.
        """
        require_no_cut(f"adopting worker {handle.worker!r}")
        loop = asyncio.get_running_loop()
        deadline = math.inf if timeout is None else loop.time() + timeout
        delay = RETRY_SECONDS
        while True:
            instance = handle.instance
            if not handle.alive:
                raise WorkerGoneError(handle.worker, "it is dead")
            try:
                call = self._start(_reopen(self._over()), handle)
                await self._answer(call, deadline - loop.time())
            except Exception as error:
                if deadline - loop.time() <= delay:
                    problem = f"no answer within {timeout:g} s ({_clause(error)})"
                    raise WorkerGoneError(handle.worker, problem) from error
                _LOG.warning(
                    "worker %r has not answered and is asked again (%s)", handle.worker, _clause(error)
                )
                await asyncio.sleep(delay)
                delay = min(2 * delay, MAX_RETRY_SECONDS)
            else:
                if handle.instance == instance:  # otherwise whoever answered is gone: tell the new one
                    break
        self.register(handle)

    def unregister(self, worker: str) -> None:
        """Fence this worker no more, from the next close on: it is gone, or makes nothing final any more.

        A close in progress still counts on it, and still reopens it. The handle is let go of.
        """
        handle = self._handles.pop(worker, None)
        self._watch.look_after(self._handles.values())
        if isinstance(handle, LocalGate):
            handle.shutdown()

    # -------------------------------------------------------------------------------------------- the protocol

    def begin_epoch(self) -> Epoch:
        """Issue the next epoch; each close takes one."""
        self._epoch = Epoch(self.incarnation, self._epoch.number + 1)
        return self._epoch

    def _over(self) -> Epoch:
        """Return up to which epoch every close is over; before this driver's first, those of the drivers before."""
        return Epoch(self.incarnation, self._epoch.number - (self._round is not None))

    async def close(self, cut_id: str, timeout: float) -> None:
        """Close every worker's gate, all at once, and wait until no permit is out.

        The first worker that cannot be fenced ends it: the cut is refused then, whatever the others say.

        Args:
            cut_id: The cut that it is for.
            timeout: Seconds, for all of them together.

        Raises:
            FenceError: If a worker was not fenced by then; it names each one of which that is known. Every
                gate is open again, or is being told to.
            LockOrderError: If a live cut is held.
        """
        require_no_cut("closing the workers' gates")
        self._release()  # of a close that nobody reopened
        self._watch.look_after(self._handles.values())
        self._closes += 1
        members = {
            worker: _Member(handle, handle.instance, dead=not handle.alive)
            for worker, handle in self._handles.items()
        }
        closing = self._round = _Round(cut_id, self.begin_epoch(), members, self._clock())
        epoch = closing.epoch
        try:
            await self._ask_members(
                closing, lambda handle: handle.close(epoch, timeout), "closed", timeout + CLOSE_GRACE_SECONDS
            )
            self._judge(closing)
        except BaseException:
            self._release()
            raise

    async def verify(self) -> None:
        """Prove that every worker is still closed by this close, and that none was restarted or joined.

        Raises:
            FenceError: If that is not so; every gate is open again then, or is being told to.
            LockOrderError: If a live cut is held.
        """
        require_no_cut("verifying the workers' gates")
        closed = self._round
        if closed is None:
            raise FenceError("that was to be verified", "it is not closed")
        epoch = closed.epoch
        try:
            await self._ask_members(
                closed, lambda handle: handle.closed_in(epoch), True, self._answer_timeout
            )
            self._judge(closed)
        except BaseException:
            self._release()
            raise

    async def reopen(self) -> None:
        """Let every worker go on; does not suspend, and may be called at any time, also twice."""
        errors = self._release()
        if errors:
            raise errors[0]

    async def aclose(self) -> None:
        """Reopen, then stop telling workers that have not answered: the next driver adopts them."""
        self._release()
        tasks: list[asyncio.Task[Any]] = [*self._asking]
        tasks += [state.task for state in self._reopening.values() if state.task is not None]
        for task in tasks:
            task.cancel()
        self._watch.stop()
        for handle in self._handles.values():
            if isinstance(handle, LocalGate):
                handle.shutdown()
        if tasks:
            await asyncio.wait(tasks, timeout=self._answer_timeout)

    def statistics(self) -> FenceStatistics:
        """Return what the fence is doing right now; may be called from any thread."""
        closed = self._round
        handles = list(self._handles.values())
        return FenceStatistics(
            workers=len(handles),
            alive=sum(handle.alive for handle in handles),
            closed_seconds=0.0 if closed is None else max(0, self._clock() - closed.since_ns) / 1e9,
            epoch=self._epoch,
            closes=self._closes,
            refused=self._refused,
            reopening=tuple(sorted(state.handle.worker for state in list(self._reopening.values()))),
        )

    async def _ask_members(
        self,
        closing: _Round,
        ask: Callable[[GateHandle], Awaitable[object]],
        expected: object,
        timeout: float,
    ) -> None:
        """Ask every member that is not dead, at once; note whoever does not answer what is expected."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        asked = {
            self._start(ask, member.handle): member for member in closing.members.values() if not member.dead
        }
        pending = set(asked)
        try:
            while pending and not closing.problems and (left := deadline - loop.time()) > 0:
                done, pending = await asyncio.wait(
                    pending, timeout=min(left, ALIVE_POLL_SECONDS), return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    self._note(closing, asked[task], task, expected)
                for task in [task for task in pending if not asked[task].handle.alive]:
                    asked[task].dead = True
                    pending.discard(task)
                    task.cancel()
        finally:
            for task in pending:
                task.cancel()
        if not closing.problems:
            closing.problems += sorted(
                f"worker {asked[task].handle.worker!r} did not answer within {timeout:g} s"
                for task in pending
            )

    @staticmethod
    def _note(closing: _Round, member: _Member, task: asyncio.Task[object], expected: object) -> None:
        """Judge one answer."""
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is None and task.result() == expected:
            return
        if not member.handle.alive:
            member.dead = True
            return
        worker = member.handle.worker
        if isinstance(error, FenceError):
            problem = str(error)
        elif error is not None:
            problem = f"worker {worker!r} could not be asked ({_clause(error)})"
        elif expected == "closed":
            problem = f"worker {worker!r} answered {task.result()!r} to the close of epoch {closing.epoch}"
        else:
            problem = f"worker {worker!r} is not closed in epoch {closing.epoch} any more"
        closing.problems.append(problem)
        closing.cause = closing.cause or error

    def _judge(self, closing: _Round) -> None:
        """Refuse the cut if anything is in doubt."""
        problems = closing.problems
        if self._round is not closing:
            problems.append("it was reopened meanwhile")
        for worker, member in closing.members.items():
            current = self._handles.get(worker, member.handle)
            if member.instance != member.handle.instance or member.instance != current.instance:
                problems.append(f"worker {worker!r} was restarted meanwhile")
            elif member.dead and member.handle.alive:
                problems.append(f"worker {worker!r} was taken for dead, and is alive")
        problems += [
            f"worker {worker!r} joined meanwhile" for worker in self._handles if worker not in closing.members
        ]
        if problems:
            self._refused += 1
            raise FenceError(closing.cut_id, "; ".join(problems)) from closing.cause

    # ---------------------------------------------------------------------------------------------- reopening

    def _release(self) -> list[BaseException]:
        """Reopen whatever is closed, in this step; return what observers raised: it keeps no gate shut."""
        closed, self._round = self._round, None
        errors: list[BaseException] = []
        if closed is not None:
            # Those that joined meanwhile too: the close may yet reach whoever has a dead worker's address.
            handles = [*(member.handle for member in closed.members.values()), *self._handles.values()]
            for handle in {id(handle): handle for handle in handles}.values():
                try:
                    self._tell(handle, closed.epoch)
                except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - a strict observer's, whatever it is
                    errors.append(error)
        return errors

    def _tell(self, handle: GateHandle, epoch: Epoch) -> None:
        """Reopen a gate of this process here and now; have another one told."""
        if isinstance(handle, LocalGate):
            handle.gate.reopen(epoch)
            return
        state = self._reopening.get(id(handle))
        if state is None:
            state = self._reopening[id(handle)] = _Reopening(handle, epoch, asyncio.Event())
            state.task = detached(self._tell_until_answered(state), name=f"quiesce-reopen-{handle.worker}")
            # Cancelled before its first step, the task never gets to its own `finally`.
            state.task.add_done_callback(lambda _: self._told_for_good(state))
        else:
            state.epoch = max(epoch, state.epoch)
            state.again.set()
            if state.under_way is not None:
                state.under_way.cancel()  # the later one covers it, and does not queue behind it

    def _told_for_good(self, state: _Reopening) -> None:
        if self._reopening.get(id(state.handle)) is state:
            del self._reopening[id(state.handle)]

    async def _tell_until_answered(self, state: _Reopening) -> None:
        """Repeat the latest reopen. A worker that was restarted is told too: the close may reach it yet."""
        delay = RETRY_SECONDS
        try:
            while state.handle.alive:
                epoch = state.epoch
                state.again.clear()
                try:
                    state.under_way = self._start(_reopen(epoch), state.handle)
                    await self._answer(state.under_way)
                except Exception as error:  # noqa: BLE001 - whatever its transport raises: it has not answered
                    if not state.again.is_set():
                        _LOG.warning(
                            "worker %r has not answered that it reopened epoch %s, and is told again (%s)",
                            state.handle.worker,
                            epoch,
                            _clause(error),
                        )
                    with contextlib.suppress(TimeoutError):
                        async with asyncio.timeout(delay):
                            await state.again.wait()
                    delay = min(2 * delay, MAX_RETRY_SECONDS)
                else:
                    if state.epoch == epoch:
                        return
                    delay = RETRY_SECONDS
                finally:
                    state.under_way = None
        finally:
            self._told_for_good(state)  # in this very step: nobody may count on a task that tells no more

    async def _answer(self, task: asyncio.Task[object], at_most: float = math.inf) -> None:
        """Wait for a call, up to a deadline that holds whatever the call does.

        Raises:
            TimeoutError: If it took longer.
            ConnectionAbortedError: If the call was cancelled, not by the caller of this.
            Exception: Whatever else the call raised.
        """
        timeout = max(0.0, min(at_most, self._answer_timeout))
        try:
            await asyncio.wait({task}, timeout=timeout)
        finally:
            answered = task.done()
            task.cancel()
        if not answered:
            message = f"no answer within {timeout:g} s"
            raise TimeoutError(message)
        if task.cancelled():
            message = "the call was cancelled on its way"
            raise ConnectionAbortedError(message)
        task.result()

    def _start(
        self, ask: Callable[[GateHandle], Awaitable[object]], handle: GateHandle
    ) -> asyncio.Task[object]:
        """Start a call in a task of its own: one that ignores its cancellation keeps nobody waiting."""

        async def call() -> object:
            return await ask(handle)

        task = detached(call(), name=f"quiesce-fence-{handle.worker}")
        self._asking.add(task)
        task.add_done_callback(self._answered)
        return task

    def _answered(self, task: asyncio.Task[object]) -> None:
        self._asking.discard(task)
        if not task.cancelled():
            task.exception()  # looked at, lest asyncio complains where nobody waits for it any more


def _reopen(epoch: Epoch) -> Callable[[GateHandle], Awaitable[None]]:
    """Return the call that tells a worker to reopen."""
    return lambda handle: handle.reopen(epoch)


def _clause(error: BaseException) -> str:
    """Return an error as a clause."""
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
