"""Hooks that only say that they were called, and numbers that are right whenever somebody looks."""

import threading

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from quiesce.observers import Hub
from quiesce.telemetry import deferred
from quiesce.telemetry.collector import QuiesceCollector
from quiesce.telemetry.deferred import DEFERRED_HOOKS, MOST_WAITING, DeferredMetrics
from quiesce.telemetry.histogram import HistogramFamily
from quiesce.telemetry.metrics import MetricsObserver
from quiesce.telemetry.slots import SlotRecorder
from quiesce.telemetry.spans import SpanObserver
from quiesce.telemetry.tracing import Identifiers, Identities


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
    moves = metrics.families["quiesce_groups_moved_total"]

    hub.fire("owner_moved", "a", "ledger", "buffer", "")
    hub.fire("window_requested", "cut", 0)
    hub.fire("window_opened", "cut", 1, (), 1)
    assert moves.values["ledger", "buffer"] == 0  # type: ignore[union-attr] # inside the window nothing is counted
    hub.fire("window_closed", "cut", 1, 5, "completed", 6)
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


CALLS: dict[str, list[tuple[object, ...]]] = {
    "owner_moved": [("a", "read", "ledger", ""), ("a", "ledger", "buffer", ""), ("b", "read", "ledger", "")],
    "dataplane_operated": [
        ("put", 1_500, 2, "completed"),
        ("get", 10**9, 1, "failed"),
        ("put", 7, 1, "completed"),
    ],
    "permit_granted": [("0", 1, 2_000), ("1", 2, 10**12)],
    "reply_sent": [("0", 5_000), ("0", 70_000)],
    "rollout_ended": [("a", 1, 5, "completed", 12), ("b", 1, 5, "failed", 3)],
    "admission_waited": [(3_000,), (4_000,)],
    "admission_committed": [("transactional", 8, 1, 8), ("fallback", 16, None, 8)],
    "train_idled": [("groups", 10**9), ("sync", 500)],
    "clear_ended": [("0", 3, 24, 5_000, "completed", [("a", 1)]), ("1", 1, 8, 10**9, "failed", ())],
}
WRONG: dict[str, tuple[object, ...]] = {
    "owner_moved": ("c", "nowhere", "elsewhere", ""),
    "dataplane_operated": ("juggle", 5, 1, "completed"),
    "permit_granted": ("0", 3, None),
    "reply_sent": ("0", "soon"),
    "rollout_ended": ("c", 1, 5, "completed", None),
    "admission_waited": ("soon",),
    "admission_committed": ("by force", 8, 1, 8),
    "train_idled": ("boredom", 5),
    "clear_ended": ("0", 3, 24, "soon", "completed", ()),
}


def numbers_of(metrics: MetricsObserver) -> dict[str, object]:
    """Return everything that was counted, but for times of day."""
    return {
        name: {labels: child.numbers() for labels, child in family.children.items()}
        if isinstance(family, HistogramFamily)
        else {labels: repr(value) for labels, value in family.values.items()}
        for name, family in metrics.families.items()
        if "timestamp" not in name
    }


@pytest.mark.parametrize("hook", DEFERRED_HOOKS)
@pytest.mark.parametrize("wrong", [False, True])
def test_many_calls_at_once_count_as_each_for_itself_does(hook: str, wrong: bool) -> None:  # noqa: FBT001 - a parameter
    """Also where one among them cannot be counted, which is an error once."""
    first, *others = CALLS[hook]
    calls = [first, *([WRONG[hook]] if wrong else []), *others]
    plain = MetricsObserver()
    for args in [first, *others]:
        getattr(plain, hook)(*args)
    hub, metrics = watched()

    for args in calls:
        hub.fire(hook, *args)
    metrics.catch_up()

    assert numbers_of(metrics) == numbers_of(plain)
    assert metrics.seen == plain.seen
    assert hub.errors == ({hook: 1} if wrong else {})


def shared() -> tuple[Hub, DeferredMetrics, SpanObserver]:
    """Return a hub, what notes its hooks for spans, and what counts them from those notes."""
    hub = Hub()
    metrics = DeferredMetrics(hub.raised)
    spans = SpanObserver(SlotRecorder(), Identities(Identifiers()))
    metrics.share(spans)
    hub.subscribe(spans)
    hub.subscribe(metrics)
    return hub, metrics, spans


def test_what_is_noted_for_spans_is_not_noted_again() -> None:
    """A hook that both need is called once, and counted once, whoever looks first; the story misses nothing."""
    hub, metrics, spans = shared()
    assert len(hub.owner_moved) == len(hub.rollout_ended) == 1
    assert len(hub.window_opened) == 2  # that one is counted at once

    for _ in range(3):
        hub.fire("owner_moved", "g", "read", "ledger", "")
    metrics.catch_up()
    hub.fire("owner_moved", "g", "read", "ledger", "")
    hub.fire("rollout_started", "g", 0)

    assert moved(metrics) == 3
    assert spans.waiting == 5
    assert [note[0] for note in spans.take(100)] == ["owner_moved"] * 4 + ["rollout_started"]
    assert moved(metrics) == 4
    metrics.catch_up()
    assert moved(metrics) == 4


def test_what_finds_no_room_among_the_notes_is_counted_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """A converter that hangs costs spans, and no number."""
    monkeypatch.setattr("quiesce.telemetry.spans.NOTES", 4)
    hub, metrics, spans = shared()

    for number in range(10):
        hub.fire("owner_moved", "g", "read", "ledger", "")
        if number == 2:
            metrics.catch_up()
    metrics.catch_up()

    assert moved(metrics) == 10
    assert (spans.waiting, spans.dropped) == (4, 6)


def test_a_note_that_cannot_be_counted_is_an_error_of_its_hook() -> None:
    """It is told all the same: a span may say what a closed set of labels cannot."""
    hub, metrics, spans = shared()

    hub.fire("owner_moved", "g", "nowhere", "elsewhere", "")
    hub.fire("owner_moved", "g", "read", "ledger", "")
    metrics.catch_up()

    assert hub.errors == {"owner_moved": 1}
    assert moved(metrics) == 1
    assert len(spans.take(10)) == 2


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
