"""The bug that the cut was made for, replayed with its own numbers, and what became of it.

In-order sampling with a gate window of 1 and 4 prompts a step; the trainer is at step 7, the dispatch cursor
at 6. A save reads the cursor, spends a while on writing, and then reads the buffer. Meanwhile the rollout
pump admits the batch of step 7. On disk the cursor is 6 and the buffer has step 7, so the resumed run stamps
its next batch with step 7 again.

Everything here is the real code: barrier, sampler, admission with its occupied-step check, ledger, buffer,
accounting, capture, the files on disk, and the restore. Two things are the scenario's own, because the real
code will not do them: for the early read, it hands ``capture`` a cursor that was read before the window, and,
as NVIDIA-NeMo/RL did before its PR #3480, it restores without the cross-check and answers the refusal of an
occupied step by dropping the batch without a word. What Quiesce says to such a checkpoint is reported beside
it.

Rule: no sleeps; every order of events is forced by an event or an explicit step, so each replay is the same.
Yield rule: :func:`replay` suspends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from quiesce.accounting import Accounting
from quiesce.admission import Admission
from quiesce.barrier import DataPlaneCheckpointBarrier, detached
from quiesce.buffer import ReplayBuffer
from quiesce.checkpoint import files
from quiesce.checkpoint.capture import CutSources, capture
from quiesce.checkpoint.cut import CommittedPosition, SamplerState
from quiesce.checkpoint.documents import MANIFEST
from quiesce.checkpoint.loading import CheckpointInfo, load_checkpoint
from quiesce.checkpoint.restore import RestoreTargets, restore_into
from quiesce.checkpoint.runfolder import CheckpointName
from quiesce.checkpoint.trainer_state import NoTrainerState
from quiesce.checkpoint.write import manifest_of, write_cut
from quiesce.dataplane import MemoryDataPlane
from quiesce.errors import OccupiedStepError, RestoreRefusedError
from quiesce.ledger import RolloutLedger
from quiesce.observers import Hub
from quiesce.samplers import InOrderSampler
from quiesce.signals import TrainerVersion
from quiesce.spares import SparePool
from quiesce.threads import DaemonExecutor
from quiesce.types import GroupRecord, PromptRef, RowKey

if TYPE_CHECKING:
    from quiesce.barrier import Cut
    from quiesce.checkpoint.cut import CapturedCut
    from quiesce.checkpoint.loading import LoadedCheckpoint
    from quiesce.checkpoint.restore import RestoredRun

__all__ = ["GATE_WINDOW", "GROUPS_PER_STEP", "PROMPTS", "TRAINER_STEP", "Replay", "Variant", "replay"]

Variant = Literal["early", "cut"]
"""``early``: the cursor is read before the save's awaits. ``cut``: inside the window, with all else."""

GATE_WINDOW: Final = 1
GROUPS_PER_STEP: Final = 4
TRAINER_STEP: Final = 7
PROMPTS: Final = GROUPS_PER_STEP * (TRAINER_STEP + 2)
"""The dataset: seven steps before the save, two after it."""

_SAVE_AWAITS: Final = 15
"""How often the save of the bug page gave way between its two reads."""


@dataclass(frozen=True, slots=True)
class Replay:
    """What one replay showed.

    Attributes:
        variant: Which one.
        pump_admitted: Whether the pump could admit a batch between the save's reads.
        cursor_on_disk: The saved dispatch cursor.
        buffered_step: The newest step that a saved group is stamped with, or None.
        refusal: What Quiesce says to the checkpoint when it is asked to restore it; "" if nothing.
        collision: What the occupied-step check said to the resumed pump; "" if nothing.
        read: Prompts read, over the whole run.
        trained: Prompts trained, over the whole run.
        dropped: Prompts dropped by the resumed pump.
    """

    variant: Variant
    pump_admitted: bool
    cursor_on_disk: int
    buffered_step: int | None
    refusal: str
    collision: str
    read: int
    trained: int
    dropped: int


