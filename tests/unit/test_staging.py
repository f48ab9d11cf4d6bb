"""What one generation call may stage: no key is lost, none is handed over twice, and nothing is put after the end."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from quiesce.dataplane import MemoryDataPlane
from quiesce.dataplane.interface import DataPlaneStatistics
from quiesce.errors import (
    GateRetiredError,
    MapFullError,
    PermitTimeoutError,
    RolloutResultError,
    StagingRetiredError,
    StoreFailedError,
)
from quiesce.snapshot_gate import Epoch, SnapshotGate, holds_permit
from quiesce.staging import Staging
from quiesce.testing import EventRecorder, strict_hub
from quiesce.types import RowKey

GROUP = "e000-p0000001"
SECONDS = 20.0


class Plane(MemoryDataPlane):
    """Rows in memory; a test decides when a put goes on, and whether it fails."""

    def __init__(self) -> None:
        super().__init__(1, tensors="numpy", hub=strict_hub())
        self.entered = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()
        self.raises: list[BaseException | None] = []
        self.blocked = 0
        self.puts: list[tuple[str, ...]] = []
        self.under_permit: list[bool] = []

    def put(self, rows: Mapping[RowKey, Any]) -> None:
        """Put once the test lets it."""
        self.entered.set()
        assert self.go_on.wait(SECONDS)
        if self.raises and (error := self.raises.pop(0)) is not None:
            raise error
        self.under_permit.append(holds_permit())
        super().put(rows)
        self.puts.append(tuple(key.encode().partition("/a")[2] for key in rows))

    def statistics(self) -> DataPlaneStatistics:
        """Say that puts wait for room, if the test says so."""
        return DataPlaneStatistics("memory", 1, blocked_writers=self.blocked)


class Scene:
    """A staging, its data plane, a gate, and what was handed over."""

    def __init__(self, *, generations: int = 2, attempt: int = 0) -> None:
        self.plane = Plane()
        self.recorder = EventRecorder()
        self.gate = SnapshotGate("0", hub=strict_hub(self.recorder))
        self.handed: list[RowKey] = []
        self.generations = generations
        self.staging = self.again(attempt=attempt)

    def again(
        self, found: Sequence[RowKey] = (), *, attempt: int = 0, generations: int | None = None
    ) -> Staging:
        """Return the staging of a later call."""
        wanted = self.generations if generations is None else generations
        return Staging(self.plane, GROUP, attempt, wanted, hand_over=self.handed.extend, found=found)

    def chunks(self, *generations: int) -> None:
        """Put a chunk of each of these generations."""
        self.staging.put_chunks({generation: row(generation) for generation in generations})

    def finish(self, timeout: float | None = None) -> tuple[RowKey, ...]:
        """Put every final row."""
        return self.staging.finish(
            self.gate, {generation: row(100 + generation) for generation in range(self.generations)}, timeout
        )


def row(value: int) -> dict[str, Any]:
    """Return a row that tells itself from others."""
    return {"tokens": np.array([value], dtype=np.int32)}


def key(generation: int, sequence: int | None = None, attempt: int = 0) -> RowKey:
    """Return a key of the scene's group."""
    return RowKey(1, GROUP, generation, attempt, sequence)


@pytest.fixture
def scene() -> Iterator[Scene]:
    """A new call of a group of two generations."""
    made = Scene()
    yield made
    made.plane.close()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    """Threads for calls that block."""
    with ThreadPoolExecutor(4) as made:
        yield made


# ------------------------------------------------------------------------------------------------- the happy path


def test_chunks_of_all_generations_are_one_put_without_a_permit(scene: Scene) -> None:
    """Each generation counts its chunks by itself, and a generation may have none for a while."""
    scene.chunks(0, 1)
    scene.chunks(1)
    scene.chunks(0, 1)

    assert scene.plane.puts == [
        ("00/g000/c000000", "00/g001/c000000"),
        ("00/g001/c000001",),
        ("00/g000/c000001", "00/g001/c000002"),
    ]
    assert scene.plane.under_permit == [False] * 3
    assert scene.recorder.of("permit_granted") == []


