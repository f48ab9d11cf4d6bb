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
from typing import Final

from quiesce.explorer.loop import ExploredLoop, Freedom, Timers
from quiesce.explorer.steps import Step

__all__ = [
    "Exhaustive",
    "Pct",
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

    def begin(self, loop: ExploredLoop) -> None:
        """Start a run."""
        self.loop = loop
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

    def begin(self, loop: ExploredLoop) -> None:
        """Draw where priorities change; the places of a run are guessed from the run before."""
        super().begin(loop)
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
class _Node:
    """A place with more than one possibility, on the path that is explored now."""

    seqs: tuple[int, ...]
    pauses: tuple[bool, ...]
    sleep: frozenset[int]  # steps not to take first here, by their seq
    chosen: int
    taken: list[int] = field(default_factory=list)  # choices whose subtrees are done
    quiet_head: bool = False  # whether the first choice was a callback that queued nothing


class Exhaustive(Strategy):
    """Depth-first search with sleep sets, of all schedules or of those with few deviations.

    Args:
        bound: How often a schedule may take another step than the first possible one; None for any number.
        reduce: Whether to use sleep sets.
    """

    def __init__(self, bound: int | None, *, reduce: bool = True) -> None:
        self._bound = bound
        self._reduce = reduce
        self._path: list[_Node] = []
        self._depth = 0
        self._sleep: frozenset[int] = frozenset()
        self._last_pause = False
        self._watched: _Node | None = None
        self.exhausted = False
        self.pruned = False

    def begin(self, loop: ExploredLoop) -> None:
        """Start from the top."""
        super().begin(loop)
        self._depth = 0
        self._sleep = frozenset()
        self._watched = None
        self.pruned = False

    def look(self, steps: Sequence[Step]) -> None:
        """Learn what the step before queued, and keep what sleeps up to date where there is no choice."""
        if self._watched is not None:
            self._watched.quiet_head = self.loop.appended == 0
            self._watched = None
        if self._sleep and len(steps) == 1:
            if steps[0].seq in self._sleep:
                self.pruned = True
                raise PrunedError
            if steps[0].kind != "pause":
                self._sleep = frozenset()

    def _pick(self, steps: Sequence[Step]) -> int:
        if self._depth == len(self._path):
            self._path.append(self._node(steps))
        node = self._path[self._depth]
        self._depth += 1
        chosen = node.chosen
        if chosen == 0 and steps[0].kind == "callback" and not node.taken:
            self._watched = node
        if node.pauses[chosen] and self._reduce:
            quiet = node.quiet_head and 0 in node.taken
            self._sleep = node.sleep | ({node.seqs[0]} if quiet else frozenset())
        else:
            self._sleep = frozenset()
        return chosen

    def _node(self, steps: Sequence[Step]) -> _Node:
        node = _Node(
            tuple(step.seq for step in steps), tuple(step.kind == "pause" for step in steps), self._sleep, 0
        )
        first = self._next(node)
        if first is None:
            self.pruned = True
            raise PrunedError
        node.chosen = first
        return node

    def _next(self, node: _Node) -> int | None:
        """Return the next choice to explore at a place, or None."""
        for index, seq in enumerate(node.seqs):
            if index not in node.taken and seq not in node.sleep:
                return index
        return None

    def end(self) -> bool:
        """Go back to the last place with something left to explore."""
        if self._watched is not None:
            self._watched.quiet_head = self.loop.appended == 0
        del self._path[self._depth :]
        while self._path:
            node = self._path[-1]
            node.taken.append(node.chosen)
            following = self._next(node)
            if following is not None and self._affordable(following):
                node.chosen = following
                return True
            self._path.pop()
        self.exhausted = True
        return False

    def _affordable(self, choice: int) -> bool:
        if self._bound is None:
            return True
        deviations = sum(node.chosen != 0 for node in self._path[:-1])
        return deviations + (choice != 0) <= self._bound


_FREEDOMS: Final[tuple[Freedom, ...]] = ("asyncio", "any")
_TIMERS: Final[tuple[Timers, ...]] = ("idle", "any")


def write_schedule(freedom: Freedom, timers: Timers, choices: Sequence[int]) -> str:
    """Return a schedule as text: what is possible, then the choices, without the zeros at the end."""
    last = max((place + 1 for place, choice in enumerate(choices) if choice), default=0)
    return f"{freedom}:{timers}:{'.'.join(map(str, choices[:last]))}"


def parse_schedule(text: str) -> tuple[Freedom, Timers, list[int]]:
    """Return what :func:`write_schedule` wrote.

    Raises:
        ValueError: If it is no schedule.
    """
    try:
        freedom, timers, choices = text.split(":")
        parsed = [int(choice) for choice in choices.split(".")] if choices else []
        return (
            _FREEDOMS[_FREEDOMS.index(freedom)],
            _TIMERS[_TIMERS.index(timers)],
            parsed,
        )
    except ValueError:
        raise ValueError(f"{text!r} is no schedule: it reads like 'asyncio:idle:0.2.1'") from None