async def replay(variant: Variant, folder: Path) -> Replay:
    """Replay one variant: seven steps, a save beside a running pump, a crash, a resume to the end.

    Args:
        variant: Where the cursor is read.
        folder: An empty folder, for the checkpoint.
    """
    crashed = _Run(incarnation=1)
    for _ in range(TRAINER_STEP):
        await crashed.pump()
        await crashed.train()
    path = folder / f"step_{TRAINER_STEP}"
    if variant == "early":
        captured, pump_admitted = await _save_with_an_early_read(crashed)
    else:
        captured, pump_admitted = await _save_in_one_cut(crashed)
    await _write(captured, path)
    crashed.dataplane.close()

    resumed = _Run(incarnation=2)
    info = CheckpointInfo(path, CheckpointName(TRAINER_STEP))
    refusal = ""
    try:
        loaded = load_checkpoint(info)
    except RestoreRefusedError as error:
        refusal = str(error)
        loaded = load_checkpoint(info, accept_violations=True)
        await resumed.restore_unchecked(loaded)
    else:
        await restore_into(loaded, resumed.targets(), incarnation=2)
    collision, dropped = "", 0
    while resumed.position.position < PROMPTS or len(resumed.buffer):
        if resumed.position.position < PROMPTS:
            try:
                await resumed.pump()
            except OccupiedStepError as error:
                collision = str(error)
                dropped += await resumed.drop_refused_batch()
        await resumed.train()
    resumed.dataplane.close()
    account = resumed.accounting.statistics()
    state = loaded.state
    return Replay(
        variant=variant,
        pump_admitted=pump_admitted,
        cursor_on_disk=state.sampler.cursor,
        buffered_step=max(
            (entry.target_step for entry in state.entries if entry.target_step is not None), default=None
        ),
        refusal=refusal,
        collision=collision,
        read=account.read,
        trained=account.trained,
        dropped=dropped,
    )


async def _save_with_an_early_read(run: _Run) -> tuple[CapturedCut, bool]:
    """Read the cursor, give way, then read the rest: how the bug came about."""
    early = run.sampler_state()
    pump = detached(run.pump())
    for _ in range(_SAVE_AWAITS):  # writing model and optimizer: whoever can run, runs
        await asyncio.sleep(0)
    await pump
    admitted = run.sampler.dispatch_cursor > early.cursor
    async with run.barrier.checkpoint() as cut:
        captured = capture(
            cut,
            run.sources(sampler_state=lambda: early),
            incarnation=run.incarnation,
            parent_cut=None,
            step=TRAINER_STEP,
            trainer_version=run.versions.value,
        )
    return captured, admitted


async def _save_in_one_cut(run: _Run) -> tuple[CapturedCut, bool]:
    """Give way inside the window as often as the bug's save did: nothing moves a prompt there."""
    before = run.sampler.dispatch_cursor
    async with run.barrier.checkpoint() as cut:
        pump = detached(run.pump())
        for _ in range(_SAVE_AWAITS):
            await asyncio.sleep(0)
        admitted = run.sampler.dispatch_cursor > before
        captured = capture(
            cut,
            run.sources(),
            incarnation=run.incarnation,
            parent_cut=None,
            step=TRAINER_STEP,
            trainer_version=run.versions.value,
        )
    await pump  # after the window it goes on, into a future that the crash ends
    return captured, admitted


async def _write(captured: CapturedCut, path: Path) -> None:
    executor = DaemonExecutor("quiesce-skew", 2)
    try:
        staged = await NoTrainerState().stage()
        written = await write_cut(path, captured, staged, executor)
        files.write_durable(
            path / MANIFEST, manifest_of(written, captured.state, restored_from=None).to_bytes()
        )
    finally:
        captured.snapshot.release()
        executor.shutdown(wait=False)


