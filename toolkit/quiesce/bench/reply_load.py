"""Generation calls that finish at given times, in as many threads, beside checkpoints; and what they waited for.

Each thread is one of the calls that an engine runs at once: it generates (sleeps), finishes, replies, and the next call
takes its place. When generations end is drawn beforehand, and does not depend on how the calls before went: a call whose
place was still taken when it should have ended counts from when it should have (so a mode that holds calls up cannot make
its own load lighter, and the wait that it causes is in the numbers). A call that was generating in time counts from when its
thread woke up, so that a late timer is nobody's fault.

Rule: the same seed gives the same calls and the same checkpoints, whatever the mode. Yield rule: :func:`drive` blocks
until every call has been answered and everything is cleared.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from quiesce.bench.reply_plane import Account, ReplyPlane
from quiesce.snapshot_gate import Epoch
from quiesce.types import RowKey

if TYPE_CHECKING:
    from quiesce.bench.reply_modes import Mode

__all__ = ["Fence", "Load", "Outcome", "drive", "drive_at_once"]

KEYS_PER_CALL: Final = 2
WINDOW_SECONDS: Final = 0.001
"""How long everybody is kept out for the capture itself."""

_INCARNATION: Final = 1
_SPREAD: Final = 0.5  # a generation takes its mean, give or take as much of it
_START_SECONDS: Final = 0.01
_START_SECONDS_PER_THREAD: Final = 0.0001


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked of a mode.

    Attributes:
        calls_at_once: Threads.
        generation_seconds: How long a call generates on average.
        seconds: How long generations go on ending.
        checkpoints: When checkpoints are asked for, in seconds from the start.
        seed: What the times are drawn from.
    """

    calls_at_once: int
    generation_seconds: float
    seconds: float
    checkpoints: tuple[float, ...] = ()
    seed: int = 0

    @property
    def calls_per_second(self) -> float:
        """How many generations end each second, on average."""
        return self.calls_at_once / self.generation_seconds


@dataclass(frozen=True, slots=True)
class Fence:
    """One checkpoint.

    Attributes:
        drain_seconds: From asking for it until nobody writes or clears.
        closed_seconds: From asking for it until everybody may go on.
        clears: Clears that ended while it drained.
        clear_seconds: How long the longest of them took; 0 if there was none.
    """

    drain_seconds: float
    closed_seconds: float
    clears: int
    clear_seconds: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a load.

    Attributes:
        replies: Seconds from the end of each generation to its reply.
        fences: The checkpoints.
        account: What became of the keys, once everything was settled.
        took_seconds: From the start to the last reply.
    """

    replies: tuple[float, ...]
    fences: tuple[Fence, ...]
    account: Account
    took_seconds: float


def drive(make: Callable[[ReplyPlane], Mode], plane: ReplyPlane, load: Load) -> Outcome:
    """Put a load on a mode.

    Args:
        make: Makes the mode.
        plane: The data plane, fresh.
        load: The calls and the checkpoints.

    Raises:
        Exception: What a call or a checkpoint raised, the first of them.
    """
    mode = make(plane)
    fences: list[Fence] = []
    replies: list[list[float]] = [[] for _ in range(load.calls_at_once)]
    start = time.perf_counter() + _START_SECONDS + load.calls_at_once * _START_SECONDS_PER_THREAD
    work = [
        partial(_calls, mode, plane, load, number, start, replies[number])
        for number in range(load.calls_at_once)
    ]
    if load.checkpoints:
        work.append(partial(_checkpoints, mode, plane, load, start, fences))
    _run(work)
    took = time.perf_counter() - start
    mode.settle()
    return Outcome(
        replies=tuple(seconds for found in replies for seconds in found),
        fences=tuple(fences),
        account=plane.account(),
        took_seconds=took,
    )


def drive_at_once(make: Callable[[ReplyPlane], Mode], plane: ReplyPlane, calls: int, threads: int) -> Account:
    """Let many calls finish as fast as the threads get through them, and clear everything.

    Args:
        make: Makes the mode.
        plane: The data plane, fresh.
        calls: How many calls finish; a multiple of ``threads``.
        threads: How many of them at once.

    Raises:
        Exception: What a call raised, the first of them.
    """
    mode = make(plane)
    together = threading.Barrier(threads)

    def finish(number: int) -> None:
        together.wait()
        for serial in range(calls // threads):
            final, obsolete = _keys(number, serial)
            plane.stage(obsolete)
            mode.finish(final, obsolete)

    _run([partial(finish, number) for number in range(threads)])
    mode.settle()
    return plane.account()


def _calls(
    mode: Mode, plane: ReplyPlane, load: Load, number: int, start: float, replies: list[float]
) -> None:
    """Be one of the calls that run at once, one after the other."""
    draw = random.Random(f"{load.seed}-{number}")
    mean, serial = load.generation_seconds, 0
    due, end = start + draw.uniform(0, mean), start + load.seconds
    while due < end:
        final, obsolete = _keys(number, serial)
        plane.stage(obsolete)
        ended = due
        left = due - time.perf_counter()
        if left > 0:
            time.sleep(left)
            ended = time.perf_counter()
        mode.finish(final, obsolete)
        replies.append(time.perf_counter() - ended)
        serial += 1
        due += mean * draw.uniform(1 - _SPREAD, 1 + _SPREAD)


def _checkpoints(mode: Mode, plane: ReplyPlane, load: Load, start: float, fences: list[Fence]) -> None:
    for number, at in enumerate(load.checkpoints, 1):
        time.sleep(max(0.0, start + at - time.perf_counter()))
        epoch = Epoch(_INCARNATION, number)
        asked = time.perf_counter()
        mode.fence(epoch)
        fenced = time.perf_counter()
        try:
            with plane.window():
                time.sleep(WINDOW_SECONDS)
        finally:
            mode.reopen(epoch)
        waited = plane.ended_between(asked, fenced)
        fences.append(
            Fence(fenced - asked, time.perf_counter() - asked, len(waited), max(waited, default=0.0))
        )


def _keys(number: int, serial: int) -> tuple[RowKey, Sequence[RowKey]]:
    """Return a call's final row and its chunk rows."""
    group = f"call-{number}-{serial}"
    chunks = [RowKey(_INCARNATION, group, 0, 0, sequence) for sequence in range(KEYS_PER_CALL)]
    return RowKey(_INCARNATION, group, 0, 0), chunks


def _run(work: Sequence[Callable[[], None]]) -> None:
    """Run each in a thread of its own, and raise the first error."""
    errors: list[BaseException] = []

    def guarded(one: Callable[[], None]) -> None:
        try:
            one()
        except BaseException as error:  # noqa: BLE001 - raised by the thread that waits
            errors.append(error)

    threads = [
        threading.Thread(target=guarded, args=(one,), name=f"quiesce-bench-reply-{number}", daemon=True)
        for number, one in enumerate(work)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
