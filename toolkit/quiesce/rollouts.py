"""Rollout workers: one task for each admitted group, from launch to commit, retry, substitution or drop.

=================  ==============================  ==============================================
a rollout          waits for                       unblocked by
=================  ==============================  ==============================================
generating         the generate function           it, or the call's deadline
putting rows       a thread of its own pool        the data plane; a pinned full map, its release
committing         a ``group_commit`` slot         the checkpoint that asked before it
=================  ==============================  ==============================================

Rule: rows are put before the slot, without one; the slot only flips the group from the ledger to the buffer, and only
for the attempt that the ledger waits for. Rows that did not make it are handed to clearing, whatever happened. Yield
rule: ``launch`` does not suspend, and a worker's context holds no cut.
"""

from __future__ import annotations

import asyncio
import logging
import math
import operator
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from quiesce.barrier import detached, require_no_cut
from quiesce.errors import (
    GenerationTimeoutError,
    MapFullError,
    QuiesceError,
    RolloutFailedError,
    RolloutResultError,
    RowFormatError,
    StaleCommitError,
)
from quiesce.threads import DaemonExecutor
from quiesce.types import GroupRecord, RowKey

if TYPE_CHECKING:
    from quiesce.controller_config import ControllerConfig
    from quiesce.dataplane.interface import DataPlane, Row
    from quiesce.observers import Hub
    from quiesce.owners import Owners
    from quiesce.prompts import PromptSource

__all__ = ["Generate", "GenerationRequest", "GroupResult", "Rollouts"]

_LOG: Final = logging.getLogger("quiesce.rollouts")

PUT_THREADS: Final = 4
"""Threads that put finished rows; more would only queue for the store's writer lock."""

MAX_BACKOFF_SECONDS: Final = 30.0
"""Longest pause between two attempts of a group."""

MAX_STAT_NAME: Final = 200
"""Longest name of a number to show; the longest that a checkpoint takes."""

MAX_DOUBLINGS: Final = 32
"""Doublings after which any pause that is not 0 has long reached the longest; also keeps the number a float."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What the generate function is asked for.

    Attributes:
        group_id: The prompt group; the same for every attempt.
        attempt: 0-based attempt.
        prompt: The dataset item.
        index: Its dataset index.
        start_version: The trainer version at its batch's admission.
        num_generations: How many generations are wanted.
    """

    group_id: str
    attempt: int
    prompt: Any = field(hash=False)
    index: int
    start_version: int
    num_generations: int


@dataclass(frozen=True, slots=True)
class GroupResult:
    """What the generate function answers.

    Attributes:
        rows: One row for each generation: fields by name, each a tensor or array.
        version_from: Oldest weight version that generated a token of it.
        version_to: Newest such version.
        stats: Small finite numbers; ``reward`` (the mean) and ``tokens`` (generated in all) are shown.
    """

    rows: Sequence[Row] = field(hash=False)
    version_from: int
    version_to: int
    stats: Mapping[str, float] = field(default_factory=dict, hash=False)


Generate = Callable[[GenerationRequest], Awaitable[GroupResult]]
"""Generates one group. It may be cancelled at any await; what it raises fails the attempt, not the run."""


