"""``quiesce rules``: files are written and compared, with an exit code for each case."""

import argparse
import sys
from pathlib import Path

import pytest

from quiesce.cli import rules
from quiesce_dashboards.rules import ALERTS_FILE, GENERATED


def run(*words: str) -> int:
    """Parse and run the command as the program does."""
    parser = argparse.ArgumentParser()
    rules.add_parser(parser.add_subparsers())
    args = parser.parse_args(["rules", *words])
    code: int = args.run(args)
    return code


def test_build_writes_what_check_then_finds_current(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Missing is stale; built is current; building again writes nothing; a changed file is stale."""
    folder = tmp_path / "new" / "rules"
    assert run("check", "--out", str(folder)) == rules.EXIT_STALE
    assert f"{folder / ALERTS_FILE} is missing or stale" in capsys.readouterr().err
    assert run("build", "--out", str(folder)) == rules.EXIT_OK
    assert capsys.readouterr().out == f"{folder / ALERTS_FILE}\n"
    assert run("build", "--out", str(folder)) == rules.EXIT_OK
    assert run("check", "--out", str(folder)) == rules.EXIT_OK
    assert capsys.readouterr().out.count("are current") == 2
    assert (folder / ALERTS_FILE).read_bytes() == (GENERATED / ALERTS_FILE).read_bytes()
    (folder / ALERTS_FILE).write_text("groups: []\n", encoding="utf-8")
    assert run("check", "--out", str(folder)) == rules.EXIT_STALE


def test_without_a_folder_it_is_the_packages_own() -> None:
    """Checking the committed files needs no argument."""
    assert run("check") == rules.EXIT_OK


def test_runbooks_can_be_kept_elsewhere(tmp_path: Path) -> None:
    """The address is in every rule, and the files are then current only with it."""
    words = ("--out", str(tmp_path), "--runbooks", "https://wiki.example/q")
    assert run("build", *words) == rules.EXIT_OK
    text = (tmp_path / ALERTS_FILE).read_text(encoding="utf-8")
    assert text.count("runbook_url: https://wiki.example/q/Quiesce") == text.count("alert: ")
    assert run("check", *words) == rules.EXIT_OK
    assert run("check", "--out", str(tmp_path)) == rules.EXIT_STALE


def test_what_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder that cannot be made, and a missing parser, end with 2 and name the matter."""
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert run("build", "--out", str(tmp_path / "file" / "rules")) == rules.EXIT_UNUSABLE
    assert "file" in capsys.readouterr().err


def test_a_missing_parser_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without promql-parser nothing is written unchecked."""
    monkeypatch.setitem(sys.modules, "promql_parser", None)
    assert run("check") == rules.EXIT_UNUSABLE
    assert "quiesce[dashboards]" in capsys.readouterr().err


def test_an_unknown_action_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    """Argparse's own exit code, 2."""
    with pytest.raises(SystemExit) as ended:
        run("destroy")
    assert ended.value.code == rules.EXIT_UNUSABLE
    assert "build" in capsys.readouterr().err
