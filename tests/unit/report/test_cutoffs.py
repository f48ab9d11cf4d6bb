"""Saves that the end of their process cut off are on the page: where each was, for how long, and what it waited for."""

import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

import pytest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from quiesce.report.charts import Chart, Table
from quiesce.report.collect import collect
from quiesce.report.cutoffs import Holder
from quiesce.report.data import RunData
from quiesce.report.figures import sections, tiles
from quiesce.report.page import render
from quiesce.report.saves import cut_table, saves_lead
from quiesce.report.slots import stacked
from quiesce.telemetry import names
from quiesce.telemetry.finished import FinishedSpan
from quiesce.telemetry.recording import Recording
from quiesce_exporters.recorder import Recorder

NOW = 0.0
"""When the test began."""

WINDOW = (7, 70)
END = 40.0
"""Seconds after which the process ended."""


@pytest.fixture(autouse=True)
def _now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set it anew for each test: files of a recording are begun when they are written."""
    monkeypatch.setattr(sys.modules[__name__], "NOW", time.time())


def recorder(run_dir: Path, incarnation: int = 1) -> Recorder:
    """A recorder of one start of a run."""
    return Recorder(
        run_dir / "telemetry", run="r", role="controller", incarnation=incarnation, reserve_bytes=0
    )


def read(run_dir: Path) -> RunData:
    """What the page would show."""
    return collect(Recording.open(run_dir))


def span(name: str, start: float, end: float, *, cut_off: bool = False, **said: object) -> FinishedSpan:
    """A span of the save ``c`` (or of a slot), in seconds after the test began."""
    about: Mapping[str, object] = {
        **({} if name == "quiesce.slot" else {"quiesce.cut_id": "c"}),
        **{f"quiesce.{key}": value for key, value in said.items()},
    }
    begin, over = (int((NOW + at) * 1e9) for at in (start, end))
    return FinishedSpan(name, 1, 2, 0, begin, over, about, cut_off=cut_off)  # type: ignore[arg-type] # scalars


def stuck_drain() -> list[FinishedSpan]:
    """What a process tells that is ended in a drain: it had drained for 30 s, for two slots, and two more waited."""
    window = span("quiesce.window", 10, END, cut_off=True)._replace(trace_id=WINDOW[0], span_id=WINDOW[1])
    slots = [
        span("quiesce.slot", 4, END, cut_off=True, kind="group_commit"),
        span("quiesce.slot", 8, END, cut_off=True, kind="retry", wait_seconds=1.0),
        span("quiesce.slot", 15, END, cut_off=True, kind="admission", held=False)._replace(links=(WINDOW,)),
        span("quiesce.slot", 35, END, cut_off=True, kind="admission", held=False)._replace(links=(WINDOW,)),
    ]
    return [
        span("quiesce.checkpoint.fence", 9.5, 10, outcome="completed"),
        span("quiesce.checkpoint.drain", 10, END, cut_off=True),
        window,
        span("quiesce.checkpoint", 9.5, END, cut_off=True),
        *slots,
    ]


def phases(at: float, phase: str, since: float) -> tuple[list[Metric], float]:
    """A sample of a process that is in a phase ("": in none)."""
    now = GaugeMetricFamily(names.CHECKPOINT_PHASE.name, "Phase", labels=["phase"])
    began = GaugeMetricFamily(names.CHECKPOINT_PHASE_STARTED.name, "Since", labels=["phase"])
    for name in ("drain", "write"):
        now.add_metric([name], float(name == phase))
        began.add_metric([name], NOW + since if name == phase else 0.0)
    return [now, began], NOW + at


def told(*spans: FinishedSpan) -> list[FinishedSpan]:
    """Phases of a save that had ended."""
    return [
        span("quiesce.checkpoint.drain", 1, 1.2, outcome="completed"),
        span("quiesce.checkpoint.exclusive", 1.2, 1.3, outcome="completed"),
        span("quiesce.window", 1, 1.3, outcome="completed"),
        *spans,
    ]


def test_a_save_that_was_cut_off_says_where_it_was_and_what_it_waited_for(tmp_path: Path) -> None:
    """Its phase, the time in it, the slots that were open, and how many waited for it to end."""
    sink = recorder(tmp_path)
    sink.spans(stuck_drain())
    sink.close(1)

    (cut,) = read(tmp_path).cut_offs
    assert (cut.cut_id, cut.phase, cut.outcome, cut.killed) == ("c", "drain", "cut off", False)
    assert cut.seconds == cut.closed == pytest.approx(30)
    assert cut.unix_time == pytest.approx(NOW + 9.5)
    assert [holder.kind for holder in cut.holders] == ["group_commit", "retry"]
    assert [holder.held_seconds for holder in cut.holders] == pytest.approx([36, 31])
    assert cut.waiting == 2
    assert cut.blocked == pytest.approx({"admission": 25 + 5})
    assert cut.blame == pytest.approx({"group_commit": 30, "retry": 30})


def test_the_page_counts_it_and_does_not_say_that_nothing_was_saved(tmp_path: Path) -> None:
    """In the sentence, in the tiles, in the table, in what it cost; as long as the run was, not as its last moments."""
    sink = recorder(tmp_path)
    sink.spans(stuck_drain())
    sink.samples([GaugeMetricFamily(names.RUN_STARTED.name, "Started", value=NOW)], NOW + END)
    sink.close(1)

    data = read(tmp_path)
    shown = {what: (much, more) for what, much, more in tiles(data)}
    assert shown["Saves"] == ("0", "1 cut off")
    assert shown["Drain, median"][1] == "longest over 30 s"
    assert shown["Writer time lost"] == ("30 s", "closed for 30 s")
    assert saves_lead(data).startswith(
        "None came to its end, 1 cut off. The one cut off had been in drain for 30 s"
    )
    assert "waiting for group commit (held for 36 s), retry (held for 31 s)" in saves_lead(data)
    assert data.ended - data.started == pytest.approx(END, abs=0.01)
    page = render(data, "")
    assert "group commit (held for 36 s)" in page
    assert "2 (admission)" in page
    assert "saved nothing" not in page
    assert "all completed" not in page
    assert "No window waited" not in page
    assert "No recorded slot had to wait" not in page


def test_good_saves_do_not_hide_one_that_was_cut_off(tmp_path: Path) -> None:
    """It is counted beside those that were counted, and times of its phase do not count as a drain that ended."""
    sink = recorder(tmp_path)
    done = span("quiesce.checkpoint", 1, 2, outcome="completed")
    sink.spans(
        [each._replace(attributes={**each.attributes, "quiesce.cut_id": "good"}) for each in told(done)]
    )
    sink.spans(stuck_drain())
    sink.close(1)

    data = read(tmp_path)
    assert data.outcomes == {"completed": 1, "cut off": 1}
    assert saves_lead(data).startswith("1 completed, 1 cut off.")
    assert {save.cut_id: save.phases for save in data.saves}["c"] == {"fence": pytest.approx(0.5)}
    assert {what: much for what, much, _ in tiles(data)}["Drain, median"] == "200 ms"


def test_a_window_that_completed_does_not_make_a_save_complete(tmp_path: Path) -> None:
    """A save that was cut off while it wrote has a good window; it was cut off all the same."""
    sink = recorder(tmp_path)
    sink.spans(
        told(
            span("quiesce.checkpoint.write", 2, END, cut_off=True),
            span("quiesce.checkpoint", 1, END, cut_off=True, step=7),
        )
    )
    sink.close(1)

    data = read(tmp_path)
    (cut,), (save,) = data.cut_offs, data.saves
    assert (cut.phase, cut.step, cut.holders) == ("write", 7, ())
    assert cut.seconds == pytest.approx(38)
    assert (save.outcome, save.cut_off) == ("cut off", True)
    assert save.phases.keys() == {"drain", "exclusive"}  # they ended, so they count
    assert data.outcomes == {"cut off": 1}
    assert "The last one holds" not in saves_lead(data)


def test_the_holder_that_a_span_names_is_shown_where_no_slot_is_recorded(tmp_path: Path) -> None:
    """A recording may have dropped its slots."""
    sink = recorder(tmp_path)
    about = {"last_holder.kind": "retry", "last_holder.task": "retries", "last_holder.seconds": 29.0}
    sink.spans([span("quiesce.checkpoint.drain", 10, END, cut_off=True, **about)])
    sink.close(1)

    data = read(tmp_path)
    assert data.cut_offs[0].holders == (Holder("retry", "retries", 29.0, at_least=True),)
    assert "retry of task retries (held for at least 29 s)" in saves_lead(data)


def test_a_slot_gets_the_name_of_its_task_where_there_is_no_doubt(tmp_path: Path) -> None:
    """A window's span names one task and its kind; of several slots of that kind it may be any."""
    sink = recorder(tmp_path)
    drain, *others = stuck_drain()[1:]
    named = {**drain.attributes, "quiesce.last_holder.kind": "retry", "quiesce.last_holder.task": "retries"}
    sink.spans([drain._replace(attributes=named), *others])
    sink.close(1)
    assert [holder.task for holder in read(tmp_path).cut_offs[0].holders] == ["", "retries"]


