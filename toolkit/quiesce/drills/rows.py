"""Faults of the data plane: rows that are gone, rows that nobody owns, and seals that do not fit.

Rule: each is a mistake that a run could contain, done to the live run. Yield rule: every fault suspends.
"""

from __future__ import annotations

import functools
import json
import os
import secrets
from typing import TYPE_CHECKING, Any, Final

from quiesce.drills.drill import Drill
from quiesce.errors import DataPlaneClosedError, MissingRowError
from quiesce.types import RowKey

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from quiesce.dataplane.interface import DataPlane, RowsWritten
    from quiesce.drills.holes import Holes
    from quiesce.drills.target import DrillTarget
    from quiesce.types import BufferEntry

__all__ = ["ROWS"]

_LENGTH_BYTES: Final = 8  # of the header, before it
_OTHER: Final = "0" * 64


async def _rows_are_cleared(target: DrillTarget, holes: Holes) -> None:
    entry = await _ready_and_kept(target, holes)
    await holes.in_thread(target.dataplane.clear, entry.keys)


async def _clear_names_a_buffered_row(target: DrillTarget, holes: Holes) -> None:
    entry = await _ready_and_kept(target, holes)
    target.owners.clears.hand_over(entry.keys[:1])


async def _ready_and_kept(target: DrillTarget, holes: Holes) -> BufferEntry:
    """Pick a group whose rows may go: who wants to train it meanwhile waits, and gets them back in the end.

    A train step that finds no rows ends the run; that is no way to find out whether somebody is paged.
    """
    plane, buffer = target.dataplane, target.owners.buffer
    while True:
        entry = await holes.ready_group("rows_present")
        try:
            kept = dict(zip(entry.keys, await holes.in_thread(plane.get, entry.keys), strict=True))
        except MissingRowError:
            continue  # it was trained and cleared meanwhile
        if entry in buffer.ready():
            break
    over = holes.keep_from_training(lambda group_id: group_id == entry.group_id)

    async def put_back() -> None:
        try:
            if buffer.find(entry.group_id) is entry:
                gone = plane.missing(kept)
                await holes.in_thread(plane.put, {key: kept[key] for key in gone})
        except DataPlaneClosedError:
            pass  # the run has ended, and nobody wants them any more
        finally:
            over.set()

    holes.mend(put_back)
    return entry


async def _old_row_appears(target: DrillTarget, holes: Holes) -> None:
    def of_an_attempt(group_id: str) -> RowKey:
        return RowKey(target.dataplane.incarnation, group_id, 0, 5 + secrets.randbelow(90))

    await _left_behind(target, holes, of_an_attempt, "x")


async def _left_behind(
    target: DrillTarget, holes: Holes, key_of: Callable[[str], RowKey], field: str
) -> None:
    """Put a row of a group that has ended; again, should the run's own sweep have come by before it was seen."""
    import numpy as np

    plane = target.dataplane

    def is_over(key: RowKey) -> bool:
        return holes.fired("rows_not_orphaned") or _is_missing(plane, key)

    while not holes.fired("rows_not_orphaned"):
        ended = await holes.ended_group("rows_not_orphaned")
        key = key_of(ended.group_id)
        await holes.until(functools.partial(_is_missing, plane, key))
        await holes.in_thread(plane.put, {key: {field: np.zeros(1)}})
        holes.broken()
        await holes.until(functools.partial(is_over, key))


def _is_missing(plane: DataPlane, key: RowKey) -> bool:
    return key in plane.missing([key])


async def _evicted_rows_are_forgotten(target: DrillTarget, holes: Holes) -> None:
    owners = target.owners
    while True:
        entry = await holes.ready_group("rows_not_orphaned")
        async with owners.barrier.mutation("group_removal") as cut:
            if entry not in owners.buffer.ready():
                continue
            holes.once(owners.clears, "hand_over", lambda _hand_over, keys: tuple(keys) and None)
            owners.evict(cut, [entry.group_id])
        return


async def _write_back_comes_late(target: DrillTarget, holes: Holes) -> None:
    def of_the_step(group_id: str) -> RowKey:
        return RowKey(target.dataplane.incarnation, group_id, 0, 0)

    await _left_behind(target, holes, of_the_step, "advantages")


