"""Rollout workers: from launch to commit, retry, substitution or drop."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import numpy as np
import pytest

from quiesce import ControllerConfig, GenerationRequest, GroupResult, SequenceSource
from quiesce.barrier import detached
from quiesce.dataplane import MemoryDataPlane
from quiesce.errors import (
    MissingRowError,
    NestedCutError,
    PermitTimeoutError,
    QuiesceError,
    StagingRetiredError,
    StoreFailedError,
)
from quiesce.owners import Owners
from quiesce.rollouts import MAX_BACKOFF_SECONDS, Rollouts
from quiesce.snapshot_gate import SnapshotGate
from quiesce.staging import Staging
from quiesce.testing import in_virtual_time, settle
from quiesce.types import GroupRecord, RowKey
from tests.run_rig import at_once, result_of, rows_of, sampler, until
from tests.unit.test_owners import Scene


class Workers(Scene):
    """Owners with rows in memory, and the workers of their groups."""

    def __init__(
        self,
        generate: Callable[[GenerationRequest], Awaitable[GroupResult]] = at_once,
        *,
        name: str = "in_order",
        rollouts_class: type[Rollouts] = Rollouts,
        owners_class: type[Owners] = Owners,
        staged: Mapping[str, tuple[RowKey, ...]] | None = None,
        **config: Any,  # noqa: ANN401 - passed on
    ) -> None:
        super().__init__(sampler(name), owners_class=owners_class)
        self.plane = MemoryDataPlane(1, tensors="numpy", hub=self.barrier.hub)
        self.owners.buffer._rows = self.plane  # noqa: SLF001 - where this scene's rows really are
        self.failures: list[BaseException] = []
        self.rollouts = rollouts_class(
            self.owners,
            self.plane,
            SequenceSource([f"prompt {index}" for index in range(200)], batch_size=4, seed=None),
            generate,
            ControllerConfig(
                **{"groups_per_step": 4, "generations_per_group": 2, "min_step_batch_fraction": 0.0, **config}
            ),
            fail=self.failures.append,
            staged=staged,
            hub=self.barrier.hub,
        )

    async def launched(self, count: int = 1) -> list[GroupRecord]:
        """Admit a batch and start its workers."""
        records = await self.admitted(count)
        for record in records:
            self.rollouts.launch(record, "payload")
        return records

    async def ended(self) -> None:
        """Wait until no worker is left."""
        while tasks := list(self.rollouts._tasks.values()):  # noqa: SLF001 - nobody else knows them
            await asyncio.wait(tasks)

    @property
    def outcomes(self) -> list[tuple[int, str]]:
        """Attempts and how they ended."""
        return [(attempt, outcome) for _, attempt, _, outcome, _ in self.recorder.of("rollout_ended")]

    def close(self) -> None:
        """Let the store go."""
        self.plane.close()


@in_virtual_time
async def test_a_worker_puts_rows_and_commits_its_group() -> None:
    """The happy path: rows are in the store, the group is ready, nobody works on it any more."""
    scene = Workers()
    (record,) = await scene.launched()

    await scene.ended()

    (entry,) = scene.owners.buffer.ready()
    assert entry.group_id == record.group_id
    assert scene.plane.missing(entry.keys) == ()
    assert [key.generation for key in entry.keys] == [0, 1]
    assert scene.outcomes == [(0, "completed")]
    assert not scene.failures


@in_virtual_time
async def test_the_generate_function_is_told_what_to_generate() -> None:
    """It gets the payload by reference, the batch's start version, and how many generations are wanted."""
    asked: list[GenerationRequest] = []

    async def generate(request: GenerationRequest) -> GroupResult:
        asked.append(request)
        return result_of(request)

    scene = Workers(generate)
    (record,) = await scene.launched()
    await scene.ended()

    assert asked == [GenerationRequest(record.group_id, 0, "payload", 100, 0, 2)]


