"""Logs what a run's trainer and its checkpoints do to Weights & Biases, a row for each trainer step.

Rule: the run neither waits for W&B nor changes with it. Everything happens on the thread that the pipeline
gives a sink; the W&B run is one of this sink's own, so a ``wandb.init`` of the application, its steps and its
settings stay as they are. Unless ``WANDB_MODE`` (or the setting ``mode``) says otherwise nothing leaves the
machine: the run is written for ``wandb sync``. Errors are not reported to W&B's makers. Needs the extra
``wandb``; a forked child logs nothing.
"""

from __future__ import annotations

import importlib.util
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, cast, get_args

from quiesce.errors import ConfigError, ExtraMissingError

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric
    from wandb import Run

    from quiesce.telemetry.finished import FinishedSpan
    from quiesce.telemetry.sinks import SinkContext

__all__ = ["MODES", "PROJECT", "STEP", "Mode", "Wandb", "make_wandb"]

Mode = Literal["online", "offline", "disabled"]

MODES: Final = get_args(Mode)
"""What becomes of a row: sent, written for ``wandb sync``, or nothing."""

PROJECT: Final = "quiesce"
"""The project, unless a setting or ``WANDB_PROJECT`` names one."""

STEP: Final = "trainer/step"
"""The key of every row, and the axis that all others are drawn over."""

FINISH_SECONDS: Final = 1.5
"""How long the end of a run waits for an upload; what was not sent is on disk, for ``wandb sync``."""

_PREFIX: Final = "quiesce_"
_TRAIN_SPAN: Final = "quiesce.train.step"
_SAVE_EVENTS: Final = ("checkpoint.published", "checkpoint.not_published", "checkpoint.skipped")
_ERRORS_VARIABLE: Final = "WANDB_ERROR_REPORTING"

_GAUGES: Final[Mapping[str, str]] = {
    "train_reward": "train/reward",
    "train_loss": "train/loss",
    "train_kl": "train/kl",
}
"""Metrics that say how training goes, for runs whose steps come without numbers."""

_TOTALS: Final[Mapping[str, str]] = {
    "window_blame_seconds_total": "window/blame_seconds",
    "window_blocked_seconds_total": "window/blocked_seconds",
    "window_closed_seconds_total": "window/closed_seconds",
    "trainer_stall_seconds_total": "window/trainer_stall_seconds",
    "train_idle_seconds_total": "train/idle_seconds",
    "tokens_generated_total": "train/tokens_generated",
    "groups_trained_total": "train/groups_trained",
    "invariant_violations_total": "invariants/violations",
}
"""Counters that every row has, summed up over their labels."""


