"""The rollout pump: what it holds while it waits, and in which order it admits."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from quiesce import ControllerConfig, SequenceSource
from quiesce.barrier import detached
from quiesce.checkpoint.cut import CommittedPosition
from quiesce.dispatch import RolloutPump
from quiesce.errors import CapacityError, PromptSourceError
from quiesce.prompts import Pull
from quiesce.testing import all_waiting, in_virtual_time, settle
from quiesce.types import GroupRecord, PromptRef
from tests.run_rig import sampler, until
from tests.unit.test_owners import Scene


class Launches:
    """Stands for the workers: notes what it is told to launch."""

    def __init__(self) -> None:
        self.launched: list[tuple[str, Any]] = []
        self.records: list[GroupRecord] = []

    def launch(self, record: GroupRecord, payload: Any) -> None:  # noqa: ANN401 - as the original
        """Note it."""
        self.launched.append((record.group_id, payload))
        self.records.append(record)


class HeldSource(SequenceSource):
    """A source whose pulls and payloads can be held."""

    def __init__(self, size: int, **options: Any) -> None:  # noqa: ANN401 - passed on
        super().__init__(
            [f"prompt {index}" for index in range(size)], **{"batch_size": 4, "seed": None, **options}
        )
        self.may_pull, self.may_read = asyncio.Event(), asyncio.Event()
        self.may_pull.set()
        self.may_read.set()

    async def pull(self) -> Pull | None:
        """Pull, once it may."""
        await self.may_pull.wait()
        return await super().pull()

    async def payload(self, ref: PromptRef) -> Any:  # noqa: ANN401 - as the original
        """Read, once it may."""
        await self.may_read.wait()
        return await super().payload(ref)


class Pumping(Scene):
    """Owners and a pump over them."""

    def __init__(
        self,
        name: str = "in_order",
        window: int = 2,
        *,
        size: int = 22,
        pump: type[RolloutPump] = RolloutPump,
        capacity: int = 100,
        **config: Any,  # noqa: ANN401 - passed on
    ) -> None:
        super().__init__(sampler(name, window))
        self.owners.capacity = capacity
        self.launches = Launches()
        self.source = HeldSource(size)
        self.pump = pump(
            self.owners,
            self.source,
            self.admission,
            self.launches,  # type: ignore[arg-type] # all that the pump needs
            ControllerConfig(**{"groups_per_step": 4, **config}),
        )
        self.task: asyncio.Task[None] | None = None

    def start(self) -> asyncio.Task[None]:
        """Start the pump."""
        self.task = detached(self.pump.run())
        return self.task

    async def stop(self) -> None:
        """Cancel the pump."""
        assert self.task is not None
        self.task.cancel()
        await asyncio.wait({self.task})

    @property
    def ids(self) -> list[str]:
        """What was launched."""
        return [group_id for group_id, _ in self.launches.launched]


def group(position: int) -> str:
    """Return the id of a position's group."""
    return PromptRef(0, position, position).group_id


# ------------------------------------------------------------------------------------------------- pending pull


class PullsInSlot(RolloutPump):
    """Lacks the rule: the loader is read inside the reservation slot."""

    async def run(self) -> None:
        """Read and reserve in one piece."""
        async with self._owners.barrier.mutation("prompt_reservation") as cut:
            pull = await self._source.pull()
            assert pull is not None
            self._owners.commit_pull(cut, pull, to_spares=False)


async def a_slow_loader_holds_nothing(pump: type[RolloutPump]) -> None:
    """While the loader takes its time, a checkpoint enters at once."""
    scene = Pumping(pump=pump)
    scene.source.may_pull.clear()
    _ = scene.start()
    await settle()
    entered = False
    try:
        async with scene.barrier.checkpoint(drain_timeout=None):
            entered = not scene.source.may_pull.is_set()
    finally:
        scene.source.may_pull.set()
        await scene.stop()
    assert entered


@in_virtual_time
async def test_a_batch_is_pulled_outside_any_slot() -> None:
    """The pump pulls a batch and the position after it outside any slot."""
    await asyncio.wait_for(a_slow_loader_holds_nothing(RolloutPump), 10.0)


@in_virtual_time
async def test_a_pull_inside_the_slot_is_noticed() -> None:
    """The same check fails where the slot is held while the loader is read."""
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(a_slow_loader_holds_nothing(PullsInSlot), 10.0)


class CommitsEarly(RolloutPump):
    """Lacks the rule: the position counts as soon as the batch was pulled."""

    async def run(self) -> None:
        """Move the position before the slot."""
        pull = await self._source.pull()
        assert pull is not None
        self._owners.position = pull.position
        async with self._owners.barrier.mutation("prompt_reservation") as cut:
            self._owners.commit_pull(cut, pull, to_spares=False)


