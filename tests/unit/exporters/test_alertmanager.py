"""The direct way to Alertmanager: what is told, to whom, when, and that nobody ever waits for it."""

import logging
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.core import GaugeMetricFamily

from quiesce.errors import ConfigError
from quiesce.invariants import Violation
from quiesce.observers import Hub
from quiesce.telemetry.sinks import SinkContext
from quiesce_dashboards.objectives import PHASE_LIMITS, AlertConfig
from quiesce_exporters import alert_delivery
from quiesce_exporters.alert_delivery import endpoint
from quiesce_exporters.alertmanager import (
    TOKEN_VARIABLE,
    URLS_VARIABLE,
    WEBHOOK_VARIABLE,
    Alertmanager,
    make_alertmanager,
)
from tests.alert_receiver import AlertReceiver, until
from tests.alert_stack import free_port

VIOLATION = Violation(
    "single_owner", "critical", "Group e000-p0000017 is in two places.", ("e000-p0000017",), cut_id="c7"
)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have deliveries look often and try again soon."""
    monkeypatch.setattr(alert_delivery, "TICK_SECONDS", 0.02)
    monkeypatch.setattr(alert_delivery, "BACKOFF_SECONDS", (0.02, 0.05))


@contextmanager
def telling(*urls: str, webhook: str | None = None, **options: Any) -> Iterator[Alertmanager]:  # noqa: ANN401 - any of its options
    """A sink that tells these, closed at the end."""
    endpoints = [endpoint("alertmanager", url, key="urls", timeout_seconds=2) for url in urls]
    if webhook is not None:
        endpoints.append(endpoint("webhook", webhook, key="webhook", timeout_seconds=2))
    sink = Alertmanager(endpoints, run="r", role="controller", instance="host", **options)
    try:
        yield sink
    finally:
        sink.close(2.0)


def unix(text: str) -> float:
    """Return the Unix time of an RFC 3339 text."""
    return datetime.fromisoformat(text).timestamp()


def test_a_violation_is_posted_with_what_it_says() -> None:
    """Labels, texts, runbook, and an end half an hour ahead, at Alertmanager's own path."""
    with AlertReceiver() as receiver, telling(receiver.url) as sink:
        sink.invariant_violated(VIOLATION)
        until(lambda: bool(receiver.requests))
        path, headers, _ = receiver.requests[0]
        alert = receiver.alerts()[0]

    assert path == "/api/v2/alerts"
    assert headers["Content-Type"] == "application/json"
    assert alert["labels"] == {
        "alertname": "QuiesceOwnershipConflict",
        "severity": "critical",
        "run": "r",
        "role": "controller",
        "instance": "host",
        "invariant": "single_owner",
        "source": "process",
    }
    assert "Run r: a prompt group has two owners" in alert["annotations"]["summary"]
    for said in ("host (controller)", "Next:", VIOLATION.message, "Groups: e000-p0000017", "Cut: c7"):
        assert said in alert["annotations"]["description"]
    assert alert["annotations"]["runbook_url"].endswith("QuiesceOwnershipConflict.html")
    assert 1790 < unix(alert["endsAt"]) - unix(alert["startsAt"]) <= 1801


def test_many_groups_are_named_in_part() -> None:
    """A page names five groups and counts the others: the log has all."""
    groups = tuple(f"g{n}" for n in range(9))
    with AlertReceiver() as receiver, telling(receiver.url) as sink:
        sink.invariant_violated(Violation("conservation", "critical", "Lost.", groups))
        until(lambda: bool(receiver.requests))

    assert "Groups: g0, g1, g2, g3, g4 and 4 more." in receiver.alerts()[0]["annotations"]["description"]


def test_a_check_of_a_user_has_an_alert_too() -> None:
    """What is not in the table goes out under the common name, with its own severity."""
    with AlertReceiver() as receiver, telling(receiver.url) as sink:
        sink.invariant_violated(Violation("my_check", "warning", "Odd."))
        until(lambda: bool(receiver.requests))

    labels = receiver.alerts()[0]["labels"]
    assert (labels["alertname"], labels["severity"], labels["invariant"]) == (
        "QuiesceInvariantViolated",
        "warning",
        "my_check",
    )


