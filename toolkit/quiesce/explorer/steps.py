"""What may run next, as the explored loop keeps it: queued callbacks, timers, and the steps to choose from.

Rule: plain records; only the loop changes them. Nothing here suspends.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["Handle", "Step", "Timer", "described", "name_of", "pool_name", "seq_of", "task_of"]


class Handle(asyncio.Handle):
    """A queued callback, and when it was queued."""

    __slots__ = ("arguments", "function", "iteration", "origin", "scope", "seq")

    function: Callable[..., object]
    arguments: tuple[Any, ...]
    scope: contextvars.Context
    seq: int
    iteration: int
    origin: str
    """``loop``, ``pause``, ``thread`` or ``timer``."""


class Timer(asyncio.TimerHandle):
    """A callback that waits for its time."""

    __slots__ = ("arguments", "function", "iteration", "scope", "seq")

    function: Callable[..., object]
    arguments: tuple[Any, ...]
    scope: contextvars.Context
    seq: int
    iteration: int


@dataclass(frozen=True, slots=True)
class Step:
    """Something that may run next.

    Attributes:
        kind: ``callback``, ``pause``, ``thread`` (a call handed over by one), ``job`` or ``timer``; of explored threads
            always ``point``.
        seq: Tells it from every other step of the schedule.
        what: The handle, job or place.
        owner: The task, pool, thread or kind that it belongs to, for priorities; the same in every run.
    """

    kind: str
    seq: int
    what: Any
    owner: str

    def __str__(self) -> str:
        """Say what it is, for traces."""
        if self.kind in {"job", "point"}:
            return str(self.what)
        return f"{self.kind} {name_of(self.what)}"


def seq_of(step: Step) -> int:
    """Return when it was asked for."""
    return step.seq


def task_of(handle: Handle | Timer) -> asyncio.Task[Any] | None:
    """Return the task whose step it is, or None."""
    owner = getattr(handle.function, "__self__", None)
    return owner if isinstance(owner, asyncio.Task) else None


def name_of(handle: Handle | Timer) -> str:
    """Name it for traces."""
    task = task_of(handle)
    if task is not None:
        return f"task {task.get_name()!r}"
    function = handle.function
    label = getattr(function, "label", None)
    return label or getattr(function, "__qualname__", None) or repr(function)


def described(func: Callable[..., object], args: tuple[Any, ...]) -> str:
    """Name a call for traces."""
    names = [name for item in (func, *args) if (name := getattr(item, "__qualname__", None)) is not None]
    return names[-1] if names else repr(func)


def pool_name(pool: object) -> str:
    """Name a pool for traces."""
    return getattr(pool, "name", None) or type(pool).__qualname__
