"""The controlled primitives do what the originals do, in virtual time."""

from __future__ import annotations

import functools
import queue
import threading
import time
import types
from collections.abc import Callable
from typing import Any

import pytest

from quiesce.explorer import explore_threads, together

USER = types.ModuleType("user")
"""A module that uses threads, for those who are no class of their own."""

vars(USER).update(threading=threading, queue=queue, time=time)


def names() -> tuple[Any, Any, Any]:
    """Return the three modules as code sees them."""
    threads, queues, clock = (vars(USER)[name] for name in ("threading", "queue", "time"))
    return threads, queues, clock


def every_order(scenario: Callable[[], object], **options: Any) -> None:  # noqa: ANN401 - of explore_threads()
    """Explore a scenario in all orders."""
    assert explore_threads(scenario, modules=[USER], **options).check().exhausted


def both(scenario: Callable[[], object]) -> None:
    """Run a scenario of one thread with the originals, and with the stand-ins: it has to hold for both."""
    scenario()
    every_order(scenario)


def test_timeouts_take_no_time_and_all_the_time_they_say() -> None:
    """Each wait of a minute is over a minute later, on every clock; the whole test takes none."""

    def scenario() -> None:
        threads, queues, clock = names()
        condition, lock = threads.Condition(), threads.Lock()
        full, empty = queues.Queue(1), queues.SimpleQueue()
        full.put(1)
        lock.acquire()
        with condition:
            waits: list[Callable[[], object]] = [
                lambda: clock.sleep(60.0),
                lambda: condition.wait(60.0),
                lambda: condition.wait_for(lambda: False, 60.0),
                lambda: threads.Event().wait(60.0),
                lambda: lock.acquire(timeout=60.0),
                lambda: threads.Semaphore(0).acquire(timeout=60.0),
                lambda: _refused(queue.Full, lambda: full.put(2, timeout=60.0)),
                lambda: _refused(queue.Empty, lambda: empty.get(timeout=60.0)),
            ]
            for wait in waits:
                before = clock.monotonic(), clock.perf_counter_ns(), clock.time()
                wait()
                assert clock.monotonic() - before[0] == pytest.approx(60.0)
                assert clock.perf_counter_ns() - before[1] == pytest.approx(60e9)
                assert clock.time() - before[2] == pytest.approx(60.0)

    started = time.monotonic()
    every_order(scenario)
    assert time.monotonic() - started < 20.0


def _refused(error: type[Exception], call: Callable[[], object]) -> None:
    with pytest.raises(error):
        call()


def test_a_timeout_and_what_it_waits_for_can_come_in_either_order_if_timers_may_fire_at_any_moment() -> None:
    """With idle timers code takes no time, so the event is always in time."""
    for timers, expected in (("idle", {True}), ("any", {True, False})):
        seen: set[bool] = set()

        def scenario(seen: set[bool] = seen) -> None:
            threads, _, _ = names()
            event = threads.Event()
            together(lambda: seen.add(event.wait(1.0)), event.set)

        every_order(scenario, timers=timers)
        assert seen == expected


def test_wrong_uses_are_refused_as_by_the_originals() -> None:
    """The same errors, for the same reasons."""

    def scenario() -> None:
        threads, queues, clock = names()
        lock, reentrant, condition = threads.Lock(), threads.RLock(), threads.Condition()
        wrong: list[tuple[type[Exception], Callable[[], object]]] = [
            (RuntimeError, lock.release),
            (RuntimeError, reentrant.release),
            (RuntimeError, condition.wait),
            (RuntimeError, condition.notify),
            (ValueError, lambda: lock.acquire(blocking=False, timeout=1.0)),
            (ValueError, lambda: lock.acquire(timeout=-2.0)),
            (ValueError, lambda: threads.Semaphore(-1)),
            (ValueError, lambda: threads.Semaphore().release(0)),
            (ValueError, lambda: threads.BoundedSemaphore().release()),
            (ValueError, lambda: threads.Semaphore().acquire(blocking=False, timeout=1.0)),
            (ValueError, lambda: clock.sleep(-1.0)),
            (ValueError, lambda: queues.Queue().get(timeout=-1.0)),
            (ValueError, lambda: queues.Queue(1).put(1, timeout=-1.0)),
            (ValueError, lambda: queues.Queue().task_done()),
            (RuntimeError, lambda: threads.Thread().join()),
            (RuntimeError, lambda: threads.current_thread().join()),
        ]
        for error, use in wrong:
            with pytest.raises(error):
                use()

    both(scenario)


