"""What is kept of a violation: one record for one fault, however often and wherever it is seen.

Two findings are the same fault if they are of the same invariant (or both of the two that say who owns a group) and name
the same groups; without groups, if the same values contradict each other. So what the live auditor saw first, and every
later cut sees again, is one record whose count grows.

Rule: bounded. So many records are kept, each with so many group ids; beyond that only counts grow. Thread-safe, because
gates report from threads. Nothing here suspends.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal

from quiesce.invariants.violation import Severity, Violation

__all__ = ["MAX_GROUPS", "MAX_RECORDS", "Origin", "Records", "ViolationRecord", "fault_of"]

MAX_RECORDS: Final = 1000
"""Records that are kept in memory, and in the file once it is rewritten."""

MAX_PER_INVARIANT: Final = 64
"""Records that one incarnation begins for one invariant; further faults count in the last of them."""

MAX_GROUPS: Final = 100
"""Group ids that a record spells out."""

MAX_KNOWN: Final = 100_000
"""Groups at fault that are remembered by name, so that their consequences are not reported as faults of their own."""

Origin = Literal["live", "sweep", "cut"]

_FAMILY: Final = {"single_owner": "ownership", "conservation": "ownership"}
"""Two owners now are one group trained twice later: that is one fault."""


@dataclass(slots=True)
class ViolationRecord:
    """One fault.

    Attributes:
        key: Names the record within its run, over all incarnations.
        invariant: What does not hold.
        severity: How bad that is.
        message: One sentence that names what is at fault.
        origin: Who saw it first: an event (``live``), the ``sweep``, or the verification of a ``cut``.
        incarnation: In which incarnation of the run.
        groups: Groups at fault; at most :data:`MAX_GROUPS` of them.
        groups_total: How many there are.
        owners: The owners that contradict each other.
        cut_id: The cut in which it was seen, or "".
        trace_id: The trace that it belongs to, or "".
        evidence: The values that contradict each other; JSON values.
        events: The last events of those groups; JSON values.
        first_unix: When it was seen first, in Unix seconds.
        last_unix: When it was seen last.
        count: How often it was seen.
        open: Whether nobody has closed it.
    """

    key: str
    invariant: str
    severity: Severity
    message: str
    origin: Origin
    incarnation: int
    groups: tuple[str, ...]
    groups_total: int
    owners: tuple[str, ...]
    cut_id: str
    trace_id: str
    evidence: dict[str, Any]
    events: list[dict[str, Any]]
    first_unix: float
    last_unix: float
    count: int = 1
    open: bool = True

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> ViolationRecord:
        """Build it from what :meth:`to_json` made.

        Raises:
            TypeError: If a value is missing, or there is one too many.
        """
        groups, owners = tuple(values.get("groups", ())), tuple(values.get("owners", ()))
        return cls(**{**values, "groups": groups, "owners": owners})

    def violation(self) -> Violation:
        """Return it as the value that hooks carry."""
        evidence = {**self.evidence, "events": self.events, "record": self.key}
        return Violation(
            self.invariant, self.severity, self.message, self.groups, self.owners, self.cut_id, evidence
        )


@dataclass(slots=True)
class _Known:
    """The groups at fault of one family of invariants, in this incarnation."""

    records: dict[str, ViolationRecord] = field(default_factory=dict)  # by group


class Records:
    """The records of a run, by key, oldest first.

    Args:
        incarnation: The incarnation that begins records here.
        reloaded: Records of the incarnations before.
    """

    def __init__(self, incarnation: int = 0, reloaded: Iterable[ViolationRecord] = ()) -> None:
        self._incarnation = incarnation
        self._lock = threading.RLock()
        self._records: dict[str, ViolationRecord] = {record.key: record for record in reloaded}
        self._known: dict[str, _Known] = {}
        self._keyed: dict[tuple[Any, ...], ViolationRecord] = {}
        self._begun: dict[str, int] = {}
        self._last: dict[str, ViolationRecord] = {}
        self._next = 0
        self.forgotten = 0
        """Records that were dropped because there were too many."""

    def add(
        self,
        found: Violation,
        *,
        origin: Origin,
        unix_time: float,
        events: list[dict[str, Any]],
        trace_id: str = "",
    ) -> tuple[ViolationRecord, bool]:
        """Take a finding.

        Returns:
            Its record, and whether that is a new one: then it is to be reported.
        """
        with self._lock:
            if found.groups:
                known = self._known.setdefault(_family(found.invariant), _Known())
                fresh = tuple(group for group in dict.fromkeys(found.groups) if group not in known.records)
                if not fresh:
                    record = known.records[found.groups[0]]
                    _again(record, found, unix_time)
                    return record, False
                record, new = self._begin(found, fresh, origin, unix_time, events, trace_id)
                for group in fresh[: MAX_KNOWN - len(known.records)]:
                    known.records[group] = record
                return record, new
            key = fault_of(found)
            if key in self._keyed:
                _again(self._keyed[key], found, unix_time)
                return self._keyed[key], False
            record, new = self._begin(found, (), origin, unix_time, events, trace_id)
            self._keyed[key] = record
            return record, new

    def knows(self, invariant: str, group_id: str) -> bool:
        """Whether a group was found at fault in this incarnation, by this invariant or its family."""
        known = self._known.get(_family(invariant))
        return known is not None and group_id in known.records

    def close(self, key: str) -> ViolationRecord | None:
        """Close a record: somebody has looked into it."""
        with self._lock:
            record = self._records.get(key)
            if record is not None:
                record.open = False
            return record

    def all(self) -> tuple[ViolationRecord, ...]:
        """Return every record that is kept, oldest first."""
        with self._lock:
            return tuple(self._records.values())

    def open(self) -> tuple[ViolationRecord, ...]:
        """Return those that nobody has closed."""
        return tuple(record for record in self.all() if record.open)

    def _begin(
        self,
        found: Violation,
        groups: tuple[str, ...],
        origin: Origin,
        unix_time: float,
        events: list[dict[str, Any]],
        trace_id: str,
    ) -> tuple[ViolationRecord, bool]:
        begun = self._begun.get(found.invariant, 0)
        if begun >= MAX_PER_INVARIANT:
            record = self._last[found.invariant]
            record.groups_total += len(groups)
            _again(record, found, unix_time)
            return record, False
        self._begun[found.invariant] = begun + 1
        key = f"{self._incarnation}.{self._next}"
        self._next += 1
        record = ViolationRecord(
            key=key,
            invariant=found.invariant,
            severity=found.severity,
            message=found.message,
            origin=origin,
            incarnation=self._incarnation,
            groups=groups[:MAX_GROUPS],
            groups_total=len(groups),
            owners=found.owners,
            cut_id=found.cut_id,
            trace_id=trace_id,
            evidence=dict(found.evidence),
            events=events,
            first_unix=unix_time,
            last_unix=unix_time,
        )
        self._records[key] = record
        self._last[found.invariant] = record
        self._bound()
        return record, True

    def _bound(self) -> None:
        while len(self._records) > MAX_RECORDS:
            closed = (key for key, record in self._records.items() if not record.open)
            del self._records[next(closed, next(iter(self._records)))]
            self.forgotten += 1


def fault_of(found: Violation) -> tuple[Any, ...]:
    """Return what makes two findings without groups the same fault; numbers that grow do not count."""
    evidence = found.evidence
    key: tuple[Any, ...] = (found.invariant,)
    for name in ("worker", "hook", "phase", "check", "where"):
        if name in evidence:
            key += (name, evidence[name])
    if isinstance(evidence.get("back"), Collection):
        key += ("back", tuple(sorted(evidence["back"])))
    if "parts" in evidence:
        key += ("parts",)  # one cut shows it by several of them
    return key if len(key) > 1 else (*key, tuple(sorted(evidence)))


def _family(invariant: str) -> str:
    return _FAMILY.get(invariant, invariant)


def _again(record: ViolationRecord, found: Violation, unix_time: float) -> None:
    record.count += 1
    record.last_unix = max(record.last_unix, unix_time)
    record.cut_id = record.cut_id or found.cut_id
