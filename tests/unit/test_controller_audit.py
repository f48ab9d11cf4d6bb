"""The controller's auditor: when it listens, what follows from what it finds, what a resume knows of earlier findings."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from quiesce import Controller
from quiesce.audit_config import AuditConfig
from quiesce.auditor import Auditor, Pace, read_violations
from quiesce.checkpoint.loading import find_checkpoints
from quiesce.cleanup import BackgroundCleanup
from quiesce.errors import ConfigError, RunError
from quiesce.invariants import Violation
from quiesce.telemetry import names
from quiesce.telemetry.collector import QuiesceCollector
from quiesce.telemetry.metrics import MetricsObserver
from quiesce.testing import in_virtual_time
from quiesce.training import TrainBatch
from quiesce.types import RowKey
from tests.run_rig import CrashError, Run, sampler

HERE = "tests.unit.test_controller_audit"
QUICK = Pace(rest=0.0, least_seconds=0.0, between_seconds=0.2, orphan_seconds=0.3)


class StepIsNotThree:
    """A check by a hook."""

    name = "step_is_not_three"

    def train_step_ended(self, step: int, *_: object) -> str | None:
        """Complain about step 3."""
        return "it is step 3" if step == 3 else None


class CutsAreEven:
    """A check over cuts."""

    name = "cuts_are_even"
    severity = "critical"

    def check_cut(self, state: Any, facts: Any) -> str | None:  # noqa: ANN401 - as the auditor's
        """Complain about the cut of step 3."""
        return f"step {state.step} is odd" if state.step == 3 and facts is not None else None


def with_audit(path: Path, save_every: int = 1, **audit: Any) -> Run:  # noqa: ANN401 - passed on
    """Return a run with a quick auditor, and a second between steps for it to look around."""
    config = AuditConfig(**{"pace": QUICK, **audit})
    return Run(
        path,
        sampler("in_order"),
        in_memory=True,
        before_step=lambda _: asyncio.sleep(1.0),
        options={"save_every_steps": save_every, "audit": config, "min_step_batch_fraction": 0.0},
    )


def told(run: Run) -> Counter[str]:
    """Return what the hub was told of, by invariant."""
    return Counter(violation.invariant for (violation,) in run.recorder.of("invariant_violated"))


# ---------------------------------------------------------------------------------------------------- when it listens


@in_virtual_time
async def test_it_listens_before_anything_is_dispatched_and_is_closed_with_the_run(tmp_path: Path) -> None:
    """Every prompt that the run read, it saw; nothing is reported, and nobody listens any more at the end."""
    run = with_audit(tmp_path)
    controller = run.start()
    assert controller.auditor is None

    summary = await controller.run()

    assert isinstance(controller.auditor, Auditor)
    assert summary.halted_by is None
    moved = [source for _, source, *_ in run.recorder.of("owner_moved")]
    assert moved.count("read") == summary.read
    assert controller.auditor.statistics().findings == {}
    assert controller.auditor.statistics().sweeps > 1
    assert not (tmp_path / "violations.jsonl").exists()
    hub = controller.owners.barrier.hub
    before = controller.auditor.events.version
    hub.fire("version_advanced", before - 1)
    assert controller.auditor.statistics().findings == {}


@in_virtual_time
async def test_a_resume_is_audited_from_its_restored_owners(tmp_path: Path) -> None:
    """Restored groups have the owner that they were restored to, and a smaller window's leftover is no violation."""

    async def crash(batch: TrainBatch) -> None:
        await asyncio.sleep(1.0)
        if batch.step == 3:
            raise CrashError

    run = with_audit(tmp_path, 1)
    run.sampler = sampler("in_order", 4)
    run.options["buffer_capacity"] = 24
    run.before_step = crash
    with pytest.raises(CrashError):
        await run.go()
    run.sampler = sampler("in_order", 1)
    run.before_step = lambda _: asyncio.sleep(1.0)

    summary = await run.go(resume=True)

    (restored,) = run.recorder.of("restore_ended")
    assert restored[0] == "completed"
    assert run.controller.auditor is not None
    assert run.controller.auditor.records.all() == ()
    assert run.controller.auditor.statistics().findings == {}
    run.check_all_accounted(summary)
    assert read_violations(tmp_path) == []


@in_virtual_time
async def test_switched_off_it_costs_nothing_and_cuts_are_judged_all_the_same(tmp_path: Path) -> None:
    """No observer, no task, no thread, no file; a broken cut is still refused, and told by whoever judged it."""
    run = with_audit(tmp_path, enabled=False)
    controller = run.start(verify=broken_at(2))
    observers: list[int] = []

    async def count(_: TrainBatch) -> None:
        observers.append(len(controller.owners.barrier.hub.owner_moved))

    run.before_step = count
    summary = await controller.run()

    assert controller.auditor is None
    with pytest.raises(RunError, match="drills"):
        controller.drill_target()
    assert set(observers) == {1}  # the recorder
    assert run.recorder.of("invariant_violated") != []
    assert "refused" in [outcome for _, _, outcome, *_ in run.recorder.of("checkpoint_ended")]
    assert summary.outcome == "finished"
    assert not (tmp_path / "violations.jsonl").exists()


