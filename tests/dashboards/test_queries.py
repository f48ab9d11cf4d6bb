"""What expressions count, judged by a real Prometheus' engine over series that are made for it."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from quiesce.telemetry import names
from quiesce_dashboards.queries import came, newest, series

PROMTOOL: Final = Path(__file__).parents[2] / ".tools" / "bin" / "promtool"
ATTEMPTS: Final = series(names.CHECKPOINT_ATTEMPTS, outcome="completed")
INFO: Final = series(names.RUN_INFO)
STEP: Final = "20s"


def holds(folder: Path, scrape: str, given: dict[str, str], wanted: list[tuple[str, str, list[Any]]]) -> str:
    """Return what promtool complains about; "" if the expressions are what is wanted.

    Args:
        folder: Where the file is written.
        scrape: How far apart samples are.
        given: Samples by series, in promtool's notation.
        wanted: Expression, time, and the values by labels.
    """
    document = {
        "evaluation_interval": "1s",
        "tests": [
            {
                "interval": scrape,
                "input_series": [{"series": name, "values": values} for name, values in given.items()],
                "promql_expr_test": [
                    {
                        "expr": expression,
                        "eval_time": at,
                        "exp_samples": [{"labels": labels, "value": value} for labels, value in samples],
                    }
                    for expression, at, samples in wanted
                ],
            }
        ],
    }
    path = folder / "test.yml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    finished = subprocess.run(
        [PROMTOOL, "test", "rules", path], capture_output=True, text=True, check=False, timeout=50
    )
    return "" if finished.returncode == 0 else finished.stdout + finished.stderr


def counted(values: list[float], start: int = 20) -> list[tuple[str, str, list[Any]]]:
    """Return what is wanted of the points of a query, the first one at so many seconds."""
    expression = came(ATTEMPTS, ["outcome"]).replace("$__interval", STEP)
    return [
        (expression, f"{start + 20 * at}s", [('{outcome="completed"}', value)])
        for at, value in enumerate(values)
    ]


@pytest.mark.parametrize(
    "scrape, values, points",
    [
        # A save at 22 s, which a window of four scrapes would show in two points; two more at 41 s and 59 s.
        ("1s", "0x21 1x18 2x17 3x60", [0, 1, 2, 0]),
        # Scraped seldom: a step holds one sample or none, and the save between 15 s and 30 s is in the step that tells it.
        ("15s", "0 0 1 1 1 2 2", [0, 1, 0, 1]),
        ("60s", "0 2 2 2", [0, 0, 2, 0]),
    ],
)
def test_an_event_is_in_one_point(scrape: str, values: str, points: list[float], tmp_path: Path) -> None:
    """And counts as one, whatever the scrape interval is."""
    name = f'{names.CHECKPOINT_ATTEMPTS.name}{{outcome="completed",run="r"}}'

    assert holds(tmp_path, scrape, {name: values}, counted(points)) == ""


@pytest.mark.parametrize("before", [7, 1])
def test_a_process_that_began_anew_loses_no_event(before: int, tmp_path: Path) -> None:
    """Its counter goes from 0 to four: less than the one before had, or more, of which a difference is a part."""
    name = f'{names.CHECKPOINT_ATTEMPTS.name}{{outcome="completed",run="r"}}'

    assert holds(tmp_path, "1s", {name: f"{before}x30 0 4x30"}, counted([0, 4, 0])) == ""


def test_an_event_is_counted_by_each_label_that_is_asked_for(tmp_path: Path) -> None:
    """Of several processes, and only what grew."""
    given = {
        f'{names.CHECKPOINT_ATTEMPTS.name}{{outcome="completed",instance="{instance}"}}': values
        for instance, values in (("a", "0x25 1x20"), ("b", "5x25 7x20"))
    }

    assert holds(tmp_path, "1s", given, counted([0, 3])) == ""


def test_what_a_run_is_made_of_is_told_once(tmp_path: Path) -> None:
    """The series of before stays for minutes where nothing marks it as gone; the newest alone is shown."""
    name = names.RUN_INFO.name
    before = f'{name}{{job="q",instance="i",role="controller",sampler=""}}'
    after = f'{name}{{job="q",instance="i",role="controller",sampler="windowed"}}'
    other = f'{name}{{job="q",instance="j",role="worker",sampler=""}}'
    given = {before: "1x5", after: "_x6 1x30", other: "1x37"}
    both = f"count({INFO})"
    shown = newest(INFO, ["job", "instance", "role"])

    assert holds(tmp_path, "2s", given, [(both, "40s", [("{}", 3)])]) == "", (
        "nothing marks the old one as gone"
    )
    assert holds(tmp_path, "2s", given, [(shown, "40s", [(after, 1), (other, 1)])]) == ""
    assert holds(tmp_path, "2s", given, [(shown, "8s", [(before, 1), (other, 1)])]) == ""
