"""Tasks with verifiable rewards: datasets of `reasoning-gym`, read by index.

Rule: (name, options, seed, index) decide a prompt and its entry, whichever process reads it and in whatever
order, so a checkpoint needs only the index. Nothing here suspends; reading a prompt makes it on the spot, in
microseconds.

The reward is the task's own ``score_answer``: it gives 1 for a right answer, and by itself partial credit
that needs no shaping of ours: chain_sum gives ``len(answer) / len(text)`` where the right answer stands
inside a longer text, and gsm_symbolic gives 0.01 for any number. There is no learned reward model and no
format reward of our own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

from quiesce.errors import ConfigError
from quiesce_grpo.config import TaskConfig
from quiesce_grpo.errors import RewardError

__all__ = ["Task", "TaskItem"]


@dataclass(frozen=True, slots=True)
class TaskItem:
    """One prompt of a task.

    Attributes:
        index: Its index in the dataset.
        prompt: What the policy reads.
        answer: A right answer in words, as the warm-up teaches it.
        entry: The entry of reasoning-gym that scoring needs (question, answer, metadata).
    """

    index: int
    prompt: str
    answer: str
    entry: Mapping[str, object]


class _Dataset(Protocol):
    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> dict[str, Any]: ...
    def score_answer(self, answer: str | None, entry: dict[str, Any]) -> float: ...


class Task:
    """A dataset of prompts that can score answers to them; loaders may pickle it into worker processes.

    Args:
        config: Which task, how many prompts, which seed.

    Raises:
        ConfigError: If reasoning-gym has no such task, refuses its options, or the prompt form does not fit
            it.
    """

    def __init__(self, config: TaskConfig) -> None:
        import reasoning_gym

        self.config = config
        try:
            dataset = reasoning_gym.create_dataset(
                config.name, seed=config.seed, size=config.size, **config.options
            )
        except ValueError as error:
            raise ConfigError("task.name", str(error)) from error
        except (TypeError, AssertionError) as error:
            raise ConfigError("task.options", f"{config.name} refuses them: {error}") from error
        self._dataset = cast("_Dataset", dataset)
        if config.prompt == "expression" and "expression" not in self._dataset[0]["metadata"]:
            raise ConfigError("task.prompt", f"task {config.name} has no bare expression; use question")

    def __len__(self) -> int:
        return self.config.size

    def __getitem__(self, index: int) -> TaskItem:
        """Return the prompt with an index.

        Raises:
            IndexError: If the index is not in [0, size).
        """
        if not 0 <= index < self.config.size:
            raise IndexError(
                f"task {self.config.name} has {self.config.size} prompts, there is no index {index}"
            )
        entry = self._dataset[index]
        prompt = (
            f"{entry['metadata']['expression']} ="
            if self.config.prompt == "expression"
            else str(entry["question"])
        )
        return TaskItem(index=index, prompt=prompt, answer=str(entry["answer"]), entry=entry)

    def score(self, item: TaskItem, text: str) -> float:
        """Return the reward of a text as an answer, from 0 (worthless) to 1 (right).

        Args:
            item: The prompt that was answered.
            text: The decoded completion; blanks around it are left out.

        Raises:
            RewardError: If the task answers with something that is not a finite number.
        """
        score: object = self._dataset.score_answer(text.strip(), dict(item.entry))
        if not isinstance(score, int | float) or not math.isfinite(score):
            raise RewardError(self.config.name, item.index, score)
        return float(score)
