"""Receivers of OTLP for tests: real servers on loopback that keep what they were sent, or misbehave on request."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from concurrent import futures
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import grpc
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

REQUESTS: dict[str, Any] = {
    "traces": (ExportTraceServiceRequest, ExportTraceServiceResponse),
    "metrics": (ExportMetricsServiceRequest, ExportMetricsServiceResponse),
}


def spans_of(request: Any) -> list[Any]:  # noqa: ANN401 - protobuf's messages are not typed
    """Return the span messages of a request for traces."""
    return [
        span for resource in request.resource_spans for scope in resource.scope_spans for span in scope.spans
    ]


class Received:
    """What arrived, and how to answer.

    Attributes:
        requests: (signal, request message) in order of arrival.
        headers: The headers of each, lower-case.
        status: HTTP status, or name of a gRPC code, to answer with; None is success.
        rejected: How many spans or points to report as rejected.
        hold: While it is cleared, nobody is answered.
        endless: Answer byte after byte, for ever.
        keep: Keep requests; a test of what is left behind has them counted only.
        arrived: How many spans have arrived.
    """

    def __init__(self) -> None:
        self.requests: list[tuple[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.status: int | str | None = None
        self.rejected = 0
        self.hold = threading.Event()
        self.hold.set()
        self.endless = False
        self.keep = True
        self.arrived = 0
        self.over = threading.Event()
        self._changed = threading.Condition()

    def take(self, signal: str, message: object, headers: dict[str, str]) -> None:
        """Keep a request, then wait until it may be answered."""
        with self._changed:
            if signal == "traces":
                self.arrived += len(spans_of(message))
            if self.keep:
                self.requests.append((signal, message))
                self.headers.append(headers)
            self._changed.notify_all()
        self.hold.wait()

    def wait_for(self, count: int, seconds: float = 20.0) -> None:
        """Wait until so many requests have arrived."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.requests) >= count, seconds), self.requests

    def spans(self) -> list[Any]:
        """Return every span message that arrived."""
        return [
            span
            for signal, request in list(self.requests)
            if signal == "traces"
            for span in spans_of(request)
        ]

    def metrics(self) -> dict[str, Any]:
        """Return the metric messages of the last request for metrics, by name."""
        last = [request for signal, request in list(self.requests) if signal == "metrics"][-1]
        return {
            metric.name: metric
            for resource in last.resource_metrics
            for scope in resource.scope_metrics
            for metric in scope.metrics
        }

    def answer(self, signal: str) -> bytes:
        """Return the encoded answer."""
        message = REQUESTS[signal][1]()
        if self.rejected:
            name = "rejected_spans" if signal == "traces" else "rejected_data_points"
            setattr(message.partial_success, name, self.rejected)
        return bytes(message.SerializeToString())


@contextmanager
def http_receiver() -> Iterator[tuple[str, Received]]:
    """Run a receiver of OTLP over HTTP; yields its base URL and what it got."""
    received = Received()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            signal = self.path.rpartition("/")[2]
            headers = {name.lower(): value for name, value in self.headers.items()}
            received.take(signal, REQUESTS[signal][0].FromString(body), headers)
            answer = received.answer(signal)
            status = 200 if received.status is None else int(received.status)
            self.send_response(status)
            if received.endless:
                self.end_headers()
                while not received.over.wait(0.05):
                    self.wfile.write(b"x")
                return
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's signature
            """Say nothing."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: object, client_address: object) -> None:
            """Say nothing of a client that went away."""

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", received
    finally:
        received.over.set()
        received.hold.set()
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def grpc_receiver() -> Iterator[tuple[str, Received]]:
    """Run a receiver of OTLP over gRPC; yields its URL and what it got."""
    received = Received()

    def method(signal: str) -> Any:  # noqa: ANN401 - grpc is not typed
        def handle(request: Any, context: Any) -> Any:  # noqa: ANN401 - as above
            received.take(signal, request, dict(context.invocation_metadata()))
            if received.status is not None:
                context.abort(getattr(grpc.StatusCode, str(received.status)), "as the test wants it")
            return REQUESTS[signal][1].FromString(received.answer(signal))

        return grpc.unary_unary_rpc_method_handler(
            handle,
            request_deserializer=REQUESTS[signal][0].FromString,
            response_serializer=REQUESTS[signal][1].SerializeToString,
        )

    server = grpc.server(futures.ThreadPoolExecutor(max_workers=4))
    for signal, service in (
        ("traces", "opentelemetry.proto.collector.trace.v1.TraceService"),
        ("metrics", "opentelemetry.proto.collector.metrics.v1.MetricsService"),
    ):
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(service, {"Export": method(signal)}),)
        )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"http://127.0.0.1:{port}", received
    finally:
        received.hold.set()
        server.stop(None).wait()
