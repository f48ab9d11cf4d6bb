"""Settings refuse what cannot be, by the name of the key."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from quiesce.errors import ConfigError
from quiesce_grpo import config
from quiesce_grpo.config import EngineConfig, GrpoConfig, ModelConfig, TaskConfig, WarmupConfig


@pytest.mark.parametrize(
    "build, key",
    [
        (lambda: TaskConfig(name=""), "task.name"),
        (lambda: TaskConfig(size=0), "task.size"),
        (lambda: TaskConfig(seed=-1), "task.seed"),
        (lambda: TaskConfig(options={"seed": 3}), "task.options.seed"),
        (lambda: ModelConfig(path=""), "model.path"),
        (lambda: ModelConfig(architecture={"hidden_size": 8}), "model.architecture.model_type"),
        (
            lambda: ModelConfig(architecture={"model_type": "qwen2", "vocab_size": 8}),
            "model.architecture.vocab_size",
        ),
        (lambda: ModelConfig(alphabet=""), "model.alphabet"),
        (lambda: ModelConfig(alphabet="aa"), "model.alphabet"),
        (lambda: ModelConfig(device="tpu"), "model.device"),
        (lambda: ModelConfig(device="cpu:1"), "model.device"),
        (lambda: ModelConfig(device="cuda:x"), "model.device"),
        (lambda: ModelConfig(threads=-1), "model.threads"),
        (lambda: ModelConfig(chat_template=True), "model.chat_template"),
        (lambda: EngineConfig(max_new_tokens=0), "engine.max_new_tokens"),
        (lambda: EngineConfig(temperature=0.0), "engine.temperature"),
        (lambda: EngineConfig(workers=0), "engine.workers"),
        (lambda: EngineConfig(max_batch_groups=0), "engine.max_batch_groups"),
        (lambda: EngineConfig(linger_seconds=-1.0), "engine.linger_seconds"),
        (lambda: EngineConfig(deadline_seconds=0.0), "engine.deadline_seconds"),
        (lambda: EngineConfig(chunk_tokens=-1), "engine.chunk_tokens"),
        (lambda: EngineConfig(permit_wait_seconds=0.0), "engine.permit_wait_seconds"),
        (lambda: EngineConfig(permit_deadline_seconds=0.0), "engine.permit_deadline_seconds"),
        (lambda: GrpoConfig(learning_rate=0.0), "grpo.learning_rate"),
        (lambda: GrpoConfig(learning_rate=float("nan")), "grpo.learning_rate"),
        (lambda: GrpoConfig(lr_warmup_steps=-1), "grpo.lr_warmup_steps"),
        (lambda: GrpoConfig(lr_decay_steps=-1), "grpo.lr_decay_steps"),
        (lambda: GrpoConfig(lr_final_fraction=2.0), "grpo.lr_final_fraction"),
        (lambda: GrpoConfig(beta1=1.0), "grpo.beta1"),
        (lambda: GrpoConfig(beta2=-0.1), "grpo.beta2"),
        (lambda: GrpoConfig(weight_decay=-0.1), "grpo.weight_decay"),
        (lambda: GrpoConfig(max_grad_norm=0.0), "grpo.max_grad_norm"),
        (lambda: GrpoConfig(clip_low=1.0), "grpo.clip_low"),
        (lambda: GrpoConfig(clip_high=0.0), "grpo.clip_high"),
        (lambda: GrpoConfig(dual_clip=1.1), "grpo.dual_clip"),
        (lambda: GrpoConfig(importance_cap=0.5), "grpo.importance_cap"),
        (lambda: GrpoConfig(kl_coefficient=-1.0), "grpo.kl_coefficient"),
        (lambda: GrpoConfig(std_floor=0.0), "grpo.std_floor"),
        (lambda: GrpoConfig(updates_per_batch=0), "grpo.updates_per_batch"),
        (lambda: GrpoConfig(rows_per_forward=-1), "grpo.rows_per_forward"),
        (lambda: GrpoConfig(correction="wishful"), "grpo.correction"),  # type: ignore[arg-type] # what YAML may hold
        (lambda: GrpoConfig(aggregation="mean"), "grpo.aggregation"),  # type: ignore[arg-type] # what YAML may hold
        (lambda: EngineConfig(swap_weights="never"), "engine.swap_weights"),  # type: ignore[arg-type] # what YAML may hold
        (lambda: ModelConfig(dtype="float8"), "model.dtype"),  # type: ignore[arg-type] # what YAML may hold
        (lambda: WarmupConfig(steps=-1), "warmup.steps"),
        (lambda: WarmupConfig(batch_size=0), "warmup.batch_size"),
        (lambda: WarmupConfig(learning_rate=-1.0), "warmup.learning_rate"),
    ],
)
def test_an_impossible_setting_is_refused_by_the_name_of_its_key(
    build: Callable[[], object], key: str
) -> None:
    """The message starts with the dotted key, so that a person finds the line."""
    with pytest.raises(ConfigError) as caught:
        build()

    assert str(caught.value).startswith(f"{key}: ")


def test_settings_are_read_without_loading_torch() -> None:
    """A command line can show every setting without paying for torch."""
    code = f"import sys, {config.__name__}; sys.exit('torch' in sys.modules)"

    finished = subprocess.run(
        [sys.executable, "-c", code], check=False, env={"PYTHONPATH": ":".join(sys.path)}
    )

    assert finished.returncode == 0
