"""Sweeping rows that nobody owns."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import Executor
from typing import Self

import numpy as np
import pytest

from quiesce.accounting import Accounting
from quiesce.barrier import DataPlaneCheckpointBarrier
from quiesce.buffer import ReplayBuffer
from quiesce.checkpoint.cut import CommittedPosition
from quiesce.cleanup import BackgroundCleanup
from quiesce.dataplane import MemoryDataPlane
from quiesce.ledger import RolloutLedger
from quiesce.owners import Owners
from quiesce.prompts import Pull
from quiesce.samplers import InOrderSampler
from quiesce.signals import Changed, TrainerVersion
from quiesce.snapshot_gate import SnapshotGate
from quiesce.spares import SparePool
from quiesce.sweep import RowOwners, orphans, sweep_every, sweep_orphans
from quiesce.testing import strict_hub
from quiesce.threads import DaemonExecutor
from quiesce.types import BufferEntry, GroupRecord, PromptRef, RowKey


def key(group: str, attempt: int = 0, generation: int = 0, sequence: int | None = None) -> RowKey:
    """Return a row key of the first incarnation."""
    return RowKey(1, group, generation, attempt, sequence)


def record(position: int, attempt: int = 0) -> GroupRecord:
    """Return an admitted group."""
    ref = PromptRef(0, position, position)
    return GroupRecord(ref.group_id, 0, ref, "admitted", 0, 0, attempt)


def entry(position: int) -> BufferEntry:
    """Return a finished group of two rows."""
    ref = PromptRef(0, position, position)
    keys = (key(ref.group_id), key(ref.group_id, generation=1))
    return BufferEntry(ref.group_id, 0, ref, 0, 0, 0, 0, 0, keys)


def test_rows_of_the_ledgers_current_attempt_are_owned_finished_or_not() -> None:
    """A rollout may be putting them right now, chunk or final."""
    mine = record(3, attempt=1)
    listed = [key(mine.group_id, 1), key(mine.group_id, 1, sequence=0)]

    assert orphans(listed, RowOwners([mine], [], [])) == ()


def test_rows_of_an_attempt_that_the_ledger_gave_up_are_orphans() -> None:
    """Only the attempt that the ledger waits for can still commit."""
    mine = record(3, attempt=1)
    old = key(mine.group_id, 0)

    assert orphans([old, key(mine.group_id, 1)], RowOwners([mine], [], [])) == (old,)


def test_rows_that_an_entry_names_are_owned_and_others_of_its_group_are_not() -> None:
    """A finished group owns exactly the rows of its index entry."""
    mine = entry(5)
    extra = key(mine.group_id, generation=7)

    assert orphans([*mine.keys, extra], RowOwners([], [mine], [])) == (extra,)


def test_rows_that_are_queued_for_clearing_explain_themselves() -> None:
    """A queued, running or failed clear is no hole."""
    gone = key("e000-p0000009")

    assert orphans([gone], RowOwners([], [], [gone])) == ()


class Rig:
    """A run's owners over a real data plane, with cleanup under way."""

    def __init__(self) -> None:
        hub = strict_hub()
        barrier = DataPlaneCheckpointBarrier(hub=hub)
        self.dataplane = MemoryDataPlane(1, barrier=barrier, hub=hub)
        ledger = RolloutLedger(barrier)
        self.owners = Owners(
            barrier=barrier,
            sampler=InOrderSampler(barrier, max_lookahead_versions=1),
            versions=TrainerVersion(hub=hub),
            ledger=ledger,
            spares=SparePool(barrier),
            buffer=ReplayBuffer(barrier, ledger, self.dataplane),
            accounting=Accounting(barrier),
            clears=BackgroundCleanup(SnapshotGate("controller", hub=hub), self.dataplane.clear, hub=hub),
            capacity=4,
            groups_per_step=2,
            min_step_batch_fraction=0.0,
            position=CommittedPosition(0, 0, exhausted=False, loader=None),
            changed=Changed(),
        )

    async def __aenter__(self) -> Self:
        self.owners.clears.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.owners.clears.close)
        self.dataplane.close()

    async def finished_group(self) -> BufferEntry:
        """Read, admit, put and commit a group of two rows."""
        owners, ref = self.owners, PromptRef(0, 0, 0)
        pull = Pull((ref,), ("prompt",), False, 0, CommittedPosition(0, 1, exhausted=False, loader=None))
        keys = (key(ref.group_id), key(ref.group_id, generation=1))
        self.dataplane.put({row: {"x": np.zeros(1)} for row in keys})
        async with owners.barrier.mutation("group_commit") as cut:
            owners.commit_pull(cut, pull, to_spares=False)
            admitted = owners.ledger.mark_group_admitted(cut, ref.group_id, target_step=0, start_version=0)
            return owners.commit_rollout(cut, admitted, keys=keys, generated_from=0, generated_to=0, stats={})


