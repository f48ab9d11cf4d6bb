"""From a folder back to a run: choose a checkpoint, cross-check it, fill rows, give every group its owner.

Rule: a run resumes from the newest checkpoint that is whole, or it does not resume. A corrupt newest one
gives way to the one before it, loudly, and is renamed ``corrupt-…`` so that nobody takes it for the newest
again; when checkpoints exist and none can be used, that is a refusal that names the part, never a silent
start at step 0.

What is not the cut's (where the prompts go on, the trainer's state) is restored first, by whoever has it, and then
rows are filled, under the new incarnation's keys: those that the cut counts, and, where generation goes on from them,
the usable staged ones of its ledger's groups. All control state then moves in one await-free ``recovery_restore`` slot.
Yield rule: :func:`restore_into` suspends while what comes beforehand is restored, while rows are filled and for that
slot; the rest blocks on the disk and belongs in a thread. Cancellation: what was filled stays in a store that nobody
uses.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from quiesce.accounting import AccountingState, EpochAccount, bits_set
from quiesce.checkpoint import files
from quiesce.checkpoint.documents import groups_by_owner
from quiesce.checkpoint.loading import (
    CheckpointInfo,
    LoadedCheckpoint,
    checkpoints_folder,
    find_checkpoints,
    load_checkpoint,
    scan_checkpoints,
)
from quiesce.errors import (
    AdmissionError,
    ConfigError,
    CorruptCheckpointError,
    CursorBehindStampError,
    DataPlaneError,
    NothingToRestoreError,
    QuiesceError,
    RestoreRefusedError,
)
from quiesce.invariants import Violation, check_cut, critical
from quiesce.observers import Hub, default_hub
from quiesce.staged_rows import by_group
from quiesce.threads import DaemonExecutor
from quiesce.types import BufferEntry, GroupRecord, RowKey

if TYPE_CHECKING:
    from quiesce.accounting import Accounting
    from quiesce.admission import Admission
    from quiesce.barrier import Cut, DataPlaneCheckpointBarrier
    from quiesce.buffer import ReplayBuffer
    from quiesce.checkpoint.cut import CommittedPosition, CutState
    from quiesce.dataplane.interface import DataPlane, Row
    from quiesce.ledger import RolloutLedger
    from quiesce.samplers import Sampler
    from quiesce.signals import TrainerVersion
    from quiesce.spares import SparePool

__all__ = [
    "CheckpointInfo",
    "LoadedCheckpoint",
    "RestoreTargets",
    "RestoredRun",
    "absolve",
    "find_checkpoints",
    "load_checkpoint",
    "load_newest",
    "restore_into",
]

_LOG: Final = logging.getLogger("quiesce.checkpoint")

_REASONS: Final = {
    "checkpoints": "nothing_usable",
    "suspect": "suspect",
    "cursor_covers_buffer": "cursor",
    "rows": "rows",
    "rows_present": "rows",
}
"""The metric's reason for a refusal, by the part that it names."""

_ROWS_AT_ONCE: Final = 64
"""Rows of one put; a put is one transaction, so a few dozen share its fsync, and memory stays bounded."""

_TOLERABLE: Final = frozenset({"cut_is_one_instant", "versions_grow"})
"""What a suspect checkpoint may still break once the groups at fault are out: no restore relies on it."""


# --------------------------------------------------------------------------------------------------- choosing


def load_newest(
    folder: Path, *, accept_suspect: bool = False, rename_corrupt: bool = True, hub: Hub | None = None
) -> LoadedCheckpoint:
    """Load the newest checkpoint that is whole.

    Args:
        folder: The run folder, or its folder of checkpoints.
        accept_suspect: Also take a checkpoint that broke a critical invariant, if it is the newest.
        rename_corrupt: Rename corrupt ones that a later start must not meet again; only for the run that owns
            the folder.
        hub: Where refusals are reported.

    Raises:
        NothingToRestoreError: If there is no checkpoint.
        RestoreRefusedError: If there are some, but none may be used; the part at fault is named.
    """
    hub = default_hub() if hub is None else hub
    place = checkpoints_folder(folder)
    corrupt: list[tuple[CheckpointInfo, CorruptCheckpointError]] = []
    told = _Told(hub)
    try:
        told.begin()
        found = scan_checkpoints(place)
        usable = [info for info in found if accept_suspect or not info.suspect]
        for info in usable:
            told.begin()
            try:
                loaded = load_checkpoint(info, accept_violations=info.suspect)
            except CorruptCheckpointError as error:
                corrupt.append((info, error))
                told.refuse(error)
                _LOG.error("%s; falling back to the checkpoint before it", error)
                continue
            if rename_corrupt:
                for bad, _ in corrupt:
                    _rename_corrupt(bad.path)
            if corrupt:
                _LOG.error(
                    "restoring %s instead of %s", info.path, ", ".join(str(bad.path) for bad, _ in corrupt)
                )
            return loaded
        raise _none_usable(place, found, corrupt)
    except Exception as error:
        told.refuse(error)  # unless it is that all are corrupt, which was told of each of them
        raise


