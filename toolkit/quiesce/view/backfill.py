"""Turns the samples that runs recorded into blocks of Prometheus' store, with the alerts that were due then.

Rule: what is made depends on the recording alone, is kept, and is made once: the next start finds it.
Memory and scratch space do not grow with the recording: it is read line by line, and ``promtool`` gets at most
:data:`MOST_SAMPLES` at a time. What cannot be read costs itself alone. ``read`` and ``stop`` suspend; ``put_into`` blocks
while it links files.

A block covers two hours of one run. A recorded line says only what changed since the one before, so every line is
written out in full: a series that is not told for five minutes is gone for Prometheus.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from quiesce.errors import NoRecordingError
from quiesce.telemetry.recording import Recording, Writer, series
from quiesce.view.folders import JOB, instance_of
from quiesce.view.openmetrics import labels_of, number
from quiesce.view.past_alerts import Evaluation, read_rules
from quiesce.view.programs import INSTALL
from quiesce.view.supervise import Command, start, stop

if TYPE_CHECKING:
    from quiesce.threads import DaemonExecutor
    from quiesce.view.folders import ShownRun
    from quiesce.view.programs import Programs

__all__ = ["BLOCK_SECONDS", "MOST_SAMPLES", "Part", "Past", "is_short", "plan", "spacing", "write_texts"]

BLOCK_SECONDS: Final = 7200
"""What a block of Prometheus' store covers."""

MOST_SAMPLES: Final = 1_500_000
"""Samples in one text: about 150 MB of it, and 250 MB of memory for ``promtool``."""

FORMAT: Final = "1"
"""Blocks of another version are made anew."""

SHORT_BYTES: Final = 8 << 20
"""Samples up to this size are read in a moment: an hour or so of a run."""

_PACKED: Final = 12
"""How much smaller compressed samples are."""

LOOKBACK: Final = (60, 300)
"""Seconds for which a recorded value holds, at least and at most."""

_KEY: Final = 24
_TMP: Final = ".tmp"


class Part(NamedTuple):
    """Two hours of one run's recording.

    Attributes:
        run: The run.
        window: The how-manieth two hours of Unix time.
        key: Names what is in it, so that the same part is not made twice.
    """

    run: ShownRun
    window: int
    key: str


@dataclass(slots=True)
class _Count:
    """What is known of a part before it is made."""

    lines: int = 0
    first: float = math.inf
    last: float = -math.inf


@dataclass(slots=True)
class _Held:
    """The series of one process as they are now, ready to be written."""

    suffix: str
    lines: dict[str, str] = field(default_factory=dict)


