"""How spans are made: our own, and those of an application's provider."""

import asyncio
import os
import random
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import cast

import pytest
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import SpanKind, StatusCode

import quiesce
from quiesce.barrier import DataPlaneCheckpointBarrier
from quiesce.observers import Hub
from quiesce.telemetry.assembly import RunTelemetry
from quiesce.telemetry.finished import CUT_OFF, ERROR, OUTCOME
from quiesce.telemetry.provider import ProviderTracing
from quiesce.telemetry.tracing import (
    Identifiers,
    Identities,
    OwnTracing,
    context_of,
    context_reader,
    parent_in,
    status_of,
)
from tests.barriers import Visitor
from tests.unit.telemetry.telling import Kept, Telling


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    """Keeps the spans of an application's provider."""
    return InMemorySpanExporter()


@pytest.fixture
def provider(exporter: InMemorySpanExporter) -> Iterator[TracerProvider]:
    """An application's provider, which is nobody's global one."""
    made = TracerProvider(resource=Resource.create({"service.name": "app"}))
    made.add_span_processor(SimpleSpanProcessor(exporter))
    yield made
    made.shutdown()


def link(span: ReadableSpan) -> tuple[int, int]:
    """Return a span's identifiers."""
    known = span.get_span_context()
    assert known is not None
    return known.trace_id, known.span_id


class TestIdentifiers:
    """Identifiers of our own."""

    def test_they_are_of_the_right_size_and_never_zero(self) -> None:
        """128 and 64 bits, as OpenTelemetry has them."""
        identifiers = Identifiers()
        traces = {identifiers.trace() for _ in range(500)}
        spans = {identifiers.span() for _ in range(500)}

        assert len(traces) == len(spans) == 500
        assert all(0 < value < 1 << 128 for value in traces)
        assert all(0 < value < 1 << 64 for value in spans)

    def test_they_do_not_follow_the_run_s_seed(self) -> None:
        """Two runs with one seed have different traces, and their draws are not touched."""
        random.seed(3)
        one, after_one = Identifiers().trace(), random.random()
        random.seed(3)
        two, after_two = Identifiers().trace(), random.random()

        assert one != two
        assert after_one == after_two

    def test_a_forked_child_has_its_own(self) -> None:
        """Parent and child do not draw the same identifiers."""
        identifiers = Identifiers()
        read, write = os.pipe()
        child = os.fork()
        if not child:
            try:
                os.write(write, str(identifiers.trace()).encode())
            finally:
                os._exit(0)
        os.close(write)

        theirs = os.read(read, 100).decode()
        os.waitpid(child, 0)
        os.close(read)

        assert theirs
        assert int(theirs) != identifiers.trace()

    def test_a_cut_keeps_the_identifiers_that_it_was_given_first(self) -> None:
        """A line of the log and the span name the same; old cuts are forgotten."""
        identities = Identities(Identifiers())
        identities.draw("c0", None)
        first = identities.of("c0")
        identities.draw("c0", None)

        assert first is not None
        assert identities.of("c0") == first
        for number in range(1, 80):
            identities.draw(f"c{number}", None)
        assert identities.of("c0") is None
        assert identities.of("c79") is not None


class TestOwn:
    """Finished spans of our own."""

    def test_a_child_is_in_its_parent_s_trace(self) -> None:
        """Also one that comes after its parent's end."""
        tracing = OwnTracing()
        root = tracing.start("a", parent=None, start_ns=10, attributes={"x": 1}, links=[(7, 8)])
        tracing.end(
            root, 20, outcome="completed", attributes={"y": 2}, events=[("e", 15, {})], links=[(9, 9)]
        )
        child = tracing.emit("b", parent=root, start_ns=12, end_ns=11, outcome="failed")

        first, second = tracing.take()

        assert (first.parent_id, first.attributes) == (0, {"x": 1, "y": 2, OUTCOME: "completed"})
        assert (first.links, first.events, first.status) == (((7, 8), (9, 9)), (("e", 15, {}),), "ok")
        assert (second.trace_id, second.parent_id) == root.link
        assert second.span_id == child.span_id
        assert (second.start_ns, second.end_ns) == (12, 12)  # an end before its start is the start
        assert second.status == "error"
        assert tracing.take() == []

    def test_an_end_is_an_end(self) -> None:
        """A span that is ended twice is one span."""
        tracing = OwnTracing()
        root = tracing.start("a", parent=None, start_ns=10)
        tracing.end(root, 20, outcome="failed", error="disk")
        tracing.end(root, 30, outcome="", cut_off=True)

        (span,) = tracing.take()

        assert span.attributes == {OUTCOME: "failed", ERROR: "disk"}
        assert not span.cut_off

    @pytest.mark.parametrize(
        "outcome, status",
        [("completed", "ok"), ("failed", "error"), ("refused", "error"), ("cancelled", ""), ("skipped", "")],
    )
    def test_errors_and_cancellations_are_told_apart(self, outcome: str, status: str) -> None:
        """Only what went wrong is an error."""
        assert status_of(outcome) == status


