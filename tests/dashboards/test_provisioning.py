"""The files that stand a monitoring stack up: they parse, name only what there is, and the programs at hand take them.

Grafana, Tempo, Docker and Kubernetes are not at hand: what they read is checked as data. Prometheus and Alertmanager run
with these very files.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import urllib.request
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

import quiesce
from quiesce.barrier import DataPlaneCheckpointBarrier
from quiesce.invariants import Violation
from quiesce.observers import Hub
from quiesce_dashboards import kubernetes
from quiesce_dashboards.alerts import alerts
from quiesce_dashboards.rules import ALERTS_FILE, GENERATED
from tests.alert_receiver import AlertReceiver, until
from tests.alert_stack import TOOLS, alertmanager, free_port, paged, program
from tests.docs.pages import blocks

ROOT: Final = GENERATED.parents[1]
PROVISIONING: Final = ROOT / "provisioning"
FILES: Final = sorted(
    path for pattern in ("**/*.yaml", "**/*.yml") for path in PROVISIONING.glob(pattern) if path.is_file()
)
PROMETHEUS: Final = PROVISIONING / "prometheus" / "prometheus.yml"
ALERTMANAGER: Final = PROVISIONING / "alertmanager" / "alertmanager.yml"
MOUNT: Final = "/etc/quiesce"
"""Where compose puts the folder `dashboards`."""


def documents(path: Path) -> list[Any]:
    """Return every document of a file."""
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def compose() -> dict[str, Any]:
    """Return the services of compose.yaml."""
    services: dict[str, Any] = documents(PROVISIONING / "compose.yaml")[0]["services"]
    return services


def datasources() -> dict[str, dict[str, Any]]:
    """Return the data sources by uid."""
    listed = documents(PROVISIONING / "grafana" / "datasources" / "quiesce.yaml")[0]["datasources"]
    return {each["uid"]: each for each in listed}


def here(path: str) -> Path:
    """Return what a path inside the containers is in this checkout."""
    assert path.startswith(f"{MOUNT}/"), path
    return ROOT / path.removeprefix(f"{MOUNT}/")


# ------------------------------------------------------------------------------------------------- every file


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PROVISIONING)))
def test_a_file_parses_and_names_no_key_twice(path: Path) -> None:
    """YAML takes the last of two equal keys in silence."""

    class Strict(yaml.SafeLoader):
        """Refuses a mapping with a key twice."""

    def mapping(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[Any, Any]:
        loader.flatten_mapping(node)
        keys = [loader.construct_object(key, deep=True) for key, _ in node.value]
        # A key that is merged in from an anchor stands before those of the mapping, which replace it.
        own = [key for key, value in node.value if key.start_mark.line >= node.start_mark.line]
        assert len(own) == len({key.value for key in own}), (path, node.start_mark.line)
        return dict(
            zip(keys, [loader.construct_object(value, deep=True) for _, value in node.value], strict=True)
        )

    Strict.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)
    assert all(
        isinstance(each, dict) for each in yaml.load_all(path.read_text(encoding="utf-8"), Strict) if each
    )


def test_a_key_twice_would_be_noticed(tmp_path: Path) -> None:
    """The check above can fail; what an anchor brings in may be replaced."""
    path = tmp_path / "x.yaml"
    path.write_text("a: &d {x: 1}\nb:\n  <<: *d\n  x: 2\n", encoding="utf-8")
    test_a_file_parses_and_names_no_key_twice(path)
    path.write_text("b:\n  x: 1\n  y: 3\n  x: 2\n", encoding="utf-8")
    with pytest.raises(AssertionError):
        test_a_file_parses_and_names_no_key_twice(path)


# ------------------------------------------------------------------------------------------------- compose


def test_every_image_has_an_exact_version() -> None:
    """No image changes by itself."""
    for name, service in compose().items():
        assert re.fullmatch(r"[\w.-]+/[\w.-]+:v?\d+\.\d+\.\d+", service["image"]), name


def test_compose_mounts_what_there_is() -> None:
    """A bind mount of a path that is not there makes an empty folder, and the program starts without its file."""
    volumes = documents(PROVISIONING / "compose.yaml")[0]["volumes"]
    for name, service in compose().items():
        for mount in service["volumes"]:
            source, target, *_ = re.sub(r"\$\{\w+:-(.*?)\}", r"\1", mount).split(":")
            if source.startswith("."):
                assert (PROVISIONING / source).exists(), (name, source)
                assert mount.endswith(":ro"), (name, mount)
            else:
                assert source in volumes, (name, source)
            assert target.startswith("/"), (name, target)


def test_compose_starts_programs_with_files_that_are_mounted() -> None:
    """Each path below the mount is the path of a file in this checkout, or of one that is mounted by itself."""
    for name, service in compose().items():
        single = {mount.split(":")[-2] for mount in service["volumes"] if not mount.startswith("..:")}
        whole = any(mount.startswith("..:") for mount in service["volumes"])
        words = [*service.get("command", ()), *map(str, service.get("environment", {}).values())]
        paths = [found for word in words for found in re.findall(rf"{MOUNT}/[\w./-]+", word)]
        assert paths, name
        for path in paths:
            assert path in single or (whole and here(path).exists()), (name, path)


def test_everything_listens_on_loopback() -> None:
    """The machine's network is shared, so an address says who may come."""
    flags = [word for service in compose().values() for word in service.get("command", ())]
    listening = [word for word in flags if "listen-address=" in word]
    assert listening == [
        "--web.listen-address=127.0.0.1:9090",
        "--web.listen-address=127.0.0.1:9093",
        "--cluster.listen-address=",
    ]
    assert compose()["grafana"]["environment"]["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"
    tempo = documents(PROVISIONING / "tempo" / "tempo.yaml")[0]
    assert tempo["server"]["http_listen_address"] == tempo["server"]["grpc_listen_address"] == "127.0.0.1"
    endpoints = tempo["distributor"]["receivers"]["otlp"]["protocols"].values()
    assert all(each["endpoint"].startswith("127.0.0.1:") for each in endpoints)


def test_no_two_programs_want_one_port() -> None:
    """They share one network."""
    tempo = documents(PROVISIONING / "tempo" / "tempo.yaml")[0]
    ports = [9090, 9093, 3000, tempo["server"]["http_listen_port"], tempo["server"]["grpc_listen_port"]]
    ports += [
        int(each["endpoint"].rpartition(":")[2])
        for each in tempo["distributor"]["receivers"]["otlp"]["protocols"].values()
    ]
    assert len(ports) == len(set(ports))
    assert 9464 not in ports  # that of a run


# ------------------------------------------------------------------------------------------------- Grafana


def test_the_provider_reads_the_generated_dashboards() -> None:
    """The folder is where they are; what somebody clicks together does not replace them."""
    provider = documents(PROVISIONING / "grafana" / "dashboards" / "quiesce.yaml")[0]["providers"][0]
    environment = compose()["grafana"]["environment"]
    assert provider["options"]["path"] == "${QUIESCE_DASHBOARDS}"
    assert here(environment["QUIESCE_DASHBOARDS"]) == GENERATED / "dashboards"
    assert here(environment["GF_PATHS_PROVISIONING"]) == PROVISIONING / "grafana"
    assert provider["allowUiUpdates"] is False


def test_data_sources_point_at_each_other_and_at_the_stack() -> None:
    """An exemplar's trace is in the Tempo of the same file; each address is one that compose starts something at."""
    known = datasources()
    assert {each["type"] for each in known.values()} == {"prometheus", "alertmanager", "tempo"}
    prometheus = known["quiesce-prometheus"]["jsonData"]
    destinations = prometheus["exemplarTraceIdDestinations"]
    assert [(each["name"], known[each["datasourceUid"]]["type"]) for each in destinations] == [
        ("trace_id", "tempo")
    ]
    assert known[prometheus["alertmanagerUid"]]["type"] == "alertmanager"
    tempo = documents(PROVISIONING / "tempo" / "tempo.yaml")[0]["server"]
    assert {each["type"]: each["url"] for each in known.values()} == {
        "prometheus": "http://127.0.0.1:9090",
        "alertmanager": "http://127.0.0.1:9093",
        "tempo": f"http://127.0.0.1:{tempo['http_listen_port']}",
    }


def test_grafana_knows_the_interval_of_scrapes() -> None:
    """The rate interval is made from it: a shorter one than the real one leaves rates empty."""
    scrape = documents(PROMETHEUS)[0]["global"]["scrape_interval"]
    assert datasources()["quiesce-prometheus"]["jsonData"]["timeInterval"] == scrape
    monitor = documents(PROVISIONING / "kubernetes" / "pod-monitor.yaml")[0]
    assert [each["interval"] for each in monitor["spec"]["podMetricsEndpoints"]] == [scrape]


def test_exemplars_are_kept() -> None:
    """By the flag, and with room for some."""
    assert "--enable-feature=exemplar-storage" in compose()["prometheus"]["command"]
    assert documents(PROMETHEUS)[0]["storage"]["exemplars"]["max_exemplars"] >= 10_000


# ------------------------------------------------------------------------------------------------- Kubernetes


def test_the_manifests_are_current() -> None:
    """What is committed is what the code writes."""
    assert kubernetes.check() == []


def test_a_stale_manifest_is_named_and_written_anew(tmp_path: Path) -> None:
    """As it is with the rules."""
    assert kubernetes.build(tmp_path) == [tmp_path / name for name in kubernetes.manifests()]
    assert kubernetes.build(tmp_path) == []
    (tmp_path / kubernetes.RULES_MANIFEST).write_text("{}\n", encoding="utf-8")
    assert kubernetes.check(tmp_path) == [kubernetes.RULES_MANIFEST]


def test_the_manifests_carry_the_very_rules_and_dashboards() -> None:
    """One truth: the groups of the rule file, and the bytes of the dashboards, with the sidecar's label."""
    [rule] = documents(PROVISIONING / "kubernetes" / kubernetes.RULES_MANIFEST)
    assert rule["kind"] == "PrometheusRule"
    assert rule["spec"] == yaml.safe_load((GENERATED / ALERTS_FILE).read_text(encoding="utf-8"))
    maps = [each for each in documents(PROVISIONING / "kubernetes" / kubernetes.DASHBOARDS_MANIFEST) if each]
    carried = {name: text for each in maps for name, text in each["data"].items()}
    assert carried == {
        path.name: path.read_text(encoding="utf-8") for path in (GENERATED / "dashboards").glob("*.json")
    }
    assert len(maps) == len(carried) == 5
    for each in maps:
        assert each["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert re.fullmatch(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?", each["metadata"]["name"])
        assert len(json.dumps(each)) < kubernetes.CONFIG_MAP_LIMIT


def test_a_dashboard_that_no_config_map_holds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """At the build, and not when it is applied."""
    monkeypatch.setattr(
        kubernetes, "dashboard_files", lambda _: {"big.json": "x" * (kubernetes.CONFIG_MAP_LIMIT + 1)}
    )
    with pytest.raises(ValueError, match=r"big\.json"):
        kubernetes.manifests()


def test_the_monitor_finds_the_example_run() -> None:
    """Label, port and address are those that it looks for, and the metrics are not on loopback alone."""
    [monitor] = documents(PROVISIONING / "kubernetes" / "pod-monitor.yaml")
    [job] = documents(PROVISIONING / "kubernetes" / "run.yaml")
    pod = job["spec"]["template"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    [container] = pod["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    [endpoint] = monitor["spec"]["podMetricsEndpoints"]
    assert f"metrics.port={ports[endpoint['port']]}" in container["args"][0]
    assert "metrics.host=0.0.0.0" in container["args"][0]
    linger = re.search(r"metrics\.linger_seconds=(\d+)", container["args"][0])
    assert linger is not None
    assert int(linger[1]) > int(endpoint["interval"].removesuffix("s"))
    checked = subprocess.run(["bash", "-n"], input=container["args"][0], text=True, check=False, timeout=10)
    assert checked.returncode == 0
    assert not re.search(r":latest\b|:\s*$", container["image"])


# ------------------------------------------------------------------------------------------------- the programs


@pytest.mark.distribution
def test_promtool_and_amtool_take_the_configurations(tmp_path: Path) -> None:
    """With the rules that they name; a broken one is noticed."""
    broken = tmp_path / "broken.yml"
    broken.write_text("route: {receiver: nobody}\nreceivers: []\n", encoding="utf-8")
    verdicts = [
        subprocess.run([TOOLS / program, *words], capture_output=True, text=True, check=False, timeout=30)
        for program, *words in (
            ("promtool", "check", "config", str(PROMETHEUS)),
            ("amtool", "check-config", str(ALERTMANAGER)),
            ("amtool", "check-config", str(broken)),
        )
    ]
    assert [verdict.returncode == 0 for verdict in verdicts] == [True, True, False], verdicts
    assert f"{len(alerts())} rules found" in verdicts[0].stdout


@pytest.mark.distribution
def test_what_the_page_shows_is_the_core_of_the_files(tmp_path: Path) -> None:
    """A reader who copies from the page gets what the files have, and the programs take it."""
    shown = {each.detail: each.text for each in blocks("docs/how-to/set-up-alerting.md", "yaml")}
    for name, command in {
        "prometheus.yml": ("promtool", "check", "config", "--syntax-only"),
        "alertmanager.yml": ("amtool", "check-config"),
    }.items():
        (tmp_path / name).write_text(shown[name], encoding="utf-8")
        judged = subprocess.run([TOOLS / command[0], *command[1:], tmp_path / name], check=False, timeout=30)
        assert judged.returncode == 0, name
    mine, whole = yaml.safe_load(shown["alertmanager.yml"]), documents(ALERTMANAGER)[0]
    assert mine["route"]["group_by"] == whole["route"]["group_by"]
    assert mine["route"]["routes"][0].items() <= whole["route"]["routes"][0].items()
    assert [each["name"] for each in mine["receivers"]] == [each["name"] for each in whole["receivers"]]
    assert yaml.safe_load(shown["prometheus.yml"])["global"] == documents(PROMETHEUS)[0]["global"]


@pytest.mark.distribution
@pytest.mark.parametrize("severity, receiver", [("critical", "pager"), ("warning", "day")])
def test_an_alert_is_routed_by_its_severity(severity: str, receiver: str) -> None:
    """Somebody is paged for what is critical, and only for that."""
    routed = subprocess.run(
        [
            TOOLS / "amtool",
            "config",
            "routes",
            "test",
            f"--config.file={ALERTMANAGER}",
            f"severity={severity}",
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=30,
    )
    assert routed.stdout.strip() == receiver


def test_every_alert_that_is_inhibited_exists() -> None:
    """Names in the rules of inhibition are names of alerts."""
    known = {alert.name for alert in alerts()}
    text = ALERTMANAGER.read_text(encoding="utf-8")
    assert {name for name in re.findall(r"Quiesce\w+", text) if name != "Quiesce"} <= known


@pytest.mark.distribution
def test_the_stack_finds_a_run_and_pages(tmp_path: Path) -> None:
    """The very files, but for times and addresses: a run appears, breaks an invariant, and somebody is told."""
    stack = tmp_path / "dashboards"
    shutil.copytree(ROOT, stack, ignore=shutil.ignore_patterns("__pycache__", "*.py"))
    pager, web = free_port(), free_port()
    config = stack / "provisioning" / "prometheus" / "prometheus.yml"
    text = (
        config.read_text(encoding="utf-8")
        .replace("15s", "1s")
        .replace("5s", "1s")
        .replace(":9093", f":{pager}")
    )
    config.write_text(text, encoding="utf-8")
    targets = config.parent / "targets"
    hub = Hub(strict=True)
    with AlertReceiver() as receiver:
        told = yaml.safe_load(ALERTMANAGER.read_text(encoding="utf-8"))
        told["route"]["group_wait"] = "100ms"
        for each in told["receivers"]:
            each["webhook_configs"][0]["url"] = receiver.url
        with (
            alertmanager(tmp_path, receiver, pager, told),
            quiesce.enable_metrics("mine", port=0, hub=hub, sd_dir=targets, exporters=()),
            program(
                TOOLS / "prometheus",
                tmp_path,
                f"--config.file={config}",
                f"--storage.tsdb.path={tmp_path / 'data'}",
                *(f for f in compose()["prometheus"]["command"] if "feature" in f),
                f"--web.listen-address=127.0.0.1:{web}",
                ready=f"http://127.0.0.1:{web}/-/ready",
            ),
        ):
            barrier = DataPlaneCheckpointBarrier(hub=hub)
            hub.fire("invariant_violated", Violation("single_owner", "critical", "It does not hold.", ()))
            until(lambda: "QuiesceOwnershipConflict" in paged(receiver), 30)
            until(lambda: scraped(web) == [("quiesce", "up")], 30)  # a scrape may be late now and then
            assert barrier.statistics().phase == "open"


def scraped(port: int) -> list[tuple[str, str]]:
    """Return what a Prometheus scrapes, and how it fares."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/targets", timeout=10) as answer:
        active = json.load(answer)["data"]["activeTargets"]
    return [(each["labels"]["job"], each["health"]) for each in active]
