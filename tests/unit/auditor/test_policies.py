"""What follows from a violation."""

import pytest

from quiesce.auditor import AUDITED, Policies
from quiesce.errors import ConfigError
from quiesce.invariants import INVARIANTS


def test_each_invariant_that_a_cut_is_judged_by_is_audited_with_its_policy() -> None:
    """The auditor's table has all of the cut's, and three that no cut shows."""
    assert set(AUDITED) - set(INVARIANTS) == {
        "window_is_exclusive",
        "gate_is_respected",
        "checkpoint_progress",
    }
    assert set(INVARIANTS) <= set(AUDITED)
    for name, row in INVARIANTS.items():
        assert (AUDITED[name].severity, AUDITED[name].policy) == (row.severity, row.policy)
        assert "cut" in AUDITED[name].proved


def test_a_policy_is_what_is_configured_or_what_the_severity_says() -> None:
    """Of invariants, of users' checks, and of what nobody has heard of."""
    policies = Policies({"rows_present": "halt", "mine": "halt"}, {"mine": "warn", "other": "warn"})

    assert policies.of("rows_present") == "halt"
    assert policies.of("mine") == "halt"
    assert policies.of("other") == "warn"
    assert policies.of("single_owner") == "refuse_checkpoints"
    assert policies.of("checkpoint_progress") == "warn"
    assert policies.of("unheard of", "warning") == "warn"
    assert policies.of("unheard of", "critical") == "refuse_checkpoints"
    assert policies.at_the_cut()["rows_present"] == "halt"


@pytest.mark.parametrize("name, policy", [("rows_presnt", "warn"), ("rows_present", "ignore")])
def test_a_slip_in_a_policy_is_an_error_that_names_it(name: str, policy: str) -> None:
    """An unknown invariant or policy would be silently of no effect."""
    with pytest.raises(ConfigError, match=f"policy.{name}"):
        Policies({name: policy})
