"""What a chart and a table are on the page, and what all charts share: axes, colours, lines over time.

Rule: colours are tokens (``c0``, ``c1``, …), because a light and a dark page need different ones; lines are also
told apart by their dashes, points by their symbols. Nothing here suspends.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from quiesce.barrier import KINDS
from quiesce.report.data import RunData
from quiesce.report.timeline import Increases, Values
from quiesce.report.words import markup, short, time_of

__all__ = [
    "COLOURS",
    "DASHES",
    "SYMBOLS",
    "Chart",
    "Figure",
    "Section",
    "Table",
    "coarse",
    "coarse_times",
    "decades",
    "kind_colour",
    "kind_order",
    "known",
    "line",
    "line_mode",
    "log_axis",
    "plain_layout",
    "ranked",
    "roomy",
    "time_layout",
    "times_of",
    "total_of",
]

Figure = dict[str, Any]
"""A plotly figure, or a part of one."""

COLOURS: Final = 10
"""How many colours the page has."""

DASHES: Final = (
    "solid",
    "dash",
    "dot",
    "dashdot",
    "longdash",
    "longdashdot",
    "solid",
    "dash",
    "dot",
    "dashdot",
)

SYMBOLS: Final = (
    "circle",
    "square",
    "diamond",
    "cross",
    "triangle-up",
    "triangle-down",
    "x",
    "star",
)

_WINDOWS: Final = 96
"""Windows of time that percentiles are taken over."""

_PAD: Final = 0.12
_LEGEND_ROW: Final = 20
_FEW_POINTS: Final = 60
_KINDS: Final = {kind: index for index, kind in enumerate(KINDS)}


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart, or why there is none.

    Attributes:
        title: What it shows, with the unit.
        figure: The plotly figure (``data`` and ``layout``), or None.
        empty: Why there is none.
        note: A sentence on how to read it.
        wide: Whether it takes a whole row.
    """

    title: str
    figure: Figure | None = None
    empty: str = ""
    note: str = ""
    wide: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """A table, or why there is none.

    Attributes:
        title: What it lists.
        columns: Heads; one that begins with ``#`` is of numbers.
        rows: Cells.
        empty: Why there are no rows.
        note: A sentence on how to read it.
        states: By row, a state that it is marked with: ``good``, ``bad``, ``unknown`` or "".
    """

    title: str
    columns: tuple[str, ...]
    rows: Sequence[Sequence[str]]
    empty: str = ""
    note: str = ""
    states: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the page."""

    ident: str
    title: str
    lead: str
    items: Sequence[Chart | Table] = field(default_factory=list)


def plain_layout(height: int) -> Figure:
    """Return the layout that all charts begin with."""
    return {
        "height": height,
        "margin": {"l": 56, "r": 16, "t": 8, "b": 36},
        "hovermode": "closest",
        "legend": {
            "orientation": "h",
            "yanchor": "top",
            "y": -0.18,
            "xanchor": "left",
            "x": 0,
            "traceorder": "normal",
            "itemsizing": "constant",
        },
        "xaxis": {},
        "yaxis": {"automargin": True},
    }


def time_layout(data: RunData, *, height: int = 300, traces: int = 1) -> Figure:
    """Return the layout of a chart over the time of the run, with room for a legend of so many traces."""
    layout = plain_layout(height + _LEGEND_ROW * (traces // 2))
    length = max(data.ended - data.started, 1.0)
    room = length / 100  # so that no point lies on the edge
    layout["xaxis"] = {
        "type": "date",
        "range": [time_of(data.started - room), time_of(data.started + length + room)],
        "nticks": 7,
    }
    layout["yaxis"] = {"automargin": True}
    return layout


def log_axis(values: Iterable[float | None]) -> Figure:
    """Return a logarithmic axis of seconds over some values, with a tick wherever it says something."""
    exponents = [math.log10(value) for value in values if value]
    low, high = roomy((min(exponents), max(exponents)))
    return {"type": "log", "range": [low, high], **decades(low, high)}


def roomy(wanted: tuple[float, float]) -> tuple[float, float]:
    """Widen a range of decades to two of them at least, so that ticks have a scale to tell."""
    low, high = wanted
    missing = max(0.0, 2 - (high - low)) / 2
    return low - missing - _PAD, high + missing + _PAD


def decades(low: float, high: float) -> Figure:
    """Return ticks at powers of ten, few enough to be read."""
    powers = range(math.ceil(low), math.floor(high) + 1)
    few = max(1, -(-len(powers) // 6))
    kept = [power for power in powers if power % few == 0]
    return {
        "tickmode": "array",
        "tickvals": [short(10.0**power) for power in kept],
        "ticktext": [_power(power) for power in kept],
    }


def _power(power: int) -> str:
    if power >= 0:
        return f"{10**power:,} s".replace(",", " ")
    for unit, base in (("ms", -3), ("µs", -6), ("ns", -9)):
        if power >= base:
            return f"{10 ** (power - base)} {unit}"
    return f"1e{power} s"


def line(data: RunData, name: str, values: Sequence[float | None], index: int) -> Figure:
    """Return a gauge's line over the bins of the run."""
    return {
        "type": "scatter",
        "mode": line_mode(values),
        "name": markup(name),
        "x": times_of(data),
        "y": [None if value is None else short(value) for value in values],
        "line": {"color": f"c{index % COLOURS}", "width": 1.6, "dash": DASHES[index % COLOURS]},
        "marker": {"color": f"c{index % COLOURS}", "size": 4},
        "hovertemplate": f"{markup(name)} %{{y:.4~g}}<br>%{{x}}<extra></extra>",
    }


def line_mode(values: Sequence[float | None]) -> str:
    """Return how a line is drawn: with its points while they are few, for a lone one is no line."""
    return "lines+markers" if sum(value is not None for value in values) <= _FEW_POINTS else "lines"


def times_of(data: RunData) -> list[str]:
    """Return the middle of every bin, as plotly takes it."""
    return [time_of(when) for when in data.timeline.times()]


def known(data: RunData, values: Values) -> list[float | None]:
    """Return a gauge in every bin; None where nothing is known, or it was no number."""
    return [None if value is None or math.isnan(value) else value for value in data.timeline.filled(values)]


def coarse_times(data: RunData) -> tuple[list[str], int]:
    """Return the middle of each window of time, and how many bins it has."""
    count = data.timeline.last + 1
    few = -(-count // _WINDOWS)
    width = data.timeline.width * few
    return [time_of(data.timeline.start + (index + 0.5) * width) for index in range(-(-count // few))], few


def coarse(data: RunData, grown: Increases, few: int) -> list[float]:
    """Return a counter's growth in each window of time."""
    bins = data.timeline.padded(grown)
    return [sum(bins[start : start + few]) for start in range(0, len(bins), few)]


def kind_order(item: tuple[str, Any]) -> tuple[int, str]:
    """Return what kinds are sorted by: their own order, further ones behind them by name."""
    return _KINDS.get(item[0], len(_KINDS)), item[0]


def kind_colour(kind: str, index: int) -> int:
    """Return a kind's colour: the same one in every chart; one of the application's own has that of its place."""
    return _KINDS.get(kind, index) % COLOURS


def total_of(data: RunData, name: str) -> float:
    """Return how much a counter grew, all its children together, with what windows that were cut off add to it."""
    counted, cut = (children.get(name, {}) for children in (data.counters, data.cut_seconds))
    return sum(grown.total for grown in (*counted.values(), *cut.values()))


def ranked(values: Sequence[float], share: float) -> float:
    """Return a percentile of sorted values."""
    return values[min(len(values) - 1, int(share * len(values)))]
