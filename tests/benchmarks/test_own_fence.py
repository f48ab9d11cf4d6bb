"""The baseline is a correct cleanup: what it is compared with is not faster for doing less, nor slower for being broken."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest

from quiesce.bench.own_fence import OwnFenceCleanup
from quiesce.types import RowKey

WAIT_SECONDS = 30.0
"""How long something that has to happen may take."""


def key(number: int) -> RowKey:
    """Return one of many keys."""
    return RowKey(1, "group", 0, 0, number)


class Clears:
    """Remembers clears; each waits until it is let through."""

    def __init__(self, *, held: bool = False) -> None:
        self.batches: list[list[RowKey]] = []
        self.begun = threading.Semaphore(0)
        self.may_end = threading.Event()
        self.error: Exception | None = None
        if not held:
            self.may_end.set()

    def __call__(self, keys: Sequence[RowKey]) -> None:
        """Clear."""
        self.batches.append(list(keys))
        self.begun.release()
        assert self.may_end.wait(WAIT_SECONDS)
        if self.error is not None:
            raise self.error

    def wait_begun(self) -> None:
        """Wait until one more clear has begun."""
        assert self.begun.acquire(timeout=WAIT_SECONDS)


@contextmanager
def beside(work: Callable[[], object]) -> Iterator[threading.Event]:
    """Do something in another thread meanwhile; the event says that it is done."""
    done = threading.Event()

    def run() -> None:
        work()
        done.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    yield done
    thread.join(WAIT_SECONDS)
    assert done.is_set()


def test_calls_are_cleared_together_in_full_batches() -> None:
    """1,024 calls of two keys, queued before the first is due, take 32 clears of 64 keys; each key once."""
    clears = Clears()
    cleanup = OwnFenceCleanup(clears, max_pending=1024)
    cleanup.pause(1)
    for number in range(1024):
        cleanup.reserve().submit([key(2 * number), key(2 * number + 1)])
    cleanup.resume()

    cleanup.close()

    assert [len(batch) for batch in clears.batches] == [64] * 32
    assert sorted(found.sequence or 0 for batch in clears.batches for found in batch) == list(range(2048))
    statistics = cleanup.statistics()
    assert (statistics.requests, statistics.batches, statistics.keys) == (1024, 32, 2048)
    assert statistics.pending == statistics.queued == statistics.active == 0
    assert statistics.peak_pending == 1024


def test_a_call_alone_is_cleared_when_its_time_is_up() -> None:
    """Nothing has to follow it."""
    clears = Clears()
    cleanup = OwnFenceCleanup(clears, wait_seconds=0.001)

    cleanup.reserve().submit([key(0)])
    clears.wait_begun()

    cleanup.close()
    assert clears.batches == [[key(0)]]


def test_keys_are_copied_and_cleared_once_within_a_batch() -> None:
    """What the caller does with its list afterwards, and what two calls name both, changes nothing."""
    clears = Clears()
    cleanup = OwnFenceCleanup(clears)
    cleanup.pause(1)
    mine = [key(0), key(1), key(0)]
    cleanup.reserve().submit(mine)
    mine.clear()
    cleanup.reserve().submit([key(1), key(2)])
    cleanup.resume()

    cleanup.close()

    assert clears.batches == [[key(0), key(1), key(2)]]


def test_a_checkpoint_waits_for_the_clear_in_progress_only() -> None:
    """What is queued waits for it, and is cleared after it."""
    clears = Clears(held=True)
    cleanup = OwnFenceCleanup(clears, batch_size=1, wait_seconds=0)
    for number in range(3):
        cleanup.reserve().submit([key(number)])
    clears.wait_begun()

    cleanup.pause(1)
    with beside(lambda: cleanup.wait_paused(1)) as paused:
        assert not paused.wait(0.02)
        clears.may_end.set()

    assert clears.batches == [[key(0)]]
    assert cleanup.statistics().paused
    assert cleanup.statistics().queued == 2
    cleanup.resume()
    cleanup.close()
    assert clears.batches == [[key(0)], [key(1)], [key(2)]]


def test_a_full_queue_blocks_whoever_reserves_and_nobody_who_has_reserved() -> None:
    """A hand-over is possible while paused, and full; a place is free after the clear."""
    clears = Clears()
    cleanup = OwnFenceCleanup(clears, batch_size=1, max_pending=1)
    cleanup.pause(1)
    reservation = cleanup.reserve()

    with beside(lambda: cleanup.reserve().submit([key(1)])) as reserved:
        reservation.submit([key(0)])
        assert not reserved.wait(0.02)
        cleanup.resume()

    cleanup.close()
    assert clears.batches == [[key(0)], [key(1)]]


def test_an_unused_reservation_gives_its_place_back() -> None:
    """Closed, however often, or submitted without keys."""
    cleanup = OwnFenceCleanup(Clears(), batch_size=1, max_pending=1)

    for _ in range(3):
        cleanup.reserve().submit([])
        unused = cleanup.reserve()
        unused.close()
        unused.close()

    assert cleanup.statistics().pending == 0
    cleanup.close()


def test_a_reservation_is_used_once() -> None:
    """A second hand-over is refused; closing it is not."""
    cleanup = OwnFenceCleanup(Clears())
    reservation = cleanup.reserve()
    reservation.submit([key(0)])

    with pytest.raises(RuntimeError, match="was used"):
        reservation.submit([key(1)])
    reservation.close()
    cleanup.close()
    assert cleanup.statistics().requests == 1


def test_an_epoch_that_was_released_pauses_nothing() -> None:
    """Nor does it wait for the clear in progress."""
    clears = Clears(held=True)
    cleanup = OwnFenceCleanup(clears, batch_size=1)
    cleanup.pause(2)
    cleanup.resume()
    cleanup.reserve().submit([key(0)])
    clears.wait_begun()

    cleanup.pause(1)
    cleanup.wait_paused(1)

    assert not cleanup.statistics().paused
    clears.may_end.set()
    cleanup.close()


def test_a_release_ends_a_wait_for_the_pause() -> None:
    """Also while the clear goes on."""
    clears = Clears(held=True)
    cleanup = OwnFenceCleanup(clears, batch_size=1)
    cleanup.reserve().submit([key(0)])
    clears.wait_begun()
    cleanup.pause(1)

    with beside(lambda: cleanup.wait_paused(1)):
        cleanup.resume()

    clears.may_end.set()
    cleanup.close()


def test_a_failed_clear_ends_it_and_is_never_tried_again() -> None:
    """Everything that is asked of it afterwards raises, whoever waits is woken, and what was queued stays."""
    clears = Clears(held=True)
    clears.error = OSError("the store is gone")
    cleanup = OwnFenceCleanup(clears, batch_size=1, max_pending=2)
    reservations = [cleanup.reserve(), cleanup.reserve()]
    for number, reservation in enumerate(reservations):
        reservation.submit([key(number)])
    clears.wait_begun()

    def refused() -> None:
        with pytest.raises(RuntimeError, match="a clear has failed"):
            cleanup.reserve()

    with beside(refused):
        clears.may_end.set()

    for ask in (cleanup.reserve, lambda: cleanup.wait_paused(1), cleanup.close):
        with pytest.raises(RuntimeError, match="a clear has failed"):
            ask()
    statistics = cleanup.statistics()
    assert (statistics.pending, statistics.queued, statistics.failed_keys) == (2, 1, 1)
    assert statistics.oldest_queued_seconds > 0
    assert clears.batches == [[key(0)]]


def test_it_does_not_close_under_a_checkpoint() -> None:
    """Draining would clear what is being saved."""
    clears = Clears()
    cleanup = OwnFenceCleanup(clears)
    cleanup.pause(1)
    cleanup.reserve().submit([key(0)])

    with pytest.raises(RuntimeError, match="resume first"):
        cleanup.close()

    assert clears.batches == []
    cleanup.resume()
    cleanup.close()
    assert clears.batches == [[key(0)]]


def test_a_close_waits_for_places_that_are_held_and_gives_out_no_others() -> None:
    """Who waits for one is refused; who has one still hands over."""
    clears = Clears()
    cleanup = OwnFenceCleanup(clears, batch_size=1, max_pending=1)
    reservation = cleanup.reserve()

    def refused() -> None:
        with pytest.raises(RuntimeError, match="cleanup is closed"):
            cleanup.reserve()

    with beside(refused) as done, beside(cleanup.close) as closed:
        assert done.wait(WAIT_SECONDS)
        assert not closed.is_set()
        reservation.submit([key(0)])

    assert clears.batches == [[key(0)]]


def test_it_can_be_left_alone_with_a_clear_that_hangs() -> None:
    """For a worker that is going away."""
    clears = Clears(held=True)
    cleanup = OwnFenceCleanup(clears, batch_size=1)
    cleanup.reserve().submit([key(0)])
    clears.wait_begun()

    cleanup.close(wait=False)

    with pytest.raises(RuntimeError, match="cleanup is closed"):
        cleanup.reserve()
    clears.may_end.set()


@pytest.mark.parametrize(
    "limits", [{"batch_size": 0}, {"max_pending": 31}, {"wait_seconds": -1.0}, {"wait_seconds": float("nan")}]
)
def test_limits_that_make_no_sense_are_refused(limits: dict[str, float]) -> None:
    """Before a thread is started."""
    before = set(threading.enumerate())

    with pytest.raises(ValueError, match="are needed"):
        OwnFenceCleanup(Clears(), **limits)  # type: ignore[arg-type]  # the test's point
    assert not set(threading.enumerate()) - before
