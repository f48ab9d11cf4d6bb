"""A whole run to test: the real controller and run folder, with generate and train functions that do as they are told.

The trainer's "weights" are the list of groups that it trained, saved and restored like real ones; so what a run trained
along its surviving lineage can be compared with what its checkpoints say.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from quiesce import Controller, ControllerConfig, GenerationRequest, GroupResult, RunSummary, SequenceSource
from quiesce.barrier import DataPlaneCheckpointBarrier
from quiesce.checkpoint import RunFolder, files
from quiesce.checkpoint.audit import AuditReport, audit
from quiesce.checkpoint.trainer_state import Staged
from quiesce.dataplane import DataPlane, LmdbDataPlane, MemoryDataPlane
from quiesce.prompts import PromptSource
from quiesce.sampler_config import SamplerConfig
from quiesce.testing import EventRecorder, strict_hub
from quiesce.training import TrainBatch
from quiesce.types import PromptRef

GENERATIONS = 2
STUCK_SECONDS = 5_000.0
"""Virtual seconds after which a run in which nothing moves is halted, so that a test that would hang fails instead."""

SAMPLERS = ("windowed", "weight_fifo", "ready_first", "in_order")


class CrashError(Exception):
    """Stands for a kill: the run ends here and now, without a last save."""


class Weights:
    """A trainer's state: which groups it was trained on, in order."""

    def __init__(self) -> None:
        self.trained: list[str] = []

    async def stage(self) -> Staged:
        """Copy the list."""
        return _StagedWeights(list(self.trained))

    async def load(self, directory: Path) -> None:
        """Read the list back."""
        self.trained = json.loads((directory / "weights.json").read_text())


class _StagedWeights:
    def __init__(self, trained: list[str]) -> None:
        self._trained = trained

    async def write(self, directory: Path) -> None:
        """Write the list."""
        files.write_durable(directory / "weights.json", json.dumps(self._trained).encode())


def rows_of(index: int, attempt: int = 0, generations: int = GENERATIONS) -> list[dict[str, Any]]:
    """Return the rows of a group: they tell whose they are."""
    return [
        {"index": np.array([index, attempt]), "generation": np.array([generation])}
        for generation in range(generations)
    ]


def result_of(request: GenerationRequest) -> GroupResult:
    """Return a good answer to a request."""
    return GroupResult(
        rows=rows_of(request.index, request.attempt),
        version_from=request.start_version,
        version_to=request.start_version,
        stats={"reward": 0.5, "tokens": 8},
    )


async def at_once(request: GenerationRequest) -> GroupResult:
    """Generate without waiting."""
    return result_of(request)


def lmdb(path: Path, *, map_bytes: int = 16 << 20) -> Callable[[int, DataPlaneCheckpointBarrier], DataPlane]:
    """Return a factory of small LMDB stores."""

    def opened(incarnation: int, barrier: DataPlaneCheckpointBarrier) -> DataPlane:
        return LmdbDataPlane(
            path / "rows", incarnation, tensors="numpy", map_bytes=map_bytes, barrier=barrier, hub=barrier.hub
        )

    return opened


def memory(incarnation: int, barrier: DataPlaneCheckpointBarrier) -> DataPlane:
    """Open a store in memory."""
    return MemoryDataPlane(incarnation, tensors="numpy", barrier=barrier, hub=barrier.hub)


def sampler(name: str, window: int = 2) -> SamplerConfig:
    """Return a sampler's configuration with a lookahead or staleness of that many versions."""
    return SamplerConfig(name, max_staleness_versions=window, max_lookahead_versions=window)


