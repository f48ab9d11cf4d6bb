"""Which checkpoints stay."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from quiesce.checkpoint import retention
from quiesce.checkpoint.retention import Retention, is_usable
from tests.save_rig import Rig, watched_disk


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    """A run that keeps two."""
    rig = Rig(tmp_path / "run", keep=2)
    yield rig
    await rig.close()


async def steps(rig: Rig, count: int) -> None:
    """Save, and train one group, so many times."""
    for _ in range(count):
        assert (await rig.save()).outcome == "completed"
        await rig.train([await rig.finished()])


def damage(path: Path) -> None:
    """Flip a byte; size and name stay."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


async def test_the_last_ones_stay(rig: Rig) -> None:
    """Older ones go as newer ones come."""
    await steps(rig, 4)
    assert rig.names() == ["step_2", "step_3"]


async def test_a_damaged_checkpoint_is_not_counted_and_not_deleted(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    """One flipped byte in a file of the same size: an older good one stays in its place."""
    await steps(rig, 2)
    damage(rig.run.checkpoints / "step_1" / "ledger.json")
    await steps(rig, 1)
    assert rig.names() == ["step_0", "step_1", "step_2"]
    assert "step_1 is not usable" in caplog.text
    await steps(rig, 1)
    assert rig.names() == ["step_2", "step_3"]


async def test_folders_that_are_no_checkpoints_are_neither_counted_nor_deleted(rig: Rig) -> None:
    """Suspects, empty folders under a checkpoint's name, and other people's files."""
    await steps(rig, 2)
    for name in ("step_7.suspect", "notes", "corrupt-step_0"):
        (rig.run.checkpoints / name).mkdir()
    (rig.run.checkpoints / "step_0").rename(rig.run.checkpoints / "kept")
    (rig.run.checkpoints / "step_0").mkdir()
    await steps(rig, 2)
    assert rig.names() == ["corrupt-step_0", "kept", "notes", "step_0", "step_2", "step_3", "step_7.suspect"]


async def test_the_last_good_one_is_never_deleted(rig: Rig) -> None:
    """Whatever was published after it, as long as none of it is usable."""
    await steps(rig, 2)
    keeper = Retention(rig.run, 1)
    damage(rig.run.checkpoints / "step_1" / "manifest.json")
    assert keeper.apply() == []
    assert is_usable(rig.run.checkpoints / "step_0")


async def test_a_checkpoint_is_renamed_before_it_is_deleted(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill during the deletion leaves no half checkpoint under a checkpoint's name."""
    await steps(rig, 2)
    with watched_disk(monkeypatch) as disk:
        Retention(rig.run, 1).apply()
    assert [entry for entry in disk.operations if entry[1] != "lineage.jsonl"] == [
        ("rename", "trash-step_0"),
        ("fsync_folder", "checkpoints"),
        ("remove", "trash-step_0"),
    ]
    assert rig.names() == ["step_1"]


async def test_what_was_proved_is_read_again_only_when_it_was_touched(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checkpoints may be many gigabytes: a new one costs no reading of the old ones."""
    await steps(rig, 3)
    read: list[str] = []
    real = retention.is_usable

    def noting(folder: Path) -> bool:
        read.append(folder.name)
        return real(folder)

    monkeypatch.setattr(retention, "is_usable", noting)
    await steps(rig, 1)
    assert read == []
    os.utime(rig.run.checkpoints / "step_3" / "ledger.json")
    await steps(rig, 1)
    assert read == ["step_3"]


async def test_a_checkpoint_of_an_earlier_incarnation_is_proved_by_reading_it(rig: Rig) -> None:
    """A new process knows nothing of what the old one wrote."""
    await steps(rig, 2)
    damage(rig.run.checkpoints / "step_1" / "trainer" / "weights.bin")
    assert not is_usable(rig.run.checkpoints / "step_1")
    assert Retention(rig.run, 1).apply() == []


def test_keeping_none_is_refused(tmp_path: Path) -> None:
    """A run without a checkpoint cannot be resumed."""
    from quiesce.checkpoint.runfolder import RunFolder

    with RunFolder.create(tmp_path) as run, pytest.raises(ValueError, match="keep cannot be 0"):
        Retention(run, 0)
