"""A receiver of OTLP over http on loopback that counts spans and keeps nothing: a process of its own.

Rule: it is told nothing and asks for nothing but its standard input's end, at which it ends. Its first line on
standard output is its port; then it answers each line on standard input with the number of spans so far. It reads
just so much of a request as counting takes: the three levels of messages above a span. Blocks.
"""

from __future__ import annotations

import gzip
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import IO, Final

__all__ = ["Receiver", "count_spans", "main", "receiver"]

_VARINT_MORE: Final = 0x80
_FIXED_WIDTHS: Final = {1: 8, 5: 4}
_LENGTH_DELIMITED: Final = 2
_PATH: Final = (
    1,
    2,
    2,
)  # ExportTraceServiceRequest.resource_spans, ResourceSpans.scope_spans, ScopeSpans.spans


def count_spans(request: bytes) -> int:
    """Return how many spans an encoded ``ExportTraceServiceRequest`` holds.

    Raises:
        ValueError: If it is not one.
    """
    found = [request]
    for number in _PATH[:-1]:
        found = [part for message in found for part in _parts(message, number)]
    return sum(1 for message in found for _ in _parts(message, _PATH[-1]))


def _parts(message: bytes, wanted: int) -> Iterator[bytes]:
    """Yield the messages in one field; others are stepped over (protobuf's wire format)."""
    at, end = 0, len(message)
    while at < end:
        key, at = _varint(message, at)
        number, kind = key >> 3, key & 7
        if kind == _LENGTH_DELIMITED:
            size, at = _varint(message, at)
            if at + size > end:
                raise ValueError("a field is longer than its message")
            if number == wanted:
                yield message[at : at + size]
            at += size
        elif kind == 0:
            _, at = _varint(message, at)
        elif kind in _FIXED_WIDTHS:
            at += _FIXED_WIDTHS[kind]
        else:
            raise ValueError(f"no field has wire type {kind}")


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(message):
            raise ValueError("a number is cut off")
        byte = message[at]
        at += 1
        value |= (byte & ~_VARINT_MORE) << shift
        if byte < _VARINT_MORE:
            return value, at
        shift += 7


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.spans = 0
        self.lock = threading.Lock()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def setup(self) -> None:
        super().setup()
        # Nobody waits for the rest of an answer that is written in two pieces.
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        if self.path.endswith("/traces"):
            try:
                spans = count_spans(body)
            except ValueError:
                self.send_error(400)
                return
            with self.server.lock:
                self.server.spans += spans
        self.send_response(200)
        self.send_header("Content-Type", "application/x-protobuf")
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name that it has
        """Say nothing."""


def main() -> int:
    """Be the process."""
    server = _Server()
    threading.Thread(target=server.serve_forever, daemon=True).start()
    _say(server.server_address[1])
    for _ in sys.stdin:
        _say(server.spans)
    return 0


def _say(number: int) -> None:
    sys.stdout.write(f"{number}\n")
    sys.stdout.flush()


class Receiver:
    """The parent's end.

    Attributes:
        url: What ``OTEL_EXPORTER_OTLP_ENDPOINT`` is to say.
    """

    def __init__(self, asks: IO[str], answers: IO[str]) -> None:
        self._asks = asks
        self._answers = answers
        self.url = f"http://127.0.0.1:{int(answers.readline())}"

    @property
    def spans(self) -> int:
        """Spans that have arrived so far."""
        self._asks.write("\n")
        self._asks.flush()
        return int(self._answers.readline())


@contextmanager
def receiver() -> Iterator[Receiver]:
    """Run a receiver for a while."""
    with subprocess.Popen(
        [sys.executable, "-m", "quiesce.bench.telemetry_receiver"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdin is not None  # noqa: S101 - both were asked for
        assert child.stdout is not None  # noqa: S101 - as above
        yield Receiver(child.stdin, child.stdout)
        child.stdin.close()


if __name__ == "__main__":
    sys.exit(main())
