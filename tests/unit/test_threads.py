"""Claims about the executor whose threads never keep a process alive."""

from __future__ import annotations

import subprocess
import sys
import threading
import weakref
from contextvars import ContextVar

import pytest

from quiesce.threads import DaemonExecutor

MARK: ContextVar[str] = ContextVar("mark", default="unset")


def test_a_call_returns_its_result() -> None:
    """Arguments go in, the result comes out."""
    assert DaemonExecutor("test").submit(divmod, 7, 2).result(20) == (3, 1)


def test_a_call_raises_its_error() -> None:
    """Whatever it is, also one that is no Exception."""
    future = DaemonExecutor("test").submit(sys.exit, 3)
    assert isinstance(future.exception(20), SystemExit)


def test_a_thread_survives_a_call_that_raises() -> None:
    """The next call is served by the same thread."""
    executor = DaemonExecutor("test", max_workers=1)
    assert executor.submit(divmod, 1, 0).exception(20) is not None
    assert executor.submit(divmod, 1, 1).result(20) == (1, 0)


def test_threads_are_daemons_with_the_executors_name() -> None:
    """They can be told apart in a stack dump and never hold the process."""
    thread = DaemonExecutor("quiesce-test").submit(threading.current_thread).result(20)
    assert thread.daemon
    assert thread.name.startswith("quiesce-test-")


def test_a_hung_call_does_not_keep_the_process_from_exiting() -> None:
    """The interpreter ends although a call never will."""
    program = (
        "import threading; from quiesce.threads import DaemonExecutor\n"
        "inside = threading.Event()\n"
        "def hang(): inside.set(); threading.Event().wait()\n"
        "DaemonExecutor('t').submit(hang)\n"
        "inside.wait()\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], timeout=40, check=False, capture_output=True, text=True
    )
    assert (ended.returncode, ended.stderr) == (0, "")


def test_the_callers_context_travels_along() -> None:
    """A call sees the context of its submitter, and a change stays in the thread."""
    token = MARK.set("caller")
    try:
        executor = DaemonExecutor("test", max_workers=1)
        assert executor.submit(MARK.get).result(20) == "caller"
        executor.submit(MARK.set, "thread").result(20)
        assert executor.submit(MARK.get).result(20) == "caller"
        assert MARK.get() == "caller"
    finally:
        MARK.reset(token)


def test_calls_run_at_once_up_to_the_limit() -> None:
    """As many threads as calls that meet, and no more than allowed."""
    executor = DaemonExecutor("test", max_workers=3)
    meet = threading.Barrier(3)  # breaks unless three threads meet in it
    futures = [executor.submit(meet.wait, 20) for _ in range(3)]
    assert sorted(future.result(20) for future in futures) == [0, 1, 2]
    names = {executor.submit(threading.current_thread).result(20).name for _ in range(10)}
    assert names <= {"test-0", "test-1", "test-2"}


def test_a_call_past_the_limit_waits_for_a_free_thread() -> None:
    """With one thread the second call starts when the first one ends."""
    executor, go, inside = DaemonExecutor("test", max_workers=1), threading.Event(), threading.Event()

    def block() -> None:
        inside.set()
        assert go.wait(20)

    first, second = executor.submit(block), executor.submit(int)
    assert inside.wait(20)
    assert not second.done()
    go.set()
    first.result(20)
    assert second.result(20) == 0


def test_a_queued_call_can_be_cancelled() -> None:
    """It never runs."""
    executor, go, ran = DaemonExecutor("test", max_workers=1), threading.Event(), list[int]()
    blocker = executor.submit(go.wait, 20)
    queued = executor.submit(ran.append, 1)
    assert queued.cancel()
    go.set()
    blocker.result(20)
    executor.submit(int).result(20)
    assert ran == []


def test_a_waiting_thread_keeps_nothing_of_its_last_call_alive() -> None:
    """Neither its argument nor its result, which may be a batch of rows."""

    class Rows:
        pass

    executor = DaemonExecutor("test", max_workers=1)
    argument = Rows()
    future = executor.submit(lambda rows: type(rows)(), argument)
    freed = [threading.Event(), threading.Event()]
    weakref.finalize(argument, freed[0].set)
    weakref.finalize(future.result(20), freed[1].set)
    del argument, future
    assert all(event.wait(20) for event in freed)


def test_a_closed_executor_takes_no_call() -> None:
    """And says which one it is."""
    executor = DaemonExecutor("test")
    executor.shutdown()
    with pytest.raises(RuntimeError, match="'test' was shut down"):
        executor.submit(int)


def test_closing_waits_for_the_running_and_queued_calls() -> None:
    """Nothing that was accepted is lost."""
    executor, ran = DaemonExecutor("test", max_workers=2), list[int]()
    for number in range(20):
        executor.submit(ran.append, number)
    executor.shutdown(wait=True)
    assert sorted(ran) == list(range(20))


def test_closing_may_cancel_what_is_queued() -> None:
    """The running call ends, the queued one is cancelled."""
    executor, go, inside = DaemonExecutor("test", max_workers=1), threading.Event(), threading.Event()

    def block() -> str:
        inside.set()
        assert go.wait(20)
        return "ended"

    running, queued = executor.submit(block), executor.submit(int)
    assert inside.wait(20)
    executor.shutdown(wait=False, cancel_futures=True)
    assert queued.cancelled()
    go.set()
    assert running.result(20) == "ended"


def test_closing_twice_still_waits() -> None:
    """A second close with wait joins the threads that the first one did not."""
    executor, go, inside = DaemonExecutor("test", max_workers=1), threading.Event(), threading.Event()

    def block() -> None:
        inside.set()
        assert go.wait(20)

    running = executor.submit(block)
    assert inside.wait(20)
    executor.shutdown(wait=False)
    threading.Timer(0.05, go.set).start()
    executor.shutdown(wait=True)
    assert running.done()


def test_an_executor_without_threads_is_refused() -> None:
    """It would never run anything."""
    with pytest.raises(ValueError, match="at least one worker"):
        DaemonExecutor("test", max_workers=0)
