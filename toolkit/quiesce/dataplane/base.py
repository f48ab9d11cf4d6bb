"""What every data plane on this machine has in common: whose keys it takes, who may use it, what it reports.

Rule: a backend only moves bytes. Checking keys, processes and cuts, encoding rows, counting users of a
snapshot and firing hooks happen here, once, so that backends cannot differ in them. Yield rule: nothing here
suspends; see the interface for what blocks.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Final, Self

from quiesce.dataplane.interface import RowsWritten
from quiesce.dataplane.rows import Buffer, check_byte_order, decode_row, encode_row
from quiesce.dataplane.shards import write_shards
from quiesce.errors import (
    DataPlaneClosedError,
    ForkedDataPlaneError,
    MissingRowError,
    RowFormatError,
    RowKeyError,
    SnapshotReleasedError,
    StaleIncarnationError,
)
from quiesce.observers import Hub, default_hub
from quiesce.types import RowKey

if TYPE_CHECKING:
    from quiesce.barrier import CheckpointCut, DataPlaneCheckpointBarrier
    from quiesce.dataplane.interface import DataPlaneStatistics, Row, TensorLibrary

__all__ = ["LocalDataPlane", "LocalSnapshot"]

_REMEMBERED_GROUPS: Final = 4096
_MOST_NUMBERS: Final = 1_000_000


class _Operation:
    """Reports one call of the data plane; ``rows`` may be corrected before it ends."""

    __slots__ = ("_name", "_plane", "_started", "rows")

    def __init__(self, plane: LocalDataPlane, name: str, rows: int) -> None:
        self._plane = plane
        self._name = name
        self.rows = rows

    def __enter__(self) -> Self:
        self._started = self._plane._clock()  # noqa: SLF001 - same module
        return self

    def __exit__(self, exc_type: object, exc: object, traceback: object) -> None:
        plane = self._plane
        if plane.hub.dataplane_operated:
            outcome = "completed" if exc_type is None else "failed"
            ns = plane._clock() - self._started  # noqa: SLF001 - same module
            plane.hub.fire("dataplane_operated", self._name, ns, self.rows, outcome)


class LocalDataPlane(ABC):
    """A data plane whose rows this process can read without a message to another.

    Args:
        incarnation: The run's incarnation, from 1; the only one whose keys are taken.
        tensors: Which library's tensors ``get`` returns.
        barrier: Whose cuts ``snapshot`` takes; None takes a live exclusive cut of whatever barrier.
        hub: Where hooks go; None is the process-wide hub.
        clock: Monotonic nanoseconds.
    """

    holds_instant: ClassVar[bool] = True
    backend: ClassVar[str]

    def __init__(
        self,
        incarnation: int,
        *,
        tensors: TensorLibrary = "torch",
        barrier: DataPlaneCheckpointBarrier | None = None,
        hub: Hub | None = None,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        if incarnation < 1:
            raise ValueError(f"an incarnation is counted from 1, not {incarnation}")
        if tensors not in {"torch", "numpy"}:
            raise ValueError(f"tensors are 'torch' or 'numpy', not {tensors!r}")
        check_byte_order()
        self.incarnation = incarnation
        self.hub = default_hub() if hub is None else hub
        self._tensors: TensorLibrary = tensors
        self._barrier = barrier
        self._clock = clock
        self._pid = os.getpid()
        # Guards the counters and the set of snapshots, never held over I/O. Notified when a user leaves, a
        # snapshot ends or the plane closes.
        self._changed = threading.Condition(threading.Lock())
        self._users = 0
        self._closed = False
        self._good_groups: set[str] = set()
        self._snapshots: list[LocalSnapshot] = []  # oldest first
        self.hub.attach("dataplane", self)

    def __repr__(self) -> str:
        """Name backend and incarnation."""
        return f"<{self.backend} data plane of incarnation {self.incarnation}>"

    # -- the interface

    def put(self, rows: Mapping[RowKey, Row]) -> None:
        """See :meth:`quiesce.dataplane.interface.DataPlane.put`."""
        with self._operation("put", len(rows)), self._using():
            encoded = []
            for key, row in rows.items():
                text = self._own(key, new=True)
                encoded.append((text, encode_row(row, text)))
            if encoded:
                self._put(encoded)

    def get(self, keys: Sequence[RowKey], fields: Sequence[str] | None = None) -> list[Row]:
        """See :meth:`quiesce.dataplane.interface.DataPlane.get`."""
        with self._operation("get", len(keys)), self._using():
            return self._get([self._own(key) for key in keys], fields)

    def clear(self, keys: Iterable[RowKey]) -> int:
        """See :meth:`quiesce.dataplane.interface.DataPlane.clear`."""
        with self._operation("clear", 0) as operation, self._using():
            texts = list(dict.fromkeys(self._own(key) for key in keys))
            operation.rows = len(texts)
            return self._clear(texts) if texts else 0

    def keys(self, prefix: str = "") -> list[RowKey]:
        """See :meth:`quiesce.dataplane.interface.DataPlane.keys`."""
        with self._operation("keys", 0) as operation, self._using():
            found = [RowKey.decode(text) for text in self._texts(prefix)]
            operation.rows = len(found)
            return found

    def missing(self, keys: Iterable[RowKey]) -> tuple[RowKey, ...]:
        """See :meth:`quiesce.dataplane.interface.DataPlane.missing`."""
        with self._using():
            named = [(key, self._own(key)) for key in keys]
            there = self._holds([text for _, text in named])
            return tuple(key for (key, _), held in zip(named, there, strict=True) if not held)

    def snapshot(self, cut: CheckpointCut) -> LocalSnapshot:
        """See :meth:`quiesce.dataplane.interface.DataPlane.snapshot`."""
        cut.check(cut.barrier if self._barrier is None else self._barrier, "checkpoint", changes=False)
        taken: LocalSnapshot | None = None
        try:
            with self._operation("snapshot", 0) as operation, self._using():
                taken = self._snapshot(cut.window_id)
                operation.rows = taken.rows
        except BaseException:  # a strict observer: the caller gets no handle, so nobody else could release it
            if taken is not None:
                taken.release()
            raise
        return taken

    def close(self) -> None:
        """See :meth:`quiesce.dataplane.interface.DataPlane.close`."""
        self._check_process()
        with self._changed:
            if self._closed:
                return
            self._closed = True
            snapshots = tuple(self._snapshots)
            self._changed.notify_all()
        for snapshot in snapshots:
            snapshot.release()
        with self._changed:
            self._changed.wait_for(lambda: not self._users and not self._snapshots)
        self._close()

    @abstractmethod
    def statistics(self) -> DataPlaneStatistics:
        """See :meth:`quiesce.dataplane.interface.DataPlane.statistics`."""

    # -- what a backend does; every text is an encoded key

    @abstractmethod
    def _put(self, rows: Sequence[tuple[str, bytes]]) -> None: ...

    @abstractmethod
    def _get(self, texts: Sequence[str], fields: Sequence[str] | None) -> list[Row]: ...

    @abstractmethod
    def _clear(self, texts: Sequence[str]) -> int: ...

    @abstractmethod
    def _texts(self, prefix: str) -> list[str]: ...

    @abstractmethod
    def _holds(self, texts: Sequence[str]) -> list[bool]: ...

    @abstractmethod
    def _snapshot(self, cut_id: str) -> LocalSnapshot:
        """Pin what is there; the snapshot is in ``_snapshots`` when this returns."""

    @abstractmethod
    def _close(self) -> None: ...

    # -- helpers

    def _operation(self, name: str, rows: int) -> _Operation:
        return _Operation(self, name, rows)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise ForkedDataPlaneError(repr(self), self._pid, os.getpid())

    @contextlib.contextmanager
    def _using(self) -> Iterator[None]:
        """Keep the plane open while a call runs in it."""
        self._check_process()
        with self._changed:
            if self._closed:
                raise DataPlaneClosedError(repr(self))
            self._users += 1
        try:
            yield
        finally:
            with self._changed:
                self._users -= 1
                if self._closed:
                    self._changed.notify_all()

    def _own(self, key: RowKey, *, new: bool = False) -> str:
        """Return the encoded key, once its incarnation (and, if new, that it can be read back) is checked."""
        text = key.encode()
        if key.incarnation != self.incarnation:
            raise StaleIncarnationError(text, self.incarnation)
        if new and not (
            key.group_id in self._good_groups
            and 0 <= key.attempt < _MOST_NUMBERS
            and 0 <= key.generation < _MOST_NUMBERS
            and (key.sequence is None or 0 <= key.sequence < _MOST_NUMBERS)
        ):
            self._check_readable(key, text)
        return text

    def _check_readable(self, key: RowKey, text: str) -> None:
        """Check that the key can be read back; once per group, as parsing costs as much as encoding a row."""
        try:
            RowKey.decode(text)
        except RowKeyError as error:
            raise RowFormatError(text, str(error)) from None
        if len(self._good_groups) >= _REMEMBERED_GROUPS:
            self._good_groups.clear()
        self._good_groups.add(key.group_id)

    def _decode(self, text: str, data: Buffer | None, fields: Sequence[str] | None) -> Row:
        if data is None:
            raise MissingRowError(text, repr(self))
        return decode_row(data, self._tensors, fields, text)


class LocalSnapshot(ABC):
    """The rows of a local data plane as they were at a cut.

    Args:
        plane: Whose rows.
        cut_id: The cut.
        rows: How many rows it sees.
    """

    def __init__(self, plane: LocalDataPlane, cut_id: str, rows: int) -> None:
        self.cut_id = cut_id
        self.rows = rows
        self._plane = plane
        self._lock = threading.Lock()
        self._users = 0
        self._released = False

    def __repr__(self) -> str:
        """Name the cut and the state."""
        return f"<snapshot of cut {self.cut_id}, {self.rows} rows{', released' if self._released else ''}>"

    @property
    def released(self) -> bool:
        """Whether :meth:`release` was called."""
        return self._released

    def keys(self, prefix: str = "") -> Iterator[RowKey]:
        """See :meth:`quiesce.dataplane.interface.Snapshot.keys`."""
        with self._using():
            found = self._texts(prefix)
        return map(RowKey.decode, found)

    def missing(self, keys: Iterable[RowKey]) -> tuple[RowKey, ...]:
        """See :meth:`quiesce.dataplane.interface.Snapshot.missing`."""
        with self._using():
            named = [(key, self._plane._own(key)) for key in keys]  # noqa: SLF001 - same module
            return tuple(key for key, text in named if self._fetch(text) is None)

    def write(self, directory: Path, keys: Sequence[RowKey], metadata: Mapping[str, str]) -> RowsWritten:
        """See :meth:`quiesce.dataplane.interface.Snapshot.write`."""
        with self._plane._operation("write", len(keys)) as operation, self._using():  # noqa: SLF001 - same module
            texts = list(dict.fromkeys(self._plane._own(key) for key in keys))  # noqa: SLF001 - same module
            written = write_shards(directory, self._encoded(texts), metadata)
            operation.rows = written.rows
            return written

    def release(self) -> None:
        """See :meth:`quiesce.dataplane.interface.Snapshot.release`."""
        with self._lock:
            if self._released:
                return
            self._released = True
            unused = not self._users
        if unused:
            self._finish()

    @abstractmethod
    def _fetch(self, text: str) -> Buffer | None:
        """Return the encoded row as it was at the cut; its bytes hold still inside ``_using``."""

    @abstractmethod
    def _texts(self, prefix: str) -> list[str]: ...

    @abstractmethod
    def _end(self) -> None:
        """Let go of the rows."""

    def _encoded(self, texts: Iterable[str]) -> Iterator[tuple[str, Buffer]]:
        for text in texts:
            if self._released:  # somebody gave up on this cut: stop here, not at the end of a long write
                raise SnapshotReleasedError(self.cut_id)
            data = self._fetch(text)
            if data is None:
                raise MissingRowError(text, f"the snapshot of cut {self.cut_id}")
            yield text, data

    @contextlib.contextmanager
    def _using(self) -> Iterator[None]:
        """Keep the rows while a call uses them: a release takes effect when the last user leaves."""
        self._plane._check_process()  # noqa: SLF001 - same module
        with self._lock:
            if self._released:
                raise SnapshotReleasedError(self.cut_id)
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                last = self._released and not self._users
            if last:
                self._finish()

    def _finish(self) -> None:
        plane = self._plane
        if os.getpid() != plane._pid:  # noqa: SLF001 - same module
            return  # a forked child has a copy of the handle, but not of what it pins
        try:
            self._end()
        finally:
            with plane._changed:  # noqa: SLF001 - same module
                plane._snapshots.remove(self)  # noqa: SLF001 - same module
                plane._changed.notify_all()  # noqa: SLF001 - same module
