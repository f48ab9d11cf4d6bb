"""How the page puts numbers into words: durations, counts, sizes, times.

Rule: three digits and a unit; times are UTC. Nothing here suspends.
"""

from __future__ import annotations

import html
from datetime import UTC, datetime
from typing import Final

from quiesce.report.data import RunData

__all__ = ["clock", "count_of", "duration", "label", "markup", "share_of", "short", "size_of", "time_of"]

_DIGITS: Final = 4
_DAY: Final = 86400.0
_UNITS: Final = ((1e-3, 1e6, "µs"), (1.0, 1e3, "ms"), (60.0, 1.0, "s"))


def duration(seconds: float | None) -> str:
    """Return a duration for people: ``12 µs``, ``3.4 ms``, ``1.2 s``, ``2 min 3 s``, ``5 h 12 min``."""
    if seconds is None:
        return "–"
    if seconds <= 0:
        return "0"
    for limit, scale, unit in _UNITS:
        if seconds < limit:
            return f"{seconds * scale:.3g} {unit}"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:  # noqa: PLR2004 - minutes of an hour
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if minutes else f"{hours} h"


def count_of(number: float) -> str:
    """Return a whole number, its thousands apart."""
    return f"{round(number):,}".replace(",", "\u202f")


def size_of(num_bytes: float) -> str:
    """Return a size for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:  # noqa: PLR2004 - as it says
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.3g} TiB"


def share_of(part: float, whole: float) -> str:
    """Return a share in percent."""
    return f"{100 * part / whole:.2g} %" if whole > 0 else "–"


def short(value: float) -> float | int:
    """Round to as many digits as a chart can show."""
    if value == int(value):
        return int(value)
    return float(f"{value:.{_DIGITS}g}")


def time_of(unix_time: float) -> str:
    """Return a time as plotly takes it: UTC, to the millisecond."""
    return datetime.fromtimestamp(unix_time, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]


def clock(unix_time: float, data: RunData) -> str:
    """Return a time of the run: of a short one without its day."""
    form = "%H:%M:%S" if data.ended - data.started < _DAY / 2 else "%b %d %H:%M:%S"
    return datetime.fromtimestamp(unix_time, UTC).strftime(form)


def label(kind: str) -> str:
    """Return a kind, a cause or an owner for people."""
    return kind.replace("_", " ") or "all"


def markup(text: str) -> str:
    """Return text for plotly, which takes some of it for markup."""
    return html.escape(text)
