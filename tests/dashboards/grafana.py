"""What Grafana does to an expression before Prometheus sees it: intervals, steps and variables.

Source of the formulas: Grafana's documentation of its Prometheus data source, and of the query options of a panel.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from quiesce_dashboards.rules import GENERATED

__all__ = [
    "Expression",
    "Scope",
    "all_expressions",
    "dashboards",
    "left_open",
    "listed_by",
    "picked",
    "seconds",
]

WIDTH: Final = 1000
"""Pixels of a panel, and with that its points, unless it has a number of its own."""

ANNOTATION_STEP: Final = 60.0
"""Seconds between the points of an annotation's query, unless it has a number of its own."""

# An interval of so many milliseconds or more is rounded to the one beside it.
_ROUNDED: Final = (
    (0, 1),
    (10, 10),
    (15, 20),
    (35, 50),
    (75, 100),
    (150, 200),
    (350, 500),
    (750, 1_000),
    (1_500, 2_000),
    (3_500, 5_000),
    (7_500, 10_000),
    (12_500, 15_000),
    (17_500, 20_000),
    (25_000, 30_000),
    (45_000, 60_000),
    (90_000, 120_000),
    (210_000, 300_000),
    (450_000, 600_000),
    (750_000, 900_000),
    (1_050_000, 1_200_000),
    (1_500_000, 1_800_000),
    (2_700_000, 3_600_000),
    (5_400_000, 7_200_000),
    (9_000_000, 10_800_000),
    (16_200_000, 21_600_000),
    (32_400_000, 43_200_000),
    (86_400_000, 86_400_000),
)

_UNITS: Final = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_RANGE: Final = re.compile(r"\[(\d+(?:ms|s|m|h|d))((?::\w*)?)\]")
_VARIABLE: Final = re.compile(r"\$\{(?P<long>\w+)(?::(?P<format>\w+))?\}|\$(?P<short>\w+)")


def left_open(expression: str) -> str:
    """Return an expression as Prometheus 3 reads it, for a Prometheus 2: without what is as old as a range is long.

    A sample exactly at the beginning of a range belongs to it before Prometheus 3. Times are whole milliseconds, so
    a range that is one shorter begins after it.
    """
    return _RANGE.sub(lambda found: f"[{seconds(found[1]) * 1000 - 1:.0f}ms{found[2]}]", expression)


def seconds(text: str) -> float:
    """Return a duration such as ``15s`` or ``>1m`` in seconds."""
    found = re.fullmatch(r">?\s*(\d+(?:\.\d+)?)(ms|s|m|h|d)", text)
    assert found, text
    return float(found[1]) * _UNITS[found[2]]


def dashboards() -> dict[str, dict[str, Any]]:
    """Return every generated dashboard by its uid."""
    files = sorted((GENERATED / "dashboards").glob("*.json"))
    return {path.stem: json.loads(Path(path).read_text(encoding="utf-8")) for path in files}


@dataclass(frozen=True)
class Scope:
    """What an expression is read in.

    Attributes:
        scrape: Seconds between two scrapes, as the data source is told.
        begin: Unix time at which the dashboard's range begins.
        end: Unix time at which it ends.
        values: What is chosen for each variable; a list for one that takes several.
    """

    scrape: float
    begin: float
    end: float
    values: Mapping[str, str | Sequence[str]]