def test_a_restore_that_was_cut_off_is_listed_beside_those_that_the_log_tells(tmp_path: Path) -> None:
    """The log has nothing of it: only its span does."""
    sink = recorder(tmp_path)
    sink.spans([span("quiesce.restore", 0, 3, cut_off=True)])
    stamp = datetime.fromtimestamp(NOW + 9, UTC).isoformat()
    sink.events([{"event": "restore.completed", "timestamp": stamp, "level": "info", "parts": {"rows": 1}}])
    sink.close(1)
    assert [restore.outcome for restore in read(tmp_path).restores] == ["cut off", "completed"]


def test_a_save_whose_end_the_log_tells_was_not_cut_off(tmp_path: Path) -> None:
    """Telemetry may end before the last save does."""
    sink = recorder(tmp_path)
    sink.spans(stuck_drain())
    stamp = datetime.fromtimestamp(NOW + END + 1, UTC).isoformat()
    sink.events([{"event": "checkpoint.published", "timestamp": stamp, "level": "info", "cut_id": "c"}])
    sink.close(1)

    data = read(tmp_path)
    assert data.cut_offs == []
    assert data.outcomes == {"completed": 1}


def test_of_a_process_that_was_killed_the_last_sample_tells(tmp_path: Path) -> None:
    """It could not export what was open: a phase went on, and nothing tells of its end."""
    killed = recorder(tmp_path, 1)
    killed.spans(told())
    killed.samples(*phases(20, "write", 1.4))
    killed.close(1)
    again = recorder(tmp_path, 2)
    again.samples(*phases(60, "", 0))
    again.close(1)

    data = read(tmp_path)
    (cut,), (save,) = data.cut_offs, data.saves
    assert (cut.cut_id, cut.phase, cut.killed, cut.outcome) == ("c", "write", True, "cut off")
    assert cut.seconds == pytest.approx(18.6, abs=0.01)
    assert (save.outcome, data.outcomes) == ("cut off", {"cut off": 1})
    assert [row[2] for row in cut_table(data).rows] == ["killed"]
    assert "its last sample tells" in cut_table(data).note


