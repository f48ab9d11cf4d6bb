"""Settings of the reference run: the task, the model, the rollout engine, GRPO and the warm-up.

Rule: every field is followed by its own docstring with its unit, and an impossible value is refused when the
object is built, with an error that starts with the key (``grpo.clip_low: …``). Nothing here suspends, and
nothing here imports torch, so that a command line can show these settings without loading it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from quiesce.errors import ConfigError

__all__ = [
    "Aggregation",
    "Correction",
    "EngineConfig",
    "GrpoConfig",
    "ModelConfig",
    "Scalar",
    "TaskConfig",
    "WarmupConfig",
]

Scalar = bool | int | float | str | None
"""What a free-form option may be: the scalars of YAML."""

Correction = Literal["none", "sequence", "decoupled"]
"""How stale rollouts are corrected; `quiesce_grpo.grpo` defines each."""

Aggregation = Literal["token", "sequence", "constant"]
"""How the losses of tokens become one number; `quiesce_grpo.grpo` defines each."""


def _need(key: str, value: float, holds: bool, wanted: str) -> None:  # noqa: FBT001 - the outcome of the caller's comparison
    """Refuse a value that is not finite or does not do what its key wants."""
    if not math.isfinite(value) or not holds:
        raise ConfigError(key, f"must be {wanted}, not {value!r}")


@dataclass(frozen=True, kw_only=True)
class TaskConfig:
    """Which verifiable task is trained, as a dataset of `reasoning-gym`."""

    name: str = "chain_sum"
    """Name of the reasoning-gym dataset."""

    size: int = 20_000
    """Prompts in one epoch."""

    seed: int = 1
    """Seed of the dataset; (name, options, seed, index) decide a prompt."""

    prompt: Literal["expression", "question"] = "expression"
    """``expression``: the bare arithmetic expression with ``=`` behind it (tasks that have one, such as
    chain_sum);
    ``question``: the whole question in words."""

    options: dict[str, Scalar] = field(
        default_factory=lambda: {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    )
    """Options of the dataset, passed on by name. reasoning-gym refuses what it does not know."""

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError("task.name", "must name a reasoning-gym dataset, not be empty")
        _need("task.size", self.size, self.size >= 1, "at least 1")
        _need("task.seed", self.seed, self.seed >= 0, "at least 0")
        for reserved in ("seed", "size"):
            if reserved in self.options:
                raise ConfigError(f"task.options.{reserved}", f"is set by task.{reserved}")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The policy: built from an architecture with random weights, or loaded from a path or hub name."""

    path: str | None = None
    """A folder or hub name that `transformers` can load (weights and tokenizer); None builds
    ``architecture``."""

    architecture: dict[str, Scalar] = field(
        default_factory=lambda: {
            "model_type": "qwen2",
            "hidden_size": 96,
            "intermediate_size": 256,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "max_position_embeddings": 64,
        }
    )
    """Configuration of a `transformers` causal LM, ``model_type`` included. The vocabulary's size and special
    tokens are filled in from the tokenizer. Unused when ``path`` is given."""

    alphabet: str = "0123456789 +-="
    """Characters of the vocabulary of a model built from ``architecture``; each is one token."""

    device: str = "auto"
    """``auto`` (a GPU when there is one), ``cpu``, ``cuda`` or ``cuda:N``."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """What the forward pass computes in: ``auto`` is bfloat16 on a GPU and float32 elsewhere. The trainer's
    own weights and the optimizer stay float32 either way; the rollout engine holds its copy in this type."""

    threads: int = 1
    """Intra-op threads of torch on the CPU, 0 leaves torch's own choice. At tiny sizes one thread for the
    engine and one for the trainer beat two threads that both of them fight for."""

    chat_template: bool = False
    """Wrap each prompt in the chat template of the tokenizer that came with ``path``."""

    def __post_init__(self) -> None:
        if self.path is not None and not self.path:
            raise ConfigError("model.path", "must be a folder or a hub name, not an empty text")
        if self.path is None:
            if not self.architecture.get("model_type"):
                raise ConfigError("model.architecture.model_type", "must name a transformers model type")
            if self.chat_template:
                raise ConfigError(
                    "model.chat_template", "needs model.path: a character vocabulary has no template"
                )
            if not self.alphabet:
                raise ConfigError("model.alphabet", "must hold at least one character")
            if len(set(self.alphabet)) != len(self.alphabet):
                raise ConfigError("model.alphabet", "must hold each character once")
            for filled in ("vocab_size", "pad_token_id", "eos_token_id", "bos_token_id"):
                if filled in self.architecture:
                    raise ConfigError(f"model.architecture.{filled}", "is filled in from the vocabulary")
        device, _, number = self.device.partition(":")
        if device not in {"auto", "cpu", "cuda"} or (
            ":" in self.device and not (device == "cuda" and number.isdigit())
        ):
            raise ConfigError("model.device", f"must be auto, cpu, cuda or cuda:N, not {self.device!r}")
        if self.dtype not in {"auto", "float32", "bfloat16"}:
            raise ConfigError("model.dtype", f"must be auto, float32 or bfloat16, not {self.dtype!r}")
        _need("model.threads", self.threads, self.threads >= 0, "at least 0")


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How completions are generated."""

    max_new_tokens: int = 4
    """Longest completion, in tokens, the end-of-sequence token included."""

    temperature: float = 1.0
    """Sampling temperature. The trainer computes its log-probabilities at the same one."""

    workers: int = 1
    """Worker threads, each with its own copy of the weights."""

    max_batch_groups: int = 16
    """Prompt groups that one batch of a worker holds at most."""

    linger_seconds: float = 0.002
    """How long a worker that has one call waits for more, to batch them, in seconds."""

    deadline_seconds: float = 120.0
    """How long one batch may run, in seconds. Past it its calls fail, the worker is abandoned and another one
    takes its place."""

    chunk_tokens: int = 2
    """After how many tokens, and again, a call's tokens so far are staged in the data plane, so that a resume
    goes on from them; 0 stages nothing, and an unfinished call then begins anew after a resume."""

    permit_wait_seconds: float = 90.0
    """How long a finished call may wait for a permit of its worker's snapshot gate, in seconds; past it the
    call fails, and is tried again. A checkpoint keeps gates closed for milliseconds, but one whose fence and
    drain both come close to their deadlines does so for up to 120 s."""

    permit_deadline_seconds: float = 180.0
    """How long a permit may be out, in seconds: past it a put or a clear hangs, and its worker is abandoned.
    Longer than a put waits for room in a store that a snapshot pins (120 s)."""

    swap_weights: Literal["between_steps", "between_batches"] = "between_steps"
    """When a worker takes newer weights: between two tokens (a long completion then spans several versions,
    each token with the log-probability of the weights that drew it), or only between batches."""

    def __post_init__(self) -> None:
        _need("engine.max_new_tokens", self.max_new_tokens, self.max_new_tokens >= 1, "at least 1")
        _need("engine.temperature", self.temperature, self.temperature > 0, "greater than 0")
        _need("engine.workers", self.workers, self.workers >= 1, "at least 1")
        _need("engine.max_batch_groups", self.max_batch_groups, self.max_batch_groups >= 1, "at least 1")
        _need("engine.linger_seconds", self.linger_seconds, self.linger_seconds >= 0, "at least 0")
        _need("engine.deadline_seconds", self.deadline_seconds, self.deadline_seconds > 0, "greater than 0")
        _need("engine.chunk_tokens", self.chunk_tokens, self.chunk_tokens >= 0, "at least 0")
        _need(
            "engine.permit_wait_seconds",
            self.permit_wait_seconds,
            self.permit_wait_seconds > 0,
            "greater than 0",
        )
        _need(
            "engine.permit_deadline_seconds",
            self.permit_deadline_seconds,
            self.permit_deadline_seconds > 0,
            "greater than 0",
        )
        if self.swap_weights not in {"between_steps", "between_batches"}:
            raise ConfigError(
                "engine.swap_weights", f"must be between_steps or between_batches, not {self.swap_weights!r}"
            )


