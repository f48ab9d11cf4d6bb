"""Engine workers that stage: chunks while a call generates, final rows under a permit, and calls that go on."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Any

import pytest
import pytest_asyncio
import torch

from quiesce import GenerationRequest, GroupResult
from quiesce.cleanup import BackgroundCleanup
from quiesce.dataplane import MemoryDataPlane
from quiesce.dataplane.interface import DataPlaneStatistics
from quiesce.errors import GenerationTimeoutError, PermitTimeoutError, StoreFailedError
from quiesce.gate_fence import GateFence
from quiesce.snapshot_gate import SnapshotGate, holds_permit
from quiesce.staged_rows import usable
from quiesce.staging import Staging
from quiesce.testing import EventRecorder, strict_hub
from quiesce.types import RowKey
from quiesce_grpo.config import EngineConfig
from quiesce_grpo.engine import RolloutEngine
from quiesce_grpo.policy import Policy, build_policy
from quiesce_grpo.tasks import Task
from quiesce_grpo.tokenizer import Tokenizer
from tests.run_rig import until
from tests.unit.grpo.conftest import MODEL

Row = Mapping[str, Any]
GENERATIONS = 3
SECONDS = 30.0


class Hold:
    """Holds threads at a place, from the nth time on, until it is opened."""

    def __init__(self, nth: int = 1) -> None:
        self.entered = threading.Event()
        self.open = threading.Event()
        self._left = nth
        self._lock = threading.Lock()

    def pass_through(self) -> None:
        """Stand here if it is time."""
        with self._lock:
            self._left -= 1
            now = self._left <= 0
        if now:
            self.entered.set()
            assert self.open.wait(SECONDS)

    async def wait_entered(self) -> None:
        """Wait until a thread stands here."""
        assert await asyncio.to_thread(self.entered.wait, SECONDS)


class Plane(MemoryDataPlane):
    """Rows in memory, with calls that a test can hold or fail."""

    def __init__(self, incarnation: int = 1) -> None:
        super().__init__(incarnation, hub=strict_hub())
        self.before_put: Callable[[Mapping[RowKey, Row]], None] = lambda _rows: None
        self.before_clear: Callable[[Sequence[RowKey]], None] = lambda _keys: None
        self.blocked = 0
        self.put_keys: list[RowKey] = []
        self.cleared: list[RowKey] = []
        self.permits: list[bool] = []

    def put(self, rows: Mapping[RowKey, Row]) -> None:
        """Put, once the test lets it."""
        self.before_put(rows)
        super().put(rows)
        self.put_keys += rows
        self.permits.append(holds_permit())

    def clear(self, keys: Iterable[RowKey]) -> int:
        """Clear, once the test lets it."""
        listed = tuple(keys)
        self.before_clear(listed)
        self.cleared += listed
        return super().clear(listed)

    def statistics(self) -> DataPlaneStatistics:
        """Say that puts wait for room, if the test says so."""
        return DataPlaneStatistics("memory", self.incarnation, blocked_writers=self.blocked)


class Scene:
    """An engine that is attached to a run, and the calls that a controller would make."""

    def __init__(
        self, engine: RolloutEngine, plane: Plane, fence: GateFence, recorder: EventRecorder
    ) -> None:
        self.engine = engine
        self.plane = plane
        self.fence = fence
        self.recorder = recorder
        self.handed: list[RowKey] = []

    async def call(
        self, task: Task, index: int, *, found: Sequence[RowKey] = (), attempt: int = 0
    ) -> GroupResult:
        """Generate a group as a controller does: with a staging, which is given up if that fails."""
        group = f"e000-p{index:07d}"
        staging = Staging(self.plane, group, attempt, GENERATIONS, hand_over=self.handed.extend, found=found)
        if staging.to_load:
            staging.load()
        request = GenerationRequest(group, attempt, task[index], index, 0, GENERATIONS, staging)
        try:
            result = await self.engine.generate(request)
        except BaseException:
            staging.abandon()
            raise
        assert staging.commit() == ()
        return result

    def finals(self, index: int) -> list[Row]:
        """Return the final rows of a group."""
        return self.plane.get(
            [
                RowKey(self.plane.incarnation, f"e000-p{index:07d}", generation, 0)
                for generation in range(GENERATIONS)
            ]
        )

    def completions(self, index: int) -> list[list[int]]:
        """Return the completion tokens of a group's final rows."""
        return [row["completion_tokens"].tolist() for row in self.finals(index)]

    async def cleared(self) -> None:
        """Wait until the workers' cleanups have nothing left."""
        await until(lambda: not self.engine.outstanding())

    def gates(self) -> list[SnapshotGate]:
        """Return the workers' gates."""
        gates = [worker.gate for worker in self.engine._workers]  # noqa: SLF001 - nobody else knows them
        return [gate.gate for gate in gates if gate is not None]

    def expire(self) -> None:
        """Let the deadline of every batch be over now."""
        for batch in tuple(self.engine._batches):  # noqa: SLF001 - instead of waiting for it
            self.engine._expire(batch)  # noqa: SLF001 - as above


