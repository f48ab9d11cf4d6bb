"""Switches telemetry on from the environment, when a process first builds something that reports.

Rule: importing Quiesce starts nothing. A process that the environment asks to be watched (``quiesce exec`` does)
starts telemetry with the first primitive that attaches itself to the process-wide hub; a process that builds none
stays silent, and so does every rank but the first, and every child of ``multiprocessing`` (a loader's worker, a pool's)
that has not been given a role: a worker may well build a barrier before its parent does, and the port, the folder and
the run's name are the parent's. A failure costs the telemetry, never the run: it is one loud line. Nothing here
suspends.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

from quiesce.observers import default_hub
from quiesce.telemetry.children import is_being_prepared, is_child
from quiesce.telemetry.settings import read_settings

if TYPE_CHECKING:
    from quiesce.observers import Hub
    from quiesce.telemetry.settings import Settings

__all__ = ["arm"]

_LOG = logging.getLogger("quiesce.telemetry")


def arm(hub: Hub | None = None) -> None:
    """Start telemetry with the first primitive that attaches itself to a hub.

    Args:
        hub: The hub; None means the process-wide one.
    """
    hub = default_hub() if hub is None else hub
    hub.on_first_attach(lambda: _start(hub))


def _is_somebodys(settings: Settings) -> bool:
    """Return whether this is a child whose telemetry is its parent's; ranks that a script spawns are given roles."""
    named = settings.role is not None or settings.all_ranks
    return is_being_prepared() or (is_child() and not named)


def _start(hub: Hub) -> None:
    try:
        settings = read_settings()
        if not settings.enabled or not settings.serves or _is_somebodys(settings):
            return
        from quiesce.telemetry.enable import enable_metrics, is_enabled

        if is_enabled(hub):
            return  # switched on in code, which knows better
        handle = enable_metrics(hub=hub)
        if settings.linger_seconds:
            handle.telemetry.end_with(partial(handle.close, settings.linger_seconds))
    except Exception as error:  # noqa: BLE001 - whatever is wrong with telemetry, the run goes on without it
        # Without a logging configuration this is one line on standard error.
        _LOG.error("telemetry could not be switched on: %s; the run goes on without it", error)
