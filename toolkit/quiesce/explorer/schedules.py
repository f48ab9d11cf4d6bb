"""Choosing schedules: the strategies, and the text that a schedule is written as.

``exhaustive`` is a depth-first search that runs the scenario anew for each schedule (nothing can be copied out
of running coroutines), with sleep sets as its only reduction. Two steps are taken to commute in exactly one
case: a callback that queued nothing, and the end of a :func:`~quiesce.explorer.points.pause`. The end of a pause
does nothing but complete a future that nobody but the pausing task can see, which queues that task's next step
at the tail; whatever the callback did (it may have changed anything) it neither read that future nor queued
anything, so in both orders the same state is reached and the same task is queued, except that what the
callback asked for from outside may come a little earlier if the callback ran first. So only the order with the
callback first is explored. Nothing else is assumed independent: two steps that touch different objects are
still run in both orders, because Python code does not tell what it touches.

``random`` draws every choice. ``pct`` (Burckhardt et al., "A randomized scheduler with probabilistic guarantees
of finding bugs", ASPLOS 2010) gives each task, pool and source a random priority, always takes the most urgent
one, and lowers it at ``depth`` - 1 random steps: a bug that needs an order of d events is met with probability
of at least 1/(n k^(d-1)) a run. Nothing here suspends.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar

from quiesce.explorer.loop import ExploredLoop, Timers
from quiesce.explorer.steps import Step

__all__ = [
    "DepthFirst",
    "Exhaustive",
    "Pct",
    "Place",
    "PrunedError",
    "Random",
    "Replayed",
    "Strategy",
    "parse_schedule",
    "write_schedule",
]


class PrunedError(BaseException):
    """Ends a run whose rest is known: every order that it could still take was explored from elsewhere."""


class Strategy(ABC):
    """Chooses, run after run."""

    choices: list[int]
    """What was chosen in the current run, at every place with more than one possibility."""

    def begin(self, run: Any) -> None:  # noqa: ANN401 - whatever is explored; most strategies do not look at it
        """Start a run.

        Args:
            run: The loop, or whatever else is explored.
        """
        self.choices = []

    def choose(self, steps: Sequence[Step]) -> int:
        """Return the index of the step to take; asked before every step, also where there is only one."""
        self.look(steps)
        if len(steps) == 1:
            return 0
        chosen = self._pick(steps)
        self.choices.append(chosen)
        return chosen

    def look(self, steps: Sequence[Step]) -> None:  # noqa: B027 - most strategies need not
        """Look at what is possible before each step."""

    @abstractmethod
    def _pick(self, steps: Sequence[Step]) -> int: ...

    def end(self) -> bool:
        """End a run; return whether there is another one."""
        return True


class Replayed(Strategy):
    """Makes the given choices, then always the first possible one."""

    def __init__(self, choices: Sequence[int]) -> None:
        self._given = choices

    def _pick(self, steps: Sequence[Step]) -> int:
        place = len(self.choices)
        return min(self._given[place], len(steps) - 1) if place < len(self._given) else 0


class Random(Strategy):
    """Draws every choice."""

    def __init__(self, seed: int) -> None:
        self._draw = random.Random(seed)

    def _pick(self, steps: Sequence[Step]) -> int:
        return self._draw.randrange(len(steps))


class Pct(Strategy):
    """Random priorities, changed at a few random steps."""

    def __init__(self, seed: int, depth: int) -> None:
        self._draw = random.Random(seed)
        self._depth = depth
        self._longest = 32

    def begin(self, run: Any) -> None:  # noqa: ANN401 - as above
        """Draw where priorities change; the places of a run are guessed from the run before."""
        super().begin(run)
        self._priorities: dict[str, float] = {}
        self._changes = {self._draw.randrange(self._longest) for _ in range(self._depth - 1)}

    def _pick(self, steps: Sequence[Step]) -> int:
        for step in steps:
            if step.owner not in self._priorities:
                self._priorities[step.owner] = 1.0 + self._draw.random()
        best = self._best(steps)
        if len(self.choices) in self._changes:
            self._priorities[steps[best].owner] = self._draw.random()
            best = self._best(steps)
        return best

    def _best(self, steps: Sequence[Step]) -> int:
        return max(range(len(steps)), key=lambda index: (self._priorities[steps[index].owner], -index))

    def end(self) -> bool:
        """Note how long the run was."""
        self._longest = max(self._longest, len(self.choices))
        return True


@dataclass(slots=True)
class Place:
    """A place with more than one possibility, on the path that is explored now."""

    seqs: tuple[int, ...]
    chosen: int = 0
    taken: list[int] = field(default_factory=list)  # choices whose subtrees are done


P = TypeVar("P", bound=Place)


class DepthFirst(Strategy, Generic[P]):
    """Depth-first search of all schedules, or of those with few deviations; what it may leave out, a subclass says.

    Args:
        bound: How often a schedule may take another step than the first possible one; None for any number.
    """

    def __init__(self, bound: int | None) -> None:
        self._bound = bound
        self._path: list[P] = []
        self._depth = 0
        self.exhausted = False

    def begin(self, run: Any) -> None:  # noqa: ANN401 - as above
        """Start from the top."""
        super().begin(run)
        self._depth = 0

    def _pick(self, steps: Sequence[Step]) -> int:
        if self._depth == len(self._path):
            place = self._place(steps)
            first = self._next(place)
            if first is None:
                raise PrunedError
            place.chosen = first
            self._path.append(place)
        place = self._path[self._depth]
        self._depth += 1
        self._descend(place, steps)
        return place.chosen

    @abstractmethod
    def _place(self, steps: Sequence[Step]) -> P:
        """Describe a place that is new."""

    def _asleep(self, place: P, seq: int) -> bool:
        """Return whether whatever begins with a step at a place is explored elsewhere."""
        return False

    def _descend(self, place: P, steps: Sequence[Step]) -> None:
        """Prepare for what comes after the choice at a place."""

    def _next(self, place: P) -> int | None:
        """Return the next choice to explore at a place, or None."""
        for index, seq in enumerate(place.seqs):
            if index not in place.taken and not self._asleep(place, seq):
                return index
        return None

    def end(self) -> bool:
        """Go back to the last place with something left to explore."""
        del self._path[self._depth :]
        while self._path:
            place = self._path[-1]
            place.taken.append(place.chosen)
            following = self._next(place)
            if following is not None and self._affordable(following):
                place.chosen = following
                return True
            self._path.pop()
        self.exhausted = True
        return False

    def _affordable(self, choice: int) -> bool:
        if self._bound is None:
            return True
        deviations = sum(place.chosen != 0 for place in self._path[:-1])
        return deviations + (choice != 0) <= self._bound


@dataclass(slots=True)
class _Node(Place):
    """A place in an explored loop."""

    pauses: tuple[bool, ...] = ()
    sleep: frozenset[int] = frozenset()  # steps not to take first here, by their seq
    quiet_head: bool = False  # whether the first choice was a callback that queued nothing


class Exhaustive(DepthFirst[_Node]):
    """Depth-first search of an explored loop, with sleep sets.

    Args:
        bound: As for :class:`DepthFirst`.
        reduce: Whether to use sleep sets.
    """

    def __init__(self, bound: int | None, *, reduce: bool = True) -> None:
        super().__init__(bound)
        self._reduce = reduce
        self._sleep: frozenset[int] = frozenset()
        self._watched: _Node | None = None

    def begin(self, run: ExploredLoop) -> None:
        """Start from the top."""
        super().begin(run)
        self._loop = run
        self._sleep = frozenset()
        self._watched = None

    def look(self, steps: Sequence[Step]) -> None:
        """Learn what the step before queued, and keep what sleeps up to date where there is no choice."""
        self._learn()
        if self._sleep and len(steps) == 1:
            if steps[0].seq in self._sleep:
                raise PrunedError
            if steps[0].kind != "pause":
                self._sleep = frozenset()

    def _place(self, steps: Sequence[Step]) -> _Node:
        return _Node(
            tuple(step.seq for step in steps),
            pauses=tuple(step.kind == "pause" for step in steps),
            sleep=self._sleep,
        )

    def _asleep(self, place: _Node, seq: int) -> bool:
        return seq in place.sleep

    def _descend(self, place: _Node, steps: Sequence[Step]) -> None:
        if place.chosen == 0 and steps[0].kind == "callback" and not place.taken:
            self._watched = place
        if place.pauses[place.chosen] and self._reduce:
            quiet = place.quiet_head and 0 in place.taken
            self._sleep = place.sleep | ({place.seqs[0]} if quiet else frozenset())
        else:
            self._sleep = frozenset()

    def end(self) -> bool:
        """Go back to the last place with something left to explore."""
        self._learn()
        return super().end()

    def _learn(self) -> None:
        if self._watched is not None:
            self._watched.quiet_head = self._loop.appended == 0
            self._watched = None


K = TypeVar("K", bound=str)

_TIMERS: Final[tuple[Timers, ...]] = ("idle", "any")


def write_schedule(freedom: str, timers: Timers, choices: Sequence[int]) -> str:
    """Return a schedule as text: what is possible, then the choices, without the zeros at the end."""
    last = max((place + 1 for place, choice in enumerate(choices) if choice), default=0)
    return f"{freedom}:{timers}:{'.'.join(map(str, choices[:last]))}"


def parse_schedule(text: str, freedoms: Sequence[K]) -> tuple[K, Timers, list[int]]:
    """Return what :func:`write_schedule` wrote.

    Args:
        text: The schedule.
        freedoms: What it may begin with.

    Raises:
        ValueError: If it is no schedule, or one of another kind.
    """
    try:
        freedom, timers, choices = text.split(":")
        parsed = [int(choice) for choice in choices.split(".")] if choices else []
        return (
            next(known for known in freedoms if known == freedom),
            _TIMERS[_TIMERS.index(timers)],
            parsed,
        )
    except (ValueError, StopIteration):
        raise ValueError(f"{text!r} is no schedule: it reads like '{freedoms[0]}:idle:0.2.1'") from None
