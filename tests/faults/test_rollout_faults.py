"""What a run does when a rollout, the dataset, the trainer or the disk fails, and when it is stopped at a bad moment."""

from __future__ import annotations

import asyncio
import errno
import itertools
import logging
import os
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quiesce import GenerationRequest, GroupResult, RunSummary, prompts
from quiesce.barrier import DataPlaneCheckpointBarrier
from quiesce.checkpoint.audit import audit
from quiesce.dataplane import DataPlane, LmdbDataPlane, MemoryDataPlane
from quiesce.errors import (
    MapFullError,
    MissingRowError,
    PromptSourceError,
    RolloutFailedError,
    RunError,
    SaveRequiredError,
    StallError,
)
from quiesce.observers import HOOKS
from quiesce.prompts import IndexedDataset, SequenceSource, StatefulLoaderSource
from quiesce.testing import in_virtual_time
from quiesce.training import TrainBatch
from tests.run_rig import Run, Weights, lmdb, result_of, rows_of, sampler

BAD = 5
"""Dataset index of the prompt that is in trouble."""

Generate = Callable[[GenerationRequest], Awaitable[GroupResult]]


def outcomes(run: Run, group_id: str) -> list[tuple[int, str]]:
    """Return how each attempt of a group ended."""
    return [
        (attempt, outcome)
        for group, attempt, _, outcome, _ in run.recorder.of("rollout_ended")
        if group == group_id
    ]


def bad_group(run: Run) -> str:
    """Return the group of the prompt that is in trouble."""
    order = SequenceSource([""] * run.prompts, batch_size=4, seed=7)._order_of(0)  # noqa: SLF001 - which position reads it
    return f"e000-p{order.index(BAD):07d}"


async def hangs(_: GenerationRequest) -> GroupResult:
    """Never answer."""
    await asyncio.Event().wait()
    raise AssertionError


async def raises(_: GenerationRequest) -> GroupResult:
    """Fail."""
    raise ConnectionError("the engine is away")


async def raises_an_error_of_quiesce(_: GenerationRequest) -> GroupResult:
    """Fail with an error that the project knows: it is still the generate function's."""
    raise MissingRowError("some key", "somewhere")


async def is_cancelled_inside(_: GenerationRequest) -> GroupResult:
    """Await something that somebody else cancels."""
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(future.cancel)
    await future
    raise AssertionError


def answers(change: Callable[[GroupResult], Any]) -> Generate:
    """Return a generate function that answers something odd."""

    async def generate(request: GenerationRequest) -> GroupResult:
        answer: GroupResult = change(result_of(request))
        return answer

    return generate


def with_rows(rows: Any) -> Callable[[GroupResult], GroupResult]:  # noqa: ANN401 - anything but rows
    """Return a change that puts these rows in."""
    return lambda good: GroupResult(rows, good.version_from, good.version_to, good.stats)


TROUBLES: dict[str, Generate] = {
    "hangs": hangs,
    "raises": raises,
    "raises an error of quiesce": raises_an_error_of_quiesce,
    "is cancelled from inside": is_cancelled_inside,
    "answers None": answers(lambda _: None),
    "one row too few": answers(with_rows(rows_of(BAD, generations=1))),
    "one row too many": answers(with_rows(rows_of(BAD, generations=3))),
    "rows are None": answers(with_rows(None)),
    "a row is a list": answers(with_rows([[1, 2], [3]])),
    "a row is empty": answers(with_rows([{}, {}])),
    "a field is a list": answers(with_rows([{"index": [1, 2]}] * 2)),
    "a field is an object array": answers(with_rows([{"index": np.array([object()])}] * 2)),
    "a field has no name": answers(with_rows([{3: np.zeros(1)}] * 2)),
    "versions are text": answers(lambda good: GroupResult(good.rows, "0", 0, {})),  # type: ignore[arg-type] # odd
    "versions go back": answers(lambda good: GroupResult(good.rows, 3, 2, {})),
    "stats are text": answers(lambda good: GroupResult(good.rows, 0, 0, {"reward": "much"})),  # type: ignore[dict-item] # odd
    "a stat has no name": answers(lambda good: GroupResult(good.rows, 0, 0, {"": 1.0})),
}


