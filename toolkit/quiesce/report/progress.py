"""Charts about how far a run has come: groups, steps, what training reports, tokens.

Rule: a number that was not sampled anew is the last one that was; where nothing was recorded there is a gap. Nothing
here suspends.
"""

from __future__ import annotations

from typing import Final

from quiesce.report.charts import (
    Chart,
    Figure,
    coarse,
    coarse_times,
    known,
    line,
    time_layout,
    times_of,
)
from quiesce.report.data import REUSED, RunData
from quiesce.report.words import count_of, duration, short
from quiesce.telemetry import names
from quiesce.types import OWNERS

__all__ = ["gauge", "groups", "reused", "steps", "steps_ahead", "tokens"]

_OWNER_COLOURS: Final = {"ledger": 0, "spares": 4, "buffer": 2, "training": 3}
_FEW_STEPS: Final = 12


def groups(data: RunData) -> Chart:
    """Draw who owned how many groups."""
    title = "Prompt groups by owner"
    children = data.gauges.get(names.GROUPS.name, {})
    order = [owner for owner in OWNERS if owner in children]
    traces = []
    times = times_of(data)
    for owner in order:
        values = [value or 0.0 for value in known(data, children[owner])]
        if not any(values):
            continue
        colour = _OWNER_COLOURS[owner]
        traces.append(
            {
                "type": "scatter",
                "mode": "lines",
                "name": owner,
                "x": times,
                "y": [short(value) for value in values],
                "stackgroup": "owners",
                "line": {"width": 0.5, "color": f"c{colour}"},
                "fillcolor": f"c{colour}a",
                "hovertemplate": f"{owner} %{{y}}<br>%{{x}}<extra></extra>",
            }
        )
    if not traces:
        return Chart(title, empty="No owner of groups was attached, or none ever had one.", wide=True)
    return Chart(title, {"data": traces, "layout": time_layout(data)}, wide=True)


def steps(data: RunData) -> Chart:
    """Draw how far the sampler, the stamps and the trainer were."""
    title = "Dispatch cursor, largest stamped step, trainer version"
    stamps = data.gauges.get(names.TARGET_STEP_MAX.name, {})
    lines = {
        "dispatch cursor": data.gauges.get(names.DISPATCH_CURSOR.name, {}).get(""),
        **{f"stamped, {owner}": values for owner, values in stamps.items()},
        "trainer version": data.gauges.get(names.TRAINER_VERSION.name, {}).get(""),
    }
    traces = []
    for index, (what, bins) in enumerate(lines.items()):
        values = [
            None if value is None or value < 0 else value for value in (known(data, bins) if bins else [])
        ]
        if any(value is not None for value in values):
            traces.append(line(data, what, values, index))
    if not traces:
        return Chart(title, empty="Neither a sampler nor a trainer was attached.")
    return Chart(title, {"data": traces, "layout": time_layout(data, traces=len(traces))})


def steps_ahead(data: RunData) -> Chart:
    """Draw how far the sampler and the stamps were ahead of the trainer."""
    title = "Steps ahead of the trainer version"
    version = data.gauges.get(names.TRAINER_VERSION.name, {}).get("")
    lines = {
        "dispatch cursor": data.gauges.get(names.DISPATCH_CURSOR.name, {}).get(""),
        **{
            f"stamped, {owner}": values
            for owner, values in data.gauges.get(names.TARGET_STEP_MAX.name, {}).items()
        },
    }
    traces: list[Figure] = []
    if version is not None:
        trained = known(data, version)
        for index, (what, bins) in enumerate(lines.items()):
            values = [
                None if step is None or now is None or step < 0 else step - now
                for step, now in zip(known(data, bins) if bins else [], trained, strict=False)
            ]
            if any(value is not None for value in values):
                traces.append(line(data, what, values, index))
    if not traces:
        return Chart(
            title, empty="It takes both a sampler and a trainer to tell, and one of them was not attached."
        )
    layout = time_layout(data, traces=len(traces))
    layout["yaxis"] |= {"rangemode": "tozero"}
    shown = [value for trace in traces for value in trace["y"] if value is not None]
    if max(0, *shown) - min(0, *shown) <= _FEW_STEPS:
        layout["yaxis"] |= {"dtick": 1}
    return Chart(title, {"data": traces, "layout": layout})


def gauge(data: RunData, name: str, title: str, nothing: str, *, wide: bool = False) -> Chart:
    """Draw one gauge."""
    bins = data.gauges.get(name, {}).get("")
    shown = [] if bins is None else known(data, bins)
    if not any(value is not None for value in shown):
        return Chart(title, empty=nothing, wide=wide)
    layout = time_layout(data)
    layout["showlegend"] = False
    return Chart(title, {"data": [line(data, title, shown, 0)], "layout": layout}, wide=wide)


def tokens(data: RunData) -> Chart:
    """Draw how fast tokens were generated."""
    title = "Tokens generated per second"
    grown = data.counters.get(names.TOKENS_GENERATED.name, {}).get("")
    if grown is None or not grown.total:
        return Chart(title, empty="No rollout reported tokens.")
    times, few = coarse_times(data)
    width = data.timeline.width * few
    last = max(data.timeline.width, data.ended - data.timeline.start - width * (len(times) - 1))
    widths = [*[width] * (len(times) - 1), min(width, last)]
    trace = {
        "type": "bar",
        "name": "generated",
        "x": times,
        "y": [
            short(amount / seconds) for amount, seconds in zip(coarse(data, grown, few), widths, strict=True)
        ],
        "hovertemplate": "%{y:.3s} tokens/s<br>%{x}<extra></extra>",
        "marker": {"color": "c2", "line": {"width": 0}},
    }
    layout = time_layout(data) | {"bargap": 0, "showlegend": False}
    layout["yaxis"] |= {"rangemode": "tozero", "tickformat": "~s"}
    note = f"{count_of(grown.total)} tokens altogether; each bar stands for {duration(width)}."
    return Chart(title, {"data": [trace], "layout": layout}, note=note)


def reused(data: RunData) -> Chart:
    """Draw how many tokens did not have to be generated again, added up."""
    title = "Tokens that resumed calls went on from"
    grown = data.counters.get(REUSED, {}).get("")
    if grown is None or not grown.total:
        return Chart(
            title,
            empty="No generation call went on from staged tokens: nothing was restored, or nothing was staged.",
        )
    total = 0.0
    values: list[float | None] = []
    for amount in data.timeline.padded(grown):
        total += amount
        values.append(total)
    layout = time_layout(data)
    layout["showlegend"] = False
    layout["yaxis"] |= {"rangemode": "tozero", "tickformat": "~s"}
    return Chart(title, {"data": [line(data, title, values, 0)], "layout": layout})
