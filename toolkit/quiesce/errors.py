"""Every error that Quiesce raises on purpose.

Rule: a class builds its own message from typed arguments and names the thing at fault, so that wording is uniform and
call sites stay short. Nothing here suspends.

::

    QuiesceError
    ├── BarrierError
    │   ├── UnknownKindError            (ValueError)
    │   ├── NestedCutError
    │   ├── CutError
    │   │   ├── CutExpiredError
    │   │   ├── ForeignCutError
    │   │   └── WrongSideError
    │   ├── SectionReusedError
    │   ├── WrongLoopError
    │   ├── LockOrderError
    │   ├── DrainTimeoutError           (TimeoutError)
    │   └── BarrierPoisonedError
    ├── OwnershipError
    │   ├── DuplicateOwnerError
    │   ├── UnknownGroupError           (KeyError)
    │   ├── StaleCommitError
    │   ├── PhaseError
    │   ├── ClaimError
    │   └── AccountingError
    ├── AdmissionError
    │   ├── BatchError
    │   ├── OccupiedStepError
    │   ├── CursorBehindStampError
    │   ├── CapacityError
    │   └── SamplerContractError        (TypeError)
    ├── DataPlaneError
    │   ├── RowKeyError                 (ValueError)
    │   ├── RowFormatError              (ValueError)
    │   │   └── RowCorruptError
    │   ├── MissingRowError             (KeyError)
    │   ├── MissingFieldError           (KeyError)
    │   ├── RowExistsError
    │   ├── StaleIncarnationError
    │   ├── MapFullError
    │   ├── SnapshotReleasedError
    │   ├── StoreUsedError
    │   ├── StoreFailedError
    │   ├── DataPlaneClosedError
    │   └── ForkedDataPlaneError
    ├── CheckpointError
    │   ├── FenceError
    │   │   └── GateTimeoutError        (TimeoutError)
    │   ├── SaveFailedError
    │   │   └── PreviousWriteError      (TimeoutError)
    │   ├── IncarnationSupersededError
    │   ├── RunFolderError
    │   │   └── RunFolderInUseError
    │   │       └── RunFolderLockedError
    │   ├── TrainerStateError
    │   ├── DocumentError               (ValueError)
    │   ├── UnencodableStateError       (TypeError)
    │   ├── CorruptCheckpointError
    │   ├── RestoreRefusedError
    │   │   └── NothingToRestoreError
    │   └── UnusableAuditPathError
    ├── GateError
    │   ├── PermitTimeoutError          (TimeoutError)
    │   ├── PermitReleasedError
    │   ├── NestedPermitError
    │   ├── GateRetiredError
    │   ├── WouldBlockLoopError
    │   ├── DuplicateWorkerError
    │   └── WorkerGoneError
    ├── CleanupClosedError
    ├── RunError
    │   ├── PromptSourceError
    │   ├── SaveRequiredError
    │   ├── GenerationTimeoutError      (TimeoutError)
    │   ├── RolloutResultError
    │   ├── RolloutFailedError
    │   ├── StagingRetiredError
    │   └── StallError
    ├── TelemetryError
    │   ├── PortUnavailableError
    │   ├── ExporterMissingError        (LookupError)
    │   ├── ExtraMissingError           (ImportError)
    │   ├── NoRecordingError
    │   ├── RecorderPausedError
    │   └── ViewError
    ├── DrillError
    │   ├── DrillNotPossibleError
    │   └── DrillRefusedError
    └── ConfigError                     (ValueError)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from quiesce.barrier import Holder
    from quiesce.snapshot_gate import PermitHolder


class QuiesceError(Exception):
    """Root of the tree: catch it to catch everything that Quiesce raises on purpose."""


# ---------------------------------------------------------------------------------------------------- barrier


class BarrierError(QuiesceError):
    """Raised when a section of the barrier cannot be opened, kept or trusted."""


class UnknownKindError(BarrierError, ValueError):
    """Raised when a slot is asked for with a kind that the barrier was not built with."""

    def __init__(self, kind: object, kinds: Iterable[str]) -> None:
        self.kind = kind
        super().__init__(
            f"unknown mutation kind {kind!r}; this barrier knows {', '.join(sorted(kinds))} "
            "(add your own with DataPlaneCheckpointBarrier(kinds=[...]))"
        )


class NestedCutError(BarrierError):
    """Raised when a section is opened in a context that still holds a live cut of the same barrier."""

    def __init__(self, barrier: str, wanted: str, held: str) -> None:
        super().__init__(
            f"cannot open {wanted} of barrier {barrier!r}: this context still holds {held}; "
            "sections do not nest, pass the cut that you hold"
        )


class CutError(BarrierError):
    """Raised when a cut token does not prove what a state change needs to be proved."""


class CutExpiredError(CutError):
    """Raised when the section that a cut stands for has been left."""

    def __init__(self, cut: str) -> None:
        super().__init__(f"{cut} has expired: its section has been left, so it proves nothing any more")


class ForeignCutError(CutError):
    """Raised when a cut is shown to something that another barrier guards, or from a thread that is not its own."""

    def __init__(self, cut: str, shown_to: str) -> None:
        super().__init__(f"{cut} was shown to {shown_to}, where it proves nothing")


class WrongSideError(CutError):
    """Raised when a shared cut is shown where an exclusive one is needed, or the reverse."""

    def __init__(self, cut: str, needed: str) -> None:
        super().__init__(f"{cut} was shown where a {needed} cut is needed")


class SectionReusedError(BarrierError):
    """Raised when one section object is entered twice."""

    def __init__(self, section: str) -> None:
        super().__init__(f"{section} was entered before; ask the barrier for a new section each time")


class WrongLoopError(BarrierError):
    """Raised when a barrier is used from another event loop, another thread, or outside any loop."""

    def __init__(self, barrier: str, what: str) -> None:
        super().__init__(
            f"barrier {barrier!r} is bound to one event loop and {what} came from elsewhere; "
            "hop to its loop first (asyncio.run_coroutine_threadsafe)"
        )


class LockOrderError(BarrierError):
    """Raised when something that may wait long is started while a live cut is held (the order is permit before slot)."""

    def __init__(self, what: str, held: str) -> None:
        super().__init__(f"{what} may not start while {held} is held: the lock order is permit before slot")


class DrainTimeoutError(BarrierError, TimeoutError):
    """Raised when open sections did not close within a checkpoint's drain timeout."""

    def __init__(self, timeout_seconds: float, holders: Sequence[Holder]) -> None:
        self.timeout_seconds = timeout_seconds
        self.holders = tuple(holders)
        named = "; ".join(str(holder) for holder in holders) or "nobody (the loop was busy)"
        super().__init__(f"the checkpoint gave up after draining for {timeout_seconds:g} s; held by: {named}")