@pytest.fixture
def executor() -> Iterator[Executor]:
    """A pool for listing and comparing."""
    pool = DaemonExecutor("sweep-test", 1)
    yield pool
    pool.shutdown()


async def test_an_orphan_is_swept_and_owned_rows_stay(executor: Executor) -> None:
    """The sweep clears what nobody owns and nothing else."""
    async with Rig() as rig:
        owned = await rig.finished_group()
        hole = key("e000-p0000999")
        rig.dataplane.put({hole: {"x": np.zeros(1)}})

        swept = await sweep_orphans(rig.dataplane, rig.owners, executor)
        assert await rig.owners.clears.drain(30)

        assert swept == 1
        assert rig.dataplane.missing([hole, *owned.keys]) == (hole,)


async def test_rows_that_a_workers_cleanup_still_has_to_clear_are_no_orphans(executor: Executor) -> None:
    """A finished group's chunk rows are obsolete, and its worker has queued them: the sweep leaves them alone."""
    async with Rig() as rig:
        owned = await rig.finished_group()
        chunks = [key(owned.group_id, sequence=number) for number in range(2)]
        lost = key(owned.group_id, attempt=7, sequence=0)
        rig.dataplane.put({row: {"x": np.zeros(1)} for row in (*chunks, lost)})

        swept = await sweep_orphans(rig.dataplane, rig.owners, executor, elsewhere=lambda: chunks)
        assert await rig.owners.clears.drain(30)

        assert swept == 1
        assert rig.dataplane.missing([*chunks, lost, *owned.keys]) == (lost,)


async def test_rows_that_nobody_may_clear_are_swept_once_and_named(
    executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep's clear that fails for good is not handed over again by the next sweep."""
    async with Rig() as rig:
        hole = key("e000-p0000999")
        rig.dataplane.put({hole: {"x": np.zeros(1)}})

        def away(keys: object) -> int:
            raise OSError("the store is away")

        monkeypatch.setattr(rig.owners.clears, "_clear", away)
        assert await sweep_orphans(rig.dataplane, rig.owners, executor) == 1
        assert await rig.owners.clears.drain(30)

        assert rig.owners.clears.outstanding() == (hole,)
        assert await sweep_orphans(rig.dataplane, rig.owners, executor) == 0


async def test_rows_trained_and_cleared_after_the_listing_are_no_orphans(
    executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group may end between listing and reading owners: its rows are gone, so nothing is reported."""
    async with Rig() as rig:
        await rig.finished_group()
        listed = rig.dataplane.keys()
        async with rig.owners.barrier.mutation("group_removal") as cut:
            rig.owners.evict(cut, [listed[0].group_id])
        assert await rig.owners.clears.drain(30)
        monkeypatch.setattr(rig.dataplane, "keys", lambda: listed)

        assert await sweep_orphans(rig.dataplane, rig.owners, executor) == 0


async def test_a_failing_sweep_is_logged_and_tried_again(
    executor: Executor, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Rows without an owner cost room only, so a sweep that fails ends nothing."""
    async with Rig() as rig:
        calls: list[int] = []
        again = asyncio.Event()

        def failing() -> list[RowKey]:
            calls.append(len(calls))
            if len(calls) == 1:
                raise OSError("the store is busy")
            loop.call_soon_threadsafe(again.set)
            return []

        loop = asyncio.get_running_loop()
        monkeypatch.setattr(rig.dataplane, "keys", failing)
        task = asyncio.create_task(sweep_every(1, rig.dataplane, rig.owners, executor))
        await asyncio.sleep(0)
        while not again.is_set():
            rig.owners.step += 1
            rig.owners.changed.notify()
            await asyncio.sleep(0)
        task.cancel()

        assert len(calls) >= 2
        assert "a sweep for rows without an owner failed" in caplog.text
