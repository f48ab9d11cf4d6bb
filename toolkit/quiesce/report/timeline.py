"""Numbers over time in a fixed amount of room, however long the run was.

Rule: there are never more bins than twice :data:`BINS`; when time runs past the last one, every two neighbours
become one. Increases are added up, of values the last one is kept, so nothing that is shown depends on how
often it was sampled. Nothing here suspends.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

__all__ = ["BINS", "Increases", "Timeline", "Values", "percentile"]

BINS: Final = 360
"""Bins of a run that is over: this many, up to twice as many."""


class Increases:
    """How much a counter grew in each bin.

    Attributes:
        bins: The growth, from the first bin on; what is missing at the end is 0.
        total: Their sum.
    """

    __slots__ = ("bins", "total")

    def __init__(self) -> None:
        self.bins: list[float] = []
        self.total = 0.0

    def add(self, index: int, amount: float) -> None:
        """Add to a bin."""
        if index >= len(self.bins):
            self.bins += [0.0] * (index + 1 - len(self.bins))
        self.bins[index] += amount
        self.total += amount

    def halve(self) -> None:
        """Make one bin of every two."""
        bins = self.bins
        if len(bins) % 2:
            bins.append(0.0)
        self.bins = [bins[index] + bins[index + 1] for index in range(0, len(bins), 2)]


class Values:
    """The last value of a gauge in each bin; None where it said nothing."""

    __slots__ = ("bins",)

    def __init__(self) -> None:
        self.bins: list[float | None] = []

    def set(self, index: int, value: float | None) -> None:
        """Set the value of a bin."""
        if index >= len(self.bins):
            self.bins += [None] * (index + 1 - len(self.bins))
        self.bins[index] = value

    def halve(self) -> None:
        """Make one bin of every two."""
        bins = self.bins
        if len(bins) % 2:
            bins.append(None)
        self.bins = [
            bins[index] if bins[index + 1] is None else bins[index + 1] for index in range(0, len(bins), 2)
        ]


class Timeline:
    """The bins that all numbers of a run share.

    Attributes:
        start: Unix seconds at which the first bin begins.
        width: Seconds of a bin.
        recorded: Which bins the run recorded anything in.
        last: The last bin.
    """

    def __init__(self, start: float, width: float = 1.0) -> None:
        self.start = start
        self.width = width
        self.recorded: set[int] = set()
        self.last = 0
        self._series: list[Increases | Values] = []

    def increases(self) -> Increases:
        """Return a new counter's bins."""
        series = Increases()
        self._series.append(series)
        return series

    def values(self) -> Values:
        """Return a new gauge's bins."""
        series = Values()
        self._series.append(series)
        return series

    def index(self, unix_time: float) -> int:
        """Return the bin of a time, after making room for it."""
        index = max(0, int((unix_time - self.start) / self.width))
        while index >= 2 * BINS:
            self.width *= 2
            index //= 2
            self.recorded = {number // 2 for number in self.recorded}
            self.last //= 2
            for series in self._series:
                series.halve()
        self.recorded.add(index)
        self.last = max(self.last, index)
        return index

    def times(self) -> list[float]:
        """Return the middle of every bin, in Unix seconds."""
        return [self.start + (index + 0.5) * self.width for index in range(self.last + 1)]

    def filled(self, values: Values) -> list[float | None]:
        """Return a gauge in every bin: where it did not change, as it was; where nothing was recorded, None.

        A bin between two that were recorded is not a gap unless the run was away for several of them: a short
        run is sampled less often than it has bins.
        """
        found: list[float | None] = []
        now: float | None = None
        quiet = 0
        for index in range(self.last + 1):
            quiet = 0 if index in self.recorded else quiet + 1
            value = values.bins[index] if index < len(values.bins) else None
            now = now if value is None else value
            found.append(now if quiet * self.width <= GAP_SECONDS or quiet <= 1 else None)
        return found

    def padded(self, increases: Increases) -> list[float]:
        """Return a counter's growth in every bin."""
        return increases.bins + [0.0] * (self.last + 1 - len(increases.bins))


GAP_SECONDS: Final = 60.0
"""Silence that counts as one: four times the period of samples."""


def percentile(bounds: Sequence[float], counts: Iterable[float], share: float) -> float | None:
    """Return a percentile of a histogram, as Prometheus's ``histogram_quantile`` estimates it.

    Args:
        bounds: Upper bounds, growing, the last one infinite.
        counts: How many lie in each bucket (not below its bound).
        share: 0 to 1.

    Returns:
        The estimate: within the bucket, values are taken to lie evenly; past the last finite bound, that
        bound. None without values.
    """
    counts = list(counts)
    total = sum(counts)
    if total <= 0:
        return None
    rank = share * total
    below = 0.0
    low = 0.0
    for bound, count in zip(bounds, counts, strict=True):
        if count > 0 and below + count >= rank:
            if bound == float("inf"):
                return low
            return low + (bound - low) * max(0.0, rank - below) / count
        below += count
        low = bound if bound != float("inf") else low
    return low
