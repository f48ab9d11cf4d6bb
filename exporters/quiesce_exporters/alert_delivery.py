"""Delivers standing alerts to one Alertmanager or webhook, from a thread of its own, however long that is away.

Rule: what is delivered is derived from what stands, never from a queue: an endpoint that was away is told what stands
when it is back, and what began and ended meanwhile is told as begun first. So nothing is lost but what was
forgotten for want of room. A failure waits before the next try, longer each time up to a bound; nobody waits for a
delivery. Addresses and headers may hold credentials, so only scheme, host and port are ever shown. Blocks on the network
in its own daemon thread only.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import logging
import ssl
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, Literal
from urllib.parse import unquote, urlsplit

from quiesce.errors import ConfigError

__all__ = ["Delivery", "Endpoint", "EndpointKind", "Standing", "endpoint"]

EndpointKind = Literal["alertmanager", "webhook"]

API_PATH: Final = "/api/v2/alerts"

BACKOFF_SECONDS: Final = (0.5, 10.0)
"""Wait after the first failure, and the longest: an Alertmanager that is back after a minute hears within ten seconds."""

LAST_BACKOFF_SECONDS: Final = 0.2
"""Wait between tries once the process ends."""

TICK_SECONDS: Final = 1.0

_LONGEST_ANSWER: Final = 1 << 16
_LOG: Final = logging.getLogger("quiesce.alerts")
_FINE: Final = range(200, 300)
_CLIENT_ERRORS: Final = range(400, 500)
_TRY_AGAIN: Final = frozenset({401, 403, 404, 407, 408, 425, 429})
"""Client errors that somebody may put right meanwhile: credentials, a path behind a proxy, a limit."""


@dataclass(frozen=True, slots=True)
class Standing:
    """An alert that stands, or has ended.

    Attributes:
        key: What makes two of them the same alert.
        labels: Its labels, ``alertname`` and ``severity`` among them.
        annotations: Its texts.
        started: Unix seconds.
        ends: Unix seconds at which it ends by itself unless it is sent again.
        resolved: Unix seconds at which it ended, or None.
        revision: Changes whenever it has to be sent anew.
    """

    key: tuple[str, ...]
    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    started: float
    ends: float
    resolved: float | None
    revision: int


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where alerts go.

    Attributes:
        kind: What speaks there.
        scheme: ``http`` or ``https``.
        host: The host.
        port: The port.
        path: Path and query; a webhook's may be its credential.
        headers: Sent with each request; may hold credentials.
        timeout_seconds: For one request.
    """

    kind: EndpointKind
    scheme: str
    host: str
    port: int
    path: str
    headers: Mapping[str, str]
    timeout_seconds: float

    def __str__(self) -> str:
        """Name it without anything secret."""
        return f"{self.kind} {self.scheme}://{self.host}:{self.port}"

    def __repr__(self) -> str:
        """Name it without anything secret."""
        return f"<{self}>"


def endpoint(
    kind: EndpointKind, url: str, *, key: str, token: str | None = None, timeout_seconds: float = 5.0
) -> Endpoint:
    """Make an endpoint of its address.

    Args:
        kind: What speaks there; an Alertmanager's address is its base address, with its path prefix if it has one.
        url: http or https; user and password in it become a header.
        key: What the address is configured as, for errors.
        token: A bearer token.
        timeout_seconds: For one request.

    Raises:
        ConfigError: If that is no address. It is not quoted, since it may hold a credential.
    """
    parts = urlsplit(url if "://" in url else f"http://{url}")
    try:
        port = parts.port
    except ValueError:
        raise ConfigError(key, "the port of the address is no number from 0 to 65535") from None
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ConfigError(key, "this is not an address of http or https")
    headers = {"Content-Type": "application/json", "User-Agent": "quiesce"}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    elif parts.username is not None:
        pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        headers["Authorization"] = "Basic " + base64.b64encode(pair.encode()).decode()
    if any(ord(letter) < ord(" ") for value in headers.values() for letter in value):
        raise ConfigError(key, "the credentials have a character that no header may have")
    path = parts.path
    if kind == "alertmanager" and not path.endswith(API_PATH):
        path = path.rstrip("/") + API_PATH
    if parts.query:
        path = f"{path}?{parts.query}"
    return Endpoint(
        kind=kind,
        scheme=parts.scheme,
        host=parts.hostname,
        port=port or (443 if parts.scheme == "https" else 80),
        path=path or "/",
        headers=headers,
        timeout_seconds=timeout_seconds,
    )


