"""The recorder: what is written is read back, nothing grows past its limit, and no disk can hurt the run."""

import errno
import gzip
import json
import logging
import math
import os
import random
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric

from quiesce.errors import ConfigError, NoRecordingError, RecorderPausedError
from quiesce.telemetry import names
from quiesce.telemetry.exposed import KeptFamilies
from quiesce.telemetry.finished import FinishedSpan
from quiesce.telemetry.histogram import HistogramFamily
from quiesce.telemetry.recording import REMOVED_FILE, Recording, series
from quiesce.telemetry.sinks import SinkContext
from quiesce.telemetry.slot_spans import SlotColumns, SpanParts
from quiesce_exporters import recorder_files
from quiesce_exporters.recorder import Recorder, make_recorder

NOW = time.time_ns() + 30 * 86_400 * 10**9  # later than any file of these tests is begun
SPAN = FinishedSpan(
    "quiesce.checkpoint",
    2**127 + 5,
    2**63 + 7,
    9,
    NOW,
    NOW + 1_000_000_001,
    {"quiesce.cut_id": 'c"1', "quiesce.step": 7, "quiesce.ratio": 0.5, "quiesce.cut_off": True},
    ((2**100, 2**50), (3, 4)),
    (("held", NOW + 500_000_000, {"quiesce.kind": "admission"}),),
    "error",
    cut_off=True,
)


def recorder(folder: Path, **settings: int | bool) -> Recorder:
    """A recorder of a small run, which needs no room on the disk."""
    given = {"reserve_bytes": 0, **settings}
    return make_recorder(SinkContext("r", "controller", folder, {}, given))


def families(value: float, *owners: str) -> list[Metric]:
    """A gauge by owner, a gauge that stays, a histogram; with the labels that every series has."""
    gauge = GaugeMetricFamily("quiesce_groups", "Groups", labels=["run", "role", "owner"])
    for owner in owners or ("ledger",):
        gauge.add_metric(["r", "controller", owner], value)
    still = GaugeMetricFamily("quiesce_train_kl", "KL", value=math.nan)
    histogram = HistogramMetricFamily("quiesce_train_step_seconds", "Steps")
    histogram.add_metric([], [("0.1", 1.0), ("+Inf", 2.0)], 0.75)
    return [gauge, still, histogram]


def event(second: int, **fields: object) -> dict[str, object]:
    """A line of the run's log."""
    return {"event": "run.state", "timestamp": f"2026-01-01T00:00:{second:02d}Z", **fields}


def slot(number: int) -> FinishedSpan:
    """A slot's span; later numbers end later."""
    return FinishedSpan("quiesce.slot", number + 1, number + 1, 0, NOW, NOW + number, {"quiesce.kind": "x"})


def test_a_span_comes_back_as_it_went(tmp_path: Path) -> None:
    """Identifiers of all widths, text that needs escapes, links, events, status."""
    odd = SPAN._replace(parent_id=0, attributes={"quiesce.error": 'a\n"b"\\ é \udc80', "quiesce.x": math.inf})
    sink = recorder(tmp_path)
    sink.spans([SPAN, slot(1), odd])
    sink.close(1.0)

    found = list(Recording.open(tmp_path).spans())
    assert found[0] == slot(1)
    assert found[1] == SPAN
    assert found[2].attributes == {"quiesce.error": 'a\n"b"\\ é \udc80', "quiesce.x": "inf"}
    assert found[2].parent_id == 0
    assert [span.name for span in Recording.open(tmp_path).spans(slots=False)] == ["quiesce.checkpoint"] * 2


def test_columns_of_slots_are_written_as_their_spans_would_be(tmp_path: Path) -> None:
    """They come back the same, beside others."""
    columns = SlotColumns(random.Random(5).getrandbits)
    for index, kind in enumerate(("retry", 'odd "kind"', "retry")):
        columns.which.append(columns.number(kind) or 0)
        columns.times.extend((NOW + index, NOW + index + 5))
    slots = columns.take()
    assert slots is not None
    sink = recorder(tmp_path)
    sink.spans(SpanParts.of([slots, [SPAN]]))
    sink.close(1.0)

    assert [span for span in Recording.open(tmp_path).spans() if span != SPAN] == list(slots)
    assert list(Recording.open(tmp_path).spans(slots=False)) == [SPAN]


