"""The numbers of rules and dashboards as a file says them: in its section ``alerts``.

The file is a run's ``config.yaml``, or one of its own.

Rule: a key is a field of :class:`AlertConfig`, what is left out has its default, and what cannot be used is refused by its
key. A run counts its windows by ``metrics.objectives``; where a file has both, that is what the rules speak of, so a
second, different word is refused. Nothing here suspends; a file is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Final

from quiesce.errors import ConfigError
from quiesce.telemetry.objectives import window_objectives
from quiesce_dashboards.objectives import PHASE_LIMITS, AlertConfig

__all__ = ["SECTION", "alert_config", "own_numbers", "read_alert_config"]

SECTION: Final = "alerts"
"""The section's name."""

_METRICS: Final = "metrics"
_OBJECTIVES: Final = "objectives"
_WHOLE: Final = {each.name for each in fields(AlertConfig) if each.type == "int"}
_TEXTS: Final = {each.name for each in fields(AlertConfig) if each.type == "str"}


def alert_config(said: Mapping[str, Any], objectives: Mapping[str, float] | None = None) -> AlertConfig:
    """Return the numbers that a section says.

    Args:
        said: Values by the names of :class:`AlertConfig`'s fields; of the two mappings by phase, phases that are left out
            keep their defaults.
        objectives: What the run counts its windows by, in seconds by phase; None where nobody says.

    Raises:
        ConfigError: If a key is unknown, or its value cannot be used.
    """
    known = {each.name for each in fields(AlertConfig)}
    values: dict[str, Any] = {}
    for name, value in said.items():
        key = f"{SECTION}.{name}"
        if name not in known:
            raise ConfigError(key, "there is no such key")
        if name == "window_objectives":
            values[name] = window_objectives(value, key)
        elif name == "phase_limits":
            if not isinstance(value, Mapping):
                raise ConfigError(key, f"must be seconds by phase, not {value!r}")
            for phase, seconds in value.items():
                _check_number(f"{key}.{phase}", seconds)
            values[name] = {**PHASE_LIMITS, **value}
        elif name in _TEXTS:
            if not isinstance(value, str):
                raise ConfigError(key, f"must be a text, not {value!r}")
            values[name] = value
        else:
            _check_number(key, value, whole=name in _WHOLE)
            values[name] = value
    if objectives is not None:
        counted = window_objectives(objectives, f"{_METRICS}.{_OBJECTIVES}")
        if values.setdefault("window_objectives", counted) != counted:
            raise ConfigError(
                f"{SECTION}.window_objectives",
                f"says other than {_METRICS}.{_OBJECTIVES}, which the run counts by: leave it out here",
            )
    return AlertConfig(**values)


def read_alert_config(path: Path | str, *, runbooks: str | None = None) -> AlertConfig:
    """Read the numbers from a YAML file that has a section ``alerts``: a run's ``config.yaml``, or one of its own.

    Args:
        path: The file.
        runbooks: Where the runbooks are, whatever the file says.

    Raises:
        ConfigError: If the file cannot be read, is no YAML, has no such section, or says what cannot be used.
    """
    tree = _read(Path(path))
    if SECTION not in tree and _METRICS not in tree:
        raise ConfigError(str(path), f"has no section {SECTION!r}")
    config = alert_config(_section(tree, SECTION), _section(tree, _METRICS).get(_OBJECTIVES))
    return config if runbooks is None else replace(config, runbook_base_url=runbooks)


def own_numbers(path: Path | str) -> AlertConfig | None:
    """Return what a run's configuration says; None where it says nothing, or what is so by default.

    Args:
        path: The file; one that is not there says nothing.

    Raises:
        ConfigError: If it cannot be read, is no YAML, or says what cannot be used.
    """
    if not Path(path).is_file():
        return None
    tree = _read(Path(path))
    config = alert_config(_section(tree, SECTION), _section(tree, _METRICS).get(_OBJECTIVES))
    return None if config == AlertConfig() else config


def _read(path: Path) -> Mapping[str, Any]:
    import yaml

    try:
        tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(str(path), f"cannot be read: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        told = " ".join(str(error).split())
        raise ConfigError(str(path), f"is no YAML: {told}") from error
    if not isinstance(tree, Mapping):
        raise ConfigError(str(path), "holds no sections with keys")
    return tree


def _section(tree: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a section; one that is named and left empty says nothing."""
    found = tree.get(name)
    if found is not None and not isinstance(found, Mapping):
        raise ConfigError(name, f"must be a section with keys, not {found!r}")
    return found or {}


def _check_number(key: str, value: object, *, whole: bool = False) -> None:
    kinds = int if whole else int | float
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise ConfigError(key, f"must be a {'whole ' if whole else ''}number, not {value!r}")
