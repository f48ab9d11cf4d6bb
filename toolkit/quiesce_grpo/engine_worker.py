"""One worker of the rollout engine: a thread with a replica of the weights, from a batch of calls to their replies.

==========================  ==============================  ==============================================
a worker                    waits for                       unblocked by
==========================  ==============================  ==============================================
between batches             an eligible call                ``generate``, ``sync_weights``, ``close``
staging a chunk             the data plane                  it; a pinned full store, its release
finishing a call            a permit of its gate            the reopening, its deadline
submitting obsolete keys    room in its cleanup             the cleanup's thread
==========================  ==============================  ==============================================

Rule: a staged call is finished in this order: permit, final rows, permit released, obsolete keys to the cleanup, reply.
So a checkpoint never finds a call that was answered and whose rows are not there, and nobody ever waits for a clear. A
chunk is an optimisation: what goes wrong with one is logged, and its batch stages nothing further; it never fails a
call. Yield rule: nothing here suspends; it all blocks, in the worker's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from quiesce import GroupResult
from quiesce.errors import CleanupClosedError, StagingRetiredError
from quiesce.types import RowKey
from quiesce_grpo.config import EngineConfig
from quiesce_grpo.engine_calls import Call, Published
from quiesce_grpo.engine_gates import WorkerGate
from quiesce_grpo.policy import Policy
from quiesce_grpo.sampling import Completion, SamplePrompt, sample

__all__ = ["Batch", "RolloutWorker", "WorkerHome"]

_logger = logging.getLogger(__name__)


@dataclass(eq=False, slots=True)
class Batch:
    """Calls that a worker runs together.

    Attributes:
        worker: Who runs them.
        calls: The calls.
        timer: Watches the deadline.
        ended: Whether it is over.
        stages: Whether its chunks are still staged.
    """

    worker: RolloutWorker
    calls: Sequence[Call]
    timer: asyncio.TimerHandle | None = None
    ended: bool = False
    stages: bool = True


class WorkerHome(Protocol):
    """What a worker asks of its engine; every method may be called from the worker's thread."""

    @property
    def config(self) -> EngineConfig:
        """The engine's settings."""

    def new_replica(self) -> Policy:
        """Return a replica of the weights for this thread alone."""

    def take(self, worker: RolloutWorker) -> list[Call] | None:
        """Wait for the next batch's calls; None when the worker is to end."""

    def begin(self, worker: RolloutWorker, calls: Sequence[Call]) -> Batch:
        """Note that a batch has begun, and have its deadline watched."""

    def end(self, batch: Batch) -> None:
        """Note that a batch is over."""

    def given_up(self, batch: Batch) -> bool:
        """Return whether nobody wants the rest of a batch any more."""

    def published(self) -> Published:
        """Return the newest weights."""

    def prepare(self, call: Call) -> SamplePrompt:
        """Encode a call's prompt, and find out what it goes on from."""

    def score(self, call: Call, tokens: Sequence[int]) -> float:
        """Return the reward of a completion."""

    def staged(self, rows: int) -> None:
        """Count chunk rows that were put."""

    def chunk_failed(self) -> None:
        """Count a put of chunks that failed."""

    def pass_on(self, worker: RolloutWorker, keys: Sequence[RowKey]) -> None:
        """Have obsolete rows cleared whose worker was lost meanwhile."""

    def reply(
        self,
        worker: RolloutWorker,
        call: Call,
        outcome: GroupResult | BaseException,
        last_token_ns: int | None,
    ) -> None:
        """Hand a call its outcome; a time (``time.perf_counter_ns``) if it was generated to its last token."""


