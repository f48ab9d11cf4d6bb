"""The race of the protocol: what fires in the middle of a real save lands with one owner."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from quiesce.barrier import detached
from quiesce.checkpoint import write
from quiesce.checkpoint.cut import PARTS
from quiesce.dataplane import read_inventory
from tests.save_rig import GENERATIONS, Rig, until, watched_disk


@pytest.fixture(params=["memory", "lmdb"])
async def rig(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Rig]:
    """A run over each data plane that holds an instant."""
    rig = Rig(tmp_path / "run", lmdb=request.param == "lmdb")
    yield rig
    await rig.close()


def owners_on_disk(folder: Path) -> dict[str, list[str]]:
    """Return each group's owners, as the documents of a checkpoint say."""
    owners: dict[str, list[str]] = {}
    buffer = json.loads((folder / "buffer.json").read_text())
    for name in ("ready", "claimed"):
        for entry in buffer[name]:
            owners.setdefault(entry["group_id"], []).append("buffer")
    for record in json.loads((folder / "ledger.json").read_text())["groups"]:
        owners.setdefault(record["group_id"], []).append("ledger")
    return owners


async def test_a_commit_during_the_write_leaves_the_group_with_one_owner_on_disk(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save that is blocked mid-write has its cut: a commit that fires then lands in the next one."""
    buffered = await rig.finished()
    flying = await rig.read()
    with watched_disk(monkeypatch) as disk:
        disk.hold = lambda operation, path: operation == "create" and path.name == "buffer.json"
        await rig.saver.save(step=0, trainer_version=0)
        await until(disk.reached)
        rig.put(flying)
        await rig.commit(flying)
        disk.go_on.set()
        result = await rig.saver.wait()
    assert result is not None
    assert result.path is not None
    assert owners_on_disk(result.path) == {buffered: ["buffer"], flying: ["ledger"]}
    rows = read_inventory(result.path, ["rows-00000.safetensors"])
    assert {key.group_id for key in rows} == {buffered}
    after = await rig.save()
    assert after.path is not None
    assert owners_on_disk(after.path) == {buffered: ["buffer"], flying: ["buffer"]}


async def test_a_commit_that_waits_for_the_window_is_in_the_ledger_of_that_cut(rig: Rig) -> None:
    """A commit that asks while the window drains is served after it; the cut has the group in flight."""
    flying = await rig.read()
    rig.put(flying)
    async with rig.barrier.mutation("retry"):
        save = detached(rig.saver.save(step=0, trainer_version=0))
        await rig.seen.draining.wait()
        assert rig.barrier.statistics().phase == "drain"
        commit = detached(rig.commit(flying))
        await asyncio.sleep(0)
    await asyncio.gather(save, commit)
    result = await rig.saver.wait()
    assert result is not None
    assert result.path is not None
    assert owners_on_disk(result.path) == {flying: ["ledger"]}
    assert flying in rig.buffer


async def test_training_and_clearing_during_the_write_do_not_change_what_is_written(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group that is trained and cleared after the cut is in that checkpoint with all of its rows."""
    group = await rig.finished()
    with watched_disk(monkeypatch) as disk:
        disk.hold = lambda operation, path: operation == "mkdir" and ".tmp-" in path.name
        await rig.saver.save(step=0, trainer_version=0)
        await until(disk.reached)
        await rig.train([group])
        disk.go_on.set()
        result = await rig.saver.wait()
    assert result is not None
    assert result.outcome == "completed"
    assert result.rows == GENERATIONS
    assert result.path is not None
    assert owners_on_disk(result.path) == {group: ["buffer"]}


async def test_the_window_reads_the_six_parts_in_order_and_nothing_else(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between drain and reopening there are six captures; no file is touched before the window was left."""
    await rig.finished()
    with watched_disk(monkeypatch) as disk:
        touched: list[str] = []

        def look(operation: str, path: Path) -> None:
            if not path.name.startswith("lineage"):
                touched.append(rig.barrier.statistics().phase)

        disk.fail = look
        await rig.save()
    log = rig.seen.log
    inside = log[log.index("exclusive started") + 1 : log.index("exclusive completed")]
    assert inside == [f"captured {part}" for part in PARTS]
    assert touched
    assert "exclusive" not in touched


async def test_every_file_operation_happens_in_a_thread_of_the_savers_own(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the event loop nor its default executor touches a file."""

    async def write(directory: Path) -> None:
        """Write nothing: the trainer of this rig would do it on the loop."""

    monkeypatch.setattr(rig.trainer, "write", write)
    await rig.finished()
    with watched_disk(monkeypatch) as disk:
        await rig.save()
        await rig.train([next(iter(rig.buffer.ready())).group_id])
        await rig.save()
    assert {name.rpartition("-")[0] for name in disk.threads} <= {"quiesce-save", "quiesce-journal"}


async def test_a_plane_that_holds_no_instant_is_written_inside_the_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without an instant, the rows are written before the barrier reopens, and by nobody again later."""

    class NoInstant:
        holds_instant = False

        def __init__(self, plane: Any) -> None:  # noqa: ANN401 - whatever plane
            self._plane = plane

        def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever attribute
            return getattr(self._plane, name)

    rig = Rig(tmp_path / "run", plane=NoInstant)
    group, flying = await rig.finished(), await rig.read()
    staged = rig.stage(flying, "g0/c0 g0/c1 g1/final")
    rig.stage(flying, "g0/c3 g1/c0")  # after a gap, and beside a final row
    phases: list[str] = []
    real = write.write_rows

    def looking(*args: Any) -> Any:  # noqa: ANN401 - passed through
        phases.append(rig.barrier.statistics().phase)
        return real(*args)

    monkeypatch.setattr(write, "write_rows", looking)
    result = await rig.save()
    assert phases == ["exclusive"]
    assert result.outcome == "completed"
    assert result.rows == GENERATIONS + len(staged)
    assert result.path is not None
    assert owners_on_disk(result.path) == {group: ["buffer"], flying: ["ledger"]}
    await rig.close()