Build = Callable[..., Any]


@pytest_asyncio.fixture
async def build(policy: Policy, tokenizer: Tokenizer, task: Task) -> AsyncIterator[Build]:
    """Build attached engines that are closed at the end."""
    scenes: list[Scene] = []

    async def built(*, incarnation: int = 1, **settings: Any) -> Scene:  # noqa: ANN401 - fields of EngineConfig
        recorder = EventRecorder()
        hub = strict_hub(recorder)
        config = EngineConfig(**{"max_new_tokens": 8, "chunk_tokens": 2, **settings})
        engine = RolloutEngine(policy, tokenizer, task, config, seed=3, hub=hub)
        scenes.append(Scene(engine, Plane(incarnation), GateFence(incarnation, hub=hub), recorder))
        await engine.attach(scenes[-1].plane, scenes[-1].fence)
        return scenes[-1]

    yield built
    for scene in scenes:
        await scene.engine.close(timeout=5.0)
        await scene.fence.aclose()
        scene.plane.close()


def hold_passes(monkeypatch: pytest.MonkeyPatch, nth: int) -> Hold:
    """Hold the model's passes from the nth on: so many tokens less one are drawn by then."""
    hold = Hold(nth)
    inner = Policy.logits

    def logits(policy: Policy, *arguments: Any, **named: Any) -> torch.Tensor:  # noqa: ANN401 - passed on
        hold.pass_through()
        return inner(policy, *arguments, **named)

    monkeypatch.setattr(Policy, "logits", logits)
    return hold


# --------------------------------------------------------------------------------------------- staging, finishing


async def test_a_staged_call_leaves_its_final_rows_and_nothing_else(
    build: Build, task: Task, tokenizer: Tokenizer
) -> None:
    """Its chunks held the very tokens of the final rows, and are cleared in the background, each once."""
    scene = await build()
    chunks: dict[int, list[int]] = {generation: [] for generation in range(GENERATIONS)}

    def note(rows: Mapping[RowKey, Row]) -> None:
        for key, row in rows.items():
            if key.sequence is not None:
                assert key.sequence == len(chunks[key.generation]) // 2
                chunks[key.generation] += row["tokens"].tolist()
                assert row["logprobs"].dtype == torch.float32
                assert row["tokens"].dtype == row["versions"].dtype == torch.int32

    scene.plane.before_put = note
    result = await scene.call(task, 5)
    await scene.cleared()

    assert result.rows is None
    rows = scene.finals(5)
    for generation, row in enumerate(rows):
        completion = row["completion_tokens"].tolist()
        assert completion[: len(chunks[generation])] == chunks[generation]
        assert tokenizer.decode(row["prompt_tokens"].tolist()) == task[5].prompt
        assert row["reward"].tolist() == pytest.approx([task.score(task[5], tokenizer.decode(completion))])
        assert row["versions"].tolist() == [0] * len(completion)
    assert any(chunks.values())
    assert result.stats["tokens"] == sum(len(row["completion_tokens"]) for row in rows)
    assert result.stats["reused"] == 0
    assert sorted(key.sequence is None for key in scene.plane.keys("")) == [True] * GENERATIONS
    assert Counter(scene.plane.cleared) == Counter(
        key for key in scene.plane.put_keys if key.sequence is not None
    )
    assert scene.engine.statistics().chunks == len(scene.plane.cleared)
    assert scene.handed == []


