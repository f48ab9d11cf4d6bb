"""What every data plane on one machine promises, checked over each backend."""

import asyncio
import hashlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quiesce.barrier import DataPlaneCheckpointBarrier
from quiesce.dataplane import (
    DataPlane,
    LmdbDataPlane,
    MemoryDataPlane,
    read_inventory,
    read_metadata,
    read_rows,
)
from quiesce.dataplane.base import LocalDataPlane, LocalSnapshot
from quiesce.errors import (
    CutExpiredError,
    DataPlaneClosedError,
    ForeignCutError,
    MissingFieldError,
    MissingRowError,
    RowExistsError,
    RowFormatError,
    SnapshotReleasedError,
    StaleIncarnationError,
    WrongSideError,
)
from quiesce.observers import Hub
from quiesce.types import RowKey

GROUP = "e000-p0000017"
MakePlane = Callable[..., LocalDataPlane]


def key(generation: int = 0, *, group: str = GROUP, attempt: int = 0, sequence: int | None = None) -> RowKey:
    """Return a key of the planes' incarnation."""
    return RowKey(3, group, generation, attempt, sequence)


def row(value: int, size: int = 8) -> dict[str, torch.Tensor]:
    """Return a row whose tokens all have one value."""
    return {"tokens": torch.full((size,), value, dtype=torch.int64)}


def tokens(plane: LocalDataPlane, wanted: RowKey) -> list[int]:
    """Return a stored row's tokens."""
    found: list[int] = plane.get([wanted], ["tokens"])[0]["tokens"].tolist()
    return found


def written(directory: Path, names: tuple[str, ...]) -> dict[RowKey, dict[str, list[int]]]:
    """Return what files hold."""
    return {
        found: {field: value.tolist() for field, value in fields.items()}
        for found, fields in read_rows(directory, names)
    }


def as_interface(plane: LocalDataPlane) -> DataPlane:
    """Let the type checker prove that what is tested here is the interface."""
    return plane


async def take(plane: LocalDataPlane, barrier: DataPlaneCheckpointBarrier) -> LocalSnapshot:
    """Take a snapshot in a window of its own."""
    async with barrier.checkpoint() as cut:
        return plane.snapshot(cut)


@pytest.fixture
def barrier() -> DataPlaneCheckpointBarrier:
    """A barrier that nothing else uses."""
    return DataPlaneCheckpointBarrier(hub=Hub(strict=True))


@pytest.fixture(params=["lmdb", "memory"])
def make(
    request: pytest.FixtureRequest, tmp_path: Path, barrier: DataPlaneCheckpointBarrier
) -> Iterator[MakePlane]:
    """Makes planes of one backend, and closes them at the end."""
    made: list[LocalDataPlane] = []

    def make_plane(**options: Any) -> LocalDataPlane:  # noqa: ANN401 - passed on to either constructor
        options = {"barrier": barrier, "hub": Hub(strict=True), **options}
        plane: LocalDataPlane
        if request.param == "lmdb":
            plane = LmdbDataPlane(tmp_path / f"store{len(made)}", 3, map_bytes=64 << 20, **options)
        else:
            plane = MemoryDataPlane(3, **options)
        made.append(plane)
        return plane

    yield make_plane
    for plane in made:
        plane.close()


@pytest.fixture
def plane(make: MakePlane) -> LocalDataPlane:
    """A plane with the usual options."""
    return make()


# ------------------------------------------------------------------------------------------- put, get, clear


def test_what_was_put_is_returned_in_the_asked_order(plane: LocalDataPlane) -> None:
    """Rows come back by key, in the order of the request, also when one is asked for twice."""
    as_interface(plane).put({key(0): row(0), key(1): row(1)})
    found = plane.get([key(1), key(0), key(1)])
    assert [one["tokens"][0].item() for one in found] == [1, 0, 1]


