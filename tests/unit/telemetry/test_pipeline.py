"""Queues in front of sinks: nobody waits, everything is counted, the end comes in time."""

import os
import random
import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric

from quiesce.telemetry import pipeline as module
from quiesce.telemetry.finished import FinishedSpan
from quiesce.telemetry.pipeline import Pipeline
from quiesce.telemetry.slot_spans import SlotColumns
from tests.alert_receiver import until
from tests.unit.telemetry.telling import Kept


def spans(count: int) -> list[FinishedSpan]:
    """Make so many spans."""
    return [FinishedSpan("quiesce.slot", 1, number + 1, 0, 5, 6) for number in range(count)]


class Refuses(Kept):
    """A sink that takes nothing."""

    def __init__(self, times: int = 1_000_000) -> None:
        super().__init__()
        self.left = times

    def spans(self, batch: Sequence[FinishedSpan]) -> None:
        """Raise, so many times."""
        if self.left:
            self.left -= 1
            raise ConnectionRefusedError("nobody is there")
        super().spans(batch)


class Picks(Kept):
    """A sink that takes its batches but for some spans of each."""

    def __init__(self, refused: object) -> None:
        super().__init__()
        self.refused: Any = refused

    def spans(self, batch: Sequence[FinishedSpan]) -> Any:  # noqa: ANN401 - some tests say what no sink should
        """Say how many it refused."""
        super().spans(batch)
        return self.refused


class Numbers(Kept):
    """A sink that takes no spans."""

    takes_spans = False


class Hangs(Kept):
    """A sink that never answers."""

    def __init__(self) -> None:
        super().__init__()
        self.entered, self.go = threading.Event(), threading.Event()

    def spans(self, batch: Sequence[FinishedSpan]) -> None:
        """Hang until the test is over."""
        self.entered.set()
        self.go.wait(30)


@pytest.fixture
def hangs() -> Iterator[Hangs]:
    """A sink that hangs, and is let go of at the end."""
    sink = Hangs()
    yield sink
    sink.go.set()


def test_every_sink_is_given_every_span_in_order() -> None:
    """And each span is counted once, however many sinks there are."""
    one, two = Kept(), Kept()
    pipeline = Pipeline({"one": one, "two": two})

    assert pipeline.put_spans(spans(3)) == 3
    assert pipeline.put_spans(spans(2)) == 2
    assert pipeline.flush(10)

    assert one.found == two.found == spans(3) + spans(2)
    assert pipeline.fates() == {"exported": 5}
    assert pipeline.lanes() == {"one": {"delivered": 5}, "two": {"delivered": 5}}
    pipeline.close()
    assert len(one.closed) == 1


def test_what_is_queued_while_a_lane_finds_nothing_is_waited_for() -> None:
    """The thread that has just looked says that it is idle, and a flush would believe it."""
    pipeline = Pipeline({})
    lane = module._Lane(pipeline, "kept", Kept())  # noqa: SLF001 - its thread is never started

    class Meanwhile(deque[Any]):
        def append(self, item: object) -> None:
            lane._idle.set()  # noqa: SLF001 - as the thread does when it has found nothing
            super().append(item)

    lane._batches, lane._events = Meanwhile(), Meanwhile()  # noqa: SLF001
    lane._idle.set()  # noqa: SLF001
    lane.put_event({"event": "run.state"})
    assert not lane.idle(0)
    lane._idle.set()  # noqa: SLF001
    assert lane.put(module._Batch(spans(1), 1))  # noqa: SLF001
    assert not lane.idle(0)
    pipeline.close()


def test_a_span_that_one_of_two_sinks_took_is_exported() -> None:
    """A dead collector beside a recorder: the span is not lost, and the sink's own counts tell of it."""
    pipeline = Pipeline({"dead": Refuses(), "kept": Kept()})

    pipeline.put_spans(spans(3))
    pipeline.flush(10)

    assert pipeline.fates() == {"exported": 3}
    assert pipeline.lanes()["dead"] == {"failed": 3}
    assert pipeline.sink_fates() == {("dead", "failed"): 3, ("kept", "exported"): 3}
    pipeline.close(0.5)


