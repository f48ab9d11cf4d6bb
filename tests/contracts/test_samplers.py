"""What holds for every sampler: the four built-in ones and custom ones with the two-step admission."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

import pytest

from quiesce.barrier import DataPlaneCheckpointBarrier, MutationCut
from quiesce.errors import CutExpiredError, ForeignCutError, WrongSideError
from quiesce.observers import Hub
from quiesce.sampler_config import adapt_sampler
from quiesce.samplers import (
    InOrderSampler,
    ReadyFirstSampler,
    Sampler,
    SamplerStatistics,
    TransactionalAdmissionSampler,
    WeightFifoSampler,
    WindowedSampler,
    plan_step,
)
from quiesce.signals import TrainerVersion
from quiesce.types import BufferEntry
from tests.sampler_cases import (
    OnePiece,
    OnPolicy,
    PublishedOnePiece,
    admitted,
    entry,
    gid,
    gids,
    reserved,
    view,
)


class AnySampler(Sampler, Protocol):
    """A sampler as all of these are: one that shows what it does."""

    def statistics(self) -> SamplerStatistics:
        """Return name, cursor and whether steps are stamped."""
        ...


@dataclass(frozen=True)
class Case:
    """A sampler and the numbers of its row in the table."""

    name: str
    build: Callable[[DataPlaneCheckpointBarrier], AnySampler]
    lookahead: int | None  # versions that the cursor may run ahead; None: it never waits
    stamps: bool
    capacity: int  # for 4 groups a step

    def __str__(self) -> str:
        return self.name


CASES = [
    Case("windowed", lambda b: WindowedSampler(b, 1), None, stamps=False, capacity=4),
    Case("windowed-3-freshest", lambda b: WindowedSampler(b, 3, sample_freshest_first=True), None, False, 4),
    Case("weight_fifo", lambda b: WeightFifoSampler(b, 1), 1, stamps=False, capacity=8),
    Case("weight_fifo-0", lambda b: WeightFifoSampler(b, 0), 0, stamps=False, capacity=4),
    Case("ready_first", lambda b: ReadyFirstSampler(b, 1), 1, stamps=False, capacity=8),
    Case("ready_first-3", lambda b: ReadyFirstSampler(b, 3), 3, stamps=False, capacity=16),
    Case("in_order", lambda b: InOrderSampler(b, 1), 1, stamps=True, capacity=8),
    Case("in_order-0", lambda b: InOrderSampler(b, 0), 0, stamps=True, capacity=4),
    Case("in_order-2", lambda b: InOrderSampler(b, 2), 2, stamps=True, capacity=12),
    Case("custom", lambda b: adapt_sampler(OnPolicy(), b, "tests:OnPolicy"), 0, stamps=False, capacity=4),
    Case("published", lambda b: adapt_sampler(PublishedOnePiece(OnePiece()), b, "tests:P"), 1, False, 4),
]
GATED = [case for case in CASES if case.lookahead is not None]


@pytest.fixture
def barrier() -> DataPlaneCheckpointBarrier:
    """Return a barrier with a hub of its own."""
    return DataPlaneCheckpointBarrier(hub=Hub(strict=True))


@pytest.fixture(params=CASES, ids=str)
def case(request: pytest.FixtureRequest) -> Case:
    """Return each sampler's case in turn."""
    found = request.param
    assert isinstance(found, Case)
    return found


@pytest.fixture
def sampler(case: Case, barrier: DataPlaneCheckpointBarrier) -> AnySampler:
    """Return the case's sampler."""
    return case.build(barrier)


async def admit_one(sampler: AnySampler, barrier: DataPlaneCheckpointBarrier, version: int) -> int | None:
    """Run one admission to its end; the gate must be open at that version."""
    assert isinstance(sampler, TransactionalAdmissionSampler)
    await sampler.wait_until_admissible(TrainerVersion(version, hub=barrier.hub))
    async with barrier.mutation("admission") as cut:
        return sampler.commit_admission(cut)


def stamp(case: Case, step: int) -> int | None:
    """Return what a batch of that step is stamped with."""
    return step if case.stamps else None


async def test_each_commit_advances_the_cursor_by_one_and_stamps_by_the_table(
    case: Case, sampler: AnySampler, barrier: DataPlaneCheckpointBarrier
) -> None:
    """The cursor starts at -1; in_order stamps the cursor after the advance, the others nothing."""
    assert sampler.dispatch_cursor == -1
    for batch in range(5):
        assert await admit_one(sampler, barrier, version=batch) == stamp(case, batch)
        assert sampler.dispatch_cursor == batch
    assert sampler.stamps_target_steps is case.stamps


