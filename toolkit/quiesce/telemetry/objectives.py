"""What a phase of the window is meant to stay under, as a user says it.

Rule: what is not said is as in the catalogue; a phase that a window has not, and a time that is none, are refused by the
key under which they were given. Nothing here suspends.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from quiesce.errors import ConfigError
from quiesce.telemetry.labels import OBJECTIVES

__all__ = ["window_objectives"]


def window_objectives(given: Mapping[str, float] | None, key: str = "objectives") -> dict[str, float]:
    """Return the seconds of every phase of the window.

    Args:
        given: Seconds by phase; a phase that is left out keeps what the catalogue says.
        key: What the mapping is called where it was written.

    Raises:
        ConfigError: If it is no mapping, a phase is unknown, or its time is not a positive number.
    """
    said: Any = {} if given is None else given  # what comes from a file may be anything
    if not isinstance(said, Mapping):
        raise ConfigError(key, f"must be seconds by phase, not {said!r}")
    for phase, seconds in said.items():
        if phase not in OBJECTIVES:
            raise ConfigError(f"{key}.{phase}", f"there is no such phase: {', '.join(OBJECTIVES)}")
        if (
            isinstance(seconds, bool)
            or not isinstance(seconds, int | float)
            or not (math.isfinite(seconds) and seconds > 0)
        ):
            raise ConfigError(f"{key}.{phase}", f"{seconds!r} is not a positive number of seconds")
    return {**OBJECTIVES, **{phase: float(seconds) for phase, seconds in said.items()}}
