"""A run reduced to what a save needs, of whatever size: the real primitives, a real store, writers that go on.

Rule: nothing is simulated that a save touches: barrier, ledger, buffer, accounting, an LMDB store, a run folder.
What is left out is the model, whose part is the same however a cut is taken. Yield rule: :meth:`World.fill` and the
writer's life suspend in slots and while rows are put; opening and closing block on the disk.
"""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from quiesce.accounting import Accounting
from quiesce.barrier import DataPlaneCheckpointBarrier
from quiesce.buffer import ReplayBuffer
from quiesce.checkpoint.capture import CutSources
from quiesce.checkpoint.cut import CommittedPosition, SamplerState
from quiesce.checkpoint.runfolder import RunFolder
from quiesce.dataplane.lmdb import LmdbDataPlane
from quiesce.errors import ConfigError
from quiesce.ledger import RolloutLedger
from quiesce.observers import Hub
from quiesce.spares import SparePool
from quiesce.threads import DaemonExecutor
from quiesce.types import GroupRecord, PromptRef, RowKey

if TYPE_CHECKING:
    import numpy as np

__all__ = ["Size", "World", "Writers", "noise", "require", "shown_bytes"]

_ROWS_AT_ONCE: Final = 256
_GROUPS_AT_ONCE: Final = 512
_IN_FLIGHT_SHARE: Final = 8  # beside the finished groups, one in so many is in flight and has no rows yet
_SPARES: Final = 16
_PAUSE_SECONDS: Final = 0.002  # between two groups of the writer
_TICK_SECONDS: Final = 0.001
_UNITS: Final = ("B", "KiB", "MiB", "GiB")
_BASE: Final = 1024


def require(*packages: str) -> None:
    """Refuse to go on without packages that the toolkit itself does not need.

    Raises:
        ConfigError: If one is not installed.
    """
    import importlib.util

    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise ConfigError("bench", f"needs {' and '.join(missing)}: pip install 'quiesce[grpo]'")


def noise(num_bytes: int) -> np.ndarray[Any, Any]:
    """Return bytes that no file system or disk can compress; the same every time."""
    import numpy as np

    return np.random.default_rng(0).integers(0, 256, num_bytes, dtype=np.uint8)


