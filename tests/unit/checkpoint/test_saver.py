"""What one attempt to save does, and what it leaves behind however it ends."""

from __future__ import annotations

import asyncio
import gc
import json
import subprocess
import sys
import weakref
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from quiesce.barrier import detached
from quiesce.checkpoint import saver as saver_module
from quiesce.checkpoint.cut import CapturedCut, CutState
from quiesce.checkpoint.documents import parse_manifest
from quiesce.checkpoint.retention import is_usable
from quiesce.errors import (
    ClaimError,
    ConfigError,
    DrainTimeoutError,
    IncarnationSupersededError,
    LockOrderError,
    PreviousWriteError,
    TrainerStateError,
)
from quiesce.invariants import Violation
from quiesce.telemetry.collector import QuiesceCollector
from quiesce.telemetry.metrics import MetricsObserver
from quiesce.types import PHASES, GroupRecord, RowKey
from tests.save_rig import GENERATIONS, RecordingFence, Rig, broken, journal_events, watched_disk


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    """A run in memory."""
    rig = Rig(tmp_path / "run")
    yield rig
    await rig.close()


def open_pins(rig: Rig) -> int:
    """Return how many snapshots are not released."""
    return rig.plane.statistics().open_snapshots


async def test_a_save_publishes_a_checkpoint_whose_every_file_is_in_its_manifest(rig: Rig) -> None:
    """The manifest names each file with its real size and digest, and nothing else lies in the folder."""
    await rig.finished()
    result = await rig.save()
    assert (result.outcome, result.reason) == ("completed", "")
    assert result.path == rig.run.checkpoints / "step_0"
    assert is_usable(result.path)
    manifest = parse_manifest((result.path / "manifest.json").read_bytes())
    there = {path.relative_to(result.path).as_posix() for path in result.path.rglob("*") if path.is_file()}
    assert there == {file.name for file in manifest.files} | {"manifest.json"}
    assert manifest.groups == {"ledger": 0, "spares": 0, "buffer": 1, "training": 0}
    assert result.num_bytes == sum(file.size for file in manifest.files)


async def test_every_phase_fires_once_in_order(rig: Rig) -> None:
    """Phases end as completed, in the order in which an attempt goes through them."""
    await rig.save()
    order = ["fence", "drain", "exclusive", "stage", "verify", "write", "publish"]
    assert rig.seen.started == order
    assert rig.seen.phases == [(phase, "completed") for phase in order]
    assert set(order) == set(PHASES)
    assert rig.seen.ended == [(0, "completed", "")]
    assert sorted(rig.seen.stalls) == ["fence", "stage", "window"]


async def test_a_save_returns_as_soon_as_the_trainer_is_staged(rig: Rig) -> None:
    """Verifying, writing and publishing do not hold the train pump."""
    rig.trainer.write_may_end.clear()
    result = await rig.saver.save(step=0, trainer_version=0)
    assert result.outcome == "pending"
    assert rig.seen.ended == []
    assert rig.saver.statistics().writing
    rig.trainer.write_may_end.set()
    ended = await rig.saver.wait()
    assert ended is not None
    assert ended.outcome == "completed"
    assert not rig.saver.statistics().writing


async def test_a_save_with_nothing_changed_is_skipped_before_anything_is_fenced(tmp_path: Path) -> None:
    """Step, version and mutation version are the last published cut's: counted, and nobody is disturbed."""
    fence = RecordingFence()
    rig = Rig(tmp_path / "run", fence=fence)
    await rig.finished()
    await rig.save()
    fence.calls.clear()
    rig.seen.log.clear()
    result = await rig.save()
    assert (result.outcome, result.reason) == ("skipped", "nothing_changed")
    assert fence.calls == []
    assert rig.seen.log == []
    assert rig.names() == ["step_0"]
    assert not rig.saver.last_failed
    assert rig.seen.ended == [(0, "completed", ""), (0, "skipped", "nothing_changed")]
    await rig.close()


