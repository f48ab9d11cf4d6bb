"""The spans and the scrape of a real controller's run, against the catalogue, both ways."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from quiesce import GenerationRequest, GroupResult, RunSummary
from quiesce.observers import Hub
from quiesce.telemetry import names
from quiesce.telemetry.assembly import RunTelemetry
from quiesce.telemetry.collector import QuiesceCollector
from quiesce.telemetry.finished import FinishedSpan
from quiesce.testing import in_virtual_time
from quiesce.training import TrainBatch
from tests.run_rig import CrashError, Run, delays, result_of
from tests.unit.telemetry.telling import Kept


class Watched:
    """A run in two lives, watched: the first is killed in its third step, the second resumes and ends."""

    def __init__(self, path: Path) -> None:
        self.kept = Kept()
        self.families: set[str] = set()
        self.fates: list[tuple[dict[str, float], int]] = []
        self.run = Run(path, sync_weights=self._sync, before_step=self._before)
        self._dies = True

    async def _sync(self, version: int) -> None:
        await asyncio.sleep(0.01)

    async def _before(self, batch: TrainBatch) -> None:
        await asyncio.sleep(0.5)
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
        hub: Hub = built._hub  # noqa: SLF001 - the rig makes it
        with self._watching(hub):
            try:
                return await built.run(resume=resume)
            finally:
                self.run.folder.close()

    @contextmanager
    def _watching(self, hub: Hub) -> Iterator[None]:
        telemetry = RunTelemetry(hub, sinks={"kept": self.kept}, budget=0)
        telemetry.start(thread=False)
        collector = QuiesceCollector(telemetry.observer, hub, run="r1")
        try:
            yield
        finally:
            telemetry.close(10)
            self.families |= {family.name for family in collector.collect()}
            self.fates.append((telemetry.totals(), telemetry.recorder.closed))
            assert hub.errors == {}
            assert telemetry.converter.statistics().errors == 0


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Watched:
    """The run, once for all tests."""

    @in_virtual_time
    async def live() -> Watched:
        run = Watched(tmp_path_factory.mktemp("run") / "run")
        run.run.check_all_accounted(await run.live())
        return run

    return live()


def by_id(watched: Watched) -> dict[int, FinishedSpan]:
    """Index the run's spans."""
    return {span.span_id: span for span in watched.kept.found}


def test_every_span_of_the_catalogue_is_made_and_no_other(watched: Watched) -> None:
    """By what really happens in a run."""
    assert {span.name for span in watched.kept.found} == set(names.SPANS)


def test_attributes_and_parents_are_those_of_the_catalogue(watched: Watched) -> None:
    """None has one that is not listed; a root is a root, or its parent's child."""
    spans = by_id(watched)

    for span in watched.kept.found:
        spec = names.span_spec(span.name)
        assert set(span.attributes) <= {*spec.attributes, *names.COMMON_ATTRIBUTES}
        if span.parent_id:
            assert spans[span.parent_id].name == spec.parent
            assert spans[span.parent_id].trace_id == span.trace_id
        else:
            # A group that was restored began in another life; its rollout has no group's span above it there.
            assert not spec.parent or span.name == "quiesce.rollout"


def test_every_family_of_the_catalogue_is_scraped_and_no_other(watched: Watched) -> None:
    """But those of a GPU, which there is none."""
    wanted = {metric.family for metric in names.METRICS.values() if "gpu" not in metric.needs}

    assert watched.families == wanted


def test_every_slot_has_exactly_one_fate(watched: Watched) -> None:
    """Nothing was sampled out or lost, and every sink took everything."""
    for totals, closed in watched.fates:
        assert closed > 0
        assert totals["sampled"] == totals["dropped"] == totals["failed"] == 0
    slots = watched.kept.named("quiesce.slot")
    assert len(slots) == sum(closed for _, closed in watched.fates)


def test_every_group_can_be_followed_to_its_end(watched: Watched) -> None:
    """By its id, through both lives: the last span of each ends in training."""
    last = {str(span.attributes["quiesce.group_id"]): span for span in watched.kept.named("quiesce.group")}

    assert set(last) == watched.run.every_group()
    assert {span.attributes.get("quiesce.end") for span in last.values()} == {"trained"}
    rollouts = {span.attributes["quiesce.group_id"] for span in watched.kept.named("quiesce.rollout")}
    assert rollouts == watched.run.every_group()


def test_what_the_kill_cut_off_is_marked(watched: Watched) -> None:
    """Groups that were alive at the kill are exported all the same; the second life cuts nothing off."""
    cut = [span for span in watched.kept.found if span.cut_off]

    assert cut
    assert {span.name for span in cut} <= {
        "quiesce.group",
        "quiesce.rollout",
        "quiesce.checkpoint",
        "quiesce.checkpoint.write",
    }
    failed = [span for span in watched.kept.named("quiesce.train.step") if span.status == "error"]
    assert len(failed) == 1


@pytest.mark.parametrize("seed", [1, 2])
def test_telemetry_changes_no_step(tmp_path: Path, seed: int) -> None:
    """Rollouts that end in a scrambled order are trained in the same steps with every span on, and without any."""

    @in_virtual_time
    async def steps(name: str, *, on: bool) -> tuple[list[tuple[int, tuple[str, ...]]], float]:
        delay = delays(seed)

        async def generate(request: GenerationRequest) -> GroupResult:
            await asyncio.sleep(delay(request.index))
            return result_of(request)

        random.seed(seed)
        run = Run(tmp_path / name, prompts=40, generate=generate, in_memory=True)
        built = run.start(save_every_steps=3)
        telemetry = RunTelemetry(built._hub, sinks={"kept": Kept()}, budget=0)  # noqa: SLF001 - as above
        if on:
            telemetry.start()
        try:
            await built.run()
        finally:
            telemetry.close(10)
            run.folder.close()
        return run.steps, random.random()

    assert steps("on", on=True) == steps("off", on=False)
