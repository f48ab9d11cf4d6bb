"""Writes the spans, metric samples and log events of a run into its folder, so that no server is needed.

Rule: recording can neither fill the run's disk nor fail the run. The folder is kept below a limit, the last
part of the disk is left alone, and what could not be written is counted, said once in the log, raised to the
pipeline (which counts it too), and tried again with the next batch. Every method may block, on the thread that
the pipeline gives a sink; a forked child writes nothing.

The files are described in ``quiesce.telemetry.recording``, which reads them.
"""

from __future__ import annotations

import json
import json.encoder
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from operator import eq
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from quiesce.errors import ConfigError, RecorderPausedError
from quiesce.telemetry.exposed import Child, HistogramSnapshot
from quiesce.telemetry.recording import FOLDER, SLOT_SPAN, STREAMS
from quiesce.telemetry.slot_spans import IDS_BYTES, SlotSpans, parts_of
from quiesce_exporters.recorder_files import Folder, Stream

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from quiesce.telemetry.finished import AttributeValue, FinishedSpan, Link, SpanEvent
    from quiesce.telemetry.sinks import SinkContext

__all__ = ["FILE_BYTES", "MAX_BYTES", "RESERVE_BYTES", "Recorder", "RecorderStatistics", "make_recorder"]

MAX_BYTES: Final = 256 << 20
"""What the folder of a recording may take."""

FILE_BYTES: Final = 16 << 20
"""What one file may take before it is compressed."""

RESERVE_BYTES: Final = 64 << 20
"""What the recorder leaves free on the disk: a checkpoint needs it more. At most a hundredth of the disk."""

SAID_AGAIN_SECONDS: Final = 3600.0
"""How long one line of log says for that nothing can be written."""

TIDY_AGAIN_SECONDS: Final = 60.0
"""How long housekeeping rests after it failed; what it starts is not cheap."""

_INCARNATION_FILE: Final = "incarnation"
_LOG: Final = logging.getLogger("quiesce.telemetry")
_WRITER_BYTES: Final = 6
_TRACE_DIGITS: Final = 32
_EVENT_FORMS: Final = 1_024
_FORMS: Final = 256


@dataclass(frozen=True, slots=True)
class RecorderStatistics:
    """What a recorder did.

    Attributes:
        lines: Lines that were written, by stream.
        num_bytes: Bytes that were written, before compression.
        failures: Batches that could not be written, or not wholly.
        last_failure: Why, the last time; "" if it never happened.
        removed: What was removed to keep the folder below its limit, by stream.
    """

    lines: Mapping[str, int]
    num_bytes: int
    failures: int
    last_failure: str
    removed: Mapping[str, Mapping[str, int]]


