"""Writes the rule files for Prometheus, and says when the committed ones are stale.

Rule: the same code gives the same bytes; a file is written by renaming, or not at all. Every expression and every
template's query is judged by the catalogue before anything is written. Nothing here suspends.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

import yaml

from quiesce_dashboards.alerts import Alert, alerts
from quiesce_dashboards.generated_files import stale, write
from quiesce_dashboards.objectives import AlertConfig, duration
from quiesce_dashboards.queries import check_expression

__all__ = ["ALERTS_FILE", "GENERATED", "build", "check", "render", "rule_files", "rules_text"]

GENERATED: Final = Path(__file__).parent / "generated"
"""Where the files are committed, with the default numbers."""

ALERTS_FILE: Final = "alerts.yml"

_HEADER: Final = """\
# Generated from quiesce_dashboards; do not edit. `quiesce rules build` writes it anew.
# Needs Prometheus 2.42 or later (keep_firing_for).
"""

_QUERY: Final = re.compile(r'query \(printf "(?P<query>.*?)" \$labels')


class _Dumper(yaml.SafeDumper):
    """Writes text of several lines as a block."""


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    style = "|" if "\n" in value else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)


def render(document: Any, header: str = _HEADER) -> str:  # noqa: ANN401 - what YAML can say
    """Return a document as YAML, under the header of generated files."""
    return header + yaml.dump(
        document, Dumper=_Dumper, sort_keys=False, width=10_000, allow_unicode=True, default_flow_style=False
    )


def rule_files(config: AlertConfig | None = None) -> dict[str, str]:
    """Return every file's text by its name.

    Args:
        config: The numbers; None takes the defaults.

    Raises:
        ValueError: If an expression names what the catalogue has not.
        ExtraMissingError: If the parser of expressions is not installed.
    """
    for alert in alerts(config):
        check_expression(alert.expression)
        for annotation in alert.annotations().values():
            for found in _QUERY.finditer(annotation):
                check_expression(found["query"].replace("%q", '"r"'))
    return {ALERTS_FILE: rules_text(config)}


def rules_text(config: AlertConfig | None = None) -> str:
    """Return the text of the one file, unjudged: for where the parser of expressions may not be installed.

    Args:
        config: The numbers; None takes the defaults. No number of theirs makes an expression that does not parse.
    """
    made = alerts(config)
    groups = [
        {
            "name": f"quiesce-{severity}",
            "rules": [_rule(alert) for alert in made if alert.severity == severity],
        }
        for severity in ("critical", "warning")
    ]
    return render({"groups": groups})


def build(directory: Path | str = GENERATED, config: AlertConfig | None = None) -> list[Path]:
    """Write the files.

    Args:
        directory: Where; it is made.
        config: The numbers; None takes the defaults.

    Returns:
        The files that were written because they were not what they are now.

    Raises:
        OSError: If a file cannot be written.
    """
    return write(Path(directory), rule_files(config))


def check(directory: Path | str = GENERATED, config: AlertConfig | None = None) -> list[str]:
    """Return the names of files that are not what :func:`build` would write now.

    Args:
        directory: Where they are.
        config: The numbers; None takes the defaults.
    """
    return stale(Path(directory), rule_files(config))


def _rule(alert: Alert) -> dict[str, Any]:
    rule: dict[str, Any] = {"alert": alert.name, "expr": alert.expression}
    if alert.hold_seconds:
        rule["for"] = duration(alert.hold_seconds)
    if alert.keep_seconds:
        rule["keep_firing_for"] = duration(alert.keep_seconds)
    rule["labels"] = {"severity": alert.severity}
    rule["annotations"] = alert.annotations()
    return rule
