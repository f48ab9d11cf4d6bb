"""The HTTP endpoint: formats, health, storms, and what a scraper cannot do."""

import gzip
import http.client
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from quiesce.errors import PortUnavailableError
from quiesce_exporters.prometheus import CONCURRENT_SCRAPES, MetricsServer, serve
from tests.alert_stack import free_port
from tests.unit.telemetry.exposition import parse_classic, parse_openmetrics

PROMETHEUS_ACCEPT = (
    "application/openmetrics-text;version=1.0.0;q=0.5,application/openmetrics-text;version=0.0.1;q=0.4,"
    "text/plain;version=1.0.0;q=0.3,text/plain;version=0.0.4;q=0.2,*/*;q=0.1"
)


@pytest.fixture
def registry() -> CollectorRegistry:
    """A registry with two counters."""
    registry = CollectorRegistry()
    Counter("apples_total", "Apples", registry=registry).inc(3)
    Counter("pears_total", "Pears", registry=registry).inc(4)
    return registry


@pytest.fixture
def server(registry: CollectorRegistry) -> Iterator[MetricsServer]:
    """The endpoint over it."""
    running = serve(registry, "127.0.0.1", 0)
    yield running
    running.close()


def get(server: MetricsServer, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    """Send a GET request; return status, headers and body."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    try:
        connection.request(
            "GET", path, headers={name.replace("_", "-"): value for name, value in headers.items()}
        )
        response = connection.getresponse()
        return response.status, dict(response.getheaders()), response.read()
    finally:
        connection.close()


class TestAnswers:
    """What is answered to whom."""

    def test_the_classic_text_is_the_default(self, server: MetricsServer) -> None:
        """A browser or curl sees the plain form."""
        status, headers, body = get(server, "/metrics")

        assert status == 200
        assert headers["Content-Type"].startswith("text/plain; version=0.0.4")
        assert headers["Content-Length"] == str(len(body))
        assert {family.name for family in parse_classic(body.decode())} >= {"apples", "pears"}

    def test_a_prometheus_server_gets_openmetrics(self, server: MetricsServer) -> None:
        """As its Accept header asks, ended by the marker of a whole answer."""
        status, headers, body = get(server, "/metrics", Accept=PROMETHEUS_ACCEPT)

        assert status == 200
        assert headers["Content-Type"].startswith("application/openmetrics-text; version=1.0.0")
        assert body.endswith(b"# EOF\n")
        assert {family.name for family in parse_openmetrics(body.decode())} == {"apples", "pears"}

    def test_an_answer_is_compressed_where_that_is_accepted(self, server: MetricsServer) -> None:
        """The length is that of what is sent."""
        _, headers, body = get(server, "/metrics", Accept_Encoding="gzip")

        assert headers["Content-Encoding"] == "gzip"
        assert headers["Content-Length"] == str(len(body))
        assert b"apples_total 3.0" in gzip.decompress(body)

    @pytest.mark.parametrize(
        "accept, openmetrics",
        [
            ("application/openmetrics-text", True),
            ("application/openmetrics-text;q=0.1, text/plain;q=0.9", False),
            ("text/plain;q=0.1, application/openmetrics-text; version=1.0.0; Q=0.9", True),
            ("text/plain, application/openmetrics-text", False),
            ("application/openmetrics-text;q=0, */*", False),
            ("*/*;q=0.2, application/openmetrics-text;q=0.1", False),
            ("application/openmetrics-text;version=0.0.1;q=0.9, text/plain;q=0.1", False),
            ("application/openmetrics-text;q=much", True),
            ("text/html, application/json", False),
            (PROMETHEUS_ACCEPT, True),
        ],
    )
    def test_the_format_is_the_one_that_is_liked_best(
        self, server: MetricsServer, accept: str, *, openmetrics: bool
    ) -> None:
        """By the weights of the header, not by the order of its items; what weighs nothing is refused."""
        _, headers, body = get(server, "/metrics", Accept=accept)

        assert headers["Content-Type"].startswith("application/openmetrics-text") == openmetrics
        assert body.endswith(b"# EOF\n") == openmetrics

    def test_an_answer_is_not_compressed_where_that_is_refused(self, server: MetricsServer) -> None:
        """By a weight of nothing."""
        _, headers, body = get(server, "/metrics", Accept_Encoding="br, gzip;q=0")

        assert "Content-Encoding" not in headers
        assert b"apples_total 3.0" in body

    def test_a_scraper_may_ask_for_some_metrics(self, server: MetricsServer) -> None:
        """By the usual parameter."""
        _, _, body = get(server, "/metrics?name[]=apples_total")

        assert b"apples_total 3.0" in body
        assert b"pears" not in body

    def test_health_is_told_without_collecting(self) -> None:
        """Health does not depend on what a collector does."""

        class Broken:
            def collect(self) -> list[Metric]:
                raise AssertionError("health must not collect")

        registry = CollectorRegistry(support_collectors_without_names=True)
        registry.register(Broken())
        running = serve(registry, "127.0.0.1", 0)
        try:
            assert get(running, "/healthz")[::2] == (200, b"ok\n")
        finally:
            running.close()

    @pytest.mark.parametrize(
        "path, status, kind",
        [
            ("/healthz", 200, "text/plain"),
            ("/metrics", 200, "application/openmetrics-text"),
            ("/metrics?name[]=apples_total", 200, "application/openmetrics-text"),
            ("/", 404, "text/plain"),
        ],
    )
    def test_a_head_request_is_told_as_much_and_nothing_is_collected(
        self, path: str, status: int, kind: str
    ) -> None:
        """Load balancers ask so whether somebody is there."""

        class Broken:
            def collect(self) -> list[Metric]:
                raise AssertionError("nobody asked for metrics")

        registry = CollectorRegistry(support_collectors_without_names=True)
        registry.register(Broken())
        running = serve(registry, "127.0.0.1", 0)
        connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=10)
        try:
            connection.request("HEAD", path, headers={"Accept": PROMETHEUS_ACCEPT})
            answer = connection.getresponse()
            assert answer.status == status
            assert answer.headers["Content-Type"].startswith(kind)
            assert answer.read() == b""
        finally:
            connection.close()
            running.close()

    @pytest.mark.parametrize("path", ["/", "/metrics/x", "/etc/passwd"])
    def test_anything_else_is_not_found(self, server: MetricsServer, path: str) -> None:
        """There are two paths."""
        assert get(server, path)[0] == 404

    def test_only_get_is_answered(self, server: MetricsServer) -> None:
        """Nothing can be sent to a run."""
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
        connection.request("POST", "/metrics", body=b"x")
        assert connection.getresponse().status == 501
        connection.close()


class TestStorms:
    """Too many, too slow, or half gone scrapers."""

    def test_a_storm_is_turned_away_and_the_first_ones_are_answered(self) -> None:
        """One answer is made at a time and a few wait for theirs; the others are told at once."""
        inside = threading.Semaphore(0)
        go_on = threading.Event()

        class Slow:
            def collect(self) -> list[Metric]:
                inside.release()
                assert go_on.wait(30)
                return [GaugeMetricFamily("slow", "Slow", value=1)]

        registry = CollectorRegistry(support_collectors_without_names=True)
        registry.register(Slow())
        running = serve(registry, "127.0.0.1", 0)
        answers: list[int] = []
        scrapers = [
            threading.Thread(target=lambda: answers.append(get(running, "/metrics")[0]))
            for _ in range(CONCURRENT_SCRAPES)
        ]
        try:
            for scraper in scrapers:
                scraper.start()
            assert inside.acquire(timeout=30)
            while running.scrapes < CONCURRENT_SCRAPES:
                time.sleep(0.001)
            assert not inside.acquire(blocking=False)
            assert get(running, "/metrics")[0] == 503
            assert get(running, "/healthz")[0] == 200
            go_on.set()
            for scraper in scrapers:
                scraper.join(30)
            assert answers == [200] * CONCURRENT_SCRAPES
            while running.scrapes:  # a client has its answer before its handler is over
                time.sleep(0.001)
            assert get(running, "/metrics")[0] == 200
        finally:
            go_on.set()
            running.close()

    def test_a_silent_connection_delays_nobody(self, server: MetricsServer) -> None:
        """Neither the next scraper nor the end of the run waits for it."""
        with socket.create_connection(("127.0.0.1", server.port)):
            assert get(server, "/metrics")[0] == 200
            server.close()

        assert server.port > 0

    def test_a_scraper_that_hangs_up_is_no_news(
        self, server: MetricsServer, capfd: pytest.CaptureFixture[str]
    ) -> None:
        """No traceback on the run's terminal."""
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
            connection.sendall(b"GET /metrics HTTP/1.1\r\n\r\n")

        assert get(server, "/metrics")[0] == 200
        assert capfd.readouterr().err == ""


class TestLife:
    """Starting and ending."""

    def test_a_port_that_is_taken_is_refused_by_name(
        self, server: MetricsServer, registry: CollectorRegistry
    ) -> None:
        """Two servers never share a port, so no scrape bounces between two processes."""
        with pytest.raises(PortUnavailableError, match=rf"127\.0\.0\.1 port {server.port}: another process"):
            serve(registry, "127.0.0.1", server.port)

    def test_a_host_that_is_none_is_refused_by_name(self, registry: CollectorRegistry) -> None:
        """A name that does not resolve, or an address of somebody else."""
        with pytest.raises(PortUnavailableError, match=r"no\.such\.host\.invalid"):
            serve(registry, "no.such.host.invalid", 0)
        with pytest.raises(PortUnavailableError, match=r"192\.0\.2\.1"):
            serve(registry, "192.0.2.1", 0)

    def test_a_port_is_free_again_at_once(self, registry: CollectorRegistry) -> None:
        """A restart does not wait for old connections; closing twice changes nothing."""
        first = serve(registry, "127.0.0.1", free_port())
        get(first, "/metrics")
        first.close()
        first.close()

        second = serve(registry, "127.0.0.1", first.port)

        assert get(second, "/metrics")[0] == 200
        second.close()

    def test_a_name_is_resolved(self, registry: CollectorRegistry) -> None:
        """`localhost` is the loopback interface, of whichever family."""
        running = serve(registry, "localhost", 0)

        assert running.host in {"127.0.0.1", "::1"}
        running.close()