async def test_a_save_that_is_not_needed_once_the_write_before_has_ended_is_skipped(tmp_path: Path) -> None:
    """Asked after the wait and not before, and nobody is fenced; the next save is a save again."""
    fence = RecordingFence()
    rig = Rig(tmp_path / "run", fence=fence)
    rig.trainer.write_may_end.clear()
    assert (await rig.saver.save(step=0, trainer_version=0)).outcome == "pending"
    await rig.finished()
    closed, stopping, asked = len(fence.calls), False, []

    def unless() -> bool:
        asked.append(rig.saver.statistics().writing)
        return stopping

    waiting = asyncio.create_task(rig.saver.save(step=1, trainer_version=1, unless=unless))
    await asyncio.sleep(0)
    assert rig.saver._lock.locked()  # noqa: SLF001 - it waits for the write
    stopping = True
    rig.trainer.write_may_end.set()
    result = await waiting

    assert (result.outcome, result.reason) == ("skipped", "not_needed")
    assert asked == [False]
    assert len(fence.calls) == closed
    assert not rig.saver.last_failed
    assert rig.names() == ["step_0"]
    assert (await rig.saver.save(step=1, trainer_version=1, unless=lambda: False)).outcome == "pending"
    await rig.close()


async def test_a_save_after_a_failed_one_is_not_skipped(rig: Rig) -> None:
    """Only a published cut counts as the last one."""
    rig.trainer.write_error = OSError(5, "io")
    assert (await rig.save()).outcome == "failed"
    rig.trainer.write_error = None
    assert (await rig.save()).outcome == "completed"


async def test_a_further_cut_at_a_step_is_published_beside_the_first(tmp_path: Path) -> None:
    """A changed state at the same step gets the next serial; nothing is replaced."""
    rig = Rig(tmp_path / "run", keep=9)
    await rig.save()
    first = (rig.run.checkpoints / "step_0" / "manifest.json").read_bytes()
    for expected in ("step_0.1", "step_0.2"):
        await rig.finished()
        result = await rig.save()
        assert result.path == rig.run.checkpoints / expected
    assert (rig.run.checkpoints / "step_0" / "manifest.json").read_bytes() == first
    await rig.close()


async def test_each_cut_names_the_one_before_it(rig: Rig) -> None:
    """The parent of a cut is the last published cut of the lineage."""
    first = await rig.save()
    group = await rig.finished()
    await rig.train([group])
    second = await rig.save()
    assert second.path is not None
    manifest = parse_manifest((second.path / "manifest.json").read_bytes())
    assert manifest.parent_cut == first.cut_id
    assert journal_events(rig.run.journal) == ["started", "published", "trained", "published"]


async def test_a_next_save_waits_for_the_write_before_it_fences_anything(tmp_path: Path) -> None:
    """While one checkpoint is written, the next attempt has closed no fence and opened no window."""
    fence = RecordingFence()
    rig = Rig(tmp_path / "run", fence=fence)
    rig.trainer.write_may_end.clear()
    await rig.saver.save(step=0, trainer_version=0)
    await rig.finished()
    fence.calls.clear()
    second = asyncio.create_task(rig.saver.save(step=0, trainer_version=0))
    await rig.trainer.writing.wait()
    for _ in range(5):
        await asyncio.sleep(0)
    assert not second.done()
    assert fence.calls == []
    assert rig.barrier.statistics().phase == "open"
    rig.trainer.write_may_end.set()
    assert (await second).outcome == "pending"
    assert "previous_write" in rig.seen.stalls
    await rig.close()


async def test_two_saves_at_once_are_both_published_one_after_the_other(rig: Rig) -> None:
    """Requests without a pause between them wait for each other; none hangs, each is counted."""
    await rig.finished()
    results = await asyncio.gather(
        rig.saver.save(step=0, trainer_version=0), rig.saver.save(step=0, trainer_version=0)
    )
    await rig.saver.wait()
    assert [result.outcome for result in results] == ["pending", "skipped"]
    assert len(rig.seen.ended) == 2


async def test_a_write_that_hangs_refuses_the_next_attempt(tmp_path: Path) -> None:
    """Past its deadline the attempt is refused, named and counted, and training goes on."""
    rig = Rig(tmp_path / "run", previous_write_timeout=0.01)
    rig.trainer.write_may_end.clear()
    await rig.saver.save(step=0, trainer_version=0)
    result = await rig.saver.save(step=0, trainer_version=0)
    assert (result.outcome, result.reason) == ("refused", "previous_write")
    assert isinstance(result.error, PreviousWriteError)
    await rig.close()
    assert rig.seen.ended == [(0, "refused", "previous_write"), (0, "completed", "")]


