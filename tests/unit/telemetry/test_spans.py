"""What notes hooks for the converter: when it asks to be heard at once."""

import pytest

from quiesce.observers import Hub
from quiesce.telemetry.slots import SlotRecorder
from quiesce.telemetry.spans import SpanObserver
from quiesce.telemetry.tracing import Identifiers, Identities


@pytest.mark.parametrize("own", [True, False])
def test_a_save_wakes_the_converter_only_for_the_identifiers_of_a_provider(own: bool) -> None:  # noqa: FBT001 - a parameter
    """A converter that works beside a window would contend with it; where its identifiers are drawn, it can wait."""
    woken: list[int] = []
    hub = Hub(strict=True)
    spans = SpanObserver(SlotRecorder(), Identities(Identifiers() if own else None))
    spans.wake = lambda: woken.append(1)
    hub.subscribe(spans)

    hub.fire("phase_started", "cut", "fence")

    assert bool(woken) is not own
    assert (spans.identities.of("cut") is not None) is own
