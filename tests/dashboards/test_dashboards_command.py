"""``quiesce dashboards``: files are written and compared, with an exit code for each case."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import pytest

from quiesce.cli import dashboards
from quiesce_dashboards.dashboards import DIRECTORY, dashboard_files


def run(*words: str) -> int:
    """Parse and run the command as the program does."""
    parser = argparse.ArgumentParser()
    dashboards.add_parser(parser.add_subparsers())
    args = parser.parse_args(["dashboards", *words])
    code: int = args.run(args)
    return code


def test_build_writes_what_check_then_finds_current(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Missing is stale; built is current; building again writes nothing; a changed file is stale."""
    folder = tmp_path / "new" / "dashboards"
    first = "quiesce-windows.json"
    assert run("check", "--out", str(folder)) == dashboards.EXIT_STALE
    assert f"{folder / first} is missing" in capsys.readouterr().err
    assert run("build", "--out", str(folder)) == dashboards.EXIT_OK
    assert capsys.readouterr().out.split() == [str(folder / name) for name in dashboard_files()]
    assert run("build", "--out", str(folder)) == dashboards.EXIT_OK
    assert run("check", "--out", str(folder)) == dashboards.EXIT_OK
    assert capsys.readouterr().out.count("are current") == 2
    assert (folder / first).read_bytes() == (DIRECTORY / first).read_bytes()
    (folder / first).write_text("{}\n", encoding="utf-8")
    assert run("check", "--out", str(folder)) == dashboards.EXIT_STALE


def test_a_dashboard_of_old_is_told_and_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Grafana would load a left over file; it may be the user's own, so it is named and not deleted."""
    assert run("build", "--out", str(tmp_path)) == dashboards.EXIT_OK
    old = tmp_path / "quiesce-old.json"
    old.write_text("{}", encoding="utf-8")
    assert run("check", "--out", str(tmp_path)) == dashboards.EXIT_STALE
    assert str(old) in capsys.readouterr().err
    assert run("build", "--out", str(tmp_path)) == dashboards.EXIT_OK
    assert old.exists()


def test_without_a_folder_it_is_the_packages_own() -> None:
    """Checking the committed files needs no argument."""
    assert run("check") == dashboards.EXIT_OK


def test_runbooks_can_be_kept_elsewhere(tmp_path: Path) -> None:
    """The address is in the links, and the files are then current only with it."""
    words = ("--out", str(tmp_path), "--runbooks", "https://wiki.example/q")
    assert run("build", *words) == dashboards.EXIT_OK
    assert "https://wiki.example/q/" in (tmp_path / "quiesce-ownership.json").read_text(encoding="utf-8")
    assert run("check", *words) == dashboards.EXIT_OK
    assert run("check", "--out", str(tmp_path)) == dashboards.EXIT_STALE


def test_what_cannot_be_written_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder that cannot be made ends with 2 and names the matter."""
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert run("build", "--out", str(tmp_path / "file" / "dashboards")) == dashboards.EXIT_UNUSABLE
    assert "file" in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["grafanalib", "promql_parser"])
def test_without_the_extra_it_says_what_to_install(
    missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A package that is missing is named with the line that installs it."""
    for name in [name for name in sys.modules if name.startswith(("quiesce_dashboards", missing))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, missing, None)
    assert run("check") == dashboards.EXIT_UNUSABLE
    assert "quiesce[dashboards]" in capsys.readouterr().err
