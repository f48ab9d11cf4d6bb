"""Helpers for tests of code that uses Quiesce: recorded hooks, clocks moved by hand, and free time.

The event loop here, :class:`VirtualTimeLoop`, is an ordinary asyncio loop whose clock jumps to the next timer
when there is nothing to do. So a drain timeout of a minute takes no time, an order of events is reached by
:func:`settle` instead of by sleeping, and a test that would hang fails at once::

    @in_virtual_time
    async def test_a_slot_waits_for_the_window() -> None:
        barrier = DataPlaneCheckpointBarrier(hub=strict_hub())
        async with barrier.checkpoint():
            slot = asyncio.create_task(enter_a_slot(barrier))
            assert await all_waiting(slot)

:func:`explore` goes further and runs a scenario in every order, :func:`explore_threads` one of threads; see
:mod:`quiesce.explorer`.

Rule: nothing here looks at private state, neither of Quiesce nor of asyncio. Yield rule: :func:`settle` and
whatever is built on it suspend until every other task has gone as far as it can.
"""

from __future__ import annotations

import asyncio
import functools
import math
import selectors
import types
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, ParamSpec, TypeVar, TypeVarTuple

from quiesce.explorer import (
    ExplorationFailedError,
    Failure,
    Report,
    explore,
    explore_threads,
    pause,
    pause_thread,
    replay,
    replay_threads,
    switch_point,
    together,
    watch,
)
from quiesce.observers import HOOKS, Hub

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator, Mapping
    from concurrent.futures import Executor

__all__ = [
    "DeadlockError",
    "Event",
    "EventRecorder",
    "ExplorationFailedError",
    "Failure",
    "FakeClock",
    "Report",
    "Stopped",
    "VirtualTimeLoop",
    "all_waiting",
    "cancelled_at",
    "explore",
    "explore_threads",
    "in_virtual_time",
    "pause",
    "pause_thread",
    "replay",
    "replay_threads",
    "settle",
    "strict_hub",
    "switch_point",
    "together",
    "watch",
]

P = ParamSpec("P")
T = TypeVar("T")
Ts = TypeVarTuple("Ts")

THREAD_PATIENCE_SECONDS: Final = 20.0
"""Real seconds for which a virtual loop that is idle waits for a call in an executor; then it is a deadlock."""

STRANGER_PATIENCE_SECONDS: Final = 0.5
"""The same while no such call is out: some other thread may still hand something to the loop."""


# ----------------------------------------------------------------------------------------------------- hooks


class Event(NamedTuple):
    """One recorded call of a hook."""

    hook: str
    args: tuple[Any, ...]


class EventRecorder:
    """An observer that keeps every hook call, in order.

    Attributes:
        events: What was recorded.
    """

    def __init__(self) -> None:
        self.events: list[Event] = []
        for hook in HOOKS:
            setattr(self, hook, functools.partial(self._record, hook))

    def of(self, hook: str) -> list[tuple[Any, ...]]:
        """Return the arguments of each call of one hook, oldest first.

        Raises:
            ValueError: If there is no such hook.
        """
        if hook not in HOOKS:
            message = f"there is no hook {hook!r}"
            raise ValueError(message)
        return [event.args for event in self.events if event.hook == hook]

    def hooks(self) -> list[str]:
        """Return the names of the calls, oldest first."""
        return [event.hook for event in self.events]

    def clear(self) -> None:
        """Forget what was recorded."""
        self.events.clear()

    def _record(self, hook: str, *args: object) -> None:
        self.events.append(Event(hook, args))


def strict_hub(*observers: object) -> Hub:
    """Return a new hub that raises what an observer raises, with these observers subscribed."""
    hub = Hub(strict=True)
    for observer in observers:
        hub.subscribe(observer)
    return hub


class FakeClock:
    """A monotonic nanosecond clock that moves only by hand; give it to whatever takes a ``clock``.

    Args:
        now_ns: Where it starts.
    """

    def __init__(self, now_ns: int = 0) -> None:
        self.now_ns = now_ns

    def __call__(self) -> int:
        """Return the time in nanoseconds."""
        return self.now_ns

    def advance(self, seconds: float) -> None:
        """Move it on.

        Raises:
            ValueError: If that would be back.
        """
        if seconds < 0:
            message = f"a monotonic clock does not go back by {-seconds} s"
            raise ValueError(message)
        self.now_ns += round(seconds * 1e9)


# ---------------------------------------------------------------------------------------------- virtual time


class DeadlockError(Exception):
    """Raised by a virtual loop in which every task waits and nothing can wake any."""

    def __init__(self, tasks: Mapping[str, str]) -> None:
        waiting = "; ".join(f"{name}: {place}" for name, place in tasks.items()) or "no task is left"
        super().__init__(f"nothing is ready, no timer is pending and no thread answered; {waiting}")


