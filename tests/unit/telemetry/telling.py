"""Helpers of the tests of spans: a sink that keeps what it is given, and telemetry whose converter is stepped by hand."""

from collections.abc import Callable, Mapping, Sequence

from prometheus_client.metrics_core import Metric

from quiesce.observers import Hub
from quiesce.telemetry.assembly import RunTelemetry
from quiesce.telemetry.finished import FinishedSpan
from quiesce.testing import FakeClock


class Kept:
    """A sink that keeps everything."""

    def __init__(self) -> None:
        self.found: list[FinishedSpan] = []
        self.families: list[Metric] = []
        self.lines: list[Mapping[str, object]] = []
        self.closed: list[float] = []

    def spans(self, batch: Sequence[FinishedSpan]) -> None:
        """Keep spans."""
        self.found += batch

    def samples(self, families: Sequence[Metric], unix_time: float) -> None:
        """Keep the last families."""
        self.families = list(families)

    def events(self, events: Sequence[Mapping[str, object]]) -> None:
        """Keep lines."""
        self.lines += events

    def close(self, deadline_seconds: float) -> None:
        """Note the deadline."""
        self.closed.append(deadline_seconds)

    def named(self, name: str) -> list[FinishedSpan]:
        """Return the spans of that name, in the order in which they ended."""
        return [span for span in self.found if span.name == name]

    def one(self, name: str) -> FinishedSpan:
        """Return the only span of that name."""
        (span,) = self.named(name)
        return span


class Telling:
    """Telemetry on a hub of its own, converted by hand.

    Args:
        budget: Spans of slots a second.
        clock: Another clock than the one that a test moves by hand.
        hub: What it listens to.
    """

    def __init__(
        self,
        *,
        budget: float | None = 0,
        clock: Callable[[], int] | None = None,
        hub: Hub | None = None,
    ) -> None:
        self.hub = Hub(strict=True) if hub is None else hub
        self.kept = Kept()
        self.clock = FakeClock(1_000_000_000)
        self.run = RunTelemetry(
            self.hub,
            sinks={"kept": self.kept},
            budget=budget,
            clock=self.clock if clock is None else clock,
            sample_seconds=3_600,
        )
        self.run.start(thread=False)

    def told(self) -> Kept:
        """Convert what there is, and return what the sink was given so far."""
        while self.run.converter.convert():
            pass
        assert self.run.pipeline.flush(10)
        return self.kept

    def over(self) -> Kept:
        """Close, and return what the sink was given."""
        self.run.close(10)
        return self.kept