class _Told:
    """Tells of a restore that ends, or goes on in :func:`restore_into`, once its checkpoint is verified."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._since: int | None = None

    def begin(self) -> None:
        """Begin one, unless one has begun and has not ended."""
        if self._since is None:
            self._since = time.perf_counter_ns()
            if self._hub.restore_started:
                self._hub.fire("restore_started")

    def refuse(self, error: Exception) -> None:
        """End it, if it has not ended."""
        since, self._since = self._since, None
        if since is not None:
            _end_badly(self._hub, error, {"verify": time.perf_counter_ns() - since})


def _end_badly(hub: Hub, error: BaseException, parts: Mapping[str, int]) -> None:
    """Report a restore that did not complete: that what is there cannot be used is a refusal, all else a failure."""
    if isinstance(error, asyncio.CancelledError):
        outcome, reason = "cancelled", ""
    else:
        outcome = "refused" if isinstance(error, QuiesceError) else "failed"
        reason = _reason(error) if isinstance(error, Exception) else "error"
    if hub.restore_ended:
        hub.fire("restore_ended", outcome, reason, parts, {})


def _none_usable(
    place: Path, found: list[CheckpointInfo], corrupt: list[tuple[CheckpointInfo, CorruptCheckpointError]]
) -> RestoreRefusedError:
    if corrupt:
        info, error = corrupt[0]
        return RestoreRefusedError(
            info.path,
            error.part,
            f"{error.problem}; none of the {len(corrupt)} checkpoints in {place} can be used",
        )
    if found:
        return RestoreRefusedError(
            found[0].path,
            "suspect",
            "it broke an invariant when it was saved, and there is no other; --accept-suspect restores it "
            "without the groups at fault",
        )
    aside = sorted(path for path in place.glob("corrupt-*")) if place.is_dir() else []
    if aside:
        return RestoreRefusedError(
            aside[-1], "checkpoints", "every checkpoint was found corrupt and renamed aside"
        )
    return NothingToRestoreError(place)


def _rename_corrupt(path: Path) -> None:
    number = 0
    while True:
        target = path.with_name(f"corrupt-{path.name}" + (f"-{number}" if number else ""))
        if not target.exists() and not target.is_symlink():
            break
        number += 1
    try:
        files.rename(path, target)
        files.fsync_folder(path.parent)
    except OSError as error:
        raise RestoreRefusedError(
            path, "checkpoints", f"it is corrupt and cannot be renamed: {error.strerror}"
        ) from error
    _LOG.error("renamed %s to %s", path, target.name)


def _reason(error: Exception) -> str:
    """Return the metric's reason for a refusal."""
    if isinstance(error, CorruptCheckpointError):
        return "part_missing" if error.problem == "it is missing" else "corrupt"
    if isinstance(error, RestoreRefusedError):
        return "schema" if "schema version" in error.problem else _REASONS.get(error.part, "error")
    for kind, reason in (
        (CursorBehindStampError, "cursor"),
        (AdmissionError, "capacity"),
        (ConfigError, "config"),
        (DataPlaneError, "rows"),
    ):
        if isinstance(error, kind):
            return reason
    return "error"


# -------------------------------------------------------------------------------------------------- absolving


