"""Reads a recording once and keeps what the page shows: a fixed amount, however long the run was.

Rule: what is kept is bounded (bins over time, a number of saves, of restores, of lines), and what the
recording does not have is simply absent. Only the numbers of one role are shown, the controller's if it
recorded. Nothing here suspends; it blocks for as long as reading takes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import islice
from typing import Final

from quiesce.auditor import read_violations
from quiesce.report.attempts import Attempts
from quiesce.report.cutoffs import CutOffs, Phases
from quiesce.report.data import REUSED, BucketCounts, RunData
from quiesce.report.timeline import Increases, Timeline, Values
from quiesce.telemetry import names
from quiesce.telemetry.recording import FOLDER, Recording, Sample, series

__all__ = ["collect"]

_FIRST_SPANS: Final = 2_000
"""Spans that are looked at for when the run began."""

_OLDER_SECONDS: Final = 3_600.0
"""How much older than its oldest file a recording may say that it is."""

_COUNTERS: Final[Mapping[str, str]] = {
    names.WINDOW_BLAME.name: "kind",
    names.WINDOW_BLOCKED.name: "kind",
    names.TRAINER_STALL.name: "cause",
    names.TRAIN_IDLE.name: "cause",
    names.TOKENS_GENERATED.name: "",
    names.GROUPS_TRAINED.name: "",
    names.WINDOW_CLOSED.name: "",
    names.CHECKPOINT_ATTEMPTS.name: "outcome",
    names.MUTATION_SECTIONS.name: "kind",
    names.INVARIANT_CHECKS.name: "invariant",
    names.INVARIANT_VIOLATIONS.name: "invariant",
    REUSED: "",
}
"""Counters that are shown, with the label that they are told apart by."""

_GAUGES: Final[Mapping[str, str]] = {
    names.GROUPS.name: "owner",
    names.DISPATCH_CURSOR.name: "",
    names.TRAINER_VERSION.name: "",
    names.TARGET_STEP_MAX.name: "owner",
    names.TRAIN_REWARD.name: "",
    names.TRAIN_LOSS.name: "",
    names.TRAIN_KL.name: "",
    names.INVARIANT_ACTIVE.name: "invariant",
    names.INVARIANT_LAST_VIOLATION.name: "invariant",
    names.PROMPTS_READ.name: "",
    names.PROMPTS_TRAINED.name: "",
    names.RUN_STATE.name: "state",
}
"""Numbers whose values are shown."""

_HISTOGRAMS: Final = (names.MUTATION_WAIT.name, names.MUTATION_HOLD.name)
_INFO: Final = names.RUN_INFO.name


def collect(recording: Recording) -> RunData:
    """Read a recording.

    Args:
        recording: An opened one.
    """
    roles = [writer.role for writer in recording.writers]
    role = "controller" if "controller" in roles else roles[0]
    own = {writer.ident for writer in recording.writers if writer.role == role}
    first = _first(recording, own)
    data = RunData(recording.files[0].writer.run, role, first, first, Timeline(first))
    data.starts = [writer.incarnation for writer in recording.writers if writer.ident in own]
    data.logged = any(file.stream == "events" and file.writer.ident in own for file in recording.files)
    samples = _Samples(data, own)
    samples.read(recording.samples())
    newest = [writer.ident for writer in recording.writers if writer.ident in own][-1]
    saves = Attempts(data, CutOffs(samples.phases.going_on(), newest))
    for span in recording.spans():
        saves.span(span)
    for event in recording.events():
        if event.writer.ident in own:
            saves.event(event)
    saves.finish()
    _remark(data, recording)
    try:
        found = read_violations(
            recording.folder.parent if recording.folder.name == FOLDER else recording.folder
        )
        data.violations = sorted(found, key=lambda record: not record.open)
    except OSError as error:
        data.remarks.append(f"What the auditor found could not be read: {error}.")
    return data


def _first(recording: Recording, own: set[str]) -> float:
    """Return when the first thing was recorded: a short run's files are begun when it is nearly over.

    The telemetry's own start counts, and the starts of the first spans; nothing that claims to be much older than
    the oldest file, whose clock was another one, or whose own files are gone.
    """
    began = min(file.unix_ns for file in recording.files) / 1e9
    told: list[float] = []
    recording = replace(recording, broken={})  # what is wrong with it is counted when all of it is read
    first = next((sample for sample in recording.samples() if sample.file.writer.ident in own), None)
    if first is not None:
        told.append(first.values.get(names.RUN_STARTED.name) or began)
    for slots in (False, True):
        told += [span.start_ns / 1e9 for span in islice(recording.spans(slots=slots), _FIRST_SPANS)]
    return min([began, *(when for when in told if when > began - _OLDER_SECONDS)])


class _Samples:
    """Puts samples into bins."""

    def __init__(self, data: RunData, own: set[str]) -> None:
        self.phases = Phases()
        self._data = data
        self._own = own
        self._before: dict[str, dict[str, float]] = {}  # writer -> counter's key -> value
        self._gauges: dict[str, tuple[Values, dict[str, float], str] | None] = {}
        self._counters: dict[str, Increases | None] = {}
        self._infos: set[str] = set()

    def read(self, samples: Iterable[Sample]) -> None:
        """Read all of them."""
        data = self._data
        for sample in samples:
            writer = sample.file.writer
            if writer.ident not in self._own:
                continue
            index = data.timeline.index(sample.unix_time)
            data.started = min(data.started, sample.unix_time)
            data.ended = max(data.ended, sample.unix_time)
            data.sampled = max(data.sampled, sample.unix_time)
            self.phases.sample(writer.ident, sample.unix_time, sample.values)
            before = self._before.get(writer.ident)
            counted = True
            if before is None:
                # A counter begins at 0 with its process, unless its first file is gone.
                before = self._before[writer.ident] = {}
                counted = sample.file.sequence == 0
                self._away(index)
            for key, value in sample.values.items():
                self._put(index, key, value, before, counted=counted)

    def _away(self, index: int) -> None:
        """A new process: a gauge that it does not tell is not what the last one said."""
        for gauge in self._gauges.values():
            if gauge is not None:
                gauge[0].set(index, math.nan)

    def _put(
        self, index: int, key: str, value: float | None, before: dict[str, float], *, counted: bool
    ) -> None:
        if key in self._counters:
            grown = self._counters[key]
            if grown is not None and value is not None:
                last = before.get(key, 0.0)
                before[key] = value
                if counted and value != last:
                    grown.add(index, value - last if value >= last else value)
        elif key in self._gauges:
            gauge = self._gauges[key]
            if gauge is not None:
                gauge[0].set(index, math.nan if value is None else value)
                if value is not None:
                    gauge[1][gauge[2]] = value
        elif not self._learn(key):
            self._gauges[key] = None
        else:
            self._put(index, key, value, before, counted=counted)

    def _learn(self, key: str) -> bool:
        """Decide what a series is for; return whether it is shown at all."""
        data = self._data
        name, labels = series(key)
        label = _COUNTERS.get(name)
        if label is not None:
            children = data.counters.setdefault(name, {})
            child = labels.get(label, "")
            if child not in children:
                children[child] = data.timeline.increases()
            self._counters[key] = children[child]
            return True
        label = _GAUGES.get(name)
        if label is not None:
            child = labels.get(label, "")
            bins = data.gauges.setdefault(name, {}).setdefault(child, data.timeline.values())
            self._gauges[key] = (bins, data.latest.setdefault(name, {}), child)
            return True
        if name == _INFO:
            data.info.update(labels)
            return False
        for histogram in _HISTOGRAMS:
            if name.startswith(histogram):
                counts = data.slots.setdefault(histogram, {}).setdefault(
                    labels.get("kind", ""), BucketCounts()
                )
                if name == f"{histogram}_bucket":
                    bound = float(labels["le"])
                    self._counters[key] = counts.buckets.setdefault(bound, data.timeline.increases())
                    return True
        return False


def _remark(data: RunData, recording: Recording) -> None:
    others = sorted({writer.role for writer in recording.writers} - {data.role})
    if others:
        data.remarks.append(f"Numbers are of the role {data.role}; {', '.join(others)} recorded too.")
    for stream, counts in recording.removed.items():
        gone, thin = counts.get("files", 0), counts.get("thinned", 0)
        parts = [f"{gone} files of {stream} were removed"] if gone else []
        if thin:
            parts.append(f"{thin} times a file of {stream} was thinned out")
        if parts:
            data.remarks.append(f"To keep the recording below its limit, {' and '.join(parts)}.")
    if data.thinned > 1:
        data.remarks.append(f"Of the saves, about one in {data.thinned} is shown.")
    if recording.torn:
        lines = "1 line was" if recording.torn == 1 else f"{recording.torn} lines were"
        data.remarks.append(f"{lines} cut short, as a killed process leaves them.")
    for name, why in sorted(recording.broken.items()):
        data.remarks.append(f"{name} could not be read to its end: {why}.")
