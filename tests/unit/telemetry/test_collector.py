"""The collector: a scrape against the catalogue, both ways, over real primitives."""

import gc
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from quiesce.accounting import Accounting
from quiesce.barrier import KINDS, DataPlaneCheckpointBarrier
from quiesce.cleanup import BackgroundCleanup
from quiesce.ledger import RolloutLedger
from quiesce.observers import Hub
from quiesce.signals import TrainerVersion
from quiesce.snapshot_gate import Epoch, SnapshotGate
from quiesce.spares import SparePool
from quiesce.telemetry import names, spans
from quiesce.telemetry.assembly import RunTelemetry
from quiesce.telemetry.collector import QuiesceCollector
from quiesce.telemetry.metrics import KIND_LIMIT, MetricsObserver
from quiesce.types import GroupRecord, PromptRef, RowKey
from tests.unit.telemetry.exposition import openmetrics_text, parse_classic, parse_openmetrics
from tests.unit.telemetry.telling import Kept

Series = dict[tuple[str, tuple[tuple[str, str], ...]], float]


@dataclass
class Scene:
    """A hub with an observer and a registry."""

    hub: Hub
    observer: MetricsObserver
    collector: QuiesceCollector
    registry: CollectorRegistry

    def scrape(self) -> Series:
        """Return the classic exposition by sample name and labels, without the constant ones."""
        return by_series(parse_classic(generate_latest(self.registry).decode()))


class Fake:
    """A source that answers what it is told to."""

    def __init__(self, **fields: Any) -> None:  # noqa: ANN401 - a fake answers anything
        self.name = "fake"
        self.dispatch_cursor = 3
        self._statistics = SimpleNamespace(**fields)

    def statistics(self) -> SimpleNamespace:
        """Return the answer."""
        return self._statistics


class FakeCuda:
    """A torch.cuda with one device in use, and one that is not."""

    def is_initialized(self) -> bool:
        """Say yes."""
        return True

    def device_count(self) -> int:
        """Return two."""
        return 2

    def memory_reserved(self, device: int) -> int:
        """Return what the allocator keeps."""
        return 300 if device == 0 else 0

    def memory_allocated(self, device: int) -> int:
        """Return what tensors take."""
        return 200

    def get_device_properties(self, device: int) -> SimpleNamespace:
        """Return what there is."""
        return SimpleNamespace(total_memory=1_000)

    def utilization(self, device: int) -> int:
        """Return a percentage."""
        return 75


PLANE = {
    "backend": "lmdb",
    "rows": 8,
    "num_bytes": 900,
    "pinned_rows": 2,
    "deferred_clears": 1,
    "map_used_ratio": 0.25,
}


def by_series(families: Iterable[Any]) -> Series:
    """Index parsed samples by name and labels, checking the constant labels on the way."""
    found: Series = {}
    for family in families:
        for sample in family.samples:
            labels = dict(sample.labels)
            assert (labels.pop("run"), labels.pop("role")) == ("r1", "controller")
            found[sample.name, tuple(sorted(labels.items()))] = sample.value
    return found


@pytest.fixture
def scene() -> Scene:
    """An observer and a collector on a strict hub of their own."""
    hub = Hub(strict=True)
    observer = MetricsObserver()
    hub.subscribe(observer)
    collector = QuiesceCollector(observer, hub, run="r1", info={"engine": "toy"})
    registry = CollectorRegistry(support_collectors_without_names=True)
    registry.register(collector)
    return Scene(hub, observer, collector, registry)


