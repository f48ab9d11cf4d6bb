"""A run that is saved, killed and restored at any moment, against a model that only knows who owns each group.

Everything is real but the dataset and the trainer: barrier, sampler and gate, owners, rows, the checkpointer with its
run folder, the restore, the audit. The model is a dictionary from group to owner and a stack of what was saved.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from quiesce import staged_rows
from quiesce.accounting import Accounting
from quiesce.admission import Admission
from quiesce.barrier import Cut, DataPlaneCheckpointBarrier
from quiesce.buffer import Claim, ReplayBuffer
from quiesce.checkpoint import restore, write
from quiesce.checkpoint.audit import audit
from quiesce.checkpoint.capture import CutSources
from quiesce.checkpoint.cut import CapturedCut, CommittedPosition, CutState
from quiesce.checkpoint.documents import DOCUMENTS
from quiesce.checkpoint.restore import (
    LoadedCheckpoint,
    RestoredRun,
    RestoreTargets,
    find_checkpoints,
    load_newest,
    restore_into,
)
from quiesce.checkpoint.runfolder import RunFolder
from quiesce.checkpoint.saver import Checkpointer
from quiesce.checkpoint.trainer_state import NoTrainerState
from quiesce.cleanup import BackgroundCleanup
from quiesce.dataplane import MemoryDataPlane
from quiesce.errors import ClaimError, QuiesceError
from quiesce.invariants import CutFacts, Violation, check_cut
from quiesce.ledger import RolloutLedger
from quiesce.owners import Owners, reserved_batches
from quiesce.prompts import Pull
from quiesce.sampler_config import SamplerConfig, build_sampler
from quiesce.samplers import BuiltInSampler, InOrderSampler
from quiesce.signals import Changed, TrainerVersion
from quiesce.snapshot_gate import SnapshotGate
from quiesce.spares import SparePool
from quiesce.testing import VirtualTimeLoop, strict_hub
from quiesce.types import DROP_REASONS, BufferEntry, GroupRecord, PromptRef, RowKey
from tests.run_rig import GENERATIONS, rows_of

T = TypeVar("T")
AT = st.integers(0, 400)

GROUPS = 2
WINDOW = 2
CAPACITY = GROUPS * (WINDOW + 1) + 2
EPOCHS = 3
EPOCH_LENGTH = 7
"""Positions after which a run that goes on ends its epoch; other reads end it at any."""
KEPT = 2
DATASET_OFFSET = 1000
"""Added to a position to get a dataset index, so that nobody can take one for the other."""


# ----------------------------------------------------------------------------------------------------- the model


@dataclass
class Group:
    """What the model knows of a group; its owner is in the dictionary of owners."""

    ref: PromptRef
    batch: int = -1
    admitted: bool = False
    attempt: int = 0
    stamp: int | None = None
    start: int = 0
    rows: set[tuple[int, int | None]] = field(default_factory=set)
    """Of its attempt: generation, and number of the chunk or None for the final row."""

    def staged(self) -> set[tuple[int, int | None]]:
        """Return those that a call can go on from, by the definition: a final row, else chunks without a gap."""
        return {
            (generation, number)
            for generation, number in self.rows
            if number is None
            or (
                (generation, None) not in self.rows
                and all((generation, one) in self.rows for one in range(number))
            )
        }


@dataclass
class Epoch:
    """What became of an epoch's positions."""

    read: set[int] = field(default_factory=set)
    trained: set[int] = field(default_factory=set)
    dropped: dict[int, str] = field(default_factory=dict)
    ended: bool = False

    @property
    def over(self) -> bool:
        """Whether it was read to its end and every position has ended."""
        return self.ended and self.read == self.trained | self.dropped.keys()


