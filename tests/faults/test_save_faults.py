"""Saving on a disk that is full, forbidden or broken, and in a process that is killed half-way."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from quiesce.checkpoint import files
from quiesce.checkpoint.retention import is_usable
from quiesce.checkpoint.runfolder import RunFolder
from tests.save_rig import Disk, Rig, broken, watched_disk

CODES = [(errno.ENOSPC, "disk"), (errno.EACCES, "permission"), (errno.EIO, "io")]


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    """A run with one published checkpoint and something new to save."""
    rig = Rig(tmp_path / "run")
    await rig.finished()
    await rig.save()
    await rig.train([await rig.finished()])
    rig.run.journal.sync()  # its thread writes nothing into what a test watches
    yield rig
    await rig.close()


def fail_at(disk: Disk, operation: str, name: str, code: int) -> None:
    """Fail one operation on one kind of path."""

    def fail(happening: str, path: Path) -> BaseException | None:
        hit = happening == operation and name in path.name
        return OSError(code, os.strerror(code), str(path)) if hit else None

    disk.fail = fail


@pytest.mark.parametrize("code,reason", CODES)
@pytest.mark.parametrize(
    "operation,name",
    [
        ("mkdir", ".tmp-"),
        ("mkdir", "trainer"),
        ("create", "ledger.json"),
        ("write", "buffer.json"),
        ("fsync", "position.json"),
        ("fsync", "weights.bin"),
        ("fsync_folder", "trainer"),
        ("write", "manifest.json"),
        ("fsync", "manifest.json"),
        ("fsync_folder", ".tmp-"),
        ("rename", "step_1"),
    ],
)
async def test_a_failed_operation_costs_this_attempt_only(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, operation: str, name: str, code: int, reason: str
) -> None:
    """The checkpoint before stays the newest, nothing half-written is left, the next attempt succeeds."""
    with watched_disk(monkeypatch) as disk:
        fail_at(disk, operation, name, code)
        result = await rig.save()
    assert (result.outcome, result.reason) == ("failed", reason)
    assert isinstance(result.error, OSError)
    assert rig.saver.last_failed
    assert rig.seen.ended[-1] == (1, "failed", reason)
    assert rig.names() == ["step_0"]
    assert is_usable(rig.run.checkpoints / "step_0")
    assert rig.plane.statistics().open_snapshots == 0
    assert rig.barrier.statistics().phase == "open"
    assert (await rig.save()).outcome == "completed"
    assert not rig.saver.last_failed
    assert rig.names() == ["step_0", "step_1"]


async def test_rows_that_the_disk_refuses_fail_the_attempt(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the data plane writes itself is part of the attempt."""
    real = os.open

    def refuse(path: str | os.PathLike[str], *args: int, **more: int) -> int:
        """Open anything but rows."""
        if "rows-" in str(path):
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return real(path, *args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        result = await rig.save()
    assert (result.outcome, result.reason) == ("failed", "disk")
    assert rig.names() == ["step_0"]


async def test_a_journal_that_cannot_be_synced_publishes_nothing(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint that knew of a step that the journal lacks would break the proof of exactly once."""
    with watched_disk(monkeypatch) as disk:
        fail_at(disk, "fsync", "lineage.jsonl", errno.ENOSPC)
        result = await rig.save()
    assert (result.outcome, result.reason) == ("failed", "disk")
    assert rig.names() == ["step_0"]


async def test_a_folder_that_cannot_be_synced_after_the_rename_fails_and_the_next_cut_is_beside_it(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint that is whole but perhaps not durable is not called published, and not replaced."""
    with watched_disk(monkeypatch) as disk:
        fail_at(disk, "fsync_folder", "checkpoints", errno.EIO)
        result = await rig.save()
    assert (result.outcome, result.reason) == ("failed", "io")
    again = await rig.save()
    assert again.path == rig.run.checkpoints / "step_1.1"
    assert is_usable(rig.run.checkpoints / "step_1")


async def test_a_temporary_folder_that_cannot_be_removed_is_left_to_the_next_start(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The failure that is reported is the first one."""
    with watched_disk(monkeypatch) as disk:
        disk.fail = lambda operation, _: (
            OSError(errno.EIO, "broken") if operation in {"remove", "rename"} else None
        )
        result = await rig.save()
    assert (result.outcome, result.reason) == ("failed", "io")
    assert "could not be removed" in caplog.text
    assert [name for name in rig.names() if ".tmp-" in name]
    await rig.close()
    resumed = Rig(rig.run.path, resume=True)
    await resumed.save()
    assert not [name for name in resumed.names() if ".tmp-" in name]
    await resumed.close()


async def test_old_checkpoints_that_cannot_be_deleted_do_not_fail_the_new_one(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Retention is not part of the promise; its failures are counted by themselves."""
    await rig.save()
    await rig.train([await rig.finished()])
    with watched_disk(monkeypatch) as disk:
        fail_at(disk, "rename", "trash-", errno.EIO)
        result = await rig.save()
    assert result.outcome == "completed"
    assert rig.saver.statistics().retention_failures == 1
    assert rig.names() == ["step_0", "step_1", "step_2"]
    assert not rig.saver.last_failed


async def test_a_suspect_that_cannot_be_kept_is_a_refusal_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cut was refused before the disk was full."""
    rig = Rig(tmp_path / "run", verify=broken)
    await rig.save()
    await rig.read()
    with watched_disk(monkeypatch) as disk:
        fail_at(disk, "create", "violations.json", errno.ENOSPC)
        result = await rig.save()
    assert (result.outcome, result.reason) == ("refused", "invariant")
    assert isinstance(result.error, OSError)
    assert rig.names() == ["step_0"]
    await rig.close()


async def test_everything_is_durable_before_the_rename_and_the_rename_before_the_end(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files, their folders, the manifest, its folder, the journal; one rename; the folder around it."""
    order: list[tuple[str, str]] = []
    with watched_disk(monkeypatch) as disk:

        def note(operation: str, path: Path) -> None:
            order.append((operation, "tmp" if ".tmp-" in path.name else path.name))

        disk.fail = note
        await rig.save()
    synced = [name for operation, name in order if operation in {"fsync", "fsync_folder"}]
    rename = order.index(("rename", "step_1"))
    assert order[rename + 1] == ("fsync_folder", "checkpoints")
    before = order[:rename]
    manifest = before.index(("create", "manifest.json"))
    assert before[manifest + 2] == ("fsync", "manifest.json")
    assert before[manifest + 3] == ("fsync_folder", "tmp")
    assert ("fsync", "lineage.jsonl") in before[manifest + 3 :]
    assert before.index(("fsync", "weights.bin")) < before.index(("fsync_folder", "trainer")) < manifest
    for name in ("sampler", "position", "accounting", "spares", "buffer", "ledger"):
        assert before.index(("fsync", f"{name}.json")) < manifest
    assert {"manifest.json", "tmp", "trainer", "checkpoints"} <= set(synced)
    assert [name for operation, name in order if operation == "rename"] == ["step_1"]


_KILLED = """
import asyncio, os, sys
from pathlib import Path
from quiesce.checkpoint import files
from tests.save_rig import Rig

async def main(path, operation, name):
    rig = Rig(path, keep=1)
    group = await rig.finished()
    result = await rig.save()
    assert result.outcome == "completed", result
    await rig.train([group])

    def before(happening, where):
        if happening == operation and name in where.name:
            os.kill(os.getpid(), 9)

    files.before = before
    await rig.finished()
    await rig.save()
    print("never killed")

asyncio.run(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3]))
"""


@pytest.mark.parametrize(
    "operation,name,survivor",
    [
        ("mkdir", ".tmp-", "step_0"),
        ("write", "ledger.json", "step_0"),
        ("fsync_folder", "trainer", "step_0"),
        ("create", "manifest.json", "step_0"),
        ("write", "manifest.json", "step_0"),
        ("fsync_folder", ".tmp-", "step_0"),
        ("fsync", "lineage.jsonl", "step_0"),
        ("rename", "step_1", "step_0"),
        ("fsync_folder", "checkpoints", "step_1"),
        ("rename", "trash-step_0", "step_1"),
        ("remove", "trash-step_0", "step_1"),
    ],
)
def test_a_kill_between_two_operations_leaves_a_whole_newest_checkpoint(
    tmp_path: Path, operation: str, name: str, survivor: str
) -> None:
    """SIGKILL right before an operation: the newest published folder is usable, the run can be resumed."""
    run = tmp_path / "run"
    root = Path(__file__).parents[2]
    ended = subprocess.run(
        [sys.executable, "-c", _KILLED, str(run), operation, name],
        cwd=root,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(root), *sys.path])},
        check=False,
        capture_output=True,
        text=True,
    )
    assert ended.returncode == -signal.SIGKILL, ended.stdout + ended.stderr
    with RunFolder.open(run, resume=True) as folder:
        assert folder.next_incarnation() == 2
        published = folder.published()
        assert str(published[-1]) == survivor
        assert all(is_usable(folder.checkpoints / str(known)) for known in published)
        for leftover in folder.leftovers():
            files.remove_tree(leftover)
        names = {path.name for path in folder.checkpoints.iterdir()}
        assert names == {str(known) for known in published}
