"""Answers ``query_exemplars`` from recorded spans: where Prometheus scraped nothing, it has no exemplars.

Rule: an exemplar is a recorded span whose duration a histogram has counted, so it always opens a trace. Of many in one
bucket at one moment the longest is kept, since that is the one that somebody clicks on. Nothing here suspends; ``read``
blocks for as long as reading the recorded spans takes, ``find`` for milliseconds.
"""

from __future__ import annotations

import heapq
import json
import re
import threading
import time
import zlib
from bisect import bisect_left
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, Final, NamedTuple

from quiesce.errors import NoRecordingError
from quiesce.telemetry import names
from quiesce.telemetry.histogram import bound_text
from quiesce.telemetry.recording import EARLY_NS, SLOT_SPAN, RecordedFile, Recording, open_lines
from quiesce.types import PHASES
from quiesce.view.folders import JOB, ShownRun, instance_of

__all__ = ["PLACES", "ExemplarIndex", "Selector", "selectors"]

PLACES: Final = 5000
"""Into so many moments the time of a recording is cut; each keeps one exemplar a bucket."""

_LEAST_NS: Final = 1_000_000_000
"""A moment is a second at least."""

BUDGET_SECONDS: Final = 60.0
"""So much CPU is spent on reading, newest files first: a run that goes on beside needs it more."""

MOST: Final = 2000
"""Exemplars in an answer; of more, the longest."""

_SELECTOR: Final = re.compile(r"\b(quiesce_[a-zA-Z0-9_]+)\s*(?:\{((?:[^{}\"]|\"(?:[^\"\\]|\\.)*\")*)\})?")
_MATCHER: Final = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)\s*(=~|!~|!=|=)\s*"((?:[^"\\]|\\.)*)"')
_ENDED: Final = "quiesce.outcome"

_HOLD: Final = names.MUTATION_HOLD.name
_WAIT: Final = names.MUTATION_WAIT.name
_PHASE: Final = names.CHECKPOINT_PHASE_SECONDS.name
_STEP: Final = names.TRAIN_STEP_SECONDS.name
_PHASE_SPAN: Final = "quiesce.checkpoint."
_STEP_SPAN: Final = "quiesce.train.step"
_SPANS: Final = frozenset(
    name.encode() for name in (SLOT_SPAN, _STEP_SPAN, *(f"{_PHASE_SPAN}{phase}" for phase in PHASES))
)
_NAME_AT: Final = len('{"n":"')
"""Where a recorded span's name begins: it is written first."""
_FAMILIES: Final = (_HOLD, _WAIT, _PHASE, _STEP)


class Selector(NamedTuple):
    """A vector selector of a query.

    Attributes:
        family: The histogram's name.
        matchers: Label, operator, value.
    """

    family: str
    matchers: tuple[tuple[str, str, str], ...]

    def matches(self, labels: Mapping[str, str]) -> bool:
        """Return whether a series of those labels is selected."""
        return all(
            _matches(labels.get(label, ""), operator, value) for label, operator, value in self.matchers
        )


def selectors(query: str) -> list[Selector]:
    """Return the selectors of histograms whose values have spans.

    Args:
        query: PromQL.
    """
    found = []
    for name, inside in _SELECTOR.findall(query):
        family = name.removesuffix("_bucket")
        if family != name and family in _FAMILIES:
            matchers = tuple(
                (label, operator, value.replace(r"\"", '"').replace("\\\\", "\\"))
                for label, operator, value in _MATCHER.findall(inside)
                if label != "le"
            )
            found.append(Selector(family, matchers))
    return list(dict.fromkeys(found))


class _Lit(NamedTuple):
    """An exemplar."""

    value: float
    trace_id: int
    span_id: int
    end_ns: int


_Series = tuple[tuple[str, str], ...]
_Place = tuple[int, int]
"""A moment, and a bucket."""