async def test_a_drain_timeout_is_a_failed_attempt_that_leaves_everything_open(tmp_path: Path) -> None:
    """A slot that stays open costs this attempt only, and is named."""
    fence = RecordingFence()
    rig = Rig(tmp_path / "run", drain_timeout=0.01, fence=fence)
    async with rig.barrier.mutation("retry"):
        result = await detached(rig.saver.save(step=0, trainer_version=0))
    assert (result.outcome, result.reason) == ("failed", "drain_timeout")
    assert isinstance(result.error, DrainTimeoutError)
    assert fence.calls == ["close", "reopen"]
    assert rig.seen.phases == [("fence", "completed"), ("drain", "failed")]
    assert rig.barrier.statistics().phase == "open"
    assert rig.names() == []
    assert rig.saver.last_failed
    await rig.close()


@pytest.mark.parametrize("where", ["close", "verify"])
async def test_a_worker_that_is_not_fenced_refuses_the_cut_and_is_reopened(
    tmp_path: Path, where: str
) -> None:
    """Whether closing fails or the proof after the snapshot: no checkpoint, no pin, an open fence."""
    fence = RecordingFence(fail=where)
    rig = Rig(tmp_path / "run", fence=fence)
    await rig.finished()
    result = await rig.save()
    assert (result.outcome, result.reason) == ("refused", "error")
    assert "worker 3" in str(result.error)
    assert fence.calls[-1] == "reopen"
    assert fence.calls.count("reopen") == 1
    assert open_pins(rig) == 0
    assert rig.names() == []
    await rig.close()


async def test_the_fence_is_verified_before_it_is_reopened_and_reopened_before_staging(
    tmp_path: Path,
) -> None:
    """Workers wait for the window, not for the trainer's copy."""
    fence = RecordingFence()
    rig = Rig(tmp_path / "run", fence=fence)
    rig.trainer.stage_may_end.clear()
    save = asyncio.create_task(rig.saver.save(step=0, trainer_version=0))
    await rig.trainer.staging.wait()
    assert fence.calls == ["close", "verify", "reopen"]
    rig.trainer.stage_may_end.set()
    await save
    await rig.close()


@pytest.mark.parametrize("error", [TrainerStateError("model", "sparse"), MemoryError("no room")])
async def test_a_trainer_that_cannot_be_staged_is_a_failed_attempt(rig: Rig, error: Exception) -> None:
    """The run goes on, the snapshot is released, and nothing is written."""
    await rig.finished()
    rig.trainer.stage_error = error
    result = await rig.save()
    assert (result.outcome, result.reason) == ("failed", "error")
    assert result.error is not None
    assert result.error.__cause__ is error
    assert open_pins(rig) == 0
    assert rig.names() == []
    assert rig.seen.phases[-1] == ("stage", "failed")


async def test_a_cut_inside_an_optimizer_step_is_a_bug_that_is_raised_and_counted(rig: Rig) -> None:
    """A begun claim cannot be captured: the caller's error is not swallowed, and the barrier reopens."""
    group = await rig.finished()
    async with rig.barrier.mutation("sample_clear") as cut:
        rig.buffer.begin(rig.buffer.claim_for_training(cut, [group]))
    with pytest.raises(ClaimError):
        await rig.saver.save(step=0, trainer_version=0)
    assert rig.seen.ended == [(0, "failed", "error")]
    assert rig.barrier.statistics().phase == "open"
    assert open_pins(rig) == 0


async def test_a_save_inside_a_section_is_refused_before_it_is_an_attempt(rig: Rig) -> None:
    """A save would drain the very slot that it was called from."""
    async with rig.barrier.mutation("retry"):
        with pytest.raises(LockOrderError, match="a save"):
            await rig.saver.save(step=0, trainer_version=0)
    assert rig.seen.ended == []


async def test_an_unstarted_claim_is_captured_as_the_buffers(rig: Rig) -> None:
    """Its step will be taken again after a restore, so its groups and rows are in the checkpoint."""
    group = await rig.finished()
    async with rig.barrier.mutation("sample_clear") as cut:
        rig.buffer.claim_for_training(cut, [group])
    result = await rig.save()
    assert result.path is not None
    assert json.loads((result.path / "buffer.json").read_text())["claimed"][0]["group_id"] == group
    assert result.rows == 2


# ------------------------------------------------------------------------------------------------- suspects


