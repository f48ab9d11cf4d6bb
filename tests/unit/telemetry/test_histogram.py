"""Plain-list histograms and numbers."""

import threading

import pytest

from quiesce.telemetry import names
from quiesce.telemetry.histogram import (
    NANOSECONDS,
    Histogram,
    HistogramFamily,
    NumberFamily,
    bounds_ns,
    known,
)


def test_a_value_on_a_bound_belongs_to_the_bucket_below_it() -> None:
    """Bounds are inclusive, as Prometheus's `le` says."""
    histogram = Histogram((1.0, 2.0))

    for value in (0.5, 1.0, 1.5, 2.0, 2.5):
        histogram.observe(value)

    assert histogram.buckets() == [("1.0", 2), ("2.0", 4), ("+Inf", 5)]
    assert (histogram.sum, histogram.count) == (7.5, 5)


def test_nanoseconds_become_seconds() -> None:
    """What is observed in nanoseconds is exported in seconds, without rounding a bound away."""
    histogram = Histogram(names.SLOT_BUCKETS, scale=NANOSECONDS)

    histogram.observe(1_000)  # exactly the first bound
    histogram.observe(1_001)

    assert histogram.buckets()[0] == ("1e-06", 1)
    assert histogram.buckets()[1] == ("2.5e-06", 2)
    assert histogram.sum == pytest.approx(2.001e-6)


def test_bounds_in_nanoseconds_are_whole_and_distinct() -> None:
    """Every bound of the catalogue survives the change of unit."""
    assert bounds_ns(names.SLOT_BUCKETS)[:3] == (1_000, 2_500, 5_000)
    assert len(set(bounds_ns(names.PHASE_BUCKETS))) == len(names.PHASE_BUCKETS)


def test_two_histograms_may_share_a_list() -> None:
    """Each keeps to its own items."""
    cells: list[float] = [0] * 8
    first = Histogram((1.0, 2.0), cells=cells)
    second = Histogram((1.0, 2.0), cells=cells, start=4)

    first.observe(1.5)
    second.observe(9.0)

    assert cells == [0, 1, 0, 1.5, 0, 0, 1, 9.0]
    assert first.buckets() == [("1.0", 0), ("2.0", 1), ("+Inf", 1)]
    assert second.buckets() == [("1.0", 0), ("2.0", 0), ("+Inf", 1)]


def test_threads_add_up() -> None:
    """Bumps from several threads are all there in the end."""
    histogram = Histogram((1.0,))
    start = threading.Barrier(4)

    def work() -> None:
        start.wait()
        for _ in range(20_000):
            histogram.observe(0.5)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert histogram.count == 80_000
    assert histogram.sum == 40_000.0


def test_every_child_exists_from_the_start() -> None:
    """Both kinds of families hold every label set of the catalogue at zero."""
    phases = HistogramFamily(names.CHECKPOINT_PHASE_SECONDS)
    moved = NumberFamily(names.GROUPS_MOVED)

    assert set(phases.children) == set(names.CHECKPOINT_PHASE_SECONDS.label_sets())
    assert set(moved.values) == set(names.GROUPS_MOVED.label_sets())
    assert not any(moved.values.values())
    assert not any(child.count for child in phases.children.values())


def test_labels_that_the_catalogue_does_not_know_are_refused() -> None:
    """An unknown label value is a mistake that is heard, not a new series."""
    numbers = NumberFamily(names.TRAINER_STALL)
    phases = HistogramFamily(names.CHECKPOINT_PHASE_SECONDS)

    with pytest.raises(KeyError):
        numbers.add(1, "coffee")
    with pytest.raises(KeyError):
        numbers.set(1, "coffee")
    with pytest.raises(KeyError):
        phases.observe(1, "coffee", "completed")
    assert set(numbers.values) == set(names.TRAINER_STALL.label_sets())


def test_a_state_is_one_of_its_family() -> None:
    """Setting one state unsets every other."""
    state = NumberFamily(names.RUN_STATE)

    state.set_only("running")
    state.set_only("finished")

    assert {labels for labels, value in state.values.items() if value} == {("finished",)}


def test_a_surprise_is_counted_as_other() -> None:
    """A value outside of its set becomes `other`."""
    assert known("disk", names.CHECKPOINT_REASONS) == "disk"
    assert known("gremlins", names.CHECKPOINT_REASONS) == "other"
