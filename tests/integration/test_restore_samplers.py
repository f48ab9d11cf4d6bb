"""Stop and resume with groups in every state, for every sampler: the real controller, LMDB rows, real saves and restores.

Each scenario is deterministic (virtual time), asserts that its checkpoint really holds the states that it is about, and
ends with every prompt of every epoch trained exactly once or counted as dropped, and a clean audit.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from quiesce import Controller, GenerationRequest, GroupResult
from quiesce.checkpoint.cut import CutState
from quiesce.checkpoint.loading import find_checkpoints, load_checkpoint
from quiesce.checkpoint.saver import Checkpointer
from quiesce.errors import CapacityError
from quiesce.testing import in_virtual_time
from quiesce.training import TrainBatch, TrainPump
from tests.run_rig import SAMPLERS, CrashError, Run, delays, result_of, sampler

STATES = {
    "reserved",
    "admitted",
    "retried",
    "ready",
    "spare",
    "dropped",
    "trained",
    "short batch",
    "epoch end",
    "second epoch",
}
"""What the checkpoints of one sampler must have met, all in all."""

HOPELESS = 3
"""Dataset index of a prompt whose rollouts always fail."""


def newest(path: Path) -> CutState:
    """Return what the newest checkpoint of a run says."""
    return load_checkpoint(find_checkpoints(path / "checkpoints")[0]).state


def states_of(state: CutState, prompts: int) -> set[str]:
    """Return which of :data:`STATES` a cut holds."""
    prompts_owned = [*(record.prompt for record in state.ledger), *(entry.prompt for entry in state.entries)]
    tail = any(ref.position >= prompts - prompts % 4 for ref in prompts_owned)
    facts = {
        "reserved": any(record.phase == "reserved" for record in state.ledger),
        "admitted": any(record.phase == "admitted" for record in state.ledger),
        "retried": any(record.attempt for record in state.ledger),
        "ready": bool(state.ready),
        "spare": bool(state.spares),
        "dropped": state.accounting.dropped > 0,
        "trained": state.accounting.trained > 0,
        "short batch": tail,
        "epoch end": any(epoch.ended for epoch in state.accounting.open),
        "second epoch": state.position.epoch > 0,
    }
    return {name for name, holds in facts.items() if holds}


class Slow:
    """Generates each group at its own pace; some fail at first, one always."""

    def __init__(self, seed: int) -> None:
        self.delay = delays(seed, 4.0)
        self.asked: list[tuple[str, int]] = []

    async def generate(self, request: GenerationRequest) -> GroupResult:
        """Take a while; fail or answer."""
        self.asked.append((request.group_id, request.attempt))
        await asyncio.sleep(self.delay((request.group_id, request.attempt)))
        if request.index == HOPELESS or (request.index % 5 == 0 and request.attempt == 0):
            raise ValueError("this prompt did not work out")
        return result_of(request)

    async def before_step(self, batch: TrainBatch) -> None:
        """Take a while."""
        await asyncio.sleep(self.delay(batch.step) / 2)


def slow_run(path: Path, name: str, *, seed: int = 1, **options: Any) -> tuple[Run, Slow]:  # noqa: ANN401 - passed on
    """Return a run of two epochs of 22 prompts, 4 a step, so that each epoch's last batch is short."""
    slow = Slow(seed)
    run = Run(
        path,
        sampler(name),
        epochs=2,
        generate=slow.generate,
        before_step=slow.before_step,
        options={"spare_prompts": 2, "max_attempts": 2, "retry_backoff_seconds": 0.5, **options},
    )
    return run, slow


@pytest.mark.parametrize("name", SAMPLERS)
@in_virtual_time
async def test_a_run_that_is_stopped_over_and_over_loses_and_repeats_nothing(
    name: str, tmp_path: Path
) -> None:
    """Stopped every few seconds with groups in every state, each resume goes on exactly where the run was."""
    run, _ = slow_run(tmp_path, name)
    met: set[str] = set()
    resumes = 0

    summary = await run.go(stop_after=5.5)
    while summary.outcome == "stopped":
        before = newest(tmp_path)
        met |= states_of(before, run.prompts)
        summary = await run.go(resume=True, stop_after=5.5)
        resumes += 1
        (_, _, _, restored), *_ = run.recorder.of("restore_ended")
        assert restored["buffer"] == len(before.entries)
        assert restored["ledger"] == len(before.ledger)
        assert restored["spares"] == len(before.spares)

    assert met == STATES
    assert resumes >= 3
    run.check_all_accounted(summary)
    assert sum(summary.dropped.values()) >= 2  # the hopeless prompt, once an epoch
    assert run.weights.trained[: before.accounting.trained]  # the trainer's own state came along