@pytest.mark.parametrize("trouble", TROUBLES)
@in_virtual_time
async def test_a_failed_attempt_is_tried_again_and_costs_nothing(trouble: str, tmp_path: Path) -> None:
    """Whatever a generate function does wrong once, its group is generated again and trained, and nobody else notices."""

    async def generate(request: GenerationRequest) -> GroupResult:
        if request.index == BAD and request.attempt == 0:
            return await TROUBLES[trouble](request)
        return result_of(request)

    run = Run(
        tmp_path, generate=generate, prompts=13, in_memory=True, options={"generation_timeout_seconds": 5.0}
    )

    summary = await run.go()

    run.check_all_accounted(summary)
    assert summary.trained == 13
    assert outcomes(run, bad_group(run)) == [(0, "failed"), (1, "completed")]
    assert sum(outcome == "failed" for _, _, _, outcome, _ in run.recorder.of("rollout_ended")) == 1


@pytest.mark.parametrize("trouble", TROUBLES)
@in_virtual_time
async def test_a_prompt_that_always_fails_is_dropped_for_that_reason(trouble: str, tmp_path: Path) -> None:
    """Without a spare, a group whose attempts all fail is counted as dropped, and its step goes on without it."""

    async def generate(request: GenerationRequest) -> GroupResult:
        return await (TROUBLES[trouble] if request.index == BAD else (good))(request)

    async def good(request: GenerationRequest) -> GroupResult:
        return result_of(request)

    run = Run(
        tmp_path,
        generate=generate,
        prompts=13,
        in_memory=True,
        options={"generation_timeout_seconds": 5.0, "min_step_batch_fraction": 0.5},
    )

    summary = await run.go()

    run.check_all_accounted(summary)
    assert summary.dropped == {"failed": 1, "stale_abort": 0, "evicted": 0, "violation": 0}
    assert outcomes(run, bad_group(run)) == [(0, "failed"), (1, "failed"), (2, "failed")]
    assert bad_group(run) not in run.weights.trained


@in_virtual_time
async def test_a_hanging_call_ends_at_its_deadline(tmp_path: Path) -> None:
    """The deadline is the call's own: it holds also while the next step waits for nothing but this call."""
    called: list[float] = []
    loop = asyncio.get_running_loop()

    async def generate(request: GenerationRequest) -> GroupResult:
        if request.index == BAD:
            called.append(loop.time())
            if len(called) == 1:
                await asyncio.Event().wait()
        return result_of(request)

    run = Run(tmp_path, generate=generate, in_memory=True, options={"generation_timeout_seconds": 30.0})

    run.check_all_accounted(await run.go())

    assert called[1] - called[0] == pytest.approx(30.0 + 0.1)


@pytest.mark.parametrize("name", ["windowed", "weight_fifo", "ready_first", "in_order"])
@in_virtual_time
async def test_a_spare_takes_the_place_of_a_prompt_that_always_fails(name: str, tmp_path: Path) -> None:
    """With a spare in the pool, the failed group leaves and the spare enters its batch, with its stamp and admission."""

    async def generate(request: GenerationRequest) -> GroupResult:
        await asyncio.sleep(1.0)
        if request.index == BAD:
            raise ValueError("never works")
        return result_of(request)

    run = Run(
        tmp_path,
        sampler(name),
        generate=generate,
        in_memory=True,
        options={"spare_prompts": 4, "max_attempts": 1},
    )

    summary = await run.go()

    run.check_all_accounted(summary)
    assert summary.dropped["failed"] == 1
    moves = run.recorder.of("owner_moved")
    dropped = moves.index((bad_group(run), "ledger", "dropped", "failed"))
    stand_in, source, target, _ = moves[dropped + 1]
    assert (source, target) == ("spares", "ledger")
    assert stand_in in run.weights.trained


@in_virtual_time
async def test_a_step_that_may_not_shrink_halts_the_run_and_names_the_group(tmp_path: Path) -> None:
    """A refused drop means that the group is tried again; after so many refusals the run ends, naming it."""

    async def generate(request: GenerationRequest) -> GroupResult:
        if request.index == BAD:
            raise ValueError("never works")
        return result_of(request)

    run = Run(
        tmp_path, generate=generate, in_memory=True, options={"max_attempts": 2, "max_refused_drops": 3}
    )

    with pytest.raises(RolloutFailedError, match="min_step_batch_fraction") as caught:
        await run.go()

    assert caught.value.group_id == bad_group(run)
    assert len(outcomes(run, bad_group(run))) == 2 + 3
    run.generate = answers(lambda good: good)
    run.check_all_accounted(await run.go(resume=True))


