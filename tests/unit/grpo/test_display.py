"""What a person sees: the lines without a terminal, the drawing on one, the summary at the end."""

import io
import re
from collections.abc import Mapping

import pytest
from rich.console import Console, RenderableType

from quiesce import Hub, RunSummary
from quiesce.auditor.record import Records
from quiesce.invariants import Violation
from quiesce_grpo.display import TrainDisplay

GROUPS = {"ledger": 16, "spares": 0, "buffer": 32, "training": 0}


class Sampler:
    """A sampler with a cursor."""

    dispatch_cursor = 41


class Version:
    """A trainer version."""

    value = 40


class Ledger:
    """A ledger with groups."""

    def __len__(self) -> int:
        return 16


def plain(hub: Hub, max_steps: int | None = 200) -> tuple[TrainDisplay, io.StringIO]:
    """A display without a terminal."""
    out = io.StringIO()
    return TrainDisplay(hub, max_steps=max_steps, console=Console(file=out, width=80)), out


def step(hub: Hub, number: int, metrics: Mapping[str, float], outcome: str = "completed") -> None:
    """Report a step."""
    hub.fire("train_step_ended", number, number - 1, 1_000_000, 16, outcome, metrics)


def save(hub: Hub, number: int, outcome: str = "completed", reason: str = "") -> None:
    """Report a save and its phases."""
    hub.fire("window_closed", "cut", 50_000, 130_000, "completed", 0)
    for phase, ns in (("drain", 99), ("exclusive", 99), ("stage", 3_000_000), ("write", 60_000_000)):
        hub.fire("phase_ended", "cut", phase, ns, "completed")
    hub.fire("checkpoint_ended", "cut", number, outcome, reason, GROUPS, 8, 1000)


@pytest.fixture
def hub() -> Hub:
    """A hub that lets no failing hook pass."""
    return Hub(strict=True)


def test_a_progress_line_says_what_an_operator_asks_and_fits(hub: Hub) -> None:
    """Step, reward, staleness, cursor and groups by owner, in one line of at most 80 columns."""
    kept = (Sampler(), Version(), Ledger())
    for role, source in zip(("sampler", "trainer_version", "ledger"), kept, strict=True):
        hub.attach(role, source)
    shown, out = plain(hub)

    with shown:
        step(hub, 40, {"reward": 0.25, "staleness": 1.0})

    assert out.getvalue() == "step 40/200  reward 0.250  staleness 1.0  cursor 41  ledger 16\n"


def test_progress_lines_are_rare_and_saves_are_never_left_out(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fast run does not flood a log file; each save has its line with the window's durations."""
    now = [1000.0]
    monkeypatch.setattr("quiesce_grpo.display.time.monotonic", lambda: now[0])
    shown, out = plain(hub, None)

    with shown:
        for number in range(1, 11):
            step(hub, number, {"reward": 0.5})
            now[0] += 1.0
        save(hub, 10)
        save(hub, 10, "skipped", "nothing_changed")
        save(hub, 11, "failed", "disk")

    lines = out.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines if line.startswith("step") and "reward" in line] == [
        "step 1",
        "step 6",
    ]
    assert lines[-2:] == [
        "saved step 10: drain 0.050 ms, exclusive 0.130 ms, written in 60 ms",
        "step 11 not saved: failed (disk)",
    ]


def test_a_stop_is_said_once_and_stays_said(hub: Hub) -> None:
    """What is prepared meanwhile is still named, and the display does not fall back to another state."""
    shown, out = plain(hub)

    with shown:
        shown.preparing("warming up")
        shown.stopping("SIGTERM")
        hub.fire("run_state_changed", "running")

    assert out.getvalue().splitlines() == [
        "warming up",
        "SIGTERM: saving once, then stopping; again gives up at once",
    ]


def test_a_resume_says_what_came_back(hub: Hub) -> None:
    """The restored groups by owner; a refused restore is the error's business."""
    shown, out = plain(hub)

    with shown:
        hub.fire("restore_ended", "refused", "corrupt", {}, {})
        hub.fire("restore_ended", "completed", "", {"rows": 20_000_000}, GROUPS)

    assert out.getvalue() == "restored: 16 ledger, 0 spares, 32 buffer, 0 training, in 0.02 s\n"


def test_a_summary_compares_the_first_steps_with_the_last(hub: Hub) -> None:
    """Ten steps at either end, the prompts' whereabouts, the saves, and what they cost whom."""
    shown, out = plain(hub)
    with shown:
        for number in range(1, 41):
            step(hub, number, {"reward": number / 40})
        save(hub, 40)
    summary = RunSummary(
        outcome="stopped",
        step=40,
        trainer_version=40,
        read=100,
        trained=80,
        dropped={"failed": 4},
        last_save=None,
        save_failed=False,
    )
    console = Console(file=io.StringIO(), width=80, record=True)

    console.print(shown.summary(summary))

    text = console.export_text()
    assert "100 read: 80 trained, 4 dropped, 16 owned" in text
    assert "0.138 in the first 10 steps since the start, 0.887 in the last 10" in text
    assert re.search(r"exclusive +0\.130 +0\.130 +every slot, the trainer", text)
    assert re.search(r"saves +1 completed", text)
    assert max(len(line) for line in text.splitlines()) <= 80
    assert out.getvalue()