class Recorder:
    """A sink that writes files.

    Args:
        folder: Where; made when the first batch comes, its parent must exist.
        run: The run's name.
        role: What this process is in the run.
        incarnation: The start of the run that it belongs to; or what says so whenever a file is begun, for a
            run that is counted after its telemetry was switched on.
        max_bytes: Limit of the folder.
        file_bytes: Limit of a file.
        reserve_bytes: What stays free on the disk.
        compress: Whether full files are compressed.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        run: str,
        role: str = "controller",
        incarnation: int | Callable[[], int] = 0,
        max_bytes: int = MAX_BYTES,
        file_bytes: int = FILE_BYTES,
        reserve_bytes: int = RESERVE_BYTES,
        compress: bool = True,
    ) -> None:
        self._pid = os.getpid()
        self._folder = Folder(
            Path(folder),
            max_bytes=max_bytes,
            file_bytes=file_bytes,
            reserve_bytes=reserve_bytes,
            compress=compress,
        )
        writer = {"writer": os.urandom(_WRITER_BYTES).hex(), "pid": self._pid}

        def header() -> dict[str, object]:
            number = incarnation() if callable(incarnation) else incarnation
            return {"run": run, "role": role, "incarnation": number, **writer}

        self._streams = {name: Stream(self._folder, name, header) for name in STREAMS}
        self._series = _Series()
        self._failures = 0
        self._last_failure = ""
        self._said_at = -math.inf
        self._tidy_after = -math.inf

    def spans(self, batch: Sequence[FinishedSpan]) -> None:
        """Write spans.

        Raises:
            OSError: If the disk does not take them.
            RecorderPausedError: If the disk is nearly full.
        """
        slots: list[bytes] = []
        others: list[bytes] = []
        for part in parts_of(batch):
            if isinstance(part, SlotSpans):
                slots += _slot_lines(part)
            else:
                for span in part:
                    (slots if span.name == SLOT_SPAN else others).append(_span_line(span))
        self._append((("spans", others), ("slots", slots)))

    def samples(self, families: Sequence[Metric], unix_time: float) -> None:
        """Write what changed in a snapshot of the metrics.

        Raises:
            OSError: If the disk does not take it.
            RecorderPausedError: If the disk is nearly full.
        """
        if self._pid != os.getpid():
            return
        stream = self._streams["samples"]
        line = self._series.line(families, unix_time, complete=stream.is_new)
        stream.rotate(len(line))
        if stream.is_new:
            line = self._series.line(families, unix_time, complete=True)
        self._append((("samples", [line]),))

    def events(self, events: Sequence[Mapping[str, object]]) -> None:
        """Write log events.

        Raises:
            OSError: If the disk does not take them.
            RecorderPausedError: If the disk is nearly full.
        """
        self._append((("events", [f"{_json(dict(event))}\n".encode(errors=_LONE) for event in events]),))

    def close(self, deadline_seconds: float) -> None:
        """Close the files. What is left to compress, the next start of the run does."""
        if self._pid == os.getpid():
            for stream in self._streams.values():
                stream.close()

    def statistics(self) -> RecorderStatistics:
        """Return what was done so far."""
        return RecorderStatistics(
            lines={name: stream.lines for name, stream in self._streams.items()},
            num_bytes=sum(stream.num_bytes for stream in self._streams.values()),
            failures=self._failures,
            last_failure=self._last_failure,
            removed=dict(self._folder.removed),
        )

    def _append(self, batches: Iterable[tuple[str, list[bytes]]]) -> None:
        if self._pid != os.getpid():
            return
        try:
            for name, lines in batches:
                self._streams[name].append(lines)
        except (OSError, RecorderPausedError) as error:
            # What was in the lost line is not in the next one, so the next one begins a file and has all.
            self._streams["samples"].close()
            self._failed(error)
            raise
        self._tidy()

    def _tidy(self) -> None:
        """Do one piece of housekeeping; a folder that cannot be tidied can still be written."""
        if time.monotonic() < self._tidy_after:
            return
        try:
            self._folder.tidy()
        except OSError as error:
            self._tidy_after = time.monotonic() + TIDY_AGAIN_SECONDS
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        self._failures += 1
        self._last_failure = str(error)
        now = time.monotonic()
        if now - self._said_at >= SAID_AGAIN_SECONDS:
            self._said_at = now
            _LOG.warning("the run goes on, but its recording lacks something: %s", error)


def make_recorder(context: SinkContext) -> Recorder:
    """Make the recorder of a run; the entry point ``recorder``.

    Args:
        context: Its settings may have ``max_bytes``, ``file_bytes``, ``reserve_bytes``, ``compress`` and
            ``incarnation`` (else the run folder says which start of the run this is).

    Raises:
        ConfigError: If the run has no folder, or a setting is impossible.
    """
    if context.run_dir is None:
        raise ConfigError("recorder", "records into the run's folder, so it needs a run_dir")
    given = context.settings
    run_dir = context.run_dir

    def counted() -> int:
        return _incarnation(run_dir)

    return Recorder(
        run_dir / FOLDER,
        run=context.run,
        role=context.role,
        incarnation=_count(given, "incarnation", 0) if "incarnation" in given else counted,
        max_bytes=_count(given, "max_bytes", MAX_BYTES),
        file_bytes=_count(given, "file_bytes", FILE_BYTES),
        reserve_bytes=_count(given, "reserve_bytes", RESERVE_BYTES),
        compress=bool(given.get("compress", True)),
    )


def _count(settings: Mapping[str, object], name: str, default: int) -> int:
    value = settings.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f"recorder.{name}", f"must be a whole number that is not negative, not {value!r}")
    return value


def _incarnation(run_dir: Path) -> int:
    try:
        return int((run_dir / _INCARNATION_FILE).read_text())
    except (OSError, ValueError):  # a program of its own, without a run folder of ours
        return 0


# ------------------------------------------------------------------------------------------------------ lines

_LONE: Final = "backslashreplace"
"""How half of a surrogate pair is written: as the escape that JSON has for it."""

_encode: Final = json.JSONEncoder(
    separators=(",", ":"), ensure_ascii=False, allow_nan=False, default=repr
).encode


_text: Final = lru_cache(maxsize=1024)(_encode)
"""JSON of a text that comes again and again: names and statuses of spans."""


def _json(value: object) -> str:
    """Return JSON; what it lacks (NaN, infinity, odd keys) becomes text."""
    try:
        return _encode(value)
    except (ValueError, TypeError):
        return _encode(_plain(value))


def _plain(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _float(value: float) -> str:
    return repr(value) if math.isfinite(value) else f'"{value}"'


_WRITE: Final[dict[type, Callable[[Any], str]]] = {
    str: json.encoder.encode_basestring,
    int: repr,
    float: _float,
    bool: {True: "true", False: "false"}.__getitem__,
}
"""JSON of what attributes are."""


def _literal(text: str) -> str:
    """Return a text for a form that values are put into."""
    return text.replace("%", "%%")


_forms: dict[tuple[str, ...], str] = {}
"""JSON of attributes but for their values, by their names: few of them come with a name of their own."""


def _object(about: Mapping[str, AttributeValue]) -> str:
    """Return JSON of attributes; spelled out, because a JSON encoder is set up anew for every object that it is given."""
    try:
        values = tuple([_WRITE[type(value)](value) for value in about.values()])
    except KeyError:  # a class of the application's own, derived from one of these
        return _json(dict(about))
    names = tuple(about)
    form = _forms.get(names)
    if form is None:
        if len(_forms) >= _FORMS:
            _forms.clear()
        said = ",".join(f"{_literal(_encode(str(name)))}:%s" for name in names)
        form = _forms[names] = f"{{{said}}}"
    return form % values


_event_forms: dict[tuple[object, ...], tuple[tuple[object, ...], str]] = {}
"""JSON of events but for their times, by their names and by the identities of what they say, which is kept so that the
identities stay its own. Groups have lives that are alike, and moves that are alike share their attributes."""


def _events(events: Iterable[SpanEvent]) -> str:
    """Return JSON of events."""
    whats, whens, abouts = zip(*events, strict=True)
    key = whats, tuple(map(id, abouts))
    known = _event_forms.get(key)
    if known is None:
        if len(_event_forms) >= _EVENT_FORMS:
            _event_forms.clear()
        said = zip(map(_text, whats), map(_object, abouts), strict=True)
        form = ",".join(f"[{_literal(what)},%d,{_literal(about)}]" for what, about in said)
        known = _event_forms[key] = abouts, form
    return known[1] % whens


def _span_line(span: FinishedSpan) -> bytes:
    name, trace_id, span_id, parent_id, start, end, attributes, links, events, status, cut_off = span
    ids = (trace_id << 64 | span_id).to_bytes(IDS_BYTES, "big").hex()  # a third of what formatting both takes
    parent = parent_id.to_bytes(8, "big").hex() if parent_id else ""
    linked = ",".join(map(_link, links)) if links else ""
    told = _events(events) if events else ""
    return (
        f'{{"n":{_text(name)},"t":"{ids[:_TRACE_DIGITS]}","s":"{ids[_TRACE_DIGITS:]}","p":"{parent}","b":{start},'
        f'"e":{end},"a":{_object(attributes)},"l":[{linked}],"v":[{told}],'
        f'"st":{_text(status)},"c":{"true" if cut_off else "false"}}}\n'
    ).encode(errors=_LONE)


def _link(link: Link) -> str:
    ids = (link[0] << 64 | link[1]).to_bytes(IDS_BYTES, "big").hex()
    return f'["{ids[:_TRACE_DIGITS]}","{ids[_TRACE_DIGITS:]}"]'


def _slot_lines(slots: SlotSpans) -> Iterator[bytes]:
    """Yield the lines of spans that differ in identifiers and times alone."""
    begun = [f'{{"n":{_text(shape.name)},"t":"' for shape in slots.shapes]
    ended = [
        f',"a":{_object(shape.attributes)},"l":[],"v":[],"st":{_text(shape.status)},"c":false}}\n'
        for shape in slots.shapes
    ]
    ids, times = slots.ids.hex(), iter(slots.times)
    at, trace, both = 0, _TRACE_DIGITS, 2 * IDS_BYTES
    for which, start, end in zip(slots.which, times, times, strict=True):
        yield (
            f'{begun[which]}{ids[at : at + trace]}","s":"{ids[at + trace : at + both]}","p":"",'
            f'"b":{start},"e":{end}{ended[which]}'
        ).encode(errors=_LONE)
        at += both


class _Known:
    """A family as it was written last.

    Attributes:
        family: It; the same one again has nothing new.
        places: Of each sample its name, its labels and its key.
        values: Of each sample its value.
        children: Of a histogram's children, the keys of their series, and what was written last.
    """

    __slots__ = ("children", "family", "places", "values")

    def __init__(self) -> None:
        self.family: Metric | None = None
        self.places: list[tuple[str, Mapping[str, str], str]] = []
        self.values: list[float] = []
        self.children: dict[tuple[str, ...], tuple[list[str], Child]] = {}

    def keys(self) -> Iterator[str]:
        """Yield the keys of all its series."""
        yield from (key for _, _, key in self.places)
        for keys, _ in self.children.values():
            yield from keys


class _Series:
    """What was written last of every series, so that only changes are.

    Samples of a family come in the same order each time, so a series is recognised by its place, which is much
    cheaper than to build its key; and most families are the object that they were the last time.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, int], _Known] = {}

    def line(self, families: Iterable[Metric], unix_time: float, *, complete: bool) -> bytes:
        """Return the line of a snapshot, and remember it.

        Args:
            families: The snapshot.
            unix_time: Its time.
            complete: Whether to write every series.
        """
        before, self._known = self._known, {}
        changed: list[str] = []
        gone: set[str] = set()
        for family in families:
            # A name should come once. Where it does not, the second one is not the first one.
            ident = family.name, 0
            while ident in self._known:
                ident = family.name, ident[1] + 1
            known = self._known[ident] = before.pop(ident) if ident in before else _Known()
            if known.family is family and not complete:
                continue
            known.family = family
            if isinstance(family, HistogramSnapshot):
                _compare_children(known, family, changed, complete=complete)
            else:
                _compare_samples(known, family, changed, gone, complete=complete)
        for known in before.values():
            gone.update(known.keys())
        if gone and not complete:
            gone.difference_update(key for known in self._known.values() for key in known.keys())  # noqa: SIM118 - no mapping
            changed += [f"{key}:null" for key in sorted(gone)]
        return f'{{"u":{unix_time:.3f},"m":{{{",".join(changed)}}}}}\n'.encode(errors=_LONE)


