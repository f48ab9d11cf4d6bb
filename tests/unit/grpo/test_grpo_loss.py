"""The objective against values computed by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from quiesce_grpo.config import GrpoConfig
from quiesce_grpo.grpo import group_advantages, grpo_loss, k3_divergence, normaliser

PLAIN = GrpoConfig(correction="none", dual_clip=0.0)


def logs(*rows: list[float]) -> Tensor:
    """Return the logarithms of probabilities, one list a row."""
    return torch.tensor([[math.log(value) for value in row] for row in rows])


def every(rows: int, tokens: int) -> Tensor:
    """Return a mask that hides nothing."""
    return torch.ones(rows, tokens, dtype=torch.bool)


def test_advantages_are_rewards_relative_to_the_group() -> None:
    """Rewards 0, 0, 0, 1: mean 1/4, deviation √3/4."""
    advantages = group_advantages(torch.tensor([0.0, 0.0, 0.0, 1.0]), std_floor=1e-9)

    torch.testing.assert_close(advantages, torch.tensor([-1.0, -1.0, -1.0, 3.0]) / math.sqrt(3))


def test_advantages_without_the_deviation_are_centred_rewards() -> None:
    """Dr. GRPO's form."""
    advantages = group_advantages(torch.tensor([0.0, 0.0, 0.0, 1.0]), normalise_std=False)

    torch.testing.assert_close(advantages, torch.tensor([-0.25, -0.25, -0.25, 0.75]))


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 1 / 3])
def test_advantages_of_a_constant_group_are_exactly_zero(value: float) -> None:
    """Rounding of the mean must not become an advantage."""
    assert group_advantages(torch.full((7,), value)).tolist() == [0.0] * 7


def test_the_loss_of_two_rows_is_what_a_hand_computes() -> None:
    """Ratios 1.1 and 0.5 at advantage 2, 0.9 at advantage −1; mean over three tokens."""
    logprobs = logs([0.55, 0.25], [0.45, 1.0])
    behaviour = logs([0.5, 0.5], [0.5, 1.0])
    mask = torch.tensor([[True, True], [True, False]])

    terms = grpo_loss(logprobs, behaviour, torch.tensor([2.0, -1.0]), mask, PLAIN, divisor=3.0)

    assert float(terms.loss) == pytest.approx(-(1.1 * 2 + 0.5 * 2 + 0.9 * -1) / 3)


@pytest.mark.parametrize(
    "ratio, advantage, expected, has_gradient",
    [
        (1.5, 1.0, -1.2, False),  # gained enough
        (0.5, 1.0, -0.5, True),  # lost, may come back
        (0.5, -1.0, 0.8, False),  # pushed down enough
        (1.5, -1.0, 1.5, True),  # risen though it was bad
        (9.0, -1.0, 3.0, False),  # the dual clip
    ],
)
def test_the_ratio_is_clipped_on_the_side_that_would_gain(
    ratio: float, advantage: float, expected: float, *, has_gradient: bool
) -> None:
    """A token that moved far enough in its advantage's direction gives no gradient; any other does."""
    config = GrpoConfig(correction="none", clip_low=0.2, clip_high=0.2, dual_clip=3.0)
    logprobs = torch.tensor([[math.log(ratio) - 3.0]], requires_grad=True)

    terms = grpo_loss(
        logprobs, torch.tensor([[-3.0]]), torch.tensor([advantage]), every(1, 1), config, divisor=1.0
    )
    terms.loss.backward()  # type: ignore[no-untyped-call] # torch does not annotate it

    assert float(terms.loss.detach()) == pytest.approx(expected, rel=1e-5)
    assert logprobs.grad is not None
    assert bool(logprobs.grad.any()) is has_gradient
    assert float(terms.sums["clipped"]) == (0.0 if has_gradient else 1.0)


def test_clip_higher_lets_a_good_token_rise_further() -> None:
    """The two bounds are separate settings."""
    config = GrpoConfig(correction="none", clip_low=0.2, clip_high=0.6, dual_clip=0.0)

    terms = grpo_loss(logs([0.75]), logs([0.5]), torch.tensor([1.0]), every(1, 1), config, divisor=1.0)

    assert float(terms.loss) == pytest.approx(-1.5)


def test_masked_tokens_count_for_nothing_even_when_they_are_not_finite() -> None:
    """Neither the loss, nor its gradient, nor a metric sees a masked token."""
    logprobs = torch.tensor([[-1.0, -50.0]], requires_grad=True)
    behaviour = torch.tensor([[-1.0, float("-inf")]])
    mask = torch.tensor([[True, False]])

    terms = grpo_loss(logprobs, behaviour, torch.tensor([1.0]), mask, GrpoConfig(), divisor=1.0)
    terms.loss.backward()  # type: ignore[no-untyped-call] # torch does not annotate it

    assert float(terms.loss.detach()) == pytest.approx(-1.0)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [[-1.0, 0.0]]
    assert float(terms.sums["ratio"]) == 1.0
    assert float(terms.sums["kl"]) == 0.0


def test_on_policy_the_gradient_is_that_of_plain_policy_gradient() -> None:
    """With the policy that sampled, every correction gives −A per token, whatever the clips."""
    for correction in ("none", "sequence", "decoupled"):
        logprobs = logs([0.3, 0.4]).requires_grad_()

        terms = grpo_loss(
            logprobs,
            logprobs.detach(),
            torch.tensor([0.7]),
            every(1, 2),
            GrpoConfig(correction=correction),
            divisor=2.0,
        )
        terms.loss.backward()  # type: ignore[no-untyped-call] # torch does not annotate it

        assert logprobs.grad is not None
        torch.testing.assert_close(logprobs.grad, torch.tensor([[-0.35, -0.35]]))