@dataclass(slots=True)
class _Told:
    """What an endpoint was told of an alert."""

    revision: int
    at: float  # when it was told last, on the monotonic clock
    began: float  # when it was told that the alert stands
    over: bool = False  # whether it was told that the alert ended


class Delivery:
    """Tells one endpoint of what stands.

    Args:
        to: The endpoint.
        standing: Returns what stands or has ended, at a Unix time; called from the thread.
        resend_seconds: How often an Alertmanager is told again of what stands.
        hold_seconds: How long an endpoint that was told of an alert is left before it is told that the alert ended:
            an Alertmanager that hears of both within its ``group_wait`` notifies nobody.
        last: What follows at the end: returns what stands then.

    Attributes:
        posts: Requests that were taken.
        failures: Requests that were not.
        refused: Alerts that the endpoint will never take.
    """

    def __init__(
        self,
        to: Endpoint,
        standing: Callable[[float], Sequence[Standing]],
        *,
        resend_seconds: float,
        hold_seconds: float,
        last: Callable[[float], Sequence[Standing]],
        number: int = 0,
    ) -> None:
        self.to = to
        self._standing = standing
        self._last = last
        self._resend = resend_seconds if to.kind == "alertmanager" else None
        self._hold = hold_seconds
        self._told: dict[tuple[str, ...], _Told] = {}
        self._wake = threading.Event()
        self._stop = threading.Event()
        self._deadline = 0.0
        self.posts = 0
        self.failures = 0
        self.refused = 0
        self._failing = False
        self.thread = threading.Thread(target=self._run, name=f"quiesce-alerts-{number}", daemon=True)

    def wake(self) -> None:
        """Have it look at what stands."""
        self._wake.set()

    def stop(self, deadline: float) -> None:
        """Have the thread say what is left to be said, and end by that time of the monotonic clock."""
        self._deadline = deadline
        self._stop.set()
        self._wake.set()

    def _run(self) -> None:
        backoff = 0.0
        while not self._stop.is_set():
            if self._round(self._standing(time.time()), self.to.timeout_seconds):
                backoff = 0.0
                self._wake.wait(TICK_SECONDS)
                self._wake.clear()
            else:
                backoff = min(BACKOFF_SECONDS[1], backoff * 2) if backoff else BACKOFF_SECONDS[0]
                self._stop.wait(backoff)
        while (left := self._deadline - time.monotonic()) > 0:
            if self._round(self._last(time.time()), min(left, self.to.timeout_seconds), ending=True):
                return
            time.sleep(min(LAST_BACKOFF_SECONDS, max(0.0, self._deadline - time.monotonic())))

    def _round(self, standing: Sequence[Standing], timeout: float, *, ending: bool = False) -> bool:
        """Say what has to be said now; return whether it was taken."""
        now = time.monotonic()
        began, ended = self._due(standing, now, ending=ending)
        for alerts, over in ((began, False), (ended, True)):
            if not alerts:
                continue
            if not self._post(alerts, over=over, timeout=timeout):
                return False
            for alert in alerts:
                before = self._told.get(alert.key)
                since = now if before is None or before.over else before.began
                self._told[alert.key] = _Told(alert.revision, now, since, over)
        known = {alert.key for alert in standing}
        for key in [key for key in self._told if key not in known]:
            del self._told[key]
        return True

    def _due(
        self, standing: Sequence[Standing], now: float, *, ending: bool
    ) -> tuple[list[Standing], list[Standing]]:
        began, ended = [], []
        for alert in standing:
            told = self._told.get(alert.key)
            new = told is None or (told.over and told.revision != alert.revision)
            if new:
                began.append(alert)
            elif told is None or told.over:
                continue
            elif alert.resolved is not None:
                if ending or now - told.began >= self._hold:
                    ended.append(alert)
            elif self._resend is not None and (
                ending or told.revision != alert.revision or now - told.at >= self._resend
            ):
                began.append(alert)
        return began, ended

    # ------------------------------------------------------------------------------------------- one request

    def _post(self, alerts: Sequence[Standing], *, over: bool, timeout: float) -> bool:
        now = time.time()
        entries = [_entry(alert, over=over, now=now) for alert in alerts]
        body: Any = entries
        if self.to.kind == "webhook":
            body = _webhook(entries, over=over)
        try:
            status = self._exchange(json.dumps(body).encode(), timeout)
        except (OSError, ValueError, http.client.HTTPException) as error:
            # The text of an error may quote the address or a header, so only its kind, or the system's words.
            problem = getattr(error, "strerror", None) or type(error).__name__
            return self._failed(str(problem))
        if status in _FINE:
            self.posts += 1
            if self._failing:
                _LOG.info("%s takes alerts again", self.to)
            self._failing = False
            return True
        if status in _CLIENT_ERRORS and status not in _TRY_AGAIN:
            # The same words would be refused again, and would keep what comes after them from being said.
            self.refused += len(alerts)
            _LOG.error("%s refuses %d alerts for good: HTTP %d", self.to, len(alerts), status)
            return True
        return self._failed(f"HTTP {status}")

    def _failed(self, problem: str) -> bool:
        self.failures += 1
        if not self._failing:
            _LOG.warning("%s takes no alerts: %s; they are kept, and it is tried again", self.to, problem)
        self._failing = True
        return False

    def _exchange(self, body: bytes, timeout: float) -> int:
        to = self.to
        connection: http.client.HTTPConnection
        if to.scheme == "https":
            connection = http.client.HTTPSConnection(
                to.host, to.port, timeout=timeout, context=ssl.create_default_context()
            )
        else:
            connection = http.client.HTTPConnection(to.host, to.port, timeout=timeout)
        # The socket's timeout is for each read; an endpoint that drips bytes is cut off as a whole.
        cut_off = threading.Timer(timeout, _shut, (connection,))
        cut_off.daemon = True
        cut_off.start()
        try:
            connection.request("POST", to.path, body, dict(to.headers))
            response = connection.getresponse()
            response.read(_LONGEST_ANSWER)
            return response.status
        finally:
            cut_off.cancel()
            connection.close()


