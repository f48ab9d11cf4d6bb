"""Whatever a cut holds comes back exactly; whatever else is read ends in one kind of error."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from quiesce.accounting import AccountingState, ClosedEpochs, EpochAccount
from quiesce.checkpoint import codec
from quiesce.checkpoint.cut import PARTS, CommittedPosition, CutState, PartStamp, SamplerState
from quiesce.checkpoint.documents import (
    DOCUMENTS,
    from_documents,
    parse_manifest,
    seal_manifest,
    to_documents,
)
from quiesce.errors import DocumentError
from quiesce.types import DROP_REASONS, BufferEntry, GroupRecord, PromptRef, RowKey
from tests.unit.checkpoint.cuts import clean_cut, manifest_for

counters = st.integers(0, 2**53 - 1)
small = st.integers(0, 50)
leaves = (
    st.none()
    | st.booleans()
    | st.integers(-(2**80), 2**80)
    | st.floats()
    | st.text()
    | st.binary(max_size=20)
    | st.binary(max_size=8).map(bytearray)
)
keys = (
    st.none() | st.booleans() | st.integers() | st.text() | st.binary(max_size=5) | st.tuples(st.integers())
)
states = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(), inner, max_size=4)
        | st.dictionaries(keys, inner, max_size=4)
    ),
    max_leaves=20,
)


def same(one: Any, other: Any) -> bool:  # noqa: ANN401 - any value
    """Equal with types, and NaN equal to itself."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return (math.isnan(one) and math.isnan(other)) or (
            one == other and math.copysign(1, one) == math.copysign(1, other)
        )
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return list(map(repr, one)) == list(map(repr, other)) and all(
            same(mine, yours) for mine, yours in zip(one.values(), other.values(), strict=True)
        )
    return bool(one == other)


@given(states)
def test_any_state_comes_back_from_its_bytes(state: object) -> None:
    """Types, order of keys, signs of zero and NaN included."""
    assert same(codec.loads(codec.dumps(state), file="state.json"), state)


