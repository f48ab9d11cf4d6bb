"""The explorer of threads finds what depends on the order, and repeats itself."""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable
from math import comb
from typing import Any

import pytest

from quiesce.explorer import (
    ExplorationFailedError,
    Failure,
    explore_threads,
    replay_threads,
    switch_point,
    together,
)
from quiesce.testing import DeadlockError
from tests.unit.explorer import thread_programs as programs
from tests.unit.explorer.thread_programs import Account, Box, Forks, Latch, Once, Plain, Pump, Registry

MODULES = (programs,)


def found(scenario: Callable[[], object], **options: Any) -> Failure:  # noqa: ANN401 - of explore_threads()
    """Return the failure that must be there."""
    failure = explore_threads(scenario, modules=MODULES, **options).failure
    assert failure is not None
    return failure


def careless_deposits() -> None:
    """Lose one of two deposits, sometimes."""
    account = Account()
    together(account.careless_deposit, account.careless_deposit)
    assert account.balance == 2, account.balance


def careful_deposits() -> None:
    """Lose none."""
    account = Account()
    together(account.deposit, account.deposit)
    assert account.balance == 2


@pytest.mark.parametrize("shared", [None, ()])
@pytest.mark.parametrize("strategy", ["exhaustive", "random", "pct"])
def test_every_strategy_finds_a_lost_update(strategy: Any, shared: Any) -> None:  # noqa: ANN401 - literals
    """The report names the threads, the places and the schedule, which a replay repeats step by step."""
    failure = found(careless_deposits, strategy=strategy, shared=shared)
    assert isinstance(failure.error, AssertionError)
    with pytest.raises(AssertionError, match="1"):
        replay_threads(careless_deposits, failure.schedule, modules=MODULES)
    assert any("careless_deposit #2: acquire lock (thread_programs.py:" in step for step in failure.trace)
    assert failure.schedule.startswith("threads:idle:")


def test_right_code_passes_every_schedule() -> None:
    """The space is exhausted, with and without the reduction."""
    plain = explore_threads(careful_deposits, modules=MODULES).check()
    reduced = explore_threads(careful_deposits, modules=MODULES, shared=()).check()
    assert plain.exhausted
    assert reduced.exhausted
    assert reduced.schedules == 2  # one deposit first, or the other
    assert plain.schedules > reduced.schedules


@pytest.mark.parametrize("points", [0, 1, 2, 3])
def test_two_threads_of_n_points_have_as_many_schedules_as_combinatorics_says(points: int) -> None:
    """Each takes n + 1 steps, its beginning being one; without a reduction every interleaving is run, once."""
    seen: list[tuple[str, ...]] = []

    def scenario() -> None:
        log: list[str] = []

        def run(name: str) -> None:
            log.append(name)
            for _ in range(points):
                switch_point()
                log.append(name)

        together(lambda: run("a"), lambda: run("b"))
        seen.append(tuple(log))

    report = explore_threads(scenario).check()
    assert report.exhausted
    assert report.schedules == len(set(seen)) == len(seen) == comb(2 * points + 2, points + 1)


def test_a_check_that_is_followed_by_an_act_is_found() -> None:
    """Both see that it was not done."""

    def scenario() -> None:
        once = Once()
        together(once.do, once.do)
        assert once.times == 1

    found(scenario)
    found(scenario, shared=())


@pytest.mark.parametrize("shared", [None, ()])
def test_a_missed_notification_is_a_deadlock(shared: Any) -> None:  # noqa: ANN401 - a literal
    """The message says who waits for what, and where; the right way to wait has none."""

    def scenario(wait: str) -> None:
        latch = Latch()
        together(waiter=getattr(latch, wait), opener=latch.open)

    failure = found(lambda: scenario("careless_wait"), shared=shared)
    assert isinstance(failure.error, DeadlockError)
    assert "waiter: waits to be woken from changed, which nobody notifies" in str(failure.error)
    assert "thread_programs.py" in str(failure.error)
    assert explore_threads(lambda: scenario("wait"), modules=MODULES, shared=shared).check().exhausted


