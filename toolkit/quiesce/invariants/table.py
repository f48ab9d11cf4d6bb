"""Every invariant that a cut is judged by: what it says, how bad it is, what follows, and who checks it.

Rule: the table is the whole list; whoever checks, goes through it. Nothing here suspends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Literal

from quiesce.invariants import checks
from quiesce.invariants.facts import CutFacts
from quiesce.invariants.violation import Severity, Violation

if TYPE_CHECKING:
    from quiesce.checkpoint.cut import CutState
    from quiesce.observers import Hub

__all__ = ["INVARIANTS", "POLICIES", "Invariant", "Policy", "check_cut", "critical"]

Policy = Literal["warn", "refuse_checkpoints", "halt"]
POLICIES: Final = ("warn", "refuse_checkpoints", "halt")
"""What follows from a violation: it is reported; the cut is not published either; the run ends too."""

Check = Callable[["CutState", CutFacts], list[Violation]]


@dataclass(frozen=True, slots=True)
class Invariant:
    """One row of the table.

    Attributes:
        name: Its name, everywhere.
        severity: How bad a violation is.
        policy: What follows from one, unless configured otherwise.
        holds_when: When it holds, in one sentence.
        check: The pure function.
        applies: Whether the facts that it needs are known.
    """

    name: str
    severity: Severity
    policy: Policy
    holds_when: str
    check: Check
    applies: Callable[[CutFacts], bool]


def _always(_facts: CutFacts) -> bool:
    return True


def _row(check: Check, *, warns: bool = False, applies: Callable[[CutFacts], bool] = _always) -> Invariant:
    return Invariant(
        name=check.__name__,
        severity="warning" if warns else "critical",
        policy="warn" if warns else "refuse_checkpoints",
        holds_when=(check.__doc__ or "").strip(),
        check=check,
        applies=applies,
    )


INVARIANTS: Final = MappingProxyType(
    {
        row.name: row
        for row in (
            _row(checks.single_owner),
            _row(checks.conservation),
            _row(checks.cursor_covers_buffer),
            _row(checks.cursor_within_lookahead),
            _row(checks.cut_is_one_instant),
            _row(checks.rows_present, applies=lambda facts: facts.rows is not None),
            _row(
                checks.rows_not_orphaned,
                warns=True,
                applies=lambda facts: (
                    facts.rows is not None and not facts.rows.on_disk and facts.rows.settling is not None
                ),
            ),
            _row(checks.digest_matches, applies=lambda facts: facts.seals is not None),
            _row(checks.versions_grow, applies=lambda facts: facts.parent is not None),
        )
    }
)
"""By name, in the order in which they are checked."""


def check_cut(state: CutState, facts: CutFacts | None = None, *, hub: Hub | None = None) -> list[Violation]:
    """Judge a cut by every invariant whose facts are known.

    Args:
        state: The cut.
        facts: What is known beside it; None means nothing.
        hub: Where ``invariant_checked`` and ``invariant_violated`` are reported; None reports nowhere.

    Returns:
        What does not hold, in the order of the table.
    """
    facts = CutFacts() if facts is None else facts
    found: list[Violation] = []
    for invariant in INVARIANTS.values():
        if not invariant.applies(facts):
            continue
        violations = invariant.check(state, facts)
        if hub is not None:
            hub.fire("invariant_checked", invariant.name)
            for violation in violations:
                hub.fire("invariant_violated", violation)
        found += violations
    return found


def critical(violations: Iterable[Violation]) -> list[Violation]:
    """Return the critical ones: a cut that has any is not published."""
    return [violation for violation in violations if violation.severity == "critical"]
