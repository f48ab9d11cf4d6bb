"""Injected faults: each through a hole that a real run could have, and exactly the invariants that it breaks fire, once.

The catalogue is :data:`quiesce.drills.DRILLS`. A run under the real controller takes sound steps in virtual time; then a
hole is opened, and the run goes on. What only a cut can show is found at the next one; everything else within a second.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from quiesce import Controller, GenerationRequest, GroupResult
from quiesce.auditor import AUDITED, Pace, ViolationRecord, read_violations
from quiesce.checkpoint.audit import audit
from quiesce.drills import DRILLS, DrillResult, perform
from quiesce.drills.perform import MARK
from quiesce.invariants import INVARIANTS
from quiesce.testing import in_virtual_time
from quiesce.training import TrainBatch
from tests.auditor_rig import AuditedController
from tests.run_rig import Run, delays, result_of, sampler, until

SOUND_STEPS = 5
"""Steps before the hole is opened: one more than the checkpoint before it."""

STEP_SECONDS = 2.5


def virtual_ns() -> int:
    """Return the loop's own time, so that a phase is as long as the test makes it."""
    return int(asyncio.get_running_loop().time() * 1e9)


class Watched(AuditedController):
    """A controller whose auditor sweeps quickly."""

    audit_options = {  # noqa: RUF012 - as its base says
        "pace": Pace(rest=0.0, least_seconds=0.0, between_seconds=0.2, orphan_seconds=0.3),
        "clock": virtual_ns,
    }


def started(path: Path, **options: object) -> Run:
    """Return a run whose groups take up to two seconds, and its steps as long as they are."""
    delay = delays(7, 4.0)

    async def generate(request: GenerationRequest) -> GroupResult:
        await asyncio.sleep(delay(request.group_id))
        return result_of(request)

    async def before_step(_: TrainBatch) -> None:
        await asyncio.sleep(STEP_SECONDS)

    given = {"max_attempts": 1, "save_every_steps": 4, "min_step_batch_fraction": 0.0, **options}
    run = Run(
        path, sampler("in_order"), prompts=400, generate=generate, before_step=before_step, options=given
    )
    run.start(controller=Watched)
    return run


async def sound(controller: Controller) -> None:
    """Wait until a run has taken its sound steps."""
    await until(lambda: controller.auditor)
    await controller.owners.steps_taken(SOUND_STEPS)


async def drilled(run: Run, name: str) -> tuple[DrillResult, bool]:
    """Do a drill in a run, and end the run; return what came of it, and whether everything was saved."""
    controller = run.controller
    running = asyncio.create_task(controller.run())
    try:
        await sound(controller)
        result = await perform(
            controller.drill_target(), DRILLS[name], patience=60.0, quiet=2.0, until_cut=True
        )
        controller.request_stop()
        summary = await running
    finally:
        running.cancel()
        await asyncio.wait({running})
        run.folder.close()
    return result, not summary.save_failed


def test_there_are_two_drills_for_each_invariant() -> None:
    """Whatever the auditor proves, two holes show that it does."""
    broken = Counter(name for drill in DRILLS.values() for name in drill.expected)
    assert set(broken) == set(AUDITED)
    assert min(broken.values()) >= 2
    assert set(INVARIANTS) <= set(broken)


@pytest.mark.parametrize("name", DRILLS)
@in_virtual_time
async def test_a_fault_fires_exactly_what_it_breaks_once(name: str, tmp_path: Path) -> None:
    """The catalogue's set of invariants, one record each, told once, written down, with evidence; and the run goes on."""
    drill = DRILLS[name]
    run = started(tmp_path, **drill.options)

    result, saved = await drilled(run, name)

    said = {fired.invariant: fired.message for fired in result.fired}
    assert result.ok, (result.missing, result.surplus)
    assert set(said) == set(drill.expected)
    assert saved, "the run could not save any more"
    assert drill.mentions in said[drill.expected[0]]
    if drill.at_once:
        assert max(fired.seconds for fired in result.fired) <= 1.0
        assert "cut" not in {fired.origin for fired in result.fired}
    auditor = run.controller.auditor
    assert auditor is not None
    records = auditor.records.all()
    assert Counter(record.invariant for record in records) == Counter(dict.fromkeys(drill.expected, 1))
    for record in records:
        check_evidence(record, name)
    told = [violation for (violation,) in run.recorder.of("invariant_violated")]
    assert [violation.evidence["record"] for violation in told] == [record.key for record in records]
    written = {record.key: record for record in read_violations(tmp_path)}
    assert {key: record.evidence[MARK] for key, record in written.items()} == {
        record.key: name for record in records
    }
    assert all(record.open for record in written.values())
    newest = next(checkpoint for checkpoint in audit(tmp_path).checkpoints if not checkpoint.suspect)
    assert newest.problem == ""
    assert newest.violations == 0


def check_evidence(record: ViolationRecord, drill: str) -> None:
    """Assert that a record says what it should."""
    assert record.severity == AUDITED[record.invariant].severity
    assert record.first_unix <= record.last_unix
    assert record.evidence[MARK] == drill
    if record.groups and record.invariant != "rows_not_orphaned":
        assert {event["group_id"] for event in record.events} == set(record.groups)
    if record.invariant == "single_owner":
        assert len(record.owners) == 2


@in_virtual_time
async def test_the_same_drill_is_news_again(tmp_path: Path) -> None:
    """Whoever tests an alert chain does it more than once; each time a record begins, and is told."""
    run = started(tmp_path)
    controller = run.controller
    running = asyncio.create_task(controller.run())
    await sound(controller)

    results = [
        await perform(controller.drill_target(), DRILLS["trainer-version-goes-back"], quiet=6.0)
        for _ in range(2)
    ]

    controller.request_stop()
    await running
    run.folder.close()
    assert [result.ok for result in results] == [True, True]
    assert len(run.recorder.of("invariant_violated")) == 2


@in_virtual_time
async def test_a_drill_leaves_no_hole_behind(tmp_path: Path) -> None:
    """After every drill in turn the run's parts have the methods that they were built with."""
    run = started(tmp_path, spare_prompts=3)
    controller = run.controller
    running = asyncio.create_task(controller.run())
    await sound(controller)
    target = controller.drill_target()
    parts = (
        *(target.gate, target.dataplane, target.owners.barrier, target.owners.buffer, target.owners.ledger),
        *(target.owners.spares, target.owners.accounting, target.owners.clears, target.owners.sampler),
        *(target.admission, target.auditor.records, target.checkpointer),
    )
    before = [set(vars(part)) for part in parts]
    sources, state = target.sources.sampler_state, target.checkpointer._trainer_state  # noqa: SLF001 - what was patched
    budgets, capacity = dict(target.budgets), target.owners.capacity

    results = [await perform(target, drill, quiet=0.5) for drill in DRILLS.values()]

    controller.request_stop()
    summary = await running
    run.folder.close()
    assert {result.drill: result.ok for result in results} == dict.fromkeys(DRILLS, True)
    assert [set(vars(part)) for part in parts] == before
    assert target.sources.sampler_state is sources
    assert target.checkpointer._trainer_state is state  # noqa: SLF001 - what was patched
    assert dict(target.budgets) == budgets
    assert target.owners.capacity == capacity
    assert MARK not in target.auditor.marks
    assert not summary.save_failed
