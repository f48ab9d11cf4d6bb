"""Sampling completions, and the log-probability of completions under a policy.

Rule: a completion depends on its key, its prompt and the weights, and on nothing else: every row has a stream
of uniform numbers of its own, hashed from (seed, group, attempt, generation), and inverts the cumulative
distribution with them. So the same call gives the same tokens alone, in a batch, after a restart and on a
retry; torch's random state is neither read nor changed. (Kernels round differently for different batch
shapes. A number that falls within that rounding error of a boundary can flip a token: one in a million in
float32, more often in bfloat16.)

The number for a token is found by the token's place, so a completion that was begun elsewhere goes on exactly
where it was left: its tokens are fed back in with the prompt and the next number of its stream draws the next
token. What was begun keeps the log-probabilities and versions that it came with.

There is neither top-k nor top-p: the recorded log-probability is that of the very distribution that was
sampled, which the ratio of the loss needs. Nothing here suspends.

Shapes: N prompts, R rows (generations of all prompts), P prompt tokens, C completion tokens, V vocabulary.
Prompts, with what was begun behind them, are padded on the left, and completions on the right, so that one
column holds the next token of every row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from quiesce_grpo.errors import NonFinitePolicyError
from quiesce_grpo.policy import Policy

__all__ = [
    "Completion",
    "SamplePrompt",
    "TokenLogProbabilities",
    "sample",
    "stream_key",
    "token_logprobs",
    "uniform",
]


@dataclass(slots=True)
class Completion:
    """A completion, as far as it was drawn.

    Attributes:
        tokens: Its token ids, the end token included when it was drawn.
        logprobs: Log-probability of each token under the weights that drew it, at the sampling temperature,
            in nats.
        versions: Weight version that drew each token.
        finished: Whether it ended by itself, before the longest length.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finished: bool = False

    @property
    def version_from(self) -> int:
        """Oldest weight version that drew one of its tokens."""
        return min(self.versions)

    @property
    def version_to(self) -> int:
        """Newest weight version that drew one of its tokens."""
        return max(self.versions)

    def copy(self) -> Completion:
        """Return an independent copy."""
        return Completion(list(self.tokens), list(self.logprobs), list(self.versions), self.finished)


@dataclass(frozen=True, slots=True)
class SamplePrompt:
    """A prompt to complete.

    Attributes:
        tokens: Its token ids, at least one.
        keys: One key of :func:`stream_key` for each generation.
        begun: What of each generation was drawn before; nothing of any when this is empty. It is copied.
    """

    tokens: Sequence[int]
    keys: Sequence[str]
    begun: Sequence[Completion] = ()


@dataclass(frozen=True, slots=True)
class TokenLogProbabilities:
    """What a policy says about given completions.

    Attributes:
        logprobs: Log-probability of each token [R, C], in nats, 0 where masked.
        entropy: Entropy of the distribution at each token [R, C], in nats, without gradient, 0 where masked.
        mask: True for real tokens [R, C].
    """

    logprobs: Tensor
    entropy: Tensor
    mask: Tensor


def stream_key(seed: int, group_id: str, attempt: int, generation: int) -> str:
    """Return the key of one generation's stream of random numbers."""
    return f"{seed}/{group_id}/{attempt}/{generation}"


def uniform(keys: Sequence[str], count: int) -> Tensor:
    """Return the first ``count`` numbers of each key's stream: float64 in [0, 1) [R, count].

    Each is made of 53 bits of SHAKE-256 of the key. An extendable hash (FIPS 202) needs no state, so a longer
    stream begins with the shorter one.
    """
    digests = b"".join(hashlib.shake_256(key.encode()).digest(8 * count) for key in keys)
    words = torch.frombuffer(bytearray(digests), dtype=torch.int64).reshape(len(keys), count)
    # The 53 low bits; a shift of signed words would need the sign masked off in any case.
    return (words & ((1 << 53) - 1)).double() / (1 << 53)


