"""Every file operation of a save fails in turn: the attempt is counted for the right reason, and nothing is lost."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import pytest

from quiesce.checkpoint.audit import audit
from quiesce.checkpoint.restore import load_newest
from quiesce.checkpoint.runfolder import RunFolder
from quiesce.errors import QuiesceError
from quiesce.types import RowKey
from tests.crash.lives import Life
from tests.crash.operations import Operation, Watch
from tests.save_rig import Rig, until

CODES = [(errno.ENOSPC, "disk"), (errno.EIO, "io"), (errno.EROFS, "permission")]
CHECKPOINTS = "run/checkpoints"


class Failing:
    """Fails operations of one kind on one path, each time, as a full or a broken disk does."""

    def __init__(self, root: Path, fault: Operation | None, code: int = 0) -> None:
        self.fault = fault
        self.code = code
        self.hits = 0
        self.watch = Watch(root, before=self._before, after=self._after)

    def _before(self, operation: Operation) -> None:
        if operation.kind != "close":
            self._fail(operation)

    def _after(self, operation: Operation) -> None:
        # A close that reports an error has closed all the same.
        if operation.kind == "close":
            self._fail(operation)

    def _fail(self, operation: Operation) -> None:
        fault = self.fault
        if fault is None or _name(operation) != _name(fault):
            return
        self.hits += 1
        raise OSError(self.code, os.strerror(self.code), operation.path)


def _name(operation: Operation) -> tuple[str, str]:
    """Return what makes two operations meet the same fault."""
    label = operation.label
    # Publishing and retiring sync the same folder, but only one of the two makes an attempt fail.
    alike = label if operation.path == CHECKPOINTS else label.rpartition(" #")[0]
    return operation.kind, alike


@pytest.fixture
async def life(tmp_path: Path) -> AsyncIterator[Life]:
    """A life that has published two checkpoints and has something new to save."""
    life = Life(tmp_path / "run", resume=False)
    await life.save()
    for _ in range(3):
        await life.rig.finished()
    await life.work()
    await life.save()
    await life.work()
    yield life
    await life.close()


async def operations_of_a_save(life: Life, tmp_path: Path) -> list[Operation]:
    """Return what a save of this life does, by saving once; the next one is a step later."""
    watch = Watch(tmp_path)
    with watch.installed():
        assert (await life.save()).outcome == "completed"
    await life.work()
    found = {_name(operation): operation for operation in reversed(watch.seen)}
    return [operation for operation in watch.seen if found[_name(operation)] is operation]


def renumbered(operation: Operation, step: int) -> Operation:
    """Return the same operation of a save of another step, two of which are kept."""
    changed = operation
    for old, new in (("step_2", f"step_{step}"), ("step_0", f"step_{step - KEPT}")):
        changed = Operation(
            changed.kind,
            changed.path.replace(old, new),
            changed.target.replace(old, new),
            number=changed.number,
        )
    return changed


KEPT = 2


@pytest.mark.parametrize("code,reason", CODES)
async def test_every_operation_that_fails_costs_one_attempt_and_nothing_else(
    life: Life, tmp_path: Path, tell: Callable[[str], None], code: int, reason: str
) -> None:
    """No space, an I/O error, a read-only file system, at each operation of a save and a retention in turn."""
    operations = await operations_of_a_save(life, tmp_path)
    faults = 0
    for operation in operations:
        step = life.rig.step
        fault = renumbered(operation, step)
        failing = Failing(tmp_path, fault, code)
        published = [f"step_{step - 2}", f"step_{step - 1}"]
        failures = life.rig.saver.statistics().retention_failures

        with failing.watch.installed():
            result = await life.save()

        said = (
            f"{fault.label} with {errno.errorcode[code]}: {result.outcome} {result.reason} {result.error!r}"
        )
        faults += 1
        if result.outcome == "completed":
            # What fails after the rename is durable is no failure of the save: deleting the oldest, or a line of the
            # journal that stays queued.
            retired = ("step_" in operation.path and ".tmp" not in operation.path) or operation.number == 1
            assert retired or "lineage" in operation.path, said
            assert life.rig.saver.statistics().retention_failures == failures + retired, said
        else:
            assert failing.hits, said
            assert (result.outcome, result.reason) == ("failed", reason), said
            assert life.rig.saver.last_failed
            left = [str(name) for name in life.rig.run.published()]
            if operation.kind == "fsync" and operation.path == CHECKPOINTS:
                assert left[:3] == [*published, f"step_{step}"], said  # whole, but perhaps not durable
            else:
                assert left == published, said
                assert load_newest(life.rig.run.path).state.step == step - 1, said
            assert life.rig.plane.statistics().open_snapshots == 0
            assert life.rig.barrier.statistics().phase == "open"
            assert (await life.save()).outcome == "completed", said
        await life.work()
        while list(map(str, life.rig.run.published())) != [
            f"step_{life.rig.step - 2}",
            f"step_{life.rig.step - 1}",
        ]:
            assert (await life.save()).outcome == "completed"
            await life.work()
    tell(f"{len(operations)} operations, {faults} faults")
    assert len(operations) > 60
    assert audit(life.rig.run.path).ok


async def test_every_operation_of_a_start_that_fails_is_a_named_error(
    life: Life, tmp_path: Path, tell: Callable[[str], None]
) -> None:
    """A start on a failing disk ends with an error, not with a loss: the next start goes on from the same checkpoint."""
    await life.save()
    await life.close()
    path = life.rig.run.path
    cut = load_newest(path).state.cut_id
    listing = Watch(tmp_path)

    def start(watch: Watch) -> str:
        with watch.installed(), RunFolder.open(path, resume=True) as folder:
            folder.next_incarnation()
            state = load_newest(path).state
            folder.record_restored(state)
            return state.cut_id

    assert start(listing) == cut
    known = list({_name(operation): operation for operation in listing.seen}.values())
    refused = 0
    for operation in known:
        for code, _ in CODES:
            failing = Failing(tmp_path, operation, code)
            with pytest.raises((QuiesceError, OSError), match="run"):
                start(failing.watch)
            refused += 1
            assert failing.hits, operation.label
            assert start(Watch(tmp_path)) == cut, operation.label
    tell(f"{len(known)} operations, {refused} refused starts")
    assert refused == len(known) * len(CODES)
    assert audit(path).ok


@pytest.mark.parametrize(
    "name",
    ["rows-00000.safetensors", "trainer/model-00001-of-00001.safetensors", "manifest.json", "checkpoints"],
)
async def test_a_slow_sync_holds_nobody_but_the_save(life: Life, tmp_path: Path, name: str) -> None:
    """While one fsync takes its time, groups are read, finished and trained; the checkpoint is of the cut all the same."""
    reached, go_on = threading.Event(), threading.Event()

    def wait(operation: Operation) -> None:
        if operation.kind == "fsync" and operation.path.endswith(name) and not reached.is_set():
            reached.set()
            assert go_on.wait(30), "nobody let the sync go on"

    step, groups = life.rig.step, {entry.group_id for entry in life.rig.buffer.ready()}
    with Watch(tmp_path, before=wait).installed():
        saving = asyncio.create_task(life.save())
        await until(reached)
        for _ in range(2):
            await life.work()
        assert not saving.done()
        go_on.set()
        result = await saving

    assert result.outcome == "completed"
    state = load_newest(life.rig.run.path).state
    assert state.step == step
    assert life.rig.step == step + 2
    assert {entry.group_id for entry in state.entries} == groups


async def test_a_full_map_waits_for_the_save_and_loses_nothing(tmp_path: Path) -> None:
    """A put into a full LMDB map stands still while a checkpoint pins old rows, and is done once they are written."""
    rig = Rig(tmp_path / "run", lmdb=True)
    await rig.save()
    group = await rig.finished()

    def fill(keys: list[RowKey]) -> None:
        for key in keys:
            rig.plane.put({key: {"x": np.full(1 << 17, key.generation)}})  # 1 MiB each

    held = [RowKey(1, "filler", number, 0) for number in range(40)]
    fill(held)
    reached, go_on = threading.Event(), threading.Event()

    def wait(operation: Operation) -> None:
        if operation.kind == "create" and operation.path.endswith("rows-00000.safetensors"):
            reached.set()
            assert go_on.wait(30), "nobody let the write go on"

    with Watch(tmp_path, before=wait).installed():
        saving = asyncio.create_task(rig.save())
        await until(reached)
        rig.plane.clear(held)  # the pages stay the snapshot's
        more = [RowKey(1, "more", number, 0) for number in range(40)]
        filling = asyncio.create_task(asyncio.to_thread(fill, more))
        while not rig.plane.statistics().blocked_writers:
            assert not filling.done()
            await asyncio.to_thread(threading.Event().wait, 0.01)
        go_on.set()
        result = await saving
        await filling

    assert result.outcome == "completed"
    assert rig.plane.missing(more) == ()
    assert {key.group_id for key, _ in load_newest(rig.run.path).rows(tensors="numpy")} == {group}
    await rig.close()