async def test_chunks_are_put_without_a_permit_and_final_rows_under_one(build: Build, task: Task) -> None:
    """One put each for all generations of a call."""
    scene = await build()

    await scene.call(task, 5)

    *chunks, final = scene.plane.permits
    assert chunks
    assert not any(chunks)
    assert final
    assert len(scene.recorder.of("permit_granted")) >= 1
    ((worker, ns),) = scene.recorder.of("reply_sent")
    assert worker == "0"
    assert ns >= 0


async def test_staging_can_be_switched_off(build: Build, task: Task) -> None:
    """Without chunks there is nothing obsolete, and the final rows are put by the worker all the same."""
    scene = await build(chunk_tokens=0)

    await scene.call(task, 5)

    assert scene.plane.permits == [True]
    assert len(scene.finals(5)) == GENERATIONS
    assert scene.engine.outstanding() == ()


async def test_a_reply_does_not_wait_for_a_clear(build: Build, task: Task) -> None:
    """A clear that stands still holds up neither this reply nor the next call's."""
    scene = await build()
    hold = Hold()
    scene.plane.before_clear = lambda _keys: hold.pass_through()

    await scene.call(task, 1)
    await hold.wait_entered()
    await scene.call(task, 2)

    assert scene.plane.cleared == []
    assert {key.group_id for key in scene.engine.outstanding()} == {"e000-p0000001", "e000-p0000002"}
    hold.open.set()
    await scene.cleared()


async def test_a_closed_gate_holds_back_the_end_of_a_call_and_nothing_before_it(
    build: Build, task: Task
) -> None:
    """Tokens are drawn and staged while a checkpoint keeps the gate closed; the final rows come after it."""
    scene = await build()
    await scene.fence.close("c1", 5.0)

    call = asyncio.create_task(scene.call(task, 5))
    (gate,) = scene.gates()
    await until(lambda: gate.statistics().waiting)
    await scene.fence.verify()
    assert all(key.sequence is not None for key in scene.plane.keys(""))
    assert scene.plane.keys()
    await scene.fence.reopen()
    await call

    assert len(scene.finals(5)) == GENERATIONS


async def test_a_permit_that_does_not_come_costs_the_call_and_not_the_worker(
    build: Build, task: Task
) -> None:
    """The wait has a deadline of its own, whatever a checkpoint does."""
    scene = await build(permit_wait_seconds=0.05)
    await scene.fence.close("c1", 5.0)

    with pytest.raises(PermitTimeoutError):
        await scene.call(task, 1)
    await scene.fence.reopen()
    await scene.call(task, 2)

    assert {key.group_id for key in scene.handed} == {"e000-p0000001"}
    assert Counter(scene.handed) == Counter(
        key for key in scene.plane.put_keys if key.group_id == "e000-p0000001"
    )
    assert scene.engine.statistics().abandoned_workers == 0


# ------------------------------------------------------------------------------------------------------- going on


async def cut_off(
    scene: Scene, task: Task, index: int, monkeypatch: pytest.MonkeyPatch, passes: int
) -> dict[RowKey, Row]:
    """Start a call, and return the rows that it has in the data plane after so many passes of the model."""
    with monkeypatch.context() as patched:
        hold = hold_passes(patched, passes)
        call = asyncio.create_task(scene.call(task, index))
        await hold.wait_entered()
        keys = scene.plane.keys()
        rows = dict(zip(keys, scene.plane.get(keys), strict=True))
        hold.open.set()
        await call
    return rows


