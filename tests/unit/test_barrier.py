"""Claims about the barrier's protocol, one for each rule; barriers that lack one are in test_broken_barriers.py."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from typing import Any

import pytest

from quiesce.barrier import (
    KINDS,
    Cut,
    DataPlaneCheckpointBarrier,
    Holder,
    MutationCut,
    detached,
    held_cut,
    require_no_cut,
)
from quiesce.errors import (
    DrainTimeoutError,
    LockOrderError,
    NestedCutError,
    SectionReusedError,
    UnknownKindError,
    WrongLoopError,
)
from quiesce.testing import (
    EventRecorder,
    FakeClock,
    all_waiting,
    in_virtual_time,
    settle,
    strict_hub,
)
from tests.barrier_claims import CLAIMS
from tests.barriers import Barrier, Claim, Visitor, enter_window, make, pristine


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.__name__)
def test_the_barrier_keeps_its_rule(claim: Claim) -> None:
    """The barrier passes each claim, in virtual time."""
    in_virtual_time(claim)(Barrier)


# ------------------------------------------------------------------------------------------------- kinds


def test_the_barrier_needs_no_argument() -> None:
    """It can be built without any, and knows the built-in kinds."""
    assert DataPlaneCheckpointBarrier().kinds == KINDS


def test_an_unknown_kind_is_refused_before_anything_waits() -> None:
    """The call itself raises, outside any loop, and names the kinds that there are."""
    with pytest.raises(UnknownKindError, match=r"'typo'.*admission"):
        make().mutation("typo")


@in_virtual_time
async def test_a_kind_of_ones_own_is_a_kind() -> None:
    """Kinds that the user adds can be entered and are counted."""
    barrier = make(kinds=("mine",))
    async with barrier.mutation("mine"):
        assert barrier.statistics().active["mine"] == 1


# ---------------------------------------------------------------------------------------------- the queue


@in_virtual_time
async def test_two_checkpoints_are_served_one_after_the_other() -> None:
    """Two windows exclude each other and are served in order."""
    barrier, order = make(), list[str]()
    visitors = [Visitor(order, f"C{i}", barrier.checkpoint()) for i in range(2)]
    await settle()
    assert order == ["C0"]
    visitors[0].leave()
    await settle()
    assert order == ["C0", "C1"]
    visitors[1].leave()
    await settle()
    assert pristine(barrier)


@in_virtual_time
async def test_ten_thousand_waiters_are_served_with_work_that_grows_linearly() -> None:
    """Each waiter is looked at a bounded number of times, however many there are."""

    class Counted(MutationCut):
        __slots__ = ()
        looked = 0

        def __hash__(self) -> int:
            Counted.looked += 1
            return object.__hash__(self)

        __eq__ = object.__eq__

    barrier = make()
    done = 0

    async def enter() -> None:
        nonlocal done
        async with Counted()._of(barrier, "retry"):  # noqa: SLF001 - a slot that counts how often it is hashed
            done += 1

    counts = []
    for waiters in (1_000, 10_000):
        window = Visitor([], "C", barrier.checkpoint())
        await settle()
        Counted.looked = 0
        tasks = [asyncio.create_task(enter()) for _ in range(waiters)]
        await settle()
        window.leave()
        await asyncio.gather(*tasks)
        counts.append(Counted.looked / waiters)
    assert done == 11_000
    assert counts[1] <= counts[0] * 1.01
    assert pristine(barrier)


@in_virtual_time
async def test_cancelling_ten_thousand_waiters_is_linear_and_leaves_no_trace() -> None:
    """Waiters are removed by identity, without a search through the queue."""
    barrier, order = make(), list[str]()
    async with barrier.checkpoint():
        visitors = [Visitor(order, str(i), barrier.mutation("retry")) for i in range(10_000)]
        await settle()
        for visitor in reversed(visitors):
            visitor.task.cancel()
        await settle()
        assert sum(barrier.statistics().waiting.values()) == 0
    await settle()
    assert order == []
    assert pristine(barrier)


@in_virtual_time
async def test_a_cancelled_waiter_does_not_take_its_twin_along() -> None:
    """Of two waiters of the same kind the one that was cancelled leaves, the other enters."""
    barrier, order = make(), list[str]()
    window = Visitor(order, "C", barrier.checkpoint())
    await settle()
    first, second = (Visitor(order, name, barrier.mutation("retry")) for name in ("w1", "w2"))
    await settle()
    first.task.cancel()
    window.leave()
    await settle()
    assert order == ["C", "w2"]
    second.leave()


@in_virtual_time
async def test_a_window_waits_for_the_slots_that_asked_before_it_but_were_not_in_yet() -> None:
    """With C1 held and w1, C2 queued, C2 waits for w1 although w1 was not open when C2 asked."""
    barrier, order = make(), list[str]()
    c1 = Visitor(order, "C1", barrier.checkpoint())
    await settle()
    w1 = Visitor(order, "w1", barrier.mutation("retry"))
    await settle()
    c2 = Visitor(order, "C2", barrier.checkpoint())
    await settle()
    c1.leave()
    await settle()
    assert order == ["C1", "w1"]
    w1.leave()
    await settle()
    assert order == ["C1", "w1", "C2"]
    c2.leave()


# ----------------------------------------------------------------------------------------------- timeouts


@in_virtual_time
async def test_a_drain_timeout_names_each_holder() -> None:
    """The error has kind, task, age and the place at which the holder is suspended."""
    clock = FakeClock()
    barrier = make(clock=clock)
    order: list[str] = []
    holders = [Visitor(order, f"holder-{i}", barrier.mutation(KINDS[i])) for i in range(2)]
    await settle()
    clock.advance(3.0)
    with pytest.raises(DrainTimeoutError) as caught:
        async with barrier.checkpoint(drain_timeout=2.0):
            pass
    for number, holder in enumerate(caught.value.holders):
        assert (holder.kind, holder.task, holder.age_seconds) == (KINDS[number], f"holder-{number}", 3.0)
        assert "wait" in holder.suspended_at
    text = str(caught.value)
    assert "holder-0" in text
    assert "3.000 s old" in text
    for visitor in holders:
        visitor.leave()


@in_virtual_time
async def test_a_drain_timeout_behind_another_window_names_that_window() -> None:
    """A checkpoint that waits for another checkpoint names it."""
    barrier, order = make(), list[str]()
    window = Visitor(order, "long save", barrier.checkpoint())
    await settle()
    with pytest.raises(DrainTimeoutError) as caught:
        async with barrier.checkpoint(drain_timeout=2.0):
            pass
    assert [(holder.kind, holder.task) for holder in caught.value.holders] == [("checkpoint", "long save")]
    window.leave()


@in_virtual_time
async def test_a_drain_timeout_names_an_older_task_that_the_holder_awaits() -> None:
    """Nesting through an older task cannot be detected, but the timeout says who holds and where it waits."""
    barrier, go = make(), asyncio.Event()

    async def older() -> None:
        await go.wait()
        async with barrier.mutation("retry"):
            pass

    async def holder() -> None:
        async with barrier.mutation("admission"):
            await task

    task = asyncio.create_task(older(), name="older")
    holding = asyncio.create_task(holder(), name="holder")
    await settle()
    window = asyncio.create_task(enter_window(barrier, 5.0))
    await settle()
    go.set()
    with pytest.raises(DrainTimeoutError) as caught:
        await window
    assert [(found.kind, found.task) for found in caught.value.holders] == [("admission", "holder")]
    assert "holder" in caught.value.holders[0].suspended_at
    await holding


@in_virtual_time
async def test_no_drain_timeout_waits_for_ever() -> None:
    """With None a checkpoint is still there after a year."""
    barrier, order = make(), list[str]()
    slot = Visitor(order, "w", barrier.mutation("retry"))
    await settle()
    window = Visitor(order, "C", barrier.checkpoint(drain_timeout=None))
    await asyncio.sleep(365 * 86400)
    assert await all_waiting(window.task)
    slot.leave()
    window.leave()
    await settle()
    assert order == ["w", "C"]


@in_virtual_time
async def test_a_window_that_opened_is_not_bounded_by_the_drain_timeout() -> None:
    """The timer of the drain dies with the drain."""
    barrier, order = make(), list[str]()
    slot = Visitor(order, "w", barrier.mutation("retry"))
    await settle()
    window = Visitor(order, "C", barrier.checkpoint(drain_timeout=5.0))
    await settle()
    slot.leave()
    await asyncio.sleep(100)
    assert barrier.statistics().phase == "exclusive"
    window.leave()
    await window.task


def test_a_negative_drain_timeout_is_refused() -> None:
    """It is neither zero nor for ever."""
    with pytest.raises(ValueError, match="drain_timeout cannot be -1"):
        make().checkpoint(drain_timeout=-1.0)


# ------------------------------------------------------------------------------------------------ nesting


async def test_a_to_thread_call_inside_a_section_may_not_open_another() -> None:
    """The context travels into the thread and back to the loop, and with it what is held."""
    barrier = make()
    loop = asyncio.get_running_loop()

    async def enter() -> None:
        async with barrier.mutation("retry"):
            pass

    def hop() -> None:
        asyncio.run_coroutine_threadsafe(enter(), loop).result(20)

    async with barrier.mutation("retry"):
        with pytest.raises(NestedCutError):
            await asyncio.to_thread(hop)
    assert pristine(barrier)


@in_virtual_time
async def test_a_detached_task_opens_sections_while_its_launcher_holds_one() -> None:
    """A rollout that an admission launches never trips over the admission."""
    barrier, order = make(), list[str]()

    async def rollout() -> str:
        async with barrier.mutation("group_commit"):
            order.append("rollout")
        return "rows"

    async with barrier.mutation("admission"):
        task = detached(rollout(), name="rollout")
        await settle()
        assert order == ["rollout"]
    assert await task == "rows"
    assert task.get_name() == "rollout"


@in_virtual_time
async def test_detaching_leaves_the_launchers_own_context_alone() -> None:
    """The launcher still holds its cut after it launched a detached task."""
    barrier = make()

    async def nothing() -> None:
        pass

    async with barrier.mutation("admission") as cut:
        await detached(nothing())
        assert held_cut() is cut


@in_virtual_time
async def test_sections_of_two_barriers_nest() -> None:
    """Nesting is refused per barrier."""
    one, two = make(name="one"), make(name="two")
    async with one.mutation("retry"), two.mutation("retry"), make().checkpoint():
        pass
    assert pristine(one)


@in_virtual_time
async def test_nesting_is_found_through_a_section_of_another_barrier() -> None:
    """The cut of another barrier in between does not hide the one that is held."""
    one, two = make(name="one"), make(name="two")
    async with one.mutation("retry"):
        async with two.mutation("retry"):
            with pytest.raises(NestedCutError):
                await enter_window(one, 1.0)
        with pytest.raises(NestedCutError):  # also when that one has been left
            await enter_window(one, 1.0)


@in_virtual_time
async def test_a_refused_nesting_leaves_the_outer_section_held() -> None:
    """Nothing of the outer section is lost by the refusal."""
    barrier = make()
    async with barrier.mutation("retry") as cut:
        with pytest.raises(NestedCutError):
            await enter_window(barrier, 1.0)
        cut.check(barrier)
        assert barrier.statistics().active["retry"] == 1


@in_virtual_time
async def test_a_section_object_is_entered_once() -> None:
    """A second entry is refused: the first one's token would come alive again."""
    barrier = make()
    section = barrier.mutation("retry")
    async with section:
        pass
    with pytest.raises(SectionReusedError):
        async with section:
            pass
    assert pristine(barrier)


