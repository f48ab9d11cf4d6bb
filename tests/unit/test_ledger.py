"""Claims about the ledger: who owns a group before it is buffered, and how it gets in and out."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from quiesce.barrier import Cut
from quiesce.errors import (
    CutExpiredError,
    DuplicateOwnerError,
    ForeignCutError,
    PhaseError,
    StaleCommitError,
    UnknownGroupError,
)
from quiesce.testing import in_virtual_time
from tests.owners import Owners, record, ref

ID = ref(0).group_id

CHANGES: dict[str, Callable[[Owners, Cut], object]] = {
    "reserve_group": lambda owners, cut: owners.ledger.reserve_group(cut, record(1)),
    "mark_group_admitted": lambda owners, cut: owners.ledger.mark_group_admitted(
        cut, ID, target_step=None, start_version=0
    ),
    "retry_group": lambda owners, cut: owners.ledger.retry_group(cut, ID),
    "take_group": lambda owners, cut: owners.ledger.take_group(cut, ID, target="dropped"),
    "restore": lambda owners, cut: owners.ledger.restore(cut, [record(1)]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_needs_a_live_cut_of_its_barrier(change: str) -> None:
    """An expired and a foreign cut are refused, and nothing changes."""

    @in_virtual_time
    async def run() -> None:
        owners, strangers = Owners(), Owners()
        async with owners.barrier.mutation("retry") as expired:
            owners.ledger.reserve_group(expired, record(0))
        before = owners.ledger.records()
        with pytest.raises(CutExpiredError):
            CHANGES[change](owners, expired)
        async with strangers.barrier.mutation("retry") as foreign:
            with pytest.raises(ForeignCutError):
                CHANGES[change](owners, foreign)
        assert owners.ledger.records() == before

    run()


@in_virtual_time
async def test_a_group_is_reserved_once() -> None:
    """A second reservation is a second owner."""
    owners = Owners()
    async with owners.barrier.mutation("prompt_reservation") as cut:
        owners.ledger.reserve_group(cut, record(0))
        with pytest.raises(DuplicateOwnerError, match=ID):
            owners.ledger.reserve_group(cut, record(0))
    assert owners.ledger.records() == (record(0),)


@in_virtual_time
async def test_admission_stamps_a_reserved_group() -> None:
    """Phase, target step and start version change in one step; the rest stays."""
    owners = Owners()
    async with owners.barrier.mutation("admission") as cut:
        owners.ledger.reserve_group(cut, record(0))
        admitted = owners.ledger.mark_group_admitted(cut, ID, target_step=4, start_version=3)
    assert admitted == record(0, phase="admitted", target_step=4, start_version=3)
    assert owners.ledger.get(ID) is admitted
    assert owners.ledger.admitted == 1


@in_virtual_time
async def test_a_group_is_admitted_once() -> None:
    """A second admission would move its stamp."""
    owners = Owners()
    async with owners.barrier.mutation("admission") as cut:
        owners.ledger.reserve_group(cut, record(0))
        owners.ledger.mark_group_admitted(cut, ID, target_step=4, start_version=3)
        with pytest.raises(PhaseError, match="is admitted and cannot become admitted"):
            owners.ledger.mark_group_admitted(cut, ID, target_step=5, start_version=4)
    assert owners.ledger.get(ID).target_step == 4


@in_virtual_time
async def test_a_retry_counts_the_attempt_and_keeps_the_stamp() -> None:
    """Start version and target step are those of the batch's admission."""
    owners = Owners()
    async with owners.barrier.mutation("retry") as cut:
        owners.ledger.reserve_group(cut, record(0, phase="admitted", target_step=4, start_version=3))
        retried = owners.ledger.retry_group(cut, ID)
    assert retried == record(0, phase="admitted", target_step=4, start_version=3, attempt=1)
    assert owners.ledger.get(ID) is retried


@in_virtual_time
async def test_a_reserved_group_is_not_retried() -> None:
    """It has no attempt yet."""
    owners = Owners()
    async with owners.barrier.mutation("retry") as cut:
        owners.ledger.reserve_group(cut, record(0))
        with pytest.raises(PhaseError, match="is reserved and cannot become retried"):
            owners.ledger.retry_group(cut, ID)


@in_virtual_time
async def test_taking_a_group_ends_the_ownership_and_reports_the_move() -> None:
    """The hook sees a ledger without the group."""
    owners = Owners()
    seen: list[tuple[str, str, str, str, bool]] = []

    class Looks:
        def owner_moved(self, group_id: str, source: str, target: str, reason: str) -> None:
            seen.append((group_id, source, target, reason, group_id in owners.ledger))

    owners.hub.subscribe(Looks())
    async with owners.barrier.mutation("group_removal") as cut:
        owners.ledger.reserve_group(cut, record(0))
        taken = owners.ledger.take_group(cut, ID, target="dropped", reason="stale_abort")
    assert taken == record(0)
    assert seen == [(ID, "read", "ledger", "", True), (ID, "ledger", "dropped", "stale_abort", False)]


