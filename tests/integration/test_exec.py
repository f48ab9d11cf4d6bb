"""``quiesce exec`` and the environment: telemetry in programs that say nothing about it, as real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.otlp_receiver import http_receiver

QUIESCE = [sys.executable, "-m", "quiesce.cli.main"]

FOREIGN = """
    import asyncio, os, sys, urllib.request
    import quiesce
    from quiesce import DataPlaneCheckpointBarrier

    async def main():
        barrier = DataPlaneCheckpointBarrier()
        for _ in range(5):
            async with barrier.mutation("group_commit"):
                pass
        async with barrier.checkpoint():
            pass

    asyncio.run(main())
    from quiesce.telemetry import enable
    handles = list(enable._HANDLES)
    print(len(handles))
    for handle in handles:
        print(urllib.request.urlopen(handle.url).read().decode())
"""


def run(
    tmp_path: Path, command: list[str], code: str = FOREIGN, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a script with a command before it, in an environment without variables of ours."""
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(code))
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("QUIESCE_", "OTEL_"))}
    return subprocess.run(
        [*command, sys.executable, str(script)],
        cwd=tmp_path,
        env={**clean, **(env or {})},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def test_a_program_that_says_nothing_is_scraped(tmp_path: Path) -> None:
    """Its barrier reports, under the script's name, on a free port."""
    done = run(tmp_path, [*QUIESCE, "exec", "--port", "0", "--no-record", "--"])
    assert done.returncode == 0, done.stderr
    count, _, scrape = done.stdout.partition("\n")
    assert count == "1"
    assert (
        'quiesce_mutation_hold_seconds_count{kind="group_commit",role="controller",run="train"} 5.0' in scrape
    )


def test_the_environment_alone_is_enough(tmp_path: Path) -> None:
    """The command sets variables and nothing else, so anybody can set them."""
    env = {"QUIESCE_METRICS": "1", "QUIESCE_PORT": "0", "QUIESCE_RUN": "r7"}
    done = run(tmp_path, [], env=env)
    assert done.returncode == 0, done.stderr
    assert 'run="r7"' in done.stdout


@pytest.mark.parametrize("env", [{}, {"QUIESCE_METRICS": "0"}, {"QUIESCE_METRICS": "1", "RANK": "3"}])
def test_nobody_who_was_not_asked_serves(tmp_path: Path, env: dict[str, str]) -> None:
    """Neither without the switch, nor in a rank that is not the first."""
    done = run(tmp_path, [], env={**env, "QUIESCE_PORT": "0"})
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "0"


def test_a_process_that_builds_nothing_of_quiesce_serves_nothing(tmp_path: Path) -> None:
    """A spawned loader worker imports the library, and no more."""
    code = """
        import quiesce
        from quiesce.telemetry import enable
        print(len(list(enable._HANDLES)))
    """
    done = run(tmp_path, [*QUIESCE, "exec", "--port", "0", "--no-record", "--"], code)
    assert done.stdout.strip() == "0"


def test_switching_on_in_code_wins(tmp_path: Path) -> None:
    """There is one endpoint, with the name that the code gave."""
    code = FOREIGN.replace(
        "    async def main():", '    held = quiesce.enable_metrics("mine", 0)\n\n    async def main():'
    )
    done = run(tmp_path, [*QUIESCE, "exec", "--no-record", "--"], code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("1\n")
    assert 'run="mine"' in done.stdout


def test_telemetry_that_cannot_start_costs_one_line_and_not_the_run(tmp_path: Path) -> None:
    """The run goes on without it."""
    done = run(tmp_path, [], env={"QUIESCE_METRICS": "1", "QUIESCE_PORT": "0", "QUIESCE_SD_DIR": "missing"})
    assert done.returncode == 0
    assert done.stdout.strip() == "0"
    assert "QUIESCE_SD_DIR" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_target_file_is_there_while_the_endpoint_serves(tmp_path: Path) -> None:
    """In the format that Prometheus reads, and gone at the end."""
    targets = tmp_path / "targets"
    targets.mkdir()
    code = FOREIGN + '    print(next(__import__("pathlib").Path("targets").iterdir()).read_text())\n'
    done = run(tmp_path, [*QUIESCE, "exec", "--port", "0", "--no-record", "--sd-dir", "targets", "--"], code)
    assert done.returncode == 0, done.stderr
    (told,) = json.loads(done.stdout.strip().splitlines()[-1])
    assert told["targets"][0].startswith("127.0.0.1:")
    assert list(targets.iterdir()) == []


@pytest.mark.parametrize("rank", ["RANK", "SLURM_PROCID"])
def test_a_rank_that_is_not_the_first_says_and_makes_nothing(tmp_path: Path, rank: str) -> None:
    """Nor does it look at the port, which the first one has by then, perhaps on the same machine."""
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        command = [*QUIESCE, "exec", "--port", str(taken.getsockname()[1]), "--run-dir", "r", "--"]
        done = run(tmp_path, command, env={rank: "1"})
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "0", "")
    assert not (tmp_path / "r").exists()


def test_opentelemetrys_own_variable_names_the_exporter(tmp_path: Path) -> None:
    """``OTEL_TRACES_EXPORTER=otlp`` is what whoever knows OpenTelemetry tries first."""
    with http_receiver() as (url, received):
        env = {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_ENDPOINT": url}
        done = run(tmp_path, [*QUIESCE, "exec", "--port", "0", "--run-dir", "r", "--"], env=env)
    assert done.returncode == 0, done.stderr
    assert {span.name for span in received.spans()} >= {"quiesce.slot", "quiesce.window"}
    assert {path.name.partition("-")[0] for path in (tmp_path / "r" / "telemetry").iterdir()} >= {
        "events",
        "samples",
        "slots",
    }


def test_the_exit_code_and_the_signals_are_the_commands(tmp_path: Path) -> None:
    """It becomes the command: the same process."""
    done = run(tmp_path, [*QUIESCE, "exec", "--no-record", "--"], "raise SystemExit(7)")
    assert done.returncode == 7
    done = run(
        tmp_path,
        [*QUIESCE, "exec", "--no-record", "--"],
        f"import os; os.kill(os.getpid(), {int(signal.SIGTERM)})",
    )
    assert done.returncode == -signal.SIGTERM


@pytest.mark.parametrize(
    "arguments, code, told",
    [
        (["exec"], 2, "nothing to run"),
        (["exec", "--", "no-such-command-anywhere"], 127, "no-such-command-anywhere"),
        (["exec", "--", "/"], 126, "cannot be executed"),
        (["exec", "--port", "x", "--", "true"], 2, "QUIESCE_PORT"),
        (["exec", "--run-dir", "/proc/no", "--", "true"], 1, "/proc/no"),
    ],
)
def test_what_cannot_be_run_is_one_clear_line(
    tmp_path: Path, arguments: list[str], code: int, told: str
) -> None:
    """With the exit code that a shell would give."""
    done = subprocess.run(
        [*QUIESCE, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == code
    assert told in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_a_taken_port_is_refused_before_the_command_starts(tmp_path: Path) -> None:
    """A port that somebody named is used or fails loudly."""
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        done = run(tmp_path, [*QUIESCE, "exec", "--port", port, "--no-record", "--"])
    assert done.returncode == 1
    assert port in done.stderr
    assert done.stdout == ""