async def a_cut_sees_a_pull_whole_or_not_at_all(pump: type[RolloutPump]) -> None:
    """A checkpoint that comes between pull and reservation finds neither the position moved nor a prompt read."""
    scene = Pumping(pump=pump)
    async with scene.barrier.checkpoint():
        _ = scene.start()
        await settle()
        for _ in range(50):  # the dataset is read in a thread
            await asyncio.sleep(0)
        await until(lambda: scene.barrier.statistics().waiting["prompt_reservation"])
        seen = (scene.owners.position.position, scene.owners.accounting.statistics().read)
    await settle()
    await scene.stop()
    assert seen == (0, 0)
    assert scene.owners.position.position >= 4


@in_virtual_time
async def test_a_pending_pull_does_not_count() -> None:
    """A cut reads the committed position, never how far the loader is."""
    await a_cut_sees_a_pull_whole_or_not_at_all(RolloutPump)


@in_virtual_time
async def test_a_position_that_moves_before_the_slot_is_noticed() -> None:
    """The same check fails where the position is set outside the reservation slot."""
    with pytest.raises(AssertionError):
        await a_cut_sees_a_pull_whole_or_not_at_all(CommitsEarly)


# ----------------------------------------------------------------------------------------------------- capacity


class OneAtATime(RolloutPump):
    """Lacks the rule: it is content with room for one group."""

    async def _admit(self, batch: Sequence[str], payloads: dict[str, Any]) -> None:
        owners = self._owners
        await owners.changed.wait_until(lambda: owners.occupied < owners.capacity)
        await self._admission.admit(batch)


async def room_for_the_whole_batch(pump: type[RolloutPump]) -> None:
    """Admitted, ready and claimed groups never exceed the capacity, not even while a batch is half in."""
    scene = Pumping("windowed", pump=pump, capacity=6)
    _ = scene.start()
    await settle()
    await until(lambda: scene.owners.ledger.statistics().reserved)
    before = scene.owners.occupied
    async with scene.barrier.mutation("group_removal") as cut:
        scene.owners.drop(cut, group(0), "failed")  # room for three is not room for four
    await settle()
    during = scene.owners.occupied
    async with scene.barrier.mutation("group_removal") as cut:
        scene.owners.drop(cut, group(1), "failed")
    await settle()
    after = scene.owners.occupied
    await scene.stop()
    assert (before, during, after) == (4, 3, 6)


@in_virtual_time
async def test_capacity_is_awaited_for_the_whole_batch() -> None:
    """A batch is admitted once all of it has room, before the admission slot."""
    await room_for_the_whole_batch(RolloutPump)


@in_virtual_time
async def test_a_batch_that_enters_when_one_of_it_fits_is_noticed() -> None:
    """The same check fails where room for one group is enough."""
    with pytest.raises(AssertionError):
        await room_for_the_whole_batch(OneAtATime)


@in_virtual_time
async def test_a_batch_that_can_never_fit_is_refused_before_it_counts_as_read() -> None:
    """A source with larger batches than the buffer holds is an error that names the key, not a run that stands still."""
    scene = Pumping(capacity=3)

    with pytest.raises(CapacityError, match="buffer_capacity"):
        await scene.start()

    assert scene.owners.accounting.statistics().read == 0


@in_virtual_time
async def test_a_source_that_stops_without_saying_so_is_an_error() -> None:
    """A pull of nothing, from a source whose position is not at its end, would leave a run that never ends."""
    scene = Pumping()

    async def nothing() -> None:
        return None

    scene.source.pull = nothing  # type: ignore[method-assign] # a source of somebody else's

    with pytest.raises(PromptSourceError, match="exhausted"):
        await scene.start()


# ----------------------------------------------------------------------------------------- restored groups first


class ReservedFirst(RolloutPump):
    """Lacks the rule: restored batches are taken up in the order of their phases."""

    async def _redispatch(self) -> None:
        from quiesce.owners import reserved_batches

        for batch in reserved_batches(self._owners.ledger.records()):
            await self._admit(batch, {})
        await super()._redispatch()


async def restored(pump: type[RolloutPump]) -> Pumping:
    """Return a scene as a restore leaves it: one batch admitted, the gate shut, one batch reserved."""
    scene = Pumping(window=0, pump=pump, size=108)
    ids = [record.group_id for record in await scene.read(4)]
    await scene.admission.admit(ids)
    await scene.read(4, ends=True, last=True)
    await scene.source.seek(CommittedPosition(1, 0, exhausted=True, loader={"size": 108, "seed": None}))
    return scene


