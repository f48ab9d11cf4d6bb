"""Finished spans as an OTLP request, written straight in protobuf's wire format.

Rule: what is written, read by protobuf, equals what OpenTelemetry's own encoder makes of the same spans (but for
``flags``, which only says that it is known whether a parent is remote); tests compare the two. Building protobuf's
objects first costs several times as much, and SDK objects before those several times more. What cannot be said in OTLP is
said as text (an integer beyond 64 bits), and never loses the batch. Nothing here suspends.

Field numbers and types are those of ``opentelemetry/proto/trace/v1/trace.proto`` and ``common/v1/common.proto``
(opentelemetry-proto 1.x, in which they cannot change); wire types are protobuf's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import repeat
from struct import Struct
from typing import TYPE_CHECKING, Any, Final

from quiesce.telemetry.slot_spans import PlainColumns, SlotSpans, parts_of

if TYPE_CHECKING:
    from quiesce.telemetry.finished import AttributeValue

__all__ = ["PlainPart", "PlainSpan", "encode_parts", "encode_spans", "plain_parts"]

PlainSpan = tuple[Any, ...]
"""A :class:`~quiesce.telemetry.finished.FinishedSpan`, or a plain tuple of the same values in the same order."""

PlainPart = list[PlainSpan] | PlainColumns
"""Spans, one by one or as columns."""

_ERROR: Final = "quiesce.error"
_INT64: Final = 1 << 63
_MASK64: Final = (1 << 64) - 1
_KEPT: Final = 4096

_times: Final = Struct("<BQBQ").pack
_double: Final = Struct("<d").pack
_fixed64: Final = Struct("<Q").pack
_ids_of: Final = Struct("16s8s").iter_unpack
_times_of: Final = Struct("8s8s").iter_unpack

_KIND_INTERNAL: Final = b"\x30\x01"
_UNSET: Final = b"\x7a\x00"
_OK: Final = b"\x7a\x02\x18\x01"

_IDS_AND_TIMES: Final = 16 + 2 + 8 + 18
_PARENT: Final = 10

_shapes: dict[tuple[str, str, bool, tuple[tuple[str, AttributeValue], ...]], bytes] = {}
"""Beginnings of spans, by what they say."""


def encode_spans(
    batch: Iterable[PlainSpan], resource: Mapping[str, str], *, scope: str, version: str
) -> bytes:
    """Return the request that exports spans (``ExportTraceServiceRequest``).

    Args:
        batch: The spans.
        resource: What the process is, as OpenTelemetry resource attributes.
        scope: The instrumentation scope's name.
        version: Its version.
    """
    return encode_parts(plain_parts(batch), resource, scope=scope, version=version)


def plain_parts(batch: Iterable[PlainSpan]) -> list[PlainPart]:
    """Return a batch as what is encoded: spans as plain tuples, or as columns where that is how they come."""
    return [
        part.plain() if isinstance(part, SlotSpans) else list(map(tuple, part)) for part in parts_of(batch)
    ]


def encode_parts(
    parts: Iterable[PlainPart], resource: Mapping[str, str], *, scope: str, version: str
) -> bytes:
    """Return the request that exports spans, some of them given as columns; see :func:`encode_spans`."""
    written = [_field(1, _text_field(1, scope) + _text_field(2, version))]
    for part in parts:
        if isinstance(part, tuple):
            written.append(_columns(*part))
        else:
            _add_spans(part, written.append)
    of_resource = _field(1, _attributes(resource, 1)) + _field(2, b"".join(written))
    return _field(1, of_resource)


def _add_spans(spans: Iterable[PlainSpan], add: Callable[[bytes], None]) -> None:
    for name, trace_id, span_id, parent_id, start_ns, end_ns, attributes, links, events, status, _ in spans:
        # Spans of slots differ in identifiers and times alone: what else they say is written once. Protobuf's
        # fields may come in any order.
        known = None
        if not links and not events:
            known = _shapes.get((name, status, parent_id != 0, tuple(attributes.items())))
        add(_shape(name, parent_id, attributes, links, events, status) if known is None else known)
        add(trace_id.to_bytes(16, "big") + b"\x12\x08" + span_id.to_bytes(8, "big"))
        if parent_id:
            add(b'"\x08' + parent_id.to_bytes(8, "big"))
        add(_times(0x39, start_ns, 0x41, end_ns))


def _columns(
    shapes: Iterable[tuple[str, Mapping[str, AttributeValue], str]], which: bytes, times: bytes, ids: bytes
) -> bytes:
    """Return spans that are given as columns; each column goes into every eighth place, without a loop."""
    if not which:
        return b""
    begun = [_shape(name, 0, attributes, (), (), status) for name, attributes, status in shapes]
    traces, spans = zip(*_ids_of(ids), strict=True)
    starts, ends = zip(*_times_of(times), strict=True)
    pieces = [b""] * (8 * len(which))
    pieces[0::8] = map(begun.__getitem__, which)
    pieces[1::8] = traces
    pieces[2::8] = repeat(b"\x12\x08", len(which))
    pieces[3::8] = spans
    pieces[4::8] = repeat(b"\x39", len(which))
    pieces[5::8] = starts
    pieces[6::8] = repeat(b"\x41", len(which))
    pieces[7::8] = ends
    return b"".join(pieces)


def _shape(
    name: str,
    parent_id: int,
    attributes: Mapping[str, AttributeValue],
    links: Iterable[tuple[int, int]],
    events: Iterable[tuple[str, int, Mapping[str, AttributeValue]]],
    status: str,
) -> bytes:
    """Return the beginning of a span: its size, and everything but its identifiers and times."""
    said = _text_field(5, name) + _KIND_INTERNAL + _attributes(attributes, 9)
    for event, when, about in events:
        said += _field(11, b"\t" + _fixed64(when) + _text_field(2, event) + _attributes(about, 3))
    for trace, other in links:
        said += b"\x6a\x1c\n\x10" + trace.to_bytes(16, "big") + b"\x12\x08" + other.to_bytes(8, "big")
    if status == "ok":
        said += _OK
    elif status == "error":
        told = str(attributes.get(_ERROR, ""))
        said += _field(15, (_text_field(2, told) if told else b"") + b"\x18\x02")
    else:
        said += _UNSET
    said += b"\n\x10"
    size = len(said) + _IDS_AND_TIMES + (_PARENT if parent_id else 0)
    begun = b"\x12" + _varint(size) + said
    # Only texts: 1, 1.0 and True are one key of a dictionary, and a number seldom comes again.
    if not links and not events and all(type(value) is str for value in attributes.values()):
        if len(_shapes) >= _KEPT:  # texts that never come again, such as errors
            _shapes.clear()
        _shapes[name, status, parent_id != 0, tuple(attributes.items())] = begun
    return begun


def _attributes(attributes: Mapping[str, AttributeValue], number: int) -> bytes:
    """Return ``KeyValue`` messages in a repeated field."""
    return b"".join(
        _field(number, _text_field(1, key) + _field(2, _value(value))) for key, value in attributes.items()
    )


def _value(value: AttributeValue) -> bytes:
    """Return an ``AnyValue``."""
    if isinstance(value, bool):
        return b"\x10\x01" if value else b"\x10\x00"
    if isinstance(value, int):
        if -_INT64 <= value < _INT64:
            return b"\x18" + _varint(value & _MASK64)
        return _text_field(1, str(int(value)))
    if isinstance(value, float):
        return b"\x21" + _double(value)
    return _text_field(1, str(value))


def _text_field(number: int, text: str) -> bytes:
    # A text that is no Unicode (a file's name, say) is told as far as it goes.
    return _field(number, text.encode("utf-8", "replace"))


def _field(number: int, body: bytes) -> bytes:
    return _varint(number << 3 | 2) + _sized(body)


def _sized(body: bytes) -> bytes:
    return _varint(len(body)) + body


def _varint(value: int) -> bytes:
    written = bytearray()
    while value >= 0x80:  # noqa: PLR2004 - protobuf's numbers have seven bits a byte
        written.append(value & 0x7F | 0x80)
        value >>= 7
    written.append(value)
    return bytes(written)