class BarrierPoisonedError(BarrierError):
    """Raised when a thread that runs inside a section hung: state may be half changed, so the barrier never reopens."""

    def __init__(self, barrier: str, what: str, age_seconds: float) -> None:
        super().__init__(
            f"barrier {barrier!r} is poisoned: {what} has been running inside a section for "
            f"{age_seconds:.1f} s; halt the run and resume from the last checkpoint"
        )


# -------------------------------------------------------------------------------------------------- ownership


class OwnershipError(QuiesceError):
    """Raised when a move of a prompt group contradicts who owns it."""


class DuplicateOwnerError(OwnershipError):
    """Raised when a group would get a second owner."""

    def __init__(self, group_id: str, owner: str, wanted: str) -> None:
        self.group_id = group_id
        super().__init__(f"group {group_id} is already owned by {owner} and cannot enter {wanted}")


class UnknownGroupError(OwnershipError, KeyError):
    """Raised when the named owner does not own the named group."""

    def __init__(self, group_id: str, owner: str) -> None:
        self.group_id = group_id
        super().__init__(f"{owner} does not own group {group_id}")

    def __str__(self) -> str:
        """Return the sentence (KeyError would show its repr)."""
        return str(self.args[0])


class StaleCommitError(OwnershipError):
    """Raised when a finished attempt is no longer the one that the ledger waits for."""

    def __init__(self, group_id: str, attempt: int, current: int | None) -> None:
        self.group_id = group_id
        waits = "does not own the group" if current is None else f"waits for attempt {current}"
        super().__init__(f"commit of group {group_id} attempt {attempt} is stale: the ledger {waits}")


