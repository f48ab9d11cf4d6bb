"""Running a scenario of threads under many schedules: the counterpart of :mod:`quiesce.explorer.explore`.

A scenario is a function without arguments. It makes what is tested anew, lets threads loose on it, and looks at the
result::

    def two_deposits() -> None:
        account = bank.Account()
        together(account.deposit, account.deposit)
        assert account.balance == 2

    explore_threads(two_deposits, modules=[bank]).check()

Rule: a scenario must do the same each time but for the order of its steps. Yield rule: :func:`explore_threads` and
:func:`replay_threads` block for as long as they take, :func:`together` until its calls have returned,
:func:`switch_point` until the calling thread is chosen.
"""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Final, Literal

from quiesce.explorer.explore import Explored, Failure, Report, Runner, by_chance, search
from quiesce.explorer.loop import Timers
from quiesce.explorer.schedules import Replayed, Strategy, parse_schedule
from quiesce.explorer.threads_footprints import Reduced, Unreduced
from quiesce.explorer.threads_patches import Patches, line_tracer
from quiesce.explorer.threads_run import StuckError, ThreadRun, running

__all__ = ["explore_threads", "replay_threads", "switch_point", "together"]

Scenario = Callable[[], object]
Granularity = Literal["threads", "lines"]

PATIENCE_SECONDS: Final = 10.0
"""Real seconds after which a thread that came to no point is taken to wait for something that is not controlled."""


def explore_threads(
    scenario: Scenario,
    *,
    modules: Sequence[types.ModuleType] = (),
    shared: Sequence[type] | None = None,
    lines: bool = False,
    strategy: Literal["exhaustive", "random", "pct"] = "exhaustive",
    timers: Timers = "idle",
    seed: int = 0,
    depth: int = 3,
    bound: int | None = None,
    max_schedules: int = 10_000,
    max_steps: int = 5_000,
    shrink: bool = True,
    patience_seconds: float = PATIENCE_SECONDS,
) -> Report:
    """Run a scenario of threads under many schedules, up to the first one that breaks it.

    Args:
        scenario: A function without arguments. What it raises breaks it, and so do what any of its threads raises, a
            deadlock, and a run that does not end.
        modules: Where ``threading``, ``queue`` and ``time`` are replaced by controlled ones.
        shared: Of ``exhaustive``: None runs every schedule. Otherwise threads are taken to share only controlled primitives
            and attributes of objects whose class is in one of the modules or listed here; schedules are left out
            that can only lead to what others do. A list, a dict or an object of another class is shared through an attribute
            too, and is taken from there anew after each point.
        lines: Whether every line of the modules is a point, too: finds races that no lock guards.
        strategy: ``exhaustive`` for small scenarios; ``random`` or ``pct`` for large ones.
        timers: ``idle`` if code takes no time, ``any`` if a timeout may be over at any moment.
        seed: Of the random strategies.
        depth: Of ``pct``: how many events have to come in a certain order.
        bound: Of ``exhaustive``: only schedules that take at most so often another step than the first possible
            one, which is to let the same thread go on. Nothing is left out within the bound, whatever ``shared`` says.
        max_schedules: Where to stop.
        max_steps: Steps after which a run counts as endless.
        shrink: Whether to look for a simpler schedule that fails in the same way.
        patience_seconds: Real seconds that one step may take.

    Returns:
        The report; call :meth:`~quiesce.explorer.Report.check` to raise what it found.

    Raises:
        RuntimeError: If threads are explored already.
        TypeError: If a class in a module derives from one of ``threading`` or ``queue``.
    """
    reduced = strategy == "exhaustive" and bound is None and shared is not None
    chosen: Strategy
    if strategy != "exhaustive":
        chosen = by_chance(strategy, seed, depth)
    elif reduced:
        chosen = Reduced(races=timers == "idle")
    else:
        chosen = Unreduced(bound)
    runner = _ThreadRunner(
        scenario,
        modules,
        shared if reduced else None,
        "lines" if lines else "threads",
        timers,
        max_steps,
        patience_seconds,
    )
    return search(runner, chosen, strategy=strategy, bound=bound, max_schedules=max_schedules, shrink=shrink)