@given(st.binary(max_size=40), st.sampled_from(["<f4", "<i8", "|u1", "<c8"]))
def test_any_array_comes_back_bit_for_bit(data: bytes, dtype: str) -> None:
    """Also those whose floats are NaN with a payload."""
    size = np.dtype(dtype).itemsize
    array = np.frombuffer(data[: len(data) // size * size], dtype=dtype)

    found = codec.loads(codec.dumps(array), file="state.json")

    assert found.dtype == array.dtype
    assert found.tobytes() == array.tobytes()


@given(st.binary(max_size=200))
def test_any_bytes_decode_or_are_refused(data: bytes) -> None:
    """No other exception than the one that names the file."""
    try:
        codec.loads(data, file="state.json")
    except DocumentError as error:
        assert error.file == "state.json"  # noqa: PT017 - both outcomes are right


@st.composite
def cuts(draw: st.DrawFn) -> CutState:
    """Draw a cut that can be written; it need not make sense."""
    incarnation = draw(st.integers(0, 99_999_999))
    refs = draw(
        st.lists(
            st.builds(PromptRef, small, counters, counters), max_size=8, unique_by=lambda ref: ref.group_id
        )
    )
    attempt = st.integers(0, 999_999)

    def record(ref: PromptRef) -> GroupRecord:
        if draw(st.booleans()):
            return GroupRecord(ref.group_id, draw(counters), ref, attempt=draw(attempt))
        stamp = draw(st.none() | counters)
        return GroupRecord(
            ref.group_id, draw(counters), ref, "admitted", stamp, draw(counters), draw(attempt)
        )

    def entry(ref: PromptRef) -> BufferEntry:
        tries = draw(attempt)
        generations = sorted(draw(st.sets(small, max_size=3)))
        return BufferEntry(
            ref.group_id,
            draw(counters),
            ref,
            tries,
            draw(st.none() | counters),
            draw(counters),
            draw(counters),
            draw(counters),
            tuple(RowKey(incarnation, ref.group_id, generation, tries) for generation in generations),
            draw(
                st.dictionaries(
                    st.text(min_size=1, max_size=5),
                    st.floats(allow_nan=False) | st.integers(-9, 9),
                    max_size=2,
                )
            ),
        )

    owners = [draw(st.sampled_from(["spares", "ready", "claimed", "ledger"])) for _ in refs]
    chosen = {
        owner: [ref for ref, where in zip(refs, owners, strict=True) if where == owner]
        for owner in set(owners)
    }
    reasons = st.dictionaries(st.sampled_from(DROP_REASONS), counters)
    closed = ClosedEpochs(draw(small), draw(counters), draw(counters), draw(reasons))
    epochs = []
    for number in range(draw(st.integers(0, 2))):
        read = draw(st.integers(0, 20))
        trained, dropped = (
            draw(st.integers(0, (1 << read) - 1)).to_bytes((read + 7) // 8, "little") for _ in range(2)
        )
        epochs.append(
            EpochAccount(closed.epochs + number, read, draw(st.booleans()), trained, dropped, draw(reasons))
        )
    version = draw(counters)
    return CutState(
        cut_id="cut-1",
        mutation_version=version,
        incarnation=incarnation,
        parent_cut=draw(st.none() | st.just("cut-0")),
        step=draw(counters),
        trainer_version=draw(counters),
        sampler=SamplerState(
            "windowed", draw(st.integers(-1, 9)), draw(st.booleans()), draw(counters), draw(counters)
        ),
        position=CommittedPosition(
            draw(counters), draw(counters), draw(st.booleans()), draw(st.just(None) | st.binary())
        ),
        accounting=AccountingState(closed, tuple(epochs)),
        spares=tuple(chosen.get("spares", [])),
        ready=tuple(map(entry, chosen.get("ready", []))),
        claimed=tuple(map(entry, chosen.get("claimed", []))),
        ledger=tuple(map(record, chosen.get("ledger", []))),
        stamps={part: PartStamp("cut-1", version) for part in PARTS},
    )


@settings(max_examples=40)
@given(cuts())
def test_any_cut_comes_back_from_its_documents(state: CutState) -> None:
    """Every field of every part, and the manifest."""
    documents = to_documents(state)
    manifest = manifest_for(state, documents)

    assert from_documents(documents.__getitem__, manifest) == state
    assert parse_manifest(manifest.to_bytes()).groups == manifest.groups


def mutate(body: Any, draw: Callable[[st.SearchStrategy[Any]], Any]) -> Any:  # noqa: ANN401 - any value
    """Change one place of a JSON value: replace it, drop it, double it, or add to it."""
    odd: st.SearchStrategy[Any] = st.sampled_from(
        [None, True, -1, 1.5, 2**60, "", "x", [], {}, {"$": "tuple", "items": []}, [[]]]
    )
    if isinstance(body, dict) and body and draw(st.integers(0, 9)) < 8:
        key = draw(st.sampled_from(sorted(body)))
        how = draw(st.sampled_from(["inside", "inside", "inside", "drop", "add"]))
        if how == "inside":
            return {**body, key: mutate(body[key], draw)}
        if how == "drop":
            return {name: value for name, value in body.items() if name != key}
        return {**body, draw(st.sampled_from(["x", "$", ""])): draw(odd)}
    if isinstance(body, list) and body and draw(st.integers(0, 9)) < 8:
        at = draw(st.integers(0, len(body) - 1))
        how = draw(st.sampled_from(["inside", "inside", "double"]))
        return [*body[:at], mutate(body[at], draw), *body[at + 1 :]] if how == "inside" else [*body, body[at]]
    return draw(odd)


@settings(max_examples=150)
@given(st.data())
def test_any_change_to_a_document_is_read_as_data_or_refused(data: st.DataObject) -> None:
    """Whatever is done to the JSON, reading ends in a cut that can be written again, or in the one error."""
    state = clean_cut()
    documents = to_documents(state)
    name = data.draw(st.sampled_from(DOCUMENTS))
    documents[name] = json.dumps(mutate(json.loads(documents[name]), data.draw)).encode()

    try:
        found = from_documents(documents.__getitem__, manifest_for(state))
    except DocumentError as error:
        assert error.file in DOCUMENTS  # noqa: PT017 - both outcomes are right
    else:
        assert from_documents(to_documents(found).__getitem__, manifest_for(state)) == found


@settings(max_examples=100)
@given(st.data())
def test_any_change_to_a_manifest_is_read_as_data_or_refused(data: st.DataObject) -> None:
    """No other exception than the one that names the manifest."""
    body = json.loads(manifest_for(clean_cut()).to_bytes())
    del body["sha256"]
    changed = mutate(body, data.draw)
    content = seal_manifest(changed) if isinstance(changed, dict) else json.dumps(changed).encode()

    try:
        found = parse_manifest(content)
    except DocumentError as error:
        assert error.file == "manifest.json"  # noqa: PT017 - both outcomes are right
    else:
        assert parse_manifest(found.to_bytes()) == found
