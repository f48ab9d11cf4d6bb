"""The catalogue: conventions, closed sets, buckets, and how many series it allows."""

import re

import pytest

from quiesce.barrier import KINDS
from quiesce.checkpoint.cut import PARTS
from quiesce.invariants import INVARIANTS
from quiesce.telemetry import names
from quiesce.types import DROP_REASONS, OUTCOMES, OWNERS, PHASES

METRICS = list(names.METRICS.values())


def series(metric: names.Metric, kinds: tuple[str, ...] = KINDS) -> int:
    """How many series a family has."""
    per_child = len(metric.buckets) + 3 if metric.type == "histogram" else 1  # +Inf, sum, count
    return per_child * len(metric.label_sets(kinds))


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_names_follow_the_conventions_of_prometheus(metric: names.Metric) -> None:
    """Prefix, base unit last, `_total` on counters and on nothing else, `_info` on infos."""
    assert re.fullmatch(r"quiesce_[a-z][a-z0-9_]*", metric.name)
    assert (metric.type == "counter") == metric.name.endswith("_total")
    assert (metric.type == "info") == metric.name.endswith("_info")
    assert not re.search(r"_(ms|us|ns|milliseconds|percent|kib|mib|gib)(_|$)", metric.name)
    if metric.unit:
        assert metric.family.endswith(f"_{metric.unit}")
    assert metric.help
    assert not metric.help.endswith(".")


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_no_label_carries_an_identity(metric: names.Metric) -> None:
    """Ids, steps and paths would make a series of every group; labels are closed sets and constants."""
    for label in metric.labels:
        assert label.name not in {
            "group",
            "group_id",
            "step",
            "cut_id",
            "id",
            "path_name",
            "file",
            *names.CONSTANT_LABELS,
        }
        assert label.constant or label.values


def test_histograms_have_ascending_buckets_and_nothing_else_has_any() -> None:
    """Buckets belong to histograms, and bisect needs them sorted."""
    for metric in METRICS:
        assert (metric.type == "histogram") == bool(metric.buckets)
        assert list(metric.buckets) == sorted(set(metric.buckets))


def test_bounds_are_what_they_say() -> None:
    """A bound is the double nearest to its decimal text, from 1 µs to 100 s and from 100 µs to 1 h."""
    assert names.SLOT_BUCKETS[:4] == (1e-06, 2.5e-06, 5e-06, 1e-05)
    assert names.SLOT_BUCKETS[-1] == 100.0
    assert names.PHASE_BUCKETS[0] == 1e-04
    assert names.PHASE_BUCKETS[-1] == 3600.0


def test_phase_durations_apart_land_in_finite_buckets_apart() -> None:
    """0.2 ms, 20 ms, 3 s, 45 s and 20 min are told apart; nothing of it is above the last bound."""
    found = [
        next(bound for bound in names.PHASE_BUCKETS if value <= bound) for value in (2e-4, 2e-2, 3, 45, 1200)
    ]

    assert len(set(found)) == 5


def test_a_quantile_of_45_seconds_is_near_the_truth() -> None:
    """Linear interpolation inside a bucket, as `histogram_quantile` does it, keeps p99 within 25 %."""
    bounds = (0.0, *names.PHASE_BUCKETS)
    index = next(index for index, bound in enumerate(bounds) if bound >= 45.0)

    estimate = bounds[index - 1] + 0.99 * (bounds[index] - bounds[index - 1])

    assert estimate == pytest.approx(45.0, rel=0.25)


def test_closed_sets_are_those_of_the_primitives() -> None:
    """Where a primitive has the set, the catalogue does not have another one."""
    assert names.CUT_PARTS == PARTS
    assert names.METRICS["quiesce_checkpoint_phase"].labels[0].values == PHASES
    assert names.METRICS["quiesce_groups"].labels[0].values == OWNERS
    assert names.METRICS["quiesce_mutation_slots"].labels[0].values == KINDS
    assert names.METRICS["quiesce_prompts_dropped_total"].labels[0].values == DROP_REASONS
    assert set(INVARIANTS) <= set(names.INVARIANTS)
    assert set(names.WINDOW_PHASES) < set(PHASES)
    assert set(names.ENDED) < set(OUTCOMES)


def test_a_completed_attempt_has_no_reason_and_every_other_has_one() -> None:
    """The children of the attempts are the combinations that can be."""
    children = names.METRICS["quiesce_checkpoint_attempts_total"].label_sets()

    assert [reason for outcome, reason in children if outcome == "completed"] == [""]
    assert all(reason for outcome, reason in children if outcome != "completed")
    assert {outcome for outcome, _ in children} == set(OUTCOMES)


def test_a_kind_of_a_user_costs_what_a_built_in_one_does() -> None:
    """The limit of kinds is reckoned with it; what all of them come to is counted in a scrape, elsewhere."""
    own = (*KINDS, "own")

    assert sum(series(metric, own) - series(metric) for metric in METRICS) == 54


def test_buckets_of_waits_and_work_reach_far_enough() -> None:
    """A wait is told from none, a slow sink from one that waits for its time limit, a gate that gave up from a slow one."""
    assert names.WAIT_BUCKETS[0] == names.SLOT_BUCKETS[0]
    assert names.WAIT_BUCKETS[-1] == names.SLOT_BUCKETS[-1]
    assert names.WORK_BUCKETS[-1] == 60.0
    assert names.EXPORT_BUCKETS[-1] == 10.0
    assert set(names.WINDOW_OPS) < set(names.DATAPLANE_OPS)


def test_log_events_are_dotted_and_described() -> None:
    """Each event has a dotted name, a known level, a sentence, and fields that the log does not use."""
    for name, event in names.LOG_EVENTS.items():
        assert name == event.name
        assert re.fullmatch(r"[a-z]+\.[a-z_]+", name)
        assert event.help
        assert not {"timestamp", "level", "event", "run", "role"} & set(event.fields)
    assert names.log_event("run.state").level == "info"
    with pytest.raises(KeyError):
        names.log_event("run.unheard_of")
