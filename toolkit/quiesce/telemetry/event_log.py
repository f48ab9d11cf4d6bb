"""The events of a run, as structlog makes them, before anybody decides where they go.

Rule: logging can neither stop the run nor change anybody else's logging. structlog is used without its global
configuration, so an application's own stays as it is, and what Quiesce's own Python loggers say is shown as it would be
without us. There is no event per slot. Nothing here suspends.

An event has ``timestamp`` (UTC), ``level``, ``event``, ``run`` and ``role``, and, where known, ``step``, ``cut_id``, and
``trace_id`` and ``span_id`` of what it is about: that cut's outermost span, or the group's, the step's, the restore's.
The events and their fields are listed in the catalogue.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, Final, cast

from quiesce.telemetry.log_names import log_event
from quiesce.telemetry.undrawn import structlog

if TYPE_CHECKING:
    from structlog.typing import EventDict, FilteringBoundLogger, WrappedLogger

__all__ = ["ABOUT", "LEVELS", "EventLog"]

LEVELS: Final = logging.getLevelNamesMapping()

ABOUT: Final = "_about"
"""The field with which a call names what its event is about: names that spans are known by. It is not written."""

_LIBRARY: Final = "quiesce"
"""The Python logger whose messages (a hook that raised, a sampler that fell back) are events of the run too."""


class EventLog:
    """Makes events of a run, and hands them to whoever is told of them. Call it for a logger.

    Args:
        run: The run's name.
        role: What this process is in the run.
        level: The least level that is an event.
        passes_on: Whether messages of Quiesce's own Python loggers go on to standard error where nobody has configured
            logging, as they would without this one.

    Attributes:
        identify: Returns trace and span identifier of a cut, or of something else that has a span, by its name.
        also: Is given each event, as a dictionary; must neither block nor raise.
    """

    def __init__(self, *, run: str, role: str, level: int = logging.INFO, passes_on: bool = True) -> None:
        self.identify: Callable[[str], tuple[int, int] | None] | None = None
        self.also: Callable[[Mapping[str, object]], None] | None = None
        self._bound = {"run": run, "role": role}
        self._now: dict[str, Any] = {}
        self._wrapper = structlog.make_filtering_bound_logger(level)
        self._handler = _Forward(self, level, passes_on=passes_on)
        logging.getLogger(_LIBRARY).addHandler(self._handler)

    def __call__(self, **fields: Any) -> FilteringBoundLogger:  # noqa: ANN401 - a log field is any value
        """Return a logger whose events carry these fields as well."""
        return cast(
            "FilteringBoundLogger",
            structlog.wrap_logger(
                structlog.ReturnLogger(),  # never called: the last processor ends the chain
                processors=[
                    self._add_now,
                    structlog.processors.add_log_level,
                    structlog.processors.TimeStamper(fmt="iso", utc=True),
                    self._end,
                ],
                wrapper_class=self._wrapper,
                context_class=dict,
            ).bind(**self._bound, **fields),
        )

    def now(self, **fields: int | str | None) -> None:
        """Set what later events carry unless they say otherwise (``step``, ``cut_id``); None takes it away."""
        merged = {**self._now, **fields}
        self._now = {name: value for name, value in merged.items() if value is not None}

    def close(self) -> None:
        """Hear Quiesce's own Python loggers no longer. Closing twice changes nothing."""
        logging.getLogger(_LIBRARY).removeHandler(self._handler)

    def _add_now(self, logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
        merged = {**self._now, **event}
        about: tuple[str, ...] = merged.pop(ABOUT, ())
        if self.identify is not None:
            span = _first(self.identify, (*about, str(merged.get("cut_id") or "")))
            if span is not None:
                merged["trace_id"], merged["span_id"] = f"{span[0]:032x}", f"{span[1]:016x}"
        return merged

    def _end(self, logger: WrappedLogger, method: str, event: MutableMapping[str, Any]) -> str:
        """Hand the event on, and end structlog's chain: there is nothing behind it."""
        error = event.pop("exc_info", None)
        if error:
            event["exception"] = structlog.processors.ExceptionRenderer()(
                None, method, {"exc_info": error}
            ).get("exception", "")
        self._write(event)
        if self.also is not None:
            self.also(dict(event))
        self._show(event)
        raise structlog.DropEvent

    def _write(self, event: Mapping[str, Any]) -> None:
        """Keep the event; an event log keeps none."""

    def _show(self, event: Mapping[str, Any]) -> None:
        """Show the event to a person; an event log shows nothing."""


def _first(identify: Callable[[str], tuple[int, int] | None], names: Iterable[str]) -> tuple[int, int] | None:
    return next((span for name in names if name and (span := identify(name)) is not None), None)


class _Forward(logging.Handler):
    """Makes events of what Quiesce's own Python loggers say."""

    def __init__(self, log: EventLog, level: int, *, passes_on: bool) -> None:
        super().__init__(level)
        self._logger = log()
        self.passes_on = passes_on

    def emit(self, record: logging.LogRecord) -> None:
        """Make one event, and let nobody miss the message who would have seen it."""
        self._logger.log(
            record.levelno,
            log_event("log.record").name,
            logger=record.name,
            message=record.getMessage(),
            exc_info=record.exc_info,
        )
        last = logging.lastResort
        if self.passes_on and last is not None and record.levelno >= last.level and self._is_alone(record):
            last.handle(record)

    def _is_alone(self, record: logging.LogRecord) -> bool:
        """Return whether no other handler gets the message; of several like this one the first passes it on."""
        logger: logging.Logger | None = logging.getLogger(record.name)
        while logger is not None:
            for handler in logger.handlers:
                if handler is not self and not (isinstance(handler, _Forward) and handler.passes_on):
                    return False
            logger = logger.parent if logger.propagate else None
        same = [handler for handler in logging.getLogger(_LIBRARY).handlers if isinstance(handler, _Forward)]
        return same[0] is self
