"""Claims about the pool of spare prompts."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from quiesce.barrier import Cut
from quiesce.errors import CutExpiredError, DuplicateOwnerError, ForeignCutError, UnknownGroupError
from quiesce.testing import in_virtual_time
from tests.owners import Owners, ref

CHANGES: dict[str, Callable[[Owners, Cut], object]] = {
    "add": lambda owners, cut: owners.spares.add(cut, [ref(1)]),
    "take": lambda owners, cut: owners.spares.take(cut),
    "restore": lambda owners, cut: owners.spares.restore(cut, [ref(1)]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_needs_a_live_cut_of_its_barrier(change: str) -> None:
    """An expired and a foreign cut are refused, and nothing changes."""

    @in_virtual_time
    async def run() -> None:
        owners, strangers = Owners(), Owners()
        async with owners.barrier.mutation("substitution") as expired:
            owners.spares.add(expired, [ref(0)])
        with pytest.raises(CutExpiredError):
            CHANGES[change](owners, expired)
        async with strangers.barrier.mutation("substitution") as foreign:
            with pytest.raises(ForeignCutError):
                CHANGES[change](owners, foreign)
        assert owners.spares.refs() == (ref(0),)

    run()


@in_virtual_time
async def test_spares_leave_in_the_order_in_which_they_came() -> None:
    """The oldest first, so that none is starved."""
    owners = Owners()
    async with owners.barrier.mutation("substitution") as cut:
        owners.spares.add(cut, [ref(2), ref(0)])
        owners.spares.add(cut, [ref(1)])
        assert [owners.spares.take(cut).position for _ in range(3)] == [2, 0, 1]
    assert len(owners.spares) == 0


@in_virtual_time
async def test_an_empty_pool_says_so() -> None:
    """Taking from it is an error."""
    owners = Owners()
    async with owners.barrier.mutation("substitution") as cut:
        with pytest.raises(UnknownGroupError, match="the pool is empty"):
            owners.spares.take(cut)


@in_virtual_time
async def test_adding_reports_a_move_from_the_reading() -> None:
    """One for each prompt, when all of them are in."""
    owners = Owners()
    async with owners.barrier.mutation("prompt_reservation") as cut:
        owners.spares.add(cut, [ref(0), ref(1)])
    moves = owners.recorder.of("owner_moved")
    assert moves == [(ref(position).group_id, "read", "spares", "") for position in range(2)]


@in_virtual_time
async def test_restoring_is_not_reported_as_a_reading() -> None:
    """Prompts of a checkpoint were read before."""
    owners = Owners()
    async with owners.barrier.mutation("recovery_restore") as cut:
        owners.spares.restore(cut, [ref(1), ref(0)])
    assert owners.spares.refs() == (ref(1), ref(0))
    assert owners.recorder.of("owner_moved") == []


@pytest.mark.parametrize("how", ["add", "restore"])
@pytest.mark.parametrize("positions", [(1, 0), (1, 1)], ids=["owned", "twice"])
def test_a_prompt_is_a_spare_once(how: str, positions: tuple[int, ...]) -> None:
    """A second time is refused, and none of the call's prompts is added."""

    @in_virtual_time
    async def run() -> None:
        owners = Owners()
        async with owners.barrier.mutation("substitution") as cut:
            owners.spares.add(cut, [ref(0)])
            with pytest.raises(DuplicateOwnerError):
                getattr(owners.spares, how)(cut, [ref(position) for position in positions])
        assert owners.spares.refs() == (ref(0),)
        assert len(owners.recorder.of("owner_moved")) == 1

    run()


@in_virtual_time
async def test_refs_are_a_snapshot() -> None:
    """What was captured does not change with the pool."""
    owners = Owners()
    async with owners.barrier.mutation("substitution") as cut:
        owners.spares.add(cut, [ref(0), ref(1)])
        captured = owners.spares.refs()
        owners.spares.take(cut)
    assert captured == (ref(0), ref(1))
    assert owners.spares.statistics().spares == 1
    assert ref(0).group_id not in owners.spares
    assert ref(1).group_id in owners.spares


def test_a_pool_has_no_truth_value() -> None:
    """An empty pool is not a missing one."""
    with pytest.raises(TypeError, match="no truth value"):
        bool(Owners().spares)
