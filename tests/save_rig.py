"""A run reduced to what a save needs: the real primitives, a real run folder, and a trainer that can be held.

Tests of saving drive it by hand: read, admit, commit, train, save.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quiesce.accounting import Accounting
from quiesce.barrier import DataPlaneCheckpointBarrier
from quiesce.buffer import ReplayBuffer
from quiesce.checkpoint import files
from quiesce.checkpoint.capture import CutSources
from quiesce.checkpoint.cut import CapturedCut, CommittedPosition, CutState, SamplerState
from quiesce.checkpoint.journal import Journal
from quiesce.checkpoint.runfolder import RunFolder
from quiesce.checkpoint.saver import Checkpointer, SaveResult
from quiesce.checkpoint.trainer_state import Staged, TrainerState
from quiesce.dataplane import DataPlane, LmdbDataPlane, MemoryDataPlane
from quiesce.errors import FenceError
from quiesce.invariants import Violation
from quiesce.ledger import RolloutLedger
from quiesce.observers import Hub
from quiesce.spares import SparePool
from quiesce.types import BufferEntry, GroupRecord, PromptRef, RowKey

GENERATIONS = 2


class Recorder:
    """Writes down the hooks that a save fires; from any thread."""

    def __init__(self) -> None:
        self.phases: list[tuple[str, str]] = []
        self.started: list[str] = []
        self.parts: list[str] = []
        self.ended: list[tuple[int, str, str]] = []
        self.groups: list[dict[str, int]] = []
        self.stalls: list[str] = []
        self.violations: list[str] = []
        self.log: list[str] = []
        self.draining = asyncio.Event()

    def window_requested(self, window_id: str, asked_ns: int) -> None:
        """Note it; the checkpoint queues up in this very step."""
        self.draining.set()

    def phase_started(self, cut_id: str, phase: str) -> None:
        """Note it."""
        self.started.append(phase)
        self.log.append(f"{phase} started")

    def phase_ended(self, cut_id: str, phase: str, ns: int, outcome: str) -> None:
        """Note it."""
        assert ns >= 0
        self.phases.append((phase, outcome))
        self.log.append(f"{phase} {outcome}")

    def cut_part_captured(self, cut_id: str, part: str, ns: int) -> None:
        """Note it."""
        self.parts.append(part)
        self.log.append(f"captured {part}")

    def checkpoint_ended(
        self, cut_id: str, step: int, outcome: str, reason: str, groups: dict[str, int], rows: int, size: int
    ) -> None:
        """Note it."""
        self.ended.append((step, outcome, reason))
        self.groups.append(dict(groups))

    def trainer_stalled(self, cause: str, ns: int) -> None:
        """Note it."""
        assert ns >= 0
        self.stalls.append(cause)

    def invariant_violated(self, violation: Any) -> None:  # noqa: ANN401 - the hook's type
        """Note it."""
        self.violations.append(violation.invariant)


class HeldTrainer:
    """A trainer whose staging and writing wait until they are let go, and which can fail."""

    def __init__(self) -> None:
        self.stage_may_end = asyncio.Event()
        self.write_may_end = asyncio.Event()
        self.staging = asyncio.Event()
        self.writing = asyncio.Event()
        self.stage_may_end.set()
        self.write_may_end.set()
        self.stage_error: BaseException | None = None
        self.write_error: BaseException | None = None

    async def stage(self) -> Staged:
        """Wait, then hand out a staged state."""
        self.staging.set()
        await self.stage_may_end.wait()
        if self.stage_error is not None:
            raise self.stage_error
        return self

    async def write(self, directory: Path) -> None:
        """Wait, then write one file."""
        self.writing.set()
        await self.write_may_end.wait()
        if self.write_error is not None:
            raise self.write_error
        files.write_durable(directory / "weights.bin", b"weights")

    async def load(self, directory: Path) -> None:
        """Nothing to load."""


class RecordingFence:
    """A fence that notes its calls and fails where it is told to."""

    def __init__(self, fail: str = "") -> None:
        self.calls: list[str] = []
        self.fail = fail
        self.hold = asyncio.Event()
        self.reached = asyncio.Event()

    async def _call(self, what: str) -> None:
        self.calls.append(what)
        if self.fail == f"hold {what}":
            self.reached.set()
            await self.hold.wait()
        if self.fail == what:
            raise FenceError("cut", f"worker 3 did not {what}")

    async def close(self, cut_id: str, timeout: float) -> None:
        """Note it."""
        await self._call("close")

    async def verify(self) -> None:
        """Note it."""
        await self._call("verify")

    async def reopen(self) -> None:
        """Note it."""
        self.calls.append("reopen")


def broken(captured: CapturedCut, parent: CutState | None) -> Sequence[Violation]:
    """Judge every cut that has groups as broken."""
    groups = tuple(record.group_id for record in captured.state.ledger)
    return [Violation("single_owner", "critical", "two owners", groups=groups)] if groups else []


def staged_row(key: RowKey) -> dict[str, Any]:
    """Return the content of a staged row, which tells whose it is, whatever the incarnation."""
    sequence = -1 if key.sequence is None else key.sequence
    return {"tokens": np.array([key.generation, key.attempt, sequence], dtype=np.int64)}


class Rig:
    """The primitives of one run, with one prompt group per call of :meth:`read`."""

    def __init__(
        self,
        path: Path,
        *,
        lmdb: bool = False,
        resume: bool = False,
        plane: Callable[[DataPlane], DataPlane] = lambda plane: plane,
        **options: Any,  # noqa: ANN401 - the checkpointer's
    ) -> None:
        self.hub = Hub(strict=True)
        self.seen = Recorder()
        self.hub.subscribe(self.seen)
        self.barrier = DataPlaneCheckpointBarrier(hub=self.hub)
        self.ledger = RolloutLedger(self.barrier)
        self.spares = SparePool(self.barrier)
        self.accounting = Accounting(self.barrier)
        self.run = RunFolder.open(path, resume=resume)
        incarnation = self.run.next_incarnation()
        store: DataPlane
        if lmdb:
            store = LmdbDataPlane(
                path / "rows", incarnation, tensors="numpy", map_bytes=64 << 20, hub=self.hub
            )
        else:
            store = MemoryDataPlane(incarnation, tensors="numpy", hub=self.hub)
        self.plane = plane(store)
        self.buffer = ReplayBuffer(self.barrier, self.ledger, self.plane)
        self.position = CommittedPosition(0, 0, exhausted=False, loader=None)
        self.cursor = -1
        self.trainer = HeldTrainer()
        self.step = 0
        self.saver = self.checkpointer(**options)

    def checkpointer(self, trainer: TrainerState | None = None, **options: Any) -> Checkpointer:  # noqa: ANN401 - the checkpointer's
        """Build a checkpointer over these primitives."""
        return Checkpointer(
            CutSources(
                barrier=self.barrier,
                sampler_state=self.sampler_state,
                position=lambda: self.position,
                accounting=self.accounting,
                spares=self.spares,
                buffer=self.buffer,
                ledger=self.ledger,
                dataplane=self.plane,
            ),
            self.trainer if trainer is None else trainer,
            self.run,
            **options,
        )

    def sampler_state(self) -> SamplerState:
        """Return the sampler's part of a cut."""
        return SamplerState("windowed", self.cursor, False, self.cursor + 1, self.cursor + 1)

    async def read(self) -> str:
        """Read a prompt, reserve its group and admit it; return the group's id."""
        ref = PromptRef(0, self.position.position, self.position.position)
        async with self.barrier.mutation("prompt_reservation") as cut:
            self.position = CommittedPosition(
                0, ref.position + 1, exhausted=False, loader={"at": ref.position}
            )
            self.accounting.read(cut, [ref])
            self.ledger.reserve_group(cut, GroupRecord(ref.group_id, self.cursor + 1, ref))
        async with self.barrier.mutation("admission") as cut:
            self.cursor += 1
            self.ledger.mark_group_admitted(cut, ref.group_id, target_step=None, start_version=self.step)
        return ref.group_id

    def put(self, group_id: str) -> list[RowKey]:
        """Put a group's final rows."""
        keys = [RowKey(self.plane.incarnation, group_id, number, 0) for number in range(GENERATIONS)]
        self.plane.put({key: {"tokens": np.arange(8) + key.generation} for key in keys})
        return keys

    def keys(
        self, group_id: str, rows: str, *, attempt: int = 0, incarnation: int | None = None
    ) -> list[RowKey]:
        """Return keys of a group: ``g0/c1 g1/final`` is the second chunk of generation 0, and 1's final row."""
        incarnation = self.plane.incarnation if incarnation is None else incarnation
        found = []
        for row in rows.split():
            generation, _, tail = row.partition("/")
            sequence = None if tail == "final" else int(tail[1:])
            found.append(RowKey(incarnation, group_id, int(generation[1:]), attempt, sequence))
        return found

    def stage(self, group_id: str, rows: str, *, attempt: int = 0) -> list[RowKey]:
        """Put staged rows of a group, see :meth:`keys`; a row's content tells which it is."""
        keys = self.keys(group_id, rows, attempt=attempt)
        self.plane.put({key: staged_row(key) for key in keys})
        return keys

    async def commit(self, group_id: str) -> BufferEntry:
        """Flip a group whose rows are put."""
        keys = [RowKey(self.plane.incarnation, group_id, number, 0) for number in range(GENERATIONS)]
        async with self.barrier.mutation("group_commit") as cut:
            return self.buffer.commit_group(
                cut, group_id, 0, keys=keys, generated_from=0, generated_to=0, stats={"reward": 0.5}
            )

    async def finished(self) -> str:
        """Read a prompt and take its group into the buffer; return the group's id."""
        group_id = await self.read()
        self.put(group_id)
        await self.commit(group_id)
        return group_id

    async def train(self, group_ids: Sequence[str]) -> None:
        """Train groups and clear their rows."""
        async with self.barrier.mutation("sample_clear") as cut:
            claim = self.buffer.claim_for_training(cut, group_ids)
            self.buffer.begin(claim)
            keys = self.buffer.finish(cut, claim)
            self.accounting.trained(cut, [entry.prompt for entry in claim.entries])
        self.step += 1
        self.run.journal.append("trained", self.run.incarnation, step=self.step, groups=group_ids)
        self.plane.clear(keys)

    async def save(self) -> SaveResult:
        """Save to the end."""
        result = await self.saver.save(step=self.step, trainer_version=self.step)
        if result.outcome == "pending":
            ended = await self.saver.wait()
            assert ended is not None
            return ended
        return result

    def names(self) -> list[str]:
        """Return what is under ``checkpoints``."""
        return sorted(path.name for path in self.run.checkpoints.iterdir())

    async def close(self) -> None:
        """Let everything go."""
        self.trainer.stage_may_end.set()
        self.trainer.write_may_end.set()
        await self.saver.close()
        self.plane.close()
        self.run.close()


