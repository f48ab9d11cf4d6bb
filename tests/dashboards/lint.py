"""What is wrong with a dashboard, by rules: Grafana's public linter's, and those that these dashboards set themselves.

Rule: a rule reads the JSON that is shipped, not the objects that it was made from, and yields a line for each fault that
says where it is. Exceptions are listed at the top, with their reason.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Any, Final
from urllib.parse import urlsplit

import promql_parser

from quiesce.telemetry import names
from quiesce_dashboards.queries import check_expression

__all__ = [
    "ALERTS_SERIES",
    "RAW_COUNTERS",
    "RULES",
    "UIDS",
    "contrast",
    "every_colour",
    "every_expression",
    "every_panel",
    "lint",
    "parsed",
    "plain",
    "selectors",
    "shown_metrics",
]

UIDS: Final = ("quiesce-windows", "quiesce-slots", "quiesce-ownership", "quiesce-gate", "quiesce-training")

ALERTS_SERIES: Final = "ALERTS"
"""Prometheus' own series of alerts."""

RAW_COUNTERS: Final[Mapping[str, str]] = {
    "quiesce_prompts_read_total": "conservation compares totals along the restored lineage",
    "quiesce_prompts_trained_total": "as above",
    "quiesce_prompts_dropped_total": "as above",
    "quiesce_invariant_violations_total": "a violation is the first value that its counter has",
    "quiesce_invariant_checks_total": "how often an invariant was checked in this process",
    "quiesce_restore_tokens_reused_total": "what the resume of this process saved, once",
    "quiesce_restore_groups_total": "a restore happens once in a process, before its first scrape",
    "quiesce_restore_refusals_total": "as above",
}
"""Counters whose value itself is the answer, with the reason."""

_LIBRARY_TYPES: Final = ("row", "timeseries", "stat", "table", "state-timeline", "heatmap", "text")
_ANGULAR: Final = (
    "graph",
    "singlestat",
    "table-old",
    "grafana-piechart-panel",
    "grafana-worldmap-panel",
    "natel-discrete-panel",
    "flant-statusmap-panel",
    "grafana-polystat-panel",
    "dashlist-old",
    "pluginlist",
)
_TRANSFORMATIONS: Final = (
    "organize",
    "merge",
    "labelsToFields",
    "sortBy",
    "joinByField",
    "reduce",
    "groupBy",
)
_VALUES: Final = ("timeseries", "stat", "table", "state-timeline", "heatmap")
"""Types of panels that show numbers."""

_UNITS: Final = frozenset(
    {
        "none",
        "short",
        "s",
        "ms",
        "µs",
        "dtdurations",
        "dateTimeAsIso",
        "dateTimeAsLocal",
        "dateTimeFromNow",
        "dateTimeAsIsoNoDateIfToday",
        "bytes",
        "percentunit",
        "percent",
        "ops",
        "wps",
        "cps",
        "reqps",
        "eps",
        "bool",
        "bool_on_off",
        "string",
        "Bps",
        "locale",
        "sci",
    }
)
"""Units of Grafana's that are used; a word of one's own would be shown as it is."""

_DATASOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
_SCHEMA: Final = 39
"""The oldest schema that is not Angular's time; Grafana migrates on."""

_COLUMNS: Final = 24
_OPERATORS: Final = {"Equal": "=", "NotEqual": "!=", "Re": "=~", "NotRe": "!~"}
_VARIABLES: Final = ("datasource", "job", "run", "instance", "kind")
_BUILT_IN: Final = frozenset(
    {
        "__rate_interval",
        "__interval",
        "__interval_ms",
        "__range",
        "__range_s",
        "__range_ms",
        "__from",
        "__to",
        "__value",
        "__field",
        "__data",
        "__series",
        "__url_time_range",
        "__all_variables",
        "__all",
    }
)
_NULLS: Final = re.compile(
    r"^\$\.id$|\.thresholds\.steps\[0\]\.value$|\.properties\[\d+\]\.value\.steps\[0\]\.value$"
)
_VARIABLE: Final = re.compile(r"\$\{(\w+)(?::\w+|\.[^}]*)?\}|\$(\w+)")
_GOOD: Final = re.compile(r"\b(good|healthy|normal|fine)\b", re.IGNORECASE)
_COUNTS: Final = ("rate", "increase", "irate", "delta", "resets", "changes")
_LONG: Final = 3600.0
"""Seconds from which a window holds two samples whatever the scrape interval is."""

