"""Pages somebody straight from the process: critical alerts, without Prometheus in between.

Rule: the same alerts as the rules for Prometheus, under the same names; the run never waits for any of it. Whatever
is called here only notes what is the case, under a lock that is held for no longer than that; threads of their own tell
every endpoint, see :mod:`quiesce_exporters.alert_delivery`. Nothing here suspends, or blocks but for the close, which
takes its deadline and not more.

==========================  ====================================================  ==========================
alert                       begins                                                ends
==========================  ====================================================  ==========================
that of an invariant        when it is violated                                   half an hour after the last time
QuiesceCheckpointFailing    when an attempt to save fails or is refused           with the next that is published
QuiesceCheckpointStalled    when a phase runs for longer than its limit           when the phase ends
QuiesceRunDown              when the run fails                                    a quarter of an hour later
==========================  ====================================================  ==========================

It is a sink, which hears of the run's log and of metric samples, and an observer, which hears of hooks; either is
enough. Samples speak only about what neither of the other two has ever told.
"""

from __future__ import annotations

import math
import os
import socket
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final

from quiesce.errors import ConfigError
from quiesce.telemetry import names
from quiesce_dashboards.alert_settings import alert_config
from quiesce_dashboards.alerts import Alert, alert_of, alerts
from quiesce_dashboards.objectives import AlertConfig
from quiesce_exporters.alert_delivery import Delivery, Endpoint, Standing, endpoint

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from quiesce.telemetry.finished import FinishedSpan
    from quiesce.telemetry.sinks import SinkContext

__all__ = [
    "TOKEN_VARIABLE",
    "URLS_VARIABLE",
    "WEBHOOK_VARIABLE",
    "AlertStatistics",
    "Alertmanager",
    "make_alertmanager",
]

URLS_VARIABLE: Final = "QUIESCE_ALERTMANAGER"
"""Addresses of Alertmanagers, with commas in between."""

WEBHOOK_VARIABLE: Final = "QUIESCE_ALERT_WEBHOOK"
"""An address that takes what an Alertmanager sends to webhooks."""

TOKEN_VARIABLE: Final = "QUIESCE_ALERTMANAGER_TOKEN"  # noqa: S105 - the variable's name
"""A bearer token for the Alertmanagers."""

RESEND_SECONDS: Final = 60.0
"""How often what stands is sent again; an Alertmanager that lost its memory has it back then."""

LIVES: Final = 4
"""An alert without an end of its own is kept for so many periods after it was sent last."""

HOLD_SECONDS: Final = 60.0
"""Twice Alertmanager's default ``group_wait``."""

AFTER_END_SECONDS: Final = 900.0
"""How long an alert outlives the process that sent it."""

MAX_STANDING: Final = 256
KEEP_RESOLVED_SECONDS: Final = 3600.0
CLOSE_SECONDS: Final = 1.8
"""What closing takes at most, whatever it is given: a process that ends waits for two seconds, for all sinks together."""

_SHOWN_GROUPS: Final = 5
_BAD_OUTCOMES: Final = ("failed", "refused")


@dataclass(frozen=True, slots=True)
class AlertStatistics:
    """What was sent so far.

    Attributes:
        standing: Alerts that stand now.
        posts: Requests that were taken, by endpoint.
        failures: Requests that were not, by endpoint.
        refused: Alerts that an endpoint will never take, by endpoint.
        forgotten: Alerts that were given up for want of room.
    """

    standing: int
    posts: Mapping[str, int] = field(hash=False)
    failures: Mapping[str, int] = field(hash=False)
    refused: Mapping[str, int] = field(hash=False)
    forgotten: int = 0