def test_a_save_that_may_still_go_on_is_called_unfinished(tmp_path: Path) -> None:
    """The page can be written while the run goes on."""
    sink = recorder(tmp_path)
    sink.samples(*phases(20, "drain", 5))
    sink.close(1)

    data = read(tmp_path)
    assert data.outcomes == {"unfinished": 1}
    assert "had been in drain for 15 s" in saves_lead(data)
    assert [row[2] for row in cut_table(data).rows] == ["killed, or still runs"]


@pytest.mark.parametrize("ended", [True, False])
def test_a_phase_that_ended_after_the_last_sample_was_not_cut_off(tmp_path: Path, *, ended: bool) -> None:
    """Its span tells so, or the log's line about the save."""
    sink = recorder(tmp_path)
    sink.samples(*phases(20, "drain", 10))
    if ended:
        sink.spans([span("quiesce.checkpoint.drain", 10, 25, outcome="completed")])
    else:
        stamp = datetime.fromtimestamp(NOW + 26, UTC).isoformat()
        sink.events([{"event": "checkpoint.published", "timestamp": stamp, "level": "info", "cut_id": "c"}])
    sink.close(1)
    assert read(tmp_path).cut_offs == []


def test_the_hatched_part_does_not_flatten_the_rest(tmp_path: Path) -> None:
    """A drain of half a minute beside ones of milliseconds goes past the upper edge, which is said."""
    sink = recorder(tmp_path)
    sink.spans(stuck_drain())
    sink.close(1)
    data = read(tmp_path)
    counted = data.counters[names.WINDOW_BLAME.name] = {"group_commit": data.timeline.increases()}
    counted["group_commit"].add(0, 0.25)

    chart = stacked(data, names.WINDOW_BLAME, "Drain blame by kind", "Nothing.")
    assert chart.figure is not None
    assert chart.figure["layout"]["yaxis"]["range"][1] < 0.5
    assert "past the upper edge (to 1 min)" in chart.note
    assert [trace["name"] for trace in chart.figure["data"]] == [
        "group commit (250 ms)",
        "group commit, cut off (at least 30 s)",
        "retry, cut off (at least 30 s)",
    ]


def test_a_run_that_was_not_cut_off_says_so(tmp_path: Path) -> None:
    """In a sentence, with no note about what is not there."""
    sink = recorder(tmp_path)
    sink.spans(told())
    sink.close(1)
    tables = [item for part in sections(read(tmp_path)) for item in part.items if isinstance(item, Table)]
    (table,) = [item for item in tables if item.title == "Saves that were cut off"]
    assert (table.rows, table.note) == ((), "")
    assert table.empty == "The end of no process cut off a save, as far as the recording tells."


def test_a_single_kind_has_its_name_in_the_chart(tmp_path: Path) -> None:
    """A chart by kind needs its legend also when there is one kind only."""
    sink = recorder(tmp_path)
    sink.spans(stuck_drain()[:5])
    sink.close(1)
    charts = [item for part in sections(read(tmp_path)) for item in part.items if isinstance(item, Chart)]
    shown = {chart.title: chart.figure for chart in charts}
    for title in ("Drain blame by kind", "Phases of each save, over time (logarithmic)"):
        figure = shown[title]
        assert figure is not None
        assert figure["layout"]["showlegend"] is True, title
