"""Drills from end to end, with real processes: something is broken on purpose, and the page arrives.

A training run that allows drills and throw-away runs, scraped by a real Prometheus under the generated rules; a real
Alertmanager; a receiver of webhooks behind it. Then the same straight from the process, with no Prometheus.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from quiesce.auditor import AUDITED
from quiesce.drills import DRILLS, Drill
from quiesce_dashboards.alerts import alert_of
from quiesce_dashboards.objectives import AlertConfig
from quiesce_dashboards.rules import ALERTS_FILE, build
from tests.alert_receiver import AlertReceiver, until
from tests.alert_stack import alertmanager, free_port, prometheus
from tests.integration.cli_process import SMALL

pytestmark = [pytest.mark.distribution, pytest.mark.timeout(300)]

IN_TRAINING = "early-cursor"
AT_ONCE = 4
"""Throw-away runs at a time: other tests run beside these."""


def one_for_each_alert() -> dict[str, Drill]:
    """Return, for every critical alert that a drill can cause, the first drill that does."""
    found: dict[str, Drill] = {}
    for drill in DRILLS.values():
        if AUDITED[drill.expected[0]].severity == "critical":
            found.setdefault(alert_of(drill.expected[0]), drill)
    return found


@contextlib.contextmanager
def quiesce(
    folder: Path, *arguments: str, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """Run a command until it ends or the block does; what it says is kept in the folder."""
    name = "-".join(arguments[:2])
    with (folder / f"{name}.log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "quiesce.cli", *arguments],
            cwd=folder,
            # A throw-away run that is ended by a signal leaves its folder, which goes with the test's.
            env={**os.environ, "TMPDIR": str(folder), **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            text=True,
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def firing(receiver: AlertReceiver) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the alerts that arrived, by name and run."""
    return {
        (alert["labels"]["alertname"], alert["labels"]["run"]): alert
        for alert in receiver.alerts()
        if alert["status"] == "firing"
    }


def have_paged(receiver: AlertReceiver, pages: set[tuple[str, str]]) -> bool:
    """Say whether all these alerts have arrived, by name and run."""
    return set(firing(receiver)) >= pages


def page_from_throw_away_runs(
    receiver: AlertReceiver,
    folder: Path,
    drills: Mapping[str, Drill],
    *options: str,
    environment: Mapping[str, str],
) -> set[tuple[str, str]]:
    """Do drills in throw-away runs, a process each, until each has paged; return alert and run of each."""
    pages = [(name, f"drill-{drill.name}") for name, drill in drills.items()]
    for begin in range(0, len(pages), AT_ONCE):
        some = set(pages[begin : begin + AT_ONCE])
        with contextlib.ExitStack() as stack:
            for name, _ in sorted(some):
                command = ("drill", drills[name].name, *options)
                stack.enter_context(quiesce(folder, *command, environment=environment))
            until(partial(have_paged, receiver, some), 120)
    return set(pages)


def check_page(alert: Mapping[str, Any], drill: Drill, run: str) -> None:
    """Assert that a page says what somebody who is woken up by it needs."""
    assert alert["labels"]["severity"] == "critical"
    assert alert["labels"]["invariant"] in drill.expected
    assert alert["labels"]["instance"]
    assert run in alert["annotations"]["summary"]
    assert alert["annotations"]["description"]
    assert alert["annotations"]["runbook_url"]


def test_every_critical_alert_pages_through_prometheus(tmp_path: Path) -> None:
    """A drill in a training run, and one in a throw-away run for each other alert: each page names run and invariant."""
    drills = one_for_each_alert()
    assert drills.pop(alert_of(DRILLS[IN_TRAINING].expected[0])).name == IN_TRAINING
    build(tmp_path / "rules", AlertConfig())
    targets, run_dir, port = tmp_path / "targets", tmp_path / "run", free_port()
    targets.mkdir()
    # A dozen processes share the machine, which may take its time with windows.
    environment = {"QUIESCE_SD_DIR": str(targets), "QUIESCE_OBJECTIVES": "drain=30,exclusive=30"}
    of_training = (alert_of(DRILLS[IN_TRAINING].expected[0]), "trained")
    # A run with a configuration does not look at the variable.
    objectives = "metrics.objectives={drain: 30, exclusive: 30}"
    training = ("train", *SMALL, "name=trained", "task.size=4000", "controller.audit.drills=true", objectives)
    with (
        AlertReceiver() as receiver,
        alertmanager(tmp_path, receiver, port),
        prometheus(
            tmp_path,
            rules=tmp_path / "rules" / ALERTS_FILE,
            targets=targets,
            alertmanagers=(port,),
            port=free_port(),
        ),
    ):
        with quiesce(tmp_path, *training, "--run-dir", str(run_dir), environment=environment) as trained:
            until((run_dir / "drills" / "desk.json").exists, 150)
            done = subprocess.run(
                [sys.executable, "-m", "quiesce.cli", "drill", IN_TRAINING, "--run-dir", run_dir, "--json"],
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
            assert done.returncode == 0, done.stdout + done.stderr
            until(partial(have_paged, receiver, {of_training}), 60)
            assert trained.poll() is None, "the drill ended the run"
        # Only now, so that they do not take its processors away.
        serving = ("--serve", "0", "--linger", "300")
        expected = page_from_throw_away_runs(receiver, tmp_path, drills, *serving, environment=environment)
        pages = firing(receiver)

    told = json.loads(done.stdout)
    assert told["ok"]
    assert {fired["invariant"] for fired in told["fired"]} == set(DRILLS[IN_TRAINING].expected)
    # For the same reason the saves of the one that trains may rightly be overdue.
    assert set(pages) - {("QuiesceCheckpointOverdue", "trained")} == {of_training, *expected}, (
        "somebody was paged for nothing"
    )
    for name, drill in drills.items():
        check_page(pages[name, f"drill-{drill.name}"], drill, f"drill-{drill.name}")
    check_page(pages[of_training], DRILLS[IN_TRAINING], "trained")


def test_every_critical_alert_pages_straight_from_the_process(tmp_path: Path) -> None:
    """With no Prometheus, each drill's own process tells Alertmanager."""
    drills, port = one_for_each_alert(), free_port()
    direct = ("--exporter", "alertmanager", "--linger", "300")
    with AlertReceiver() as receiver, alertmanager(tmp_path, receiver, port) as url:
        environment = {"QUIESCE_ALERTMANAGER": url}
        expected = page_from_throw_away_runs(receiver, tmp_path, drills, *direct, environment=environment)
        pages = firing(receiver)

    # A cut that was refused is told at once here; by the rules only if it stays the last for a while.
    assert {name for name, _ in set(pages) - expected} <= {"QuiesceCheckpointFailing"}
    for name, drill in drills.items():
        check_page(pages[name, f"drill-{drill.name}"], drill, f"drill-{drill.name}")