def restored(scene: Scene, rows: Mapping[RowKey, Row]) -> tuple[RowKey, ...]:
    """Put rows under a later incarnation's keys, as a restore does, and return the keys."""
    filled = {
        RowKey(scene.plane.incarnation, key.group_id, key.generation, key.attempt, key.sequence): row
        for key, row in rows.items()
    }
    scene.plane.put(filled)
    (generations,) = usable(filled).values()
    return tuple(key for keys in generations.values() for key in keys)


@pytest.mark.parametrize("passes", [3, 5, 7])
async def test_a_resumed_call_ends_like_one_that_nobody_cut_off(
    build: Build, task: Task, monkeypatch: pytest.MonkeyPatch, passes: int
) -> None:
    """The same tokens, the log-probabilities that were drawn, no token drawn twice, and the reuse is told once."""
    first = await build()
    rows = await cut_off(first, task, 5, monkeypatch, passes)
    reused = sum(len(row["tokens"]) for row in rows.values())
    assert reused
    second = await build(incarnation=2)

    result = await second.call(task, 5, found=restored(second, rows))
    await second.cleared()

    assert second.completions(5) == first.completions(5)
    for row, before in zip(second.finals(5), first.finals(5), strict=True):
        torch.testing.assert_close(
            row["behaviour_logprobs"], before["behaviour_logprobs"], rtol=1e-4, atol=1e-4
        )
    total = sum(len(tokens) for tokens in second.completions(5))
    assert (result.stats["reused"], result.stats["tokens"]) == (reused, total - reused)
    assert second.recorder.of("tokens_reused") == [("e000-p0000005", reused)]
    statistics = second.engine.statistics()
    assert (statistics.reused, statistics.tokens) == (reused, total - reused)
    assert all(key.sequence is None for key in second.plane.keys(""))


