"""Puts together what spans and lines of the log say of saves, restores and slots.

Rule: what is kept is bounded; of more saves than are kept, one in two stays, in four, …, chosen by their ids, so that all
that is told of a save is kept, or none of it. Nothing here suspends.
"""

from __future__ import annotations

import heapq
import zlib
from collections import deque
from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import Any, Final

from quiesce.report.cutoffs import CUT_OFF_OUTCOME, CutOff, CutOffs
from quiesce.report.data import Note, Restore, RunData, Save, SlowSlot
from quiesce.telemetry import names
from quiesce.telemetry.finished import ERROR, OUTCOME, FinishedSpan
from quiesce.telemetry.recording import RecordedEvent
from quiesce.types import PHASES

__all__ = ["MOST_ROWS", "MOST_SAVES", "Attempts"]

MOST_SAVES: Final = 20_000
"""Saves that are kept one by one; of more, one in two, in four, …."""

MOST_ROWS: Final = 12
"""Rows of tables of what stands out: slots that waited longest, the last warnings, restores."""

_BETWEEN_SECONDS: Final = 1.0
"""How long a save may be between two of its phases, all together."""

_STEP_NUMBERS: Final[Mapping[str, str]] = {
    names.TRAIN_REWARD.name: "reward",
    names.TRAIN_LOSS.name: "loss",
    names.TRAIN_KL.name: "kl",
}
"""What a step may say of itself, by the gauge that says the same."""

_SAVE_EVENTS: Final = ("checkpoint.published", "checkpoint.not_published", "checkpoint.skipped")
_LOUD: Final = ("warning", "error", "critical")
_PHASE_PREFIX: Final = "quiesce.checkpoint."
_CUT: Final = "quiesce.cut_id"