@dataclass(frozen=True, slots=True)
class Size:
    """How large a run is.

    Attributes:
        groups: Finished groups in the buffer.
        rows_per_group: Rows of each.
        row_bytes: Bytes of each row's one field.
    """

    groups: int
    rows_per_group: int
    row_bytes: int

    @property
    def rows(self) -> int:
        """All rows."""
        return self.groups * self.rows_per_group

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows."""
        return self.rows * self.row_bytes

    @property
    def in_flight(self) -> int:
        """Groups in the ledger."""
        return -(-self.groups // _IN_FLIGHT_SHARE)

    def __str__(self) -> str:
        """Name it, as in ``8,192 groups, 1 GiB``."""
        return f"{self.groups:,} groups, {shown_bytes(self.num_bytes)}"


def shown_bytes(num_bytes: float) -> str:
    """Return a number of bytes for people."""
    for unit in _UNITS[:-1]:
        if num_bytes < _BASE:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= _BASE
    return f"{num_bytes:.3g} {_UNITS[-1]}"


class World:
    """The primitives of one run.

    Args:
        folder: Where its store and its run folders go; made if it is not there.
        size: How much is in it, once it is filled.
    """

    def __init__(self, folder: Path, size: Size) -> None:
        self.folder = folder
        self.size = size
        folder.mkdir(parents=True, exist_ok=True)
        self.hub = Hub(strict=True)
        self.barrier = DataPlaneCheckpointBarrier(hub=self.hub)
        self.ledger = RolloutLedger(self.barrier)
        self.spares = SparePool(self.barrier)
        self.accounting = Accounting(self.barrier)
        self.run = RunFolder.create(folder / "run")
        self.incarnation = self.run.next_incarnation()
        self.plane = LmdbDataPlane(folder / "store", self.incarnation, tensors="numpy", hub=self.hub)
        self.buffer = ReplayBuffer(self.barrier, self.ledger, self.plane)
        self.position = CommittedPosition(0, 0, exhausted=False, loader=None)
        self.admissions = 0
        self.step = 0
        self._noise = noise(size.row_bytes + _BASE)
        self.sources = CutSources(
            barrier=self.barrier,
            sampler_state=self._sampler_state,
            position=lambda: self.position,
            accounting=self.accounting,
            spares=self.spares,
            buffer=self.buffer,
            ledger=self.ledger,
            dataplane=self.plane,
        )

    async def fill(self) -> None:
        """Bring the run to its size."""
        for first in range(0, self.size.groups, _GROUPS_AT_ONCE):
            refs = await self.read(min(_GROUPS_AT_ONCE, self.size.groups - first))
            keys = [key for ref in refs for key in self.keys(ref)]
            for start in range(0, len(keys), _ROWS_AT_ONCE):
                self.put(keys[start : start + _ROWS_AT_ONCE])
            await self.commit(refs)
        await self.read(self.size.in_flight)
        async with self.barrier.mutation("prompt_reservation") as cut:
            refs = self._next_refs(_SPARES)
            self.accounting.read(cut, refs)
            self.spares.add(cut, refs)
        store = os.open(self.plane.path / "data.mdb", os.O_RDONLY)
        try:
            os.fsync(store)  # or the disk would still be busy with it while the first save is measured
        finally:
            os.close(store)

    def keys(self, ref: PromptRef) -> list[RowKey]:
        """Return the keys of a group's rows."""
        return [
            RowKey(self.incarnation, ref.group_id, number, 0) for number in range(self.size.rows_per_group)
        ]

    def put(self, keys: list[RowKey]) -> None:
        """Put rows; blocks."""
        size = self.size.row_bytes
        starts = (number * 61 % _BASE for number in range(len(keys)))
        self.plane.put(
            {key: {"tokens": self._noise[at : at + size]} for key, at in zip(keys, starts, strict=True)}
        )

    async def read(self, count: int) -> list[PromptRef]:
        """Read prompts, reserve their groups, and admit them as one batch."""
        async with self.barrier.mutation("prompt_reservation") as cut:
            refs = self._next_refs(count)
            self.accounting.read(cut, refs)
            for ref in refs:
                self.ledger.reserve_group(cut, GroupRecord(ref.group_id, self.admissions, ref))
        async with self.barrier.mutation("admission") as cut:
            self.admissions += 1
            for ref in refs:
                self.ledger.mark_group_admitted(cut, ref.group_id, target_step=None, start_version=0)
        return refs

    async def commit(self, refs: list[PromptRef]) -> None:
        """Flip groups to ready, whose rows were put."""
        async with self.barrier.mutation("group_commit") as cut:
            for ref in refs:
                self.buffer.commit_group(
                    cut,
                    ref.group_id,
                    0,
                    keys=self.keys(ref),
                    generated_from=0,
                    generated_to=0,
                    stats={"reward": 0.5},
                )

    async def evict(self, ref: PromptRef) -> None:
        """End a ready group."""
        async with self.barrier.mutation("group_removal") as cut:
            self.buffer.evict(cut, [ref.group_id])
            self.accounting.dropped(cut, [ref], "evicted")

    def close(self) -> None:
        """Close the store and the run folder; blocks."""
        self.plane.close()
        self.run.close()

    def _next_refs(self, count: int) -> list[PromptRef]:
        first = self.position.position
        self.position = CommittedPosition(0, first + count, exhausted=False, loader={"at": first + count})
        return [PromptRef(0, position, position) for position in range(first, first + count)]

    def _sampler_state(self) -> SamplerState:
        cursor = self.admissions - 1
        return SamplerState("windowed", cursor, False, self.admissions, self.admissions)


class Writers:
    """What goes on beside a save: a writer that takes groups through their whole life, and a watch on the loop.

    Each group takes four slots: it is read, admitted, its row is put (in a thread, as workers do), it is committed,
    and evicted, so that the run keeps its size.

    Attributes:
        longest_wait: Seconds that the longest wait for a slot took.
        longest_lag: Seconds that the loop was late at most, which is what anything else in it would have waited.
        groups: Groups that were taken through.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._executor = DaemonExecutor("quiesce-bench-writer", 1)
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False
        self._going = asyncio.Event()
        self.longest_wait = 0.0
        self.longest_lag = 0.0
        self.groups = 0

    async def __aenter__(self) -> Self:
        self._world.hub.subscribe(self)
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._write()), loop.create_task(self._tick())]
        await self._going.wait()
        self.longest_wait = self.longest_lag = 0.0
        self.groups = 0
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._stopping = True
        for task in self._tasks:
            await task
        self._world.hub.unsubscribe(self)
        self._executor.shutdown(wait=False)

    def slot_opened(self, kind: str, wait_ns: int, opened_ns: int) -> None:
        """Note how long a slot was waited for."""
        self.longest_wait = max(self.longest_wait, wait_ns / 1e9)

    async def _write(self) -> None:
        world, loop = self._world, asyncio.get_running_loop()
        while not self._stopping:
            (ref,) = await world.read(1)
            keys = world.keys(ref)
            await loop.run_in_executor(self._executor, world.put, keys)
            await world.commit([ref])
            await world.evict(ref)
            await loop.run_in_executor(self._executor, world.plane.clear, keys)
            self.groups += 1
            self._going.set()
            await asyncio.sleep(_PAUSE_SECONDS)

    async def _tick(self) -> None:
        while not self._stopping:
            before = time.perf_counter()
            await asyncio.sleep(_TICK_SECONDS)
            self.longest_lag = max(self.longest_lag, time.perf_counter() - before - _TICK_SECONDS)
