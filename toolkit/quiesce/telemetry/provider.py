"""Makes real spans of an application's own tracer provider, where it has one.

Rule: as :mod:`quiesce.telemetry.tracing`; the provider is used as it is, and nothing of it is changed. Its span
processors are called on the converter's thread. Where it would draw identifiers from the global :mod:`random`, as the
SDK does by default, our own tracer of it has a generator of its own: when a span is made depends on threads, and what
the training draws must not. Nothing here suspends.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from typing import Any

from quiesce.telemetry.finished import ERROR, FinishedSpan, Link
from quiesce.telemetry.tracing import (
    Attributes,
    Ending,
    Identifiers,
    OwnTracing,
    Parent,
    SpanHandle,
    Tracing,
)

__all__ = ["ProviderTracing"]


class ProviderTracing(Tracing):
    """Makes real spans of an application's tracer provider, with explicit times.

    They go where its span processors send them. Sinks of ours (a recorder beside the run, say) may be given the same
    spans as finished ones.

    Args:
        provider: The application's ``TracerProvider``.
        version: What the instrumentation scope says is ours; None takes Quiesce's.
        copies: Whether there are such sinks.

    Attributes:
        exported: Spans that were handed to the provider's processors.
        unheard: Spans that the provider did not sample.
    """

    def __init__(self, provider: Any, version: str | None = None, *, copies: bool = False) -> None:  # noqa: ANN401 - any object of OpenTelemetry's API
        from opentelemetry import trace

        from quiesce import __version__

        self._trace = trace
        self._provider = provider
        self._tracer = _leave_random_alone(
            provider.get_tracer("quiesce", __version__ if version is None else version)
        )
        self._copies = OwnTracing() if copies else None
        self.exported = 0
        self.unheard = 0

    def begin(
        self,
        name: str,
        parent: SpanHandle | Parent | None,
        start_ns: int,
        attributes: Attributes,
        links: Sequence[Link],
        identity: Link | None,
    ) -> SpanHandle:
        """Open a span of the provider, which chooses its identifiers."""
        span = self._tracer.start_span(
            name,
            context=self._context(parent),
            attributes=attributes,
            links=[self._trace.Link(self._remote(link)) for link in links],
            start_time=start_ns,
        )
        known = span.get_span_context()
        link = (known.trace_id, known.span_id)
        copy = None
        if self._copies is not None:
            copy = self._copies.begin(name, parent, start_ns, attributes, links, link).open
        return SpanHandle(*link, sampled=bool(known.trace_flags.sampled), open_=(span, copy))

    def finish(self, handle: SpanHandle, opened: Any, ending: Ending) -> None:  # noqa: ANN401 - as begin() keeps it
        """End a span of the provider."""
        span, copy = opened
        if self._copies is not None:
            self._copies.finish(handle, copy, ending)
        span.set_attributes(ending.said)
        for event, when, about in ending.events:
            span.add_event(event, about, when)
        for link in ending.links:
            span.add_link(self._remote(link))
        if ending.status == "error":
            told = str(ending.said.get(ERROR, "")) or None
            span.set_status(self._trace.Status(self._trace.StatusCode.ERROR, told))
        elif ending.status:
            span.set_status(self._trace.Status(self._trace.StatusCode.OK))
        span.end(ending.end_ns)
        if handle.sampled:
            self.exported += 1
        else:
            self.unheard += 1

    def take(self) -> list[FinishedSpan]:
        """Return the spans that sinks of ours are given beside the provider's processors."""
        return [] if self._copies is None else self._copies.take()

    def flush(self, seconds: float) -> None:
        """Have the provider's processors send what they hold, for a process that ends without its own end.

        Args:
            seconds: What they are told; they may take longer.
        """
        flush = getattr(self._provider, "force_flush", None)
        if flush is not None:
            with contextlib.suppress(Exception):  # whatever its processors raise, the process ends
                flush(int(seconds * 1_000))

    def _context(self, parent: SpanHandle | Parent | None) -> Any:  # noqa: ANN401 - an OpenTelemetry context
        from opentelemetry.context import Context

        if parent is None:
            return Context()  # a fresh root, whatever is current on this thread
        if isinstance(parent, Parent):
            return parent.context
        if parent.open is not None:
            return self._trace.set_span_in_context(parent.open[0], Context())
        # It has ended already.
        flags = self._trace.TraceFlags(
            self._trace.TraceFlags.SAMPLED if parent.sampled else self._trace.TraceFlags.DEFAULT
        )
        known = self._trace.SpanContext(parent.trace_id, parent.span_id, is_remote=False, trace_flags=flags)
        return self._trace.set_span_in_context(self._trace.NonRecordingSpan(known), Context())

    def _remote(self, link: Link) -> Any:  # noqa: ANN401 - an OpenTelemetry span context
        flags = self._trace.TraceFlags(self._trace.TraceFlags.SAMPLED)
        return self._trace.SpanContext(*link, is_remote=False, trace_flags=flags)


def _leave_random_alone(tracer: Any) -> Any:  # noqa: ANN401 - a tracer of whatever provider
    """Give a tracer of the SDK our identifiers, if it has the stock generator; another one was chosen by somebody."""
    module: Any = sys.modules.get("opentelemetry.sdk.trace.id_generator")
    stock: Any = getattr(tracer, "id_generator", None)
    if module is None or stock.__class__ is not module.RandomIdGenerator:
        return tracer
    ours: Any = module.RandomIdGenerator()
    identifiers = Identifiers()
    ours.generate_span_id = identifiers.span
    ours.generate_trace_id = identifiers.trace
    tracer.id_generator = ours
    return tracer