def test_spans_that_a_sink_refuses_in_part_have_failed_there() -> None:
    """It took the batch and says how many it did not; with nobody else to take them they have failed altogether."""
    pipeline = Pipeline({"picks": Picks(4)})

    pipeline.put_spans(spans(3))
    pipeline.put_spans(spans(6))
    pipeline.flush(10)

    assert pipeline.fates() == {"exported": 5, "failed": 4}
    assert pipeline.sink_fates() == {("picks", "exported"): 5, ("picks", "failed"): 4}
    pipeline.close()


def test_spans_that_another_sink_took_are_exported_although_one_refused_some() -> None:
    """One fate a span, and each sink's own beside it."""
    pipeline = Pipeline({"picks": Picks(2), "kept": Kept(), "dead": Refuses()})

    pipeline.put_spans(spans(5))
    pipeline.flush(10)

    assert pipeline.fates() == {"exported": 5}
    assert pipeline.sink_fates() == {
        ("picks", "exported"): 3,
        ("picks", "failed"): 2,
        ("kept", "exported"): 5,
        ("dead", "failed"): 5,
    }
    pipeline.close(0.5)


@pytest.mark.parametrize(
    "said, failed", [(1_000, 3), (-1, 0), (None, 0), (True, 0), ("many", 0), ([1], 0)], ids=repr
)
def test_whatever_a_sink_says_each_span_has_one_fate(said: object, failed: int) -> None:
    """A collector that rejects more than it was sent, and a sink of somebody else's that returns anything."""
    pipeline = Pipeline({"picks": Picks(said)})

    pipeline.put_spans(spans(3))
    assert pipeline.flush(10)

    assert sum(pipeline.fates().values()) == 3
    assert pipeline.fates().get("failed", 0) == failed
    pipeline.close()


def test_a_span_that_every_sink_refused_has_failed() -> None:
    """Nothing is dropped without a counter."""
    pipeline = Pipeline({"dead": Refuses()})

    pipeline.put_spans(spans(3))
    pipeline.flush(10)
    pipeline.close(0.5)

    assert pipeline.fates() == {"failed": 3}


def test_a_sink_that_comes_back_is_used_again() -> None:
    """After a pause."""
    sink = Refuses(times=1)
    pipeline = Pipeline({"flaky": sink})

    pipeline.put_spans(spans(2))
    pipeline.flush(10)
    pipeline.put_spans(spans(3))
    pipeline.flush(10)

    assert len(sink.found) == 3
    assert pipeline.fates() == {"failed": 2, "exported": 3}
    pipeline.close()


def test_a_full_queue_drops_what_comes_and_counts_it(monkeypatch: pytest.MonkeyPatch, hangs: Hangs) -> None:
    """Putting in never waits."""
    monkeypatch.setattr(module, "QUEUE_SPANS", 10)
    pipeline = Pipeline({"hangs": hangs})
    pipeline.put_spans(spans(4))
    assert hangs.entered.wait(10)

    assert pipeline.put_spans(spans(8)) == 8
    assert pipeline.put_spans(spans(8)) == 0

    pipeline.close(0.1)
    assert pipeline.fates() == {"dropped": 16, "failed": 4}


def test_the_end_comes_in_time_whatever_a_sink_does(hangs: Hangs) -> None:
    """One sink hangs, one refuses, one is well: the deadline holds, and all spans have a fate."""
    kept = Kept()
    pipeline = Pipeline({"hangs": hangs, "dead": Refuses(), "kept": kept})
    pipeline.put_spans(spans(5))
    assert hangs.entered.wait(10)
    pipeline.put_spans(spans(5))

    since = time.monotonic()
    pipeline.close(0.5)

    assert time.monotonic() - since < 1.0
    assert pipeline.fates() == {"exported": 10}
    assert len(kept.found) == 10
    assert pipeline.lanes()["hangs"] == {"failed": 5, "dropped": 5}
    assert pipeline.put_spans(spans(1)) == 0
    pipeline.close()


