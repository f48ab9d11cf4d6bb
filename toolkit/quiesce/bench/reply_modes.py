"""Four ways to get rid of the chunk rows of a call that has finished, behind one gate.

==============  =============================  ==============================  ====================================
mode            the finishing call             clears                          a checkpoint
==============  =============================  ==============================  ====================================
off             permit: put                    never                           close the gate, reopen it
inline          permit: put, clear             in the call, before its reply   close the gate, reopen it
own_fence       reserve; permit: put, queue    in a thread, between pauses     pause, close the gate, wait; reopen
                                                                               it, resume
gate_permit     permit: put; then queue        in a thread, under a permit     close the gate, reopen it
==============  =============================  ==============================  ====================================

``off`` is only there to tell how long a checkpoint waits for the calls themselves. ``own_fence`` is
:mod:`quiesce.bench.own_fence`, ``gate_permit`` is :class:`~quiesce.cleanup.BackgroundCleanup` as every run uses it.

Rule: the modes have the same gate, limits and data plane, observed by nobody, and differ in nothing but what the table
says. Yield rule: every method blocks its thread; ``finish`` is all that stands between a call's last token and its reply.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from quiesce.bench import own_fence
from quiesce.bench.own_fence import OwnFenceCleanup
from quiesce.bench.reply_lines import code_lines, methods_behind
from quiesce.bench.reply_plane import ReplyPlane
from quiesce.cleanup import BackgroundCleanup
from quiesce.observers import Hub
from quiesce.snapshot_gate import Epoch, SnapshotGate
from quiesce.types import RowKey

__all__ = ["COMPARED", "MODES", "Limits", "Lines", "Mode", "lines_of"]

_TIMEOUT_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class Limits:
    """How cleanup collects calls.

    Attributes:
        batch_size: Calls that are cleared together at most.
        linger_seconds: How long it waits for further ones.
        max_pending: Calls that may wait before others are held up.
    """

    batch_size: int = 32
    linger_seconds: float = 0.01
    max_pending: int = 128


class Mode(Protocol):
    """A way to clear."""

    def finish(self, final: RowKey, obsolete: Sequence[RowKey]) -> None:
        """Put a call's final row, and do something about the rows that it makes obsolete."""
        ...

    def fence(self, epoch: Epoch) -> None:
        """Keep everybody from writing and from clearing, and wait for those who do."""
        ...

    def reopen(self, epoch: Epoch) -> None:
        """Let them go on."""
        ...

    def settle(self) -> None:
        """Clear what is left, and stop."""
        ...


class _Gated:
    """What a checkpoint does where the gate is the only fence."""

    def __init__(self, plane: ReplyPlane) -> None:
        self.plane = plane
        self.gate = SnapshotGate("0", hub=Hub())

    def fence(self, epoch: Epoch) -> None:
        self.gate.close_and_wait(epoch, _TIMEOUT_SECONDS)

    def reopen(self, epoch: Epoch) -> None:
        self.gate.reopen(epoch)

    def settle(self) -> None:
        """Nothing is left."""


class _Off(_Gated):
    def __init__(self, plane: ReplyPlane, _limits: Limits) -> None:
        super().__init__(plane)

    def finish(self, final: RowKey, obsolete: Sequence[RowKey]) -> None:
        with self.gate.permit():
            self.plane.put(final, obsolete)


class _Inline(_Gated):
    def __init__(self, plane: ReplyPlane, _limits: Limits) -> None:
        super().__init__(plane)

    def finish(self, final: RowKey, obsolete: Sequence[RowKey]) -> None:
        with self.gate.permit():
            self.plane.put(final, obsolete)
            self.plane.clear(obsolete)


class _OwnFence:
    def __init__(self, plane: ReplyPlane, limits: Limits) -> None:
        self.plane = plane
        self.gate = SnapshotGate("0", hub=Hub())
        self.cleanup = OwnFenceCleanup(
            plane.clear,
            batch_size=limits.batch_size,
            max_pending=limits.max_pending,
            wait_seconds=limits.linger_seconds,
        )

    def finish(self, final: RowKey, obsolete: Sequence[RowKey]) -> None:
        reservation = self.cleanup.reserve()
        try:
            with self.gate.permit():
                self.plane.put(final, obsolete)
                reservation.submit(obsolete)
        finally:
            reservation.close()

    def fence(self, epoch: Epoch) -> None:
        self.cleanup.pause(epoch.number)
        self.gate.close_and_wait(epoch, _TIMEOUT_SECONDS)
        self.cleanup.wait_paused(epoch.number)

    def reopen(self, epoch: Epoch) -> None:
        self.gate.reopen(epoch)
        self.cleanup.resume()

    def settle(self) -> None:
        self.cleanup.close()


class _GatePermit(_Gated):
    def __init__(self, plane: ReplyPlane, limits: Limits) -> None:
        super().__init__(plane)
        self.cleanup = BackgroundCleanup(
            self.gate,
            plane.clear,
            batch_size=limits.batch_size,
            linger_seconds=limits.linger_seconds,
            max_pending=limits.max_pending,
            hub=Hub(),
        )
        self.cleanup.start()

    def finish(self, final: RowKey, obsolete: Sequence[RowKey]) -> None:
        with self.gate.permit():
            self.plane.put(final, obsolete)
        self.cleanup.submit(obsolete)

    def settle(self) -> None:
        self.cleanup.close(_TIMEOUT_SECONDS)


MODES: Final[dict[str, Callable[[ReplyPlane, Limits], Mode]]] = {
    "off": _Off,
    "inline": _Inline,
    "own_fence": _OwnFence,
    "gate_permit": _GatePermit,
}
"""Every mode by name: makes one for a data plane."""

COMPARED: Final = ("inline", "own_fence", "gate_permit")
"""The modes that clear."""


@dataclass(frozen=True, slots=True)
class Lines:
    """Lines of code that a mode needs.

    Attributes:
        call: In the finishing call.
        checkpoint: Where a checkpoint fences and reopens.
        cleanup: The module that clears in the background.
        fence: Of these, its fence and its reservations.
        thread: Of these, what its thread does.
    """

    call: int
    checkpoint: int
    cleanup: int = 0
    fence: int = 0
    thread: int = 0

    @property
    def total(self) -> int:
        """All of them."""
        return self.call + self.checkpoint + self.cleanup


def lines_of(mode: str) -> Lines:
    """Count what one of :data:`COMPARED` needs; the gate, which all of them share, is not in it."""
    from quiesce import cleanup

    if mode == "own_fence":
        fence = (
            own_fence.Reservation,
            OwnFenceCleanup.reserve,
            OwnFenceCleanup.accept,
            OwnFenceCleanup.pause,
            OwnFenceCleanup.wait_paused,
            OwnFenceCleanup.resume,
        )
        return Lines(
            call=code_lines(_OwnFence.finish),
            checkpoint=code_lines(_OwnFence.fence, _OwnFence.reopen),
            cleanup=code_lines(own_fence),
            fence=code_lines(*fence),
            thread=code_lines(*methods_behind(OwnFenceCleanup, "_drain")),
        )
    checkpoint = code_lines(_Gated.fence, _Gated.reopen)
    if mode == "inline":
        return Lines(call=code_lines(_Inline.finish), checkpoint=checkpoint)
    return Lines(
        call=code_lines(_GatePermit.finish),
        checkpoint=checkpoint,
        cleanup=code_lines(cleanup),
        thread=code_lines(*methods_behind(BackgroundCleanup, "step")),
    )
