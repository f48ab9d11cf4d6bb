"""A run's folder: its lock, the counter of its incarnations, its journal, and the names of its checkpoints.

::

    run/
      run.lock          held while a process runs here; says which
      incarnation       how often the run was started; durable before a store is opened or a message sent
      lineage.jsonl     see journal.py
      checkpoints/
        step_12         a published checkpoint; step_12.1 is a further cut at the same step
        step_12.suspect a cut that broke a critical invariant
        step_13.tmp-…   being written
        trash-… aside-… corrupt-…

Rule: one process at a time (the lock is the kernel's, so a dead process holds none, and a forked child
inherits none), and an incarnation number is never used twice. Nothing here suspends: everything but
properties blocks on the disk.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from quiesce.checkpoint import files
from quiesce.checkpoint.journal import Journal, JournalRecord, read_journal, surviving
from quiesce.errors import (
    IncarnationSupersededError,
    RunFolderError,
    RunFolderInUseError,
    RunFolderLockedError,
)

if TYPE_CHECKING:
    from quiesce.checkpoint.cut import CutState

__all__ = ["CheckpointName", "RunFolder"]

_LOCK: Final = "run.lock"
_COUNTER: Final = "incarnation"
_JOURNAL: Final = "lineage.jsonl"
_CHECKPOINTS: Final = "checkpoints"
_NAME: Final = re.compile(r"step_(0|[1-9][0-9]{0,14})(?:\.([1-9][0-9]{0,8}))?", re.ASCII)
_TEMPORARY: Final = re.compile(r"step_[0-9]+\.tmp-i([0-9]{8,})-.+", re.ASCII)

# A POSIX lock is the process's: it does not keep a second RunFolder of the same process out, so this does. It
# also must not be opened twice, because closing any descriptor of the file gives the lock up.
_HELD: dict[str, int] = {}
_HELD_LOCK = threading.Lock()


@dataclass(frozen=True, slots=True, order=True)
class CheckpointName:
    """The name of a published checkpoint; names sort from the oldest to the newest.

    Attributes:
        step: Trained steps.
        serial: 0 for the first cut at that step, then 1, 2, …
    """

    step: int
    serial: int = 0

    def __str__(self) -> str:
        """Return the folder's name."""
        return f"step_{self.step}.{self.serial}" if self.serial else f"step_{self.step}"

    @classmethod
    def parse(cls, text: str) -> CheckpointName | None:
        """Return the name that a folder has, or None if it is no published checkpoint's."""
        found = _NAME.fullmatch(text)
        return None if found is None else cls(int(found[1]), int(found[2] or 0))


