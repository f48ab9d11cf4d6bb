"""Disks that are full, folders that cannot be written, checkpoints that were damaged: said by name, never passed over."""

import errno
import json
import shutil
from pathlib import Path

import pytest

from quiesce.checkpoint.restore import load_newest
from tests.integration.cli_process import PROMPTS, SMALL, Zygote
from tests.integration.run_files import audit, checkpoints, newest, snapshot, steps, trained

WRITING = ["create", "write", "append", "mkdir", "rename", "fsync", "fsync_folder"]
RARELY = "controller.save_every_steps=50"
"""The stop's save is the only one after that of step 0, so none is under way when the stop comes."""

RESUME = ("train", "--resume", "--run-dir", "run")

PARTS = (
    "manifest.json",
    "sampler.json",
    "position.json",
    "accounting.json",
    "spares.json",
    "buffer.json",
    "ledger.json",
    "rows-00000.safetensors",
    "trainer",
)


@pytest.fixture(scope="module")
def stopped(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which a run lies that took six steps and keeps its checkpoints of steps 4 and 6."""
    folder = tmp_path_factory.mktemp("stopped")
    words = ("controller.max_steps=6",)
    code, run = zygote.run("train", *SMALL, *words, "--run-dir", "run", cwd=folder)
    assert code == 0, run.output
    for path in (folder / "run" / "checkpoints").iterdir():
        if path.name == "step_6.1":  # the end's own cut, if groups were finished meanwhile
            shutil.rmtree(folder / "run" / "checkpoints" / "step_6", ignore_errors=True)
    return folder


@pytest.fixture
def run_dir(stopped: Path, tmp_path: Path) -> Path:
    """A copy of it to damage, in the folder that the test works in."""
    shutil.copytree(stopped / "run", tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize(
    "number, told",
    [
        pytest.param(errno.ENOSPC, "No space left on device", id="disk-full"),
        pytest.param(errno.EROFS, "Read-only file system", id="read-only"),
    ],
)
def test_a_last_save_that_the_disk_refuses_fails_the_run(
    zygote: Zygote, tmp_path: Path, number: int, told: str
) -> None:
    """The exit code is 1, the message names the disk and the way on, and the checkpoint before it is whole."""
    broken = {"hook": "break_files", "number": number, "operations": WRITING, "when": "stopping"}
    stop = {"hook": "stop_at", "place": "hook:train_step_ended", "nth": 3}

    code, run = zygote.run("train", *SMALL, RARELY, "--run-dir", "run", cwd=tmp_path, hooks=[broken, stop])

    assert code == 1
    assert "the last save failed" in run.stderr
    assert told in run.stderr
    assert "quiesce train --run-dir run --resume" in run.stderr
    assert "Traceback" not in run.stderr
    assert load_newest(tmp_path / "run", rename_corrupt=False).info.name.step == 0
    assert not [name for name in checkpoints(tmp_path / "run") if name.startswith("step_3")]
    told_metrics = (tmp_path / "run" / "metrics.prom").read_text()
    reason = "disk" if number == errno.ENOSPC else "permission"
    assert f'outcome="failed",reason="{reason}"' in told_metrics

    code, run = zygote.run(*RESUME, cwd=tmp_path)

    assert code == 0, run.output
    assert set(trained(tmp_path / "run").values()) == {1}
    assert len(trained(tmp_path / "run")) == PROMPTS
    assert audit(tmp_path / "run")["ok"]


def test_a_disk_that_is_full_from_the_start_is_named(zygote: Zygote, tmp_path: Path) -> None:
    """Without ``step_0`` nothing is trained: the run ends with code 1 before the first prompt is read."""
    broken = {"hook": "break_files", "number": errno.ENOSPC, "operations": ["mkdir"], "when": "starting"}

    code, run = zygote.run("train", *SMALL, "--run-dir", "run", cwd=tmp_path, hooks=[broken])

    assert code == 1
    assert "No space left on device" in run.stderr
    assert checkpoints(tmp_path / "run") == []
    assert trained(tmp_path / "run") == {}


def test_a_damaged_newest_checkpoint_gives_way_loudly(zygote: Zygote, run_dir: Path) -> None:
    """The run goes on from the one before it, says so, renames the bad one, and trains every prompt once."""
    bad = newest(run_dir)
    damage(bad, "buffer.json", "truncated")

    code, run = zygote.run(*RESUME, "controller.max_steps=null", cwd=run_dir.parent)

    assert code == 0, run.output
    assert "part buffer.json" in run.stderr
    assert "falling back to the checkpoint before it" in run.stderr
    assert f"corrupt-{bad.name}" in checkpoints(run_dir)
    assert set(trained(run_dir).values()) == {1}
    assert len(trained(run_dir)) == PROMPTS
    found = audit(run_dir)
    assert found["ok"], found["violations"]
    assert found["prompts"]["trained"] == PROMPTS


def test_checkpoints_that_are_all_damaged_are_a_refusal(zygote: Zygote, run_dir: Path) -> None:
    """Nothing starts at step 0 in silence: the exit code is 1, the part is named, nothing is trained."""
    for path in (run_dir / "checkpoints").glob("step_*"):
        damage(path, "manifest.json", "truncated")
    before = steps(run_dir)

    code, run = zygote.run(*RESUME, "controller.max_steps=null", cwd=run_dir.parent)

    assert code == 1
    assert "part manifest.json" in run.stderr
    assert "none of the 2 checkpoints" in run.stderr
    assert "Traceback" not in run.stderr
    assert steps(run_dir) == before
    assert audit(run_dir)["ok"] is False


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("how", ["truncated", "tampered", "deleted"])
def test_every_damaged_part_is_found(run_dir: Path, part: str, how: str) -> None:
    """Whatever part it is and however it was damaged, a load falls back and an audit names it."""
    good = sorted(path for path in (run_dir / "checkpoints").glob("step_*") if path != newest(run_dir))
    bad = newest(run_dir)
    name = damage(bad, part, how)

    loaded = load_newest(run_dir, rename_corrupt=False)
    found = audit(run_dir)

    assert loaded.info.path == good[-1]
    assert not found["ok"]
    told = [violation for violation in found["violations"] if bad.name in violation["message"]]
    assert any(f"part {name}" in violation["message"] for violation in told), found["violations"]


def test_a_file_that_does_not_belong_is_found(run_dir: Path) -> None:
    """What the manifest does not list was put there by somebody else."""
    (newest(run_dir) / "trainer" / "extra.bin").write_bytes(b"x")

    found = audit(run_dir)

    assert not found["ok"]
    assert "extra.bin" in found["violations"][0]["message"]


def test_a_suspect_cut_is_kept_but_never_resumed_by_itself(zygote: Zygote, tmp_path: Path) -> None:
    """A stop whose cuts break an invariant fails; only ``--accept-suspect`` goes on from what was kept."""
    run_dir = tmp_path / "run"
    distrust = {"hook": "distrust_cuts", "when": "stopping"}
    stop = {"hook": "stop_at", "place": "hook:train_step_ended", "nth": 3}

    code, run = zygote.run("train", *SMALL, RARELY, "--run-dir", "run", cwd=tmp_path, hooks=[distrust, stop])

    assert code == 1
    assert "the last save failed: invariant" in run.stderr
    assert "--accept-suspect" in run.stderr
    suspects = [name for name in checkpoints(run_dir) if name.endswith(".suspect")]
    assert len(suspects) == 1
    assert load_newest(run_dir, rename_corrupt=False).info.name.step == 0

    for path in (run_dir / "checkpoints").glob("step_*"):
        if not path.name.endswith(".suspect"):
            shutil.rmtree(path)
    refused, run = zygote.run(*RESUME, cwd=tmp_path)
    accepted, second = zygote.run(*RESUME, "--accept-suspect", cwd=tmp_path)

    assert refused == 1
    assert "--accept-suspect" in run.stderr
    assert accepted == 0, second.output
    assert set(trained(run_dir).values()) == {1}
    assert len(trained(run_dir)) == PROMPTS
    assert audit(run_dir)["ok"]


def test_a_resume_that_the_configuration_cannot_hold_is_refused(zygote: Zygote, run_dir: Path) -> None:
    """Another sampler than the checkpoint's is refused by key; checkpoints and configuration stay as they are."""
    before = snapshot(run_dir / "checkpoints"), (run_dir / "config.yaml").read_bytes()

    code, run = zygote.run(*RESUME, "controller.sampler.name=windowed", cwd=run_dir.parent)

    assert code == 2
    assert "sampler" in run.stderr
    assert "Traceback" not in run.stderr
    assert (snapshot(run_dir / "checkpoints"), (run_dir / "config.yaml").read_bytes()) == before


@pytest.mark.parametrize(
    "override, told",
    [
        ("model.path=/nowhere/at/all", "model.path: there is no folder /nowhere/at/all"),
        ("task.name=no_such_task", "task.name: "),
        ("task.options.no_such_option=1", "task.options"),
        ("model.architecture.model_type=no_such_model", "model.architecture"),
        ("model.device=cuda:77", "model.device: cuda:77 is not there"),
    ],
)
def test_what_only_a_library_can_judge_is_refused_by_key_and_can_be_corrected(
    zygote: Zygote, tmp_path: Path, override: str, told: str
) -> None:
    """The message is one line with the key; the folder is not used up by a run that never began."""
    code, run = zygote.run("train", *SMALL, override, "--run-dir", "run", cwd=tmp_path)

    assert code == 2
    assert run.stderr.startswith(f"quiesce: {told}")
    assert run.stderr.count("\n") == 1
    assert not (tmp_path / "run" / "lineage.jsonl").read_bytes()


def damage(checkpoint: Path, part: str, how: str) -> str:
    """Damage a part of a checkpoint; return the name of the file."""
    path = checkpoint / part
    if path.is_dir():
        path = max(path.rglob("*"), key=lambda file: file.stat().st_size if file.is_file() else -1)
    content = path.read_bytes()
    if how == "deleted":
        path.unlink()
    elif how == "truncated":
        path.write_bytes(content[: len(content) // 2])
    elif part == "manifest.json":
        body = json.loads(content)
        body["step"] += 1
        path.write_bytes(json.dumps(body).encode())
    else:
        middle = len(content) // 2
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    return str(path.relative_to(checkpoint))
