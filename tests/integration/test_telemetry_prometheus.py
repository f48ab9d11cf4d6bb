"""A real Prometheus that scrapes several processes of a run: sums that hold still, exemplars, and what a death leaves."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from quiesce.telemetry.recording import Recording
from tests.alert_stack import free_port
from tests.unit.telemetry.exposition import parse_classic

pytestmark = pytest.mark.distribution

ROOT = Path(__file__).parents[2]
PROMETHEUS = ROOT / ".tools" / "bin" / "prometheus"
WORKERS = 4
PATIENCE_SECONDS = 30.0

CONFIG = """
global: {{scrape_interval: 1s, scrape_timeout: 1s}}
scrape_configs:
  - job_name: quiesce
    file_sd_configs: [{{files: ["{targets}/*.json"]}}]
"""


class Worker:
    """A process of :mod:`tests.integration.telemetry_worker`."""

    def __init__(self, number: int, targets: Path, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self.role = f"worker-{number}"
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "tests.integration.telemetry_worker",
                str(number),
                str(targets),
                str(folder),
            ],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def line(self) -> str:
        """Return what it says next."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def count(self) -> None:
        """Have it open ten slots."""
        assert self.process.stdin is not None
        self.process.stdin.write("count\n")
        self.process.stdin.flush()

    def end(self, number: int) -> int:
        """Send a signal, and wait for its end."""
        self.process.send_signal(number)
        self.process.communicate(timeout=20)
        return self.process.returncode


