"""Events of a run that has no log of ours: where they come from, what is in them, and what they leave alone."""

from __future__ import annotations

import logging
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import structlog

from quiesce.observers import Hub
from quiesce.telemetry import enable
from quiesce.telemetry.enable import MetricsHandle, enable_metrics
from quiesce.telemetry.event_log import EventLog
from quiesce.telemetry.logs import LogObserver, configure_run_log
from quiesce.telemetry.recording import Recording
from quiesce_exporters.prometheus import serve
from tests.unit.telemetry.telling import Kept, Telling


@pytest.fixture
def hub() -> Hub:
    """A strict hub of the test's own."""
    return Hub(strict=True)


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Kept:
    """A sink that can be asked for by the name ``kept``."""
    sink = Kept()
    monkeypatch.setattr(enable, "find_sink", lambda _: lambda _: sink)
    return sink


def switch_on(hub: Hub, **said: Any) -> MetricsHandle:  # noqa: ANN401 - whatever enable_metrics takes
    """Switch on with the sink that keeps."""
    return enable_metrics("r1", 0, hub=hub, serve=serve, exporters=["kept"], **said)


def save(hub: Hub, cut_id: str = "c1") -> None:
    """Report a save, as a checkpointer and its barrier do."""
    hub.fire("window_requested", cut_id, 0)
    hub.fire("window_opened", cut_id, 2_000_000, (), 0)
    hub.fire("window_closed", cut_id, 2_000_000, 300_000, "completed", 0)
    hub.fire("checkpoint_ended", cut_id, 7, "completed", "", {"ledger": 2}, 40, 5_000)


class TestWithoutALog:
    """``enable_metrics`` and ``quiesce exec`` alone."""

    def test_what_the_hub_reports_is_recorded_as_events(self, hub: Hub, tmp_path: Path) -> None:
        """A run folder is all that it takes; there is no log file."""
        with enable_metrics("r1", 0, hub=hub, serve=serve, run_dir=tmp_path):
            hub.fire("run_state_changed", "running")
            save(hub)

        told = [event.fields for event in Recording.open(tmp_path).events()]
        assert [event["event"] for event in told] == ["metrics.serving", "run.state", "checkpoint.published"]
        assert told[-1]["phases"] == {"drain": 0.002, "exclusive": 0.0003}
        assert {event["run"] for event in told} == {"r1"}
        assert not (tmp_path / "log.jsonl").exists()

    def test_an_event_of_a_save_names_its_span(self, hub: Hub, kept: Kept) -> None:
        """By the ids of the cut's outermost span."""
        with switch_on(hub):
            save(hub)

        (line,) = [line for line in kept.lines if line["event"] == "checkpoint.published"]
        (window,) = kept.named("quiesce.window")
        assert line["trace_id"] == f"{window.trace_id:032x}"

    def test_events_of_a_log_that_is_connected_later_are_told_once(
        self, hub: Hub, kept: Kept, tmp_path: Path
    ) -> None:
        """Whether by the handle, or by its telemetry: the last log is the one that counts."""
        for by_the_handle in (True, False):
            kept.lines.clear()
            log = configure_run_log(tmp_path, run="r1")
            observer = LogObserver(log)
            hub.subscribe(observer)
            with switch_on(hub) as handle:
                connect = handle.connect if by_the_handle else handle.telemetry.connect
                connect(log)
                hub.fire("run_state_changed", "running")
            hub.unsubscribe(observer)
            log.close()

            assert [line["event"] for line in kept.lines] == ["metrics.serving", "run.state"]

    def test_nothing_listens_once_it_is_closed(self, hub: Hub, kept: Kept) -> None:
        """Neither to the hub nor to Python's loggers; without an exporter nothing listens at all."""
        before = logging.getLogger("quiesce").handlers[:]
        switch_on(hub).close()
        with enable_metrics("r1", 0, hub=hub, serve=serve):
            assert logging.getLogger("quiesce").handlers == before
            assert not hub.run_state_changed or all(
                not isinstance(method.__self__, LogObserver)  # type: ignore[attr-defined] # a bound method
                for method in hub.run_state_changed
            )

        assert not hub.run_state_changed
        assert logging.getLogger("quiesce").handlers == before
        assert len(kept.lines) == 1

    def test_structlog_stays_as_the_application_configured_it(self, hub: Hub, kept: Kept) -> None:
        """Its own loggers see none of ours."""
        seen: list[Any] = []

        def capture(logger: object, method: str, event: Any) -> str:  # noqa: ANN401 - structlog's own alias
            seen.append(event)
            return ""

        structlog.configure(processors=[capture], logger_factory=structlog.ReturnLoggerFactory())
        before = structlog.get_config()
        try:
            with switch_on(hub):
                hub.fire("run_state_changed", "running")
            assert structlog.get_config() == before
        finally:
            structlog.reset_defaults()
        assert seen == []
        assert len(kept.lines) == 2


