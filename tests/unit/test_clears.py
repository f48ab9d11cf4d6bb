"""Background clearing: handing over never waits, and no key is forgotten."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Iterable

import pytest

from quiesce.barrier import DataPlaneCheckpointBarrier
from quiesce.clears import BATCH_KEYS, MAX_TRIES, RowClears
from quiesce.testing import VirtualTimeLoop, all_waiting, in_virtual_time, settle, strict_hub
from quiesce.types import RowKey


def keys(count: int, group: str = "e000-p0000001") -> list[RowKey]:
    """Return so many keys of a group."""
    return [RowKey(1, group, number, 0) for number in range(count)]


class Store:
    """Notes what it is asked to clear; can be held and can fail."""

    def __init__(self, failures: int = 0) -> None:
        self.batches: list[list[RowKey]] = []
        self.threads: set[str] = set()
        self.failures = failures
        self.may_clear = threading.Event()
        self.may_clear.set()

    def clear(self, wanted: Iterable[RowKey]) -> int:
        """Clear, or fail."""
        assert self.may_clear.wait(30)
        self.threads.add(threading.current_thread().name)
        if self.failures:
            self.failures -= 1
            raise OSError("the store is away")
        self.batches.append(list(wanted))
        return len(self.batches[-1])


class BoundedClears(RowClears):
    """Lacks the rule: handing over into a full queue waits for whoever drains it."""

    def add(self, wanted: Iterable[RowKey]) -> None:
        """Refuse where a bounded queue would block the event loop for good."""
        if len(self.outstanding()) >= 2:
            raise BlockingIOError("the loop would wait for the store, and the store may wait for the loop")
        super().add(wanted)


async def handing_over_never_waits(cls: type[RowClears]) -> None:
    """However much is pending while the store hangs, a slot hands over in its own step and closes."""
    store = Store()
    store.may_clear.clear()
    barrier = DataPlaneCheckpointBarrier(hub=strict_hub())
    clears = cls(store)
    clears.start()
    try:
        for number in range(50):
            async with barrier.mutation("sample_clear"):
                clears.add(keys(3, f"g{number}"))
        async with barrier.checkpoint(drain_timeout=1.0):
            assert len(clears.outstanding()) == 150
    finally:
        store.may_clear.set()
        await clears.close()
    assert sum(len(batch) for batch in store.batches) == 150


@in_virtual_time
async def test_a_hand_over_never_waits_however_slow_the_store_is() -> None:
    """A hand-over to cleanup from the event loop appends and returns, whatever is pending; nothing is bounded."""
    await handing_over_never_waits(RowClears)


@in_virtual_time
async def test_a_bounded_hand_over_is_noticed() -> None:
    """The same check fails for clears with a bounded queue."""
    with pytest.raises(BlockingIOError):
        await handing_over_never_waits(BoundedClears)


@in_virtual_time
async def test_keys_are_cleared_in_a_thread_of_their_own_and_in_bounded_batches() -> None:
    """What was handed over is cleared off the loop, in order, at most so many keys at once."""
    store = Store()
    clears = RowClears(store)
    wanted = keys(BATCH_KEYS + 5)
    clears.add(wanted)  # before it was started: nothing is lost

    clears.start()
    assert await clears.drain(10.0)

    assert [len(batch) for batch in store.batches] == [BATCH_KEYS, 5]
    assert [key for batch in store.batches for key in batch] == wanted
    assert all(name.startswith("quiesce-clears") for name in store.threads)
    assert clears.statistics().cleared == len(wanted)
    await clears.close()


@in_virtual_time
async def test_a_failed_clear_is_tried_again_and_counted() -> None:
    """A clear that fails is repeated; its keys are outstanding until it works."""
    store = Store(failures=MAX_TRIES - 1)
    clears = RowClears(store)
    clears.start()

    clears.add(keys(2))
    assert await clears.drain(10.0)

    assert store.batches == [keys(2)]
    statistics = clears.statistics()
    assert (statistics.failures, statistics.cleared, statistics.abandoned) == (MAX_TRIES - 1, 2, 0)
    assert clears.outstanding() == ()
    await clears.close()


@in_virtual_time
async def test_keys_whose_clear_keeps_failing_are_given_up_by_name() -> None:
    """After the last try the rows stay as extras, which the inventory can still explain."""
    store = Store(failures=MAX_TRIES)
    clears = RowClears(store)
    clears.start()

    clears.add(keys(2))
    assert await clears.drain(10.0)

    assert set(clears.outstanding()) == set(keys(2))
    assert clears.statistics().abandoned == 2
    clears.add(keys(1, "another"))
    assert await clears.drain(10.0)
    assert store.batches == [keys(1, "another")]
    await clears.close()


@in_virtual_time
async def test_keys_in_progress_are_outstanding() -> None:
    """Between the queue and the store a key is never in neither."""
    store = Store()
    store.may_clear.clear()
    clears = RowClears(store)
    clears.start()
    clears.add(keys(3))
    await settle()  # the batch is in the store's hands

    assert set(clears.outstanding()) == set(keys(3))
    assert clears.statistics().pending == 3

    store.may_clear.set()
    await clears.close()
    assert clears.outstanding() == ()


@in_virtual_time
async def test_closing_gives_up_after_its_deadline() -> None:
    """A store that hangs does not keep the run from ending; what is left stays named."""
    loop = asyncio.get_running_loop()
    assert isinstance(loop, VirtualTimeLoop)
    loop.threads_hang = True
    store = Store()
    store.may_clear.clear()
    clears = RowClears(store)
    clears.start()
    clears.add(keys(3))
    started = loop.time()

    await clears.close(5.0)

    assert loop.time() - started == pytest.approx(5.0)
    assert set(clears.outstanding()) == set(keys(3))
    store.may_clear.set()


@in_virtual_time
async def test_draining_waits_for_what_comes_meanwhile() -> None:
    """Drain returns once nothing is pending at all."""
    store = Store()
    store.may_clear.clear()
    clears = RowClears(store)
    clears.start()
    clears.add(keys(1))
    draining = asyncio.create_task(clears.drain(60.0))
    await asyncio.sleep(0)
    clears.add(keys(1, "later"))
    store.may_clear.set()

    assert await draining
    assert deque(batch[0].group_id for batch in store.batches) == deque(["e000-p0000001", "later"])
    await clears.close()


@in_virtual_time
async def test_closing_what_was_never_started_does_nothing() -> None:
    """There is no task to end; and starting twice starts one."""
    clears = RowClears(Store())
    await clears.close()
    clears.start()
    task = clears._task  # noqa: SLF001 - that there is only one
    clears.start()
    assert clears._task is task  # noqa: SLF001
    assert task is not None
    assert await all_waiting(task)
    await settle()
    await clears.close()
