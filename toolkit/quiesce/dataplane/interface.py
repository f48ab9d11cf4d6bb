"""What a data plane promises: where the rows of prompt groups live, and how a cut pins them.

Rule: a row is immutable once put. A put may add fields to a row; it never overwrites one, not even with the
same bytes (a second put of a field means that two callers work on one attempt, and a retry has an attempt of
its own). A put is all or nothing: no cut sees half a row, and a put that raises has changed nothing. A
snapshot is cheap inside the window (its cost does not grow with the rows) and is written outside it, while
puts and clears go on without changing what is written. Yield rule: nothing here suspends. ``put``, ``get``,
``clear``, ``keys``, ``Snapshot.write`` and ``close`` may block on a disk and belong in a thread; ``missing``
and ``snapshot`` take microseconds and are called on the event loop, inside a section.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    import torch

    from quiesce.barrier import CheckpointCut
    from quiesce.types import RowKey

    Tensor: TypeAlias = torch.Tensor | np.ndarray[Any, Any]
    Row: TypeAlias = Mapping[str, Tensor]

__all__ = ["DataPlane", "DataPlaneStatistics", "FileDigest", "RowsWritten", "Snapshot", "TensorLibrary"]

TensorLibrary = Literal["torch", "numpy"]
"""Which library's arrays ``get`` returns; ``put`` takes both."""


@dataclass(frozen=True, slots=True)
class FileDigest:
    """One written and fsynced file.

    Attributes:
        name: Its name within the folder.
        size: Bytes.
        sha256: Lower-case hex digest, computed from the bytes on their way to the file.
    """

    name: str
    size: int
    sha256: str


@dataclass(frozen=True, slots=True)
class RowsWritten:
    """What :meth:`Snapshot.write` wrote.

    Attributes:
        rows: Rows in all files.
        num_bytes: Bytes of all files.
        files: One digest per shard, in name order; there is always at least one, which carries the metadata.
    """

    rows: int
    num_bytes: int
    files: tuple[FileDigest, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """The shards' file names, in order."""
        return tuple(file.name for file in self.files)


@dataclass(frozen=True, slots=True)
class DataPlaneStatistics:
    """What a data plane holds right now; may be read from any thread, and reads zero once closed.

    Attributes:
        backend: ``lmdb``, ``memory``, …
        incarnation: Whose keys it takes.
        rows: Live rows.
        num_bytes: Bytes of the live rows, encoded.
        open_snapshots: Snapshots of this process that are not released.
        pinned_rows: Rows that the oldest of them sees.
        deferred_clears: Cleared rows that wait for a release (backends without snapshots of their own).
        blocked_writers: Threads of this process that wait for room.
        map_used_ratio: Live pages as a share of the map, 0 to 1; 0 for backends without a fixed size.
        map_high_water_ratio: The most pages that were ever in use (live, freed or pinned), as a share of the
            map.
    """

    backend: str
    incarnation: int
    rows: int = 0
    num_bytes: int = 0
    open_snapshots: int = 0
    pinned_rows: int = 0
    deferred_clears: int = 0
    blocked_writers: int = 0
    map_used_ratio: float = 0.0
    map_high_water_ratio: float = 0.0


class Snapshot(Protocol):
    """The rows as they were at one cut, until it is released. Any thread may use it."""

    @property
    def cut_id(self) -> str:
        """The cut that it belongs to."""

    @property
    def rows(self) -> int:
        """How many rows it sees."""

    @property
    def released(self) -> bool:
        """Whether :meth:`release` was called."""

    def keys(self, prefix: str = "") -> Iterator[RowKey]:
        """Return the keys whose encoded form starts with ``prefix``, in the order of the encoded form.

        Raises:
            SnapshotReleasedError: If it was released.
        """

    def missing(self, keys: Iterable[RowKey]) -> tuple[RowKey, ...]:
        """Return those of ``keys`` that were not there at the cut, in the given order.

        Raises:
            SnapshotReleasedError: If it was released.
            StaleIncarnationError: If a key is of another incarnation.
        """

    def write(self, directory: Path, keys: Sequence[RowKey], metadata: Mapping[str, str]) -> RowsWritten:
        """Write rows as they were at the cut to ``rows-00000.safetensors`` and so on, and fsync each file.

        Args:
            directory: An existing folder without files of these names; its own entry is not fsynced.
            keys: Which rows; a key that is listed twice is written once.
            metadata: Goes into every file's own metadata. Names that start with ``rows.`` are taken.

        Returns:
            Counts, and each file's size and digest.

        Raises:
            MissingRowError: If a row was not there at the cut. What was written by then is left in the
                folder.
            SnapshotReleasedError: If it was released, before or meanwhile.
            OSError: If the folder or a file cannot be written, with the file named.
        """

    def release(self) -> None:
        """Let go of the rows; a running write stops at its next row. Idempotent; any thread; never waits."""


class DataPlane(Protocol):
    """Where rows live. Thread-safe, except as a backend says."""

    @property
    def incarnation(self) -> int:
        """The only incarnation whose keys are taken."""

    @property
    def holds_instant(self) -> bool:
        """Whether a snapshot can be written after the window. If not, it has to be written inside."""

    def put(self, rows: Mapping[RowKey, Row]) -> None:
        """Put rows, or add fields to rows, in one step that no cut can see half of. Blocks.

        Args:
            rows: Fields by name, each a tensor or array of any dense dtype and shape, on any device. The
                bytes are copied, so a view of a larger tensor costs what the view holds and later changes to
                it do not matter.

        Raises:
            RowExistsError: If a row has one of the fields already, whatever its value.
            RowFormatError: If a row or field cannot be stored.
            StaleIncarnationError: If a key is of another incarnation.
            MapFullError: If there was no room, also not within the deadline for which a pinned snapshot is
                waited for.
        """

    def get(self, keys: Sequence[RowKey], fields: Sequence[str] | None = None) -> list[Row]:
        """Return rows in the order of ``keys``, with the given fields or all, as tensors of their own.

        Raises:
            MissingRowError: If a row is not there.
            MissingFieldError: If a row has no such field.
            StaleIncarnationError: If a key is of another incarnation.
        """

    def clear(self, keys: Iterable[RowKey]) -> int:
        """Delete rows and return how many there were; absent rows are passed over.

        Raises:
            StaleIncarnationError: If a key is of another incarnation.
        """

    def keys(self, prefix: str = "") -> list[RowKey]:
        """Return the keys whose encoded form starts with ``prefix``, in the order of the encoded form."""

    def missing(self, keys: Iterable[RowKey]) -> tuple[RowKey, ...]:
        """Return those of ``keys`` that are not there, in the given order; quick enough for a slot.

        Raises:
            StaleIncarnationError: If a key is of another incarnation.
        """

    def snapshot(self, cut: CheckpointCut) -> Snapshot:
        """Pin the rows as they are now, whatever their number; called inside a checkpoint window.

        Raises:
            CutExpiredError: If the window was left.
            ForeignCutError: If the cut is another barrier's, or another thread's.
            WrongSideError: If it is a mutation slot's cut.
        """

    def close(self) -> None:
        """Release every snapshot, wait for calls that run, and refuse further ones. Idempotent."""

    def statistics(self) -> DataPlaneStatistics:
        """Return what it holds right now."""
