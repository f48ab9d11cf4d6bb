"""Invariants judged an event at a time; the faults of whole runs are in tests/faults."""

from __future__ import annotations

import pytest

from quiesce.auditor import Auditor
from quiesce.checkpoint.cut import PARTS
from quiesce.observers import Hub
from tests.unit.auditor.rig import Rig, kinds, only


def fire(rig: Rig, hook: str, *args: object) -> None:
    """Fire a hook."""
    rig.hub.fire(hook, *args)


def window(rig: Rig, name: str = "w1") -> None:
    """Open a window."""
    fire(rig, "window_opened", name, 0, (), 0)


async def test_sound_moves_are_no_finding() -> None:
    """Read, spared, drained: each from where the shadow has it."""
    rig = Rig()
    auditor = rig.auditor()
    await rig.read(3)
    await rig.read(2, to_spares=True)
    async with rig.owners.barrier.mutation("prompt_reservation") as cut:
        rig.owners.drain_spares(cut)

    await auditor.sweep.once()

    assert kinds(auditor) == {}
    assert auditor.statistics().owned == 5
    assert auditor.events.reserved == 5


async def test_a_group_that_ended_and_moves_again_is_a_conservation_fault() -> None:
    """Trained once is trained for good."""
    rig = Rig()
    auditor = rig.auditor()
    (group,) = await rig.read(1)
    async with rig.owners.barrier.mutation("group_removal") as cut:
        rig.owners.drop(cut, group, "failed")
        fire(rig, "owner_moved", group, "training", "trained", "")

    record = only(auditor)
    assert (record.invariant, record.groups) == ("conservation", (group,))
    assert "dropped already" in record.message
    assert [event["target"] for event in record.events] == ["ledger", "dropped", "trained"]


async def test_what_follows_from_a_fault_is_no_further_one() -> None:
    """A group in two places is reported once, however it goes on."""
    rig = Rig()
    auditor = rig.auditor()
    (group,) = await rig.read(1)
    async with rig.owners.barrier.mutation("retry"):
        fire(rig, "owner_moved", group, "read", "spares", "")
        for move in (
            ("ledger", "buffer"),
            ("spares", "ledger"),
            ("buffer", "training"),
            ("training", "trained"),
        ):
            fire(rig, "owner_moved", group, *move, "")

    record = only(auditor)
    assert (record.invariant, record.owners, record.count) == ("single_owner", ("ledger", "spares"), 1)


async def test_prompts_without_an_owner_at_the_end_of_their_slot_are_found_at_once() -> None:
    """The counter tells that, the sweep tells which."""
    rig = Rig()
    auditor = rig.auditor()
    await rig.read(1)
    async with rig.owners.barrier.mutation("prompt_reservation") as cut:
        from quiesce.types import PromptRef

        rig.owners.accounting.read(cut, [PromptRef(0, 1, 1)])
    assert auditor.events.hunt

    await auditor.sweep.once()

    found = {record.groups: record.message for record in auditor.records.all()}
    assert set(kinds(auditor)) == {"conservation"}
    assert "lost" in found["e000-p0000001",]


async def test_a_window_over_an_open_slot_is_a_fault() -> None:
    """Slots and windows exclude each other, whoever came first."""
    rig = Rig()
    auditor = rig.auditor()
    async with rig.owners.barrier.mutation("retry"):
        window(rig)

    record = only(auditor)
    assert (record.invariant, record.cut_id) == ("window_is_exclusive", "w1")
    assert record.evidence["slots"] == 1


async def test_an_auditor_that_comes_while_a_slot_is_open_does_not_mistake_it() -> None:
    """It cannot know how many were granted; the next window tells that none is."""
    rig = Rig()
    async with rig.owners.barrier.mutation("retry"):
        auditor = rig.auditor()
        fire(rig, "slot_opened", "retry", 0, 0)  # one that was granted, and had not entered
    async with rig.owners.barrier.checkpoint():
        pass
    await rig.read(1)

    assert kinds(auditor) == {}


@pytest.mark.parametrize("left_out", PARTS)
async def test_a_cut_without_one_of_its_parts_is_not_one_instant(left_out: str) -> None:
    """All six, or none."""
    rig = Rig()
    auditor = rig.auditor()
    window(rig)
    for part in PARTS:
        if part != left_out:
            fire(rig, "cut_part_captured", "w1", part, 1)
    fire(rig, "window_closed", "w1", 0, 0, "completed", 0)

    record = only(auditor)
    assert (record.invariant, list(record.evidence["parts"])) == ("cut_is_one_instant", [left_out])


async def test_a_failed_capture_and_a_window_without_one_are_no_fault() -> None:
    """Whoever gives a cut up has captured less."""
    rig = Rig()
    auditor = rig.auditor()
    window(rig)
    fire(rig, "cut_part_captured", "w1", "cursor", 1)
    fire(rig, "window_closed", "w1", 0, 0, "failed", 0)
    window(rig, "w2")
    fire(rig, "window_closed", "w2", 0, 0, "completed", 0)

    assert kinds(auditor) == {}


async def test_a_part_that_is_captured_without_a_window_is_a_fault() -> None:
    """Its instant is another one."""
    rig = Rig()
    auditor = rig.auditor()
    fire(rig, "cut_part_captured", "w1", "ledger", 1)

    assert kinds(auditor) == {"cut_is_one_instant": 1}


