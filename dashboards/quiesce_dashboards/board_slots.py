"""The dashboard of mutation slots: how often they are taken, how long they are held, and how long they wait."""

from __future__ import annotations

from quiesce.barrier import KINDS
from quiesce.telemetry import names
from quiesce_dashboards.objectives import AlertConfig
from quiesce_dashboards.panels import BAD, GOOD, WARN, Ask, Column, Section, heat, lines, number, table
from quiesce_dashboards.queries import came, picked, quantile, sum_by

__all__ = ["slots"]

_GREW = "$__rate_interval"
_WHOLE = "$__range"


def slots(config: AlertConfig) -> list[Section]:
    """Return the dashboard's parts.

    Args:
        config: The objectives.
    """
    return [
        Section("Now", _now(config)),
        Section("By kind", _kinds()),
        Section("How long", _lengths()),
        Section("Waiting and failing", _trouble()),
    ]


def _now(config: AlertConfig) -> list[tuple[int, int, object]]:
    drain = config.window_objectives["drain"]
    rate = sum_by([], f"rate({picked(names.MUTATION_SECTIONS)}[{_GREW}])")
    return [
        (
            4,
            4,
            number(
                "Slots a second",
                "Mutation slots that end each second, of all kinds. Good: level while training goes on; 0 means that "
                "nothing changes state.",
                Ask(rate),
                unit="suffix:slots/s",
                graph=True,
            ),
        ),
        (
            4,
            4,
            number(
                "Held now",
                "Slots that are held. Good: few, and changing. A window drains until this is 0.",
                Ask(sum_by([], picked(names.MUTATION_SLOTS, state="active"))),
                unit="none",
                decimals=0,
            ),
        ),
        (
            4,
            4,
            number(
                "Waiting now",
                "Slots that wait for a window to end. Good: 0 outside of windows.",
                Ask(sum_by([], picked(names.MUTATION_SLOTS, state="waiting"))),
                unit="none",
                decimals=0,
            ),
        ),
        (
            4,
            4,
            number(
                "Oldest holder",
                f"Age of the slot that is held for longest. Good: below {drain:g} s, the objective of a drain: a window "
                "that opened now would wait for it.",
                Ask(sum_by([], picked(names.MUTATION_OLDEST, state="active"), function="max")),
                unit="s",
                steps=((None, GOOD), (drain, WARN), (10 * drain, BAD)),
            ),
        ),
        (
            4,
            4,
            number(
                "Hold, p99",
                "Of slots of all chosen kinds in the range shown, 99 of 100 were held for less. Good: "
                "milliseconds at most. From the histogram's buckets.",
                Ask(quantile(0.99, names.MUTATION_HOLD, [], _WHOLE), instant=True),
                unit="s",
            ),
        ),
        (
            4,
            4,
            number(
                "Wait, p99",
                "Of slots of all chosen kinds in the range shown, 99 of 100 waited for less. Good: near 0: only a window "
                "makes a slot wait.",
                Ask(quantile(0.99, names.MUTATION_WAIT, [], _WHOLE), instant=True),
                unit="s",
            ),
        ),
    ]


def _kinds() -> list[tuple[int, int, object]]:
    held = sum_by(["kind"], f"increase({picked(names.MUTATION_HOLD, '_sum')}[{_WHOLE}])")
    count = sum_by(["kind"], f"increase({picked(names.MUTATION_HOLD, '_count')}[{_WHOLE}])")
    waited = sum_by(["kind"], f"increase({picked(names.MUTATION_WAIT, '_sum')}[{_WHOLE}])")
    return [
        (
            12,
            9,
            lines(
                "Slots a second, by kind",
                "How often each kind of slot is taken. Good: kinds keep their proportions. A kind that stops is a loop "
                "that stands still.",
                Ask(sum_by(["kind"], f"rate({picked(names.MUTATION_SECTIONS)}[{_GREW}])"), "{{kind}}"),
                unit="suffix:slots/s",
                named=KINDS,
            ),
        ),
        (
            12,
            9,
            table(
                "Kinds over the whole range",
                "Each kind in the range shown. Good: mean holds in microseconds. The kind with the longest hold is what "
                "a window is likeliest to wait for.",
                Ask(count, table=True),
                Ask(f"{held} / ({count} > 0)", table=True),
                Ask(quantile(0.99, names.MUTATION_HOLD, ["kind"], _WHOLE), table=True),
                Ask(f"{waited} / ({count} > 0)", table=True),
                columns=[
                    Column("kind", "kind"),
                    Column("Value #A", "slots", "none", 0),
                    Column("Value #B", "mean hold", "s"),
                    Column("Value #C", "hold p99", "s"),
                    Column("Value #D", "mean wait", "s"),
                ],
                sort="slots",
            ),
        ),
    ]


