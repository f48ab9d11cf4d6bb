"""``quiesce violations``: what it lists, what it closes, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from quiesce.auditor import FILE_NAME, ViolationJournal, read_violations
from quiesce.auditor.record import Records
from quiesce.cli.main import main
from quiesce.cli.violations import EXIT_NONE_OPEN, EXIT_OPEN, EXIT_UNUSABLE
from quiesce.invariants import Violation


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run folder with two open violations, one of them of a drill."""
    folder = tmp_path / "run"
    folder.mkdir()
    records = Records(3)
    group = "e000-p0000007"
    for found in (
        Violation(
            "single_owner", "critical", f"group {group}: owned twice", (group,), ("ledger", "buffer"), "cut-9"
        ),
        Violation("checkpoint_progress", "warning", "write took 700 s", (), (), "", {"drill": "slow-write"}),
    ):
        records.add(found, origin="live", unix_time=1.7e9, events=[{"group_id": group, "ns": 5}])
    ViolationJournal(folder).append(record.to_json() for record in records.all())
    return folder


def test_open_violations_are_listed_with_what_a_person_needs(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Key, severity, message, owners, cut, when and by whom it was seen; the exit code says that something is open."""
    code = main(["violations", str(run_dir)])

    told = capsys.readouterr().out
    assert code == EXIT_OPEN
    assert "3.0  open  critical single_owner" in told
    assert "group e000-p0000007: owned twice" in told
    assert "ledger, buffer" in told
    assert "cut-9" in told
    assert "by an event, incarnation 3" in told
    assert "slow-write: it was injected on purpose" in told
    assert "2 open of 2." in told


def test_closing_is_written_down_and_ends_at_nothing_open(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One key, then all the rest; what is closed stays listed, and closing it again changes nothing."""
    assert main(["violations", str(run_dir), "--close", "3.1"]) == EXIT_OPEN
    assert [record.key for record in read_violations(run_dir) if record.open] == ["3.0"]
    assert main(["violations", str(run_dir), "--close-all"]) == EXIT_NONE_OPEN
    before = (run_dir / FILE_NAME).read_bytes()
    capsys.readouterr()

    assert main(["violations", str(run_dir), "--close", "3.1", "--close-all"]) == EXIT_NONE_OPEN

    told = capsys.readouterr().out
    assert "3.0  closed" in told
    assert "None is open." in told
    assert (run_dir / FILE_NAME).read_bytes() == before


def test_one_record_is_shown_with_its_evidence_and_events(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Alone, and in full."""
    assert main(["violations", str(run_dir), "--show", "3.0"]) == EXIT_OPEN

    told = capsys.readouterr().out
    assert '{"group_id": "e000-p0000007", "ns": 5}' in told
    assert "3.1" not in told


def test_json_has_every_field(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One object, open records first, for scripts."""
    code = main(["violations", str(run_dir), "--close", "3.0", "--json"])

    told = json.loads(capsys.readouterr().out)
    assert code == EXIT_OPEN
    assert (told["open"], told["closed"]) == (1, ["3.0"])
    assert [record["key"] for record in told["violations"]] == ["3.1", "3.0"]
    assert told["violations"][1]["owners"] == ["ledger", "buffer"]


def test_a_run_without_violations_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Which is good news, and code 0."""
    (tmp_path / "lineage.jsonl").touch()

    assert main(["violations", str(tmp_path)]) == EXIT_NONE_OPEN
    assert "has found nothing" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words, told",
    [
        (["nowhere"], "is no run folder"),
        (["run", "--close", "9.9"], "has no record 9.9; there are 3.0, 3.1"),
        (["run", "--show", "9.9", "--json"], "has no record 9.9"),
    ],
)
def test_what_is_not_there_is_refused(
    run_dir: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    told: str,
) -> None:
    """Code 2 and one line; nothing is closed."""
    monkeypatch.chdir(run_dir.parent)

    assert main(["violations", *words]) == EXIT_UNUSABLE

    assert told in capsys.readouterr().err
    assert all(record.open for record in read_violations(run_dir))
