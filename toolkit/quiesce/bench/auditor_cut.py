"""What it costs to judge a captured cut by every invariant, against the number of its groups and of their rows.

Rule: it is the check that a save runs, over a cut as a save captures it, by the processor time of this thread; nothing
that a check remembers of a cut is kept from one round to the next. Nothing here suspends.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from quiesce.bench.auditor_world import cut_of
from quiesce.bench.stats import quiet_collector
from quiesce.invariants import CutFacts, RowFacts, check_cut

__all__ = ["CutCosts", "measure_cut"]


@dataclass(frozen=True, slots=True)
class CutCosts:
    """What judging a cut took.

    Attributes:
        groups: Groups of the cut.
        rows: Rows of the cut.
        check_ns: One number a round: processor time of all checks.
        index_ns: The same for the look-up table of the rows that are there, which a save needs anyway.
    """

    groups: int
    rows: int
    check_ns: Sequence[float]
    index_ns: Sequence[float]


def measure_cut(groups: int, rows_per_group: int, rounds: int) -> CutCosts:
    """Measure the check of a cut in which everything holds, against a parent.

    Args:
        groups: Groups.
        rows_per_group: Rows of each finished group.
        rounds: Rounds.

    Raises:
        RuntimeError: If something is found in it: then something else was measured.
    """
    state, keys = cut_of(groups, rows_per_group)
    check_ns, index_ns = list[float](), list[float]()
    with quiet_collector():
        for _ in range(rounds):
            since = time.thread_time_ns()
            present = dict.fromkeys(keys)
            indexed = time.thread_time_ns()
            facts = CutFacts(rows=RowFacts(present, settling=frozenset()), parent=state, gate_window=groups)
            found = check_cut(state, facts)
            check_ns.append(time.thread_time_ns() - indexed)
            index_ns.append(indexed - since)
            if found:
                raise RuntimeError(f"the cut has what it should not: {found[0].message}")
    return CutCosts(groups, len(keys), check_ns, index_ns)
