"""Admission: from a reserved batch to an admitted one.

The wait at the sampler's gate ends when the trainer version moves, and the trainer's own save waits for open
slots. So the wait holds nothing, and only the commit takes a slot::

    await sampler.wait_until_admissible(versions)      # a checkpoint may run meanwhile
    async with barrier.mutation("admission") as cut:   # one await-free step:
        target_step = sampler.commit_admission(cut)    #   cursor + 1, the stamp
        ...                                            #   occupied-step and already-buffered checks
        ledger.mark_group_admitted(cut, ...)           #   reserved -> admitted, for the whole batch

Rule: everything that mints a target step (a live batch, a restored reserved batch, a spare drain) comes
through :meth:`Admission.admit`, one batch at a time, from one task. That task being the only admitter and the
trainer version only growing is why the gate is not looked at again inside the slot. A refused admission
leaves cursor and ledger as they were.

The fallback: a custom sampler with only a one-piece ``admit()`` waits *inside* the slot. That is correct, and
it makes a checkpoint wait for that sampler's gate; a gate that opens only after the checkpoint is bounded by
the drain timeout.

Yield rule: :meth:`Admission.admit` suspends at the gate and while a checkpoint holds the barrier; nothing
else suspends. Cancellation: an admission that is cancelled while it waits leaves the batch reserved and the
cursor where it was.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from quiesce.barrier import require_no_cut
from quiesce.errors import (
    BatchError,
    CapacityError,
    ConfigError,
    CursorBehindStampError,
    DrainTimeoutError,
    DuplicateOwnerError,
    OccupiedStepError,
    PhaseError,
    SamplerContractError,
)
from quiesce.samplers import OnePieceAdmissionSampler, TransactionalAdmissionSampler

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from quiesce.barrier import DataPlaneCheckpointBarrier, MutationCut
    from quiesce.buffer import ReplayBuffer
    from quiesce.ledger import RolloutLedger
    from quiesce.observers import Hub
    from quiesce.samplers import Sampler
    from quiesce.signals import TrainerVersion
    from quiesce.types import BufferEntry, GroupRecord

__all__ = ["CRITICAL_DRAIN_TIMEOUTS", "Admission", "AdmissionStatistics", "Admitted"]

_LOG: Final = logging.getLogger("quiesce.admission")

CRITICAL_DRAIN_TIMEOUTS: Final = 3
"""So many checkpoints in a row that a fallback admission kept from draining are critical."""


@dataclass(frozen=True, slots=True)
class Admitted:
    """A batch that was admitted.

    Attributes:
        target_step: The step that it is stamped with, or None.
        start_version: The trainer version at the admission, the same for the whole batch.
        group_ids: Its groups.
    """

    target_step: int | None
    start_version: int
    group_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AdmissionStatistics:
    """What the admission is doing.

    Attributes:
        path: ``transactional`` or ``fallback``.
        committed: Batches admitted since the process started.
        waiting_groups: Groups of the batch that waits at the gate now, 0 if none does.
        waiting_seconds: How long it has waited so far.
        drain_timeouts: Checkpoints in a row that could not drain because of a fallback admission.
        critical: Whether these are :data:`CRITICAL_DRAIN_TIMEOUTS` or more.
    """

    path: str
    committed: int
    waiting_groups: int
    waiting_seconds: float
    drain_timeouts: int
    critical: bool


class Admission:
    """Admits reserved batches; see the module's docstring for the protocol.

    Args:
        barrier: The barrier whose ``admission`` slots it opens.
        sampler: Holds the gate and the dispatch cursor.
        ledger: Owns the reserved groups.
        buffer: Owns the finished ones.
        versions: The trainer version that the gate waits on.
        hub: Where hooks go; None means the barrier's hub.
        clock: Monotonic nanoseconds.

    Raises:
        SamplerContractError: If the sampler has neither of the two admission protocols.
    """

    def __init__(
        self,
        barrier: DataPlaneCheckpointBarrier,
        sampler: Sampler,
        ledger: RolloutLedger,
        buffer: ReplayBuffer,
        versions: TrainerVersion,
        *,
        hub: Hub | None = None,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._two_step = sampler if isinstance(sampler, TransactionalAdmissionSampler) else None
        self._one_piece = sampler if isinstance(sampler, OnePieceAdmissionSampler) else None
        if self._two_step is None and self._one_piece is None:
            raise SamplerContractError(
                sampler.name, "has neither wait_until_admissible() and commit_admission() nor admit()"
            )
        self._barrier = barrier
        self._sampler = sampler
        self._ledger = ledger
        self._buffer = buffer
        self._versions = versions
        self._hub = barrier.hub if hub is None else hub
        self._clock = clock
        self._committed = 0
        self._waiting: tuple[str, ...] = ()
        self._waiting_since_ns = 0
        self._drain_timeouts = 0
        self._reported_fallback = False
        self._hub.attach("admission", self)
        if sampler not in self._hub.sources("sampler"):
            self._hub.attach("sampler", sampler)

    @property
    def path(self) -> str:
        """``transactional``, or ``fallback`` for a sampler with only a one-piece ``admit()``."""
        return "fallback" if self._two_step is None else "transactional"

    @property
    def committed(self) -> int:
        """Batches admitted since the process started."""
        return self._committed

    @property
    def critical(self) -> bool:
        """Whether fallback admissions kept :data:`CRITICAL_DRAIN_TIMEOUTS` checkpoints from draining."""
        return self._drain_timeouts >= CRITICAL_DRAIN_TIMEOUTS

    async def admit(self, batch: Sequence[str]) -> Admitted:
        """Wait at the gate and admit one reserved batch; await room for it in the buffer first.

        Args:
            batch: Ids of all groups that the ledger reserved under one admission id.

        Returns:
            The stamp and the start version of the batch.

        Raises:
            LockOrderError: If the caller holds a live cut: the gate may open only after a checkpoint.
            BatchError: If that is not one whole reserved batch.
            UnknownGroupError: If the ledger does not own one of the groups.
            PhaseError: If one is admitted already.
            DuplicateOwnerError: If one is in the buffer already.
            OccupiedStepError: If the stamp is on other groups already.
            SamplerContractError: If a custom sampler breaks its contract.
        """
        require_no_cut("the wait at the admission gate")
        ids = tuple(batch)
        if self._two_step is not None:
            return await self._admit_in_two_steps(self._two_step, ids)
        assert self._one_piece is not None  # noqa: S101 - the constructor saw to it; tells the type checker
        return await self._admit_in_one_piece(self._one_piece, ids)

    def check_capacity(self, capacity: int, groups_per_step: int, *, key: str = "buffer_capacity") -> None:
        """Refuse a buffer capacity with which this sampler's run could stand still.

        Args:
            capacity: Groups that may be admitted, ready and claimed at once.
            groups_per_step: Groups of a full step.
            key: Configuration key of the capacity, for the message.

        Raises:
            CapacityError: If it is too small.
        """
        needed = self._sampler.required_capacity(groups_per_step)
        if capacity < needed:
            what = f"{key}: sampler {self._sampler.name!r} with {groups_per_step} groups a step"
            raise CapacityError(what, needed, capacity)

    def check_restored(
        self,
        cursor: int,
        records: Collection[GroupRecord],
        entries: Collection[BufferEntry],
        *,
        capacity: int,
        key: str = "buffer_capacity",
    ) -> None:
        """Refuse restored state that contradicts itself or does not fit this configuration. Changes nothing.

        A lookahead or staleness that was lowered since the save is no contradiction: what is owned is
        trained, and the gate stays shut until the trainer has caught up.

        Args:
            cursor: The restored dispatch cursor.
            records: The restored ledger.
            entries: The restored buffer, unstarted claims included.
            capacity: Groups that may be admitted, ready and claimed at once.
            key: Configuration key of the capacity, for the message.

        Raises:
            CursorBehindStampError: If the cursor is older than a restored target step.
            ConfigError: If this sampler trains by stamps and a restored group has none.
            CapacityError: If the restored groups do not fit.
        """
        admitted = [record for record in records if record.phase == "admitted"]
        restored: tuple[GroupRecord | BufferEntry, ...] = (*admitted, *entries)
        for group in restored:
            if group.target_step is not None and group.target_step > cursor:
                raise CursorBehindStampError(cursor, group.target_step, group.group_id)
            if group.target_step is None and self._sampler.stamps_target_steps:
                raise ConfigError(
                    "sampler.name",
                    f"{self._sampler.name!r} trains by stamped steps, and restored group {group.group_id} "
                    "has no stamp; resume with the sampler that the checkpoint was saved with",
                )
        held = len(admitted) + len(entries)
        if held > capacity:
            # Admitted groups are redispatched at once, whatever the gate says: only they can open it.
            what = f"{key}: the restored run ({len(admitted)} admitted and {len(entries)} ready groups)"
            raise CapacityError(what, held, capacity)
        batches: dict[int, int] = {}
        for record in records:
            if record.phase == "reserved":
                batches[record.admission_id] = batches.get(record.admission_id, 0) + 1
        for admission_id, size in batches.items():
            if size > capacity:
                raise CapacityError(f"{key}: restored batch {admission_id}", size, capacity)

    def note_checkpoint(self, error: BaseException | None) -> None:
        """Take note of how a checkpoint ended, to tell a fallback admission that keeps the run from saving.

        Args:
            error: What it ended with. None, a success, ends the row; only a drain timeout whose holders
                include an admission of a one-piece sampler adds to it.
        """
        if error is None:
            self._drain_timeouts = 0
            return
        if self._two_step is not None or not isinstance(error, DrainTimeoutError):
            return
        held = [holder for holder in error.holders if holder.kind == "admission"]
        if not held:
            return
        self._drain_timeouts += 1
        if self.critical:
            age = max(holder.age_seconds for holder in held)
            _LOG.critical(
                "the last %d checkpoints could not drain because sampler %s waits at its gate inside an "
                "admission slot (%.1f s now), so the run no longer saves; split its admit() into "
                "wait_until_admissible() and commit_admission()",
                self._drain_timeouts,
                self._sampler.name,
                age,
            )
            if self._hub.stalled:
                self._hub.fire("stalled", "admission", self._waiting[0] if self._waiting else "", age)

    def statistics(self) -> AdmissionStatistics:
        """Return what it is doing; may be called from any thread."""
        waiting, since = self._waiting, self._waiting_since_ns
        return AdmissionStatistics(
            path=self.path,
            committed=self._committed,
            waiting_groups=len(waiting),
            waiting_seconds=(self._clock() - since) / 1e9 if waiting else 0.0,
            drain_timeouts=self._drain_timeouts,
            critical=self.critical,
        )

    async def _admit_in_two_steps(
        self, sampler: TransactionalAdmissionSampler, ids: tuple[str, ...]
    ) -> Admitted:
        self._check_batch(ids)
        self._begin_wait(ids)
        try:
            await sampler.wait_until_admissible(self._versions)
            self._waited()
        finally:
            self._waiting = ()
        async with self._barrier.mutation("admission") as cut:
            self._check_batch(ids)  # again: the wait was long enough for anything
            before = self._sampler.dispatch_cursor
            try:
                stamp = sampler.commit_admission(cut)
                version = self._check_stamp(stamp, ids)
            except BaseException:
                self._take_back(before)
                raise
            return self._mark(cut, ids, stamp, version)

    async def _admit_in_one_piece(self, sampler: OnePieceAdmissionSampler, ids: tuple[str, ...]) -> Admitted:
        self._report_fallback()
        async with self._barrier.mutation("admission") as cut:
            self._check_batch(ids)
            before = self._sampler.dispatch_cursor
            self._begin_wait(ids)
            try:
                stamp = await sampler.admit(self._versions)
                self._waited()
                self._check_batch(ids)  # again: slots do not exclude each other
                version = self._check_stamp(stamp, ids)
            except BaseException:
                self._take_back(before)
                raise
            finally:
                self._waiting = ()
            return self._mark(cut, ids, stamp, version)

    def _check_batch(self, ids: tuple[str, ...]) -> None:
        """Check that the ids are one whole reserved batch, none of it buffered."""
        if not ids:
            raise BatchError(ids, "it has no groups")
        if len(set(ids)) < len(ids):
            raise BatchError(ids, "a group is named twice")
        for group_id in ids:
            if group_id in self._buffer:
                raise DuplicateOwnerError(group_id, "buffer", "an admission")
        batch = {self._ledger.get(group_id) for group_id in ids}
        for record in batch:
            if record.phase != "reserved":
                raise PhaseError(record.group_id, record.phase, "admitted")
        numbers = {record.admission_id for record in batch}
        if len(numbers) > 1:
            raise BatchError(ids, f"its groups were reserved under different admission ids {sorted(numbers)}")
        # A batch that was admitted in two parts would take two steps of the cursor for one admission id.
        left_out = [
            record.group_id
            for record in self._ledger.records()
            if record.admission_id in numbers and record.phase == "reserved" and record not in batch
        ]
        if left_out:
            raise BatchError(ids, f"groups of the same admission id are left out: {', '.join(left_out)}")

    def _check_stamp(self, stamp: int | None, ids: tuple[str, ...]) -> int:
        """Check that the step is free and not over; return the trainer version."""
        version = self._versions.value
        if stamp is None:
            return version
        owned: tuple[GroupRecord | BufferEntry, ...] = (*self._ledger.records(), *self._buffer.entries())
        carriers = [group.group_id for group in owned if group.target_step == stamp]
        if carriers:
            raise OccupiedStepError(stamp, carriers, ids)
        if stamp < version:
            raise SamplerContractError(
                self._sampler.name,
                f"stamped step {stamp} although the trainer is at step {version}: never trained",
            )
        return version

    def _mark(self, cut: MutationCut, ids: tuple[str, ...], stamp: int | None, version: int) -> Admitted:
        for group_id in ids:
            self._ledger.mark_group_admitted(cut, group_id, target_step=stamp, start_version=version)
        self._committed += 1
        if self._hub.admission_committed:
            cursor = self._sampler.dispatch_cursor
            self._hub.fire("admission_committed", self.path, cursor, stamp, len(ids))
        return Admitted(stamp, version, ids)

    def _take_back(self, cursor: int) -> None:
        """Undo a cursor advance that admitted nothing, so that cursor + 1 stays the number of admissions."""
        if self._sampler.dispatch_cursor != cursor:
            self._sampler.restore_cursor(cursor)

    def _begin_wait(self, ids: tuple[str, ...]) -> None:
        self._waiting_since_ns = self._clock()
        self._waiting = ids

    def _waited(self) -> None:
        if self._hub.admission_waited:
            self._hub.fire("admission_waited", self._clock() - self._waiting_since_ns)

    def _report_fallback(self) -> None:
        if self._reported_fallback:
            return
        self._reported_fallback = True
        _LOG.warning(
            "sampler %s has a one-piece admit(), which waits at its gate inside an admission slot, so "
            "checkpoints wait for that gate; split it into wait_until_admissible() and commit_admission()",
            self._sampler.name,
        )
        if self._hub.sampler_fell_back:
            self._hub.fire("sampler_fell_back", self._sampler.name)
