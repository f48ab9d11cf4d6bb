"""Generation calls on their way to a worker: who waits, for which weights, and how an outcome gets back.

Rule: a call waits until the published weights are at least those of its ``start_version``; calls that wait together
are taken together. Yield rule: nothing here suspends; :meth:`CallQueue.take` blocks, in a worker's thread, and the rest
holds a lock for a few instructions.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from quiesce import GenerationRequest, GroupResult
from quiesce_grpo.call_rows import CallRows
from quiesce_grpo.engine_gates import WorkerGate
from quiesce_grpo.errors import EngineClosedError, StaleWeightsError

__all__ = ["Call", "CallQueue", "Published", "on_loop", "settle"]


@dataclass(frozen=True, slots=True)
class Published:
    """Weights that workers may take.

    Attributes:
        version: Their version.
        weights: What ``Policy.weights`` returned; None for those that replicas start with.
    """

    version: int
    weights: Mapping[str, Tensor] | None


@dataclass(eq=False, slots=True)
class Call:
    """A generation call.

    Attributes:
        request: What is asked for.
        future: Gets the outcome, on its loop.
        loop: That loop.
        gate: The gate of the worker that took it, if the call is staged.
        rows: Its rows, once a worker took it.
    """

    request: GenerationRequest
    future: asyncio.Future[GroupResult]
    loop: asyncio.AbstractEventLoop
    gate: WorkerGate | None = None
    rows: CallRows | None = None


class CallQueue:
    """Calls that no worker has taken yet, and the weights that make them eligible.

    Args:
        version: Of the weights that replicas start with.
    """

    def __init__(self, version: int) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[Call] = deque()
        self._published = Published(version, None)
        self._closed = False

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def published(self) -> Published:
        """The newest weights."""
        return self._published

    @property
    def closed(self) -> bool:
        """Whether nothing is taken any more."""
        return self._closed

    def put(self, call: Call) -> None:
        """Let a call wait for a worker.

        Raises:
            EngineClosedError: If the queue is closed.
        """
        with self._changed:
            if self._closed:
                raise EngineClosedError(call.request.group_id)
            self._waiting.append(call)
            self._changed.notify_all()

    def forget(self, call: Call) -> None:
        """Take a call out that nobody waits for any more, unless a worker has it."""
        with self._changed, contextlib.suppress(ValueError):
            self._waiting.remove(call)

    def publish(self, version: int, weights: Mapping[str, Tensor]) -> None:
        """Replace the weights by newer ones, or by others of the same version.

        Raises:
            StaleWeightsError: If there are newer ones already.
        """
        with self._changed:
            if version < self._published.version:
                raise StaleWeightsError(version, self._published.version)
            self._published = Published(version, weights)
            self._changed.notify_all()

    def take(self, *, most: int, linger_seconds: float, ended: Callable[[], bool]) -> list[Call] | None:
        """Wait for eligible calls, and a little for more of them.

        Args:
            most: Calls that are taken at most.
            linger_seconds: How long fewer calls wait for more.
            ended: Says whether this worker is to end; see :meth:`wake`.

        Returns:
            The calls, none if all were given up meanwhile; None when the worker is to end.
        """
        with self._changed:
            while not (found := self._eligible()):
                if self._closed or ended():
                    return None
                self._changed.wait()
            deadline = time.monotonic() + linger_seconds
            while len(found) < most and (remaining := deadline - time.monotonic()) > 0:
                self._changed.wait(remaining)
                found = self._eligible()
            if self._closed or ended():
                return None
            for call in found[:most]:
                self._waiting.remove(call)
            return found[:most]

    def wake(self) -> None:
        """Have every worker look again whether it is to end."""
        with self._changed:
            self._changed.notify_all()

    def close(self) -> list[Call]:
        """End every worker that takes from here, and return the calls that were waiting. Idempotent."""
        with self._changed:
            self._closed = True
            waiting = list(self._waiting)
            self._waiting.clear()
            self._changed.notify_all()
        return waiting

    def _eligible(self) -> list[Call]:
        version = self._published.version
        return [
            call for call in self._waiting if call.request.start_version <= version and not call.future.done()
        ]


def settle(call: Call, outcome: GroupResult | BaseException) -> None:
    """Give a call its outcome, unless it has one; on its loop."""
    if call.future.done():
        return
    if isinstance(outcome, BaseException):
        call.future.set_exception(outcome)
    else:
        call.future.set_result(outcome)


def on_loop(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: object) -> None:
    """Run a function on an event loop, from any thread; a loop that is closed has nobody left who waits."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(function, *arguments)
