"""The layout keeps the dependency rules complete: nobody adds a module that no rule looks at."""

import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
SUBSCRIBERS = {"quiesce.bench", "quiesce.cli", "quiesce.report", "quiesce.telemetry", "quiesce.view"}
"""The parts of the toolkit that may know telemetry: they subscribe to hooks, start or measure what does, read its files."""


def _contract(name: str) -> dict[str, Any]:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    (found,) = (
        contract
        for contract in settings["tool"]["importlinter"]["contracts"]
        if contract["name"].startswith(name)
    )
    return dict(found)


def test_every_part_of_the_toolkit_is_a_primitive_or_a_subscriber() -> None:
    """Each module under `quiesce` is in the contract of primitives, or in the short list above."""
    parts = {
        f"quiesce.{path.stem}"
        for path in (ROOT / "toolkit/quiesce").iterdir()
        if not path.name.startswith("_") and (path.suffix == ".py" or (path / "__init__.py").exists())
    }

    assert parts - SUBSCRIBERS == set(_contract("Primitives")["source_modules"])