def test_histograms_are_written_as_their_samples_would_be(tmp_path: Path) -> None:
    """A collector's snapshot and a family of samples say the same, at first and after a change."""
    counting, kept = HistogramFamily(names.DATAPLANE_OP), KeptFamilies({"run": "r1", "role": "controller"})
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    snapshots, samples = recorder(tmp_path / "a"), recorder(tmp_path / "b")
    for unix_time in (1.0, 2.0, 3.0):
        family = kept.histograms(names.DATAPLANE_OP, counting.children)
        plain = Metric(family.name, family.documentation, "histogram")
        plain.samples = list(family.samples)
        snapshots.samples([family], unix_time)
        samples.samples([plain], unix_time)
        counting.observe(5_000 * int(unix_time), "put")
    for sink in (snapshots, samples):
        sink.close(1.0)

    told = [list(Recording.open(tmp_path / name).samples()) for name in ("a", "b")]
    assert [sample.values for sample in told[0]] == [sample.values for sample in told[1]]
    assert all(sample.values for sample in told[0])
    assert len(told[0][1].values) < len(told[0][0].values) / 2


def test_a_snapshot_is_what_changed_since_the_last_one(tmp_path: Path) -> None:
    """The first line has everything; NaN that stays NaN is no change; a series that went is told."""
    sink = recorder(tmp_path)
    sink.samples(families(1, "ledger", "spares"), 10.0)
    sink.samples(families(1, "ledger", "spares"), 11.0)
    sink.samples(families(2, "ledger"), 12.25)
    sink.samples(families(0.5, "ledger", 'o"\\\n'), 13.0)
    sink.close(1.0)

    first, second, third, fourth = Recording.open(tmp_path).samples()
    assert (first.unix_time, first.complete, len(first.values)) == (10.0, True, 7)
    assert first.values['quiesce_groups{owner="spares"}'] == 1
    assert first.values['quiesce_train_step_seconds_bucket{le="+Inf"}'] == 2
    assert math.isnan(first.values["quiesce_train_kl"] or 0.0)
    assert (second.complete, dict(second.values)) == (False, {})
    assert dict(third.values) == {'quiesce_groups{owner="ledger"}': 2, 'quiesce_groups{owner="spares"}': None}
    changed = {series(key)[1]["owner"]: value for key, value in fourth.values.items()}
    assert changed == {"ledger": 0.5, 'o"\\\n': 0.5}


def test_events_keep_their_fields(tmp_path: Path) -> None:
    """What JSON lacks becomes text, and nothing is lost for it."""
    sink = recorder(tmp_path)
    sink.events([event(2, reward=math.nan, path=Path("x"), deep={1: [math.inf]}), event(1, state="running")])
    sink.close(1.0)

    early, late = Recording.open(tmp_path).events()
    assert early.fields["state"] == "running"
    assert late.fields["reward"] == "nan"
    assert late.fields["deep"] == {"1": ["inf"]}
    assert late.unix_time - early.unix_time == 1


def test_a_restart_adds_files_and_clobbers_none(tmp_path: Path) -> None:
    """Two incarnations, the first of them killed: one recording, in the order of time, each with its writer."""
    first = recorder(tmp_path)
    first.spans([SPAN])
    (tmp_path / "incarnation").write_text("1\n")  # counted after its telemetry was switched on
    first.samples(families(1), 10.0)
    before = {path.name: path.read_bytes() for path in (tmp_path / "telemetry").iterdir()}
    (tmp_path / "incarnation").write_text("2\n")
    second = recorder(tmp_path, compress=False)
    second.samples(families(5), 20.0)
    second.spans([SPAN._replace(end_ns=SPAN.end_ns - 1)])
    second.close(1.0)

    recording = Recording.open(tmp_path)
    assert {name: (tmp_path / "telemetry" / name).read_bytes() for name in before} == before
    assert [writer.incarnation for writer in recording.writers] == [1, 2]
    assert [sample.file.writer.incarnation for sample in recording.samples()] == [1, 2]
    assert [sample.complete for sample in recording.samples()] == [True, True]
    assert [span.end_ns - SPAN.end_ns for span in recording.spans()] == [-1, 0]
    assert recording.torn == 0


