"""Exports spans and metrics over OTLP, encoded and sent by a process of its own where that can be had.

Rule: a batch is delivered when the collector answered for it, and not before: :meth:`OtlpSink.spans` returns then how
many spans the collector refused, and raises if it refused them all, so whoever counts can trust it. Encoding costs
about as much as everything else of a span together, which is why it is done in another process, out of reach of the
training's GIL; where that process cannot be started or ends, this one does it. Blocks; called on a thread of the sink's
own.

::

    pipeline's thread          a pipe, batches as marshalled tuples       quiesce_exporters.otlp_process
    spans() ──────────────────────────────────────────────────────▶ encode, compress, send
            ◀────────────────────────────────────────────────────── one line: how many were refused, or why all
"""

from __future__ import annotations

import importlib.util
import logging
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from quiesce.errors import ExtraMissingError
from quiesce.telemetry.sinks import SinkContext
from quiesce_exporters.otlp_config import OtlpConfig, read_config

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from quiesce.telemetry.finished import FinishedSpan
    from quiesce_exporters.otlp_spans import PlainPart

__all__ = ["OtlpSink", "OtlpWriter", "make_otlp"]

_LOG: Final = logging.getLogger("quiesce.telemetry")
SCOPE: Final = "quiesce"


class OtlpWriter:
    """Encodes and sends, in whatever process it is.

    Args:
        config: Where to.
        resource: What the exporting process is, as OpenTelemetry resource attributes.
        version: The instrumentation scope's version.
        started: Since when counters count, in Unix seconds.
    """

    def __init__(
        self, config: OtlpConfig, resource: Mapping[str, str], *, version: str, started: float
    ) -> None:
        from quiesce_exporters.otlp_transport import connect

        self._resource = dict(resource)
        self._version = version
        self._started = started
        self._traces = None if config.traces is None else connect(config.traces, "traces")
        self._metrics = None if config.metrics is None else connect(config.metrics, "metrics")

    def spans(self, batch: Sequence[FinishedSpan]) -> int:
        """Export spans.

        Returns:
            How many of them the collector says it rejected.

        Raises:
            OtlpSendError: If the collector did not take them.
        """
        from quiesce_exporters.otlp_spans import plain_parts

        return self.parts(plain_parts(batch)) if batch else 0

    def parts(self, parts: Iterable[PlainPart]) -> int:
        """Export spans that are plain values already; see :meth:`spans`."""
        if self._traces is None:
            return 0
        from quiesce_exporters.otlp_spans import encode_parts

        body = encode_parts(parts, self._resource, scope=SCOPE, version=self._version)
        return self._traces.send(body)

    def samples(self, families: Sequence[Metric], unix_time: float) -> int:
        """Export a snapshot of metrics.

        Returns:
            How many of its points the collector says it rejected.

        Raises:
            OtlpSendError: If the collector did not take it.
        """
        if self._metrics is None:
            return 0
        from quiesce_exporters.otlp_encoding import encode_metrics

        body = encode_metrics(
            families, unix_time, self._started, self._resource, scope=SCOPE, version=self._version
        )
        return self._metrics.send(body)

    def close(self) -> None:
        """Let go of the connections."""
        for transport in (self._traces, self._metrics):
            if transport is not None:
                transport.close()


