"""The baseline is a correct barrier: what it is compared with is not faster for doing less, nor slower for being broken."""

import asyncio

import pytest

from quiesce.bench.upstream_shape import UpstreamShapeBarrier

KIND = "group_commit"


async def _steps(count: int = 5) -> None:
    """Let every ready task run a few times."""
    for _ in range(count):
        await asyncio.sleep(0)


async def test_mutations_run_beside_each_other() -> None:
    """Two tasks are inside at once."""
    barrier, inside = UpstreamShapeBarrier(), asyncio.Barrier(2)

    async def writer() -> None:
        async with barrier.mutation(KIND):
            await inside.wait()

    await asyncio.gather(writer(), writer())
    assert barrier.mutation_version == 2


async def test_a_checkpoint_waits_for_mutations_and_keeps_new_ones_out() -> None:
    """The checkpoint enters after the open mutation, before the one that asked after it."""
    barrier, may_end, order = UpstreamShapeBarrier(), asyncio.Event(), list[str]()

    async def first() -> None:
        async with barrier.mutation(KIND):
            await may_end.wait()
            order.append("first")

    async def checkpoint() -> None:
        async with barrier.checkpoint():
            order.append("checkpoint enters")
            await _steps()
            order.append("checkpoint leaves")

    async def late() -> None:
        async with barrier.mutation(KIND):
            order.append("late")

    tasks = [asyncio.create_task(first())]
    await _steps()
    tasks.append(asyncio.create_task(checkpoint()))
    await _steps()
    tasks.append(asyncio.create_task(late()))
    await _steps()
    assert order == []
    assert barrier.waiting == 1
    may_end.set()
    await asyncio.gather(*tasks)

    assert order == ["first", "checkpoint enters", "checkpoint leaves", "late"]
    assert barrier.waiting == 0
    assert barrier.max_waiting == 1
    assert barrier.blocked_by_kind == {KIND: 1}
    assert len(barrier.waits) == 1


async def test_checkpoints_exclude_each_other() -> None:
    """A second checkpoint waits for the first."""
    barrier, inside, most = UpstreamShapeBarrier(), 0, 0

    async def checkpoint() -> None:
        nonlocal inside, most
        async with barrier.checkpoint():
            inside += 1
            most = max(most, inside)
            await _steps()
            inside -= 1

    await asyncio.gather(*(checkpoint() for _ in range(3)))
    assert most == 1


async def test_a_cancelled_drain_reopens_the_barrier() -> None:
    """A checkpoint that gives up lets waiting mutations in."""
    barrier, may_end = UpstreamShapeBarrier(), asyncio.Event()

    async def holder() -> None:
        async with barrier.mutation(KIND):
            await may_end.wait()

    async def checkpoint() -> None:
        async with barrier.checkpoint():
            raise AssertionError("it never got in")

    async def late() -> None:
        async with barrier.mutation(KIND):
            pass

    held = asyncio.create_task(holder())
    await _steps()
    draining = asyncio.create_task(checkpoint())
    await _steps()
    waiting = asyncio.create_task(late())
    await _steps()
    draining.cancel()
    await asyncio.gather(draining, return_exceptions=True)
    await waiting
    may_end.set()
    await held
    assert barrier.mutation_version == 2


async def test_a_failed_body_is_released() -> None:
    """The section ends, and counts, when its body raises."""
    barrier = UpstreamShapeBarrier()

    with pytest.raises(KeyError):
        async with barrier.mutation(KIND):
            raise KeyError
    async with barrier.checkpoint():
        assert barrier.mutation_version == 1


async def test_nesting_is_refused() -> None:
    """A task that holds a section gets no other one."""
    barrier = UpstreamShapeBarrier()

    async with barrier.mutation(KIND):
        with pytest.raises(RuntimeError, match="holds a section already"):
            async with barrier.checkpoint():
                pass


async def test_a_cut_ends_with_its_section() -> None:
    """The token is live inside, and expired outside."""
    barrier = UpstreamShapeBarrier()

    async with barrier.mutation(KIND) as cut:
        cut.require_live()
    with pytest.raises(RuntimeError, match="was left"):
        cut.require_live()


async def test_an_unknown_kind_is_refused() -> None:
    """Before anything waits."""
    with pytest.raises(ValueError, match="unknown kind 'other'"):
        async with UpstreamShapeBarrier().mutation("other"):
            pass
