"""What is read out of a recording: growth over restarts, saves put together, bounded whatever comes."""

import sys
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

import pytest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from quiesce.report import attempts
from quiesce.report.collect import collect
from quiesce.report.data import RunData
from quiesce.telemetry.finished import FinishedSpan
from quiesce.telemetry.recording import Recording
from quiesce_exporters.recorder import Recorder

NOW = 0.0
"""When the test began: the recorder's files are begun then, and nothing that they hold is older."""


@pytest.fixture(autouse=True)
def _now(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set it anew for each test: the module may have been loaded a quarter of an hour before."""
    monkeypatch.setattr(sys.modules[__name__], "NOW", time.time())


def recorder(run_dir: Path, incarnation: int = 1, role: str = "controller") -> Recorder:
    """A recorder of one start of a run."""
    return Recorder(run_dir / "telemetry", run="r", role=role, incarnation=incarnation, reserve_bytes=0)


def read(run_dir: Path) -> RunData:
    """What the page would show."""
    return collect(Recording.open(run_dir))


def families(tokens: float, groups: float) -> list[Metric]:
    """A counter and a gauge."""
    gauge = GaugeMetricFamily("quiesce_groups", "Groups", labels=["owner"])
    gauge.add_metric(["ledger"], groups)
    return [CounterMetricFamily("quiesce_tokens_generated", "Tokens", value=tokens), gauge]


def span(name: str, cut_id: str, start: float, seconds: float, **attributes: object) -> FinishedSpan:
    """A span of a save."""
    said: Mapping[str, object] = {"quiesce.cut_id": cut_id, **attributes}
    begin = int((NOW + start) * 1e9)
    return FinishedSpan(name, 1, 2, 0, begin, begin + int(seconds * 1e9), said)  # type: ignore[arg-type] # scalars


def event(name: str, at: float, **fields: object) -> dict[str, object]:
    """A line of the run's log."""
    stamp = datetime.fromtimestamp(NOW + at, UTC).isoformat()
    return {"event": name, "timestamp": stamp, "level": "info", **fields}


def test_a_counter_goes_on_over_a_restart(tmp_path: Path) -> None:
    """Each process counts from zero, so its first value is growth; one that shrinks began again."""
    first = recorder(tmp_path, 1)
    first.samples(families(100, 5), NOW)
    first.samples(families(150, 6), NOW + 15)
    first.close(1)
    second = recorder(tmp_path, 2)
    second.samples(families(30, 7), NOW + 30)
    second.samples(families(10, 7), NOW + 45)
    second.close(1)

    data = read(tmp_path)
    assert data.counters["quiesce_tokens_generated_total"][""].total == 150 + 30 + 10
    assert data.latest["quiesce_groups"] == {"ledger": 7}
    assert data.starts == [1, 2]


def test_what_a_removed_file_had_counted_is_not_growth_now(tmp_path: Path) -> None:
    """If the first file of a process is gone, its first known value is where counting begins."""
    sink = recorder(tmp_path)
    sink.samples(families(100, 5), NOW)
    sink._streams["samples"].close()  # noqa: SLF001 - as if it were full
    sink.samples(families(160, 5), NOW + 15)
    sink.samples(families(170, 5), NOW + 30)
    sink.close(1)
    min((tmp_path / "telemetry").glob("samples-*")).unlink()
    assert read(tmp_path).counters["quiesce_tokens_generated_total"][""].total == 10


def test_a_save_is_put_together_from_its_spans_and_its_line_of_the_log(tmp_path: Path) -> None:
    """Phases from spans, which are exact; step, size and outcome from wherever they are told."""
    sink = recorder(tmp_path)
    sink.spans(
        [
            span("quiesce.checkpoint.drain", "a", 0.1, 0.5),
            span("quiesce.checkpoint.exclusive", "a", 0.6, 0.001),
            span("quiesce.window", "a", 0.1, 0.501, **{"quiesce.outcome": "completed"}),
            span("quiesce.checkpoint", "a", 0, 1, **{"quiesce.outcome": "completed", "quiesce.step": 7}),
            span("quiesce.checkpoint.drain", "cut", 2, 3)._replace(cut_off=True),
            span("quiesce.checkpoint", "cut", 2, 3)._replace(cut_off=True),
        ]
    )
    sink.events(
        [
            event(
                "checkpoint.published",
                1,
                cut_id="a",
                rows=64,
                bytes=10,
                groups={"buffer": 3},
                phases={"drain": 9},
            ),
            event(
                "checkpoint.not_published",
                5,
                cut_id="b",
                outcome="failed",
                reason="disk",
                phases={"drain": 0.25},
            ),
        ]
    )
    sink.close(1)

    saves = {save.cut_id: save for save in read(tmp_path).saves}
    assert saves["a"].phases == {"drain": pytest.approx(0.5), "exclusive": pytest.approx(0.001)}
    assert (saves["a"].outcome, saves["a"].step, saves["a"].rows, saves["a"].groups) == (
        "completed",
        7,
        64,
        3,
    )
    assert (saves["b"].outcome, saves["b"].reason, saves["b"].phases) == ("failed", "disk", {"drain": 0.25})
    assert saves["cut"].cut_off
    assert saves["cut"].phases == {}


def test_windows_of_a_program_without_checkpoints_are_shown_too(tmp_path: Path) -> None:
    """A barrier on its own has windows, and no attempts to save."""
    sink = recorder(tmp_path)
    sink.spans(
        [
            span("quiesce.checkpoint.drain", "w", 0, 0.5),
            span("quiesce.window", "w", 0, 0.5, **{"quiesce.outcome": "completed"}),
        ]
    )
    sink.close(1)
    (save,) = read(tmp_path).saves
    assert save.outcome == "completed"
    assert save.phases == {"drain": pytest.approx(0.5)}


def test_the_slots_that_waited_longest_name_the_window(tmp_path: Path) -> None:
    """A few, the longest first, with the cut that the linked window was of."""
    sink = recorder(tmp_path)
    window = span("quiesce.window", "w", 0, 0.5)._replace(trace_id=8, span_id=9)
    slots = [
        span("quiesce.slot", "", 0, wait, **{"quiesce.kind": "admission", "quiesce.wait_seconds": wait})
        for wait in (0.1, 0.3, 0.2, *([0.01] * 50))
    ]
    sink.spans([slots[0]._replace(links=((8, 9),)), *slots[1:], window])
    sink.close(1)

    slow = read(tmp_path).slow
    assert [slot.wait_seconds for slot in slow[:4]] == [0.3, 0.2, 0.1, 0.01]
    assert slow[2].cut_id == "w"
    assert len(slow) == attempts.MOST_ROWS


def test_restores_and_complaints_are_kept(tmp_path: Path) -> None:
    """Restores by part; of warnings and errors the last ones, and how many there were."""
    sink = recorder(tmp_path, 2)
    sink.events([event("restore.completed", 0, parts={"rows": 2.5}, groups={"buffer": 3})])
    sink.events([event("log.record", at, message=f"m{at}") | {"level": "warning"} for at in range(1, 31)])
    sink.close(1)

    data = read(tmp_path)
    assert [(restore.incarnation, dict(restore.parts)) for restore in data.restores] == [(2, {"rows": 2.5})]
    assert [note.text for note in data.notes] == [f"m{at}" for at in range(19, 31)]
    assert data.loud == {"warning": 30}


def test_saves_without_number_take_bounded_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Past the limit every second one is left out, which is said."""
    monkeypatch.setattr(attempts, "MOST_SAVES", 100)
    sink = recorder(tmp_path)
    sink.spans([span("quiesce.checkpoint.drain", f"c{number}", number, 0.5) for number in range(1000)])
    sink.close(1)

    data = read(tmp_path)
    whens = [save.unix_time - NOW for save in data.saves]
    assert 25 <= len(whens) <= 100
    assert 25 * len([when for when in whens if when < 500]) >= 5 * len(whens)  # old ones as well as new ones
    assert any(f"one in {data.thinned}" in remark for remark in data.remarks)


def test_another_role_is_not_mixed_in(tmp_path: Path) -> None:
    """A worker's numbers are about itself; that it recorded is said."""
    worker = recorder(tmp_path, role="rollout")
    worker.samples(families(1_000, 50), NOW)
    worker.close(1)
    controller = recorder(tmp_path)
    controller.samples(families(10, 5), NOW + 1)
    controller.close(1)

    data = read(tmp_path)
    assert data.counters["quiesce_tokens_generated_total"][""].total == 10
    assert any("rollout recorded too" in remark for remark in data.remarks)


def test_a_step_that_tells_its_numbers_is_shown_exactly(tmp_path: Path) -> None:
    """By its span, or by its line of the log; a run that is sampled every 15 seconds has more steps than samples."""
    sink = recorder(tmp_path)
    told = {"quiesce.step": 1, "quiesce.reward": 0.5}
    sink.spans([span("quiesce.train.step", "", 100, 1, **told)])
    sink.events([event("train.step", 104, metrics={"reward": 0.75, "loss": 0.25})])
    sink.close(1)

    data = read(tmp_path)
    values = data.timeline.filled(data.gauges["quiesce_train_reward"][""])
    assert [value for value in dict.fromkeys(values) if value is not None] == [0.5, 0.75]
    assert data.latest["quiesce_train_reward"][""] == 0.75
    assert data.latest["quiesce_train_loss"][""] == 0.25
