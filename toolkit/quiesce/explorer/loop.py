"""The explored event loop: what may run next is a list, and somebody else chooses from it.

What may run next, in the order in which choices are numbered:

1. with ``freedom="asyncio"`` the oldest callback of the loop's queue, and only that one, because asyncio runs
   callbacks first in, first out; with ``freedom="any"`` the oldest callback of *each* task, and the oldest of
   all plain callbacks;
2. whatever comes from outside the loop and may come now: the end of a pause (:mod:`quiesce.explorer.points`),
   a call handed over by a thread (``call_soon_threadsafe``), the next piece of a blocking call;
3. the next timer: with ``timers="idle"`` only once nothing else can run (code takes no time), with
   ``timers="any"`` at the start of any iteration of the loop (code may take any time).

With ``"asyncio"`` something from outside may run before the oldest callback only if it was asked for before
that callback was queued. That is exactly what a real loop can do: there too it is appended to the queue at some
moment after it was asked for, and the queue is first in, first out; choosing late where it was appended loses
no order and adds none. A timer, likewise, goes between two iterations of a real loop.

Rule: deterministic. The same choices lead through the same steps; time is virtual, and a thread runs only
while the loop stands still. Yield rule: nothing here suspends.
"""

from __future__ import annotations

import asyncio
import contextvars
import heapq
import itertools
import sys
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from concurrent.futures import Executor, Future
from typing import Any, Final, Literal, TypeVar, TypeVarTuple

from quiesce.explorer.jobs import Job, Worker
from quiesce.explorer.steps import Handle, Step, Timer, described, pool_name, seq_of, task_of
from quiesce.threads import DaemonExecutor, controlled_by

