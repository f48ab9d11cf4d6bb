"""Doing one drill in a run that goes on: open the hole, wait for the auditor, close the hole, look what else fired.

::

    before: every record that there is
    hole open ── broken ──> the expected invariants fire ── hole closed ──> nothing else fires

What it broke in the run's state is treated as a refused checkpoint would treat it: groups at fault are booked as dropped
with the reason ``violation``, so that the run can go on and save.

Rule: the hole is closed whatever happens. A record that begins meanwhile carries ``drill`` in its evidence and takes the
ordinary way, through log, metrics and alerts. Yield rule: :func:`perform` suspends.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from quiesce.drills.drill import DrillResult, Fired
from quiesce.drills.holes import POLL_SECONDS, Holes
from quiesce.errors import DrillNotPossibleError

if TYPE_CHECKING:
    from quiesce.auditor import Auditor, ViolationRecord
    from quiesce.drills.drill import Drill
    from quiesce.drills.target import DrillTarget

__all__ = ["MARK", "Progress", "applies_in", "perform"]

MARK: Final = "drill"
"""The key of a record's evidence that names the drill."""

QUIET_SECONDS: Final = 1.0
"""How long nothing else may fire after what was expected has."""

Progress = Callable[[str], None]
"""Told where a drill is: ``looking`` for something to break, ``armed`` for the next cut or ``broken``, ``fired``."""


def applies_in(target: DrillTarget, drill: Drill) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return what a drill breaks in a run, and what it would break but does not apply there, with the reasons."""
    inactive = {
        status.name: status.why
        for status in target.auditor.status()
        if status.name in drill.expected and status.state == "inactive" and status.name != "gate_is_respected"
    }
    return tuple(name for name in drill.expected if name not in inactive), inactive


async def perform(
    target: DrillTarget,
    drill: Drill,
    *,
    patience: float = 60.0,
    quiet: float = QUIET_SECONDS,
    until_cut: bool = False,
    progress: Progress = lambda _state: None,
) -> DrillResult:
    """Do one drill.

    Args:
        target: The run.
        drill: Which.
        patience: Seconds to wait for something to break, and again for what was expected to fire.
        quiet: Seconds in which nothing else may fire after that.
        until_cut: Whether to wait for the end of the next checkpoint as well.
        progress: Told where it is.

    Returns:
        What fired.

    Raises:
        DrillNotPossibleError: If the run has nothing that it could break, or it could not be seen there.
    """
    loop = asyncio.get_running_loop()
    expected, inactive = applies_in(target, drill)
    if not expected:
        raise DrillNotPossibleError(drill.name, "; ".join(inactive.values()))
    auditor = target.auditor
    _forget_drills(auditor)
    watch = _Watch(auditor)
    holes = Holes(drill.name, target)
    cuts = _Cuts()
    auditor.marks[MARK] = drill.name
    began = loop.time()
    booked: tuple[str, ...] = ()
    try:
        target.hub.subscribe(cuts)
        try:
            progress("looking")
            try:
                async with asyncio.timeout(patience) as scope:
                    await drill.inject(target, holes)
            except TimeoutError as error:
                if not scope.expired():
                    raise
                raise DrillNotPossibleError(
                    drill.name, f"nothing that it could break came by within {patience:g} s"
                ) from error
            watch.since = loop.time() if holes.broken_at is None else holes.broken_at
            progress("armed" if drill.at_once is False else "broken")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience):
                    while not set(expected) <= watch.look():  # noqa: ASYNC110 - records come from any thread
                        await asyncio.sleep(POLL_SECONDS)
        finally:
            await holes.close()
        progress("fired")
        booked = await _book(target, [fired for fired in watch.fired if fired.severity == "critical"])
        ended = cuts.ended
        await _rest(watch, quiet)
        if until_cut:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience):
                    while cuts.ended <= ended:
                        await _rest(watch, POLL_SECONDS)
            await _rest(watch, POLL_SECONDS)
    finally:
        target.hub.unsubscribe(cuts)
        auditor.marks.pop(MARK, None)
    watch.look()
    return DrillResult(
        drill=drill.name,
        expected=expected,
        fired=tuple(watch.fired),
        inactive=inactive,
        seconds=loop.time() - began,
        booked=booked,
    )


async def _rest(watch: _Watch, seconds: float) -> None:
    until = asyncio.get_running_loop().time() + seconds
    while (left := until - asyncio.get_running_loop().time()) > 0:
        await asyncio.sleep(min(left, POLL_SECONDS))
        watch.look()


async def _book(target: DrillTarget, fired: Sequence[Fired]) -> tuple[str, ...]:
    """Drop the groups at fault, as the controller does after a refused checkpoint."""
    names = tuple(dict.fromkeys(group for record in fired for group in record.groups))
    if not names:
        return ()
    async with target.owners.barrier.mutation("group_removal") as cut:
        gone = target.owners.condemn(cut, names)
    target.rollouts.cancel(gone)
    return gone


def _forget_drills(auditor: Auditor) -> None:
    """Let a fault of an earlier drill be news again: it is the alert chain that is tested, however often."""
    records = auditor.records
    with records._lock:  # noqa: SLF001 - the run's own records are kept, and this is about no others
        faults = [key for key, record in records._keyed.items() if MARK in record.evidence]  # noqa: SLF001
        for key in faults:
            del records._keyed[key]  # noqa: SLF001


class _Watch:
    """Notes the records that begin, and when."""

    def __init__(self, auditor: Auditor) -> None:
        self._auditor = auditor
        self._seen = {record.key for record in auditor.records.all()}
        self.since: float | None = None
        self.fired: list[Fired] = []

    def look(self) -> set[str]:
        """Look for new ones; return the invariants that have fired so far."""
        now = asyncio.get_running_loop().time()
        for record in self._auditor.records.all():
            if record.key not in self._seen:
                self._seen.add(record.key)
                self.fired.append(_fired(record, 0.0 if self.since is None else max(0.0, now - self.since)))
        return {fired.invariant for fired in self.fired}


class _Cuts:
    """Counts the checkpoints that ended."""

    def __init__(self) -> None:
        self.ended = 0

    def checkpoint_ended(self, *_: object) -> None:
        """Count it."""
        self.ended += 1


def _fired(record: ViolationRecord, seconds: float) -> Fired:
    return Fired(
        invariant=record.invariant,
        severity=record.severity,
        seconds=seconds,
        key=record.key,
        origin=record.origin,
        message=record.message,
        groups=record.groups,
    )
