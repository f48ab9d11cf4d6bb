"""Reading the seals back: what the row files of a cut say about its ledger, once they are written.

Each row file carries the digest and the count of the ledger that it was written with, so that nobody can restore the ledger
of one cut with the rows of another. The control parts are judged before they are written; what a data plane, or the disk
under it, made of the seal can only be judged after.

Rule: headers are read, never rows, so that costs the same however many rows there are. Nothing here suspends: it blocks,
and belongs in a thread.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from quiesce.checkpoint.documents import LEDGER_COUNT_KEY, LEDGER_DIGEST_KEY
from quiesce.dataplane.shards import read_metadata
from quiesce.invariants import CutFacts, LedgerSeal, Violation
from quiesce.invariants.checks import digest_matches

if TYPE_CHECKING:
    from quiesce.checkpoint.cut import CutState
    from quiesce.checkpoint.write import WrittenCut

__all__ = ["judge_written", "seals_of"]

_NO_COUNT: Final = -1


def seals_of(written: WrittenCut) -> tuple[LedgerSeal, ...]:
    """Read the seals of a written cut's row files.

    Raises:
        OSError: If a file cannot be read.
        RowCorruptError: If one is no row file.
    """
    seals = []
    for file in written.rows.files:
        metadata = read_metadata(written.folder / file.name)
        count = metadata.get(LEDGER_COUNT_KEY, "")
        number = int(count) if count.isascii() and count.isdecimal() else _NO_COUNT
        seals.append(LedgerSeal(file.name, metadata.get(LEDGER_DIGEST_KEY, ""), number))
    return tuple(seals)


def judge_written(written: WrittenCut, state: CutState) -> list[Violation]:
    """Judge whether a written cut's row files carry the seal of its ledger.

    Args:
        written: The cut in its temporary folder.
        state: The cut.

    Raises:
        OSError: If a file cannot be read.
        RowCorruptError: If one is no row file.
    """
    found = digest_matches(state, CutFacts(seals=seals_of(written)))
    if len(found) <= 1:
        return found
    # One data plane wrote them all: that is one fault, however many files show it.
    first, others = found[0], [str(violation.evidence["where"]) for violation in found[1:]]
    message = f"{first.message}; so were {len(others)} more row files"
    return [replace(first, message=message, evidence={**first.evidence, "others": others})]
