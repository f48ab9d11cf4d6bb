"""Hooks that only say that they were called, and numbers that are right whenever somebody looks."""

import threading

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from quiesce.observers import Hub
from quiesce.telemetry import deferred
from quiesce.telemetry.collector import QuiesceCollector
from quiesce.telemetry.deferred import MOST_WAITING, DeferredMetrics


def watched() -> tuple[Hub, DeferredMetrics]:
    """Return a hub and what counts its hooks."""
    hub = Hub()
    metrics = DeferredMetrics(hub.raised)
    hub.subscribe(metrics)
    return hub, metrics


def moved(metrics: DeferredMetrics) -> float:
    """Return how many moves were counted so far."""
    return metrics.families["quiesce_groups_moved_total"].values["read", "ledger"]  # type: ignore[union-attr] # numbers


def test_a_hook_is_counted_when_somebody_wants_the_numbers() -> None:
    """And once."""
    hub, metrics = watched()

    hub.fire("owner_moved", "g", "read", "ledger", "")

    assert moved(metrics) == 0
    metrics.catch_up()
    metrics.catch_up()
    assert moved(metrics) == 1


def test_a_scrape_catches_up_first() -> None:
    """It never answers what was true a while ago."""
    hub, metrics = watched()
    registry = CollectorRegistry(support_collectors_without_names=True)
    registry.register(QuiesceCollector(metrics, hub, run="r1"))

    hub.fire("owner_moved", "g", "read", "ledger", "")

    line = 'quiesce_groups_moved_total{from="read",role="controller",run="r1",to="ledger"} 1.0'
    assert line in generate_latest(registry).decode()


def test_what_waits_is_bounded_without_anybody() -> None:
    """The hook that comes when so many wait counts them all."""
    hub, metrics = watched()

    for _ in range(MOST_WAITING):
        hub.fire("owner_moved", "g", "read", "ledger", "")

    assert moved(metrics) == MOST_WAITING


def test_what_a_cut_covers_is_what_was_reported_before_it() -> None:
    """Groups that were done before the window are saved by it, those after it are not."""
    hub, metrics = watched()
    at_risk = metrics.families["quiesce_groups_since_checkpoint"]

    hub.fire("owner_moved", "a", "ledger", "buffer", "")
    hub.fire("window_requested", "cut", 0)
    hub.fire("window_opened", "cut", 1, (), 1)
    hub.fire("owner_moved", "b", "ledger", "buffer", "")
    hub.fire("checkpoint_ended", "cut", 1, "completed", "", {}, 0, 0)
    metrics.catch_up()

    assert at_risk.values[()] == 1.0  # type: ignore[union-attr] # numbers


def test_what_cannot_be_counted_is_an_error_of_its_hook_and_costs_no_other() -> None:
    """As if the hook itself had raised."""
    hub, metrics = watched()

    hub.fire("owner_moved", "g", "nowhere", "elsewhere", "")
    hub.fire("owner_moved", "g", "read", "ledger", "")
    metrics.catch_up()

    assert hub.errors == {"owner_moved": 1}
    assert moved(metrics) == 1


def test_whoever_is_interrupted_while_counting_keeps_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal's handler that ends the process may meet the lock taken for good."""
    monkeypatch.setattr(deferred, "_PATIENCE_SECONDS", 0.01)
    hub, metrics = watched()
    hub.fire("owner_moved", "g", "read", "ledger", "")
    metrics._counting.acquire()  # noqa: SLF001 - as the interrupted one has

    other = threading.Thread(target=metrics.catch_up)
    other.start()
    other.join(5)

    assert not other.is_alive()
    assert moved(metrics) == 0
