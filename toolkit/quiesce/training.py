"""The train pump: take a step, advance the version, save between steps.

=================================  ===========================================  ================================
the train pump waits for           unblocked by                                 and meanwhile
=================================  ===========================================  ================================
enough selectable groups           commits by rollout workers; the run's end    a stop request is seen
its train-step function            it                                           nothing: a step is never cancelled
a checkpoint                       see :mod:`quiesce.checkpoint.saver`          rollouts go on
=================================  ===========================================  ================================

Rule: no cut lies between the start of an optimizer step and the slot that records its groups as trained, because saving
happens in this very task, between steps. So trainer version and step counters cannot move under a cut.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

from quiesce.errors import ClaimError
from quiesce.threads import DaemonExecutor

if TYPE_CHECKING:
    from quiesce.buffer import Claim
    from quiesce.controller_config import ControllerConfig
    from quiesce.dataplane.interface import DataPlane, Row
    from quiesce.observers import Hub
    from quiesce.owners import Owners
    from quiesce.rollouts import Rollouts
    from quiesce.types import BufferEntry, RowKey

__all__ = ["IDLE_TOLD_SECONDS", "SyncWeights", "TrainBatch", "TrainPump", "TrainStep", "hand_over_weights"]

Fields = Mapping[str, Any]
"""New fields of one row: tensors or arrays by name."""

IDLE_TOLD_SECONDS: Final = 1.0
"""A wait that lasts is reported this often, so that it is seen while it lasts."""

_NEVER: Final = -1


@dataclass(frozen=True, slots=True, eq=False)
class TrainBatch:
    """What the train-step function gets.

    Attributes:
        step: The step, from 0.
        version: The trainer version W before the step.
        entries: The groups, in the sampler's order.
        rows: For each group, its rows in generation order.
    """

    step: int
    version: int
    entries: tuple[BufferEntry, ...]
    rows: tuple[tuple[Row, ...], ...]
    _write_back: Callable[[Mapping[RowKey, Fields]], Awaitable[None]] = field(repr=False)

    async def write_back(self, fields: Sequence[Sequence[Fields]]) -> None:
        """Add fields (advantages, a changed mask) to the batch's rows, in an ``advantage_writeback`` slot.

        Args:
            fields: For each group, for each generation, new fields by name.

        Raises:
            ClaimError: If the step is over, or its groups are not those of ``fields``.
            RowExistsError: If a row has one of the fields already: rows are immutable once put.
        """
        shape = [len(group) for group in fields]
        if shape != [len(entry.keys) for entry in self.entries]:
            raise ClaimError(
                f"of step {self.step}", f"write-back of {shape} rows a group, which is not its shape"
            )
        await self._write_back(
            {
                key: row
                for entry, group in zip(self.entries, fields, strict=True)
                for key, row in zip(entry.keys, group, strict=True)
            }
        )


class TrainStep(Protocol):
    """The user's train-step function."""

    def __call__(self, batch: TrainBatch, /) -> Awaitable[Mapping[str, float]]:
        """Train one batch; return metrics to show (``reward``, ``loss``, ``kl``, …)."""
        ...


SyncWeights = Callable[[int], Awaitable[None]]
"""Hands the weights of a new trainer version to the generation side."""


async def hand_over_weights(
    sync_weights: SyncWeights, version: int, *, hub: Hub, clock: Callable[[], int]
) -> None:
    """Have the weights of a version handed over, and report when that begins and how it ends.

    Args:
        sync_weights: The user's weight hand-over.
        version: The trainer version.
        hub: Where it is reported.
        clock: Monotonic nanoseconds.
    """
    if hub.weight_sync_started:
        hub.fire("weight_sync_started", version)
    started = clock()
    outcome = "failed"
    try:
        await sync_weights(version)
        outcome = "completed"
    except asyncio.CancelledError:
        outcome = "cancelled"
        raise
    finally:
        if hub.weight_synced:
            hub.fire("weight_synced", version, clock() - started, outcome)


