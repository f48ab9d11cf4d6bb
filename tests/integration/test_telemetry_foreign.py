"""A program that uses Quiesce's barrier and OpenTelemetry in its own way, switched on from outside alone."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from quiesce.telemetry.finished import FinishedSpan
from quiesce.telemetry.recording import Recording
from tests.otlp_receiver import Received, http_receiver

PROGRAM = '''
    """Trains nothing, with a barrier, a tracer provider, a registry and structlog, all of its own."""
    import asyncio, json, logging, pathlib, random, sys
    import prometheus_client, structlog
    from opentelemetry import trace
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult

    class Lines(SpanExporter):
        def export(self, spans):
            with open("spans.jsonl", "a") as out:
                for span in spans:
                    out.write(span.to_json(indent=None) + "\\n")
            return SpanExportResult.SUCCESS

    def install():
        provider = TracerProvider(resource=Resource({"service.name": "mine"}))
        provider.add_span_processor(SimpleSpanProcessor(Lines()))
        trace.set_tracer_provider(provider)
        return provider

    EARLY
    structlog.configure(processors=[structlog.processors.JSONRenderer()], cache_logger_on_first_use=False)
    mine = prometheus_client.Counter("mine", "Mine")
    random.seed(7)

    def state():
        registry = prometheus_client.REGISTRY
        return [
            repr(structlog.get_config()["processors"]),
            sorted(registry._names_to_collectors), [repr(h) for h in logging.getLogger().handlers],
            logging.getLogger().level, repr(sys.excepthook),
        ]

    before = state()
    from quiesce import DataPlaneCheckpointBarrier

    barrier = DataPlaneCheckpointBarrier()
    LATE
    tracer = trace.get_tracer("mine")

    async def commit(kind, seconds):
        with tracer.start_as_current_span("rollout"):
            async with barrier.mutation(kind):
                with tracer.start_as_current_span("inside"):
                    await asyncio.sleep(seconds)

    async def main():
        with tracer.start_as_current_span("training"):
            await asyncio.gather(*(asyncio.create_task(commit("group_commit", 0.2)) for _ in range(3)))
            async with barrier.checkpoint():
                await asyncio.sleep(0.05)

    asyncio.run(main())
    mine.inc()
    structlog.get_logger().info("done")
    same = before == state() and trace.get_tracer_provider() is provider
    processors = len(provider._active_span_processor._span_processors)
    print(json.dumps({"same": same, "processors": processors, "random": random.random()}))
'''


class Foreign(NamedTuple):
    """What the program left behind.

    Attributes:
        told: What it printed last.
        spans: What its own provider exported, by name.
        recorded: What the recorder has.
        received: What a collector got that only Quiesce was told of.
        errors: Its standard error.
        plain: What it printed last when nothing was switched on.
    """

    told: dict[str, Any]
    spans: dict[str, list[dict[str, Any]]]
    recorded: list[FinishedSpan]
    received: Received
    errors: str
    plain: dict[str, Any]


INSTALL = "provider = install()"


@pytest.fixture(scope="module", params=["EARLY", "LATE"])
def foreign(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Foreign]:
    """The program, run once by ``quiesce exec``; its provider is there before its barrier, or comes after it."""
    folder = tmp_path_factory.mktemp("foreign")
    (folder / "train.py").write_text(
        textwrap.dedent(PROGRAM.replace(request.param, INSTALL).replace("EARLY", "").replace("LATE", ""))
    )
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("QUIESCE_", "OTEL_"))}
    plain = subprocess.run(
        [sys.executable, "train.py"],
        cwd=folder,
        env=clean,
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    (folder / "spans.jsonl").unlink()
    with http_receiver() as (url, received):
        done = subprocess.run(
            [
                *(sys.executable, "-m", "quiesce.cli.main", "exec", "--port", "0", "--run-dir", "run"),
                *("--otlp", url, "--", sys.executable, "train.py"),
            ],
            cwd=folder,
            env=clean,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        spans: dict[str, list[dict[str, Any]]] = {}
        for line in (folder / "spans.jsonl").read_text().splitlines():
            span = json.loads(line)
            spans.setdefault(span["name"], []).append(span)
        recorded = list(Recording.open(folder / "run").spans())
        *said, last = done.stdout.splitlines()
        assert [json.loads(line) for line in said] == [
            {"event": "done"}
        ]  # by its own structlog, and nothing else
        as_ever = json.loads(plain.stdout.splitlines()[-1])
        yield Foreign(json.loads(last), spans, recorded, received, done.stderr, as_ever)


def identity(span: dict[str, Any]) -> tuple[int, int]:
    """Return trace and span identifier of what the SDK wrote."""
    return int(span["context"]["trace_id"], 16), int(span["context"]["span_id"], 16)


def test_its_provider_is_given_our_spans(foreign: Foreign) -> None:
    """Each slot and the window, in the program's own trace and with its own resource."""
    (training,) = foreign.spans["training"]
    ours = [span for name, found in foreign.spans.items() for span in found if name.startswith("quiesce.")]

    assert {span["name"] for span in ours} == {
        "quiesce.slot",
        "quiesce.window",
        "quiesce.checkpoint.drain",
        "quiesce.checkpoint.exclusive",
    }
    assert {span["context"]["trace_id"] for span in ours} == {training["context"]["trace_id"]}
    assert {span["resource"]["attributes"]["service.name"] for span in ours} == {"mine"}
    (window,) = foreign.spans["quiesce.window"]
    assert window["parent_id"] == training["context"]["span_id"]
    rollouts = {span["context"]["span_id"] for span in foreign.spans["rollout"]}
    assert {span["parent_id"] for span in foreign.spans["quiesce.slot"]} == rollouts


