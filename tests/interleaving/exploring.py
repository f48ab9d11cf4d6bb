"""What the tests of this folder share: how far they explore, and the record of what they explored."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from quiesce.errors import DuplicateOwnerError
from quiesce.explorer import Report

RECORD = Path(os.environ.get("QUIESCE_EXPLORED", Path(tempfile.gettempdir()) / "quiesce-explored"))
"""Folder of one small JSON file for each scenario and mutant; ``python -m tests.interleaving.report`` reads it."""


def record(kind: str, name: str, **facts: Any) -> None:  # noqa: ANN401 - JSON values
    """Write down what was explored."""
    RECORD.mkdir(parents=True, exist_ok=True)
    (RECORD / f"{kind}-{name}.json").write_text(json.dumps({"kind": kind, "name": name, **facts}, indent=1))


def facts_of(report: Report) -> dict[str, Any]:
    """Return what a table says about an exploration."""
    return {
        "strategy": report.strategy,
        "freedom": report.freedom,
        "timers": report.timers,
        "schedules": report.schedules,
        "pruned": report.pruned,
        "exhausted": report.exhausted,
        "steps": report.steps,
        "seconds": round(report.seconds, 2),
    }


def leaf(error: BaseException) -> BaseException:
    """Return the first error in a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def invariants_of(error: BaseException) -> tuple[str, ...]:
    """Return the invariants that an error says are broken; a primitive that refuses a second owner says so too."""
    error = leaf(error)
    if isinstance(error, DuplicateOwnerError):
        return ("single_owner",)
    return tuple(getattr(error, "invariants", ()))
