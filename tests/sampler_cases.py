"""Records, views and custom samplers that several test files about samplers and admission share."""

from __future__ import annotations

from collections.abc import Iterable

from quiesce.barrier import MutationCut
from quiesce.samplers import OwnersView
from quiesce.signals import TrainerVersion
from quiesce.types import BufferEntry, GroupRecord, PromptRef, RowKey


class AllRows:
    """A data plane that has every row."""

    def missing(self, keys: Iterable[RowKey]) -> tuple[RowKey, ...]:
        """Miss nothing."""
        return ()


def reserved(position: int, admission_id: int = 0) -> GroupRecord:
    """Return a group that waits for admission."""
    prompt = PromptRef(0, position, position)
    return GroupRecord(prompt.group_id, admission_id, prompt)


def admitted(position: int, start: int, *, target: int | None = None, admission_id: int = 0) -> GroupRecord:
    """Return a group that is in flight."""
    prompt = PromptRef(0, position, position)
    return GroupRecord(prompt.group_id, admission_id, prompt, "admitted", target, start)


def entry(position: int, start: int, *, target: int | None = None, admission_id: int = 0) -> BufferEntry:
    """Return a ready group."""
    prompt = PromptRef(0, position, position)
    keys = (RowKey(1, prompt.group_id, 0, 0),)
    return BufferEntry(prompt.group_id, admission_id, prompt, 0, target, start, start, start, keys)


def gid(position: int) -> str:
    """Return the group id of a position."""
    return PromptRef(0, position, position).group_id


def gids(*positions: int) -> tuple[str, ...]:
    """Return the group ids of positions."""
    return tuple(gid(position) for position in positions)


def view(
    *groups: GroupRecord | BufferEntry, exhausted: bool = False, capacity: int = 1_000_000
) -> OwnersView:
    """Return the view of these groups: records in the ledger, entries in the buffer."""
    return OwnersView(
        ledger=[group for group in groups if isinstance(group, GroupRecord)],
        ready=[group for group in groups if isinstance(group, BufferEntry)],
        exhausted=exhausted,
        capacity=capacity,
    )


class OnPolicy:
    """A custom two-step sampler: at most one batch a version, trained whole."""

    def __init__(self) -> None:
        self.dispatch_cursor = -1

    def restore_cursor(self, cursor: int) -> None:
        """Set the cursor."""
        self.dispatch_cursor = cursor

    def is_admissible(self, version: int) -> bool:
        """Tell whether the version has caught up with the cursor."""
        return self.dispatch_cursor < version

    async def wait_until_admissible(self, versions: TrainerVersion) -> None:
        """Wait for the trainer."""
        await versions.wait_until(self.is_admissible)

    def commit_admission(self, cut: MutationCut) -> int | None:
        """Count the batch."""
        self.dispatch_cursor += 1
        return None

    def select(self, view: OwnersView, version: int, count: int) -> tuple[str, ...]:
        """Take what is ready."""
        return tuple(ready.group_id for ready in view.ready)[:count]


class OnePiece:
    """A custom sampler whose admission waits and commits in one method."""

    def __init__(self, lookahead: int = 1) -> None:
        self.dispatch_cursor = -1
        self.lookahead = lookahead

    def restore_cursor(self, cursor: int) -> None:
        """Set the cursor."""
        self.dispatch_cursor = cursor

    def is_admissible(self, version: int) -> bool:
        """Tell whether the gate is open."""
        return self.dispatch_cursor < version + self.lookahead

    async def admit(self, versions: TrainerVersion) -> int | None:
        """Wait, then count the batch."""
        await versions.wait_until(self.is_admissible)
        self.dispatch_cursor += 1
        return None

    def select(self, view: OwnersView, version: int, count: int) -> tuple[str, ...]:
        """Take what is ready."""
        return tuple(ready.group_id for ready in view.ready)[:count]


class PublishedOnePiece:
    """Makes two steps of a one-piece sampler: admit outside the barrier, publish the result inside the slot.

    What a checkpoint saves is the published cursor. This is the way out for a sampler that cannot be edited
    and whose ``admit()`` changes nothing but its own cursor.
    """

    def __init__(self, inner: OnePiece) -> None:
        self._inner = inner
        self._stamp: int | None = None
        self.dispatch_cursor = inner.dispatch_cursor
        self.is_admissible = inner.is_admissible
        self.select = inner.select

    def restore_cursor(self, cursor: int) -> None:
        """Take back what is not published, and start from the saved cursor."""
        self._inner.restore_cursor(cursor)
        self.dispatch_cursor = cursor

    async def wait_until_admissible(self, versions: TrainerVersion) -> None:
        """Admit ahead; nobody sees it until it is published."""
        if self._inner.dispatch_cursor == self.dispatch_cursor:
            self._stamp = await self._inner.admit(versions)

    def commit_admission(self, cut: MutationCut) -> int | None:
        """Publish."""
        self.dispatch_cursor = self._inner.dispatch_cursor
        return self._stamp
