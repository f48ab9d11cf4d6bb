"""The run folders that are shown: what each is called, whether it runs now, and the target that Prometheus scrapes.

Rule: a folder is only read. A target is listed from the first time that its endpoint answers until the run takes its
``metrics.json`` away; a run that is killed leaves the file behind, stays a target, and is reported as down. A run
that starts again is the same target at another address. Everything blocks for at most :data:`ASK_SECONDS` a folder.
"""

from __future__ import annotations

import http.client
import json
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from quiesce.errors import NoRecordingError, ViewError
from quiesce.telemetry.discovery import write_atomically
from quiesce.telemetry.enable import ENDPOINT_FILE
from quiesce.telemetry.recording import FOLDER, Recording, series

__all__ = [
    "ASK_SECONDS",
    "JOB",
    "Folders",
    "ShownRun",
    "find_newest",
    "instance_of",
    "is_run",
    "newer_runs",
    "require_run",
]

JOB: Final = "quiesce"
"""The label ``job`` of everything."""

ASK_SECONDS: Final = 2.0
_MOST: Final = 32 << 20
_MARKS: Final = ("config.yaml", "incarnation", "lineage.jsonl", ENDPOINT_FILE, FOLDER)
_INFO: Final = re.compile(r"^quiesce_run_info(\{.*\}) ", re.MULTILINE)


def is_run(folder: Path) -> bool:
    """Return whether a folder looks like a run's."""
    return folder.is_dir() and any((folder / name).exists() for name in _MARKS)


def require_run(folder: Path) -> Path:
    """Return the real path of a run folder.

    Raises:
        ViewError: If it is none.
    """
    if not folder.is_dir():
        raise ViewError(f"{folder} is not a folder", "name the folder of a run")
    folder = folder.resolve()
    if not is_run(folder):
        raise ViewError(
            f"{folder} is not the folder of a run",
            f"one that runs has a {ENDPOINT_FILE}, one that was recorded a folder {FOLDER}/",
        )
    return folder


def newer_runs(runs: Path) -> list[Path]:
    """Return the run folders in a folder of runs, the one that was last active first."""
    found = [entry for entry in runs.iterdir() if is_run(entry)] if runs.is_dir() else []
    return sorted(found, key=_last_active, reverse=True)


def find_newest(runs: Path) -> Path | None:
    """Return the run folder that was last active, or None."""
    found = newer_runs(runs)
    return found[0] if found else None


def _last_active(folder: Path) -> float:
    times = [0.0]
    for name in (*_MARKS, "log.jsonl"):
        try:
            times.append((folder / name).stat().st_mtime)
        except OSError:
            continue
    return max(times)


@dataclass(slots=True)
class ShownRun:
    """A run folder that is shown.

    Attributes:
        folder: Where it is.
        run: What the run calls itself; "" until that is known.
        name: The label ``run`` of its series: the run's own name, or that with the folder's where two share it.
        instance: The label ``instance`` of its series: the same before and after a restart.
        recorded: Whether it has a recording.
        live: Whether its endpoint answered the last time it was asked.
        scraped: Whether it was live at any time since it is shown.
        address: ``host:port`` of its target; "" if there is none.
        first_unix: When it is known to have begun; None if that is not known.
        last_unix: When it was last known to run, or recorded last.
        path: Path of its metrics.
        seen: What its ``metrics.json`` said when it answered.
    """

    folder: Path
    run: str = ""
    name: str = ""
    instance: str = ""
    recorded: bool = False
    live: bool = False
    scraped: bool = False
    address: str = ""
    first_unix: float | None = None
    last_unix: float | None = None
    path: str = "/metrics"
    seen: bytes = field(default=b"", repr=False)

    @property
    def labels(self) -> dict[str, str]:
        """Labels that its target has: the run's name only where it has to be told from another."""
        renamed = {"run": self.name} if self.name != self.run else {}
        return {"job": JOB, "instance": self.instance, "__metrics_path__": self.path, **renamed}


def instance_of(run: ShownRun, role: str) -> str:
    """Return the label ``instance`` of what a process recorded: one that is not the controller has its own.

    Args:
        run: The run.
        role: What the process was in it.
    """
    return run.instance if role in {"", "controller"} else f"{run.instance}/{role}"


