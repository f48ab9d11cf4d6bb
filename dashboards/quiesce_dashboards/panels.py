"""Builders of panels: each has to say what it shows, in which unit, and what good looks like.

Rule: a panel without a description cannot be built; colours mean the same everywhere, and are told apart by people who do
not see red or green; no line is drawn across a gap. Nothing here suspends.

Source of the colours: Okabe and Ito's palette, in tones that can be read on light and on dark ground.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from quiesce_dashboards.grafana import (
    DATASOURCE,
    Heatmap,
    Query,
    Row,
    SortBy,
    Stat,
    StateTimeline,
    Table,
    Text,
    TimeSeries,
)

__all__ = [
    "BAD",
    "GOOD",
    "NEUTRAL",
    "NOTHING",
    "PALETTE",
    "WARN",
    "Ask",
    "Column",
    "Section",
    "Steps",
    "above",
    "arranged",
    "heat",
    "lines",
    "mapped",
    "number",
    "states",
    "stepped",
    "table",
    "tints",
    "words",
]

GOOD: Final = "#2fa57f"
WARN: Final = "#e69f00"
BAD: Final = "#d55e00"
NEUTRAL: Final = "#4a90d9"
NOTHING: Final = "#7f8c9a"
"""Nothing is known, or it does not apply."""

PALETTE: Final = (
    NEUTRAL,
    WARN,
    GOOD,
    "#cc79a7",
    BAD,
    "#6030f0",
    "#c00030",
    "#a81890",
    "#56b4e9",
    "#b3a100",
    "#a0522d",
    NOTHING,
    "#3c7d5f",
    "#d98cb3",
)
"""Colours of series, in their order."""

WIDTH: Final = 24
"""Columns of a dashboard."""

COLUMNS: Final = 60
"""Points of bars and heat maps: wide enough to see."""

_BARS: Final = "A bar counts what came since the bar before it."
_CELLS: Final = "A column counts what came since the column before it."

Panel = Any
"""One of grafanalib's, which is not typed."""

Steps = Sequence[tuple[float | None, str]]
"""Thresholds: from which value on which colour holds; the first begins nowhere."""

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Ask:
    """A query of a panel.

    Attributes:
        expression: PromQL.
        legend: What a series is called; Grafana's ``{{label}}``.
        exemplar: Whether to ask for exemplars.
        instant: Whether to ask for the end of the range alone.
        table: Whether each series is a row.
        heatmap: Whether series are the buckets of a histogram.
        least: The least interval, as a duration; "" leaves it to the dashboard.
    """

    expression: str
    legend: str = ""
    exemplar: bool = False
    instant: bool = False
    table: bool = False
    heatmap: bool = False
    least: str = ""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes:
        source: The field: a label, or ``Value #A`` for the value of query A.
        title: What it is called.
        unit: Grafana's unit.
        decimals: Digits after the point; None leaves it to Grafana.
        mappings: Texts and colours for values.
        link: An address that the cell opens.
        link_title: What that address is.
    """

    source: str
    title: str
    unit: str = ""
    decimals: int | None = None
    mappings: Sequence[Json] = ()
    link: str = ""
    link_title: str = ""


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a dashboard under a heading.

    Attributes:
        title: The heading.
        panels: Width, height and panel, from left to right and then down.
    """

    title: str
    panels: Sequence[tuple[int, int, Panel]] = field(default_factory=tuple)


def above(warn: float, bad: float) -> Steps:
    """Return thresholds for what should stay below."""
    return ((None, GOOD), (warn, WARN), (bad, BAD))


def mapped(values: Mapping[float | str, tuple[str, str]]) -> list[Json]:
    """Return Grafana's value mappings: text and colour for each value."""
    options = {
        f"{value:g}" if isinstance(value, int | float) else value: {
            "text": text,
            "color": colour,
            "index": index,
        }
        for index, (value, (text, colour)) in enumerate(values.items())
    }
    return [{"type": "value", "options": options}]


def tints(labels: Iterable[str]) -> list[Json]:
    """Return overrides that give each series its colour, whichever others there are."""
    return [
        {
            "matcher": {"id": "byName", "options": label},
            "properties": [
                {"id": "color", "value": {"mode": "fixed", "fixedColor": PALETTE[index % len(PALETTE)]}}
            ],
        }
        for index, label in enumerate(labels)
    ]


def stepped(label: str, steps: Steps) -> Json:
    """Return an override that gives a series thresholds of its own."""
    thresholds = {"mode": "absolute", "steps": _steps(steps)}
    return {
        "matcher": {"id": "byName", "options": label},
        "properties": [{"id": "thresholds", "value": thresholds}],
    }


