"""What became of every prompt that was read, by epoch.

For each epoch that is still open there is the number of positions read and two bitmaps over those positions:
trained and dropped. A position that is in neither has a live owner. An epoch that was read to its end and
whose every position ended is folded into running totals, so the state stays small however long the run is.

Rule: every change takes a live cut and is one await-free step, and no position ends twice. Nothing here
suspends.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quiesce.errors import AccountingError
from quiesce.observers import Hub
from quiesce.types import DROP_REASONS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from quiesce.barrier import Cut, DataPlaneCheckpointBarrier
    from quiesce.types import PromptRef

__all__ = [
    "Accounting",
    "AccountingState",
    "AccountingStatistics",
    "ClosedEpochs",
    "EpochAccount",
    "bits_set",
    "has_bit",
]


@dataclass(frozen=True, slots=True)
class EpochAccount:
    """An open epoch, frozen.

    Attributes:
        epoch: Its number.
        read: Positions read so far: 0 … read − 1.
        ended: Whether it was read to its end.
        trained: Bitmap of trained positions; bit ``p & 7`` of byte ``p >> 3``.
        dropped: Bitmap of dropped positions.
        reasons: How many were dropped, by reason.
    """

    epoch: int
    read: int
    ended: bool
    trained: bytes
    dropped: bytes
    reasons: Mapping[str, int] = field(hash=False)


@dataclass(frozen=True, slots=True)
class ClosedEpochs:
    """Totals over the epochs that are over.

    Attributes:
        epochs: How many there are; they are the epochs 0 … epochs − 1.
        read: Positions read.
        trained: Positions trained.
        dropped: Positions dropped, by reason.
    """

    epochs: int
    read: int
    trained: int
    dropped: Mapping[str, int] = field(hash=False)


@dataclass(frozen=True, slots=True)
class AccountingState:
    """The whole account at one instant.

    Attributes:
        closed: Totals over the epochs that are over.
        open: The open epochs, in order.
    """

    closed: ClosedEpochs
    open: tuple[EpochAccount, ...]

    @property
    def read(self) -> int:
        """Prompts read, along the restored lineage."""
        return self.closed.read + sum(account.read for account in self.open)

    @property
    def trained(self) -> int:
        """Prompts trained, along the restored lineage."""
        return self.closed.trained + sum(bits_set(account.trained) for account in self.open)

    @property
    def dropped(self) -> int:
        """Prompts dropped, along the restored lineage."""
        return sum(self.closed.dropped.values()) + sum(bits_set(account.dropped) for account in self.open)


@dataclass(frozen=True, slots=True)
class AccountingStatistics:
    """Running totals along the restored lineage.

    Attributes:
        read: Prompts read.
        trained: Prompts trained.
        dropped: Prompts dropped, by reason, every reason present.
    """

    read: int
    trained: int
    dropped: Mapping[str, int] = field(hash=False)


def bits_set(bitmap: bytes | bytearray) -> int:
    """Count the positions in a bitmap."""
    return int.from_bytes(bitmap, "little").bit_count()


def has_bit(bitmap: bytes | bytearray, position: int) -> bool:
    """Whether a position is in a bitmap; a position past its end is not."""
    byte = position >> 3
    return byte < len(bitmap) and bool(bitmap[byte] >> (position & 7) & 1)


class _Epoch:
    __slots__ = ("dropped", "ended", "left", "read", "reasons", "trained")

    def __init__(self) -> None:
        self.read = 0
        self.ended = False
        self.trained = bytearray()
        self.dropped = bytearray()
        self.reasons: dict[str, int] = {}
        self.left = 0  # positions read that did not end yet


class Accounting:
    """Counts every prompt from its reading to its end. A call that raises has counted nothing.

    Args:
        barrier: The barrier whose cuts prove that a change is allowed.
        hub: Where ``prompts_read`` is reported; None means the barrier's hub.
    """

    def __init__(self, barrier: DataPlaneCheckpointBarrier, *, hub: Hub | None = None) -> None:
        self._barrier = barrier
        self._hub = barrier.hub if hub is None else hub
        self._closed = ClosedEpochs(0, 0, 0, {})
        self._open: dict[int, _Epoch] = {}
        self._read = 0
        self._trained = 0
        self._dropped = dict.fromkeys(DROP_REASONS, 0)
        self._hub.attach("accounting", self)

    def read(self, cut: Cut, refs: Sequence[PromptRef]) -> None:
        """Count prompts as read; in the slot in which they get their first owner.

        Raises:
            AccountingError: If a position does not follow the one before it, or its epoch is over.
        """
        cut.check(self._barrier)
        ahead: dict[int, int] = {}  # epoch -> positions read, once these are
        for ref in refs:
            account = self._open.get(ref.epoch)
            if account is None and ref.epoch not in ahead:
                expected = max((*self._open, *ahead), default=self._closed.epochs - 1) + 1
                if ref.epoch != expected:
                    raise AccountingError(ref.epoch, ref.position, f"read, but the next epoch is {expected}")
            if account is not None and account.ended:
                raise AccountingError(ref.epoch, ref.position, "read, but the epoch has ended")
            expected = ahead.get(ref.epoch, 0 if account is None else account.read)
            if ref.position != expected:
                raise AccountingError(ref.epoch, ref.position, f"read, but the next position is {expected}")
            ahead[ref.epoch] = expected + 1
        for number, read in ahead.items():
            epoch = self._open.setdefault(number, _Epoch())
            epoch.left += read - epoch.read
            epoch.read = read
            for bitmap in (epoch.trained, epoch.dropped):
                bitmap.extend(bytes(-(-read // 8) - len(bitmap)))
        self._read += len(refs)
        if refs and self._hub.prompts_read:
            self._hub.fire("prompts_read", len(refs))

    def end_epoch(self, cut: Cut, epoch: int) -> None:
        """Note that an epoch was read to its end; an epoch without a position counts too.

        Raises:
            AccountingError: If it ended before, or is not the next one.
        """
        cut.check(self._barrier)
        account = self._open.get(epoch)
        if account is None:
            expected = max(self._open, default=self._closed.epochs - 1) + 1
            if epoch != expected:
                raise AccountingError(epoch, 0, f"ended, but the next epoch is {expected}")
            account = self._open[epoch] = _Epoch()
        if account.ended:
            raise AccountingError(epoch, account.read, "the epoch ended twice")
        account.ended = True
        self._fold()

    def trained(self, cut: Cut, refs: Sequence[PromptRef]) -> None:
        """Count prompts as trained.

        Raises:
            AccountingError: If one was never read, or ended before.
        """
        cut.check(self._barrier)
        for epoch, position in self._ending(refs, "trained"):
            epoch.trained[position >> 3] |= 1 << (position & 7)
            epoch.left -= 1
            self._trained += 1
        self._fold()

    def dropped(self, cut: Cut, refs: Sequence[PromptRef], reason: str) -> None:
        """Count prompts as dropped.

        Args:
            cut: A live cut.
            refs: The prompts.
            reason: One of :data:`quiesce.types.DROP_REASONS`.

        Raises:
            AccountingError: If one was never read, or ended before.
            ValueError: If the reason is unknown.
        """
        cut.check(self._barrier)
        if reason not in self._dropped:
            message = f"unknown drop reason {reason!r}; known are {', '.join(DROP_REASONS)}"
            raise ValueError(message)
        for epoch, position in self._ending(refs, "dropped"):
            epoch.dropped[position >> 3] |= 1 << (position & 7)
            epoch.left -= 1
            epoch.reasons[reason] = epoch.reasons.get(reason, 0) + 1
            self._dropped[reason] += 1
        self._fold()

    def ended(self, ref: PromptRef) -> bool:
        """Whether a prompt was trained or dropped."""
        epoch = self._open.get(ref.epoch)
        if epoch is None:
            return ref.epoch < self._closed.epochs
        return has_bit(epoch.trained, ref.position) or has_bit(epoch.dropped, ref.position)

    def capture(self) -> AccountingState:
        """Return the whole account; costs one copy of the open epochs' bitmaps."""
        return AccountingState(
            closed=self._closed,
            open=tuple(
                EpochAccount(
                    number,
                    epoch.read,
                    epoch.ended,
                    bytes(epoch.trained),
                    bytes(epoch.dropped),
                    dict(epoch.reasons),
                )
                for number, epoch in self._open.items()
            ),
        )

    def restore(self, cut: Cut, state: AccountingState) -> None:
        """Take over the account of a checkpoint.

        Raises:
            AccountingError: If something was counted here already.
        """
        cut.check(self._barrier)
        if self._read or self._open or self._closed.epochs:
            raise AccountingError(0, 0, "restored over an account that is not empty")
        self._closed = state.closed
        for account in state.open:
            epoch = self._open[account.epoch] = _Epoch()
            epoch.read, epoch.ended = account.read, account.ended
            epoch.trained, epoch.dropped = bytearray(account.trained), bytearray(account.dropped)
            epoch.reasons = dict(account.reasons)
            epoch.left = account.read - bits_set(account.trained) - bits_set(account.dropped)
        self._read, self._trained = state.read, state.trained
        for reasons in (state.closed.dropped, *(account.reasons for account in state.open)):
            for reason, count in reasons.items():
                self._dropped[reason] = self._dropped.get(reason, 0) + count

    def statistics(self) -> AccountingStatistics:
        """Return the running totals; may be called from any thread."""
        return AccountingStatistics(self._read, self._trained, dict(self._dropped))

    def _ending(self, refs: Sequence[PromptRef], how: str) -> list[tuple[_Epoch, int]]:
        """Refuse what cannot end, before anything is counted."""
        found: dict[tuple[_Epoch, int], None] = {}
        for ref in refs:
            epoch = self._open.get(ref.epoch)
            if epoch is None or ref.position >= epoch.read:
                problem = "its epoch is over" if ref.epoch < self._closed.epochs else "it was never read"
                raise AccountingError(ref.epoch, ref.position, f"{how}, but {problem}")
            for name, bitmap in (("trained", epoch.trained), ("dropped", epoch.dropped)):
                if has_bit(bitmap, ref.position):
                    raise AccountingError(ref.epoch, ref.position, f"{how}, but it was {name} before")
            if (epoch, ref.position) in found:
                raise AccountingError(ref.epoch, ref.position, f"{how} twice in one call")
            found[epoch, ref.position] = None
        return list(found)

    def _fold(self) -> None:
        """Fold epochs that are over into the totals, in order."""
        while self._open:
            number = next(iter(self._open))
            epoch = self._open[number]
            if not epoch.ended or epoch.left:
                return
            dropped = dict(self._closed.dropped)
            for reason, count in epoch.reasons.items():
                dropped[reason] = dropped.get(reason, 0) + count
            self._closed = ClosedEpochs(
                self._closed.epochs + 1,
                self._closed.read + epoch.read,
                self._closed.trained + bits_set(epoch.trained),
                dropped,
            )
            del self._open[number]
