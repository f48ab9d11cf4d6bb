"""The wire format of spans: what protobuf reads is what was said."""

import random
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from quiesce.telemetry.finished import AttributeValue, FinishedSpan
from quiesce.telemetry.sinks import SinkContext
from quiesce.telemetry.slot_spans import SlotColumns, SpanParts
from quiesce_exporters.otlp import OtlpSink
from quiesce_exporters.otlp_config import read_config
from quiesce_exporters.otlp_spans import encode_spans
from tests.otlp_receiver import http_receiver

TEXTS = st.text(st.characters(codec="utf-8"), max_size=200)
INT64 = st.integers(-(2**63), 2**63 - 1)
VALUES: st.SearchStrategy[AttributeValue] = st.one_of(
    TEXTS,
    st.booleans(),
    INT64,
    st.floats(allow_nan=False),
    st.sampled_from((0, 1, 0.0, 1.0, True, False, "1")),
)
ATTRIBUTES = st.dictionaries(st.one_of(st.sampled_from(("quiesce.kind", "a")), TEXTS), VALUES, max_size=4)
UNIX_NS = st.integers(0, 2**64 - 1)
TRACES, SPANS = st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1)
FINISHED = st.builds(
    FinishedSpan,
    name=st.one_of(st.just("quiesce.slot"), TEXTS),
    trace_id=TRACES,
    span_id=SPANS,
    parent_id=st.one_of(st.just(0), SPANS),
    start_ns=UNIX_NS,
    end_ns=UNIX_NS,
    attributes=ATTRIBUTES,
    links=st.lists(st.tuples(TRACES, SPANS), max_size=2).map(tuple),
    events=st.lists(st.tuples(TEXTS, UNIX_NS, ATTRIBUTES), max_size=2).map(tuple),
    status=st.sampled_from(("", "ok", "error")),
)
CODES = {
    "": Status.STATUS_CODE_UNSET,
    "ok": Status.STATUS_CODE_OK,
    "error": Status.STATUS_CODE_ERROR,
}


def read(batch: list[Any]) -> list[Any]:
    """Encode spans, and return them as protobuf reads them."""
    request = ExportTraceServiceRequest.FromString(
        encode_spans(batch, {"service.name": "r1"}, scope="quiesce", version="0.1.0")
    )
    (of_resource,) = request.resource_spans
    (of_scope,) = of_resource.scope_spans
    assert said(of_resource.resource.attributes) == {"service.name": ("string_value", "r1")}
    assert (of_scope.scope.name, of_scope.scope.version) == ("quiesce", "0.1.0")
    return list(of_scope.spans)


def said(attributes: Iterable[Any]) -> dict[str, tuple[str, object]]:
    """Return attributes with their types, as protobuf read them."""
    return {
        item.key: (kind := item.value.WhichOneof("value"), getattr(item.value, kind)) for item in attributes
    }


def expected(attributes: Mapping[str, AttributeValue]) -> dict[str, tuple[str, object]]:
    """Return attributes with the types that they are to have."""
    types = {str: "string_value", bool: "bool_value", int: "int_value", float: "double_value"}
    return {key: (types[type(value)], value) for key, value in attributes.items()}


@given(st.lists(FINISHED, max_size=5))
def test_protobuf_reads_what_was_said(batch: list[FinishedSpan]) -> None:
    """Every field, for spans of whatever values; also the second time, when what they say is known already."""
    for _ in range(2):
        for span, message in zip(batch, read(batch), strict=True):
            assert message.trace_id == span.trace_id.to_bytes(16, "big")
            assert message.span_id == span.span_id.to_bytes(8, "big")
            assert message.parent_span_id == (span.parent_id.to_bytes(8, "big") if span.parent_id else b"")
            assert (message.name, message.kind) == (span.name, Span.SPAN_KIND_INTERNAL)
            assert (message.start_time_unix_nano, message.end_time_unix_nano) == (span.start_ns, span.end_ns)
            assert said(message.attributes) == expected(span.attributes)
            assert [
                (int.from_bytes(link.trace_id, "big"), int.from_bytes(link.span_id, "big"))
                for link in message.links
            ] == list(span.links)
            assert [
                (event.name, event.time_unix_nano, said(event.attributes)) for event in message.events
            ] == [(name, unix_ns, expected(attributes)) for name, unix_ns, attributes in span.events]
            assert message.status.code == CODES[span.status]