@in_virtual_time
async def test_the_last_batch_of_an_epoch_may_always_shrink(tmp_path: Path) -> None:
    """The fraction never refuses a drop from the epoch's tail: that batch is short anyway."""
    tail = 11  # dataset index of a prompt in the last batch: see the assertion

    async def generate(request: GenerationRequest) -> GroupResult:
        if request.index == tail:
            raise ValueError("never works")
        return result_of(request)

    run = Run(
        tmp_path, generate=generate, prompts=15, in_memory=True, options={"min_step_batch_fraction": 0.75}
    )
    order = SequenceSource([""] * 15, batch_size=4, seed=7)._order_of(0)  # noqa: SLF001 - which position reads it
    tail = order[13]

    summary = await run.go()

    run.check_all_accounted(summary)
    assert summary.dropped["failed"] == 1


# ------------------------------------------------------------------------------------- dataset, loader, trainer


class Dataset:
    """A dataset one item of which cannot be read."""

    def __init__(self, size: int, bad: int, how: Callable[[], Any]) -> None:
        self.size, self.bad, self.how = size, bad, how

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> str:
        if index == self.bad:
            self.how()
        return f"prompt {index}"


def fail_to_read() -> None:
    """Raise what a broken dataset raises."""
    raise OSError(errno.EIO, "cannot read the shard")


def die() -> None:
    """End this very process."""
    os._exit(3)


@in_virtual_time
async def test_a_dataset_that_raises_ends_the_run_and_names_the_item(tmp_path: Path) -> None:
    """A prompt that cannot be read is a loud end, and the run goes on once it can be."""
    run = Run(tmp_path, in_memory=True)
    source = SequenceSource(Dataset(22, BAD, fail_to_read), batch_size=4, seed=7)

    with pytest.raises(PromptSourceError, match=f"index {BAD}"):
        await run.go(source=source)

    run.check_all_accounted(await run.go(resume=True))


async def test_a_loader_worker_that_dies_ends_the_run_and_the_next_one_goes_on(tmp_path: Path) -> None:
    """A dead worker process is an error of the prompt source, never a run that stands still; nothing was lost by it."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    def loader(dataset: Dataset) -> StatefulLoaderSource:
        return StatefulLoaderSource(
            StatefulDataLoader(IndexedDataset(dataset), batch_size=4, num_workers=1, collate_fn=list)
        )

    run = Run(tmp_path, prompts=22, in_memory=True)

    with pytest.raises(PromptSourceError, match="loader"):
        await run.go(source=loader(Dataset(22, 17, die)))

    summary = await run.go(resume=True, source=loader(Dataset(22, -1, die)))
    run.check_all_accounted(summary)


async def test_a_loader_that_hangs_does_not_keep_a_stopped_run_from_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run saves and ends although the loader's thread never answers again."""
    monkeypatch.setattr(prompts, "CLOSE_SECONDS", 0.05)
    reading, may_end = threading.Event(), threading.Event()

    class Loader:
        dataset = IndexedDataset(["a", "b"])
        generator = None

        def __iter__(self) -> Any:  # noqa: ANN401 - an iterator, if it ever came to that
            reading.set()
            may_end.wait(60)
            return iter([])

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            raise AssertionError

    run = Run(tmp_path, in_memory=True)
    built = run.start(source=StatefulLoaderSource(Loader()))
    task = asyncio.create_task(built.run())
    assert await asyncio.to_thread(reading.wait, 30)
    built.request_stop()

    summary = await task

    assert not may_end.is_set()
    may_end.set()
    run.folder.close()
    assert summary.outcome == "stopped"
    assert not summary.save_failed


@in_virtual_time
async def test_a_train_step_that_raises_ends_the_run_with_its_own_error(tmp_path: Path) -> None:
    """The error of a train step is the run's; what was saved before is whole, and the step is taken again on resume."""

    async def out_of_memory(batch: TrainBatch) -> None:
        if batch.step == 3:
            raise MemoryError("no room on the device")

    run = Run(tmp_path, before_step=out_of_memory, in_memory=True, options={"save_every_steps": 1})

    with pytest.raises(MemoryError, match="no room"):
        await run.go()
    assert run.recorder.of("train_step_ended")[-1][4] == "failed"
    assert audit(tmp_path).ok

    run.before_step = None
    run.check_all_accounted(await run.go(resume=True))