@pytest.mark.parametrize("change", ["mark_group_admitted", "retry_group", "take_group"])
def test_a_group_that_is_not_there_is_named(change: str) -> None:
    """An unknown group is an error, never a no-op."""

    @in_virtual_time
    async def run() -> None:
        owners = Owners()
        async with owners.barrier.mutation("retry") as cut:
            with pytest.raises(UnknownGroupError, match=f"ledger does not own group {ID}"):
                CHANGES[change](owners, cut)

    run()


@in_virtual_time
async def test_an_attempt_that_is_not_current_takes_nothing() -> None:
    """After a retry the old attempt is stale, and so is one whose group is gone."""
    owners = Owners()
    async with owners.barrier.mutation("retry") as cut:
        owners.ledger.reserve_group(cut, record(0, phase="admitted"))
        owners.ledger.retry_group(cut, ID)
        with pytest.raises(StaleCommitError, match="attempt 0 is stale: the ledger waits for attempt 1"):
            owners.ledger.take_group(cut, ID, target="dropped", attempt=0)
        assert ID in owners.ledger
        owners.ledger.take_group(cut, ID, target="dropped", attempt=1)
        with pytest.raises(StaleCommitError, match="does not own the group"):
            owners.ledger.take_group(cut, ID, target="dropped", attempt=1)


@in_virtual_time
async def test_records_are_a_snapshot_in_the_order_of_reservation() -> None:
    """What was captured does not change with the ledger."""
    owners = Owners()
    async with owners.barrier.mutation("prompt_reservation") as cut:
        for position in (2, 0, 1):
            owners.ledger.reserve_group(cut, record(position))
        captured = owners.ledger.records()
        owners.ledger.mark_group_admitted(cut, ref(2).group_id, target_step=1, start_version=0)
        owners.ledger.take_group(cut, ref(0).group_id, target="dropped")
    assert captured == (record(2), record(0), record(1))
    assert [kept.group_id for kept in owners.ledger.records()] == [ref(2).group_id, ref(1).group_id]


@in_virtual_time
async def test_a_restore_takes_over_every_record_as_it_was() -> None:
    """Phases, stamps, attempts and order are kept."""
    records = [record(1, phase="admitted", target_step=2, start_version=1, attempt=3), record(0)]
    owners = Owners()
    async with owners.barrier.mutation("recovery_restore") as cut:
        owners.ledger.restore(cut, records)
    assert owners.ledger.records() == tuple(records)
    assert owners.ledger.admitted == 1


@pytest.mark.parametrize("records", [[record(1), record(0)], [record(1), record(1)]], ids=["owned", "twice"])
def test_a_restore_that_names_a_group_twice_takes_over_none(records: list[object]) -> None:
    """It is refused as a whole."""

    @in_virtual_time
    async def run() -> None:
        owners = Owners()
        async with owners.barrier.mutation("recovery_restore") as cut:
            owners.ledger.reserve_group(cut, record(0))
            with pytest.raises(DuplicateOwnerError):
                owners.ledger.restore(cut, records)  # type: ignore[arg-type] # records, to the type checker objects
        assert owners.ledger.records() == (record(0),)

    run()


@in_virtual_time
async def test_statistics_count_by_phase() -> None:
    """With the largest stamp."""
    owners = Owners()
    async with owners.barrier.mutation("admission") as cut:
        for position in range(3):
            owners.ledger.reserve_group(cut, record(position))
        assert owners.ledger.statistics().target_step_max is None
        for position in range(2):
            owners.ledger.mark_group_admitted(
                cut, ref(position).group_id, target_step=7 - position, start_version=0
            )
    now = owners.ledger.statistics()
    assert (now.reserved, now.admitted, now.target_step_max) == (1, 2, 7)
    assert len(owners.ledger) == 3


def test_a_ledger_has_no_truth_value() -> None:
    """An empty ledger is not a missing one."""
    with pytest.raises(TypeError, match="no truth value"):
        bool(Owners().ledger)


@in_virtual_time
async def test_a_group_is_found_or_not() -> None:
    """`find` answers None where `get` raises."""
    owners = Owners()
    async with owners.barrier.mutation("prompt_reservation") as cut:
        owners.ledger.reserve_group(cut, record(0))
    assert owners.ledger.find(ID) == owners.ledger.get(ID) == record(0)
    assert owners.ledger.find("nobody") is None
    with pytest.raises(UnknownGroupError, match="nobody"):
        owners.ledger.get("nobody")
