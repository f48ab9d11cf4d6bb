"""One life of a run under its auditor, in real time: real threads, a store on disk, a save after every step or two.

It is a program: its argument is a JSON object, the arguments of :func:`life`; it prints what that returns. Rollouts fail,
are aborted when they are stale, are substituted out of the spare pool and dropped; a life ends by itself, by a stop, or
by SIGKILL at a moment that nothing in it chose.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from quiesce import GenerationRequest, GroupResult
from quiesce.auditor import Pace
from quiesce.training import TrainBatch
from tests.auditor_rig import AuditedController
from tests.crash.runs import Worker
from tests.run_rig import Run, delays, sampler

EPOCHS = 2
SLOWEST_ROLLOUT = 0.04
STALE_AFTER = 1.0
"""Seconds that one in twelve rollouts takes longer: meanwhile the trainer takes the steps that it may."""
QUICK = Pace(rest=1.0, least_seconds=0.0, between_seconds=0.02, orphan_seconds=0.5)
"""A sweep every few hundredths of a second: as many looks at a life as it has time for."""


class Watched(AuditedController):
    """The controller as it is, with a sweep that hardly rests."""

    audit_options = {"pace": QUICK}  # noqa: RUF012 - as its base says


def life(
    path: str, name: str, seed: int, *, prompts: int, resume: bool, kill_after: float, stop_after: float
) -> dict[str, Any]:
    """Live until the run ends, is stopped or is killed.

    Args:
        path: The run folder.
        name: The sampler.
        seed: How long everything takes, and what fails.
        prompts: Size of the dataset.
        resume: Whether to go on from the newest checkpoint.
        kill_after: Seconds until SIGKILL, in one life of four from its very start; 0 for none.
        stop_after: Seconds until the run is asked to stop; 0 for not at all.
    """
    chance, delay = random.Random(f"{name} {seed} {resume} {kill_after}"), delays(seed, SLOWEST_ROLLOUT)
    worker = Worker(delay)

    async def generate(request: GenerationRequest) -> GroupResult:
        result = await worker.generate(request)
        if chance.random() < 1 / 12:
            await asyncio.sleep(STALE_AFTER)
        if chance.random() < 0.1:
            raise ValueError("its reward could not be told")
        return result

    async def before_step(batch: TrainBatch) -> None:
        await asyncio.sleep(delay(("step", batch.step)) / 4)

    run = Run(
        Path(path),
        sampler(name, 1),
        prompts=prompts,
        epochs=EPOCHS,
        generate=generate,
        before_step=before_step,
        options={
            "spare_prompts": 6,
            "max_attempts": 2,
            "max_refused_drops": 1_000,
            "min_step_batch_fraction": 0.0,
            "retry_backoff_seconds": 0.002,
            "save_every_steps": chance.choice([1, 2]),
        },
    )

    def kill_soon() -> None:
        asyncio.get_running_loop().call_later(kill_after, os.kill, os.getpid(), signal.SIGKILL)

    class Kills:
        """Counts the seconds from when there is a run, of which a busy machine is long in making one."""

        def run_state_changed(self, state: str) -> None:
            if state == "running":
                kill_soon()

    async def lived() -> dict[str, Any]:
        from_its_start = chance.random() < 1 / 4
        if kill_after and from_its_start:
            kill_soon()
        summary = await run.go(
            resume=resume,
            stop_after=stop_after or None,
            controller=Watched,
            workers=worker,
            observers=(Kills(),) if kill_after and not from_its_start else (),
        )
        auditor = run.controller.auditor
        assert auditor is not None
        assert not summary.save_failed
        if summary.outcome == "finished":
            run.check_all_accounted(summary)
        statistics = auditor.statistics()
        moves = Counter(" ".join(move[1:]).strip() for move in run.recorder.of("owner_moved"))
        return {
            "outcome": summary.outcome,
            "findings": dict(statistics.findings),
            "failures": statistics.sweep_failures + statistics.write_failures,
            "sweeps": statistics.sweeps,
            "saves": sum(outcome == "completed" for _, _, outcome, *_ in run.recorder.of("checkpoint_ended")),
            "permits": len(run.recorder.of("permit_granted")),
            "moves": dict(moves),
            "inactive": {
                status.name: status.why for status in auditor.status() if status.state == "inactive"
            },
        }

    return asyncio.run(lived())


if __name__ == "__main__":
    sys.stdout.write(json.dumps(life(**json.loads(sys.argv[1]))))
