"""The trainer: one GRPO step on a batch of groups, in a thread of its own.

Rule: everything that changes weights, optimizer or schedule happens in the trainer's one thread, one step at
a time, and a step that was begun is finished: cancelling :meth:`GrpoTrainer.train_step` waits for the running
part, so that whoever saves afterwards never reads a half-made update. Advantages are written back before the
optimizer moves.

Yield rule: :meth:`GrpoTrainer.train_step` and :meth:`GrpoTrainer.weights` suspend; nothing else does. They
never use the event loop's default executor.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from quiesce import TrainBatch
from quiesce.threads import DaemonExecutor
from quiesce_grpo.config import GrpoConfig
from quiesce_grpo.errors import BatchError
from quiesce_grpo.grpo import group_advantages, grpo_loss, normaliser
from quiesce_grpo.policy import Policy
from quiesce_grpo.sampling import TokenLogProbabilities, token_logprobs

__all__ = ["Generators", "GrpoTrainer", "Stateful"]

_ROW_FIELDS = ("prompt_tokens", "completion_tokens", "behaviour_logprobs", "reward")
_T = TypeVar("_T")


class Stateful(Protocol):
    """A part of the trainer that a checkpoint holds."""

    def state_dict(self) -> dict[str, Any]:
        """Return its state; tensors in it are live, so clone them before the next step."""

    def load_state_dict(self, state: dict[str, Any], /) -> object:
        """Overwrite its state."""


class Generators:
    """The random generators of training as one stateful part.

    The trainer draws the parts of a batch from ``shuffle``. Sampling needs none (`quiesce_grpo.sampling`),
    and dropout is off; torch's global states are held all the same, for whoever adds something that draws
    from them.

    Args:
        seed: Seed of the shuffle.
    """

    def __init__(self, seed: int) -> None:
        self.shuffle = torch.Generator().manual_seed(seed)

    def state_dict(self) -> dict[str, Any]:
        """Return the states as byte tensors."""
        state: dict[str, Any] = {"shuffle": self.shuffle.get_state(), "torch": torch.get_rng_state()}
        if torch.cuda.is_available():
            state["cuda"] = torch.cuda.get_rng_state()
        return state

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        """Restore the states; that of a GPU only where there is one."""
        self.shuffle.set_state(state["shuffle"].cpu())
        torch.set_rng_state(state["torch"].cpu())
        if "cuda" in state and torch.cuda.is_available():
            torch.cuda.set_rng_state(state["cuda"].cpu())


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A batch as flat rows, on the host."""

    prompts: list[list[int]]
    completions: list[list[int]]
    behaviour: list[Tensor]
    advantages: Tensor
    writes: list[list[dict[str, Tensor]]]
    reward_mean: float
    reward_std: float
    constant_groups: float
    staleness: float
    weights_lag: float


