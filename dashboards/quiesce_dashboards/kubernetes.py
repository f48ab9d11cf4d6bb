"""Writes rules and dashboards as manifests for Kubernetes, and says when the committed ones are stale.

Rule: a manifest has the very content of the files for Prometheus and Grafana, so there is one truth; the operator of
Prometheus takes the rules as a ``PrometheusRule``, and the sidecar of Grafana's chart takes each dashboard from a
``ConfigMap`` of its own, by its label. Nothing here suspends.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import yaml

from quiesce_dashboards.dashboards import dashboard_files
from quiesce_dashboards.objectives import AlertConfig
from quiesce_dashboards.rules import ALERTS_FILE, render, rule_files

__all__ = [
    "CONFIG_MAP_LIMIT",
    "DASHBOARDS_MANIFEST",
    "MANIFESTS",
    "RULES_MANIFEST",
    "build",
    "check",
    "manifests",
]

MANIFESTS: Final = Path(__file__).parents[1] / "provisioning" / "kubernetes"
"""Where the manifests are committed, with the default numbers; a checkout has it, an installed package has not."""

RULES_MANIFEST: Final = "rules.yaml"

DASHBOARDS_MANIFEST: Final = "dashboards.yaml"

CONFIG_MAP_LIMIT: Final = 1 << 20
"""Bytes that a ConfigMap can hold."""

_HEADER: Final = """\
# Generated from quiesce_dashboards; do not edit. `scripts/generate_kubernetes.py` writes it anew.
"""

_RULES_HEADER: Final = (
    _HEADER
    + """\
# `release` is what ruleSelector of the Prometheus asks for: by default the name of the chart's release.
"""
)

_DASHBOARDS_HEADER: Final = (
    _HEADER
    + """\
# Apply it with --server-side: a dashboard is longer than what kubectl may keep in an annotation.
"""
)

_LABELS: Final = {"app.kubernetes.io/name": "quiesce"}


def manifests(config: AlertConfig | None = None) -> dict[str, str]:
    """Return every manifest's text by its name.

    Args:
        config: The numbers; None takes the defaults.

    Raises:
        ValueError: If an expression names what the catalogue has not, or a dashboard is too long for a ConfigMap.
        ExtraMissingError: If what builds rules and dashboards is not installed.
    """
    rules = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "quiesce", "labels": {"release": "kube-prometheus-stack", **_LABELS}},
        "spec": yaml.safe_load(rule_files(config)[ALERTS_FILE]),
    }
    maps = [_config_map(name, text) for name, text in sorted(dashboard_files(config).items())]
    return {
        RULES_MANIFEST: render(rules, _RULES_HEADER),
        DASHBOARDS_MANIFEST: _DASHBOARDS_HEADER + "".join(f"---\n{render(each, '')}" for each in maps),
    }


def build(directory: Path | str = MANIFESTS, config: AlertConfig | None = None) -> list[Path]:
    """Write the manifests.

    Args:
        directory: Where; it is made.
        config: The numbers; None takes the defaults.

    Returns:
        The files that were written because they were not what they are now.

    Raises:
        OSError: If a file cannot be written.
    """
    folder = Path(directory)
    folder.mkdir(parents=True, exist_ok=True)
    texts = manifests(config)
    written = []
    for name in _stale(folder, texts):
        scratch = folder / f".{name}.tmp"
        scratch.write_text(texts[name], encoding="utf-8")
        scratch.replace(folder / name)
        written.append(folder / name)
    return written


def check(directory: Path | str = MANIFESTS, config: AlertConfig | None = None) -> list[str]:
    """Return the names of manifests that are not what :func:`build` would write now.

    Args:
        directory: Where they are.
        config: The numbers; None takes the defaults.
    """
    return _stale(Path(directory), manifests(config))


def _stale(folder: Path, texts: dict[str, str]) -> list[str]:
    return [
        name
        for name, text in texts.items()
        if not (folder / name).is_file() or (folder / name).read_bytes() != text.encode()
    ]


def _config_map(name: str, text: str) -> dict[str, Any]:
    size = len(text.encode())
    if size > CONFIG_MAP_LIMIT:
        raise ValueError(f"{name} has {size} bytes, more than a ConfigMap can hold")
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": name.removesuffix(".json"),
            # The sidecar of Grafana's chart looks for this label, and puts the dashboard into this folder.
            "labels": {"grafana_dashboard": "1", **_LABELS},
            "annotations": {"grafana_folder": "Quiesce"},
        },
        "data": {name: text},
    }
