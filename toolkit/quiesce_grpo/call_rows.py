"""One generation call as rows of the data plane: the tokens so far in chunks, and the final row of each generation.

Rule: what was staged is never drawn again, and never contradicted: a call that goes on, after a resume or because its
batch failed, begins with exactly the tokens that are in the data plane, with the log-probabilities and the weight
versions that they were drawn with. A chunk ends where a character ends. Yield rule: nothing here suspends; ``stage``
blocks, in a worker's thread.

==========  ==================  =======  ==========================================================
row         field               type     holds
==========  ==================  =======  ==========================================================
chunk       ``tokens``          int32    what was drawn since the chunk before it
chunk       ``logprobs``        float32  one for each of them, in nats
chunk       ``versions``        int32    the weights that drew each of them
final       ``prompt_tokens``   int32    the prompt
final       ``completion_…``    int32    ``completion_tokens``: the whole completion
final       ``behaviour_…``     float32  ``behaviour_logprobs``: one for each token, in nats
final       ``versions``        int32    the weights that drew each token
final       ``reward``          float32  the completion's score, shape [1]
==========  ==================  =======  ==========================================================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from quiesce import GenerationRequest, GroupResult
from quiesce.staging import Staging
from quiesce_grpo.errors import StagedRowError
from quiesce_grpo.sampling import Completion
from quiesce_grpo.tokenizer import Tokenizer

__all__ = ["CallRows"]

Row = Mapping[str, Tensor]


class CallRows:
    """The rows of one call.

    Args:
        request: The call.
        staging: Where its rows go, and what was found there; None if the call returns its rows.
        prompt_tokens: The encoded prompt.
        tokenizer: Knows where characters and completions end.

    Attributes:
        open: The generations that have no final row yet, in order.
        reused: Tokens of all generations that were found.

    Raises:
        StagedRowError: If what was found is nothing that this class has put.
    """

    def __init__(
        self,
        request: GenerationRequest,
        staging: Staging | None,
        prompt_tokens: Sequence[int],
        tokenizer: Tokenizer,
    ) -> None:
        self._request = request
        self._staging = staging
        self._prompt_tokens = list(prompt_tokens)
        self._tokenizer = tokenizer
        finals = staging.finals if staging is not None else (None,) * request.num_generations
        self._final = {
            generation: self._read(row, "completion_tokens", "behaviour_logprobs", "versions", "reward")
            for generation, row in enumerate(finals)
            if row is not None
        }
        self._rewards = {
            generation: float(row["reward"][0]) for generation, row in enumerate(finals) if row is not None
        }
        self.open = [generation for generation, row in enumerate(finals) if row is None]
        self._staged = {generation: Completion() for generation in self.open}
        if staging is not None:
            for generation in self.open:
                for row in staging.found[generation]:
                    _extend(self._staged[generation], self._read(row, "tokens", "logprobs", "versions"))
        for one in (*self._final.values(), *self._staged.values()):
            one.finished = one.tokens[-1:] == [tokenizer.eos_id]
        self.reused = sum(len(one.tokens) for one in (*self._final.values(), *self._staged.values()))

    def begun(self) -> list[Completion]:
        """Return what is staged of each open generation, for the sampler to go on from."""
        return [self._staged[generation] for generation in self.open]

    def stage(self, completions: Sequence[Completion]) -> int:
        """Put what was drawn since the last time as the next chunk of each open generation. Blocks.

        Args:
            completions: The open generations as far as they were drawn, in order.

        Returns:
            How many chunk rows were put.

        Raises:
            StagingRetiredError: If the attempt was given up.
            DataPlaneError: What the store raises; the next call puts these tokens too, then.
        """
        if self._staging is None:
            return 0
        chunks: dict[int, Completion] = {}
        for generation, one in zip(self.open, completions, strict=True):
            staged = len(self._staged[generation].tokens)
            fresh = one.tokens[staged:]
            # Nothing follows a completion that is over, so there is nothing to split it from.
            count = len(fresh) if one.finished else self._tokenizer.whole(fresh)
            if count:
                chunks[generation] = _part(one, staged, staged + count)
        if chunks:
            self._staging.put_chunks(
                {
                    generation: _row(chunk, "tokens", "logprobs", "versions")
                    for generation, chunk in chunks.items()
                }
            )
        for generation, chunk in chunks.items():
            _extend(self._staged[generation], chunk)
        return len(chunks)

    def finish(
        self, completions: Sequence[Completion], score: Callable[[Sequence[int]], float]
    ) -> tuple[GroupResult, dict[int, Row]]:
        """Score the completions and make the final rows.

        Args:
            completions: The open generations, complete, in order.
            score: Returns the reward of a completion's tokens.

        Returns:
            The group, without rows if the call is staged; and the final row of each open generation.
        """
        drawn = dict(zip(self.open, completions, strict=True))
        rewards = {**self._rewards, **{generation: score(one.tokens) for generation, one in drawn.items()}}
        rows = {generation: self._final_row(one, rewards[generation]) for generation, one in drawn.items()}
        group = {**self._final, **drawn}
        every = [group[generation] for generation in range(self._request.num_generations)]
        scores = torch.tensor([rewards[generation] for generation in range(len(every))], dtype=torch.float64)
        result = GroupResult(
            rows=[rows[generation] for generation in self.open] if self._staging is None else None,
            version_from=min(one.version_from for one in every),
            version_to=max(one.version_to for one in every),
            stats={
                "reward": float(scores.mean()),
                "reward_std": float(scores.std(correction=0)),
                "tokens": float(sum(len(one.tokens) for one in every) - self.reused),
                "reused": float(self.reused),
                "finished": sum(one.finished for one in every) / len(every),
            },
        )
        return result, rows

    def _final_row(self, one: Completion, reward: float) -> Row:
        return {
            "prompt_tokens": torch.tensor(self._prompt_tokens, dtype=torch.int32),
            **_row(one, "completion_tokens", "behaviour_logprobs", "versions"),
            "reward": torch.tensor([reward], dtype=torch.float32),
        }

    def _read(
        self, row: Mapping[str, Any], tokens: str, logprobs: str, versions: str, *others: str
    ) -> Completion:
        missing = [name for name in (tokens, logprobs, versions, *others) if name not in row]
        if missing:
            raise StagedRowError(self._request.group_id, f"lacks {', '.join(missing)}")
        one = Completion(row[tokens].tolist(), row[logprobs].tolist(), row[versions].tolist())
        if not len(one.tokens) == len(one.logprobs) == len(one.versions) > 0:
            counts = (
                f"{len(one.tokens)} tokens, {len(one.logprobs)} log-probabilities and {len(one.versions)}"
            )
            raise StagedRowError(self._request.group_id, f"has {counts} versions")
        return one


def _row(one: Completion, tokens: str, logprobs: str, versions: str) -> Row:
    return {
        tokens: torch.tensor(one.tokens, dtype=torch.int32),
        logprobs: torch.tensor(one.logprobs, dtype=torch.float32),
        versions: torch.tensor(one.versions, dtype=torch.int32),
    }


def _part(one: Completion, start: int, stop: int) -> Completion:
    whole = one.finished and stop == len(one.tokens)
    return Completion(
        one.tokens[start:stop], one.logprobs[start:stop], one.versions[start:stop], finished=whole
    )


def _extend(one: Completion, more: Completion) -> None:
    one.tokens += more.tokens
    one.logprobs += more.logprobs
    one.versions += more.versions
    one.finished = more.finished
