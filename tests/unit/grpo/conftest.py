"""A policy of a few thousand weights and what goes with it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers import Qwen2ForCausalLM  # noqa: F401 - seconds of import, here outside any test's time limit

from quiesce_grpo.config import ModelConfig, TaskConfig
from quiesce_grpo.policy import Policy, build_policy
from quiesce_grpo.tasks import Task
from quiesce_grpo.tokenizer import Tokenizer, build_tokenizer

MODEL = ModelConfig(
    architecture={
        "model_type": "qwen2",
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        # Wide enough that a random policy prefers some tokens: uniform ones would hide a wrong position.
        "initializer_range": 0.5,
    },
    device="cpu",
)
"""A policy that is built in milliseconds."""


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """At these sizes threads only wait for each other, for seconds where the cores are busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def tokenizer() -> Tokenizer:
    """The vocabulary of chain_sum."""
    return build_tokenizer(MODEL)


@pytest.fixture
def policy(tokenizer: Tokenizer) -> Policy:
    """A random policy, always the same."""
    return build_policy(MODEL, tokenizer, seed=7)


@pytest.fixture
def task() -> Task:
    """One-digit sums."""
    return Task(TaskConfig(size=50))
