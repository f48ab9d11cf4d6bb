"""A training program for tests of telemetry in trouble; a test starts it as a process and ends it.

It says one line of JSON when it is where the test wants it, waits for a line, says when it goes on, and ends as it was
told to. Its barrier is built when the module is imported, so a spawned child, which imports it again, builds one too.
``TROUBLE`` in its environment is what it has to live with: ``disk``, a recorder that may fill the disk; ``files``, files
that cannot become long; ``observer``, one that raises whatever it is told. ``FLUSH`` is for how many seconds it flushes
at most.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import resource
import sys
import time
from collections.abc import Callable
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any, NoReturn

from quiesce import DataPlaneCheckpointBarrier, default_hub
from quiesce.invariants import Violation
from quiesce.observers import HOOKS
from quiesce.telemetry import enable
from quiesce.telemetry.assembly import RunTelemetry
from quiesce.telemetry.handle import HANDLES
from quiesce.telemetry.pipeline import CLOSE_SECONDS
from quiesce_exporters import recorder

TROUBLE = os.environ.get("TROUBLE", "")
LONGEST_FILE = 16_384
if TROUBLE in {"disk", "files"}:
    recorder.RESERVE_BYTES = 0  # type: ignore[misc] # it would leave the last of the disk alone, which is not what is tried
if TROUBLE == "files":
    # Python ignores the signal, so a write that goes too far fails as on a full disk, in part and then wholly.
    resource.setrlimit(resource.RLIMIT_FSIZE, (LONGEST_FILE, LONGEST_FILE))

BARRIER = DataPlaneCheckpointBarrier()
SLOTS = 2_000
FLUSH_SECONDS = float(os.environ.get("FLUSH", "0.3"))
BATCHES = 1_000


class Waits:
    """Keeps the longest wait of a slot."""

    longest_ns = 0
    slots = 0

    def slot_closed(self, kind: str, wait_ns: int, hold_ns: int, outcome: str, ended_ns: int) -> None:
        """Look at a slot."""
        self.slots += 1
        self.longest_ns = max(self.longest_ns, wait_ns)


class Broken:
    """Raises whatever it is told."""

    def __getattr__(self, hook: str) -> Callable[..., None]:
        """Return a hook that raises."""
        if hook not in HOOKS:
            raise AttributeError(hook)

        def raises(*_: object) -> None:
            raise ZeroDivisionError

        return raises


def say(**told: object) -> None:
    """Print one line."""
    print(json.dumps(told), flush=True)  # noqa: T201 - how it talks to the test


def end(how: str) -> None:
    """Wait for the word, then end."""
    sys.stdin.readline()
    say(now=time.monotonic())
    if how == "raise":
        message = "the optimizer caught fire"
        raise RuntimeError(message)


def flush_all(handles: list[enable.MetricsHandle]) -> None:
    """Flush telemetry, if there is any."""
    for handle in handles:
        handle.telemetry.flush(FLUSH_SECONDS)


def time_closing() -> None:
    """Have it said how long telemetry takes to close."""
    close = RunTelemetry.close

    def timed(self: RunTelemetry, deadline_seconds: float = CLOSE_SECONDS) -> None:
        since = time.monotonic()
        close(self, deadline_seconds)
        say(closed=time.monotonic() - since)

    RunTelemetry.close = timed  # type: ignore[method-assign] # for this process, which is about to end


def slots(how: str) -> None:
    """Open slots while telemetry is being flushed, leave a window open, and end."""
    waits = Waits()
    default_hub().subscribe(waits)
    broken = Broken()
    if TROUBLE == "observer":
        default_hub().subscribe(broken)
    handles = list(HANDLES)
    time_closing()

    async def work() -> Any:  # noqa: ANN401 - a window, kept open
        for _ in range(SLOTS):
            async with BARRIER.mutation("group_commit"):
                pass
        flush = asyncio.create_task(asyncio.to_thread(flush_all, handles))
        while not flush.done():
            async with BARRIER.mutation("retry"):
                await asyncio.sleep(0.001)
        window = BARRIER.checkpoint()
        await window.__aenter__()
        return window

    loop = asyncio.new_event_loop()
    window = loop.run_until_complete(work())
    say(slots=waits.slots, waited_ns=waits.longest_ns, urls=[handle.url for handle in handles])
    end(how)
    assert window is not None
    assert broken is not None


def save(folder: str) -> None:
    """Run a controller until it writes a checkpoint, and stay there."""
    from tests import run_rig

    class Stuck(run_rig.Weights):
        async def stage(self) -> Any:  # noqa: ANN401 - as below
            return self

        async def write(self, directory: Path) -> None:
            say(directory=directory.name)
            await asyncio.Event().wait()

    async def live() -> None:
        run_rig.Weights = Stuck  # type: ignore[misc] # what the rig gives to its controller
        path = Path(folder)
        run = run_rig.Run(path, in_memory=True)
        built = run.start(save_every_steps=1)
        hub = built._hub  # noqa: SLF001 - the rig makes it
        enable.enable_metrics("r1", 0, hub=hub, run_dir=path, exporters=["recorder", "otlp"])
        await built.run()

    asyncio.run(live())


def forks() -> None:
    """Count violations, then have children of every kind count theirs."""
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Numbers(Dataset[int]):
        def __getitem__(self, index: int) -> int:
            count(1)
            return index

        def __len__(self) -> int:
            return BATCHES

    torch.set_num_threads(1)
    count(5)
    batches = iter(DataLoader(Numbers(), batch_size=None, num_workers=4, multiprocessing_context="fork"))
    found = sum(1 for _ in batches)
    since = time.monotonic()
    del batches
    ended = {"loader": time.monotonic() - since}
    context: Any = multiprocessing.get_context("spawn")
    answers: SimpleQueue[bool] = context.SimpleQueue()
    served = {}
    served["spawned"], ended["spawned"] = spawned(context.Process(target=child, args=(answers,)), answers)
    served["forked"], ended["forked"] = forked()
    say(batches=found, ended=ended, served=served)
    end("return")


def spawned(process: Any, answers: SimpleQueue[bool]) -> tuple[bool, float]:  # noqa: ANN401 - of a context
    """Start a child, and return whether it served and how long it took to end."""
    process.start()
    served = answers.get()
    since = time.monotonic()
    process.join()
    assert process.exitcode == 0
    return served, time.monotonic() - since


def forked() -> tuple[bool, float]:
    """Fork a child that ends as a whole program does; return whether it served, and how long it took to end."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        again = DataPlaneCheckpointBarrier()
        count(1)
        os.write(write, b"%d" % (len(list(HANDLES)) and enable.is_enabled()))
        assert again.kinds
        leave()
    served = os.read(read, 1) != b"0"
    since = time.monotonic()
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    return served, time.monotonic() - since


def leave() -> NoReturn:
    """End with everything that ends a program."""
    sys.exit(0)


def child(answers: SimpleQueue[bool]) -> None:
    """Be a spawned child: build, count, and say whether anything is served from here."""
    again = DataPlaneCheckpointBarrier()
    count(1)
    answers.put(enable.is_enabled())
    assert again.kinds


def count(times: int) -> None:
    """Tell of violations."""
    for _ in range(times):
        default_hub().fire("invariant_violated", Violation("single_owner", "critical", "a test says so"))


MODES: dict[str, Callable[..., None]] = {"slots": slots, "save": save, "forks": forks}

if __name__ == "__main__":
    MODES[sys.argv[1]](*sys.argv[2:])
