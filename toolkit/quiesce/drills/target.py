"""The live parts of a run, handed to a drill so that it can break something in them.

Rule: a drill reaches into what is private; nobody else has a reason to hold one of these. Nothing here suspends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quiesce.admission import Admission
    from quiesce.auditor import Auditor
    from quiesce.checkpoint.runfolder import RunFolder
    from quiesce.checkpoint.saver import Checkpointer
    from quiesce.checkpoint.trainer_state import TrainerState
    from quiesce.dataplane.interface import DataPlane
    from quiesce.gate_fence import GateFence
    from quiesce.observers import Hub
    from quiesce.owners import Owners
    from quiesce.rollouts import Rollouts
    from quiesce.snapshot_gate import SnapshotGate

__all__ = ["DrillTarget"]


@dataclass(frozen=True, kw_only=True)
class DrillTarget:
    """A run that goes on.

    Attributes:
        owners: The owners of its groups.
        auditor: What has to notice.
        dataplane: Where its rows are.
        gate: The controller's own snapshot gate.
        fence: Closes that gate and the workers'.
        checkpointer: Saves it.
        rollouts: Runs the workers of its groups.
        trainer_state: The trainer's own state.
        folder: Its folder.
        hub: Where its hooks go.
    """

    owners: Owners
    auditor: Auditor
    dataplane: DataPlane
    gate: SnapshotGate
    fence: GateFence
    checkpointer: Checkpointer
    rollouts: Rollouts
    trainer_state: TrainerState
    folder: RunFolder
    hub: Hub

    @property
    def admission(self) -> Admission:
        """What admits its batches."""
        admission: Admission = self.hub.sources("admission")[-1]
        return admission

    @property
    def sources(self) -> Any:  # noqa: ANN401 - private to the saver
        """What its checkpoints read the six artifacts from."""
        return self.checkpointer._sources  # noqa: SLF001 - a hole in it is what drills are about

    @property
    def budgets(self) -> dict[str, float]:
        """What the auditor allows each phase of a checkpoint, in seconds."""
        return self.auditor.events._budgets  # noqa: SLF001 - as above

    @property
    def gate_window(self) -> int | None:
        """How far the dispatch cursor may be ahead of the trainer version, or None."""
        return self.auditor.events._gate_window  # noqa: SLF001 - as above

    @property
    def wants_spares(self) -> bool:
        """Whether the run means to keep spare prompts."""
        return self.rollouts._config.spare_prompts > 0  # noqa: SLF001 - as above