class Past:
    """What was recorded, as blocks.

    Args:
        past: Where blocks are kept.
        folder: Where what is in between is written; on the same disk.
        programs: Has promtool, or not.
        pool: Where files are read and written.

    Attributes:
        state: What is being done now; "" if nothing is.
        done: Parts that are made.
        total: Parts that there are.
        problems: What could not be done.
        spacing_seconds: How far apart recorded samples are at most, but for one in twenty; None if there are none.
        until_unix: When the last recorded sample was; None if there are none.
    """

    def __init__(self, past: Path, folder: Path, programs: Programs, pool: DaemonExecutor) -> None:
        self._folder = folder
        self._past = past
        self._programs = programs
        self._pool = pool
        self._process: asyncio.subprocess.Process | None = None
        self._keys: list[str] = []
        self._placed: dict[Path, set[str]] = {}
        self.state = ""
        self.done = 0
        self.total = 0
        self.problems: list[str] = []
        self.spacing_seconds: float | None = None
        self.until_unix: float | None = None
        self.lookback_seconds = LOOKBACK[0]

    async def read(self, runs: Sequence[ShownRun], rules: str, *, until_unix: float) -> None:
        """Make the blocks that are not there yet.

        Args:
            runs: The recorded runs.
            rules: The rule file's text.
            until_unix: Samples from then on are left out: Prometheus has them itself.

        Raises:
            OSError: If nothing can be written.
        """
        loop = asyncio.get_running_loop()
        self.problems.clear()
        if not runs:
            return
        if self._programs.promtool is None:
            self.problems.append(f"promtool was not found, so nothing recorded can be shown; {INSTALL}")
            return
        self.state = "the recording is being read"
        try:
            parts = await loop.run_in_executor(self._pool, self._plan, runs, until_unix)
            self.total, self.done = len(parts), 0
            for run in runs:
                await self._make([part for part in parts if part.run is run], run, until_unix)
            self._keys = [part.key for part in parts if (self._past / part.key).is_dir()]
            await self._make_alerts(rules)
            await loop.run_in_executor(self._pool, self._forget)
        finally:
            self.state = ""

    def put_into(self, data: Path) -> None:
        """Put the blocks into a store, which may be open.

        Args:
            data: The store's folder.

        Raises:
            OSError: If they cannot be put there.
        """
        placed = self._placed.setdefault(data, set())
        staging = self._folder / "staging"
        for key in self._keys:
            for block in sorted((self._past / key).iterdir()):
                if block.is_dir() and block.name not in placed:
                    shutil.rmtree(staging, ignore_errors=True)
                    shutil.copytree(block, staging, copy_function=_link)
                    staging.replace(data / block.name)
                    placed.add(block.name)

    async def stop(self) -> None:
        """End what runs."""
        if self._process is not None:
            await stop(self._process)

    # ---------------------------------------------------------------------------------------------- planning

    def _plan(self, runs: Sequence[ShownRun], until_unix: float) -> list[Part]:
        parts, gaps = [], []
        self._past.mkdir(exist_ok=True)
        for unfinished in self._past.glob(f"*{_TMP}"):
            shutil.rmtree(unfinished, ignore_errors=True)
        for run in runs:
            try:
                found, spacings, last = plan(run, until_unix)
            except (NoRecordingError, OSError) as error:
                self.problems.append(f"{run.folder.name}: {error}")
                continue
            if not found and not run.live:
                self.problems.append(f"{run.folder.name}: there are no recorded samples before now")
            if last is not None:
                self.until_unix = max(last, self.until_unix or last)
            parts += found
            gaps += spacings
        if gaps:
            self.spacing_seconds, self.lookback_seconds = spacing(gaps)
        return parts

    def _forget(self) -> None:
        """Remove what no part of the recording is any more."""
        for entry in self._past.iterdir():
            if entry.name not in self._keys:
                shutil.rmtree(entry, ignore_errors=True)

    # ------------------------------------------------------------------------------------------------ making

    async def _make(self, parts: Sequence[Part], run: ShownRun, until_unix: float) -> None:
        loop = asyncio.get_running_loop()
        missing = {part.window: part for part in parts if not (self._past / part.key).is_dir()}
        self.done += len(parts) - len(missing)
        if not missing:
            return
        text = self._folder / "samples.om"
        texts = write_texts(run, set(missing), text, until_unix)
        made = 0
        window = None
        try:
            while (following := await loop.run_in_executor(self._pool, next, texts, None)) is not None:
                if window is not None and following != window:
                    self._finish(missing[window])
                window = following
                self.state = f"the recording is being read: part {self.done + 1} of {self.total}"
                await self._create(text, self._past / (missing[window].key + _TMP))
                made += 1
            if window is not None:
                self._finish(missing[window])
        finally:
            text.unlink(missing_ok=True)

    def _finish(self, part: Part) -> None:
        (self._past / (part.key + _TMP)).replace(self._past / part.key)
        self.done += 1

    async def _create(self, text: Path, into: Path) -> None:
        """Make blocks of a text.

        Raises:
            OSError: If promtool cannot.
        """
        if self._programs.promtool is None:
            raise FileNotFoundError(INSTALL)
        await asyncio.get_running_loop().run_in_executor(self._pool, lambda: into.mkdir(exist_ok=True))
        command = Command(
            self._programs.promtool,
            ("tsdb", "create-blocks-from", "openmetrics", "--quiet", str(text), str(into)),
        )
        log = self._folder / "promtool.log"
        self._process = await start(command, self._folder, log)
        try:
            code = await self._process.wait()
        finally:
            await stop(self._process)
            self._process = None
        if code:
            told = log.read_text(errors="replace").strip().splitlines()[-1:]
            raise OSError(f"promtool could not make blocks: {told[0] if told else f'exit code {code}'}")

    # ------------------------------------------------------------------------------------------------ alerts

    async def _make_alerts(self, rules: str) -> None:
        """Evaluate the rules over the past, as Prometheus would have."""
        if not self._keys:
            return
        alerting = read_rules(rules)
        key = _digest(FORMAT, [asdict(rule) for rule in alerting], self.lookback_seconds, *self._keys)
        if (self._past / key).is_dir():
            self._keys.append(key)
            return
        self.state = "the rules are evaluated over the recording"
        loop = asyncio.get_running_loop()
        data = self._folder / "evaluation"
        shutil.rmtree(data, ignore_errors=True)
        data.mkdir()
        text = self._folder / "alerts.om"
        evaluation = Evaluation(self._folder, self._programs.prometheus, self._pool, self.lookback_seconds)
        try:
            await loop.run_in_executor(self._pool, self.put_into, data)
            made = await evaluation.write(alerting, data, text, step=max(5.0, self.spacing_seconds or 15.0))
            into = self._past / (key + _TMP)
            into.mkdir(exist_ok=True)
            if made:
                await self._create(text, into)
            into.replace(self._past / key)
            self._keys.append(key)
        except OSError as error:
            self.problems.append(f"alerts of the past are not shown: {error}")
        finally:
            await evaluation.stop()
            self._placed.pop(data, None)
            shutil.rmtree(data, ignore_errors=True)
            text.unlink(missing_ok=True)


