"""Children that ``multiprocessing`` makes of a watched program: the telemetry is the parent's, whoever is first."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

EXEC = [sys.executable, "-m", "quiesce.cli.main", "exec", "--port", "0"]

# Workers build a barrier, before their parent does and afterwards.
BY_THE_ENVIRONMENT = """
    import json, multiprocessing, os, sys
    from quiesce import DataPlaneCheckpointBarrier
    from quiesce.telemetry import enable

    def work(role):
        if role:
            os.environ["QUIESCE_ROLE"] = role
        barrier = DataPlaneCheckpointBarrier()
        return enable.is_enabled()

    def ask(methods, role):
        told = {}
        for method in methods:
            with multiprocessing.get_context(method).Pool(1) as pool:
                told[method] = pool.apply(work, (role,))
        return told

    if __name__ == "__main__":
        role, *methods = sys.argv[1:]
        before = ask(methods, role)
        barrier = DataPlaneCheckpointBarrier()
        after = ask(methods, role)
        (handle,) = enable._HANDLES
        print(json.dumps({"before": before, "after": after, "pid": os.getpid(), "port": handle.port}))
"""

# Nothing keeps the child from running all of the script again, but for what the pool itself needs.
IN_CODE = """
    import json, multiprocessing, os, sys, urllib.request
    from pathlib import Path
    import quiesce
    from quiesce.telemetry import enable

    metrics = quiesce.enable_metrics("mine", 0, run_dir=os.environ["FOLDER"])
    barrier = quiesce.DataPlaneCheckpointBarrier()
    metrics.expect_checkpoints(steps=10)

    def work(step):
        metrics.step(step, reward=1.0)
        metrics.snapshot(Path(os.environ["FOLDER"]) / "child.prom")
        told = [enable.is_enabled(), metrics.telemetry.flush(1), metrics.url]
        metrics.close()
        return told

    if __name__ == "__main__":
        with multiprocessing.get_context(sys.argv[1]).Pool(1) as pool:
            child = pool.apply(work, (7,))
        scrape = urllib.request.urlopen(metrics.url).read().decode()
        served = json.loads((Path(os.environ["FOLDER"]) / "metrics.json").read_text())
        print(json.dumps({"child": child, "served": served, "pid": os.getpid(), "port": metrics.port,
                          "scraped": "quiesce_mutation_slots{" in scrape}))
        metrics.close()
"""


def run(
    folder: Path, command: list[str], code: str, *words: str, env: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Run a script with a command before it, and return what it told in its last line."""
    script = folder / "train.py"
    script.write_text(textwrap.dedent(code))
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("QUIESCE_", "OTEL_"))}
    done = subprocess.run(
        [*command, sys.executable, str(script), *words],
        cwd=folder,
        env={**clean, **(env or {})},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert "could not be switched on" not in done.stderr
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


def test_a_worker_that_builds_a_barrier_leaves_telemetry_to_its_parent(tmp_path: Path) -> None:
    """It takes neither the port nor the recording, though it inherits every variable, and may well be first."""
    recorded = tmp_path / "r"
    methods = ("spawn", "forkserver", "fork")

    told = run(tmp_path, [*EXEC, "--run-dir", str(recorded), "--"], BY_THE_ENVIRONMENT, "", *methods)

    assert told["before"] == told["after"] == dict.fromkeys(methods, False)
    assert told["port"] > 0
    assert {line["pid"] for line in headers(recorded)} == {told["pid"]}


def test_a_worker_that_is_given_a_role_serves(tmp_path: Path) -> None:
    """As ranks that a script spawns do: what they are is told to them, and to nobody else."""
    told = run(tmp_path, [*EXEC, "--no-record", "--"], BY_THE_ENVIRONMENT, "worker-1", "spawn")

    assert told["before"] == {"spawn": True}
    assert told["after"] == {"spawn": False}  # its parent serves by now


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_script_that_switches_on_when_it_is_imported_is_switched_on_once(
    tmp_path: Path, method: str
) -> None:
    """A child imports it again: its handle takes every call, and does nothing; nothing of the parent's is replaced."""
    told = run(tmp_path, [], IN_CODE, method, env={"FOLDER": str(tmp_path)})

    assert told["child"][:2] == [False, True]
    assert told["served"]["pid"] == told["pid"]
    assert told["served"]["port"] == told["port"]
    assert told["scraped"]
    assert not (tmp_path / "child.prom").exists()
    assert {line["pid"] for line in headers(tmp_path)} == {told["pid"]}


def headers(folder: Path) -> list[dict[str, Any]]:
    """Return the first line of each recorded file."""
    files = [path for path in (folder / "telemetry").iterdir() if path.suffix == ".jsonl"]
    return [json.loads(path.read_text().splitlines()[0]) for path in files]
