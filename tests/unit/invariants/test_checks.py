"""Each invariant of a cut: broken states that it catches, and whole ones on which it stays silent."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from quiesce.accounting import AccountingState, ClosedEpochs, EpochAccount
from quiesce.checkpoint.cut import CutState, PartStamp
from quiesce.checkpoint.documents import ledger_digest
from quiesce.invariants import INVARIANTS, CutFacts, LedgerSeal, RowFacts, Violation, check_cut, critical
from quiesce.observers import Hub
from quiesce.types import RowKey
from tests.unit.checkpoint.cuts import (
    INCARNATION,
    admitted,
    bitmap,
    clean_cut,
    entry,
    parent_cut,
    ref,
    reserved,
    rows_of,
)


def all_facts(state: CutState) -> CutFacts:
    """Return every fact, so that no check is left out."""
    records = state.ledger_minus_buffer()
    return CutFacts(
        rows=RowFacts(rows_of(state), settling=()),
        seals=(LedgerSeal("manifest.json", ledger_digest(records), len(records)),),
        parent=parent_cut(),
        gate_window=1,
    )


def found(name: str, state: CutState, facts: CutFacts | None = None) -> list[Violation]:
    """Run one check, and require that it reports under its own name with the cut's id."""
    violations = INVARIANTS[name].check(state, CutFacts() if facts is None else facts)
    assert all(item.invariant == name and item.cut_id == state.cut_id for item in violations)
    return violations


def account(state: CutState, **changes: Any) -> CutState:  # noqa: ANN401 - of the record
    """Return the cut with a changed account of its open epoch."""
    (epoch,) = state.accounting.open
    return replace(state, accounting=replace(state.accounting, open=(replace(epoch, **changes),)))


def closed(state: CutState, **changes: Any) -> CutState:  # noqa: ANN401 - of the record
    """Return the cut with changed totals."""
    return replace(
        state, accounting=replace(state.accounting, closed=replace(state.accounting.closed, **changes))
    )


def test_a_whole_cut_breaks_nothing() -> None:
    """With groups in every state and every fact known, all checks run and all stay silent."""
    state = clean_cut()
    hub, seen = Hub(strict=True), list[str]()

    class Observer:
        def invariant_checked(self, name: str) -> None:
            seen.append(name)

    hub.subscribe(Observer())

    assert check_cut(state, all_facts(state), hub=hub) == []
    assert seen == list(INVARIANTS)


def test_an_empty_run_breaks_nothing() -> None:
    """The first checkpoint is published before the first prompt is read."""
    state = clean_cut()
    empty = replace(
        state,
        sampler=replace(state.sampler, cursor=-1, admissions=0, next_admission_id=0),
        position=replace(state.position, epoch=0, position=0),
        accounting=AccountingState(ClosedEpochs(0, 0, 0, {}), ()),
        spares=(),
        ready=(),
        claimed=(),
        ledger=(),
        trainer_version=0,
    )

    assert check_cut(empty, CutFacts(rows=RowFacts(()), gate_window=1)) == []


@pytest.mark.parametrize(
    "change, owners",
    [
        (
            lambda s: replace(s, ledger=(*s.ledger, admitted(4, target_step=7, admission_id=7))),
            ("ledger", "buffer"),
        ),
        (lambda s: replace(s, ledger=(*s.ledger, reserved(9))), ("ledger", "spares")),
        (lambda s: replace(s, claimed=(*s.claimed, entry(5))), ("buffer", "training")),
        (lambda s: replace(s, spares=(*s.spares, ref(6))), ("spares", "training")),
        (lambda s: replace(s, ledger=(*s.ledger, s.ledger[0])), ("ledger", "ledger")),
    ],
    ids=["ledger-buffer", "ledger-spares", "buffer-training", "spares-training", "twice"],
)
def test_single_owner_catches_a_group_with_two_owners(
    change: Callable[[CutState], CutState], owners: tuple[str, ...]
) -> None:
    """The group and both owners are named."""
    (violation,) = found("single_owner", change(clean_cut()))

    assert violation.owners == owners
    assert len(violation.groups) == 1
    assert violation.severity == "critical"


