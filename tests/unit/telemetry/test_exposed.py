"""Families that are kept from one scrape to the next: the same object when there is nothing new."""

from prometheus_client.core import HistogramMetricFamily

from quiesce.telemetry import names
from quiesce.telemetry.exposed import KeptFamilies
from quiesce.telemetry.histogram import HistogramFamily

METRIC = names.DATAPLANE_OP


def kept() -> tuple[KeptFamilies, HistogramFamily]:
    """Return what keeps families, and a family of histograms that counts."""
    return KeptFamilies({"run": "r1"}), HistogramFamily(METRIC)


def expected(counting: HistogramFamily) -> HistogramMetricFamily:
    """Return the family as prometheus_client makes it."""
    family = HistogramMetricFamily(
        METRIC.family, METRIC.help, labels=("run", *METRIC.label_names), unit=METRIC.unit
    )
    for labels, histogram in counting.children.items():
        buckets = [
            (bound, count) if lit is None else (bound, count, lit)
            for bound, count, lit in histogram.lit_buckets()
        ]
        family.add_metric(("r1", *labels), buckets, histogram.sum)
    return family


def test_a_family_says_what_prometheus_client_would_have_it_say() -> None:
    """Name, unit, and every sample in its order, with its exemplar; the first time and after changes."""
    families, counting = kept()
    for number in range(3):
        family = families.histograms(METRIC, counting.children)
        assert family == expected(counting)
        counting.observe(5_000 * 10**number, "put")
        counting.children["get",].observe(70)
        counting.children["get",].light(70, (1, 2), number * 1_000_000_000)
    assert families.histograms(METRIC, counting.children) == expected(counting)


def test_what_has_not_changed_is_the_same_object() -> None:
    """The family as a whole, and in one that has changed every sample that has not."""
    families, counting = kept()
    first = families.histograms(METRIC, counting.children)
    before = first.samples

    assert families.histograms(METRIC, counting.children) is first
    counting.observe(5_000, "put")
    second = families.histograms(METRIC, counting.children)

    assert second is not first
    same = [old is new for old, new in zip(before, second.samples, strict=True)]
    assert {
        sample.labels["op"] for sample, is_same in zip(second.samples, same, strict=True) if not is_same
    } == {"put"}
    assert 0 < sum(same) < len(same)


def test_a_family_is_a_snapshot() -> None:
    """What is counted before its samples are made is not in them."""
    families, counting = kept()
    family = families.histograms(METRIC, counting.children)

    counting.observe(5_000, "put")

    assert {sample.value for sample in family.samples} == {0}


def test_numbers_are_kept_too() -> None:
    """Of counters and gauges."""
    families, _ = kept()
    first = families.numbers(names.GROUPS_MOVED, {("read", "ledger"): 1.0, ("ledger", "buffer"): 0.0})

    again = families.numbers(names.GROUPS_MOVED, {("read", "ledger"): 1.0, ("ledger", "buffer"): 0.0})
    changed = families.numbers(names.GROUPS_MOVED, {("read", "ledger"): 2.0, ("ledger", "buffer"): 0.0})

    assert again is first
    assert [sample.value for sample in first.samples] == [1.0, 0.0]
    assert [(sample.name, sample.value) for sample in changed.samples] == [
        ("quiesce_groups_moved_total", 2.0),
        ("quiesce_groups_moved_total", 0.0),
    ]
    assert changed.samples[1] is first.samples[1]
    assert changed.samples[0].labels == {"run": "r1", "from": "read", "to": "ledger"}
