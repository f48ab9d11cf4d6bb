"""The single controller: it runs the rollout pump, the workers, the train pump and the stall watch over one set of owners.

It is framework-neutral. Somebody with another trainer brings a generate function, a train-step function, a source of
prompts and a trainer-state object::

    controller = Controller(
        ControllerConfig(groups_per_step=8, generations_per_group=8),
        generate=generate,                # async (GenerationRequest) -> GroupResult
        train_step=train_step,            # async (TrainBatch) -> metrics
        source=SequenceSource(dataset, batch_size=8),
        trainer_state=StateDictTrainerState({"model": model, "optimizer": optimizer}),
        folder=RunFolder.open(path, resume=True),
    )
    summary = await controller.run(resume=True)

====================  ==================================================  ====================================
loop                  waits for                                           unblocked by
====================  ==================================================  ====================================
rollout pump          see :mod:`quiesce.dispatch`                         the trainer version; freed capacity
rollout worker        see :mod:`quiesce.rollouts`                         generation; a checkpoint's end
train pump            see :mod:`quiesce.training`                         commits by workers
saving                the previous write; open slots                      the writer; slots closing
====================  ==================================================  ====================================

Rule: one incarnation of a run is one :meth:`Controller.run`. It opens an empty data plane and fills it from the
checkpoint alone; ``step_0`` is published before the first prompt is read; pumps are cancelled only after the last cut was
captured. Whatever clears or makes rows final takes permits of a snapshot gate, the controller's own cleanup too, and every
gate is closed around every window. Yield rule: everything suspends but :meth:`Controller.request_stop` and the properties.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import logging
import time
from collections.abc import Callable, Collection, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, ParamSpec, TypeVar

from quiesce.accounting import Accounting
from quiesce.admission import Admission
from quiesce.auditor.auditor import Auditor
from quiesce.auditor.record import Records
from quiesce.barrier import Cut, DataPlaneCheckpointBarrier, detached
from quiesce.buffer import ReplayBuffer
from quiesce.checkpoint.capture import CutSources
from quiesce.checkpoint.loading import LoadedCheckpoint
from quiesce.checkpoint.restore import RestoredRun, RestoreTargets, load_newest, restore_into
from quiesce.checkpoint.saver import Checkpointer, SaveResult, Verify
from quiesce.cleanup import BackgroundCleanup
from quiesce.controller_config import ControllerConfig
from quiesce.dispatch import RolloutPump
from quiesce.errors import RunError, SaveRequiredError
from quiesce.gate_fence import GateFence, LocalGate
from quiesce.ledger import RolloutLedger
from quiesce.observers import Hub, default_hub
from quiesce.owners import Owners
from quiesce.rollouts import Generate, Rollouts
from quiesce.sampler_config import build_sampler
from quiesce.signals import Changed, TrainerVersion
from quiesce.snapshot_gate import SnapshotGate
from quiesce.spares import SparePool
from quiesce.stalls import StallWatch
from quiesce.sweep import sweep_every
from quiesce.threads import DaemonExecutor
from quiesce.training import SyncWeights, TrainPump, TrainStep, hand_over_weights
from quiesce.workers import GenerationWorkers, NoWorkers

if TYPE_CHECKING:
    from quiesce.auditor.policies import Policies
    from quiesce.auditor.record import ViolationRecord
    from quiesce.checkpoint.runfolder import RunFolder
    from quiesce.checkpoint.trainer_state import TrainerState
    from quiesce.dataplane.interface import DataPlane
    from quiesce.drills.target import DrillTarget
    from quiesce.invariants.violation import Violation
    from quiesce.prompts import PromptSource
    from quiesce.types import RowKey

__all__ = ["Controller", "DataPlaneFactory", "RunSummary", "lmdb_in"]

P = ParamSpec("P")
T = TypeVar("T")

_LOG: Final = logging.getLogger("quiesce.controller")

DataPlaneFactory = Callable[[int, DataPlaneCheckpointBarrier], "DataPlane"]
"""Opens an empty data plane for an incarnation, guarded by a barrier."""

FINAL_SAVE_TRIES: Final = 4
"""Cuts that a stop attempts: one that fails verification condemns the groups at fault, and the next is judged on its own."""

CLEAR_DEADLINE_SECONDS: Final = 5.0
"""How long the end of a run waits for rows to be cleared; what is left goes with the incarnation's store."""

