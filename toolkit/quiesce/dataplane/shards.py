"""Rows as safetensors files: written from a snapshot while the run goes on, read by a restore or an audit.

Rule: a file's digest is computed from the very bytes that go to the file, so nobody has to read it again to
know what it should hold, and each file is fsynced before its digest is reported. Nothing here suspends;
writing and reading block.

One tensor per field, named ``<row key>#<field>``, so that any safetensors reader can look into a checkpoint.
An element type that the format has no name for is written as ``U8``, with its real type and shape in the
metadata entry ``rows.raw``.

Files are read through the safetensors library, but written here: the library's ``serialize`` builds the whole
document in memory and holds the interpreter lock while it does (66 ms for 64 MiB, during which the training
loop stands still), and its raw-address interface came in 0.8 and replaced the one before. Here rows go
through a few small buffers: this thread fills one while others hash, write and sync the ones before, and no
step holds the lock for longer than a copy of one buffer. The format is public and small: the header's
length in 8 bytes, a JSON header padded to 8, the data.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from quiesce.dataplane import durable
from quiesce.dataplane.interface import FileDigest, RowsWritten
from quiesce.dataplane.rows import DTYPES, Buffer, DType, decode_layout, span, to_tensor
from quiesce.errors import RowCorruptError, RowKeyError
from quiesce.threads import DaemonExecutor
from quiesce.types import RowKey

if TYPE_CHECKING:
    from quiesce.dataplane.interface import Row, TensorLibrary

__all__ = ["SHARD_BYTES", "read_inventory", "read_metadata", "read_rows", "shard_name", "write_shards"]

SHARD_BYTES: Final = 64 << 20
"""Rows go into one file until their elements take this many bytes."""

_SHARD_TENSORS: Final = 1 << 16  # per file: keeps the header of very small rows far below what readers accept
_CHUNK_BYTES: Final = 4 << 20
_CHUNKS: Final = 4
_MAX_HEADER_BYTES: Final = 100_000_000  # the format's own limit
_OWN: Final = "rows."  # metadata entries of ours
_FORMAT: Final = "1"
_BY_SAFETENSORS: Final = {dtype.safetensors: dtype for dtype in DTYPES.values() if dtype.safetensors}
_CREATE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_READ: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
_ENCODER: Final = json.JSONEncoder(separators=(",", ":"), sort_keys=True)


def shard_name(number: int) -> str:
    """Return the name of a snapshot's n-th file, from 0."""
    return f"rows-{number:05d}.safetensors"


# ---------------------------------------------------------------------------------------------------- writing


class _Tensor(NamedTuple):
    """One field on its way to a file; sorted by its first member, larger elements first: all lie aligned."""

    order: int
    name: str
    dtype: DType
    shape: tuple[int, ...]
    data: memoryview


def write_shards(
    directory: Path,
    rows: Iterable[tuple[str, Buffer]],
    metadata: Mapping[str, str],
    shard_bytes: int = SHARD_BYTES,
) -> RowsWritten:
    """Write encoded rows to new files in a folder, and fsync each file.

    Args:
        directory: An existing folder.
        rows: Encoded key and encoded row, in the order to write. The bytes must stay as they are until this
            returns.
        metadata: Goes into every file.
        shard_bytes: When to begin a further file. A row is never split over two.

    Raises:
        FileExistsError: If a file of such a name is there already, as a link or otherwise.
        OSError: If the disk is full and the like, with the file's name.
        RowCorruptError: If a row is not one.
        ValueError: If the metadata use a name of ours.
    """
    taken = sorted(name for name in metadata if name.startswith(_OWN))
    if taken:
        raise ValueError(f"metadata names that start with {_OWN!r} are taken: {', '.join(taken)}")
    count = 0
    with _Writer(directory) as writer:
        for number, (shard, tensors) in enumerate(_shards(rows, shard_bytes)):
            count += shard
            own = {f"{_OWN}format": _FORMAT, f"{_OWN}count": str(shard)}
            writer.write(shard_name(number), tensors, {**metadata, **own})
    files = writer.files()
    return RowsWritten(count, sum(file.size for file in files), files)


def _shards(rows: Iterable[tuple[str, Buffer]], shard_bytes: int) -> Iterator[tuple[int, list[_Tensor]]]:
    """Gather rows into files, each a number of rows and their tensors; at least one, for the metadata."""
    tensors: list[_Tensor] = []
    count = size = done = 0
    for key, row in rows:
        if count and (size + len(row) > shard_bytes or len(tensors) >= _SHARD_TENSORS):
            yield count, tensors
            done += 1
            tensors = []
            count = size = 0
        view = memoryview(row)
        for field in decode_layout(row, key):
            aligned = field.dtype.size if field.dtype.safetensors else 1
            name = f"{key}#{field.name}"
            tensors.append(_Tensor(-aligned, name, field.dtype, field.shape, view[field.start : field.stop]))
        count += 1
        size += len(row)
    if count or not done:
        yield count, tensors