@pytest.mark.parametrize(
    "change, groups, says",
    [
        (lambda s: replace(s, ready=s.ready[1:]), [4], "lost"),
        (lambda s: replace(s, spares=()), [9], "lost"),
        (lambda s: replace(s, ledger=s.ledger[:-1]), [10], "lost"),
        (lambda s: replace(s, spares=(*s.spares, ref(2))), [2], "ended already"),
        (lambda s: replace(s, spares=(*s.spares, ref(3))), [3], "ended already"),
        (lambda s: replace(s, spares=(*s.spares, ref(11))), [11], "never read"),
        (lambda s: account(s, dropped=bitmap(11, 2, 3), reasons={"evicted": 2}), [2], "ended twice"),
        (lambda s: account(s, trained=bitmap(11, 0, 1, 2, 7)), [7], "ended already"),
        (lambda s: replace(s, spares=(*s.spares, ref(5, epoch=0))), [], "the epoch is over"),
        (lambda s: replace(s, spares=(*s.spares, ref(0, epoch=2))), [], "never read"),
    ],
)
def test_conservation_catches_a_position_that_is_not_counted_once(
    change: Callable[[CutState], CutState], groups: list[int], says: str
) -> None:
    """Lost, ended and still owned, ended twice, or owned without having been read: group and position are named."""
    violations = found("conservation", change(clean_cut()))

    assert says in violations[0].message
    assert not groups or violations[0].groups == tuple(ref(position).group_id for position in groups)
    assert not groups or violations[0].evidence["positions"] == groups


def test_conservation_catches_two_groups_that_stand_for_one_position() -> None:
    """Two ids, one prompt: single_owner cannot see it."""
    state = clean_cut()
    double = replace(state.ledger[0], group_id="another")

    (violation,) = found("conservation", replace(state, ledger=(*state.ledger, double)))

    assert "owned twice" in violation.message
    assert violation.evidence["positions"] == [7]


@pytest.mark.parametrize(
    "change, says",
    [
        (lambda s: closed(s, read=21), "read 21 prompts and ended 20"),
        (lambda s: closed(s, trained=17), "read 20 prompts and ended 19"),
        (lambda s: account(s, reasons={"evicted": 2}), "the reasons count 2"),
        (lambda s: account(s, reasons={}), "the reasons count 0"),
        (lambda s: replace(s, position=replace(s.position, position=12)), "position 12"),
        (lambda s: replace(s, position=replace(s.position, epoch=2, position=1)), "epoch 2 position 1"),
        (lambda s: replace(s, position=replace(s.position, epoch=0, position=11)), "epoch 0 position 11"),
    ],
)
def test_conservation_catches_totals_and_positions_that_disagree(
    change: Callable[[CutState], CutState], says: str
) -> None:
    """The account adds up, and the dataset's position is where the account says."""
    (violation,) = found("conservation", change(clean_cut()))

    assert says in violation.message


def test_conservation_takes_an_epoch_that_was_read_to_its_end() -> None:
    """The position is then at the start of the next epoch, whose account is not open yet."""
    state = account(clean_cut(), ended=True)
    state = replace(state, position=replace(state.position, epoch=2, position=0))

    assert found("conservation", state) == []


@pytest.mark.parametrize(
    "change, says",
    [
        (
            lambda p: replace(
                p, accounting=replace(p.accounting, closed=ClosedEpochs(1, 20, 19, {"failed": 1}))
            ),
            "the totals of the epochs that are over have changed",
        ),
        (lambda p: account(p, trained=bitmap(7, 0, 5)), "no longer trained"),
        (
            lambda p: account(p, trained=bitmap(7, 0), dropped=bitmap(7, 6), reasons={"failed": 1}),
            "no longer dropped",
        ),
        (lambda p: account(p, read=12, trained=bitmap(12, 0), dropped=bitmap(12)), "11 positions read"),
        (lambda p: account(p, ended=True), "and its end"),
        (lambda p: closed(p, read=30, trained=28), "trained from 30 to 21"),
        (lambda p: closed(p, epochs=2), "epochs that are over from 2 to 1"),
    ],
)
def test_conservation_catches_a_child_that_forgets_what_its_parent_recorded(
    change: Callable[[CutState], CutState], says: str
) -> None:
    """Read, trained and dropped only grow along a lineage."""
    state = clean_cut()

    violations = found("conservation", state, CutFacts(parent=change(parent_cut())))

    assert any(says in violation.message for violation in violations)


