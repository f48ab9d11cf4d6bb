"""The run folder: one process at a time, and numbers that are never used twice."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from quiesce.checkpoint.cut import CutState
from quiesce.checkpoint.journal import JournalRecord, read_journal, surviving
from quiesce.checkpoint.runfolder import CheckpointName, RunFolder
from quiesce.errors import (
    IncarnationSupersededError,
    RunFolderError,
    RunFolderInUseError,
    RunFolderLockedError,
)
from tests.save_rig import watched_disk
from tests.unit.checkpoint.cuts import clean_cut


def test_names_sort_from_the_oldest_to_the_newest() -> None:
    """Steps are numbers, not text, and a further cut at a step is newer than the first."""
    names = [CheckpointName.parse(text) for text in ("step_10", "step_9.2", "step_9", "step_9.10")]
    assert [str(name) for name in sorted(name for name in names if name is not None)] == [
        "step_9",
        "step_9.2",
        "step_9.10",
        "step_10",
    ]


@pytest.mark.parametrize(
    "text",
    [
        "step_",
        "step_01",
        "step_1.0",
        "step_1.01",
        "step_1.suspect",
        "step_1.tmp-x",
        "trash-step_1",
        "aside-step_1-i00000002",
        "step_-1",
        "step_1 ",
        "step_\u0661",
        "Step_1",
    ],
)
def test_nothing_else_is_a_published_checkpoint(text: str) -> None:
    """Suspects, leftovers and near misses are never taken for one."""
    assert CheckpointName.parse(text) is None


def test_a_new_folder_starts_at_incarnation_one(tmp_path: Path) -> None:
    """The number is on disk when it is returned."""
    with RunFolder.create(tmp_path / "deep" / "run") as run:
        with pytest.raises(RunFolderError, match="no incarnation"):
            _ = run.incarnation
        assert run.next_incarnation() == 1
        assert run.incarnation == 1
        assert (run.path / "incarnation").read_text() == "1\n"


def test_the_counter_is_durable_before_its_number_is_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """File, rename, folder, in that order, all before the journal or anybody else hears of the number."""
    with RunFolder.create(tmp_path) as run, watched_disk(monkeypatch) as disk:
        run.next_incarnation()
        run.journal.sync()
    counted = [entry for entry in disk.operations if not entry[1].startswith("lineage")]
    assert counted == [
        ("create", ".incarnation.new"),
        ("write", ".incarnation.new"),
        ("fsync", ".incarnation.new"),
        ("rename", "incarnation"),
        ("fsync_folder", tmp_path.name),
    ]


def test_a_number_is_never_used_twice(tmp_path: Path) -> None:
    """Each start counts, whatever it came to."""
    numbers = []
    for _ in range(3):
        with RunFolder.open(tmp_path, resume=True) as run:
            numbers.append(run.next_incarnation())
    assert numbers == [1, 2, 3]


def test_a_counter_that_cannot_be_written_starts_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a full disk the run does not start, and the folder is named."""
    with RunFolder.create(tmp_path) as run, watched_disk(monkeypatch) as disk:
        full = OSError(errno.ENOSPC, "No space left")
        disk.fail = lambda operation, _: full if operation == "write" else None
        with pytest.raises(RunFolderError, match=rf"{tmp_path}.*No space left"):
            run.next_incarnation()
        with pytest.raises(RunFolderError, match="no incarnation"):
            _ = run.incarnation


def test_a_used_folder_without_resume_is_refused_and_names_the_flag(tmp_path: Path) -> None:
    """Nothing of the run that used it is touched."""
    with RunFolder.create(tmp_path) as run:
        run.next_incarnation()
    with pytest.raises(RunFolderInUseError, match="--resume"):
        RunFolder.create(tmp_path)
    with pytest.raises(RunFolderInUseError, match="--resume"):
        RunFolder.open(tmp_path, resume=False)
    with RunFolder.open(tmp_path, resume=True) as run:
        assert run.next_incarnation() == 2


def test_a_folder_in_which_nothing_was_started_is_not_used(tmp_path: Path) -> None:
    """A run that died before its first incarnation, and files of other people, are in nobody's way."""
    (tmp_path / "config.yaml").write_text("a: 1")
    RunFolder.create(tmp_path).close()
    with RunFolder.create(tmp_path) as run:
        assert run.next_incarnation() == 1


@pytest.mark.parametrize("content", ["", "x\n", "-1\n", "1", "1\n2\n"])
def test_a_damaged_counter_is_refused(tmp_path: Path, content: str) -> None:
    """A guess could reuse a number."""
    with RunFolder.create(tmp_path) as run:
        run.next_incarnation()
    (tmp_path / "incarnation").write_text(content)
    with pytest.raises(RunFolderError, match="counter"):
        RunFolder.open(tmp_path, resume=True)


