"""Tables about what was checked, how the run came back, and what its log complained about.

Rule: an invariant that was never checked is not said to hold. Nothing here suspends.
"""

from __future__ import annotations

from typing import Final

from quiesce.report.charts import (
    Table,
)
from quiesce.report.data import RunData
from quiesce.report.words import clock, count_of, duration
from quiesce.telemetry import names

__all__ = ["MOST_VIOLATIONS", "invariants", "notes", "restores", "violations"]

MOST_VIOLATIONS: Final = 50
"""Records that are listed."""


def invariants(data: RunData) -> Table:
    """List invariants, what was checked and what broke."""
    active = data.latest.get(names.INVARIANT_ACTIVE.name, {})
    last = data.latest.get(names.INVARIANT_LAST_VIOLATION.name, {})
    checks = data.counters.get(names.INVARIANT_CHECKS.name, {})
    violations = data.counters.get(names.INVARIANT_VIOLATIONS.name, {})
    rows, states = [], []
    for name in dict.fromkeys((*names.INVARIANTS, *checks)):
        if name not in active and name not in checks:
            continue
        checked = checks[name].total if name in checks else 0.0
        broken = violations[name].total if name in violations else 0.0
        when = last.get(name, 0.0)
        state = "bad" if broken or when else "good" if checked else "unknown"
        verdict = {"bad": "broken", "good": "held", "unknown": "never checked"}[state]
        rows.append(
            (
                name.replace("_", " "),
                verdict,
                count_of(checked),
                count_of(broken),
                clock(when, data) if when else "–",
            )
        )
        states.append(state)
    return Table(
        "Checks and violations",
        ("invariant", "verdict", "#checks", "#violations", "last violation"),
        rows,
        empty="No invariant was attached to telemetry in this run.",
        states=states,
    )


def violations(data: RunData) -> Table:
    """List what the auditor found, as ``violations.jsonl`` has it; those that are open first."""
    rows, states = [], []
    for record in data.violations[:MOST_VIOLATIONS]:
        again = f" ({record.count} times, last {clock(record.last_unix, data)})" if record.count > 1 else ""
        drill = f" Injected by the drill {record.evidence['drill']}." if "drill" in record.evidence else ""
        rows.append(
            (
                record.key,
                "open" if record.open else "closed",
                record.severity,
                record.invariant.replace("_", " "),
                clock(record.first_unix, data),
                record.message + drill + again,
            )
        )
        states.append("bad" if record.open else "unknown")
    more = len(data.violations) - len(rows)
    note = "A record stays open until it is closed with quiesce violations."
    return Table(
        "Violations",
        ("record", "verdict", "severity", "invariant", "at", "what it says"),
        rows,
        empty="The auditor found nothing."
        if any(grown.total for grown in data.counters.get(names.INVARIANT_CHECKS.name, {}).values())
        else "Nothing was checked while the run recorded, and no violation is on record.",
        note=f"{more} more are in violations.jsonl. {note}" if more > 0 else note if rows else "",
        states=states,
    )


def restores(data: RunData) -> Table:
    """List how the run came back."""
    rows = [
        (
            clock(restore.unix_time, data),
            str(restore.incarnation) if restore.incarnation else "–",
            restore.outcome + (f" ({restore.reason})" if restore.reason else ""),
            duration(sum(restore.parts.values())),
            ", ".join(f"{part} {duration(seconds)}" for part, seconds in restore.parts.items()) or "–",
            ", ".join(f"{count} {owner}" for owner, count in restore.groups.items() if count) or "–",
        )
        for restore in data.restores
    ]
    return Table(
        "Restores",
        ("at", "#start", "outcome", "#took", "parts", "groups"),
        rows,
        empty="The run was never restored from a checkpoint while it recorded.",
    )


def notes(data: RunData) -> Table:
    """List the last complaints of the log."""
    rows = [(clock(note.unix_time, data), note.level, note.event, note.text) for note in data.notes]
    counted = ", ".join(f"{count} of level {level}" for level, count in data.loud.items())
    return Table(
        "Last warnings and errors of the log",
        ("at", "level", "event", "what it says"),
        rows,
        empty="The log has neither warnings nor errors."
        if data.logged
        else "No log was recorded, so it is not known whether there were warnings or errors.",
        note=f"Altogether {counted}." if sum(data.loud.values()) > len(rows) else "",
    )
