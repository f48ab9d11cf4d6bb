"""The events of the run log, with their fields.

Rule: an event that is not in here is not written. Nothing here suspends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

__all__ = ["LOG_EVENTS", "LogEvent", "log_event"]


@dataclass(frozen=True, slots=True)
class LogEvent:
    """One event of the run log.

    Attributes:
        name: The line's ``event``.
        level: Its level.
        help: When it is written.
        fields: Fields beside ``timestamp``, ``level``, ``run``, ``role``, ``step``, ``cut_id``, ``trace_id`` and
            ``span_id``.
    """

    name: str
    level: Literal["debug", "info", "warning", "error", "critical"]
    help: str
    fields: tuple[str, ...] = ()


LOG_EVENTS: Final[dict[str, LogEvent]] = {
    event.name: event
    for event in (
        LogEvent("run.state", "info", "The run started, runs, stops, finished or failed", ("state",)),
        LogEvent("run.stalled", "error", "Nothing moved for a while", ("what", "group_id", "age_seconds")),
        LogEvent(
            "checkpoint.published",
            "info",
            "A checkpoint was published",
            ("groups", "rows", "bytes", "drain_seconds", "exclusive_seconds", "phases"),
        ),
        LogEvent("checkpoint.skipped", "info", "An attempt to save had nothing to do", ("reason",)),
        LogEvent(
            "checkpoint.not_published",
            "error",
            "An attempt to save failed, was refused or cancelled; the last good checkpoint stays the newest",
            ("outcome", "reason", "groups", "phases"),
        ),
        LogEvent(
            "window.given_up",
            "warning",
            "A checkpoint gave up before it was exclusive",
            ("outcome", "drain_seconds", "delayed_by"),
        ),
        LogEvent("trainer.stalled", "debug", "Saving held the train pump up", ("cause", "seconds")),
        LogEvent(
            "train.step",
            "debug",
            "A trainer step ended",
            ("version", "seconds", "groups", "outcome", "metrics"),
        ),
        LogEvent("restore.completed", "info", "A run was restored from a checkpoint", ("groups", "parts")),
        LogEvent(
            "restore.refused", "error", "A restore was refused or failed", ("outcome", "reason", "parts")
        ),
        LogEvent(
            "sampler.fell_back",
            "warning",
            "A custom sampler admits in one piece, so its gate wait holds a slot that checkpoints wait for",
            ("sampler",),
        ),
        LogEvent(
            "invariant.violated",
            "critical",
            "An invariant does not hold",
            ("invariant", "severity", "message", "groups", "owners", "evidence"),
        ),
        LogEvent("metrics.serving", "info", "Where metrics can be scraped", ("url", "port", "pid")),
        LogEvent(
            "log.record",
            "info",
            "A message of Quiesce's own Python loggers, at that message's level",
            ("logger", "message"),
        ),
    )
}
"""Every event that the run log has, by name."""


def log_event(name: str) -> LogEvent:
    """Return an event of the catalogue.

    Raises:
        KeyError: If the catalogue does not have it.
    """
    return LOG_EVENTS[name]
