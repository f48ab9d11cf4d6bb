"""How a drill is asked for from another process: files in the run's folder ``drills/``.

======================  ============================================================================================
file                    says
======================  ============================================================================================
``desk.json``           that this run answers, and which process it is; there for as long as it does
``<id>.json``           what is asked for
``<id>.result.json``    how far that is, and in the end what came of it; rewritten as a whole
======================  ============================================================================================

Rule: a file is whole or not there, and what another process wrote is checked before it is believed. Nothing here suspends:
it blocks on the disk.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from quiesce.drills.drill import DrillResult
from quiesce.errors import DrillRefusedError

__all__ = [
    "DESK_FILE",
    "FOLDER",
    "Answer",
    "Request",
    "answer_file",
    "ask",
    "desk_of",
    "is_busy",
    "open_requests",
    "read_answer",
    "withdraw",
    "write_answer",
    "write_json",
]

FOLDER: Final = "drills"
"""The folder of a run in which drills are asked for and answered."""

DESK_FILE: Final = "desk.json"

MAX_BYTES: Final = 1 << 20
"""Size of a request or an answer beyond which it is not read."""

_FORMAT: Final = 1
_REQUEST: Final = re.compile(r"(d[0-9]{10,}-[0-9a-f]{8})\.json", re.ASCII)
_MOST_PATIENT: Final = 86_400.0


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked for.

    Attributes:
        id: Names the request.
        drill: Which drill.
        patience: Seconds to wait for something to break, and for the auditor to see it.
        asked_unix: When it was asked for.
    """

    id: str
    drill: str
    patience: float
    asked_unix: float


@dataclass(frozen=True, slots=True)
class Answer:
    """How far a request is.

    Attributes:
        id: The request's.
        state: ``looking`` for something to break, ``armed`` or ``broken``, ``fired``; in the end ``done`` or ``refused``.
        error: Why it was refused, or "".
        result: What came of it, once it is done.
    """

    id: str
    state: str
    error: str = ""
    result: DrillResult | None = None

    @property
    def final(self) -> bool:
        """Whether nothing more will come."""
        return self.state in {"done", "refused"}


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write a file that is whole or not there."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    temporary.write_text(json.dumps({"v": _FORMAT, **values}, indent=1) + "\n", encoding="utf-8")
    temporary.replace(path)


def answer_file(folder: Path, request: str) -> Path:
    """Return where the answer to a request is."""
    return folder / f"{request}.result.json"


def write_answer(folder: Path, answer: Answer) -> None:
    """Write an answer."""
    result = None if answer.result is None else answer.result.to_json()
    write_json(answer_file(folder, answer.id), {**asdict(answer), "result": result})


def read_answer(folder: Path, request: str) -> Answer | None:
    """Return how far a request is; None if nobody has looked at it, or what is there is no answer."""
    values = _read(answer_file(folder, request))
    try:
        if values is None or values["id"] != request:
            return None
        result = None if values["result"] is None else DrillResult.from_json(values["result"])
        return Answer(request, str(values["state"]), str(values["error"]), result)
    except (KeyError, TypeError, ValueError):
        return None


def open_requests(folder: Path) -> list[Request]:
    """Return the requests that were not answered, the oldest first; what is no request is passed over."""
    # Not by their ids: two of one millisecond differ in a random part only.
    return sorted(_open_requests(folder), key=lambda request: (request.asked_unix, request.id))


def _open_requests(folder: Path) -> Iterator[Request]:
    for path in folder.glob("d*.json"):
        found = _REQUEST.fullmatch(path.name)
        if found is None or answer_file(folder, found[1]).exists():
            continue
        values = _read(path)
        try:
            if values is not None:
                patience = min(max(0.0, float(values["patience"])), _MOST_PATIENT)
                yield Request(found[1], str(values["drill"]), patience, float(values["asked_unix"]))
        except (KeyError, TypeError, ValueError):
            continue


def desk_of(run: Path) -> dict[str, Any]:
    """Return what a run says of its desk.

    Raises:
        DrillRefusedError: If it is no run folder, does not run, or answers no drills; the message says which.
    """
    if not run.is_dir() or not (run / "incarnation").exists():
        raise DrillRefusedError(run, "it is no run folder")
    desk = _read(run / FOLDER / DESK_FILE)
    if desk is not None and _lives(desk):
        return desk
    lock = _read_any(run / "run.lock")
    if lock is not None and _lives(lock):
        raise DrillRefusedError(
            run,
            "it answers no drills: it is starting or ending, or was not started with them allowed, because they break its "
            "state on purpose (controller.audit.drills=true; without --run-dir a throw-away run is made)",
        )
    raise DrillRefusedError(
        run, "it does not run, so there is nothing to break (without --run-dir a throw-away run is made)"
    )


def ask(run: Path, drill: str, *, patience: float) -> Request:
    """Ask a running run for a drill.

    Args:
        run: Its folder.
        drill: Which.
        patience: See :attr:`Request.patience`.

    Raises:
        DrillRefusedError: If it answers none.
        OSError: If the request cannot be written.
    """
    desk_of(run)
    now = time.time()
    request = Request(f"d{int(now * 1000):013d}-{secrets.token_hex(4)}", drill, patience, now)
    write_json(run / FOLDER / f"{request.id}.json", asdict(request))
    return request


def is_busy(folder: Path) -> bool:
    """Whether some request is being answered now."""
    names = (path.name.removesuffix(".result.json") for path in folder.glob("d*.result.json"))
    return any(
        answer is not None and not answer.final for answer in (read_answer(folder, name) for name in names)
    )


def withdraw(run: Path, request: str) -> None:
    """Take a request back, should nobody have looked at it."""
    (run / FOLDER / f"{request}.json").unlink(missing_ok=True)


def _lives(who: dict[str, Any]) -> bool:
    """Whether a process that left its name is there; one of another host is taken to be."""
    try:
        if who["host"] != socket.gethostname():
            return True
        os.kill(int(who["pid"]), 0)
    except ProcessLookupError:
        return False
    except (KeyError, TypeError, ValueError):
        return False
    except PermissionError:
        return True
    return True


def _read(path: Path) -> dict[str, Any] | None:
    values = _read_any(path)
    return values if values is not None and values.get("v") == _FORMAT else None


def _read_any(path: Path) -> dict[str, Any] | None:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        values = json.loads(data) if len(data) <= MAX_BYTES else None
    except (OSError, ValueError):
        return None
    return values if isinstance(values, dict) else None