def number(
    title: str,
    description: str,
    *asks: Ask,
    unit: str = "short",
    steps: Steps = ((None, NEUTRAL),),
    mappings: Sequence[Json] = (),
    decimals: int | None = None,
    text: str = "auto",
    graph: bool = False,
    empty: str = "no data",
    absent: str = NOTHING,
    links: Sequence[Json] = (),
    overrides: Sequence[Json] = (),
) -> Panel:
    """Return a panel of one number, or of one for each series: what it is at the end of the range.

    Args:
        title: Of the panel.
        description: What it shows, and what good looks like.
        asks: Its queries; asked for the end alone, unless a line is drawn.
        unit: Grafana's unit.
        steps: Colours by value.
        mappings: Texts for values.
        decimals: Digits after the point; None leaves it to Grafana.
        text: Whether value, name or both are shown.
        graph: Whether a line is drawn beneath.
        empty: What to show where there is no series.
        absent: The colour of that. Grafana's own is that of the lowest step, so a dead run would look healthy.
        links: Where the panel leads.
        overrides: Grafana's overrides, of single series.
    """
    result = {"text": empty, "color": absent, "index": len(mappings)}
    none = {"type": "special", "options": {"match": "null+nan", "result": result}}
    return Stat(
        title=title,
        description=_said(title, description),
        dataSource=DATASOURCE,
        # The last value of a range would be that of a process that is gone; a line needs the range.
        targets=_queries(ask if graph else replace(ask, instant=True) for ask in asks),
        format=unit,
        thresholds=_steps(steps),
        color={"mode": "thresholds"},
        mappings=[*mappings, none],
        decimals=decimals,
        textMode=text,
        graphMode="area" if graph else "none",
        colorMode="background" if len(steps) > 1 or mappings or overrides else "value",
        overrides=list(overrides),
        reduceCalc="lastNotNull",
        noValue=empty,
        links=list(links),
        maxDataPoints=None if graph else 100,
    )


def lines(
    title: str,
    description: str,
    *asks: Ask,
    unit: str = "short",
    steps: Steps = (),
    stepped: bool = False,
    stacked: bool = False,
    bars: bool = False,
    logarithmic: bool = False,
    low: int | None = 0,
    high: int | None = None,
    named: Iterable[str] = (),
    overrides: Sequence[Json] = (),
) -> Panel:
    """Return a panel of series over time.

    Args:
        title: Of the panel.
        description: What it shows, and what good looks like.
        asks: Its queries.
        unit: Grafana's unit.
        steps: Values at which a line is drawn, with colours; the first begins nowhere.
        stepped: Whether a value holds until the next: for what changes at events.
        stacked: Whether series add up.
        bars: Whether each point is a bar: for counts in intervals.
        logarithmic: Whether the axis is.
        low: Where the axis begins; None leaves it to the data.
        high: Where it ends.
        named: Names of series that have colours of their own.
        overrides: More of Grafana's overrides.
    """
    return TimeSeries(
        title=title,
        description=_said(title, description, _BARS if bars else ""),
        dataSource=DATASOURCE,
        targets=_queries(asks),
        unit=unit,
        thresholds=_steps(steps or ((None, NEUTRAL),)),
        thresholdsStyleMode="dashed" if steps else "off",
        lineInterpolation="stepAfter" if stepped else "linear",
        lineWidth=1 if bars else 2,
        fillOpacity=70 if bars else 25 if stacked else 0,
        drawStyle="bars" if bars else "line",
        # A bar stands before its point, over the time that it counts.
        barAlignment=-1 if bars else 0,
        # A quantile of what is rare is one point between two gaps, and no line runs through one point.
        showPoints="never" if bars else "auto",
        spanNulls=False,
        stacking={"mode": "normal", "group": "A"} if stacked else {},
        scaleDistributionType="log" if logarithmic else "linear",
        scaleDistributionLog=10,
        valueMin=None if logarithmic else low,
        valueMax=high,
        overrides=[*tints(named), *overrides],
        tooltipMode="multi",
        maxDataPoints=COLUMNS if bars else None,
    )


def states(
    title: str, description: str, *asks: Ask, mappings: Sequence[Json], empty: str = "no data"
) -> Panel:
    """Return a panel of states over time, a row for each series.

    Args:
        title: Of the panel.
        description: What it shows, and what good looks like.
        asks: Its queries.
        mappings: Text and colour for each state.
        empty: What to show where there is no series.
    """
    return StateTimeline(
        title=title,
        description=_said(title, description),
        dataSource=DATASOURCE,
        targets=_queries(asks),
        mappings=list(mappings),
        thresholds=_steps(((None, NOTHING),)),
        showValue="never",
        rowHeight=0.8,
        fillOpacity=85,
        empty=empty,
        maxDataPoints=None,
    )


