"""The rules: what they may name, that each alert behaves, and that the committed file is current."""

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from quiesce.errors import ConfigError
from quiesce.invariants import INVARIANTS
from quiesce.telemetry import names
from quiesce_dashboards.alerts import INVARIANT_ALERTS, OTHER_INVARIANT, alert_of, alerts
from quiesce_dashboards.objectives import AlertConfig
from quiesce_dashboards.queries import check_expression, grew, metrics_of, series, sum_by
from quiesce_dashboards.rules import ALERTS_FILE, GENERATED, build, check, render, rule_files
from tests.dashboards.grafana import left_open
from tests.dashboards.rule_cases import CASES, SITUATIONS, document

TOOLS = Path(__file__).parents[2] / ".tools" / "bin"
ALERTS = {alert.name: alert for alert in alerts()}

CRITICAL = {
    "QuiesceOwnershipConflict",
    "QuiescePromptsUnaccounted",
    "QuiesceCursorBufferSkew",
    "QuiesceMutationInsideWindow",
    "QuiesceCutNotAtomic",
    "QuiesceRowsDiverged",
    "QuiesceDigestMismatch",
    "QuiesceVersionRegressed",
    "QuiesceGateViolated",
    "QuiesceCheckpointFailing",
    "QuiesceCheckpointStalled",
    "QuiesceInvariantViolated",
}
WARNING = {
    "QuiesceRowsOrphaned",
    "QuiesceDrainSlow",
    "QuiesceWindowOverObjective",
    "QuiesceWindowBudget",
    "QuiesceCheckpointOverdue",
    "QuiesceGateClosedTooLong",
    "QuiesceCleanupBacklog",
    "QuiesceCleanupFailing",
    "QuiesceAdmissionFallback",
    "QuiesceTelemetryDropping",
    "QuiesceRunDown",
}


RANGED = (
    "QuiesceOwnershipConflict",
    "QuiesceDrainSlow",
    "QuiesceWindowOverObjective",
    "QuiesceWindowBudget",
    "QuiesceCleanupFailing",
    "QuiesceRunDown",
)
"""Alerts that look at ranges, one of each form."""


