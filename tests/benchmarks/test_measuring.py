"""What the benchmarks are made of: spreads, the watched file system, the three modes, plots and the page."""

import gc
import io
import os
import time
from datetime import UTC, datetime
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from quiesce.bench import BenchReport, Table
from quiesce.bench.filesystem import WatchedFileSystem
from quiesce.bench.modes import Saves
from quiesce.bench.page import PAGE, PLOT, update_page
from quiesce.bench.plot import Panel, draw
from quiesce.bench.report import shown
from quiesce.bench.stats import Spread, quiet_collector, ratios
from quiesce.bench.world import Size, World
from quiesce.checkpoint import files
from quiesce.errors import ConfigError


def _report(
    bench: str = "slots",
    *,
    value: float = 0.3,
    at_least: bool = False,
    exactly: bool = False,
    quick: bool = False,
) -> BenchReport:
    """Return a report with one bar, whose target is 0.22."""
    return BenchReport(
        bench=bench,
        quick=quick,
        machine={
            "processor": "a processor",
            "processors": 2,
            "memory_bytes": 1 << 30,
            "system": "a system",
            "file_system": "ext4",
            "python": "CPython",
            "libraries": {"lmdb": "1.6", "torch": None},
            "load_average": 0.5,
            "load_average_after": 0.7,
        },
        results=[{"operation": "slot"}],
        bars={"a_bar": value},
        spreads={"a_bar": Spread(value, value / 2, value * 2, 9)},
        targets={"a_bar": 0.22},
        at_least=frozenset({"a_bar"} if at_least else ()),
        exactly=frozenset({"a_bar"} if exactly else ()),
        tables=(Table("A table", ("what", "how much"), (("slot", "1"),)),),
    )


def test_a_spread_is_the_median_with_its_quartiles() -> None:
    """Of known numbers, in another unit; one number is its own spread."""
    assert Spread.of([5.0, 1.0, 3.0, 2.0, 4.0], 10) == Spread(30, 20, 40, 5)
    assert Spread.of([7.0]) == Spread(7, 7, 7, 1)
    with pytest.raises(ValueError, match="nothing was measured"):
        Spread.of([])


def test_ratios_are_taken_within_rounds() -> None:
    """A round that is slow on both sides moves nothing."""
    assert ratios([2.0, 200.0, 2.0], [1.0, 100.0, 1.0]).median == 2
    with pytest.raises(ValueError, match="zip"):
        ratios([1.0], [1.0, 2.0])


def test_the_collector_is_quiet_meanwhile_and_as_before_afterwards() -> None:
    """Whatever happens inside."""
    assert gc.isenabled()

    def fail() -> None:
        with quiet_collector():
            assert not gc.isenabled()
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_operations_below_the_root_are_counted_and_others_are_not(tmp_path: Path) -> None:
    """By path, by descriptor and below an open folder; and everything is as before afterwards."""
    root, beside = tmp_path / "root", tmp_path / "beside"
    root.mkdir()
    before = (os.open, os.write, os.fsync, os.close, io.open)
    where = ["first"]
    disk = WatchedFileSystem(root, where=lambda: where[0])

    with disk.installed():
        files.write_durable(root / "file", b"content")
        beside.write_bytes(b"content")
        where[0] = "second"
        (root / "folder").mkdir()
        folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
        inner = os.open("inner", os.O_WRONLY | os.O_CREAT, dir_fd=folder)
        os.close(inner)
        os.close(folder)
        (root / "file").rename(root / "other")
        assert (root / "other").read_bytes() == b"content"

    assert (os.open, os.write, os.fsync, os.close, io.open) == before
    assert dict(disk.operations) == {
        ("first", "open"): 1,
        ("first", "write"): 1,
        ("first", "fsync"): 1,
        ("second", "mkdir"): 1,
        ("second", "open"): 3,
        ("second", "rename"): 1,
    }
    assert disk.count("first") == 3


