"""Claims about the replay buffer's index: how a finished group gets in, is claimed, and gets out."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from quiesce.barrier import Cut
from quiesce.buffer import Claim, ReplayBuffer
from quiesce.errors import (
    ClaimError,
    CutExpiredError,
    DuplicateOwnerError,
    ForeignCutError,
    MissingRowError,
    PhaseError,
    StaleCommitError,
    UnknownGroupError,
    WrongSideError,
)
from quiesce.testing import in_virtual_time
from quiesce.types import BufferEntry
from tests.owners import Owners, entry, keys_of, record, ref

ID = ref(0).group_id


def commit(owners: Owners, cut: Cut, position: int = 0, attempt: int = 0, **changes: Any) -> BufferEntry:  # noqa: ANN401
    """Commit a group with plain values."""
    group_id = ref(position).group_id
    given: dict[str, Any] = {
        "keys": keys_of(group_id),
        "generated_from": 1,
        "generated_to": 2,
        "stats": {},
    } | changes
    return owners.buffer.commit_group(cut, group_id, attempt, **given)


def admit(owners: Owners, cut: Cut, *positions: int, target_step: int | None = 4) -> None:
    """Bring groups to the point at which they may be committed."""
    for position in positions:
        owners.ledger.reserve_group(
            cut, record(position, phase="admitted", target_step=target_step, start_version=3)
        )
        owners.rows.there.update(keys_of(ref(position).group_id))


def ready(owners: Owners, cut: Cut, *positions: int) -> None:
    """Bring groups into the buffer."""
    admit(owners, cut, *positions)
    for position in positions:
        commit(owners, cut, position)


def ids(*positions: int) -> list[str]:
    """Return group ids."""
    return [ref(position).group_id for position in positions]


# ---------------------------------------------------------------------------------------------- commit


@in_virtual_time
async def test_a_commit_moves_the_group_in_one_step() -> None:
    """At the moment of the report the buffer owns it and the ledger does not."""
    owners = Owners()
    seen: list[tuple[str, str, bool, bool]] = []

    class Looks:
        def owner_moved(self, group_id: str, source: str, target: str, reason: str) -> None:
            seen.append((source, target, group_id in owners.ledger, group_id in owners.buffer))

    owners.hub.subscribe(Looks())
    async with owners.barrier.mutation("group_commit") as cut:
        admit(owners, cut, 0)
        made = commit(owners, cut, stats={"reward": 0.5})
    assert seen == [("read", "ledger", True, False), ("ledger", "buffer", False, True)]
    assert made == BufferEntry(ID, 0, ref(0), 0, 4, 3, 1, 2, keys_of(ID), {"reward": 0.5})
    assert owners.buffer.ready() == (made,)
    assert owners.buffer.find(ID) is made


@in_virtual_time
async def test_an_observer_that_raises_at_a_commit_does_not_lose_the_group() -> None:
    """Even with a strict hub the group has exactly one owner afterwards."""
    owners = Owners()

    class Hostile:
        def owner_moved(self, group_id: str, source: str, target: str, reason: str) -> None:
            raise RuntimeError("hostile")

    async with owners.barrier.mutation("group_commit") as cut:
        admit(owners, cut, 0)
        owners.hub.subscribe(Hostile())
        with pytest.raises(RuntimeError, match="hostile"):
            commit(owners, cut)
    assert (ID in owners.ledger, ID in owners.buffer) == (False, True)


@in_virtual_time
async def test_a_commit_of_an_older_attempt_is_stale() -> None:
    """The ledger waits for the retry; its group stays where it was."""
    owners = Owners()
    async with owners.barrier.mutation("group_commit") as cut:
        admit(owners, cut, 0)
        owners.ledger.retry_group(cut, ID)
        with pytest.raises(StaleCommitError, match="attempt 0 is stale: the ledger waits for attempt 1"):
            commit(owners, cut)
    assert (ID in owners.ledger, ID in owners.buffer) == (True, False)


@in_virtual_time
async def test_a_commit_of_a_group_that_the_ledger_gave_up_is_stale() -> None:
    """A rollout that finishes after its group was dropped resurrects nothing."""
    owners = Owners()
    async with owners.barrier.mutation("group_commit") as cut:
        admit(owners, cut, 0)
        owners.ledger.take_group(cut, ID, target="dropped", reason="stale_abort")
        with pytest.raises(StaleCommitError, match="does not own the group"):
            commit(owners, cut)
    assert ID not in owners.buffer


@in_virtual_time
async def test_a_second_commit_is_refused() -> None:
    """The buffer's copy stays, ready or claimed."""
    owners = Owners()
    async with owners.barrier.mutation("group_commit") as cut:
        ready(owners, cut, 0)
        with pytest.raises(DuplicateOwnerError):
            commit(owners, cut)
        owners.buffer.claim_for_training(cut, [ID])
        with pytest.raises(DuplicateOwnerError):
            commit(owners, cut)


