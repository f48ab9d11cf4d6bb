"""What the environment says about telemetry."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from quiesce.errors import ConfigError
from quiesce.telemetry.settings import Settings, is_on, read_settings


def test_an_empty_environment_says_nothing() -> None:
    """And switches nothing on."""
    assert read_settings({}) == Settings()
    assert not is_on({})


def test_every_variable_is_read() -> None:
    """Into a value of its own type."""
    found = read_settings(
        {
            "QUIESCE_METRICS": "yes",
            "QUIESCE_RUN": "r1",
            "QUIESCE_ROLE": "trainer",
            "QUIESCE_PORT": "0",
            "QUIESCE_HOST": "::1",
            "QUIESCE_RUN_DIR": "runs/r",
            "QUIESCE_SD_DIR": "targets",
            "QUIESCE_EXPORTERS": "recorder, otlp,",
            "QUIESCE_SPANS": "all",
            "QUIESCE_LINGER": "15",
            "QUIESCE_ALL_RANKS": "1",
            "QUIESCE_SERVED_BY": "7",
            "RANK": "3",
        }
    )
    assert found == Settings(
        enabled=True,
        run="r1",
        role="trainer",
        port=0,
        host="::1",
        run_dir=Path("runs/r"),
        sd_dir=Path("targets"),
        exporters=("recorder", "otlp"),
        spans_per_second=float("inf"),
        linger_seconds=15.0,
        rank=3,
        all_ranks=True,
        served_by=7,
    )


@pytest.mark.parametrize("by, serves", [("", True), ("own", True), ("1", False), ("nobody", True)])
def test_a_process_that_was_started_by_one_that_serves_does_not(by: str, *, serves: bool) -> None:
    """The one that serves may look again, and what is no number says nothing."""
    by = str(os.getpid()) if by == "own" else by
    assert read_settings({"QUIESCE_SERVED_BY": by, "QUIESCE_ALL_RANKS": "1"}).serves == serves


@pytest.mark.parametrize(
    "name, value",
    [
        ("QUIESCE_METRICS", "maybe"),
        ("QUIESCE_PORT", "70000"),
        ("QUIESCE_PORT", "-1"),
        ("QUIESCE_PORT", "²"),
        ("QUIESCE_LINGER", "nan"),
        ("QUIESCE_LINGER", "-1"),
        ("QUIESCE_SPANS", "many"),
        ("QUIESCE_SPANS", "-5"),
    ],
)
def test_a_value_that_cannot_be_used_is_refused_by_its_variable(name: str, value: str) -> None:
    """So that one knows what to change."""
    with pytest.raises(ConfigError, match=name):
        read_settings({name: value})


@pytest.mark.parametrize(
    "env, serves",
    [
        ({}, True),
        ({"RANK": "0"}, True),
        ({"RANK": "1"}, False),
        ({"SLURM_PROCID": "2"}, False),
        ({"RANK": "1", "QUIESCE_ALL_RANKS": "1"}, True),
        ({"RANK": "one"}, True),
    ],
)
def test_only_the_first_rank_serves(env: dict[str, str], *, serves: bool) -> None:
    """Unless every rank is asked for; a launcher's variable that cannot be read says nothing."""
    assert read_settings(env).serves == serves


def test_opentelemetrys_service_name_names_a_run_that_nobody_named() -> None:
    """And the run's own variable beats it."""
    assert read_settings({"OTEL_SERVICE_NAME": "svc"}).run == "svc"
    assert read_settings({"OTEL_SERVICE_NAME": "svc", "QUIESCE_RUN": "r1"}).run == "r1"


@pytest.mark.parametrize(
    "env, exporters",
    [
        ({"OTEL_TRACES_EXPORTER": "otlp"}, ("otlp",)),
        ({"OTEL_METRICS_EXPORTER": "console, otlp"}, ("otlp",)),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_METRICS_EXPORTER": "otlp"}, ("otlp",)),
        ({"OTEL_TRACES_EXPORTER": "otlp", "QUIESCE_EXPORTERS": "otlp,wandb"}, ("otlp", "wandb")),
        ({"OTEL_TRACES_EXPORTER": "otlp", "QUIESCE_EXPORTERS": "wandb"}, ("wandb", "otlp")),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_METRICS_EXPORTER": "none"}, ()),
        ({"OTEL_TRACES_EXPORTER": "zipkin", "OTEL_METRICS_EXPORTER": "prometheus"}, ()),
        ({"OTEL_TRACES_EXPORTER": "otlp", "OTEL_SDK_DISABLED": "true"}, ()),
        ({"OTEL_LOGS_EXPORTER": "otlp"}, ()),
    ],
)
def test_opentelemetrys_own_variables_name_the_exporter(
    env: dict[str, str], exporters: tuple[str, ...]
) -> None:
    """If they say OTLP for spans or for metrics; other exporters of theirs are the application's."""
    found = read_settings(env)

    assert found.exporters == exporters
    named = env.get("QUIESCE_EXPORTERS", "")
    assert found.implied == tuple(name for name in exporters if name not in named)
