"""Writes the dashboards for Grafana, and says when the committed ones are stale.

Rule: the same code gives the same bytes; a file is written by renaming, or not at all. Every expression is judged by the
catalogue before anything is written. Nothing here suspends.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from quiesce.telemetry import names
from quiesce_dashboards.board_gate import gate
from quiesce_dashboards.board_ownership import ownership
from quiesce_dashboards.board_slots import slots
from quiesce_dashboards.board_training import training
from quiesce_dashboards.board_windows import windows
from quiesce_dashboards.generated_files import stale, write
from quiesce_dashboards.grafana import DATASOURCE, Board, annotated, link, picker, render_board, templating
from quiesce_dashboards.objectives import AlertConfig
from quiesce_dashboards.panels import BAD, GOOD, NEUTRAL, Section, arranged
from quiesce_dashboards.queries import check_expression, firing, picked, series, sum_by
from quiesce_dashboards.rules import GENERATED

__all__ = ["BOARDS", "DIRECTORY", "TAG", "Dashboard", "build", "check", "dashboard_files"]

DIRECTORY: Final = GENERATED / "dashboards"
"""Where the files are committed, with the default numbers."""

TAG: Final = "quiesce"
"""What all of them are tagged with, so that each links to the others."""

_VARIABLE: Final = re.compile(r"^(label_values\((?P<selector>.*), \w+\)|query_result\((?P<expression>.*)\))$")


@dataclass(frozen=True, slots=True)
class Dashboard:
    """One dashboard.

    Attributes:
        uid: Its name in addresses; it never changes.
        title: What it is called.
        description: What it answers.
        sections: Makes its parts of the objectives.
        refresh: How often it asks again.
    """

    uid: str
    title: str
    description: str
    sections: Callable[[AlertConfig], list[Section]]
    refresh: str = "10s"


BOARDS: Final = (
    Dashboard(
        "quiesce-windows",
        "Quiesce: checkpoint windows",
        "Is it healthy, when did it last save, how long did writers and trainer wait, how much work is at risk; then why.",
        windows,
    ),
    Dashboard(
        "quiesce-slots",
        "Quiesce: mutation slots",
        "How often slots are taken, how long they are held, how long they wait, and which kind stands in the way.",
        slots,
    ),
    Dashboard(
        "quiesce-ownership",
        "Quiesce: ownership and invariants",
        "Who owns which prompts, whether the account adds up, and whether every invariant holds.",
        ownership,
    ),
    Dashboard(
        "quiesce-gate",
        "Quiesce: snapshot gates and cleanup",
        "Gates that are closed, what waits for permits, what is still to be cleared, and the data plane.",
        gate,
    ),
    Dashboard(
        "quiesce-training",
        "Quiesce: training run",
        "Reward, pace, staleness, what the trainer waits for, the device, and what telemetry itself costs.",
        training,
    ),
)


def dashboard_files(config: AlertConfig | None = None) -> dict[str, str]:
    """Return every file's text by its name.

    Args:
        config: The objectives; None takes the defaults.

    Raises:
        ValueError: If an expression names what the catalogue has not.
        ExtraMissingError: If what builds dashboards is not installed.
    """
    numbers = AlertConfig() if config is None else config
    return {f"{each.uid}.json": _render(each, numbers) for each in BOARDS}


def build(directory: Path | str = DIRECTORY, config: AlertConfig | None = None) -> list[Path]:
    """Write the files.

    Args:
        directory: Where; it is made.
        config: The objectives; None takes the defaults.

    Returns:
        The files that were written because they were not what they are now.

    Raises:
        OSError: If a file cannot be written.
    """
    return write(Path(directory), dashboard_files(config))


def check(directory: Path | str = DIRECTORY, config: AlertConfig | None = None) -> list[str]:
    """Return the names of files that are not what :func:`build` would write now, and of dashboards that it does not know.

    Grafana loads whatever lies in the folder. What is left over is named and never deleted: it may be somebody's own.

    Args:
        directory: Where they are.
        config: The objectives; None takes the defaults.
    """
    folder, files = Path(directory), dashboard_files(config)
    return [*stale(folder, files), *sorted({path.name for path in folder.glob("*.json")} - set(files))]


def _render(dashboard: Dashboard, config: AlertConfig) -> str:
    panels = arranged(dashboard.sections(config))
    for panel in panels:
        for query in panel.targets:
            check_expression(query.expr)
    for annotation in _annotations():
        check_expression(annotation["expr"])
    for variable in _variables():
        if (found := _VARIABLE.match(str(variable.get("definition", "")))) is not None:
            check_expression(found["selector"] or found["expression"])
    return render_board(
        Board(
            uid=dashboard.uid,
            title=dashboard.title,
            description=dashboard.description,
            tags=[TAG],
            refresh=dashboard.refresh,
            graphTooltip=1,
            timezone="browser",
            timePicker=picker(("1s", "5s", "10s", "30s", "1m", "5m")),
            templating=templating(_variables()),
            annotations=annotated(_annotations()),
            links=_links(config),
            panels=panels,
        )
    )


def _links(config: AlertConfig) -> list[Any]:
    runbooks = f"{config.runbook_base_url.rstrip('/')}/index{config.runbook_suffix}"
    return [
        link("Quiesce", tags=(TAG,)),
        link("Runbooks", address=runbooks),
    ]


def _variables() -> list[dict[str, Any]]:
    info = names.RUN_INFO
    kinds = names.MUTATION_HOLD
    return [
        {
            "name": "datasource",
            "label": "Data source",
            "type": "datasource",
            "query": "prometheus",
            "refresh": 1,
            "hide": 0,
            "includeAll": False,
            "multi": False,
            "regex": "",
            "options": [],
        },
        _query("job", "Job", series(info), several=True),
        _runs(),
        _query("instance", "Instance", _with(series(info), 'job=~"$job"', 'run="$run"'), several=True),
        _query(
            "kind",
            "Kind of slot",
            _with(series(kinds, "_count"), 'job=~"$job"', 'run="$run"'),
            several=True,
        ),
    ]


def _with(selector: str, *matchers: str) -> str:
    return f"{selector}{{{','.join(matchers)}}}"


def _runs() -> dict[str, Any]:
    """Return the variable that chooses a run; Grafana opens a dashboard on its first value: the run that began last."""
    began = _with(series(names.RUN_STARTED), 'job=~"$job"')
    query = (
        f"query_result(sort_desc({sum_by(['run'], f'last_over_time({began}[$__range])', function='max')}))"
    )
    return {
        **_query("run", "Run", series(names.RUN_STARTED), several=False),
        "definition": query,
        "query": {"query": query, "refId": "run"},
        "sort": 0,
        "regex": '/run="([^"]+)"/',
    }


def _query(name: str, label: str, selector: str, *, several: bool) -> dict[str, Any]:
    query = f"label_values({selector}, {name})"
    found: dict[str, Any] = {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": DATASOURCE,
        "definition": query,
        "query": {"query": query, "refId": f"{name}"},
        "refresh": 2,
        "sort": 1,
        "hide": 0,
        "includeAll": several,
        "multi": several,
        "regex": "",
        "options": [],
    }
    everything = {"text": ["All"], "value": ["$__all"]}
    return {**found, "allValue": ".*", "current": everything} if several else found


def _annotations() -> list[dict[str, Any]]:
    labels: Sequence[str] = ("job", "run", "instance")
    restored = sum_by(labels, picked(names.RESTORE_GROUPS))
    # Where nothing was in flight no group is restored, but it takes its time all the same; so does a refusal.
    took = sum_by(labels, picked(names.RESTORE_SECONDS))
    refused = sum_by(labels, picked(names.RESTORE_REFUSALS))
    began = sum_by(labels, picked(names.RUN_STARTED), function="max")
    saved = sum_by(labels, picked(names.CHECKPOINT_LAST_SUCCESS), function="max")
    told = (
        ("Alerts", BAD, sum_by(["alertname", "instance"], firing(), function="max"), "{{alertname}}", False),
        ("Saves", GOOD, f"({saved} > 0) * 1000", "checkpoint published", True),
        (
            "Restores",
            NEUTRAL,
            f"({began} and ({restored} > 0 or ({took} > 0 unless {refused} > 0))) * 1000",
            "restored",
            True,
        ),
    )
    return [
        {
            "name": name,
            "datasource": DATASOURCE,
            "enable": True,
            "hide": False,
            "iconColor": colour,
            "expr": expression,
            "step": "5s",
            "titleFormat": title,
            "textFormat": "{{instance}}",
            "tagKeys": "",
            "useValueForTime": value_is_time,
        }
        for name, colour, expression, title, value_is_time in told
    ]
