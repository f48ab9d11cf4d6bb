"""Every drill, by name.

Rule: at least two for each invariant, each through another hole. Nothing here suspends.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from quiesce.drills.cursor import CURSOR
from quiesce.drills.gates import GATES
from quiesce.drills.ownership import OWNERSHIP
from quiesce.drills.rows import ROWS
from quiesce.drills.window import WINDOW
from quiesce.errors import ConfigError

if TYPE_CHECKING:
    from quiesce.drills.drill import Drill

__all__ = ["DRILLS", "find_drill"]

DRILLS: Final[Mapping[str, Drill]] = MappingProxyType(
    {drill.name: drill for drill in (*CURSOR, *OWNERSHIP, *WINDOW, *ROWS, *GATES)}
)
"""By name, in the order in which they are shown."""


def find_drill(name: str) -> Drill:
    """Return a drill.

    Raises:
        ConfigError: If there is none of that name; the message suggests one.
    """
    import difflib

    drill = DRILLS.get(name)
    if drill is None:
        close = difflib.get_close_matches(name, DRILLS, n=1)
        meant = f"; did you mean {close[0]!r}?" if close else ""
        raise ConfigError(
            "drill", f"there is no {name!r}{meant} (`quiesce drill --list` shows all {len(DRILLS)})"
        )
    return drill
