"""The offline audit: does what is on disk prove that no prompt was lost and none trained twice?

It takes a checkpoint folder or a whole run folder, opens nothing for writing, and judges each checkpoint by
itself (digests, documents, every invariant that a cut can be judged by, rows against index), each together
with its parent along the restored
lineage, and the newest one against the journal of trained steps: the groups that the surviving lineage
trained are exactly those that its bitmaps say, each once.

Rule: read-only, and an audit never stops at the first finding. Nothing here suspends: everything blocks on
the disk.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from quiesce.accounting import AccountingState, has_bit
from quiesce.checkpoint.journal import JournalRecord, read_journal, surviving
from quiesce.checkpoint.loading import (
    CHECKPOINTS,
    CheckpointInfo,
    LoadedCheckpoint,
    checkpoint_info,
    load_checkpoint,
    scan_checkpoints,
)
from quiesce.errors import (
    CorruptCheckpointError,
    QuiesceError,
    RestoreRefusedError,
    UnusableAuditPathError,
)
from quiesce.invariants import Violation, check_cut
from quiesce.types import PromptRef

__all__ = ["JOURNAL", "AuditReport", "AuditedCheckpoint", "PromptTotals", "audit"]

JOURNAL: Final = "lineage.jsonl"
"""The file of a run that lists its trained steps."""

_GROUP: Final = re.compile(r"e(\d{3,})-p(\d{7,})", re.ASCII)


@dataclass(frozen=True, slots=True)
class PromptTotals:
    """What became of every prompt, cumulative along the restored lineage.

    Attributes:
        read: Prompts that count as read; always trained + dropped + owned.
        trained: Prompts that were trained.
        dropped: Prompts that were dropped.
        owned: Prompts that have an owner: ledger, spares, buffer, unstarted claims.
    """

    read: int
    trained: int
    dropped: int
    owned: int


@dataclass(frozen=True, slots=True)
class AuditedCheckpoint:
    """One checkpoint, judged.

    Attributes:
        path: Its folder.
        step: Trained steps, by its name.
        suspect: Whether it was saved as suspect.
        problem: Why it cannot be read, or "".
        cut_id: Its cut, or "".
        parent_cut: The cut before it, or None.
        incarnation: Who captured it, or None.
        trainer_version: The trainer version, or None.
        cursor: The dispatch cursor, or None.
        rows: Rows in its files.
        num_bytes: Bytes of its files.
        groups: Groups by owner.
        violations: How many were found in it.
    """

    path: Path
    step: int
    suspect: bool
    problem: str
    cut_id: str = ""
    parent_cut: str | None = None
    incarnation: int | None = None
    trainer_version: int | None = None
    cursor: int | None = None
    rows: int = 0
    num_bytes: int = 0
    groups: Mapping[str, int] = field(default_factory=dict, hash=False)
    violations: int = 0


@dataclass(frozen=True, slots=True)
class AuditReport:
    """What an audit found.

    Attributes:
        path: What was audited.
        checkpoints: Each checkpoint, newest first.
        violations: Everything that does not hold, of published checkpoints and of the lineage.
        prompts: From the newest readable checkpoint's own records; None without one.
        notes: What could not be checked, and what a reader should know.
    """

    path: Path
    checkpoints: tuple[AuditedCheckpoint, ...]
    violations: tuple[Violation, ...]
    prompts: PromptTotals | None
    notes: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether nothing critical was found; a warning alone does not fail an audit."""
        return not any(violation.severity == "critical" for violation in self.violations)

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        prompts = self.prompts
        return {
            "ok": self.ok,
            "path": str(self.path),
            "violations": [violation.to_json() for violation in self.violations],
            "checkpoints": [
                {
                    "path": str(checkpoint.path),
                    "step": checkpoint.step,
                    "suspect": checkpoint.suspect,
                    "readable": not checkpoint.problem,
                    "problem": checkpoint.problem,
                    "cut_id": checkpoint.cut_id,
                    "parent_cut": checkpoint.parent_cut,
                    "incarnation": checkpoint.incarnation,
                    "trainer_version": checkpoint.trainer_version,
                    "cursor": checkpoint.cursor,
                    "rows": checkpoint.rows,
                    "bytes": checkpoint.num_bytes,
                    "groups": dict(checkpoint.groups),
                    "violations": checkpoint.violations,
                }
                for checkpoint in self.checkpoints
            ],
            "prompts": None
            if prompts is None
            else {
                "read": prompts.read,
                "trained": prompts.trained,
                "dropped": prompts.dropped,
                "owned": prompts.owned,
            },
            "notes": list(self.notes),
        }


