"""Quick runs of every benchmark: the shape of what they print, and what each mode really does inside the window."""

import json
import math
from typing import Any

import pytest

from quiesce.bench import BenchReport, run_reply, run_restore, run_slots, run_window
from quiesce.bench.modes import MODES
from quiesce.cli.main import main

BARS = {
    "slots": {
        "slot_bare_vs_upstream_shape",
        "drain_cost_10k_vs_1k",
        "slot_on_vs_bare",
        "slot_on_vs_upstream_shape",
        "slot_obvious_vs_on",
        "open_loop_10k_cpu_us_per_slot",
        "open_loop_10k_extra_lag_p99_ms",
        "open_loop_10k_accounted_ratio",
    },
    "window": {
        "window_exclusive_ms_at_10k_groups",
        "window_ns_per_group",
        "window_exclusive_1gib_vs_16mib",
        "window_inside_vs_ours_at_1gib",
        "window_inside_vs_ours_at_50ms",
        "durable_ours_vs_inside_at_1gib",
        "write_vs_sequential",
    },
    "restore": {"restore_cost_per_group_10x"},
    "reply": {
        "reply_p50_inline_vs_ours",
        "reply_p50_ours_minus_own_fence_us",
        "drain_extra_clears",
        "clears_for_2048_keys",
        "keys_lost",
        "keys_cleared_twice",
        "calls_in_window",
    },
}
"""The bars of each benchmark."""

DIFFERENCES = {
    "window_ns_per_group",
    "reply_p50_ours_minus_own_fence_us",
    "drain_extra_clears",
    "open_loop_10k_extra_lag_p99_ms",
}
"""The bars that noise may bring below zero."""

COUNTS = {"keys_lost", "keys_cleared_twice", "calls_in_window"}
"""The bars that are zero."""


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> BenchReport:
    """Return one quick run of the window's benchmark; nothing of it is left in its folder."""
    folder = tmp_path_factory.mktemp("window")
    report = run_window(quick=True, folder=folder)
    assert list(folder.iterdir()) == []
    return report


def _check_shape(report: BenchReport) -> dict[str, Any]:
    """Assert what every report promises; return it as a program reads it."""
    read: dict[str, Any] = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert set(read["bars"]) == set(read["targets"]) == BARS[report.bench]
    assert all(type(value) in {int, float} and math.isfinite(value) for value in read["bars"].values())
    assert all(value > 0 for name, value in read["bars"].items() if name not in DIFFERENCES | COUNTS)
    assert all(read["bars"][name] == 0 for name in COUNTS & BARS[report.bench])
    assert read["results"]
    assert read["machine"]["processors"] >= 1
    assert read["quick"] is True
    assert read["missed"] == []
    for spread in read["spreads"].values():
        assert spread["low"] <= spread["median"] <= spread["high"]
        assert spread["rounds"] >= 1
    return read


def test_slots_reports_both_barriers_and_its_bars() -> None:
    """A slot and a drain are measured of both shapes, as often."""
    read = _check_shape(run_slots(quick=True))

    found = [result for result in read["results"] if "barrier" in result]
    measured = {(result["operation"], result["barrier"], result["count"]) for result in found}
    assert {barrier for _, barrier, _ in measured} == {"quiesce", "upstream_shape"}
    assert len(measured) == len(found) == 6
    assert len({result["cpu_ns"]["rounds"] for result in found if result["operation"] == "slot"}) == 1


def test_window_reports_every_mode_at_every_size_and_latency(window: BenchReport) -> None:
    """Each sweep has all three modes, with what each costs inside and outside the window."""
    read = _check_shape(window)

    for sweep, points in (("groups", 4), ("bytes", 2), ("latency", 2)):
        found = [result for result in read["results"] if result["sweep"] == sweep]
        assert len(found) == points * len(MODES)
        assert {result["mode"] for result in found} == set(MODES)
    for result in read["results"]:
        for seconds in ("exclusive_s", "trainer_stall_s", "time_to_durable_s"):
            assert result[seconds]["median"] > 0
        assert result["exclusive_s"]["median"] <= result["time_to_durable_s"]["median"]
        assert result["trainer_stall_s"]["median"] <= result["time_to_durable_s"]["median"]


def test_the_modes_differ_in_what_they_do_inside_the_window(window: BenchReport) -> None:
    """Only one mode touches the file system inside; what it does there, ours does outside."""
    by_point: dict[tuple[Any, ...], dict[str, dict[str, int]]] = {}
    for result in window.results:
        point = tuple(result[name] for name in ("sweep", "groups", "row_bytes", "latency_s"))
        by_point.setdefault(point, {})[result["mode"]] = result["operations"]

    for operations in by_point.values():
        assert operations["recovery_off"]["window"] == 0
        assert operations["ours"]["window"] == 0
        assert operations["inside"]["window"] > operations["recovery_off"]["outside"]
        assert operations["ours"]["outside"] >= operations["inside"]["window"]


def test_the_modes_that_cut_everything_write_the_same_checkpoint(window: BenchReport) -> None:
    """Inside and ours make checkpoints of as many bytes, but for what the writer moved meanwhile."""
    sizes: dict[tuple[Any, ...], dict[str, int]] = {}
    for result in window.results:
        point = tuple(result[name] for name in ("sweep", "groups", "row_bytes", "latency_s"))
        sizes.setdefault(point, {})[result["mode"]] = result["checkpoint_bytes"]

    for size in sizes.values():
        assert size["ours"] == pytest.approx(size["inside"], rel=0.05, abs=4096)
        assert size["recovery_off"] < size["ours"]


def test_restore_reports_its_parts(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A resume is measured whole and by part, and leaves nothing behind."""
    folder = tmp_path_factory.mktemp("restore")

    read = _check_shape(run_restore(quick=True, folder=folder))

    assert list(folder.iterdir()) == []
    for result in read["results"]:
        parts = sum(spread["median"] for spread in result["parts_s"].values())
        assert parts > 0
        assert set(result["parts_s"]) == {"verify", "rows", "documents"}
        assert result["us_per_group"] > 0


def test_reply_reports_its_bars_and_answers_in_two_lines() -> None:
    """What has to be met exactly says so."""
    read = _check_shape(run_reply(quick=True))

    assert read["targets"]["clears_for_2048_keys"] == {"exactly": 32}
    assert read["targets"]["reply_p50_inline_vs_ours"] == {"at_least": 5}
    assert read["targets"]["drain_extra_clears"] == {"at_most": 1}
    assert len(read["answer"]) == 2


def test_the_command_prints_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    """`--json` prints an object and nothing else; a quick run misses no bar."""
    assert main(["bench", "slots", "--quick", "--json", "--check"]) == 0

    printed = json.loads(capsys.readouterr().out)
    assert set(printed["bars"]) == BARS["slots"]


def test_the_command_prints_tables(capsys: pytest.CaptureFixture[str]) -> None:
    """Without `--json` people get the bars as a table, and are told what a quick run is worth."""
    assert main(["bench", "slots", "--quick"]) == 0

    printed = capsys.readouterr().out
    assert "upstream_shape" in printed
    assert "the bars say nothing about cost" in printed


def test_a_folder_that_is_not_there_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """A wrong folder is a usage error that names it."""
    assert main(["bench", "window", "--quick", "--dir", "/nowhere/at/all"]) == 2

    assert "/nowhere/at/all is not a folder" in capsys.readouterr().err
