"""The auditor's own book of who owns what: one byte for each position that was read, written from events alone.

It is independent of ledger, spares and buffer: they report a move, and the shadow says whether the group was where they say
it was. A group id names its epoch and position, so the book is a byte array for each epoch; ids of any other form are kept
by name.

Rule: a move costs the same however many groups there are. Nothing here suspends.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from quiesce.accounting import has_bit

if TYPE_CHECKING:
    from quiesce.accounting import AccountingState
    from quiesce.types import BufferEntry, GroupRecord, PromptRef

__all__ = [
    "BUFFER",
    "CODES",
    "DROPPED",
    "LEDGER",
    "LOST",
    "NAMES",
    "NONE",
    "OWNED",
    "SPARES",
    "TRAINED",
    "TRAINING",
    "Shadow",
]

NONE: Final = 0
LEDGER: Final = 1
SPARES: Final = 2
BUFFER: Final = 3
TRAINING: Final = 4
TRAINED: Final = 5
DROPPED: Final = 6
LOST: Final = 7
"""Reported as at fault, and nobody's since."""

NAMES: Final = ("read", "ledger", "spares", "buffer", "training", "trained", "dropped", "lost")
"""What hooks call each of them."""

CODES: Final = {name: code for code, name in enumerate(NAMES)}
OWNED: Final = frozenset((LEDGER, SPARES, BUFFER, TRAINING))

_PREFIX: Final = 5  # of "e000-p0000000", up to the position's letter
_LENGTH: Final = 13
_MOST_AHEAD: Final = 1 << 20  # a position further ahead than this is somebody's own id, not a reading


class Shadow:
    """Who owns each group, as far as events say.

    Attributes:
        epochs: For each epoch that is not forgotten, a code for each position.
        foreign: The same for ids of another form.
        forgotten: Epochs below this one are over, every position of them ended; their bytes are gone.
        counts: How many groups have each code.
    """

    __slots__ = ("_codes", "_head", "counts", "epochs", "foreign", "forgotten")

    def __init__(self) -> None:
        self.epochs: dict[int, bytearray] = {}
        self.foreign: dict[str, int] = {}
        self.forgotten = 0
        self.counts = [0] * len(NAMES)
        # The epoch that moved last: nearly always the one that moves next.
        self._head = ""
        self._codes = bytearray()

    def move(self, group_id: str, code: int) -> int:
        """Note where a group is now; return the code that it had."""
        if group_id[:6] != self._head or len(group_id) != _LENGTH:
            return self._far(group_id, code)
        codes = self._codes
        try:
            position = int(group_id[6:])
            before = codes[position]
        except (IndexError, ValueError):
            return self._far(group_id, code)
        codes[position] = code
        counts = self.counts
        counts[before] -= 1
        counts[code] += 1
        return before

    def get(self, group_id: str) -> int:
        """Return the code of a group."""
        place = _place(group_id)
        if place is None or group_id in self.foreign:
            return self.foreign.get(group_id, NONE)
        epoch, position = place
        if epoch < self.forgotten:
            return TRAINED  # or dropped: it ended, and nobody asks how any more
        codes = self.epochs.get(epoch, b"")
        return codes[position] if position < len(codes) else NONE

    def owned(self) -> int:
        """Return how many groups have an owner."""
        return sum(self.counts[code] for code in OWNED)

    def forget(self, epoch: int) -> bool:
        """Let go of an epoch that is over if every position of it has ended and all before it are forgotten."""
        codes = self.epochs.get(epoch)
        if epoch != self.forgotten or (codes is not None and any(codes.count(code) for code in OWNED)):
            return False
        self.epochs.pop(epoch, None)
        self._head = ""
        self.forgotten = epoch + 1
        return True

    def seed(
        self,
        accounting: AccountingState,
        ledger: Iterable[GroupRecord],
        spares: Iterable[PromptRef],
        ready: Iterable[BufferEntry],
        claimed: Iterable[BufferEntry],
    ) -> list[tuple[str, int, int]]:
        """Take over what there is when the auditor begins; every later change comes from events.

        Returns:
            Groups that were found in two places: id, first code, second code.
        """
        self.epochs.clear()
        self.foreign.clear()
        self._head = ""
        self.counts = [0] * len(NAMES)
        self.forgotten = accounting.closed.epochs
        for account in accounting.open:
            codes = self.epochs[account.epoch] = bytearray(account.read)
            if any(account.trained) or any(account.dropped):
                for position in range(account.read):
                    if has_bit(account.trained, position):
                        codes[position] = TRAINED
                    elif has_bit(account.dropped, position):
                        codes[position] = DROPPED
            for code in (TRAINED, DROPPED):
                self.counts[code] += codes.count(code)
        twice = []
        for code, names in (
            (LEDGER, (record.group_id for record in ledger)),
            (SPARES, (ref.group_id for ref in spares)),
            (BUFFER, (entry.group_id for entry in ready)),
            (TRAINING, (entry.group_id for entry in claimed)),
        ):
            for name in names:
                before = self.move(name, code)
                if before != NONE:
                    twice.append((name, before, code))
        return twice

    def _far(self, group_id: str, code: int) -> int:
        """Do the same for the first of an epoch, a position past the end, or an id of another form."""
        place = _place(group_id)
        codes: bytearray | None = None
        before = NONE
        if place is not None and place[0] >= self.forgotten:
            epoch, position = place
            codes = self.epochs.setdefault(epoch, bytearray())
            if position - len(codes) > _MOST_AHEAD:
                codes = None
            else:
                if position >= len(codes):
                    codes.extend(bytes(position + 1 - len(codes)))
                before = codes[position]
                codes[position] = code
                if len(group_id) == _LENGTH:
                    self._head, self._codes = group_id[:6], codes
        elif place is not None:
            before = TRAINED
        if codes is None:
            before = self.foreign.get(group_id, before)
            self.foreign[group_id] = code
            if code in {TRAINED, DROPPED}:
                del self.foreign[
                    group_id
                ]  # ended ids of other forms are not remembered, or they would pile up
        self.counts[before] -= 1
        self.counts[code] += 1
        return before


def _place(group_id: str) -> tuple[int, int] | None:
    head, found, tail = group_id.partition("-p")
    if not found or head[:1] != "e" or not (head[1:].isdecimal() and tail.isdecimal()):
        return None
    if len(head) < _PREFIX - 1 or len(tail) < _LENGTH - _PREFIX - 1:
        return None
    return int(head[1:]), int(tail)
