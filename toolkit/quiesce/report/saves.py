"""Charts and tables about saves: their phases over time, as histograms, in numbers.

Rule: of a save that the end of its process cut off, the phases that had ended count; the one that had not is told
apart, as the lower bound that it is. Nothing here suspends.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from quiesce.report.charts import (
    SYMBOLS,
    Chart,
    Figure,
    Table,
    decades,
    log_axis,
    plain_layout,
    ranked,
    roomy,
    time_layout,
)
from quiesce.report.cutoffs import CUT_OFF_OUTCOME, UNFINISHED, CutOff, Holder
from quiesce.report.data import RunData, Save
from quiesce.report.words import clock, count_of, duration, label, markup, short, size_of, time_of
from quiesce.types import PHASES

__all__ = ["cut_table", "holders_of", "phase_histograms", "phase_table", "phases_over_time", "saves_lead"]

_PHASE_COLOURS: Final = {phase: index for index, phase in enumerate(PHASES)}
_WHOLE: Final = "all phases together"
_PER_DECADE: Final = 5
_MARKED: Final = ("failed", "refused", CUT_OFF_OUTCOME, UNFINISHED)
_MOST_POINTS: Final = 1200
"""Saves that are drawn one by one; of more, the longest of every few."""


def saves_lead(data: RunData) -> str:
    """Say how saves ended."""
    parts = [f"{count} {outcome}" for outcome, count in data.outcomes.items()]
    if not parts:
        return "The run saved nothing while it recorded."
    if not data.outcomes.keys() - data.unended.keys():
        parts.insert(0, "none came to its end")
    last = next((save for save in reversed(data.saves) if save.outcome == "completed"), None)
    size = ""
    if last is not None and last.rows:
        size = f" The last one holds {last.groups} groups and {last.rows} rows in {size_of(last.num_bytes)}."
    text = ", ".join(parts)
    return f"{text[0].upper()}{text[1:]}.{size}{_last_cut(data)}"


def _last_cut(data: RunData) -> str:
    """Say what became of the last save that was cut off."""
    if not data.cut_offs:
        return ""
    cut = data.cut_offs[-1]
    which = f"The last that was {cut.outcome}" if sum(data.unended.values()) > 1 else f"The one {cut.outcome}"
    where = f"in {cut.phase} for {duration(cut.seconds)}" if cut.phase else "between two phases"
    waited = f", waiting for {holders_of(cut)}" if cut.holders else ""
    return f" {which} had been {where}{waited}."


def holders_of(cut: CutOff) -> str:
    """Name the slots that a save still waited for, those of one kind together."""
    kinds: dict[str, list[Holder]] = {}
    for holder in cut.holders:
        kinds.setdefault(holder.kind, []).append(holder)
    parts = []
    for kind, those in kinds.items():
        oldest = f"{'at least ' if those[0].at_least else ''}{duration(those[0].held_seconds)}"
        task = f" of task {those[0].task}" if those[0].task else ""
        if len(those) == 1:
            parts.append(f"{label(kind)}{task} (held for {oldest})")
        else:
            parts.append(f"{len(those)}\u00a0×\u00a0{label(kind)} (the oldest{task} held for {oldest})")
    return ", ".join(parts)


def cut_table(data: RunData) -> Table:
    """List the saves that were cut off: where each was, for how long, and what it waited for."""
    rows = []
    for cut in data.cut_offs:
        waiting = f"{cut.waiting} ({', '.join(map(label, cut.blocked))})" if cut.waiting else "–"
        rows.append(
            (
                clock(cut.unix_time, data),
                clock(cut.ended, data),
                ("killed" if cut.over else "killed, or still runs") if cut.killed else "ended",
                cut.cut_id or "–",
                "–" if cut.step is None else str(cut.step),
                cut.phase or "between two",
                duration(cut.seconds),
                holders_of(cut) or "–",
                waiting,
            )
        )
    if not rows:
        return Table(
            "Saves that were cut off",
            (),
            (),
            "The end of no process cut off a save, as far as the recording tells.",
        )
    note = (
        "The process ended while the save went on, so how long it would have taken is not known. "
        "What had been published before it stayed the newest."
    )
    if any(cut.killed for cut in data.cut_offs):
        note += " Of one that was killed, its last sample tells: it ended no earlier than that."
    more = sum(data.unended.values()) - len(rows)
    return Table(
        "Saves that were cut off",
        (
            "began at",
            "ended at",
            "its process",
            "cut",
            "#step",
            "phase",
            "#in it for",
            "still waited for slots",
            "slots that waited",
        ),
        rows,
        note=f"{more} earlier ones are not listed. {note}" if more > 0 else note,
        states=["bad"] * len(rows),
    )


def phases_over_time(data: RunData) -> Chart:
    """Draw every phase of every save, or of many saves the longest."""
    title = "Phases of each save, over time (logarithmic)"
    saves = [save for save in data.saves if save.phases]
    if not saves and not data.cut_offs:
        return Chart(title, empty="No save was recorded, so there are no phases to show.", wide=True)
    traces: list[Figure] = []
    for phase in PHASES:
        points = [(save, save.phases[phase]) for save in saves if save.phases.get(phase, 0.0) > 0]
        if not points:
            continue
        shown = _longest_of_few(points)
        colour = _PHASE_COLOURS[phase]
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": phase,
                "x": [time_of(save.unix_time) for save, _ in shown],
                "y": [short(seconds) for _, seconds in shown],
                "customdata": [_told(save) for save, _ in shown],
                "hovertemplate": f"{phase} %{{y:.3s}}s<br>%{{x}}<br>%{{customdata}}<extra></extra>",
                "marker": {"color": f"c{colour}", "size": 5, "opacity": 0.75, "symbol": SYMBOLS[colour]},
                "cliponaxis": False,
            }
        )
    cut = [cut for cut in data.cut_offs if cut.seconds > 0]
    if cut:
        traces.append(_so_far(cut))
    failed = [save for save in data.saves if save.cut_off or save.outcome in {"failed", "refused"}]
    layout = time_layout(data, height=400)
    layout["yaxis"] |= log_axis([seconds for trace in traces for seconds in trace["y"]])
    layout["showlegend"] = True
    layout["shapes"] = [
        {
            "type": "line",
            "xref": "x",
            "yref": "paper",
            "x0": time_of(save.unix_time),
            "x1": time_of(save.unix_time),
            "y0": 0,
            "y1": 1,
            "line": {"color": "bad", "width": 1, "dash": "dot"},
        }
        for save in failed[-60:]
    ]
    note = "Of many saves that stand close together, the longest is drawn." if _thin(len(saves)) else ""
    if failed:
        marked = ", ".join(word for word in _MARKED if any(save.outcome == word for save in failed))
        note = f"{note} A dotted line marks a save that did not complete ({marked}).".strip()
    return Chart(title, {"data": traces, "layout": layout}, note=note, wide=True)


def _so_far(cut: Sequence[CutOff]) -> Figure:
    """Draw how long phases had gone on that were cut off: at least so long."""
    return {
        "type": "scatter",
        "mode": "markers",
        "name": "cut off, at least",
        "x": [time_of(one.unix_time) for one in cut],
        "y": [short(one.seconds) for one in cut],
        "customdata": [markup(f"{one.phase or 'between two phases'}, {one.outcome}") for one in cut],
        "hovertemplate": "at least %{y:.3s}s<br>%{x}<br>%{customdata}<extra></extra>",
        "marker": {"color": "bad", "size": 11, "symbol": "star"},
        "cliponaxis": False,
    }


def _thin(count: int) -> bool:
    return count > _MOST_POINTS


def _longest_of_few(points: Sequence[tuple[Save, float]]) -> list[tuple[Save, float]]:
    few = -(-len(points) // _MOST_POINTS)
    return [
        max(points[start : start + few], key=lambda point: point[1]) for start in range(0, len(points), few)
    ]


def _told(save: Save) -> str:
    step = "" if save.step is None else f"step {save.step}, "
    reason = f" ({save.reason})" if save.reason else ""
    return markup(f"{step}{save.outcome or 'window'}{reason}")


def phase_table(data: RunData) -> Table:
    """List percentiles of every phase."""
    rows = []
    for phase in PHASES:
        times = sorted(save.phases[phase] for save in data.saves if phase in save.phases)
        if times:
            shares = (ranked(times, share) for share in (0.5, 0.95, 0.99))
            rows.append(
                (
                    phase,
                    count_of(len(times)),
                    *map(duration, shares),
                    duration(times[-1]),
                    duration(sum(times)),
                )
            )
    columns = ("phase", "#times", "#median", "#95 %", "#99 %", "#longest", "#altogether")
    return Table("Phases", columns, rows, empty=_no_phase(data))


def _no_phase(data: RunData) -> str:
    if data.cut_offs:
        return "No phase of a save came to its end while the run recorded."
    return "No phase of a save was recorded."


def phase_histograms(data: RunData) -> list[Chart]:
    """Draw how often each phase took how long."""
    charts = []
    saves = data.saves
    for phase in (*PHASES, _WHOLE):
        if phase == _WHOLE:
            times = [sum(save.phases.values()) for save in saves if save.phases.get("publish")]
        else:
            times = [save.phases[phase] for save in saves if save.phases.get(phase, 0.0) > 0]
            if not times and any(phase in save.phases for save in saves):
                charts.append(Chart(phase, empty="None that ended took any time."))
        if not times:
            continue
        low, high = (math.log10(bound(times)) for bound in (min, max))
        first = math.floor(low * _PER_DECADE)
        last = max(math.floor(high * _PER_DECADE), first)
        counts = [0] * (last - first + 1)
        for seconds in times:
            place = math.floor(math.log10(seconds) * _PER_DECADE) - first
            counts[min(max(place, 0), len(counts) - 1)] += 1
        edges = [10 ** ((first + index) / _PER_DECADE) for index in range(len(counts) + 1)]
        trace = {
            "type": "bar",
            "x": [short(10 ** ((first + index + 0.5) / _PER_DECADE)) for index in range(len(counts))],
            "y": counts,
            "width": [short(edges[index + 1] - edges[index]) for index in range(len(counts))],
            "customdata": [
                f"{duration(edges[index])} to {duration(edges[index + 1])}" for index in range(len(counts))
            ],
            "hovertemplate": "%{customdata}<br>%{y} times<extra></extra>",
            "marker": {"color": f"c{_PHASE_COLOURS.get(phase, 7)}", "line": {"width": 0}},
        }
        layout = plain_layout(height=190)
        wanted = (first / _PER_DECADE, (last + 1) / _PER_DECADE)
        layout["xaxis"] = {"type": "log", "range": list(roomy(wanted)), **decades(*roomy(wanted))}
        layout["yaxis"] = {"rangemode": "tozero", "nticks": 4, "tickformat": ",d"}
        layout["showlegend"] = False
        charts.append(Chart(f"{phase}", {"data": [trace], "layout": layout}))
    if charts:
        return charts
    return [Chart("Phases as histograms", empty=_no_phase(data), wide=True)]
