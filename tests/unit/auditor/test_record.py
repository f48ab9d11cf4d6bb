"""One record for one fault, and the file that they are kept in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quiesce.auditor import FILE_NAME, ViolationJournal, ViolationRecord, read_violations
from quiesce.auditor.record import MAX_GROUPS, MAX_PER_INVARIANT, MAX_RECORDS, Records
from quiesce.invariants.violation import Violation


def add(
    records: Records,
    invariant: str,
    *groups: str,
    at: float = 1.0,
    **evidence: Any,  # noqa: ANN401 - JSON values
) -> tuple[ViolationRecord, bool]:
    """Add a finding."""
    found = Violation(invariant, "critical", "it does not hold", groups, evidence=evidence)
    return records.add(found, origin="live", unix_time=at, events=[])


def test_the_same_groups_are_the_same_fault_in_whatever_order_and_number() -> None:
    """A cut names all groups at once, the live auditor one at a time."""
    records = Records(3)
    first, new = add(records, "rows_present", "a", at=5.0)
    again, known = add(records, "rows_present", "a", at=9.0)
    other, fresh = add(records, "rows_present", "a", "b", at=11.0)

    assert (new, known, fresh) == (True, False, True)
    assert again is first
    assert (first.count, first.first_unix, first.last_unix) == (2, 5.0, 9.0)
    assert other.groups == ("b",)
    assert first.key != other.key


def test_both_invariants_of_ownership_are_one_fault_of_a_group() -> None:
    """Two owners now are one group that is trained twice later."""
    records = Records()
    first, _ = add(records, "single_owner", "a")
    later, new = add(records, "conservation", "a")

    assert later is first
    assert not new
    assert records.knows("conservation", "a")
    assert not records.knows("rows_present", "a")


def test_without_groups_the_same_values_are_the_same_fault() -> None:
    """However they grow; another worker, counter or phase is another fault."""
    records = Records()
    cases: list[tuple[str, dict[str, Any], bool]] = [
        ("cursor_within_lookahead", {"cursor": 3, "admissions": 5}, True),
        ("cursor_within_lookahead", {"cursor": 4, "admissions": 6}, False),
        ("cursor_within_lookahead", {"cursor": 4, "gate_window": 6}, True),
        ("versions_grow", {"back": {"step": 1}}, True),
        ("versions_grow", {"back": {"trainer version": 1}, "parent_cut": "c"}, True),
        ("versions_grow", {"back": {"step": 2}}, False),
        ("gate_is_respected", {"worker": "0", "hook": "permit_granted", "sequence": 4}, True),
        ("gate_is_respected", {"worker": "0", "hook": "permit_granted", "sequence": 9}, False),
        ("gate_is_respected", {"worker": "1", "hook": "permit_granted", "sequence": 4}, True),
        ("checkpoint_progress", {"phase": "write"}, True),
        ("checkpoint_progress", {"phase": "drain"}, True),
    ]

    assert [add(records, name, **evidence)[1] for name, evidence, _ in cases] == [new for *_, new in cases]


def test_a_flood_of_faults_stays_bounded() -> None:
    """In records of one invariant, in groups of one record, in records of all."""
    records = Records(
        1, [Records(0).add(Violation("x", "warning", "m", ("g",)), origin="cut", unix_time=0, events=[])[0]]
    )
    wide, _ = add(records, "rows_present", *(f"w{number}" for number in range(10_000)))
    for number in range(500):
        add(records, "conservation", f"g{number}")

    of_one = [record for record in records.all() if record.invariant == "conservation"]
    assert (len(wide.groups), wide.groups_total) == (MAX_GROUPS, 10_000)
    assert len(of_one) == MAX_PER_INVARIANT
    assert sum(record.groups_total for record in of_one) == 500
    for number in range(MAX_RECORDS):
        add(records, f"check {number}", check=f"{number}")
    assert len(records.all()) == MAX_RECORDS
    assert records.forgotten == 2 + MAX_PER_INVARIANT


def test_closed_records_go_first() -> None:
    """What somebody has looked into makes room for what nobody has."""
    records = Records()
    keys = [add(records, f"check {number}", check=f"{number}")[0].key for number in range(MAX_RECORDS)]
    records.close(keys[7])
    add(records, "one more", check="x")

    left = {record.key for record in records.all()}
    assert keys[7] not in left
    assert keys[0] in left
    assert len(records.open()) == MAX_RECORDS


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    """The last line of a record counts, and it keeps its place."""
    records = Records(2)
    journal = ViolationJournal(tmp_path)
    first, _ = add(records, "rows_present", "a", missing=["k"])
    second, _ = add(records, "single_owner", "b")
    journal.append([first.to_json(), second.to_json()])
    first.count, first.open = 9, False
    journal.append([first.to_json()])

    assert read_violations(tmp_path) == [first, second]


def test_a_line_that_a_crash_cut_short_costs_itself_alone(tmp_path: Path) -> None:
    """Torn at any byte, what was there before stays and what comes later is whole."""
    record, _ = add(Records(), "rows_present", "a")
    later, _ = add(Records(1), "rows_present", "b")
    ViolationJournal(tmp_path).append([record.to_json(), {**record.to_json(), "key": "torn"}])
    whole = (tmp_path / FILE_NAME).read_bytes()
    for length in range(whole.index(b"\n") + 1, len(whole), 7):
        (tmp_path / FILE_NAME).write_bytes(whole[:length])
        ViolationJournal(tmp_path).append([later.to_json()])
        assert [found.key for found in read_violations(tmp_path)] == [record.key, later.key]


def test_lines_of_another_kind_are_passed_over(tmp_path: Path) -> None:
    """A later version's, a stranger's, and bytes that are no text."""
    record, _ = add(Records(), "rows_present", "a")
    (tmp_path / FILE_NAME).write_bytes(b'{"v": 2}\n[]\n\xff\xfe\n{"v": 1, "key": "x"}\n\n')
    ViolationJournal(tmp_path).append([record.to_json()])

    assert read_violations(tmp_path) == [record]
    assert read_violations(tmp_path / "nowhere") == []


def test_a_file_that_grew_is_rewritten_with_what_counts(tmp_path: Path) -> None:
    """Counts that changed a thousand times take one line each again."""
    record, _ = add(Records(), "rows_present", "a")
    journal = ViolationJournal(tmp_path, max_bytes=4096)
    for count in range(200):
        record.count = count
        journal.append([record.to_json()])

    lines = (tmp_path / FILE_NAME).read_text().splitlines()
    assert len(lines) < 20
    assert json.loads(lines[-1])["count"] == 199
    assert [found.count for found in read_violations(tmp_path)] == [199]