@pytest.mark.parametrize(
    "change, group",
    [
        (lambda s: replace(s, ready=(replace(s.ready[0], target_step=9), *s.ready[1:])), 4),
        (lambda s: replace(s, claimed=(replace(s.claimed[0], target_step=9),)), 6),
        (lambda s: replace(s, ledger=(replace(s.ledger[0], target_step=9), *s.ledger[1:])), 7),
    ],
    ids=["buffer", "training", "ledger"],
)
def test_cursor_covers_buffer_catches_a_stamp_ahead_of_the_cursor(
    change: Callable[[CutState], CutState], group: int
) -> None:
    """The seed's skew: the cursor was read before the group was stamped. Both values are the evidence."""
    (violation,) = found("cursor_covers_buffer", change(clean_cut()))

    assert violation.groups == (ref(group).group_id,)
    assert violation.evidence == {"cursor": 8, "target_steps": {ref(group).group_id: 9}}


def test_cursor_covers_buffer_is_silent_without_stamps() -> None:
    """Samplers that stamp nothing cannot be ahead of their cursor."""
    state = clean_cut()
    state = replace(state, ready=(entry(4, target_step=None),), claimed=(), ledger=())

    assert found("cursor_covers_buffer", state) == []


@pytest.mark.parametrize(
    "change, says",
    [
        (lambda s: replace(s, sampler=replace(s.sampler, admissions=8)), "8 committed admissions"),
        (lambda s: replace(s, sampler=replace(s.sampler, cursor=7)), "cursor is 7 after 9"),
        (lambda s: replace(s, sampler=replace(s.sampler, next_admission_id=9)), "next admission id is 9"),
        (
            lambda s: replace(s, ready=(replace(s.ready[0], admission_id=6), *s.ready[1:])),
            "stamped for 2 admissions",
        ),
        (
            lambda s: replace(s, ledger=(replace(s.ledger[0], target_step=7), *s.ledger[1:])),
            "step 7 is stamped",
        ),
        (lambda s: replace(s, trainer_version=6), "the gate shuts at 7"),
    ],
)
def test_cursor_within_lookahead_catches_what_admission_cannot_have_done(
    change: Callable[[CutState], CutState], says: str
) -> None:
    """An uncounted admission, an id that would be minted twice, a step stamped twice, an admission behind a shut gate."""
    (violation,) = found("cursor_within_lookahead", change(clean_cut()), CutFacts(gate_window=1))

    assert says in violation.message


def test_cursor_within_lookahead_takes_a_substitute_and_a_narrowed_window() -> None:
    """A substitute shares step and admission; a lookahead that was lowered at a restore leaves the cursor ahead."""
    state = clean_cut()
    state = replace(state, ledger=(*state.ledger, admitted(9)), spares=())
    restored = replace(parent_cut(), sampler=replace(state.sampler))

    assert found("cursor_within_lookahead", state, CutFacts(gate_window=0, parent=restored)) == []
    assert found("cursor_within_lookahead", state, CutFacts()) == []


@pytest.mark.parametrize("part", ["cursor", "position", "spares", "buffer", "ledger", "rows"])
@pytest.mark.parametrize("stamp", [PartStamp("cut-a", 41), PartStamp("cut-b", 40), None])
def test_cut_is_one_instant_catches_a_part_of_another_moment(part: str, stamp: PartStamp | None) -> None:
    """Another cut id, another mutation version or no stamp at all, for each of the six."""
    state = clean_cut()
    stamps = {name: known for name, known in state.stamps.items() if name != part}
    stamps |= {} if stamp is None else {part: stamp}

    (violation,) = found("cut_is_one_instant", replace(state, stamps=stamps))

    assert list(violation.evidence["parts"]) == [part]


@pytest.mark.parametrize("position", [4, 6])
def test_rows_present_catches_a_missing_row(position: int) -> None:
    """Of a ready group and of an unstarted claim; the key is named."""
    state = clean_cut()
    gone = entry(position).keys[1]

    (violation,) = found("rows_present", state, CutFacts(rows=RowFacts(rows_of(state) - {gone})))

    assert violation.groups == (ref(position).group_id,)
    assert violation.evidence == {"missing": [gone.encode()]}


