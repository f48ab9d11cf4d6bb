"""The owners of a run: every move of a group is one await-free step under a live cut, and accounts for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from quiesce.accounting import Accounting
from quiesce.admission import Admission
from quiesce.barrier import Cut, DataPlaneCheckpointBarrier
from quiesce.buffer import ReplayBuffer
from quiesce.checkpoint.cut import CommittedPosition
from quiesce.cleanup import BackgroundCleanup
from quiesce.errors import AccountingError, ClaimError, CutExpiredError, StaleCommitError, UnknownGroupError
from quiesce.ledger import RolloutLedger
from quiesce.owners import Owners, reserved_batches
from quiesce.prompts import Pull
from quiesce.sampler_config import SamplerConfig, build_sampler
from quiesce.signals import Changed, TrainerVersion
from quiesce.snapshot_gate import SnapshotGate
from quiesce.spares import SparePool
from quiesce.testing import EventRecorder, strict_hub
from quiesce.types import BufferEntry, GroupRecord, PromptRef, RowKey
from tests.owners import Rows
from tests.run_rig import sampler


class _Store(Rows):
    def clear(self, keys: Any) -> int:  # noqa: ANN401 - never asked here
        raise AssertionError


@dataclass
class Scene:
    """Owners, and the groups that they are given."""

    config: SamplerConfig = field(default_factory=lambda: sampler("in_order"))
    fraction: float = 0.9
    groups_per_step: int = 4
    owners_class: type[Owners] = Owners

    def __post_init__(self) -> None:
        """Build them."""
        self.recorder = EventRecorder()
        hub = strict_hub(self.recorder)
        self.barrier = barrier = DataPlaneCheckpointBarrier(hub=hub)
        ledger = RolloutLedger(barrier)
        self.rows = _Store()
        self.sampler = build_sampler(self.config, barrier, hub)
        self.owners = self.owners_class(
            barrier=barrier,
            sampler=self.sampler,
            versions=TrainerVersion(hub=hub),
            ledger=ledger,
            spares=SparePool(barrier),
            buffer=ReplayBuffer(barrier, ledger, self.rows),
            accounting=Accounting(barrier),
            clears=BackgroundCleanup(SnapshotGate("controller", hub=hub), self.rows.clear, hub=hub),
            capacity=100,
            groups_per_step=self.groups_per_step,
            min_step_batch_fraction=self.fraction,
            position=CommittedPosition(0, 0, exhausted=False, loader=None),
            changed=Changed(),
        )
        self.admission = Admission(barrier, self.sampler, ledger, self.owners.buffer, self.owners.versions)

    def pull(self, count: int, *, epoch: int = 0, ends: bool = False, last: bool = False) -> Pull:
        """Return the next pull."""
        start = self.owners.position.position
        refs = tuple(PromptRef(epoch, start + at, 100 + start + at) for at in range(count))
        after = CommittedPosition(
            epoch + ends, 0 if ends else start + count, exhausted=last, loader=start + count
        )
        return Pull(refs, tuple("payload" for _ in refs), ends, epoch, after)

    async def read(self, count: int, *, to_spares: bool = False, **how: Any) -> tuple[GroupRecord, ...]:  # noqa: ANN401 - passed on
        """Commit a pull."""
        async with self.barrier.mutation("prompt_reservation") as cut:
            return self.owners.commit_pull(cut, self.pull(count, **how), to_spares=to_spares)

    async def admitted(self, count: int, **how: Any) -> list[GroupRecord]:  # noqa: ANN401 - passed on
        """Read and admit a batch."""
        ids = [record.group_id for record in await self.read(count, **how)]
        await self.admission.admit(ids)
        return [self.owners.ledger.get(group_id) for group_id in ids]

    async def ready(self, record: GroupRecord) -> BufferEntry:
        """Finish a group."""
        async with self.barrier.mutation("group_commit") as cut:
            return self.commit(cut, record)

    def commit(self, cut: Cut, record: GroupRecord) -> BufferEntry:
        """Commit a group whose rows are there."""
        keys = self.keys(record)
        self.rows.there |= set(keys)
        return self.owners.commit_rollout(
            cut, record, keys=keys, generated_from=0, generated_to=0, stats={"reward": 1.0}
        )

    @staticmethod
    def keys(record: GroupRecord) -> tuple[RowKey, ...]:
        """Return the keys of a group's rows."""
        return tuple(RowKey(1, record.group_id, number, record.attempt) for number in range(2))

    def counts(self) -> dict[str, int]:
        """Return how many groups each owner has, and how many ended."""
        owners, totals = self.owners, self.owners.accounting.statistics()
        buffer = owners.buffer.statistics()
        return {
            "ledger": len(owners.ledger),
            "spares": len(owners.spares),
            "ready": buffer.ready,
            "training": buffer.training,
            "trained": totals.trained,
            "dropped": sum(totals.dropped.values()),
        }

    def conserved(self) -> bool:
        """Tell whether every prompt that was read is owned or ended."""
        return sum(self.counts().values()) == self.owners.accounting.statistics().read


