"""The auditor's configuration: which checks there are, what follows from a violation, whether drills are allowed.

Rule: what cannot work is refused here, by its key, before anything starts; a check of the user's is imported to find that
out. Nothing here suspends.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quiesce.auditor.checks import load_checks
from quiesce.auditor.incremental import PHASE_BUDGETS
from quiesce.auditor.policies import AUDITED, Policies
from quiesce.auditor.sweep import Pace
from quiesce.errors import ConfigError
from quiesce.invariants.table import POLICIES

if TYPE_CHECKING:
    from quiesce.auditor.checks import UserCheck

__all__ = ["AuditConfig"]


@dataclass(frozen=True)
class AuditConfig:
    """What proves the invariants while the run goes on."""

    enabled: bool = True
    """Attach the auditor; without it, invariants are judged by each captured cut alone."""

    policies: dict[str, str] = field(default_factory=dict)
    """What follows from a violation, by invariant or check: ``warn``, ``refuse_checkpoints`` or ``halt``."""

    checks: list[str] = field(default_factory=list)
    """Further checks, ``module:ClassName`` each."""

    budgets: dict[str, float] = field(default_factory=dict)
    """Seconds that a phase of a checkpoint may take, by phase: ``drain`` (60 unless set), ``exclusive`` (5), ``write``
    (600)."""

    pace: Pace = field(default_factory=Pace)
    """How fast the background sweep goes."""

    drills: bool = False
    """Let ``quiesce drill --run-dir`` inject faults into this run, to test an alert chain end to end."""

    def __post_init__(self) -> None:
        """Refuse values that cannot work, naming the key."""
        for name, policy in self.policies.items():
            if policy not in POLICIES:
                raise ConfigError(
                    f"audit.policies.{name}", f"must be one of {', '.join(POLICIES)}, not {policy!r}"
                )
        for phase, seconds in self.budgets.items():
            if phase not in PHASE_BUDGETS:
                raise ConfigError(
                    f"audit.budgets.{phase}", f"no such phase; known are {', '.join(PHASE_BUDGETS)}"
                )
            if not seconds > 0:
                raise ConfigError(f"audit.budgets.{phase}", f"must be more than 0 seconds, not {seconds}")
        for key in ("rest", "least_seconds", "between_seconds", "orphan_seconds"):
            value = getattr(self.pace, key)
            if not value >= 0:
                raise ConfigError(f"audit.pace.{key}", f"cannot be negative, not {value}")
        if self.drills and not self.enabled:
            raise ConfigError("audit.drills", "needs audit.enabled: without the auditor no drill is noticed")

    def phase_budgets(self) -> dict[str, float]:
        """Return the budget of each phase, in seconds."""
        return {**PHASE_BUDGETS, **self.budgets}

    def load(self) -> tuple[tuple[UserCheck, ...], Policies]:
        """Import and build the further checks, and return them with what follows from each violation.

        Without the auditor there are none, and their policies count for nothing.

        Raises:
            ConfigError: If a check cannot be imported or built, or a policy names none of the invariants and checks.
        """
        try:
            checks = load_checks(self.checks) if self.enabled else ()
        except ConfigError as error:
            raise ConfigError("audit.checks", error.problem) from error
        try:
            policies = {
                name: policy for name, policy in self.policies.items() if self.enabled or name in AUDITED
            }
            return checks, Policies(policies, {check.name: check.policy for check in checks})
        except ConfigError as error:
            raise ConfigError(
                f"audit.{error.key.replace('policy.', 'policies.', 1)}", error.problem
            ) from error