@dataclass(eq=False)
class _Run:
    """The primitives of one incarnation, and the two pumps, one batch a call."""

    incarnation: int
    hub: Hub = field(default_factory=Hub)
    position: CommittedPosition = field(
        default_factory=lambda: CommittedPosition(0, 0, exhausted=False, loader=None)
    )
    batches: int = 0

    def __post_init__(self) -> None:
        self.barrier = DataPlaneCheckpointBarrier(name="skew", hub=self.hub)
        self.sampler = InOrderSampler(self.barrier, max_lookahead_versions=GATE_WINDOW)
        self.versions = TrainerVersion(hub=self.hub)
        self.ledger = RolloutLedger(self.barrier)
        self.spares = SparePool(self.barrier)
        self.accounting = Accounting(self.barrier)
        self.dataplane = MemoryDataPlane(
            self.incarnation, tensors="numpy", barrier=self.barrier, hub=self.hub
        )
        self.buffer = ReplayBuffer(self.barrier, self.ledger, self.dataplane)
        self.admission = Admission(self.barrier, self.sampler, self.ledger, self.buffer, self.versions)

    def sampler_state(self) -> SamplerState:
        cursor = self.sampler.dispatch_cursor
        return SamplerState(
            self.sampler.name, cursor, self.sampler.stamps_target_steps, cursor + 1, self.batches
        )

    def sources(self, sampler_state: Callable[[], SamplerState] | None = None) -> CutSources:
        return CutSources(
            barrier=self.barrier,
            sampler_state=self.sampler_state if sampler_state is None else sampler_state,
            position=lambda: self.position,
            accounting=self.accounting,
            spares=self.spares,
            buffer=self.buffer,
            ledger=self.ledger,
            dataplane=self.dataplane,
        )

    def targets(self) -> RestoreTargets:
        return RestoreTargets(
            barrier=self.barrier,
            sampler=self.sampler,
            accounting=self.accounting,
            spares=self.spares,
            buffer=self.buffer,
            ledger=self.ledger,
            dataplane=self.dataplane,
            versions=self.versions,
            admission=self.admission,
            capacity=self.sampler.required_capacity(GROUPS_PER_STEP),
            apply=self._apply,
        )

    def _apply(self, _cut: Cut, restored: RestoredRun) -> None:
        self.position, self.batches = restored.position, restored.next_admission_id

    async def pump(self) -> None:
        """Read a batch, reserve, admit, generate and commit it."""
        import numpy as np

        first = self.position.position
        refs = [PromptRef(0, first + offset, first + offset) for offset in range(GROUPS_PER_STEP)]
        ids = [ref.group_id for ref in refs]
        async with self.barrier.mutation("prompt_reservation") as cut:
            self.accounting.read(cut, refs)
            for ref in refs:
                self.ledger.reserve_group(cut, GroupRecord(ref.group_id, self.batches, ref))
            self.batches += 1
            end = first + len(refs)
            self.position = CommittedPosition(0, end, exhausted=end >= PROMPTS, loader=None)
        admitted = await self.admission.admit(ids)
        for group_id in ids:
            key = RowKey(self.incarnation, group_id, 0, 0)
            self.dataplane.put({key: {"tokens": np.arange(4)}})
            async with self.barrier.mutation("group_commit") as cut:
                version = admitted.start_version
                self.buffer.commit_group(
                    cut, group_id, 0, keys=[key], generated_from=version, generated_to=version, stats={}
                )

    async def train(self) -> None:
        """Train whatever is ready for this step, and advance the version."""
        ready = [entry.group_id for entry in self.buffer.ready() if entry.target_step == self.versions.value]
        if ready:
            async with self.barrier.mutation("sample_clear") as cut:
                claim = self.buffer.claim_for_training(cut, ready)
                self.buffer.begin(claim)
                keys = self.buffer.finish(cut, claim)
                self.accounting.trained(cut, [entry.prompt for entry in claim.entries])
            self.dataplane.clear(keys)
        self.versions.advance()

    async def restore_unchecked(self, loaded: LoadedCheckpoint) -> None:
        """Restore as the code of the bug did: believe what is on disk."""
        state = loaded.state
        rows = {
            RowKey(self.incarnation, key.group_id, key.generation, key.attempt): row
            for key, row in loaded.rows(tensors="numpy")
        }
        self.dataplane.put(rows)
        ours = {
            entry.group_id: tuple(key for key in rows if key.group_id == entry.group_id)
            for entry in state.entries
        }
        async with self.barrier.mutation("recovery_restore") as cut:
            self.sampler.restore_cursor(state.sampler.cursor)
            self.accounting.restore(cut, state.accounting)
            self.buffer.restore(cut, [replace(entry, keys=ours[entry.group_id]) for entry in state.entries])
            self.ledger.restore(cut, state.ledger)
            self.position, self.batches = state.position, state.sampler.next_admission_id
        self.versions.advance(state.trainer_version)

    async def drop_refused_batch(self) -> int:
        """Answer a refused admission as the code of the bug did: drop the batch, move on, say nothing."""
        reserved = [record for record in self.ledger.records() if record.phase == "reserved"]
        async with self.barrier.mutation("group_removal") as cut:
            for record in reserved:
                self.ledger.take_group(cut, record.group_id, target="dropped", reason="failed")
            self.accounting.dropped(cut, [record.prompt for record in reserved], "failed")
            self.sampler.restore_cursor(self.sampler.dispatch_cursor + 1)
        return len(reserved)
