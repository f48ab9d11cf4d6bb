"""Claims about level-triggered waiting and the trainer's version."""

from __future__ import annotations

import asyncio

import pytest

from quiesce.signals import Changed, TrainerVersion
from quiesce.testing import (
    EventRecorder,
    Stopped,
    all_waiting,
    cancelled_at,
    in_virtual_time,
    settle,
    strict_hub,
)


def version(value: int = 0) -> TrainerVersion:
    """Return a version with a hub of its own."""
    return TrainerVersion(value, hub=strict_hub())


@in_virtual_time
async def test_a_predicate_that_holds_does_not_suspend() -> None:
    """The wait is over in its first step."""
    with pytest.raises(StopIteration):
        Changed().wait_until(lambda: True).send(None)


@in_virtual_time
async def test_a_waiter_wakes_when_its_predicate_holds() -> None:
    """It waits through notifications that do not concern it."""
    changed, state = Changed(), [0]
    waiter = asyncio.create_task(changed.wait_until(lambda: state[0] >= 2))
    for value in (0, 1):
        state[0] = value
        changed.notify()
        assert await all_waiting(waiter)
    state[0] = 2
    changed.notify()
    await settle()
    assert waiter.done()
    assert changed.waiting == 0


@in_virtual_time
async def test_a_change_without_a_notification_wakes_nobody() -> None:
    """Nothing polls: time passes and nobody looks."""
    changed, looks = Changed(), [0]

    def predicate() -> bool:
        looks[0] += 1
        return False

    waiter = asyncio.create_task(changed.wait_until(predicate))
    await asyncio.sleep(3600)
    assert looks == [1]
    waiter.cancel()


@in_virtual_time
async def test_a_predicate_that_became_false_again_keeps_its_waiter() -> None:
    """What counts is the level when the waiter looks, not the notification."""
    changed, state = Changed(), [False]
    waiter = asyncio.create_task(changed.wait_until(lambda: state[0]))
    await settle()
    state[0] = True
    changed.notify()
    state[0] = False
    assert await all_waiting(waiter)
    state[0] = True
    changed.notify()
    await waiter


@in_virtual_time
async def test_one_notification_wakes_every_waiter() -> None:
    """It is a broadcast."""
    changed, state = Changed(), [False]
    waiters = [asyncio.create_task(changed.wait_until(lambda: state[0])) for _ in range(5)]
    await settle()
    assert changed.waiting == 5
    state[0] = True
    changed.notify()
    await asyncio.gather(*waiters)


@in_virtual_time
async def test_a_cancelled_waiter_takes_no_wake_up_along() -> None:
    """The others are woken although one was cancelled together with the notification."""
    changed, state = Changed(), [False]
    one, other = (asyncio.create_task(changed.wait_until(lambda: state[0])) for _ in range(2))
    await settle()
    state[0] = True
    changed.notify()
    one.cancel()
    await asyncio.wait({one, other})
    assert one.cancelled()
    assert other.done()
    assert not other.cancelled()


@pytest.mark.parametrize("late", [False, True])
def test_a_cancelled_wait_leaves_no_trace(*, late: bool) -> None:
    """Cancelled at any suspension, before or after its wake-up, no waiter remains."""

    @in_virtual_time
    async def run(step: int) -> Stopped:
        changed, state = Changed(), [0]

        async def notify() -> None:
            for value in range(1, 4):
                await settle()
                state[0] = value
                changed.notify()

        notifier = asyncio.create_task(notify())
        stopped = await cancelled_at(changed.wait_until(lambda: state[0] >= 3), step, late=late)
        await notifier
        assert changed.waiting == 0
        return stopped

    for step in range(4):  # before its first step, and at its three suspensions
        assert run(step).outcome == "cancelled"
    assert run(4) == Stopped("completed", reached=False)


@in_virtual_time
async def test_a_predicate_that_raises_leaves_no_trace() -> None:
    """Its error reaches its waiter alone."""
    changed, state = Changed(), [1]
    waiter = asyncio.create_task(changed.wait_until(lambda: 1 // state[0] > 1))
    await settle()
    state[0] = 0
    changed.notify()
    with pytest.raises(ZeroDivisionError):
        await waiter
    assert changed.waiting == 0


def test_the_version_grows_by_one_or_to_a_newer_value() -> None:
    """Advancing returns the new version."""
    trainer = version()
    assert (trainer.value, trainer.advance(), trainer.advance(to=7), trainer.value) == (0, 1, 7, 7)


@pytest.mark.parametrize("to", [3, 2])
def test_the_version_never_stands_or_goes_back(to: int) -> None:
    """An advance to the same or an older version is refused."""
    trainer = version(3)
    with pytest.raises(ValueError, match=f"3 cannot become {to}"):
        trainer.advance(to=to)
    assert trainer.value == 3


def test_a_version_does_not_start_below_zero() -> None:
    """The first version is 0."""
    with pytest.raises(ValueError, match="it starts at 0"):
        version(-1)


@in_virtual_time
async def test_a_gate_opens_with_the_version_that_it_waits_for() -> None:
    """Not with an older one."""
    trainer = version()
    gate = asyncio.create_task(trainer.wait_until(lambda value: value >= 2))
    await settle()
    trainer.advance()
    assert await all_waiting(gate)
    trainer.advance()
    await settle()
    assert gate.done()


@in_virtual_time
async def test_a_nudge_makes_gates_look_again() -> None:
    """Without a new version."""
    trainer, shut = version(), [True]
    gate = asyncio.create_task(trainer.wait_until(lambda _: not shut[0]))
    await settle()
    shut[0] = False
    trainer.nudge()
    await settle()
    assert gate.done()


@in_virtual_time
async def test_advancing_is_reported_after_it_happened() -> None:
    """The hook sees the new version, and the gates are woken even if it raises."""
    seen: list[tuple[int, int]] = []

    class Hostile:
        def version_advanced(self, value: int) -> None:
            seen.append((value, trainer.value))
            raise RuntimeError("hostile")

    trainer = TrainerVersion(hub=strict_hub(Hostile()))
    gate = asyncio.create_task(trainer.wait_until(lambda value: value >= 1))
    await settle()
    with pytest.raises(RuntimeError, match="hostile"):
        trainer.advance()
    await settle()
    assert seen == [(1, 1)]
    assert gate.done()


def test_advancing_fires_the_hook_once() -> None:
    """One call for one advance."""
    recorder = EventRecorder()
    trainer = TrainerVersion(hub=strict_hub(recorder))
    trainer.advance()
    trainer.advance(to=5)
    assert recorder.of("version_advanced") == [(1,), (5,)]