@dataclass
class Model:
    """All that is to survive a crash. In ``owner``, the groups of each owner are in the order in which it got them."""

    owner: dict[str, str] = field(default_factory=dict)
    groups: dict[str, Group] = field(default_factory=dict)
    epochs: list[Epoch] = field(default_factory=lambda: [Epoch()])
    position: CommittedPosition = field(
        default_factory=lambda: CommittedPosition(0, 0, exhausted=False, loader=None)
    )
    cursor: int = -1
    batches: int = 0
    version: int = 0
    step: int = 0

    def of(self, owner: str) -> list[str]:
        """Return the groups of one owner."""
        return [name for name, found in self.owner.items() if found == owner]

    def move(self, names: Iterable[str], owner: str) -> None:
        """Give groups to an owner, as its newest."""
        for name in names:
            self.owner.pop(name, None)
            self.owner[name] = owner

    def drop(self, name: str, reason: str) -> None:
        """End a group without training it."""
        ref = self.groups[name].ref
        self.epochs[ref.epoch].dropped[ref.position] = reason
        self.move([name], "dropped")

    def waiting(self) -> list[str]:
        """Return the batch that is admitted next."""
        reserved = [name for name in self.of("ledger") if not self.groups[name].admitted]
        first = min((self.groups[name].batch for name in reserved), default=None)
        return [name for name in reserved if self.groups[name].batch == first]

    def flying(self) -> list[str]:
        """Return the admitted groups that are not finished."""
        return [name for name in self.of("ledger") if self.groups[name].admitted]

    @property
    def occupied(self) -> int:
        """What counts against the capacity."""
        return len(self.flying()) + len(self.of("buffer")) + len(self.of("training"))

    @property
    def exhausted(self) -> bool:
        """Whether nothing more can be admitted."""
        return self.position.exhausted and not self.of("spares") and not self.waiting()

    def gate(self, sampler: SamplerConfig) -> bool:
        """Whether the next batch may be admitted now."""
        ahead = sampler.gate_window
        return ahead is None or self.cursor < self.version + ahead

    def stale(self, names: Iterable[str], sampler: SamplerConfig) -> list[str]:
        """Return those of the groups that will not be trained any more."""
        found = (self.groups[name] for name in names)
        if sampler.name == "in_order":
            return [one.ref.group_id for one in found if one.stamp is not None and one.stamp < self.version]
        if sampler.name == "ready_first":
            return []
        oldest = max(0, self.version - sampler.max_staleness_versions)
        return [one.ref.group_id for one in found if one.start < oldest]

    def plan(self, sampler: SamplerConfig) -> tuple[str, ...] | None:
        """Derive the next step: its groups, () to pass it, None to wait."""
        ready, flying = self.of("buffer"), self.flying()
        if sampler.name == "in_order":
            if self.cursor < self.version or any(self.groups[name].stamp == self.version for name in flying):
                return None
            if self.exhausted and not flying and not ready:
                return None
            mine = [name for name in ready if self.groups[name].stamp == self.version]
            return tuple(sorted(mine))
        gone = set(self.stale([*ready, *flying], sampler))
        ready = [name for name in ready if name not in gone]
        owned = [*ready, *(name for name in flying if name not in gone)]
        more_to_come = self.gate(sampler) and not self.exhausted
        if not owned:
            return None if self.gate(sampler) or self.exhausted else ()
        if sampler.name == "weight_fifo":
            oldest = min(self.groups[name].start for name in owned)
            ready = [name for name in ready if self.groups[name].start == oldest]
            size = min(GROUPS, sum(self.groups[name].start == oldest for name in owned))
        elif more_to_come and len(owned) + (len(self.waiting()) or GROUPS) <= CAPACITY:
            size = GROUPS
        else:
            size = min(GROUPS, len(owned))
        return tuple(ready[:size]) if len(ready) >= size else None

    def saved(self) -> Model:
        """Return what a restore of this moment is to find: claims are ready again, behind what was ready.

        Of what a group in flight has staged, what it can go on from.
        """
        copy = deepcopy(self)
        copy.move(copy.of("training"), "buffer")
        for group in copy.groups.values():
            group.rows = group.staged()
        return copy


# ------------------------------------------------------------------------------------------------- the incarnation


