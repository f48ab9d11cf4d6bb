"""Spans of our own until the application installs a tracer provider, and spans of that one from then on."""

import asyncio
import atexit
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import quiesce
from quiesce.barrier import DataPlaneCheckpointBarrier
from quiesce.observers import Hub
from quiesce.telemetry import assembly
from quiesce.telemetry.assembly import RunTelemetry
from quiesce.telemetry.following import FollowingTracing
from quiesce.telemetry.tracing import OwnTracing
from tests.unit.telemetry.telling import Kept


class Application:
    """An application that has a provider, or not yet."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()
        self.installed: TracerProvider | None = None

    def install(self) -> None:
        """Install one."""
        self.installed = TracerProvider(shutdown_on_exit=False)
        self.installed.add_span_processor(SimpleSpanProcessor(self.exporter))

    def shut_down(self) -> None:
        """What a provider has called at exit."""

    def find(self) -> Any:  # noqa: ANN401 - any object of OpenTelemetry's API
        """Return it."""
        return self.installed

    def named(self, name: str) -> Any:  # noqa: ANN401 - a span of the SDK
        """Return the only span of that name that was exported."""
        (span,) = [span for span in self.exporter.get_finished_spans() if span.name == name]
        return span


@pytest.fixture
def application() -> Application:
    """One without a provider."""
    return Application()


class TestTracing:
    """Which of the two makes a span."""

    def test_a_span_ends_as_what_it_began_as(self, application: Application) -> None:
        """One that is open when the provider comes is ours; a child that begins later is the provider's, below it."""
        tracing = FollowingTracing(OwnTracing(), application.find, lambda: True)
        tracing.look()
        root = tracing.start("root", parent=None, start_ns=1)
        tracing.emit("early", parent=root, start_ns=2, end_ns=3, outcome="completed")
        application.install()
        tracing.look()

        child = tracing.start("child", parent=root, start_ns=4)
        tracing.emit("grandchild", parent=child, start_ns=5, end_ns=6, outcome="completed")
        tracing.end(child, 7, outcome="completed")
        tracing.end(root, 8, outcome="completed")

        found = {span.name: span for span in tracing.take()}
        assert {span.name for span in application.exporter.get_finished_spans()} == {"child", "grandchild"}
        assert application.named("child").parent.span_id == root.span_id
        assert application.named("child").context.trace_id == root.trace_id
        assert application.named("grandchild").parent.span_id == child.span_id
        assert found.keys() == {"root", "early", "child", "grandchild"}
        assert found["early"].parent_id == found["child"].parent_id == root.span_id
        assert {span.trace_id for span in found.values()} == {root.trace_id}

    def test_sinks_that_want_no_copies_are_given_what_is_ours_alone(self, application: Application) -> None:
        """The provider's spans are exported by the provider."""
        tracing = FollowingTracing(OwnTracing(), application.find, lambda: False)
        root = tracing.start("root", parent=None, start_ns=1)
        application.install()
        tracing.look()
        tracing.emit("late", parent=root, start_ns=2, end_ns=3, outcome="completed")
        tracing.end(root, 8, outcome="completed")

        assert [span.name for span in tracing.take()] == ["root"]
        assert application.named("late")


class TestRun:
    """A run that is watched before its application has set OpenTelemetry up."""

    async def test_from_then_on_the_collector_is_the_provider_s(self, application: Application) -> None:
        """A recorder is given copies, a collector of ours nothing more; each span has one fate."""
        recorder, collector = Kept(), Kept()
        hub = Hub(strict=True)
        run = RunTelemetry(
            hub,
            sinks={"recorder": recorder, "otlp": collector},
            find_provider=application.find,
            withheld=("otlp",),
            budget=0,
        )
        run.start(thread=False)
        barrier = DataPlaneCheckpointBarrier(hub=hub)
        async with barrier.mutation("retry"):
            pass
        run.converter.convert()
        application.install()
        for _ in range(2):
            async with barrier.mutation("admission"):
                pass
        run.converter.convert()
        assert run.pipeline.flush(10)

        kinds = [span.attributes["quiesce.kind"] for span in recorder.found]
        assert kinds == ["retry", "admission", "admission"]
        assert [span.attributes["quiesce.kind"] for span in collector.found] == ["retry"]
        assert {span.context.span_id for span in application.exporter.get_finished_spans()} == {
            span.span_id for span in recorder.found[1:]
        }
        totals = run.totals()
        assert totals["exported"] == 3
        assert totals["dropped"] == totals["failed"] == totals["sampled"] == 0
        run.close(10)

    async def test_a_provider_that_came_a_moment_before_the_end_is_used(
        self, application: Application, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its own handler at exit was registered after ours, so it is looked for before any of them is called."""
        order: list[str] = []
        monkeypatch.setattr(atexit, "register", lambda call: order.append(call.__name__))
        hub = Hub(strict=True)
        run = RunTelemetry(hub, sinks={"recorder": Kept()}, find_provider=application.find, budget=0)
        run.start(thread=False)

        def close_telemetry() -> None:
            run.close(10)

        run.end_with(close_telemetry)
        application.install()
        atexit.register(application.shut_down)
        async with DataPlaneCheckpointBarrier(hub=hub).mutation("retry"):
            pass

        assembly.look_for_providers()

        # The last one is called first.
        assert order == ["close_telemetry", "shut_down", "close_telemetry"]
        run.close(10)
        assert application.named("quiesce.slot")

    async def test_exemplars_name_the_provider_s_spans_without_any_sink_left(
        self, application: Application
    ) -> None:
        """Where the only sink is withheld."""
        hub = Hub(strict=True)
        run = RunTelemetry(
            hub, sinks={"otlp": Kept()}, find_provider=application.find, withheld=("otlp",), budget=0
        )
        run.start(thread=False)
        application.install()
        barrier = DataPlaneCheckpointBarrier(hub=hub)
        async with barrier.mutation("retry"):
            pass
        run.converter.convert()

        hold = run.recorder.numbers["retry"].hold
        assert application.named("quiesce.slot").instrumentation_scope.version == quiesce.__version__
        (exemplar,) = [bucket[2] for bucket in hold.lit_buckets() if bucket[2] is not None]
        assert exemplar.labels["span_id"] == f"{application.named('quiesce.slot').context.span_id:016x}"
        run.close(10)

    async def test_a_provider_that_comes_late_is_followed_without_any_sink(
        self, application: Application, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Slots are counted from the beginning, and have spans from then on."""
        monkeypatch.setattr(assembly, "_LOOK_SECONDS", 0.01)
        hub = Hub(strict=True)
        run = RunTelemetry(hub, find_provider=application.find, budget=0)
        run.start()
        barrier = DataPlaneCheckpointBarrier(hub=hub)
        async with barrier.mutation("retry"):
            pass
        assert run.recorder.position == 0
        application.install()
        await asyncio.to_thread(run.awaiting.join, 10)
        async with barrier.mutation("admission"):
            pass
        assert await asyncio.to_thread(run.converter.flush, 10)

        assert application.named("quiesce.slot").attributes["quiesce.kind"] == "admission"
        assert run.observer.book.closed == 2
        assert run.totals()["exported"] == 1
        run.close(10)

    def test_a_run_that_ends_stops_looking(
        self, application: Application, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """And makes nothing of what was open."""
        monkeypatch.setattr(assembly, "_LOOK_SECONDS", 0.01)
        run = RunTelemetry(Hub(strict=True), find_provider=application.find, budget=0)
        run.start()
        run.close(10)
        application.install()

        run.awaiting.join(10)

        assert not run.awaiting.is_alive()
        assert application.exporter.get_finished_spans() == ()
