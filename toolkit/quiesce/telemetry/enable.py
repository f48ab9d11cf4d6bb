"""Switches metrics on: one call, one endpoint, whatever order things are built in.

Rule: what the user named is done or refused by name (a port, an exporter); what the user left open is chosen
and told (in the log and in ``metrics.json`` of the run folder). Nothing here suspends; closing with
``linger`` blocks for as long.

The HTTP server is not part of this package: an exporter is found by its entry point (group
``quiesce.exporters``), so the toolkit depends on no exporter, and anybody can install another one.
"""

from __future__ import annotations

import errno
import ipaddress
import json
import logging
import os
import time
import weakref
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, cast

from prometheus_client import CollectorRegistry, generate_latest

from quiesce.errors import ExporterMissingError, PortUnavailableError
from quiesce.observers import Hub, default_hub
from quiesce.telemetry.collector import QuiesceCollector
from quiesce.telemetry.metrics import MetricsObserver
from quiesce.telemetry.names import log_event

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from quiesce.telemetry.logs import RunLog

__all__ = [
    "DEFAULT_PORT",
    "ENDPOINT_FILE",
    "EXPORTERS",
    "Endpoint",
    "MetricsHandle",
    "Serve",
    "enable_metrics",
    "find_exporter",
]

DEFAULT_PORT: Final = 9464
"""Where metrics are served if nobody names a port and nobody else serves there (OpenTelemetry's default for
Prometheus)."""

ENDPOINT_FILE: Final = "metrics.json"
"""The file of a run folder that says where the run is scraped while it runs."""

EXPORTERS: Final = "quiesce.exporters"
"""Entry point group in which exporters announce themselves."""

_LOG: Final = logging.getLogger("quiesce.telemetry")


class Endpoint(Protocol):
    """A running server of metrics.

    Attributes:
        port: The port that it listens on.
    """

    port: int

    def close(self) -> None:
        """Stop listening."""


Serve = Callable[[CollectorRegistry, str, int], Endpoint]
"""Starts a server of a registry on a host and a port (0: any free one), or raises PortUnavailableError."""


