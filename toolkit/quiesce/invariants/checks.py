"""One named pure function for each invariant that a cut can be judged by, captured or read back from disk.

Each takes the cut and what else is known, and returns what does not hold; an empty list means that it holds,
or that the facts to tell are not known. Bitmaps are compared as integers, so an epoch of a million prompts
costs microseconds.

Rule: pure. No check changes anything, reads a file or a clock, or depends on another. Nothing here suspends.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from quiesce.invariants.violation import Severity, Violation
from quiesce.staged_rows import staged_keys
from quiesce.types import BufferEntry, GroupRecord, PromptRef, RowKey

if TYPE_CHECKING:
    from quiesce.accounting import AccountingState, EpochAccount
    from quiesce.checkpoint.cut import CutState
    from quiesce.invariants.facts import CutFacts, RowFacts

__all__ = [
    "conservation",
    "cursor_covers_buffer",
    "cursor_within_lookahead",
    "cut_is_one_instant",
    "digest_matches",
    "rows_not_orphaned",
    "rows_present",
    "single_owner",
    "versions_grow",
]

T = TypeVar("T")
_group_id: Final = attrgetter("group_id")

_AT_ONCE: Final = 2048
_ONE: Final = ord("1")
_NAMED: Final = 5
"""How many ids a message spells out; a violation's ``groups`` has them all."""


def single_owner(state: CutState, facts: CutFacts) -> list[Violation]:
    """No group is in two of ledger, spares, buffer, training."""
    ids_by_owner = _columns(state, facts).ids
    counted = sum(map(len, ids_by_owner.values()))
    if len(set().union(*ids_by_owner.values())) == counted:
        return []
    owners: dict[str, list[str]] = defaultdict(list)
    for owner, ids in ids_by_owner.items():
        for group_id in ids:
            owners[group_id].append(owner)
    groups_by_owners: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for group_id, found in owners.items():
        if len(found) > 1:
            groups_by_owners[tuple(found)].append(group_id)
    return [
        _found(
            "single_owner",
            state,
            f"{_names(groups)} {_are(groups)} owned by {' and '.join(found)} at once",
            groups=groups,
            owners=found,
            evidence={"owners": list(found)},
        )
        for found, groups in groups_by_owners.items()
    ]


def conservation(state: CutState, facts: CutFacts) -> list[Violation]:
    """Per epoch and along the lineage: every position read is owned, trained or dropped, exactly once."""
    found: list[Violation] = []
    account = state.accounting
    owned, crowded = _owned_positions(state, _columns(state, facts))
    closed = account.closed
    ended = closed.trained + sum(closed.dropped.values())
    if closed.read != ended:
        found.append(
            _found(
                "conservation",
                state,
                f"the epochs that are over read {closed.read} prompts and ended {ended}",
                evidence={"read": closed.read, "ended": ended},
            )
        )
    found += [
        _positions(state, epoch, positions, "owned twice", "two groups stand for one position")
        for epoch, positions in crowded.items()
    ]
    epochs = {epoch.epoch: epoch for epoch in account.open}
    for number in sorted(owned.keys() | epochs.keys()):
        if number in epochs:
            found += _judge_epoch(state, epochs[number], owned.get(number, 0))
        else:
            why = "the epoch is over" if number < closed.epochs else "they were never read"
            found.append(_positions(state, number, owned[number], "owned", why))
    found += _judge_position(state)
    if facts.parent is not None:
        found += _judge_lineage(state, facts.parent)
    return found


def cursor_covers_buffer(state: CutState, facts: CutFacts) -> list[Violation]:
    """The dispatch cursor is at or past every stamped target step in buffer and ledger."""
    cursor = state.sampler.cursor
    if max(_columns(state, facts).admission_of, default=cursor) <= cursor:
        return []
    ahead = {
        item.group_id: item.target_step
        for item in _groups(state)
        if item.target_step is not None and item.target_step > cursor
    }
    if not ahead:
        return []
    groups = tuple(ahead)
    return [
        _found(
            "cursor_covers_buffer",
            state,
            f"the dispatch cursor is {cursor}, but {_names(groups)} {_are(groups)} stamped with step "
            f"{max(ahead.values())}: cursor and groups come from two different moments",
            groups=groups,
            evidence={"cursor": cursor, "target_steps": ahead},
        )
    ]