async def test_a_cut_that_breaks_a_critical_invariant_is_kept_as_a_suspect_and_not_published(
    tmp_path: Path,
) -> None:
    """The last good checkpoint stays the newest, and the groups at fault are reported for booking."""
    told: list[Violation] = []
    rig = Rig(tmp_path / "run", verify=broken, on_suspect=told.extend)
    good = await rig.save()
    group = await rig.read()
    result = await rig.save()
    assert (result.outcome, result.reason) == ("refused", "invariant")
    assert result.path == rig.run.checkpoints / "step_0.suspect"
    assert [name.step for name in rig.run.published()] == [0]
    assert rig.names() == ["step_0", "step_0.suspect"]
    assert told[0].groups == (group,)
    assert rig.seen.violations == ["single_owner"]
    assert rig.saver.last_failed
    assert is_usable(result.path)
    assert json.loads((result.path / "violations.json").read_text())[0]["invariant"] == "single_owner"
    assert open_pins(rig) == 0
    manifest = parse_manifest((result.path / "manifest.json").read_bytes())
    assert manifest.parent_cut == good.cut_id
    await rig.close()


async def test_a_cut_that_lost_rows_is_kept_with_those_that_are_left(tmp_path: Path) -> None:
    """Rows cleared behind the index's back break rows_present; the suspect holds the rows that are there."""
    told: list[Violation] = []
    rig = Rig(tmp_path / "run", verify=None, on_suspect=told.extend)
    try:
        kept, lost = await rig.finished(), await rig.finished()
        gone = rig.buffer.find(lost)
        assert gone is not None
        rig.plane.clear(gone.keys)

        result = await rig.save()

        assert (result.outcome, result.reason) == ("refused", "invariant")
        assert result.path is not None
        assert result.path.name.endswith(".suspect")
        assert result.rows == len(kept_entry.keys if (kept_entry := rig.buffer.find(kept)) else ())
        assert {(found.invariant, found.groups) for found in told} == {("rows_present", (lost,))}
    finally:
        await rig.close()


async def evicted(rig: Rig) -> list[RowKey]:
    """Drop a ready group; return the keys of its rows, which nobody owns and nobody has cleared."""
    group = await rig.finished()
    async with rig.barrier.mutation("group_removal") as cut:
        (entry,) = rig.buffer.evict(cut, [group])
        rig.accounting.dropped(cut, [entry.prompt], "evicted")
    return list(entry.keys)


async def test_a_row_that_nobody_owns_and_nobody_clears_is_reported(tmp_path: Path) -> None:
    """It costs room and refuses nothing; a group in flight owns what its attempt has put."""
    rig = Rig(tmp_path / "run", settling=list)
    await evicted(rig)
    rig.stage(await rig.read(), "g0/c0 g0/c2 g1/final g1/c0")

    result = await rig.save()

    assert result.outcome == "completed"
    assert rig.seen.violations == ["rows_not_orphaned"]
    assert len(result.violations[0].evidence["orphans"]) == GENERATIONS
    await rig.close()


async def test_rows_whose_clear_was_queued_at_the_cut_are_no_orphans(tmp_path: Path) -> None:
    """They are cleared as soon as the fence reopens, long before the cut is judged: the queue was read before."""
    queue: list[RowKey] = []
    fence = RecordingFence()
    rig = Rig(tmp_path / "run", fence=fence, settling=lambda: tuple(queue))

    async def reopen() -> None:
        fence.calls.append("reopen")
        rig.plane.clear(queue)
        queue.clear()

    fence.reopen = reopen  # type: ignore[method-assign] # a fence that lets a clear through at once
    queue += await evicted(rig)

    result = await rig.save()

    assert (result.outcome, queue) == ("completed", [])
    assert rig.seen.violations == []
    await rig.close()


async def test_a_clear_that_ends_inside_the_window_explains_its_rows(tmp_path: Path) -> None:
    """No fence holds it back, as of a worker that was given up: the snapshot has its rows, the queue afterwards has not."""
    reads: list[list[RowKey]] = []
    rig = Rig(tmp_path / "run", settling=lambda: reads.pop(0))
    reads += [await evicted(rig), []]

    await rig.save()

    assert (reads, rig.seen.violations) == ([], [])
    await rig.close()


async def test_rows_that_were_handed_over_while_the_window_drained_are_no_orphans(tmp_path: Path) -> None:
    """A slot that was open when the save began still ended a group's ownership."""
    reads: list[list[RowKey]] = []
    rig = Rig(tmp_path / "run", settling=lambda: reads.pop(0))
    reads += [[], await evicted(rig)]

    await rig.save()

    assert (reads, rig.seen.violations) == ([], [])
    await rig.close()


