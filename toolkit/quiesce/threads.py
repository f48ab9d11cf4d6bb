"""An executor whose threads never keep a dying process alive.

Rule: every pool in Quiesce is one of these, each with its own purpose, and none is the loop's default
executor, which a few blocked calls would fill. The threads are daemons: a hung call must not keep a halted
run from exiting, which is what ``concurrent.futures`` does by joining its threads at interpreter exit. The
caller's ``contextvars`` travel along, so that spans and cuts are seen in the thread. Yield rule: ``submit``
never blocks.

A test that decides when each call runs takes the pools over with :func:`controlled_by`.
"""

from __future__ import annotations

import contextvars
import queue
import threading
from collections.abc import Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, ParamSpec, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["DaemonExecutor", "ThreadController", "controlled_by"]

P = ParamSpec("P")
T = TypeVar("T")

_Job = tuple["Future[Any]", contextvars.Context, "Callable[[], Any]"]


class ThreadController(Protocol):
    """Runs the calls of every pool, in place of the pools' own threads."""

    def submit(
        self, pool: object, workers: int, context: contextvars.Context, call: Callable[[], Any]
    ) -> Future[Any]:
        """Take a call of a pool that runs so many at once, oldest first; it is to run in that context."""
        ...


_CONTROLLER: Final[contextvars.ContextVar[ThreadController | None]] = contextvars.ContextVar(
    "quiesce_thread_controller", default=None
)


@contextmanager
def controlled_by(controller: ThreadController | None) -> Iterator[None]:
    """Let every :class:`DaemonExecutor` that is used in this context hand its calls to ``controller``; None lets go."""
    token = _CONTROLLER.set(controller)
    try:
        yield
    finally:
        _CONTROLLER.reset(token)


class DaemonExecutor(Executor):
    """A thread pool of daemon threads, grown on demand.

    Args:
        name: Prefix of the threads' names.
        max_workers: How many calls may run at once; further ones queue.

    Attributes:
        name: The prefix.
    """

    def __init__(self, name: str, max_workers: int = 32) -> None:
        if max_workers < 1:
            message = f"executor {name!r} needs at least one worker, not {max_workers}"
            raise ValueError(message)
        self.name = name
        self._max_workers = max_workers
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._closed = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Queue a call; it sees a copy of the caller's context.

        Raises:
            RuntimeError: If the executor was shut down.
        """
        future: Future[T] = Future()
        context = contextvars.copy_context()
        with self._lock:
            if self._closed:
                message = f"executor {self.name!r} was shut down"
                raise RuntimeError(message)
            controller = _CONTROLLER.get()
            if controller is not None:
                return controller.submit(self, self._max_workers, context, lambda: fn(*args, **kwargs))
            self._jobs.put((future, context, lambda: fn(*args, **kwargs)))
            if self._idle > 0:
                self._idle -= 1
            elif len(self._threads) < self._max_workers:
                thread = threading.Thread(
                    target=self._work, name=f"{self.name}-{len(self._threads)}", daemon=True
                )
                self._threads.append(thread)
                thread.start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:  # noqa: FBT001, FBT002 - Executor's
        """Take no further calls; optionally wait for the running ones, and cancel the queued ones."""
        with self._lock:
            if cancel_futures:
                self._cancel_queued()
            if not self._closed or cancel_futures:
                for _ in self._threads:
                    self._jobs.put(None)
            self._closed = True
            threads = tuple(self._threads)
        if wait:
            for thread in threads:
                thread.join()

    def _cancel_queued(self) -> None:
        while True:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                return
            if job is not None:
                job[0].cancel()

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            if job is None:
                return
            future, context, call = job
            if future.set_running_or_notify_cancel():
                try:
                    result = context.run(call)
                except BaseException as error:  # noqa: BLE001 - the caller gets it through the future
                    future.set_exception(error)
                else:
                    future.set_result(result)
                    del result
            del job, future, context, call  # a waiting thread must not keep a finished call's objects alive
            with self._lock:
                self._idle += 1
