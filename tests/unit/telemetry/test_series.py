"""How many series a process has at most: counted in what its endpoint answers, with everything in it that makes some."""

from __future__ import annotations

import sys
import urllib.request
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from quiesce.accounting import Accounting
from quiesce.barrier import KINDS, DataPlaneCheckpointBarrier
from quiesce.cleanup import BackgroundCleanup
from quiesce.dataplane import MemoryDataPlane
from quiesce.ledger import RolloutLedger
from quiesce.observers import Hub
from quiesce.signals import TrainerVersion
from quiesce.snapshot_gate import SnapshotGate
from quiesce.spares import SparePool
from quiesce.telemetry import names
from quiesce.telemetry.enable import MetricsHandle, enable_metrics
from quiesce.telemetry.metrics import KIND_LIMIT
from quiesce.types import RowKey
from tests.unit.telemetry.exposition import parse_classic

CONTROLLER = 2_000
WORKER = 150

KEY = RowKey(1, "e000-p0000001", 0, 0, None)


def scraped(handle: MetricsHandle) -> Counter[str]:
    """Return how many series each family has, as its endpoint answers."""
    with urllib.request.urlopen(handle.url, timeout=20) as answer:  # noqa: S310 - its own endpoint, on loopback
        text = answer.read().decode()
    return Counter(
        {family.name: len(family.samples) for family in parse_classic(text)}
        | {"": sum(1 for line in text.splitlines() if line and not line.startswith("#"))}
    )


def told(found: Counter[str]) -> str:
    """Say which families are the largest, for a test that fails."""
    return ", ".join(f"{name or 'all'} {count}" for name, count in found.most_common(12))


class Fake:
    """A part that answers what it is told to."""

    dispatch_cursor = 3

    def __init__(self, **said: int) -> None:
        self._said = SimpleNamespace(**said)

    def statistics(self) -> SimpleNamespace:
        """Return the answer."""
        return self._said


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that is in use."""
    cuda = SimpleNamespace(
        is_initialized=lambda: True,
        device_count=lambda: 1,
        current_device=lambda: 0,
        memory_reserved=lambda _device=0: 300,
        memory_allocated=lambda _device=0: 200,
        get_device_properties=lambda _device=0: SimpleNamespace(total_memory=1_000),
        utilization=lambda _device=0: 75,
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))


@pytest.mark.usefixtures("gpu")
def test_a_rollout_worker_with_everything_stays_within_150_series(tmp_path: Path) -> None:
    """A gate, cleanup, a data plane, an engine that answers, a GPU, and spans for the recorder."""
    hub = Hub(strict=True)
    with enable_metrics(
        "r1", 0, hub=hub, role="worker-3", run_dir=tmp_path, exporters=["recorder"]
    ) as handle:
        gate = SnapshotGate("3", hub=hub)
        plane = MemoryDataPlane(1, tensors="numpy", hub=hub)
        cleanup = BackgroundCleanup(gate, plane.clear, hub=hub)
        plane.put({KEY: {"tokens": np.zeros(4, dtype=np.int64)}})
        plane.get([KEY])
        plane.clear([KEY])
        for op in ("put", "get", "clear"):
            hub.fire("dataplane_operated", op, 10**12, 1, "failed")
        hub.fire("permit_granted", "3", 1, 10**12)
        hub.fire("gate_closed", "3", 1, "epoch", 10**12, "failed")
        hub.fire("clear_ended", "3", 1_000, 10, 10**12, "failed", ())
        hub.fire("reply_sent", "3", 10**12)

        found = scraped(handle)

        assert cleanup.worker == gate.worker
    present = {family for family, count in found.items() if count}
    assert present > {
        "quiesce_snapshot_gate_permits",
        "quiesce_cleanup_clear_seconds",
        "quiesce_dataplane_op_seconds",
        "quiesce_reply_seconds",
        "quiesce_gpu_memory_bytes",
        "quiesce_telemetry_sink_spans",
    }
    assert not {family for family in present if "train" in family or "checkpoint" in family}
    assert found[""] <= WORKER, told(found)


def test_what_only_windows_do_to_a_data_plane_is_shown_where_it_happens(tmp_path: Path) -> None:
    """A worker without a barrier has no series of it until it does it; nothing is counted and hidden."""
    hub = Hub(strict=True)
    with enable_metrics("r1", 0, hub=hub, role="worker-3", run_dir=tmp_path, exporters=[]) as handle:
        plane = MemoryDataPlane(1, tensors="numpy", hub=hub)

        def shown() -> set[str]:
            return {
                sample.labels["op"]
                for family in handle.collector.collect()
                for sample in family.samples
                if sample.name == "quiesce_dataplane_op_seconds_count"
            }

        assert shown() == {"put", "get", "clear"}
        plane.keys()
        assert shown() == {"put", "get", "clear", "keys"}
        barrier = DataPlaneCheckpointBarrier(hub=hub)
        assert shown() == set(names.DATAPLANE_OPS)
        assert barrier.kinds


@pytest.mark.usefixtures("gpu")
def test_a_controller_with_everything_stays_within_2000_series(tmp_path: Path) -> None:
    """More kinds of slots, workers and invariants of a user's own than have series of their own, and all the rest."""
    hub = Hub(strict=True)
    with enable_metrics("r1", 0, hub=hub, run_dir=tmp_path, exporters=["recorder"]) as handle:
        barrier = DataPlaneCheckpointBarrier(kinds=[f"own_{number}" for number in range(40)], hub=hub)
        gates = [SnapshotGate(str(number), hub=hub) for number in range(2 * names.WORKER_LIMIT)]
        parts = [
            *(BackgroundCleanup(gate, lambda _keys: None, hub=hub) for gate in gates),
            MemoryDataPlane(1, tensors="numpy", hub=hub),
            RolloutLedger(barrier),
            SparePool(barrier),
            Accounting(barrier),
            TrainerVersion(5, hub=hub),
        ]
        sampler, buffer = Fake(), Fake(ready=4, training=2, target_step_max=7)
        hub.attach("sampler", sampler)
        hub.attach("buffer", buffer)
        for number in range(100):
            hub.fire("slot_closed", f"own_{number % 40}", 10**11, 10**12, "failed", 5)
            hub.fire("invariant_checked", f"own_{number}")
        hub.fire("reply_sent", "3", 10**12)

        found = scraped(handle)

        assert len([*parts, sampler, buffer]) == len(parts) + 2  # alive until now
    shown = {metric.family for metric in names.METRICS.values()} - {"quiesce_run"}
    assert shown - set(found) == set()
    assert found[""] <= CONTROLLER, told(found)
    assert found["quiesce_mutation_slots"] == 2 * (KIND_LIMIT + 1)
    assert KIND_LIMIT - len(KINDS) >= 4
    assert found["quiesce_snapshot_gate_permits"] == names.WORKER_LIMIT + 1
