"""Writes the spans, metric samples and log events of a run into its folder, so that no server is needed.

Rule: recording can neither fill the run's disk nor fail the run. The folder is kept below a limit, the last
part of the disk is left alone, and what could not be written is counted, said once in the log, raised to the
pipeline (which counts it too), and tried again with the next batch. Every method may block, on the thread that
the pipeline gives a sink; a forked child writes nothing.

The files are described in ``quiesce.telemetry.recording``, which reads them.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Final

from quiesce.errors import ConfigError, RecorderPausedError
from quiesce.telemetry.recording import FOLDER, SLOT_SPAN, STREAMS
from quiesce_exporters.recorder_files import Folder, Stream

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

    from quiesce.telemetry.finished import FinishedSpan
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
        for span in batch:
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


def _span_line(span: FinishedSpan) -> bytes:
    name, trace_id, span_id, parent_id, start, end, attributes, links, events, status, cut_off = span
    linked = ",".join(f'["{trace:032x}","{other:016x}"]' for trace, other in links) if links else ""
    told = _json([(what, when, dict(more)) for what, when, more in events]) if events else "[]"
    parent = f"{parent_id:016x}" if parent_id else ""
    return (
        f'{{"n":{_text(name)},"t":"{trace_id:032x}","s":"{span_id:016x}","p":"{parent}","b":{start},"e":{end},'
        f'"a":{_json(dict(attributes)) if attributes else "{}"},"l":[{linked}],"v":{told},'
        f'"st":{_text(status)},"c":{"true" if cut_off else "false"}}}\n'
    ).encode(errors=_LONE)


class _Series:
    """What was written last of every series, so that only changes are.

    Families come in the same order each time, so a series is recognised by its place, which is much cheaper
    than to build its key.
    """

    def __init__(self) -> None:
        self._places: list[tuple[str, Mapping[str, str], str]] = []
        self._last: dict[str, float] = {}

    def line(self, families: Iterable[Metric], unix_time: float, *, complete: bool) -> bytes:
        """Return the line of a snapshot, and remember it.

        Args:
            families: The snapshot.
            unix_time: Its time.
            complete: Whether to write every series.
        """
        last: dict[str, float] = {} if complete else self._last
        now: dict[str, float] = {}
        places = self._places
        known = len(places)
        changed: list[str] = []
        place = 0
        for family in families:
            for sample in family.samples:
                name, labels, value = sample[0], sample[1], sample[2]
                if place < known and places[place][0] == name and places[place][1] == labels:
                    key = places[place][2]
                else:
                    key = _encode(_key(name, labels))
                    places[place:] = [(name, labels, key)]
                    known = place + 1
                place += 1
                now[key] = value
                before = last.get(key)
                if before is None or (before != value and not (math.isnan(before) and math.isnan(value))):
                    changed.append(f"{key}:{_number(value)}")
        changed += (
            [f"{key}:null" for key in last.keys() - now.keys()] if len(now) < len(last) or changed else []
        )
        self._last = now
        return f'{{"u":{unix_time:.3f},"m":{{{",".join(changed)}}}}}\n'.encode(errors=_LONE)


def _key(name: str, labels: Mapping[str, str]) -> str:
    kept = ",".join(
        f'{label}="{_escaped(value)}"' for label, value in labels.items() if label not in {"run", "role"}
    )
    return f"{name}{{{kept}}}" if kept else name


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    if math.isfinite(value):
        return str(int(value)) if value == int(value) and abs(value) < _WHOLE else repr(float(value))
    return f'"{value}"'  # "nan", "inf": JSON has no numbers for them, and float() reads the words


_WHOLE: Final = 2.0**53
