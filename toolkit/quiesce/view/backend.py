"""Prometheus, Alertmanager and the run folders that they look at, as one thing with a beginning and an end.

Rule: everything is written below one folder, which a lock keeps for one process; both programs listen on loopback,
send nothing anywhere, and are gone when :meth:`Backend.stop` returns, or when this process is. What is wrong is told
by :meth:`Backend.info`, and never ends the rest. ``begin``, ``stop`` and the tasks suspend; everything else blocks
for the time of a file or a local request, and is called on threads named ``quiesce-view``.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import http.client
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final

import yaml

from quiesce.errors import ViewError
from quiesce.telemetry.discovery import write_atomically
from quiesce.telemetry.enable import ENDPOINT_FILE
from quiesce.threads import DaemonExecutor
from quiesce.view.backfill import Past, is_short
from quiesce.view.exemplars import ExemplarIndex
from quiesce.view.folders import JOB, Folders, ShownRun, newer_runs, require_run
from quiesce.view.past_alerts import ask_range
from quiesce.view.programs import INSTALL, Programs, prepare_alertmanager
from quiesce.view.supervise import Command, Supervised

__all__ = ["DATA_FOLDER", "Backend", "Content", "ViewSettings"]

DATA_FOLDER: Final = "view"
"""The folder of a run that everything is written into."""

PAST_FOLDER: Final = "past"
"""Its part that is kept: what was made of a recording."""

LOOK_SECONDS: Final = 1.0
"""How often run folders are looked at."""

APPEAR_SECONDS: Final = 2.0
"""How often Prometheus is asked whether it has found the blocks that were put into its store."""

APPEAR_TRIES: Final = 45
"""How often at most."""

RECORDED_SECONDS: Final = 15.0
"""How far apart the recorder's samples are, where there are too few to tell."""

RETENTION: Final = ("--storage.tsdb.retention.time=3650d", "--storage.tsdb.retention.size=4GB")
"""A recorded run may be years old; the disk is the run's."""

_NOW: Final = "now"
"""What begins empty at each start, and is gone at the end."""

_MADE: Final = ("data", "targets", "alertmanager-data")
_LOCK: Final = "lock"
_POOL: Final = "quiesce-view"
_THREADS: Final = 24
_LOG: Final = logging.getLogger("quiesce.view")


@dataclass(frozen=True, slots=True)
class Content:
    """What is shown, independent of any run.

    Attributes:
        dashboards: JSON of each dashboard by uid, in the order in which they are listed.
        rules: Returns the rule file's text, given the address that a runbook's name is appended to.
        documentation: Address of the runbooks in the documentation on the web.
        alert_of: Returns the name of the alert, and of the runbook, that stands for an invariant.
    """

    dashboards: Mapping[str, str]
    rules: Callable[[str], str]
    documentation: str
    alert_of: Callable[[str], str]


@dataclass(frozen=True, slots=True)
class ViewSettings:
    """How it is shown.

    Attributes:
        interval_seconds: How often a run is scraped.
        address: Where the page is served: ``http://127.0.0.1:PORT``.
        watch: A folder of runs; one that starts there later is shown too. None watches none.
        data: Where to write; None takes the folder ``view`` of the first run, or a temporary one if that cannot be written.
    """

    address: str
    interval_seconds: float = 1.0
    watch: Path | None = None
    data: Path | None = None


@dataclass(slots=True)
class _Place:
    """The folder that is written into, and what gives it back."""

    folder: Path
    lock: IO[str]
    temporary: bool = False
    problems: list[str] = field(default_factory=list)


