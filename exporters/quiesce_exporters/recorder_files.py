"""The files of a recording: begun, filled, closed when full, compressed, and removed when there are too many.

Rule: a file that was begun is never begun again, and no byte of another process's file is changed while that
process lives: numbers are taken by exclusive creation, and a file is locked for as long as it is written. What
fails leaves whole lines behind. Everything blocks for as long as the disk does.

Lines reach the page cache with one write each batch, so a killed process loses nothing that was handed over.
"""

from __future__ import annotations

import errno
import fcntl
import gzip
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, NamedTuple

from quiesce.errors import RecorderPausedError
from quiesce.telemetry.recording import FILE_NAME, FORMAT, REMOVED_FILE, STREAMS, VERSION, open_lines

__all__ = ["SHARES", "Folder", "Stream"]

SHARES: Final[Mapping[str, float]] = {"slots": 0.35, "spans": 0.25, "samples": 0.3, "events": 0.1}
"""What each stream may keep of the folder when there is not enough for all; what one leaves, others use."""

PIECE: Final = 1 << 20
"""Bytes that are written or compressed at a time."""

THINNED: Final = 4
"""Every so many lines of a file of samples become one when it is thinned."""

MOST_THINNED: Final = 3
"""How often a file of samples is thinned before it is removed: to one line of 64."""

LEVEL: Final = 3
"""gzip level: 6 saves a tenth more and takes twice as long."""

RESERVE_SHARE: Final = 0.01
"""The reserve of a small disk, as a share of it."""

_DIGITS: Final = 4
_TEMPORARY: Final = ".tmp"


class _Closed(NamedTuple):
    """A file that nobody writes any more."""

    stream: str
    number: int
    path: Path
    size: int


