"""Finds a trace in what runs recorded.

Rule: it only reads, line by line, and parses only lines of that trace. Nothing here suspends; it blocks for as long as
reading the spans takes: a second or so for a recording that is full.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from quiesce.errors import NoRecordingError, TelemetryError
from quiesce.telemetry.recording import RecordedFile, Recording, open_lines

__all__ = ["MOST_SPANS", "NotRecordedError", "find_trace"]

MOST_SPANS: Final = 5000
"""Spans of a trace that are returned; the earliest ones."""

_STREAMS: Final = ("spans", "slots")
_BROKEN: Final = (OSError, EOFError, ValueError, KeyError, TypeError)


class NotRecordedError(TelemetryError):
    """Raised when no run has recorded a trace; the message says why that may be."""


def find_trace(folders: Iterable[Path], trace_id: str) -> dict[str, Any]:
    """Return a trace.

    Args:
        folders: Run folders to look into.
        trace_id: 32 hexadecimal digits.

    Returns:
        ``{"trace_id", "spans", "run", "truncated"}``; the spans in the order in which they began, times in Unix seconds.

    Raises:
        NotRecordedError: If it is in none of them.
    """
    needle = f'"t":"{trace_id}"'.encode()
    spans: dict[str, dict[str, Any]] = {}
    recordings, run, removed = 0, "", False
    for folder in folders:
        try:
            recording = Recording.open(folder)
        except NoRecordingError:
            continue
        recordings += 1
        removed = removed or any(recording.removed.get(stream, {}).get("files") for stream in _STREAMS)
        for file in recording.files:
            if file.stream in _STREAMS:
                for span in _matching(file, needle):
                    spans[span["span_id"]] = span
                    run = file.writer.run
    if not spans:
        raise NotRecordedError(_why(trace_id, recordings, removed=removed))
    ordered = sorted(spans.values(), key=lambda span: (span["start"], span["end"]))
    return {
        "trace_id": trace_id,
        "run": run,
        "spans": ordered[:MOST_SPANS],
        "truncated": max(0, len(ordered) - MOST_SPANS),
    }


def _matching(file: RecordedFile, needle: bytes) -> Iterable[dict[str, Any]]:
    found = []
    try:
        with open_lines(file.path) as lines:
            for line in lines:
                if needle in line:
                    try:
                        found.append(_span(json.loads(line)))
                    except _BROKEN:
                        continue  # the torn last line of a process that was killed
    except _BROKEN:
        pass  # what was read of a file that was cut short counts
    # A needle may stand in an attribute's text too.
    trace = needle.decode()[5:-1]
    return [span for span in found if span["trace_id"] == trace]


def _span(record: dict[str, Any]) -> dict[str, Any]:
    return {
        "trace_id": record["t"],
        "span_id": record["s"],
        "parent_id": record["p"],
        "name": record["n"],
        "start": record["b"] / 1e9,
        "end": record["e"] / 1e9,
        "status": record["st"],
        "cut_off": bool(record["c"]),
        "attributes": record["a"],
        "links": [{"trace_id": trace, "span_id": span} for trace, span in record["l"]],
        "events": [
            {"name": name, "time": unix_ns / 1e9, "attributes": attributes}
            for name, unix_ns, attributes in record["v"]
        ],
    }


def _why(trace_id: str, recordings: int, *, removed: bool) -> str:
    if not recordings:
        return f"the trace {trace_id} is not recorded: the run has no folder telemetry/, so its spans went elsewhere"
    if removed:
        return f"the trace {trace_id} is not recorded (any more): the recording was full, and its oldest spans went"
    return (
        f"the trace {trace_id} is not recorded: a span is written a second or two after its end; "
        "one that was sampled out never is"
    )
