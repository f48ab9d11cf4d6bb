"""What every observer of metrics starts from: the families that hooks feed, and two clocks.

Rule: everything in a family exists, at zero, once its observer does. Nothing here suspends.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from quiesce.telemetry.histogram import HistogramFamily, NumberFamily
from quiesce.telemetry.labels import OTHER

if TYPE_CHECKING:
    from quiesce.telemetry.names import Metric

__all__ = ["CHECK_LIMIT", "Families", "Named"]

CHECK_LIMIT: Final = 8
"""Values with series of their own beside those of a closed set; further ones are added up as ``other``."""

_NAME_LENGTH: Final = 100


class Families:
    """Metric families by name.

    Args:
        clock: Unix time in seconds.
        monotonic: Monotonic seconds.

    Attributes:
        families: Every family that hooks feed, by metric name.
        seen: Roles of whose primitives a hook has reported.
    """

    def __init__(
        self, *, clock: Callable[[], float] = time.time, monotonic: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._monotonic = monotonic
        self.families: dict[str, HistogramFamily | NumberFamily] = {}
        self.seen: set[str] = set()

    def _histogram(self, metric: Metric) -> HistogramFamily:
        family = self.families[metric.name] = HistogramFamily(metric)
        return family

    def _number(self, metric: Metric, value: float = 0.0) -> NumberFamily:
        family = self.families[metric.name] = NumberFamily(metric, value)
        return family


class Named:
    """Numbers of things that have names: those of a closed set, and a few more that a user's code may add.

    Args:
        values: The closed set.
        families: Whose only label the name is.
        limit: How many names are added; what comes later is counted as ``other``.
    """

    def __init__(self, values: tuple[str, ...], *families: NumberFamily, limit: int = CHECK_LIMIT) -> None:
        self._labels = {value: value for value in values}
        self._room = limit
        self._families = families

    def label(self, name: str) -> str:
        """Return the label under which a name is counted, and make its series, at zero, if it has none."""
        known = self._labels.get(name)
        if known is not None:
            return known
        if self._room == 0:
            return self._add(OTHER)
        self._room -= 1
        label = self._add(name[:_NAME_LENGTH])
        self._labels[name] = label
        return label

    def _add(self, label: str) -> str:
        for family in self._families:
            family.values.setdefault((label,), 0.0)
        return label
