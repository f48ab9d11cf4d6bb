"""The invariants: what has to hold of every cut, and the functions that tell.

::

    violation.py   one finding, with its evidence
    facts.py       what a check may know beside the cut
    checks.py      one pure function per invariant
    table.py       all of them, with severity and policy; check_cut
"""

from quiesce.invariants.facts import CutFacts, LedgerSeal, RowFacts
from quiesce.invariants.table import INVARIANTS, POLICIES, Invariant, Policy, check_cut, critical
from quiesce.invariants.violation import Severity, Violation

__all__ = [
    "INVARIANTS",
    "POLICIES",
    "CutFacts",
    "Invariant",
    "LedgerSeal",
    "Policy",
    "RowFacts",
    "Severity",
    "Violation",
    "check_cut",
    "critical",
]