def audit(path: Path) -> AuditReport:
    """Audit a checkpoint or a run.

    Args:
        path: A checkpoint's folder, a run folder, or a run's folder of checkpoints.

    Raises:
        UnusableAuditPathError: If the path is none of these, or cannot be read.
    """
    infos, journal_path = _what_is(path)
    loaded: dict[Path, LoadedCheckpoint] = {}
    problems: dict[Path, Violation] = {}
    for info in infos:
        try:
            loaded[info.path] = load_checkpoint(info, accept_violations=True)
        except (CorruptCheckpointError, RestoreRefusedError) as error:
            problems[info.path] = _unreadable(info, error)
    by_cut = {item.state.cut_id: item for item in loaded.values()}
    found: dict[Path, list[Violation]] = {}
    notes: list[str] = []
    for info in infos:
        if info.path in problems:
            found[info.path] = [problems[info.path]]
            continue
        item = loaded[info.path]
        parent = None if item.state.parent_cut is None else by_cut.get(item.state.parent_cut)
        found[info.path] = check_cut(item.state, item.facts(None if parent is None else parent.state))
        if item.state.parent_cut is not None and parent is None and len(infos) > 1:
            notes.append(f"{info.path.name}: its parent cut {item.state.parent_cut} is not kept any more")
    notes += [
        f"{info.path.name} was saved as suspect; what it breaks does not count against the run"
        for info in infos
        if info.suspect
    ]
    newest = next((loaded[info.path] for info in infos if info.path in loaded and not info.suspect), None)
    violations = [
        violation for info in infos if not info.suspect or len(infos) == 1 for violation in found[info.path]
    ]
    if journal_path is not None:
        violations += _against_journal(journal_path, newest, list(loaded.values()), notes)
    if newest is None and len(infos) == 1 and infos[0].path in loaded:
        newest = loaded[infos[0].path]
    return AuditReport(
        path=path,
        checkpoints=tuple(_audited(info, loaded.get(info.path), found[info.path]) for info in infos),
        violations=tuple(violations),
        prompts=None if newest is None else _totals(newest),
        notes=tuple(notes),
    )


def _what_is(path: Path) -> tuple[list[CheckpointInfo], Path | None]:
    """Return the checkpoints to audit, newest first, and the run's journal if there is one."""
    try:
        if not path.exists():
            raise UnusableAuditPathError(path, "it does not exist")
        if not path.is_dir():
            raise UnusableAuditPathError(path, "it is not a folder")
        path = path.resolve()
        info = checkpoint_info(path)
        if info is not None:
            return [info], None
        inside = path / CHECKPOINTS
        run = path if inside.is_dir() else path.parent
        infos = scan_checkpoints(inside if inside.is_dir() else path)
        journal = run / JOURNAL
        if not infos:
            raise UnusableAuditPathError(path, "it is neither a checkpoint nor a run folder with checkpoints")
        return infos, journal if journal.is_file() else None
    except (OSError, RestoreRefusedError) as error:
        raise UnusableAuditPathError(path, str(error)) from error


def _unreadable(info: CheckpointInfo, error: CorruptCheckpointError | RestoreRefusedError) -> Violation:
    """Return the finding for a checkpoint that cannot be read: what is in it is not what was written."""
    return Violation(
        invariant="digest_matches",
        severity="critical",
        message=f"{info.path.name}: part {error.part}: {error.problem}",
        evidence={"checkpoint": info.path.name, "part": error.part, "problem": error.problem},
    )


def _audited(
    info: CheckpointInfo, loaded: LoadedCheckpoint | None, violations: Sequence[Violation]
) -> AuditedCheckpoint:
    if loaded is None:
        return AuditedCheckpoint(
            info.path, info.step, info.suspect, violations[0].message, violations=len(violations)
        )
    manifest, state = loaded.manifest, loaded.state
    return AuditedCheckpoint(
        path=info.path,
        step=info.step,
        suspect=info.suspect,
        problem="",
        cut_id=manifest.cut_id,
        parent_cut=manifest.parent_cut,
        incarnation=manifest.incarnation,
        trainer_version=manifest.trainer_version,
        cursor=state.sampler.cursor,
        rows=len(loaded.inventory),
        num_bytes=sum(file.size for file in manifest.files),
        groups=manifest.groups,
        violations=len(violations),
    )


def _totals(loaded: LoadedCheckpoint) -> PromptTotals:
    state = loaded.state
    owned = len(state.ledger_minus_buffer()) + len(state.spares) + len(state.entries)
    account = state.accounting
    return PromptTotals(account.read, account.trained, account.dropped, owned)