async def test_a_commit_needs_a_live_mutation_cut_of_its_own_barrier(
    sampler: AnySampler, barrier: DataPlaneCheckpointBarrier
) -> None:
    """An expired, a foreign and an exclusive cut are refused, and the cursor stays."""
    assert isinstance(sampler, TransactionalAdmissionSampler)
    async with barrier.mutation("admission") as expired:
        pass
    with pytest.raises(CutExpiredError):
        sampler.commit_admission(expired)
    async with DataPlaneCheckpointBarrier(hub=barrier.hub).mutation("admission") as foreign:
        with pytest.raises(ForeignCutError):
            sampler.commit_admission(foreign)
    async with barrier.checkpoint() as exclusive:
        wrong: MutationCut = exclusive  # type: ignore[assignment] # the mistake under test
        with pytest.raises(WrongSideError):
            sampler.commit_admission(wrong)
    assert sampler.dispatch_cursor == -1


@pytest.mark.parametrize("cursor", [-1, 0, 7])
def test_restoring_sets_exactly_the_saved_cursor(sampler: AnySampler, cursor: int) -> None:
    """No off-by-one between what is saved and what is restored, in either direction."""
    sampler.restore_cursor(3)
    sampler.restore_cursor(cursor)
    assert sampler.dispatch_cursor == cursor


def test_a_cursor_below_its_start_is_refused(sampler: AnySampler) -> None:
    """A cursor of -2 was never saved; the cursor stays."""
    sampler.restore_cursor(5)
    with pytest.raises(ValueError, match="-2"):
        sampler.restore_cursor(-2)
    assert sampler.dispatch_cursor == 5


def test_the_gate_is_open_while_the_cursor_is_below_version_plus_lookahead(
    case: Case, sampler: AnySampler
) -> None:
    """The whole table of small cursors and versions; windowed never waits."""
    for cursor in range(-1, 8):
        sampler.restore_cursor(cursor)
        for version in range(8):
            expected = case.lookahead is None or cursor < version + case.lookahead
            assert sampler.is_admissible(version) is expected


async def test_an_open_gate_does_not_suspend(
    sampler: AnySampler, barrier: DataPlaneCheckpointBarrier
) -> None:
    """A coroutine that never suspends ends in its first step."""
    assert isinstance(sampler, TransactionalAdmissionSampler)
    waiting = sampler.wait_until_admissible(TrainerVersion(hub=barrier.hub))
    sampler.restore_cursor(-1)
    with pytest.raises(StopIteration):
        waiting.send(None)


@pytest.mark.parametrize("case", GATED, ids=str, indirect=False)
async def test_a_shut_gate_opens_with_the_version_and_nothing_else(
    case: Case, barrier: DataPlaneCheckpointBarrier
) -> None:
    """It waits on the version's signal (no timer is set), through versions that are not new enough."""
    sampler = case.build(barrier)
    assert isinstance(sampler, TransactionalAdmissionSampler)
    assert case.lookahead is not None
    sampler.restore_cursor(6)
    versions = TrainerVersion(6 - case.lookahead - 1 if case.lookahead < 6 else 0, hub=barrier.hub)
    timers = _count_timers()
    task = asyncio.ensure_future(sampler.wait_until_admissible(versions))
    for opens_at in (False, False, True):
        for _ in range(5):
            await asyncio.sleep(0)
        assert not task.done()
        assert timers() == 0
        if not opens_at:
            versions.nudge()
    versions.advance(6 - case.lookahead)  # D = W + L: still shut
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not task.done()
    versions.advance(6 - case.lookahead + 1)
    await asyncio.wait_for(task, timeout=5)
    assert sampler.dispatch_cursor == 6


@pytest.mark.parametrize("case", GATED, ids=str, indirect=False)
async def test_a_wait_that_is_cancelled_leaves_no_trace(
    case: Case, barrier: DataPlaneCheckpointBarrier
) -> None:
    """The cursor stays, and the next admission is the one that would have come."""
    sampler = case.build(barrier)
    assert isinstance(sampler, TransactionalAdmissionSampler)
    sampler.restore_cursor(6)
    versions = TrainerVersion(hub=barrier.hub)
    task = asyncio.ensure_future(sampler.wait_until_admissible(versions))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert sampler.dispatch_cursor == 6
    assert await admit_one(sampler, barrier, version=20) == stamp(case, 7)


def test_selection_takes_ready_groups_only_up_to_the_count_and_in_order(
    case: Case, sampler: AnySampler
) -> None:
    """Groups that are reserved or in flight are never selected, whatever they are stamped with."""
    sampler.restore_cursor(4)
    target = stamp(case, 4)
    ready = [entry(position, 4, target=target) for position in (7, 3, 5)]
    owners = view(reserved(1), admitted(2, 4, target=target), *ready)
    assert sampler.select(owners, 4, 0) == ()
    # A stamped step trains in reading order, so that a seed decides it; the others take groups as they became ready.
    in_order = gids(3, 5, 7) if sampler.name == "in_order" else gids(7, 3, 5)
    assert sampler.select(owners, 4, 2) == in_order[:2]
    assert sampler.select(owners, 4, 9) == in_order


