"""Admission: wait outside the barrier, commit inside one slot, the fallback, and what a restore refuses."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace

import pytest

from quiesce.admission import Admission, Admitted
from quiesce.barrier import DataPlaneCheckpointBarrier, Holder, MutationCut, detached
from quiesce.buffer import ReplayBuffer
from quiesce.errors import (
    BatchError,
    CapacityError,
    ConfigError,
    CursorBehindStampError,
    DrainTimeoutError,
    DuplicateOwnerError,
    LockOrderError,
    OccupiedStepError,
    PhaseError,
    SamplerContractError,
    UnknownGroupError,
)
from quiesce.ledger import RolloutLedger
from quiesce.observers import Hub
from quiesce.sampler_config import adapt_sampler
from quiesce.samplers import InOrderSampler, ReadyFirstSampler, Sampler, WindowedSampler
from quiesce.signals import TrainerVersion
from quiesce.types import BufferEntry, GroupRecord
from tests.sampler_cases import (
    AllRows,
    OnePiece,
    OnPolicy,
    PublishedOnePiece,
    admitted,
    entry,
    gids,
    reserved,
)


class Recorder:
    """Keeps what admission reports, in order."""

    def __init__(self) -> None:
        self.seen: list[tuple[object, ...]] = []

    def admission_waited(self, ns: int) -> None:
        """Keep that a wait ended."""
        self.seen.append(("waited", ns))

    def admission_committed(self, path: str, cursor: int, target_step: int | None, groups: int) -> None:
        """Keep a commit."""
        self.seen.append(("committed", path, cursor, target_step, groups))

    def sampler_fell_back(self, sampler: str) -> None:
        """Keep a fallback."""
        self.seen.append(("fell back", sampler))

    def stalled(self, what: str, group_id: str, age_seconds: float) -> None:
        """Keep a stall."""
        self.seen.append(("stalled", what, group_id, age_seconds))

    def slot_opened(self, kind: str, wait_ns: int, opened_ns: int) -> None:
        """Keep that a slot opened."""
        self.seen.append(("slot", kind))

    def slot_closed(self, kind: str, wait_ns: int, hold_ns: int, outcome: str, ended_ns: int) -> None:
        """Keep that a slot closed."""
        self.seen.append(("slot over", kind, outcome))


class Setup:
    """Real primitives around one sampler, at a cursor and a trainer version."""

    def __init__(
        self, sampler: str = "in_order", *, window: int = 1, cursor: int = -1, version: int = 0
    ) -> None:
        self.hub = Hub(strict=True)
        self.recorder = Recorder()
        self.hub.subscribe(self.recorder)
        self.barrier = DataPlaneCheckpointBarrier(hub=self.hub)
        self.ledger = RolloutLedger(self.barrier)
        self.buffer = ReplayBuffer(self.barrier, self.ledger, AllRows())
        self.versions = TrainerVersion(version, hub=self.hub)
        self.now = 0
        samplers: dict[str, Sampler] = {
            "in_order": InOrderSampler(self.barrier, window),
            "ready_first": ReadyFirstSampler(self.barrier, window),
            "windowed": WindowedSampler(self.barrier, window),
            "one_piece": adapt_sampler(OnePiece(window), self.barrier, "my:OnePiece"),
            "published": adapt_sampler(PublishedOnePiece(OnePiece(window)), self.barrier, "my:Published"),
        }
        self.use(samplers[sampler], cursor)

    def use(self, sampler: Sampler, cursor: int = -1) -> None:
        """Use another sampler."""
        self.sampler = sampler
        self.sampler.restore_cursor(cursor)
        self.admission = Admission(
            self.barrier, sampler, self.ledger, self.buffer, self.versions, clock=lambda: self.now
        )

    async def own(self, *groups: GroupRecord | BufferEntry) -> None:
        """Put groups where they belong, as a restore does."""
        async with self.barrier.mutation("recovery_restore") as cut:
            self.ledger.restore(cut, [group for group in groups if isinstance(group, GroupRecord)])
            self.buffer.restore(cut, [group for group in groups if isinstance(group, BufferEntry)])
        self.recorder.seen.clear()

    def state(self) -> tuple[int, tuple[GroupRecord, ...]]:
        """Return what an admission changes: the cursor and the ledger."""
        return self.sampler.dispatch_cursor, self.ledger.records()


async def settle() -> None:
    """Let every task run until it is suspended for good."""
    for _ in range(10):
        await asyncio.sleep(0)


# ------------------------------------------------------------------------------------------ the two steps


async def test_a_batch_is_admitted_with_one_stamp_and_one_start_version() -> None:
    """Cursor, phases, stamp and start move together, in one slot, and are reported once after the move."""
    setup = Setup(cursor=6, version=7)
    batch = [reserved(position, admission_id=3) for position in range(4)]
    await setup.own(*batch)

    done = await setup.admission.admit(gids(0, 1, 2, 3))

    assert done == Admitted(target_step=7, start_version=7, group_ids=gids(0, 1, 2, 3))
    assert setup.state() == (
        7,
        tuple(replace(record, phase="admitted", target_step=7, start_version=7) for record in batch),
    )
    assert setup.recorder.seen == [
        ("waited", 0),
        ("slot", "admission"),
        ("committed", "transactional", 7, 7, 4),
        ("slot over", "admission", "completed"),
    ]


async def test_a_sampler_without_stamps_admits_without_a_target_step() -> None:
    """The start version is the trainer's own all the same."""
    setup = Setup("windowed", version=5)
    await setup.own(reserved(0))
    assert await setup.admission.admit(gids(0)) == Admitted(None, 5, gids(0))
    assert setup.ledger.get(gids(0)[0]).start_version == 5


