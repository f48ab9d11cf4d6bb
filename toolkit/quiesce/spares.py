"""The pool of spare prompts, which stand in for groups that failed for good.

A spare was read and counted, so it has an owner: the pool. It leaves the pool in the same step in which the
ledger takes it, so no checkpoint can fall between the two.

Rule: every change takes a live cut and is one await-free step. Nothing here suspends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quiesce.errors import DuplicateOwnerError, UnknownGroupError
from quiesce.observers import Hub

if TYPE_CHECKING:
    from collections.abc import Iterable

    from quiesce.barrier import Cut, DataPlaneCheckpointBarrier
    from quiesce.types import PromptRef

__all__ = ["SparePool", "SpareStatistics"]


@dataclass(frozen=True, slots=True)
class SpareStatistics:
    """What the pool owns.

    Attributes:
        spares: Prompts in the pool.
    """

    spares: int


class SparePool:
    """Owns spare prompts, first in, first out.

    Args:
        barrier: The barrier whose cuts prove that a change is allowed.
        hub: Where ``owner_moved`` is reported; None means the barrier's hub.
    """

    def __init__(self, barrier: DataPlaneCheckpointBarrier, *, hub: Hub | None = None) -> None:
        self._barrier = barrier
        self._hub = barrier.hub if hub is None else hub
        self._refs: dict[str, PromptRef] = {}
        self._hub.attach("spares", self)

    def add(self, cut: Cut, refs: Iterable[PromptRef]) -> None:
        """Take ownership of prompts that were just read.

        Raises:
            DuplicateOwnerError: If the pool owns one of them already, or one comes twice; none is added then.
        """
        self.restore(cut, refs := tuple(refs))
        if self._hub.owner_moved:
            for ref in refs:
                self._hub.fire("owner_moved", ref.group_id, "read", "spares", "")

    def take(self, cut: Cut) -> PromptRef:
        """Give up the oldest spare; the caller hands it to the ledger in the same step, which reports it.

        Raises:
            UnknownGroupError: If the pool is empty.
        """
        cut.check(self._barrier)
        if not self._refs:
            raise UnknownGroupError("of any kind", "spares (the pool is empty)")
        return self._refs.pop(next(iter(self._refs)))

    def restore(self, cut: Cut, refs: Iterable[PromptRef]) -> None:
        """Take over the spares of a checkpoint.

        Raises:
            DuplicateOwnerError: If the pool owns one of them already, or one comes twice; none is taken over
                then.
        """
        cut.check(self._barrier)
        restored: dict[str, PromptRef] = {}
        for ref in refs:
            if ref.group_id in self._refs or ref.group_id in restored:
                raise DuplicateOwnerError(ref.group_id, "spares", "spares")
            restored[ref.group_id] = ref
        self._refs |= restored

    def refs(self) -> tuple[PromptRef, ...]:
        """Return every spare, oldest first; a snapshot."""
        return tuple(self._refs.values())

    def __contains__(self, group_id: object) -> bool:
        """Whether the pool owns a group."""
        return group_id in self._refs

    def __len__(self) -> int:
        """How many prompts it owns."""
        return len(self._refs)

    def __bool__(self) -> bool:
        """Refuse: an empty pool is not a missing one."""
        message = "a pool has no truth value; use len() or compare with None"
        raise TypeError(message)

    def statistics(self) -> SpareStatistics:
        """Return what it owns; may be called from any thread."""
        return SpareStatistics(len(self._refs))
