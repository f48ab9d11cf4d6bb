"""A controller's run that is scraped, recorded and exported over OTLP at once: what arrives, and what it changes."""

from __future__ import annotations

import asyncio
import random
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from quiesce import GenerationRequest, GroupResult, RunSummary
from quiesce.checkpoint import files
from quiesce.checkpoint.trainer_state import Staged
from quiesce.telemetry import names
from quiesce.telemetry.enable import MetricsHandle, enable_metrics
from quiesce.telemetry.finished import FinishedSpan
from quiesce.telemetry.recording import Recording
from quiesce.testing import in_virtual_time
from quiesce.training import TrainBatch
from tests import run_rig
from tests.otlp_receiver import Received, grpc_receiver, http_receiver
from tests.run_rig import CrashError, Run, delays, result_of
from tests.unit.telemetry.exposition import parse_openmetrics

RECEIVERS = {"http/protobuf": http_receiver, "grpc": grpc_receiver}

HOPS = {"create_task": 1001, "to_thread": 1002, "run_in_executor": 1003, "submit": 1004, "thread": 1005}
"""The ways in which a trainer's write leaves its task, and how many bytes each of them writes."""


class Weights(run_rig.Weights):
    """Weights that are written from tasks, executors and plain threads."""

    async def stage(self) -> Staged:
        """Copy the list."""
        return _Hopping(list(self.trained))


class _Hopping(run_rig._StagedWeights):  # noqa: SLF001 - the rig's own, with more files
    async def write(self, directory: Path) -> None:
        """Write the list, and a file from each kind of place."""

        def put(name: str) -> None:
            files.write_durable(directory / f"{name}.bin", bytes(HOPS[name]))

        async def in_task() -> None:
            put("create_task")

        await asyncio.create_task(in_task())
        await asyncio.to_thread(put, "to_thread")
        await asyncio.get_running_loop().run_in_executor(None, put, "run_in_executor")
        with ThreadPoolExecutor(1) as pool:
            await asyncio.wrap_future(pool.submit(put, "submit"))
        thread = threading.Thread(target=put, args=("thread",))
        thread.start()
        await asyncio.to_thread(thread.join)
        await super().write(directory)


def scrape(handle: MetricsHandle) -> dict[str, Any]:
    """Fetch the families as a Prometheus server does, by name."""
    accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
    request = urllib.request.Request(handle.url, headers=accept)  # noqa: S310 - our own loopback URL
    with urllib.request.urlopen(request, timeout=20) as answer:  # noqa: S310 - as above
        text = answer.read().decode()
    return {family.name: family for family in parse_openmetrics(text)}


class Lives:
    """A run in two lives with every way out open: the first is killed in its third step, the second ends.

    Attributes:
        received: What the collector was sent.
        first: The scrape of a life when its first step begins, before anything was saved.
        last: The scrape at its end.
        totals: What became of spans, by life.
        made: Spans that were made, by life.
    """

    def __init__(self, path: Path, received: Received) -> None:
        self.received = received
        self.path = path
        self.first: dict[str, Any] = {}
        self.last: dict[str, Any] = {}
        self.totals: list[dict[str, float]] = []
        self.made: list[int] = []
        self.run = Run(path, sync_weights=self._sync, before_step=self._before)
        self._dies = True

    async def _sync(self, version: int) -> None:
        await asyncio.sleep(0.01)

    async def _before(self, batch: TrainBatch) -> None:
        await asyncio.sleep(0.5)
        if not self.first:
            self.first = scrape(self._handle)
        if self._dies and batch.step == 3:
            raise CrashError

    async def live(self) -> RunSummary:
        """Live twice."""
        with pytest.raises(CrashError):
            await self._live(resume=False)
        self._dies = False
        summary = await self._live(resume=True)
        assert summary is not None
        return summary

    async def _live(self, *, resume: bool) -> RunSummary | None:
        built = self.run.start(resume=resume, save_every_steps=2)
        hub = built._hub  # noqa: SLF001 - the rig makes it
        handle = enable_metrics(
            "r1",
            0,
            hub=hub,
            run_dir=self.path,
            exporters=["recorder", "otlp"],
            spans_per_second=float("inf"),
        )
        self._handle = handle
        self.first = {}
        try:
            return await built.run(resume=resume)
        finally:
            self.last = scrape(handle)
            assert handle.telemetry.flush(20)
            handle.close()
            now = handle.telemetry.converter.statistics()
            self.totals.append(handle.telemetry.totals())
            self.made.append(now.made + now.others)
            assert now.errors == 0
            assert hub.errors == {}
            self.run.folder.close()

    def recorded(self) -> list[FinishedSpan]:
        """Return the spans of the run folder."""
        return list(Recording.open(self.path).spans())