# ------------------------------------------------------------------------------------------------ the journal


def _against_journal(
    path: Path, newest: LoadedCheckpoint | None, loaded: Iterable[LoadedCheckpoint], notes: list[str]
) -> list[Violation]:
    """Compare the trained groups of the surviving lineage with the newest checkpoint's bitmaps."""
    try:
        records = read_journal(path)
    except (QuiesceError, OSError) as error:
        return [
            Violation(
                "conservation",
                "critical",
                f"the journal cannot be read: {error}",
                evidence={"journal": path.name},
            )
        ]
    if newest is None:
        notes.append("no published checkpoint can be read, so the journal was not compared with one")
        return []
    if not any(record.event == "trained" for record in records) and newest.state.accounting.trained:
        notes.append(f"{path.name} lists no trained step, so it could not be compared with the checkpoints")
        return []
    state = newest.state
    trained = Counter(
        group_id
        for record in surviving(records)
        if not _after(record, incarnation=state.incarnation, step=state.step)
        for group_id in record.groups
    )
    cut_id = state.cut_id
    found = []
    twice = [group_id for group_id, count in trained.items() if count > 1]
    if twice:
        found.append(
            _lineage(cut_id, f"{len(twice)} groups were trained more than once, first {twice[0]}", twice)
        )
    found += _against_bitmaps(cut_id, trained, state.accounting)
    return found + _against_published(records, loaded, cut_id)


def _after(record: JournalRecord, *, incarnation: int, step: int) -> bool:
    """Whether a restore of the newest checkpoint would undo a trained step."""
    later = record.step is not None and record.step > step
    return record.incarnation > incarnation or (record.incarnation == incarnation and later)


def _against_bitmaps(cut_id: str, trained: Counter[str], account: AccountingState) -> list[Violation]:
    by_epoch = {epoch.epoch: epoch for epoch in account.open}
    unrecorded: list[str] = []
    in_closed = 0
    listed: dict[int, set[int]] = {epoch: set() for epoch in by_epoch}
    for group_id in trained:
        parsed = _GROUP.fullmatch(group_id)
        epoch, position = (int(parsed[1]), int(parsed[2])) if parsed else (-1, -1)
        if epoch in by_epoch:
            listed[epoch].add(position)
            if not has_bit(by_epoch[epoch].trained, position):
                unrecorded.append(group_id)
        elif 0 <= epoch < account.closed.epochs:
            in_closed += 1
        else:
            unrecorded.append(group_id)
    found = []
    if unrecorded:
        found.append(
            _lineage(
                cut_id,
                f"{len(unrecorded)} groups were trained by the lineage, but are not counted as such, "
                f"first {unrecorded[0]}",
                unrecorded,
            )
        )
    unlisted = [
        PromptRef(epoch.epoch, position, 0).group_id
        for epoch in account.open
        for position in range(epoch.read)
        if has_bit(epoch.trained, position) and position not in listed[epoch.epoch]
    ]
    if unlisted:
        found.append(
            _lineage(
                cut_id,
                f"{len(unlisted)} groups count as trained, but no step of the lineage trained them, "
                f"first {unlisted[0]}",
                unlisted,
            )
        )
    if in_closed != account.closed.trained:
        found.append(
            _lineage(
                cut_id,
                f"the lineage trained {in_closed} groups of epochs that are over, the checkpoint counts "
                f"{account.closed.trained}",
                (),
            )
        )
    return found


def _against_published(
    records: Sequence[JournalRecord], loaded: Iterable[LoadedCheckpoint], cut_id: str
) -> list[Violation]:
    """Every checkpoint's parent is what the journal says."""
    parents = {record.cut_id: record.parent_cut for record in records if record.event == "published"}
    return [
        Violation(
            "versions_grow",
            "critical",
            f"{item.info.path.name} names cut {item.state.parent_cut} as its parent, the journal "
            f"{parents[item.state.cut_id]}",
            cut_id=cut_id,
            evidence={"parent_cut": item.state.parent_cut, "journal": parents[item.state.cut_id]},
        )
        for item in loaded
        if item.state.cut_id in parents and parents[item.state.cut_id] != item.state.parent_cut
    ]


def _lineage(cut_id: str, message: str, groups: Sequence[str]) -> Violation:
    return Violation(
        "conservation",
        "critical",
        message,
        tuple(groups),
        (),
        cut_id,
        {"groups": len(groups), "source": JOURNAL},
    )
