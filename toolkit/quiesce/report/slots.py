"""Charts and tables about what windows and slots cost each other, and the trainer.

Rule: percentiles are estimated from histograms, as Prometheus does it; of waits, only those count that were any.
Nothing here suspends.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from quiesce.report.charts import (
    DASHES,
    SYMBOLS,
    Chart,
    Figure,
    Table,
    coarse,
    coarse_times,
    kind_colour,
    kind_order,
    line_mode,
    log_axis,
    time_layout,
)
from quiesce.report.data import RunData
from quiesce.report.timeline import percentile
from quiesce.report.words import clock, count_of, duration, label, markup, short
from quiesce.telemetry import names

__all__ = ["percentiles", "slot_table", "slow_table", "stacked"]

_TOWERING: Final = 4.0
"""From how many times the height of all others on a bar would make these invisible."""

_ROOM: Final = 1.3
"""How high a chart is then, to its highest other bar."""


def stacked(data: RunData, metric: names.Metric, title: str, nothing: str) -> Chart:
    """Draw the growth of a counter of seconds by its label."""
    children = data.counters.get(metric.name)
    cut = data.cut_seconds.get(metric.name, {})
    if not children and not cut:
        return Chart(title, empty=f"The recording has no {metric.name}.")
    traces = []
    times, few = coarse_times(data)
    ended = [(child, grown, "") for child, grown in (children or {}).items()]
    unended = [(child, grown, ", cut off") for child, grown in cut.items()]
    both = sorted([*ended, *unended], key=lambda item: (kind_order((item[0], None)), item[2]))
    for index, (child, grown, more) in enumerate(both):
        if not grown.total:
            continue
        what = f"{markup(label(child))}{more}"
        marker: Figure = {"color": f"c{kind_colour(child, index)}", "line": {"width": 0}}
        if more:
            marker["pattern"] = {"shape": "/", "fillmode": "replace", "size": 6}
        traces.append(
            {
                "type": "bar",
                "name": f"{what} ({'at least ' if more else ''}{duration(grown.total)})",
                "x": times,
                "y": [short(amount) for amount in coarse(data, grown, few)],
                "hovertemplate": f"{what} %{{y:.3s}}s<br>%{{x}}<extra></extra>",
                "marker": marker,
            }
        )
    if not traces:
        return Chart(title, empty=nothing)
    rows = 2 if unended else 1  # with names that are so long, each takes a row of the legend
    layout = time_layout(data, traces=rows * len(traces))
    layout |= {"barmode": "stack", "bargap": 0}
    layout["showlegend"] = True
    layout["yaxis"] |= {"ticksuffix": "s", "tickformat": "~s", "rangemode": "tozero"}
    note = f"Each bar stands for {duration(data.timeline.width * few)}."
    hatched = [trace for trace in traces if "pattern" in trace["marker"]]
    if hatched:
        note += " Hatched: up to the end of a process that cut a save off"
        plain = _highest([trace for trace in traces if trace not in hatched])
        if _highest(hatched) > _TOWERING * plain > 0:  # nothing else could be seen
            layout["yaxis"] = layout["yaxis"] | {"range": [0, _ROOM * plain]}
            layout["yaxis"].pop("rangemode")
            note += f", past the upper edge (to {duration(_highest(hatched))})"
        note += "."
    return Chart(title, {"data": traces, "layout": layout}, note=note)


def _highest(traces: Iterable[Figure]) -> float:
    """Return how high bars are, stacked on each other."""
    columns = zip(*(trace["y"] for trace in traces), strict=True)
    return max((float(sum(column)) for column in columns), default=0.0)


def percentiles(data: RunData, name: str, title: str, nothing: str, *, waited: bool = False) -> Chart:
    """Draw the 99th percentile of a slot histogram by kind."""
    shown = f"{title} (logarithmic)"
    kinds = data.slots.get(name)
    if not kinds:
        return Chart(shown, empty=f"The recording has no {name}.")
    times, few = coarse_times(data)
    traces: list[Figure] = []
    for index, kind in enumerate(sorted(kinds, key=lambda kind: kind_order((kind, None)))):
        buckets = kinds[kind].buckets
        bounds = sorted(buckets)
        over_time = [coarse(data, buckets[bound], few) for bound in bounds]
        values = [
            percentile(bounds, _apart(column, waited=waited), 0.99) for column in zip(*over_time, strict=True)
        ]
        if not any(values):
            continue
        colour = kind_colour(kind, index)
        traces.append(
            {
                "type": "scatter",
                # Waits are rare: between two of them there is nothing to draw a line through.
                "mode": "markers" if waited else line_mode(values),
                "name": markup(label(kind)),
                "x": times,
                "y": [None if value is None else short(value) for value in values],
                "hovertemplate": f"{markup(label(kind))} %{{y:.3s}}s<br>%{{x}}<extra></extra>",
                "line": {"color": f"c{colour}", "width": 1.5, "dash": DASHES[colour]},
                "marker": {
                    "color": f"c{colour}",
                    "size": 6 if waited else 4,
                    "symbol": SYMBOLS[colour % len(SYMBOLS)],
                },
            }
        )
    if not traces:
        return Chart(shown, empty=nothing)
    layout = time_layout(data, traces=len(traces))
    layout["showlegend"] = True
    layout["yaxis"] |= log_axis([value for trace in traces for value in trace["y"]])
    return Chart(shown, {"data": traces, "layout": layout})


def _apart(cumulative: Iterable[float], *, waited: bool = False) -> list[float]:
    """Return what lies in each bucket; the first one has the slots that did not wait."""
    found = []
    below = 0.0
    for count in cumulative:
        found.append(max(0.0, count - below))
        below = count
    if waited and found:
        found[0] = 0.0
    return found


def slot_table(data: RunData) -> Table:
    """List slots by kind."""
    waits, holds = (data.slots.get(name, {}) for name in (names.MUTATION_WAIT.name, names.MUTATION_HOLD.name))
    lost = data.counters.get(names.WINDOW_BLOCKED.name, {})
    rows = []
    for kind in sorted(waits, key=lambda kind: kind_order((kind, None))):
        bounds = sorted(waits[kind].buckets)
        counts = _apart(waits[kind].buckets[bound].total for bound in bounds)
        if not sum(counts):
            continue
        late = [0.0, *counts[1:]]
        row = [
            label(kind),
            count_of(sum(counts)),
            count_of(sum(late)),
            duration(percentile(bounds, late, 0.5)),
            duration(percentile(bounds, late, 0.99)),
        ]
        if kind in holds:
            bounds = sorted(holds[kind].buckets)
            counts = _apart(holds[kind].buckets[bound].total for bound in bounds)
            row += [duration(percentile(bounds, counts, share)) for share in (0.5, 0.99)]
        else:
            row += ["–", "–"]
        row.append(duration(lost[kind].total if kind in lost else 0.0))
        rows.append(row)
    return Table(
        "Slots by kind, over the whole run",
        (
            "kind",
            "#slots",
            "#waited",
            "#their wait, median",
            "#99 %",
            "#hold, median",
            "#99 %",
            "#time lost",
        ),
        rows,
        empty="No slot ended while the run recorded.",
    )


def slow_table(data: RunData) -> Table:
    """List the slots that waited longest."""
    rows = [
        (
            clock(slot.unix_time, data),
            label(slot.kind),
            duration(slot.wait_seconds),
            slot.outcome,
            slot.cut_id,
        )
        for slot in data.slow
    ]
    return Table(
        "Slots that waited longest",
        ("asked at", "kind", "#wait", "outcome", "for the window of cut"),
        rows,
        empty="No recorded slot had to wait.",
    )
