"""Bins over time: bounded, adding up, and honest about silence."""

import math

import pytest

from quiesce.report.timeline import BINS, GAP_SECONDS, Timeline, percentile


def test_bins_stay_few_and_nothing_is_lost() -> None:
    """A run of any length has at most twice BINS bins, and what was added up stays what it was."""
    timeline = Timeline(1000.0)
    grown, last = timeline.increases(), timeline.values()
    seconds = 3 * 86400
    for second in range(0, seconds, 15):
        index = timeline.index(1000.0 + second)
        grown.add(index, 2.0)
        last.set(index, float(second))

    assert BINS <= timeline.last + 1 <= 2 * BINS
    assert sum(grown.bins) == grown.total == 2.0 * seconds / 15
    assert len(timeline.times()) == len(timeline.padded(grown)) == timeline.last + 1
    filled = timeline.filled(last)
    assert filled == sorted(value for value in filled if value is not None)
    assert filled[-1] == seconds - 15


def test_the_last_value_of_a_bin_wins_when_two_become_one() -> None:
    """An earlier value stays only where the later half said nothing."""
    timeline = Timeline(0.0)
    values = timeline.values()
    for index, value in ((0, 1.0), (1, 2.0), (2, 3.0)):
        values.set(index, value)
    values.halve()
    assert values.bins == [2.0, 3.0]


def test_an_unchanged_value_is_carried_on_and_silence_is_a_gap() -> None:
    """Samples that say nothing new mean the same value; no samples at all mean nothing."""
    timeline = Timeline(0.0)
    values = timeline.values()
    values.set(timeline.index(0.0), 5.0)
    timeline.index(15.0)
    timeline.index(400.0)
    values.set(timeline.index(415.0), 6.0)

    filled = timeline.filled(values)
    assert filled[: 15 + int(GAP_SECONDS)] == [5.0] * (15 + int(GAP_SECONDS))
    assert filled[300] is None
    assert filled[400] == 5.0
    assert filled[415] == 6.0


def test_a_time_before_the_start_counts_in_the_first_bin() -> None:
    """A line that waited in a queue may be older than its file."""
    assert Timeline(100.0).index(99.0) == 0


@pytest.mark.parametrize(
    "share, expected",
    [(0.0, 1.0), (0.5, 2.0), (0.75, 3.0), (1.0, 4.0)],
)
def test_a_percentile_is_where_prometheus_estimates_it(share: float, expected: float) -> None:
    """Within a bucket values lie evenly: two in (1, 2], two in (2, 4]."""
    assert percentile([1.0, 2.0, 4.0, math.inf], [0, 2, 2, 0], share) == pytest.approx(expected)


def test_past_the_last_bound_the_bound_is_all_that_is_known() -> None:
    """What lies in the infinite bucket is at least the last finite bound; without values there is nothing."""
    assert percentile([1.0, math.inf], [0, 3], 0.5) == 1.0
    assert percentile([1.0, math.inf], [0, 0], 0.5) is None
