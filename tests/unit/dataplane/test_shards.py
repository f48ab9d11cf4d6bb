"""Rows as safetensors files."""

import errno
import gc
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quiesce.dataplane.rows import DTYPES, encode_row
from quiesce.dataplane.shards import read_inventory, read_metadata, read_rows, shard_name, write_shards
from quiesce.errors import RowCorruptError
from quiesce.types import RowKey

Read = Callable[[Path], object]
Damage = Callable[[Any], object]

NAME = "rows-00000.safetensors"

# torch says this once a process, of any tensor of half-precision complex numbers; rows hold them all the
# same.
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental:UserWarning")


def key(number: int = 0) -> RowKey:
    """Return the n-th key."""
    return RowKey(1, "e000-p0000001", number, 0)


def text(number: int = 0) -> str:
    """Return the n-th key, encoded."""
    return key(number).encode()


def write_one(directory: Path, row: dict[str, torch.Tensor]) -> Path:
    """Write a file with one row."""
    write_shards(directory, [(text(), encode_row(row))], {})
    return directory / NAME


def descriptors() -> set[str]:
    """Return this process's open descriptors; what earlier tests left to the collector is closed first."""
    gc.collect()
    return {path.name for path in Path("/proc/self/fd").iterdir()}


# ---------------------------------------------------------------------------------------------------- writing


def test_any_safetensors_reader_can_look_inside(tmp_path: Path) -> None:
    """The library reads what is written here, each tensor under its row's key, whatever the mix of types."""
    row = {
        "mask": torch.tensor([True, False, True]),
        "tokens": torch.arange(5),
        "logprobs": torch.tensor([0.5, -1.0], dtype=torch.bfloat16),
        "reward": torch.tensor(2.5),
        "none": torch.empty(0, 7, dtype=torch.float16),
        'weird "name"#ü\n': torch.ones(1, dtype=torch.int8),
    }
    path = write_one(tmp_path, row)
    expected = {f"{text()}#{name}": value for name, value in row.items()}
    loaded = safetensors.torch.load_file(path)
    assert loaded.keys() == expected.keys()
    with safetensors.safe_open(path, framework="pt") as file:
        for name, value in expected.items():
            assert torch.equal(file.get_tensor(name), value)
            assert file.get_tensor(name).dtype == value.dtype
        assert file.metadata()["rows.count"] == "1"


def test_every_tensor_lies_aligned(tmp_path: Path) -> None:
    """Readers that map the file need each element at a multiple of its size."""
    row = {
        dtype: torch.ones(3, dtype=getattr(torch, dtype))
        for dtype in ("bool", "int64", "bfloat16", "float32")
    }
    content = write_one(tmp_path, row).read_bytes()
    length = int.from_bytes(content[:8], "little")
    assert length % 8 == 0
    header = json.loads(content[8 : 8 + length])
    for name, value in row.items():
        assert header[f"{text()}#{name}"]["data_offsets"][0] % value.element_size() == 0


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_every_element_type_comes_back(tmp_path: Path, dtype: str) -> None:
    """Those that safetensors has no name for come back as themselves, too."""
    value = torch.arange(32, dtype=torch.uint8).clamp(max=1).view(getattr(torch, dtype)).reshape(2, -1)
    write_one(tmp_path, {"x": value})
    ((found, row),) = read_rows(tmp_path, [NAME])
    assert (found, row["x"].dtype, row["x"].shape) == (key(), value.dtype, value.shape)
    assert torch.equal(torch.as_tensor(row["x"]).view(torch.uint8), value.view(torch.uint8))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.dictionaries(
            st.text(st.characters(codec="utf-8"), min_size=1, max_size=8),
            st.tuples(st.sampled_from(["int64", "bfloat16", "bool", "complex128"]), st.integers(0, 40)),
            min_size=1,
            max_size=4,
        ),
        max_size=12,
    ),
    st.integers(1, 900),
)
def test_files_hold_every_row_once(
    tmp_path_factory: pytest.TempPathFactory, described: list[dict[str, tuple[str, int]]], shard_bytes: int
) -> None:
    """However rows are spread over files, all come back whole, in order, with digests as reported."""
    directory = tmp_path_factory.mktemp("rows")
    rows = [
        {name: torch.arange(size).to(getattr(torch, dtype)) for name, (dtype, size) in row.items()}
        for row in described
    ]
    result = write_shards(
        directory,
        ((text(number), encode_row(row)) for number, row in enumerate(rows)),
        {"a": "b"},
        shard_bytes,
    )
    assert result.names == tuple(shard_name(number) for number in range(len(result.files)))
    assert sorted(path.name for path in directory.iterdir()) == list(result.names)
    for file in result.files:
        content = (directory / file.name).read_bytes()
        assert (file.size, file.sha256) == (len(content), hashlib.sha256(content).hexdigest())
        assert read_metadata(directory / file.name)["a"] == "b"
    assert result.rows == len(rows)
    found = list(read_rows(directory, result.names))
    assert [one for one, _ in found] == [key(number) for number in range(len(rows))]
    for (_, got), row in zip(found, rows, strict=True):
        assert got.keys() == row.keys()
        assert all(torch.equal(torch.as_tensor(got[name]), row[name]) for name in row)
    assert read_inventory(directory, result.names) == {
        key(number): tuple(sorted(row)) for number, row in enumerate(rows)
    }


