"""The dashboards: what they have to have, that the lint sees what is wrong, and that the committed files are current."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from quiesce.telemetry import names
from quiesce_dashboards import panels
from quiesce_dashboards.alerts import alerts
from quiesce_dashboards.dashboards import DIRECTORY, build, check, dashboard_files
from quiesce_dashboards.objectives import AlertConfig
from quiesce_dashboards.queries import picked, quantile
from quiesce_dashboards.reference import page
from tests.dashboards.lint import (
    RAW_COUNTERS,
    RULES,
    UIDS,
    contrast,
    every_colour,
    every_panel,
    lint,
    selectors,
    shown_metrics,
)

FILES: Final = dashboard_files()
DASHBOARDS: Final[dict[str, dict[str, Any]]] = {
    name.removesuffix(".json"): json.loads(text) for name, text in FILES.items()
}
WINDOWS: Final = "quiesce-windows"
DOCS: Final = Path(__file__).parents[2] / "docs"

NOT_SHOWN: Final[Mapping[str, str]] = {}
"""Metrics that no panel shows, with the reason."""

Break = Callable[[dict[str, Any]], object]


def panel_of(dashboard: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return the first panel of a type."""
    found: dict[str, Any] = next(dict_ for dict_ in dashboard["panels"] if dict_["type"] == kind)
    return found


def series_of(dashboard: Mapping[str, Any]) -> dict[str, Any]:
    """Return the first panel of series over time."""
    return panel_of(dashboard, "timeseries")