class MetricsHandle:
    """Metrics that are switched on.

    Made by :func:`enable_metrics`; a context manager that closes.

    Attributes:
        host: The host that the endpoint listens on.
        registry: The prometheus_client registry that is served.
        observer: Counts hooks.
        collector: Answers scrapes.
    """

    def __init__(
        self,
        hub: Hub,
        observer: MetricsObserver,
        collector: QuiesceCollector,
        registry: CollectorRegistry,
        endpoint: Endpoint,
        host: str,
        run_dir: Path | None,
    ) -> None:
        self._hub = hub
        self._endpoint = endpoint
        self._file = None if run_dir is None else run_dir / ENDPOINT_FILE
        self._closed = False
        self.host = host
        self.observer = observer
        self.collector = collector
        self.registry = registry
        _HANDLES.add(self)

    @property
    def port(self) -> int:
        """The port that metrics are really served on."""
        return self._endpoint.port

    @property
    def url(self) -> str:
        """Where to scrape; an endpoint that listens everywhere is named by its loopback address."""
        return f"http://{_reachable(self.host)}:{self.port}/metrics"

    def snapshot(self, path: Path | str) -> None:
        """Write the classic text exposition to a file, so that the file is always complete.

        In a forked child this does nothing: the numbers are the parent's.
        """
        if self._closed:
            return
        _write_atomically(Path(path), generate_latest(self.registry))

    def expect_checkpoints(self, *, seconds: float = 0.0, steps: float = 0.0) -> None:
        """Say how often the run means to save; see :meth:`MetricsObserver.expect_checkpoints`."""
        self.observer.expect_checkpoints(seconds=seconds, steps=steps)

    def close(self, linger: float = 0.0) -> None:
        """Stop serving and counting. Closing twice changes nothing.

        Args:
            linger: Seconds to keep serving before, so that a scraper sees how the run ended: one scrape
                interval.
        """
        if self._closed:
            return
        if linger > 0:
            time.sleep(linger)
        self._closed = True
        _HANDLES.discard(self)
        self._hub.unsubscribe(self.observer)
        self._endpoint.close()
        if self._file is not None:
            self._file.unlink(missing_ok=True)

    def forget(self) -> None:
        """In a forked child: be closed, and leave to the parent what is the parent's."""
        self._closed = True

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close."""
        self.close()


def enable_metrics(
    run: str,
    port: int | None = None,
    host: str | None = None,
    *,
    hub: Hub | None = None,
    role: str = "controller",
    run_dir: Path | str | None = None,
    info: Mapping[str, str] | None = None,
    serve: Serve | str = "prometheus",
    log: RunLog | None = None,
) -> MetricsHandle:
    """Serve the metrics of everything that reports to a hub, whether it was built before or is built later.

    Args:
        run: The run's name, a label of every series.
        port: The port to serve on; 0 takes any free one, None takes :data:`DEFAULT_PORT` or else any free
            one.
        host: Name or address to listen on; None means loopback only.
        hub: What to listen to; None means the process-wide hub.
        role: What this process is in the run, a label of every series.
        run_dir: An existing folder; ``metrics.json`` in it says where metrics are served for as long as they
            are.
        info: Values of ``quiesce_run_info`` that no primitive tells (``engine``), or tells otherwise.
        serve: An exporter, or the name of its entry point.
        log: The run's log, which is told where metrics are served; the Python logger ``quiesce.telemetry``
            always is.

    Returns:
        The handle to close, ask for its port, or write a snapshot with.

    Raises:
        PortUnavailableError: If the named port, or the host, cannot be bound.
        ExporterMissingError: If no exporter of the name is installed.
    """
    start = find_exporter(serve) if isinstance(serve, str) else serve
    hub = default_hub() if hub is None else hub
    observer = MetricsObserver()
    collector = QuiesceCollector(observer, hub, run=run, role=role, info=info)
    registry = CollectorRegistry(support_collectors_without_names=True)
    registry.register(collector)
    listen = "127.0.0.1" if host is None else host
    endpoint = _start(start, registry, listen, port)
    hub.subscribe(observer)
    folder = None if run_dir is None else Path(run_dir)
    handle = MetricsHandle(hub, observer, collector, registry, endpoint, listen, folder)
    try:
        if folder is not None:
            told = {"url": handle.url, "port": handle.port, "pid": os.getpid()}
            _write_atomically(folder / ENDPOINT_FILE, (json.dumps(told) + "\n").encode())
    except OSError:
        handle.close()
        raise
    if not _is_loopback(listen):
        _LOG.warning(
            "metrics are served on %s, which other machines may reach, without authentication", listen
        )
    _LOG.info("metrics are served at %s", handle.url)
    if log is not None:
        log().info(log_event("metrics.serving").name, url=handle.url, port=handle.port, pid=os.getpid())
    return handle


def find_exporter(name: str) -> Serve:
    """Load the exporter of that name.

    Raises:
        ExporterMissingError: If none is installed.
    """
    installed = entry_points(group=EXPORTERS)
    for entry in installed.select(name=name):
        return cast("Serve", entry.load())
    raise ExporterMissingError(name, EXPORTERS, installed.names)


def _start(serve: Serve, registry: CollectorRegistry, host: str, port: int | None) -> Endpoint:
    if port is not None:
        return serve(registry, host, port)
    try:
        return serve(registry, host, DEFAULT_PORT)
    except PortUnavailableError as error:
        if getattr(error.__cause__, "errno", None) != errno.EADDRINUSE:
            raise  # the host is at fault, not the port
        endpoint = serve(registry, host, 0)
        _LOG.info("port %d is taken, so metrics moved to port %d", DEFAULT_PORT, endpoint.port)
        return endpoint


def _write_atomically(path: Path, content: bytes) -> None:
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        scratch.write_bytes(content)
        scratch.replace(path)
    except OSError:
        scratch.unlink(missing_ok=True)
        raise


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _reachable(host: str) -> str:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if address.is_unspecified:
        return "127.0.0.1" if address.version == 4 else "[::1]"  # noqa: PLR2004 - IP version 4
    return host if address.version == 4 else f"[{host}]"  # noqa: PLR2004 - IP version 4


_HANDLES: weakref.WeakSet[MetricsHandle] = weakref.WeakSet()


def _after_fork() -> None:
    for handle in list(_HANDLES):
        handle.forget()


os.register_at_fork(after_in_child=_after_fork)