async def test_what_waits_for_a_clear_is_read_outside_the_window_and_inside_the_fence(tmp_path: Path) -> None:
    """The window is not longer for it, and no clear can end between the instant and the second read."""
    at: list[tuple[str, ...]] = []
    fence = RecordingFence()

    def read() -> list[RowKey]:
        at.append((*fence.calls, saving.barrier.statistics().phase))
        return []

    saving = Rig(tmp_path / "run", fence=fence, settling=read)
    await saving.save()

    assert at == [("close", "open")] * 2
    assert fence.calls == ["close", "verify", "reopen"]
    await saving.close()


async def test_a_queue_that_cannot_be_read_costs_no_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said in the log, and no row is taken for an orphan."""

    def broken_queue() -> list[RowKey]:
        raise LookupError("no queue")

    rig = Rig(tmp_path / "run", settling=broken_queue)
    await evicted(rig)

    result = await rig.save()

    assert (result.outcome, rig.seen.violations) == ("completed", [])
    assert "could not be read" in caplog.text
    await rig.close()


async def test_keys_are_let_go_of_once_the_rows_are_written(rig: Rig) -> None:
    """Those of a large store are a large set: read once, to judge the cut and to write it, and not kept any longer."""
    known: dict[str, bool] = {}

    class Looking:
        def phase_started(self, _cut_id: str, phase: str) -> None:
            attempt = rig.saver._writing  # noqa: SLF001 - to see what it holds
            if attempt is not None:
                known[phase] = attempt.present is not None

    rig.hub.subscribe(Looking())
    await rig.finished()

    await rig.save()

    assert known == {"verify": False, "write": True, "publish": False}


async def test_one_suspect_is_kept(tmp_path: Path) -> None:
    """A later suspect takes the place of the one before, whatever their steps."""
    rig = Rig(tmp_path / "run", verify=broken)
    await rig.save()
    await rig.read()
    await rig.save()
    rig.step = 1
    second = await rig.save()
    assert second.outcome == "refused"
    assert rig.names() == ["step_0", "step_1.suspect"]
    await rig.close()


async def test_a_cut_after_the_fault_was_booked_is_judged_on_its_own(tmp_path: Path) -> None:
    """One lost prompt does not end saving for good."""
    rig = Rig(tmp_path / "run", verify=broken)
    await rig.save()
    group = await rig.read()
    assert (await rig.save()).outcome == "refused"
    async with rig.barrier.mutation("group_removal") as cut:
        record = rig.ledger.take_group(cut, group, target="dropped", reason="violation")
        rig.accounting.dropped(cut, [record.prompt], "violation")
    result = await rig.save()
    assert result.outcome == "completed"
    assert not rig.saver.last_failed
    await rig.close()


async def test_the_real_invariants_refuse_a_group_with_two_owners(rig: Rig) -> None:
    """Without any injected judge, an overlap of buffer and ledger is found over the captured cut."""
    group = await rig.finished()
    entry = rig.buffer.find(group)
    assert entry is not None
    async with rig.barrier.mutation("retry") as cut:
        rig.ledger.reserve_group(cut, GroupRecord(group, entry.admission_id, entry.prompt))
    result = await rig.save()
    assert (result.outcome, result.reason) == ("refused", "invariant")
    assert "single_owner" in rig.seen.violations


async def test_a_policy_of_warn_publishes_and_a_policy_of_halt_says_so(tmp_path: Path) -> None:
    """What follows from a violation is configured by invariant."""
    rig = Rig(tmp_path / "warn", verify=broken, policy={"single_owner": "warn"})
    await rig.read()
    result = await rig.save()
    assert result.outcome == "completed"
    assert [violation.invariant for violation in result.violations] == ["single_owner"]
    assert not result.halt
    await rig.close()
    rig = Rig(tmp_path / "halt", verify=broken, policy={"single_owner": "halt"})
    await rig.read()
    result = await rig.save()
    assert result.outcome == "refused"
    assert result.halt
    await rig.close()


async def test_what_the_callback_raises_does_not_lose_the_refusal(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A callback that fails is logged; the attempt is still counted as refused."""

    def fails(_violations: list[Violation]) -> None:
        message = "cannot book"
        raise RuntimeError(message)

    rig = Rig(tmp_path / "run", verify=broken, on_suspect=fails)
    await rig.read()
    assert (await rig.save()).outcome == "refused"
    assert "could not be booked" in caplog.text
    await rig.close()


