"""Which invariants there are, where each is proved, and what follows from a violation.

===================  ===============================================================================================
proved               means
===================  ===============================================================================================
by events            in the step in which it is broken, at a cost that does not grow with the number of groups
by the sweep         when the background sweep comes by: it compares the shadow, the real owners and the rows
at the cut           only a captured cut, or what was written of it, can show it
===================  ===============================================================================================

Rule: what follows from a finding over a captured cut may be that the cut is refused; a live finding reports, and halts the
run if that is its policy. Nothing here suspends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from quiesce.errors import ConfigError
from quiesce.invariants.table import INVARIANTS, POLICIES

if TYPE_CHECKING:
    from quiesce.invariants.table import Policy
    from quiesce.invariants.violation import Severity

__all__ = ["AUDITED", "AuditedInvariant", "InvariantStatus", "Policies"]


@dataclass(frozen=True, slots=True)
class AuditedInvariant:
    """One invariant, as the auditor sees it.

    Attributes:
        name: Its name.
        severity: How bad a violation is.
        policy: What follows from one, unless configured otherwise.
        holds_when: When it holds, in one sentence.
        proved: Where: some of ``events``, ``sweep`` and ``cut``.
    """

    name: str
    severity: Severity
    policy: Policy
    holds_when: str
    proved: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class InvariantStatus:
    """What the auditor has to say of an invariant.

    Attributes:
        name: Its name.
        state: ``active``; ``at the cut`` where nothing before a cut can show it; or ``inactive`` in this run.
        why: Why it is not active, or "".
        policy: What follows from a violation.
        violations: Records of it that are open.
    """

    name: str
    state: str
    why: str
    policy: Policy
    violations: int


def _of_the_cut(name: str, *proved: str) -> AuditedInvariant:
    row = INVARIANTS[name]
    return AuditedInvariant(name, row.severity, row.policy, row.holds_when, (*proved, "cut"))


AUDITED: Final = MappingProxyType(
    {
        row.name: row
        for row in (
            _of_the_cut("single_owner", "events", "sweep"),
            _of_the_cut("conservation", "events", "sweep"),
            _of_the_cut("cursor_covers_buffer", "events", "sweep"),
            _of_the_cut("cursor_within_lookahead", "events", "sweep"),
            AuditedInvariant(
                "window_is_exclusive",
                "critical",
                "refuse_checkpoints",
                "No slot opens and no owner moves inside an exclusive window.",
                ("events",),
            ),
            _of_the_cut("cut_is_one_instant", "events"),
            _of_the_cut("rows_present", "sweep"),
            _of_the_cut("rows_not_orphaned", "sweep"),
            _of_the_cut("digest_matches"),
            AuditedInvariant(
                "gate_is_respected",
                "critical",
                "refuse_checkpoints",
                "No permit is granted while a gate is closed, no clear under that gate's permit starts then, epochs grow.",
                ("events",),
            ),
            _of_the_cut("versions_grow", "events", "sweep"),
            AuditedInvariant(
                "checkpoint_progress",
                "warning",
                "warn",
                "Drain, exclusive and write phases stay within their budgets.",
                ("events", "sweep"),
            ),
        )
    }
)
"""By name, in the order in which they are shown."""


class Policies:
    """What follows from a violation, by invariant.

    Args:
        overrides: Policies that are not the default, by invariant.
        checks: The users' own checks: their default policies, by name.

    Raises:
        ConfigError: If an invariant or a policy is unknown.
    """

    def __init__(
        self, overrides: Mapping[str, str] | None = None, checks: Mapping[str, str] | None = None
    ) -> None:
        self._policies: dict[str, Policy] = {name: row.policy for name, row in AUDITED.items()}
        for given, known_only in ((checks or {}, False), (overrides or {}, True)):
            for name, policy in given.items():
                if known_only and name not in self._policies:
                    known = ", ".join(self._policies)
                    raise ConfigError(f"policy.{name}", f"no such invariant; known are {known}")
                self._policies[name] = _policy(name, policy)

    def of(self, name: str, severity: str = "critical") -> Policy:
        """Return what follows from a violation of an invariant."""
        default: Policy = "refuse_checkpoints" if severity == "critical" else "warn"
        return self._policies.get(name, default)

    def at_the_cut(self) -> dict[str, str]:
        """Return all of them, for whoever judges cuts (:class:`quiesce.checkpoint.saver.Checkpointer`)."""
        return dict(self._policies)


def _policy(name: str, policy: str) -> Policy:
    for known in POLICIES:
        if policy == known:
            return known
    raise ConfigError(f"policy.{name}", f"{policy!r} is not one of {', '.join(POLICIES)}")
