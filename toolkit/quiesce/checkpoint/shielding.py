"""Running a blocking call in a thread so that its end is always awaited.

Rule: a thread cannot be stopped, so whoever cancels the caller waits for the thread; only then may folders
that it writes into be removed and snapshots that it reads be released. Yield rule: :func:`in_thread` suspends
until the call has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Executor
from typing import TypeVar, TypeVarTuple

__all__ = ["finish", "in_thread"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


async def in_thread(executor: Executor, function: Callable[[*Ts], T], *args: *Ts) -> T:
    """Run ``function(*args)`` in the executor and return its result.

    Cancelled, it waits for the call to end, then passes the cancellation on.
    """
    return await finish(asyncio.get_running_loop().run_in_executor(executor, function, *args))


async def finish(future: asyncio.Future[T]) -> T:
    """Wait for a future to end, also through cancellations of the caller, which are passed on afterwards.

    What the future raised is then the cause of the cancellation.
    """
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait({future})
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        failure = None if future.cancelled() else future.exception()
        raise cancelled from failure
    return future.result()
