"""Switches telemetry on: one call, one endpoint, whatever order things are built in.

Rule: what the user named is done or refused by name (a port, an exporter); what the user left open is chosen
and told (in the log and in ``metrics.json`` of the run folder). Nothing here suspends.

Neither the HTTP server nor any other exporter is part of this package: each is found by its entry point (group
``quiesce.exporters`` for what is scraped, ``quiesce.sinks`` for what is sent or written), so the toolkit depends on
none, and anybody can install another one.

A spawned child runs its parent's script again before it does what it is there for. A call that it meets in doing so
is its parent's, and is answered by a handle that is closed.
"""

from __future__ import annotations

import errno
import ipaddress
import json
import logging
import math
import os
import platform
import secrets
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast
from urllib.parse import unquote

from prometheus_client import CollectorRegistry

from quiesce.errors import ConfigError, ExporterMissingError, ExtraMissingError, PortUnavailableError
from quiesce.observers import Hub, default_hub
from quiesce.telemetry.assembly import RunTelemetry
from quiesce.telemetry.children import is_being_prepared
from quiesce.telemetry.collector import QuiesceCollector
from quiesce.telemetry.convert import SPAN_BUDGET
from quiesce.telemetry.discovery import TargetFile, write_atomically
from quiesce.telemetry.handle import ENDPOINT_FILE, Endpoint, MetricsHandle, closed_handle, reachable
from quiesce.telemetry.handle import HANDLES as _HANDLES
from quiesce.telemetry.names import log_event
from quiesce.telemetry.objectives import window_objectives
from quiesce.telemetry.settings import SERVED_BY, is_on, read_settings, script_name
from quiesce.telemetry.sinks import SinkContext, find_sink

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from quiesce.telemetry.event_log import EventLog
    from quiesce.telemetry.sinks import Sink

__all__ = [
    "DEFAULT_PORT",
    "ENDPOINT_FILE",
    "EXPORTERS",
    "Endpoint",
    "MetricsHandle",
    "Serve",
    "enable_metrics",
    "find_exporter",
    "is_enabled",
]

DEFAULT_PORT: Final = 9464
"""Where metrics are served if nobody names a port and nobody else serves there (OpenTelemetry's default for
Prometheus)."""

EXPORTERS: Final = "quiesce.exporters"
"""Entry point group in which exporters announce themselves."""

_LOG: Final = logging.getLogger("quiesce.telemetry")


Serve = Callable[[CollectorRegistry, str, int], Endpoint]
"""Starts a server of a registry on a host and a port (0: any free one), or raises PortUnavailableError."""


