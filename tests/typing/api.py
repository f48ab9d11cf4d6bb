"""The documented configurations, checked by the type checker and never run."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from quiesce import (
    Controller,
    ControllerConfig,
    DataPlaneCheckpointBarrier,
    GenerationRequest,
    GroupResult,
    MutationCut,
    RolloutLedger,
    RunSummary,
    SamplerConfig,
    SequenceSource,
    TrainBatch,
    TrainerVersion,
    TransactionalAdmissionSampler,
    detached,
)
from quiesce.checkpoint import NoTrainerState, RunFolder


class OnPolicy:
    """A custom two-step gate."""

    def __init__(self) -> None:
        self.dispatch_cursor = -1

    def is_admissible(self, version: int) -> bool:
        """Whether the gate is open."""
        return self.dispatch_cursor < version

    async def wait_until_admissible(self, versions: TrainerVersion) -> None:
        """Wait at the gate."""
        await versions.wait_until(self.is_admissible)

    def commit_admission(self, cut: MutationCut) -> int | None:
        """Advance the cursor."""
        self.dispatch_cursor += 1
        return None


async def primitives_alone() -> None:
    """A barrier and a ledger without a controller."""
    barrier = DataPlaneCheckpointBarrier(kinds=["my_kind"])
    ledger = RolloutLedger(barrier)
    gate: TransactionalAdmissionSampler = OnPolicy()
    await gate.wait_until_admissible(TrainerVersion())
    async with barrier.mutation("my_kind") as cut:
        stamp: int | None = gate.commit_admission(cut)
        ledger.mark_group_admitted(cut, "e000-p0000000", target_step=stamp, start_version=0)
    async with barrier.checkpoint(drain_timeout=5.0) as window:
        version: int = barrier.mutation_version
        ident: str = window.window_id
        result: int = await barrier.run_in_cut(window, len, [version, ident])
    assert result == 2
    await detached(primitives_alone(), name="again")


async def own_trainer(path: Path) -> RunSummary:
    """Somebody else's generate and train functions."""

    async def generate(request: GenerationRequest) -> GroupResult:
        rows = [{"tokens": np.zeros(4)} for _ in range(request.num_generations)]
        return GroupResult(rows, request.start_version, request.start_version, {"reward": 0.0, "tokens": 4.0})

    async def train_step(batch: TrainBatch) -> Mapping[str, float]:
        await batch.write_back([[{"advantage": np.zeros(1)} for _ in group] for group in batch.rows])
        return {"loss": 0.0}

    async def sync_weights(version: int) -> None:
        assert version >= 0

    with RunFolder.open(path, resume=False) as folder:
        controller = Controller(
            ControllerConfig(
                groups_per_step=2, generations_per_group=1, sampler=SamplerConfig(name="windowed")
            ),
            generate=generate,
            train_step=train_step,
            sync_weights=sync_weights,
            source=SequenceSource(["a", "b", "c"], batch_size=2),
            trainer_state=NoTrainerState(),
            folder=folder,
        )
        return await controller.run()
