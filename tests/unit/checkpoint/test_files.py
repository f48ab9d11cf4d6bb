"""The durable file operations."""

from __future__ import annotations

import errno
import hashlib
import os
from pathlib import Path

import pytest

from quiesce.checkpoint import files
from tests.save_rig import watched_disk


def test_a_written_file_is_synced_and_its_digest_is_that_of_its_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The digest is computed on the way, and fsync comes after the last write."""
    with watched_disk(monkeypatch) as disk:
        digest = files.write_durable(tmp_path / "file", [b"one", b"two"], name="a/file")
    assert (digest.name, digest.size) == ("a/file", 6)
    assert digest.sha256 == hashlib.sha256(b"onetwo").hexdigest()
    assert [operation for operation, _ in disk.operations] == ["create", "write", "write", "fsync"]
    assert files.hash_file(tmp_path / "file", name="a/file") == digest
    assert files.hash_and_sync(tmp_path / "file", name="a/file") == digest


def test_an_existing_file_is_never_overwritten(tmp_path: Path) -> None:
    """Two saves that meet under one name are an error, not a mixture."""
    (tmp_path / "file").write_text("first")
    with pytest.raises(FileExistsError):
        files.write_durable(tmp_path / "file", b"second")
    assert (tmp_path / "file").read_text() == "first"


def test_a_short_write_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The operating system may take fewer bytes than it was given."""
    real = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: real(fd, bytes(data)[:3]))
    files.write_durable(tmp_path / "file", b"0123456789")
    assert (tmp_path / "file").read_bytes() == b"0123456789"


def test_replacing_a_file_keeps_the_old_content_until_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk leaves the old file; a replacement that was cut short does not stand in the way."""
    path = tmp_path / "counter"
    path.write_bytes(b"1\n")
    with watched_disk(monkeypatch) as disk:
        disk.fail = lambda operation, _: OSError(errno.ENOSPC, "full") if operation == "write" else None
        with pytest.raises(OSError, match="full"):
            files.replace_durable(path, b"2\n")
        assert path.read_bytes() == b"1\n"
        disk.fail = lambda _operation, _path: None
        disk.operations.clear()
        files.replace_durable(path, b"2\n")
    assert path.read_bytes() == b"2\n"
    assert [operation for operation, _ in disk.operations] == [
        "create",
        "write",
        "fsync",
        "rename",
        "fsync_folder",
    ]


@pytest.mark.parametrize(
    "code,reason",
    [
        (errno.ENOSPC, "disk"),
        (errno.EDQUOT, "disk"),
        (errno.EACCES, "permission"),
        (errno.EROFS, "permission"),
        (errno.EIO, "io"),
        (errno.ENOENT, "io"),
    ],
)
def test_the_reason_of_a_failure_is_found_through_its_causes(code: int, reason: str) -> None:
    """Libraries wrap what the operating system said."""
    error = RuntimeError("wrapped twice")
    error.__cause__ = ValueError("wrapped")
    error.__cause__.__context__ = OSError(code, "said")
    assert files.reason_of(error) == reason


def test_a_failure_without_a_file_operation_has_no_reason() -> None:
    """A timeout is an OSError by inheritance only, and chains may be circles."""
    error = ValueError("no file")
    error.__context__ = error.__cause__ = TimeoutError("too long")
    error.__cause__.__context__ = error
    assert files.reason_of(error) == ""


def test_removing_takes_files_folders_and_what_is_not_there(tmp_path: Path) -> None:
    """A link is removed, not what it points at."""
    (tmp_path / "kept").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "kept")
    (tmp_path / "folder" / "deep").mkdir(parents=True)
    for name in ("link", "folder", "nothing"):
        files.remove_tree(tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_the_tree_is_walked_from_the_deepest_on(tmp_path: Path) -> None:
    """A folder comes after what is in it, so that syncing in this order leaves nothing open."""
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "file").write_text("x")
    (tmp_path / "top").write_text("x")
    found = [(path.relative_to(tmp_path).as_posix(), is_folder) for path, is_folder in files.tree(tmp_path)]
    assert found == [("a/b/file", False), ("a/b", True), ("top", False), ("a", True)]
