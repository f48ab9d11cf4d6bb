"""Numbers that a hook can bump for next to nothing: bucket histograms, counters, gauges in plain containers.

Rule: bumping is integer or float arithmetic on one list or dict item and nothing else: no lock, no object of
a metrics library. CPython switches threads between bytecodes only where a call returns or a loop jumps back,
never inside ``items[i] += n``, so bumps from several threads add up under the GIL. A reader takes a copy of
the list, which is atomic too; its sum may be one sample ahead of or behind its buckets. Nothing here
suspends.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable
from itertools import accumulate
from typing import Final

from prometheus_client.samples import Exemplar
from prometheus_client.utils import floatToGoString

from quiesce.telemetry.names import OTHER, Metric

__all__ = [
    "NANOSECONDS",
    "Exemplars",
    "Histogram",
    "HistogramFamily",
    "NumberFamily",
    "bound_text",
    "bounds_ns",
    "known",
]

NANOSECONDS: Final = 1_000_000_000
"""Nanoseconds in a second."""

_MILLISECOND: Final = 1_000_000

Labels = tuple[str, ...]

_Exemplar = tuple[float, tuple[int, int], int]
"""Value in observed units, trace and span identifier, Unix nanoseconds."""

Exemplars = dict[int, _Exemplar]
"""Exemplars by the number of their bucket."""


def bounds_ns(bounds: Iterable[float]) -> tuple[int, ...]:
    """Turn bounds in seconds into whole nanoseconds, which is what hooks report."""
    return tuple(round(bound * NANOSECONDS) for bound in bounds)


def bound_text(bound: float) -> str:
    """Return a bound as prometheus_client writes it, so that ``le`` reads the same everywhere."""
    return str(floatToGoString(bound))  # type: ignore[no-untyped-call] # its module is not annotated


class Histogram:
    """Counts of values by bucket, and their sum, as consecutive items of a list.

    Args:
        bounds: Upper bounds, inclusive, ascending, in the exported unit.
        scale: How many observed units make one exported unit (10**9: nanoseconds in, seconds out).
        cells: The list; several histograms may share one, so that a hot path loads one. None makes one.
        start: Index of the first count in it.

    Attributes:
        bounds: The bounds in observed units.
        cells: The list: from ``start`` on one count per bound, one for everything above, and the sum.
    """

    __slots__ = ("_le", "_lit", "_scale", "_start", "_sum", "bounds", "cells")

    def __init__(
        self, bounds: tuple[float, ...], *, scale: int = 1, cells: list[float] | None = None, start: int = 0
    ) -> None:
        self._scale = scale
        self._le = tuple(bound_text(bound) for bound in (*bounds, math.inf))
        self._start = start
        self._sum = start + len(bounds) + 1
        self.bounds: tuple[float, ...] = bounds_ns(bounds) if scale == NANOSECONDS else bounds
        self.cells: list[float] = [0] * (self._sum + 1) if cells is None else cells
        self._lit: dict[int, _Exemplar] = {}

    def observe(self, value: float) -> None:
        """Count a value, in observed units."""
        self.cells[self._start + bisect_left(self.bounds, value)] += 1
        self.cells[self._sum] += value

    def observe_all(self, values: Collection[float]) -> None:
        """Count many values, all of them or, where one is no number, none."""
        total = sum(values)
        bounds = self.bounds
        for index, count in Counter([bisect_left(bounds, value) for value in values]).items():
            self.cells[self._start + index] += count
        self.cells[self._sum] += total

    def light(self, value: float, span: tuple[int, int], unix_ns: int, spacing_ns: int = 0) -> None:
        """Name a span whose value is in a bucket: the bucket's exemplar, until a later one comes.

        Prometheus stores an exemplar only if it is later than the one before it, to the millisecond, and warns
        about every other; so an exemplar that would not be is left out.

        Args:
            value: The value, in observed units.
            span: Trace and span identifier; the span went to a sink.
            unix_ns: When the span ended.
            spacing_ns: How much later than the last one it has to be, at least.
        """
        index = bisect_left(self.bounds, value)
        last = self._lit.get(index)
        if last is None or unix_ns // _MILLISECOND > (last[2] + spacing_ns) // _MILLISECOND:
            self._lit[index] = (value, span, unix_ns)

    @property
    def bounds_text(self) -> tuple[str, ...]:
        """Upper bounds as Prometheus writes them, ``+Inf`` last."""
        return self._le

    def buckets(self) -> list[tuple[str, float]]:
        """Return (upper bound as Prometheus writes it, cumulative count), ``+Inf`` last."""
        return list(zip(self._le, accumulate(self.cells[self._start : self._sum]), strict=True))

    def lit_buckets(self) -> list[tuple[str, float, Exemplar | None]]:
        """Return the buckets, each with its exemplar if it has one."""
        return self.exposed(self.numbers(), self.exemplars())

    def exposed(self, cells: list[float], lit: Exemplars) -> list[tuple[str, float, Exemplar | None]]:
        """Return the buckets as they were once: see :meth:`numbers` and :meth:`exemplars`."""
        return [
            (bound, count, self._exemplar(lit[index]) if index in lit else None)
            for index, (bound, count) in enumerate(zip(self._le, accumulate(cells[:-1]), strict=True))
        ]

    def scaled(self, value: float) -> float:
        """Return a value of observed units in exported ones."""
        return value / self._scale

    def numbers(self) -> list[float]:
        """Return everything that is counted: counts by bucket, not added up, and the sum, in observed units."""
        return self.cells[self._start : self._sum + 1]

    def exemplars(self) -> Exemplars:
        """Return the exemplars, by the number of their bucket."""
        return self._lit.copy()

    def _exemplar(self, lit: _Exemplar) -> Exemplar:
        value, (trace_id, span_id), unix_ns = lit
        # 63 characters of names and identifiers; OpenMetrics allows 128.
        labels = {"trace_id": f"{trace_id:032x}", "span_id": f"{span_id:016x}"}
        return Exemplar(labels, value / self._scale, unix_ns // _MILLISECOND / 1000)

    @property
    def sum(self) -> float:
        """The sum of the values in exported units."""
        return self.cells[self._sum] / self._scale

    @property
    def count(self) -> int:
        """How many values there were."""
        return int(sum(self.cells[self._start : self._sum]))


class HistogramFamily:
    """The histograms of one family, all of which exist from the start.

    Args:
        metric: Its entry in the catalogue.
    """

    __slots__ = ("_scale", "children", "metric")

    def __init__(self, metric: Metric) -> None:
        self.metric = metric
        self._scale = NANOSECONDS if metric.unit == "seconds" else 1
        self.children: dict[Labels, Histogram] = {}
        for labels in metric.label_sets():
            self.add(labels)

    def add(self, labels: Labels) -> Histogram:
        """Return the child of these label values, made if need be."""
        child = self.children.get(labels)
        if child is None:
            # setdefault, because two threads may get here at once and both must bump the same child.
            child = self.children.setdefault(labels, Histogram(self.metric.buckets, scale=self._scale))
        return child

    def observe(self, value: float, *labels: str) -> None:
        """Count a value (nanoseconds, in a family of seconds).

        Raises:
            KeyError: If the catalogue does not know the labels.
        """
        self.children[labels].observe(value)

    def observe_all(self, values: Collection[float], *labels: str) -> None:
        """Count many values of one child.

        Raises:
            KeyError: If the catalogue does not know the labels.
        """
        self.children[labels].observe_all(values)


class NumberFamily:
    """The counters or gauges of one family, all of which exist from the start.

    Args:
        metric: Its entry in the catalogue.
        value: What every child starts with.
    """

    __slots__ = ("metric", "values")

    def __init__(self, metric: Metric, value: float = 0.0) -> None:
        self.metric = metric
        self.values: dict[Labels, float] = dict.fromkeys(metric.label_sets(), value)

    def add(self, amount: float, *labels: str) -> None:
        """Add to a child.

        Raises:
            KeyError: If the catalogue does not know the labels.
        """
        self.values[labels] += amount

    def set(self, value: float, *labels: str) -> None:
        """Set a child.

        Raises:
            KeyError: If the catalogue does not know the labels.
        """
        if labels not in self.values:
            raise KeyError(labels)
        self.values[labels] = value

    def set_only(self, *labels: str) -> None:
        """Set a child to 1 and every other to 0: the family is a state.

        Raises:
            KeyError: If the catalogue does not know the labels.
        """
        self.set(1.0, *labels)
        for other in self.values:
            if other != labels:
                self.values[other] = 0.0


def known(value: str, values: Iterable[str]) -> str:
    """Return the value if its closed set has it, else ``other``: a surprise is counted, not lost."""
    return value if value in values else OTHER
