"""Gates, cleanups and calls with one part broken on purpose; each must be noticed, in the scenario that it names.

If the explorer stops killing one of these, a scenario or its oracle has lost its teeth.
"""

# A broken part is made by reaching into the real one.

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from quiesce.cleanup import BackgroundCleanup
from quiesce.snapshot_gate import _THREAD, CloseAnswer, Epoch, Permit, SnapshotGate
from tests.interleaving.gate_world import GateWorld

__all__ = ["MUTANTS", "GateMutant"]


@dataclass(frozen=True, slots=True)
class GateMutant:
    """A broken world.

    Attributes:
        kind: The world.
        rule: What notices: a rule of the oracle, or the name of an error.
        scenario: Where.
        strategy: How that is explored: where the plain orders come first, what needs an early preemption comes late.
    """

    kind: type[GateWorld]
    rule: str
    scenario: str
    strategy: Literal["exhaustive", "pct"]


MUTANTS: dict[str, GateMutant] = {}


def breaks(
    rule: str, scenario: str, *, strategy: Literal["exhaustive", "pct"] = "exhaustive"
) -> Callable[[type[GateWorld]], type[GateWorld]]:
    """Register a mutant."""

    def register(kind: type[GateWorld]) -> type[GateWorld]:
        MUTANTS[kind.__name__] = GateMutant(kind, rule, scenario, strategy)
        return kind

    return register


# -------------------------------------------------------------------------------------------------------- the gate


class _Unseen(dict[Permit, None]):
    """Permits that nobody waits for."""

    def __bool__(self) -> bool:
        return False


class _NeverWaits(SnapshotGate):
    def _forget_threads(self) -> None:
        super()._forget_threads()
        self._permits = _Unseen()


@breaks("gate_is_respected", "writer_and_checkpoint")
class CloseForgetsActivePermits(GateWorld):
    """A close does not wait for the permits that are out."""

    gate_class = _NeverWaits


class _OpensAnything(SnapshotGate):
    def reopen(self, epoch: Epoch) -> None:
        super().reopen(max(epoch, self._epoch))


@breaks("reads_alone", "late_reopen_in_the_next_window")
class ReopenOpensWhateverEpoch(GateWorld):
    """A reopen opens the gate whatever epoch has closed it."""

    gate_class = _OpensAnything


class _ClosesLate(SnapshotGate):
    def close_and_wait(self, epoch: Epoch, timeout: float | None = None) -> CloseAnswer:
        with self._lock:
            if self._released >= epoch:
                self._released = Epoch(epoch.incarnation, epoch.number - 1)
        return super().close_and_wait(epoch, timeout)


@breaks("as_new", "writer_close_and_reopen")
class LateCloseCloses(GateWorld):
    """A close of an epoch that was released closes the gate, and nobody opens it again."""

    gate_class = _ClosesLate


class _WakesOne(SnapshotGate):
    def _forget_threads(self) -> None:
        super()._forget_threads()
        self._opened.notify_all = self._opened.notify  # type: ignore[method-assign] # on purpose


@breaks("DeadlockError", "two_writers_wait_for_a_reopen")
class ReopenWakesOne(GateWorld):
    """A reopen wakes one of those that wait for a permit."""

    gate_class = _WakesOne


class _WakesNoClose(SnapshotGate):
    def _forget_threads(self) -> None:
        super()._forget_threads()
        self._drained.notify_all = lambda: None  # type: ignore[method-assign] # on purpose


@breaks("DeadlockError", "writer_and_checkpoint")
class LastPermitWakesNoClose(GateWorld):
    """The release of the last permit wakes nobody."""

    gate_class = _WakesNoClose


class _LooksTooEarly(SnapshotGate):
    def enter(self, timeout: float | None = None) -> Permit:
        if self._granting:
            with self._lock:
                before, self._granting = self._granting, True
                try:
                    return super().enter(timeout)
                finally:
                    self._granting = before
        return super().enter(timeout)


