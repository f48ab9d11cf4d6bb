"""Barriers that lack one rule each: the claim that states the rule must notice, or it proves nothing."""

# A broken barrier is made by reaching into the real one.
# ruff: noqa: SLF001

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import Any, Self

import pytest

from quiesce.barrier import _HELD, CheckpointCut, Cut, MutationCut, _Threads
from quiesce.errors import QuiesceError
from quiesce.testing import in_virtual_time
from tests import barrier_claims as claims
from tests.barriers import Barrier, Claim


class SlotsExclude(Barrier):
    """Slots exclude each other."""

    def mutation(self, kind: str) -> MutationCut:
        """Return a slot."""
        barrier = self

        class Exclusive(MutationCut):
            __slots__ = ()

            async def __aenter__(self) -> Self:
                while barrier._open:  # noqa: ASYNC110 - bad on purpose
                    await asyncio.sleep(1.0)
                return await super().__aenter__()

        return Exclusive()._of(self, kind)


class WindowsShare(Barrier):
    """A checkpoint does not wait for the open slots."""

    def _serve(self, now: int) -> None:
        held, self._open = self._open, {}
        super()._serve(now)
        self._open |= held

    async def _wait(self, cut: Cut) -> None:
        if isinstance(cut, CheckpointCut) and self._phase == "open":
            cut._opened_ns, self._window = self._clock(), cut
            self._turn(self._clock())
            return
        await super()._wait(cut)


class LastInFirstOut(Barrier):
    """The queue is a stack."""

    def _serve(self, now: int) -> None:
        for cut in reversed(list(self._queue)):
            self._queue.move_to_end(cut)
        super()._serve(now)


class SlotsOvertake(Barrier):
    """A slot enters while a checkpoint drains."""

    async def _wait(self, cut: Cut) -> None:
        if isinstance(cut, MutationCut) and self._window is None:
            cut._opened_ns = self._clock()
            self._open[cut] = None
            return
        await super()._wait(cut)


class NoHandOver(Barrier):
    """Leaving only wakes the waiters, who then compete with whoever comes."""

    def _serve(self, now: int) -> None:
        if self._queue and self._window is None:
            asyncio.get_running_loop().call_soon(super()._serve, now)

    def _turn(self, now: int) -> None:
        super()._turn(now)
        if self._window is None and not self._open and self._poison is None:
            self._phase = "open"


class DrainStaysShut(Barrier):
    """A checkpoint that gives up does not reopen the barrier."""

    def _leave_queue(self, cut: Cut) -> None:
        self._queue.pop(cut, None)


class GrantIsKept(Barrier):
    """A waiter that is cancelled after its grant just goes."""

    def _release(self, cut: Cut, outcome: str, *, entered: bool = True) -> None:
        if entered:
            super()._release(cut, outcome)


class NoTimeout(Barrier):
    """The drain never gives up."""

    def _give_up(self, cut: CheckpointCut) -> None:
        pass


class Nests(Barrier):
    """Nobody looks whether a cut is held."""

    def _outer(self, held: Cut | None, cut: Cut) -> Cut | None:
        return None


class NestsByTask(Barrier):
    """Only the same task counts as nested."""

    def _outer(self, held: Cut | None, cut: Cut) -> Cut | None:
        if held is not None and held._task is not asyncio.current_task():
            return None
        return super()._outer(held, cut)


class ResetsOnExit(Barrier):
    """What counts is the variable, not whether the cut is live."""

    def _prepare(self, cut: Cut) -> int:
        held = _HELD.get()
        if held is not None and held._task is None:  # it was left
            held.live = True
            try:
                return super()._prepare(cut)
            finally:
                held.live = False
        return super()._prepare(cut)

    def mutation(self, kind: str) -> MutationCut:
        """Return a slot."""
        self._thread_ident = 0  # so that entering takes the long way
        return super().mutation(kind)


class VersionStands(Barrier):
    """A slot whose body failed does not count as a change."""

    def _release(self, cut: Cut, outcome: str, *, entered: bool = True) -> None:
        before = self._version
        super()._release(cut, outcome, entered=entered)
        if outcome == "failed":
            self._version = before

    def mutation(self, kind: str) -> MutationCut:
        """Return a slot."""
        section = super().mutation(kind)
        section._threads = _Threads()  # so that leaving takes the long way
        return section