def absolve(state: CutState, violations: Iterable[Violation]) -> tuple[CutState, tuple[str, ...]]:
    """Return a suspect cut without the groups at fault, each booked as dropped for that reason; pure.

    Args:
        state: The cut.
        violations: What does not hold of it.

    Returns:
        The cut, and the ids of the groups that were taken out of it.
    """
    worst = critical(violations)
    guilty = {group_id for violation in worst for group_id in violation.groups}
    accused: dict[int, set[int]] = {}
    items: tuple[GroupRecord | BufferEntry, ...] = (*state.ledger, *state.entries)
    for item in items:
        if item.group_id in guilty:
            accused.setdefault(item.prompt.epoch, set()).add(item.prompt.position)
    for ref in state.spares:
        if ref.group_id in guilty:
            accused.setdefault(ref.epoch, set()).add(ref.position)
    for violation in worst:
        if violation.invariant == "conservation" and "positions" in violation.evidence:
            accused.setdefault(violation.evidence["epoch"], set()).update(violation.evidence["positions"])
    newest = max((item.admission_id for item in items), default=-1)
    return (
        replace(
            state,
            sampler=replace(
                state.sampler,
                admissions=state.sampler.cursor + 1,
                next_admission_id=max(state.sampler.next_admission_id, newest + 1),
            ),
            accounting=AccountingState(
                state.accounting.closed,
                tuple(_drop(epoch, accused.get(epoch.epoch, set())) for epoch in state.accounting.open),
            ),
            spares=tuple(ref for ref in state.spares if ref.group_id not in guilty),
            ready=tuple(entry for entry in state.ready if entry.group_id not in guilty),
            claimed=tuple(entry for entry in state.claimed if entry.group_id not in guilty),
            ledger=tuple(record for record in state.ledger if record.group_id not in guilty),
        ),
        tuple(sorted(guilty)),
    )


def _drop(account: EpochAccount, positions: set[int]) -> EpochAccount:
    """Count positions as dropped that were read and did not end; what was trained stays trained."""
    trained = int.from_bytes(account.trained, "little")
    wanted = sum(1 << position for position in positions if position < account.read)
    dropped = (int.from_bytes(account.dropped, "little") | wanted) & ~trained
    bitmap = dropped.to_bytes(len(account.dropped), "little")
    reasons = dict(account.reasons)
    other = sum(count for reason, count in reasons.items() if reason != "violation")
    reasons["violation"] = max(bits_set(bitmap) - other, 0)
    return replace(
        account, dropped=bitmap, reasons={reason: count for reason, count in reasons.items() if count}
    )


# ---------------------------------------------------------------------------------------------------- filling


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreTargets:
    """What a checkpoint is restored into; all of it fresh.

    Attributes:
        barrier: Guards all of them.
        sampler: Gets exactly the saved cursor.
        accounting: What became of every prompt.
        spares: The spare pool.
        buffer: The replay buffer.
        ledger: The ledger.
        dataplane: An empty store of the new incarnation.
        versions: The trainer version; None if somebody else keeps it.
        admission: Checks cursor, stamps and capacity against the configuration; None leaves only the checks
            of the cut.
        capacity: Groups that may be admitted, ready and claimed at once; needed with ``admission``.
        apply: Called inside the slot with what was restored: to set whatever else belongs to the same instant
            (the
            committed position, the next admission id); must not suspend.
        beforehand: What else is restored, by part (``prompts``, ``trainer``): awaited one after the other, once the
            checkpoint is known to fit and before rows are filled, and timed as parts of the restore.
        staging: Whether generation goes on from staged rows. Without, they are left in the checkpoint: a rollout that
            begins anew puts final rows under the very keys that some of them have.
        hub: Where hooks go; None means the barrier's hub.
    """

    barrier: DataPlaneCheckpointBarrier
    sampler: Sampler
    accounting: Accounting
    spares: SparePool
    buffer: ReplayBuffer
    ledger: RolloutLedger
    dataplane: DataPlane
    versions: TrainerVersion | None = None
    admission: Admission | None = None
    capacity: int | None = None
    apply: Callable[[Cut, RestoredRun], None] | None = None
    beforehand: Mapping[str, Callable[[], Awaitable[object]]] = field(default_factory=dict)
    staging: bool = False
    hub: Hub | None = None


