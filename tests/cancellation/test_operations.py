"""Everything of the public primitives that suspends, cancelled wherever it suspends: nothing is left behind.

Each operation runs in a small run with a checkpoint before and behind it, and is cancelled once at each of its
suspension points, before and after what it waits for is there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from quiesce.barrier import detached
from quiesce.checkpoint.restore import RestoreTargets, load_newest, restore_into
from quiesce.testing import cancelled_at, in_virtual_time, settle
from tests.barriers import Visitor
from tests.interleaving.world import World
from tests.save_rig import Rig


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation, what it needs, and what holds after a cancellation.

    Attributes:
        name: Its name.
        world: Makes the world.
        prepare: Gets the world ready; returns what is passed on.
        act: What is cancelled.
        suspends: How often it suspends at least.
    """

    name: str
    world: Callable[[], World]
    prepare: Callable[[World], Coroutine[Any, Any, Any]]
    act: Callable[[World, Any], Coroutine[Any, Any, object]]
    suspends: int


async def nothing(world: World) -> None:
    """Prepare nothing."""


async def a_reserved_batch(world: World) -> list[str]:
    """Reserve a batch in front of a shut gate that opens half a second later."""
    await world.ready(0)
    asyncio.get_running_loop().call_later(0.5, world.versions.advance)
    return await world.reserve(1)


async def an_admitted_group(world: World) -> Any:  # noqa: ANN401 - a record
    """Admit one group."""
    return (await world.admit(0))[0]


async def a_ready_group(world: World) -> None:
    """Have one group ready, and clearing running."""
    await world.ready(0)
    world.clears.start()


async def a_full_buffer(world: World) -> None:
    """Fill the buffer; room comes half a second later."""
    for position in range(world.owners.capacity):
        await world.ready(position)
        world.versions.advance()

    async def make_room() -> None:
        await asyncio.sleep(0.5)
        async with world.barrier.mutation("group_removal") as cut:
            world.owners.evict(cut, [world.buffer.ready()[0].group_id])

    _ = detached(make_room())


async def keys_to_clear(world: World) -> None:
    """Hand rows over, half a second before anybody clears them."""
    await world.ready(0)
    async with world.barrier.mutation("group_removal") as cut:
        world.owners.evict(cut, [world.buffer.ready()[0].group_id])
    asyncio.get_running_loop().call_later(0.5, world.clears.start)


async def roll_out(world: World, record: Any) -> None:  # noqa: ANN401 - a record
    """Run a rollout worker's body."""
    await world.rollouts._work(record, "prompt")  # noqa: SLF001 - a worker is a task; its body is what is cancelled


def gated() -> World:
    """Return a world whose gate shuts after each batch."""
    return World(window=0, prompts=8)


def failing() -> World:
    """Return a world in which the first attempt of each group fails."""
    world = World(max_attempts=2, retry_backoff_seconds=1.0)
    world.failing = lambda request: request.attempt == 0
    return world


def hopeless() -> World:
    """Return a world in which each group fails and is dropped."""
    world = World(max_attempts=1, min_step_batch_fraction=0.0)
    world.failing = lambda _request: True
    return world


OPERATIONS = (
    Operation("admit", gated, a_reserved_batch, lambda world, batch: world.admission.admit(batch), 2),
    Operation("rollout", World, an_admitted_group, roll_out, 3),
    Operation("rollout with a retry", failing, an_admitted_group, roll_out, 4),
    Operation("rollout that is dropped", hopeless, an_admitted_group, roll_out, 2),
    Operation(
        "train pump",
        World,
        a_ready_group,
        lambda world, _: world.train_pump(save_every=1, max_steps=1).run(),
        3,
    ),
    Operation("rollout pump", World, nothing, lambda world, _: world.rollout_pump().run(), 3),
    Operation("room for a batch", gated, a_full_buffer, lambda world, _: world.owners.room_for(1), 1),
    Operation("drain of clears", World, keys_to_clear, lambda world, _: world.clears.drain(5.0), 1),
    Operation("save", World, a_ready_group, lambda world, _: world.save(), 1),
    Operation(
        "wait for a version",
        World,
        nothing,
        lambda world, _: world.versions.wait_until(lambda version: version > 0),
        1,
    ),
    Operation("wait for a change", World, nothing, lambda world, _: world.owners.steps_taken(1), 1),
)


async def once(operation: Operation, step: int, *, late: bool) -> bool:
    """Cancel an operation at one step, with checkpoints around it; return whether it got so far."""
    world = operation.world()
    given = await operation.prepare(world)
    holding = asyncio.Event()

    async def window() -> None:
        async with world.barrier.checkpoint(None):
            await holding.wait()

    before = detached(window())
    await settle()
    stopping = detached(cancelled_at(operation.act(world, given), step, late=late))
    await settle()
    behind = detached(window())
    asyncio.get_running_loop().call_later(0.9, holding.set)
    if operation.name.startswith("wait for"):
        world.versions.advance()
        world.owners.step += 1
        world.changed.notify()
    stopped = await stopping
    assert stopped.outcome != "failed", stopped
    if not stopped.reached:
        assert stopped.outcome == "completed"
    await asyncio.gather(before, behind)
    await world.rollouts.close()
    await asyncio.sleep(30.0)  # what was left to a thread, or to a timer, is over
    check_nothing_is_left(world)
    return stopped.reached


