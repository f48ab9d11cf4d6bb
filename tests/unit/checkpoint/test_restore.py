"""Restoring: the newest whole checkpoint or none, every group back with its owner, and only counted rows."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quiesce.accounting import Accounting
from quiesce.admission import Admission
from quiesce.barrier import DataPlaneCheckpointBarrier
from quiesce.buffer import ReplayBuffer
from quiesce.checkpoint import files, restore
from quiesce.checkpoint.cut import CapturedCut, CommittedPosition, CutState
from quiesce.checkpoint.documents import DOCUMENTS, MANIFEST, parse_manifest, seal_manifest
from quiesce.checkpoint.loading import checkpoint_info
from quiesce.checkpoint.restore import (
    LoadedCheckpoint,
    RestoredRun,
    RestoreTargets,
    absolve,
    find_checkpoints,
    load_checkpoint,
    load_newest,
    restore_into,
)
from quiesce.dataplane import MemoryDataPlane
from quiesce.errors import (
    CapacityError,
    ConfigError,
    CorruptCheckpointError,
    DataPlaneError,
    NothingToRestoreError,
    RestoreRefusedError,
)
from quiesce.invariants import Violation, check_cut, critical
from quiesce.ledger import RolloutLedger
from quiesce.observers import Hub
from quiesce.samplers import InOrderSampler, Sampler, WindowedSampler
from quiesce.signals import TrainerVersion
from quiesce.spares import SparePool
from quiesce.types import RowKey
from tests.save_rig import Rig, staged_row
from tests.unit.checkpoint.cuts import admitted, clean_cut, entry, ref


class Fresh:
    """The fresh primitives of the next incarnation."""

    def __init__(
        self, incarnation: int, sampler: Callable[[DataPlaneCheckpointBarrier], Sampler] = WindowedSampler
    ) -> None:
        self.hub = Hub(strict=True)
        self.ended: list[tuple[str, str, dict[str, int]]] = []
        self.parts: list[dict[str, int]] = []
        self.begun = 0
        self.hub.subscribe(self)
        self.incarnation = incarnation
        self.barrier = DataPlaneCheckpointBarrier(hub=self.hub)
        self.sampler = sampler(self.barrier)
        self.versions = TrainerVersion(hub=self.hub)
        self.ledger = RolloutLedger(self.barrier)
        self.spares = SparePool(self.barrier)
        self.accounting = Accounting(self.barrier)
        self.plane = MemoryDataPlane(incarnation, tensors="numpy", hub=self.hub)
        self.buffer = ReplayBuffer(self.barrier, self.ledger, self.plane)
        self.position: CommittedPosition | None = None

    def restore_started(self) -> None:
        """Count it."""
        self.begun += 1

    def restore_ended(self, outcome: str, reason: str, parts: dict[str, int], groups: dict[str, int]) -> None:
        """Note it."""
        self.ended.append((outcome, reason, groups))
        self.parts.append(dict(parts))

    def targets(self, **changes: Any) -> RestoreTargets:  # noqa: ANN401 - of the record
        """Return them as the targets of a restore."""

        def apply(_cut: object, restored: RestoredRun) -> None:
            self.position = restored.position

        base = RestoreTargets(
            barrier=self.barrier,
            sampler=self.sampler,
            accounting=self.accounting,
            spares=self.spares,
            buffer=self.buffer,
            ledger=self.ledger,
            dataplane=self.plane,
            versions=self.versions,
            apply=apply,
            staging=True,
        )
        return replace(base, **changes)

    async def restore(self, loaded: LoadedCheckpoint, **changes: Any) -> RestoredRun:  # noqa: ANN401 - of the record
        """Restore into them."""
        return await restore_into(loaded, self.targets(**changes), incarnation=self.incarnation)


@pytest.fixture
async def saved(tmp_path: Path) -> AsyncIterator[Rig]:
    """A run with groups in every state, two checkpoints, staged rows of a group in flight and rows of nobody."""
    rig = Rig(tmp_path / "run")
    await rig.save()
    trained = [await rig.finished(), await rig.finished()]
    await rig.train(trained)
    await rig.finished()
    await rig.finished()
    await rig.read()
    retried = await rig.read()
    async with rig.barrier.mutation("retry") as cut:
        rig.ledger.retry_group(cut, retried)
    rig.stage(retried, "g0/c0 g1/final")  # of the attempt that was given up
    rig.stage(retried, "g0/final g0/c0 g1/c0 g1/c1 g1/c3", attempt=1)
    assert (await rig.save()).outcome == "completed"
    yield rig
    await rig.close()


def newest(rig: Rig) -> Path:
    """Return the newest checkpoint's folder."""
    return find_checkpoints(rig.run.checkpoints)[0].path


