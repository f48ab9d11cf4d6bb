"""Rows in an LMDB store: the default data plane, for one machine and several processes.

Rule: a snapshot is one read transaction, opened at the cut. Opening it takes the same few operations however
many rows there are, and what it sees stays in the file until it ends, whoever puts and clears meanwhile. So
the map is fixed and large (and sparse: only pages in use take disk), is never resized, and a full map is
back-pressure while something is pinned: the writer waits in its thread until the pin is gone. Yield rule:
nothing here suspends; ``put`` and ``clear`` block on other writers and on a full map, ``snapshot`` and
``missing`` on nothing.

Durability: none is wanted. A row is committed, visible to every process and to every later cut, before
``put`` returns, but it is not fsynced (``sync=False``; a commit costs microseconds, not the disk's
milliseconds): a run that restarts opens the empty store of its new incarnation and fills it from a checkpoint
alone. Stores lie in a folder per incarnation, ``i00000001`` and so on. Opening a new one removes the older
ones, after the new one is in place: nothing can ever read them again, a worker that outlived its run keeps
its own open files and is refused here, and rows of a dead run would otherwise take the disk that the next
checkpoint needs.

Where a map ends: LMDB needs free pages to delete, too, so puts stop a little short of the end. Pages that a
commit freed are reusable two commits later, so a full map is tried again after an empty commit before it
counts as full. A row of more than half a page takes pages side by side, so gaps are lost to it: give the map
twice what is live and pinned. The file is written, not mapped for writing: a full disk is an error of one put
and not a bus error of the process.

Processes: the controller creates the store; others attach. A store must be opened after the fork of a
process, never be carried through it (lock and reader slots stay the parent's), which is checked.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, TypeAlias, TypeVar

import lmdb

from quiesce.dataplane.base import LocalDataPlane, LocalSnapshot
from quiesce.dataplane.interface import DataPlaneStatistics
from quiesce.dataplane.rows import Buffer, merge_rows
from quiesce.errors import DataPlaneClosedError, MapFullError, StoreFailedError, StoreUsedError

if TYPE_CHECKING:
    from quiesce.barrier import DataPlaneCheckpointBarrier
    from quiesce.dataplane.interface import Row, TensorLibrary
    from quiesce.observers import Hub

__all__ = ["DEFAULT_MAP_BYTES", "LmdbDataPlane", "default_map_bytes"]

DEFAULT_MAP_BYTES: Final = 64 << 30
"""Address space that the store may grow into, where the disk is large enough."""

_MIN_MAP_BYTES: Final = 1 << 20
_MAX_READERS: Final = 1024
_FOREIGN_PIN_POLL_SECONDS: Final = 0.05  # another process's release cannot notify this one
_RESERVE_SHARE: Final = 32  # one page in so many is kept for clears and for the store's own bookkeeping
_RESERVE_PAGES: Final = 24
_TRIES_UNPINNED: Final = 2  # one for the pages freed last, one for a commit that came in between
_STORE_FILE: Final = "store.json"
_FORMAT: Final = 1
_FOLDER: Final = re.compile(r"i(\d{8,})", re.ASCII)
_BYTES: Final = b"bytes"
_COUNTER: Final = struct.Struct("<Q")

T = TypeVar("T")

_Lmdb: TypeAlias = Any  # an object of the library, which has no type information before its version 2


class _NoRoomError(Exception):
    """A transaction would leave too few free pages; inside this module only."""


def default_map_bytes(directory: Path) -> int:
    """Return the map size for a folder: 64 GiB, at most half of what its disk has free, at least 1 MiB.

    The other half is for the checkpoints that the rows go into. The file is sparse and grows only as rows are
    put.
    """
    disk = os.statvfs(directory)
    return max(_MIN_MAP_BYTES, min(DEFAULT_MAP_BYTES, disk.f_bavail * disk.f_frsize // 2))


class LmdbDataPlane(LocalDataPlane):
    """A data plane in an LMDB store.

    Args:
        directory: Where the stores of all incarnations lie; made if absent. Must be on a local disk (or in
            memory, as ``/dev/shm``), not on a network file system.
        incarnation: The run's incarnation, from 1; the only one whose keys are taken.
        attach: Open the store that another process created, instead of creating it.
        map_bytes: Size of the map, the most that live and pinned rows can take together; rows are rounded up
            to pages of 4 KiB. None means :func:`default_map_bytes`. Who attaches takes the creator's.
        full_timeout: Seconds for which a put or clear waits for a pinned snapshot to be released when the map
            is full.
        tensors: Which library's tensors ``get`` returns.
        barrier: Whose cuts ``snapshot`` takes; None takes a live exclusive cut of whatever barrier.
        hub: Where hooks go; None is the process-wide hub.
        clock: Monotonic nanoseconds.

    Raises:
        StoreUsedError: If the incarnation's store exists (without ``attach``) or does not (with it), or a
            newer incarnation's does.
        StoreFailedError: If the store cannot be opened.
    """

    backend: ClassVar[str] = "lmdb"

    def __init__(
        self,
        directory: Path,
        incarnation: int,
        *,
        attach: bool = False,
        map_bytes: int | None = None,
        full_timeout: float = 120.0,
        tensors: TensorLibrary = "torch",
        barrier: DataPlaneCheckpointBarrier | None = None,
        hub: Hub | None = None,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self.directory = directory
        self.path = directory / f"i{incarnation:08d}"
        self.full_timeout = full_timeout
        self._blocked = 0  # guarded by _changed
        self._last_pin = 0  # releases of this process, counted; guarded by _changed
        # One writer of this process at a time: the others wait here, where a waiting thread can be seen, and
        # not in LMDB.
        self._writing = threading.Lock()
        super().__init__(incarnation, tensors=tensors, barrier=barrier, hub=hub, clock=clock)
        if attach:
            self.map_bytes = self._read_store_file()
        else:
            self.map_bytes = self._make_folder(map_bytes)
        with self._failing("open"):
            self._env: _Lmdb = lmdb.open(
                str(self.path),
                map_size=self.map_bytes,
                max_dbs=2,
                max_readers=_MAX_READERS,
                sync=False,
                metasync=False,
                meminit=False,
                readahead=False,
                create=not attach,
                mode=0o600,
            )
            self._rows_db: _Lmdb = self._env.open_db(b"rows", create=not attach)
            self._meta_db: _Lmdb = self._env.open_db(b"meta", create=not attach)
            self._page_bytes: int = self._env.stat()["psize"]
            if not attach:
                with self._env.begin(write=True) as txn:
                    txn.put(_BYTES, _COUNTER.pack(0), db=self._meta_db)
        pages = self.map_bytes // self._page_bytes
        self._most_pages = pages - max(_RESERVE_PAGES, pages // _RESERVE_SHARE)
        if not attach:
            self._write_store_file()  # last: whoever attaches sees a store that is complete
            self._remove_older()

    def __repr__(self) -> str:
        """Name backend, incarnation and folder."""
        return f"<{self.backend} data plane of incarnation {self.incarnation} in {self.directory}>"

    def statistics(self) -> DataPlaneStatistics:
        """Return what it holds right now; from any thread."""
        self._check_process()
        with self._changed:
            empty = DataPlaneStatistics(self.backend, self.incarnation)
            if self._closed:
                return empty
            open_snapshots = len(self._snapshots)
            pinned = self._snapshots[0].rows if self._snapshots else 0
            blocked = self._blocked
        try:
            with self._using(), self._failing("statistics"), self._env.begin() as txn:
                stat = txn.stat(self._rows_db)
                (num_bytes,) = _COUNTER.unpack(txn.get(_BYTES, db=self._meta_db))
                high = self._env.info()["last_pgno"] + 1
        except DataPlaneClosedError:
            return empty
        pages = self.map_bytes // self._page_bytes
        return DataPlaneStatistics(
            backend=self.backend,
            incarnation=self.incarnation,
            rows=stat["entries"],
            num_bytes=num_bytes,
            open_snapshots=open_snapshots,
            pinned_rows=pinned,
            blocked_writers=blocked,
            map_used_ratio=_pages(stat) / pages,
            map_high_water_ratio=high / pages,
        )

    # -- what the base class asks for

    def _put(self, rows: Sequence[tuple[str, bytes]]) -> None:
        def work(txn: _Lmdb) -> None:
            added = 0
            for text, new in rows:
                name = text.encode()
                if txn.put(name, new, overwrite=False, db=self._rows_db):
                    added += len(new)
                    continue
                old = txn.get(name, db=self._rows_db)
                merged = merge_rows(old, new, text)
                added += len(merged) - len(old)
                txn.put(name, merged, db=self._rows_db)
            if _pages(txn.stat(self._rows_db)) > self._most_pages:
                raise _NoRoomError
            self._count(txn, added)

        self._commit("put", work)

    def _get(self, texts: Sequence[str], fields: Sequence[str] | None) -> list[Row]:
        with self._failing("get"), self._env.begin(buffers=True) as txn:
            # Decoding copies, so nothing refers to the map once the transaction is over.
            return [self._decode(text, txn.get(text.encode(), db=self._rows_db), fields) for text in texts]

    def _clear(self, texts: Sequence[str]) -> int:
        def work(txn: _Lmdb) -> int:
            cleared = freed = 0
            for text in texts:
                name = text.encode()
                old = txn.get(name, db=self._rows_db)
                if old is not None:
                    freed += len(old)
                    cleared += 1
                    txn.delete(name, db=self._rows_db)
            if cleared:
                self._count(txn, -freed)
            return cleared

        return self._commit("clear", work)

    def _texts(self, prefix: str) -> list[str]:
        with self._failing("keys"), self._env.begin() as txn:
            return _texts(txn, self._rows_db, prefix)

    def _holds(self, texts: Sequence[str]) -> list[bool]:
        with self._failing("missing"), self._env.begin(buffers=True) as txn:
            return [txn.get(text.encode(), db=self._rows_db) is not None for text in texts]

    def _snapshot(self, cut_id: str) -> _LmdbSnapshot:
        with self._failing("snapshot"):
            self._env.reader_check()  # slots of killed processes would keep what they saw for ever
            txn = self._env.begin(buffers=True)
        rows = txn.stat(self._rows_db)["entries"]
        snapshot = _LmdbSnapshot(self, cut_id, rows, txn, self._rows_db)
        with self._changed:
            self._snapshots.append(snapshot)
        return snapshot

    def _close(self) -> None:
        self._env.close()

    # -- writing, and waiting for room

    def _commit(self, op: str, work: Callable[[_Lmdb], T]) -> T:
        """Do work in one write transaction; where the map is full, wait for what is pinned and try again."""
        started = time.monotonic()
        unpinned = 0
        while True:
            with self._changed:
                released = self._last_pin
            try:
                with self._writing, self._failing(op), self._env.begin(write=True, buffers=True) as txn:
                    return work(txn)
            except (_NoRoomError, lmdb.MapFullError):
                pass
            pins = self._pins()
            waited = time.monotonic() - started
            if not pins:
                # Pages freed by the latest commit become usable only after one more, so a first refusal
                # proves nothing.
                unpinned += 1
                if unpinned > _TRIES_UNPINNED:
                    raise MapFullError(str(self.path), self.map_bytes, waited, ())
            elif waited >= self.full_timeout:
                raise MapFullError(str(self.path), self.map_bytes, waited, pins)
            else:
                unpinned = 0
                self._wait_for_release(released, self.full_timeout - waited)
            self._turn_over()

    def _wait_for_release(self, released: int, seconds: float) -> None:
        with self._changed:
            self._blocked += 1
            try:
                self._changed.wait_for(
                    lambda: self._closed or self._last_pin != released,
                    timeout=min(seconds, _FOREIGN_PIN_POLL_SECONDS),
                )
            finally:
                self._blocked -= 1
            if self._closed:
                raise DataPlaneClosedError(repr(self))

    def _turn_over(self) -> None:
        """Commit a change of nothing, which lets the store reuse the pages that the latest commit freed."""
        try:
            with self._writing, self._failing("put"), self._env.begin(write=True) as txn:
                self._count(txn, 0)
        except lmdb.MapFullError:
            pass  # not even a page for this: the caller tries its own and finds out

    def _pins(self) -> tuple[str, ...]:
        """Name what keeps old pages: this process's snapshots, and readers of other processes."""
        with self._failing("put"):
            self._env.reader_check()
            readers = str(self._env.readers())
        with self._changed:
            own = tuple(f"the snapshot of cut {snapshot.cut_id}" for snapshot in self._snapshots)
        foreign = set()
        for line in readers.splitlines()[1:]:
            pid, _, txnid = line.split()[:3]
            if txnid != "-" and int(pid) != self._pid:
                foreign.add(f"a reader of process {pid}")
        return (*own, *sorted(foreign))

    def _count(self, txn: _Lmdb, added: int) -> None:
        (num_bytes,) = _COUNTER.unpack(txn.get(_BYTES, db=self._meta_db))
        txn.put(_BYTES, _COUNTER.pack(num_bytes + added), db=self._meta_db)

    def _note_release(self) -> None:
        with self._changed:
            self._last_pin += 1
            self._changed.notify_all()

    @contextmanager
    def _failing(self, op: str) -> Iterator[None]:
        """Turn what LMDB raises into our own error; a full map is the caller's business."""
        try:
            yield
        except lmdb.MapFullError:
            raise
        except lmdb.Error as error:
            raise StoreFailedError(str(self.path), op, str(error)) from error

    # -- folders

    def _make_folder(self, map_bytes: int | None) -> int:
        self.directory.mkdir(parents=True, exist_ok=True)
        newest = max((number for number, _ in self._stores()), default=0)
        if newest > self.incarnation:
            raise StoreUsedError(
                str(self.path), f"is of incarnation {self.incarnation}, and {newest} has begun"
            )
        try:
            self.path.mkdir(mode=0o700)
        except FileExistsError:
            raise StoreUsedError(
                str(self.path), "exists, and an incarnation begins with an empty one"
            ) from None
        size = default_map_bytes(self.path) if map_bytes is None else map_bytes
        if size < _MIN_MAP_BYTES:
            raise ValueError(f"map_bytes is {size:,}; a store needs at least {_MIN_MAP_BYTES:,}")
        return size

    def _write_store_file(self) -> None:
        content = json.dumps(
            {"format": _FORMAT, "incarnation": self.incarnation, "map_bytes": self.map_bytes}
        )
        unfinished = self.path / f"{_STORE_FILE}.tmp"
        unfinished.write_text(content, encoding="ascii")
        unfinished.replace(self.path / _STORE_FILE)

    def _read_store_file(self) -> int:
        try:
            content = json.loads((self.path / _STORE_FILE).read_text(encoding="ascii"))
            known = content["format"], content["incarnation"], int(content["map_bytes"])
        except FileNotFoundError:
            raise StoreUsedError(str(self.path), "is not there to attach to, or not complete") from None
        except (ValueError, KeyError, TypeError):
            raise StoreUsedError(str(self.path), f"has a {_STORE_FILE} that cannot be read") from None
        if known[:2] != (_FORMAT, self.incarnation):
            raise StoreUsedError(str(self.path), f"is of format {known[0]}, incarnation {known[1]}")
        return known[2]

    def _stores(self) -> list[tuple[int, Path]]:
        found = []
        for path in self.directory.iterdir():
            match = _FOLDER.fullmatch(path.name)
            if match is not None:
                found.append((int(match[1]), path))
        return sorted(found)

    def _remove_older(self) -> None:
        for number, path in self._stores():
            if number < self.incarnation:
                # What cannot be removed costs disk and nothing else: no incarnation but its own ever opens
                # it.
                shutil.rmtree(path, ignore_errors=True)


