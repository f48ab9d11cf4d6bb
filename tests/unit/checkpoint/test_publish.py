"""The rename that makes a cut the newest checkpoint."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from quiesce.checkpoint import publish
from quiesce.checkpoint.documents import Manifest
from quiesce.checkpoint.runfolder import CheckpointName
from quiesce.errors import IncarnationSupersededError
from tests.save_rig import Rig, watched_disk


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    """A run with two checkpoints."""
    rig = Rig(tmp_path / "run", keep=9)
    await rig.save()
    await rig.train([await rig.finished()])
    await rig.save()
    yield rig
    await rig.close()


def manifest(rig: Rig, name: str = "step_1") -> Manifest:
    """Return a published manifest."""
    found = publish.read_manifest(rig.run.checkpoints / name)
    assert found is not None
    return found


def temporary(rig: Rig, step: int, cut_id: str) -> Path:
    """Make an empty temporary folder."""
    folder = rig.run.temporary(step, cut_id)
    folder.mkdir()
    return folder


def test_a_superseded_incarnation_renames_nothing(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not its own folder, and not those that it would have set aside."""
    stranger = rig.run.checkpoints / "step_5"
    stranger.mkdir()
    (rig.run.path / "incarnation").write_text("2\n")
    ours = replace(manifest(rig), step=2, cut_id="new")
    with watched_disk(monkeypatch) as disk:
        with pytest.raises(IncarnationSupersededError):
            publish.publish(rig.run, temporary(rig, 2, "new"), ours, set())
        with pytest.raises(IncarnationSupersededError):
            publish.publish_suspect(rig.run, temporary(rig, 2, "suspect"), ours)
    assert "rename" not in disk.counts
    assert stranger.exists()


def test_the_incarnation_is_checked_again_right_before_the_rename(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the first look and the rename other folders are set aside, which may take long."""
    (rig.run.checkpoints / "step_5").mkdir()
    with watched_disk(monkeypatch) as disk:

        def supersede(operation: str, path: Path) -> None:
            if operation == "rename" and path.name.startswith("aside-"):
                (rig.run.path / "incarnation").write_text("2\n")

        disk.fail = supersede
        with pytest.raises(IncarnationSupersededError):
            publish.publish(
                rig.run, temporary(rig, 2, "new"), replace(manifest(rig), step=2, cut_id="new"), set()
            )
    assert [str(name) for name in rig.run.published()] == ["step_0", "step_1"]


def test_serials_go_on_after_the_highest_one(rig: Rig) -> None:
    """Also when one in between was deleted, so that a name never comes back."""
    for name in ("step_1.1", "step_1.4"):
        folder = rig.run.checkpoints / name
        folder.mkdir()
        (folder / "manifest.json").write_bytes(replace(manifest(rig), cut_id=name).to_bytes())
    target = publish.publish(rig.run, temporary(rig, 1, "new"), replace(manifest(rig), cut_id="new"), set())
    assert target.name == "step_1.5"


def test_a_cut_of_the_lineage_counts_as_ours_whoever_captured_it(rig: Rig) -> None:
    """A resumed run publishes beside the cut that it was restored from, and sets strangers aside."""
    stranger = replace(manifest(rig), incarnation=7, cut_id="stranger")
    ancestor = replace(manifest(rig), incarnation=8, cut_id="ancestor")
    for name, content in (("step_3", ancestor), ("step_3.1", stranger), ("step_4", stranger)):
        folder = rig.run.checkpoints / name
        folder.mkdir()
        (folder / "manifest.json").write_bytes(content.to_bytes())
    ours = replace(manifest(rig), step=3, cut_id="new")
    target = publish.publish(rig.run, temporary(rig, 3, "new"), ours, {"ancestor"})
    assert target.name == "step_3.1"
    assert rig.names() == [
        "aside-step_3.1-i00000001",
        "aside-step_4-i00000001",
        "step_0",
        "step_1",
        "step_3",
        "step_3.1",
    ]


def test_setting_aside_never_overwrites(rig: Rig) -> None:
    """A second stranger under the same name gets a name of its own."""
    for _ in range(2):
        (rig.run.checkpoints / "step_9").mkdir()
        publish.set_newer_aside(rig.run, CheckpointName(1), set())
    assert [name for name in rig.names() if name.startswith("aside-")] == [
        "aside-step_9-i00000001",
        "aside-step_9-i00000001.1",
    ]


def test_a_manifest_that_cannot_be_read_is_none(rig: Rig) -> None:
    """Missing, damaged or a folder: whoever asks treats the checkpoint as not usable."""
    path = rig.run.checkpoints / "step_1" / "manifest.json"
    content = path.read_bytes()
    for damaged in (content[:-5], content.replace(b'"step":1', b'"step":true'), b""):
        path.write_bytes(damaged)
        assert publish.read_manifest(path.parent) is None
    path.unlink()
    assert publish.read_manifest(path.parent) is None
    path.mkdir()
    assert publish.read_manifest(path.parent) is None
