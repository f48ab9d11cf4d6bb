"""Sampling: what a completion depends on, and that its recorded log-probabilities are true."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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


def test_each_completion_knows_the_version_that_drew_each_token(policy: Policy, tokenizer: Tokenizer) -> None:
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
    assert all(one.versions == list(range(10, 10 + len(one.tokens))) for one in completions[0])
    assert {one.version_from for one in completions[0]} == {10}
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


# ------------------------------------------------------------------------------------------------- going on


def cut(one: Completion, length: int) -> Completion:
    """Return the beginning of a completion, as it was while it was drawn."""
    return Completion(one.tokens[:length], one.logprobs[:length], one.versions[:length])


def resumed(
    policy: Policy, prompts: list[SamplePrompt], lengths: list[list[int]], *, max_new_tokens: int = 8
) -> tuple[list[list[Completion]], list[list[Completion]]]:
    """Sample, then sample again from beginnings of these lengths; return both."""
    whole = drawn(policy, prompts, max_new_tokens=max_new_tokens)
    begun = [
        SamplePrompt(
            prompt.tokens,
            prompt.keys,
            [cut(one, length) for one, length in zip(group, wanted, strict=True)],
        )
        for prompt, group, wanted in zip(prompts, whole, lengths, strict=True)
    ]
    return whole, drawn(policy, begun, max_new_tokens=max_new_tokens)


@pytest.mark.parametrize("length", [0, 1, 3, 7, 8])
def test_a_completion_goes_on_exactly_where_it_was_left(
    policy: Policy, tokenizer: Tokenizer, length: int
) -> None:
    """With the same weights its tokens are those of a completion that nobody interrupted, wherever it was cut."""
    prompts = [prompt_of(tokenizer, text, 4) for text in TEXTS]

    whole, again = resumed(policy, prompts, [[length] * 4 for _ in TEXTS])

    for group, group_again in zip(whole, again, strict=True):
        for one, other in zip(group, group_again, strict=True):
            assert other.tokens == one.tokens
            assert other.finished == one.finished
            assert other.logprobs[:length] == one.logprobs[:length]
            torch.testing.assert_close(other.logprobs, one.logprobs, rtol=1e-4, atol=1e-4)


def test_beginnings_of_different_lengths_go_on_side_by_side(policy: Policy, tokenizer: Tokenizer) -> None:
    """Generations of one prompt, and prompts of one batch, were cut at different places, some not begun at all."""
    prompts = [prompt_of(tokenizer, text, 4) for text in TEXTS]

    whole, again = resumed(policy, prompts, [[0, 5, 1, 8], [2, 0, 0, 3], [0, 0, 0, 0], [8, 8, 7, 1]])

    assert [[one.tokens for one in group] for group in again] == [
        [one.tokens for one in group] for group in whole
    ]
    assert [[one.finished for one in group] for group in again] == [
        [one.finished for one in group] for group in whole
    ]


def test_what_was_begun_keeps_its_logprobs_and_versions(policy: Policy, tokenizer: Tokenizer) -> None:
    """The weights of a resume are others; what the old ones drew is still theirs."""
    prompt = prompt_of(tokenizer, "1 + 2 =", 2)
    begun = [Completion([3, 4], [-0.25, -0.5], [1, 2]), Completion([5], [-0.125], [1])]

    (first, second) = drawn(policy, [SamplePrompt(prompt.tokens, prompt.keys, begun)])[0]

    assert (first.tokens[:2], first.logprobs[:2], first.versions[:2]) == ([3, 4], [-0.25, -0.5], [1, 2])
    assert (second.tokens[0], second.logprobs[0], second.versions[0]) == (5, -0.125, 1)
    assert set(first.versions[2:]) == {4}
    assert (first.version_from, first.version_to) == (1, 4)
    assert begun[0].tokens == [3, 4]


def test_a_completion_that_was_over_is_returned_as_it_came(policy: Policy, tokenizer: Tokenizer) -> None:
    """Nothing is drawn behind an end token or past the longest length; if all are over, the model does not run."""
    prompt = prompt_of(tokenizer, "1 + 2 =", 2)
    over = [Completion([3, tokenizer.eos_id], [-1.0, -1.0], [0, 0]), Completion([4] * 8, [-1.0] * 8, [0] * 8)]
    asked: list[int] = []

    def version() -> int:
        asked.append(1)
        return 4

    completions = sample(
        policy,
        [SamplePrompt(prompt.tokens, prompt.keys, over)],
        max_new_tokens=8,
        temperature=1.0,
        version=version,
    )

    assert completions == [
        [
            Completion([3, tokenizer.eos_id], [-1.0, -1.0], [0, 0], finished=True),
            Completion([4] * 8, [-1.0] * 8, [0] * 8, finished=False),
        ]
    ]
    assert asked == []


def test_a_completion_that_was_over_takes_no_part_in_its_batch(policy: Policy, tokenizer: Tokenizer) -> None:
    """The others are drawn as if it were not there."""
    prompt = prompt_of(tokenizer, "1 + 2 =", 3)
    whole = drawn(policy, [prompt])[0]
    over = Completion([3, tokenizer.eos_id], [-1.0, -1.0], [0, 0])

    mixed = drawn(policy, [SamplePrompt(prompt.tokens, prompt.keys, [Completion(), over, Completion()])])[0]

    assert [mixed[place].tokens for place in (0, 2)] == [whole[place].tokens for place in (0, 2)]
    assert mixed[1].tokens == over.tokens


def test_progress_shows_what_was_drawn_so_far(policy: Policy, tokenizer: Tokenizer) -> None:
    """At each multiple of so many tokens, before the next is drawn, and not once all is over."""
    prompts = [prompt_of(tokenizer, text, 6) for text in TEXTS]
    whole = drawn(policy, prompts, max_new_tokens=7)
    seen: list[list[list[tuple[int, ...]]]] = []

    def progress(completions: Sequence[Sequence[Completion]]) -> None:
        seen.append([[tuple(one.tokens) for one in group] for group in completions])

    again = sample(
        policy,
        prompts,
        max_new_tokens=7,
        temperature=1.0,
        version=lambda: 4,
        progress=progress,
        progress_tokens=2,
    )

    assert again == whole
    assert max(len(one.tokens) for group in whole for one in group) == 7
    assert seen == [
        [[tuple(one.tokens[:length]) for one in group] for group in whole] for length in (2, 4, 6)
    ]


def test_a_completion_that_ended_is_finished_in_the_progress_too(
    policy: Policy, tokenizer: Tokenizer
) -> None:
    """So a chunk that holds its end token can be told from one that stopped in the middle."""
    seen: list[bool] = []

    sample(
        policy,
        [prompt_of(tokenizer, text, 20) for text in TEXTS],
        max_new_tokens=6,
        temperature=1.0,
        version=lambda: 4,
        progress=lambda completions: seen.extend(
            one.finished == (tokenizer.eos_id in one.tokens) for group in completions for one in group
        ),
    )

    assert seen
    assert all(seen)