@in_virtual_time
async def test_long_waits_are_refused_while_a_cut_is_held() -> None:
    """The lock order is permit before slot; a dead cut does not count."""
    barrier = make()
    require_no_cut("a permit")
    async with barrier.mutation("retry"):
        with pytest.raises(LockOrderError, match="a permit may not start"):
            require_no_cut("a permit")
    require_no_cut("a permit")


@in_virtual_time
async def test_a_task_that_held_a_section_is_freed_without_the_cycle_collector() -> None:
    """The cut in a task's context does not keep the task, and its result, alive."""
    barrier = make()

    async def rollout() -> None:
        async with barrier.mutation("retry"):
            pass

    for hub in (barrier.hub, strict_hub(EventRecorder())):  # both ways of leaving
        barrier.hub = hub
        gc.collect()
        gc.disable()
        try:
            task = asyncio.create_task(rollout())
            await task
            gone = weakref.ref(task)
            del task
            await asyncio.sleep(0)
            assert gone() is None
        finally:
            gc.enable()


# ----------------------------------------------------------------------------------- loops and threads


def test_a_barrier_is_bound_to_one_event_loop() -> None:
    """A second loop, after the first is closed, is refused too."""
    barrier = make()
    asyncio.run(enter_window(barrier, 1.0))
    with pytest.raises(WrongLoopError, match="run_coroutine_threadsafe"):
        asyncio.run(enter_window(barrier, 1.0))