@pytest.fixture(scope="module", params=list(RECEIVERS))
def lives(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lives]:
    """The run, once for all tests and each protocol."""
    with pytest.MonkeyPatch.context() as patch, RECEIVERS[request.param]() as (url, received):
        patch.setattr(run_rig, "Weights", Weights)
        patch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        patch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", request.param)
        made = Lives(tmp_path_factory.mktemp("run") / "run", received)

        @in_virtual_time
        async def live() -> None:
            made.run.check_all_accounted(await made.live())

        live()
        yield made


def ids(span: FinishedSpan) -> tuple[int, int, int]:
    """Return a span's trace, its own and its parent's identifier."""
    return span.trace_id, span.span_id, span.parent_id


def test_every_span_of_the_catalogue_arrives_and_is_recorded(lives: Lives) -> None:
    """All kinds, each one once, the same at the collector and in the run's folder, and all are accounted for."""
    arrived = [
        (
            span.name,
            *(int.from_bytes(part, "big") for part in (span.trace_id, span.span_id, span.parent_span_id)),
        )
        for span in lives.received.spans()
    ]
    recorded = [(span.name, *ids(span)) for span in lives.recorded()]

    assert {name for name, *_ in arrived} == set(names.SPANS)
    assert len(set(arrived)) == len(arrived)
    assert sorted(arrived) == sorted(recorded)
    assert len(arrived) == sum(lives.made)
    assert sum(total["exported"] for total in lives.totals) == len(arrived)
    for total in lives.totals:
        assert total["sampled"] == total["dropped"] == total["failed"] == 0


def test_a_save_is_one_trace_however_its_work_hops(lives: Lives) -> None:
    """Files that are written from tasks, executors and threads are parts of their save's write."""
    spans = lives.recorded()
    by_id = {span.span_id: span for span in spans}
    saves = [span for span in spans if span.name == "quiesce.checkpoint" and span.status == "ok"]

    assert len(saves) > 1
    assert len({save.trace_id for save in saves}) == len(saves)
    for save in saves:
        parts = [s for s in spans if s.attributes.get("quiesce.cut_id") == save.attributes["quiesce.cut_id"]]
        assert {part.trace_id for part in parts} == {save.trace_id}
        for part in parts:
            spec = names.span_spec(part.name)
            assert (by_id[part.parent_id].name if part.parent_id else "") == spec.parent
        synced = [part for part in parts if part.name == "quiesce.checkpoint.fsync"]
        sizes = [part.attributes["quiesce.bytes"] for part in synced]
        assert set(HOPS.values()) <= set(sizes)
        assert {by_id[part.parent_id].attributes["quiesce.cut_id"] for part in synced} == {
            save.attributes["quiesce.cut_id"]
        }


def test_bounds_are_the_catalogues_on_either_way(lives: Lives) -> None:
    """A histogram's buckets are those of the catalogue in the scrape and over OTLP."""
    sent = lives.received.metrics()
    histograms = [
        metric for metric in names.METRICS.values() if metric.buckets and metric.family in lives.last
    ]

    assert len(histograms) > 5
    for metric in histograms:
        for point in sent[metric.family].histogram.data_points:
            assert tuple(point.explicit_bounds) == metric.buckets
            assert sum(point.bucket_counts) == point.count
        scraped = {
            float(sample.labels["le"])
            for sample in lives.last[metric.family].samples
            if sample.name.endswith("_bucket")
        }
        assert scraped == {*metric.buckets, float("inf")}