def test_each_operation_is_delayed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the latency, in the thread that asked for it."""
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)

    with WatchedFileSystem(tmp_path, 0.05).installed():
        files.write_durable(tmp_path / "file", b"content")

    assert slept == [0.05] * 3


@pytest.mark.parametrize("mode", ["ours", "inside", "recovery_off"])
async def test_a_save_is_seen_whole(mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every operation that the checkpoint announces passes the watched file system; the writer goes on beside it."""
    world = World(tmp_path / "world", Size(groups=20, rows_per_group=2, row_bytes=100))
    announced: list[str] = []
    monkeypatch.setattr(files, "before", lambda operation, _path: announced.append(operation))
    try:
        await world.fill()
        assert len(world.buffer) == 20
        assert world.plane.statistics().rows == 40
        async with Saves(world) as saves:
            announced.clear()
            sample = await saves.measure(mode)
            expected = len(announced)
            assert len(list(world.run.checkpoints.iterdir())) == 1
            assert (await saves.window()) > 0
    finally:
        world.close()

    assert sum(sample.operations.values()) >= expected >= 4
    assert (sample.operations["window"] > 0) == (mode == "inside")
    assert len(world.buffer) == 20


def test_a_bar_is_missed_on_the_wrong_side_of_its_target() -> None:
    """At most, at least, or anywhere but on it; quick runs miss nothing."""
    assert _report(value=0.3).missed == ("a_bar",)
    assert _report(value=0.2).missed == ()
    assert _report(value=0.2, at_least=True).missed == ("a_bar",)
    assert _report(value=0.22, exactly=True).missed == ()
    for beside in (0.21, 0.23):
        assert _report(value=beside, exactly=True).missed == ("a_bar",)
    assert _report(exactly=True).bars_table().rows[0][4] == "= 0.22"
    assert _report(value=0.3).to_json()["missed"] == ["a_bar"]
    assert _report(value=0.3, quick=True).to_json()["missed"] == []


@pytest.mark.parametrize(
    "value,text", [(0.0, "0"), (0.000123, "0.000123"), (12345.6, "12,300"), (1.5, "1.5")]
)
def test_numbers_for_people_have_three_digits(value: float, text: str) -> None:
    """Whatever their size."""
    assert shown(value) == text


def test_a_plot_has_every_point_and_the_same_bytes_each_time() -> None:
    """It is well-formed, and refuses what a logarithmic axis cannot show."""
    panels = [
        Panel(title, "x", "y <ms>", {"a": [(1, 1), (10, 100)], "b": [(1, 2), (10, 3)]}, {1: "one", 10: "ten"})
        for title in ("first", "second")
    ]

    svg = draw(panels)

    assert svg == draw(panels)
    root = ET.fromstring(svg)  # noqa: S314 - our own text
    assert len(root.findall(".//{http://www.w3.org/2000/svg}circle")) == 8
    with pytest.raises(ValueError, match="positive"):
        draw([Panel("", "", "", {"a": [(1, 0)]}, {1: ""})])


def test_the_page_keeps_its_words_and_gets_the_numbers(tmp_path: Path) -> None:
    """Only what is between the benchmark's own markers changes, and a second run replaces the first."""
    page = tmp_path / PAGE
    page.write_text("Before.\n<!-- bench:slots -->\nold\n<!-- /bench:slots -->\nAfter.\n", encoding="utf-8")

    for value in (0.5, 0.125):
        written = update_page(_report(value=value), tmp_path, today=datetime(2026, 12, 1, tzinfo=UTC))

    text = page.read_text(encoding="utf-8")
    assert written == [page]
    assert text.startswith("Before.\n")
    assert text.endswith("After.\n")
    assert "old" not in text
    assert "0.125" in text
    assert "| 0.5 |" not in text
    assert "2026-12-01" in text
    assert not (tmp_path / PLOT).exists()


@pytest.mark.parametrize("text", [None, "no markers", "<!-- bench:slots --><!-- /bench:slots -->" * 2])
def test_a_page_without_its_markers_is_refused(text: str | None, tmp_path: Path) -> None:
    """Nothing is written next to it."""
    if text is not None:
        (tmp_path / PAGE).write_text(text, encoding="utf-8")

    with pytest.raises(ConfigError, match=PAGE):
        update_page(_report(), tmp_path)