CLEAR_PERMIT_SECONDS: Final = 180.0
"""How long one clear may take. Past it nothing is cleared any more, and no save waits for it: rows that stay cost room."""

DATAPLANE_CLOSE_SECONDS: Final = 10.0
"""How long the end of a run waits for calls that are still in the data plane: one that hangs would keep it for ever."""

GATE_LABEL: Final = "controller"
"""The label of the controller's own snapshot gate, beside those of the generation workers."""


@dataclass(frozen=True, slots=True)
class RunSummary:
    """How a run ended.

    Attributes:
        outcome: ``finished`` (every prompt ended, or ``max_steps`` was reached), ``stopped`` (it was asked to) or
            ``halted`` (an invariant is broken whose policy is to halt the run).
        step: Trained steps along the restored lineage.
        trainer_version: The trainer version.
        read: Prompts read, along the restored lineage.
        trained: Prompts trained, along the restored lineage.
        dropped: Prompts dropped, by reason.
        last_save: How the last attempt to save ended.
        save_failed: Whether that left something unsaved.
        halted_by: The violation that halted the run, or None.
    """

    outcome: Literal["finished", "stopped", "halted"]
    step: int
    trainer_version: int
    read: int
    trained: int
    dropped: dict[str, int] = field(hash=False)
    last_save: SaveResult | None
    save_failed: bool
    halted_by: ViolationRecord | None = field(default=None, hash=False)


def lmdb_in(folder: Path, *, map_bytes: int | None = None) -> DataPlaneFactory:
    """Return a factory of LMDB data planes, one folder for each incarnation.

    Args:
        folder: Where the stores go, usually ``<run folder>/rows``.
        map_bytes: Size of the sparse map; None takes the backend's default.
    """

    def opened(incarnation: int, barrier: DataPlaneCheckpointBarrier) -> DataPlane:
        from quiesce.dataplane.lmdb import LmdbDataPlane

        return LmdbDataPlane(folder, incarnation, map_bytes=map_bytes, barrier=barrier, hub=barrier.hub)

    return opened