@dataclass(frozen=True, kw_only=True)
class GrpoConfig:
    """The objective, the optimizer and its schedule."""

    learning_rate: float = 7e-4
    """Peak learning rate of AdamW."""

    lr_warmup_steps: int = 10
    """Optimizer steps over which the learning rate rises linearly to its peak."""

    lr_decay_steps: int = 0
    """Optimizer steps, after the rise, over which it falls linearly; 0 keeps it at the peak."""

    lr_final_fraction: float = 0.1
    """Fraction of the peak that it falls to."""

    beta1: float = 0.9
    """AdamW's decay rate of the first moment."""

    beta2: float = 0.99
    """AdamW's decay rate of the second moment."""

    weight_decay: float = 0.0
    """AdamW's decoupled weight decay."""

    max_grad_norm: float = 1.0
    """Gradients are scaled down to this global norm."""

    clip_low: float = 0.2
    """The probability ratio is clipped at 1 − this."""

    clip_high: float = 0.28
    """The probability ratio is clipped at 1 + this; larger than ``clip_low`` is "clip-higher"."""

    dual_clip: float = 3.0
    """Bound of the ratio where the advantage is negative (there the clip above bounds nothing); 0 switches it
    off."""

    correction: Correction = "sequence"
    """Importance correction for rollouts of older weights."""

    importance_cap: float = 2.0
    """Importance weights are truncated at this."""

    kl_coefficient: float = 0.0
    """Weight of the KL penalty to the policy that training began with; 0 holds no such policy at all."""

    normalise_std: bool = True
    """Divide advantages by the standard deviation of their group's rewards."""

    std_floor: float = 1e-4
    """Added to that standard deviation."""

    aggregation: Aggregation = "token"
    """How the losses of tokens become one number."""

    updates_per_batch: int = 1
    """Optimizer steps taken on each batch, over as many shuffled parts of equal size, or over the whole when
    it is 1."""

    rows_per_forward: int = 0
    """Rows of one forward and backward pass, gradients being accumulated; 0 takes all at once."""

    def __post_init__(self) -> None:
        _need("grpo.learning_rate", self.learning_rate, self.learning_rate > 0, "greater than 0")
        _need("grpo.lr_warmup_steps", self.lr_warmup_steps, self.lr_warmup_steps >= 0, "at least 0")
        _need("grpo.lr_decay_steps", self.lr_decay_steps, self.lr_decay_steps >= 0, "at least 0")
        _need(
            "grpo.lr_final_fraction", self.lr_final_fraction, 0 <= self.lr_final_fraction <= 1, "from 0 to 1"
        )
        _need("grpo.beta1", self.beta1, 0 <= self.beta1 < 1, "at least 0 and below 1")
        _need("grpo.beta2", self.beta2, 0 <= self.beta2 < 1, "at least 0 and below 1")
        _need("grpo.weight_decay", self.weight_decay, self.weight_decay >= 0, "at least 0")
        _need("grpo.max_grad_norm", self.max_grad_norm, self.max_grad_norm > 0, "greater than 0")
        _need("grpo.clip_low", self.clip_low, 0 < self.clip_low < 1, "between 0 and 1")
        _need("grpo.clip_high", self.clip_high, self.clip_high > 0, "greater than 0")
        _need(
            "grpo.dual_clip",
            self.dual_clip,
            self.dual_clip == 0 or self.dual_clip > 1 + self.clip_high,
            "0 (off) or greater than 1 + grpo.clip_high",
        )
        _need("grpo.importance_cap", self.importance_cap, self.importance_cap >= 1, "at least 1")
        _need("grpo.kl_coefficient", self.kl_coefficient, self.kl_coefficient >= 0, "at least 0")
        _need("grpo.std_floor", self.std_floor, self.std_floor > 0, "greater than 0")
        _need("grpo.updates_per_batch", self.updates_per_batch, self.updates_per_batch >= 1, "at least 1")
        _need("grpo.rows_per_forward", self.rows_per_forward, self.rows_per_forward >= 0, "at least 0")
        if self.correction not in {"none", "sequence", "decoupled"}:
            raise ConfigError(
                "grpo.correction", f"must be none, sequence or decoupled, not {self.correction!r}"
            )
        if self.aggregation not in {"token", "sequence", "constant"}:
            raise ConfigError(
                "grpo.aggregation", f"must be token, sequence or constant, not {self.aggregation!r}"
            )


@dataclass(frozen=True, kw_only=True)
class WarmupConfig:
    """The short supervised phase before GRPO, so that a random policy earns some reward to begin with."""

    steps: int = 100
    """Optimizer steps; 0 skips the phase (a model loaded from a path needs none)."""

    batch_size: int = 64
    """Questions in each step."""

    learning_rate: float = 3e-3
    """Learning rate of its own AdamW, constant."""

    def __post_init__(self) -> None:
        _need("warmup.steps", self.steps, self.steps >= 0, "at least 0")
        _need("warmup.batch_size", self.batch_size, self.batch_size >= 1, "at least 1")
        _need("warmup.learning_rate", self.learning_rate, self.learning_rate > 0, "greater than 0")
