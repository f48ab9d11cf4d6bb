"""The check on a CUDA device, as far as it can be tested without one."""

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_check.py"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def line(event: str, step: int, at: float = 0.0, **fields: Any) -> dict[str, Any]:  # noqa: ANN401 - a log field is any value
    """A line of a run's log."""
    return {"event": event, "step": step, "timestamp": f"2030-01-01T00:00:{at:09.6f}Z", **fields}


def saved(step: int, exclusive: float = 0.0001) -> dict[str, Any]:
    """A line about a published checkpoint."""
    phases = {"drain": 0.0, "exclusive": exclusive, "stage": 0.01, "write": 0.2}
    return line(
        "checkpoint.published",
        step,
        drain_seconds=0.00005,
        exclusive_seconds=exclusive,
        bytes=2 << 20,
        phases=phases,
    )


def trained(step: int, at: float = 0.0, tokens: float = 100.0, reward: float = 0.5) -> dict[str, Any]:
    """A line about a train step."""
    return line("train.step", step, at, metrics={"tokens": tokens, "reward": reward})


@pytest.mark.parametrize("seconds", ["0", "119", "361", "soon"])
def test_it_never_runs_longer_than_it_may(
    script: ModuleType, capsys: pytest.CaptureFixture[str], seconds: str
) -> None:
    """Six minutes are the most, and less than two are not enough for anything."""
    with pytest.raises(SystemExit) as caught:
        script.main(["--seconds", seconds])

    assert caught.value.code == 2
    assert "--seconds" in capsys.readouterr().err


def test_without_a_device_it_says_so_in_its_json(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exit code is 1, and the JSON names what is missing instead of numbers of another device."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    code = script.main([])

    told = json.loads(capsys.readouterr().out)
    assert code == 1
    assert told["ok"] is False
    assert told["dry"] is False
    assert "sees no CUDA device" in told["problem"]
    assert "milliseconds" not in told


def test_a_run_is_killed_only_after_it_has_something_to_lose(script: ModuleType) -> None:
    """Three checkpoints, and a step that none of them has."""
    lines = [saved(0), trained(1), trained(5), saved(5), trained(10), saved(10)]

    assert not script.ripe([])
    assert not script.ripe(lines)
    assert not script.ripe([*lines[:4], trained(6)])
    assert script.ripe([*lines, trained(11)])


def test_numbers_leave_out_the_step_that_pays_for_warming_up(script: ModuleType) -> None:
    """Rates are over the steps after the resume but the first; durations over every save."""
    before = [saved(0, 0.0002), trained(1, 1.0, reward=0.0), saved(5, 0.0001)]
    after = [trained(6, 10.0, tokens=1e9), trained(7, 12.0), trained(8, 14.0), saved(8, 0.0003)]

    told = script.measured([*before, *after], after)

    assert told["steps"] == 8
    assert told["saves"] == 3
    assert told["checkpoint_mib"] == 2.0
    assert told["trained_tokens_per_s"] == 50.0
    assert told["step_s"] == 2.0
    assert told["milliseconds"]["exclusive"] == {"median": 0.2, "largest": 0.3}
    assert told["milliseconds"]["drain"] == {"median": 0.05, "largest": 0.05}


def test_a_torn_line_of_the_log_is_not_there_yet(script: ModuleType, tmp_path: Path) -> None:
    """The log is read while the run writes it."""
    log = tmp_path / "log.jsonl"
    log.write_text(json.dumps(trained(3)) + '\n{"event": "tra')

    assert [line["step"] for line in script.read_log(log)] == [3]
    assert script.read_log(tmp_path / "none") == []


@pytest.mark.soak
def test_the_dry_mode_kills_resumes_audits_and_drills(
    script: ModuleType, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The whole check with the tiny preset on the CPU, in processes of their own."""
    code = script.main(["--dry", "--seconds", "200", "--run-dir", str(tmp_path / "run")])

    told = json.loads(capsys.readouterr().out)
    assert code == 0, told["problem"]
    assert told["ok"] is True
    assert told["dry"] is True
    assert told["steps"] > told["killed_at_step"] > 0
    assert told["audit"]["violations"] == []
    assert told["drill"]["ok"] is True
    assert told["drill"]["fired"] == ["cursor_covers_buffer", "cursor_within_lookahead"]
    assert (tmp_path / "run" / "checkpoints").is_dir()
    assert sys.version.split()[0] == told["python"]