def _lengths() -> list[tuple[int, int, object]]:
    hold = picked(names.MUTATION_HOLD, "_bucket")
    wait = picked(names.MUTATION_WAIT, "_bucket")
    return [
        (
            12,
            8,
            lines(
                "Hold, p99 by kind",
                "For how long 99 of 100 slots of the kind were held at most. Good: level. The dots are slots whose "
                "trace was kept; they open it.",
                Ask(quantile(0.99, names.MUTATION_HOLD, ["kind"]), "{{kind}}", exemplar=True),
                unit="s",
                logarithmic=True,
                named=KINDS,
            ),
        ),
        (
            12,
            8,
            lines(
                "Wait, p99 by kind",
                "How long 99 of 100 slots of the kind waited at most. Good: the lowest bucket, 1 µs, but for "
                "windows. The dots are slots that "
                "a window blocked; their trace links to it.",
                Ask(quantile(0.99, names.MUTATION_WAIT, ["kind"]), "{{kind}}", exemplar=True),
                unit="s",
                named=KINDS,
            ),
        ),
        (
            12,
            8,
            heat(
                "Holds",
                "How many slots were held for how long. Good: one dark band; a second band far above is a slot that "
                "awaits something slow while it is held.",
                Ask(
                    came(hold, ["le"]),
                    "{{le}}",
                    exemplar=True,
                    heatmap=True,
                ),
            ),
        ),
        (
            12,
            8,
            heat(
                "Waits",
                "How many slots waited for how long. Good: nearly all in the lowest bucket, the rest about as long as a "
                "window.",
                Ask(
                    came(wait, ["le"]),
                    "{{le}}",
                    exemplar=True,
                    heatmap=True,
                ),
            ),
        ),
        (
            24,
            8,
            lines(
                "Hold, median by kind",
                "For how long half of the slots of the kind were held at most. Good: level, in microseconds.",
                Ask(quantile(0.5, names.MUTATION_HOLD, ["kind"]), "{{kind}}", exemplar=True),
                unit="s",
                logarithmic=True,
                named=KINDS,
            ),
        ),
    ]


def _trouble() -> list[tuple[int, int, object]]:
    return [
        (
            12,
            8,
            lines(
                "Held and waiting, by kind",
                "Slots of each kind that are held, and those of any kind that wait. Good: small. A wait that does "
                "not go down: the barrier is "
                "closed for long.",
                Ask(sum_by(["kind"], picked(names.MUTATION_SLOTS, state="active")), "{{kind}}"),
                Ask(sum_by([], picked(names.MUTATION_SLOTS, state="waiting")), "waiting, of any kind"),
                unit="none",
                stepped=True,
                named=(*KINDS, "waiting, of any kind"),
            ),
        ),
        (
            12,
            8,
            lines(
                "Age of the oldest, by kind",
                "How long the oldest slot of each kind has been held, and how long the oldest of any has waited. "
                "Good: near 0. A line that rises "
                "steadily is one slot that does not end: its kind says where to look.",
                Ask(
                    sum_by(["kind"], picked(names.MUTATION_OLDEST, state="active"), function="max"),
                    "{{kind}}",
                ),
                Ask(
                    sum_by([], picked(names.MUTATION_OLDEST, state="waiting"), function="max"),
                    "waiting, of any kind",
                ),
                unit="s",
                stepped=True,
                named=(*KINDS, "waiting, of any kind"),
            ),
        ),
        (
            12,
            8,
            lines(
                "Slots that did not complete",
                "Slots that raised or were cancelled; the table has their kinds. Good: none, but for aborts of stale "
                "work and the end of a "
                "run. Cancelled is no error: it says that somebody gave up.",
                Ask(
                    came(picked(names.MUTATION_SECTIONS, outcome=("failed", "cancelled")), ["outcome"]),
                    "{{outcome}}",
                ),
                bars=True,
                stacked=True,
                named=("cancelled", "failed"),
            ),
        ),
        (
            12,
            8,
            table(
                "Outcomes over the whole range",
                "How slots of each kind ended in the range shown. Good: completed.",
                Ask(
                    sum_by(["kind", "outcome"], f"increase({picked(names.MUTATION_SECTIONS)}[{_WHOLE}])")
                    + " > 0.5",
                    table=True,
                ),
                columns=[
                    Column("kind", "kind"),
                    Column("outcome", "outcome"),
                    Column("Value", "slots", "none", 0),
                ],
                sort="slots",
                empty="no slot in this range",
            ),
        ),
    ]
