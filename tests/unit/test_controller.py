"""The controller: what it does in which order, and what ends a run."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quiesce import Controller, GenerationRequest, GroupResult
from quiesce.admission import Admission
from quiesce.audit_config import AuditConfig
from quiesce.barrier import DataPlaneCheckpointBarrier
from quiesce.checkpoint.audit import audit
from quiesce.checkpoint.loading import find_checkpoints
from quiesce.checkpoint.saver import Checkpointer
from quiesce.cleanup import BackgroundCleanup
from quiesce.dataplane import DataPlane, MemoryDataPlane
from quiesce.errors import (
    CapacityError,
    ConfigError,
    NothingToRestoreError,
    PromptSourceError,
    RunError,
)
from quiesce.gate_fence import GateFence, LocalGate
from quiesce.invariants import Violation
from quiesce.invariants.gate_events import GateEventLog, gate_is_respected
from quiesce.owners import Owners
from quiesce.rollouts import Rollouts
from quiesce.snapshot_gate import SnapshotGate
from quiesce.testing import EventRecorder, in_virtual_time
from quiesce.threads import DaemonExecutor
from quiesce.training import TrainBatch
from quiesce.types import RowKey
from tests.gates import cleanups
from tests.run_rig import GENERATIONS, CrashError, Run, memory, result_of, rows_of, sampler, until


def order_of(recorder: EventRecorder, *hooks: str) -> list[str]:
    """Return which of some hooks came, in order."""
    return [hook for hook in recorder.hooks() if hook in hooks]


# ------------------------------------------------------------------------------------------------------ step_0


class StartsUnsaved(Controller):
    """Lacks the rule: nothing is published before the first prompt is read."""

    async def _save_start(self, checkpointer: Checkpointer) -> None:
        """Save later."""


async def step_0_comes_first(path: Path, controller: type[Controller]) -> None:
    """Whenever the run is killed, there is a checkpoint to resume from."""
    run = Run(path, in_memory=True)
    await run.go(controller=controller)
    order = order_of(run.recorder, "checkpoint_ended", "prompts_read")
    assert order[0] == "checkpoint_ended"
    first = run.recorder.of("checkpoint_ended")[0]
    assert first[1:4] == (0, "completed", "")


@in_virtual_time
async def test_step_0_is_published_before_the_first_prompt_is_read(tmp_path: Path) -> None:
    """There is always something to resume."""
    await step_0_comes_first(tmp_path, Controller)


@in_virtual_time
async def test_a_run_that_reads_before_it_has_saved_is_noticed(tmp_path: Path) -> None:
    """The same check fails where step_0 is left out."""
    with pytest.raises(AssertionError):
        await step_0_comes_first(tmp_path, StartsUnsaved)


@in_virtual_time
async def test_a_run_killed_in_its_first_step_resumes_from_step_0(tmp_path: Path) -> None:
    """Everything that was read since is read again."""

    async def die(_: TrainBatch) -> None:
        raise CrashError

    run = Run(tmp_path, before_step=die, in_memory=True)
    with pytest.raises(CrashError):
        await run.go()
    run.before_step = None

    run.check_all_accounted(await run.go(resume=True))


# ------------------------------------------------------------------------------------------- the final capture


class CancelsFirst(Controller):
    """Lacks the rule: the pumps and their workers are cancelled before the last cut is captured."""

    async def _save_end(self, checkpointer: Checkpointer, admission: Admission, rollouts: Rollouts) -> Any:  # noqa: ANN401 - as the original
        await rollouts.close()
        return await super()._save_end(checkpointer, admission, rollouts)


async def workers_run_while_the_last_cut_is_captured(path: Path, controller: type[Controller]) -> None:
    """The rollouts that a stop finds in flight are still in flight when it captures its cut, and cancelled after it."""

    async def never(_: GenerationRequest) -> GroupResult:
        await asyncio.Event().wait()
        raise AssertionError

    run = Run(path, generate=never, in_memory=True)
    summary = await run.go(stop_after=5.0, controller=controller)
    assert summary.outcome == "stopped"
    order = order_of(run.recorder, "window_closed", "rollout_ended")
    last = len(order) - 1 - order[::-1].index("window_closed")
    assert order.count("rollout_ended") == 8
    assert "rollout_ended" not in order[:last]


@in_virtual_time
async def test_pumps_are_cancelled_only_after_the_final_capture(tmp_path: Path) -> None:
    """A stop cuts a run that still runs, so that nothing is half cancelled in its cut."""
    await workers_run_while_the_last_cut_is_captured(tmp_path, Controller)


@in_virtual_time
async def test_a_run_that_cancels_first_is_noticed(tmp_path: Path) -> None:
    """The same check fails where the workers are cancelled before the capture."""
    with pytest.raises(AssertionError):
        await workers_run_while_the_last_cut_is_captured(tmp_path, CancelsFirst)


@in_virtual_time
async def test_a_final_capture_is_repeated_until_it_is_published(tmp_path: Path) -> None:
    """A cut that is refused condemns the groups at fault, and the next one is judged on its own."""
    calls: list[str] = []

    def verify(captured: Any, _parent: Any) -> list[Violation]:  # noqa: ANN401 - as the checkpointer's
        calls.append(captured.state.cut_id)
        if len(calls) != 2:  # the first is step_0's
            return []
        guilty = captured.state.ledger[0].group_id
        return [Violation("single_owner", "critical", "made up", (guilty,), (), captured.state.cut_id, {})]

    async def never(_: GenerationRequest) -> GroupResult:
        await asyncio.Event().wait()
        raise AssertionError

    run = Run(tmp_path, generate=never, in_memory=True)

    summary = await run.go(stop_after=5.0, verify=verify)

    assert not summary.save_failed
    assert summary.dropped["violation"] == 1
    assert [outcome for _, _, outcome, *_ in run.recorder.of("checkpoint_ended")] == [
        "completed",
        "refused",
        "completed",
    ]
    assert (tmp_path / "checkpoints" / "step_0.suspect").is_dir()
    cancelled = [
        group for group, *_, outcome, _ in run.recorder.of("rollout_ended") if outcome == "cancelled"
    ]
    assert len(cancelled) == 8


@in_virtual_time
async def test_one_lost_prompt_does_not_end_saving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that somebody loses is found by the next cut, counted as dropped, and the cut after that is published."""
    drop = Owners.drop
    lost: list[str] = []

    def forgetful(self: Owners, cut: Any, group_id: str, reason: str, **how: Any) -> Any:  # noqa: ANN401 - as the original
        if lost:
            return drop(self, cut, group_id, reason, **how)
        lost.append(group_id)
        return self.ledger.take_group(cut, group_id, target="dropped", reason=reason)

    async def generate(request: GenerationRequest) -> GroupResult:
        if request.index == 5:
            raise ValueError("never works")
        return result_of(request)

    monkeypatch.setattr(Owners, "drop", forgetful)
    run = Run(
        tmp_path,
        sampler("ready_first"),
        generate=generate,
        in_memory=True,
        options={"save_every_steps": 1, "max_attempts": 1},
    )

    summary = await run.go()

    run.check_all_accounted(summary, violations=1)
    assert "refused" in [outcome for _, _, outcome, *_ in run.recorder.of("checkpoint_ended")]


