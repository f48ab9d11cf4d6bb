"""Switching metrics on: ports, hosts, files, and what is left behind."""

import json
import logging
import os
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from opentelemetry.sdk.trace import TracerProvider
from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from quiesce.barrier import DataPlaneCheckpointBarrier
from quiesce.errors import ExporterMissingError, PortUnavailableError, TelemetryError
from quiesce.observers import Hub, default_hub
from quiesce.telemetry import enable
from quiesce.telemetry.enable import ENDPOINT_FILE, enable_metrics, find_exporter
from quiesce.telemetry.handle import HANDLES
from quiesce.telemetry.sinks import MakeSink, find_sink
from quiesce_exporters.prometheus import serve
from tests.unit.telemetry.telling import Kept


class FakeEndpoint:
    """An endpoint that only notes what happens to it."""

    def __init__(self, host: str, port: int) -> None:
        self.host = host
        self.port = port or 40_000
        self.closed = 0

    def close(self) -> None:
        """Note the closing."""
        self.closed += 1


class FakeServer:
    """Starts fake endpoints; ports that are taken, or a host that is wrong, are as told."""

    def __init__(self, taken: tuple[int, ...] = (), why: int = 0) -> None:
        self.taken = taken
        self.why = why
        self.started: list[FakeEndpoint] = []

    def __call__(self, registry: CollectorRegistry, host: str, port: int) -> FakeEndpoint:
        """Start one, or refuse."""
        if port in self.taken:
            raise PortUnavailableError(host, port, "taken") from OSError(self.why or 98, "taken")
        self.started.append(FakeEndpoint(host, port))
        return self.started[-1]


@pytest.fixture
def hub() -> Hub:
    """A strict hub of the test's own."""
    return Hub(strict=True)


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    """Close what a test leaves open, for the tests after it."""
    before = set(HANDLES)
    yield
    for handle in set(HANDLES) - before:
        handle.close()


@contextmanager
def listening(port: int = 0) -> Iterator[int]:
    """Hold a port of the loopback interface."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", port))
        holder.listen()
        yield int(holder.getsockname()[1])


class TestPorts:
    """A named port is used or refused; only the default moves."""

    def test_any_free_port_is_taken_for_0(self, hub: Hub) -> None:
        """And the handle tells which."""
        with enable_metrics("r", 0, hub=hub, serve=serve) as handle:
            assert handle.port > 0
            assert handle.url == f"http://127.0.0.1:{handle.port}/metrics"

    def test_a_named_port_is_used(self, hub: Hub) -> None:
        """Exactly that one."""
        with listening() as port:
            pass
        with enable_metrics("r", port, hub=hub, serve=serve) as handle:
            assert handle.port == port

    def test_a_named_port_that_is_taken_is_a_failure_that_names_it(self, hub: Hub) -> None:
        """Nothing is left subscribed by an attempt that failed."""
        with (
            listening() as port,
            pytest.raises(PortUnavailableError, match=f"port {port}.*another process") as caught,
        ):
            enable_metrics("r", port, hub=hub, serve=serve)

        assert isinstance(caught.value, TelemetryError)
        assert (caught.value.host, caught.value.port) == ("127.0.0.1", port)
        assert not hub.slot_closed

    @pytest.mark.parametrize("port", [70_000, -1])
    def test_a_port_that_cannot_be_is_refused_by_name(self, hub: Hub, port: int) -> None:
        """Out of range is unavailable, not a stray OverflowError."""
        with pytest.raises(PortUnavailableError, match=str(port)):
            enable_metrics("r", port, hub=hub, serve=serve)

    def test_the_default_port_is_the_documented_one(self, hub: Hub) -> None:
        """Nobody names a port, nobody else serves there."""
        server = FakeServer()

        handle = enable_metrics("r", hub=hub, serve=server)

        assert handle.port == enable.DEFAULT_PORT == 9464

    def test_the_default_port_moves_and_says_so(self, hub: Hub, caplog: pytest.LogCaptureFixture) -> None:
        """Two runs on one host are both reachable."""
        caplog.set_level(logging.INFO, "quiesce.telemetry")

        handle = enable_metrics("r", hub=hub, serve=FakeServer(taken=(9464,)))

        assert handle.port == 40_000
        assert "port 9464 is taken, so metrics moved to port 40000" in caplog.text

    def test_two_real_runs_without_a_named_port_are_both_served(
        self, hub: Hub, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The second one moves, over the real server."""
        with listening() as port:
            monkeypatch.setattr(enable, "DEFAULT_PORT", port)
            with enable_metrics("r", hub=hub, serve=serve) as handle:
                assert handle.port not in {0, port}

    def test_a_host_that_cannot_be_bound_does_not_move_anywhere(self, hub: Hub) -> None:
        """Another port would not help, so the failure is told at once."""
        server = FakeServer(taken=(9464,), why=99)

        with pytest.raises(PortUnavailableError):
            enable_metrics("r", hub=hub, serve=server)
        assert not server.started


