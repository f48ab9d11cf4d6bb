"""Claims about the account of every prompt, from its reading to its end."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from quiesce.accounting import AccountingState, bits_set, has_bit
from quiesce.barrier import Cut
from quiesce.errors import AccountingError, CutExpiredError, ForeignCutError
from quiesce.testing import in_virtual_time
from quiesce.types import DROP_REASONS, PromptRef
from tests.owners import Owners, ref

CHANGES: dict[str, Callable[[Owners, Cut], object]] = {
    "read": lambda owners, cut: owners.accounting.read(cut, [ref(1)]),
    "end_epoch": lambda owners, cut: owners.accounting.end_epoch(cut, 0),
    "trained": lambda owners, cut: owners.accounting.trained(cut, [ref(0)]),
    "dropped": lambda owners, cut: owners.accounting.dropped(cut, [ref(0)], "failed"),
    "restore": lambda owners, cut: owners.accounting.restore(cut, owners.accounting.capture()),
}


def refs(*positions: int, epoch: int = 0) -> list[PromptRef]:
    """Return prompts by position."""
    return [ref(position, epoch) for position in positions]


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_needs_a_live_cut_of_its_barrier(change: str) -> None:
    """An expired and a foreign cut are refused, and nothing changes."""

    @in_virtual_time
    async def run() -> None:
        owners, strangers = Owners(), Owners()
        async with owners.barrier.mutation("prompt_reservation") as expired:
            owners.accounting.read(expired, refs(0))
        before = owners.accounting.capture()
        with pytest.raises(CutExpiredError):
            CHANGES[change](owners, expired)
        async with strangers.barrier.mutation("retry") as foreign:
            with pytest.raises(ForeignCutError):
                CHANGES[change](owners, foreign)
        assert owners.accounting.capture() == before

    run()


@in_virtual_time
async def test_reads_and_ends_are_counted_by_position() -> None:
    """The bitmaps hold exactly the positions that ended."""
    owners = Owners()
    async with owners.barrier.mutation("retry") as cut:
        owners.accounting.read(cut, refs(*range(20)))
        owners.accounting.trained(cut, refs(0, 9, 19))
        owners.accounting.dropped(cut, refs(8), "failed")
    (account,) = owners.accounting.capture().open
    assert (account.epoch, account.read, account.ended) == (0, 20, False)
    assert [at for at in range(24) if has_bit(account.trained, at)] == [0, 9, 19]
    assert [at for at in range(24) if has_bit(account.dropped, at)] == [8]
    assert account.reasons == {"failed": 1}
    assert [at for at in range(20) if owners.accounting.ended(ref(at))] == [0, 8, 9, 19]


@pytest.mark.parametrize(
    "batch, problem",
    [
        (refs(3), "the next position is 2"),
        (refs(1), "the next position is 2"),
        (refs(2, 2), "the next position is 3"),
        (refs(2, 4), "the next position is 3"),
        (refs(0, epoch=2), "the next epoch is 1"),
        (refs(1, epoch=1), "the next position is 0"),
        ([*refs(2), *refs(0, epoch=1), *refs(0, epoch=3)], "the next epoch is 2"),
    ],
)
def test_a_reading_out_of_order_counts_nothing(batch: list[PromptRef], problem: str) -> None:
    """Positions follow each other, epochs too; a refused batch leaves no trace."""

    @in_virtual_time
    async def run() -> None:
        owners = Owners()
        async with owners.barrier.mutation("prompt_reservation") as cut:
            owners.accounting.read(cut, refs(0, 1))
            before = owners.accounting.capture()
            with pytest.raises(AccountingError, match=problem):
                owners.accounting.read(cut, batch)
        assert owners.accounting.capture() == before
        assert owners.accounting.statistics().read == 2
        assert owners.recorder.of("prompts_read") == [(2,)]

    run()


@in_virtual_time
async def test_an_epoch_that_ended_is_read_no_further() -> None:
    """The next prompt belongs to the next epoch."""
    owners = Owners()
    async with owners.barrier.mutation("prompt_reservation") as cut:
        owners.accounting.read(cut, refs(0))
        owners.accounting.end_epoch(cut, 0)
        with pytest.raises(AccountingError, match="the epoch has ended"):
            owners.accounting.read(cut, refs(1))
        owners.accounting.read(cut, refs(0, epoch=1))
    assert owners.accounting.statistics().read == 2


@pytest.mark.parametrize(
    "batch, problem",
    [
        (refs(4), "it was never read"),
        (refs(0, epoch=1), "it was never read"),
        (refs(0), "it was trained before"),
        (refs(1), "it was dropped before"),
        (refs(2, 2), "twice in one call"),
        ([ref(2), PromptRef(0, 2, 5)], "twice in one call"),
        (refs(2, 3, 0), "it was trained before"),
    ],
)
@pytest.mark.parametrize("how", ["trained", "dropped"])
def test_a_position_ends_once(batch: list[PromptRef], problem: str, how: str) -> None:
    """A second end is refused, and the whole call counts nothing."""

    @in_virtual_time
    async def run() -> None:
        owners = Owners()
        async with owners.barrier.mutation("retry") as cut:
            owners.accounting.read(cut, refs(0, 1, 2, 3))
            owners.accounting.trained(cut, refs(0))
            owners.accounting.dropped(cut, refs(1), "failed")
            before = owners.accounting.capture(), owners.accounting.statistics()
            with pytest.raises(AccountingError, match=f"{how},? .*{problem}|{how} {problem}"):
                if how == "trained":
                    owners.accounting.trained(cut, batch)
                else:
                    owners.accounting.dropped(cut, batch, "failed")
        assert (owners.accounting.capture(), owners.accounting.statistics()) == before

    run()


@in_virtual_time
async def test_a_position_of_an_epoch_that_is_over_does_not_end_again() -> None:
    """The error says that the epoch is over."""
    owners = Owners()
    async with owners.barrier.mutation("retry") as cut:
        owners.accounting.read(cut, refs(0))
        owners.accounting.end_epoch(cut, 0)
        owners.accounting.trained(cut, refs(0))
        with pytest.raises(AccountingError, match="its epoch is over"):
            owners.accounting.trained(cut, refs(0))


@in_virtual_time
async def test_an_unknown_reason_counts_nothing() -> None:
    """Reasons are a closed set, because they become labels."""
    owners = Owners()
    async with owners.barrier.mutation("retry") as cut:
        owners.accounting.read(cut, refs(0))
        with pytest.raises(ValueError, match="unknown drop reason 'bored'"):
            owners.accounting.dropped(cut, refs(0), "bored")
    assert not owners.accounting.ended(ref(0))


@in_virtual_time
async def test_an_epoch_is_over_when_it_was_read_to_its_end_and_every_position_ended() -> None:
    """Then it is folded into totals, and not before."""
    owners = Owners()
    async with owners.barrier.mutation("retry") as cut:
        owners.accounting.read(cut, refs(0, 1))
        owners.accounting.trained(cut, refs(0))
        owners.accounting.dropped(cut, refs(1), "evicted")
        assert owners.accounting.capture().closed.epochs == 0
        owners.accounting.end_epoch(cut, 0)
    state = owners.accounting.capture()
    assert state.open == ()
    assert (state.closed.epochs, state.closed.read, state.closed.trained) == (1, 2, 1)
    assert state.closed.dropped == {"evicted": 1}
    assert owners.accounting.ended(ref(0))
    assert not owners.accounting.ended(ref(0, epoch=1))


@in_virtual_time
async def test_epochs_are_folded_in_order() -> None:
    """A later epoch that is over waits for an earlier one that is not."""
    owners = Owners()
    async with owners.barrier.mutation("retry") as cut:
        for epoch in range(2):
            owners.accounting.read(cut, refs(0, epoch=epoch))
            owners.accounting.end_epoch(cut, epoch)
        owners.accounting.trained(cut, refs(0, epoch=1))
        assert owners.accounting.capture().closed.epochs == 0
        owners.accounting.trained(cut, refs(0))
    assert owners.accounting.capture().closed.epochs == 2
    assert owners.accounting.capture().open == ()


@in_virtual_time
async def test_an_epoch_without_a_position_counts() -> None:
    """An empty epoch is over at once."""
    owners = Owners()
    async with owners.barrier.mutation("prompt_reservation") as cut:
        owners.accounting.end_epoch(cut, 0)
        owners.accounting.read(cut, refs(0, epoch=1))
    assert owners.accounting.capture().closed.epochs == 1


@pytest.mark.parametrize("epoch, problem", [(0, "ended twice"), (2, "the next epoch is 1")])
def test_epochs_end_once_and_in_order(epoch: int, problem: str) -> None:
    """Anything else is refused."""

    @in_virtual_time
    async def run() -> None:
        owners = Owners()
        async with owners.barrier.mutation("prompt_reservation") as cut:
            owners.accounting.read(cut, refs(0))
            owners.accounting.end_epoch(cut, 0)
            with pytest.raises(AccountingError, match=problem):
                owners.accounting.end_epoch(cut, epoch)

    run()


@in_virtual_time
async def test_a_capture_does_not_change_with_the_account() -> None:
    """It is a copy."""
    owners = Owners()
    async with owners.barrier.mutation("retry") as cut:
        owners.accounting.read(cut, refs(0, 1))
        owners.accounting.dropped(cut, refs(0), "failed")
        captured = owners.accounting.capture()
        owners.accounting.trained(cut, refs(1))
        owners.accounting.end_epoch(cut, 0)
    (account,) = captured.open
    assert (account.trained, account.dropped, account.reasons) == (b"\x00", b"\x01", {"failed": 1})
    assert (captured.read, captured.trained, captured.dropped) == (2, 0, 1)


async def _busy(owners: Owners) -> AccountingState:
    async with owners.barrier.mutation("retry") as cut:
        for epoch in range(3):
            owners.accounting.read(cut, refs(*range(11), epoch=epoch))
            owners.accounting.trained(cut, refs(*range(5 + epoch), epoch=epoch))
            owners.accounting.dropped(cut, refs(9 + epoch // 2, epoch=epoch), DROP_REASONS[epoch])
            if epoch < 2:
                owners.accounting.end_epoch(cut, epoch)
        owners.accounting.trained(cut, refs(*range(5, 9)))
        owners.accounting.dropped(cut, refs(10), "failed")
    return owners.accounting.capture()


@in_virtual_time
async def test_a_restored_account_goes_on_as_the_saved_one() -> None:
    """Totals, open epochs and what may still end are the same."""
    saved, restored = Owners(), Owners()
    state = await _busy(saved)
    assert (state.closed.epochs, len(state.open)) == (1, 2)
    async with restored.barrier.mutation("recovery_restore") as cut:
        restored.accounting.restore(cut, state)
    assert restored.accounting.capture() == state
    assert restored.accounting.statistics() == saved.accounting.statistics()
    for owners in (saved, restored):
        async with owners.barrier.mutation("retry") as cut:
            owners.accounting.trained(
                cut, refs(*(at for at in range(11) if at not in {*range(6), 9}), epoch=1)
            )
            owners.accounting.read(cut, refs(11, epoch=2))
    assert restored.accounting.capture() == saved.accounting.capture()
    assert restored.accounting.capture().closed.epochs == 2


@pytest.mark.parametrize("before", ["read", "end_epoch"])
def test_a_restore_needs_an_empty_account(before: str) -> None:
    """Also an empty epoch that ended counts as something."""

    @in_virtual_time
    async def run() -> None:
        owners = Owners()
        state = await _busy(Owners())
        async with owners.barrier.mutation("recovery_restore") as cut:
            if before == "read":
                owners.accounting.read(cut, refs(0))
            else:
                owners.accounting.end_epoch(cut, 0)
            with pytest.raises(AccountingError, match="not empty"):
                owners.accounting.restore(cut, state)

    run()


@in_virtual_time
async def test_statistics_have_every_reason() -> None:
    """A label that never occurred is there, at zero."""
    owners = Owners()
    await _busy(owners)
    now = owners.accounting.statistics()
    assert set(now.dropped) == set(DROP_REASONS)
    state = owners.accounting.capture()
    assert (now.read, now.trained, sum(now.dropped.values())) == (state.read, state.trained, state.dropped)


def test_bitmaps_end_where_they_end() -> None:
    """A position past the end is not set."""
    assert bits_set(b"\x05\x80") == 3
    assert has_bit(b"\x05\x80", 15)
    assert not has_bit(b"\x05\x80", 14)
    assert not has_bit(b"", 0)


@in_virtual_time
async def test_reading_nothing_is_not_reported() -> None:
    """An empty pull fires no hook."""
    owners = Owners()
    async with owners.barrier.mutation("prompt_reservation") as cut:
        owners.accounting.read(cut, [])
    assert owners.recorder.of("prompts_read") == []