# -------------------------------------------------------------------------------------------------- lineage


async def test_a_superseded_incarnation_does_not_publish(rig: Rig) -> None:
    """A process that was declared dead and is not finds the counter moved, and leaves nothing behind."""
    (rig.run.path / "incarnation").write_text("2\n")
    result = await rig.save()
    assert (result.outcome, result.reason) == ("refused", "superseded")
    assert isinstance(result.error, IncarnationSupersededError)
    assert rig.names() == []


async def test_a_run_that_goes_on_from_an_older_cut_sets_the_undone_future_aside(tmp_path: Path) -> None:
    """Folders of another lineage that would count as newer are renamed, the restored cut's parents stay."""
    rig = Rig(tmp_path / "run", keep=9)
    states: list[CutState] = []

    def note(captured: CapturedCut, parent: CutState | None) -> list[Violation]:
        states.append(captured.state)
        return []

    rig.saver = rig.checkpointer(keep=9, verify=note)
    for _ in range(3):
        await rig.save()
        await rig.train([await rig.finished()])
    await rig.close()
    assert rig.names() == ["step_0", "step_1", "step_2"]

    resumed = Rig(tmp_path / "run", resume=True)
    restored = states[1]
    resumed.run.record_restored(restored)
    resumed.saver = resumed.checkpointer(keep=9, restored=restored, verify=lambda _cut, _parent: [])
    resumed.step = 2
    resumed.barrier.restore_version(restored.mutation_version)
    result = await resumed.saver.save(step=2, trainer_version=2)
    ended = await resumed.saver.wait()
    assert result.outcome == "pending"
    assert ended is not None
    assert ended.path is not None
    assert ended.path.name == "step_2"
    assert resumed.names() == ["aside-step_2-i00000002", "step_0", "step_1", "step_2"]
    manifest = parse_manifest((ended.path / "manifest.json").read_bytes())
    assert (manifest.incarnation, manifest.parent_cut, manifest.restored_from) == (
        2,
        restored.cut_id,
        restored.cut_id,
    )
    await resumed.close()


async def test_what_a_dead_incarnation_left_is_swept_before_the_first_save(tmp_path: Path) -> None:
    """Temporary folders of earlier incarnations and half-deleted checkpoints go; nothing else does."""
    rig = Rig(tmp_path / "run")
    await rig.close()
    folder = tmp_path / "run" / "checkpoints"
    for name in ("step_3.tmp-i00000001-abc", "trash-step_1", "corrupt-step_2", "step_9.tmp-i00000099-abc"):
        (folder / name).mkdir()
        (folder / name / "file").write_text("x")
    resumed = Rig(tmp_path / "run", resume=True)
    await resumed.save()
    assert resumed.names() == ["corrupt-step_2", "step_0", "step_9.tmp-i00000099-abc"]
    await resumed.close()


async def test_a_folder_of_the_same_name_from_another_lineage_is_renamed_aside(rig: Rig) -> None:
    """Whatever lies under the name that this lineage needs is kept, under another."""
    stranger = rig.run.checkpoints / "step_0"
    stranger.mkdir()
    (stranger / "note").write_text("not ours")
    result = await rig.save()
    assert result.path == stranger
    assert is_usable(stranger)
    assert (rig.run.checkpoints / "aside-step_0-i00000001" / "note").read_text() == "not ours"


async def test_the_statistics_count_every_attempt(rig: Rig) -> None:
    """Published, skipped and failed attempts are all there, and the gauge of the last failure follows."""
    await rig.save()
    await rig.save()
    rig.trainer.write_error = OSError(5, "io")
    await rig.finished()
    await rig.save()
    statistics = rig.saver.statistics()
    assert statistics.attempts == {"completed": 1, "skipped": 1, "failed": 1, "refused": 0, "cancelled": 0}
    assert statistics.last_failed
    assert statistics.last_step == 0
    assert rig.hub.sources("checkpointer") == [rig.saver]


