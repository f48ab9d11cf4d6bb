"""The desk of a running run: it does the drills that another process asks for, one after the other.

A run has one only if it was started with drills allowed, because a drill breaks its state on purpose.

Rule: a request is answered, whatever comes of it, and never twice; one that was made before this desk was opened is refused.
Yield rule: :meth:`DrillDesk.run` suspends; files are read and written in a thread.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
import time
from typing import TYPE_CHECKING, Final

from quiesce.drills import requests
from quiesce.drills.catalogue import find_drill
from quiesce.drills.perform import perform
from quiesce.drills.requests import Answer, Request
from quiesce.errors import QuiesceError
from quiesce.threads import DaemonExecutor

if TYPE_CHECKING:
    from pathlib import Path

    from quiesce.drills.drill import DrillResult
    from quiesce.drills.target import DrillTarget

__all__ = ["DrillDesk"]

_LOG: Final = logging.getLogger("quiesce.drills")

LOOK_SECONDS: Final = 0.25
"""How often requests are looked for."""


class DrillDesk:
    """Answers requests for drills; see :mod:`quiesce.drills.requests`.

    Args:
        target: The run.
        look_seconds: How often requests are looked for.
    """

    def __init__(self, target: DrillTarget, *, look_seconds: float = LOOK_SECONDS) -> None:
        self._target = target
        self._folder: Path = target.folder.path / requests.FOLDER
        self._look_seconds = look_seconds
        self._since = time.time()
        self._executor = DaemonExecutor("quiesce-drill-desk", 1)
        self._answered: set[str] = set()
        self._over: set[str] = set()
        self._writing = threading.Lock()
        self.done: list[DrillResult] = []
        """What came of the drills so far."""

    async def run(self) -> None:
        """Answer requests until cancelled.

        Raises:
            OSError: If the folder of requests cannot be made or read.
        """
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._executor, self._open)
        _LOG.warning(
            "this run answers drills, which break its state on purpose: ask for them with `quiesce drill`"
        )
        try:
            while True:
                found = await loop.run_in_executor(self._executor, self._next)
                if found is None:
                    await asyncio.sleep(self._look_seconds)
                else:
                    await self._answer(found)
        finally:
            (self._folder / requests.DESK_FILE).unlink(missing_ok=True)
            self._executor.shutdown(wait=False)

    def _open(self) -> None:
        """Runs in a thread."""
        self._folder.mkdir(exist_ok=True)
        requests.write_json(
            self._folder / requests.DESK_FILE,
            {
                "pid": os.getpid(),
                "host": socket.gethostname(),
                "incarnation": self._target.dataplane.incarnation,
                "since_unix": self._since,
            },
        )

    def _next(self) -> Request | None:
        """Runs in a thread: return the oldest request that was not answered."""
        return next(
            (found for found in requests.open_requests(self._folder) if found.id not in self._answered), None
        )

    async def _answer(self, request: Request) -> None:
        self._answered.add(request.id)
        last = Answer(request.id, "refused", "the run ended before the drill was over")
        try:
            if request.asked_unix < self._since:
                last = Answer(request.id, "refused", "it was asked of an earlier incarnation of the run")
                return
            drill = find_drill(request.drill)
            _LOG.warning("drill %r begins (request %s)", drill.name, request.id)
            result = await perform(
                self._target,
                drill,
                patience=request.patience,
                progress=lambda state: self._tell(Answer(request.id, state)),
            )
            self.done.append(result)
            fired = ", ".join(fired.invariant for fired in result.fired) or "nothing"
            _LOG.warning(
                "drill %r is over: %s fired, %s",
                drill.name,
                fired,
                "as expected" if result.ok else "which is wrong",
            )
            last = Answer(request.id, "done", result=result)
        except QuiesceError as error:
            last = Answer(request.id, "refused", str(error))
        except Exception as error:  # noqa: BLE001 - of a drill, which must not end the run
            _LOG.exception("drill %r failed", request.drill)
            last = Answer(request.id, "refused", f"the drill failed: {error!r}")
        finally:
            self._write(last)  # also when the run ends: there is no await between here and the end

    def _tell(self, answer: Answer) -> None:
        self._executor.submit(self._write, answer)

    def _write(self, answer: Answer) -> None:
        """The last answer is written on the loop, and one before it, in the thread, may come late."""
        try:
            with self._writing:
                if answer.final:
                    self._over.add(answer.id)
                elif answer.id in self._over:
                    return
                requests.write_answer(self._folder, answer)
        except OSError as error:
            _LOG.error("the answer to drill request %s cannot be written: %s", answer.id, error)