class Backend:
    """What answers the page.

    Args:
        folders: Run folders, at least one.
        programs: What to start.
        content: Dashboards and rules.
        settings: How it is shown.

    Attributes:
        content: Dashboards and rules.
        pool: Where blocking work is done.
        runs: The run folders.

    Raises:
        ViewError: If a folder is no run's, or another process shows it already.
    """

    def __init__(
        self, folders: list[Path], programs: Programs, content: Content, settings: ViewSettings
    ) -> None:
        folders = [require_run(folder) for folder in folders]
        self.content = content
        self.pool = DaemonExecutor(_POOL, _THREADS)
        self._programs = programs
        self._settings = settings
        self._place = _take(folders[0], settings)
        self._folder = self._place.folder / _NOW
        shutil.rmtree(self._folder, ignore_errors=True)
        for name in _MADE:
            (self._folder / name).mkdir(parents=True)
        self._targets = self._folder / "targets"
        self._senders = self._folder / "alertmanagers.json"
        self.runs = Folders(self._targets)
        try:
            for folder in folders:
                if folder not in self.runs:
                    self.runs.add(folder)
            self._rules = content.rules(f"{settings.address}/runbooks")
            self._write_configuration()
        except BaseException:
            self._give_back()
            raise
        self.past = Past(self._place.folder / PAST_FOLDER, self._folder, programs, self.pool)
        self._prometheus = Supervised("Prometheus", self._prometheus_command, self._folder, self.pool)
        self._alertmanager = Supervised("Alertmanager", self._alertmanager_command, self._folder, self.pool)
        self._exemplars = ExemplarIndex()
        self._prepared = False
        self._began_unix = time.time()
        self._tasks: list[asyncio.Task[None]] = []
        self._seen = set(newer_runs(settings.watch)) if settings.watch is not None else set()

    # ------------------------------------------------------------------------------------------------- life

    async def begin(self) -> None:
        """Start everything; return at once. What is not ready yet is told by :meth:`info`."""
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self._prepare()), loop.create_task(self._watch())]

    async def stop(self) -> None:
        """End everything that was started."""
        self._exemplars.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(self._prometheus.stop(), self._alertmanager.stop(), self.past.stop())
        self._give_back()
        self.pool.shutdown(wait=False, cancel_futures=True)

    async def _prepare(self) -> None:
        """Read what was recorded, and start the programs."""
        loop = asyncio.get_running_loop()
        if self._programs.alertmanager is None:
            self._alertmanager.error = f"Alertmanager was not found; {INSTALL}"
        else:
            self._alertmanager.begin()
        with contextlib.suppress(OSError):  # the watch says so, each second
            await loop.run_in_executor(self.pool, self.runs.look)
        self._began_unix = time.time()
        # Of a run that goes on, the present comes first, unless the past is read in a moment.
        recorded = [shown for shown in self.runs if shown.recorded]
        live = any(shown.live for shown in self.runs)
        first = not live or await loop.run_in_executor(self.pool, is_short, recorded)
        if first:
            await self._read(recorded)
        self._prepared = True
        self._prometheus.begin()
        if not first:
            await self._read(recorded)
        await loop.run_in_executor(self.pool, self._exemplars.read, recorded, self._began_unix)
        if not first:
            await self._appear()

    async def _read(self, recorded: list[ShownRun]) -> None:
        """Give Prometheus what was recorded; one that runs already finds it within a minute."""
        loop = asyncio.get_running_loop()
        try:
            await self.past.read(recorded, self._rules, until_unix=self._began_unix)
            await loop.run_in_executor(self.pool, self.past.put_into, self._folder / "data")
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever is wrong with the past, the present can be shown
            _LOG.exception("the recording cannot be shown")
            self.past.problems.append(f"the recording cannot be shown: {error}")

    async def _appear(self) -> None:
        """Say that the past is still to come until Prometheus has found it, which it looks for once a minute."""
        until = self.past.until_unix
        if until is None:
            return
        self.past.state = "what was recorded is there within a minute"
        try:
            for _ in range(APPEAR_TRIES):
                if await asyncio.get_running_loop().run_in_executor(self.pool, self._is_there, until):
                    break
                await asyncio.sleep(APPEAR_SECONDS)
        finally:
            self.past.state = ""

    def _is_there(self, at_unix: float) -> bool:
        try:
            return bool(ask_range(self._prometheus.port, f'up{{job="{JOB}"}}', at_unix, at_unix, 1.0))
        except (OSError, ValueError, KeyError, http.client.HTTPException):
            return False

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                await loop.run_in_executor(self.pool, self._look)
            except OSError as error:
                _LOG.warning("the run folders cannot be looked at: %s", error)

    def _look(self) -> None:
        if self._settings.watch is not None:
            for folder in newer_runs(self._settings.watch):
                if folder not in self.runs and (folder not in self._seen or self._began_again(folder)):
                    self._seen.add(folder)
                    with contextlib.suppress(ViewError):
                        self.runs.add(folder)
                        _LOG.warning("a run began: %s is shown too", folder)
        self.runs.look()

    def _began_again(self, folder: Path) -> bool:
        try:
            return (folder / ENDPOINT_FILE).stat().st_mtime > self._began_unix
        except OSError:
            return False

    def _give_back(self) -> None:
        shutil.rmtree(self._place.folder if self._place.temporary else self._folder, ignore_errors=True)
        self._place.lock.close()

    # ---------------------------------------------------------------------------------------- what is started

    def _write_configuration(self) -> None:
        folder, interval = self._folder, _duration(self._settings.interval_seconds)
        (folder / "rules.yml").write_text(self._rules, encoding="utf-8")
        job: dict[str, Any] = {
            "job_name": JOB,
            "file_sd_configs": [{"files": [f"{self._targets}/*.json"], "refresh_interval": "2s"}],
            # Where a target has a label `run` of its own, two runs share a name; what the run says goes.
            "metric_relabel_configs": [{"action": "labeldrop", "regex": "exported_run"}],
        }
        configuration = {
            "global": {
                "scrape_interval": interval,
                "scrape_timeout": interval,
                "evaluation_interval": _duration(max(1.0, self._settings.interval_seconds)),
            },
            "rule_files": [str(folder / "rules.yml")],
            "alerting": {
                "alertmanagers": [
                    {"file_sd_configs": [{"files": [str(self._senders)], "refresh_interval": "2s"}]}
                ]
            },
            "scrape_configs": [job],
        }
        (folder / "prometheus.yml").write_text(yaml.safe_dump(configuration), encoding="utf-8")
        # One receiver that does nothing: alerts are to be looked at, nobody is to be paged twice.
        silent = {"route": {"receiver": "page", "group_by": ["..."]}, "receivers": [{"name": "page"}]}
        (folder / "alertmanager.yml").write_text(yaml.safe_dump(silent), encoding="utf-8")

    def _prometheus_command(self, port: int) -> Command:
        folder = self._folder
        return Command(
            self._programs.prometheus,
            (
                f"--config.file={folder / 'prometheus.yml'}",
                f"--storage.tsdb.path={folder / 'data'}",
                *RETENTION,
                f"--web.listen-address=127.0.0.1:{port}",
                f"--web.external-url=http://127.0.0.1:{port}/",
                "--web.cors.origin=none",
                "--enable-feature=exemplar-storage",
                f"--query.lookback-delta={self.past.lookback_seconds}s",
            ),
        )

    def _alertmanager_command(self, port: int) -> Command:
        folder = self._folder
        found = self._programs.alertmanager
        if found is None:
            raise FileNotFoundError(INSTALL)
        program = prepare_alertmanager(found, folder)
        write_atomically(self._senders, json.dumps([{"targets": [f"127.0.0.1:{port}"]}]).encode())
        return Command(
            program,
            (
                f"--config.file={folder / 'alertmanager.yml'}",
                f"--storage.path={folder / 'alertmanager-data'}",
                f"--web.listen-address=127.0.0.1:{port}",
                f"--web.external-url=http://127.0.0.1:{port}/",
                "--cluster.listen-address=",
            ),
        )

    # ------------------------------------------------------------------------------------------- what is asked

    @property
    def prometheus_url(self) -> str | None:
        """Where Prometheus answers; None while it does not."""
        return self._prometheus.url if self._prometheus.ok else None

    @property
    def alertmanager_url(self) -> str | None:
        """Where Alertmanager answers; None while it does not."""
        return self._alertmanager.url if self._alertmanager.ok else None

    @property
    def prometheus_error(self) -> str:
        """Why Prometheus does not answer; "" while it does."""
        if not self._prepared:
            return self.past.state or "the recording is being read"
        return f"Prometheus: {self._prometheus.error}" if self._prometheus.error else ""

    @property
    def alertmanager_error(self) -> str:
        """Why Alertmanager does not answer; "" while it does."""
        return f"Alertmanager: {self._alertmanager.error}" if self._alertmanager.error else ""

    @property
    def pids(self) -> tuple[int, ...]:
        """Processes that run now."""
        return tuple(pid for pid in (self._prometheus.pid, self._alertmanager.pid) if pid)

    def info(self) -> dict[str, Any]:
        """Return what is shown, and what is wrong."""
        from quiesce import __version__

        runs = list(self.runs)
        live = any(shown.live for shown in runs)
        first = [shown.first_unix for shown in runs if shown.first_unix is not None]
        last = [shown.last_unix for shown in runs if shown.last_unix is not None]
        newest = max(runs, key=lambda shown: (shown.live, shown.last_unix or 0.0))
        return {
            "version": __version__,
            "run_dir": str(newest.folder),
            "recorded": any(shown.recorded for shown in runs),
            "live": live,
            "run": newest.name or None,
            "runs": [_told(shown) for shown in runs],
            "prometheus": {"ok": not self.prometheus_error, "error": self.prometheus_error},
            "alertmanager": {"ok": not self.alertmanager_error, "error": self.alertmanager_error},
            "from": min(first) if first else None,
            "to": None if live or not last else max(last),
            "scrape_interval": self._interval(runs),
            "now": time.time(),
            "past": {
                "state": self.past.state,
                "done": self.past.done,
                "total": self.past.total,
                "spacing": self.past.spacing_seconds,
                "until": self.past.until_unix,
                "problems": [*self._place.problems, *self.past.problems],
            },
        }

    def _interval(self, runs: list[ShownRun]) -> float:
        """Return how far apart samples are: of a recording alone, the recorder's."""
        scraped = any(shown.scraped for shown in runs)
        return self._settings.interval_seconds if scraped else self.past.spacing_seconds or RECORDED_SECONDS

    def exemplars(self, query: str, begin: float, end: float) -> list[dict[str, Any]]:
        """Return exemplars from recorded spans, as Prometheus would, up to when it began to look itself."""
        return self._exemplars.find(query, begin, end)