class Rollouts:
    """Runs the workers.

    Args:
        owners: The owners of the groups.
        dataplane: Where finished rows go.
        source: Reads the payload of a spare.
        generate: The user's generate function.
        config: Attempts, deadlines, spares.
        fail: Called with an error that ends the run.
        hub: Where ``rollout_ended`` is reported.
        clock: Monotonic nanoseconds.
    """

    def __init__(
        self,
        owners: Owners,
        dataplane: DataPlane,
        source: PromptSource,
        generate: Generate,
        config: ControllerConfig,
        *,
        fail: Callable[[BaseException], None],
        hub: Hub,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._owners = owners
        self._dataplane = dataplane
        self._source = source
        self._generate = generate
        self._config = config
        self._fail = fail
        self._hub = hub
        self._clock = clock
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._executor = DaemonExecutor("quiesce-put", PUT_THREADS)

    def launch(self, record: GroupRecord, payload: Any) -> None:  # noqa: ANN401 - a dataset item
        """Start the worker of an admitted group; call it after the slot that admitted it."""
        task = detached(self._work(record, payload), name=f"rollout {record.group_id}")
        self._tasks[record.group_id] = task
        task.add_done_callback(lambda done: self._ended(record.group_id, done))

    def cancel(self, names: Sequence[str]) -> None:
        """Cancel workers whose groups the ledger does not own any more; outside any slot."""
        for name in names:
            task = self._tasks.get(name)
            if task is not None:
                task.cancel()

    @property
    def running(self) -> tuple[str, ...]:
        """The groups that have a worker."""
        return tuple(self._tasks)

    async def close(self) -> None:
        """Cancel every worker and wait until they are gone."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._executor.shutdown(wait=False)

    # ----------------------------------------------------------------------------------------------- one worker

    def _ended(self, group_id: str, task: asyncio.Task[None]) -> None:
        # A done-callback, because a task that is cancelled before its first step never runs its own finally.
        if self._tasks.get(group_id) is task:
            del self._tasks[group_id]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fail(error)

    async def _work(self, record: GroupRecord | None, payload: Any) -> None:  # noqa: ANN401 - a dataset item
        while record is not None:
            started = self._clock()
            try:
                tokens = await self._attempt(record, payload)
            except StaleCommitError as error:
                _LOG.info("%s; its rows are cleared", error)
                self._report(record, started, "skipped", 0)
                return
            except asyncio.CancelledError:
                self._report(record, started, "cancelled", 0)
                raise
            except Exception as error:
                self._report(record, started, "failed", 0)
                # Errors of Quiesce itself (a poisoned barrier, a full map) are the run's, not the group's.
                if isinstance(error, QuiesceError) and not isinstance(
                    error, (GenerationTimeoutError, RolloutResultError)
                ):
                    raise
                record = await self._after_failure(record, error)
            else:
                self._report(record, started, "completed", tokens)
                return

    async def _attempt(self, record: GroupRecord, payload: Any) -> int:  # noqa: ANN401 - a dataset item
        result = await self._call(record, payload)
        keys = tuple(
            RowKey(self._dataplane.incarnation, record.group_id, generation, record.attempt)
            for generation in range(len(result.rows))
        )
        try:
            await self._put(dict(zip(keys, result.rows, strict=True)))
        except RowFormatError as error:
            raise RolloutResultError(record.group_id, str(error)) from error
        committed = False
        try:
            async with self._owners.barrier.mutation("group_commit") as cut:
                self._owners.commit_rollout(
                    cut,
                    record,
                    keys=keys,
                    generated_from=result.version_from,
                    generated_to=result.version_to,
                    stats=result.stats,
                )
                committed = True
        finally:
            if not committed:
                self._owners.clears.add(keys)
        tokens = result.stats.get("tokens", 0)
        return int(tokens) if math.isfinite(tokens) else 0

    async def _call(self, record: GroupRecord, payload: Any) -> GroupResult:  # noqa: ANN401 - a dataset item
        require_no_cut("a generation call")
        deadline = self._config.generation_timeout_seconds
        request = GenerationRequest(
            group_id=record.group_id,
            attempt=record.attempt,
            prompt=payload,
            index=record.prompt.index,
            start_version=record.start_version or 0,
            num_generations=self._config.generations_per_group,
        )
        try:
            async with asyncio.timeout(deadline) as scope:
                result = await self._generate(request)
        except TimeoutError as error:
            if scope.expired():
                raise GenerationTimeoutError(record.group_id, record.attempt, deadline) from error
            raise
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # Something that the call awaited was cancelled, not this worker: without it nobody would try again.
            raise RolloutResultError(record.group_id, "the call was cancelled from inside") from error
        except QuiesceError as error:  # the user's, whatever its class: it fails the attempt, not the run
            raise RolloutResultError(record.group_id, f"{type(error).__name__}: {error}") from error
        return _checked(result, record.group_id, request.num_generations)

    async def _put(self, rows: Mapping[RowKey, Row]) -> None:
        """Put rows in a thread. Cancelled meanwhile, the rows are cleared once the thread is done, not before."""
        while True:
            future = asyncio.get_running_loop().run_in_executor(self._executor, self._dataplane.put, rows)
            try:
                await asyncio.shield(future)
            except asyncio.CancelledError:
                future.add_done_callback(lambda done: self._put_abandoned(done, tuple(rows)))
                raise
            except MapFullError as error:
                if not error.pins:  # asked when it gave up: by now the snapshot may be released
                    raise
                _LOG.warning("the data plane is full while a snapshot is open; rows wait for its release")
            else:
                return

    def _put_abandoned(self, done: asyncio.Future[None], keys: Sequence[RowKey]) -> None:
        if not done.cancelled() and done.exception() is None:  # a put that raises has put nothing
            self._owners.clears.add(keys)

    async def _after_failure(self, record: GroupRecord, error: Exception) -> GroupRecord | None:
        """Decide what becomes of a group whose attempt failed: retry, substitute or drop.

        Returns:
            The record of the next attempt, or None if there is none.
        """
        config, owners = self._config, self._owners
        attempts = record.attempt + 1
        _LOG.warning("rollout of group %s failed, attempt %d: %r", record.group_id, record.attempt, error)
        if attempts < config.max_attempts:
            return await self._again(record)
        stand_in: GroupRecord | None = None
        refused = False
        async with owners.barrier.mutation("substitution") as cut:
            if owners.ledger.find(record.group_id) != record:
                return None  # aborted or condemned while this waited
            if len(owners.spares):
                stand_in = owners.substitute(cut, record)
            elif owners.may_drop(record):
                owners.drop(cut, record.group_id, "failed", attempt=record.attempt)
            else:
                refused = True
        if refused:
            if attempts >= config.max_attempts + config.max_refused_drops:
                raise RolloutFailedError(
                    record.group_id, attempts, "its step would fall below min_step_batch_fraction"
                ) from error
            return await self._again(record)
        if stand_in is not None:
            payload = await self._source.payload(stand_in.prompt)
            if owners.ledger.find(stand_in.group_id) == stand_in:
                self.launch(stand_in, payload)
        return None

    async def _again(self, record: GroupRecord) -> GroupRecord | None:
        backoff = min(
            self._config.retry_backoff_seconds * 2 ** min(record.attempt, MAX_DOUBLINGS), MAX_BACKOFF_SECONDS
        )
        await asyncio.sleep(backoff)
        async with self._owners.barrier.mutation("retry") as cut:
            return self._owners.retry(cut, record)

    def _report(self, record: GroupRecord, started: int, outcome: str, tokens: int) -> None:
        if self._hub.rollout_ended:
            self._hub.fire(
                "rollout_ended", record.group_id, record.attempt, self._clock() - started, outcome, tokens
            )


def _checked(result: GroupResult, group_id: str, wanted: int) -> GroupResult:
    """Return what a generate function answered, with plain numbers; refuse what a checkpoint could not hold.

    Raises:
        RolloutResultError: If it is not a group of that many generations.
    """
    try:
        rows = tuple(result.rows)
        first, last = operator.index(result.version_from), operator.index(result.version_to)
        stats = {str(name): float(value) for name, value in result.stats.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise RolloutResultError(group_id, f"not a GroupResult ({error})") from error
    if len(rows) != wanted:
        raise RolloutResultError(group_id, f"{len(rows)} rows for {wanted} generations")
    if not all(1 <= len(name) <= MAX_STAT_NAME for name in stats):
        raise RolloutResultError(group_id, f"names of stats have 1 to {MAX_STAT_NAME} characters")
    if not 0 <= first <= last:
        raise RolloutResultError(group_id, f"weight versions from {first} to {last}")
    return GroupResult(rows=rows, version_from=first, version_to=last, stats=stats)