class PhaseError(OwnershipError):
    """Raised when a group is moved through its phases out of order."""

    def __init__(self, group_id: str, phase: str, wanted: str) -> None:
        self.group_id = group_id
        super().__init__(f"group {group_id} is {phase} and cannot become {wanted}")


class ClaimError(OwnershipError):
    """Raised when a training claim is used against its life cycle."""

    def __init__(self, claim: str, problem: str) -> None:
        super().__init__(f"training claim {claim}: {problem}")


class AccountingError(OwnershipError):
    """Raised when a prompt position would be counted twice, or out of order."""

    def __init__(self, epoch: int, position: int, problem: str) -> None:
        super().__init__(f"epoch {epoch}, position {position}: {problem}")


# -------------------------------------------------------------------------------------------------- admission


class AdmissionError(QuiesceError):
    """Raised when a batch cannot be admitted, or an admission cannot be restored."""


class BatchError(AdmissionError):
    """Raised when what is to be admitted is not one whole reserved batch."""

    def __init__(self, batch: Sequence[str], problem: str) -> None:
        super().__init__(f"cannot admit {', '.join(batch) or 'an empty batch'}: {problem}")


class OccupiedStepError(AdmissionError):
    """Raised when a batch would be stamped with a step that other groups already carry."""

    def __init__(self, target_step: int, groups: Sequence[str], batch: Sequence[str]) -> None:
        self.target_step = target_step
        super().__init__(
            f"step {target_step} is already stamped on {', '.join(groups)}; "
            f"refusing to stamp it on {', '.join(batch)} too"
        )


class CursorBehindStampError(AdmissionError):
    """Raised when a restored dispatch cursor is older than a restored target step."""

    def __init__(self, cursor: int, target_step: int, group_id: str) -> None:
        super().__init__(
            f"the saved dispatch cursor {cursor} is older than target step {target_step} of group {group_id}: "
            "the cursor and the groups come from two different moments"
        )


class CapacityError(AdmissionError):
    """Raised when a configuration cannot hold what it has to hold."""

    def __init__(self, what: str, needed: int, given: int) -> None:
        super().__init__(f"{what} needs a buffer capacity of at least {needed} groups, but it is {given}")


class SamplerContractError(AdmissionError, TypeError):
    """Raised when a custom sampler lacks a member that the controller needs."""

    def __init__(self, sampler: str, problem: str) -> None:
        super().__init__(f"sampler {sampler}: {problem}")


# ------------------------------------------------------------------------------------------------- data plane
# (classes of the data plane: append here)


class DataPlaneError(QuiesceError):
    """Raised when rows cannot be put, read, cleared or snapshotted."""


class RowKeyError(DataPlaneError, ValueError):
    """Raised when a text is not a row key."""

    def __init__(self, text: object, problem: str) -> None:
        super().__init__(f"{text!r} is not a row key: {problem}")


class RowFormatError(DataPlaneError, ValueError):
    """Raised when a row cannot be stored or returned in the asked form; ``where`` names row and field."""

    def __init__(self, where: str, problem: str) -> None:
        self.where = where
        super().__init__(f"{where}: {problem}")


class RowCorruptError(RowFormatError):
    """Raised when bytes that should be rows are not; ``where`` is a key or a file."""


class MissingRowError(DataPlaneError, KeyError):
    """Raised when a row is not in the data plane, or was not at the cut."""

    def __init__(self, key: str, place: str) -> None:
        self.key = key
        super().__init__(f"row {key} is not in {place}")

    def __str__(self) -> str:
        """Return the sentence (KeyError would show its repr)."""
        return str(self.args[0])