# --------------------------------------------------------------------------------- no slot while rows are put


class PutInSlot(Rollouts):
    """Lacks the rule: rows are put inside a slot."""

    async def _put(self, rows: Any) -> None:  # noqa: ANN401 - as the original
        async with self._owners.barrier.mutation("group_commit"):
            await super()._put(rows)


async def rows_are_put_without_a_slot(rollouts_class: type[Rollouts]) -> None:
    """While a put takes its time, a checkpoint does not wait for it."""
    import threading

    may_put = threading.Event()
    scene = Workers(rollouts_class=rollouts_class)
    put = scene.plane.put

    def slow(rows: Any) -> None:  # noqa: ANN401 - as the interface
        assert may_put.wait(20)
        put(rows)

    scene.plane.put = slow  # type: ignore[method-assign] # held
    await scene.launched()
    for _ in range(20):
        await asyncio.sleep(0)
    try:
        assert not any(scene.barrier.statistics().active.values())
    finally:
        may_put.set()
        await scene.ended()


@in_virtual_time
async def test_rows_are_put_before_the_flip_and_without_a_slot() -> None:
    """Rows are put before the flip without slot or permit of the controller's own."""
    await rows_are_put_without_a_slot(Rollouts)


@in_virtual_time
async def test_a_put_inside_a_slot_is_noticed() -> None:
    """The same check fails where a slot is held while rows are put."""
    with pytest.raises(AssertionError):
        await rows_are_put_without_a_slot(PutInSlot)


# ------------------------------------------------------------------------------------------------- detached


class Attached(Rollouts):
    """Lacks the rule: workers are started as ordinary tasks, which inherit the launcher's cut."""

    def launch(self, record: GroupRecord, payload: Any) -> None:  # noqa: ANN401 - as the original
        """Start a task in the launcher's context."""
        task = asyncio.get_running_loop().create_task(self._work(record, payload))
        self._tasks[record.group_id] = task
        task.add_done_callback(lambda done: self._ended(record.group_id, done))


async def launched_inside_a_slot(rollouts_class: type[Rollouts]) -> None:
    """A worker that is started while its launcher still holds a slot opens slots of its own."""
    scene = Workers(rollouts_class=rollouts_class)
    (record,) = await scene.admitted(1)
    async with scene.barrier.mutation("admission"):
        scene.rollouts.launch(record, "payload")
        await scene.ended()
    assert not scene.failures
    assert len(scene.owners.buffer.ready()) == 1


@in_virtual_time
async def test_a_worker_s_context_holds_no_cut() -> None:
    """Tasks are launched through a function that detaches their context, so that they never trip over their parent."""
    await launched_inside_a_slot(Rollouts)


@in_virtual_time
async def test_a_worker_that_inherits_its_launcher_s_cut_is_noticed() -> None:
    """The same check fails where the worker is an ordinary task."""
    with pytest.raises(AssertionError):
        await launched_inside_a_slot(Attached)
    assert issubclass(NestedCutError, QuiesceError)


# ------------------------------------------------------------------------------- cancelled before its first step


class ReleasedInFinally(Rollouts):
    """Lacks the rule: what a worker was handed is released in its own ``finally``."""

    def launch(self, record: GroupRecord, payload: Any) -> None:  # noqa: ANN401 - as the original
        """Start a task that cleans up after itself."""

        async def work() -> None:
            try:
                await self._work(record, payload)
            finally:
                self._tasks.pop(record.group_id, None)

        self._tasks[record.group_id] = detached(work())


async def cancelled_before_its_first_step(rollouts_class: type[Rollouts]) -> None:
    """A worker that is cancelled in the very step that launched it leaves nothing behind."""
    scene = Workers(rollouts_class=rollouts_class)
    (record,) = await scene.launched()
    scene.rollouts.cancel([record.group_id])
    await settle()
    assert scene.rollouts.running == ()
    assert not scene.failures


