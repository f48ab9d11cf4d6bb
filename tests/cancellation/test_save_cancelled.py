"""A save that is cancelled, wherever it is: an open barrier, no pin, nothing left, one counted attempt."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from quiesce.barrier import detached
from quiesce.checkpoint import documents
from quiesce.checkpoint.cut import CutState
from tests.save_rig import RecordingFence, Rig, until, watched_disk


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    """A run with a fence."""
    rig = Rig(tmp_path / "run", fence=RecordingFence())
    yield rig
    await rig.close()


async def cancelled(task: asyncio.Task[Any]) -> None:
    """Cancel a task and see that it ends so."""
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def nothing_is_left(rig: Rig, *, attempts: int = 1) -> None:
    """Assert what holds after every cancelled attempt."""
    assert rig.barrier.statistics().phase == "open"
    assert sum(rig.barrier.statistics().active.values()) == 0
    assert rig.plane.statistics().open_snapshots == 0
    assert not [name for name in rig.names() if ".tmp-" in name]
    assert rig.seen.ended.count((0, "cancelled", "cancelled")) == 1
    assert len(rig.seen.ended) == attempts
    assert rig.saver.last_failed


async def test_while_it_waits_for_the_previous_write(rig: Rig) -> None:
    """The write goes on and is published; the attempt that waited is the one that is counted as cancelled."""
    rig.trainer.write_may_end.clear()
    await rig.saver.save(step=0, trainer_version=0)
    await rig.finished()
    task = asyncio.create_task(rig.saver.save(step=0, trainer_version=0))
    await rig.trainer.writing.wait()
    await cancelled(task)
    assert rig.seen.ended == [(0, "cancelled", "cancelled")]
    rig.trainer.write_may_end.set()
    result = await rig.saver.wait()
    assert result is not None
    assert result.outcome == "completed"
    assert rig.names() == ["step_0"]


@pytest.mark.parametrize("where", ["close", "verify"])
async def test_while_workers_are_fenced(tmp_path: Path, where: str) -> None:
    """The fence is reopened once, also when the cancellation came while it was being closed."""
    fence = RecordingFence(fail=f"hold {where}")
    rig = Rig(tmp_path / "run", fence=fence)
    await rig.finished()
    task = asyncio.create_task(rig.saver.save(step=0, trainer_version=0))
    await fence.reached.wait()
    await cancelled(task)
    assert fence.calls == (["close", "reopen"] if where == "close" else ["close", "verify", "reopen"])
    nothing_is_left(rig)
    await rig.close()


async def test_while_a_refused_cut_is_reopened(tmp_path: Path) -> None:
    """It ends cancelled, not refused: whoever gets a result goes on, and would outlive its cancellation."""
    fence = RecordingFence(fail="close")
    reopening, may_reopen = asyncio.Event(), asyncio.Event()

    async def reopen() -> None:
        fence.calls.append("reopen")
        reopening.set()
        await may_reopen.wait()

    fence.reopen = reopen  # type: ignore[method-assign] # a fence whose workers take their time
    rig = Rig(tmp_path / "run", fence=fence)
    await rig.finished()
    task = asyncio.create_task(rig.saver.save(step=0, trainer_version=0))
    await reopening.wait()
    await cancelled(task)
    may_reopen.set()
    await rig.saver.wait()
    assert fence.calls == ["close", "reopen"]
    nothing_is_left(rig)
    await rig.close()


async def test_while_it_drains(rig: Rig) -> None:
    """The slot that it waited for goes on undisturbed, and a slot that waited behind it gets in."""
    async with rig.barrier.mutation("retry"):
        task = detached(rig.saver.save(step=0, trainer_version=0))
        await rig.seen.draining.wait()
        assert rig.barrier.statistics().phase == "drain"
        behind = detached(rig.read())
        await asyncio.sleep(0)
        await cancelled(task)
        await behind
    nothing_is_left(rig)
    assert ("drain", "cancelled") in rig.seen.phases


async def test_while_rows_are_written_inside_the_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plane without an instant: the window stays shut until the thread ends, then everything is undone."""

    class NoInstant:
        holds_instant = False

        def __init__(self, plane: Any) -> None:  # noqa: ANN401 - whatever plane
            self._plane = plane

        def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever attribute
            return getattr(self._plane, name)

    rig = Rig(tmp_path / "run", plane=NoInstant)
    await rig.finished()
    with watched_disk(monkeypatch) as disk:
        disk.hold = lambda operation, path: operation == "mkdir" and ".tmp-" in path.name
        task = asyncio.create_task(rig.saver.save(step=0, trainer_version=0))
        await until(disk.reached)
        task.cancel()
        await asyncio.sleep(0)
        assert rig.barrier.statistics().phase == "exclusive"
        disk.go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
    await rig.saver.wait()
    nothing_is_left(rig)
    assert ("exclusive", "cancelled") in rig.seen.phases
    await rig.close()


