"""Sees every operation that changes a folder, at the level of system calls, from inside the process.

Rule: whatever a process does to files under one folder through ``os``, ``io`` or ``pathlib`` passes through a
:class:`Watch`, whoever calls it: the checkpoint package, the row writer, torch's own writer. So a test can list the
operations of a save, end the process before or after any one of them, or make any one fail. Nothing is traced from
outside: no tracer, no privilege, no program of the distribution. That nothing passes by unseen is checked against
``strace``, and against the interpreter's audit events.

What native code writes by itself is not seen: of a run, that is LMDB's store, which is thrown away by the next start.
"""

from __future__ import annotations

import builtins
import io
import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

_TEMPORARY = re.compile(r"(step_\d+)\.tmp-i\d+-[^/]+")
_WRITING = os.O_WRONLY | os.O_RDWR


@dataclass(frozen=True, slots=True)
class Operation:
    """One system call that changes a folder, or makes a change durable.

    Attributes:
        kind: ``create``, ``write``, ``truncate``, ``fsync``, ``close``, ``mkdir``, ``rename``, ``unlink`` or ``rmdir``.
        path: What it is about, relative to the watched folder.
        target: The new name of a rename.
        data: The bytes of a write.
        offset: Where they go; for ``truncate`` the new size.
        number: Which one it is of those that are alike.
    """

    kind: str
    path: str
    target: str = ""
    data: bytes = b""
    offset: int = 0
    number: int = 0

    @property
    def label(self) -> str:
        """Name it so that two runs of the same scenario agree, whatever order their threads ran in."""
        path, target = (_TEMPORARY.sub(r"\1.tmp", name) for name in (self.path, self.target))
        return f"{self.kind} {path}{f' -> {target}' if target else ''} #{self.number}"


@dataclass(slots=True)
class _Opened:
    path: str
    append: bool
    position: int = 0
    writing: bool = True


