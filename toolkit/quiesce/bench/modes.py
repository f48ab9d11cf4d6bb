"""Three ways to take a checkpoint of one run, each measured from outside in the same way.

==============  ==================================================  =========================================
mode            inside the window                                   outside
==============  ==================================================  =========================================
recovery_off    the buffer's index is copied                        the index is written; no row, no ledger
inside          the six artifacts are read, and everything is       the manifest and the rename
                written: folder, rows, documents
ours            the six artifacts are read                          everything is written (the real
                                                                    :class:`~quiesce.checkpoint.saver.Checkpointer`)
==============  ==================================================  =========================================

``inside`` writes with the very code that ``ours`` writes with, in as many threads, and leaves out what only ours
does (judging the cut); so what differs is when.

Rule: a mode takes a checkpoint and returns once it is durable; what the trainer waits for is measured as the time until
its task may go on. What was written stays until the end: whoever writes next would be given the memory that a deletion
sets free, which is quicker to get than fresh memory (several times, on a virtual machine). Yield rule:
:meth:`Mode.save` suspends; nothing that blocks runs on the loop.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, Self

from quiesce.accounting import AccountingState, ClosedEpochs
from quiesce.bench.filesystem import WatchedFileSystem
from quiesce.bench.world import Writers
from quiesce.checkpoint import documents, files, publish, write
from quiesce.checkpoint.capture import capture
from quiesce.checkpoint.cut import PARTS, CommittedPosition, CutState, PartStamp, SamplerState
from quiesce.checkpoint.saver import Checkpointer
from quiesce.checkpoint.shielding import in_thread
from quiesce.checkpoint.trainer_state import NoTrainerState
from quiesce.threads import DaemonExecutor

if TYPE_CHECKING:
    from quiesce.bench.world import World

__all__ = ["MODES", "Mode", "Sample", "Saves"]

MODES: Final = ("recovery_off", "inside", "ours")
_KEPT: Final = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One save.

    Attributes:
        exclusive_s: How long the exclusive side was held.
        trainer_stall_s: How long the trainer's task was held up.
        time_to_durable_s: From the request until the checkpoint is published, synced and all.
        write_s: How long rows and documents were being written; 0 where that was not measured by itself.
        slot_wait_s: The longest wait for a slot, of a writer that went on meanwhile.
        loop_lag_s: How late the event loop was at most.
        groups_written: Groups that the writer took through meanwhile.
        operations: File operations by where they were asked for: ``window`` or ``outside``.
        num_bytes: Bytes of the checkpoint.
    """

    exclusive_s: float
    trainer_stall_s: float
    time_to_durable_s: float
    write_s: float
    slot_wait_s: float
    loop_lag_s: float
    groups_written: int
    operations: dict[str, int]
    num_bytes: int


@dataclass(slots=True)
class _Watch:
    """Listens to a save."""

    exclusive: bool = False
    exclusive_ns: int = 0
    write_ns: int = 0
    ended: float = 0.0
    outcome: str = ""
    num_bytes: int = 0
    reasons: list[str] = field(default_factory=list)

    def window_opened(self, window_id: str, drain_ns: int, delayed_by: object, opened_ns: int) -> None:
        """The exclusive side is held."""
        self.exclusive = True

    def window_closed(
        self, window_id: str, drain_ns: int, exclusive_ns: int, outcome: str, closed_ns: int
    ) -> None:
        """It was left."""
        self.exclusive = False
        self.exclusive_ns = exclusive_ns

    def phase_ended(self, cut_id: str, phase: str, ns: int, outcome: str) -> None:
        """Note how long writing took."""
        if phase == "write":
            self.write_ns = ns

    def checkpoint_ended(
        self, cut_id: str, step: int, outcome: str, reason: str, groups: object, rows: int, num_bytes: int
    ) -> None:
        """It is published, or never will be."""
        self.ended = time.perf_counter()
        self.outcome = f"{outcome} {reason}".strip()
        self.num_bytes = num_bytes

    def where(self) -> str:
        """Return where a file operation is asked for now."""
        return "window" if self.exclusive else "outside"


class Mode(Protocol):
    """A way to take a checkpoint."""

    async def save(self, step: int) -> tuple[float, float, int]:
        """Return when the trainer may go on, when all is durable, and how many bytes that is."""
        ...


