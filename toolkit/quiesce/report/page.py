"""Writes the page: everything in one file, which is whole or not there.

Rule: nothing that a run recorded can become markup or script, and the page asks no host for anything (its own
policy forbids it). Nothing here suspends; it blocks for as long as reading the recording takes.
"""

from __future__ import annotations

import html
import json
import os
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Final

from quiesce.errors import ExtraMissingError
from quiesce.report.charts import Chart, Section, Table
from quiesce.report.collect import collect
from quiesce.report.data import RunData
from quiesce.report.figures import sections, tiles
from quiesce.report.words import duration
from quiesce.telemetry import names
from quiesce.telemetry.recording import Recording

__all__ = ["REPORT_FILE", "render", "write_report"]

REPORT_FILE: Final = "report.html"
"""The page's name in a run folder, unless another one is asked for."""

_POLICY: Final = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
)
_INFO: Final = {"sampler": "sampler", "dataplane": "data plane", "engine": "engine", "version": "quiesce"}
_NUMBER: Final = "#"
_NEVER_BROKEN: Final = (
    "at",
    "asked at",
    "began at",
    "ended at",
    "last violation",
    "cut",
    "phase",
    "verdict",
    "level",
    "event",
)


def write_report(run_dir: Path | str, output: Path | str | None = None) -> Path:
    """Write the page about a run.

    Args:
        run_dir: The run's folder.
        output: The file; None means ``report.html`` in the folder.

    Returns:
        The file.

    Raises:
        NoRecordingError: If the run did not record.
        ExtraMissingError: If plotly is not installed.
        OSError: If the file cannot be written; what was there is still there.
    """
    script = _plotly()
    path = Path(run_dir) / REPORT_FILE if output is None else Path(output)
    page = render(collect(Recording.open(run_dir)), script)
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        scratch.write_text(page, encoding="utf-8")
        scratch.replace(path)
    except OSError:
        scratch.unlink(missing_ok=True)
        raise
    return path


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs  # type: ignore[import-untyped] # ships no types
    except ImportError as error:
        raise ExtraMissingError("the report", "plotly", "report") from error
    return str(get_plotlyjs())


def render(data: RunData, script: str) -> str:
    """Return the page.

    Args:
        data: What it shows.
        script: plotly's JavaScript.
    """
    parts = sections(data)
    figures: dict[str, object] = {}
    body = "".join(_section(part, figures) for part in parts)
    links = "".join(f'<li><a href="#{part.ident}">{_text(part.title)}</a></li>' for part in parts)
    packed = json.dumps(figures, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    remarks = "".join(f"<p>{_text(remark)}</p>" for remark in data.remarks)
    version = data.info.get("version", "")
    source = f" from what quiesce {_text(version)} recorded" if version else ""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<link rel="icon" href="data:,">
<title>{_text(data.run)} – Quiesce report</title>
<style>{_asset("page.css")}</style>
</head>
<body>
<header>
<div class="top"><h1>{_text(data.run)}</h1><button id="theme" type="button">Theme</button></div>
<ul class="facts">{"".join(f"<li><b>{_text(what)}</b>{_text(value)}</li>" for what, value in _facts(data))}</ul>
<div class="tiles">{"".join(_tile(*tile) for tile in tiles(data))}</div>
</header>
<nav><ul>{links}</ul></nav>
<main>
{body}</main>
<footer>{remarks}<p>Times are UTC. Written by quiesce report{source}.</p></footer>
<script type="application/json" id="figures">{packed}</script>
<script>{script}</script>
<script>{_asset("page.js")}</script>
</body>
</html>
"""


def _facts(data: RunData) -> Iterator[tuple[str, str]]:
    for name, label in _INFO.items():
        if data.info.get(name):
            yield label, data.info[name]
    yield "started", datetime.fromtimestamp(data.started, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    yield "recorded for", duration(data.ended - data.started)
    if len(data.starts) > 1:
        yield "starts", str(len(data.starts))
    states = data.latest.get(names.RUN_STATE.name, {})
    now = [state for state, value in states.items() if value == 1]
    if now:
        yield "last state", now[0]
    read = data.latest.get(names.PROMPTS_READ.name, {}).get("")
    trained = data.latest.get(names.PROMPTS_TRAINED.name, {}).get("")
    if read and trained is not None:
        yield "prompts", f"{trained:.0f} trained of {read:.0f} read"


def _tile(what: str, much: str, more: str) -> str:
    return (
        f'<div class="tile"><div class="what">{_text(what)}</div><div class="much">{_text(much)}</div>'
        f'<div class="more">{_text(more)}</div></div>'
    )


def _section(section: Section, figures: dict[str, object]) -> str:
    small = " small" if section.ident == "phases" and len(section.items) > 1 else ""
    items = "".join(
        _chart(item, f"{section.ident}-{index}", figures) if isinstance(item, Chart) else _table(item)
        for index, item in enumerate(section.items)
    )
    return (
        f'<section id="{section.ident}"><h2>{_text(section.title)}</h2><p class="lead">{_text(section.lead)}</p>'
        f'<div class="grid{small}">{items}</div></section>\n'
    )


def _chart(chart: Chart, ident: str, figures: dict[str, object]) -> str:
    if chart.figure is None:
        inner = f'<p class="none">{_text(chart.empty)}</p>'
    else:
        figures[ident] = chart.figure
        height = chart.figure["layout"]["height"]
        inner = f'<div class="chart" id="{ident}" style="height:{height}px"></div>{_note(chart.note)}'
    wide = " wide" if chart.wide else ""
    return f'<div class="card{wide}"><h3>{_text(chart.title)}</h3>{inner}</div>'


def _table(table: Table) -> str:
    if not table.rows:
        inner = f'<p class="none">{_text(table.empty)}</p>'
    else:
        heads = "".join(
            f"<th{_kind(column)}>{_text(column.removeprefix(_NUMBER))}</th>" for column in table.columns
        )
        rows = "".join(
            f'<tr class="{state}">'
            + "".join(
                f"<td{_kind(column)}>{cell}</td>" for column, cell in zip(table.columns, row, strict=True)
            )
            + "</tr>"
            for state, row in zip(
                table.states or ("",) * len(table.rows), map(_cells, table.rows), strict=True
            )
        )
        inner = (
            f'<div class="scroll"><table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div>'
        )
    return f'<div class="card wide"><h3>{_text(table.title)}</h3>{inner}{_note(table.note)}</div>'


def _cells(row: object) -> list[str]:
    assert isinstance(row, tuple | list)  # noqa: S101 - narrows a Sequence
    return [_text(str(cell)) for cell in row]


def _kind(column: str) -> str:
    if column.startswith(_NUMBER):
        return ' class="number"'
    names_of = ["fixed"] if column in _NEVER_BROKEN else []
    if column == "verdict":
        names_of.append("verdict")
    return f' class="{" ".join(names_of)}"' if names_of else ""


def _note(note: str) -> str:
    return f'<p class="note">{_text(note)}</p>' if note else ""


def _asset(name: str) -> str:
    return (resources.files("quiesce.report") / name).read_text(encoding="utf-8")


def _text(text: str) -> str:
    return html.escape(text)
