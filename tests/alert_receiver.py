"""HTTP servers that take alerts: a fake Alertmanager or webhook, which can refuse, be silent or be away."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

__all__ = ["AlertReceiver", "until"]


def until(holds: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait for something that another thread, or process, brings about.

    Raises:
        AssertionError: If it does not come.
    """
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.01)


class AlertReceiver:
    """Keeps every request: its path, headers and JSON body.

    Args:
        port: Where to listen; 0 takes any free one.
        status: What it answers.
        silent: Whether it takes requests and never answers.
    """

    def __init__(self, port: int = 0, *, status: int = 200, silent: bool = False) -> None:
        self.requests: list[tuple[str, dict[str, str], Any]] = []
        self.times: list[float] = []  # when each came, on the monotonic clock
        self.status = status
        self.released = threading.Event()
        if not silent:
            self.released.set()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                receiver.times.append(time.monotonic())
                receiver.requests.append((self.path, dict(self.headers), json.loads(body)))
                receiver.released.wait()
                self.send_response(receiver.status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class' name
                pass

            def handle(self) -> None:
                with contextlib.suppress(OSError):  # whoever asked has gone
                    super().handle()

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    def alerts(self) -> list[dict[str, Any]]:
        """Return every alert of every request, whether it came as the API's list or as a webhook's."""
        bodies = [body for _, _, body in list(self.requests)]
        return [alert for body in bodies for alert in (body if isinstance(body, list) else body["alerts"])]

    def names(self) -> list[str]:
        """Return the names of these alerts."""
        return [alert["labels"]["alertname"] for alert in self.alerts()]

    def close(self) -> None:
        """Go away."""
        self.released.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(self, *exc: object) -> None:
        """Go away."""
        self.close()