@pytest.mark.parametrize("audited", [True, False])
@in_virtual_time
async def test_a_broken_invariant_whose_policy_is_to_halt_ends_the_run(tmp_path: Path, audited: bool) -> None:  # noqa: FBT001 - a case
    """The run does not go on over a fault that it was told to halt for."""

    def verify(captured: Any, _parent: Any) -> list[Violation]:  # noqa: ANN401 - as the checkpointer's
        if captured.state.step < 2:
            return []
        return [Violation("single_owner", "critical", "made up", (), (), captured.state.cut_id, {})]

    audit = AuditConfig(enabled=audited, policies={"single_owner": "halt"})
    run = Run(tmp_path, in_memory=True, options={"save_every_steps": 1, "audit": audit})

    summary = await run.go(verify=verify)

    assert summary.outcome == "halted"
    assert summary.halted_by is not None
    assert (summary.halted_by.invariant, summary.halted_by.message) == ("single_owner", "made up")
    assert summary.step < 5
    assert summary.save_failed  # every cut is refused
    assert [state for (state,) in run.recorder.of("run_state_changed")] == [
        "starting",
        "running",
        "stopping",
        "failed",
    ]
    assert [info.step for info in find_checkpoints(tmp_path / "checkpoints")] == [1, 0]


# ------------------------------------------------------------------------------------------------------- saving