def check_nothing_is_left(world: World) -> None:
    """Assert that statistics are as new but for what only grows, and every queue is empty."""
    world.idle()
    world.look()
    assert world.changed.waiting == 0
    assert world.admission.statistics().waiting_groups == 0
    assert world.rollouts.running == ()
    assert world.plane.statistics().open_snapshots == 0
    begun = any(claim.begun for claim in world.buffer.claims())
    assert begun or world.buffer.claims() == ()
    assert world.sampler.dispatch_cursor + 1 == world.admission.committed
    waits = world.versions._changed.waiting  # noqa: SLF001 - no statistics tell
    assert waits == 0


@pytest.mark.parametrize("late", [False, True], ids=["waiting", "granted"])
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_cancelled_at_any_step_an_operation_leaves_nothing(operation: Operation, *, late: bool) -> None:
    """For every suspension point: owners whole, nobody waits, no snapshot, no claim of a step that never began."""
    step = 0
    while in_virtual_time(once)(operation, step, late=late):
        step += 1
        assert step < 60, "it never ends"
    assert step > operation.suspends


@in_virtual_time
async def save_once(path: Path, step: int, *, late: bool) -> bool:
    """Cancel a real save at one step, behind an open slot; return whether it got so far."""
    rig = Rig(path)
    await rig.finished()
    slot = Visitor([], "slot", rig.barrier.mutation("retry"))
    await settle()
    asyncio.get_running_loop().call_later(0.5, slot.leave)
    stopped = await cancelled_at(rig.saver.save(step=0, trainer_version=0), step, late=late)
    await rig.saver.wait()
    assert stopped.outcome == ("cancelled" if stopped.reached else "completed")
    assert len(rig.seen.ended) == (step > 0)  # a task that never took a step attempted nothing
    assert not [name for name in rig.names() if ".tmp-" in name]
    assert rig.barrier.statistics().phase == "open"
    assert rig.plane.statistics().open_snapshots == 0
    assert not rig.saver.statistics().writing
    again = await rig.save()
    assert again.outcome in {"completed", "skipped"}
    await rig.close()
    return stopped.reached


@pytest.mark.parametrize("late", [False, True], ids=["waiting", "granted"])
def test_a_save_that_is_cancelled_at_any_step_is_counted_and_undone(tmp_path: Path, *, late: bool) -> None:
    """For every suspension point of ``save``: one ended attempt, no pin, no folder, and the next save goes through."""
    step = 0
    while save_once(tmp_path / str(step), step, late=late):
        step += 1
        assert step < 60, "it never ends"
    assert step >= 3


@in_virtual_time
async def restore_once(path: Path, step: int, *, late: bool) -> bool:
    """Cancel a real restore at one step, with a window in its way; return whether it got so far."""
    loaded = load_newest(path)
    world = World("windowed", prompts=8, incarnation=2)
    holding = asyncio.Event()

    async def window() -> None:
        async with world.barrier.checkpoint(None):
            await holding.wait()

    before = detached(window())
    await settle()
    asyncio.get_running_loop().call_later(0.9, holding.set)
    targets = RestoreTargets(
        barrier=world.barrier,
        sampler=world.sampler,
        accounting=world.accounting,
        spares=world.spares,
        buffer=world.buffer,
        ledger=world.ledger,
        dataplane=world.plane,
        versions=world.versions,
    )
    stopped = await cancelled_at(restore_into(loaded, targets, incarnation=2), step, late=late)
    await before
    await asyncio.sleep(30.0)
    assert stopped.outcome == ("cancelled" if stopped.reached else "completed"), stopped
    world.idle()
    owned = (len(world.ledger), len(world.buffer), world.sampler.dispatch_cursor)
    assert owned == ((0, 0, -1) if stopped.reached else (1, 1, 1))
    return stopped.reached


@pytest.mark.parametrize("late", [False, True], ids=["waiting", "granted"])
def test_a_restore_that_is_cancelled_at_any_step_gave_nobody_an_owner(tmp_path: Path, *, late: bool) -> None:
    """For every suspension point of ``restore_into``: all control state moved in one step, or none did."""

    @in_virtual_time
    async def save() -> None:
        rig = Rig(tmp_path)
        await rig.finished()
        await rig.read()
        assert (await rig.save()).outcome == "completed"
        await rig.close()

    save()
    step = 0
    while restore_once(tmp_path, step, late=late):
        step += 1
        assert step < 60, "it never ends"
    assert step >= 2
