"""Owners of a run of any size, and cuts of it, without the run: what the auditor's cost is measured on.

Rule: the owners are the real ones, and an auditor hears of them through the real hub; only the run around them is left
out. Yield rule: :func:`fill` suspends in slots; everything else returns at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from quiesce.accounting import Accounting, AccountingState, ClosedEpochs, EpochAccount
from quiesce.barrier import DataPlaneCheckpointBarrier
from quiesce.buffer import ReplayBuffer
from quiesce.checkpoint.cut import PARTS, CommittedPosition, CutState, PartStamp, SamplerState
from quiesce.cleanup import BackgroundCleanup
from quiesce.ledger import RolloutLedger
from quiesce.owners import Owners
from quiesce.prompts import Pull
from quiesce.samplers import WindowedSampler
from quiesce.signals import Changed, TrainerVersion
from quiesce.snapshot_gate import SnapshotGate
from quiesce.spares import SparePool
from quiesce.types import BufferEntry, GroupRecord, PromptRef, RowKey

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from quiesce.dataplane.interface import DataPlane
    from quiesce.observers import Hub

__all__ = ["cut_of", "fill", "no_rows", "owners_of", "store"]

GROUPS_PER_STEP: Final = 512
_IN_FLIGHT_SHARE: Final = 8
_AT_ONCE: Final = 10_000
_ROWS_AT_ONCE: Final = 4_096
_INCARNATION: Final = 1


class _NoRows:
    """Answers for a data plane where nobody asks for rows."""

    def missing(self, keys: Iterable[RowKey]) -> tuple[RowKey, ...]:
        return ()


def no_rows() -> _NoRows:
    """Return an inventory in which no row is missing."""
    return _NoRows()


def owners_of(hub: Hub, dataplane: DataPlane | None = None) -> Owners:
    """Build the owners of a run that has read nothing yet.

    Args:
        hub: Where they report.
        dataplane: Where rows are; None if there are none.
    """
    barrier = DataPlaneCheckpointBarrier(hub=hub)
    ledger = RolloutLedger(barrier)
    rows = no_rows() if dataplane is None else dataplane
    return Owners(
        barrier=barrier,
        sampler=WindowedSampler(barrier, max_staleness_versions=1),
        versions=TrainerVersion(hub=hub),
        ledger=ledger,
        spares=SparePool(barrier),
        buffer=ReplayBuffer(barrier, ledger, rows),
        accounting=Accounting(barrier),
        clears=BackgroundCleanup(SnapshotGate("controller", hub=hub), lambda _: None, hub=hub),
        capacity=1,
        groups_per_step=GROUPS_PER_STEP,
        min_step_batch_fraction=0.0,
        position=CommittedPosition(0, 0, exhausted=False, loader=None),
        changed=Changed(),
    )


async def fill(owners: Owners, groups: int, finished: int, rows_per_group: int, plane: DataPlane) -> None:
    """Read prompts, and finish the first of them.

    Args:
        owners: Empty ones.
        groups: Prompts to read.
        finished: How many of them end up in the buffer.
        rows_per_group: Rows of each that is finished.
        plane: Where their rows are put; blocks.
    """
    import numpy as np

    barrier, row = owners.barrier, {"tokens": np.zeros(16, dtype=np.uint8)}
    for first in range(0, groups, _AT_ONCE):
        refs = tuple(PromptRef(0, at, at) for at in range(first, min(groups, first + _AT_ONCE)))
        position = CommittedPosition(0, refs[-1].position + 1, exhausted=False, loader=None)
        async with barrier.mutation("prompt_reservation") as cut:
            owners.commit_pull(cut, Pull(refs, refs, False, 0, position), to_spares=False)
    for first in range(0, finished, _ROWS_AT_ONCE):
        names = [PromptRef(0, at, at).group_id for at in range(first, min(finished, first + _ROWS_AT_ONCE))]
        keys = {name: _keys(name, rows_per_group, plane.incarnation) for name in names}
        plane.put({key: row for found in keys.values() for key in found})
        async with barrier.mutation("group_commit") as cut:
            for name in names:
                owners.ledger.mark_group_admitted(cut, name, target_step=None, start_version=0)
                owners.buffer.commit_group(
                    cut, name, 0, keys=keys[name], generated_from=0, generated_to=0, stats={}
                )


def cut_of(groups: int, rows_per_group: int) -> tuple[CutState, list[RowKey]]:
    """Return a captured cut in which every invariant holds, and the keys of its rows as a data plane lists them.

    One group in so many is in flight, the others are finished; steps are stamped.

    Args:
        groups: Groups that it has.
        rows_per_group: Rows of each finished group.
    """
    in_flight = -(-groups // _IN_FLIGHT_SHARE)
    refs = [PromptRef(0, position, position) for position in range(groups)]
    stamps = [position // GROUPS_PER_STEP for position in range(groups)]
    admissions = stamps[-1] + 1
    ready = [
        BufferEntry(
            ref.group_id,
            stamp,
            ref,
            0,
            stamp,
            0,
            0,
            0,
            tuple(_keys(ref.group_id, rows_per_group, _INCARNATION)),
        )
        for ref, stamp in zip(refs[:-in_flight], stamps, strict=False)
    ]
    ledger = [
        GroupRecord(ref.group_id, stamp, ref, "admitted", stamp, 0)
        for ref, stamp in zip(refs[-in_flight:], stamps[-in_flight:], strict=True)
    ]
    nothing = bytes(-(-groups // 8))
    state = CutState(
        cut_id="cut",
        mutation_version=groups,
        incarnation=_INCARNATION,
        parent_cut=None,
        step=0,
        trainer_version=0,
        sampler=SamplerState("windowed", admissions - 1, True, admissions, admissions),
        position=CommittedPosition(0, groups, exhausted=False, loader=None),
        accounting=AccountingState(
            ClosedEpochs(0, 0, 0, {}), (EpochAccount(0, groups, False, nothing, nothing, {}),)
        ),
        spares=(),
        ready=tuple(ready),
        claimed=(),
        ledger=tuple(ledger),
        stamps={part: PartStamp("cut", groups) for part in PARTS},
    )
    # A store makes keys of its own of what it read, so none is the index's object.
    return state, [
        key for ref in refs[:-in_flight] for key in _keys(ref.group_id, rows_per_group, _INCARNATION)
    ]


@contextmanager
def store(folder: Path, hub: Hub) -> Iterator[DataPlane]:
    """Open a store on disk, as a run has it."""
    from quiesce.dataplane.lmdb import LmdbDataPlane

    plane = LmdbDataPlane(folder / "store", _INCARNATION, tensors="numpy", hub=hub)
    try:
        yield plane
    finally:
        plane.close()


def _keys(group_id: str, rows: int, incarnation: int) -> Sequence[RowKey]:
    return [RowKey(incarnation, group_id, generation, 0) for generation in range(rows)]