@in_virtual_time
async def test_checkpoints_are_taken_every_so_many_steps_and_the_last_two_kept(tmp_path: Path) -> None:
    """One at each interval, between steps, and one at the end."""
    run = Run(tmp_path, in_memory=True, options={"save_every_steps": 2})

    await run.go()

    assert [step for _, step, outcome, *_ in run.recorder.of("checkpoint_ended")] == [0, 2, 4, 6]
    assert [info.step for info in find_checkpoints(tmp_path / "checkpoints")] == [6, 4]


@in_virtual_time
async def test_a_save_moves_neither_version_nor_step(tmp_path: Path) -> None:
    """Saving is the train pump's own business between two steps, so no window lies inside a step."""
    run = Run(
        tmp_path,
        in_memory=True,
        before_step=lambda _: asyncio.sleep(1.0),
        options={"save_every_steps": 1},
    )
    inside: list[bool] = []

    class Watch:
        def window_opened(self, *_: object) -> None:
            owners = run.controller._owners  # noqa: SLF001 - None for step_0
            inside.append(owners is not None and bool(owners.buffer.claims()))

    await run.go(observers=(Watch(),))

    assert len(inside) >= 6
    assert not any(inside)


@in_virtual_time
async def test_what_was_read_is_accounted_in_the_journal_and_audited(tmp_path: Path) -> None:
    """Each step's groups are journalled, so that the audit can compare them with the bitmaps."""
    run = Run(tmp_path, in_memory=True)

    run.check_all_accounted(await run.go())

    report = audit(tmp_path)
    assert report.notes == ()


# -------------------------------------------------------------------------------------------------- the states


@in_virtual_time
async def test_the_states_of_a_run_are_told(tmp_path: Path) -> None:
    """Starting, running, stopping, finished: once each, in order."""
    run = Run(tmp_path, in_memory=True, before_step=lambda _: asyncio.sleep(1.0))

    await run.go(stop_after=2.5)
    run.controller.request_stop()  # too late, and once was enough

    assert run.recorder.of("run_state_changed") == [("starting",), ("running",), ("stopping",), ("finished",)]


@in_virtual_time
async def test_a_cancelled_run_is_stopping_and_leaves_nothing_running(tmp_path: Path) -> None:
    """Whoever cancels the run itself gets the cancellation back, with every task of the run gone."""
    run = Run(tmp_path, in_memory=True, before_step=lambda _: asyncio.sleep(1.0))
    built = run.start()
    task = asyncio.create_task(built.run())
    await until(lambda: run.recorder.of("train_step_ended"))

    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task

    run.folder.close()
    assert task.cancelled()
    assert run.recorder.of("run_state_changed")[-1] == ("stopping",)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    run.before_step = None
    run.check_all_accounted(await run.go(resume=True))


@in_virtual_time
async def test_a_run_that_ends_leaves_no_task(tmp_path: Path) -> None:
    """Pumps, workers, watch and clearing are all gone with the run."""
    run = Run(tmp_path, in_memory=True)
    await run.go()

    assert asyncio.all_tasks() == {asyncio.current_task()}


