"""The violations of a run, in its folder: ``violations.jsonl``, one line for each record and each change of one.

A reader takes the last line of each record. A line that a crash cut short is skipped by readers, and ended by the next
writer before it adds its own, so nothing that was written before or after is lost.

Rule: append, flush, fsync; the file is only ever replaced by a whole one. Blocking: called in a thread of the auditor's.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from quiesce.auditor.record import MAX_RECORDS, ViolationRecord

__all__ = ["FILE_NAME", "ViolationJournal", "read_violations"]

FILE_NAME: Final = "violations.jsonl"
MAX_BYTES: Final = 16 << 20
"""Size at which the file is rewritten with the last line of each record alone."""

_FORMAT: Final = 1


def read_violations(folder: Path) -> list[ViolationRecord]:
    """Return the records of a run folder, oldest first; none if there is no file.

    Raises:
        OSError: If the file is there and cannot be read.
    """
    try:
        text = (folder / FILE_NAME).read_bytes().decode("utf-8", errors="replace")
    except FileNotFoundError:
        return []
    found: dict[str, ViolationRecord] = {}
    for line in text.splitlines():
        record = _parse(line)
        if record is not None:
            found[record.key] = record  # a record keeps the place of its first line
    return list(found.values())


class ViolationJournal:
    """Writes records down.

    Args:
        folder: The run folder.
        max_bytes: See :data:`MAX_BYTES`.
    """

    def __init__(self, folder: Path, *, max_bytes: int = MAX_BYTES) -> None:
        self._path = folder / FILE_NAME
        self._max_bytes = max_bytes
        self._ended = False  # whether the last line is known to be whole

    def append(self, records: Iterable[dict[str, Any]]) -> None:
        """Add a line for each record, as :meth:`~quiesce.auditor.record.ViolationRecord.to_json` made it.

        Raises:
            OSError: If the file cannot be written; the next call begins a new line.
        """
        lines = [json.dumps({"v": _FORMAT, **record}, default=str) for record in records]
        if not lines:
            return
        data = ("\n".join(lines) + "\n").encode()
        with self._path.open("ab+") as file:
            size = file.seek(0, os.SEEK_END)
            if not self._ended and size:
                file.seek(size - 1)
                if file.read(1) != b"\n":
                    data = b"\n" + data
            self._ended = False
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        self._ended = True
        if size == 0:
            _sync_folder(self._path.parent)
        if size + len(data) > self._max_bytes:
            self._rewrite()

    def _rewrite(self) -> None:
        records = read_violations(self._path.parent)[-MAX_RECORDS:]
        lines = [json.dumps({"v": _FORMAT, **record.to_json()}, default=str) + "\n" for record in records]
        temporary = self._path.with_suffix(".jsonl.tmp")
        with temporary.open("wb") as file:
            file.write("".join(lines).encode())
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self._path)
        _sync_folder(self._path.parent)


def _parse(line: str) -> ViolationRecord | None:
    try:
        values = json.loads(line)
        if not isinstance(values, dict) or values.pop("v", None) != _FORMAT:
            return None
        return ViolationRecord.from_json(values)
    except (ValueError, TypeError):
        return None


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