class _LmdbSnapshot(LocalSnapshot):
    """A read transaction that began at the cut. LMDB allows one thread at a time in it, whichever."""

    def __init__(self, plane: LmdbDataPlane, cut_id: str, rows: int, txn: _Lmdb, rows_db: _Lmdb) -> None:
        super().__init__(plane, cut_id, rows)
        self._store = plane
        self._txn = txn
        self._rows_db = rows_db
        self._reading = threading.Lock()

    def _fetch(self, text: str) -> Buffer | None:
        with self._reading:
            found: memoryview | None = self._txn.get(text.encode(), db=self._rows_db)
            return found

    def _texts(self, prefix: str) -> list[str]:
        with self._reading:
            return _texts(self._txn, self._rows_db, prefix)

    def _end(self) -> None:
        with self._reading:
            self._txn.abort()
        self._store._note_release()  # noqa: SLF001 - same module


def _texts(txn: _Lmdb, rows_db: _Lmdb, prefix: str) -> list[str]:
    wanted = prefix.encode()
    found = []
    with txn.cursor(db=rows_db) as cursor:
        if cursor.set_range(wanted):
            for name in cursor.iternext(keys=True, values=False):
                text = bytes(name)
                if not text.startswith(wanted):
                    break
                found.append(text.decode("ascii"))
    return found


def _pages(stat: dict[str, int]) -> int:
    return stat["branch_pages"] + stat["leaf_pages"] + stat["overflow_pages"]
