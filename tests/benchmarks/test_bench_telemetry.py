"""What the benchmark of telemetry counts: spans on the wire, slots in each mode, lateness of an open load."""

import gzip
import http.client
import math
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from quiesce.bench import BenchReport, run_slots
from quiesce.bench.page import PAGE, TELEMETRY_PAGE, update_page
from quiesce.bench.telemetry import TARGETS, TelemetryCosts, measure_telemetry
from quiesce.bench.telemetry_open import WAYS, OpenLoop, measure_open_loop
from quiesce.bench.telemetry_receiver import count_spans, receiver
from quiesce.bench.telemetry_slots import MODES, measure_slots
from quiesce.bench.telemetry_training import TrainingCosts

QUICK = set(TARGETS) - {"train_telemetry_cpu_ratio"}
"""The bars of a quick run: it leaves training out."""


def encoded(*scopes: int) -> bytes:
    """Return a request with so many spans in each of its scopes, as protobuf writes it."""
    request = ExportTraceServiceRequest()
    for count in scopes:
        of_resource = request.resource_spans.add()
        of_resource.resource.attributes.add(key="service.name").value.string_value = "r1"
        of_scope = of_resource.scope_spans.add()
        of_scope.scope.name = "quiesce"
        for number in range(count):
            span = of_scope.spans.add(
                name="s" * number, trace_id=b"t" * 16, start_time_unix_nano=number, flags=1
            )
            span.attributes.add(key="a").value.double_value = 0.5
            span.events.add(name="e")
    return bytes(request.SerializeToString())


@pytest.mark.parametrize("scopes", [(), (0,), (3,), (200, 0, 1)])
def test_the_receiver_counts_the_spans_of_a_request(scopes: tuple[int, ...]) -> None:
    """Whatever else is in it, and however many resources there are."""
    assert count_spans(encoded(*scopes)) == sum(scopes)


@pytest.mark.parametrize("request_", [b"\x0a\x7f", b"\x0a", b"\xff", b"\x0b"])
def test_what_is_no_request_is_not_counted(request_: bytes) -> None:
    """A message that is cut off, or is of a type that OTLP does not use."""
    with pytest.raises(ValueError, match=r"is longer|is cut off|wire type"):
        count_spans(request_)


def test_the_receiver_is_a_process_that_answers_with_what_arrived() -> None:
    """Compressed or not, over one connection; metrics are taken and not counted."""
    with receiver() as arriving:
        connection = http.client.HTTPConnection(urlsplit(arriving.url).netloc, timeout=20)
        statuses = []
        for path, body, headers in (
            ("/v1/traces", encoded(3), {}),
            ("/v1/traces", gzip.compress(encoded(4)), {"Content-Encoding": "gzip"}),
            ("/v1/metrics", encoded(5), {}),
            ("/v1/traces", b"\x0a\x7f", {}),
        ):
            connection.request("POST", path, body, headers)
            response = connection.getresponse()
            response.read()
            statuses.append(response.status)
        connection.close()
        assert statuses == [200, 200, 200, 400]
        assert arriving.spans == 7


async def test_each_mode_is_measured_in_every_round_and_every_slot_that_is_on_has_a_span() -> None:
    """What is called everything on loses nothing, and its threads' time is told."""
    found = await measure_slots(3, 50, 10)

    assert set(found.slot_ns) == set(MODES)
    assert {len(times) for times in found.slot_ns.values()} == {3}
    assert all(ns > 0 for times in found.slot_ns.values() for ns in times)
    assert found.spans == found.slots == 150
    assert found.telemetry_ns > 0


@pytest.fixture(scope="module")
def load() -> OpenLoop:
    """Return one short open loop of each way."""
    return measure_open_loop((2_000,), 1, 0.1)


def test_every_span_of_the_open_loop_arrives(load: OpenLoop) -> None:
    """The receiver's count is the number of slots; without telemetry nothing arrives."""
    for way in WAYS[1:]:
        assert load.accounted(2_000, way) == 1
        (run,) = load.runs[2_000, way]
        assert run["arrived"] == run["spans"]["exported"] == run["slots_with_warm_up"] > run["slots"] == 200
    assert load.accounted(2_000, WAYS[0]) == 0


