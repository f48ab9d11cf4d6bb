"""The replay buffer's index of finished groups, and the training claims on them.

A group enters by :meth:`ReplayBuffer.commit_group`, in the very step in which the ledger gives it up; is
hidden from samplers by a claim when a train step takes it; and leaves when that step is over (``trained``) or
by eviction (``dropped``). Its rows are in the data plane before it enters; when it leaves, its row keys are
returned for clearing.

Rule: every move takes a live cut and is one await-free step, resolved by group id. Nothing here suspends.

===================  ==========================================  =========================
a claim              captured by a checkpoint as                 ends by
===================  ==========================================  =========================
not begun            ready (its step will be taken again)        ``begin`` or ``unclaim``
begun                cannot be: no cut lies inside a step        ``finish``
===================  ==========================================  =========================
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from quiesce.errors import (
    ClaimError,
    DuplicateOwnerError,
    MissingRowError,
    PhaseError,
    StaleCommitError,
    UnknownGroupError,
)
from quiesce.types import BufferEntry

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from quiesce.barrier import Cut, DataPlaneCheckpointBarrier
    from quiesce.ledger import RolloutLedger
    from quiesce.observers import Hub
    from quiesce.types import RowKey

__all__ = ["BufferStatistics", "Claim", "ReplayBuffer", "RowInventory"]


class RowInventory(Protocol):
    """What the buffer needs of a data plane."""

    def missing(self, keys: Iterable[RowKey]) -> tuple[RowKey, ...]:
        """Return those of the keys that are not there; cheap, and does not suspend."""
        ...


@dataclass(frozen=True, slots=True)
class BufferStatistics:
    """What the buffer owns.

    Attributes:
        ready: Groups that a sampler may select.
        training: Groups that are claimed.
        target_step_max: Largest stamped step among both, or None.
    """

    ready: int
    training: int
    target_step_max: int | None


@dataclass(eq=False, slots=True)
class Claim:
    """The groups that one train step takes.

    Attributes:
        number: Counts claims, for messages.
        entries: The groups, in the sampler's order.
        begun: Whether the optimizer step may have changed weights already.
        ended: Whether the claim is over.
    """

    number: int
    entries: tuple[BufferEntry, ...]
    begun: bool = False
    ended: bool = False

    def __str__(self) -> str:
        """Name the claim and its groups."""
        return f"{self.number} ({', '.join(entry.group_id for entry in self.entries) or 'empty'})"


class ReplayBuffer:
    """Owns finished groups, ready or in training.

    Args:
        barrier: The barrier whose cuts prove that a change is allowed.
        ledger: Gives up a group in the step in which the buffer takes it.
        rows: Answers whether a group's rows are there.
        hub: Where ``owner_moved`` is reported; None means the barrier's hub.
    """

    def __init__(
        self,
        barrier: DataPlaneCheckpointBarrier,
        ledger: RolloutLedger,
        rows: RowInventory,
        *,
        hub: Hub | None = None,
    ) -> None:
        self._barrier = barrier
        self._ledger = ledger
        self._rows = rows
        self._hub = barrier.hub if hub is None else hub
        self._ready: dict[str, BufferEntry] = {}
        self._claims: dict[Claim, None] = {}
        self._claimed: dict[str, BufferEntry] = {}
        self._next_claim = 0
        self._hub.attach("buffer", self)

    def commit_group(
        self,
        cut: Cut,
        group_id: str,
        attempt: int,
        *,
        keys: Sequence[RowKey],
        generated_from: int,
        generated_to: int,
        stats: Mapping[str, float],
    ) -> BufferEntry:
        """Take a finished group over from the ledger and flip it to ready, in one step.

        Args:
            cut: A live cut of the shared side.
            group_id: The group.
            attempt: The attempt that finished.
            keys: Its final rows, in generation order; they were put before.
            generated_from: Oldest weight version that generated a token of it.
            generated_to: Newest such version.
            stats: Small finite numbers to show.

        Raises:
            StaleCommitError: If the ledger does not wait for this attempt (any more).
            PhaseError: If the group was never admitted.
            MissingRowError: If a row is not in the data plane; the group stays where it was.
            DuplicateOwnerError: If the buffer owns the group already.
        """
        cut.check(self._barrier, "mutation")
        buffered = self.find(group_id)
        record = self._ledger.find(group_id)
        if buffered is not None and (record is not None or buffered.attempt == attempt):
            raise DuplicateOwnerError(group_id, "buffer", "buffer")
        if record is None or record.attempt != attempt:  # also once another attempt was buffered
            raise StaleCommitError(group_id, attempt, None if record is None else record.attempt)
        if record.phase != "admitted" or record.start_version is None:
            raise PhaseError(group_id, record.phase, "buffered")
        missing = self._rows.missing(keys)
        if missing:
            raise MissingRowError(missing[0].encode(), "the data plane")
        entry = BufferEntry(
            group_id=group_id,
            admission_id=record.admission_id,
            prompt=record.prompt,
            attempt=attempt,
            target_step=record.target_step,
            start_version=record.start_version,
            generated_from=generated_from,
            generated_to=generated_to,
            keys=tuple(keys),
            stats=dict(stats),
        )
        self._ready[group_id] = entry
        self._ledger.take_group(cut, group_id, attempt=attempt, target="buffer")  # last: it reports the move
        return entry

    def claim_for_training(self, cut: Cut, group_ids: Sequence[str]) -> Claim:
        """Hide ready groups from samplers until their step is over; select and claim are one await-free step.

        Raises:
            UnknownGroupError: If one is not ready; nothing is claimed then.
            ClaimError: If one is named twice.
        """
        cut.check(self._barrier, "mutation")
        for group_id in group_ids:
            if group_id not in self._ready:
                raise UnknownGroupError(group_id, "buffer (ready groups)")
        claim = Claim(self._next_claim, tuple(self._ready[group_id] for group_id in group_ids))
        if len(set(group_ids)) != len(group_ids):
            raise ClaimError(str(claim), "a group is named twice")
        self._next_claim += 1
        for entry in claim.entries:
            self._claimed[entry.group_id] = self._ready.pop(entry.group_id)
        self._claims[claim] = None
        self._moved(claim.entries, "buffer", "training", "")
        return claim

    def begin(self, claim: Claim) -> None:
        """Mark the start of the claim's optimizer step: from here to :meth:`finish` no cut may be taken.

        Raises:
            ClaimError: If the claim is over, or begun already.
        """
        self._require(claim, begun=False)
        claim.begun = True

    def unclaim(self, cut: Cut, claim: Claim) -> None:
        """Give the groups of a claim whose step never began back to the samplers.

        Raises:
            ClaimError: If the claim is over, or begun.
        """
        cut.check(self._barrier)
        self._require(claim, begun=False)
        # In front again: they were selected before those that are ready now.
        self._ready = {entry.group_id: entry for entry in self._end(claim)} | self._ready
        self._moved(claim.entries, "training", "buffer", "")

    def finish(self, cut: Cut, claim: Claim) -> tuple[RowKey, ...]:
        """End a claim whose step is over: its groups are trained.

        Returns:
            Their row keys, to hand to clearing in the same step.

        Raises:
            ClaimError: If the claim is over, or never begun.
        """
        cut.check(self._barrier, "mutation")
        self._require(claim, begun=True)
        entries = self._end(claim)
        self._moved(entries, "training", "trained", "")
        return tuple(key for entry in entries for key in entry.keys)

    def evict(self, cut: Cut, group_ids: Sequence[str], reason: str = "evicted") -> tuple[BufferEntry, ...]:
        """End the buffer's ownership of ready groups; the caller counts them as dropped and clears the rows.

        Raises:
            UnknownGroupError: If one is not ready; nothing is evicted then.
        """
        cut.check(self._barrier)
        for group_id in group_ids:
            if group_id not in self._ready:
                raise UnknownGroupError(group_id, "buffer (ready groups)")
        entries = tuple(self._ready.pop(group_id) for group_id in dict.fromkeys(group_ids))
        self._moved(entries, "buffer", "dropped", reason)
        return entries

    def restore(self, cut: Cut, entries: Iterable[BufferEntry]) -> None:
        """Take over the groups of a checkpoint, as ready: all of them, or none if it raises.

        Raises:
            DuplicateOwnerError: If the buffer owns one of them already, or one comes twice.
            MissingRowError: If a row of one is not in the data plane.
        """
        cut.check(self._barrier)
        restored: dict[str, BufferEntry] = {}
        for entry in entries:
            if entry.group_id in self or entry.group_id in restored:
                raise DuplicateOwnerError(entry.group_id, "buffer", "buffer (restored)")
            missing = self._rows.missing(entry.keys)
            if missing:
                raise MissingRowError(missing[0].encode(), "the data plane")
            restored[entry.group_id] = entry
        self._ready |= restored

    def capture(self) -> tuple[tuple[BufferEntry, ...], tuple[BufferEntry, ...]]:
        """Return (ready groups, groups of claims whose step has not begun); both count as ready in a cut.

        Raises:
            ClaimError: If a step has begun: its groups are neither untrained nor trained now.
        """
        for claim in self._claims:
            if claim.begun:
                raise ClaimError(str(claim), "its optimizer step has begun, so no cut may be taken")
        return tuple(self._ready.values()), tuple(self._claimed.values())

    def ready(self) -> tuple[BufferEntry, ...]:
        """Return the ready groups, in the order of their commits; a snapshot."""
        return tuple(self._ready.values())

    def claims(self) -> tuple[Claim, ...]:
        """Return the claims that are not over."""
        return tuple(self._claims)

    def entries(self) -> tuple[BufferEntry, ...]:
        """Return every group it owns, ready and claimed."""
        return (*self._ready.values(), *self._claimed.values())

    def find(self, group_id: str) -> BufferEntry | None:
        """Return a group's entry, ready or claimed, or None."""
        return self._ready.get(group_id) or self._claimed.get(group_id)

    def __contains__(self, group_id: object) -> bool:
        """Whether the buffer owns a group, ready or claimed."""
        return group_id in self._ready or group_id in self._claimed

    def __len__(self) -> int:
        """How many groups it owns, ready and claimed."""
        return len(self._ready) + len(self._claimed)

    def __bool__(self) -> bool:
        """Refuse: an empty buffer is not a missing one."""
        message = "a buffer has no truth value; use len() or compare with None"
        raise TypeError(message)

    def statistics(self) -> BufferStatistics:
        """Return what it owns; may be called from any thread."""
        ready, claimed = list(self._ready.values()), list(self._claimed.values())
        stamps = [entry.target_step for entry in (*ready, *claimed) if entry.target_step is not None]
        return BufferStatistics(len(ready), len(claimed), max(stamps, default=None))

    def _require(self, claim: Claim, *, begun: bool) -> None:
        if claim.ended or claim not in self._claims:
            raise ClaimError(str(claim), "is over")
        if claim.begun != begun:
            raise ClaimError(str(claim), "its step has begun" if claim.begun else "its step has not begun")

    def _end(self, claim: Claim) -> tuple[BufferEntry, ...]:
        claim.ended = True
        del self._claims[claim]
        for entry in claim.entries:
            del self._claimed[entry.group_id]
        return claim.entries

    def _moved(self, entries: Sequence[BufferEntry], source: str, target: str, reason: str) -> None:
        if self._hub.owner_moved:
            for entry in entries:
                self._hub.fire("owner_moved", entry.group_id, source, target, reason)
