"""OTLP: configuration, encoding, both transports against real servers, and the exporting process."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans as stock_encode
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, TraceFlags
from opentelemetry.trace.status import Status, StatusCode
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info

from quiesce.errors import ConfigError, ExtraMissingError
from quiesce.observers import Hub
from quiesce.telemetry.enable import enable_metrics
from quiesce.telemetry.finished import FinishedSpan
from quiesce.telemetry.sinks import SinkContext
from quiesce_exporters.otlp import OtlpSink
from quiesce_exporters.otlp_config import Endpoint, OtlpConfig, read_config
from quiesce_exporters.otlp_encoding import encode_metrics, encode_spans
from quiesce_exporters.otlp_process import ExportProcess, ProcessLostError
from quiesce_exporters.otlp_transport import OtlpSendError
from tests.alert_stack import free_port
from tests.otlp_receiver import Received, grpc_receiver, http_receiver

CONTEXT = SinkContext("r1", "controller", None, {"service.name": "r1"}, {})
TRACE = 0x0123456789ABCDEF0123456789ABCDEF


def spans(count: int = 3) -> list[FinishedSpan]:
    """Make spans with everything that a span can have."""
    return [
        FinishedSpan(
            "quiesce.slot",
            TRACE,
            number + 1,
            0 if number == 0 else 1,
            1_700_000_000_000_000_000 + number,
            1_700_000_000_000_000_500 + number,
            {"quiesce.kind": "retry", "quiesce.n": number, "quiesce.x": 0.5, "quiesce.on": True},
            links=((TRACE, 99),),
            events=(("gave up", 1_700_000_000_000_000_100, {"why": "drain"}),),
            status=("", "ok", "error")[number % 3],
        )
        for number in range(count)
    ]


def readable(span: FinishedSpan) -> ReadableSpan:
    """Return the same span as OpenTelemetry's SDK would hold it."""

    def context(span_id: int) -> SpanContext:
        return SpanContext(TRACE, span_id, is_remote=False, trace_flags=TraceFlags(TraceFlags.SAMPLED))

    codes = {"": StatusCode.UNSET, "ok": StatusCode.OK, "error": StatusCode.ERROR}
    return ReadableSpan(
        name=span.name,
        context=context(span.span_id),
        parent=context(span.parent_id) if span.parent_id else None,
        resource=Resource({"service.name": "r1"}),
        attributes=dict(span.attributes),
        events=[Event(name, dict(attributes), when) for name, when, attributes in span.events],
        links=[Link(context(span_id)) for _, span_id in span.links],
        kind=SpanKind.INTERNAL,
        status=Status(codes[span.status]),
        start_time=span.start_ns,
        end_time=span.end_ns,
        instrumentation_scope=InstrumentationScope("quiesce", "0.1.0"),
    )


def without_flags(message: object) -> object:
    """Return a message as a dictionary without the flags that only the stock encoder sets."""
    if isinstance(message, dict):
        return {name: without_flags(value) for name, value in message.items() if name != "flags"}
    return [without_flags(item) for item in message] if isinstance(message, list) else message