def test_rows_larger_than_every_buffer_are_written(tmp_path: Path) -> None:
    """A row may be larger than the buffers and than a file's usual size; it gets a file of its own."""
    large = torch.arange(3 << 20)
    rows = [(text(0), {"x": torch.ones(1)}), (text(1), {"x": large}), (text(2), {"x": torch.ones(1)})]
    result = write_shards(tmp_path, ((name, encode_row(row)) for name, row in rows), {}, 1 << 20)
    assert len(result.files) == 3
    found = dict(read_rows(tmp_path, result.names))
    assert torch.equal(torch.as_tensor(found[key(1)]["x"]), large)


def test_a_disk_that_fills_up_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error carries the file, and no descriptor or thread is left behind."""

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = descriptors()
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match=f"No space left on device: '{tmp_path / NAME}'") as caught:
        write_one(tmp_path, {"x": torch.ones(1)})
    assert caught.value.errno == errno.ENOSPC
    assert descriptors() <= before


def test_a_failing_fsync_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the disk did not take is not reported as written."""

    def broken(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    before = descriptors()
    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError, match="Input/output error"):
        write_one(tmp_path, {"x": torch.ones(1)})
    assert descriptors() <= before


def test_every_file_is_fsynced_before_it_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One fsync per file, of that file, at its full size."""
    synced = []
    fsync = os.fsync

    def noting(fd: int) -> None:
        synced.append((Path(f"/proc/self/fd/{fd}").readlink().name, os.fstat(fd).st_size))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", noting)
    result = write_shards(tmp_path, [(text(i), encode_row({"x": torch.ones(50)})) for i in range(3)], {}, 200)
    assert synced == [(file.name, file.size) for file in result.files]
    assert len(synced) == 3


def test_short_writes_are_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system call may write less than it was given."""
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, memoryview(data)[:7]))
    path = write_one(tmp_path, {"x": torch.arange(100)})
    ((_, row),) = read_rows(tmp_path, [path.name])
    assert row["x"].tolist() == list(range(100))


def test_an_error_of_the_rows_leaves_nothing_open(tmp_path: Path) -> None:
    """A row that is none stops the write, named by its key."""
    before = descriptors()
    with pytest.raises(RowCorruptError, match=f"^{text(1)}: "):
        write_shards(tmp_path, [(text(0), encode_row({"x": torch.ones(1)})), (text(1), b"nonsense")], {}, 1)
    assert descriptors() <= before


def test_our_metadata_names_are_taken(tmp_path: Path) -> None:
    """A caller's entry cannot pose as ours."""
    with pytest.raises(ValueError, match=r"names that start with 'rows\.' are taken: rows\.count"):
        write_shards(tmp_path, [], {"rows.count": "7", "fine": ""})
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------------------------------------- reading


READERS = [
    pytest.param(lambda path: list(read_rows(path.parent, [path.name])), id="rows"),
    pytest.param(lambda path: read_inventory(path.parent, [path.name]), id="inventory"),
]