def test_what_stands_is_sent_again_and_keeps_its_begin() -> None:
    """Alertmanager hears of it anew before it would end, under the same labels and begin."""
    with AlertReceiver() as receiver, telling(receiver.url, resend_seconds=0.05) as sink:
        sink.checkpoint_ended("c1", 10, "failed", "disk", {}, 0, 0)
        until(lambda: len(receiver.requests) >= 4)
        first, *others = receiver.alerts()

    assert first["labels"]["alertname"] == "QuiesceCheckpointFailing"
    assert "failed, disk" in first["annotations"]["description"]
    assert all(other["labels"] == first["labels"] for other in others)
    assert len({alert["startsAt"] for alert in (first, *others)}) == 1
    assert unix(others[-1]["endsAt"]) > unix(first["endsAt"])


def test_a_published_checkpoint_ends_the_alert_about_failing_ones() -> None:
    """The end is told once, in the past; a later failure begins anew."""
    with AlertReceiver() as receiver, telling(receiver.url, hold_seconds=0.05) as sink:
        sink.checkpoint_ended("c1", 10, "failed", "disk", {}, 0, 0)
        until(lambda: len(receiver.requests) == 1)
        sink.checkpoint_ended("c2", 20, "completed", "", {}, 5, 9)
        until(lambda: len(receiver.requests) == 2)
        sink.checkpoint_ended("c3", 30, "refused", "invariant", {}, 0, 0)
        until(lambda: len(receiver.requests) == 3)
        _, ended, again = receiver.alerts()

    assert unix(ended["endsAt"]) <= time.time()
    assert unix(again["endsAt"]) > time.time()
    assert unix(again["startsAt"]) >= unix(ended["endsAt"]) - 1


def test_an_attempt_that_is_told_twice_counts_once() -> None:
    """A hook and the log's line about the same attempt are one failure."""
    with AlertReceiver() as receiver, telling(receiver.url) as sink:
        sink.checkpoint_ended("c1", 10, "failed", "disk", {}, 0, 0)
        sink.events(
            [{"event": "checkpoint.not_published", "cut_id": "c1", "outcome": "failed", "reason": "disk"}]
        )
        until(lambda: len(receiver.requests) >= 1)

    assert all("(attempts in a row: 1)" in alert["annotations"]["description"] for alert in receiver.alerts())


def test_a_phase_that_lasts_too_long_is_told_and_its_end_is() -> None:
    """The alert begins while the phase still runs, names it, and ends with it."""
    config = AlertConfig(phase_limits={**PHASE_LIMITS, "write": 0.05})
    with AlertReceiver() as receiver, telling(receiver.url, config=config, hold_seconds=0.01) as sink:
        sink.phase_started("c1", "stage")
        sink.phase_started("c1", "write")
        until(lambda: bool(receiver.requests))
        sink.phase_ended("c1", "write", 10**9, "completed")
        until(lambda: len(receiver.requests) >= 2)
        began, ended = receiver.alerts()[:2]

    assert began["labels"]["alertname"] == "QuiesceCheckpointStalled"
    assert began["labels"]["phase"] == ended["labels"]["phase"] == "write"
    assert unix(ended["endsAt"]) <= time.time()


def test_a_drain_that_hangs_is_told_from_the_barriers_hooks() -> None:
    """Drain and exclusive phase are the barrier's to tell, and a window that is given up ends them."""
    config = AlertConfig(phase_limits={**PHASE_LIMITS, "drain": 0.05})
    hub = Hub(strict=True)
    with AlertReceiver() as receiver, telling(receiver.url, config=config, hold_seconds=0.01) as sink:
        hub.subscribe(sink)
        hub.fire("window_requested", "w1", 0)
        until(lambda: bool(receiver.requests))
        hub.fire("window_abandoned", "w1", 10**9, "failed", (), 10**9)
        until(lambda: len(receiver.requests) >= 2)

    assert {alert["labels"]["phase"] for alert in receiver.alerts()} == {"drain"}


def test_a_run_that_fails_is_told_and_one_that_finishes_is_not() -> None:
    """Only the failed state pages, and it outlives the process by a quarter of an hour."""
    with AlertReceiver() as receiver, telling(receiver.url) as sink:
        for state in ("starting", "running", "stopping", "finished"):
            sink.run_state_changed(state)
        sink.events([{"event": "run.state", "state": "failed"}])
        until(lambda: bool(receiver.requests))

    assert set(receiver.names()) == {"QuiesceRunDown"}
    assert unix(receiver.alerts()[0]["endsAt"]) > time.time() + 800