def test_a_lost_counter_of_a_used_folder_is_refused(tmp_path: Path) -> None:
    """The message says what to do."""
    with RunFolder.create(tmp_path) as run:
        run.next_incarnation()
    (tmp_path / "incarnation").unlink()
    with pytest.raises(RunFolderError, match="write a number into it"):
        RunFolder.open(tmp_path, resume=True)


def test_a_folder_that_cannot_be_created_is_named(tmp_path: Path) -> None:
    """A file stands where the folder should be."""
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunFolderError, match="cannot be created"):
        RunFolder.create(tmp_path / "file" / "run")


def test_a_later_incarnation_supersedes(tmp_path: Path) -> None:
    """The check reads the folder, not this process's memory."""
    with RunFolder.create(tmp_path) as run:
        run.next_incarnation()
        run.check_incarnation()
        (tmp_path / "incarnation").write_text("7\n")
        with pytest.raises(IncarnationSupersededError, match=r"incarnation 1 .* incarnation 7"):
            run.check_incarnation()


def test_one_process_cannot_open_a_folder_twice(tmp_path: Path) -> None:
    """Also not by another spelling of its path."""
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with RunFolder.create(tmp_path / "run"):
        for path in (tmp_path / "run", tmp_path / "link"):
            with pytest.raises(RunFolderLockedError, match=str(os.getpid())):
                RunFolder.open(path, resume=True)
    RunFolder.open(tmp_path / "run", resume=True).close()


_HOLDER = """
import sys
from pathlib import Path
from quiesce.checkpoint.runfolder import RunFolder
run = RunFolder.create(Path(sys.argv[1]))
run.next_incarnation()
print("held", flush=True)
sys.stdin.read()
"""


def test_two_processes_cannot_run_in_one_folder_and_a_dead_one_holds_nothing(tmp_path: Path) -> None:
    """The second is told who runs there; once that process is killed, its lock is gone with it."""
    with subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        for resume in (False, True):
            with pytest.raises(RunFolderLockedError, match=f"process {other.pid} on "):
                RunFolder.open(tmp_path, resume=resume)
        other.send_signal(signal.SIGKILL)
        other.wait()
    with RunFolder.open(tmp_path, resume=True) as run:
        assert run.next_incarnation() == 2


