"""A run that is scraped: real primitives, a real endpoint, forked and spawned children."""

import asyncio
import json
import math
import multiprocessing
import os
import subprocess
import sys
import textwrap
import urllib.request
from collections.abc import Iterable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from quiesce.accounting import Accounting
from quiesce.barrier import DataPlaneCheckpointBarrier
from quiesce.ledger import RolloutLedger
from quiesce.observers import Hub
from quiesce.signals import TrainerVersion
from quiesce.spares import SparePool
from quiesce.telemetry.enable import MetricsHandle, enable_metrics
from quiesce.types import GroupRecord, PromptRef
from quiesce_exporters.prometheus import serve
from tests.unit.telemetry.exposition import parse_classic, parse_openmetrics


def scrape(handle: MetricsHandle, accept: str = "") -> str:
    """Fetch the exposition in the format that the header asks for."""
    request = urllib.request.Request(handle.url, headers={"Accept": accept})  # noqa: S310 - our own loopback URL
    with urllib.request.urlopen(request, timeout=10) as answer:  # noqa: S310 - as above
        return str(answer.read().decode())


def values(families: Iterable[Any]) -> dict[str, float]:
    """Samples by a readable key, without run and role."""
    found = {}
    for family in families:
        for sample in family.samples:
            labels = ",".join(
                f"{k}={v}" for k, v in sorted(sample.labels.items()) if k not in {"run", "role"}
            )
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


async def run_a_little(hub: Hub) -> tuple[object, ...]:
    """Reserve, admit, buffer nothing, save once: what a small program does with the primitives."""
    barrier = DataPlaneCheckpointBarrier(hub=hub)
    ledger, spares, accounting = RolloutLedger(barrier), SparePool(barrier), Accounting(barrier)
    versions = TrainerVersion(3, hub=hub)
    refs = [PromptRef(0, position, position) for position in range(6)]
    async with barrier.mutation("prompt_reservation") as cut:
        accounting.read(cut, refs)
        for ref in refs[:4]:
            ledger.reserve_group(cut, GroupRecord(ref.group_id, 0, ref))
        spares.add(cut, refs[4:])
    async with barrier.mutation("admission") as cut:
        for ref in refs[:4]:
            ledger.mark_group_admitted(cut, ref.group_id, target_step=5, start_version=3)

    entered, leave = asyncio.Event(), asyncio.Event()

    async def hold() -> None:
        async with barrier.mutation("group_commit"):
            entered.set()
            await leave.wait()

    async def save() -> None:
        async with barrier.checkpoint():
            pass

    holder = asyncio.create_task(hold())
    await entered.wait()
    saver = asyncio.create_task(save())
    await asyncio.sleep(0)  # the saver runs up to its wait
    assert barrier.statistics().waiting_checkpoints == 1
    leave.set()
    await asyncio.gather(holder, saver)
    versions.advance()
    return barrier, ledger, spares, accounting, versions


async def test_a_small_program_can_be_looked_at(tmp_path: Path) -> None:
    """Slots by kind, phases, blame, groups by owner, stamps, versions: one scrape, while the loop goes on."""
    hub = Hub(strict=True)
    with enable_metrics("small", 0, hub=hub, run_dir=tmp_path, serve=serve) as handle:
        kept = await run_a_little(hub)
        text = await asyncio.to_thread(scrape, handle)
        told = json.loads((tmp_path / "metrics.json").read_text())

    found = values(parse_classic(text))
    assert 'run="small"' in text
    assert 'role="controller"' in text
    assert told["port"] == handle.port
    assert found["quiesce_mutation_sections_total{kind=prompt_reservation,outcome=completed}"] == 1
    assert found["quiesce_mutation_hold_seconds_count{kind=group_commit}"] == 1
    assert found["quiesce_mutation_wait_seconds_bucket{kind=admission,le=1e-06}"] == 1
    assert found["quiesce_checkpoint_phase_seconds_count{outcome=completed,phase=drain}"] == 1
    assert found["quiesce_checkpoint_phase_seconds_count{outcome=completed,phase=exclusive}"] == 1
    assert found["quiesce_window_blame_seconds_total{kind=group_commit}"] > 0
    assert found["quiesce_window_blame_seconds_total{kind=admission}"] == 0
    assert found["quiesce_groups{owner=ledger}"] == 4
    assert found["quiesce_groups{owner=spares}"] == 2
    assert found["quiesce_target_step_max{owner=ledger}"] == 5
    assert found["quiesce_trainer_version"] == 4
    assert found["quiesce_prompts_read_total"] == 6
    assert len(kept) == 5


