"""The controller's configuration refuses what cannot work, by its key."""

from __future__ import annotations

from typing import Any

import pytest

from quiesce import ControllerConfig
from quiesce.errors import ConfigError

IMPOSSIBLE: list[tuple[str, Any]] = [
    ("groups_per_step", 0),
    ("generations_per_group", 0),
    ("max_attempts", 0),
    ("save_every_steps", 0),
    ("keep_checkpoints", 0),
    ("spare_prompts", -1),
    ("max_refused_drops", -1),
    ("retry_backoff_seconds", -0.1),
    ("retry_backoff_seconds", float("nan")),
    ("generation_timeout_seconds", 0.0),
    ("drain_timeout_seconds", 0.0),
    ("stall_report_seconds", 0.0),
    ("stall_report_seconds", float("nan")),
    ("min_step_batch_fraction", -0.1),
    ("min_step_batch_fraction", 1.1),
    ("max_steps", 0),
    ("stall_abort_seconds", 0.0),
    ("buffer_capacity", 7),
]


@pytest.mark.parametrize("key, value", IMPOSSIBLE)
def test_an_impossible_value_is_refused_by_its_key(key: str, value: Any) -> None:  # noqa: ANN401 - of any type
    """Each value that cannot work is a ConfigError whose message starts with the key at fault."""
    with pytest.raises(ConfigError, match=rf"^{key}\b"):
        ControllerConfig(**{key: value})


@pytest.mark.parametrize(
    "key, value",
    [
        ("max_steps", None),
        ("max_steps", 1),
        ("stall_abort_seconds", None),
        ("min_step_batch_fraction", 0.0),
        ("min_step_batch_fraction", 1.0),
        ("buffer_capacity", 8),
        ("retry_backoff_seconds", 0.0),
    ],
)
def test_the_bounds_themselves_are_allowed(key: str, value: Any) -> None:  # noqa: ANN401 - of any type
    """The smallest and largest values that make sense are taken."""
    assert getattr(ControllerConfig(**{key: value}), key) == value


def test_the_capacity_is_what_the_sampler_needs_and_never_less_than_two_steps() -> None:
    """Without a configured capacity, the sampler's need counts, and two full steps where it needs less."""
    config = ControllerConfig(groups_per_step=4)

    assert config.capacity(12) == 12
    assert config.capacity(4) == 8


def test_a_configured_capacity_is_taken_as_it_is() -> None:
    """Whether it is enough is judged where the sampler is known; here it is not changed in silence."""
    assert ControllerConfig(groups_per_step=4, buffer_capacity=5).capacity(12) == 5
