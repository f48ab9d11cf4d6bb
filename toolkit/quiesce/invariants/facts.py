"""What a check may know beside the cut itself.

Rule: a fact that is not known is None, and a check whose facts are not known stays silent. Nothing here
suspends.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quiesce.checkpoint.cut import CapturedCut, CutState
    from quiesce.types import RowKey

__all__ = ["CutFacts", "LedgerSeal", "RowFacts"]


@dataclass(frozen=True, slots=True)
class RowFacts:
    """Which rows there are.

    Attributes:
        present: Keys of all rows at the instant; or, of a checkpoint, of all rows in its files.
        on_disk: Whether they are a checkpoint's: then there may be no row but those that the cut counts and usable
            staged ones of its ledger's groups.
        settling: Keys that wait for a clear at the instant, or whose clear failed; None if unknown. May have more,
            of rows whose clear was over before or was asked for later.
        compared: What comparing them with a cut's index came to, for the checks that go by it: there is no need to do
            that twice.
    """

    present: Collection[RowKey]
    on_disk: bool = False
    settling: Collection[RowKey] | None = None
    compared: list[tuple[object, int, tuple[RowKey, ...]]] = field(
        default_factory=list, init=False, repr=False, compare=False
    )


@dataclass(frozen=True, slots=True)
class LedgerSeal:
    """What some place beside the ledger's own document says about the ledger.

    Attributes:
        where: The place: a row shard, or the manifest.
        digest: The digest that it carries.
        count: The number of groups that it carries.
    """

    where: str
    digest: str
    count: int


@dataclass(frozen=True, slots=True)
class CutFacts:
    """What is known beside the cut.

    Attributes:
        rows: Which rows there are, or None.
        seals: What other places say about the ledger, or None.
        parent: The cut before this one in the restored lineage, or None.
        gate_window: How far the dispatch cursor may be ahead of the trainer version (S or L), or None for a
            sampler without a gate or with one that is not known.
        columns: What the groups of a cut were read out to, for the checks that go by the same: a walk over a million
            groups costs more than what is done with each.
    """

    rows: RowFacts | None = None
    seals: tuple[LedgerSeal, ...] | None = None
    parent: CutState | None = None
    gate_window: int | None = None
    columns: list[tuple[object, object]] = field(default_factory=list, init=False, repr=False, compare=False)

    @classmethod
    def of(
        cls,
        captured: CapturedCut,
        *,
        parent: CutState | None = None,
        gate_window: int | None = None,
        settling: Collection[RowKey] | None = None,
    ) -> CutFacts:
        """Collect the facts of a captured cut; reads all keys of its snapshot, so do it after the window.

        Args:
            captured: The cut, its snapshot not released yet.
            parent: The cut before it in the lineage.
            gate_window: See :attr:`gate_window`.
            settling: See :attr:`RowFacts.settling`.
        """
        present = dict.fromkeys(
            captured.snapshot.keys()
        )  # not a set: in the order of the index it is compared faster
        return cls(rows=RowFacts(present, settling=settling), parent=parent, gate_window=gate_window)