class Watch:
    """Stands between a process and one folder.

    Args:
        root: The folder.
        before: Called before each operation; what it raises, the operation raises.
        after: Called after each operation that succeeded.
    """

    def __init__(
        self,
        root: Path,
        *,
        before: Callable[[Operation], None] = lambda _: None,
        after: Callable[[Operation], None] = lambda _: None,
    ) -> None:
        self.root = os.path.realpath(root)
        self.before = before
        self.after = after
        self.seen: list[Operation] = []
        self._open: dict[int, _Opened] = {}
        self._numbers: Counter[str] = Counter()
        self._lock = threading.RLock()
        self._real: dict[str, Any] = {}

    # ------------------------------------------------------------------------------------------- paths

    def _relative(self, path: Any, dir_fd: int | None = None) -> str | None:  # noqa: ANN401 - whatever os takes
        """Return a path relative to the root, or None if it is elsewhere."""
        if isinstance(path, int):
            return None
        text = os.fsdecode(path)
        if dir_fd is not None and not text.startswith(os.sep):
            opened = self._open.get(dir_fd)
            if opened is None:
                return None
            return os.path.normpath(os.path.join(opened.path, text))  # noqa: PTH118 - text, as os has it
        absolute = os.path.normpath(os.path.abspath(text))  # noqa: PTH100 - as above
        if absolute == self.root:
            return "."
        return absolute[len(self.root) + 1 :] if absolute.startswith(self.root + os.sep) else None

    # ------------------------------------------------------------------------------------- operations

    def _happens(self, operation: Operation, call: Callable[[], Any]) -> Any:  # noqa: ANN401 - as os returns
        with self._lock:
            alike = operation.label
            operation = replace(operation, number=self._numbers[alike])
            self._numbers[alike] += 1
        self.before(operation)
        # Noted and done in one step, so that the list is an order in which it could have happened.
        with self._lock:
            result = call()
            self.seen.append(operation)
        self.after(operation)
        return result

    def _os_open(
        self,
        path: Any,  # noqa: ANN401 - whatever os takes
        flags: int,
        mode: int = 0o777,
        *,
        dir_fd: int | None = None,
    ) -> int:
        real = self._real["open"]
        name = self._relative(path, dir_fd)

        def call() -> int:
            fd: int = real(path, flags, mode, dir_fd=dir_fd)
            if name is not None:
                with self._lock:
                    self._open[fd] = _Opened(name, bool(flags & os.O_APPEND), writing=bool(flags & _WRITING))
            else:
                self._open.pop(fd, None)
            return fd

        if name is None or not flags & _WRITING:
            return call()
        there = os.path.lexists(os.path.join(self.root, name))  # noqa: PTH118 - as above
        if flags & os.O_CREAT and not there:
            return int(self._happens(Operation("create", name), call))
        if flags & os.O_TRUNC and there:
            return int(self._happens(Operation("truncate", name), call))
        return call()

    def _os_close(self, fd: int) -> None:
        opened = self._open.pop(fd, None)
        if opened is None or not opened.writing:  # closing what was only read changes nothing
            self._real["close"](fd)
        else:
            self._happens(Operation("close", opened.path), lambda: self._real["close"](fd))

    def _os_write(self, fd: int, data: Any) -> int:  # noqa: ANN401 - a buffer
        opened = self._open.get(fd)
        if opened is None:
            plain: int = self._real["write"](fd, data)
            return plain
        return self._written(opened, data, lambda: self._real["write"](fd, data))

    def _os_pwrite(self, fd: int, data: Any, offset: int) -> int:  # noqa: ANN401 - a buffer
        opened = self._open.get(fd)
        if opened is None:
            plain: int = self._real["pwrite"](fd, data, offset)
            return plain
        at = _Opened(opened.path, append=False, position=offset)
        return self._written(at, data, lambda: self._real["pwrite"](fd, data, offset))

    def _written(self, opened: _Opened, data: Any, call: Callable[[], int]) -> int:  # noqa: ANN401 - a buffer
        if opened.append:
            opened.position = os.stat(os.path.join(self.root, opened.path)).st_size  # noqa: PTH116, PTH118 - as above
        operation = Operation("write", opened.path, data=bytes(data), offset=opened.position)
        count: int = self._happens(operation, call)
        opened.position += count
        return count

    def _os_fsync(self, fd: Any) -> None:  # noqa: ANN401 - a descriptor, or what has one
        opened = self._open.get(fd if isinstance(fd, int) else fd.fileno())
        if opened is None:
            self._real["fsync"](fd)
        else:
            self._happens(Operation("fsync", opened.path), lambda: self._real["fsync"](fd))

    def _os_ftruncate(self, fd: int, length: int) -> None:
        opened = self._open.get(fd)
        if opened is None:
            self._real["ftruncate"](fd, length)
        else:
            operation = Operation("truncate", opened.path, offset=length)
            self._happens(operation, lambda: self._real["ftruncate"](fd, length))

    def _one_name(self, name: str, kind: str) -> Callable[..., None]:
        def call(path: Any, *args: Any, **more: Any) -> None:  # noqa: ANN401 - as os takes
            relative = self._relative(path, more.get("dir_fd"))
            if relative is None:
                self._real[name](path, *args, **more)
            else:
                self._happens(Operation(kind, relative), lambda: self._real[name](path, *args, **more))

        return call

    def _two_names(self, name: str) -> Callable[..., None]:
        def call(source: Any, target: Any, **more: Any) -> None:  # noqa: ANN401 - as os takes
            old, new = self._relative(source), self._relative(target)
            if old is None or new is None:
                self._real[name](source, target, **more)
            else:
                self._happens(
                    Operation("rename", old, target=new), lambda: self._real[name](source, target, **more)
                )

        return call

    def _refused(self, name: str) -> Callable[..., None]:
        def call(*args: Any, **_: Any) -> None:  # noqa: ANN401 - as os takes
            if any(isinstance(path, str | bytes | os.PathLike) and self._relative(path) for path in args):
                message = f"os.{name}{args} is an operation that nobody simulates: teach the watch about it"
                raise AssertionError(message)
            self._real[name](*args)

        return call

    def _io_open(self, file: Any, mode: str = "r", *args: Any, **more: Any) -> Any:  # noqa: ANN401 - as open takes
        name = self._relative(file)
        if name is None or not set(mode) & set("wax+"):
            if isinstance(file, int):  # whoever closes it now does so unseen
                self._open.pop(file, None)
            return self._real["io_open"](file, mode, *args, **more)
        given = dict(
            zip(("buffering", "encoding", "errors", "newline", "closefd", "opener"), args, strict=False)
        )
        given |= more
        raw = _WatchedFile(self, name, file, mode.replace("b", "").replace("t", ""))
        if given.get("buffering") == 0:
            return raw
        buffered: Any = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        if "b" in mode:
            return buffered
        text = {key: given[key] for key in ("encoding", "errors", "newline") if key in given}
        return io.TextIOWrapper(buffered, **text)

    @contextmanager
    def installed(self) -> Iterator[Watch]:
        """Stand in the way until the block ends."""
        self._real = {
            name: getattr(os, name)
            for name in (
                "open", "close", "write", "pwrite", "fsync", "fdatasync", "ftruncate", "mkdir", "rmdir", "unlink",
                "remove", "rename", "replace", "link", "symlink", "truncate", "mkfifo", "writev", "pwritev", "sendfile",
            )
        }  # fmt: skip
        self._real["io_open"] = io.open
        standing = {
            "open": self._os_open,
            "close": self._os_close,
            "write": self._os_write,
            "pwrite": self._os_pwrite,
            "fsync": self._os_fsync,
            "fdatasync": self._os_fsync,
            "ftruncate": self._os_ftruncate,
            "mkdir": self._one_name("mkdir", "mkdir"),
            "rmdir": self._one_name("rmdir", "rmdir"),
            "unlink": self._one_name("unlink", "unlink"),
            "remove": self._one_name("remove", "unlink"),
            "rename": self._two_names("rename"),
            "replace": self._two_names("replace"),
            **{name: self._refused(name) for name in ("link", "symlink", "truncate", "mkfifo")},
        }
        try:
            for name, function in standing.items():
                setattr(os, name, function)
            io.open = builtins.open = self._io_open
            yield self
        finally:
            for name in standing:
                setattr(os, name, self._real[name])
            io.open = builtins.open = self._real["io_open"]


