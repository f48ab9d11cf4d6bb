"""The train pump: one step after the other, the version in between, and nothing half done at a cut."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from quiesce import ControllerConfig
from quiesce.barrier import detached
from quiesce.dataplane import MemoryDataPlane
from quiesce.errors import ClaimError, MissingRowError, RowExistsError, UnknownGroupError
from quiesce.owners import Owners
from quiesce.signals import TrainerVersion
from quiesce.testing import all_waiting, in_virtual_time, settle
from quiesce.training import TrainBatch, TrainPump
from quiesce.types import BufferEntry, GroupRecord
from tests.run_rig import rows_of, sampler, until
from tests.unit.test_owners import Scene


class Cancelled:
    """Stands for the workers: notes whose are cancelled."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def cancel(self, names: list[str]) -> None:
        """Note them."""
        self.names += names


class Training(Scene):
    """Owners with rows in memory, and a train pump over them."""

    def __init__(
        self,
        name: str = "in_order",
        window: int = 2,
        *,
        pump: type[TrainPump] = TrainPump,
        step: Callable[[TrainBatch], Awaitable[Mapping[str, float]]] | None = None,
        sync: Callable[[int], Awaitable[None]] | None = None,
        **config: Any,  # noqa: ANN401 - passed on
    ) -> None:
        super().__init__(sampler(name, window))
        self.plane = MemoryDataPlane(1, tensors="numpy", hub=self.barrier.hub)
        self.owners.buffer._rows = self.plane  # noqa: SLF001 - where this scene's rows really are
        self.batches: list[TrainBatch] = []
        self.step = step
        self.stop = False
        self.saves = 0
        self.told: list[tuple[int, tuple[str, ...]]] = []
        self.workers = Cancelled()
        self.pump = pump(
            self.owners,
            self.plane,
            self.workers,  # type: ignore[arg-type] # all that the pump needs
            train_step=self.train,
            sync_weights=sync,
            between_steps=self.between,
            interrupted=lambda: self.stop,
            config=ControllerConfig(**{"groups_per_step": 4, **config}),
            hub=self.barrier.hub,
            trained=lambda step, groups: self.told.append((step, groups)),
        )

    async def train(self, batch: TrainBatch) -> Mapping[str, float]:
        """Train as told."""
        self.batches.append(batch)
        return {"reward": 1.0} if self.step is None else await self.step(batch)

    async def between(self) -> None:
        """Count."""
        self.saves += 1

    async def finished(self, record: GroupRecord) -> BufferEntry:
        """Put rows and commit."""
        keys = self.keys(record)
        self.plane.put(dict(zip(keys, rows_of(record.prompt.index), strict=True)))
        async with self.barrier.mutation("group_commit") as cut:
            return self.owners.commit_rollout(
                cut, record, keys=keys, generated_from=0, generated_to=0, stats={}
            )

    async def batch(self, count: int = 4, **how: Any) -> list[BufferEntry]:  # noqa: ANN401 - passed on
        """Read, admit and finish a batch."""
        return [await self.finished(record) for record in await self.admitted(count, **how)]


@in_virtual_time
async def test_a_step_trains_its_groups_with_their_rows_in_order() -> None:
    """The train function gets step, version, the groups in the sampler's order, and each one's rows."""
    scene = Training()
    entries = await scene.batch(ends=True, last=True)

    await scene.pump.run()

    (batch,) = scene.batches
    assert (batch.step, batch.version, batch.entries) == (0, 0, tuple(entries))
    assert [[int(row["index"][0]) for row in rows] for rows in batch.rows] == [
        [100 + at] * 2 for at in range(4)
    ]
    assert scene.counts()["trained"] == 4
    assert scene.told == [(1, tuple(entry.group_id for entry in entries))]
    ((step, version, _, groups, outcome, metrics),) = scene.recorder.of("train_step_ended")
    assert (step, version, groups, outcome) == (1, 0, 4, "completed")
    assert (metrics["reward"], metrics["staleness"], metrics["staleness_max"]) == (1.0, 0.0, 0)


# -------------------------------------------------------------------------------------- how a claim ends


class FinishesFirst(TrainPump):
    """Lacks the rule: the claim ends before the version advances."""

    async def _take_step(self) -> None:
        finish, advance = Owners.finish, TrainerVersion.advance

        def late(owners: Owners, cut: Any, claim: Any) -> None:  # noqa: ANN401 - as the original
            finish(owners, cut, claim)
            advance(owners.versions)

        with (
            patch.object(Owners, "finish", late),
            patch.object(TrainerVersion, "advance", lambda versions: versions.value + 1),
        ):
            await super()._take_step()


