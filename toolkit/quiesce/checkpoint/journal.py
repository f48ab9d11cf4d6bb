"""The lineage journal: one line of JSON for whatever a run's checkpoints alone do not tell.

Rule: appending never blocks and never fails; a worker thread writes, in order. A line that could not be
written (disk full) stays queued and goes before the next ones; :meth:`Journal.sync` makes everything appended
so far durable, or raises. It is called before a checkpoint is published, so a durable checkpoint never knows
of a step that the journal lacks. Yield rule: nothing here suspends; ``sync`` and ``close`` block and belong
in a thread.

What a crash left unfinished at the end was never relied on by anybody, and is cut off when the journal is
opened: a line without its end, and, after a loss of power, whatever comes behind a place that reads as zeros
because its block never reached the disk. No record holds a zero byte, and nothing that was synced turns into
one, so all of that was appended after the last sync.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from quiesce.checkpoint import files
from quiesce.errors import RunFolderError
from quiesce.threads import DaemonExecutor

__all__ = ["EVENTS", "Journal", "JournalRecord", "read_journal", "surviving"]

EVENTS: Final = (
    "started",
    "restored",
    "trained",
    "published",
    "suspect",
    "skipped",
    "rolled_back",
    "finished",
)
"""What a record can tell.

``rolled_back`` repeats incarnation, step and groups of a ``trained`` record that a restore undid.
"""

_FIELDS: Final = ("event", "incarnation", "step", "cut_id", "parent_cut", "groups", "time")


@dataclass(frozen=True, slots=True)
class JournalRecord:
    """One line.

    Attributes:
        event: One of :data:`EVENTS`.
        incarnation: Who did it; for ``restored`` the new incarnation, for ``rolled_back`` the one that is
            undone.
        step: Trained steps after it, or None.
        cut_id: The cut that it is about, or None; for ``rolled_back`` the cut that was restored.
        parent_cut: The cut before that one in its lineage, or None.
        groups: The groups that were trained in that step.
        time: Unix time in seconds; for people only.
    """

    event: str
    incarnation: int
    step: int | None = None
    cut_id: str | None = None
    parent_cut: str | None = None
    groups: tuple[str, ...] = ()
    time: float = 0.0

    def to_line(self) -> bytes:
        """Return the record as one line."""
        body = {name: getattr(self, name) for name in _FIELDS}
        return json.dumps(body, separators=(",", ":"), allow_nan=False).encode() + b"\n"

    @classmethod
    def from_line(cls, line: bytes, where: str) -> JournalRecord:
        """Parse a line.

        Raises:
            RunFolderError: If it is not a record; ``where`` is named.
        """
        try:
            body = json.loads(line)
        except ValueError:
            raise RunFolderError(where, "this line is not JSON") from None
        if not isinstance(body, dict) or set(body) != set(_FIELDS):
            raise RunFolderError(where, f"this line is not an object with the fields {', '.join(_FIELDS)}")
        groups = body["groups"]
        sound = (
            body["event"] in EVENTS
            and type(body["incarnation"]) is int
            and (body["step"] is None or type(body["step"]) is int)
            and all(body[name] is None or isinstance(body[name], str) for name in ("cut_id", "parent_cut"))
            and isinstance(groups, list)
            and all(isinstance(group, str) for group in groups)
            and type(body["time"]) in {int, float}
        )
        if not sound:
            raise RunFolderError(where, "a field of this line has the wrong type")
        return cls(**{**body, "groups": tuple(groups)})


def read_journal(path: Path) -> list[JournalRecord]:
    """Read every complete line; what a crash left unfinished, which nobody relied on, is passed over.

    Raises:
        RunFolderError: If a line is not a record.
    """
    try:
        content = files.read(path)
    except FileNotFoundError:
        return []
    lines = content[: _finished(content)].splitlines()
    return [JournalRecord.from_line(line, f"{path}:{number}") for number, line in enumerate(lines, 1)]


def _finished(content: bytes) -> int:
    """Return how many bytes of a journal are complete lines in front of anything that never reached the disk."""
    written, _, _ = content.partition(b"\0")
    return written.rfind(b"\n") + 1


def surviving(records: Iterable[JournalRecord]) -> list[JournalRecord]:
    """Return the ``trained`` records that no restore undid: exactly what the present lineage has trained."""
    trained: list[JournalRecord] = []
    for record in records:
        if record.event == "trained":
            trained.append(record)
        elif record.event == "rolled_back":
            for number, known in enumerate(trained):
                if (known.incarnation, known.step, known.groups) == (
                    record.incarnation,
                    record.step,
                    record.groups,
                ):
                    del trained[number]
                    break
    return trained


class Journal:
    """An open journal; one process at a time, which holds the run folder's lock.

    Args:
        path: The file; created if it is not there.
        clock: Unix time in seconds.
    """

    def __init__(self, path: Path, *, clock: Callable[[], float] = time.time) -> None:
        self.path = path
        self._clock = clock
        self._queue: deque[bytes] = deque()
        self._io = threading.Lock()
        self._executor = DaemonExecutor("quiesce-journal", max_workers=1)
        self._closed = False
        files.before("create", path)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            content = files.read(path)
            self._size = _finished(content)
            if self._size != len(content):
                files.truncate(self._fd, path, self._size)
                # Otherwise a loss of power could bring the end back, behind or inside what is appended now.
                files.fsync_file(self._fd, path)
        except BaseException:
            os.close(self._fd)
            raise

    def append(
        self,
        event: str,
        incarnation: int,
        *,
        step: int | None = None,
        cut_id: str | None = None,
        parent_cut: str | None = None,
        groups: Sequence[str] = (),
    ) -> None:
        """Queue a record; from any thread, never blocks.

        Raises:
            ValueError: If the event is unknown.
        """
        if event not in EVENTS:
            message = f"unknown journal event {event!r}; known are {', '.join(EVENTS)}"
            raise ValueError(message)
        record = JournalRecord(event, incarnation, step, cut_id, parent_cut, tuple(groups), self._clock())
        self._queue.append(record.to_line())
        if not self._closed:
            self._executor.submit(self._drain_quietly)

    def sync(self) -> None:
        """Make everything that was appended so far durable. Blocks.

        Raises:
            OSError: If it cannot be written; it stays queued.
        """
        with self._io:
            self._drain()
            files.fsync_file(self._fd, self.path)

    def close(self) -> None:
        """Write and sync what is queued, and close the file. Blocks; idempotent.

        Raises:
            OSError: If it cannot be written.
        """
        with self._io:
            if self._closed:
                return
            self._closed = True
            self._executor.shutdown(wait=False)
            try:
                self._drain()
                files.fsync_file(self._fd, self.path)
            finally:
                os.close(self._fd)

    def _drain_quietly(self) -> None:
        try:
            with self._io:
                if not self._closed:
                    self._drain()
        except OSError:
            return  # it stays queued; the next sync, without which nothing is published, raises

    def _drain(self) -> None:
        while self._queue:
            line = self._queue[0]
            try:
                files.append(self._fd, self.path, line)
            except BaseException:
                # Part of the line may be there; a line is whole or it is not there.
                files.truncate(self._fd, self.path, self._size)
                raise
            self._size += len(line)
            self._queue.popleft()
