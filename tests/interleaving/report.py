"""Prints, as Markdown, what the tests of this folder explored last: ``python -m tests.interleaving.report``."""

from __future__ import annotations

import json
import sys
from typing import Any

from tests.interleaving.exploring import RECORD


def read() -> dict[str, list[dict[str, Any]]]:
    """Return the records by kind, each sorted by name."""
    found: dict[str, list[dict[str, Any]]] = {"scenario": [], "mutant": [], "soak": []}
    for path in sorted(RECORD.glob("*.json")):
        entry = json.loads(path.read_text())
        found[entry["kind"]].append(entry)
    return found


def table(head: tuple[str, ...], rows: list[tuple[object, ...]]) -> str:
    """Return a Markdown table."""
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    lines += [f"| {' | '.join(str(cell) for cell in row)} |" for row in rows]
    return "\n".join(lines)


def render() -> str:
    """Return all tables."""
    found = read()
    parts = []
    for kind, title in (("scenario", "Scenarios"), ("soak", "Scenarios, the long way")):
        rows: list[tuple[object, ...]] = [
            (
                f"`{entry['name']}`",
                entry["stands_for"],
                f"{entry['strategy']}, timers {entry['timers']}",
                f"{entry['schedules']:,}",
                "all" if entry["exhausted"] else "",
                entry["steps"],
            )
            for entry in found[kind]
        ]
        if rows:
            total = sum(entry["schedules"] for entry in found[kind])
            head = ("scenario", "stands for", "strategy", "schedules", "exhausted", "longest, steps")
            parts += [f"### {title}: {total:,} schedules", table(head, rows)]
    killed: list[tuple[object, ...]] = [
        (
            f"`{entry['invariant']}`",
            f"`{entry['name']}`",
            entry["what"],
            f"`{entry['scenario']}`",
            entry["schedules"],
            f"`{entry['schedule']}`",
        )
        for entry in sorted(found["mutant"], key=lambda entry: (entry["invariant"], entry["name"]))
    ]
    if killed:
        head = ("invariant", "mutant", "what it does", "scenario", "killed by schedule no.", "the schedule")
        parts += [f"### Mutants: {len(killed)} killed", table(head, killed)]
    return "\n\n".join(parts)


if __name__ == "__main__":
    sys.stdout.write(render() + "\n")