class MissingFieldError(DataPlaneError, KeyError):
    """Raised when a row lacks a field that was asked for."""

    def __init__(self, key: str, field: str, fields: Sequence[str]) -> None:
        self.key = key
        self.field = field
        super().__init__(f"row {key} has no field {field!r}; it has {', '.join(fields)}")

    def __str__(self) -> str:
        """Return the sentence (KeyError would show its repr)."""
        return str(self.args[0])


class RowExistsError(DataPlaneError):
    """Raised when a put would overwrite a field of a row; rows are immutable once put."""

    def __init__(self, key: str, field: str) -> None:
        self.key = key
        self.field = field
        super().__init__(
            f"row {key} has a field {field!r} already, and what was put is never overwritten "
            "(a changed value is a new field, a retry a new attempt)"
        )


class StaleIncarnationError(DataPlaneError):
    """Raised when a key of another incarnation reaches a data plane: its sender outlived a restart."""

    def __init__(self, key: str, incarnation: int) -> None:
        self.key = key
        self.incarnation = incarnation
        super().__init__(
            f"row {key} is not of incarnation {incarnation}, whose data plane this is; it is refused"
        )


class MapFullError(DataPlaneError):
    """Raised when the store's map has no room, and waiting for pins to be released made none."""

    def __init__(self, path: str, map_bytes: int, waited_seconds: float, pins: Sequence[str]) -> None:
        self.map_bytes = map_bytes
        self.pins = tuple(pins)
        if pins:
            why = f"waited {waited_seconds:.1f} s for {', '.join(pins)} to be released"
        else:
            why = "no snapshot pins anything, so waiting makes no room"
        super().__init__(
            f"the store {path} is full ({map_bytes:,} bytes of map): {why}; give it a larger map"
        )


class SnapshotReleasedError(DataPlaneError):
    """Raised when a snapshot is used after its release."""

    def __init__(self, cut_id: str) -> None:
        self.cut_id = cut_id
        super().__init__(f"the snapshot of cut {cut_id} was released; what it saw may be gone")


class StoreUsedError(DataPlaneError):
    """Raised when an incarnation's store is not in the state that its opener needs: new, or complete."""

    def __init__(self, path: str, problem: str) -> None:
        super().__init__(f"the store {path} {problem}")


class StoreFailedError(DataPlaneError):
    """Raised when the store itself fails: the disk is full, a lock table is full, a file is damaged."""

    def __init__(self, path: str, op: str, reason: str) -> None:
        super().__init__(f"{op} failed in the store {path}: {reason}")


class DataPlaneClosedError(DataPlaneError):
    """Raised when a data plane is used after it was closed, or is closed while a call waits in it."""

    def __init__(self, place: str) -> None:
        super().__init__(f"{place} is closed")


class ForkedDataPlaneError(DataPlaneError):
    """Raised when a data plane is used in a forked child of the process that opened it."""

    def __init__(self, place: str, opened_by: int, used_by: int) -> None:
        super().__init__(
            f"{place} was opened by process {opened_by} and is used in its forked child {used_by}: "
            "locks and reader slots do not survive a fork; attach anew in a process that was spawned"
        )


# ------------------------------------------------------------------------------------------------- checkpoint
# (classes of the checkpoint: append here)


class CheckpointError(QuiesceError):
    """Raised when a cut cannot be captured, written, published, restored or trusted."""


class FenceError(CheckpointError):
    """Raised when the generation workers could not be fenced for a cut, or did not stay fenced through it."""

    def __init__(self, cut_id: str, problem: str) -> None:
        self.cut_id = cut_id
        super().__init__(f"the fence of cut {cut_id}: {problem}")


class SaveFailedError(CheckpointError):
    """Raised when an attempt to save failed and no error of its own says more; ``reason`` is from a closed set."""

    def __init__(self, step: int, reason: str, problem: str) -> None:
        self.step = step
        self.reason = reason
        super().__init__(f"saving step {step} failed ({reason}): {problem}")


class PreviousWriteError(SaveFailedError, TimeoutError):
    """Raised when the write of the checkpoint before did not end in time, so no other one may begin."""

    def __init__(self, step: int, previous_step: int, timeout_seconds: float) -> None:
        super().__init__(
            step,
            "previous_write",
            f"the write of step {previous_step} has not ended within {timeout_seconds:g} s",
        )