@in_virtual_time
async def test_a_worker_cancelled_before_its_first_step_is_released() -> None:
    """A task cancelled before its first step never runs its finally: it is released in a done-callback."""
    await cancelled_before_its_first_step(Rollouts)


@in_virtual_time
async def test_a_release_in_the_worker_s_own_finally_is_noticed() -> None:
    """The same check fails where the worker releases itself."""
    with pytest.raises(AssertionError):
        await cancelled_before_its_first_step(ReleasedInFinally)


# ------------------------------------------------------------------------------------- rows that did not make it


async def held_window(scene: Workers, leave: asyncio.Event) -> None:
    """Keep every slot waiting."""
    async with scene.barrier.checkpoint():
        await leave.wait()


@in_virtual_time
async def test_a_worker_cancelled_while_its_commit_waits_hands_its_rows_over() -> None:
    """Rows that were put and did not become a ready group are cleared, and the ledger still owns the group."""
    scene = Workers()
    leave = asyncio.Event()
    (record,) = await scene.admitted(1)
    window = detached(held_window(scene, leave))
    await settle()
    scene.rollouts.launch(record, "payload")
    await until(lambda: scene.barrier.statistics().waiting["group_commit"])

    scene.rollouts.cancel([record.group_id])
    await scene.ended()
    leave.set()
    await window

    assert set(scene.owners.clears.outstanding()) == set(scene.keys(record))
    assert scene.owners.ledger.get(record.group_id) == record
    assert scene.outcomes == [(0, "cancelled")]
    assert not scene.failures


@in_virtual_time
async def test_a_worker_cancelled_while_its_rows_are_put_hands_them_over_afterwards() -> None:
    """A thread cannot be stopped: the rows are cleared once its put is done, not before it."""
    import threading

    may_put = threading.Event()
    scene = Workers()
    put = scene.plane.put

    def slow(rows: Any) -> None:  # noqa: ANN401 - as the interface
        assert may_put.wait(20)
        put(rows)

    scene.plane.put = slow  # type: ignore[method-assign] # held
    (record,) = await scene.launched()
    for _ in range(20):
        await asyncio.sleep(0)

    scene.rollouts.cancel([record.group_id])
    for _ in range(20):
        await asyncio.sleep(0)
    assert scene.rollouts.running == ()
    assert scene.owners.clears.outstanding() == ()
    may_put.set()
    await until(scene.owners.clears.outstanding)

    assert set(scene.owners.clears.outstanding()) == set(scene.keys(record))
    assert scene.plane.missing(scene.keys(record)) == ()


@in_virtual_time
async def test_an_abort_in_the_middle_of_a_rollout_drops_its_group_once() -> None:
    """The record is gone, one drop is counted, the worker ends without an error and is not waited for any more."""
    scene = Workers(lambda _: asyncio.Event().wait(), name="windowed")  # type: ignore[arg-type,return-value] # never answers
    (record,) = await scene.launched()
    await settle()
    scene.owners.versions.advance(5)
    async with scene.barrier.mutation("watchdog_abort") as cut:
        aborted = scene.owners.abort_stale(cut)
    assert record.group_id in scene.rollouts.running

    scene.rollouts.cancel([gone.group_id for gone in aborted])
    await scene.ended()

    assert scene.counts()["dropped"] == 1
    assert scene.outcomes == [(0, "cancelled")]
    assert not scene.failures


@in_virtual_time
async def test_a_commit_that_comes_too_late_is_refused_and_its_rows_are_handed_over() -> None:
    """A group that was dropped while it was generated is skipped, not failed: nobody waits for it any more."""
    scene = Workers()
    leave = asyncio.Event()
    (record,) = await scene.admitted(1)
    window = detached(held_window(scene, leave))
    await settle()
    dropping = detached(_drop(scene, record))  # asks before the commit does
    await settle()
    scene.rollouts.launch(record, "payload")
    await until(lambda: scene.barrier.statistics().waiting["group_commit"])
    leave.set()
    await asyncio.gather(window, dropping)
    await scene.ended()

    assert scene.outcomes == [(0, "skipped")]
    assert set(scene.owners.clears.outstanding()) == set(scene.keys(record))
    assert scene.counts()["dropped"] == 1
    assert not scene.failures


