"""The configuration of a reference run: every section in one tree, read from YAML with dotted overrides.

Rule: an unknown key, a wrong type or an impossible combination is refused before anything starts, with the
key's name. Nothing here suspends, and nothing here imports torch.
"""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Final, Literal

from quiesce import ControllerConfig, DataPlaneCheckpointBarrier, Hub
from quiesce.errors import ConfigError, SamplerContractError
from quiesce.sampler_config import build_sampler
from quiesce.telemetry.labels import OBJECTIVES
from quiesce.telemetry.objectives import window_objectives
from quiesce_grpo.config import EngineConfig, GrpoConfig, ModelConfig, TaskConfig, WarmupConfig

__all__ = [
    "FIXED_KEYS",
    "PRESETS",
    "LoaderConfig",
    "MetricsConfig",
    "RunConfig",
    "check_resumable",
    "dump_config",
    "load_config",
]

PRESETS: Final = ("tiny", "gpu")
"""Configurations that ship with the package."""

FIXED_KEYS: Final = (
    "seed",
    "task.name",
    "task.size",
    "task.seed",
    "task.prompt",
    "task.options",
    "loader.shuffle",
    "model.path",
    "model.architecture",
    "model.alphabet",
    "controller.groups_per_step",
)
"""What a resume cannot change: which prompts are read in which order and in what batches, and what is trained."""

_NO_SUCH_KEY: Final = "there is no such key"

# How jsonargparse words what it refuses; anything else is passed on as it is.
_UNKNOWN_KEY: Final = (
    re.compile(r"unrecognized arguments: --([^\s=]+).*"),
    re.compile(r"Option '([^']+)' is not accepted"),
    re.compile(r"Group '([^']+)' does not accept option '([^']+)'"),
)
_WRONG_TYPE: Final = re.compile(r'Parser key "([^"]+)": (.*)')
_EXPECTED_CLASS: Final = re.compile(r"Expected an? <class '(?:\w+\.)*(\w+)'>")
_EXPECTED_LITERAL: Final = re.compile(r"Expected an? typing\.Literal\[([^\]]*)\]")
_VALUE: Final = re.compile(r"(?:Got value|Given value): (.*)$")
_KINDS: Final = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "a text",
    "NoneType": "null",
}

MAX_PORT: Final = 65535
"""Largest TCP port."""


@dataclass(frozen=True, kw_only=True)
class LoaderConfig:
    """How prompts are read."""

    epochs: int = 1
    """How often the dataset is read."""

    workers: int = 0
    """Worker processes of the ``StatefulDataLoader``; 0 reads in a thread of the trainer's process."""

    shuffle: bool = True
    """Read each epoch in a seeded random order."""

    def __post_init__(self) -> None:
        if self.epochs < 1:
            raise ConfigError("loader.epochs", f"must be at least 1, not {self.epochs}")
        if self.workers < 0:
            raise ConfigError("loader.workers", f"cannot be negative, not {self.workers}")


