"""Serves a registry to Prometheus over HTTP: ``GET`` and ``HEAD`` of ``/metrics`` and ``/healthz``.

Rule: nothing that a scraper does can reach the run. Requests are answered on daemon threads with a time limit on
the connection. Answers are made one after another, because a thread that computes makes the event loop's wait for
the GIL; while others wait for theirs, there is a pause after each, and whoever finds too many waiting is told to
come back. So slow or too many scrapers only delay each other. The format
(OpenMetrics or classic text) is what the request's ``Accept`` header likes best. A forked child closes its copy
of the listening socket, so that it neither serves a frozen copy of the numbers nor keeps the port from being
bound again. Starting blocks only until the port is bound.
"""

from __future__ import annotations

import contextlib
import errno
import gzip
import os
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qs, urlsplit

from prometheus_client.exposition import choose_encoder

from quiesce.errors import PortUnavailableError
from quiesce_exporters.exposition import Renderers

if TYPE_CHECKING:
    from collections.abc import Callable

    from prometheus_client.registry import Collector, CollectorRegistry

__all__ = ["MetricsServer", "serve"]

CONNECTION_SECONDS: Final = 10.0
"""How long a connection may take to send its request or to take its answer; Prometheus gives up after as
long."""

_LONGEST_PAUSE_SECONDS: Final = 0.1
_PLAIN: Final = "text/plain; charset=utf-8"
_CLASSIC: Final = frozenset({"text/plain", "text/*", "*/*"})
"""What the classic text is an answer to."""

CONCURRENT_SCRAPES: Final = 4
"""Scrapes of which one is being answered and the others wait; further ones are told to come back."""

PAUSE_RATIO: Final = 1.0
"""How long nothing is rendered after an answer that others wait behind, as a multiple of what it took."""


def _liked(header: str) -> list[str]:
    """Return the items of a header of preferences (RFC 9110, 12.4.2), the best one first, without what is refused."""
    weighed = []
    for item in header.split(","):
        words = [word.strip() for word in item.split(";")]
        weight = 1.0
        for word in words[1:]:
            name, _, value = word.partition("=")
            if name.strip().lower() == "q":
                with contextlib.suppress(ValueError):
                    weight = float(value)
        if words[0] and weight > 0:
            weighed.append((weight, item.strip()))
    return [item for _, item in sorted(weighed, key=lambda known: -known[0])]


def _media_type(item: str) -> str:
    return item.partition(";")[0].strip().lower()


