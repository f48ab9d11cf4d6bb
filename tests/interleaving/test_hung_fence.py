"""A worker that never answers the fence: the real checkpointer refuses the save, and nobody else waits for it."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import re
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from quiesce.checkpoint import RunFolder, journal
from quiesce.checkpoint.saver import Checkpointer, SaveResult
from quiesce.errors import FenceError
from quiesce.explorer import Timers, explore, pause
from tests.interleaving.exploring import facts_of, record
from tests.interleaving.test_save_and_restore import UncontrolledExecutor, Weights
from tests.interleaving.world import World

DEADLINE_SECONDS = 30.0
MOST = 3_000
MOST_WITH_FREE_TIMERS = 500


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No disk is waited for, and what is refused on purpose is not logged a thousand times."""
    monkeypatch.setattr(os, "fsync", lambda _fd: None)
    monkeypatch.setattr(journal, "DaemonExecutor", UncontrolledExecutor)
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


class AskingFence:
    """Asks two workers to hold still and waits for their answers; the second one may never give it.

    Reopening tells both to go on and waits for neither, as the protocol demands: the second would not answer
    that either.
    """

    def __init__(self) -> None:
        self.hung = True
        self.held: set[int] = set()
        self.closed_at: list[float] = []
        self.reopened_at: list[float] = []

    async def close(self, cut_id: str, timeout: float) -> None:
        """Ask one after the other, until the deadline."""
        self.closed_at.append(asyncio.get_running_loop().time())
        for worker in range(2):
            self.held.add(worker)
        await pause("worker 0 answers")
        try:
            async with asyncio.timeout(timeout):
                if self.hung:
                    await asyncio.Event().wait()
        except TimeoutError as error:
            raise FenceError(cut_id, f"worker 1 did not answer within {timeout:g} s") from error

    async def verify(self) -> None:
        """Look whether both still hold."""
        assert self.held == {0, 1}

    async def reopen(self) -> None:
        """Let both go on."""
        self.reopened_at.append(asyncio.get_running_loop().time())
        self.held.clear()


class HungWorld(World):
    """Prompts are reserved and rollouts commit while the real checkpointer closes a fence that hangs."""

    async def save_behind_the_fence(
        self, folder: RunFolder, *, cancel: bool, publish: bool, in_time: bool
    ) -> str:
        """Save once beside the writers, and then once more.

        Args:
            folder: Where to.
            cancel: Whether the first save is cancelled, at any moment.
            publish: Whether the worker answers the second save, which is written then and published.
            in_time: Whether whatever can happen happens before a timer fires.

        Returns:
            How the first save ended.
        """
        loop = asyncio.get_running_loop()
        fence = AskingFence()
        saver = Checkpointer(
            self.sources(),
            Weights(self),
            folder,
            fence=fence,
            fence_timeout=DEADLINE_SECONDS,
            gate_window=self.gate_window,
            clock=lambda: round(loop.time() * 1e9),
        )
        await saver.prepare()
        if cancel:  # one writer less, so that the orders can be exhausted
            await self.ready(0)
        else:
            self.launch(await self.admit(0))
        before = loop.time()
        written: list[float] = []

        async def first() -> SaveResult:
            await pause("save")
            return await saver.save(step=0, trainer_version=0)

        async def write() -> None:
            await pause("write")
            await self.reserve(1)
            await self.rollouts_over()
            written.append(loop.time() - before)

        saving = asyncio.create_task(first(), name="save")
        writing = asyncio.create_task(write(), name="writers")
        if cancel:
            await pause("cancel")
            saving.cancel()
        result: SaveResult | None = None
        with suppress(asyncio.CancelledError):
            result = await saving
        ended = loop.time() - before
        self.nothing_is_held(fence, folder)
        await writing
        self.idle()
        if in_time:
            assert written == [0.0], "the writers waited for the deadline"
            assert ended == (0.0 if result is None else DEADLINE_SECONDS)
        self.judge_the_first(saver, result, started=bool(fence.closed_at))

        fence.hung = not publish
        again = await saver.save(step=0, trainer_version=0)
        if publish:
            assert again.outcome == "pending"
            published = await saver.wait()
            assert published is not None
            assert (published.outcome, published.groups["buffer"]) == ("completed", 1)
        else:
            assert again.outcome == "refused", "the next save did not get as far as the fence"
            assert len((await self.save()).ready) == 1
        self.nothing_is_held(fence, folder)
        await saver.close()
        self.idle()
        return "cancelled" if result is None else result.outcome

    def nothing_is_held(self, fence: AskingFence, folder: RunFolder) -> None:
        """Assert what holds whenever a save has ended: the fence is open, and nothing is left of the save."""
        assert fence.held == set()
        assert len(fence.reopened_at) == len(fence.closed_at)
        assert self.barrier.statistics().phase == "open"
        assert self.plane.statistics().open_snapshots == 0
        assert folder.leftovers() == []

    def judge_the_first(self, saver: Checkpointer, result: SaveResult | None, *, started: bool) -> None:
        """Assert how the save behind the hung fence ended, and that it was counted once."""
        counts = {outcome: count for outcome, count in saver.statistics().attempts.items() if count}
        if result is None:
            assert counts in ({}, {"cancelled": 1})
            assert counts or not started
            return
        assert counts == {"refused": 1}
        assert (result.outcome, result.reason) == ("refused", "error")
        assert isinstance(result.error, FenceError)
        # The fence's own deadline, or the saver's if timers are free to fire in any order.
        assert re.search(r"worker 1 did not answer|longer than its", str(result.error))
        assert saver.last_failed