Dashboard = Mapping[str, Any]
Rule = Callable[[Dashboard], Iterator[str]]


def lint(dashboard: Dashboard) -> dict[str, list[str]]:
    """Return the faults by rule; a rule without one is not in it."""
    found = {name: list(rule(dashboard)) for name, rule in RULES.items()}
    return {name: faults for name, faults in found.items() if faults}


def every_panel(dashboard: Dashboard) -> Iterator[Mapping[str, Any]]:
    """Yield rows, panels, and the panels inside of rows that are folded."""
    for panel in dashboard["panels"]:
        yield panel
        yield from panel.get("panels") or ()


def every_expression(dashboard: Dashboard) -> Iterator[tuple[str, str]]:
    """Yield where each expression is and what it says: of targets, annotations and variables."""
    for panel in every_panel(dashboard):
        for target in panel.get("targets") or ():
            yield f"{panel['title']} {target.get('refId')}", target.get("expr") or ""
    for annotation in dashboard["annotations"]["list"]:
        yield f"annotation {annotation['name']}", _annotation_expression(annotation)
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            yield f"variable {variable['name']}", _query_selector(variable)


def plain(expression: str) -> str:
    """Return an expression with Grafana's durations as durations that parse."""
    text = re.sub(r"\$\{?__(range|interval)_s\}?", "3600", expression)
    return re.sub(r"\$\{?__(rate_interval|interval|range)\}?", "4m", text)


def parsed(expression: str) -> Any:  # noqa: ANN401 - the parser has no types
    """Return the tree of an expression."""
    return promql_parser.parse(plain(expression))


def selectors(expression: str) -> list[tuple[str, dict[str, tuple[str, str]]]]:
    """Return metric and matchers (operator and value by label) of each selector."""
    found: list[tuple[str, dict[str, tuple[str, str]]]] = []

    def visit(node: Any) -> None:  # noqa: ANN401 - any node of the tree
        if type(node).__name__ == "VectorSelector":
            matchers = {
                str(each.name): (_OPERATORS[str(each.op).rpartition(".")[2]], str(each.value))
                for each in node.matchers.matchers
            }
            found.append((str(node.name), matchers))

    promql_parser.walk(parsed(expression), visit)
    return found


def shown_metrics(dashboard: Dashboard) -> set[str]:
    """Return the metrics of the catalogue that its panels read."""
    return {
        metric.name
        for panel in every_panel(dashboard)
        for target in panel.get("targets") or ()
        for name, _ in selectors(target["expr"])
        if (metric := _metric(name)) is not None
    }


def every_colour(value: Any) -> Iterator[str]:  # noqa: ANN401 - what JSON can say
    """Yield the colours that a part of a dashboard names."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            if isinstance(each, str) and key in {"color", "fixedColor", "iconColor"}:
                yield each
            else:
                yield from every_colour(each)
    elif isinstance(value, list):
        for each in value:
            yield from every_colour(each)


def contrast(one: str, other: str) -> float:
    """Return the contrast of two colours as ``#rrggbb``, 1 to 21 (WCAG 2.2, relative luminance)."""
    high, low = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def _luminance(colour: str) -> float:
    def linear(part: float) -> float:
        return part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4

    red, green, blue = (linear(int(colour[at : at + 2], 16) / 255) for at in (1, 3, 5))
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


# ------------------------------------------------------------------------------------------------- the dashboard


def _identity(dashboard: Dashboard) -> Iterator[str]:
    if dashboard.get("uid") not in UIDS:
        yield f"uid {dashboard.get('uid')!r} is not one of the five"
    if not dashboard.get("title") or not dashboard.get("description"):
        yield "has no title or no description"
    if "quiesce" not in dashboard.get("tags", ()):
        yield "has no tag quiesce"
    if dashboard.get("schemaVersion", 0) < _SCHEMA:
        yield f"schemaVersion {dashboard.get('schemaVersion')} is older than {_SCHEMA}"
    if dashboard.get("id") is not None:
        yield "has a number, which is another Grafana's"
    if dashboard.get("graphTooltip") != 1:
        yield "panels do not share their crosshair"
    if not dashboard.get("time", {}).get("from") or not dashboard.get("refresh"):
        yield "has no time range or no refresh"