def test_samples_are_read_once_a_period_for_all_sinks() -> None:
    """Reading them costs; sinks share what was read."""
    reads: list[int] = []

    def collect() -> Sequence[Metric]:
        reads.append(1)
        return [GaugeMetricFamily("quiesce_x", "help", 1.0)]

    seen: list[int] = []
    both = threading.Barrier(2, action=lambda: seen.append(len(reads)))

    class Meets(Kept):
        """Waits for the other one at its first samples, so that neither comes to its second before."""

        def samples(self, families: Sequence[Metric], unix_time: float) -> None:
            first = not self.families
            super().samples(families, unix_time)
            if first:
                both.wait(30)

    one, two = Meets(), Meets()
    pipeline = Pipeline({"one": one, "two": two}, collect=collect, sample_seconds=0.2)
    until(lambda: bool(seen), 30)

    assert [family.name for family in one.families] == ["quiesce_x"]
    assert one.families == two.families
    assert seen[0] <= 2
    pipeline.close()
    assert len(reads) >= 2  # the last state is told at the end


def test_the_last_sample_knows_what_became_of_the_last_spans_everywhere() -> None:
    """What records samples is sooner done than a collector that is away; its last sample waits for that one's."""
    sampled = threading.Event()

    class Recorder(Kept):
        def samples(self, families: Sequence[Metric], unix_time: float) -> None:
            super().samples(families, unix_time)
            sampled.set()

    class Away(Kept):
        def spans(self, batch: Sequence[FinishedSpan]) -> None:
            sampled.wait(0.2)  # whoever does not wait has sampled by then
            raise ConnectionRefusedError("nobody is there")

    def collect() -> Sequence[Metric]:
        family = GaugeMetricFamily("quiesce_x", "help", labels=["sink", "fate"])
        for labels, count in pipeline.sink_fates().items():
            family.add_metric(labels, count)
        return [family]

    recorder = Recorder()
    pipeline = Pipeline({"recorder": recorder, "away": Away()}, collect=collect, sample_seconds=60)
    pipeline.put_spans(spans(5))
    pipeline.close(10)

    (family,) = recorder.families
    told = {(sample.labels["sink"], sample.labels["fate"]): sample.value for sample in family.samples}
    assert told == {("recorder", "exported"): 5, ("away", "failed"): 5}


def test_the_last_sample_is_read_once_for_all_that_take_spans() -> None:
    """Reading it takes a part of the time that is left."""
    reads: list[int] = []

    def collect() -> Sequence[Metric]:
        reads.append(1)
        return [GaugeMetricFamily("quiesce_x", "help", 1.0)]

    sinks = {name: Kept() for name in "abc"}
    pipeline = Pipeline(sinks, collect=collect, sample_seconds=60)
    pipeline.put_spans(spans(5))
    pipeline.close(10)

    assert len(reads) == 1
    assert all(sink.families for sink in sinks.values())


