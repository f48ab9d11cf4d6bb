"""A run of a few seconds to do a drill in: the real controller over functions that only wait, and no model.

It takes a step in a third of a second and a checkpoint after every third, so that what only a cut shows is seen soon.

Rule: everything but generation and training is what a real run has: LMDB rows, checkpoints on disk, gates, the auditor.
Yield rule: :func:`throw_away` suspends.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from quiesce.checkpoint import files
from quiesce.checkpoint.runfolder import RunFolder
from quiesce.controller import Controller
from quiesce.controller_config import ControllerConfig
from quiesce.drills.perform import perform
from quiesce.errors import DrillError, QuiesceError
from quiesce.prompts import SequenceSource
from quiesce.rollouts import GenerationRequest, GroupResult
from quiesce.sampler_config import SamplerConfig

if TYPE_CHECKING:
    from quiesce.barrier import DataPlaneCheckpointBarrier
    from quiesce.checkpoint.trainer_state import Staged
    from quiesce.controller import RunSummary
    from quiesce.dataplane.interface import DataPlane
    from quiesce.drills.drill import Drill, DrillResult
    from quiesce.observers import Hub
    from quiesce.training import TrainBatch

__all__ = ["ThrowAway", "throw_away"]

STEP_SECONDS: Final = 0.3
GENERATION_SECONDS: Final = 0.6
"""What the slowest group takes: longer than a step, so that there are always groups under way."""

SAVE_EVERY_STEPS: Final = 3
SOUND_STEPS: Final = 4
"""Steps before the drill: a checkpoint more than the first, groups that were trained, a version to go back from."""

_PROMPTS: Final = 2_000
_EPOCHS: Final = 1_000
_GENERATIONS: Final = 2
_MAP_BYTES: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class ThrowAway:
    """What came of a throw-away run.

    Attributes:
        result: What came of the drill.
        summary: How the run ended, or None if it failed.
        error: What it failed with, or "".
    """

    result: DrillResult
    summary: RunSummary | None
    error: str = ""


class _Weights:
    """A trainer's state: how many steps were taken."""

    def __init__(self) -> None:
        self.steps = 0

    async def stage(self) -> Staged:
        return _StagedWeights(self.steps)

    async def load(self, directory: Path) -> None:
        self.steps = int(json.loads((directory / "steps.json").read_text()))


class _StagedWeights:
    def __init__(self, steps: int) -> None:
        self._steps = steps

    async def write(self, directory: Path) -> None:
        files.write_durable(directory / "steps.json", json.dumps(self._steps).encode())


async def throw_away(
    drill: Drill,
    path: Path,
    *,
    hub: Hub,
    patience: float = 30.0,
    before_end: Callable[[], Awaitable[None]] | None = None,
    told: Callable[[DrillResult], None] = lambda _result: None,
    progress: Callable[[str], None] = lambda _state: None,
) -> ThrowAway:
    """Start a run, do a drill in it, and end it.

    Args:
        drill: Which.
        path: An empty folder, or one that is not there.
        hub: Where the run's hooks go; whoever exports or serves listens there.
        patience: See :func:`quiesce.drills.perform`.
        before_end: Awaited after the drill, while the run goes on.
        told: Called before that with what came of the drill.
        progress: See :func:`quiesce.drills.perform`.

    Raises:
        DrillNotPossibleError: If the drill could not be done.
        DrillError: If the run ended before.
    """
    with RunFolder.create(path) as folder:
        controller = _controller(folder, hub, drill.options)
        running = asyncio.create_task(controller.run(), name="throw-away run")
        try:
            result = await _drilled(controller, running, drill, patience, progress)
            told(result)
            if before_end is not None and not running.done():
                await before_end()
        finally:
            if not running.done():
                with contextlib.suppress(QuiesceError):
                    controller.request_stop()
                await asyncio.wait({running}, timeout=patience)
                running.cancel()
                await asyncio.wait({running})
    error = None if running.cancelled() else running.exception()
    if running.cancelled() or error is not None:
        return ThrowAway(result, None, f"the run failed: {error!r}" if error else "the run did not end")
    return ThrowAway(result, running.result())


async def _drilled(
    controller: Controller,
    running: asyncio.Task[RunSummary],
    drill: Drill,
    patience: float,
    progress: Callable[[str], None],
) -> DrillResult:
    progress("starting")

    async def do() -> DrillResult:
        while controller.auditor is None:  # noqa: ASYNC110 - nobody tells
            await asyncio.sleep(0.01)
        await controller.owners.steps_taken(SOUND_STEPS)
        return await perform(
            controller.drill_target(), drill, patience=patience, until_cut=True, progress=progress
        )

    doing = asyncio.create_task(do(), name="drill")
    try:
        await asyncio.wait({doing, running}, return_when=asyncio.FIRST_COMPLETED)
        if not doing.done():
            error = running.exception()
            problem = f"the throw-away run ended before drill {drill.name!r} was over: {error!r}"
            raise DrillError(problem) from error
        return doing.result()
    finally:
        doing.cancel()
        await asyncio.wait({doing})
        if not doing.cancelled():
            doing.exception()  # looked at: why the run ended is what is told


def _controller(folder: RunFolder, hub: Hub, options: Mapping[str, Any]) -> Controller:
    import numpy as np

    async def generate(request: GenerationRequest) -> GroupResult:
        await asyncio.sleep(GENERATION_SECONDS * (1 + request.index % 7) / 7)
        rows = [
            {"index": np.array([request.index]), "generation": np.array([number])}
            for number in range(request.num_generations)
        ]
        stats = {"reward": 0.5, "tokens": 8.0}
        return GroupResult(rows, request.start_version, request.start_version, stats)

    weights = _Weights()

    async def train_step(batch: TrainBatch) -> Mapping[str, float]:
        await asyncio.sleep(STEP_SECONDS)
        weights.steps += 1
        return {"reward": 0.5, "loss": 1.0 / (1 + batch.step)}

    config = ControllerConfig(
        groups_per_step=4,
        generations_per_group=_GENERATIONS,
        sampler=SamplerConfig("in_order", max_lookahead_versions=2),
        save_every_steps=SAVE_EVERY_STEPS,
        min_step_batch_fraction=0.0,
        stall_abort_seconds=60.0,
    )
    return Controller(
        replace(config, **options),
        generate=generate,
        train_step=train_step,
        source=SequenceSource(
            [f"prompt {index}" for index in range(_PROMPTS)], batch_size=4, epochs=_EPOCHS, seed=7
        ),
        trainer_state=weights,
        folder=folder,
        dataplane=lambda incarnation, barrier: _rows(folder.path / "rows", incarnation, barrier),
        hub=hub,
    )


def _rows(path: Path, incarnation: int, barrier: DataPlaneCheckpointBarrier) -> DataPlane:
    from quiesce.dataplane.lmdb import LmdbDataPlane

    return LmdbDataPlane(
        path, incarnation, tensors="numpy", map_bytes=_MAP_BYTES, barrier=barrier, hub=barrier.hub
    )
