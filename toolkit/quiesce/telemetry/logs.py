"""The run's log: one JSON object a line in the run folder, and a readable form for people.

Rule: logging can neither stop the run nor change anybody else's logging. structlog is used without its global
configuration, so an application's own stays as it is; a line that cannot be written is counted, and said once
on the console. There is no line per slot. Writing a line may block for as long as a write to the page cache
does; nothing here suspends.

Lines are appended with one unbuffered write each, so that several processes and threads may share the file, a
killed run loses none, and a forked child inherits neither a lock nor half a line.

Every line has ``timestamp`` (UTC), ``level``, ``event``, ``run`` and ``role``, and, where known, ``step``,
``cut_id``, and ``trace_id`` and ``span_id`` of that cut's outermost span. Events and their fields are listed in
the catalogue.
"""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final, cast

import structlog

from quiesce.telemetry.names import log_event
from quiesce.types import PHASES

if TYPE_CHECKING:
    from structlog.typing import EventDict, FilteringBoundLogger, WrappedLogger

__all__ = ["LOG_FILE", "LogObserver", "RunLog", "configure_run_log"]

LOG_FILE: Final = "log.jsonl"
"""The file of a run folder that holds its log."""

_LIBRARY: Final = "quiesce"
"""The Python logger whose messages (a hook that raised, a sampler that fell back) go to the run's log too."""

_LEVELS: Final = logging.getLevelNamesMapping()


class RunLog:
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
        identify: Returns trace and span identifier of a cut; lines that name the cut carry them then.
        also: Is given each line, as the dictionary that it is made of; must neither block nor raise.
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
        self.identify: Callable[[str], tuple[int, int] | None] | None = None
        self.also: Callable[[Mapping[str, object]], None] | None = None
        self._bound = {"run": run, "role": role}
        self._now: dict[str, Any] = {}
        self._console = console
        self._console_level = console_level
        colours = console is not None and console.isatty()
        self._render = structlog.dev.ConsoleRenderer(
            colors=colours, sort_keys=False, exception_formatter=structlog.dev.plain_traceback
        )
        self._wrapper = structlog.make_filtering_bound_logger(level)
        self._file = path.open("ab", buffering=0)
        self._handler = _Forward(self, level)
        logging.getLogger(_LIBRARY).addHandler(self._handler)

    def __call__(self, **fields: Any) -> FilteringBoundLogger:  # noqa: ANN401 - a log field is any value
        """Return a logger whose lines carry these fields as well."""
        return cast(
            "FilteringBoundLogger",
            structlog.wrap_logger(
                structlog.ReturnLogger(),  # never called: the last processor ends the chain
                processors=[
                    self._add_now,
                    structlog.processors.add_log_level,
                    structlog.processors.TimeStamper(fmt="iso", utc=True),
                    self._write,
                ],
                wrapper_class=self._wrapper,
                context_class=dict,
            ).bind(**self._bound, **fields),
        )

    def now(self, **fields: int | str | None) -> None:
        """Set what later lines carry unless they say otherwise (``step``, ``cut_id``); None takes it away."""
        merged = {**self._now, **fields}
        self._now = {name: value for name, value in merged.items() if value is not None}

    def close(self) -> None:
        """Close the file; later lines are dropped and counted. Closing twice changes nothing."""
        logging.getLogger(_LIBRARY).removeHandler(self._handler)
        self._file.close()

    def _add_now(self, logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
        merged = {**self._now, **event}
        cut_id = merged.get("cut_id")
        if cut_id and self.identify is not None:
            span = self.identify(str(cut_id))
            if span is not None:
                merged["trace_id"], merged["span_id"] = f"{span[0]:032x}", f"{span[1]:016x}"
        return merged

    def _write(self, logger: WrappedLogger, method: str, event: MutableMapping[str, Any]) -> str:
        """Write the line in both forms, and end structlog's chain: there is nothing behind it."""
        shown = self._console is not None and _LEVELS[event["level"].upper()] >= self._console_level
        error = event.pop("exc_info", None)
        if error:
            event["exception"] = structlog.processors.ExceptionRenderer()(
                None, method, {"exc_info": error}
            ).get("exception", "")
        try:
            self._file.write(_line(event).encode())
        except (OSError, ValueError) as problem:  # a full disk, or a closed file
            self.dropped += 1
            if self.dropped == 1 and self._console is not None:
                _say(self._console, f"the run's log {self.path} cannot be written: {problem}\n")
        if self.also is not None:
            self.also(dict(event))
        if shown and self._console is not None:
            _say(self._console, f"{self._readable(event)}\n")
        raise structlog.DropEvent

    def _readable(self, event: Mapping[str, Any]) -> str:
        fields = {name: value for name, value in event.items() if name not in self._bound}
        fields["timestamp"] = fields["timestamp"][11:19]
        return str(self._render(None, "", fields))


class _Forward(logging.Handler):
    """Hands messages of Quiesce's own Python loggers to the run's log."""

    def __init__(self, log: RunLog, level: int) -> None:
        super().__init__(level)
        self._logger = log()

    def emit(self, record: logging.LogRecord) -> None:
        """Write one message."""
        self._logger.log(
            record.levelno,
            log_event("log.record").name,
            logger=record.name,
            message=record.getMessage(),
            exc_info=record.exc_info,
        )


class LogObserver:
    """Writes what hooks report to a run's log: attempts to save, restores, states, and whatever went wrong.

    Args:
        log: The run's log.
    """

    def __init__(self, log: RunLog) -> None:
        self._log = log
        self._logger = log()
        self._phases: dict[str, dict[str, float]] = {}  # cut id -> seconds by phase

    def _emit(self, event: str, /, **fields: Any) -> None:  # noqa: ANN401 - a log field is any value
        entry = log_event(event)
        said = {name: value for name, value in fields.items() if value is not None and value != ""}
        self._logger.log(_LEVELS[entry.level.upper()], entry.name, **said)

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
            self._emit("restore.completed", groups=dict(groups), parts=seconds)
        else:
            self._emit("restore.refused", outcome=outcome, reason=reason, parts=seconds)

    def invariant_violated(self, violation: Any) -> None:  # noqa: ANN401 - a Violation, as the hook says
        """Say what does not hold, with its evidence."""
        fields = log_event("invariant.violated").fields
        said = {name: getattr(violation, name, None) for name in (*fields, "cut_id")}
        self._emit("invariant.violated", **said)

    def stalled(self, what: str, group_id: str, age_seconds: float) -> None:
        """Say what the run waits for."""
        self._emit("run.stalled", what=what, group_id=group_id, age_seconds=age_seconds)

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
    return _LEVELS[name.upper()]


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
