"""The interleavings: what happens at once, and what has to hold however it comes.

Each scenario is a coroutine function of the kind of world that it runs in, so that mutants run through the same
ones.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from quiesce import GenerationRequest, GroupResult
from quiesce.barrier import detached
from quiesce.errors import (
    ClaimError,
    CutExpiredError,
    DrainTimeoutError,
    ForeignCutError,
    NestedCutError,
    OccupiedStepError,
    StaleCommitError,
)
from quiesce.explorer import pause, pause_thread
from quiesce.sampler_config import SamplerConfig
from quiesce.signals import TrainerVersion
from tests.interleaving.world import BrokenError, World

Body = Callable[[type[World]], Coroutine[Any, Any, None]]


@dataclass(frozen=True, slots=True)
class Scenario:
    """One scenario and how it is explored by default.

    Attributes:
        name: Its name.
        stands_for: The reports and tests that it stands for.
        body: What happens.
        strategy: How it is explored.
        timers: When timers fire.
        schedules: At most so many by default.
    """

    name: str
    stands_for: str
    body: Body
    strategy: Literal["exhaustive", "random", "pct"]
    timers: Literal["idle", "any"]
    schedules: int


SCENARIOS: dict[str, Scenario] = {}


def scenario(
    stands_for: str,
    *,
    strategy: Literal["exhaustive", "random", "pct"] = "exhaustive",
    timers: Literal["idle", "any"] = "idle",
    schedules: int = 4_000,
) -> Callable[[Body], Body]:
    """Register a scenario."""

    def register(body: Body) -> Body:
        SCENARIOS[body.__name__] = Scenario(body.__name__, stands_for, body, strategy, timers, schedules)
        return body

    return register


@contextlib.asynccontextmanager
async def at_once(*coroutines: Coroutine[Any, Any, Any]) -> AsyncIterator[list[asyncio.Task[Any]]]:
    """Run coroutines beside the body and wait for all of them; the first error ends it."""
    async with asyncio.TaskGroup() as group:
        yield [group.create_task(each, name=f"side {number}") for number, each in enumerate(coroutines)]


async def later(coroutine: Coroutine[Any, Any, Any], label: str = "later") -> Any:  # noqa: ANN401 - passed on
    """Run a coroutine at any later moment."""
    try:
        await pause(label)
    except BaseException:
        coroutine.close()
        raise
    return await coroutine


# -------------------------------------------------------------------------------------------- commit, admission


@scenario("seed: commit against save; upstream: a commit that contends has exactly one saved owner")
async def commit_during_save(kind: type[World]) -> None:
    """A rollout finishes while a checkpoint is taken: ledger or buffer has it, never both or none."""
    world = kind()
    world.launch(await world.admit(0))
    async with at_once(later(world.save())):
        pass
    await world.finish_rollouts()
    await world.save()
    assert [entry.group_id for entry in world.buffer.ready()] == ["e000-p0000000"]
    world.idle()


@scenario("upstream: two rollouts at once; canonical wins over a stale ledger entry", schedules=3_000)
async def two_commits_during_save(kind: type[World]) -> None:
    """Two rollouts of one batch and a checkpoint."""
    world = kind(batch=2)
    world.launch(await world.admit(0, 1))
    async with at_once(later(world.save())):
        pass
    await world.finish_rollouts()
    assert len(world.buffer) == 2
    world.idle()


@scenario("seed: admission during save; upstream: a prompt fetched and not admitted is owned; R2, R19")
async def admission_during_save(kind: type[World]) -> None:
    """Batches are read, reserved and admitted while checkpoints are taken."""
    world = kind(prompts=2)

    async def read() -> None:
        for position in range(2):
            await pause("loader")
            await world.admit(position)
            world.versions.advance()

    async with at_once(read(), later(world.save()), later(world.save())):
        pass
    assert world.sampler.dispatch_cursor == 1
    world.idle()


@scenario("seed: the gate is waited for outside; R5: a gate that opens only after the checkpoint")
async def gate_opens_after_the_checkpoint(kind: type[World]) -> None:
    """The batch waits at a shut gate; the checkpoint, which alone leads to its opening, goes through."""
    world = kind(window=0)
    await world.ready(0)

    async def save_then_advance() -> None:
        await pause("step")
        state = await world.save(10.0)
        assert state.sampler.cursor == 0
        world.versions.advance()

    async with at_once(later(world.admit(1)), save_then_advance()):
        pass
    assert world.sampler.dispatch_cursor == 1
    world.idle()


class OnePiece:
    """A custom sampler whose gate is inside its admission."""

    stamps_target_steps = False

    def __init__(self) -> None:
        self.dispatch_cursor = -1

    def restore_cursor(self, cursor: int) -> None:
        """Set it."""
        self.dispatch_cursor = cursor

    def is_admissible(self, version: int) -> bool:
        """Tell whether the gate is open."""
        return self.dispatch_cursor < version

    async def admit(self, versions: TrainerVersion) -> int | None:
        """Wait and admit in one piece."""
        await versions.wait_until(self.is_admissible)
        self.dispatch_cursor += 1
        return None

    def select(self, view: Any, version: int, count: int) -> tuple[str, ...]:  # noqa: ANN401 - an OwnersView
        """Take the oldest."""
        return tuple(entry.group_id for entry in view.ready)[:count]


@scenario("R5: the fallback path; upstream: custom-sampler deadlock", timers="idle")
async def one_piece_gate_is_named(kind: type[World]) -> None:
    """A gate inside a slot that waits for the checkpoint: the drain ends in time and names the admission."""
    world = kind(SamplerConfig(f"{__name__}:OnePiece"))
    await world.ready(0)

    async def save_then_advance() -> None:
        await pause("step")
        try:
            await world.save(10.0)
        except DrainTimeoutError as error:
            held = [holder.kind for holder in error.holders]
            if held != ["admission"]:
                raise
        world.versions.advance()

    async with at_once(later(world.admit(1)), save_then_advance()):
        pass
    world.idle()


@scenario("R8: a stamp is minted in three places, each refuses an occupied step")
async def occupied_step_is_refused(kind: type[World]) -> None:
    """A restored group holds the step that an admission would mint, while a checkpoint is taken."""
    world = kind(prompts=4)
    await world.ready(0)
    reserved = await world.reserve(1)
    await world.reserve(2, spares=True)
    world.judging = False  # from here on the cursor is older than a stamp, as after a bad restore
    world.sampler.restore_cursor(-1)

    async def refused(batch: list[str]) -> None:
        try:
            await world.admission.admit(batch)
        except OccupiedStepError:
            assert world.sampler.dispatch_cursor == -1
            return
        raise AssertionError("a step was minted twice")

    async def mint() -> None:
        await refused(reserved)  # as recovery admits a restored batch
        await pause("loader")
        await refused(await world.reserve(3))
        async with world.barrier.mutation("prompt_reservation") as cut:
            drained = world.owners.drain_spares(cut)
        await refused([record.group_id for record in drained])

    async def other() -> None:
        async with world.barrier.checkpoint(None):
            await pause("in the window")

    async with at_once(later(mint()), later(other())):
        pass
    world.idle()


# --------------------------------------------------------------------------------- failures, retries, spares


@scenario("upstream: save while a spare is popped and re-owned (E: popped and never owned)", schedules=3_000)
async def substitution_during_save(kind: type[World]) -> None:
    """A group fails for good and a spare takes its place, while checkpoints are taken."""
    world = kind(prompts=2, max_attempts=1)
    world.failing = lambda request: request.index == 0
    records = await world.admit(0)
    await world.reserve(1, spares=True)
    world.launch(records)
    async with at_once(later(world.save()), later(world.save())):
        pass
    await world.finish_rollouts()
    await world.save()
    assert [entry.group_id for entry in world.buffer.ready()] == ["e000-p0000001"]
    assert world.buffer.ready()[0].target_step == 0
    world.idle()


@scenario("upstream: the reserve's drain is recoverable before sampler admission; refill")
async def spares_filled_and_drained_during_save(kind: type[World]) -> None:
    """Prompts go into the pool and out of it into a batch, while checkpoints are taken."""
    world = kind(prompts=2)

    async def drain() -> None:
        await world.reserve(0, spares=True)
        await pause("end of the dataset")
        async with world.barrier.mutation("prompt_reservation") as cut:
            records = world.owners.drain_spares(cut)
        await world.admission.admit([record.group_id for record in records])

    async with at_once(later(drain()), later(world.save()), later(world.save())):
        pass
    assert len(world.ledger) == 1
    world.idle()


@scenario("upstream: infrastructure retry; a late commit of an old attempt", schedules=3_000)
async def retry_during_save(kind: type[World]) -> None:
    """The first attempt fails and the second commits, while a checkpoint is taken."""
    world = kind(max_attempts=2)
    world.failing = lambda request: request.attempt == 0
    world.launch(await world.admit(0))
    async with at_once(later(world.save())):
        pass
    await world.finish_rollouts()
    await world.save()
    assert world.buffer.ready()[0].attempt == 1
    world.idle()


@scenario("semantics 3: a flip is for the (group, attempt) that the ledger waits for")
async def late_commit_of_an_old_attempt(kind: type[World]) -> None:
    """The watchdog starts a new attempt while the old one comes to its commit."""
    world = kind()
    world.tolerated = {
        "rows_not_orphaned"
    }  # rows of the old attempt have no owner until its commit is refused
    (record,) = await world.admit(0)
    outcomes: list[str] = []

    async def commit(attempt: int) -> None:
        current = record if attempt == 0 else world.ledger.find(record.group_id)
        if current is None or current.attempt != attempt:
            return
        keys = world.keys(current)
        world.plane.put({key: {"tokens": np.array([attempt])} for key in keys})
        await pause(f"commit a{attempt}")
        try:
            async with world.barrier.mutation("group_commit") as cut:
                world.owners.commit_rollout(
                    cut, current, keys=keys, generated_from=0, generated_to=0, stats={}
                )
            outcomes.append(f"a{attempt}")
        except StaleCommitError:
            world.clears.hand_over(keys)

    async def again() -> None:
        async with world.barrier.mutation("retry") as cut:
            new = world.owners.retry(cut, record)
        if new is not None:
            await commit(1)

    async with at_once(commit(0), later(again()), later(world.save())):
        pass
    assert len(outcomes) == 1
    assert f"a{world.buffer.ready()[0].attempt}" == outcomes[0]
    await world.save()


@scenario("R6: a stale abort while the group generates, puts or commits", schedules=4_000)
async def stale_abort_during_commit(kind: type[World]) -> None:
    """The version moves on, the group is aborted and its task cancelled; or it was committed first and is evicted."""
    world = kind("windowed", window=0)
    world.tolerated = {"rows_not_orphaned"}  # rows of a put that was abandoned, until its thread has told
    world.launch(await world.admit(0))

    async def advance() -> None:
        world.versions.advance()
        await world.train_pump()._clean_up_stale()  # noqa: SLF001 - that is what the train pump does between steps

    async with at_once(later(advance()), later(world.save())):
        pass
    await world.rollouts_over()
    await world.train_pump()._clean_up_stale()  # noqa: SLF001 - as above
    await asyncio.sleep(1.0)  # time passes only once an abandoned put has told
    world.clears.start()
    await world.clears.drain(60.0)
    assert world.failures == []
    assert len(world.ledger) == len(world.buffer) == 0
    assert world.accounting.statistics().dropped
    world.tolerated = set()
    await world.save()
    assert world.plane.keys() == []


@scenario("R16: a generate call that never returns", timers="idle")
async def hung_generation_is_given_up(kind: type[World]) -> None:
    """The deadline ends the call, the next attempt commits, and a checkpoint at any moment has an owner for it."""
    world = kind(generation_timeout_seconds=5.0, max_attempts=2)

    async def hang(request: GenerationRequest) -> GroupResult:
        if request.attempt == 0:
            await asyncio.Event().wait()
        return await world.generate(request)

    world.rollouts._generate = hang  # noqa: SLF001 - the fake of this scenario
    world.launch(await world.admit(0))
    async with at_once(later(world.save())):
        pass
    await asyncio.sleep(6.0)
    await world.finish_rollouts()
    assert world.buffer.ready()[0].attempt == 1
    world.idle()


# ------------------------------------------------------------------------------------------------ training


@scenario("R18, R14: a step takes what it needs and leaves the rest; cut after one step", schedules=3_000)
async def step_beside_commit_and_save(kind: type[World]) -> None:
    """A train step, then a save in the same task, while another group is committed."""
    world = kind("ready_first", prompts=2)
    await world.ready(0)
    world.launch(await world.admit(1))
    world.clears.start()
    async with at_once(world.train_pump(save_every=1, max_steps=1).run()):
        pass
    await world.finish_rollouts()
    assert world.trained == ["e000-p0000000"]
    assert [entry.group_id for entry in world.buffer.ready()] == ["e000-p0000001"]
    await world.save()
    world.idle()


@scenario("R4: an advantage write-back is a slot; no cut lies inside a step", schedules=3_000)
async def write_back_during_save(kind: type[World]) -> None:
    """A begun step writes back while a foreign save waits: the save that comes inside the step is refused, never torn."""
    world = kind()
    world.advantages = True
    await world.ready(0)
    world.clears.start()

    async def foreign_save() -> None:
        with contextlib.suppress(ClaimError):
            await world.save()

    async with at_once(world.train_pump(max_steps=1).run(), later(foreign_save())):
        pass
    await world.clears.drain(60.0)
    await world.save()
    assert world.plane.keys() == []
    world.idle()


@scenario("R10: who claimed a step's groups dies before the step", schedules=4_000)
async def claimer_dies(kind: type[World]) -> None:
    """The train pump is cancelled at any moment: its claim is given back, or the step is over; a save goes through."""
    world = kind()
    await world.ready(0)
    pump = asyncio.create_task(world.train_pump(max_steps=1).run(), name="train pump")
    async with at_once(later(_cancelled(pump)), later(_save_if_possible(world))):
        pass
    await asyncio.wait({pump})
    claims = world.buffer.claims()
    if not any(claim.begun for claim in claims):
        assert claims == ()
        await world.save()
        world.idle()


async def _cancelled(task: asyncio.Task[Any]) -> None:
    task.cancel()


async def _save_if_possible(world: World) -> None:
    with contextlib.suppress(ClaimError):
        await world.save()


@scenario("R7: the first eviction, with hooks on; upstream: evicted groups are not resurrected")
async def eviction_during_save(kind: type[World]) -> None:
    """Ready groups age out and are evicted while a checkpoint is taken and a new batch comes."""
    world = kind("windowed", window=0, prompts=2)
    await world.ready(0)

    async def advance() -> None:
        world.versions.advance()
        await world.train_pump()._clean_up_stale()  # noqa: SLF001 - that is what the train pump does between steps

    async with at_once(later(advance()), later(world.save()), later(world.admit(1))):
        pass
    world.clears.start()
    await world.clears.drain(60.0)
    await world.save()
    assert world.accounting.statistics().dropped["evicted"] == 1
    world.idle()


def _parked(sampler: str) -> Body:
    async def parked(kind: type[World]) -> None:
        """The full next-step batch is parked while it is saved: a restore selects exactly it."""
        world = kind(sampler, prompts=2, batch=2)
        records = await world.admit(0, 1, ends=True)
        world.launch(records)
        async with at_once(later(world.save())):
            pass
        await world.finish_rollouts()
        state = await world.save()
        again = await world.restored(state)
        assert again.owners.plan() == world.owners.plan()
        assert sorted(again.owners.plan() or ()) == ["e000-p0000000", "e000-p0000001"]
        for cut in world.cuts:
            resumed = await world.restored(cut)
            resumed.clears.start()
            await asyncio.gather(resumed.rollout_pump().run(), resumed.train_pump().run())
            assert sorted(resumed.trained) == ["e000-p0000000", "e000-p0000001"]
            resumed.ended()

    parked.__name__ = f"parked_batch_{sampler}"
    return parked


for _sampler in ("windowed", "weight_fifo", "ready_first", "in_order"):
    scenario(
        "R3: a parked batch is selected after the restore; R14: exactly once after it",
        strategy="random",
        schedules=150,
    )(_parked(_sampler))


# ------------------------------------------------------------------------------------------------- the barrier


@scenario("upstream: two checkpoints serialise; writers and checkpoints in one queue", schedules=6_000)
async def two_checkpoints_and_a_writer(kind: type[World]) -> None:
    """Two checkpoints and a reservation, in every order."""
    world = kind(prompts=2)
    async with at_once(later(world.save()), later(world.save()), later(world.reserve(0))):
        pass
    world.idle()


@scenario("upstream A: back-to-back exclusive sections starve nobody")
async def back_to_back_checkpoints(kind: type[World]) -> None:
    """A saver that comes back at once lets the waiting writer in first."""
    world = kind()
    rounds: list[str] = []

    async def saver() -> None:
        await pause("saver")
        for _ in range(3):
            async with world.barrier.checkpoint(None) as cut:
                await world.window(cut)
                rounds.append("window")
                await pause("in the window")
        rounds.append("saver ended")

    async def writer() -> None:
        await pause("writer")
        asked = rounds.count("window")
        await world.reserve(0)
        assert rounds.count("window") <= asked + 1, "the writer was overtaken by a later checkpoint"

    async with at_once(saver(), writer()):
        pass
    for snapshot in list(world.plane._snapshots):  # noqa: SLF001 - this scenario keeps no handle
        snapshot.release()
    world.idle()


@scenario("upstream: cancellation in drain; X1: no cancellation strands a slot", schedules=6_000)
async def cancelled_drain(kind: type[World]) -> None:
    """A checkpoint and a writer are cancelled at any moment; whoever is left gets through."""
    world = kind(prompts=3)
    saver = asyncio.create_task(later(world.save()), name="saver")
    writer = asyncio.create_task(later(world.reserve(0)), name="writer")
    async with at_once(later(_cancelled(saver)), later(_cancelled(writer))):
        pass
    await asyncio.wait({saver, writer})
    await world.reserve(len(world.ledger))
    await world.save()
    world.idle()


@scenario("upstream B: a child task of a slot never deadlocks with a waiting checkpoint")
async def child_of_a_slot(kind: type[World]) -> None:
    """A child that opens a section while its parent's slot is open is refused at once, checkpoint or not."""
    world = kind()

    async def child() -> str:
        await pause("child")
        try:
            async with world.barrier.mutation("retry"):
                return "entered"
        except NestedCutError:
            return "refused"

    async def parent() -> None:
        async with world.barrier.mutation("retry") as cut:
            told = asyncio.create_task(child(), name="child")
            free = detached(child(), name="free")
            assert await told == "refused"
        cut_is_over = False
        try:
            cut.check(world.barrier)
        except CutExpiredError:
            cut_is_over = True
        assert cut_is_over
        assert await free == "entered"

    async with at_once(later(parent()), later(world.save())):
        pass
    world.idle()


