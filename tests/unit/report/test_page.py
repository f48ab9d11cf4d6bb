"""The page: self-contained, no empty chart, nothing that a run recorded becomes markup."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import plotly.graph_objects as go  # type: ignore[import-untyped] # ships no types
import pytest

from quiesce.auditor import ViolationJournal
from quiesce.auditor.record import Records
from quiesce.cli.report import EXIT_FAILED, EXIT_OK, EXIT_UNUSABLE, add_parser
from quiesce.invariants import Violation
from quiesce.report import write_report
from quiesce.report.charts import Chart, Table
from quiesce.report.collect import collect
from quiesce.report.figures import sections, tiles
from quiesce.report.page import render
from quiesce.report.words import duration
from quiesce.telemetry.finished import FinishedSpan
from quiesce.telemetry.recording import Recording
from quiesce_exporters.recorder import Recorder
from tests.unit.report.synthetic import lines, write_recording


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two hours, with a crash and a restore."""
    folder = tmp_path_factory.mktemp("run")
    write_recording(folder, hours=2, save_every=60)
    groups = ("e000-p0000007",)
    records = Records(1)
    for found in (
        Violation("conservation", "critical", "group <b>e000-p0000007</b>: lost", groups),
        Violation(
            "checkpoint_progress", "warning", "write has taken 700 s", evidence={"drill": "slow-write"}
        ),
    ):
        records.add(found, origin="live", unix_time=1.7e9, events=[])
    records.close("1.0")
    ViolationJournal(folder).append(record.to_json() for record in records.all())
    return folder


def charts_and_tables(run_dir: Path) -> Iterator[Chart | Table]:
    """Everything on the page."""
    for section in sections(collect(Recording.open(run_dir))):
        assert section.items
        yield from section.items


def small(folder: Path, run: str = "r") -> Path:
    """A run that recorded one span, and nothing else."""
    sink = Recorder(folder / "telemetry", run=run, reserve_bytes=0)
    sink.spans([FinishedSpan("quiesce.rollout", 1, 2, 0, 10**18, 10**18 + 1)])
    sink.close(1)
    return folder


def test_a_whole_run_shows_everything(run_dir: Path) -> None:
    """With data for all of it there is no chart and no table that is only a sentence."""
    empty = [item.title for item in charts_and_tables(run_dir) if isinstance(item, Chart) and not item.figure]
    none = [item.title for item in charts_and_tables(run_dir) if isinstance(item, Table) and not item.rows]
    assert empty == none == []


def test_what_the_auditor_found_is_listed_open_ones_first(run_dir: Path) -> None:
    """With state, severity, and whether somebody injected it on purpose; the number at the top says how many are open."""
    data = collect(Recording.open(run_dir))

    (table,) = [item for item in charts_and_tables(run_dir) if item.title == "Violations"]
    assert isinstance(table, Table)
    assert [row[:4] for row in table.rows] == [
        ("2.0", "open", "critical", "single owner"),
        ("2.1", "open", "warning", "checkpoint progress"),
        ("1.1", "open", "warning", "checkpoint progress"),
        ("1.0", "closed", "critical", "conservation"),
    ]
    assert "Injected by the drill slow-write" in table.rows[2][-1]
    assert "3 open" in {what: more for what, _, more in tiles(data)}["Invariant violations"]
    assert "group &lt;b&gt;e000-p0000007&lt;/b&gt;: lost" in render(data, "")
    assert collect(Recording.open(run_dir / "telemetry")).violations == data.violations


def test_the_save_that_was_cut_off_is_all_over_the_page(run_dir: Path) -> None:
    """Counted, listed with its holders, blamed on them, and in what the auditor said of it while it went on."""
    data = collect(Recording.open(run_dir))
    items = {item.title: item for item in charts_and_tables(run_dir)}

    (cut,) = data.cut_offs
    listed = items["Saves that were cut off"]
    assert isinstance(listed, Table)
    assert [row[2:7] for row in listed.rows] == [("ended", cut.cut_id, "–", "drain", "1 min 37 s")]
    assert "2\u00a0×\u00a0group commit (the oldest held for 1 min 40 s), retry" in listed.rows[0][7]
    assert "1 cut off" in {what: more for what, _, more in tiles(data)}["Saves"]
    said = [record for record in data.violations if record.cut_id == cut.cut_id]
    assert [(record.invariant, record.open) for record in said] == [("checkpoint_progress", True)]
    for title, kind in (("Drain blame by kind", "retry"), ("Writer time lost by kind", "admission")):
        chart = items[title]
        assert isinstance(chart, Chart)
        assert chart.figure is not None
        names = [trace["name"] for trace in chart.figure["data"] if "pattern" in trace["marker"]]
        assert f"{kind}, cut off (at least 1 min 37 s)" in names
    assert any(slot.outcome == "cut off" and slot.cut_id == cut.cut_id for slot in data.slow)


def test_without_a_log_nothing_is_said_of_its_warnings(tmp_path: Path) -> None:
    """Telemetry can be switched on without one; a run whose log is quiet says so."""
    page = render(collect(Recording.open(small(tmp_path))), "")
    assert "neither warnings nor errors" not in page
    assert "No log was recorded" in page
    folder = small(tmp_path)
    sink = Recorder(folder / "telemetry", run="r", reserve_bytes=0)
    sink.events([{"event": "run.state", "timestamp": "2026-03-02T06:00:00Z", "level": "info"}])
    sink.close(1)
    assert "neither warnings nor errors" in render(collect(Recording.open(folder)), "")