@torch.no_grad()
def sample(
    policy: Policy,
    prompts: Sequence[SamplePrompt],
    *,
    max_new_tokens: int,
    temperature: float,
    version: Callable[[], int],
    cancelled: Callable[[], bool] = lambda: False,
    progress: Callable[[Sequence[Sequence[Completion]]], None] | None = None,
    progress_tokens: int = 1,
) -> list[list[Completion]] | None:
    """Sample every generation of every prompt in one batch.

    The prompts run through the model once and their cache is then repeated for each generation; where
    something was begun, each generation runs with its own tokens behind the prompt. When weights change
    between two tokens, the cache of the earlier tokens stays that of the earlier weights, as PipelineRL does
    (arXiv:2509.19128): the recorded log-probabilities are those of what really drew each token.

    Args:
        policy: The policy; the calling thread is its only user.
        prompts: What to complete, at least one.
        max_new_tokens: Longest completion, the end token and what was begun included.
        temperature: Logits are divided by it.
        version: Called before each token is drawn: may load newer weights, returns the version now in force.
        cancelled: Called between tokens; True gives the batch up.
        progress: Called between tokens with the completions so far, by prompt and generation. They grow in
            place: it may read them while it runs, and no longer.
        progress_tokens: After how many tokens it is called, and again.

    Returns:
        The completions by prompt and generation, or None when the batch was given up. One that was begun with
        its end token or with the longest length is returned as it came.

    Raises:
        NonFinitePolicyError: If the policy diverged.
    """
    completions = [
        [one.copy() for one in prompt.begun] if prompt.begun else [Completion() for _ in prompt.keys]
        for prompt in prompts
    ]
    rows = _open_rows(prompts, completions, policy.eos_id, max_new_tokens)
    if not rows:
        return completions
    device = policy.device
    growing = [completions[row.prompt][row.generation] for row in rows]
    draws = uniform([prompts[row.prompt].keys[row.generation] for row in rows], max_new_tokens).to(device)
    begun = torch.tensor([len(one.tokens) for one in growing], device=device)
    versions = [version()]
    logits, mask, cache = _prefill(policy, prompts, rows, growing)
    done = torch.zeros(len(rows), dtype=torch.bool, device=device)
    drawn: list[Tensor] = []
    drawn_logprobs: list[Tensor] = []
    place = 0
    while True:
        log_distribution = torch.log_softmax(logits / temperature, -1)
        # A row that is done still takes part; it stays at its last number, and what it draws is dropped.
        numbers = draws.gather(-1, (begun + place).clamp_max(max_new_tokens - 1)[:, None])[:, 0]
        chosen = _invert(log_distribution, numbers)
        drawn.append(chosen)
        drawn_logprobs.append(log_distribution.gather(-1, chosen))
        place += 1
        done = done | (chosen[:, 0] == policy.eos_id) | (begun + place >= max_new_tokens)
        if bool(done.all()):
            break
        if cancelled():
            return None
        if progress is not None and place % progress_tokens == 0:
            _absorb(growing, drawn, drawn_logprobs, versions[-len(drawn) :], policy.eos_id, max_new_tokens)
            progress(completions)
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], -1)
        versions.append(version())
        logits = policy.logits(chosen, mask, keep=1, cache=cache)[:, -1]
    _absorb(growing, drawn, drawn_logprobs, versions[-len(drawn) :], policy.eos_id, max_new_tokens)
    return completions


@dataclass(frozen=True, slots=True)
class _Row:
    prompt: int
    generation: int


def _open_rows(
    prompts: Sequence[SamplePrompt], completions: Sequence[Sequence[Completion]], eos: int, longest: int
) -> list[_Row]:
    """Return the generations that are not over yet, having marked those that ended by themselves."""
    rows = []
    for place, prompt in enumerate(prompts):
        for generation in range(len(prompt.keys)):
            one = completions[place][generation]
            one.finished = one.finished or one.tokens[-1:] == [eos]
            if not one.finished and len(one.tokens) < longest:
                rows.append(_Row(place, generation))
    return rows


