"""What grafanalib cannot say, in one place: modern panels, exemplars, a data source by its uid, no nulls.

grafanalib 0.7.1 writes the shapes of Grafana 6 to 9: every key that it knows, null or not; no exemplar flag on a query;
the heatmap of old; a threshold whose first value is the text ``null``; dashboards of schema 12. The classes here keep
what it does well (layout, ids, JSON) and say the rest.

Rule: what Grafana would fill in by itself is left out, and nothing is null but where null is a value: the first step of
thresholds, and a dashboard's id. Nothing here suspends.

Source of the shapes: the types of npm's ``@grafana/schema``, which a test checks the generated files against.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from quiesce.errors import ExtraMissingError

try:
    from grafanalib import core
except ImportError:
    raise ExtraMissingError("building dashboards", "grafanalib", "dashboards") from None

__all__ = [
    "DATASOURCE",
    "SCHEMA_VERSION",
    "Board",
    "Heatmap",
    "Query",
    "Row",
    "SortBy",
    "Stat",
    "StateTimeline",
    "Table",
    "Text",
    "TimeSeries",
    "annotated",
    "link",
    "picker",
    "render_board",
    "templating",
]

DATASOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
"""Whatever Prometheus the dashboard's variable names."""

SCHEMA_VERSION: Final = 42
"""Of Grafana 12, as its npm package of types has it; a newer Grafana migrates it when it loads a dashboard."""

_PANEL_KEYS: Final = (
    "datasource",
    "description",
    "fieldConfig",
    "gridPos",
    "id",
    "interval",
    "links",
    "maxDataPoints",
    "options",
    "targets",
    "title",
    "transformations",
    "type",
)
SortBy = core.TableSortByField
"""Which column a table is sorted by."""

_TOOLTIP: Final = {"mode": "multi", "sort": "desc"}

Json = dict[str, Any]

attr = core.attr
"""As grafanalib has it: a checker that knew of attrs would miss every argument that its classes take."""


def _lean(value: Any, *, keep: bool = False) -> Any:  # noqa: ANN401 - what JSON can say
    """Leave out what is null, but for the values of threshold steps."""
    if isinstance(value, dict):
        return {
            key: _lean(each, keep=key == "steps")
            for key, each in value.items()
            if each is not None or (keep and key == "value")
        }
    if isinstance(value, list):
        return [_lean(each, keep=keep) for each in value]
    return value


def _modern(told: Json) -> Json:
    """Keep what today's panels have."""
    found: Json = _lean({key: told[key] for key in _PANEL_KEYS if key in told})
    for key in ("links", "transformations"):
        if not found.get(key):
            found.pop(key, None)
    return found


@attr.s
class Query(core.Target):  # type: ignore[misc] # grafanalib is not typed
    """A query of Prometheus, with or without exemplars."""

    exemplar = attr.ib(default=False)

    def to_json_data(self) -> Json:
        """Return it as today's editor would write it."""
        found = {
            "datasource": DATASOURCE,
            "editorMode": "code",
            "exemplar": self.exemplar,
            "expr": self.expr,
            "format": self.format,
            "instant": self.instant,
            "legendFormat": self.legendFormat,
            "range": not self.instant,
            "refId": self.refId,
        }
        return {**found, "interval": self.interval} if self.interval else found


class TimeSeries(core.TimeSeries):  # type: ignore[misc] # as above
    """Lines, steps or bars over time."""

    def to_json_data(self) -> Json:
        """Return it without what Grafana has by itself."""
        found = _modern(super().to_json_data())
        defaults = found["fieldConfig"]["defaults"]
        custom = defaults["custom"]
        if self.scaleDistributionType == "linear":
            custom["scaleDistribution"] = {"type": "linear"}
        elif self.thresholdsStyleMode != "off":
            # On a logarithmic axis there is room for the limits, however far below them everything is.
            custom["axisSoftMax"] = max(step["value"] or 0 for step in defaults["thresholds"]["steps"])
        custom["stacking"] = {"group": "A", "mode": "none", **custom["stacking"]}
        custom["insertNulls"] = False
        found["options"]["legend"]["showLegend"] = True
        found["options"]["tooltip"] = _TOOLTIP
        return found


class Stat(core.Stat):  # type: ignore[misc] # as above
    """One number, or one for each series."""

    def to_json_data(self) -> Json:
        """Return it with today's options."""
        found = _modern(super().to_json_data())
        found["fieldConfig"]["defaults"].pop("custom", None)
        found["options"] |= {
            "percentChangeColorMode": "standard",
            "showPercentChange": False,
            "wideLayout": True,
        }
        return found