@pytest.mark.parametrize("shared", [None, ()])
def test_locks_in_two_orders_are_a_deadlock(shared: Any) -> None:  # noqa: ANN401 - a literal
    """The message names who holds what the other one wants."""

    def scenario() -> None:
        forks = Forks()
        together(one=forks.left_first, two=forks.right_first)

    error = str(found(scenario, shared=shared).error)
    assert "one: waits to acquire right, which two holds" in error
    assert "two: waits to acquire left, which one holds" in error


def test_only_lines_find_a_race_that_no_primitive_marks() -> None:
    """Without points there is nothing to choose; with lines the lost update is found, reduced or not."""

    def scenario() -> None:
        plain = Plain()
        together(plain.add, plain.add)
        assert plain.count == 2

    assert explore_threads(scenario, modules=MODULES).check().exhausted
    for shared in (None, ()):
        failure = found(scenario, lines=True, shared=shared)
        assert failure.schedule.startswith("lines:idle:")
        with pytest.raises(AssertionError):
            replay_threads(scenario, failure.schedule, modules=MODULES)
        assert any("self.count = before + 1" in step for step in failure.trace)


def test_threads_that_code_starts_are_controlled_and_daemons_are_ended() -> None:
    """A pump of the code's own works on a queue; one that nobody stops is unwound with its schedule."""

    def scenario() -> None:
        pump = Pump()
        pump.thread.start()
        together(lambda: pump.jobs.put(1), lambda: pump.jobs.put(2))
        pump.jobs.join()
        assert pump.total == 3

    before = set(threading.enumerate())
    report = explore_threads(scenario, modules=MODULES, shared=()).check()
    assert report.exhausted
    assert not set(threading.enumerate()) - before


def test_what_was_imported_by_name_or_made_with_the_module_is_replaced_and_put_back() -> None:
    """A function, a lock that the module made, and time that takes none."""
    real = [vars(programs)[name] for name in ("monotonic", "REGISTRY_LOCK", "threading")]
    logs: set[tuple[str, ...]] = set()

    def scenario() -> None:
        registry = Registry()
        together(lambda: registry.add("a"), lambda: registry.add("b"))
        logs.add(tuple(registry.names))

    explore_threads(scenario, modules=MODULES).check()
    assert logs == {("a after 60 s", "b after 60 s"), ("b after 60 s", "a after 60 s")}
    assert [vars(programs)[name] for name in ("monotonic", "REGISTRY_LOCK", "threading")] == real


def test_a_seed_repeats_itself() -> None:
    """Random and PCT explore the same schedules for the same seed, others for another."""
    for strategy in ("random", "pct"):
        traces = []
        for seed in (7, 7, 8):
            failure = found(careless_deposits, strategy=strategy, seed=seed, shrink=False)
            traces.append((failure.found_as, failure.trace))
        assert traces[0] == traces[1]


def test_a_replay_takes_the_same_steps() -> None:
    """Whatever the schedule is."""
    for schedule in ("threads:idle:", "threads:idle:0.1.0.1.1", "threads:any:1.1.0.2.1"):
        first, second = (replay_threads(careful_deposits, schedule, modules=MODULES) for _ in range(2))
        assert first == second


def test_a_failing_schedule_is_shrunk() -> None:
    """A drawn one has many choices that do not matter; one preemption is left."""
    failure = found(careless_deposits, strategy="random", seed=3)
    choices = failure.schedule.split(":")[2].split(".")
    drawn = failure.found_as.split(":")[2].split(".")
    assert sum(choice != "0" for choice in choices) == 1
    assert sum(choice != "0" for choice in drawn) > 1