def test_outside_any_loop_a_section_is_refused() -> None:
    """Driving it by hand without a loop is an error that says so."""
    entering = make().mutation("retry").__aenter__()
    with pytest.raises(WrongLoopError, match="outside any event loop"):
        entering.send(None)


async def test_a_foreign_thread_is_refused_while_the_loops_own_task_runs() -> None:
    """Also when the loop's thread is in the middle of a task's step just then."""
    barrier, caught = make(), list[BaseException]()
    async with barrier.mutation("retry"):
        pass

    def elsewhere() -> None:
        try:
            asyncio.run(enter_window(barrier, 1.0))
        except BaseException as error:  # noqa: BLE001 - handed to the test
            caught.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()  # on purpose on the loop: this task is its current one all the time
    assert [type(error) for error in caught] == [WrongLoopError]


def test_the_barrier_works_under_uvloop() -> None:
    """Every claim that needs no virtual time holds with another event loop."""
    import uvloop

    async def main() -> list[str]:
        barrier, order = make(), list[str]()
        window = Visitor(order, "C1", barrier.checkpoint())
        await asyncio.sleep(0)
        behind = [Visitor(order, f"w{i}", barrier.mutation("retry")) for i in range(2)]
        second = Visitor(order, "C2", barrier.checkpoint())
        for visitor in (window, *behind, second):
            visitor.leave()
        await asyncio.gather(*(visitor.task for visitor in (window, *behind, second)))
        async with barrier.mutation("retry") as cut:
            order.append(await barrier.run_in_cut(cut, str.upper, "thread"))
            with pytest.raises(NestedCutError):
                await enter_window(barrier, 1.0)
        slot = Visitor(order, "w", barrier.mutation("retry"))
        await asyncio.sleep(0)
        with pytest.raises(DrainTimeoutError):
            await enter_window(barrier, 0.0)
        slot.leave()
        await slot.task
        assert pristine(barrier)
        return order

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(main()) == ["C1", "w0", "w1", "C2", "THREAD", "w"]