def test_the_export_process_is_counted_where_there_is_one(load: OpenLoop) -> None:
    """Its processor time is part of the whole; the other ways have none."""
    parts = {way: load.runs[2_000, way][0] for way in WAYS}

    assert parts[WAYS[0]]["export_process_us_per_slot"] == parts[WAYS[1]]["export_process_us_per_slot"] == 0
    assert parts[WAYS[2]]["export_process_us_per_slot"] > 0
    for run in parts.values():
        both = run["this_process_us_per_slot"] + run["export_process_us_per_slot"]
        assert run["cpu_us_per_slot"] == pytest.approx(both)
        assert 0 < run["slot_p50_us"] <= run["slot_p99_us"]


def test_differences_are_taken_within_a_round() -> None:
    """A round that is slow for both ways adds nothing."""
    none, process = WAYS[0], WAYS[2]
    load = OpenLoop({(1, none): [{"x": 1.0}, {"x": 101.0}], (1, process): [{"x": 3.0}, {"x": 103.0}]})

    assert load.over_none(1, process, "x").median == 2.0


@pytest.fixture
def costs(monkeypatch: pytest.MonkeyPatch, load: OpenLoop) -> TelemetryCosts:
    """Return a quick measurement with a training run that was made up."""
    from quiesce.bench import telemetry

    made_up = TrainingCosts(7, (0.004, 0.006), ((1.0, 1.0), (2.0, 1.9)))
    monkeypatch.setattr(telemetry, "measure_training", lambda *_: made_up)
    monkeypatch.setattr(telemetry, "_QUICK", telemetry._Plan(2, 20, 5, (2_000,), 1, 0.1, 2, 7, 0))  # noqa: SLF001 - a training run takes minutes
    monkeypatch.setattr(telemetry, "_FAST", 2_000)
    monkeypatch.setattr(telemetry, "measure_open_loop", lambda *_: load)
    return measure_telemetry(quick=True)


def test_every_bar_is_there_when_training_was_measured(costs: TelemetryCosts) -> None:
    """The throughput ratio comes with its interval, which holds the mean."""
    assert set(costs.bars) == set(TARGETS)
    assert all(math.isfinite(value) for value in costs.bars.values())
    assert costs.bars["train_telemetry_cpu_ratio"] == pytest.approx(0.005)
    (training,) = (result for result in costs.results if result["operation"] == "training")
    throughput = training["throughput_on_vs_off"]
    assert throughput["low_95"] < throughput["mean"] < throughput["high_95"]
    assert throughput["mean"] == pytest.approx(math.sqrt(2.0 / 1.9))
    for table in costs.tables:
        assert {len(row) for row in table.rows} == {len(table.columns)}


@pytest.fixture(scope="module")
def report() -> BenchReport:
    """Return the report of a quick run."""
    return run_slots(quick=True)


def test_the_report_says_what_each_mode_and_each_way_took(report: BenchReport) -> None:
    """In one report with the bare slot; what was left out of a quick run has no bar."""
    assert set(report.bars) >= QUICK
    assert "train_telemetry_cpu_ratio" not in report.bars
    modes = {result["mode"] for result in report.results if result["operation"] == "slot with telemetry"}
    ways = {result["way"] for result in report.results if result["operation"] == "open loop"}
    assert (modes, ways) == (set(MODES), set(WAYS))


def test_each_page_gets_its_part(report: BenchReport, tmp_path: Path) -> None:
    """The bare slot goes to one page, telemetry to another."""
    for name, page in (("slots", PAGE), ("telemetry", TELEMETRY_PAGE)):
        (tmp_path / page).write_text(f"before <!-- bench:{name} --> <!-- /bench:{name} --> after")

    written = update_page(report, tmp_path, today=datetime(2026, 12, 1, tzinfo=UTC))

    bare, telemetry = (path.read_text() for path in written)
    assert [path.name for path in written] == [PAGE, TELEMETRY_PAGE]
    assert "drain_cost_10k_vs_1k" in bare
    assert "slot_on_vs_bare" not in bare
    assert "slot_on_vs_bare" in telemetry
    assert "Measured on 2026-12-01" in telemetry
    assert telemetry.endswith("after")