class IncarnationSupersededError(CheckpointError):
    """Raised when a process is about to publish although a later incarnation of its run has started."""

    def __init__(self, path: str, own: int, current: int) -> None:
        self.own = own
        self.current = current
        super().__init__(
            f"incarnation {own} may not publish in {path}: incarnation {current} of the run has started since"
        )


class RunFolderError(CheckpointError):
    """Raised when a run folder cannot be made, or does not hold what a run folder holds."""

    def __init__(self, path: str, problem: str) -> None:
        self.path = path
        super().__init__(f"run folder {path}: {problem}")


class RunFolderInUseError(RunFolderError):
    """Raised when a folder has been used by a run and nobody asked to resume that run."""

    def __init__(self, path: str, used_by: str = "it has been used by a run") -> None:
        super().__init__(path, f"{used_by}; pass --resume to go on with that run, or name another folder")


class RunFolderLockedError(RunFolderInUseError):
    """Raised when another process runs in the folder right now."""

    def __init__(self, path: str, holder: str) -> None:
        RunFolderError.__init__(
            self, path, f"{holder} runs in it; wait for it to end, or name another folder"
        )


class TrainerStateError(CheckpointError):
    """Raised when a trainer's state cannot be staged, or does not fit the trainer that loads it."""

    def __init__(self, where: str, problem: str) -> None:
        self.where = where
        super().__init__(f"trainer state, {where}: {problem}")


class DocumentError(CheckpointError, ValueError):
    """Raised when a document of a checkpoint is not exactly what its schema says.

    Args:
        file: The document's file name.
        path: Where in it, as a JSON path that starts with ``$``.
        problem: What is wrong there.
    """

    def __init__(self, file: str, path: str, problem: str) -> None:
        self.file = file
        self.path = path
        self.problem = problem
        super().__init__(f"{file}: {path}: {problem}")


class UnencodableStateError(CheckpointError, TypeError):
    """Raised when a state holds something that a checkpoint does not store."""

    def __init__(self, path: str, problem: str) -> None:
        self.path = path
        super().__init__(f"{path}: {problem}")


class CorruptCheckpointError(CheckpointError):
    """Raised when a part of a checkpoint is missing, or is not what the manifest says."""

    def __init__(self, path: object, part: str, problem: str) -> None:
        self.path = path
        self.part = part
        self.problem = problem
        super().__init__(f"checkpoint {path}: part {part}: {problem}")


class RestoreRefusedError(CheckpointError):
    """Raised when checkpoints exist but none may be used: never a silent start at step 0."""

    def __init__(self, path: object, part: str, problem: str) -> None:
        self.path = path
        self.part = part
        self.problem = problem
        super().__init__(f"refusing to restore {path}: part {part}: {problem}")


class NothingToRestoreError(RestoreRefusedError):
    """Raised when a folder holds no checkpoint at all."""

    def __init__(self, path: object) -> None:
        super().__init__(path, "checkpoints", "there is no checkpoint in this folder")


class UnusableAuditPathError(CheckpointError):
    """Raised when a path is neither a checkpoint nor a run folder, or cannot be read."""

    def __init__(self, path: object, problem: str) -> None:
        self.path = path
        super().__init__(f"cannot audit {path}: {problem}")


# ------------------------------------------------------------------------------------------------------- gate
# (classes of the snapshot gate and of the fence over gates: append here)


class GateError(QuiesceError):
    """Raised when a snapshot gate is not used as it has to be, or does not let in or out."""


class PermitTimeoutError(GateError, TimeoutError):
    """Raised when a gate stayed closed for longer than a writer waits for its permit."""

    def __init__(self, worker: str, timeout_seconds: float, epoch: str) -> None:
        self.worker = worker
        self.timeout_seconds = timeout_seconds
        super().__init__(
            f"no permit of worker {worker!r} within {timeout_seconds:g} s: its gate is closed in epoch {epoch}"
        )