async def _drop(scene: Workers, record: GroupRecord) -> None:
    async with scene.barrier.mutation("group_removal") as cut:
        scene.owners.drop(cut, record.group_id, "violation")


# ------------------------------------------------------------------------------------ retry, substitute, drop


@in_virtual_time
async def test_the_pause_between_attempts_doubles_up_to_a_limit() -> None:
    """However often a group is tried again, the pause stays a number and ends at half a minute."""
    called: list[float] = []

    async def failing(_: GenerationRequest) -> GroupResult:
        called.append(asyncio.get_running_loop().time())
        raise ValueError("not yet")

    scene = Workers(failing, max_attempts=1_200, retry_backoff_seconds=0.5)
    await scene.launched()
    await scene.ended()

    pauses = [later - earlier for earlier, later in itertools.pairwise(called)]
    assert pauses[:4] == [pytest.approx(0.5), pytest.approx(1), pytest.approx(2), pytest.approx(4)]
    assert max(pauses) == pytest.approx(MAX_BACKOFF_SECONDS)
    assert len(called) == 1_200
    assert scene.counts()["dropped"] == 1


@in_virtual_time
async def test_a_group_that_left_while_its_retry_waited_is_not_tried_again() -> None:
    """What was checked before the pause is checked again in the slot after it."""

    async def failing(_: GenerationRequest) -> GroupResult:
        raise ValueError("not yet")

    scene = Workers(failing, retry_backoff_seconds=10.0)
    (record,) = await scene.launched()
    await asyncio.sleep(1.0)
    await _drop(scene, record)

    await scene.ended()

    assert scene.outcomes == [(0, "failed")]
    assert not scene.failures


@in_virtual_time
async def test_a_stand_in_that_left_while_its_prompt_was_read_is_not_started() -> None:
    """Reading the spare's prompt takes a while; a group that was dropped meanwhile gets no worker."""
    scene = Workers(max_attempts=1, name="windowed")
    source = scene.rollouts._source  # noqa: SLF001 - its payload is held
    reading, may_read = asyncio.Event(), asyncio.Event()

    async def held(_: object) -> str:
        reading.set()
        await may_read.wait()
        return "payload"

    source.payload = held  # type: ignore[method-assign,assignment] # held
    asked: list[str] = []

    async def failing(request: GenerationRequest) -> GroupResult:
        asked.append(request.group_id)
        raise ValueError("never works")

    scene.rollouts._generate = failing  # noqa: SLF001 - as above
    (record,) = await scene.admitted(1)
    await scene.read(1, to_spares=True)
    scene.rollouts.launch(record, "payload")
    await reading.wait()
    (stand_in,) = scene.owners.ledger.records()
    await _drop(scene, stand_in)
    may_read.set()
    await scene.ended()

    assert asked == [record.group_id]
    assert scene.counts()["dropped"] == 2


@in_virtual_time
async def test_an_error_of_the_run_is_not_blamed_on_the_group() -> None:
    """Rows that vanish between put and flip are the store's fault: the run ends, the group is not tried again."""
    scene = Workers()
    scene.plane.put = lambda _: None  # type: ignore[method-assign,assignment] # loses rows
    (record,) = await scene.launched()

    await scene.ended()

    (error,) = scene.failures
    assert isinstance(error, MissingRowError)
    assert scene.owners.ledger.get(record.group_id).attempt == 0