async def test_the_start_version_is_the_one_inside_the_slot() -> None:
    """The trainer moved on while the batch stood at the barrier: staleness counts from the later version."""
    setup = Setup("ready_first", version=5)
    await setup.own(reserved(0), reserved(1))
    async with setup.barrier.checkpoint():
        task = detached(setup.admission.admit(gids(0, 1)))
        await settle()
        setup.versions.advance()
    assert (await task).start_version == 6
    assert {record.start_version for record in setup.ledger.records()} == {6}


async def test_a_checkpoint_runs_while_an_admission_waits_at_its_gate() -> None:
    """The wait holds nothing: the window opens without a drain, and sees batch and cursor before the move."""
    setup = Setup(cursor=7, version=6)
    await setup.own(reserved(0))
    task = asyncio.create_task(setup.admission.admit(gids(0)))
    await settle()
    before = setup.state()

    async with setup.barrier.checkpoint(drain_timeout=0):  # entered at once, or not at all
        assert setup.state() == before
        setup.versions.advance()  # the gate opens inside the window
        await settle()
        assert setup.state() == before
        assert not task.done()

    assert (await task).target_step == 8
    assert setup.sampler.dispatch_cursor == 8


async def test_a_gate_that_opens_only_after_the_checkpoint_holds_nobody_up() -> None:
    """The shape that deadlocks when the wait holds a slot: gate after save, save after slots."""
    for kind in ("in_order", "published"):
        setup = Setup(kind, cursor=7, version=6)
        await setup.own(reserved(0))
        task = asyncio.create_task(setup.admission.admit(gids(0)))
        await settle()
        async with setup.barrier.checkpoint(drain_timeout=0):
            pass
        setup.versions.advance()
        await task
        assert setup.ledger.admitted == 1


async def test_the_gate_is_left_waiting_visibly() -> None:
    """How long a batch has stood at the gate shows before the wait ends, and is reported when it does."""
    setup = Setup(cursor=7, version=6)
    await setup.own(reserved(0), reserved(1))
    task = asyncio.create_task(setup.admission.admit(gids(0, 1)))
    await settle()
    setup.now = 600_000_000_000
    waiting = setup.admission.statistics()
    setup.versions.advance()
    await task

    assert (waiting.path, waiting.committed) == ("transactional", 0)
    assert (waiting.waiting_groups, waiting.waiting_seconds) == (2, 600.0)
    assert setup.recorder.seen[0] == ("waited", 600_000_000_000)
    done = setup.admission.statistics()
    assert (done.committed, done.waiting_groups, done.waiting_seconds) == (1, 0, 0.0)


