"""What stands on more than one dashboard: the state of the run, violations that are open, alerts that fire."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from quiesce.telemetry import names
from quiesce_dashboards.objectives import AlertConfig, duration
from quiesce_dashboards.panels import (
    BAD,
    GOOD,
    NEUTRAL,
    NOTHING,
    WARN,
    Ask,
    Column,
    Panel,
    mapped,
    number,
    table,
)
from quiesce_dashboards.queries import firing, picked, sum_by

__all__ = ["alerts_firing", "firing_alerts", "open_violations", "run_state", "violated"]

_STATES: Final[Mapping[float | str, tuple[str, str]]] = {
    1: ("finished", NEUTRAL),
    2: ("running", GOOD),
    3: ("starting", NEUTRAL),
    4: ("stopping", WARN),
    5: ("failed", BAD),
    0: ("unknown", NOTHING),
}


def violated(config: AlertConfig) -> str:
    """Return an expression: 1 for each invariant that was violated lately, 0 for every other one.

    Also of a process that is gone since: a violation may well be what ended it.
    """
    last = f"last_over_time({picked(names.INVARIANT_LAST_VIOLATION)}[{duration(config.violation_seconds)}])"
    return f"({last} > bool 0) * (time() - {last} < bool {config.violation_seconds:g})"


_OWNERSHIP: Final = "/d/quiesce-ownership?${__url_time_range}&${__all_variables}"
"""The dashboard that lists alerts and violations, with the time range and the choices of this one."""


def open_violations(config: AlertConfig, *, linked: bool = True) -> Panel:
    """Return the number of invariants that are violated.

    Args:
        config: The objectives.
        linked: Whether it leads to the dashboard that lists them.
    """
    return number(
        "Invariants violated",
        f"Invariants that were seen violated in the last {config.violation_seconds / 60:g} minutes, those that a resume "
        "found open too. Good: none. Anything else is a page: the violations table on the ownership dashboard says which.",
        Ask(sum_by([], sum_by(["invariant"], violated(config), function="max"))),
        unit="none",
        decimals=0,
        mappings=mapped({0: ("none", GOOD)}),
        steps=((None, GOOD), (0.5, BAD)),
        links=[{"title": "Invariants and violations", "url": _OWNERSHIP}] if linked else (),
    )


def run_state() -> Panel:
    """Return the state that the run is in."""
    # A union, because the series differ by their state: the gravest state of any process, not a sum.
    parts = [
        f"{number} * {picked(names.RUN_STATE, state=state)}"
        for number, (state, _) in _STATES.items()
        if number
    ]
    return number(
        "Run",
        "What the run is doing; of several processes, the gravest state. Good: running, or finished. Not reached: nothing "
        "can be scraped; see the alert QuiesceRunDown.",
        Ask(sum_by([], "\nor ".join(parts), function="max")),
        unit="none",
        mappings=mapped(_STATES),
        empty="not reached",
        absent=BAD,
    )


def alerts_firing() -> Panel:
    """Return the number of alerts that fire."""
    return number(
        "Alerts firing",
        "Alerts of this run that fire. Good: none. The dashboard of ownership lists them, each with its runbook.",
        Ask(f"{sum_by([], firing(), function='count')} or vector(0)"),
        unit="none",
        decimals=0,
        mappings=mapped({0: ("none", GOOD)}),
        steps=((None, GOOD), (0.5, BAD)),
        links=[{"title": "Alerts and runbooks", "url": _OWNERSHIP}],
    )


def firing_alerts(config: AlertConfig) -> Panel:
    """Return the alerts that fire, each with its runbook."""
    return table(
        "Alerts that fire",
        "Alerts of this run that fire now, and the invariant that one stands for. Good: none. Each leads to its runbook.",
        Ask(sum_by(["alertname", "severity", "invariant", "instance"], firing(), function="max"), table=True),
        columns=[
            Column(
                "alertname",
                "alert",
                link=config.runbook("${__value.raw}"),
                link_title="Runbook",
            ),
            Column(
                "severity",
                "severity",
                mappings=mapped({"critical": ("critical", BAD), "warning": ("warning", WARN)}),
            ),
            Column("invariant", "invariant"),
            Column("instance", "instance"),
        ],
        sort="severity",
        falling=False,
        empty="none",
    )