@in_virtual_time
async def test_a_late_commit_of_an_older_attempt_is_stale_also_once_the_newer_one_is_buffered() -> None:
    """What comes too late is refused as stale, so that its rows are cleared and the run goes on."""
    owners = Owners()
    async with owners.barrier.mutation("group_commit") as cut:
        admit(owners, cut, 0)
        owners.ledger.retry_group(cut, ID)
        commit(owners, cut, attempt=1)
        with pytest.raises(StaleCommitError):
            commit(owners, cut, attempt=0)
    assert ID in owners.buffer


@in_virtual_time
async def test_a_group_that_was_never_admitted_is_not_committed() -> None:
    """A reserved group has no start version."""
    owners = Owners()
    async with owners.barrier.mutation("group_commit") as cut:
        owners.ledger.reserve_group(cut, record(0))
        owners.rows.there.update(keys_of(ID))
        with pytest.raises(PhaseError, match="is reserved and cannot become buffered"):
            commit(owners, cut)
    assert ID in owners.ledger


@in_virtual_time
async def test_a_commit_whose_rows_are_not_there_is_refused_by_name() -> None:
    """The group stays in the ledger, and the missing key is named."""
    owners = Owners()
    async with owners.barrier.mutation("group_commit") as cut:
        admit(owners, cut, 0)
        owners.rows.there.discard(keys_of(ID)[1])
        with pytest.raises(MissingRowError, match=keys_of(ID)[1].encode()):
            commit(owners, cut)
    assert (ID in owners.ledger, ID in owners.buffer) == (True, False)


@in_virtual_time
async def test_the_entry_does_not_change_with_what_it_was_made_of() -> None:
    """Statistics and keys are copied."""
    owners = Owners()
    stats, keys = {"reward": 1.0}, list(keys_of(ID))
    async with owners.barrier.mutation("group_commit") as cut:
        admit(owners, cut, 0)
        made = commit(owners, cut, stats=stats, keys=keys)
    stats["reward"] = 2.0
    keys.clear()
    assert made.stats == {"reward": 1.0}
    assert made.keys == keys_of(ID)


# ---------------------------------------------------------------------------------------------- claims


@in_virtual_time
async def test_a_claim_hides_its_groups_from_samplers() -> None:
    """They are owned, but no longer ready."""
    owners = Owners()
    async with owners.barrier.mutation("sample_clear") as cut:
        ready(owners, cut, 0, 1, 2)
        claim = owners.buffer.claim_for_training(cut, ids(2, 0))
    assert [one.group_id for one in claim.entries] == ids(2, 0)
    assert [one.group_id for one in owners.buffer.ready()] == ids(1)
    assert owners.buffer.claims() == (claim,)
    assert all(one in owners.buffer for one in ids(0, 1, 2))
    assert owners.recorder.of("owner_moved")[-2:] == [(one, "buffer", "training", "") for one in ids(2, 0)]