class Incarnation:
    """The primitives of one incarnation, as the controller wires them."""

    def __init__(self, path: Path, sampler: SamplerConfig, *, resume: bool) -> None:
        self.hub = strict_hub()
        self.folder = RunFolder.open(path, resume=resume)
        self.number = self.folder.next_incarnation()
        self.barrier = DataPlaneCheckpointBarrier(hub=self.hub)
        self.plane = MemoryDataPlane(self.number, tensors="numpy", barrier=self.barrier, hub=self.hub)
        # Never started: it clears rows when told to, so that a save can come before or after.
        self.cleanup = BackgroundCleanup(
            SnapshotGate("controller", hub=self.hub), self.plane.clear, hub=self.hub
        )
        ledger = RolloutLedger(self.barrier)
        self.owners = Owners(
            barrier=self.barrier,
            sampler=build_sampler(sampler, self.barrier, self.hub),
            versions=TrainerVersion(hub=self.hub),
            ledger=ledger,
            spares=SparePool(self.barrier),
            buffer=ReplayBuffer(self.barrier, ledger, self.plane),
            accounting=Accounting(self.barrier),
            clears=self.cleanup,
            capacity=CAPACITY,
            groups_per_step=GROUPS,
            min_step_batch_fraction=0.5,
            position=CommittedPosition(0, 0, exhausted=False, loader=None),
            changed=Changed(),
        )
        owners = self.owners
        self.admission = Admission(self.barrier, owners.sampler, ledger, owners.buffer, owners.versions)
        self.gate_window = sampler.gate_window
        self.may_write = threading.Event()
        self.saver: Checkpointer

    def open_saver(self, loaded: LoadedCheckpoint | None) -> None:
        """Build the checkpointer, once what was restored is known."""
        before = 0
        if loaded is not None:
            sampler = loaded.state.sampler
            before = sampler.admissions
            if self.gate_window is not None:
                self.gate_window = max(self.gate_window, sampler.cursor - loaded.state.trainer_version)
        owners = self.owners
        self.saver = Checkpointer(
            CutSources(
                barrier=self.barrier,
                sampler_state=lambda: owners.sampler_state(before + self.admission.committed),
                position=lambda: owners.position,
                accounting=owners.accounting,
                spares=owners.spares,
                buffer=owners.buffer,
                ledger=owners.ledger,
                dataplane=self.plane,
            ),
            NoTrainerState(),
            self.folder,
            restored=None if loaded is None else loaded.state,
            keep=KEPT,
            verify=self.judge,
        )

    def judge(self, captured: CapturedCut, parent: CutState | None) -> Sequence[Violation]:
        """Judge a cut by every invariant, and not before it may be written: moves come in between."""
        assert self.may_write.wait(30), "nobody let the write go on"
        facts = CutFacts.of(captured, parent=parent, gate_window=self.gate_window)
        return check_cut(captured.state, facts)

    async def restore(self, loaded: LoadedCheckpoint) -> RestoredRun:
        """Take a checkpoint over, as the controller does."""
        owners = self.owners

        def apply(_cut: Cut, restored: RestoredRun) -> None:
            owners.position = restored.position
            owners.next_admission_id = restored.next_admission_id
            owners.step = restored.step

        restored = await restore_into(
            loaded,
            RestoreTargets(
                staging=True,
                barrier=self.barrier,
                sampler=owners.sampler,
                accounting=owners.accounting,
                spares=owners.spares,
                buffer=owners.buffer,
                ledger=owners.ledger,
                dataplane=self.plane,
                versions=owners.versions,
                admission=self.admission,
                capacity=CAPACITY,
                apply=apply,
            ),
            incarnation=self.number,
        )
        self.folder.record_restored(loaded.state)
        self.open_saver(loaded)
        return restored

    async def die(self) -> None:
        """Stop everything where it is; what was being written is never published."""
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        self.may_write.set()
        await asyncio.gather(*others, return_exceptions=True)
        await self.saver.close()
        self.folder.close()

    def keys(self, name: str, attempt: int) -> list[RowKey]:
        """Return the final keys of a group."""
        return [RowKey(self.number, name, generation, attempt) for generation in range(GENERATIONS)]

    def put(self, group: Group, *, generations: int = GENERATIONS) -> list[RowKey]:
        """Put those of an attempt's first rows that are not there, and return all keys of the group."""
        keys = self.keys(group.ref.group_id, group.attempt)
        missing = self.plane.missing(keys[:generations])
        rows = dict(zip(keys, rows_of(group.ref.index, group.attempt), strict=True))
        self.plane.put({key: rows[key] for key in missing})
        group.rows |= {(key.generation, None) for key in missing}
        return keys

    def staged_key(self, group: Group, row: tuple[int, int | None]) -> RowKey:
        """Return the key of one of a group's staged rows."""
        return RowKey(self.number, group.ref.group_id, row[0], group.attempt, row[1])

    def stage(self, group: Group, row: tuple[int, int | None]) -> None:
        """Put a chunk, unless it is there."""
        key = self.staged_key(group, row)
        if self.plane.missing([key]):
            self.plane.put({key: {"chunk": np.array([group.ref.index, group.attempt, *row])}})
            group.rows.add(row)


# ----------------------------------------------------------------------------------------------------- the machine


