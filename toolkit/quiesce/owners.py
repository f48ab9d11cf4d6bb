"""Everything restart-facing of a run in one place, and the moves of groups between their owners.

Each move below is one await-free step under a live cut: it takes a group from one owner, gives it to the next, accounts
for it, hands rows to cleanup, and tells whoever waits. No other code moves a group.

======================  =======================================  ==========================
a group leaves          by                                       for
======================  =======================================  ==========================
the dataset             ``commit_pull``                          ledger (reserved) or spares
spares                  ``drain_spares``, ``substitute``         ledger
ledger (reserved)       ``Admission.admit``                      ledger (admitted)
ledger (admitted)       ``commit_rollout``                       buffer
ledger, buffer          ``drop``, ``substitute``, ``evict``      dropped
buffer                  ``claim`` (selection included)           training
training                ``finish``                               trained
======================  =======================================  ==========================

Rule: what was checked before an await is checked again here, after it. Only ``room_for`` and ``steps_taken`` suspend.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from quiesce.checkpoint.cut import CommittedPosition, SamplerState
from quiesce.errors import StaleCommitError
from quiesce.samplers import OwnersView, Sampler, WeightFifoSampler, WindowedSampler, plan_step
from quiesce.signals import Changed, TrainerVersion
from quiesce.types import BufferEntry, GroupRecord, PromptRef, RowKey, group_ids

if TYPE_CHECKING:
    from quiesce.accounting import Accounting
    from quiesce.barrier import Cut, DataPlaneCheckpointBarrier
    from quiesce.buffer import Claim, ReplayBuffer
    from quiesce.cleanup import BackgroundCleanup
    from quiesce.ledger import RolloutLedger
    from quiesce.prompts import Pull
    from quiesce.spares import SparePool

__all__ = ["Owners", "reserved_batches"]


@dataclass(eq=False, slots=True)
class Owners:
    """The owners of a run's prompt groups, and the counters that a cut captures with them.

    Attributes:
        barrier: Its cuts prove that a move is allowed.
        sampler: Decides what is trained and evicted.
        versions: The trainer version W.
        ledger: Groups before they are buffered.
        spares: Prompts that stand in for failed groups.
        buffer: Finished groups.
        accounting: What became of every prompt.
        clears: Takes the rows of groups that ended, without ever waiting.
        capacity: Groups that may be admitted, ready and in training at once.
        groups_per_step: Groups of a full step.
        min_step_batch_fraction: See :class:`quiesce.controller_config.ControllerConfig`.
        position: How far the dataset counts as read.
        next_admission_id: The id that the next reserved batch gets.
        step: Trained steps, passed ones included.
        moves: Counts moves; whoever watches for a stall compares it.
        changed: Notified after every move.
    """

    barrier: DataPlaneCheckpointBarrier
    sampler: Sampler
    versions: TrainerVersion
    ledger: RolloutLedger
    spares: SparePool
    buffer: ReplayBuffer
    accounting: Accounting
    clears: BackgroundCleanup
    capacity: int
    groups_per_step: int
    min_step_batch_fraction: float
    position: CommittedPosition
    changed: Changed
    next_admission_id: int = 0
    step: int = 0
    moves: int = 0

    # ------------------------------------------------------------------------------------------------ questions

    @property
    def exhausted(self) -> bool:
        """Whether nothing more can ever be admitted."""
        return self.position.exhausted and len(self.spares) == 0 and len(self.ledger) == self.ledger.admitted

    @property
    def finished(self) -> bool:
        """Whether every prompt was read and has ended."""
        return self.position.exhausted and not (len(self.spares) or len(self.ledger) or len(self.buffer))

    @property
    def occupied(self) -> int:
        """Groups that count against the capacity."""
        return self.ledger.admitted + len(self.buffer)

    async def room_for(self, groups: int) -> None:
        """Suspend until so many more groups fit into the capacity."""
        await self.changed.wait_until(lambda: self.occupied + groups <= self.capacity)

    async def steps_taken(self, steps: int) -> None:
        """Suspend until so many more train steps are over."""
        due = self.step + steps
        await self.changed.wait_until(lambda: self.step >= due)

    def view(self) -> OwnersView:
        """Return what the sampler decides from."""
        return OwnersView(self.ledger.records(), self.buffer.ready(), self.exhausted, self.capacity)

    def plan(self) -> tuple[str, ...] | None:
        """Return the groups of the next step, () to pass it, or None while it cannot be taken."""
        return plan_step(self.sampler, self.view(), self.versions.value, self.groups_per_step)

    def evictable(self) -> tuple[str, ...]:
        """Return the ready groups that no step will train any more."""
        return self.sampler.evictable(self.view(), self.versions.value)

    def stale(self) -> tuple[str, ...]:
        """Return the unfinished groups whose rollouts are to be aborted."""
        version = self.versions.value
        return tuple(
            record.group_id
            for record in self.ledger.records()
            if record.phase == "admitted" and self.sampler.aborts(record, version)
        )

    def may_drop(self, record: GroupRecord) -> bool:
        """Whether dropping a failed group leaves its step large enough.

        A step that is short already (the epoch's tail, or earlier losses) may lose more: refusing could only hold it up.
        """
        mates = self._step_mates(record)
        if mates is None or self._ends_epoch_short(record):
            return True
        least = math.ceil(self.groups_per_step * self.min_step_batch_fraction)
        return mates - 1 >= least or mates < least

    def _ends_epoch_short(self, record: GroupRecord) -> bool:
        """Whether a group belongs to the epoch's tail: the last batch that was read of it, if that is not a full one."""
        ref = record.prompt
        for epoch in self.accounting.capture().open:
            if epoch.epoch == ref.epoch:
                return epoch.ended and ref.position >= epoch.read - epoch.read % self.groups_per_step
        return False

    def _step_mates(self, record: GroupRecord) -> int | None:
        """How many owned groups share the record's step; None if its sampler ties no groups to a step."""
        owned: tuple[GroupRecord | BufferEntry, ...] = (*self.ledger.records(), *self.buffer.ready())
        if self.sampler.stamps_target_steps:
            return sum(item.target_step == record.target_step for item in owned)
        if isinstance(self.sampler, WeightFifoSampler):
            return sum(item.start_version == record.start_version for item in owned)
        return None

    def sampler_state(self, admissions: int) -> SamplerState:
        """Return the sampler as a cut captures it.

        Args:
            admissions: Committed admissions along the restored lineage, counted by whoever admits: that the cursor agrees
                with them is what an invariant checks.
        """
        return SamplerState(
            name=self.sampler.name,
            cursor=self.sampler.dispatch_cursor,
            stamps_target_steps=self.sampler.stamps_target_steps,
            admissions=admissions,
            next_admission_id=self.next_admission_id,
        )

    # ---------------------------------------------------------------------------------------------------- moves

    def commit_pull(self, cut: Cut, pull: Pull, *, to_spares: bool) -> tuple[GroupRecord, ...]:
        """Let a pull count: position, accounting and first owner in one step.

        Returns:
            The reserved batch; empty if the prompts became spares, or the pull had none.
        """
        cut.check(self.barrier)
        self.accounting.read(cut, pull.refs)
        records: tuple[GroupRecord, ...] = ()
        if to_spares:
            self.spares.add(cut, pull.refs)
        else:
            records = self._reserve(cut, pull.refs, "read")
        if pull.ends_epoch:
            self.accounting.end_epoch(cut, pull.epoch)
        self.position = pull.position
        self._moved()
        return records

    def drain_spares(self, cut: Cut) -> tuple[GroupRecord, ...]:
        """Reserve a batch of spares, once there is nothing more to read."""
        cut.check(self.barrier)
        refs = [self.spares.take(cut) for _ in range(min(self.groups_per_step, len(self.spares)))]
        records = self._reserve(cut, refs, "spares")
        self._moved()
        return records

    def commit_rollout(
        self,
        cut: Cut,
        record: GroupRecord,
        *,
        keys: Sequence[RowKey],
        generated_from: int,
        generated_to: int,
        stats: Mapping[str, float],
    ) -> BufferEntry:
        """Move a finished group from the ledger to the buffer; see :meth:`quiesce.buffer.ReplayBuffer.commit_group`."""
        entry = self.buffer.commit_group(
            cut,
            record.group_id,
            record.attempt,
            keys=keys,
            generated_from=generated_from,
            generated_to=generated_to,
            stats=stats,
        )
        self._moved()
        return entry

    def retry(self, cut: Cut, record: GroupRecord) -> GroupRecord | None:
        """Start a new attempt, unless the ledger does not wait for this one any more."""
        cut.check(self.barrier)
        if self.ledger.find(record.group_id) != record:
            return None
        return self.ledger.retry_group(cut, record.group_id)

    def drop(self, cut: Cut, group_id: str, reason: str, *, attempt: int | None = None) -> GroupRecord:
        """Drop a group of the ledger."""
        record = self.ledger.take_group(cut, group_id, target="dropped", attempt=attempt, reason=reason)
        self.accounting.dropped(cut, [record.prompt], reason)
        self._moved()
        return record

    def substitute(self, cut: Cut, record: GroupRecord) -> GroupRecord:
        """Drop a failed group and let the oldest spare take its place in its batch, with its stamp.

        Raises:
            StaleCommitError: If the ledger does not wait for this attempt; nothing has changed then.
            UnknownGroupError: If the pool is empty; nothing has changed then.
        """
        held = self.ledger.find(record.group_id)
        if held != record:
            raise StaleCommitError(record.group_id, record.attempt, None if held is None else held.attempt)
        ref = self.spares.take(cut)
        self.ledger.take_group(
            cut, record.group_id, target="dropped", attempt=record.attempt, reason="failed"
        )
        self.accounting.dropped(cut, [record.prompt], "failed")
        # Without an order among batches nothing is gained by an old start: the spare would only age out sooner.
        current = isinstance(self.sampler, WindowedSampler)
        stand_in = GroupRecord(
            group_id=ref.group_id,
            admission_id=record.admission_id,
            prompt=ref,
            phase="admitted",
            target_step=record.target_step,
            start_version=self.versions.value if current else record.start_version,
        )
        self.ledger.reserve_group(cut, stand_in, source="spares")
        self._moved()
        return stand_in

    def abort_stale(self, cut: Cut) -> tuple[GroupRecord, ...]:
        """Drop every unfinished group that is stale *now*, in one step; the caller cancels their rollouts afterwards."""
        return tuple(self.drop(cut, group_id, "stale_abort") for group_id in self.stale())

    def evict(self, cut: Cut, names: Sequence[str], reason: str = "evicted") -> tuple[BufferEntry, ...]:
        """Drop ready groups, and hand their rows to cleanup."""
        entries = self.buffer.evict(cut, names, reason)
        self.accounting.dropped(cut, [entry.prompt for entry in entries], reason)
        self.clears.hand_over(key for entry in entries for key in entry.keys)
        self._moved()
        return entries

    def claim(self, cut: Cut) -> Claim | None:
        """Select and claim the groups of the next step, in one step; None if it cannot be taken, or is passed."""
        chosen = self.plan()
        if not chosen:
            return None
        claim = self.buffer.claim_for_training(cut, chosen)
        self._moved()
        return claim

    def finish(self, cut: Cut, claim: Claim) -> None:
        """Record a claim's groups as trained, and hand their rows to cleanup."""
        keys = self.buffer.finish(cut, claim)
        self.accounting.trained(cut, [entry.prompt for entry in claim.entries])
        self.clears.hand_over(keys)
        self.step += 1
        self._moved()

    def condemn(self, cut: Cut, names: Sequence[str]) -> tuple[str, ...]:
        """Drop groups that a checkpoint's verification found at fault: wherever they still are, and if they are nowhere.

        A prompt that was read and lost has no owner to take it from; counting it as dropped is what lets the next cut
        pass. A group in training ends as trained. The caller cancels the rollouts of what is dropped.

        Returns:
            Those that were dropped; the others ended meanwhile.
        """
        cut.check(self.barrier, "mutation")
        read = {epoch.epoch: epoch.read for epoch in self.accounting.capture().open}
        in_training = {entry.group_id for claim in self.buffer.claims() for entry in claim.entries}
        gone = []
        for name in dict.fromkeys(names):
            if name in in_training:
                continue
            owned = [
                *self._take_from_ledger(cut, name),
                *self._take_spare(cut, name),
                *self._take_ready(cut, name),
            ]
            ref = owned[0] if owned else _ref_of(name)
            lost = (
                ref is not None and ref.position < read.get(ref.epoch, 0) and not self.accounting.ended(ref)
            )
            if ref is not None and lost:
                self.accounting.dropped(cut, [ref], "violation")
            if owned or lost:
                gone.append(name)
        self._moved()
        return tuple(gone)

    def _take_from_ledger(self, cut: Cut, name: str) -> list[PromptRef]:
        if name not in self.ledger:
            return []
        return [self.ledger.take_group(cut, name, target="dropped", reason="violation").prompt]

    def _take_spare(self, cut: Cut, name: str) -> list[PromptRef]:
        if name not in self.spares:
            return []
        refs = [self.spares.take(cut) for _ in range(len(self.spares))]
        self.spares.restore(cut, [ref for ref in refs if ref.group_id != name])
        if self.barrier.hub.owner_moved:
            self.barrier.hub.fire("owner_moved", name, "spares", "dropped", "violation")
        return [ref for ref in refs if ref.group_id == name]

    def _take_ready(self, cut: Cut, name: str) -> list[PromptRef]:
        if name not in self.buffer:
            return []
        entries = self.buffer.evict(cut, [name], "violation")
        self.clears.hand_over(key for entry in entries for key in entry.keys)
        return [entry.prompt for entry in entries]

    def _reserve(self, cut: Cut, refs: Sequence[PromptRef], source: str) -> tuple[GroupRecord, ...]:
        if not refs:
            return ()
        admission_id = self.next_admission_id
        self.next_admission_id += 1
        records = tuple(GroupRecord(ref.group_id, admission_id, ref) for ref in refs)
        for record in records:
            self.ledger.reserve_group(cut, record, source=source)
        return records

    def _moved(self) -> None:
        self.moves += 1
        self.changed.notify()


def reserved_batches(records: Sequence[GroupRecord]) -> list[tuple[str, ...]]:
    """Return the reserved batches of a ledger as tuples of group ids, in the order of their admission ids."""
    batches: dict[int, list[GroupRecord]] = {}
    for record in records:
        if record.phase == "reserved":
            batches.setdefault(record.admission_id, []).append(record)
    return [group_ids(batches[admission_id]) for admission_id in sorted(batches)]


_GROUP: Final = re.compile(r"e(\d{3,})-p(\d{7,})", re.ASCII)


def _ref_of(group_id: str) -> PromptRef | None:
    """Return the position that a group id names; nobody remembers the dataset index of a prompt that was lost."""
    found = _GROUP.fullmatch(group_id)
    return None if found is None else PromptRef(int(found[1]), int(found[2]), 0)
