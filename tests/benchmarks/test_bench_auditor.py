"""What the benchmark of the auditor measures: every kind of event at every size, what is kept, cuts, and the sweep."""

import asyncio
import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from quiesce.auditor import AUDITED
from quiesce.auditor.incremental import GATE_LOG
from quiesce.auditor.ring import RING_SIZE
from quiesce.bench import BenchReport, run_auditor
from quiesce.bench.auditor import TARGETS
from quiesce.bench.auditor_events import KINDS, Heard, measure_events, measure_kept
from quiesce.bench.auditor_world import cut_of
from quiesce.bench.page import AUDITOR_PAGE, update_page
from quiesce.cli.main import main
from quiesce.invariants import CutFacts, RowFacts, check_cut


@pytest.fixture(scope="module")
def report() -> BenchReport:
    """Return one quick run."""
    return run_auditor(quick=True)


def test_the_report_has_every_bar_and_every_part(report: BenchReport) -> None:
    """As JSON: each kind of event at each size, memory and cuts at each size, the sweep."""
    read = json.loads(json.dumps(report.to_json(), allow_nan=False))

    assert set(read["bars"]) == set(read["targets"]) == set(TARGETS)
    assert all(target == {"at_most": TARGETS[name]} for name, target in read["targets"].items())
    assert read["missed"] == []  # a quick run says nothing of cost
    events = [result for result in read["results"] if result["measured"] == "event"]
    sizes = {result["groups"] for result in events}
    assert {(result["groups"], result["kind"]) for result in events} == {
        (groups, kind) for groups in sizes for kind in KINDS
    }
    for measured in ("memory", "cut check"):
        assert {result["groups"] for result in read["results"] if result["measured"] == measured} == sizes
    (sweep,) = (result for result in read["results"] if result["measured"] == "sweep")
    assert sweep["slices_per_second"] > 0


def test_a_bar_is_the_worst_of_what_was_measured(report: BenchReport) -> None:
    """No kind of event and no size is averaged away."""
    results = report.to_json()["results"]
    ratios = [result["event_vs_bare_slot"]["median"] for result in results if result["measured"] == "event"]
    kept = [result["bytes_per_group"] for result in results if result["measured"] == "memory"]

    assert report.bars["auditor_event_vs_bare_slot"] == pytest.approx(max(ratios), rel=1e-4)
    assert report.bars["auditor_bytes_per_group"] == max(kept)


def test_the_page_gets_the_tables(report: BenchReport, tmp_path: Path) -> None:
    """Between its markers."""
    (tmp_path / AUDITOR_PAGE).write_text("before <!-- bench:auditor --> <!-- /bench:auditor --> after")

    (page,) = update_page(report, tmp_path, today=datetime(2026, 12, 1, tzinfo=UTC))

    text = page.read_text()
    assert text.startswith("before")
    assert text.endswith("after")
    assert all(name in text for name in TARGETS)
    for table in report.tables:
        assert {len(row) for row in table.rows} == {len(table.columns)}


def test_the_command_line_knows_it(report: BenchReport, capsys: pytest.CaptureFixture[str]) -> None:
    """By name, and with the folder for its store refused if it is none."""
    assert report.bench == "auditor"
    assert main(["bench", "auditor", "--quick", "--dir", "/nowhere/at/all"]) == 2
    assert "--dir" in capsys.readouterr().err


async def test_every_event_of_a_measurement_is_judged() -> None:
    """Moves are in the ring, gates are judged, and nothing is found in what was only made up."""
    heard = Heard(40)
    auditor = heard.begin()
    heard.fill_logs()

    assert len(auditor.events.ring) == RING_SIZE
    assert auditor.events.gates_waiting
    auditor.events.judge_gates()
    assert not auditor.events.gates_waiting
    heard.check()
    heard.report_each()
    assert {record.invariant for record in auditor.records.all()} == set(AUDITED)
    with pytest.raises(RuntimeError, match="found what is not there"):
        heard.check()
    await auditor.aclose()


def test_each_kind_is_measured_in_every_round() -> None:
    """Beside the bare slot of that round."""
    costs = asyncio.run(measure_events(50, 3, 16))

    assert len(costs.slot_ns) == 3
    assert {kind: len(found) for kind, found in costs.event_ns.items()} == dict.fromkeys(KINDS, 3)


def test_what_is_kept_hardly_grows_with_the_groups() -> None:
    """Its logs are bounded, and a group is a byte."""
    few, many = (asyncio.run(measure_kept(groups)).num_bytes for groups in (500, 4_500))

    assert many - few < 4_000 * 8
    assert few > GATE_LOG


def test_the_cut_that_is_judged_holds_and_would_not_if_it_were_broken() -> None:
    """So what is measured is the whole check."""
    state, keys = cut_of(100, 3)
    sound = CutFacts(rows=RowFacts(dict.fromkeys(keys), settling=frozenset()), parent=state, gate_window=100)
    broken = CutFacts(rows=RowFacts(dict.fromkeys(keys[1:]), settling=frozenset()))

    assert len(keys) == 87 * 3
    assert check_cut(state, sound) == []
    assert [found.invariant for found in check_cut(state, broken)] == ["rows_present"]
