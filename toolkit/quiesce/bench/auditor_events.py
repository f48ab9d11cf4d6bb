"""What the auditor adds to an event, and what it keeps: at so many groups, against a bare mutation slot.

Rule: an event is fired at a hub that only the auditor listens to, so its cost is everything that the auditor makes a run
pay in that step, the way through the hub too; a gate's event is judged later, and that is counted as part of it. All kinds
of events and the bare slot are measured in every round, in turns, by the processor time of this thread. Yield rule:
:func:`measure_events` runs to its end without another task; it is to be awaited for its slots.
"""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from quiesce.auditor import AUDITED, Auditor
from quiesce.auditor.incremental import DIRTY, GATE_LOG
from quiesce.auditor.record import MAX_GROUPS
from quiesce.auditor.ring import RING_SIZE, SHOWN
from quiesce.barrier import DataPlaneCheckpointBarrier
from quiesce.bench.auditor_world import GROUPS_PER_STEP, owners_of
from quiesce.bench.stats import quiet_collector
from quiesce.checkpoint.cut import PARTS
from quiesce.invariants.violation import Violation
from quiesce.observers import Hub
from quiesce.snapshot_gate import SEQUENCES_PER_GATE
from quiesce.types import PromptRef

__all__ = ["KINDS", "EventCosts", "Heard", "Kept", "measure_events", "measure_kept"]

KINDS: Final = (
    "slot entered and left",
    "group through its life",
    "group anywhere moved",
    "admission committed",
    "version advanced",
    "permit and clear",
    "gate closed and opened",
    "cut taken",
)
"""What is fired; each is several events, and its cost is that of one of them."""

_KIND: Final = "group_commit"
_STEP_GROUPS: Final = 8
_STEPS_AHEAD: Final = 16


@dataclass(frozen=True, slots=True)
class EventCosts:
    """What events took.

    Attributes:
        event_ns: By kind, one number a round: processor time of one event.
        slot_ns: One number a round: processor time of a bare slot.
    """

    event_ns: Mapping[str, Sequence[float]]
    slot_ns: Sequence[float]


@dataclass(frozen=True, slots=True)
class Kept:
    """What the auditor keeps in memory.

    Attributes:
        num_bytes: Everything, with its bounded logs full.
        records_bytes: What a record of each invariant adds.
    """

    num_bytes: int
    records_bytes: int