def test_a_returned_tensor_is_the_callers_own(plane: LocalDataPlane) -> None:
    """Changing what `get` returned changes nothing that is stored."""
    plane.put({key(): row(5)})
    plane.get([key()])[0]["tokens"][:] = 9
    assert tokens(plane, key()) == [5] * 8


def test_a_put_tensor_may_change_afterwards(plane: LocalDataPlane) -> None:
    """The bytes are copied at the put: a buffer that the caller uses again does not reach into the store."""
    buffer = torch.zeros(4, dtype=torch.int64)
    plane.put({key(): {"tokens": buffer}})
    buffer[:] = 7
    assert tokens(plane, key()) == [0, 0, 0, 0]


def test_a_view_of_a_batch_takes_only_its_own_bytes(plane: LocalDataPlane) -> None:
    """One row of a large batch tensor does not bring the batch along."""
    batch = torch.zeros(1024, 1024)
    plane.put({key(): {"tokens": batch[17]}})
    assert plane.statistics().num_bytes < 2 * 1024 * 4


def test_a_put_may_add_fields(plane: LocalDataPlane) -> None:
    """A later put of other fields extends the row, and leaves what was there."""
    plane.put({key(): row(1)})
    plane.put({key(): {"advantage": torch.tensor(0.5)}})
    found = plane.get([key()])[0]
    assert sorted(found) == ["advantage", "tokens"]
    assert found["advantage"].item() == 0.5
    assert found["tokens"].tolist() == [1] * 8
    assert plane.statistics().rows == 1


@pytest.mark.parametrize("value", [1, 2], ids=["the same value", "another value"])
def test_a_field_is_never_put_twice(plane: LocalDataPlane, value: int) -> None:
    """A put of a field that is there is refused by name, whatever the value, and the row is as it was."""
    plane.put({key(): row(1)})
    with pytest.raises(RowExistsError, match=rf"i00000003/{GROUP}/a00/g000/final .*'tokens'"):
        plane.put({key(): row(value)})
    assert tokens(plane, key()) == [1] * 8


def test_a_put_is_all_or_nothing(plane: LocalDataPlane) -> None:
    """One refused row refuses the whole put: neither new rows nor added fields are there."""
    plane.put({key(1): row(1), key(2): row(2)})
    added = {"advantage": torch.tensor(1.0)}
    with pytest.raises(RowExistsError):
        plane.put({key(0): row(0), key(1): added, key(2): row(2)})
    assert plane.missing([key(0)]) == (key(0),)
    assert sorted(plane.get([key(1)])[0]) == ["tokens"]


def test_a_row_that_cannot_be_stored_refuses_the_whole_put(plane: LocalDataPlane) -> None:
    """What cannot be encoded is found before anything is stored."""
    with pytest.raises(RowFormatError, match="g001/final: it has no field"):
        plane.put({key(0): row(0), key(1): {}})
    assert plane.keys() == []


def test_putting_nothing_is_nothing(plane: LocalDataPlane) -> None:
    """An empty put, clear, get and missing are fine."""
    plane.put({})
    assert plane.clear([]) == 0
    assert plane.get([]) == []
    assert plane.missing([]) == ()


@pytest.mark.parametrize("group", ["", "a/b", "a b", "ä", "x" * 97])
def test_a_key_that_could_not_be_read_back_is_refused(plane: LocalDataPlane, group: str) -> None:
    """A group id that the encoded key cannot carry is an error at the put, not at a restore."""
    with pytest.raises(RowFormatError, match="is not a row key"):
        plane.put({key(group=group): row(1)})


@pytest.mark.parametrize(
    "bad", [{"generation": -1}, {"attempt": -1}, {"sequence": -1}, {"generation": 1_000_000}]
)
def test_a_number_that_a_key_cannot_carry_is_refused(plane: LocalDataPlane, bad: dict[str, Any]) -> None:
    """Numbers are checked on every put, also in a group whose keys were fine before."""
    plane.put({key(): row(1)})
    with pytest.raises(RowFormatError, match="is not a row key"):
        plane.put({replace(key(), **bad): row(1)})


