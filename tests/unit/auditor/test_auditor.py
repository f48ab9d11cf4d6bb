"""The auditor as a whole: what becomes of a finding, and of records across incarnations."""

from __future__ import annotations

import asyncio
import logging
import threading
from pathlib import Path

import pytest

from quiesce.auditor import AUDITED, Auditor, ViolationRecord, attach_auditor, read_violations
from quiesce.auditor.sweep import Pace
from quiesce.invariants.violation import Violation
from quiesce.testing import in_virtual_time, settle
from tests.unit.auditor.rig import Rig, kinds, only


async def break_it(rig: Rig, group: str = "e000-p0000000") -> None:
    """Move a group that nobody has read."""
    async with rig.owners.barrier.mutation("retry"):
        rig.hub.fire("owner_moved", group, "ledger", "buffer", "")


@in_virtual_time
async def test_a_finding_is_told_once_from_a_step_of_its_own(caplog: pytest.LogCaptureFixture) -> None:
    """The hook that found it is over by then; the hub gets a violation with the evidence, the log a line."""
    rig = Rig(trace_of=lambda groups: f"trace of {len(groups)}")
    auditor = rig.auditor()
    with caplog.at_level(logging.WARNING):
        await break_it(rig)
        await break_it(rig)
        told_in_the_hook = len(rig.recorder.of("invariant_violated"))
        await settle()

    ((told,),) = rig.recorder.of("invariant_violated")
    record = only(auditor)
    assert told_in_the_hook == 0
    assert told.invariant == "conservation"
    assert told.evidence["record"] == record.key == "1.0"
    assert [event["source"] for event in told.evidence["events"]] == ["ledger"]
    assert record.trace_id == "trace of 1"
    assert len([line for line in caplog.records if line.name == "quiesce.auditor"]) == 1
    assert auditor.statistics().findings == {"conservation": record.count}


@in_virtual_time
async def test_what_a_cut_finds_is_kept_and_not_told_again() -> None:
    """Whoever verified it has told the hub; a fault that was known counts, and is no second record."""
    rig = Rig()
    auditor = rig.auditor()
    for cut in ("c1", "c2"):
        rig.hub.fire("invariant_violated", Violation("conservation", "critical", "lost", ("g",), (), cut))
    await settle()

    record = only(auditor)
    assert (record.origin, record.cut_id, record.count) == ("cut", "c1", 2)
    assert len(rig.recorder.of("invariant_violated")) == 2


@in_virtual_time
async def test_a_finding_of_another_thread_is_told_on_the_loop() -> None:
    """Gates report from threads, and observers of violations need not be ready for that."""
    rig = Rig()
    auditor = rig.auditor()
    threads = []

    class Listens:
        def invariant_violated(self, _violation: object) -> None:
            threads.append(threading.get_ident())

    rig.hub.subscribe(Listens())
    found = Violation("gate_is_respected", "critical", "granted", evidence={"worker": "0"})
    thread = threading.Thread(target=auditor.found, args=(found, "live"))
    thread.start()
    thread.join()
    await settle()

    assert threads == [threading.get_ident()]


@in_virtual_time
async def test_halt_is_asked_for_once_and_only_where_it_is_the_policy(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Through a callback, which may fail."""
    halts: list[ViolationRecord] = []

    def halt(record: ViolationRecord) -> None:
        halts.append(record)
        raise RuntimeError("cannot")

    rig = Rig(policies={"conservation": "halt"}, on_halt=halt)
    auditor = rig.auditor()
    auditor.found(Violation("rows_present", "critical", "gone", ("a",)), "sweep")
    auditor.tell()
    assert halts == []
    with caplog.at_level(logging.ERROR):
        for group in ("b", "c"):
            auditor.found(Violation("conservation", "critical", "lost", (group,)), "sweep")
        auditor.tell()

    assert [record.groups for record in halts] == [("b",)]
    assert "could not be halted" in caplog.text
    assert len(auditor.records.open()) == 3


@in_virtual_time
async def test_records_are_open_in_the_next_incarnation_until_somebody_closes_them(tmp_path: Path) -> None:
    """Reloaded as they were; the same fault again is told again, for somebody else may be on duty."""
    first = Rig(folder=tmp_path)
    auditor = first.auditor()
    await break_it(first)
    await auditor.aclose()
    second = Rig(folder=tmp_path)
    resumed = Auditor(second.owners, folder=tmp_path)
    resumed.start(sweeping=False)

    (old,) = resumed.records.open()
    assert old == only(auditor)
    assert second.recorder.of("invariant_violated") == []
    assert resumed.close_record(old.key)
    assert not resumed.close_record("9.9")
    await break_it(second)
    await resumed.aclose()

    assert len(second.recorder.of("invariant_violated")) == 1
    assert [(record.open, record.count) for record in read_violations(tmp_path)] == [(False, 1), (True, 1)]


@in_virtual_time
async def test_a_disk_that_refuses_costs_the_file_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The record is kept, told and counted; the failure is logged once."""
    rig = Rig(folder=tmp_path / "gone")
    auditor = rig.auditor()
    with caplog.at_level(logging.ERROR):
        await break_it(rig)
        await settle()
        await break_it(rig, "e000-p0000001")
        await auditor.aclose()
        await settle()

    assert kinds(auditor) == {"conservation": 2}
    assert auditor.statistics().write_failures >= 1
    assert len([line for line in caplog.records if "written down" in line.message]) == 1


@in_virtual_time
async def test_an_invariant_that_does_not_apply_says_so() -> None:
    """Without rows, gates or stamps there is nothing to prove live; a digest is proved at the cut."""
    rig = Rig(dataplane=None)
    auditor = rig.auditor()
    states = {status.name: status for status in auditor.status()}

    assert list(states) == list(AUDITED)
    assert states["digest_matches"].state == "at the cut"
    inactive = {name for name, status in states.items() if status.state == "inactive"}
    assert inactive == {"rows_present", "rows_not_orphaned", "gate_is_respected"}
    assert all(states[name].why for name in inactive)
    assert states["single_owner"].violations == 0
    await break_it(rig)
    assert {status.name: status.violations for status in auditor.status()}["conservation"] == 1


@in_virtual_time
async def test_it_sweeps_by_itself_and_tells_what_was_checked() -> None:
    """Attached with one call, to owners or to whatever has them; closed, it hears nothing more."""
    rig = Rig()

    class Has:
        owners = rig.owners

    auditor = attach_auditor(Has(), dataplane=rig.dataplane, pace=Pace(rest=0.0, least_seconds=0.0))
    await rig.read(2)
    checked = threading.Event()

    class Listens:
        def invariant_checked(self, name: str) -> None:
            if name == "single_owner":
                checked.set()

    rig.hub.subscribe(Listens())
    for _ in range(100):
        await asyncio.sleep(0.1)  # virtual
    await auditor.aclose()
    await break_it(rig)

    assert checked.is_set()
    assert auditor.statistics().sweeps >= 1
    assert kinds(auditor) == {}
    assert rig.hub.sources("auditor") == [auditor]
