"""Alerts from end to end: real Prometheus, real Alertmanager, a real receiver of webhooks behind it."""

import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest

import quiesce
from quiesce.barrier import DataPlaneCheckpointBarrier
from quiesce.invariants import Violation
from quiesce.observers import Hub
from quiesce.telemetry import names
from quiesce_dashboards.alerts import alert_of, alerts
from quiesce_dashboards.objectives import AlertConfig
from quiesce_dashboards.rules import ALERTS_FILE, build
from quiesce_exporters.alert_delivery import endpoint
from quiesce_exporters.alertmanager import Alertmanager
from tests.alert_receiver import AlertReceiver, until
from tests.alert_stack import alertmanager, free_port, paged, prometheus

pytestmark = pytest.mark.distribution


def violated(hub: Hub, invariant: str) -> None:
    """Have an invariant violated."""
    severity: Any = "critical"
    hub.fire(
        "invariant_violated",
        Violation(invariant, severity, f"{invariant} does not hold.", ("e000-p0000017",)),
    )


def test_the_process_pages_through_alertmanager_without_prometheus(tmp_path: Path) -> None:
    """Begin, page, end, resolve: for every critical alert, also when Alertmanager comes later than the trouble."""
    config = AlertConfig(phase_limits={**AlertConfig().phase_limits, "write": 0.2})
    hub = Hub(strict=True)
    port = free_port()
    with AlertReceiver() as receiver:
        sink = Alertmanager(
            [endpoint("alertmanager", f"http://127.0.0.1:{port}", key="urls")],
            run="mine",
            role="controller",
            config=config,
            hold_seconds=2.0,
        )
        hub.subscribe(sink)
        try:
            for invariant in names.INVARIANTS:
                if invariant not in {"rows_not_orphaned", "checkpoint_progress"}:
                    violated(hub, invariant)
            violated(hub, "my_own_check")
            hub.fire("checkpoint_ended", "c1", 10, "failed", "disk", {}, 0, 0)
            hub.fire("phase_started", "c2", "write")
            with alertmanager(tmp_path, receiver, port):
                critical = {alert.name for alert in alerts() if alert.severity == "critical"}
                until(lambda: paged(receiver) >= critical, 30)
                hub.fire("phase_ended", "c2", "write", 10**9, "completed")
                hub.fire("checkpoint_ended", "c2", 20, "completed", "", {}, 0, 0)
                until(
                    lambda: (
                        paged(receiver, "resolved")
                        >= {"QuiesceCheckpointFailing", "QuiesceCheckpointStalled"}
                    ),
                    30,
                )
        finally:
            sink.close(2.0)

    assert paged(receiver, "resolved") == {"QuiesceCheckpointFailing", "QuiesceCheckpointStalled"}
    skew = [alert for alert in receiver.alerts() if alert["labels"]["alertname"] == "QuiesceCursorBufferSkew"]
    assert {alert["labels"]["invariant"] for alert in skew} == {
        "cursor_covers_buffer",
        "cursor_within_lookahead",
    }
    assert all("e000-p0000017" in alert["annotations"]["description"] for alert in skew)


def test_prometheus_pages_for_every_critical_alert(tmp_path: Path) -> None:
    """A served run, the generated rules, Alertmanager: each page arrives, naming run, instance and runbook."""
    limits = {**AlertConfig().phase_limits, "write": 1.0}
    build(tmp_path / "rules", AlertConfig(phase_limits=limits, failing_seconds=1.0))
    hub = Hub(strict=True)
    targets = tmp_path / "targets"
    targets.mkdir()
    port = free_port()
    with (
        AlertReceiver() as receiver,
        alertmanager(tmp_path, receiver, port),
        quiesce.enable_metrics("mine", port=0, hub=hub, sd_dir=targets, exporters=()) as metrics,
    ):
        barrier = DataPlaneCheckpointBarrier(hub=hub)
        for invariant in names.INVARIANTS:
            violated(hub, invariant)
        hub.fire("phase_started", "c1", "stage")
        hub.fire("phase_ended", "c1", "stage", 10**6, "failed")
        hub.fire("checkpoint_ended", "c1", 10, "failed", "disk", {}, 0, 0)
        critical = {alert.name for alert in alerts() if alert.severity == "critical"}
        critical -= {"QuiesceInvariantViolated"}  # no check of a user is attached
        with prometheus(
            tmp_path,
            rules=tmp_path / "rules" / ALERTS_FILE,
            targets=targets,
            alertmanagers=(port,),
            port=free_port(),
        ) as url:
            until(lambda: paged(receiver) >= critical - {"QuiesceCheckpointStalled"}, 30)
            hub.fire("phase_started", "c2", "write")
            until(lambda: paged(receiver) >= critical, 30)
            rules_url = f"{url}/api/v1/rules"
            with urllib.request.urlopen(rules_url, timeout=10) as answer:  # noqa: S310 - an address of this test
                groups = json.load(answer)["data"]["groups"]
        assert barrier.statistics().phase == "open"
        instance = f"127.0.0.1:{metrics.port}"

    rules = [rule for group in groups for rule in group["rules"]]
    assert {rule["name"]: rule["health"] for rule in rules} == dict.fromkeys(
        (alert.name for alert in alerts()), "ok"
    )
    conflict = next(
        alert for alert in receiver.alerts() if alert["labels"]["alertname"] == alert_of("single_owner")
    )
    assert conflict["labels"]["instance"] == instance
    assert "mine" in conflict["annotations"]["summary"]
    assert instance in conflict["annotations"]["description"]
    assert conflict["annotations"]["runbook_url"].endswith("QuiesceOwnershipConflict.html")
