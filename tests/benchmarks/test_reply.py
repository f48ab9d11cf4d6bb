"""The benchmark of replies: its account of keys finds what is broken, its load is the same for all, its report whole."""

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree as ET

import pytest

from quiesce.bench import BenchReport, run_reply
from quiesce.bench.page import REPLY_PAGE, REPLY_PLOT, update_page
from quiesce.bench.reply_lines import code_lines, methods_behind
from quiesce.bench.reply_load import Load, drive, drive_at_once
from quiesce.bench.reply_modes import COMPARED, MODES, Limits, Mode, lines_of
from quiesce.bench.reply_plane import ReplyPlane
from quiesce.snapshot_gate import Epoch, SnapshotGate
from quiesce.types import RowKey

LOAD = Load(calls_at_once=8, generation_seconds=0.02, seconds=0.1, checkpoints=(0.03, 0.06, 0.09))
"""About forty calls, and three checkpoints."""


@pytest.fixture(scope="module")
def report() -> BenchReport:
    """Return one quick run."""
    return run_reply(quick=True)


def of_mode(name: str) -> Callable[[ReplyPlane], Mode]:
    """Return what makes a mode."""
    return lambda plane: MODES[name](plane, Limits())


class Broken:
    """Clears in the call; what it does wrong is what a test gives it.

    Args:
        plane: The data plane.
        clear: Is given the data plane, the call's number and its keys, inside of the permit.
        fenced: Whether a checkpoint closes the gate.
    """

    def __init__(
        self,
        plane: ReplyPlane,
        clear: Callable[[ReplyPlane, int, RowKey, Sequence[RowKey]], None],
        *,
        fenced: bool = True,
    ) -> None:
        self.plane = plane
        self.clear = clear
        self.fenced = fenced
        self.gate = SnapshotGate("0")
        self.calls = 0
        self.lock = threading.Lock()

    def finish(self, final: RowKey, obsolete: Sequence[RowKey]) -> None:
        """Put, and clear wrongly."""
        with self.lock:
            self.calls += 1
            number = self.calls
        with self.gate.permit():
            self.plane.put(final, obsolete)
            self.clear(self.plane, number, final, obsolete)

    def fence(self, epoch: Epoch) -> None:
        """Close the gate, if that is what it does."""
        if self.fenced:
            self.gate.close_and_wait(epoch)

    def reopen(self, epoch: Epoch) -> None:
        """Reopen it."""
        self.gate.reopen(epoch)

    def settle(self) -> None:
        """Nothing is left."""


def right(plane: ReplyPlane, _number: int, _final: RowKey, obsolete: Sequence[RowKey]) -> None:
    """Clear as one should."""
    plane.clear(obsolete)


def loses(plane: ReplyPlane, number: int, _final: RowKey, obsolete: Sequence[RowKey]) -> None:
    """Forget one key of the third call."""
    plane.clear(obsolete[:1] if number == 3 else obsolete)


def doubles(plane: ReplyPlane, number: int, _final: RowKey, obsolete: Sequence[RowKey]) -> None:
    """Clear the third call's keys again."""
    plane.clear(obsolete)
    if number == 3:
        plane.clear(obsolete)


def takes_the_final_row(plane: ReplyPlane, number: int, final: RowKey, obsolete: Sequence[RowKey]) -> None:
    """Clear the third call's final row as well."""
    plane.clear([*obsolete, final] if number == 3 else obsolete)


@pytest.mark.parametrize(
    "clear,lost,twice", [(right, 0, 0), (loses, 1, 0), (doubles, 0, 2), (takes_the_final_row, 1, 0)]
)
def test_the_account_finds_a_key_that_is_lost_cleared_twice_or_still_needed(
    clear: Callable[[ReplyPlane, int, RowKey, Sequence[RowKey]], None], lost: int, twice: int
) -> None:
    """One of them, among many calls."""
    account = drive_at_once(lambda plane: Broken(plane, clear), ReplyPlane(0, 0), 64, 8)

    assert account.obsolete == 128
    assert (account.lost, account.twice) == (lost, twice)


def test_the_account_finds_writes_while_a_checkpoint_keeps_everybody_out() -> None:
    """With a fence that fences nobody; with the gate there are none."""

    def in_window(*, fenced: bool) -> int:
        outcome = drive(
            lambda plane: Broken(plane, right, fenced=fenced),
            ReplyPlane(0.002, 0.002),
            Load(16, 0.004, 0.1, LOAD.checkpoints),
        )
        assert len(outcome.fences) == 3
        return outcome.account.in_window

    assert in_window(fenced=False) > 0
    assert in_window(fenced=True) == 0