@breaks("gate_is_respected", "writer_and_checkpoint")
class GateIsLookedAtOutsideTheLock(GateWorld):
    """A permit is granted by what the gate was before the lock was taken."""

    gate_class = _LooksTooEarly


class _ForgetsWhoWaits(SnapshotGate):
    def _let_in(self, now: int) -> None:
        for permit in list(self._waiting)[1:]:
            del self._waiting[permit]
        super()._let_in(now)


@breaks("DeadlockError", "two_writers_wait_for_a_reopen")
class ReopenLetsOneIn(GateWorld):
    """A reopen grants one permit, however many wait."""

    gate_class = _ForgetsWhoWaits


# ----------------------------------------------------------------------------------------------------- the cleanup


class _NoPermit(BackgroundCleanup):
    def step(self, *, block: bool) -> bool:
        if not self._gathered(block=block):
            return False
        batch = self._take()
        if batch is not None:
            self._clear_batch(batch, Permit(self._gate, 0))
        return True


@breaks("gate_is_respected", "finishing_call_and_checkpoint")
class ClearWithoutAPermit(GateWorld):
    """Cleanup asks nobody before it clears."""

    cleanup_class = _NoPermit


class _EarlyRelease(BackgroundCleanup):
    def step(self, *, block: bool) -> bool:
        if not self._gathered(block=block):
            return False
        with self._gate.permit() as permit:
            batch = self._take()
        if batch is not None:
            self._clear_batch(batch, permit)
        return True


@breaks("gate_is_respected", "cleanup_and_checkpoint")
class PermitReleasedBeforeTheClear(GateWorld):
    """Cleanup gives its permit back, then clears."""

    cleanup_class = _EarlyRelease


class _Forgets(BackgroundCleanup):
    def _settle(self, batch: Any, *, cleared: bool) -> None:  # noqa: ANN401 - a private class of the original
        super()._settle(batch, cleared=True)


@breaks("exactly_once", "failing_clear_and_checkpoint")
class FailedBatchIsDropped(GateWorld):
    """A batch whose clear failed is forgotten."""

    cleanup_class = _Forgets


class _TakesTwice(BackgroundCleanup):
    def _take(self) -> Any:  # noqa: ANN401 - as above
        with self._lock:
            first = self._calls[0] if self._calls else None
        batch = super()._take()
        with self._lock:
            if first is not None and self._batches == 0:
                self._calls.append(first)
        return batch


@breaks("exactly_once", "cleanup_and_checkpoint")
class KeysClearedTwice(GateWorld):
    """A call stays queued while its batch is cleared."""

    cleanup_class = _TakesTwice


class _DropsAtTheEnd(BackgroundCleanup):
    def _end(self, why: str) -> None:
        with self._lock:
            self._calls.clear()
        super()._end(why)


@breaks("exactly_once", "shutdown_while_closed")
class ShutdownDropsTheQueue(GateWorld):
    """What is queued at the end is forgotten, not given up by name."""

    cleanup_class = _DropsAtTheEnd


# -------------------------------------------------------------------------------------------------------- the call


@breaks("DeadlockError", "full_queue_and_checkpoint", strategy="pct")
class SubmitInsideThePermit(GateWorld):
    """A call hands its keys over while it holds its permit, and nothing refuses that."""

    def finish(self, group: str) -> None:
        with self.gate.permit() as permit:
            self.put(group)
            _THREAD.permit = None  # what the guard looks at
            self.give(group)
            _THREAD.permit = permit


@breaks("LockOrderError", "finishing_call_and_checkpoint")
class SubmitInsideThePermitIsRefused(GateWorld):
    """The same, with the guard in place."""

    def finish(self, group: str) -> None:
        with self.gate.permit():
            self.put(group)
            self.give(group)


@breaks("reads_alone", "finishing_call_and_checkpoint", strategy="pct")
class KeysHandedOverBeforeThePut(GateWorld):
    """A call hands its chunks over before its final row is there."""

    def finish(self, group: str) -> None:
        self.give(group)
        self.write(group)
