"""What a disk may hold after a loss of power: whatever was synced, and any part of what was not.

Rule: a file's bytes are durable once the file was fsynced, a name once its folder was. Everything else is pending, and
each pending change, by itself, may have reached the disk or not: a write may be there, missing (its place holds what was
there, or zeros), or torn in the middle; a name may be new, old, or gone. Only two things are taken for granted: a rename
is one change (both names or neither), and a file system that recovers is consistent (an entry leads to a file or folder).
This is weaker than what ext4, XFS and Btrfs do, on purpose: a save that holds here needs none of their favours. The model
is of POSIX, and of nobody's code: an fsync of a file says nothing about its name.

The input is a list of operations as :class:`~tests.crash.operations.Operation` tells them, and the output is a series of
images, each a mapping of file names to bytes. Bounded: for each moment the extremes, each pending change alone kept and
alone lost, each way to tear a file, and some seeded random subsets; the same image is not handed out twice.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Literal

from tests.crash.operations import Operation

FOLDER = None
"""What an image has for a folder."""

Image = Mapping[str, bytes | None]
Tearing = Literal["kept", "lost", "zeros", "torn", "some"]
TEARINGS: tuple[Tearing, ...] = ("kept", "lost", "zeros", "torn")


@dataclass(slots=True, eq=False)
class _File:
    durable: bytes = b""
    now: bytes = b""
    pending: list[tuple[str, int, bytes]] = field(default_factory=list)  # write or truncate, offset, data

    def change(self, kind: str, offset: int, data: bytes) -> None:
        self.now = _changed(self.now, kind, offset, data)
        self.pending.append((kind, offset, data))

    def sync(self) -> None:
        self.durable = self.now
        self.pending = []

    def image(self, tearing: Tearing, choice: random.Random) -> bytes:
        if not self.pending or tearing == "kept":
            return self.now
        if tearing == "lost":
            return self.durable
        if tearing == "zeros":
            # The new size is there, the new blocks are not.
            return self.durable[: len(self.now)] + bytes(max(0, len(self.now) - len(self.durable)))
        found = self.durable
        for number, (kind, offset, data) in enumerate(self.pending):
            last = number == len(self.pending) - 1
            if tearing == "torn":
                found = _changed(found, kind, offset, data[: len(data) // 2] if last else data)
            elif choice.random() < 0.5:
                found = _changed(found, kind, offset, data)
        return found


def _changed(content: bytes, kind: str, offset: int, data: bytes) -> bytes:
    if kind == "truncate":
        return content[:offset] + bytes(max(0, offset - len(content)))
    if not data:
        return content
    hole = bytes(max(0, offset - len(content)))
    return content[:offset] + hole + data + content[offset + len(data) :]


@dataclass(slots=True, eq=False)
class _Folder:
    durable: dict[str, _File | _Folder] = field(default_factory=dict)
    now: dict[str, _File | _Folder] = field(default_factory=dict)
    pending: list[dict[str, _File | _Folder | None]] = field(default_factory=list)  # None: the name goes

    def change(self, names: dict[str, _File | _Folder | None]) -> None:
        _apply(self.now, names)
        self.pending.append(names)

    def sync(self) -> None:
        self.durable = dict(self.now)
        self.pending = []

    def image(self, kept: frozenset[int]) -> dict[str, _File | _Folder]:
        found = dict(self.durable)
        for number, names in enumerate(self.pending):
            if number in kept:
                _apply(found, names)
        return found


def _apply(entries: dict[str, _File | _Folder], names: dict[str, _File | _Folder | None]) -> None:
    for name, entry in names.items():
        if entry is None:
            entries.pop(name, None)
        else:
            entries[name] = entry


class Disk:
    """A file system with what is durable, what is pending, and what a process sees.

    Args:
        past: A folder whose content is durable already.
    """

    def __init__(self, past: Path) -> None:
        self._root = _Folder()
        for path in sorted(past.rglob("*")):
            name = path.relative_to(past)
            entry: _File | _Folder = (
                _Folder() if path.is_dir() else _File(path.read_bytes(), path.read_bytes())
            )
            self._folder(PurePosixPath(name).parent).now[name.name] = entry
        for folder in self._folders(self._root):
            folder.sync()

    def apply(self, operation: Operation) -> None:
        """Do what an operation did; what a process sees changes, what is durable only with an fsync."""
        path = PurePosixPath(operation.path)
        match operation.kind:
            case "create":
                self._folder(path.parent).change({path.name: _File()})
            case "mkdir":
                self._folder(path.parent).change({path.name: _Folder()})
            case "unlink" | "rmdir":
                self._folder(path.parent).change({path.name: None})
            case "rename":
                target = PurePosixPath(operation.target)
                assert target.parent == path.parent, "a rename from one folder to another is not modelled"
                folder = self._folder(path.parent)
                folder.change({path.name: None, target.name: folder.now[path.name]})
            case "write" | "truncate":
                file = self._entry(path)
                assert isinstance(file, _File)
                file.change(operation.kind, operation.offset, operation.data)
            case "fsync":
                self._entry(path).sync()
            case "close":
                pass
            case kind:
                message = f"operation {kind!r} is not modelled"
                raise AssertionError(message)

    def images(self, seed: int, subsets: int) -> Iterator[Image]:
        """Yield what a disk may hold if the power fails now, ``subsets`` of them at random."""
        choice = random.Random(f"{seed}")
        changes = [
            (folder, number) for folder in self._folders(self._root) for number in range(len(folder.pending))
        ]
        everything = frozenset(range(len(changes)))
        for tearing in TEARINGS:
            yield self._image(changes, everything, tearing, choice)
        yield self._image(changes, frozenset(), "lost", choice)
        for number in range(len(changes)):
            for tearing in ("kept", "lost"):
                yield self._image(changes, everything - {number}, tearing, choice)
                yield self._image(changes, frozenset({number}), tearing, choice)
        for number in range(1, len(changes)):
            yield self._image(changes, frozenset(range(number)), "kept", choice)
        if changes or any(file.pending for file in self._files(self._root)):
            for _ in range(subsets):
                some = frozenset(number for number in everything if choice.random() < 0.5)
                yield self._image(changes, some, "some", choice)

    def _image(
        self,
        changes: list[tuple[_Folder, int]],
        kept: frozenset[int],
        tearing: Tearing,
        choice: random.Random,
    ) -> Image:
        of_folder: dict[int, set[int]] = {}
        for number in kept:
            folder, change = changes[number]
            of_folder.setdefault(id(folder), set()).add(change)
        found: dict[str, bytes | None] = {}

        def walk(folder: _Folder, prefix: str) -> None:
            for name, entry in folder.image(frozenset(of_folder.get(id(folder), ()))).items():
                if isinstance(entry, _File):
                    found[prefix + name] = entry.image(tearing, choice)
                else:
                    found[prefix + name] = FOLDER
                    walk(entry, f"{prefix}{name}/")

        walk(self._root, "")
        return found

    def _entry(self, path: PurePosixPath) -> _File | _Folder:
        entry: _File | _Folder = self._root
        for part in path.parts:
            assert isinstance(entry, _Folder), path
            entry = entry.now[part]
        return entry

    def _folder(self, path: PurePosixPath) -> _Folder:
        found = self._entry(path)
        assert isinstance(found, _Folder)
        return found

    def _folders(self, folder: _Folder) -> Iterator[_Folder]:
        """Yield each folder that an image can show, once."""
        seen: set[int] = set()
        pending = [folder]
        while pending:
            folder = pending.pop()
            if id(folder) in seen:
                continue
            seen.add(id(folder))
            yield folder
            pending += [entry for entry in _reachable(folder) if isinstance(entry, _Folder)]

    def _files(self, root: _Folder) -> Iterator[_File]:
        for folder in self._folders(root):
            yield from (entry for entry in _reachable(folder) if isinstance(entry, _File))


def _reachable(folder: _Folder) -> list[_File | _Folder]:
    later = [entry for names in folder.pending for entry in names.values() if entry is not None]
    return [*folder.durable.values(), *folder.now.values(), *later]


def digest(image: Image) -> str:
    """Return what tells two images apart."""
    state = hashlib.sha256()
    for name in sorted(image):
        content = image[name]
        state.update(f"{name}\0{-1 if content is None else len(content)}\0".encode())
        state.update(content or b"")
    return state.hexdigest()


def write(image: Image, folder: Path) -> None:
    """Put an image into a new folder."""
    folder.mkdir()
    for name in sorted(image):
        content = image[name]
        if content is None:
            (folder / name).mkdir()
        else:
            (folder / name).write_bytes(content)
