"""What the controller asks of the generation workers that put rows themselves.

Rule: a worker takes part in checkpoints through its snapshot gate, which it registers with the fence, and in the sweep
through what its cleanup still has to clear; the controller knows nothing else about it. Yield rule: ``attach`` and
``detach`` may suspend, ``outstanding`` never does.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from quiesce.dataplane.interface import DataPlane
    from quiesce.gate_fence import GateFence
    from quiesce.types import RowKey

__all__ = ["GenerationWorkers", "NoWorkers"]


class GenerationWorkers(Protocol):
    """The generation workers of a run, each with a snapshot gate and a cleanup of its own."""

    async def attach(self, dataplane: DataPlane, fence: GateFence) -> None:
        """Take part in an incarnation: register a gate for each worker, start their cleanups.

        Called once, when the data plane is open and restored, before the first checkpoint and the first rollout.

        Args:
            dataplane: Where the workers put and clear rows, until :meth:`detach`.
            fence: Closes the gates around each window.
        """
        ...

    async def detach(self) -> None:
        """Let go of the data plane: drain the cleanups within a deadline, and put nothing any more.

        Called once, when no rollout runs and no checkpoint is taken any more, before the data plane is closed; also after an
        :meth:`attach` that failed half-way.
        """
        ...

    def outstanding(self) -> Collection[RowKey]:
        """Return the keys that the workers' cleanups have taken and not cleared; on the loop, without waiting."""
        ...


class NoWorkers:
    """For runs whose generate function returns its rows, and puts none."""

    async def attach(self, dataplane: DataPlane, fence: GateFence) -> None:
        """Nobody takes part."""

    async def detach(self) -> None:
        """Nobody took part."""

    def outstanding(self) -> Collection[RowKey]:
        """Return nothing."""
        return ()