def promtool(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run the fetched promtool."""
    return subprocess.run(
        [TOOLS / "promtool", *arguments], capture_output=True, text=True, check=False, timeout=50, cwd=cwd
    )


def rule_of(name: str, folder: Path) -> str:
    """Write a file with that alert of the committed file alone; promtool evaluates all that it is given."""
    groups = yaml.safe_load((GENERATED / ALERTS_FILE).read_text(encoding="utf-8"))["groups"]
    rules = [rule for group in groups for rule in group["rules"] if rule["alert"] == name]
    path = folder / "rule.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": name, "rules": rules}]}), encoding="utf-8")
    return path.name


def test_the_list_has_every_alert_once() -> None:
    """Critical ones and warnings are those that the design names, and a common one for checks of users."""
    assert len(ALERTS) == len(alerts())
    assert {name for name, alert in ALERTS.items() if alert.severity == "critical"} == CRITICAL
    assert {name for name, alert in ALERTS.items() if alert.severity == "warning"} == WARNING


def test_every_invariant_has_an_alert_and_every_entry_is_an_invariant() -> None:
    """One table, complete both ways against the catalogue; a critical invariant has a critical alert."""
    assert set(INVARIANT_ALERTS) == set(names.INVARIANTS)
    assert set(INVARIANT_ALERTS.values()) <= set(ALERTS)
    for row in INVARIANTS.values():
        assert ALERTS[alert_of(row.name)].severity == row.severity
    for invariant in ("window_is_exclusive", "gate_is_respected"):
        assert ALERTS[alert_of(invariant)].severity == "critical"
    assert alert_of("a_check_of_mine") == OTHER_INVARIANT


def test_the_alert_of_an_invariant_reads_that_invariant() -> None:
    """The table is what the expressions select, except for the one that watches a phase."""
    for invariant, alert in INVARIANT_ALERTS.items():
        if alert != "QuiesceCheckpointStalled":
            selected = re.findall(r'invariant=~?"([a-z_|]+)"', ALERTS[alert].expression)
            assert all(invariant in values.split("|") for values in selected)
            assert len(selected) == 2


@pytest.mark.parametrize("name", ALERTS)
def test_an_alert_says_who_where_and_what_next(name: str) -> None:
    """Summary and description name the run, the instance, whom to blame, a next step and the runbook."""
    alert = ALERTS[name]
    said = alert.annotations()
    assert "$labels.run" in said["summary"]
    assert "Next:" in said["description"]
    assert "instance" in said["description"]
    assert said["runbook_url"] == f"https://quiesce.readthedocs.io/en/latest/runbooks/{alert.name}.html"
    if "quiesce_window" in alert.expression or "checkpoint_phase" in alert.expression:
        assert "kind" in said["description"]
    assert not re.search(r"(?<!{){[a-z]+}", " ".join(said.values()))


def test_the_committed_file_is_current() -> None:
    """What is committed is what the code writes."""
    assert check() == []


def test_a_stale_file_is_named_and_written_anew(tmp_path: Path) -> None:
    """A missing or changed file is stale; building writes only that, and then nothing more."""
    assert check(tmp_path) == [ALERTS_FILE]
    assert build(tmp_path) == [tmp_path / ALERTS_FILE]
    assert build(tmp_path) == []
    (tmp_path / ALERTS_FILE).write_text("groups: []\n", encoding="utf-8")
    assert check(tmp_path) == [ALERTS_FILE]
    build(tmp_path)
    assert (tmp_path / ALERTS_FILE).read_bytes() == (GENERATED / ALERTS_FILE).read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == [ALERTS_FILE]


def test_numbers_and_addresses_come_from_the_configuration() -> None:
    """A rule has the configured number, and pages may be kept elsewhere."""
    config = AlertConfig(
        runbook_base_url="https://wiki.example/q/", runbook_suffix="", window_budget_ratio=0.25
    )
    made = {alert.name: alert for alert in alerts(config)}
    assert "> 0.25 * 3600" in made["QuiesceWindowBudget"].expression
    assert made["QuiesceRunDown"].runbook == "https://wiki.example/q/QuiesceRunDown"
    assert "drain 1 s, exclusive 0.005 s" in made["QuiesceWindowOverObjective"].description


@pytest.mark.parametrize(
    "wrong",
    [
        ("overdue_intervals", 0.0),
        ("lost_spans", -1),
        ("violation_seconds", float("nan")),
        ("phase_limits", {"drain": 1.0}),
        ("window_objectives", {"drain": 1.0, "exclusive": -1.0}),
    ],
)
def test_a_number_that_no_rule_can_have_is_refused(wrong: tuple[str, Any]) -> None:
    """The message names the key."""
    key, value = wrong
    with pytest.raises(ConfigError, match=key):
        AlertConfig(**{key: value})


def test_the_tested_forms_are_the_forms() -> None:
    """The expressions that were tried are used as they were tried."""
    flat = {name: " ".join(alert.expression.split()) for name, alert in ALERTS.items()}
    assert (
        flat["QuiesceWindowOverObjective"]
        == "sum by (run, phase) (increase(quiesce_window_over_objective_total[6h])) > 2.5"
    )
    assert (
        flat["QuiesceWindowBudget"]
        == "sum by (run) (increase(quiesce_window_closed_seconds_total[1h])) > 0.005 * 3600"
    )
    assert flat["QuiesceCheckpointOverdue"] == (
        "time() - max by (run) ((quiesce_checkpoint_last_success_timestamp_seconds > 0) or "
        "quiesce_run_started_timestamp_seconds) > 3 * max by (run) "
        "(quiesce_checkpoint_expected_interval_seconds > 0)"
    )
    last = (
        'last_over_time(quiesce_invariant_last_violation_timestamp_seconds{invariant="single_owner"}[1800s])'
    )
    assert flat["QuiesceOwnershipConflict"] == f"{last} > 0 and time() - {last} < 1800"
    assert 'last_over_time(quiesce_run_state{state="finished"}[6h]) == 1' in flat["QuiesceRunDown"]


# ------------------------------------------------------------------------------------------------- the helper


def test_a_selector_refuses_what_the_catalogue_has_not() -> None:
    """Names, suffixes, labels and values that do not exist are errors where the rule is written."""
    assert series(names.GROUPS, owner=("ledger", "buffer")) == 'quiesce_groups{owner=~"ledger|buffer"}'
    assert series(names.GROUPS, without={"owner": "ledger"}) == 'quiesce_groups{owner!="ledger"}'
    stranger = names.Metric("quiesce_strange", "gauge", "None of ours")
    refusals: tuple[Callable[[], str], ...] = (
        lambda: series(stranger),
        lambda: series(names.GROUPS, owner="nobody"),
        lambda: series(names.GROUPS, kind="retry"),
        lambda: series(names.GROUPS, "_bucket"),
        lambda: series(names.MUTATION_WAIT),
        lambda: sum_by(("group_id",), "1"),
    )
    for refused in refusals:
        with pytest.raises(ValueError, match=r"quiesce_|no metric"):
            refused()


@pytest.mark.parametrize(
    "expression",
    [
        "quiesce_gruops > 1",
        'quiesce_groups{owner="nobody"}',
        'quiesce_groups{owner=~"ledger|nobody"}',
        "sum by (kind) (quiesce_groups)",
        "quiesce_groups and on (kind) up",
        'quiesce_mutation_wait_seconds_bucket{le="0.123"}',
        "quiesce_mutation_wait_seconds",
        'up{run="r"}',
        "quiesce_groups >",
        "increase(quiesce_window_closed_seconds[1h])",
    ],
)
def test_an_expression_is_judged_by_the_catalogue(expression: str) -> None:
    """A typing error in a name, a label, a value or a bucket does not reach a rule file."""
    with pytest.raises(ValueError, match=r"."):
        check_expression(expression)


def test_a_sound_expression_passes_and_names_its_metrics() -> None:
    """Histogram series, buckets and Prometheus' own labels are known."""
    expression = (
        'sum by (le, instance) (rate(quiesce_mutation_wait_seconds_bucket{le="0.001",kind="retry"}[5m])) '
        "and on (instance) up"
    )
    check_expression(expression)
    check_expression(grew(series(names.CLEANUP_FAILURES), ("run",), "1h", 2))
    assert metrics_of(expression) == {"quiesce_mutation_wait_seconds_bucket", "up"}


# ------------------------------------------------------------------------------------------------- promtool


def test_every_alert_has_a_case_for_every_situation() -> None:
    """None of the six is missing anywhere, and each fires in one of them and is silent in one."""
    assert set(CASES) == set(ALERTS)
    for cases in CASES.values():
        assert {case.situation for case in cases} == set(SITUATIONS)
        assert any(fired for case in cases for fired in case.fires.values())


@pytest.mark.distribution
def test_promtool_accepts_the_rules(tmp_path: Path) -> None:
    """The committed file, and one with other numbers."""
    config = AlertConfig(gate_closed_seconds=0.5, breaches=7, run_down_seconds=90)
    (tmp_path / "other.yml").write_text(rule_files(config)[ALERTS_FILE], encoding="utf-8")
    for path in (GENERATED / ALERTS_FILE, tmp_path / "other.yml"):
        finished = promtool("check", "rules", path, cwd=tmp_path)
        assert finished.returncode == 0, finished.stdout + finished.stderr
        assert f"{len(ALERTS)} rules found" in finished.stdout


@pytest.mark.distribution
@pytest.mark.parametrize("name", CASES)
def test_an_alert_behaves(name: str, tmp_path: Path) -> None:
    """It fires, stays silent, and outlives restarts, missed scrapes and late first scrapes, as its cases say."""
    cases = document(ALERTS[name], CASES[name], rule_of(name, tmp_path))
    path = tmp_path / "cases.yml"
    path.write_text(render(cases, header=""), encoding="utf-8")

    finished = promtool("test", "rules", path, cwd=tmp_path)

    assert finished.returncode == 0, finished.stdout + finished.stderr


@pytest.mark.distribution
@pytest.mark.parametrize("name", RANGED)
def test_an_alert_behaves_as_prometheus_3_reads_ranges(name: str, tmp_path: Path) -> None:
    """It fires and is silent at the same times where a range leaves out the sample that is as old as it is long.

    Values in texts are left out: what ``increase`` estimates beyond the first sample differs by a sixtieth of an hour's.
    """
    rule_file = tmp_path / rule_of(name, tmp_path)
    rules = yaml.safe_load(rule_file.read_text(encoding="utf-8"))
    [rule] = rules["groups"][0]["rules"]
    assert left_open(rule["expr"]) != rule["expr"]
    rule["expr"] = left_open(rule["expr"])
    del rule["annotations"]
    rule_file.write_text(yaml.safe_dump(rules), encoding="utf-8")
    cases = document(ALERTS[name], CASES[name], rule_file.name)
    for test in cases["tests"]:
        for assertion in test["alert_rule_test"]:
            for fired in assertion["exp_alerts"]:
                del fired["exp_annotations"]
    path = tmp_path / "cases.yml"
    path.write_text(render(cases, header=""), encoding="utf-8")

    finished = promtool("test", "rules", path, cwd=tmp_path)

    assert finished.returncode == 0, finished.stdout + finished.stderr


@pytest.mark.distribution
def test_a_wrong_expectation_is_noticed(tmp_path: Path) -> None:
    """A case that expects silence where an alert fires fails, so that the cases above mean something."""
    name = "QuiesceOwnershipConflict"
    cases = document(ALERTS[name], CASES[name][:1], rule_of(name, tmp_path))
    for assertion in cases["tests"][0]["alert_rule_test"]:
        assertion["exp_alerts"] = []
    path = tmp_path / "cases.yml"
    path.write_text(yaml.safe_dump(cases), encoding="utf-8")

    assert promtool("test", "rules", path, cwd=tmp_path).returncode != 0