@scenario("upstream F: cancel during a threaded save; the window outlasts its thread", schedules=3_000)
async def cancelled_threaded_window(kind: type[World]) -> None:
    """A thread works inside the window, in two pieces, and its caller is cancelled: no writer enters before it ends."""
    world = kind()
    written: list[str] = []

    def write() -> None:
        for name in ("first", "second"):
            pause_thread(name)
            if world.ledger.records() != before:
                raise BrokenError("window_is_exclusive", "a group moved while the thread wrote")
            written.append(name)

    before = world.ledger.records()

    async def saver() -> None:
        nonlocal before
        async with world.barrier.checkpoint(None) as cut:
            before = world.ledger.records()
            await world.barrier.run_in_cut(cut, write)

    saving = asyncio.create_task(later(saver()), name="saver")

    async def writer() -> None:
        await world.reserve(0)
        if len(written) == 1:
            raise BrokenError("window_is_exclusive", "a writer came in while the thread wrote")

    async with at_once(later(writer()), later(_cancelled(saving))):
        pass
    await asyncio.wait({saving})
    world.idle()


@scenario("upstream C: a cut of another barrier, a cut that is over")
async def foreign_and_expired_cuts(kind: type[World]) -> None:
    """Whatever runs beside it, such a cut changes nothing."""
    world, other = kind(), kind()
    async with (
        at_once(later(world.save()), later(world.reserve(0))),
        other.barrier.mutation("retry") as foreign,
    ):
        await pause("in the slot")
        try:
            world.owners.commit_pull(foreign, world.pull(1), to_spares=False)
        except ForeignCutError:
            pass
        else:
            raise AssertionError("a foreign cut was taken")
    world.idle()


