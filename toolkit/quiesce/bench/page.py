"""The page of the documentation that holds the numbers: its words are written by hand, its tables by the benchmarks.

Rule: only what stands between a pair of markers is replaced (``<!-- bench:NAME -->`` and ``<!-- /bench:NAME -->``),
so the page can be read, edited and measured again in any order. Nothing here suspends.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from quiesce.bench.modes import MODES
from quiesce.bench.plot import Panel, draw
from quiesce.bench.world import shown_bytes
from quiesce.errors import ConfigError

if TYPE_CHECKING:
    from quiesce.bench.report import BenchReport

__all__ = ["PAGE", "PLOT", "plot_window", "update_page"]

PAGE: Final = "cost.md"
PLOT: Final = "cost-window.svg"
_NAMES: Final = {
    "recovery_off": "only the index is cut",
    "inside": "written inside the window",
    "ours": "captured inside, written outside",
}
_NO_LATENCY: Final = 0.1  # where 0 ms is drawn on an axis that has no 0


def update_page(report: BenchReport, folder: Path, *, today: datetime | None = None) -> list[Path]:
    """Put a report's numbers into the page, and draw the plot if it is the window's.

    Args:
        report: What was measured.
        folder: Where the page is.
        today: When it was measured; None means now.

    Returns:
        What was written.

    Raises:
        ConfigError: If the page or the report's markers are not there.
        OSError: If something cannot be written.
    """
    page = folder / PAGE
    begin, end = f"<!-- bench:{report.bench} -->", f"<!-- /bench:{report.bench} -->"
    try:
        text = page.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError("--docs", f"{page} is not there") from None
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    if len(pattern.findall(text)) != 1:
        raise ConfigError("--docs", f"{page} has not exactly one pair of markers {begin} and {end}")
    body = _body(report, datetime.now(UTC) if today is None else today)
    page.write_text(pattern.sub(lambda _: f"{begin}\n\n{body}\n\n{end}", text), encoding="utf-8")
    written = [page]
    if report.bench == "window":
        plot = folder / PLOT
        plot.write_text(plot_window(report), encoding="utf-8")
        written.append(plot)
    return written


def plot_window(report: BenchReport) -> str:
    """Draw how long the exclusive side was held, against groups, bytes and latency, in each mode; an SVG document."""
    results = [result for result in report.results if result["mode"] in MODES]

    def panel(sweep: str, x_label: str, title: str, of: Any, ticks: Any) -> Panel:  # noqa: ANN401 - two small functions
        found = [result for result in results if result["sweep"] == sweep]
        series = {
            _NAMES[mode]: [
                (of(result), result["exclusive_s"]["median"] * 1e3)
                for result in found
                if result["mode"] == mode
            ]
            for mode in MODES
        }
        return Panel(title, x_label, "exclusive, ms", series, {of(result): ticks(result) for result in found})

    return draw(
        [
            panel(
                "groups",
                "finished groups",
                "against groups",
                lambda result: result["groups"],
                lambda result: f"{result['groups']:,}",
            ),
            panel(
                "bytes",
                "bytes of rows",
                "against bytes",
                lambda result: result["rows"] * result["row_bytes"],
                lambda result: shown_bytes(result["rows"] * result["row_bytes"]),
            ),
            panel(
                "latency",
                "latency of each file operation",
                "against latency",
                lambda result: result["latency_s"] * 1e3 or _NO_LATENCY,
                lambda result: f"{result['latency_s'] * 1e3:g} ms",
            ),
        ]
    )


def _body(report: BenchReport, today: datetime) -> str:
    machine = report.machine
    libraries = ", ".join(f"{name} {version}" for name, version in machine["libraries"].items() if version)
    measured = (
        f"Measured on {today:%Y-%m-%d}: {machine['processor']}, {machine['processors']} processors, "
        f"{shown_bytes(machine['memory_bytes'])} of memory, {machine['system']}, {machine['file_system']}, "
        f"{machine['python']}, {libraries}; load average {machine['load_average']} before and "
        f"{machine['load_average_after']} after."
    )
    parts = [measured]
    for table in (report.bars_table(), *report.tables):
        parts += [f"**{table.title}**", table.to_markdown()]
    return "\n\n".join(parts)
