"""The replay of the bug: the early read loses a batch, the cut loses none, and both are the real code."""

from __future__ import annotations

import argparse
import io
import json
from pathlib import Path

import pytest
from rich.console import Console

from quiesce import skew
from quiesce.checkpoint.capture import CutSources
from quiesce.cli.skew import main_skew, print_replays
from quiesce.errors import AdmissionError


async def test_the_early_read_drops_a_fresh_batch_on_resume(tmp_path: Path) -> None:
    """Cursor 6 and a buffer with step 7 on disk: the guard refuses step 7, and four prompts are never trained."""
    found = await skew.replay("early", tmp_path)

    assert (found.pump_admitted, found.cursor_on_disk, found.buffered_step) == (True, 6, 7)
    assert (found.read, found.trained, found.dropped) == (36, 32, 4)
    assert "step 7 is already stamped" in found.collision


async def test_quiesce_refuses_what_the_early_read_left(tmp_path: Path) -> None:
    """The cross-check of a restore names cursor, step and groups before anything could be dropped."""
    found = await skew.replay("early", tmp_path)

    assert "cursor_covers_buffer" in found.refusal
    assert "cursor is 6" in found.refusal
    assert "step 7" in found.refusal


async def test_the_cut_drops_nothing(tmp_path: Path) -> None:
    """The pump cannot admit inside the window, so cursor and buffer agree and every prompt is trained."""
    found = await skew.replay("cut", tmp_path)

    assert (found.pump_admitted, found.cursor_on_disk, found.buffered_step) == (False, 6, None)
    assert (found.read, found.trained, found.dropped) == (36, 36, 0)
    assert (found.refusal, found.collision) == ("", "")


async def test_the_replay_of_the_cut_depends_on_the_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a cursor of an earlier moment, the resumed run is refused its next step: nothing in it is hard-wired."""
    sources = skew._Run.sources  # noqa: SLF001 - the scenario's own parts

    def stale(run: skew._Run, sampler_state: object = None) -> CutSources:
        run.sampler.restore_cursor(run.sampler.dispatch_cursor - 1)
        return sources(run)

    monkeypatch.setattr(skew._Run, "sources", stale)  # noqa: SLF001 - the scenario's own parts

    with pytest.raises(AdmissionError, match="step 6"):
        await skew.replay("cut", tmp_path)


def test_the_command_prints_both_replays_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    """As the table of the bug's page: what disk says, what the resume does."""
    code = main_skew(argparse.Namespace(json=False))

    said = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert code == 0
    assert "Gate window 1, 4 prompts a step, trainer at step 7, cursor at 6." in said
    assert "36 read, 32 trained," in said
    assert "driver does, as the code of the bug did" in said
    assert "\x1b" not in said


def test_the_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    """One object with both replays."""
    code = main_skew(argparse.Namespace(json=True))

    said = json.loads(capsys.readouterr().out)
    assert code == 0
    assert (said["early"]["dropped"], said["cut"]["dropped"]) == (4, 0)


async def test_the_table_says_what_happened(tmp_path: Path) -> None:
    """Not what was expected: two replays of the cut read alike."""
    found = await skew.replay("cut", tmp_path)
    out = io.StringIO()

    print_replays(found, found, Console(file=out, width=200))

    assert out.getvalue().count("nothing to reconcile, nothing dropped") == 2
    assert "The guard said" not in out.getvalue()
