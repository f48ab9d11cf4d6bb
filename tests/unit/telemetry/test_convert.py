"""Slots become spans within a budget, linked to the windows that they met, and named by exemplars."""

import asyncio
import itertools
import random
import threading
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from quiesce.barrier import DataPlaneCheckpointBarrier
from quiesce.observers import Hub
from quiesce.telemetry import names
from quiesce.telemetry.assembly import RunTelemetry
from quiesce.telemetry.collector import QuiesceCollector
from quiesce.telemetry.finished import FinishedSpan
from quiesce.telemetry.slots import RING_SLOTS
from quiesce.testing import in_virtual_time, settle
from tests.barriers import Visitor
from tests.unit.telemetry.exposition import openmetrics_text, parse_openmetrics
from tests.unit.telemetry.telling import Kept, Telling


def barrier_of(scene: Telling) -> DataPlaneCheckpointBarrier:
    """Build a barrier whose clock is the telemetry's."""
    windows = iter(f"cut{number}" for number in range(100))
    return DataPlaneCheckpointBarrier(hub=scene.hub, clock=scene.clock, window_ids=lambda: next(windows))


def slots(
    scene: Telling, count: int, *, spacing_ns: int = 1_000, wait_ns: int = 0, hold_ns: int = 100
) -> None:
    """Close slots, one after the other."""
    for _ in range(count):
        scene.clock.now_ns += spacing_ns
        scene.hub.fire("slot_closed", "retry", wait_ns, hold_ns, "completed", scene.clock.now_ns)


def accounted(scene: Telling) -> tuple[int, int, int]:
    """Return made, sampled and lost."""
    now = scene.run.converter.statistics()
    assert now.waiting == 0
    return now.made, now.sampled, now.lost


class TestSpans:
    """A slot's span."""

    @in_virtual_time
    async def test_a_slot_has_a_span_from_asking_to_leaving(self) -> None:
        """With its kind, its wait and how it ended."""
        scene = Telling()
        barrier, order = barrier_of(scene), list[str]()
        window = Visitor(order, "C", barrier.checkpoint())
        await settle()
        slot = Visitor(order, "w", barrier.mutation("admission"))
        await settle()
        scene.clock.advance(2.0)
        window.leave()
        await settle()
        scene.clock.advance(3.0)
        slot.leave()
        await settle()

        span = scene.told().one("quiesce.slot")

        assert span.end_ns - span.start_ns == 5_000_000_000
        assert span.attributes == {
            "quiesce.kind": "admission",
            "quiesce.wait_seconds": 2.0,
            "quiesce.outcome": "completed",
        }
        assert (span.status, span.parent_id, span.cut_off) == ("ok", 0, False)
        scene.over()

    @in_virtual_time
    async def test_a_cancelled_slot_is_told_from_a_failed_one(self) -> None:
        """Outcome label, span, hold and count: a cancellation inside a slot is not a success."""
        scene = Telling()
        barrier = barrier_of(scene)

        async def body(error: type[BaseException] | None) -> None:
            async with barrier.mutation("retry"):
                scene.clock.advance(0.25)
                if error is not None:
                    raise error
                await asyncio.Event().wait()

        failed, cancelled = asyncio.create_task(body(ValueError)), asyncio.create_task(body(None))
        await settle()
        cancelled.cancel()
        await asyncio.wait({failed, cancelled})
        assert isinstance(failed.exception(), ValueError)

        found = scene.told().named("quiesce.slot")

        assert [(span.attributes["quiesce.outcome"], span.status) for span in found] == [
            ("failed", "error"),
            ("cancelled", ""),
        ]
        numbers = scene.run.observer.slots["retry"]
        assert numbers.ended == {"completed": 0, "failed": 1, "cancelled": 1}
        assert numbers.hold.count == 2
        assert numbers.hold.sum == 0.5
        assert barrier.statistics().active["retry"] == 0
        scene.over()

    @in_virtual_time
    async def test_a_wait_that_was_given_up_has_a_span_too(self) -> None:
        """It says that the slot was never held."""
        scene = Telling()
        barrier, order = barrier_of(scene), list[str]()
        window = Visitor(order, "C", barrier.checkpoint())
        await settle()
        slot = Visitor(order, "w", barrier.mutation("retry"))
        await settle()
        scene.clock.advance(2.0)
        slot.task.cancel()
        await settle()
        window.leave()
        await settle()

        span = scene.told().one("quiesce.slot")

        assert span.attributes["quiesce.held"] is False
        assert span.attributes["quiesce.outcome"] == "cancelled"
        assert span.end_ns - span.start_ns == 2_000_000_000
        scene.over()


