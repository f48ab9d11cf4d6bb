"""What an exporter of spans, samples and events is, and how one is found.

Rule: a sink is called on a thread of its own and may block there for as long as it likes; nobody waits for
it. What it raises is counted by the pipeline, which backs off and goes on. Nothing here suspends.

A sink announces itself by an entry point of the group ``quiesce.sinks``: a callable that takes a
:class:`SinkContext` and returns a :class:`Sink`. The toolkit itself imports none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, cast

from quiesce.errors import ExporterMissingError
from quiesce.telemetry.finished import FinishedSpan

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

__all__ = ["SINKS", "MakeSink", "Sink", "SinkContext", "find_sink"]

SINKS: Final = "quiesce.sinks"
"""Entry point group in which sinks announce themselves."""


class Sink(Protocol):
    """Somewhere for spans, samples and events to go.

    One that has an attribute ``takes_spans`` that is false is given no spans, and none counts as exported for its
    sake. Every method may block, is called on one thread of the sink's own (``close`` on it too, after the last
    batch), and raises when the batch was not taken.
    """

    def spans(self, batch: Sequence[FinishedSpan]) -> int | None:
        """Take spans, in the order in which they were handed over.

        Returns:
            How many of them were refused after all, by a collector that takes part of a batch, say; None is none.
        """

    def samples(self, families: Sequence[Metric], unix_time: float) -> None:
        """Take a snapshot of every metric family; called once a period.

        Args:
            families: prometheus_client families with their samples.
            unix_time: When they were read, in Unix seconds.
        """

    def events(self, events: Sequence[Mapping[str, object]]) -> None:
        """Take lines of the run's log, as the dictionaries that they are made of."""

    def close(self, deadline_seconds: float) -> None:
        """Finish what was taken, and let go of everything.

        Args:
            deadline_seconds: After so long nobody waits any more: the thread is left behind.
        """


class SinkContext(NamedTuple):
    """What a sink is told when it is made.

    Attributes:
        run: The run's name.
        role: What this process is in the run.
        run_dir: The run's folder, if it has one.
        resource: What the process is, as OpenTelemetry resource attributes (``service.name``, …).
        settings: Further settings, by the sink's own names.
    """

    run: str
    role: str
    run_dir: Path | None
    resource: Mapping[str, str]
    settings: Mapping[str, object]


MakeSink = Callable[[SinkContext], Sink]
"""What an entry point of :data:`SINKS` is."""


def find_sink(name: str) -> MakeSink:
    """Load the sink of that name.

    Raises:
        ExporterMissingError: If none is installed.
    """
    installed = entry_points(group=SINKS)
    for entry in installed.select(name=name):
        return cast("MakeSink", entry.load())
    raise ExporterMissingError(name, SINKS, installed.names)