def cursor_within_lookahead(state: CutState, facts: CutFacts) -> list[Violation]:
    """No admission behind a shut gate, every one counted by the cursor, no step stamped for two."""
    name, sampler, found = "cursor_within_lookahead", state.sampler, []
    if sampler.admissions != sampler.cursor + 1:
        found.append(
            _found(
                name,
                state,
                f"the dispatch cursor is {sampler.cursor} after {sampler.admissions} committed admissions",
                evidence={"cursor": sampler.cursor, "admissions": sampler.admissions},
            )
        )
    # A restore may narrow the window: then the cursor stays where it is until the trainer has caught up.
    admitted = facts.parent is None or sampler.cursor > facts.parent.sampler.cursor
    if (
        facts.gate_window is not None
        and admitted
        and sampler.cursor > state.trainer_version + facts.gate_window
    ):
        found.append(
            _found(
                name,
                state,
                f"the dispatch cursor is {sampler.cursor}, but at trainer version {state.trainer_version} "
                f"the gate shuts at {state.trainer_version + facts.gate_window}",
                evidence={
                    "cursor": sampler.cursor,
                    "trainer_version": state.trainer_version,
                    "gate_window": facts.gate_window,
                },
            )
        )
    columns = _columns(state, facts)
    if max(columns.admissions, default=-1) >= sampler.next_admission_id:
        unminted = [
            item.group_id for item in _groups(state) if item.admission_id >= sampler.next_admission_id
        ]
        found.append(
            _found(
                name,
                state,
                f"the next admission id is {sampler.next_admission_id}, but {_names(unminted)} "
                f"{_are(unminted)} of that admission or a later one",
                groups=unminted,
                evidence={"next_admission_id": sampler.next_admission_id},
            )
        )
    for step, admissions in sorted(_shared_stamps(state, columns).items()):
        groups = [group_id for ids in admissions.values() for group_id in ids]
        found.append(
            _found(
                name,
                state,
                f"step {step} is stamped for {len(admissions)} admissions: {_names(groups)}",
                groups=groups,
                evidence={"target_step": step, "admissions": sorted(admissions)},
            )
        )
    return found


def cut_is_one_instant(state: CutState, facts: CutFacts) -> list[Violation]:  # noqa: ARG001 - of all checks
    """All six artifacts carry the cut's id and mutation version."""
    from quiesce.checkpoint.cut import PARTS

    wrong: dict[str, Any] = {}
    for part in PARTS:
        stamp = state.stamps.get(part)
        if stamp is None:
            wrong[part] = None
        elif (stamp.cut_id, stamp.mutation_version) != (state.cut_id, state.mutation_version):
            wrong[part] = {"cut_id": stamp.cut_id, "mutation_version": stamp.mutation_version}
    if not wrong:
        return []
    return [
        _found(
            "cut_is_one_instant",
            state,
            f"{', '.join(wrong)} {_are(wrong)} not of cut {state.cut_id} at mutation version "
            f"{state.mutation_version}",
            evidence={"mutation_version": state.mutation_version, "parts": wrong},
        )
    ]