class _Rewriting:
    """A snapshot whose write does something to the seal."""

    def __init__(
        self,
        snapshot: Any,  # noqa: ANN401 - of whatever backend
        metadata: Callable[[Mapping[str, str]], Mapping[str, str]],
        written: Callable[[Path, RowsWritten], None],
    ) -> None:
        self._snapshot = snapshot
        self._metadata = metadata
        self._written = written

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - passed on
        return getattr(self._snapshot, name)

    def write(self, directory: Path, keys: Sequence[RowKey], metadata: Mapping[str, str]) -> RowsWritten:
        """Write the rows, with that done."""
        rows: RowsWritten = self._snapshot.write(directory, keys, self._metadata(metadata))
        self._written(directory, rows)
        return rows


async def _seal_is_of_another_ledger(target: DrillTarget, holes: Holes) -> None:
    from quiesce.checkpoint.documents import LEDGER_DIGEST_KEY

    def stale(metadata: Mapping[str, str]) -> Mapping[str, str]:
        return {**metadata, LEDGER_DIGEST_KEY: _OTHER}

    holes.once(
        target.dataplane,
        "snapshot",
        lambda snapshot, *given: _Rewriting(snapshot(*given), stale, lambda *_: None),
    )


async def _sidecar_is_tampered_with(target: DrillTarget, holes: Holes) -> None:
    def edit(directory: Path, rows: RowsWritten) -> None:
        _tamper(directory / rows.files[0].name)

    holes.once(
        target.dataplane,
        "snapshot",
        lambda snapshot, *given: _Rewriting(snapshot(*given), lambda metadata: metadata, edit),
    )


def _tamper(path: Path) -> None:
    """Write another digest over the one that a row file's header carries."""
    from quiesce.checkpoint.documents import LEDGER_DIGEST_KEY

    with path.open("r+b") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        header = file.read(length)
        digest = json.loads(header)["__metadata__"][LEDGER_DIGEST_KEY]
        file.seek(_LENGTH_BYTES + header.index(digest.encode()))
        file.write(_OTHER[: len(digest)].encode())
        file.flush()
        os.fsync(file.fileno())


ROWS = (
    Drill(
        "rows-cleared-under-the-index",
        "The rows of a finished group are cleared, and the buffer still names them.",
        "a clear that runs before ownership has ended",
        ("rows_present",),
        _rows_are_cleared,
        mentions="are missing",
    ),
    Drill(
        "clear-names-a-buffered-row",
        "The clear of an old attempt names a row of the one that is buffered.",
        "keys of a clear that are made up from the group alone",
        ("rows_present",),
        _clear_names_a_buffered_row,
        mentions="are missing",
    ),
    Drill(
        "old-attempt-leaves-a-row",
        "A row of a group that ended long ago appears, and nobody will clear it.",
        "a put of an abandoned attempt that comes through after its clear",
        ("rows_not_orphaned",),
        _old_row_appears,
        mentions="have no owner",
    ),
    Drill(
        "evicted-rows-are-forgotten",
        "A group is evicted and booked, and its rows are handed to nobody.",
        "an eviction whose clear is cancelled",
        ("rows_not_orphaned",),
        _evicted_rows_are_forgotten,
        mentions="have no owner",
    ),
    Drill(
        "write-back-without-a-cut",
        "Advantages are written back without a slot, after their step: the rows are made anew, of advantages alone.",
        "a write-back that is not awaited inside its step",
        ("rows_not_orphaned",),
        _write_back_comes_late,
        mentions="have no owner",
    ),
    Drill(
        "seal-of-another-ledger",
        "The row files of a checkpoint carry the seal of a ledger that is not its own.",
        "a data plane that caches what it was told to write beside the rows",
        ("digest_matches",),
        _seal_is_of_another_ledger,
        at_once=False,
        mentions="was written with a ledger of",
    ),
    Drill(
        "tampered-sidecar",
        "The seal in a row file is changed after it was written.",
        "a file that is edited, or a folder that is put together from two",
        ("digest_matches",),
        _sidecar_is_tampered_with,
        at_once=False,
        mentions="was written with a ledger of",
    ),
)