class GrpoTrainer:
    """Owns the policy, its optimizer and schedule, and takes GRPO steps.

    Args:
        policy: The policy, warmed up. With a KL penalty its weights now are the reference.
        config: Objective, optimizer, schedule.
        temperature: Sampling temperature of the engine.
        max_new_tokens: Longest completion of the engine (used by the ``constant`` aggregation).
        seed: Seed of the shuffle of a batch.
    """

    def __init__(
        self, policy: Policy, config: GrpoConfig, *, temperature: float, max_new_tokens: int, seed: int
    ) -> None:
        self.policy = policy
        self.config = config
        self.generators = Generators(seed)
        self._temperature = temperature
        self._max_new_tokens = max_new_tokens
        self._parameters = [value for value in policy.model.parameters() if value.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self._parameters,
            lr=config.learning_rate,
            betas=(config.beta1, config.beta2),
            weight_decay=config.weight_decay,
        )
        self._fill_optimizer_state()
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self._learning_rate_factor)
        self.reference = policy.replica() if config.kl_coefficient else None
        # Daemon threads: a step that hangs must not keep a halted run from exiting.
        self._executor = DaemonExecutor("trainer", 1)
        self._executor.submit(torch.set_num_threads, torch.get_num_threads())  # the setting is a thread's own

    async def train_step(self, batch: TrainBatch) -> Mapping[str, float]:
        """Write the advantages back and take the optimizer steps of one batch.

        Cancelling it waits for the part that runs: at worst the optimizer moved and the metrics are lost.

        Args:
            batch: Groups with the rows that the engine made.

        Returns:
            ``reward``, ``reward_std``, ``loss``, ``kl`` (from the policy that sampled, k3), ``kl_reference``,
            ``staleness`` (trainer version − version at admission, mean over groups), ``weights_lag`` (trainer
            version − version of the first token), ``entropy``, ``clip_fraction``, ``ratio``,
            ``importance_weight``, ``grad_norm``, ``constant_groups`` (fraction), ``tokens``,
            ``learning_rate``, ``skipped_updates``.

        Raises:
            BatchError: If a row lacks a field or does not fit together.
        """
        prepared = await self._in_thread(lambda: self._prepare(batch))
        if any(fields for group in prepared.writes for fields in group):
            await batch.write_back(prepared.writes)
        return await self._in_thread(lambda: self._optimise(prepared))

    async def weights(self) -> dict[str, Tensor]:
        """Return a copy of the policy's weights, for ``RolloutEngine.sync_weights``."""
        return await self._in_thread(self.policy.weights)

    def state(self) -> dict[str, Stateful]:
        """Return the parts that a checkpoint holds, by name.

        They are ``model``, ``optimizer``, ``scheduler``, ``generators``, and with a KL penalty ``reference``.
        The optimizer's state is complete from the start, so that a new trainer can be loaded into by name.
        """
        parts: dict[str, Stateful] = {
            "model": self.policy.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "generators": self.generators,
        }
        if self.reference is not None:
            parts["reference"] = self.reference.model
        return parts

    def close(self) -> None:
        """End the trainer's thread once what it runs is done, without waiting for it. Idempotent."""
        self._executor.shutdown(wait=False)

    # --------------------------------------------------------------------------------------------------
    # private

    async def _in_thread(self, function: Callable[[], _T]) -> _T:
        """Run a function in the trainer's thread and see it through, even when this task is cancelled."""
        future = asyncio.get_running_loop().run_in_executor(self._executor, function)
        cancelled: asyncio.CancelledError | None = None
        while not future.done():
            try:
                await asyncio.wait([future])
            except asyncio.CancelledError as error:
                cancelled = error
        if cancelled is not None:
            future.exception()  # retrieved, so that nobody complains about it
            raise cancelled
        return future.result()

    def _prepare(self, batch: TrainBatch) -> _Prepared:
        prompts, completions, behaviour, writes = [], [], [], []
        advantages, rewards, constant = [], [], 0
        for entry, rows in zip(batch.entries, batch.rows, strict=True):
            for row in rows:
                missing = [name for name in _ROW_FIELDS if name not in row]
                if missing:
                    raise BatchError(batch.step, entry.group_id, f"a row lacks {', '.join(missing)}")
                prompts.append([int(token) for token in row["prompt_tokens"]])
                completions.append([int(token) for token in row["completion_tokens"]])
                behaviour.append(torch.as_tensor(row["behaviour_logprobs"]).float().cpu())
                if not completions[-1] or len(completions[-1]) != len(behaviour[-1]):
                    counts = (
                        f"{len(completions[-1])} completion tokens and {len(behaviour[-1])} log-probabilities"
                    )
                    raise BatchError(batch.step, entry.group_id, f"a row has {counts}")
            group_rewards = torch.stack([torch.as_tensor(row["reward"]).reshape(()) for row in rows]).float()
            group = group_advantages(
                group_rewards, normalise_std=self.config.normalise_std, std_floor=self.config.std_floor
            )
            constant += not bool(group.any())
            rewards.append(group_rewards)
            advantages.append(group)
            # A field is never overwritten: what a failed try of this step wrote is what would be written now.
            writes.append(
                [
                    {} if "advantage" in row else {"advantage": value.reshape(1)}
                    for row, value in zip(rows, group, strict=True)
                ]
            )
        if not prompts:
            raise BatchError(batch.step, "none", "there is no row to train on")
        every_reward = torch.cat(rewards)
        groups = len(batch.entries)
        return _Prepared(
            prompts=prompts,
            completions=completions,
            behaviour=behaviour,
            advantages=torch.cat(advantages),
            writes=writes,
            reward_mean=float(every_reward.mean()),
            reward_std=float(torch.stack([one.std(correction=0) for one in rewards]).mean()),
            constant_groups=constant / groups,
            staleness=sum(batch.version - entry.start_version for entry in batch.entries) / groups,
            weights_lag=sum(batch.version - entry.generated_from for entry in batch.entries) / groups,
        )

    def _optimise(self, prepared: _Prepared) -> dict[str, float]:
        config = self.config
        rows = len(prepared.prompts)
        parts: list[list[int]] = [list(range(rows))]
        proximal: dict[int, Tensor] = {}
        if config.updates_per_batch > 1:
            order = torch.randperm(rows, generator=self.generators.shuffle).tolist()
            parts = [order[place :: config.updates_per_batch] for place in range(config.updates_per_batch)]
            parts = [part for part in parts if part]
            if config.correction == "decoupled":
                proximal = self._proximal(prepared)
        totals: dict[str, float] = {}
        norms, skipped, loss_sum, tokens = [], 0, 0.0, 0
        learning_rate = float(self.scheduler.get_last_lr()[0])
        for part in parts:
            loss, sums, count = self._accumulate(prepared, part, proximal)
            norm = float(nn.utils.clip_grad_norm_(self._parameters, config.max_grad_norm))
            if math.isfinite(norm):
                self.optimizer.step()
                self.scheduler.step()
                norms.append(norm)
            else:
                skipped += 1
            self.optimizer.zero_grad(set_to_none=True)
            loss_sum += loss
            tokens += count
            for name, value in sums.items():
                totals[name] = totals.get(name, 0.0) + value
        mean = {name: value / max(tokens, 1) for name, value in totals.items()}
        return {
            "reward": prepared.reward_mean,
            "reward_std": prepared.reward_std,
            "loss": loss_sum / len(parts),
            "kl": mean["kl"],
            "kl_reference": mean["kl_reference"],
            "staleness": prepared.staleness,
            "weights_lag": prepared.weights_lag,
            "entropy": mean["entropy"],
            "clip_fraction": mean["clipped"],
            "ratio": mean["ratio"],
            "importance_weight": mean["weight"],
            "grad_norm": sum(norms) / max(len(norms), 1),
            "constant_groups": prepared.constant_groups,
            "tokens": float(tokens),
            "learning_rate": learning_rate,
            "skipped_updates": float(skipped),
        }

    def _accumulate(
        self, prepared: _Prepared, part: Sequence[int], proximal: Mapping[int, Tensor]
    ) -> tuple[float, dict[str, float], int]:
        """Add up the gradients of one optimizer step; return loss, sums over tokens, number of tokens."""
        config = self.config
        device = self.policy.device
        lengths = [len(prepared.completions[row]) for row in part]
        divisor = normaliser(lengths, config.aggregation, self._max_new_tokens)
        loss_sum = torch.zeros((), device=device)
        sums: dict[str, Tensor] = {}
        for chunk in _chunks(part, config.rows_per_forward):
            scored = self._score(self.policy, prepared, chunk)
            width = scored.mask.shape[1]
            reference = None
            if self.reference is not None:
                with torch.no_grad():
                    reference = self._score(self.reference, prepared, chunk).logprobs
            terms = grpo_loss(
                scored.logprobs,
                _stack([prepared.behaviour[row] for row in chunk], width, device),
                prepared.advantages[list(chunk)].to(device),
                scored.mask,
                config,
                divisor=divisor,
                proximal=_stack([proximal[row] for row in chunk], width, device) if proximal else None,
                reference=reference,
            )
            terms.loss.backward()  # type: ignore[no-untyped-call] # torch does not annotate it
            loss_sum += terms.loss.detach()
            for name, value in {**terms.sums, "entropy": scored.entropy.sum()}.items():
                sums[name] = sums[name] + value if name in sums else value
        return float(loss_sum), {name: float(value) for name, value in sums.items()}, sum(lengths)

    @torch.no_grad()
    def _proximal(self, prepared: _Prepared) -> dict[int, Tensor]:
        """Return the log-probabilities of every row under the weights that the step begins with."""
        found: dict[int, Tensor] = {}
        for chunk in _chunks(range(len(prepared.prompts)), self.config.rows_per_forward):
            logprobs = self._score(self.policy, prepared, chunk).logprobs.cpu()
            for row, values in zip(chunk, logprobs, strict=True):
                found[row] = values[: len(prepared.completions[row])]
        return found

    def _score(self, policy: Policy, prepared: _Prepared, chunk: Sequence[int]) -> TokenLogProbabilities:
        return token_logprobs(
            policy,
            [prepared.prompts[row] for row in chunk],
            [prepared.completions[row] for row in chunk],
            temperature=self._temperature,
        )

    def _learning_rate_factor(self, step: int) -> float:
        config = self.config
        if step < config.lr_warmup_steps:
            return (step + 1) / config.lr_warmup_steps
        if not config.lr_decay_steps:
            return 1.0
        progress = min((step - config.lr_warmup_steps) / config.lr_decay_steps, 1.0)
        return 1.0 - (1.0 - config.lr_final_fraction) * progress

    def _fill_optimizer_state(self) -> None:
        """Create the moments now, as AdamW itself would at its first step.

        A checkpoint that is taken before that step then has the same entries as every later one, and any of
        them can be loaded into a new trainer by name.
        """
        for value in self._parameters:
            self.optimizer.state[value] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(value),
                "exp_avg_sq": torch.zeros_like(value),
            }


def _chunks(rows: Sequence[int], size: int) -> list[Sequence[int]]:
    size = size or len(rows)
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def _stack(rows: Sequence[Tensor], width: int, device: torch.device) -> Tensor:
    """Return rows of different lengths [R, width], filled up with zeros."""
    padded = torch.zeros(len(rows), width)
    for place, row in enumerate(rows):
        padded[place, : len(row)] = row
    return padded.to(device)
