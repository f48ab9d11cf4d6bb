"""The supervised warm-up: a few steps of cross-entropy on right answers, so that some reward is earned.

Rule: it ends long before the task is learned; what is left to learn is GRPO's. It runs once, before the first
checkpoint, and never after a resume. Nothing here suspends; call it in a thread.

GRPO learns from differences of reward within a group, and a random policy that is never right has none.
Supervised examples before reinforcement are the usual remedy (DeepSeekMath, arXiv:2402.03300, trains on an
instruction-tuned model).
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import nn

from quiesce_grpo.config import WarmupConfig
from quiesce_grpo.policy import Policy
from quiesce_grpo.sampling import token_logprobs
from quiesce_grpo.tasks import Task
from quiesce_grpo.tokenizer import Tokenizer

__all__ = ["WarmupResult", "warm_up"]


@dataclass(frozen=True, slots=True)
class WarmupResult:
    """How a warm-up went.

    Attributes:
        steps: Optimizer steps taken.
        first_loss: Mean cross-entropy of an answer's token at the first step, in nats.
        last_loss: The same at the last step.
    """

    steps: int
    first_loss: float
    last_loss: float


def warm_up(
    policy: Policy, tokenizer: Tokenizer, task: Task, config: WarmupConfig, *, seed: int
) -> WarmupResult:
    """Train the policy on right answers for a few steps, in place.

    Args:
        policy: The trainer's policy.
        tokenizer: Its vocabulary.
        task: Where questions and answers come from.
        config: Steps, batch size, learning rate.
        seed: Decides which questions are drawn; neither Python's nor torch's random state is used.
    """
    draw = random.Random(f"warm-up/{seed}")
    optimizer = torch.optim.AdamW(policy.model.parameters(), lr=config.learning_rate, weight_decay=0.0)
    losses: list[float] = []
    for _ in range(config.steps):
        items = [task[draw.randrange(len(task))] for _ in range(config.batch_size)]
        scored = token_logprobs(
            policy,
            [tokenizer.encode_prompt(item.prompt) for item in items],
            [[*tokenizer.encode(item.answer), tokenizer.eos_id] for item in items],
            temperature=1.0,
        )
        loss = -scored.logprobs.sum() / scored.mask.sum()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call] # torch does not annotate it
        nn.utils.clip_grad_norm_(policy.model.parameters(), 1.0)
        optimizer.step()
        losses.append(float(loss.detach()))
    optimizer.zero_grad(set_to_none=True)
    first, last = (losses[0], losses[-1]) if losses else (float("nan"), float("nan"))
    return WarmupResult(config.steps, first, last)