class Controller:
    """Runs one incarnation of an asynchronous RL run.

    Args:
        config: Sizes, limits, sampler.
        generate: Generates one group; may be cancelled at any await.
        train_step: Trains one batch; never cancelled.
        source: Where prompts come from; its batches should have ``config.groups_per_step`` prompts.
        trainer_state: The trainer's own state: staged between steps, written in the background.
        folder: The run folder, opened by the caller, who also closes it.
        sync_weights: Hands the weights of a version to the generation side; awaited once before the first rollout and
            after every step.
        dataplane: Opens the data plane; None takes LMDB under the run folder.
        workers: The generation workers behind ``generate``; None if it returns its rows, and puts none itself.
        verify: Judges a captured cut; None takes every invariant, and the further checks of ``config.audit``.
        accept_suspect: Resume from a suspect checkpoint too.
        hub: Where hooks go; None means the process-wide hub.
        clock: Monotonic nanoseconds.

    Raises:
        ConfigError: If a further check cannot be loaded, or a policy names none of them.
    """

    def __init__(
        self,
        config: ControllerConfig,
        *,
        generate: Generate,
        train_step: TrainStep,
        source: PromptSource,
        trainer_state: TrainerState,
        folder: RunFolder,
        sync_weights: SyncWeights | None = None,
        dataplane: DataPlaneFactory | None = None,
        workers: GenerationWorkers | None = None,
        verify: Verify | None = None,
        accept_suspect: bool = False,
        hub: Hub | None = None,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self.config = config
        self._generate = generate
        self._train_step = train_step
        self._source = source
        self._trainer_state = trainer_state
        self._folder = folder
        self._sync_weights = sync_weights
        self._open_dataplane = lmdb_in(folder.path / "rows") if dataplane is None else dataplane
        self._workers: GenerationWorkers = NoWorkers() if workers is None else workers
        self._staging = workers is not None
        self._verify = verify
        self._accept_suspect = accept_suspect
        self._hub = default_hub() if hub is None else hub
        self._clock = clock
        self._executor = DaemonExecutor("quiesce-controller", 2)
        self._changed = Changed()
        self._owners: Owners | None = None
        self._checks, self._policies = config.audit.load()
        self._auditor: Auditor | None = None
        self._halted_by: ViolationRecord | None = None
        self._live: Callable[[], DrillTarget] | None = None
        self._stopping = False
        self._failure: BaseException | None = None
        self._condemned: list[str] = []
        self._saved_step = -1

    def request_stop(self) -> None:
        """Ask the run to save and end; on the loop's thread. A running train step is finished first."""
        if not self._stopping:
            self._stopping = True
            self._state("stopping")
            self._changed.notify()

    @property
    def owners(self) -> Owners:
        """The owners of the run's groups.

        Raises:
            RunError: Before :meth:`run` has built them.
        """
        if self._owners is None:
            raise RunError("the controller has not been started")
        return self._owners

    @property
    def auditor(self) -> Auditor | None:
        """The auditor; None before :meth:`run` has built it, and if it is switched off."""
        return self._auditor

    def drill_target(self) -> DrillTarget:
        """Return the live parts of the run, for a drill to break something in.

        Raises:
            RunError: Before :meth:`run` has built them, or without an auditor, which would not notice.
        """
        if self._live is None:
            raise RunError(
                "drills need a run that has begun to dispatch, and its auditor (controller.audit.enabled)"
            )
        return self._live()

    async def run(self, *, resume: bool = False) -> RunSummary:
        """Run until every prompt ended, enough steps were taken, or a stop was requested.

        Args:
            resume: Go on from the newest usable checkpoint of the run folder.

        Raises:
            CheckpointError: If a resume is refused, or ``step_0`` cannot be published.
            RunError: If the run is stuck, or a group can neither be finished nor dropped.
            Exception: What the train-step function raises.
        """
        self._state("starting")
        try:
            async with contextlib.AsyncExitStack() as stack:
                summary = await self._run(stack, resume=resume)
        except BaseException as error:
            self._state("stopping" if isinstance(error, asyncio.CancelledError) else "failed")
            raise
        finally:
            self._executor.shutdown(wait=False)
        if self._halted_by is not None and summary.halted_by is None:  # found by the very last look
            summary = replace(summary, outcome="halted", halted_by=self._halted_by)
        self._state("finished" if summary.outcome != "halted" and not summary.save_failed else "failed")
        return summary

    # ------------------------------------------------------------------------------------------------ the run

    async def _run(self, stack: contextlib.AsyncExitStack, *, resume: bool) -> RunSummary:
        stack.push_async_callback(self._source.close)
        loaded = await self._load() if resume else None
        incarnation = await self._blocking(self._folder.next_incarnation)
        barrier = DataPlaneCheckpointBarrier(hub=self._hub)
        dataplane = await self._blocking(self._open_dataplane, incarnation, barrier)
        stack.push_async_callback(self._close_dataplane, dataplane)
        fence = GateFence(incarnation, hub=self._hub, clock=self._clock)
        stack.push_async_callback(fence.aclose)
        gate = SnapshotGate(GATE_LABEL, hub=self._hub, clock=self._clock)
        fence.register(LocalGate(gate, permit_deadline=CLEAR_PERMIT_SECONDS))
        # A hand-over has the rows of a whole step already: to linger for more would only keep their room from the next.
        cleanup = BackgroundCleanup(
            gate, dataplane.clear, linger_seconds=0.0, hub=self._hub, clock=self._clock
        )
        stack.push_async_callback(self._end_cleanup, cleanup, gate, fence)
        owners = self._build(barrier, dataplane, cleanup)
        admission = Admission(
            barrier, owners.sampler, owners.ledger, owners.buffer, owners.versions, hub=self._hub
        )
        admission.check_capacity(owners.capacity, owners.groups_per_step)
        staged: Mapping[str, tuple[RowKey, ...]] = {}
        if loaded is not None:
            restored = await self._restore(loaded, owners, admission, dataplane)
            staged = restored.staged
        self._owners = owners
        stack.push_async_callback(self._workers.detach)  # also if attaching them fails half-way
        await self._workers.attach(dataplane, fence)
        # Nothing has moved since the restore, and nothing moves before the first prompt.
        self._auditor = self._audit(owners, dataplane, loaded) if self.config.audit.enabled else None
        if self._auditor is not None:
            stack.push_async_callback(self._auditor.aclose)
        cleanup.start()  # what the restore has handed over is cleared before the auditor's eyes
        checkpointer = self._checkpointer(owners, admission, dataplane, loaded, fence)
        stack.push_async_callback(checkpointer.close)
        if self._sync_weights is not None:
            version = owners.versions.value
            await hand_over_weights(self._sync_weights, version, hub=self._hub, clock=self._clock)
        if loaded is None:
            await self._save_start(checkpointer)
        else:
            await checkpointer.prepare()
        self._saved_step = owners.step

        rollouts = Rollouts(
            owners,
            dataplane,
            self._source,
            self._generate,
            self.config,
            fail=self._fail,
            staged=staged if self._staging else None,
            hub=self._hub,
            clock=self._clock,
        )
        stack.push_async_callback(rollouts.close)
        if self._auditor is not None:
            self._live = functools.partial(
                _drill_target,
                owners=owners,
                auditor=self._auditor,
                dataplane=dataplane,
                gate=gate,
                fence=fence,
                checkpointer=checkpointer,
                rollouts=rollouts,
                trainer_state=self._trainer_state,
                folder=self._folder,
                hub=self._hub,
            )
        dispatching = self._background(
            stack, RolloutPump(owners, self._source, admission, rollouts, self.config).run(), "rollout pump"
        )
        watch = StallWatch(
            owners,
            report_seconds=self.config.stall_report_seconds,
            abort_seconds=self.config.stall_abort_seconds,
            fail=self._fail,
            hub=self._hub,
        )
        _ = self._background(stack, watch.run(), "stall watch")
        _ = self._background(
            stack,
            sweep_every(
                self.config.save_every_steps,
                dataplane,
                owners,
                self._executor,
                elsewhere=self._workers.outstanding,
            ),
            "orphan sweep",
        )
        if self.config.audit.drills:
            _ = self._background(stack, self._answer_drills(), "drill desk")
        pump = TrainPump(
            owners,
            dataplane,
            rollouts,
            train_step=self._train_step,
            sync_weights=self._sync_weights,
            between_steps=lambda: self._between_steps(checkpointer, admission, rollouts),
            interrupted=lambda: self._stopping or self._failure is not None,
            config=self.config,
            hub=self._hub,
            trained=lambda step, groups: self._folder.journal.append(
                "trained", incarnation, step=step, groups=groups
            ),
            clock=self._clock,
        )
        if not self._stopping:
            self._state("running")
        await self._train(pump, watch)
        if self._failure is not None:
            raise self._failure
        if admission.path == "fallback":
            # It may stand at its gate inside a slot, which the last cut would wait for in vain. Cancelled there it takes
            # its admission back; the batch stays reserved.
            dispatching.cancel()
            await asyncio.wait({dispatching})
        last = await self._save_end(checkpointer, admission, rollouts)
        done = owners.finished or not self._stopping
        if done:
            self._folder.journal.append("finished", incarnation, step=owners.step)
        return self._summary(last, done=done, save_failed=checkpointer.last_failed)

    def _summary(self, last: SaveResult | None, *, done: bool, save_failed: bool) -> RunSummary:
        if self._auditor is not None:
            self._auditor.tell()  # of what the last moments have shown
        owners = self.owners
        totals = owners.accounting.statistics()
        return RunSummary(
            outcome="halted" if self._halted_by is not None else "finished" if done else "stopped",
            step=owners.step,
            trainer_version=owners.versions.value,
            read=totals.read,
            trained=totals.trained,
            dropped=dict(totals.dropped),
            last_save=last,
            save_failed=save_failed,
            halted_by=self._halted_by,
        )

    async def _train(self, pump: TrainPump, watch: StallWatch) -> None:
        """Run the train pump; a failure that only ending it can answer (a hung train step) ends it."""
        task = detached(pump.run(), name="train pump")
        halted = detached(self._changed.wait_until(lambda: watch.halted), name="halt watch")
        try:
            await asyncio.wait({task, halted}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done() and watch.halted:
                task.cancel()  # a step that hangs would never see the failure
            await asyncio.wait({task})
        finally:
            for pending in (task, halted):
                pending.cancel()
            await asyncio.wait({task, halted})
        if task.cancelled():
            if not task.cancelling():
                raise RunError("a train step, or what the train pump awaited, was cancelled from inside")
        elif (error := task.exception()) is not None:
            raise error

    async def _end_cleanup(self, cleanup: BackgroundCleanup, gate: SnapshotGate, fence: GateFence) -> None:
        """Drain the cleanup within its deadline; then let go of its thread, should it wait at its gate, and of the gate."""
        try:
            await self._blocking(cleanup.close, CLEAR_DEADLINE_SECONDS)
        finally:
            fence.unregister(GATE_LABEL)
            gate.retire("the run is over")

    async def _close_dataplane(self, dataplane: DataPlane) -> None:
        """Close it; past its deadline leave it to the daemon threads that hang in it, and to the end of the process."""
        closing = asyncio.get_running_loop().run_in_executor(self._executor, dataplane.close)
        _, pending = await asyncio.wait({closing}, timeout=DATAPLANE_CLOSE_SECONDS)
        if pending:
            _LOG.error(
                "the data plane could not be closed within %g s: a put, a get or a clear hangs in it",
                DATAPLANE_CLOSE_SECONDS,
            )
            closing.cancel()  # its end, should it come, is nobody's business any more
        else:
            closing.result()

    def _build(
        self, barrier: DataPlaneCheckpointBarrier, dataplane: DataPlane, cleanup: BackgroundCleanup
    ) -> Owners:
        config = self.config
        sampler = build_sampler(config.sampler, barrier, self._hub)
        ledger = RolloutLedger(barrier)
        return Owners(
            barrier=barrier,
            sampler=sampler,
            versions=TrainerVersion(hub=self._hub),
            ledger=ledger,
            spares=SparePool(barrier),
            buffer=ReplayBuffer(barrier, ledger, dataplane),
            accounting=Accounting(barrier),
            clears=cleanup,
            capacity=config.capacity(sampler.required_capacity(config.groups_per_step)),
            groups_per_step=config.groups_per_step,
            min_step_batch_fraction=config.min_step_batch_fraction,
            position=self._source.start,
            changed=self._changed,
        )

    def _background(
        self, stack: contextlib.AsyncExitStack, work: Coroutine[Any, Any, None], name: str
    ) -> asyncio.Task[None]:
        task = detached(work, name=name)

        def ended(done: asyncio.Task[Any]) -> None:
            if done.cancelled():
                if (
                    not done.cancelling()
                ):  # nobody asked for it, and without this task the run would stand still
                    self._fail(RunError(f"the {name} was cancelled from inside"))
            elif (error := done.exception()) is not None:
                self._fail(error)

        async def stopped() -> None:
            task.cancel()
            await asyncio.wait({task})

        task.add_done_callback(ended)
        stack.push_async_callback(stopped)
        return task

    def _fail(self, error: BaseException) -> None:
        """Note what ends the run; the first error counts."""
        if self._failure is None:
            self._failure = error
        else:
            _LOG.error("a further failure while the run ends: %r", error)
        self._changed.notify()

    # ------------------------------------------------------------------------------------------------- the auditor

    def _audit(
        self,
        owners: Owners,
        dataplane: DataPlane,
        loaded: LoadedCheckpoint | None,
        **options: Any,  # noqa: ANN401 - see Auditor
    ) -> Auditor:
        """Build the auditor and have it listen, in one step."""
        auditor = Auditor(
            owners,
            **{
                "dataplane": dataplane,
                "folder": self._folder.path,
                "gate_window": self._gate_window(loaded),
                "elsewhere": self._workers.outstanding,
                "policies": self._policies,
                "budgets": self.config.audit.phase_budgets(),
                "checks": self._checks,
                "on_halt": self._halt,
                "trace_of": self._trace_of,
                "pace": self.config.audit.pace,
                "clock": self._clock,
                **options,
            },
        )
        auditor.start()
        return auditor

    def _trace_of(self, names: Collection[str]) -> str:
        """Return the trace that tells one of some groups and cuts, if spans are made."""
        for tracing in self._hub.sources("tracing"):
            ask = getattr(tracing, "trace_of", None)
            if ask is not None and (found := ask(names)):
                return str(found)
        return ""

    def _halt(self, record: ViolationRecord) -> None:
        """End the run as a stop does, because an invariant is broken whose policy that is."""
        if self._halted_by is None:
            self._halted_by = record
            _LOG.error("the run halts: %s (record %s)", record.message, record.key)
            self.request_stop()

    def _note_halt(self, last: SaveResult | None) -> None:
        """Halt for what a cut broke, should nobody have: without an auditor, or if the same groups were at fault before."""
        if last is not None and last.halt and self._halted_by is None:
            self._halt(_record_of(last, self._folder.incarnation, self._policies))

    async def _answer_drills(self) -> None:
        from quiesce.drills.desk import DrillDesk

        try:
            await DrillDesk(self.drill_target()).run()
        except Exception:  # noqa: BLE001 - what tests an alert chain must not end the run
            _LOG.exception("drills are not answered any more; the run goes on")

    # ----------------------------------------------------------------------------------------- save and restore

    def _checkpointer(
        self,
        owners: Owners,
        admission: Admission,
        dataplane: DataPlane,
        loaded: LoadedCheckpoint | None,
        fence: GateFence,
    ) -> Checkpointer:
        before = 0 if loaded is None else loaded.state.sampler.admissions
        return Checkpointer(
            CutSources(
                barrier=owners.barrier,
                sampler_state=lambda: owners.sampler_state(before + admission.committed),
                position=lambda: owners.position,
                accounting=owners.accounting,
                spares=owners.spares,
                buffer=owners.buffer,
                ledger=owners.ledger,
                dataplane=dataplane,
                hub=self._hub,
            ),
            self._trainer_state,
            self._folder,
            fence=fence,
            restored=None if loaded is None else loaded.state,
            keep=self.config.keep_checkpoints,
            drain_timeout=self.config.drain_timeout_seconds,
            gate_window=self._gate_window(loaded),
            policy=self._policies.at_the_cut(),
            verify=self._verify,
            further=None if self._auditor is None else self._auditor.check_cut,
            report=None if self._auditor is None else self._auditor.found_at_the_cut,
            on_suspect=self._suspect,
            settling=lambda: (*owners.clears.outstanding(), *self._workers.outstanding()),
            clock=self._clock,
        )

    def _gate_window(self, loaded: LoadedCheckpoint | None) -> int | None:
        """Return how far the cursor may be ahead of the version in a sound cut.

        A resume with a smaller lookahead finds a cursor further ahead than its gate would now admit: that is no violation,
        and the distance only shrinks until the gate opens again.
        """
        window = self.config.sampler.gate_window
        if window is None or loaded is None:
            return window
        return max(window, loaded.state.sampler.cursor - loaded.state.trainer_version)

    async def _load(self) -> LoadedCheckpoint:
        load = functools.partial(
            load_newest, self._folder.path, accept_suspect=self._accept_suspect, hub=self._hub
        )
        # With its context, because hooks of the restore are called in there, and its span has a parent.
        return await self._blocking(contextvars.copy_context().run, load)

    async def _restore(
        self, loaded: LoadedCheckpoint, owners: Owners, admission: Admission, dataplane: DataPlane
    ) -> RestoredRun:
        def apply(_cut: Cut, restored: RestoredRun) -> None:
            owners.position = position
            owners.next_admission_id = restored.next_admission_id
            owners.step = restored.step

        position = owners.position

        async def seek() -> None:
            nonlocal position
            position = await self._source.seek(loaded.state.position)

        run = await restore_into(
            loaded,
            RestoreTargets(
                barrier=owners.barrier,
                sampler=owners.sampler,
                accounting=owners.accounting,
                spares=owners.spares,
                buffer=owners.buffer,
                ledger=owners.ledger,
                dataplane=dataplane,
                versions=owners.versions,
                admission=admission,
                capacity=owners.capacity,
                apply=apply,
                beforehand={
                    "prompts": seek,
                    "trainer": lambda: self._trainer_state.load(loaded.trainer_directory),
                },
                staging=self._staging,
                hub=self._hub,
            ),
            incarnation=dataplane.incarnation,
            clock=self._clock,
        )
        await self._blocking(self._folder.record_restored, loaded.state)
        return run

    async def _save_start(self, checkpointer: Checkpointer) -> None:
        """Publish ``step_0``, so that there is always something to resume."""
        await checkpointer.save(step=0, trainer_version=0, reason="start")
        result = await checkpointer.wait()
        result = checkpointer.last if result is None else result
        if result is None or result.outcome != "completed":
            raise SaveRequiredError(
                0, "" if result is None else f"{result.outcome}: {result.error or result.reason}"
            )

    async def _between_steps(
        self, checkpointer: Checkpointer, admission: Admission, rollouts: Rollouts
    ) -> None:
        """Book what a verification condemned; save if it is time."""
        owners = self.owners
        await self._book_condemned(rollouts)
        if self._auditor is not None:
            self._auditor.tell()  # so that a halt comes before the next step
        self._note_halt(checkpointer.last)
        due = owners.step % self.config.save_every_steps == 0 and owners.step != self._saved_step
        due = due and owners.step != self.config.max_steps  # the last cut follows at once
        if due and not self._stopping and not owners.finished:
            self._saved_step = owners.step
            result = await checkpointer.save(
                step=owners.step, trainer_version=owners.versions.value, unless=lambda: self._stopping
            )
            admission.note_checkpoint(result.error)

    async def _save_end(
        self, checkpointer: Checkpointer, admission: Admission, rollouts: Rollouts
    ) -> SaveResult | None:
        """Capture until a cut is published, or nothing has changed since one was."""
        owners = self.owners
        for _ in range(FINAL_SAVE_TRIES):
            await checkpointer.wait()
            await self._book_condemned(rollouts)
            result = await checkpointer.save(
                step=owners.step, trainer_version=owners.versions.value, reason="stop"
            )
            admission.note_checkpoint(result.error)
            await checkpointer.wait()
            self._note_halt(checkpointer.last)
            if not checkpointer.last_failed:
                break
        return checkpointer.last

    def _suspect(self, violations: list[Violation]) -> None:
        self._condemned.extend(group for violation in violations for group in violation.groups)
        self._changed.notify()

    async def _book_condemned(self, rollouts: Rollouts) -> None:
        """Drop the groups that a refused cut blamed, so that the next cut is judged on its own."""
        if not self._condemned:
            return
        names, self._condemned = tuple(dict.fromkeys(self._condemned)), []
        async with self.owners.barrier.mutation("group_removal") as cut:
            gone = self.owners.condemn(cut, names)
        rollouts.cancel(gone)
        _LOG.error(
            "dropped after a refused checkpoint: %s", ", ".join(gone) or "none of them is owned any more"
        )

    def _state(self, state: str) -> None:
        if self._hub.run_state_changed:
            self._hub.fire("run_state_changed", state)

    async def _blocking(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        call = functools.partial(function, *args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self._executor, call)


def _drill_target(**parts: Any) -> DrillTarget:  # noqa: ANN401 - passed on
    from quiesce.drills.target import DrillTarget

    return DrillTarget(**parts)


def _record_of(result: SaveResult, incarnation: int, policies: Policies) -> ViolationRecord:
    """Make a record of what a cut broke, for a run without an auditor."""
    halting = (found for found in result.violations if policies.of(found.invariant, found.severity) == "halt")
    violation = next(halting, result.violations[0])
    return Records(incarnation).add(violation, origin="cut", unix_time=time.time(), events=[])[0]