def load(path: Path) -> LoadedCheckpoint:
    """Load one checkpoint by its folder."""
    info = checkpoint_info(path)
    assert info is not None
    return load_checkpoint(info)


def reseal(path: Path, name: str, change: Callable[[Any], object]) -> None:
    """Change a document and give the manifest its new digest, as a bug in the writer would."""
    import hashlib

    body = json.loads((path / name).read_bytes())
    change(body)
    content = json.dumps(body).encode()
    (path / name).write_bytes(content)
    manifest = json.loads((path / MANIFEST).read_bytes())
    manifest["files"][name] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    write_manifest(path, manifest)


def write_manifest(path: Path, body: dict[str, Any]) -> None:
    """Write a manifest's changed body with a digest of its own that fits."""
    body.pop("sha256", None)
    (path / MANIFEST).write_bytes(seal_manifest(body))


async def test_every_group_comes_back_with_its_owner_and_its_rows(saved: Rig) -> None:
    """Cursor exact, attempts kept, incarnation rewritten in every key, counted and staged rows filled and no other."""
    fresh = Fresh(2)

    restored = await fresh.restore(load_newest(saved.run.path))

    assert fresh.sampler.dispatch_cursor == saved.cursor
    assert [record.attempt for record in fresh.ledger.records()] == [0, 1]
    assert [item.group_id for item in fresh.buffer.ready()] == [
        item.group_id for item in saved.buffer.ready()
    ]
    keys = [key for item in fresh.buffer.ready() for key in item.keys]
    assert {key.incarnation for key in keys} == {2}
    retried = fresh.ledger.records()[1].group_id
    staged = tuple(saved.keys(retried, "g0/final g1/c0 g1/c1", attempt=1, incarnation=2))
    assert restored.staged == {retried: staged}
    assert sorted(fresh.plane.keys(), key=RowKey.encode) == sorted([*keys, *staged], key=RowKey.encode)
    assert restored.rows == len(keys) + len(staged)
    for key, row in zip(staged, fresh.plane.get(staged), strict=True):
        assert np.array_equal(np.asarray(row["tokens"]), staged_row(key)["tokens"])
    assert np.array_equal(np.asarray(fresh.plane.get(keys[1:2])[0]["tokens"]), np.arange(8) + 1)
    assert fresh.accounting.capture() == saved.accounting.capture()
    assert (fresh.position, fresh.versions.value, restored.step) == (saved.position, 1, 1)
    assert fresh.barrier.mutation_version > load_newest(saved.run.path).state.mutation_version
    assert fresh.ended == [("completed", "", {"ledger": 2, "spares": 0, "buffer": 2, "training": 0})]


async def test_staged_rows_stay_in_the_checkpoint_unless_somebody_goes_on_from_them(saved: Rig) -> None:
    """A rollout that begins anew puts its final rows under the keys that they would have."""
    await saved.close()
    fresh = Fresh(2)
    restored = await fresh.restore(load_newest(saved.run.path), staging=False)
    counted = [key for entry in restored.state.entries for key in entry.keys]
    assert restored.staged == {}
    assert sorted(fresh.plane.keys(), key=RowKey.encode) == sorted(counted, key=RowKey.encode)
    assert restored.rows == len(counted)


async def test_a_checkpoint_without_staged_rows_is_restored(saved: Rig) -> None:
    """Absent staging is never an error: the group's generations begin anew."""
    retried = saved.ledger.records()[1].group_id
    saved.plane.clear(key for key in saved.plane.keys() if key.group_id == retried)  # noqa: SIM118 - no dictionary
    async with saved.barrier.mutation("retry"):
        pass  # staged rows come and go without a slot: something else has to change for a cut to be taken
    assert (await saved.save()).outcome == "completed"
    fresh = Fresh(2)

    restored = await fresh.restore(load_newest(saved.run.path))

    assert restored.staged == {}
    assert retried in fresh.ledger
    assert len(fresh.plane.keys()) == restored.rows == 4