# ------------------------------------------------------------------------------------------------------ reading


async def test_a_pull_counts_position_reads_and_first_owner_in_one_step() -> None:
    """Committing a pull sets the position, counts its prompts as read and reserves their groups, all at once."""
    scene = Scene()
    pull = scene.pull(4)

    async with scene.barrier.mutation("prompt_reservation") as cut:
        records = scene.owners.commit_pull(cut, pull, to_spares=False)

    assert scene.owners.position == pull.position
    assert [record.prompt for record in records] == list(pull.refs)
    assert scene.owners.ledger.records() == records
    assert scene.conserved()
    assert scene.owners.accounting.statistics().read == 4


async def test_a_pull_that_does_not_follow_the_one_before_changes_nothing() -> None:
    """A source that skips or repeats prompts is an error before anything is owned or counted."""
    scene = Scene()
    skipping = Pull(
        (PromptRef(0, 5, 0),), ("",), False, 0, CommittedPosition(0, 6, exhausted=False, loader=None)
    )

    with pytest.raises(AccountingError):
        async with scene.barrier.mutation("prompt_reservation") as cut:
            scene.owners.commit_pull(cut, skipping, to_spares=False)

    assert scene.owners.position.position == 0
    assert sum(scene.counts().values()) == 0


async def test_admission_ids_are_minted_in_the_order_of_reservation() -> None:
    """One id a batch, counting up, drained spares included."""
    scene = Scene()
    first = await scene.read(2)
    await scene.read(3, to_spares=True)
    second = await scene.read(1, ends=True, last=True)

    async with scene.barrier.mutation("prompt_reservation") as cut:
        drained = scene.owners.drain_spares(cut)

    assert [record.admission_id for record in (*first, *second, *drained)] == [0, 0, 1, 2, 2, 2]
    assert scene.owners.next_admission_id == 3
    assert reserved_batches(scene.owners.ledger.records()) == [
        tuple(record.group_id for record in batch) for batch in (first, second, drained)
    ]


async def test_draining_moves_at_most_a_step_from_the_pool_to_the_ledger() -> None:
    """A spare drain is one step from pool to ledger, and then an ordinary batch, short if the pool is."""
    scene = Scene()
    await scene.read(6, to_spares=True)

    async with scene.barrier.mutation("prompt_reservation") as cut:
        drained = scene.owners.drain_spares(cut)
        assert scene.conserved()

    assert len(drained) == 4
    assert all(record.phase == "reserved" for record in drained)
    assert scene.counts()["spares"] == 2


async def test_an_empty_pull_ends_an_epoch() -> None:
    """A loader that finds the end only by asking ends the epoch with a pull without prompts."""
    scene = Scene()
    await scene.read(3)
    assert not scene.owners.exhausted

    assert await scene.read(0, ends=True, last=True) == ()

    assert scene.owners.position.exhausted
    (account,) = scene.owners.accounting.capture().open
    assert account.ended


# --------------------------------------------------------------------------------------------- commit and retry


