"""The policy: random weights from a seed, replicas, weights handed over."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from quiesce.errors import ConfigError
from quiesce_grpo.config import ModelConfig, Scalar
from quiesce_grpo.policy import Policy, build_policy, resolve_device
from quiesce_grpo.tokenizer import CharacterTokenizer, Tokenizer
from tests.unit.grpo.conftest import MODEL


def test_the_seed_decides_the_weights_and_the_global_state_stays(tokenizer: Tokenizer) -> None:
    """Building draws nothing from torch's own generator."""
    before = torch.get_rng_state()

    first, same, other = (build_policy(MODEL, tokenizer, seed=seed).weights() for seed in (1, 1, 2))

    assert all(torch.equal(first[name], same[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)
    assert torch.equal(before, torch.get_rng_state())


def test_a_replica_is_independent(policy: Policy) -> None:
    """What happens to the original does not reach a replica, which holds no gradients."""
    replica = policy.replica()
    before = replica.weights()

    with torch.no_grad():
        for value in policy.model.parameters():
            value.add_(1.0)

    assert all(torch.equal(before[name], value) for name, value in replica.weights().items())
    assert not any(value.requires_grad for value in replica.model.parameters())


def test_weights_that_were_handed_over_are_a_copy(policy: Policy) -> None:
    """Later steps do not change them."""
    handed = policy.weights()
    before = {name: value.clone() for name, value in handed.items()}

    with torch.no_grad():
        for value in policy.model.parameters():
            value.add_(1.0)

    assert all(torch.equal(before[name], handed[name]) for name in before)


def test_loaded_weights_make_the_same_policy(policy: Policy, tokenizer: Tokenizer) -> None:
    """Another policy gives the same logits once it has them."""
    other = build_policy(MODEL, tokenizer, seed=8)
    tokens = torch.tensor([tokenizer.encode("1 + 2 =")])
    mask = torch.ones_like(tokens, dtype=torch.bool)

    other.load_weights(policy.weights())

    assert torch.equal(policy.logits(tokens, mask, keep=3), other.logits(tokens, mask, keep=3))


def test_tied_weights_are_handed_over_once(tokenizer: Tokenizer) -> None:
    """The second name of a tied weight is left out, and loading does not miss it."""
    tied = ModelConfig(architecture={**MODEL.architecture, "tie_word_embeddings": True}, device="cpu")
    policy, other = (build_policy(tied, tokenizer, seed=seed) for seed in (1, 2))

    weights = policy.weights()
    other.load_weights(weights)

    assert sum(value.numel() for value in weights.values()) == policy.num_parameters()
    assert all(torch.equal(weights[name], value) for name, value in other.weights().items())


def test_weights_of_another_architecture_are_refused(policy: Policy) -> None:
    """By the name of what does not fit."""
    weights = policy.weights()
    name = next(iter(weights))

    with pytest.raises(ConfigError, match=name):
        policy.load_weights({key: value for key, value in weights.items() if key != name})
    with pytest.raises(ConfigError, match=name):
        policy.load_weights({**weights, name: weights[name][:1]})


def test_padding_on_the_left_moves_nothing(policy: Policy, tokenizer: Tokenizer) -> None:
    """The logits of a prompt are the same with padding before it."""
    tokens = tokenizer.encode("7 - 2 =")
    bare = torch.tensor([tokens])
    padded = torch.tensor([[tokenizer.pad_id] * 5 + tokens])

    with torch.no_grad():
        expected = policy.logits(bare, torch.ones_like(bare, dtype=torch.bool), keep=3)
        actual = policy.logits(padded, torch.tensor([[False] * 5 + [True] * len(tokens)]), keep=3)

    torch.testing.assert_close(actual, expected)


def test_a_wider_type_than_that_computed_in_runs_under_autocast(tokenizer: Tokenizer) -> None:
    """The trainer keeps float32 weights and computes in bfloat16; its replica's weights are bfloat16."""
    config = ModelConfig(architecture=MODEL.architecture, device="cpu", dtype="bfloat16")
    policy = build_policy(config, tokenizer, seed=1)
    tokens = torch.tensor([tokenizer.encode("7 - 2 =")])
    mask = torch.ones_like(tokens, dtype=torch.bool)

    exact = build_policy(MODEL, tokenizer, seed=1).logits(tokens, mask, keep=1)
    rough = policy.logits(tokens, mask, keep=1)
    replica = policy.replica()

    assert {value.dtype for value in policy.model.parameters()} == {torch.float32}
    assert {value.dtype for value in replica.model.parameters()} == {torch.bfloat16}
    assert rough.dtype == replica.logits(tokens, mask, keep=1).dtype == torch.float32
    assert not torch.equal(rough, exact)
    torch.testing.assert_close(rough, exact, rtol=0.1, atol=0.2)


def test_dropout_is_off_where_an_architecture_has_it(tokenizer: Tokenizer) -> None:
    """Two passes in training mode agree, so that ratios start at one."""
    architecture: dict[str, Scalar] = {
        "model_type": "gpt2",
        "n_embd": 16,
        "n_layer": 1,
        "n_head": 2,
        "n_positions": 32,
        "resid_pdrop": 0.5,
        "embd_pdrop": 0.5,
        "attn_pdrop": 0.5,
    }
    policy = build_policy(ModelConfig(architecture=architecture, device="cpu"), tokenizer, seed=1)
    tokens = torch.tensor([tokenizer.encode("7 - 2 =")])
    mask = torch.ones_like(tokens, dtype=torch.bool)

    assert policy.model.training
    assert all(module.p == 0.0 for module in policy.model.modules() if isinstance(module, nn.Dropout))
    assert torch.equal(policy.logits(tokens, mask, keep=1), policy.logits(tokens, mask, keep=1))


@pytest.mark.parametrize(
    "config, key",
    [
        (ModelConfig(architecture={"model_type": "no_such_model"}), "model.architecture"),
        (ModelConfig(path="/no/such/folder"), "model.path"),
    ],
)
def test_a_model_that_cannot_be_built_is_refused_by_its_key(config: ModelConfig, key: str) -> None:
    """What transformers refuses is reported under the key that caused it."""
    with pytest.raises(ConfigError) as caught:
        build_policy(config, CharacterTokenizer("ab"), seed=1)

    assert str(caught.value).startswith(f"{key}: ")


def test_a_gpu_that_is_not_there_is_refused() -> None:
    """By the key, before anything is built."""
    with pytest.raises(ConfigError, match=r"^model\.device: cuda:99"):
        resolve_device("cuda:99")
