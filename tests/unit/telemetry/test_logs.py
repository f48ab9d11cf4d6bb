"""The run's log: JSON lines, the readable form, and what it leaves alone."""

import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import structlog

from quiesce.observers import HOOKS, Hub
from quiesce.telemetry import names
from quiesce.telemetry.enable import enable_metrics
from quiesce.telemetry.logs import LOG_FILE, LogObserver, RunLog, configure_run_log
from quiesce_exporters.prometheus import serve


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        """Say so."""
        return True


@pytest.fixture
def log(tmp_path: Path) -> Iterator[RunLog]:
    """A run's log at level debug, without a console."""
    opened = configure_run_log(tmp_path, "debug", run="r1")
    yield opened
    opened.close()


def lines(log: RunLog) -> list[dict[str, Any]]:
    """What was written, parsed strictly."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in log.path.read_text().splitlines()]


def violation(**fields: object) -> SimpleNamespace:
    """A violation as the invariants report it."""
    return SimpleNamespace(
        invariant="single_owner",
        severity="critical",
        message="two owners",
        groups=("g1",),
        owners=("ledger", "buffer"),
        cut_id="c1",
        **{"evidence": MappingProxyType({"both": ("ledger", "buffer")}), **fields},
    )


def fire_everything(hub: Hub) -> None:
    """One of each hook that the log knows, and a slot."""
    hub.fire("run_state_changed", "running")
    hub.fire("slot_closed", "retry", 0, 1_000, "completed", 0)
    hub.fire("train_step_ended", 7, 7, 1_000, 4, "completed", {"reward": 0.5})
    hub.fire("window_requested", "c1", 0)
    hub.fire("window_opened", "c1", 2_000_000, (), 0)
    hub.fire("window_closed", "c1", 2_000_000, 300_000, "completed", 0)
    hub.fire("phase_ended", "c1", "write", 5_000_000_000, "completed")
    hub.fire("trainer_stalled", "window", 2_300_000)
    hub.fire("checkpoint_ended", "c1", 7, "completed", "", {"ledger": 2}, 40, 5_000)
    hub.fire("checkpoint_ended", "", 7, "skipped", "nothing_changed", {}, 0, 0)
    hub.fire("checkpoint_ended", "c2", 8, "failed", "disk", {}, 0, 0)
    hub.fire("window_requested", "c3", 0)
    hub.fire("window_abandoned", "c3", 60_000_000_000, "failed", (("retry", "pump", 0, 60_000_000_000),), 0)
    hub.fire("restore_ended", "completed", "", {"rows": 1_000_000}, {"buffer": 3})
    hub.fire("restore_ended", "refused", "corrupt", {}, {})
    hub.fire("sampler_fell_back", "mine:Sampler")
    hub.fire("invariant_violated", violation())
    hub.fire("stalled", "a step", "e000-p0000003", 61.0)


class TestLines:
    """The JSON form."""

    def test_a_line_carries_what_every_line_carries(self, log: RunLog) -> None:
        """Time in UTC, level, event, run, role, and the fields of the call and of the logger."""
        log(worker=3).info("run.state", state="running")

        (line,) = lines(log)
        assert line.pop("timestamp").endswith("Z")
        assert line == {
            "level": "info",
            "event": "run.state",
            "run": "r1",
            "role": "controller",
            "worker": 3,
            "state": "running",
        }

    def test_step_and_cut_are_on_every_line_once_they_are_known(self, log: RunLog) -> None:
        """Loggers that were made before see them too; a call's own field wins; None takes one away."""
        logger = log()
        log.now(step=3, cut_id="c1")
        logger.info("a")
        logger.info("b", step=9)
        log.now(cut_id=None)
        logger.info("c")

        assert [(line.get("step"), line.get("cut_id")) for line in lines(log)] == [
            (3, "c1"),
            (9, "c1"),
            (3, None),
        ]

    def test_lines_below_the_level_are_not_written(self, tmp_path: Path) -> None:
        """Debug lines cost next to nothing in a run that does not want them."""
        log = configure_run_log(tmp_path, "info", run="r1")

        log().debug("a")
        log().info("b")
        log.close()

        assert [line["event"] for line in lines(log)] == ["b"]

    def test_what_json_lacks_becomes_text(self, log: RunLog) -> None:
        """A loss of NaN is what somebody will look for, and odd objects are shown as they are."""
        log().info(
            "a", loss=float("nan"), nested={"x": [float("inf"), 1]}, odd={(1, 2): object}, path=Path("p")
        )

        (line,) = lines(log)
        assert (line["loss"], line["nested"]) == ("nan", {"x": ["inf", 1]})
        assert line["odd"] == {"(1, 2)": "<class 'object'>"}
        assert "PosixPath('p')" in line["path"]

    def test_an_exception_is_written_with_its_traceback(self, log: RunLog) -> None:
        """As text, in one field of the one line."""
        try:
            _ = 1 / 0
        except ZeroDivisionError:
            log().exception("a")

        (line,) = lines(log)
        assert line["level"] == "error"
        assert line["exception"].startswith("Traceback")
        assert line["exception"].endswith("ZeroDivisionError: division by zero")

    def test_a_resumed_run_appends(self, tmp_path: Path) -> None:
        """What an earlier process of the run wrote stays."""
        for run in ("first", "second"):
            log = configure_run_log(tmp_path, run=run)
            log().info("a")
            log.close()

        assert [line["run"] for line in lines(log)] == ["first", "second"]
        assert log.path == tmp_path / LOG_FILE

    def test_a_level_that_is_none_is_refused(self, tmp_path: Path) -> None:
        """And names those that are."""
        with pytest.raises(ValueError, match="'loud' is not a log level; there are debug, info"):
            configure_run_log(tmp_path, "loud", run="r1")


