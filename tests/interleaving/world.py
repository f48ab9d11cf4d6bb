"""A small run of the real primitives under the explorer, judged after every step and at every cut.

Whatever takes time outside the loop is a ``pause``; blocking calls are jobs of the explorer. A world is also what
a mutant derives from: it swaps one part for a broken one.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from quiesce import ControllerConfig, GenerationRequest, GroupResult, SequenceSource
from quiesce.accounting import Accounting
from quiesce.admission import Admission
from quiesce.barrier import CheckpointCut, DataPlaneCheckpointBarrier, detached
from quiesce.buffer import ReplayBuffer
from quiesce.checkpoint import documents
from quiesce.checkpoint.capture import CutSources, capture
from quiesce.checkpoint.cut import CapturedCut, CutState
from quiesce.cleanup import BackgroundCleanup
from quiesce.dataplane import MemoryDataPlane
from quiesce.dispatch import RolloutPump
from quiesce.explorer import pause, watch
from quiesce.invariants import CutFacts, LedgerSeal, Violation, check_cut
from quiesce.ledger import RolloutLedger
from quiesce.owners import Owners
from quiesce.prompts import Pull
from quiesce.rollouts import Rollouts
from quiesce.sampler_config import SamplerConfig, build_sampler
from quiesce.signals import Changed, TrainerVersion
from quiesce.snapshot_gate import SnapshotGate
from quiesce.spares import SparePool
from quiesce.testing import strict_hub
from quiesce.threads import DaemonExecutor
from quiesce.training import TrainBatch, TrainPump
from quiesce.types import BufferEntry, GroupRecord, PromptRef, RowKey

GENERATIONS = 1
EXCLUSIVE_BUDGET_SECONDS = 1.0
DRAIN_BUDGET_SECONDS = 60.0


class BrokenError(AssertionError):
    """An invariant does not hold."""

    def __init__(self, invariant: str, message: str, *also: str) -> None:
        self.invariants = (invariant, *also)
        super().__init__(f"{invariant}: {message}")


class Monitor:
    """Judges the events of a run: who owns what, what happens inside a window, which gate was shut."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.owners: dict[str, str] = {}
        self.window = False
        self.slots = 0
        self.broken: BrokenError | None = None

    def _breaks(self, invariant: str, message: str) -> None:
        self.broken = self.broken or BrokenError(invariant, message)
        raise self.broken

    def slot_opened(self, kind: str, wait_ns: int, opened_ns: int) -> None:
        """No slot opens inside a window."""
        self.slots += 1
        if self.window:
            self._breaks("window_is_exclusive", f"a {kind} slot opened inside the window")

    def slot_closed(self, kind: str, wait_ns: int, hold_ns: int, outcome: str, ended_ns: int) -> None:
        """Count it."""
        self.slots -= 1

    def window_opened(self, window_id: str, drain_ns: int, delayed_by: object, opened_ns: int) -> None:
        """No window opens while a slot is open, or inside another."""
        if self.slots or self.window:
            self._breaks("window_is_exclusive", f"a window opened beside {self.slots} slots")
        self.window = True
        if drain_ns > DRAIN_BUDGET_SECONDS * 1e9:
            self._breaks("checkpoint_progress", f"drained for {drain_ns / 1e9} s")

    def window_closed(
        self, window_id: str, drain_ns: int, exclusive_ns: int, outcome: str, closed_ns: int
    ) -> None:
        """A window is short."""
        self.window = False
        if exclusive_ns > EXCLUSIVE_BUDGET_SECONDS * 1e9:
            self._breaks("checkpoint_progress", f"exclusive for {exclusive_ns / 1e9} s")

    def owner_moved(self, group_id: str, source: str, target: str, reason: str) -> None:
        """A group leaves the owner that it has, and not inside a window."""
        if self.window:
            self._breaks("window_is_exclusive", f"{group_id} moved to {target} inside the window")
        has = self.owners.get(group_id, "read")
        if has != source:
            self._breaks("single_owner", f"{group_id} left {source}, but {has} has it")
        self.owners[group_id] = target

    def admission_committed(self, path: str, cursor: int, target_step: int | None, groups: int) -> None:
        """The gate was open."""
        gate, version = self._world.gate_window, self._world.versions.value
        if gate is not None and cursor > version + gate:
            self._breaks("cursor_within_lookahead", f"batch {cursor} was admitted at version {version}")


