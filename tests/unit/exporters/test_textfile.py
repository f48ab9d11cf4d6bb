"""The textfile sink: whole files, no timestamps, run and role on every sample, gone at the end."""

from pathlib import Path

import pytest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

from quiesce.errors import ConfigError
from quiesce.telemetry.sinks import SinkContext
from quiesce_exporters.textfile import DIRECTORY_VARIABLE, Textfile, make_textfile
from tests.unit.telemetry.exposition import parse_classic


def context(**settings: object) -> SinkContext:
    """What a run tells a sink."""
    return SinkContext("my run/7", "controller", None, {}, settings)


def families(value: float = 3.0) -> list[GaugeMetricFamily | CounterMetricFamily | HistogramMetricFamily]:
    """One family of each type; a gauge that has its own timestamp, and a sample that has its labels."""
    gauge = GaugeMetricFamily("quiesce_groups", "Groups", labels=["owner"])
    gauge.add_metric(["ledger"], value, timestamp=1_700_000_000.0)
    counter = CounterMetricFamily("quiesce_tokens_generated", "Tokens", labels=["run", "role"])
    counter.add_metric(["my run/7", "controller"], 8)
    histogram = HistogramMetricFamily("quiesce_train_step_seconds", "Steps")
    histogram.add_metric([], [("0.1", 1.0), ("+Inf", 2.0)], 0.7)
    return [gauge, counter, histogram]


def test_a_snapshot_is_what_node_exporter_reads(tmp_path: Path) -> None:
    """One .prom file that parses, readable for everybody, without timestamps, with run and role once each."""
    sink = Textfile(tmp_path, run="my run/7", role="controller")
    sink.samples(families(), 1_700_000_000.0)

    text = sink.path.read_text()
    found = {sample.name: sample for family in parse_classic(text) for sample in family.samples}
    assert [path.name for path in tmp_path.iterdir()] == ["quiesce-my_run_7-controller.prom"]
    assert sink.path.stat().st_mode & 0o777 == 0o644
    assert all(sample.timestamp is None for sample in found.values())
    assert all(sample.labels["run"] == "my run/7" for sample in found.values())
    assert found["quiesce_groups"].labels == {"run": "my run/7", "role": "controller", "owner": "ledger"}
    assert found["quiesce_tokens_generated_total"].value == 8
    assert found["quiesce_train_step_seconds_count"].value == 2


def test_the_next_snapshot_replaces_the_file_whole(tmp_path: Path) -> None:
    """A reader that opened the old file reads it to its end; the name then leads to the new one."""
    sink = Textfile(tmp_path, run="r", role="controller")
    sink.samples(families(3), 1.0)
    with sink.path.open() as old:
        sink.samples(families(4), 2.0)
        assert 'owner="ledger",role="controller",run="r"} 3.0' in old.read()
    assert 'owner="ledger",role="controller",run="r"} 4.0' in sink.path.read_text()


def test_what_cannot_be_written_leaves_the_last_snapshot(tmp_path: Path) -> None:
    """A failure is raised to the pipeline, and no scratch file stays behind."""
    sink = Textfile(tmp_path, run="r", role="controller")
    sink.samples(families(), 1.0)
    sink.path.unlink()
    sink.path.mkdir()

    with pytest.raises(OSError, match="quiesce-r-controller"):
        sink.samples(families(), 2.0)

    assert [path.name for path in tmp_path.iterdir()] == ["quiesce-r-controller.prom"]


def test_the_file_goes_when_the_run_does(tmp_path: Path) -> None:
    """Closing removes it, twice is once, and a late snapshot does not bring it back."""
    sink = Textfile(tmp_path, run="r", role="controller")
    sink.samples(families(), 1.0)
    sink.close(1.0)
    sink.close(1.0)
    sink.samples(families(), 2.0)
    assert list(tmp_path.iterdir()) == []


def test_a_forked_child_neither_writes_nor_removes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is the parent's."""
    sink = Textfile(tmp_path, run="r", role="controller")
    sink.samples(families(3), 1.0)
    monkeypatch.setattr(sink, "_pid", -1)
    sink.samples(families(4), 2.0)
    sink.close(1.0)
    assert " 3.0" in sink.path.read_text()


def test_the_folder_comes_from_the_setting_or_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A setting beats the environment; neither, or no folder, is refused by name."""
    monkeypatch.delenv(DIRECTORY_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match=DIRECTORY_VARIABLE):
        make_textfile(context())
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    assert make_textfile(context()).path.parent == tmp_path
    with pytest.raises(ConfigError, match="absent is not a folder"):
        make_textfile(context(directory=tmp_path / "absent"))