async def test_a_restored_generation_goes_on_where_its_chunks_end(saved: Rig) -> None:
    """The next chunk is put, saved and restored once more, beside those of the first life."""
    path, retried = saved.run.path, saved.ledger.records()[1].group_id
    await saved.close()
    rig = Rig(path, resume=True)
    targets = RestoreTargets(
        staging=True,
        barrier=rig.barrier,
        sampler=WindowedSampler(rig.barrier),
        accounting=rig.accounting,
        spares=rig.spares,
        buffer=rig.buffer,
        ledger=rig.ledger,
        dataplane=rig.plane,
    )
    loaded = load_newest(path)
    restored = await restore_into(loaded, targets, incarnation=2)
    rig.run.record_restored(loaded.state)
    rig.cursor, rig.step, rig.position = restored.state.sampler.cursor, restored.step, restored.position
    rig.saver = rig.checkpointer(restored=loaded.state)

    rig.stage(retried, "g1/c2", attempt=1)

    assert (await rig.save()).outcome == "completed"
    again = await Fresh(3).restore(load_newest(path))
    assert again.staged == {
        retried: tuple(rig.keys(retried, "g0/final g1/c0 g1/c1 g1/c2", attempt=1, incarnation=3))
    }
    await rig.close()


async def test_an_unstarted_claim_comes_back_as_ready(saved: Rig) -> None:
    """Its step will be taken again."""
    async with saved.barrier.mutation("sample_clear") as cut:
        claim = saved.buffer.claim_for_training(cut, [saved.buffer.ready()[0].group_id])
    await saved.save()
    fresh = Fresh(2)

    await fresh.restore(load_newest(saved.run.path))

    assert {item.group_id for item in fresh.buffer.ready()} >= {claim.entries[0].group_id}
    assert fresh.buffer.claims() == ()


async def test_a_second_restore_restores_what_the_first_one_did(saved: Rig, tmp_path: Path) -> None:
    """A run that is killed right after its first save loses nothing, twice in a row."""
    path = saved.run.path
    before = load_newest(path).state
    await saved.close()
    rig = Rig(path, resume=True)
    fresh = Fresh(3)
    loaded = load_newest(path)
    targets = RestoreTargets(
        barrier=rig.barrier,
        sampler=WindowedSampler(rig.barrier),
        accounting=rig.accounting,
        spares=rig.spares,
        buffer=rig.buffer,
        ledger=rig.ledger,
        dataplane=rig.plane,
    )
    restored = await restore_into(loaded, targets, incarnation=2)
    rig.run.record_restored(before)
    rig.cursor, rig.step, rig.position = restored.state.sampler.cursor, restored.step, restored.position
    assert (await rig.save()).outcome == "completed"

    again = await fresh.restore(load_newest(path))

    assert again.state.ledger == restored.state.ledger
    assert [item.group_id for item in again.state.entries] == [item.group_id for item in before.entries]
    assert again.state.accounting == before.accounting
    await rig.close()


# ------------------------------------------------------------------------------------------------------ choosing


def test_checkpoints_are_found_newest_first_by_step_and_serial(tmp_path: Path) -> None:
    """Numbers, not text; and nothing that is unfinished, retired, aside, corrupt or suspect."""
    for name in (
        "step_9", "step_10", "step_10.2", "step_10.10", "step_2.1", "step_11.suspect", "step_12.tmp-i1-x", "trash-step_8",
        "corrupt-step_13", "aside-step_14", "step_007", "step_-1", "step_3.0", "stepping",
    ):  # fmt: skip
        (tmp_path / name).mkdir()

    found = [info.path.name for info in find_checkpoints(tmp_path)]

    assert found == ["step_10.10", "step_10.2", "step_10", "step_9", "step_2.1"]