@dataclass(frozen=True, slots=True)
class RestoredRun:
    """What was restored.

    Attributes:
        info: The checkpoint.
        state: The cut as it is now in the owners: the new incarnation in every key, groups at fault taken
            out.
        rows: Rows filled, counted and staged ones.
        dropped: Groups of a suspect checkpoint that were at fault and are dropped now.
        parts: Nanoseconds by part, in the order in which they were done: ``verify``, what was restored beforehand,
            ``rows``, ``documents``.
        staged: For each group of the ledger that has any, the keys of its staged rows as they are in the store
            now, in the order of their encoded form: of each generation the final row, or chunks from the first
            on without a gap.
    """

    info: CheckpointInfo
    state: CutState
    rows: int
    dropped: tuple[str, ...]
    parts: Mapping[str, int] = field(hash=False)
    staged: Mapping[str, tuple[RowKey, ...]] = field(hash=False)

    @property
    def step(self) -> int:
        """Trained steps."""
        return self.state.step

    @property
    def trainer_version(self) -> int:
        """The trainer version."""
        return self.state.trainer_version

    @property
    def position(self) -> CommittedPosition:
        """How far the dataset counts as read."""
        return self.state.position

    @property
    def next_admission_id(self) -> int:
        """The id that the next reserved batch gets."""
        return self.state.sampler.next_admission_id


async def restore_into(
    loaded: LoadedCheckpoint,
    targets: RestoreTargets,
    *,
    incarnation: int,
    clock: Callable[[], int] = time.perf_counter_ns,
) -> RestoredRun:
    """Restore a checkpoint into fresh primitives.

    Args:
        loaded: What :func:`load_newest` returned.
        targets: The primitives.
        incarnation: The incarnation of this run; larger than the checkpoint's.
        clock: Monotonic nanoseconds.

    Raises:
        RestoreRefusedError: If the checkpoint, the primitives and the configuration do not fit each other.
        CursorBehindStampError: If the saved cursor is older than a restored target step.
        CapacityError: If the configuration cannot hold the restored groups.
        ConfigError: If it names another sampler.
        DataPlaneError: If the rows cannot be filled.
    """
    hub = targets.barrier.hub if targets.hub is None else targets.hub
    parts = {"verify": loaded.verify_ns}

    @contextlib.contextmanager
    def timed(part: str) -> Iterator[None]:
        since = clock()
        try:
            yield
        finally:
            parts[part] = parts.get(part, 0) + clock() - since

    try:
        with timed("verify"):
            state, dropped = _judged(loaded)
            state = _rewritten(state, incarnation)
            _cross_check(loaded, state, targets, incarnation)
        for part, restore in targets.beforehand.items():
            with timed(part):
                await restore()
        with timed("rows"):
            found = loaded.staged(state.ledger) if targets.staging else ()
            staged = tuple(replace(key, incarnation=incarnation) for key in found)
            rows = await _fill(loaded, state, staged, targets.dataplane)
        with timed("documents"):
            restored = RestoredRun(loaded.info, state, rows, dropped, parts, by_group(staged))
            async with targets.barrier.mutation("recovery_restore") as cut:
                _hand_over(cut, restored, targets)
    except BaseException as error:
        _end_badly(hub, error, parts)
        raise
    for group_id in dropped:
        _LOG.warning(
            "group %s was at fault in the suspect checkpoint %s and is dropped", group_id, loaded.info.path
        )
    if hub.restore_ended:
        hub.fire("restore_ended", "completed", "", parts, groups_by_owner(state))
    return restored


def _judged(loaded: LoadedCheckpoint) -> tuple[CutState, tuple[str, ...]]:
    """Return the cut to restore: as it is, or without what is at fault in it."""
    if not critical(loaded.violations):
        return loaded.state, ()
    state, dropped = absolve(loaded.state, loaded.violations)
    # The rows and the seal of a group that was taken out stay in the files, so only the rest is judged again.
    left = [found for found in critical(check_cut(state)) if found.invariant not in _TOLERABLE]
    left += [found for found in loaded.violations if found.invariant == "digest_matches"]
    if left:
        raise RestoreRefusedError(
            loaded.info.path, left[0].invariant, f"{left[0].message}, which no dropped group can mend"
        )
    return state, dropped