def _datasource_variable(dashboard: Dashboard) -> Iterator[str]:
    variables: list[dict[str, Any]] = dashboard["templating"]["list"]
    first = variables[0] if variables else {}
    if (first.get("name"), first.get("type"), first.get("query")) != (
        "datasource",
        "datasource",
        "prometheus",
    ):
        yield "the first variable does not choose a Prometheus data source"


def _target_variables(dashboard: Dashboard) -> Iterator[str]:
    variables = {each["name"]: each for each in dashboard["templating"]["list"]}
    if tuple(variables) != _VARIABLES:
        yield f"variables are {', '.join(variables)}, not {', '.join(_VARIABLES)}"
        return
    for name in _VARIABLES[1:]:
        each = variables[name]
        asked = _query_text(each)
        listed = re.search(rf"^label_values\(.*,\s*{name}\)$", asked) or (
            re.search(rf"^query_result\(.*by \({name}\)", asked)
            and each.get("regex") == f'/{name}="([^"]+)"/'
        )
        if each["type"] != "query" or not listed:
            yield f"{name} does not list the values of the label"
        if each.get("datasource") != _DATASOURCE:
            yield f"{name} asks another data source"
        several = name != "run"
        if bool(each.get("multi")) is not several or bool(each.get("includeAll")) is not several:
            yield f"{name} takes {'one value' if several else 'several values'}"
        if each.get("refresh") != 2:
            yield f"{name} is not read anew when the time range changes"
        if not each.get("label"):
            yield f"{name} has no label for people"


def _variables_known(dashboard: Dashboard) -> Iterator[str]:
    known = {each["name"] for each in dashboard["templating"]["list"]} | _BUILT_IN
    for where, text in _texts(dashboard):
        for found in _VARIABLE.finditer(text):
            name = found[1] or found[2]
            if name not in known and not name.isdigit():
                yield f"{where} names ${name}, which is no variable"


def _links(dashboard: Dashboard) -> Iterator[str]:
    reached = set()
    for link in dashboard.get("links") or ():
        reaches = link.get("type") == "dashboards" or "/d/" in (link.get("url") or "")
        if reaches and not (link.get("keepTime") and link.get("includeVars")):
            yield f"link {link.get('title')!r} loses time or variables"
        if not link.get("title"):
            yield "a link has no title"
        if link.get("type") == "dashboards" and "quiesce" in (link.get("tags") or ()):
            reached |= set(UIDS)
        reached |= {part for part in urlsplit(link.get("url") or "").path.split("/") if part in UIDS}
    for uid in UIDS:
        if uid not in reached and uid != dashboard["uid"]:
            yield f"no link leads to {uid}"


def _annotations(dashboard: Dashboard) -> Iterator[str]:
    listed = dashboard["annotations"]["list"]
    seen = " ".join(each["name"].lower() for each in listed)
    for what in ("alert", "save", "restore"):
        if what not in seen:
            yield f"nothing marks {what}s"
    for each in listed:
        if each.get("datasource") != _DATASOURCE:
            yield f"{each['name']} asks another data source"
        if not _annotation_expression(each):
            yield f"{each['name']} has no expression"
        if not each.get("enable") or not each.get("iconColor"):
            yield f"{each['name']} is off, or has no colour"
        if not each.get("titleFormat"):
            yield f"{each['name']} has no title"


def _no_nulls(dashboard: Dashboard) -> Iterator[str]:
    def walk(value: Any, path: str) -> Iterator[str]:  # noqa: ANN401 - what JSON can say
        if value is None and not _NULLS.search(path):
            yield f"{path} is null"
        if isinstance(value, Mapping):
            for key, each in value.items():
                yield from walk(each, f"{path}.{key}")
        elif isinstance(value, list):
            for at, each in enumerate(value):
                yield from walk(each, f"{path}[{at}]")

    yield from walk(dashboard, "$")


# ------------------------------------------------------------------------------------------------- panels


def _panel_types(dashboard: Dashboard) -> Iterator[str]:
    for panel in every_panel(dashboard):
        if panel["type"] not in _LIBRARY_TYPES and panel["type"] not in _ANGULAR:
            yield f"{panel['title']} is a {panel['type']}"