async def test_a_corrupt_newest_falls_back_loudly_and_is_renamed(
    saved: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    """The one before it is loaded, the corrupt one cannot be met again, and log and hook say so."""
    bad = newest(saved)
    (bad / "ledger.json").write_bytes(b"{}")
    fresh = Fresh(2)

    with caplog.at_level(logging.ERROR, "quiesce.checkpoint"):
        loaded = load_newest(saved.run.path, hub=fresh.hub)

    assert loaded.info.path.name == "step_0"
    assert not bad.exists()
    assert bad.with_name(f"corrupt-{bad.name}").is_dir()
    assert "ledger.json" in caplog.text
    assert fresh.ended == [("refused", "corrupt", {})]
    (parts,) = fresh.parts
    assert list(parts) == ["verify"]
    assert parts["verify"] > 0
    assert fresh.begun == 2  # the second goes on, and is ended by whoever restores it


async def test_a_restore_that_finds_only_corrupt_checkpoints_tells_of_each_once(saved: Rig) -> None:
    """Every one that began has ended."""
    fresh = Fresh(2)
    for info in find_checkpoints(saved.run.checkpoints):
        (info.path / "ledger.json").write_bytes(b"{}")

    with pytest.raises(RestoreRefusedError):
        load_newest(saved.run.path, hub=fresh.hub)

    assert fresh.ended == [("refused", "corrupt", {})] * 2
    assert fresh.begun == 2


async def test_a_refusal_after_a_corrupt_checkpoint_is_told_too(saved: Rig) -> None:
    """The one before the corrupt one is whole, but of another release."""
    fresh = Fresh(2)
    bad, older = (info.path for info in find_checkpoints(saved.run.checkpoints))
    (bad / "ledger.json").write_bytes(b"{}")
    manifest = json.loads((older / MANIFEST).read_bytes())
    manifest["schema_version"] = 99
    write_manifest(older, manifest)

    with pytest.raises(RestoreRefusedError, match="schema"):
        load_newest(saved.run.path, hub=fresh.hub)

    assert fresh.ended == [("refused", "corrupt", {}), ("refused", "schema", {})]
    assert [list(parts) for parts in fresh.parts] == [["verify"]] * 2
    assert fresh.begun == 2


def test_a_folder_that_cannot_be_read_for_whatever_reason_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is no refusal is a failure."""

    def broken(folder: Path) -> list[object]:
        raise MemoryError

    monkeypatch.setattr("quiesce.checkpoint.restore.scan_checkpoints", broken)
    fresh = Fresh(2)

    with pytest.raises(MemoryError):
        load_newest(tmp_path, hub=fresh.hub)

    assert fresh.ended == [("failed", "error", {})]
    assert list(fresh.parts[0]) == ["verify"]


async def test_a_renamed_checkpoint_never_overwrites_another(saved: Rig) -> None:
    """A second corrupt checkpoint of the same step gets a name of its own."""
    bad = newest(saved)
    bad.with_name(f"corrupt-{bad.name}").mkdir()
    (bad / "ledger.json").unlink()

    load_newest(saved.run.path)

    assert bad.with_name(f"corrupt-{bad.name}-1").is_dir()


async def test_a_reader_that_does_not_own_the_folder_renames_nothing(saved: Rig) -> None:
    """The audit and other onlookers leave it as it is."""
    bad = newest(saved)
    (bad / "ledger.json").unlink()

    assert load_newest(saved.run.path, rename_corrupt=False).info.step == 0
    assert bad.is_dir()


@pytest.mark.parametrize("part", [*DOCUMENTS, "rows-00000.safetensors", "trainer/weights.bin", MANIFEST])
async def test_a_missing_part_is_named(saved: Rig, part: str) -> None:
    """One part of the only checkpoint is deleted: the restore is refused and names it, and nothing is renamed."""
    path = newest(saved)
    shutil.rmtree(saved.run.checkpoints / "step_0")
    (path / part).unlink()

    with pytest.raises(RestoreRefusedError) as caught:
        load_newest(saved.run.path)

    assert caught.value.part == part
    assert path.is_dir()


@pytest.mark.parametrize("part", [*DOCUMENTS, "rows-00000.safetensors", "trainer/weights.bin", MANIFEST])
@pytest.mark.parametrize("how", ["flipped", "cut short", "longer"])
async def test_a_damaged_part_is_found_by_its_digest(saved: Rig, part: str, how: str) -> None:
    """One bit, a missing tail or an appended byte, in any file: the part is named."""
    path = newest(saved)
    content = bytearray((path / part).read_bytes())
    if how == "flipped":
        content[len(content) // 2] ^= 1
    elif how == "cut short":
        content = content[: len(content) // 2]
    else:
        content += b"x"
    (path / part).write_bytes(content)

    with pytest.raises(CorruptCheckpointError) as caught:
        load(path)

    assert caught.value.part == part


async def test_a_digest_is_checked_before_its_document_is_parsed(saved: Rig) -> None:
    """A document that would crash a parser is never handed to one."""
    path = newest(saved)
    size = (path / "ledger.json").stat().st_size
    (path / "ledger.json").write_bytes(b"[" * size)

    with pytest.raises(CorruptCheckpointError, match="SHA-256"):
        load(path)


@pytest.mark.parametrize(
    "kind", ["extra file", "extra folder's file", "link", "linked folder", "pipe", "not a folder"]
)
async def test_what_the_manifest_does_not_list_is_refused(saved: Rig, kind: str, tmp_path: Path) -> None:
    """Additions, links (also to a whole, correct file) and special files are never followed."""
    path = newest(saved)
    outside = tmp_path / "outside"
    if kind == "extra file":
        (path / "more.json").write_text("{}")
    elif kind == "extra folder's file":
        (path / "trainer" / "deep").mkdir()
        (path / "trainer" / "deep" / "x").write_text("")
    elif kind == "link":
        (path / "ledger.json").rename(outside)
        (path / "ledger.json").symlink_to(outside)
    elif kind == "linked folder":
        (path / "trainer").rename(outside)
        (path / "trainer").symlink_to(outside, target_is_directory=True)
    elif kind == "pipe":
        os.mkfifo(path / "pipe")
    else:
        path.rename(outside)
        path.symlink_to(outside, target_is_directory=True)

    with pytest.raises(CorruptCheckpointError):
        load(path)


@pytest.mark.parametrize("name", ["../step_0/ledger.json", "/etc/passwd", "trainer/../ledger.json"])
async def test_a_manifest_that_points_outside_is_refused(saved: Rig, name: str) -> None:
    """A path that leaves the folder is a broken manifest, whatever its digest."""
    path = newest(saved)
    body = json.loads((path / MANIFEST).read_bytes())
    body["files"][name] = body["files"]["ledger.json"]
    write_manifest(path, body)

    with pytest.raises(CorruptCheckpointError, match=r"manifest\.json"):
        load(path)


async def test_a_manifest_with_a_key_twice_is_refused(saved: Rig) -> None:
    """Two readers could see two checkpoints."""
    path = newest(saved)
    text = (path / MANIFEST).read_text()
    (path / MANIFEST).write_text('{"step":1,' + text[1:])

    with pytest.raises(CorruptCheckpointError, match="twice"):
        load(path)


async def test_a_folder_with_another_checkpoints_name_is_refused(saved: Rig) -> None:
    """A copied folder cannot pretend to be a later step."""
    shutil.copytree(newest(saved), saved.run.checkpoints / "step_99")

    assert load_newest(saved.run.path).info.step == 1
    assert (saved.run.checkpoints / "corrupt-step_99").is_dir()


async def test_another_schema_version_is_refused_and_nothing_is_renamed(saved: Rig) -> None:
    """A newer release wrote it: falling back would throw its steps away."""
    path = newest(saved)
    body = json.loads((path / MANIFEST).read_bytes()) | {"schema_version": 2}
    write_manifest(path, body)

    with pytest.raises(RestoreRefusedError, match="schema version 2"):
        load_newest(saved.run.path)

    assert path.is_dir()


async def test_an_unreadable_part_is_refused_and_not_taken_for_corrupt(
    saved: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that fails for a moment must not cost the newest checkpoint."""
    real = os.open

    def failing(path: Any, *args: Any, **kwargs: Any) -> int:  # noqa: ANN401 - any value
        if str(path).endswith("ledger.json"):
            raise OSError(5, "Input/output error")
        return real(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", failing)

    with pytest.raises(RestoreRefusedError, match=r"ledger\.json.*Input/output"):
        load_newest(saved.run.path)

    assert newest(saved).is_dir()


async def test_a_document_that_says_the_impossible_is_refused_by_path(saved: Rig) -> None:
    """Its digest is right, so nothing is corrupt: a person decides."""
    path = newest(saved)
    reseal(path, "sampler.json", lambda body: body.update(cursor=True))

    with pytest.raises(RestoreRefusedError, match=r"sampler\.json: \$\.cursor"):
        load_newest(saved.run.path)


@pytest.mark.parametrize(
    "name, change, part",
    [
        ("sampler.json", lambda body: body.update(cursor=3), "cursor_within_lookahead"),
        ("ledger.json", lambda body: body["groups"].pop(), "conservation"),
        ("buffer.json", lambda body: body["ready"].pop(), "conservation"),
        ("position.json", lambda body: body.update(position=99), "conservation"),
        (
            "spares.json",
            lambda body: body["spares"].append({"epoch": 0, "position": 4, "index": 4}),
            "single_owner",
        ),
        ("ledger.json", lambda body: body["groups"][0].update(attempt=5), "digest_matches"),
        ("ledger.json", lambda body: body.update(cut_id="another"), "cut_is_one_instant"),
        ("buffer.json", lambda body: body["ready"][0]["keys"].pop(), "rows_present"),
    ],
)
async def test_a_checkpoint_that_breaks_an_invariant_is_refused_by_name(
    saved: Rig, name: str, change: Callable[[Any], object], part: str
) -> None:
    """Every document's digest is right, and what they say together cannot be."""
    path = newest(saved)
    reseal(path, name, change)

    with pytest.raises(RestoreRefusedError) as caught:
        load_newest(saved.run.path)

    assert caught.value.part == part


@pytest.mark.parametrize("inside", [None, "step_3.tmp-i00000001-cut", "trash-step_2"])
def test_a_folder_without_a_checkpoint_says_so(tmp_path: Path, inside: str | None) -> None:
    """Nothing was published, so there is nothing to lose; it is an error of its own."""
    if inside:
        (tmp_path / "checkpoints" / inside).mkdir(parents=True)

    with pytest.raises(NothingToRestoreError):
        load_newest(tmp_path)


def test_checkpoints_that_were_all_renamed_are_a_refusal(tmp_path: Path) -> None:
    """A second start must not take an emptied folder for a new one."""
    (tmp_path / "checkpoints" / "corrupt-step_4").mkdir(parents=True)

    with pytest.raises(RestoreRefusedError) as caught:
        load_newest(tmp_path)

    assert not isinstance(caught.value, NothingToRestoreError)


async def test_when_none_is_whole_nothing_is_renamed_and_the_newest_part_is_named(saved: Rig) -> None:
    """Both are corrupt: the refusal names the newest one's part, and the next start finds the same."""
    for info in find_checkpoints(saved.run.checkpoints):
        (info.path / "spares.json").write_text("")

    for _ in range(2):
        with pytest.raises(RestoreRefusedError, match=r"step_1.*spares\.json.*none of the 2"):
            load_newest(saved.run.path)


# ----------------------------------------------------------------------------------------------------- suspects


async def test_a_suspect_is_restored_only_when_asked_for(saved: Rig) -> None:
    """It is never the newest by itself, and the refusal names the flag when it is all that there is."""
    path = newest(saved)
    path.rename(path.with_name("step_1.suspect"))

    assert load_newest(saved.run.path).info.step == 0
    assert load_newest(saved.run.path, accept_suspect=True).info.suspect
    shutil.rmtree(saved.run.checkpoints / "step_0")
    with pytest.raises(RestoreRefusedError, match="--accept-suspect"):
        load_newest(saved.run.path)


async def test_a_suspect_is_restored_without_the_groups_at_fault(saved: Rig) -> None:
    """A group with two owners leaves both and is booked as dropped; the rest is what it was."""
    path = newest(saved)
    reseal(path, "spares.json", lambda body: body["spares"].append({"epoch": 0, "position": 4, "index": 4}))
    path.rename(path.with_name("step_1.suspect"))
    fresh = Fresh(2)

    restored = await fresh.restore(load_newest(saved.run.path, accept_suspect=True))

    guilty = "e000-p0000004"
    assert restored.dropped == (guilty,)
    assert guilty not in fresh.ledger
    assert guilty not in fresh.spares
    assert fresh.accounting.statistics().dropped["violation"] == 1
    assert critical(check_cut(restored.state)) == []


async def test_a_group_that_a_suspect_restore_drops_loses_its_staged_rows(saved: Rig) -> None:
    """Rows of a group that nobody owns any more would never be cleared."""
    retried = saved.ledger.records()[1].group_id
    path, guilty = newest(saved), {"epoch": 0, "position": 5, "index": 5}
    reseal(path, "spares.json", lambda body: body["spares"].append(guilty))
    path.rename(path.with_name("step_1.suspect"))
    fresh = Fresh(2)

    restored = await fresh.restore(load_newest(saved.run.path, accept_suspect=True))

    assert restored.dropped == (retried,)
    assert restored.staged == {}
    assert {key.group_id for key in fresh.plane.keys()} == {item.group_id for item in fresh.buffer.ready()}  # noqa: SIM118 - no dictionary


async def test_a_suspect_cut_is_written_with_its_staged_rows(tmp_path: Path) -> None:
    """Refused for another group's fault, it still holds what the others had staged."""

    def broken(captured: CapturedCut, _parent: CutState | None) -> list[Violation]:
        return [
            Violation("single_owner", "critical", "two owners", groups=(captured.state.ledger[0].group_id,))
        ]

    rig = Rig(tmp_path / "run", verify=broken)
    _, flying = await rig.read(), await rig.read()
    rig.stage(flying, "g0/c0 g0/c2 g1/final")
    assert (await rig.save()).outcome == "refused"

    restored = await Fresh(2).restore(load_newest(rig.run.path, accept_suspect=True))

    assert restored.staged == {flying: tuple(rig.keys(flying, "g0/c0 g1/final", incarnation=2))}
    await rig.close()


async def test_a_suspect_that_lost_a_prompt_books_it_as_dropped(saved: Rig) -> None:
    """Nobody owns it, so its position is what is booked."""
    path = newest(saved)
    reseal(path, "buffer.json", lambda body: body["ready"].pop())
    path.rename(path.with_name("step_1.suspect"))
    fresh = Fresh(2)

    await fresh.restore(load_newest(saved.run.path, accept_suspect=True))

    assert fresh.accounting.statistics().dropped["violation"] == 1
    assert len(fresh.buffer) == 1


async def test_a_suspect_that_no_drop_can_mend_is_refused_all_the_same(saved: Rig) -> None:
    """Rows of another ledger stay rows of another ledger."""
    path = newest(saved)
    reseal(path, "ledger.json", lambda body: body["groups"][0].update(attempt=5))
    path.rename(path.with_name("step_1.suspect"))

    with pytest.raises(RestoreRefusedError, match="digest_matches"):
        await Fresh(2).restore(load_newest(saved.run.path, accept_suspect=True))


@pytest.mark.parametrize(
    "change",
    [
        {"ledger": (*clean_cut().ledger, admitted(4, target_step=7, admission_id=7))},
        {"spares": (*clean_cut().spares, ref(5))},
        {"spares": (*clean_cut().spares, ref(2))},
        {"ready": ()},
        {"ready": (entry(4), replace(entry(5), target_step=9))},
        {"ready": (entry(4), replace(entry(5), admission_id=3))},
        {"sampler": replace(clean_cut().sampler, admissions=2, next_admission_id=0)},
    ],
    ids=[
        "ledger and buffer",
        "spares and buffer",
        "trained and spare",
        "lost",
        "ahead",
        "stamped twice",
        "counters",
    ],
)
def test_an_absolved_cut_breaks_nothing_any_more(change: dict[str, Any]) -> None:
    """What a dropped group can mend is mended: judged again, the rest is whole."""
    state = replace(clean_cut(), **change)
    violations = check_cut(state)
    assert critical(violations)

    mended, _ = absolve(state, violations)

    assert critical(check_cut(mended)) == []


# ----------------------------------------------------------------------------------------------------- its parts


PARTS = ("verify", "prompts", "trainer", "rows", "documents")


async def restore_timed(
    fresh: Fresh,
    loaded: LoadedCheckpoint,
    monkeypatch: pytest.MonkeyPatch,
    fails: dict[str, BaseException] | None = None,
) -> RestoredRun:
    """Restore with a clock that each part moves by as many nanoseconds as its name has letters, and then fails."""
    now = 0

    def passing(part: str) -> None:
        nonlocal now
        now += len(part)
        if fails and part in fails:
            raise fails[part]

    def in_part(part: str, name: str) -> None:
        done = getattr(restore, name)

        def wrapped(*args: Any) -> Any:  # noqa: ANN401 - passed on
            passing(part)
            return done(*args)

        monkeypatch.setattr(restore, name, wrapped)

    in_part("verify", "_cross_check")
    in_part("rows", "_fill")
    in_part("documents", "_hand_over")

    async def prompts() -> None:
        passing("prompts")

    async def trainer() -> None:
        passing("trainer")

    targets = fresh.targets(beforehand={"prompts": prompts, "trainer": trainer})
    return await restore_into(loaded, targets, incarnation=2, clock=lambda: now)


async def test_every_part_of_a_restore_is_timed(saved: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what is not the cut's: where the prompts go on, and the trainer's state."""
    fresh = Fresh(2)
    loaded = load_newest(saved.run.path, hub=fresh.hub)

    restored = await restore_timed(fresh, loaded, monkeypatch)

    assert list(restored.parts) == list(PARTS)
    assert restored.parts == {part: len(part) for part in PARTS} | {"verify": loaded.verify_ns + 6}
    assert fresh.parts == [restored.parts]
    assert fresh.begun == 1


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(
    "error, told",
    [
        (DataPlaneError("full"), ("refused", "rows")),
        (RuntimeError("of the user's"), ("failed", "error")),
        (asyncio.CancelledError(), ("cancelled", "")),
        (KeyboardInterrupt(), ("failed", "error")),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
async def test_a_restore_that_ends_early_tells_the_part_in_which_it_did(
    saved: Rig,
    monkeypatch: pytest.MonkeyPatch,
    part: str,
    error: BaseException,
    told: tuple[str, str],
) -> None:
    """As the last one, with the time that it took until then; nothing after it was begun."""
    fresh = Fresh(2)
    loaded = load_newest(saved.run.path, hub=fresh.hub)

    with pytest.raises(type(error)):
        await restore_timed(fresh, loaded, monkeypatch, {part: error})

    assert fresh.ended == [(*told, {})]
    assert list(fresh.parts[0]) == list(PARTS[: PARTS.index(part) + 1])
    assert fresh.parts[0][part] == len(part) + (loaded.verify_ns if part == "verify" else 0)


async def test_what_comes_beforehand_is_not_asked_for_a_checkpoint_that_does_not_fit(saved: Rig) -> None:
    """A trainer's state may be huge, and is not to be replaced for nothing."""
    asked: list[str] = []

    async def load() -> None:
        asked.append("trainer")

    with pytest.raises(ConfigError):
        await Fresh(2, InOrderSampler).restore(load_newest(saved.run.path), beforehand={"trainer": load})

    assert asked == []


# ------------------------------------------------------------------------------------------------- cross-checks


async def test_a_store_of_another_incarnation_is_refused(saved: Rig) -> None:
    """Keys of two incarnations never mix, and an incarnation is never used twice."""
    loaded = load_newest(saved.run.path)
    fresh = Fresh(2)

    with pytest.raises(RestoreRefusedError, match="incarnation"):
        await restore_into(loaded, fresh.targets(), incarnation=3)
    with pytest.raises(RestoreRefusedError, match="incarnation 1 cannot go on"):
        await Fresh(1).restore(loaded)
    assert fresh.ended == [("refused", "rows", {})]


async def test_a_store_or_an_owner_that_is_not_empty_is_refused(saved: Rig) -> None:
    """A restore fills; it never merges."""
    loaded = load_newest(saved.run.path)
    used, owning = Fresh(2), Fresh(2)
    used.plane.put({RowKey(2, "g", 0, 0): {"x": np.zeros(1)}})
    async with owning.barrier.mutation("prompt_reservation") as cut:
        owning.spares.add(cut, [ref(1)])

    with pytest.raises(RestoreRefusedError, match="not empty"):
        await used.restore(loaded)
    with pytest.raises(RestoreRefusedError, match="owns groups already"):
        await owning.restore(loaded)


async def test_another_sampler_is_refused_by_its_key(saved: Rig) -> None:
    """A cursor means something to the sampler that counted it."""
    with pytest.raises(ConfigError, match=r"sampler\.name.*windowed.*in_order"):
        await Fresh(2, InOrderSampler).restore(load_newest(saved.run.path))


async def test_a_configuration_that_cannot_hold_the_groups_is_refused(saved: Rig) -> None:
    """Before a row is filled or an owner is touched."""
    fresh = Fresh(2)
    admission = Admission(fresh.barrier, fresh.sampler, fresh.ledger, fresh.buffer, fresh.versions)

    with pytest.raises(CapacityError):
        await fresh.restore(load_newest(saved.run.path), admission=admission, capacity=3)

    assert (len(fresh.ledger), fresh.plane.statistics().rows) == (0, 0)
    assert fresh.ended == [("refused", "capacity", {})]


async def test_a_row_file_that_changes_after_it_was_verified_is_refused(saved: Rig) -> None:
    """Between verifying and filling lies time; the owners are still empty when it is found."""
    loaded = load_newest(saved.run.path)
    shard = loaded.info.path / loaded.manifest.row_files[0]
    shard.write_bytes(shard.read_bytes()[:-4])
    fresh = Fresh(2)

    with pytest.raises(Exception, match=r"rows-00000\.safetensors"):
        await fresh.restore(loaded)

    assert (len(fresh.ledger), len(fresh.buffer)) == (0, 0)


async def test_loading_changes_nothing_on_disk(saved: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even a time stamp of the folder, as long as nothing is corrupt."""
    saved.run.journal.sync()  # its thread may still write what the last save told it
    touched: list[str] = []
    monkeypatch.setattr(files, "before", lambda operation, path: touched.append(f"{operation} {path}"))

    load_newest(saved.run.path)

    assert touched == []


async def test_the_manifest_says_how_many_groups_each_owner_had(saved: Rig) -> None:
    """For people, and for the audit's table."""
    manifest = parse_manifest((newest(saved) / MANIFEST).read_bytes())

    assert manifest.groups == {"ledger": 2, "spares": 0, "buffer": 2, "training": 0}
