"""Worlds with one part broken on purpose, each for an invariant that has to notice it.

If the explorer stops killing one of these, a scenario or an invariant has lost its teeth.
"""

# A broken part is made by reaching into the real one.
# ruff: noqa: SLF001, D102, ANN401 - and overrides what it breaks with the arguments of the original

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple

from quiesce.admission import Admission, Admitted
from quiesce.barrier import CheckpointCut, Cut, DataPlaneCheckpointBarrier, MutationCut, detached
from quiesce.buffer import Claim, ReplayBuffer
from quiesce.checkpoint import documents
from quiesce.checkpoint.capture import CutSources
from quiesce.checkpoint.cut import CapturedCut, CutState, PartStamp
from quiesce.dataplane import MemoryDataPlane
from quiesce.explorer import pause
from quiesce.invariants import LedgerSeal
from quiesce.ledger import RolloutLedger
from quiesce.owners import Owners
from quiesce.rollouts import Rollouts
from quiesce.types import BufferEntry, GroupRecord, RowKey
from tests.interleaving.world import World
from tests.unit.test_broken_barriers import SlotsOvertake, WindowsShare

if TYPE_CHECKING:
    from quiesce.dataplane.interface import Row

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


@dataclass(frozen=True, slots=True)
class Mutant:
    """A broken world.

    Attributes:
        kind: The world.
        invariant: What has to notice.
        scenario: Where.
    """

    kind: type[World]
    invariant: str
    scenario: str


MUTANTS: dict[str, Mutant] = {}


def breaks(invariant: str, scenario: str) -> Callable[[type[World]], type[World]]:
    """Register a mutant."""

    def register(kind: type[World]) -> type[World]:
        MUTANTS[kind.__name__] = Mutant(kind, invariant, scenario)
        return kind

    return register


def soon(function: Callable[..., object], *args: object) -> None:
    """Do something a little later, outside the step that it belongs to."""
    asyncio.get_running_loop().call_soon(function, *args)


# ------------------------------------------------------------------------------------------------- single_owner


class _LateLedger(RolloutLedger):
    def take_group(
        self, cut: Cut, group_id: str, *, target: str, attempt: int | None = None, reason: str = ""
    ) -> GroupRecord:
        if target != "buffer":
            return super().take_group(cut, group_id, target=target, attempt=attempt, reason=reason)
        soon(self._records.pop, group_id, None)
        return self.get(group_id)


@breaks("single_owner", "commit_during_save")
class LedgerEntryDroppedAfterTheSlot(World):
    """The ledger gives a committed group up only after the slot."""

    ledger_class = _LateLedger


class _AnyAttempt(ReplayBuffer):
    def commit_group(self, cut: Cut, group_id: str, attempt: int, **entry: Any) -> BufferEntry:
        record = self._ledger.find(group_id)
        return super().commit_group(cut, group_id, attempt if record is None else record.attempt, **entry)


@breaks("single_owner", "late_commit_of_an_old_attempt")
class FlipWithoutTheAttemptCheck(World):
    """The buffer takes whatever attempt comes."""

    buffer_class = _AnyAttempt


# ------------------------------------------------------------------------------------------------- conservation


@breaks("conservation", "admission_during_save")
class PositionCommittedOutsideTheSlot(World):
    """The position counts before the slot that reserves what was read."""

    async def reserve(self, *positions: int, spares: bool = False, ends: bool = False) -> list[str]:
        self.owners.position = self.pull(*positions, ends=ends).position
        await pause("between the position and the slot")
        return await super().reserve(*positions, spares=spares, ends=ends)


class _SpareInALocal(Owners):
    def substitute(self, cut: Cut, record: GroupRecord) -> GroupRecord:
        self.ledger.take_group(cut, record.group_id, target="dropped", reason="failed")
        self.accounting.dropped(cut, [record.prompt], "failed")
        ref = self.spares.take(cut)
        stand_in = replace(record, group_id=ref.group_id, prompt=ref, attempt=0)
        soon(self.ledger._records.setdefault, ref.group_id, stand_in)
        return stand_in


@breaks("conservation", "substitution_during_save")
class PoppedSpareNeverOwned(World):
    """A spare is popped into a local variable and owned a little later."""

    owners_class = _SpareInALocal


class _ForgetfulDrop(Owners):
    def drop(self, cut: Cut, group_id: str, reason: str, *, attempt: int | None = None) -> GroupRecord:
        return self.ledger.take_group(cut, group_id, target="dropped", attempt=attempt, reason=reason)


@breaks("conservation", "stale_abort_during_commit")
class DropIsNotAccounted(World):
    """An aborted group ends without being counted."""

    owners_class = _ForgetfulDrop


# ------------------------------------------------------------------------------------------ cursor_covers_buffer


