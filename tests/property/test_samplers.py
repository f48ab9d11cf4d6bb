"""A step target that is derived from owners never makes a step wait for ever, and loses or repeats no prompt.

A small model drives the real samplers, admission, ledger and buffer: it reads, admits, finishes, fails,
substitutes, aborts, evicts, trains and restarts in whatever order hypothesis draws, and then goes on fairly
until the run ends. A round of the fair part in which nothing can move is a step that waits for ever.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import cycle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quiesce.admission import Admission
from quiesce.barrier import DataPlaneCheckpointBarrier
from quiesce.buffer import ReplayBuffer
from quiesce.ledger import RolloutLedger
from quiesce.observers import Hub
from quiesce.sampler_config import adapt_sampler
from quiesce.samplers import (
    InOrderSampler,
    OwnersView,
    ReadyFirstSampler,
    Sampler,
    WeightFifoSampler,
    WindowedSampler,
    plan_step,
    stamped_target,
    unstamped_target,
)
from quiesce.signals import TrainerVersion
from quiesce.types import GroupRecord, PromptRef, RowKey
from tests.sampler_cases import AllRows, OnPolicy

Build = Callable[[DataPlaneCheckpointBarrier, int], Sampler]

BUILDS: dict[str, Build] = {
    "windowed": WindowedSampler,
    "windowed-freshest": lambda b, s: WindowedSampler(b, s, sample_freshest_first=True),
    "weight_fifo": WeightFifoSampler,
    "ready_first": ReadyFirstSampler,
    "in_order": InOrderSampler,
    "custom": lambda b, _: adapt_sampler(OnPolicy(), b, "tests:OnPolicy"),
}

READ, ADMIT, FINISH, FAIL, ABORT, TRAIN, RESTART = range(7)
Move = tuple[int, int]


class StalledError(Exception):
    """Raised when nothing can move and the run has not ended."""


class Model:
    """A run of one epoch: its reading position and spares are numbers, everything else is real."""

    def __init__(
        self, build: Build, window: int, *, prompts: int, groups: int, spares: int = 0, room: int = 0
    ) -> None:
        self.barrier = DataPlaneCheckpointBarrier(hub=Hub(strict=True))
        self.ledger = RolloutLedger(self.barrier)
        self.buffer = ReplayBuffer(self.barrier, self.ledger, AllRows())
        self.build, self.groups, self.room = build, groups, room
        self.spares = [PromptRef(0, position, position) for position in range(min(spares, prompts))]
        self.unread = [PromptRef(0, position, position) for position in range(len(self.spares), prompts)]
        self.prompts = prompts
        self.versions = TrainerVersion(hub=self.barrier.hub)
        self.batches = 0
        self.admissions = 0
        self.trained: list[tuple[int, tuple[str, ...]]] = []
        self.dropped: list[str] = []
        self.passed = 0
        self.sampler: Sampler
        self._start(window)

    def _start(self, window: int) -> None:
        """Build the sampler and the admission, as a start and a restart do."""
        self.sampler = self.build(self.barrier, window)
        self.admission = Admission(self.barrier, self.sampler, self.ledger, self.buffer, self.versions)
        self.capacity = max(
            self.sampler.required_capacity(self.groups) + self.room,
            self.ledger.admitted + len(self.buffer),
            len(self._reserved()),
        )

    @property
    def ended(self) -> bool:
        """Whether every prompt was read and nothing owns one any more."""
        return not self.unread and not self.spares and not len(self.ledger) and not len(self.buffer)

    def view(self) -> OwnersView:
        """Return the owners now."""
        reserved = self._reserved()
        exhausted = not self.unread and not self.spares and not reserved
        return OwnersView(self.ledger.records(), self.buffer.ready(), exhausted, self.capacity)

    async def move(self, what: int, which: int) -> bool:
        """Make one move; tell whether anything moved."""
        if what == READ:
            return await self._read()
        if what == ADMIT:
            return await self._admit()
        if what == RESTART:
            return await self._restart(which % 4)
        if what == ABORT:
            return await self._abort()
        if what == TRAIN:
            return await self._train()
        flying = [record for record in self.ledger.records() if record.phase == "admitted"]
        if not flying:
            return False
        record = flying[which % len(flying)]
        await (self._finish(record) if what == FINISH else self._fail(record))
        return True

    async def go_on(self, order: Sequence[int], fates: Sequence[bool]) -> None:
        """Go on fairly until the run ends: every move gets its turn, and every rollout ends."""
        ends = cycle(fates)
        for _ in range(20 * (self.prompts + 10)):
            moved = False
            for what in order:
                if what == FINISH:
                    for _group in range(self.ledger.admitted):
                        moved |= await self.move(FINISH if next(ends) else FAIL, 0)
                elif what not in (FAIL, RESTART):
                    moved |= await self.move(what, 0)
            if self.ended:
                return
            if not moved:
                break
        raise StalledError(
            f"step {self.versions.value}, cursor {self.sampler.dispatch_cursor}, {self.view()}"
        )

    def check_end(self) -> None:
        """Every prompt ended once, as trained or dropped, and every admission moved the cursor by one."""
        ends = Counter(group for _, step in self.trained for group in step) + Counter(self.dropped)
        everything = {PromptRef(0, position, position).group_id for position in range(self.prompts)}
        assert ends == Counter(everything)
        assert self.sampler.dispatch_cursor + 1 == self.admissions

    def _reserved(self) -> list[GroupRecord]:
        return [record for record in self.ledger.records() if record.phase == "reserved"]

    async def _read(self) -> bool:
        source = (
            self.unread or self.spares
        )  # spares that nobody needed are drained at the end, as a short batch
        if self._reserved() or not source:
            return False
        batch, source[: self.groups] = source[: self.groups], []
        async with self.barrier.mutation("prompt_reservation") as cut:
            for ref in batch:
                self.ledger.reserve_group(cut, GroupRecord(ref.group_id, self.batches, ref))
        self.batches += 1
        return True

    async def _admit(self) -> bool:
        batch = [record.group_id for record in self._reserved()]
        held = self.ledger.admitted + len(self.buffer)
        if (
            not batch
            or held + len(batch) > self.capacity
            or not self.sampler.is_admissible(self.versions.value)
        ):
            return False
        await self.admission.admit(batch)
        self.admissions += 1
        return True

    async def _finish(self, record: GroupRecord) -> None:
        keys = [RowKey(1, record.group_id, 0, record.attempt)]
        async with self.barrier.mutation("group_commit") as cut:
            version = self.versions.value
            self.buffer.commit_group(
                cut,
                record.group_id,
                record.attempt,
                keys=keys,
                generated_from=0,
                generated_to=version,
                stats={},
            )

    async def _fail(self, record: GroupRecord) -> None:
        """Drop a group; a spare takes its place, if there is one, with its admission id, stamp and start."""
        async with self.barrier.mutation("substitution") as cut:
            self.ledger.take_group(cut, record.group_id, target="dropped", reason="failed")
            if self.spares:
                ref = self.spares.pop(0)
                spare = replace(record, group_id=ref.group_id, prompt=ref, attempt=0)
                if isinstance(
                    self.sampler, WindowedSampler
                ):  # which would abort it for its predecessor's age
                    spare = replace(spare, start_version=self.versions.value)
                self.ledger.reserve_group(cut, spare, source="spares")
        self.dropped.append(record.group_id)

    async def _abort(self) -> bool:
        stale = [r for r in self.ledger.records() if self.sampler.aborts(r, self.versions.value)]
        async with self.barrier.mutation("watchdog_abort") as cut:
            for record in stale:
                self.ledger.take_group(cut, record.group_id, target="dropped", reason="stale_abort")
                self.dropped.append(record.group_id)
        return bool(stale)

    async def _train(self) -> bool:
        version = self.versions.value
        async with self.barrier.mutation("group_removal") as cut:
            evicted = self.sampler.evictable(self.view(), version)
            self.buffer.evict(cut, evicted)
            self.dropped.extend(evicted)
            before = self.view()
            chosen = plan_step(self.sampler, before, version, self.groups)
            if chosen:
                self._check_step(before, version, chosen)
                claim = self.buffer.claim_for_training(cut, chosen)
                self.buffer.begin(claim)
                self.buffer.finish(cut, claim)
        if chosen is None:
            return bool(evicted)
        self.versions.advance()
        if chosen:
            self.trained.append((version, chosen))
        else:
            self.passed += 1
        return True

    def _check_step(self, before: OwnersView, version: int, chosen: tuple[str, ...]) -> None:
        """Check the promise of each sampler about what it trains."""
        entries = {entry.group_id: entry for entry in before.ready}
        starts = [entries[group_id].start_version for group_id in chosen]
        flying = [record for record in before.ledger if record.phase == "admitted"]
        if isinstance(self.sampler, InOrderSampler):
            assert {entries[group_id].target_step for group_id in chosen} == {version}
            assert version not in {record.target_step for record in flying}
            return
        assert len(chosen) <= self.groups
        if isinstance(self.sampler, WeightFifoSampler):
            fresh = set(starts) | {record.start_version or 0 for record in flying}
            stale = set(range(self.sampler.oldest_start(version)))
            assert set(starts) == {min(fresh - stale)}, "a fast batch overtook a slow one"
        if isinstance(self.sampler, WindowedSampler):
            assert min(starts) >= self.sampler.oldest_start(version)

    async def _restart(self, window: int) -> bool:
        """Go on from a cut taken now: another sampler object, another window, the saved cursor."""
        cursor = self.sampler.dispatch_cursor
        self._start(window)
        self.sampler.restore_cursor(cursor)
        self.admission.check_restored(
            cursor, self.ledger.records(), self.buffer.entries(), capacity=self.capacity
        )
        return True


moves = st.lists(st.tuples(st.sampled_from([READ, ADMIT, FINISH, FAIL, ABORT, TRAIN]), st.integers(0, 7)))
restarts = st.lists(
    st.tuples(st.sampled_from([READ, ADMIT, FINISH, FAIL, TRAIN, RESTART]), st.integers(0, 7)), max_size=40
)
orders = st.permutations([READ, ADMIT, FINISH, ABORT, TRAIN])
fates = st.lists(st.booleans(), min_size=1, max_size=12)


@pytest.mark.parametrize("name", BUILDS)
@settings(max_examples=60, deadline=None)
@given(
    window=st.integers(0, 3),
    prompts=st.integers(0, 23),
    groups=st.integers(1, 4),
    spares=st.integers(0, 3),
    room=st.integers(0, 5),
    schedule=st.one_of(moves, restarts),
    order=orders,
    ends=fates,
)
def test_every_read_prompt_ends_and_the_run_ends(
    name: str,
    window: int,
    prompts: int,
    groups: int,
    spares: int,
    room: int,
    schedule: list[Move],
    order: list[int],
    ends: list[bool],
) -> None:
    """Whatever is dropped, evicted, substituted, short or restored, each prompt ends, and so does the run."""

    async def run() -> None:
        model = Model(BUILDS[name], window, prompts=prompts, groups=groups, spares=spares, room=room)
        for what, which in schedule:
            await model.move(what, which)
        await model.go_on(order, ends)
        model.check_end()

    asyncio.run(run())


@pytest.mark.parametrize("name", ["weight_fifo", "ready_first", "in_order", "custom"])
@settings(max_examples=40, deadline=None)
@given(
    window=st.integers(0, 3),
    prompts=st.integers(0, 23),
    groups=st.integers(1, 4),
    schedule=st.lists(
        st.tuples(st.sampled_from([READ, ADMIT, FINISH, TRAIN]), st.integers(0, 7)), max_size=60
    ),
    order=orders,
)
def test_without_losses_every_step_but_the_last_is_full_and_none_is_passed(
    name: str, window: int, prompts: int, groups: int, schedule: list[Move], order: list[int]
) -> None:
    """Not waiting for ever is no excuse: a step is short only at the end or when something was lost."""

    async def run() -> None:
        model = Model(BUILDS[name], window, prompts=prompts, groups=groups)
        for what, which in schedule:
            await model.move(what, which)
        await model.go_on(order, [True])
        sizes = [len(step) for _, step in model.trained]
        full, rest = divmod(prompts, groups)
        assert sizes == [groups] * full + [rest] * bool(rest)
        assert model.passed == 0

    asyncio.run(run())


class _WaitsForGroupsThatTheGateKeepsOut(ReadyFirstSampler):
    def step_target(self, view: OwnersView, version: int, groups_per_step: int) -> int | None:
        owned = len(view.ready) + sum(1 for _ in view.admitted())
        return unstamped_target(view, groups_per_step, owned=owned, gate_open=True)


class _WaitsForGroupsThatDoNotFit(WindowedSampler):
    def step_target(self, view: OwnersView, version: int, groups_per_step: int) -> int | None:
        return super().step_target(replace(view, capacity=1_000_000), version, groups_per_step)


class _WaitsForAFullLastBatch(ReadyFirstSampler):
    def step_target(self, view: OwnersView, version: int, groups_per_step: int) -> int | None:
        return groups_per_step


class _NeverPassesAStep(WeightFifoSampler):
    def step_target(self, view: OwnersView, version: int, groups_per_step: int) -> int | None:
        return super().step_target(view, version, groups_per_step) or None


class _CountsAFixedStep(InOrderSampler):
    def step_target(self, view: OwnersView, version: int, groups_per_step: int) -> int | None:
        return groups_per_step


class _NeverEvicts(InOrderSampler):
    def step_target(self, view: OwnersView, version: int, groups_per_step: int) -> int | None:
        stamped = stamped_target(view, version, self.dispatch_cursor)
        return None if stamped is None else min(stamped, 1)  # leaves the rest of the step behind

    def evictable(self, view: OwnersView, version: int) -> tuple[str, ...]:
        return ()


LOSE_ONE = [(READ, 0), (ADMIT, 0), (FAIL, 0)]
LOSE_A_BATCH = [(READ, 0), (ADMIT, 0), (FAIL, 0), (FAIL, 0), (FAIL, 0)]


@pytest.mark.parametrize(
    "build, schedule, prompts, room",
    [
        (_WaitsForGroupsThatTheGateKeepsOut, LOSE_ONE, 9, 3),
        (_WaitsForGroupsThatDoNotFit, LOSE_ONE, 9, 0),
        (_WaitsForAFullLastBatch, [], 7, 0),
        (_NeverPassesAStep, LOSE_A_BATCH, 9, 0),
        (_CountsAFixedStep, LOSE_ONE, 9, 0),
        (_NeverEvicts, [], 9, 0),
    ],
)
async def test_the_model_catches_a_step_that_waits_for_ever(
    build: Build, schedule: list[Move], prompts: int, room: int
) -> None:
    """Each rule that keeps a step from waiting, taken away, stalls a run that the real sampler ends."""
    broken = Model(build, 0, prompts=prompts, groups=3, room=room)
    with pytest.raises(StalledError):
        for what, which in schedule:
            await broken.move(what, which)
        await broken.go_on([READ, ADMIT, FINISH, ABORT, TRAIN], [True])
    base: Build = build.__mro__[1]  # type: ignore[attr-defined] # each of these builds is a class
    real = Model(base, 0, prompts=prompts, groups=3, room=room)
    for what, which in schedule:
        await real.move(what, which)
    await real.go_on([READ, ADMIT, FINISH, ABORT, TRAIN], [True])
    real.check_end()


class _LooksAtTheBufferOnly(WeightFifoSampler):
    def step_target(self, view: OwnersView, version: int, groups_per_step: int) -> int | None:
        return super().step_target(replace(view, ledger=()), version, groups_per_step)

    def select(self, view: OwnersView, version: int, count: int) -> tuple[str, ...]:
        return super().select(replace(view, ledger=()), version, count)


async def test_the_model_catches_a_fast_batch_that_overtakes_a_slow_one() -> None:
    """Weight FIFO over the buffer alone trains the newer start while the older one is in flight."""
    schedule = [(READ, 0), (ADMIT, 0), (READ, 0), (ADMIT, 0)]  # two batches start at version 0
    schedule += [(FINISH, 0)] * 2 + [(TRAIN, 0), (READ, 0), (ADMIT, 0)]  # the third starts at version 1
    overtake = [*schedule, (FINISH, 3), (FINISH, 2), (TRAIN, 0)]
    real, broken = (
        Model(build, 1, prompts=9, groups=2) for build in (WeightFifoSampler, _LooksAtTheBufferOnly)
    )
    for what, which in overtake:
        await real.move(what, which)
    assert [step for step, _ in real.trained] == [0]
    with pytest.raises(AssertionError, match="overtook"):
        for what, which in overtake:
            await broken.move(what, which)