def test_a_missing_row_is_named(plane: LocalDataPlane) -> None:
    """`get` never returns fewer rows than were asked for."""
    plane.put({key(0): row(0)})
    with pytest.raises(MissingRowError, match=rf"i00000003/{GROUP}/a00/g001/final is not in <"):
        plane.get([key(0), key(1)])


def test_a_missing_field_is_named(plane: LocalDataPlane) -> None:
    """`get` never returns a row without a field that was asked for."""
    plane.put({key(): row(0)})
    with pytest.raises(MissingFieldError, match=r"g000/final has no field 'reward'; it has tokens"):
        plane.get([key()], ["tokens", "reward"])


def test_clear_counts_what_was_there(plane: LocalDataPlane) -> None:
    """Absent and repeated keys are passed over; a cleared row can be put again."""
    plane.put({key(0): row(0), key(1): row(1)})
    assert plane.clear([key(0), key(0), key(7)]) == 1
    assert plane.missing([key(0), key(1)]) == (key(0),)
    plane.put({key(0): row(4)})
    assert tokens(plane, key(0)) == [4] * 8


def test_keys_are_found_by_prefix_and_sorted(plane: LocalDataPlane) -> None:
    """`keys` lists a group, or an attempt of it, and never a group whose id merely begins the same."""
    mine = [key(1), key(0), key(0, sequence=11), key(0, sequence=2), key(0, attempt=1)]
    plane.put({found: row(0) for found in [*mine, key(0, group=f"{GROUP}1")]})
    first = RowKey.prefix(3, GROUP, attempt=0)
    assert plane.keys(first) == [key(0, sequence=2), key(0, sequence=11), key(0), key(1)]
    assert plane.keys(RowKey.prefix(3, GROUP)) == [*plane.keys(first), key(0, attempt=1)]
    assert len(plane.keys()) == 6
    assert plane.keys("i00000004") == []


def test_missing_keeps_the_order(plane: LocalDataPlane) -> None:
    """`missing` returns what is absent, as it was asked."""
    plane.put({key(1): row(0)})
    assert plane.missing([key(2), key(1), key(0)]) == (key(2), key(0))


def test_keys_of_another_incarnation_are_refused(plane: LocalDataPlane) -> None:
    """A worker that outlived its run can neither put nor read nor clear; nor can one of a newer run."""
    for other in (replace(key(), incarnation=2), replace(key(), incarnation=4)):
        for call in (
            lambda other=other: plane.put({other: row(1)}),
            lambda other=other: plane.get([other]),
            lambda other=other: plane.clear([other]),
            lambda other=other: plane.missing([other]),
        ):
            with pytest.raises(StaleIncarnationError, match=f"{other.encode()} is not of incarnation 3"):
                call()
    assert plane.keys() == []


def test_numpy_arrays_are_taken_and_returned(make: MakePlane) -> None:
    """The other library: arrays go in and come out, and torch tensors come out as arrays."""
    plane = make(tensors="numpy")
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    plane.put({key(): {"a": array, "b": torch.arange(3)}})
    found = plane.get([key()])[0]
    assert isinstance(found["a"], np.ndarray)
    np.testing.assert_array_equal(found["a"], array)
    assert isinstance(found["b"], np.ndarray)
    assert found["b"].tolist() == [0, 1, 2]


# ------------------------------------------------------------------------------------------------- snapshots


async def test_a_snapshot_holds_its_instant(
    plane: LocalDataPlane, barrier: DataPlaneCheckpointBarrier, tmp_path: Path
) -> None:
    """What was put, extended, cleared or put again after the cut does not change what is written."""
    plane.put({key(index): row(index) for index in range(4)})
    snapshot = await take(plane, barrier)
    plane.put({key(4): row(4), key(1): {"advantage": torch.tensor(1)}})
    plane.clear([key(2), key(3)])
    plane.put({key(3): row(33)})
    assert list(snapshot.keys()) == [key(0), key(1), key(2), key(3)]
    assert snapshot.rows == 4
    assert snapshot.missing([key(4), key(2)]) == (key(4),)
    result = snapshot.write(tmp_path, [key(index) for index in range(4)], {})
    snapshot.release()
    assert written(tmp_path, result.names) == {key(i): {"tokens": [i] * 8} for i in range(4)}
    assert plane.keys() == [key(0), key(1), key(3), key(4)]
    assert tokens(plane, key(3)) == [33] * 8