@dataclass(frozen=True, kw_only=True)
class MetricsConfig:
    """Telemetry: the metrics endpoint, and where else metrics, spans and log events go."""

    enabled: bool = True
    """Serve ``GET /metrics``, make spans, and export them."""

    exporters: tuple[str, ...] = ("recorder",)
    """Exporters beside the endpoint, by name: ``recorder`` writes files into the run's folder, ``otlp`` sends to an
    OpenTelemetry collector (``OTEL_EXPORTER_OTLP_ENDPOINT``), ``textfile`` and ``wandb`` write where they are
    configured to."""

    spans_per_second: float = 1000.0
    """Spans of slots that are kept beside the interesting ones; 0 keeps each."""

    port: int | None = None
    """Port; null takes 9464 or else any free one, 0 any free one. A port named here is used or the run
    fails."""

    host: str | None = None
    """Address to listen on; null is loopback only."""

    linger_seconds: float = 0.0
    """How long the endpoint stays up after the end, for one last scrape: one scrape interval."""

    objectives: dict[str, float] = field(default_factory=lambda: dict(OBJECTIVES))
    """Seconds that a phase of the window is meant to stay under: longer ones are counted as over their objective. The
    alerting rules and the dashboards that are built with this file speak of the same numbers."""

    def __post_init__(self) -> None:
        window_objectives(self.objectives, "metrics.objectives")
        if self.port is not None and not 0 <= self.port <= MAX_PORT:
            raise ConfigError("metrics.port", f"must be from 0 to {MAX_PORT}, not {self.port}")
        if self.spans_per_second < 0:
            raise ConfigError("metrics.spans_per_second", f"cannot be negative, not {self.spans_per_second}")
        if self.linger_seconds < 0:
            raise ConfigError("metrics.linger_seconds", f"cannot be negative, not {self.linger_seconds}")


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything about one run."""

    name: str = "grpo"
    """The run's name: a label of its metrics, a field of its log, the start of its folder's name."""

    seed: int = 0
    """Seed of the weights, of the reading order and of every sampled completion."""

    task: TaskConfig = field(default_factory=TaskConfig)
    """What is trained on."""

    loader: LoaderConfig = field(default_factory=LoaderConfig)
    """How prompts are read."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """The policy."""

    warmup: WarmupConfig = field(default_factory=WarmupConfig)
    """The supervised phase before GRPO."""

    engine: EngineConfig = field(default_factory=EngineConfig)
    """Generation."""

    grpo: GrpoConfig = field(default_factory=GrpoConfig)
    """The objective and the optimizer."""

    controller: ControllerConfig = field(default_factory=ControllerConfig)
    """The asynchronous loop: sizes, sampler, saving."""

    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    """The metrics endpoint."""

    alerts: dict[str, int | float | str | dict[str, float]] = field(default_factory=dict)
    """Numbers of the alerting rules and the dashboards, by the names of `AlertConfig`: for `quiesce rules build --config`,
    `quiesce dashboards build --config` and `quiesce view`; the run itself reads none of them."""

    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The least level that is written to the run's log."""

    def __post_init__(self) -> None:
        if not self.name or "/" in self.name or self.name.startswith("."):
            raise ConfigError("name", f"must be a plain file name, not {self.name!r}")
        if self.seed < 0:
            raise ConfigError("seed", f"cannot be negative, not {self.seed}")
        if self.controller.generations_per_group == 1:
            raise ConfigError(
                "controller.generations_per_group",
                "must be at least 2: GRPO learns from differences within a group",
            )
        if self.task.size < self.controller.groups_per_step:
            raise ConfigError(
                "task.size",
                f"must be at least controller.groups_per_step ({self.controller.groups_per_step}), not {self.task.size}",
            )
        if self.engine.deadline_seconds > self.controller.generation_timeout_seconds:
            raise ConfigError(
                "engine.deadline_seconds",
                f"is longer than controller.generation_timeout_seconds ({self.controller.generation_timeout_seconds:g})",
            )


def load_config(source: str | Path | None, overrides: list[str]) -> RunConfig:
    """Read a configuration.

    Args:
        source: A YAML file, the name of a preset, or None for the defaults.
        overrides: ``section.key=value`` each; values are YAML.

    Raises:
        ConfigError: If a key is unknown, a value is of the wrong type or impossible, or the file cannot be
            read.
    """
    from jsonargparse import ArgumentError, ArgumentParser

    sections = {known.name for known in dataclasses.fields(RunConfig)}
    for override in overrides:
        key, sign, _ = override.partition("=")
        if not sign or not key or key.startswith("-"):
            raise ConfigError(override, "an override is section.key=value")
        if key.partition(".")[0] not in sections:
            raise ConfigError(key, _NO_SUCH_KEY)
    parser = ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(RunConfig, as_group=False)
    parser.add_argument("--config", action="config")
    arguments = [*_config_argument(source), *(f"--{override}" for override in overrides)]
    try:
        parsed = parser.parse_args(arguments)
        # jsonargparse renamed the method; both names are in the range of releases that is allowed.
        instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes
        built: dict[str, Any] = instantiate(parsed).as_dict()
        built.pop("config", None)
        config = RunConfig(**built)
        _check_sampler(config)
        config.controller.audit.load()  # once, for nobody, as the sampler
    except (ArgumentError, ConfigError, TypeError, ValueError) as error:
        raise _as_config_error(error, source) from error
    return config


