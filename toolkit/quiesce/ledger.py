"""Who owns a prompt group before it is buffered.

A group lives here from the moment its prompt counts as read until its rows are buffered, or it is dropped or
substituted. Its phases are ``reserved``, then ``admitted``, once each. A record is frozen: a change replaces
it, so the tuple that :meth:`RolloutLedger.records` returns is a snapshot however long it is kept.

Rule: every change takes a live cut and is one await-free step. Nothing here suspends.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from quiesce.errors import DuplicateOwnerError, PhaseError, StaleCommitError, UnknownGroupError
from quiesce.observers import Hub
from quiesce.types import GroupRecord

if TYPE_CHECKING:
    from collections.abc import Iterable

    from quiesce.barrier import Cut, DataPlaneCheckpointBarrier

__all__ = ["LedgerStatistics", "RolloutLedger"]


@dataclass(frozen=True, slots=True)
class LedgerStatistics:
    """What the ledger owns.

    Attributes:
        reserved: Groups that wait for admission.
        admitted: Groups that are in flight.
        target_step_max: Largest stamped step, or None.
    """

    reserved: int
    admitted: int
    target_step_max: int | None


class RolloutLedger:
    """Owns every group that was read and is neither a spare, nor buffered, nor ended.

    Args:
        barrier: The barrier whose cuts prove that a change is allowed.
        hub: Where ``owner_moved`` is reported; None means the barrier's hub.
    """

    def __init__(self, barrier: DataPlaneCheckpointBarrier, *, hub: Hub | None = None) -> None:
        self._barrier = barrier
        self._hub = barrier.hub if hub is None else hub
        self._records: dict[str, GroupRecord] = {}
        self._admitted = 0
        self._hub.attach("ledger", self)

    def reserve_group(self, cut: Cut, record: GroupRecord, *, source: str = "read") -> None:
        """Take ownership of a group that was just read, or of a spare that just left the pool.

        Args:
            cut: A live cut.
            record: The group; ``reserved``, or ``admitted`` for a substitute that keeps its predecessor's
                stamp.
            source: ``read`` or ``spares``.

        Raises:
            DuplicateOwnerError: If the ledger owns the group already.
        """
        cut.check(self._barrier)
        if record.group_id in self._records:
            raise DuplicateOwnerError(record.group_id, "ledger", "ledger")
        self._records[record.group_id] = record
        self._admitted += record.phase == "admitted"
        if self._hub.owner_moved:
            self._hub.fire("owner_moved", record.group_id, source, "ledger", "")

    def mark_group_admitted(
        self, cut: Cut, group_id: str, *, target_step: int | None, start_version: int
    ) -> GroupRecord:
        """Flip a reserved group to admitted, with its stamp.

        Args:
            cut: A live cut.
            group_id: The group.
            target_step: The step that the sampler stamped, or None.
            start_version: The trainer version now.

        Raises:
            UnknownGroupError: If the ledger does not own the group.
            PhaseError: If it is admitted already.
        """
        cut.check(self._barrier)
        record = self.get(group_id)
        if record.phase != "reserved":
            raise PhaseError(group_id, record.phase, "admitted")
        record = replace(record, phase="admitted", target_step=target_step, start_version=start_version)
        self._records[group_id] = record
        self._admitted += 1
        return record

    def retry_group(self, cut: Cut, group_id: str) -> GroupRecord:
        """Wait for a new attempt of an admitted group; what the old attempt still does is stale from now on.

        Raises:
            UnknownGroupError: If the ledger does not own the group.
            PhaseError: If it was never admitted.
        """
        cut.check(self._barrier)
        record = self.get(group_id)
        if record.phase != "admitted":
            raise PhaseError(group_id, record.phase, "retried")
        record = replace(record, attempt=record.attempt + 1)
        self._records[group_id] = record
        return record

    def take_group(
        self, cut: Cut, group_id: str, *, target: str, attempt: int | None = None, reason: str = ""
    ) -> GroupRecord:
        """End the ledger's ownership of a group, in the step in which its new owner takes over.

        Args:
            cut: A live cut.
            group_id: The group.
            target: ``buffer`` or ``dropped``.
            attempt: The attempt on whose behalf; None means whichever is current.
            reason: Why, for drops.

        Raises:
            UnknownGroupError: If the ledger does not own the group.
            StaleCommitError: If it waits for another attempt.
        """
        cut.check(self._barrier)
        record = self._records.get(group_id)
        if attempt is not None and (record is None or record.attempt != attempt):
            raise StaleCommitError(group_id, attempt, None if record is None else record.attempt)
        if record is None:
            raise UnknownGroupError(group_id, "ledger")
        del self._records[group_id]
        self._admitted -= record.phase == "admitted"
        if self._hub.owner_moved:
            self._hub.fire("owner_moved", group_id, "ledger", target, reason)
        return record

    def restore(self, cut: Cut, records: Iterable[GroupRecord]) -> None:
        """Take over the groups of a checkpoint.

        Raises:
            DuplicateOwnerError: If the ledger owns one of them already, or one comes twice; none is taken
                over then.
        """
        cut.check(self._barrier)
        restored: dict[str, GroupRecord] = {}
        for record in records:
            if record.group_id in self._records or record.group_id in restored:
                raise DuplicateOwnerError(record.group_id, "ledger", "ledger (restored)")
            restored[record.group_id] = record
        self._records |= restored
        self._admitted += sum(record.phase == "admitted" for record in restored.values())

    def get(self, group_id: str) -> GroupRecord:
        """Return a group's record.

        Raises:
            UnknownGroupError: If the ledger does not own the group.
        """
        record = self._records.get(group_id)
        if record is None:
            raise UnknownGroupError(group_id, "ledger")
        return record

    def find(self, group_id: str) -> GroupRecord | None:
        """Return a group's record, or None."""
        return self._records.get(group_id)

    def records(self) -> tuple[GroupRecord, ...]:
        """Return every record, in the order of reservation; a snapshot."""
        return tuple(self._records.values())

    @property
    def admitted(self) -> int:
        """How many groups are in flight."""
        return self._admitted

    def __contains__(self, group_id: object) -> bool:
        """Whether the ledger owns a group."""
        return group_id in self._records

    def __len__(self) -> int:
        """How many groups it owns."""
        return len(self._records)

    def __bool__(self) -> bool:
        """Refuse: an empty ledger is not a missing one."""
        message = "a ledger has no truth value; use len() or compare with None"
        raise TypeError(message)

    def statistics(self) -> LedgerStatistics:
        """Return what it owns; may be called from any thread."""
        records = list(self._records.values())
        admitted = sum(record.phase == "admitted" for record in records)
        stamps = [record.target_step for record in records if record.target_step is not None]
        return LedgerStatistics(len(records) - admitted, admitted, max(stamps, default=None))
