"""The file operations of a save, each durable by itself, all in one place.

Rule: nothing else in this package changes the file system (what torch and the data plane write is synced and
hashed here), so a test that replaces :func:`before` sees every step of a save, and can fail or kill it there.
Files are complete and fsynced when a function returns; a name is durable once its folder was fsynced. Nothing
here suspends: everything blocks, and belongs in a thread.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from quiesce.dataplane import durable
from quiesce.dataplane.interface import FileDigest

__all__ = [
    "append",
    "before",
    "fsync_file",
    "fsync_folder",
    "hash_and_sync",
    "hash_file",
    "make_folder",
    "read",
    "reason_of",
    "remove_tree",
    "rename",
    "replace_durable",
    "tree",
    "truncate",
    "write_durable",
]

_CHUNK_BYTES: Final = 1 << 20
_DISK: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_PERMISSION: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


def before(operation: str, path: Path) -> None:
    """Do nothing; called before each operation. Tests of crashes and full disks put their own here.

    Args:
        operation: ``create``, ``write``, ``fsync``, ``fsync_folder``, ``mkdir``, ``rename``, ``remove``,
            ``append`` or ``truncate``.
        path: The path that is about to be touched; for a rename, the new name.
    """


def reason_of(error: BaseException) -> str:
    """Say why a file operation failed: ``disk``, ``permission``, ``io``, or "" if none did.

    Follows the chain of causes, because libraries wrap what the operating system said.
    """
    seen: set[int] = set()
    step: BaseException | None = error
    while step is not None and id(step) not in seen:
        seen.add(id(step))
        if isinstance(step, OSError) and not isinstance(step, TimeoutError):
            if step.errno in _DISK:
                return "disk"
            return "permission" if step.errno in _PERMISSION else "io"
        step = step.__cause__ or step.__context__
    return ""


def make_folder(path: Path, *, exist_ok: bool = False) -> None:
    """Create a folder; its name is durable once the folder around it was fsynced.

    Raises:
        OSError: If it cannot be created, or is there and may not be.
    """
    before("mkdir", path)
    path.mkdir(exist_ok=exist_ok)


def write_durable(path: Path, data: bytes | Iterable[bytes], *, name: str | None = None) -> FileDigest:
    """Write a new file and fsync it.

    Args:
        path: Where; nothing may be there.
        data: Its content, whole or in pieces.
        name: What the digest calls it; None means the file's name.

    Raises:
        OSError: If any step fails.
    """
    digest, size = hashlib.sha256(), 0
    before("create", path)
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        for piece in (data,) if isinstance(data, bytes) else data:
            _write_all(fd, path, piece)
            digest.update(piece)
            size += len(piece)
        before("fsync", path)
        durable.fsync(fd, path)
    finally:
        os.close(fd)
    return FileDigest(path.name if name is None else name, size, digest.hexdigest())


def replace_durable(path: Path, data: bytes) -> None:
    """Replace a small file: a crash leaves the old or the new content, never half of either.

    Raises:
        OSError: If any step fails; the old content is there then.
    """
    beside = path.with_name(f".{path.name}.new")
    beside.unlink(missing_ok=True)
    write_durable(beside, data)
    rename(beside, path)
    fsync_folder(path.parent)


def append(fd: int, path: Path, data: bytes) -> None:
    """Append to an open file; :func:`fsync_file` makes it durable.

    Raises:
        OSError: If not everything could be written; how much was is unknown.
    """
    before("append", path)
    _write_all(fd, path, data)


def truncate(fd: int, path: Path, size: int) -> None:
    """Cut an open file off."""
    before("truncate", path)
    os.ftruncate(fd, size)


def fsync_file(fd: int, path: Path) -> None:
    """Make what was written to an open file durable."""
    before("fsync", path)
    durable.fsync(fd, path)


def hash_file(path: Path, *, name: str | None = None) -> FileDigest:
    """Read a file for its size and digest.

    Raises:
        OSError: If it cannot be read.
    """
    digest, size = hashlib.sha256(), 0
    with path.open("rb", buffering=0) as file:
        buffer = memoryview(bytearray(_CHUNK_BYTES))
        while got := file.readinto(buffer):
            digest.update(buffer[:got])
            size += got
    return FileDigest(path.name if name is None else name, size, digest.hexdigest())


def hash_and_sync(path: Path, *, name: str | None = None) -> FileDigest:
    """Make a file that somebody else wrote durable, and return its size and digest.

    Raises:
        OSError: If it cannot be read or synced.
    """
    before("fsync", path)
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        durable.fsync(fd, path)
    finally:
        os.close(fd)
    return hash_file(path, name=name)


def fsync_folder(path: Path) -> None:
    """Make the names in a folder durable.

    Raises:
        OSError: If it cannot be synced.
    """
    before("fsync_folder", path)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def rename(source: Path, target: Path) -> None:
    """Rename within one folder; replaces a file, but never a folder that holds something.

    Raises:
        OSError: If it fails; nothing has changed then.
    """
    before("rename", target)
    source.rename(target)


def remove_tree(path: Path) -> None:
    """Delete a folder and all that is in it, or a file; what is not there is passed over.

    Raises:
        OSError: If something cannot be deleted.
    """
    before("remove", path)
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def read(path: Path) -> bytes:
    """Return a file's content.

    Raises:
        OSError: If it cannot be read.
    """
    return path.read_bytes()


def tree(path: Path) -> Iterator[tuple[Path, bool]]:
    """Yield everything under a folder as (path, whether it is a folder), deepest first, then by name."""
    for folder, folders, names in os.walk(path, topdown=False):
        for name in sorted(names):
            yield Path(folder, name), False
        for name in sorted(folders):
            yield Path(folder, name), True


def _write_all(fd: int, path: Path, data: bytes) -> None:
    view = memoryview(data)
    while view:
        before("write", path)
        view = view[os.write(fd, view) :]