@dataclass
class Run:
    """One run folder and whatever its incarnations share.

    Attributes:
        path: The run folder.
        sampler: Which sampler.
        prompts: Size of the dataset.
        epochs: How often it is read.
        generate: Generates a group.
        before_step: Awaited at the start of every train step.
        options: Further configuration, by key.
        in_memory: Whether rows live in memory instead of LMDB.
    """

    path: Path
    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    prompts: int = 22
    epochs: int = 1
    generate: Callable[[GenerationRequest], Awaitable[GroupResult]] = at_once
    before_step: Callable[[TrainBatch], Awaitable[None]] | None = None
    sync_weights: Callable[[int], Awaitable[None]] | None = None
    options: dict[str, Any] = field(default_factory=dict)
    in_memory: bool = False
    weights: Weights = field(init=False)
    recorder: EventRecorder = field(init=False)
    controller: Controller = field(init=False)
    folder: RunFolder = field(init=False)
    steps: list[tuple[int, tuple[str, ...]]] = field(default_factory=list)

    def config(self, **changes: Any) -> ControllerConfig:  # noqa: ANN401 - passed on
        """Return the configuration of an incarnation."""
        return ControllerConfig(
            **{
                "groups_per_step": 4,
                "generations_per_group": GENERATIONS,
                "sampler": self.sampler,
                "save_every_steps": 1_000,
                "stall_abort_seconds": STUCK_SECONDS,
                **self.options,
                **changes,
            }
        )

    def source(self) -> PromptSource:
        """Return a new source of prompts."""
        return SequenceSource(
            [f"prompt {index}" for index in range(self.prompts)], batch_size=4, epochs=self.epochs, seed=7
        )

    def start(
        self,
        *,
        resume: bool = False,
        source: PromptSource | None = None,
        controller: type[Controller] = Controller,
        observers: tuple[object, ...] = (),
        **changes: Any,  # noqa: ANN401 - passed on
    ) -> Controller:
        """Build the controller of a new incarnation."""
        self.folder = RunFolder.open(self.path, resume=resume)
        self.weights = Weights()
        self.recorder = EventRecorder()
        wiring = {key: changes.pop(key) for key in ("dataplane", "verify", "workers") if key in changes}
        wiring.setdefault("dataplane", memory if self.in_memory else lmdb(self.path))
        self.controller = controller(
            self.config(**changes),
            generate=self.generate,
            train_step=self.train_step,
            source=self.source() if source is None else source,
            trainer_state=self.weights,
            folder=self.folder,
            sync_weights=self.sync_weights,
            hub=strict_hub(self.recorder, *observers),
            **wiring,
        )
        return self.controller

    async def go(
        self,
        *,
        resume: bool = False,
        stop_after: float | None = None,
        **changes: Any,  # noqa: ANN401 - passed on
    ) -> RunSummary:
        """Run one incarnation to its end, or until it is asked to stop after so many (virtual) seconds."""
        built = self.start(resume=resume, **changes)
        timer = None
        if stop_after is not None:
            timer = asyncio.get_running_loop().call_later(stop_after, built.request_stop)
        try:
            return await built.run(resume=resume)
        finally:
            if timer is not None:
                timer.cancel()
            self.folder.close()

    async def train_step(self, batch: TrainBatch) -> Mapping[str, float]:
        """Check that the rows are the groups' own, and count the groups as trained."""
        if self.before_step is not None:
            await self.before_step(batch)
        for entry, rows in zip(batch.entries, batch.rows, strict=True):
            told = [(int(row["index"][0]), int(row["index"][1]), int(row["generation"][0])) for row in rows]
            assert told == [(entry.prompt.index, entry.attempt, number) for number in range(GENERATIONS)]
        ids = tuple(entry.group_id for entry in batch.entries)
        self.weights.trained += ids
        self.steps.append((batch.step, ids))
        return {"reward": 0.5}

    def every_group(self) -> set[str]:
        """Return the id of every prompt of every epoch."""
        return {
            PromptRef(epoch, position, 0).group_id
            for epoch in range(self.epochs)
            for position in range(self.prompts)
        }

    def check_all_accounted(self, summary: RunSummary, *, violations: int = 0) -> AuditReport:
        """Assert that the run is over, each prompt trained exactly once or counted as dropped, and the audit clean."""
        assert summary.outcome == "finished"
        assert summary.dropped["violation"] == violations
        assert not summary.save_failed
        trained = Counter(self.weights.trained)
        assert not [group for group, count in trained.items() if count > 1], "trained twice"
        assert set(trained) <= self.every_group()
        assert summary.read == len(self.every_group())
        assert summary.trained == len(trained)
        assert summary.trained + sum(summary.dropped.values()) == summary.read
        report = audit(self.path)
        assert report.ok
        assert report.violations == ()
        assert report.prompts is not None
        assert (report.prompts.read, report.prompts.trained) == (summary.read, summary.trained)
        assert report.prompts.owned == 0
        return report


async def until(condition: Callable[[], object]) -> None:
    """Let (virtual) time go on in small steps until something holds."""
    for _ in range(10_000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never came to hold")


def delays(seed: int, longest: float = 5.0) -> Callable[[object], float]:
    """Return a function that gives each name its own fixed delay, in virtual seconds."""

    def of(name: object) -> float:
        return random.Random(f"{seed} {name}").uniform(0.0, longest)

    return of
