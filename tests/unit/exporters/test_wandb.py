"""The W&B sink: offline rows that can be read back, no network, nothing of the application's touched."""

import json
import os
import struct
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from quiesce.errors import ConfigError, ExtraMissingError
from quiesce.telemetry.finished import FinishedSpan
from quiesce.telemetry.sinks import SinkContext
from quiesce_exporters.wandb import STEP, Wandb, make_wandb

BLOCK = 32768


def records(path: Path) -> Iterator[bytes]:
    """The records of an offline file: a header of 7 bytes, then LevelDB's log format."""
    data = path.read_bytes()
    position, whole = 7, b""
    while position + 7 <= len(data):
        left = BLOCK - position % BLOCK
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        position += 7
        if position + length > len(data):
            return  # it is being written
        whole += data[position : position + length]
        position += length
        if kind in {1, 4}:  # a record in one piece, or the last piece of one
            yield whole
            whole = b""


def rows(folder: Path) -> list[dict[str, float]]:
    """The rows of the one offline run in a folder."""
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[attr-defined] # made when it is imported

    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    until = time.monotonic() + 20
    while time.monotonic() < until:  # W&B's service writes the end of a run after finish() has returned
        found, ended = [], False
        for data in records(path):
            record = Record()
            record.ParseFromString(data)
            ended = ended or record.HasField("exit")
            if record.HasField("history"):
                items = {item.key or "/".join(item.nested_key): item for item in record.history.item}
                found.append({key: json.loads(item.value_json) for key, item in items.items()})
        if ended:
            return found
        time.sleep(0.02)
    raise AssertionError(f"{path} has no end")


def context(run_dir: Path, **settings: object) -> SinkContext:
    """What a run tells a sink."""
    return SinkContext("r", "controller", run_dir, {"service.name": "r"}, settings)


def step_event(step: int, **metrics: float) -> dict[str, object]:
    """What the run's log says of a step."""
    return {
        "event": "train.step",
        "step": step,
        "version": step,
        "seconds": 0.5,
        "groups": 8,
        "metrics": metrics,
    }


def snapshot(
    version: int, blocked: float, reward: float = 0.25
) -> list[GaugeMetricFamily | CounterMetricFamily]:
    """The families that the sink looks at."""
    lost = CounterMetricFamily("quiesce_window_blocked_seconds", "Lost", labels=["kind"])
    lost.add_metric(["admission"], blocked)
    lost.add_metric(["group_commit"], blocked)
    groups = GaugeMetricFamily("quiesce_groups", "Groups", labels=["owner"])
    groups.add_metric(["ledger"], 5)
    return [
        lost,
        groups,
        GaugeMetricFamily("quiesce_trainer_version", "Version", value=version),
        GaugeMetricFamily("quiesce_train_reward", "Reward", value=reward),
        GaugeMetricFamily("quiesce_train_kl", "KL", value=float("nan")),
    ]


def test_a_step_is_a_row_with_what_training_and_windows_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training's numbers, the last snapshot's totals, and a save's phases, over the trainer's step."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    sink = make_wandb(context(tmp_path))
    sink.events([step_event(1, reward=0.5, loss=-0.25)])
    sink.samples(snapshot(1, 0.125), 1.0)
    published = {
        "event": "checkpoint.published",
        "step": 1,
        "rows": 64,
        "bytes": 4096,
        "phases": {"drain": 0.002, "exclusive": 0.0005},
        "groups": {"buffer": 3},
    }
    sink.events([published, {"event": "run.state", "state": "running"}])
    span = FinishedSpan("quiesce.train.step", 1, 2, 0, 0, 10**9, {"quiesce.step": 2, "quiesce.reward": 0.75})
    sink.spans([span, span._replace(attributes={"quiesce.step": 3}, cut_off=True)])
    sink.close(2.0)
    sink.close(2.0)
    sink.events([step_event(9)])

    first, save, second = rows(tmp_path)
    assert first[STEP] == 1
    assert first["train/reward"] == 0.5
    assert first["train/loss"] == -0.25
    assert first["train/groups"] == 8
    assert save["checkpoint/phases/drain"] == 0.002
    assert save["checkpoint/groups/buffer"] == 3
    assert save["checkpoint/published"] == 1
    assert second[STEP] == 2
    assert second["train/reward"] == 0.75
    assert second["train/seconds"] == 1
    assert second["window/blocked_seconds"] == 0.25
    assert second["groups/ledger"] == 5