def rows_present(state: CutState, facts: CutFacts) -> list[Violation]:
    """Every row that the index names is there; on disk, only those and usable staged rows of ledger groups are."""
    if facts.rows is None:
        return []
    present = facts.rows.present
    missing: list[RowKey] = []
    if _compared(state, facts.rows)[0] < sum(len(entry.keys) for entry in state.entries):
        missing = [key for entry in state.entries for key in entry.keys if key not in present]
    found = []
    if missing:
        groups = tuple(dict.fromkeys(key.group_id for key in missing))
        found.append(
            _found(
                "rows_present",
                state,
                f"{len(missing)} rows of {_names(groups)} are missing, first {missing[0].encode()}",
                groups=groups,
                evidence={"missing": [key.encode() for key in missing]},
            )
        )
    if facts.rows.on_disk:
        extra = sorted(key.encode() for key in _unwritten(state, present))
        if extra:
            found.append(
                _found(
                    "rows_present",
                    state,
                    f"{len(extra)} rows are neither counted by the cut nor usable staged rows of its ledger, "
                    f"first {extra[0]}",
                    groups=tuple(dict.fromkeys(RowKey.decode(key).group_id for key in extra)),
                    evidence={"extra": extra},
                )
            )
    return found


def rows_not_orphaned(state: CutState, facts: CutFacts) -> list[Violation]:
    """Live rows beyond the index are staged rows of ledger groups, or wait for a clear."""
    if facts.rows is None or facts.rows.on_disk or facts.rows.settling is None:
        return []
    settling = facts.rows.settling
    orphans = sorted(key.encode() for key in _unowned(state, facts.rows) if key not in settling)
    if not orphans:
        return []
    groups = tuple(dict.fromkeys(RowKey.decode(key).group_id for key in orphans))
    return [
        _found(
            "rows_not_orphaned",
            state,
            f"{len(orphans)} rows have no owner and wait for no clear, first {orphans[0]}",
            severity="warning",
            groups=groups,
            evidence={"orphans": orphans},
        )
    ]


def digest_matches(state: CutState, facts: CutFacts) -> list[Violation]:
    """The ledger's digest and count are what the rows' metadata and the manifest carry."""
    if facts.seals is None:
        return []
    from quiesce.checkpoint.documents import ledger_digest

    records = state.ledger_minus_buffer()
    digest = ledger_digest(records)
    return [
        _found(
            "digest_matches",
            state,
            f"{seal.where} was written with a ledger of {seal.count} groups and digest {seal.digest[:12]}, "
            f"but the ledger has {len(records)} and {digest[:12]}",
            evidence={
                "where": seal.where,
                "digest": seal.digest,
                "count": seal.count,
                "ledger_digest": digest,
                "ledger_count": len(records),
            },
        )
        for seal in facts.seals
        if (seal.digest, seal.count) != (digest, len(records))
    ]


def versions_grow(state: CutState, facts: CutFacts) -> list[Violation]:
    """Trainer version, mutation version, step, cursor and incarnation never go back within a lineage."""
    parent = facts.parent
    if parent is None:
        return []
    back = {
        name: {"parent": before, "now": now}
        for name, before, now in (
            ("trainer version", parent.trainer_version, state.trainer_version),
            ("mutation version", parent.mutation_version, state.mutation_version),
            ("step", parent.step, state.step),
            ("dispatch cursor", parent.sampler.cursor, state.sampler.cursor),
            ("next admission id", parent.sampler.next_admission_id, state.sampler.next_admission_id),
            ("incarnation", parent.incarnation, state.incarnation),
        )
        if now < before
    }
    if not back:
        return []
    said = ", ".join(f"{name} from {values['parent']} to {values['now']}" for name, values in back.items())
    return [
        _found(
            "versions_grow",
            state,
            f"went back since cut {parent.cut_id}: {said}",
            evidence={"parent_cut": parent.cut_id, "back": back},
        )
    ]


# ---------------------------------------------------------------------------------------------------- helpers


def _found(
    invariant: str,
    state: CutState,
    message: str,
    *,
    severity: Severity = "critical",
    groups: Iterable[str] = (),
    owners: Iterable[str] = (),
    evidence: dict[str, Any],
) -> Violation:
    return Violation(invariant, severity, message, tuple(groups), tuple(owners), state.cut_id, evidence)


def _groups(state: CutState) -> Iterator[GroupRecord | BufferEntry]:
    yield from state.ledger
    yield from state.entries