def test_owners_before_the_start_are_an_error(tmp_path: Path) -> None:
    """There is nothing to look at before a run has built it."""

    async def look() -> None:
        run = Run(tmp_path, in_memory=True)
        built = run.start()
        try:
            with pytest.raises(RunError, match="not been started"):
                _ = built.owners
        finally:
            run.folder.close()

    asyncio.run(look())


# ---------------------------------------------------------------------------------------------------- refusals


@in_virtual_time
async def test_a_buffer_that_the_sampler_needs_larger_is_refused(tmp_path: Path) -> None:
    """With too little capacity the run could stand still: the key is named at once."""
    run = Run(tmp_path, sampler("in_order", 3), in_memory=True, options={"buffer_capacity": 8})

    with pytest.raises(CapacityError, match="buffer_capacity"):
        await run.go()

    assert not run.recorder.of("prompts_read")


@in_virtual_time
async def test_a_resume_of_an_empty_folder_is_refused(tmp_path: Path) -> None:
    """There is nothing to resume, and no silent start at step 0."""
    run = Run(tmp_path, in_memory=True)

    with pytest.raises(NothingToRestoreError):
        await run.go(resume=True)


@in_virtual_time
async def test_a_resume_with_another_sampler_or_dataset_is_refused(tmp_path: Path) -> None:
    """What was saved with one cannot go on with another; nothing is changed by the attempt."""
    run = Run(tmp_path, sampler("in_order"), in_memory=True)
    await run.go(max_steps=2)

    run.sampler = sampler("windowed")
    with pytest.raises(ConfigError, match=r"sampler\.name"):
        await run.go(resume=True)
    run.sampler, run.prompts = sampler("in_order"), 21
    with pytest.raises(PromptSourceError, match="position"):
        await run.go(resume=True)

    run.prompts = 22
    run.check_all_accounted(await run.go(resume=True))


@in_virtual_time
async def test_the_stores_of_older_incarnations_hold_no_row_of_the_new_one(tmp_path: Path) -> None:
    """Each incarnation opens an empty store, with a number that was never used before, and fills it from the cut alone."""
    run = Run(tmp_path, sampler("in_order"))
    await run.go(max_steps=2)
    await run.go(resume=True, max_steps=3)

    summary = await run.go(resume=True)

    run.check_all_accounted(summary)
    assert run.folder.path.joinpath("incarnation").read_text().strip() == "3"


# ----------------------------------------------------------------------------------------- gates, cleanup, workers


class Workers:
    """One generation worker behind ``generate``: it stages a chunk, makes the final rows itself, and cleans up."""

    def __init__(self, run: Run, *, fails: bool = False) -> None:
        self.run = run
        self.fails = fails
        self.noted: list[str] = []
        self.found: dict[str, tuple[int, int]] = {}
        self.hangs: Callable[[GenerationRequest], bool] = lambda _request: False
        self.executor = DaemonExecutor("worker", 8)
        self.dataplane: DataPlane
        self.gate: SnapshotGate
        self.cleanup: BackgroundCleanup

    async def attach(self, dataplane: DataPlane, fence: GateFence) -> None:
        """Register the gate, start the cleanup."""
        self.noted.append("attach")
        hub = self.run.controller._hub  # noqa: SLF001 - the one of the run
        self.dataplane = dataplane
        self.gate = SnapshotGate("0", hub=hub)
        self.cleanup = BackgroundCleanup(self.gate, dataplane.clear, hub=hub)
        if self.fails:
            raise ConnectionRefusedError("no such worker")
        fence.register(LocalGate(self.gate))
        self.cleanup.start()

    async def detach(self) -> None:
        """Drain."""
        self.noted.append("detach")
        self.cleanup.close(30.0)
        keys = self.dataplane.keys()
        self.left = [key for key in keys if key.sequence is not None]

    def outstanding(self) -> Collection[RowKey]:
        """Tell what is not cleared."""
        return self.cleanup.outstanding()

    async def generate(self, request: GenerationRequest) -> GroupResult:
        """Stage, finish, clean up; or stop half-way."""
        staging = request.staging
        assert staging is not None
        finals = sum(row is not None for row in staging.finals)
        if finals or any(staging.found):
            self.found[request.group_id] = (sum(map(len, staging.found)), finals)
        blocking = functools.partial(asyncio.get_running_loop().run_in_executor, self.executor)
        if not finals:
            chunk = {"chunk": np.array([request.index])}
            await blocking(staging.put_chunks, dict.fromkeys(range(GENERATIONS), chunk))
        hangs = self.hangs(request)
        if hangs and request.index % 2:
            await asyncio.Event().wait()
        rows = {
            generation: row
            for generation, row in enumerate(rows_of(request.index, request.attempt))
            if staging.finals[generation] is None
        }
        obsolete = await blocking(staging.finish, self.gate, rows)
        if hangs:
            await asyncio.Event().wait()
        await blocking(self.cleanup.submit, obsolete)
        return GroupResult(
            rows=None, version_from=request.start_version, version_to=request.start_version, stats={}
        )


