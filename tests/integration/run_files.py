"""What a run's folder says, read without the code that wrote it where that is possible."""

from __future__ import annotations

import contextlib
import io
import json
from collections import Counter
from pathlib import Path
from typing import Any

from quiesce.checkpoint.journal import read_journal, surviving
from quiesce.cli.main import main


def audit(path: Path) -> dict[str, Any]:
    """Return what ``quiesce audit --json`` says, and hold that its exit code agrees."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["audit", "--json", str(path)])
    assert out.getvalue(), (
        f"the audit ended with {code} and printed nothing; it complained: {err.getvalue()!r}"
    )
    told: dict[str, Any] = json.loads(out.getvalue())
    assert code == (0 if told["ok"] else 1)
    return told


def checkpoints(run: Path) -> list[str]:
    """Return the names under ``checkpoints``."""
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def newest(run: Path) -> Path:
    """Return the newest published checkpoint."""

    def order(path: Path) -> tuple[int, int]:
        step, _, serial = path.name.removeprefix("step_").partition(".")
        return int(step), int(serial or 0)

    published = [path for path in (run / "checkpoints").glob("step_*") if ".tmp" not in path.name]
    return max((path for path in published if not path.name.endswith(".suspect")), key=order)


def trained(run: Path) -> Counter[str]:
    """Return how often the surviving lineage trained each group."""
    return Counter(
        group for record in surviving(read_journal(run / "lineage.jsonl")) for group in record.groups
    )


def steps(run: Path) -> list[tuple[int | None, tuple[str, ...]]]:
    """Return the groups of each step of the surviving lineage."""
    records = surviving(read_journal(run / "lineage.jsonl"))
    return [(record.step, record.groups) for record in records]


def prompts(run: Path) -> dict[str, int]:
    """Return the dataset index of every group that the kept checkpoints know."""
    found: dict[str, int] = {}

    def walk(value: object) -> None:
        if isinstance(value, dict):
            if "group_id" in value and "prompt" in value:
                found[value["group_id"]] = value["prompt"]["index"]
            for inner in value.values():
                walk(inner)
        elif isinstance(value, list):
            for inner in value:
                walk(inner)

    for part in ("ledger.json", "buffer.json"):
        for path in (run / "checkpoints").glob(f"step_*/{part}"):
            if ".tmp" not in path.parent.name:  # which a kill may have left half written
                walk(json.loads(path.read_bytes()))
    return found


def snapshot(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Return every file of a folder with its time and content, to prove that nothing changed.

    Whoever looks takes the lock for a moment, so its file is left out.
    """
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes())
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "run.lock"
    }
