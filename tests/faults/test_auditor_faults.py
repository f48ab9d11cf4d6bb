"""Injected faults: each through a hole that a real run could have, and exactly the invariants that it breaks fire, once.

A run under the real controller takes two sound steps; then the hole is opened, and the run goes on. What only a cut can show
is found at the next one; everything else within a (virtual) second, while the step still runs.
"""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import threading
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import quiesce.controller
from quiesce import GenerationRequest, GroupResult
from quiesce.auditor import AUDITED, Auditor, Pace, ViolationRecord, read_violations
from quiesce.barrier import Cut
from quiesce.checkpoint.cut import SamplerState
from quiesce.errors import QuiesceError
from quiesce.owners import Owners
from quiesce.snapshot_gate import SnapshotGate
from quiesce.testing import in_virtual_time
from quiesce.training import TrainBatch
from quiesce.types import GroupRecord, PromptRef, RowKey
from tests.auditor_rig import AuditedController
from tests.gates import broken_gate
from tests.run_rig import Run, delays, result_of, sampler

AT_STEP = 2
"""The step during which the hole is opened."""

FAILING = 1
"""Dataset index of a prompt that fails, once it may, so that a spare stands in for it."""


class Stage:
    """A run, and everything that a fault may reach for."""

    def __init__(self, path: Path, **options: object) -> None:
        self.delay = delays(7, 2.0)
        self.failing = False
        self.before_save: Callable[[], Awaitable[None]] | None = None
        self.opened: asyncio.Event = asyncio.Event()
        self.gates: list[SnapshotGate] = []
        self.inject: Callable[[Stage], Awaitable[None]]
        self.stop_at: int | None = None
        self.seen_within_a_second: set[str] = set()
        self.run = Run(
            path,
            sampler("in_order"),
            prompts=40,
            generate=self._generate,
            before_step=self._before_step,
            options={
                "spare_prompts": 3,
                "max_attempts": 1,
                "save_every_steps": 1,
                "min_step_batch_fraction": 0.0,
                "max_steps": 5,
                **options,
            },
        )

    @property
    def owners(self) -> Owners:
        """The owners of the run's groups."""
        return self.run.controller.owners

    @property
    def auditor(self) -> Auditor:
        """The auditor."""
        assert isinstance(self.run.controller, AuditedController)
        assert self.run.controller.auditor is not None
        return self.run.controller.auditor

    @property
    def plane(self) -> Any:  # noqa: ANN401 - of whatever kind
        """The data plane."""
        return self.auditor._dataplane  # noqa: SLF001 - the run's, which nobody else hands out

    async def go(self, inject: Callable[[Stage], Awaitable[None]]) -> dict[str, list[ViolationRecord]]:
        """Run with one fault; return the records by invariant. The fault may end the run."""
        self.inject = inject
        with suppress(QuiesceError, asyncio.TimeoutError):
            async with asyncio.timeout(900):
                await self.run.go(controller=Watched)
        found: dict[str, list[ViolationRecord]] = {}
        for record in self.auditor.records.all():
            found.setdefault(record.invariant, []).append(record)
        return found

    async def _generate(self, request: GenerationRequest) -> GroupResult:
        await asyncio.sleep(self.delay(request.group_id))
        if self.failing:
            self.failing = False
            raise ValueError("it does not work out")
        return result_of(request)

    async def _before_step(self, batch: TrainBatch) -> None:
        if batch.step == AT_STEP:
            await self.inject(self)
            await asyncio.sleep(1.0)
            self.seen_within_a_second = {record.invariant for record in self.auditor.records.all()}
        await asyncio.sleep(1.5)


def virtual_ns() -> int:
    """Return the loop's own time, so that a phase is as long as the test makes it."""
    return int(asyncio.get_running_loop().time() * 1e9)


class Watched(AuditedController):
    """A controller whose auditor sweeps quickly, and has tight budgets."""

    audit_options = {  # noqa: RUF012 - as its base says
        "pace": Pace(rest=0.0, least_seconds=0.0, between_seconds=0.2, orphan_seconds=0.3),
        "budgets": {"drain": 5.0, "write": 5.0},
        "clock": virtual_ns,
    }