@pytest.mark.parametrize(
    "names, error",
    [(ids(1, 5), UnknownGroupError), (ids(1, 0), UnknownGroupError), (ids(1, 1), ClaimError)],
    ids=["unknown", "claimed", "twice"],
)
def test_a_claim_takes_all_or_nothing(names: list[str], error: type[Exception]) -> None:
    """A group that is not ready, or named twice, refuses the claim as a whole."""

    @in_virtual_time
    async def run() -> None:
        owners = Owners()
        async with owners.barrier.mutation("sample_clear") as cut:
            ready(owners, cut, 0, 1)
            first = owners.buffer.claim_for_training(cut, ids(0))
            with pytest.raises(error):
                owners.buffer.claim_for_training(cut, names)
        assert [one.group_id for one in owners.buffer.ready()] == ids(1)
        assert owners.buffer.claims() == (first,)

    run()


@in_virtual_time
async def test_finishing_ends_the_ownership_and_returns_the_row_keys() -> None:
    """Its groups are trained, its keys go to clearing in the same step."""
    owners = Owners()
    async with owners.barrier.mutation("sample_clear") as cut:
        ready(owners, cut, 0, 1)
        claim = owners.buffer.claim_for_training(cut, ids(1, 0))
        owners.buffer.begin(claim)
        keys = owners.buffer.finish(cut, claim)
    assert keys == keys_of(ids(1)[0]) + keys_of(ids(0)[0])
    assert len(owners.buffer) == 0
    assert owners.buffer.claims() == ()
    assert owners.recorder.of("owner_moved")[-2:] == [(one, "training", "trained", "") for one in ids(1, 0)]


@in_virtual_time
async def test_unclaiming_gives_the_groups_back_in_front() -> None:
    """A step that never began leaves no trace, not even in the order."""
    owners = Owners()
    async with owners.barrier.mutation("sample_clear") as cut:
        ready(owners, cut, 0, 1, 2)
        before = owners.buffer.ready()
        claim = owners.buffer.claim_for_training(cut, ids(0, 1))
        owners.buffer.unclaim(cut, claim)
    assert owners.buffer.ready() == before
    assert owners.buffer.claims() == ()


@pytest.mark.parametrize(
    "before, move, problem",
    [
        ((), "finish", "has not begun"),
        (("begin",), "begin", "its step has begun"),
        (("begin",), "unclaim", "its step has begun"),
        (("begin", "finish"), "finish", "is over"),
        (("begin", "finish"), "begin", "is over"),
        (("unclaim",), "begin", "is over"),
        (("unclaim",), "unclaim", "is over"),
    ],
)
def test_a_claim_lives_once_through_its_cycle(before: tuple[str, ...], move: str, problem: str) -> None:
    """Any other move is refused, and names the claim's groups."""

    @in_virtual_time
    async def run() -> None:
        owners = Owners()
        async with owners.barrier.mutation("sample_clear") as cut:
            ready(owners, cut, 0)
            claim = owners.buffer.claim_for_training(cut, [ID])
            moves: dict[str, Callable[[], object]] = {
                "begin": lambda: owners.buffer.begin(claim),
                "finish": lambda: owners.buffer.finish(cut, claim),
                "unclaim": lambda: owners.buffer.unclaim(cut, claim),
            }
            for step in before:
                moves[step]()
            owned = len(owners.buffer)
            with pytest.raises(ClaimError, match=f"{ID}.*{problem}"):
                moves[move]()
            assert len(owners.buffer) == owned

    run()


@in_virtual_time
async def test_a_claim_of_another_buffer_is_refused() -> None:
    """It is not one of ours, whatever its groups."""
    owners = Owners()
    async with owners.barrier.mutation("sample_clear") as cut:
        with pytest.raises(ClaimError, match="is over"):
            owners.buffer.finish(cut, Claim(0, (entry(0),), begun=True))


