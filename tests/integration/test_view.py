"""`quiesce view` with real programs: a run that goes on, what others recorded, and everything that goes away."""

import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote

import pytest

from tests.alert_receiver import until
from tests.alert_stack import TOOLS
from tests.unit.view.rig import span, write_recording

pytestmark = pytest.mark.distribution

RUN = Path(__file__).with_name("view_run.py")
NOON = 1_790_000_400.0
STEPS = "quiesce_groups_trained_total"


class View:
    """A running `quiesce view`."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        self.process = process
        self.log = log
        self.port = 0

    def wait(self) -> None:
        """Wait until it tells its address."""

        def told() -> bool:
            assert self.process.poll() is None, self.log.read_text()
            found = re.search(r"open http://127\.0\.0\.1:(\d+)/", self.log.read_text())
            self.port = int(found[1]) if found else 0
            return bool(found)

        until(told, 30)

    def get(self, path: str) -> tuple[int, Any]:
        """Ask it; return the status and what it answered."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            content = answer.read()
            is_json = answer.headers.get_content_type() == "application/json"
            return answer.status, json.loads(content) if is_json else content.decode()
        finally:
            connection.close()

    def info(self) -> Any:  # noqa: ANN401 - what JSON can say
        """Ask what is shown."""
        return self.get("/api/info")[1]

    def query(self, expression: str, at: float | None = None) -> dict[tuple[str, ...], float]:
        """Ask Prometheus through it; values by the labels' values."""
        when = "" if at is None else f"&time={at}"
        status, told = self.get(f"/api/prometheus/query?query={quote(expression)}{when}")
        if status != 200:
            return {}
        return {
            tuple(value for _, value in sorted(one["metric"].items())): float(one["value"][1])
            for one in told["data"]["result"]
        }

    def children(self) -> list[int]:
        """Return the processes that it has started and that live."""
        found = []
        for entry in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = entry.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[1]) == self.process.pid and fields[0] != "Z":
                found.append(int(entry.parent.name))
        return found


@contextmanager
def viewing(*folders: Path, arguments: tuple[str, ...] = (), ready: bool = True) -> Iterator[View]:
    """Show folders until the end of the block."""
    log = folders[0].with_name(f"{folders[0].name}.view.log")
    with log.open("w") as file:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "quiesce.cli",
                "view",
                *folders,
                "--port",
                "0",
                "--no-browser",
                *arguments,
            ],
            stderr=file,
            text=True,
        )
    view = View(process, log)
    try:
        view.wait()
        if ready:
            until(lambda: bool(view.info()["prometheus"]["ok"]), 30)
        yield view
    finally:
        process.kill()
        process.wait(10)


@contextmanager
def running(folder: Path, run: str = "mine") -> Iterator[IO[str]]:
    """Run something worth looking at; yields where its commands go."""
    folder.mkdir(exist_ok=True)
    process = subprocess.Popen([sys.executable, RUN, run, folder], stdin=subprocess.PIPE, text=True)
    assert process.stdin is not None
    try:
        until((folder / "metrics.json").exists, 30)
        yield process.stdin
    finally:
        process.stdin.close()
        try:
            process.wait(10)
        finally:
            process.kill()


def gone(pids: list[int]) -> Callable[[], bool]:
    """Return what says whether those processes are over; one that nobody has buried yet is."""

    def over() -> bool:
        for pid in pids:
            try:
                if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
                    return False
            except OSError:
                continue
        return True

    return over


