"""Claims about cuts: what a token proves, where, and for how long."""

from __future__ import annotations

import threading

import pytest

from quiesce.barrier import Cut, detached
from quiesce.errors import CutError, CutExpiredError, ForeignCutError, WrongSideError
from quiesce.testing import FakeClock, in_virtual_time, settle
from tests.barriers import Visitor, make


@in_virtual_time
async def test_a_live_cut_passes_for_its_own_barrier() -> None:
    """Both sides prove what they should."""
    barrier = make()
    async with barrier.mutation("retry") as cut:
        cut.check(barrier)
        cut.check(barrier, "mutation")
    async with barrier.checkpoint() as window:
        window.check(barrier)
        window.check(barrier, "checkpoint")


@in_virtual_time
async def test_an_expired_cut_names_itself() -> None:
    """After its section a cut proves nothing, and says which it was."""
    barrier = make(name="mine")
    async with barrier.mutation("retry") as cut:
        pass
    with pytest.raises(CutExpiredError, match=r"mutation cut 'retry' of barrier 'mine', expired"):
        cut.check(barrier)


@in_virtual_time
async def test_a_cut_expires_when_its_body_fails_too() -> None:
    """Whatever ends the section ends the proof."""
    barrier = make()
    cuts: list[Cut] = []
    with pytest.raises(ZeroDivisionError):
        async with barrier.checkpoint() as cut:
            cuts.append(cut)
            raise ZeroDivisionError
    with pytest.raises(CutExpiredError):
        cuts[0].check(barrier)


def test_a_cut_that_was_never_entered_proves_nothing() -> None:
    """A section that was only asked for is no proof."""
    barrier = make()
    with pytest.raises(CutExpiredError, match="not entered"):
        barrier.mutation("retry").check(barrier)


@in_virtual_time
async def test_a_cut_of_another_barrier_names_both_ends() -> None:
    """A foreign cut is refused, also a live one."""
    ours, theirs = make(name="ours"), make(name="theirs")
    async with theirs.mutation("retry") as cut:
        with pytest.raises(ForeignCutError, match=r"barrier 'theirs'.*barrier 'ours' guards"):
            cut.check(ours)


@in_virtual_time
async def test_a_cut_of_the_wrong_side_names_both_sides() -> None:
    """A shared cut is no exclusive one, nor the reverse."""
    barrier = make()
    async with barrier.mutation("retry") as cut:
        with pytest.raises(WrongSideError, match=r"mutation cut 'retry'.*a checkpoint cut is needed"):
            cut.check(barrier, "checkpoint")
    async with barrier.checkpoint() as window:
        with pytest.raises(WrongSideError, match=r"checkpoint cut.*a mutation cut is needed"):
            window.check(barrier, "mutation")


def test_the_three_refusals_are_one_family() -> None:
    """A caller may catch them together, or each alone."""
    errors = (CutExpiredError, ForeignCutError, WrongSideError)
    assert all(issubclass(error, CutError) for error in errors)
    assert not any(issubclass(a, b) for a in errors for b in errors if a is not b)


@in_virtual_time
async def test_a_refused_check_does_not_count_as_a_change() -> None:
    """A window in which only refused checks were made has changed nothing."""
    barrier = make()
    async with barrier.checkpoint() as cut:
        with pytest.raises(WrongSideError):
            cut.check(barrier, "mutation")
    assert barrier.mutation_version == 0


async def test_a_cut_is_refused_in_a_thread_that_is_not_its_own() -> None:
    """A live cut shown from a foreign thread is an error that names the thread."""
    barrier = make()
    async with barrier.mutation("retry") as cut:
        caught: list[BaseException] = []

        def check() -> None:
            try:
                cut.check(barrier)
            except CutError as error:
                caught.append(error)

        thread = threading.Thread(target=check, name="stranger")
        thread.start()
        thread.join()
        (error,) = caught
        assert isinstance(error, ForeignCutError)
        assert "thread 'stranger'" in str(error)


async def test_a_cut_may_be_checked_in_the_thread_that_its_run_in_cut_started() -> None:
    """That thread works inside the section."""
    barrier = make()
    async with barrier.mutation("retry") as cut:
        await barrier.run_in_cut(cut, cut.check, barrier)


async def test_a_thread_that_worked_for_one_cut_proves_nothing_for_another() -> None:
    """The executor's threads are reused, their right to check is not."""
    barrier = make()

    async def body(other: Cut) -> None:
        async with barrier.mutation("retry") as own:
            await barrier.run_in_cut(own, own.check, barrier)
            with pytest.raises(ForeignCutError):
                await barrier.run_in_cut(own, other.check, barrier)

    async with barrier.mutation("admission") as cut:
        await detached(body(cut))


@in_virtual_time
async def test_a_cut_has_no_truth_value() -> None:
    """Whether a cut is there and whether it is live are different questions."""
    async with make().mutation("retry") as cut:
        with pytest.raises(TypeError, match=r"ask \.live"):
            bool(cut)


@in_virtual_time
async def test_live_tells_whether_the_section_is_held() -> None:
    """False before, true inside, false afterwards."""
    section = make().mutation("retry")
    before = section.live
    async with section:
        inside = section.live
    assert (before, inside, section.live) == (False, True, False)


@in_virtual_time
async def test_a_waiting_section_is_not_live() -> None:
    """A cut becomes live only when its task goes on inside."""
    barrier, order = make(), list[str]()
    window = Visitor(order, "C", barrier.checkpoint())
    await settle()
    slot = Visitor(order, "w", barrier.mutation("retry"))
    await settle()
    assert not slot.section.live
    window.leave()
    slot.leave()


@in_virtual_time
async def test_a_window_has_an_id_and_the_length_of_its_drain() -> None:
    """Each window is named once, and knows how long it was waited for."""
    clock, ids = FakeClock(), iter(["first", "second"])
    barrier, order = make(clock=clock, window_ids=lambda: next(ids)), list[str]()
    slot = Visitor(order, "w", barrier.mutation("retry"))
    await settle()
    section = barrier.checkpoint()
    window = Visitor(order, "C", section)
    await settle()
    clock.advance(1.5)
    slot.leave()
    await settle()
    assert (section.window_id, section.drain_ns) == ("first", 1_500_000_000)
    assert barrier.checkpoint().window_id == "second"
    window.leave()


def test_window_ids_are_unique_by_themselves() -> None:
    """Without an argument no two windows share an id."""
    barrier = make()
    assert len({barrier.checkpoint().window_id for _ in range(100)}) == 100