def test_a_broken_cleanup_misses_its_bar() -> None:
    """Whatever else it is good at."""

    def broken(plane: ReplyPlane, _limits: Limits) -> Mode:
        return Broken(plane, loses)

    report = run_reply(quick=True, modes={**MODES, "gate_permit": broken})

    assert report.bars["keys_lost"] > 0
    assert "keys_lost" in report.missed


@pytest.mark.parametrize("mode", COMPARED)
def test_every_mode_clears_every_key_once_beside_checkpoints(mode: str) -> None:
    """And writes nothing while one keeps it out."""
    outcome = drive(of_mode(mode), ReplyPlane(0.0002, 0.002), LOAD)

    account = outcome.account
    assert account.obsolete == 2 * len(outcome.replies) > 40
    assert (account.cleared, account.lost, account.twice, account.in_window) == (account.obsolete, 0, 0, 0)
    assert 0 < account.peak_backlog <= account.obsolete
    assert len(outcome.fences) == 3
    for fence in outcome.fences:
        assert 0 < fence.drain_seconds < fence.closed_seconds
        assert (fence.clears > 0) == (fence.clear_seconds > 0)


def test_a_checkpoint_is_told_the_clears_that_it_waited_for() -> None:
    """A clear that is longer than everything else is running when the gate closes, and ends before the window opens."""
    outcome = drive(of_mode("gate_permit"), ReplyPlane(0.0, 0.5), Load(8, 0.04, 0.4, checkpoints=(0.4,)))

    (fence,) = outcome.fences
    assert fence.clears == 1
    assert fence.clear_seconds >= 0.5


def test_cleanup_that_is_off_clears_nothing() -> None:
    """It is what a checkpoint waits for without any."""
    outcome = drive(of_mode("off"), ReplyPlane(0.0002, 0.002), LOAD)

    assert outcome.account.clears == 0
    assert outcome.account.lost == outcome.account.obsolete == 2 * len(outcome.replies)


def test_only_inline_lets_the_reply_wait_for_the_clear() -> None:
    """Its fastest reply takes a clear; the fastest of the others takes none."""
    fastest = {mode: min(drive(of_mode(mode), ReplyPlane(0.0, 0.05), LOAD).replies) for mode in COMPARED}

    assert fastest["inline"] >= 0.05
    assert fastest["own_fence"] < 0.05
    assert fastest["gate_permit"] < 0.05


def test_the_load_is_the_same_whatever_the_mode() -> None:
    """As many calls end, however slow the mode is: it cannot make its own load lighter."""
    calls = {mode: len(drive(of_mode(mode), ReplyPlane(0.0, 0.01), LOAD).replies) for mode in MODES}

    assert len(set(calls.values())) == 1


def test_a_call_that_is_held_up_counts_from_when_its_generation_ended() -> None:
    """A clear that is longer than a generation makes every reply later than the one before."""
    outcome = drive(of_mode("inline"), ReplyPlane(0.0, 0.02), Load(1, 0.005, 0.05))

    waited = outcome.replies
    assert len(waited) >= 5
    assert waited[-1] - waited[0] > 0.06  # each clear is 20 ms, each generation 5 ms


def test_what_a_call_raises_is_raised() -> None:
    """Not lost in its thread."""

    def fails(_plane: ReplyPlane, _number: int, _final: RowKey, _obsolete: Sequence[RowKey]) -> None:
        raise OSError("no room")

    with pytest.raises(OSError, match="no room"):
        drive(lambda plane: Broken(plane, fails), ReplyPlane(0, 0), LOAD)


def test_a_clear_sleeps_once_however_many_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """And so does a put."""
    slept: list[float] = []
    monkeypatch.setattr(
        "quiesce.bench.reply_plane.time",
        SimpleNamespace(sleep=slept.append, perf_counter=time.perf_counter),
    )
    plane = ReplyPlane(0.2, 5.0)
    keys = [RowKey(1, "g", 0, 0, number) for number in range(64)]
    plane.stage(keys)

    plane.put(RowKey(1, "g", 0, 0), keys)
    plane.clear(keys)

    assert slept == [0.2, 5.0]
    assert plane.account().keys_per_clear == 64