async def test_each_snapshot_holds_its_own_instant(
    plane: LocalDataPlane, barrier: DataPlaneCheckpointBarrier
) -> None:
    """Two open snapshots see two instants, whichever is released first."""
    plane.put({key(0): row(0)})
    first = await take(plane, barrier)
    plane.put({key(1): row(1)})
    second = await take(plane, barrier)
    plane.clear([key(0), key(1)])
    third = await take(plane, barrier)
    assert [list(one.keys()) for one in (first, second, third)] == [[key(0)], [key(0), key(1)], []]
    first.release()
    assert list(second.keys()) == [key(0), key(1)]
    second.release()
    third.release()
    assert plane.statistics().open_snapshots == 0


async def test_a_row_being_written_does_not_move(
    plane: LocalDataPlane, barrier: DataPlaneCheckpointBarrier, tmp_path: Path
) -> None:
    """Writers that put and clear all the time while a snapshot is written leave no mark in it."""
    rows = {key(index % 8, group=f"g{index // 8}"): row(index, size=2048) for index in range(800)}
    plane.put(rows)
    snapshot = await take(plane, barrier)
    stop = threading.Event()
    changes = 0

    def churn() -> None:
        nonlocal changes
        while not stop.is_set():
            victim = list(rows)[changes % len(rows)]
            plane.clear([victim])
            plane.put({victim: row(-1, size=2048)})
            changes += 1

    thread = threading.Thread(target=churn)
    thread.start()
    try:
        while not changes:  # noqa: ASYNC110 - a thread's progress, which no event of asyncio tells
            await asyncio.sleep(0)
        result = await asyncio.to_thread(snapshot.write, tmp_path, list(rows), {})
    finally:
        stop.set()
        snapshot.release()  # first: a put that waits for room waits for this
        thread.join()
    assert changes
    found = {wanted: fields["tokens"] for wanted, fields in read_rows(tmp_path, result.names)}
    assert found.keys() == rows.keys()
    assert all(torch.equal(torch.as_tensor(found[wanted]), rows[wanted]["tokens"]) for wanted in rows)


async def test_what_is_written_is_what_the_digests_say(
    plane: LocalDataPlane, barrier: DataPlaneCheckpointBarrier, tmp_path: Path
) -> None:
    """Names, sizes and digests in the result are those of the files, and the metadata are in each."""
    plane.put({key(index): row(index) for index in range(3)})
    snapshot = await take(plane, barrier)
    result = snapshot.write(tmp_path, [key(2), key(0), key(2)], {"ledger_digest": "abc"})
    snapshot.release()
    assert result.rows == 2
    assert result.names == ("rows-00000.safetensors",)
    assert sorted(path.name for path in tmp_path.glob("*.safetensors")) == list(result.names)
    content = (tmp_path / result.names[0]).read_bytes()
    assert (result.files[0].size, result.num_bytes) == (len(content), len(content))
    assert result.files[0].sha256 == hashlib.sha256(content).hexdigest()
    assert read_metadata(tmp_path / result.names[0])["ledger_digest"] == "abc"
    assert read_inventory(tmp_path, result.names) == {key(0): ("tokens",), key(2): ("tokens",)}