def test_the_runs_log_alone_is_enough() -> None:
    """Without hooks, the log's lines tell the same."""
    with AlertReceiver() as receiver, telling(receiver.url) as sink:
        sink.events(
            [
                {
                    "event": "invariant.violated",
                    "invariant": "rows_present",
                    "severity": "critical",
                    "message": "A row is missing.",
                    "groups": ["g1"],
                },
                {"event": "train.step", "step": 3},
                {"event": "checkpoint.not_published", "step": 4, "outcome": "refused", "reason": "invariant"},
            ]
        )
        until(lambda: len(set(receiver.names())) == 2)

    assert set(receiver.names()) == {"QuiesceRowsDiverged", "QuiesceCheckpointFailing"}


def samples(
    *, last: float = 0.0, phase: float = 0.0, started: float = 0.0, failed: float = 0.0
) -> list[GaugeMetricFamily]:
    """A snapshot of a run's metrics."""
    violation = GaugeMetricFamily(
        "quiesce_invariant_last_violation_timestamp_seconds", "", labels=["invariant"]
    )
    violation.add_metric(["digest_matches"], last)
    violation.add_metric(["single_owner"], 0.0)
    now = GaugeMetricFamily("quiesce_checkpoint_phase", "", labels=["phase"])
    now.add_metric(["write"], phase)
    began = GaugeMetricFamily("quiesce_checkpoint_phase_started_timestamp_seconds", "", labels=["phase"])
    began.add_metric(["write"], started)
    failures = GaugeMetricFamily("quiesce_checkpoint_failures_since_success", "", value=failed)
    return [violation, now, began, failures]


def test_metric_samples_alone_are_enough() -> None:
    """Where neither hooks nor a log are heard, a snapshot says what stands."""
    now = time.time()
    with AlertReceiver() as receiver, telling(receiver.url, hold_seconds=0.01) as sink:
        sink.samples(samples(), now)
        sink.samples(samples(last=now - 5, started=now - 9, failed=2), now)
        until(lambda: len(set(receiver.names())) == 2)
        sink.samples(samples(last=now - 5, started=now - 4000, phase=1, failed=2), now)
        until(lambda: "QuiesceCheckpointStalled" in receiver.names())
        sink.samples(samples(last=now - 5, started=now - 9), now)
        ended = {"QuiesceCheckpointStalled", "QuiesceCheckpointFailing"}
        until(
            lambda: (
                {
                    alert["labels"]["alertname"]
                    for alert in receiver.alerts()
                    if unix(alert["endsAt"]) <= time.time()
                }
                == ended
            )
        )

    assert set(receiver.names()) == {"QuiesceDigestMismatch", *ended}


def test_a_sample_says_nothing_about_what_was_told_in_words() -> None:
    """A snapshot from before a failure does not end its alert, and one after a violation does not repeat it."""
    now = time.time()
    with AlertReceiver() as receiver, telling(receiver.url, hold_seconds=0.01) as sink:
        sink.checkpoint_ended("c1", 10, "failed", "disk", {}, 0, 0)
        sink.invariant_violated(Violation("digest_matches", "critical", "Differs."))
        until(lambda: len(set(receiver.names())) == 2)
        sink.samples(samples(last=now, started=1.0), now)
        assert sink.statistics().standing == 2

    described = [alert["annotations"]["description"] for alert in receiver.alerts()]
    assert not any("The metrics of the run say so." in text for text in described)


def test_a_sample_prolongs_what_was_told_and_keeps_its_words() -> None:
    """A violation that goes on is seen in its metric; the groups at fault stay in the text."""
    now = time.time()
    with AlertReceiver() as receiver, telling(receiver.url, resend_seconds=0.05) as sink:
        sink.invariant_violated(Violation("digest_matches", "critical", "Differs.", ("g7",)))
        until(lambda: bool(receiver.requests))
        sink.samples(samples(last=now + 600), now + 600)
        until(lambda: unix(receiver.alerts()[-1]["endsAt"]) > now + 2300)

    assert all("Groups: g7." in alert["annotations"]["description"] for alert in receiver.alerts())


def test_an_old_violation_of_a_snapshot_is_over() -> None:
    """What was violated more than half an hour ago does not stand any more."""
    with AlertReceiver() as receiver, telling(receiver.url) as sink:
        sink.samples(samples(last=time.time() - 1900), time.time())
        assert sink.statistics().standing == 0
    assert receiver.requests == []


# ------------------------------------------------------------------------------------------------- endpoints


