"""Drills: faults that are injected into a run on purpose, to see that the auditor finds them and that somebody is paged.

::

    target.py       the live parts of a run
    holes.py        patches of live objects that are undone
    drill.py        what a drill is, and what came of one
    ownership.py    ┐
    cursor.py       │
    window.py       ├ the faults
    rows.py         │
    gates.py        ┘
    catalogue.py    all of them, by name
    perform.py      doing one
    desk.py         doing those that somebody asks a running run for
    requests.py     asking it
    throwaway.py    a run of a few seconds to do one in
"""

from quiesce.drills.catalogue import DRILLS, find_drill
from quiesce.drills.desk import DrillDesk
from quiesce.drills.drill import Drill, DrillResult, Fired
from quiesce.drills.perform import perform
from quiesce.drills.target import DrillTarget

__all__ = ["DRILLS", "Drill", "DrillDesk", "DrillResult", "DrillTarget", "Fired", "find_drill", "perform"]