def enable_metrics(
    run: str | None = None,
    port: int | None = None,
    host: str | None = None,
    *,
    hub: Hub | None = None,
    role: str | None = None,
    run_dir: Path | str | None = None,
    sd_dir: Path | str | None = None,
    info: Mapping[str, str] | None = None,
    serve: Serve | str = "prometheus",
    exporters: Sequence[str] | None = None,
    tracer_provider: Any = None,  # noqa: ANN401 - any object of OpenTelemetry's API
    spans_per_second: float | None = None,
    settings: Mapping[str, Mapping[str, object]] | None = None,
    log: EventLog | None = None,
    objectives: Mapping[str, float] | None = None,
) -> MetricsHandle:
    """Serve the metrics, and export the spans, of everything that reports to a hub, built before or later.

    What is not given here is taken from the environment, see :mod:`quiesce.telemetry.settings`.

    Args:
        run: The run's name, a label of every series; the script's, if nobody names it.
        port: The port to serve on; 0 takes any free one, None takes :data:`DEFAULT_PORT` or else any free
            one.
        host: Name or address to listen on; None means loopback only.
        hub: What to listen to; None means the process-wide hub.
        role: What this process is in the run, a label of every series; ``controller``, if nobody says.
        run_dir: An existing folder; ``metrics.json`` in it says where metrics are served for as long as they
            are.
        sd_dir: An existing folder from which Prometheus reads targets; a file in it names the endpoint for as
            long as it serves.
        info: Values of ``quiesce_run_info`` that no primitive tells (``engine``), or tells otherwise.
        serve: What serves metrics, or the name of its entry point.
        exporters: Names of further exporters: ``recorder``, ``otlp``, ``textfile``, ``wandb``, or others that are
            installed. None takes the recorder where there is a ``run_dir``.
        tracer_provider: The application's own OpenTelemetry tracer provider, through which spans go then; None takes
            the one that the application has installed globally, once it has (with no exporter: if it has by now).
            Spans are then exported by it alone (and
            recorded): ``otlp`` sends metrics only, unless its setting ``spans`` is true.
        spans_per_second: Budget of slots' spans beside the interesting ones; infinite keeps each.
        settings: Settings of exporters, by the exporter's name.
        log: The run's log, which is told where metrics are served (the Python logger ``quiesce.telemetry`` always is),
            and whose lines the exporters are given. Without one they are given the same events, made of what the hub
            reports.
        objectives: Seconds that a phase of the window (``drain``, ``exclusive``) is meant to stay under; a longer one is
            counted in ``quiesce_window_over_objective_total``. What is left out keeps 1 s and 5 ms. Give the rules the same.

    Returns:
        The handle to close, ask for its port, or write a snapshot with. While a child of ``multiprocessing`` imports
        its parent's modules again, a handle that is closed: nothing is served, counted, exported or written then.

    Raises:
        PortUnavailableError: If the named port, or the host, cannot be bound.
        ExporterMissingError: If no exporter of the name is installed.
        ExtraMissingError: If a package that an exporter needs is not installed.
        ConfigError: If the environment, or an objective, is something that cannot be used.
    """
    said = read_settings()
    meant = window_objectives(said.objectives if objectives is None else objectives)
    run = run or said.run or script_name()
    role = role or said.role or "controller"
    port = said.port if port is None else port
    host = said.host if host is None else host
    run_dir = said.run_dir if run_dir is None else run_dir
    sd_dir = said.sd_dir if sd_dir is None else sd_dir
    hub = default_hub() if hub is None else hub
    hub.on_first_attach(None)  # what is switched on in code is not switched on by the environment as well
    if is_being_prepared():
        return closed_handle(hub, run, role, DEFAULT_PORT if port is None else port, host)
    start = find_exporter(serve) if isinstance(serve, str) else serve
    folder = None if run_dir is None else Path(run_dir)
    names = said.exporters if exporters is None else tuple(exporters)
    if exporters is None and folder is not None:
        names = tuple(dict.fromkeys((*names, "recorder")))
    budget = said.spans_per_second if spans_per_second is None else spans_per_second
    provider = _installed_provider() if tracer_provider is None else tracer_provider
    given = dict(settings or {})
    if provider is not None:
        # Its processors decide where its spans go; a collector must not be sent each of them twice.
        given["otlp"] = {"spans": False, **given.get("otlp", {})}
    implied = said.implied if exporters is None else ()
    sinks = _make_sinks(names, implied, SinkContext(run, role, folder, _resource(run, role), {}), given)

    def collect() -> Iterable[Metric]:
        return collector.collect()

    telemetry = RunTelemetry(
        hub,
        sinks=sinks,
        collect=collect,
        provider=provider,
        find_provider=_installed_provider,
        withheld=() if given.get("otlp", {}).get("spans") else ("otlp",),
        budget=SPAN_BUDGET if budget is None else None if math.isinf(budget) else budget,
    )
    telemetry.observer.objectives = meant
    collector = QuiesceCollector(telemetry.observer, hub, run=run, role=role, info=info)
    registry = CollectorRegistry(support_collectors_without_names=True)
    registry.register(collector)
    listen = "127.0.0.1" if host is None else host
    try:
        endpoint = _start(start, registry, listen, port)
    except BaseException:
        telemetry.close()
        raise
    telemetry.start()
    handle = MetricsHandle(hub, telemetry, collector, registry, endpoint, listen, folder, run=run, role=role)
    telemetry.close_at_exit(handle.close)
    if is_on() and hub is default_hub():
        os.environ[SERVED_BY] = str(os.getpid())
    try:
        if folder is not None:
            told = {"url": handle.url, "port": handle.port, "pid": os.getpid()}
            write_atomically(folder / ENDPOINT_FILE, (json.dumps(told) + "\n").encode())
        if sd_dir is not None:
            target = f"{reachable(listen)}:{handle.port}"
            handle.announce(TargetFile(Path(sd_dir), run=run, role=role, target=target))
    except (OSError, ConfigError):
        handle.close()
        raise
    if not _is_loopback(listen):
        _LOG.warning(
            "metrics are served on %s, which other machines may reach, without authentication", listen
        )
    _LOG.info("metrics are served at %s", handle.url)
    if log is not None or sinks:
        handle.connect(log)().info(
            log_event("metrics.serving").name, url=handle.url, port=handle.port, pid=os.getpid()
        )
    return handle


def is_enabled(hub: Hub | None = None) -> bool:
    """Return whether metrics of a hub are served from this process.

    Args:
        hub: The hub; None means the process-wide one.
    """
    hub = default_hub() if hub is None else hub
    return any(handle.serves(hub) for handle in list(_HANDLES))


def find_exporter(name: str) -> Serve:
    """Load the exporter of that name.

    Raises:
        ExporterMissingError: If none is installed.
    """
    installed = entry_points(group=EXPORTERS)
    for entry in installed.select(name=name):
        return cast("Serve", entry.load())
    raise ExporterMissingError(name, EXPORTERS, installed.names)


def _make_sinks(
    names: Iterable[str],
    implied: Iterable[str],
    about: SinkContext,
    settings: Mapping[str, Mapping[str, object]],
) -> dict[str, Sink]:
    sinks: dict[str, Sink] = {}
    try:
        for name in names:
            try:
                sinks[name] = find_sink(name)(about._replace(settings=settings.get(name, {})))
            except ExtraMissingError as error:
                if name not in implied:
                    raise
                _LOG.warning("nothing is exported as OpenTelemetry's variables say: %s", error)
    except BaseException:
        for made in sinks.values():
            made.close(0.0)
        raise
    return sinks


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


def _installed_provider() -> Any:  # noqa: ANN401 - any object of OpenTelemetry's API
    """Return the tracer provider that the application has installed globally, or None."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return None  # nobody has imported it, so nobody has installed one
    # What the API returns before anybody has installed one is its proxy, which cannot make spans of its own.
    provider = trace.get_tracer_provider()
    return None if isinstance(provider, trace.ProxyTracerProvider) else provider


def _resource(run: str, role: str) -> dict[str, str]:
    """Return what this process is, as OpenTelemetry resource attributes; the environment's own win."""
    from quiesce import __version__

    said = {}
    for item in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "").split(","):
        key, equals, value = item.partition("=")
        if equals and key.strip():
            said[key.strip()] = unquote(value.strip())
    return {
        "service.name": run,
        "service.instance.id": secrets.token_hex(8),
        "service.version": __version__,
        "host.name": platform.node(),
        "process.pid": str(os.getpid()),
        "quiesce.run": run,
        "quiesce.role": role,
        **said,
        **({"service.name": os.environ["OTEL_SERVICE_NAME"]} if os.environ.get("OTEL_SERVICE_NAME") else {}),
    }


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