def test_a_run_that_reports_no_steps_has_a_row_for_each_version(tmp_path: Path) -> None:
    """A snapshot's own gauges make the row; no number is no value, and an unchanged version no row."""
    sink = Wandb(run="r", role="controller", folder=tmp_path)
    sink.samples(snapshot(1, 0.5), 1.0)
    sink.samples(snapshot(1, 0.75), 2.0)
    sink.samples(snapshot(2, 1.0, reward=0.5), 3.0)
    sink.close(2.0)

    first, second = rows(tmp_path)
    assert (first["train/reward"], second["train/reward"]) == (0.25, 0.5)
    assert (first["window/blocked_seconds"], second["window/blocked_seconds"]) == (1, 2)
    assert "train/kl" not in first


def test_a_step_is_one_row_however_often_it_is_told(tmp_path: Path) -> None:
    """The log and the span of a step are about one step; a save's row may come after it."""
    sink = Wandb(run="r", role="controller", folder=tmp_path)
    sink.events([step_event(1, reward=0.5)])
    sink.spans([FinishedSpan("quiesce.train.step", 1, 2, 0, 0, 10**9, {"quiesce.step": 1})])
    sink.close(2.0)
    assert [row["train/seconds"] for row in rows(tmp_path)] == [0.5]


@pytest.mark.distribution
def test_offline_means_no_network_and_an_application_keeps_its_own(tmp_path: Path) -> None:
    """No socket but local ones, no report of errors, and the application's run and its steps are untouched."""
    program = textwrap.dedent(f"""
        import os, sys, threading
        from pathlib import Path
        import wandb
        own = wandb.init(mode="offline", dir={str(tmp_path / "own")!r}, settings=wandb.Settings(silent=True))
        own.log({{"loss": 1.0}})
        from quiesce_exporters.wandb import Wandb
        sink = Wandb(run="r", role="controller", folder={str(tmp_path / "sink")!r})
        def work():
            for step in range(1, 4):
                sink.events([{{"event": "train.step", "step": step, "metrics": {{"reward": step / 4}}}}])
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert wandb.run is own and own.step == 1, (wandb.run, own.step)
        sink.close(2.0)
        own.log({{"loss": 2.0}})
        own.finish()
    """)
    (tmp_path / "own").mkdir()
    trace = tmp_path / "trace"
    environment = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    done = subprocess.run(
        [
            "strace",
            "-f",
            "-qq",
            "-e",
            "trace=connect,sendto",
            "-o",
            str(trace),
            sys.executable,
            "-c",
            program,
        ],
        capture_output=True,
        text=True,
        timeout=55,
        check=False,
        env={**environment, "WANDB_ERROR_REPORTING": "false", "PATH": tools_path()},
    )
    assert done.returncode == 0, done.stderr
    assert [row["train/reward"] for row in rows(tmp_path / "sink")] == [0.25, 0.5, 0.75]
    assert [row["loss"] for row in rows(tmp_path / "own")] == [1.0, 2.0]
    assert trace.read_text()
    assert "AF_INET" not in trace.read_text()


def tools_path() -> str:
    """Where the fetched programs of the distribution are, before everything else."""
    return f"{Path(__file__).parents[3] / '.tools/bin'}:{os.environ['PATH']}"


def test_a_forked_child_logs_nothing_and_leaves_at_once(tmp_path: Path) -> None:
    """A loader worker inherits the sink and the W&B run, collects garbage, and is gone within a second.

    And wherever W&B runs because of this sink, its errors are not reported to anybody.
    """
    program = textwrap.dedent(f"""
        import gc, os, time
        from quiesce_exporters.wandb import Wandb
        sink = Wandb(run="r", role="controller", folder={str(tmp_path)!r})
        sink.events([{{"event": "train.step", "step": 1, "metrics": {{"reward": 0.5}}}}])
        for _ in range(4):
            started = time.monotonic()
            child = os.fork()
            if child == 0:
                sink.events([{{"event": "train.step", "step": 2, "metrics": {{"reward": 0.75}}}}])
                sink.close(1.0)
                del sink
                gc.collect()
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0
            assert time.monotonic() - started < 1.0
        sink.close(2.0)
        import wandb.env
        assert not wandb.env.error_reporting_enabled()
    """)
    environment = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    subprocess.run([sys.executable, "-c", program], timeout=50, check=True, env=environment)
    assert [row["train/reward"] for row in rows(tmp_path)] == [0.5]


def test_without_the_extra_the_message_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Asking for the exporter is refused at once, not when the first step ends."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ExtraMissingError, match=r"pip install 'quiesce\[wandb\]'"):
        make_wandb(context(Path()))


def test_a_mode_that_there_is_not_is_refused(tmp_path: Path) -> None:
    """The message names the key and what there is."""
    with pytest.raises(ConfigError, match=r"wandb.mode: 'offlin' is none of online, offline, disabled"):
        make_wandb(context(tmp_path, mode="offlin"))
