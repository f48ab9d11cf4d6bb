"""The page about a run: of a real run with a restart, of a whole day, and in a real browser."""

import asyncio
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from quiesce.observers import Hub
from quiesce.report import write_report
from quiesce.report.collect import collect
from quiesce.telemetry.enable import enable_metrics
from quiesce.telemetry.logs import configure_run_log
from quiesce.telemetry.recording import Recording
from tests import run_rig
from tests.integration.browser import look_at
from tests.run_rig import Run
from tests.unit.report.synthetic import write_recording


async def record(
    run: Run, monkeypatch: pytest.MonkeyPatch, *, resume: bool, stop_after: float | None
) -> None:
    """Run one incarnation with everything on, the recorder among it."""
    hub = Hub(strict=True)

    def own_hub(*observers: object) -> Hub:
        for observer in observers:
            hub.subscribe(observer)
        return hub

    monkeypatch.setattr(run_rig, "strict_hub", own_hub)
    built = run.start(resume=resume, save_every_steps=2)
    log = configure_run_log(run.path, run="real")
    with enable_metrics("real", 0, hub=hub, run_dir=run.path, log=log):
        if stop_after is not None:
            asyncio.get_running_loop().call_later(stop_after, built.request_stop)
        await built.run(resume=resume)
    run.folder.close()
    log.close()


@pytest.fixture(scope="module")
def day(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page about a day of training."""
    folder = tmp_path_factory.mktemp("day")
    write_recording(folder, period=60)
    return write_report(folder)


async def test_a_real_run_is_on_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves with all their phases, groups, versions, invariants and the restore, over both starts of the run."""

    async def take_a_moment(request: object) -> object:
        await asyncio.sleep(0.02)
        return run_rig.result_of(request)  # type: ignore[arg-type] # the rig's own request

    run = Run(tmp_path / "run", prompts=60, generate=take_a_moment)  # type: ignore[arg-type] # as above
    await record(run, monkeypatch, resume=False, stop_after=0.25)
    await record(run, monkeypatch, resume=True, stop_after=None)

    data = collect(Recording.open(run.path))
    completed = [save for save in data.saves if save.outcome == "completed"]
    assert data.starts == [1, 2]
    assert data.outcomes["completed"] == len(completed) > 3
    for save in completed:
        assert {"fence", "drain", "exclusive", "stage", "write", "publish"} <= set(save.phases)
        assert all(seconds >= 0 for seconds in save.phases.values())
    assert data.latest["quiesce_trainer_version"][""] == 15
    assert data.latest["quiesce_train_reward"][""] == 0.5
    assert data.counters["quiesce_invariant_checks_total"]["single_owner"].total > 0
    assert [restore.outcome for restore in data.restores] == ["completed"]
    assert sum(grown.total for grown in data.counters["quiesce_mutation_sections_total"].values()) > 60
    page = write_report(run.path)
    assert "15" in re.sub(r"<script.*?</script>", "", page.read_text(), flags=re.DOTALL)


STUCK = """
import asyncio, os, signal, sys
import quiesce

async def main():
    hub = quiesce.Hub()
    barrier = quiesce.DataPlaneCheckpointBarrier(hub=hub)
    quiesce.enable_metrics("stuck", port=0, hub=hub, run_dir=sys.argv[1])

    async def save():
        async with barrier.checkpoint():
            pass

    async def hold(opened):
        async with barrier.mutation("group_commit"):
            opened.set()
            await asyncio.Event().wait()

    await save()
    opened = asyncio.Event()
    holder = asyncio.create_task(hold(opened))
    await opened.wait()
    saving = asyncio.create_task(save())
    await asyncio.sleep(0.5)  # that long it drains
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(saving, 10)

asyncio.run(main())
"""


def test_a_run_that_was_told_to_end_in_a_stuck_drain_is_not_said_to_have_saved_nothing(
    tmp_path: Path,
) -> None:
    """A real process with a real SIGTERM, over before its first sample was due: the page says what it hung on."""
    done = subprocess.run(
        [sys.executable, "-c", STUCK, str(tmp_path)], check=False, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == -signal.SIGTERM, done.stderr

    data = collect(Recording.open(tmp_path))
    (cut,) = data.cut_offs
    assert data.outcomes == {"completed": 1, "cut off": 1}
    assert (cut.phase, [holder.kind for holder in cut.holders]) == ("drain", ["group_commit"])
    assert data.ended - data.started > cut.seconds > 0.4
    text = re.sub(r"<(script|style).*?</\1>", "", write_report(tmp_path).read_text(), flags=re.DOTALL)
    assert "1 completed, 1 cut off." in text
    assert "No window waited for a slot" not in text


def test_a_day_makes_a_page_that_is_no_burden(day: Path) -> None:
    """Most of it is plotly: what the day adds is a few hundred kilobytes."""
    size = day.stat().st_size
    figures = re.search(r'id="figures">(.*?)</script>', day.read_text())
    assert figures is not None
    assert len(figures[1]) < 1_000_000
    assert size < 15_000_000


@pytest.fixture(scope="module")
def minute(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page about a run that was over before it was sampled much."""
    folder = tmp_path_factory.mktemp("minute")
    write_recording(folder, hours=1 / 60, save_every=10, crash_at=None)
    return write_report(folder)


@pytest.fixture(scope="module")
def browser() -> None:
    """A browser is at hand."""
    subprocess.run(["scripts/fetch_browser.sh"], check=True, timeout=600)


@pytest.mark.distribution
@pytest.mark.timeout(240)  # the first of them may fetch the browser
@pytest.mark.usefixtures("browser")
@pytest.mark.parametrize("theme, width", [("light", 1280), ("dark", 1280), ("light", 1920), ("dark", 1920)])
def test_the_page_looks_right(day: Path, tmp_path: Path, theme: str, width: int) -> None:
    """No empty chart, nothing cut off, nothing on top of something else, nothing asked of the network."""
    found = look_at(day, tmp_path, theme=theme, width=width)
    assert found["problems"] == []
    assert found["asked"] == []
    assert found["charts"] >= 20
    assert found["theme"] == theme
    assert found["background"] == {"light": "rgb(244, 245, 247)", "dark": "rgb(15, 18, 22)"}[theme]


@pytest.mark.distribution
@pytest.mark.timeout(240)  # as above
@pytest.mark.usefixtures("browser")
def test_the_page_about_a_short_run_looks_right_too(minute: Path, tmp_path: Path) -> None:
    """Four samples make charts with points, not empty ones."""
    assert look_at(minute, tmp_path, theme="light", width=1280)["problems"] == []
