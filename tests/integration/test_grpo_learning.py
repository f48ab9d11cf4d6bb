"""The real thing in seconds: engine and trainer together raise the reward of a random policy."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch

from quiesce import BufferEntry, GenerationRequest, PromptRef, RowKey, TrainBatch
from quiesce_grpo.config import EngineConfig, GrpoConfig, ModelConfig, TaskConfig, WarmupConfig
from quiesce_grpo.engine import RolloutEngine
from quiesce_grpo.policy import Policy, build_policy
from quiesce_grpo.tasks import Task
from quiesce_grpo.tokenizer import Tokenizer, build_tokenizer
from quiesce_grpo.trainer import GrpoTrainer
from quiesce_grpo.warmup import warm_up

SEED = 11
GROUPS, GENERATIONS, STEPS = 8, 8, 40

# Sums of digits up to 9 that are asked again and again: few facts, so that seconds show learning.
TASK = TaskConfig(size=16, seed=3)
MODEL = ModelConfig(
    architecture={
        "model_type": "qwen2",
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 32,
    },
    device="cpu",
)


async def discard(_: Mapping[RowKey, Mapping[str, Any]]) -> None:
    """Stand in for the controller's write-back."""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """One thread for the engine and one for the trainer; more would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("lag", [0, 2])
async def test_grpo_raises_the_reward_also_with_rollouts_of_older_weights(lag: int) -> None:
    """The mean reward of the last ten steps is far above that of the first ten, fresh or stale."""
    task, tokenizer = Task(TASK), build_tokenizer(MODEL)
    policy = build_policy(MODEL, tokenizer, seed=SEED)
    warm_up(policy, tokenizer, task, WarmupConfig(steps=15, batch_size=32, learning_rate=5e-3), seed=SEED)

    rewards = await run(policy, tokenizer, task, lag)

    first, last = sum(rewards[:10]) / 10, sum(rewards[-10:]) / 10
    assert last >= first + 0.15, (
        f"{first:.3f} rose only to {last:.3f}: {[round(value, 2) for value in rewards]}"
    )


async def run(policy: Policy, tokenizer: Tokenizer, task: Task, lag: int) -> list[float]:
    """Train step by step on batches that were generated ``lag`` versions earlier; return the mean rewards."""
    trainer = GrpoTrainer(
        policy,
        GrpoConfig(learning_rate=2e-3, lr_warmup_steps=3),
        temperature=1.0,
        max_new_tokens=4,
        seed=SEED,
    )
    rewards: list[float] = []
    batches: list[TrainBatch] = []
    async with RolloutEngine(policy, tokenizer, task, EngineConfig(), seed=SEED) as engine:
        for step in range(STEPS):
            while len(batches) <= lag:
                batches.append(await generated(engine, task, step + len(batches), version=step))
            metrics = await trainer.train_step(batches.pop(0))
            engine.sync_weights(step + 1, await trainer.weights())
            rewards.append(metrics["reward"])
            assert metrics["staleness"] == min(step, lag)
            assert metrics["skipped_updates"] == 0.0
    trainer.close()
    return rewards


async def generated(engine: RolloutEngine, task: Task, step: int, *, version: int) -> TrainBatch:
    """Generate the batch of a step with weights of a version."""
    prompts = [
        PromptRef(epoch=0, position=position, index=position % len(task))
        for position in range(step * GROUPS, (step + 1) * GROUPS)
    ]
    results = await asyncio.gather(
        *(
            engine.generate(
                GenerationRequest(
                    group_id=prompt.group_id,
                    attempt=0,
                    prompt=task[prompt.index],
                    index=prompt.index,
                    start_version=version,
                    num_generations=GENERATIONS,
                )
            )
            for prompt in prompts
        )
    )
    entries = tuple(
        BufferEntry(
            group_id=prompt.group_id,
            admission_id=step,
            prompt=prompt,
            attempt=0,
            target_step=step,
            start_version=version,
            generated_from=result.version_from,
            generated_to=result.version_to,
            keys=tuple(RowKey(1, prompt.group_id, generation, 0) for generation in range(GENERATIONS)),
        )
        for prompt, result in zip(prompts, results, strict=True)
    )
    return TrainBatch(
        step=step,
        version=step,
        entries=entries,
        rows=tuple(tuple(result.rows or ()) for result in results),
        _write_back=discard,
    )