@in_virtual_time
async def test_closing_cancels_every_worker_and_waits_for_it() -> None:
    """After a close nobody works any more, and unfinished groups are still the ledger's."""
    scene = Workers(lambda _: asyncio.Event().wait())  # type: ignore[arg-type,return-value] # never answers
    records = await scene.launched(4)
    await settle()

    await scene.rollouts.close()

    assert scene.rollouts.running == ()
    assert scene.owners.ledger.records() == tuple(records)
    assert not scene.failures


@in_virtual_time
async def test_numbers_that_are_not_finite_do_no_harm() -> None:
    """A reward or a token count that is not a number is shown as it is, and costs neither the group nor the worker."""

    async def generate(request: GenerationRequest) -> GroupResult:
        good = result_of(request)
        return GroupResult(good.rows, 0, 0, {"reward": float("nan"), "tokens": float("inf")})

    scene = Workers(generate)
    await scene.launched()
    await scene.ended()

    assert scene.outcomes == [(0, "completed")]
    assert [entry.stats["tokens"] for entry in scene.owners.buffer.ready()] == [float("inf")]
    assert not scene.failures


# --------------------------------------------------------------------------------------------- workers that stage


FIRST = "e000-p0000000"
"""The group that a scene admits first."""


def staging_of(request: GenerationRequest) -> Staging:
    """Return what a call may stage."""
    assert request.staging is not None
    return request.staging


def answered(request: GenerationRequest, tokens: int = 8) -> GroupResult:
    """Return the answer of a worker that put the final rows itself."""
    return GroupResult(None, request.start_version, request.start_version, {"tokens": tokens})


def finals(request: GenerationRequest) -> dict[int, Any]:
    """Return the final rows of a group."""
    return dict(enumerate(rows_of(request.index, request.attempt)))


def staged_row(value: int) -> dict[str, Any]:
    """Return a chunk row that tells itself from others."""
    return {"index": np.array([value])}


@in_virtual_time
async def test_a_run_without_workers_stages_nothing() -> None:
    """The generate function returns its rows, as ever."""
    asked: list[GenerationRequest] = []

    async def generate(request: GenerationRequest) -> GroupResult:
        asked.append(request)
        return result_of(request)

    scene = Workers(generate)
    await scene.launched()
    await scene.ended()

    assert [request.staging for request in asked] == [None]


@in_virtual_time
async def test_rows_that_a_worker_put_itself_are_committed_as_they_are() -> None:
    """They are not put again, its chunks are its own cleanup's, and nothing is put for the group any more."""
    gate = SnapshotGate("0")
    obsolete: list[RowKey] = []
    stagings: list[Staging] = []

    async def generate(request: GenerationRequest) -> GroupResult:
        staging = staging_of(request)
        stagings.append(staging)
        staging.put_chunks({0: staged_row(1), 1: staged_row(2)})
        obsolete.extend(staging.finish(gate, finals(request)))
        return answered(request)

    scene = Workers(generate, staged={})
    (record,) = await scene.launched()
    await scene.ended()

    (entry,) = scene.owners.buffer.ready()
    assert entry.keys == scene.keys(record)
    assert scene.plane.missing(entry.keys) == ()
    assert len(obsolete) == 2
    assert scene.owners.clears.outstanding() == ()
    assert [tokens for *_, tokens in scene.recorder.of("rollout_ended")] == [8]
    with pytest.raises(StagingRetiredError):
        stagings[0].put_chunks({0: staged_row(3)})
    assert not scene.failures


@in_virtual_time
async def test_a_worker_may_stage_and_return_its_rows() -> None:
    """Its chunks are handed over in the step that gives the group its next owner."""

    async def generate(request: GenerationRequest) -> GroupResult:
        staging_of(request).put_chunks({0: staged_row(1)})
        return result_of(request)

    scene = Workers(generate, staged={})
    (record,) = await scene.launched()
    await scene.ended()

    assert scene.owners.clears.outstanding() == (RowKey(1, record.group_id, 0, 0, 0),)
    assert scene.owners.buffer.ready()


