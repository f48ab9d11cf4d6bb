"""The LMDB data plane beyond the contract suite: constant cost, full maps, several processes."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lmdb
import pytest
import torch

from quiesce.barrier import DataPlaneCheckpointBarrier
from quiesce.dataplane import DEFAULT_MAP_BYTES, LmdbDataPlane, default_map_bytes
from quiesce.dataplane.base import LocalSnapshot
from quiesce.errors import DataPlaneClosedError, MapFullError, StoreFailedError, StoreUsedError
from quiesce.observers import Hub
from quiesce.types import RowKey

MIB = 1 << 20


def key(number: int) -> RowKey:
    """Return the n-th key."""
    return RowKey(1, f"e000-p{number // 8:07d}", number % 8, 0)


def put(plane: LmdbDataPlane, number: int, size: int = 16384) -> None:
    """Put the n-th row."""
    plane.put({key(number): {"x": torch.full((size,), number % 256, dtype=torch.uint8)}})


def fill(plane: LmdbDataPlane) -> int:
    """Put rows until the map is full; return how many there are."""
    for number in range(10_000):
        try:
            put(plane, number)
        except MapFullError:
            return number
    raise AssertionError("the map never filled up")


async def take(plane: LmdbDataPlane) -> LocalSnapshot:
    """Take a snapshot in a window of its own."""
    async with DataPlaneCheckpointBarrier(hub=Hub(strict=True)).checkpoint() as cut:
        return plane.snapshot(cut)


async def until_blocked(plane: LmdbDataPlane) -> None:
    """Wait until a thread waits for room."""
    async with asyncio.timeout(30):
        while not plane.statistics().blocked_writers:  # noqa: ASYNC110 - a thread's wait, which no event of asyncio tells
            await asyncio.sleep(0.001)


class Opened:
    """Opens planes in one folder and closes them at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.planes: list[LmdbDataPlane] = []

    def __call__(self, incarnation: int = 1, **options: object) -> LmdbDataPlane:
        """Open one more."""
        settings: Any = {"map_bytes": MIB, "full_timeout": 30.0, "hub": Hub(strict=True), **options}
        self.planes.append(LmdbDataPlane(self.folder, incarnation, **settings))
        return self.planes[-1]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opened]:
    """Opens planes in a fresh folder."""
    made = Opened(tmp_path / "store")
    yield made
    for plane in made.planes:
        plane.close()


def run_script(script: str, *args: object) -> subprocess.CompletedProcess[str]:
    """Run a script behind the prelude in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", PRELUDE + script, *map(str, args)],
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )


PRELUDE = """
import asyncio, os, sys
from pathlib import Path
import numpy as np
from quiesce.barrier import DataPlaneCheckpointBarrier
from quiesce.dataplane import LmdbDataPlane
from quiesce.types import RowKey

def key(number):
    return RowKey(1, f"e000-p{number // 8:07d}", number % 8, 0)

def row(number):
    return {"x": np.full(16384, number % 256, dtype=np.uint8)}

def attach():
    return LmdbDataPlane(Path(sys.argv[1]), 1, attach=True, tensors="numpy", full_timeout=0.2)

async def take(plane):
    async with DataPlaneCheckpointBarrier().checkpoint() as cut:
        return plane.snapshot(cut)
