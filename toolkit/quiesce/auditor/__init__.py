"""The auditor: proves the invariants while a run goes on, by its own book of who owns what.

::

    ring.py         the last events, as evidence
    shadow.py       who owns what by events alone: a byte a position
    incremental.py  every invariant that events can show, at a constant cost an event
    sweep.py        shadow against real owners, account and rows, a little at a time
    checks.py       the users' own checks
    policies.py     which invariants there are, where each is proved, what follows from a violation
    record.py       one record for one fault
    journal.py      violations.jsonl of a run folder
    auditor.py      all of it together; attach_auditor
"""

from quiesce.auditor.auditor import Auditor, AuditorStatistics, attach_auditor
from quiesce.auditor.checks import UserCheck, load_checks
from quiesce.auditor.incremental import PHASE_BUDGETS
from quiesce.auditor.journal import FILE_NAME, ViolationJournal, read_violations
from quiesce.auditor.policies import AUDITED, AuditedInvariant, InvariantStatus, Policies
from quiesce.auditor.record import ViolationRecord
from quiesce.auditor.sweep import Pace

__all__ = [
    "AUDITED",
    "FILE_NAME",
    "PHASE_BUDGETS",
    "AuditedInvariant",
    "Auditor",
    "AuditorStatistics",
    "InvariantStatus",
    "Pace",
    "Policies",
    "UserCheck",
    "ViolationJournal",
    "ViolationRecord",
    "attach_auditor",
    "load_checks",
    "read_violations",
]