async def test_what_was_drawn_before_a_resume_keeps_its_weights(
    build: Build, task: Task, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its log-probabilities and versions are those of the weights that drew it; the group's oldest is among them."""
    first = await build()
    rows = await cut_off(first, task, 5, monkeypatch, 5)
    second = await build(incarnation=2)
    second.engine.sync_weights(3, build_policy(MODEL, tokenizer, seed=99).weights())

    result = await second.call(task, 5, found=restored(second, rows))

    assert (result.version_from, result.version_to) == (0, 3)
    mixed = 0
    for generation, row in enumerate(second.finals(5)):
        begun = [
            one
            for key, one in sorted(rows.items(), key=lambda item: item[0].encode())
            if key.generation == generation
        ]
        tokens, logprobs = (torch.cat([one[name] for one in begun]) for name in ("tokens", "logprobs"))
        count = len(tokens)
        assert torch.equal(row["completion_tokens"][:count], tokens)
        assert torch.equal(row["behaviour_logprobs"][:count], logprobs)
        assert row["versions"].tolist() == [0] * count + [3] * (len(row["versions"]) - count)
        mixed += len(row["versions"]) > count
    assert mixed


async def test_a_call_whose_final_rows_were_all_found_is_not_generated(
    build: Build, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was cut off between its final rows and its commit: it is answered from the rows, and no token is drawn."""
    first = await build()
    expected = await first.call(task, 5)
    await first.cleared()
    keys = first.plane.keys()
    second = await build(incarnation=2)
    monkeypatch.setattr(Policy, "logits", lambda *_: pytest.fail("the model was run"))

    result = await second.call(
        task, 5, found=restored(second, dict(zip(keys, first.plane.get(keys), strict=True)))
    )

    assert result.stats["reward"] == expected.stats["reward"]
    assert result.stats["finished"] == expected.stats["finished"]
    assert (result.stats["tokens"], result.stats["reused"]) == (0, expected.stats["tokens"])
    assert second.completions(5) == first.completions(5)


async def test_a_staged_row_of_another_kind_fails_its_attempt_by_name(build: Build, task: Task) -> None:
    """Nothing is guessed; the next attempt begins anew."""
    scene = await build()
    odd = RowKey(1, "e000-p0000005", 0, 0, 0)
    scene.plane.put({odd: {"words": torch.tensor([1])}})

    with pytest.raises(ValueError, match=r"group e000-p0000005 lacks tokens, logprobs, versions"):
        await scene.call(task, 5, found=[odd])

    assert scene.handed == [odd]
    result = await scene.call(task, 5, attempt=1)
    assert result.stats["reused"] == 0


async def test_a_batch_that_failed_goes_on_from_what_it_had_staged(
    build: Build, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its calls run again one by one; tokens in the data plane are neither drawn again nor contradicted."""
    scene = await build(linger_seconds=5.0, max_batch_groups=2)
    passes: list[int] = []
    inner = Policy.logits

    def logits(policy: Policy, *arguments: Any, **named: Any) -> torch.Tensor:  # noqa: ANN401 - passed on
        passes.append(1)
        if len(passes) == 6:
            raise MemoryError("for once")
        return inner(policy, *arguments, **named)

    monkeypatch.setattr(Policy, "logits", logits)
    chunks: dict[tuple[str, int], list[int]] = {}

    def note(rows: Mapping[RowKey, Row]) -> None:
        for key, row in rows.items():
            if key.sequence is not None:
                chunks.setdefault((key.group_id, key.generation), []).extend(row["tokens"].tolist())

    scene.plane.before_put = note
    await asyncio.gather(scene.call(task, 1), scene.call(task, 2))

    for index in (1, 2):
        for generation, tokens in enumerate(scene.completions(index)):
            staged = chunks.get((f"e000-p{index:07d}", generation), [])
            assert tokens[: len(staged)] == staged
    assert scene.recorder.of("tokens_reused") == []


# -------------------------------------------------------------------------------------------- what may go wrong


async def test_a_chunk_that_cannot_be_put_fails_no_call(
    build: Build, task: Task, caplog: pytest.LogCaptureFixture
) -> None:
    """It is logged and counted, and the batch goes on without staging."""
    scene = await build()
    failed: list[int] = []

    def fail_chunks(rows: Mapping[RowKey, Row]) -> None:
        if any(key.sequence is not None for key in rows):
            failed.append(1)
            raise StoreFailedError("put", "rows", "no")

    scene.plane.before_put = fail_chunks
    with caplog.at_level(logging.CRITICAL, logger="quiesce_grpo"):
        result = await scene.call(task, 5)

    assert result.rows is None
    assert failed == [1]
    assert scene.engine.statistics().failed_chunks == 1
    assert scene.engine.outstanding() == ()


async def test_a_cancelled_call_stages_nothing_more(
    build: Build, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it had staged is handed over, and the worker serves the next call."""
    scene = await build()
    with monkeypatch.context() as patched:
        hold = hold_passes(patched, 4)
        call = asyncio.create_task(scene.call(task, 1))
        await hold.wait_entered()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        hold.open.set()
    await scene.call(task, 2)

    theirs = [key for key in scene.plane.put_keys if key.group_id == "e000-p0000001"]
    assert theirs
    assert Counter(scene.handed) == Counter(theirs)
    assert scene.engine.statistics().finished == 1


async def test_a_cancelled_call_in_a_batch_takes_no_other_with_it(
    build: Build, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch goes on for the others, and puts nothing for it."""
    scene = await build(linger_seconds=5.0, max_batch_groups=2)
    with monkeypatch.context() as patched:
        hold = hold_passes(patched, 4)
        gone, stays = (asyncio.create_task(scene.call(task, index)) for index in (1, 2))
        await hold.wait_entered()
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        hold.open.set()
        await stays

    assert {key.group_id for key in scene.plane.keys("") if key.sequence is None} == {"e000-p0000002"}
    assert {key.group_id for key in scene.handed} == {"e000-p0000001"}
    statistics = scene.engine.statistics()
    assert (statistics.finished, statistics.failed) == (1, 0)


async def test_a_hung_put_costs_its_worker_and_its_late_rows_are_handed_over(
    build: Build, task: Task, caplog: pytest.LogCaptureFixture
) -> None:
    """Past the deadline its attempt and its gate are retired, another worker serves, and a save is not held up."""
    scene = await build(max_batch_groups=1)
    hold = Hold()

    def hang_first_final(rows: Mapping[RowKey, Row]) -> None:
        if any(key.sequence is None and key.group_id == "e000-p0000001" for key in rows):
            hold.pass_through()

    scene.plane.before_put = hang_first_final
    with caplog.at_level(logging.CRITICAL, logger="quiesce_grpo"):
        hung = asyncio.create_task(scene.call(task, 1))
        await hold.wait_entered()
        scene.expire()
        with pytest.raises(GenerationTimeoutError):
            await hung
    await scene.fence.close("c1", 5.0)
    await scene.fence.verify()
    await scene.fence.reopen()
    await scene.call(task, 2)
    hold.open.set()
    await until(lambda: any(key.sequence is None for key in scene.handed))

    theirs = [key for key in scene.plane.put_keys if key.group_id == "e000-p0000001"]
    assert sum(key.sequence is None for key in theirs) == GENERATIONS
    assert Counter(scene.handed) == Counter(theirs)
    statistics = scene.engine.statistics()
    assert (statistics.workers, statistics.abandoned_workers, statistics.finished) == (1, 1, 1)
    assert scene.fence.statistics().workers == 1


async def test_a_hung_clear_costs_its_worker_and_its_keys_go_to_the_next(
    build: Build, task: Task, caplog: pytest.LogCaptureFixture
) -> None:
    """Its permit is out past the deadline; the calls of the moment fail, and what was to be cleared is cleared."""
    scene = await build(permit_deadline_seconds=1.0)
    hold = Hold()
    hung: list[RowKey] = []

    def hang_first(keys: Sequence[RowKey]) -> None:
        if not hung:
            hung.extend(keys)
            hold.pass_through()

    scene.plane.before_clear = hang_first
    with caplog.at_level(logging.CRITICAL):
        await scene.call(task, 1)
        await hold.wait_entered()
        # The hung gate keeps its second; the next one, which only a busy machine could hold up, has longer.
        scene.engine._gates._permit_deadline_seconds = SECONDS  # noqa: SLF001 - no call changes it
        await until(lambda: scene.engine.statistics().abandoned_workers)
        await scene.call(task, 2)
        await scene.cleared()
    await scene.fence.close("c1", 5.0)
    await scene.fence.reopen()

    assert set(hung) <= set(scene.plane.cleared)
    assert all(key.sequence is None for key in scene.plane.keys(""))
    statistics = scene.engine.statistics()
    assert (statistics.workers, statistics.finished) == (1, 2)
    hold.open.set()


async def test_a_put_that_waits_for_room_outlives_the_deadline(build: Build, task: Task) -> None:
    """A store that is full while a snapshot pins it is back-pressure: no group fails for it, no worker is lost."""
    scene = await build()
    hold = Hold()

    def wait_for_room(rows: Mapping[RowKey, Row]) -> None:
        if any(key.sequence is None for key in rows):
            scene.plane.blocked = 1
            hold.pass_through()

    scene.plane.before_put = wait_for_room
    call = asyncio.create_task(scene.call(task, 1))
    await hold.wait_entered()
    scene.expire()
    assert scene.engine.statistics().abandoned_workers == 0
    hold.open.set()
    scene.plane.before_put = lambda _rows: None

    assert (await call).rows is None
    assert scene.engine.statistics().abandoned_workers == 0


async def test_the_keys_of_a_call_whose_worker_is_lost_meanwhile_are_cleared_by_the_next(
    build: Build, task: Task, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It finished, and was given up before it could submit what is obsolete: nothing is forgotten."""
    scene = await build(max_batch_groups=1)
    hold = Hold()
    inner = Staging.finish

    def finish(staging: Staging, *arguments: Any, **named: Any) -> tuple[RowKey, ...]:  # noqa: ANN401 - passed on
        obsolete = inner(staging, *arguments, **named)
        hold.pass_through()
        return obsolete

    with monkeypatch.context() as patched, caplog.at_level(logging.CRITICAL, logger="quiesce_grpo"):
        patched.setattr(Staging, "finish", finish)
        hung = asyncio.create_task(scene.call(task, 1))
        await hold.wait_entered()
        scene.expire()
        with pytest.raises(GenerationTimeoutError):
            await hung
        hold.open.set()
        await until(lambda: len(scene.plane.cleared) + len(scene.handed) >= len(scene.plane.put_keys))

    assert Counter([*scene.plane.cleared, *scene.handed]) == Counter(scene.plane.put_keys)


@pytest.mark.parametrize("moment", ["close", "retire", "unregister", "register"])
async def test_keys_that_come_while_a_lost_worker_is_being_replaced_are_cleared(
    build: Build, task: Task, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Its thread may want to submit what is obsolete in the very moment in which its place is empty."""
    scene = await build()
    await scene.call(task, 1)
    await scene.cleared()
    (worker,) = scene.engine._workers  # noqa: SLF001 - the one that is lost
    late = RowKey(1, "e000-p0000009", 0, 0, 0)
    scene.plane.put({late: {"tokens": torch.tensor([1])}})
    owner = {"close": BackgroundCleanup, "retire": SnapshotGate}.get(moment, GateFence)
    inner = getattr(owner, moment)

    def meanwhile(*arguments: Any, **named: Any) -> Any:  # noqa: ANN401 - passed on
        with monkeypatch.context() as once:
            once.setattr(owner, moment, inner)
            result = inner(*arguments, **named)
            thread = threading.Thread(target=scene.engine.pass_on, args=(worker, [late]))
            thread.start()
            thread.join()
        return result

    with monkeypatch.context() as patched:
        patched.setattr(owner, moment, meanwhile)
        scene.engine._give_up(0, "a test says so")  # noqa: SLF001 - as its permit's deadline does
    await scene.cleared()

    assert scene.plane.cleared.count(late) == 1
    assert scene.plane.missing([late]) == (late,)


# ------------------------------------------------------------------------------------------- attaching, detaching


async def test_each_worker_has_a_gate_of_its_own_under_a_stable_label(build: Build) -> None:
    """The fence sees one gate a worker, and none once the engine is detached."""
    scene = await build(workers=3)

    assert scene.fence.statistics().workers == 3
    assert [gate.worker for gate in scene.gates()] == ["0", "1", "2"]

    await scene.engine.detach()
    await scene.engine.detach()

    assert scene.fence.statistics().workers == 0


async def test_detaching_clears_what_is_obsolete_first(build: Build, task: Task) -> None:
    """The end of a run waits for its cleanups, within a deadline."""
    scene = await build()
    await asyncio.gather(*(scene.call(task, index) for index in range(6)))

    await scene.engine.detach()

    assert all(key.sequence is None for key in scene.plane.keys(""))
    assert scene.engine.outstanding() == ()


async def test_an_engine_that_is_not_attached_returns_its_rows(
    policy: Policy, tokenizer: Tokenizer, task: Task
) -> None:
    """Without a run there is no data plane to stage in."""
    async with RolloutEngine(policy, tokenizer, task, EngineConfig(), seed=3, hub=strict_hub()) as engine:
        result = await engine.generate(GenerationRequest("g", 0, task[1], 1, 0, 2))

    assert result.rows is not None
    assert len(result.rows) == 2
