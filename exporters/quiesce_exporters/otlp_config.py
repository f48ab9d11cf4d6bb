"""Where and how to export over OTLP, from OpenTelemetry's own environment variables.

Rule: the variables mean what the OpenTelemetry specification says (OTLP exporter, protocol version 1): a signal's own
variable beats the common one, and an http endpoint given for all signals gets ``/v1/traces`` or ``/v1/metrics``
appended, one given for a signal is taken as it is. What cannot be used is refused by its variable's name. Nothing here
suspends or connects.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, cast
from urllib.parse import unquote, urlsplit

from quiesce.errors import ConfigError

__all__ = ["Endpoint", "OtlpConfig", "Protocol", "Signal", "read_config"]

Protocol = Literal["http/protobuf", "grpc"]
Signal = Literal["traces", "metrics"]

SIGNALS: Final[tuple[Signal, ...]] = ("traces", "metrics")
DEFAULT_ENDPOINTS: Final[Mapping[str, str]] = {
    "http/protobuf": "http://localhost:4318",
    "grpc": "http://localhost:4317",
}
DEFAULT_TIMEOUT_SECONDS: Final = 10.0


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where one signal goes.

    Attributes:
        url: For http the full URL, for grpc ``scheme://host:port``.
        protocol: How.
        headers: Sent with each request; may hold credentials, so never logged.
        timeout_seconds: For one request.
        gzip: Whether requests are compressed.
        certificate: A file of trusted certificates, or None for the system's.
    """

    url: str
    protocol: Protocol
    headers: Mapping[str, str]
    timeout_seconds: float
    gzip: bool
    certificate: Path | None

    def __repr__(self) -> str:
        """Name everything but the headers' values."""
        return f"<OTLP endpoint {self.url} over {self.protocol}, headers {', '.join(self.headers) or 'none'}>"


@dataclass(frozen=True, slots=True)
class OtlpConfig:
    """Where each signal goes.

    Attributes:
        traces: Spans; None if the environment switches them off.
        metrics: Metrics; None if the environment switches them off.
        own_process: Whether a process of its own encodes and sends.
    """

    traces: Endpoint | None
    metrics: Endpoint | None
    own_process: bool = True


def read_config(environment: Mapping[str, str] | None = None, *, own_process: bool = True) -> OtlpConfig:
    """Read the environment.

    ``OTEL_SDK_DISABLED=true`` switches both signals off, ``OTEL_TRACES_EXPORTER`` and ``OTEL_METRICS_EXPORTER`` switch
    theirs off when they name other exporters than ``otlp``.

    Args:
        environment: The variables; None takes the process's.
        own_process: See :class:`OtlpConfig`.

    Raises:
        ConfigError: If a value cannot be used; it names the variable.
    """
    env = os.environ if environment is None else environment
    found = {signal: _endpoint(env, signal) if _wanted(env, signal) else None for signal in SIGNALS}
    return OtlpConfig(found["traces"], found["metrics"], own_process)


def _wanted(env: Mapping[str, str], signal: Signal) -> bool:
    if env.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    exporters = env.get(f"OTEL_{signal.upper()}_EXPORTER", "").strip()
    return not exporters or "otlp" in {name.strip() for name in exporters.split(",")}


def _endpoint(env: Mapping[str, str], signal: Signal) -> Endpoint:
    protocol_name, protocol = _get(env, signal, "PROTOCOL", "http/protobuf")
    if protocol not in DEFAULT_ENDPOINTS:
        raise ConfigError(protocol_name, f"{protocol!r} is not one of {', '.join(DEFAULT_ENDPOINTS)}")
    own, url = _get(env, signal, "ENDPOINT", DEFAULT_ENDPOINTS[protocol])
    parts = urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ConfigError(own, f"{url!r} is no URL of http or https")
    url = parts.geturl()
    if protocol == "http/protobuf" and own == "OTEL_EXPORTER_OTLP_ENDPOINT":
        url = f"{url.rstrip('/')}/v1/{signal}"
    timeout_name, timeout = _get(env, signal, "TIMEOUT", "")
    # Compressing takes as long as encoding; to a collector on this machine it saves nothing. The specification leaves
    # the default to whoever exports, with just that in mind.
    unsaid = "none" if _is_here(parts.hostname) else "gzip"
    compression_name, compression = _get(env, signal, "COMPRESSION", unsaid)
    if compression not in {"gzip", "none"}:
        raise ConfigError(compression_name, f"{compression!r} is neither gzip nor none")
    certificate = _get(env, signal, "CERTIFICATE", "")[1]
    return Endpoint(
        url=url,
        protocol=cast("Protocol", protocol),
        headers=_headers(*_get(env, signal, "HEADERS", "")),
        timeout_seconds=_timeout(timeout_name, timeout),
        gzip=compression == "gzip",
        certificate=Path(certificate) if certificate else None,
    )


def _is_here(host: str) -> bool:
    """Return whether a host is this machine by its name: no name is resolved for it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _get(env: Mapping[str, str], signal: Signal, what: str, default: str) -> tuple[str, str]:
    """Return the variable that counts and its value; an empty one counts as unset."""
    common = f"OTEL_EXPORTER_OTLP_{what}"
    for name in (f"OTEL_EXPORTER_OTLP_{signal.upper()}_{what}", common):
        value = env.get(name, "").strip()
        if value:
            return name, value
    return common, default


def _headers(name: str, text: str) -> Mapping[str, str]:
    """Parse ``key=value,key=value`` with percent-encoded values, as W3C baggage writes them."""
    headers: dict[str, str] = {}
    for number, item in enumerate(filter(None, (part.strip() for part in text.split(","))), 1):
        key, equals, value = item.partition("=")
        if not equals or not key.strip():
            raise ConfigError(
                name, f"entry {number} is not key=value"
            )  # not quoted: it may hold a credential
        headers[unquote(key.strip()).lower()] = unquote(value.strip())
    return headers


def _timeout(name: str, text: str) -> float:
    """Read seconds; the specification counts milliseconds, the Python SDK seconds: this is the SDK's reading."""
    if not text:
        return DEFAULT_TIMEOUT_SECONDS
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise ConfigError(name, f"{text!r} is no number of seconds")
    return seconds