def _compare_children(
    known: _Known, family: HistogramSnapshot, changed: list[str], *, complete: bool
) -> None:
    """Note what is new in a family of histograms, whose children never go away."""
    for labels, child in family.children.items():
        last = known.children.get(labels)
        if last is not None and last[1] is child and not complete:
            continue
        now = [*accumulate(child.cells[:-1])]
        told = [*map(_number, now), _number(now[-1]), _number(child.histogram.scaled(child.cells[-1]))]
        keys = _histogram_keys(family, labels, child) if last is None else last[0]
        known.children[labels] = keys, child
        if last is None or complete:
            changed += [f"{key}:{text}" for key, text in zip(keys, told, strict=True)]
            continue
        previous = [*accumulate(last[1].cells[:-1])]
        same = [*map(eq, previous, now), previous[-1] == now[-1], last[1].cells[-1] == child.cells[-1]]
        changed += [f"{key}:{text}" for key, text, old in zip(keys, told, same, strict=True) if not old]


def _histogram_keys(family: HistogramSnapshot, labels: tuple[str, ...], child: Child) -> list[str]:
    """Return the keys of a histogram's series: its buckets, its count and its sum."""
    named = dict(zip(family.label_names, labels, strict=True))
    begun = _key(f"{family.name}_bucket", {**named, "le": ""})[: -len(_LE_END)]
    buckets = [f"{begun}{bound}{_LE_END}" for bound in child.histogram.bounds_text]
    return [*buckets, _key(f"{family.name}_count", named), _key(f"{family.name}_sum", named)]