def _angular(dashboard: Dashboard) -> Iterator[str]:
    for panel in every_panel(dashboard):
        if panel["type"] in _ANGULAR:
            yield f"{panel['title']} is a {panel['type']}, which Grafana no longer has"
        if {"yaxes", "xaxis", "aliasColors", "seriesOverrides", "nullPointMode", "valueMaps"} & set(panel):
            yield f"{panel['title']} has settings of an Angular panel"


def _unique_ids(dashboard: Dashboard) -> Iterator[str]:
    for what, key in (("id", "id"), ("title", "title")):
        seen: set[Any] = set()
        for panel in every_panel(dashboard):
            if panel.get(key) in seen:
                yield f"{what} {panel.get(key)!r} is there twice"
            seen.add(panel.get(key))
    for panel in every_panel(dashboard):
        if not isinstance(panel.get("id"), int) or panel["id"] < 1:
            yield f"{panel['title']} has no id"


def _grid(dashboard: Dashboard) -> Iterator[str]:
    taken: dict[tuple[int, int], str] = {}
    for panel in every_panel(dashboard):
        at = panel["gridPos"]
        if at["x"] < 0 or at["y"] < 0 or at["w"] < 1 or at["h"] < 1 or at["x"] + at["w"] > _COLUMNS:
            yield f"{panel['title']} is not within {_COLUMNS} columns"
        if panel["type"] == "row" and (at["x"], at["w"], at["h"]) != (0, _COLUMNS, 1):
            yield f"row {panel['title']} is not a row high and all columns wide"
        cells = [(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])]
        over = {taken[cell] for cell in cells if cell in taken}
        yield from (f"{panel['title']} overlaps {other}" for other in sorted(over))
        taken.update(dict.fromkeys(cells, panel["title"]))


def _titles(dashboard: Dashboard) -> Iterator[str]:
    for panel in every_panel(dashboard):
        if not panel.get("title"):
            yield f"panel {panel.get('id')} has no title"
        if panel["type"] in _VALUES:
            text = panel.get("description") or ""
            if not _GOOD.search(text):
                yield f"{panel['title']}: the description does not say what good looks like: {text!r}"
            elif not text.rstrip().endswith((".", ")")):
                yield f"{panel['title']}: the description does not end"


def _units(dashboard: Dashboard) -> Iterator[str]:
    for panel in _valued(dashboard):
        config = panel["fieldConfig"]
        own = {
            override["matcher"]["options"]: each["value"]
            for override in config.get("overrides") or ()
            for each in override["properties"]
            if each["id"] == "unit"
        }
        if panel["type"] == "table":
            # A column of numbers is the value of a query; the others are labels.
            shown = _columns(panel)
            numbers = [title for source, title in shown.items() if source.startswith("Value")]
            mapped = {
                override["matcher"]["options"]
                for override in config.get("overrides") or ()
                if any(each["id"] == "mappings" for each in override["properties"])
            }
            units = {title: own.get(title) for title in numbers if title not in mapped or title in own}
        elif panel["type"] == "heatmap":
            units = {"y": panel["options"].get("yAxis", {}).get("unit")}
        elif panel["type"] == "state-timeline" and config["defaults"].get("mappings"):
            units = {}
        else:
            units = {"": config["defaults"].get("unit"), **own}
        for where, unit in units.items():
            if unit not in _UNITS and not str(unit).startswith("suffix:"):
                yield f"{panel['title']} {where}: unit {unit!r}"
        read = {name for name, _ in _panel_selectors(panel)}
        wanted = {metric.unit for name in read if (metric := _metric(name)) and not name.endswith("_count")}
        if panel["type"] == "timeseries" and wanted == {"bytes"} and units[""] not in {"bytes", "Bps"}:
            yield f"{panel['title']} shows bytes as {units['']}"


def _thresholds(dashboard: Dashboard) -> Iterator[str]:
    for panel in _valued(dashboard):
        if panel["type"] == "heatmap":
            continue
        steps = panel["fieldConfig"]["defaults"].get("thresholds", {}).get("steps") or []
        if not steps:
            yield f"{panel['title']} has no thresholds"
            continue
        first, *rest = [step.get("value") for step in steps]
        if first is not None:
            yield f"{panel['title']}: the first step begins at {first!r}, not nowhere"
        if any(not isinstance(value, int | float) for value in rest):
            yield f"{panel['title']}: a step is not a number"
        elif any(one >= other for one, other in pairwise(rest)):
            yield f"{panel['title']}: steps do not grow"
        if any(not step.get("color") for step in steps):
            yield f"{panel['title']}: a step has no colour"