@pytest.mark.parametrize("kind", ["in_order", "one_piece", "published"])
async def test_an_admission_that_is_cancelled_while_it_waits_leaves_no_trace(kind: str) -> None:
    """At the gate and at the barrier: batch and cursor stay, and the next admission is the same."""
    setup = Setup(kind, cursor=7, version=6)
    await setup.own(reserved(0))
    before = setup.state()

    at_the_gate = asyncio.create_task(setup.admission.admit(gids(0)))
    await settle()
    at_the_gate.cancel()
    with pytest.raises(asyncio.CancelledError):
        await at_the_gate
    assert setup.state() == before

    setup.versions.advance()
    async with setup.barrier.checkpoint():
        at_the_barrier = detached(setup.admission.admit(gids(0)))
        await settle()
        at_the_barrier.cancel()
        with pytest.raises(asyncio.CancelledError):
            await at_the_barrier
    assert setup.state() == before
    assert setup.admission.statistics().waiting_groups == 0

    await setup.admission.admit(gids(0))
    assert setup.sampler.dispatch_cursor == 8


async def test_waiting_at_the_gate_with_a_cut_in_hand_is_refused() -> None:
    """Whoever holds a slot while the gate is shut is the deadlock."""
    setup = Setup()
    await setup.own(reserved(0))
    async with setup.barrier.mutation("prompt_reservation"):
        with pytest.raises(LockOrderError, match="admission gate"):
            await setup.admission.admit(gids(0))
    assert setup.sampler.dispatch_cursor == -1


# ------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("kind", ["in_order", "one_piece"])
@pytest.mark.parametrize(
    "batch, error",
    [
        ((), BatchError),
        (gids(0, 1, 1), BatchError),
        (gids(0), BatchError),  # half a batch
        (gids(0, 1, 2), BatchError),  # two batches
        (gids(0, 1, 9), UnknownGroupError),
        (gids(3), PhaseError),
        (gids(4), DuplicateOwnerError),
    ],
)
async def test_anything_but_one_whole_reserved_batch_is_refused(
    kind: str, batch: Sequence[str], error: type[Exception]
) -> None:
    """Cursor and ledger stay as they were: nothing is half admitted."""
    setup = Setup(kind)
    flying, ready = admitted(3, 0, admission_id=2), entry(4, 0, admission_id=3)
    await setup.own(reserved(0), reserved(1), reserved(2, admission_id=1), flying, ready)
    before = setup.state()
    with pytest.raises(error):
        await setup.admission.admit(batch)
    assert setup.state() == before


async def test_a_group_that_left_the_ledger_during_the_wait_is_found_out() -> None:
    """What was checked before the wait is checked again inside the slot."""
    setup = Setup(cursor=7, version=6)
    await setup.own(reserved(0), reserved(1))
    task = asyncio.create_task(setup.admission.admit(gids(0, 1)))
    await settle()
    async with setup.barrier.mutation("substitution") as cut:
        setup.ledger.take_group(cut, gids(0)[0], target="dropped", reason="data_error")
    setup.versions.advance()
    with pytest.raises(UnknownGroupError, match=gids(0)[0]):
        await task
    assert setup.sampler.dispatch_cursor == 7
    assert setup.ledger.get(gids(1)[0]).phase == "reserved"


STEP_8_IS: dict[str, tuple[GroupRecord | BufferEntry, ...]] = {
    "in flight": (admitted(8, 7, target=8, admission_id=5),),
    "ready": (entry(8, 7, target=8, admission_id=5),),
    "claimed": (entry(8, 7, target=8, admission_id=5),),
}
BATCHES: dict[str, tuple[GroupRecord, ...]] = {
    "a live batch": tuple(reserved(position, admission_id=9) for position in (20, 21)),
    "a restored reserved batch": tuple(reserved(position, admission_id=6) for position in (10, 11)),
    "a spare drain": (reserved(2, admission_id=9),),
}