def _header(tensors: Sequence[_Tensor], metadata: Mapping[str, str]) -> bytes:
    raw = {
        tensor.name: [tensor.dtype.name, list(tensor.shape)]
        for tensor in tensors
        if not tensor.dtype.safetensors
    }
    if raw:
        metadata = {**metadata, f"{_OWN}raw": _ENCODER.encode(raw)}
    parts = [f'"__metadata__":{_ENCODER.encode(metadata)}']
    escaped = json.encoder.encode_basestring_ascii
    at = 0
    for tensor in tensors:
        stop = at + len(tensor.data)
        if tensor.dtype.safetensors:
            kind, shape = tensor.dtype.safetensors, ",".join(map(str, tensor.shape))
        else:
            kind, shape = "U8", str(len(tensor.data))
        parts.append(
            f'{escaped(tensor.name)}:{{"dtype":"{kind}","shape":[{shape}],"data_offsets":[{at},{stop}]}}'
        )
        at = stop
    text = ("{" + ",".join(parts) + "}").encode("ascii")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class _Writer:
    """Writes files in turn: the caller's thread fills buffers, one hashes them, one writes, and one syncs.

    Each is about as long at work as the others, and none needs the interpreter's lock for long. A file is synced while
    the next ones are filled: a disk that is slow to sync holds nobody up before the end.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._hash: Executor = DaemonExecutor("quiesce-rows-hash", 1)
        self._disk: Executor = DaemonExecutor("quiesce-rows", 1)
        self._sync: Executor = DaemonExecutor("quiesce-rows-sync", 1)
        self._spare = [bytearray(_CHUNK_BYTES) for _ in range(_CHUNKS)]
        self._busy: deque[tuple[bytearray, Future[None], Future[None]]] = deque()
        self._ends: list[Future[None]] = []
        self._written: list[tuple[str, int, hashlib._Hash]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, exc_type: object, exc: object, traceback: object) -> None:
        """Wait for the disk; report its error unless another one is on its way out."""
        # Each file is closed in the end, whatever happened to it, so once the threads ended no descriptor is left open
        # and no buffer in use.
        for executor in (self._hash, self._disk, self._sync):
            executor.shutdown(wait=True)
        os.close(self._folder)
        if exc_type is None:
            for ended in (*(done for _, *both in self._busy for done in both), *self._ends):
                ended.result()

    def files(self) -> tuple[FileDigest, ...]:
        """Return what was written, once the writer was left."""
        return tuple(FileDigest(name, size, digest.hexdigest()) for name, size, digest in self._written)

    def write(self, name: str, tensors: list[_Tensor], metadata: Mapping[str, str]) -> None:
        tensors.sort(
            key=lambda tensor: tensor.order
        )  # stable, so rows keep their order within an element size
        digest = hashlib.sha256()
        fd = os.open(name, _CREATE, 0o644, dir_fd=self._folder)
        size = 0
        try:
            for chunk, used in self._filled(_header(tensors, metadata), tensors):
                size += used
                hashed = self._hash.submit(_update, digest, chunk, used)
                written = self._disk.submit(self._write_chunk, fd, name, chunk, used)
                self._busy.append((chunk, hashed, written))
        finally:
            # Behind the file's last write, on the thread that does them all.
            self._disk.submit(self._hand_over, fd, name)
        self._written.append((name, size, digest))

    def _filled(self, header: bytes, tensors: Iterable[_Tensor]) -> Iterator[tuple[bytearray, int]]:
        """Yield buffers filled with the file's bytes, and how far."""
        chunk, at = self._free_chunk(), 0
        room = memoryview(chunk)
        for data in (memoryview(header), *(tensor.data for tensor in tensors)):
            size, taken = len(data), 0
            if at + size < _CHUNK_BYTES:  # as nearly always: one copy, and no view of it
                room[at : at + size] = data
                at += size
                continue
            while taken < size:
                part = min(_CHUNK_BYTES - at, size - taken)
                room[at : at + part] = data[taken : taken + part]
                at += part
                taken += part
                if at == _CHUNK_BYTES:
                    yield chunk, at
                    chunk, at = self._free_chunk(), 0
                    room = memoryview(chunk)
        if at:
            yield chunk, at
        else:
            self._spare.append(chunk)

    def _free_chunk(self) -> bytearray:
        """Return a buffer that nobody uses; waits for the oldest one, and raises what its write raised."""
        if self._spare:
            return self._spare.pop()
        chunk, hashed, written = self._busy.popleft()
        hashed.result()
        written.result()
        return chunk

    def _write_chunk(self, fd: int, name: str, chunk: bytearray, used: int) -> None:
        with self._naming(name), memoryview(chunk) as whole:
            at = 0
            while at < used:
                at += os.write(fd, whole[at:used])

    def _hand_over(self, fd: int, name: str) -> None:
        self._ends.append(self._sync.submit(self._end_file, fd, name))

    def _end_file(self, fd: int, name: str) -> None:
        try:
            with self._naming(name):
                durable.fsync(fd, self._directory / name)
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def _naming(self, name: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            error.filename = str(self._directory / name)
            raise


def _update(digest: hashlib._Hash, chunk: bytearray, used: int) -> None:
    with memoryview(chunk)[:used] as filled:
        digest.update(filled)


# ---------------------------------------------------------------------------------------------------- reading


def read_rows(
    directory: Path, names: Sequence[str], *, tensors: TensorLibrary = "torch"
) -> Iterator[tuple[RowKey, Row]]:
    """Return the rows of files, one file in memory at a time, each file's in the order of encoded keys.

    Args:
        directory: The folder.
        names: The files' names.
        tensors: Which library's.

    Raises:
        FileNotFoundError: If a file is not there.
        OSError: If it is a link, or cannot be read.
        RowCorruptError: If a file is not one of ours, is cut short, or holds another number of rows than it
            says.
    """
    for name in names:
        path = _path(directory, name)
        content = _read(path)
        metadata, header = _parse_header(path, content, len(content))
        raw = _raw_table(path, metadata)
        rows: dict[str, dict[str, Any]] = {}
        for tensor_name, entry in _deserialize(path, content):
            key, field = _split(path, tensor_name)
            dtype, shape = _kind(path, tensor_name, header, raw)
            data = entry["data"]
            data = data if isinstance(data, bytearray) else bytearray(data)
            rows.setdefault(key, {})[field] = to_tensor(data, dtype, shape, tensors, f"{path}: {tensor_name}")
        _check_count(path, metadata, len(rows))
        for key in sorted(rows):
            yield _key(path, key), rows[key]


def read_inventory(directory: Path, names: Sequence[str]) -> dict[RowKey, tuple[str, ...]]:
    """Return which rows files hold and each row's fields, from the files' headers alone.

    Raises:
        FileNotFoundError: If a file is not there.
        OSError: If it is a link, or cannot be read.
        RowCorruptError: As :func:`read_rows`, and if a row is in two files.
    """
    found: dict[RowKey, tuple[str, ...]] = {}
    for name in names:
        path = _path(directory, name)
        metadata, header = _read_header(path)
        raw = _raw_table(path, metadata)
        rows: dict[str, list[str]] = {}
        for tensor_name in header:
            key, field = _split(path, tensor_name)
            _kind(path, tensor_name, header, raw)
            rows.setdefault(key, []).append(field)
        _check_count(path, metadata, len(rows))
        for text in sorted(rows):
            key_found = _key(path, text)
            if key_found in found:
                raise RowCorruptError(str(path), f"row {text} is in another file too")
            found[key_found] = tuple(sorted(rows[text]))
    return found


def read_metadata(path: Path) -> dict[str, str]:
    """Return the metadata of one file, ours (``rows.…``) included.

    Raises:
        OSError: If it is a link, or cannot be read.
        RowCorruptError: If it is not a safetensors file.
    """
    return _read_header(path)[0]


_Header = dict[str, dict[str, Any]]


def _path(directory: Path, name: str) -> Path:
    if "/" in name or "\0" in name or name in {"", ".", ".."}:
        raise RowCorruptError(str(directory), f"{name!r} is not the name of a file in it")
    return directory / name


def _open(path: Path) -> tuple[int, int]:
    """Open a regular file, following no link; return descriptor and size."""
    fd = os.open(path, _READ | os.O_NONBLOCK)  # a pipe in its place must not make a restore wait
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise RowCorruptError(str(path), "it is not a regular file")
    except BaseException:
        os.close(fd)
        raise
    return fd, status.st_size


def _read(path: Path) -> bytes:
    fd, size = _open(path)
    with open(fd, "rb") as file:  # noqa: PTH123 - a descriptor that was opened without following links
        content = file.read()
    if len(content) != size:
        raise RowCorruptError(str(path), f"it has {size} bytes, of which {len(content)} could be read")
    return content


def _read_header(path: Path) -> tuple[dict[str, str], _Header]:
    fd, size = _open(path)
    with open(fd, "rb") as file:  # noqa: PTH123 - a descriptor that was opened without following links
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if length > _MAX_HEADER_BYTES:
            raise RowCorruptError(str(path), f"it claims a header of {length} bytes")
        return _parse_header(path, start + file.read(length), size)


def _parse_header(path: Path, content: bytes, size: int) -> tuple[dict[str, str], _Header]:
    """Return metadata and tensors from a file's first bytes, which have to describe ``size`` bytes."""
    length = int.from_bytes(content[:8], "little")
    if len(content) < 8 + length or length > _MAX_HEADER_BYTES:
        raise RowCorruptError(str(path), f"it is cut short: {size} bytes, and a header of {length}")
    try:
        header = json.loads(content[8 : 8 + length])
    except (ValueError, RecursionError) as error:
        raise RowCorruptError(str(path), f"its header is not JSON ({type(error).__name__})") from None
    metadata = header.pop("__metadata__", {}) if isinstance(header, dict) else None
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise RowCorruptError(str(path), "its header is not that of a safetensors file")
    end = 0
    for name, entry in header.items():
        match entry:
            case {"dtype": str(), "shape": list(shape), "data_offsets": [start, stop]} if all(
                type(number) is int and number >= 0 for number in (start, stop, *shape)
            ):
                if start > stop:
                    raise RowCorruptError(str(path), f"tensor {name!r} ends before it starts")
                end = max(end, stop)
            case _:
                raise RowCorruptError(str(path), f"its header does not describe tensor {name!r}")
    if 8 + length + end != size:
        raise RowCorruptError(str(path), f"it has {size} bytes, its header describes {8 + length + end}")
    if metadata.get(f"{_OWN}format") != _FORMAT:
        raise RowCorruptError(str(path), f"its rows are not of format {_FORMAT}")
    return metadata, header


def _deserialize(path: Path, content: bytes) -> list[tuple[str, dict[str, Any]]]:
    import safetensors

    try:
        entries: list[tuple[str, dict[str, Any]]] = safetensors.deserialize(content)  # type: ignore[no-untyped-call] # its stub has no types here
    except safetensors.SafetensorError as error:
        raise RowCorruptError(str(path), f"it is not a safetensors file ({error})") from None
    return entries


def _raw_table(path: Path, metadata: Mapping[str, str]) -> dict[str, tuple[DType, tuple[int, ...]]]:
    """Return the real element type and shape of the tensors that the format has no name for."""
    try:
        table = json.loads(metadata.get(f"{_OWN}raw", "{}"))
        found = {name: (DTYPES[dtype], tuple(shape)) for name, (dtype, shape) in table.items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise RowCorruptError(str(path), f"its metadata entry {_OWN}raw cannot be read") from None
    if not all(type(size) is int and size >= 0 for _, shape in found.values() for size in shape):
        raise RowCorruptError(str(path), f"its metadata entry {_OWN}raw has an impossible shape")
    return found


def _kind(
    path: Path, name: str, header: _Header, raw: Mapping[str, tuple[DType, tuple[int, ...]]]
) -> tuple[DType, tuple[int, ...]]:
    entry = header[name]
    start, stop = entry["data_offsets"]
    if name in raw:
        dtype, shape = raw[name]
    else:
        known = _BY_SAFETENSORS.get(entry["dtype"])
        if known is None:
            raise RowCorruptError(
                str(path), f"tensor {name!r} has the unknown element type {entry['dtype']!r}"
            )
        dtype, shape = known, tuple(entry["shape"])
    if span(dtype, shape) != stop - start:
        raise RowCorruptError(
            str(path), f"tensor {name!r} has {stop - start} bytes, which are not {dtype.name}{shape}"
        )
    return dtype, shape


def _split(path: Path, name: str) -> tuple[str, str]:
    key, mark, field = name.partition("#")
    if not mark or not field:
        raise RowCorruptError(str(path), f"tensor {name!r} is not a field of a row")
    return key, field


def _key(path: Path, text: str) -> RowKey:
    try:
        return RowKey.decode(text)
    except RowKeyError as error:
        raise RowCorruptError(str(path), str(error)) from None


def _check_count(path: Path, metadata: Mapping[str, str], rows: int) -> None:
    claimed = metadata.get(f"{_OWN}count")
    if claimed != str(rows):
        raise RowCorruptError(str(path), f"it holds {rows} rows and says {claimed}")
