"""A run that is killed, and killed again: no prompt is lost, and none is trained twice."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.cli_process import PROMPTS, SMALL, STEPS, Gate, Zygote
from tests.integration.run_files import audit, checkpoints, newest, prompts, steps, trained

Gates = Callable[..., Gate]


@pytest.mark.timeout(150)  # four processes, one after the other, on a machine that may be busy
@pytest.mark.parametrize(
    "places",
    [
        pytest.param(
            [("hook:train_step_ended", 3), ("file:rename:step_", 1), ("hook:cut_part_captured", 4)],
            id="between-saves-before-the-rename-in-the-window",
        ),
        pytest.param(
            [("file:rename:step_", 3), ("file:fsync_folder:checkpoints", 1), ("file:append:lineage", 6)],
            id="before-and-after-the-rename-in-the-journal",
        ),
    ],
)
def test_a_killed_run_loses_no_prompt_and_trains_none_twice(
    zygote: Zygote, gate: Gates, tmp_path: Path, places: list[tuple[str, int]]
) -> None:
    """Killed at each of these moments in turn and resumed each time, the run trains every prompt once."""
    run_dir = tmp_path / "run"
    known: dict[str, int] = {}
    for number, (place, nth) in enumerate(places):
        held = gate(place, nth)
        words = ("--resume",) if number else SMALL
        run = zygote.start("train", *words, "--run-dir", str(run_dir), cwd=tmp_path, hooks=[held.hook])
        held.wait(run)

        run.kill()

        found = audit(run_dir)
        assert found["ok"], found["violations"]
        totals = found["prompts"]
        assert totals["read"] == totals["trained"] + totals["dropped"] + totals["owned"]
        assert set(trained(run_dir).values()) <= {1}
        now = prompts(run_dir)
        assert {group: now[group] for group in known.keys() & now.keys()}.items() <= known.items()
        known |= now

    code, run = zygote.run("train", "--resume", "--run-dir", str(run_dir), cwd=tmp_path)

    assert code == 0, run.output
    assert "restored: " in run.stdout
    assert [step for step, _ in steps(run_dir)] == list(range(1, STEPS + 1))
    assert trained(run_dir) == dict.fromkeys((f"e000-p{position:07d}" for position in range(PROMPTS)), 1)
    found = audit(run_dir)
    assert found["ok"], found["violations"]
    assert found["prompts"] == {"read": PROMPTS, "trained": PROMPTS, "dropped": 0, "owned": 0}
    assert not [name for name in checkpoints(run_dir) if ".tmp-" in name or name.startswith("trash-")]


def test_a_run_killed_before_its_first_checkpoint_says_so(
    zygote: Zygote, gate: Gates, tmp_path: Path
) -> None:
    """There is nothing to resume, nothing is started in silence at step 0, and the message says what to do."""
    held = gate("file:rename:step_0")
    run = zygote.start("train", *SMALL, "--run-dir", "run", cwd=tmp_path, hooks=[held.hook])
    held.wait(run)
    run.kill()

    code, run = zygote.run("train", "--resume", "--run-dir", "run", cwd=tmp_path)

    assert code == 1
    assert "there is no checkpoint in this folder" in run.stderr
    assert "start it again in another folder" in run.stderr
    assert trained(tmp_path / "run") == {}


def test_a_failing_train_step_says_how_to_go_on(zygote: Zygote, tmp_path: Path) -> None:
    """An error of the trainer is a traceback with a way out, and the run goes on from its last checkpoint."""
    code, run = zygote.run(
        "train", *SMALL, "--run-dir", "run", cwd=tmp_path, hooks=[{"hook": "fail_step", "nth": 4}]
    )

    assert code == 1
    assert "RuntimeError: the optimizer caught fire" in run.stderr
    assert "go on from the newest checkpoint with: quiesce train --run-dir run --resume" in run.stderr
    assert newest(tmp_path / "run").name == "step_2"
    assert audit(tmp_path / "run")["ok"]


def test_telemetry_changes_neither_prompts_nor_their_order(zygote: Zygote, tmp_path: Path) -> None:
    """The same seed reads and trains the same prompts in the same order, with telemetry on and off."""
    words = ("controller.keep_checkpoints=6", "controller.save_every_steps=1", "controller.max_steps=5")
    for name, switch in (("on", "metrics.enabled=true"), ("off", "metrics.enabled=false")):
        code, run = zygote.run("train", *SMALL, *words, switch, "--run-dir", name, cwd=tmp_path)
        assert code == 0, run.output
        assert (f"quiesce report {name}" in run.output) == (name == "on")  # there is something to report

    on, off = prompts(tmp_path / "on"), prompts(tmp_path / "off")

    shared = on.keys() & off.keys()
    assert len(shared) >= 20
    assert {group: on[group] for group in shared} == {group: off[group] for group in shared}
    assert len(set(on.values())) == len(on)
    # Within a step, groups stand in the order in which they were finished, which is nobody's to decide.
    together = [[(step, sorted(groups)) for step, groups in steps(tmp_path / name)] for name in ("on", "off")]
    assert together[0] == together[1]
    assert not (tmp_path / "off" / "metrics.prom").exists()
