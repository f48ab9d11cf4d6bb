"""The numbers of rules and dashboards from a file: what is said is used, and what cannot be is refused by its key."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final

import pytest

from quiesce.cli import dashboards, rules
from quiesce.cli.main import main
from quiesce.cli.view import read_content
from quiesce.errors import ConfigError
from quiesce.telemetry import names
from quiesce_dashboards.alert_settings import alert_config, own_numbers, read_alert_config
from quiesce_dashboards.alerts import alerts
from quiesce_dashboards.dashboards import dashboard_files
from quiesce_dashboards.objectives import PHASE_LIMITS, AlertConfig
from quiesce_dashboards.rules import ALERTS_FILE, rule_files

OTHERS: Final[Mapping[str, Any]] = {
    "runbook_base_url": "https://wiki.example/q",
    "runbook_suffix": ".md",
    "window_objectives": {"drain": 7.5, "exclusive": 0.125},
    "breaches": 7,
    "window_budget_ratio": 0.2,
    "overdue_intervals": 9.0,
    "violation_seconds": 77.0,
    "phase_limits": {phase: 3 * seconds for phase, seconds in PHASE_LIMITS.items()},
    "failing_seconds": 61.0,
    "gate_closed_seconds": 78.0,
    "cleanup_backlog_calls": 50,
    "cleanup_failures": 9,
    "lost_spans": 9,
    "run_down_seconds": 999.0,
}
"""Another value of every field."""


def judged(config: AlertConfig) -> dict[str, tuple[str, float, float]]:
    """Return what decides whether an alert fires, by its name."""
    return {each.name: (each.expression, each.hold_seconds, each.keep_seconds) for each in alerts(config)}


def drawn(config: AlertConfig) -> dict[str, list[Any]]:
    """Return what decides how a panel judges what it shows, by its title: thresholds and expressions."""
    told: dict[str, list[Any]] = {}
    for text in dashboard_files(config).values():
        for panel in json.loads(text)["panels"]:
            field = panel.get("fieldConfig", {})
            steps = [field.get("defaults", {}).get("thresholds")]
            steps += [
                each
                for override in field.get("overrides", ())
                for each in override["properties"]
                if each["id"] == "thresholds"
            ]
            told[panel["title"]] = [steps, [target["expr"] for target in panel.get("targets", ())]]
    return told


def test_every_number_has_another_value_here() -> None:
    """A field that is added is tried too."""
    assert set(OTHERS) == {each.name for each in fields(AlertConfig)}
    assert all(getattr(AlertConfig(), name) != value for name, value in OTHERS.items())


@pytest.mark.parametrize("name", OTHERS)
def test_a_number_changes_what_it_is_about(name: str) -> None:
    """Each changes when an alert fires or how a panel judges, and addresses change texts; nothing is for show."""
    usual, changed = AlertConfig(), AlertConfig(**{name: OTHERS[name]})
    if name.startswith("runbook_"):
        assert rule_files(changed) != rule_files(usual)
        assert judged(changed) == judged(usual)
        return
    if name == "window_objectives":
        # The process counts by them: its rules say them in words, and blame slots from them on.
        assert judged(changed)["QuiesceDrainSlow"] != judged(usual)["QuiesceDrainSlow"]
        described = {each.name: each.description for each in alerts(changed)}
        assert "drain 7.5 s, exclusive 0.125 s" in described["QuiesceWindowOverObjective"]
    assert judged(changed) != judged(usual) or drawn(changed) != drawn(usual)


@pytest.mark.parametrize("name", OTHERS)
def test_a_file_says_what_code_says(name: str, tmp_path: Path) -> None:
    """Every field can be a key of the section, and the rest keeps its defaults."""
    path = tmp_path / "mine.yaml"
    path.write_text(json.dumps({"alerts": {name: OTHERS[name]}}), encoding="utf-8")

    assert read_alert_config(path) == AlertConfig(**{name: OTHERS[name]})


def test_phases_that_are_left_out_keep_their_numbers() -> None:
    """One phase can be changed alone."""
    config = alert_config({"phase_limits": {"write": 5000}, "window_objectives": {"drain": 2}})

    assert config.phase_limits == {**PHASE_LIMITS, "write": 5000}
    assert config.window_objectives == {**names.OBJECTIVES, "drain": 2}


@pytest.mark.parametrize(
    "said, key, problem",
    [
        ({"run_down": 3}, "alerts.run_down", "there is no such key"),
        ({"breaches": 2.5}, "alerts.breaches", "whole number"),
        ({"breaches": True}, "alerts.breaches", "whole number"),
        ({"run_down_seconds": "5m"}, "alerts.run_down_seconds", "must be a number"),
        ({"run_down_seconds": 0}, "alerts.run_down_seconds", "positive"),
        ({"runbook_suffix": 1}, "alerts.runbook_suffix", "must be a text"),
        ({"phase_limits": 5}, "alerts.phase_limits", "seconds by phase"),
        ({"phase_limits": {"write": "x"}}, "alerts.phase_limits.write", "must be a number"),
        ({"phase_limits": {"wriet": 5}}, "alerts.phase_limits", "has to name exactly"),
        ({"window_objectives": {"write": 5}}, "alerts.window_objectives.write", "no such phase"),
        ({"window_objectives": {"drain": -1}}, "alerts.window_objectives.drain", "positive"),
        ({"window_objectives": 3}, "alerts.window_objectives", "seconds by phase"),
    ],
)
def test_what_cannot_be_used_is_refused_by_its_key(said: dict[str, Any], key: str, problem: str) -> None:
    """The error has the key as it stands in the file, and says what is wrong with it."""
    with pytest.raises(ConfigError, match=problem) as refused:
        alert_config(said)
    assert refused.value.key == key


def test_the_rules_speak_of_what_the_run_counts_by(tmp_path: Path) -> None:
    """A run's configuration says its objectives once; a second word that differs is refused, one that agrees is not."""
    path = tmp_path / "config.yaml"
    path.write_text("metrics: {objectives: {drain: 3}}\n", encoding="utf-8")
    assert read_alert_config(path).window_objectives == {**names.OBJECTIVES, "drain": 3}

    counted = {"drain": 3.0}
    assert alert_config({"window_objectives": counted}, counted).window_objectives["drain"] == 3
    with pytest.raises(ConfigError, match=r"metrics\.objectives") as refused:
        alert_config({"window_objectives": {"drain": 4}}, counted)
    assert refused.value.key == "alerts.window_objectives"
    with pytest.raises(ConfigError, match="positive") as refused:
        alert_config({}, {"drain": 0})
    assert refused.value.key == "metrics.objectives.drain"