def test_final_rows_are_put_under_a_permit_which_is_released_before_the_keys_are_known(scene: Scene) -> None:
    """The obsolete keys are the caller's: handed over neither by the finish nor at the commit."""
    scene.chunks(0, 1)
    scene.chunks(1)

    obsolete = scene.finish()

    assert not holds_permit()
    assert scene.plane.under_permit == [False, False, True]
    assert set(obsolete) == {key(0, 0), key(1, 0), key(1, 1)}
    assert scene.plane.missing([key(0), key(1)]) == ()
    assert scene.staging.finished
    assert scene.staging.commit() == ()
    scene.staging.abandon()
    assert scene.handed == []


def test_a_call_that_staged_nothing_has_nothing_obsolete(scene: Scene) -> None:
    """So its worker has no reason to wait for its cleanup."""
    assert scene.finish() == ()


def test_a_commit_takes_the_chunks_of_a_call_that_returned_its_rows(scene: Scene) -> None:
    """Whoever stages chunks and does not finish leaves them to whoever commits, once."""
    scene.chunks(0, 1)

    assert set(scene.staging.commit()) == {key(0, 0), key(1, 0)}
    assert scene.staging.commit() == ()


@pytest.mark.parametrize("generations", [(0,), (0, 1, 2), ()])
def test_a_finish_puts_every_generation_that_lacks_its_final_row(
    scene: Scene, generations: tuple[int, ...]
) -> None:
    """A group is finished as a whole; anything else would be committed with a row missing."""
    with pytest.raises(RolloutResultError, match=r"final rows of generations .*, not of \[0, 1\]"):
        scene.staging.finish(scene.gate, {generation: row(0) for generation in generations})
    assert not scene.staging.finished


# ----------------------------------------------------------------------------------------------------- restored


def test_a_later_call_goes_on_behind_what_was_found(scene: Scene) -> None:
    """Chunks come back in order, the next one gets the next number, and all are obsolete at the end."""
    for value in (5, 6):
        scene.staging.put_chunks({0: row(value)})
    later = scene.again([key(0, 0), key(0, 1)])
    assert later.to_load

    later.load()
    later.put_chunks({0: row(7), 1: row(8)})
    obsolete = later.finish(scene.gate, {0: row(1), 1: row(2)})

    assert [int(found["tokens"][0]) for found in later.found[0]] == [5, 6]
    assert later.found[1] == ()
    assert later.finals == (None, None)
    assert not later.to_load
    assert set(obsolete) == {key(0, 0), key(0, 1), key(0, 2), key(1, 0)}


def test_a_generation_whose_final_row_was_found_is_not_put_again(scene: Scene) -> None:
    """The others are finished; a chunk of the finished one is refused."""
    scene.plane.put({key(0): row(9)})
    later = scene.again([key(0)])
    later.load()

    with pytest.raises(StagingRetiredError):
        later.put_chunks({0: row(1)})
    assert later.finish(scene.gate, {1: row(2)}) == ()

    assert int((later.finals[0] or {})["tokens"][0]) == 9
    assert later.finished


def test_a_group_whose_final_rows_were_all_found_needs_no_permit(scene: Scene) -> None:
    """There is nothing to put, so a closed gate does not hold it up."""
    scene.plane.put({key(0): row(9), key(1): row(9)})
    later = scene.again([key(0), key(1)])
    later.load()
    scene.gate.close_and_wait(Epoch(1, 1))

    assert later.finish(scene.gate, {}, 0.0) == ()

    assert later.finished


def test_what_was_found_and_belongs_to_no_wanted_generation_is_obsolete(scene: Scene) -> None:
    """A resume with fewer generations clears the rows of the others, final or not."""
    found = [key(0, 0), key(1, 0), key(2)]
    scene.plane.put({one: row(3) for one in found})
    later = scene.again(found, generations=1)
    later.load()

    obsolete = later.finish(scene.gate, {0: row(1)})

    assert set(obsolete) == set(found)


