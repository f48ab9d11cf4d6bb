"""The auditor's configuration: what cannot work is refused by its key, and a check of the user's is built from it."""

from __future__ import annotations

from typing import Any

import pytest

from quiesce.audit_config import AuditConfig
from quiesce.auditor import PHASE_BUDGETS, Pace
from quiesce.errors import ConfigError

HERE = "tests.unit.test_audit_config"


class LooksAround:
    """A check that never finds anything."""

    name = "looks_around"
    severity = "critical"

    def sweep(self, owners: object) -> None:
        """Look."""


class Nameless:
    """A check without a name."""

    def sweep(self, owners: object) -> None:
        """Look."""


@pytest.mark.parametrize(
    "key, values",
    [
        ("audit.policies.single_owner", {"policies": {"single_owner": "shout"}}),
        ("audit.budgets.fence", {"budgets": {"fence": 1.0}}),
        ("audit.budgets.write", {"budgets": {"write": 0.0}}),
        ("audit.pace.rest", {"pace": Pace(rest=-1.0)}),
        ("audit.pace.orphan_seconds", {"pace": Pace(orphan_seconds=float("nan"))}),
        ("audit.drills", {"enabled": False, "drills": True}),
    ],
)
def test_what_cannot_work_is_refused_by_its_key(key: str, values: dict[str, Any]) -> None:
    """The message starts with the key, so that a person finds it in the file."""
    with pytest.raises(ConfigError) as caught:
        AuditConfig(**values)

    assert caught.value.key == key


@pytest.mark.parametrize(
    "key, values",
    [
        ("audit.policies.nobody", {"policies": {"nobody": "warn"}}),
        ("audit.checks", {"checks": ["tests.no_such_module:Check"]}),
        ("audit.checks", {"checks": [f"{HERE}:Nameless"]}),
        ("audit.checks", {"checks": [f"{HERE}:LooksAround", f"{HERE}:LooksAround"]}),
    ],
)
def test_what_only_loading_shows_is_refused_then(key: str, values: dict[str, Any]) -> None:
    """A check that cannot be imported, and a policy for something that is neither an invariant nor a check."""
    config = AuditConfig(**values)

    with pytest.raises(ConfigError) as caught:
        config.load()

    assert caught.value.key == key


def test_a_check_has_its_own_policy_unless_one_is_configured() -> None:
    """By its severity, or by name; the built-in invariants keep theirs."""
    checks, policies = AuditConfig(checks=[f"{HERE}:LooksAround"]).load()
    _, halting = AuditConfig(
        checks=[f"{HERE}:LooksAround"], policies={"looks_around": "halt", "single_owner": "warn"}
    ).load()

    assert [check.name for check in checks] == ["looks_around"]
    assert policies.of("looks_around") == policies.of("single_owner") == "refuse_checkpoints"
    assert halting.at_the_cut()["looks_around"] == "halt"
    assert halting.of("single_owner") == "warn"


def test_without_the_auditor_nothing_of_the_users_is_imported() -> None:
    """Policies of invariants still count at the cut; those of checks that are not there are no error."""
    config = AuditConfig(
        enabled=False,
        checks=["tests.no_such_module:Check"],
        policies={"conservation": "halt", "looks_around": "warn"},
    )

    checks, policies = config.load()

    assert checks == ()
    assert policies.of("conservation") == "halt"


def test_budgets_that_are_not_set_have_their_defaults() -> None:
    """One phase can be changed alone."""
    assert AuditConfig(budgets={"write": 20.0}).phase_budgets() == {**PHASE_BUDGETS, "write": 20.0}