class SavedOwnership(RuleBasedStateMachine):
    """Moves, saves and crashes in any order; after each, owners, counters, rows and files are the model's."""

    sampler_name: ClassVar[str]

    def __init__(self) -> None:
        super().__init__()
        self.sampler = SamplerConfig(self.sampler_name, WINDOW, WINDOW)
        self.runner = asyncio.Runner(loop_factory=VirtualTimeLoop)
        self.place = tempfile.TemporaryDirectory(prefix="quiesce-saved-")
        self.path = Path(self.place.name) / "run"
        self.model = Model()
        self.stack: list[Model] = []  # what the checkpoints of the run hold, oldest first
        self.pending: Model | None = None  # what the checkpoint holds that is being written
        self.unchanged = False  # whether no slot was opened since the newest cut of this incarnation
        self.claim: Claim | None = None
        self.now: Incarnation
        self.runner.run(self._begin(resume=False))

    def teardown(self) -> None:
        """Stop, and remove the files."""
        try:
            self.runner.run(self.now.die())
        finally:
            self.runner.close()
            self.place.cleanup()

    # ------------------------------------------------------------------------------------------------------ tools

    async def _begin(self, *, resume: bool) -> None:
        self.now = Incarnation(self.path, self.sampler, resume=resume)
        Broken.live = self.now
        if not resume:
            self.now.open_saver(None)

    @property
    def owners(self) -> Owners:
        """Return the owners of this incarnation."""
        return self.now.owners

    def slot(self, move: Callable[[Cut], T], kind: str = "group_removal") -> T:
        """Make a move in a slot."""
        self.unchanged = False

        async def inside() -> T:
            async with self.now.barrier.mutation(kind) as cut:
                return move(cut)

        return self.runner.run(inside())

    def record(self, name: str) -> GroupRecord:
        """Return the ledger's record of a group."""
        return self.owners.ledger.get(name)

    def audit(self) -> None:
        """What is on disk proves itself, and is what the newest saved model holds."""
        report = audit(self.path)
        assert report.ok, report.violations
        assert report.violations == ()
        assert len(report.checkpoints) == len(self.stack)
        newest = self.stack[-1]
        owned = sum(owner not in {"trained", "dropped"} for owner in newest.owner.values())
        assert report.prompts is not None
        assert (report.prompts.read, report.prompts.owned) == (len(newest.owner), owned)
        assert report.prompts.trained == len(newest.of("trained"))

    def finish_write(self) -> None:
        """Let what was captured be written and published."""
        if self.pending is None:
            return
        self.now.may_write.set()
        result = self.runner.run(self.now.saver.wait())
        self.now.may_write.clear()
        assert result is not None
        assert result.outcome == "completed", (result.error, result.violations)
        self.stack = [*self.stack, self.pending][-KEPT:]
        self.pending = None
        self.audit()

    # ---------------------------------------------------------------------------------------------------- reading

    @initialize(ready=st.integers(0, 2))
    def start(self, ready: int) -> None:
        """Save step 0 as a run does, then begin with groups in several states."""
        self.save(writes=True)
        for _ in range(2):
            self.read(GROUPS, to_spares=False, ends=False)
            self.admit()
        for at in range(ready):
            self.commit(at)
        self.put_a_chunk(0, 0, 0)
        self.retry(0)
        for number in (0, 2):
            self.put_a_chunk(0, 0, number)
            self.put_a_chunk(0, 1, number)
        self.put_a_part(0)
        self.read(GROUPS, to_spares=True, ends=False)
        self.read(1, to_spares=False, ends=False)
        self.save(writes=True)

    @precondition(
        lambda self: not self.model.position.exhausted and len(self.model.of("ledger")) < 3 * CAPACITY
    )
    @rule(
        count=st.integers(1, GROUPS),
        to_spares=st.booleans(),
        ends=st.sampled_from([False, False, False, True]),
    )
    def read(self, count: int, *, to_spares: bool, ends: bool) -> None:
        """Read a batch into the ledger or the pool, at times the last of its epoch."""
        model, place = self.model, self.model.position
        refs = tuple(
            PromptRef(place.epoch, at, at + DATASET_OFFSET)
            for at in range(place.position, place.position + count)
        )
        after = CommittedPosition(
            place.epoch + ends,
            0 if ends else place.position + count,
            exhausted=ends and place.epoch + 1 == EPOCHS,
            loader={"reads": len(model.owner) + count},
        )
        pull = Pull(refs, tuple(refs), ends, place.epoch, after)

        self.slot(lambda cut: self.owners.commit_pull(cut, pull, to_spares=to_spares), "prompt_reservation")

        model.position = after
        epoch = model.epochs[place.epoch]
        epoch.read |= {ref.position for ref in refs}
        epoch.ended = ends
        if ends and not after.exhausted:
            model.epochs.append(Epoch())
        names = [ref.group_id for ref in refs]
        model.groups |= {ref.group_id: Group(ref, -1 if to_spares else model.batches) for ref in refs}
        model.move(names, "spares" if to_spares else "ledger")
        model.batches += not to_spares

    @precondition(lambda self: self.model.position.exhausted and self.model.of("spares"))
    @rule()
    def drain_spares(self) -> None:
        """With nothing left to read, spares become a batch of their own."""
        names = self.model.of("spares")[:GROUPS]
        self.slot(self.owners.drain_spares, "prompt_reservation")
        for name in names:
            self.model.groups[name].batch = self.model.batches
        self.model.move(names, "ledger")
        self.model.batches += 1

    # --------------------------------------------------------------------------------------------------- rollouts

    @precondition(lambda self: self.model.waiting())
    @rule()
    def admit(self) -> None:
        """The oldest reserved batch is admitted if there is room; behind a shut gate it waits, and nothing moves."""
        model, batch = self.model, self.model.waiting()
        assert reserved_batches(self.owners.ledger.records())[0] == tuple(batch)
        assert self.owners.sampler.is_admissible(model.version) == model.gate(self.sampler)
        if model.occupied + len(batch) > CAPACITY:
            return

        async def attempt() -> bool:
            task = asyncio.ensure_future(self.now.admission.admit(batch))
            for _ in range(10):  # a gate that is open lets it through in fewer
                await asyncio.sleep(0)
            through = task.done()
            if not through:
                task.cancel()
                await asyncio.wait({task})
            return through and task.result() is not None

        assert self.runner.run(attempt()) == model.gate(self.sampler)
        if not model.gate(self.sampler):
            return
        self.unchanged = False
        model.cursor += 1
        for name in batch:
            group = model.groups[name]
            group.admitted, group.start = True, model.version
            group.stamp = model.cursor if self.sampler.name == "in_order" else None

    def flying(self, at: int) -> str:
        """Return one of the unfinished groups."""
        names = self.model.flying()
        return names[at % len(names)]

    @precondition(lambda self: self.model.flying())
    @rule(at=AT)
    def put_a_part(self, at: int) -> None:
        """One generation of a group is there and the other is not: a cut has it as staged."""
        self.now.put(self.model.groups[self.flying(at)], generations=1)

    @precondition(lambda self: self.model.flying())
    @rule(at=AT, generation=st.integers(0, GENERATIONS - 1), number=st.sampled_from([0, 0, 1, 1, 2, 3]))
    def put_a_chunk(self, at: int, generation: int, number: int) -> None:
        """A generation has come so far; chunks come in any order, also too late, and some never come."""
        self.now.stage(self.model.groups[self.flying(at)], (generation, number))

    @precondition(lambda self: self.model.flying())
    @rule(at=AT)
    def lose_a_chunk(self, at: int) -> None:
        """The rows of a generation that is finished go one by one; those of one that is not may be gone as well."""
        group = self.model.groups[self.flying(at)]
        chunks = sorted(
            (row for row in group.rows if row[1] is not None), key=lambda row: (row[0], row[1] or 0)
        )
        if chunks:
            row = chunks[at % len(chunks)]
            self.now.plane.clear([self.now.staged_key(group, row)])
            group.rows.remove(row)

    @precondition(lambda self: self.model.flying())
    @rule(at=AT)
    def commit(self, at: int) -> None:
        """A group is finished."""
        name = self.flying(at)
        group, record = self.model.groups[name], self.record(name)
        keys = self.now.put(group)
        self.slot(
            lambda cut: self.owners.commit_rollout(
                cut,
                record,
                keys=keys,
                generated_from=group.start,
                generated_to=self.model.version,
                stats={"reward": 0.5},
            ),
            "group_commit",
        )
        self.model.move([name], "buffer")

    @precondition(lambda self: self.model.flying())
    @rule()
    def commit_all(self) -> None:
        """Every group that flies is finished."""
        while self.model.flying():
            self.commit(0)

    @precondition(lambda self: self.model.flying())
    @rule(at=AT)
    def retry(self, at: int) -> None:
        """A group gets a new attempt."""
        record = self.record(self.flying(at))
        assert self.slot(lambda cut: self.owners.retry(cut, record), "retry") is not None
        self.model.groups[record.group_id].attempt += 1
        self.model.groups[record.group_id].rows = set()

    @precondition(lambda self: self.model.flying())
    @rule(at=AT)
    def drop(self, at: int) -> None:
        """A group fails for good."""
        name = self.flying(at)
        self.slot(lambda cut: self.owners.drop(cut, name, "failed"))
        self.model.drop(name, "failed")

    @precondition(lambda self: self.model.flying() and self.model.of("spares"))
    @rule(at=AT)
    def substitute(self, at: int) -> None:
        """The oldest spare takes a failed group's place and stamp."""
        model, name = self.model, self.flying(at)
        record, old, spare = self.record(name), model.groups[name], model.of("spares")[0]
        self.slot(lambda cut: self.owners.substitute(cut, record), "substitution")
        start = model.version if self.sampler.name == "windowed" else old.start
        model.groups[spare] = replace(old, ref=model.groups[spare].ref, attempt=0, start=start, rows=set())
        model.drop(name, "failed")
        model.move([spare], "ledger")

    @precondition(lambda self: self.model.owner)
    @rule(at=AT)
    def condemn(self, at: int) -> None:
        """A verification blames a group: it is dropped wherever it is, unless it is in training or has ended."""
        name = list(self.model.owner)[at % len(self.model.owner)]
        gone = self.model.owner[name] not in {"training", "trained", "dropped"}
        assert self.slot(lambda cut: self.owners.condemn(cut, [name])) == ((name,) if gone else ())
        if gone:
            self.model.drop(name, "violation")

    @precondition(lambda self: self.model.of("buffer"))
    @rule(at=AT)
    def evict(self, at: int) -> None:
        """A ready group is evicted."""
        name = self.model.of("buffer")[at % len(self.model.of("buffer"))]
        self.slot(lambda cut: self.owners.evict(cut, [name]))
        self.model.drop(name, "evicted")

    @rule(
        steps=st.integers(1, 4),
        saves=st.booleans(),
        dies=st.sampled_from(["never", "between steps", "with a claim", "while writing"]),
        lower=st.booleans(),
    )
    def run_on(self, steps: int, *, saves: bool, dies: str, lower: bool) -> None:
        """The run goes on as runs do: read, admit, finish, train, at times save between two steps; then it may die."""
        for _ in range(steps):
            place = self.model.position
            if not place.exhausted and not self.model.waiting():
                self.read(GROUPS, to_spares=False, ends=place.position >= EPOCH_LENGTH)
            elif place.exhausted and self.model.of("spares"):
                self.drain_spares()
            if self.model.waiting():
                self.admit()
            if self.model.flying():
                self.commit_all()
            if self.claim is None:
                self.take_step()
            if saves:
                self.save(writes=False)
            if dies == "with a claim":
                self.finish_write()
                break
            if self.claim is not None:
                self.end_step(train=True, peeks=False)
            self.clear_rows()
        if dies == "between steps":
            self.save(writes=True)
        if dies != "never":
            self.crash(lower=lower, damaged=None)

    @rule()
    def clear_rows(self) -> None:
        """The rows of groups that ended go, also while a cut is written."""
        while self.now.cleanup.step(block=False):
            pass
        assert self.now.cleanup.outstanding() == ()

    # --------------------------------------------------------------------------------------------------- training

    @precondition(lambda self: self.claim is None)
    @rule()
    def take_step(self) -> None:
        """What is stale goes; then the step that the model derives is claimed, passed, or waited for."""
        model, owners = self.model, self.owners
        aborted = model.stale(model.flying(), self.sampler) if self.sampler.name == "windowed" else []
        evicted = model.stale(model.of("buffer"), self.sampler)
        assert [record.group_id for record in self.slot(owners.abort_stale, "watchdog_abort")] == aborted
        assert list(owners.evictable()) == evicted
        self.slot(lambda cut: owners.evict(cut, evicted))
        for name in aborted:
            model.drop(name, "stale_abort")
        for name in evicted:
            model.drop(name, "evicted")

        planned = model.plan(self.sampler)

        assert owners.plan() == planned
        if planned == ():
            owners.versions.advance()
            owners.step += 1
            self._trained(())
        elif planned:
            self.claim = self.slot(owners.claim)
            assert self.claim is not None
            assert tuple(entry.group_id for entry in self.claim.entries) == planned
            model.move(planned, "training")

    @precondition(lambda self: self.claim is not None)
    @rule(train=st.sampled_from([True, True, False]), peeks=st.booleans())
    def end_step(self, *, train: bool, peeks: bool) -> None:
        """The claimed step is taken, and no cut is taken inside of it; or the claim is given back."""
        claim, model, owners = self.claim, self.model, self.owners
        assert claim is not None
        self.claim = None
        names = [entry.group_id for entry in claim.entries]
        if not train:
            self.slot(lambda cut: owners.buffer.unclaim(cut, claim))
            ready = model.of("buffer")
            model.move([*names, *ready], "buffer")  # in front again
            return
        self.check_rows(names)
        owners.buffer.begin(claim)
        if peeks and self.pending is None and not self.unchanged:  # else it would be skipped, with no cut
            with pytest.raises(ClaimError):
                self.runner.run(self.now.saver.save(step=model.step, trainer_version=model.version))
        owners.versions.advance()
        self.slot(lambda cut: owners.finish(cut, claim), "sample_clear")
        model.move(names, "trained")
        for name in names:
            ref = model.groups[name].ref
            model.epochs[ref.epoch].trained.add(ref.position)
        self._trained(names)

    def _trained(self, names: Sequence[str]) -> None:
        self.model.version += 1
        self.model.step += 1
        self.now.folder.journal.append("trained", self.now.number, step=self.model.step, groups=names)

    # -------------------------------------------------------------------------------------------- save and restore

    @rule(writes=st.booleans())
    def save(self, *, writes: bool) -> None:
        """A cut is taken, unless nothing changed since the last; it may be written and published later."""
        self.finish_write()
        skipped = self.unchanged and self.stack[-1].step == self.model.step
        saving = self.now.saver.save(step=self.model.step, trainer_version=self.model.version)
        result = self.runner.run(saving)
        assert result.outcome == ("skipped" if skipped else "pending"), result
        if skipped:
            return
        self.pending, self.unchanged = self.model.saved(), True
        if writes:
            self.finish_write()

    @precondition(lambda self: self.pending is not None)
    @rule()
    def publish(self) -> None:
        """What was captured a while ago is written and published, as it was then."""
        self.finish_write()

    @rule(at=AT)
    def save_twice_at_a_step(self, at: int) -> None:
        """A second cut at a step is a checkpoint of its own, and the newer one."""
        self.save(writes=True)
        if self.model.flying():
            self.retry(at)
        self.save(writes=True)
        self.save(writes=True)  # nothing changed
        newest = find_checkpoints(self.now.folder.checkpoints)[0]
        assert newest.step == self.model.step

    @rule(lower=st.booleans(), damaged=st.sampled_from([None] * len(DOCUMENTS) + [*DOCUMENTS]))
    def crash(self, *, lower: bool, damaged: str | None) -> None:
        """Everything is gone but the folder; the newest whole checkpoint comes back, also under a lower lookahead."""
        old = self.now
        self.runner.run(old.die())
        self.runner.close()
        self.runner = asyncio.Runner(loop_factory=VirtualTimeLoop)
        if lower and self.sampler.max_lookahead_versions:
            window = self.sampler.max_lookahead_versions - 1
            self.sampler = replace(self.sampler, max_lookahead_versions=window, max_staleness_versions=window)
        if damaged is not None and len(self.stack) > 1:
            (find_checkpoints(old.folder.checkpoints)[0].path / damaged).write_bytes(b"{}")
            self.stack.pop()
        self.pending, self.claim, self.unchanged = None, None, False
        self.model = deepcopy(self.stack[-1])

        self.runner.run(self._begin(resume=True))
        restored = self.runner.run(self.now.restore(load_newest(self.path, hub=self.now.hub)))

        ready = self.model.of("buffer")
        counted = {key for name in ready for key in self.now.keys(name, self.model.groups[name].attempt)}
        staged = {
            self.now.staged_key(group, row): [group.ref.index, group.attempt, row]
            for group in (self.model.groups[name] for name in self.model.of("ledger"))
            for row in group.rows
        }
        assert {key for keys in restored.staged.values() for key in keys} == staged.keys()
        assert all(key.group_id == name for name, keys in restored.staged.items() for key in keys)
        assert restored.rows == len(counted) + len(staged)
        assert set(self.now.plane.keys()) == counted | staged.keys()
        self.check_rows(ready)
        self.check_staged(staged)
        self.audit()

    def check_staged(self, staged: dict[RowKey, list[Any]]) -> None:
        """Staged rows are those of the group, the attempt and the place in its generation."""
        for key, (index, attempt, (generation, number)) in staged.items():
            (row,) = self.now.plane.get([key])
            if number is None:
                told = [*np.asarray(row["index"]), *np.asarray(row["generation"])]
                assert told == [index, attempt, generation]
            else:
                assert list(np.asarray(row["chunk"])) == [index, attempt, generation, number]

    def check_rows(self, names: Iterable[str]) -> None:
        """Rows are those of the group and the attempt that was buffered."""
        for name in names:
            group = self.model.groups[name]
            rows = self.now.plane.get(self.now.keys(name, group.attempt))
            told = [[*np.asarray(row["index"]), *np.asarray(row["generation"])] for row in rows]
            assert told == [[group.ref.index, group.attempt, number] for number in range(GENERATIONS)]

    # ------------------------------------------------------------------------------------------------------ truths

    @invariant()
    def each_group_has_the_owner_of_the_model(self) -> None:
        """The right one, as the model knows it: batch, phase, attempt, stamp, start and order."""
        owners, model = self.owners, self.model
        records = [
            (
                one.group_id,
                one.admission_id,
                one.phase == "admitted",
                one.attempt,
                one.target_step,
                one.start_version,
            )
            for one in owners.ledger.records()
        ]
        expected = [(name, model.groups[name]) for name in model.of("ledger")]
        assert sorted(records) == sorted(
            (name, one.batch, one.admitted, one.attempt, one.stamp, one.start if one.admitted else None)
            for name, one in expected
        )
        assert [one.group_id for one in owners.spares.refs()] == model.of("spares")
        ready, claimed = owners.buffer.capture()
        for entries, owner in ((ready, "buffer"), (claimed, "training")):
            found = [
                (one.group_id, one.admission_id, one.attempt, one.target_step, one.start_version)
                for one in entries
            ]
            groups = [(name, model.groups[name]) for name in model.of(owner)]
            assert found == [(name, one.batch, one.attempt, one.stamp, one.start) for name, one in groups]
        owned: list[GroupRecord | BufferEntry] = [*owners.ledger.records(), *ready, *claimed]
        assert {one.prompt for one in owned} | set(owners.spares.refs()) == {
            model.groups[name].ref
            for name, owner in model.owner.items()
            if owner not in {"trained", "dropped"}
        }

    @invariant()
    def no_owned_row_is_missing(self) -> None:
        """Whatever was cleared, written or restored."""
        for entry in self.owners.buffer.entries():
            assert list(entry.keys) == self.now.keys(entry.group_id, entry.attempt)
            assert self.now.plane.missing(entry.keys) == ()

    @invariant()
    def every_position_is_owned_trained_or_dropped(self) -> None:
        """Epoch by epoch, the account says what the model says, and nothing is left over."""
        model, account = self.model, self.owners.accounting.capture()
        over = next(
            (number for number, epoch in enumerate(model.epochs) if not epoch.over), len(model.epochs)
        )
        folded = model.epochs[:over]
        reasons = [reason for epoch in folded for reason in epoch.dropped.values()]
        closed = account.closed
        assert (closed.epochs, closed.read) == (over, sum(len(epoch.read) for epoch in folded))
        assert closed.trained == sum(len(epoch.trained) for epoch in folded)
        assert dict(closed.dropped) == {reason: reasons.count(reason) for reason in set(reasons)}
        opened = {number: epoch for number, epoch in enumerate(model.epochs[over:], over) if epoch.read}
        assert [one.epoch for one in account.open] == list(opened)
        for one in account.open:
            epoch = opened[one.epoch]
            assert (one.read, one.ended) == (len(epoch.read), epoch.ended)
            assert int.from_bytes(one.trained, "little") == sum(1 << at for at in epoch.trained)
            assert int.from_bytes(one.dropped, "little") == sum(1 << at for at in epoch.dropped)
        dropped = [reason for epoch in model.epochs for reason in epoch.dropped.values()]
        now = self.owners.accounting.statistics()
        assert dict(now.dropped) == {reason: dropped.count(reason) for reason in DROP_REASONS}
        owned = sum(owner not in {"trained", "dropped"} for owner in model.owner.values())
        assert now.read == now.trained + len(dropped) + owned == len(model.owner)

    @invariant()
    def counters_are_the_models(self) -> None:
        """Cursor, version, step, admission ids, position and what holds up the gate."""
        owners, model = self.owners, self.model
        assert owners.sampler.dispatch_cursor == model.cursor
        assert (owners.versions.value, owners.step) == (model.version, model.step)
        assert (owners.next_admission_id, owners.position) == (model.batches, model.position)
        assert (owners.occupied, owners.exhausted) == (model.occupied, model.exhausted)