def test_a_call_that_is_given_up_before_it_loaded_hands_over_what_was_found(scene: Scene) -> None:
    """The keys are known from the start."""
    scene.again([key(0, 0), key(1)]).abandon()

    assert Counter(scene.handed) == Counter([key(0, 0), key(1)])


# ----------------------------------------------------------------------------------------------------- given up


def test_a_call_that_is_given_up_hands_every_key_over_once(scene: Scene) -> None:
    """Chunks and final rows alike, and a second time nothing."""
    scene.chunks(0, 1)
    obsolete = scene.finish()
    scene.staging.abandon()
    scene.staging.abandon()

    assert Counter([*obsolete, *scene.handed]) == Counter([key(0, 0), key(1, 0), key(0), key(1)])


def test_nothing_is_put_after_the_attempt_was_given_up(scene: Scene) -> None:
    """A late put is refused before it reaches the store, by name."""
    scene.chunks(0)
    scene.staging.abandon()

    with pytest.raises(StagingRetiredError, match=f"{GROUP} attempt 0"):
        scene.chunks(0)
    with pytest.raises(StagingRetiredError):
        scene.finish()

    assert len(scene.plane.puts) == 1
    assert scene.recorder.of("permit_released")  # the permit that the late finish took is back


def _chunk(scene: Scene) -> object:
    scene.chunks(0, 1)
    return None


def _finish(scene: Scene) -> object:
    return scene.finish()


@pytest.mark.parametrize("call", [_chunk, _finish])
def test_giving_up_never_waits_for_a_put_and_its_keys_follow_when_it_is_through(
    scene: Scene, pool: ThreadPoolExecutor, call: Callable[[Scene], object]
) -> None:
    """A clear that overtook the put would leave its rows behind; so they are handed over after it."""
    scene.chunks(0)
    scene.plane.entered.clear()
    scene.plane.go_on.clear()
    running = pool.submit(call, scene)
    assert scene.plane.entered.wait(SECONDS)

    scene.staging.abandon()
    assert scene.handed == [key(0, 0)]
    scene.plane.go_on.set()
    with pytest.raises(StagingRetiredError):
        running.result(SECONDS)

    assert Counter(scene.handed) == Counter(scene.plane.keys())
    assert len(scene.handed) == 3


def test_a_put_that_fails_after_the_attempt_was_given_up_hands_nothing_over(
    scene: Scene, pool: ThreadPoolExecutor
) -> None:
    """A put that raises has put nothing."""
    scene.plane.go_on.clear()
    scene.plane.raises = [StoreFailedError("put", "rows", "no")]
    running = pool.submit(scene.chunks, 0, 1)
    assert scene.plane.entered.wait(SECONDS)
    scene.staging.abandon()
    scene.plane.go_on.set()

    with pytest.raises(StoreFailedError):
        running.result(SECONDS)

    assert scene.handed == []


def test_a_chunk_that_could_not_be_put_leaves_no_gap(scene: Scene) -> None:
    """Its number is the next one's: a prefix with a gap would end there."""
    scene.chunks(0)
    scene.plane.raises = [StoreFailedError("put", "rows", "no")]
    with pytest.raises(StoreFailedError):
        scene.chunks(0)
    scene.chunks(0)

    assert [one.sequence for one in scene.plane.keys("")] == [0, 1]


def _stage_and_finish(scene: Scene, start: threading.Barrier, chunks: int) -> tuple[RowKey, ...]:
    start.wait(SECONDS)
    try:
        for _ in range(chunks):
            scene.chunks(0, 1)
        return scene.finish()
    except StagingRetiredError:
        return ()


def test_whenever_an_attempt_is_given_up_no_key_is_lost_or_handed_over_twice(
    pool: ThreadPoolExecutor,
) -> None:
    """A worker that stages and finishes races with giving up, many times over; the account is exact each time."""
    for round_ in range(200):
        scene = Scene()
        start = threading.Barrier(2)

        running = pool.submit(_stage_and_finish, scene, start, round_ % 7)
        start.wait(SECONDS)
        scene.staging.abandon()
        submitted = running.result(SECONDS)

        assert Counter([*submitted, *scene.handed]) == Counter(scene.plane.keys())
        scene.plane.close()


