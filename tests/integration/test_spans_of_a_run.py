"""The spans and the scrape of a real controller's run, against the catalogue, both ways."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import TracerProvider

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
            assert not spec.parent


def test_every_family_of_the_catalogue_is_scraped_and_no_other(watched: Watched) -> None:
    """But those of a GPU and of engines, of which there are none."""
    absent = {"gpu", "engine"}
    wanted = {
        metric.family
        for metric in names.METRICS.values()
        if not metric.needs or not absent.issuperset(metric.needs)
    }

    assert watched.families == wanted


def test_every_slot_has_exactly_one_fate(watched: Watched) -> None:
    """Nothing was sampled out or lost, and every sink took everything."""
    for totals, closed in watched.fates:
        assert closed > 0
        assert totals["sampled"] == totals["dropped"] == totals["failed"] == 0
    slots = watched.kept.named("quiesce.slot")
    assert len(slots) == sum(closed for _, closed in watched.fates)


def test_a_restore_tells_all_of_its_parts(watched: Watched) -> None:
    """Whatever the second life restored, in order, within its span."""
    restored = watched.kept.one("quiesce.restore")
    parts = watched.kept.named("quiesce.restore.part")

    told = [str(part.attributes["quiesce.part"]) for part in parts]
    assert told == ["verify", "prompts", "trainer", "rows", "documents"]
    assert set(told) == set(names.RESTORE_PARTS) - {names.OTHER}
    assert {part.parent_id for part in parts} == {restored.span_id}
    assert {part.status for part in parts} == {restored.status} == {"ok"}
    assert restored.start_ns == parts[0].start_ns
    assert restored.end_ns == parts[-1].end_ns
    assert all(one.end_ns <= other.start_ns for one, other in pairwise(parts))


def test_what_is_told_of_a_restored_group_is_in_its_trace(watched: Watched) -> None:
    """Its life in the second process begins with the restore, and holds its rollouts there."""
    restored = watched.kept.one("quiesce.restore")
    groups = [
        span
        for span in watched.kept.named("quiesce.group")
        if span.attributes["quiesce.from"] != "read" and not span.cut_off
    ]

    assert {span.attributes["quiesce.from"] for span in groups} >= {"ledger"}
    assert {span.start_ns for span in groups} == {restored.end_ns}
    parents = {span.parent_id for span in watched.kept.named("quiesce.rollout")}
    assert parents & {span.span_id for span in groups}


def test_every_hand_over_of_weights_has_a_span(watched: Watched) -> None:
    """One before the first rollout of each life, and one after each step."""
    synced = [span.attributes["quiesce.version"] for span in watched.kept.named("quiesce.weight_sync")]
    steps = [span for span in watched.kept.named("quiesce.train.step") if span.status == "ok"]

    assert synced[0] == 0
    assert len(synced) == len(steps) + 2


@pytest.mark.parametrize("corrupt", [False, True])
@in_virtual_time
async def test_a_restore_belongs_under_what_the_application_does(tmp_path: Path, *, corrupt: bool) -> None:
    """Its checkpoint is looked for in a thread, which is nobody else's; so is one that turns out to be corrupt."""
    run = Run(tmp_path / "run", in_memory=True)
    await run.go(save_every_steps=2)
    if corrupt:
        newest = max(path for path in run.folder.checkpoints.iterdir() if path.name != "step_0")
        (newest / "ledger.json").write_bytes(b"{}")
    built = run.start(resume=True)
    hub: Hub = built._hub  # noqa: SLF001 - the rig makes it
    kept = Kept()
    telemetry = RunTelemetry(hub, sinks={"kept": kept}, budget=0)
    telemetry.start(thread=False)
    telemetry.converter.convert()  # finds OpenTelemetry

    with TracerProvider().get_tracer("app").start_as_current_span("resume") as outer:
        await built.run(resume=True)
    run.folder.close()
    telemetry.close(10)

    around = outer.get_span_context()
    restored = kept.named("quiesce.restore")
    assert len(restored) == 1 + corrupt
    assert {(span.trace_id, span.parent_id) for span in restored} == {(around.trace_id, around.span_id)}


@in_virtual_time
async def test_a_trainer_whose_state_cannot_be_loaded_is_a_restore_that_failed(tmp_path: Path) -> None:
    """Its span says in which part, and that is an error."""
    run = Run(tmp_path / "run", in_memory=True)
    await run.go(save_every_steps=2)
    built = run.start(resume=True)
    hub: Hub = built._hub  # noqa: SLF001 - the rig makes it
    kept = Kept()
    telemetry = RunTelemetry(hub, sinks={"kept": kept}, budget=0)
    telemetry.start(thread=False)

    async def load(directory: Path) -> None:
        raise EOFError(directory)

    run.weights.load = load  # type: ignore[method-assign] # a state that is cut short
    with pytest.raises(EOFError):
        await built.run(resume=True)
    run.folder.close()
    telemetry.close(10)

    restored = kept.one("quiesce.restore")
    told = {part.attributes["quiesce.part"]: part.status for part in kept.named("quiesce.restore.part")}
    assert told == {"verify": "ok", "prompts": "ok", "trainer": "error"}
    assert (restored.status, restored.attributes["quiesce.outcome"]) == ("error", "failed")


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