class ForgedCut:
    """What code that never asked for a slot would pass as its cut."""

    def check(self, *_: object, **__: object) -> None:
        """Let everything pass."""


def forged() -> Any:  # noqa: ANN401 - passes as any cut
    """Return a cut that proves nothing."""
    return ForgedCut()


def once(owner: object, name: str, replacement: Callable[..., Any]) -> None:
    """Replace a method for its next call; the replacement gets the original first."""
    original = getattr(owner, name)

    def called(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - passed on
        try:
            setattr(owner, name, original)
        except AttributeError:
            object.__setattr__(owner, name, original)
        return replacement(original, *args, **kwargs)

    setattr(owner, name, called)


def in_the_next_window(stage: Stage, call: Callable[[], None]) -> None:
    """Call something in the exclusive window of the next checkpoint, before its first part is captured."""
    sources = stage_sources(stage)
    original = sources.sampler_state

    def state() -> SamplerState:
        object.__setattr__(sources, "sampler_state", original)
        call()
        return original()  # type: ignore[no-any-return] # private to the saver

    object.__setattr__(sources, "sampler_state", state)


def stage_sources(stage: Stage) -> Any:  # noqa: ANN401 - private to the saver
    """Return what the run's checkpointer reads its six artifacts from."""
    (saver,) = stage.owners.barrier.hub.sources("checkpointer")
    return saver._sources  # noqa: SLF001 - a hole in it is what the tests are about


async def ready_group(stage: Stage) -> str:
    """Wait for a finished group that no step has claimed."""
    await stage.owners.changed.wait_until(lambda: bool(stage.owners.buffer.ready()))
    return stage.owners.buffer.ready()[-1].group_id


# ------------------------------------------------------------------------------------------------------- the faults


async def commit_keeps_the_ledger_entry(stage: Stage) -> None:
    """The ledger does not give up what it reports as buffered."""
    ledger = stage.owners.ledger

    def kept(_: object, cut: Cut, group_id: str, **__: object) -> GroupRecord:
        stage.owners.barrier.hub.fire("owner_moved", group_id, "ledger", "buffer", "")
        return ledger.get(group_id)

    once(ledger, "take_group", kept)
    await ready_group(stage)


async def spare_is_handed_out_and_kept(stage: Stage) -> None:
    """The pool gives a spare away and keeps it."""
    once(stage.owners.spares, "take", lambda _take, _cut: stage.owners.spares.refs()[0])
    stage.failing = True


async def trained_group_is_buffered_again(stage: Stage) -> None:
    """A group enters the buffer a second time, from the ledger that has given it up, without a word about the first."""
    group = await ready_group(stage)
    entry = stage.owners.buffer.find(group)
    assert entry is not None
    async with stage.owners.barrier.mutation("recovery_restore") as cut:
        record = GroupRecord(group, entry.admission_id, entry.prompt, "admitted", entry.target_step, 0, 3)
        stage.owners.ledger.reserve_group(cut, record, source="read")


async def popped_spare_is_never_owned(stage: Stage) -> None:
    """A spare leaves the pool, and whoever took it forgets it."""
    async with stage.owners.barrier.mutation("substitution") as cut:
        stage.owners.spares.take(cut)


async def position_is_committed_outside_a_slot(stage: Stage) -> None:
    """The loader's position counts, its prompts do not."""
    owners = stage.owners
    owners.position = dataclasses.replace(owners.position, position=owners.position.position + 4)


async def dropped_group_is_not_booked(stage: Stage) -> None:
    """A group is evicted, and the account is not told."""
    group = await ready_group(stage)
    once(stage.owners.accounting, "dropped", lambda *_: None)
    async with stage.owners.barrier.mutation("group_removal") as cut:
        stage.owners.evict(cut, [group])


async def cursor_is_read_early(stage: Stage) -> None:
    """The next cut, some steps later, has the sampler's state of now."""
    sources = stage_sources(stage)
    original, early = sources.sampler_state, sources.sampler_state()

    def state() -> SamplerState:
        object.__setattr__(sources, "sampler_state", original)
        return early  # type: ignore[no-any-return] # private to the saver

    object.__setattr__(sources, "sampler_state", state)


async def stamp_is_ahead_of_the_cursor(stage: Stage) -> None:
    """The sampler stamps a batch with a step that its cursor has not reached."""
    once(stage.owners.sampler, "commit_admission", lambda commit, cut: commit(cut) + 2)


async def gate_does_not_hold(stage: Stage) -> None:
    """The sampler admits without waiting for its gate."""

    async def at_once(_: object) -> None:
        return

    stage.owners.sampler.wait_until_admissible = at_once  # type: ignore[attr-defined] # the hole
    stage.owners.capacity += 12
    stage.owners.changed.notify()


async def cursor_takes_two_steps(stage: Stage) -> None:
    """The cursor counts an admission that nobody has committed."""
    stage.owners.sampler._cursor += 1  # type: ignore[attr-defined] # noqa: SLF001 - the hole


async def group_moves_inside_the_window(stage: Stage) -> None:
    """An eviction that asked for no slot falls into the window."""
    group = await ready_group(stage)

    def evict() -> None:
        if group in stage.owners.buffer:
            stage.owners.evict(forged(), [group])

    in_the_next_window(stage, evict)


async def group_moves_in_no_slot(stage: Stage) -> None:
    """An eviction asks for no slot."""
    stage.owners.evict(forged(), [await ready_group(stage)])


async def slot_opens_inside_the_window(stage: Stage) -> None:
    """The barrier lets a slot in although the exclusive side is held."""
    barrier: Any = stage.owners.barrier

    def enter_and_leave() -> None:
        phase, barrier._phase = barrier._phase, "open"  # noqa: SLF001 - the hole
        slot = barrier.mutation("retry")
        with suppress(StopIteration):
            slot.__aenter__().send(None)
        slot.__aexit__(None, None, None)
        barrier._phase = phase  # noqa: SLF001

    from quiesce.barrier import _HELD

    def elsewhere() -> None:
        context = contextvars.copy_context()
        context.run(_HELD.set, None)
        context.run(enter_and_leave)

    in_the_next_window(stage, elsewhere)


async def state_changes_while_it_is_captured(stage: Stage) -> None:
    """Something that counts as a mutation happens between two parts of a cut."""

    def moved(capture: Callable[[], Any]) -> Any:  # noqa: ANN401 - passed on
        stage.owners.barrier._version += 1  # noqa: SLF001 - the hole
        return capture()

    sources = stage_sources(stage)
    in_the_next_window(stage, lambda: once(sources.spares, "refs", moved))


async def part_of_another_cut_is_captured(stage: Stage) -> None:
    """A part that was captured for another cut is taken for one of this one's."""
    hub = stage.owners.barrier.hub
    in_the_next_window(stage, lambda: hub.fire("cut_part_captured", "the-cut-before", "ledger", 1))


async def rows_are_cleared_under_the_index(stage: Stage) -> None:
    """The rows of a finished group are cleared, and the index still names them."""
    entry = stage.owners.buffer.find(await ready_group(stage))
    assert entry is not None
    stage.plane.clear(entry.keys)


async def one_row_goes_through_cleanup(stage: Stage) -> None:
    """The clear of an old attempt names a row of the one that is buffered."""
    entry = stage.owners.buffer.find(await ready_group(stage))
    assert entry is not None
    stage.owners.clears.hand_over(entry.keys[:1])


async def attempt_leaves_a_row_behind(stage: Stage) -> None:
    """A row of a group that ended long ago appears, and nobody will clear it."""
    trained = PromptRef(0, 0, 0).group_id
    stage.plane.put({RowKey(stage.plane.incarnation, trained, 0, 5): {"x": np.zeros(1)}})


async def evicted_rows_are_not_handed_over(stage: Stage) -> None:
    """Groups are evicted and booked, and their rows are forgotten."""
    once(stage.owners.clears, "hand_over", lambda _hand_over, keys: tuple(keys))
    group = await ready_group(stage)
    async with stage.owners.barrier.mutation("group_removal") as cut:
        stage.owners.evict(cut, [group])


async def closed_gate_grants_a_permit(stage: Stage) -> None:
    """A writer gets in while the window is open."""
    gate = stage.gates[-1]

    def enter() -> None:
        with gate.permit():
            pass

    def in_a_thread() -> None:
        thread = threading.Thread(target=contextvars.Context().run, args=(enter,))
        thread.start()
        thread.join()

    in_the_next_window(stage, in_a_thread)


async def gate_closes_over_a_permit(stage: Stage) -> None:
    """A close is answered although a permit is out."""
    gate, done = stage.gates[-1], threading.Event()
    granted = threading.Event()

    def hold() -> None:
        with gate.permit():
            granted.set()
            done.wait(10)

    threading.Thread(target=hold, daemon=True).start()
    assert granted.wait(10)

    async def let_go() -> None:
        await asyncio.sleep(20)
        done.set()

    stage.letting_go = asyncio.create_task(let_go())  # type: ignore[attr-defined] # kept from the collector


async def trainer_version_goes_back(stage: Stage) -> None:
    """A trainer that was restarted reports an older version."""
    stage.owners.versions._value -= 1  # noqa: SLF001 - the hole


async def mutation_version_goes_back(stage: Stage) -> None:
    """A barrier counts anew."""
    stage.owners.barrier._version = 1  # noqa: SLF001 - the hole


async def slot_holds_up_the_drain(stage: Stage) -> None:
    """A slot stays open while a checkpoint drains."""

    async def hold() -> None:
        async with stage.owners.barrier.mutation("retry"):
            await asyncio.sleep(12)

    stage.holding = asyncio.create_task(hold())  # type: ignore[attr-defined] # kept from the collector


async def write_hangs(stage: Stage) -> None:
    """The trainer's state is slow to write."""
    from tests.run_rig import _StagedWeights

    write = _StagedWeights.write
    slow = iter([12.0])

    async def slowly(self: _StagedWeights, directory: Path) -> None:
        await asyncio.sleep(next(slow, 0.0))
        await write(self, directory)

    stage.patches.setattr(_StagedWeights, "write", slowly)  # type: ignore[attr-defined] # see the test


@dataclass(frozen=True)
class Fault:
    """A fault, and what it breaks.

    Attributes:
        inject: Opens the hole.
        expected: The invariants that it breaks.
        at_once: Whether a cut is not needed to see it; None if an earlier cut may show it by chance.
        options: Configuration that the run needs for it.
        gate: The gate's source that is replaced, and by what.
        mentions: What the message of the first expected invariant says.
    """

    inject: Callable[[Stage], Awaitable[None]]
    expected: tuple[str, ...]
    at_once: bool | None = True
    gate: tuple[str, str] | None = None
    mentions: str = ""
    options: Mapping[str, object] = field(default_factory=dict)


FAULTS = (
    Fault(commit_keeps_the_ledger_entry, ("single_owner",), mentions="ledger and buffer"),
    Fault(spare_is_handed_out_and_kept, ("single_owner",), mentions="ledger and spares"),
    Fault(trained_group_is_buffered_again, ("single_owner",), mentions="buffer owns it"),
    Fault(popped_spare_is_never_owned, ("conservation",), mentions="lost"),
    Fault(position_is_committed_outside_a_slot, ("conservation",), mentions="counts as read up to"),
    Fault(dropped_group_is_not_booked, ("conservation",), mentions="lost"),
    Fault(
        cursor_is_read_early,
        ("cursor_covers_buffer", "cursor_within_lookahead"),
        at_once=False,
        options={"save_every_steps": 5},
    ),
    Fault(stamp_is_ahead_of_the_cursor, ("cursor_covers_buffer",), at_once=False, mentions="stamped with"),
    Fault(gate_does_not_hold, ("cursor_within_lookahead",), mentions="the gate shuts at"),
    Fault(cursor_takes_two_steps, ("cursor_within_lookahead",), mentions="committed admissions"),
    Fault(group_moves_inside_the_window, ("window_is_exclusive",), at_once=False, mentions="inside"),
    Fault(group_moves_in_no_slot, ("window_is_exclusive",), mentions="in no slot"),
    Fault(
        slot_opens_inside_the_window,
        ("window_is_exclusive", "cut_is_one_instant"),
        at_once=False,
        mentions="slot",
    ),
    Fault(state_changes_while_it_is_captured, ("cut_is_one_instant",), at_once=False),
    Fault(part_of_another_cut_is_captured, ("cut_is_one_instant",), at_once=False, mentions="the-cut-before"),
    Fault(rows_are_cleared_under_the_index, ("rows_present",), mentions="are missing"),
    Fault(one_row_goes_through_cleanup, ("rows_present",), mentions="g000/final"),
    Fault(attempt_leaves_a_row_behind, ("rows_not_orphaned",), mentions="a05"),
    Fault(evicted_rows_are_not_handed_over, ("rows_not_orphaned",), mentions="2 rows"),
    Fault(
        closed_gate_grants_a_permit,
        ("gate_is_respected",),
        at_once=None,
        gate=("                    self._granting = False\n", ""),
        mentions="granted a permit while closed",
    ),
    Fault(
        gate_closes_over_a_permit,
        ("gate_is_respected",),
        at_once=None,
        gate=("while self._is_current(epoch) and self._permits:", "while False:"),
        mentions="with 1 permits out",
    ),
    Fault(trainer_version_goes_back, ("versions_grow",), mentions="trainer version"),
    Fault(mutation_version_goes_back, ("versions_grow",), mentions="mutation version"),
    Fault(slot_holds_up_the_drain, ("checkpoint_progress",), at_once=False, mentions="drain"),
    Fault(write_hangs, ("checkpoint_progress",), at_once=False, mentions="write"),
)


@pytest.mark.parametrize("fault", FAULTS, ids=[fault.inject.__name__ for fault in FAULTS])
@in_virtual_time
async def test_a_fault_fires_exactly_what_it_breaks_once(
    fault: Fault, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The catalogue's set of invariants, one record each, told once, written down, with evidence."""
    stage = Stage(tmp_path, **fault.options)
    stage.patches = monkeypatch  # type: ignore[attr-defined] # for one fault
    gate_class = SnapshotGate if fault.gate is None else broken_gate(*fault.gate).SnapshotGate

    def gate(*args: Any, **kwargs: Any) -> SnapshotGate:  # noqa: ANN401 - passed on
        built: SnapshotGate = gate_class(*args, **kwargs)
        stage.gates.append(built)
        return built

    monkeypatch.setattr(quiesce.controller, "SnapshotGate", gate)

    found = await stage.go(fault.inject)

    said = {name: [record.message for record in records] for name, records in found.items()}
    assert set(found) == set(fault.expected), said
    assert {name: len(records) for name, records in found.items()} == dict.fromkeys(fault.expected, 1), said
    if fault.at_once is not None:
        assert stage.seen_within_a_second == (set(fault.expected) if fault.at_once else set())
    first = found[fault.expected[0]][0]
    assert fault.mentions in first.message
    assert first.severity == AUDITED[first.invariant].severity
    assert first.first_unix <= first.last_unix
    if first.groups and first.invariant != "rows_not_orphaned":
        assert {event["group_id"] for event in first.events} == set(first.groups)
    if first.invariant == "single_owner":
        assert len(first.owners) == 2
    told = [violation for (violation,) in stage.run.recorder.of("invariant_violated")]
    live = [violation for violation in told if "record" in violation.evidence]
    assert len(live) == sum(record.origin != "cut" for record in stage.auditor.records.all())
    written = {record.key: record for record in read_violations(tmp_path)}
    assert {record.invariant for record in written.values()} == set(fault.expected)
    assert all(record.open for record in written.values())
