"""Who writes a checkpoint is told how long each file took to be made durable."""

import os
import threading
from pathlib import Path

import pytest

from quiesce.dataplane import durable


def write(path: Path, size: int) -> None:
    """Write a file and make it durable."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        os.write(fd, b"x" * size)
        durable.fsync(fd, path)
    finally:
        os.close(fd)


def test_files_below_the_folder_are_told_of_in_whatever_thread(tmp_path: Path) -> None:
    """And files beside it are not, not even in one whose name begins alike."""
    mine, beside = tmp_path / "cut", tmp_path / "cut-2"
    for folder in (mine / "trainer", beside):
        folder.mkdir(parents=True)
    told: list[int] = []

    def note(ns: int, num_bytes: int) -> None:
        assert ns >= 0
        told.append(num_bytes)

    with durable.watched(mine, note):
        write(mine / "a", 3)
        thread = threading.Thread(target=write, args=(mine / "trainer" / "b", 5))
        thread.start()
        thread.join()
        write(beside / "c", 7)
    write(mine / "d", 9)

    assert told == [3, 5]


def test_two_folders_are_watched_apart(tmp_path: Path) -> None:
    """Each by its own watcher."""
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    two.mkdir()
    told: list[tuple[str, int]] = []

    with (
        durable.watched(one, lambda _, size: told.append(("one", size))),
        durable.watched(two, lambda _, size: told.append(("two", size))),
        durable.watched(tmp_path / "nobody", None),
    ):
        write(one / "a", 1)
        write(two / "b", 2)

    assert told == [("one", 1), ("two", 2)]


def test_what_the_disk_refuses_is_raised_and_not_told(tmp_path: Path) -> None:
    """A watcher hears of what is durable."""
    told: list[int] = []

    with (
        durable.watched(tmp_path, lambda _, size: told.append(size)),
        pytest.raises(OSError, match="Bad file"),
    ):
        durable.fsync(1 << 20, tmp_path / "a")

    assert told == []
