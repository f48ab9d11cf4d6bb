"""Text of which only what has changed is written again is the text that the encoder writes."""

import time
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import exposition
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics import exposition as openmetrics

from quiesce.barrier import DataPlaneCheckpointBarrier
from quiesce.observers import Hub
from quiesce.telemetry import names
from quiesce.telemetry.assembly import RunTelemetry
from quiesce.telemetry.collector import QuiesceCollector
from quiesce_exporters.exposition import Encode, Renderer, Renderers
from tests.unit.telemetry.telling import Kept

FORMATS: dict[str, Encode] = {
    "classic": exposition.generate_latest,
    "openmetrics": openmetrics.generate_latest,
}


class Counting:
    """An encoder that counts the families that it is given with samples, and their samples."""

    def __init__(self, encode: Encode) -> None:
        self._encode = encode
        self.names: list[str] = []

    def __call__(self, registry: Any) -> bytes:  # noqa: ANN401 - anything that collects
        """Write a registry."""
        self.names += [family.name for family in registry.collect() for _ in family.samples]
        return self._encode(registry)


def registry_of(families: Iterable[Metric]) -> Any:  # noqa: ANN401 - a registry, as an encoder sees one
    """Return a registry whose families stand still, which those of a run do not."""
    families = list(families)
    return SimpleNamespace(collect=lambda: families)


@pytest.fixture
def run() -> Iterator[tuple[Hub, QuiesceCollector, RunTelemetry]]:
    """A run that is watched, with exemplars."""
    hub = Hub(strict=True)
    telemetry = RunTelemetry(hub, sinks={"kept": Kept()}, budget=0)
    telemetry.start(thread=False)
    barrier = DataPlaneCheckpointBarrier(hub=hub)
    hub.roles.add("dataplane")
    yield hub, QuiesceCollector(telemetry.observer, hub, run='with "quotes" and\nlines'), telemetry
    del barrier  # it was there all along
    telemetry.close(10)


@pytest.mark.parametrize("encode", FORMATS.values(), ids=FORMATS)
def test_the_text_is_the_encoders(run: tuple[Hub, QuiesceCollector, RunTelemetry], encode: Encode) -> None:
    """Byte for byte, while series change, come, and get exemplars."""
    hub, collector, telemetry = run
    renderer = Renderer(encode)
    texts = set()
    for number in range(12):
        hub.fire("rollout_ended", "g", 0, 5, "completed", 100 * number)
        hub.fire("dataplane_operated", "put", 1_000 * 3**number, 2, "completed")
        hub.fire("owner_moved", "g", "read", "ledger", "")
        for _ in range(number % 3):
            for hook in hub.slot_closed:
                hook(f"kind_{number}", 0, 1_000 * 3**number, "completed", time.perf_counter_ns())
        telemetry.converter.convert()
        registry = registry_of(collector.collect())

        texts.add(text := renderer.render(registry))

        assert text == encode(registry)
    assert len(texts) == 12
    assert b'with \\"quotes\\" and\\nlines' in text


@pytest.mark.parametrize("encode", FORMATS.values(), ids=FORMATS)
def test_what_has_not_changed_is_not_written_again(
    run: tuple[Hub, QuiesceCollector, RunTelemetry], encode: Encode
) -> None:
    """Of a histogram only the child in which something happened."""
    hub, collector, _ = run
    counting = Counting(encode)
    renderer = Renderer(counting)
    renderer.render(registry_of(collector.collect()))
    written = len(counting.names)
    counting.names.clear()
    hub.fire("dataplane_operated", "put", 1_000, 2, "completed")

    families = {family.name: family for family in collector.collect()}
    renderer.render(registry_of(families.values()))

    changed = families[names.DATAPLANE_OP.name]
    again = counting.names.count(changed.name)
    assert 0 < again < len(changed.samples) / 4
    assert len(counting.names) < written / 4


def test_a_family_that_its_owner_changes_in_place_is_written_anew() -> None:
    """A collector of the application's may hand out the same object each time."""
    family = GaugeMetricFamily("mine", "Mine", value=1.0)
    registry, renderer = registry_of([family]), Renderer(exposition.generate_latest)
    assert b"mine 1.0" in renderer.render(registry)

    family.samples[0] = family.samples[0]._replace(value=2.0)
    assert b"mine 2.0" in renderer.render(registry)
    family.documentation = "Yours"
    assert b"Yours" in renderer.render(registry)


def test_a_family_that_goes_away_is_in_no_text() -> None:
    """What is kept is never written for its own sake."""
    renderer = Renderer(exposition.generate_latest)
    renderer.render(registry_of([GaugeMetricFamily("mine", "Mine", value=1.0)]))

    assert renderer.render(registry_of([])) == b""


def test_only_a_few_formats_are_remembered() -> None:
    """The one that was asked for last is."""
    renderers = Renderers()
    registry = registry_of([GaugeMetricFamily("mine", "Mine", value=1.0)])
    counting = Counting(exposition.generate_latest)
    for number in range(9):
        assert renderers.render(registry, f"format {number}", counting) == exposition.generate_latest(
            registry
        )
    written = len(counting.names)

    renderers.render(registry, "format 8", counting)
    assert len(counting.names) == written
    renderers.render(registry, "format 0", counting)
    assert len(counting.names) == written + 1