@in_virtual_time
async def test_a_train_step_that_is_cancelled_from_inside_is_an_error(tmp_path: Path) -> None:
    """A cancellation that nobody asked for does not look like a clean end."""

    async def cancelled(_: TrainBatch) -> None:
        raise asyncio.CancelledError

    run = Run(tmp_path, before_step=cancelled, in_memory=True)

    with pytest.raises(RunError, match="cancelled from inside"):
        await run.go()

    run.before_step = None
    run.check_all_accounted(await run.go(resume=True))


@in_virtual_time
async def test_a_source_that_is_cancelled_from_inside_is_an_error(tmp_path: Path) -> None:
    """A rollout pump that ends without a word would leave a run that waits for ever."""

    class Cancelled(SequenceSource):
        async def pull(self) -> Any:  # noqa: ANN401 - it never returns
            raise asyncio.CancelledError

    run = Run(tmp_path, in_memory=True)

    with pytest.raises(RunError, match="rollout pump was cancelled from inside"):
        await run.go(source=Cancelled([""] * 22, batch_size=4, seed=7))


# ------------------------------------------------------------------------------------------------- the data plane


class FullAtTimes(MemoryDataPlane):
    """A store whose map is full for the first puts of one group."""

    refusals = 3
    pins: tuple[str, ...] = ("the snapshot of cut c1",)

    def put(self, rows: Any) -> None:  # noqa: ANN401 - as the interface
        """Refuse some puts."""
        if self.refusals and any(key.group_id.endswith("3") for key in rows):
            self.refusals -= 1
            raise MapFullError("rows", 1 << 20, 1.0, self.pins)
        super().put(rows)


@in_virtual_time
async def test_a_full_map_under_an_open_snapshot_is_back_pressure(tmp_path: Path) -> None:
    """Rows wait until the snapshot is released, even if it just was; the group does not count as failed."""
    run = Run(tmp_path)

    summary = await run.go(
        dataplane=lambda incarnation, barrier: FullAtTimes(incarnation, tensors="numpy", barrier=barrier)
    )

    run.check_all_accounted(summary)
    assert {outcome for *_, outcome, _ in run.recorder.of("rollout_ended")} == {"completed"}
    assert {attempt for _, attempt, *_ in run.recorder.of("rollout_ended")} == {0}


@in_virtual_time
async def test_a_map_that_is_full_for_good_ends_the_run(tmp_path: Path) -> None:
    """Without a snapshot that pins anything, waiting makes no room: the run ends, and says what to change."""

    class Full(FullAtTimes):
        pins = ()

    run = Run(tmp_path)

    with pytest.raises(MapFullError, match="larger map"):
        await run.go(
            dataplane=lambda incarnation, barrier: Full(incarnation, tensors="numpy", barrier=barrier)
        )

    run.check_all_accounted(await run.go(resume=True))


async def test_a_map_that_a_snapshot_fills_up_takes_rows_again_after_its_release(tmp_path: Path) -> None:
    """With a real LMDB store: pages that a snapshot pins make the map full, and its release ends the wait."""
    snapshots: list[Any] = []
    stores: list[LmdbDataPlane] = []

    def small(incarnation: int, barrier: DataPlaneCheckpointBarrier) -> DataPlane:
        store = lmdb(tmp_path, map_bytes=1 << 20)(incarnation, barrier)
        assert isinstance(store, LmdbDataPlane)
        store.full_timeout = 0.05
        stores.append(store)
        return store

    async def generate(request: GenerationRequest) -> GroupResult:
        good = result_of(request)
        filler = np.zeros(20_000, np.uint8)
        return GroupResult([{**row, "filler": filler} for row in good.rows or ()], 0, 0, {})

    async def pin_once(batch: TrainBatch) -> None:
        if batch.step == 0:
            barrier = run.controller.owners.barrier
            async with barrier.checkpoint() as cut:
                snapshots.append(stores[0].snapshot(cut))

    refused: list[str] = []

    class Handler(logging.Handler):
        def emit(self, entry: logging.LogRecord) -> None:
            if "data plane is full" in entry.getMessage():
                refused.append(entry.getMessage())
                snapshots[0].release()

    handler = Handler()
    logging.getLogger("quiesce.rollouts").addHandler(handler)
    try:
        run = Run(tmp_path, prompts=120, generate=generate, before_step=pin_once)
        summary = await run.go(dataplane=small)
    finally:
        logging.getLogger("quiesce.rollouts").removeHandler(handler)
        for snapshot in snapshots:
            snapshot.release()

    assert refused
    run.check_all_accounted(summary)
    assert summary.trained == 120