class TrainPump:
    """Takes step after step until the run is finished, stopped, failed, or has taken enough.

    Args:
        owners: The owners of the groups.
        dataplane: Where the rows are.
        rollouts: Their stale ones are cancelled.
        train_step: The user's train-step function.
        sync_weights: The user's weight hand-over, or None.
        between_steps: Awaited between steps; saves if it is time.
        interrupted: Whether a stop was asked for or the run failed.
        config: Sizes and limits.
        hub: Where ``train_step_ended`` and ``train_idled`` are reported.
        trained: Called with (step, group ids) after each step's groups are recorded as trained.
        clock: Monotonic nanoseconds.
    """

    def __init__(
        self,
        owners: Owners,
        dataplane: DataPlane,
        rollouts: Rollouts,
        *,
        train_step: TrainStep,
        sync_weights: SyncWeights | None,
        between_steps: Callable[[], Awaitable[None]],
        interrupted: Callable[[], bool],
        config: ControllerConfig,
        hub: Hub,
        trained: Callable[[int, tuple[str, ...]], None] = lambda _step, _groups: None,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._owners = owners
        self._dataplane = dataplane
        self._rollouts = rollouts
        self._train_step = train_step
        self._sync_weights = sync_weights
        self._between_steps = between_steps
        self._interrupted = interrupted
        self._config = config
        self._hub = hub
        self._trained = trained
        self._clock = clock
        self._executor = DaemonExecutor("quiesce-rows", 1)
        self._cleaned_version = _NEVER

    async def run(self) -> None:
        """Pump until there is nothing left to train, or a reason to stop."""
        owners = self._owners
        try:
            while True:
                await self._between_steps()
                if self._interrupted() or owners.finished or self._had_enough():
                    return
                await self._clean_up_stale()
                with self._idle("groups"):
                    await owners.changed.wait_until(self._may_go_on)
                if owners.plan() is not None and not self._interrupted() and not owners.evictable():
                    await self._take_step()
        finally:
            self._executor.shutdown(wait=False)

    def _had_enough(self) -> bool:
        return self._config.max_steps is not None and self._owners.step >= self._config.max_steps

    def _may_go_on(self) -> bool:
        owners = self._owners
        # What became evictable meanwhile holds capacity, and admission may be waiting for that.
        return self._interrupted() or owners.finished or owners.plan() is not None or bool(owners.evictable())

    async def _take_step(self) -> None:
        owners = self._owners
        if owners.plan() == ():
            self._pass_step()
            await self._sync()
            return
        async with owners.barrier.mutation("group_removal") as cut:
            claim = owners.claim(cut)
        if claim is None:
            return  # an eviction or an abort came between: look again
        try:
            rows = await self._read(claim)
        except BaseException:
            async with owners.barrier.mutation("group_removal") as cut:
                self._owners.buffer.unclaim(cut, claim)
            raise
        batch = TrainBatch(
            step=owners.step,
            version=owners.versions.value,
            entries=claim.entries,
            rows=rows,
            _write_back=lambda fields: self._write_back(claim, fields),
        )
        if self._hub.train_step_started:
            self._hub.fire("train_step_started", batch.step + 1, batch.version)
        started = self._clock()
        owners.buffer.begin(claim)
        try:
            metrics = dict(await self._train_step(batch))
        except BaseException as error:
            outcome = "cancelled" if isinstance(error, asyncio.CancelledError) else "failed"
            self._report(batch, started, outcome, {})
            raise
        version = owners.versions.advance()
        async with owners.barrier.mutation("sample_clear") as cut:
            owners.finish(cut, claim)
        self._trained(owners.step, tuple(entry.group_id for entry in claim.entries))
        staleness = [batch.version - entry.generated_from for entry in batch.entries]
        metrics.setdefault("staleness", sum(staleness) / len(staleness))
        metrics.setdefault("staleness_max", max(staleness))
        self._report(batch, started, "completed", metrics)
        await self._sync(version)

    def _pass_step(self) -> None:
        """An admitted step that has no group left: the version advances all the same, or the gate would never open."""
        owners = self._owners
        started = self._clock()
        version = owners.versions.value
        owners.versions.advance()
        owners.step += 1
        self._trained(owners.step, ())
        if self._hub.train_step_ended:
            self._hub.fire(
                "train_step_ended", owners.step, version, self._clock() - started, 0, "skipped", {}
            )

    async def _sync(self, version: int | None = None) -> None:
        if self._sync_weights is None:
            return
        version = self._owners.versions.value if version is None else version
        with self._idle("sync"):
            await hand_over_weights(self._sync_weights, version, hub=self._hub, clock=self._clock)

    @contextmanager
    def _idle(self, cause: str) -> Iterator[None]:
        """Report that the pump waits: when the wait is over, and every so often until then, for it may last."""
        if not self._hub.train_idled:
            yield
            return
        told = self._clock()
        loop = asyncio.get_running_loop()
        timer: asyncio.TimerHandle

        def tell() -> None:
            nonlocal told
            now = self._clock()
            self._hub.fire("train_idled", cause, now - told)
            told = now

        def tell_and_go_on() -> None:
            nonlocal timer
            tell()
            timer = loop.call_later(IDLE_TOLD_SECONDS, tell_and_go_on)

        timer = loop.call_later(IDLE_TOLD_SECONDS, tell_and_go_on)
        try:
            yield
        finally:
            timer.cancel()
            tell()

    async def _clean_up_stale(self) -> None:
        """Abort and evict what the new version made stale, each in one slot, and only if there is any."""
        owners = self._owners
        if owners.versions.value == self._cleaned_version and not owners.evictable():
            return
        self._cleaned_version = owners.versions.value
        if owners.stale():
            async with owners.barrier.mutation("watchdog_abort") as cut:
                aborted = owners.abort_stale(cut)
            self._rollouts.cancel([record.group_id for record in aborted])
        if owners.evictable():
            async with owners.barrier.mutation("group_removal") as cut:
                owners.evict(cut, owners.evictable())

    async def _read(self, claim: Claim) -> tuple[tuple[Row, ...], ...]:
        keys = [key for entry in claim.entries for key in entry.keys]
        loop = asyncio.get_running_loop()
        rows = iter(await loop.run_in_executor(self._executor, self._dataplane.get, keys))
        return tuple(tuple(next(rows) for _ in entry.keys) for entry in claim.entries)

    async def _write_back(self, claim: Claim, fields: Mapping[RowKey, Fields]) -> None:
        barrier = self._owners.barrier
        async with barrier.mutation("advantage_writeback") as cut:
            if claim.ended or not claim.begun:
                raise ClaimError(str(claim), "an advantage write-back happens only in a begun step")
            await barrier.run_in_cut(cut, self._dataplane.put, fields)

    def _report(self, batch: TrainBatch, started: int, outcome: str, metrics: Mapping[str, float]) -> None:
        if self._hub.train_step_ended:
            self._hub.fire(
                "train_step_ended",
                batch.step + 1,
                batch.version,
                self._clock() - started,
                len(batch.entries),
                outcome,
                metrics,
            )