@in_virtual_time
async def test_a_claim_whose_step_has_not_begun_is_captured_as_ready() -> None:
    """Its step will be taken again after a restore."""
    owners = Owners()
    async with owners.barrier.mutation("sample_clear") as cut:
        ready(owners, cut, 0, 1)
        owners.buffer.claim_for_training(cut, ids(0))
    kept, unstarted = owners.buffer.capture()
    assert ([one.group_id for one in kept], [one.group_id for one in unstarted]) == (ids(1), ids(0))


@in_virtual_time
async def test_no_cut_is_taken_inside_a_begun_step() -> None:
    """Its groups are neither untrained nor trained, so the capture refuses, until the step is over."""
    owners = Owners()
    async with owners.barrier.mutation("sample_clear") as cut:
        ready(owners, cut, 0)
        claim = owners.buffer.claim_for_training(cut, [ID])
        owners.buffer.begin(claim)
        with pytest.raises(ClaimError, match="no cut may be taken"):
            owners.buffer.capture()
        owners.buffer.finish(cut, claim)
    assert owners.buffer.capture() == ((), ())


# ------------------------------------------------------------------------------------ eviction, restore


@in_virtual_time
async def test_eviction_drops_ready_groups_for_a_reason() -> None:
    """The entries come back, so that their rows can be cleared."""
    owners = Owners()
    async with owners.barrier.mutation("group_removal") as cut:
        ready(owners, cut, 0, 1)
        gone = owners.buffer.evict(cut, ids(1, 1), "violation")
    assert [one.group_id for one in gone] == ids(1)
    assert [one.group_id for one in owners.buffer.ready()] == ids(0)
    assert owners.recorder.of("owner_moved")[-1] == (ids(1)[0], "buffer", "dropped", "violation")


@in_virtual_time
async def test_eviction_takes_all_or_nothing() -> None:
    """A claimed group is not evicted, and neither are the others of that call."""
    owners = Owners()
    async with owners.barrier.mutation("group_removal") as cut:
        ready(owners, cut, 0, 1)
        owners.buffer.claim_for_training(cut, ids(0))
        with pytest.raises(UnknownGroupError, match=ID):
            owners.buffer.evict(cut, ids(1, 0))
    assert [one.group_id for one in owners.buffer.ready()] == ids(1)


@in_virtual_time
async def test_a_restore_takes_over_entries_as_ready() -> None:
    """In their order."""
    owners = Owners()
    for position in range(2):
        owners.rows.there.update(keys_of(ref(position).group_id))
    async with owners.barrier.mutation("recovery_restore") as cut:
        owners.buffer.restore(cut, [entry(1), entry(0)])
    assert owners.buffer.ready() == (entry(1), entry(0))


@pytest.mark.parametrize(
    "positions, error",
    [((1, 0), DuplicateOwnerError), ((1, 1), DuplicateOwnerError), ((1, 2), MissingRowError)],
    ids=["owned", "twice", "rows missing"],
)
def test_a_restore_takes_over_all_or_nothing(positions: tuple[int, ...], error: type[Exception]) -> None:
    """A doubtful entry refuses the restore as a whole."""

    @in_virtual_time
    async def run() -> None:
        owners = Owners()
        async with owners.barrier.mutation("recovery_restore") as cut:
            ready(owners, cut, 0)
            before = owners.buffer.ready()
            owners.rows.there.update(keys_of(ref(1).group_id))
            with pytest.raises(error):
                owners.buffer.restore(cut, [entry(position) for position in positions])
        assert owners.buffer.ready() == before

    run()


# ------------------------------------------------------------------------------------------------ proofs