def _names(ids: Sequence[str]) -> str:
    head = ", ".join(ids[:_NAMED])
    more = f" and {len(ids) - _NAMED} more" if len(ids) > _NAMED else ""
    return f"group{'s' if len(ids) > 1 else ''} {head}{more}"


def _are(items: Collection[object]) -> str:
    return "is" if len(items) == 1 else "are"


def _bits(bitmap: int) -> Iterator[int]:
    while bitmap:
        low = bitmap & -bitmap
        yield low.bit_length() - 1
        bitmap ^= low


class _Columns(NamedTuple):
    """The groups of a cut, read out in one walk.

    Attributes:
        ids: Group ids by owner.
        admissions: The admission ids of groups in ledger and buffer.
        admission_of: By stamped step, the admission of one group that carries it.
        stamps: How many pairs of a stamped step and an admission there are.
        positions: Owned positions by epoch.
    """

    ids: dict[str, list[str]]
    admissions: set[int]
    admission_of: dict[int, int]
    stamps: int
    positions: dict[int, list[int]]


def _columns(state: CutState, facts: CutFacts) -> _Columns:
    for known, columns in facts.columns:
        if known is state and isinstance(columns, _Columns):
            return columns
    columns = _read_out(state)
    facts.columns[:] = [(state, columns)]
    return columns


def _read_out(state: CutState) -> _Columns:
    """Walk over all groups once, some at a time: what they are made of is then near when it is read again."""
    ids: dict[str, list[str]] = {"ledger": [], "spares": [], "buffer": [], "training": []}
    admissions, stamped = set[int](), set[tuple[int | None, int]]()
    positions: dict[int, list[int]] = defaultdict(list)
    groups: tuple[tuple[str, Sequence[GroupRecord | BufferEntry]], ...] = (
        ("ledger", state.ledger),
        ("buffer", state.ready),
        ("training", state.claimed),
    )
    for owner, items in groups:
        for part in _parts(items):
            ids[owner] += [item.group_id for item in part]
            of = [item.admission_id for item in part]
            admissions.update(of)
            stamped.update(zip([item.target_step for item in part], of, strict=True))
            _place([item.prompt for item in part], positions)
    for refs in _parts(state.spares):
        ids["spares"] += [ref.group_id for ref in refs]
        _place(refs, positions)
    pairs = [(step, admission) for step, admission in stamped if step is not None]
    return _Columns(ids, admissions, dict(pairs), len(pairs), positions)


def _parts(items: Sequence[T]) -> Iterator[Sequence[T]]:
    for first in range(0, len(items), _AT_ONCE):
        yield items[first : first + _AT_ONCE]


def _place(refs: Sequence[PromptRef], positions: dict[int, list[int]]) -> None:
    epochs = {ref.epoch for ref in refs}
    for epoch in epochs:
        positions[epoch] += [ref.position for ref in refs if len(epochs) == 1 or ref.epoch == epoch]


def _owned_positions(state: CutState, columns: _Columns) -> tuple[dict[int, int], dict[int, int]]:
    """Return, by epoch, the bitmaps of owned positions and of those that two groups stand for."""
    owned = {epoch: _bitmap(found) for epoch, found in columns.positions.items()}
    crowded: dict[int, int] = {}
    if sum(bits.bit_count() for bits in owned.values()) < sum(map(len, columns.positions.values())):
        # A group in two owners is one group here: that is single_owner's to report.
        by_group = {ref.group_id: ref for ref in state.spares}
        by_group |= {item.group_id: item.prompt for item in _groups(state)}
        counted = Counter((ref.epoch, ref.position) for ref in by_group.values())
        for epoch in owned:
            twice = [position for (of, position), count in counted.items() if of == epoch and count > 1]
            if twice:
                crowded[epoch] = _bitmap(twice)
    return owned, crowded


def _bitmap(positions: Sequence[int]) -> int:
    digits = bytearray(b"0") * (max(positions, default=0) + 1)
    for position in positions:
        digits[position] = _ONE
    digits.reverse()
    return int(digits, 2)