class Windowed(SavedOwnership):
    """Under the sampler without a gate, which evicts and aborts."""

    sampler_name = "windowed"


class WeightFifo(SavedOwnership):
    """Under the sampler that trains the oldest start."""

    sampler_name = "weight_fifo"


class ReadyFirst(SavedOwnership):
    """Under the sampler that gives nothing up."""

    sampler_name = "ready_first"


class InOrder(SavedOwnership):
    """Under the sampler that stamps steps."""

    sampler_name = "in_order"


FAST = settings(
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[
        Phase.generate
    ],  # shrinking takes minutes, and the time limit of a test would hide what was found
)


@pytest.fixture(autouse=True)
def _no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """What crashes here is a process, and a process that dies takes no written byte with it."""
    monkeypatch.setattr(os, "fsync", lambda _descriptor: None)


@pytest.mark.parametrize("machine", [Windowed, WeightFifo, ReadyFirst, InOrder])
def test_whatever_is_saved_and_killed_the_model_is_what_comes_back(machine: type[SavedOwnership]) -> None:
    """Under each sampler: any order of moves, saves, late writes, crashes and damaged files."""
    run_state_machine_as_test(machine, settings=settings(FAST, max_examples=11))


# ----------------------------------------------------------------------- the same machine, with one rule taken away


