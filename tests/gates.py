"""Helpers for tests of snapshot gates: threads that are ordered by events, and what to wait for."""

from __future__ import annotations

import asyncio
import inspect
import sys
import threading
import time
import types
from collections.abc import Callable
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

from quiesce import snapshot_gate
from quiesce.observers import Hub
from quiesce.snapshot_gate import CloseAnswer, Epoch, Permit, SnapshotGate

P = ParamSpec("P")
T = TypeVar("T")

PATIENCE = 20.0
"""Seconds after which what should have happened did not."""


def started(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
    """Run a call in a thread of its own."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            result = function(*args, **kwargs)
        except BaseException as error:  # noqa: BLE001 - the test gets it through the future
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name="started", daemon=True).start()
    return future


def eventually(holds: Callable[[], bool]) -> None:
    """Look, again and again, until something holds that another thread brings about."""
    deadline = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < deadline, "it never came about"
        threading.Event().wait(0.001)


def cleanups() -> set[threading.Thread]:
    """Return the threads that clear, also those of earlier tests that are about to end."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("quiesce-cleanup")}


class Writer:
    """A thread that takes a permit and holds it until it is told to go on.

    Attributes:
        inside: Set once it has the permit.
    """

    def __init__(self, gate: SnapshotGate, name: str = "writer") -> None:
        self.inside = threading.Event()
        self.may_go = threading.Event()
        self.permit: Permit | None = None
        self.error: BaseException | None = None
        self._gate = gate
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            with self._gate.permit() as permit:
                self.permit = permit
                self.inside.set()
                assert self.may_go.wait(PATIENCE)
        except BaseException as error:  # noqa: BLE001 - for the test to look at
            self.error = error

    def entered(self) -> Writer:
        """Wait until it has the permit."""
        assert self.inside.wait(PATIENCE), "the writer never got in"
        return self

    def waiting(self) -> Writer:
        """Wait until it waits at the closed gate, behind those that wait there already."""
        eventually(lambda: self._gate.statistics().waiting > 0)
        return self

    def finish(self) -> None:
        """Let it go on, and wait for its end."""
        self.may_go.set()
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive()
        assert self.error is None


class Closings:
    """An observer that tells when a gate began to close."""

    def __init__(self) -> None:
        self._begun: dict[str, threading.Event] = {}
        self._lock = threading.Lock()

    def of(self, epoch: Epoch) -> threading.Event:
        """Return what is set once the gate closes for that epoch."""
        with self._lock:
            return self._begun.setdefault(str(epoch), threading.Event())

    def gate_closing(self, worker: str, sequence: int, epoch: str) -> None:
        """Note it."""
        self.of(Epoch.parse(epoch)).set()


class RemoteGate:
    """The handle of a worker that messages reach one by one: they can be lost, held up, and answered wrongly.

    Attributes:
        gate: The worker's gate; another one after :meth:`restart`.
        alive: Whether the worker lives.
        calls: What arrived, as (what, epoch).
        lose: How many of the next messages of a kind are lost on the way there.
        hold: Messages of a kind are held up on the way there until the event is set.
        answers: What a kind of message is answered with, instead of what the gate says.
    """

    def __init__(self, worker: str = "9") -> None:
        self.worker = worker
        self.gate = SnapshotGate(worker, hub=Hub(strict=True))
        self.alive = True
        self.calls: list[tuple[str, Epoch]] = []
        self.times: list[float] = []
        self.lose: dict[str, int] = {}
        self.hold: dict[str, asyncio.Event] = {}
        self.answers: dict[str, object] = {}

    @property
    def instance(self) -> str:
        """The gate's."""
        return self.gate.instance

    def restart(self) -> None:
        """Die, and be started anew under the same label."""
        self.gate = SnapshotGate(self.worker, hub=Hub(strict=True))

    async def close(self, epoch: Epoch, timeout: float) -> CloseAnswer:
        """Deliver it; permits that are out are an error at once."""
        await self._deliver("close", epoch)
        answer = self.gate.close_and_wait(epoch, timeout=0)
        return self.answers.get("close", answer)  # type: ignore[return-value] # perhaps a wrong one

    async def closed_in(self, epoch: Epoch) -> bool:
        """Deliver it."""
        await self._deliver("closed_in", epoch)
        return bool(self.answers.get("closed_in", self.gate.closed_in(epoch)))

    async def reopen(self, epoch: Epoch) -> None:
        """Deliver it."""
        await self._deliver("reopen", epoch)
        self.gate.reopen(epoch)

    async def _deliver(self, what: str, epoch: Epoch) -> None:
        self.times.append(asyncio.get_running_loop().time())
        if self.lose.get(what, 0) > 0:
            self.lose[what] -= 1
            raise ConnectionError(f"{what} was lost")
        if what in self.hold:
            await self.hold[what].wait()
        else:
            await asyncio.sleep(0)
        self.calls.append((what, epoch))


def broken_gate(old: str, new: str) -> types.ModuleType:
    """Return the module of the gate with one piece of its text replaced."""
    source = inspect.getsource(snapshot_gate)
    assert source.count(old) == 1, f"the gate has {source.count(old)} times: {old}"
    module = types.ModuleType(f"broken_gate_{abs(hash((old, new)))}")
    sys.modules[module.__name__] = module  # where dataclasses look names up
    try:
        exec(compile(source.replace(old, new), module.__name__, "exec"), module.__dict__)  # noqa: S102 - our own text
    finally:
        del sys.modules[module.__name__]
    return module