def _datasources(dashboard: Dashboard) -> Iterator[str]:
    for panel in _valued(dashboard):
        for each in (panel, *(panel.get("targets") or ())):
            if each.get("datasource") != _DATASOURCE:
                yield f"{panel['title']} asks {each.get('datasource')!r}"


def _gaps(dashboard: Dashboard) -> Iterator[str]:
    for panel in every_panel(dashboard):
        if panel["type"] in {"timeseries", "state-timeline"}:
            spans = panel["fieldConfig"]["defaults"].get("custom", {}).get("spanNulls")
            if spans is not False and not (spans is None and panel["type"] == "state-timeline"):
                yield f"{panel['title']} draws across gaps ({spans!r})"
        if panel["type"] == "timeseries":
            custom = panel["fieldConfig"]["defaults"]["custom"]
            if (custom["drawStyle"], custom["showPoints"]) == ("line", "never"):
                yield f"{panel['title']} does not draw a point that stands alone between two gaps"


def _transformations(dashboard: Dashboard) -> Iterator[str]:
    for panel in every_panel(dashboard):
        for each in panel.get("transformations") or ():
            if each["id"] not in _TRANSFORMATIONS:
                yield f"{panel['title']} uses {each['id']}"


def _colours(dashboard: Dashboard) -> Iterator[str]:
    for colour in sorted(set(every_colour(dashboard))):
        if colour in {"text", "transparent"}:
            continue
        if not re.fullmatch(r"#[0-9a-fA-F]{6}|rgba\(\d+,\d+,\d+,[\d.]+\)", colour):
            yield f"{colour} is the theme's, not one of the palette"


# ------------------------------------------------------------------------------------------------- targets


def _targets(dashboard: Dashboard) -> Iterator[str]:
    for panel in _valued(dashboard):
        targets = panel.get("targets") or ()
        if not targets:
            yield f"{panel['title']} asks nothing"
        letters = [target.get("refId") for target in targets]
        if len(set(letters)) != len(letters) or not all(letters):
            yield f"{panel['title']}: letters {letters}"
        for target in targets:
            where = f"{panel['title']} {target.get('refId')}"
            if not target.get("expr"):
                yield f"{where} has no expression"
            if target.get("hide"):
                yield f"{where} is hidden"
            if panel["type"] == "table" and (not target.get("instant") or target.get("format") != "table"):
                yield f"{where} of a table is not asked for once, as a table"
            if panel["type"] == "heatmap" and target.get("format") != "heatmap":
                yield f"{where} of a heatmap is not asked for as one"
            if panel["type"] in {"timeseries", "state-timeline"}:
                if target.get("instant"):
                    yield f"{where} is one point"
                if not target.get("legendFormat") or target["legendFormat"] == "__auto":
                    yield f"{where} has no legend"


def _now(dashboard: Dashboard) -> Iterator[str]:
    for panel in every_panel(dashboard):
        if panel["type"] == "stat" and panel["options"].get("graphMode") == "none":
            for target in panel["targets"]:
                if not target.get("instant"):
                    yield f"{panel['title']} {target['refId']}: the last value, perhaps of a process that is gone"


def _expressions(dashboard: Dashboard) -> Iterator[str]:
    for where, expression in every_expression(dashboard):
        try:
            check_expression(plain(expression))
        except ValueError as error:
            yield f"{where}: {error}"


def _matchers(dashboard: Dashboard) -> Iterator[str]:
    for panel in _valued(dashboard):
        for name, matchers in _panel_selectors(panel):
            metric = _metric(name)
            if matchers.get("run") != ("=", "$run") and name != "up":
                yield f"{panel['title']}: {name} is not of the chosen run"
            for label in () if name == ALERTS_SERIES else ("job", "instance"):
                if matchers.get(label) != ("=~", f"${label}"):
                    yield f"{panel['title']}: {name} is not of the chosen values of {label}"
            if (
                metric
                and "kind" in metric.label_names
                and name.startswith(("quiesce_mutation", "quiesce_window"))
            ):
                given = matchers.get("kind")
                if given != ("=~", "$kind"):
                    yield f"{panel['title']}: {name} is not of the chosen kinds"