def heat(title: str, description: str, ask: Ask, *, unit: str = "s") -> Panel:
    """Return a panel of a histogram over time.

    Args:
        title: Of the panel.
        description: What it shows, and what good looks like.
        ask: Its query: buckets by ``le``.
        unit: Of the buckets.
    """
    return Heatmap(
        title=title,
        description=_said(title, description, _CELLS),
        dataSource=DATASOURCE,
        targets=_queries([ask]),
        unit=unit,
        maxDataPoints=COLUMNS,
    )


def table(
    title: str,
    description: str,
    *asks: Ask,
    columns: Sequence[Column],
    sort: str = "",
    falling: bool = True,
    empty: str = "nothing",
) -> Panel:
    """Return a panel of rows: one for each combination of labels that the queries share.

    Args:
        title: Of the panel.
        description: What it shows, and what good looks like.
        asks: Its queries, each an instant one in the format of tables.
        columns: What is shown, in this order; nothing else is.
        sort: The title of the column to sort by.
        falling: Whether the largest comes first.
        empty: What to show where there is no row.
    """
    organize = {
        "id": "organize",
        "options": {
            "excludeByName": {},
            "includeByName": {column.source: True for column in columns},
            "indexByName": {column.source: index for index, column in enumerate(columns)},
            "renameByName": {column.source: column.title for column in columns},
        },
    }
    return Table(
        title=title,
        description=_said(title, description),
        dataSource=DATASOURCE,
        targets=_queries(asks),
        transformations=[{"id": "merge", "options": {}}, organize],
        thresholds=_steps(((None, NEUTRAL),)),
        overrides=[made for column in columns if (made := _column(column)) is not None],
        sortBy=[SortBy(displayName=sort, desc=falling)] if sort else [],
        empty=empty,
        maxDataPoints=None,
    )


def words(title: str, content: str) -> Panel:
    """Return a panel of text, in Markdown."""
    return Text(title=title, content=content, description=None)


def arranged(sections: Sequence[Section]) -> list[Panel]:
    """Place panels in the grid: each section under its heading, from left to right, then down.

    Raises:
        ValueError: If a panel is wider than the dashboard.
    """
    placed: list[Panel] = []
    y = 0
    for section in sections:
        placed.append(Row(title=section.title, gridPos={"h": 1, "w": WIDTH, "x": 0, "y": y}))
        y, x, tallest = y + 1, 0, 0
        for width, height, panel in section.panels:
            if width > WIDTH:
                raise ValueError(f"panel {panel.title!r} is {width} wide, the dashboard {WIDTH}")
            if x + width > WIDTH:
                x, y, tallest = 0, y + tallest, 0
            panel.gridPos = {"h": height, "w": width, "x": x, "y": y}
            placed.append(panel)
            x, tallest = x + width, max(tallest, height)
        y += tallest
    return placed


def _said(title: str, description: str, more: str = "") -> str:
    if not description.strip():
        raise ValueError(f"panel {title!r} does not say what it shows")
    return f"{description} {more}".rstrip()


def _queries(asks: Iterable[Ask]) -> list[Query]:
    return [
        Query(
            expr=ask.expression,
            legendFormat="" if ask.table else ask.legend or "__auto",
            refId=chr(ord("A") + index),
            exemplar=ask.exemplar,
            instant=ask.instant or ask.table,
            format="table" if ask.table else "heatmap" if ask.heatmap else "time_series",
            interval=ask.least,
        )
        for index, ask in enumerate(asks)
    ]


def _steps(steps: Steps) -> list[Json]:
    return [{"color": colour, "value": value} for value, colour in steps]


def _column(column: Column) -> Json | None:
    properties: list[Json] = []
    if column.unit:
        properties.append({"id": "unit", "value": column.unit})
    if column.decimals is not None:
        properties.append({"id": "decimals", "value": column.decimals})
    if column.mappings:
        properties.append({"id": "mappings", "value": list(column.mappings)})
        properties.append(
            {"id": "custom.cellOptions", "value": {"type": "color-background", "mode": "basic"}}
        )
    if column.link:
        links = [{"title": column.link_title or column.title, "url": column.link, "targetBlank": True}]
        properties.append({"id": "links", "value": links})
    if not properties:
        return None
    return {"matcher": {"id": "byName", "options": column.title}, "properties": properties}
