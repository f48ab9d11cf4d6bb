"""Sweeping rows that nobody owns and nobody is about to clear.

Such a row is what a hole leaves behind: a clear that failed for good, or a row put for an attempt that died between its put
and its commit. It costs space, never correctness.

Rule: keys are listed first and owners are read after. A row that was listed and is owned later was owned or about to be
owned all along; a row that appears after the listing is not judged. Every row of a ledger (group, attempt) counts as owned,
because its rollout may be putting it right now. Yield rule: the two coroutines suspend; listing and comparing run in a
thread, and the owners are read in one await-free step.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from quiesce.types import BufferEntry, GroupRecord, RowKey

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from quiesce.dataplane.interface import DataPlane
    from quiesce.owners import Owners

__all__ = ["RowOwners", "orphans", "sweep_every", "sweep_orphans"]

_LOG: Final = logging.getLogger("quiesce.sweep")


@dataclass(frozen=True, slots=True)
class RowOwners:
    """Who owns rows, at one moment.

    Attributes:
        records: The ledger's records: all rows of their current attempt are theirs.
        entries: The buffer's entries, ready and claimed: the rows that they name are theirs.
        settling: Keys that are queued, in progress or given up in a cleanup, the controller's or a worker's: they explain
            themselves.
    """

    records: Collection[GroupRecord]
    entries: Collection[BufferEntry]
    settling: Collection[RowKey]


def orphans(keys: Iterable[RowKey], owners: RowOwners) -> tuple[RowKey, ...]:
    """Return those of the keys that nobody owns; pure.

    Args:
        keys: Listed before ``owners`` was read.
        owners: Who owns rows.
    """
    attempts = {(record.group_id, record.attempt) for record in owners.records}
    named = {key for entry in owners.entries for key in entry.keys}
    named.update(owners.settling)
    return tuple(key for key in keys if key not in named and (key.group_id, key.attempt) not in attempts)


async def sweep_orphans(
    dataplane: DataPlane,
    owners: Owners,
    executor: Executor,
    *,
    elsewhere: Callable[[], Iterable[RowKey]] = tuple,
) -> int:
    """Hand rows that nobody owns over to cleanup.

    A finished group's chunk rows are obsolete, and queued in the cleanup of the worker that finished it before anybody
    learns that it is finished. So they are the ledger's until then, and settling from then on.

    Args:
        dataplane: Where the rows are.
        owners: Who owns them.
        executor: Where listing and comparing run.
        elsewhere: Returns the keys that are outstanding in the workers' cleanups; called in the step that reads the owners.

    Returns:
        How many there were.
    """
    loop = asyncio.get_running_loop()
    listed = await loop.run_in_executor(executor, dataplane.keys)
    owned = RowOwners(
        owners.ledger.records(), owners.buffer.entries(), (*owners.clears.outstanding(), *elsewhere())
    )
    found = await loop.run_in_executor(executor, orphans, listed, owned)
    # What was trained and cleared since the listing has no owner either, but is not there any more.
    gone = frozenset(await loop.run_in_executor(executor, dataplane.missing, found))
    found = tuple(key for key in found if key not in gone)
    if found:
        _LOG.warning("%d rows had no owner and are cleared, the first is %s", len(found), found[0].encode())
        owners.clears.hand_over(found)
    return len(found)


async def sweep_every(
    steps: int,
    dataplane: DataPlane,
    owners: Owners,
    executor: Executor,
    *,
    elsewhere: Callable[[], Iterable[RowKey]] = tuple,
) -> None:
    """Sweep again and again until cancelled; a sweep that fails is logged, for it costs nothing but room.

    Args:
        steps: Train steps between two sweeps.
        dataplane: Where the rows are.
        owners: Who owns them.
        executor: Where listing and comparing run.
        elsewhere: See :func:`sweep_orphans`.
    """
    while True:
        await owners.steps_taken(steps)
        try:
            await sweep_orphans(dataplane, owners, executor, elsewhere=elsewhere)
        except Exception:  # noqa: BLE001 - whatever a backend raises
            _LOG.exception("a sweep for rows without an owner failed; the next one tries again")