class _Handler(BaseHTTPRequestHandler):
    """Answers one connection."""

    timeout = CONNECTION_SECONDS
    server: _Server

    def do_GET(self) -> None:
        """Answer a GET request."""
        url = urlsplit(self.path)
        if url.path == "/metrics":
            if not self.server.admit():
                self._answer(503, _PLAIN, b"too many scrapes at once\n")
                return
            try:
                self._scrape(parse_qs(url.query).get("name[]", []))
            finally:
                self.server.leave()
        elif url.path == "/healthz":
            self._answer(200, _PLAIN, b"ok\n")
        else:
            self._answer(404, _PLAIN, b"there is /metrics and /healthz\n")

    def do_HEAD(self) -> None:
        """Answer whether a GET would be answered, and as what; nothing is collected for it."""
        path = urlsplit(self.path).path
        if path == "/metrics":
            self._answer(200, self._encoder()[1])
        elif path == "/healthz":
            self._answer(200, _PLAIN)
        else:
            self._answer(404, _PLAIN)

    def _scrape(self, wanted: list[str]) -> None:
        registry: Collector = (
            self.server.registry.restricted_registry(wanted) if wanted else self.server.registry
        )
        encode, content_type = self._encoder()
        headers = {}
        with self.server.rendering:
            since = time.monotonic()
            # Families that are made for a request alone are not worth remembering.
            render = self.server.renderers.render
            body = encode(registry) if wanted else render(registry, content_type, encode)
            if "gzip" in map(_media_type, _liked(self.headers.get("Accept-Encoding", ""))):
                body = gzip.compress(body, compresslevel=1)
                headers["Content-Encoding"] = "gzip"
            if self.server.scrapes > 1:
                time.sleep(min((time.monotonic() - since) * PAUSE_RATIO, _LONGEST_PAUSE_SECONDS))
        self._answer(200, content_type, body, **headers)

    def _encoder(self) -> tuple[Callable[[Collector], bytes], str]:
        """Return what writes the format that the request likes best, and its content type."""
        asked = []
        for item in _liked(self.headers.get("Accept", "")):
            asked.append(item)
            if _media_type(item) in _CLASSIC:
                break  # what is liked less is not to be found instead
        return choose_encoder(",".join(asked))

    def _answer(self, status: int, content_type: str, body: bytes | None = None, **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        # A child that is forked meanwhile inherits the connection, so its end does not end the answer: the
        # length does.
        if body is not None:
            self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if body is not None:
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's signature
        """Say nothing: a line per scrape is noise."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False  # a scraper that hangs must not delay the end of a run
    request_queue_size = 128  # past it connections wait for seconds, until the client's kernel tries again

    def __init__(
        self, address: tuple[str, int], family: socket.AddressFamily, registry: CollectorRegistry
    ) -> None:
        self.address_family = family
        self.registry = registry
        self.rendering = threading.Lock()
        self.renderers = Renderers()
        self.scrapes = 0
        self._counting = threading.Lock()
        super().__init__(address, _Handler)

    def admit(self) -> bool:
        """Count a scrape in, unless there are enough."""
        with self._counting:
            if self.scrapes >= CONCURRENT_SCRAPES:
                return False
            self.scrapes += 1
            return True

    def leave(self) -> None:
        """Count a scrape out."""
        with self._counting:
            self.scrapes -= 1

    def server_bind(self) -> None:
        """Bind without the reverse look-up of the host's name, which can take seconds."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - as the base class
        """Say nothing: a scraper that hangs up is not the run's concern."""


class MetricsServer:
    """A running endpoint. Made by :func:`serve`.

    Attributes:
        host: The address that it listens on.
        port: The port that it listens on.
    """

    def __init__(self, server: _Server) -> None:
        self._server = server
        self.host = str(server.server_address[0])
        self.port = server.server_port
        self._closed = False
        self._thread = threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.1}, name="quiesce-metrics", daemon=True
        )
        self._thread.start()
        _SERVERS.add(self)

    @property
    def scrapes(self) -> int:
        """Scrapes that are being answered, or wait to be."""
        return self._server.scrapes

    def close(self) -> None:
        """Stop listening; requests that are being answered end on their own threads. Twice is once."""
        if self._closed:
            return
        self._closed = True
        _SERVERS.discard(self)
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def forget(self) -> None:
        """In a forked child: give up the inherited socket. The serving thread was not inherited."""
        self._closed = True
        self._server.socket.close()


def serve(registry: CollectorRegistry, host: str, port: int) -> MetricsServer:
    """Serve a registry.

    Args:
        registry: What to serve.
        host: Name or address to listen on.
        port: Port to listen on; 0 takes any free one.

    Returns:
        The running endpoint.

    Raises:
        PortUnavailableError: If the address cannot be bound; ``errno`` of its cause says why.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        server = _Server((str(address[0]), port), family, registry)
    except (OSError, OverflowError) as error:
        why = "another process uses it" if getattr(error, "errno", None) == errno.EADDRINUSE else str(error)
        raise PortUnavailableError(host, port, why) from error
    return MetricsServer(server)


_SERVERS: set[MetricsServer] = set()
"""Running servers; held here, because a caller that drops the object has not stopped the server."""


def _after_fork() -> None:
    for server in _SERVERS:
        server.forget()
    _SERVERS.clear()


os.register_at_fork(after_in_child=_after_fork)