class Disk:
    """Sees every file operation of a save, and can hold, fail or end it at one of them."""

    def __init__(self) -> None:
        self.operations: list[tuple[str, str]] = []
        self.threads: set[str] = set()
        self.fail: Callable[[str, Path], BaseException | None] = lambda _operation, _path: None
        self.reached = threading.Event()
        self.go_on = threading.Event()
        self.hold: Callable[[str, Path], bool] = lambda _operation, _path: False
        self.counts: Counter[str] = Counter()

    def before(self, operation: str, path: Path) -> None:
        """Stand in for ``files.before``."""
        self.operations.append((operation, path.name))
        self.counts[operation] += 1
        self.threads.add(threading.current_thread().name)
        error = self.fail(operation, path)
        if error is not None:
            raise error
        if self.hold(operation, path):
            self.reached.set()
            assert self.go_on.wait(30), "nobody let the operation go on"


@contextmanager
def watched_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    """Put a :class:`Disk` in the way of every file operation of a save."""
    disk = Disk()
    with monkeypatch.context() as patch:
        patch.setattr(files, "before", disk.before)
        yield disk
        disk.go_on.set()


async def until(event: threading.Event) -> None:
    """Wait for a thread's event on the loop."""
    assert await asyncio.to_thread(event.wait, 30), "the thread never got there"


def journal_events(journal: Journal) -> list[str]:
    """Return the events that a journal holds, synced."""
    from quiesce.checkpoint.journal import read_journal

    journal.sync()
    return [record.event for record in read_journal(journal.path)]