class TestTrouble:
    """Logging never stops a run."""

    def test_a_line_that_cannot_be_written_is_counted_and_said_once(self, tmp_path: Path) -> None:
        """A full disk costs lines, not the run."""
        console = io.StringIO()
        log = RunLog(
            Path("/dev/full"), run="r1", role="controller", level=10, console=console, console_level=50
        )

        log().info("a")
        log().info("b")
        log.close()

        assert log.dropped == 2
        assert console.getvalue().count("cannot be written") == 1

    def test_lines_after_the_end_are_dropped_and_counted(self, log: RunLog) -> None:
        """A late observer finds a closed log, not an error."""
        logger = log()
        log.close()
        log.close()

        logger.info("a")

        assert log.dropped == 1
        assert lines(log) == []

    def test_a_console_that_went_away_is_no_trouble(self, tmp_path: Path) -> None:
        """The line is in the file all the same."""
        console = io.StringIO()
        log = configure_run_log(tmp_path, run="r1", console=console, console_level="info")
        console.close()

        log().info("a")
        log.close()

        assert len(lines(log)) == 1


class TestConsole:
    """The readable form."""

    def test_a_stream_that_is_no_terminal_gets_no_escape_codes(self, tmp_path: Path) -> None:
        """One readable line: time, level, event, fields; not the run's name on every line."""
        console = io.StringIO()
        log = configure_run_log(tmp_path, run="r1", console=console, console_level="info")

        log().warning("run.stalled", what="a step", age_seconds=61.0)
        log.close()

        shown = console.getvalue()
        assert "\x1b" not in shown
        assert "r1" not in shown
        assert shown.count("\n") == 1
        assert "warning" in shown
        assert "run.stalled" in shown
        assert "age_seconds=61.0" in shown

    def test_a_terminal_gets_colours(self, tmp_path: Path) -> None:
        """Where somebody can see them."""
        console = Terminal()
        log = configure_run_log(tmp_path, run="r1", console=console, console_level="info")

        log().warning("run.stalled")
        log.close()

        assert "\x1b[" in console.getvalue()

    def test_the_console_has_a_level_of_its_own(self, tmp_path: Path) -> None:
        """A progress display is not to be torn up by every line."""
        console = io.StringIO()
        log = configure_run_log(tmp_path, run="r1", console=console)

        log().info("a")
        log().warning("b")
        log.close()

        assert len(lines(log)) == 2
        assert console.getvalue().count("\n") == 1