async def test_the_ledger_entry_is_dropped_in_the_step_that_flips_the_group_to_ready() -> None:
    """At no moment in the commit slot is a group in both ledger and buffer, or in neither."""
    scene = Scene()
    (record,) = await scene.admitted(1)

    async with scene.barrier.mutation("group_commit") as cut:
        entry = scene.commit(cut, record)
        assert record.group_id not in scene.owners.ledger
        assert scene.owners.buffer.ready() == (entry,)
        assert scene.conserved()


class OutlivedEntry(Owners):
    """Lacks the rule: the ledger's entry is to be dropped later, after the slot."""

    def commit_rollout(self, cut: Cut, record: GroupRecord, **how: Any) -> BufferEntry:  # noqa: ANN401 - as the original
        """Flip the group, and put the entry back for whoever drops it after the slot."""
        entry = super().commit_rollout(cut, record, **how)
        self.ledger.restore(cut, [record])
        return entry


async def trained_once(owners_class: type[Owners]) -> None:
    """A buffer that trains and releases a group at once leaves nothing in the ledger that could train it again."""
    scene = Scene(owners_class=owners_class)
    (record,) = await scene.admitted(1, ends=True, last=True)
    await scene.ready(record)
    async with scene.barrier.mutation("group_removal") as cut:
        claim = scene.owners.claim(cut)
    if claim is not None:
        scene.owners.buffer.begin(claim)
        scene.owners.versions.advance()
        async with scene.barrier.mutation("sample_clear") as cut:
            scene.owners.finish(cut, claim)
    assert scene.counts() == {"ledger": 0, "spares": 0, "ready": 0, "training": 0, "trained": 1, "dropped": 0}


async def test_a_group_that_is_trained_at_once_is_not_in_the_ledger_any_more() -> None:
    """The entry cannot outlive its group."""
    await trained_once(Owners)


async def test_an_entry_that_is_dropped_after_the_slot_is_noticed() -> None:
    """The same check fails where the ledger's entry is dropped later than in the commit."""
    with pytest.raises(AssertionError):
        await trained_once(OutlivedEntry)


class AnyAttempt(Owners):
    """Lacks the rule: a commit is taken for whichever attempt the ledger waits for."""

    def commit_rollout(self, cut: Cut, record: GroupRecord, **how: Any) -> BufferEntry:  # noqa: ANN401 - as the original
        """Take the current attempt's place."""
        return super().commit_rollout(cut, self.ledger.find(record.group_id) or record, **how)


async def stale_commit_is_refused(owners_class: type[Owners]) -> None:
    """What an attempt finishes after the ledger went on to the next one is refused; the next one's is taken."""
    scene = Scene(owners_class=owners_class)
    (old,) = await scene.admitted(1)
    async with scene.barrier.mutation("retry") as cut:
        new = scene.owners.retry(cut, old)
    assert new is not None
    refused = False
    try:
        await scene.ready(old)
    except StaleCommitError:
        refused = True
    assert refused
    assert (await scene.ready(new)).attempt == 1


async def test_a_commit_is_refused_unless_the_ledger_waits_for_that_group_and_attempt() -> None:
    """The flip requires that the ledger still holds this (group, attempt)."""
    await stale_commit_is_refused(Owners)


async def test_a_commit_that_does_not_look_at_the_attempt_is_noticed() -> None:
    """The same check fails where any attempt may commit."""
    with pytest.raises(AssertionError):
        await stale_commit_is_refused(AnyAttempt)


class Restamped(Owners):
    """Lacks the rule: retries and substitutes start from the weights of their own time."""

    def retry(self, cut: Cut, record: GroupRecord) -> GroupRecord | None:
        """Start over from the current version."""
        from dataclasses import replace

        again = super().retry(cut, record)
        if again is not None:
            self.ledger.take_group(cut, again.group_id, target="ledger")
            again = replace(again, start_version=self.versions.value)
            self.ledger.reserve_group(cut, again)
        return again

    def substitute(self, cut: Cut, record: GroupRecord) -> GroupRecord:
        """Start the spare from the current version."""
        from dataclasses import replace

        stand_in = super().substitute(cut, record)
        self.ledger.take_group(cut, stand_in.group_id, target="ledger")
        stand_in = replace(stand_in, start_version=self.versions.value)
        self.ledger.reserve_group(cut, stand_in)
        return stand_in


