"""Reads what a run recorded about itself: its spans, metric samples and log events, from files alone.

Rule: it only reads, it never needs more memory than a file's worth of lines, and what is broken costs itself
alone: a torn line, a file that was cut short, a file of another format are passed over and counted. A run that
still records can be read. Nothing here suspends; everything blocks for as long as the disk does.

The folder ``telemetry`` of a run has files ``<stream>-<number>.jsonl``, or ``….jsonl.gz`` once they are full.
The first line of each is a header, every other one a record. The streams:

* ``spans``: one span a line, without those of mutation slots;
* ``slots``: the spans of mutation slots, which are many, so that they can be dropped first;
* ``samples``: the metrics at one time. The first line of a file has every series, later ones only those that
  changed; null stands for a series that is gone;
* ``events``: lines of the run's log.

Every process that records has files of its own, and a restart begins new ones. ``removed.json`` counts what had
to go to keep the folder within its limit.
"""

from __future__ import annotations

import gzip
import heapq
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import lru_cache
from operator import attrgetter
from pathlib import Path
from typing import IO, Any, Final, NamedTuple, TypeVar, cast

from quiesce.errors import NoRecordingError
from quiesce.telemetry.finished import FinishedSpan

__all__ = [
    "FILE_NAME",
    "FOLDER",
    "FORMAT",
    "REMOVED_FILE",
    "SLOT_SPAN",
    "STREAMS",
    "VERSION",
    "RecordedEvent",
    "RecordedFile",
    "Recording",
    "Sample",
    "Writer",
    "open_lines",
    "series",
]

FOLDER: Final = "telemetry"
"""The folder of a run that holds its recording."""

FORMAT: Final = "quiesce-recorder"
"""What the header of every file names."""

VERSION: Final = 1
"""Version of the format."""

STREAMS: Final = ("spans", "slots", "samples", "events")
"""Kinds of files."""

SLOT_SPAN: Final = "quiesce.slot"
"""The name of the spans that have a stream of their own."""

REMOVED_FILE: Final = "removed.json"
"""Counts what was removed or thinned out: ``{stream: {"files", "bytes", "thinned", "until_ns"}}``."""

FILE_NAME: Final = re.compile(r"(spans|slots|samples|events)-(\d{4,})\.jsonl(\.gz)?")
"""Names of recorded files."""

REORDERED: Final = 4096
"""Lines that are held back to put a writer's spans into the order of their ends: they are written as batches
of different origin, a second or two apart."""

EARLY_NS: Final = 60_000_000_000
"""How much older than its file what is in it may be: it waited in a queue."""

_BROKEN: Final = (EOFError, OSError, zlib.error)
"""What reading a file that was cut short, or that went away meanwhile, raises."""

_T = TypeVar("_T")


class Writer(NamedTuple):
    """A process that recorded.

    Attributes:
        run: The run's name.
        role: What the process was in the run.
        incarnation: The start of the run that it belonged to; 0 if the run does not count its starts.
        ident: Tells it from every other process.
    """

    run: str
    role: str
    incarnation: int
    ident: str


@dataclass(frozen=True, slots=True)
class RecordedFile:
    """A file of a recording.

    Attributes:
        path: Where it is.
        stream: One of :data:`STREAMS`.
        number: Its number; numbers of a stream grow with time.
        writer: Who wrote it.
        sequence: The how-manieth file of its writer and stream it is, from 0.
        unix_ns: When it was begun.
    """

    path: Path
    stream: str
    number: int
    writer: Writer
    sequence: int
    unix_ns: int


class Sample(NamedTuple):
    """The metrics at one time, as far as they changed.

    Attributes:
        unix_time: Unix seconds.
        file: The file that it stands in.
        complete: Whether it has every series, so that what it lacks is gone.
        values: By series (``name{label="value"}``, without the labels run and role); None for a series that
            is gone.
    """

    unix_time: float
    file: RecordedFile
    complete: bool
    values: Mapping[str, float | None]


class RecordedEvent(NamedTuple):
    """A line of the run's log.

    Attributes:
        unix_time: Unix seconds.
        writer: Who logged it.
        fields: The event.
    """

    unix_time: float
    writer: Writer
    fields: Mapping[str, Any]


