"""A checkpoint that somebody or something changed: the part is named, the one before it takes its place."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from quiesce.checkpoint.audit import audit
from quiesce.checkpoint.documents import MANIFEST, seal_manifest
from quiesce.checkpoint.loading import CheckpointInfo, checkpoint_info, load_checkpoint
from quiesce.checkpoint.restore import load_newest
from quiesce.dataplane import read_metadata, read_rows
from quiesce.dataplane.rows import encode_row
from quiesce.dataplane.shards import write_shards
from quiesce.errors import CorruptCheckpointError, RestoreRefusedError
from quiesce.types import RowKey
from tests.crash.forkserver import ForkPool

if TYPE_CHECKING:
    from quiesce.dataplane.interface import Row

PARTS = (
    "sampler.json",
    "position.json",
    "accounting.json",
    "spares.json",
    "buffer.json",
    "ledger.json",
    "rows-00000.safetensors",
    "trainer/state.json",
    "trainer/model-00001-of-00001.safetensors",
    "trainer/model.safetensors.index.json",
    MANIFEST,
)


def flipped(at: float) -> Callable[[bytes, bytes], bytes]:
    """Flip one bit at that share of the file."""

    def change(content: bytes, _: bytes) -> bytes:
        where = min(int(len(content) * at), len(content) - 1)
        return content[:where] + bytes([content[where] ^ 4]) + content[where + 1 :]

    return change


DAMAGES: dict[str, Callable[[bytes, bytes], bytes]] = {
    "the first byte": flipped(0),
    "the length of a header": lambda content, _: content[:7] + b"\x7f" + content[8:],
    "a header": flipped(0.1),
    "the middle": flipped(0.5),
    "the last byte": flipped(1),
    "empty": lambda _content, _: b"",
    "one byte left": lambda content, _: content[:1],
    "half": lambda content, _: content[: len(content) // 2],
    "the last byte is missing": lambda content, _: content[:-1],
    "a byte more": lambda content, _: content + b"\n",
    "zeros": lambda content, _: bytes(len(content)),
    "a tail of zeros": lambda content, _: (
        content[: len(content) // 2] + bytes(len(content) - len(content) // 2)
    ),
    "twice": lambda content, _: content * 2,
    "the older checkpoint's": lambda _content, older: older,
    "the older checkpoint's tail": lambda content, older: (
        content[: len(content) // 2] + older[len(content) // 2 :]
    ),
}


@pytest.fixture(scope="module")
def built(pool: ForkPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with two checkpoints, with torch's files in them."""
    path = tmp_path_factory.mktemp("built") / "run"
    pool.call("tests.crash.lives:build", path=str(path), scenario="save").value()
    return path