class Broken:
    """The incarnation that a broken part reaches into."""

    live: Incarnation


def _restore_forgets_spares(state: CutState, incarnation: int) -> CutState:
    return replace(REWRITTEN(state, incarnation), spares=())


def _restore_forgets_retries(state: CutState, incarnation: int) -> CutState:
    state = REWRITTEN(state, incarnation)
    return replace(state, ledger=tuple(replace(record, attempt=0) for record in state.ledger))


def _restore_forgets_the_cursor(self: BuiltInSampler, cursor: int) -> None:
    self._cursor = min(cursor, -1)


async def _ledger_is_read_after_the_window(
    folder: Path,
    captured: CapturedCut,
    *rest: Any,  # noqa: ANN401 - passed on
    **how: Any,  # noqa: ANN401 - passed on
) -> write.WrittenCut:
    late = replace(captured.state, ledger=Broken.live.owners.ledger.records())
    return await WRITE_CUT(folder, replace(captured, state=late), *rest, **how)


def _claims_are_not_captured(self: ReplayBuffer) -> tuple[tuple[object, ...], tuple[object, ...]]:
    return CAPTURE(self)[0], ()


def _snapshot_follows_the_store(self: MemoryDataPlane, text: str) -> None:
    """Keep no note of what a row was."""


def _gate_is_open(self: BuiltInSampler, version: int) -> bool:
    return True


