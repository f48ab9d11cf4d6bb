"""The auditor's own book of who owns what: one byte for each position that was read, written from events alone.

It is independent of ledger, spares and buffer: they report a move, and the shadow says whether the group was where they say
it was. A group id names its epoch and position, so the book has a page of a hundred bytes for each hundred positions; a page
is looked up by what the ids on it share, all but the last two digits, because reading a number costs more than two look-ups.
Ids of any other form are kept by name.

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
    "PAGE",
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

PAGE: Final = 100
"""Positions of one page."""

_HELD: Final = tuple(int(code in OWNED) for code in range(len(NAMES)))
_TAILS: Final = {f"{at:02d}": at for at in range(PAGE)}
_EPOCH_DIGITS: Final = 3  # at least; of "e000-p0000000"
_POSITION_DIGITS: Final = 7
_MOST_AHEAD: Final = 1 << 20  # a position further ahead than this is somebody's own id, not a reading


class Shadow:
    """Who owns each group, as far as events say.

    Attributes:
        epochs: For each epoch that is not forgotten, how many positions its pages span.
        foreign: The codes of ids of another form.
        forgotten: Epochs below this one are over, every position of them ended; their pages are gone.
    """

    __slots__ = ("_owned", "_pages", "epochs", "foreign", "forgotten")

    def __init__(self) -> None:
        self.epochs: dict[int, int] = {}
        self.foreign: dict[str, int] = {}
        self.forgotten = 0
        self._pages: dict[str, bytearray] = {}
        self._owned = 0

    def move(self, group_id: str, code: int) -> int:
        """Note where a group is now; return the code that it had."""
        try:
            page = self._pages[group_id[:-2]]
            at = _TAILS[group_id[-2:]]
        except KeyError:
            return self._far(group_id, code)
        before = page[at]
        page[at] = code
        if _HELD[before] != _HELD[code]:
            self._owned += 1 if _HELD[code] else -1
        return before

    def get(self, group_id: str) -> int:
        """Return the code of a group."""
        place = _place(group_id)
        if place is None or group_id in self.foreign:
            return self.foreign.get(group_id, NONE)
        epoch, position = place
        if epoch < self.forgotten:
            return TRAINED  # or dropped: it ended, and nobody asks how any more
        return self.page(epoch, position)[position % PAGE]

    def page(self, epoch: int, position: int) -> bytes:
        """Return the codes of the hundred positions that a position is among, by their last two digits."""
        return bytes(self._pages.get(_name(epoch, position), _BLANK))

    def owned(self) -> int:
        """Return how many groups have an owner."""
        return self._owned

    def forget(self, epoch: int) -> bool:
        """Let go of an epoch that is over if every position of it has ended and all before it are forgotten."""
        if epoch != self.forgotten:
            return False
        names = [_name(epoch, first) for first in range(0, self.epochs.get(epoch, 0), PAGE)]
        if any(code in self._pages.get(name, _BLANK) for name in names for code in OWNED):
            return False
        for name in names:
            self._pages.pop(name, None)
        self.epochs.pop(epoch, None)
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
        self._pages.clear()
        self._owned = 0
        self.forgotten = accounting.closed.epochs
        for account in accounting.open:
            self.epochs[account.epoch] = 0
            for first in range(0, account.read, PAGE):
                page = self._open(account.epoch, first)
                for position in range(first, min(first + PAGE, account.read)):
                    if has_bit(account.trained, position):
                        page[position - first] = TRAINED
                    elif has_bit(account.dropped, position):
                        page[position - first] = DROPPED
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

    def _open(self, epoch: int, position: int) -> bytearray:
        """Begin a page."""
        page = self._pages[_name(epoch, position)] = bytearray(PAGE)
        self.epochs[epoch] = max(self.epochs.get(epoch, 0), position - position % PAGE + PAGE)
        return page

    def _far(self, group_id: str, code: int) -> int:
        """Do the same for the first group of a page, and for an id of another form."""
        place = _place(group_id)
        if place is not None and place[0] >= self.forgotten:
            epoch, position = place
            if position - self.epochs.setdefault(epoch, 0) <= _MOST_AHEAD:
                self._open(epoch, position)
                return self.move(group_id, code)
        before = self.foreign.get(
            group_id, TRAINED if place is not None and place[0] < self.forgotten else NONE
        )
        if code in {TRAINED, DROPPED}:
            self.foreign.pop(
                group_id, None
            )  # ended ids of other forms are not remembered, or they would pile up
        else:
            self.foreign[group_id] = code
        self._owned += _HELD[code] - _HELD[before]
        return before


_BLANK: Final = bytes(PAGE)


def _name(epoch: int, position: int) -> str:
    """Return what the ids of a page share."""
    return f"e{epoch:03d}-p{position // PAGE:05d}"


def _place(group_id: str) -> tuple[int, int] | None:
    head, found, tail = group_id.partition("-p")
    if not found or head[:1] != "e" or not (head[1:].isdecimal() and tail.isdecimal()):
        return None
    if len(head) <= _EPOCH_DIGITS or len(tail) < _POSITION_DIGITS:
        return None
    epoch, position = int(head[1:]), int(tail)
    # Padded to a least width, and only to that: of any other spelling there could be two of one position.
    return (epoch, position) if group_id == f"e{epoch:03d}-p{position:07d}" else None
