"""Finding the programs."""

from pathlib import Path

import pytest

from quiesce.errors import ViewError
from quiesce.view.programs import environment_of, find_programs, prepare_alertmanager


def program(path: Path) -> Path:
    """Make something that can be executed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    return path


def test_a_missing_prometheus_names_the_line_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The user is told the command, not the problem alone."""
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(ViewError, match=r"apt-get install prometheus prometheus-alertmanager.*make tools"):
        find_programs(checkout=tmp_path)


def test_the_checkouts_programs_come_before_those_of_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not in .tools is taken from PATH, under the distribution's name too."""
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    program(tmp_path / "path" / "prometheus")
    program(tmp_path / "path" / "prometheus-alertmanager")
    tools = tmp_path / ".tools" / "bin"
    program(tools / "prometheus")

    found = find_programs(checkout=tmp_path)

    assert found.prometheus == tools / "prometheus"
    assert found.promtool is None
    assert found.alertmanager == tmp_path / "path" / "prometheus-alertmanager"


def test_a_named_program_is_used_or_refused(tmp_path: Path) -> None:
    """Its promtool stands beside it."""
    server = program(tmp_path / "mine" / "prometheus")
    program(tmp_path / "mine" / "promtool")
    program(tmp_path / ".tools" / "bin" / "prometheus")
    (tmp_path / "text").write_text("no program")

    found = find_programs(server, checkout=tmp_path)

    assert (found.prometheus, found.promtool) == (server, server.with_name("promtool"))
    for option in ({"prometheus": tmp_path / "text"}, {"alertmanager": tmp_path / "text"}):
        with pytest.raises(ViewError, match=r"--(prometheus|alertmanager): .* cannot be|is not a program"):
            find_programs(**{"prometheus": server, **option}, checkout=tmp_path)


def test_no_secret_of_the_shell_is_handed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program gets a path, a home and its own libraries."""
    monkeypatch.setenv("HF_TOKEN", "secret")
    libraries = tmp_path / "root" / "usr" / "lib" / "x86_64-linux-gnu"
    libraries.mkdir(parents=True)

    told = environment_of(program(tmp_path / "root" / "usr" / "bin" / "prometheus"))

    assert told.keys() <= {"PATH", "HOME", "TMPDIR", "TZ", "LD_LIBRARY_PATH"}
    assert told["LD_LIBRARY_PATH"].startswith(str(libraries))


def test_an_alertmanager_that_is_not_unpacked_is_used_as_it_is(tmp_path: Path) -> None:
    """Only one whose templates lie beside it is copied."""
    found = program(tmp_path / "bin" / "alertmanager")

    assert prepare_alertmanager(found, tmp_path) == found