def attach_everything(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Attach a primitive of every role, and a GPU; the caller keeps them alive."""
    barrier = DataPlaneCheckpointBarrier(hub=scene.hub)
    fakes = {
        "dataplane": Fake(**PLANE),
        "sampler": Fake(),
        "buffer": Fake(ready=4, training=2, target_step_max=7),
    }
    gate = SnapshotGate("0", hub=scene.hub)
    telemetry = RunTelemetry(Hub())
    scene.hub.attach("tracing", telemetry)
    scene.observer.seen.add("engine")  # which attaches nothing, and is known by its answers
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=FakeCuda()))
    for role, fake in fakes.items():
        scene.hub.attach(role, fake)
    return [
        barrier,
        *fakes.values(),
        gate,
        BackgroundCleanup(gate, lambda _keys: None, hub=scene.hub),
        telemetry,
        RolloutLedger(barrier),
        SparePool(barrier),
        Accounting(barrier),
        TrainerVersion(5, hub=scene.hub),
    ]


def expected() -> set[tuple[str, tuple[tuple[str, str], ...]]]:
    """Every series of the catalogue, histograms by their buckets, sum and count."""
    wanted = set()
    for metric in names.METRICS.values():
        if metric.type == "info":
            continue  # its values are not a closed set; it has a test of its own
        workers = (("0",),) if metric.label_names == ("worker",) else None
        for values in workers or metric.label_sets():
            labels = dict(zip(metric.label_names, values, strict=True))
            if metric.type != "histogram":
                wanted.add((metric.name, tuple(sorted(labels.items()))))
                continue
            for suffix in ("_sum", "_count"):
                wanted.add((metric.name + suffix, tuple(sorted(labels.items()))))
            for bound in (*metric.buckets, float("inf")):
                le = "+Inf" if bound == float("inf") else repr(bound)
                wanted.add((metric.name + "_bucket", tuple(sorted({**labels, "le": le}.items()))))
    return wanted


class TestCatalogue:
    """The scrape and the catalogue say the same."""

    def test_the_first_scrape_has_exactly_the_series_of_the_catalogue(
        self, scene: Scene, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Every child of every family is there before anything happened, and nothing else is."""
        kept = attach_everything(scene, monkeypatch)

        found = {key for key in scene.scrape() if key[0] != "quiesce_run_info"}

        assert found == expected()
        assert len(kept) == len(names.ROLES) - 2  # nobody attaches the GPU, or the engine

    def test_types_and_help_are_those_of_the_catalogue(
        self, scene: Scene, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Both formats carry them, and OpenMetrics the units as well."""
        kept = attach_everything(scene, monkeypatch)

        classic = {f.name: f for f in parse_classic(generate_latest(scene.registry).decode())}
        modern = {f.name: f for f in parse_openmetrics(openmetrics_text(scene.registry))}

        assert set(modern) == {metric.family for metric in names.METRICS.values()}
        for metric in names.METRICS.values():
            assert modern[metric.family].type == metric.type
            assert modern[metric.family].documentation == metric.help
            assert modern[metric.family].unit == metric.unit
            plain = classic[metric.name if metric.type == "info" else metric.family]
            assert plain.type == ("gauge" if metric.type == "info" else metric.type)
        assert kept

    def test_every_counter_starts_at_zero(self, scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
        """`increase()` sees the first event only if the series was there before it."""
        kept = attach_everything(scene, monkeypatch)

        counters = {key: value for key, value in scene.scrape().items() if key[0].endswith("_total")}

        assert len(counters) > 100
        # What telemetry costs begins with what it took to find that out.
        assert {name for (name, _), value in counters.items() if value} <= {
            "quiesce_telemetry_cpu_seconds_total"
        }
        assert kept

    def test_nothing_grows_with_groups_steps_or_cuts(
        self, scene: Scene, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Whatever passes through, the series stay the ones that were there."""
        kept = attach_everything(scene, monkeypatch)
        before = set(scene.scrape())

        for index in range(500):
            scene.hub.fire("owner_moved", f"e000-p{index:07d}", "read", "ledger", "")
            scene.hub.fire(
                "train_step_ended", index, index, 1_000, 4, "completed", {"reward": 0.1, f"m{index}": 1.0}
            )
            scene.hub.fire("window_requested", f"w{index}", 0)
            scene.hub.fire("window_opened", f"w{index}", 5, (("retry", f"task {index}", 0, 5),), 0)
            scene.hub.fire("window_closed", f"w{index}", 5, 5, "completed", 0)
            scene.hub.fire("checkpoint_ended", f"w{index}", index, "completed", "", {}, 1, 1)
            scene.hub.fire("rollout_ended", f"e000-p{index:07d}", 0, 1_000, "completed", 9)

        assert set(scene.scrape()) == before
        assert kept

    def test_buckets_are_cumulative_and_end_in_the_count(
        self, scene: Scene, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What Prometheus requires of a histogram."""
        kept = attach_everything(scene, monkeypatch)
        for hold in (500, 70_000, 3_000_000, 10**12):
            scene.hub.fire("slot_closed", "retry", 0, hold, "completed", 0)

        found = scene.scrape()
        name = "quiesce_mutation_hold_seconds"
        bounds = [*(repr(bound) for bound in names.SLOT_BUCKETS), "+Inf"]
        counts = [found[f"{name}_bucket", (("kind", "retry"), ("le", bound))] for bound in bounds]

        assert all(low <= high for low, high in pairwise(counts))
        assert counts[-1] == found[f"{name}_count", (("kind", "retry"),)] == 4
        assert counts[-2] == 3
        assert kept


class TestAttachment:
    """Families exist for what is attached."""

    def test_without_any_part_only_the_run_is_told_about(self, scene: Scene) -> None:
        """An alert about an absent part finds no series to fire on."""
        found = {name for name, _ in scene.scrape()}

        assert found == {
            "quiesce_run_info",
            "quiesce_run_started_timestamp_seconds",
            "quiesce_run_state",
            "quiesce_capability",
            "quiesce_telemetry_observer_errors_total",
            "quiesce_telemetry_cpu_seconds_total",
        }

    def test_a_barrier_alone_brings_slots_and_windows(self, scene: Scene) -> None:
        """No group, cursor or row is invented for a program that has none; capabilities say so."""
        barrier = DataPlaneCheckpointBarrier(hub=scene.hub)

        found = scene.scrape()

        assert ("quiesce_mutation_slots", (("kind", "retry"), ("state", "active"))) in found
        absent = {
            "quiesce_groups",
            "quiesce_dispatch_cursor",
            "quiesce_dataplane_rows",
            "quiesce_train_reward",
        }
        assert not absent & {name for name, _ in found}
        assert found["quiesce_capability", (("name", "barrier"),)] == 1
        assert found["quiesce_capability", (("name", "dataplane"),)] == 0
        assert barrier.kinds

    def test_kinds_that_a_user_added_are_there_at_zero(self, scene: Scene) -> None:
        """The closed set is the barrier's, taken when it attaches."""
        barrier = DataPlaneCheckpointBarrier(kinds=["reward_update"], hub=scene.hub)

        found = scene.scrape()

        assert found["quiesce_mutation_wait_seconds_count", (("kind", "reward_update"),)] == 0
        assert found["quiesce_window_blame_seconds_total", (("kind", "reward_update"),)] == 0
        assert barrier.kinds

    def test_very_many_kinds_share_a_label(self, scene: Scene) -> None:
        """Their slots are added up as `other`, now and in total."""
        barrier = DataPlaneCheckpointBarrier(kinds=[f"own_{index}" for index in range(40)], hub=scene.hub)

        kinds = {dict(labels)["kind"] for name, labels in scene.scrape() if name == "quiesce_mutation_slots"}

        assert len(kinds) == KIND_LIMIT + 1
        assert names.OTHER in kinds
        assert barrier.kinds

    def test_a_part_that_is_gone_takes_its_gauges_along_and_leaves_its_counters(self, scene: Scene) -> None:
        """No gauge of a dead part lingers; a counter never goes away."""
        plane = Fake(**PLANE)
        scene.hub.attach("dataplane", plane)
        scene.hub.fire("dataplane_operated", "put", 1_000, 1, "completed")
        assert scene.scrape()["quiesce_dataplane_rows", ()] == 8
        del plane
        gc.collect()

        found = scene.scrape()

        assert ("quiesce_dataplane_rows", ()) not in found
        assert found["quiesce_dataplane_op_seconds_count", (("op", "put"),)] == 1

    def test_what_was_counted_before_the_first_scrape_is_kept(self, scene: Scene) -> None:
        """A short run whose parts are gone when it is first looked at still has its counters."""
        scene.hub.fire("train_step_ended", 1, 1, 1_000, 4, "completed", {})

        assert scene.scrape()["quiesce_groups_trained_total", ()] == 4


class Refuses(Kept):
    """A sink whose collector is away."""

    def spans(self, batch: object) -> None:
        """Raise."""
        raise ConnectionRefusedError


class TestSpans:
    """What became of spans, as it is scraped."""

    def test_a_dead_collector_beside_a_recorder_is_seen_to_lose_spans(self, scene: Scene) -> None:
        """Each span went somewhere, and the collector's were lost all the same: the alert on lost spans can see it."""
        hub = Hub(strict=True)
        run = RunTelemetry(hub, sinks={"recorder": Kept(), "otlp": Refuses(), "mine": Kept()}, budget=0)
        run.start(thread=False)
        scene.hub.attach("tracing", run)
        for number in range(50):
            hub.fire("slot_closed", "retry", 0, 5, "completed", number)
        while run.converter.convert():
            pass
        assert run.pipeline.flush(10)

        found = scene.scrape()

        run.close(1)
        fates = {
            (dict(labels)["sink"], dict(labels)["fate"]): value
            for (name, labels), value in found.items()
            if name == "quiesce_telemetry_sink_spans_total"
        }
        assert {where: value for where, value in fates.items() if value} == {
            ("recorder", "exported"): 50,
            ("otlp", "failed"): 50,
            (names.OTHER, "exported"): 50,
        }
        assert fates.keys() == set(names.TELEMETRY_SINK_SPANS.label_sets())
        assert found["quiesce_telemetry_spans_total", (("fate", "exported"),)] == 50
        assert found["quiesce_telemetry_spans_total", (("fate", "failed"),)] == 0

    def test_what_found_no_room_or_could_not_be_told_is_dropped(
        self, scene: Scene, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A note past the limit, and one that the converter chokes on: neither is a span, and both are counted."""
        monkeypatch.setattr(spans, "NOTES", 2)
        hub = Hub()
        run = RunTelemetry(hub, sinks={"recorder": Kept()})
        run.start(thread=False)
        scene.hub.attach("tracing", run)
        hub.fire("rollout_started", "group", 0)
        hub.fire("weight_synced", 1, "no number", "completed")
        hub.fire("rollout_started", "another", 0)  # there is no room for it
        while run.converter.convert():
            pass

        now = run.converter.statistics()
        dropped = scene.scrape()["quiesce_telemetry_spans_total", (("fate", "dropped"),)]

        run.close(1)
        assert (now.notes_dropped, now.errors) == (1, 1)
        assert dropped == 2


class TestPulling:
    """What primitives say about themselves."""

    async def test_open_and_waiting_slots_show_before_they_end(self, scene: Scene) -> None:
        """A writer that is still blocked is seen now, with its age."""
        now = iter(range(0, 10**12, 10**9))
        barrier = DataPlaneCheckpointBarrier(hub=scene.hub, clock=now.__next__)

        async with barrier.mutation("retry"):
            found = scene.scrape()

        assert found["quiesce_mutation_slots", (("kind", "retry"), ("state", "active"))] == 1
        assert found["quiesce_mutation_oldest_seconds", (("kind", "retry"), ("state", "active"))] > 0
        assert found["quiesce_mutation_slots", (("kind", "retry"), ("state", "waiting"))] == 0
        assert scene.scrape()["quiesce_mutation_slots", (("kind", "retry"), ("state", "active"))] == 0

    async def test_groups_are_told_by_their_owners(self, scene: Scene) -> None:
        """Ledger, spares, buffer and claims each answer for themselves, and accounting for the prompts."""
        barrier = DataPlaneCheckpointBarrier(hub=scene.hub)
        ledger, spares, accounting = RolloutLedger(barrier), SparePool(barrier), Accounting(barrier)
        buffer = Fake(ready=4, training=2, target_step_max=7)
        scene.hub.attach("buffer", buffer)
        refs = [PromptRef(0, position, position) for position in range(3)]
        async with barrier.mutation("prompt_reservation") as cut:
            accounting.read(cut, refs)
            ledger.reserve_group(cut, GroupRecord(refs[0].group_id, 0, refs[0]))
            spares.add(cut, refs[1:])

        found = scene.scrape()

        owners = {
            owner: found["quiesce_groups", (("owner", owner),)]
            for owner in ("ledger", "spares", "buffer", "training")
        }
        assert owners == {"ledger": 1, "spares": 2, "buffer": 4, "training": 2}
        assert found["quiesce_target_step_max", (("owner", "buffer"),)] == 7
        assert found["quiesce_target_step_max", (("owner", "ledger"),)] == -1
        assert found["quiesce_prompts_read_total", ()] == 3
        assert found["quiesce_groups_moved_total", (("from", "read"), ("to", "spares"))] == 2

    def test_several_of_one_role_add_up_and_the_newest_cursor_counts(self, scene: Scene) -> None:
        """Sums for amounts, the newest source for what there is one of."""
        planes = [Fake(**PLANE), Fake(**{**PLANE, "rows": 5, "map_used_ratio": 0.75})]
        for plane in planes:
            scene.hub.attach("dataplane", plane)
        versions = [TrainerVersion(5, hub=scene.hub), TrainerVersion(2, hub=scene.hub)]

        found = scene.scrape()

        assert found["quiesce_dataplane_rows", ()] == 13
        assert found["quiesce_dataplane_map_used_ratio", ()] == 0.75
        assert found["quiesce_trainer_version", ()] == versions[-1].value == 2

    async def test_blocked_time_is_what_slots_waited(self, scene: Scene) -> None:
        """A slot waits for nothing but windows."""
        barrier = DataPlaneCheckpointBarrier(hub=scene.hub)
        scene.hub.fire("slot_closed", "retry", 2_000_000_000, 1_000, "completed", 0)

        assert scene.scrape()["quiesce_window_blocked_seconds_total", (("kind", "retry"),)] == 2.0
        assert barrier.kinds

    def test_the_info_names_the_parts(self, scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
        """Sampler and data plane tell their names; what nobody tells was given."""
        kept = attach_everything(scene, monkeypatch)

        (labels,) = [dict(labels) for name, labels in scene.scrape() if name == "quiesce_run_info"]

        assert (labels["sampler"], labels["dataplane"], labels["engine"]) == ("fake", "lmdb", "toy")
        assert set(labels) == set(names.RUN_INFO.label_names)
        assert kept


class TestBrokenSources:
    """A scrape answers whatever a source does."""

    @pytest.mark.parametrize(
        "error", [ValueError("no"), RuntimeError("dictionary changed size"), SystemError("no")]
    )
    def test_a_source_that_raises_costs_its_own_series_only(self, scene: Scene, error: Exception) -> None:
        """It is counted; everybody else is still there."""

        class Broken:
            def statistics(self) -> None:
                raise error

        broken, spares = Broken(), Fake(spares=3)
        scene.hub.attach("ledger", broken)
        scene.hub.attach("spares", spares)

        found = scene.scrape()

        assert ("quiesce_groups", (("owner", "ledger"),)) not in found
        assert found["quiesce_groups", (("owner", "spares"),)] == 3
        assert found["quiesce_telemetry_observer_errors_total", ()] == 1

    def test_a_source_that_changes_while_it_is_read_is_read_again(self, scene: Scene) -> None:
        """The loop's thread may be faster once or twice; that is no error."""

        class Busy:
            asked = 0

            def statistics(self) -> SimpleNamespace:
                self.asked += 1
                if self.asked < 3:
                    raise RuntimeError("dictionary changed size during iteration")
                return SimpleNamespace(spares=9)

        busy = Busy()
        scene.hub.attach("spares", busy)

        found = scene.scrape()

        assert found["quiesce_groups", (("owner", "spares"),)] == 9
        assert found["quiesce_telemetry_observer_errors_total", ()] == 0

    def test_a_source_that_answers_nonsense_is_counted(self, scene: Scene) -> None:
        """A foreign source under a known role may lack what is asked of it."""
        foreign = Fake(unheard_of=1)
        scene.hub.attach("dataplane", foreign)

        found = scene.scrape()

        assert ("quiesce_dataplane_rows", ()) not in found
        assert found["quiesce_telemetry_observer_errors_total", ()] == 1

    def test_hooks_that_raise_are_counted(self) -> None:
        """What the hub swallowed shows in the scrape."""
        hub = Hub()
        observer = MetricsObserver()
        hub.subscribe(observer)
        registry = CollectorRegistry(support_collectors_without_names=True)
        registry.register(QuiesceCollector(observer, hub, run="r1"))

        hub.fire("trainer_stalled", "coffee", 1)

        found = by_series(parse_classic(generate_latest(registry).decode()))
        assert found["quiesce_telemetry_observer_errors_total", ()] == 1
        assert len(KINDS) == len(observer.slots)


class TestGates:
    """Snapshot gates and cleanup, pulled."""

    def test_a_gate_shows_its_permits_and_whether_it_is_closed(self, scene: Scene) -> None:
        """By worker; a gate that was retired shows as open and empty."""
        gates = [SnapshotGate(worker, hub=scene.hub) for worker in ("0", "1", "2")]
        permit = gates[0].enter()
        gates[1].close_and_wait(Epoch(1, 1), 1.0)
        gates[2].close_and_wait(Epoch(1, 1), 1.0)
        gates[2].retire("its worker died")

        found = scene.scrape()

        permits = [found["quiesce_snapshot_gate_permits", (("worker", worker),)] for worker in "012"]
        closed = [found["quiesce_snapshot_gate_closed", (("worker", worker),)] for worker in "012"]
        assert (permits, closed) == ([1, 0, 0], [0, 1, 0])
        permit.release()

    def test_very_many_workers_share_a_label(self, scene: Scene) -> None:
        """A hundred workers do not make a hundred series."""
        gates = [Fake(worker=str(worker), permits=1, closed=False, retired="") for worker in range(100)]
        for gate in gates:
            scene.hub.attach("snapshot_gate", gate)

        found = {
            dict(labels)["worker"]: value
            for (name, labels), value in scene.scrape().items()
            if name == "quiesce_snapshot_gate_permits"
        }

        assert len(found) == names.WORKER_LIMIT + 1
        assert found[names.OTHER] == 100 - names.WORKER_LIMIT

    def test_cleanup_shows_its_backlog(self, scene: Scene) -> None:
        """Calls, not keys."""
        cleanup = BackgroundCleanup(SnapshotGate("0", hub=Hub()), lambda _keys: None, hub=scene.hub)
        cleanup.hand_over([RowKey(1, "g", 0, 0), RowKey(1, "g", 1, 0)])
        cleanup.hand_over([RowKey(1, "h", 0, 0)])

        assert scene.scrape()["quiesce_cleanup_queue_calls", ()] == 2

        cleanup.close()


class TestGpu:
    """What CUDA devices hold, where the process uses any."""

    def test_devices_in_use_are_added_up(self, scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
        """A device without a byte of this process is not."""
        monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=FakeCuda()))

        found = scene.scrape()

        kinds = ("allocated", "reserved", "total")
        memory = [found["quiesce_gpu_memory_bytes", (("kind", kind),)] for kind in kinds]
        assert memory == [200, 300, 1_000]
        assert found["quiesce_gpu_utilization_ratio", ()] == 0.75

    def test_without_a_management_library_there_is_no_utilisation(
        self, scene: Scene, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Memory is known all the same."""
        cuda = FakeCuda()
        monkeypatch.setattr(cuda, "utilization", SimpleNamespace())  # calling it raises
        monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))

        found = {name for name, _ in scene.scrape()}

        assert "quiesce_gpu_memory_bytes" in found
        assert "quiesce_gpu_utilization_ratio" not in found

    @pytest.mark.parametrize("torch", ["absent", "unused"])
    def test_a_process_that_does_not_use_cuda_is_not_made_to(
        self, scene: Scene, monkeypatch: pytest.MonkeyPatch, torch: str
    ) -> None:
        """A driver that was started by a scrape would break whatever is forked later."""
        cuda = SimpleNamespace(is_initialized=lambda: False)  # anything else raises
        if torch == "absent":
            monkeypatch.delitem(sys.modules, "torch", raising=False)
        else:
            monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))

        found = {name for name, _ in scene.scrape()}

        assert not [name for name in found if "gpu" in name]
        assert scene.collector.source_errors == 0
        assert ("torch" in sys.modules) == (torch == "unused")