"""

# ------------------------------------------------------------------------------------------------ constant
# cost


class Counting:
    """Stands in front of an LMDB object and notes its calls, and those of transactions that it begins."""

    def __init__(self, inner: Any, calls: list[str]) -> None:  # noqa: ANN401 - an LMDB object
        self._inner = inner
        self._calls = calls

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - an LMDB method
        method = getattr(self._inner, name)

        def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - whatever the method takes
            self._calls.append(name)
            result = method(*args, **kwargs)
            return Counting(result, self._calls) if name == "begin" else result

        return call


async def test_a_snapshot_takes_the_same_operations_however_many_rows(opened: Opened) -> None:
    """It clears dead readers, begins a read transaction and asks for the number of rows; nothing else."""
    plane = opened(map_bytes=64 * MIB)
    counted = []
    for rows in (0, 3000):
        plane.put({key(number): {"x": torch.ones(1)} for number in range(rows)})
        calls: list[str] = []
        env = plane._env  # noqa: SLF001 - counting its calls is the point
        plane._env = Counting(env, calls)  # noqa: SLF001 - as above
        snapshot = await take(plane)
        plane._env = env  # noqa: SLF001 - as above
        assert snapshot.rows == rows
        snapshot.release()
        counted.append(calls)
    assert counted == [["reader_check", "begin", "stat", "abort"]] * 2


def test_the_file_is_sparse(opened: Opened) -> None:
    """The default map is address space: an empty store takes next to no disk."""
    plane = opened(map_bytes=None)
    assert plane.map_bytes > 1 << 30 or plane.map_bytes == default_map_bytes(plane.path)
    assert sum(path.stat().st_blocks * 512 for path in plane.path.iterdir()) < MIB


@pytest.mark.parametrize(
    "free, expected",
    [(1 << 50, DEFAULT_MAP_BYTES), (8 << 30, 4 << 30), (1000, MIB)],
    ids=["large", "small", "none"],
)
def test_the_default_map_leaves_half_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, expected: int
) -> None:
    """A full store must not take the room of the checkpoints that are to save it."""
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=free, f_frsize=1))
    assert default_map_bytes(tmp_path) == expected


# ---------------------------------------------------------------------------------------------------- full
# maps


def test_a_full_map_without_a_snapshot_is_an_error_at_once(opened: Opened) -> None:
    """Nothing that is waited for could make room, so the put fails, naming the store and its size."""
    plane = opened()
    rows = fill(plane)
    assert rows > 30
    with pytest.raises(MapFullError, match=r"is full \(1,048,576 bytes of map\): no snapshot pins anything"):
        put(plane, rows)
    assert plane.statistics().rows == rows
    assert 0.8 < plane.statistics().map_used_ratio <= 1


def test_a_full_map_can_be_cleared_and_filled_again(opened: Opened) -> None:
    """Deleting needs free pages, and what it frees is there for the very next put, round after round."""
    plane = opened()
    rows = fill(plane)
    for number in range(rows):
        assert plane.clear([key(number)]) == 1
        put(plane, number)
    for _ in range(5):
        plane.clear(plane.keys())
        assert plane.statistics().map_used_ratio < 0.02
        for number in range(
            rows // 2
        ):  # a row needs pages side by side, so a used map never fills to the last one
            put(plane, number)


async def test_a_put_into_a_full_map_waits_for_the_snapshot(opened: Opened) -> None:
    """While a snapshot pins cleared rows a put waits in its thread; it goes on at the release."""
    plane = opened()
    rows = fill(plane)
    snapshot = await take(plane)
    waiting = asyncio.create_task(asyncio.to_thread(refill, plane, rows))
    await until_blocked(plane)
    assert not waiting.done()
    assert len(snapshot.missing([key(number) for number in range(rows)])) == 0
    snapshot.release()
    await waiting
    assert plane.statistics().rows == rows // 2
    assert plane.statistics().blocked_writers == 0


def refill(plane: LmdbDataPlane, rows: int) -> None:
    """Clear what is there and put half as much, which only fits where the cleared rows made room."""
    plane.clear([key(number) for number in range(rows)])
    for number in range(rows // 2):
        put(plane, number)


async def test_a_wait_for_room_has_a_deadline_that_names_the_pin(opened: Opened, tmp_path: Path) -> None:
    """Past it the put fails, naming the cut; the snapshot stays whole, and the plane works on."""
    plane = opened(full_timeout=0.05)
    rows = fill(plane)
    snapshot = await take(plane)
    with pytest.raises(MapFullError, match=f"the snapshot of cut {snapshot.cut_id} to be released") as caught:
        refill(plane, rows)
    assert caught.value.pins == (f"the snapshot of cut {snapshot.cut_id}",)
    assert snapshot.write(tmp_path, [key(number) for number in range(rows)], {}).rows == rows
    snapshot.release()
    plane.clear(plane.keys())
    put(plane, 0)


async def test_closing_wakes_a_put_that_waits_for_room(opened: Opened) -> None:
    """A writer that waits for room does not keep a run from ending."""
    plane = opened()
    rows = fill(plane)
    snapshot = await take(plane)
    waiting = asyncio.create_task(asyncio.to_thread(refill, plane, rows))
    await until_blocked(plane)
    await asyncio.to_thread(plane.close)
    with pytest.raises(DataPlaneClosedError):
        await waiting
    assert snapshot.released


def test_a_row_larger_than_the_map_is_refused(opened: Opened) -> None:
    """It can never fit; what was there is as it was."""
    plane = opened()
    put(plane, 0)
    with pytest.raises(MapFullError):
        put(plane, 1, size=2 * MIB)
    assert plane.keys() == [key(0)]


# ----------------------------------------------------------------------------------------------------
# processes


def test_several_processes_write_one_store(opened: Opened) -> None:
    """Processes that attach put and clear side by side; a row is there for all once its put returned."""
    plane = opened(map_bytes=64 * MIB)
    put(plane, 0)
    script = (
        "plane = attach(); start = int(sys.argv[2]); assert plane.missing([key(0)]) == ()\n"
        "for number in range(start, start + 100): plane.put({key(number): row(number)})\n"
        "plane.clear([key(start)]); print(plane.map_bytes)\n"
    )
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", PRELUDE + script, str(opened.folder), str(start)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for start in (100, 200)
    ]
    printed = [worker.communicate(timeout=50)[0].strip() for worker in workers]
    assert printed == [str(64 * MIB)] * 2
    expected = [key(0), *(key(number) for number in range(101, 300) if number != 200)]
    assert plane.keys() == expected
    assert plane.statistics().rows == len(expected)
    found = plane.get([key(150)])[0]["x"]
    assert found.tolist() == [150] * 16384


def test_a_reader_of_another_process_is_waited_for_and_named(opened: Opened) -> None:
    """Another process's snapshot pins pages, too: a put waits for it, and its deadline names the process."""
    plane = opened(full_timeout=0.2)
    rows = fill(plane)
    worker = start_holder(opened)
    try:
        with pytest.raises(MapFullError, match=f"a reader of process {worker.pid} to be released"):
            refill(plane, rows)
    finally:
        worker.kill()
        worker.communicate()


