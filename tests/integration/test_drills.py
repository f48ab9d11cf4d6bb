"""``quiesce drill`` as a person meets it, in real time."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import quiesce.drills
from quiesce import GenerationRequest, GroupResult, RunSummary
from quiesce.audit_config import AuditConfig
from quiesce.auditor import read_violations
from quiesce.cli.main import main
from quiesce.drills import DRILLS, Drill, DrillTarget
from quiesce.drills.holes import Holes
from quiesce.drills.requests import DESK_FILE, FOLDER
from quiesce.training import TrainBatch
from tests.alert_receiver import until
from tests.run_rig import Run, result_of, sampler


def test_a_drill_in_a_run_of_its_own_says_what_fired(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Invariant, message, alert, verdict; its folder is kept where that is asked for, the record named by the drill."""
    kept = tmp_path / "kept"

    code = main(["drill", "early-cursor", "--keep", str(kept)])

    out, err = capfd.readouterr()
    assert code == 0
    assert "cursor_covers_buffer" in out
    assert "QuiesceCursorBufferSkew" in out
    assert "Exactly what it breaks fired, once each." in out
    assert "Traceback" not in err
    assert "the next checkpoint will show it" in err
    assert {record.evidence["drill"] for record in read_violations(kept)} == {"early-cursor"}
    assert len(list((kept / "checkpoints").glob("step_*.suspect"))) == 1
    events = [json.loads(line) for line in (kept / "log.jsonl").read_text().splitlines()]
    assert {event["invariant"] for event in events if event["event"] == "invariant.violated"} == {
        "cursor_covers_buffer",
        "cursor_within_lookahead",
    }


def test_the_result_can_be_read_by_a_program(capsys: pytest.CaptureFixture[str]) -> None:
    """One JSON object on standard output, and nothing else anywhere."""
    code = main(["drill", "popped-spare-is-lost", "--json", "--run", "mine"])

    out, err = capsys.readouterr()
    told = json.loads(out)
    assert (code, err) == (0, "")
    assert told["ok"]
    assert told["run"] == "mine"
    assert told["alerts"] == {"conservation": "QuiescePromptsUnaccounted"}
    assert [fired["invariant"] for fired in told["fired"]] == ["conservation"]


async def _nothing(target: DrillTarget, holes: Holes) -> None:
    """Break nothing."""


async def _impossible(_: DrillTarget, holes: Holes) -> None:
    raise holes.impossible("it has no moving parts")


@pytest.mark.parametrize(
    "inject, expected_code, said",
    [(_nothing, 1, "single_owner did not fire"), (_impossible, 2, "it has no moving parts")],
    ids=["not-as-expected", "not-possible"],
)
def test_the_exit_code_tells_what_came_of_it(
    inject: quiesce.drills.drill.Inject,
    expected_code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """1 if not exactly what was expected fired; 2 if the drill could not be done."""
    drill = Drill("some-drill", "Something.", "a hole", ("single_owner",), inject)
    monkeypatch.setattr(quiesce.drills, "find_drill", lambda _name: drill)

    code = main(["drill", "some-drill", "--timeout", "0.5"])

    assert code == expected_code
    assert said in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    "arguments, said",
    [
        ([], "name one drill"),
        (["early-cursor", "--list"], "name one drill"),
        (["early-curser"], "did you mean 'early-cursor'"),
        (["early-cursor", "--run-dir", ".", "--serve", "0"], "--serve"),
        (["early-cursor", "--run-dir", ".", "--exporter", "webhook"], "--exporter"),
        (["--all", "--keep", "x"], "--keep"),
        (["early-cursor", "--run-dir", "/nowhere"], "no run folder"),
        (["early-cursor", "--exporter", "no-such-exporter"], "no-such-exporter"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line that names the option, before anything starts."""
    code = main(["drill", *arguments])

    out, err = capsys.readouterr()
    assert code in {1, 2}
    assert out == ""
    assert said in err
    assert "Traceback" not in err


def test_the_list_has_every_drill(capsys: pytest.CaptureFixture[str]) -> None:
    """For people and for programs."""
    assert main(["drill", "--list"]) == 0
    out = capsys.readouterr().out
    assert [name for name in DRILLS if name not in out] == []
    assert main(["drill", "--list", "--json"]) == 0
    assert [drill["name"] for drill in json.loads(capsys.readouterr().out)] == list(DRILLS)


@contextmanager
def a_running_run(path: Path, *, drills: bool) -> Iterator[None]:
    """Run something in another thread until the end of the block."""

    async def generate(request: GenerationRequest) -> GroupResult:
        await asyncio.sleep(0.05)
        return result_of(request)

    async def step(_: TrainBatch) -> None:
        await asyncio.sleep(0.2)

    options = {"save_every_steps": 3, "audit": AuditConfig(drills=drills)}
    run = Run(path, sampler("in_order"), prompts=2000, generate=generate, before_step=step, options=options)
    controller = run.start()
    ended: list[RunSummary] = []
    loops: list[asyncio.AbstractEventLoop] = []

    async def go() -> None:
        loops.append(asyncio.get_running_loop())
        ended.append(await controller.run())

    thread = threading.Thread(target=asyncio.run, args=(go(),))
    thread.start()
    try:
        until(lambda: controller.auditor is not None and controller.owners.step > 2, 30)
        yield
    finally:
        loops[0].call_soon_threadsafe(controller.request_stop)
        thread.join(30)
        run.folder.close()
    assert [summary.outcome for summary in ended] == ["stopped"]
    assert not ended[0].save_failed


def test_a_running_run_that_allows_drills_is_broken_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Asked for from outside, more than once; the run saves in the end."""
    with a_running_run(tmp_path, drills=True):
        until((tmp_path / FOLDER / DESK_FILE).exists)
        codes = [
            main(["drill", name, "--run-dir", str(tmp_path), "--timeout", "30"])
            for name in ("early-cursor", "ledger-keeps-its-entry")
        ]
        began = time.monotonic()
        refused = main(["drill", "popped-spare-is-lost", "--run-dir", str(tmp_path)])

    out, err = capsys.readouterr()
    assert (codes, refused) == ([0, 0], 2)
    assert time.monotonic() - began < 20
    assert out.count("Exactly what it breaks fired") == 2
    assert "controller.spare_prompts is 0" in err


def test_a_running_run_that_does_not_allow_them_is_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Refused in one line that says which key allows them."""
    with a_running_run(tmp_path, drills=False):
        code = main(["drill", "early-cursor", "--run-dir", str(tmp_path)])

    assert code == 2
    assert "controller.audit.drills=true" in capsys.readouterr().err
    assert read_violations(tmp_path) == []
