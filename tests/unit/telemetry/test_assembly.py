"""Telemetry with spans, switched on and off: the end of a process, forks, what it costs, what it says of itself."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from quiesce.barrier import DataPlaneCheckpointBarrier
from quiesce.invariants import Violation
from quiesce.observers import Hub
from quiesce.telemetry import pipeline
from quiesce.telemetry.assembly import RunTelemetry, slot_cost_ns
from quiesce.telemetry.collector import QuiesceCollector
from quiesce.telemetry.logs import LogObserver, configure_run_log
from quiesce.telemetry.slots import SlotBook, SlotRecorder
from tests.unit.telemetry.telling import Kept, Telling

PROGRAM = """
    import asyncio, json, os, signal, sys, time
    from pathlib import Path
    from quiesce.barrier import DataPlaneCheckpointBarrier
    from quiesce.observers import Hub
    from quiesce.telemetry.assembly import RunTelemetry

    class File:
        def spans(self, batch):
            with open(sys.argv[1], "a") as out:
                for span in batch:
                    said = [span.name, span.cut_off, dict(span.attributes), span.links, span.span_id]
                    out.write(json.dumps(said) + "\\n")
        def samples(self, families, unix_time): pass
        def events(self, events): pass
        def close(self, deadline_seconds): pass

    class Hangs(File):
        def spans(self, batch):
            time.sleep(60)

    hub = Hub()
    run = RunTelemetry(hub, sinks={"file": File(), "hangs": Hangs()})
    run.start()
    run.close_at_exit()
    barrier = DataPlaneCheckpointBarrier(hub=hub)

    async def held():
        with hub._lock:
            while True:
                time.sleep(0.01)

    async def hung():
        async def holds():
            async with barrier.mutation("admission"):
                hub.fire("gate_closing", "3", 1, "1.1")
                hub.fire("clear_started", "3", 2, 8)
                hub.fire("weight_sync_started", 7)
                hub.fire("restore_started")
                await asyncio.Event().wait()

        async def saves():
            async with barrier.checkpoint():
                pass

        tasks = [asyncio.create_task(holds(), name="holder"), asyncio.create_task(saves())]
        await asyncio.sleep(0)
        print("hung", flush=True)
        await asyncio.wait(tasks)

    async def main():
        async with barrier.mutation("retry"):
            pass
        hub.fire("phase_started", "cut", "write")
        print("ready", flush=True)
        await END

    asyncio.run(main())
"""


def start(tmp_path: Path, end: str) -> subprocess.Popen[str]:
    """Start a program that saves and has not finished; return once it does."""
    program = textwrap.dedent(PROGRAM).replace("END", end)
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "spans")], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def spans_of(tmp_path: Path) -> dict[str, tuple[bool, dict[str, object]]]:
    """Return what the program's sink was given."""
    lines = (tmp_path / "spans").read_text().splitlines()
    return {name: (cut_off, attributes) for name, cut_off, attributes, *_ in map(json.loads, lines)}