class _WatchedFile(io.FileIO):
    """What ``open`` returns for a file that is written; everything buffered above it ends up here."""

    def __init__(self, watch: Watch, name: str, file: Any, mode: str) -> None:  # noqa: ANN401 - a path
        self._watch = watch
        there = os.path.lexists(file)
        kind = "" if there and "w" not in mode else "truncate" if there else "create"

        def call() -> None:
            super(_WatchedFile, self).__init__(file, mode)
            watch._open[self.fileno()] = _Opened(name, append="a" in mode)  # noqa: SLF001 - same module

        if kind:
            watch._happens(Operation(kind, name), call)  # noqa: SLF001 - same module
        else:
            call()

    def write(self, data: Any, /) -> int:  # noqa: ANN401 - a buffer
        """Write, seen."""
        opened = self._watch._open[self.fileno()]  # noqa: SLF001 - same module
        if not opened.append:
            opened.position = self.tell()
        return self._watch._written(opened, data, lambda: super(_WatchedFile, self).write(data) or 0)  # noqa: SLF001 - same module

    def truncate(self, size: int | None = None, /) -> int:
        """Cut off, seen."""
        length = self.tell() if size is None else size
        opened = self._watch._open[self.fileno()]  # noqa: SLF001 - same module
        operation = Operation("truncate", opened.path, offset=length)
        found: int = self._watch._happens(operation, lambda: super(_WatchedFile, self).truncate(length))  # noqa: SLF001 - same module
        return found

    def close(self) -> None:
        """Close, seen."""
        if self.closed:
            return
        opened = self._watch._open.pop(self.fileno(), None)  # noqa: SLF001 - same module
        if opened is None:
            super().close()
        else:
            self._watch._happens(Operation("close", opened.path), super().close)  # noqa: SLF001 - same module