class PermitReleasedError(GateError):
    """Raised when a permit is released that is not held, or not any more."""

    def __init__(self, worker: str, what: str) -> None:
        self.worker = worker
        super().__init__(f"nothing to release at the gate of worker {worker!r}: {what}")


class NestedPermitError(GateError):
    """Raised when a thread that holds a permit starts what waits for a gate: that gate may wait for the permit."""

    def __init__(self, worker: str, held: str) -> None:
        self.worker = worker
        super().__init__(
            f"this thread cannot wait at the gate of worker {worker!r}: it still holds {held}; release that first"
        )


class GateRetiredError(GateError):
    """Raised when a permit is asked for of a worker that was given up; what it makes final would count for nothing."""

    def __init__(self, worker: str, reason: str) -> None:
        self.worker = worker
        self.reason = reason
        super().__init__(f"the gate of worker {worker!r} is retired: {reason}")


class WouldBlockLoopError(GateError):
    """Raised when a thread that runs an event loop would have to wait at a gate, which that loop may have to reopen."""

    def __init__(self, wanted: str, thread: str) -> None:
        super().__init__(
            f"{wanted} would have to be waited for in thread {thread!r}, which runs an event loop: use a thread of its own"
        )


class DuplicateWorkerError(GateError):
    """Raised when a worker is registered under the label of another one that is alive: one would not be fenced."""

    def __init__(self, worker: str, known: str, new: str) -> None:
        self.worker = worker
        super().__init__(
            f"worker {worker!r} is registered and alive (instance {known}), and so is another one of that label ({new}); "
            "unregister the first, or give each its own label"
        )


class WorkerGoneError(GateError):
    """Raised when a worker died, or did not answer in time, before it could be adopted."""

    def __init__(self, worker: str, problem: str) -> None:
        self.worker = worker
        super().__init__(f"worker {worker!r} cannot be adopted: {problem}")


class GateTimeoutError(FenceError, TimeoutError):
    """Raised when permits were still out at the end of a close's timeout."""

    def __init__(
        self, worker: str, epoch: str, timeout_seconds: float, holders: Sequence[PermitHolder]
    ) -> None:
        self.cut_id = ""
        self.worker = worker
        self.epoch = epoch
        self.timeout_seconds = timeout_seconds
        self.holders = tuple(holders)
        named = "; ".join(str(holder) for holder in holders)
        QuiesceError.__init__(
            self,
            f"the gate of worker {worker!r} was not empty within {timeout_seconds:g} s of its close "
            f"(epoch {epoch}); permits are held by {named}",
        )


# ---------------------------------------------------------------------------------------------------- cleanup


class CleanupClosedError(QuiesceError):
    """Raised when keys are submitted to a background cleanup that cannot clear them any more."""

    def __init__(self, worker: str, why: str) -> None:
        super().__init__(f"the cleanup of worker {worker!r} takes no more keys: {why}")


# -------------------------------------------------------------------------------------------------------- run


class RunError(QuiesceError):
    """Raised when the run itself cannot go on."""


class PromptSourceError(RunError):
    """Raised when prompts cannot be read, or not be read again."""

    def __init__(self, where: str, problem: str) -> None:
        super().__init__(f"prompt source, {where}: {problem}")


class SaveRequiredError(RunError):
    """Raised when the run may not go on because a checkpoint that it needs could not be published."""

    def __init__(self, step: int, problem: str) -> None:
        self.step = step
        super().__init__(f"the checkpoint of step {step} was not published ({problem}), so the run ends here")


class GenerationTimeoutError(RunError, TimeoutError):
    """Raised when a generation call ran past its deadline."""

    def __init__(self, group_id: str, attempt: int, deadline_seconds: float) -> None:
        self.group_id = group_id
        super().__init__(
            f"generation of group {group_id} attempt {attempt} ran past its deadline of {deadline_seconds:g} s"
        )


class RolloutResultError(RunError):
    """Raised when a generate function answers something that is not a group."""

    def __init__(self, group_id: str, problem: str) -> None:
        self.group_id = group_id
        super().__init__(f"generate answered for group {group_id}: {problem}")