class Wandb:
    """A sink that writes one W&B run.

    Args:
        run: The run's name.
        role: What this process is in the run.
        folder: Where W&B keeps its files: in a folder ``wandb`` of it.
        mode: What becomes of a row.
        project: The W&B project.
        config: What W&B shows as the run's configuration.
    """

    def __init__(
        self,
        *,
        run: str,
        role: str,
        folder: Path | str,
        mode: Mode = "offline",
        project: str = PROJECT,
        config: Mapping[str, str] | None = None,
    ) -> None:
        if importlib.util.find_spec("wandb") is None:
            raise ExtraMissingError("the exporter 'wandb'", "wandb", "wandb")
        self._pid = os.getpid()
        self._name = run
        self._role = role
        self._folder = Path(folder)
        self._mode = mode
        self._project = project
        self._config = dict(config or {})
        self._run: Run | None = None
        self._closed = False
        self._totals: dict[str, float] = {}
        self._logged = -1  # the last step that has a row, and the last version that a snapshot made one for
        self._sampled = -1
        self._told = False  # whether steps come with numbers of their own

    def spans(self, batch: Sequence[FinishedSpan]) -> None:
        """Log the trainer's steps."""
        for span in batch:
            step = span.attributes.get("quiesce.step")
            if span.name == _TRAIN_SPAN and isinstance(step, int) and not span.cut_off:
                values = {
                    f"train/{key.rpartition('.')[2]}": value
                    for key, value in span.attributes.items()
                    if key != "quiesce.step"
                }
                self._step(step, {**values, "train/seconds": (span.end_ns - span.start_ns) / 1e9})

    def events(self, events: Sequence[Mapping[str, object]]) -> None:
        """Log the trainer's steps, and how saves ended."""
        for event in events:
            name, step = event.get("event"), event.get("step")
            if not isinstance(step, int):
                continue
            if name == "train.step":
                metrics = event.get("metrics")
                values = {f"train/{key}": event.get(key) for key in ("version", "seconds", "groups")}
                self._step(step, {**_nested("train", metrics), **values})
            elif name in _SAVE_EVENTS:
                values = {f"checkpoint/{key}": event.get(key) for key in ("rows", "bytes")}
                for key in ("phases", "groups"):
                    values |= _nested(f"checkpoint/{key}", event.get(key))
                self._log({**values, "checkpoint/published": int(name == _SAVE_EVENTS[0])}, step)

    def samples(self, families: Sequence[Metric], unix_time: float) -> None:
        """Remember the totals for the rows to come; log a row itself where steps are not reported."""
        gauges: dict[str, float] = {}
        version = -1
        for family in families:
            for sample in family.samples:
                name = sample.name.removeprefix(_PREFIX)
                if name in _TOTALS:
                    gauges[_TOTALS[name]] = gauges.get(_TOTALS[name], 0.0) + sample.value
                elif name == "groups":
                    gauges[f"groups/{sample.labels.get('owner')}"] = sample.value
                elif name in _GAUGES and not self._told:
                    gauges[_GAUGES[name]] = sample.value
                elif name == "trainer_version":
                    version = int(sample.value)
        self._totals = gauges
        if not self._told and version > self._sampled:
            self._sampled = version
            self._log({"train/version": version, **gauges}, version)

    def close(self, deadline_seconds: float) -> None:
        """End the W&B run."""
        if self._closed or self._pid != os.getpid():
            return
        self._closed = True
        if self._run is not None:
            self._run.finish()

    def _step(self, step: int, values: Mapping[str, object]) -> None:
        self._told = self._told or any(key in values for key in _GAUGES.values())
        # The training numbers of a snapshot are those of some step before this one.
        totals = {key: value for key, value in self._totals.items() if key not in _GAUGES.values()}
        if step > self._logged:
            self._logged = step
            self._log({**totals, **values}, step)

    def _log(self, values: Mapping[str, object], step: int) -> None:
        if self._closed or self._pid != os.getpid():
            return
        numbers = {
            key: value
            for key, value in values.items()
            if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        }
        self._open().log({**numbers, STEP: step})

    def _open(self) -> Run:
        """Begin the W&B run with the first row: importing wandb takes a second, and its service another."""
        if self._run is None:
            # Read when wandb is imported. An application that did so before has decided for itself.
            os.environ.setdefault(_ERRORS_VARIABLE, "false")
            import wandb

            (self._folder / "wandb").mkdir(parents=True, exist_ok=True)
            self._run = wandb.init(
                project=self._project,
                name=self._name,
                group=self._name,
                job_type=self._role,
                dir=str(self._folder),
                mode=self._mode,
                config=self._config,
                reinit="create_new",
                settings=wandb.Settings(
                    silent=True,
                    console="off",
                    disable_git=True,
                    disable_code=True,
                    finish_timeout=FINISH_SECONDS,
                    x_disable_meta=True,
                    x_disable_machine_info=True,
                    x_disable_stats=True,
                    x_save_requirements=False,
                ),
            )
            self._run.define_metric(STEP)
            self._run.define_metric("*", step_metric=STEP)
        return self._run


def make_wandb(context: SinkContext) -> Wandb:
    """Make the sink; the entry point ``wandb``.

    Args:
        context: Its settings may have ``mode`` and ``project``; else ``WANDB_MODE`` and ``WANDB_PROJECT`` are
            asked, as W&B itself does. W&B's files are kept in the run's folder, or in ``WANDB_DIR``, or here.

    Raises:
        ExtraMissingError: If wandb is not installed.
        ConfigError: If there is no such mode.
    """
    given = context.settings
    mode = str(given.get("mode") or os.environ.get("WANDB_MODE") or "offline")
    if mode not in MODES:
        raise ConfigError("wandb.mode", f"{mode!r} is none of {', '.join(MODES)}")
    return Wandb(
        run=context.run,
        role=context.role,
        folder=context.run_dir or Path(os.environ.get("WANDB_DIR", ".")),
        mode=cast("Mode", mode),
        project=str(given.get("project") or os.environ.get("WANDB_PROJECT") or PROJECT),
        config=context.resource,
    )


def _nested(prefix: str, values: object) -> dict[str, object]:
    if not isinstance(values, Mapping):
        return {}
    return {f"{prefix}/{key}": value for key, value in values.items()}