@pytest.fixture
def run(built: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    path = tmp_path / "run"
    shutil.copytree(built, path)
    return path


def newest(run: Path) -> Path:
    """Return the newest checkpoint's folder."""
    return run / "checkpoints" / "step_1"


@pytest.mark.parametrize("part", PARTS)
def test_damage_anywhere_in_a_part_is_found_and_named(
    run: Path, part: str, tell: Callable[[str], None]
) -> None:
    """Every region of every file: the load names the part, and the start goes on from the checkpoint before."""
    older = (run / "checkpoints" / "step_0" / part).read_bytes()
    content = (newest(run) / part).read_bytes()
    tried = 0
    for name, damage in DAMAGES.items():
        changed = damage(content, older)
        if changed == content:
            continue  # this part is the same in both checkpoints
        (newest(run) / part).write_bytes(changed)
        tried += 1

        info = checkpoint_info(newest(run))
        assert info is not None
        with pytest.raises(CorruptCheckpointError) as caught:
            load_checkpoint(info)

        # A manifest of another checkpoint is whole, and lists other content: then the first part that differs is named.
        assert caught.value.part == part or (part == MANIFEST and "older" in name), name
        assert load_newest(run).info.step == 0
        (run / "checkpoints" / "corrupt-step_1").rename(newest(run))
    tell(f"{tried} ways to damage it")
    assert tried >= len(DAMAGES) - 2


def verdict(info: CheckpointInfo) -> str:
    """Return what a load makes of a manifest."""
    try:
        load_checkpoint(info)
    except CorruptCheckpointError as error:
        return "corrupt" if error.part == MANIFEST else error.part
    except RestoreRefusedError as error:
        return "another version" if "schema version 0" in error.problem else error.problem
    return "unseen"


def test_no_bit_of_a_manifest_can_change_unseen(run: Path, tell: Callable[[str], None]) -> None:
    """Nothing else carries its digest, so each byte is tried; another version's is for a person to judge."""
    path = newest(run) / MANIFEST
    content = path.read_bytes()
    info = checkpoint_info(newest(run))
    assert info is not None
    verdicts: dict[str, list[int]] = {"corrupt": [], "another version": [], "unseen": []}
    for at in range(len(content)):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        verdicts[verdict(info)].append(at)

    tell(f"{len(content)} bytes changed, one at a time")
    assert verdicts["unseen"] == []
    assert verdicts["another version"] == [content.index(b'"schema_version":1') + len('"schema_version":')]


def resealed(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a manifest and give it a digest of its own that fits, as somebody with bad intent would."""
    body = json.loads(path.read_bytes())
    del body["sha256"]
    change(body)
    path.write_bytes(seal_manifest(body))


def rows_changed(run: Path, change: Callable[[dict[RowKey, Row]], object], *, counted: bool = True) -> None:
    """Change the rows of the newest checkpoint, and seal files and manifest anew.

    Args:
        run: The run folder.
        change: Gets the rows, by key.
        counted: Whether the manifest's count of rows is changed with them.
    """
    folder, name = newest(run), "rows-00000.safetensors"
    rows = dict(read_rows(folder, [name], tensors="numpy"))
    change(rows)
    metadata = {
        key: value for key, value in read_metadata(folder / name).items() if not key.startswith("rows.")
    }
    (folder / name).unlink()
    encoded = [(key.encode(), encode_row(row, key.encode())) for key, row in rows.items()]
    written = write_shards(folder, sorted(encoded), metadata)

    def seal(body: dict[str, Any]) -> None:
        (file,) = written.files
        body["files"][name] = {"size": file.size, "sha256": file.sha256}
        if counted:
            body["rows"]["count"] = written.rows

    resealed(folder / MANIFEST, seal)


def flying(rows: Collection[RowKey]) -> RowKey:
    """Return a key of the group in flight."""
    return next(key for key in rows if key.sequence is not None)


ROW = {"tokens": np.arange(3)}


@pytest.mark.parametrize(
    "extra",
    [
        lambda key: replace(key, attempt=1, sequence=0),
        lambda key: replace(key, attempt=1, sequence=None),
        lambda key: replace(key, group_id="e000-p0000000", sequence=0),
        lambda key: replace(key, group_id="e000-p0000001", sequence=0),
        lambda key: replace(key, group_id="e009-p0000000", sequence=None),
        lambda key: replace(key, incarnation=2, sequence=2),
        lambda key: replace(key, sequence=3),
        lambda key: replace(key, generation=7, sequence=1),
        lambda key: replace(key, generation=1, sequence=0),
    ],
    ids=[
        "another attempt", "another attempt's final row", "a trained group", "a ready group", "a group that never was",
        "another incarnation", "after a gap", "without a first", "beside a final row",
    ],
)  # fmt: skip
def test_a_row_that_no_save_can_have_written_is_refused(run: Path, extra: Callable[[RowKey], RowKey]) -> None:
    """Every digest and every count fits, so nothing but the ledger tells; what is restored is all or nothing."""
    rows_changed(run, lambda rows: rows.update({extra(flying(rows)): ROW}))
    info = checkpoint_info(newest(run))
    assert info is not None

    with pytest.raises(RestoreRefusedError) as caught:
        load_checkpoint(info)

    assert caught.value.part == "rows_present"
    report = audit(run)
    assert [(one.invariant, len(one.evidence["extra"])) for one in report.violations] == [("rows_present", 1)]


def test_staged_rows_are_in_the_checkpoint_that_is_tampered_with(run: Path) -> None:
    """Else the tests beside this one would prove nothing."""
    info = checkpoint_info(newest(run))
    assert info is not None

    staged = load_checkpoint(info).staged()

    assert [(key.generation, key.sequence) for key in staged] == [(0, 0), (0, 1), (1, None)]
    assert audit(run).violations == ()


@pytest.mark.parametrize("sequence, part", [(0, "rows_present"), (1, "")])
def test_a_staged_row_that_is_taken_out_leaves_no_gap_behind(run: Path, sequence: int, part: str) -> None:
    """Without the first chunk the second is of no use; without the last one its tokens are generated again."""
    rows_changed(run, lambda rows: rows.pop(replace(flying(rows), sequence=sequence)))
    info = checkpoint_info(newest(run))
    assert info is not None

    if part:
        with pytest.raises(RestoreRefusedError) as caught:
            load_checkpoint(info)
        assert caught.value.part == part
    else:
        assert [key.sequence for key in load_checkpoint(info).staged()] == [0, None]


@pytest.mark.parametrize("change", ["added", "taken out"])
def test_the_manifest_counts_staged_rows_too(run: Path, change: str) -> None:
    """One more that would be usable, or one fewer: the number does not fit."""

    def changed(rows: dict[RowKey, Row]) -> None:
        if change == "added":
            rows[replace(flying(rows), sequence=2)] = ROW
        else:
            del rows[replace(flying(rows), sequence=1)]

    rows_changed(run, changed, counted=False)

    with pytest.raises(RestoreRefusedError, match=r"rows in the files, .* in the manifest"):
        load_checkpoint(checkpoint_info(newest(run)) or pytest.fail("no checkpoint"))


def test_staged_rows_of_another_attempt_go_with_a_ledger_of_that_attempt_only(run: Path) -> None:
    """The ledger's attempt is under the digest that every row file carries."""
    path = newest(run) / "ledger.json"
    body = json.loads(path.read_bytes())
    body["groups"][0]["attempt"] = 1
    path.write_bytes(json.dumps(body).encode())
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    resealed(
        newest(run) / MANIFEST,
        lambda manifest: manifest["files"].update(
            {"ledger.json": {"size": path.stat().st_size, "sha256": digest}}
        ),
    )
    info = checkpoint_info(newest(run))
    assert info is not None

    found = {violation.invariant for violation in load_checkpoint(info, accept_violations=True).violations}

    assert found == {"digest_matches", "rows_present"}


@pytest.mark.parametrize(
    "name",
    [
        "", ".", "..", "./ledger.json", "/ledger.json", "//etc/passwd", "trainer/", "trainer//state.json",
        "trainer/./state.json", "..\\ledger.json", "~/ledger.json", "ledger.json\u0000.txt", "ledger.json\n",
        "\uff4cedger.json", "a" * 300, "/".join("abcdefghij"), "trainer/../../step_0/ledger.json", "C:ledger.json",
        MANIFEST, "trainer",
    ],
)  # fmt: skip
def test_a_name_that_is_no_file_of_the_checkpoint_is_refused(run: Path, name: str) -> None:
    """However it is spelled: nothing outside is opened, and what is listed beside the real files is missed."""
    resealed(
        newest(run) / MANIFEST, lambda body: body["files"].update({name: dict(body["files"]["ledger.json"])})
    )
    info = checkpoint_info(newest(run))
    assert info is not None

    with pytest.raises(CorruptCheckpointError) as caught:
        load_checkpoint(info)

    assert caught.value.part in {MANIFEST, name}
    assert load_newest(run).info.step == 0


@pytest.mark.parametrize("size", [-1, 0, True, 1.0, "12", None, 1 << 53, 1 << 64, 10**30, 1e308])
def test_a_size_that_cannot_be_is_refused(run: Path, size: object) -> None:
    """Negative, not a number, larger than any disk: nothing is allocated for it."""
    resealed(newest(run) / MANIFEST, lambda body: body["files"]["rows-00000.safetensors"].update(size=size))

    assert load_newest(run).info.step == 0


@pytest.mark.parametrize("size", [1 << 40, (1 << 53) - 1])
@pytest.mark.parametrize("part", PARTS[:-1])
def test_a_sparse_giant_in_place_of_a_part_costs_no_memory(run: Path, part: str, size: int) -> None:
    """A document has a limit, and what a manifest says of a size is compared before it is believed."""
    resealed(newest(run) / MANIFEST, lambda body: body["files"][part].update(size=size))

    with pytest.raises(CorruptCheckpointError, match=r"bytes instead of|more than"):
        load_checkpoint(checkpoint_info(newest(run)) or pytest.fail("no checkpoint"))


def test_a_document_that_is_a_sparse_giant_is_refused_before_it_is_read(run: Path) -> None:
    """A file of a tebibyte of zeros is named for its size."""
    os.truncate(newest(run) / "buffer.json", 1 << 40)

    with pytest.raises(CorruptCheckpointError, match=r"buffer\.json.*more than") as caught:
        load_checkpoint(checkpoint_info(newest(run)) or pytest.fail("no checkpoint"))

    assert caught.value.part == "buffer.json"
    assert load_newest(run).info.step == 0


def test_links_are_never_followed_wherever_they_are(run: Path, tmp_path: Path) -> None:
    """Not as a part, not as the trainer's folder, not as the checkpoint, not as a dangling name."""
    outside = tmp_path / "outside"
    for part in (*PARTS, "trainer"):
        path = newest(run) / part
        path.rename(outside)
        for target in (outside, tmp_path / "nothing", Path("../step_0") / part):
            path.symlink_to(target)
            info = checkpoint_info(newest(run))
            assert info is not None
            with pytest.raises(CorruptCheckpointError, match="link") as caught:
                load_checkpoint(info)
            assert caught.value.part == part
            path.unlink()
        outside.rename(path)

    assert load_newest(run).info.step == 1