# ------------------------------------------------------------------------------------------------------- stalls


@in_virtual_time
async def test_a_stuck_rollout_is_named_and_in_the_end_halts_the_run(tmp_path: Path) -> None:
    """One rollout that never resolves is reported by name, and past the limit it ends the run; nothing is lost."""

    async def generate(request: GenerationRequest) -> GroupResult:
        if request.index == BAD:
            await asyncio.Event().wait()
        return result_of(request)

    run = Run(
        tmp_path,
        generate=generate,
        in_memory=True,
        options={
            "generation_timeout_seconds": 1e6,
            "stall_report_seconds": 60.0,
            "stall_abort_seconds": 300.0,
        },
    )

    with pytest.raises(StallError) as caught:
        await run.go()

    assert caught.value.group_id == bad_group(run)
    assert [(what, group) for what, group, _ in run.recorder.of("stalled")] == [
        ("a rollout has not ended", bad_group(run))
    ] * 3  # at 60, 120 and 240 seconds
    run.generate = answers(lambda good: good)
    run.check_all_accounted(await run.go(resume=True))


@in_virtual_time
async def test_a_train_step_that_hangs_is_named_and_halted(tmp_path: Path) -> None:
    """A step is never cancelled, but for a stall past the limit: it would hang for ever."""

    async def hang(batch: TrainBatch) -> None:
        if batch.step == 2:
            await asyncio.Event().wait()

    run = Run(tmp_path, before_step=hang, in_memory=True, options={"stall_abort_seconds": 300.0})

    with pytest.raises(StallError, match="a train step has not ended"):
        await run.go()

    run.before_step = None
    run.check_all_accounted(await run.go(resume=True))


@in_virtual_time
async def test_a_hanging_step_is_halted_also_after_another_failure(tmp_path: Path) -> None:
    """The first failure is the one that is raised, but it cannot keep the stall watch from ending the run."""

    async def hang(_: TrainBatch) -> None:
        failing.set()
        await asyncio.Event().wait()

    async def generate(request: GenerationRequest) -> GroupResult:
        if request.index == BAD:
            await failing.wait()
            raise ValueError("never works")
        return result_of(request)

    failing = asyncio.Event()
    run = Run(
        tmp_path,
        sampler("ready_first"),
        generate=generate,
        before_step=hang,
        in_memory=True,
        options={"stall_abort_seconds": 300.0, "max_attempts": 1, "min_step_batch_fraction": 0.0},
    )
    built = run.start()
    task = asyncio.create_task(built.run())
    await failing.wait()
    built._fail(KeyError("something else"))  # noqa: SLF001 - whatever else may fail meanwhile

    with pytest.raises(KeyError):
        await task

    run.folder.close()


# --------------------------------------------------------------------------------------------- stop at any time


class StopAt:
    """Asks for a stop at the n-th hook that fires, whatever it is and whichever thread fires it."""

    def __init__(self, count: int) -> None:
        self.left = count
        self.loop = asyncio.get_running_loop()
        self.stop: Callable[[], None] = lambda: None
        self.lock = threading.Lock()
        self.at = ""
        for hook in HOOKS:
            setattr(self, hook, lambda *_, hook=hook: self.note(hook))

    def note(self, hook: str) -> None:
        """Count; ask when it is time."""
        with self.lock:
            self.left -= 1
            if self.left == 0:
                self.at = hook
                self.loop.call_soon_threadsafe(self.stop)


async def stopped_at(run: Run, count: int, **changes: Any) -> tuple[RunSummary, StopAt]:  # noqa: ANN401 - passed on
    """Run until the n-th hook asks for a stop, and on to the end."""
    stop = StopAt(count)
    built = run.start(observers=(stop,), **changes)
    stop.stop = built.request_stop
    try:
        return await built.run(), stop
    finally:
        run.folder.close()


def slowly(request: GenerationRequest) -> Awaitable[GroupResult]:
    """Generate, each group at its own pace."""

    async def generate() -> GroupResult:
        await asyncio.sleep(request.index % 3)
        return result_of(request)

    return generate()


