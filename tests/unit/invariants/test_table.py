"""The table of invariants, and the findings that come out of it."""

from __future__ import annotations

import json

from quiesce.invariants import INVARIANTS, POLICIES, Violation
from quiesce.telemetry import names


def test_every_row_is_named_after_its_function_and_known_to_the_catalogue() -> None:
    """One name everywhere: function, table, metrics."""
    assert all(name == row.check.__name__ for name, row in INVARIANTS.items())
    assert set(INVARIANTS) <= set(names.INVARIANTS)


def test_critical_invariants_refuse_checkpoints_and_warnings_warn() -> None:
    """The defaults; each can be configured otherwise."""
    policies = {row.policy for row in INVARIANTS.values() if row.severity == "critical"}

    assert policies == {"refuse_checkpoints"}
    assert INVARIANTS["rows_not_orphaned"].policy == "warn"
    assert policies | {"warn"} <= set(POLICIES)


def test_every_row_says_when_it_holds() -> None:
    """One sentence, for reports and documentation."""
    assert all(row.holds_when.endswith(".") for row in INVARIANTS.values())


def test_a_violation_explains_itself_and_is_told_from_others() -> None:
    """Its line is readable, its JSON plain, and its identity ignores the cut it was found in."""
    one = Violation(
        "single_owner", "critical", "g is owned twice", ("g",), ("ledger", "buffer"), "cut-1", {"n": 1}
    )
    later = Violation(
        "single_owner", "critical", "g is owned twice", ("g",), ("ledger", "buffer"), "cut-2", {"n": 2}
    )
    other = Violation("single_owner", "critical", "h is owned twice", ("h",), ("ledger", "buffer"), "cut-1")

    assert str(one) == "critical single_owner: g is owned twice"
    assert json.loads(json.dumps(one.to_json()))["owners"] == ["ledger", "buffer"]
    assert one.identity == later.identity != other.identity