# -------------------------------------------------------------------------------------------- statistics


@in_virtual_time
async def test_statistics_name_phase_age_holders_and_waiters() -> None:
    """Each phase has its age; active and waiting sections are counted by kind."""
    clock = FakeClock()
    barrier, order = make(clock=clock), list[str]()
    clock.advance(1.0)
    assert (barrier.statistics().phase, barrier.statistics().phase_age_seconds) == ("open", 1.0)
    slot = Visitor(order, "w1", barrier.mutation("retry"))
    await settle()
    clock.advance(2.0)
    window = Visitor(order, "C", barrier.checkpoint())
    await settle()
    behind = Visitor(order, "w2", barrier.mutation("admission"))
    await settle()
    clock.advance(4.0)
    now = barrier.statistics()
    assert (now.phase, now.phase_age_seconds, now.waiting_checkpoints) == ("drain", 4.0, 1)
    assert (now.active["retry"], now.oldest_active_seconds["retry"]) == (1, 6.0)
    assert (now.waiting["admission"], now.longest_wait_seconds["admission"]) == (1, 4.0)
    assert isinstance(now.oldest_holder, Holder)
    assert (now.oldest_holder.kind, now.oldest_holder.task, now.oldest_holder.age_seconds) == (
        "retry",
        "w1",
        6.0,
    )
    slot.leave()
    await settle()
    clock.advance(8.0)
    now = barrier.statistics()
    assert (now.phase, now.phase_age_seconds) == ("exclusive", 8.0)
    assert now.oldest_holder is not None
    assert now.oldest_holder.kind == "checkpoint"
    window.leave()
    behind.leave()
    await settle()
    assert pristine(barrier)


@in_virtual_time
async def test_the_drain_of_a_second_checkpoint_is_as_old_as_the_phase() -> None:
    """When a window closes and another checkpoint waits on, the phase is a new one."""
    clock = FakeClock()
    barrier, order = make(clock=clock), list[str]()
    first = Visitor(order, "C1", barrier.checkpoint())
    await settle()
    slot = Visitor(order, "w", barrier.mutation("retry"))
    await settle()
    second = Visitor(order, "C2", barrier.checkpoint())
    await settle()
    clock.advance(10.0)
    first.leave()
    await settle()
    clock.advance(1.0)
    now = barrier.statistics()
    assert (now.phase, now.phase_age_seconds) == ("drain", 1.0)
    slot.leave()
    await settle()
    second.leave()