async def trained_after_the_version(pump: type[TrainPump]) -> None:
    """When a group counts as trained, the version that it was trained into is there already."""
    seen: list[int] = []

    class Watch:
        def owner_moved(self, _: str, source: str, target: str, reason: str) -> None:
            if (source, target, reason) == ("training", "trained", ""):
                seen.append(versions.value)

    scene = Training(pump=pump)
    await scene.batch(ends=True, last=True)
    versions = scene.owners.versions
    scene.barrier.hub.subscribe(Watch())
    await scene.pump.run()
    assert seen == [1] * 4


@in_virtual_time
async def test_a_claim_ends_after_the_version_advance() -> None:
    """A claim ends in one slot, after the optimizer step and the version advance."""
    await trained_after_the_version(TrainPump)


@in_virtual_time
async def test_a_claim_that_ends_before_the_version_is_noticed() -> None:
    """The same check fails where the groups count as trained first."""
    with pytest.raises(AssertionError):
        await trained_after_the_version(FinishesFirst)


class FinishesInTwoSlots(TrainPump):
    """Lacks the rule: counting as trained and handing the rows over are two slots."""

    async def _take_step(self) -> None:
        owners = self._owners
        handed: list[Any] = []
        hand_over = owners.clears.hand_over
        owners.clears.hand_over = handed.extend  # type: ignore[method-assign,assignment] # a broken variant
        try:
            await super()._take_step()
        finally:
            owners.clears.hand_over = hand_over  # type: ignore[method-assign] # as it was
        async with owners.barrier.mutation("sample_clear"):
            owners.clears.hand_over(handed)


async def trained_and_handed_over_in_one_slot(pump: type[TrainPump]) -> None:
    """After the slot in which groups count as trained, their rows are in cleanup's hands."""
    scene = Training(pump=pump)
    entries = await scene.batch(ends=True, last=True)
    seen: list[tuple[int, int]] = []

    class Watch:
        def slot_closed(self, kind: str, *_: object) -> None:
            if kind == "sample_clear":
                seen.append((scene.counts()["trained"], len(scene.owners.clears.outstanding())))

    scene.barrier.hub.subscribe(Watch())
    await scene.pump.run()
    assert seen == [(4, sum(len(entry.keys) for entry in entries))]


@in_virtual_time
async def test_one_slot_records_groups_as_trained_and_hands_their_rows_over() -> None:
    """No cut can fall between the two."""
    await trained_and_handed_over_in_one_slot(TrainPump)


@in_virtual_time
async def test_two_slots_are_noticed() -> None:
    """The same check fails where the rows are handed over in a slot of their own."""
    with pytest.raises(AssertionError):
        await trained_and_handed_over_in_one_slot(FinishesInTwoSlots)


class BeginsLate(TrainPump):
    """Lacks the rule: a step's claim is not marked as begun."""

    async def _take_step(self) -> None:
        buffer = self._owners.buffer
        finish = buffer.finish

        def begin_and_finish(cut: Any, claim: Any) -> Any:  # noqa: ANN401 - as the original
            type(buffer).begin(buffer, claim)
            return finish(cut, claim)

        buffer.begin, buffer.finish = lambda _: None, begin_and_finish  # type: ignore[method-assign,assignment] # broken
        await super()._take_step()


async def a_cut_inside_a_step_is_refused(pump: type[TrainPump]) -> None:
    """Whoever takes a cut while a step runs is refused: its groups are neither untrained nor trained."""
    refused: list[bool] = []

    async def step(_: TrainBatch) -> Mapping[str, float]:
        async def cut() -> None:
            async with scene.barrier.checkpoint():
                try:
                    scene.owners.buffer.capture()
                except ClaimError:
                    refused.append(True)
                else:
                    refused.append(False)

        await detached(cut())
        return {}

    scene = Training(pump=pump, step=step)
    await scene.batch(ends=True, last=True)
    await scene.pump.run()
    assert refused == [True]


@in_virtual_time
async def test_no_cut_lies_inside_a_step() -> None:
    """No cut lies between the start of an optimizer step and the slot that ends its claim."""
    await a_cut_inside_a_step_is_refused(TrainPump)


@in_virtual_time
async def test_a_step_that_is_not_marked_as_begun_is_noticed() -> None:
    """The same check fails where the claim looks as if its step had not begun."""
    with pytest.raises(AssertionError):
        await a_cut_inside_a_step_is_refused(BeginsLate)


# ---------------------------------------------------------------------------------------------- select and claim


