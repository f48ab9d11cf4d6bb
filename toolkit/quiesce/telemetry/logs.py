"""The run's log: one JSON object a line in the run folder, and a readable form for people.

Rule: a line that cannot be written is counted, and said once on the console. Otherwise as
:mod:`quiesce.telemetry.event_log`, which makes the events, has it. Writing a line may block for as long as a write to
the page cache does; nothing here suspends.

Lines are appended with one unbuffered write each, so that several processes and threads may share the file, a
killed run loses none, and a forked child inherits neither a lock nor half a line.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final

from quiesce.telemetry.event_log import ABOUT, LEVELS, EventLog
from quiesce.telemetry.log_names import log_event
from quiesce.telemetry.undrawn import structlog
from quiesce.types import PHASES

__all__ = ["LOG_FILE", "LogObserver", "RunLog", "configure_run_log"]

LOG_FILE: Final = "log.jsonl"
"""The file of a run folder that holds its log."""


class RunLog(EventLog):
    """A run's open log. Made by :func:`configure_run_log`; call it for a logger.

    Args:
        path: The file that lines are appended to.
        run: The run's name.
        role: What this process is in the run.
        level: The least level that is written.
        console: Where the readable form goes, or None.
        console_level: The least level that is shown there.

    Attributes:
        path: The file.
        dropped: Lines that could not be written.
    """

    def __init__(
        self,
        path: Path,
        *,
        run: str,
        role: str,
        level: int,
        console: IO[str] | None,
        console_level: int,
    ) -> None:
        self.path = path
        self.dropped = 0
        self._console = console
        self._console_level = console_level
        colours = console is not None and console.isatty()
        self._render = structlog.dev.ConsoleRenderer(
            colors=colours, sort_keys=False, exception_formatter=structlog.dev.plain_traceback
        )
        self._file = path.open("ab", buffering=0)
        super().__init__(run=run, role=role, level=level, passes_on=False)

    def close(self) -> None:
        """Close the file; later lines are dropped and counted. Closing twice changes nothing."""
        super().close()
        self._file.close()

    def _write(self, event: Mapping[str, Any]) -> None:
        try:
            self._file.write(_line(event).encode())
        except (OSError, ValueError) as problem:  # a full disk, or a closed file
            self.dropped += 1
            if self.dropped == 1 and self._console is not None:
                _say(self._console, f"the run's log {self.path} cannot be written: {problem}\n")

    def _show(self, event: Mapping[str, Any]) -> None:
        if self._console is not None and LEVELS[event["level"].upper()] >= self._console_level:
            _say(self._console, f"{self._readable(event)}\n")

    def _readable(self, event: Mapping[str, Any]) -> str:
        fields = {name: value for name, value in event.items() if name not in self._bound}
        fields["timestamp"] = fields["timestamp"][11:19]
        return str(self._render(None, "", fields))


class LogObserver:
    """Writes what hooks report to a run's log: attempts to save, restores, states, and whatever went wrong.

    Args:
        log: The run's log, or what hands its events on.
    """

    def __init__(self, log: EventLog) -> None:
        self._log = log
        self._logger = log()
        self._phases: dict[str, dict[str, float]] = {}  # cut id -> seconds by phase

    def _emit(self, event: str, /, *about: str, **fields: Any) -> None:  # noqa: ANN401 - a log field is any value
        """Write an event; ``about`` has the names of what has a span, if it is not the cut."""
        entry = log_event(event)
        said = {name: value for name, value in fields.items() if value is not None and value != ""}
        if about:
            said[ABOUT] = about
        self._logger.log(LEVELS[entry.level.upper()], entry.name, **said)

    def window_requested(self, window_id: str, asked_ns: int) -> None:
        """Name the cut in the lines to come."""
        self._log.now(cut_id=window_id)

    def window_opened(
        self,
        window_id: str,
        drain_ns: int,
        delayed_by: tuple[tuple[str, str, int, int], ...],
        opened_ns: int,
    ) -> None:
        """Remember the drain."""
        self._note(window_id, "drain", drain_ns)

    def window_closed(
        self, window_id: str, drain_ns: int, exclusive_ns: int, outcome: str, closed_ns: int
    ) -> None:
        """Remember the exclusive phase."""
        self._note(window_id, "exclusive", exclusive_ns)

    def window_abandoned(
        self,
        window_id: str,
        drain_ns: int,
        outcome: str,
        delayed_by: tuple[tuple[str, str, int, int], ...],
        ended_ns: int,
    ) -> None:
        """Say who held the checkpoint up."""
        self._note(window_id, "drain", drain_ns)
        self._emit(
            "window.given_up",
            cut_id=window_id,
            outcome=outcome,
            drain_seconds=drain_ns / 1e9,
            delayed_by=[
                {"kind": kind, "task": task, "seconds": (end - start) / 1e9}
                for kind, task, start, end in delayed_by
            ],
        )
        self._log.now(cut_id=None)

    def phase_ended(self, cut_id: str, phase: str, ns: int, outcome: str) -> None:
        """Remember the phase."""
        if phase not in {"drain", "exclusive"}:  # the barrier reports them, also where nothing is saved
            self._note(cut_id, phase, ns)

    def _note(self, cut_id: str, phase: str, ns: int) -> None:
        while len(self._phases) > 2 * len(PHASES):  # cuts of a program that never says how a save ended
            del self._phases[next(iter(self._phases))]
        self._phases.setdefault(cut_id, {})[phase] = ns / 1e9

    def checkpoint_ended(
        self,
        cut_id: str,
        step: int,
        outcome: str,
        reason: str,
        groups: Mapping[str, int],
        rows: int,
        num_bytes: int,
    ) -> None:
        """Say how an attempt to save ended."""
        phases = self._phases.pop(cut_id, {})
        if outcome == "completed":
            self._emit(
                "checkpoint.published",
                cut_id=cut_id,
                step=step,
                drain_seconds=phases.get("drain"),
                exclusive_seconds=phases.get("exclusive"),
                groups=dict(groups),
                rows=rows,
                bytes=num_bytes,
                phases=phases,
            )
        elif outcome == "skipped":
            self._emit("checkpoint.skipped", cut_id=cut_id, step=step, reason=reason)
        else:
            self._emit(
                "checkpoint.not_published",
                cut_id=cut_id,
                step=step,
                outcome=outcome,
                reason=reason,
                groups=dict(groups),
                phases=phases,
            )
        self._log.now(cut_id=None)

    def trainer_stalled(self, cause: str, ns: int) -> None:
        """Say that saving held the trainer up."""
        self._emit("trainer.stalled", cause=cause, seconds=ns / 1e9)

    def sampler_fell_back(self, sampler: str) -> None:
        """Say that a sampler admits in one piece."""
        self._emit("sampler.fell_back", sampler=sampler)

    def train_step_ended(
        self, step: int, version: int, ns: int, groups: int, outcome: str, metrics: Mapping[str, float]
    ) -> None:
        """Name the step in the lines to come."""
        self._log.now(step=step)
        self._emit(
            "train.step",
            f"step {step}",
            version=version,
            seconds=ns / 1e9,
            groups=groups,
            outcome=outcome,
            metrics=dict(metrics),
        )

    def restore_ended(
        self, outcome: str, reason: str, parts: Mapping[str, int], groups: Mapping[str, int]
    ) -> None:
        """Say how a restore ended."""
        seconds = {part: ns / 1e9 for part, ns in parts.items()}
        if outcome == "completed":
            self._emit("restore.completed", "restore", groups=dict(groups), parts=seconds)
        else:
            self._emit("restore.refused", "restore", outcome=outcome, reason=reason, parts=seconds)

    def invariant_violated(self, violation: Any) -> None:  # noqa: ANN401 - a Violation, as the hook says
        """Say what does not hold, with its evidence."""
        fields = log_event("invariant.violated").fields
        said = {name: getattr(violation, name, None) for name in (*fields, "cut_id")}
        self._emit("invariant.violated", said["cut_id"] or "", *(said["groups"] or ()), **said)

    def stalled(self, what: str, group_id: str, age_seconds: float) -> None:
        """Say what the run waits for."""
        self._emit("run.stalled", group_id, what=what, group_id=group_id, age_seconds=age_seconds)

    def run_state_changed(self, state: str) -> None:
        """Say what the run does."""
        self._emit("run.state", state=state)


def configure_run_log(
    run_dir: Path | str,
    level: str = "info",
    *,
    run: str,
    role: str = "controller",
    console: IO[str] | None = None,
    console_level: str = "warning",
) -> RunLog:
    """Open the log of a run folder.

    Args:
        run_dir: An existing folder; lines are appended to ``log.jsonl`` in it.
        level: The least level that is written: ``debug``, ``info``, ``warning``, ``error`` or ``critical``.
        run: The run's name.
        role: What this process is in the run.
        console: Where the readable form goes (``sys.stderr``, say); None shows nothing. Escape codes are used
            only where it is a terminal.
        console_level: The least level that is shown there.

    Returns:
        The log; call it for a logger, give it to a :class:`LogObserver`, close it at the end.

    Raises:
        ValueError: If a level is not one of these.
        OSError: If the file cannot be opened.
    """
    return RunLog(
        Path(run_dir) / LOG_FILE,
        run=run,
        role=role,
        level=_level(level),
        console=console,
        console_level=_level(console_level),
    )


def _level(name: str) -> int:
    known = ("debug", "info", "warning", "error", "critical")
    if name not in known:
        raise ValueError(f"{name!r} is not a log level; there are {', '.join(known)}")
    return LEVELS[name.upper()]


def _say(stream: IO[str], text: str) -> None:
    """Write to a console that may have gone away."""
    try:
        stream.write(text)
        stream.flush()
    except (OSError, ValueError):
        if stream is not sys.stderr and sys.stderr is not None:
            _say(sys.stderr, text)


def _line(event: Mapping[str, Any]) -> str:
    """Return the JSON line of an event; what JSON lacks (NaN, infinity, odd keys) becomes text."""
    try:
        return json.dumps(event, default=repr, allow_nan=False) + "\n"
    except (ValueError, TypeError):
        return json.dumps(_finite(event), default=repr, allow_nan=False) + "\n"


def _finite(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(name): _finite(item) for name, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_finite(item) for item in value]
    return value
