"""What goes wrong around telemetry, and that the training does not notice: real processes and real sockets."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from quiesce.barrier import DataPlaneCheckpointBarrier
from quiesce.observers import HOOKS, Hub
from quiesce.telemetry.enable import enable_metrics
from quiesce.telemetry.recording import Recording
from quiesce.testing import in_virtual_time
from tests.alert_stack import free_port
from tests.otlp_receiver import Received, http_receiver
from tests.run_rig import Run

ROOT = Path(__file__).parents[2]
LIMIT_SECONDS = 2.0
"""How long ending may take, beside what it takes without telemetry. A collector's own time limit is ten."""

CLOSING_SECONDS = 1.5
"""How long telemetry may take for its part: its deadline, and a little."""


class Ended(NamedTuple):
    """How a process ended."""

    code: int
    errors: str
    at: float
    said: dict[str, Any]


class Program:
    """A process of :mod:`tests.faults.telemetry_program`.

    Args:
        folder: An existing folder of its own, in which it records.
        arguments: What to do.
        env: Further variables.
        within: A command that runs it.
    """

    def __init__(
        self, folder: Path, *arguments: str, env: Mapping[str, str], within: Sequence[str] = ()
    ) -> None:
        clean = {
            name: value for name, value in os.environ.items() if not name.startswith(("QUIESCE_", "OTEL_"))
        }
        self.folder = folder
        self.process = subprocess.Popen(
            [*within, sys.executable, "-m", "tests.faults.telemetry_program", *arguments],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**clean, **env},
        )

    def says(self) -> dict[str, Any]:
        """Return its next line."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            _, errors = self.process.communicate()
            pytest.fail(f"it ended; it said:\n{errors}")
        told: dict[str, Any] = json.loads(line)
        return told

    def go(self) -> None:
        """Let it go on."""
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def ended(self) -> Ended:
        """Wait for its end and for everybody who holds its output."""
        said, errors = self.process.communicate(timeout=50)
        at = time.monotonic()
        last: dict[str, Any] = {}
        for line in said.splitlines():
            last |= json.loads(line)
        return Ended(self.process.returncode, errors, at, last)


def watched(folder: Path, url: str, protocol: str = "http/protobuf") -> dict[str, str]:
    """Return what switches everything on."""
    return {
        "QUIESCE_METRICS": "1",
        "QUIESCE_PORT": "0",
        "QUIESCE_RUN": "r1",
        "QUIESCE_RUN_DIR": str(folder),
        "QUIESCE_EXPORTERS": "recorder,otlp",
        "QUIESCE_SPANS": "all",
        "OTEL_EXPORTER_OTLP_ENDPOINT": url,
        "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
    }


@contextlib.contextmanager
def refuses() -> Iterator[str]:
    """Be a port that nobody listens on."""
    yield f"http://127.0.0.1:{free_port()}"


@contextlib.contextmanager
def mute() -> Iterator[str]:
    """Be a port that takes connections and never reads."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"


@contextlib.contextmanager
def silent() -> Iterator[str]:
    """Take requests and never answer."""
    with http_receiver() as (url, received):
        received.hold.clear()
        yield url


@contextlib.contextmanager
def endless() -> Iterator[str]:
    """Answer byte after byte."""
    with http_receiver() as (url, received):
        received.endless = True
        yield url


@contextlib.contextmanager
def well() -> Iterator[str]:
    """Be a collector as it should be."""
    with http_receiver() as (url, received):
        WELL[url] = received
        yield url


WELL: dict[str, Received] = {}
"""What collectors that are as they should be were sent, by their address."""


def on_a_full_disk(folder: Path) -> list[str]:
    """Return a command that runs a program with a file system of 64 KiB at its folder, or [] where that is not allowed."""
    alone = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    mount = f"mount -t tmpfs -o size=64k tmpfs '{folder}'"
    tried = subprocess.run([*alone, mount], capture_output=True, check=False)
    return [] if tried.returncode else [*alone, f'{mount} && exec "$@"', "sh"]


class Case(NamedTuple):
    """A collector, the end that the program comes to, and what else it has to live with."""

    collector: Any
    protocol: str
    how: str
    trouble: str = ""