class Saves:
    """Takes and measures checkpoints of one world, in whatever mode.

    Args:
        world: The run, filled.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self._executor = DaemonExecutor("quiesce-bench-save", 4)  # as many threads as the checkpointer has
        self._watch = _Watch()
        self._files = 0
        # More than are ever written here: a save must not delete what others left.
        self._checkpointer = Checkpointer(world.sources, NoTrainerState(), world.run, keep=_KEPT)
        self._modes: dict[str, Mode] = {
            "recovery_off": _RecoveryOff(world, self._executor),
            "inside": _Inside(world, self._executor),
            "ours": _Ours(self._checkpointer, self._watch),
        }

    async def __aenter__(self) -> Self:
        await self._checkpointer.prepare()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._checkpointer.close()
        self._executor.shutdown(wait=False)

    async def measure(self, mode: str, latency: float = 0.0) -> Sample:
        """Take a checkpoint, beside a writer; it stays: see the module's rule.

        Args:
            mode: One of :data:`MODES`.
            latency: Seconds that each file operation of the save takes longer.

        Raises:
            RuntimeError: If the checkpoint did not become durable.
        """
        world, watch = self.world, self._watch
        world.step += 1
        watch.outcome = "completed"
        watch.exclusive_ns = watch.write_ns = 0
        world.hub.subscribe(watch)
        disk = WatchedFileSystem(world.run.path, latency, watch.where)
        try:
            async with Writers(world) as writers:
                with disk.installed():
                    begun = time.perf_counter()
                    freed, durable, num_bytes = await self._modes[mode].save(world.step)
                waited, lagged, written = writers.longest_wait, writers.longest_lag, writers.groups
        finally:
            world.hub.unsubscribe(watch)
        if watch.outcome != "completed":
            raise RuntimeError(f"the save in mode {mode} of {world.size} ended as: {watch.outcome}")
        return Sample(
            exclusive_s=watch.exclusive_ns / 1e9,
            trainer_stall_s=freed - begun,
            time_to_durable_s=durable - begun,
            write_s=watch.write_ns / 1e9,
            slot_wait_s=waited,
            loop_lag_s=lagged,
            groups_written=written,
            operations={where: disk.count(where) for where in ("window", "outside")},
            num_bytes=num_bytes,
        )

    async def window(self) -> float:
        """Take a cut and let go of it; return how long the exclusive side was held, in seconds."""
        world, watch = self.world, self._watch
        world.hub.subscribe(watch)
        try:
            async with world.barrier.checkpoint() as cut:
                captured = capture(
                    cut,
                    world.sources,
                    incarnation=world.incarnation,
                    parent_cut=None,
                    step=world.step,
                    trainer_version=world.step,
                )
        finally:
            world.hub.unsubscribe(watch)
        captured.snapshot.release()
        return watch.exclusive_ns / 1e9

    async def sequential(self, num_bytes: int, chunk: memoryview) -> float:
        """Write so many bytes to a new file, one after the other, and sync it; return the seconds."""
        self._files += 1
        path = self.world.folder / f"sequential-{self._files}"
        return await in_thread(self._executor, _sequential, path, num_bytes, chunk)


class _Ours:
    def __init__(self, checkpointer: Checkpointer, watch: _Watch) -> None:
        self._checkpointer = checkpointer
        self._watch = watch

    async def save(self, step: int) -> tuple[float, float, int]:
        await self._checkpointer.save(step=step, trainer_version=step)
        freed = time.perf_counter()
        await self._checkpointer.wait()
        return freed, self._watch.ended, self._watch.num_bytes


class _Inside:
    def __init__(self, world: World, executor: DaemonExecutor) -> None:
        self._world = world
        self._executor = executor

    async def save(self, step: int) -> tuple[float, float, int]:
        world = self._world
        async with world.barrier.checkpoint() as cut:
            captured = capture(
                cut,
                world.sources,
                incarnation=world.incarnation,
                parent_cut=None,
                step=step,
                trainer_version=step,
            )
            try:
                folder = world.run.temporary(step, cut.window_id)
                written = await write.write_cut(folder, captured, NoTrainerState(), self._executor)
            finally:
                captured.snapshot.release()
        await in_thread(self._executor, self._publish, written, captured.state)
        # The save is part of the train pump's own task, so the trainer has waited for all of it.
        freed = time.perf_counter()
        return freed, freed, written.num_bytes

    def _publish(self, written: write.WrittenCut, state: CutState) -> Path:
        manifest = write.manifest_of(written, state, restored_from=None)
        return publish.publish(self._world.run, written.folder, manifest, ())


class _RecoveryOff:
    def __init__(self, world: World, executor: DaemonExecutor) -> None:
        self._world = world
        self._executor = executor

    async def save(self, step: int) -> tuple[float, float, int]:
        world = self._world
        async with world.barrier.checkpoint() as cut:
            ready, claimed = world.buffer.capture()
            stamp = PartStamp(cut.window_id, world.barrier.mutation_version)
        index = CutState(
            cut_id=stamp.cut_id,
            mutation_version=stamp.mutation_version,
            incarnation=world.incarnation,
            parent_cut=None,
            step=step,
            trainer_version=step,
            sampler=SamplerState("windowed", -1, False, 0, 0),
            position=CommittedPosition(0, 0, exhausted=False, loader=None),
            accounting=AccountingState(ClosedEpochs(0, 0, 0, {}), ()),
            spares=(),
            ready=ready,
            claimed=claimed,
            ledger=(),
            stamps=dict.fromkeys(PARTS, stamp),
        )
        folder = world.run.temporary(step, cut.window_id)
        num_bytes = await in_thread(self._executor, self._write, folder, index)
        freed = time.perf_counter()
        return freed, freed, num_bytes

    def _write(self, folder: Path, index: CutState) -> int:
        files.make_folder(folder)
        content = documents.to_documents(index)["buffer.json"]
        digest = files.write_durable(folder / "buffer.json", content)
        files.fsync_folder(folder)
        files.rename(folder, folder.with_name(f"step_{index.step}"))
        files.fsync_folder(folder.parent)
        return digest.size


def _sequential(path: Path, num_bytes: int, chunk: memoryview) -> float:
    begun = time.perf_counter()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        left = num_bytes
        while left:
            left -= os.write(fd, chunk[:left])
        os.fsync(fd)
        took = time.perf_counter() - begun
    finally:
        os.close(fd)
    return took