async def test_while_the_trainer_is_staged(rig: Rig) -> None:
    """The snapshot that was taken already is released."""
    await rig.finished()
    rig.trainer.stage_may_end.clear()
    task = asyncio.create_task(rig.saver.save(step=0, trainer_version=0))
    await rig.trainer.staging.wait()
    assert rig.plane.statistics().open_snapshots == 1
    await cancelled(task)
    nothing_is_left(rig)
    assert rig.seen.phases[-1] == ("stage", "cancelled")


async def background(rig: Rig) -> asyncio.Task[Any]:
    """Return the task that writes."""
    (task,) = [task for task in asyncio.all_tasks() if task.get_name().startswith("quiesce-save-step")]
    return task


async def test_the_background_before_its_first_step(rig: Rig) -> None:
    """A task that is cancelled before it ran once never reaches a `finally` of its own."""
    await rig.finished()
    await rig.saver.save(step=0, trainer_version=0)
    await cancelled(await background(rig))
    nothing_is_left(rig)


async def test_the_background_while_a_thread_judges_the_cut(tmp_path: Path) -> None:
    """The pin is released only once the thread that reads through it has ended."""
    inside, go_on = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def judge(captured: Any, parent: Any) -> list[Any]:  # noqa: ANN401 - a cut, and the one before
        loop.call_soon_threadsafe(inside.set)
        asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result(30)
        assert not captured.snapshot.released
        return []

    rig = Rig(tmp_path / "run", verify=judge)
    await rig.finished()
    await rig.saver.save(step=0, trainer_version=0)
    await inside.wait()
    task = await background(rig)
    task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    nothing_is_left(rig)
    assert rig.seen.phases[-1] == ("verify", "cancelled")
    await rig.close()


@pytest.mark.parametrize("file", ["rows", "buffer.json"])
async def test_the_background_while_threads_write(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    """The folder is removed after the last thread that writes into it has ended."""
    await rig.finished()
    with watched_disk(monkeypatch) as disk:
        if file == "rows":
            real = documents.rows_metadata

            def held(state: CutState) -> dict[str, str]:
                disk.reached.set()
                assert disk.go_on.wait(30)
                return real(state)

            monkeypatch.setattr(documents, "rows_metadata", held)
        else:
            disk.hold = lambda operation, path: operation == "create" and path.name == file
        await rig.saver.save(step=0, trainer_version=0)
        await until(disk.reached)
        task = await background(rig)
        task.cancel()
        for _ in range(3):
            await asyncio.sleep(0)
        assert not task.done()
        assert [name for name in rig.names() if ".tmp-" in name]
        disk.go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
    nothing_is_left(rig)
    assert rig.seen.phases[-1] == ("write", "cancelled")


async def test_the_background_right_before_the_rename(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that publishes ends: the checkpoint is whole and there, and the attempt is counted once."""
    await rig.finished()
    with watched_disk(monkeypatch) as disk:
        disk.hold = lambda operation, path: operation == "rename" and path.name == "step_0"
        await rig.saver.save(step=0, trainer_version=0)
        await until(disk.reached)
        task = await background(rig)
        task.cancel()
        await asyncio.sleep(0)
        disk.go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
    nothing_is_left(rig)
    assert rig.names() == ["step_0"]


async def test_a_run_goes_on_saving_after_every_kind_of_cancellation(rig: Rig) -> None:
    """The next attempt finds nothing in its way."""
    await rig.finished()
    rig.trainer.stage_may_end.clear()
    task = asyncio.create_task(rig.saver.save(step=0, trainer_version=0))
    await rig.trainer.staging.wait()
    await cancelled(task)
    rig.trainer.stage_may_end.set()
    result = await rig.save()
    assert result.outcome == "completed"
    assert not rig.saver.last_failed