def test_every_alertmanager_is_told() -> None:
    """As in a cluster, each gets each alert, and one that is away keeps none from the others."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # bound, not listening: connections are refused
        away = f"http://127.0.0.1:{held.getsockname()[1]}"
        with AlertReceiver() as one, AlertReceiver() as two, telling(away, one.url, two.url) as sink:
            sink.invariant_violated(VIOLATION)
            until(lambda: bool(one.requests and two.requests))


def test_nothing_is_lost_while_an_alertmanager_is_away() -> None:
    """What begins, and what begins and ends meanwhile, is told when it is back: the begin first."""
    port = free_port()
    with telling(f"http://127.0.0.1:{port}", hold_seconds=0.05) as sink:
        sink.invariant_violated(VIOLATION)
        sink.checkpoint_ended("c1", 10, "failed", "disk", {}, 0, 0)
        sink.checkpoint_ended("c2", 20, "completed", "", {}, 0, 0)
        name = next(iter(sink.statistics().failures))
        until(lambda: sink.statistics().failures[name] >= 3)
        with AlertReceiver(port) as back:
            until(lambda: len(back.alerts()) >= 3)
            told = [
                (alert["labels"]["alertname"], unix(alert["endsAt"]) > time.time()) for alert in back.alerts()
            ]
    assert set(told[:2]) == {("QuiesceOwnershipConflict", True), ("QuiesceCheckpointFailing", True)}
    assert told[2] == ("QuiesceCheckpointFailing", False)


def test_an_end_waits_until_the_begin_could_be_paged() -> None:
    """An alert that was over at once still stands for the hold, so that a receiver hears of it."""
    with AlertReceiver() as receiver, telling(receiver.url, hold_seconds=1.0) as sink:
        since = time.monotonic()
        sink.checkpoint_ended("c1", 10, "failed", "disk", {}, 0, 0)
        sink.checkpoint_ended("c2", 20, "completed", "", {}, 0, 0)
        until(lambda: len(receiver.requests) >= 2)

    assert receiver.times[1] - since >= 1.0


def test_a_server_error_is_tried_again_and_a_refusal_for_good_is_not() -> None:
    """500 is the endpoint's trouble; 400 is about the words, and they would not get better."""
    with AlertReceiver(status=500) as receiver, telling(receiver.url) as sink:
        sink.invariant_violated(VIOLATION)
        until(lambda: len(receiver.requests) >= 3)
        receiver.status = 400
        name = next(iter(sink.statistics().refused))
        until(lambda: sink.statistics().refused[name] == 1)
        count = len(receiver.requests)
        receiver.status = 200
        sink.checkpoint_ended("c1", 10, "failed", "disk", {}, 0, 0)
        until(lambda: len(receiver.requests) > count)

    assert receiver.names()[-1] == "QuiesceCheckpointFailing"


def test_an_address_that_cannot_be_asked_is_a_failure_like_any_other() -> None:
    """A credential that no header can carry makes no request, and ends neither the thread nor the others."""
    with AlertReceiver() as receiver:
        odd = endpoint("alertmanager", receiver.url, key="urls", token="\u20ac")  # noqa: S106 - no credential
        sink = Alertmanager([odd], run="r", role="controller")
        try:
            sink.invariant_violated(VIOLATION)
            until(lambda: sink.statistics().failures[str(odd)] >= 2)
        finally:
            sink.close(1.0)
    assert receiver.requests == []


def test_a_webhook_hears_of_begins_and_ends_once_each() -> None:
    """It gets what an Alertmanager would send it, and no repetition."""
    with (
        AlertReceiver() as receiver,
        telling(webhook=f"{receiver.url}/hook?key=s3cret", hold_seconds=0.05, resend_seconds=0.02) as sink,
    ):
        sink.checkpoint_ended("c1", 10, "failed", "disk", {}, 0, 0)
        until(lambda: len(receiver.requests) == 1)
        sink.checkpoint_ended("c2", 20, "completed", "", {}, 0, 0)
        until(lambda: len(receiver.requests) == 2)
        (path, _, began), (_, _, ended) = receiver.requests

    assert path == "/hook?key=s3cret"
    assert (began["version"], began["status"], ended["status"]) == ("4", "firing", "resolved")
    assert began["commonLabels"]["alertname"] == "QuiesceCheckpointFailing"
    assert [alert["status"] for alert in receiver.alerts()] == ["firing", "resolved"]