async def start_is_kept(owners_class: type[Owners]) -> None:
    """Whatever stands in for a group in its batch has the batch's start version and stamp."""
    scene = Scene(sampler("in_order", 3), owners_class=owners_class)
    record, other = await scene.admitted(2)
    await scene.read(1, to_spares=True)
    scene.owners.versions.advance()
    scene.owners.versions.advance()
    async with scene.barrier.mutation("retry") as cut:
        again = scene.owners.retry(cut, record)
    async with scene.barrier.mutation("substitution") as cut:
        stand_in = scene.owners.substitute(cut, other)
    assert again is not None
    assert (again.start_version, again.target_step, again.attempt) == (0, 0, 1)
    assert (stand_in.start_version, stand_in.target_step, stand_in.attempt) == (0, 0, 0)
    assert stand_in.admission_id == other.admission_id
    assert scene.conserved()


async def test_retries_and_substitutes_keep_the_start_version_of_their_batch() -> None:
    """A group's start weight is W at its batch's admission, one value a batch."""
    await start_is_kept(Owners)


async def test_a_start_version_that_moves_is_noticed() -> None:
    """The same check fails where a retry or a substitute takes the current version."""
    with pytest.raises(AssertionError):
        await start_is_kept(Restamped)


async def test_a_windowed_substitute_takes_the_current_version() -> None:
    """Without an order among batches an old start would only make the spare age out sooner."""
    scene = Scene(sampler("windowed", 3))
    record, _ = await scene.admitted(2)
    await scene.read(1, to_spares=True)
    scene.owners.versions.advance()

    async with scene.barrier.mutation("substitution") as cut:
        assert scene.owners.substitute(cut, record).start_version == 1


async def test_a_spare_leaves_the_pool_in_the_step_that_removes_the_old_owner() -> None:
    """A substitution is one step: nothing is lost between the pool and the ledger, and the failure is counted."""
    scene = Scene()
    record, _ = await scene.admitted(2)
    await scene.read(2, to_spares=True)
    oldest = scene.owners.spares.refs()[0]

    async with scene.barrier.mutation("substitution") as cut:
        stand_in = scene.owners.substitute(cut, record)
        assert scene.conserved()

    assert stand_in.prompt == oldest
    assert scene.counts() == {"ledger": 2, "spares": 1, "ready": 0, "training": 0, "trained": 0, "dropped": 1}
    assert scene.owners.accounting.statistics().dropped["failed"] == 1


async def test_a_retry_of_what_the_ledger_does_not_wait_for_any_more_is_none() -> None:
    """What was checked before an await is checked again: a group that left meanwhile is not retried."""
    scene = Scene()
    record, other = await scene.admitted(2)
    async with scene.barrier.mutation("retry") as cut:
        scene.owners.drop(cut, record.group_id, "failed", attempt=0)
        assert scene.owners.retry(cut, record) is None
        assert scene.owners.retry(cut, other) is not None
        assert scene.owners.retry(cut, other) is None  # that record has been replaced


# -------------------------------------------------------------------------------------------- stale and evicted


async def test_an_abort_looks_again_at_what_is_stale_inside_its_slot() -> None:
    """A group that was finished while the abort waited for its slot is not dropped as unfinished."""
    scene = Scene(sampler("windowed", 1))
    first, second = await scene.admitted(2)
    scene.owners.versions.advance()
    scene.owners.versions.advance()
    assert set(scene.owners.stale()) == {first.group_id, second.group_id}
    await scene.ready(first)

    async with scene.barrier.mutation("watchdog_abort") as cut:
        aborted = scene.owners.abort_stale(cut)

    assert [record.group_id for record in aborted] == [second.group_id]
    assert scene.counts()["dropped"] == 1
    assert scene.owners.accounting.statistics().dropped["stale_abort"] == 1
    assert scene.conserved()