def test_names_and_labels_agree_on_either_way(lives: Lives) -> None:
    """What a collector's Prometheus exporter makes of an OTLP metric is the name that is scraped."""
    words = {"s": "_seconds", "By": "_bytes", "1": "_ratio", "Cel": "_celsius", "": ""}
    sent = lives.received.metrics()

    # An info is the one kind that OTLP lacks, so there it is a gauge with the name that is scraped.
    infos = {name for name, family in lives.last.items() if family.type == "info"}
    assert sent.keys() == {f"{name}_info" if name in infos else name for name in lives.last}
    for name, metric in sent.items():
        kind = metric.WhichOneof("data")
        points = getattr(metric, kind).data_points
        unit = words[metric.unit]
        written = name if name.endswith(unit) else name + unit
        written += "_total" if kind == "sum" else ""
        family = lives.last[name if name in lives.last else name.removesuffix("_info")]
        wanted = {
            sample.name.removesuffix("_bucket").removesuffix("_count").removesuffix("_sum")
            for sample in family.samples
        }
        if points:
            assert wanted == {written}
        labels = {frozenset(known.key for known in point.attributes) for point in points}
        assert labels == {frozenset(sample.labels) - {"le"} for sample in family.samples}


def test_what_may_never_happen_is_there_at_zero_from_the_first_scrape(lives: Lives) -> None:
    """So the first time is an increase."""
    for short in ("invariant_violations", "checkpoint_attempts", "restore_refusals", "prompts_dropped"):
        name = f"quiesce_{short}"
        spec = names.METRICS[f"{name}_total"]
        values = [sample.value for sample in lives.first[name].samples if sample.name.endswith("_total")]
        assert len(values) >= len(spec.children or (1, 2, 3))
        assert set(values) == {0}
    counted = lives.first.keys() & {
        n for n, family in lives.last.items() if family.type in {"counter", "histogram"}
    }
    for name in counted:
        now = {(s.name, *sorted(s.labels.items())) for s in lives.last[name].samples}
        assert now == {(s.name, *sorted(s.labels.items())) for s in lives.first[name].samples}


@pytest.mark.parametrize("seed", [3])
def test_prompts_are_trained_in_the_same_order_with_everything_on(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recorded, exported and scraped without a pause, or not at all: the same groups in the same steps."""

    @in_virtual_time
    async def steps(name: str, url: str | None) -> tuple[list[tuple[int, tuple[str, ...]]], float]:
        delay = delays(seed)

        async def generate(request: GenerationRequest) -> GroupResult:
            await asyncio.sleep(delay(request.index))
            return result_of(request)

        random.seed(seed)
        path = tmp_path / name
        run = Run(path, prompts=40, generate=generate, in_memory=True)
        built = run.start(save_every_steps=3)
        handle = None
        if url is not None:
            hub = built._hub  # noqa: SLF001 - as above
            handle = enable_metrics("r1", 0, hub=hub, run_dir=path, exporters=["recorder", "otlp"])
        over = threading.Event()
        scraped = threading.Thread(target=scrape_all_the_time, args=(handle, over))
        scraped.start()
        try:
            await built.run()
        finally:
            over.set()
            scraped.join()
            if handle is not None:
                handle.close()
            run.folder.close()
        return run.steps, random.random()

    with http_receiver() as (url, received):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf")
        on = steps("on", url)
        assert received.spans()
    off = steps("off", None)

    assert on == off


def scrape_all_the_time(handle: MetricsHandle | None, over: threading.Event) -> None:
    """Scrape until the run is over."""
    while handle is not None and not over.is_set():
        scrape(handle)