@given(st.lists(st.tuples(st.sampled_from(("a", "b", "é")), UNIX_NS, UNIX_NS), max_size=20))
def test_columns_say_what_their_spans_would(slots: list[tuple[str, int, int]]) -> None:
    """Byte for byte; alone, and beside other spans."""
    columns = SlotColumns(random.Random(5).getrandbits)
    for kind, start, end in slots:
        columns.which.append(columns.number(kind) or 0)
        columns.times.extend((start >> 1, end >> 1))
    batch: Sequence[FinishedSpan] = columns.take() or []
    other = FinishedSpan("s", 1, 2, 3, 4, 5, {"a": 1})

    def encoded(spans: Iterable[Any]) -> bytes:
        return encode_spans(spans, {}, scope="s", version="1")

    assert encoded(batch) == encoded(list(batch))
    assert encoded(SpanParts.of([batch, [other]])) == encoded([*batch, other])


def test_numbers_that_equal_each_other_keep_their_types() -> None:
    """1, 1.0 and True are one key of a dictionary, and three attributes."""
    values: tuple[AttributeValue, ...] = (1, 1.0, True, "1")
    batch = [FinishedSpan("s", 1, 2, 0, 0, 1, {"n": value}) for value in values]

    kinds = [said(message.attributes)["n"][0] for message in read([*batch, *batch])]
    assert kinds == ["int_value", "double_value", "bool_value", "string_value"] * 2


def test_a_plain_tuple_is_as_good_as_a_span() -> None:
    """The export process is sent plain tuples."""
    span = FinishedSpan("s", 1, 2, 3, 4, 5, {"a": "b"}, ((6, 7),), (("e", 8, {}),), "error")

    assert read([tuple(span)]) == read([span])


@pytest.mark.parametrize("value, told", [(2**63, str(2**63)), (-(2**70), str(-(2**70))), ("a\ud800b", "a?b")])
def test_what_cannot_be_said_is_told_as_text(value: AttributeValue, told: str) -> None:
    """An integer beyond 64 bits, or half of a surrogate pair, does not lose the batch."""
    (message,) = read([FinishedSpan("s", 1, 2, 0, 0, 1, {"v": value})])

    assert said(message.attributes) == {"v": ("string_value", told)}


def test_values_that_are_no_plain_ones_reach_the_export_process() -> None:
    """A mapping that is no dictionary, and texts and numbers of classes of their own, are sent as what they are."""

    class Kind(StrEnum):
        RETRY = "retry"

    class Count(int):
        pass

    attributes = MappingProxyType[str, AttributeValue]({"kind": Kind.RETRY, "n": Count(3), "on": True})
    span = FinishedSpan("s", 1, 2, 3, 4, 5, attributes, (), (("e", 8, attributes),), "ok")
    with http_receiver() as (url, received):
        config = read_config({"OTEL_EXPORTER_OTLP_ENDPOINT": url})
        sink = OtlpSink(SinkContext("r1", "controller", None, {}, {}), config)
        process = sink.process_id
        sink.spans([span])
        sink.spans([span])
        assert sink.process_id == process is not None
        sink.close(5.0)

    told = {"kind": ("string_value", "retry"), "n": ("int_value", 3), "on": ("bool_value", True)}
    assert [said(message.attributes) for message in received.spans()] == [told, told]
    assert [said(message.events[0].attributes) for message in received.spans()] == [told, told]