@in_virtual_time
async def test_an_answer_without_rows_that_nobody_put_fails_its_attempt() -> None:
    """Also where only some of the final rows are there."""

    async def generate(request: GenerationRequest) -> GroupResult:
        return answered(request)

    without: tuple[dict[str, tuple[RowKey, ...]] | None, ...] = (None, {})
    for staged in without:
        scene = Workers(generate, staged=staged, max_attempts=1)
        await scene.launched()
        await scene.ended()

        assert scene.outcomes == [(0, "failed")]
        assert not scene.failures


@in_virtual_time
async def test_a_failed_attempt_s_rows_are_handed_over_and_the_next_begins_anew() -> None:
    """Chunks and final rows of the attempt are cleared, each once, and nothing of it is shown to its successor."""
    gate = SnapshotGate("0")
    seen: list[tuple[int, bool]] = []

    async def generate(request: GenerationRequest) -> GroupResult:
        staging = staging_of(request)
        seen.append((request.attempt, any(staging.found)))
        staging.put_chunks({0: staged_row(1), 1: staged_row(2)})
        if request.attempt == 0:
            raise ValueError("not yet")
        staging.finish(gate, finals(request))
        return answered(request)

    scene = Workers(generate, staged={})
    (record,) = await scene.launched()
    await scene.ended()

    assert seen == [(0, False), (1, False)]
    assert Counter(scene.owners.clears.outstanding()) == Counter(
        RowKey(1, record.group_id, generation, 0, 0) for generation in range(2)
    )
    assert scene.outcomes == [(0, "failed"), (1, "completed")]


@in_virtual_time
async def test_a_cancelled_worker_s_rows_are_handed_over_and_late_ones_refused() -> None:
    """Its thread may still run: what it puts from then on is refused."""
    stagings: list[Staging] = []

    async def generate(request: GenerationRequest) -> GroupResult:
        stagings.append(staging_of(request))
        stagings[0].put_chunks({0: staged_row(1)})
        await asyncio.Event().wait()
        raise AssertionError

    scene = Workers(generate, staged={})
    (record,) = await scene.launched()
    await until(scene.plane.keys)
    scene.rollouts.cancel([record.group_id])
    await scene.ended()

    assert scene.owners.clears.outstanding() == (RowKey(1, record.group_id, 0, 0, 0),)
    with pytest.raises(StagingRetiredError):
        stagings[0].put_chunks({0: staged_row(2)})


@in_virtual_time
async def test_final_rows_whose_commit_is_refused_are_handed_over() -> None:
    """The group was dropped while its commit waited: its rows are nobody's."""
    gate = SnapshotGate("0")

    async def generate(request: GenerationRequest) -> GroupResult:
        staging_of(request).finish(gate, finals(request))
        await _drop(scene, record)
        return answered(request)

    scene = Workers(generate, staged={})
    (record,) = await scene.launched()
    await scene.ended()

    assert scene.outcomes == [(0, "skipped")]
    assert Counter(scene.owners.clears.outstanding()) == Counter(scene.keys(record))


async def restored(generate: Callable[[GenerationRequest], Awaitable[GroupResult]], **config: Any) -> Workers:  # noqa: ANN401 - passed on
    """Return a scene whose first group has two chunks of its first generation."""
    keys = (RowKey(1, FIRST, 0, 0, 0), RowKey(1, FIRST, 0, 0, 1))
    scene = Workers(generate, staged={FIRST: keys}, **config)
    scene.plane.put({key: staged_row(place) for place, key in enumerate(keys)})
    return scene


