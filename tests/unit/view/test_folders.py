"""Which run folders are shown, under which names, and as which targets."""

import json
import os
import threading
from collections.abc import Callable, Generator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from quiesce.errors import ViewError
from quiesce.view.folders import Folders, find_newest
from tests.unit.view.rig import write_recording

NOON = 1_800_000_000.0
SAMPLES = [(NOON, {"quiesce_groups_trained_total": 1.0})]


@pytest.fixture
def endpoint() -> Generator[Callable[[str], HTTPServer]]:
    """Starts endpoints that say they are a run."""
    made: list[HTTPServer] = []

    def start(text: str) -> HTTPServer:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_: object) -> None:
                pass

        made.append(HTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=made[-1].serve_forever, args=(0.01,), daemon=True).start()
        return made[-1]

    yield start
    for server in made:
        server.shutdown()
        server.server_close()


def serves(folder: Path, server: HTTPServer) -> None:
    """Have a run folder say where its metrics are."""
    folder.mkdir(exist_ok=True)
    url = f"http://127.0.0.1:{server.server_port}/metrics"
    (folder / "metrics.json").write_text(json.dumps({"url": url, "pid": 1}))


def targets(folder: Path) -> list[Any]:
    """Return the targets that are written down."""
    return [json.loads(path.read_text())[0] for path in sorted(folder.glob("*.json"))]


def test_a_run_is_a_target_while_it_says_so(tmp_path: Path, endpoint: Callable[[str], HTTPServer]) -> None:
    """It becomes one when it answers, follows it to another port, stays one when killed, and ends with its file."""
    mine, told = tmp_path / "mine", tmp_path / "targets"
    told.mkdir()
    first = endpoint('quiesce_run_info{run="ppo",role="controller"} 1.0\n')
    serves(mine, first)
    folders = Folders(told)
    (run,) = [folders.add(mine)]

    assert folders.look()
    assert (run.run, run.name, run.live, run.scraped) == ("ppo", "ppo", True, True)
    (target,) = targets(told)
    assert target["targets"] == [f"127.0.0.1:{first.server_port}"]
    assert target["labels"] == {"job": "quiesce", "instance": "mine", "__metrics_path__": "/metrics"}

    second = endpoint('quiesce_run_info{run="ppo",role="controller"} 1.0\n')
    serves(mine, second)
    assert folders.look()
    assert targets(told)[0]["targets"] == [f"127.0.0.1:{second.server_port}"]

    second.shutdown()
    second.server_close()
    assert folders.look()
    assert not run.live
    assert targets(told)

    (mine / "metrics.json").unlink()
    folders.look()
    assert targets(told) == []


@pytest.mark.parametrize(
    "told", ["", "{", "[]", '{"url": 3}', '{"url": "ftp://127.0.0.1:1/"}', '{"url": "http://127.0.0.1/x"}']
)
def test_what_names_no_endpoint_is_no_target(tmp_path: Path, told: str) -> None:
    """A file that is half written, or says something else, is looked at again the next time."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "metrics.json").write_text(told)
    folders = Folders(tmp_path)
    run = folders.add(tmp_path / "mine")

    folders.look()

    assert not run.live
    assert list(tmp_path.glob("*.json")) == []


def test_an_endpoint_that_is_no_run_is_no_target(
    tmp_path: Path, endpoint: Callable[[str], HTTPServer]
) -> None:
    """A file that a killed run left behind may name a port that somebody else has now."""
    serves(tmp_path / "mine", endpoint("some_other_metric 1.0\n"))
    folders = Folders(tmp_path)
    run = folders.add(tmp_path / "mine")

    folders.look()

    assert not run.live
    assert list(tmp_path.glob("*.json")) == []


def test_two_runs_of_one_name_are_told_apart(tmp_path: Path, endpoint: Callable[[str], HTTPServer]) -> None:
    """The second is called by its folder too, also in what is scraped."""
    for name in ("a/one", "b/one", "c/two"):
        write_recording(tmp_path / name, run="tiny", samples=SAMPLES)
    folders = Folders(tmp_path)
    runs = [folders.add(tmp_path / name) for name in ("a/one", "b/one", "c/two")]
    serves(tmp_path / "b/one", endpoint('quiesce_run_info{run="tiny"} 1.0\n'))

    folders.look()

    assert [run.instance for run in runs] == ["one", "one 2", "two"]
    assert [run.name for run in runs] == ["tiny", "tiny (one 2)", "tiny (two)"]
    assert targets(tmp_path)[0]["labels"]["run"] == "tiny (one 2)"


def test_a_recording_that_begins_later_is_seen(tmp_path: Path) -> None:
    """A run that has just begun has no recording yet."""
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.yaml").touch()
    folders = Folders(tmp_path)
    run = folders.add(tmp_path / "mine")
    before = run.recorded

    write_recording(tmp_path / "mine", samples=SAMPLES)
    folders.look()

    assert (before, run.recorded, run.name) == (False, True, "mine")


def test_the_newest_run_is_the_one_that_was_last_active(tmp_path: Path) -> None:
    """Folders that are no run's do not count."""
    for age, name in enumerate(["new", "old"]):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").touch()
        os.utime(tmp_path / name / "config.yaml", (NOON - age, NOON - age))
    (tmp_path / "notes").mkdir()

    assert find_newest(tmp_path) == tmp_path / "new"
    assert find_newest(tmp_path / "notes") is None
    assert find_newest(tmp_path / "nothing") is None


def test_a_folder_that_is_no_runs_is_refused(tmp_path: Path) -> None:
    """The message says what a run's folder has."""
    folders = Folders(tmp_path)

    with pytest.raises(ViewError, match="is not a folder"):
        folders.add(tmp_path / "nothing")
    with pytest.raises(ViewError, match=r"is not the folder of a run.*telemetry/"):
        folders.add(tmp_path)
