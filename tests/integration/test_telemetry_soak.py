"""Millions of slots and very many groups with everything on: nothing is left behind in memory, and no series is made."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from quiesce.barrier import DataPlaneCheckpointBarrier
from quiesce.invariants import INVARIANTS
from quiesce.ledger import RolloutLedger
from quiesce.observers import Hub
from quiesce.signals import TrainerVersion
from quiesce.snapshot_gate import SnapshotGate
from quiesce.telemetry.enable import MetricsHandle, enable_metrics
from quiesce.telemetry.names import CUT_PARTS
from quiesce.types import PHASES
from tests.conftest import TRIED
from tests.otlp_receiver import Received, http_receiver

GROWTH_BYTES = 16 << 20
SPACING_NS = 100_000
"""From one slot to the next: 10,000 a second, ten times the budget of spans."""

FLUSHED_EVERY = 10_000
"""Slots after which telemetry is waited for: it must not lose any here, and a loop that tells this fast is none that it
could keep up with."""

CHECKED = tuple(INVARIANTS)

WINDOW_EVERY = 100
"""Groups from one save to the next."""


@pytest.mark.soak
@pytest.mark.timeout(1_800)
def test_ten_million_slots_and_a_hundred_thousand_groups_leave_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    """After a tenth of that to warm up, resident memory grows by less than 16 MiB, and the series not at all."""
    record_property(TRIED, grow(tmp_path, monkeypatch, slots=10_000_000, groups=100_000))


def test_very_many_slots_and_groups_leave_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same, for a few seconds' patience."""
    grow(tmp_path, monkeypatch, slots=100_000, groups=2_500)


def grow(folder: Path, monkeypatch: pytest.MonkeyPatch, *, slots: int, groups: int) -> str:
    """Have a tenth of so many slots and groups told, and then all of them, with a recorder and an OTLP exporter.

    Returns:
        What was measured.
    """
    hub = Hub(strict=True)
    with http_receiver() as (url, received):
        received.keep = False
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        with enable_metrics("r1", 0, hub=hub, run_dir=folder, exporters=["recorder", "otlp"]) as handle:
            barrier = DataPlaneCheckpointBarrier(hub=hub)
            parts = [RolloutLedger(barrier), TrainerVersion(1, hub=hub), SnapshotGate("0", hub=hub)]
            telling = Telling(handle, hub, slots // groups)
            telling.tell(slots // 10)
            series = scraped(handle)
            before = resident()
            since = time.monotonic()
            telling.tell(slots)
            took = time.monotonic() - since
            grown = resident() - before

            assert scraped(handle) == series
            assert grown < GROWTH_BYTES
            settled(handle, received, slots + slots // 10)
            assert parts
    spans = received.arrived
    return f"{slots} slots, {groups} groups, {spans} spans in {took:.0f} s: {grown / 2**20:.1f} MiB more, {series} series"


def settled(handle: MetricsHandle, received: Received, told: int) -> None:
    """Check that every slot has its fate, and every span arrived at both sinks."""
    telemetry = handle.telemetry
    now = telemetry.converter.statistics()
    assert now.made + now.sampled == telemetry.recorder.closed == told
    assert (now.lost, now.notes_dropped, now.errors, now.waiting) == (0, 0, 0, 0)
    exported = now.made + now.others
    assert exported > told // 10
    assert telemetry.pipeline.lanes() == {
        "recorder": {"delivered": exported},
        "otlp": {"delivered": exported},
    }
    assert received.arrived == exported


class Telling:
    """Tells what a run tells, as fast as it can be told; time as it is told goes on by itself.

    Args:
        handle: Whose telemetry hears it.
        hub: Where it is told.
        every: Slots of a group.
    """

    def __init__(self, handle: MetricsHandle, hub: Hub, every: int) -> None:
        self._telemetry = handle.telemetry
        self._hub = hub
        self._every = every
        self._number = 0
        self._began_ns = time.perf_counter_ns()

    def tell(self, count: int) -> None:
        """Tell of so many slots, and of what comes with them; return once it has arrived everywhere."""
        closed = self._hub.slot_closed
        for number in range(self._number, self._number + count):
            now_ns = self._began_ns + number * SPACING_NS
            for hook in closed:
                hook("retry", 0 if number % 97 else 900, number % 50_000, "completed", now_ns)
            if number % self._every == 0:
                self._group(number, now_ns)
            if number % FLUSHED_EVERY == FLUSHED_EVERY - 1:
                assert self._telemetry.flush(60)
        self._number += count
        assert self._telemetry.flush(60)

    def _group(self, number: int, now_ns: int) -> None:
        fire, group = self._hub.fire, f"e000-p{number:08d}"
        step = number // self._every
        fire("owner_moved", group, "read", "ledger", "")
        fire("rollout_started", group, 0)
        fire("dataplane_operated", "put", 40_000, 1, "completed")
        fire("permit_granted", "0", step, 500)
        fire("rollout_ended", group, 0, 5_000_000, "completed", 64)
        fire("reply_sent", "0", 90_000)
        fire("owner_moved", group, "ledger", "buffer", "")
        fire("owner_moved", group, "buffer", "training", "")
        fire("train_step_started", step, step)
        fire("train_step_ended", step, step, 9_000_000, 1, "completed", {"reward": 0.5, "loss": 0.1})
        fire("owner_moved", group, "training", "trained", "")
        fire("invariant_checked", CHECKED[step % len(CHECKED)])
        if step % WINDOW_EVERY == 0:
            self._save(f"{step}", step, now_ns)

    def _save(self, cut: str, step: int, now_ns: int) -> None:
        fire = self._hub.fire
        fire("phase_started", cut, "fence")
        fire("gate_closing", "0", step, cut)
        fire("gate_closed", "0", step, cut, 4_000, "completed")
        fire("phase_ended", cut, "fence", 9_000, "completed")
        fire("window_requested", cut, now_ns)
        fire(
            "window_opened", cut, 2_000, (("retry", "a task", now_ns - 500, now_ns + 2_000),), now_ns + 2_000
        )
        for part in CUT_PARTS:
            fire("cut_part_captured", cut, part, 100)
        fire("window_closed", cut, 2_000, 1_000, "completed", now_ns + 3_000)
        for phase in PHASES[3:]:
            fire("phase_started", cut, phase)
            fire("phase_ended", cut, phase, 5_000_000, "completed")
        fire("checkpoint_ended", cut, step, "completed", "", {"buffer": 2}, 8, 900)
        fire("gate_reopened", "0", step, cut, 9_000_000)
        fire("clear_started", "0", 1, 8)
        fire("clear_ended", "0", 1, 8, 80_000, "completed", ())


def scraped(handle: MetricsHandle) -> int:
    """Return how many series there are."""
    return sum(len(family.samples) for family in handle.collector.collect())


def resident() -> int:
    """Return the resident memory of this process in bytes, without what waits to be collected."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
