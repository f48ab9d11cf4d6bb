"""What is left of a worker that is killed right after it reported a violation: who it was, and what it found."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

from quiesce.errors import NoRecordingError
from quiesce.telemetry.recording import RecordedEvent, Recording

ROOT = Path(__file__).parents[2]
PATIENCE_SECONDS = 20.0
VIOLATED = "invariant.violated"


class Worker:
    """A process of :mod:`tests.integration.conflict_worker`."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def says(self) -> str:
        """Return what it says next."""
        out: IO[str] | None = self.process.stdout
        assert out is not None
        return out.readline().strip()

    def report(self, group: str) -> None:
        """Have it report a conflict; return once it has."""
        told: IO[str] | None = self.process.stdin
        assert told is not None
        told.write(f"{group}\n")
        told.flush()
        assert self.says() == "reported"

    def kill(self) -> None:
        """Kill it, with whatever it had not written."""
        self.process.send_signal(signal.SIGKILL)
        assert self.process.wait(PATIENCE_SECONDS) == -signal.SIGKILL


@contextmanager
def workers(folder: Path, count: int) -> Iterator[list[Worker]]:
    """Start so many processes of one run, in one folder."""
    command = [sys.executable, "-m", "tests.integration.conflict_worker"]
    with ExitStack() as stack:
        started = [
            stack.enter_context(
                subprocess.Popen(
                    [*command, str(number), str(folder)],
                    cwd=ROOT,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for number in range(count)
        ]
        for process in started:
            stack.callback(process.kill)
        found = [Worker(process) for process in started]
        assert [worker.says() for worker in found] == ["ready"] * count
        yield found


def logged(folder: Path) -> list[dict[str, Any]]:
    """Return the violations in the run's log."""
    lines = (folder / "log.jsonl").read_text().splitlines()
    return [line for line in map(json.loads, lines) if line["event"] == VIOLATED]


def recorded(folder: Path) -> list[RecordedEvent]:
    """Return the violations in the run's recording."""
    try:
        recording = Recording.open(folder)
    except NoRecordingError:  # the folder is made a moment before its first file
        return []
    return [event for event in recording.events() if event.fields["event"] == VIOLATED]


def test_a_conflict_is_attributed_to_the_worker_that_is_killed_right_after_it_reported_it(
    tmp_path: Path,
) -> None:
    """The log has it at once, and the recording a moment later, without waiting for more to come."""
    with workers(tmp_path, 3) as (bystander, killed, later):
        killed.report("e000-p0000001")
        killed.kill()
        said = logged(tmp_path)
        later.report("e000-p0000002")
        since = time.monotonic()
        while not any(event.writer.role == "worker-2" for event in recorded(tmp_path)):
            assert time.monotonic() - since < PATIENCE_SECONDS
            time.sleep(0.01)
        later.kill()
        bystander.kill()

    assert [(line["role"], line["run"], line["groups"]) for line in said] == [
        ("worker-1", "conflicts", ["e000-p0000001"])
    ]
    assert said[0]["owners"] == ["ledger", "buffer"]
    roles = {tuple(line["groups"]): line["role"] for line in logged(tmp_path)}
    assert roles == {("e000-p0000001",): "worker-1", ("e000-p0000002",): "worker-2"}
    kept = {tuple(event.fields["groups"]): event.writer.role for event in recorded(tmp_path)}
    assert kept.items() <= roles.items()
    assert kept[("e000-p0000002",)] == "worker-2"