def test_without_an_auditor_nothing_is_said_to_have_been_looked_for(tmp_path: Path) -> None:
    """No violation on record is not the same as an auditor that found none."""
    page = render(collect(Recording.open(small(tmp_path))), "")
    assert "The auditor found nothing" not in page
    assert "Nothing was checked" in page


def test_every_figure_is_one_that_plotly_takes(run_dir: Path) -> None:
    """Names of properties and their values are plotly's, colours apart; every trace has points."""
    count = 0
    for item in charts_and_tables(run_dir):
        if isinstance(item, Chart) and item.figure:
            text = re.sub(r'"(c\da?|bad)"', '"#123456"', json.dumps(item.figure))
            go.Figure(json.loads(text))
            for trace in item.figure["data"]:
                assert len(trace["x"]) == len(trace["y"]) > 0, item.title
                assert any(value is not None for value in trace["y"]), item.title
            count += 1
    assert count >= 18


def test_a_run_that_recorded_next_to_nothing_says_why(tmp_path: Path) -> None:
    """Each chart and table without data is one sentence."""
    for item in charts_and_tables(small(tmp_path)):
        assert item.empty.endswith("."), item.title
        assert not (item.figure if isinstance(item, Chart) else item.rows), item.title


def test_the_page_needs_nothing_but_itself(run_dir: Path, tmp_path: Path) -> None:
    """No address that a browser would ask, a policy that forbids it, and plotly inside."""
    page = write_report(run_dir, tmp_path / "page.html").read_text()
    own = page.replace(next(script for script in page.split("<script>") if len(script) > 1_000_000), "")
    assert "Plotly" in page
    assert "default-src 'none'" in page
    assert not re.findall(r"""(?:src|href|url)\s*[=(]\s*["']?(?!#|data:)[a-z/]+:?//""", own)
    assert "http" not in own.replace("http-equiv", "")


def test_nothing_that_was_recorded_becomes_markup(tmp_path: Path) -> None:
    """A run's name and a kind of slot are text, in the page and in what plotly takes for markup."""
    evil = "</script><img src=x onerror=alert(1)>"
    folder = small(tmp_path, run=evil)
    data = collect(Recording.open(folder))
    data.counters["quiesce_window_blame_seconds_total"] = {evil: data.timeline.increases()}
    data.counters["quiesce_window_blame_seconds_total"][evil].add(0, 1.0)
    data.remarks.append(evil)
    page = render(data, "")
    assert "<img" not in page
    assert page.count("&lt;img") >= 3
    figures = re.search(r'id="figures">(.*?)</script>', page)
    assert figures is not None
    assert "<" not in figures[1]


def test_a_page_is_whole_or_not_there(run_dir: Path, tmp_path: Path) -> None:
    """What cannot be written leaves the page that was there, and no scratch file."""
    page = tmp_path / "page.html"
    page.mkdir()
    with pytest.raises(OSError, match=r"page\.html"):
        write_report(run_dir, page)
    assert list(tmp_path.iterdir()) == [page]


def test_the_same_recording_gives_the_same_page(run_dir: Path, tmp_path: Path) -> None:
    """The page depends on the recording alone, and the recording of the test on its seed."""
    first, second = (write_report(run_dir, tmp_path / name).read_bytes() for name in ("a.html", "b.html"))
    assert first == second
    (tmp_path / "again").mkdir()
    write_recording(tmp_path / "again", hours=2, save_every=60)
    assert list(lines(tmp_path / "again")) == list(lines(run_dir))


def test_a_short_run_is_shown_whole(tmp_path: Path) -> None:
    """Two minutes with two saves: as many charts, and the bins are seconds."""
    write_recording(tmp_path, hours=1 / 30, period=2, save_every=50, crash_at=None)
    data = collect(Recording.open(tmp_path))
    assert len(data.saves) == 2
    assert data.timeline.width == 1
    assert [item.title for item in charts_and_tables(tmp_path) if isinstance(item, Chart) and item.figure]


@pytest.mark.parametrize(
    "seconds, text",
    [
        (None, "–"),
        (0, "0"),
        (2.5e-6, "2.5 µs"),
        (0.0123, "12.3 ms"),
        (1.5, "1.5 s"),
        (59.9, "59.9 s"),
        (60, "1 min"),
        (123, "2 min 3 s"),
        (18_720, "5 h 12 min"),
        (86_400, "24 h"),
    ],
)
def test_durations_are_for_people(seconds: float | None, text: str) -> None:
    """Three digits and a unit."""
    assert duration(seconds) == text


def report(*words: str) -> int:
    """Run the command."""
    import argparse

    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    args = parser.parse_args(["report", *words])
    code: int = args.run(args)
    return code


def test_the_command_writes_the_page_and_says_where(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Into the run folder, or where -o says."""
    page = tmp_path / "page.html"
    assert report(str(run_dir), "-o", str(page)) == EXIT_OK
    assert str(page) in capsys.readouterr().out
    assert page.stat().st_size > 1_000_000
    assert report(str(run_dir)) == EXIT_OK
    assert (run_dir / "report.html").exists()


def test_the_command_says_what_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No recording is 2; no plotly, or no place for the page, is 1: one line each."""
    assert report(str(tmp_path)) == EXIT_UNUSABLE
    assert "has no recording" in capsys.readouterr().err
    folder = small(tmp_path)
    assert report(str(folder), "-o", str(tmp_path / "absent" / "page.html")) == EXIT_FAILED
    assert "absent" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    assert report(str(folder)) == EXIT_FAILED
    assert "pip install 'quiesce[report]'" in capsys.readouterr().err