class TestLinks:
    """Slots and windows point at each other."""

    @in_virtual_time
    async def test_a_blocked_slot_is_linked_to_the_window_and_the_window_to_those_that_delayed_it(
        self,
    ) -> None:
        """The window names its last holder; a slot that had nothing to do with it is not linked."""
        scene = Telling()
        barrier, order = barrier_of(scene), list[str]()
        before = Visitor(order, "before", barrier.mutation("sample_clear"))
        before.leave()
        await settle()
        scene.clock.advance(1.0)
        quick = Visitor(order, "quick", barrier.mutation("retry"))
        slow = Visitor(order, "slow", barrier.mutation("admission"))
        await settle()
        scene.clock.advance(1.0)
        window = Visitor(order, "C", barrier.checkpoint())
        await settle()
        blocked = Visitor(order, "blocked", barrier.mutation("group_commit"))
        await settle()
        for visitor in (quick, slow, window, blocked):
            scene.clock.advance(1.0)
            visitor.leave()
            await settle()

        kept = scene.told()

        by_kind = {span.attributes["quiesce.kind"]: span for span in kept.named("quiesce.slot")}
        told = kept.one("quiesce.window")
        assert by_kind["group_commit"].links == ((told.trace_id, told.span_id),)
        assert set(told.links) == {
            (by_kind[kind].trace_id, by_kind[kind].span_id) for kind in ("retry", "admission")
        }
        assert told.attributes["quiesce.delayed_by"] == 2
        assert told.attributes["quiesce.last_holder.kind"] == "admission"
        assert told.attributes["quiesce.last_holder.task"] == "slow"
        assert told.attributes["quiesce.last_holder.seconds"] == 2.0
        assert by_kind["sample_clear"].links == ()
        scene.over()

    @in_virtual_time
    async def test_a_window_that_very_many_slots_delayed_is_linked_to_those_that_left_last(self) -> None:
        """To 64 of them, the last holder first; those that leave in the same instant are told apart."""
        scene = Telling()
        barrier, order = barrier_of(scene), list[str]()
        visitors = [Visitor(order, f"t{number}", barrier.mutation("retry")) for number in range(100)]
        await settle()
        window = Visitor(order, "C", barrier.checkpoint())
        await settle()
        for number, visitor in enumerate(visitors):
            if number % 2:  # two at a time
                scene.clock.advance(1.0)
            visitor.leave()
            await settle()
        window.leave()
        await settle()

        kept = scene.told()

        told = kept.one("quiesce.window")
        slots_by_end = sorted(kept.named("quiesce.slot"), key=lambda span: span.end_ns)
        last = {(span.trace_id, span.span_id) for span in slots_by_end[-64:]}
        assert told.attributes["quiesce.last_holder.task"] == "t99"
        assert told.attributes["quiesce.delayed_by"] == 100
        assert told.links[0] == (slots_by_end[-1].trace_id, slots_by_end[-1].span_id)
        assert len(told.links) == len(set(told.links)) == 64
        # The oldest of the 64 left together with one that is not among them, so either of the two may be linked.
        assert len(last - set(told.links)) <= 1
        scene.over()

    @in_virtual_time
    async def test_a_slot_behind_two_windows_is_linked_to_both(self) -> None:
        """And not to one that asked after it."""
        scene = Telling()
        barrier, order = barrier_of(scene), list[str]()
        visitors = [
            Visitor(order, "C1", barrier.checkpoint()),
            Visitor(order, "C2", barrier.checkpoint()),
            Visitor(order, "w", barrier.mutation("retry")),
            Visitor(order, "C3", barrier.checkpoint()),
        ]
        for _ in visitors:
            await settle()
            scene.clock.advance(1.0)
        for visitor in visitors:
            visitor.leave()
            await settle()
            scene.clock.advance(1.0)

        kept = scene.told()

        windows = {span.attributes["quiesce.cut_id"]: span for span in kept.named("quiesce.window")}
        assert kept.one("quiesce.slot").links == tuple(
            (windows[cut].trace_id, windows[cut].span_id) for cut in ("cut1", "cut0")
        )
        scene.over()

    @in_virtual_time
    async def test_a_slot_of_another_barrier_is_not_linked(self) -> None:
        """Windows that overlap in time are told apart by the instant in which they let a slot in."""
        scene = Telling()
        one, order = barrier_of(scene), list[str]()
        other = DataPlaneCheckpointBarrier(hub=scene.hub, clock=scene.clock, window_ids=lambda: "foreign")
        mine, foreign = Visitor(order, "C", one.checkpoint()), Visitor(order, "D", other.checkpoint())
        await settle()
        scene.clock.advance(1.0)
        slot = Visitor(order, "w", one.mutation("retry"))
        await settle()
        for visitor in (mine, slot, foreign):
            scene.clock.advance(1.0)
            visitor.leave()
            await settle()

        kept = scene.told()

        windows = {span.attributes["quiesce.cut_id"]: span for span in kept.named("quiesce.window")}
        assert kept.one("quiesce.slot").links == ((windows["cut0"].trace_id, windows["cut0"].span_id),)
        scene.over()

    @in_virtual_time
    async def test_a_slot_behind_a_window_that_gave_up_is_linked_to_it(self) -> None:
        """Its drain kept the slot waiting."""
        scene = Telling()
        barrier, order = barrier_of(scene), list[str]()
        holder = Visitor(order, "h", barrier.mutation("retry"))
        await settle()
        window = Visitor(order, "C", barrier.checkpoint(drain_timeout=5.0))
        await settle()
        slot = Visitor(order, "w", barrier.mutation("admission"))
        await settle()
        scene.clock.advance(5.0)
        await asyncio.wait({window.task})
        assert window.task.exception() is not None
        slot.leave()
        holder.leave()
        await settle()

        kept = scene.told()

        told = kept.one("quiesce.window")
        waited = next(s for s in kept.named("quiesce.slot") if s.attributes["quiesce.kind"] == "admission")
        assert waited.links == ((told.trace_id, told.span_id),)
        assert (told.status, told.attributes["quiesce.outcome"]) == ("error", "failed")
        assert told.attributes["quiesce.last_holder.task"] == "h"
        scene.over()