class RunFolder:
    """An open run folder; use :meth:`create` or :meth:`open`.

    Attributes:
        path: The folder.
        journal: Its lineage journal.
    """

    def __init__(self, path: Path, *, resume: bool, clock: Callable[[], float] = time.time) -> None:
        self.path = path
        self._incarnation: int | None = None
        self._restored_from: str | None = None
        self._lineage: frozenset[str] = frozenset()
        self._closed = False
        with self._naming("cannot be created"):
            path.mkdir(parents=True, exist_ok=True)
        self._lock_path = path / _LOCK
        self._lock_fd = self._lock()
        try:
            if not resume and self._is_used():
                raise RunFolderInUseError(str(path))
            with self._naming("cannot be prepared"):
                if not self._counter.exists():
                    if self._is_used():
                        raise RunFolderError(
                            str(path),
                            f"its counter {_COUNTER!r} is gone; write a number into it that is larger than "
                            f"every incarnation in {_JOURNAL} and in the names under {_CHECKPOINTS}",
                        )
                    self._make_durable()
                    files.replace_durable(self._counter, b"0\n")
                self.current_incarnation()  # unreadable: say so now
                files.make_folder(self.checkpoints, exist_ok=True)
                self.journal = Journal(path / _JOURNAL, clock=clock)
                files.fsync_folder(path)
        except BaseException:
            self._unlock()
            raise

    @classmethod
    def create(cls, path: Path) -> RunFolder:
        """Open a folder that no run has used yet; it is created if it is not there.

        Raises:
            RunFolderInUseError: If a run has used it, or uses it now.
            RunFolderError: If it cannot be created or written.
        """
        return cls(path, resume=False)

    @classmethod
    def open(cls, path: Path, *, resume: bool) -> RunFolder:
        """Open a folder.

        Args:
            path: The folder; it is created if it is not there.
            resume: Whether a run that used it is to be gone on with.

        Raises:
            RunFolderInUseError: If a run has used it and ``resume`` is False, or a process uses it now.
            RunFolderError: If it cannot be read or written, or its counter is gone or damaged.
        """
        return cls(path, resume=resume)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @property
    def checkpoints(self) -> Path:
        """Where checkpoints are."""
        return self.path / _CHECKPOINTS

    @property
    def incarnation(self) -> int:
        """The incarnation of this process.

        Raises:
            RunFolderError: If :meth:`next_incarnation` was not called yet.
        """
        if self._incarnation is None:
            raise RunFolderError(str(self.path), "no incarnation has been started yet")
        return self._incarnation

    @property
    def restored_from(self) -> str | None:
        """The cut that this incarnation was restored from, or None."""
        return self._restored_from

    @property
    def lineage(self) -> frozenset[str]:
        """The cuts that this incarnation descends from, as far as the journal knows them."""
        return self._lineage

    def next_incarnation(self) -> int:
        """Start a new incarnation: its number is durable when this returns, and was never used before.

        Raises:
            RunFolderError: If the counter cannot be read or written.
        """
        number = self.current_incarnation() + 1
        with self._naming("its counter cannot be written"):
            files.replace_durable(self._counter, f"{number}\n".encode())
        self._incarnation = number
        self.journal.append("started", number)
        return number

    def current_incarnation(self) -> int:
        """Return the newest incarnation that was started in this folder, by whatever process.

        Raises:
            RunFolderError: If the counter cannot be read.
        """
        with self._naming("its counter cannot be read"):
            content = files.read(self._counter)
        if not re.fullmatch(rb"[0-9]{1,12}\n", content):
            raise RunFolderError(
                str(self.path), f"its counter {_COUNTER!r} holds {content[:40]!r}, not a number"
            )
        return int(content)

    def check_incarnation(self) -> None:
        """Prove that no later incarnation has started; right before the rename that publishes.

        Raises:
            IncarnationSupersededError: If one has.
        """
        current = self.current_incarnation()
        if current != self.incarnation:
            raise IncarnationSupersededError(str(self.path), self.incarnation, current)

    def record_restored(self, restored: CutState) -> tuple[JournalRecord, ...]:
        """Note what this incarnation was restored from, and mark what others did after that cut.

        What the restore undoes is renamed aside before the first mark: a crash in between leaves no checkpoint
        that a next start could take for the newest although its steps are marked. A crash in the middle leaves
        the marks that were not made to the next restore, which makes the same ones.

        Args:
            restored: The cut as it was loaded, with the incarnation that captured it.

        Returns:
            The marks, one for each ``trained`` record that is undone.

        Raises:
            OSError: If the journal cannot be written, or a checkpoint not renamed.
            RunFolderError: If the journal cannot be read.
        """
        from quiesce.checkpoint.publish import set_undone_aside

        cut_id, step = restored.cut_id, restored.step
        self.journal.sync()
        records = read_journal(self.journal.path)
        self._restored_from = cut_id
        self._lineage = _lineage_of(records, cut_id, restored.parent_cut)
        set_undone_aside(self, cut_id, step, self._lineage)
        undone = tuple(
            record
            for record in surviving(records)
            if record.incarnation > restored.incarnation
            or (record.incarnation == restored.incarnation and record.step is not None and record.step > step)
        )
        for record in undone:
            self.journal.append(
                "rolled_back", record.incarnation, step=record.step, cut_id=cut_id, groups=record.groups
            )
        self.journal.append(
            "restored", self.incarnation, step=step, cut_id=cut_id, parent_cut=restored.parent_cut
        )
        self.journal.sync()
        return undone

    def published(self) -> list[CheckpointName]:
        """Return the names of the published checkpoints, oldest first; usable or not.

        Raises:
            OSError: If the folder cannot be read.
        """
        names = (CheckpointName.parse(entry.name) for entry in os.scandir(self.checkpoints) if entry.is_dir())
        return sorted(name for name in names if name is not None)

    def temporary(self, step: int, cut_id: str) -> Path:
        """Return where the checkpoint of a cut is written before it is published."""
        return self.checkpoints / f"step_{step}.tmp-i{self.incarnation:08d}-{cut_id}"

    def leftovers(self) -> list[Path]:
        """Return what dead incarnations, and retirements that were cut short, left under ``checkpoints``.

        Raises:
            OSError: If the folder cannot be read.
        """
        found = []
        for entry in os.scandir(self.checkpoints):
            temporary = _TEMPORARY.fullmatch(entry.name)
            if entry.name.startswith("trash-") or (
                temporary is not None and int(temporary[1]) < self.incarnation
            ):
                found.append(Path(entry.path))
        return sorted(found)

    def close(self) -> None:
        """Write out the journal and give the lock up; idempotent.

        Raises:
            OSError: If the journal cannot be written; the lock is given up all the same.
        """
        if self._closed:
            return
        self._closed = True
        try:
            self.journal.close()
        finally:
            self._unlock()

    # ---------------------------------------------------------------------------------------------- inside

    @property
    def _counter(self) -> Path:
        return self.path / _COUNTER

    def _make_durable(self) -> None:
        """Sync the folders around a new run folder: a checkpoint lasts no longer than the names that lead to it.

        Done before the counter is there, so a start that is cut short in between leaves it to the next one. Which
        of them an earlier start made nobody knows, so it is every one up to the mount point; those that this user
        may not open, or that cannot be synced, were not made by a run.
        """
        for folder in self.path.resolve().parents:
            try:
                files.fsync_folder(folder)
            except OSError as error:
                if files.reason_of(error) != "permission" and error.errno != errno.EINVAL:
                    raise
            if os.path.ismount(folder):
                break

    def _is_used(self) -> bool:
        with self._naming("cannot be read"):
            counter = self._counter
            if counter.exists() and files.read(counter).strip() != b"0":
                return True
            journal, checkpoints = self.path / _JOURNAL, self.checkpoints
            return (journal.exists() and journal.stat().st_size > 0) or (
                checkpoints.is_dir() and any(checkpoints.iterdir())
            )

    def _lock(self) -> int:
        key = str(self.path.resolve())
        with _HELD_LOCK:
            if _HELD.get(key) == os.getpid():
                raise RunFolderLockedError(str(self.path), f"this process ({os.getpid()})")
            with self._naming("cannot be written"):
                fd = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                holder = self._holder(fd)
                os.close(fd)
                if error.errno in {errno.EACCES, errno.EAGAIN}:
                    raise RunFolderLockedError(str(self.path), holder) from None
                raise RunFolderError(
                    str(self.path), f"its file system offers no locks ({error.strerror})"
                ) from error
            try:
                with self._naming("cannot be written"):
                    os.ftruncate(fd, 0)
                    os.pwrite(fd, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
            except BaseException:
                os.close(fd)
                raise
            _HELD[key] = os.getpid()
        return fd

    def _unlock(self) -> None:
        with _HELD_LOCK:
            _HELD.pop(str(self.path.resolve()), None)
            os.close(self._lock_fd)  # gives the kernel's lock up

    @staticmethod
    def _holder(fd: int) -> str:
        try:
            body = json.loads(os.pread(fd, 4096, 0))
            return f"process {int(body['pid'])} on {str(body['host'])[:100]}"
        except (OSError, ValueError, KeyError, TypeError):
            return "another process"

    @contextlib.contextmanager
    def _naming(self, problem: str) -> Iterator[None]:
        """Let an error of the operating system say which folder it is about."""
        try:
            yield
        except OSError as error:
            raise RunFolderError(str(self.path), f"{problem} ({error.strerror or error})") from error


def _lineage_of(records: Iterable[JournalRecord], cut_id: str, parent_cut: str | None) -> frozenset[str]:
    """Return a cut and the cuts before it, as far as a journal knows them."""
    parents = {
        record.cut_id: record.parent_cut
        for record in records
        if record.event in {"published", "restored"} and record.cut_id is not None
    }
    parents[cut_id] = parent_cut
    lineage: list[str] = []
    at: str | None = cut_id
    while at is not None and at not in lineage:
        lineage.append(at)
        at = parents.get(at)
    return frozenset(lineage)
