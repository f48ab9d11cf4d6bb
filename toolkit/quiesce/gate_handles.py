"""How a fence reaches the gates of workers, and what becomes of a permit that never comes back.

Rule: a permit may have a deadline of its own, independent of any checkpoint: the call that hangs can be the one
that the next step waits for. Past it the worker is given up: first its attempts, so that what its threads still
do counts for nothing, then its gate, which no checkpoint waits for any more. Yield rule: the three calls of a
handle suspend; nothing else here does, and :class:`LocalGate` blocks no loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Final, Protocol

from quiesce.barrier import detached
from quiesce.snapshot_gate import CloseAnswer, Epoch, PermitHolder, SnapshotGate
from quiesce.threads import DaemonExecutor

if TYPE_CHECKING:
    from concurrent.futures import Executor

__all__ = ["GateHandle", "LocalGate", "PermitWatch"]

_LOG: Final = logging.getLogger("quiesce.gates")

WATCH_SECONDS: Final = 0.01
"""The shortest wait between two looks at permits that have a deadline."""


class GateHandle(Protocol):
    """How a fence talks to the gate of one worker, wherever it runs.

    Calls that reach the worker late, twice or not at all do no harm; see :mod:`quiesce.snapshot_gate`.
    """

    @property
    def worker(self) -> str:
        """The worker's label, stable across restarts."""
        ...

    @property
    def instance(self) -> str:
        """Another one after each restart of the worker."""
        ...

    @property
    def alive(self) -> bool:
        """Whether the worker may still do anything. False is final for an instance: it never comes back."""
        ...

    async def close(self, epoch: Epoch, timeout: float) -> CloseAnswer:
        """Close the worker's gate; see :meth:`quiesce.snapshot_gate.SnapshotGate.close_and_wait`."""
        ...

    async def closed_in(self, epoch: Epoch) -> bool:
        """Ask whether it is closed by exactly that epoch, with no permit out."""
        ...

    async def reopen(self, epoch: Epoch) -> None:
        """Release epochs up to that one; returns once the worker has done so."""
        ...


class LocalGate:
    """The handle of a gate in this process.

    Args:
        gate: The gate.
        executor: Where closes wait; None means threads of its own. Never pass the loop's default one, or one
            that runs anything else: a close that queues behind other work holds the trainer.
        permit_deadline: Seconds that a permit may be out; past it the worker is given up, whether or not a
            checkpoint waits for it: the hung call can be the one that the next step waits for. None means
            that a permit may be out for ever (and then every save is refused until it is back).
        give_up: Called on the loop, before the gate is retired, with who overran the deadline; it retires the
            worker's attempts, so that what its threads still do counts for nothing.
    """

    def __init__(
        self,
        gate: SnapshotGate,
        *,
        executor: Executor | None = None,
        permit_deadline: float | None = None,
        give_up: Callable[[tuple[PermitHolder, ...]], None] | None = None,
    ) -> None:
        self.gate = gate
        self.permit_deadline = permit_deadline
        self._give_up = give_up
        if permit_deadline is not None and permit_deadline <= 0:
            message = f"permit_deadline cannot be {permit_deadline}: it is seconds, or None for no deadline"
            raise ValueError(message)
        self._own = executor is None
        # A close that was given up ends as soon as its epoch is released; a second thread, so that the next
        # close need not even wait for that.
        self._executor = DaemonExecutor(f"quiesce-gate-{gate.worker}", 2) if executor is None else executor

    @property
    def worker(self) -> str:
        """The gate's label."""
        return self.gate.worker

    @property
    def instance(self) -> str:
        """The gate's instance."""
        return self.gate.instance

    @property
    def alive(self) -> bool:
        """Whether the gate was not retired."""
        return not self.gate.retired

    async def close(self, epoch: Epoch, timeout: float) -> CloseAnswer:
        """Close the gate in a thread; a cancelled caller leaves the thread to the reopening that follows."""
        deadline = time.monotonic() + timeout

        def close() -> CloseAnswer:
            return self.gate.close_and_wait(epoch, max(0.0, deadline - time.monotonic()))

        return await asyncio.get_running_loop().run_in_executor(self._executor, close)

    async def closed_in(self, epoch: Epoch) -> bool:
        """Ask the gate; does not suspend."""
        return self.gate.closed_in(epoch)

    async def reopen(self, epoch: Epoch) -> None:
        """Reopen the gate; does not suspend."""
        self.gate.reopen(epoch)

    def retire_if_overdue(self) -> tuple[PermitHolder, ...]:
        """Give the worker up if a permit has been out for longer than its deadline; return who had one."""
        if self.permit_deadline is None or not self.alive:
            return ()
        overdue = self.gate.holders(self.permit_deadline)
        if overdue:
            try:
                if self._give_up is not None:
                    self._give_up(overdue)
            finally:
                named = "; ".join(str(holder) for holder in overdue)
                self.gate.retire(f"a permit overran its deadline of {self.permit_deadline:g} s: {named}")
        return overdue

    def seconds_to_deadline(self) -> float:
        """Return how long it takes at least until a permit is overdue."""
        if self.permit_deadline is None or not self.alive:
            return math.inf
        return self.permit_deadline - self.gate.statistics().oldest_permit_seconds

    def shutdown(self) -> None:
        """Let go of the threads; the handle can close nothing any more."""
        if self._own:
            self._executor.shutdown(wait=False)


class PermitWatch:
    """A task that gives up each worker of this process whose permit overran its deadline."""

    def __init__(self) -> None:
        self._gates: tuple[LocalGate, ...] = ()
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def look_after(self, handles: Iterable[GateHandle]) -> None:
        """Watch these from now on, instead of those before; runs from the first call under a running loop on."""
        self._gates = tuple(
            handle
            for handle in handles
            if isinstance(handle, LocalGate) and handle.permit_deadline is not None
        )
        if self._task is not None and not self._task.done():
            self._changed.set()
        elif self._gates:
            with contextlib.suppress(RuntimeError):
                asyncio.get_running_loop()
                self._changed = asyncio.Event()  # of this loop
                self._task = detached(self._run(), name="quiesce-permit-deadlines")

    def stop(self) -> None:
        """Watch nothing any more."""
        self._gates = ()
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def _run(self) -> None:
        while True:
            self._changed.clear()
            wait = math.inf
            for gate in self._gates:
                try:
                    for holder in gate.retire_if_overdue():
                        _LOG.error("worker %r is given up; its permit: %s", gate.worker, holder)
                except Exception:  # noqa: BLE001 - somebody else's code; the worker is given up all the same
                    _LOG.exception("the attempts of worker %r could not be retired", gate.worker)
                wait = min(wait, gate.seconds_to_deadline())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(None if wait == math.inf else max(wait, WATCH_SECONDS)):
                    await self._changed.wait()