async def test_evicted_groups_are_counted_and_their_rows_handed_over_in_the_same_step() -> None:
    """An eviction ends ownership, accounts for it, and hands the rows to clearing, before the slot is left."""
    scene = Scene(sampler("windowed", 0))
    (record,) = await scene.admitted(1)
    entry = await scene.ready(record)
    scene.owners.versions.advance()

    async with scene.barrier.mutation("group_removal") as cut:
        assert scene.owners.evict(cut, scene.owners.evictable()) == (entry,)
        assert scene.owners.clears.outstanding() == entry.keys
        assert scene.conserved()

    assert scene.owners.accounting.statistics().dropped["evicted"] == 1


# ---------------------------------------------------------------------------------------------------- training


async def test_selecting_and_claiming_are_one_step() -> None:
    """The claim selects by what is owned inside its slot, not by what was when the pump woke up."""
    scene = Scene(sampler("ready_first", 2))
    records = await scene.admitted(5)
    for record in records:
        await scene.ready(record)
    before = scene.owners.plan()
    assert before is not None
    async with scene.barrier.mutation("group_removal") as cut:
        scene.owners.evict(cut, [before[0]])

    async with scene.barrier.mutation("group_removal") as cut:
        claim = scene.owners.claim(cut)

    assert claim is not None
    assert [entry.group_id for entry in claim.entries] == [record.group_id for record in records[1:]]
    assert scene.owners.plan() is None


async def test_a_claim_of_nothing_is_none() -> None:
    """A step that cannot be taken, or is passed, claims nothing."""
    scene = Scene()
    async with scene.barrier.mutation("group_removal") as cut:
        assert scene.owners.claim(cut) is None
        (record,) = await scene_admit(scene)
        scene.owners.drop(cut, record.group_id, "failed")
        assert scene.owners.plan() == ()
        assert scene.owners.claim(cut) is None


async def scene_admit(scene: Scene) -> tuple[GroupRecord, ...]:
    """Admit a batch of one from a context that holds no cut."""
    from quiesce.barrier import detached

    return tuple(await detached(scene.admitted(1)))


async def test_a_finished_step_counts_its_groups_and_hands_over_their_rows() -> None:
    """The slot that ends a claim records the groups as trained and hands their rows to clearing, in one step."""
    scene = Scene()
    records = await scene.admitted(4)
    entries = [await scene.ready(record) for record in records]
    async with scene.barrier.mutation("group_removal") as cut:
        claim = scene.owners.claim(cut)
    assert claim is not None
    scene.owners.buffer.begin(claim)

    async with scene.barrier.mutation("sample_clear") as cut:
        scene.owners.finish(cut, claim)
        assert scene.conserved()

    assert scene.counts()["trained"] == 4
    assert scene.owners.step == 1
    assert scene.owners.clears.outstanding() == tuple(key for entry in entries for key in entry.keys)


async def test_no_cut_is_taken_inside_a_begun_step() -> None:
    """Between the start of an optimizer step and the slot that ends its claim, a cut is refused."""
    scene = Scene()
    (record,) = await scene.admitted(1)
    await scene.ready(record)
    async with scene.barrier.mutation("group_removal") as cut:
        claim = scene.owners.claim(cut)
    assert claim is not None
    ready, claimed = scene.owners.buffer.capture()
    assert (ready, claimed) == ((), claim.entries)

    scene.owners.buffer.begin(claim)

    with pytest.raises(ClaimError, match="has begun"):
        scene.owners.buffer.capture()


# --------------------------------------------------------------------------------------------------- may_drop


