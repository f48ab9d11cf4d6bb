"""``quiesce view`` with one dashboard more than it has: every panel type, and a query that is wrong.

Arguments: the run folders. It prints its address, and ends by SIGTERM.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from quiesce.cli.view import read_content
from quiesce.view.programs import find_programs
from quiesce.view.session import listen, serve

RUN = 'run="$run",instance=~"$instance"'


def panel(number: int, kind: str, title: str, expr: str, **more: Any) -> dict[str, Any]:  # noqa: ANN401 - JSON
    """Return a panel's JSON: two beside each other."""
    target = {"refId": "A", "expr": expr, **more.pop("target", {})}
    return {
        "id": number,
        "type": kind,
        "title": title,
        "description": f"What **{title}** is.",
        "gridPos": {"x": number % 2 * 12, "y": 1 + number // 2 * 6, "w": 12, "h": 6},
        "targets": [target] if expr else [],
        "options": {},
        "fieldConfig": {"defaults": {}, "overrides": []},
        **more,
    }


def variable(name: str, query: str, **more: object) -> dict[str, object]:
    """Return a variable's JSON."""
    return {"name": name, "type": "query", "query": query, "label": name, "sort": 1, **more}


def mechanics() -> dict[str, Any]:
    """Return the dashboard's JSON."""
    shown = {"mappings": [{"type": "value", "options": {"1": {"text": "on", "color": "green"}}}]}
    steps = [{"color": "green", "value": None}, {"color": "red", "value": 1e6}]
    return {
        "uid": "mechanics",
        "title": "Mechanics",
        "description": "",
        "tags": [],
        "refresh": "1s",
        "time": {"from": "now-5m", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus"},
                variable("run", "label_values(quiesce_run_info, run)"),
                variable(
                    "instance", 'label_values(up{job="quiesce"}, instance)', multi=True, includeAll=True
                ),
            ]
        },
        "annotations": {
            "list": [
                {
                    "name": "Saves",
                    "enable": True,
                    "iconColor": "blue",
                    "expr": f"quiesce_checkpoint_last_success_timestamp_seconds{{{RUN}}} * 1000",
                    "useValueForTime": True,
                    "titleFormat": "saved",
                }
            ]
        },
        "panels": [
            {
                "id": 90,
                "type": "row",
                "title": "Everything",
                "gridPos": {"x": 0, "y": 0, "w": 24, "h": 1},
                "panels": [],
            },
            panel(
                0,
                "timeseries",
                "Steps",
                f"quiesce_trainer_version{{{RUN}}}",
                target={"legendFormat": "version"},
            ),
            panel(
                1,
                "heatmap",
                "Holds",
                f"sum by (le) (increase(quiesce_mutation_hold_seconds_bucket{{{RUN}}}[$__rate_interval]))",
                target={"format": "heatmap", "exemplar": True},
            ),
            panel(
                2,
                "stat",
                "Version",
                f"max(quiesce_trainer_version{{{RUN}}})",
                options={"graphMode": "area"},
                fieldConfig={
                    "defaults": {"unit": "short", "thresholds": {"steps": steps}},
                    "overrides": [],
                },
            ),
            panel(
                3,
                "table",
                "Owners",
                f"quiesce_groups{{{RUN}}}",
                target={"format": "table", "instant": True},
            ),
            panel(
                4,
                "state-timeline",
                "Checks",
                f"quiesce_invariant_active{{{RUN}}}",
                target={"legendFormat": "{{invariant}}"},
                fieldConfig={"defaults": shown, "overrides": []},
            ),
            panel(5, "text", "Words", "", options={"content": "**bold** <script>window.bad = 1</script>"}),
            panel(6, "timeseries", "Wrong", "sum(rate(quiesce_trainer_version[1m])"),
            panel(7, "timeseries", "Nothing", 'quiesce_trainer_version{run="nobody"}'),
            {
                "id": 91,
                "type": "row",
                "title": "Folded",
                "collapsed": True,
                "gridPos": {"x": 0, "y": 60, "w": 24, "h": 1},
                "panels": [panel(8, "timeseries", "Folded away", "quiesce_folded_away or vector(1)")],
            },
        ],
    }


if __name__ == "__main__":
    content = read_content()
    content = dataclasses.replace(
        content, dashboards={**content.dashboards, "mechanics": json.dumps(mechanics())}
    )
    made = listen(0)
    print(f"http://127.0.0.1:{made.getsockname()[1]}", flush=True)  # noqa: T201 - how it tells where it is
    serve([Path(folder) for folder in sys.argv[1:]], find_programs(None, None), content, made)
