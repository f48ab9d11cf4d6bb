"""The auditor: it proves the invariants while a run goes on, and keeps what it finds.

::

    auditor = attach_auditor(owners, dataplane=dataplane, folder=run_folder.path, gate_window=2)
    ...
    await auditor.aclose()

What happens to a finding::

    an event, in its hook ─┐
    the sweep ─────────────┼─> one record per fault ─> hub.invariant_violated (once), the log, violations.jsonl,
    a cut's verification ──┘                          and `on_halt` if that is the invariant's policy

A fault that is seen live, by the sweep and at every later cut is told once; the record counts how often, and when last.

Rule: an auditor never hurts the run. A finding of a hook is recorded in the step in which it is made, and told to others
from a step of its own; files are written in a thread; what fails in here is logged and counted. Yield rule: only
:meth:`Auditor.aclose` suspends.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol

from quiesce.auditor.checks import UserCheck, load_checks
from quiesce.auditor.incremental import Incremental
from quiesce.auditor.journal import ViolationJournal, read_violations
from quiesce.auditor.policies import AUDITED, InvariantStatus, Policies
from quiesce.auditor.record import Origin, Records, ViolationRecord
from quiesce.auditor.ring import EventRing
from quiesce.auditor.sweep import Pace, Sweep
from quiesce.barrier import detached
from quiesce.invariants.violation import Violation
from quiesce.threads import DaemonExecutor

if TYPE_CHECKING:
    from quiesce.checkpoint.cut import CutState
    from quiesce.dataplane.interface import DataPlane
    from quiesce.invariants.facts import CutFacts
    from quiesce.owners import Owners
    from quiesce.types import RowKey

__all__ = ["Auditor", "AuditorStatistics", "attach_auditor"]

_LOG: Final = logging.getLogger("quiesce.auditor")

_TELL_SECONDS: Final = 1.0
"""How often `invariant_checked` is reported, and changed counts are written down."""

_CLOSE_SECONDS: Final = 5.0

_TRACED: Final = 10
"""Groups at fault whose trace is asked for; one is enough."""

_UNTRACED: Final = 16
"""Records whose trace is asked for again."""

_SEEN_BY: Final = {"live": "an event", "sweep": "the sweep", "cut": "a checkpoint's verification"}


class _HasOwners(Protocol):
    @property
    def owners(self) -> Owners: ...


@dataclass(frozen=True, slots=True)
class AuditorStatistics:
    """What the auditor has done.

    Attributes:
        findings: Findings, the repeated ones too, by invariant.
        records: Records that this incarnation began.
        open_records: Records that are open, those of earlier incarnations too.
        sweeps: Passes of the sweep that are over.
        sweep_failures: Parts of it that failed.
        longest_step_seconds: The longest that the sweep held the event loop.
        write_failures: How often records could not be written down.
        owned: Groups that have an owner, as far as events say.
    """

    findings: Mapping[str, int] = field(hash=False)
    records: int
    open_records: int
    sweeps: int
    sweep_failures: int
    longest_step_seconds: float
    write_failures: int
    owned: int


class Auditor:
    """Watches one run; see :func:`attach_auditor`.

    Args:
        owners: The owners of the run's groups.
        dataplane: Where rows are; None leaves rows to the cut.
        folder: The run folder; None keeps records in memory only.
        gate_window: How far the sampler's cursor may be ahead of the trainer version, or None.
        elsewhere: Returns the keys that are outstanding in the workers' cleanups.
        policies: What follows from a violation: by invariant, where that is not the default; or all of it.
        budgets: Seconds that a phase of a checkpoint may take.
        checks: The users' own checks: objects, classes, references ``module:ClassName``; or all of them built.
        on_halt: Called on the loop, once, with the first live record whose policy is to halt the run.
        trace_of: Returns the trace id of the first of some groups and cuts that has one, or "".
        pace: How fast the sweep goes.
        clock: Monotonic nanoseconds.
        wall: Unix seconds.

    Raises:
        ConfigError: If a policy or a check is impossible.
    """

    def __init__(
        self,
        owners: Owners,
        *,
        dataplane: DataPlane | None = None,
        folder: Path | None = None,
        gate_window: int | None = None,
        elsewhere: Callable[[], Iterable[RowKey]] = tuple,
        policies: Mapping[str, str] | Policies | None = None,
        budgets: Mapping[str, float] | None = None,
        checks: Iterable[object] = (),
        on_halt: Callable[[ViolationRecord], None] | None = None,
        trace_of: Callable[[Collection[str]], str] | None = None,
        pace: Pace | None = None,
        clock: Callable[[], int] = time.perf_counter_ns,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._owners = owners
        self._hub = owners.barrier.hub
        self._dataplane = dataplane
        self._gate_window = gate_window
        given = tuple(checks)
        built = tuple(check for check in given if isinstance(check, UserCheck))
        self._checks = built if len(built) == len(given) else load_checks(given)
        defaults = {check.name: check.policy for check in self._checks}
        self.policies = policies if isinstance(policies, Policies) else Policies(policies, defaults)
        self._on_halt = on_halt
        self._halted = False
        self._trace_of = trace_of
        self._wall = wall
        self._executor = DaemonExecutor("quiesce-auditor", 1)
        self._journal = None if folder is None else ViolationJournal(folder)
        self.records = Records(
            0 if dataplane is None else dataplane.incarnation, () if folder is None else _reloaded(folder)
        )
        self._findings: dict[str, int] = {}
        self._begun = 0
        self._untold: deque[tuple[ViolationRecord, bool]] = deque()
        self._unwritten: dict[str, ViolationRecord] = {}
        self._untraced: deque[ViolationRecord] = deque(maxlen=_UNTRACED)
        self._writes: set[asyncio.Future[None]] = set()
        self._write_failures = 0
        self.marks: dict[str, Any] = {}
        """Added to the evidence of each record that begins while it is here: what a drill is told by."""
        self._firing: Violation | None = None
        self._told_at = float("-inf")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self._ring = EventRing()  # before what follows: taking over what there is may find something already
        self.events = Incremental(
            owners,
            ring=self._ring,
            report=self.found,
            known=self.records.knows,
            gate_window=gate_window,
            budgets=budgets,
            clock=clock,
        )
        self.sweep = Sweep(
            owners,
            self.events,
            report=self.found,
            known=self.records.knows,
            executor=self._executor,
            dataplane=dataplane,
            elsewhere=elsewhere,
            checks=self._after_pass,
            pace=pace,
            clock=clock,
        )
        for check in self._checks:
            check.bind(lambda violation: self.found(violation, "live"))

    # ------------------------------------------------------------------------------------------------- lifecycle

    def start(self, *, sweeping: bool = True) -> None:
        """Subscribe, and begin to sweep; on the loop, in the step in which the owners are as they are now.

        Args:
            sweeping: Whether to sweep in the background.
        """
        self._loop = asyncio.get_running_loop()
        self._hub.subscribe(self.events)
        self.events.hear_gates(True)
        self._hub.subscribe(self)
        for check in self._checks:
            if check.listens:
                self._hub.subscribe(check)
        self._hub.attach("auditor", self)
        if sweeping:
            self._task = detached(self._run(), name="auditor")
        if self._untold:
            self._schedule()

    async def aclose(self) -> None:
        """Stop, tell and write down what is left. A record that cannot be written within a deadline is given up."""
        self._closed = True
        self.events.hear_gates(False)
        for observer in (self.events, self, *self._checks):
            self._hub.unsubscribe(observer)
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})
        self.events.judge_gates()
        self.tell()
        self._trace_late()
        self._write_down()
        if self._writes:
            await asyncio.wait(set(self._writes), timeout=_CLOSE_SECONDS)
        self._executor.shutdown(wait=False)

    async def _run(self) -> None:
        try:
            await self.sweep.run()
        except Exception:
            _LOG.exception("the auditor's sweep ended; events are still judged")
            raise

    # -------------------------------------------------------------------------------------------------- findings

    def found(self, violation: Violation, origin: Origin, *, told: bool = False) -> None:
        """Take a finding; from any thread. Others are told of a new one from a step of their own.

        Args:
            violation: What does not hold.
            origin: Who found it.
            told: Whether everybody knows of it already.
        """
        self._findings[violation.invariant] = self._findings.get(violation.invariant, 0) + 1
        record, new = self.records.add(
            violation,
            origin=origin,
            unix_time=self._wall(),
            events=self._ring.of(violation.groups),
            trace_id=self._trace((*violation.groups[:_TRACED], *filter(None, (violation.cut_id,)))),
        )
        self._unwritten[record.key] = record
        if not new:
            return
        if not record.trace_id and self._trace_of is not None:
            self._untraced.append(record)
        self._begun += 1
        if self.marks:
            record.evidence.update(self.marks)
        self._untold.append((record, told))
        self._schedule()

    def found_at_the_cut(self, violation: Violation) -> None:
        """Take what the verification of a cut found; on the loop. A fault that was seen before is no news."""
        self.found(violation, "cut")
        self.tell()

    def invariant_violated(self, violation: Violation) -> None:
        """Take what somebody else told everybody, such as who verifies cuts without asking this auditor."""
        if violation is not self._firing:
            self.found(violation, "cut", told=True)

    def tell(self) -> None:
        """Tell the hub, the log and the journal what was found since; on the loop."""
        while self._untold:
            record, told = self._untold.popleft()
            self._unwritten[record.key] = record
            if not told:
                self._tell_all(record)
            self._halt(record)
            self._write_down()

    def _tell_all(self, record: ViolationRecord) -> None:
        self._firing = record.violation()
        try:
            _LOG.log(
                logging.ERROR if record.severity == "critical" else logging.WARNING,
                "%s (seen by %s, record %s)",
                self._firing,
                _SEEN_BY[record.origin],
                record.key,
            )
            self._hub.fire("invariant_violated", self._firing)
        finally:
            self._firing = None

    def close_record(self, key: str) -> bool:
        """Close a record: somebody has looked into it. Returns whether there is one of that key."""
        record = self.records.close(key)
        if record is not None:
            self._unwritten[key] = record
            self._write_down()
        return record is not None

    def check_cut(self, state: CutState, facts: CutFacts) -> list[Violation]:
        """Have the users' own checks judge a captured cut; returns what they found. May be called in a thread."""
        return [violation for check in self._checks for violation in check.check_cut(state, facts)]

    def _schedule(self) -> None:
        if self._loop is None or self._closed:
            return
        try:
            self._loop.call_soon_threadsafe(self.tell)
        except RuntimeError:
            _LOG.warning("a violation was found after the event loop had ended")

    def _halt(self, record: ViolationRecord) -> None:
        halts = self.policies.of(record.invariant, record.severity) == "halt"
        if self._on_halt is None or self._halted or not halts:
            return
        self._halted = True
        try:
            self._on_halt(record)
        except Exception:  # noqa: BLE001 - somebody else's code; the record is told all the same
            _LOG.exception("the run could not be halted")

    def _trace(self, names: Collection[str]) -> str:
        if self._trace_of is None or not names:
            return ""
        try:
            return self._trace_of(names)
        except Exception:  # noqa: BLE001 - somebody else's code; the finding counts without it
            return ""

    def _trace_late(self) -> None:
        """Ask again for traces that were not known yet: spans are made a moment after the event."""
        for record in list(self._untraced):
            record.trace_id = self._trace((*record.groups[:_TRACED], *filter(None, (record.cut_id,))))
            if record.trace_id:
                self._untraced.remove(record)
                self._unwritten[record.key] = record

    def _after_pass(self) -> None:
        for check in self._checks:
            check.sweep(self._owners)
        now = time.monotonic()
        if now - self._told_at < _TELL_SECONDS:
            return
        self._told_at = now
        self._trace_late()
        self._write_down()
        if self._hub.invariant_checked:
            for status in self.status():
                if status.state == "active":
                    self._hub.fire("invariant_checked", status.name)

    def _write_down(self) -> None:
        """Have what changed written in a thread; on the loop."""
        if self._loop is None:
            return
        lines, self._unwritten = [record.to_json() for record in self._unwritten.values()], {}
        if not lines or self._journal is None:
            return
        write = self._loop.run_in_executor(self._executor, self._journal.append, lines)
        self._writes.add(write)
        write.add_done_callback(self._written)

    def _written(self, write: asyncio.Future[None]) -> None:
        self._writes.discard(write)
        error = None if write.cancelled() else write.exception()
        if error is not None:
            self._write_failures += 1
            if self._write_failures == 1:
                _LOG.error("violations cannot be written down (logged once)", exc_info=error)

    # --------------------------------------------------------------------------------------------------- answers

    def status(self) -> tuple[InvariantStatus, ...]:
        """Return what there is to say of each invariant, those of the users' checks too."""
        open_now: dict[str, int] = {}
        for record in self.records.open():
            open_now[record.invariant] = open_now.get(record.invariant, 0) + 1
        found = []
        for name, row in AUDITED.items():
            why = self._inactive(name)
            state = "inactive" if why else "at the cut" if row.proved == ("cut",) else "active"
            found.append(InvariantStatus(name, state, why, self.policies.of(name), open_now.get(name, 0)))
        for check in self._checks:
            state = "inactive" if check.problem else "active"
            policy = self.policies.of(check.name, check.severity)
            found.append(
                InvariantStatus(check.name, state, check.problem, policy, open_now.get(check.name, 0))
            )
        return tuple(found)

    def known(self) -> tuple[tuple[str, ...], dict[str, float]]:
        """Return the invariants that are watched, and Unix times; may be called from any thread.

        Returns:
            Names of invariants, and when an open record of an invariant was seen last, by name.
        """
        last: dict[str, float] = {}
        for record in self.records.open():
            last[record.invariant] = max(record.last_unix, last.get(record.invariant, 0.0))
        return tuple(status.name for status in self.status() if status.state == "active"), last

    def _inactive(self, name: str) -> str:
        sampler = self._owners.sampler
        if name == "cursor_covers_buffer" and not sampler.stamps_target_steps:
            return f"sampler {sampler.name!r} stamps no target steps"
        if name in {"rows_present", "rows_not_orphaned"} and self._dataplane is None:
            return "no data plane was named, so rows are judged at the cut alone"
        if name == "gate_is_respected" and not self.events.gates_seen:
            return "no snapshot gate has reported yet"
        return ""

    def statistics(self) -> AuditorStatistics:
        """Return what it has done; may be called from any thread."""
        return AuditorStatistics(
            findings=dict(self._findings),
            records=self._begun,
            open_records=len(self.records.open()),
            sweeps=self.sweep.passes,
            sweep_failures=self.sweep.failures,
            longest_step_seconds=self.sweep.longest_step_ns / 1e9,
            write_failures=self._write_failures,
            owned=self.events.shadow.owned(),
        )


def attach_auditor(target: Owners | _HasOwners, *, sweeping: bool = True, **options: Any) -> Auditor:  # noqa: ANN401 - passed on
    """Build an auditor over a run's owners and start it; after a restore, before anything is dispatched.

    Args:
        target: The owners, or a controller that has them.
        sweeping: Whether to sweep in the background.
        **options: See :class:`Auditor`.

    Returns:
        The auditor; close it before the data plane.
    """
    owners: Any = getattr(target, "owners", target)
    auditor = Auditor(owners, **options)
    auditor.start(sweeping=sweeping)
    return auditor


def _reloaded(folder: Path) -> list[ViolationRecord]:
    """Return the records of the incarnations before, those that are open as open."""
    try:
        return read_violations(folder)
    except OSError:
        _LOG.exception("the violations of earlier incarnations cannot be read; they stay in their file")
        return []