def test_a_run_that_did_nothing_has_a_summary_too(hub: Hub) -> None:
    """No step and no save: nothing is divided by nothing."""
    shown, _ = plain(hub)
    summary = RunSummary(
        outcome="stopped",
        step=0,
        trainer_version=0,
        read=0,
        trained=0,
        dropped={},
        last_save=None,
        save_failed=False,
    )
    console = Console(file=io.StringIO(), width=80, record=True)

    console.print(shown.summary(summary))

    text = console.export_text()
    assert "mean reward" not in text
    assert "reused" not in text


def test_a_resumed_run_says_how_much_it_did_not_have_to_generate_again(hub: Hub) -> None:
    """Tokens and groups that calls went on from, also if there were none; while it runs, and at its end."""
    summary = RunSummary(
        outcome="stopped",
        step=0,
        trainer_version=0,
        read=0,
        trained=0,
        dropped={},
        last_save=None,
        save_failed=False,
    )
    for reused, told in (
        ({}, "0 staged tokens of 0 groups"),
        ({"a": 7, "b": 5}, "12 staged tokens of 2 groups"),
    ):
        shown, _ = plain(hub)
        console = Console(file=io.StringIO(), width=80, record=True)
        with shown:
            hub.fire("restore_ended", "completed", "", {}, GROUPS)
            for group, tokens in reused.items():
                hub.fire("tokens_reused", group, tokens)
            console.print(shown._draw())  # noqa: SLF001 - what a terminal shows
        console.print(shown.summary(summary))

        assert len(re.findall(rf"reused +{told}", console.export_text())) == 2


def test_a_terminal_gets_a_drawing_and_the_cursor_back(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is printed line by line; when it ends, or the process is about to vanish, the cursor is there."""
    monkeypatch.setenv("TERM", "xterm")  # a terminal that can move its cursor, wherever the test runs
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80, height=30, color_system=None)
    shown = TrainDisplay(hub, max_steps=200, console=console)

    with shown:
        hub.fire("run_state_changed", "running")
        step(hub, 3, {"reward": 0.5, "staleness": 1.0})
        save(hub, 2)
        during = out.getvalue()
        shown.abandon()
        abandoned = out.getvalue()

    assert "\x1b[?25l" in during
    assert "saved step" not in out.getvalue()
    assert abandoned.endswith("\x1b[?25h")
    assert out.getvalue().rfind("\x1b[?25h") > out.getvalue().rfind("\x1b[?25l")
    assert "3/200" in out.getvalue()
    assert "exclusive 0.130 ms" in out.getvalue()
    assert max(len(line) for line in re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue()).splitlines()) <= 80


def text_of(drawn: RenderableType) -> str:
    """Return what is drawn, as text of 80 columns."""
    console = Console(file=io.StringIO(), width=80, record=True)
    console.print(drawn)
    return console.export_text()


def ended() -> RunSummary:
    """Return the summary of a run that trained nothing."""
    return RunSummary("stopped", 0, 0, 0, 0, {}, None, save_failed=False)


class Auditor:
    """An auditor with records."""

    def __init__(self, *invariants: str) -> None:
        self.records = Records(2)
        for number, invariant in enumerate(invariants):
            found = Violation(invariant, "critical", "broken", (f"e000-p{number:07d}",))
            self.records.add(found, origin="live", unix_time=1.0, events=[])


def test_open_violations_are_in_the_line_the_drawing_and_the_summary(hub: Hub) -> None:
    """How many and of what; those of earlier incarnations too, since they are open until somebody closes them."""
    auditor = Auditor("conservation", "conservation", "rows_present")
    hub.attach("auditor", auditor)
    shown, out = plain(hub)

    with shown:
        hub.fire("run_state_changed", "running")
        step(hub, 240, {"reward": 0.25, "staleness": 1.0})
    (line,) = out.getvalue().splitlines()
    drawn = text_of(shown._draw())  # noqa: SLF001 - what a terminal would show
    summary = text_of(shown.summary(ended()))
    for record in auditor.records.all():
        auditor.records.close(record.key)

    assert line.endswith("3 violations open")
    assert len(line) <= 80
    assert "3 open: conservation 2x, rows_present" in drawn
    assert "violations   3 open: conservation 2x, rows_present" in summary
    assert "violations   none" in text_of(shown.summary(ended()))
    assert "violations" not in text_of(shown._draw())  # noqa: SLF001 - as above


def test_without_an_auditor_nothing_is_said_of_violations(hub: Hub) -> None:
    """None would be more than is known."""
    shown, _ = plain(hub)

    with shown:
        hub.fire("run_state_changed", "running")

    assert "violations" not in text_of(shown.summary(ended()))
