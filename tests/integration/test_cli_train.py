"""``quiesce train`` as a person meets it: what it prints, writes, serves, refuses."""

import json
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import termios
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from quiesce.cli.main import main
from quiesce_grpo.run_config import load_config
from tests.integration.cli_process import PROMPTS, SMALL, STEPS, Gate, Zygote
from tests.integration.run_files import audit, checkpoints, snapshot, steps, trained

Gates = Callable[..., Gate]

ESCAPE = "\x1b"

FAMILIES = {
    "quiesce_mutation_sections",
    "quiesce_mutation_wait_seconds",
    "quiesce_mutation_hold_seconds",
    "quiesce_checkpoint_attempts",
    "quiesce_checkpoint_phase_seconds",
    "quiesce_groups",
    "quiesce_dispatch_cursor",
    "quiesce_trainer_version",
    "quiesce_prompts_read",
    "quiesce_window_blame_seconds",
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """A run of the installed command from its start to its end, on nothing but a CPU."""
    folder = tmp_path_factory.mktemp("finished")
    done = subprocess.run(
        [str(Path(sys.executable).parent / "quiesce"), "train", "--run-dir", "run", *SMALL],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={**os.environ, "PYTHONWARNINGS": "default"},
    )
    return folder / "run", done


def test_a_first_run_says_what_it_did_and_complains_about_nothing(
    finished: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    """Exit code 0, nothing on standard error (no warning of any library), no escape codes, at most 80 columns."""
    run_dir, done = finished

    assert done.returncode == 0
    assert done.stderr == ""
    assert ESCAPE not in done.stdout
    assert max(len(line) for line in done.stdout.splitlines()) <= 80
    for told in (
        f"run finished at step {STEPS}",
        f"{PROMPTS} read: {PROMPTS} trained, 0 dropped, 0 owned",
        "saved step 2: drain ",
        "exclusive ",
        "warming up",
        "quiesce audit run",
        "recording    run/telemetry",
        "quiesce report run",
        "quiesce view run",
    ):
        assert told in done.stdout
    assert set(trained(run_dir).values()) == {1}


def test_a_run_folder_holds_what_the_summary_names(
    finished: tuple[Path, subprocess.CompletedProcess[str]],
) -> None:
    """Configuration, log, journal, metrics and two checkpoints, each of which parses."""
    run_dir, _ = finished

    lines = [json.loads(line) for line in (run_dir / "log.jsonl").read_text().splitlines()]
    families = list(text_string_to_metric_families((run_dir / "metrics.prom").read_text()))
    found = audit(run_dir)

    states = [line["state"] for line in lines if line["event"] == "run.state"]
    assert states == ["starting", "running", "finished"]
    assert sum(line["event"] == "checkpoint.published" for line in lines) == STEPS // 2 + 1
    assert {family.name for family in families} >= FAMILIES
    assert not (run_dir / "metrics.json").exists()
    assert {path.name.partition("-")[0] for path in (run_dir / "telemetry").iterdir()} >= {
        "spans",
        "samples",
        "events",
    }
    assert load_config(run_dir / "config.yaml", []) == load_config("tiny", list(SMALL[1:]))
    assert len(checkpoints(run_dir)) == 2
    assert found["ok"]
    assert found["prompts"] == {"read": PROMPTS, "trained": PROMPTS, "dropped": 0, "owned": 0}


def test_a_used_folder_is_refused_and_nothing_in_it_changes(
    finished: tuple[Path, subprocess.CompletedProcess[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    """Without ``--resume`` the command ends with code 2 and names the flag."""
    run_dir, _ = finished
    before = snapshot(run_dir)

    code = main(["train", *SMALL, "--run-dir", str(run_dir)])

    assert code == 2
    assert "--resume" in capsys.readouterr().err
    assert snapshot(run_dir) == before


def test_resume_takes_the_run_that_was_active_last(
    finished: tuple[Path, subprocess.CompletedProcess[str]], zygote: Zygote, tmp_path: Path
) -> None:
    """Without ``--run-dir``, a resume goes on with the newest run under ``runs/``, which has nothing left to do."""
    for age, name in enumerate(("new", "old")):
        copy = tmp_path / "runs" / name
        shutil.copytree(finished[0], copy)
        for file in ("config.yaml", "lineage.jsonl"):
            os.utime(copy / file, (2e9 - age, 2e9 - age))
    before = snapshot(tmp_path / "runs" / "old")

    code, run = zygote.run("train", "--resume", cwd=tmp_path)

    assert code == 0, run.output
    assert "run folder   runs/new" in run.stdout
    assert f"run finished at step {STEPS}" in run.stdout
    assert snapshot(tmp_path / "runs" / "old") == before
    assert len(steps(tmp_path / "runs" / "new")) == STEPS


def test_a_run_can_be_scraped_and_keeps_others_out(
    zygote: Zygote, gate: Gates, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """While it trains, its metrics have the catalogue's names, and a second process is refused by name."""
    held = gate("hook:train_step_ended", 4)
    run = zygote.start("train", *SMALL, "--run-dir", "run", cwd=tmp_path, hooks=[held.hook])
    held.wait(run)

    told = json.loads((tmp_path / "run" / "metrics.json").read_text())
    with urllib.request.urlopen(told["url"], timeout=10) as answer:  # noqa: S310 - the run's own loopback address
        families = {family.name: family for family in text_string_to_metric_families(answer.read().decode())}
    code = main(["train", "--resume", "--run-dir", str(tmp_path / "run")])
    held.open()

    assert told["pid"] == run.pid
    assert families.keys() >= FAMILIES
    labels = {sample.labels.get("owner") for sample in families["quiesce_groups"].samples}
    assert labels == {"ledger", "spares", "buffer", "training"}
    assert {sample.value for sample in families["quiesce_trainer_version"].samples} == {4.0}
    phases = {sample.labels.get("phase") for sample in families["quiesce_checkpoint_phase_seconds"].samples}
    assert phases >= {"fence", "drain", "exclusive", "verify", "stage", "write", "publish"}
    assert code == 2
    assert f"process {run.pid}" in capsys.readouterr().err
    assert run.wait() == 0, run.output


@pytest.mark.parametrize("signalled", [False, True])
def test_a_terminal_shows_the_run_and_is_left_clean(
    zygote: Zygote, gate: Gates, tmp_path: Path, *, signalled: bool
) -> None:
    """The display is drawn and taken away again, and the cursor is there, also after a run that was given up."""
    held, asked = gate("hook:train_step_ended", 4), gate("call:quiesce.controller:Controller.request_stop")
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (40, 80))
    hooks = [held.hook, *([asked.hook] if signalled else [])]
    run = zygote.start(
        "train",
        *SMALL,
        "controller.max_steps=8",
        "--run-dir",
        "run",
        cwd=tmp_path,
        hooks=hooks,
        tty=os.ttyname(theirs),
    )
    screen = ""
    # Frames are drawn on a clock: hold the run until one of them shows the step.
    while "last window" not in screen or "3/8" not in screen:
        screen += _read(ours)
    held.wait(run)

    if signalled:
        run.signal(signal.SIGINT)
        held.open()
        asked.wait(run)
        run.signal(signal.SIGINT)
        asked.open()
    else:
        held.open()
    screen += _drain(ours, run.pid)
    code = run.wait()
    os.close(theirs)
    os.close(ours)

    assert code == (130 if signalled else 0)
    for told in ("reward", "staleness", "ledger", "cursor", "exclusive", "last save", "metrics"):
        assert told in screen
    assert screen.rfind("\x1b[?25h") > screen.rfind("\x1b[?25l") >= 0
    assert "\x1b[?1049h" not in screen
    end = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen[screen.rfind("\x1b[?25h") :])
    assert ("given up without saving" if signalled else "run finished at step 8") in end


@pytest.mark.parametrize(
    "words, told",
    [
        (["controller.nope=1"], "controller.nope: there is no such key"),
        (["nope=1"], "nope: there is no such key"),
        (["controller.max_steps=ten"], "controller.max_steps: must be a whole number or null, not 'ten'"),
        (["task.size=3"], "task.size: must be at least controller.groups_per_step"),
        (["controller.sampler.name=no"], "controller.sampler.name: unknown sampler 'no'"),
        (["engine.deadline_seconds=900"], "engine.deadline_seconds: is longer than"),
        (["no_such_file.yaml"], "no_such_file.yaml: is neither a file nor a preset (tiny, gpu)"),
        (["tiny", "word"], "word: an override is section.key=value"),
        (["--accept-suspect"], "--accept-suspect: goes with --resume"),
        (["--resume"], "--resume: there is no run under runs/"),
        (["--resume", "--run-dir", "nowhere"], "--run-dir: nowhere is no run folder"),
    ],
)
def test_a_run_that_cannot_be_meant_is_refused_before_anything_starts(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    told: str,
) -> None:
    """One line that begins with the key, code 2, and no folder is created."""
    monkeypatch.chdir(tmp_path)

    code = main(["train", *words])

    said = capsys.readouterr()
    assert code == 2
    assert said.err.startswith(f"quiesce: {told}")
    assert said.err.count("\n") == 1
    assert said.out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "override, key",
    [
        ("task.size=80", "task.size"),
        ("seed=7", "seed"),
        ("controller.groups_per_step=2", "controller.groups_per_step"),
        ("model.architecture.hidden_size=64", "model.architecture"),
    ],
)
def test_a_resume_cannot_change_what_is_read_or_trained(
    finished: tuple[Path, subprocess.CompletedProcess[str]],
    capsys: pytest.CaptureFixture[str],
    override: str,
    key: str,
) -> None:
    """Other prompts or another policy under the same step numbers are refused by key, and nothing changes."""
    before = snapshot(finished[0])

    code = main(["train", "--resume", "--run-dir", str(finished[0]), override])

    assert code == 2
    assert capsys.readouterr().err.startswith(f"quiesce: {key}: a run keeps it")
    assert snapshot(finished[0]) == before


def test_a_port_that_is_taken_is_named(zygote: Zygote, gate: Gates, tmp_path: Path) -> None:
    """A port that somebody named is used or the run fails; the folder can be used again."""
    held = gate("hook:train_step_ended", 1)
    first = zygote.start("train", *SMALL, "--run-dir", "first", cwd=tmp_path, hooks=[held.hook])
    held.wait(first)
    port = json.loads((tmp_path / "first" / "metrics.json").read_text())["port"]

    code, run = zygote.run("train", *SMALL, f"metrics.port={port}", "--run-dir", "second", cwd=tmp_path)
    first.kill()

    assert code == 1
    assert str(port) in run.stderr
    assert run.stderr.count("\n") == 1
    assert not (tmp_path / "second" / "lineage.jsonl").read_bytes()


def test_missing_packages_are_named_with_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without what the reference run needs, one line says what to install."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "torchdata", None)

    code = main(["train", "tiny"])

    assert code == 2
    said = capsys.readouterr().err
    assert "(torchdata): pip install 'quiesce[grpo]'" in said
    assert list(tmp_path.iterdir()) == []


def _read(fd: int) -> str:
    readable, _, _ = select.select([fd], [], [], 30)
    assert readable, "nothing more came to the terminal"
    return os.read(fd, 65536).decode(errors="replace")


def _drain(fd: int, pid: int) -> str:
    """Read until the process is gone and nothing is left."""
    told = ""
    while True:
        readable, _, _ = select.select([fd], [], [], 0.05)
        if readable:
            told += os.read(fd, 65536).decode(errors="replace")
        elif not _has_output(pid):
            return told


def _has_output(pid: int) -> bool:
    """Tell whether a process still has its standard output; one that is just ending does not let anybody look."""
    try:
        return Path(f"/proc/{pid}/fd/1").exists()
    except PermissionError:
        return False
