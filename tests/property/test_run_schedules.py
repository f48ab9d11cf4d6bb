"""Whole runs under random schedules: whatever is slow, fails, is stopped or killed, every prompt ends exactly once.

Time is virtual, so each seed is one reproducible schedule; a seed that failed once is kept in ``KNOWN``.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from quiesce import GenerationRequest, GroupResult, RunSummary
from quiesce.owners import Owners
from quiesce.testing import in_virtual_time
from quiesce.training import TrainBatch
from tests.run_rig import SAMPLERS, CrashError, Run, delays, result_of, sampler

KNOWN: tuple[int, ...] = ()
SEEDS = (*KNOWN, *range(8))
LAST_INCARNATION = 12


@dataclass
class Seen:
    """What the schedules of a sampler met, so that the test can tell that it met anything."""

    incarnations: int = 0
    stopped: int = 0
    crashed: int = 0
    retried: int = 0
    dropped: int = 0


class Schedule:
    """One seed: how slow everything is, what fails, and when the run is stopped or killed."""

    def __init__(self, seed: int, name: str, path: Path) -> None:
        self.rng = random.Random(f"{name} {seed}")
        pick = self.rng.choice
        self.delay = delays(seed, pick([0.5, 3.0, 10.0]))
        self.failing = pick([0.0, 0.1, 0.4])
        self.killing = pick([0.0, 0.2])
        self.hopeless = {index for index in range(22) if self.rng.random() < pick([0.0, 0.1])}
        self.run = Run(
            path,
            sampler(name, pick([0, 1, 2, 3])),
            prompts=pick([5, 8, 13, 22]),
            epochs=pick([1, 2, 3]),
            generate=self.generate,
            before_step=self.before_step,
            sync_weights=self.sync_weights,
            in_memory=pick([True, False]),
            options={
                "spare_prompts": pick([0, 1, 3, 6]),
                "max_attempts": pick([1, 2, 3]),
                "max_refused_drops": 1_000,
                "min_step_batch_fraction": pick([0.0, 0.5, 0.9]),
                "retry_backoff_seconds": pick([0.0, 0.1]),
                "save_every_steps": pick([1, 2, 5]),
            },
        )

    async def generate(self, request: GenerationRequest) -> GroupResult:
        """Take a while, then answer or fail."""
        await asyncio.sleep(self.delay((request.group_id, request.attempt)))
        if (request.index in self.hopeless and request.attempt < 3) or self.rng.random() < self.failing:
            raise ValueError("this prompt did not work out")
        return result_of(request)

    async def before_step(self, batch: TrainBatch) -> None:
        """Take a while, then go on or end the process."""
        await asyncio.sleep(self.delay(batch.step))
        if self.rng.random() < self.killing:
            raise CrashError

    async def sync_weights(self, version: int) -> None:
        """Take a while."""
        await asyncio.sleep(self.delay(("sync", version)) / 5)

    async def play(self, seen: Seen) -> RunSummary:
        """Run incarnation after incarnation, the last ones in peace."""
        for number in range(LAST_INCARNATION + 1):
            if number > LAST_INCARNATION // 2:
                self.killing = 0.0
            stop = self.rng.choice([None, self.rng.uniform(0, 2), self.rng.uniform(0, 60)])
            seen.incarnations += 1
            try:
                summary = await self.run.go(
                    resume=number > 0, stop_after=None if number == LAST_INCARNATION else stop
                )
            except CrashError:
                seen.crashed += 1
                continue
            assert not summary.save_failed
            if summary.outcome == "finished":
                break
            seen.stopped += 1
        seen.dropped += sum(summary.dropped.values())
        seen.retried += sum(attempt > 0 for _, attempt, *_ in self.run.recorder.of("rollout_ended"))
        return summary


@pytest.mark.timeout(300)  # nothing in it waits: it takes as long as the machine takes
@pytest.mark.parametrize("name", SAMPLERS)
def test_every_prompt_ends_exactly_once_under_any_schedule(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Across slow and failing rollouts, spares, stops and kills, each prompt is trained once or counted as dropped."""
    monkeypatch.setattr(os, "fsync", lambda _: None)  # no power fails here, and there are many saves
    seen = Seen()

    @in_virtual_time
    async def play(seed: int) -> None:
        schedule = Schedule(seed, name, tmp_path / str(seed))
        schedule.run.check_all_accounted(await schedule.play(seen))

    for seed in SEEDS:
        play(seed)

    assert seen.incarnations > len(SEEDS)
    assert min(seen.stopped, seen.crashed, seen.retried, seen.dropped) > 0


@pytest.mark.parametrize("lost", ["step", "spare"])
def test_the_oracle_notices_a_run_that_loses_a_prompt(
    lost: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run whose owners forget one group is caught by the very checks that the schedules rely on."""
    forgot = Counter[str]()
    drop = Owners.drop
    drain = Owners.drain_spares

    def forget_one(self: Owners, cut, group_id, reason, *, attempt=None):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202 - as the original
        forgot["step"] += 1
        return self.ledger.take_group(cut, group_id, target="dropped", attempt=attempt, reason=reason)

    def drain_all_but_one(self: Owners, cut):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202 - as the original
        forgot["spare"] += 1
        self.spares.take(cut)
        return drain(self, cut)

    assert drop is not forget_one
    if lost == "step":
        monkeypatch.setattr(Owners, "drop", forget_one)
    else:
        monkeypatch.setattr(Owners, "drain_spares", drain_all_but_one)

    @in_virtual_time
    async def play() -> None:
        run = Run(
            tmp_path,
            sampler("ready_first"),
            prompts=13,
            generate=hopeless_first if lost == "step" else result,
            options={"max_attempts": 1, "spare_prompts": 1 if lost == "spare" else 0},
        )
        run.check_all_accounted(await run.go())

    async def hopeless_first(request: GenerationRequest) -> GroupResult:
        if request.index == 0:
            raise ValueError("never works")
        return result_of(request)

    async def result(request: GenerationRequest) -> GroupResult:
        return result_of(request)

    with pytest.raises(AssertionError):
        play()
    assert forgot[lost]
