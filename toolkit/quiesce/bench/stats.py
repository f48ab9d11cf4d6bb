"""Medians with their spread, ratios within rounds, and a collector that stays quiet meanwhile.

Rule: a ratio is taken between two measurements of the same round, and the median is taken over the ratios: what
slows a whole round then slows both of its sides. Nothing here suspends.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

__all__ = ["Spread", "quiet_collector", "ratios", "rounded"]

_QUARTERS: Final = 4


@dataclass(frozen=True, slots=True)
class Spread:
    """Some measurements of one thing.

    Attributes:
        median: Their median.
        low: Their lower quartile.
        high: Their upper quartile.
        rounds: How many there are.
    """

    median: float
    low: float
    high: float
    rounds: int

    @classmethod
    def of(cls, values: Sequence[float], scale: float = 1.0) -> Spread:
        """Summarise measurements.

        Args:
            values: The measurements, at least one.
            scale: What each is multiplied by, to change its unit.

        Raises:
            ValueError: If there are none.
        """
        if not values:
            raise ValueError("nothing was measured")
        scaled = [value * scale for value in values]
        if len(scaled) == 1:
            return cls(scaled[0], scaled[0], scaled[0], 1)
        low, median, high = statistics.quantiles(scaled, n=_QUARTERS, method="inclusive")
        return cls(median, low, high, len(scaled))

    def to_json(self) -> dict[str, float]:
        """Return it as an object of numbers, rounded to six significant digits."""
        return {
            "median": rounded(self.median),
            "low": rounded(self.low),
            "high": rounded(self.high),
            "rounds": self.rounds,
        }


def rounded(value: float) -> float:
    """Return a number with six significant digits: more would be noise."""
    return float(f"{value:.6g}")


def ratios(of: Sequence[float], to: Sequence[float]) -> Spread:
    """Return the spread of the ratios of each round.

    Args:
        of: One measurement a round.
        to: What each is divided by, of the same round.

    Raises:
        ValueError: If the two have not the same rounds.
    """
    return Spread.of([value / base for value, base in zip(of, to, strict=True)])


@contextmanager
def quiet_collector() -> Iterator[None]:
    """Collect cyclic garbage now, and not again until the end; what is alive now is not looked at either."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        if enabled:
            gc.enable()