def test_rows_are_found_in_whatever_order_a_store_lists_them() -> None:
    """In the order of ids, of the index, backwards, shuffled; a missing one and a foreign one are found in each."""
    state = clean_cut()
    rows = sorted(rows_of(state), key=RowKey.encode)
    foreign = replace(rows[0], group_id="e000-p9999999")
    shuffled = list(rows)
    random.Random(1).shuffle(shuffled)
    named = [key for item in state.entries for key in item.keys]

    for order in (rows, list(rows_of(state)), rows[::-1], shuffled):
        sound, missing = CutFacts(rows=RowFacts(dict.fromkeys(order), settling=())), dict.fromkeys(order)
        del missing[named[1]]
        missing[foreign] = None
        broken = CutFacts(rows=RowFacts(missing, settling=()))
        assert found("rows_present", state, sound) == found("rows_not_orphaned", state, sound) == []
        assert found("rows_present", state, broken)[0].evidence == {"missing": [named[1].encode()]}
        assert found("rows_not_orphaned", state, broken)[0].evidence == {"orphans": [foreign.encode()]}


def test_what_was_read_out_of_one_cut_is_not_used_for_another() -> None:
    """The same facts may be asked about two cuts."""
    state, facts = clean_cut(), CutFacts()
    twice = replace(state, spares=(*state.spares, state.ready[0].prompt))

    assert found("single_owner", state, facts) == []
    assert found("single_owner", twice, facts) != []
    assert found("single_owner", state, facts) == []


@pytest.mark.parametrize(
    "key",
    [
        RowKey(INCARNATION, ref(0).group_id, 0, 0),
        RowKey(INCARNATION, ref(4).group_id, 2, 0),
        RowKey(INCARNATION, ref(4).group_id, 0, 1),
        RowKey(INCARNATION, ref(8).group_id, 0, 1),
        RowKey(INCARNATION - 1, ref(4).group_id, 0, 0),
        RowKey(INCARNATION, ref(8).group_id, 0, 3, 0),
        RowKey(INCARNATION, ref(4).group_id, 0, 0, 0),
        RowKey(INCARNATION, ref(9).group_id, 0, 0, 0),
        RowKey(INCARNATION - 1, ref(8).group_id, 0, 2, 0),
        RowKey(INCARNATION, ref(8).group_id, 0, 2, 1),
    ],
    ids=[
        "trained",
        "another generation",
        "another attempt",
        "an old attempt in flight",
        "another incarnation",
        "a later attempt in flight",
        "a chunk of a ready group",
        "a chunk of a spare",
        "a chunk of another incarnation",
        "a chunk after a gap",
    ],
)
def test_rows_present_catches_a_row_on_disk_that_nobody_counts(key: RowKey) -> None:
    """A checkpoint holds exactly the rows of its index and usable staged ones of its ledger; a live store may hold more."""
    state = clean_cut()
    present = rows_of(state) | {key}

    (violation,) = found("rows_present", state, CutFacts(rows=RowFacts(present, on_disk=True)))

    assert violation.evidence == {"extra": [key.encode()]}
    assert found("rows_present", state, CutFacts(rows=RowFacts(present))) == []


def test_rows_present_takes_staged_rows_of_ledger_groups_on_disk() -> None:
    """Final or chunks, of exactly the attempt that the ledger waits for."""
    state = clean_cut()
    staged = {
        RowKey(INCARNATION, ref(8).group_id, 0, 2, 0),
        RowKey(INCARNATION, ref(8).group_id, 0, 2, 1),
        RowKey(INCARNATION, ref(7).group_id, 1, 0),
    }

    assert found("rows_present", state, CutFacts(rows=RowFacts(rows_of(state) | staged, on_disk=True))) == []


def test_rows_present_catches_chunks_beside_a_final_row_on_disk() -> None:
    """A save writes the final row alone; live, the chunks are the call's until it hands them over."""
    state = clean_cut()
    final, chunk = RowKey(INCARNATION, ref(7).group_id, 1, 0), RowKey(INCARNATION, ref(7).group_id, 1, 0, 0)
    present = rows_of(state) | {final, chunk}

    (violation,) = found("rows_present", state, CutFacts(rows=RowFacts(present, on_disk=True)))

    assert violation.evidence == {"extra": [chunk.encode()]}
    assert found("rows_not_orphaned", state, CutFacts(rows=RowFacts(present, settling=()))) == []


