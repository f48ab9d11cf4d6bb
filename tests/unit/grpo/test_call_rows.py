"""One call as rows: chunks end where characters end, and what is staged is never contradicted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from quiesce import GenerationRequest
from quiesce.dataplane import MemoryDataPlane
from quiesce.errors import StoreFailedError
from quiesce.snapshot_gate import SnapshotGate
from quiesce.staging import Staging
from quiesce.testing import strict_hub
from quiesce.types import RowKey
from quiesce_grpo.call_rows import CallRows
from quiesce_grpo.errors import StagedRowError
from quiesce_grpo.sampling import Completion
from quiesce_grpo.tokenizer import CharacterTokenizer

GROUP = "e000-p0000001"
EOS = CharacterTokenizer.EOS_ID
HALF = 9
"""A token that is the first half of a character."""


class HalvesTokenizer(CharacterTokenizer):
    """A vocabulary in which one token is only half a character; the token after it is the other half."""

    def whole(self, tokens: Sequence[int]) -> int:
        """Count up to the last token that does not wait for its other half."""
        return len(tokens) - (tokens[-1:] == [HALF])


@pytest.fixture
def plane() -> Iterator[MemoryDataPlane]:
    """A store in memory."""
    opened = MemoryDataPlane(1, hub=strict_hub())
    yield opened
    opened.close()


def request(generations: int = 2) -> GenerationRequest:
    """Return a request for a group."""
    return GenerationRequest(GROUP, 0, None, 1, 0, generations)


def call(
    plane: MemoryDataPlane, *, generations: int = 2, found: Sequence[RowKey] = ()
) -> tuple[CallRows, Staging]:
    """Return the rows of a call, and where they go."""
    staging = Staging(plane, GROUP, 0, generations, hand_over=lambda _keys: None, found=found)
    if staging.to_load:
        staging.load()
    tokenizer = HalvesTokenizer("abcdefghijklmnop")
    return CallRows(request(generations), staging, [2, 3], tokenizer), staging


def drawn(*tokens: int, version: int = 0) -> Completion:
    """Return a completion as far as it was drawn."""
    return Completion(
        list(tokens), [-0.5] * len(tokens), [version] * len(tokens), finished=tokens[-1:] == (EOS,)
    )


def chunks(plane: MemoryDataPlane, generation: int) -> list[list[int]]:
    """Return the tokens of a generation's chunks, in order."""
    keys = [key for key in plane.keys("") if key.generation == generation and key.sequence is not None]
    return [row["tokens"].tolist() for row in plane.get(keys)]


def test_a_chunk_holds_what_was_drawn_since_the_last_one(plane: MemoryDataPlane) -> None:
    """A generation that has nothing new has no chunk."""
    rows, _ = call(plane)

    assert rows.stage([drawn(4, 5), drawn(6, EOS)]) == 2
    assert rows.stage([drawn(4, 5, 6, 7), drawn(6, EOS)]) == 1
    assert rows.stage([drawn(4, 5, 6, 7), drawn(6, EOS)]) == 0

    assert chunks(plane, 0) == [[4, 5], [6, 7]]
    assert chunks(plane, 1) == [[6, EOS]]


def test_a_chunk_never_ends_inside_a_character(plane: MemoryDataPlane) -> None:
    """The tail is held back and comes with the next chunk; a call that is cut there loses it and draws it again."""
    rows, _ = call(plane, generations=1)

    rows.stage([drawn(4, HALF)])
    rows.stage([drawn(4, HALF, 5, HALF)])

    assert chunks(plane, 0) == [[4], [HALF, 5]]
    assert [one.tokens for one in rows.begun()] == [[4, HALF, 5]]


def test_nothing_is_held_back_of_a_completion_that_is_over(plane: MemoryDataPlane) -> None:
    """Nothing follows its end token."""
    rows, _ = call(plane, generations=1)
    over = drawn(4, HALF)
    over.finished = True

    rows.stage([over])

    assert chunks(plane, 0) == [[4, HALF]]
    assert rows.begun()[0].finished


def test_a_chunk_that_could_not_be_put_is_put_with_the_next(
    plane: MemoryDataPlane, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What counts as staged is what is in the store."""
    rows, _ = call(plane, generations=1)
    with monkeypatch.context() as patched:
        patched.setattr(plane, "put", _refuse)
        with pytest.raises(StoreFailedError):
            rows.stage([drawn(4, 5)])
    assert [one.tokens for one in rows.begun()] == [[]]

    rows.stage([drawn(4, 5, 6)])

    assert chunks(plane, 0) == [[4, 5, 6]]


def _refuse(_rows: object) -> None:
    raise StoreFailedError("put", "rows", "no")


def test_a_group_that_was_partly_final_is_completed(plane: MemoryDataPlane) -> None:
    """The found final row stands as it is; versions, reward and tokens are those of the whole group."""
    rows, staging = call(plane)
    _, finals = rows.finish([drawn(4, 5, EOS, version=1), drawn(6, EOS, version=1)], lambda _tokens: 0.25)
    kept = RowKey(1, GROUP, 0, 0)
    plane.put({kept: finals[0]})
    staging.abandon()
    later, staging = call(plane, found=[kept])
    assert later.open == [1]

    result, fresh = later.finish([drawn(7, 8, 9, version=4)], lambda _tokens: 0.75)
    staging.finish(SnapshotGate("0", hub=strict_hub()), fresh)

    assert sorted(fresh) == [1]
    assert (result.version_from, result.version_to) == (1, 4)
    assert result.stats["reward"] == 0.5
    assert (result.stats["tokens"], result.stats["reused"]) == (3, 3)
    assert result.stats["finished"] == 0.5
    assert staging.finished


@pytest.mark.parametrize(
    "odd, problem",
    [
        ({"tokens": [1], "logprobs": [0.5]}, "lacks versions"),
        (
            {"tokens": [1, 2], "logprobs": [0.5], "versions": [0]},
            "2 tokens, 1 log-probabilities and 1 versions",
        ),
        ({"tokens": [], "logprobs": [], "versions": []}, "0 tokens"),
    ],
)
def test_a_staged_row_that_no_call_puts_is_refused(
    plane: MemoryDataPlane, odd: dict[str, list[float]], problem: str
) -> None:
    """A row of another engine, or another release, is not guessed at."""
    import torch

    chunk = RowKey(1, GROUP, 0, 0, 0)
    plane.put({chunk: {name: torch.tensor(values) for name, values in odd.items()}})

    with pytest.raises(StagedRowError, match=problem):
        call(plane, found=[chunk])


def test_a_final_row_without_a_reward_is_refused(plane: MemoryDataPlane) -> None:
    """A worker that makes its own kind of final rows is told apart by name, like one that stages its own chunks."""
    import torch

    final = RowKey(1, GROUP, 0, 0)
    fields = ("completion_tokens", "behaviour_logprobs", "versions")
    plane.put({final: {name: torch.tensor([4]) for name in fields}})

    with pytest.raises(StagedRowError, match="lacks reward"):
        call(plane, found=[final])


def test_a_call_without_a_staging_returns_its_rows() -> None:
    """And stages nothing."""
    rows = CallRows(request(), None, [2, 3], HalvesTokenizer("abcdefghijklmnop"))

    assert rows.stage([drawn(4), drawn(5)]) == 0
    result, _ = rows.finish([drawn(4, EOS), drawn(5, 6)], lambda tokens: float(len(tokens)))

    assert result.rows is not None
    assert [row["completion_tokens"].tolist() for row in result.rows] == [[4, EOS], [5, 6]]
    assert result.stats["finished"] == 0.5