class RolloutWorker:
    """A thread, its replica of the weights and their version.

    Args:
        engine: Where calls come from and go to.
        place: Its place among the workers; its gate's label.
        name: The thread's name.
        gate: What it finishes staged calls with; None while the engine is attached to no run.
    """

    def __init__(self, engine: WorkerHome, place: int, name: str, gate: WorkerGate | None) -> None:
        self.place = place
        self.gate = gate
        # Set on the event loop, read here; a plain flag is enough since it only ever goes up.
        self.abandoned = False
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._engine = engine
        self._policy: Policy | None = None
        self._loaded: Published | None = None

    def _run(self) -> None:
        policy = self._engine.new_replica()
        # A stream of its own lets generation and training overlap on a GPU.
        with _own_stream(policy.device):
            self._policy = policy
            while (calls := self._engine.take(self)) is not None:
                if calls:
                    batch = self._engine.begin(self, calls)
                    try:
                        self._attempt(batch, calls)
                    finally:
                        self._engine.end(batch)

    def _attempt(self, batch: Batch, calls: Sequence[Call]) -> None:
        """Run calls together; when that fails, each alone."""
        prompts: list[tuple[Call, SamplePrompt]] = []
        for call in calls:
            with _FailureOf(call, self):
                call.gate = self.gate if call.request.staging is not None else None
                prompts.append((call, self._engine.prepare(call)))
        if not prompts:
            return
        try:
            completed = self._sample(batch, prompts)
        except Exception as error:
            if len(prompts) == 1:
                self._report(prompts[0][0], error)
                return
            _logger.warning("a batch of %d calls failed, running each alone", len(prompts), exc_info=error)
            for call, _ in prompts:
                self._attempt(batch, [call])
            return
        if completed is None:
            return
        last_token_ns = time.perf_counter_ns()
        for (call, _), completions in zip(prompts, completed, strict=True):
            with _FailureOf(call, self):
                self._finish(call, completions, last_token_ns)

    def _sample(
        self, batch: Batch, prompts: Sequence[tuple[Call, SamplePrompt]]
    ) -> list[list[Completion]] | None:
        assert self._policy is not None  # noqa: S101 - set before the first batch, in this thread
        config = self._engine.config
        version = self._take_weights()
        between_steps = config.swap_weights == "between_steps"
        calls = [call for call, _ in prompts]
        return sample(
            self._policy,
            [prompt for _, prompt in prompts],
            max_new_tokens=config.max_new_tokens,
            temperature=config.temperature,
            version=self._take_weights if between_steps else lambda: version,
            cancelled=lambda: self._engine.given_up(batch),
            progress=(lambda completions: self._stage(batch, calls, completions))
            if config.chunk_tokens
            else None,
            progress_tokens=config.chunk_tokens or 1,
        )

    def _stage(
        self, batch: Batch, calls: Sequence[Call], completions: Sequence[Sequence[Completion]]
    ) -> None:
        """Put the tokens so far of every call that somebody still waits for."""
        for call, drawn in zip(calls, completions, strict=True):
            if not batch.stages or call.rows is None or call.future.done():
                continue
            try:
                self._engine.staged(call.rows.stage(drawn))
            except StagingRetiredError:
                continue  # its attempt was given up just now
            except Exception:
                batch.stages = False
                self._engine.chunk_failed()
                _logger.exception(
                    "a chunk of group %s could not be staged; its batch goes on without, and after a resume "
                    "its calls would go on from what is staged already",
                    call.request.group_id,
                )

    def _finish(self, call: Call, completions: Sequence[Completion], last_token_ns: int) -> None:
        assert call.rows is not None  # noqa: S101 - prepared above
        if call.future.done():
            return
        result, rows = call.rows.finish(completions, lambda tokens: self._engine.score(call, tokens))
        staging, gate = call.request.staging, call.gate
        if staging is not None and gate is not None:
            obsolete = staging.finish(gate.gate, rows, self._engine.config.permit_wait_seconds)
            if obsolete:
                try:
                    gate.cleanup.submit(obsolete)
                except CleanupClosedError:  # this worker was lost meanwhile, and its cleanup with it
                    self._engine.pass_on(self, obsolete)
        self._report(call, result, last_token_ns)

    def _take_weights(self) -> int:
        """Load the newest weights if they are not loaded yet, and return their version."""
        published = self._engine.published()
        if published is not self._loaded:
            if published.weights is not None and self._policy is not None:
                self._policy.load_weights(published.weights)
            self._loaded = published
        return published.version

    def _report(
        self, call: Call, outcome: GroupResult | BaseException, last_token_ns: int | None = None
    ) -> None:
        if not self.abandoned and not call.future.done():
            self._engine.reply(self, call, outcome, last_token_ns)


class _FailureOf:
    """Give what its body raises to one call, and go on."""

    def __init__(self, call: Call, worker: RolloutWorker) -> None:
        self._call, self._worker = call, worker

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Exception):
            return False
        self._worker._report(self._call, error)  # noqa: SLF001 - same module
        return True


def _own_stream(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Return the context in which the kernels of a worker go; on the CPU there is nothing to choose."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call] # torch does not annotate it
    return torch.cuda.stream(stream)