def _judge_epoch(state: CutState, account: EpochAccount, owned: int) -> Iterator[Violation]:
    trained, dropped = int.from_bytes(account.trained, "little"), int.from_bytes(account.dropped, "little")
    everything = (1 << account.read) - 1
    for positions, what, why in (
        (trained & dropped, "both trained and dropped", "they ended twice"),
        ((trained | dropped) & owned, "owned", "they ended already"),
        (everything & ~(trained | dropped | owned), "lost", "they were read, have no owner and did not end"),
        ((trained | dropped | owned) & ~everything, "owned or ended", "they were never read"),
    ):
        if positions:
            yield _positions(state, account.epoch, positions, what, why)
    if sum(account.reasons.values()) != dropped.bit_count():
        yield _found(
            "conservation",
            state,
            f"epoch {account.epoch}: {dropped.bit_count()} positions are dropped, but the reasons count "
            f"{sum(account.reasons.values())}",
            evidence={
                "epoch": account.epoch,
                "dropped": dropped.bit_count(),
                "reasons": dict(account.reasons),
            },
        )


def _judge_position(state: CutState) -> Iterator[Violation]:
    """The committed position and the account were set in one step, so they agree."""
    account, position = state.accounting, state.position
    by_epoch = {epoch.epoch: epoch for epoch in account.open}
    newest = (
        account.closed.epochs + len(account.open) - 1
    )  # the last epoch that anything was read of; −1 for none
    if position.epoch in by_epoch:
        counted = by_epoch[position.epoch].read
        agree = position.epoch == newest and position.position == counted
    else:
        # Before the first prompt of an epoch, or after the last of one whose prompts have all ended.
        counted = 0
        agree = (position.epoch == newest + 1 and position.position == 0) or (
            position.epoch == newest and newest < account.closed.epochs
        )
    if not agree:
        yield _found(
            "conservation",
            state,
            f"the dataset counts as read up to epoch {position.epoch} position {position.position}, but the "
            f"account has {counted} positions there and epoch {newest} as its newest",
            evidence={
                "epoch": position.epoch,
                "position": position.position,
                "counted": counted,
                "newest": newest,
            },
        )


def _judge_lineage(state: CutState, parent: CutState) -> Iterator[Violation]:
    """What a parent cut recorded as read, trained or dropped, its child records too."""
    before, now = parent.accounting, state.accounting
    lost = {
        name: {"parent": old, "now": new}
        for name, old, new in (
            ("epochs that are over", before.closed.epochs, now.closed.epochs),
            ("read", before.read, now.read),
            ("trained", before.trained, now.trained),
            ("dropped", before.dropped, now.dropped),
        )
        if new < old
    }
    if lost:
        said = ", ".join(
            f"{name} from {values['parent']} to {values['now']}" for name, values in lost.items()
        )
        yield _found(
            "conservation",
            state,
            f"the account shrank since cut {parent.cut_id}: {said}",
            evidence={"parent_cut": parent.cut_id, "shrank": lost},
        )
    if before.closed.epochs == now.closed.epochs and before.closed != now.closed:
        yield _found(
            "conservation",
            state,
            f"the totals of the epochs that are over have changed since cut {parent.cut_id}",
            evidence={"parent_cut": parent.cut_id, "epochs": now.closed.epochs},
        )
    yield from _judge_bitmaps(state, parent, before, now)


def _judge_bitmaps(
    state: CutState, parent: CutState, before: AccountingState, now: AccountingState
) -> Iterator[Violation]:
    current = {epoch.epoch: epoch for epoch in now.open}
    for old in before.open:
        new = current.get(old.epoch)
        if new is None:  # folded since, or gone: the totals tell
            continue
        for how, was, has in (("trained", old.trained, new.trained), ("dropped", old.dropped, new.dropped)):
            forgotten = int.from_bytes(was, "little") & ~int.from_bytes(has, "little")
            if forgotten:
                yield _positions(
                    state, old.epoch, forgotten, f"no longer {how}", f"cut {parent.cut_id} has them {how}"
                )
        if new.read < old.read or (old.ended and (not new.ended or new.read != old.read)):
            yield _found(
                "conservation",
                state,
                f"epoch {old.epoch}: {new.read} positions read, but cut {parent.cut_id} has {old.read}"
                f"{' and its end' if old.ended else ''}",
                evidence={
                    "epoch": old.epoch,
                    "read": new.read,
                    "parent_read": old.read,
                    "parent_ended": old.ended,
                },
            )