def test_a_killed_process_pins_nothing(opened: Opened) -> None:
    """The reader slot of a process that was killed is cleared when it is in the way, without waiting."""
    plane = opened(full_timeout=0.0)
    rows = fill(plane)
    worker = start_holder(opened)
    worker.send_signal(signal.SIGKILL)
    worker.communicate()
    assert f"{worker.pid} " in plane._env.readers()  # noqa: SLF001 - the lock table is the evidence
    refill(plane, rows)
    assert f"{worker.pid} " not in plane._env.readers()  # noqa: SLF001 - as above


async def test_a_snapshot_clears_the_slots_of_killed_processes(opened: Opened) -> None:
    """Each cut looks first, so that slots never run out."""
    plane = opened()
    worker = start_holder(opened)
    worker.kill()
    worker.communicate()
    snapshot = await take(plane)
    assert f"{worker.pid} " not in plane._env.readers()  # noqa: SLF001 - the lock table is the evidence
    snapshot.release()


def start_holder(opened: Opened) -> subprocess.Popen[str]:
    """Start a process that holds a snapshot until it is killed."""
    worker = subprocess.Popen(
        [
            sys.executable,
            "-c",
            PRELUDE
            + "plane = attach(); pin = asyncio.run(take(plane)); print('held', flush=True); sys.stdin.read()",
            str(opened.folder),
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert worker.stdout is not None
    assert worker.stdout.readline() == "held\n"
    return worker


def test_a_forked_child_is_refused(tmp_path: Path) -> None:
    """What was opened before a fork is refused in the child, pins too; the parent's stay as they are."""
    script = (
        "from quiesce.errors import ForkedDataPlaneError\n"
        "plane = LmdbDataPlane(Path(sys.argv[1]), 1, map_bytes=1 << 20, tensors='numpy')\n"
        "plane.put({key(0): row(0)}); pin = asyncio.run(take(plane))\n"
        "pid = os.fork()\n"
        "if not pid:\n"
        "    refused = 0\n"
        "    uses = (plane.keys, plane.close, plane.statistics, lambda: plane.missing([key(0)]), pin.keys)\n"
        "    for use in uses:\n"
        "        try: use()\n"
        "        except ForkedDataPlaneError: refused += 1\n"
        "    pin.release()\n"
        "    os._exit(refused)\n"
        "print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))\n"
        "plane.clear([key(0)]); print(len(list(pin.keys())), len(plane.keys()))\n"
        "pin.release(); plane.close()\n"
    )
    done = run_script(script, tmp_path)
    assert (done.stdout, done.returncode) == ("5\n1 0\n", 0), done.stderr


def test_a_failing_disk_is_an_error_of_that_put(opened: Opened) -> None:
    """A write that the system refuses (here: past a limit on file size) fails one put; reads go on."""
    opened(map_bytes=64 * MIB)
    script = (
        "import resource\n"
        "from quiesce.errors import StoreFailedError\n"
        "plane = attach(); plane.put({key(0): row(0)})\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "try: plane.put({key(number): row(number) for number in range(1, 200)})\n"
        "except StoreFailedError as error: print(error)\n"
        "print(len(plane.keys()), plane.get([key(0)])[0]['x'].sum())\n"
    )
    done = run_script(script, opened.folder)
    first, second = done.stdout.splitlines()
    assert first.startswith(f"put failed in the store {opened.folder}/i00000001: ")
    assert second == "1 0"


# ------------------------------------------------------------------------------------- folders and
# incarnations


def test_an_incarnation_begins_with_an_empty_store(opened: Opened) -> None:
    """A store that exists is never opened to begin with, closed or not, empty or not."""
    opened().close()
    with pytest.raises(StoreUsedError, match="i00000001 exists, and an incarnation begins with an empty one"):
        opened()


def test_older_stores_go_once_the_new_one_is_there(opened: Opened) -> None:
    """What a dead run left is removed; a worker that still has it open goes on alone and harms nobody."""
    old = opened(1)
    put(old, 0)
    unrelated = opened.folder / "notes"
    unrelated.mkdir()
    new = opened(2)
    assert sorted(path.name for path in opened.folder.iterdir()) == ["i00000002", "notes"]
    assert old.keys() == [key(0)]
    put(old, 1)
    assert new.keys() == []


def test_a_run_that_was_overtaken_cannot_begin(opened: Opened) -> None:
    """With a newer incarnation's store there, an older one is refused, and nothing is removed."""
    newer = opened(5)
    with pytest.raises(StoreUsedError, match="is of incarnation 4, and 5 has begun"):
        opened(4)
    put_key = RowKey(5, "g", 0, 0)
    newer.put({put_key: {"x": torch.ones(1)}})
    assert newer.keys() == [put_key]


def test_there_must_be_something_to_attach_to(opened: Opened) -> None:
    """Attaching creates nothing."""
    with pytest.raises(StoreUsedError, match="is not there to attach to"):
        opened(1, attach=True)
    assert not opened.folder.exists()


@pytest.mark.parametrize(
    "content, problem",
    [
        ("{", "cannot be read"),
        ("[]", "cannot be read"),
        ('{"format": 1, "incarnation": 2, "map_bytes": 1048576}', "is of format 1, incarnation 2"),
        ('{"format": 2, "incarnation": 1, "map_bytes": 1048576}', "is of format 2, incarnation 1"),
    ],
    ids=["not JSON", "no object", "incarnation", "format"],
)
def test_a_store_that_is_not_ours_is_refused(opened: Opened, content: str, problem: str) -> None:
    """What says something else than its folder's name is not attached to."""
    opened().close()
    (opened.folder / "i00000001" / "store.json").write_text(content)
    with pytest.raises(StoreUsedError, match=problem):
        opened(1, attach=True)


def test_a_map_too_small_to_work_is_refused(opened: Opened) -> None:
    """Under a MiB there is no room for the store's own pages."""
    with pytest.raises(ValueError, match=r"map_bytes is 4,096; a store needs at least 1,048,576"):
        opened(map_bytes=4096)


def test_a_store_is_opened_once_per_process(opened: Opened) -> None:
    """LMDB forbids it, and says so through an error of ours."""
    opened()
    with pytest.raises(StoreFailedError, match="already open in this process"):
        opened(attach=True)


def test_what_lmdb_raises_is_never_shown_raw(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any other failure of the library names the operation and the store."""
    plane = opened()

    class Broken:
        def begin(self, **_: object) -> object:
            raise lmdb.ReadersFullError("mdb_txn_begin", 0)

    env = plane._env  # noqa: SLF001 - the library's failure has to be made up
    monkeypatch.setattr(plane, "_env", Broken())
    for op, use in (
        ("keys", plane.keys),
        ("get", lambda: plane.get([key(0)])),
        ("missing", lambda: plane.missing([key(0)])),
        ("clear", lambda: plane.clear([key(0)])),
        ("put", lambda: put(plane, 0)),
    ):
        with pytest.raises(StoreFailedError, match=f"^{op} failed in the store .*i00000001: "):
            use()
    monkeypatch.setattr(plane, "_env", env)


async def test_a_snapshot_may_be_used_and_released_by_any_thread(opened: Opened) -> None:
    """It is taken on the loop's thread, written and released in others."""
    plane = opened()
    put(plane, 0)
    snapshot = await take(plane)
    found: list[RowKey] = []
    for work in (lambda: found.extend(snapshot.keys()), snapshot.release):
        thread = threading.Thread(target=work)
        thread.start()
        await asyncio.to_thread(thread.join)
    assert found == [key(0)]
    assert plane.statistics().open_snapshots == 0