async def test_a_snapshot_of_nothing_still_carries_the_metadata(
    plane: LocalDataPlane, barrier: DataPlaneCheckpointBarrier, tmp_path: Path
) -> None:
    """With no rows there is one file, so that a digest of the ledger has its place from the start."""
    snapshot = await take(plane, barrier)
    result = snapshot.write(tmp_path, [], {"ledger_count": "0"})
    snapshot.release()
    assert (result.rows, len(result.files)) == (0, 1)
    assert read_metadata(tmp_path / result.names[0])["ledger_count"] == "0"
    assert written(tmp_path, result.names) == {}


async def test_a_row_that_was_not_there_is_named_at_the_write(
    plane: LocalDataPlane, barrier: DataPlaneCheckpointBarrier, tmp_path: Path
) -> None:
    """A row put after the cut is not in it, and asking for it is an error that names it."""
    plane.put({key(0): row(0)})
    snapshot = await take(plane, barrier)
    plane.put({key(1): row(1)})
    with pytest.raises(MissingRowError, match=r"g001/final is not in the snapshot of cut"):
        snapshot.write(tmp_path, [key(0), key(1)], {})
    snapshot.release()


async def test_a_write_does_not_replace_a_file(
    plane: LocalDataPlane, barrier: DataPlaneCheckpointBarrier, tmp_path: Path
) -> None:
    """A file or link of a shard's name is left alone and refused."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "rows-00000.safetensors").symlink_to(victim)
    snapshot = await take(plane, barrier)
    with pytest.raises(FileExistsError):
        snapshot.write(tmp_path, [], {})
    snapshot.release()
    assert victim.read_text() == "precious"


async def test_a_write_into_no_folder_is_an_error(
    plane: LocalDataPlane, barrier: DataPlaneCheckpointBarrier, tmp_path: Path
) -> None:
    """The folder is the caller's to make."""
    snapshot = await take(plane, barrier)
    with pytest.raises(FileNotFoundError):
        snapshot.write(tmp_path / "absent", [], {})
    snapshot.release()