class TestMessages:
    """What Quiesce's own Python loggers say."""

    def test_it_is_an_event(self, hub: Hub, kept: Kept) -> None:
        """From warnings on, unless the application lets more through."""
        with switch_on(hub):
            logging.getLogger("quiesce.observers").warning("hook %s raised", "x")
            logging.getLogger("somebody.else").warning("not ours")

        said = [line for line in kept.lines if line["event"] == "log.record"]
        assert [(line["level"], line["message"]) for line in said] == [("warning", "hook x raised")]

    def test_who_would_have_seen_it_still_does_and_once(self, tmp_path: Path) -> None:
        """One line on standard error where nobody has configured logging, and else whatever was configured."""
        code = """
            import logging
            from quiesce import Hub, enable_metrics
            say = logging.getLogger("quiesce.observers").warning
            with enable_metrics("a", 0, hub=Hub(), run_dir="."), enable_metrics("b", 0, hub=Hub(), run_dir="."):
                say("first")
                logging.getLogger("quiesce.observers").info("nobody asked")
                logging.basicConfig(format="seen: %(message)s")
                say("second")
            say("third")
        """
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(code)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=50,
            check=True,
        )
        assert done.stderr.splitlines() == ["first", "seen: second", "seen: third"]


class TestIdentifiers:
    """Whose ids an event carries."""

    KNOWN: ClassVar = {"c1": (1, 2), "g1": (3, 4), "restore": (5, 6), "step 7": (7, 8)}

    @pytest.fixture
    def told(self, hub: Hub) -> Iterator[list[Any]]:
        """Events at level debug, with spans of a cut, a group, a restore and a step that are known."""
        log = EventLog(run="r1", role="controller", level=logging.DEBUG)
        events: list[Any] = []
        log.also = events.append
        log.identify = self.KNOWN.get
        hub.subscribe(LogObserver(log))
        yield events
        log.close()

    @pytest.mark.parametrize(
        "hook, arguments, span",
        [
            ("restore_ended", ("completed", "", {}, {}), "restore"),
            ("restore_ended", ("refused", "corrupt", {}, {}), "restore"),
            ("train_step_ended", (7, 7, 1, 4, "completed", {}), "step 7"),
            ("train_step_ended", (8, 8, 1, 4, "completed", {}), ""),
            ("stalled", ("a step", "g1", 61.0), "g1"),
            ("run_state_changed", ("running",), ""),
        ],
    )
    def test_an_event_carries_those_of_what_it_is_about(
        self, hub: Hub, told: list[Any], hook: str, arguments: tuple[Any, ...], span: str
    ) -> None:
        """If they are known."""
        hub.fire(hook, *arguments)

        (event,) = told
        trace_id, span_id = self.KNOWN.get(span, (0, 0))
        assert event.get("trace_id", f"{0:032x}") == f"{trace_id:032x}"
        assert event.get("span_id", f"{0:016x}") == f"{span_id:016x}"
        assert "_about" not in event

    @pytest.mark.parametrize(
        "cut_id, groups, span",
        [("c1", ("g1",), "c1"), (None, ("g0", "g1"), "g1"), (None, ("g0",), ""), ("c9", (), "")],
    )
    def test_a_violation_carries_those_of_its_save_or_else_of_a_group(
        self, hub: Hub, told: list[Any], cut_id: str | None, groups: tuple[str, ...], span: str
    ) -> None:
        """Of the first of which some are known."""
        hub.fire(
            "invariant_violated", SimpleNamespace(invariant="i", message="m", groups=groups, cut_id=cut_id)
        )

        (event,) = told
        assert event.get("trace_id", f"{0:032x}") == f"{self.KNOWN.get(span, (0, 0))[0]:032x}"

    def test_the_ids_are_those_of_the_spans(self) -> None:
        """Of a restore, a step and a group, over a real converter."""
        scene = Telling()
        log = EventLog(run="r1", role="controller", level=logging.DEBUG)
        scene.run.connect(log)
        scene.hub.subscribe(LogObserver(log))
        fire = scene.hub.fire
        fire("restore_started")
        fire("restore_ended", "completed", "", {"rows": 5}, {"buffer": 1})
        fire("owner_moved", "g1", "read", "ledger", "")
        fire("train_step_started", 7, 7)
        scene.run.converter.convert()
        fire("invariant_violated", SimpleNamespace(invariant="i", message="m", groups=("g1",), cut_id=None))
        fire("train_step_ended", 7, 7, 5, 1, "completed", {})
        kept = scene.told()
        scene.over()
        log.close()

        spans = ("quiesce.restore", "quiesce.group", "quiesce.train.step")
        assert [line["event"] for line in kept.lines] == [
            "restore.completed",
            "invariant.violated",
            "train.step",
        ]
        for name, line in zip(spans, kept.lines, strict=True):
            (span,) = kept.named(name)
            assert (line["trace_id"], line["span_id"]) == (f"{span.trace_id:032x}", f"{span.span_id:016x}")
