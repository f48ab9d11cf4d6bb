"""The rollout engine: batching, weights by version, failures that stay where they are."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio
import torch

from quiesce import GenerationRequest, GroupResult
from quiesce.errors import GenerationTimeoutError
from quiesce_grpo.config import EngineConfig
from quiesce_grpo.engine import RolloutEngine
from quiesce_grpo.errors import EngineClosedError, StaleWeightsError, VocabularyError
from quiesce_grpo.policy import Policy, build_policy
from quiesce_grpo.sampling import token_logprobs
from quiesce_grpo.tasks import Task, TaskItem
from quiesce_grpo.tokenizer import Tokenizer
from tests.unit.grpo.conftest import MODEL

Build = Callable[..., RolloutEngine]

BAD = TaskItem(index=0, prompt="what?", answer="", entry={"answer": "1"})
"""A prompt with characters that the vocabulary lacks."""


def request(
    task: Task, index: int, *, start_version: int = 0, generations: int = 4, attempt: int = 0
) -> GenerationRequest:
    """Return a request for one prompt of the task."""
    return GenerationRequest(
        group_id=f"e000-p{index:07d}",
        attempt=attempt,
        prompt=task[index],
        index=index,
        start_version=start_version,
        num_generations=generations,
    )


@pytest_asyncio.fixture
async def build(policy: Policy, tokenizer: Tokenizer, task: Task) -> AsyncIterator[Build]:
    """Build engines that are closed at the end."""
    engines: list[RolloutEngine] = []

    def built(**settings: Any) -> RolloutEngine:  # noqa: ANN401 - fields of EngineConfig
        config = EngineConfig(**{"max_new_tokens": 6, **settings})
        engines.append(RolloutEngine(policy, tokenizer, task, config, seed=3))
        return engines[-1]

    yield built
    for engine in engines:
        await engine.close(timeout=5.0)


def rows_of(result: GroupResult) -> list[dict[str, torch.Tensor]]:
    """Return the rows of a group that an engine without a run answered."""
    assert result.rows is not None
    return [{name: torch.as_tensor(value) for name, value in row.items()} for row in result.rows]


class Gate:
    """Holds an engine's forward passes in their thread until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered = threading.Event()
        self.open = threading.Event()
        inner = Policy.logits

        def logits(policy: Policy, *arguments: Any, **named: Any) -> torch.Tensor:  # noqa: ANN401 - passed on
            self.entered.set()
            assert self.open.wait(30.0)
            return inner(policy, *arguments, **named)

        monkeypatch.setattr(Policy, "logits", logits)

    async def wait_entered(self) -> None:
        """Wait until a pass stands at the gate."""
        assert await asyncio.to_thread(self.entered.wait, 30.0)


async def test_a_group_has_one_scored_row_for_each_generation(
    build: Build, task: Task, tokenizer: Tokenizer, policy: Policy
) -> None:
    """Fields, shapes and types are those that training reads, and they say what the policy did."""
    result = await build().generate(request(task, 5))

    assert len(rows_of(result)) == 4
    for row in rows_of(result):
        completion = row["completion_tokens"].tolist()
        assert tokenizer.decode(row["prompt_tokens"].tolist()) == task[5].prompt
        assert row["reward"].tolist() == pytest.approx([task.score(task[5], tokenizer.decode(completion))])
        assert row["prompt_tokens"].dtype == row["completion_tokens"].dtype == torch.int32
        assert row["behaviour_logprobs"].dtype == row["reward"].dtype == torch.float32
        with torch.no_grad():
            scored = token_logprobs(policy, [row["prompt_tokens"].tolist()], [completion], temperature=1.0)
        torch.testing.assert_close(scored.logprobs[0], row["behaviour_logprobs"], rtol=1e-4, atol=1e-4)
    assert result.stats["tokens"] == sum(len(row["completion_tokens"]) for row in rows_of(result))
    assert result.stats["reward"] == pytest.approx(sum(float(row["reward"]) for row in rows_of(result)) / 4)


async def test_concurrent_calls_share_a_batch(build: Build, task: Task, tokenizer: Tokenizer) -> None:
    """Ten calls made together take one batch, and each gets the rows of its own prompt."""
    engine = build(linger_seconds=5.0, max_batch_groups=10)

    results = await asyncio.gather(*(engine.generate(request(task, index)) for index in range(10)))

    assert engine.statistics().batches == 1
    assert engine.statistics().finished == 10
    assert [tokenizer.decode(rows_of(result)[0]["prompt_tokens"].tolist()) for result in results] == [
        task[index].prompt for index in range(10)
    ]


