"""Faults of ownership: two owners of one group, or none.

Rule: each is a mistake that a run could contain, done to the live run. Yield rule: every fault suspends.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from quiesce.drills.drill import Drill

if TYPE_CHECKING:
    from quiesce.barrier import Cut
    from quiesce.drills.holes import Holes
    from quiesce.drills.target import DrillTarget
    from quiesce.types import BufferEntry, GroupRecord

__all__ = ["OWNERSHIP"]


async def _ledger_keeps_its_entry(target: DrillTarget, holes: Holes) -> None:
    ledger = target.owners.ledger
    groups: list[str] = []

    def kept(_take: object, _cut: Cut, group_id: str, **_: object) -> GroupRecord:
        groups.append(group_id)
        target.hub.fire("owner_moved", group_id, "ledger", "buffer", "")
        return ledger.get(group_id)

    taken = holes.once(ledger, "take_group", kept, when=lambda *_, target="", **__: target == "buffer")
    holes.keep_from_training(groups.__contains__)
    await holes.until(taken.is_set)


async def _spare_is_kept(target: DrillTarget, holes: Holes) -> None:
    owners, rollouts = target.owners, target.rollouts
    if not len(owners.spares):
        if not target.wants_spares:
            raise holes.impossible("it keeps no spare prompts (controller.spare_prompts is 0)")
        await holes.until(lambda: len(owners.spares) > 0)
    while True:
        failed = await holes.flying_group("single_owner")
        async with owners.barrier.mutation("substitution") as cut:
            if owners.ledger.find(failed.group_id) != failed or not len(owners.spares):
                continue  # it came through meanwhile
            holes.once(owners.spares, "take", lambda _take, _cut: owners.spares.refs()[0])
            stand_in = owners.substitute(cut, failed)
        break
    rollouts.cancel([failed.group_id])

    async def launch() -> None:
        payload = await rollouts._source.payload(stand_in.prompt)  # noqa: SLF001 - as its worker would
        if owners.ledger.find(stand_in.group_id) == stand_in:
            rollouts.launch(stand_in, payload)

    holes.mend(launch)  # not before it was seen: a fast one would be trained by then


async def _group_is_restored_twice(target: DrillTarget, holes: Holes) -> None:
    from quiesce.types import GroupRecord

    owners = target.owners
    while True:
        entry = await holes.ready_group("single_owner")
        async with owners.barrier.mutation("recovery_restore") as cut:
            if owners.buffer.find(entry.group_id) is not entry:
                continue
            record = GroupRecord(
                entry.group_id,
                entry.admission_id,
                entry.prompt,
                "admitted",
                entry.target_step,
                entry.start_version,
                entry.attempt + 1,
            )
            owners.ledger.reserve_group(cut, record, source="read")
        return


async def _stale_attempt_commits(target: DrillTarget, holes: Holes) -> None:
    buffer = target.owners.buffer

    def twice(commit: Any, cut: Cut, group_id: str, attempt: int, **given: Any) -> BufferEntry:  # noqa: ANN401 - passed on
        entry: BufferEntry = commit(cut, group_id, attempt, **given)
        # What the attempt before does once it is there too, if nobody asks which one the ledger waits for.
        buffer._ready[group_id] = entry  # noqa: SLF001 - the hole
        target.hub.fire("owner_moved", group_id, "ledger", "buffer", "")
        return entry

    taken = holes.once(buffer, "commit_group", twice)
    await holes.until(taken.is_set)


async def _popped_spare_is_lost(target: DrillTarget, holes: Holes) -> None:
    owners = target.owners
    if not len(owners.spares) and not target.wants_spares:
        raise holes.impossible("it keeps no spare prompts (controller.spare_prompts is 0)")
    while True:
        await holes.until(lambda: len(owners.spares) > 0)
        async with owners.barrier.mutation("substitution") as cut:
            if len(owners.spares):
                owners.spares.take(cut)
                return


async def _position_moves_alone(target: DrillTarget, holes: Holes) -> None:
    owners = target.owners
    right = wrong = owners.position

    def put_right() -> None:
        if owners.position is wrong:
            owners.position = right

    holes.on_close(put_right)

    def looked_at() -> bool:
        nonlocal right, wrong
        if owners.position is not wrong or wrong is right:  # the next pull has put it right
            right = owners.position
            wrong = owners.position = dataclasses.replace(right, position=right.position + 4)
            holes.broken()
        return holes.fired("conservation")

    await holes.until(looked_at)


async def _drop_is_not_booked(target: DrillTarget, holes: Holes) -> None:
    owners = target.owners
    while True:
        entry = await holes.ready_group("conservation")
        async with owners.barrier.mutation("group_removal") as cut:
            if owners.buffer.find(entry.group_id) is not entry or entry not in owners.buffer.ready():
                continue
            holes.once(owners.accounting, "dropped", lambda *_: None)
            owners.evict(cut, [entry.group_id])
        return


OWNERSHIP = (
    Drill(
        "ledger-keeps-its-entry",
        "A finished group is buffered, and the ledger still has it.",
        "the ledger's entry is dropped after the slot, or not at all",
        ("single_owner",),
        _ledger_keeps_its_entry,
        mentions="ledger and buffer",
    ),
    Drill(
        "spare-is-kept",
        "The pool hands a spare out for a failed group, and keeps it.",
        "a pool that peeks where it should pop",
        ("single_owner",),
        _spare_is_kept,
        mentions="spares",
        options={"spare_prompts": 3},
    ),
    Drill(
        "group-is-restored-twice",
        "A group that the buffer owns enters the ledger a second time.",
        "a restore that does not subtract the buffer from the ledger",
        ("single_owner",),
        _group_is_restored_twice,
        mentions="buffer owns it",
    ),
    Drill(
        "stale-attempt-commits",
        "A group is buffered by the attempt that the ledger waits for, then again by the one before it.",
        "a commit after redispatch that does not ask which attempt it is",
        ("single_owner",),
        _stale_attempt_commits,
        mentions="buffer owns it",
    ),
    Drill(
        "popped-spare-is-lost",
        "A spare leaves the pool, and whoever took it forgets it.",
        "a spare that is popped before the slot, by a task that is cancelled",
        ("conservation",),
        _popped_spare_is_lost,
        mentions="lost",
        options={"spare_prompts": 3},
    ),
    Drill(
        "position-outside-a-slot",
        "The dataset counts as read further than any prompt was handed out.",
        "a loader's position that is committed outside the slot that reserves its prompts",
        ("conservation",),
        _position_moves_alone,
        mentions="counts as read up to",
    ),
    Drill(
        "drop-is-not-booked",
        "A group is evicted, and the account is not told.",
        "an eviction that forgets its book-keeping",
        ("conservation",),
        _drop_is_not_booked,
        mentions="lost",
    ),
)