def test_credentials_are_sent_and_never_logged(caplog: pytest.LogCaptureFixture) -> None:
    """User, password, token and a webhook's path reach the endpoint; the log names scheme, host and port."""
    caplog.set_level(logging.DEBUG)
    with AlertReceiver(status=503) as one, AlertReceiver(status=503) as two:
        settings = {
            "urls": [f"http://user:p%40ssw0rd@127.0.0.1:{one.port}/prefix"],
            "webhook": f"{two.url}/services/T0P5ECRET",
        }
        sink = make_alertmanager(SinkContext("r", "controller", None, {}, settings))
        try:
            sink.invariant_violated(VIOLATION)
            until(lambda: bool(one.requests and two.requests))
            until(lambda: caplog.text.count("takes no alerts") == 2)
        finally:
            sink.close(1.0)
    path, headers, _ = one.requests[0]
    assert (path, headers["Authorization"]) == ("/prefix/api/v2/alerts", "Basic dXNlcjpwQHNzdzByZA==")
    said = caplog.text + repr(sink.deliveries[0].to) + repr(sink.deliveries[1].to) + str(sink.statistics())
    assert f"http://127.0.0.1:{one.port}" in said
    for secret in ("p@ssw0rd", "p%40ssw0rd", "T0P5ECRET", "dXNlcjpw", "user:"):
        assert secret not in said


# ------------------------------------------------------------------------------------------------- nobody waits


@pytest.mark.parametrize("silent", [True, False])
def test_a_dead_or_silent_endpoint_costs_nothing(silent: bool) -> None:  # noqa: FBT001 - a parameter
    """Hooks return at once, and closing takes two seconds at most."""
    with AlertReceiver(silent=silent, status=500) as receiver:
        sink = Alertmanager(
            [endpoint("alertmanager", receiver.url, key="urls", timeout_seconds=30)],
            run="r",
            role="controller",
        )
        sink.invariant_violated(VIOLATION)
        until(lambda: bool(receiver.requests))
        since = time.monotonic()
        for _ in range(1000):
            sink.invariant_violated(VIOLATION)
        hooks = time.monotonic() - since
        since = time.monotonic()
        sink.close(60.0)
        closing = time.monotonic() - since
    assert hooks < 2.0
    assert closing < 2.5


