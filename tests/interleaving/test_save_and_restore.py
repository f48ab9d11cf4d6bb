"""The real saving and restoring, file by file beside the run, under random schedules, and resumed."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import ParamSpec, TypeVar

import pytest

from quiesce.barrier import Cut
from quiesce.checkpoint import RunFolder, files, journal
from quiesce.checkpoint.restore import RestoredRun, RestoreTargets, load_newest, restore_into
from quiesce.checkpoint.saver import Checkpointer
from quiesce.checkpoint.trainer_state import Staged
from quiesce.explorer import explore, pause, pause_thread
from quiesce.threads import DaemonExecutor, controlled_by
from tests.interleaving.exploring import facts_of, record
from tests.interleaving.world import World

PROMPTS = 4
P = ParamSpec("P")
T = TypeVar("T")


@pytest.fixture(autouse=True)
def pieces(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let whatever runs beside a save overtake it before each of its file operations; no disk is waited for."""

    def before(operation: str, path: Path) -> None:
        pause_thread(f"{operation} {path.name}")

    monkeypatch.setattr(files, "before", before)
    monkeypatch.setattr(os, "fsync", lambda _fd: None)
    monkeypatch.setattr(journal, "DaemonExecutor", UncontrolledExecutor)
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


class UncontrolledExecutor(DaemonExecutor):
    """For the journal, whose owner waits for its thread without the loop when the folder is closed."""

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Use real threads."""
        with controlled_by(None):
            return super().submit(fn, *args, **kwargs)


class Weights:
    """The trainer's state: what it was trained on."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def stage(self) -> Staged:
        """Copy it."""
        staged = json.dumps(self._world.trained).encode()
        await pause("stage")
        return _Staged(staged)

    async def load(self, directory: Path) -> None:
        """Read it back."""
        self._world.trained = json.loads((directory / "weights.json").read_bytes())


class _Staged:
    def __init__(self, data: bytes) -> None:
        self._data = data

    async def write(self, directory: Path) -> None:
        """Write it."""
        await pause("write weights")
        files.write_durable(directory / "weights.json", self._data)


class SavingWorld(World):
    """A world that saves with the real checkpointer, between the steps of the real train pump."""

    saver: Checkpointer

    async def incarnation(self, folder: RunFolder, *, steps: int | None, resumed: bool) -> None:
        """Run so many steps, or to the end."""
        restored = None
        trainer = Weights(self)
        if resumed:
            loaded = load_newest(folder.path, hub=self.hub)
            restored = loaded.state
            self.monitor.owners = {
                **{item.group_id: "ledger" for item in restored.ledger},
                **{ref.group_id: "spares" for ref in restored.spares},
                **{entry.group_id: "buffer" for entry in restored.entries},
            }
            position = await self.source.seek(restored.position)
            await trainer.load(loaded.trainer_directory)

            def apply(_cut: Cut, run: RestoredRun) -> None:
                self.owners.position = position
                self.owners.next_admission_id = run.next_admission_id
                self.owners.step = run.step
                self.admission._committed = run.state.sampler.admissions  # noqa: SLF001 - along the lineage

            await restore_into(
                loaded,
                RestoreTargets(
                    barrier=self.barrier,
                    sampler=self.sampler,
                    accounting=self.accounting,
                    spares=self.spares,
                    buffer=self.buffer,
                    ledger=self.ledger,
                    dataplane=self.plane,
                    versions=self.versions,
                    admission=self.admission,
                    capacity=self.owners.capacity,
                    apply=apply,
                ),
                incarnation=self.plane.incarnation,
            )
            folder.record_restored(restored)
        self.saver = Checkpointer(
            self.sources(), trainer, folder, restored=restored, gate_window=self.gate_window
        )
        self.clears.start()
        if not resumed:
            await self._saved()
            await self.saver.wait()
        dispatching = asyncio.create_task(self.rollout_pump().run(), name="rollout pump")
        pump = self.train_pump(max_steps=steps)
        pump._between_steps = self._saved  # noqa: SLF001 - the real checkpointer in place of the world's
        await pump.run()
        if steps is None:
            await dispatching
        dispatching.cancel()
        await asyncio.wait({dispatching})
        await self.saver.wait()

    async def _saved(self) -> None:
        result = await self.saver.save(step=self.owners.step, trainer_version=self.versions.value)
        assert result.outcome in {"pending", "skipped"}, result
        assert not self.saver.last_failed or self.saver.last is None


@pytest.mark.parametrize("sampler", ["windowed", "weight_fifo", "ready_first", "in_order"])
def test_a_run_that_ends_at_a_step_and_is_resumed_trains_every_prompt_once(
    sampler: str, tmp_path: Path
) -> None:
    """Files are written while the run goes on; what the disk holds then is restored and run to its end."""
    numbers = itertools.count()

    async def scenario() -> None:
        path = tmp_path / str(next(numbers))
        options = {"prompts": PROMPTS, "batch": 2, "spare_prompts": 1, "max_attempts": 2}
        first = SavingWorld(sampler, **options)
        first.failing = lambda request: request.index == 1 and request.attempt == 0
        with RunFolder.open(path, resume=False) as folder:
            folder.next_incarnation()
            await first.incarnation(folder, steps=1, resumed=False)
        first.judging = False
        second = SavingWorld(sampler, incarnation=2, **options)
        with RunFolder.open(path, resume=True) as folder:
            assert folder.next_incarnation() == 2
            await second.incarnation(folder, steps=None, resumed=True)
            assert second.saver.last is not None
        second.ended()
        trained = second.accounting.statistics().trained
        assert trained + sum(second.accounting.statistics().dropped.values()) == PROMPTS

    report = explore(scenario, strategy="random", max_schedules=15, max_steps=20_000).check()
    record(
        "scenario",
        f"saved_and_resumed_{sampler}",
        stands_for="upstream: the recovery matrix; R3, R14; saving beside a run, then the real restore",
        **facts_of(report),
    )
