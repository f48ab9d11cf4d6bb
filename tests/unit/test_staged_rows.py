"""Which staged rows count: a final row, or chunks without a gap, of exactly the ledger's attempt."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quiesce.staged_rows import by_group, staged_keys, usable
from quiesce.types import GroupRecord, PromptRef, RowKey

GROUP, OTHER = "e000-p0000001", "e000-p0000002"


def key(text: str, group_id: str = GROUP) -> RowKey:
    """Return the key that ``a0/g1/c2`` stands for."""
    attempt, generation, tail = text.split("/")
    sequence = None if tail == "final" else int(tail[1:])
    return RowKey(4, group_id, int(generation[1:]), int(attempt[1:]), sequence)


def keys(text: str, group_id: str = GROUP) -> tuple[RowKey, ...]:
    """Return several keys."""
    return tuple(key(one, group_id) for one in text.split())


def record(group_id: str = GROUP, attempt: int = 0) -> GroupRecord:
    """Return a ledger's record of a group in flight."""
    return GroupRecord(group_id, 0, PromptRef(0, 0, 0), "admitted", None, 0, attempt)


@pytest.mark.parametrize(
    "there, counts",
    [
        ("a0/g0/final", "a0/g0/final"),
        ("a0/g0/c0 a0/g0/final a0/g0/c1", "a0/g0/final"),
        ("a0/g0/c1 a0/g0/final", "a0/g0/final"),
        ("a0/g0/c2 a0/g0/c0 a0/g0/c1", "a0/g0/c0 a0/g0/c1 a0/g0/c2"),
        ("a0/g0/c0 a0/g0/c2 a0/g0/c3", "a0/g0/c0"),
        ("a0/g0/c1 a0/g0/c2", ""),
        ("a0/g0/c0 a0/g0/c0", "a0/g0/c0"),
        ("", ""),
    ],
    ids=["final", "beside", "beside a gap", "in any order", "a gap", "no first", "twice", "none"],
)
def test_a_final_row_counts_alone_and_chunks_up_to_the_first_gap(there: str, counts: str) -> None:
    """Whatever else of the generation is there."""
    expected = {(GROUP, 0): {0: keys(counts)}} if counts else {}

    assert usable(keys(there)) == expected


def test_each_generation_counts_by_itself() -> None:
    """One finished, one begun, one with a gap right away, one absent; they come in the order of their numbers."""
    found = usable(keys("a0/g3/c0 a0/g2/c1 a0/g0/final a0/g3/c1"))

    assert found == {(GROUP, 0): {0: keys("a0/g0/final"), 3: keys("a0/g3/c0 a0/g3/c1")}}
    assert list(found[GROUP, 0]) == [0, 3]


def test_attempts_and_groups_are_never_mixed() -> None:
    """Chunk 1 of another attempt, or of another group, does not fill a gap."""
    found = usable((*keys("a0/g0/c0 a1/g0/c1 a1/g1/c0"), *keys("a0/g0/c1 a0/g1/final", OTHER)))

    assert found == {
        (GROUP, 0): {0: keys("a0/g0/c0")},
        (GROUP, 1): {1: keys("a1/g1/c0")},
        (OTHER, 0): {1: keys("a0/g1/final", OTHER)},
    }


@pytest.mark.parametrize("attempt, counts", [(0, "a0/g0/c0"), (1, "a1/g0/final"), (2, ""), (10, "")])
def test_the_ledgers_exact_attempt_decides(attempt: int, counts: str) -> None:
    """A final row of an attempt that was given up is nobody's, and so is one of an attempt that never was."""
    there = keys("a0/g0/c0 a1/g0/final a1/g0/c0")

    assert staged_keys(there, [record(attempt=attempt)]) == keys(counts)


def test_only_groups_of_the_ledger_have_staged_rows() -> None:
    """Those of the buffer are named by its index, and those that ended wait for their clear."""
    there = (*keys("a0/g0/final"), *keys("a0/g0/final a0/g1/c0", OTHER))

    assert staged_keys(there, [record(OTHER)]) == keys("a0/g0/final a0/g1/c0", OTHER)
    assert staged_keys(there, []) == ()
    assert staged_keys([], [record(), record(OTHER)]) == ()


def test_keys_come_in_the_order_of_their_encoded_form() -> None:
    """As the data plane lists them, and within a generation in the order of the chunks."""
    there = keys("a0/g1/c1 a0/g1/c0 a0/g0/final"), keys("a0/g0/c0", OTHER)

    found = staged_keys((*there[1], *there[0]), [record(OTHER), record()])

    assert found == (*keys("a0/g0/final a0/g1/c0 a0/g1/c1"), *there[1])
    assert by_group(found) == {GROUP: keys("a0/g0/final a0/g1/c0 a0/g1/c1"), OTHER: there[1]}
    assert by_group(()) == {}


ROWS = st.builds(
    RowKey,
    st.just(4),
    st.sampled_from([GROUP, OTHER]),
    st.integers(0, 2),
    st.integers(0, 2),
    st.none() | st.integers(0, 5),
)
RECORDS = st.builds(record, st.sampled_from([GROUP, OTHER]), st.integers(0, 2))


def counts(row: RowKey, there: set[RowKey], ledger: list[GroupRecord]) -> bool:
    """Say by the definition alone whether a row that is there counts."""
    if not any(one.group_id == row.group_id and one.attempt == row.attempt for one in ledger):
        return False
    siblings = {
        one.sequence
        for one in there
        if (one.group_id, one.attempt, one.generation) == (row.group_id, row.attempt, row.generation)
    }
    if row.sequence is None:
        return True
    return None not in siblings and siblings >= set(range(row.sequence))


@given(
    there=st.lists(ROWS, max_size=40),
    ledger=st.lists(RECORDS, max_size=2, unique_by=lambda one: one.group_id),
)
def test_what_counts_is_what_the_definition_says(there: list[RowKey], ledger: list[GroupRecord]) -> None:
    """Row by row, for any rows and any ledger; and what counts, counts again."""
    found = staged_keys(there, ledger)

    assert set(found) == {row for row in there if counts(row, set(there), ledger)}
    assert list(found) == sorted(found, key=RowKey.encode)
    assert staged_keys(found, ledger) == found
    assert staged_keys(reversed(there), ledger) == found
