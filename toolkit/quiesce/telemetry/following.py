"""Makes spans of our own until the application installs a tracer provider, and spans of that one from then on.

Rule: as :mod:`quiesce.telemetry.tracing`. A barrier is often built before the application has set up OpenTelemetry, so
whether there is a provider is asked again and again, until there is one. A span that is open at that moment ends as
what it began as; its children name it as their parent all the same. Nothing here suspends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from quiesce.telemetry.finished import NO_ATTRIBUTES, FinishedSpan, Link, SpanEvent
from quiesce.telemetry.provider import ProviderTracing
from quiesce.telemetry.slot_spans import SlotColumns
from quiesce.telemetry.tracing import Attributes, Ending, OwnTracing, Parent, SpanHandle, Tracing

__all__ = ["FollowingTracing"]


class FollowingTracing(Tracing):
    """See the module's docstring.

    Args:
        own: Makes spans until there is a provider.
        find: Returns the application's provider, or None.
        found: Called once there is one; returns whether sinks of ours are still to be given copies.

    Attributes:
        foreign: Makes spans of the provider, once there is one.
    """

    def __init__(self, own: OwnTracing, find: Callable[[], Any], found: Callable[[], bool]) -> None:
        self._own = own
        self._find = find
        self._found = found
        self.foreign: ProviderTracing | None = None

    def look(self) -> None:
        """Use the application's provider, if there is one by now."""
        provider = self._find() if self.foreign is None else None
        if provider is not None:
            self.foreign = ProviderTracing(provider, copies=self._found())

    def unseen(self) -> bool:
        """Return whether there is a provider that is not used yet."""
        return self.foreign is None and self._find() is not None

    @property
    def slots(self) -> SlotColumns | None:  # type: ignore[override] # it changes once, and nobody sets it
        """Where spans of ordinary slots are collected until there is a provider."""
        return self._own.slots if self.foreign is None else None

    def begin(
        self,
        name: str,
        parent: SpanHandle | Parent | None,
        start_ns: int,
        attributes: Attributes,
        links: Sequence[Link],
        identity: Link | None,
    ) -> SpanHandle:
        """Open a span."""
        if self.foreign is None:
            return self._own.begin(name, parent, start_ns, attributes, links, identity)
        return self.foreign.begin(name, self._known(parent), start_ns, attributes, links, None)

    def finish(self, handle: SpanHandle, opened: Any, ending: Ending) -> None:  # noqa: ANN401 - as begin() keeps it
        """End a span, as what it began as."""
        if self.foreign is None or self._own.is_own(opened):
            self._own.finish(handle, opened, ending)
        else:
            self.foreign.finish(handle, opened, ending)

    def end(
        self,
        handle: SpanHandle,
        end_ns: int,
        *,
        outcome: str,
        attributes: Attributes = NO_ATTRIBUTES,
        events: Sequence[SpanEvent] = (),
        links: Sequence[Link] = (),
        error: str = "",
        cut_off: bool = False,
    ) -> None:
        """End a span, as what it began as. Twice is once."""
        whose = self._own if self.foreign is None or self._own.is_own(handle.open) else self.foreign
        whose.end(
            handle,
            end_ns,
            outcome=outcome,
            attributes=attributes,
            events=events,
            links=links,
            error=error,
            cut_off=cut_off,
        )

    def emit(
        self,
        name: str,
        *,
        parent: SpanHandle | Parent | None,
        start_ns: int,
        end_ns: int,
        outcome: str,
        attributes: Attributes = NO_ATTRIBUTES,
        links: Sequence[Link] = (),
    ) -> SpanHandle:
        """Make a span that is over already."""
        whose, known = (self._own, parent) if self.foreign is None else (self.foreign, self._known(parent))
        return whose.emit(
            name,
            parent=known,
            start_ns=start_ns,
            end_ns=end_ns,
            outcome=outcome,
            attributes=attributes,
            links=links,
        )

    def take(self) -> list[FinishedSpan]:
        """Return the spans that sinks are to be given."""
        ended = self._own.take()
        return ended if self.foreign is None else ended + self.foreign.take()

    def _known(self, parent: SpanHandle | Parent | None) -> SpanHandle | Parent | None:
        """Return a parent as the provider can use it: one that it does not have is named only."""
        if isinstance(parent, SpanHandle) and self._own.is_own(parent.open):
            return SpanHandle(parent.trace_id, parent.span_id)
        return parent