class TestParent:
    """The application's current span."""

    def test_its_context_is_read_cheaply_and_right(self, provider: TracerProvider) -> None:
        """A slot and a save belong under what the application does at the time."""
        read = context_reader()
        assert read is not None
        with provider.get_tracer("app").start_as_current_span("request") as span:
            assert read() == otel_context.get_current()
            found = parent_in(read())

        assert found is not None
        known = span.get_span_context()
        assert (found.trace_id, found.span_id, found.sampled) == (known.trace_id, known.span_id, True)
        assert parent_in(read()) is None
        assert parent_in(None) is None

    async def test_a_slot_s_parent_is_the_span_around_it_and_not_one_inside(
        self, provider: TracerProvider
    ) -> None:
        """A slot is not attached, so a span that is opened inside it has the slot's parent as its parent."""
        scene = Telling()
        scene.told()  # finds OpenTelemetry
        barrier, tracer = DataPlaneCheckpointBarrier(hub=scene.hub), provider.get_tracer("app")
        with tracer.start_as_current_span("outer") as outer:
            async with barrier.mutation("retry"):
                with tracer.start_as_current_span("inner") as inner:
                    pass

        span = scene.told().one("quiesce.slot")

        assert (span.trace_id, span.parent_id) == (
            outer.get_span_context().trace_id,
            outer.get_span_context().span_id,
        )
        assert isinstance(inner, ReadableSpan)
        assert inner.parent is not None
        assert inner.parent.span_id == outer.get_span_context().span_id
        scene.over()

    @pytest.mark.parametrize("waits, inside", [(False, False), (False, True), (True, False)])
    async def test_a_slot_that_is_cut_off_has_the_parent_that_it_would_have_had(
        self, provider: TracerProvider, *, waits: bool, inside: bool
    ) -> None:
        """The span around it, also where the task has opened one inside; whether it is held or waits."""
        scene = Telling(clock=time.perf_counter_ns)
        scene.told()  # finds OpenTelemetry
        barrier, tracer = DataPlaneCheckpointBarrier(hub=scene.hub), provider.get_tracer("app")
        opened: list[trace.Span] = []
        hangs = asyncio.Event()

        async def hang() -> None:
            with tracer.start_as_current_span("outer") as outer:
                opened.append(outer)
                async with barrier.mutation("retry"):
                    if not inside:
                        await hangs.wait()
                    with tracer.start_as_current_span("inner"):
                        await hangs.wait()

        window = Visitor([], "window", barrier.checkpoint())
        await asyncio.sleep(0)
        if not waits:
            window.leave()
            await window.task
        task = asyncio.create_task(hang())
        await asyncio.sleep(0.01)
        scene.over()

        slot, (outer,) = scene.kept.one("quiesce.slot"), opened
        assert slot.cut_off
        assert (slot.trace_id, slot.parent_id) == (
            outer.get_span_context().trace_id,
            outer.get_span_context().span_id,
        )
        hangs.set()
        window.leave()
        await asyncio.gather(window.task, task)

    async def test_a_slot_of_no_span_is_cut_off_as_a_root(self, provider: TracerProvider) -> None:
        """And a span that was opened inside it is not above it."""
        scene = Telling(clock=time.perf_counter_ns)
        scene.told()
        barrier, tracer = DataPlaneCheckpointBarrier(hub=scene.hub), provider.get_tracer("app")
        hangs = asyncio.Event()

        async def hang() -> None:
            async with barrier.mutation("retry"):
                with tracer.start_as_current_span("inner"):
                    await hangs.wait()

        task = asyncio.create_task(hang())
        await asyncio.sleep(0.01)

        assert scene.over().one("quiesce.slot").parent_id == 0
        hangs.set()
        await task

    def test_what_is_no_task_of_asyncio_s_has_no_context(self) -> None:
        """A barrier of somebody's own may name anything, or nothing."""
        assert context_of(None) is None
        assert context_of(cast("asyncio.Task[None]", SimpleNamespace(_fut_waiter=object()))) is None

    async def test_a_window_s_trace_is_the_application_s_too(self, provider: TracerProvider) -> None:
        """And what the log names is the span that is made."""
        scene = Telling()
        scene.told()
        barrier = DataPlaneCheckpointBarrier(hub=scene.hub, window_ids=lambda: "cut")
        with provider.get_tracer("app").start_as_current_span("outer") as outer:
            async with barrier.checkpoint():
                named = scene.run.spans.identities.of("cut")

        window = scene.told().one("quiesce.window")

        assert (window.trace_id, window.span_id) == named
        assert (window.trace_id, window.parent_id) == (
            outer.get_span_context().trace_id,
            outer.get_span_context().span_id,
        )
        scene.over()


