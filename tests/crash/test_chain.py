"""One run as a chain of kills and resumes: along the surviving lineage every prompt is trained exactly once or dropped."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from tests.crash.forkserver import ForkPool, ForkServer
from tests.crash.runs import EPOCHS, PROMPTS
from tests.run_rig import SAMPLERS

LONGEST = 400
"""Events until the latest kill; a whole run has some fifteen hundred."""

SHORT = 8
KILLS = {("in_order", 1): 20}
"""Kills of a chain, by sampler and seed, where they are not ``SHORT``: one chain is long in every run of the tests."""


def chain(server: ForkServer, name: str, kills: int, seed: int, place: Path) -> dict[str, int]:
    """Kill a run and resume it until enough kills have hit, then let it end; begin anew where one ends before.

    Returns:
        Counts: ``kills``, ``ends`` of runs whose every prompt was accounted for, ``resumes``, and ``early`` kills before
        the first checkpoint, after which there is nothing to resume and nothing was trained.
    """
    choice = random.Random(f"{name} {seed}")
    counts = {"kills": 0, "ends": 0, "resumes": 0, "early": 0}
    while counts["kills"] < kills:
        path = str(place / f"run-{counts['ends']}-{counts['early']}")
        resume = False
        while True:
            at = choice.randrange(1, LONGEST) if counts["kills"] < kills else 0
            ended = server.call(
                "tests.crash.runs:one", path=path, name=name, seed=seed, kill_at=at, resume=resume
            )
            if not ended.killed:
                end = ended.value()
                assert end["read"] == end["trained"] + end["dropped"] == PROMPTS * EPOCHS
                counts["ends"] += 1
                break
            counts["kills"] += 1
            verdict = server.call("tests.crash.runs:verdict", path=path).value()
            assert verdict["violations"] == [], f"after a kill at event {at}: {verdict}"
            if verdict["checkpoints"]:
                resume = True
                counts["resumes"] += 1
            else:
                assert not resume, f"a kill at event {at} left no checkpoint where there was one"
                counts["early"] += 1
                path = str(place / f"run-{counts['ends']}-{counts['early']}")
    return counts


def chains(pool: ForkPool, name: str, kills: Mapping[int, int], place: Path) -> list[dict[str, int]]:
    """Run a chain of so many kills for each seed, side by side."""

    def one(server: ForkServer, seed: int) -> dict[str, int]:
        (place / str(seed)).mkdir()
        return chain(server, name, kills[seed], seed, place / str(seed))

    found: list[dict[str, int]] = pool.each(list(kills), one)
    for counts, wanted in zip(found, kills.values(), strict=True):
        assert counts["kills"] == wanted
        assert counts["resumes"] >= wanted // 2
        assert counts["ends"] >= 1
    return found


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_run_that_is_killed_over_and_over_trains_every_prompt_once(
    name: str, pool: ForkPool, tmp_path: Path, tell: Callable[[str], None]
) -> None:
    """Two chains with each sampler, failing rollouts and spares; after every kill the audit is clean."""
    found = chains(pool, name, {seed: KILLS.get((name, seed), SHORT) for seed in (1, 2)}, tmp_path)

    tell(", ".join(map(str, found)))


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", SAMPLERS)
def test_a_run_that_is_killed_two_hundred_times_trains_every_prompt_once(
    name: str, pool: ForkPool, tmp_path: Path, tell: Callable[[str], None]
) -> None:
    """The same, two hundred times and then as many with other paces, for each sampler."""
    found = chains(pool, name, {11: 200, 12: 200}, tmp_path)

    tell(", ".join(map(str, found)))
