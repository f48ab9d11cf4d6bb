"""A fence that is cancelled, wherever it is: every gate is open again, and nothing is left running."""

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest

from quiesce.gate_fence import GateFence, LocalGate
from quiesce.snapshot_gate import Epoch, SnapshotGate
from quiesce.testing import VirtualTimeLoop, cancelled_at, in_virtual_time, settle, strict_hub
from tests.gates import RemoteGate, Writer
from tests.save_rig import Rig

MOST_STEPS = 400
"""More suspensions than any of these has: a scenario that never ends is a mistake."""


class World:
    """Two workers of this process, one of them in the middle of a write, and one elsewhere that loses a message."""

    def __init__(self, *, busy: bool) -> None:
        self.fence = GateFence(2, hub=strict_hub())
        self.locals = [LocalGate(SnapshotGate(label, hub=strict_hub())) for label in ("0", "1")]
        self.remote = RemoteGate("2")
        self.remote.lose["reopen"] = 1
        for handle in self.locals:
            self.fence.register(handle)
        self.fence.register(self.remote)
        self.writer = Writer(self.locals[0].gate).entered() if busy else None

    async def save(self) -> None:
        """Do what a save does with its fence."""
        try:
            await self.fence.close("cut", timeout=5)
            await asyncio.sleep(0)
            await self.fence.verify()
        finally:
            await self.fence.reopen()

    async def is_as_before(self) -> None:
        """Assert that every gate is open, now and after whatever is late has arrived."""
        for handle in self.locals:
            handle.gate.enter(timeout=0).release()
        if self.writer is not None:
            self.writer.finish()
        await asyncio.sleep(10)
        self.remote.gate.enter(timeout=0).release()
        assert self.fence.statistics().reopening == ()
        assert self.fence.statistics().closed_seconds == 0
        for gate in (*(handle.gate for handle in self.locals), self.remote.gate):
            assert gate.close_and_wait(Epoch(2, 1), timeout=0) in {"superseded", "closed"}
            gate.reopen(Epoch(2, 1))
            assert not gate.statistics().closed
        await self.fence.aclose()
        await settle()
        assert asyncio.all_tasks() == {asyncio.current_task()}


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("busy", [False, True])
def test_a_save_cancelled_at_every_suspension_leaves_every_gate_open(*, busy: bool, late: bool) -> None:
    """Also just as the answer that it waited for is there; the gates of this process are open in the same step."""

    @in_virtual_time
    async def cancelled(step: int) -> bool:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        loop.threads_hang = busy  # a close that waits for the writer may time out meanwhile
        world = World(busy=busy)
        stopped = await cancelled_at(world.save(), step, late=late)
        loop.threads_hang = False
        assert stopped.outcome in {"cancelled", "completed", "failed"}
        if stopped.reached and not late:
            assert stopped.outcome == "cancelled"
        await world.is_as_before()
        return stopped.reached

    reached = list(itertools.takewhile(cancelled, range(MOST_STEPS)))
    assert 3 < len(reached) < MOST_STEPS


@in_virtual_time
async def test_a_whole_loop_that_is_cancelled_leaves_the_gates_of_its_process_open() -> None:
    """Every task ends at once, the fence's own ones too: no background task is needed to open what is here."""
    world = World(busy=True)
    save = asyncio.create_task(world.save())
    await settle()
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await save
    for handle in world.locals:
        handle.gate.enter(timeout=0).release()
    assert world.writer is not None
    world.writer.finish()
    await world.fence.aclose()


@in_virtual_time
async def test_a_background_reopening_that_is_cancelled_before_its_first_step_is_not_taken_for_one_that_runs() -> (
    None
):
    """The next close and its reopening get through to the worker."""
    world = World(busy=False)
    world.remote.lose.clear()
    await world.fence.close("cut", timeout=5)
    await world.fence.reopen()
    (task,) = [task for task in asyncio.all_tasks() if task.get_name().startswith("quiesce-reopen")]
    task.cancel()
    await settle()
    assert world.fence.statistics().reopening == ()
    await world.fence.close("next", timeout=5)
    await world.fence.reopen()
    await settle()
    world.remote.gate.enter(timeout=0).release()
    await world.fence.aclose()


@in_virtual_time
async def test_an_adoption_cancelled_at_every_suspension_registers_nobody() -> None:
    """What was told to the worker is harmless, and may be told again."""
    for step in range(MOST_STEPS):
        fence, worker = GateFence(2, hub=strict_hub()), RemoteGate("0")
        worker.lose["reopen"] = 2
        stopped = await cancelled_at(fence.adopt(worker), step)
        assert fence.statistics().workers == (0 if stopped.reached else 1)
        if not stopped.reached:
            break
        await fence.adopt(worker)
        worker.gate.enter(timeout=0).release()
    assert 3 < step < MOST_STEPS


@pytest.mark.parametrize("late", [False, True])
async def test_a_real_save_cancelled_at_every_suspension_leaves_gates_and_barrier_open(
    tmp_path: Path, *, late: bool
) -> None:
    """Through the saver, whose own reopening outlives the cancellation."""
    for step in range(MOST_STEPS):
        fence = GateFence(1, hub=strict_hub())
        handles = [LocalGate(SnapshotGate(label, hub=strict_hub())) for label in ("0", "1")]
        for handle in handles:
            fence.register(handle)
        rig = Rig(tmp_path / f"run-{step}", fence=fence)
        await rig.finished()
        stopped = await cancelled_at(rig.saver.save(step=0, trainer_version=0), step, late=late)
        await rig.saver.wait()
        for handle in handles:
            handle.gate.enter(timeout=0).release()
        assert rig.barrier.statistics().phase == "open"
        assert rig.plane.statistics().open_snapshots == 0
        assert fence.statistics().closed_seconds == 0
        await rig.close()
        await fence.aclose()
        if not stopped.reached:
            assert stopped.outcome == "completed"
            break
        assert stopped.outcome in ({"cancelled", "completed"} if late else {"cancelled"})
    assert 3 < step < MOST_STEPS
