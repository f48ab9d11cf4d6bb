"""A real run, recorded by a real Prometheus, and told again to others at another pace.

A run is short here and long in earnest, so its samples are re-timed: each scrape stays one scrape, but lies 15 or 60
seconds after the one before it, and what is a moment in Unix time moves with it. `promtool` makes blocks of them.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import yaml

from quiesce.telemetry import names
from quiesce_dashboards.objectives import AlertConfig
from quiesce_dashboards.rules import ALERTS_FILE, build
from tests.alert_receiver import until
from tests.alert_stack import TOOLS, free_port, program, prometheus

__all__ = ["RUN", "Recording", "Series", "Server", "backfilled", "record", "selector"]

RUN: Final = "mine"

TRIGGERS: Final = AlertConfig(
    run_down_seconds=1.0, window_budget_ratio=1e-6, window_objectives={"drain": 1.0, "exclusive": 0.005}
)
"""Numbers with which the recorded run has firing alerts: its first life is killed, and it saves."""

SAVES: Final = 6
"""Steps of a life, in which it saves twice."""

SCRAPES: Final = 6
"""How often the first life is scraped; the second one twice as often."""

PATIENCE: Final = 200.0
"""Seconds that a life may take to get there, on a machine that has much else to do."""

DRILL: Final = "early-cursor"
"""What is broken in the second life."""

Labels = tuple[tuple[str, str], ...]
Series = dict[Labels, list[tuple[float, float]]]
"""Times and values by labels, the name among them."""


@dataclass(frozen=True)
class Server:
    """A Prometheus that answers."""

    url: str

    def get(self, path: str, **parameters: str | float) -> Any:  # noqa: ANN401 - what JSON can say
        """Return the data of an answer.

        Raises:
            AssertionError: If it is an error; the message has Prometheus' own.
        """
        words = urllib.parse.urlencode(
            {key.replace("match", "match[]"): value for key, value in parameters.items()}
        )
        request = urllib.request.Request(f"{self.url}/api/v1/{path}?{words}")  # noqa: S310 - an address of this test
        try:
            with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310 - as above
                return json.load(answer)["data"]
        except urllib.error.HTTPError as refused:
            raise AssertionError(f"{path} {parameters}: {refused.read().decode()}") from refused

    def instant(self, expression: str, at: float) -> list[dict[str, Any]]:
        """Return the series of an expression at one time."""
        result = self.get("query", query=expression, time=at)["result"]
        assert isinstance(result, list)
        return result

    def ranged(self, expression: str, begin: float, end: float, step: float) -> list[dict[str, Any]]:
        """Return the series of an expression over a range, whose ends Grafana moves to multiples of the step."""
        result = self.get(
            "query_range",
            query=expression,
            start=math.floor(begin / step) * step,
            end=math.floor(end / step) * step,
            step=step,
        )["result"]
        assert isinstance(result, list)
        return result


@dataclass
class Recording:
    """What a Prometheus has scraped, once a second.

    Attributes:
        series: Every sample.
        begin: Unix time of the first one.
        end: Unix time of the last one.
        killed: Unix time at which the first life was killed.
        exemplars: Answers for expressions that ask for exemplars.
    """

    series: Series
    begin: float
    end: float
    killed: float
    exemplars: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    def told_at(self, interval: float, end: float) -> Series:
        """Return the samples as if one scrape came so many seconds after the other.

        Args:
            interval: The seconds.
            end: Unix time of the last scrape.
        """

        def moved(moment: float) -> float:
            return end - (self.end - moment) * interval

        told: Series = {}
        for labels, samples in self.series.items():
            name = dict(labels)["__name__"]
            moment = name.endswith("_timestamp_seconds") or name == "ALERTS_FOR_STATE"
            expected = name == names.CHECKPOINT_EXPECTED_INTERVAL.name
            told[labels] = list(
                {
                    # On the beat, as a Prometheus keeps it: what a scrape came late is not made longer too.
                    moved(self.end - round(self.end - at)): (
                        moved(value) if moment and value > 0 else value * interval if expected else value
                    )
                    for at, value in samples
                }.items()
            )
        return told


def record(folder: Path, exemplars: Sequence[str]) -> Recording:
    """Train, kill, resume, drill, and return what a Prometheus saw of it.

    Args:
        folder: Where all of it is kept.
        exemplars: Expressions that exemplars are asked for.
    """
    targets = folder / "targets"
    targets.mkdir()
    build(folder / "rules", TRIGGERS)
    begin = time.time()
    with prometheus(
        folder,
        rules=folder / "rules" / ALERTS_FILE,
        targets=targets,
        alertmanagers=(),
        port=free_port(),
        interval="1s",
        further=("--enable-feature=exemplar-storage",),
    ) as url:
        run = folder / "run"
        words = (
            "tiny",
            "--run-dir",
            str(run),
            f"name={RUN}",
            f"controller.save_every_steps={SAVES // 2}",
            "metrics.port=0",
            "warmup.steps=5",
            "task.size=2000",
            # A busy machine takes its time with a window now and then, which is not what the alerts are asked about.
            "metrics.objectives={drain: 60, exclusive: 5}",
        )
        server = Server(url)
        with _training(folder, targets, *words) as process:
            until(lambda: _saved(run) >= SAVES and _seen(server, begin) >= SCRAPES, PATIENCE)
            process.kill()
        killed, saved = time.time(), _saved(run)
        again = (
            "--run-dir",
            str(run),
            "--resume",
            "metrics.linger_seconds=3",
            "controller.audit.drills=true",
        )
        with _training(folder, targets, *again) as process:
            _drill(run)
            until(lambda: _saved(run) >= saved + SAVES and _seen(server, killed + 2) >= 2 * SCRAPES, PATIENCE)
            # While it still trains, because that is when somebody looks.
            [last] = server.instant("max(timestamp(quiesce_trainer_version))", time.time())
            end = float(last["value"][1])
            span = f"{end - begin:.0f}s"
            seen = server.get("query", query=f'{{__name__=~".+"}}[{span}]', time=end)["result"]
            told = {
                expression: server.get("query_exemplars", query=expression, start=begin, end=end + 1)
                for expression in exemplars
            }
            process.kill()
    series: Series = {
        tuple(sorted(one["metric"].items())): [
            (at, float(value)) for at, value in one["values"] if not math.isnan(float(value))
        ]
        for one in seen
    }
    series = {labels: samples for labels, samples in series.items() if samples}
    first = min(at for samples in series.values() for at, _ in samples)
    return Recording(series, first, end, killed, told)


def _saved(run: Path) -> int:
    """Return the newest step that is published."""
    names = (path.name.partition("_")[2] for path in (run / "checkpoints").glob("step_*"))
    return max((int(step) for step in names if step.isdigit()), default=0)


def _seen(server: Server, since: float) -> int:
    """Return how many scrapes have seen a trainer since then."""
    time.sleep(0.2)  # leaves the processor to what is watched
    span = max(1, int(time.time() - since))
    counts = server.instant(f"count_over_time(quiesce_trainer_version[{span}s])", time.time())
    return sum(int(one["value"][1]) for one in counts)


@contextmanager
def _training(folder: Path, targets: Path, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    environment = {**os.environ, "QUIESCE_SD_DIR": str(targets), "NO_COLOR": "1"}
    with (folder / "train.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "quiesce.cli", "train", *words],
            stdout=log,
            stderr=log,
            env=environment,
            cwd=folder,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait(20)


@contextmanager
def backfilled(
    folder: Path, interval: float, *told: Series, text: Callable[[], Iterator[str]] | None = None
) -> Iterator[Server]:
    """Run a Prometheus that has these samples, and scrapes nothing.

    Args:
        folder: Where it is kept; made.
        interval: Seconds between two samples. A series that ends is over after three: a backfill cannot mark it as
            stale, as a scrape does.
        told: The samples.
        text: Further lines of OpenMetrics.
    """
    folder.mkdir()
    source = folder / "samples.om"
    with source.open("w", encoding="utf-8") as out:
        for series in told:
            for labels, samples in series.items():
                out.writelines(f"{selector(dict(labels))} {value} {at:.3f}\n" for at, value in samples)
        if text is not None:
            out.writelines(text())
        out.write("# EOF\n")
    made = subprocess.run(
        [
            TOOLS / "promtool",
            "tsdb",
            "create-blocks-from",
            "openmetrics",
            "--max-block-duration=54h",
            "--quiet",
            source,
            folder / "data",
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert made.returncode == 0, made.stderr
    source.unlink()
    (folder / "prometheus.yml").write_text(
        yaml.safe_dump({"global": {"scrape_interval": "1m"}}), encoding="utf-8"
    )
    url = f"http://127.0.0.1:{(port := free_port())}"
    arguments = (
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        "--storage.tsdb.retention.time=10y",
        f"--query.lookback-delta={3 * interval:.0f}s",
        f"--web.listen-address=127.0.0.1:{port}",
    )
    with program(TOOLS / "prometheus", folder, *arguments, ready=f"{url}/-/ready"):
        yield Server(url)


def selector(labels: Mapping[str, str]) -> str:
    """Return labels as a series of the text format."""
    inside = ",".join(f"{key}={json.dumps(value)}" for key, value in labels.items() if key != "__name__")
    return f"{labels['__name__']}{{{inside}}}"


def _drill(run: Path) -> None:
    """Break something in a running run: the next checkpoint is refused, and the one after it is not."""
    until((run / "drills" / "desk.json").exists, PATIENCE)
    done = subprocess.run(
        [sys.executable, "-m", "quiesce.cli", "drill", DRILL, "--run-dir", run, "--json"],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