class ExemplarIndex:
    """The exemplars of what was recorded, read once and kept: for each bucket the longest span of every moment.

    Args:
        places: Into how many moments the time of a recording is cut.
    """

    def __init__(self, places: int = PLACES) -> None:
        self._places = places
        self._lock = threading.Lock()
        self._lit: dict[tuple[_Series, str], dict[_Place, _Lit]] = {}
        self._closed = False

    def read(self, runs: Iterable[ShownRun], until_unix: float) -> None:
        """Read recordings, newest files first; what has been read can be found meanwhile.

        Args:
            runs: The recorded runs.
            until_unix: Spans that end from then on are left out.
        """
        began = time.thread_time()
        for shown in runs:
            try:
                recording = Recording.open(shown.folder)
            except NoRecordingError:
                continue
            files = [file for file in recording.files if file.stream in {"spans", "slots"}]
            if not files:
                continue
            first = min(file.unix_ns for file in files) - EARLY_NS
            width = max(_LEAST_NS, int(until_unix * 1e9 - first) // self._places)
            for file in reversed(files):
                if self._closed or time.thread_time() - began > BUDGET_SECONDS:
                    return
                self._merge(shown, file, _longest(file, first, width, until_unix))

    def close(self) -> None:
        """Let :meth:`read` end with the file that it reads."""
        self._closed = True

    def find(self, query: str, begin: float, end: float) -> list[dict[str, Any]]:
        """Return exemplars in the shape of Prometheus' answer.

        Args:
            query: PromQL; its histograms count.
            begin: Unix seconds.
            end: Unix seconds.
        """
        wanted = selectors(query)
        if not wanted or end <= begin:
            return []
        found: list[tuple[_Series, str, _Lit]] = []
        with self._lock:
            for (series, family), places in self._lit.items():
                labels = dict(series)
                if any(one.family == family and one.matches(labels) for one in wanted):
                    found += [
                        (series, family, lit) for lit in places.values() if begin <= lit.end_ns / 1e9 <= end
                    ]
        kept = heapq.nlargest(MOST, found, key=lambda item: item[2].value)
        answer: dict[tuple[_Series, str, str], list[dict[str, Any]]] = {}
        for series, family, lit in sorted(kept, key=lambda item: item[2].end_ns):
            answer.setdefault((series, family, _le(family, lit.value)), []).append(
                {
                    "labels": {"trace_id": f"{lit.trace_id:032x}", "span_id": f"{lit.span_id:016x}"},
                    "value": repr(lit.value),
                    "timestamp": round(lit.end_ns / 1e9, 3),
                }
            )
        return [
            {"seriesLabels": {"__name__": f"{family}_bucket", **dict(series), "le": le}, "exemplars": lits}
            for (series, family, le), lits in answer.items()
        ]

    def _merge(
        self, shown: ShownRun, file: RecordedFile, found: Mapping[tuple[_Series, str, _Place], _Lit]
    ) -> None:
        common = {
            "run": shown.name or file.writer.run,
            "role": file.writer.role,
            "instance": instance_of(shown, file.writer.role),
            "job": JOB,
        }
        with self._lock:
            for (own, family, place), lit in found.items():
                series = tuple(sorted({**dict(own), **common}.items()))
                places = self._lit.setdefault((series, family), {})
                known = places.get(place)
                if known is None or known.value < lit.value:
                    places[place] = lit


def _longest(
    file: RecordedFile, first_ns: int, width_ns: int, until_unix: float
) -> dict[tuple[_Series, str, _Place], _Lit]:
    """Return the longest span of each bucket and moment in a file."""
    longest: dict[tuple[_Series, str, _Place], _Lit] = {}
    until_ns = until_unix * 1e9
    try:
        with open_lines(file.path) as lines:
            for line in lines:
                if line[_NAME_AT : line.find(b'"', _NAME_AT)] not in _SPANS:
                    continue
                try:
                    record = json.loads(line)
                    end_ns, about = int(record["e"]), record["a"]
                    told = _told(record["n"], (end_ns - int(record["b"])) / 1e9, about)
                    trace, span = int(record["t"], 16), int(record["s"], 16)
                except (ValueError, KeyError, TypeError, AttributeError):
                    continue  # the torn last line of a process that was killed
                if end_ns >= until_ns:
                    continue
                for family, own, value in told:
                    place = ((end_ns - first_ns) // width_ns, bisect_left(_bounds(family), value))
                    key = (tuple(own.items()), family, place)
                    known = longest.get(key)
                    if known is None or known.value < value:
                        longest[key] = _Lit(value, trace, span, end_ns)
    except (OSError, EOFError, zlib.error):
        pass  # what was read of a file that was cut short counts
    return longest


def _told(name: str, seconds: float, about: Mapping[str, Any]) -> list[tuple[str, dict[str, str], float]]:
    """Return the histograms that have counted a span: family, labels, value."""
    if name == SLOT_SPAN:
        kind = {"kind": str(about.get("quiesce.kind", ""))}
        wait = float(about.get("quiesce.wait_seconds", 0.0))
        held = [(_HOLD, kind, max(0.0, seconds - wait))]
        return [*held, (_WAIT, kind, wait)] if wait > 0 else held
    if name == _STEP_SPAN:
        return [(_STEP, {}, seconds)]
    outcome = str(about.get(_ENDED, ""))
    labels = {"phase": name[len(_PHASE_SPAN) :], "outcome": outcome if outcome in names.ENDED else "failed"}
    return [(_PHASE, labels, seconds)]


def _le(family: str, value: float) -> str:
    bounds = _bounds(family)
    place = bisect_left(bounds, value)
    return "+Inf" if place == len(bounds) else bound_text(bounds[place])


@lru_cache
def _bounds(family: str) -> tuple[float, ...]:
    return tuple(names.METRICS[family].buckets)


def _matches(given: str, operator: str, value: str) -> bool:
    if operator in {"=", "!="}:
        return (given == value) == (operator == "=")
    try:
        return (_pattern(value).fullmatch(given) is not None) == (operator == "=~")
    except re.error:
        return False


@lru_cache(maxsize=256)
def _pattern(value: str) -> re.Pattern[str]:
    return re.compile(value)
