"""The command, where it does not get so far as to show anything, and what it would show."""

import json
import socket
from pathlib import Path

import pytest
import yaml

from quiesce.cli.main import main
from quiesce.cli.view import read_content
from quiesce.view.session import DEFAULT_PORT, listen


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """Return something that can be executed."""
    path = tmp_path / "bin" / "prometheus"
    path.parent.mkdir()
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    "words, code, told",
    [
        pytest.param(["nothing"], 1, "is not a folder", id="no_folder"),
        pytest.param(["."], 1, "is not the folder of a run", id="no_run"),
        pytest.param([".", "--port", "99999999"], 2, "--port", id="no_port"),
        pytest.param([".", "--port", "TAKEN"], 2, "cannot be used", id="taken_port"),
        pytest.param([".", "--interval", "0"], 2, "--interval", id="no_interval"),
        pytest.param([".", "--prometheus", "/dev/null"], 1, "apt-get install prometheus", id="no_prometheus"),
    ],
)
def test_what_cannot_be_used_is_one_line(
    program: Path,
    words: list[str],
    code: int,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """No traceback, and an exit code that says whose fault it is."""
    monkeypatch.chdir(program.parent)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        named = [] if "--prometheus" in words else ["--prometheus", str(program)]
        found = main(["view", *(port if word == "TAKEN" else word for word in words), *named, "--no-browser"])

    said = capsys.readouterr().err
    assert (found, said.count("\n")) == (code, 1), said
    assert said.startswith("quiesce view: ")
    assert told in said
    assert not (program.parent / "view").exists()


def test_the_usual_port_gives_way_and_a_named_one_does_not() -> None:
    """Two views run side by side without anybody naming a port; both listen on loopback alone."""
    first, second = listen(None), listen(None)
    try:
        assert first.getsockname()[0] == second.getsockname()[0] == "127.0.0.1"
        assert second.getsockname()[1] not in {DEFAULT_PORT, first.getsockname()[1]}
    finally:
        first.close()
        second.close()


def test_what_is_shown_are_the_generated_dashboards_and_rules_that_lead_here() -> None:
    """Each of the five is there by its uid, and each alert names a runbook at the address that was asked for."""
    content = read_content()
    base = "http://127.0.0.1:1/runbooks"
    rules = [rule for group in yaml.safe_load(content.rules(base))["groups"] for rule in group["rules"]]

    assert set(content.dashboards) == {
        "quiesce-gate",
        "quiesce-ownership",
        "quiesce-slots",
        "quiesce-training",
        "quiesce-windows",
    }
    assert all(json.loads(text)["uid"] == uid for uid, text in content.dashboards.items())
    assert rules
    assert [rule["annotations"]["runbook_url"] for rule in rules] == [
        f"{base}/{rule['alert']}" for rule in rules
    ]
    assert content.alert_of("single_owner") in {rule["alert"] for rule in rules}