class Scene:
    """The processes and the Prometheus that scrapes them."""

    def __init__(self, folder: Path) -> None:
        self.targets = folder / "targets"
        self.targets.mkdir()
        self.workers = [Worker(n, self.targets, folder / f"run-{n}") for n in range(WORKERS)]
        self.urls = [worker.line() for worker in self.workers]
        config = folder / "prometheus.yml"
        config.write_text(CONFIG.format(targets=self.targets))
        port = free_port()
        self.base = f"http://127.0.0.1:{port}/api/v1"
        self.log = folder / "prometheus.log"
        with self.log.open("wb") as log:
            self.prometheus = subprocess.Popen(
                [
                    PROMETHEUS,
                    f"--config.file={config}",
                    f"--storage.tsdb.path={folder / 'tsdb'}",
                    f"--web.listen-address=127.0.0.1:{port}",
                    "--enable-feature=exemplar-storage",
                ],
                cwd=folder,
                stdout=log,
                stderr=log,
            )

    def ask(self, what: str, **parameters: object) -> Any:  # noqa: ANN401 - JSON
        """Ask the API."""
        url = f"{self.base}/{what}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=10) as answer:  # noqa: S310 - our own loopback URL
            return json.load(answer)["data"]

    def value(self, query: str) -> float | None:
        """Return the value of a query that has one result, or None."""
        found = self.ask("query", query=query)["result"]
        return float(found[0]["value"][1]) if found else None

    def until(self, query: str, wanted: float | None) -> None:
        """Wait until a query has that value."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        last: object = None
        while time.monotonic() < deadline:
            try:
                last = self.value(query)
            except OSError as error:  # it is still starting
                last = error
            if last == wanted:
                return
            time.sleep(0.05)
        pytest.fail(f"{query} never became {wanted}; it is {last}; {self.log.read_text()[-2000:]}")

    def close(self) -> None:
        """End everything."""
        self.prometheus.kill()
        self.prometheus.wait()
        for worker in self.workers:
            worker.process.kill()
            worker.process.communicate()


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """Four processes that Prometheus has scraped before anything happened in them."""
    made = Scene(tmp_path_factory.mktemp("prometheus"))
    try:
        made.until("count(up == 1)", WORKERS)
        made.until('sum(quiesce_mutation_sections_total{kind="retry"})', 0)
        yield made
    finally:
        made.close()


RETRIES = 'quiesce_mutation_sections_total{kind="retry",outcome="completed"}'


def scraped(url: str) -> float:
    """Return how many retries a process has counted."""
    url = f"{url}?name[]=quiesce_mutation_sections_total"
    with urllib.request.urlopen(url, timeout=10) as answer:  # noqa: S310 - our own loopback URL
        text = answer.read().decode()
    (value,) = (
        sample.value
        for family in parse_classic(text)
        for sample in family.samples
        if sample.name == "quiesce_mutation_sections_total"
        and (sample.labels["kind"], sample.labels["outcome"]) == ("retry", "completed")
    )
    return float(value)


def test_several_processes_are_one_run_to_prometheus(scene: Scene) -> None:
    """Sums hold still, exemplars resolve, and a process that died takes its gauges along."""
    since = time.time()
    for worker in scene.workers:
        worker.count()
    assert [worker.line() for worker in scene.workers] == ["counted"] * WORKERS
    scene.until(f"sum({RETRIES})", 40)

    no_scrape_bounces(scene, since)
    exemplars_resolve(scene, since)
    the_dead_are_gone(scene)


def no_scrape_bounces(scene: Scene, since: float) -> None:
    """Each process answers for itself, so the sum is the same at each scrape, and nothing looks like a restart."""
    assert {sum(map(scraped, scene.urls)) for _ in range(25)} == {40}
    assert scene.value(f"max_over_time(sum({RETRIES})[1m:100ms])") == 40
    assert scene.value(f"sum(resets({RETRIES}[1m]))") == 0
    query = f"sum(rate({RETRIES}[5s]))"
    rates = scene.ask("query_range", query=query, start=since, end=time.time(), step=0.5)
    highest = max(float(value) for series in rates["result"] for _, value in series["values"])
    # All forty happened between two scrapes, of which Prometheus makes twice as many at the most; a restart is hundreds.
    assert 0 < highest <= 2 * 40 / 5


def exemplars_resolve(scene: Scene, since: float) -> None:
    """Prometheus keeps them, and each names a span that its process recorded."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    found: list[Any] = []
    while len({series["seriesLabels"]["role"] for series in found}) < WORKERS and time.monotonic() < deadline:
        found = scene.ask(
            "query_exemplars",
            query="quiesce_mutation_hold_seconds_bucket",
            start=since - 60,
            end=time.time() + 60,
        )
        time.sleep(0.05)
    assert len({series["seriesLabels"]["role"] for series in found}) == WORKERS
    for worker in scene.workers:
        spans = {
            (f"{span.trace_id:032x}", f"{span.span_id:016x}"): (span.end_ns - span.start_ns) / 1e9
            for span in Recording.open(worker.folder).spans()
            if span.name == "quiesce.slot"
        }
        own = [series for series in found if series["seriesLabels"]["role"] == worker.role]
        exemplars = [exemplar for series in own for exemplar in series["exemplars"]]
        assert exemplars
        for exemplar in exemplars:
            labels = exemplar["labels"]
            assert float(exemplar["value"]) == pytest.approx(
                spans[labels["trace_id"], labels["span_id"]], abs=1e-6
            )


def the_dead_are_gone(scene: Scene) -> None:
    """By the next scrape, however a process ended; one that was told to end withdraws its target as well."""
    active = 'sum(quiesce_mutation_slots{state="active"})'
    killed, told = scene.workers[:2]
    scene.until(active, WORKERS)

    assert killed.end(signal.SIGKILL) == -signal.SIGKILL
    scene.until(active, WORKERS - 1)
    scene.until(f'count({{role="{killed.role}",__name__=~"quiesce_.+"}})', None)
    assert len(list(scene.targets.iterdir())) == WORKERS

    assert (told.folder / "metrics.json").exists()
    assert told.end(signal.SIGTERM) == -signal.SIGTERM
    scene.until(active, WORKERS - 2)
    scene.until("count(up)", WORKERS - 1)
    assert len(list(scene.targets.iterdir())) == WORKERS - 1
    assert not (told.folder / "metrics.json").exists()
