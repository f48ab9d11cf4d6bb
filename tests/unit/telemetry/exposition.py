"""Parses what a scrape answers, with the types that the parsers of prometheus_client lack."""

from collections.abc import Iterator
from typing import cast

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import exposition, parser
from prometheus_client.parser import text_string_to_metric_families

__all__ = ["openmetrics_text", "parse_classic", "parse_openmetrics"]


def parse_classic(text: str) -> Iterator[Metric]:
    """Parse the classic text exposition."""
    return iter(text_string_to_metric_families(text))


def parse_openmetrics(text: str) -> Iterator[Metric]:
    """Parse OpenMetrics, which is checked more strictly than the classic form."""
    families = parser.text_string_to_metric_families(text)  # type: ignore[no-untyped-call] # not annotated there
    return cast("Iterator[Metric]", families)


def openmetrics_text(registry: CollectorRegistry) -> str:
    """Write a registry as OpenMetrics."""
    text: bytes = exposition.generate_latest(registry)  # type: ignore[no-untyped-call] # not annotated there
    return text.decode()
