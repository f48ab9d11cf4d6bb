"""A run to look at: the real controller in real time, recorded and scraped, with drills allowed, and no model in it.

Arguments: its name, its folder, and "resume" if it goes on. It runs until it is told to stop, by SIGTERM.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import random
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from quiesce import GenerationRequest, GroupResult
from quiesce.audit_config import AuditConfig
from quiesce.observers import Hub
from quiesce.telemetry.enable import enable_metrics
from quiesce.training import TrainBatch
from tests.run_rig import Run, result_of, sampler

SAVE_EVERY_STEPS = 6


class Busy(Run):
    """A run whose reward rises and whose loss falls."""

    async def train_step(self, batch: TrainBatch) -> Mapping[str, float]:
        """Train, and tell numbers that look like training."""
        await super().train_step(batch)
        noise = random.Random(batch.step).uniform(-0.03, 0.03)
        done = 1 - math.exp(-batch.step / 60)
        return {"reward": 0.1 + 0.8 * done + noise, "loss": 1.2 - done + noise, "kl": 0.01 + 0.02 * done}


async def main() -> None:
    """Run until told to stop."""
    name, folder, *more = sys.argv[1:]
    resume = "resume" in more
    rng = random.Random(name)

    async def generate(request: GenerationRequest) -> GroupResult:
        await asyncio.sleep(min(1.0, rng.lognormvariate(-2.2, 0.6)))
        stats = {"reward": rng.random(), "tokens": rng.randrange(50, 300)}
        return dataclasses.replace(result_of(request), stats=stats)

    async def before(_: TrainBatch) -> None:
        await asyncio.sleep(rng.uniform(0.1, 0.3))

    async def sync(_: int) -> None:
        await asyncio.sleep(0.02)

    run = Busy(
        Path(folder),
        sampler=sampler("in_order", 3),
        prompts=400,
        epochs=1000,
        generate=generate,
        before_step=before,
        sync_weights=sync,
    )
    built = run.start(resume=resume, save_every_steps=SAVE_EVERY_STEPS, audit=AuditConfig(drills=True))
    hub: Hub = built._hub  # noqa: SLF001 - the rig makes it
    handle = enable_metrics(name, 0, hub=hub, run_dir=Path(folder), exporters=["recorder"])
    handle.expect_checkpoints(steps=SAVE_EVERY_STEPS)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, built.request_stop)
    print(handle.url, flush=True)  # noqa: T201 - how it tells that it is there
    try:
        await built.run(resume=resume)
    finally:
        handle.close()
        run.folder.close()


if __name__ == "__main__":
    asyncio.run(main())