@in_virtual_time
async def test_a_restored_group_s_first_call_is_shown_what_was_staged() -> None:
    """Loaded, in order; what it stages next comes after that."""
    gate = SnapshotGate("0")
    found: list[list[list[int]]] = []
    obsolete: list[RowKey] = []

    async def generate(request: GenerationRequest) -> GroupResult:
        staging = staging_of(request)
        found.append([[int(row["index"][0]) for row in rows] for rows in staging.found])
        staging.put_chunks({0: staged_row(2)})
        obsolete.extend(staging.finish(gate, finals(request)))
        return answered(request)

    scene = await restored(generate)
    (record,) = await scene.launched()
    await scene.ended()

    assert record.group_id == FIRST
    assert found == [[[0, 1], []]]
    assert [key.sequence for key in obsolete] == [0, 1, 2]
    assert not scene.failures


@in_virtual_time
async def test_a_restored_group_that_leaves_before_its_call_hands_over_what_was_staged() -> None:
    """Aborted without ever having had a worker, or cancelled in the step that launched it: its rows are nobody's."""
    for launched in (False, True):
        scene = await restored(at_once)
        (record,) = await scene.admitted(1)
        if launched:
            scene.rollouts.launch(record, "payload")
        scene.rollouts.cancel([record.group_id])
        await settle()

        assert Counter(scene.owners.clears.outstanding()) == Counter(
            RowKey(1, FIRST, 0, 0, sequence) for sequence in range(2)
        )


@in_virtual_time
async def test_a_worker_that_does_not_know_the_final_rows_that_were_found_fails_its_attempt() -> None:
    """Rows beside them would be another group's; the next attempt begins anew, and the found ones are cleared."""
    keys = tuple(RowKey(1, FIRST, generation, 0) for generation in range(2))
    scene = Workers(at_once, staged={FIRST: keys})
    scene.plane.put({key: staged_row(9) for key in keys})
    await scene.launched()
    await scene.ended()

    assert scene.outcomes == [(0, "failed"), (1, "completed")]
    assert Counter(scene.owners.clears.outstanding()) == Counter(keys)


@in_virtual_time
async def test_what_the_store_refuses_a_worker_is_the_run_s_failure() -> None:
    """As where the controller puts the rows: no attempt would fare better."""

    async def generate(_: GenerationRequest) -> GroupResult:
        raise StoreFailedError("put", "rows", "the disk is full")

    scene = Workers(generate, staged={})
    await scene.launched()
    await scene.ended()

    (error,) = scene.failures
    assert isinstance(error, StoreFailedError)


@in_virtual_time
async def test_a_permit_that_did_not_come_in_time_fails_the_attempt_and_not_the_run() -> None:
    """A timeout of the worker's own is not the call's deadline, and no reason to end everything."""

    async def generate(request: GenerationRequest) -> GroupResult:
        if request.attempt == 0:
            raise PermitTimeoutError("0", 90.0, "1.7")
        return result_of(request)

    scene = Workers(generate, staged={})
    await scene.launched()
    await scene.ended()

    assert not scene.failures
    assert scene.outcomes == [(0, "failed"), (1, "completed")]


@in_virtual_time
async def test_rows_that_wait_for_room_in_a_pinned_store_outlive_the_deadline() -> None:
    """Back-pressure is not a hung call: no group fails for it. A call that waits for nothing of the kind does."""
    waiting = [True]

    async def generate(request: GenerationRequest) -> GroupResult:
        type(staging_of(request)).waits_for_room = property(lambda _: waiting[0])  # type: ignore[assignment,method-assign] # said by the test
        await asyncio.sleep(50.0 if request.attempt == 0 else 0.0)
        return result_of(request)

    held = Staging.waits_for_room
    try:
        for waits, outcomes in ((True, [(0, "completed")]), (False, [(0, "failed"), (1, "completed")])):
            waiting[0] = waits
            scene = Workers(generate, staged={}, generation_timeout_seconds=5.0)
            await scene.launched()
            await scene.ended()

            assert scene.outcomes == outcomes
    finally:
        Staging.waits_for_room = held  # type: ignore[method-assign] # as it was
