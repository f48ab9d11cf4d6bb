"""Rows in this process's memory: for tests and tiny runs.

Rule: what a cut saw is kept by copying on write. A snapshot copies nothing: it is an empty note of what each
row was before its first change after the cut, and every put and clear adds to the notes of the open
snapshots. So a snapshot costs the same however many rows there are, and rows themselves are never copied
(encoded rows are immutable bytes). Yield rule: nothing here suspends; calls hold one lock for as long as a
dictionary operation takes, and ``keys`` as long as a copy of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar

from quiesce.dataplane.base import LocalDataPlane, LocalSnapshot
from quiesce.dataplane.interface import DataPlaneStatistics
from quiesce.dataplane.rows import Buffer, merge_rows

if TYPE_CHECKING:
    from quiesce.barrier import DataPlaneCheckpointBarrier
    from quiesce.dataplane.interface import Row, TensorLibrary
    from quiesce.observers import Hub

__all__ = ["MemoryDataPlane"]


class MemoryDataPlane(LocalDataPlane):
    """A data plane in a dictionary. One process only; gone with it.

    Args:
        incarnation: The run's incarnation, from 1; the only one whose keys are taken.
        tensors: Which library's tensors ``get`` returns.
        barrier: Whose cuts ``snapshot`` takes; None takes a live exclusive cut of whatever barrier.
        hub: Where hooks go; None is the process-wide hub.
        clock: Monotonic nanoseconds.
    """

    backend: ClassVar[str] = "memory"

    def __init__(
        self,
        incarnation: int,
        *,
        tensors: TensorLibrary = "torch",
        barrier: DataPlaneCheckpointBarrier | None = None,
        hub: Hub | None = None,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        # Rows, their bytes and the notes of snapshots change only while `_changed` is held.
        self._rows: dict[str, bytes] = {}
        self._bytes = 0
        super().__init__(incarnation, tensors=tensors, barrier=barrier, hub=hub, clock=clock)

    def statistics(self) -> DataPlaneStatistics:
        """Return what it holds right now; from any thread."""
        with self._changed:
            return DataPlaneStatistics(
                backend=self.backend,
                incarnation=self.incarnation,
                rows=len(self._rows),
                num_bytes=self._bytes,
                open_snapshots=len(self._snapshots),
                pinned_rows=self._snapshots[0].rows if self._snapshots else 0,
            )

    def _put(self, rows: Sequence[tuple[str, bytes]]) -> None:
        with self._changed:
            # Merge first, so that a refused field leaves every row as it was.
            merged = []
            for text, new in rows:
                old = self._rows.get(text)
                merged.append((text, new if old is None else merge_rows(old, new, text)))
            for text, row in merged:
                self._note(text)
                self._bytes += len(row) - len(self._rows.get(text, b""))
                self._rows[text] = row

    def _get(self, texts: Sequence[str], fields: Sequence[str] | None) -> list[Row]:
        with self._changed:
            found = [self._rows.get(text) for text in texts]
        return [self._decode(text, data, fields) for text, data in zip(texts, found, strict=True)]

    def _clear(self, texts: Sequence[str]) -> int:
        cleared = 0
        with self._changed:
            for text in texts:
                if text in self._rows:
                    self._note(text)
                    self._bytes -= len(self._rows.pop(text))
                    cleared += 1
        return cleared

    def _texts(self, prefix: str) -> list[str]:
        with self._changed:
            found = list(self._rows)
        return sorted(text for text in found if text.startswith(prefix))

    def _holds(self, texts: Sequence[str]) -> list[bool]:
        with self._changed:
            return [text in self._rows for text in texts]

    def _snapshot(self, cut_id: str) -> _MemorySnapshot:
        with self._changed:
            snapshot = _MemorySnapshot(self, cut_id, len(self._rows))
            self._snapshots.append(snapshot)
        return snapshot

    def _close(self) -> None:
        with self._changed:
            self._rows.clear()
            self._bytes = 0

    def _note(self, text: str) -> None:
        """Let open snapshots remember the row as it is, unless they have an older one; before each change."""
        for snapshot in self._snapshots:
            if isinstance(snapshot, _MemorySnapshot):  # all are; a type checker does not know
                snapshot.before.setdefault(text, self._rows.get(text))


class _MemorySnapshot(LocalSnapshot):
    """Live rows, except those that changed after the cut: these are noted as they were, None for absent."""

    def __init__(self, plane: MemoryDataPlane, cut_id: str, rows: int) -> None:
        super().__init__(plane, cut_id, rows)
        self._memory = plane
        self.before: dict[str, bytes | None] = {}

    def _fetch(self, text: str) -> Buffer | None:
        plane = self._memory
        with plane._changed:  # noqa: SLF001 - same module
            if text in self.before:
                return self.before[text]
            return plane._rows.get(text)  # noqa: SLF001 - same module

    def _texts(self, prefix: str) -> list[str]:
        plane = self._memory
        with plane._changed:  # noqa: SLF001 - same module
            live = list(plane._rows)  # noqa: SLF001 - same module
            before = dict(self.before)
        found = [text for text in live if text not in before]
        found += [text for text, row in before.items() if row is not None]
        return sorted(text for text in found if text.startswith(prefix))

    def _end(self) -> None:
        # Emptied only once it is off the plane's list (see `_finish`), which is the base class's next step;
        # until then notes may still be added, and nobody reads them.
        return