class TestOthers:
    """What belongs to an application stays as it is."""

    def test_the_global_configuration_of_structlog_is_neither_used_nor_changed(self, tmp_path: Path) -> None:
        """An application's own loggers go on as it configured them, and see none of our lines."""
        captured: list[Any] = []

        def capture(logger: object, method: str, event: Any) -> str:  # noqa: ANN401 - structlog's own alias
            captured.append(event)
            return str(event)

        structlog.configure(
            processors=[capture],
            logger_factory=structlog.ReturnLoggerFactory(),
        )
        before = structlog.get_config()
        try:
            log = configure_run_log(tmp_path, run="r1")
            log().info("ours")
            structlog.get_logger().info("theirs")
            log.close()

            assert structlog.get_config() == before
            assert [event["event"] for event in captured] == ["theirs"]
            assert [line["event"] for line in lines(log)] == ["ours"]
        finally:
            structlog.reset_defaults()

    def test_messages_of_our_python_loggers_are_in_the_log_while_it_is_open(
        self, log: RunLog, caplog: pytest.LogCaptureFixture
    ) -> None:
        """A hook that raised is told where people look; an application's handlers get it as before."""
        logging.getLogger("quiesce.observers").warning("hook %s raised", "x")
        logging.getLogger("somebody.else").warning("not ours")
        log.close()
        logging.getLogger("quiesce.observers").warning("after")

        (line,) = lines(log)
        assert (line["event"], line["level"]) == ("log.record", "warning")
        assert (line["logger"], line["message"]) == ("quiesce.observers", "hook x raised")
        assert "hook x raised" in caplog.text
        assert logging.getLogger("quiesce").handlers == []


class TestObserver:
    """Which hooks become lines."""

    def test_every_event_of_the_catalogue_is_written_with_its_fields_and_no_other_is(
        self, log: RunLog
    ) -> None:
        """Both ways: names, levels and fields."""
        hub = Hub(strict=True)
        hub.subscribe(LogObserver(log))

        fire_everything(hub)
        with enable_metrics("r1", 0, hub=hub, serve=serve, log=log):
            pass
        logging.getLogger("quiesce.observers").error("a message")

        written = lines(log)
        assert {line["event"] for line in written} == set(names.LOG_EVENTS)
        always = {"timestamp", "level", "event", "run", "role", "step", "cut_id"}
        for line in written:
            event = names.log_event(line["event"])
            assert set(line) - always <= set(event.fields), line
            if event.name != "log.record":
                assert line["level"] == event.level

    def test_its_methods_are_hooks(self) -> None:
        """A method that is no hook would never be called."""
        assert {name for name in vars(LogObserver) if not name.startswith("_")} <= set(HOOKS)

    def test_slots_have_no_lines(self, log: RunLog) -> None:
        """They come by the thousand."""
        hub = Hub(strict=True)
        hub.subscribe(LogObserver(log))

        hub.fire("slot_opened", "retry", 0, 0)
        hub.fire("slot_closed", "retry", 0, 1_000, "failed", 0)

        assert lines(log) == []
        assert not hub.slot_closed

    def test_a_published_checkpoint_is_one_line_with_its_phases(self, log: RunLog) -> None:
        """Drain and exclusive are the barrier's; write is the checkpointer's; the cut is named."""
        hub = Hub(strict=True)
        hub.subscribe(LogObserver(log))

        fire_everything(hub)

        (line,) = [line for line in lines(log) if line["event"] == "checkpoint.published"]
        assert line["cut_id"] == "c1"
        assert line["step"] == 7
        assert line["phases"] == {"drain": 0.002, "exclusive": 0.0003, "write": 5.0}
        assert (line["drain_seconds"], line["exclusive_seconds"]) == (0.002, 0.0003)
        assert (line["rows"], line["bytes"], line["groups"]) == (40, 5_000, {"ledger": 2})

    def test_who_held_a_checkpoint_up_is_named(self, log: RunLog) -> None:
        """Kind, task and time of each slot that it waited for."""
        hub = Hub(strict=True)
        hub.subscribe(LogObserver(log))

        fire_everything(hub)

        (line,) = [line for line in lines(log) if line["event"] == "window.given_up"]
        assert line["delayed_by"] == [{"kind": "retry", "task": "pump", "seconds": 60.0}]
        assert line["cut_id"] == "c3"

    def test_a_violation_brings_its_evidence(self, log: RunLog) -> None:
        """Whatever mapping the evidence is."""
        hub = Hub(strict=True)
        hub.subscribe(LogObserver(log))

        hub.fire("invariant_violated", violation())

        (line,) = lines(log)
        assert (line["level"], line["invariant"], line["cut_id"]) == ("critical", "single_owner", "c1")
        assert line["groups"] == ["g1"]
        assert "both" in line["evidence"]

    def test_cuts_that_nobody_saves_are_forgotten(self, log: RunLog) -> None:
        """A program that uses the barrier alone does not fill memory."""
        observer = LogObserver(log)

        for index in range(1_000):
            observer.window_opened(f"w{index}", 0, (), 0)

        assert len(observer._phases) < 20  # noqa: SLF001 - the bound is what is claimed
