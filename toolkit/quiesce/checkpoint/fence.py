"""Fencing generation workers around a window: no worker makes a row final while the cut is taken.

Rule: a fence is closed before the window opens and verified after it was left; it is reopened whatever
happened in between, also when closing it failed half-way. A fence that is not certainly closed refuses the
cut, never the run. Yield rule: all three calls may suspend; each has a deadline of its own.
"""

from __future__ import annotations

from typing import Protocol

__all__ = ["Fence", "NoFence"]


class Fence(Protocol):
    """What a save needs of whatever keeps workers out."""

    async def close(self, cut_id: str, timeout: float) -> None:
        """Keep workers from making rows final, and wait until those that are at it are through.

        Args:
            cut_id: The cut that it is for.
            timeout: Seconds.

        Raises:
            FenceError: If that did not come about in time; what was closed by then is reopened by
                :meth:`reopen`.
        """
        ...

    async def verify(self) -> None:
        """Prove that every worker that counts stayed fenced since :meth:`close`.

        Raises:
            FenceError: If one did not, or was restarted.
        """
        ...

    async def reopen(self) -> None:
        """Let workers go on; called once after each :meth:`close`, and never waits for a worker to answer."""
        ...


class NoFence:
    """For runs whose rows are flipped through the barrier alone: there is nobody else to keep out."""

    async def close(self, cut_id: str, timeout: float) -> None:
        """Nothing to close."""

    async def verify(self) -> None:
        """Nothing can have slipped through."""

    async def reopen(self) -> None:
        """Nothing to reopen."""