@pytest.mark.parametrize("name", SAMPLERS)
@in_virtual_time
async def test_a_run_that_is_killed_over_and_over_takes_its_steps_again(name: str, tmp_path: Path) -> None:
    """Killed in the middle of a step, a run goes on from its last checkpoint, twice and more in a row."""
    run, slow = slow_run(tmp_path, name, save_every_steps=2)
    kills = iter([3, 4, 7, 9])
    kill = next(kills)

    async def killed(batch: TrainBatch) -> None:
        nonlocal kill
        await slow.before_step(batch)
        if batch.step == kill:
            kill = next(kills, -1)
            raise CrashError

    run.before_step = killed
    crashes = 0
    while True:
        try:
            summary = await run.go(resume=crashes > 0)
        except CrashError:
            crashes += 1
        else:
            break

    assert crashes == 4
    run.check_all_accounted(summary)
    taken = [step for step, _ in run.steps]
    assert len(taken) > len(set(taken))  # some steps were taken again


@pytest.mark.parametrize("name", SAMPLERS)
@in_virtual_time
async def test_a_parked_finished_batch_is_the_first_that_a_resumed_run_trains(
    name: str, tmp_path: Path
) -> None:
    """Finished groups of the next step are selected after a restore, with nothing generated again for them."""
    parked: set[str] = set()
    asked: list[str] = []
    hold = asyncio.Event()

    async def generate(request: GenerationRequest) -> GroupResult:
        asked.append(request.group_id)
        return result_of(request)

    async def wait_in_first_step(batch: TrainBatch) -> None:
        if batch.step == 0:
            await hold.wait()

    run = Run(tmp_path, sampler(name), generate=generate, before_step=wait_in_first_step)
    built = run.start()
    running = asyncio.create_task(built.run())
    await asyncio.sleep(
        1.0
    )  # virtual: the next batches are finished, while the first step is still being trained
    built.request_stop()
    hold.set()
    summary = await running
    run.folder.close()
    assert summary.outcome == "stopped"
    before = newest(tmp_path)
    parked = {entry.group_id for entry in before.ready}
    generated = len(asked)

    summary = await run.go(resume=True)

    assert len(parked) >= 4
    first = next(groups for step, groups in run.steps if step == 1)
    assert set(first) <= parked
    if name == "in_order":
        assert set(first) == {entry.group_id for entry in before.ready if entry.target_step == 1}
    assert not parked & set(asked[generated:])
    run.check_all_accounted(summary)