@attr.s
class Table(core.Table):  # type: ignore[misc] # as above
    """Rows and columns."""

    empty = attr.ib(default="")

    def to_json_data(self) -> Json:
        """Return it with what grafanalib puts beside the panel's fields where it belongs."""
        found = _modern(super().to_json_data())
        defaults = found["fieldConfig"]["defaults"]
        defaults |= {
            "color": {"mode": self.colorMode},
            "custom": {"align": self.align, "filterable": self.filterable},
            "mappings": self.mappings,
            "noValue": self.empty,
        }
        found["options"] |= {"cellHeight": "sm", "frameIndex": 0}
        return found


@attr.s
class StateTimeline(core.StateTimeline):  # type: ignore[misc] # as above
    """States over time, a row for each series."""

    empty = attr.ib(default="")

    def to_json_data(self) -> Json:
        """Return it with today's options."""
        found = _modern(super().to_json_data())
        found["fieldConfig"]["defaults"] |= {"noValue": self.empty}
        found["options"]["legend"] |= {"calcs": [], "showLegend": True}
        found["options"]["tooltip"] = {"mode": "single", "sort": "none"}
        return found


@attr.s
class Heatmap(core.Panel):  # type: ignore[misc] # as above
    """How often each bucket of a histogram was hit, over time; the shape of Grafana 9 and later."""

    unit = attr.ib(default="s")

    def to_json_data(self) -> Json:
        """Return it as the heatmap panel reads it: buckets come from the query, exemplars are drawn."""
        found = _modern(
            self.panel_json(
                {
                    "type": "heatmap",
                    "options": {
                        "calculate": False,
                        "cellGap": 1,
                        "cellValues": {"unit": "short"},
                        "color": {
                            "exponent": 0.5,
                            "fill": "dark-orange",
                            "mode": "scheme",
                            "reverse": False,
                            "scale": "exponential",
                            "scheme": "Viridis",
                            "steps": 64,
                        },
                        "exemplars": {"color": "rgba(213,94,0,0.9)"},
                        "filterValues": {"le": 1e-9},
                        "legend": {"show": True},
                        "rowsFrame": {"layout": "auto"},
                        "showValue": "never",
                        "tooltip": {"mode": "single", "yHistogram": False},
                        "yAxis": {"axisPlacement": "left", "reverse": False, "unit": self.unit},
                    },
                }
            )
        )
        found["fieldConfig"] = {"defaults": {"custom": {}, "unit": self.unit}, "overrides": []}
        return found


class Text(core.Text):  # type: ignore[misc] # as above
    """A few words."""

    def to_json_data(self) -> Json:
        """Return it without data source and queries."""
        found = _modern(super().to_json_data())
        for key in ("datasource", "fieldConfig", "targets", "maxDataPoints"):
            found.pop(key, None)
        return found


class Row(core.RowPanel):  # type: ignore[misc] # as above
    """The heading of a part of a dashboard."""

    def to_json_data(self) -> Json:
        """Return it."""
        told = super().to_json_data()
        return {key: told[key] for key in ("id", "type", "title", "collapsed", "panels", "gridPos")}


class Board(core.Dashboard):  # type: ignore[misc] # as above
    """A dashboard."""

    def to_json_data(self) -> Json:
        """Return it in today's schema."""
        told = super().to_json_data()
        kept = (
            "annotations description editable graphTooltip id links panels refresh tags templating title time "
            "timezone uid version"
        )
        found = {key: told[key] for key in kept.split()}
        picker = {"refresh_intervals": self.timePicker.refreshIntervals}
        return {**found, "schemaVersion": SCHEMA_VERSION, "timepicker": picker}


def annotated(told: list[Json]) -> core.Annotations:
    """Return annotations, each as Grafana's JSON has it."""
    return core.Annotations(list=told)


def templating(told: list[Json]) -> core.Templating:
    """Return variables, each as Grafana's JSON has it."""
    return core.Templating(list=told)


def picker(intervals: Sequence[str]) -> core.TimePicker:
    """Return the choice of intervals in which a dashboard asks again."""
    return core.TimePicker(refreshIntervals=list(intervals), timeOptions=[])


def link(title: str, *, tags: Sequence[str] = (), address: str = "") -> core.DashboardLink:
    """Return a link to the dashboards with these tags, which keeps time and variables; or to an address.

    Args:
        title: What it is called.
        tags: Of the dashboards.
        address: Where it leads otherwise.
    """
    inside = not address
    return core.DashboardLink(
        title=title,
        type="dashboards" if inside else "link",
        tags=list(tags),
        uri=address,
        asDropdown=False,
        includeVars=inside,
        keepTime=inside,
        targetBlank=not inside,
        icon="external link" if inside else "doc",
    )


def render_board(board: Board) -> str:
    """Return a dashboard as JSON, with an id for each panel; the same dashboard gives the same text."""

    def said(value: Any) -> Any:  # noqa: ANN401 - whatever grafanalib made
        return value.to_json_data()

    return json.dumps(board.auto_panel_ids(), default=said, indent=1, ensure_ascii=False) + "\n"
