"""The barrier's protocol in the shape that it had before: a condition, generator-based sections, a set of tasks.

This is what a mutation slot is measured against. It is a correct barrier (a test holds it to that), written from a
description of the protocol, in the most direct way that asyncio offers: one :class:`asyncio.Condition` guards a
flag and a count, sections are :func:`contextlib.asynccontextmanager` generators, nesting is detected by the set of
tasks that hold a section, and counters say who waited and for how long.

Rule: nothing in here is made slow on purpose; where the description leaves a choice, the cheaper one is taken.
Yield rule: entering and leaving suspend if the condition's lock is contended, and entering also while the other
side is in.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

from quiesce.barrier import KINDS

__all__ = ["UpstreamShapeBarrier", "UpstreamShapeCut"]

_REMEMBERED_WAITS: Final = 10_000


class UpstreamShapeCut:
    """The token of a section: live until it is left."""

    __slots__ = ("_live",)

    def __init__(self) -> None:
        self._live = True

    def require_live(self) -> None:
        """Prove that the section is held.

        Raises:
            RuntimeError: If it was left.
        """
        if not self._live:
            raise RuntimeError("this section was left")

    def expire(self) -> None:
        """End it."""
        self._live = False


class UpstreamShapeBarrier:
    """Shared mutation sections, exclusive checkpoint sections."""

    def __init__(self) -> None:
        self._condition = asyncio.Condition()
        self._checkpoint_active = False
        self._active = 0
        self._holders: set[asyncio.Task[Any]] = set()
        self.mutation_version = 0
        self.waiting = 0
        self.max_waiting = 0
        self.blocked_by_kind: Counter[str] = Counter()
        self.waits: deque[float] = deque(maxlen=_REMEMBERED_WAITS)

    @asynccontextmanager
    async def mutation(self, kind: str) -> AsyncIterator[UpstreamShapeCut]:
        """Hold a shared section.

        Raises:
            ValueError: If the kind is unknown.
            RuntimeError: If this task holds a section already.
        """
        if kind not in KINDS:
            raise ValueError(f"unknown kind {kind!r}")
        task = self._entering()
        async with self._condition:
            if self._checkpoint_active:
                await self._blocked(kind)
            self._active += 1
            self._holders.add(task)
        cut = UpstreamShapeCut()
        try:
            yield cut
        finally:
            cut.expire()
            async with self._condition:
                self._active -= 1
                self._holders.discard(task)
                self.mutation_version += 1
                if not self._active:
                    self._condition.notify_all()

    @asynccontextmanager
    async def checkpoint(self) -> AsyncIterator[UpstreamShapeCut]:
        """Hold the exclusive section: new mutations wait from now on, and those that are held are waited for.

        Raises:
            RuntimeError: If this task holds a section already.
        """
        task = self._entering()
        async with self._condition:
            await self._condition.wait_for(lambda: not self._checkpoint_active)
            self._checkpoint_active = True
            try:
                await self._condition.wait_for(lambda: not self._active)
            except BaseException:
                self._checkpoint_active = False
                self._condition.notify_all()
                raise
            self._holders.add(task)
        cut = UpstreamShapeCut()
        try:
            yield cut
        finally:
            cut.expire()
            async with self._condition:
                self._checkpoint_active = False
                self._holders.discard(task)
                self._condition.notify_all()

    def _entering(self) -> asyncio.Task[Any]:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a section needs a task")
        if task in self._holders:
            raise RuntimeError("this task holds a section already: pass on the cut that it has")
        return task

    async def _blocked(self, kind: str) -> None:
        """Wait for the checkpoint, and count it."""
        self.waiting += 1
        self.max_waiting = max(self.max_waiting, self.waiting)
        since = time.perf_counter()
        try:
            await self._condition.wait_for(lambda: not self._checkpoint_active)
        finally:
            self.waiting -= 1
            self.blocked_by_kind[kind] += 1
            self.waits.append(time.perf_counter() - since)