async def test_release_is_idempotent_and_final(
    plane: LocalDataPlane, barrier: DataPlaneCheckpointBarrier, tmp_path: Path
) -> None:
    """Released once, released for good: every use afterwards is an error that names the cut."""
    plane.put({key(): row(0)})
    snapshot = await take(plane, barrier)
    threads = [threading.Thread(target=snapshot.release) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    snapshot.release()
    assert snapshot.released
    assert plane.statistics().open_snapshots == 0
    for use in (
        snapshot.keys,
        lambda: snapshot.missing([key()]),
        lambda: snapshot.write(tmp_path, [key()], {}),
    ):
        with pytest.raises(SnapshotReleasedError, match=snapshot.cut_id):
            use()
    assert not list(tmp_path.glob("*.safetensors"))


async def test_a_release_during_a_write_stops_it(
    plane: LocalDataPlane,
    barrier: DataPlaneCheckpointBarrier,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Giving up on a cut ends its write at the next row, and only then lets go of the rows."""
    plane.put({key(index): row(index) for index in range(3)})
    snapshot = await take(plane, barrier)
    fetch = snapshot._fetch  # noqa: SLF001 - the one place between two rows
    open_meanwhile = []

    def fetch_and_release(text: str) -> object:
        found = fetch(text)
        snapshot.release()
        open_meanwhile.append(plane.statistics().open_snapshots)
        return found

    monkeypatch.setattr(snapshot, "_fetch", fetch_and_release)
    with pytest.raises(SnapshotReleasedError):
        snapshot.write(tmp_path, [key(0), key(1), key(2)], {})
    assert open_meanwhile == [1]
    assert plane.statistics().open_snapshots == 0


async def test_a_snapshot_asks_for_the_exclusive_side(
    plane: LocalDataPlane, barrier: DataPlaneCheckpointBarrier
) -> None:
    """A slot's cut, a cut of another barrier and a cut whose window was left all prove nothing."""
    async with barrier.mutation("group_commit") as slot:
        with pytest.raises(WrongSideError):
            plane.snapshot(slot)  # type: ignore[arg-type] # the wrong side is the point
    async with DataPlaneCheckpointBarrier(hub=Hub(strict=True)).checkpoint() as foreign:
        with pytest.raises(ForeignCutError):
            plane.snapshot(foreign)
    async with barrier.checkpoint() as cut:
        pass
    with pytest.raises(CutExpiredError):
        plane.snapshot(cut)
    assert plane.statistics().open_snapshots == 0


async def test_a_snapshot_changes_no_state(
    plane: LocalDataPlane, barrier: DataPlaneCheckpointBarrier
) -> None:
    """Taking one leaves the barrier's mutation version alone, and it carries the window's id."""
    before = barrier.mutation_version
    async with barrier.checkpoint() as cut:
        snapshot = plane.snapshot(cut)
        assert snapshot.cut_id == cut.window_id
    snapshot.release()
    assert barrier.mutation_version == before


# ------------------------------------------------------------------------------------ hooks, counts, closing


class Recorder:
    """Notes what the data plane reports."""

    def __init__(self) -> None:
        self.operated: list[tuple[str, int, str]] = []

    def dataplane_operated(self, op: str, ns: int, rows: int, outcome: str) -> None:
        """Note it."""
        assert ns == 1  # the clock below moves by one at each reading
        self.operated.append((op, rows, outcome))


async def test_every_operation_is_reported(
    make: MakePlane, barrier: DataPlaneCheckpointBarrier, tmp_path: Path
) -> None:
    """Each call fires one hook with operation, rows and outcome; `missing`, which a slot calls, none."""
    hub, recorder = Hub(strict=True), Recorder()
    hub.subscribe(recorder)
    ticks = iter(range(1000))
    plane = make(hub=hub, clock=lambda: next(ticks))
    plane.put({key(0): row(0), key(1): row(1)})
    plane.get([key(0)])
    plane.missing([key(0)])
    with pytest.raises(MissingRowError):
        plane.get([key(9)])
    snapshot = await take(plane, barrier)
    snapshot.write(tmp_path, [key(1)], {})
    snapshot.release()
    plane.keys()
    plane.clear([key(0), key(9)])
    assert recorder.operated == [
        ("put", 2, "completed"),
        ("get", 1, "completed"),
        ("get", 1, "failed"),
        ("snapshot", 2, "completed"),
        ("write", 1, "completed"),
        ("keys", 2, "completed"),
        ("clear", 2, "completed"),
    ]


class Raiser:
    """An observer that breaks on snapshots."""

    def dataplane_operated(self, op: str, ns: int, rows: int, outcome: str) -> None:
        """Break."""
        if op == "snapshot":
            raise RuntimeError("no")


async def test_a_broken_strict_observer_leaves_no_pin(
    make: MakePlane, barrier: DataPlaneCheckpointBarrier
) -> None:
    """If the caller never gets the handle, nobody could release it, so it is released."""
    hub = Hub(strict=True)
    hub.subscribe(Raiser())
    plane = make(hub=hub)
    with pytest.raises(RuntimeError, match="no"):
        await take(plane, barrier)
    assert plane.statistics().open_snapshots == 0


async def test_statistics_count_rows_bytes_and_pins(
    plane: LocalDataPlane, barrier: DataPlaneCheckpointBarrier
) -> None:
    """The counts follow puts, additions, clears and snapshots; the oldest snapshot's rows are pinned."""
    plane.put({key(0): row(0), key(1): row(1)})
    one = plane.statistics().num_bytes
    plane.put({key(0): {"advantage": torch.tensor(1.0)}})
    two = plane.statistics().num_bytes
    first = await take(plane, barrier)
    plane.clear([key(0)])
    second = await take(plane, barrier)
    now = await asyncio.to_thread(plane.statistics)
    assert 0 < now.num_bytes < one < two
    assert (now.rows, now.open_snapshots, now.pinned_rows) == (1, 2, 2)
    first.release()
    assert plane.statistics().pinned_rows == 1
    second.release()
    plane.clear([key(1)])
    now = plane.statistics()
    assert (now.rows, now.num_bytes, now.open_snapshots, now.pinned_rows) == (0, 0, 0, 0)


def test_a_plane_is_found_on_its_hub(make: MakePlane) -> None:
    """Collectors find it by its role."""
    hub = Hub(strict=True)
    plane = make(hub=hub)
    assert hub.sources("dataplane") == [plane]


async def test_closing_releases_and_refuses(
    plane: LocalDataPlane, barrier: DataPlaneCheckpointBarrier, tmp_path: Path
) -> None:
    """Close ends every snapshot and is final; counting goes on without an error, at zero."""
    plane.put({key(): row(0)})
    snapshot = await take(plane, barrier)
    plane.close()
    plane.close()
    assert snapshot.released
    with pytest.raises(SnapshotReleasedError):
        snapshot.write(tmp_path, [key()], {})
    for use in (
        lambda: plane.put({key(1): row(0)}),
        lambda: plane.get([key()]),
        lambda: plane.clear([key()]),
        lambda: plane.missing([key()]),
        plane.keys,
    ):
        with pytest.raises(DataPlaneClosedError):
            use()
    async with barrier.checkpoint() as cut:
        with pytest.raises(DataPlaneClosedError):
            plane.snapshot(cut)
    now = plane.statistics()
    assert (now.rows, now.open_snapshots) == (0, 0)


async def test_closing_waits_for_a_write_that_runs(
    plane: LocalDataPlane,
    barrier: DataPlaneCheckpointBarrier,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Close lets a write leave before the rows go, and the write ends with an error, not with wrong bytes."""
    plane.put({key(index): row(index) for index in range(2)})
    snapshot = await take(plane, barrier)
    fetch = snapshot._fetch  # noqa: SLF001 - the one place inside a write
    inside, go_on = threading.Event(), threading.Event()

    def slow_fetch(text: str) -> object:
        inside.set()
        go_on.wait(30)
        return fetch(text)

    monkeypatch.setattr(snapshot, "_fetch", slow_fetch)
    writing = asyncio.create_task(asyncio.to_thread(snapshot.write, tmp_path, [key(0), key(1)], {}))
    await asyncio.to_thread(inside.wait, 30)
    closing = asyncio.create_task(asyncio.to_thread(plane.close))
    while not snapshot.released:  # noqa: ASYNC110 - a thread's progress, which no event of asyncio tells
        await asyncio.sleep(0)
    assert not closing.done()
    go_on.set()
    with pytest.raises(SnapshotReleasedError):
        await writing
    await closing


def test_many_threads_put_and_clear_at_once(plane: LocalDataPlane) -> None:
    """Threads do not lose each other's rows."""
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for index in range(50):
                plane.put(
                    {key(generation, group=f"t{number}-{index}"): row(index) for generation in range(2)}
                )
                assert tokens(plane, key(1, group=f"t{number}-{index}")) == [index] * 8
                plane.clear([key(0, group=f"t{number}-{index}")])
        except BaseException as error:  # noqa: BLE001 - a thread's failure must reach the test
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert plane.statistics().rows == len(plane.keys()) == 200


@pytest.mark.parametrize("incarnation", [0, -1])
def test_an_incarnation_counts_from_one(tmp_path: Path, incarnation: int) -> None:
    """A number that no run has is refused before anything is made."""
    with pytest.raises(ValueError, match="counted from 1"):
        MemoryDataPlane(incarnation)
    with pytest.raises(ValueError, match="counted from 1"):
        LmdbDataPlane(tmp_path / "store", incarnation)
    assert not (tmp_path / "store").exists()


def test_an_unknown_tensor_library_is_refused() -> None:
    """Only torch and numpy make tensors."""
    with pytest.raises(ValueError, match="'torch' or 'numpy', not 'jax'"):
        MemoryDataPlane(1, tensors="jax")  # type: ignore[arg-type] # the wrong value is the point