def test_what_does_not_wait_answers_as_the_originals() -> None:
    """Locks, counts, queues and threads, from one thread."""

    def scenario() -> None:
        threads, queues, _ = names()
        lock, reentrant, slots = threads.Lock(), threads.RLock(), threads.BoundedSemaphore(2)
        assert lock.acquire()
        assert lock.locked()
        assert not lock.acquire(blocking=False)
        lock.release()
        with reentrant, reentrant:
            assert reentrant.acquire(blocking=False)
            reentrant.release()
        assert slots.acquire(blocking=False)
        with slots:
            assert not slots.acquire(blocking=False)
        slots.release()
        first, last, least = queues.Queue(2), queues.LifoQueue(), queues.PriorityQueue()
        for each in (first, last, least):
            each.put(2)
            each.put_nowait(1)
        assert first.full()
        with pytest.raises(queue.Full):
            first.put_nowait(3)
        assert [each.get() for each in (first, last, least)] == [2, 1, 1]
        assert (first.qsize(), first.empty()) == (1, False)
        assert first.get_nowait() == 1
        with pytest.raises(queue.Empty):
            first.get_nowait()
        simple = queues.SimpleQueue()
        simple.put("x")
        assert (simple.get(), simple.empty()) == ("x", True)
        event = threads.Event()
        event.set()
        assert event.wait()
        event.clear()
        assert not event.is_set()
        thread = threads.Thread(target=event.set, name="setter")
        assert (thread.is_alive(), thread.ident, thread.name) == (False, None, "setter")
        thread.start()
        thread.join(60.0)
        assert (thread.is_alive(), event.is_set()) == (False, True)
        with pytest.raises(RuntimeError):
            thread.start()

    both(scenario)


def test_a_thread_knows_itself_and_keeps_its_own_locals() -> None:
    """Idents differ, and repeat themselves from schedule to schedule."""
    seen: set[tuple[int, int]] = set()

    def scenario() -> None:
        threads, _, _ = names()
        local = threads.local()

        def run(value: int) -> int:
            local.value = value
            threads.Lock().acquire()
            assert local.value == value
            assert threads.current_thread().ident == threads.get_ident()
            assert threads.current_thread().name in {"one", "two"}
            return int(threads.get_ident())

        one, two = together(one=lambda: run(1), two=lambda: run(2))
        assert one != two
        assert threads.main_thread() is threads.current_thread()
        seen.add((one, two))

    every_order(scenario)
    assert len(seen) == 1


def test_notify_wakes_one_and_notify_all_wakes_all() -> None:
    """In the order in which they began to wait; a waiter that nobody notifies waits for ever."""

    def scenario(how: str) -> None:
        threads, _, _ = names()
        condition = threads.Condition()
        waiting: list[int] = []
        woken: list[int] = []

        def wait(number: int) -> None:
            with condition:
                waiting.append(number)
                if condition.wait(60.0):
                    woken.append(number)

        def wake() -> None:
            with condition:
                getattr(condition, how)()

        together(lambda: wait(1), lambda: wait(2), wake)
        assert len(woken) <= (1 if how == "notify" else 2)
        assert woken == waiting[: len(woken)] or how == "notify_all"

    for how in ("notify", "notify_all"):
        explore_threads(functools.partial(scenario, how), modules=[USER], max_schedules=300).check()


def test_a_notification_can_be_wasted_on_a_waiter_whose_time_is_up() -> None:
    """As with the original: the waiter says that it was not notified, and the other one is not woken."""
    seen: set[tuple[bool, ...]] = set()

    def scenario() -> None:
        threads, _, clock = names()
        condition = threads.Condition()

        def wait() -> bool:
            with condition:
                return bool(condition.wait(1.0))

        def wake() -> None:
            clock.sleep(1.0)
            with condition:
                condition.notify()

        seen.add(tuple(together(wait, wake)[:1]))

    every_order(scenario)
    assert seen == {(True,), (False,)}


def test_a_barrier_and_a_timer_are_built_on_what_is_controlled() -> None:
    """Both parties pass together; a timer that is cancelled in time does nothing."""

    def scenario() -> None:
        threads, _, clock = names()
        barrier = threads.Barrier(2)
        assert sorted(together(barrier.wait, barrier.wait)) == [0, 1]
        fired: list[str] = []
        first, second = (threads.Timer(5.0, fired.append, [name]) for name in ("first", "second"))
        first.start()
        second.start()
        clock.sleep(1.0)
        second.cancel()
        first.join()
        second.join()
        assert fired == ["first"]

    explore_threads(scenario, modules=[USER], max_schedules=100).check()


def test_what_is_not_controlled_is_refused_and_the_rest_is_the_originals() -> None:
    """Constants and errors pass through."""

    def scenario() -> None:
        threads, queues, clock = names()
        assert threads.TIMEOUT_MAX == threading.TIMEOUT_MAX
        assert queues.Empty is queue.Empty
        assert clock.gmtime(0).tm_year == 1970
        with pytest.raises(NotImplementedError, match="not controlled"):
            threads.settrace(None)

    every_order(scenario)