_LE_END: Final = '\\"}"'
"""How the key of a bucket ends."""


def _compare_samples(
    known: _Known, family: Metric, changed: list[str], gone: set[str], *, complete: bool
) -> None:
    """Note what is new in a family, and what is in it no more."""
    places, last = known.places, known.values
    known.values = values = [sample[2] for sample in family.samples]
    count = len(places)
    for place, sample in enumerate(family.samples):
        name, labels, value = sample[0], sample[1], sample[2]
        if place < count and places[place][1] == labels and places[place][0] == name:
            previous = last[place]
            if not complete and (previous == value or (math.isnan(previous) and math.isnan(value))):
                continue
        else:
            if place < count:
                gone.update(key for _, _, key in places[place:])
            places[place:] = [(name, labels, _key(name, labels))]
            count = place + 1
        changed.append(f"{places[place][2]}:{_number(value)}")
    gone.update(key for _, _, key in places[len(values) :])
    del places[len(values) :]


def _key(name: str, labels: Mapping[str, str]) -> str:
    """Return the key of a series as JSON."""
    kept = ",".join([_label(item) for item in labels.items() if item[0] not in _CONSTANT])
    return f'"{name}{{{kept}}}"' if kept else f'"{name}"'


_CONSTANT: Final = frozenset({"run", "role"})
"""Labels that the header of a file has."""


@lru_cache(maxsize=4096)
def _label(item: tuple[str, str]) -> str:
    """Return a label as the exposition format has it, as JSON without its quotes; few are met only once."""
    label, value = item
    escaped = value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    return _encode(f'{label}="{escaped}"')[1:-1]


def _number(value: float) -> str:
    if math.isfinite(value):
        return str(int(value)) if value == int(value) and abs(value) < _WHOLE else repr(float(value))
    return f'"{value}"'  # "nan", "inf": JSON has no numbers for them, and float() reads the words


_WHOLE: Final = 2.0**53