class _JumpingSelector(selectors.SelectSelector):
    """Instead of waiting for the next timer, moves the loop's clock to it."""

    loop: VirtualTimeLoop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready or (timeout is not None and timeout <= 0):
            return ready
        # Nothing can run now: whoever waits for this moment runs first, then the clock may jump.
        if self.loop.wake_settlers():
            return []
        if timeout is not None and not self.loop.expects_thread():
            # One float further: far from 0 the sum may round down to where it was, for ever.
            self.loop.now = math.nextafter(self.loop.now + timeout, math.inf)
            return []
        patience = THREAD_PATIENCE_SECONDS if self.loop.expects_thread() else STRANGER_PATIENCE_SECONDS
        ready = super().select(patience)
        if not ready:
            raise DeadlockError(
                {task.get_name(): repr(task.get_coro()) for task in asyncio.all_tasks(self.loop)}
            )
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An asyncio loop whose time stands still while something is ready and jumps when nothing is.

    Threads live in real time: while a call in an executor is out, the loop waits for it instead of jumping.

    Attributes:
        now: The loop's time in seconds; starts at 0.
        threads_hang: Set it to let time jump although calls in executors are out: they count as hung.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.threads_hang = False
        self._threads_out = 0
        self._settlers: list[asyncio.Future[None]] = []
        selector = _JumpingSelector()
        selector.loop = self
        super().__init__(selector)

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self.now

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts
    ) -> asyncio.Future[T]:
        """Run a call in an executor, and note that it is out."""
        future = super().run_in_executor(executor, func, *args)
        self._threads_out += 1
        future.add_done_callback(self._thread_is_back)
        return future

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """Join the default executor's threads, for as long as that really takes: its timeout is no virtual time."""
        self.threads_hang = False
        self._threads_out += 1
        try:
            await super().shutdown_default_executor()
        finally:
            self._threads_out -= 1

    def expects_thread(self) -> bool:
        """Tell whether a call in an executor is out and expected back."""
        return self._threads_out > 0 and not self.threads_hang

    def _thread_is_back(self, _: asyncio.Future[Any]) -> None:
        self._threads_out -= 1

    def settled(self) -> asyncio.Future[None]:
        """Return a future that completes as soon as nothing else can run, before time moves on."""
        future = self.create_future()
        self._settlers.append(future)
        return future

    def wake_settlers(self) -> bool:
        """Complete the futures of :meth:`settled`; return whether there were any."""
        settlers, self._settlers = self._settlers, []
        for future in settlers:
            if not future.done():
                future.set_result(None)
        return bool(settlers)


def in_virtual_time(test: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
    """Make an ``async def`` test (or helper) an ordinary function that runs it in a loop of virtual time."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
            return runner.run(test(*args, **kwargs))

    return run


async def settle() -> None:
    """Let every other task run until none can go on without a timer, a thread or this task; no time passes.

    Raises:
        TypeError: If the running loop is no :class:`VirtualTimeLoop`.
    """
    loop = asyncio.get_running_loop()
    if not isinstance(loop, VirtualTimeLoop):
        message = f"settle() needs a VirtualTimeLoop (see in_virtual_time), not {type(loop).__qualname__}"
        raise TypeError(message)
    await loop.settled()


async def all_waiting(*tasks: asyncio.Task[Any]) -> bool:
    """Settle, then tell whether every one of the tasks is still suspended."""
    await settle()
    return not any(task.done() for task in tasks)


# ----------------------------------------------------------------------------------- cancelling at every step


@dataclass(frozen=True, slots=True)
class Stopped:
    """How :func:`cancelled_at` ended.

    Attributes:
        outcome: ``completed``, ``cancelled`` or ``failed``.
        reached: Whether the coroutine suspended that often, so that it was cancelled at all.
        error: What it raised.
    """

    outcome: Literal["completed", "cancelled", "failed"]
    reached: bool
    error: BaseException | None = None


async def cancelled_at(coroutine: Coroutine[Any, Any, object], step: int, *, late: bool = False) -> Stopped:
    """Run a coroutine in a task of its own and cancel it at its n-th suspension.

    Call it with 0, 1, 2, … until ``reached`` is False, and every suspension point was cancelled once.

    Args:
        coroutine: What to run.
        step: 0 cancels it before its first step; n cancels it where it suspends for the n-th time.
        late: Cancel it only after what it awaits there is complete, but before it goes on: the grant that
            comes
            together with a cancellation.
    """
    reached = False

    def cancel(*_: object) -> None:
        nonlocal reached
        reached = True
        task.cancel()

    @types.coroutine
    def stepped() -> Generator[Any, Any, object]:
        awaiting = coroutine.__await__()
        suspensions = 0
        throw: BaseException | None = None
        while True:
            try:
                waits_for = awaiting.send(None) if throw is None else awaiting.throw(throw)
            except StopIteration as stop:
                return stop.value
            suspensions += 1
            if suspensions == step:
                if not late:
                    cancel()
                elif waits_for is None:
                    asyncio.get_running_loop().call_soon(cancel)
                else:
                    waits_for.add_done_callback(cancel)  # before the task adds its own, so it runs first
            throw = None
            try:
                yield waits_for
            except BaseException as error:  # noqa: BLE001 - whatever it is belongs into the coroutine
                throw = error

    async def run() -> object:
        return await stepped()

    task = asyncio.get_running_loop().create_task(run(), name=f"cancelled at {step}")
    if step == 0:
        cancel()
    try:
        await asyncio.wait({task})
    finally:
        coroutine.close()  # a task that never took its first step never awaited it
    if task.cancelled():
        return Stopped("cancelled", reached)
    error = task.exception()
    return Stopped("completed" if error is None else "failed", reached, error)