__all__ = ["ExploredLoop", "Freedom", "Timers"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
Freedom = Literal["asyncio", "any"]
Timers = Literal["idle", "any"]
Choose = Callable[[Sequence["Step"]], int]

FOREIGN_WORKERS: Final = 32
"""Calls that run at once in an executor that is not ours: its real limit is not public."""

PATIENCE_STEPS: Final = 300
"""Callbacks that may run in a row while something outside is ready to come; a loop that polls would never end."""

Scope = contextvars.Context | None


class ExploredLoop(asyncio.AbstractEventLoop):
    """An asyncio loop that asks before every step; see the module's docstring.

    Args:
        freedom: Which orders are possible.
        timers: When timers fire.
        choose: Returns the index of the step to take.
        workers: Idle threads, shared by the loops of one exploration.
        max_steps: Steps after which the schedule counts as endless.
    """

    def __init__(
        self,
        *,
        freedom: Freedom,
        timers: Timers,
        choose: Choose,
        workers: list[Worker],
        max_steps: int,
    ) -> None:
        self.trace: list[Step] = []
        self.problems: list[dict[str, Any]] = []
        self.appended = 0
        self.watchers: list[Callable[[], object]] = []
        self._freedom = freedom
        self._timers_any = timers == "any"
        self._choose = choose
        self._workers = workers
        self._max_steps = max_steps
        self._now = 0.0
        self._seq = itertools.count()
        self._queue: list[Handle] = []
        self._outside: list[Handle] = []
        self._jobs: list[Job] = []
        self._widths: dict[int, int] = {}
        self._timers: list[tuple[float, int, Timer]] = []
        self._iteration = 0
        self._boundary = True
        self._in_job = False
        self._passed_over = 0
        self._draining = False
        self._closed = False
        self._running = False
        self._factory: Any = None
        self._names = itertools.count(1)
        self._generators: weakref.WeakSet[AsyncGenerator[Any, Any]] = weakref.WeakSet()

    # ------------------------------------------------------------------------------------------ running one

    def explore(self, scenario: Callable[[], Coroutine[Any, Any, Any]]) -> None:
        """Run a scenario to its end along the chosen steps, then clean up after it.

        Raises:
            BaseException: What the scenario, or a watcher, raises; DeadlockError if nothing can run any more.
        """
        hooks = sys.get_asyncgen_hooks()
        sys.set_asyncgen_hooks(firstiter=self._generators.add, finalizer=self._finalize)
        asyncio._set_running_loop(self)  # noqa: SLF001 - what asyncio has for event loops
        self._running = True
        try:
            with controlled_by(self):
                main = self.create_task(scenario(), name="scenario")
                try:
                    while not main.done():
                        self._advance()
                finally:
                    self._drain(main)
            if main.done() and not main.cancelled():
                main.result()
            elif main.cancelled():
                raise asyncio.CancelledError
        finally:
            self._running = False
            self._closed = True
            asyncio._set_running_loop(None)  # noqa: SLF001 - as above
            sys.set_asyncgen_hooks(*hooks)

    def _drain(self, main: asyncio.Task[Any]) -> None:
        """Cancel what is left and run it to its end, in the plain order."""
        self._draining = True
        self.watchers.clear()
        for _ in range(3):
            left = [task for task in asyncio.all_tasks(self) if not task.done()]
            if not left:
                break
            for task in left:
                task.cancel()
            for _ in range(self._max_steps):
                if all(task.done() for task in left) or not self._candidates():
                    break
                self._advance()
        for job in [*self._jobs]:
            if not job.over:
                self._in_job = True
                job.abandon(self._workers)
                self._in_job = False
        self._jobs.clear()
        if not main.done():
            main.cancel()

    def _advance(self) -> None:
        steps = self._candidates()
        if not steps:
            from quiesce.testing import DeadlockError

            raise DeadlockError(
                {
                    task.get_name(): repr(task.get_coro())
                    for task in sorted(asyncio.all_tasks(self), key=lambda task: task.get_name())
                }
            )
        if len(self.trace) >= self._max_steps and not self._draining:
            raise TimeoutError(f"the scenario has not ended after {self._max_steps} steps")
        step = steps[0] if self._draining else steps[self._choose(steps)]
        self.trace.append(step)
        self._take(step)
        for watcher in self.watchers:
            watcher()

    # ------------------------------------------------------------------------------------------ what may run

    def _candidates(self) -> list[Step]:
        self._forget_cancelled()
        queue = self._queue
        outside = [*self._arrivals(), *self._ready_jobs()]
        outside.sort(key=seq_of)
        steps: list[Step] = []
        if queue and not (outside and self._passed_over >= PATIENCE_STEPS):
            if self._freedom == "any":
                chains: dict[object, Handle] = {}
                for handle in queue:
                    chains.setdefault(task_of(handle), handle)
                steps = [self._step(handle) for handle in chains.values()]
            else:
                steps = [self._step(queue[0])]
        steps += outside
        if self._timers and (not steps or (self._timers_any and self._timer_may_overtake())):
            _, _, timer = self._timers[0]
            steps.append(Step("timer", timer.seq, timer, "timer"))
        return steps

    def _arrivals(self) -> list[Step]:
        """Return what may come from outside now: only what was asked for before the head was queued."""
        before = self._queue[0].seq if self._queue and self._freedom == "asyncio" else None
        if self._passed_over >= PATIENCE_STEPS:
            before = None
        return [
            Step(handle.origin, handle.seq, handle, self._owner_of(handle))
            for handle in self._outside
            if before is None or handle.seq < before
        ]

    def _ready_jobs(self) -> list[Step]:
        """Return the jobs that have a worker in their pool: the oldest, as many as it has."""
        if not self._jobs:
            return []
        taken: dict[int, int] = {}
        steps = []
        for job in self._jobs:
            pool = id(job.pool)
            taken[pool] = taken.get(pool, 0) + 1
            if taken[pool] <= self._widths[pool]:
                steps.append(Step("job", job.seq, job, f"job {job.label}"))
        return steps

    def _timer_may_overtake(self) -> bool:
        if not self._queue or self._freedom == "any":
            return True
        _, _, timer = self._timers[0]
        return self._boundary and timer.iteration < self._queue[0].iteration

    def _forget_cancelled(self) -> None:
        if any(handle.cancelled() for handle in self._queue):
            self._queue = [handle for handle in self._queue if not handle.cancelled()]
        if any(handle.cancelled() for handle in self._outside):
            self._outside = [handle for handle in self._outside if not handle.cancelled()]
        if any(job.future.cancelled() for job in self._jobs):
            self._jobs = [job for job in self._jobs if not job.future.cancelled()]
        while self._timers and self._timers[0][2].cancelled():
            heapq.heappop(self._timers)

    def _step(self, handle: Handle) -> Step:
        return Step("callback", handle.seq, handle, self._owner_of(handle))

    def _owner_of(self, handle: Handle) -> str:
        task = task_of(handle)
        return task.get_name() if task is not None else handle.origin

    def _take(self, step: Step) -> None:
        what = step.what
        before = len(self._queue)
        if step.kind == "callback":
            self._passed_over += 1 if self._outside or self._jobs else 0
            self._queue.remove(what)
            before -= 1
            self._iteration = what.iteration + 1
        else:
            self._passed_over = 0
            if self._queue:
                self._iteration = self._queue[0].iteration + 1
            else:
                self._iteration += 1
        if step.kind == "job":
            self._in_job = True
            try:
                what.step(self._workers)
            finally:
                self._in_job = False
            if what.over:
                self._jobs.remove(what)
        else:
            if step.kind == "timer":
                heapq.heappop(self._timers)
                self._now = max(self._now, what.when())
            elif step.kind != "callback":
                self._outside.remove(what)
            self._call(what)
        self.appended = len(self._queue) - before
        if step.kind == "callback":
            self._boundary = not self._queue or self._queue[0].iteration > what.iteration

    def _call(self, handle: Handle | Timer) -> None:
        try:
            handle.scope.run(handle.function, *handle.arguments)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:  # noqa: BLE001 - as in asyncio: reported, and the loop goes on
            self.call_exception_handler({"message": "a callback raised", "exception": error})

    # --------------------------------------------------------------------------------- what asyncio asks for

    def call_soon(
        self, callback: Callable[..., object], *args: object, context: Scope = None
    ) -> asyncio.Handle:
        """Queue a callback."""
        if self._in_job:
            raise RuntimeError("call_soon() is not for threads: use call_soon_threadsafe()")
        handle = self._handle(callback, args, context, "loop")
        self._queue.append(handle)
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[..., object], *args: object, context: Scope = None
    ) -> asyncio.Handle:
        """Queue a callback; one that a job hands over comes when it is chosen to."""
        if not self._in_job:
            return self.call_soon(callback, *args, context=context)
        handle = self._handle(callback, args, context, "thread")
        self._outside.append(handle)
        return handle

    def arrive(self, callback: Callable[..., object], *args: object) -> None:
        """Let a callback come from outside the loop, when it is chosen to."""
        self._outside.append(self._handle(callback, args, None, "pause"))

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: object, context: Scope = None
    ) -> asyncio.TimerHandle:
        """Queue a callback for later."""
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[..., object], *args: object, context: Scope = None
    ) -> asyncio.TimerHandle:
        """Queue a callback for a time."""
        timer = Timer(when, callback, args, self, context)
        timer.function, timer.arguments = callback, args
        timer.scope = contextvars.copy_context() if context is None else context
        timer.seq, timer.iteration = next(self._seq), self._iteration
        heapq.heappush(self._timers, (when, timer.seq, timer))
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Nothing: a cancelled timer is forgotten when it comes up."""

    def _handle(
        self, callback: Callable[..., object], args: tuple[Any, ...], context: Scope, origin: str
    ) -> Handle:
        handle = Handle(callback, args, self, context)
        handle.function, handle.arguments, handle.origin = callback, args, origin
        handle.scope = contextvars.copy_context() if context is None else context
        handle.seq, handle.iteration = next(self._seq), self._iteration
        return handle

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self._now

    def create_future(self) -> asyncio.Future[Any]:
        """Return a future of this loop."""
        return asyncio.Future(loop=self)

    def create_task(  # type: ignore[override] # the signature in typeshed depends on the Python version
        self,
        coro: Coroutine[Any, Any, T],
        *,
        name: str | None = None,
        context: Scope = None,
        **options: Any,  # noqa: ANN401 - of later Python versions
    ) -> asyncio.Task[T]:
        """Start a task; one without a name gets one that is the same in every run."""
        name = f"task-{next(self._names)}" if name is None else name
        if self._factory is not None:
            task: asyncio.Task[T] = self._factory(self, coro, context=context, **options)
            task.set_name(name)
            return task
        return asyncio.Task(coro, loop=self, name=name, context=context, **options)

    def set_task_factory(self, factory: Any) -> None:  # noqa: ANN401 - as in asyncio
        """Set what makes tasks."""
        self._factory = factory

    def get_task_factory(self) -> Any:  # noqa: ANN401 - as in asyncio
        """Return what makes tasks."""
        return self._factory

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts
    ) -> asyncio.Future[T]:
        """Make a blocking call a job, whatever executor it was meant for."""
        future: Future[T]
        if isinstance(executor, DaemonExecutor):
            future = executor.submit(func, *args)
        else:
            context = contextvars.copy_context()
            pool = self if executor is None else executor
            future = self.submit(pool, FOREIGN_WORKERS, context, lambda: func(*args))
            self._jobs[-1].label = described(func, args)
        return asyncio.wrap_future(future, loop=self)

    def submit(
        self, pool: object, workers: int, context: contextvars.Context, call: Callable[[], Any]
    ) -> Future[Any]:
        """Take a job of a pool; see :class:`quiesce.threads.ThreadController`."""
        job = Job(next(self._seq), pool, context, call, getattr(call, "label", "") or pool_name(pool))
        self._widths[id(pool)] = workers
        self._jobs.append(job)
        return job.future

    def get_debug(self) -> bool:
        """Return False: asyncio's debug mode measures real time."""
        return False

    def set_debug(self, enabled: bool) -> None:  # noqa: FBT001 - as in asyncio
        """Nothing."""

    def is_running(self) -> bool:
        """Return whether a schedule runs."""
        return self._running

    def is_closed(self) -> bool:
        """Return whether its schedule is over."""
        return self._closed

    def close(self) -> None:
        """Nothing: a loop closes with its schedule."""

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Keep what nobody handled: it fails the schedule."""
        if not self._draining:
            self.problems.append(context)

    def default_exception_handler(self, context: dict[str, Any]) -> None:
        """As :meth:`call_exception_handler`."""
        self.call_exception_handler(context)

    async def shutdown_asyncgens(self) -> None:
        """Close the asynchronous generators that are open."""
        for generator in list(self._generators):
            await generator.aclose()

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        """Nothing: jobs are unwound with their schedule."""

    def _finalize(self, generator: AsyncGenerator[Any, Any]) -> None:
        self._generators.discard(generator)
        if not self._closed and not self._in_job:
            _ = self.create_task(_close(generator), name="generator")


async def _close(generator: AsyncGenerator[Any, Any]) -> None:
    await generator.aclose()
