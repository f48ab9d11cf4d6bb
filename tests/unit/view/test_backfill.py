"""What was recorded, as text for promtool."""

from pathlib import Path

import pytest

from quiesce.view.backfill import BLOCK_SECONDS, is_short, plan, spacing, write_texts
from quiesce.view.folders import Folders, ShownRun
from tests.unit.view.rig import Sampled, write_recording

NOON = 1_800_000_000.0
GROUPS = 'quiesce_groups{owner="ledger"}'
STEPS = "quiesce_groups_trained_total"
LATER = NOON * 2


def shown(folder: Path, samples: Sampled, **about: str) -> ShownRun:
    """Record a run, and show it."""
    write_recording(folder / "runs-mine", samples=samples, **about)  # type: ignore[arg-type] # texts alone
    return Folders(folder).add(folder / "runs-mine")


def texts(
    run: ShownRun, folder: Path, *, until: float = LATER, most: int = 10**9
) -> list[tuple[int, list[str]]]:
    """Return every text that is written, with its part's number."""
    parts, _, _ = plan(run, until)
    path = folder / "text.om"
    windows = {part.window for part in parts}
    return [
        (window, path.read_text().splitlines()) for window in write_texts(run, windows, path, until, most)
    ]


def test_every_line_is_written_in_full(tmp_path: Path) -> None:
    """A series that did not change is told again: for Prometheus it would be gone otherwise."""
    run = shown(tmp_path, [(NOON, {GROUPS: 3.0, STEPS: 1.0}), (NOON + 15, {STEPS: 2.0})])

    ((_, lines),) = texts(run, tmp_path)

    labels = 'run="mine",role="controller",instance="runs-mine",job="quiesce"'
    assert lines == [
        f'quiesce_groups{{owner="ledger",{labels}}} 3.0 {NOON:.3f}',
        f"quiesce_groups_trained_total{{{labels}}} 1.0 {NOON:.3f}",
        f'up{{job="quiesce",instance="runs-mine"}} 1 {NOON:.3f}',
        f'quiesce_groups{{owner="ledger",{labels}}} 3.0 {NOON + 15:.3f}',
        f"quiesce_groups_trained_total{{{labels}}} 2.0 {NOON + 15:.3f}",
        f'up{{job="quiesce",instance="runs-mine"}} 1 {NOON + 15:.3f}',
        "# EOF",
    ]


def test_a_series_that_is_gone_is_told_no_more(tmp_path: Path) -> None:
    """Null in a line ends a series."""
    run = shown(tmp_path, [(NOON, {GROUPS: 3.0, STEPS: 1.0}), (NOON + 15, {GROUPS: None})])

    ((_, lines),) = texts(run, tmp_path)

    assert [line for line in lines if "owner" in line and f"{NOON + 15:.3f}" in line] == []


def test_a_new_file_begins_with_nothing(tmp_path: Path) -> None:
    """The first line of a file has every series, so what it lacks is gone."""
    run = shown(tmp_path, [(NOON, {GROUPS: 3.0, STEPS: 1.0})])
    write_recording(run.folder, number=1, samples=[(NOON + 15, {STEPS: 2.0})])

    ((_, lines),) = texts(run, tmp_path)

    assert [line.split("{")[0] for line in lines if f"{NOON + 15:.3f}" in line] == [STEPS, "up"]


def test_samples_are_as_far_apart_as_the_widest_gaps(tmp_path: Path) -> None:
    """A recorder that slows down is not read at its first pace: a rate would find one sample, and draw a gap."""
    at = [NOON + second for second in (0, 2, 4, 6, 8, 10, 20, 30, 45, 60, 75, 90, 105)]
    _, gaps, _ = plan(shown(tmp_path, [(moment, {STEPS: 1.0}) for moment in at]), LATER)

    assert spacing(gaps) == (15.0, 60)
    assert spacing([40.0] * 30 + [900.0]) == (40.0, 100), "one long gap is the run's, and not the recorder's"


