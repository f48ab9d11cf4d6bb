"""How a drill is asked for from another process."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest

from quiesce.drills import DrillResult, Fired
from quiesce.drills.requests import (
    DESK_FILE,
    FOLDER,
    Answer,
    answer_file,
    ask,
    desk_of,
    is_busy,
    open_requests,
    read_answer,
    withdraw,
    write_answer,
    write_json,
)
from quiesce.errors import DrillRefusedError

GONE = 2**22 + 1
"""A process id that Linux does not give out."""


def a_run(path: Path, *, pid: int | None = None, host: str | None = None) -> Path:
    """Return a run's folder, with a desk of that process if one is named."""
    (path / FOLDER).mkdir(parents=True)
    (path / "incarnation").write_text("1")
    if pid is not None:
        desk = {"pid": pid, "host": host or socket.gethostname()}
        write_json(path / FOLDER / DESK_FILE, desk)
    return path


def a_result() -> DrillResult:
    """Return what came of some drill."""
    fired = Fired("single_owner", "critical", 0.2, "1.0", "sweep", "two owners", ("e000-p0000001",))
    return DrillResult("d", ("single_owner",), (fired,), {"rows_present": "no rows"}, 1.5, ("e000-p0000001",))


def test_a_request_is_found_once_and_answered(tmp_path: Path) -> None:
    """It is open until there is an answer; the answer comes back as it was given."""
    run = a_run(tmp_path, pid=os.getpid())
    request = ask(run, "early-cursor", patience=5.0)
    assert open_requests(run / FOLDER) == [request]
    assert read_answer(run / FOLDER, request.id) is None
    assert not is_busy(run / FOLDER)

    write_answer(run / FOLDER, Answer(request.id, "looking"))

    assert open_requests(run / FOLDER) == []
    assert read_answer(run / FOLDER, request.id) == Answer(request.id, "looking")
    assert is_busy(run / FOLDER)

    write_answer(run / FOLDER, Answer(request.id, "done", result=a_result()))

    answer = read_answer(run / FOLDER, request.id)
    assert answer == Answer(request.id, "done", result=a_result())
    assert answer.final
    assert not is_busy(run / FOLDER)


def test_a_request_that_is_withdrawn_is_gone(tmp_path: Path) -> None:
    """Whoever interrupts the command does not break the run a minute later."""
    run = a_run(tmp_path, pid=os.getpid())
    request = ask(run, "early-cursor", patience=5.0)

    withdraw(run, request.id)

    assert open_requests(run / FOLDER) == []


def test_the_oldest_request_comes_first(tmp_path: Path) -> None:
    """One after the other, in the order of asking."""
    run = a_run(tmp_path, pid=os.getpid())
    write_json(run / FOLDER / f"d{2:013d}-00000000.json", {"drill": "b", "patience": 1, "asked_unix": 2})
    write_json(run / FOLDER / f"d{1:013d}-ffffffff.json", {"drill": "a", "patience": 1, "asked_unix": 1})

    assert [request.drill for request in open_requests(run / FOLDER)] == ["a", "b"]


def test_two_requests_of_one_millisecond_come_in_the_order_of_asking(tmp_path: Path) -> None:
    """Their ids differ in a random part alone, which says nothing of it."""
    run = a_run(tmp_path, pid=os.getpid())
    for tail, drill, asked in (("ffffffff", "a", 1.0001), ("00000000", "b", 1.0002)):
        path = run / FOLDER / f"d{1000:013d}-{tail}.json"
        write_json(path, {"drill": drill, "patience": 1, "asked_unix": asked})

    assert [request.drill for request in open_requests(run / FOLDER)] == ["a", "b"]


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '{"v": 1}', '{"v": 2, "drill": "x", "patience": 1, "asked_unix": 1}', "x" * (2 << 20)],
    ids=["empty", "torn", "list", "bare", "another-version", "large"],
)
def test_what_is_no_request_is_passed_over(tmp_path: Path, content: str) -> None:
    """A file that somebody else left there breaks nothing."""
    run = a_run(tmp_path, pid=os.getpid())
    (run / FOLDER / f"d{1:013d}-00000000.json").write_text(content)
    (run / FOLDER / "d-of-somebody.json").write_text("{}")

    assert open_requests(run / FOLDER) == []


def test_an_answer_that_is_torn_is_none(tmp_path: Path) -> None:
    """As if nobody had looked yet."""
    run = a_run(tmp_path, pid=os.getpid())
    answer_file(run / FOLDER, "d1").write_text(json.dumps({"v": 1, "id": "d1", "state": "done", "error": ""}))

    assert read_answer(run / FOLDER, "d1") is None


def test_only_a_run_that_answers_is_asked(tmp_path: Path) -> None:
    """The refusal says what is the matter: no run, not running, no drills allowed."""
    with pytest.raises(DrillRefusedError, match="no run folder"):
        ask(tmp_path, "x", patience=1.0)
    with pytest.raises(DrillRefusedError, match="does not run"):
        ask(a_run(tmp_path / "ended"), "x", patience=1.0)
    with pytest.raises(DrillRefusedError, match="does not run"):
        ask(a_run(tmp_path / "killed", pid=GONE), "x", patience=1.0)
    strict = a_run(tmp_path / "strict")
    (strict / "run.lock").write_text(json.dumps({"pid": os.getpid(), "host": socket.gethostname()}))
    with pytest.raises(DrillRefusedError, match=r"controller\.audit\.drills=true"):
        ask(strict, "x", patience=1.0)
    assert [path for path in tmp_path.rglob("d*.json") if path.name != DESK_FILE] == []


def test_a_desk_of_another_host_is_believed(tmp_path: Path) -> None:
    """On a shared disk its process cannot be looked up from here."""
    run = a_run(tmp_path, pid=GONE, host="elsewhere")

    assert desk_of(run)["host"] == "elsewhere"