class TestBudget:
    """Every slot is made into a span, sampled out, or lost; and counted as that."""

    def test_within_the_budget_every_slot_has_a_span(self) -> None:
        """1,000 a second."""
        scene = Telling(budget=1_000)

        slots(scene, 3_000, spacing_ns=1_000_000)

        assert len(scene.told().named("quiesce.slot")) == 3_000
        assert accounted(scene) == (3_000, 0, 0)
        scene.over()

    def test_past_it_a_sample_of_the_rest_is_kept_evenly(self) -> None:
        """At 10,000 slots a second, a second's budget at once and a tenth afterwards."""
        scene = Telling(budget=1_000)

        slots(scene, 30_000, spacing_ns=100_000)

        found = scene.told().named("quiesce.slot")
        made, sampled, lost = accounted(scene)
        assert made == len(found) == pytest.approx(4_000, rel=0.05)
        assert (made + sampled, lost) == (30_000, 0)
        late = [span for span in found if span.start_ns > found[0].start_ns + 2_000_000_000]
        assert len(late) == pytest.approx(1_000, rel=0.05)
        scene.over()

    @pytest.mark.parametrize("why", ["waited", "slow", "failed", "cancelled", "window"])
    def test_past_it_every_interesting_slot_is_kept(self, why: str) -> None:
        """However many they are."""
        scene = Telling(budget=10)
        slots(scene, 1_000)
        scene.told()
        before = len(scene.kept.named("quiesce.slot"))

        asked_ns = scene.clock.now_ns
        if why == "window":
            scene.hub.fire("window_requested", "cut", asked_ns)
        for _ in range(500):
            scene.clock.now_ns += 1_000
            now = scene.clock.now_ns
            wait_ns = 7 if why == "waited" else 0
            hold_ns = {"slow": 20_000_000, "window": now - asked_ns}.get(why, 100)
            outcome = why if why in {"failed", "cancelled"} else "completed"
            scene.hub.fire("slot_closed", "retry", wait_ns, hold_ns, outcome, now)

        assert len(scene.told().named("quiesce.slot")) - before == 500
        scene.over()

    @pytest.mark.parametrize("budget", [0, None])
    def test_a_budget_that_is_lifted_keeps_everything(self, budget: float | None) -> None:
        """For a test bench, say."""
        scene = Telling(budget=budget)

        slots(scene, 5_000, spacing_ns=1)

        assert len(scene.told().named("quiesce.slot")) == 5_000
        scene.over()

    def test_what_the_converter_could_not_keep_up_with_is_counted(self) -> None:
        """Made, sampled and lost are all slots, and the metric says so."""
        scene = Telling(budget=1_000)

        slots(scene, RING_SLOTS + 500, spacing_ns=10)
        scene.told()

        made, sampled, lost = accounted(scene)
        assert lost == 500
        assert made + sampled + lost == scene.run.recorder.closed == RING_SLOTS + 500
        totals = scene.run.totals()
        assert totals["exported"] + totals["sampled"] + totals["dropped"] == RING_SLOTS + 500
        scene.over()

    @pytest.mark.parametrize("how", ["provider", "columns"])
    def test_a_slot_that_cannot_be_told_is_lost_and_no_other(
        self, how: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Whatever raises, and however spans are made: each slot has one fate, and the totals say which."""
        scene = Telling()
        if how == "provider":
            scene.run.converter._tracing.slots = None  # noqa: SLF001 - as where an application's provider makes spans
        emit, calls = scene.run.converter._tracing.emit, itertools.count()  # noqa: SLF001 - whoever makes spans

        def raises(*args: Any, **options: Any) -> Any:  # noqa: ANN401 - passed on
            if next(calls) % 10 == 3:
                raise ZeroDivisionError
            return emit(*args, **options)

        monkeypatch.setattr(scene.run.converter._tracing, "emit", raises)  # noqa: SLF001 - as above
        slots(scene, 60, wait_ns=7)
        slots(scene, 40)

        scene.told()

        lost = 10 if how == "provider" else 6
        assert accounted(scene) == (100 - lost, 0, lost)
        assert len(scene.kept.named("quiesce.slot")) == 100 - lost
        totals = scene.run.totals()
        assert (totals["exported"], totals["dropped"]) == (100 - lost, lost)
        scene.over()

    def test_no_global_generator_is_drawn_from(self) -> None:
        """The run's own draws are the same with telemetry on."""
        random.seed(5)
        expected = random.random()
        random.seed(5)
        scene = Telling(budget=10)

        slots(scene, 2_000)
        scene.told()

        assert random.random() == expected
        scene.over()


def exemplars(scene: Telling) -> list[tuple[str, dict[str, str], str, float, float]]:
    """Scrape in OpenMetrics, and return (family, labels, le, exemplar's value, exemplar's time)."""
    registry = CollectorRegistry(support_collectors_without_names=True)
    registry.register(QuiesceCollector(scene.run.observer, scene.hub, run="r1"))
    found = []
    for family in parse_openmetrics(openmetrics_text(registry)):
        for sample in family.samples:
            if sample.exemplar is not None:
                said = sample.exemplar
                assert sum(len(name) + len(value) for name, value in said.labels.items()) <= 128
                found.append(
                    (family.name, said.labels, sample.labels["le"], said.value, float(said.timestamp or 0))
                )
    return found


class TestExemplars:
    """A bucket names a span that went somewhere."""

    def test_an_exemplar_names_a_span_that_a_sink_was_given(self) -> None:
        """Its trace can be looked up, and its value is in its bucket."""
        scene = Telling()
        kept = DataPlaneCheckpointBarrier(hub=scene.hub)
        slots(scene, 1, hold_ns=3_000)
        slots(scene, 1, wait_ns=7_000_000, hold_ns=40_000_000)

        sent = {(f"{s.trace_id:032x}", f"{s.span_id:016x}") for s in scene.told().found}

        found = exemplars(scene)
        assert {family for family, *_ in found} == {
            "quiesce_mutation_hold_seconds",
            "quiesce_mutation_wait_seconds",
        }
        assert len(found) == 3
        for _, labels, le, value, _ in found:
            assert (labels["trace_id"], labels["span_id"]) in sent
            assert value <= float(le)
        assert kept.kinds
        scene.over()

    def test_a_span_that_was_sampled_out_is_no_exemplar(self) -> None:
        """Nobody could look it up."""
        scene = Telling(budget=1)
        kept = DataPlaneCheckpointBarrier(hub=scene.hub)
        slots(scene, 1, hold_ns=100)
        slots(scene, 1, hold_ns=3_000)
        scene.told()

        assert accounted(scene) == (1, 1, 0)
        assert [value for *_, value, _ in exemplars(scene)] == [1e-07]
        assert kept.kinds
        scene.over()

    def test_a_span_that_no_sink_took_in_is_no_exemplar(self) -> None:
        """A closed pipeline."""
        scene = Telling()
        kept = DataPlaneCheckpointBarrier(hub=scene.hub)
        scene.run.pipeline.close()
        slots(scene, 1)

        while scene.run.converter.convert():
            pass

        assert exemplars(scene) == []
        assert kept.kinds
        scene.over()

    def test_times_of_a_bucket_only_grow(self) -> None:
        """Prometheus rejects an exemplar that is not later than the one before, and warns at every scrape."""
        scene = Telling()
        kept = DataPlaneCheckpointBarrier(hub=scene.hub)
        seen: list[float] = []
        for _ in range(8):
            slots(scene, 20, spacing_ns=20_000_000, hold_ns=100)
            scene.clock.now_ns -= 1_000_000  # another loop's slot, recorded late
            slots(scene, 1, spacing_ns=0, hold_ns=100)
            scene.told()
            seen += [at for *_, at in exemplars(scene)]

        assert len(set(seen)) == 8
        assert seen == sorted(seen)
        assert kept.kinds
        scene.over()

    def test_phases_and_steps_have_exemplars_too(self) -> None:
        """The rare histograms are those that people click on."""
        scene = Telling()
        kept = DataPlaneCheckpointBarrier(hub=scene.hub)
        scene.hub.fire("window_requested", "c", 1_000)
        scene.hub.fire("window_opened", "c", 500, (), 1_500)
        scene.hub.fire("window_closed", "c", 500, 700, "completed", 2_200)
        scene.hub.attach("trainer_version", kept)
        scene.hub.fire("train_step_ended", 1, 1, 5_000_000, 4, "completed", {})
        scene.told()

        found = {family for family, *_ in exemplars(scene)}

        assert found == {"quiesce_checkpoint_phase_seconds", "quiesce_train_step_seconds"}
        scene.over()

    def test_closes_of_gates_and_batches_of_cleanup_have_exemplars_too(self) -> None:
        """Each names its own span; a failed try is a clear, but no batch."""
        scene = Telling()
        kept = DataPlaneCheckpointBarrier(hub=scene.hub)
        scene.hub.attach("snapshot_gate", kept)
        scene.hub.attach("cleanup", kept)
        scene.hub.fire("gate_closed", "0", 1, "1.1", 5_000, "closed")
        scene.hub.fire("clear_ended", "0", 3, 8, 7_000_000, "completed", ())
        scene.clock.advance(1.0)
        scene.hub.fire("clear_ended", "0", 60, 8, 9_000, "failed", ())
        told = scene.told()

        lit = {(family, value): labels["span_id"] for family, labels, _, value, _ in exemplars(scene)}

        done, failed = (f"{span.span_id:016x}" for span in told.named("quiesce.cleanup.batch"))
        assert lit == {
            ("quiesce_snapshot_gate_close_seconds", 5e-06): f"{told.one('quiesce.gate.close').span_id:016x}",
            ("quiesce_cleanup_clear_seconds", 0.007): done,
            ("quiesce_cleanup_clear_seconds", 9e-06): failed,
            ("quiesce_cleanup_batch_calls", 3): done,
        }
        assert kept.kinds
        scene.over()


class TestThread:
    """The thread that converts."""

    async def test_slots_are_converted_while_the_loop_goes_on(self) -> None:
        """Every one within the budget arrives, without anybody asking."""
        hub, kept = Hub(strict=True), Kept()
        run = RunTelemetry(hub, sinks={"kept": kept}, budget=0)
        run.start()
        barrier = DataPlaneCheckpointBarrier(hub=hub)
        for _ in range(300):
            async with barrier.mutation("retry"):
                await asyncio.sleep(0)

        assert await asyncio.to_thread(run.flush, 10.0)

        assert len(kept.named("quiesce.slot")) == 300
        run.close()

    async def test_a_flush_waits_until_what_was_converted_is_in_the_pipeline(self) -> None:
        """A span that has been made and not been handed over would be missing in whatever the flush was for."""
        hub, kept = Hub(strict=True), Kept()
        run = RunTelemetry(hub, sinks={"kept": kept}, budget=0)
        converter = run.converter
        hand_over = converter._hand_over  # noqa: SLF001 - the moment of it
        held, may_go = threading.Event(), threading.Event()

        def late() -> None:
            if converter.statistics().made:
                held.set()
                assert may_go.wait(30)
            hand_over()

        converter._hand_over = late  # type: ignore[method-assign] # noqa: SLF001 - as above
        run.start()
        try:
            async with DataPlaneCheckpointBarrier(hub=hub).mutation("retry"):
                pass
            assert await asyncio.to_thread(held.wait, 30)

            assert not converter.flush(0.05)
        finally:
            may_go.set()
        assert converter.flush(30)
        assert run.pipeline.flush(30)
        assert len(kept.named("quiesce.slot")) == 1
        run.close()

    def test_what_it_cannot_make_a_span_of_is_counted_and_it_goes_on(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        """One odd hook call does not end telemetry."""
        scene = Telling(hub=Hub())
        scene.hub.fire("gate_closed", "too", "few")
        scene.hub.fire("weight_synced", 1, "text", "completed")
        slots(scene, 1)

        found: list[FinishedSpan] = scene.told().found

        assert [span.name for span in found] == ["quiesce.slot"]
        assert scene.run.converter.statistics().errors == 2
        assert len([record for record in caplog.records if "could not be told" in record.message]) == 1
        scene.over()

    def test_a_clock_that_was_set_is_followed(self) -> None:
        """Unix times come from a monotonic clock plus an offset, which is measured again now and then."""
        scene = Telling()
        slots(scene, 1)
        first = scene.told().found[-1].end_ns
        slots(scene, 1, spacing_ns=20_000_000_000)
        scene.told()
        slots(scene, 1)

        # The real clock did not move by those 20 s, so after the next measurement the span does not either.
        assert scene.told().found[-1].end_ns - first < 10_000_000_000
        scene.over()


def test_every_label_of_a_phase_is_known() -> None:
    """What the story calls a phase's span is a span of the catalogue."""
    phase = names.METRICS["quiesce_checkpoint_phase"].labels[0]
    assert all(f"quiesce.checkpoint.{value}" in names.SPANS for value in phase.values)
