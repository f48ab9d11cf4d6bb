"""What Quiesce costs, measured against baselines that run in the same process.

Rule: a number is a median over interleaved rounds and comes with its spread; what is compared is measured in the
same round, and the ratio is taken within the round, so that a noisy machine slows both sides. Nothing is left
out by moving it: what happens outside a window is reported beside what happens inside. Yield rule: the functions
here run an event loop of their own and block.

==================  ===================================================================================
``run_slots``       a mutation slot, and the drain of queued waiters, against the shape it replaced
``run_window``      how long a save keeps everybody else out, in three modes
``run_restore``     how long a resume takes
``run_auditor``     what an event, a group and a judged cut cost with the auditor, and its sweep
``run_reply``       what a generation call's reply waits for when rows are cleared, in three modes
==================  ===================================================================================
"""

from quiesce.bench.auditor import run_auditor
from quiesce.bench.reply import run_reply
from quiesce.bench.report import BenchReport, Table
from quiesce.bench.restore import run_restore
from quiesce.bench.slots import run_slots
from quiesce.bench.window import run_window

__all__ = ["BenchReport", "Table", "run_auditor", "run_reply", "run_restore", "run_slots", "run_window"]
