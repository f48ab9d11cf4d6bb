"""Where a scenario lets others come first, and where it is looked at.

Rule: in any other loop the same code runs as well, with no choice to make. Yield rule: only :func:`pause` suspends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from quiesce.explorer.loop import ExploredLoop

__all__ = ["pause", "watch"]


async def pause(label: str = "io") -> None:
    """Wait for something outside the loop that may take any time: the network, a disk, another process.

    Under the explorer this is where other things may come first, as many as it chooses; in any other loop it
    is ``asyncio.sleep(0)``.

    Args:
        label: What is waited for, for the trace.
    """
    loop = asyncio.get_running_loop()
    if not isinstance(loop, ExploredLoop):
        await asyncio.sleep(0)
        return
    future: asyncio.Future[None] = loop.create_future()
    loop.arrive(_Arrival(label, future))
    await future


def watch(check: Callable[[], object]) -> None:
    """Call ``check`` after every step of the running schedule; what it raises fails the schedule.

    In any other loop this does nothing.
    """
    loop = asyncio.get_running_loop()
    if isinstance(loop, ExploredLoop):
        loop.watchers.append(check)


class _Arrival:
    """The end of a pause."""

    def __init__(self, label: str, future: asyncio.Future[None]) -> None:
        self.label = label
        self._future = future

    def __call__(self) -> None:
        if not self._future.done():
            self._future.set_result(None)