class SelectsOutside(TrainPump):
    """Lacks the rule: the groups are selected before the slot and claimed inside it."""

    async def _take_step(self) -> None:
        chosen = self._owners.plan() or ()
        with patch.object(Owners, "claim", lambda owners, cut: owners.buffer.claim_for_training(cut, chosen)):
            await super()._take_step()


async def selection_is_made_in_the_slot(pump: type[TrainPump]) -> None:
    """A group that leaves while the claim waits for its slot is not claimed; the pump looks again and goes on."""
    scene = Training("ready_first", pump=pump)
    entries = await scene.batch(5, ends=True, last=True)
    leave = asyncio.Event()

    async def window() -> None:
        async with scene.barrier.checkpoint():
            await leave.wait()

    async def evict() -> None:
        async with scene.barrier.mutation("group_removal") as cut:
            scene.owners.evict(cut, [entries[0].group_id], "violation")

    held = detached(window())
    await settle()
    evicting = detached(evict())
    await settle()
    running = detached(scene.pump.run())
    await settle()
    leave.set()
    failure: UnknownGroupError | None = None
    try:
        await asyncio.gather(held, evicting, running)
    except UnknownGroupError as error:
        failure = error
    assert failure is None
    assert scene.counts()["trained"] == 4


@in_virtual_time
async def test_select_and_claim_are_one_step_of_the_train_pump() -> None:
    """Nothing can come between what was selected and what is claimed."""
    await selection_is_made_in_the_slot(TrainPump)


@in_virtual_time
async def test_a_selection_outside_the_slot_is_noticed() -> None:
    """The same check fails where the selection is older than the claim."""
    with pytest.raises(AssertionError):
        await selection_is_made_in_the_slot(SelectsOutside)


# -------------------------------------------------------------------------------------------------- write-back


@in_virtual_time
async def test_new_fields_are_written_back_inside_a_slot_of_their_own() -> None:
    """An advantage write-back adds fields to the step's rows, under a live slot."""

    async def step(batch: TrainBatch) -> Mapping[str, float]:
        await batch.write_back([[{"advantage": np.ones(1)} for _ in group] for group in batch.rows])
        rows = scene.plane.get([key for entry in batch.entries for key in entry.keys], ["advantage"])
        assert len(rows) == 8
        return {}

    scene = Training(step=step)
    await scene.batch(ends=True, last=True)

    await scene.pump.run()

    assert "advantage_writeback" in [kind for kind, *_ in scene.recorder.of("slot_opened")]


@in_virtual_time
async def test_a_write_back_outside_its_step_is_refused() -> None:
    """After its step a batch writes nothing any more: its rows are being cleared."""
    scene = Training()
    await scene.batch(ends=True, last=True)
    await scene.pump.run()
    (batch,) = scene.batches

    with pytest.raises(ClaimError, match="only in a begun step"):
        await batch.write_back([[{"advantage": np.ones(1)} for _ in group] for group in batch.rows])


@in_virtual_time
async def test_a_write_back_of_another_shape_or_over_a_field_is_refused() -> None:
    """Rows are immutable: a field is added once, to the rows that the batch has."""
    errors: list[Exception] = []

    async def step(batch: TrainBatch) -> Mapping[str, float]:
        for fields in ([], [[{"more": np.ones(1)}]] * 4, [[{"index": np.ones(2)}] * 2] * 4):
            try:
                await batch.write_back(fields)
            except (ClaimError, RowExistsError) as error:
                errors.append(error)
        return {}

    scene = Training(step=step)
    await scene.batch(ends=True, last=True)

    await scene.pump.run()

    assert [type(error) for error in errors] == [ClaimError, ClaimError, RowExistsError]


# ------------------------------------------------------------------------------------------------ other steps


@in_virtual_time
async def test_a_step_that_lost_every_group_is_passed() -> None:
    """An admitted step with target 0 is passed without an optimizer step, and the version advances all the same."""
    scene = Training(window=1)
    lost = await scene.admitted(1)
    await scene.batch(2, ends=True, last=True)
    async with scene.barrier.mutation("group_removal") as cut:
        scene.owners.drop(cut, lost[0].group_id, "failed")

    await scene.pump.run()

    assert [(batch.step, batch.version) for batch in scene.batches] == [(1, 1)]
    assert scene.owners.versions.value == 2
    assert scene.told[0] == (1, ())
    assert [event[4] for event in scene.recorder.of("train_step_ended")] == ["skipped", "completed"]


