"""Faults of admission: a cursor, a gate or a stamp that does not fit the groups.

Rule: each is a mistake that a run could contain, done to the live run. Yield rule: every fault suspends.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Final

from quiesce.drills.drill import Drill

if TYPE_CHECKING:
    from quiesce.barrier import MutationCut
    from quiesce.drills.holes import Holes
    from quiesce.drills.target import DrillTarget

__all__ = ["CURSOR"]

_AHEAD: Final = 1000
"""Steps that a wrong stamp is ahead: no later batch comes to carry the same one."""


async def _cursor_is_read_early(target: DrillTarget, holes: Holes) -> None:
    sources = target.sources
    original, early = sources.sampler_state, sources.sampler_state()

    def state() -> Any:  # noqa: ANN401 - a SamplerState
        nonlocal early
        now = original()
        if now.cursor == early.cursor:
            # The same as ever: what was read early shows once a batch was admitted since. Batches may have been reserved
            # all the same, and a state from before them would take more back than the cursor.
            early = now
            return now
        back()
        return early

    back = holes.replace(sources, "sampler_state", state)


async def _stamp_is_ahead(target: DrillTarget, holes: Holes) -> None:
    sampler = _two_step(target, holes)
    if not sampler.stamps_target_steps:
        raise holes.impossible(f"sampler {sampler.name!r} stamps no target steps")
    taken = holes.once(sampler, "commit_admission", lambda commit, cut: commit(cut) + _AHEAD)
    await holes.until(taken.is_set)


async def _gate_does_not_hold(target: DrillTarget, holes: Holes) -> None:
    sampler, owners = _two_step(target, holes), target.owners
    window = target.gate_window
    if window is None:
        raise holes.impossible(f"sampler {sampler.name!r} has no gate")

    def is_shut(*_: object) -> bool:
        return bool(sampler.dispatch_cursor >= owners.versions.value + window)

    async def at_once(*_: object) -> None:
        return

    def narrow() -> None:
        owners.capacity -= owners.groups_per_step

    owners.capacity += owners.groups_per_step
    holes.on_close(narrow)
    owners.changed.notify()
    while not holes.fired("cursor_within_lookahead"):
        # Between the wait and the slot the trainer may take a step: then its gate was open after all.
        taken = holes.once(sampler, "wait_until_admissible", at_once, when=is_shut)
        await holes.until(taken.is_set)
        holes.broken()
        await holes.settle()


async def _cursor_counts_twice(target: DrillTarget, holes: Holes) -> None:
    sampler, admission = _two_step(target, holes), target.admission
    if not hasattr(sampler, "_cursor"):
        raise holes.impossible(f"nobody knows where sampler {sampler.name!r} keeps its cursor")
    sampler._cursor += 1  # noqa: SLF001 - the hole

    def book() -> None:
        admission._committed += 1  # noqa: SLF001 - so that the run can save again

    holes.on_close(book)


async def _batch_is_admitted_twice(target: DrillTarget, holes: Holes) -> None:
    admission, ledger = target.admission, target.owners.ledger

    def earlier() -> list[str]:
        return [record.group_id for record in ledger.records() if record.phase == "admitted"]

    def with_it(mark: Any, cut: MutationCut, ids: tuple[str, ...], stamp: int | None, version: int) -> Any:  # noqa: ANN401 - passed on
        records = [ledger.get(group_id) for group_id in earlier()]
        for record in records:
            ledger._records[record.group_id] = dataclasses.replace(record, phase="reserved")  # noqa: SLF001 - the hole
        ledger._admitted -= len(records)  # noqa: SLF001
        admitted = mark(cut, (*ids, *(record.group_id for record in records)), stamp, version)
        for record in records:
            ledger._records[record.group_id] = record  # noqa: SLF001 - their stamps stay: it is the admission that is wrong
        return dataclasses.replace(admitted, group_ids=ids)

    taken = holes.once(admission, "_mark", with_it, when=lambda *_: bool(earlier()))
    await holes.until(taken.is_set)


def _two_step(target: DrillTarget, holes: Holes) -> Any:  # noqa: ANN401 - a sampler with more than its protocol
    sampler = target.owners.sampler
    if not hasattr(sampler, "commit_admission"):
        raise holes.impossible(f"sampler {sampler.name!r} admits in one piece")
    return sampler


CURSOR = (
    Drill(
        "early-cursor",
        "A checkpoint has the dispatch cursor of some time before, beside the groups of now.",
        "a cursor that is read before the window, not in it",
        ("cursor_covers_buffer", "cursor_within_lookahead"),
        _cursor_is_read_early,
        at_once=False,
        mentions="cursor and groups come from two different moments",
    ),
    Drill(
        "stamp-ahead-of-the-cursor",
        "A batch is stamped with a step that the dispatch cursor has not reached.",
        "a sampler that stamps before it counts, or counts in the wrong unit",
        ("cursor_covers_buffer",),
        _stamp_is_ahead,
        mentions="is stamped with step",
    ),
    Drill(
        "gate-does-not-hold",
        "A batch is admitted although the sampler's gate is shut.",
        "a sampler that does not wait",
        ("cursor_within_lookahead",),
        _gate_does_not_hold,
        mentions="the gate shuts at",
    ),
    Drill(
        "cursor-counts-twice",
        "The dispatch cursor counts an admission that nobody has committed.",
        "a cursor that is advanced in a wait that is then cancelled, and again in the next",
        ("cursor_within_lookahead",),
        _cursor_counts_twice,
        mentions="committed admissions",
    ),
    Drill(
        "batch-is-admitted-twice",
        "Groups that were admitted before are admitted again, with the next batch.",
        "a restore that redispatches a batch and leaves it to the pump as well",
        ("cursor_within_lookahead",),
        _batch_is_admitted_twice,
        mentions="admitted twice",
    ),
)