class TestHosts:
    """Loopback unless somebody says otherwise."""

    def test_loopback_is_the_default_and_is_silent(self, hub: Hub, caplog: pytest.LogCaptureFixture) -> None:
        """No warning about what nobody can reach."""
        server = FakeServer()

        enable_metrics("r", 0, hub=hub, serve=server)

        assert server.started[0].host == "127.0.0.1"
        assert not [record for record in caplog.records if record.levelno >= logging.WARNING]

    @pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.7", "trainer.example"])  # noqa: S104 - what is warned about
    def test_any_other_host_is_used_with_one_warning(
        self, hub: Hub, caplog: pytest.LogCaptureFixture, host: str
    ) -> None:
        """The warning says that nothing protects it."""
        server = FakeServer()

        enable_metrics("r", 0, host, hub=hub, serve=server)

        assert server.started[0].host == host
        (warning,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
        assert "without authentication" in warning.getMessage()

    @pytest.mark.parametrize(
        "host,shown",
        [
            ("0.0.0.0", "127.0.0.1"),  # noqa: S104 - an endpoint that listens everywhere
            ("::", "[::1]"),
            ("::1", "[::1]"),
            ("localhost", "localhost"),
            ("192.0.2.7", "192.0.2.7"),
        ],
    )
    def test_the_url_can_be_opened(self, hub: Hub, host: str, shown: str) -> None:
        """An unspecified address is shown as the loopback one, and IPv6 in brackets."""
        handle = enable_metrics("r", 5, host, hub=hub, serve=FakeServer())

        assert handle.url == f"http://{shown}:5/metrics"


class TestFolder:
    """What the run folder says."""

    def test_the_folder_says_where_to_scrape_for_as_long_as_it_is_served(
        self, hub: Hub, tmp_path: Path
    ) -> None:
        """URL, port and process; gone when nobody serves there any more."""
        handle = enable_metrics("r", 0, hub=hub, run_dir=tmp_path, serve=serve)

        told = json.loads((tmp_path / ENDPOINT_FILE).read_text())
        handle.close()

        assert told == {"url": handle.url, "port": handle.port, "pid": os.getpid()}
        assert [path.name for path in tmp_path.iterdir()] == ["telemetry"]  # the recording stays

    def test_a_folder_that_cannot_be_written_is_a_failure_that_leaves_nothing(
        self, hub: Hub, tmp_path: Path
    ) -> None:
        """Neither an endpoint nor a subscription."""
        server = FakeServer()

        with pytest.raises(FileNotFoundError):
            enable_metrics("r", 0, hub=hub, run_dir=tmp_path / "missing", serve=server)

        assert server.started[0].closed == 1
        assert not hub.slot_closed

    def test_a_snapshot_is_the_classic_text(self, hub: Hub, tmp_path: Path) -> None:
        """It parses, replaces an older one, and leaves no scratch file."""
        path = tmp_path / "metrics.prom"
        path.write_text("old")
        with enable_metrics("r", 0, hub=hub, serve=FakeServer()) as handle:
            hub.fire("slot_closed", "retry", 0, 1_000, "completed", 0)
            handle.snapshot(path)

        families = {family.name for family in text_string_to_metric_families(path.read_text())}
        assert "quiesce_run_info" in families
        assert list(tmp_path.iterdir()) == [path]
        assert stat.S_IMODE(path.stat().st_mode) & stat.S_IRUSR


class TestClosing:
    """What is left after the end, or before the start."""

    def test_closing_unsubscribes_and_closes_once(self, hub: Hub) -> None:
        """A second close changes nothing."""
        server = FakeServer()
        handle = enable_metrics("r", 0, hub=hub, serve=server)
        assert hub.slot_closed

        handle.close()
        handle.close()

        assert not hub.slot_closed
        assert server.started[0].closed == 1

    def test_lingering_keeps_serving_for_as_long_as_it_says(
        self, hub: Hub, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """So that a scraper sees how the run ended."""
        server = FakeServer()
        handle = enable_metrics("r", 0, hub=hub, serve=server)
        slept: list[tuple[float, int]] = []
        monkeypatch.setattr(
            "quiesce.telemetry.handle.time",
            SimpleNamespace(
                sleep=lambda seconds: slept.append((seconds, server.started[0].closed)),
                perf_counter_ns=time.perf_counter_ns,
            ),
        )

        handle.close(linger=15.0)

        assert slept == [(15.0, 0)]
        assert server.started[0].closed == 1

    def test_nothing_is_global(self, hub: Hub) -> None:
        """An application's registry and the process-wide hub are left alone by a run on its own hub."""
        before = list(REGISTRY._collector_to_names)  # noqa: SLF001 - prometheus_client has no public list

        with enable_metrics("r", 0, hub=hub, serve=FakeServer()):
            assert list(REGISTRY._collector_to_names) == before  # noqa: SLF001 - as above
            assert not default_hub().slot_closed

    def test_the_process_wide_hub_is_the_default(self) -> None:
        """What reports to nobody in particular is counted."""
        with enable_metrics("r", 0, serve=FakeServer()) as handle:
            default_hub().fire("slot_closed", "retry", 0, 1_000, "completed", 0)

        assert handle.observer.slots["retry"].hold.count == 1
        assert not default_hub().slot_closed

    def test_the_expected_interval_is_passed_on(self, hub: Hub) -> None:
        """The handle says it for the observer."""
        with enable_metrics("r", 0, hub=hub, serve=FakeServer()) as handle:
            handle.expect_checkpoints(seconds=30)

            assert handle.registry.get_sample_value("quiesce_checkpoint_expected_interval_seconds") is None
            barrier = DataPlaneCheckpointBarrier(hub=hub)
            labels = {"run": "r", "role": "controller"}
            value = handle.registry.get_sample_value("quiesce_checkpoint_expected_interval_seconds", labels)
            assert value == 30
            assert barrier.kinds


class TestExporters:
    """Exporters are found by their entry points."""

    def test_the_http_server_is_announced(self) -> None:
        """The distribution's own exporter is installed with it."""
        assert find_exporter("prometheus") is serve

    def test_one_that_cannot_be_made_leaves_none_of_the_others_behind(
        self, hub: Hub, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Such as a process that would export."""
        kept = Kept()
        found = find_sink

        def find(name: str) -> MakeSink:
            return (lambda _: kept) if name == "kept" else found(name)

        monkeypatch.setattr(enable, "find_sink", find)
        with pytest.raises(ExporterMissingError, match="carrier-pigeon"):
            enable_metrics("r", 0, hub=hub, serve=FakeServer(), exporters=["kept", "carrier-pigeon"])
        assert kept.closed == [0.0]
        assert not hub.slot_closed

    def test_with_a_provider_of_the_application_otlp_is_sent_no_spans(self, hub: Hub) -> None:
        """Unless somebody asks for them."""
        provider = TracerProvider(shutdown_on_exit=False)
        for settings, wanted in (({}, False), ({"otlp": {"spans": True, "own_process": False}}, True)):
            with enable_metrics(
                "r",
                0,
                hub=hub,
                serve=FakeServer(),
                exporters=["otlp"],
                tracer_provider=provider,
                settings=settings,
            ) as handle:
                assert handle.telemetry.pipeline.has_sinks == wanted
                assert hub.slot_closed

    def test_an_exporter_that_is_not_installed_is_named(self, hub: Hub) -> None:
        """The message says what there is."""
        with pytest.raises(ExporterMissingError, match=r"'carrier-pigeon'.*quiesce\.exporters"):
            enable_metrics("r", 0, hub=hub, serve="carrier-pigeon")
        assert not hub.slot_closed


DRAWS = """
import random, sys
from quiesce.observers import Hub
from quiesce.telemetry.enable import enable_metrics
random.seed(7)
if sys.argv[1:]:
    enable_metrics("r", 0, hub=Hub(), run_dir=sys.argv[1], exporters=["recorder"]).close()
    assert "rich" in sys.modules, "there is nothing here that could draw"
print(random.random())
"""


def test_a_program_draws_the_same_numbers_with_telemetry(tmp_path: Path) -> None:
    """Nothing of it, nor what it imports, draws from Python's shared generator."""
    drawn = [
        subprocess.run(
            [sys.executable, "-c", DRAWS, *arguments], capture_output=True, text=True, check=True, timeout=55
        ).stdout
        for arguments in ((), (str(tmp_path),))
    ]
    assert drawn[0] == drawn[1]
