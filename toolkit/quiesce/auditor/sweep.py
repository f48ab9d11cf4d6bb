"""The slow sweep: shadow, real owners, account and rows, compared a hundred positions at a time.

A slice lists the rows of its positions in a thread, then reads their owners in one await-free step, then has the two
compared in a thread; after each slice it rests for many times what the slice took. So a run of a million groups is gone
through in up to an hour, and the event loop hardly notices; a small run is gone through several times a second. What
events hint at (a group that was just buffered, rows that were just cleared) is looked at first.

Rule: keys are listed first, owners are read after, and what looks wrong is looked at again before it is reported. A row
without an owner is reported if it is there in two listings with some time in between, for a put that was under way when
its group was dropped is cleared a moment later. Yield rule: :meth:`Sweep.run` and :meth:`Sweep.once` suspend; a slice on
the loop is a fraction of a millisecond.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from quiesce.accounting import AccountingState, has_bit
from quiesce.auditor.shadow import CODES, DROPPED, LOST, NAMES, NONE, OWNED, PAGE, TRAINED
from quiesce.invariants.violation import Severity, Violation

if TYPE_CHECKING:
    from concurrent.futures import Executor

    from quiesce.auditor.incremental import Incremental
    from quiesce.auditor.record import Origin
    from quiesce.dataplane.interface import DataPlane
    from quiesce.owners import Owners
    from quiesce.types import BufferEntry, RowKey

__all__ = ["SLICE", "Pace", "Sweep", "judge_group"]

_LOG: Final = logging.getLogger("quiesce.auditor")

SLICE: Final = PAGE
"""Positions of one slice: those that share all but the last two digits, and so a prefix of row keys."""

_DIGITS: Final = 5  # of a position without its last two


@dataclass(frozen=True)  # no slots: it is a section of a run's configuration, whose parser reads vars()
class Pace:
    """How fast a sweep goes.

    Attributes:
        rest: How many times as long as a slice took the sweep rests after it.
        least_seconds: The least that it rests.
        between_seconds: The least that it rests between two passes.
        orphan_seconds: How long a row has no owner before that is reported.
    """

    rest: float = 30.0
    least_seconds: float = 0.01
    between_seconds: float = 0.25
    orphan_seconds: float = 0.5


@dataclass(frozen=True, slots=True)
class _Fault:
    """What is wrong with one group."""

    invariant: str
    what: str
    owners: tuple[str, ...] = ()


def judge_group(
    shadow: int, holders: Sequence[str], *, read: bool, trained: bool, dropped: bool
) -> _Fault | None:
    """Compare what is known of one position; pure.

    Args:
        shadow: Its code, by events.
        holders: The real owners that have it.
        read: Whether the account has it as read.
        trained: Whether the account has it as trained.
        dropped: Whether the account has it as dropped.

    Returns:
        What is wrong, or None.
    """
    ended = "trained" if trained else "dropped" if dropped else ""
    if len(holders) > 1:
        return _Fault("single_owner", f"owned by {' and '.join(holders)} at once", tuple(holders))
    if trained and dropped:
        return _Fault("conservation", "both trained and dropped")
    if holders:
        return _judge_owned(shadow, holders[0], ended, read=read)
    if ended:
        if shadow == CODES[ended]:
            return None
        return _Fault("conservation", f"booked as {ended}, but by its events {_told(shadow)}")
    if read:
        return _Fault(
            "conservation", f"lost: read, without an owner, not ended; by its events {_told(shadow)}"
        )
    if shadow not in {NONE, LOST}:
        return _Fault("conservation", f"{_told(shadow)} by its events, but never read")
    return None


def _judge_owned(shadow: int, holder: str, ended: str, *, read: bool) -> _Fault | None:
    if ended:
        return _Fault("conservation", f"owned by {holder}, although booked as {ended}")
    if not read:
        return _Fault("conservation", f"owned by {holder}, but never read")
    if shadow == CODES[holder]:
        return None
    if shadow in OWNED:
        owners = tuple(name for name in NAMES if name in {NAMES[shadow], holder})
        return _Fault("single_owner", f"owned by {holder}, but by its events {_told(shadow)}", owners)
    return _Fault("conservation", f"owned by {holder}, but by its events {_told(shadow)}")


class Sweep:
    """Goes through everything, again and again.

    Args:
        owners: The real owners.
        incremental: The shadow, and the counters that events keep.
        report: Takes findings.
        known: Tells whether a group was found at fault before.
        executor: Where rows are listed and compared.
        dataplane: Where rows are; None if nobody knows: then rows are not looked at.
        elsewhere: Returns the keys that are outstanding in the workers' cleanups.
        checks: Called once a pass, for the users' own checks.
        pace: How fast it goes.
        clock: Monotonic nanoseconds.
    """

    def __init__(
        self,
        owners: Owners,
        incremental: Incremental,
        *,
        report: Callable[[Violation, Origin], None],
        known: Callable[[str, str], bool],
        executor: Executor,
        dataplane: DataPlane | None = None,
        elsewhere: Callable[[], Iterable[RowKey]] = tuple,
        checks: Callable[[], None] = lambda: None,
        pace: Pace | None = None,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._owners = owners
        self._events = incremental
        self._shadow = incremental.shadow
        self._report = report
        self._known = known
        self._executor = executor
        self._dataplane = dataplane
        self._elsewhere = elsewhere
        self._checks = checks
        self.pace = Pace() if pace is None else pace
        self._clock = clock
        self._orphans: dict[RowKey, float] = {}
        self._told: set[RowKey] = set()
        self._twice = 0
        self._more = 0
        self._logged = False
        self._findings = 0
        self.passes = 0
        self.slices = 0
        self.failures = 0
        self.longest_step_ns = 0
        """The longest that a slice held the event loop."""

    async def run(self) -> None:
        """Sweep until cancelled; a slice that fails is counted, logged the first time, and passed over."""
        while True:
            await self.once()
            await self._rest(self.pace.between_seconds, hunting=True)

    async def once(self) -> None:
        """Go through everything once."""
        self._events.hunt = False
        before = self._findings
        self._twice = 0
        for epoch in self._epochs():
            base = 0
            while base < self._length(epoch):
                since = self._clock()
                await self._guarded(epoch, base)
                base += SLICE
                await self._rest(max(self.pace.least_seconds, self.pace.rest * (self._clock() - since) / 1e9))
            if epoch < self._owners.accounting.capture().closed.epochs:
                self._shadow.forget(epoch)
        self._foreign()
        self._end_pass(found=self._findings > before)
        self._checks()
        self.passes += 1

    def look(self) -> None:
        """Compare what can be compared at once: position, cursor, versions, phases in progress; await-free."""
        owners, events = self._owners, self._events
        self._look_at_position()
        cursor = owners.sampler.dispatch_cursor
        # A one-piece admission has moved the cursor, perhaps, and not committed yet.
        one_piece = not hasattr(owners.sampler, "commit_admission")
        if cursor != events.cursor and not (one_piece and cursor == events.cursor + 1):
            self._found(
                "cursor_within_lookahead",
                f"the dispatch cursor is {cursor} after {events.cursor + 1} committed admissions",
                evidence={"cursor": cursor, "admissions": events.cursor + 1},
            )
            if cursor < events.cursor:
                events.went_back("dispatch cursor", events.cursor, cursor, "sweep")
            events.cursor = cursor
        for what, before, now in (
            ("trainer version", events.version, owners.versions.value),
            ("step", events.step, owners.step),
            ("mutation version", events.mutation_version, owners.barrier.mutation_version),
        ):
            if now < before:
                events.went_back(what, before, now, "sweep")
        events.version, events.step = owners.versions.value, owners.step
        events.mutation_version = owners.barrier.mutation_version
        events.look_at_phases()

    # ---------------------------------------------------------------------------------------------------- slices

    async def _rest(self, seconds: float, *, hunting: bool = False) -> None:
        """Rest; a little at a time while something may have to be found at once."""
        loop = asyncio.get_running_loop()
        until = loop.time() + seconds
        while True:
            self.look()
            if self._events.gates_waiting:
                await loop.run_in_executor(self._executor, self._events.judge_gates)
            if self._events.dirty:
                await self._dirty()
            left = until - loop.time()
            if left <= 0 or (hunting and self._events.hunt):
                await asyncio.sleep(0)
                return
            await asyncio.sleep(min(left, self.pace.between_seconds))

    async def _guarded(self, epoch: int, base: int) -> None:
        try:
            await self._slice(epoch, base)
        except Exception:  # noqa: BLE001 - whatever a backend raises; the run must not notice
            self._failed()

    def _failed(self) -> None:
        self.failures += 1
        if not self._logged:
            self._logged = True
            _LOG.exception("a part of the auditor's sweep failed and is passed over (logged once)")

    async def _slice(self, epoch: int, base: int) -> None:
        names = [f"e{epoch:03d}-p{position:07d}" for position in range(base, base + SLICE)]
        listed: Collection[RowKey] = ()
        if self._dataplane is not None:
            prefix = f"i{self._dataplane.incarnation:08d}/e{epoch:03d}-p{base // SLICE:0{_DIGITS}d}"
            listed = await asyncio.get_running_loop().run_in_executor(
                self._executor, self._dataplane.keys, prefix
            )
        since = self._clock()
        self.slices += 1
        self._compare_owners(epoch, base, names)
        rows = self._rows_of(names, listed)
        self.longest_step_ns = max(self.longest_step_ns, self._clock() - since)
        await self._judge_rows(*rows)

    async def _dirty(self) -> None:
        """Look at the rows of groups that events hinted at; they are there, or the group has left the buffer."""
        dirty, names = self._events.dirty, list[str]()
        while dirty and len(names) < SLICE:
            names.append(dirty.popleft())
        if self._dataplane is None:
            return
        try:
            await self._judge_rows(*self._rows_of(dict.fromkeys(names), ()))
        except Exception:  # noqa: BLE001 - as above
            self._failed()

    def _compare_owners(self, epoch: int, base: int, names: Sequence[str]) -> None:
        owners, shadow = self._owners, self._shadow
        account: AccountingState = owners.accounting.capture()
        closed = epoch < account.closed.epochs
        opened = next((state for state in account.open if state.epoch == epoch), None)
        read, trained, dropped = (
            (0, b"", b"") if opened is None else (opened.read, opened.trained, opened.dropped)
        )
        codes = shadow.page(epoch, base)
        ledger, spares, buffer = owners.ledger, owners.spares, owners.buffer
        claimed = {entry.group_id for claim in buffer.claims() for entry in claim.entries}
        cursor, ahead = owners.sampler.dispatch_cursor, dict[str, int]()
        faults: dict[_Fault, list[str]] = defaultdict(list)
        for position, name in enumerate(names, base):
            code = codes[position - base]
            holders: list[str] = []
            record = ledger.find(name)
            if record is not None:
                holders.append("ledger")
            if name in spares:
                holders.append("spares")
            entry = buffer.find(name)
            if entry is not None:
                holders.append("training" if name in claimed else "buffer")
            if len(holders) > 1:
                self._twice += len(holders) - 1
            item = record if entry is None else entry
            if item is not None and item.target_step is not None and item.target_step > cursor:
                ahead[name] = item.target_step
            if closed and not holders and code not in OWNED:
                continue
            was_read = closed or position < read
            was_trained = has_bit(trained, position) or (closed and code == TRAINED)
            was_dropped = has_bit(dropped, position) or (closed and code == DROPPED)
            fault = judge_group(code, holders, read=was_read, trained=was_trained, dropped=was_dropped)
            if fault is not None:
                if code != LOST and not self._known(fault.invariant, name):
                    faults[fault].append(name)
                # The shadow goes on from what is; what was wrong has been reported.
                if holders:
                    now = CODES[holders[-1]]
                elif was_trained or was_dropped:
                    now = TRAINED if was_trained else DROPPED
                else:
                    now = LOST if was_read else NONE
                shadow.move(name, now)
        self._report_owners(faults, ahead, cursor)

    def _report_owners(self, faults: dict[_Fault, list[str]], ahead: dict[str, int], cursor: int) -> None:
        for fault, groups in faults.items():
            evidence: dict[str, Any] = {"what": fault.what}
            if fault.owners:
                evidence["owners"] = list(fault.owners)
            self._found(fault.invariant, f"{_named(groups)}: {fault.what}", groups, fault.owners, evidence)
        ahead = {name: step for name, step in ahead.items() if not self._known("cursor_covers_buffer", name)}
        if ahead:
            self._found(
                "cursor_covers_buffer",
                f"the dispatch cursor is {cursor}, but {_named(list(ahead))} carry stamps up to "
                f"{max(ahead.values())}",
                list(ahead),
                evidence={"cursor": cursor, "target_steps": ahead},
            )

    # ------------------------------------------------------------------------------------------------------ rows

    def _rows_of(
        self, names: Collection[str], listed: Collection[RowKey]
    ) -> tuple[list[BufferEntry], set[tuple[str, int]], Collection[RowKey], frozenset[RowKey]]:
        """Read the owners of rows, and what is on its way out, in one await-free step."""
        owners = self._owners
        entries, attempts = [], set()
        if self._dataplane is not None:
            for name in names:
                entry = owners.buffer.find(name)
                if entry is not None:
                    entries.append(entry)
                record = owners.ledger.find(name)
                if record is not None:
                    attempts.add((name, record.attempt))
        named = frozenset(names)
        mine = [key for key in listed if key.group_id in named]
        settling = (*owners.clears.outstanding(), *self._elsewhere()) if mine else ()
        return entries, attempts, mine, frozenset(settling)

    async def _judge_rows(
        self,
        entries: list[BufferEntry],
        attempts: set[tuple[str, int]],
        listed: Collection[RowKey],
        settling: frozenset[RowKey],
    ) -> None:
        if self._dataplane is None or not (entries or listed or self._orphans):
            return
        loop = asyncio.get_running_loop()
        missing, orphans = await loop.run_in_executor(
            self._executor, _compare_rows, self._dataplane, entries, attempts, listed, settling
        )
        gone: dict[str, RowKey] = {}
        for entry, key in missing:
            if self._owners.buffer.find(entry.group_id) is entry and not self._known(
                "rows_present", entry.group_id
            ):
                gone.setdefault(entry.group_id, key)
        if gone:
            self._found(
                "rows_present",
                f"rows of {_named(list(gone))} are missing, first {next(iter(gone.values())).encode()}",
                list(gone),
                evidence={"missing": [key.encode() for key in gone.values()]},
            )
        self._judge_orphans(listed, orphans, loop.time())

    def _judge_orphans(self, listed: Collection[RowKey], orphans: Collection[RowKey], now: float) -> None:
        found = frozenset(orphans)
        for key in listed:
            if key not in found:
                self._orphans.pop(key, None)
        told = []
        for key in found:
            since = self._orphans.setdefault(key, now)
            if now - since >= self.pace.orphan_seconds and key not in self._told:
                told.append(key)
        if len(self._orphans) > _MOST_ORPHANS:
            self._orphans.clear()
        if not told:
            return
        told.sort(key=lambda key: key.encode())
        if len(self._told) + len(told) <= _MOST_ORPHANS:
            self._told.update(told)
        self._found(
            "rows_not_orphaned",
            f"{len(told)} rows have no owner and wait for no clear, first {told[0].encode()}",
            list(dict.fromkeys(key.group_id for key in told)),
            evidence={"orphans": [key.encode() for key in told[:SLICE]]},
            severity="warning",
        )

    # ---------------------------------------------------------------------------------------------------- totals

    def _look_at_position(self) -> None:
        """The committed position and the account were set in one step, so they agree."""
        account, position = self._owners.accounting.capture(), self._owners.position
        newest = account.closed.epochs + len(account.open) - 1
        read = {state.epoch: state.read for state in account.open}
        if position.epoch in read:
            agree = position.epoch == newest and position.position == read[position.epoch]
        else:
            agree = (position.epoch == newest + 1 and position.position == 0) or (
                position.epoch == newest < account.closed.epochs
            )
        if not agree:
            counted = read.get(position.epoch, 0)
            self._found(
                "conservation",
                f"the dataset counts as read up to epoch {position.epoch} position {position.position}, but the account "
                f"has {counted} positions there and epoch {newest} as its newest",
                evidence={
                    "epoch": position.epoch,
                    "position": position.position,
                    "counted": counted,
                    "newest": newest,
                },
            )

    def _more_than_told(self) -> int:
        """Return how many groups more the owners have than events say, but for those that were found twice."""
        owners = self._owners
        real = len(owners.ledger) + len(owners.spares) + len(owners.buffer)
        return real - self._shadow.owned() - self._twice

    def _end_pass(self, *, found: bool) -> None:
        """Report a number that differs although every group that could be looked at agrees, in two passes."""
        owners = self._owners
        self._events.reserved = min(self._events.reserved, len(owners.ledger) - owners.ledger.admitted)
        more = 0 if found else self._more_than_told()
        if more and more == self._more:
            self._found(
                "conservation",
                f"ledger, spares and buffer own {more:+d} groups against what their events say",
                evidence={"more": more},
            )
        self._more = more

    def _foreign(self) -> None:
        """Groups whose ids name no position: they have the owner that events say."""
        owners = self._owners
        for name, code in list(self._shadow.foreign.items()):
            holders = [
                owner
                for owner, there in (
                    ("ledger", name in owners.ledger),
                    ("spares", name in owners.spares),
                    ("buffer", name in owners.buffer),
                )
                if there
            ]
            if len(holders) > 1 and not self._known("single_owner", name):
                evidence = {"owners": holders}
                what = f"group {name}: owned by {' and '.join(holders)} at once"
                self._found("single_owner", what, [name], tuple(holders), evidence)
            elif not holders and code in OWNED and not self._known("conservation", name):
                what = f"group {name}: lost; by its events {_told(code)}"
                self._found("conservation", what, [name], evidence={"what": "lost"})
                self._shadow.foreign.pop(name, None)

    def _epochs(self) -> Iterator[int]:
        account = self._owners.accounting.capture()
        yield from sorted({*self._shadow.epochs, *(state.epoch for state in account.open)})

    def _length(self, epoch: int) -> int:
        read = next(
            (state.read for state in self._owners.accounting.capture().open if state.epoch == epoch), 0
        )
        return max(read, self._shadow.epochs.get(epoch, 0))

    def _found(
        self,
        invariant: str,
        message: str,
        groups: Sequence[str] = (),
        owners: tuple[str, ...] = (),
        evidence: dict[str, Any] | None = None,
        severity: Severity = "critical",
    ) -> None:
        self._findings += 1
        self._report(
            Violation(invariant, severity, message, tuple(groups), owners, "", evidence or {}), "sweep"
        )


_MOST_ORPHANS: Final = 10_000
"""Rows without an owner that are remembered; beyond that each waits anew."""


def _compare_rows(
    dataplane: DataPlane,
    entries: Sequence[BufferEntry],
    attempts: Collection[tuple[str, int]],
    listed: Collection[RowKey],
    settling: Collection[RowKey],
) -> tuple[list[tuple[BufferEntry, RowKey]], tuple[RowKey, ...]]:
    """Runs in a thread: which rows of which entries are not there, and which rows that are there nobody owns."""
    there = frozenset(listed)
    absent = {key: entry for entry in entries for key in entry.keys if key not in there}
    missing = [(absent[key], key) for key in dataplane.missing(absent)] if absent else []
    named = {key for entry in entries for key in entry.keys}
    orphans = [
        key
        for key in listed
        if key not in named and key not in settling and (key.group_id, key.attempt) not in attempts
    ]
    gone = frozenset(dataplane.missing(orphans)) if orphans else frozenset()
    return missing, tuple(key for key in orphans if key not in gone)


def _told(code: int) -> str:
    if code == NONE:
        return "it was never read"
    return f"it is {NAMES[code]}" if code not in OWNED else f"{NAMES[code]} owns it"


def _named(groups: Sequence[str]) -> str:
    head, more = ", ".join(groups[:5]), len(groups) - 5
    return f"group{'s' if len(groups) > 1 else ''} {head}" + (f" and {more} more" if more > 0 else "")
