"""Values and labels as OpenMetrics text has them.

Rule: what is written here, ``promtool`` reads. Nothing here suspends.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

__all__ = ["escaped", "labels_of", "number"]


def escaped(value: str) -> str:
    r"""Return a label's value with quotes: ``\``, ``"`` and a line's end stand after a backslash."""
    told = value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    return f'"{told}"'


def labels_of(labels: Mapping[str, str]) -> str:
    """Return labels as they stand between the braces."""
    return ",".join(f"{label}={escaped(value)}" for label, value in labels.items())


def number(value: float) -> str:
    """Return a value."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(value)