class Alertmanager:
    """A sink, and an observer, that tells Alertmanagers and webhooks what is wrong with a run.

    Args:
        endpoints: Whom to tell.
        run: The run's name.
        role: What this process is in the run.
        instance: What the process is known by; None takes the host's name.
        config: The numbers, and where the runbooks are.
        resend_seconds: How often what stands is sent again.
        hold_seconds: How long an alert stands at least before its end is told.
    """

    def __init__(
        self,
        endpoints: Iterable[Endpoint],
        *,
        run: str,
        role: str,
        instance: str | None = None,
        config: AlertConfig | None = None,
        resend_seconds: float = RESEND_SECONDS,
        hold_seconds: float = HOLD_SECONDS,
    ) -> None:
        self._config = AlertConfig() if config is None else config
        self._alerts = {alert.name: alert for alert in alerts(self._config)}
        self._source = {"run": run, "role": role, "instance": instance or socket.gethostname() or "unknown"}
        self._resend = resend_seconds
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._closed = False
        # All that follows is changed under the lock.
        self._standing: dict[tuple[str, ...], Standing] = {}
        self._revision = 0
        self._forgotten = 0
        self._phases: dict[str, dict[str, float]] = {}  # phase -> cut -> Unix time of its begin
        self._failed: dict[str, None] = {}  # attempts that failed since the last success, by cut
        self._told_phases = self._told_attempts = False
        self.deliveries = tuple(
            Delivery(
                to,
                self._current,
                resend_seconds=resend_seconds,
                hold_seconds=hold_seconds,
                last=self._final,
                number=number,
            )
            for number, to in enumerate(endpoints)
        )
        for delivery in self.deliveries:
            delivery.thread.start()

    # ------------------------------------------------------------------------------------------- as an observer

    def invariant_violated(self, violation: Any) -> None:  # noqa: ANN401 - a Violation, as the hook says
        """Begin the invariant's alert, or prolong it."""
        self._violated(
            str(violation.invariant),
            str(violation.severity),
            str(violation.message),
            tuple(violation.groups),
            str(violation.cut_id),
        )

    def checkpoint_ended(
        self,
        cut_id: str,
        step: int,
        outcome: str,
        reason: str,
        groups: Mapping[str, int],
        rows: int,
        num_bytes: int,
    ) -> None:
        """Begin or end the alert about failing attempts."""
        with _Noting(self) as noting:
            if noting:
                self._told_attempts = True
                self._attempted(outcome, reason, cut_id or f"step {step}")
                for running in self._phases.values():
                    running.pop(cut_id, None)

    def phase_started(self, cut_id: str, phase: str) -> None:
        """Note the begin of a phase."""
        with _Noting(self) as noting:
            if noting:
                self._told_phases = True
                self._phases.setdefault(phase, {})[cut_id] = time.time()

    def phase_ended(self, cut_id: str, phase: str, ns: int, outcome: str) -> None:
        """Note the end of a phase."""
        with _Noting(self) as noting:
            if noting:
                self._phases.get(phase, {}).pop(cut_id, None)

    def window_requested(self, window_id: str, asked_ns: int) -> None:
        """Note the begin of a drain, which the barrier tells."""
        self.phase_started(window_id, "drain")

    def window_opened(
        self,
        window_id: str,
        drain_ns: int,
        delayed_by: tuple[tuple[str, str, int, int], ...],
        opened_ns: int,
    ) -> None:
        """Note that a drain is over, and the exclusive phase begins."""
        self.phase_ended(window_id, "drain", drain_ns, "completed")
        self.phase_started(window_id, "exclusive")

    def window_closed(
        self, window_id: str, drain_ns: int, exclusive_ns: int, outcome: str, closed_ns: int
    ) -> None:
        """Note the end of the exclusive phase."""
        self.phase_ended(window_id, "exclusive", exclusive_ns, outcome)

    def window_abandoned(
        self,
        window_id: str,
        drain_ns: int,
        outcome: str,
        delayed_by: tuple[tuple[str, str, int, int], ...],
        ended_ns: int,
    ) -> None:
        """Note the end of a drain that was given up."""
        self.phase_ended(window_id, "drain", drain_ns, outcome)

    def run_state_changed(self, state: str) -> None:
        """Begin the alert of a run that failed."""
        with _Noting(self) as noting:
            if noting and state == "failed":
                now = time.time()
                self._begin(
                    "QuiesceRunDown",
                    {},
                    now + AFTER_END_SECONDS,
                    note="The process itself says that the run failed.",
                )

    # ------------------------------------------------------------------------------------------- as a sink

    takes_spans = False  # what is taken in and thrown away would count as exported

    def spans(self, batch: Sequence[FinishedSpan]) -> None:
        """Take no spans."""

    def events(self, events: Sequence[Mapping[str, object]]) -> None:
        """Take what the run's log says about violations, attempts to save and the run's state."""
        for event in events:
            name = event.get("event")
            if name == "invariant.violated":
                groups = event.get("groups")
                self._violated(
                    str(event.get("invariant")),
                    str(event.get("severity")),
                    str(event.get("message", "")),
                    tuple(map(str, groups)) if isinstance(groups, list | tuple) else (),
                    str(event.get("cut_id", "")),
                )
            elif name in {"checkpoint.published", "checkpoint.not_published"}:
                outcome = "completed" if name == "checkpoint.published" else str(event.get("outcome"))
                with _Noting(self) as noting:
                    if noting:
                        self._told_attempts = True
                        key = str(event.get("cut_id") or f"step {event.get('step')}")
                        self._attempted(outcome, str(event.get("reason", "")), key)
            elif name == "run.state":
                self.run_state_changed(str(event.get("state")))

    def samples(self, families: Sequence[Metric], unix_time: float) -> None:
        """Take from a snapshot what neither hooks nor the log have told."""
        found: dict[str, dict[str, float]] = {}
        wanted = {
            metric.name: label
            for metric, label in (
                (names.INVARIANT_LAST_VIOLATION, "invariant"),
                (names.CHECKPOINT_PHASE, "phase"),
                (names.CHECKPOINT_PHASE_STARTED, "phase"),
                (names.CHECKPOINT_FAILURES, ""),
            )
        }
        for family in families:
            if family.type == "histogram":
                continue  # none is wanted, and their samples would be made only for this
            for sample in family.samples:
                if sample.name in wanted:
                    values = found.setdefault(sample.name, {})
                    key = sample.labels.get(wanted[sample.name], "")
                    values[key] = values.get(key, 0.0) + sample.value
        with _Noting(self) as noting:
            if noting:
                self._sampled(found, unix_time)

    def close(self, deadline_seconds: float) -> None:
        """Tell what is left to be told, and let go; what cannot be told by then is left behind."""
        if self._closed or self._pid != os.getpid():
            return
        self._closed = True
        deadline = time.monotonic() + max(0.0, min(deadline_seconds, CLOSE_SECONDS))
        for delivery in self.deliveries:
            delivery.stop(deadline)
        for delivery in self.deliveries:
            delivery.thread.join(max(0.0, deadline - time.monotonic()))

    def statistics(self) -> AlertStatistics:
        """Return what was sent so far."""
        with self._lock:
            standing = sum(alert.resolved is None for alert in self._standing.values())
        by_name = {str(delivery.to): delivery for delivery in self.deliveries}
        return AlertStatistics(
            standing,
            {name: delivery.posts for name, delivery in by_name.items()},
            {name: delivery.failures for name, delivery in by_name.items()},
            {name: delivery.refused for name, delivery in by_name.items()},
            self._forgotten,
        )

    # ------------------------------------------------------------------------------------------- under the lock

    def _violated(
        self, invariant: str, severity: str, message: str, groups: tuple[str, ...], cut_id: str
    ) -> None:
        now = time.time()
        note = message
        if groups:
            more = f" and {len(groups) - _SHOWN_GROUPS} more" if len(groups) > _SHOWN_GROUPS else ""
            note += f" Groups: {', '.join(groups[:_SHOWN_GROUPS])}{more}."
        if cut_id:
            note += f" Cut: {cut_id}."
        with _Noting(self) as noting:
            if noting:
                self._begin(
                    alert_of(invariant),
                    {"invariant": invariant},
                    now + self._config.violation_seconds,
                    note=note.strip(),
                    severity=severity if severity in {"critical", "warning"} else None,
                )

    def _attempted(self, outcome: str, reason: str, attempt: str) -> None:
        if outcome == "completed":
            self._failed.clear()
            self._end("QuiesceCheckpointFailing", {})
        elif outcome in _BAD_OUTCOMES:
            while len(self._failed) >= MAX_STANDING:
                del self._failed[next(iter(self._failed))]
            self._failed[attempt] = None
            self._begin(
                "QuiesceCheckpointFailing",
                {},
                math.inf,
                value=str(len(self._failed)),
                note=f"The last one: {outcome}{f', {reason}' if reason else ''}.",
            )

    def _sampled(self, found: Mapping[str, Mapping[str, float]], unix_time: float) -> None:
        lasts = found.get(names.INVARIANT_LAST_VIOLATION.name, {})
        for invariant, last in lasts.items():
            ends = last + self._config.violation_seconds
            key = self._key(alert_of(invariant), {"invariant": invariant})
            known = self._standing.get(key)
            if last <= 0 or ends <= unix_time:
                continue
            if known is None or (known.resolved is not None and known.ends < ends):
                self._begin(
                    key[0],
                    {"invariant": invariant},
                    ends,
                    note="The metrics of the run say so.",
                    started=last,
                )
            elif known.resolved is None and known.ends < ends - self._resend:
                # What was told with its evidence goes on. A moment's difference is the metric's own delay.
                self._standing[key] = replace(known, ends=ends)
        started = found.get(names.CHECKPOINT_PHASE_STARTED.name, {})
        running = {
            phase: began
            for phase, began in started.items()
            if found.get(names.CHECKPOINT_PHASE.name, {}).get(phase) == 1
        }
        if not self._told_phases:
            self._phases = {phase: {"": began} for phase, began in running.items()}
        failed = found.get(names.CHECKPOINT_FAILURES.name, {}).get("")
        if not self._told_attempts and failed is not None:
            if failed == 0:
                self._end("QuiesceCheckpointFailing", {})
            elif self._key("QuiesceCheckpointFailing", {}) not in self._standing_now():
                self._begin("QuiesceCheckpointFailing", {}, math.inf, value=f"{failed:.0f}")

    def _standing_now(self) -> set[tuple[str, ...]]:
        return {key for key, alert in self._standing.items() if alert.resolved is None}

    def _begin(
        self,
        name: str,
        labels: Mapping[str, str],
        ends: float,
        *,
        value: str = "",
        note: str = "",
        severity: str | None = None,
        started: float | None = None,
    ) -> None:
        alert = self._alerts[name]
        key = self._key(name, labels)
        before = self._standing.pop(key, None)
        texts = self._texts(alert, labels, value)
        if note:
            texts["description"] = f"{texts['description']} {note}"
        now = time.time()
        self._revision += 1
        self._standing[key] = Standing(
            key=key,
            labels={
                "alertname": name,
                "severity": severity or alert.severity,
                **self._source,
                **labels,
                "source": "process",
            },
            annotations=texts,
            started=before.started if before is not None and before.resolved is None else started or now,
            ends=ends,
            resolved=None,
            revision=self._revision,
        )
        while len(self._standing) > MAX_STANDING:
            ended = next((key for key, known in self._standing.items() if known.resolved is not None), None)
            del self._standing[next(iter(self._standing)) if ended is None else ended]
            self._forgotten += 1

    def _texts(self, alert: Alert, labels: Mapping[str, str], value: str) -> dict[str, str]:
        told = {**self._source, **labels, "kind": "that the log names", "value": value}
        return alert.texts(told)

    def _end(self, name: str, labels: Mapping[str, str]) -> None:
        key = self._key(name, labels)
        alert = self._standing.get(key)
        if alert is not None and alert.resolved is None:
            self._standing[key] = replace(alert, resolved=time.time())

    def _key(self, name: str, labels: Mapping[str, str]) -> tuple[str, ...]:
        return (name, *(f"{key}={value}" for key, value in sorted(labels.items())))

    # ------------------------------------------------------------------------------------------- for deliveries

    def _current(self, now: float) -> list[Standing]:
        """Return what stands or has ended, with an end for what has none of its own."""
        with self._lock:
            self._watch(now)
            for key, alert in list(self._standing.items()):
                if alert.resolved is None and alert.ends <= now:
                    self._standing[key] = replace(alert, resolved=now)
                elif alert.resolved is not None and now - alert.resolved > KEEP_RESOLVED_SECONDS:
                    del self._standing[key]
            standing = list(self._standing.values())
        until = now + LIVES * self._resend
        return [
            replace(alert, ends=min(alert.ends, until) if math.isinf(alert.ends) else alert.ends)
            for alert in standing
        ]

    def _final(self, now: float) -> list[Standing]:
        """Return the same at the end of the process, which nothing follows that could be sent again."""
        return [
            alert
            if alert.resolved is not None
            else replace(alert, ends=max(alert.ends, now + AFTER_END_SECONDS))
            for alert in self._current(now)
        ]

    def _watch(self, now: float) -> None:
        """Begin and end the alerts about phases that run for too long."""
        name = "QuiesceCheckpointStalled"
        for phase, limit in self._config.phase_limits.items():
            running = self._phases.get(phase)
            age = now - min(running.values()) if running else 0.0
            labels = {"phase": phase}
            key = self._key(name, labels)
            standing = key in self._standing and self._standing[key].resolved is None
            if age > limit and not standing:
                self._begin(name, labels, math.inf, value=f"{age:.0f} s", started=now - age + limit)
            elif age <= limit and standing and math.isinf(self._standing[key].ends):
                self._end(name, labels)


