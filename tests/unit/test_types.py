"""Claims about the frozen records and the keys of rows."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quiesce.errors import RowKeyError
from quiesce.types import (
    DROP_REASONS,
    ENDS,
    OUTCOMES,
    OWNERS,
    PHASES,
    BufferEntry,
    GroupRecord,
    PromptRef,
    RowKey,
    group_ids,
)

KEYS = st.builds(
    RowKey,
    incarnation=st.integers(0, 10**8 - 1),
    group_id=st.builds(
        lambda epoch, at: PromptRef(epoch, at, 0).group_id, st.integers(0, 10**6), st.integers(0, 10**9)
    ),
    generation=st.integers(0, 10**6 - 1),
    attempt=st.integers(0, 10**6 - 1),
    sequence=st.none() | st.integers(0, 10**9 - 1),
)


@given(KEYS)
def test_a_key_survives_its_text(key: RowKey) -> None:
    """Decoding what was encoded gives the same key, in short ASCII."""
    text = key.encode()
    assert RowKey.decode(text) == key
    assert text.isascii()
    assert len(text) < 200


@given(KEYS, KEYS)
def test_two_keys_never_share_a_text(one: RowKey, other: RowKey) -> None:
    """Different rows have different texts."""
    assert (one == other) == (one.encode() == other.encode())


@given(KEYS, KEYS)
def test_a_prefix_finds_the_keys_of_its_group_and_attempt_only(one: RowKey, other: RowKey) -> None:
    """No group's prefix is the start of another group's keys."""
    same_group = (one.incarnation, one.group_id) == (other.incarnation, other.group_id)
    assert one.encode().startswith(RowKey.prefix(one.incarnation, one.group_id, one.attempt))
    assert other.encode().startswith(RowKey.prefix(one.incarnation, one.group_id)) == same_group
    same_attempt = same_group and one.attempt == other.attempt
    assert (
        other.encode().startswith(RowKey.prefix(one.incarnation, one.group_id, one.attempt)) == same_attempt
    )


def test_the_prefix_of_a_group_is_not_that_of_a_longer_name() -> None:
    """`e000-p1` does not find `e000-p10`."""
    assert not RowKey(1, "e000-p10", 0, 0).encode().startswith(RowKey.prefix(1, "e000-p1"))
    assert not RowKey(1, "g", 0, 10).encode().startswith(RowKey.prefix(1, "g", 1))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "i1/e000-p0000000/a00/g000/final",
        "i00000001/e000-p0000000/a00/g000",
        "i00000001/e000-p0000000/a00/g000/final/",
        "i00000001/e000-p0000000/a00/g000/final\n",
        "i00000001/e000-p0000000/a00/g000/c1",
        "i00000001/a b/a00/g000/final",
        "i00000001//a00/g000/final",
        "i0000000\u0661/e000-p0000000/a00/g000/final",
        " i00000001/e000-p0000000/a00/g000/final",
    ],
)
def test_what_is_no_key_is_refused_by_name(text: str) -> None:
    """The error shows the text."""
    with pytest.raises(RowKeyError) as caught:
        RowKey.decode(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    "text", ["i00000001/g/a007/g000/final", "i00000001/g/a00/g0001/final", "i00000001/g/a00/g000/c0000001"]
)
def test_a_key_has_one_text_only(text: str) -> None:
    """A second spelling of the same key is refused, else one row could be put twice."""
    with pytest.raises(RowKeyError, match="canonical"):
        RowKey.decode(text)


def test_a_prompt_names_its_group_by_where_it_was_read() -> None:
    """The id is the same in every incarnation, and differs for every reading."""
    assert PromptRef(2, 17, 9).group_id == "e002-p0000017"
    assert len({PromptRef(epoch, at, 0).group_id for epoch in range(3) for at in range(50)}) == 150


def test_group_ids_sort_in_reading_order() -> None:
    """Within the widths that are padded for."""
    refs = [PromptRef(epoch, at, 0) for epoch in (0, 1, 10, 999) for at in (0, 9, 10, 9_999_999)]
    assert [ref.group_id for ref in refs] == sorted(ref.group_id for ref in refs)


@pytest.mark.parametrize(
    "record",
    [
        PromptRef(0, 0, 0),
        RowKey(1, "g", 0, 0),
        GroupRecord("g", 0, PromptRef(0, 0, 0)),
        BufferEntry("g", 0, PromptRef(0, 0, 0), 0, None, 0, 0, 0, ()),
    ],
    ids=lambda record: type(record).__name__,
)
def test_a_record_is_never_edited(record: PromptRef | RowKey | GroupRecord | BufferEntry) -> None:
    """So a reference to it is a snapshot of it; nor can it grow new attributes."""
    name = dataclasses.fields(record)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(record, name, None)
    assert not hasattr(record, "__dict__")


def test_a_new_group_is_reserved_and_unstamped() -> None:
    """Its admission fills in the rest."""
    record = GroupRecord("g", 0, PromptRef(0, 0, 0))
    assert (record.phase, record.target_step, record.start_version, record.attempt) == (
        "reserved",
        None,
        None,
        0,
    )


def test_vocabularies_are_closed_and_free_of_doubles() -> None:
    """They become labels."""
    for words in (OWNERS, ENDS, OUTCOMES, PHASES, DROP_REASONS):
        assert len(set(words)) == len(words)
    assert not set(OWNERS) & set(ENDS)


def test_group_ids_keep_the_order() -> None:
    """Of records and entries alike."""
    records = [GroupRecord(name, 0, PromptRef(0, 0, 0)) for name in "ba"]
    assert group_ids(records) == ("b", "a")
