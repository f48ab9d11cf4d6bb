"""What notes hooks for the converter: when it asks to be heard at once."""

import pytest
from opentelemetry.sdk.trace import TracerProvider

from quiesce.observers import Hub
from quiesce.telemetry.assembly import RunTelemetry
from quiesce.telemetry.slots import SlotRecorder
from quiesce.telemetry.spans import SpanObserver
from quiesce.telemetry.tracing import Identifiers, Identities
from tests.unit.telemetry.telling import Kept


@pytest.mark.parametrize("own", [True, False])
def test_a_cut_is_told_of_until_its_identifiers_are_known(own: bool) -> None:  # noqa: FBT001 - a parameter
    """Once where they are ours, and with them."""
    begun: list[tuple[str, bool]] = []
    hub = Hub(strict=True)
    spans = SpanObserver(SlotRecorder(), Identities(Identifiers() if own else None))
    spans.begun = lambda cut_id: begun.append((cut_id, spans.identities.of(cut_id) is not None))
    hub.subscribe(spans)

    hub.fire("phase_started", "cut", "fence")
    hub.fire("window_requested", "cut", 0)
    spans.identities.know("cut", (1, 2))
    hub.fire("phase_started", "cut", "write")

    assert begun == ([("cut", True)] if own else [("cut", False), ("cut", False)])


@pytest.mark.parametrize("whose", ["ours", "a provider's", "a late provider's"])
def test_a_cut_is_converted_at_once_only_for_identifiers_of_a_provider(
    monkeypatch: pytest.MonkeyPatch, whose: str
) -> None:
    """Lines of the log want to name them. A converter that works beside a window would contend with it."""
    provider, rings = TracerProvider(shutdown_on_exit=False), []
    found: list[object] = []
    hub = Hub(strict=True)
    run = RunTelemetry(
        hub,
        sinks={"recorder": Kept()},
        provider=provider if whose == "a provider's" else None,
        find_provider=lambda: found[0] if found else None,
        budget=0,
    )
    run.start(thread=False)
    monkeypatch.setattr(run.converter, "_ring", lambda: rings.append(1))
    if whose == "a late provider's":
        found.append(provider)

    hub.fire("phase_started", "cut", "fence")

    assert bool(rings) is (whose != "ours")
    assert (run.spans.identities.of("cut") is None) is (whose != "ours"), "no span will have them"
    monkeypatch.undo()
    run.close(10)