def admit(rig: Rig, cursor: int, target: int | None, groups: int) -> None:
    """Report an admission; it is in a slot as far as the auditor can tell."""
    fire(rig, "slot_opened", "admission", 0, 0)
    fire(rig, "admission_committed", "transactional", cursor, target, groups)
    fire(rig, "slot_closed", "admission", 0, 0, "completed", 0)


async def test_more_groups_than_were_reserved_were_admitted_twice() -> None:
    """A restored batch that is dispatched a second time shows like this."""
    rig = Rig()
    auditor = rig.auditor(gate_window=None)
    await rig.read(2)
    admit(rig, 0, 0, 2)
    assert kinds(auditor) == {}
    admit(rig, 1, 1, 2)

    record = only(auditor)
    assert record.invariant == "cursor_within_lookahead"
    assert "admitted twice" in record.message


async def test_each_way_to_leave_the_lookahead_is_told_apart() -> None:
    """A shut gate, a step that has two admissions, a cursor that leaps: three faults, each once."""
    rig = Rig()
    auditor = rig.auditor(gate_window=1)
    await rig.read(20)
    admit(rig, 0, 0, 2)
    admit(rig, 1, 1, 2)
    assert kinds(auditor) == {}
    admit(rig, 2, 2, 2)  # the gate shuts at 1
    admit(rig, 3, 3, 2)
    fire(rig, "version_advanced", 5)
    admit(rig, 4, None, 2)
    admit(rig, 5, 5, 2)
    admit(rig, 6, 5, 2)  # step 5 again
    admit(rig, 8, None, 2)  # a leap

    said = [record.message for record in auditor.records.all()]
    assert kinds(auditor) == {"cursor_within_lookahead": 3}
    assert "the gate shuts at 1" in said[0]
    assert "step 5 is stamped" in said[1]
    assert "after 8 committed" in said[2]


async def test_a_version_that_is_reported_again_went_back() -> None:
    """It grows, or nothing is reported."""
    rig = Rig()
    auditor = rig.auditor()
    for version in (3, 7, 7):
        fire(rig, "version_advanced", version)

    record = only(auditor)
    assert record.invariant == "versions_grow"
    assert record.evidence["back"] == {"trainer version": {"before": 7, "now": 7}}


async def test_a_phase_is_late_once_while_it_lasts_and_when_it_is_over() -> None:
    """A phase that hangs is told before it ends; its end is no second fault."""
    now = [0]
    rig = Rig()
    auditor = rig.auditor(budgets={"write": 2.0}, clock=lambda: now[0])
    fire(rig, "phase_started", "c1", "write")
    fire(rig, "phase_started", "c1", "stage")
    now[0] = 1_900_000_000
    auditor.events.look_at_phases()
    assert kinds(auditor) == {}
    now[0] = 2_100_000_000
    auditor.events.look_at_phases()
    auditor.events.look_at_phases()
    fire(rig, "phase_ended", "c1", "write", 3_000_000_000, "completed")

    record = only(auditor)
    assert (record.invariant, record.severity, record.count) == ("checkpoint_progress", "warning", 1)
    fire(rig, "phase_started", "c2", "write")
    fire(rig, "phase_ended", "c2", "write", 9_000_000_000, "completed")
    assert only(auditor).count == 2


async def test_a_clear_under_a_closed_gate_is_a_fault() -> None:
    """It is judged a moment later, and as the checker of whole logs judges it."""
    rig = Rig()
    auditor = rig.auditor()
    fire(rig, "permit_granted", "0", 1, 0)
    fire(rig, "permit_released", "0", 2, 0)
    fire(rig, "gate_closing", "0", 3, "1.1")
    fire(rig, "gate_closed", "0", 4, "1.1", 0, "closed")
    auditor.events.judge_gates()
    assert kinds(auditor) == {}
    fire(rig, "clear_started", "0", 1, 1)
    assert auditor.events.gates_waiting
    auditor.events.judge_gates()

    assert kinds(auditor) == {"gate_is_respected": 1}
    assert "started a clear" in only(auditor).message


async def test_threads_that_clear_while_the_auditor_comes_or_goes_are_no_fault(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Hooks are added and removed one after the other: a grant that falls in between is heard by nobody."""
    rig = Rig()
    auditor = Auditor(rig.owners, dataplane=rig.dataplane)
    subscribe, unsubscribe = Hub.subscribe, Hub.unsubscribe

    def coming(hub: Hub, observer: object) -> None:
        if observer is auditor.events:
            auditor.events.permit_released("0", 1, 0)
            auditor.events.clear_started("0", 2, 1)
        subscribe(hub, observer)

    def going(hub: Hub, observer: object) -> None:
        if observer is auditor.events:
            auditor.events.clear_started("0", 8, 1)
        unsubscribe(hub, observer)

    monkeypatch.setattr(Hub, "subscribe", coming)
    monkeypatch.setattr(Hub, "unsubscribe", going)
    auditor.start(sweeping=False)
    for sequence in (2, 4, 6):
        fire(rig, "permit_granted", "0", sequence, 0)
        fire(rig, "clear_started", "0", sequence, 1)
        fire(rig, "permit_released", "0", sequence + 1, 0)
    await auditor.aclose()

    assert auditor.events.gates_seen
    assert kinds(auditor) == {}


async def test_gate_events_that_pile_up_are_judged_by_whoever_reports_the_next() -> None:
    """The log is bounded even if nothing sweeps."""
    rig = Rig()
    auditor: Auditor = rig.auditor()
    for number in range(1, 2001):
        fire(rig, "permit_granted" if number % 2 else "permit_released", "0", number, 0)

    assert auditor.events.gates_seen
    assert kinds(auditor) == {}