def _check_sampler(config: RunConfig) -> None:
    """Build the sampler once, for nobody, so that what is wrong with it is said before anything starts."""
    hub = Hub()
    try:
        sampler = build_sampler(config.controller.sampler, DataPlaneCheckpointBarrier(hub=hub), hub)
    except SamplerContractError as error:
        raise ConfigError("controller.sampler.name", str(error)) from error
    needed = sampler.required_capacity(config.controller.groups_per_step)
    capacity = config.controller.buffer_capacity
    if capacity is not None and capacity < needed:
        raise ConfigError(
            "controller.buffer_capacity",
            f"holds {capacity} groups, but sampler {sampler.name} needs {needed}",
        )


def check_resumable(saved: RunConfig, wanted: RunConfig) -> None:
    """Refuse a resume that would read other prompts, or train another policy, than the run did so far.

    Args:
        saved: The run's configuration until now.
        wanted: The one to go on with.

    Raises:
        ConfigError: If a key differs that a run cannot change on the way.
    """
    for key in FIXED_KEYS:
        before, after = (_value(config, key) for config in (saved, wanted))
        if before != after:
            raise ConfigError(
                key, f"a run keeps it: this one has {before!r}, so it cannot go on with {after!r}"
            )


def _value(config: RunConfig, key: str) -> object:
    value: object = config
    for name in key.split("."):
        value = getattr(value, name)
    return value


def dump_config(config: RunConfig) -> str:
    """Return a configuration as YAML that :func:`load_config` reads back."""
    import yaml

    return str(yaml.safe_dump(_plain(dataclasses.asdict(config)), sort_keys=False, allow_unicode=True))


def _config_argument(source: str | Path | None) -> list[str]:
    if source is None:
        return []
    if str(source) in PRESETS:
        return ["--config", str(resources.files("quiesce_grpo") / "presets" / f"{source}.yaml")]
    path = Path(source)
    if not path.is_file():
        raise ConfigError(str(source), f"is neither a file nor a preset ({', '.join(PRESETS)})")
    return ["--config", str(path)]


def _as_config_error(error: Exception, source: str | Path | None) -> ConfigError:
    """Keep the key's name in front, whoever found the fault."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ConfigError):
            # The controller's configuration checks itself without knowing that it is a section here.
            section = cause.key.partition(".")[0]
            own = section in {known.name for known in dataclasses.fields(ControllerConfig)}
            return ConfigError(f"controller.{cause.key}", cause.problem) if own else cause
        cause = cause.__cause__ or cause.__context__
    told = " ".join(str(error).split())
    for pattern in _UNKNOWN_KEY:
        if found := pattern.fullmatch(told):
            return ConfigError(".".join(part for part in found.groups() if part), _NO_SUCH_KEY)
    if found := _WRONG_TYPE.match(told):
        kinds = [_KINDS.get(kind, kind) for kind in _EXPECTED_CLASS.findall(told)]
        kinds += [f"one of {choices}" for choices in _EXPECTED_LITERAL.findall(told)]
        wanted = " or ".join(kinds)
        value = _VALUE.search(told)
        got = f", not {value[1]!r}" if value else ""
        if wanted:
            return ConfigError(found[1], f"must be {wanted}{got}")
        is_section = found[1] in {known.name for known in dataclasses.fields(RunConfig)}
        problem = f"is a section; set its keys, as in {found[1]}.KEY=VALUE" if is_section else found[2]
        return ConfigError(found[1], problem)
    if told.startswith("Unexpected config:"):
        told = "holds no sections with keys"
    return ConfigError("defaults" if source is None else str(source), told)


def _plain(value: Any) -> Any:  # noqa: ANN401 - a YAML tree
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value