def test_the_encoder_writes_what_the_stock_encoder_writes() -> None:
    """Field by field, for spans with attributes of every type, links, events and each status."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    batch = spans(6)
    ours = ExportTraceServiceRequest.FromString(
        encode_spans(batch, {"service.name": "r1"}, scope="quiesce", version="0.1.0")
    )
    stock = stock_encode([readable(span) for span in batch])
    assert without_flags(MessageToDict(ours)) == without_flags(MessageToDict(stock))


def test_an_info_is_named_as_it_is_scraped() -> None:
    """No collector would put its ending back."""
    registry = CollectorRegistry()
    Info("run", "The run", registry=registry).info({"engine": "e"})

    request = encode_metrics(registry.collect(), 2.0, 1.0, {}, scope="s", version="1")

    (metric,) = ExportMetricsServiceRequest.FromString(request).resource_metrics[0].scope_metrics[0].metrics
    assert metric.name == "run_info"
    assert metric.gauge.data_points[0].as_double == 1


def test_metrics_keep_their_names_units_buckets_and_counts() -> None:
    """A collector's Prometheus exporter makes the scrape's names of them again."""
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

    registry = CollectorRegistry()
    Counter("prompts_read_total", "read", registry=registry).inc(3)
    Gauge("cursor", "cursor", ["run"], registry=registry).labels("r1").set(-1)
    histogram = Histogram("wait", "wait", unit="seconds", buckets=(0.1, 1.0), registry=registry)
    for seconds in (0.05, 0.5, 5.0, 0.5):
        histogram.observe(seconds)
    request = ExportMetricsServiceRequest.FromString(
        encode_metrics(registry.collect(), 12.0, 2.0, {}, scope="quiesce", version="0.1.0")
    )
    metrics = {metric.name: metric for metric in request.resource_metrics[0].scope_metrics[0].metrics}
    assert metrics["prompts_read"].sum.data_points[0].as_double == 3
    assert metrics["prompts_read"].sum.is_monotonic
    assert metrics["prompts_read"].sum.data_points[0].start_time_unix_nano == 2_000_000_000
    assert metrics["cursor"].gauge.data_points[0].as_double == -1
    point = metrics["wait_seconds"].histogram.data_points[0]
    assert metrics["wait_seconds"].unit == "s"
    assert list(point.explicit_bounds) == [0.1, 1.0]
    assert list(point.bucket_counts) == [1, 2, 1]
    assert point.count == 4
    assert point.sum == pytest.approx(6.05)


@pytest.mark.parametrize(
    "env, url",
    [
        ({}, "http://localhost:4318/v1/traces"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:1/"}, "http://c:1/v1/traces"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "c:1"}, "http://c:1/v1/traces"),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:1/x"}, "http://c:1/x"),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}, "http://localhost:4317"),
        (
            {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc", "OTEL_EXPORTER_OTLP_ENDPOINT": "https://c:1"},
            "https://c:1",
        ),
    ],
)
def test_endpoints_follow_the_specification(env: dict[str, str], url: str) -> None:
    """A common http endpoint gets the signal's path, a signal's own is taken as it is."""
    config = read_config(env)
    assert config.traces is not None
    assert config.traces.url == url


def test_the_environment_can_switch_signals_off() -> None:
    """By OpenTelemetry's own switches."""
    assert read_config({"OTEL_SDK_DISABLED": "true"}) == OtlpConfig(None, None)
    only_traces = read_config({"OTEL_METRICS_EXPORTER": "none"})
    assert only_traces.traces is not None
    assert only_traces.metrics is None