def _rewritten(state: CutState, incarnation: int) -> CutState:
    """Return the cut with the new incarnation in every key; attempts stay as they are."""

    def entry(old: BufferEntry) -> BufferEntry:
        return replace(old, keys=tuple(replace(key, incarnation=incarnation) for key in old.keys))

    return replace(
        state,
        incarnation=incarnation,
        ready=tuple(map(entry, state.ready)),
        claimed=tuple(map(entry, state.claimed)),
        ledger=state.ledger_minus_buffer(),
    )


def _cross_check(
    loaded: LoadedCheckpoint, state: CutState, targets: RestoreTargets, incarnation: int
) -> None:
    path, sampler = loaded.info.path, targets.sampler
    if incarnation <= loaded.manifest.incarnation:
        raise RestoreRefusedError(
            path,
            "incarnation",
            f"incarnation {incarnation} cannot go on from one of incarnation {loaded.manifest.incarnation}",
        )
    if targets.dataplane.incarnation != incarnation:
        raise RestoreRefusedError(
            path, "rows", f"the store is of incarnation {targets.dataplane.incarnation}, not {incarnation}"
        )
    if targets.dataplane.statistics().rows:
        raise RestoreRefusedError(
            path, "rows", "the store is not empty, but is to be filled from the checkpoint alone"
        )
    if sampler.name != state.sampler.name or sampler.stamps_target_steps != state.sampler.stamps_target_steps:
        raise ConfigError(
            "sampler.name",
            f"the checkpoint was saved with {state.sampler.name!r}, the run has {sampler.name!r}",
        )
    if len(targets.ledger) or len(targets.buffer) or len(targets.spares) or sampler.dispatch_cursor != -1:
        raise RestoreRefusedError(path, "ledger.json", "the run owns groups already")
    items: tuple[GroupRecord | BufferEntry, ...] = (*state.ledger, *state.entries)
    for item in items:
        if item.target_step is not None and item.target_step > state.sampler.cursor:
            raise CursorBehindStampError(state.sampler.cursor, item.target_step, item.group_id)
    if targets.admission is not None:
        if targets.capacity is None:
            message = "a capacity has to come with admission=…"
            raise ValueError(message)
        targets.admission.check_restored(
            state.sampler.cursor, state.ledger, state.entries, capacity=targets.capacity
        )


async def _fill(
    loaded: LoadedCheckpoint, state: CutState, staged: Iterable[RowKey], dataplane: DataPlane
) -> int:
    """Put the rows that the cut counts, and staged ones, under the new incarnation's keys, in a thread of its own."""
    executor = DaemonExecutor("quiesce-restore", 1)
    wanted = {*staged, *(key for entry in state.entries for key in entry.keys)}
    try:
        return await asyncio.get_running_loop().run_in_executor(
            executor, _put_rows, loaded, wanted, dataplane, state.incarnation
        )
    finally:
        executor.shutdown(wait=False)


def _put_rows(loaded: LoadedCheckpoint, wanted: set[RowKey], dataplane: DataPlane, incarnation: int) -> int:
    missing = set(wanted)
    batch: dict[RowKey, Row] = {}
    for old, row in loaded.rows():
        key = replace(old, incarnation=incarnation)
        if key not in missing:
            continue
        missing.remove(key)
        batch[key] = row
        if len(batch) >= _ROWS_AT_ONCE:
            dataplane.put(batch)
            batch = {}
    if batch:
        dataplane.put(batch)
    if missing:
        first = min(key.encode() for key in missing)
        raise RestoreRefusedError(loaded.info.path, "rows", f"{len(missing)} rows are missing, first {first}")
    return len(wanted)


def _hand_over(cut: Cut, restored: RestoredRun, targets: RestoreTargets) -> None:
    """Move all control state, in one await-free step."""
    state = restored.state
    targets.sampler.restore_cursor(state.sampler.cursor)
    targets.accounting.restore(cut, state.accounting)
    targets.spares.restore(cut, state.spares)
    targets.buffer.restore(cut, state.entries)
    targets.ledger.restore(cut, state.ledger)
    if targets.versions is not None and state.trainer_version > targets.versions.value:
        targets.versions.advance(state.trainer_version)
    targets.barrier.restore_version(max(state.mutation_version, targets.barrier.mutation_version))
    if targets.apply is not None:
        targets.apply(cut, restored)