class WindowsDoNotCount(Barrier):
    """Work under the exclusive side does not move the version."""

    def _release(self, cut: Cut, outcome: str, *, entered: bool = True) -> None:
        if isinstance(cut, CheckpointCut):
            cut._changed = False
        super()._release(cut, outcome, entered=entered)


class LeavingSuspends(Barrier):
    """Leaving awaits something before it releases."""

    def mutation(self, kind: str) -> MutationCut:
        """Return a slot."""
        leave = Cut.__aexit__

        class Slow(MutationCut):
            __slots__ = ()

            def __aexit__(
                self,
                exc_type: type[BaseException] | None,
                exc: BaseException | None,
                tb: TracebackType | None,
            ) -> Awaitable[None]:
                async def later() -> None:
                    await asyncio.sleep(0)
                    await leave(self, exc_type, exc, tb)

                return later()

        return Slow()._of(self, kind)


class ThreadsAreLeftAlone(Barrier):
    """A cancelled body is released although its thread still runs."""

    async def run_in_cut(
        self,
        cut: Cut,
        function: Callable[..., Any],
        *args: object,
        record: Callable[[Any], None] | None = None,
    ) -> Any:  # noqa: ANN401 - what the function returns
        """Run the call, and leave it alone when cancelled."""
        result = await asyncio.get_running_loop().run_in_executor(None, function, *args)
        if record is not None:
            record(result)
        return result


class NoThreadCheck(Barrier):
    """Takes the current task of its loop for the caller's, whichever thread that is."""

    def _bind(self) -> asyncio.Task[Any] | None:
        if self._loop is None:
            return super()._bind()
        return asyncio.current_task(self._loop)


class LeavesNothing(Barrier):
    """A slot is never released."""

    def mutation(self, kind: str) -> MutationCut:
        """Return a slot."""

        class Stuck(MutationCut):
            __slots__ = ()

            def __aexit__(self, *_: object) -> Awaitable[None]:
                self.live = False
                return self.barrier._left

        return Stuck()._of(self, kind)


BROKEN: tuple[tuple[type[Barrier], Claim], ...] = (
    (SlotsExclude, claims.slots_share),
    (WindowsShare, claims.windows_exclude),
    (LastInFirstOut, claims.one_queue),
    (SlotsOvertake, claims.a_drain_holds_slots_back),
    (NoHandOver, claims.back_to_back_windows_let_slots_in),
    (DrainStaysShut, claims.a_cancelled_drain_reopens),
    (GrantIsKept, claims.a_grant_is_given_back),
    (GrantIsKept, claims.a_granted_window_is_given_back),
    (NoTimeout, claims.a_drain_times_out),
    (DrainStaysShut, claims.a_drain_times_out),
    (Nests, claims.sections_do_not_nest),
    (NestsByTask, claims.child_tasks_do_not_nest),
    (ResetsOnExit, claims.only_liveness_counts),
    (VersionStands, claims.versions_grow_with_slots),
    (WindowsDoNotCount, claims.versions_grow_with_windows),
    (LeavingSuspends, claims.leaving_does_not_suspend),
    (ThreadsAreLeftAlone, claims.a_thread_keeps_its_section),
    (ThreadsAreLeftAlone, claims.a_finished_call_is_recorded),
    (NoThreadCheck, claims.a_foreign_thread_is_told),
    (LeavesNothing, claims.slots_share),
)


@pytest.mark.parametrize("broken, claim", BROKEN, ids=lambda given: given.__name__)
def test_a_barrier_without_the_rule_fails_its_claim(broken: type[Barrier], claim: Claim) -> None:
    """The claim catches the barrier that lacks its rule."""
    with pytest.raises((AssertionError, pytest.fail.Exception, QuiesceError)):
        in_virtual_time(claim)(broken)


def test_every_claim_has_a_barrier_that_fails_it() -> None:
    """No claim is without its counter-example."""
    assert {claim for _, claim in BROKEN} == set(claims.CLAIMS)
