"""A whole run that is killed and resumed over and over: the real controller, real files, an LMDB store, groups that fail.

The functions here run in children of the fork server. Time is virtual, so a run of two epochs takes a fraction of a second,
and a kill comes at a number of events: calls of the hooks and file operations, counted together. So it hits every phase: a
start, a restore, a slot, a window, a write in the background, a step.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

from quiesce import GenerationRequest, GroupResult
from quiesce.checkpoint import files
from quiesce.checkpoint.audit import audit
from quiesce.checkpoint.loading import find_checkpoints
from quiesce.observers import HOOKS
from quiesce.testing import in_virtual_time
from quiesce.training import TrainBatch
from tests.run_rig import Run, delays, result_of, sampler

HOPELESS = 3
"""Dataset index of a prompt whose rollouts always fail."""

PROMPTS = 22
EPOCHS = 2


class Killer:
    """Counts what happens, and ends the process at a number."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.count = 0
        for hook in HOOKS:
            setattr(self, hook, self.happens)

    def happens(self, *_: object) -> None:
        """Count; the end comes before whatever this is about."""
        self.count += 1
        if self.count == self.at:
            os.kill(os.getpid(), signal.SIGKILL)


def one(path: str, name: str, seed: int, kill_at: int, *, resume: bool) -> dict[str, Any]:
    """Run one incarnation to its end, or to an event.

    Args:
        path: The run folder.
        name: The sampler.
        seed: How long each rollout and each step takes.
        kill_at: The event at which to be killed; 0 for none.
        resume: Whether to go on from the newest checkpoint.

    Returns:
        What became of every prompt, of a run that reached its end and whose every prompt was checked.
    """
    killer = Killer(kill_at)
    setattr(files, "before", killer.happens)  # noqa: B010 - a checker compares the names of its arguments
    delay = delays(seed, 4.0)

    async def generate(request: GenerationRequest) -> GroupResult:
        await asyncio.sleep(delay((request.group_id, request.attempt)))
        if request.index == HOPELESS or (request.index % 5 == 0 and request.attempt == 0):
            message = "this prompt did not work out"
            raise ValueError(message)
        return result_of(request)

    async def before_step(batch: TrainBatch) -> None:
        await asyncio.sleep(delay(batch.step) / 2)

    run = Run(
        Path(path),
        sampler(name),
        prompts=PROMPTS,
        epochs=EPOCHS,
        generate=generate,
        before_step=before_step,
        options={"spare_prompts": 2, "max_attempts": 2, "retry_backoff_seconds": 0.5, "save_every_steps": 1},
    )
    summary = in_virtual_time(run.go)(resume=resume, observers=(killer,))
    run.check_all_accounted(summary)
    return {
        "read": summary.read,
        "trained": summary.trained,
        "dropped": sum(summary.dropped.values()),
        "events": killer.count,
    }


def verdict(path: str) -> dict[str, Any]:
    """Return what an audit says of a run that was killed, and how many checkpoints it has."""
    if not find_checkpoints(Path(path) / "checkpoints"):
        return {"checkpoints": 0, "violations": []}
    report = audit(Path(path))
    return {
        "checkpoints": len(report.checkpoints),
        "violations": [str(violation) for violation in report.violations],
    }