@breaks("cursor_covers_buffer", "admission_during_save")
class CursorReadEarly(World):
    """The cursor is read before the drain, and stamped as if it were not."""

    async def save(self, drain_timeout: float | None = None) -> CutState:
        early = self.owners.sampler_state(self.admission.committed)
        self.early = early
        await pause("fence")
        return await super().save(drain_timeout)

    def sources(self) -> CutSources:
        early = self.early
        return replace(super().sources(), sampler_state=lambda: early)


@breaks("cursor_covers_buffer", "admission_during_save")
class CursorAdvancedAfterTheSlot(World):
    """The admission stamps with the next cursor and advances it a little later."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        sampler = self.sampler

        def commit_admission(cut: MutationCut) -> int | None:
            cursor = sampler.dispatch_cursor + 1
            soon(sampler.restore_cursor, cursor)
            return cursor if sampler.stamps_target_steps else None

        self.sampler.commit_admission = commit_admission  # type: ignore[attr-defined] # of all built-in ones


# --------------------------------------------------------------------------------------- cursor_within_lookahead


@breaks("cursor_within_lookahead", "gate_opens_after_the_checkpoint")
class GateIsIgnored(World):
    """Nobody waits at the gate."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)

        async def wait_until_admissible(versions: object) -> None:
            await pause("gate")

        self.sampler.wait_until_admissible = wait_until_admissible  # type: ignore[attr-defined] # as above


class _CountsLate(Admission):
    shown = 0

    async def admit(self, batch: Sequence[str]) -> Admitted:
        admitted = await super().admit(batch)
        await pause("count")
        self.shown += 1
        return admitted

    @property
    def committed(self) -> int:
        return self.shown


@breaks("cursor_within_lookahead", "admission_during_save")
class AdmissionCountedAfterTheSlot(World):
    """Cursor and number of admissions move in two steps."""

    admission_class = _CountsLate


# ------------------------------------------------------------------------------------------- window_is_exclusive


@breaks("window_is_exclusive", "child_of_a_slot")
class BarrierForgetsToDrain(World):
    """A checkpoint does not wait for the open slots."""

    barrier_class = WindowsShare


class _LetsGoOfThreads(DataPlaneCheckpointBarrier):
    async def run_in_cut(
        self, cut: Cut, function: Callable[[*Ts], T], *args: *Ts, record: Callable[[T], None] | None = None
    ) -> T:
        return await asyncio.to_thread(function, *args)


@breaks("window_is_exclusive", "cancelled_threaded_window")
class WindowLeftWhileItsThreadRuns(World):
    """A cancelled caller leaves the window although its thread still works."""

    barrier_class = _LetsGoOfThreads


@breaks("window_is_exclusive", "step_beside_commit_and_save")
class OwnersMoveInsideTheWindow(World):
    """The window evicts a group before it reads."""

    async def window(self, cut: CheckpointCut) -> CapturedCut:
        for entry in self.buffer.ready()[:1]:
            self.owners.evict(cut, [entry.group_id])
        return await super().window(cut)


# -------------------------------------------------------------------------------------------- cut_is_one_instant


@breaks("cut_is_one_instant", "spares_filled_and_drained_during_save")
class OnePartReadBeforeTheDrain(World):
    """The spares are read, and honestly stamped, before the window is exclusive."""

    async def save(self, drain_timeout: float | None = None) -> CutState:
        self.version = self.barrier.mutation_version
        await pause("fence")
        return await super().save(drain_timeout)

    async def window(self, cut: CheckpointCut) -> CapturedCut:
        captured = await super().window(cut)
        stamp = PartStamp(cut.window_id, self.version)
        stamps: Mapping[str, PartStamp] = {**captured.state.stamps, "spares": stamp}
        return CapturedCut(replace(captured.state, stamps=stamps), captured.snapshot)


@breaks("cut_is_one_instant", "admission_during_save")
class CutOfTwoWindows(World):
    """The ledger is read in a window of its own."""

    async def save(self, drain_timeout: float | None = None) -> CutState:
        async with self.barrier.checkpoint(drain_timeout) as cut:
            self.first = await super().window(cut)
        self.first.snapshot.release()
        await pause("between the windows")
        return await super().save(drain_timeout)

    async def window(self, cut: CheckpointCut) -> CapturedCut:
        captured = await super().window(cut)
        before = self.first.state
        stamps = {**captured.state.stamps, "ledger": before.stamps["ledger"]}
        return CapturedCut(replace(captured.state, ledger=before.ledger, stamps=stamps), captured.snapshot)


# -------------------------------------------------------------------------------------------------- rows_present


class _LooksAtNoRow(ReplayBuffer):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._rows = self

    def missing(self, keys: Iterable[RowKey]) -> tuple[RowKey, ...]:
        """See nothing."""
        return ()