@pytest.mark.timeout(150)
def test_a_run_is_seen_live_over_a_restart_and_a_death_of_prometheus(tmp_path: Path) -> None:
    """Numbers, alert with its runbook, exemplar with its trace; then everything that can go wrong, and a clean end."""
    folder = tmp_path / "mine"
    slots = 'sum(quiesce_mutation_hold_seconds_count{kind="group_commit"})'
    started = "max(quiesce_run_started_timestamp_seconds)"
    with running(folder) as run, viewing(folder) as view:
        until(lambda: view.query(slots).get((), 0) > 0, 30)
        info = view.info()
        assert (info["live"], info["run"], info["to"], info["scrape_interval"]) == (True, "mine", None, 1.0)
        until(lambda: view.query("up") == {("up", "mine", "quiesce"): 1.0}, 60)  # a scrape may be late once
        until(lambda: () in view.query(started), 60)
        first = view.query(started)[()]

        run.write("violate\n")
        run.flush()
        until(lambda: bool(view.query('ALERTS{alertname="QuiesceOwnershipConflict"}')), 30)

        def paged() -> list[str]:
            return [
                alert["annotations"]["runbook_url"]
                for alert in view.get("/api/alerts")[1]
                if alert["labels"]["alertname"] == "QuiesceOwnershipConflict"
            ]

        until(lambda: bool(paged()), 30)
        (url,) = paged()
        assert url == f"http://127.0.0.1:{view.port}/runbooks/QuiesceOwnershipConflict"
        assert "<h1" in view.get("/runbooks/QuiesceOwnershipConflict")[1]

        found = exemplar(view)

        def recorded() -> bool:
            status, trace = view.get(f"/api/trace/{found}")
            return status == 200 and any(one["name"] == "quiesce.slot" for one in trace["spans"])

        until(recorded, 30)
        (server,) = [pid for pid in view.children() if is_a(pid, "prometheus")]
        os.kill(server, signal.SIGKILL)
        until(lambda: "Prometheus is back" in view.log.read_text(), 30)
        assert "Prometheus ended (SIGKILL); it is started again" in view.log.read_text()
        assert view.query(f"max(last_over_time({started[4:-1]}[5m]))")[()] == first  # what it had, it has

    with viewing(folder) as view:
        until(lambda: not view.info()["live"], 5)
        assert view.info()["recorded"]
        with running(folder):
            until(lambda: view.query(started).get((), 0) > first, 60)
            until(lambda: bool(view.info()["live"]), 60)
        pids = view.children()
        view.process.send_signal(signal.SIGINT)
        assert view.process.wait(8) == 0, view.log.read_text()
        assert len(pids) == 2
        assert gone(pids)()
        assert not (folder / "view" / "now").exists()


def exemplar(view: View) -> str:
    """Wait for an exemplar of a slot; return its trace."""
    found: list[str] = []

    def come() -> bool:
        now = time.time()
        query = quote('quiesce_mutation_hold_seconds_bucket{kind="group_commit"}')
        _, told = view.get(f"/api/prometheus/query_exemplars?query={query}&start={now - 300}&end={now}")
        found.extend(one["labels"]["trace_id"] for series in told["data"] for one in series["exemplars"])
        return bool(found)

    until(come, 30)
    return found[0]


def is_a(pid: int, name: str) -> bool:
    """Say whether a process is that program."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].endswith(name.encode())


@pytest.mark.timeout(150)
def test_two_recordings_of_one_name_are_shown_at_once_and_nothing_outlives_a_kill(tmp_path: Path) -> None:
    """Samples, alerts and exemplars of both are there at the times at which they were recorded, and told apart.

    Not even SIGKILL leaves a program behind, and the next start finds what was made.
    """
    last = 'quiesce_invariant_last_violation_timestamp_seconds{invariant="single_owner"}'
    for number, name in enumerate(("one", "two")):
        write_recording(
            tmp_path / name,
            run="tiny",
            samples=[
                (
                    NOON + at,
                    {STEPS: at * (number + 1), last: NOON + 300 if at >= 300 else 0},
                )
                for at in range(0, 7500, 15)
            ],
            spans=[span("quiesce.train.step", NOON + 60, 2.0, trace=f"{number + 1}" * 32)],
        )
    with viewing(tmp_path / "one", tmp_path / "two") as view:
        info = view.info()
        assert (info["live"], info["recorded"], info["scrape_interval"]) == (False, True, 15.0)
        assert (info["from"], info["to"]) == (NOON, NOON + 7485)
        assert info["past"]["problems"] == []
        assert [run["run"] for run in info["runs"]] == ["tiny", "tiny (two)"]
        rate = "sum by (run) (rate(quiesce_groups_trained_total[1m]))"
        for at in (NOON + 120, NOON + 7300):
            assert view.query(rate, at) == {
                ("tiny",): pytest.approx(1.0),
                ("tiny (two)",): pytest.approx(2.0),
            }
        fired = 'count by (run) (ALERTS{alertname="QuiesceOwnershipConflict",alertstate="firing"})'
        assert view.query(fired, NOON + 290) == {}
        assert view.query(fired, NOON + 400) == {("tiny",): 1.0, ("tiny (two)",): 1.0}
        assert view.query(fired, NOON + 300 + 1800 + 700) == {}
        query = quote('quiesce_train_step_seconds_bucket{run="tiny (two)"}')
        _, told = view.get(f"/api/prometheus/query_exemplars?query={query}&start={NOON}&end={NOON + 100}")
        ((only,),) = [series["exemplars"] for series in told["data"]]
        assert (
            view.get(f"/api/trace/{only['labels']['trace_id']}")[1]["spans"][0]["name"]
            == "quiesce.train.step"
        )
        other = subprocess.run(
            [sys.executable, "-m", "quiesce.cli", "view", tmp_path / "one", "--no-browser", "--port", "0"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert other.returncode == 1
        assert f"shown already, at http://127.0.0.1:{view.port}" in other.stderr
        made = sorted((tmp_path / "one" / "view" / "past").iterdir())
        until(lambda: len(view.children()) == 2, 10)
        pids = view.children()
        view.process.kill()
        view.process.wait(10)
        until(gone(pids), 5)

    with viewing(tmp_path / "one", tmp_path / "two") as view:
        assert sorted((tmp_path / "one" / "view" / "past").iterdir()) == made
        assert view.query(rate, NOON + 120)[("tiny",)] == pytest.approx(1.0)


def arguments_of(pid: int) -> list[str]:
    """Return a process's arguments."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")