@dataclass(frozen=True)
class Expression:
    """One query of a dashboard.

    Attributes:
        where: Dashboard, panel and letter, for people.
        text: The expression, with its variables.
        instant: Whether it is asked for the end of the range alone.
        exemplar: Whether it asks for exemplars too.
        minimum: Seconds that an interval has at least, if it says so.
        points: How many points a series has at most.
    """

    where: str
    text: str
    instant: bool = False
    exemplar: bool = False
    minimum: float | None = None
    points: int = WIDTH

    def interval(self, scope: Scope) -> float:
        """Return ``$__interval`` in seconds, which is also the step of the query."""
        wanted = (scope.end - scope.begin) / self.points * 1000
        rounded = _ROUNDED[bisect_right(_ROUNDED, (wanted, float("inf"))) - 1][1] / 1000
        return max(rounded, scope.scrape if self.minimum is None else self.minimum)

    def rate_interval(self, scope: Scope) -> float:
        """Return ``$__rate_interval`` in seconds."""
        scrape = scope.scrape if self.minimum is None else self.minimum
        return max(self.interval(scope) + scrape, 4 * scrape)

    def read(self, scope: Scope) -> str:
        """Return the expression as Prometheus gets it."""
        interval, rate = self.interval(scope), self.rate_interval(scope)
        whole = scope.end - scope.begin
        built_in = {
            "__interval": _duration(interval),
            "__interval_ms": f"{interval * 1000:.0f}",
            "__rate_interval": _duration(rate),
            "__rate_interval_ms": f"{rate * 1000:.0f}",
            "__range": f"{whole:.0f}s",
            "__range_s": f"{whole:.0f}",
            "__range_ms": f"{whole * 1000:.0f}",
        }

        def value(found: re.Match[str]) -> str:
            name = found["long"] or found["short"]
            if name in built_in:
                return built_in[name]
            assert name in scope.values, f"{self.where} reads ${name}, which is no variable of its dashboard"
            chosen = scope.values[name]
            if isinstance(chosen, str):
                return chosen
            return "(" + "|".join(re.escape(each).replace("\\", "\\\\") for each in chosen) + ")"

        return _VARIABLE.sub(value, self.text)


def all_expressions(uid: str, dashboard: Mapping[str, Any]) -> Iterator[Expression]:
    """Yield every expression of a dashboard: of panels, of panels in rows, and of annotations."""
    for panel in _panels(dashboard["panels"]):
        for target in panel.get("targets") or ():
            minimum = target.get("interval") or panel.get("interval")
            yield Expression(
                f"{uid} / {panel['title']} / {target['refId']}",
                target["expr"],
                instant=bool(target.get("instant")) and not target.get("range"),
                exemplar=bool(target.get("exemplar")),
                minimum=seconds(minimum) if minimum else None,
                points=panel.get("maxDataPoints") or WIDTH,
            )
    for annotation in dashboard["annotations"]["list"]:
        text = annotation.get("expr") or (annotation.get("target") or {}).get("expr")
        if text:
            step = annotation.get("step") or (annotation.get("target") or {}).get("interval")
            yield Expression(
                f"{uid} / annotation {annotation['name']}",
                text,
                minimum=seconds(step) if step else ANNOTATION_STEP,
            )


def listed_by(variable: Mapping[str, Any]) -> tuple[str, str | None]:
    """Return what a variable lists: a selector and the label whose values it takes, or an expression and None."""
    query = variable["query"]
    text = query["query"] if isinstance(query, Mapping) else query
    if found := re.fullmatch(r"label_values\((?P<selector>.+),\s*(?P<label>\w+)\)", text):
        return found["selector"], found["label"]
    found = re.fullmatch(r"query_result\((?P<expression>.+)\)", text)
    assert found, f"{variable['name']}: {text}"
    return found["expression"], None


def picked(variable: Mapping[str, Any], lines: Sequence[str]) -> list[str]:
    """Return what a variable makes of the lines that it got: what its regular expression matches, or the group in it."""
    pattern = (variable.get("regex") or "").removeprefix("/").removesuffix("/")
    found = filter(None, (re.search(pattern, line) for line in lines))
    return list(dict.fromkeys(each[1] if each.re.groups else each.string for each in found))


def _panels(panels: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    for panel in panels:
        if panel["type"] == "row":
            yield from _panels(panel.get("panels") or ())
        else:
            yield panel


def _duration(of: float) -> str:
    return f"{of:.0f}s" if of == int(of) else f"{of * 1000:.0f}ms"
