"""What a test can do to a run from inside its process, before it starts: hold it somewhere, break something.

Rule: a place is named and counted, so a run is held or broken at one exact moment, however fast the machine is.

Places: ``phase:NAME`` (a checkpoint's phase begins), ``hook:NAME`` (any other hook), ``file:OPERATION:START`` (before a file
operation of a save on a path whose name starts so), ``call:MODULE:NAME`` (before a function is called).
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from quiesce import default_hub
from quiesce.checkpoint import files
from quiesce.invariants import Violation


def pause(place: str, nth: int, reached: str, release: str, after: str = "") -> None:
    """Hold the run at the nth time that it comes to a place; two named pipes say so and let it go.

    The times are counted once the run has come to the place ``after``, if there is one.
    """

    def hold() -> None:
        with Path(reached).open("wb", buffering=0) as pipe:
            pipe.write(b"!")
        with Path(release).open("rb", buffering=0) as pipe:
            pipe.read(1)

    if after:
        counts = threading.Event()
        _at(after, 1, counts.set)
        _at(place, nth, hold, counts.is_set)
    else:
        _at(place, nth, hold)


def break_files(number: int, operations: list[str], when: str) -> None:
    """Let file operations fail with an error number, from the moment that the run's state is ``when``."""
    broken = threading.Event()
    inner = files.before

    class Watch:
        def run_state_changed(self, state: str) -> None:
            if state == when:
                broken.set()

    def before(operation: str, path: Path) -> None:
        if broken.is_set() and operation in operations:
            raise OSError(number, os.strerror(number), str(path))
        inner(operation, path)

    _keep(Watch())
    files.before = before


def distrust_cuts(when: str) -> None:
    """Let every cut break an invariant, from the moment that the run's state is ``when``."""
    saver: Any = importlib.import_module("quiesce.checkpoint.saver")
    broken = threading.Event()
    inner = saver.check_cut

    class Watch:
        def run_state_changed(self, state: str) -> None:
            if state == when:
                broken.set()

    def check_cut(*args: object) -> list[Violation]:
        found = list(inner(*args))
        if broken.is_set():
            found.append(Violation("single_owner", "critical", "a test says so"))
        return found

    _keep(Watch())
    saver.check_cut = check_cut


def stop_at(place: str, nth: int) -> None:
    """Send the process SIGTERM at the nth time that it comes to a place."""
    _at(place, nth, lambda: os.kill(os.getpid(), signal.SIGTERM))


def fail_step(nth: int) -> None:
    """Let the nth train step raise what no Quiesce error is."""

    def fail() -> None:
        raise RuntimeError("the optimizer caught fire")

    _at("call:quiesce_grpo.trainer:GrpoTrainer._optimise", nth, fail)


def note_completions(path: str) -> None:
    """Write what every row of a trained batch holds, a line each, when its step begins."""
    trainer: Any = importlib.import_module("quiesce_grpo.trainer").GrpoTrainer
    inner = trainer.train_step

    async def train_step(self: object, batch: Any) -> Any:  # noqa: ANN401 - passed on
        with Path(path).open("a", encoding="utf-8") as out:
            for entry, rows in zip(batch.entries, batch.rows, strict=True):
                for generation, row in enumerate(rows):
                    names = {
                        "tokens": "completion_tokens",
                        "logprobs": "behaviour_logprobs",
                        "versions": "versions",
                    }
                    told = {name: row[field].tolist() for name, field in names.items()}
                    out.write(json.dumps({"group": entry.group_id, "generation": generation, **told}) + "\n")
        return await inner(self, batch)

    trainer.train_step = train_step


_KEPT: list[object] = []


def _keep(observer: object) -> None:
    _KEPT.append(observer)
    default_hub().subscribe(observer)


def _at(place: str, nth: int, action: Callable[[], None], counts: Callable[[], bool] = lambda: True) -> None:
    left = [nth]
    lock = threading.Lock()

    def come(*_: object, **__: object) -> None:
        with lock:
            left[0] -= counts()
            now = left[0] == 0 and counts()
        if now:
            action()

    kind, _, rest = place.partition(":")
    if kind == "phase":
        _keep(_observer("phase_started", lambda _cut, phase: come() if phase == rest else None))
    elif kind == "hook":
        _keep(_observer(rest, come))
    elif kind == "file":
        operation, _, start = rest.partition(":")
        inner = files.before

        def before_place(done: str, path: Path) -> None:
            if done == operation and path.name.startswith(start):
                come()
            inner(done, path)

        files.before = before_place  # type: ignore[assignment] # positional everywhere
    else:
        module, _, name = rest.partition(":")
        owner: Any = importlib.import_module(module)
        *outer, name = name.split(".")
        for part in outer:
            owner = getattr(owner, part)
        called = getattr(owner, name)

        def calling(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - passes on what it gets
            come()
            return called(*args, **kwargs)

        setattr(owner, name, calling)
        if module in sys.modules and outer == []:
            _replace_imports(called, calling)


def _replace_imports(called: object, calling: object) -> None:
    """A function that was imported by name is called by that name."""
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith("quiesce"):
            for name, value in list(vars(module).items()):
                if value is called:
                    setattr(module, name, calling)


def _observer(hook: str, function: Callable[..., None]) -> object:
    return type("Observer", (), {hook: staticmethod(function)})()
