"""Reading the six artifacts inside the window.

Rule: in the order of :data:`~quiesce.checkpoint.cut.PARTS`, and nothing else: no file, no remote call, no
digest, no live loader. Every part is a reference to frozen records (the accounting's bitmaps are copied: a
bit a prompt of the open epochs), so the window does not grow with rows, with the model or with how slow the
file system is. Nothing here suspends.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from quiesce.checkpoint.cut import CapturedCut, CutState, PartStamp

if TYPE_CHECKING:
    from quiesce.accounting import Accounting
    from quiesce.barrier import CheckpointCut, DataPlaneCheckpointBarrier
    from quiesce.buffer import ReplayBuffer
    from quiesce.checkpoint.cut import CommittedPosition, SamplerState
    from quiesce.dataplane.interface import DataPlane
    from quiesce.ledger import RolloutLedger
    from quiesce.observers import Hub
    from quiesce.spares import SparePool

__all__ = ["CutSources", "capture"]

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class CutSources:
    """Where the six artifacts are read from.

    Attributes:
        barrier: Guards all of them.
        sampler_state: Returns the sampler's name, cursor and counters; reads fields, computes nothing.
        position: Returns the committed position, never the live loader's.
        accounting: What became of every prompt, captured with the position.
        spares: The spare pool.
        buffer: The replay buffer.
        ledger: The ledger.
        dataplane: The rows.
        hub: Where hooks go; None means the barrier's hub.
    """

    barrier: DataPlaneCheckpointBarrier
    sampler_state: Callable[[], SamplerState]
    position: Callable[[], CommittedPosition]
    accounting: Accounting
    spares: SparePool
    buffer: ReplayBuffer
    ledger: RolloutLedger
    dataplane: DataPlane
    hub: Hub | None = None


def capture(
    cut: CheckpointCut,
    sources: CutSources,
    *,
    incarnation: int,
    parent_cut: str | None,
    step: int,
    trainer_version: int,
    clock: Callable[[], int] = time.perf_counter_ns,
) -> CapturedCut:
    """Read the six artifacts at this instant.

    Args:
        cut: The live exclusive cut.
        sources: Where they are read from.
        incarnation: The incarnation of this run.
        parent_cut: The last published cut of the lineage.
        step: Trained steps.
        trainer_version: The trainer version.
        clock: Monotonic nanoseconds.

    Raises:
        CutError: If the cut proves nothing here.
        ClaimError: If an optimizer step has begun and is not over.
    """
    barrier = sources.barrier
    cut.check(barrier, "checkpoint", changes=False)
    hub = barrier.hub if sources.hub is None else sources.hub
    stamps: dict[str, PartStamp] = {}
    since = clock()

    def stamped(part: str, value: T) -> T:
        nonlocal since
        stamps[part] = PartStamp(cut.window_id, barrier.mutation_version)
        now = clock()
        if hub.cut_part_captured:
            hub.fire("cut_part_captured", cut.window_id, part, now - since)
        since = now
        return value

    sampler = stamped("cursor", sources.sampler_state())
    position, accounting = stamped("position", (sources.position(), sources.accounting.capture()))
    spares = stamped("spares", sources.spares.refs())
    ready, claimed = stamped("buffer", sources.buffer.capture())
    ledger = stamped("ledger", sources.ledger.records())
    snapshot = sources.dataplane.snapshot(cut)
    try:
        stamped("rows", snapshot)
    except BaseException:  # a strict observer: nobody else knows of the snapshot yet
        snapshot.release()
        raise
    state = CutState(
        cut_id=cut.window_id,
        mutation_version=barrier.mutation_version,
        incarnation=incarnation,
        parent_cut=parent_cut,
        step=step,
        trainer_version=trainer_version,
        sampler=sampler,
        position=position,
        accounting=accounting,
        spares=spares,
        ready=ready,
        claimed=claimed,
        ledger=ledger,
        stamps=stamps,
    )
    return CapturedCut(state, snapshot)
