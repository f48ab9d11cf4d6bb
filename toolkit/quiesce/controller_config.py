"""The controller's configuration, checked before anything starts.

Rule: a value that cannot work is refused here, by its key, and not later by a run that stands still. Nothing here suspends.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from quiesce.audit_config import AuditConfig
from quiesce.errors import ConfigError
from quiesce.sampler_config import SamplerConfig

__all__ = ["ControllerConfig"]


@dataclass(frozen=True)
class ControllerConfig:
    """How the controller runs. Times are seconds, sizes are prompt groups."""

    groups_per_step: int = 8
    """Prompt groups of one train step, and of one admitted batch."""

    generations_per_group: int = 8
    """Generations of each prompt."""

    sampler: SamplerConfig = field(default_factory=SamplerConfig)
    """Which groups may be admitted, trained, evicted."""

    buffer_capacity: int | None = None
    """Groups that may be admitted, ready and in training at once; null takes what the sampler needs, and a batch more where
    nothing else bounds admission."""

    spare_prompts: int = 0
    """Keep at least so many spare prompts to stand in for groups that fail for good; the pool is filled by whole batches."""

    max_attempts: int = 3
    """Rollout attempts of a group before it is substituted or dropped."""

    min_step_batch_fraction: float = 0.9
    """A failed group is not dropped but tried again if its step would fall below this share of a full batch."""

    max_refused_drops: int = 10
    """How many further attempts such a group gets before the run halts, naming it."""

    retry_backoff_seconds: float = 0.1
    """Pause before the second attempt; it doubles with every further one, up to 30 s."""

    generation_timeout_seconds: float = 300.0
    """Deadline of one generation call; past it the call is cancelled and counts as failed."""

    max_steps: int | None = None
    """Stop after so many train steps; null trains every epoch of the dataset."""

    save_every_steps: int = 10
    """Train steps between two checkpoints."""

    keep_checkpoints: int = 2
    """How many published checkpoints are kept."""

    drain_timeout_seconds: float = 60.0
    """How long a checkpoint waits for open slots before it gives up, naming them."""

    stall_report_seconds: float = 120.0
    """Report a stall, naming the group that the run waits for, once nothing has moved for so long."""

    stall_abort_seconds: float | None = None
    """Halt the run once nothing has moved for so long; null never does."""

    audit: AuditConfig = field(default_factory=AuditConfig)
    """What proves the invariants while the run goes on."""

    def __post_init__(self) -> None:
        """Refuse values that cannot work, naming the key."""
        for key in (
            "groups_per_step",
            "generations_per_group",
            "max_attempts",
            "save_every_steps",
            "keep_checkpoints",
        ):
            _require(key, getattr(self, key) >= 1, f"must be at least 1, not {getattr(self, key)}")
        for key in ("spare_prompts", "max_refused_drops", "retry_backoff_seconds"):
            _require(key, getattr(self, key) >= 0, f"cannot be negative, not {getattr(self, key)}")
        for key in ("generation_timeout_seconds", "drain_timeout_seconds", "stall_report_seconds"):
            _require(key, getattr(self, key) > 0, f"must be more than 0 seconds, not {getattr(self, key)}")
        _require(
            "min_step_batch_fraction",
            0 <= self.min_step_batch_fraction <= 1,
            f"is a share from 0 to 1, not {self.min_step_batch_fraction}",
        )
        _require(
            "max_steps",
            self.max_steps is None or self.max_steps >= 1,
            f"must be at least 1, not {self.max_steps}",
        )
        _require(
            "stall_abort_seconds",
            self.stall_abort_seconds is None or self.stall_abort_seconds > 0,
            f"must be more than 0 seconds, or null, not {self.stall_abort_seconds}",
        )
        _require(
            "buffer_capacity",
            self.buffer_capacity is None or self.buffer_capacity >= self.groups_per_step,
            f"must hold at least one step of {self.groups_per_step} groups, not {self.buffer_capacity}",
        )

    def capacity(self, required: int) -> int:
        """Return the buffer capacity in groups, given what the sampler requires."""
        if self.buffer_capacity is not None:
            return self.buffer_capacity
        return max(required, 2 * self.groups_per_step)


def _require(key: str, holds: bool, problem: str) -> None:  # noqa: FBT001 - reads as a sentence where it is called
    if not holds:
        raise ConfigError(key, problem)