class Folder:
    """The folder of a recording, kept below its limit.

    Args:
        path: The folder; made when the first file is.
        max_bytes: Limit of everything in it.
        file_bytes: Limit of one file.
        reserve_bytes: What is left free on the disk for the run itself; at most a hundredth of the disk.
        compress: Whether full files are compressed.

    Attributes:
        path: The folder.
        file_bytes: Limit of one file.
        removed: What had to go, by stream.
    """

    def __init__(
        self, path: Path, *, max_bytes: int, file_bytes: int, reserve_bytes: int, compress: bool
    ) -> None:
        self.path = path
        # Of the limit, every stream's open file and one that is being compressed come first.
        self.file_bytes = min(file_bytes, max(1, max_bytes // (2 * (len(STREAMS) + 1))))
        self.removed: dict[str, dict[str, int]] = {}
        self._closed_bytes = max_bytes - (len(STREAMS) + 1) * self.file_bytes
        self._reserve = reserve_bytes
        self._compress = compress
        self._own: set[Path] = set()  # files of ours that are full: no lock says so
        self._untidy = True

    def require_room(self) -> None:
        """Refuse to go on when the disk is nearly full.

        Raises:
            RecorderPausedError: If it is.
            OSError: If the folder cannot be made or looked at.
        """
        try:
            disk = os.statvfs(self.path)
        except FileNotFoundError:  # the first time; asking each time costs more than the rest
            self.path.mkdir(exist_ok=True)
            disk = os.statvfs(self.path)
        free = disk.f_bavail * disk.f_frsize
        reserve = min(self._reserve, int(disk.f_blocks * disk.f_frsize * RESERVE_SHARE))
        if free < reserve:
            raise RecorderPausedError(self.path, free, reserve)

    def create(self, stream: str, header: Mapping[str, Any]) -> tuple[Path, int, int]:
        """Begin a file of the next number.

        Returns:
            Its path, its descriptor and its size.

        Raises:
            OSError: If it cannot be made; nothing is left behind then.
        """
        number = max((file.number for file in self._files() if file.stream == stream), default=-1) + 1
        while True:
            path = self.path / f"{stream}-{number:0{_DIGITS}d}.jsonl"
            try:
                descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o644)
                break
            except FileExistsError:  # another process was faster
                number += 1
        try:
            with suppress(OSError):  # a file system without locks: who looks after it then is on its own
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            line = json.dumps({"format": FORMAT, "version": VERSION, "stream": stream, **header}) + "\n"
            _write(descriptor, line.encode())
        except OSError:
            os.close(descriptor)
            path.unlink(missing_ok=True)
            raise
        self._untidy = True
        return path, descriptor, len(line)

    def full(self, path: Path) -> None:
        """Take over a file of this process that is not written any more."""
        self._own.add(path)
        self._untidy = True

    def tidy(self) -> bool:
        """Do one piece of what is to be done: compress a file, or remove or thin out one too many.

        Returns:
            Whether there was something to do.

        Raises:
            OSError: If it could not be done; what was there is still there.
        """
        if not self._untidy:
            return False
        files = self._files()
        with suppress(FileNotFoundError):
            for job in (self._compress_one, self._shrink):
                if job(files):
                    return True
        self._untidy = False
        return False

    def _files(self) -> list[_Closed]:
        found = []
        try:
            entries = list(os.scandir(self.path))
        except FileNotFoundError:
            return []
        for entry in entries:
            match = FILE_NAME.fullmatch(entry.name)
            if match:
                with suppress(FileNotFoundError):
                    size = entry.stat().st_size
                    found.append(_Closed(match[1], int(match[2]), Path(entry.path), size))
            elif entry.name.endswith(_TEMPORARY) and not self._is_young(entry):
                Path(entry.path).unlink(missing_ok=True)  # of a process that was killed while it compressed
        return sorted(found)

    @staticmethod
    def _is_young(entry: os.DirEntry[str]) -> bool:
        with suppress(FileNotFoundError):
            return time.time() - entry.stat().st_mtime < 600  # noqa: PLR2004 - seconds; compressing takes one
        return True

    def _compress_one(self, files: list[_Closed]) -> bool:
        if not self._compress:
            return False
        for file in files:
            if file.path.suffix != ".gz" and self._is_idle(file.path):
                target = file.path.with_name(f"{file.path.name}.gz")
                if not target.exists():
                    with (
                        _replacing(target) as scratch,
                        file.path.open("rb") as source,
                        gzip.open(scratch, "wb", compresslevel=LEVEL) as sink,
                    ):
                        shutil.copyfileobj(source, sink, PIECE)
                self._forget(file.path)
                return True
        return False

    def _shrink(self, files: list[_Closed]) -> bool:
        idle = [file for file in files if file.path.suffix == ".gz" or self._is_idle(file.path)]
        total = sum(file.size for file in idle)
        if total <= self._closed_bytes:
            return False
        sizes = {name: sum(file.size for file in idle if file.stream == name) for name in STREAMS}
        stream = max(STREAMS, key=lambda name: sizes[name] / SHARES[name])
        victims = [file for file in idle if file.stream == stream]
        if stream == "samples":
            for file in victims[:-1]:
                if self._thin(file):
                    return True
        self._count(victims[0], "files", victims[0].size)
        self._forget(victims[0].path)
        return True

    def _thin(self, file: _Closed) -> bool:
        """Keep every fourth line of a file of samples, with what the lines before it changed."""
        with open_lines(file.path) as lines:
            try:
                header = json.loads(lines.readline())
                times = int(header.get("thinned", 0))
            except (EOFError, ValueError, AttributeError):
                return False  # nothing that can be thinned: it is removed in its turn
            if times >= MOST_THINNED:
                return False
            with (
                _replacing(file.path) as scratch,
                _write_lines(scratch, packed=file.path.suffix == ".gz") as put,
            ):
                put(json.dumps({**header, "thinned": times + 1}))
                for line in _thinned(lines):
                    put(line)
        self._count(file, "thinned", file.size - file.path.stat().st_size)
        return True

    def _count(self, file: _Closed, what: str, num_bytes: int) -> None:
        """Say in the folder what it lacks, before it does."""
        path = self.path / REMOVED_FILE
        counts = {"files": 0, "bytes": 0, "thinned": 0, "until_ns": 0}
        try:
            told = json.loads(path.read_bytes())
        except (OSError, ValueError):
            told = {}
        if not isinstance(told, dict):
            told = {}
        now = counts | told.get(file.stream, {})
        now[what] += 1
        now["bytes"] += num_bytes
        if what == "files":
            now["until_ns"] = max(now["until_ns"], file.path.stat().st_mtime_ns)
        told[file.stream] = now
        self.removed = told
        with _replacing(path, sync=False) as scratch:
            scratch.write_text(json.dumps(told))

    def _forget(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        self._own.discard(path)

    def _is_idle(self, path: Path) -> bool:
        """Whether nobody writes a file: it is ours and full, or its process has let go of the lock."""
        if path in self._own:
            return True
        try:
            descriptor = os.open(path, os.O_RDONLY)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError:
            return False
        finally:
            os.close(descriptor)


class Stream:
    """The files of one stream that this process writes.

    Args:
        folder: Where.
        name: The stream's name.
        header: Returns what the header of a file says of its writer.

    Attributes:
        lines: Lines that were written, without headers.
        num_bytes: Bytes that were written.
    """

    def __init__(self, folder: Folder, name: str, header: Callable[[], Mapping[str, Any]]) -> None:
        self._folder = folder
        self._name = name
        self._header = header
        self._path = Path()
        self._descriptor = -1
        self._size = 0
        self._begun = 0
        self.lines = 0
        self.num_bytes = 0

    @property
    def is_new(self) -> bool:
        """Whether the next line begins a file."""
        return self._descriptor < 0

    def rotate(self, num_bytes: int) -> None:
        """Close the file if so many bytes would overfill it."""
        if self._descriptor >= 0 and self._size + num_bytes > self._folder.file_bytes:
            self.close()

    def append(self, lines: list[bytes]) -> None:
        """Write lines, each with its end.

        Raises:
            OSError: If not all could be written; those before the failure are, and whole.
            RecorderPausedError: If the disk is nearly full.
        """
        start = 0
        while start < len(lines):
            end, size = start, 0
            while end < len(lines) and (end == start or size + len(lines[end]) <= PIECE):
                size += len(lines[end])
                end += 1
            self._folder.require_room()
            self.rotate(size)
            if self._descriptor < 0:
                header = {**self._header(), "sequence": self._begun, "unix_ns": time.time_ns()}
                self._path, self._descriptor, self._size = self._folder.create(self._name, header)
                self._begun += 1
            try:
                _write(self._descriptor, b"".join(lines[start:end]))
            except OSError:
                self._cut()
                raise
            self._size += size
            self.num_bytes += size
            self.lines += end - start
            start = end

    def close(self) -> None:
        """Close the file; the next line begins another one."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            self._folder.full(self._path)

    def _cut(self) -> None:
        """Take half a line away again, and leave the file for good."""
        with suppress(OSError):
            os.ftruncate(self._descriptor, self._size)
        with suppress(OSError):
            self.close()


def _write(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        written = os.write(descriptor, view)
        if not written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        view = view[written:]


def _thinned(lines: Iterator[bytes]) -> Iterator[str]:
    kept: dict[str, Any] = {}
    when: float | None = None
    first = True
    count = 0
    for line in lines:
        try:
            record = json.loads(line)
            kept.update(record["m"])
            when = record["u"]
        except (ValueError, KeyError, TypeError):
            continue
        count += 1
        if first or count == THINNED:
            yield json.dumps({"u": when, "m": kept}, separators=(",", ":"))
            kept, when, count, first = {}, None, 0, False
    if when is not None:
        yield json.dumps({"u": when, "m": kept}, separators=(",", ":"))


@contextmanager
def _replacing(path: Path, *, sync: bool = True) -> Iterator[Path]:
    """Yield a scratch path that replaces the file once it is written (to the disk), and only then."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}{_TEMPORARY}")
    try:
        yield scratch
        if sync:
            descriptor = os.open(scratch, os.O_RDONLY)
            try:
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
        scratch.replace(path)
    except BaseException:
        scratch.unlink(missing_ok=True)
        raise


@contextmanager
def _write_lines(path: Path, *, packed: bool) -> Iterator[Callable[[str], object]]:
    with gzip.open(path, "wb", compresslevel=LEVEL) if packed else path.open("wb") as file:
        yield lambda line: file.write(f"{line}\n".encode())
