"""Faults of the window: what must not happen inside one, does; or a phase takes longer than it may.

Rule: each is a mistake that a run could contain, done to the live run. Yield rule: every fault suspends.
"""

from __future__ import annotations

import asyncio
import contextvars
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from quiesce.drills.drill import Drill
from quiesce.drills.holes import NoSlot, forged

if TYPE_CHECKING:
    from pathlib import Path

    from quiesce.checkpoint.trainer_state import Staged
    from quiesce.drills.holes import Holes
    from quiesce.drills.target import DrillTarget

__all__ = ["WINDOW"]

BUDGET_SECONDS: Final = 0.5
"""What a phase may take while a drill is to overrun it: an alert chain is not tested faster by waiting for ten minutes."""

OVERRUN_SECONDS: Final = 1.0


async def _group_moves_inside_the_window(target: DrillTarget, holes: Holes) -> None:
    owners = target.owners

    def evict() -> bool:
        entry = holes.find_ready("window_is_exclusive")
        if entry is not None:
            owners.evict(forged(), [entry.group_id])
        return entry is not None

    holes.in_the_next_window(evict)


async def _group_moves_in_no_slot(target: DrillTarget, holes: Holes) -> None:
    while True:
        entry = await holes.ready_group("window_is_exclusive")
        await holes.no_slot_open()
        if entry in target.owners.buffer.ready():
            target.owners.evict(forged(), [entry.group_id])
            return


async def _commit_without_a_slot(target: DrillTarget, holes: Holes) -> None:
    left = asyncio.Event()
    holes.once(
        target.owners.barrier,
        "mutation",
        lambda _mutation, _kind: NoSlot(holes.no_slot_open, left.set),
        when=lambda kind: kind == "group_commit",
    )
    await left.wait()


async def _slot_opens_inside_the_window(target: DrillTarget, holes: Holes) -> None:
    from quiesce.barrier import _HELD

    barrier: Any = target.owners.barrier

    def enter_and_leave() -> None:
        phase, barrier._phase = barrier._phase, "open"  # noqa: SLF001 - the hole
        slot = barrier.mutation("retry")
        with suppress(StopIteration):
            slot.__aenter__().send(None)
        slot.__aexit__(None, None, None)
        barrier._phase = phase  # noqa: SLF001

    def elsewhere() -> None:
        context = contextvars.copy_context()
        context.run(_HELD.set, None)
        context.run(enter_and_leave)

    holes.in_the_next_window(elsewhere)


async def _state_changes_while_it_is_captured(target: DrillTarget, holes: Holes) -> None:
    def moved(capture: Any) -> Any:  # noqa: ANN401 - passed on
        target.owners.barrier._version += 1  # noqa: SLF001 - the hole
        return capture()

    holes.in_the_next_window(lambda: holes.once(target.sources.spares, "refs", moved))


async def _part_of_another_cut(target: DrillTarget, holes: Holes) -> None:
    holes.in_the_next_window(lambda: target.hub.fire("cut_part_captured", "the-cut-before", "ledger", 1))


async def _slot_holds_up_the_drain(target: DrillTarget, holes: Holes) -> None:
    barrier = target.owners.barrier

    async def hold() -> None:
        async with barrier.mutation("retry"):
            await holes.until(lambda: barrier.statistics().phase == "drain")
            await asyncio.sleep(OVERRUN_SECONDS)

    holes.item(target.budgets, "drain", BUDGET_SECONDS)
    holes.spawn(hold, "drill that holds a slot")


class _SlowToWrite:
    """A trainer's staged state that takes its time, once."""

    def __init__(self, staged: Staged) -> None:
        self._staged = staged

    async def write(self, directory: Path) -> None:
        """Wait, then write."""
        await asyncio.sleep(OVERRUN_SECONDS)
        await self._staged.write(directory)


class _StagesSlowly:
    """Stands for a trainer's state."""

    def __init__(self, stage: Any) -> None:  # noqa: ANN401 - a coroutine function
        self.stage = stage


async def _write_hangs(target: DrillTarget, holes: Holes) -> None:
    original = target.trainer_state

    async def stage() -> Any:  # noqa: ANN401 - a Staged
        back()
        return _SlowToWrite(await original.stage())

    holes.item(target.budgets, "write", BUDGET_SECONDS)
    back = holes.replace(target.checkpointer, "_trainer_state", _StagesSlowly(stage))


WINDOW = (
    Drill(
        "group-moves-inside-the-window",
        "A group is evicted while a checkpoint reads the state.",
        "an owner that moves without asking for a slot",
        ("window_is_exclusive",),
        _group_moves_inside_the_window,
        at_once=False,
        mentions="inside",
    ),
    Drill(
        "eviction-in-no-slot",
        "A group is evicted in no slot, so that nothing keeps it out of a window.",
        "an eviction that asks for no slot",
        ("window_is_exclusive",),
        _group_moves_in_no_slot,
        mentions="in no slot",
    ),
    Drill(
        "commit-outside-the-barrier",
        "A finished group is committed in no slot.",
        "a commit whose slot was left out, or left before it",
        ("window_is_exclusive",),
        _commit_without_a_slot,
        mentions="in no slot",
    ),
    Drill(
        "slot-opens-inside-the-window",
        "The barrier lets a slot in although a checkpoint holds it.",
        "a barrier that forgets its exclusive side",
        ("window_is_exclusive", "cut_is_one_instant"),
        _slot_opens_inside_the_window,
        at_once=False,
        mentions="slot",
    ),
    Drill(
        "state-changes-while-captured",
        "Something that counts as a mutation happens between two parts of a cut.",
        "a capture that suspends between two parts",
        ("cut_is_one_instant",),
        _state_changes_while_it_is_captured,
        at_once=False,
        mentions="mutation version",
    ),
    Drill(
        "part-of-another-cut",
        "A part that was captured for another cut is taken for one of this one's.",
        "a capture that is cached, or finished after its window",
        ("cut_is_one_instant",),
        _part_of_another_cut,
        at_once=False,
        mentions="the-cut-before",
    ),
    Drill(
        "slot-holds-up-the-drain",
        "A slot stays open while a checkpoint waits for it to close.",
        "a slot around something slow: a remote call, a gate",
        ("checkpoint_progress",),
        _slot_holds_up_the_drain,
        at_once=False,
        mentions="drain",
    ),
    Drill(
        "write-hangs",
        "The trainer's state is slow to write.",
        "a slow disk, or a trainer that writes to a remote one",
        ("checkpoint_progress",),
        _write_hangs,
        at_once=False,
        mentions="write",
    ),
)
