"""Saving: fence, drain, capture, stage; then, while training goes on, verify, write, publish.

::

    the train pump's task, between steps                          a background task
    previous write  fence  [ drain  exclusive ]  reopen  stage    verify  write  publish  retire the oldest
    ──────────────────────────────────────────────────────────    ───────────────────────────────────────────
    holds the trainer; only [ … ] holds anybody else               holds nobody

Rule: one attempt at a time, and each ends exactly once in ``checkpoint_ended``, whatever it met; however it
ends, the barrier and the fence are open, the snapshot is released, the temporary folder is gone and the
checkpoint before it is what it was. Yield rule: ``save``, ``wait`` and ``close`` suspend; nothing that blocks
runs on the event loop, or in its default executor. Lock order: a save starts while no cut is held.

=========  ====================  ==================================================
outcome    reason                when
=========  ====================  ==================================================
completed                        published
skipped    nothing_changed       the last published cut is what a new one would be
skipped    not_needed            ``unless`` held once the write before had ended
refused    invariant             written as ``step_N.suspect``
refused    superseded            a later incarnation of the run has started
refused    previous_write        the write before did not end in time
refused    error                 a worker could not be fenced
failed     drain_timeout         slots stayed open; the error names them
failed     disk, permission, io  the file system refused
failed     error                 anything else
cancelled  cancelled             the caller, or the whole loop
=========  ====================  ==================================================
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
import traceback
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

from quiesce.barrier import detached, require_no_cut
from quiesce.checkpoint import files, publish, write
from quiesce.checkpoint.capture import CutSources, capture
from quiesce.checkpoint.cut import CapturedCut
from quiesce.checkpoint.fence import Fence, NoFence
from quiesce.checkpoint.retention import Retention
from quiesce.checkpoint.seals import judge_written
from quiesce.checkpoint.shielding import in_thread
from quiesce.dataplane import durable
from quiesce.errors import (
    ConfigError,
    DrainTimeoutError,
    FenceError,
    IncarnationSupersededError,
    PreviousWriteError,
    SaveFailedError,
)
from quiesce.invariants import INVARIANTS, POLICIES, CutFacts, Violation, check_cut
from quiesce.threads import DaemonExecutor

if TYPE_CHECKING:
    from quiesce.barrier import CheckpointCut
    from quiesce.checkpoint.cut import CutState
    from quiesce.checkpoint.runfolder import RunFolder
    from quiesce.checkpoint.trainer_state import Staged, TrainerState
    from quiesce.dataplane.interface import RowsWritten
    from quiesce.types import RowKey

__all__ = ["Checkpointer", "CheckpointerStatistics", "SaveResult", "Verify"]

_LOG: Final = logging.getLogger("quiesce.checkpoint")

Outcome = Literal["pending", "completed", "failed", "cancelled", "skipped", "refused"]
Verify = Callable[[CapturedCut, "CutState | None"], Sequence[Violation]]
"""Judges a captured cut, given the cut before it in the lineage; runs in a thread."""

DEFAULT_PREVIOUS_WRITE_TIMEOUT_SECONDS: Final = 600.0
"""How long a save waits for the write before it; one that takes longer hangs, and the trainer should not."""

DEFAULT_FENCE_TIMEOUT_SECONDS: Final = 60.0

FENCE_GRACE_SECONDS: Final = 5.0
"""How much longer than its timeout a fence may take before the save gives up waiting for it."""


@dataclass(frozen=True, slots=True)
class SaveResult:
    """How an attempt to save ended, or that it goes on in the background.

    Attributes:
        outcome: See the module's table; ``pending`` while verifying, writing and publishing go on.
        reason: From the closed set of the table; "" when completed or pending.
        step: The step.
        cut_id: The cut, or "" if none was begun.
        path: Where the checkpoint (or the suspect) is, or None.
        error: What went wrong, or None.
        groups: Captured groups by owner.
        rows: Rows written.
        num_bytes: Bytes written.
        violations: What the cut broke, also when that refused nothing.
        halt: Whether a broken invariant's policy is to halt the run.
    """

    outcome: Outcome
    reason: str
    step: int
    cut_id: str = ""
    path: Path | None = None
    error: BaseException | None = field(default=None, hash=False)
    groups: Mapping[str, int] = field(default_factory=dict, hash=False)
    rows: int = 0
    num_bytes: int = 0
    violations: tuple[Violation, ...] = ()
    halt: bool = False


@dataclass(frozen=True, slots=True)
class CheckpointerStatistics:
    """What saving has done so far.

    Attributes:
        attempts: Ended attempts, by outcome.
        writing: Whether one is being verified, written or published.
        last_step: Step of the last published checkpoint, or None.
        last_failed: Whether the last attempt left something unsaved.
        retention_failures: How often old checkpoints could not be deleted.
        part_bytes: Bytes of the last published checkpoint's ``rows``, ``trainer`` files and ``documents``; empty
            before the first.
    """

    attempts: Mapping[str, int] = field(hash=False)
    writing: bool
    last_step: int | None
    last_failed: bool
    retention_failures: int
    part_bytes: Mapping[str, int] = field(default_factory=dict, hash=False)


@dataclass(slots=True)
class _Attempt:
    step: int
    trainer_version: int
    cut_id: str = ""
    groups: Mapping[str, int] = field(default_factory=dict)
    settling: frozenset[RowKey] | None = None
    present: Collection[RowKey] | None = (
        None  # all keys of the snapshot, once they were read, until they are written
    )
    written: write.WrittenCut | None = None
    violations: tuple[Violation, ...] = ()
    halt: bool = False
    result: SaveResult | None = None


class Checkpointer:
    """Saves a run.

    Args:
        sources: Where the six artifacts are read from.
        trainer_state: The trainer's part.
        run_folder: Where checkpoints go; an incarnation was started in it, and a restore recorded if there
            was one.
        fence: Keeps workers out during the window; None for runs without one.
        restored: What the run was restored from, or None; its cut is the parent of the first one here.
        keep: How many usable checkpoints stay.
        drain_timeout: Seconds to wait for open slots; None waits for ever.
        fence_timeout: Seconds to wait for workers.
        previous_write_timeout: Seconds to wait for the write before; None waits for ever.
        gate_window: How far the sampler's cursor may be ahead of the trainer version, or None; for
            verification.
        policy: What follows from a broken invariant, by its name, where that is not the default.
        verify: Judges a cut, given the cut before; None means every invariant. Runs in a thread.
        further: Judges a captured cut as well, given what ``verify`` of every invariant knows beside it; in a thread.
        report: Takes each violation, on the loop, and tells whoever should know. None logs it, and tells the hub.
        on_suspect: Called on the loop with what a refused cut broke, so that groups at fault can be booked as
            dropped.
        settling: Returns the keys that are queued for a clear, in progress or given up in one; called on the loop,
            twice an attempt, while the fence is closed. None if nobody knows: then rows without an owner are not
            looked for.
        clock: Monotonic nanoseconds.

    Raises:
        ConfigError: If a policy is unknown.
        RunFolderError: If no incarnation was started.
    """

    def __init__(
        self,
        sources: CutSources,
        trainer_state: TrainerState,
        run_folder: RunFolder,
        *,
        fence: Fence | None = None,
        restored: CutState | None = None,
        keep: int = 2,
        drain_timeout: float | None = 60.0,
        fence_timeout: float = DEFAULT_FENCE_TIMEOUT_SECONDS,
        previous_write_timeout: float | None = DEFAULT_PREVIOUS_WRITE_TIMEOUT_SECONDS,
        gate_window: int | None = None,
        policy: Mapping[str, str] | None = None,
        verify: Verify | None = None,
        further: Callable[[CutState, CutFacts], Sequence[Violation]] | None = None,
        report: Callable[[Violation], None] | None = None,
        on_suspect: Callable[[list[Violation]], None] | None = None,
        settling: Callable[[], Collection[RowKey]] | None = None,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._sources = sources
        self._barrier = sources.barrier
        self._hub = sources.barrier.hub if sources.hub is None else sources.hub
        self._trainer_state = trainer_state
        self._run = run_folder
        self._incarnation = run_folder.incarnation
        self._fence: Fence = NoFence() if fence is None else fence
        self._drain_timeout = drain_timeout
        self._fence_timeout = fence_timeout
        self._previous_write_timeout = previous_write_timeout
        self._gate_window = gate_window
        self._policy = dict(policy or {})
        for invariant, follows in self._policy.items():
            if follows not in POLICIES:
                raise ConfigError(f"policy.{invariant}", f"{follows!r} is not one of {', '.join(POLICIES)}")
        self._verify = verify
        self._further = further
        self._report = self._tell if report is None else report
        self._on_suspect = on_suspect
        self._settling = settling
        self._clock = clock
        self._retention = Retention(run_folder, keep)
        self._retention_failures = 0
        # Rows, trainer files and documents are written side by side; one thread more, to clean up beside a
        # hung write.
        self._executor = DaemonExecutor("quiesce-save", max_workers=4)
        self._lock = asyncio.Lock()
        self._parent = restored
        self._published: CutState | None = None  # by this incarnation
        self._published_bytes: Mapping[str, int] = {}
        self._restored_cut = None if restored is None else restored.cut_id
        self._prepared = False
        self._write: asyncio.Task[SaveResult] | None = None
        self._writing: _Attempt | None = None
        self._chores: set[asyncio.Task[None]] = set()
        self._counts = dict.fromkeys(("completed", "failed", "cancelled", "skipped", "refused"), 0)
        self._last: SaveResult | None = None
        self._hub.attach("checkpointer", self)

    # ------------------------------------------------------------------------------------------------ saving

    async def save(
        self,
        *,
        step: int,
        trainer_version: int,
        reason: Literal["interval", "stop", "start"] = "interval",
        unless: Callable[[], bool] | None = None,
    ) -> SaveResult:
        """Take a cut; returns once the trainer's state is staged, with the rest going on in the background.

        Args:
            step: Trained steps.
            trainer_version: The trainer version; it and the step do not move until this returns.
            reason: Why, for the log.
            unless: Asked once the write before has ended, before anybody is disturbed; true skips the attempt. A run
                that is asked to stop meanwhile saves once, not twice.

        Returns:
            ``pending``, or how the attempt ended if it got no further. An attempt that fails for a reason
            that the run can outlive (a drain timeout, a worker, the disk, the trainer's state) is a result,
            not an exception.

        Raises:
            LockOrderError: If a cut is held; nothing was attempted then.
            BarrierError: If the barrier is poisoned or belongs to another loop.
            ClaimError: If an optimizer step has begun and is not over.
        """
        require_no_cut("a save")
        attempt = _Attempt(step, trainer_version)
        _LOG.debug("saving step %d (%s)", step, reason)
        try:
            async with self._lock:
                return await self._attempt(attempt, unless)
        except asyncio.CancelledError as error:
            self._end(attempt, "cancelled", "cancelled", error=error)
            raise
        except (DrainTimeoutError, FenceError, SaveFailedError, OSError) as error:
            return self._fail(attempt, error)
        except BaseException as error:
            self._fail(attempt, error)
            raise

    async def prepare(self) -> None:
        """Sweep what dead incarnations left, and set the futures aside that the restore undid.

        The first save does it too, but then the trainer waits for it.

        Raises:
            OSError: If the folder of checkpoints cannot be read or changed.
        """
        async with self._lock:
            await self._prepare_once()

    async def wait(self) -> SaveResult | None:
        """Wait until nothing is written any more, and return how the last background write ended, if any.

        Cancellation: the write goes on.
        """
        while self._chores:
            await asyncio.wait(set(self._chores))
        if self._write is None:
            return None
        if not self._write.done():
            await asyncio.wait({self._write})
        return self._last if self._write.cancelled() else self._write.result()

    async def close(self) -> None:
        """Wait for the write that is under way, and let go of the threads; no save may follow."""
        await self.wait()
        self._executor.shutdown(wait=False)

    @property
    def last_failed(self) -> bool:
        """Whether the last attempt left something unsaved: a run that ends like this has failed."""
        return self._last is not None and self._last.outcome not in {"completed", "skipped"}

    @property
    def last(self) -> SaveResult | None:
        """How the last attempt ended, or None before the first end."""
        return self._last

    def statistics(self) -> CheckpointerStatistics:
        """Return what saving has done so far; may be called from any thread."""
        published = self._published
        return CheckpointerStatistics(
            attempts=dict(self._counts),
            writing=self._writing is not None,
            last_step=None if published is None else published.step,
            last_failed=self.last_failed,
            retention_failures=self._retention_failures,
            part_bytes=dict(self._published_bytes),
        )

    async def _attempt(self, attempt: _Attempt, unless: Callable[[], bool] | None) -> SaveResult:
        await self._previous_write(attempt)
        await self._prepare_once()
        changed = not self._nothing_changed(attempt)
        if not changed or (unless is not None and unless()):
            self._run.journal.append("skipped", self._incarnation, step=attempt.step)
            return self._end(attempt, "skipped", "not_needed" if changed else "nothing_changed")
        captured, rows = await self._fenced(attempt)
        try:
            since = self._clock()
            with self._phase(attempt.cut_id, "stage"):
                try:
                    staged = await self._trainer_state.stage()
                except Exception as error:
                    if isinstance(error, OSError):
                        raise
                    problem = f"the trainer's state could not be staged ({type(error).__name__}: {error})"
                    raise SaveFailedError(attempt.step, "error", problem) from error
            self._hub.fire("trainer_stalled", "stage", self._clock() - since)
        except BaseException:
            captured.snapshot.release()
            if rows is not None:
                self._discard_later(attempt)
            raise
        # From here to the callback there is no await: whatever happens, the snapshot has an owner.
        task = detached(
            self._finish(attempt, captured, staged, rows), name=f"quiesce-save-step-{attempt.step}"
        )
        self._write, self._writing = task, attempt
        task.add_done_callback(lambda _: self._written(attempt, captured))
        return SaveResult("pending", "", attempt.step, attempt.cut_id, groups=attempt.groups)

    async def _previous_write(self, attempt: _Attempt) -> None:
        pending = {*self._chores, *({self._write} if self._write is not None else ())}
        pending = {task for task in pending if not task.done()}
        if not pending:
            return
        since = self._clock()
        try:
            _, pending = await asyncio.wait(pending, timeout=self._previous_write_timeout)
        finally:
            self._hub.fire("trainer_stalled", "previous_write", self._clock() - since)
        if pending:
            previous = attempt if self._writing is None else self._writing
            raise PreviousWriteError(attempt.step, previous.step, self._previous_write_timeout or 0.0)

    async def _prepare_once(self) -> None:
        if not self._prepared:
            await in_thread(self._executor, self._prepare)
            self._prepared = True

    def _prepare(self) -> None:
        """Runs in a thread."""
        if self._parent is not None:
            publish.set_undone_aside(self._run, self._parent.cut_id, self._parent.step, self._lineage())
        for leftover in self._run.leftovers():
            try:
                files.remove_tree(leftover)
            except OSError:
                _LOG.exception("%s of a dead incarnation could not be removed; saving goes on", leftover)

    def _lineage(self) -> set[str]:
        """The cuts before this incarnation; read late, because the restore may be recorded after this was built."""
        return {*self._run.lineage, *([] if self._restored_cut is None else [self._restored_cut])}

    def _nothing_changed(self, attempt: _Attempt) -> bool:
        last = self._published
        return (
            last is not None
            and last.step == attempt.step
            and last.trainer_version == attempt.trainer_version
            and last.mutation_version == self._barrier.mutation_version
        )

    # ----------------------------------------------------------------------------------- fence and window

    async def _fenced(self, attempt: _Attempt) -> tuple[CapturedCut, RowsWritten | None]:
        """Take the cut between closing the fence and reopening it."""
        section = self._barrier.checkpoint(self._drain_timeout)
        attempt.cut_id = section.window_id
        captured: CapturedCut | None = None
        rows: list[RowsWritten] = []
        try:
            stalled = -self._clock()
            try:
                with self._phase(attempt.cut_id, "fence"):
                    await self._bounded(
                        self._fence.close(attempt.cut_id, self._fence_timeout), attempt, "closing it"
                    )
                settling = self._read_settling()
                before = self._clock()
                captured = await self._window(attempt, section, rows)
                window = self._clock() - before
                stalled -= window
                attempt.settling = None if settling is None else settling.union(self._read_settling() or ())
                self._hub.fire("trainer_stalled", "window", window)
                await self._bounded(self._fence.verify(), attempt, "verifying it")
            except BaseException as error:
                try:
                    await self._reopen(loudly=False)
                except asyncio.CancelledError as cancelled:
                    # A task that was cancelled must end so: a refusal is a result, after which the caller goes on.
                    if not isinstance(error, asyncio.CancelledError):
                        raise cancelled from error
                raise
            await self._reopen()
            self._hub.fire("trainer_stalled", "fence", stalled + self._clock())
        except BaseException:
            if captured is not None:
                captured.snapshot.release()
            if not self._sources.dataplane.holds_instant:
                self._discard_later(attempt)
            raise
        return captured, rows[0] if rows else None

    def _read_settling(self) -> frozenset[RowKey] | None:
        """Return the keys that wait for a clear, or None if nobody knows.

        Read right before and right after the window, never inside it, and while the fence is closed. A clear takes a
        permit, so between the two none begins or ends, and what waited at the instant still waits at the second read,
        together with what was handed over since the first. That one alone would do, but for clears that no gate holds
        back: of a worker that was given up and counts as closed, or of a run without a fence. They may end inside the
        window; the first read has those. Keys too many do no harm: a row that was cleared is not in the snapshot, and
        one that was handed over after the instant is about to go.
        """
        if self._settling is None:
            return None
        try:
            return frozenset(self._settling())
        except Exception:  # noqa: BLE001 - somebody else's code, and what it is asked for only spares a warning
            _LOG.exception("the keys that wait for a clear could not be read; no row is judged as orphaned")
            return None

    async def _bounded(self, call: Awaitable[None], attempt: _Attempt, what: str) -> None:
        """Await a fence that should keep its deadline by itself, and does not hold the trainer up if it does not."""
        try:
            async with asyncio.timeout(self._fence_timeout + FENCE_GRACE_SECONDS) as scope:
                await call
        except TimeoutError as error:
            if not scope.expired():
                raise
            problem = (
                f"{what} took more than {FENCE_GRACE_SECONDS:g} s longer than its {self._fence_timeout:g} s"
            )
            raise FenceError(attempt.cut_id, problem) from error

    async def _window(
        self, attempt: _Attempt, section: CheckpointCut, rows: list[RowsWritten]
    ) -> CapturedCut:
        captured: CapturedCut | None = None
        try:
            with contextlib.ExitStack() as phases:
                phases.enter_context(self._phase(attempt.cut_id, "drain"))
                async with section as cut:
                    phases.pop_all().close()
                    phases.enter_context(self._phase(attempt.cut_id, "exclusive"))
                    captured = capture(
                        cut,
                        self._sources,
                        incarnation=self._incarnation,
                        parent_cut=None if self._parent is None else self._parent.cut_id,
                        step=attempt.step,
                        trainer_version=attempt.trainer_version,
                        clock=self._clock,
                    )
                    if not self._sources.dataplane.holds_instant:
                        folder = self._run.temporary(attempt.step, attempt.cut_id)
                        await self._barrier.run_in_cut(
                            cut, write.write_rows, folder, captured, record=rows.append
                        )
        except BaseException:
            if captured is not None:
                captured.snapshot.release()
            raise
        attempt.groups = captured.state.captured_groups()  # on the loop, with the trainer waiting
        return captured

    async def _reopen(self, *, loudly: bool = True) -> None:
        """Reopen the fence, whatever happens to the caller; the task outlives a cancellation.

        Args:
            loudly: Whether what reopening raises is raised, or only logged: it must not hide what came before.
        """
        task = detached(self._fence.reopen(), name="quiesce-reopen-fence")
        self._keep(task)
        try:
            await asyncio.shield(task)
        except Exception:
            if loudly:
                raise
            _LOG.exception("the fence could not be reopened after a failed attempt")

    # --------------------------------------------------------------------------------------- the background

    async def _finish(
        self, attempt: _Attempt, captured: CapturedCut, staged: Staged, rows: RowsWritten | None
    ) -> SaveResult:
        state = captured.state
        folder = self._run.temporary(attempt.step, attempt.cut_id)
        try:
            try:
                with self._phase(attempt.cut_id, "verify"):
                    refused = await self._judge(attempt, captured)
                with self._phase(attempt.cut_id, "write"), durable.watched(folder, self._synced(attempt)):
                    written = await write.write_cut(
                        folder,
                        captured,
                        staged,
                        self._executor,
                        rows=rows,
                        suspect=refused,
                        present=attempt.present,
                    )
            finally:
                captured.snapshot.release()
                attempt.present = None
            attempt.written = written
            refused = await self._judge_seals(attempt, state, written) or refused
            with self._phase(attempt.cut_id, "publish"):
                path = await in_thread(self._executor, self._publish, attempt, state, written, refused)
        except asyncio.CancelledError as error:
            await self._discard(folder)
            self._end(attempt, "cancelled", "cancelled", error=error)
            raise
        except Exception as error:  # noqa: BLE001 - of the disk, the trainer, the data plane: it is this attempt's end
            await self._discard(folder)
            result = self._failed_write(attempt, error)
            # The error is kept with the result, and must not keep the trainer's copy with it.
            del staged
            _forget_frames(error)
            return result
        if refused:
            self._run.journal.append("suspect", self._incarnation, step=attempt.step, cut_id=state.cut_id)
            return self._end(attempt, "refused", "invariant", path=path)
        self._parent = self._published = state
        self._published_bytes = written.part_bytes
        self._run.journal.append(
            "published",
            self._incarnation,
            step=attempt.step,
            cut_id=state.cut_id,
            parent_cut=state.parent_cut,
        )
        result = self._end(attempt, "completed", "", path=path)
        try:
            await in_thread(self._executor, self._retention.apply)
        except OSError:
            self._retention_failures += 1
            _LOG.exception(
                "old checkpoints could not be deleted; step %d is published all the same", attempt.step
            )
        return result

    async def _judge(self, attempt: _Attempt, captured: CapturedCut) -> bool:
        """Report what the cut broke; return whether it is refused."""
        if self._verify is None:
            checked, violations = await in_thread(
                self._executor, self._check, attempt, captured, self._parent
            )
        else:
            checked, violations = (
                (),
                tuple(await in_thread(self._executor, self._verify, captured, self._parent)),
            )
        return self._judged(attempt, checked, violations)

    async def _judge_seals(self, attempt: _Attempt, state: CutState, written: write.WrittenCut) -> bool:
        """Read the ledger's seal back out of the row files; report, and return whether the cut is refused for it."""
        if self._verify is not None:
            return False
        violations = await in_thread(self._executor, judge_written, written, state)
        return self._judged(attempt, ("digest_matches",), tuple(violations))

    def _judged(self, attempt: _Attempt, checked: tuple[str, ...], violations: tuple[Violation, ...]) -> bool:
        for name in checked:
            self._hub.fire("invariant_checked", name)
        for violation in violations:
            self._report(violation)
        attempt.violations += violations
        attempt.halt = attempt.halt or any(self._policy_of(violation) == "halt" for violation in violations)
        at_fault = self._refuses(violations)
        if at_fault and self._on_suspect is not None:
            # Before the next cut can be taken: it is judged on its own.
            try:
                self._on_suspect(at_fault)
            except Exception:  # noqa: BLE001 - somebody else's code; the refusal stands whatever it does
                _LOG.exception("groups at fault in cut %s could not be booked as dropped", attempt.cut_id)
        return bool(at_fault)

    def _check(
        self, attempt: _Attempt, captured: CapturedCut, parent: CutState | None
    ) -> tuple[tuple[str, ...], tuple[Violation, ...]]:
        """Runs in a thread."""
        facts = CutFacts.of(captured, parent=parent, gate_window=self._gate_window, settling=attempt.settling)
        attempt.present = None if facts.rows is None else facts.rows.present
        checked = tuple(name for name, invariant in INVARIANTS.items() if invariant.applies(facts))
        found = check_cut(captured.state, facts)
        for violation in () if self._further is None else self._further(captured.state, facts):
            found.append(violation if violation.cut_id else replace(violation, cut_id=captured.state.cut_id))
        return checked, tuple(found)

    def _tell(self, violation: Violation) -> None:
        _LOG.error("cut %s: %s", violation.cut_id, violation)
        self._hub.fire("invariant_violated", violation)

    def _policy_of(self, violation: Violation) -> str:
        known = INVARIANTS.get(violation.invariant)
        default = "refuse_checkpoints" if violation.severity == "critical" else "warn"
        return self._policy.get(violation.invariant, default if known is None else known.policy)

    def _refuses(self, violations: Sequence[Violation]) -> list[Violation]:
        return [violation for violation in violations if self._policy_of(violation) != "warn"]

    def _publish(self, attempt: _Attempt, state: CutState, written: write.WrittenCut, refused: bool) -> Path:  # noqa: FBT001 - what _judge said
        """Runs in a thread."""
        if refused:
            told = json.dumps([violation.to_json() for violation in attempt.violations], indent=1).encode()
            digest = files.write_durable(written.folder / "violations.json", told)
            written = replace(written, files=(*written.files, digest))
        manifest = write.manifest_of(written, state, restored_from=self._run.restored_from)
        if refused:
            return publish.publish_suspect(self._run, written.folder, manifest)
        path = publish.publish(self._run, written.folder, manifest, self._lineage())
        self._retention.note_published(path, manifest)
        return path

    def _written(self, attempt: _Attempt, captured: CapturedCut) -> None:
        """The background task ended, perhaps before its first step: then nothing of its body ran."""
        captured.snapshot.release()
        if self._writing is attempt:
            self._writing = None
        if attempt.result is None:
            self._end(attempt, "cancelled", "cancelled")
            self._executor.submit(files.remove_tree, self._run.temporary(attempt.step, attempt.cut_id))

    # --------------------------------------------------------------------------------------------
    # book-keeping

    async def _discard(self, folder: Path) -> None:
        """Remove a temporary folder; if even that fails, the next start sweeps it."""
        try:
            await in_thread(self._executor, files.remove_tree, folder)
        except OSError:
            _LOG.exception("the temporary folder %s could not be removed; the next start will", folder)

    def _discard_later(self, attempt: _Attempt) -> None:
        folder = self._run.temporary(attempt.step, attempt.cut_id)
        self._keep(detached(self._discard(folder), name="quiesce-discard"))

    def _keep(self, task: asyncio.Task[None]) -> None:
        """Hold a task until it is done; the next save and ``wait`` wait for it."""
        self._chores.add(task)
        task.add_done_callback(self._chores.discard)

    def _failed_write(self, attempt: _Attempt, error: Exception) -> SaveResult:
        if self._refuses(attempt.violations):
            _LOG.error("the suspect cut of step %d could not be kept", attempt.step, exc_info=error)
            return self._end(attempt, "refused", "invariant", error=error)
        return self._fail(attempt, error)

    def _fail(self, attempt: _Attempt, error: BaseException) -> SaveResult:
        outcome: Outcome = "failed"
        if isinstance(error, DrainTimeoutError):
            reason = "drain_timeout"
        elif isinstance(error, IncarnationSupersededError):
            outcome, reason = "refused", "superseded"
        elif isinstance(error, FenceError):
            outcome, reason = "refused", "error"
        elif isinstance(error, PreviousWriteError):
            outcome, reason = "refused", error.reason
        else:
            reason = files.reason_of(error) or "error"
        _LOG.error(
            "saving step %d: %s (%s); the last good checkpoint stays the newest",
            attempt.step,
            outcome,
            reason,
            exc_info=error,
        )
        return self._end(attempt, outcome, reason, error=error)

    def _end(
        self,
        attempt: _Attempt,
        outcome: Outcome,
        reason: str,
        *,
        path: Path | None = None,
        error: BaseException | None = None,
    ) -> SaveResult:
        """End an attempt, once."""
        if attempt.result is not None:
            return attempt.result
        written = attempt.written
        result = attempt.result = self._last = SaveResult(
            outcome=outcome,
            reason=reason,
            step=attempt.step,
            cut_id=attempt.cut_id,
            path=path,
            error=error,
            groups=attempt.groups,
            rows=0 if written is None else written.rows.rows,
            num_bytes=0 if written is None else written.num_bytes,
            violations=attempt.violations,
            halt=attempt.halt,
        )
        self._counts[outcome] += 1
        self._hub.fire(
            "checkpoint_ended",
            attempt.cut_id,
            attempt.step,
            outcome,
            reason,
            attempt.groups,
            result.rows,
            result.num_bytes,
        )
        return result

    def _synced(self, attempt: _Attempt) -> Callable[[int, int], None] | None:
        """Return what reports each file that is made durable, if somebody listens."""
        if not self._hub.file_synced:
            return None
        return lambda ns, num_bytes: self._hub.fire("file_synced", attempt.cut_id, ns, num_bytes)

    @contextlib.contextmanager
    def _phase(self, cut_id: str, phase: str) -> Iterator[None]:
        self._hub.fire("phase_started", cut_id, phase)
        since = self._clock()
        outcome = "completed"
        try:
            yield
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        except BaseException:
            outcome = "failed"
            raise
        finally:
            self._hub.fire("phase_ended", cut_id, phase, self._clock() - since, outcome)


def _forget_frames(error: BaseException) -> None:
    """Let go of what the frames hold that an error was raised through; it was logged before."""
    seen: set[int] = set()
    step: BaseException | None = error
    while step is not None and id(step) not in seen:
        seen.add(id(step))
        traceback.clear_frames(step.__traceback__)
        step.__traceback__ = None
        step = step.__cause__ or step.__context__
