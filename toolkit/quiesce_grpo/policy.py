"""The policy: a `transformers` causal language model, where it computes and in which type.

Rule: one thread at a time uses a policy. The trainer owns one with float32 weights; every worker of the
rollout engine owns a replica, which it alone reads and writes, so no weight is ever locked. Building a policy
leaves torch's global random state as it was. Nothing here suspends.

Shapes: B rows, T tokens, K kept tokens at the end, V vocabulary.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from quiesce.errors import ConfigError
from quiesce_grpo.config import ModelConfig
from quiesce_grpo.tokenizer import Tokenizer

__all__ = ["Policy", "build_policy", "resolve_device", "resolve_dtype"]


class Policy:
    """A causal language model with what sampling and training need around it.

    Args:
        model: The model, on its device.
        compute_dtype: What the forward pass computes in. Where the weights are wider, it runs under autocast.
        pad_id: Token that fills batches up.
        eos_id: Token that ends a completion.
    """

    def __init__(self, model: nn.Module, *, compute_dtype: torch.dtype, pad_id: int, eos_id: int) -> None:
        self.model = model
        self.compute_dtype = compute_dtype
        self.pad_id = pad_id
        self.eos_id = eos_id
        first = next(model.parameters())
        self.device = first.device
        self._autocast = first.dtype != compute_dtype
        parameters = inspect.signature(model.forward).parameters
        # transformers renamed the argument; both names are in the range of releases that is allowed.
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"
        self._keeps_logits = "logits_to_keep" in parameters

    def new_cache(self) -> Any:  # noqa: ANN401 - transformers is not followed by the type checker
        """Return an empty key-value cache for one batch."""
        from transformers import DynamicCache

        return DynamicCache(config=self.model.config)

    def logits(
        self,
        tokens: Tensor,
        mask: Tensor,
        *,
        keep: int,
        cache: Any = None,  # noqa: ANN401 - see new_cache
    ) -> Tensor:
        """Run the model and return its float32 logits [B, K, V] of the last ``keep`` tokens.

        Args:
            tokens: Token ids [B, T]; with a cache, those that it does not hold yet.
            mask: True for real tokens [B, cached + T]; padding may stand on either side.
            keep: How many tokens at the end logits are wanted of.
            cache: A cache of :meth:`new_cache`, extended in place.
        """
        # Positions count real tokens only, so that padding on the left moves nothing.
        positions = (mask.long().cumsum(-1) - 1).clamp_min(0)[:, -tokens.shape[1] :]
        arguments: dict[str, Any] = {} if cache is None else {self._cache_argument: cache}
        if self._keeps_logits:
            arguments["logits_to_keep"] = keep
        with torch.autocast(self.device.type, dtype=self.compute_dtype, enabled=self._autocast):
            output = self.model(
                input_ids=tokens,
                attention_mask=mask.long(),
                position_ids=positions,
                use_cache=cache is not None,
                **arguments,
            )
        logits: Tensor = output.logits
        return logits[:, -keep:].float()

    def replica(self) -> Self:
        """Return an independent copy for generation: no gradients, weights in the compute type."""
        model = copy.deepcopy(self.model).to(self.compute_dtype).requires_grad_(False).eval()
        self._synchronise()
        return type(self)(model, compute_dtype=self.compute_dtype, pad_id=self.pad_id, eos_id=self.eos_id)

    def weights(self) -> dict[str, Tensor]:
        """Return a copy of every weight, on the policy's device; a tied one under its first name alone."""
        copied = {name: value.detach().clone() for name, value in _distinct(self.model).items()}
        self._synchronise()
        return copied

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Overwrite every weight in place, converting types where they differ.

        Args:
            weights: What :meth:`weights` of a policy with the same architecture returned.

        Raises:
            ConfigError: If names or shapes are not this policy's.
        """
        own = _distinct(self.model)
        if own.keys() != weights.keys():
            odd = sorted(own.keys() ^ weights.keys())
            raise ConfigError("model.architecture", f"weights of another architecture: {', '.join(odd[:4])}")
        for name, value in own.items():
            if value.shape != weights[name].shape:
                shapes = f"{tuple(weights[name].shape)} for {tuple(value.shape)}"
                raise ConfigError(
                    "model.architecture", f"weights of another architecture: {name} is {shapes}"
                )
            value.copy_(weights[name])
        self._synchronise()

    def num_parameters(self) -> int:
        """Return the number of weights, tied ones counted once."""
        return sum(value.numel() for value in self.model.parameters())

    def _synchronise(self) -> None:
        """Wait for the GPU: others go on with the result on other streams, or free its source."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()


def _distinct(model: nn.Module) -> dict[str, Tensor]:
    """Return the state of a model without the second names of tied weights."""
    seen: set[tuple[int, int]] = set()
    found = {}
    for name, value in model.state_dict().items():
        place = (value.data_ptr(), value.numel())
        if place not in seen:
            found[name] = value
            seen.add(place)
    return found


def resolve_device(name: str) -> torch.device:
    """Return the device that a setting names.

    Raises:
        ConfigError: If it names a GPU and there is none, or not so many.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(
            "model.device", f"{name} is not there: torch sees {torch.cuda.device_count()} CUDA devices"
        )
    return device


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the type to compute in."""
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def build_policy(config: ModelConfig, tokenizer: Tokenizer, *, seed: int) -> Policy:
    """Build the trainer's policy: float32 weights, random from ``seed`` or loaded from a path.

    Args:
        config: Which model, where, in which type.
        tokenizer: Its vocabulary.
        seed: Seed of random weights. They are drawn on the CPU, so that every device starts from the same
            ones.

    Raises:
        ConfigError: If the model cannot be built or loaded, or its device is not there.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    device = resolve_device(config.device)
    dtype = resolve_dtype(config.dtype, device)
    if config.path is not None:
        try:
            model = AutoModelForCausalLM.from_pretrained(config.path, dtype=torch.float32)
        except (OSError, ValueError) as error:
            raise ConfigError("model.path", f"cannot load {config.path!r}: {error}") from error
    else:
        options = dict(config.architecture)
        kind = options.pop("model_type")
        special = {"pad_token_id": tokenizer.pad_id, "eos_token_id": tokenizer.eos_id, "bos_token_id": None}
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            try:
                architecture = AutoConfig.for_model(kind, vocab_size=tokenizer.size, **options, **special)
                model = AutoModelForCausalLM.from_config(architecture, dtype=torch.float32)
            except (ValueError, TypeError) as error:
                raise ConfigError("model.architecture", f"transformers refuses it: {error}") from error
    _without_dropout(model)
    return Policy(
        model.to(device).train(), compute_dtype=dtype, pad_id=tokenizer.pad_id, eos_id=tokenizer.eos_id
    )


def _without_dropout(model: nn.Module) -> None:
    """Switch dropout off: log-probabilities of the trainer must be comparable with those of the sampler."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0  # type: ignore[assignment] # a plain float that attention layers read