def bars_of(dashboard: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is said of the drawing of the first panel of bars."""
    drawn: list[dict[str, Any]] = [
        panel["fieldConfig"]["defaults"]["custom"]
        for panel in every_panel(dashboard)
        if panel["type"] == "timeseries"
    ]
    return next(custom for custom in drawn if custom["drawStyle"] == "bars")


def target_of(dashboard: Mapping[str, Any], kind: str = "timeseries") -> dict[str, Any]:
    """Return the first query of the first panel of a type."""
    found: dict[str, Any] = panel_of(dashboard, kind)["targets"][0]
    return found


def exemplar_target(dashboard: Mapping[str, Any]) -> dict[str, Any]:
    """Return the first query that asks for exemplars."""
    found: dict[str, Any] = next(
        target
        for panel in every_panel(dashboard)
        for target in panel.get("targets") or ()
        if target.get("exemplar")
    )
    return found


def _variable(dashboard: Mapping[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(each for each in dashboard["templating"]["list"] if each["name"] == name)
    return found


def _set(part: Callable[[dict[str, Any]], dict[str, Any]], **values: Any) -> Break:  # noqa: ANN401 - any JSON
    def broken(dashboard: dict[str, Any]) -> None:
        part(dashboard).update(values)

    return broken


def _defaults(dashboard: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = series_of(dashboard)["fieldConfig"]["defaults"]
    return found


def _itself(dashboard: dict[str, Any]) -> dict[str, Any]:
    return dashboard


def _replaced(old: str, new: str) -> Break:
    """Return a break of every expression."""

    def broken(dashboard: dict[str, Any]) -> None:
        for panel in every_panel(dashboard):
            for target in panel.get("targets") or ():
                target["expr"] = target["expr"].replace(old, new)

    return broken


def _expression(text: str) -> Break:
    return _set(target_of, expr=text)


CHOSEN: Final = 'job=~"$job",run="$run",instance=~"$instance"'

BROKEN: Final[list[tuple[str, str, Break]]] = [
    ("identity", "an unknown uid", _set(_itself, uid="other")),
    ("identity", "no description", _set(_itself, description="")),
    ("identity", "no tag", _set(_itself, tags=[])),
    ("identity", "an old schema", _set(_itself, schemaVersion=12)),
    ("identity", "a number of its own", _set(_itself, id=7)),
    ("identity", "crosshairs apart", _set(_itself, graphTooltip=0)),
    ("identity", "no refresh", _set(_itself, refresh="")),
    ("datasource variable", "none", lambda d: d["templating"]["list"].pop(0)),
    ("datasource variable", "of another type", _set(lambda d: _variable(d, "datasource"), query="loki")),
    ("target variables", "no instances", lambda d: d["templating"]["list"].remove(_variable(d, "instance"))),
    ("target variables", "one instance", _set(lambda d: _variable(d, "instance"), multi=False)),
    ("target variables", "several runs", _set(lambda d: _variable(d, "run"), multi=True)),
    ("target variables", "read once", _set(lambda d: _variable(d, "run"), refresh=1)),
    ("target variables", "of another source", _set(lambda d: _variable(d, "run"), datasource={"uid": "x"})),
    ("known variables", "one that is not there", _set(series_of, title="All of $cluster")),
    ("links", "none", _set(_itself, links=[])),
    ("links", "one that loses the time", _set(lambda d: d["links"][0], keepTime=False)),
    ("links", "one that loses variables", _set(lambda d: d["links"][0], includeVars=False)),
    ("annotations", "none", _set(lambda d: d["annotations"], list=[])),
    ("annotations", "one that is off", _set(lambda d: d["annotations"]["list"][0], enable=False)),
    ("no nulls", "grafanalib's", _set(series_of, cacheTimeout=None)),
    ("panel types", "one that the page cannot draw", _set(series_of, type="piechart")),
    ("no Angular", "a graph", _set(series_of, type="graph")),
    ("no Angular", "settings of a graph", _set(series_of, yaxes=[])),
    ("unique ids", "twice the same", lambda d: d["panels"][1].update(id=d["panels"][2]["id"])),
    ("unique ids", "twice the same title", lambda d: d["panels"][1].update(title=d["panels"][2]["title"])),
    ("unique ids", "none", _set(series_of, id=0)),
    ("grid", "one over another", lambda d: d["panels"][1].update(gridPos=d["panels"][2]["gridPos"])),
    ("grid", "over the edge", lambda d: series_of(d)["gridPos"].update(x=20, w=12)),
    ("grid", "half a row", lambda d: panel_of(d, "row")["gridPos"].update(w=12)),
    ("titles and descriptions", "no title", _set(series_of, title="")),
    ("titles and descriptions", "nothing about what is good", _set(series_of, description="Seconds.")),
    ("titles and descriptions", "cut off", _set(series_of, description="Good: less than")),
    ("units", "none", _set(_defaults, unit="")),
    ("units", "a word of one's own", _set(_defaults, unit="seconds")),
    ("thresholds", "none", lambda d: _defaults(d).pop("thresholds")),
    ("thresholds", "the text null", lambda d: _defaults(d)["thresholds"]["steps"][0].update(value="null")),
    (
        "thresholds",
        "not growing",
        lambda d: _defaults(d)["thresholds"].update(
            steps=[{"color": "#000000", "value": each} for each in (None, 2, 1)]
        ),
    ),
    ("data sources", "a bare name", _set(series_of, datasource="prometheus")),
    ("data sources", "a query of another", _set(target_of, datasource={"type": "loki", "uid": "x"})),
    ("gaps", "a line across", lambda d: _defaults(d)["custom"].update(spanNulls=True)),
    ("gaps", "no lone point", lambda d: _defaults(d)["custom"].update(drawStyle="line", showPoints="never")),
    ("transformations", "another one", _set(series_of, transformations=[{"id": "calculateField"}])),
    ("colours", "the theme's", _set(_defaults, color={"mode": "fixed", "fixedColor": "red"})),
    ("targets", "no query", _set(series_of, targets=[])),
    ("targets", "an empty legend", _set(target_of, legendFormat="")),
    ("targets", "a hidden one", _set(target_of, hide=True)),
    ("targets", "one point", _set(target_of, instant=True)),
    ("targets", "a letter twice", lambda d: series_of(d)["targets"].append(target_of(d))),
    ("targets", "a range for a table", lambda d: target_of(d, "table").update(instant=False)),
    ("now", "the last value of a dead process", lambda d: target_of(d, "stat").update(instant=False)),
    ("targets", "buckets as lines", lambda d: target_of(d, "heatmap").update(format="time_series")),
    ("expressions", "one that does not parse", _set(lambda d: target_of(d, "stat"), expr="sum(")),
    ("expressions", "no such metric", _expression("quiesce_window_seconds")),
    ("expressions", "no such value", _expression('quiesce_checkpoint_phase{phase="thaw"}')),
    ("matchers", "every run", _replaced('run="$run"', 'run=~".*"')),
    ("matchers", "every instance", _replaced('instance=~"$instance"', 'instance=~".*"')),
    ("matchers", "every job", _replaced('job=~"$job",', "")),
    ("matchers", "every kind", _replaced('kind=~"$kind"', 'kind=~".*"')),
    (
        "rate intervals",
        "five minutes",
        _expression(f"rate(quiesce_window_closed_seconds_total{{{CHOSEN}}}[5m])"),
    ),
    (
        "rate intervals",
        "a step",
        _expression(f"rate(quiesce_window_closed_seconds_total{{{CHOSEN}}}[$__interval])"),
    ),
    (
        "rate intervals",
        "two samples",
        _expression(f"irate(quiesce_window_closed_seconds_total{{{CHOSEN}}}[$__rate_interval])"),
    ),
    ("counters", "a counter as it is", _expression(f"quiesce_window_closed_seconds_total{{{CHOSEN}}}")),
    (
        "counters",
        "a gauge's rate",
        _expression(f"rate(quiesce_dataplane_rows{{{CHOSEN}}}[$__rate_interval])"),
    ),
    (
        "each event once",
        "a window of four scrapes",
        lambda d: target_of(d, "heatmap").update(
            expr=f"sum by (le) (increase(quiesce_mutation_hold_seconds_bucket{{{CHOSEN}}}[$__rate_interval]))"
        ),
    ),
    (
        "each event once",
        "bars around their points",
        _set(bars_of, barAlignment=0),
    ),
    (
        "quantiles",
        "no le",
        _expression(
            "histogram_quantile(0.9, sum by (phase) "
            f"(rate(quiesce_checkpoint_phase_seconds_bucket{{{CHOSEN}}}[1h])))"
        ),
    ),
    ("exemplars", "no trace", lambda d: exemplar_target(d).update(exemplar=False)),
    ("exemplars", "of a gauge", _set(lambda d: target_of(d, "stat"), exemplar=True)),
    ("heatmaps", "buckets of buckets", lambda d: panel_of(d, "heatmap")["options"].update(calculate=True)),
    (
        "heatmaps",
        "red and green",
        lambda d: panel_of(d, "heatmap")["options"]["color"].update(scheme="RdYlGn"),
    ),
]
"""The rule, what is broken, and how."""


@pytest.mark.parametrize("uid", UIDS)
def test_a_dashboard_keeps_every_rule(uid: str) -> None:
    """The lint finds nothing."""
    assert lint(DASHBOARDS[uid]) == {}


@pytest.mark.parametrize("rule, what, broken", BROKEN, ids=[f"{rule}: {what}" for rule, what, _ in BROKEN])
def test_the_lint_sees_a_broken_dashboard(rule: str, what: str, broken: Break) -> None:
    """Each rule has a fault that it finds, in a dashboard that is sound otherwise."""
    dashboard = copy.deepcopy(DASHBOARDS[WINDOWS])
    before = list(RULES[rule](dashboard))
    broken(dashboard)
    assert len(list(RULES[rule](dashboard))) > len(before), what


def test_every_rule_is_broken_somewhere() -> None:
    """A rule that nothing breaks may be one that cannot fail."""
    assert {rule for rule, _, _ in BROKEN} == set(RULES)


def test_there_are_five_under_stable_names() -> None:
    """A uid is an address that people keep."""
    assert sorted(FILES) == sorted(f"{uid}.json" for uid in UIDS)
    assert [DASHBOARDS[uid]["uid"] for uid in UIDS] == list(UIDS)
    assert len({dashboard["title"] for dashboard in DASHBOARDS.values()}) == len(UIDS)


def test_the_same_code_gives_the_same_text() -> None:
    """Otherwise a committed file is stale for no reason."""
    assert dashboard_files() == FILES
    assert all(text.endswith("}\n") for text in FILES.values())


def test_the_committed_files_are_current() -> None:
    """``quiesce dashboards build`` would write nothing."""
    assert check() == []
    assert {path.name for path in DIRECTORY.iterdir()} == set(FILES)


def test_stale_missing_and_left_over_files_are_told(tmp_path: Path) -> None:
    """Grafana's provisioning loads whatever lies in the folder, so a dashboard of old is a fault too."""
    assert set(check(tmp_path)) == set(FILES)
    build(tmp_path)
    assert check(tmp_path) == []
    (tmp_path / "quiesce-old.json").write_text("{}", encoding="utf-8")
    (tmp_path / f"{WINDOWS}.json").write_text("{}", encoding="utf-8")
    (tmp_path / "quiesce-gate.json").unlink()
    assert set(check(tmp_path)) == {"quiesce-old.json", f"{WINDOWS}.json", "quiesce-gate.json"}


def test_every_metric_is_shown_or_says_why_not() -> None:
    """A metric that nobody draws is either one too many, or a panel that is missing."""
    shown = set().union(*(shown_metrics(dashboard) for dashboard in DASHBOARDS.values()))
    assert set(names.METRICS) - shown == set(NOT_SHOWN)


def test_exceptions_are_needed() -> None:
    """A counter that is excused is one that a panel shows."""
    read = {
        name
        for dashboard in DASHBOARDS.values()
        for panel in every_panel(dashboard)
        for target in panel.get("targets") or ()
        for name, _ in selectors(target["expr"])
    }
    assert set(RAW_COUNTERS) <= read


def test_the_first_row_answers_the_first_questions() -> None:
    """Is it healthy, when did it last save, how long did writers and trainer wait, how much work is at risk."""
    rows = [at for at, panel in enumerate(DASHBOARDS[WINDOWS]["panels"]) if panel["type"] == "row"]
    top = DASHBOARDS[WINDOWS]["panels"][rows[0] + 1 : rows[1]]
    read = {name for panel in top for target in panel["targets"] for name, _ in selectors(target["expr"])}
    assert {
        names.RUN_STATE.name,
        names.INVARIANT_LAST_VIOLATION.name,
        names.CHECKPOINT_LAST_SUCCESS.name,
        names.WINDOW_BLOCKED.name,
        names.TRAINER_STALL.name,
        names.STEPS_SINCE_CHECKPOINT.name,
        names.GROUPS_SINCE_CHECKPOINT.name,
    } <= read
    assert {panel["type"] for panel in top} <= {"stat"}


def test_every_dashboard_says_whether_something_fires() -> None:
    """Somebody who opens any of them is told, not the one who opens the right one."""
    for uid, dashboard in DASHBOARDS.items():
        read = {
            name
            for annotation in dashboard["annotations"]["list"]
            for name, _ in selectors(annotation.get("expr") or annotation["target"]["expr"])
        }
        assert "ALERTS" in read, uid


def test_thresholds_are_the_configurations() -> None:
    """A run with objectives of its own gets dashboards that turn red at them."""
    config = AlertConfig(window_objectives={"drain": 7.5, "exclusive": 0.125}, gate_closed_seconds=77)
    files = dashboard_files(config)
    steps = {
        step["value"]
        for text in files.values()
        for panel in every_panel(json.loads(text))
        for step in panel.get("fieldConfig", {}).get("defaults", {}).get("thresholds", {}).get("steps", ())
    }
    assert {7.5, 0.125} <= steps


def test_firing_alerts_lead_to_their_runbooks() -> None:
    """The link of the alert table is the address of each alert's page, and moves with the configuration."""
    config = AlertConfig(runbook_base_url="https://wiki.example/q")
    text = dashboard_files(config)["quiesce-ownership.json"]
    links = re.findall(r"https://wiki\.example/q/[^\"]*", text)
    assert links
    named = {link.replace("${__value.raw}", name) for link in links for name in (a.name for a in alerts())}
    assert {config.runbook(alert.name) for alert in alerts()} <= named


def test_an_inactive_invariant_is_grey() -> None:
    """Nothing known is not the same as nothing wrong."""
    shown = [
        panel
        for panel in every_panel(DASHBOARDS["quiesce-ownership"])
        if panel["type"] == "state-timeline"
        and any("quiesce_invariant_active" in target["expr"] for target in panel["targets"])
    ]
    assert shown
    for panel in shown:
        options = panel["fieldConfig"]["defaults"]["mappings"][0]["options"]
        assert panels.NOTHING in {option["color"] for option in options.values()}
        assert {panels.GOOD, panels.BAD} <= {option["color"] for option in options.values()}


def test_phases_that_run_rarely_are_stepped() -> None:
    """Between two saves the last value holds; a slope would be a number that nobody measured."""
    for dashboard in DASHBOARDS.values():
        for panel in every_panel(dashboard):
            read = [name for target in panel.get("targets") or () for name, _ in selectors(target["expr"])]
            if panel["type"] == "timeseries" and names.CHECKPOINT_PHASE_LAST.name in read:
                custom = panel["fieldConfig"]["defaults"]["custom"]
                assert custom["lineInterpolation"] == "stepAfter", panel["title"]


# ------------------------------------------------------------------------------------------------- colours

GROUNDS: Final = {"light": "#ffffff", "dark": "#181b1f"}
"""What Grafana's themes draw panels on."""

# Machado, Oliveira, Fernandes 2009, severity 1: what linear RGB becomes for who lacks the cones.
_LACKING: Final = {
    "protanopia": (
        (0.152286, 1.052583, -0.204868),
        (0.114503, 0.786281, 0.099216),
        (-0.003882, -0.048116, 1.051998),
    ),
    "deuteranopia": (
        (0.367322, 0.860646, -0.227968),
        (0.280085, 0.672501, 0.047413),
        (-0.011820, 0.042940, 0.968881),
    ),
}


def _lab(colour: str, lacking: str = "") -> tuple[float, float, float]:
    """Return a colour in CIE L*a*b* (D65), as it is seen with or without some cones."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    if lacking:
        linear = [
            min(1.0, max(0.0, sum(weight * part for weight, part in zip(row, linear, strict=True))))
            for row in _LACKING[lacking]
        ]
    red, green, blue = linear
    x = (0.4124 * red + 0.3576 * green + 0.1805 * blue) / 0.95047
    y = 0.2126 * red + 0.7152 * green + 0.0722 * blue
    z = (0.0193 * red + 0.1192 * green + 0.9505 * blue) / 1.08883
    fx, fy, fz = (each ** (1 / 3) if each > 0.008856 else 7.787 * each + 16 / 116 for each in (x, y, z))
    return 116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)


def _apart(one: str, other: str, lacking: str = "") -> float:
    return math.dist(_lab(one, lacking), _lab(other, lacking))


@pytest.mark.parametrize("ground", GROUNDS)
def test_colours_are_seen_on_either_ground(ground: str) -> None:
    """A line has to stand out from the panel that it is drawn on."""
    used = {
        colour
        for dashboard in DASHBOARDS.values()
        for colour in every_colour(dashboard)
        if colour.startswith("#")
    }
    assert {colour for colour in used if contrast(colour, GROUNDS[ground]) < 2.0} == set()


@pytest.mark.parametrize("lacking", ["", *_LACKING])
def test_states_are_told_apart_by_everybody(lacking: str) -> None:
    """Good, warning, bad and unknown differ for who sees no red or no green too (a difference of 10 is plain)."""
    states = (panels.GOOD, panels.WARN, panels.BAD, panels.NOTHING)
    pairs = [(one, other) for one in states for other in states if one < other]
    assert [(one, other) for one, other in pairs if _apart(one, other, lacking) < 10] == []


@pytest.mark.parametrize("lacking", ["", *_LACKING])
def test_the_first_series_are_told_apart_by_everybody(lacking: str) -> None:
    """Of the first five colours, and of neighbours, no two look alike."""
    first = panels.PALETTE[:5]
    pairs = {(one, other) for one in first for other in first if one < other}
    assert [(one, other) for one, other in sorted(pairs) if _apart(one, other, lacking) < 10] == []


# ------------------------------------------------------------------------------------------------- builders


def test_a_panel_without_a_description_is_refused() -> None:
    """Nobody can add a panel and leave its meaning to the reader."""
    with pytest.raises(ValueError, match=r"Rows.*does not say"):
        panels.lines("Rows", " ", panels.Ask(picked(names.DATAPLANE_ROWS)))


def test_a_panel_wider_than_the_dashboard_is_refused() -> None:
    """The grid has 24 columns."""
    panel = panels.words("Text", "text")
    with pytest.raises(ValueError, match="'Text' is 25 wide"):
        panels.arranged([panels.Section("Row", [(25, 8, panel)])])


def test_panels_are_placed_from_left_to_right_then_down() -> None:
    """The next line begins below the tallest panel of the one before."""
    made = [panels.words(str(number), "text") for number in range(4)]
    placed = panels.arranged(
        [
            panels.Section("One", [(12, 4, made[0]), (12, 8, made[1]), (6, 8, made[2])]),
            panels.Section("Two", [(24, 2, made[3])]),
        ]
    )
    at = [(panel.gridPos["x"], panel.gridPos["y"]) for panel in placed]
    assert at == [(0, 0), (0, 1), (12, 1), (0, 9), (0, 17), (0, 18)]


def test_a_selector_of_a_dashboard_has_its_variables() -> None:
    """Kinds are chosen where a metric has them, unless the panel chooses itself."""
    chosen = 'job=~"$job",run="$run",instance=~"$instance"'
    assert picked(names.DATAPLANE_ROWS) == f"quiesce_dataplane_rows{{{chosen}}}"
    assert picked(names.MUTATION_SLOTS, state="active") == (
        f'quiesce_mutation_slots{{{chosen},kind=~"$kind",state="active"}}'
    )
    assert picked(names.MUTATION_SLOTS, kind="admission").endswith(',kind="admission"}')
    assert "sum by (le, kind) (" in quantile(0.5, names.MUTATION_HOLD, ["kind"])
    with pytest.raises(ValueError, match="no series"):
        quantile(0.5, names.DATAPLANE_ROWS)


# ------------------------------------------------------------------------------------------------- pages


def test_the_reference_page_is_current() -> None:
    """Run ``scripts/generate_dashboards_reference.py`` after a change."""
    assert (DOCS / "reference" / "dashboards.md").read_text(encoding="utf-8") == page()


def test_the_reference_page_has_every_panel_and_metric() -> None:
    """Somebody who looks for a metric finds the panel."""
    text = page()
    for dashboard in DASHBOARDS.values():
        for panel in every_panel(dashboard):
            assert panel["title"] in text
    for name in names.METRICS:
        assert f"| `{name}` | " in text


def test_the_guide_goes_through_every_panel() -> None:
    """A panel of the window dashboard that the guide leaves out has nobody to say what to do about it."""
    text = (DOCS / "how-to" / "read-the-window-dashboard.md").read_text(encoding="utf-8").lower()
    shared = ("groups in the last checkpoint", "size of the last checkpoint", "rows in the last checkpoint")
    assert "**groups**, **size** and **rows in the last checkpoint.**" in text
    missing = [
        panel["title"]
        for panel in every_panel(DASHBOARDS[WINDOWS])
        if panel["title"].lower() not in text and panel["title"].lower() not in shared
    ]
    assert missing == []
