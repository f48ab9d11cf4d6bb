"""Finished spans and metric families as OTLP protobuf messages, without a detour over SDK objects.

Rule: what is encoded equals what OpenTelemetry's own encoder makes of the same spans (but for ``flags``, which only
says that it is known whether a parent is remote); a test compares them. Building ``ReadableSpan`` objects first would
cost five times as much. Nothing here suspends.

Metrics keep their Prometheus names without ``_total``, and their unit in UCUM: a collector's Prometheus exporter puts
both back, so a panel finds the same name on either path.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope, KeyValue
from opentelemetry.proto.metrics.v1 import metrics_pb2
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1 import trace_pb2

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from quiesce.telemetry.finished import AttributeValue, FinishedSpan

__all__ = ["encode_metrics", "encode_spans"]

_STATUS: Final = {
    "": trace_pb2.Status.STATUS_CODE_UNSET,
    "ok": trace_pb2.Status.STATUS_CODE_OK,
    "error": trace_pb2.Status.STATUS_CODE_ERROR,
}
_ERROR: Final = "quiesce.error"
_NANOSECONDS: Final = 1_000_000_000
_UNITS: Final = {"seconds": "s", "bytes": "By", "ratio": "1", "celsius": "Cel", "": ""}
_CUMULATIVE: Final = metrics_pb2.AGGREGATION_TEMPORALITY_CUMULATIVE


def encode_spans(
    batch: Sequence[FinishedSpan], resource: Mapping[str, str], *, scope: str, version: str
) -> bytes:
    """Return the request that exports spans.

    Args:
        batch: The spans.
        resource: What the process is, as OpenTelemetry resource attributes.
        scope: The instrumentation scope's name.
        version: Its version.
    """
    request = ExportTraceServiceRequest()
    of_resource = request.resource_spans.add()
    of_resource.resource.CopyFrom(_resource(resource))
    of_scope = of_resource.scope_spans.add()
    of_scope.scope.CopyFrom(InstrumentationScope(name=scope, version=version))
    add = of_scope.spans.append
    for span in batch:
        add(_span(span))
    return bytes(request.SerializeToString())


def _span(span: FinishedSpan) -> Any:  # noqa: ANN401 - a protobuf message, whose module is not typed
    message = trace_pb2.Span(
        trace_id=span.trace_id.to_bytes(16, "big"),
        span_id=span.span_id.to_bytes(8, "big"),
        name=span.name,
        kind=trace_pb2.Span.SPAN_KIND_INTERNAL,
        start_time_unix_nano=span.start_ns,
        end_time_unix_nano=span.end_ns,
        attributes=_attributes(span.attributes),
    )
    if span.parent_id:
        message.parent_span_id = span.parent_id.to_bytes(8, "big")
    message.status.SetInParent()
    if span.status:
        message.status.code = _STATUS[span.status]
        if span.status == "error":
            message.status.message = str(span.attributes.get(_ERROR, ""))
    for trace_id, span_id in span.links:
        message.links.add(trace_id=trace_id.to_bytes(16, "big"), span_id=span_id.to_bytes(8, "big"))
    for name, unix_ns, attributes in span.events:
        message.events.add(name=name, time_unix_nano=unix_ns, attributes=_attributes(attributes))
    return message


def _attributes(attributes: Mapping[str, AttributeValue]) -> list[Any]:
    return [KeyValue(key=key, value=_value(value)) for key, value in attributes.items()]


def _value(value: AttributeValue) -> Any:  # noqa: ANN401 - as above
    if isinstance(value, str):
        return AnyValue(string_value=value)
    if isinstance(value, bool):
        return AnyValue(bool_value=value)
    if isinstance(value, int):
        return AnyValue(int_value=value)
    return AnyValue(double_value=value)


def _resource(attributes: Mapping[str, str]) -> Any:  # noqa: ANN401 - as above
    return Resource(attributes=[KeyValue(key=key, value=_value(value)) for key, value in attributes.items()])


def encode_metrics(
    families: Iterable[Metric],
    unix_time: float,
    started: float,
    resource: Mapping[str, str],
    *,
    scope: str,
    version: str,
) -> bytes:
    """Return the request that exports a snapshot of metric families.

    Args:
        families: prometheus_client families.
        unix_time: When they were read, in Unix seconds.
        started: Since when counters count, in Unix seconds.
        resource: What the process is, as OpenTelemetry resource attributes.
        scope: The instrumentation scope's name.
        version: Its version.
    """
    request = ExportMetricsServiceRequest()
    of_resource = request.resource_metrics.add()
    of_resource.resource.CopyFrom(_resource(resource))
    of_scope = of_resource.scope_metrics.add()
    of_scope.scope.CopyFrom(InstrumentationScope(name=scope, version=version))
    when = {"time_unix_nano": int(unix_time * _NANOSECONDS)}
    since = {**when, "start_time_unix_nano": int(started * _NANOSECONDS)}
    for family in families:
        message = metrics_pb2.Metric(
            name=family.name, description=family.documentation, unit=_UNITS.get(family.unit, family.unit)
        )
        if family.type == "histogram":
            _add_histograms(message, family, since)
        elif family.type == "counter":
            message.sum.aggregation_temporality = _CUMULATIVE
            message.sum.is_monotonic = True
            _add_numbers(message.sum.data_points, family, since, suffix="_total")
        else:
            _add_numbers(message.gauge.data_points, family, when)
        of_scope.metrics.append(message)
    return bytes(request.SerializeToString())


def _add_numbers(points: Any, family: Metric, times: Mapping[str, int], *, suffix: str = "") -> None:  # noqa: ANN401 - as above
    for sample in family.samples:
        if sample.name.endswith("_created") or (suffix and not sample.name.endswith(suffix)):
            continue
        points.add(as_double=sample.value, attributes=_attributes(sample.labels), **times)


def _add_histograms(message: Any, family: Metric, times: Mapping[str, int]) -> None:  # noqa: ANN401 - as above
    message.histogram.aggregation_temporality = _CUMULATIVE
    found: dict[tuple[tuple[str, str], ...], _Points] = {}
    for sample in family.samples:
        labels = {name: value for name, value in sample.labels.items() if name != "le"}
        points = found.setdefault(tuple(labels.items()), _Points(labels))
        if sample.name.endswith("_bucket"):
            points.buckets.append((float(sample.labels["le"]), int(sample.value)))
        elif sample.name.endswith("_sum"):
            points.sum = sample.value
    for points in found.values():
        points.buckets.sort()
        cumulative = [count for _, count in points.buckets]
        message.histogram.data_points.add(
            count=cumulative[-1] if cumulative else 0,
            sum=points.sum,
            bucket_counts=[
                after - before for before, after in zip([0, *cumulative], cumulative, strict=False)
            ],
            explicit_bounds=[bound for bound, _ in points.buckets if not math.isinf(bound)],
            attributes=_attributes(points.labels),
            **times,
        )


class _Points:
    """One child of a histogram family, put together from its samples."""

    __slots__ = ("buckets", "labels", "sum")

    def __init__(self, labels: Mapping[str, str]) -> None:
        self.labels = labels
        self.buckets: list[tuple[float, int]] = []
        self.sum = 0.0
