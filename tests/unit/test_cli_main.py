"""The command line's frame: what a person reads first, and how failures become lines and exit codes."""

import argparse
import os
import subprocess
import sys

import pytest

import quiesce
from quiesce.cli import train
from quiesce.cli.main import EXIT_FAILED, EXIT_USAGE, main
from quiesce.errors import ConfigError, RunError


@pytest.mark.parametrize(
    "argv, told",
    [
        (["--help"], ("train", "audit", "skew", "quiesce train tiny", "quiesce train --resume")),
        (["train", "--help"], ("tiny", "gpu", "--run-dir", "--resume", "--accept-suspect", "exit codes:")),
        (["audit", "--help"], ("PATH", "--json", "Exit codes:")),
        (["skew", "--help"], ("cursor", "--json")),
    ],
)
def test_help_reads_well_in_80_columns(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    argv: list[str],
    told: tuple[str, ...],
) -> None:
    """Each page names what it is for, and no line is broken by a terminal of the usual width."""
    monkeypatch.setenv("COLUMNS", "80")

    with pytest.raises(SystemExit) as caught:
        main(argv)

    page = capsys.readouterr().out
    assert caught.value.code == 0
    assert all(word in page for word in told)
    assert max(len(line) for line in page.splitlines()) <= 80


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    """``quiesce --version`` says which release it is."""
    with pytest.raises(SystemExit):
        main(["--version"])

    assert capsys.readouterr().out == f"quiesce {quiesce.__version__}\n"


@pytest.mark.parametrize(
    "argv, told",
    [
        ([], "COMMAND"),
        (["nope"], "invalid choice: 'nope'"),
        (["train", "--nope"], "unrecognized arguments: --nope"),
        (["audit", "a", "b"], "unrecognized arguments: b"),
        (["skew", "word"], "unrecognized arguments: word"),
        (["audit"], "PATH"),
    ],
)
def test_arguments_that_nothing_takes_are_a_usage_error(
    capsys: pytest.CaptureFixture[str], argv: list[str], told: str
) -> None:
    """Code 2, as every command line does, with the word at fault."""
    with pytest.raises(SystemExit) as caught:
        main(argv)

    assert caught.value.code == EXIT_USAGE
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv",
    [
        ["train", "tiny", "seed=1", "name=x", "--run-dir", "d", "--resume"],
        ["train", "--run-dir", "d", "--resume", "tiny", "seed=1", "name=x"],
        ["train", "tiny", "--run-dir", "d", "seed=1", "--resume", "name=x"],
    ],
)
def test_words_may_stand_anywhere_among_the_options(monkeypatch: pytest.MonkeyPatch, argv: list[str]) -> None:
    """However a person orders them, the words arrive in their own order."""
    seen: list[argparse.Namespace] = []

    def note(args: argparse.Namespace) -> int:
        seen.append(args)
        return 0

    monkeypatch.setattr(train, "main_train", note)

    assert main(argv) == 0

    assert seen[0].words == ["tiny", "seed=1", "name=x"]
    assert str(seen[0].run_dir) == "d"
    assert seen[0].resume


@pytest.mark.parametrize(
    "error, code",
    [(ConfigError("a.b", "is wrong"), EXIT_USAGE), (RunError("it is stuck"), EXIT_FAILED)],
)
def test_a_failure_that_quiesce_names_is_one_line_and_its_advice(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, code: int
) -> None:
    """No traceback: the error's own words, then the notes that were added on its way up."""
    error.add_note("go on like this")

    def fail(_: argparse.Namespace) -> int:
        raise error

    monkeypatch.setattr(train, "main_train", fail)

    assert main(["train"]) == code

    assert capsys.readouterr().err == f"quiesce: {error}\ngo on like this\n"


def test_a_bug_is_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """What nobody foresaw is not dressed up."""

    def fail(_: argparse.Namespace) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr(train, "main_train", fail)

    with pytest.raises(ZeroDivisionError):
        main(["train"])


def test_an_interrupt_before_the_run_is_no_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while packages load ends the command as a shell reports it."""

    def interrupt(_: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "main_train", interrupt)

    assert main(["train"]) == 130


def test_output_that_nobody_reads_on_is_no_traceback() -> None:
    """`quiesce … | head` ends like any other command whose reader has had enough."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "quiesce.cli", "skew", "--json"],
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    finally:
        os.close(writer)

    assert (ended.returncode, ended.stderr) == (141, "")