def plan(run: ShownRun, until_unix: float) -> tuple[list[Part], list[float], float | None]:
    """Return the parts of a run's recording, how far apart its samples are, and when the last one was.

    Also tells the run when it began and when it was last recorded.

    Args:
        run: The run.
        until_unix: Samples from then on do not count.

    Raises:
        NoRecordingError: If there is no recording.
    """
    counts: dict[int, _Count] = {}
    times: dict[str, list[float]] = {}
    for sample in Recording.open(run.folder).samples():
        at = sample.unix_time
        if at >= until_unix:
            continue
        count = counts.setdefault(int(at // BLOCK_SECONDS), _Count())
        count.lines += 1
        count.first, count.last = min(count.first, at), max(count.last, at)
        times.setdefault(sample.file.writer.ident, []).append(at)
    gaps = [later - earlier for each in times.values() for earlier, later in pairwise(each)]
    last = None
    if counts:
        run.first_unix = min(count.first for count in counts.values())
        last = max(count.last for count in counts.values())
        run.last_unix = last if run.last_unix is None else max(run.last_unix, last)
    parts = [
        Part(
            run,
            window,
            _digest(
                FORMAT, run.name, run.instance, window, count.lines, f"{count.first:.3f}", f"{count.last:.3f}"
            ),
        )
        for window, count in sorted(counts.items())
    ]
    return parts, gaps, last


def spacing(gaps: Sequence[float]) -> tuple[float, int]:
    """Return how far apart recorded samples are, and for how long a value holds, in seconds.

    A recorder takes its time as a run gets longer. A rate has to find two samples wherever it looks, so what counts is
    how wide gaps are, but for one in twenty, and not how wide they usually are. Whole seconds, because it becomes the
    step of queries.

    Args:
        gaps: Seconds between one sample and the next; at least one.
    """
    wide = sorted(gaps)[int(0.95 * (len(gaps) - 1))]
    return float(max(1, math.ceil(wide - 0.1))), round(min(max(2.5 * wide, LOOKBACK[0]), LOOKBACK[1]))


def write_texts(
    run: ShownRun, windows: set[int], path: Path, until_unix: float, most: int = MOST_SAMPLES
) -> Iterator[int]:
    """Write the samples of some parts as OpenMetrics text, one text after the other into the same file.

    Args:
        run: The run.
        windows: The parts' numbers.
        path: The file; what is in it has to be used before the next is asked for.
        until_unix: Samples from then on are left out.
        most: About how many samples a text has at most.

    Yields:
        The number of the part that the text in the file belongs to.

    Raises:
        OSError: If the file cannot be written.
    """
    held: dict[Writer, _Held] = {}
    latest: dict[str, float] = {}
    recording = Recording.open(run.folder)
    samples = recording.samples()
    pending: list[str] = []
    window, count = -1, 0
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(path.open("w", encoding="utf-8", errors="backslashreplace"))
        for sample in samples:
            at, writer = sample.unix_time, sample.file.writer
            if at >= until_unix:
                break
            now = held.setdefault(writer, _Held(_suffix(run, writer)))
            _take(now, sample.values, complete=sample.complete)
            number = int(at // BLOCK_SECONDS)
            if number != window or count > most:
                if count:
                    file.write("# EOF\n")
                    file.flush()
                    yield window
                    file.seek(0)
                    file.truncate()
                window, count = number, 0
            if number not in windows or at <= latest.get(writer.role, -math.inf):
                continue  # two samples of a series at one time would be refused
            latest[writer.role] = at
            stamp = f" {at:.3f}\n"
            pending.clear()
            pending.extend(now.lines.values())
            pending.append(f"up{{{labels_of({'job': JOB, 'instance': instance_of(run, writer.role)})}}} 1")
            file.write(stamp.join(pending))
            file.write(stamp)
            count += len(pending)
        if count:
            file.write("# EOF\n")
            file.flush()
            yield window


def _suffix(run: ShownRun, writer: Writer) -> str:
    return labels_of(
        {"run": run.name, "role": writer.role, "instance": instance_of(run, writer.role), "job": JOB}
    )


def _take(now: _Held, values: Mapping[str, float | None], *, complete: bool) -> None:
    if complete:
        now.lines.clear()
    for key, value in values.items():
        if value is None:
            now.lines.pop(key, None)
            continue
        name, labels = series(key)
        own = labels_of(labels)
        now.lines[key] = f"{name}{{{own}{',' if own else ''}{now.suffix}}} {number(value)}"


def is_short(runs: Sequence[ShownRun]) -> bool:
    """Return whether everything that was recorded is read in a moment.

    Args:
        runs: The recorded runs.
    """
    size = 0
    for run in runs:
        with contextlib.suppress(NoRecordingError, OSError):
            for file in Recording.open(run.folder).files:
                if file.stream == "samples":
                    size += file.path.stat().st_size * (_PACKED if file.path.suffix == ".gz" else 1)
    return size < SHORT_BYTES


def _digest(*about: object) -> str:
    return hashlib.sha256(json.dumps(about, default=str).encode()).hexdigest()[:_KEY]


def _link(source: str, target: str) -> None:
    """Link a file, or copy it where the file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