async def test_the_size_of_what_was_published_is_known_by_part(rig: Rig) -> None:
    """As it is on the disk, and as it is scraped; an attempt that fails afterwards changes nothing."""
    hub = rig.hub
    observer = MetricsObserver()
    hub.subscribe(observer)
    assert rig.saver.statistics().part_bytes == {}
    result = await rig.save()
    rig.trainer.write_error = OSError(5, "io")
    await rig.finished()
    await rig.save()
    parts = rig.saver.statistics().part_bytes
    assert result.path is not None
    sizes = {path.relative_to(result.path): path.stat().st_size for path in result.path.rglob("*.*")}
    trainer = sum(size for path, size in sizes.items() if path.parts[0] == "trainer")
    assert parts["trainer"] == trainer > 0
    assert parts["rows"] > 0
    assert sum(parts.values()) == result.num_bytes
    assert sum(sizes.values()) - result.num_bytes == sizes[Path("manifest.json")]
    families = {family.name: family for family in QuiesceCollector(observer, hub, run="r1").collect()}
    scraped = {sample.labels["part"]: sample.value for sample in families["quiesce_checkpoint_bytes"].samples}
    assert scraped == {"all": result.num_bytes, **parts}


async def test_what_reopening_raises_does_not_hide_a_cancellation(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever cancelled the save sees it cancelled, and the fence's failure is logged."""
    fence = RecordingFence(fail="hold close")

    async def fails() -> None:
        message = "worker 3 did not reopen"
        raise ConnectionError(message)

    fence.reopen = fails  # type: ignore[method-assign]  # a fence that cannot be reopened
    rig = Rig(tmp_path / "run", fence=fence)
    task = asyncio.create_task(rig.saver.save(step=0, trainer_version=0))
    await fence.reached.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert rig.seen.ended == [(0, "cancelled", "cancelled")]
    assert "could not be reopened" in caplog.text
    await rig.close()


async def test_a_leftover_that_cannot_be_removed_does_not_stop_saving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sweeping is housekeeping; it may be asked for before the first save, so that no trainer waits for it."""
    await Rig(tmp_path / "run").close()
    left = tmp_path / "run" / "checkpoints" / "trash-step_1"
    left.mkdir()
    resumed = Rig(tmp_path / "run", resume=True)
    with watched_disk(monkeypatch) as disk:
        disk.fail = lambda operation, _: OSError(5, "broken") if operation == "remove" else None
        await resumed.saver.prepare()
    assert (await resumed.save()).outcome == "completed"
    assert left.exists()
    await resumed.close()


def test_an_unknown_policy_is_refused(tmp_path: Path) -> None:
    """The message starts with the key."""
    with pytest.raises(ConfigError, match=r"policy\.single_owner: 'ignore'"):
        Rig(tmp_path / "run", policy={"single_owner": "ignore"})


def test_importing_the_package_imports_neither_torch_nor_numpy() -> None:
    """An audit or a command line that prints its help does not wait for them."""
    program = "import sys, quiesce.checkpoint; print({'torch', 'numpy', 'safetensors'} & set(sys.modules))"
    ended = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert ended.stdout.strip() == "set()"


async def test_a_failed_write_keeps_nothing_of_the_trainers_copy_alive(rig: Rig) -> None:
    """What a result says of its error must not hold the frames, and with them gigabytes, until the next save."""

    class Copy:
        async def write(self, directory: Path) -> None:
            raise OSError(28, "full")

    held: list[weakref.ref[Copy]] = []

    async def stage() -> Copy:
        copy = Copy()
        held.append(weakref.ref(copy))
        return copy

    rig.trainer.stage = stage  # type: ignore[method-assign]  # a copy of its own for each save
    result = await rig.save()
    assert (result.outcome, result.reason) == ("failed", "disk")
    gc.collect()
    assert held[0]() is None
    assert "full" in str(result.error)


@pytest.mark.parametrize("held", ["close", "verify"])
async def test_a_fence_that_ignores_its_deadline_does_not_hold_the_trainer_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: str
) -> None:
    """The save is refused a little after the deadline, the fence is reopened, and the window's rows are let go."""
    monkeypatch.setattr(saver_module, "FENCE_GRACE_SECONDS", 0.0)
    fence = RecordingFence(fail=f"hold {held}")
    rig = Rig(tmp_path / "run", fence=fence, fence_timeout=0.01)

    result = await rig.save()

    assert (result.outcome, result.reason) == ("refused", "error")
    assert "longer than its 0.01 s" in str(result.error)
    assert fence.calls[-1] == "reopen"
    assert open_pins(rig) == 0
    await rig.close()
