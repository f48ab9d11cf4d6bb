"""Small line plots on logarithmic axes, as SVG text: the few that the documentation needs.

Rule: the same numbers give the same bytes, so a plot in a repository changes only when the numbers do. Nothing here
suspends.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final
from xml.sax.saxutils import escape

__all__ = ["Panel", "draw"]

_WIDTH: Final = 340
_HEIGHT: Final = 290
_LEFT: Final = 58
_RIGHT: Final = 14
_TOP: Final = 34
_BOTTOM: Final = 46
_LEGEND: Final = 30
_COLOURS: Final = ("#777777", "#c44e2b", "#1f6fb2", "#2a8a4a")
_DASHES: Final = ("5 3", "", "", "2 2")
_MARK: Final = 3


@dataclass(frozen=True, slots=True)
class Panel:
    """One plot.

    Attributes:
        title: What it shows.
        x_label: What the horizontal axis is.
        y_label: What the vertical axis is.
        series: Points by name, all numbers positive; every panel of a drawing has the same names.
        x_ticks: Where the horizontal axis is marked, and with what text.
    """

    title: str
    x_label: str
    y_label: str
    series: Mapping[str, Sequence[tuple[float, float]]]
    x_ticks: Mapping[float, str]


def draw(panels: Sequence[Panel]) -> str:
    """Return one SVG document with the panels side by side, on one vertical scale, and one legend.

    Raises:
        ValueError: If a number is not positive, or there are none.
    """
    values = [y for panel in panels for points in panel.series.values() for _, y in points]
    if not values or min(values) <= 0:
        raise ValueError("a logarithmic plot needs positive numbers")
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    high = max(high, low + 1)
    width, height = _WIDTH * len(panels), _HEIGHT + _LEGEND
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="sans-serif" font-size="11" role="img">'
    )
    parts = [
        opening,
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for number, panel in enumerate(panels):
        parts += [f'<g transform="translate({number * _WIDTH} 0)">', *_panel(panel, low, high), "</g>"]
    parts += [*_legend(tuple(panels[0].series), width), "</svg>"]
    return "\n".join(parts) + "\n"


def _panel(panel: Panel, low: int, high: int) -> Iterator[str]:
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    logs = [math.log10(x) for x in panel.x_ticks]
    first, last = min(logs), max(logs)
    span = (last - first) or 1.0

    def across(x: float) -> float:
        margin = 12
        return _LEFT + margin + (math.log10(x) - first) / span * (right - _LEFT - 2 * margin)

    def up(y: float) -> float:
        return bottom - (math.log10(y) - low) / (high - low) * (bottom - _TOP)

    yield _text((_LEFT + right) / 2, 18, panel.title, weight="bold")
    for power in range(low, high + 1):
        y = up(10.0**power)
        yield f'<path d="M{_LEFT} {y:.1f}H{right}" stroke="#dddddd"/>'
        yield _text(_LEFT - 6, y + 4, f"{10.0**power:g}", anchor="end")
    for x, label in panel.x_ticks.items():
        yield f'<path d="M{across(x):.1f} {bottom}v4" stroke="#444444"/>'
        yield _text(across(x), bottom + 17, label)
    yield f'<path d="M{_LEFT} {_TOP}V{bottom}H{right}" fill="none" stroke="#444444"/>'
    yield _text((_LEFT + right) / 2, bottom + 36, panel.x_label)
    middle = (_TOP + bottom) / 2
    yield f'<g transform="rotate(-90 14 {middle})">{_text(14, middle, panel.y_label)}</g>'
    for number, points in enumerate(panel.series.values()):
        colour, dash = _style(number)
        line = "L".join(f"{across(x):.1f} {up(y):.1f}" for x, y in points)
        yield f'<path d="M{line}" fill="none" stroke="{colour}" stroke-width="1.8"{dash}/>'
        for x, y in points:
            yield f'<circle cx="{across(x):.1f}" cy="{up(y):.1f}" r="{_MARK}" fill="{colour}"/>'


def _legend(names: tuple[str, ...], width: int) -> Iterator[str]:
    step = width / (len(names) + 1)
    y = _HEIGHT + _LEGEND / 2
    for number, name in enumerate(names):
        colour, dash = _style(number)
        x = step * (number + 0.5)
        yield f'<path d="M{x:.1f} {y}h26" stroke="{colour}" stroke-width="1.8"{dash}/>'
        yield _text(x + 32, y + 4, name, anchor="start")


def _style(number: int) -> tuple[str, str]:
    dash = _DASHES[number % len(_DASHES)]
    return _COLOURS[number % len(_COLOURS)], f' stroke-dasharray="{dash}"' if dash else ""


def _text(x: float, y: float, text: str, *, anchor: str = "middle", weight: str = "normal") -> str:
    bold = "" if weight == "normal" else f' font-weight="{weight}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{bold}>{escape(text)}</text>'
