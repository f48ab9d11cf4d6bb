"""Which staged rows count: what a generation call had put when a checkpoint was taken, and can go on from.

While a call generates, it puts chunk rows of its (group, attempt); at its end it puts one final row, after which
the chunks are obsolete and wait for their clear. So a store may hold, of one generation, any of these:

=================================  ==============================================
rows                               count
=================================  ==============================================
the final one, with or without     the final one: the generation is finished
chunks beside it
chunks 0 … n without a gap         all of them
chunks with a gap, or without the  those before the first gap, if any: what comes
first                              after it cannot be put into its place
none                               none: the generation begins anew
=================================  ==============================================

Rule: the ledger's exact attempt decides; rows of any other attempt, or of a group that the ledger does not hold,
are nobody's. Absent rows are never an error. The functions are pure, and nothing here suspends.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quiesce.types import GroupRecord, RowKey

__all__ = ["by_group", "staged_keys", "usable"]


def usable(keys: Iterable[RowKey]) -> dict[tuple[str, int], dict[int, tuple[RowKey, ...]]]:
    """Return the rows that a call can go on from.

    Args:
        keys: Rows that are there, of one incarnation, in any order; a key may come twice.

    Returns:
        For each (group, attempt), by generation: its final row alone, or its longest prefix of chunks without a gap, in
        their order. What has no usable row is left out.
    """
    found: dict[tuple[str, int], dict[int, dict[int | None, RowKey]]] = defaultdict(lambda: defaultdict(dict))
    for key in keys:
        found[key.group_id, key.attempt][key.generation][key.sequence] = key
    kept: dict[tuple[str, int], dict[int, tuple[RowKey, ...]]] = {}
    for owner, generations in found.items():
        for generation in sorted(generations):
            rows = _usable(generations[generation])
            if rows:
                kept.setdefault(owner, {})[generation] = rows
    return kept


def staged_keys(snapshot_keys: Iterable[RowKey], ledger: Iterable[GroupRecord]) -> tuple[RowKey, ...]:
    """Return the usable rows of a ledger's groups, in the order of their encoded form.

    Args:
        snapshot_keys: All rows that are there, of one incarnation, in any order.
        ledger: The records; without the groups that the buffer owns, whose rows the index names.
    """
    attempts = {(record.group_id, record.attempt) for record in ledger}
    if not attempts:
        return ()
    theirs = [key for key in snapshot_keys if (key.group_id, key.attempt) in attempts]
    kept = (key for generations in usable(theirs).values() for rows in generations.values() for key in rows)
    return tuple(sorted(kept, key=lambda key: key.encode()))


def by_group(keys: Iterable[RowKey]) -> dict[str, tuple[RowKey, ...]]:
    """Return keys by group, in the given order."""
    found: dict[str, list[RowKey]] = defaultdict(list)
    for key in keys:
        found[key.group_id].append(key)
    return {group_id: tuple(rows) for group_id, rows in found.items()}


def _usable(rows: Mapping[int | None, RowKey]) -> tuple[RowKey, ...]:
    """Return the usable ones of a generation's rows, which are given by sequence."""
    final = rows.get(None)
    if final is not None:
        return (final,)
    prefix: list[RowKey] = []
    while (chunk := rows.get(len(prefix))) is not None:
        prefix.append(chunk)
    return tuple(prefix)