@pytest.mark.parametrize(
    "text, problem",
    [
        ("run_down_seconds: 3\n", "no section 'alerts'"),
        ("- 3\n", "no sections with keys"),
        ("alerts: [3]\n", "a section with keys"),
        ("alerts: {\n", "is no YAML"),
        (None, "cannot be read"),
    ],
)
def test_a_file_that_says_nothing_is_refused(text: str | None, problem: str, tmp_path: Path) -> None:
    """Numbers that would be left out in silence are not: whoever names a file means that it is used."""
    path = tmp_path / "mine.yaml"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=problem):
        read_alert_config(path)


# ------------------------------------------------------------------------------------------------- the commands


def test_both_commands_take_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Files are made of its numbers, and are current only with it; an address on the command line wins."""
    path = tmp_path / "mine.yaml"
    path.write_text(
        "alerts: {run_down_seconds: 600, runbook_base_url: 'https://x.example'}\n", encoding="utf-8"
    )
    mine = AlertConfig(run_down_seconds=600, runbook_base_url="https://x.example")
    for command, files in (("rules", rule_files(mine)), ("dashboards", dashboard_files(mine))):
        words = ("--out", str(tmp_path / command))
        assert main([command, "build", *words, "--config", str(path)]) == rules.EXIT_OK
        assert {each.name: each.read_text() for each in (tmp_path / command).iterdir()} == files
        assert main([command, "check", *words, "--config", str(path)]) == rules.EXIT_OK
        assert main([command, "check", *words]) == rules.EXIT_STALE
    other = ("--out", str(tmp_path / "elsewhere"), "--config", str(path), "--runbooks", "https://y.example")
    assert main(["rules", "build", *other]) == rules.EXIT_OK
    told = replace(mine, runbook_base_url="https://y.example")
    assert (tmp_path / "elsewhere" / ALERTS_FILE).read_text() == rule_files(told)[ALERTS_FILE]
    capsys.readouterr()


@pytest.mark.parametrize("command", ["rules", "dashboards"])
def test_what_is_wrong_in_the_file_is_one_line(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The line begins with the key, nothing is written, and what the package carries is never changed this way."""
    path = tmp_path / "mine.yaml"
    path.write_text("alerts: {run_down: 600}\n", encoding="utf-8")
    words = [command, "build", "--config", str(path)]
    assert main([*words, "--out", str(tmp_path / "out")]) == dashboards.EXIT_UNUSABLE
    assert capsys.readouterr().err == f"quiesce {command}: alerts.run_down: there is no such key\n"
    assert not (tmp_path / "out").exists()
    path.write_text("alerts: {run_down_seconds: 600}\n", encoding="utf-8")
    assert main(words) == dashboards.EXIT_UNUSABLE
    assert "--out" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------- the view


def test_a_run_that_says_nothing_of_its_own_is_shown_as_it_comes(tmp_path: Path) -> None:
    """No file, a file without the section, and one that repeats the defaults change nothing."""
    path = tmp_path / "config.yaml"
    assert own_numbers(path) is None
    for text in ("name: x\n", "metrics: {objectives: {drain: 1}}\nalerts: {}\n", "alerts: {breaches: 2}\n"):
        path.write_text(text, encoding="utf-8")
        assert own_numbers(path) is None


def test_the_view_shows_a_run_by_its_own_numbers(tmp_path: Path) -> None:
    """Rules and dashboards are made of the run's configuration, with the runbooks that the view serves."""
    path = tmp_path / "config.yaml"
    path.write_text("alerts: {run_down_seconds: 600}\nmetrics: {objectives: {drain: 3}}\n", encoding="utf-8")
    mine = own_numbers(path)
    assert mine is not None

    content, usual = read_content(mine), read_content()

    text = content.rules("http://127.0.0.1:1/runbooks")
    assert "for: 600s" in text
    assert text.count("runbook_url: http://127.0.0.1:1/runbooks/Quiesce") == text.count("alert: ")
    assert not any(line.endswith(".html") for line in text.splitlines())
    assert list(content.dashboards) == list(usual.dashboards)
    assert content.dashboards != usual.dashboards