class Folders:
    """All run folders that are shown.

    Args:
        targets: The folder for the targets' files; it must exist before :meth:`look` is called.
    """

    def __init__(self, targets: Path) -> None:
        self._targets = targets
        self.runs: list[ShownRun] = []

    def __iter__(self) -> Iterator[ShownRun]:
        """Yield the runs, in the order in which they were added."""
        return iter(self.runs)

    def __contains__(self, folder: Path) -> bool:
        """Whether that folder is shown."""
        return any(shown.folder == folder.resolve() for shown in self.runs)

    def add(self, folder: Path) -> ShownRun:
        """Show one more folder.

        Raises:
            ViewError: If it is no run's.
        """
        folder = require_run(folder)
        shown = ShownRun(folder)
        shown.instance = self._unique(folder.name or "run", [other.instance for other in self.runs])
        self._find_recording(shown)
        self.runs.append(shown)
        return shown

    def look(self) -> bool:
        """Ask every run whether it still goes on, and write its target down.

        Returns:
            Whether anything changed.
        """
        changes = [self._look(index, shown) for index, shown in enumerate(self.runs)]
        return any(changes)

    def _look(self, index: int, shown: ShownRun) -> bool:
        before = (shown.address, shown.live, shown.name)
        if not shown.recorded:
            self._find_recording(shown)
        try:
            told = (shown.folder / ENDPOINT_FILE).read_bytes()
        except OSError:
            told = b""
        if not told:
            shown.address, shown.live, shown.seen = "", False, b""
            (self._targets / f"{index}.json").unlink(missing_ok=True)
            return before != (shown.address, shown.live, shown.name)
        address, path = _address(told)
        if told != shown.seen or not shown.run:
            run = _ask(address, path) if address else None
            shown.live = run is not None
            if run is not None:
                shown.seen, shown.address, shown.path, shown.scraped = told, address, path, True
                if not shown.run:
                    self._name(shown, run)
                line = [{"targets": [address], "labels": shown.labels}]
                write_atomically(self._targets / f"{index}.json", (json.dumps(line) + "\n").encode())
        else:
            shown.live = _get(address, "/healthz", 1 << 16) is not None
        if shown.live:
            shown.last_unix = time.time()
            shown.first_unix = shown.last_unix if shown.first_unix is None else shown.first_unix
        return before != (shown.address, shown.live, shown.name)

    def _find_recording(self, shown: ShownRun) -> None:
        try:
            recording = Recording.open(shown.folder)
        except NoRecordingError:
            return
        shown.recorded = True
        if not shown.run:
            self._name(shown, recording.writers[-1].run)

    def _name(self, shown: ShownRun, run: str) -> None:
        shown.run = run
        shown.name = self._unique(
            run, [other.name for other in self.runs if other is not shown], f"{run} ({shown.instance})"
        )

    @staticmethod
    def _unique(wanted: str, taken: list[str], otherwise: str = "") -> str:
        candidate, count = wanted, 1
        while candidate in taken:
            count += 1
            candidate, otherwise = (otherwise, "") if otherwise else (f"{wanted} {count}", "")
        return candidate


def _address(told: bytes) -> tuple[str, str]:
    """Return ``host:port`` and the path of an endpoint; both empty if it names none."""
    try:
        parts = urlsplit(json.loads(told)["url"])
        if parts.scheme == "http" and parts.hostname and parts.port:
            return parts.netloc.rpartition("@")[2], parts.path or "/metrics"
    except (ValueError, KeyError, TypeError, AttributeError):
        pass
    return "", ""


def _ask(address: str, path: str) -> str | None:
    """Return the run's name, if a run answers there."""
    content = _get(address, path, _MOST)
    found = None if content is None else _INFO.search(content.decode(errors="replace"))
    if found is None:
        return None
    _, labels = series("quiesce_run_info" + found[1])
    return labels.get("run") or None


def _get(address: str, path: str, most: int) -> bytes | None:
    connection = http.client.HTTPConnection(address, timeout=ASK_SECONDS)
    try:
        connection.request("GET", path)
        answer: Any = connection.getresponse()
        content: bytes = answer.read(most)
        return content if answer.status == http.HTTPStatus.OK else None
    except (OSError, http.client.HTTPException, ValueError):
        return None
    finally:
        connection.close()