def test_a_bound_explores_few_preemptions() -> None:
    """Fewer schedules, and one preemption is enough for a lost update."""
    every = explore_threads(careful_deposits, modules=MODULES)
    few = explore_threads(careful_deposits, modules=MODULES, bound=1, shared=())
    assert few.exhausted
    assert few.bound == 1
    assert few.schedules < every.schedules
    found(careless_deposits, bound=1)


def test_an_endless_run_and_an_error_in_a_thread_are_failures() -> None:
    """A thread that polls does not keep others from ending; one that polls for ever is told."""
    stop: list[int] = []

    def poll() -> None:
        while not stop:
            switch_point("poll")

    def polled() -> None:
        stop.clear()
        together(poll, lambda: stop.append(1))

    def endless() -> None:
        stop.clear()
        together(poll, poll)

    assert explore_threads(polled, strategy="random", max_schedules=20).check().schedules == 20
    replay_threads(polled, "threads:idle:")
    assert isinstance(explore_threads(endless, max_steps=100).failure.error, TimeoutError)  # type: ignore[union-attr]
    failing = explore_threads(lambda: together(lambda: int("no number"))).failure
    assert failing is not None
    assert isinstance(failing.error, ValueError)


def test_a_thread_that_blocks_on_something_real_is_named() -> None:
    """The message says which one, where, and what to do; the exploration ends, and nothing is shrunk."""
    real = threading.Lock()

    def careless() -> None:
        with real:
            switch_point("while it is held")

    failure = explore_threads(lambda: together(one=careless, two=careless), patience_seconds=2.0).failure
    assert failure is not None
    message = str(failure.error)
    assert "thread 'two' has not come back to a point" in message
    assert "test_threads.py" in message
    assert "modules" in message
    assert failure.schedule == failure.found_as


def test_an_uncontrolled_thread_is_told_that_it_is_none() -> None:
    """A real thread that uses a controlled lock would break the rule that one runs at a time."""

    def scenario() -> None:
        account = Account()
        errors: list[BaseException] = []

        def stranger() -> None:
            try:
                account.deposit()
            except RuntimeError as error:
                errors.append(error)

        thread = threading.Thread(target=stranger)
        thread.start()
        thread.join()
        raise errors[0]

    assert "is not controlled" in str(found(scenario).error)


def test_a_class_that_derives_from_a_primitive_is_refused() -> None:
    """It was built on the real one when its module was imported."""
    module = types.ModuleType("derived")

    class Worker(threading.Thread):
        """A thread."""

    Worker.__module__ = "derived"
    module.Worker = Worker  # type: ignore[attr-defined] # that is what is tested
    with pytest.raises(TypeError, match=r"derived\..*Worker derives"):
        explore_threads(lambda: None, modules=[module])


def test_explorations_do_not_nest() -> None:
    """The inner one says so."""
    with pytest.raises(ExplorationFailedError, match="do not nest"):
        explore_threads(lambda: explore_threads(lambda: None).check()).check()


@pytest.mark.parametrize("text", ["", "threads", "threads:idle:x", "asyncio:idle:0", "threads:now:0"])
def test_what_is_no_schedule_of_threads_is_refused(text: str) -> None:
    """The message says what one looks like."""
    with pytest.raises(ValueError, match="threads:idle"):
        replay_threads(careful_deposits, text)


def test_outside_of_an_exploration_a_scenario_runs_in_ordinary_threads() -> None:
    """Results come in order, and so does the first error."""
    careful_deposits()
    assert together(lambda: 1, named=lambda: 2) == [1, 2]
    with pytest.raises(ZeroDivisionError):
        together(lambda: switch_point("nothing"), lambda: 1 // 0)


def one_step(what: str) -> None:
    """Do one thing to a new box."""
    Box().step(what, 1)


def test_a_box_has_a_step_for_each_primitive() -> None:
    """The random programs of the other file use them all; here each runs once, alone."""
    for what in Box.STEPS:
        assert explore_threads(functools.partial(one_step, what), modules=MODULES).check().exhausted
