"""How the engine's workers take part in checkpoints: a snapshot gate and a cleanup for each, under the run's fence.

Rule: a worker's label is its place, stable for the whole run; the worker that takes a lost one's place has the same
label and another gate. What a lost worker's cleanup still had to clear goes to the one in its place. Yield rule: only
:meth:`WorkerGates.close` suspends; everything is called on the event loop, except ``outstanding`` and ``pass_on``.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from quiesce import Hub
from quiesce.cleanup import BackgroundCleanup
from quiesce.dataplane import DataPlane
from quiesce.gate_fence import GateFence, LocalGate
from quiesce.snapshot_gate import SnapshotGate
from quiesce.threads import DaemonExecutor
from quiesce.types import RowKey

__all__ = ["WorkerGate", "WorkerGates"]


@dataclass(frozen=True, eq=False, slots=True)
class WorkerGate:
    """What one worker finishes its calls with.

    Attributes:
        gate: It makes final rows under permits of this.
        cleanup: Clears the chunk rows that are obsolete then.
        handle: What the fence closes the gate by.
    """

    gate: SnapshotGate
    cleanup: BackgroundCleanup
    handle: LocalGate = field(repr=False)


class WorkerGates:
    """The gates of an engine's workers, from its attachment to a run until it is detached.

    Args:
        dataplane: Where rows are cleared.
        fence: Closes the gates around each window.
        permit_deadline_seconds: How long a permit may be out; past it its worker is given up.
        give_up: Called with the place of such a worker and why, on the event loop.
        hub: Where gates and cleanups report.
    """

    def __init__(
        self,
        dataplane: DataPlane,
        fence: GateFence,
        *,
        permit_deadline_seconds: float,
        give_up: Callable[[int, str], None],
        hub: Hub | None,
    ) -> None:
        self._dataplane = dataplane
        self._fence = fence
        self._permit_deadline_seconds = permit_deadline_seconds
        self._give_up = give_up
        self._hub = hub
        self._open: dict[int, WorkerGate] = {}
        self._passing = threading.Lock()

    def open(self, place: int) -> WorkerGate:
        """Register a new gate for a worker, and start its cleanup."""
        opened = self._open[place] = self._opened(place)
        return opened

    def replace(self, place: int, why: str) -> WorkerGate:
        """Retire a lost worker's gate and open one for the worker that takes its place.

        Its attempts are given up before this is called: what its threads still do then counts for nothing.
        """
        lost = self._open[place]
        lost.cleanup.close(0.0)
        lost.gate.retire(why)
        self._fence.unregister(str(place))
        lost.handle.shutdown()
        opened = self._opened(place)
        # In one step for a thread that passes keys on: the lost cleanup has them before it is read, or the new one.
        with self._passing:
            self._open[place] = opened
            left = lost.cleanup.outstanding()
        opened.cleanup.hand_over(left)
        return opened

    def pass_on(self, place: int, keys: Iterable[RowKey]) -> None:
        """Take the keys of a call whose worker was lost before it could submit them; any thread, never waits."""
        with self._passing:
            self._open[place].cleanup.hand_over(keys)

    def _opened(self, place: int) -> WorkerGate:
        gate = SnapshotGate(str(place), hub=self._hub)
        handle = LocalGate(
            gate,
            permit_deadline=self._permit_deadline_seconds,
            give_up=lambda holders: self._give_up(
                place, f"a permit is out for too long: {', '.join(str(holder) for holder in holders)}"
            ),
        )
        opened = WorkerGate(gate, BackgroundCleanup(gate, self._dataplane.clear, hub=self._hub), handle)
        self._fence.register(handle)
        opened.cleanup.start()
        return opened

    def outstanding(self) -> tuple[RowKey, ...]:
        """Return the keys that were handed over and are not cleared."""
        return tuple(key for opened in tuple(self._open.values()) for key in opened.cleanup.outstanding())

    async def close(self, deadline_seconds: float) -> None:
        """Drain the cleanups within a deadline, then take no part in checkpoints any more.

        Args:
            deadline_seconds: For all of them together; what is left is given up.
        """
        executor = DaemonExecutor("rollout-detach", max(len(self._open), 1))
        loop = asyncio.get_running_loop()
        try:
            await asyncio.gather(
                *(
                    loop.run_in_executor(executor, opened.cleanup.close, deadline_seconds)
                    for opened in self._open.values()
                )
            )
        finally:
            executor.shutdown(wait=False)
            for place, opened in self._open.items():
                opened.gate.retire("its engine was detached from the run")
                self._fence.unregister(str(place))
                opened.handle.shutdown()
