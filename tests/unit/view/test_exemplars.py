"""Exemplars out of recorded spans."""

from pathlib import Path
from typing import Any

from quiesce.view.exemplars import ExemplarIndex, Selector, selectors
from quiesce.view.folders import Folders, ShownRun
from tests.unit.view.rig import span, write_recording

NOON = 1_800_000_000.0


def recorded(folder: Path) -> list[ShownRun]:
    """Return a run with slots, a phase and a step."""
    write_recording(
        folder / "mine",
        spans=[
            span("quiesce.slot", NOON, 0.5, trace="1" * 32, kind="admission", wait_seconds=0.2),
            span("quiesce.slot", NOON + 0.01, 0.1, trace="2" * 32, kind="admission"),
            span("quiesce.slot", NOON + 50, 0.1, trace="3" * 32, kind="retry"),
            span("quiesce.checkpoint.drain", NOON, 2.0, trace="4" * 32, outcome="completed"),
            span("quiesce.checkpoint.part", NOON, 2.0, trace="5" * 32, outcome="completed"),
            span("quiesce.train.step", NOON, 3.0, trace="6" * 32),
        ],
    )
    return [Folders(folder).add(folder / "mine")]


def found_in(
    runs: list[ShownRun], query: str, begin: float, end: float, **about: float
) -> list[dict[str, Any]]:
    """Read recordings, and look for exemplars."""
    index = ExemplarIndex()
    index.read(runs, about.get("until", NOON + 3600))
    return index.find(query, begin, end)


def traces(runs: list[ShownRun], query: str, begin: float = NOON - 60, end: float = NOON + 60) -> list[str]:
    """Return the first digit of each trace that is found."""
    found = found_in(runs, query, begin, end)
    return sorted(one["labels"]["trace_id"][0] for series in found for one in series["exemplars"])


def test_selectors_are_read_out_of_a_query() -> None:
    """Functions, ranges and other metrics do not matter; matchers do."""
    query = (
        'histogram_quantile(0.9, sum by (le) (rate(quiesce_mutation_hold_seconds_bucket{kind=~"a|b", run="r{}"}[5m])))'
        " / quiesce_groups"
    )

    assert selectors(query) == [
        Selector("quiesce_mutation_hold_seconds", (("kind", "=~", "a|b"), ("run", "=", "r{}")))
    ]


def test_an_exemplar_has_the_series_and_the_bucket_that_counted_it(tmp_path: Path) -> None:
    """The answer is as Prometheus' own: labels of the series, of the exemplar, value, time."""
    found = found_in(recorded(tmp_path), "rate(quiesce_checkpoint_phase_seconds_bucket[5m])", NOON, NOON + 60)

    assert found == [
        {
            "seriesLabels": {
                "__name__": "quiesce_checkpoint_phase_seconds_bucket",
                "instance": "mine",
                "job": "quiesce",
                "outcome": "completed",
                "phase": "drain",
                "role": "controller",
                "run": "mine",
                "le": "2.5",
            },
            "exemplars": [
                {
                    "labels": {"trace_id": "4" * 32, "span_id": "b" * 16},
                    "value": "2.0",
                    "timestamp": NOON + 2.0,
                }
            ],
        }
    ]


def test_a_slot_is_an_exemplar_of_what_it_waited_and_of_what_it_held(tmp_path: Path) -> None:
    """A slot's span lasts for both; each histogram counts its own."""
    runs = recorded(tmp_path)

    (waited,) = found_in(runs, "quiesce_mutation_wait_seconds_bucket", NOON, NOON + 60)
    held = found_in(runs, 'quiesce_mutation_hold_seconds_bucket{kind="admission"}', NOON, NOON + 60)

    assert waited["exemplars"][0]["value"] == "0.2"
    assert {round(float(one["value"]), 6) for series in held for one in series["exemplars"]} == {0.3, 0.1}


def test_matchers_and_the_time_range_choose(tmp_path: Path) -> None:
    """Equal, unequal, by pattern; what ended outside the range is not there."""
    runs, name = recorded(tmp_path), "quiesce_mutation_hold_seconds_bucket"

    assert traces(runs, name) == ["1", "2", "3"]
    assert traces(runs, f'{name}{{kind="retry"}}') == ["3"]
    assert traces(runs, f'{name}{{kind!~"ret.*"}}') == ["1", "2"]
    assert traces(runs, f'{name}{{run="other"}}') == []
    assert traces(runs, f'{name}{{kind=~"("}}') == []
    assert traces(runs, name, end=NOON + 10) == ["1", "2"]
    assert traces(runs, "quiesce_train_step_seconds_bucket") == ["6"]
    assert traces(runs, "quiesce_reply_seconds_bucket") == []


def test_what_prometheus_has_itself_is_left_out(tmp_path: Path) -> None:
    """From the time on at which the view began, its exemplars are Prometheus' own."""
    (series,) = found_in(
        recorded(tmp_path), "quiesce_mutation_hold_seconds_bucket", NOON, NOON + 60, until=NOON + 0.2
    )

    assert [one["labels"]["trace_id"][0] for one in series["exemplars"]] == ["2"]


def test_of_many_in_one_place_the_longest_is_kept(tmp_path: Path) -> None:
    """A wide range is answered with few: those that somebody would click on."""
    write_recording(
        tmp_path / "mine",
        spans=[
            span(
                "quiesce.slot",
                NOON + index / 1000,
                0.06 + (index == 70) / 100,
                trace=f"{index:032x}",
                kind="retry",
            )
            for index in range(100)
        ],
    )
    runs = [Folders(tmp_path).add(tmp_path / "mine")]

    (series,) = found_in(runs, "quiesce_mutation_hold_seconds_bucket", NOON - 5000, NOON + 5000)

    assert [one["labels"]["trace_id"] for one in series["exemplars"]] == [f"{70:032x}"]