async def only_admitted_groups_open_the_gate(pump: type[RolloutPump]) -> None:
    """With the gate shut, the admitted groups get their workers although the reserved batch cannot be admitted yet."""
    scene = await restored(pump)
    task = scene.start()
    await until(lambda: scene.ids or scene.admission.statistics().waiting_groups)
    await settle()
    launched = list(scene.ids)
    assert await all_waiting(task)
    await scene.stop()
    assert launched == [group(position) for position in range(4)]


@in_virtual_time
async def test_restored_groups_are_redispatched_admitted_before_reserved() -> None:
    """Only admitted groups can open the gate that a reserved batch waits at."""
    await only_admitted_groups_open_the_gate(RolloutPump)


@in_virtual_time
async def test_reserved_before_admitted_is_noticed() -> None:
    """The same check fails where the reserved batch is waited for first: nobody would ever open the gate."""
    with pytest.raises(AssertionError):
        await only_admitted_groups_open_the_gate(ReservedFirst)


@in_virtual_time
async def test_a_restored_batch_is_admitted_once_the_gate_opens_with_payloads_read_again() -> None:
    """Restored groups have no payload any more: it is read by reference, for admitted and reserved ones."""
    scene = await restored(RolloutPump)
    task = scene.start()
    await until(lambda: scene.admission.statistics().waiting_groups)
    scene.owners.versions.advance()

    await task

    assert scene.ids == [group(position) for position in range(8)]
    payloads = [payload for _, payload in scene.launches.launched]
    assert payloads == [f"prompt {record.prompt.index}" for record in scene.launches.records]
    assert [record.target_step for record in scene.launches.records] == [0] * 4 + [1] * 4


@in_virtual_time
async def test_a_group_that_aged_out_while_its_prompt_was_read_is_not_started() -> None:
    """What was checked before an await is checked again after it: no worker for a group that nobody owns."""
    scene = Pumping("windowed", 0, size=108)
    ids = [record.group_id for record in await scene.read(2)]
    await scene.source.seek(CommittedPosition(0, 2, exhausted=False, loader={"size": 108, "seed": None}))
    scene.source.may_read.clear()
    scene.source.may_pull.clear()
    _ = scene.start()
    await until(lambda: scene.owners.ledger.admitted == 2)
    await settle()
    scene.owners.versions.advance()
    async with scene.barrier.mutation("watchdog_abort") as cut:
        assert len(scene.owners.abort_stale(cut)) == 2

    scene.source.may_read.set()
    await settle()
    await scene.stop()

    assert ids
    assert scene.ids == []


@in_virtual_time
async def test_a_batch_goes_on_without_a_group_that_was_condemned_while_it_waited() -> None:
    """A checkpoint's verification may take a reserved group; the rest of its batch is as good as before."""
    scene = Pumping(window=0, size=8)
    _ = scene.start()
    await until(lambda: scene.admission.statistics().waiting_groups == 4)
    async with scene.barrier.mutation("group_removal") as cut:
        scene.owners.condemn(cut, [group(5)])

    scene.owners.versions.advance()
    await until(lambda: scene.owners.ledger.admitted == 7)
    await scene.stop()

    assert scene.ids == [group(position) for position in (0, 1, 2, 3, 4, 6, 7)]


# --------------------------------------------------------------------------------------------------- ordinary work


@in_virtual_time
async def test_live_groups_get_the_payload_that_was_pulled() -> None:
    """Nothing is read twice for a batch that was just read."""
    scene = Pumping(size=4)
    scene.source.may_read.clear()

    await scene.start()

    assert scene.launches.launched == [(group(at), f"prompt {at}") for at in range(4)]


@in_virtual_time
async def test_the_second_batch_fills_the_pool_and_the_rest_of_it_is_drained_at_the_end() -> None:
    """Never the only batch; whole batches; and once reading has ended, what is left is admitted like any batch."""
    scene = Pumping("windowed", size=14, spare_prompts=5)

    await scene.start()

    assert [source for _, source, target, _ in scene.recorder.of("owner_moved") if target == "spares"] == [
        "read"
    ] * 8
    assert scene.ids == [group(at) for at in (0, 1, 2, 3, 12, 13, 4, 5, 6, 7, 8, 9, 10, 11)]
    assert len(scene.owners.spares) == 0
    assert scene.owners.exhausted


@in_virtual_time
async def test_workers_are_launched_after_the_slot() -> None:
    """The admission slot is over when a worker starts, so it holds nobody up."""
    scene = Pumping(size=4)
    active: list[int] = []
    launch = scene.launches.launch

    def noting(record: GroupRecord, payload: Any) -> None:  # noqa: ANN401 - as the original
        active.append(sum(scene.barrier.statistics().active.values()))
        launch(record, payload)

    scene.launches.launch = noting  # type: ignore[method-assign] # looks first

    await scene.start()

    assert active == [0] * 4