@pytest.mark.parametrize("name", SAMPLERS)
@in_virtual_time
async def test_a_claim_whose_step_has_not_begun_is_saved_as_ready(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cut between claim and step finds its groups claimed; a kill there costs nothing, and they are trained once."""
    savers: list[Checkpointer] = []
    original = Controller._checkpointer  # noqa: SLF001 - there is no other way to save at that very moment
    read = TrainPump._read  # noqa: SLF001

    def keeping(self: Controller, *args: Any) -> Checkpointer:  # noqa: ANN401 - passed on
        saver = original(self, *args)
        savers.append(saver)
        return saver

    async def save_and_die(self: TrainPump, claim: Any) -> Any:  # noqa: ANN401 - passed on
        owners = run.controller.owners
        if owners.step == 2 and len(savers) == 1:
            saved = await savers[0].save(step=owners.step, trainer_version=owners.versions.value)
            assert saved.outcome == "pending"
            await savers[0].wait()
            raise CrashError
        return await read(self, claim)

    monkeypatch.setattr(Controller, "_checkpointer", keeping)
    monkeypatch.setattr(TrainPump, "_read", save_and_die)
    run, _ = slow_run(tmp_path, name)
    with pytest.raises(CrashError):
        await run.go()
    claimed = {entry.group_id for entry in newest(tmp_path).claimed}

    summary = await run.go(resume=True)

    assert claimed
    assert claimed <= set(run.weights.trained)
    run.check_all_accounted(summary)


@pytest.mark.parametrize("name", ["weight_fifo", "ready_first", "in_order"])
@in_virtual_time
async def test_a_smaller_lookahead_on_resume_only_keeps_the_gate_shut_for_longer(
    name: str, tmp_path: Path
) -> None:
    """With room for what is restored, a lowered window is no contradiction: the trainer catches up, then the gate opens."""
    run, slow = slow_run(tmp_path, name, buffer_capacity=16)
    run.sampler = sampler(name, 3)
    summary = await run.go(stop_after=3.0)
    before = newest(tmp_path)
    assert before.sampler.cursor > before.trainer_version + 1

    run.sampler = sampler(name, 1)
    summary = await run.go(resume=True, stop_after=6.0)
    assert summary.outcome == "stopped"
    assert not summary.save_failed
    summary = await run.go(resume=True)

    admitted = [(cursor, groups) for _, cursor, _, groups in run.recorder.of("admission_committed")]
    assert admitted
    run.check_all_accounted(summary)
    assert slow.asked


@in_virtual_time
async def test_a_configuration_that_cannot_hold_the_restored_stamps_is_refused(tmp_path: Path) -> None:
    """Restored groups that do not fit the buffer are a refusal that names the key, not a run that stands still."""
    run, _ = slow_run(tmp_path, "in_order", spare_prompts=0)
    run.sampler = sampler("in_order", 4)
    hold = asyncio.Event()

    async def never(_: GenerationRequest) -> GroupResult:
        await hold.wait()
        raise AssertionError

    run.generate = never
    await run.go(stop_after=3.0)
    assert sum(record.phase == "admitted" for record in newest(tmp_path).ledger) == 20

    run.sampler = sampler("in_order", 1)
    with pytest.raises(CapacityError, match="buffer_capacity"):
        await run.go(resume=True)


@pytest.mark.parametrize("name", SAMPLERS)
@in_virtual_time
async def test_restored_groups_keep_id_stamp_start_and_attempt(name: str, tmp_path: Path) -> None:
    """A restored group is redispatched as what it was, admitted ones before reserved ones."""
    run, slow = slow_run(tmp_path, name)
    await run.go(stop_after=2.0)
    before = newest(tmp_path)
    admitted = [record for record in before.ledger if record.phase == "admitted"]
    reserved = [record for record in before.ledger if record.phase == "reserved"]
    assert admitted
    assert reserved
    slow.asked.clear()
    run.before_step = None
    started: dict[str, tuple[int, int]] = {}
    generate = run.generate

    async def noting(request: GenerationRequest) -> GroupResult:
        started.setdefault(request.group_id, (request.attempt, request.start_version))
        return await generate(request)

    run.generate = noting
    summary = await run.go(resume=True)

    for record in admitted:
        assert started[record.group_id] == (record.attempt, record.start_version)
    order = list(started)
    last_admitted = max(order.index(record.group_id) for record in admitted)
    first_reserved = min(order.index(record.group_id) for record in reserved)
    assert last_admitted < first_reserved
    run.check_all_accounted(summary)


@in_virtual_time
async def test_a_cut_exactly_at_the_end_starts_no_further_epoch(tmp_path: Path) -> None:
    """A run that is over and is resumed reads nothing, trains nothing, and is over again."""
    run, _ = slow_run(tmp_path, "in_order")
    first = await run.go()
    steps = len(run.steps)

    again = await run.go(resume=True)

    assert again.outcome == "finished"
    assert (again.read, again.trained, again.step) == (first.read, first.trained, first.step)
    assert len(run.steps) == steps
    assert not run.recorder.of("prompts_read")
    run.check_all_accounted(again)


@in_virtual_time
async def test_more_epochs_on_resume_are_read(tmp_path: Path) -> None:
    """A finished run that is resumed with one epoch more reads that one too."""
    run = Run(tmp_path, sampler("in_order"), prompts=10)
    await run.go()
    run.epochs = 2

    summary = await run.go(resume=True)

    run.check_all_accounted(summary)
    assert summary.read == 20


@in_virtual_time
async def test_fewer_epochs_on_resume_end_the_run_where_it_is(tmp_path: Path) -> None:
    """A run that is resumed with fewer epochs than it has begun trains what it owns, and ends."""
    run, _ = slow_run(tmp_path, "in_order", spare_prompts=0, min_step_batch_fraction=0.0)
    run.epochs = 3
    summary = await run.go(max_steps=7)
    assert summary.outcome == "finished"
    position = newest(tmp_path).position
    assert position.epoch == 1
    run.epochs = 1

    summary = await run.go(resume=True)

    assert summary.outcome == "finished"
    assert summary.read == 22 + position.position
    assert summary.trained + sum(summary.dropped.values()) == summary.read


@in_virtual_time
async def test_spares_left_at_the_end_of_reading_are_trained_as_a_short_batch(tmp_path: Path) -> None:
    """The pool is drained once nothing is left to read; stops before and after that find an owner for each spare."""
    run, _ = slow_run(tmp_path, "in_order", spare_prompts=6, min_step_batch_fraction=0.0)
    run.sampler = sampler("in_order", 0)  # the gate stays shut long enough for a stop with a full pool
    run.prompts = 14
    run.epochs = 1
    saved: set[str] = set()
    drained: set[str] = set()
    resume = False
    while True:
        summary = await run.go(resume=resume, stop_after=4.5)
        resume = True
        moves = run.recorder.of("owner_moved")
        drained |= {group for group, source, target, _ in moves if (source, target) == ("spares", "ledger")}
        if summary.outcome == "finished":
            break
        saved |= {ref.group_id for ref in newest(tmp_path).spares}

    assert saved
    assert drained >= saved
    assert drained & set(run.weights.trained)
    run.check_all_accounted(summary)