@pytest.mark.parametrize("where", STEP_8_IS)
@pytest.mark.parametrize("batch", BATCHES)
async def test_minting_an_occupied_step_is_refused_whoever_mints_it(where: str, batch: str) -> None:
    """Step 8 has groups somewhere; a cursor from another moment would stamp it again."""
    setup = Setup(cursor=7, version=7)
    await setup.own(*STEP_8_IS[where], *BATCHES[batch])
    if where == "claimed":
        async with setup.barrier.mutation("group_removal") as cut:
            setup.buffer.claim_for_training(cut, gids(8))
    before = setup.state()

    with pytest.raises(OccupiedStepError, match="step 8"):
        await setup.admission.admit([record.group_id for record in BATCHES[batch]])

    assert setup.state() == before
    assert setup.admission.statistics().committed == 0


async def test_a_stamp_that_the_trainer_has_passed_is_refused() -> None:
    """A batch that no step would ever train must not be lost in silence."""
    setup = Setup(cursor=3, version=7)
    await setup.own(reserved(0))
    before = setup.state()
    with pytest.raises(
        SamplerContractError, match="in_order: stamped step 4 although the trainer is at step 7"
    ):
        await setup.admission.admit(gids(0))
    assert setup.state() == before


async def test_a_custom_commit_that_fails_after_it_moved_the_cursor_is_taken_back() -> None:
    """Otherwise a checkpoint taken next would count an admission that never was."""

    def commit(self: OnPolicy, _cut: MutationCut) -> int:
        self.dispatch_cursor += 1
        message = "broken"
        raise RuntimeError(message)

    setup = Setup(version=9)
    setup.use(
        adapt_sampler(type("Broken", (OnPolicy,), {"commit_admission": commit})(), setup.barrier, "my:Broken")
    )
    await setup.own(reserved(0))
    before = setup.state()
    with pytest.raises(RuntimeError, match="broken"):
        await setup.admission.admit(gids(0))
    assert setup.state() == before


def test_a_sampler_without_an_admission_is_refused() -> None:
    """Neither the two steps nor the one piece."""
    setup = Setup()
    bare: Sampler = type("Bare", (), {"name": "bare"})()
    with pytest.raises(SamplerContractError, match="bare: has neither"):
        Admission(setup.barrier, bare, setup.ledger, setup.buffer, setup.versions)


# ---------------------------------------------------------------------------------------- the fallback