def _nothing_ever_changed(self: Checkpointer, attempt: object) -> bool:
    return self._published is not None


def _staged_rows_stay_behind(captured: CapturedCut, present: object = None) -> tuple[RowKey, ...]:
    return ()


def _any_attempt_counts(keys: Iterable[RowKey], ledger: Iterable[GroupRecord]) -> tuple[RowKey, ...]:
    waiting = {record.group_id for record in ledger}
    return tuple(key for key in keys if key.group_id in waiting)


def _gaps_are_passed_over(rows: Mapping[int | None, RowKey]) -> tuple[RowKey, ...]:
    return (rows[None],) if None in rows else tuple(rows.values())


def _finished_generations_keep_their_chunks(rows: Mapping[int | None, RowKey]) -> tuple[RowKey, ...]:
    return tuple(rows.values()) if None in rows else USABLE(rows)


USABLE = staged_rows._usable  # noqa: SLF001 - to break it
REWRITTEN, WRITE_CUT, CAPTURE = restore._rewritten, write.write_cut, ReplayBuffer.capture  # noqa: SLF001 - to break it


@pytest.mark.parametrize(
    "owner, name, broken",
    [
        (restore, "_rewritten", _restore_forgets_spares),
        (restore, "_rewritten", _restore_forgets_retries),
        (InOrderSampler, "restore_cursor", _restore_forgets_the_cursor),
        (write, "write_cut", _ledger_is_read_after_the_window),
        (ReplayBuffer, "capture", _claims_are_not_captured),
        (MemoryDataPlane, "_note", _snapshot_follows_the_store),
        (InOrderSampler, "is_admissible", _gate_is_open),
        (Checkpointer, "_nothing_changed", _nothing_ever_changed),
        (write, "staged_rows", _staged_rows_stay_behind),
        (write, "staged_keys", _any_attempt_counts),
        (staged_rows, "_usable", _gaps_are_passed_over),
        (staged_rows, "_usable", _finished_generations_keep_their_chunks),
    ],
    ids=lambda given: getattr(given, "__name__", given).strip("_"),
)
def test_a_save_or_restore_without_a_rule_is_noticed(
    owner: object, name: str, broken: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine finds a sequence of moves that shows it: its truths can fail."""
    monkeypatch.setattr(owner, name, broken)
    with pytest.raises((AssertionError, LookupError, QuiesceError)):
        run_state_machine_as_test(InOrder, settings=settings(FAST, max_examples=60))
