"""What every observer of metrics starts from: the families that hooks feed, and two clocks.

Rule: everything in a family exists, at zero, once its observer does. Nothing here suspends.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from quiesce.telemetry.histogram import HistogramFamily, NumberFamily

if TYPE_CHECKING:
    from quiesce.telemetry.names import Metric

__all__ = ["Families"]


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