def replay_threads(
    scenario: Scenario,
    schedule: str,
    *,
    modules: Sequence[types.ModuleType] = (),
    max_steps: int = 5_000,
) -> tuple[str, ...]:
    """Run a scenario of threads once, under one schedule; a debugger may look at it, for as long as it likes.

    Args:
        scenario: As for :func:`explore_threads`.
        schedule: From a :class:`~quiesce.explorer.Failure`.
        modules: As for :func:`explore_threads`.
        max_steps: As for :func:`explore_threads`.

    Returns:
        The steps.

    Raises:
        ValueError: If the text is no schedule of threads.
        BaseException: What breaks the scenario.
    """
    kinds: tuple[Granularity, ...] = ("threads", "lines")
    granularity, timers, choices = parse_schedule(schedule, kinds)
    runner = _ThreadRunner(scenario, modules, None, granularity, timers, max_steps, None)
    try:
        error, run = runner.run(Replayed(choices))
    finally:
        runner.close()
    if error is not None:
        raise error
    return tuple(map(str, run.trace))


def switch_point(label: str = "") -> None:
    """Let other threads come first here; outside an exploration this does nothing.

    Args:
        label: What is about to happen, for the trace.
    """
    run = running()
    if run is not None:
        run.point(label or "go on")


def together(*calls: Callable[[], object], **named: Callable[[], object]) -> list[Any]:
    """Run calls at once, each in a thread of its own, and wait until all have returned.

    In an exploration the threads are controlled, and starting them and waiting for them takes no step. Outside of one they
    are ordinary threads.

    Args:
        calls: The calls; a thread is named after its function.
        named: More of them, with the names of their threads.

    Returns:
        What they returned, in order.

    Raises:
        BaseException: What one of them raised; the first, in order. (In an exploration it ends the schedule.)
    """
    works: list[tuple[str, Callable[[], object]]] = [
        (getattr(call, "__name__", "thread").strip("<>"), call) for call in calls
    ]
    works += named.items()
    results: list[Any] = [None] * len(works)
    errors: dict[int, BaseException] = {}

    def work(number: int, call: Callable[[], object]) -> None:
        results[number] = call()

    def guarded(number: int, call: Callable[[], object]) -> None:
        try:
            work(number, call)
        except BaseException as error:  # noqa: BLE001 - it is raised in the thread that waits
            errors[number] = error

    run = running()
    if run is None:
        threads = [
            threading.Thread(target=guarded, args=(number, call), name=name)
            for number, (name, call) in enumerate(works)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for number in sorted(errors):
            raise errors[number]
    else:
        actors = [
            run.spawn(name, functools.partial(work, number, call), daemon=False)
            for number, (name, call) in enumerate(works)
        ]
        run.point("go on after all", lambda: all(actor.done for actor in actors), placed=False)
        for actor in actors:
            run.read(actor.key)
    return results


class _ThreadRunner(Runner):
    """Runs a scenario of threads again and again."""

    def __init__(
        self,
        scenario: Scenario,
        modules: Sequence[types.ModuleType],
        watched: Sequence[type] | None,
        granularity: Granularity,
        timers: Timers,
        max_steps: int,
        patience_seconds: float | None,
    ) -> None:
        self.freedom: Granularity = granularity
        self.timers = timers
        self._scenario = scenario
        self._patches = Patches(modules, watched)
        self._tracer = line_tracer(modules) if granularity == "lines" else None
        self._max_steps = max_steps
        self._patience = patience_seconds
        self._installed = ExitStack()
        self._installed.enter_context(self._patches.installed())

    def close(self) -> None:
        """Put back what was replaced."""
        self._installed.close()

    def run(self, strategy: Strategy) -> tuple[BaseException | None, ThreadRun]:
        """Run it once; return what it raised."""
        run = ThreadRun(
            choose=strategy.choose,
            timers=self.timers,
            max_steps=self._max_steps,
            patience_seconds=self._patience,
            tracer=self._tracer,
        )
        strategy.begin(run)
        try:
            run.explore(self._begin)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - whatever breaks a scenario is the result
            return error, run
        return None, run

    def failure(
        self, error: BaseException, choices: list[int], explored: Explored, *, shrink: bool
    ) -> Failure:
        """Describe a failing run; one that got stuck is not made simpler, since each try costs the whole patience."""
        return super().failure(error, choices, explored, shrink=shrink and not isinstance(error, StuckError))

    def _begin(self) -> None:
        self._patches.renew()
        self._scenario()