class _Noting:
    """Holds the lock of an alert sink while something is noted, and has its deliveries look.

    Entering says whether there is anything to note: not in a forked child, where a thread of the parent's may have
    held the lock, and not after the end.
    """

    def __init__(self, sink: Alertmanager) -> None:
        self._sink = sink
        self._noting = not sink._closed and sink._pid == os.getpid()  # noqa: SLF001 - one protocol, one module

    def __enter__(self) -> bool:
        if self._noting:
            self._sink._lock.acquire()  # noqa: SLF001 - as above
        return self._noting

    def __exit__(self, *exc: object) -> None:
        if self._noting:
            self._sink._lock.release()  # noqa: SLF001 - as above
            for delivery in self._sink.deliveries:
                delivery.wake()


def make_alertmanager(context: SinkContext) -> Alertmanager:
    """Make the sink; the entry point ``alertmanager``.

    Args:
        context: Its settings may have ``urls`` (a list of Alertmanagers' addresses, or one text with commas),
            ``webhook``, ``token``, ``instance``, ``runbooks``, ``alerts`` (numbers by the names of :class:`AlertConfig`),
            ``resend_seconds``, ``hold_seconds`` and ``timeout_seconds``; else the environment is asked, as
            :data:`URLS_VARIABLE`, :data:`WEBHOOK_VARIABLE` and :data:`TOKEN_VARIABLE`.

    Raises:
        ConfigError: If nobody is named, or an address or a number cannot be used.
    """
    given = context.settings
    urls = given.get("urls") or os.environ.get(URLS_VARIABLE) or ()
    listed = (
        urls.split(",")
        if isinstance(urls, str)
        else [str(url) for url in urls]
        if isinstance(urls, Sequence)
        else []
    )
    token = str(given.get("token") or os.environ.get(TOKEN_VARIABLE) or "").strip() or None
    webhook = str(given.get("webhook") or os.environ.get(WEBHOOK_VARIABLE) or "").strip()
    timeout = _seconds(given, "timeout_seconds", 5.0)
    endpoints = [
        endpoint("alertmanager", url.strip(), key="alertmanager.urls", token=token, timeout_seconds=timeout)
        for url in listed
        if url.strip()
    ]
    if webhook:
        endpoints.append(endpoint("webhook", webhook, key="alertmanager.webhook", timeout_seconds=timeout))
    if not endpoints:
        raise ConfigError(
            "alertmanager.urls",
            f"name an Alertmanager here or as {URLS_VARIABLE}, or a webhook as {WEBHOOK_VARIABLE}",
        )
    said = given.get("alerts") or {}
    if not isinstance(said, Mapping):
        raise ConfigError("alertmanager.alerts", f"must be a section with keys, not {said!r}")
    try:
        config = alert_config(said)
    except ConfigError as error:
        raise ConfigError(f"alertmanager.{error.key}", error.problem) from error
    runbooks = given.get("runbooks")
    return Alertmanager(
        endpoints,
        run=context.run,
        role=context.role,
        instance=str(given["instance"]) if given.get("instance") else None,
        config=config if runbooks is None else replace(config, runbook_base_url=str(runbooks)),
        resend_seconds=_seconds(given, "resend_seconds", RESEND_SECONDS),
        hold_seconds=_seconds(given, "hold_seconds", HOLD_SECONDS),
    )


def _seconds(settings: Mapping[str, object], name: str, default: float) -> float:
    value = settings.get(name, default)
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not (math.isfinite(value) and value > 0)
    ):
        raise ConfigError(f"alertmanager.{name}", f"{value!r} is not a positive number of seconds")
    return float(value)