COLLECTORS = {
    "refuses-http": Case(refuses, "http/protobuf", "return"),
    "refuses-grpc": Case(refuses, "grpc", "sigterm"),
    "mute-http": Case(mute, "http/protobuf", "raise"),
    "mute-grpc": Case(mute, "grpc", "return"),
    "silent-http": Case(silent, "http/protobuf", "sigterm"),
    "endless-http": Case(endless, "http/protobuf", "raise"),
}
TROUBLES = {
    "full-disk": Case(well, "http/protobuf", "raise", "disk"),
    "file-limit": Case(well, "http/protobuf", "sigterm", "files"),
    "raising-observer": Case(well, "http/protobuf", "raise", "observer"),
}
CASES = COLLECTORS | TROUBLES
CODES = {"return": 0, "raise": 1, "sigterm": -signal.SIGTERM}


class Outcome(NamedTuple):
    """How a program fared."""

    told: dict[str, Any]
    ended: Ended
    took: float
    bare_took: float
    folder: Path
    received: Received | None


BARE = ("without telemetry, told to end first", "without telemetry, told to end last")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    """How a program of each case fared; those with a bad collector mostly wait when they end, the others compute."""
    return together(COLLECTORS, tmp_path_factory) | together(TROUBLES, tmp_path_factory)


def together(cases: Mapping[str, Case], folders: pytest.TempPathFactory) -> dict[str, Outcome]:
    """Start a program for each case, and two without telemetry, and have them end, all at the same time."""
    with contextlib.ExitStack() as stack:
        programs = {BARE[0]: Program(folders.mktemp("bare"), "slots", "return", env={})}
        urls = {}
        for name, case in cases.items():
            folder = folders.mktemp(name)
            urls[name] = url = stack.enter_context(case.collector())
            hangs = case.collector in {mute, silent, endless}
            env = watched(folder, url, case.protocol) | {
                "TROUBLE": case.trouble,
                "FLUSH": "0.3" if hangs else "10",
            }
            within: list[str] = []
            if case.trouble == "disk" and not (within := on_a_full_disk(folder)):
                env["TROUBLE"] = "files"  # the next best: nobody but the administrator may mount here
            programs[name] = Program(folder, "slots", case.how, env=env, within=within)
        programs[BARE[1]] = Program(folders.mktemp("bare"), "slots", "return", env={})
        told = {name: program.says() for name, program in programs.items()}
        since = {}
        waiting = stack.enter_context(ThreadPoolExecutor(len(programs)))
        ends = {}
        for name, program in programs.items():
            since[name] = time.monotonic()
            if name in cases and cases[name].how == "sigterm":
                program.process.send_signal(signal.SIGTERM)
            else:
                program.go()
            ends[name] = waiting.submit(program.ended)
        ended = {name: end.result() for name, end in ends.items()}
    took = {name: ended[name].at - since[name] for name in programs}
    bare = max(took[name] for name in BARE)  # the first has the processors to itself for a while
    return {
        name: Outcome(told[name], ended[name], took[name], bare, programs[name].folder, WELL.get(urls[name]))
        for name in cases
    }


def sampled(recording: Recording) -> dict[str, float]:
    """Return the last value of every series; a sample has those that changed."""
    values: dict[str, float] = {}
    for sample in recording.samples():
        values |= {name: value for name, value in sample.values.items() if value is not None}
    return values


@pytest.mark.parametrize("name", CASES)
def test_trouble_delays_neither_a_slot_nor_the_end(outcomes: dict[str, Outcome], name: str) -> None:
    """No slot waits, also while telemetry is flushed; the process and its helper are gone within two seconds."""
    outcome = outcomes[name]

    assert outcome.told["slots"] > 2_000
    assert outcome.told["waited_ns"] == 0
    assert outcome.ended.code == CODES[CASES[name].how]
    assert outcome.ended.said["closed"] < CLOSING_SECONDS
    # The process and then its helper: two that end, each in the time that one without telemetry takes.
    assert outcome.took - 2 * outcome.bare_took < LIMIT_SECONDS
    assert ("the optimizer caught fire" in outcome.ended.errors) == (CASES[name].how == "raise")


