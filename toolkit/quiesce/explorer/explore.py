"""Running a scenario under many schedules, and telling which of them breaks it.

Rule: a scenario is run anew for each schedule and must do the same each time but for the order of its steps: no
real time, no random numbers that are not seeded, no threads that the loop does not know. Nothing here is
awaited: call it from plain code, never from a running loop.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, Final, Literal, Protocol

from quiesce.errors import QuiesceError
from quiesce.explorer.jobs import Worker
from quiesce.explorer.loop import ExploredLoop, Freedom, Timers
from quiesce.explorer.schedules import (
    DepthFirst,
    Exhaustive,
    Pct,
    PrunedError,
    Random,
    Replayed,
    Strategy,
    parse_schedule,
    write_schedule,
)
from quiesce.explorer.steps import Step

__all__ = [
    "ExplorationFailedError",
    "Explored",
    "Failure",
    "Report",
    "Runner",
    "Scenario",
    "by_chance",
    "explore",
    "replay",
    "search",
]

Scenario = Callable[[], Coroutine[Any, Any, Any]]
"""Called once for each schedule; the schedule is broken if the coroutine raises."""

SHRINK_RUNS: Final = 400
"""Schedules that are tried to make a failing one simpler."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A schedule that breaks the scenario.

    Attributes:
        schedule: The schedule, to give to :func:`replay`.
        error: What was raised.
        trace: The steps, one a line.
        found_as: The schedule that was found first, before it was shrunk.
    """

    schedule: str
    error: BaseException = field(hash=False)
    trace: tuple[str, ...]
    found_as: str

    def __str__(self) -> str:
        """Return what went wrong, the schedule, and its steps."""
        steps = "\n".join(f"  {number:3} {step}" for number, step in enumerate(self.trace))
        return f"{type(self.error).__name__}: {self.error}\nschedule {self.schedule!r}:\n{steps}"


@dataclass(frozen=True, slots=True)
class Report:
    """What was explored.

    Attributes:
        strategy: ``exhaustive``, ``random`` or ``pct``.
        freedom: See :func:`explore`; of threads ``threads``, or ``lines`` if every line is a point.
        timers: See :func:`explore`.
        schedules: Schedules that ran to their end, or to their failure.
        pruned: Runs that were given up because they could only repeat what was explored.
        exhausted: Whether no schedule is left, within the bound.
        bound: The bound on deviations, or None.
        steps: Steps of the longest schedule.
        seconds: How long it took.
        failure: The schedule that breaks the scenario, or None.
    """

    strategy: str
    freedom: str
    timers: Timers
    schedules: int
    pruned: int
    exhausted: bool
    bound: int | None
    steps: int
    seconds: float
    failure: Failure | None

    def check(self) -> Report:
        """Return the report.

        Raises:
            ExplorationFailedError: If a schedule breaks the scenario.
        """
        if self.failure is not None:
            raise ExplorationFailedError(self.failure, self.schedules) from self.failure.error
        return self

    def __str__(self) -> str:
        """Return one line."""
        space = "all of them" if self.exhausted else "not all"
        bound = "" if self.bound is None else f" with at most {self.bound} deviations"
        end = "no failure" if self.failure is None else f"failed under {self.failure.schedule!r}"
        return f"{self.schedules} schedules ({self.strategy}, {self.freedom}; {space}{bound}): {end}"


class ExplorationFailedError(QuiesceError, AssertionError):
    """A schedule breaks the scenario; the message has the schedule and its steps."""

    def __init__(self, failure: Failure, schedules: int) -> None:
        self.failure = failure
        super().__init__(f"schedule {schedules} of the exploration fails: {failure}")


def explore(
    scenario: Scenario,
    *,
    strategy: Literal["exhaustive", "random", "pct"] = "exhaustive",
    freedom: Freedom = "asyncio",
    timers: Timers = "idle",
    seed: int = 0,
    depth: int = 3,
    bound: int | None = None,
    max_schedules: int = 10_000,
    max_steps: int = 5_000,
    reduce: bool = True,
    shrink: bool = True,
) -> Report:
    """Run a scenario under many schedules, up to the first one that breaks it.

    Args:
        scenario: An ``async def`` without arguments; what it raises breaks it, and so do a deadlock, an error
            that nobody handles, and a run that does not end.
        strategy: ``exhaustive`` for small scenarios; ``random`` or ``pct`` for large ones.
        freedom: ``asyncio`` for the orders that a real loop can produce, whenever things from outside (see
            :func:`~quiesce.explorer.points.pause`, threads) arrive; ``any`` also for orders in which callbacks
            of different tasks overtake each other, which no code should depend on.
        timers: ``idle`` if code takes no time, ``any`` if a timer may fire before whatever else is ready.
        seed: Of the random strategies.
        depth: Of ``pct``: how many events have to come in a certain order.
        bound: Of ``exhaustive``: only schedules that take at most so often another step than the first
            possible one.
        max_schedules: Where to stop.
        max_steps: Steps after which a run counts as endless.
        reduce: Of ``exhaustive``: whether to leave out schedules that are known to lead to what others do.
        shrink: Whether to look for a simpler schedule that fails in the same way.

    Returns:
        The report; call :meth:`Report.check` to raise what it found.

    Raises:
        RuntimeError: If a loop is running already.
    """
    _require_no_loop()
    chosen: Strategy
    if strategy == "exhaustive":
        chosen = Exhaustive(bound, reduce=reduce and timers == "idle")
    else:
        chosen = by_chance(strategy, seed, depth)
    runner = _LoopRunner(scenario, freedom, timers, max_steps)
    return search(runner, chosen, strategy=strategy, bound=bound, max_schedules=max_schedules, shrink=shrink)


def by_chance(strategy: Literal["random", "pct"], seed: int, depth: int) -> Strategy:
    """Return a strategy that draws; see :func:`explore`."""
    return Random(seed) if strategy == "random" else Pct(seed, depth)


def search(
    runner: Runner, chosen: Strategy, *, strategy: str, bound: int | None, max_schedules: int, shrink: bool
) -> Report:
    """Run what a runner runs under the schedules of a strategy, up to the first one that breaks it.

    Args:
        runner: Runs it; closed at the end.
        chosen: The strategy.
        strategy: Its name, for the report.
        bound: As for :func:`explore`.
        max_schedules: As for :func:`explore`.
        shrink: As for :func:`explore`.

    Returns:
        The report.
    """
    started = time.perf_counter()
    schedules = pruned = steps = 0
    failure: Failure | None = None
    try:
        while schedules < max_schedules:
            error, explored = runner.run(chosen)
            steps = max(steps, len(explored.trace))
            if isinstance(error, PrunedError):
                pruned += 1
            else:
                schedules += 1
                if error is not None:
                    failure = runner.failure(error, chosen.choices, explored, shrink=shrink)
                    break
            if not chosen.end():
                break
    finally:
        runner.close()
    return Report(
        strategy=strategy,
        freedom=runner.freedom,
        timers=runner.timers,
        schedules=schedules,
        pruned=pruned,
        exhausted=isinstance(chosen, DepthFirst) and chosen.exhausted,
        bound=bound if strategy == "exhaustive" else None,
        steps=steps,
        seconds=time.perf_counter() - started,
        failure=failure,
    )


def replay(scenario: Scenario, schedule: str, *, max_steps: int = 5_000) -> tuple[str, ...]:
    """Run a scenario once, under one schedule; a debugger may look at it.

    Args:
        scenario: As for :func:`explore`.
        schedule: From a :class:`Failure`.
        max_steps: As for :func:`explore`.

    Returns:
        The steps.

    Raises:
        ValueError: If the text is no schedule.
        BaseException: What breaks the scenario.
    """
    _require_no_loop()
    kinds: tuple[Freedom, ...] = ("asyncio", "any")
    freedom, timers, choices = parse_schedule(schedule, kinds)
    runner = _LoopRunner(scenario, freedom, timers, max_steps)
    try:
        error, loop = runner.run(Replayed(choices))
    finally:
        runner.close()
    if error is not None:
        raise error
    return tuple(map(str, loop.trace))


class Explored(Protocol):
    """One run of a scenario."""

    trace: list[Step]


class Runner(ABC):
    """Runs one scenario again and again.

    Attributes:
        freedom: What the schedules begin with.
        timers: See :func:`explore`.
    """

    freedom: str
    timers: Timers

    @abstractmethod
    def run(self, strategy: Strategy) -> tuple[BaseException | None, Explored]:
        """Run it once; return what it raised."""

    def close(self) -> None:  # noqa: B027 - not every runner keeps something
        """Let go of what is kept from run to run."""

    def failure(
        self, error: BaseException, choices: list[int], explored: Explored, *, shrink: bool
    ) -> Failure:
        """Describe a failing run, made simpler if that is wanted."""
        found_as = write_schedule(self.freedom, self.timers, choices)
        trace = tuple(map(str, explored.trace))
        for candidate in _Shrinker(choices) if shrink else ():
            replayed = Replayed(candidate.choices)
            again, explored = self.run(replayed)
            if type(again) is type(error) and again is not None:
                candidate.accept(replayed.choices)
                error, choices, trace = again, replayed.choices, tuple(map(str, explored.trace))
        return Failure(write_schedule(self.freedom, self.timers, choices), error, trace, found_as)


class _LoopRunner(Runner):
    """Runs a scenario in explored loops."""

    def __init__(self, scenario: Scenario, freedom: Freedom, timers: Timers, max_steps: int) -> None:
        self.freedom: Freedom = freedom
        self.timers = timers
        self._scenario = scenario
        self._max_steps = max_steps
        self._workers: list[Worker] = []

    def run(self, strategy: Strategy) -> tuple[BaseException | None, ExploredLoop]:
        """Run it once; return what it raised."""
        loop = ExploredLoop(  # type: ignore[abstract] # the network is not explored: asking for it raises
            freedom=self.freedom,
            timers=self.timers,
            choose=strategy.choose,
            workers=self._workers,
            max_steps=self._max_steps,
        )
        strategy.begin(loop)
        error: BaseException | None = None
        try:
            loop.explore(self._scenario)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as raised:  # noqa: BLE001 - whatever breaks a scenario is the result
            error = raised
        if error is None and loop.problems:
            problem = loop.problems[0]
            error = problem.get("exception") or RuntimeError(problem.get("message", "an unknown problem"))
        return error, loop

    def close(self) -> None:
        """End the threads."""
        for worker in self._workers:
            worker.close()


class _Candidate:
    def __init__(self, shrinker: _Shrinker, choices: list[int]) -> None:
        self._shrinker = shrinker
        self.choices = choices

    def accept(self, choices: list[int]) -> None:
        """Tell that it fails too."""
        self._shrinker.best = choices
        self._shrinker.accepted = True


class _Shrinker:
    """Proposes simpler choices: first without the end, then with fewer and fewer that are not 0."""

    def __init__(self, choices: list[int]) -> None:
        self.best = choices
        self.accepted = False

    def __iter__(self) -> Any:  # noqa: ANN401 - a generator of candidates
        tried = 0
        improved = True
        while improved and tried < SHRINK_RUNS:
            improved = False
            size = max(1, sum(choice != 0 for choice in self.best))
            while size:
                places = [place for place, choice in enumerate(self.best) if choice]
                for start in range(0, len(places), size):
                    if tried >= SHRINK_RUNS:
                        return
                    gone = set(places[start : start + size])
                    proposal = [0 if place in gone else choice for place, choice in enumerate(self.best)]
                    tried += 1
                    self.accepted = False
                    yield _Candidate(self, proposal)
                    if self.accepted:
                        improved = True
                        break
                else:
                    size //= 2
                    continue
                size = min(size, max(1, sum(choice != 0 for choice in self.best)))
                if not any(self.best):
                    return


def _require_no_loop() -> None:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    raise RuntimeError("explore() runs loops of its own: call it from plain code, not from a coroutine")