@pytest.mark.parametrize(
    "key", [RowKey(INCARNATION, ref(0).group_id, 0, 0), RowKey(INCARNATION, ref(8).group_id, 1, 0)]
)
def test_rows_not_orphaned_catches_a_row_without_an_owner(key: RowKey) -> None:
    """A trained group's row, or an old attempt's: a warning, unless it waits for a clear."""
    state = clean_cut()
    present = rows_of(state) | {key}

    (violation,) = found("rows_not_orphaned", state, CutFacts(rows=RowFacts(present, settling=())))

    assert (violation.severity, violation.groups) == ("warning", (key.group_id,))
    assert found("rows_not_orphaned", state, CutFacts(rows=RowFacts(present, settling={key}))) == []
    assert found("rows_not_orphaned", state, CutFacts(rows=RowFacts(present, settling=None))) == []


def test_rows_not_orphaned_takes_rows_that_are_staged() -> None:
    """What a rollout has put before its group's commit belongs to the ledger's group."""
    state = clean_cut()
    staged = RowKey(INCARNATION, ref(8).group_id, 0, 2)

    facts = CutFacts(rows=RowFacts(rows_of(state) | {staged}, settling=()))

    assert found("rows_not_orphaned", state, facts) == []


@pytest.mark.parametrize("digest, count", [("0" * 64, 3), (None, 2)])
def test_digest_matches_catches_rows_of_another_ledger(digest: str | None, count: int) -> None:
    """Digest and count are compared apart, and the place that disagrees is named."""
    state = clean_cut()
    right = ledger_digest(state.ledger)
    seals = (
        LedgerSeal("manifest.json", right, 3),
        LedgerSeal("rows-00000.safetensors", digest or right, count),
    )

    (violation,) = found("digest_matches", state, CutFacts(seals=seals))

    assert violation.evidence["where"] == "rows-00000.safetensors"


@pytest.mark.parametrize(
    "change, says",
    [
        ({"trainer_version": 8}, "trainer version from 8 to 7"),
        ({"mutation_version": 42}, "mutation version from 42 to 41"),
        ({"step": 8}, "step from 8 to 7"),
        ({"incarnation": 4}, "incarnation from 4 to 3"),
        ({"sampler": replace(clean_cut().sampler, cursor=9)}, "dispatch cursor from 9 to 8"),
    ],
)
def test_versions_grow_catches_a_child_that_went_back(change: dict[str, Any], says: str) -> None:
    """Each version by itself, with both values."""
    (violation,) = found("versions_grow", clean_cut(), CutFacts(parent=replace(parent_cut(), **change)))

    assert says in violation.message


def test_versions_grow_takes_a_second_cut_of_the_same_moment() -> None:
    """A further cut at one step changes no version."""
    state = clean_cut()

    assert found("versions_grow", state, CutFacts(parent=state)) == []


def test_every_violation_reaches_the_hub_and_only_critical_ones_refuse() -> None:
    """The hook gets each finding; a warning stays a warning."""
    state = clean_cut()
    broken = replace(state, ready=(), sampler=replace(state.sampler, admissions=0))
    orphan = RowKey(INCARNATION, ref(0).group_id, 0, 0)
    hub, seen = Hub(strict=True), list[Violation]()

    class Observer:
        def invariant_violated(self, violation: Violation) -> None:
            seen.append(violation)

    hub.subscribe(Observer())

    violations = check_cut(broken, CutFacts(rows=RowFacts(rows_of(state) | {orphan}, settling=())), hub=hub)

    assert seen == violations
    assert {item.invariant for item in violations} == {
        "conservation",
        "cursor_within_lookahead",
        "rows_not_orphaned",
    }
    assert {item.invariant for item in critical(violations)} == {"conservation", "cursor_within_lookahead"}


def test_a_large_epoch_is_judged_quickly() -> None:
    """Bitmaps are compared as integers: a million positions of which one is lost."""
    read, state = 1_000_000, clean_cut()
    trained = ((1 << read) - 1 - (1 << 777_777)).to_bytes(read // 8, "little")
    epoch = EpochAccount(1, read, False, trained, bytes(read // 8), {})
    state = replace(
        state,
        accounting=replace(state.accounting, open=(epoch,)),
        position=replace(state.position, position=read),
        spares=(),
        ready=(),
        claimed=(),
        ledger=(),
    )

    (violation,) = found("conservation", state)

    assert violation.evidence["positions"] == [777_777]
