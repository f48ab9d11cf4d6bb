"""What a caller who switched telemetry on holds: where it is served, and how it is ended.

Rule: closing leaves everything as it was before; a handle that is closed, and one in a child of the process, does
nothing, whatever it is asked. Nothing here suspends; closing with ``linger`` blocks for as long.
"""

from __future__ import annotations

import ipaddress
import math
import os
import time
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

from prometheus_client import CollectorRegistry, generate_latest

from quiesce.telemetry.assembly import RunTelemetry
from quiesce.telemetry.collector import QuiesceCollector
from quiesce.telemetry.discovery import TargetFile, write_atomically
from quiesce.telemetry.settings import SERVED_BY

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from quiesce.observers import Hub
    from quiesce.telemetry.event_log import EventLog
    from quiesce.telemetry.metrics import MetricsObserver

__all__ = ["ENDPOINT_FILE", "HANDLES", "Endpoint", "MetricsHandle", "closed_handle", "reachable"]

ENDPOINT_FILE: Final = "metrics.json"
"""The file of a run folder that says where the run is scraped while it runs."""


class Endpoint(Protocol):
    """A running server of metrics.

    Attributes:
        port: The port that it listens on.
    """

    port: int

    def close(self) -> None:
        """Stop listening."""


class MetricsHandle:
    """Telemetry that is switched on.

    Made by :func:`~quiesce.telemetry.enable.enable_metrics`; a context manager that closes.

    Attributes:
        host: The host that the endpoint listens on.
        registry: The prometheus_client registry that is served.
        telemetry: What listens to the hub, makes spans and hands everything to the sinks.
        collector: Answers scrapes.
    """

    def __init__(
        self,
        hub: Hub,
        telemetry: RunTelemetry,
        collector: QuiesceCollector,
        registry: CollectorRegistry,
        endpoint: Endpoint,
        host: str,
        run_dir: Path | None,
        *,
        run: str,
        role: str,
    ) -> None:
        self._hub = hub
        self._about = (run, role)
        self._endpoint = endpoint
        self._file = None if run_dir is None else run_dir / ENDPOINT_FILE
        self._target: TargetFile | None = None
        self._events: _Events | None = None
        self._closed = False
        self._stepped_ns = time.perf_counter_ns()
        self.host = host
        self.telemetry = telemetry
        self.collector = collector
        self.registry = registry
        HANDLES.add(self)

    @property
    def observer(self) -> MetricsObserver:
        """Counts hooks."""
        return self.telemetry.observer

    @property
    def port(self) -> int:
        """The port that metrics are really served on."""
        return self._endpoint.port

    @property
    def url(self) -> str:
        """Where to scrape; an endpoint that listens everywhere is named by its loopback address."""
        return f"http://{reachable(self.host)}:{self.port}/metrics"

    def snapshot(self, path: Path | str) -> None:
        """Write the classic text exposition to a file, so that the file is always complete.

        In a forked child this does nothing: the numbers are the parent's.
        """
        if self._closed:
            return
        write_atomically(Path(path), generate_latest(self.registry))

    def expect_checkpoints(self, *, seconds: float = 0.0, steps: float = 0.0) -> None:
        """Say how often the run means to save; see :meth:`MetricsObserver.expect_checkpoints`."""
        self.observer.expect_checkpoints(seconds=seconds, steps=steps)

    def step(
        self,
        n: int,
        *,
        reward: float | None = None,
        loss: float | None = None,
        kl: float | None = None,
        groups: int = 0,
        seconds: float | None = None,
    ) -> None:
        """Tell that a trainer of one's own has taken a step; a :class:`quiesce.Controller` tells it by itself.

        Args:
            n: How many steps it has taken, this one included.
            reward: Mean reward.
            loss: Loss.
            kl: Divergence from the reference policy, in nats.
            groups: Prompt groups that were trained.
            seconds: How long the step took; None takes the time since the step before.
        """
        now = time.perf_counter_ns()
        ns = now - self._stepped_ns if seconds is None else round(seconds * 1e9)
        self._stepped_ns = now
        told = {"reward": reward, "loss": loss, "kl": kl}
        metrics = {name: value for name, value in told.items() if value is not None and math.isfinite(value)}
        self._hub.fire("train_step_ended", n, n, ns, groups, "completed", metrics)

    def close(self, linger: float = 0.0) -> None:
        """Stop serving, counting and exporting. Closing twice changes nothing.

        What exporters still have to send is sent within two seconds, or counted as not sent.

        Args:
            linger: Seconds to keep serving before, so that a scraper sees how the run ended: one scrape
                interval.
        """
        if self._closed:
            return
        if linger > 0:
            time.sleep(linger)
        self._closed = True
        HANDLES.discard(self)
        if self._target is not None:
            self._target.remove()
        self.telemetry.close()
        self._endpoint.close()
        self._end_events()
        if self._file is not None:
            self._file.unlink(missing_ok=True)
        if os.environ.get(SERVED_BY) == str(os.getpid()):
            del os.environ[SERVED_BY]

    def serves(self, hub: Hub) -> bool:
        """Return whether it serves what that hub carries."""
        return self._hub is hub and not self._closed

    def announce(self, target: TargetFile) -> None:
        """Keep a target file for as long as the endpoint serves."""
        self._target = target

    def forget(self) -> None:
        """In a child: be closed, and leave to the parent what is the parent's."""
        self._closed = True
        HANDLES.discard(self)
        self._end_events()

    def connect(self, log: EventLog | None = None) -> EventLog:
        """Feed the sinks with events of the run.

        Args:
            log: The run's log, whose lines they are given then, with the ids of spans in them; a
                :class:`~quiesce.telemetry.logs.LogObserver` of it on the hub is the caller's. None makes events of what
                the hub reports, and writes no log.

        Returns:
            The log, or what hands the events on.
        """
        self._end_events()
        if log is None:
            self._events = _Events(self._hub, *self._about)
            log = self._events.log
        self.telemetry.connect(log)
        return log

    def _end_events(self) -> None:
        events, self._events = self._events, None
        if events is not None:
            events.close()

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close."""
        self.close()


class _Events:
    """Makes events of what a hub reports, for the sinks of a run that has no log of ours."""

    def __init__(self, hub: Hub, run: str, role: str) -> None:
        from quiesce.telemetry.event_log import EventLog
        from quiesce.telemetry.logs import LogObserver

        self._hub = hub
        self.log = EventLog(run=run, role=role)
        self._observer = LogObserver(self.log)
        hub.subscribe(self._observer, timed=True)

    def close(self) -> None:
        """Make no more."""
        self._hub.unsubscribe(self._observer)
        self.log.close()


class _Nowhere:
    """The endpoint of a process that does not serve."""

    def __init__(self, port: int) -> None:
        self.port = port

    def close(self) -> None:
        """There is nothing to close."""


def closed_handle(hub: Hub, run: str, role: str, port: int, host: str | None) -> MetricsHandle:
    """Return a handle of which everything can be asked, and that does nothing."""
    telemetry = RunTelemetry(hub)
    telemetry.close()
    collector = QuiesceCollector(telemetry.observer, hub, run=run, role=role)
    registry = CollectorRegistry(support_collectors_without_names=True)
    registry.register(collector)
    endpoint = _Nowhere(port)
    listen = "127.0.0.1" if host is None else host
    handle = MetricsHandle(hub, telemetry, collector, registry, endpoint, listen, None, run=run, role=role)
    handle.forget()
    return handle


def reachable(host: str) -> str:
    """Return a host as one can reach it from here: an endpoint that listens everywhere by its loopback address."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host
    if address.is_unspecified:
        return "127.0.0.1" if address.version == 4 else "[::1]"  # noqa: PLR2004 - IP version 4
    return host if address.version == 4 else f"[{host}]"  # noqa: PLR2004 - IP version 4


HANDLES: Final[weakref.WeakSet[MetricsHandle]] = weakref.WeakSet()
"""Handles that are not closed."""


def _after_fork() -> None:
    for handle in list(HANDLES):
        handle.forget()


os.register_at_fork(after_in_child=_after_fork)
