"""Metric families as prometheus_client has them, made of samples only when somebody looks at those.

Rule: a family is a snapshot: it was copied when it was collected, and says the same whenever it is looked at. A family
in which nothing has changed since the last collection is the very object that was given out then, so who is given one
reads it and changes nothing in it, and knows by its identity that there is nothing new. Histograms are most of all
series, and making their samples is most of what a scrape costs; so they are made when ``samples`` is first read, out of
those that the family before had, and who can use the numbers as they are reads ``children`` instead. Two scrapes may come
at once, from different threads: each works on what it found, and the last one's is kept. Nothing here suspends.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.samples import Sample

if TYPE_CHECKING:
    from quiesce.telemetry.histogram import Exemplars, Histogram
    from quiesce.telemetry.names import Metric

__all__ = ["Child", "HistogramSnapshot", "KeptFamilies"]

_Labels = tuple[str, ...]


class Child(NamedTuple):
    """A histogram as it was collected.

    Attributes:
        histogram: It: its bounds, say, never change.
        cells: Its counts by bucket, not added up, and its sum, in observed units.
        exemplars: By the number of their bucket.
    """

    histogram: Histogram
    cells: list[float]
    exemplars: Exemplars


_Made = dict[_Labels, tuple[Child, list[Sample]]]
"""Samples that were made, each child's beside what they were made of."""


class HistogramSnapshot(Family):
    """A family of histograms.

    Args:
        metric: Its entry in the catalogue.
        constant: Labels of every series.
        children: Its children by their label values.
        made: Samples that were made last for any snapshot of this family.

    Attributes:
        label_names: Names of the labels of a child, without the constant ones and without ``le``.
        children: What was given.
    """

    def __init__(
        self, metric: Metric, constant: Mapping[str, str], children: Mapping[_Labels, Child], made: _Made
    ) -> None:
        super().__init__(metric.family, metric.help, "histogram", metric.unit)
        self.label_names = metric.label_names
        self.children = children
        self._constant = constant
        self._made = made
        self._samples: list[Sample] | None = None

    @property
    def samples(self) -> list[Sample]:
        """Its samples: of each child the buckets, the count and the sum."""
        if self._samples is None:
            self._samples = [sample for labels in self.children for sample in self.samples_of(labels)]
        return self._samples

    @samples.setter
    def samples(self, samples: list[Sample]) -> None:
        """Leave them to be made; the base class begins with none."""
        self._samples = None

    def samples_of(self, labels: _Labels) -> list[Sample]:
        """Return the samples of one child.

        Raises:
            KeyError: If there is no such child.
        """
        child, before = self.children[labels], self._made.get(labels)
        if before is not None and before[0] is child:
            return before[1]
        buckets = child.histogram.exposed(child.cells, child.exemplars)
        count, total = buckets[-1][1], child.histogram.scaled(child.cells[-1])
        if before is None:
            named = {**self._constant, **dict(zip(self.label_names, labels, strict=True))}
            name = f"{self.name}_bucket"
            samples = [
                Sample(name, {**named, "le": bound}, value, None, exemplar)
                for bound, value, exemplar in buckets
            ]
            samples += (Sample(f"{self.name}_count", named, count), Sample(f"{self.name}_sum", named, total))
        else:
            *known, counted, summed = before[1]
            samples = [
                sample
                if sample.value == value and sample.exemplar == exemplar
                else Sample(sample.name, sample.labels, value, None, exemplar)
                for sample, (_, value, exemplar) in zip(known, buckets, strict=True)
            ]
            samples += (
                Sample(counted.name, counted.labels, count),
                Sample(summed.name, summed.labels, total),
            )
        self._made[labels] = child, samples
        return samples


class _Numbers(NamedTuple):
    """A family of counters or gauges as it was given out."""

    family: Family
    values: dict[_Labels, float]
    samples: dict[_Labels, Sample]


class KeptFamilies:
    """Makes families, and keeps them.

    Args:
        constant: Labels of every series.
    """

    def __init__(self, constant: Mapping[str, str]) -> None:
        self._constant = dict(constant)
        self._histograms: dict[str, HistogramSnapshot] = {}
        self._made: dict[str, _Made] = {}
        self._numbers: dict[str, _Numbers] = {}

    def histograms(self, metric: Metric, children: Mapping[_Labels, Histogram]) -> HistogramSnapshot:
        """Return a family of histograms.

        Args:
            metric: Its entry in the catalogue.
            children: Its children by their label values.
        """
        kept = self._histograms.get(metric.name)
        known = {} if kept is None else kept.children
        now: dict[_Labels, Child] = {}
        new = len(known) != len(children)
        for labels, histogram in children.items():
            child = known.get(labels)
            cells, exemplars = histogram.numbers(), histogram.exemplars()
            if child is None or child.cells != cells or child.exemplars != exemplars:
                new = True
                child = Child(histogram, cells, exemplars)
            now[labels] = child
        if kept is None or new:
            made = self._made.setdefault(metric.name, {})
            kept = self._histograms[metric.name] = HistogramSnapshot(metric, self._constant, now, made)
        return kept

    def numbers(self, metric: Metric, values: Mapping[_Labels, float]) -> Family:
        """Return a family of counters or gauges.

        Args:
            metric: Its entry in the catalogue.
            values: Its values by their labels' values.
        """
        kept = self._numbers.get(metric.name)
        if kept is not None and kept.values == values:
            return kept.family
        counts = metric.type == "counter"
        family: Family
        if kept is not None:
            family, known = copy.copy(kept.family), kept.samples
        else:
            make = CounterMetricFamily if counts else GaugeMetricFamily
            family, known = make(metric.family, metric.help, unit=metric.unit), {}
        name = f"{family.name}_total" if counts else family.name
        samples: dict[_Labels, Sample] = {}
        for labels, value in values.items():
            sample = known.get(labels)
            if sample is None:
                named = {**self._constant, **dict(zip(metric.label_names, labels, strict=True))}
                sample = Sample(name, named, value)
            elif sample.value != value:
                sample = Sample(name, sample.labels, value)
            samples[labels] = sample
        family.samples = list(samples.values())
        self._numbers[metric.name] = _Numbers(family, dict(values), samples)
        return family
