"""Metric families as an OTLP request, without a detour over SDK objects; spans are in a module of their own.

Rule: metrics keep their Prometheus names without ``_total``, and their unit in UCUM: a collector's Prometheus
exporter puts both back, so a panel finds the same name on either path. Nothing here suspends.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope, KeyValue
from opentelemetry.proto.metrics.v1 import metrics_pb2
from opentelemetry.proto.resource.v1.resource_pb2 import Resource

from quiesce_exporters.otlp_spans import encode_spans

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from quiesce.telemetry.finished import AttributeValue

__all__ = ["encode_metrics", "encode_spans"]

_NANOSECONDS: Final = 1_000_000_000
_UNITS: Final = {"seconds": "s", "bytes": "By", "ratio": "1", "celsius": "Cel", "": ""}
_CUMULATIVE: Final = metrics_pb2.AGGREGATION_TEMPORALITY_CUMULATIVE


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
        # An info's name is scraped with that ending, which no collector would put back.
        name = f"{family.name}_info" if family.type == "info" else family.name
        message = metrics_pb2.Metric(
            name=name, description=family.documentation, unit=_UNITS.get(family.unit, family.unit)
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
