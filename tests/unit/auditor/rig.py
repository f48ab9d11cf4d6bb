"""Owners under an auditor, without a run: events are fired, or real moves are made, one at a time."""

from __future__ import annotations

from typing import Any

from quiesce.accounting import Accounting
from quiesce.auditor import Auditor, ViolationRecord
from quiesce.auditor.sweep import Pace
from quiesce.barrier import DataPlaneCheckpointBarrier
from quiesce.buffer import ReplayBuffer
from quiesce.checkpoint.cut import CommittedPosition
from quiesce.cleanup import BackgroundCleanup
from quiesce.dataplane import MemoryDataPlane
from quiesce.ledger import RolloutLedger
from quiesce.owners import Owners
from quiesce.prompts import Pull
from quiesce.samplers import InOrderSampler
from quiesce.signals import Changed, TrainerVersion
from quiesce.snapshot_gate import SnapshotGate
from quiesce.spares import SparePool
from quiesce.testing import EventRecorder, strict_hub
from quiesce.types import PromptRef


class Rig:
    """A run's owners over a data plane in memory, and an auditor of them."""

    def __init__(self, **options: Any) -> None:  # noqa: ANN401 - passed on
        self.recorder = EventRecorder()
        self.hub = strict_hub(self.recorder)
        barrier = DataPlaneCheckpointBarrier(hub=self.hub)
        self.dataplane = MemoryDataPlane(1, barrier=barrier, hub=self.hub)
        ledger = RolloutLedger(barrier)
        self.owners = Owners(
            barrier=barrier,
            sampler=InOrderSampler(barrier, max_lookahead_versions=1),
            versions=TrainerVersion(hub=self.hub),
            ledger=ledger,
            spares=SparePool(barrier),
            buffer=ReplayBuffer(barrier, ledger, self.dataplane),
            accounting=Accounting(barrier),
            clears=BackgroundCleanup(
                SnapshotGate("controller", hub=self.hub), self.dataplane.clear, hub=self.hub
            ),
            capacity=4,
            groups_per_step=2,
            min_step_batch_fraction=0.0,
            position=CommittedPosition(0, 0, exhausted=False, loader=None),
            changed=Changed(),
        )
        self.options = options

    def auditor(self, **options: Any) -> Auditor:  # noqa: ANN401 - passed on
        """Return an auditor that is started and does not sweep by itself."""
        quick = Pace(
            rest=0.0, least_seconds=0.0
        )  # a machine that stalls is not answered by 30 times as much rest
        auditor = Auditor(
            self.owners, **{"dataplane": self.dataplane, "pace": quick, **self.options, **options}
        )
        auditor.start(sweeping=False)
        return auditor

    async def read(self, count: int, *, to_spares: bool = False) -> list[str]:
        """Read so many prompts."""
        first = self.owners.position.position
        refs = tuple(PromptRef(0, position, position) for position in range(first, first + count))
        position = CommittedPosition(0, first + count, exhausted=False, loader=None)
        async with self.owners.barrier.mutation("prompt_reservation") as cut:
            self.owners.commit_pull(cut, Pull(refs, refs, False, 0, position), to_spares=to_spares)
        return [ref.group_id for ref in refs]


def kinds(auditor: Auditor) -> dict[str, int]:
    """Return how many records there are of each invariant."""
    found: dict[str, int] = {}
    for record in auditor.records.all():
        found[record.invariant] = found.get(record.invariant, 0) + 1
    return found


def only(auditor: Auditor) -> ViolationRecord:
    """Return the one record."""
    (record,) = auditor.records.all()
    return record