class _PutsLater(Rollouts):
    async def _put(self, rows: Mapping[RowKey, Row]) -> None:
        _ = detached(super()._put(rows), name="late put")


@breaks("rows_present", "commit_during_save")
class FlipBeforeTheRows(World):
    """The index flips while the rows are still on their way."""

    buffer_class = _LooksAtNoRow
    rollouts_class = _PutsLater


class _ClearsAtTheClaim(Owners):
    def claim(self, cut: Cut) -> Claim | None:
        claim = super().claim(cut)
        if claim is not None:
            self.clears.hand_over(key for entry in claim.entries for key in entry.keys)
        return claim


@breaks("rows_present", "step_beside_commit_and_save")
class RowsClearedAtTheClaim(World):
    """Rows are handed to cleanup when a step claims them, not when it is over."""

    owners_class = _ClearsAtTheClaim


class _LivePlane(MemoryDataPlane):
    def _note(self, text: str) -> None:
        pass


@breaks("rows_present", "eviction_during_save")
class SnapshotIsLive(World):
    """A snapshot shows what is there now."""

    plane_class = _LivePlane

    async def ready(self, *positions: int, ends: bool = False) -> list[str]:
        self.clears.start()
        return await super().ready(*positions, ends=ends)


# --------------------------------------------------------------------------------------------- rows_not_orphaned


class _KeepsAbandonedRows(Rollouts):
    def _put_abandoned(self, done: asyncio.Future[None], keys: Sequence[RowKey]) -> None:
        pass


def _nothing(keys: Iterable[RowKey]) -> None:
    del keys


@breaks("rows_not_orphaned", "stale_abort_during_commit")
class AbandonedRowsStay(World):
    """Rows whose put ended after their rollout was cancelled are left where they are."""

    rollouts_class = _KeepsAbandonedRows


class _ForgetsTrainedRows(Owners):
    def finish(self, cut: Cut, claim: Claim) -> None:
        hand_over, self.clears.hand_over = self.clears.hand_over, _nothing  # type: ignore[method-assign] # on purpose
        super().finish(cut, claim)
        self.clears.hand_over = hand_over  # type: ignore[method-assign] # as above


@breaks("rows_not_orphaned", "step_beside_commit_and_save")
class TrainedRowsStay(World):
    """A step ends without handing its rows to cleanup."""

    owners_class = _ForgetsTrainedRows


# ------------------------------------------------------------------------------------------------ digest_matches


@breaks("digest_matches", "admission_during_save")
class SealOfTheLiveLedger(World):
    """The shard's metadata is computed from the ledger as it is when the shard is written."""

    def seal(self, state: CutState) -> LedgerSeal:
        records = self.ledger.records()
        return LedgerSeal("rows", documents.ledger_digest(records), len(records))


@breaks("digest_matches", "admission_during_save")
class SealOfTheCutBefore(World):
    """The shard's metadata is that of the parent."""

    def seal(self, state: CutState) -> LedgerSeal:
        return super().seal(state if self.parent is None else self.parent)


# ------------------------------------------------------------------------------------------------- versions_grow


class _CountsSinceTheCut(DataPlaneCheckpointBarrier):
    def _release(self, cut: Cut, outcome: str, *, entered: bool = True) -> None:
        super()._release(cut, outcome, entered=entered)
        if isinstance(cut, CheckpointCut):
            self._version = 0


@breaks("versions_grow", "admission_during_save")
class MutationsCountedSinceTheCut(World):
    """The mutation version starts again with every cut."""

    barrier_class = _CountsSinceTheCut


@breaks("versions_grow", "admission_during_save")
class TrainerVersionReadEarly(World):
    """The trainer's version is read before the drain."""

    async def save(self, drain_timeout: float | None = None) -> CutState:
        version = self.versions.value
        await pause("fence")
        async with self.barrier.checkpoint(drain_timeout) as cut:
            captured = await self.window(cut)
        captured.snapshot.release()
        state = replace(captured.state, trainer_version=version)
        from quiesce.invariants import CutFacts, check_cut

        found = check_cut(state, CutFacts(parent=self.parent))
        self.judge([violation for violation in found if violation.invariant == "versions_grow"])
        self.parent = state
        return state


# ------------------------------------------------------------------------------------------- checkpoint_progress


@breaks("checkpoint_progress", "commit_during_save")
class SlowReleaseInsideTheWindow(World):
    """The window waits for somebody far away."""

    async def window(self, cut: CheckpointCut) -> CapturedCut:
        await asyncio.sleep(60.0)
        return await super().window(cut)


@breaks("checkpoint_progress", "slow_writers_and_a_checkpoint")
class SlotsOvertakeTheCheckpoint(World):
    """A slot enters although a checkpoint asked before it."""

    barrier_class = SlotsOvertake