@pytest.mark.parametrize(
    "count, fraction, ends, allowed",
    [
        (4, 0.9, False, False),  # a full batch would fall to 3 of 4
        (4, 0.75, False, True),
        (4, 0.0, False, True),
        (3, 0.9, False, True),  # short already
        (3, 0.75, False, False),  # as long as it may be the rest of a full batch
        (3, 0.75, True, True),  # the epoch's tail
        (4, 0.9, True, False),  # the last batch of an epoch, but a full one
    ],
)
async def test_the_fraction_may_refuse_to_drop_from_a_full_batch_only(
    count: int,
    fraction: float,
    ends: bool,  # noqa: FBT001 - a parameter of the test
    allowed: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    """A failure drop is refused if it makes a step too small, never from the epoch's tail or a step that is short."""
    scene = Scene(fraction=fraction)
    records = await scene.admitted(count, ends=ends, last=ends)

    assert scene.owners.may_drop(records[0]) is allowed


@pytest.mark.parametrize("name", ["windowed", "ready_first"])
async def test_samplers_that_tie_no_groups_to_a_step_may_always_drop(name: str) -> None:
    """Where any ready group can fill a step, no step shrinks by a lost group."""
    scene = Scene(sampler(name))
    records = await scene.admitted(4)

    assert scene.owners.may_drop(records[0])


async def test_groups_that_are_ready_count_towards_the_step() -> None:
    """Of a batch with the same stamp, finished and unfinished groups count alike."""
    for name in ("in_order", "weight_fifo"):
        scene = Scene(sampler(name))
        first, *_, last = await scene.admitted(4)
        await scene.ready(first)

        assert not scene.owners.may_drop(last)


# --------------------------------------------------------------------------------------------------- condemning


async def condemn(scene: Scene, *names: str) -> tuple[str, ...]:
    """Drop what a refused cut blamed."""
    async with scene.barrier.mutation("group_removal") as cut:
        return scene.owners.condemn(cut, names)


async def test_a_group_at_fault_is_dropped_wherever_it_is() -> None:
    """Ledger, buffer or pool: it leaves, is counted once for that reason, and the rows of a finished one are cleared."""
    scene = Scene()
    unfinished, finished = await scene.admitted(2)
    entry = await scene.ready(finished)
    await scene.read(2, to_spares=True)
    spare, kept = scene.owners.spares.refs()
    names = (unfinished.group_id, finished.group_id, spare.group_id)

    assert await condemn(scene, *names, *names) == names

    assert scene.counts() == {"ledger": 0, "spares": 1, "ready": 0, "training": 0, "trained": 0, "dropped": 3}
    assert scene.owners.spares.refs() == (kept,)
    assert scene.owners.accounting.statistics().dropped["violation"] == 3
    assert scene.owners.clears.outstanding() == entry.keys
    assert await condemn(scene, *names) == ()
    assert scene.conserved()


async def test_a_lost_prompt_is_counted_as_dropped_so_that_the_next_cut_passes() -> None:
    """A prompt that was read and has no owner any more must not end saving for good."""
    scene = Scene()
    record, _ = await scene.admitted(2)
    async with scene.barrier.mutation("retry") as cut:
        scene.owners.ledger.take_group(cut, record.group_id, target="nowhere")
    assert not scene.conserved()

    assert await condemn(scene, record.group_id) == (record.group_id,)

    assert scene.conserved()
    assert scene.owners.accounting.ended(record.prompt)


async def test_a_group_in_two_owners_is_dropped_from_both_and_counted_once() -> None:
    """The fault of being owned twice ends with it."""
    scene = Scene()
    (record,) = await scene.admitted(1)
    await scene.ready(record)
    async with scene.barrier.mutation("retry") as cut:
        scene.owners.ledger.restore(cut, [record])

    assert await condemn(scene, record.group_id) == (record.group_id,)

    assert scene.counts() == {"ledger": 0, "spares": 0, "ready": 0, "training": 0, "trained": 0, "dropped": 1}


async def test_what_cannot_be_condemned_is_passed_over() -> None:
    """Unknown names, positions that were never read, and groups in training are left as they are."""
    scene = Scene()
    (record,) = await scene.admitted(1)
    await scene.ready(record)
    async with scene.barrier.mutation("group_removal") as cut:
        claim = scene.owners.claim(cut)
    assert claim is not None

    assert await condemn(scene, "nonsense", PromptRef(0, 77, 0).group_id, record.group_id) == ()

    assert scene.counts()["training"] == 1
    assert scene.conserved()


# ------------------------------------------------------------------------------------------------- state, cuts


async def test_exhausted_and_finished_follow_from_the_owners() -> None:
    """A run ends when the position is at the end and spares, ledger, buffer and claims are empty, and not before."""
    scene = Scene()
    await scene.read(1, to_spares=True)
    await scene.read(0, ends=True, last=True)
    assert (scene.owners.exhausted, scene.owners.finished) == (False, False)

    async with scene.barrier.mutation("prompt_reservation") as cut:
        (record,) = scene.owners.drain_spares(cut)
    assert (scene.owners.exhausted, scene.owners.finished) == (False, False)

    await scene.admission.admit([record.group_id])
    assert (scene.owners.exhausted, scene.owners.finished) == (True, False)

    await scene.ready(scene.owners.ledger.get(record.group_id))
    async with scene.barrier.mutation("group_removal") as cut:
        claim = scene.owners.claim(cut)
    assert claim is not None
    assert not scene.owners.finished

    scene.owners.buffer.begin(claim)
    async with scene.barrier.mutation("sample_clear") as cut:
        scene.owners.finish(cut, claim)
    assert (scene.owners.exhausted, scene.owners.finished) == (True, True)


async def test_admitted_ready_and_claimed_groups_count_against_the_capacity() -> None:
    """Reserved groups and spares do not: they have no rollouts and no rows."""
    scene = Scene()
    records = await scene.admitted(4)
    await scene.ready(records[0])
    await scene.read(2)
    await scene.read(3, to_spares=True)
    assert scene.owners.occupied == 4


MOVES: dict[str, Callable[[Scene, Cut, GroupRecord], object]] = {
    "commit_pull": lambda scene, cut, _: scene.owners.commit_pull(cut, scene.pull(1), to_spares=False),
    "drain_spares": lambda scene, cut, _: scene.owners.drain_spares(cut),
    "commit_rollout": lambda scene, cut, record: scene.commit(cut, record),
    "retry": lambda scene, cut, record: scene.owners.retry(cut, record),
    "drop": lambda scene, cut, record: scene.owners.drop(cut, record.group_id, "failed"),
    "substitute": lambda scene, cut, record: scene.owners.substitute(cut, record),
    "evict": lambda scene, cut, record: scene.owners.evict(cut, [record.group_id]),
    "condemn": lambda scene, cut, record: scene.owners.condemn(cut, [record.group_id]),
}


@pytest.mark.parametrize("move", MOVES)
async def test_a_move_needs_a_live_cut(move: str) -> None:
    """Accounting and owners change only inside slots: with a cut that has expired, nothing is changed."""
    scene = Scene()
    record, _ = await scene.admitted(2)
    await scene.read(2, to_spares=True)
    async with scene.barrier.mutation("retry") as cut:
        pass
    before = (scene.counts(), scene.owners.position, scene.owners.next_admission_id)

    with pytest.raises(CutExpiredError):
        MOVES[move](scene, cut, record)

    assert (scene.counts(), scene.owners.position, scene.owners.next_admission_id) == before


async def test_every_move_wakes_whoever_waits_and_is_counted() -> None:
    """The stall watch and the pumps see each move."""
    scene = Scene()
    woken: list[int] = []

    record, _ = await scene.admitted(2)
    woken.append(scene.owners.moves)
    await scene.ready(record)
    woken.append(scene.owners.moves)

    assert woken == [1, 2]


async def test_a_substitution_that_cannot_be_made_changes_nothing() -> None:
    """Without a spare, or for an attempt that the ledger does not wait for, the failed group stays where it was."""
    scene = Scene()
    record, _ = await scene.admitted(2)
    async with scene.barrier.mutation("substitution") as cut:
        with pytest.raises(UnknownGroupError):
            scene.owners.substitute(cut, record)
        assert record.group_id in scene.owners.ledger
    await scene.read(1, to_spares=True)
    async with scene.barrier.mutation("substitution") as cut:
        scene.owners.retry(cut, record)
        with pytest.raises(StaleCommitError):
            scene.owners.substitute(cut, record)

    assert scene.counts() == {"ledger": 2, "spares": 1, "ready": 0, "training": 0, "trained": 0, "dropped": 0}