def _shut(connection: http.client.HTTPConnection) -> None:
    sock = connection.sock
    if sock is not None:
        with contextlib.suppress(OSError):
            sock.shutdown(2)


def _entry(alert: Standing, *, over: bool, now: float) -> dict[str, Any]:
    """Return an alert as Alertmanager's API takes it."""
    ends = now if over else max(alert.ends, now + 1)
    return {
        "labels": dict(alert.labels),
        "annotations": dict(alert.annotations),
        "startsAt": _time(min(alert.started, ends)),
        "endsAt": _time(ends),
    }


def _webhook(entries: Sequence[Mapping[str, Any]], *, over: bool) -> dict[str, Any]:
    """Return alerts as Alertmanager's own webhook sends them, so that one receiver understands both."""
    status = "resolved" if over else "firing"
    nothing_yet = "0001-01-01T00:00:00Z"
    return {
        "version": "4",
        "status": status,
        "receiver": "quiesce",
        "groupKey": "",
        "truncatedAlerts": 0,
        "externalURL": "",
        "groupLabels": {},
        "commonLabels": _common([entry["labels"] for entry in entries]),
        "commonAnnotations": _common([entry["annotations"] for entry in entries]),
        "alerts": [
            {
                "status": status,
                **entry,
                "endsAt": entry["endsAt"] if over else nothing_yet,
                "generatorURL": "",
                "fingerprint": "",
            }
            for entry in entries
        ],
    }


def _common(maps: Sequence[Mapping[str, str]]) -> dict[str, str]:
    first, *rest = maps
    return {key: value for key, value in first.items() if all(each.get(key) == value for each in rest)}


def _time(unix: float) -> str:
    return datetime.fromtimestamp(unix, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
