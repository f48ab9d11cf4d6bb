"""Runs functions in processes of their own, forked from one that has imported everything and started nothing.

Rule: the server has no thread and no event loop, so a child starts like a fresh process, in milliseconds and with torch
at hand; and whatever ends a child, SIGKILL included, is an answer. One call at a time for each server; a pool has one
server for each processor.

The protocol is one JSON object a line. In: ``function`` (``module:name``) and ``args``. Out: ``code`` (0, or minus the
signal), ``result`` and ``error``.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import logging
import os
import select
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")

ROOT = Path(__file__).parents[2]
DEADLINE_SECONDS = 40.0
"""After so long a child hangs; it is killed and named."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a child ended.

    Attributes:
        code: 0, a positive exit code, or minus the signal that ended it.
        result: What the function returned, if it did.
        error: What it raised, as a traceback; "" if it did not.
    """

    code: int
    result: Any
    error: str

    @property
    def killed(self) -> bool:
        """Whether SIGKILL ended it."""
        return self.code == -signal.SIGKILL and not self.error

    def value(self) -> Any:  # noqa: ANN401 - what the function returned
        """Return the result of a child that was to end by itself."""
        assert self.code == 0, f"the child ended with {self.code}: {self.error}"
        return self.result


class ForkServer:
    """One server."""

    def __init__(self) -> None:
        paths = os.pathsep.join([str(ROOT), *sys.path])
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.crash.forkserver"],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def call(self, function: str, **args: Any) -> Ended:  # noqa: ANN401 - JSON values
        """Run a function in a child of its own and say how that ended.

        Args:
            function: ``module:name``.
            **args: Its arguments, as JSON values.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with self._lock:
            self._process.stdin.write(json.dumps({"function": function, "args": args}) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        assert answer, f"the fork server is gone ({self._process.poll()})"
        return Ended(**json.loads(answer))

    def close(self) -> None:
        """End it."""
        self._process.communicate()


class ForkPool:
    """A few servers, and calls spread over them."""

    def __init__(self, size: int = 2) -> None:
        self._servers = [ForkServer() for _ in range(size)]
        self._free = list(self._servers)
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def server(self) -> Iterator[ForkServer]:
        """Borrow a server that nobody else uses meanwhile."""
        with self._lock:
            server = self._free.pop()
        try:
            yield server
        finally:
            with self._lock:
                self._free.append(server)

    def each(self, items: Iterable[T], work: Callable[[ForkServer, T], Any]) -> list[Any]:
        """Do something for each item, as many at a time as there are servers; return what came out, in order."""

        def one(item: T) -> Any:  # noqa: ANN401 - whatever the work returns
            with self.server() as server:
                return work(server, item)

        with ThreadPoolExecutor(len(self._servers)) as threads:
            return list(threads.map(one, items))

    def call(self, function: str, **args: Any) -> Ended:  # noqa: ANN401 - JSON values
        """Call one function."""
        with self.server() as server:
            return server.call(function, **args)

    def close(self) -> None:
        """End all of them."""
        for server in self._servers:
            server.close()


# ------------------------------------------------------------------------------------------------- the server's side


def main() -> None:
    """Serve until standard input ends."""
    _import_everything()
    for line in sys.stdin:
        request = json.loads(line)
        answers, tell = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(answers)
            _child(request, tell)
        os.close(tell)
        answer = _read(answers, pid)
        _, status = os.waitpid(pid, 0)
        told = json.loads(answer) if answer else {"result": None, "error": ""}
        sys.stdout.write(json.dumps({"code": os.waitstatus_to_exitcode(status), **told}) + "\n")
        sys.stdout.flush()


def _import_everything() -> None:
    import numpy.ctypeslib  # noqa: F401 - loaded here once, instead of in every child
    import safetensors.torch  # noqa: F401 - as above
    import torch
    import torch.distributed.checkpoint.default_planner
    import torch.distributed.checkpoint.hf_storage

    import tests.crash.lives
    import tests.crash.runs  # noqa: F401 - as above

    torch.set_num_threads(1)
    logging.getLogger("quiesce").addHandler(logging.NullHandler())  # what is provoked here is no news
    gc.collect()
    gc.freeze()  # so that a child's first collection does not copy every page


def _read(answers: int, pid: int) -> bytes:
    pieces: list[bytes] = []
    with os.fdopen(answers, "rb", buffering=0) as pipe:
        while True:
            ready, _, _ = select.select([pipe], [], [], DEADLINE_SECONDS)
            if not ready:
                os.kill(pid, signal.SIGKILL)
                return json.dumps({"result": None, "error": "it hung"}).encode()
            piece = pipe.read(1 << 20)
            if not piece:
                return b"".join(pieces)
            pieces.append(piece)


def _child(request: dict[str, Any], tell: int) -> NoReturn:
    try:
        module, _, name = request["function"].partition(":")
        told = {"result": getattr(importlib.import_module(module), name)(**request["args"]), "error": ""}
    except BaseException:  # noqa: BLE001 - whatever it was, the caller wants to read it
        told = {"result": None, "error": traceback.format_exc()}
    answer = json.dumps(told).encode()
    while answer:
        answer = answer[os.write(tell, answer) :]
    os._exit(1 if told["error"] else 0)


if __name__ == "__main__":
    main()