@in_virtual_time
async def test_weights_are_handed_over_after_every_version() -> None:
    """Also after a step that was passed: the generation side follows the version."""
    synced: list[int] = []

    async def sync(version: int) -> None:
        synced.append(version)

    scene = Training(window=1, sync=sync)
    lost = await scene.admitted(1)
    await scene.batch(2, ends=True, last=True)
    async with scene.barrier.mutation("group_removal") as cut:
        scene.owners.drop(cut, lost[0].group_id, "failed")

    await scene.pump.run()

    assert synced == [1, 2]
    assert [cause for cause, _ in scene.recorder.of("train_idled")].count("sync") == 2


@in_virtual_time
async def test_a_wait_that_lasts_is_reported_while_it_lasts() -> None:
    """Second by second, and the rest when it is over: nothing is lost or told twice."""
    before: list[int] = []

    async def sync(_: int) -> None:
        await asyncio.sleep(2.5)
        before.append(sum(cause == "sync" for cause, _ in scene.recorder.of("train_idled")))

    scene = Training(window=1, sync=sync)
    await scene.batch(1, ends=True, last=True)

    await scene.pump.run()

    told = [ns for cause, ns in scene.recorder.of("train_idled") if cause == "sync"]
    assert before == [2]
    assert len(told) == 3


@in_virtual_time
async def test_stale_groups_are_aborted_and_evicted_between_steps() -> None:
    """What a new version makes stale leaves in one slot each, and the workers are cancelled outside of it."""
    active: list[int] = []
    scene = Training("windowed", 0, max_steps=1)
    await scene.batch(4)
    (late,) = await scene.admitted(1)
    (ready,) = await scene.batch(1)
    cancel = scene.workers.cancel

    def noting(names: list[str]) -> None:
        active.append(sum(scene.barrier.statistics().active.values()))
        cancel(names)

    scene.workers.cancel = noting  # type: ignore[method-assign] # looks first
    scene.pump._config = ControllerConfig(groups_per_step=4)  # noqa: SLF001 - no limit of steps
    running = detached(scene.pump.run())
    await until(lambda: scene.owners.accounting.statistics().dropped["evicted"])
    assert await all_waiting(running)
    scene.stop = True
    scene.owners.changed.notify()
    await running

    dropped = scene.owners.accounting.statistics().dropped
    assert (dropped["stale_abort"], dropped["evicted"]) == (1, 1)
    assert scene.workers.names == [late.group_id]
    assert active == [0]
    assert ready.group_id not in scene.owners.buffer


@in_virtual_time
async def test_rows_that_cannot_be_read_end_the_run_with_the_groups_still_ready() -> None:
    """A step whose rows cannot be read never began: its groups go back to the samplers."""
    scene = Training()
    entries = await scene.batch()
    scene.plane.clear(entries[0].keys)

    with pytest.raises(MissingRowError):
        await scene.pump.run()

    assert scene.counts()["ready"] == 4
    assert scene.owners.buffer.claims() == ()


@in_virtual_time
async def test_a_stop_is_seen_while_there_is_nothing_to_train() -> None:
    """The flag is awaited beside "enough groups"."""
    scene = Training()
    running = detached(scene.pump.run())
    assert await all_waiting(running)

    scene.stop = True
    scene.owners.changed.notify()
    await settle()

    assert running.done()
    assert not scene.batches


@in_virtual_time
async def test_a_running_step_is_finished_before_a_stop() -> None:
    """A stop never cancels an optimizer step; it is read between steps."""
    may_end = asyncio.Event()

    async def step(_: TrainBatch) -> Mapping[str, float]:
        await may_end.wait()
        return {}

    scene = Training(step=step)
    await scene.batch()
    await scene.batch()
    running = detached(scene.pump.run())
    await until(lambda: scene.batches)
    scene.stop = True
    scene.owners.changed.notify()
    assert await all_waiting(running)

    may_end.set()
    await running

    assert scene.counts()["trained"] == 4
    assert len(scene.batches) == 1
    assert scene.saves == 2


@in_virtual_time
async def test_a_run_takes_no_more_steps_than_it_may() -> None:
    """The limit counts trained steps, and what is ready stays ready."""
    scene = Training(max_steps=1)
    await scene.batch()
    await scene.batch()

    await scene.pump.run()

    assert scene.counts()["ready"] == 4
    assert scene.owners.step == 1


@in_virtual_time
async def test_a_step_that_fails_leaves_its_claim_begun() -> None:
    """Its weights may have changed, so no cut may pretend that its groups are untrained."""

    async def step(_: TrainBatch) -> Mapping[str, float]:
        raise FloatingPointError("the loss is not finite")

    scene = Training(step=step)
    await scene.batch()

    with pytest.raises(FloatingPointError):
        await scene.pump.run()

    (claim,) = scene.owners.buffer.claims()
    assert claim.begun
    assert scene.recorder.of("train_step_ended")[0][4] == "failed"