def _told(shown: ShownRun) -> dict[str, Any]:
    return {
        "folder": str(shown.folder),
        "run": shown.name or None,
        "instance": shown.instance,
        "recorded": shown.recorded,
        "live": shown.live,
        "from": shown.first_unix,
        "to": shown.last_unix,
    }


def _duration(seconds: float) -> str:
    return f"{round(seconds * 1000)}ms"


def _take(run: Path, settings: ViewSettings) -> _Place:
    """Return the folder to write into, locked.

    Raises:
        ViewError: If another process has it, or a named one cannot be written.
    """
    folder = run / DATA_FOLDER if settings.data is None else settings.data
    problem = ""
    try:
        folder.mkdir(parents=settings.data is not None, exist_ok=True)
        place = _Place(folder.resolve(), (folder / _LOCK).open("a+"))
    except OSError as error:
        if settings.data is not None:
            raise ViewError(
                f"{folder} cannot be written ({error.strerror})", "name another one with --data"
            ) from error
        problem = f"{folder} cannot be written ({error.strerror}), so a temporary folder is used"
        folder = Path(tempfile.mkdtemp(prefix="quiesce-view-"))
        place = _Place(folder, (folder / _LOCK).open("a+"), temporary=True, problems=[problem])
    try:
        fcntl.flock(place.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        place.lock.seek(0)
        other = place.lock.read().strip() or "another process"
        place.lock.close()
        raise ViewError(f"{run} is shown already, at {other}", "open that, or end it first") from error
    place.lock.truncate(0)
    place.lock.write(f"{settings.address} (process {os.getpid()})\n")
    place.lock.flush()
    return place