class SteppedCleanup(BackgroundCleanup):
    """The real cleanup, whose thread's turns are jobs of the loop: one batch each, whenever the loop chooses to."""

    def __init__(self, *args: Any, **options: Any) -> None:  # noqa: ANN401 - passed on
        super().__init__(*args, **options)
        self._moved = Changed()
        self._turns = DaemonExecutor("cleanup", 1)
        self._driver: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start taking turns on the running loop."""
        if self._driver is None:
            self._driver = detached(self._drive(), name="cleanup")

    def hand_over(self, keys: Iterable[RowKey]) -> None:
        """Hand rows over, and see to it that they have their turn."""
        super().hand_over(keys)
        self._moved.notify()

    async def drain(self, timeout_seconds: float) -> bool:
        """Wait as the real one does, on the loop."""
        try:
            async with asyncio.timeout(timeout_seconds):
                await self._moved.wait_until(lambda: not self.statistics().pending_calls)
        except TimeoutError:
            return False
        return True

    async def _drive(self) -> None:
        turn = functools.partial(self.step, block=False)
        while True:
            await self._moved.wait_until(lambda: bool(self.statistics().pending_calls))
            await asyncio.get_running_loop().run_in_executor(self._turns, turn)
            self._moved.notify()


class World:
    """The owners of a run, its pumps, and a judge.

    Args:
        sampler: Its name.
        window: Lookahead or staleness.
        prompts: Size of the dataset.
        batch: Prompts of one pull, and groups of one step.
        incarnation: Of its rows.
        options: Further configuration.
    """

    barrier_class: ClassVar[type[DataPlaneCheckpointBarrier]] = DataPlaneCheckpointBarrier
    ledger_class: ClassVar[type[RolloutLedger]] = RolloutLedger
    buffer_class: ClassVar[type[ReplayBuffer]] = ReplayBuffer
    spares_class: ClassVar[type[SparePool]] = SparePool
    accounting_class: ClassVar[type[Accounting]] = Accounting
    plane_class: ClassVar[type[MemoryDataPlane]] = MemoryDataPlane
    owners_class: ClassVar[type[Owners]] = Owners
    admission_class: ClassVar[type[Admission]] = Admission
    clears_class: ClassVar[type[SteppedCleanup]] = SteppedCleanup
    rollouts_class: ClassVar[type[Rollouts]] = Rollouts
    train_class: ClassVar[type[TrainPump]] = TrainPump

    def __init__(
        self,
        sampler: str | SamplerConfig = "in_order",
        *,
        window: int = 1,
        prompts: int = 2,
        batch: int = 1,
        incarnation: int = 1,
        **options: Any,  # noqa: ANN401 - passed on
    ) -> None:
        loop = asyncio.get_running_loop()
        self.monitor = Monitor(self)
        self.hub = strict_hub(self.monitor)
        ids = itertools.count()

        def clock() -> int:
            return round(loop.time() * 1e9)

        self.barrier = self.barrier_class(hub=self.hub, clock=clock, window_ids=lambda: f"cut-{next(ids)}")
        self.settings = (
            SamplerConfig(sampler, max_staleness_versions=window, max_lookahead_versions=window)
            if isinstance(sampler, str)
            else sampler
        )
        self.gate_window = self.settings.gate_window
        self.config = ControllerConfig(
            groups_per_step=batch,
            generations_per_group=GENERATIONS,
            sampler=self.settings,
            retry_backoff_seconds=options.pop("retry_backoff_seconds", 0.0),
            **options,
        )
        self.sampler = build_sampler(self.settings, self.barrier, self.hub)
        self.versions = TrainerVersion(hub=self.hub)
        self.ledger = self.ledger_class(self.barrier)
        self.plane = self.plane_class(incarnation, tensors="numpy", barrier=self.barrier, hub=self.hub)
        self.spares = self.spares_class(self.barrier)
        self.buffer = self.buffer_class(self.barrier, self.ledger, self.plane)
        self.accounting = self.accounting_class(self.barrier)
        self.clears = self.clears_class(
            SnapshotGate("controller", hub=self.hub, clock=clock), self.plane.clear, hub=self.hub, clock=clock
        )
        self.source = SequenceSource(
            [f"prompt {index}" for index in range(prompts)], batch_size=batch, seed=None
        )
        self.changed = Changed()
        self.owners = self.owners_class(
            barrier=self.barrier,
            sampler=self.sampler,
            versions=self.versions,
            ledger=self.ledger,
            spares=self.spares,
            buffer=self.buffer,
            accounting=self.accounting,
            clears=self.clears,
            capacity=self.config.capacity(self.sampler.required_capacity(batch)),
            groups_per_step=batch,
            min_step_batch_fraction=self.config.min_step_batch_fraction,
            position=self.source.start,
            changed=self.changed,
        )
        self.admission = self.admission_class(
            self.barrier, self.sampler, self.ledger, self.buffer, self.versions, hub=self.hub, clock=clock
        )
        self.failing: Callable[[GenerationRequest], bool] = lambda _request: False
        self.rollouts = self.rollouts_class(
            self.owners,
            self.plane,
            self.source,
            self.generate,
            self.config,
            fail=self.fail,
            hub=self.hub,
            clock=clock,
        )
        self.failures: list[BaseException] = []
        self.trained: list[str] = []
        self.cuts: list[CutState] = []
        self.parent: CutState | None = None
        self.advantages = False
        self.judging = True
        self.tolerated: set[str] = set()
        watch(self.look)

    def fail(self, error: BaseException) -> None:
        """Note what ends the run."""
        self.failures.append(error)

    # ------------------------------------------------------------------------------------------------- acting

    async def generate(self, request: GenerationRequest) -> GroupResult:
        """Take any time, then answer or fail."""
        await pause(f"generate {request.group_id} a{request.attempt}")
        if self.failing(request):
            raise ValueError("this prompt did not work out")
        return GroupResult(
            rows=[{"tokens": np.array([request.index, request.attempt])} for _ in range(GENERATIONS)],
            version_from=request.start_version,
            version_to=request.start_version,
            stats={"reward": 0.5},
        )

    def pull(self, *positions: int, ends: bool = False) -> Pull:
        """Return a pull of these positions, without waiting."""
        refs = tuple(PromptRef(0, position, position) for position in positions)
        epoch, at = (1, 0) if ends else (0, positions[-1] + 1)
        place = replace(self.owners.position, epoch=epoch, position=at, exhausted=ends)
        return Pull(refs, tuple(f"prompt {position}" for position in positions), ends, 0, place)

    async def reserve(self, *positions: int, spares: bool = False, ends: bool = False) -> list[str]:
        """Let positions count as read."""
        async with self.barrier.mutation("prompt_reservation") as cut:
            records = self.owners.commit_pull(cut, self.pull(*positions, ends=ends), to_spares=spares)
        return [record.group_id for record in records]

    async def admit(self, *positions: int, ends: bool = False) -> list[GroupRecord]:
        """Reserve and admit one batch."""
        admitted = await self.admission.admit(await self.reserve(*positions, ends=ends))
        return [self.ledger.get(group_id) for group_id in admitted.group_ids]

    def launch(self, records: Sequence[GroupRecord]) -> None:
        """Start rollouts."""
        for record in records:
            self.rollouts.launch(record, f"prompt {record.prompt.index}")

    def keys(self, record: GroupRecord) -> list[RowKey]:
        """Return the final keys of a group."""
        return [
            RowKey(self.plane.incarnation, record.group_id, number, record.attempt)
            for number in range(GENERATIONS)
        ]

    async def ready(self, *positions: int, ends: bool = False) -> list[str]:
        """Take one batch into the buffer, without a rollout."""
        records = await self.admit(*positions, ends=ends)
        for record in records:
            keys = self.keys(record)
            self.plane.put({key: {"tokens": np.array([record.prompt.index, 0])} for key in keys})
            async with self.barrier.mutation("group_commit") as cut:
                self.owners.commit_rollout(cut, record, keys=keys, generated_from=0, generated_to=0, stats={})
        return [record.group_id for record in records]

    async def train_step(self, batch: TrainBatch) -> dict[str, float]:
        """Take any time; write advantages back if asked to."""
        await pause(f"train {batch.step}")
        if self.advantages:
            await batch.write_back(
                [[{"advantage": np.array([1.0])} for _ in entry.keys] for entry in batch.entries]
            )
        self.trained += [entry.group_id for entry in batch.entries]
        return {}

    def train_pump(self, *, save_every: int = 0, max_steps: int | None = None) -> TrainPump:
        """Build a train pump that saves between steps."""
        seen = -1

        async def between() -> None:
            nonlocal seen
            step = self.owners.step
            if save_every and step % save_every == 0 and step != seen:
                seen = step
                await self.save()

        return self.train_class(
            self.owners,
            self.plane,
            self.rollouts,
            train_step=self.train_step,
            sync_weights=None,
            between_steps=between,
            interrupted=lambda: bool(self.failures),
            config=self.config if max_steps is None else replace(self.config, max_steps=max_steps),
            hub=self.hub,
        )

    def rollout_pump(self) -> RolloutPump:
        """Build a rollout pump over the world's source."""
        return RolloutPump(self.owners, self.source, self.admission, self.rollouts, self.config)

    async def run(self, *others: Coroutine[Any, Any, Any], save_every: int = 1) -> None:
        """Run to the end with the real pumps, and check that every prompt has ended."""
        self.clears.start()
        dispatching = asyncio.create_task(self.rollout_pump().run(), name="rollout pump")
        beside = [asyncio.create_task(other, name=f"beside {n}") for n, other in enumerate(others)]
        await self.train_pump(save_every=save_every).run()
        await asyncio.gather(dispatching, *beside)
        await self.save()
        self.ended()

    def ended(self) -> None:
        """Assert that the run is over and nothing is lost or left."""
        if self.failures:
            raise self.failures[0]
        totals = self.accounting.statistics()
        assert self.owners.finished
        assert totals.read == totals.trained + sum(totals.dropped.values())
        assert len(set(self.trained)) == len(self.trained) == totals.trained
        self.idle()

    def idle(self) -> None:
        """Assert that nobody is in the barrier and nobody waits, and no snapshot is open."""
        now = self.barrier.statistics()
        assert now.phase == "open"
        assert not any(now.active.values())
        assert not any(now.waiting.values())
        assert self.plane.statistics().open_snapshots == 0

    async def finish_rollouts(self) -> None:
        """Wait until no rollout runs and every hand-over to clearing is through."""
        await self.rollouts_over()
        self.clears.start()
        await self.clears.drain(60.0)

    async def rollouts_over(self) -> None:
        """Wait until no rollout runs; one may launch another."""
        while self.rollouts.running:
            running = {task for task in asyncio.all_tasks() if task.get_name().startswith("rollout e")}
            if running:
                await asyncio.wait(running)
            else:
                await asyncio.sleep(0)  # the last one is done, and its done-callback is about to run

    # ------------------------------------------------------------------------------------------------ judging

    def look(self) -> None:
        """Judge the live state; called after every step."""
        if self.monitor.broken is not None:
            raise self.monitor.broken
        if not self.judging:
            return
        owned = [
            *(record.group_id for record in self.ledger.records()),
            *(ref.group_id for ref in self.spares.refs()),
            *(entry.group_id for entry in self.buffer.entries()),
        ]
        if len(set(owned)) != len(owned):
            raise BrokenError("single_owner", f"owned twice among {owned}")
        totals = self.accounting.statistics()
        ended = totals.trained + sum(totals.dropped.values())
        if totals.read != ended + len(owned):
            raise BrokenError("conservation", f"read {totals.read}, ended {ended}, owned {len(owned)}")
        for entry in self.buffer.entries():
            if self.plane.missing(entry.keys):
                raise BrokenError("rows_present", f"rows of {entry.group_id} are missing")
        cursor = self.sampler.dispatch_cursor
        groups: tuple[GroupRecord | BufferEntry, ...] = (*self.ledger.records(), *self.buffer.entries())
        for group in groups:
            if group.target_step is not None and group.target_step > cursor:
                raise BrokenError("cursor_covers_buffer", f"{group.group_id} is stamped beyond {cursor}")

    def sources(self) -> CutSources:
        """Return what a cut is read from."""
        return CutSources(
            barrier=self.barrier,
            sampler_state=lambda: self.owners.sampler_state(self.admission.committed),
            position=lambda: self.owners.position,
            accounting=self.accounting,
            spares=self.spares,
            buffer=self.buffer,
            ledger=self.ledger,
            dataplane=self.plane,
        )

    async def window(self, cut: CheckpointCut) -> CapturedCut:
        """Read the six artifacts; what a mutant does badly."""
        return capture(
            cut,
            self.sources(),
            incarnation=self.plane.incarnation,
            parent_cut=None if self.parent is None else self.parent.cut_id,
            step=self.owners.step,
            trainer_version=self.versions.value,
        )

    def seal(self, state: CutState) -> LedgerSeal:
        """Return what a row shard's metadata says about the ledger; written after the window."""
        metadata = documents.rows_metadata(state)
        return LedgerSeal(
            "rows", metadata[documents.LEDGER_DIGEST_KEY], int(metadata[documents.LEDGER_COUNT_KEY])
        )

    async def save(self, drain_timeout: float | None = None) -> CutState:
        """Take a cut, judge it, and write it (which takes any time) while others go on."""
        async with self.barrier.checkpoint(drain_timeout) as cut:
            captured = await self.window(cut)
            settling = self.clears.outstanding()
        try:
            state = captured.state
            facts = CutFacts.of(captured, parent=self.parent, gate_window=self.gate_window, settling=settling)
            await pause(f"write {state.cut_id}")
            present = frozenset(captured.snapshot.keys())
            if facts.rows is None or present != frozenset(facts.rows.present):
                raise BrokenError("rows_present", "the snapshot has changed while it was open")
            self.judge(check_cut(state, replace(facts, seals=(self.seal(state),))))
        finally:
            captured.snapshot.release()
        self.cuts.append(state)
        self.parent = state
        return state

    def judge(self, violations: list[Violation]) -> None:
        """Raise what was found."""
        found = [violation for violation in violations if violation.invariant not in self.tolerated]
        if found:
            names = dict.fromkeys(violation.invariant for violation in found)
            first, *also = names
            raise BrokenError(first, found[0].message, *also)

    async def restored(self, state: CutState) -> World:
        """Return a new world that goes on from a cut, with the same rows."""
        world = type(self)(
            self.settings,
            prompts=len(self.source._dataset),  # noqa: SLF001 - the test's own source
            batch=self.config.groups_per_step,
            spare_prompts=self.config.spare_prompts,
            max_attempts=self.config.max_attempts,
        )
        world.plane.put(
            {
                key: {"tokens": np.array([entry.prompt.index, 0])}
                for entry in state.entries
                for key in entry.keys
            }
        )
        world.owners.position = await world.source.seek(state.position)
        world.versions = world.owners.versions
        if state.trainer_version:
            world.versions.advance(state.trainer_version)
        world.barrier.restore_version(state.mutation_version)
        world.monitor.owners = {
            **{record.group_id: "ledger" for record in state.ledger},
            **{ref.group_id: "spares" for ref in state.spares},
            **{entry.group_id: "buffer" for entry in state.entries},
        }
        async with world.barrier.mutation("recovery_restore") as cut:
            world.sampler.restore_cursor(state.sampler.cursor)
            world.accounting.restore(cut, state.accounting)
            world.spares.restore(cut, state.spares)
            world.ledger.restore(cut, state.ledger_minus_buffer())
            world.buffer.restore(cut, state.entries)
            world.owners.next_admission_id = state.sampler.next_admission_id
            world.owners.step = state.step
        world.admission._committed = state.sampler.admissions  # noqa: SLF001 - counted along the lineage
        return world