def test_what_is_evictable_is_ready_and_never_selected(case: Case, sampler: AnySampler) -> None:
    """Eviction and selection never want the same group, at any age."""
    groups = [entry(age, start=age, target=stamp(case, age)) for age in range(8)]
    flying = [admitted(10 + age, age, target=stamp(case, age)) for age in range(8)]
    owners = view(*flying, *groups)
    sampler.restore_cursor(8)
    for version in range(8):
        evicted = set(sampler.evictable(owners, version))
        assert evicted <= {group.group_id for group in groups}
        assert not evicted & set(sampler.select(owners, version, 100))


def test_a_parked_batch_is_the_first_selection_after_a_restore(
    case: Case, sampler: AnySampler, barrier: DataPlaneCheckpointBarrier
) -> None:
    """A full finished batch for the next step survives: the restored sampler selects exactly it."""
    parked = [entry(position, 7, target=stamp(case, 7)) for position in range(4)]
    sampler.restore_cursor(7)
    owners = view(*parked)
    restored = case.build(barrier)
    restored.restore_cursor(sampler.dispatch_cursor)
    assert restored.evictable(owners, 7) == ()
    assert plan_step(restored, owners, 7, 4) == gids(0, 1, 2, 3)


def test_a_full_batch_is_a_full_step(case: Case, sampler: AnySampler) -> None:
    """With one batch of G ready, the step takes the G; with one of them in flight, it waits."""
    sampler.restore_cursor(0)
    ready = [entry(position, 0, target=stamp(case, 0)) for position in range(3)]
    late = admitted(3, 0, target=stamp(case, 0))
    assert plan_step(sampler, view(late, *ready), 0, 4) is None
    done = entry(3, 0, target=stamp(case, 0))
    assert plan_step(sampler, view(*ready, done), 0, 4) == gids(0, 1, 2, 3)


def test_a_short_last_batch_is_trained_once_the_run_is_exhausted(case: Case, sampler: AnySampler) -> None:
    """Nothing waits for groups that were never read."""
    sampler.restore_cursor(0)
    last = [entry(position, 0, target=stamp(case, 0)) for position in range(2)]
    assert plan_step(sampler, view(*last, exhausted=True), 0, 4) == gids(0, 1)


def test_an_exhausted_run_that_owns_nothing_has_no_step(case: Case, sampler: AnySampler) -> None:
    """The end of a run is no step to pass: the version must not run away."""
    for cursor in (-1, 0, 9):
        sampler.restore_cursor(cursor)
        assert plan_step(sampler, view(exhausted=True), 3, 4) is None


@pytest.mark.parametrize("case", GATED, ids=str, indirect=False)
def test_a_step_whose_groups_are_all_lost_is_passed_behind_a_shut_gate(
    case: Case, barrier: DataPlaneCheckpointBarrier
) -> None:
    """Only the version can open the gate again, so the step is passed without an optimizer step."""
    sampler = case.build(barrier)
    assert case.lookahead is not None
    sampler.restore_cursor(3 + case.lookahead)
    assert plan_step(sampler, view(reserved(0)), 3, 4) == ()


def test_the_capacity_that_it_needs_is_the_table_s(case: Case, sampler: AnySampler) -> None:
    """G for what never waits, G times the versions in flight for what does."""
    assert sampler.required_capacity(4) == case.capacity


def test_statistics_show_name_and_cursor(sampler: AnySampler) -> None:
    """A collector reads the cursor without touching the sampler."""
    sampler.restore_cursor(11)
    found = sampler.statistics()
    assert (found.name, found.dispatch_cursor, found.stamps_target_steps) == (
        sampler.name,
        11,
        sampler.stamps_target_steps,
    )


def test_views_hold_references_and_samplers_change_nothing(case: Case, sampler: AnySampler) -> None:
    """Deciding twice from one view gives the same answers."""
    sampler.restore_cursor(2)
    groups: list[BufferEntry] = [
        replace(entry(position, 1 + position % 2), target_step=stamp(case, 2)) for position in range(4)
    ]
    owners = view(*groups, admitted(9, 2, target=stamp(case, 3)), exhausted=True)
    first = (sampler.select(owners, 2, 4), sampler.step_target(owners, 2, 4), sampler.evictable(owners, 2))
    second = (sampler.select(owners, 2, 4), sampler.step_target(owners, 2, 4), sampler.evictable(owners, 2))
    assert first == second
    assert sampler.dispatch_cursor == 2
    assert gid(9) not in first[0]


def _count_timers() -> Callable[[], int]:
    """Count timers that are set on the running loop from now on: a wait that polls needs one."""
    loop = asyncio.get_running_loop()
    before = len(loop._scheduled)  # type: ignore[attr-defined] # noqa: SLF001 - the loop shows its timers nowhere else
    return lambda: len(loop._scheduled) - before  # type: ignore[attr-defined] # noqa: SLF001 - as above
