"""The auditor in real processes: killed and resumed without an alarm, halted with an exit code, looked into afterwards."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from quiesce.auditor import read_violations
from quiesce.cli.train import EXIT_HALTED
from quiesce.invariants import Violation
from tests.integration.cli_process import PROMPTS, SMALL, Gate, Zygote
from tests.integration.run_files import audit, newest, trained

Gates = Callable[..., Gate]

QUICK = (
    "controller.audit.pace.rest=0",
    "controller.audit.pace.least_seconds=0",
    "controller.audit.pace.between_seconds=0.02",
)
"""A sweep that goes through a small run many times a second, so that a false alarm has its chance."""


class StepIsNotThree:
    """A check that a run is told to halt for."""

    name = "step_is_not_three"
    severity = "critical"

    def __init__(self) -> None:
        self.buffered = ""

    def owner_moved(self, group_id: str, _source: str, target: str, _reason: str) -> None:
        """Remember a group that is still owned."""
        if target == "buffer":
            self.buffered = group_id

    def train_step_ended(self, step: int, *_: object) -> Violation | None:
        """Complain about step 3."""
        if step != 3:
            return None
        return Violation(self.name, "critical", "it is step 3", (self.buffered,))


@pytest.mark.timeout(150)  # four processes, one after the other, on a machine that may be busy
def test_a_run_that_is_stopped_killed_and_resumed_raises_no_alarm(
    zygote: Zygote, gate: Gates, tmp_path: Path
) -> None:
    """Killed in a window, killed while it writes, asked to stop: every prompt is trained once, and nothing is reported."""
    run_dir = tmp_path / "run"
    words = (*SMALL, *QUICK, "controller.spare_prompts=3")
    for number, (place, nth) in enumerate(
        [("hook:cut_part_captured", 9), ("file:rename:step_", 1), ("hook:train_step_ended", 2)]
    ):
        held = gate(place, nth)
        run = zygote.start(
            "train",
            *(("--resume",) if number else words),
            "--run-dir",
            "run",
            cwd=tmp_path,
            hooks=[held.hook],
        )
        held.wait(run)
        if place == "hook:train_step_ended":
            run.signal(signal.SIGTERM)
            held.open()
            assert run.wait() == 0, run.output
        else:
            run.kill()
        assert read_violations(run_dir) == []

    code, run = zygote.run("train", "--resume", "--run-dir", "run", cwd=tmp_path)

    assert code == 0, run.output
    assert read_violations(run_dir) == []
    assert not (run_dir / "violations.jsonl").exists()
    assert trained(run_dir) == dict.fromkeys((f"e000-p{position:07d}" for position in range(PROMPTS)), 1)
    assert "violations   none" in run.stdout
    assert not [line for line in run.stderr.splitlines() if "warning:" in line or "error:" in line]
    told = (run_dir / "metrics.prom").read_text()
    checked = {
        line.split('"')[1]
        for line in told.splitlines()
        if line.startswith("quiesce_invariant_active{") and line.endswith(" 1.0")
    }
    assert {
        "single_owner",
        "conservation",
        "window_is_exclusive",
        "gate_is_respected",
        "versions_grow",
    } <= checked


def test_a_halted_run_saves_exits_with_3_and_can_be_looked_into(zygote: Zygote, tmp_path: Path) -> None:
    """The message names the violation and both next steps; the record is listed, stays open on a resume, and is closed."""
    run_dir = tmp_path / "run"
    words = (
        "controller.audit.checks=[tests.integration.test_auditor_cli:StepIsNotThree]",
        "controller.audit.policies.step_is_not_three=halt",
    )

    code, run = zygote.run("train", *SMALL, *words, "--run-dir", "run", cwd=tmp_path)

    assert code == EXIT_HALTED == 3
    assert "run halted at step 3" in run.stdout
    assert "violations   1 open: step_is_not_three" in run.stdout
    assert "quiesce train: halted: critical step_is_not_three: it is step 3" in run.stderr
    assert "quiesce violations run" in run.stderr
    assert "quiesce train --run-dir run --resume" in run.stderr
    assert "Traceback" not in run.stderr
    assert newest(run_dir).name == "step_3"
    assert audit(run_dir)["ok"]
    told = (run_dir / "metrics.prom").read_text()
    assert (
        'quiesce_invariant_violations_total{invariant="step_is_not_three",role="controller",run="tiny"} 1.0'
        in told
    )
    (record,) = read_violations(run_dir)
    assert [event["target"] for event in record.events][-1] == "buffer"

    code, listed = zygote.run("violations", "run", "--json", cwd=tmp_path)
    assert code == 1
    assert [known["key"] for known in json.loads(listed.stdout)["violations"]] == [record.key]

    code, run = zygote.run("train", "--resume", "--run-dir", "run", cwd=tmp_path)
    assert code == 0, run.output
    assert "violations   1 open: step_is_not_three" in run.stdout
    assert "look into    quiesce violations run" in run.stdout
    assert trained(run_dir) == dict.fromkeys((f"e000-p{position:07d}" for position in range(PROMPTS)), 1)

    code, closed = zygote.run("violations", "run", "--close", record.key, cwd=tmp_path)
    assert code == 0, closed.output
    assert not any(known.open for known in read_violations(run_dir))