@pytest.mark.parametrize("name", COLLECTORS)
def test_beside_a_bad_collector_the_recorder_has_everything(outcomes: dict[str, Outcome], name: str) -> None:
    """Every slot, and the window that was open at the end, which is marked."""
    outcome = outcomes[name]
    recorded = list(Recording.open(outcome.folder).spans())

    assert len([span for span in recorded if span.name == "quiesce.slot"]) == outcome.told["slots"]
    cut = [span for span in recorded if span.cut_off]
    assert {span.name for span in cut} == {"quiesce.window", "quiesce.checkpoint.exclusive"}
    assert {span.attributes["quiesce.cut_off"] for span in cut} == {True}


def test_a_dead_collector_is_seen_in_the_numbers_beside_a_recorder_that_has_everything(
    outcomes: dict[str, Outcome],
) -> None:
    """The spans went somewhere, and are lost to the collector all the same; the recording itself says so."""
    values = sampled(Recording.open(outcomes["refuses-http"].folder))

    assert values['quiesce_telemetry_spans_total{fate="exported"}'] >= 2_000
    assert values['quiesce_telemetry_spans_total{fate="failed"}'] == 0
    assert values['quiesce_telemetry_sink_spans_total{sink="recorder",fate="exported"}'] >= 2_000
    assert values['quiesce_telemetry_sink_spans_total{sink="otlp",fate="failed"}'] >= 2_000


@pytest.mark.parametrize("name", TROUBLES)
def test_in_trouble_here_the_collector_is_sent_everything(
    outcomes: dict[str, Outcome], name: str, tmp_path: Path
) -> None:
    """Every slot; and the numbers that it is sent say what is wrong."""
    outcome = outcomes[name]
    received = outcome.received
    assert received is not None
    refused = {
        point_labels(point)["sink"]: point.as_double
        for point in received.metrics()["quiesce_telemetry_sink_spans"].sum.data_points
        if point_labels(point)["fate"] == "failed"
    }
    (errors,) = received.metrics()["quiesce_telemetry_observer_errors"].sum.data_points

    assert len([span for span in received.spans() if span.name == "quiesce.slot"]) == outcome.told["slots"]
    if name == "raising-observer":
        assert errors.as_double >= outcome.told["slots"]
        assert outcome.ended.errors.count("ZeroDivisionError") <= len(
            HOOKS
        )  # for each hook, not for each slot
        assert not any(refused.values())
    else:
        assert errors.as_double == 0
        assert {sink for sink, count in refused.items() if count} == {"recorder"}
        assert outcome.ended.errors.count("its recording lacks something") == 1
        full = name == "full-disk" and on_a_full_disk(tmp_path)
        assert os.strerror(errno.ENOSPC if full else errno.EFBIG) in outcome.ended.errors


def point_labels(point: Any) -> dict[str, str]:  # noqa: ANN401 - protobuf's messages are not typed
    """Return the attributes of a data point."""
    return {known.key: known.value.string_value for known in point.attributes}


def test_sigterm_in_a_save_exports_what_is_open_as_cut_off(tmp_path: Path) -> None:
    """A real save: in one trace, at the collector and in the run's folder."""
    folder = tmp_path / "run"
    with http_receiver() as (url, received):
        program = Program(tmp_path, "save", str(folder), env={"OTEL_EXPORTER_OTLP_ENDPOINT": url})
        program.says()
        since = time.monotonic()
        program.process.send_signal(signal.SIGTERM)
        ended = program.ended()

    assert (ended.code, ended.errors) == (-signal.SIGTERM, "")
    assert ended.at - since < LIMIT_SECONDS
    sent = received.spans()
    cut = [s for s in sent if any(a.key == "quiesce.cut_off" and a.value.bool_value for a in s.attributes)]
    saved = {span.name: span for span in cut if span.name.startswith("quiesce.checkpoint")}
    assert saved.keys() == {"quiesce.checkpoint", "quiesce.checkpoint.write"}
    write, root = saved["quiesce.checkpoint.write"], saved["quiesce.checkpoint"]
    assert (write.trace_id, write.parent_span_id) == (root.trace_id, root.span_id)
    recorded = Recording.open(folder)
    assert Counter(s.name for s in recorded.spans() if s.cut_off) == Counter(s.name for s in cut)
    assert len(list(recorded.spans())) == len(sent)
    values = sampled(recorded)
    assert values['quiesce_checkpoint_phase_seconds_count{phase="exclusive",outcome="completed"}'] == 1
    assert values['quiesce_checkpoint_phase_seconds_count{phase="write",outcome="completed"}'] == 0


