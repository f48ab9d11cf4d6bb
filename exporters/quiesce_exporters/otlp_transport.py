"""Sends encoded OTLP requests: over HTTP with one kept connection, or over gRPC.

Rule: one request at a time, each within its deadline from the first byte to the last; whatever goes wrong is one
exception, :class:`OtlpSendError`, which says whether it is worth trying again. Blocks; meant for a thread, or a process, of
its own.
"""

from __future__ import annotations

import contextlib
import gzip
import http.client
import socket
import ssl
import time
from typing import TYPE_CHECKING, Any, Final, Protocol
from urllib.parse import urlsplit

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from quiesce.errors import ExtraMissingError, TelemetryError

if TYPE_CHECKING:
    from quiesce_exporters.otlp_config import Endpoint, Signal

__all__ = ["OtlpSendError", "Transport", "connect"]

_RETRYABLE_STATUS: Final = frozenset({429, 502, 503, 504})
_RETRYABLE_CODES: Final = frozenset(
    {
        "CANCELLED",
        "DEADLINE_EXCEEDED",
        "RESOURCE_EXHAUSTED",
        "ABORTED",
        "OUT_OF_RANGE",
        "UNAVAILABLE",
        "DATA_LOSS",
    }
)
_OK: Final = 200
_LONGEST_ANSWER: Final = 1 << 20
_METHODS: Final = {
    "traces": "/opentelemetry.proto.collector.trace.v1.TraceService/Export",
    "metrics": "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export",
}
_ANSWERS: Final[dict[str, Any]] = {
    "traces": ExportTraceServiceResponse,
    "metrics": ExportMetricsServiceResponse,
}


class OtlpSendError(TelemetryError):
    """Raised when a collector did not take a request."""

    def __init__(self, url: str, problem: str, *, retryable: bool) -> None:
        self.problem = problem
        self.retryable = retryable
        super().__init__(f"the collector at {url} did not take a request: {problem}")


class Transport(Protocol):
    """A way to one endpoint."""

    def send(self, body: bytes) -> int:
        """Send one encoded request and wait for its answer.

        Returns:
            How many spans or data points the collector says it rejected.

        Raises:
            OtlpSendError: If it was not taken within the endpoint's timeout.
        """

    def close(self) -> None:
        """Let go of the connection."""


def connect(endpoint: Endpoint, signal: Signal) -> Transport:
    """Return a transport; nothing is sent yet.

    Raises:
        ExtraMissingError: If the endpoint is a gRPC one and grpcio is not installed.
    """
    return _Http(endpoint, signal) if endpoint.protocol == "http/protobuf" else _Grpc(endpoint, signal)


def _rejected(signal: Signal, answer: bytes) -> int:
    try:
        success = _ANSWERS[signal].FromString(answer).partial_success
    except Exception:  # noqa: BLE001 - protobuf's DecodeError has no public base: an odd answer to a taken request is no failure
        return 0
    return int(success.rejected_spans if signal == "traces" else success.rejected_data_points)


class _Http:
    def __init__(self, endpoint: Endpoint, signal: Signal) -> None:
        self._endpoint = endpoint
        self._signal = signal
        parts = urlsplit(endpoint.url)
        self._host = parts.hostname or ""
        self._port = parts.port
        self._path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        self._context: ssl.SSLContext | None = None
        if parts.scheme == "https":
            cafile = None if endpoint.certificate is None else str(endpoint.certificate)
            self._context = ssl.create_default_context(cafile=cafile)
        self._connection: http.client.HTTPConnection | None = None
        self._socket: socket.socket | None = (
            None  # kept, for http.client forgets it before the answer was read
        )

    def send(self, body: bytes) -> int:
        endpoint = self._endpoint
        headers = {**endpoint.headers, "Content-Type": "application/x-protobuf", "User-Agent": "quiesce"}
        if endpoint.gzip:
            body = gzip.compress(body, compresslevel=1)
            headers["Content-Encoding"] = "gzip"
        deadline = time.monotonic() + endpoint.timeout_seconds
        kept = self._connection is not None
        try:
            try:
                status, answer = self._exchange(body, headers, deadline)
            except (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError):
                # An idle connection that the collector closed meanwhile says nothing about the collector.
                self.close()
                if not kept:
                    raise
                status, answer = self._exchange(body, headers, deadline)
        except (OSError, http.client.HTTPException) as error:
            self.close()
            problem = str(error) or type(error).__name__
            raise OtlpSendError(endpoint.url, problem, retryable=True) from error
        if status != _OK:
            raise OtlpSendError(endpoint.url, f"HTTP {status}", retryable=status in _RETRYABLE_STATUS)
        return _rejected(self._signal, answer)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _exchange(self, body: bytes, headers: dict[str, str], deadline: float) -> tuple[int, bytes]:
        connection = self._connect(_left(deadline))
        self._bound(deadline)
        connection.request("POST", self._path, body, headers)
        self._bound(deadline)
        response = connection.getresponse()
        # Read in pieces, each within what is left: a collector that drips bytes must not hold the thread for ever.
        pieces: list[bytes] = []
        size = 0
        while size <= _LONGEST_ANSWER:
            self._bound(deadline)
            piece = response.read1(_LONGEST_ANSWER)
            if not piece:
                break
            pieces.append(piece)
            size += len(piece)
        else:
            self.close()
        response.close()
        if response.will_close:
            self.close()
        return response.status, b"".join(pieces)

    def _connect(self, timeout: float) -> http.client.HTTPConnection:
        if self._connection is None:
            if self._context is None:
                connection = http.client.HTTPConnection(self._host, self._port, timeout=timeout)
            else:
                connection = http.client.HTTPSConnection(
                    self._host, self._port, timeout=timeout, context=self._context
                )
            connection.connect()
            self._connection = connection
            self._socket = connection.sock
        return self._connection

    def _bound(self, deadline: float) -> None:
        if self._socket is not None:
            self._socket.settimeout(_left(deadline))


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        message = "timed out"
        raise TimeoutError(message)
    return left


class _Grpc:
    def __init__(self, endpoint: Endpoint, signal: Signal) -> None:
        try:
            import grpc
        except ImportError as error:
            raise ExtraMissingError("OTLP over gRPC", "grpcio", "otlp-grpc") from error
        self._grpc: Any = grpc
        self._endpoint = endpoint
        self._signal = signal
        parts = urlsplit(endpoint.url)
        target = parts.netloc
        options = [("grpc.enable_retries", 0)]
        compression = grpc.Compression.Gzip if endpoint.gzip else grpc.Compression.NoCompression
        if parts.scheme == "https":
            roots = None if endpoint.certificate is None else endpoint.certificate.read_bytes()
            channel = grpc.secure_channel(
                target, grpc.ssl_channel_credentials(roots), options=options, compression=compression
            )
        else:
            channel = grpc.insecure_channel(target, options=options, compression=compression)
        self._channel = channel
        # Requests are encoded already, so the method takes and gives bytes.
        self._method = channel.unary_unary(
            _METHODS[signal], request_serializer=None, response_deserializer=None
        )

    def send(self, body: bytes) -> int:
        metadata = tuple(self._endpoint.headers.items())
        try:
            answer = self._method(body, timeout=self._endpoint.timeout_seconds, metadata=metadata)
        except self._grpc.RpcError as error:
            code = error.code().name
            raise OtlpSendError(
                self._endpoint.url, f"gRPC {code}: {error.details()}", retryable=code in _RETRYABLE_CODES
            ) from error
        return _rejected(self._signal, answer)

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self._channel.close()
