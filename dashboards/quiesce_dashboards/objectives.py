"""What the alerts measure a run by: every number of a rule, in one object.

Rule: a number that stands in a rule stands here first, with its unit. Objectives of the window are those that the
process counts by: the catalogue's, unless the run was given others. Nothing here suspends.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Final

from quiesce.errors import ConfigError
from quiesce.telemetry import names
from quiesce.types import PHASES

__all__ = ["PHASE_LIMITS", "RUNBOOKS", "AlertConfig", "duration"]

RUNBOOKS: Final = "https://quiesce.readthedocs.io/en/latest/runbooks"
"""Where the runbook pages are, unless somebody keeps them elsewhere."""

PHASE_LIMITS: Final[Mapping[str, float]] = {
    "fence": 120.0,
    "drain": 120.0,
    "exclusive": 10.0,
    "verify": 600.0,
    "stage": 600.0,
    "write": 1200.0,
    "publish": 120.0,
}
"""Seconds after which a phase that still runs is stuck. Fence and drain give up by themselves after 60 s, so
twice that means that giving up failed; the exclusive phase copies references and takes milliseconds."""


@dataclass(frozen=True, slots=True)
class AlertConfig:
    """Numbers of the rules.

    Attributes:
        runbook_base_url: What a page's file name is appended to.
        runbook_suffix: What ends a page's address.
        window_objectives: Seconds that a phase of the window is meant to stay under: those that the run counts by.
        breaches: Windows over their objective in 6 h that are too many.
        window_budget_ratio: Share of an hour for which the barrier may be closed.
        overdue_intervals: After so many expected intervals without a checkpoint it is overdue.
        violation_seconds: How long a violation is shown after it was last seen.
        phase_limits: Seconds after which a phase that still runs is stuck.
        failing_seconds: How long the last attempt to save may have failed.
        gate_closed_seconds: How long a snapshot gate may be closed.
        cleanup_backlog_calls: Calls that may wait to be cleared; submitters wait at 128.
        cleanup_failures: Failed clears in an hour that are too many.
        lost_spans: Spans lost in an hour that are too many.
        run_down_seconds: How long a run may be unreachable.
    """

    runbook_base_url: str = RUNBOOKS
    runbook_suffix: str = ".html"
    window_objectives: Mapping[str, float] = field(default_factory=lambda: dict(names.OBJECTIVES), hash=False)
    breaches: int = 2
    window_budget_ratio: float = 0.005
    overdue_intervals: float = 3.0
    violation_seconds: float = 1800.0
    phase_limits: Mapping[str, float] = field(default_factory=lambda: dict(PHASE_LIMITS), hash=False)
    failing_seconds: float = 60.0
    gate_closed_seconds: float = 120.0
    cleanup_backlog_calls: int = 96
    cleanup_failures: int = 2
    lost_spans: int = 100
    run_down_seconds: float = 120.0

    def __post_init__(self) -> None:
        """Refuse what no rule can be made of.

        Raises:
            ConfigError: If a number is not positive, or a phase is unknown.
        """
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, int | float) and not (math.isfinite(value) and value > 0):
                raise ConfigError(f"alerts.{each.name}", f"{value!r} is not a positive number")
        for key, given, known in (
            ("window_objectives", self.window_objectives, tuple(names.OBJECTIVES)),
            ("phase_limits", self.phase_limits, PHASES),
        ):
            if set(given) != set(known):
                raise ConfigError(f"alerts.{key}", f"has to name exactly {', '.join(known)}")
            for phase, seconds in given.items():
                if not (math.isfinite(seconds) and seconds > 0):
                    raise ConfigError(f"alerts.{key}.{phase}", f"{seconds!r} is not a positive number")

    def runbook(self, alert: str) -> str:
        """Return the address of an alert's page."""
        return f"{self.runbook_base_url.rstrip('/')}/{alert}{self.runbook_suffix}"


def duration(seconds: float) -> str:
    """Return a time as PromQL writes it, to the millisecond.

    Args:
        seconds: The time.
    """
    return f"{seconds:.0f}s" if seconds == int(seconds) else f"{max(1, round(seconds * 1000))}ms"
