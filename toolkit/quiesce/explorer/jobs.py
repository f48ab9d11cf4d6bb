"""Blocking calls under control: each runs in a real thread, one at a time, and only when it is told to.

Rule: a call and the event loop never run at the same moment. Whoever steps a job waits until it has ended or
has come to :func:`pause_thread`, where the loop goes on and the job stands still. Yield rule: nothing here is
awaited; :meth:`Job.step` blocks for as long as the job's own code takes.
"""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final

from quiesce.threads import controlled_by

__all__ = ["Job", "Worker", "pause_thread"]

BLOCKED_SECONDS: Final = 20.0
"""Real seconds after which a job that neither ended nor paused is taken to wait for something that cannot come."""

_THREAD: Final = threading.local()


class _AbandonedError(BaseException):
    """Unwinds a job whose schedule is over."""


def pause_thread(label: str = "") -> None:
    """Let the loop, or another job, go on here; outside an explored job this does nothing.

    Put it into the fakes of blocking calls, where the real one may be overtaken: between two file operations,
    say. The explorer decides how much happens before the job goes on.

    Args:
        label: What is about to happen, for the trace.
    """
    job: Job | None = getattr(_THREAD, "job", None)
    if job is not None:
        job.pause(label)


class Worker:
    """A thread that runs a job's steps when asked to."""

    def __init__(self) -> None:
        self._go = threading.Semaphore(0)
        self._back = threading.Semaphore(0)
        self._work: Callable[[], None] | None = None
        self._thread = threading.Thread(target=self._run, name="explored job", daemon=True)
        self._thread.start()

    def start(self, work: Callable[[], None]) -> None:
        """Run ``work`` until it returns or pauses."""
        self._work = work
        self.resume()

    def resume(self) -> None:
        """Let it go on until it returns or pauses.

        Raises:
            TimeoutError: If it does neither.
        """
        self._go.release()
        if not self._back.acquire(timeout=BLOCKED_SECONDS):
            raise TimeoutError(
                "an explored job blocks: it waits for something that only the loop, or another job, can do"
            )

    def pause(self) -> None:
        """Give way; called in the worker's thread."""
        self._back.release()
        self._go.acquire()

    def close(self) -> None:
        """End the thread, once no job is in it."""
        self._work = None
        self._go.release()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._go.acquire()
            if self._work is None:
                return
            self._work()
            self._work = None
            self._back.release()


class Job:
    """One blocking call.

    Attributes:
        seq: When it was submitted.
        pool: The pool that it belongs to.
        label: What it does, for the trace.
        future: Its result.
        over: Whether it has ended.
        worker: The thread that it is in, once it has begun.
    """

    def __init__(
        self, seq: int, pool: object, context: contextvars.Context, call: Callable[[], Any], label: str
    ) -> None:
        self.seq = seq
        self.pool = pool
        self.label = label
        self.future: Future[Any] = Future()
        self.over = False
        self.worker: Worker | None = None
        self._context = context
        self._call = call
        self._abandoned = False
        self._place = ""

    def __str__(self) -> str:
        """Say what it does, and where it stands."""
        return f"thread {self.label}" + (f" at {self._place}" if self._place else "")

    def step(self, workers: list[Worker]) -> None:
        """Run it to its end or its next pause.

        Args:
            workers: Idle threads; one is taken, and given back at the end.
        """
        if self.worker is not None:
            self.worker.resume()
        elif self.future.set_running_or_notify_cancel():
            self.worker = workers.pop() if workers else Worker()
            self.worker.start(self._run)
        else:
            self.over = True
        if self.over and self.worker is not None:
            workers.append(self.worker)
            self.worker = None

    def abandon(self, workers: list[Worker]) -> None:
        """Unwind it, wherever it stands."""
        self._abandoned = True
        if self.worker is None:
            self.future.cancel()
        else:
            self.step(workers)

    def pause(self, label: str) -> None:
        """Give way; called in the job's thread."""
        if self._abandoned:
            raise _AbandonedError
        self._place = label
        assert self.worker is not None  # noqa: S101 - it runs, so it is in a thread
        self.worker.pause()
        if self._abandoned:
            raise _AbandonedError

    def _run(self) -> None:
        _THREAD.job = self
        try:
            result = self._context.run(_alone, self._call)
        except BaseException as error:  # noqa: BLE001 - the caller gets it through the future
            self.over = True
            self.future.set_exception(error)
        else:
            self.over = True
            self.future.set_result(result)


def _alone(call: Callable[[], Any]) -> Any:  # noqa: ANN401 - whatever the call returns
    """Run a call whose own threads are real ones: it waits for them, so they belong to its step."""
    with controlled_by(None):
        return call()
