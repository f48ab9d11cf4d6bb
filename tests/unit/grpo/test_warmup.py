"""The supervised warm-up."""

from __future__ import annotations

import math
import random

import torch

from quiesce_grpo.config import WarmupConfig
from quiesce_grpo.policy import Policy, build_policy
from quiesce_grpo.tasks import Task
from quiesce_grpo.tokenizer import Tokenizer
from quiesce_grpo.warmup import warm_up
from tests.unit.grpo.conftest import MODEL


def test_the_warm_up_lowers_the_loss_on_right_answers(
    policy: Policy, tokenizer: Tokenizer, task: Task
) -> None:
    """A few steps teach at least the form of an answer."""
    result = warm_up(policy, tokenizer, task, WarmupConfig(steps=30, learning_rate=1e-2), seed=1)

    assert result.steps == 30
    assert result.last_loss < 0.7 * result.first_loss


def test_the_seed_decides_the_warm_up_and_no_random_state_is_touched(
    tokenizer: Tokenizer, task: Task
) -> None:
    """Two runs give the same weights, and neither Python's nor torch's generator moved."""
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    policies = [build_policy(MODEL, tokenizer, seed=1) for _ in range(2)]

    for policy in policies:
        warm_up(policy, tokenizer, task, WarmupConfig(steps=3), seed=5)

    first, second = (policy.weights() for policy in policies)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert torch.equal(torch_state, torch.get_rng_state())
    assert python_state == random.getstate()


def test_no_steps_leave_the_policy_alone(policy: Policy, tokenizer: Tokenizer, task: Task) -> None:
    """A model that was loaded from a path needs no warm-up."""
    before = policy.weights()

    result = warm_up(policy, tokenizer, task, WarmupConfig(steps=0), seed=1)

    assert math.isnan(result.first_loss)
    assert all(torch.equal(before[name], value) for name, value in policy.weights().items())
