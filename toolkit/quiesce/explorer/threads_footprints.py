"""What steps of threads touch, and the search that leaves out orders of steps that have nothing in common.

Two steps of different threads may be swapped if neither touches what the other one changes: then both orders lead to
the same state. What a step touches is known once it has run: the primitives that it used, and the attributes of
*watched* objects that it read or set (see :mod:`quiesce.explorer.threads_patches`). An attribute that holds something
that can be changed in place, a list say, counts as changed when it is read.

:class:`Reduced` is a dynamic partial order reduction (Flanagan and Godefroid, POPL 2005). After each run it looks for
*races*: steps of different threads that cannot be swapped, of which the later one is not bound to come later by
what its own thread did before. For each it sees to it that the place before the earlier one is left, once, by a step that
leads to the other order. In addition, once everything that begins with step s was explored at a place, s *sleeps* in
what is explored next there, until a step comes that s cannot be swapped with (Godefroid's sleep sets). Neither leaves
out a deadlock or a reachable end, as long as threads share nothing that is not noted. Where a timer may fire at any
moment only sleep sets are used, and all steps are taken everywhere. Nothing here suspends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from quiesce.explorer.schedules import DepthFirst, Place, PrunedError
from quiesce.explorer.steps import Step

__all__ = ["Footprint", "Key", "Noting", "Reduced", "Unreduced"]

STEPS_OF_ONE_THREAD: Final = 1_000_000
"""Room for the numbers of the steps of one thread."""

Key = tuple[object, ...]
"""Names something that threads share, in the same way in every run."""


class Footprint:
    """What one step touched.

    Attributes:
        read: What it looked at.
        changed: What it changed, or may have changed.
        anything: Whether it may have touched whatever there is.
    """

    __slots__ = ("anything", "changed", "read")

    def __init__(self) -> None:
        self.read: set[Key] = set()
        self.changed: set[Key] = set()
        self.anything = False

    def meets(self, other: Footprint) -> bool:
        """Return whether the two steps may depend on their order."""
        return (
            self.anything
            or other.anything
            or not self.changed.isdisjoint(other.changed)
            or not self.changed.isdisjoint(other.read)
            or not self.read.isdisjoint(other.changed)
        )


class Noting(Protocol):
    """A run that notes what its steps touch."""

    footprint: Footprint
    """Of the step that ran last."""

    def blocked(self) -> list[tuple[Step, Footprint]]:
        """Return the steps that threads cannot take now, and what each of them would touch at least."""


class Unreduced(DepthFirst[Place]):
    """Every schedule, or every one within the bound."""

    def _place(self, steps: Sequence[Step]) -> Place:
        return Place(tuple(step.seq for step in steps))


@dataclass(slots=True)
class _Node(Place):
    """A place in a schedule of threads."""

    sleep: dict[int, Footprint] = field(default_factory=dict)  # steps not to take first here, by their seq
    done: dict[int, Footprint] = field(default_factory=dict)  # steps that were taken here
    wanted: set[int] = field(default_factory=set)  # steps to take here, because a race asks for it


@dataclass(slots=True)
class _Taken:
    """A step of the run."""

    steps: Sequence[Step]  # from which it was chosen
    seq: int = 0
    node: _Node | None = None
    footprint: Footprint | None = None  # None if it was not taken

    @property
    def thread(self) -> int:
        """Tells its thread from others."""
        return self.seq // STEPS_OF_ONE_THREAD


class Reduced(DepthFirst[_Node]):
    """Every schedule but for those that differ from another one only in the order of steps that can be swapped.

    Args:
        races: Whether to take only the steps that a race asks for.
    """

    def __init__(self, *, races: bool = True) -> None:
        super().__init__(None)
        self._races = races
        self._sleep: dict[int, Footprint] = {}
        self._taken: list[_Taken] = []
        self._pruned = False

    def begin(self, run: Noting) -> None:
        """Start from the top."""
        super().begin(run)
        self._run = run
        self._sleep = {}
        self._taken = []
        self._pruned = False

    def look(self, steps: Sequence[Step]) -> None:
        """Wake what the step before cannot be swapped with."""
        self._learn()
        if len(steps) > 1:
            self._taken.append(_Taken(steps))
        elif steps[0].seq in self._sleep:
            self._pruned = True
            raise PrunedError
        else:
            self._taken.append(_Taken(steps, steps[0].seq))

    def _place(self, steps: Sequence[Step]) -> _Node:
        node = _Node(tuple(step.seq for step in steps), sleep=dict(self._sleep))
        self._pruned = all(seq in node.sleep for seq in node.seqs)
        return node

    def _asleep(self, place: _Node, seq: int) -> bool:
        return seq in place.sleep or (bool(place.wanted) and seq not in place.wanted)

    def _descend(self, place: _Node, steps: Sequence[Step]) -> None:
        chosen = place.seqs[place.chosen]
        place.wanted.update((chosen,) if self._races else place.seqs)
        self._sleep = place.sleep | {seq: slept for seq, slept in place.done.items() if seq != chosen}
        self._taken[-1].seq, self._taken[-1].node = chosen, place

    def end(self) -> bool:
        """Go back to the last place with something left to explore."""
        self._learn()
        if self._races:
            taken = [step for step in self._taken if step.footprint is not None]
            blocked = [_Taken((), step.seq, None, touched) for step, touched in self._run.blocked()]
            _Races(taken).ask(blocked if self._pruned else ())
            if not self._pruned and self._taken and self._taken[-1].node is not None:
                # The run ended here, although others could go on, and perhaps would have met what came before.
                self._taken[-1].node.wanted.update(self._taken[-1].node.seqs)
        return super().end()

    def _learn(self) -> None:
        """Note what the step before touched."""
        if not self._taken or self._taken[-1].footprint is not None or not self._taken[-1].seq:
            return
        last = self._taken[-1]
        last.footprint = ran = self._run.footprint
        if last.node is not None:
            last.node.done[last.seq] = ran
        if self._sleep:
            self._sleep = {seq: slept for seq, slept in self._sleep.items() if not slept.meets(ran)}


class _Races:
    """The races of one run.

    Args:
        taken: Its steps.
    """

    def __init__(self, taken: list[_Taken]) -> None:
        self._taken = taken
        self._before: list[
            int
        ] = []  # for each step those that come before it in every run that is the same, as bits
        self._last: dict[int, int] = {}  # the last step of each thread
        self._changed: dict[Key, int] = {}  # the last step that changed something
        self._read: dict[Key, list[int]] = {}  # those that have read it since
        self._touched: dict[Key, list[int]] = {}  # all that have touched it
        self._anything: list[int] = []

    def ask(self, blocked: Sequence[_Taken]) -> None:
        """Ask for the other order of each race.

        Args:
            blocked: Steps that did not come, because the run was given up while they had to wait.
        """
        for number, step in enumerate(self._taken):
            touched = step.footprint
            assert touched is not None  # noqa: S101 - only steps that were taken are here
            direct, started = self._direct(number, step.thread, touched)
            own = self._upto(self._last[step.thread]) if step.thread in self._last else self._upto(started)
            self._before.append(0)
            for earlier in direct:
                self._before[number] |= self._upto(earlier)
            if step.thread >= 0:  # a timer fires once nothing else can go on
                self._meet(number, own, touched)
            self._last[step.thread] = number
            for key in touched.changed | touched.read:
                self._touched.setdefault(key, []).append(number)
            if touched.anything and step.thread >= 0:
                self._anything.append(number)
        for step in blocked:
            self._taken.append(step)
            assert step.footprint is not None  # noqa: S101 - as above
            self._meet(len(self._taken) - 1, self._upto(self._last.get(step.thread)), step.footprint)
            self._taken.pop()

    def _upto(self, number: int | None) -> int:
        return 0 if number is None else self._before[number] | 1 << number

    def _direct(self, number: int, thread: int, touched: Footprint) -> tuple[set[int], int | None]:
        """Return the steps that a step comes right after, and the one that started its thread, if that is new."""
        direct: set[int] = set()
        started: int | None = None
        if touched.anything:
            direct.update(self._last.values())
            self._changed.clear()
            self._read.clear()
            self._all = number
        elif thread in self._last:
            direct.add(self._last[thread])
        if self._all is not None and self._all != number:
            direct.add(self._all)
        for key in touched.read - touched.changed:
            if key in self._changed:
                direct.add(self._changed[key])
                if key[0] == "thread" and thread not in self._last:
                    started = self._changed[key]
            self._read.setdefault(key, []).append(number)
        for key in touched.changed:
            if key in self._changed:
                direct.add(self._changed[key])
            direct.update(self._read.pop(key, ()))
            self._changed[key] = number
        return direct, started

    _all: int | None = None

    def _meet(self, number: int, own: int, touched: Footprint) -> None:
        """Find the races in which a step is the later one."""
        if touched.anything:
            for earlier in range(number):
                self._reverse(earlier, number, own)
            return
        for earlier in self._anything:
            self._reverse(earlier, number, own)
        for key in touched.changed | touched.read:
            changes = key in touched.changed
            for earlier in reversed(self._touched.get(key, ())):
                step = self._taken[earlier]
                changed = step.footprint is not None and key in step.footprint.changed
                if own >> earlier & 1:
                    if changed:
                        break  # and whatever touched it before comes before that
                elif changes or changed:
                    self._reverse(earlier, number, own)

    def _initials(self, earlier: int, own: int) -> set[int]:
        """Return the threads with which what leads to a step could begin, after an earlier one."""
        leading = [number for number in range(earlier + 1, own.bit_length()) if own >> number & 1]
        bits = sum(1 << number for number in leading)
        return {self._taken[number].thread for number in leading if not self._before[number] & bits}

    def _reverse(self, earlier: int, later: int, own: int) -> bool:
        """See to it that the later step comes first, once; return whether it could have come right then."""
        node = self._taken[earlier].node
        thread = self._taken[later].thread
        if own >> earlier & 1 or self._taken[earlier].thread == thread:
            return False
        possible = {step.seq: step.seq // STEPS_OF_ONE_THREAD for step in self._taken[earlier].steps}
        if node is not None:
            leading = self._initials(earlier, own) or {thread}
            leads = [seq for seq, whose in possible.items() if whose in leading]
            awake = [seq for seq in leads if seq not in node.sleep]
            if node.wanted.isdisjoint(awake):
                node.wanted.update(awake[:1] or node.seqs)
        return self._taken[later].seq in possible