@dataclass(slots=True)
class Recording:
    """What a run recorded. Made by :meth:`open`.

    Attributes:
        folder: The recording's folder.
        files: Its files, in the order of their numbers.
        removed: What the recorder removed, as :data:`REMOVED_FILE` has it.
        torn: Lines that could not be read, as far as was read.
        broken: Files that could not be read, or not to their end, with the reason.
    """

    folder: Path
    files: tuple[RecordedFile, ...]
    removed: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    torn: int = 0
    broken: dict[str, str] = field(default_factory=dict)

    @classmethod
    def open(cls, run_dir: Path | str) -> Recording:
        """Find the files of a run's recording.

        Args:
            run_dir: The run's folder, or the recording's folder itself.

        Raises:
            NoRecordingError: If there is none.
        """
        run_dir = Path(run_dir)
        folder = run_dir / FOLDER
        if not folder.is_dir() and any(FILE_NAME.fullmatch(path.name) for path in _listed(run_dir)):
            folder = run_dir
        recording = cls(folder, ())
        found: dict[tuple[str, int], Path] = {}
        for path in sorted(_listed(folder)):
            match = FILE_NAME.fullmatch(path.name)
            if match:  # after a crash in between, both the plain and the compressed one are whole
                found.setdefault((match[1], int(match[2])), path)
        files = [file for key, path in found.items() if (file := recording._header(path, *key))]
        latest: dict[str, Writer] = {}
        for file in files:  # the first files of a process may be older than its number
            known = latest.setdefault(file.writer.ident, file.writer)
            latest[file.writer.ident] = max(known, file.writer)
        files = [replace(file, writer=latest[file.writer.ident]) for file in files]
        recording.files = tuple(sorted(files, key=attrgetter("unix_ns", "number")))
        recording.removed = _removed(folder)
        if not recording.files:
            raise NoRecordingError(run_dir)
        return recording

    @property
    def writers(self) -> tuple[Writer, ...]:
        """Who recorded, oldest first."""
        return tuple(dict.fromkeys(file.writer for file in self.files))

    def spans(self, *, slots: bool = True) -> Iterator[FinishedSpan]:
        """Yield the spans of all starts of the run, in the order of their ends.

        Args:
            slots: Also those of mutation slots.
        """
        streams = ("spans", "slots") if slots else ("spans",)
        chains = [
            (
                files[0].unix_ns - EARLY_NS,
                _ordered(self._records(files, lambda _: _span), attrgetter("end_ns")),
            )
            for stream in streams
            for files in self._chains(stream)
        ]
        return _merged(chains, attrgetter("end_ns"))

    def samples(self) -> Iterator[Sample]:
        """Yield the metric samples of all starts of the run, in the order of time."""
        chains = [
            ((files[0].unix_ns - EARLY_NS) / 1e9, self._records(files, _sample))
            for files in self._chains("samples")
        ]
        return _merged(chains, attrgetter("unix_time"))

    def events(self) -> Iterator[RecordedEvent]:
        """Yield the log events of all starts of the run, in the order of time."""
        chains = [
            (
                (files[0].unix_ns - EARLY_NS) / 1e9,
                _ordered(self._records(files, _event), attrgetter("unix_time")),
            )
            for files in self._chains("events")
        ]
        return _merged(chains, attrgetter("unix_time"))

    def _chains(self, stream: str) -> list[list[RecordedFile]]:
        chains: dict[str, list[RecordedFile]] = {}
        for file in self.files:
            if file.stream == stream:
                chains.setdefault(file.writer.ident, []).append(file)
        return list(chains.values())

    def _header(self, path: Path, stream: str, number: int) -> RecordedFile | None:
        try:
            with open_lines(path) as lines:
                line = lines.readline()
            if not line.strip():
                return None  # the process died before it wrote anything
            header = json.loads(line)
            if header.get("format") != FORMAT or header.get("version") != VERSION:
                raise ValueError("it is not a recording of a version that this release reads")
            writer = Writer(
                str(header["run"]),
                str(header.get("role", "")),
                int(header["incarnation"]),
                str(header.get("writer", "")),
            )
            return RecordedFile(
                path, stream, number, writer, int(header.get("sequence", 0)), int(header["unix_ns"])
            )
        except (*_BROKEN, ValueError, KeyError, TypeError, AttributeError) as error:
            self.broken[path.name] = str(error) or type(error).__name__
            return None

    def _records(
        self, files: Iterable[RecordedFile], parser: Callable[[RecordedFile], Callable[[bytes], _T]]
    ) -> Iterator[_T]:
        for file in files:
            parse = parser(file)
            try:
                with open_lines(file.path) as lines:
                    next(lines, None)
                    for line in lines:
                        try:
                            record = parse(line)
                        except (ValueError, KeyError, TypeError, AttributeError):
                            self.torn += 1
                        else:
                            yield record
            except _BROKEN as error:
                self.broken[file.path.name] = str(error) or type(error).__name__


