"""What a rule adds to its expression."""

import pytest

from quiesce.view.past_alerts import read_rules, states, stretches
from quiesce_dashboards.rules import ALERTS_FILE, GENERATED

TIMES = [float(at) for at in range(0, 100, 10)]


@pytest.mark.parametrize(
    "active, hold, keep, pending, firing",
    [
        pytest.param([20, 30], 0, 0, [], [20, 30], id="at_once"),
        pytest.param([20, 30, 40], 20, 0, [20, 30], [40], id="after_it_held"),
        pytest.param([20, 40, 50], 20, 0, [20, 40, 50], [], id="a_gap_begins_anew"),
        pytest.param([20], 0, 30, [], [20, 30, 40, 50], id="fires_on"),
        pytest.param([20, 50], 0, 30, [], [20, 30, 40, 50, 60, 70, 80], id="fires_on_from_the_last"),
        pytest.param([20, 40], 10, 30, [20, 40], [], id="pending_does_not_fire_on"),
        pytest.param([10, 20, 40], 10, 30, [10], [20, 30, 40, 50, 60, 70], id="held_through_a_gap"),
    ],
)
def test_alerts_follow_the_rule(
    active: list[float], hold: float, keep: float, pending: list[float], firing: list[float]
) -> None:
    """Pending until it held, firing until it is kept no longer, as Prometheus does it."""
    found = list(states(active, TIMES, hold, keep))

    assert [at for at, state in found if state == "pending"] == pending
    assert [at for at, state in found if state == "firing"] == firing


def test_months_between_two_recordings_are_passed_over() -> None:
    """Blocks that follow each other are one stretch; what is far apart is not."""
    hours = [(0.0, 7200.0), (9000.0, 12000.0), (7200.0, 8000.0), (9e6, 9.1e6)]

    assert stretches(hours) == [(0.0, 12000.0), (9e6, 9.1e6)]
    assert stretches([]) == []


def test_the_generated_rules_are_read_whole() -> None:
    """Names, holds and labels come from the rule file itself."""
    rules = {rule.alert: rule for rule in read_rules((GENERATED / ALERTS_FILE).read_text())}

    assert len(rules) > 20
    assert rules["QuiesceRunDown"].hold_seconds == 120
    assert rules["QuiesceOwnershipConflict"].keep_seconds == 600
    assert rules["QuiesceOwnershipConflict"].labels["severity"] == "critical"