@pytest.mark.parametrize(
    "name, value",
    [
        ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/json"),
        ("OTEL_EXPORTER_OTLP_ENDPOINT", "ftp://c"),
        ("OTEL_EXPORTER_OTLP_TIMEOUT", "soon"),
        ("OTEL_EXPORTER_OTLP_COMPRESSION", "brotli"),
        ("OTEL_EXPORTER_OTLP_HEADERS", "authorization"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(name: str, value: str) -> None:
    """And a header's content, which may be a credential, is not repeated."""
    with pytest.raises(ConfigError, match=name) as caught:
        read_config({name: value})
    if name.endswith("HEADERS"):
        assert value not in str(caught.value).removeprefix(name)


@pytest.mark.parametrize(
    "url, compressed",
    [
        ("http://localhost:4318", False),
        ("http://127.0.0.9:4318", False),
        ("http://[::1]:4318", False),
        ("https://collector.example:4318", True),
        ("http://10.0.0.1:4318", True),
    ],
)
def test_what_stays_on_this_machine_is_not_compressed_unless_it_is_to_be(url: str, compressed: bool) -> None:  # noqa: FBT001 - a parameter
    """It takes as long as encoding, and saves nothing there."""
    unsaid = read_config({"OTEL_EXPORTER_OTLP_ENDPOINT": url})
    said = [
        read_config({"OTEL_EXPORTER_OTLP_ENDPOINT": url, "OTEL_EXPORTER_OTLP_COMPRESSION": how})
        for how in ("gzip", "none")
    ]

    assert unsaid.traces is not None
    assert unsaid.traces.gzip is compressed
    assert [config.traces.gzip for config in said if config.traces is not None] == [True, False]


def test_headers_are_decoded_and_kept_out_of_the_representation() -> None:
    """They may hold credentials."""
    config = read_config({"OTEL_EXPORTER_OTLP_HEADERS": "Authorization=Bearer%20abc, x=y"})
    assert config.traces is not None
    assert config.traces.headers == {"authorization": "Bearer abc", "x": "y"}
    assert "abc" not in repr(config.traces)


# ---------------------------------------------------------------------------------------------- against servers


Receiver = AbstractContextManager[tuple[str, Received]]


@pytest.fixture(params=["http", "grpc"])
def receiver(request: pytest.FixtureRequest) -> Iterator[tuple[str, str, Received]]:
    """Run a receiver of either kind; gives protocol, URL and what arrives."""
    run: Receiver = http_receiver() if request.param == "http" else grpc_receiver()
    with run as (url, received):
        yield ("http/protobuf" if request.param == "http" else "grpc"), url, received


def config(protocol: str, url: str, *, own_process: bool, timeout: float = 20.0) -> OtlpConfig:
    """Return a configuration for a receiver."""
    read = read_config(
        {
            "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
            "OTEL_EXPORTER_OTLP_ENDPOINT": url,
            "OTEL_EXPORTER_OTLP_TIMEOUT": str(timeout),
            "OTEL_EXPORTER_OTLP_HEADERS": "x-tenant=t1",
        }
    )
    return OtlpConfig(read.traces, read.metrics, own_process)


@pytest.mark.parametrize("own_process", [False, True], ids=["thread", "process"])
def test_spans_arrive_whole_and_in_order(receiver: tuple[str, str, Received], *, own_process: bool) -> None:
    """Over either protocol, from this process or from one of its own, with the headers."""
    protocol, url, received = receiver
    sink = OtlpSink(CONTEXT, config(protocol, url, own_process=own_process))
    try:
        assert (sink.process_id is not None) == own_process
        sink.spans(spans(3))
        sink.spans(spans(2))
    finally:
        sink.close(10.0)
    assert [int.from_bytes(span.span_id, "big") for span in received.spans()] == [1, 2, 3, 1, 2]
    assert received.headers[0]["x-tenant"] == "t1"
    resource = received.requests[0][1].resource_spans[0].resource
    assert {item.key: item.value.string_value for item in resource.attributes}["quiesce.run"] == "r1"


def test_metrics_arrive(receiver: tuple[str, str, Received]) -> None:
    """A snapshot of a registry, over either protocol."""
    protocol, url, received = receiver
    registry = CollectorRegistry()
    Counter("prompts_read_total", "read", registry=registry).inc(3)
    sink = OtlpSink(CONTEXT, config(protocol, url, own_process=False))
    sink.samples(list(registry.collect()), 12.0)
    sink.close(1.0)
    assert received.metrics()["prompts_read"].sum.data_points[0].as_double == 3


@pytest.mark.parametrize("own_process", [False, True], ids=["thread", "process"])
def test_a_refusal_is_told_with_whether_to_try_again(
    receiver: tuple[str, str, Received], *, own_process: bool
) -> None:
    """An overloaded collector is worth another try, a request that it does not understand is not."""
    protocol, url, received = receiver
    sink = OtlpSink(CONTEXT, config(protocol, url, own_process=own_process))
    try:
        for status, retryable in ((503, True), (400, False)):
            received.status = (
                status if protocol != "grpc" else {503: "UNAVAILABLE", 400: "INVALID_ARGUMENT"}[status]
            )
            with pytest.raises(OtlpSendError) as caught:
                sink.spans(spans(1))
            assert caught.value.retryable == retryable
        received.status = None
        sink.spans(spans(1))
    finally:
        sink.close(10.0)


def test_a_port_that_refuses_is_told_at_once() -> None:
    """And is worth another try: the collector may start later."""
    sink = OtlpSink(CONTEXT, config("http/protobuf", f"http://127.0.0.1:{free_port()}", own_process=False))
    with pytest.raises(OtlpSendError, match="refused") as caught:
        sink.spans(spans(1))
    assert caught.value.retryable


@pytest.mark.parametrize("way", ["silent", "endless"])
def test_a_collector_that_never_finishes_costs_the_timeout_and_no_more(way: str) -> None:
    """Whether it says nothing at all, or drips bytes for ever."""
    with http_receiver() as (url, received):
        if way == "silent":
            received.hold.clear()
        received.endless = way == "endless"
        sink = OtlpSink(CONTEXT, config("http/protobuf", url, own_process=False, timeout=0.3))
        with pytest.raises(OtlpSendError, match="timed out"):
            sink.spans(spans(1))
        sink.close(1.0)


def test_an_idle_connection_that_was_closed_is_opened_again() -> None:
    """What a collector does between two batches is no failure."""
    with http_receiver() as (url, received):
        sink = OtlpSink(CONTEXT, config("http/protobuf", url, own_process=False))
        sink.spans(spans(1))
        transport: Any = sink._here._traces  # type: ignore[union-attr] # noqa: SLF001 - to cut the kept connection
        transport._connection.sock.shutdown(2)  # noqa: SLF001 - as above
        sink.spans(spans(1))
        sink.close(1.0)
        assert len(received.spans()) == 2


@pytest.mark.parametrize("receiver", [http_receiver, grpc_receiver], ids=["http", "grpc"])
@pytest.mark.parametrize("own_process", [True, False], ids=["process", "here"])
def test_rejected_spans_are_told_and_said_once(
    own_process: bool,  # noqa: FBT001 - a parameter of the test
    receiver: Any,  # noqa: ANN401 - one of two
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A collector may take a request and reject a part of it; the export process tells of it as this one does."""
    protocol = "grpc" if receiver is grpc_receiver else "http/protobuf"
    with receiver() as (url, received):
        received.rejected = 2
        sink = OtlpSink(CONTEXT, config(protocol, url, own_process=own_process))

        assert sink.spans(spans(3)) == 2
        assert sink.spans(spans(4)) == 2
        received.rejected = 0
        assert sink.spans(spans(5)) == 0
        assert sink.rejected == {"spans": 4}
        assert [record.getMessage() for record in caplog.records] == [
            "the OTLP collector rejected 2 spans; further ones are not said"
        ]
        assert (sink.process_id is not None) == own_process
        sink.close(1.0)


def test_a_lost_process_costs_nothing_but_its_process(caplog: pytest.LogCaptureFixture) -> None:
    """The batch that it did not answer, and every later one, are exported from here."""
    with http_receiver() as (url, received):
        sink = OtlpSink(CONTEXT, config("http/protobuf", url, own_process=True))
        sink.spans(spans(1))
        assert sink.process_id is not None
        os.kill(sink.process_id, signal.SIGKILL)
        sink.spans(spans(2))
        assert sink.process_id is None
        assert len(received.spans()) == 3
        assert "lost" in caplog.text
        sink.close(1.0)


def test_the_process_ends_with_its_parents_pipe() -> None:
    """Closing the sink leaves no process behind, also while a batch hangs in a silent collector."""
    with http_receiver() as (url, received):
        sink = OtlpSink(CONTEXT, config("http/protobuf", url, own_process=True))
        sink.spans(spans(1))
        process = sink.process_id
        received.hold.clear()
        sink.close(0.5)
        assert process is not None
        assert not Path(f"/proc/{process}").exists()


def test_the_process_ends_in_the_middle_of_a_request_when_its_parent_is_gone() -> None:
    """It does not keep anybody waiting who waits for the end of the output."""
    with http_receiver() as (url, received):
        received.hold.clear()
        process = ExportProcess(config("http/protobuf", url, own_process=True), {}, version="1", started=0.0)

        def send() -> None:
            with pytest.raises(ProcessLostError):
                process.spans(spans(1))

        sending = threading.Thread(target=send)
        sending.start()
        received.wait_for(1)
        since = time.monotonic()

        process._child.stdin.close()  # type: ignore[union-attr] # noqa: SLF001 - what the parent's end does; it is a pipe

        sending.join(30)
        assert time.monotonic() - since < 3.0  # the collector's time is twenty seconds
        process.close(10.0)
        assert not Path(f"/proc/{process.pid}").exists()


@pytest.mark.filterwarnings(
    "ignore:.*multi-threaded, use of fork:DeprecationWarning"
)  # forking here is the point
def test_a_forked_child_does_not_keep_the_process_alive() -> None:
    """It has let go of the pipe, so the parent's end is the end."""
    with http_receiver() as (url, _):
        sink = OtlpSink(CONTEXT, config("http/protobuf", url, own_process=True))
        sink.spans(spans(1))
        process = sink.process_id
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(write)
            os.read(read, 1)
            os._exit(0)
        os.close(read)
        since = time.monotonic()

        sink.close(20.0)

        assert time.monotonic() - since < 10.0
        assert not Path(f"/proc/{process}").exists()
        os.close(write)
        assert os.waitpid(child, 0)[1] == 0


def test_a_sink_without_spans_takes_none_and_starts_no_process() -> None:
    """By its setting, or because the environment switches traces off."""
    sink = OtlpSink(CONTEXT._replace(settings={"spans": False}))
    assert not sink.takes_spans
    assert sink.process_id is None
    sink.close(1.0)
    off = OtlpSink(CONTEXT, read_config({"OTEL_TRACES_EXPORTER": "none"}))
    assert not off.takes_spans
    assert off.process_id is None
    off.close(1.0)


def test_a_refusal_names_the_collector_once() -> None:
    """Whichever process it was that was refused."""
    with http_receiver() as (url, received):
        received.status = 503
        sink = OtlpSink(CONTEXT, config("http/protobuf", url, own_process=True))
        with pytest.raises(OtlpSendError) as told:
            sink.spans(spans(1))
        assert str(told.value).count(url) == 1
        sink.close(1.0)


def test_an_unknown_attribute_type_does_not_lose_the_process() -> None:
    """A text of a class of its own travels as the text that it is."""

    class Word(str):
        __slots__ = ()

    with http_receiver() as (url, received):
        sink = OtlpSink(CONTEXT, config("http/protobuf", url, own_process=True))
        sink.spans([spans(1)[0]._replace(attributes={"quiesce.word": Word("w")})])
        assert sink.process_id is not None
        sink.close(5.0)
        assert received.spans()[0].attributes[0].value.string_value == "w"


def test_an_endpoint_is_a_value() -> None:
    """Equal ones compare equal, so that a configuration can be compared."""
    made = [Endpoint("u", "grpc", {}, 1.0, gzip=True, certificate=None) for _ in range(2)]
    assert made[0] == made[1]


@pytest.mark.parametrize(
    "module, protocol, told",
    [
        (
            "opentelemetry.proto.trace.v1.trace_pb2",
            "http/protobuf",
            r"the exporter 'otlp' needs opentelemetry-proto, .*: pip install 'quiesce\[otlp\]'$",
        ),
        (
            "grpc",
            "grpc",
            r"OTLP over gRPC needs grpcio, .*: pip install 'quiesce\[otlp-grpc\]'$",
        ),
    ],
    ids=["proto", "grpc"],
)
def test_without_the_extra_the_message_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, module: str, protocol: str, told: str
) -> None:
    """Asking for the exporter is refused at once, before anything is started, and not with the first batch."""
    hub = Hub()
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", protocol)
    threads = set(threading.enumerate())

    with pytest.raises(ExtraMissingError, match=told):
        enable_metrics("r", 0, hub=hub, run_dir=tmp_path, exporters=["otlp"])

    assert not hub.slot_closed
    assert not set(threading.enumerate()) - threads
    assert list(tmp_path.iterdir()) == []


def test_without_the_extra_a_variable_of_opentelemetrys_costs_one_warning(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It may be set for the whole machine, with another program in mind: what else was asked for is there."""
    hub = Hub()
    monkeypatch.setitem(sys.modules, "opentelemetry.proto.trace.v1.trace_pb2", None)
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")

    with enable_metrics("r", 0, hub=hub, run_dir=tmp_path):
        pass

    (record,) = [record for record in caplog.records if "quiesce[otlp]" in record.getMessage()]
    assert record.levelname == "WARNING"
    assert (tmp_path / "telemetry").is_dir()
    monkeypatch.setenv("QUIESCE_EXPORTERS", "otlp")
    with pytest.raises(ExtraMissingError):
        enable_metrics("r", 0, hub=hub, run_dir=tmp_path)


def test_http_needs_no_grpc(monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra of the one protocol is enough for it."""
    monkeypatch.setitem(sys.modules, "grpc", None)
    with http_receiver() as (url, received):
        sink = OtlpSink(CONTEXT, config("http/protobuf", url, own_process=False))
        sink.spans(spans(1))
        sink.close(5.0)
    assert len(received.spans()) == 1