def _positions(state: CutState, epoch: int, positions: int, what: str, why: str) -> Violation:
    found = list(_bits(positions))
    groups = [PromptRef(epoch, position, 0).group_id for position in found]
    return _found(
        "conservation",
        state,
        f"{_names(groups)} {_are(groups)} {what}: {why}",
        groups=groups,
        evidence={"fault": what, "epoch": epoch, "positions": found},
    )


def _unwritten(state: CutState, present: Collection[RowKey]) -> set[RowKey]:
    """Return the rows on disk that a save of this cut cannot have written.

    Of staged rows only usable ones are written: no chunk after a gap, none beside a final row.
    """
    named = {key for entry in state.entries for key in entry.keys}
    others = {key for key in present if key not in named}
    ours = (key for key in others if key.incarnation == state.incarnation)
    return others.difference(staged_keys(ours, state.ledger_minus_buffer()))


def _unowned(state: CutState, rows: RowFacts) -> set[RowKey]:
    """Return the live rows that are neither named by the index nor of a ledger group's current attempt.

    A group in flight owns whatever its attempt has put, usable or not: its call hands obsolete chunks over itself.
    """
    _, others = _compared(state, rows)
    if not others:
        return set()
    waiting = {(record.group_id, record.attempt) for record in state.ledger_minus_buffer()}
    strange = {key for key in others if (key.group_id, key.attempt) not in waiting}
    if not strange:
        return strange
    return strange.difference(key for entry in state.entries for key in entry.keys)


def _compared(state: CutState, rows: RowFacts) -> tuple[int, tuple[RowKey, ...]]:
    """Return how many rows are what the index names in their place, and the rows that are not.

    Compared field by field, because that costs a fraction of a hash, and there are many. Whoever finds a number that
    differs, or a row that is left, has to look closer: the index may name it in another place.
    """
    for known, matched, left in rows.compared:
        if known is state:
            return matched, left
    # A store lists rows in the order of their groups' ids; of a group that comes out of turn the keys are looked up.
    entries = sorted(state.entries, key=_group_id)
    by_group: dict[str, tuple[RowKey, ...]] | None = None
    group, keys, turn, last = "", tuple[RowKey, ...](), 0, len(entries)
    others = list[RowKey]()
    for key in rows.present:
        if key.group_id != group:
            group = key.group_id
            if turn < last and entries[turn].group_id == group:
                keys = entries[turn].keys
                turn += 1
            else:
                if by_group is None:
                    by_group = {entry.group_id: entry.keys for entry in entries}
                keys = by_group.get(group, ())
        generation = key.generation
        if generation >= len(keys):
            others.append(key)
            continue
        named = keys[generation]
        if named is not key and (
            named.attempt != key.attempt
            or named.sequence != key.sequence
            or named.generation != generation
            or named.incarnation != key.incarnation
            or named.group_id != group
        ):
            others.append(key)
    found = len(rows.present) - len(others), tuple(others)
    rows.compared[:] = [(state, *found)]
    return found


def _shared_stamps(state: CutState, columns: _Columns) -> dict[int, dict[int, list[str]]]:
    """Return, by step, the groups of each admission that carries its stamp, where those are several."""
    found: dict[int, dict[int, list[str]]] = defaultdict(lambda: defaultdict(list))
    if columns.stamps == len(columns.admission_of):
        return found
    for item in _groups(state):
        if item.target_step is not None:
            found[item.target_step][item.admission_id].append(item.group_id)
    return {step: admissions for step, admissions in found.items() if len(admissions) > 1}