def test_a_torn_end_costs_itself_alone(tmp_path: Path) -> None:
    """Half a line, a hole of zeros, a compressed file that was cut short, a file of something else."""
    sink = recorder(tmp_path)
    for number in range(20):
        sink.spans([SPAN._replace(end_ns=number)])
    sink.close(1.0)
    folder = tmp_path / "telemetry"
    (written,) = folder.glob("spans-*.jsonl")
    whole = written.read_bytes()
    written.write_bytes(whole[:-40])
    (folder / "spans-0001.jsonl").write_bytes(whole + b"\0" * 100)
    packed = gzip.compress(whole)
    (folder / "spans-0002.jsonl.gz").write_bytes(packed[: len(packed) - 20])
    (folder / "spans-0003.jsonl").write_text('{"format": "something else"}\n')
    (folder / "spans-0004.jsonl").write_text("")
    (folder / "notes.txt").write_text("")

    recording = Recording.open(tmp_path)
    count = sum(1 for _ in recording.spans())
    assert 19 + 20 <= count <= 19 + 20 + 20
    assert recording.torn == 2
    assert set(recording.broken) == {"spans-0002.jsonl.gz", "spans-0003.jsonl"}


def test_nothing_recorded_is_said_so(tmp_path: Path) -> None:
    """A folder without a recording is refused by name, the recording's own folder is as good as the run's."""
    with pytest.raises(NoRecordingError, match="no recording"):
        Recording.open(tmp_path)
    sink = recorder(tmp_path)
    sink.spans([SPAN])
    sink.close(1.0)
    assert list(Recording.open(tmp_path / "telemetry").spans()) == [SPAN]


def test_a_full_file_is_followed_by_the_next_and_compressed(tmp_path: Path) -> None:
    """No file passes its limit; every samples file begins with everything; the last one stays plain."""
    sink = recorder(tmp_path, max_bytes=1 << 20, file_bytes=4096)
    for number in range(100):
        sink.samples(families(number, "ledger", "spares"), float(number))
        sink.spans([SPAN._replace(end_ns=number)])
    sink.close(1.0)

    names = sorted(path.name for path in (tmp_path / "telemetry").iterdir())
    sizes = [path.stat().st_size for path in (tmp_path / "telemetry").glob("*.jsonl")]
    recording = Recording.open(tmp_path)
    samples = list(recording.samples())
    assert max(sizes) <= 4096
    assert [name for name in names if name.startswith("spans") and not name.endswith(".gz")] == names[-1:]
    assert len([name for name in names if name.endswith(".gz")]) > 5
    assert [sample.unix_time for sample in samples] == [float(number) for number in range(100)]
    assert all(len(sample.values) == 7 for sample in samples if sample.complete)
    assert sum(sample.complete for sample in samples) == len(list((tmp_path / "telemetry").glob("samples-*")))
    assert [span.end_ns for span in recording.spans()] == list(range(100))


def test_the_folder_stays_below_its_limit_whatever_comes(tmp_path: Path) -> None:
    """Slots go first, samples are thinned before they go, rare spans stay; what went is counted."""
    limit = 100_000
    sink = recorder(tmp_path, max_bytes=limit, file_bytes=4096, compress=False)
    folder = tmp_path / "telemetry"
    for number in range(500):
        sink.spans([slot(number) for _ in range(5)])
        sink.samples(families(number, "ledger", "spares"), float(number))
        if number % 50 == 0:
            sink.spans([SPAN._replace(end_ns=number)])
        assert sum(path.stat().st_size for path in folder.iterdir()) <= limit
    sink.close(1.0)

    recording = Recording.open(tmp_path)
    times = [sample.unix_time for sample in recording.samples()]
    slots = [span.end_ns for span in recording.spans() if span.name == "quiesce.slot"]
    assert times == sorted(times)
    assert times[-1] == 499
    assert times[0] < slots[0] - NOW  # with a quarter of the lines, samples reach further back
    assert slots[-1] == NOW + 499
    assert [span.end_ns for span in recording.spans(slots=False)] == list(range(0, 500, 50))
    assert recording.removed == sink.statistics().removed
    assert recording.removed["slots"]["files"] > 0
    assert recording.removed["samples"]["thinned"] > 0
    assert (folder / REMOVED_FILE).exists()
    headers = [json.loads(path.read_text().splitlines()[0]) for path in sorted(folder.glob("samples-*"))]
    assert headers[0]["thinned"] == 3
    assert "thinned" not in headers[-1]