def test_a_forked_child_keeps_nobody_out(tmp_path: Path) -> None:
    """Loader workers outlive a killed parent for a while; the run can be resumed at once all the same."""
    program = _HOLDER.replace('print("held", flush=True)\n', "").replace(
        "sys.stdin.read()",
        "import os, time\n"
        "if os.fork():\n"
        "    print('held', flush=True)\n"
        "    os.kill(os.getpid(), 9)\n"
        "time.sleep(30)",
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, start_new_session=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"held\n"
        other.wait()
        RunFolder.open(tmp_path, resume=True).close()
        os.killpg(other.pid, signal.SIGKILL)


# ------------------------------------------------------------------------------------------------- the
# journal


def trained(run: RunFolder, step: int, *groups: str) -> None:
    """Record a trained step."""
    run.journal.append("trained", run.incarnation, step=step, groups=groups)


def cut(cut_id: str, *, step: int, incarnation: int, parent: str | None) -> CutState:
    """Return a cut to restore; a folder looks at nothing else of it."""
    return replace(clean_cut(), cut_id=cut_id, step=step, incarnation=incarnation, parent_cut=parent)


def start(path: Path) -> RunFolder:
    """Open a folder and start an incarnation."""
    run = RunFolder.open(path, resume=True)
    run.next_incarnation()
    return run


def test_what_was_trained_after_the_restored_cut_is_rolled_back(tmp_path: Path) -> None:
    """Groups of the undone steps may be trained again; along the surviving lineage each counts once."""
    with start(tmp_path) as run:
        trained(run, 1, "a")
        run.journal.append("published", 1, step=1, cut_id="c1")
        trained(run, 2, "b")
    with start(tmp_path) as run:
        undone = run.record_restored(cut("c1", step=1, incarnation=1, parent=None))
        assert [record.groups for record in undone] == [("b",)]
        trained(run, 2, "b", "x")
    records = read_journal(tmp_path / "lineage.jsonl")
    assert [record.groups for record in surviving(records)] == [("a",), ("b", "x")]
    assert [record.event for record in records] == [
        "started",
        "trained",
        "published",
        "trained",
        "started",
        "rolled_back",
        "restored",
        "trained",
    ]


def test_a_restore_further_back_undoes_whole_incarnations_once(tmp_path: Path) -> None:
    """Two resumes in a row, both to the older cut: nothing is undone twice, nothing survives wrongly."""
    with start(tmp_path) as run:
        trained(run, 1, "a")
        trained(run, 2, "b")
    with start(tmp_path) as run:
        run.record_restored(cut("c1", step=1, incarnation=1, parent="c0"))
        trained(run, 2, "c")
        trained(run, 3, "d")
    with start(tmp_path) as run:
        undone = run.record_restored(cut("c1", step=1, incarnation=1, parent="c0"))
        assert [record.groups for record in undone] == [("c",), ("d",)]
        assert run.lineage == {"c1", "c0"}
        assert run.restored_from == "c1"
    assert [record.groups for record in surviving(read_journal(tmp_path / "lineage.jsonl"))] == [("a",)]


def test_marks_that_a_crash_left_unmade_are_made_by_the_next_restore(tmp_path: Path) -> None:
    """Marking is idempotent: what was marked is not marked again, what was not is."""
    with start(tmp_path) as run:
        trained(run, 2, "a")
        trained(run, 3, "b")
    with start(tmp_path) as run:
        run.journal.append("rolled_back", 1, step=2, cut_id="c1", groups=("a",))
    with start(tmp_path) as run:
        undone = run.record_restored(cut("c1", step=1, incarnation=1, parent=None))
        assert [record.groups for record in undone] == [("b",)]


def test_the_lineage_follows_parents_through_restores(tmp_path: Path) -> None:
    """Also past checkpoints that retention deleted long ago, and not into branches that were left."""
    with start(tmp_path) as run:
        for number, parent in ((0, None), (1, "c0"), (2, "c1")):
            run.journal.append("published", 1, step=number, cut_id=f"c{number}", parent_cut=parent)
    with start(tmp_path) as run:
        run.record_restored(cut("c1", step=1, incarnation=1, parent="c0"))
        run.journal.append("published", 2, step=2, cut_id="d2", parent_cut="c1")
    with start(tmp_path) as run:
        run.record_restored(cut("d2", step=2, incarnation=2, parent="c1"))
        assert run.lineage == {"d2", "c1", "c0"}


def test_a_torn_last_line_is_cut_off_and_a_damaged_one_is_named(tmp_path: Path) -> None:
    """A crash in the middle of a write costs the line that nobody relied on; damage elsewhere is an error."""
    with start(tmp_path) as run:
        trained(run, 1, "a")
    path = tmp_path / "lineage.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"event":"trai')
    assert len(read_journal(path)) == 2
    RunFolder.open(tmp_path, resume=True).close()
    assert path.read_bytes() == whole
    path.write_bytes(b'{"event":"trained"}\n' + whole)
    with pytest.raises(RunFolderError, match=r"lineage\.jsonl:1"):
        read_journal(path)


def test_a_record_survives_its_line() -> None:
    """What is written is what is read."""
    record = JournalRecord("trained", 3, 7, "cut", None, ("a", "b"), 12.5)
    assert JournalRecord.from_line(record.to_line().rstrip(), "here") == record
    with pytest.raises(RunFolderError, match="here"):
        JournalRecord.from_line(record.to_line().replace(b'"incarnation":3', b'"incarnation":true'), "here")


def test_a_line_that_could_not_be_written_goes_before_the_next_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk delays the journal, and keeps its order and its lines whole."""
    with start(tmp_path) as run:
        run.journal.sync()
        with watched_disk(monkeypatch) as disk:
            half = [OSError(errno.ENOSPC, "full")]
            real = os.write

            def torn(fd: int, data: bytes) -> int:
                """Write half of a line of the journal, then fail."""
                if half and Path(f"/proc/self/fd/{fd}").readlink() == run.journal.path:
                    real(fd, bytes(data)[:10])
                    raise half[0]
                return real(fd, data)

            monkeypatch.setattr(os, "write", torn)
            trained(run, 1, "a")
            with pytest.raises(OSError, match="full"):
                run.journal.sync()
            trained(run, 2, "b")
            half.clear()
            run.journal.sync()
            assert disk.counts["truncate"] >= 1
    records = read_journal(tmp_path / "lineage.jsonl")
    assert [record.groups for record in records if record.event == "trained"] == [("a",), ("b",)]


def test_an_unknown_event_is_refused(tmp_path: Path) -> None:
    """The set is closed: audits read it."""
    with start(tmp_path) as run, pytest.raises(ValueError, match="paused"):
        run.journal.append("paused", 1)
