"""The one place where a file is made durable, so that whoever writes a checkpoint can be told how long it took.

Rule: who is not watched pays for one truth test. Nothing here suspends; an fsync blocks, and belongs in a
thread.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

__all__ = ["fsync", "watched"]

Told = Callable[[int, int], None]
"""Told nanoseconds and bytes of each file, on the thread that synced it."""

_WATCHED: Final[dict[str, Told]] = {}


@contextmanager
def watched(folder: Path, told: Told | None) -> Iterator[None]:
    """Be told of each file below a folder that is made durable meanwhile, in whatever thread.

    Args:
        folder: The folder; one watcher at a time.
        told: Must not raise; None watches nothing.
    """
    prefix = f"{folder}{os.sep}"
    if told is not None:
        _WATCHED[prefix] = told
    try:
        yield
    finally:
        if told is not None:
            del _WATCHED[prefix]


def fsync(fd: int, path: Path) -> None:
    """Make what was written to an open file durable.

    Args:
        fd: The file.
        path: Its path, by which it is known whether somebody watches.

    Raises:
        OSError: If the disk refuses.
    """
    if not _WATCHED:
        os.fsync(fd)
        return
    since = time.perf_counter_ns()
    os.fsync(fd)
    took = time.perf_counter_ns() - since
    for prefix, told in list(_WATCHED.items()):
        if str(path).startswith(prefix):
            told(took, os.fstat(fd).st_size)
