"""structlog, imported without a draw from the random numbers of the program that telemetry is switched on in.

Where rich is installed structlog imports it, and rich draws from Python's shared generator as it is imported. A program
that has seeded that generator has the same numbers with telemetry as without.
"""

import random

_drawn = random.getstate()
import structlog  # noqa: E402 - between the two lines is the point

random.setstate(_drawn)

__all__ = ["structlog"]