async def test_a_completion_does_not_depend_on_how_calls_were_batched(build: Build, task: Task) -> None:
    """One batch of six and six batches of one give the same tokens."""
    together, apart = build(linger_seconds=5.0, max_batch_groups=6), build(max_batch_groups=1)

    many = await asyncio.gather(*(together.generate(request(task, index)) for index in range(6)))
    single = await asyncio.gather(*(apart.generate(request(task, index)) for index in range(6)))

    assert together.statistics().batches == 1
    assert apart.statistics().batches == 6
    assert [[row["completion_tokens"].tolist() for row in rows_of(result)] for result in many] == [
        [row["completion_tokens"].tolist() for row in rows_of(result)] for result in single
    ]


async def test_another_attempt_draws_other_tokens(build: Build, task: Task) -> None:
    """A retry does not repeat what failed."""
    engine = build()

    first, retry = [
        await engine.generate(request(task, 1, attempt=attempt, generations=16)) for attempt in (0, 1)
    ]

    assert [row["completion_tokens"].tolist() for row in rows_of(first)] != [
        row["completion_tokens"].tolist() for row in rows_of(retry)
    ]


async def test_a_call_that_fails_takes_no_other_with_it(build: Build, task: Task) -> None:
    """A prompt that cannot be encoded fails alone in the middle of its batch."""
    engine = build(linger_seconds=5.0, max_batch_groups=3)
    bad = GenerationRequest("bad", 0, BAD, 0, 0, 4)

    first, failed, last = await asyncio.gather(
        engine.generate(request(task, 1)),
        engine.generate(bad),
        engine.generate(request(task, 2)),
        return_exceptions=True,
    )

    assert isinstance(failed, VocabularyError)
    assert not isinstance(first, BaseException)
    assert not isinstance(last, BaseException)
    assert (engine.statistics().finished, engine.statistics().failed) == (2, 1)