def test_what_is_missing_costs_itself_alone(tmp_path: Path) -> None:
    """Without Alertmanager, promtool and a folder to write into, a run that goes on is shown.

    What is missing is told, with the line that installs it; a temporary folder is gone at the end.
    """
    folder = write_recording(tmp_path / "mine", samples=[(NOON, {STEPS: 1.0})])
    (folder / "view").write_text("in the way")
    alone = tmp_path / "bin" / "prometheus"
    alone.parent.mkdir()
    shutil.copy((TOOLS / "prometheus").resolve(), alone)
    script = (
        "import pathlib, sys\n"
        "from quiesce.view import programs\n"
        "programs.find_programs.__kwdefaults__['checkout'] = pathlib.Path('/nothing')\n"
        "from quiesce.cli.main import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    log = tmp_path / "log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [
                sys.executable,
                "-c",
                script,
                "view",
                folder,
                "--prometheus",
                alone,
                "--no-browser",
                "--port",
                "0",
            ],
            stderr=file,
            text=True,
            env={**os.environ, "PATH": "/nothing"},
        )
    view = View(process, log)
    try:
        view.wait()
        until(lambda: bool(view.info()["prometheus"]["ok"]), 30)
        info = view.info()
        assert "apt-get install" in info["alertmanager"]["error"]
        temporary, recording = info["past"]["problems"]
        assert "a temporary folder is used" in temporary
        assert "apt-get install" in recording
        assert view.get("/api/alerts")[0] == 502
        (server,) = view.children()
        (data,) = [Path(word.partition("=")[2]) for word in arguments_of(server) if "tsdb.path" in word]
        assert data.is_dir()
    finally:
        process.terminate()
        assert process.wait(10) == 0
    assert not data.parent.parent.exists()


def test_a_run_that_begins_later_is_waited_for(tmp_path: Path) -> None:
    """Without a folder the newest run under runs/ is shown, once there is one, and then those that begin."""
    log = tmp_path / "log"
    with log.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "quiesce.cli", "view", "--no-browser", "--port", "0"],
            stderr=file,
            text=True,
            cwd=tmp_path,
        )
    view = View(process, log)
    try:
        until(lambda: "waiting for one" in log.read_text(), 20)
        write_recording(tmp_path / "runs" / "first", samples=[(NOON, {STEPS: 1.0})])
        view.wait()
        write_recording(tmp_path / "runs" / "second", run="other", samples=[(NOON, {STEPS: 1.0})])
        until(lambda: [run["run"] for run in view.info()["runs"]] == ["mine", "other"], 10)
    finally:
        process.terminate()
        assert process.wait(10) == 0
