"""Sampling: what a completion depends on, and that its recorded log-probabilities are true."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from quiesce_grpo.errors import NonFinitePolicyError
from quiesce_grpo.policy import Policy, build_policy
from quiesce_grpo.sampling import Completion, SamplePrompt, sample, stream_key, token_logprobs, uniform
from quiesce_grpo.tokenizer import Tokenizer
from tests.unit.grpo.conftest import MODEL

TEXTS = ("1 + 2 =", "9 - 10 + 11 =", "3", "40 + 2 =")


def prompt_of(tokenizer: Tokenizer, text: str, generations: int = 3, *, seed: int = 5) -> SamplePrompt:
    """Return a prompt whose streams are named after its text."""
    keys = [stream_key(seed, text, 0, generation) for generation in range(generations)]
    return SamplePrompt(tokenizer.encode(text), keys)


def drawn(
    policy: Policy, prompts: list[SamplePrompt], *, max_new_tokens: int = 8, temperature: float = 1.0
) -> list[list[Completion]]:
    """Sample with weights of version 4."""
    completions = sample(
        policy, prompts, max_new_tokens=max_new_tokens, temperature=temperature, version=lambda: 4
    )
    assert completions is not None
    return completions


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_recorded_logprobs_equal_a_teacher_forced_pass(
    policy: Policy, tokenizer: Tokenizer, temperature: float
) -> None:
    """Cache, left padding and temperature leave each token the probability that one plain pass gives it."""
    prompts = [prompt_of(tokenizer, text) for text in TEXTS]

    completions = drawn(policy, prompts, temperature=temperature)

    flat = [(prompt, one) for prompt, group in zip(prompts, completions, strict=True) for one in group]
    with torch.no_grad():
        scored = token_logprobs(
            policy,
            [prompt.tokens for prompt, _ in flat],
            [one.tokens for _, one in flat],
            temperature=temperature,
        )
    assert len({len(one.tokens) for _, one in flat}) > 1
    for (_, one), row, mask in zip(flat, scored.logprobs, scored.mask, strict=True):
        assert int(mask.sum()) == len(one.tokens)
        torch.testing.assert_close(row[mask], torch.tensor(one.logprobs), rtol=1e-4, atol=1e-4)


def test_a_teacher_forced_pass_equals_the_model_alone(policy: Policy, tokenizer: Tokenizer) -> None:
    """Padding on both sides and the shift by one are checked against one unpadded row and a plain softmax."""
    prompt, completion = tokenizer.encode("7 - 2 ="), tokenizer.encode("15")
    tokens = torch.tensor([prompt + completion])
    mask = torch.ones_like(tokens, dtype=torch.bool)
    logits = policy.logits(tokens, mask, keep=tokens.shape[1])[0].detach()
    expected = [
        float(torch.log_softmax(logits[len(prompt) - 1 + place], -1)[token])
        for place, token in enumerate(completion)
    ]

    scored = token_logprobs(
        policy,
        [prompt, tokenizer.encode("1 + 2 + 3 =")],
        [completion, tokenizer.encode("6666")],
        temperature=1.0,
    )

    torch.testing.assert_close(scored.logprobs[0, :2].detach(), torch.tensor(expected))
    assert scored.mask[0].tolist() == [True, True, False, False]
    assert scored.logprobs[0, 2:].tolist() == scored.entropy[0, 2:].tolist() == [0.0, 0.0]


def test_the_same_call_gives_the_same_tokens_in_any_batch(policy: Policy, tokenizer: Tokenizer) -> None:
    """Alone, among others, or in another order: a completion does not see its batch."""
    together = drawn(policy, [prompt_of(tokenizer, text) for text in TEXTS])
    alone = [drawn(policy, [prompt_of(tokenizer, text)])[0] for text in TEXTS]
    reversed_order = drawn(policy, [prompt_of(tokenizer, text) for text in reversed(TEXTS)])[::-1]

    tokens = [[one.tokens for one in group] for group in together]
    assert tokens == [[one.tokens for one in group] for group in alone]
    assert tokens == [[one.tokens for one in group] for group in reversed_order]


def test_one_generation_does_not_depend_on_how_many_there_are(policy: Policy, tokenizer: Tokenizer) -> None:
    """The first generations of a larger group are those of a smaller one."""
    few = drawn(policy, [prompt_of(tokenizer, "1 + 2 =", 2)])[0]
    many = drawn(policy, [prompt_of(tokenizer, "1 + 2 =", 6)])[0]

    assert [one.tokens for one in few] == [one.tokens for one in many[:2]]


def test_seed_group_attempt_and_generation_all_change_the_stream() -> None:
    """Every part of the key counts."""
    keys = [
        stream_key(1, "e000-p0000001", 0, 0),
        stream_key(2, "e000-p0000001", 0, 0),
        stream_key(1, "e000-p0000002", 0, 0),
        stream_key(1, "e000-p0000001", 1, 0),
        stream_key(1, "e000-p0000001", 0, 1),
    ]

    numbers = uniform(keys, 4)

    assert len({tuple(row) for row in numbers.tolist()}) == len(keys)
    assert bool(((numbers >= 0) & (numbers < 1)).all())


def test_a_longer_stream_begins_with_the_shorter_one() -> None:
    """So the longest length does not change what is drawn before it."""
    assert torch.equal(uniform(["a", "b"], 9)[:, :3], uniform(["a", "b"], 3))


def test_torchs_own_random_state_is_neither_read_nor_changed(policy: Policy, tokenizer: Tokenizer) -> None:
    """Sampling after other draws gives the same tokens, and leaves the state as it was."""
    first = drawn(policy, [prompt_of(tokenizer, "1 + 2 =")])
    torch.rand(3)
    before = torch.get_rng_state()

    second = drawn(policy, [prompt_of(tokenizer, "1 + 2 =")])

    assert first == second
    assert torch.equal(before, torch.get_rng_state())


def test_tokens_are_drawn_with_their_probabilities(policy: Policy, tokenizer: Tokenizer) -> None:
    """Over many generations the frequency of each first token is its probability, within five deviations."""
    count = 4000
    prompt = prompt_of(tokenizer, "1 + 2 =", count)
    tokens = torch.tensor([prompt.tokens])
    with torch.no_grad():
        logits = policy.logits(tokens, torch.ones_like(tokens, dtype=torch.bool), keep=1)[0, -1]
    expected = torch.softmax(logits, -1)

    first = torch.tensor([one.tokens[0] for one in drawn(policy, [prompt], max_new_tokens=1)[0]])

    frequency = torch.bincount(first, minlength=tokenizer.size) / count
    deviation = (expected * (1 - expected) / count).sqrt()
    assert bool(((frequency - expected).abs() <= 5 * deviation + 1 / count).all())


def test_a_completion_ends_with_its_end_token_or_at_the_longest_length(
    policy: Policy, tokenizer: Tokenizer
) -> None:
    """Nothing follows the end token, and only a completion that has it counts as finished."""
    completions = drawn(policy, [prompt_of(tokenizer, text, 20) for text in TEXTS], max_new_tokens=5)

    every = [one for group in completions for one in group]
    assert {one.finished for one in every} == {True, False}
    for one in every:
        assert tokenizer.eos_id not in one.tokens[:-1]
        assert one.finished == (one.tokens[-1] == tokenizer.eos_id)
        assert one.finished or len(one.tokens) == 5
        assert len(one.tokens) == len(one.logprobs)


def test_each_completion_knows_the_versions_that_drew_its_first_and_last_token(
    policy: Policy, tokenizer: Tokenizer
) -> None:
    """The version is asked for before each token, so a shorter completion ends at an earlier one."""
    versions: Iterator[int] = iter(range(10, 20))

    completions = sample(
        policy,
        [prompt_of(tokenizer, "1 + 2 =", 12)],
        max_new_tokens=6,
        temperature=1.0,
        version=lambda: next(versions),
    )

    assert completions is not None
    assert {one.version_from for one in completions[0]} == {10}
    assert all(one.version_to == 10 + len(one.tokens) - 1 for one in completions[0])
    assert len({one.version_to for one in completions[0]}) > 1


def test_weights_that_change_between_tokens_are_in_the_recorded_logprobs(
    policy: Policy, tokenizer: Tokenizer
) -> None:
    """The second token's log-probability is that of the second weights, over the cache of the first."""
    other = build_policy(MODEL, tokenizer, seed=99)
    prompt = prompt_of(tokenizer, "1 + 2 =", 16)
    unchanged = drawn(policy, [prompt], max_new_tokens=2)[0]
    calls: list[int] = []

    def version() -> int:
        calls.append(len(calls))
        if len(calls) == 2:
            policy.load_weights(other.weights())
        return len(calls)

    changed = sample(policy, [prompt], max_new_tokens=2, temperature=1.0, version=version)

    assert changed is not None
    assert [one.tokens[0] for one in changed[0]] == [one.tokens[0] for one in unchanged]
    assert [one.logprobs[1:] for one in changed[0]] != [one.logprobs[1:] for one in unchanged]


def test_a_batch_that_is_given_up_returns_nothing(policy: Policy, tokenizer: Tokenizer) -> None:
    """Between two tokens sampling asks whether anybody still waits."""
    asked: list[bool] = []

    def cancelled() -> bool:
        asked.append(True)
        return len(asked) == 2

    completions = sample(
        policy,
        [prompt_of(tokenizer, "1 + 2 =", 8)],
        max_new_tokens=8,
        temperature=1.0,
        version=lambda: 0,
        cancelled=cancelled,
    )

    assert completions is None
    assert len(asked) == 2


def test_a_policy_that_diverged_is_an_error_and_not_a_token(policy: Policy, tokenizer: Tokenizer) -> None:
    """Log-probabilities that are not finite never reach a row."""
    with torch.no_grad():
        next(iter(policy.model.parameters())).fill_(float("nan"))

    with pytest.raises(NonFinitePolicyError, match="version 4"):
        drawn(policy, [prompt_of(tokenizer, "1 + 2 =")])
