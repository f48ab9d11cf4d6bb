"""Waiting for a condition without polling.

Rule: waits are level-triggered. A waiter states a predicate over state that lives elsewhere; whoever changes
that state calls :meth:`Changed.notify`; the predicate is looked at again after every wake-up, so neither a
lost nor a spurious notification can be harmful. Yield rule: ``wait_until`` suspends only while the predicate
is false.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from quiesce.observers import Hub, default_hub

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Changed", "TrainerVersion"]


class Changed:
    """A broadcast "look again", for tasks of one event loop."""

    __slots__ = ("_waiters",)

    def __init__(self) -> None:
        self._waiters: dict[asyncio.Future[None], None] = {}  # in the order in which they came

    def notify(self) -> None:
        """Wake every waiter; call it on the loop, after the change is complete."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()

    async def wait_until(self, predicate: Callable[[], bool]) -> None:
        """Suspend until the predicate holds; a predicate that holds already does not suspend.

        Cancellation: leaves no trace.
        """
        while not predicate():
            waiter = asyncio.get_running_loop().create_future()
            self._waiters[waiter] = None
            try:
                await waiter
            finally:
                self._waiters.pop(waiter, None)

    @property
    def waiting(self) -> int:
        """How many tasks wait."""
        return len(self._waiters)


class TrainerVersion:
    """The trainer's weight version: it only grows, and admission gates wait on it.

    Args:
        value: The version to start from.
        hub: Where ``version_advanced`` is reported.
    """

    __slots__ = ("__weakref__", "_changed", "_hub", "_value")

    def __init__(self, value: int = 0, *, hub: Hub | None = None) -> None:
        if value < 0:
            message = f"the trainer version cannot be {value}: it starts at 0"
            raise ValueError(message)
        self._value = value
        self._changed = Changed()
        self._hub = default_hub() if hub is None else hub
        self._hub.attach("trainer_version", self)

    @property
    def value(self) -> int:
        """The current version."""
        return self._value

    def advance(self, to: int | None = None) -> int:
        """Advance by one, or to a given newer version, and wake the gates.

        Raises:
            ValueError: If the version would not grow.
        """
        new = self._value + 1 if to is None else to
        if new <= self._value:
            message = f"the trainer version only grows: {self._value} cannot become {new}"
            raise ValueError(message)
        self._value = new
        self._changed.notify()
        if self._hub.version_advanced:
            self._hub.fire("version_advanced", new)
        return new

    def nudge(self) -> None:
        """Wake the gates without a new version, so that each looks at its predicate again."""
        self._changed.notify()

    async def wait_until(self, predicate: Callable[[int], bool]) -> None:
        """Suspend until ``predicate(version)`` holds.

        Cancellation: leaves no trace.
        """
        await self._changed.wait_until(lambda: predicate(self._value))
