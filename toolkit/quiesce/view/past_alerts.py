"""Evaluates the alerting rules over the past: ``ALERTS`` as Prometheus would have written it, had it been there.

Rule: expressions are evaluated by a Prometheus over the recorded blocks, never by own code; what is done here is what
a rule adds to its expression: ``for``, ``keep_firing_for`` and labels. ``promtool tsdb create-blocks-from rules`` leaves
alerting rules out. ``write`` and ``stop`` suspend.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final
from urllib.parse import urlencode

import yaml

from quiesce.view.openmetrics import labels_of
from quiesce.view.supervise import Command, Supervised

if TYPE_CHECKING:
    from quiesce.threads import DaemonExecutor

__all__ = ["Evaluation", "Rule", "ask_range", "read_rules", "states", "stretches"]

MOST_STEPS: Final = 10_000
"""Prometheus answers at most 11,000 points of a series at once."""

REST_SECONDS: Final = 7200.0
"""Between recordings that are further apart nothing is evaluated: no alert is kept for so long."""

READY_SECONDS: Final = 60.0
_QUERY_SECONDS: Final = 120.0
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h|d|w|y)")
_UNITS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0, "y": 31536000.0}
_LOG: Final = logging.getLogger("quiesce.view")


@dataclass(frozen=True, slots=True)
class Rule:
    """An alerting rule.

    Attributes:
        alert: Its name.
        expression: When it holds.
        hold_seconds: How long it has to hold.
        keep_seconds: How long it fires on.
        labels: Labels that it adds.
    """

    alert: str
    expression: str
    hold_seconds: float
    keep_seconds: float
    labels: Mapping[str, str]


def read_rules(text: str) -> list[Rule]:
    """Return the alerting rules of a rule file.

    Args:
        text: The file's YAML.
    """
    return [
        Rule(
            rule["alert"],
            rule["expr"],
            _seconds(rule.get("for", "")),
            _seconds(rule.get("keep_firing_for", "")),
            {name: str(value) for name, value in rule.get("labels", {}).items()},
        )
        for group in yaml.safe_load(text).get("groups", [])
        for rule in group.get("rules", [])
        if "alert" in rule
    ]


def states(
    active: Sequence[float], times: Sequence[float], hold_seconds: float, keep_seconds: float
) -> Iterator[tuple[float, str]]:
    """Yield when an alert was pending or firing.

    Args:
        active: The times at which its expression held, in order.
        times: All times of evaluation, in order.
        hold_seconds: The rule's ``for``.
        keep_seconds: The rule's ``keep_firing_for``.
    """
    held = set(active)
    since: float | None = None
    fires = False
    ends = -math.inf  # when it stops to fire, from the first evaluation on at which it did not hold
    for at in times:
        if at in held:
            since, ends = at if since is None else since, -math.inf
            fires = fires or at - since >= hold_seconds
            yield at, "firing" if fires else "pending"
            continue
        since = None
        if fires and ends < 0:
            ends = at + keep_seconds
        fires = fires and at < ends
        if fires:
            yield at, "firing"


class Evaluation:
    """A Prometheus that only answers queries, for as long as the rules are evaluated.

    Args:
        folder: Where its files are.
        program: Prometheus.
        pool: Where it is asked.
        lookback_seconds: For how long a value holds.
    """

    def __init__(self, folder: Path, program: Path, pool: DaemonExecutor, lookback_seconds: int) -> None:
        self._folder = folder
        self._program = program
        self._pool = pool
        self._lookback = lookback_seconds
        self._server: Supervised | None = None

    async def write(self, rules: Sequence[Rule], data: Path, path: Path, *, step: float) -> int:
        """Write the series ``ALERTS`` as OpenMetrics text.

        Args:
            rules: The rules.
            data: The store with what was recorded.
            path: The file to write.
            step: Seconds between evaluations.

        Returns:
            How many samples there are.

        Raises:
            OSError: If Prometheus does not answer.
        """
        parts = stretches(_spans(data))
        configuration = self._folder / "evaluation.yml"
        configuration.write_text("scrape_configs: []\n")

        def command(port: int) -> Command:
            return Command(
                self._program,
                (
                    f"--config.file={configuration}",
                    f"--storage.tsdb.path={data}",
                    "--storage.tsdb.retention.time=3650d",
                    f"--web.listen-address=127.0.0.1:{port}",
                    f"--query.lookback-delta={self._lookback}s",
                    "--web.cors.origin=none",
                ),
            )

        self._server = Supervised("Evaluation", command, self._folder, self._pool)
        self._server.begin()
        loop = asyncio.get_running_loop()
        until = loop.time() + READY_SECONDS
        while not self._server.ok:
            if loop.time() > until:
                raise OSError(f"Prometheus: {self._server.error}")
            await asyncio.sleep(0.05)
        port = self._server.port
        return await loop.run_in_executor(self._pool, _write, rules, port, path, parts, step)

    async def stop(self) -> None:
        """End it."""
        if self._server is not None:
            await self._server.stop()


def stretches(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """Put together what is not far apart: a run that rested for months is not evaluated in between.

    Args:
        spans: Begin and end of each block, in Unix seconds.
    """
    found: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if found and begin - found[-1][1] < REST_SECONDS:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


def _spans(data: Path) -> list[tuple[float, float]]:
    """Return begin and end of each block, in Unix seconds."""
    found = [json.loads(path.read_bytes()) for path in data.glob("*/meta.json")]
    return [(meta["minTime"] / 1000, meta["maxTime"] / 1000) for meta in found]


def _write(
    rules: Sequence[Rule], port: int, path: Path, parts: Sequence[tuple[float, float]], step: float
) -> int:
    count = 0
    with path.open("w", encoding="utf-8") as file:
        for first, last in parts:
            times = [round(first + index * step, 3) for index in range(int((last - first) / step) + 1)]
            for rule in rules:
                try:
                    count += _write_rule(file, rule, port, times, step)
                except (ValueError, KeyError, http.client.HTTPException) as error:
                    _LOG.warning("%s was not evaluated over the recording: %s", rule.alert, error)
        file.write("# EOF\n")
    return count


def _write_rule(file: IO[str], rule: Rule, port: int, times: Sequence[float], step: float) -> int:
    active: dict[tuple[tuple[str, str], ...], list[float]] = {}
    for begin in range(0, len(times), MOST_STEPS):
        part = times[begin : begin + MOST_STEPS]
        for found in ask_range(port, rule.expression, part[0], part[-1], step):
            labels = {**found["metric"], **rule.labels, "alertname": rule.alert}
            labels.pop("__name__", None)
            points = active.setdefault(tuple(sorted(labels.items())), [])
            # Prometheus answers in milliseconds; the nearest of our times is meant.
            points += [
                times[min(len(times) - 1, round((float(at) - times[0]) / step))] for at, _ in found["values"]
            ]
    count = 0
    for series, points in active.items():
        inside = labels_of(dict(series))
        for at, state in states(points, times, rule.hold_seconds, rule.keep_seconds):
            file.write(f'ALERTS{{{inside},alertstate="{state}"}} 1 {at:.3f}\n')
            count += 1
    return count


def ask_range(port: int, query: str, begin: float, end: float, step: float) -> list[dict[str, Any]]:
    """Return what a Prometheus on this machine answers for a range of time; it blocks.

    Args:
        port: Where it listens.
        query: PromQL.
        begin: Unix seconds.
        end: Unix seconds.
        step: Seconds between two points.

    Raises:
        OSError: If it does not answer.
        http.client.HTTPException: If it answers something else.
        ValueError: If it refuses the query.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_QUERY_SECONDS)
    try:
        asked = urlencode(
            {"query": query, "start": f"{begin:.3f}", "end": f"{end:.3f}", "step": f"{step:.3f}"}
        )
        connection.request("GET", f"/api/v1/query_range?{asked}")
        told = json.loads(connection.getresponse().read())
    finally:
        connection.close()
    if told.get("status") != "success":
        raise ValueError(told.get("error", "Prometheus answers something else"))
    result: list[dict[str, Any]] = told["data"]["result"]
    return result


def _seconds(text: str) -> float:
    return sum(float(number) * _UNITS[unit] for number, unit in _DURATION.findall(str(text)))