# ------------------------------------------------------------------------------------------- gates and full stores


def test_final_rows_wait_for_the_gate_and_chunks_do_not(scene: Scene, pool: ThreadPoolExecutor) -> None:
    """While a checkpoint keeps the gate closed, generation goes on and only its end waits."""
    epoch = Epoch(1, 1)
    scene.gate.close_and_wait(epoch)
    scene.chunks(0, 1)
    running = pool.submit(scene.finish, SECONDS)
    while not scene.gate.statistics().waiting:
        threading.Event().wait(0.001)

    assert scene.plane.missing([key(0), key(1)]) == (key(0), key(1))
    scene.gate.reopen(epoch)

    assert set(running.result(SECONDS)) == {key(0, 0), key(1, 0)}


def test_a_permit_that_does_not_come_in_time_fails_the_call_and_keeps_its_keys(scene: Scene) -> None:
    """Nothing final was put; giving the attempt up hands its chunks over."""
    scene.chunks(0)
    scene.gate.close_and_wait(Epoch(1, 1))

    with pytest.raises(PermitTimeoutError):
        scene.finish(0.0)
    scene.staging.abandon()

    assert scene.handed == [key(0, 0)]


def test_a_retired_worker_s_gate_lets_no_final_row_through(scene: Scene) -> None:
    """Its attempts may not be retired yet, but its gate is."""
    scene.gate.retire("its call hung")

    with pytest.raises(GateRetiredError):
        scene.finish()

    assert scene.plane.puts == []


def test_a_full_store_that_a_snapshot_pins_is_waited_for_with_the_permit_released_in_between(
    scene: Scene,
) -> None:
    """Back-pressure, not a failed group; and no checkpoint has to wait for it longer than for one put."""
    pinned = MapFullError("rows", 1 << 20, 1.0, ("the snapshot of cut c1",))
    scene.plane.raises = [pinned, pinned, None]

    scene.finish()

    assert len(scene.recorder.of("permit_granted")) == len(scene.recorder.of("permit_released")) == 3
    assert not scene.staging.waits_for_room


def test_a_full_store_that_is_being_cleared_is_waited_for(scene: Scene) -> None:
    """Rows of groups that ended wait for their clear: they make room, and then the put goes through."""
    full = MapFullError("rows", 1 << 20, 0.0, ())
    scene.plane.raises = [full, None]
    making_room = [True]
    staging = Staging(
        scene.plane, GROUP, 0, 1, hand_over=scene.handed.extend, making_room=lambda: making_room[0]
    )

    staging.finish(scene.gate, {0: row(1)})

    assert staging.finished
    making_room[0] = False
    scene.plane.raises = [full]
    with pytest.raises(MapFullError):
        scene.finish()


def test_a_full_store_that_nothing_pins_is_an_error(scene: Scene) -> None:
    """Waiting would make no room."""
    scene.plane.raises = [MapFullError("rows", 1 << 20, 0.0, ())]

    with pytest.raises(MapFullError, match="larger map"):
        scene.finish()

    assert scene.recorder.of("permit_released")


def test_a_put_that_waits_for_room_is_told_from_one_that_hangs(
    scene: Scene, pool: ThreadPoolExecutor
) -> None:
    """Only while a put of this call runs, and somebody in this process waits for a release."""
    scene.plane.blocked = 1
    assert not scene.staging.waits_for_room
    scene.plane.go_on.clear()
    running = pool.submit(scene.chunks, 0)
    assert scene.plane.entered.wait(SECONDS)

    assert scene.staging.waits_for_room
    scene.plane.blocked = 0
    assert not scene.staging.waits_for_room
    scene.plane.go_on.set()
    running.result(SECONDS)