def test_the_last_sample_does_not_wait_for_a_sink_that_hangs(
    hangs: Hangs, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is taken while there is time to write it; a sink that takes no spans does not wait at all."""
    monkeypatch.setattr(module, "_LAST_SAMPLE_SECONDS", 9.0)
    kept, numbers = Kept(), Numbers()
    pipeline = Pipeline(
        {"hangs": hangs, "kept": kept, "numbers": numbers},
        collect=lambda: [GaugeMetricFamily("quiesce_x", "help", 1.0)],
        sample_seconds=60,
    )
    pipeline.put_spans(spans(5))
    assert hangs.entered.wait(10)

    closing = threading.Thread(target=pipeline.close, args=(10.0,))
    closing.start()
    until(lambda: bool(kept.closed), 20)
    hangs.go.set()
    closing.join(20)

    assert [family.name for family in kept.families] == ["quiesce_x"]
    assert numbers.closed[0] > 9.0  # of the ten seconds, so it did not wait for the others' last sample


def test_the_period_of_samples_grows_with_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of a minute has a curve, one of a day has no more samples than its scrapes would be."""
    pipeline = Pipeline({})
    began = pipeline._began  # noqa: SLF001 - the clock is moved by hand
    periods = []
    for seconds in (0, 60, 120, 200, 400, 600, 86_400):
        monkeypatch.setattr("quiesce.telemetry.pipeline.time.monotonic", lambda now=began + seconds: now)
        periods.append(round(pipeline.sample_period(), 6))
    monkeypatch.undo()
    pipeline.close()

    assert periods == [5.0, 5.0, 5.0, 5.0, 10.0, 15.0, 15.0]


def test_slots_and_other_spans_reach_a_sink_as_one_batch() -> None:
    """A sink that knows nothing of columns is given spans."""
    columns = SlotColumns(random.Random(5).getrandbits)
    columns.which.append(columns.number("retry") or 0)
    columns.times.extend((1, 2))
    slots = columns.take()
    assert slots is not None
    kept = Kept()
    pipeline = Pipeline({"kept": kept})

    pipeline.put_spans(slots)
    pipeline.put_spans(spans(2))
    assert pipeline.flush(10)

    assert [span.name for span in kept.found] == ["quiesce.slot", *(span.name for span in spans(2))]
    assert pipeline.fates() == {"exported": 3}
    pipeline.close()


def test_log_lines_reach_the_sinks() -> None:
    """And one that finds no room is counted."""
    sink = Kept()
    pipeline = Pipeline({"kept": sink})

    pipeline.put_event({"event": "run.state", "state": "running"})
    assert pipeline.flush(10)

    assert sink.lines == [{"event": "run.state", "state": "running"}]
    pipeline.close()


def test_what_sinks_take_is_timed() -> None:
    """For the histogram of exports, and for what telemetry costs."""
    took: list[int] = []
    pipeline = Pipeline({"kept": Kept()}, exported=took.append)

    pipeline.put_spans(spans(1))
    assert pipeline.flush(10)
    pipeline.close()

    assert took
    assert all(ns >= 0 for ns in took)
    assert pipeline.cpu_ns > 0


def test_a_sink_that_takes_no_spans_is_given_none_and_counts_for_none() -> None:
    """It gets the rest."""
    numbers = Numbers()
    pipeline = Pipeline({"numbers": numbers}, collect=lambda: [GaugeMetricFamily("g", "G", value=1)])

    assert not pipeline.has_sinks
    assert pipeline.put_spans(spans(2)) == 0
    pipeline.put_event({"event": "x"})
    pipeline.close()

    assert pipeline.fates() == {"dropped": 2}
    assert numbers.found == []
    assert numbers.lines
    assert numbers.families


def test_without_a_sink_nothing_goes_anywhere() -> None:
    """And that is counted too."""
    pipeline = Pipeline({})

    assert not pipeline.has_sinks
    assert pipeline.put_spans(spans(2)) == 0
    assert pipeline.flush(0)
    assert pipeline.fates() == {"dropped": 2}
    pipeline.close()


def test_a_forked_child_sends_nothing() -> None:
    """What waited is the parent's to send; the child ends at once."""
    sink = Kept()
    pipeline = Pipeline({"kept": sink})
    child = os.fork()
    if not child:
        code = 1
        try:
            pipeline.put_spans(spans(3))
            pipeline.put_event({})
            flushed = pipeline.flush(5)
            pipeline.close(5)
            code = 0 if flushed and not sink.found and not pipeline.fates() else 2
        finally:
            os._exit(code)

    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    pipeline.put_spans(spans(1))
    assert pipeline.flush(10)
    assert len(sink.found) == 1
    pipeline.close()


def test_a_sink_may_fail_in_anything() -> None:
    """Events, samples and the end."""

    class Broken(Kept):
        def samples(self, families: Sequence[Metric], unix_time: float) -> None:
            raise OSError("disk full")

        def events(self, events: Sequence[Mapping[str, object]]) -> None:
            raise OSError("disk full")

        def close(self, deadline_seconds: float) -> None:
            raise OSError("disk full")

    pipeline = Pipeline({"broken": Broken()}, collect=lambda: [GaugeMetricFamily("quiesce_x", "h", 1.0)])
    pipeline.put_event({"event": "x"})
    pipeline.flush(10)
    pipeline.close(1)

    assert pipeline.lanes()["broken"]["events_dropped"] == 1
