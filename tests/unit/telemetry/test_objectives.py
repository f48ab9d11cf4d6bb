"""Objectives of the window: what a user says is what is counted by, and what cannot be is refused by its key."""

from typing import Any

import pytest

from quiesce.errors import ConfigError
from quiesce.observers import Hub
from quiesce.telemetry import names
from quiesce.telemetry.enable import enable_metrics
from quiesce.telemetry.metrics import MetricsObserver
from quiesce.telemetry.objectives import window_objectives
from quiesce.telemetry.settings import read_settings
from quiesce_grpo.run_config import dump_config, load_config

OVER = names.WINDOW_OVER_OBJECTIVE.name


class Nowhere:
    """An endpoint that nobody asks."""

    port = 1

    def close(self) -> None:
        """Nothing is open."""


def over(observer: MetricsObserver) -> dict[str, float]:
    """Return how many windows were over their objective, by phase."""
    values: Any = observer.families[OVER]
    return {phase: values.values[phase,] for phase in names.OBJECTIVES}


def window(hub: Hub, drain_seconds: float, exclusive_seconds: float) -> None:
    """Report a window."""
    drain, exclusive = round(drain_seconds * 1e9), round(exclusive_seconds * 1e9)
    hub.fire("window_requested", "w", 0)
    hub.fire("window_opened", "w", drain, (), drain)
    hub.fire("window_closed", "w", drain, exclusive, "completed", drain + exclusive)


@pytest.mark.parametrize(
    "said, counted",
    [
        (None, {"drain": 1, "exclusive": 1}),
        ({"drain": 3}, {"drain": 0, "exclusive": 1}),
        ({"drain": 3, "exclusive": 0.02}, {"drain": 0, "exclusive": 0}),
        ({"drain": 0.5, "exclusive": 0.02}, {"drain": 1, "exclusive": 0}),
    ],
)
def test_windows_are_counted_by_what_was_said(
    said: dict[str, float] | None, counted: dict[str, float]
) -> None:
    """A window of 2 s and 10 ms is over the usual objectives, and under wider ones; what is left out is the usual."""
    hub = Hub()
    with enable_metrics("r", hub=hub, serve=lambda *_: Nowhere(), exporters=(), objectives=said) as handle:
        window(hub, 2.0, 0.01)
        handle.telemetry.observer.catch_up()

        assert over(handle.observer) == counted


@pytest.mark.parametrize(
    "said, key",
    [
        ({"write": 1.0}, "objectives.write"),
        ({"drain": 0.0}, "objectives.drain"),
        ({"drain": float("nan")}, "objectives.drain"),
        ({"drain": True}, "objectives.drain"),
        ({"drain": "1s"}, "objectives.drain"),
        (["drain"], "objectives"),
    ],
)
def test_what_no_phase_can_have_is_refused(said: Any, key: str) -> None:  # noqa: ANN401 - what a user may give
    """The key is the one under which it was given, and nothing was started."""
    with pytest.raises(ConfigError) as refused:
        window_objectives(said)
    assert refused.value.key == key

    def serve(*_: object) -> Nowhere:
        raise AssertionError("nothing may be started")

    with pytest.raises(ConfigError) as refused:
        enable_metrics("r", hub=Hub(), serve=serve, exporters=(), objectives=said)
    assert refused.value.key == key


def test_the_environment_says_objectives_where_code_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that is switched on without a line of code can have its own, and code beats it."""
    monkeypatch.setenv("QUIESCE_OBJECTIVES", "drain=3, exclusive=0.02")
    for said, counted in ((None, {"drain": 0, "exclusive": 0}), ({"drain": 1}, {"drain": 1, "exclusive": 1})):
        hub = Hub()
        with enable_metrics(
            "r", hub=hub, serve=lambda *_: Nowhere(), exporters=(), objectives=said
        ) as handle:
            window(hub, 2.0, 0.01)
            handle.telemetry.observer.catch_up()
            assert over(handle.observer) == counted


@pytest.mark.parametrize("text", ["drain", "drain=x", "drain=0", "drian=2", "drain=2;exclusive=1"])
def test_objectives_of_the_environment_are_refused_by_the_variable(text: str) -> None:
    """What cannot be read is not left out in silence."""
    with pytest.raises(ConfigError, match="QUIESCE_OBJECTIVES"):
        read_settings({"QUIESCE_OBJECTIVES": text})


def test_a_run_says_its_objectives_in_its_configuration() -> None:
    """One phase at a time, under ``metrics``; the file that a run keeps reads back the same."""
    config = load_config(
        None, ["metrics.objectives.drain=3", "alerts.phase_limits.write=3600", "alerts.breaches=4"]
    )
    assert config.metrics.objectives == {**names.OBJECTIVES, "drain": 3}
    assert config.alerts == {"phase_limits": {"write": 3600}, "breaches": 4}
    assert "objectives:\n    drain: 3.0" in dump_config(config)

    with pytest.raises(ConfigError) as refused:
        load_config(None, ["metrics.objectives.drian=3"])
    assert refused.value.key == "metrics.objectives.drian"