def _span(line: bytes) -> FinishedSpan:
    record = json.loads(line)
    return FinishedSpan(
        record["n"],
        int(record["t"], 16),
        int(record["s"], 16),
        int(record["p"] or "0", 16),
        int(record["b"]),
        int(record["e"]),
        record["a"],
        tuple((int(trace, 16), int(span, 16)) for trace, span in record["l"]),
        tuple((name, int(unix_ns), attributes) for name, unix_ns, attributes in record["v"]),
        record["st"],
        bool(record["c"]),
    )


def _sample(file: RecordedFile) -> Callable[[bytes], Sample]:
    ordinal = -1

    def parse(line: bytes) -> Sample:
        nonlocal ordinal
        ordinal += 1
        record = json.loads(line)
        values = {key: None if value is None else float(value) for key, value in record["m"].items()}
        return Sample(float(record["u"]), file, ordinal == 0, values)

    return parse


def _event(file: RecordedFile) -> Callable[[bytes], RecordedEvent]:
    def parse(line: bytes) -> RecordedEvent:
        fields = json.loads(line)
        when = datetime.fromisoformat(fields["timestamp"]).timestamp()
        return RecordedEvent(when, file.writer, fields)

    return parse


def open_lines(path: Path) -> IO[bytes]:
    """Open a recorded file, compressed or not, for reading its lines."""
    if path.suffix == ".gz":
        return cast("IO[bytes]", gzip.open(path, "rb"))
    return path.open("rb")


@lru_cache(maxsize=65536)
def series(key: str) -> tuple[str, Mapping[str, str]]:
    r"""Split the key of a series into its name and its labels.

    Args:
        key: ``name`` or ``name{label="value",…}``; in a value, ``\``, ``"`` and a line's end are escaped by a
            backslash, as in the exposition format of Prometheus.
    """
    name, _, rest = key.partition("{")
    return name, {label: _ESCAPED.sub(_meant, value) for label, value in _LABEL.findall(rest)}


def _meant(escaped: re.Match[str]) -> str:
    return "\n" if escaped[1] == "n" else escaped[1]


_LABEL: Final = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')


_ESCAPED: Final = re.compile(r"\\(.)")


def _listed(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _removed(folder: Path) -> dict[str, dict[str, int]]:
    try:
        told = json.loads((folder / REMOVED_FILE).read_bytes())
        return {
            stream: {name: int(count) for name, count in told[stream].items()}
            for stream in STREAMS
            if stream in told
        }
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _ordered(records: Iterator[_T], key: attrgetter[Any]) -> Iterator[_T]:
    """Yield in the order of the key what is out of it by at most :data:`REORDERED` places."""
    heap: list[tuple[Any, int, _T]] = []
    for count, record in enumerate(records):
        entry = (key(record), count, record)
        if len(heap) < REORDERED:
            heapq.heappush(heap, entry)
        else:
            yield heapq.heappushpop(heap, entry)[2]
    while heap:
        yield heapq.heappop(heap)[2]


def _merged(chains: Iterable[tuple[float, Iterator[_T]]], key: attrgetter[Any]) -> Iterator[_T]:
    """Merge what writers recorded; a chain is opened only when its time has come.

    A run that was restarted a thousand times so needs one open file, not a thousand.
    """
    waiting = sorted(chains, key=lambda chain: chain[0], reverse=True)
    heap: list[tuple[Any, int, _T, Iterator[_T]]] = []
    while heap or waiting:
        while waiting and (not heap or waiting[-1][0] <= heap[0][0]):
            _, chain = waiting.pop()
            for record in chain:
                heapq.heappush(heap, (key(record), len(waiting), record, chain))
                break
        if not heap:
            continue
        _, order, record, chain = heap[0]
        yield record
        for following in chain:
            heapq.heapreplace(heap, (key(following), order, following, chain))
            break
        else:
            heapq.heappop(heap)