class RolloutFailedError(RunError):
    """Raised when a group failed too often and may not be dropped either."""

    def __init__(self, group_id: str, attempts: int, why: str) -> None:
        self.group_id = group_id
        super().__init__(f"group {group_id} failed {attempts} times and cannot be dropped: {why}")


class StagingRetiredError(RunError):
    """Raised when rows of a generation call are put after its attempt was given up, committed or finished."""

    def __init__(self, group_id: str, attempt: int) -> None:
        self.group_id = group_id
        super().__init__(
            f"group {group_id} attempt {attempt} takes no more rows: it was given up, or is over"
        )


class StallError(RunError):
    """Raised when nothing moved for longer than the run allows."""

    def __init__(self, what: str, group_id: str, age_seconds: float) -> None:
        self.group_id = group_id
        super().__init__(f"the run is stuck: {what} for {age_seconds:.1f} s (group {group_id or 'none'})")


# -------------------------------------------------------------------------------------------------- telemetry


class TelemetryError(QuiesceError):
    """Raised when telemetry that somebody asked for cannot be switched on; never from a hook or a scrape."""


class PortUnavailableError(TelemetryError):
    """Raised when the address that somebody named for the metrics endpoint cannot be bound."""

    def __init__(self, host: str, port: int, why: str) -> None:
        self.host = host
        self.port = port
        super().__init__(
            f"the metrics endpoint cannot listen on {host} port {port}: {why}; name another port, or 0 for any free one"
        )


class ExporterMissingError(TelemetryError, LookupError):
    """Raised when no installed distribution offers the exporter that was asked for."""

    def __init__(self, name: str, group: str, known: Iterable[str]) -> None:
        self.name = name
        super().__init__(
            f"no exporter named {name!r} is installed (entry points of group {group!r}: "
            f"{', '.join(sorted(known)) or 'none'}); install quiesce again, or pass the exporter itself"
        )


class ExtraMissingError(TelemetryError, ImportError):
    """Raised when something was asked for that needs a package of an extra that is not installed."""

    def __init__(self, what: str, package: str, extra: str) -> None:
        self.package = package
        self.extra = extra
        super().__init__(f"{what} needs {package}, which is not installed: pip install 'quiesce[{extra}]'")


class NoRecordingError(TelemetryError):
    """Raised when a folder has nothing that a run recorded about itself."""

    def __init__(self, path: object) -> None:
        self.path = path
        super().__init__(f"{path} has no recording: a run that records has files in its folder telemetry/")


class RecorderPausedError(TelemetryError):
    """Raised by the recorder for what it does not take because its disk is, or is nearly, full."""

    def __init__(self, folder: object, free: int, reserve: int) -> None:
        self.free = free
        super().__init__(
            f"{folder} is on a disk with {free} bytes free, and the recorder leaves the last {reserve} to the run"
        )


class ViewError(TelemetryError):
    """Raised when `quiesce view` cannot show a run; the message ends with what to do about it."""

    def __init__(self, problem: str, remedy: str) -> None:
        self.problem = problem
        self.remedy = remedy
        super().__init__(f"{problem}; {remedy}")


# ----------------------------------------------------------------------------------------------------- drills


class DrillError(QuiesceError):
    """Raised when a drill cannot be done."""


class DrillNotPossibleError(DrillError):
    """Raised when a run has nothing that a drill could break, or what it breaks could not be seen there."""

    def __init__(self, drill: str, why: str) -> None:
        self.drill = drill
        self.why = why
        super().__init__(f"drill {drill!r} cannot be done in this run: {why}")


class DrillRefusedError(DrillError):
    """Raised when a run answers no drills."""

    def __init__(self, run: object, why: str) -> None:
        self.run = run
        self.why = why
        super().__init__(f"{run}: {why}")


class ConfigError(QuiesceError, ValueError):
    """Raised when a configuration names something impossible; the message starts with the key."""

    def __init__(self, key: str, problem: str) -> None:
        self.key = key
        self.problem = problem
        super().__init__(f"{key}: {problem}")