def hung(
    path: Path, ends: Counter[str], *, cancel: bool, timers: Timers, publish: bool = False
) -> Callable[[], Coroutine[None, None, None]]:
    """Return a scenario that counts how the save behind the hung fence ended."""
    numbers = itertools.count()

    async def scenario() -> None:
        with RunFolder.open(path / str(next(numbers)), resume=False) as folder:
            folder.next_incarnation()
            world = HungWorld(prompts=2)
            end = await world.save_behind_the_fence(
                folder, cancel=cancel, publish=publish, in_time=timers == "idle"
            )
            ends[end] += 1

    return scenario


async def _unbounded(_saver: Checkpointer, call: Awaitable[None], _attempt: object, _what: str) -> None:
    """Stand in for the saver's own deadline."""
    await call


@pytest.mark.parametrize(
    "name, cancel, timers, expected",
    [
        ("fence_hangs_while_closing", False, "idle", {"refused"}),
        ("save_cancelled_while_the_fence_hangs", True, "idle", {"cancelled"}),
        ("save_cancelled_about_the_deadline_of_a_hung_fence", True, "any", {"cancelled", "refused"}),
        ("save_cancelled_about_two_deadlines", True, "any", {"cancelled", "refused"}),
    ],
)
def test_a_fence_that_hangs_costs_the_save_and_holds_nobody(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    *,
    cancel: bool,
    timers: Timers,
    expected: set[str],
) -> None:
    """In every order: writers are through before the deadline, the save is refused at it, and nothing is left held."""
    ends: Counter[str] = Counter()
    # Two free deadlines, the fence's and the saver's, have more orders than can be tried; one alone is tried in all.
    sampled = name == "save_cancelled_about_two_deadlines"
    if timers == "any" and not sampled:
        monkeypatch.setattr(Checkpointer, "_bounded", _unbounded)

    report = explore(
        hung(tmp_path, ends, cancel=cancel, timers=timers),
        timers=timers,
        strategy="random" if sampled else "exhaustive",
        max_schedules=MOST_WITH_FREE_TIMERS if sampled else MOST,
    ).check()

    record(
        "scenario",
        name,
        stands_for="semantics: a fence that is not certainly closed refuses the cut, never the run",
        **facts_of(report),
    )
    assert report.exhausted != sampled
    assert set(ends) == expected


@pytest.mark.parametrize("cancel", [False, True])
def test_the_save_after_a_hung_fence_is_published(tmp_path: Path, *, cancel: bool) -> None:
    """The worker answers again: the same checkpointer writes the next cut, in a few random orders."""
    ends: Counter[str] = Counter()

    explore(
        hung(tmp_path, ends, cancel=cancel, timers="idle", publish=True), strategy="random", max_schedules=10
    ).check()

    assert ends.total() == 10