def header_of(path: Path) -> tuple[dict[str, Any], bytes]:
    """Return a file's header and data."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def rewrite(path: Path, header: object, data: bytes) -> None:
    """Replace a file by one with this header."""
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + data)


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize(
    "kept", [0, 7, 8, 40, -1], ids=["empty", "within length", "length", "header", "data"]
)
def test_a_file_that_is_cut_short_is_corrupt(tmp_path: Path, read: Read, kept: int) -> None:
    """A short file is an error that names it, wherever it ends."""
    path = write_one(tmp_path, {"x": torch.arange(10)})
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(RowCorruptError, match=str(path)):
        read(path)


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize(
    "damage, problem",
    [
        (lambda _: b"\xff" * 20, "not JSON"),
        (lambda _: b"[" * 100_000, "not JSON"),
        (lambda _: [1], "not that of a safetensors file"),
        (lambda header: {**header, "__metadata__": {"a": 1}}, "not that of a safetensors file"),
        (lambda header: {**header, "__metadata__": {}}, "not of format 1"),
        (lambda header: {**header, "more": {}}, "does not describe tensor 'more'"),
        (lambda header: renamed(header, "x"), "'x' is not a field of a row"),
        (lambda header: renamed(header, "x#y"), "'x' is not a row key"),
        (
            lambda header: patched(header, dtype="F32"),
            "has 80 bytes, which are not float32|not a safetensors file",
        ),
        (lambda header: patched(header, dtype="Q1"), "unknown element type 'Q1'|not a safetensors file"),
        (lambda header: patched(header, shape=[True, 10]), "does not describe tensor"),
        (lambda header: patched(header, shape=[-10]), "does not describe tensor"),
        (lambda header: patched(header, data_offsets=[80, 0]), "ends before it starts"),
        (lambda header: patched(header, data_offsets=[0, 81]), "its header describes"),
        (lambda header: with_metadata(header, "rows.count", "2"), "it holds 1 rows and says 2"),
        (lambda header: with_metadata(header, "rows.raw", "{"), r"rows\.raw cannot be read"),
        (lambda header: with_metadata(header, "rows.raw", '{"a":["f1",[1]]}'), r"rows\.raw cannot be read"),
        (lambda header: with_metadata(header, "rows.raw", '{"a":["bool",[-1]]}'), "impossible shape"),
    ],
)
def test_a_header_that_lies_is_corrupt(tmp_path: Path, read: Read, damage: Damage, problem: str) -> None:
    """Whatever a header claims is checked before the bytes that it describes are believed."""
    path = write_one(tmp_path, {"x": torch.arange(10)})
    header, data = header_of(path)
    rewrite(path, damage(header), data)
    with pytest.raises(RowCorruptError, match=problem):
        read(path)


def renamed(header: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the header with its tensor under another name."""
    (only,) = header.keys() - {"__metadata__"}
    return {"__metadata__": header["__metadata__"], name: header[only]}


def patched(header: dict[str, Any], **entry: object) -> dict[str, Any]:
    """Return the header with its tensor described differently."""
    (only,) = header.keys() - {"__metadata__"}
    return {**header, only: {**header[only], **entry}}


def with_metadata(header: dict[str, Any], name: str, value: str) -> dict[str, Any]:
    """Return the header with one metadata entry changed."""
    return {**header, "__metadata__": {**header["__metadata__"], name: value}}


@given(st.binary(max_size=300))
def test_arbitrary_files_are_corrupt(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    """Bytes that nobody wrote as rows end in RowCorruptError, in every reader."""
    path = tmp_path_factory.mktemp("rows") / NAME
    path.write_bytes(content)
    for read in (
        lambda: list(read_rows(path.parent, [NAME])),
        lambda: read_inventory(path.parent, [NAME]),
        lambda: read_metadata(path),
    ):
        with pytest.raises(RowCorruptError):
            read()


@pytest.mark.parametrize("read", READERS)
def test_a_link_is_not_followed(tmp_path: Path, read: Read) -> None:
    """A file that points elsewhere is refused by the system."""
    (tmp_path / "real").mkdir()
    real = write_one(tmp_path / "real", {"x": torch.ones(1)})
    link = tmp_path / NAME
    link.symlink_to(real)
    with pytest.raises(OSError, match="symbolic link"):
        read(link)


@pytest.mark.parametrize("read", READERS)
def test_a_pipe_is_refused_without_waiting(tmp_path: Path, read: Read) -> None:
    """A pipe in a file's place does not make a restore hang."""
    os.mkfifo(tmp_path / NAME)
    with pytest.raises(RowCorruptError, match="not a regular file"):
        read(tmp_path / NAME)


@pytest.mark.parametrize("name", ["../x", "", ".", "..", "a/b", "/etc/passwd"])
def test_a_name_that_leaves_the_folder_is_refused(tmp_path: Path, name: str) -> None:
    """Names come from a manifest and are only ever names."""
    with pytest.raises(RowCorruptError, match="is not the name of a file in it"):
        list(read_rows(tmp_path, [name]))
    with pytest.raises(RowCorruptError, match="is not the name of a file in it"):
        read_inventory(tmp_path, [name])


def test_an_absent_file_is_named(tmp_path: Path) -> None:
    """A missing file is the system's own error, with the path."""
    with pytest.raises(FileNotFoundError, match=NAME):
        list(read_rows(tmp_path, [NAME]))


def test_a_row_in_two_files_is_corrupt(tmp_path: Path) -> None:
    """An inventory counts each row once or not at all."""
    path = write_one(tmp_path, {"x": torch.ones(1)})
    (tmp_path / "again.safetensors").write_bytes(path.read_bytes())
    with pytest.raises(RowCorruptError, match=f"row {text()} is in another file too"):
        read_inventory(tmp_path, [NAME, "again.safetensors"])


def test_rows_are_read_as_numpy_too(tmp_path: Path) -> None:
    """The same file serves either library."""
    write_one(tmp_path, {"x": torch.arange(3)})
    ((_, row),) = read_rows(tmp_path, [NAME], tensors="numpy")
    assert type(row["x"]).__module__ == "numpy"
    assert row["x"].tolist() == [0, 1, 2]