def test_children_of_a_watched_program_neither_serve_nor_export_nor_double(tmp_path: Path) -> None:
    """Forked loader workers, a spawned child and a forked program of its own: each ends at once, none is counted."""
    with http_receiver() as (url, received):
        env = watched(tmp_path, url) | {"PYTHONWARNINGS": "ignore"}  # forking four workers here is the point
        bare = Program(tmp_path, "forks", env={"PYTHONWARNINGS": "ignore"})
        program = Program(tmp_path, "forks", env=env)
        told, plain = program.says(), bare.says()
        program.go()
        bare.go()
        ended = program.ended()
        bare.ended()

    assert (ended.code, ended.errors) == (0, "")
    assert told["batches"] == 1_000
    assert told["served"] == {"spawned": False, "forked": False}
    # Each in a second, and what one without telemetry takes, which is much on a busy machine.
    assert {what for what, took in told["ended"].items() if took - 2 * plain["ended"][what] >= 1.0} == set()
    instances = {
        known.value.string_value
        for signal_, request in received.requests
        for resource in (request.resource_spans if signal_ == "traces" else request.resource_metrics)
        for known in resource.resource.attributes
        if known.key == "service.instance.id"
    }
    assert len(instances) == 1
    exported = received.metrics()["quiesce_invariant_violations"].sum.data_points
    counted = {
        tuple(sorted((known.key, known.value.string_value) for known in point.attributes)): point.as_double
        for point in exported
    }
    assert len(counted) == len(exported)
    assert sum(counted.values()) == 5
    recording = Recording.open(tmp_path)
    assert len(recording.writers) == 1


@in_virtual_time
async def test_a_full_disk_under_the_recorder_hurts_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The run trains and saves as ever, spans go on to the collector, and the loss is said once and counted."""
    write = os.write
    refused = []

    def full(descriptor: int, data: bytes) -> int:
        path = str(Path(f"/proc/self/fd/{descriptor}").readlink())
        if "/telemetry/" in path:
            refused.append(path)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        return write(descriptor, data)

    path = tmp_path / "run"
    with http_receiver() as (url, received):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        run = Run(path, in_memory=True)
        built = run.start(save_every_steps=2)
        hub = built._hub  # noqa: SLF001 - the rig makes it
        monkeypatch.setattr(os, "write", full)
        handle = enable_metrics("r1", 0, hub=hub, run_dir=path, exporters=["recorder", "otlp"])
        try:
            summary = await built.run()
        finally:
            assert handle.telemetry.flush(20)
            lanes = handle.telemetry.pipeline.lanes()
            totals = handle.telemetry.totals()
            handle.close()
            run.folder.close()
        monkeypatch.setattr(os, "write", write)
        run.check_all_accounted(summary)

    assert refused
    assert lanes["recorder"]["failed"] > 0
    assert lanes["otlp"].get("failed", 0) == 0
    assert totals["exported"] == lanes["otlp"]["delivered"]
    assert {span.name for span in received.spans()} > {"quiesce.checkpoint", "quiesce.train.step"}
    assert len([r for r in caplog.records if "recording lacks something" in r.getMessage()]) == 1


@in_virtual_time
async def test_an_observer_that_raises_in_every_hook_is_counted_and_nothing_else(tmp_path: Path) -> None:
    """A whole run with it ends as one without."""

    class Broken:
        """Raises whatever it is told."""

    def raises(*_: object) -> None:
        raise ZeroDivisionError

    for hook in HOOKS:
        setattr(Broken, hook, raises)
    steps = []
    for number in range(2):
        run = Run(tmp_path / str(number), in_memory=True)
        built = run.start(save_every_steps=2)
        hub = built._hub  # noqa: SLF001 - as above
        if number:
            hub.strict = False
            hub.subscribe(Broken())
        with enable_metrics("r1", 0, hub=hub, exporters=[]) as handle:
            run.check_all_accounted(await built.run())
            errors = {
                sample.value
                for family in handle.collector.collect()
                for sample in family.samples
                if sample.name == "quiesce_telemetry_observer_errors_total"
            }
        run.folder.close()
        steps.append(run.steps)

    assert steps[0] == steps[1]
    assert errors == {sum(hub.errors.values())}
    assert hub.errors["slot_closed"] > 10


STORM = """
import sys, threading, time, urllib.error, urllib.request
url, until = sys.argv[1], time.monotonic() + float(sys.argv[2])
found = []
def scrape():
    while time.monotonic() < until and 0 not in found:
        try:
            with urllib.request.urlopen(url, timeout=20) as answer:
                answer.read()
                found.append(answer.status)
        except urllib.error.HTTPError as error:
            found.append(error.code)
            error.close()
        except OSError:
            found.append(0)
