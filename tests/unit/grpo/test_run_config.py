"""The configuration of a run: what is refused before anything starts, and how it is said."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from quiesce.errors import ConfigError
from quiesce_grpo.run_config import FIXED_KEYS, PRESETS, RunConfig, check_resumable, dump_config, load_config


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_survives_its_own_file(preset: str, tmp_path: Path) -> None:
    """What a run writes down is what a resume reads."""
    audit = ["controller.audit.policies.conservation=halt", "controller.audit.pace.rest=5"]
    config = load_config(preset, ["controller.max_steps=7", "model.architecture.hidden_size=32", *audit])
    file = tmp_path / "config.yaml"
    file.write_text(dump_config(config), encoding="utf-8")

    again = load_config(file, [])

    assert again == config
    assert again.name == preset
    assert again.controller.max_steps == 7
    assert again.model.architecture["hidden_size"] == 32
    assert again.model.architecture["model_type"] == "qwen2"
    assert again.controller.audit.policies == {"conservation": "halt"}
    assert again.controller.audit.pace.rest == 5.0


def test_the_defaults_are_a_configuration() -> None:
    """A run without a file is a run."""
    assert load_config(None, []) == RunConfig()


def test_overrides_win_over_the_file_and_later_ones_over_earlier_ones(tmp_path: Path) -> None:
    """The order on the command line is the order of precedence."""
    file = tmp_path / "mine.yaml"
    file.write_text("controller:\n  max_steps: 3\nseed: 5\n")

    config = load_config(file, ["controller.max_steps=4", "controller.max_steps=null"])

    assert config.controller.max_steps is None
    assert config.seed == 5


@pytest.mark.parametrize(
    "override, key, problem",
    [
        ("nope=1", "nope", "there is no such key"),
        ("controller.nope=1", "controller.nope", "there is no such key"),
        ("controller.sampler.nope=1", "controller.sampler.nope", "there is no such key"),
        ("config=x", "config", "there is no such key"),
        ("print_config=1", "print_config", "there is no such key"),
        ("seed=x", "seed", "must be a whole number, not 'x'"),
        ("controller.max_steps=ten", "controller.max_steps", "must be a whole number or null, not 'ten'"),
        ("loader.workers=1.5", "loader.workers", "must be a whole number, not '1.5'"),
        ("loader.shuffle=maybe", "loader.shuffle", "must be true or false, not 'maybe'"),
        ("grpo.learning_rate=fast", "grpo.learning_rate", "must be a number, not 'fast'"),
        ("log_level=loud", "log_level", "must be one of 'debug', 'info', 'warning', 'error', not 'loud'"),
        ("controller=5", "controller", "is a section; set its keys, as in controller.KEY=VALUE"),
        ("seed=-1", "seed", "cannot be negative, not -1"),
        ("name=a/b", "name", "must be a plain file name, not 'a/b'"),
        ("controller.max_steps=0", "controller.max_steps", "must be at least 1, not 0"),
        ("controller.generations_per_group=1", "controller.generations_per_group", "must be at least 2"),
        ("task.size=3", "task.size", "must be at least controller.groups_per_step (16), not 3"),
        ("engine.deadline_seconds=900", "engine.deadline_seconds", "is longer than"),
        ("metrics.port=65536", "metrics.port", "must be from 0 to 65535"),
        ("metrics.linger_seconds=-1", "metrics.linger_seconds", "cannot be negative"),
        ("loader.epochs=0", "loader.epochs", "must be at least 1"),
        ("loader.workers=-1", "loader.workers", "cannot be negative"),
        ("controller.sampler.name=no", "controller.sampler.name", "unknown sampler 'no'"),
        (
            "controller.sampler.max_lookahead_versions=-1",
            "controller.sampler.max_lookahead_versions",
            "0 or more",
        ),
        ("controller.buffer_capacity=16", "controller.buffer_capacity", "sampler in_order needs 32"),
        ("model.device=tpu", "model.device", "must be auto, cpu, cuda or cuda:N"),
        ("controller.audit.policies.single_owner=shout", "controller.audit.policies.single_owner", "one of"),
        ("controller.audit.policies.nobody=warn", "controller.audit.policies.nobody", "no such invariant"),
        ("controller.audit.checks=[nowhere:Check]", "controller.audit.checks", "cannot be loaded"),
        ("controller.audit.budgets.write=0", "controller.audit.budgets.write", "more than 0 seconds"),
        ("controller.audit.pace.rest=-1", "controller.audit.pace.rest", "cannot be negative"),
        ("seed", "seed", "an override is section.key=value"),
        ("--seed=1", "--seed=1", "an override is section.key=value"),
    ],
)
def test_an_impossible_value_is_refused_by_its_key(override: str, key: str, problem: str) -> None:
    """Whoever finds the fault, the error begins with the key and says what is wanted."""
    with pytest.raises(ConfigError) as caught:
        load_config("tiny", [override])

    assert caught.value.key == key
    assert problem in caught.value.problem


@pytest.mark.parametrize(
    "content, key, problem",
    [
        (b"controler:\n  max_steps: 3\n", "controler.max_steps", "there is no such key"),
        (b"controller:\n  max_step: 3\n", "controller.max_step", "there is no such key"),
        (b"controller:\n  max_steps: ten\n", "controller.max_steps", "must be a whole number or null"),
        (b"controller: [1\n", "FILE", "parsing"),
        (b"- 1\n", "FILE", "holds no sections with keys"),
        (b"", "FILE", "holds no sections with keys"),
        (b"\xff\xfe\x00", "FILE", "decode"),
    ],
)
def test_a_file_is_refused_by_the_key_or_by_its_name(
    tmp_path: Path, content: bytes, key: str, problem: str
) -> None:
    """A file that is no configuration is named; a key in it is named as on the command line."""
    file = tmp_path / "mine.yaml"
    file.write_bytes(content)

    with pytest.raises(ConfigError) as caught:
        load_config(file, [])

    assert caught.value.key == (str(file) if key == "FILE" else key)
    assert problem in caught.value.problem
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_named_with_the_presets(tmp_path: Path) -> None:
    """A misspelt preset is taken for a file, so the message has both."""
    with pytest.raises(ConfigError, match=r"is neither a file nor a preset \(tiny, gpu\)"):
        load_config(tmp_path / "tinny", [])


class Headless:
    """A custom sampler that lacks everything."""


def test_a_custom_sampler_is_checked_before_anything_starts() -> None:
    """A class that cannot be a sampler is named with what it lacks."""
    with pytest.raises(ConfigError, match=r"controller\.sampler\.name: .*Headless: lacks the method select"):
        load_config("tiny", [f"controller.sampler.name={__name__}:Headless"])


@pytest.mark.parametrize("key", FIXED_KEYS)
def test_a_resume_keeps_what_is_read_and_what_is_trained(key: str) -> None:
    """Each of these keys is refused by name when it differs, and nothing else is."""
    saved = load_config("tiny", [])
    wanted = _changed(saved, key.split("."))

    with pytest.raises(ConfigError) as caught:
        check_resumable(saved, wanted)

    assert caught.value.key == key
    check_resumable(saved, load_config("tiny", ["controller.max_steps=9", "grpo.learning_rate=1e-4"]))


def _changed(config: Any, names: list[str]) -> Any:  # noqa: ANN401 - a section of any kind
    name, *rest = names
    value = getattr(config, name)
    return dataclasses.replace(config, **{name: _changed(value, rest) if rest else _another(value)})


def _another(value: object) -> object:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, dict):
        return {**value, "min_terms" if "min_terms" in value else "hidden_size": 3}
    known = {"expression": "question", "chain_sum": "gsm_symbolic", "None": "/a/path"}
    return known.get(str(value), "0123456789")