async def test_a_one_piece_admission_holds_one_slot_and_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It works as the two steps do, is counted on its own path, and warns once by name."""
    setup = Setup("one_piece")
    await setup.own(reserved(0), reserved(1, admission_id=1))
    with caplog.at_level(logging.WARNING, "quiesce.admission"):
        assert await setup.admission.admit(gids(0)) == Admitted(None, 0, gids(0))
        setup.versions.advance()
        assert await setup.admission.admit(gids(1)) == Admitted(None, 1, gids(1))

    assert setup.recorder.seen == [
        ("fell back", "my:OnePiece"),
        ("slot", "admission"),
        ("waited", 0),
        ("committed", "fallback", 0, None, 1),
        ("slot over", "admission", "completed"),
        ("slot", "admission"),
        ("waited", 0),
        ("committed", "fallback", 1, None, 1),
        ("slot over", "admission", "completed"),
    ]
    warnings = [
        record.getMessage() for record in caplog.records if record.name.startswith("quiesce.admission")
    ]
    assert len(warnings) == 1
    assert "my:OnePiece" in warnings[0]
    assert setup.admission.path == "fallback"


async def test_a_checkpoint_waits_for_the_gate_of_a_one_piece_admission() -> None:
    """That is its cost: the window opens only after the gate has."""
    setup = Setup("one_piece", cursor=7, version=6)
    await setup.own(reserved(0))
    task = asyncio.create_task(setup.admission.admit(gids(0)))
    await settle()

    async def save() -> tuple[int, int]:
        async with setup.barrier.checkpoint(drain_timeout=30):
            return setup.sampler.dispatch_cursor, setup.ledger.admitted

    saving = asyncio.create_task(save())
    await settle()
    assert not saving.done()
    setup.versions.advance()
    assert await saving == (8, 1)
    await task


async def test_a_one_piece_gate_that_needs_the_checkpoint_is_bounded_by_the_drain_timeout() -> None:
    """The trainer moves only after its save: the save gives up and names the slot, then both go on."""
    setup = Setup("one_piece", cursor=7, version=6)
    await setup.own(reserved(0))
    task = asyncio.create_task(setup.admission.admit(gids(0)), name="rollout-pump")
    await settle()

    with pytest.raises(DrainTimeoutError) as caught:
        async with setup.barrier.checkpoint(drain_timeout=0.01):
            pass
    setup.admission.note_checkpoint(caught.value)
    setup.versions.advance()

    (holder,) = caught.value.holders
    assert (holder.kind, holder.task) == ("admission", "rollout-pump")
    assert (await task).group_ids == gids(0)
    assert setup.admission.statistics().drain_timeouts == 1


def drain_timeout(*kinds: str) -> DrainTimeoutError:
    """Return a drain timeout with these holders."""
    return DrainTimeoutError(60.0, [Holder(kind, "rollout-pump", 61.5, "somewhere") for kind in kinds])


async def test_three_drain_timeouts_in_a_row_are_critical(caplog: pytest.LogCaptureFixture) -> None:
    """The state shows, the stall names the first group that stands at the gate, and the log is critical."""
    setup = Setup("one_piece", cursor=7, version=6)
    await setup.own(reserved(0), reserved(1))
    task = asyncio.create_task(setup.admission.admit(gids(0, 1)))
    await settle()
    setup.recorder.seen.clear()
    states = []
    with caplog.at_level(logging.CRITICAL, "quiesce.admission"):
        for _ in range(3):
            setup.admission.note_checkpoint(drain_timeout("group_commit", "admission"))
            states.append(setup.admission.critical)

    assert states == [False, False, True]
    assert setup.admission.statistics().critical
    assert setup.recorder.seen == [("stalled", "admission", gids(0)[0], 61.5)]
    assert "my:OnePiece" in caplog.text
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def test_a_success_ends_the_row_and_other_failures_do_not_belong_to_it() -> None:
    """In a row means in a row, and caused by it means that an admission was among the holders."""
    setup = Setup("one_piece")
    for error in (
        drain_timeout("admission"),
        drain_timeout("admission"),
        drain_timeout("group_commit"),
        OSError(),
    ):
        setup.admission.note_checkpoint(error)
    assert setup.admission.statistics().drain_timeouts == 2
    setup.admission.note_checkpoint(None)
    setup.admission.note_checkpoint(drain_timeout("admission"))
    assert setup.admission.statistics().drain_timeouts == 1
    assert not setup.admission.critical


async def test_drain_timeouts_of_a_two_step_sampler_are_never_its_fault() -> None:
    """Its slot holds no wait, so what held the drain up was something else."""
    setup = Setup("in_order")
    for _ in range(5):
        setup.admission.note_checkpoint(drain_timeout("admission"))
    assert not setup.admission.critical


async def test_a_group_that_leaves_while_a_one_piece_admission_waits_is_found_out() -> None:
    """Slots do not exclude each other: it is checked again after the wait, and the cursor taken back."""
    setup = Setup("one_piece", cursor=7, version=6)
    await setup.own(reserved(0), reserved(1))
    task = asyncio.create_task(setup.admission.admit(gids(0, 1)))
    await settle()
    async with setup.barrier.mutation("substitution") as cut:
        setup.ledger.take_group(cut, gids(0)[0], target="dropped", reason="data_error")
    setup.versions.advance()
    with pytest.raises(UnknownGroupError):
        await task
    assert setup.sampler.dispatch_cursor == 7


async def test_a_published_admission_saves_the_published_cursor() -> None:
    """A one-piece ``admit()`` that ran ahead outside the barrier is invisible until its slot publishes it."""
    setup = Setup("published", version=0)
    await setup.own(reserved(0))
    async with setup.barrier.checkpoint():
        task = detached(setup.admission.admit(gids(0)))
        await settle()
        assert setup.sampler.dispatch_cursor == -1
        assert setup.ledger.admitted == 0
    await task
    assert setup.sampler.dispatch_cursor == 0
    assert setup.admission.path == "transactional"


# ------------------------------------------------------------------------------- capacity and restoring


def test_a_capacity_below_the_sampler_s_need_is_refused_with_its_key() -> None:
    """One group less and the rollout pump could wait for room that nobody makes."""
    setup = Setup("in_order", window=2)
    setup.admission.check_capacity(12, 4)
    with pytest.raises(
        CapacityError, match=r"^buffer_capacity: .*'in_order'.*at least 12 groups, but it is 11"
    ):
        setup.admission.check_capacity(11, 4)
    with pytest.raises(CapacityError, match=r"^run\.capacity: "):
        setup.admission.check_capacity(11, 4, key="run.capacity")


def test_a_restored_cursor_behind_a_restored_stamp_is_refused() -> None:
    """In ledger and buffer alike; equal is fine, and so is ahead."""
    admission = Setup("in_order").admission
    in_flight, ready = admitted(0, 6, target=7), entry(1, 6, target=8)
    for cursor in (8, 9):
        admission.check_restored(cursor, [in_flight], [ready], capacity=8)
    with pytest.raises(CursorBehindStampError, match=f"cursor 7 .* step 8 of group {gids(1)[0]}"):
        admission.check_restored(7, [in_flight], [ready], capacity=8)
    with pytest.raises(CursorBehindStampError, match=f"cursor 6 .* step 7 of group {gids(0)[0]}"):
        admission.check_restored(6, [in_flight], [], capacity=8)


def test_restored_groups_that_do_not_fit_are_refused_with_the_key() -> None:
    """Admitted and ready groups are there at once; reserved ones come batch by batch."""
    admission = Setup("in_order").admission
    records = [*[admitted(n, 0, target=1) for n in range(3)], *[reserved(10 + n, 7) for n in range(4)]]
    entries = [entry(4 + n, 0, target=0) for n in range(3)]
    admission.check_restored(1, records, entries, capacity=6)
    with pytest.raises(
        CapacityError, match=r"^buffer_capacity: .*3 admitted and 3 ready.*at least 6 .* is 5"
    ):
        admission.check_restored(1, records, entries, capacity=5)
    with pytest.raises(CapacityError, match=r"^mine: restored batch 7 needs .* 4 groups, but it is 3"):
        admission.check_restored(1, records[3:], [], capacity=3, key="mine")


def test_groups_without_stamps_are_refused_by_a_sampler_that_trains_by_stamps() -> None:
    """They would stay in the buffer for ever; the other way round nothing is lost."""
    for group in (admitted(0, 0), entry(0, 0)):
        owned = ([group], []) if isinstance(group, GroupRecord) else ([], [group])
        with pytest.raises(ConfigError, match=r"^sampler\.name: 'in_order' .*no stamp"):
            Setup("in_order").admission.check_restored(0, *owned, capacity=4)
        Setup("windowed").admission.check_restored(0, *owned, capacity=4)
    Setup("windowed").admission.check_restored(3, [admitted(0, 0, target=3), reserved(1)], [], capacity=4)
    Setup("in_order").admission.check_restored(0, [reserved(0)], [], capacity=4)


async def test_stamps_beyond_a_lowered_lookahead_are_accepted_and_the_run_proceeds() -> None:
    """Saved with a lookahead of 3, resumed with 1: the gate stays shut until the trainer caught up."""
    setup = Setup("in_order", window=1, cursor=5, version=2)
    records = [admitted(target, 2, target=target, admission_id=target) for target in (3, 4, 5)]
    await setup.own(*records, entry(2, 2, target=2, admission_id=2), reserved(6, admission_id=6))
    setup.admission.check_restored(5, setup.ledger.records(), setup.buffer.entries(), capacity=8)
    task = asyncio.create_task(setup.admission.admit(gids(6)))
    for version in (3, 4):
        setup.versions.advance(version)
        await settle()
        assert not task.done()
    setup.versions.advance(5)
    assert (await task).target_step == 6


def test_collectors_find_admission_and_sampler() -> None:
    """A collector pulls the cursor from whatever sampler the admission uses, once."""
    setup = Setup("in_order")
    assert setup.admission in setup.hub.sources("admission")
    assert setup.hub.sources("sampler").count(setup.sampler) == 1