def test_thinned_samples_add_up_to_the_same_state(tmp_path: Path) -> None:
    """What a line that goes had changed is in the one that stays."""
    sink = recorder(tmp_path, file_bytes=1 << 20)
    for number in range(11):
        owners = ("ledger",) if number % 2 else ("ledger", "spares")
        sink.samples(families(number, *owners), float(number))
    sink.close(1.0)
    before = _states(tmp_path)

    (path,) = (tmp_path / "telemetry").glob("samples-*")
    sink._folder._thin(recorder_files._Closed("samples", 0, path, path.stat().st_size))  # noqa: SLF001 - one step of many

    after = _states(tmp_path)
    assert list(after) == [0.0, 4.0, 8.0, 10.0]
    assert all(before[when] == state for when, state in after.items())


def _states(run_dir: Path) -> dict[float, dict[str, float | None]]:
    states: dict[float, dict[str, float | None]] = {}
    state: dict[str, float | None] = {}
    for sample in Recording.open(run_dir).samples():
        state = {**({} if sample.complete else state), **sample.values}
        states[sample.unix_time] = {
            key: value for key, value in state.items() if value is not None and not math.isnan(value)
        }
    return states


def test_another_processs_open_file_is_left_alone(tmp_path: Path) -> None:
    """While its process lives it is neither compressed nor removed; once that let go, it is compressed."""
    other = recorder(tmp_path)
    other.spans([SPAN])
    (theirs,) = (tmp_path / "telemetry").glob("spans-*")
    sink = recorder(tmp_path)
    sink.spans([SPAN])
    sink.spans([SPAN])
    assert theirs.exists()
    other.close(1.0)
    third = recorder(tmp_path)
    third.spans([SPAN])
    third.spans([SPAN])
    assert not theirs.exists()
    assert theirs.with_name("spans-0000.jsonl.gz").exists()


def test_a_full_disk_hurts_nothing_and_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whole lines stay, the failure is raised and counted, and when there is room again it goes on."""
    sink = recorder(tmp_path)
    sink.spans([SPAN])
    sink.samples(families(1, "ledger", "spares"), 1.0)
    write = os.write
    left = [100]

    def nearly_full(descriptor: int, data: bytes) -> int:
        if not left[0]:
            raise OSError(errno.ENOSPC, "No space left on device")
        written = write(descriptor, data[: left[0]])
        left[0] -= written
        return written

    monkeypatch.setattr(os, "write", nearly_full)
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            with pytest.raises(OSError, match="No space left"):
                sink.spans([SPAN, SPAN])
            with pytest.raises(OSError, match="No space left"):
                sink.samples(families(2, "ledger"), 2.0)
    monkeypatch.setattr(os, "write", write)
    sink.spans([SPAN])
    sink.samples(families(2, "ledger"), 3.0)
    sink.close(1.0)

    recording = Recording.open(tmp_path)
    assert list(recording.spans()) == [SPAN, SPAN]
    assert [(sample.unix_time, sample.complete) for sample in recording.samples()] == [
        (1.0, True),
        (3.0, True),
    ]
    assert recording.torn == 0
    assert sink.statistics().failures == 10
    assert "No space left" in sink.statistics().last_failure
    assert len([record for record in caplog.records if record.name == "quiesce.telemetry"]) == 1


def test_the_last_part_of_the_disk_is_left_to_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A nearly full disk pauses the recorder before it is full: a checkpoint is worth more."""
    sink = recorder(tmp_path, reserve_bytes=1 << 20)
    real = os.statvfs(tmp_path)

    class NearlyFull:
        f_bavail = 10
        f_frsize = 4096
        f_blocks = real.f_blocks

    monkeypatch.setattr(os, "statvfs", lambda _: NearlyFull)
    with pytest.raises(RecorderPausedError, match="40960 bytes free"):
        sink.spans([SPAN])
    monkeypatch.undo()
    sink.spans([SPAN])
    assert list(Recording.open(tmp_path).spans()) == [SPAN]