class Heard:
    """A hub that an auditor listens to, and a run of so many groups as its events tell it.

    Args:
        groups: Groups that were read; the older half of them is finished.
    """

    def __init__(self, groups: int) -> None:
        self.hub = Hub(strict=True)
        self.owners = owners_of(self.hub)
        self.groups = groups
        self._next = groups
        self._sequence = SEQUENCES_PER_GATE
        self._epoch = 0

    def begin(self) -> Auditor:
        """Start an auditor, and have it hear how the groups came to be; in an event loop."""
        self.auditor = auditor = Auditor(self.owners)
        auditor.start(sweeping=False)
        fire = self.hub.fire
        fire("slot_opened", _KIND, 0, 0)
        fire("prompts_read", self.groups)
        for position in range(self.groups):
            fire("owner_moved", PromptRef(0, position, position).group_id, "read", "ledger", "")
        for position in range(max(1, self.groups // 2)):
            fire("owner_moved", PromptRef(0, position, position).group_id, "ledger", "buffer", "")
        fire("slot_closed", _KIND, 0, 0, "completed", 0)
        return auditor

    def anywhere(self, count: int) -> list[str]:
        """Return the ids of finished groups, spread over all of them."""
        half = max(1, self.groups // 2)
        count = min(count, half)
        return [PromptRef(0, at * half // count, 0).group_id for at in range(count)]

    def lives(self, ids: Sequence[str]) -> int:
        """Read prompts and take each through its life, a step's groups at a time."""
        fire, events = self.hub.fire, 0
        for first in range(0, len(ids), _STEP_GROUPS):
            names = ids[first : first + _STEP_GROUPS]
            fire("prompts_read", len(names))
            for source, target in (
                ("read", "ledger"),
                ("ledger", "buffer"),
                ("buffer", "training"),
                ("training", "trained"),
            ):
                for name in names:
                    fire("owner_moved", name, source, target, "")
            events += 1 + 4 * len(names)
        return events

    def moves(self, ids: Sequence[str]) -> int:
        """Claim groups and give them back."""
        fire = self.hub.fire
        for name in ids:
            fire("owner_moved", name, "buffer", "training", "")
        for name in ids:
            fire("owner_moved", name, "training", "buffer", "")
        return 2 * len(ids)

    def admissions(self, count: int) -> int:
        """Admit batches that are stamped."""
        events, fire = self.auditor.events, self.hub.fire
        events.reserved = count * GROUPS_PER_STEP
        for cursor in range(events.cursor + 1, events.cursor + 1 + count):
            fire("admission_committed", "transactional", cursor, cursor, GROUPS_PER_STEP)
        return count

    def versions(self, count: int) -> int:
        """Advance the version."""
        events, fire = self.auditor.events, self.hub.fire
        for version in range(events.version + 1, events.version + 1 + count):
            fire("version_advanced", version)
        return count

    def permits(self, count: int) -> int:
        """Take permits, clear under each, give it back; and have that judged."""
        fire, sequence = self.hub.fire, self._sequence
        for _ in range(count):
            sequence += 2
            fire("permit_granted", "0", sequence - 1, 0)
            fire("clear_started", "0", sequence - 1, 8)
            fire("permit_released", "0", sequence, 0)
        self._sequence = sequence
        self.auditor.events.judge_gates()
        return 3 * count

    def closes(self, epochs: Sequence[str]) -> int:
        """Close a gate and open it; and have that judged."""
        fire = self.hub.fire
        for epoch in epochs:
            self._sequence += 3
            sequence = self._sequence
            fire("gate_closing", "0", sequence - 2, epoch)
            fire("gate_closed", "0", sequence - 1, epoch, 0, "closed")
            fire("gate_reopened", "0", sequence, epoch, 0)
        self.auditor.events.judge_gates()
        return 3 * len(epochs)

    def cuts(self, cuts: Sequence[str]) -> int:
        """Open a window, capture all parts, close it; the phases around it too."""
        fire = self.hub.fire
        for cut in cuts:
            fire("phase_started", cut, "drain")
            fire("window_opened", cut, 0, (), 0)
            fire("phase_ended", cut, "drain", 0, "completed")
            fire("phase_started", cut, "exclusive")
            for part in PARTS:
                fire("cut_part_captured", cut, part, 0)
            fire("window_closed", cut, 0, 0, "completed", 0)
            fire("phase_ended", cut, "exclusive", 0, "completed")
        return (6 + len(PARTS)) * len(cuts)

    def fresh(self, count: int) -> list[str]:
        """Return the ids of prompts that are read next."""
        first, self._next = self._next, self._next + count
        return [PromptRef(0, position, position).group_id for position in range(first, first + count)]

    def fill_logs(self) -> None:
        """Fire events until every log of the auditor's that has a bound is at it."""
        fire, events = self.hub.fire, self.auditor.events
        fire("slot_opened", _KIND, 0, 0)
        while len(events.ring) < RING_SIZE or len(events.dirty) < DIRTY:
            self.moves(self.anywhere(DIRTY))
        self.admissions(_STEPS_AHEAD)
        fire("slot_closed", _KIND, 0, 0, "completed", 0)
        for _ in range(GATE_LOG // 2):
            self._sequence += 2
            fire("permit_granted", "0", self._sequence - 1, 0)
            fire("permit_released", "0", self._sequence, 0)

    def report_each(self) -> None:
        """Have a violation of every invariant recorded, of as many groups as a record names."""
        for name in AUDITED:
            groups = tuple(self.fresh(MAX_GROUPS))
            # Kept and not told: nobody is to read of it in a log.
            self.auditor.records.add(
                Violation(name, "critical", "measured", groups, evidence={"missing": list(groups)}),
                origin="live",
                unix_time=0.0,
                events=self.auditor.events.ring.of((), SHOWN),
            )

    def epochs(self, count: int) -> list[str]:
        """Return the next epochs, as gates tell them."""
        first, self._epoch = self._epoch, self._epoch + count
        return [f"1.{number + 1}" for number in range(first, first + count)]

    def check(self) -> None:
        """Refuse a measurement in which the auditor found something: then it measured something else.

        Raises:
            RuntimeError: If there is a record.
        """
        records = self.auditor.records.all()
        if records:
            raise RuntimeError(f"the auditor found what is not there: {records[0].message}")


async def measure_events(groups: int, rounds: int, count: int) -> EventCosts:
    """Measure each kind of event with so many groups in the auditor's book.

    Args:
        groups: Groups.
        rounds: Rounds; the kinds are measured in another order in each.
        count: Bare slots of a round, and moves, admissions and versions; of the longer kinds there are fewer.
    """
    heard, few = Heard(groups), max(1, count // 8)
    auditor = heard.begin()
    anywhere = heard.anywhere(count)
    silent = DataPlaneCheckpointBarrier(hub=Hub())
    slot_ns: list[float] = []
    event_ns: dict[str, list[float]] = {kind: [] for kind in KINDS}
    try:
        with quiet_collector():
            for number in range(-1, rounds):
                bare = await _slots(silent, count)
                # What a slot takes with an auditor, less what it takes without, is what its two events take.
                of_slot = (await _slots(heard.owners.barrier, count) - bare) / 2
                epochs, prompts = heard.epochs(few), heard.fresh(few)
                took = {KINDS[0]: of_slot, KINDS[7]: _fired(partial(heard.cuts, epochs))}
                in_a_slot = (
                    (KINDS[1], partial(heard.lives, prompts)),
                    (KINDS[2], partial(heard.moves, anywhere)),
                    (KINDS[3], partial(heard.admissions, few)),
                    (KINDS[4], partial(heard.versions, few)),
                    (KINDS[5], partial(heard.permits, few)),
                    (KINDS[6], partial(heard.closes, epochs)),
                )
                heard.hub.fire("slot_opened", _KIND, 0, 0)
                first = number % len(in_a_slot)
                for kind, work in (*in_a_slot[first:], *in_a_slot[:first]):
                    took[kind] = _fired(work)
                heard.hub.fire("slot_closed", _KIND, 0, 0, "completed", 0)
                if number < 0:
                    continue  # once before it counts: caches, lazily built state
                slot_ns.append(bare)
                for kind, ns in took.items():
                    event_ns[kind].append(ns)
        heard.check()
    finally:
        await auditor.aclose()
    return EventCosts(event_ns, slot_ns)


async def measure_kept(groups: int) -> Kept:
    """Measure what the auditor keeps at so many groups: its book, and its logs when they are as full as they get.

    Args:
        groups: Groups.
    """
    for number in (1, groups):  # once before it counts: what is built lazily is not the auditor's
        heard = Heard(number)
        gc.collect()
        tracemalloc.start()
        try:
            auditor = heard.begin()
            heard.fill_logs()
            gc.collect()
            kept = tracemalloc.get_traced_memory()[0]
            heard.check()
            heard.report_each()
            gc.collect()
            with_records = tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
        await auditor.aclose()
    return Kept(kept, with_records - kept)


async def _slots(barrier: DataPlaneCheckpointBarrier, count: int) -> float:
    """Enter and leave slots, one after the other; return what one of them took."""
    mutation = barrier.mutation
    since = time.thread_time_ns()
    for _ in range(count):
        async with mutation(_KIND):
            pass
    return (time.thread_time_ns() - since) / count


def _fired(work: Callable[[], int]) -> float:
    since = time.thread_time_ns()
    done = work()
    return (time.thread_time_ns() - since) / done