def test_its_own_spans_are_what_they_were(foreign: Foreign) -> None:
    """A slot is never the current span, so what is opened inside one has the slot's parent as its parent."""
    rollouts = {span["context"]["span_id"] for span in foreign.spans["rollout"]}

    assert len(rollouts) == len(foreign.spans["inside"]) == 3
    assert {span["parent_id"] for span in foreign.spans["inside"]} == rollouts
    assert not [key for span in foreign.spans["inside"] for key in span["attributes"]]


def test_nothing_of_it_was_reconfigured(foreign: Foreign) -> None:
    """Neither the global provider, nor the registry, structlog, logging or the random numbers."""
    assert foreign.told["same"]
    assert foreign.told["processors"] == 1
    assert foreign.told == foreign.plain
    assert re.fullmatch(r"quiesce exec: recording to run; .*\n", foreign.errors)


def test_the_recorder_has_copies(foreign: Foreign) -> None:
    """The same spans of ours with the same identifiers and times, and none of the program's."""
    ours = [span for name, found in foreign.spans.items() for span in found if name.startswith("quiesce.")]

    assert sorted((span.trace_id, span.span_id) for span in foreign.recorded) == sorted(map(identity, ours))
    parents = {identity(span): int(span["parent_id"], 16) for span in ours}
    assert {(span.trace_id, span.span_id): span.parent_id for span in foreign.recorded} == parents


def test_no_span_is_exported_twice(foreign: Foreign) -> None:
    """The provider exports them, so the collector that Quiesce was told of gets the metrics alone."""
    assert foreign.received.spans() == []
    assert "quiesce_mutation_hold_seconds" in foreign.received.metrics()


def test_what_lasts_is_not_timed_as_nothing(foreign: Foreign) -> None:
    """A slot around an await of 0.2 s has a span, and an observation, of at least that."""
    slots = [span for span in foreign.recorded if span.name == "quiesce.slot"]
    points = foreign.received.metrics()["quiesce_mutation_hold_seconds"].histogram.data_points
    held = {
        known.value.string_value: point
        for point in points
        for known in point.attributes
        if known.key == "kind"
    }

    assert len(slots) == 3
    assert min(span.end_ns - span.start_ns for span in slots) >= 199_000_000  # two clocks
    assert held["group_commit"].count == 3
    assert held["group_commit"].sum >= 3 * 0.2


CUT_OFF = """
    import asyncio, os, signal
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter
    from quiesce import DataPlaneCheckpointBarrier

    provider = TracerProvider()
    line = lambda span: span.to_json(indent=None) + "\\n"
    provider.add_span_processor(BatchSpanProcessor(ConsoleSpanExporter(formatter=line), schedule_delay_millis=600_000))
    trace.set_tracer_provider(provider)

    async def main():
        async with DataPlaneCheckpointBarrier().checkpoint():
            os.kill(os.getpid(), signal.SIGTERM)

    asyncio.run(main())
"""


def executed(folder: Path, program: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a program under ``quiesce exec`` to its end."""
    (folder / "train.py").write_text(textwrap.dedent(program))
    return subprocess.run(
        [
            *(sys.executable, "-m", "quiesce.cli.main", "exec", "--port", "0", *options, "--"),
            *(sys.executable, "train.py"),
        ],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_a_provider_that_batches_has_what_was_open_at_sigterm(tmp_path: Path) -> None:
    """Its own end, at which it would send its batch, never comes."""
    done = executed(tmp_path, CUT_OFF, "--no-record")

    assert done.returncode == -signal.SIGTERM, done.stderr
    spans = {span["name"]: span for span in map(json.loads, done.stdout.splitlines())}
    assert spans["quiesce.window"]["attributes"]["quiesce.cut_off"] is True
    assert done.stderr == ""


AT_THE_END = """
    import asyncio
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter
    from quiesce import DataPlaneCheckpointBarrier

    barrier = DataPlaneCheckpointBarrier()
    provider = TracerProvider()
    line = lambda span: span.to_json(indent=None) + "\\n"
    provider.add_span_processor(BatchSpanProcessor(ConsoleSpanExporter(formatter=line)))
    trace.set_tracer_provider(provider)

    async def main():
        async with barrier.mutation("retry"):
            pass

    asyncio.run(main())
"""


def test_a_provider_of_a_program_that_ends_at_once_has_its_slot(tmp_path: Path) -> None:
    """It comes after Quiesce has looked for the first time, and shuts itself down before the next time."""
    done = executed(tmp_path, AT_THE_END, "--run-dir", "run")

    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["name"] for line in done.stdout.splitlines()] == ["quiesce.slot"]


UNUSABLE = """
    import asyncio, threading, time
    from opentelemetry import trace
    from quiesce import DataPlaneCheckpointBarrier

    class Unusable(trace.TracerProvider):
        def get_tracer(self, *args, **kwargs):
            raise RuntimeError("not today")

    barrier = DataPlaneCheckpointBarrier()
    trace.set_tracer_provider(Unusable())

    async def main():
        async with barrier.checkpoint():
            pass

    main_thread = threading.main_thread()

    def last():
        main_thread.join()
        time.sleep(0.1)
        print("finished")

    threading.Thread(target=last).start()
    asyncio.run(main())
"""


def test_a_provider_that_cannot_be_used_costs_the_program_nothing(tmp_path: Path) -> None:
    """Its threads are waited for as ever, and spans are made without it."""
    done = executed(tmp_path, UNUSABLE, "--run-dir", "run")

    assert (done.returncode, done.stdout) == (0, "finished\n"), done.stderr
    assert done.stderr.count("the application's tracer provider could not be used") == 1
    recorded = {span.name for span in Recording.open(tmp_path / "run").spans()}
    assert {"quiesce.window", "quiesce.checkpoint.exclusive"} <= recorded
