"""Restoring under each sampler, with groups in every state: the resumed run decides what the old one would have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from quiesce.accounting import Accounting
from quiesce.admission import Admission
from quiesce.barrier import DataPlaneCheckpointBarrier
from quiesce.buffer import ReplayBuffer
from quiesce.checkpoint import files
from quiesce.checkpoint.capture import CutSources, capture
from quiesce.checkpoint.cut import CommittedPosition, SamplerState
from quiesce.checkpoint.documents import MANIFEST
from quiesce.checkpoint.restore import RestoreTargets, load_newest, restore_into
from quiesce.checkpoint.trainer_state import NoTrainerState
from quiesce.checkpoint.write import manifest_of, write_cut
from quiesce.dataplane import MemoryDataPlane
from quiesce.errors import OccupiedStepError
from quiesce.ledger import RolloutLedger
from quiesce.observers import Hub
from quiesce.samplers import (
    InOrderSampler,
    OwnersView,
    ReadyFirstSampler,
    WeightFifoSampler,
    WindowedSampler,
)
from quiesce.signals import TrainerVersion
from quiesce.spares import SparePool
from quiesce.threads import DaemonExecutor
from quiesce.types import GroupRecord, PromptRef, RowKey

GROUPS = 2
CAPACITY = 8

AnySampler = WindowedSampler | WeightFifoSampler | ReadyFirstSampler | InOrderSampler
Build = Callable[[DataPlaneCheckpointBarrier], AnySampler]
SAMPLERS: dict[str, Build] = {
    "windowed": WindowedSampler,
    "weight_fifo": WeightFifoSampler,
    "ready_first": ReadyFirstSampler,
    "in_order": InOrderSampler,
}


def incarnation_of(key: RowKey) -> int:
    """Return who put a row."""
    return key.incarnation


class Run:
    """One incarnation under one sampler."""

    def __init__(self, incarnation: int, build: Build) -> None:
        hub = Hub(strict=True)
        self.incarnation = incarnation
        self.barrier = DataPlaneCheckpointBarrier(hub=hub)
        self.sampler = build(self.barrier)
        self.versions = TrainerVersion(hub=hub)
        self.ledger = RolloutLedger(self.barrier)
        self.spares = SparePool(self.barrier)
        self.accounting = Accounting(self.barrier)
        self.plane = MemoryDataPlane(incarnation, tensors="numpy", hub=hub)
        self.buffer = ReplayBuffer(self.barrier, self.ledger, self.plane)
        self.admission = Admission(self.barrier, self.sampler, self.ledger, self.buffer, self.versions)
        self.read_so_far = 0
        self.batches = 0

    async def read(self, *, spare: bool = False) -> list[str]:
        """Read a batch and reserve it, or one prompt for the spare pool."""
        count = 1 if spare else GROUPS
        refs = [PromptRef(0, self.read_so_far + at, self.read_so_far + at) for at in range(count)]
        async with self.barrier.mutation("prompt_reservation") as cut:
            self.accounting.read(cut, refs)
            self.read_so_far += count
            if spare:
                self.spares.add(cut, refs)
            else:
                for ref in refs:
                    self.ledger.reserve_group(cut, GroupRecord(ref.group_id, self.batches, ref))
                self.batches += 1
        return [ref.group_id for ref in refs]

    async def commit(self, group_ids: Sequence[str]) -> None:
        """Finish rollouts."""
        for group_id in group_ids:
            attempt = self.ledger.get(group_id).attempt
            key = RowKey(self.incarnation, group_id, 0, attempt)
            self.plane.put({key: {"tokens": np.arange(3)}})
            async with self.barrier.mutation("group_commit") as cut:
                self.buffer.commit_group(
                    cut,
                    group_id,
                    attempt,
                    keys=[key],
                    generated_from=0,
                    generated_to=0,
                    stats={"reward": 1.0},
                )

    def view(self) -> OwnersView:
        """Return what the sampler decides from."""
        return OwnersView(self.ledger.records(), self.buffer.ready(), exhausted=False, capacity=CAPACITY)

    async def save(self, folder: Path) -> None:
        """Write a checkpoint of this moment."""
        sampler = self.sampler
        async with self.barrier.checkpoint() as cut:
            captured = capture(
                cut,
                CutSources(
                    barrier=self.barrier,
                    sampler_state=lambda: SamplerState(
                        sampler.name,
                        sampler.dispatch_cursor,
                        sampler.stamps_target_steps,
                        sampler.dispatch_cursor + 1,
                        self.batches,
                    ),
                    position=lambda: CommittedPosition(0, self.read_so_far, exhausted=False, loader=None),
                    accounting=self.accounting,
                    spares=self.spares,
                    buffer=self.buffer,
                    ledger=self.ledger,
                    dataplane=self.plane,
                ),
                incarnation=self.incarnation,
                parent_cut=None,
                step=self.versions.value,
                trainer_version=self.versions.value,
            )
        path = folder / f"step_{self.versions.value}"
        executor = DaemonExecutor("test", 2)
        written = await write_cut(path, captured, await NoTrainerState().stage(), executor)
        files.write_durable(
            path / MANIFEST, manifest_of(written, captured.state, restored_from=None).to_bytes()
        )
        captured.snapshot.release()
        executor.shutdown(wait=False)

    async def restore(self, folder: Path) -> None:
        """Take over the newest checkpoint."""
        targets = RestoreTargets(
            barrier=self.barrier,
            sampler=self.sampler,
            accounting=self.accounting,
            spares=self.spares,
            buffer=self.buffer,
            ledger=self.ledger,
            dataplane=self.plane,
            versions=self.versions,
            admission=self.admission,
            capacity=CAPACITY,
        )
        restored = await restore_into(load_newest(folder), targets, incarnation=self.incarnation)
        self.read_so_far, self.batches = restored.position.position, restored.next_admission_id


async def in_every_state(build: Build) -> Run:
    """Return a run with a parked full batch, a batch half in flight with a retry, a reserved batch and a spare."""
    run = Run(1, build)
    parked = await run.read()
    await run.admission.admit(parked)
    await run.commit(parked)
    half = await run.read()
    if run.sampler.is_admissible(0):
        await run.admission.admit(half)
        async with run.barrier.mutation("retry") as cut:
            run.ledger.retry_group(cut, half[1])
        await run.commit(half[:1])
    await run.read()
    await run.read(spare=True)
    return run


@pytest.mark.parametrize("name", SAMPLERS)
async def test_the_parked_batch_is_what_the_resumed_run_selects_first(name: str, tmp_path: Path) -> None:
    """Target, selection and cursor are those of the run that was killed; no finished group is thrown away."""
    old, new = await in_every_state(SAMPLERS[name]), Run(2, SAMPLERS[name])
    await old.save(tmp_path)
    expected = old.sampler.select(old.view(), 0, GROUPS)

    await new.restore(tmp_path)

    assert new.sampler.select(new.view(), 0, GROUPS) == expected == ("e000-p0000000", "e000-p0000001")
    assert new.sampler.dispatch_cursor == old.sampler.dispatch_cursor
    assert new.sampler.step_target(new.view(), 0, GROUPS) == old.sampler.step_target(old.view(), 0, GROUPS)
    assert new.ledger.records() == old.ledger.records()
    assert new.spares.refs() == old.spares.refs()


@pytest.mark.parametrize("name", SAMPLERS)
async def test_a_claim_whose_step_never_began_is_selected_again(name: str, tmp_path: Path) -> None:
    """With its stamp and its start version, so that it is selectable."""
    old, new = await in_every_state(SAMPLERS[name]), Run(2, SAMPLERS[name])
    chosen = old.sampler.select(old.view(), 0, GROUPS)
    async with old.barrier.mutation("sample_clear") as cut:
        old.buffer.claim_for_training(cut, chosen)
    await old.save(tmp_path)

    await new.restore(tmp_path)

    assert set(new.sampler.select(new.view(), 0, CAPACITY)) >= set(chosen)


async def test_a_restored_stamp_is_not_minted_again(tmp_path: Path) -> None:
    """The restored cursor goes on after the restored stamps; a cursor that did not would be caught by the occupied step."""
    old, new = await in_every_state(InOrderSampler), Run(2, InOrderSampler)
    await old.save(tmp_path)
    await new.restore(tmp_path)
    new.versions.advance()
    waiting = [record.group_id for record in new.ledger.records() if record.phase == "reserved"]

    admitted = await new.admission.admit(waiting[:GROUPS])

    stamps = {record.target_step for record in old.ledger.records()} | {
        item.target_step for item in old.buffer.ready()
    }
    assert admitted.target_step not in stamps
    new.sampler.restore_cursor(admitted.target_step - 1 if admitted.target_step else 0)
    new.versions.advance()
    fresh = await new.read()
    with pytest.raises(OccupiedStepError):
        await new.admission.admit(fresh)


@pytest.mark.parametrize("name", SAMPLERS)
async def test_what_the_killed_run_did_after_the_cut_is_refused_by_the_new_store(
    name: str, tmp_path: Path
) -> None:
    """Keys of the old incarnation do not fit, and every restored key is of the new one."""
    old, new = await in_every_state(SAMPLERS[name]), Run(2, SAMPLERS[name])
    await old.save(tmp_path)

    await new.restore(tmp_path)

    assert {key.incarnation for item in new.buffer.ready() for key in item.keys} == {2}
    assert set(map(incarnation_of, new.plane.keys())) == {2}
    assert len(new.plane.keys()) == len(new.buffer.ready())