async def test_both_formats_say_the_same() -> None:
    """OpenMetrics and classic text differ in form alone."""
    hub = Hub(strict=True)
    with enable_metrics("small", 0, hub=hub, serve=serve) as handle:
        kept = await run_a_little(hub)
        classic = values(parse_classic(await asyncio.to_thread(scrape, handle)))
        modern = values(
            parse_openmetrics(
                await asyncio.to_thread(scrape, handle, "application/openmetrics-text; version=1.0.0")
            )
        )

    assert modern.keys() == classic.keys()
    moving = {key for key in modern if modern[key] != classic[key] and not math.isnan(modern[key])}
    assert moving <= {"quiesce_telemetry_cpu_seconds_total"}  # a scrape costs something
    assert kept


def _fork_child(handle: MetricsHandle, hub: Hub, pipe: Connection, folder: Path) -> None:
    """What a forked DataLoader worker may do: fire hooks, be asked for a snapshot, close, and live on."""
    for _ in range(10):
        hub.fire("slot_closed", "retry", 0, 1_000, "completed", 0)
    handle.snapshot(folder / "child.prom")
    handle.close()
    pipe.send("ready")
    pipe.recv()


@pytest.mark.filterwarnings(
    "ignore:.*multi-threaded, use of fork:DeprecationWarning"
)  # forking here is the point
def test_forked_children_neither_serve_nor_double_nor_keep_the_port(tmp_path: Path) -> None:
    """Four loader workers count for themselves; the port can be bound again while they live."""
    hub = Hub(strict=True)
    context = multiprocessing.get_context("fork")
    handle = enable_metrics("forks", 0, hub=hub, run_dir=tmp_path, serve=serve)
    barrier = DataPlaneCheckpointBarrier(hub=hub)
    for _ in range(5):
        hub.fire("slot_closed", "retry", 0, 1_000, "completed", 0)
    pipes, children = [], []
    for _ in range(4):
        ours, theirs = context.Pipe()
        child = context.Process(target=_fork_child, args=(handle, hub, theirs, tmp_path))
        child.start()
        pipes.append(ours)
        children.append(child)
    try:
        assert [pipe.recv() for pipe in pipes] == ["ready"] * 4
        found = values(parse_classic(scrape(handle)))
        assert found["quiesce_mutation_sections_total{kind=retry,outcome=completed}"] == 5
        assert not (tmp_path / "child.prom").exists()
        assert (tmp_path / "metrics.json").exists()
        handle.close()
        with enable_metrics("again", handle.port, hub=hub, serve=serve) as again:
            assert "quiesce_run_info" in scrape(again)
    finally:
        for pipe in pipes:
            pipe.send("end")
        for child in children:
            child.join(30)
        handle.close()
    assert [child.exitcode for child in children] == [0] * 4
    assert barrier.kinds


def test_an_exit_without_closing_is_quick_and_clean() -> None:
    """A script that never closes its metrics ends by itself, with nothing on its terminal."""
    script = textwrap.dedent(
        """
        import socket
        from quiesce.telemetry.enable import enable_metrics
        from quiesce_exporters.prometheus import serve
        handle = enable_metrics("r", 0, serve=serve)
        silent = socket.create_connection(("127.0.0.1", handle.port))  # a scraper that never says anything
        print(handle.port)
        """
    )

    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
        env=os.environ,
    )

    assert done.returncode == 0
    assert int(done.stdout) > 0
    assert done.stderr == ""