def test_a_dripping_endpoint_is_cut_off() -> None:
    """One that sends a byte now and then is given up as a whole, and the next request is made."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(10)
        to = endpoint(
            "alertmanager",
            f"http://127.0.0.1:{server.getsockname()[1]}",
            key="urls",
            timeout_seconds=0.3,
        )
        sink = Alertmanager([to], run="r", role="controller")
        try:
            sink.invariant_violated(VIOLATION)
            connection, _ = server.accept()
            with connection, pytest.raises(OSError, match=r"."):
                deadline = time.monotonic() + 10
                while time.monotonic() < deadline:
                    connection.send(b"H")
                    time.sleep(0.02)
            again, _ = server.accept()
            again.close()
        finally:
            sink.close(1.0)


def test_a_process_exits_within_two_seconds_of_its_end_whatever_the_endpoint_does() -> None:
    """A silent Alertmanager does not keep a process, also where nobody closes the sink."""
    script = textwrap.dedent(
        """
        import sys, time
        from quiesce.invariants import Violation
        from quiesce_exporters.alert_delivery import endpoint
        from quiesce_exporters.alertmanager import Alertmanager
        sink = Alertmanager([endpoint("alertmanager", sys.argv[1], key="urls")], run="r", role="controller")
        sink.invariant_violated(Violation("single_owner", "critical", "Two owners."))
        if sys.argv[2] == "close":
            sink.close(2.0)
        print(time.time(), flush=True)
        """
    )
    with AlertReceiver(silent=True) as receiver:
        for closes in ("close", "leave"):
            finished = subprocess.run(
                [sys.executable, "-c", script, receiver.url, closes],
                capture_output=True,
                text=True,
                check=True,
                timeout=40,
            )
            assert time.time() - float(finished.stdout) < 2.0


def test_closing_tells_what_is_left_and_how_long_it_stands() -> None:
    """What begins just before the end is told, and outlives the process for a while."""
    with AlertReceiver() as receiver:
        with telling(receiver.url, hold_seconds=60) as sink:
            sink.checkpoint_ended("c1", 10, "failed", "disk", {}, 0, 0)
        told = receiver.alerts()
        count = len(receiver.requests)
        sink.invariant_violated(VIOLATION)
        sink.close(2.0)

    assert {alert["labels"]["alertname"] for alert in told} == {"QuiesceCheckpointFailing"}
    assert unix(told[-1]["endsAt"]) > time.time() + 800
    assert len(receiver.requests) == count


def test_a_forked_child_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """In another process hooks do nothing, also while a thread of the parent holds the lock."""
    with AlertReceiver() as receiver, telling(receiver.url) as sink:
        lock = sink._lock  # noqa: SLF001 - what a thread of the parent holds while it forks
        with lock, monkeypatch.context() as elsewhere:
            elsewhere.setattr(sink, "_pid", -1)
            sink.invariant_violated(VIOLATION)
            sink.checkpoint_ended("c1", 10, "failed", "disk", {}, 0, 0)
            sink.close(2.0)
        sink.phase_started("c1", "stage")
        assert sink.statistics().standing == 0
        assert receiver.requests == []


def test_what_stands_is_bounded() -> None:
    """Ever new checks do not fill the memory; what was given up is counted."""
    with AlertReceiver(status=503) as receiver, telling(receiver.url) as sink:
        for number in range(400):
            sink.invariant_violated(Violation(f"check_{number}", "warning", "Odd."))
        assert sink.statistics().standing == 256
        assert sink.statistics().forgotten == 144


# ------------------------------------------------------------------------------------------------- settings


def test_the_environment_names_endpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several Alertmanagers, a token for them and a webhook."""
    with AlertReceiver() as one, AlertReceiver() as two, AlertReceiver() as hook:
        monkeypatch.setenv(URLS_VARIABLE, f"{one.url}, {two.url}")
        monkeypatch.setenv(WEBHOOK_VARIABLE, hook.url)
        monkeypatch.setenv(TOKEN_VARIABLE, "t0ken")
        sink = make_alertmanager(SinkContext("r", "controller", None, {}, {}))
        try:
            sink.invariant_violated(VIOLATION)
            until(lambda: bool(one.requests and two.requests and hook.requests))
        finally:
            sink.close(1.0)
    assert two.requests[0][1]["Authorization"] == "Bearer t0ken"
    assert "Authorization" not in hook.requests[0][1]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"urls": "ftp://am.example"},
        {"urls": "http://"},
        {"urls": "http://user:s3cret@am.example:99999"},
        {"webhook": "mailto:x"},
        {"urls": "http://am", "token": "a\nb"},
        {"urls": "http://am", "resend_seconds": 0},
        {"urls": "http://am", "timeout_seconds": True},
        {"urls": "http://am", "alerts": [1]},
        {"urls": "http://am", "alerts": {"violation_second": 1}},
        {"urls": "http://am", "alerts": {"violation_seconds": -1}},
    ],
)
def test_what_cannot_be_used_is_refused_by_its_name(settings: dict[str, object]) -> None:
    """The message has the setting, and no credential."""
    with pytest.raises(ConfigError, match=r"alertmanager\.") as refused:
        make_alertmanager(SinkContext("r", "controller", None, {}, settings))
    assert "s3cret" not in str(refused.value)


def test_numbers_of_the_rules_are_its_numbers_too() -> None:
    """What the section of a run's configuration says about alerts holds for those that the process posts."""
    with AlertReceiver() as receiver:
        said = {"violation_seconds": 100, "runbook_base_url": "https://wiki.example/q", "runbook_suffix": ""}
        sink = make_alertmanager(
            SinkContext("r", "controller", None, {}, {"urls": receiver.url, "alerts": said})
        )
        try:
            sink.invariant_violated(VIOLATION)
            until(lambda: bool(receiver.alerts()))
        finally:
            sink.close(1.0)
    [alert] = receiver.alerts()[:1]
    assert alert["annotations"]["runbook_url"] == f"https://wiki.example/q/{alert['labels']['alertname']}"
    assert 0 < unix(alert["endsAt"]) - time.time() <= 100


def test_it_is_a_sink_and_an_observer(tmp_path: Path) -> None:
    """Every hook that it has is one of the catalogue's, and it takes spans without a word."""
    from quiesce.observers import HOOKS

    with AlertReceiver() as receiver, telling(receiver.url) as sink:
        sink.spans([])
        hooks: list[Callable[..., None]] = [getattr(sink, name) for name in HOOKS if hasattr(sink, name)]
    assert len(hooks) == 9