class OtlpSink:
    """The sink named ``otlp``.

    Args:
        context: Whose telemetry it is. ``settings`` may hold ``own_process`` (False: encode in this process) and
            ``spans`` (False: export metrics only).
        config: Where to; None reads the environment.

    Raises:
        ConfigError: If a variable of the environment cannot be used.
        ExtraMissingError: If a package is missing.
    """

    def __init__(self, context: SinkContext, config: OtlpConfig | None = None) -> None:
        _require_protocol()
        from quiesce import __version__

        own = bool(context.settings.get("own_process", True))
        self._config = read_config(own_process=own) if config is None else config
        if not context.settings.get("spans", True):
            self._config = replace(self._config, traces=None)
        _require_grpc(self._config)
        self._resource = {**context.resource, "quiesce.run": context.run, "quiesce.role": context.role}
        self._made = {"version": __version__, "started": time.time()}
        self._lock = threading.Lock()
        self._rejected: dict[str, int] = {}
        self._own: Any = None
        self._here: OtlpWriter | None = None
        if self._config.own_process and self.takes_spans:
            self._own = self._start()

    @property
    def takes_spans(self) -> bool:
        """Whether there is somewhere for spans to go."""
        return self._config.traces is not None

    @property
    def process_id(self) -> int | None:
        """The exporting process, or None when this one exports."""
        own = self._own
        return None if own is None else int(own.pid)

    def spans(self, batch: Sequence[FinishedSpan]) -> int:
        """Export spans; returns once the collector has them.

        Returns:
            How many of them it rejected.

        Raises:
            OtlpSendError: If it did not take them.
        """
        own = self._own
        if own is not None:
            from quiesce_exporters.otlp_process import ProcessLostError

            try:
                return self._told(own.spans(batch), "spans")
            except ProcessLostError as error:
                self._fall_back(error)
        return self._told(self._writer().spans(batch), "spans")

    def samples(self, families: Sequence[Metric], unix_time: float) -> None:
        """Export metrics, from here: a snapshot every few seconds is not worth a pipe.

        Raises:
            OtlpSendError: If the collector did not take them.
        """
        self._told(self._writer().samples(families, unix_time), "data points")

    def events(self, events: Sequence[Mapping[str, object]]) -> None:
        """Log lines are not exported."""

    def close(self, deadline_seconds: float) -> None:
        """End the process and let go of the connections."""
        own, self._own = self._own, None
        if own is not None:
            own.close(deadline_seconds)
        if self._here is not None:
            self._here.close()

    def _told(self, rejected: int, what: str) -> int:
        """Say once that something was rejected."""
        if rejected and what not in self._rejected:
            _LOG.warning("the OTLP collector rejected %d %s; further ones are not said", rejected, what)
        if rejected:
            self._rejected[what] = self._rejected.get(what, 0) + rejected
        return rejected

    @property
    def rejected(self) -> dict[str, int]:
        """How many ``spans`` and ``data points`` the collector says it rejected."""
        return self._rejected.copy()

    def _writer(self) -> OtlpWriter:
        with self._lock:
            if self._here is None:
                self._here = OtlpWriter(self._config, self._resource, **self._made)  # type: ignore[arg-type] # by name
            return self._here

    def _start(self) -> Any:  # noqa: ANN401 - an ExportProcess, whose module is loaded only for it
        from quiesce_exporters.otlp_process import ExportProcess

        try:
            return ExportProcess(self._config, self._resource, **self._made)  # type: ignore[arg-type] # by name
        except OSError as error:
            _LOG.warning("the exporting process cannot be started (%s); this one exports", error)
            return None

    def _fall_back(self, error: Exception) -> None:
        _LOG.warning("%s; this process exports from now on", error)
        own, self._own = self._own, None
        own.close(0.0)


def make_otlp(context: SinkContext) -> OtlpSink:
    """Return the sink; the entry point ``otlp`` of ``quiesce.sinks``.

    Raises:
        ConfigError: If a variable of the environment cannot be used.
        ExtraMissingError: If a package is missing.
    """
    return OtlpSink(context)


def _require_protocol() -> None:
    try:
        import opentelemetry.proto.trace.v1.trace_pb2  # noqa: F401 - asked for, not used
    except ImportError as error:
        raise ExtraMissingError("the exporter 'otlp'", "opentelemetry-proto", "otlp") from error


def _require_grpc(config: OtlpConfig) -> None:
    """Refuse at once what would otherwise fail batch by batch, in a process of its own."""
    endpoints = (config.traces, config.metrics)
    wanted = any(endpoint is not None and endpoint.protocol == "grpc" for endpoint in endpoints)
    if wanted and importlib.util.find_spec("grpc") is None:
        raise ExtraMissingError("OTLP over gRPC", "grpcio", "otlp-grpc")