async def test_a_batch_that_fails_as_a_whole_runs_again_call_by_call(
    build: Build, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the call that fails by itself gets the error (out of memory for one long prompt, say)."""
    inner = Policy.logits

    def logits(policy: Policy, tokens: torch.Tensor, *arguments: Any, **named: Any) -> torch.Tensor:  # noqa: ANN401 - passed on
        if len(tokens[0]) > 8:
            raise MemoryError("too long")
        return inner(policy, tokens, *arguments, **named)

    monkeypatch.setattr(Policy, "logits", logits)
    engine = build(linger_seconds=5.0, max_batch_groups=2)
    long = TaskItem(index=0, prompt="1 + 1 + 1 + 1 =", answer="4", entry={"answer": "4"})

    good, failed = await asyncio.gather(
        engine.generate(request(task, 1)),
        engine.generate(GenerationRequest("long", 0, long, 0, 0, 4)),
        return_exceptions=True,
    )

    assert isinstance(failed, MemoryError)
    assert not isinstance(good, BaseException)


async def test_a_hung_batch_costs_its_own_calls_and_its_worker(
    build: Build, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Past the deadline its calls fail by name, and another worker serves; a late answer is ignored."""
    engine = build(deadline_seconds=0.2, max_batch_groups=1)
    with monkeypatch.context() as patched:
        gate = Gate(patched)
        hung = asyncio.create_task(engine.generate(request(task, 1)))
        await gate.wait_entered()
    engine.config = dataclasses.replace(
        engine.config, deadline_seconds=60.0
    )  # of what comes: busy is not hung

    served = await engine.generate(request(task, 2))
    with pytest.raises(GenerationTimeoutError, match="e000-p0000001 attempt 0"):
        await hung
    gate.open.set()

    assert len(rows_of(served)) == 4
    statistics = engine.statistics()
    assert (statistics.workers, statistics.abandoned_workers) == (1, 1)
    assert (statistics.finished, statistics.failed, statistics.running) == (1, 1, 0)


async def test_rows_carry_the_version_of_the_weights_that_drew_them(
    build: Build, task: Task, tokenizer: Tokenizer
) -> None:
    """After a swap the version is the new one and the log-probabilities are the new weights'."""
    engine = build()
    newer = build_policy(MODEL, tokenizer, seed=99)

    before = await engine.generate(request(task, 1))
    engine.sync_weights(1, newer.weights())
    after = await engine.generate(request(task, 1, start_version=1))

    assert (before.version_from, before.version_to) == (0, 0)
    assert (after.version_from, after.version_to) == (1, 1)
    row = rows_of(after)[0]
    with torch.no_grad():
        scored = token_logprobs(
            newer, [row["prompt_tokens"].tolist()], [row["completion_tokens"].tolist()], temperature=1.0
        )
    torch.testing.assert_close(scored.logprobs[0], row["behaviour_logprobs"], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("swap, expected", [("between_steps", (0, 1)), ("between_batches", (0, 0))])
async def test_weights_published_while_tokens_are_drawn_are_taken_at_the_next_safe_point(
    build: Build,
    task: Task,
    tokenizer: Tokenizer,
    monkeypatch: pytest.MonkeyPatch,
    swap: str,
    expected: tuple[int, int],
) -> None:
    """Between tokens the group then spans two versions; between batches it keeps its first."""
    engine = build(swap_weights=swap)
    gate = Gate(monkeypatch)

    call = asyncio.create_task(engine.generate(request(task, 1, generations=16)))
    await gate.wait_entered()
    engine.sync_weights(1, build_policy(MODEL, tokenizer, seed=99).weights())
    gate.open.set()
    result = await call

    assert (result.version_from, result.version_to) == expected


async def test_a_call_is_never_generated_by_weights_older_than_its_start_version(
    build: Build, task: Task, policy: Policy
) -> None:
    """It waits until they are published, while calls that may use the present ones go on."""
    engine = build()

    early = asyncio.create_task(engine.generate(request(task, 1, start_version=1)))
    present = await engine.generate(request(task, 2))
    assert not early.done()
    engine.sync_weights(1, policy.weights())

    assert (await early).version_from == 1
    assert present.version_from == 0


async def test_older_weights_are_refused(build: Build, policy: Policy) -> None:
    """Versions only grow; the present one again is a restore's way to replace weights."""
    engine = build()
    engine.sync_weights(3, policy.weights())
    engine.sync_weights(3, policy.weights())

    with pytest.raises(StaleWeightsError, match=r"version 2 .* version 3"):
        engine.sync_weights(2, policy.weights())


async def test_a_cancelled_call_leaves_no_trace_in_the_queue(build: Build, task: Task) -> None:
    """Cancelled while it waits, it is never generated."""
    engine = build()
    waiting = asyncio.create_task(engine.generate(request(task, 1, start_version=9)))
    await asyncio.sleep(0)  # it queues itself before its first wait
    assert engine.statistics().queued == 1

    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting

    assert engine.statistics().queued == 0


async def test_a_batch_that_nobody_waits_for_stops_at_its_next_token(
    build: Build, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cancelled while it runs, it ends early and the worker serves the next call."""
    engine = build()
    gate = Gate(monkeypatch)
    running = asyncio.create_task(engine.generate(request(task, 1)))
    await gate.wait_entered()

    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    gate.open.set()
    await engine.generate(request(task, 2))

    assert engine.statistics().finished == 1


async def test_closing_ends_queued_and_running_calls_by_name(
    build: Build, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is left waiting, the threads are gone, a later call is refused, and closing twice is fine."""
    engine = build(max_batch_groups=1)
    gate = Gate(monkeypatch)
    running = asyncio.create_task(engine.generate(request(task, 1)))
    await gate.wait_entered()
    queued = asyncio.create_task(engine.generate(request(task, 2)))
    await asyncio.sleep(0)  # it queues itself before its first wait
    assert engine.statistics().queued == 1

    closing = asyncio.create_task(engine.close())
    outcomes = await asyncio.gather(running, queued, return_exceptions=True)
    gate.open.set()
    await closing
    await engine.close()

    assert [type(outcome) for outcome in outcomes] == [EngineClosedError, EngineClosedError]
    assert engine.statistics().workers == 0
    with pytest.raises(EngineClosedError, match="e000-p0000003"):
        await engine.generate(request(task, 3))


async def test_closing_leaves_a_hung_worker_behind(
    build: Build, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that does not come back costs the timeout and no more."""
    engine = build()
    gate = Gate(monkeypatch)
    running = asyncio.create_task(engine.generate(request(task, 1)))
    await gate.wait_entered()

    await engine.close(timeout=0.05)

    assert engine.statistics().workers == 1
    with pytest.raises(EngineClosedError):
        await running
    gate.open.set()


async def test_the_loops_default_executor_is_never_used(
    build: Build, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A generation may take minutes; the default executor belongs to everybody."""

    def refuse(*_: object) -> None:
        raise AssertionError("the default executor was asked for")

    loop = asyncio.get_running_loop()
    inner = loop.run_in_executor
    monkeypatch.setattr(
        loop,
        "run_in_executor",
        lambda executor, *rest: refuse() if executor is None else inner(executor, *rest),
    )
    engine = build()

    await engine.generate(request(task, 1))
    await engine.close()

    assert engine.statistics().finished == 1


async def test_two_workers_serve_two_batches_at_once(
    build: Build, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call is served while another worker's batch stands still."""
    engine = build(workers=2, max_batch_groups=1)
    inner = Policy.logits
    first_thread: list[threading.Thread] = []
    entered, release = threading.Event(), threading.Event()

    def logits(policy: Policy, *arguments: Any, **named: Any) -> torch.Tensor:  # noqa: ANN401 - passed on
        first_thread.append(threading.current_thread())
        if threading.current_thread() is first_thread[0]:
            entered.set()
            assert release.wait(30.0)
        return inner(policy, *arguments, **named)

    monkeypatch.setattr(Policy, "logits", logits)
    blocked = asyncio.create_task(engine.generate(request(task, 1)))
    assert await asyncio.to_thread(entered.wait, 30.0)

    served = await engine.generate(request(task, 2))
    release.set()

    assert len(rows_of(served)) == len(rows_of(await blocked)) == 4