def _rate_intervals(dashboard: Dashboard) -> Iterator[str]:
    for where, expression in every_expression(dashboard):
        compared = set(re.findall(r"(\w+\{[^}]*\}) offset \$__interval", expression))
        for selector, window in re.findall(r"(\w+\{[^}]*\}|\w+)\[([^\]:]+)", expression):
            # What is compared with its value a step ago looks into the step only for a process that began anew.
            if window == "$__interval" and selector in compared:
                continue
            # One sample is enough for a value as it was.
            if f"_over_time({selector}[{window}]" in expression:
                continue
            if window not in {"$__rate_interval", "$__range"} and _seconds(window) < _LONG:
                yield f"{where} looks at [{window}], which may hold a single sample"
        if re.search(r"\birate\s*\(", expression):
            yield f"{where} looks at the last two samples only (irate)"


def _counters(dashboard: Dashboard) -> Iterator[str]:
    for panel in _valued(dashboard):
        for target in panel.get("targets") or ():
            inside: list[str] = []
            everything: list[str] = []
            rated: list[str] = []

            def visit(
                node: Any,  # noqa: ANN401 - any node of the tree
                inside: list[str] = inside,
                everything: list[str] = everything,
                rated: list[str] = rated,
            ) -> None:
                kind = type(node).__name__
                if kind == "VectorSelector":
                    everything.append(str(node.name))
                elif kind == "MatrixSelector":
                    inside.append(str(node.vector_selector.name))
                elif kind == "Call" and node.func.name in _COUNTS:
                    rated.extend(_inner(node))

            promql_parser.walk(parsed(target["expr"]), visit)
            for name in {*everything, *inside}:
                metric = _metric(name)
                counts = metric is not None and (
                    metric.type == "counter" or (metric.type == "histogram" and not name.endswith("_bucket"))
                )
                if counts and name not in RAW_COUNTERS and name not in rated:
                    yield f"{panel['title']}: {name} only ever grows, and is shown as it is"
                if not counts and metric is not None and name in rated and metric.type == "gauge":
                    yield f"{panel['title']}: {name} is no counter, and its rate is asked for"


def _once(dashboard: Dashboard) -> Iterator[str]:
    for panel in _valued(dashboard):
        bars = panel["fieldConfig"]["defaults"].get("custom", {}).get("drawStyle") == "bars"
        if not bars and panel["type"] != "heatmap":
            continue
        if bars and panel["fieldConfig"]["defaults"]["custom"].get("barAlignment") != -1:
            yield f"{panel['title']}: a bar stands elsewhere than over the time that it counts"
        for target in panel["targets"]:
            if "offset $__interval" not in target["expr"] or "$__rate_interval" in target["expr"]:
                yield f"{panel['title']} {target['refId']} shows an event in several points, or in none"


def _quantiles(dashboard: Dashboard) -> Iterator[str]:
    for where, expression in every_expression(dashboard):
        calls: list[str] = []

        def visit(node: Any, calls: list[str] = calls) -> None:  # noqa: ANN401 - any node of the tree
            if type(node).__name__ == "Call" and node.func.name == "histogram_quantile":
                calls.append(str(node.args[1].prettify()))

        promql_parser.walk(parsed(expression), visit)
        for inner in calls:
            if not re.search(r"by\s*\([^)]*\ble\b", inner) or "_bucket" not in inner:
                yield f"{where}: a quantile of something else than buckets by le"


def _exemplars(dashboard: Dashboard) -> Iterator[str]:
    asked = False
    for panel in _valued(dashboard):
        for target in panel.get("targets") or ():
            buckets = any(name.endswith("_bucket") for name, _ in selectors(target["expr"]))
            drawn = panel["type"] in {"timeseries", "heatmap"} and not target.get("instant")
            if target.get("exemplar") and not (buckets and drawn):
                yield f"{panel['title']} {target['refId']} asks for exemplars where there are none to show"
            asked = asked or bool(target.get("exemplar"))
            spanned = any(
                name.startswith(("quiesce_checkpoint_phase_seconds_b", "quiesce_mutation_"))
                for name, _ in selectors(target["expr"])
            )
            if drawn and buckets and spanned and not target.get("exemplar"):
                yield f"{panel['title']} {target['refId']} leads to no trace"
    if dashboard["uid"] in {"quiesce-windows", "quiesce-slots"} and not asked:
        yield "no panel leads to a trace"


