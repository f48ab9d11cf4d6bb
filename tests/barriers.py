"""Barriers to test, and barriers that lack one rule each, to prove that the tests would notice."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

from quiesce.barrier import BarrierStatistics, CheckpointCut, Cut, DataPlaneCheckpointBarrier, MutationCut
from quiesce.observers import Hub
from quiesce.testing import strict_hub

Barrier = DataPlaneCheckpointBarrier
Claim = Callable[[type[Barrier]], Coroutine[Any, Any, None]]
"""A check of one rule, of whatever class of barrier it is given; raises AssertionError where the rule is missing."""


def make(cls: type[Barrier] = Barrier, *, hub: Hub | None = None, **options: Any) -> Barrier:  # noqa: ANN401 - passed on
    """Return a barrier with a strict hub of its own."""
    return cls(hub=strict_hub() if hub is None else hub, **options)


def pristine(barrier: Barrier) -> bool:
    """Tell whether nobody is in a barrier and nobody waits."""
    now: BarrierStatistics = barrier.statistics()
    return (
        now.phase == "open"
        and not any(now.active.values())
        and not any(now.waiting.values())
        and now.waiting_checkpoints == 0
        and now.oldest_holder is None
        and not any(now.oldest_active_seconds.values())
        and not any(now.longest_wait_seconds.values())
    )


async def until(event: threading.Event) -> None:
    """Wait for a thread's event without holding up the loop."""
    assert await asyncio.to_thread(event.wait, 20)


async def enter_window(barrier: Barrier, drain_timeout: float | None) -> None:
    """Open and leave a window."""
    async with barrier.checkpoint(drain_timeout):
        pass


async def closed(barrier: Barrier) -> None:
    """Wait until a thread that outlived the body of its section has released it."""
    while any(barrier.statistics().active.values()):  # noqa: ASYNC110 - a thread's end is no event of the test
        await asyncio.sleep(0)


class Visitor:
    """A task that enters one section, notes it, and stays until it is told to leave.

    Args:
        order: Where it notes its name when it is in.
        name: Its name, and its task's.
        section: What to enter.
    """

    def __init__(self, order: list[str], name: str, section: Cut) -> None:
        self.name = name
        self.section = section
        self._order = order
        self._leave = asyncio.Event()
        self.task = asyncio.get_running_loop().create_task(self._visit(), name=name)

    def leave(self) -> None:
        """Let it leave its section."""
        self._leave.set()

    async def _visit(self) -> None:
        assert isinstance(self.section, MutationCut | CheckpointCut)
        async with self.section:
            self._order.append(self.name)
            await self._leave.wait()
