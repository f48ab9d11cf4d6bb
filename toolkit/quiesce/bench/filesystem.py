"""A file system that is as slow as one likes, and that counts what is asked of it.

Rule: every operation on a file or folder below one root is counted and delayed once, whichever module asks for it,
because it is the functions of :mod:`os` (and :func:`io.open`) that are wrapped, through which all Python code that
writes a checkpoint goes: the checkpoint's own file operations, the data plane's shards, the journal, a trainer's
files. A delay is a sleep in the calling thread, as a slow disk's answer is. What a C library does by itself is not
seen: LMDB's store, which has to lie on a local disk anyway. Nothing here suspends.
"""

from __future__ import annotations

import io
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

__all__ = ["WatchedFileSystem"]

_BY_PATH: Final = ("open", "mkdir", "rmdir", "rename", "replace", "unlink", "remove", "scandir", "listdir")
_BY_DESCRIPTOR: Final = ("write", "pwrite", "writev", "fsync", "fdatasync", "ftruncate")


class WatchedFileSystem:
    """Counts and delays the operations below a folder, while it is :meth:`installed`.

    Args:
        root: The folder.
        latency: Seconds that each operation takes longer.
        where: Names the bin that an operation is counted in, asked when it begins.
    """

    def __init__(
        self, root: Path, latency: float = 0.0, where: Callable[[], str] = lambda: "everywhere"
    ) -> None:
        self.root = str(root.resolve())
        self.latency = latency
        self.operations: Counter[tuple[str, str]] = Counter()
        """How often each (bin, operation) was asked for."""
        self._where = where
        self._descriptors: set[int] = set()
        self._lock = threading.Lock()

    def count(self, where: str) -> int:
        """Return how many operations are in a bin."""
        with self._lock:
            return sum(number for (known, _), number in self.operations.items() if known == where)

    @contextmanager
    def installed(self) -> Iterator[WatchedFileSystem]:
        """Stand in the way of every operation below the root, until the end; for one at a time in a process."""
        wrapped = [*((os, name) for name in (*_BY_PATH, *_BY_DESCRIPTOR, "close")), (io, "open")]
        real = [(module, name, getattr(module, name)) for module, name in wrapped if hasattr(module, name)]
        try:
            for module, name, function in real:
                setattr(module, name, self._wrapper(module is os, name, function))
            yield self
        finally:
            for module, name, function in real:
                setattr(module, name, function)

    def _wrapper(self, of_os: bool, name: str, function: Callable[..., Any]) -> Callable[..., Any]:  # noqa: FBT001 - which module's
        if name == "close":

            def close(fd: int) -> None:
                self._descriptors.discard(fd)
                function(fd)

            return close

        def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - whatever the function takes and returns
            ours = self._is_ours(name, args, kwargs)
            if ours:
                self._pass(name)
            result = function(*args, **kwargs)
            if ours and of_os and name == "open":
                self._descriptors.add(result)
            return result

        return call

    def _is_ours(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        target = args[0] if args else "."
        folder = kwargs.get("dir_fd")
        if isinstance(target, int):
            return target in self._descriptors
        if folder is not None and folder in self._descriptors:
            return True
        path = os.path.abspath(os.fsdecode(target))  # noqa: PTH100 - a Path per operation would cost more than it
        return path == self.root or path.startswith(f"{self.root}{os.sep}")

    def _pass(self, name: str) -> None:
        where = self._where()
        with self._lock:
            self.operations[where, name] += 1
        if self.latency:
            time.sleep(self.latency)