def test_the_sequence_correction_weighs_a_token_by_the_ratios_of_the_others() -> None:
    """Ratios 1.1 and 0.9: the whole completion's 0.99 stands at both tokens."""
    config = GrpoConfig(correction="sequence", dual_clip=0.0)

    terms = grpo_loss(
        logs([0.55, 0.45]), logs([0.5, 0.5]), torch.tensor([1.0]), every(1, 2), config, divisor=2.0
    )

    assert float(terms.loss) == pytest.approx(-0.99)
    assert float(terms.sums["weight"]) == pytest.approx(0.9 + 1.1)


def test_importance_weights_are_truncated_and_carry_no_gradient() -> None:
    """A ratio of 8 at one token weighs the other by the cap, not by 8, and gets no gradient from it."""
    config = GrpoConfig(correction="sequence", importance_cap=2.0, clip_high=0.2, dual_clip=0.0)
    logprobs = logs([0.8, 0.5]).requires_grad_()

    terms = grpo_loss(logprobs, logs([0.1, 0.5]), torch.tensor([1.0]), every(1, 2), config, divisor=1.0)
    terms.loss.backward()  # type: ignore[no-untyped-call] # torch does not annotate it

    assert float(terms.loss.detach()) == pytest.approx(-(1.2 * 1.0 + 2.0 * 1.0))
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, torch.tensor([[0.0, -2.0]]))


def test_the_decoupled_correction_clips_against_the_policy_that_the_step_began_with() -> None:
    """Policy 0.6, proximal 0.5, behaviour 0.4: ratio 1.2 of the first two, weight 1.25 of the last two."""
    config = GrpoConfig(correction="decoupled", clip_high=0.3, dual_clip=0.0)

    terms = grpo_loss(
        logs([0.6]),
        logs([0.4]),
        torch.tensor([1.0]),
        every(1, 1),
        config,
        divisor=1.0,
        proximal=logs([0.5]),
    )

    assert float(terms.loss) == pytest.approx(-1.2 * 1.25)


def test_the_kl_estimate_is_zero_for_identical_policies_and_never_negative() -> None:
    """k3 of log-probabilities with themselves, and with others on either side."""
    logprobs = logs([0.2, 0.5, 0.9])

    assert k3_divergence(logprobs, logprobs).tolist() == [[0.0, 0.0, 0.0]]
    assert bool((k3_divergence(logprobs, logs([0.9, 0.1, 0.1])) > 0).all())


def test_the_kl_estimate_is_right_on_average() -> None:
    """Weighted by the policy's own probabilities, k3 is the divergence itself."""
    policy, reference = logs([0.2, 0.5, 0.3]), logs([0.4, 0.4, 0.2])

    expected = (policy.exp() * (policy - reference)).sum()

    torch.testing.assert_close((policy.exp() * k3_divergence(policy, reference)).sum(), expected)


def test_the_kl_penalty_is_added_with_its_coefficient() -> None:
    """A ratio of 2 from policy to reference gives 2 − 1 − ln 2 for each token."""
    config = GrpoConfig(correction="none", kl_coefficient=0.5)

    terms = grpo_loss(
        logs([0.25]),
        logs([0.25]),
        torch.tensor([0.0]),
        every(1, 1),
        config,
        divisor=1.0,
        reference=logs([0.5]),
    )

    assert float(terms.loss) == pytest.approx(0.5 * (1 - math.log(2)))
    assert float(terms.sums["kl_reference"]) == pytest.approx(1 - math.log(2))


@pytest.mark.parametrize(
    "aggregation, expected",
    [
        ("token", -(1.0 * 1 + 2.0 * 3) / 4),
        ("sequence", -(1.0 + 2.0) / 2),
        ("constant", -(1.0 * 1 + 2.0 * 3) / (2 * 5)),
    ],
)
def test_aggregations_weigh_lengths_differently(aggregation: str, expected: float) -> None:
    """One token at advantage 1, three at advantage 2, at most five."""
    config = GrpoConfig(correction="none", aggregation=aggregation)  # type: ignore[arg-type] # from the table
    logprobs = torch.full((2, 3), -1.0)
    mask = torch.tensor([[True, False, False], [True, True, True]])
    divisor = normaliser([1, 3], config.aggregation, 5)

    terms = grpo_loss(logprobs, logprobs, torch.tensor([1.0, 2.0]), mask, config, divisor=divisor)

    assert float(terms.loss) == pytest.approx(expected)


@pytest.mark.parametrize("aggregation", ["token", "sequence", "constant"])
def test_parts_of_a_step_add_up_to_the_whole(aggregation: str) -> None:
    """Accumulating gradients row by row is the same step."""
    config = GrpoConfig(aggregation=aggregation)  # type: ignore[arg-type] # from the table
    logprobs, behaviour = logs([0.3, 0.6], [0.5, 0.2]), logs([0.35, 0.5], [0.4, 0.3])
    advantages = torch.tensor([1.0, -0.5])
    mask = torch.tensor([[True, True], [True, False]])
    divisor = normaliser([2, 1], config.aggregation, 4)

    whole = grpo_loss(logprobs, behaviour, advantages, mask, config, divisor=divisor).loss
    parts = sum(
        grpo_loss(
            logprobs[row : row + 1],
            behaviour[row : row + 1],
            advantages[row : row + 1],
            mask[row : row + 1],
            config,
            divisor=divisor,
        ).loss
        for row in range(2)
    )

    torch.testing.assert_close(torch.as_tensor(parts), whole)