class TestTheEnd:
    """A process that ends while something is open, and with a sink that hangs."""

    def test_a_span_that_is_open_at_sigterm_is_exported_as_cut_off(self, tmp_path: Path) -> None:
        """And the process ends of the signal, within two seconds."""
        process = start(tmp_path, "asyncio.Event().wait()")
        since = time.monotonic()
        process.send_signal(signal.SIGTERM)

        assert process.wait(30) == -signal.SIGTERM
        assert time.monotonic() - since < 3.5  # two, and what a busy machine takes
        found = spans_of(tmp_path)
        assert found["quiesce.checkpoint.write"] == (
            True,
            {"quiesce.cut_id": "cut", "quiesce.cut_off": True},
        )
        assert found["quiesce.checkpoint"][0]
        assert not found["quiesce.slot"][0]
        process.stdout.close()  # type: ignore[union-attr] # it is a pipe

    def test_a_drain_that_hangs_at_sigterm_names_its_holder(self, tmp_path: Path) -> None:
        """And its window is linked to the holder's slot; what is told at its end alone is there as well."""
        process = start(tmp_path, "hung()")
        assert process.stdout is not None
        assert process.stdout.readline() == "hung\n"
        process.send_signal(signal.SIGTERM)

        assert process.wait(30) == -signal.SIGTERM
        found = spans_of(tmp_path)
        holder = {"quiesce.last_holder.kind": "admission", "quiesce.last_holder.task": "holder"}
        for name in ("quiesce.checkpoint.drain", "quiesce.window"):
            cut_off, attributes = found[name]
            assert cut_off
            assert attributes.items() >= holder.items()
        for name in ("gate.close", "cleanup.batch", "weight_sync", "restore"):
            assert found[f"quiesce.{name}"][0]
        lines = [json.loads(line) for line in (tmp_path / "spans").read_text().splitlines()]
        (links,) = (line[3] for line in lines if line[0] == "quiesce.window")
        held = [line[4] for line in lines if line[0] == "quiesce.slot" and line[1]]
        assert [span_id for _, span_id in links] == held
        process.stdout.close()

    def test_a_sigterm_while_a_lock_is_held_ends_the_process_all_the_same(self, tmp_path: Path) -> None:
        """A handler runs between any two instructions, so the main thread may hold what closing needs."""
        process = start(tmp_path, "held()")
        since = time.monotonic()
        process.send_signal(signal.SIGTERM)

        assert process.wait(30) == -signal.SIGTERM
        assert time.monotonic() - since < 3.5  # two, and what a busy machine takes
        process.stdout.close()  # type: ignore[union-attr] # it is a pipe

    def test_a_program_that_just_ends_exports_what_it_has(self, tmp_path: Path) -> None:
        """Without a call to close anything."""
        process = start(tmp_path, "asyncio.sleep(0)")

        assert process.wait(30) == 0
        assert spans_of(tmp_path)["quiesce.checkpoint"][0]
        process.stdout.close()  # type: ignore[union-attr] # it is a pipe

    def test_an_application_s_own_handler_stays(self) -> None:
        """It ends in its own way; we are told at exit."""

        def mine(number: int, frame: object) -> None:
            """Do nothing."""

        before = signal.signal(signal.SIGTERM, mine)
        try:
            run = RunTelemetry(Hub())
            run.start()
            run.close_at_exit()

            assert signal.getsignal(signal.SIGTERM) is mine
            run.close()
            assert signal.getsignal(signal.SIGTERM) is mine
        finally:
            signal.signal(signal.SIGTERM, before)

    def test_closing_takes_our_handler_out(self) -> None:
        """What was there before is there again."""
        before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
        try:
            run = RunTelemetry(Hub())
            run.start()
            run.close_at_exit()
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL

            run.close()

            assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        finally:
            signal.signal(signal.SIGTERM, before)

    def test_after_the_end_nothing_is_listened_to(self) -> None:
        """A hub that goes on pays nothing; closing twice is closing once."""
        scene = Telling()

        scene.over()
        scene.run.close()

        assert not scene.hub.slot_closed
        assert not scene.hub.window_requested
        assert len(scene.kept.closed) == 1


def test_a_forked_child_listens_to_nothing_and_exports_nothing() -> None:
    """What it does is not the run's; and it ends at once."""
    hub, kept = Hub(), Kept()
    run = RunTelemetry(hub, sinks={"kept": kept})
    run.start()
    child = os.fork()
    if not child:
        code = 1
        try:
            hub.fire("slot_closed", "retry", 0, 1, "completed", 1)
            since = time.monotonic()
            run.close()
            quick = time.monotonic() - since < 1
            code = 0 if quick and not hub.slot_closed and not kept.found and run.recorder.closed == 0 else 2
        finally:
            os._exit(code)

    _, status = os.waitpid(child, 0)

    assert os.waitstatus_to_exitcode(status) == 0
    hub.fire("slot_closed", "retry", 0, 1, "completed", 1)
    assert run.flush(10)
    assert len(kept.found) == 1
    run.close()


def test_without_a_destination_no_slot_is_recorded() -> None:
    """There are numbers, and no spans that would only be dropped."""
    hub = Hub(strict=True)
    run = RunTelemetry(hub)
    run.start()
    hub.fire("slot_closed", "retry", 0, 1, "completed", 1)
    hub.fire("window_requested", "cut", 1)

    assert run.observer.book.closed == 1
    assert run.recorder.position == 0
    assert run.flush(1)
    assert not any(run.totals().values())
    assert hub.sources("tracing") == []
    run.close()


