"""Keeps a program running that answers on a loopback port, until it is told to stop.

Rule: a program that ends by itself is started again, a little later each time, on a port that is free then, and
:attr:`Supervised.error` says what happened meanwhile. Stopping takes at most :data:`STOP_SECONDS`, whatever the
program does; a death of this process takes the program along (see ``launch``). Every method that is awaited suspends;
the others never do. To be used on the main thread's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from quiesce.threads import DaemonExecutor
from quiesce.view.programs import environment_of

__all__ = ["STOP_SECONDS", "Command", "Supervised", "free_port", "start", "stop"]

STOP_SECONDS: Final = 1.5
"""How long a program may take to end by itself."""

READY_SECONDS: Final = 60.0
"""How long a program may take to be ready: one that reads a long log anew at its start takes its time."""

LOOK_SECONDS: Final = 0.1
RETRY_SECONDS: Final = (0.2, 1.0, 2.0, 5.0, 10.0)
STEADY_SECONDS: Final = 30.0
"""Once it has run for so long, its next end is its first."""

_LAUNCH: Final = Path(__file__).with_name("launch.py")
_LOG: Final = logging.getLogger("quiesce.view")
_TAIL: Final = 4096
_TOLD: Final = 300


@dataclass(frozen=True, slots=True)
class Command:
    """What to start.

    Attributes:
        program: The program.
        arguments: Its arguments.
    """

    program: Path
    arguments: Sequence[str]


def free_port() -> int:
    """Return a loopback port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def start(command: Command, folder: Path, log: Path) -> asyncio.subprocess.Process:
    """Start a program that ends with this process.

    Args:
        command: What to start.
        folder: Where it runs.
        log: Gets what it prints; what was in it is gone.

    Raises:
        OSError: If the log cannot be written, or no process can be made.
    """
    with log.open("wb") as output:
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-I",
            "-S",
            str(_LAUNCH),
            str(os.getpid()),
            str(command.program),
            *command.arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=folder,
            env=environment_of(command.program),
            start_new_session=True,  # Ctrl-C in the terminal is for us alone: we end what we started, in order
        )


async def stop(process: asyncio.subprocess.Process) -> None:
    """End a program and what it started: by asking, then by force."""
    for sign, seconds in ((signal.SIGTERM, STOP_SECONDS), (signal.SIGKILL, None)):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, sign)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), seconds)
            return


class Supervised:
    """A program that is kept running.

    Args:
        name: What people call it.
        make: Returns what to start, for a port.
        folder: Where it runs; its log lies there.
        pool: Where it is asked whether it is ready.

    Attributes:
        name: What people call it.
        error: Why it cannot be asked now; "" while it can.
        port: Where it listens; 0 until it was started.
        restarts: How often it was started again.
    """

    def __init__(self, name: str, make: Callable[[int], Command], folder: Path, pool: DaemonExecutor) -> None:
        self.name = name
        self.error = "it is being started"
        self.port = 0
        self.restarts = 0
        self._make = make
        self._folder = folder
        self._pool = pool
        self._process: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None

    @property
    def ok(self) -> bool:
        """Whether it can be asked now."""
        return not self.error

    @property
    def pid(self) -> int:
        """Its process; 0 if there is none now."""
        return 0 if self._process is None or self._process.returncode is not None else self._process.pid

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    def begin(self) -> None:
        """Start it, and keep it running."""
        self._task = asyncio.get_running_loop().create_task(self._keep())

    async def stop(self) -> None:
        """End it for good."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        if self._process is not None:
            await stop(self._process)
        self.error = "it was stopped"

    def signal(self, number: int) -> None:
        """Send it a signal, if it runs."""
        if self.pid:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    async def _keep(self) -> None:
        failures = 0
        while True:
            began = time.monotonic()
            why = await self._once()
            failures = 0 if time.monotonic() - began > STEADY_SECONDS else failures
            pause = RETRY_SECONDS[min(failures, len(RETRY_SECONDS) - 1)]
            failures += 1
            self.restarts += 1
            self.error = f"{why}; it is started again"
            _LOG.warning("%s %s", self.name, self.error)
            await asyncio.sleep(pause)

    async def _once(self) -> str:
        """Run it once, and return why it is over."""
        self.port = free_port()
        log = self._folder / f"{self.name.lower()}.log"
        try:
            self._process = process = await start(self._make(self.port), self._folder, log)
        except OSError as error:
            return f"could not be started ({error})"
        ended = asyncio.ensure_future(process.wait())
        try:
            ready = await self._ready(ended)
            if ready:
                if self.restarts:
                    _LOG.warning("%s is back", self.name)
                self.error = ""
                await asyncio.shield(ended)
            elif not ended.done():
                await stop(process)
                return f"was not ready after {READY_SECONDS:.0f} s; its log is {log}"
        finally:
            ended.cancel()
        code = process.returncode
        return f"ended ({_ending(code)}){'' if code is not None and code < 0 else _last_line(log)}"

    async def _ready(self, ended: asyncio.Future[int]) -> bool:
        until = time.monotonic() + READY_SECONDS
        loop = asyncio.get_running_loop()
        while not ended.done() and time.monotonic() < until:
            if await loop.run_in_executor(self._pool, _answers, self.port, "/-/ready"):
                return not ended.done()
            await asyncio.sleep(LOOK_SECONDS)
        return False


def _answers(port: int, path: str) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == http.HTTPStatus.OK
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def _ending(code: int | None) -> str:
    if code is None:
        return "unknown"
    if code < 0:
        with contextlib.suppress(ValueError):
            return signal.Signals(-code).name
    return f"exit code {code}"


def _last_line(log: Path) -> str:
    """Return the last line of a log that tells of an error, or else the last one."""
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - _TAIL))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    told = [line for line in lines if "level=error" in line or "level=ERROR" in line] or lines
    return f": {told[-1].strip()[:_TOLD]}" if told and told[-1].strip() else ""