threads = [threading.Thread(target=scrape) for _ in range(50)]
for thread in threads: thread.start()
while 200 not in found: time.sleep(0.01)
print("begun", flush=True)
for thread in threads: thread.join()
print(*found)
"""


def test_a_scrape_storm_does_not_delay_the_end(tmp_path: Path) -> None:
    """Fifty clients ask without a pause until nobody is there any more."""
    bare = Program(tmp_path, "slots", "return", env={})
    bare.says()
    since = time.monotonic()
    bare.go()
    bare_took = bare.ended().at - since
    with http_receiver() as (url, received):
        program = Program(tmp_path, "slots", "sigterm", env=watched(tmp_path, url))
        told = program.says()
        storm = subprocess.Popen(
            [sys.executable, "-c", STORM, told["urls"][0], "20"], stdout=subprocess.PIPE, text=True
        )
        assert storm.stdout is not None
        assert storm.stdout.readline() == "begun\n"
        since = time.monotonic()
        program.process.send_signal(signal.SIGTERM)
        ended = program.ended()
        answers = Counter(storm.communicate(timeout=50)[0].split())

    assert ended.code == -signal.SIGTERM
    assert ended.said["closed"] < CLOSING_SECONDS
    assert ended.at - since - 2 * bare_took < LIMIT_SECONDS
    assert answers["200"] > 0
    assert answers["0"] > 0
    assert len([span for span in received.spans() if span.name == "quiesce.slot"]) == told["slots"]


async def test_a_scrape_storm_makes_no_slot_wait(tmp_path: Path) -> None:
    """Fifty clients without a pause: some are answered, the rest are told to come back, and the loop goes on."""
    import asyncio

    hub = Hub(strict=True)
    barrier = DataPlaneCheckpointBarrier(hub=hub)
    waits: list[int] = []
    gaps: list[float] = []

    class Waits:
        def slot_closed(self, kind: str, wait_ns: int, hold_ns: int, outcome: str, ended_ns: int) -> None:
            waits.append(wait_ns)

    hub.subscribe(Waits())
    before = threading.active_count()  # other tests of this process may have left daemons behind
    with enable_metrics("r1", 0, hub=hub, run_dir=tmp_path) as handle:
        storm = await asyncio.create_subprocess_exec(
            sys.executable, "-c", STORM, handle.url, "1.5", stdout=subprocess.PIPE
        )
        said = asyncio.create_task(storm.communicate())
        while not said.done():
            since = time.perf_counter()
            async with barrier.mutation("retry"):
                await asyncio.sleep(0)
            await asyncio.sleep(0.001)
            gaps.append(time.perf_counter() - since)
        out, _ = await said
        threads = threading.active_count()
        with await asyncio.to_thread(urllib.request.urlopen, handle.url, None, 20) as answer:
            assert answer.status == 200

    answers = Counter(out.decode().replace("begun\n", "").split())
    assert answers["200"] > 0
    assert answers["503"] > 0
    assert set(answers) <= {"200", "503"}
    assert len(waits) > 100
    assert max(waits) == 0
    assert sorted(gaps)[len(gaps) // 2] < 0.05
    assert threads - before < 60