def worked(path: Path, **options: Any) -> tuple[Run, Workers]:  # noqa: ANN401 - passed on
    """Return a run with a generation worker."""
    run = Run(path, in_memory=True, options={"save_every_steps": 1, **options})
    workers = Workers(run)
    run.generate = workers.generate
    return run, workers


@in_virtual_time
async def test_every_window_is_taken_with_every_gate_closed(tmp_path: Path) -> None:
    """The worker's gate and the controller's own, whose cleanup clears what was trained, keep still for each cut."""
    before = cleanups()
    run, workers = worked(tmp_path)
    log = GateEventLog()

    summary = await run.go(workers=workers, observers=(log,))

    run.check_all_accounted(summary)
    assert gate_is_respected(log.events) == []
    saves = [outcome for _, _, outcome, *_ in run.recorder.of("checkpoint_ended") if outcome != "skipped"]
    for label in ("0", "controller"):
        closed = [
            event.outcome for event in log.events if (event.hook, event.worker) == ("gate_closed", label)
        ]
        assert closed == ["closed"] * len(saves)
        assert any((event.hook, event.worker) == ("clear_started", label) for event in log.events)
    assert run.recorder.of("invariant_violated") == []
    assert workers.left == []
    assert not cleanups() - before


@in_virtual_time
async def test_workers_are_attached_before_the_first_cut_and_detached_before_the_data_plane_is_closed(
    tmp_path: Path,
) -> None:
    """In between, and only then, they may put and clear rows."""
    run, workers = worked(tmp_path)

    class Watch:
        def checkpoint_ended(self, *_: object) -> None:
            workers.noted.append("cut")

        def rollout_ended(self, *_: object) -> None:
            workers.noted.append("rollout")

    def opened(*args: Any) -> DataPlane:  # noqa: ANN401 - passed on
        plane = memory(*args)
        close = plane.close

        def closing() -> None:
            workers.noted.append("closed")
            close()

        plane.close = closing  # type: ignore[method-assign] # noted
        return plane

    await run.go(workers=workers, observers=(Watch(),), dataplane=opened, max_steps=2)

    noted = workers.noted
    assert noted[:2] == ["attach", "cut"]
    assert noted[-2:] == ["detach", "closed"]
    assert noted.count("attach") == noted.count("detach") == 1
    assert "rollout" in noted


@in_virtual_time
async def test_workers_that_cannot_be_attached_end_the_run_and_are_detached(tmp_path: Path) -> None:
    """Whatever was attached half-way is let go of."""
    before = cleanups()
    run, workers = worked(tmp_path)
    workers.fails = True

    with pytest.raises(ConnectionRefusedError):
        await run.go(workers=workers)

    assert workers.noted == ["attach", "detach"]
    assert not run.recorder.of("prompts_read")
    assert not cleanups() - before