def test_a_check_that_cannot_be_loaded_is_refused_before_anything_is_built(tmp_path: Path) -> None:
    """By the constructor, with the key of the configuration."""
    with pytest.raises(ConfigError, match=r"^audit\.checks: "):
        with_audit(tmp_path, checks=["tests.no_such_module:Check"]).start()


# ------------------------------------------------------------------------------------------------------- one notice


def broken_at(step: int) -> Any:  # noqa: ANN401 - what the checkpointer takes
    """Return a verification that finds the same fault in each cut from some step on."""

    def verify(captured: Any, _parent: Any) -> list[Violation]:  # noqa: ANN401 - as the checkpointer's
        if captured.state.step < step:
            return []
        return [Violation("single_owner", "critical", "made up", (), (), captured.state.cut_id, {"at": 1})]

    return verify


@in_virtual_time
async def test_a_fault_that_lasts_is_told_once_and_counted_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One line, one event, one count, however many cuts show it; each of them is refused."""
    run = with_audit(tmp_path)

    with caplog.at_level(logging.WARNING, "quiesce"):
        await run.go(verify=broken_at(2))

    refused = [step for _, step, outcome, *_ in run.recorder.of("checkpoint_ended") if outcome == "refused"]
    assert len(refused) > 2
    assert told(run) == {"single_owner": 1}
    assert len([line for line in caplog.messages if "made up" in line]) == 1
    (record,) = read_violations(tmp_path)
    assert record.count == len(refused)
    assert record.origin == "cut"
    assert record.last_unix >= record.first_unix
    assert [info.step for info in find_checkpoints(tmp_path / "checkpoints")] == [1, 0]
    assert (tmp_path / "checkpoints" / f"step_{max(refused)}.suspect").is_dir()


@in_virtual_time
async def test_what_is_seen_live_and_again_at_the_cut_is_told_once(tmp_path: Path) -> None:
    """A group that is lost: found by the sweep within the step, shown again by the cut that is refused for it."""
    lost: list[str] = []

    async def lose(batch: TrainBatch) -> None:
        if batch.step == 2:
            owners = run.controller.owners
            await owners.changed.wait_until(lambda: bool(owners.buffer.ready()))
            group = owners.buffer.ready()[-1].group_id
            lost.append(group)
            owners.accounting.dropped = lambda *_: None  # type: ignore[method-assign] # the hole
            async with owners.barrier.mutation("group_removal") as cut:
                owners.evict(cut, [group])
            del owners.accounting.dropped
        await asyncio.sleep(1.0)

    run = with_audit(tmp_path)
    run.before_step = lose

    summary = await run.go()

    (record,) = read_violations(tmp_path)
    assert record.groups == tuple(lost)
    assert record.origin == "sweep"
    assert record.count == 2
    assert told(run) == {"conservation": 1}
    assert [
        reason for _, _, outcome, reason, *_ in run.recorder.of("checkpoint_ended") if outcome == "refused"
    ] == ["invariant"]
    assert summary.outcome == "finished"
    assert not summary.save_failed


# ------------------------------------------------------------------------------------------------- the users' checks


@in_virtual_time
async def test_a_users_check_of_cuts_is_judged_in_phase_verify(tmp_path: Path) -> None:
    """What it finds refuses the cut, as its severity says, and the record names the cut."""
    run = with_audit(tmp_path, checks=[f"{HERE}:CutsAreEven"])

    summary = await run.go()

    ends = run.recorder.of("checkpoint_ended")
    assert [step for _, step, outcome, *_ in ends if outcome == "refused"] == [3]
    (record,) = read_violations(tmp_path)
    assert (record.invariant, record.message) == ("cuts_are_even", "step 3 is odd")
    assert record.cut_id in [cut_id for cut_id, step, *_ in ends if step == 3]
    assert not summary.save_failed


@in_virtual_time
async def test_a_policy_to_halt_saves_and_ends_the_run(tmp_path: Path) -> None:
    """A live finding: the step is finished, the last cut is published, the summary says by what."""
    run = with_audit(
        tmp_path, 1_000, checks=[f"{HERE}:StepIsNotThree"], policies={"step_is_not_three": "halt"}
    )

    summary = await run.go()

    assert summary.outcome == "halted"
    assert summary.halted_by is not None
    assert summary.halted_by.message == "it is step 3"
    assert summary.step == 3
    assert not summary.save_failed
    assert find_checkpoints(tmp_path / "checkpoints")[0].step == 3
    states = [state for (state,) in run.recorder.of("run_state_changed")]
    assert states == ["starting", "running", "stopping", "failed"]

    again = await run.go(resume=True)  # an open record of the incarnation before halts nobody

    assert again.outcome == "finished"
    run.check_all_accounted(again)


# ------------------------------------------------------------------------------------------------------------ a resume


@in_virtual_time
async def test_a_resumed_run_shows_what_is_open_from_its_first_scrape(tmp_path: Path) -> None:
    """When it was seen last, and that the invariant is known; counted it was by the incarnation before."""
    run = with_audit(tmp_path, 1_000, checks=[f"{HERE}:StepIsNotThree"])
    await run.go(stop_after=4.5)
    (record,) = read_violations(tmp_path)
    metrics = MetricsObserver()
    scraped: list[dict[str, float]] = []

    async def scrape(_: TrainBatch) -> None:
        if not scraped:
            collector = QuiesceCollector(metrics, run.controller.owners.barrier.hub, run="r")
            scraped.append(
                {
                    sample.name.removeprefix(names.PREFIX): sample.value
                    for family in collector.collect()
                    for sample in family.samples
                    if sample.labels.get("invariant") == "step_is_not_three"
                }
            )

    run.before_step = scrape
    await run.go(resume=True, observers=(metrics,))

    assert scraped[0]["invariant_last_violation_timestamp_seconds"] == record.last_unix
    assert scraped[0]["invariant_active"] == 1
    assert scraped[0]["invariant_violations_total"] == 0


class Tracing:
    """Spans that are made a moment after the event."""

    def __init__(self) -> None:
        self.made = False
        self.asked: list[tuple[str, ...]] = []

    def trace_of(self, names: tuple[str, ...]) -> str:
        """Return the trace of a cut, once there is one."""
        self.asked.append(tuple(names))
        return "5eed" if self.made and names else ""


@in_virtual_time
async def test_a_record_names_its_trace_once_that_is_there(tmp_path: Path) -> None:
    """The record of a cut's violation, whose span was made after the verification; it is written down again."""
    run = with_audit(tmp_path, 3, checks=[f"{HERE}:CutsAreEven"])
    tracing = Tracing()

    async def later(batch: TrainBatch) -> None:
        tracing.made = batch.step == 5
        await asyncio.sleep(2.5)

    run.before_step = later
    controller = run.start()
    hub = controller._hub  # noqa: SLF001 - where telemetry attaches itself
    hub.attach("tracing", tracing)

    await controller.run()

    (record,) = read_violations(tmp_path)
    assert record.trace_id == "5eed"
    assert set(tracing.asked) == {(record.cut_id,)}