def gone(run_dir: Path) -> None:
    """The run's folder is not there."""
    run_dir.rmdir()


def blocked(run_dir: Path) -> None:
    """A file stands where the recording's folder would be."""
    (run_dir / "telemetry").write_text("")


@pytest.mark.parametrize("spoil", [gone, blocked])
def test_a_folder_that_cannot_be_written_hurts_nothing(tmp_path: Path, spoil: Callable[[Path], None]) -> None:
    """Each batch is refused with the reason, and recording begins as soon as it can."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    sink = recorder(run_dir)
    spoil(run_dir)
    for _ in range(2):
        with pytest.raises(OSError, match="telemetry"):
            sink.samples(families(1), 1.0)
    (run_dir / "telemetry").unlink() if spoil is blocked else run_dir.mkdir()
    sink.samples(families(1), 2.0)
    assert [sample.unix_time for sample in Recording.open(run_dir).samples()] == [2.0]


def test_housekeeping_that_fails_does_not_stop_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full file that cannot be compressed stays as it is, and is tried again much later."""
    sink = recorder(tmp_path, max_bytes=1 << 20, file_bytes=2048)
    tries: list[Path] = []

    def refuse(path: Path, *_: object, **__: object) -> None:
        tries.append(path)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(gzip, "open", refuse)
    for number in range(50):
        sink.spans([SPAN._replace(end_ns=number)])
    monkeypatch.undo()
    sink.close(1.0)
    assert len(tries) == 1
    assert [span.end_ns for span in Recording.open(tmp_path).spans()] == list(range(50))
    assert not list((tmp_path / "telemetry").glob(".*"))


def test_a_killed_process_loses_nothing_that_was_handed_over(tmp_path: Path) -> None:
    """What was given to the recorder is in the files although nobody closed them."""
    program = textwrap.dedent(f"""
        import os
        from pathlib import Path
        from tests.unit.exporters.test_recorder import SPAN, event, families, recorder
        sink = recorder(Path({str(tmp_path)!r}))
        sink.spans([SPAN])
        sink.samples(families(1), 1.0)
        sink.events([event(1)])
        os.kill(os.getpid(), 9)
    """)
    root = Path(__file__).parents[3]
    assert subprocess.run([sys.executable, "-c", program], cwd=root, check=False).returncode == -9
    recording = Recording.open(tmp_path)
    assert [span.attributes for span in recording.spans()] == [SPAN.attributes]
    assert len(list(recording.samples())) == len(list(recording.events())) == 1


def test_a_forked_child_writes_nothing(tmp_path: Path) -> None:
    """A loader worker neither doubles a line nor closes its parent's files."""
    sink = recorder(tmp_path)
    sink.spans([SPAN])
    child = os.fork()
    if child == 0:
        sink.spans([SPAN])
        sink.samples(families(1), 1.0)
        sink.close(1.0)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    sink.spans([SPAN])
    sink.close(1.0)
    recording = Recording.open(tmp_path)
    assert list(recording.spans()) == [SPAN, SPAN]
    assert list(recording.samples()) == []


def test_a_run_without_a_folder_is_refused_by_name(tmp_path: Path) -> None:
    """So is a setting that makes no sense."""
    with pytest.raises(ConfigError, match="run_dir"):
        make_recorder(SinkContext("r", "controller", None, {}, {}))
    with pytest.raises(ConfigError, match=r"recorder\.max_bytes"):
        make_recorder(SinkContext("r", "controller", tmp_path, {}, {"max_bytes": "much"}))