class Attempts:
    """Puts together what spans and log events say of saves, restores and slots."""

    def __init__(self, data: RunData, cut_offs: CutOffs) -> None:
        self._data = data
        self._cut_offs = cut_offs
        self._saves: dict[str, Save] = {}
        self._seen = 0
        self._slow: list[tuple[float, int, SlowSlot, tuple[tuple[int, int], ...]]] = []
        self._windows: dict[tuple[int, int], str] = {}
        self._span_restores: deque[Restore] = deque(maxlen=MOST_ROWS)
        self._told: dict[str, float] = {}
        self._parts: dict[tuple[int, int], dict[str, float]] = {}

    def span(self, span: FinishedSpan) -> None:
        """Take one span."""
        data = self._data
        name = span.name
        data.ended = max(data.ended, span.end_ns / 1e9)
        self._cut_offs.span(span)
        if name == "quiesce.slot":
            self._slot(span)
        elif name in {"quiesce.checkpoint", "quiesce.window"}:
            self._attempt(span)
        elif name.startswith(_PHASE_PREFIX) and name[len(_PHASE_PREFIX) :] in PHASES:
            if _CUT in span.attributes and not span.cut_off:
                save = self._save(str(span.attributes[_CUT]), span.start_ns / 1e9)
                save.phases[name[len(_PHASE_PREFIX) :]] = (span.end_ns - span.start_ns) / 1e9
        elif name == "quiesce.train.step":
            self._step(
                span.end_ns / 1e9, {key.rpartition(".")[2]: value for key, value in span.attributes.items()}
            )
        elif name == "quiesce.restore.part":
            parts = self._parts.setdefault((span.trace_id, span.parent_id), {})
            parts[str(span.attributes.get("quiesce.part", ""))] = (span.end_ns - span.start_ns) / 1e9
        elif name == "quiesce.restore":
            parts = self._parts.pop((span.trace_id, span.span_id), {})
            outcome = str(span.attributes.get(OUTCOME, CUT_OFF_OUTCOME if span.cut_off else ""))
            reason = str(span.attributes.get("quiesce.reason", span.attributes.get(ERROR, "")))
            self._span_restores.append(Restore(span.start_ns / 1e9, 0, outcome, reason, parts, {}))

    def _step(self, unix_time: float, said: Mapping[str, object]) -> None:
        """Take what a step says of itself: it is exact where a sample is a little late."""
        data = self._data
        for name, key in _STEP_NUMBERS.items():
            value = said.get(key)
            if isinstance(value, int | float) and not isinstance(value, bool):
                children = data.gauges.setdefault(name, {})
                if "" not in children:
                    children[""] = data.timeline.values()
                index = data.timeline.index(unix_time)
                children[""].set(index, float(value))
                if unix_time >= self._told.get(name, data.sampled):
                    self._told[name] = unix_time
                    data.latest.setdefault(name, {})[""] = float(value)

    def _attempt(self, span: FinishedSpan) -> None:
        cut_id = str(span.attributes.get(_CUT, ""))
        if span.name == "quiesce.window":
            self._windows[span.trace_id, span.span_id] = cut_id
            while len(self._windows) > 4 * MOST_SAVES:
                del self._windows[next(iter(self._windows))]
        if not cut_id:
            return
        save = self._save(cut_id, span.start_ns / 1e9)
        save.unix_time = min(save.unix_time, span.start_ns / 1e9)
        save.cut_off = save.cut_off or span.cut_off
        save.outcome = save.outcome or str(span.attributes.get(OUTCOME, ""))
        if span.name == "quiesce.checkpoint":
            save.whole = True
            save.outcome = str(span.attributes.get(OUTCOME, save.outcome))
            save.reason = str(span.attributes.get("quiesce.reason", save.reason))
            save.step = _whole(span.attributes.get("quiesce.step"), save.step)
            save.rows = _whole(span.attributes.get("quiesce.rows"), save.rows) or 0
            save.num_bytes = _whole(span.attributes.get("quiesce.bytes"), save.num_bytes) or 0
            save.groups = _whole(span.attributes.get("quiesce.groups"), save.groups) or 0

    def _slot(self, span: FinishedSpan) -> None:
        wait = span.attributes.get("quiesce.wait_seconds")
        if span.cut_off and span.attributes.get("quiesce.held") is False:
            wait = (span.end_ns - span.start_ns) / 1e9
        if not isinstance(wait, int | float):
            return
        if len(self._slow) == MOST_ROWS and wait <= self._slow[0][0]:
            return
        slot = SlowSlot(
            span.start_ns / 1e9,
            str(span.attributes.get("quiesce.kind", "")),
            float(wait),
            str(span.attributes.get(OUTCOME, CUT_OFF_OUTCOME if span.cut_off else "")),
            "",
        )
        self._seen += 1
        heapq.heappush(self._slow, (float(wait), self._seen, slot, span.links))
        if len(self._slow) > MOST_ROWS:
            heapq.heappop(self._slow)

    def event(self, event: RecordedEvent) -> None:
        """Take one log event."""
        data = self._data
        data.ended = max(data.ended, event.unix_time)
        fields = event.fields
        name = str(fields.get("event", ""))
        if name in _SAVE_EVENTS:
            self._saved(event, name)
        elif name in {"restore.completed", "restore.refused"}:
            data.restores.append(
                Restore(
                    event.unix_time,
                    event.writer.incarnation,
                    str(fields.get("outcome", "completed")),
                    str(fields.get("reason", "")),
                    _numbers(fields.get("parts")),
                    {owner: int(count) for owner, count in _numbers(fields.get("groups")).items()},
                )
            )
            data.restores = data.restores[-MOST_ROWS:]
        elif name == "train.step":
            self._step(event.unix_time, _numbers(fields.get("metrics")))
        level = str(fields.get("level", ""))
        if level in _LOUD:
            data.loud[level] += 1
            data.notes = [*data.notes[1 - MOST_ROWS :], Note(event.unix_time, level, name, _said(fields))]

    def _saved(self, event: RecordedEvent, name: str) -> None:
        fields = event.fields
        cut_id = str(fields.get("cut_id", "")) or f"{event.writer.ident} {event.unix_time}"
        phases = _numbers(fields.get("phases"))
        self._cut_offs.over(cut_id, event.writer.ident, event.unix_time)
        save = self._save(cut_id, event.unix_time - sum(phases.values()))
        for phase, seconds in phases.items():
            save.phases.setdefault(phase, seconds)
        default = {_SAVE_EVENTS[0]: "completed", _SAVE_EVENTS[2]: "skipped"}.get(name, "failed")
        save.outcome = str(fields.get("outcome", default))
        save.reason = str(fields.get("reason", save.reason))
        save.step = _whole(fields.get("step"), save.step)
        save.rows = _whole(fields.get("rows"), save.rows) or 0
        save.num_bytes = _whole(fields.get("bytes"), save.num_bytes) or 0
        save.groups = int(sum(_numbers(fields.get("groups")).values())) or save.groups
        save.cut_off = False
        save.whole = True

    def _save(self, cut_id: str, unix_time: float) -> Save:
        save = self._saves.get(cut_id)
        if save is None:
            save = Save(cut_id, unix_time)
            if self._is_kept(cut_id):
                self._saves[cut_id] = save
            while len(self._saves) > MOST_SAVES:
                self._data.thinned *= 2
                self._saves = {name: kept for name, kept in self._saves.items() if self._is_kept(name)}
        return save

    def _is_kept(self, cut_id: str) -> bool:
        """Choose by the id, so that all that is told of a save is kept, or none of it."""
        return zlib.crc32(cut_id.encode(errors="replace")) % self._data.thinned == 0

    def _ended(self) -> Iterator[CutOff]:
        """Yield the saves that were cut off, and have each say so."""
        for cut in sorted(self._cut_offs.found(), key=attrgetter("ended")):
            save = self._saves.get(cut.cut_id) if cut.cut_id else self._interrupted(cut)
            if save is not None:
                save.cut_off = True
                save.outcome = cut.outcome
                cut.cut_id = save.cut_id
                cut.step = save.step if cut.step is None else cut.step
                cut.unix_time = min(cut.unix_time, save.unix_time)
            yield cut

    def _interrupted(self, cut: CutOff) -> Save | None:
        """Find the save that was killed in a phase: its earlier phases had ended just before."""
        earlier = set(PHASES[: PHASES.index(cut.phase)])
        for save in self._saves.values():
            between = cut.unix_time - save.unix_time - sum(save.phases.values())
            if not save.whole and save.phases.keys() <= earlier and abs(between) < _BETWEEN_SECONDS:
                return save
        return None

    def finish(self) -> None:
        """Hand over what was put together."""
        data = self._data
        for cut in self._ended():
            data.unended[cut.outcome] += 1
            data.cut_offs = [*data.cut_offs[1 - MOST_ROWS :], cut]
            self._lose(names.WINDOW_BLAME.name, cut.ended, cut.blame)
            self._lose(names.WINDOW_BLOCKED.name, cut.ended, cut.blocked)
            self._lose(names.WINDOW_CLOSED.name, cut.ended, {"": cut.closed})
        data.saves = sorted(self._saves.values(), key=lambda save: save.unix_time)
        # The log has more of a restore than its span, but for one that was cut off.
        spans = [
            restore
            for restore in self._span_restores
            if restore.outcome == CUT_OFF_OUTCOME or not data.restores
        ]
        data.restores = sorted([*data.restores, *spans], key=attrgetter("unix_time"))[-MOST_ROWS:]
        for _, _, slot, links in sorted(self._slow, reverse=True):
            cut_id = next((self._windows[link] for link in links if link in self._windows), "")
            data.slow.append(SlowSlot(slot.unix_time, slot.kind, slot.wait_seconds, slot.outcome, cut_id))

    def _lose(self, name: str, unix_time: float, lost: Mapping[str, float]) -> None:
        """Add what a counter would have counted at the end."""
        timeline = self._data.timeline
        for child, seconds in lost.items():
            if seconds > 0:
                bins = self._data.cut_seconds.setdefault(name, {})
                if child not in bins:
                    bins[child] = timeline.increases()
                bins[child].add(timeline.index(unix_time), seconds)


def _numbers(value: Any) -> dict[str, float]:  # noqa: ANN401 - whatever a log line holds
    if not isinstance(value, Mapping):
        return {}
    return {str(key): float(number) for key, number in value.items() if isinstance(number, int | float)}


def _whole(value: Any, default: int | None) -> int | None:  # noqa: ANN401 - whatever a log line holds
    return value if isinstance(value, int) and not isinstance(value, bool) else default


_TIMELESS: Final = frozenset({"timestamp", "level", "event", "run", "role"})
_LONGEST: Final = 300


def _said(fields: Mapping[str, Any]) -> str:
    """Return what a line says beside its event, in one line."""
    message = fields.get("message")
    if isinstance(message, str):
        text = message
    else:
        text = ", ".join(f"{key} {value}" for key, value in fields.items() if key not in _TIMELESS)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
