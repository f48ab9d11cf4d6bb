"""A captured cut: six artifacts, read at one instant.

Rule: a captured cut holds references to frozen records only, so capturing costs what copying references costs, and what
writers do afterwards cannot change it. Everything that can be derived is derived after the window. Nothing here suspends.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from quiesce.accounting import AccountingState
    from quiesce.dataplane.interface import Snapshot
    from quiesce.types import BufferEntry, GroupRecord, PromptRef

__all__ = ["PARTS", "CapturedCut", "CommittedPosition", "CutState", "PartStamp", "SamplerState"]

PARTS: Final = ("cursor", "position", "spares", "buffer", "ledger", "rows")
"""The six artifacts, in the order in which the window captures them."""


@dataclass(frozen=True, slots=True)
class SamplerState:
    """The sampler at the cut.

    Attributes:
        name: ``windowed``, ``weight_fifo``, ``ready_first``, ``in_order`` or ``module:ClassName``.
        cursor: The dispatch cursor, from −1.
        stamps_target_steps: Whether its admissions carry a target step.
        admissions: Committed admissions along the restored lineage; always cursor + 1.
        next_admission_id: The id that the next reserved batch gets.
    """

    name: str
    cursor: int
    stamps_target_steps: bool
    admissions: int
    next_admission_id: int


@dataclass(frozen=True, slots=True)
class CommittedPosition:
    """How far the dataset counts as read.

    Attributes:
        epoch: The epoch that is being read.
        position: Positions of it that count as read.
        exhausted: Whether there is nothing more to read, in this and every later epoch.
        loader: The loader's own state after the last committed pull (JSON-able but for tensors, bytes and tuples, which the
            checkpoint's codec handles), or None before the first.
    """

    epoch: int
    position: int
    exhausted: bool
    loader: Any = field(hash=False)


@dataclass(frozen=True, slots=True)
class PartStamp:
    """What proves that a part was captured in this cut.

    Attributes:
        cut_id: The window's id.
        mutation_version: The barrier's mutation version when the part was captured.
    """

    cut_id: str
    mutation_version: int


@dataclass(frozen=True, slots=True)
class CutState:
    """What a cut says, without its hold on rows: what is written to disk, and what the invariants judge.

    Attributes:
        cut_id: Names the cut.
        mutation_version: The barrier's mutation version.
        incarnation: The incarnation of the run that captured it.
        parent_cut: The last published cut of the lineage, or None for the first.
        step: Trained steps; names the checkpoint.
        trainer_version: The trainer version W.
        sampler: The sampler.
        position: How far the dataset counts as read.
        accounting: What became of every prompt that was read.
        spares: The spare pool.
        ready: The buffer's ready groups.
        claimed: Groups of claims whose step had not begun; a restore finds them ready.
        ledger: The ledger's records, as captured.
        stamps: For each of :data:`PARTS`, what proves that it belongs to this cut.
    """

    cut_id: str
    mutation_version: int
    incarnation: int
    parent_cut: str | None
    step: int
    trainer_version: int
    sampler: SamplerState
    position: CommittedPosition
    accounting: AccountingState
    spares: tuple[PromptRef, ...]
    ready: tuple[BufferEntry, ...]
    claimed: tuple[BufferEntry, ...]
    ledger: tuple[GroupRecord, ...]
    stamps: Mapping[str, PartStamp] = field(hash=False)

    @property
    def entries(self) -> tuple[BufferEntry, ...]:
        """Every group that a restore finds in the buffer."""
        return (*self.ready, *self.claimed)

    def captured_groups(self) -> dict[str, int]:
        """Count the groups by the owner that captured them; costs nothing, because nothing is subtracted."""
        return {
            "ledger": len(self.ledger),
            "spares": len(self.spares),
            "buffer": len(self.ready),
            "training": len(self.claimed),
        }

    def ledger_minus_buffer(self) -> tuple[GroupRecord, ...]:
        """The ledger without groups that the buffer owns: the buffer's copy always wins."""
        buffered = {entry.group_id for entry in self.entries}
        return tuple(record for record in self.ledger if record.group_id not in buffered)


@dataclass(frozen=True, slots=True)
class CapturedCut:
    """A cut together with its hold on the rows.

    Attributes:
        state: The five control parts.
        snapshot: The data plane at the same instant; released once written, refused or failed.
    """

    state: CutState
    snapshot: Snapshot