CHANGES: dict[str, Callable[[Owners, Cut, Claim], object]] = {
    "commit_group": lambda owners, cut, _: commit(owners, cut, 1),
    "claim_for_training": lambda owners, cut, _: owners.buffer.claim_for_training(cut, ids(2)),
    "unclaim": lambda owners, cut, claim: owners.buffer.unclaim(cut, claim),
    "finish": lambda owners, cut, claim: owners.buffer.finish(cut, claim),
    "evict": lambda owners, cut, _: owners.buffer.evict(cut, ids(2)),
    "restore": lambda owners, cut, _: owners.buffer.restore(cut, []),
}


def everything(buffer: ReplayBuffer) -> tuple[object, ...]:
    """Return all that a buffer owns."""
    return buffer.ready(), buffer.claims(), buffer.entries()


@pytest.mark.parametrize("change", CHANGES)
def test_every_change_needs_a_live_cut_of_its_barrier(change: str) -> None:
    """An expired and a foreign cut are refused, and nothing changes."""

    @in_virtual_time
    async def run() -> None:
        owners, strangers = Owners(), Owners()
        async with owners.barrier.mutation("retry") as expired:
            ready(owners, expired, 0, 2)
            admit(owners, expired, 1)
            claim = owners.buffer.claim_for_training(expired, [ID])
        before = everything(owners.buffer)
        with pytest.raises(CutExpiredError):
            CHANGES[change](owners, expired, claim)
        async with strangers.barrier.mutation("retry") as foreign:
            with pytest.raises(ForeignCutError):
                CHANGES[change](owners, foreign, claim)
        assert everything(owners.buffer) == before

    run()


@pytest.mark.parametrize("change", ["commit_group", "claim_for_training", "finish"])
def test_what_a_run_does_all_the_time_needs_the_shared_side(change: str) -> None:
    """No commit, claim or end of a step happens inside a checkpoint's window."""

    @in_virtual_time
    async def run() -> None:
        owners = Owners()
        async with owners.barrier.mutation("retry") as cut:
            ready(owners, cut, 0, 2)
            admit(owners, cut, 1)
            claim = owners.buffer.claim_for_training(cut, [ID])
        async with owners.barrier.checkpoint() as window:
            with pytest.raises(WrongSideError):
                CHANGES[change](owners, window, claim)

    run()


# -------------------------------------------------------------------------------------------- statistics


@in_virtual_time
async def test_statistics_count_ready_and_training() -> None:
    """With the largest stamp of both."""
    owners = Owners()
    async with owners.barrier.mutation("retry") as cut:
        assert owners.buffer.statistics().target_step_max is None
        ready(owners, cut, 0, 1)
        admit(owners, cut, 2, target_step=9)
        commit(owners, cut, 2)
        owners.buffer.claim_for_training(cut, ids(2))
    now = owners.buffer.statistics()
    assert (now.ready, now.training, now.target_step_max) == (2, 1, 9)
    assert len(owners.buffer) == 3


@in_virtual_time
async def test_statistics_may_be_read_from_another_thread() -> None:
    """While groups come and go."""
    owners, stop, caught = Owners(), threading.Event(), list[BaseException]()

    def scrape() -> None:
        try:
            while not stop.is_set():
                owners.buffer.statistics()
                owners.ledger.statistics()
                owners.spares.statistics()
                owners.accounting.statistics()
        except BaseException as error:  # noqa: BLE001 - handed to the test
            caught.append(error)

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        async with owners.barrier.mutation("retry") as cut:
            for position in range(2_000):
                owners.accounting.read(cut, [ref(position)])
                ready(owners, cut, position)
                claim = owners.buffer.claim_for_training(cut, ids(position))
                owners.buffer.begin(claim)
                owners.buffer.finish(cut, claim)
                owners.accounting.trained(cut, [ref(position)])
    finally:
        stop.set()
        thread.join()
    assert not caught


def test_a_buffer_has_no_truth_value() -> None:
    """An empty buffer is not a missing one."""
    with pytest.raises(TypeError, match="no truth value"):
        bool(Owners().buffer)
