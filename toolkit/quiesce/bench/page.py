"""The pages of the documentation that hold the numbers: their words are written by hand, their tables by the benchmarks.

Rule: only what stands between a pair of markers is replaced (``<!-- bench:NAME -->`` and ``<!-- /bench:NAME -->``),
so a page can be read, edited and measured again in any order. Nothing here suspends.
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

__all__ = [
    "AUDITOR_PAGE",
    "PAGE",
    "PLOT",
    "REPLY_PAGE",
    "REPLY_PLOT",
    "TELEMETRY_PAGE",
    "plot_reply",
    "plot_window",
    "update_page",
]

AUDITOR_PAGE: Final = "auditor-cost.md"
PAGE: Final = "cost.md"
PLOT: Final = "cost-window.svg"
REPLY_PAGE: Final = "reply-latency.md"
REPLY_PLOT: Final = "reply-latency.svg"
TELEMETRY_PAGE: Final = "telemetry-cost.md"
_NAMES: Final = {
    "recovery_off": "only the index is cut",
    "inside": "written inside the window",
    "ours": "captured inside, written outside",
}
_NO_LATENCY: Final = 0.1  # where 0 ms is drawn on an axis that has no 0
_REPLY_NAMES: Final = {
    "inline": "cleared before the reply",
    "own_fence": "in the background, a fence of its own",
    "gate_permit": "in the background, the gate's permit",
}


def update_page(report: BenchReport, folder: Path, *, today: datetime | None = None) -> list[Path]:
    """Put a report's numbers into its page, or each part's into its own, and draw its plot if it has one.

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
    if report.parts:
        return [path for part in report.parts for path in update_page(part, folder, today=today)]
    page = folder / _PAGES.get(report.bench, PAGE)
    try:
        text = page.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError("--docs", f"{page} is not there") from None
    text = _between(text, page, report.bench, _body(report, datetime.now(UTC) if today is None else today))
    if report.answer:
        text = _between(
            text, page, f"{report.bench}:answer", "\n".join(f"* {line}" for line in report.answer)
        )
    page.write_text(text, encoding="utf-8")
    written = [page]
    if report.bench in _PLOTS:
        name, draw_it = _PLOTS[report.bench]
        plot = folder / name
        plot.write_text(draw_it(report), encoding="utf-8")
        written.append(plot)
    return written


def _between(text: str, page: Path, name: str, body: str) -> str:
    """Return the page with something else between a pair of markers."""
    begin, end = f"<!-- bench:{name} -->", f"<!-- /bench:{name} -->"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    if len(pattern.findall(text)) != 1:
        raise ConfigError("--docs", f"{page} has not exactly one pair of markers {begin} and {end}")
    return pattern.sub(lambda _: f"{begin}\n\n{body}\n\n{end}", text)


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


def plot_reply(report: BenchReport) -> str:
    """Draw how long half of the replies take, against calls at once, a clear's length and the load; an SVG document."""
    replies = [
        result for result in report.results if result["measured"] == "replies" and not result["checkpoints"]
    ]
    loads = [result for result in report.results if result["measured"] == "load"]
    calls = sorted({result["calls_at_once"] for result in replies})[-2:][0]
    clear = sorted({result["clear_s"] for result in replies})[1]

    def panel(title: str, x_label: str, found: Any, of: Any, ticks: Any) -> Panel:  # noqa: ANN401 - a few results, two small functions
        series = {
            name: [
                (of(result), result["reply_s"]["median"] * 1e3) for result in found if result["mode"] == mode
            ]
            for mode, name in _REPLY_NAMES.items()
        }
        return Panel(title, x_label, "reply p50, ms", series, {of(result): ticks(result) for result in found})

    return draw(
        [
            panel(
                f"clears of {clear * 1e3:g} ms",
                "calls at once",
                [result for result in replies if result["clear_s"] == clear],
                lambda result: result["calls_at_once"],
                lambda result: f"{result['calls_at_once']}",
            ),
            panel(
                f"{calls} calls at once",
                "a clear takes",
                [result for result in replies if result["calls_at_once"] == calls],
                lambda result: result["clear_s"],
                lambda result: f"{result['clear_s'] * 1e3:g} ms",
            ),
            panel(
                f"clears of {loads[0]['clear_s'] * 1e3:g} ms, {loads[0]['calls_at_once']} calls at once",
                "calls asked for, of those that one thread can clear",
                loads,
                lambda result: result["share"],
                lambda result: f"{result['share']:.0%}",
            ),
        ]
    )


_PAGES: Final = {"auditor": AUDITOR_PAGE, "reply": REPLY_PAGE, "telemetry": TELEMETRY_PAGE}
_PLOTS: Final = {"window": (PLOT, plot_window), "reply": (REPLY_PLOT, plot_reply)}


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