def test_a_stop_is_clean_whenever_it_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked at any moment of the start-up, between steps, in a step or while saving, a run saves once and can go on."""
    monkeypatch.setattr(os, "fsync", lambda _: None)  # nothing is killed here, and there are many saves
    met: set[str] = set()
    stopped = 0

    @in_virtual_time
    async def play(count: int) -> bool:
        nonlocal stopped
        run = Run(
            tmp_path / str(count),
            generate=slowly,
            before_step=lambda _: asyncio.sleep(1.0),
            prompts=10,
            in_memory=True,
            options={"save_every_steps": 1},
        )
        summary, stop = await stopped_at(run, count)
        assert not summary.save_failed
        assert summary.last_save is not None
        assert summary.last_save.outcome in {"completed", "skipped"}
        if stop.left <= 0:
            met.add(stop.at)
        stopped += summary.outcome == "stopped"
        if summary.outcome == "stopped":
            summary = await run.go(resume=True)
        run.check_all_accounted(summary)
        return stop.left <= 0

    # Uneven strides, so that they do not fall into step with the hooks' own rhythm and miss a kind.
    counts = itertools.accumulate(itertools.cycle((1, 8, 5, 11, 9)))
    while play(next(counts)):
        pass

    assert stopped > 10
    assert {"phase_ended", "owner_moved", "slot_closed"} <= met


def test_a_stop_is_seen_at_every_await_of_the_start_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the start-up is suspended when the stop comes, step_0 is published and the run ends without a step."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    reached = 0

    @in_virtual_time
    async def play(count: int) -> bool:
        run = Run(tmp_path / str(count), prompts=6, in_memory=True)
        built = run.start()

        class Stepped:
            def __await__(self) -> Any:  # noqa: ANN401 - what a coroutine yields
                awaiting = built.run().__await__()
                suspensions = 0
                value: BaseException | None = None
                while True:
                    try:
                        waits_for = awaiting.send(None) if value is None else awaiting.throw(value)
                    except StopIteration as stop:
                        return stop.value
                    suspensions += 1
                    if suspensions == count:
                        nonlocal reached
                        reached += 1
                        built.request_stop()
                    value = None
                    try:
                        yield waits_for
                    except BaseException as error:  # noqa: BLE001 - it belongs to the run
                        value = error

        async def run_it() -> RunSummary:
            summary: RunSummary = await Stepped()
            return summary

        before = reached
        summary = await asyncio.create_task(run_it())
        run.folder.close()
        assert not summary.save_failed
        if summary.outcome == "stopped":
            summary = await run.go(resume=True)
        run.check_all_accounted(summary)
        return reached > before

    count = 1
    while play(count):
        count += 1

    assert count > 5


@pytest.mark.parametrize("problem", [OSError(errno.ENOSPC, "no space left"), ValueError("cannot be staged")])
@in_virtual_time
async def test_a_final_save_that_fails_is_told_and_the_one_before_it_is_used(
    problem: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stopped run whose last cut could not be saved says so; the checkpoint before it is whole and is resumed from."""
    run = Run(
        tmp_path,
        generate=slowly,
        before_step=lambda _: asyncio.sleep(1.0),
        in_memory=True,
        options={"save_every_steps": 2},
    )
    stage = Weights.stage

    async def failing(self: Weights) -> Any:  # noqa: ANN401 - as the original
        if run.controller._stopping:  # noqa: SLF001 - only the last save is to fail
            raise problem
        return await stage(self)

    monkeypatch.setattr(Weights, "stage", failing)
    summary = await run.go(stop_after=7.0)
    assert summary.outcome == "stopped"
    assert summary.save_failed
    assert summary.last_save is not None
    assert summary.last_save.outcome == "failed"
    assert run.recorder.of("run_state_changed")[-1] == ("failed",)
    steps = summary.step

    monkeypatch.undo()
    summary = await run.go(resume=True)

    run.check_all_accounted(summary)
    assert steps > 0


@in_virtual_time
async def test_a_run_whose_first_checkpoint_cannot_be_published_does_not_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without step_0 there would be nothing to resume: no prompt is read."""

    async def failing(_: Weights) -> Any:  # noqa: ANN401 - as the original
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(Weights, "stage", failing)
    run = Run(tmp_path, in_memory=True)

    with pytest.raises(SaveRequiredError, match="no space left"):
        await run.go()

    assert not run.recorder.of("prompts_read")
    assert run.recorder.of("run_state_changed")[-1] == ("failed",)
