"""Sampling completions, and the log-probability of completions under a policy.

Rule: a completion depends on its key, its prompt and the weights, and on nothing else: every row has a stream
of uniform numbers of its own, hashed from (seed, group, attempt, generation), and inverts the cumulative
distribution with them. So the same call gives the same tokens alone, in a batch, after a restart and on a
retry; torch's random state is neither read nor changed. (Kernels round differently for different batch
shapes. A number that falls within that rounding error of a boundary can flip a token: one in a million in
float32, more often in bfloat16.)

There is neither top-k nor top-p: the recorded log-probability is that of the very distribution that was
sampled, which the ratio of the loss needs. Nothing here suspends.

Shapes: N prompts, R rows (generations of all prompts), P prompt tokens, C completion tokens, V vocabulary.
Prompts are padded on the left and completions on the right, so that column P is the first token of every
completion.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class SamplePrompt:
    """A prompt to complete.

    Attributes:
        tokens: Its token ids, at least one.
        keys: One key of :func:`stream_key` for each generation.
    """

    tokens: Sequence[int]
    keys: Sequence[str]


@dataclass(frozen=True, slots=True)
class Completion:
    """One sampled completion.

    Attributes:
        tokens: Its token ids, the end token included when it was drawn.
        logprobs: Log-probability of each token under the weights that drew it, at the sampling temperature,
            in nats.
        finished: Whether it ended by itself, before the longest length.
        version_from: Weight version that drew the first token.
        version_to: Weight version that drew the last token.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finished: bool
    version_from: int
    version_to: int


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
) -> list[list[Completion]] | None:
    """Sample every generation of every prompt in one batch.

    The prompts run through the model once and their cache is then repeated for each generation. When weights
    change between two tokens, the cache of the earlier tokens stays that of the earlier weights, as
    PipelineRL does (arXiv:2509.19128): the recorded log-probabilities are those of what really drew each
    token.

    Args:
        policy: The policy; the calling thread is its only user.
        prompts: What to complete, at least one.
        max_new_tokens: Longest completion, the end token included.
        temperature: Logits are divided by it.
        version: Called before each token is drawn: may load newer weights, returns the version now in force.
        cancelled: Called between tokens; True gives the batch up.

    Returns:
        The completions by prompt and generation, or None when the batch was given up.

    Raises:
        NonFinitePolicyError: If the policy diverged.
    """
    device = policy.device
    owners = [place for place, prompt in enumerate(prompts) for _ in prompt.keys]
    draws = uniform([key for prompt in prompts for key in prompt.keys], max_new_tokens).to(device)
    tokens, mask = _pad_left([prompt.tokens for prompt in prompts], policy.pad_id, device)
    rows = torch.tensor(owners, device=device)
    cache = policy.new_cache()

    versions = [version()]
    logits = policy.logits(tokens, mask, keep=1, cache=cache)[rows, -1]
    cache.batch_select_indices(rows)
    mask = mask[rows]
    done = torch.zeros(len(owners), dtype=torch.bool, device=device)
    drawn, drawn_logprobs = [], []
    for place in range(max_new_tokens):
        log_distribution = torch.log_softmax(logits / temperature, -1)
        chosen = _invert(log_distribution, draws[:, place])
        chosen_logprobs = log_distribution.gather(-1, chosen)
        drawn.append(chosen)
        drawn_logprobs.append(chosen_logprobs)
        done = done | (chosen[:, 0] == policy.eos_id)
        if place + 1 == max_new_tokens or bool(done.all()):
            break
        if cancelled():
            return None
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], -1)
        versions.append(version())
        logits = policy.logits(chosen, mask, keep=1, cache=cache)[:, -1]

    tokens_read: list[list[int]] = torch.cat(drawn, -1).tolist()
    logprobs_read: list[list[float]] = torch.cat(drawn_logprobs, -1).tolist()
    completions: list[list[Completion]] = [[] for _ in prompts]
    for owner, row, row_logprobs in zip(owners, tokens_read, logprobs_read, strict=True):
        ended = policy.eos_id in row
        length = row.index(policy.eos_id) + 1 if ended else len(row)
        if not all(map(_is_finite, row_logprobs[:length])):
            raise NonFinitePolicyError(versions[0])
        completions[owner].append(
            Completion(
                tokens=tuple(row[:length]),
                logprobs=tuple(row_logprobs[:length]),
                finished=ended,
                version_from=versions[0],
                version_to=versions[length - 1],
            )
        )
    return completions


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
