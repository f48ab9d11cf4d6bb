"""SIGTERM and Ctrl-C, whatever the run is doing: it saves once, says how to go on, and goes on."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.cli_process import PROMPTS, SMALL, Gate, Zygote
from tests.integration.run_files import audit, newest, trained

Gates = Callable[..., Gate]

WARM_UP = ("call:quiesce_grpo.warmup:warm_up", 1)
BUILD = ("call:quiesce_grpo.policy:build_policy", 1)
FIRST_SAVE = ("file:rename:step_0", 1)
TRAINING = ("hook:train_step_ended", 2)
STAGE = ("call:quiesce.checkpoint.trainer_state:StateDictTrainerState._copy", 1)
VERIFY = ("call:quiesce.checkpoint.saver:Checkpointer._check", 1)
WRITE = ("file:mkdir:trainer", 1)
PUBLISH = ("file:rename:step_", 1)


@pytest.mark.timeout(150)  # four processes, one after the other, on a machine that may be busy
@pytest.mark.parametrize(
    "places",
    [
        pytest.param([WARM_UP, BUILD, TRAINING], id="preparing-and-training"),
        pytest.param([FIRST_SAVE, ("phase:fence", 1), ("phase:drain", 1)], id="first-save-fence-drain"),
        pytest.param([("hook:cut_part_captured", 3), STAGE, VERIFY], id="exclusive-stage-verify"),
        pytest.param([WRITE, PUBLISH, ("hook:owner_moved", 30)], id="write-publish-rollouts"),
    ],
)
def test_a_stop_saves_once_and_the_resume_goes_on(
    zygote: Zygote, gate: Gates, tmp_path: Path, places: list[tuple[str, int]]
) -> None:
    """Stopped at each of these moments in turn, a run ends with code 0 and all is well in its folder."""
    run_dir = tmp_path / "run"
    for number, (place, nth) in enumerate(places):
        held = gate(place, nth)
        words = ("--resume",) if number else SMALL
        run = zygote.start("train", *words, "--run-dir", str(run_dir), cwd=tmp_path, hooks=[held.hook])
        held.wait(run)
        saved = run.stdout.count("\nsaved step")

        if number % 2:
            run.interrupt()
        else:
            run.signal(signal.SIGTERM)
        held.open()
        code = run.wait()

        assert code == 0, run.output
        assert run.stderr == ""
        assert f"go on with   quiesce train --run-dir {run_dir} --resume" in run.stdout
        assert "run stopped at step" in run.stdout
        # The one that is being written, and the stop's own; one that waits for the first is not needed any more.
        assert run.stdout.count("\nsaved step") - saved <= 2
        found = audit(run_dir)
        assert found["ok"], found
        assert newest(run_dir).name in {Path(item["path"]).name for item in found["checkpoints"]}

    code, run = zygote.run("train", "--resume", "--run-dir", str(run_dir), cwd=tmp_path)

    assert code == 0, run.output
    assert "run finished at step" in run.stdout
    assert len(trained(run_dir)) == PROMPTS
    assert set(trained(run_dir).values()) == {1}
    assert audit(run_dir)["prompts"] == {"read": PROMPTS, "trained": PROMPTS, "dropped": 0, "owned": 0}


def test_a_stop_while_the_last_save_goes_on_changes_nothing(
    zygote: Zygote, gate: Gates, tmp_path: Path
) -> None:
    """A run that has trained everything and is saving ends as it would have ended, with code 0."""
    held = gate("file:rename:step_10")
    run = zygote.start("train", *SMALL, "--run-dir", "run", cwd=tmp_path, hooks=[held.hook])
    held.wait(run)

    run.signal(signal.SIGTERM)
    held.open()
    code = run.wait()

    assert code == 0, run.output
    assert "run finished at step 10" in run.stdout
    assert audit(tmp_path / "run")["prompts"]["trained"] == PROMPTS


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_second_signal_gives_up_at_once(
    zygote: Zygote, gate: Gates, tmp_path: Path, number: signal.Signals
) -> None:
    """The stop's save hangs; a second signal ends the process, which says how to go on from what is whole."""
    hung, asked = gate("file:mkdir:trainer", 2), gate("call:quiesce.controller:Controller.request_stop")
    run = zygote.start("train", *SMALL, "--run-dir", "run", cwd=tmp_path, hooks=[hung.hook, asked.hook])
    hung.wait(run)
    before = newest(tmp_path / "run")

    run.signal(number)
    asked.wait(run)
    run.signal(number)
    asked.open()
    code = run.wait()

    assert code == 128 + number
    assert "given up without saving" in run.stderr
    assert "quiesce train --run-dir run --resume" in run.stderr
    assert newest(tmp_path / "run") == before
    assert audit(tmp_path / "run")["ok"]


def test_ctrl_c_leaves_the_loaders_workers_alone(zygote: Zygote, gate: Gates, tmp_path: Path) -> None:
    """Ctrl-C reaches every process of a terminal; the loader's workers read on, or the stop could not save."""
    held = gate("hook:train_step_ended", 2)
    run = zygote.start(
        "train", *SMALL, "loader.workers=1", "--run-dir", "run", cwd=tmp_path, hooks=[held.hook]
    )
    held.wait(run)

    others = [pid for pid in _session(run.pid) if pid != run.pid]
    for pid in others:
        os.kill(pid, signal.SIGINT)
    held.open()
    code = run.wait()

    assert len(others) >= 2  # the process that forks, and what it forked
    assert code == 0, run.output
    assert run.stderr == ""
    assert len(trained(tmp_path / "run")) == PROMPTS


def _session(leader: int) -> list[int]:
    """Return the processes of a session."""
    found = []
    for entry in (path.name for path in Path("/proc").iterdir()):
        if entry.isdigit():
            try:
                if os.getsid(int(entry)) == leader:
                    found.append(int(entry))
            except ProcessLookupError:
                continue
    return found
