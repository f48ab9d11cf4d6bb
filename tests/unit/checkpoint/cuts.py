"""Cuts to judge, write and break: small, whole, with groups in every state."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from quiesce.accounting import AccountingState, ClosedEpochs, EpochAccount
from quiesce.checkpoint.cut import PARTS, CommittedPosition, CutState, PartStamp, SamplerState
from quiesce.checkpoint.documents import Manifest, groups_by_owner, ledger_digest
from quiesce.dataplane.interface import FileDigest
from quiesce.types import BufferEntry, GroupRecord, PromptRef, RowKey

INCARNATION = 3


def bitmap(read: int, *positions: int) -> bytes:
    """Return a bitmap over ``read`` positions."""
    return sum(1 << position for position in positions).to_bytes((read + 7) // 8, "little")


def ref(position: int, epoch: int = 1) -> PromptRef:
    """Return a prompt whose dataset index differs from its position."""
    return PromptRef(epoch, position, 100 - position)


def entry(
    position: int, *, target_step: int | None = 7, admission_id: int = 7, attempt: int = 0
) -> BufferEntry:
    """Return a finished group with two rows."""
    group_id = ref(position).group_id
    return BufferEntry(
        group_id=group_id,
        admission_id=admission_id,
        prompt=ref(position),
        attempt=attempt,
        target_step=target_step,
        start_version=6,
        generated_from=6,
        generated_to=7,
        keys=tuple(RowKey(INCARNATION, group_id, generation, attempt) for generation in range(2)),
        stats={"reward": 0.25, "tokens": 12},
    )


def admitted(
    position: int, *, target_step: int | None = 8, admission_id: int = 8, attempt: int = 0
) -> GroupRecord:
    """Return a group in flight."""
    return GroupRecord(
        ref(position).group_id, admission_id, ref(position), "admitted", target_step, 7, attempt
    )


def reserved(position: int, *, admission_id: int = 9) -> GroupRecord:
    """Return a group that waits for admission."""
    return GroupRecord(ref(position).group_id, admission_id, ref(position))


def clean_cut() -> CutState:
    """Return a whole cut: in epoch 1, positions 0–2 trained, 3 dropped, 4–5 ready, 6 claimed, 7–8 in flight, 9 a spare."""
    return CutState(
        cut_id="cut-b",
        mutation_version=41,
        incarnation=INCARNATION,
        parent_cut="cut-a",
        step=7,
        trainer_version=7,
        sampler=SamplerState("in_order", 8, stamps_target_steps=True, admissions=9, next_admission_id=10),
        position=CommittedPosition(1, 11, exhausted=False, loader={"rng": (1, b"\x00\xff"), 5: [1.5]}),
        accounting=AccountingState(
            ClosedEpochs(1, 20, 18, {"failed": 2}),
            (EpochAccount(1, 11, False, bitmap(11, 0, 1, 2), bitmap(11, 3), {"evicted": 1}),),
        ),
        spares=(ref(9),),
        ready=(entry(4), entry(5)),
        claimed=(entry(6),),
        ledger=(admitted(7), admitted(8, attempt=2), reserved(10)),
        stamps={part: PartStamp("cut-b", 41) for part in PARTS},
    )


def parent_cut() -> CutState:
    """Return a cut that :func:`clean_cut` may follow."""
    state = clean_cut()
    return replace(
        state,
        cut_id="cut-a",
        parent_cut=None,
        mutation_version=30,
        step=6,
        trainer_version=6,
        sampler=SamplerState("in_order", 7, stamps_target_steps=True, admissions=8, next_admission_id=9),
        accounting=AccountingState(
            ClosedEpochs(1, 20, 18, {"failed": 2}),
            (EpochAccount(1, 7, False, bitmap(7, 0, 1), bitmap(7), {}),),
        ),
        stamps={part: PartStamp("cut-a", 30) for part in PARTS},
    )


def rows_of(state: CutState) -> frozenset[RowKey]:
    """Return the rows that a cut's index names."""
    return frozenset(key for item in state.entries for key in item.keys)


def manifest_for(state: CutState, files: Mapping[str, bytes] | None = None, **changes: Any) -> Manifest:  # noqa: ANN401 - of the record
    """Return a manifest for a cut; with digests that nobody checks unless ``files`` are given."""
    import hashlib

    from quiesce.checkpoint.documents import to_documents

    contents = to_documents(state) if files is None else files
    records = state.ledger_minus_buffer()
    manifest = Manifest(
        cut_id=state.cut_id,
        incarnation=state.incarnation,
        parent_cut=state.parent_cut,
        restored_from=None,
        step=state.step,
        trainer_version=state.trainer_version,
        mutation_version=state.mutation_version,
        created="2026-01-02T03:04:05+00:00",
        files=tuple(
            FileDigest(name, len(content), hashlib.sha256(content).hexdigest())
            for name, content in contents.items()
        ),
        ledger_digest=ledger_digest(records),
        ledger_count=len(records),
        rows_count=len(rows_of(state)),
        rows_bytes=1,
        rows_stamp=state.stamps["rows"],
        groups=groups_by_owner(state),
    )
    return replace(manifest, **changes)


def base64_of(data: bytes) -> str:
    """Return the form that bitmaps have in a document."""
    return base64.b64encode(data).decode("ascii")
