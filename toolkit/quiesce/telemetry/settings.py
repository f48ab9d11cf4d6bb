"""What the environment says about telemetry, for runs that are switched on without a line of code.

Rule: an argument in code beats the environment, which beats the default; a value that cannot be used is refused by
its variable's name. Nothing here suspends, and nothing here starts anything.

========================  ==================================================================================
variable                  meaning
========================  ==================================================================================
``QUIESCE_METRICS``       switch telemetry on as soon as the process builds a barrier, a ledger, …: ``1`` or ``0``
``QUIESCE_RUN``           the run's name (default: ``OTEL_SERVICE_NAME``, else the script's name)
``QUIESCE_ROLE``          what this process is in the run (default ``controller``)
``QUIESCE_PORT``          port of the metrics endpoint; ``0`` takes any free one
``QUIESCE_HOST``          address to listen on (default: loopback only)
``QUIESCE_RUN_DIR``       an existing folder for ``metrics.json`` and for what the recorder writes
``QUIESCE_SD_DIR``        a folder that Prometheus reads targets from (``file_sd_configs``)
``QUIESCE_EXPORTERS``     further exporters by name, with commas: ``recorder,otlp,textfile,wandb``
``QUIESCE_SPANS``         how many slot spans a second are kept beside the interesting ones; ``all`` keeps each
``QUIESCE_OBJECTIVES``    seconds that phases of a window are meant to stay under: ``drain=2,exclusive=0.01``
``QUIESCE_LINGER``        seconds that the endpoint stays up at the end, for one last scrape
``QUIESCE_ALL_RANKS``     ``1`` lets every rank serve, not only rank 0
``QUIESCE_SERVED_BY``     set by a process that serves: those that it starts, such as loader workers, do not
========================  ==================================================================================

OpenTelemetry's ``OTEL_TRACES_EXPORTER`` and ``OTEL_METRICS_EXPORTER`` name an exporter too if they are ``otlp``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from quiesce.errors import ConfigError
from quiesce.telemetry.objectives import window_objectives

__all__ = ["RANKS", "SERVED_BY", "SWITCH", "Settings", "is_on", "read_settings", "script_name"]

SWITCH: Final = "QUIESCE_METRICS"
"""The variable that switches telemetry on."""

SERVED_BY: Final = "QUIESCE_SERVED_BY"
"""The variable in which a process that was switched on tells the processes that it starts that it is."""

RANKS: Final = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
"""Variables in which launchers tell a process its rank in the whole job."""

MAX_PORT: Final = 65535

_YES: Final = frozenset({"1", "true", "yes", "on"})
_NO: Final = frozenset({"", "0", "false", "no", "off"})


@dataclass(frozen=True, slots=True)
class Settings:
    """What the environment says; None where it says nothing.

    Attributes:
        enabled: Whether telemetry is to be switched on.
        run: The run's name.
        role: What this process is in the run.
        port: Port of the endpoint.
        host: Address to listen on.
        run_dir: The run's folder.
        sd_dir: The folder of Prometheus targets.
        exporters: Names of further exporters.
        implied: Those of them that only variables of somebody else's ask for: the exporter is to be left out with a
            warning where a package is missing, because whoever set the variable may have meant another program.
        spans_per_second: Budget of slot spans; infinite keeps each.
        objectives: Seconds that phases of the window are meant to stay under.
        linger_seconds: How long the endpoint stays up at the end.
        rank: The process's rank in a distributed job, if a launcher told it one.
        all_ranks: Whether every rank serves.
        served_by: The process, of those that this one was started by, that serves already.
    """

    enabled: bool = False
    run: str | None = None
    role: str | None = None
    port: int | None = None
    host: str | None = None
    run_dir: Path | None = None
    sd_dir: Path | None = None
    exporters: tuple[str, ...] = ()
    implied: tuple[str, ...] = ()
    spans_per_second: float | None = None
    objectives: Mapping[str, float] | None = field(default=None, hash=False)
    linger_seconds: float = 0.0
    rank: int | None = None
    all_ranks: bool = False
    served_by: int | None = None

    @property
    def serves(self) -> bool:
        """Whether this process is the one of its job that serves and exports."""
        return self.served_by in {None, os.getpid()} and (self.rank in {None, 0} or self.all_ranks)


def is_on(environment: Mapping[str, str] | None = None) -> bool:
    """Return whether the environment asks for telemetry; never raises, for it is asked at import."""
    environment = os.environ if environment is None else environment
    return environment.get(SWITCH, "").strip().lower() in _YES


def read_settings(environment: Mapping[str, str] | None = None) -> Settings:
    """Read the environment.

    Args:
        environment: The variables; None takes the process's.

    Raises:
        ConfigError: If a value cannot be used; it names the variable.
    """
    env = os.environ if environment is None else environment
    named = _names(env, "QUIESCE_EXPORTERS")
    implied = [name for name in _implied(env) if name not in named]
    return Settings(
        enabled=_flag(env, SWITCH),
        run=_text(env, "QUIESCE_RUN") or _text(env, "OTEL_SERVICE_NAME"),
        role=_text(env, "QUIESCE_ROLE"),
        port=_port(env, "QUIESCE_PORT"),
        host=_text(env, "QUIESCE_HOST"),
        run_dir=_path(env, "QUIESCE_RUN_DIR"),
        sd_dir=_path(env, "QUIESCE_SD_DIR"),
        exporters=tuple(dict.fromkeys((*named, *implied))),
        implied=tuple(implied),
        spans_per_second=_spans(env, "QUIESCE_SPANS"),
        objectives=_objectives(env, "QUIESCE_OBJECTIVES"),
        linger_seconds=_seconds(env, "QUIESCE_LINGER"),
        rank=_rank(env),
        all_ranks=_flag(env, "QUIESCE_ALL_RANKS"),
        served_by=_number(env.get(SERVED_BY, "")),
    )


def script_name() -> str:
    """Return a name for a run that nobody named: that of its script."""
    return Path(sys.argv[0]).stem or "run" if sys.argv and sys.argv[0] not in {"", "-c", "-m"} else "run"


def _text(env: Mapping[str, str], name: str) -> str | None:
    return env.get(name, "").strip() or None


def _path(env: Mapping[str, str], name: str) -> Path | None:
    text = _text(env, name)
    return None if text is None else Path(text)


def _implied(env: Mapping[str, str]) -> list[str]:
    """Return ``otlp`` if OpenTelemetry's own variables name it for a signal; its other exporters are an application's."""
    if env.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return []
    signals = ("TRACES", "METRICS")
    return ["otlp"] if any("otlp" in _names(env, f"OTEL_{signal}_EXPORTER") for signal in signals) else []


def _names(env: Mapping[str, str], name: str) -> list[str]:
    return [word.strip() for word in env.get(name, "").split(",") if word.strip()]


def _flag(env: Mapping[str, str], name: str) -> bool:
    text = env.get(name, "").strip().lower()
    if text not in _YES | _NO:
        raise ConfigError(name, f"{text!r} is neither 1 nor 0")
    return text in _YES


def _port(env: Mapping[str, str], name: str) -> int | None:
    text = _text(env, name)
    if text is None:
        return None
    if not text.isascii() or not text.isdigit() or int(text) > MAX_PORT:
        raise ConfigError(name, f"{text!r} is no port: a number from 0 to {MAX_PORT}")
    return int(text)


def _seconds(env: Mapping[str, str], name: str) -> float:
    text = _text(env, name)
    try:
        seconds = 0.0 if text is None else float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise ConfigError(name, f"{text!r} is no number of seconds")
    return seconds


def _spans(env: Mapping[str, str], name: str) -> float | None:
    text = _text(env, name)
    if text is None:
        return None
    if text.lower() == "all":
        return float("inf")
    try:
        budget = float(text)
    except ValueError:
        budget = -1.0
    if not 0 <= budget < float("inf"):
        raise ConfigError(name, f"{text!r} is neither a number of spans a second nor 'all'")
    return budget


def _objectives(env: Mapping[str, str], name: str) -> Mapping[str, float] | None:
    text = _text(env, name)
    if text is None:
        return None
    said: dict[str, float] = {}
    for part in text.split(","):
        phase, _, seconds = (word.strip() for word in part.partition("="))
        try:
            said[phase] = float(seconds)
        except ValueError:
            raise ConfigError(name, f"{part.strip()!r} is no phase with its seconds, as in drain=2") from None
    return window_objectives(said, name)


def _rank(env: Mapping[str, str]) -> int | None:
    """Return the rank, as far as a launcher told one that can be read: others' variables are not ours to refuse."""
    return next((rank for name in RANKS if (rank := _number(env.get(name, ""))) is not None), None)


def _number(text: str) -> int | None:
    return int(text) if text.isascii() and text.isdigit() else None