class TestProvider:
    """Real spans of the application's provider."""

    def test_times_links_events_and_status_are_ours(
        self, provider: TracerProvider, exporter: InMemorySpanExporter
    ) -> None:
        """Given explicitly; the parent is the one that is named, whatever is current."""
        tracing = ProviderTracing(provider, "1.2")
        with provider.get_tracer("app").start_as_current_span("unrelated"):
            root = tracing.start("a", parent=None, start_ns=10, attributes={"x": 1}, links=[(7, 8)])
            child = tracing.start("b", parent=root, start_ns=11)
        tracing.end(child, 12, outcome="failed", error="disk")
        tracing.end(root, 20, outcome="completed", events=[("e", 15, {"k": 1})], links=[(9, 9)])
        tracing.end(root, 30, outcome="failed")
        late = tracing.emit("c", parent=root, start_ns=21, end_ns=22, outcome="cancelled")
        cut = tracing.start("d", parent=root, start_ns=23)
        tracing.end(cut, 24, outcome="", cut_off=True)

        found = {span.name: span for span in exporter.get_finished_spans()}

        a = found["a"]
        assert (a.start_time, a.end_time, a.parent, link(a)) == (10, 20, None, root.link)
        assert [(known.context.trace_id, known.context.span_id) for known in a.links] == [(7, 8), (9, 9)]
        assert [(event.name, event.timestamp) for event in a.events] == [("e", 15)]
        assert (a.attributes or {})["x"] == 1
        assert (a.status.status_code, a.kind) == (StatusCode.OK, SpanKind.INTERNAL)
        b = found["b"]
        assert b.parent is not None
        assert (b.parent.trace_id, b.parent.span_id) == root.link
        assert (b.status.status_code, b.status.description) == (StatusCode.ERROR, "disk")
        c = found["c"]
        assert c.parent is not None
        assert c.parent.span_id == root.span_id
        assert link(c) == late.link
        assert c.status.status_code is StatusCode.UNSET
        assert (found["d"].attributes or {})[CUT_OFF] is True
        assert tracing.take() == []

    async def test_a_run_s_spans_go_to_the_provider_and_nowhere_else(
        self, provider: TracerProvider, exporter: InMemorySpanExporter
    ) -> None:
        """Slots and windows, linked, under the application's span; its own processors export them."""
        hub = Hub(strict=True)
        run = RunTelemetry(hub, provider=provider, budget=0)
        run.start(thread=False)
        run.converter.convert()
        barrier = DataPlaneCheckpointBarrier(hub=hub)
        with provider.get_tracer("app").start_as_current_span("outer") as outer:
            async with barrier.mutation("retry"):
                pass
            async with barrier.checkpoint():
                pass
        run.close()

        found = {span.name: span for span in exporter.get_finished_spans()}

        assert set(found) == {
            "outer",
            "quiesce.slot",
            "quiesce.window",
            "quiesce.checkpoint.drain",
            "quiesce.checkpoint.exclusive",
        }
        assert {link(span)[0] for span in found.values()} == {outer.get_span_context().trace_id}
        slot = found["quiesce.slot"]
        assert slot.parent is not None
        assert slot.parent.span_id == outer.get_span_context().span_id
        assert slot.resource.attributes["service.name"] == "app"
        assert {
            (span.instrumentation_scope.name, span.instrumentation_scope.version)
            for span in found.values()
            if span.instrumentation_scope is not None and span.name != "outer"
        } == {("quiesce", quiesce.__version__)}
        assert run.totals()["exported"] == 4
        assert run.converter.statistics().errors == 0

    def test_spans_that_the_provider_does_not_sample_are_counted_as_that(self) -> None:
        """They can be nobody's exemplar."""
        hub = Hub(strict=True)
        run = RunTelemetry(hub, provider=TracerProvider(sampler=ALWAYS_OFF), budget=0)
        run.start(thread=False)
        hub.fire("slot_closed", "retry", 0, 100, "completed", 1)
        run.converter.convert()

        assert run.totals()["sampled"] == 1
        assert run.totals()["exported"] == 0
        buckets = run.observer.slots["retry"].hold.lit_buckets()
        assert not any(exemplar for _, _, exemplar in buckets)
        run.close()

    def test_nobody_s_global_provider_is_touched(self) -> None:
        """Making spans of our own sets nothing up."""
        before = trace.get_tracer_provider()
        scene = Telling()
        scene.hub.fire("slot_closed", "retry", 0, 100, "completed", 1)
        scene.over()

        assert trace.get_tracer_provider() is before

    async def test_a_recorder_beside_the_provider_is_given_the_same_spans(
        self, provider: TracerProvider, exporter: InMemorySpanExporter
    ) -> None:
        """With the provider's identifiers, so that both tell of one trace."""
        hub, kept = Hub(strict=True), Kept()
        run = RunTelemetry(hub, provider=provider, sinks={"kept": kept}, budget=0)
        run.start(thread=False)
        barrier = DataPlaneCheckpointBarrier(hub=hub)
        async with barrier.mutation("retry"):
            pass
        async with barrier.checkpoint():
            pass
        run.close()

        theirs = {link(span) for span in exporter.get_finished_spans()}
        assert {(span.trace_id, span.span_id) for span in kept.found} == theirs
        assert len(theirs) == 4
        window = kept.one("quiesce.window")
        assert kept.one("quiesce.checkpoint.drain").parent_id == window.span_id