def test_two_hours_are_one_part(tmp_path: Path) -> None:
    """A block of Prometheus never spans more."""
    samples = [(NOON + index * 1800, {STEPS: float(index)}) for index in range(10)]
    run = shown(tmp_path, samples)

    made = texts(run, tmp_path)

    assert [window for window, _ in made] == sorted({int(at // BLOCK_SECONDS) for at, _ in samples})
    assert sum(STEPS in line for _, lines in made for line in lines) == len(samples)
    assert all(lines[-1] == "# EOF" for _, lines in made)


def test_a_long_part_is_written_in_pieces(tmp_path: Path) -> None:
    """No text has many more samples than it may."""
    run = shown(tmp_path, [(NOON + index, {GROUPS: 1.0, STEPS: float(index)}) for index in range(100)])

    made = texts(run, tmp_path, most=30)

    assert len(made) > 5
    assert max(len(lines) for _, lines in made) < 40
    assert sum(STEPS in line for _, lines in made for line in lines) == 100


def test_what_prometheus_scrapes_itself_is_left_out(tmp_path: Path) -> None:
    """A sample from the time at which the view began, or later, is not written twice."""
    run = shown(tmp_path, [(NOON, {STEPS: 1.0}), (NOON + 15, {STEPS: 2.0}), (NOON + 30, {STEPS: 3.0})])

    ((_, lines),) = texts(run, tmp_path, until=NOON + 30)

    assert sum(STEPS in line for line in lines) == 2


def test_two_processes_that_say_the_same_at_one_time_are_told_once(tmp_path: Path) -> None:
    """Prometheus refuses a second sample of a series at the same time."""
    run = shown(tmp_path, [(NOON, {STEPS: 1.0})])
    write_recording(
        run.folder, number=1, writer="w2", samples=[(NOON, {STEPS: 7.0}), (NOON + 1, {STEPS: 8.0})]
    )

    ((_, lines),) = texts(run, tmp_path)

    assert sum(STEPS in line for line in lines) == 2


def test_another_role_is_another_instance(tmp_path: Path) -> None:
    """Two processes of a run that record at one time do not fall into one series."""
    run = shown(tmp_path, [(NOON, {STEPS: 1.0})])
    write_recording(run.folder, number=1, writer="w2", role="worker-3", samples=[(NOON, {STEPS: 7.0})])

    ((_, lines),) = texts(run, tmp_path)

    assert sum('instance="runs-mine/worker-3"' in line for line in lines) == 2  # with its own `up`


def test_odd_labels_and_numbers_survive(tmp_path: Path) -> None:
    """What a user's kind is called, and what is not a number, is written as OpenMetrics has it."""
    samples: Sampled = [(NOON, {r'quiesce_groups{owner="a\"b\\c\nd"}': float("nan"), STEPS: float("inf")})]
    write_recording(tmp_path / "mine", run='o"dd', samples=[(NOON, {STEPS: 0.0})])
    run = shown(tmp_path, samples, run='o"dd')

    ((_, lines),) = texts(run, tmp_path)

    assert lines[0].startswith(r'quiesce_groups{owner="a\"b\\c\nd",run="o\"dd",')
    assert lines[0].split()[-2] == "NaN"
    assert lines[1].split()[-2] == "+Inf"


def test_the_same_recording_has_the_same_parts(tmp_path: Path) -> None:
    """A part's key changes with what is in it, and with what it is called, so blocks are made once."""
    samples = [(NOON, {STEPS: 1.0}), (NOON + BLOCK_SECONDS, {STEPS: 2.0})]
    run = shown(tmp_path, samples)
    before, gaps, last = plan(run, LATER)

    write_recording(run.folder, number=1, samples=[(NOON + BLOCK_SECONDS + 15, {STEPS: 3.0})])
    after, _, _ = plan(run, LATER)
    run.name = "other"
    renamed, _, _ = plan(run, LATER)

    assert before[0].key == after[0].key
    assert before[1].key != after[1].key
    assert {part.key for part in after}.isdisjoint(part.key for part in renamed)
    assert (gaps, last) == ([BLOCK_SECONDS], NOON + BLOCK_SECONDS)
    assert (run.first_unix, run.last_unix) == (NOON, NOON + BLOCK_SECONDS + 15)


@pytest.mark.parametrize("size, short", [(1000, True), (9 << 20, False)])
def test_a_long_recording_is_known_by_its_size(tmp_path: Path, size: int, *, short: bool) -> None:
    """Whether the present waits for the past is decided without reading it."""
    run = shown(tmp_path, [(NOON, {STEPS: 1.0})])
    with (run.folder / "telemetry" / "samples-0000.jsonl").open("ab") as file:
        file.write(b"\n" * size)

    assert is_short([run]) is short