@scenario("X3: a task that is started inside the window does not keep it")
async def task_started_in_the_window(kind: type[World]) -> None:
    """What the window starts in the background opens its own slot afterwards."""
    world = kind()

    async def saver() -> None:
        async with world.barrier.checkpoint(None) as cut:
            captured = await world.window(cut)
            cleanup = detached(world.reserve(0), name="background")
            await pause("in the window")
        captured.snapshot.release()
        await cleanup

    async with at_once(later(saver()), later(world.save())):
        pass
    world.idle()


@scenario("semantics 1.7: a drain gives up and names who holds", timers="any", schedules=4_000)
async def drain_timeout_reopens(kind: type[World]) -> None:
    """A slot that stays open: the drain ends, whoever waited behind it goes on."""
    world = kind()
    free = asyncio.Event()

    async def slow() -> None:
        async with world.barrier.mutation("retry"):
            await free.wait()

    async def saver() -> None:
        try:
            await world.save(10.0)
        except DrainTimeoutError as error:
            if not error.holders:
                raise
        free.set()

    async with at_once(slow(), later(saver()), later(world.reserve(0))):
        pass
    world.idle()


@scenario(
    "semantics 1.2: slots that ask after a checkpoint do not overtake it; R19: exclusive within its budget"
)
async def slow_writers_and_a_checkpoint(kind: type[World]) -> None:
    """Writers that overlap and hold their slots for long: the checkpoint waits for those before it only."""
    world = kind()

    async def writer(starts: float) -> None:
        await asyncio.sleep(starts)
        async with world.barrier.mutation("retry"):
            await asyncio.sleep(40.0)

    async def saver() -> None:
        await asyncio.sleep(10.0)
        await world.save()

    async with at_once(writer(0.0), writer(30.0), writer(60.0), saver(), later(world.save())):
        pass
    world.idle()


# ------------------------------------------------------------------------------------------------- whole runs


def _whole(sampler: str, strategy: Literal["random", "pct"]) -> Body:
    async def whole(kind: type[World]) -> None:
        """The real pumps over a whole dataset, with failures, spares and a save after each step."""
        world = kind(sampler, prompts=5, batch=2, spare_prompts=1, max_attempts=2, max_refused_drops=50)
        world.failing = lambda request: request.index in {1, 3} and request.attempt < 2
        world.advantages = True
        await world.run()
        assert len(world.cuts) >= 2

    whole.__name__ = f"whole_run_{sampler}_{strategy}"
    return whole


for _sampler in ("windowed", "weight_fifo", "ready_first", "in_order"):
    for _strategy in ("random", "pct"):
        scenario(
            "everything at once: R2, R6, R14, R16, R18",
            strategy="random" if _strategy == "random" else "pct",
            schedules=80,
        )(_whole(_sampler, "random" if _strategy == "random" else "pct"))