def test_lines_of_code_are_lines_with_code() -> None:
    """No blank lines, comments or docstrings; a text over several lines counts, as it is code."""
    source = '''
"""A module.

Of some length.
"""

# A comment.
import os  # with another one


class Thing:
    """A thing."""

    size: int = 3
    """How large it is."""

    def call(self) -> str:
        """Do it."""
        return """one
        two"""
'''

    assert code_lines(source) == 6


def test_what_a_thread_does_is_what_its_method_comes_to_call() -> None:
    """Of its own class, each once, itself first; not what others call."""

    class Worker:
        def run(self) -> None:
            self.step()

        def step(self) -> None:
            self.run()
            self.name = "worker"

        def other(self) -> None:
            self.run()

    assert [method.__name__ for method in methods_behind(Worker, "run")] == ["run", "step"]


def test_the_lines_of_each_mode_are_counted() -> None:
    """Clearing inline needs no cleanup; what has a fence of its own names its share."""
    lines = {mode: lines_of(mode) for mode in COMPARED}

    assert (lines["inline"].cleanup, lines["inline"].fence) == (0, 0)
    assert lines["gate_permit"].fence == 0
    assert 0 < lines["own_fence"].fence < lines["own_fence"].cleanup
    for mode in ("own_fence", "gate_permit"):
        assert 0 < lines[mode].thread < lines[mode].cleanup
    assert lines["gate_permit"].checkpoint == lines["inline"].checkpoint < lines["own_fence"].checkpoint
    for found in lines.values():
        assert found.total == found.call + found.checkpoint + found.cleanup


def test_the_report_has_every_mode_at_every_point(report: BenchReport) -> None:
    """With and without checkpoints, and the fences, the load and the batches as well."""
    points: dict[tuple[Any, ...], set[str]] = {}
    for result in report.results:
        names = ("measured", "clear_s", "calls_at_once", "checkpoints", "share")
        points.setdefault(tuple(result.get(name) for name in names), set()).add(result["mode"])

    assert {point[0] for point in points} == {"headline", "replies", "fences", "load", "batches", "lines"}
    for point, modes in points.items():
        assert modes == {*COMPARED, "off"} if point[0] == "fences" else modes == set(COMPARED)
    assert len([point for point in points if point[0] == "replies"]) == 8


def test_no_key_is_lost_or_cleared_twice_and_nothing_runs_in_a_window(report: BenchReport) -> None:
    """In the whole benchmark."""
    assert (
        report.bars["keys_lost"] == report.bars["keys_cleared_twice"] == report.bars["calls_in_window"] == 0
    )
    for result in report.results:
        if result["measured"] != "lines" and result["mode"] != "off":
            assert result["keys"] > 0
            assert (result["keys_lost"], result["keys_cleared_twice"], result["calls_in_window"]) == (0, 0, 0)


def test_many_calls_that_finish_at_once_are_cleared_together(report: BenchReport) -> None:
    """Inline needs a clear for each; the others need 32, or a few more where a thread was kept from running."""
    clears = {
        result["mode"]: result["clears"] for result in report.results if result["measured"] == "batches"
    }

    assert clears["inline"] == [1024]
    for mode in ("own_fence", "gate_permit"):
        assert all(32 <= number < 128 for number in clears[mode])


def test_the_page_gets_the_answer_the_tables_and_the_plot(report: BenchReport, tmp_path: Path) -> None:
    """The two lines stand between markers of their own."""
    page = tmp_path / REPLY_PAGE
    page.write_text(
        "# Words\n<!-- bench:reply:answer -->\n<!-- /bench:reply:answer -->\nmore\n"
        "<!-- bench:reply -->\nold\n<!-- /bench:reply -->\n",
        encoding="utf-8",
    )

    written = update_page(report, tmp_path)

    assert written == [page, tmp_path / REPLY_PLOT]
    text = page.read_text(encoding="utf-8")
    assert len(report.answer) == 2
    for line in report.answer:
        assert text.count(f"* {line}\n") == 1
    assert text.index(report.answer[0]) < text.index("more") < text.index("**Bars**")
    assert "old" not in text
    plot = ET.fromstring((tmp_path / REPLY_PLOT).read_text(encoding="utf-8"))  # noqa: S314 - our own text
    assert len(plot.findall(".//{http://www.w3.org/2000/svg}circle")) == 3 * (2 + 2 + 2)
