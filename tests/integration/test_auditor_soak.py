"""Runs in real time that save, drop, substitute, abort, stop, are killed and resume: no life of theirs raises an alarm."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import pytest

from quiesce.auditor import read_violations
from quiesce.checkpoint.loading import find_checkpoints
from tests.conftest import TRIED
from tests.run_rig import SAMPLERS

SOAK_SECONDS = float(os.environ.get("QUIESCE_SOAK_SECONDS", "120"))
"""For each sampler."""

LONGEST_LIFE = 600
"""Seconds after which a life hangs; a machine with other work is slow, not stuck."""
ROOT = Path(__file__).parents[2]
MOST_RUNS = 40
SHORTEST, LONGEST = 0.05, 1.0
"""Seconds until a life is killed or stopped, less in a small run; the first save is there after a few hundredths."""


@pytest.fixture
def tell(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Return a function that takes what a test tried; the summary shows it."""

    def told(what: str) -> None:
        record_property(TRIED, what)

    return told


def live(**args: object) -> dict[str, Any] | None:
    """Live once, in a process; return what it told, or None if it was killed."""
    ended = subprocess.run(
        [sys.executable, "-m", "tests.integration.auditor_lives", json.dumps(args)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=LONGEST_LIFE,
    )
    if ended.returncode == -signal.SIGKILL and args["kill_after"]:
        return None
    assert ended.returncode == 0, ended.stderr
    told: dict[str, Any] = json.loads(ended.stdout)
    return told


def lives(
    name: str, place: Path, seed: int, *, prompts: int, seconds: float, kinds: Collection[str]
) -> Counter[str]:
    """Take run after run through kills, stops and resumes to its end; assert that nothing was found in any life.

    Args:
        name: The sampler.
        place: For the run folders.
        seed: Of everything.
        prompts: Size of the dataset.
        seconds: How long at least; a run that has begun is taken to its end.
        kinds: What has to be met; runs go on until it is, within reason.

    Returns:
        What was met.
    """
    chance, met, until = random.Random(f"{name} {seed}"), Counter[str](), time.monotonic() + seconds
    while time.monotonic() < until or (missed(met, kinds) and met["runs"] < MOST_RUNS):
        path, saved, ends = str(place / f"{seed}-{met['runs']}"), False, 2 + met["runs"] % 4
        met["runs"] += 1
        for number in range(100):
            how = "end" if number >= ends else chance.choice(["kill", "kill", "stop"]) if number else "kill"
            after = chance.uniform(SHORTEST, min(LONGEST, prompts / 25))
            told = live(
                path=path,
                name=name,
                seed=chance.randrange(1 << 20),
                prompts=prompts,
                resume=saved,
                kill_after=after if how == "kill" else 0,
                stop_after=after if how == "stop" else 0,
            )
            met["lives"] += 1
            found = read_violations(Path(path))
            assert found == [], f"life {number} of {path} ({how} after {after:.3f} s)"
            if told is None:
                met["kills"] += 1
            else:
                assert (told["findings"], told["failures"]) == ({}, 0)
                met.update(told["moves"])
                met.update({key: told[key] for key in ("sweeps", "saves", "permits")})
                met[told["outcome"]] += 1
                if told["outcome"] == "finished":
                    break
            before, saved = saved, bool(find_checkpoints(Path(path) / "checkpoints"))
            met["resumes"] += before
            if not saved:  # killed before there was anything to resume
                path = f"{path}'"
        else:
            raise AssertionError(f"{path} never ended")
    return met


ALWAYS = ("kills", "resumes", "saves", "sweeps", "permits", "finished", "training trained")
RARELY = ("stopped", "spares ledger", "ledger dropped failed")
ABOUT = {"windowed": "ledger dropped stale_abort"}
"""What only runs with some sampler meet."""


def missed(met: Counter[str], kinds: Iterable[str]) -> list[str]:
    """Return what the schedules are there to meet and did not."""
    return [kind for kind in kinds if not met[kind]]


@pytest.mark.timeout(120)
def test_lives_that_end_in_any_way_raise_no_alarm(tmp_path: Path, tell: Callable[[str], None]) -> None:
    """One run with a kill or a stop, then the next; the other samplers, and minutes of it, are for the soak."""
    met = lives("windowed", tmp_path, 1, prompts=8, seconds=0, kinds=ALWAYS)

    assert missed(met, ALWAYS) == []
    tell(f"{met['lives']} lives, {met['kills']} kills, {met['saves']} saves")


@pytest.mark.soak
@pytest.mark.timeout(int(SOAK_SECONDS) + LONGEST_LIFE)
@pytest.mark.parametrize("name", SAMPLERS)
def test_minutes_of_such_lives_raise_no_alarm(name: str, tmp_path: Path, tell: Callable[[str], None]) -> None:
    """The same, for minutes with each sampler."""
    kinds = (*ALWAYS, *RARELY, *([ABOUT[name]] if name in ABOUT else []))

    met = lives(name, tmp_path, 11, prompts=60, seconds=SOAK_SECONDS, kinds=kinds)

    assert missed(met, kinds) == []
    tell(f"{name}: {dict(met)}")