def _prefill(
    policy: Policy, prompts: Sequence[SamplePrompt], rows: Sequence[_Row], growing: Sequence[Completion]
) -> tuple[Tensor, Tensor, Any]:
    """Run what is known through the model: return logits [R, V] of the last token, mask and cache."""
    cache = policy.new_cache()
    if any(one.tokens for one in growing):
        known = [[*prompts[row.prompt].tokens, *one.tokens] for row, one in zip(rows, growing, strict=True)]
        tokens, mask = _pad_left(known, policy.pad_id, policy.device)
        return policy.logits(tokens, mask, keep=1, cache=cache)[:, -1], mask, cache
    wanted = sorted({row.prompt for row in rows})
    places = {prompt: place for place, prompt in enumerate(wanted)}
    owners = torch.tensor([places[row.prompt] for row in rows], device=policy.device)
    tokens, mask = _pad_left([prompts[prompt].tokens for prompt in wanted], policy.pad_id, policy.device)
    logits = policy.logits(tokens, mask, keep=1, cache=cache)[owners, -1]
    cache.batch_select_indices(owners)
    return logits, mask[owners], cache


def _absorb(
    growing: Sequence[Completion],
    drawn: list[Tensor],
    drawn_logprobs: list[Tensor],
    versions: Sequence[int],
    eos: int,
    longest: int,
) -> None:
    """Move what was drawn since the last time into the completions, each up to its end."""
    tokens: list[list[int]] = torch.cat(drawn, -1).tolist()
    logprobs: list[list[float]] = torch.cat(drawn_logprobs, -1).tolist()
    drawn.clear()
    drawn_logprobs.clear()
    for one, row, row_logprobs in zip(growing, tokens, logprobs, strict=True):
        if one.finished:
            continue
        ended = eos in row
        length = min(row.index(eos) + 1 if ended else len(row), longest - len(one.tokens))
        if not all(map(_is_finite, row_logprobs[:length])):
            raise NonFinitePolicyError(versions[0])
        one.tokens += row[:length]
        one.logprobs += row_logprobs[:length]
        one.versions += versions[:length]
        one.finished = one.tokens[-1] == eos


def token_logprobs(
    policy: Policy,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    *,
    temperature: float,
) -> TokenLogProbabilities:
    """Return what a policy says about completions that are given (a teacher-forced pass).

    Args:
        policy: The policy; gradients flow into it unless they are switched off outside.
        prompts: Prompt token ids, one for each row.
        completions: Completion token ids, one for each row, each at least one.
        temperature: Logits are divided by it, as in sampling.
    """
    device = policy.device
    before, before_mask = _pad_left(prompts, policy.pad_id, device)
    after, after_mask = _pad_right(completions, policy.pad_id, device)
    logits = policy.logits(
        torch.cat([before, after], -1), torch.cat([before_mask, after_mask], -1), keep=after.shape[1] + 1
    )
    # The logits at a token speak of the next one: one step back, and those at the last token of nothing.
    log_distribution = torch.log_softmax(logits[:, :-1] / temperature, -1)
    logprobs = log_distribution.gather(-1, after[..., None])[..., 0]
    with torch.no_grad():
        entropy = -(log_distribution.exp() * log_distribution).sum(-1)
    return TokenLogProbabilities(
        logprobs=logprobs.masked_fill(~after_mask, 0.0),
        entropy=entropy.masked_fill(~after_mask, 0.0),
        mask=after_mask,
    )


def _is_finite(value: float) -> bool:
    return value - value == 0.0


def _invert(log_distribution: Tensor, draws: Tensor) -> Tensor:
    """Return the token [R, 1] at which each row's cumulative distribution passes its number."""
    cumulative = log_distribution.double().exp().cumsum(-1)
    # The sum is 1 only up to rounding; and `right` never picks a token of probability 0.
    wanted = draws[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, wanted, right=True).clamp_max(log_distribution.shape[-1] - 1)


def _pad_left(rows: Sequence[Sequence[int]], pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    longest = max(map(len, rows))
    tokens = torch.tensor([[pad] * (longest - len(row)) + list(row) for row in rows], device=device)
    mask = torch.tensor([[False] * (longest - len(row)) + [True] * len(row) for row in rows], device=device)
    return tokens, mask


def _pad_right(rows: Sequence[Sequence[int]], pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    longest = max(map(len, rows))
    tokens = torch.tensor([list(row) + [pad] * (longest - len(row)) for row in rows], device=device)
    mask = torch.tensor([[True] * len(row) + [False] * (longest - len(row)) for row in rows], device=device)
    return tokens, mask