class TestItself:
    """What telemetry says of itself."""

    def test_its_cost_is_measured(self) -> None:
        """A slot's hook costs something between a tenth of a microsecond and a hundredth of a millisecond."""
        assert 50 < slot_cost_ns(SlotRecorder()) < 20_000
        assert 50 < slot_cost_ns(SlotBook()) < 20_000

    async def test_cpu_seconds_grow_with_what_is_done(self) -> None:
        """Threads as the system measures them, hooks by their estimate."""
        hub = Hub(strict=True)
        run = RunTelemetry(hub, sinks={"kept": Kept()}, budget=0)
        run.start()
        barrier = DataPlaneCheckpointBarrier(hub=hub)
        collector = QuiesceCollector(run.observer, hub, run="r1")

        def told(name: str) -> float:
            (found,) = (family for family in collector.collect() if family.name == name)
            return sum(sample.value for sample in found.samples)

        before = told("quiesce_telemetry_cpu_seconds")
        for _ in range(500):
            async with barrier.mutation("retry"):
                pass
        assert run.flush(10)
        after = told("quiesce_telemetry_cpu_seconds")

        assert after > before
        assert run.observer.slot_cost_ns > 0
        assert told("quiesce_telemetry_spans") == 500
        assert told("quiesce_telemetry_export_seconds") > 0
        run.close()

    def test_hooks_are_timed_now_and_then(self) -> None:
        """Each 32nd call; what it took counts for the others, and what others than telemetry do is not counted."""
        hub = Hub()

        class Slow:
            def prompts_read(self, count: int) -> None:
                sum(range(20_000))

        hub.subscribe(Slow())
        for _ in range(32):
            hub.fire("prompts_read", 1)
        assert hub.fired_ns == 0
        hub.subscribe(Slow(), timed=True)
        for _ in range(31):
            hub.fire("prompts_read", 1)
        assert hub.fired_ns == 0
        since = time.thread_time_ns()
        hub.fire("prompts_read", 1)
        took = time.thread_time_ns() - since

        assert 0 < hub.fired_ns <= 32 * took


def test_an_event_of_something_wrong_goes_out_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A moment later the process may have been killed for it; others may wait for company."""
    monkeypatch.setattr(pipeline, "_LINGER_SECONDS", 3_600.0)
    given, took = threading.Event(), list[object]()

    class Listens(Kept):
        def events(self, events: Sequence[Mapping[str, object]]) -> None:
            took.extend(event["event"] for event in events)
            given.set()

    hub = Hub(strict=True)
    run = RunTelemetry(hub, sinks={"listens": Listens()}, sample_seconds=3_600)
    run.start(thread=False)
    log = configure_run_log(tmp_path, run="r1")
    run.connect(log)
    hub.subscribe(LogObserver(log))
    hub.fire("run_state_changed", "running")
    hub.fire("invariant_violated", Violation("single_owner", "critical", "two owners"))

    assert given.wait(10)
    assert took == ["run.state", "invariant.violated"]
    log.close()
    run.close(10)


def test_lines_about_a_save_name_its_trace(tmp_path: Path) -> None:
    """Run, cut, trace and span; the sinks are given the lines as well, and no slot has one."""
    scene = Telling()
    log = configure_run_log(tmp_path, level="debug", run="r1")
    scene.run.connect(log)
    scene.hub.subscribe(LogObserver(log))
    fire = scene.hub.fire
    fire("slot_closed", "retry", 0, 5, "completed", 9)
    fire("train_step_ended", 4, 4, 5, 1, "completed", {})
    fire("phase_started", "cut", "fence")
    fire("window_requested", "cut", 1)
    fire("window_abandoned", "cut", 5, "failed", (), 6)
    fire("checkpoint_ended", "cut", 4, "failed", "drain_timeout", {}, 0, 0)
    kept = scene.told()
    log.close()

    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]

    root = kept.one("quiesce.checkpoint")
    about = [line for line in lines if line.get("cut_id") == "cut"]
    assert [line["event"] for line in about] == ["window.given_up", "checkpoint.not_published"]
    for line in about:
        assert line["run"] == "r1"
        assert line["step"] == 4
        assert line["trace_id"] == f"{root.trace_id:032x}"
        assert line["span_id"] == f"{root.span_id:016x}"
    assert [line["event"] for line in lines] == [line["event"] for line in kept.lines]
    assert len(lines) == 3
    scene.over()