# --------------------------------------------------------------------------------------------------------------- drills


@in_virtual_time
async def test_a_run_that_allows_drills_hands_out_its_parts_and_outlives_its_desk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Refused before there is anything; the desk gets the live parts; what it raises is logged and ends nothing."""
    made: list[dict[str, Any]] = []

    class Desk:
        def __init__(self, target: Any) -> None:  # noqa: ANN401 - a stand-in
            self.target = target

        async def run(self) -> None:
            made.append(vars(self.target))
            raise RuntimeError("the desk is closed")

    def module(name: str, **members: object) -> None:
        monkeypatch.setitem(__import__("sys").modules, name, SimpleNamespace(**members))

    module("quiesce.drills", target=None, desk=None)
    module("quiesce.drills.target", DrillTarget=SimpleNamespace)
    module("quiesce.drills.desk", DrillDesk=Desk)
    run = with_audit(tmp_path, drills=True)
    controller: Controller = run.start()
    with pytest.raises(RunError, match="begun to dispatch"):
        controller.drill_target()

    summary = await controller.run()

    assert summary.outcome == "finished"
    assert "drills are not answered any more" in caplog.text
    (parts,) = made
    assert parts["owners"] is controller.owners
    assert parts["auditor"] is controller.auditor
    assert set(parts) == {
        "owners",
        "auditor",
        "dataplane",
        "gate",
        "fence",
        "checkpointer",
        "rollouts",
        "trainer_state",
        "folder",
        "hub",
    }


@in_virtual_time
async def test_what_a_restore_hands_over_is_cleared_before_the_auditor_s_eyes(tmp_path: Path) -> None:
    """A clear whose permit nobody saw granted could not be told from one without a permit."""
    run = with_audit(tmp_path)
    listened: list[bool] = []
    granted = threading.Event()

    class Clears:
        def permit_granted(self, worker: str, *_: object) -> None:
            if worker == "controller":
                listened.append(run.controller.auditor is not None)
                granted.set()

    begin = BackgroundCleanup.start

    def at_once(cleanup: BackgroundCleanup) -> None:
        # As a restore does with rows of a lost attempt.
        cleanup.hand_over([RowKey(1, "e000-p0000000", 0, 7, 0)])
        begin(cleanup)
        assert granted.wait(20)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BackgroundCleanup, "start", at_once)
        await run.go(observers=(Clears(),), max_steps=1)

    assert listened[0]
