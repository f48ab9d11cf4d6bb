"""The command line as a process that a test can watch, hold, signal and kill."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
DEADLINE_SECONDS = 100.0

SMALL = (
    "tiny",
    "task.size=40",
    "controller.groups_per_step=4",
    "controller.generations_per_group=2",
    "controller.max_steps=null",
    "controller.save_every_steps=2",
    "warmup.steps=1",
    "engine.max_new_tokens=2",
    "model.architecture.hidden_size=32",
    "model.architecture.intermediate_size=64",
    "model.architecture.num_hidden_layers=1",
    "metrics.port=0",
)
"""A run that takes ten steps to train each of its forty prompts, in about a second."""

STEPS = 10
PROMPTS = 40


class Gate:
    """Holds a run at a place; the test decides when it goes on.

    Args:
        folder: Where the two pipes go.
        place: See :mod:`tests.integration.cli_hooks`.
        nth: At which time.
        after: Counted from when the run comes to this place; "" counts from the start.
    """

    _made = 0

    def __init__(self, folder: Path, place: str, nth: int = 1, after: str = "") -> None:
        Gate._made += 1
        self.place = place
        self.nth = nth
        self.after = after
        self.pipes = [folder / f"gate-{Gate._made}-{name}" for name in ("reached", "release")]
        for pipe in self.pipes:
            os.mkfifo(pipe)
        self._reached, self._release = (os.open(pipe, os.O_RDWR | os.O_NONBLOCK) for pipe in self.pipes)

    @property
    def hook(self) -> dict[str, Any]:
        """What to give to the run."""
        reached, release = map(str, self.pipes)
        return {
            "hook": "pause",
            "place": self.place,
            "nth": self.nth,
            "after": self.after,
            "reached": reached,
            "release": release,
        }

    def wait(self, run: Run) -> None:
        """Wait until the run is held there."""
        readable, _, _ = select.select([self._reached], [], [], DEADLINE_SECONDS)
        if not readable:
            run.kill()
            pytest.fail(f"the run never came to {self.place}; it said:\n{run.output}")
        os.read(self._reached, 1)

    def open(self) -> None:
        """Let the run go on."""
        os.write(self._release, b"!")

    def close(self) -> None:
        """Let go of the pipes."""
        os.close(self._reached)
        os.close(self._release)


@dataclass
class Run:
    """One process of the command line."""

    pid: int
    zygote: Zygote = field(repr=False)
    out: Path
    err: Path

    def wait(self, timeout: float = DEADLINE_SECONDS) -> int:
        """Return the exit code; the negative number of the signal that ended it, if one did."""
        return self.zygote.wait(self.pid, timeout)

    def signal(self, number: int) -> None:
        """Send a signal to the process alone."""
        os.kill(self.pid, number)

    def interrupt(self) -> None:
        """Do what Ctrl-C does: every process of the terminal gets the signal."""
        os.killpg(self.pid, signal.SIGINT)

    def kill(self) -> None:
        """Kill it, and wait until it is gone."""
        self.signal(signal.SIGKILL)
        assert self.wait() == -signal.SIGKILL

    @property
    def stdout(self) -> str:
        """What it printed."""
        return self.out.read_text(encoding="utf-8")

    @property
    def stderr(self) -> str:
        """What it complained about."""
        return self.err.read_text(encoding="utf-8")

    @property
    def output(self) -> str:
        """Both."""
        return self.stdout + self.stderr


class Zygote:
    """The process that runs are forked from; see :mod:`tests.integration.cli_zygote`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._runs = 0
        self._codes: dict[int, int] = {}
        self._pending = b""
        self.log = folder / "zygote.log"
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.integration.cli_zygote"],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, **SINGLE_THREADED},
                bufsize=0,
            )

    def start(
        self, *argv: str, cwd: Path, hooks: Sequence[Mapping[str, Any]] = (), tty: str | None = None
    ) -> Run:
        """Start ``quiesce ARGV``."""
        self._runs += 1
        run = Run(0, self, *(self._folder / f"{self._runs}.{name}" for name in ("out", "err")))
        request = {"number": self._runs, "argv": argv, "cwd": str(cwd), "hooks": list(hooks), "tty": tty}
        request |= {"out": str(run.out), "err": str(run.err)}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not run.pid:
            answer = self._next(deadline)
            if answer.get("number") == self._runs:  # and not of a request that was given up
                run.pid = answer["started"]
                self._codes.pop(run.pid, None)  # of an earlier run that had this number
        return run

    def run(self, *argv: str, cwd: Path, hooks: Sequence[Mapping[str, Any]] = ()) -> tuple[int, Run]:
        """Run ``quiesce ARGV`` to its end."""
        run = self.start(*argv, cwd=cwd, hooks=hooks)
        return run.wait(), run

    def wait(self, pid: int, timeout: float) -> int:
        """Return how a run ended."""
        deadline = time.monotonic() + timeout
        while pid not in self._codes:
            self._next(deadline)
        return self._codes[pid]

    def close(self) -> None:
        """End it, and every run that is left."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(DEADLINE_SECONDS)
        self._process.stdout.close()

    def _next(self, deadline: float) -> dict[str, int]:
        assert self._process.stdout is not None
        while b"\n" not in self._pending:
            readable, _, _ = select.select(
                [self._process.stdout], [], [], max(0.0, deadline - time.monotonic())
            )
            data = os.read(self._process.stdout.fileno(), 65536) if readable else b""
            if not data:
                pytest.fail(f"no answer in time; {self.log.read_text()}")
            self._pending += data
        line, _, self._pending = self._pending.partition(b"\n")
        message: dict[str, int] = json.loads(line)
        if "ended" in message:
            self._codes[message["ended"]] = message["code"]
        return message


SINGLE_THREADED = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""A process that is forked must have no threads of its own."""