def _heatmaps(dashboard: Dashboard) -> Iterator[str]:
    for panel in every_panel(dashboard):
        if panel["type"] != "heatmap":
            continue
        options = panel["options"]
        if options.get("calculate") is not False:
            yield f"{panel['title']} makes its own buckets of Prometheus' buckets"
        if options.get("color", {}).get("scheme") not in {"Viridis", "Cividis", "Blues", "Oranges"}:
            yield f"{panel['title']}: colours {options.get('color')} are not for everybody"


RULES: Final[Mapping[str, Rule]] = {
    "identity": _identity,
    "datasource variable": _datasource_variable,
    "target variables": _target_variables,
    "known variables": _variables_known,
    "links": _links,
    "annotations": _annotations,
    "no nulls": _no_nulls,
    "panel types": _panel_types,
    "no Angular": _angular,
    "unique ids": _unique_ids,
    "grid": _grid,
    "titles and descriptions": _titles,
    "units": _units,
    "thresholds": _thresholds,
    "data sources": _datasources,
    "gaps": _gaps,
    "transformations": _transformations,
    "colours": _colours,
    "targets": _targets,
    "now": _now,
    "expressions": _expressions,
    "matchers": _matchers,
    "rate intervals": _rate_intervals,
    "counters": _counters,
    "each event once": _once,
    "quantiles": _quantiles,
    "exemplars": _exemplars,
    "heatmaps": _heatmaps,
}
"""Every rule by its name."""


def _valued(dashboard: Dashboard) -> Iterator[Mapping[str, Any]]:
    return (panel for panel in every_panel(dashboard) if panel["type"] in _VALUES)


def _columns(table: Mapping[str, Any]) -> dict[str, str]:
    """Return the titles of a table's columns by their fields."""
    shown: dict[str, str] = {}
    for each in table.get("transformations") or ():
        if each["id"] == "organize":
            shown = dict(each["options"]["renameByName"])
    return shown


def _panel_selectors(panel: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, tuple[str, str]]]]:
    for target in panel.get("targets") or ():
        yield from selectors(target["expr"])


def _inner(node: Any) -> list[str]:  # noqa: ANN401 - any node of the tree
    """Return the metrics that a call of a rate reads."""
    return [str(arg.vector_selector.name) for arg in node.args if type(arg).__name__ == "MatrixSelector"]


def _metric(name: str) -> names.Metric | None:
    plain_name = re.sub(r"_(bucket|sum|count)$", "", name)
    return names.METRICS.get(name) or names.METRICS.get(plain_name)


def _annotation_expression(annotation: Mapping[str, Any]) -> str:
    return str(annotation.get("expr") or (annotation.get("target") or {}).get("expr") or "")


def _query_text(variable: Mapping[str, Any]) -> str:
    query = variable.get("query")
    return str(query.get("query") if isinstance(query, Mapping) else query)


def _query_selector(variable: Mapping[str, Any]) -> str:
    asked = r"label_values\((?P<selector>.+),\s*\w+\)|query_result\((?P<expression>.+)\)"
    found = re.fullmatch(asked, _query_text(variable))
    return found["selector"] or found["expression"] if found else _query_text(variable)


def _texts(dashboard: Dashboard) -> Iterator[tuple[str, str]]:
    """Yield every place where a variable can stand."""

    def walk(value: Any, where: str) -> Iterator[tuple[str, str]]:  # noqa: ANN401 - what JSON can say
        if isinstance(value, str):
            yield where, value
        elif isinstance(value, Mapping):
            for key, each in value.items():
                yield from walk(each, where if key != "title" else f"{where}")
        elif isinstance(value, list):
            for each in value:
                yield from walk(each, where)

    for panel in every_panel(dashboard):
        yield from walk({key: each for key, each in panel.items() if key != "panels"}, panel["title"])
    yield from walk(dashboard.get("links") or [], "links")
    yield from walk(dashboard["annotations"], "annotations")
    yield from walk(dashboard["templating"], "variables")


def _seconds(window: str) -> float:
    found = re.fullmatch(r"(\d+)(s|m|h|d)", window)
    return int(found[1]) * {"s": 1, "m": 60, "h": 3600, "d": 86400}[found[2]] if found else 0.0
