"""Writing a cut into its temporary folder."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from quiesce.checkpoint import documents, write
from quiesce.checkpoint.cut import CapturedCut
from quiesce.checkpoint.fence import Fence, NoFence
from quiesce.checkpoint.shielding import finish, in_thread
from quiesce.dataplane import read_inventory, read_metadata
from quiesce.errors import MissingRowError
from quiesce.threads import DaemonExecutor
from tests.save_rig import GENERATIONS, Rig, until, watched_disk
from tests.unit.checkpoint.test_capture import captured


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    """A run in memory."""
    rig = Rig(tmp_path / "run")
    yield rig
    await rig.close()


@pytest.fixture
def threads() -> DaemonExecutor:
    """Threads to write in."""
    return DaemonExecutor("test-write", max_workers=4)


async def written(rig: Rig, found: CapturedCut, threads: DaemonExecutor) -> write.WrittenCut:
    """Write a cut to a folder of its own."""
    try:
        return await write.write_cut(rig.run.path / "cut", found, await rig.trainer.stage(), threads)
    finally:
        found.snapshot.release()


async def test_rows_carry_the_digest_of_the_ledger(rig: Rig, threads: DaemonExecutor) -> None:
    """Rows of one checkpoint cannot be put under another's documents without being found out."""
    await rig.finished()
    await rig.read()
    found = await captured(rig)
    cut = await written(rig, found, threads)
    metadata = read_metadata(cut.folder / "rows-00000.safetensors")
    assert metadata["ledger_count"] == "1"
    assert metadata["ledger_digest"] == documents.ledger_digest(found.state.ledger)
    assert metadata["cut_id"] == found.state.cut_id


async def test_only_counted_and_staged_rows_are_written(rig: Rig, threads: DaemonExecutor) -> None:
    """What ended, an attempt that was given up, a chunk after a gap and chunks beside a final row stay out."""
    ready, flying, retried, ended = (
        await rig.finished(),
        await rig.read(),
        await rig.read(),
        await rig.finished(),
    )
    async with rig.barrier.mutation("retry") as cut:
        rig.ledger.retry_group(cut, retried)
    async with rig.barrier.mutation("group_removal") as cut:
        rig.buffer.evict(cut, [ended])  # its rows wait for their clear
    rig.stage(flying, "g0/c0 g0/c1 g0/c3 g1/final g1/c0 g2/c1")
    rig.stage(retried, "g0/c0 g0/final")
    rig.stage(retried, "g1/c0", attempt=1)
    found = await captured(rig)
    assert {key.group_id for key in write.counted_rows(found.state)} == {ready}

    folder = await written(rig, found, threads)

    staged = {*rig.keys(flying, "g0/c0 g0/c1 g1/final"), *rig.keys(retried, "g1/c0", attempt=1)}
    (entry,) = rig.buffer.ready()
    assert set(read_inventory(folder.folder, folder.rows.names)) == {*entry.keys, *staged}
    assert folder.rows.rows == GENERATIONS + len(staged)
    assert folder.num_bytes == sum(path.stat().st_size for path in folder.folder.rglob("*") if path.is_file())


async def test_staged_rows_are_those_of_the_instant(rig: Rig, threads: DaemonExecutor) -> None:
    """What is put after the cut stays out, and what is cleared after it is written all the same."""
    flying, finishing = await rig.read(), await rig.read()
    chunks = rig.stage(flying, "g0/c0")
    before = rig.stage(finishing, "g0/c0")
    found = await captured(rig)
    rig.stage(flying, "g0/c1 g1/final")
    rig.stage(finishing, "g0/final")
    rig.plane.clear(before)

    folder = await written(rig, found, threads)

    assert set(read_inventory(folder.folder, folder.rows.names)) == {*chunks, *before}


async def test_keys_that_were_read_already_are_not_read_again(
    rig: Rig, threads: DaemonExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading all keys of a large store is most of what looking for staged rows costs."""
    rig.stage(await rig.read(), "g0/c0 g0/c1")
    found = await captured(rig)
    present = frozenset(found.snapshot.keys())
    monkeypatch.setattr(type(found.snapshot), "keys", lambda *_: pytest.fail("read again"))

    try:
        folder = await write.write_cut(
            rig.run.path / "cut", found, await rig.trainer.stage(), threads, present=present
        )
    finally:
        found.snapshot.release()

    assert folder.rows.rows == 2


async def test_a_row_that_the_index_names_and_the_cut_lacks_is_an_error(
    rig: Rig, threads: DaemonExecutor
) -> None:
    """It is never written short."""
    await rig.finished()
    (entry,) = rig.buffer.ready()
    rig.plane.clear(entry.keys[:1])
    with pytest.raises(MissingRowError, match=entry.group_id):
        await written(rig, await captured(rig), threads)


async def test_a_part_that_fails_is_reported_after_the_others_have_ended(
    rig: Rig, threads: DaemonExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody may remove the folder while a thread still writes into it."""
    await rig.finished()
    found = await captured(rig)
    rig.trainer.write_error = OSError(errno.ENOSPC, "full")
    with watched_disk(monkeypatch) as disk:
        disk.hold = lambda operation, path: operation == "fsync" and path.name == "ledger.json"
        task = asyncio.create_task(written(rig, found, threads))
        await until(disk.reached)
        assert rig.trainer.writing.is_set()
        assert not task.done()
        disk.go_on.set()
        with pytest.raises(OSError, match="full"):
            await task


async def test_what_a_trainer_wrote_in_folders_of_its_own_is_listed(
    rig: Rig, threads: DaemonExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shards of several workers may lie in several folders; each file is synced and hashed."""

    async def several(directory: Path) -> None:
        """Write two files in two folders."""
        (directory / "rank0").mkdir()
        (directory / "rank0" / "a.bin").write_bytes(b"a")
        (directory / "b.bin").write_bytes(b"b")

    monkeypatch.setattr(rig.trainer, "write", several)
    with watched_disk(monkeypatch) as disk:
        cut = await written(rig, await captured(rig), threads)
    names = {file.name for file in cut.files}
    assert {"trainer/rank0/a.bin", "trainer/b.bin"} <= names
    assert ("fsync_folder", "rank0") in disk.operations
    assert ("fsync", "a.bin") in disk.operations


async def test_a_call_in_a_thread_is_awaited_through_every_cancellation(threads: DaemonExecutor) -> None:
    """Cancelled twice, it still ends with its thread; a failure in there is the cause of the cancellation."""
    loop = asyncio.get_running_loop()
    read_end, write_end = os.pipe()

    def work() -> None:
        os.read(read_end, 1)
        raise LookupError("inside")

    task = loop.create_task(in_thread(threads, work))
    for _ in range(2):
        await asyncio.sleep(0)
        task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    os.write(write_end, b"x")
    with pytest.raises(asyncio.CancelledError) as raised:
        await task
    assert isinstance(raised.value.__cause__, LookupError)
    os.close(read_end)
    os.close(write_end)


async def test_a_future_that_ended_is_returned_without_waiting() -> None:
    """The result passes through, as does what it raised."""
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    future.set_result(3)
    assert await finish(future) == 3
    failed: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    failed.set_exception(LookupError("inside"))
    with pytest.raises(LookupError):
        await finish(failed)


async def test_a_run_without_workers_has_a_fence_that_is_always_closed() -> None:
    """It is a fence like any other, and lets every cut through."""
    fence: Fence = NoFence()
    await fence.close("cut", 1.0)
    await fence.verify()
    await fence.reopen()
