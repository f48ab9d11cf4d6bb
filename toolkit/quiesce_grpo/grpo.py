"""The GRPO objective: advantages within a group, a clipped ratio, corrections for rollouts of older weights.

Rule: pure functions of tensors; nothing here knows a model, a batch object or a device, and nothing here
suspends.

Group relative policy optimization (Shao et al. 2024, DeepSeekMath, arXiv:2402.03300, section 4.1) draws G
completions of each prompt and takes, as the advantage of each, its reward relative to the other ones. With π
the policy, β the policy that sampled (its log-probabilities were recorded while sampling), A the advantage
and r = π/β the ratio of a token,

    loss = − w · min(r A, clip(r, 1 − clip_low, 1 + clip_high) A)  [+ kl_coefficient · k3(π, reference)]

* The clip is PPO's (Schulman et al. 2017, arXiv:1707.06347, eq. 7), with separate bounds (DAPO,
  arXiv:2503.14476, section 3.1). It bounds nothing where A < 0 and r is large, which stale rollouts make
  common, so there the loss is bounded at ``dual_clip`` · |A| (Ye et al. 2020, arXiv:1912.09729).
* w corrects for rollouts that older weights drew. All weights are truncated at ``importance_cap``, which
  trades bias for bounded variance (Ionides 2008, doi:10.1198/106186008X320456; V-trace, arXiv:1802.01561),
  and carry no gradient:
    - ``none``: w = 1. r alone corrects the token itself, not how likely the rest of its completion has
      become.
    - ``sequence`` (default): w of a token is the product of the ratios of all *other* tokens of its
      completion, so that r · w is the importance ratio of the whole completion, which is what was rewarded
      (Precup et al. 2000, per-decision importance sampling, with a reward for the whole; GSPO,
      arXiv:2507.18071, argues for the sequence as the unit). The right one for short completions; over
      thousands of tokens a product says little.
    - ``decoupled``: the clip's ratio is taken against the policy that the step began with, and w = that
      policy / β for each token (Hilton et al. 2021, arXiv:2110.00641; AReaL, arXiv:2505.24298). For
      long completions.
* k3 = exp(q − p) − (q − p) − 1, with p and q the log-probabilities under the policy and the reference:
  unbiased for KL(π ‖ reference) where π drew the tokens, and never negative (Schulman 2020,
  joschu.net/blog/kl-approx.html; DeepSeekMath eq. 4).
* Aggregation: ``token``, the mean over all tokens of the step (DAPO section 3.3); ``sequence``, first the
  mean of each completion and then over completions (DeepSeekMath, which favours short right and long wrong
  answers); ``constant``, the sum over tokens divided by completions × longest length (Dr. GRPO,
  arXiv:2503.20783, section 3, free of either bias).
* ``normalise_std`` off leaves out the division by the group's deviation, which overweights prompts that are
  almost solved or almost hopeless (Dr. GRPO). It is on by default since the paper has it; on the tiny task
  neither form is better.

What of GRPO and its kin is left out, and why:

* Process supervision (DeepSeekMath 4.1.3) and the iterative re-training of a reward model (4.1.4): rewards
  here are verifiable and for whole answers, there is no reward model.
* Updating the reference policy between iterations (DeepSeekMath algorithm 1, line 3): the reference is the
  policy that training began with, and is off by default, as in DAPO section 2.3: without a learned reward
  there is little to over-optimise.
* Dynamic sampling, which draws further prompts until no group is constant (DAPO 3.2): which prompts are read
  is the controller's matter here, with exactly-once accounting; a constant group has zero advantage, adds no
  gradient and is counted in the metrics.
* Overlong reward shaping (DAPO 3.4): answers are short; one that is cut off is scored as it stands.
* Entropy bonus: absent from the paper; clip-higher is there instead.
* Importance weights inside the KL term (its gradient is biased for stale rollouts): it is a small
  regulariser, off by default.
* Top-k and top-p: see `quiesce_grpo.sampling`.

Shapes: R rows (completions), C tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quiesce_grpo.config import Aggregation, GrpoConfig

__all__ = ["LossTerms", "group_advantages", "grpo_loss", "k3_divergence", "normaliser"]


@dataclass(frozen=True, slots=True)
class LossTerms:
    """The loss of some rows of a step, and sums over their tokens for its metrics.

    Attributes:
        loss: Scalar with gradient; the losses of all parts of a step add up to the step's.
        sums: Sums over tokens: ``clipped``, ``ratio``, ``weight``, ``kl`` (k3 of how far the policy has moved
            from the one that sampled), ``kl_reference``. Tensors without gradient.
    """

    loss: Tensor
    sums: dict[str, Tensor]


def group_advantages(rewards: Tensor, *, normalise_std: bool = True, std_floor: float = 1e-4) -> Tensor:
    """Return the advantage of each generation of one group.

    Args:
        rewards: Rewards of its generations [G].
        normalise_std: Divide by the group's population standard deviation.
        std_floor: Added to that deviation.

    Returns:
        Advantages [G], float32, of mean zero; exactly zero when all rewards are equal.
    """
    rewards = rewards.double()
    if bool((rewards == rewards[0]).all()):
        # Rounding in the mean, divided by the floor, would make noise of what carries no information.
        return torch.zeros_like(rewards, dtype=torch.float32)
    centred = rewards - rewards.mean()
    if normalise_std:
        centred = centred / (rewards.std(correction=0) + std_floor)
    return centred.float()


def k3_divergence(logprobs: Tensor, reference: Tensor) -> Tensor:
    """Return the k3 estimate of KL(policy ‖ reference) at each token, in nats, never negative.

    Args:
        logprobs: Log-probabilities under the policy, of tokens that it drew.
        reference: Log-probabilities under the reference, of the same shape.
    """
    difference = reference - logprobs
    return torch.expm1(difference) - difference


def normaliser(lengths: Sequence[int], aggregation: Aggregation, max_tokens: int) -> float:
    """Return what the summed losses of an optimizer step are divided by.

    Args:
        lengths: Tokens of each completion of the step.
        aggregation: How tokens become one number.
        max_tokens: Longest completion that the engine allows.
    """
    if aggregation == "token":
        return float(sum(lengths))
    return float(len(lengths) * (max_tokens if aggregation == "constant" else 1))


def grpo_loss(
    logprobs: Tensor,
    behaviour: Tensor,
    advantages: Tensor,
    mask: Tensor,
    config: GrpoConfig,
    *,
    divisor: float,
    proximal: Tensor | None = None,
    reference: Tensor | None = None,
) -> LossTerms:
    """Return the GRPO loss of rows; see the module for the formula.

    Args:
        logprobs: Log-probabilities under the policy, with gradient [R, C].
        behaviour: Recorded log-probabilities under the policy that sampled [R, C].
        advantages: Advantage of each row [R].
        mask: True for real tokens [R, C].
        config: Clips, correction, KL and aggregation.
        divisor: :func:`normaliser` of the whole optimizer step that these rows are a part of.
        proximal: Log-probabilities under the policy that the step began with [R, C], for ``decoupled`` with
            several updates a batch; None means the policy itself.
        reference: Log-probabilities under the reference policy [R, C], with a KL penalty.
    """
    current = logprobs.detach()
    drift = (current - behaviour).masked_fill(~mask, 0.0)
    if config.correction == "decoupled":
        anchor = current if proximal is None else proximal
        log_weight = (anchor - behaviour).masked_fill(~mask, 0.0)
    else:
        anchor = behaviour
        rest = drift.sum(-1, keepdim=True) - drift
        log_weight = rest if config.correction == "sequence" else torch.zeros_like(drift)
    weight = log_weight.exp().clamp_max(config.importance_cap)

    ratio = (logprobs - anchor).masked_fill(~mask, 0.0).exp()
    advantage = advantages[:, None]
    bounded = ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    gain = torch.minimum(ratio * advantage, bounded * advantage)
    if config.dual_clip:
        gain = torch.where(advantage < 0, torch.maximum(gain, config.dual_clip * advantage), gain)
    loss = -weight * gain
    kl_reference = torch.zeros_like(drift)
    if reference is not None and config.kl_coefficient:
        penalty = k3_divergence(logprobs, reference)
        loss = loss + config.kl_coefficient * penalty
        kl_reference = penalty.detach()
    loss = loss.masked_fill(~mask, 0.0)
    if config.aggregation == "sequence":
        loss = loss / mask.sum(-1, keepdim=True).clamp_min(1)

    with torch.no_grad():
        # A token counts as clipped when its gradient is gone: a bound is what was chosen.
        clipped = ((advantage > 0) & (ratio > 1.0 + config.clip_high)) | (
            (advantage < 0) & (ratio < 1.0 - config.clip_low)
        )
        if config.dual_clip:
            clipped = clipped | ((advantage < 0) & (ratio > config.dual_clip))
        per_token = {
            "clipped": clipped.float(),
            "ratio": ratio.detach(),
            "weight": weight,
            # β drew the tokens, so the estimate of KL(β ‖ π) is k3 with π in the reference's place.
            "kl": k3_divergence(behaviour, current),
            "kl_reference": kl_reference,
        }
        sums = {name: value.masked_fill(~mask, 0.0).sum() for name, value in per_token.items()}
    return LossTerms(loss=loss.sum() / divisor, sums=sums)