@in_virtual_time
async def test_back_to_back_windows_are_two_phases() -> None:
    """The age of the exclusive phase starts anew with each window."""
    clock = FakeClock()
    barrier, order = make(clock=clock), list[str]()
    windows = [Visitor(order, f"C{i}", barrier.checkpoint()) for i in range(2)]
    await settle()
    clock.advance(5.0)
    windows[0].leave()
    await settle()
    clock.advance(1.0)
    assert (barrier.statistics().phase, barrier.statistics().phase_age_seconds) == ("exclusive", 1.0)
    windows[1].leave()


async def test_statistics_may_be_read_from_another_thread_while_slots_churn() -> None:
    """A scrape never raises, whatever the loop does meanwhile."""
    barrier = make()
    stop = threading.Event()
    seen: list[str] = []
    caught: list[BaseException] = []

    def scrape() -> None:
        try:
            while not stop.is_set():
                now = barrier.statistics()
                assert now.phase_age_seconds >= 0
                assert all(age >= 0 for age in now.oldest_active_seconds.values())
                seen.append(now.phase)
        except BaseException as error:  # noqa: BLE001 - handed to the test
            caught.append(error)

    async def churn() -> None:
        for _ in range(150):
            async with barrier.mutation("retry"):
                await asyncio.sleep(0)

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        writers = [asyncio.create_task(churn()) for _ in range(8)]
        for _ in range(150):
            await enter_window(barrier, None)
            await asyncio.sleep(0)
        await asyncio.gather(*writers)
        while not seen and not caught:  # noqa: ASYNC110 - a thread's progress, on a busy machine
            await asyncio.sleep(0.001)
    finally:
        stop.set()
        thread.join()
    assert not caught
    assert pristine(barrier)


@in_virtual_time
async def test_whatever_is_granted_has_its_time_before_it_can_be_seen() -> None:
    """A scrape between two steps of a grant finds no section without a time."""
    looks = 0

    class Looking(dict[Any, None]):
        def __setitem__(self, key: Cut, value: None) -> None:
            nonlocal looks
            super().__setitem__(key, value)
            barrier.statistics()  # what another thread could do just now
            looks += 1

    barrier, order = make(), list[str]()
    barrier._open = Looking()  # noqa: SLF001 - there is no public way to stop between two lines
    window = Visitor(order, "C", barrier.checkpoint())
    await settle()
    slot = Visitor(order, "w", barrier.mutation("retry"))
    await settle()
    window.leave()
    await settle()
    slot.leave()
    await settle()
    assert looks == 1


# ------------------------------------------------------------------------------------------------ versions


@in_virtual_time
async def test_versions_go_on_from_a_restored_value() -> None:
    """After a restore the next slot counts from the saved value."""
    barrier = make()
    barrier.restore_version(41)
    async with barrier.mutation("recovery_restore"):
        pass
    assert barrier.mutation_version == 42
    assert barrier.statistics().mutation_version == 42


def test_versions_never_go_back() -> None:
    """Restoring an older value is refused."""
    barrier = make()
    barrier.restore_version(7)
    with pytest.raises(ValueError, match="cannot go back from 7 to 6"):
        barrier.restore_version(6)


@in_virtual_time
async def test_a_slot_that_never_opened_does_not_move_the_version() -> None:
    """A waiter that is cancelled, also after its grant, changed nothing."""
    barrier, order = make(), list[str]()
    window = Visitor(order, "C", barrier.checkpoint())
    await settle()
    early, late = (Visitor(order, name, barrier.mutation("retry")) for name in ("w1", "w2"))
    await settle()
    early.task.cancel()
    await settle()
    window.leave()
    await asyncio.sleep(0)
    late.task.cancel()
    await settle()
    assert barrier.mutation_version == 0
    assert pristine(barrier)


@in_virtual_time
async def test_a_window_whose_body_failed_after_a_change_moves_the_version() -> None:
    """An extra version is harmless; a missed one is not."""
    barrier = make()
    with pytest.raises(ZeroDivisionError):
        async with barrier.checkpoint() as cut:
            cut.check(barrier)
            raise ZeroDivisionError
    assert barrier.mutation_version == 1