async def test_a_put_that_hangs_for_ever_keeps_no_run_from_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its call ran past its deadline and was tried again; at the end the store is left to the thread that hangs in it."""
    monkeypatch.setattr("quiesce.controller.DATAPLANE_CLOSE_SECONDS", 0.1)
    hung, give_in = threading.Event(), threading.Event()

    class Hanging(MemoryDataPlane):
        """One put never comes back; it hangs inside of the call, which a close waits for."""

        def _put(self, rows: Sequence[tuple[str, bytes]]) -> None:
            if not hung.is_set():
                hung.set()
                give_in.wait()
            super()._put(rows)

    def opened(incarnation: int, barrier: DataPlaneCheckpointBarrier) -> DataPlane:
        return Hanging(incarnation, tensors="numpy", barrier=barrier, hub=barrier.hub)

    # So many attempts, since on a busy machine others may run past the deadline, too.
    run, workers = worked(tmp_path, generation_timeout_seconds=1.0, max_attempts=1_000)

    try:
        async with asyncio.timeout(50.0):
            summary = await run.go(workers=workers, dataplane=opened)
    finally:
        give_in.set()

    assert summary.outcome == "finished"
    assert summary.trained == run.prompts
    assert "the data plane could not be closed within 0.1 s" in caplog.text


async def test_a_clear_that_hangs_for_ever_does_not_end_saving(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It holds its permit, so saves wait; past its deadline nothing is cleared any more, and saves are published again."""
    monkeypatch.setattr("quiesce.controller.CLEAR_PERMIT_SECONDS", 0.2)
    monkeypatch.setattr("quiesce.controller.CLEAR_DEADLINE_SECONDS", 0.1)
    monkeypatch.setattr("quiesce.controller.DATAPLANE_CLOSE_SECONDS", 0.1)
    give_in = threading.Event()

    class Hanging(MemoryDataPlane):
        """The first clear never comes back, and those after it never begin."""

        def clear(self, keys: Iterable[RowKey]) -> int:
            give_in.wait()
            return super().clear(keys)

    def opened(incarnation: int, barrier: DataPlaneCheckpointBarrier) -> DataPlane:
        return Hanging(incarnation, tensors="numpy", barrier=barrier, hub=barrier.hub)

    run = Run(tmp_path, options={"save_every_steps": 1})
    try:
        async with asyncio.timeout(30.0):
            summary = await run.go(dataplane=opened)
    finally:
        give_in.set()

    assert (summary.outcome, summary.trained) == ("finished", run.prompts)
    assert {outcome for _, _, outcome, *_ in run.recorder.of("checkpoint_ended")} == {"completed"}
    assert find_checkpoints(tmp_path / "checkpoints")[0].step == summary.step
    assert "worker 'controller' is given up; its permit" in caplog.text
    assert run.recorder.of("invariant_violated") == []


@in_virtual_time
@pytest.mark.parametrize("with_workers", [True, False], ids=["workers", "no workers"])
async def test_a_resumed_run_goes_on_from_staged_rows_if_it_has_workers(
    tmp_path: Path, *, with_workers: bool
) -> None:
    """What calls had put when the run stopped comes back to their next calls; a run without workers begins them anew."""
    run, workers = worked(tmp_path)
    workers.hangs = lambda _request: True
    stopped = await run.go(workers=workers, stop_after=5.0)
    assert (stopped.outcome, stopped.trained) == ("stopped", 0)

    again = Run(tmp_path, in_memory=True)
    resumed = Workers(again)
    if with_workers:
        again.generate = resumed.generate
    summary = await again.go(resume=True, workers=resumed if with_workers else None)

    again.check_all_accounted(summary)
    if with_workers:
        # Each group had a chunk of each generation, or its final rows, and of those the chunks are obsolete.
        assert set(resumed.found.values()) == {(GENERATIONS, 0), (0, GENERATIONS)}
        assert resumed.left == []
    assert again.recorder.of("invariant_violated") == []
