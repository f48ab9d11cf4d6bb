"""One run as a chain of kills and resumes: along the surviving lineage every prompt is trained exactly once or dropped."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

import pytest

from tests.crash.forkserver import ForkPool, ForkServer
from tests.crash.runs import EPOCHS, PROMPTS
from tests.run_rig import SAMPLERS

LONGEST = 500
"""Events until the latest kill; a whole run has some two thousand, four hundred of them before its first step is saved."""

SHORT = 8
"""Kills of a chain in every run of the tests."""

SEEDS = {"in_order": (1, 5)}
"""Of the two chains, where not 1 and 2: with these most resumes find staged rows, however threads take turns."""

UNBROKEN = {("in_order", 1): 20}
"""Of these, by sampler and seed, a single run takes so many."""

UNBROKEN_LONGEST = 450
"""Events until the latest kill there; enough to get on, and not so many that the run ends before."""


def chain(
    server: ForkServer, name: str, kills: int, seed: int, place: Path, *, unbroken: bool = False
) -> dict[str, int]:
    """Kill a run and resume it until enough kills have hit, then let it end; begin anew where one ends before.

    Args:
        server: Where it runs.
        name: The sampler.
        kills: How many, over all runs of the chain.
        seed: How long each rollout and each step takes, and where the kills hit.
        place: For the run folders.
        unbroken: Whether so many have to hit one and the same run after its first checkpoint.

    Returns:
        Counts: ``kills``, ``most`` of them resumed by one run, ``ends`` of runs whose every prompt was accounted
        for, ``resumes``, ``staged`` of them from a checkpoint with staged rows, ``steps`` in the latest checkpoint of
        any that was resumed, and ``early`` kills before the first checkpoint, after which there is nothing to resume
        and nothing was trained.
    """
    choice = random.Random(f"{name} {seed}")
    counts = {"kills": 0, "most": 0, "ends": 0, "resumes": 0, "staged": 0, "steps": 0, "early": 0}
    counted, latest = ("most", UNBROKEN_LONGEST) if unbroken else ("kills", LONGEST)
    while counts[counted] < kills:
        path = str(place / f"run-{counts['ends']}-{counts['early']}")
        resumes = 0
        while True:
            at = choice.randrange(1, latest) if counts[counted] < kills else 0
            ended = server.call(
                "tests.crash.runs:one", path=path, name=name, seed=seed, kill_at=at, resume=resumes > 0
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
                resumes += 1
                counts["resumes"] += 1
                counts["staged"] += verdict["staged"] > 0
                counts["steps"] = max(counts["steps"], verdict["step"])
                counts["most"] = max(counts["most"], resumes)
            else:
                assert not resumes, f"a kill at event {at} left no checkpoint where there was one"
                counts["early"] += 1
                path = str(place / f"run-{counts['ends']}-{counts['early']}")
    return counts


def chains(
    pool: ForkPool, name: str, kills: Mapping[int, int], place: Path, *, unbroken: Collection[int] = ()
) -> list[dict[str, int]]:
    """Run a chain of so many kills for each seed, side by side; unbroken ones for some."""

    def one(server: ForkServer, seed: int) -> dict[str, int]:
        (place / str(seed)).mkdir()
        return chain(server, name, kills[seed], seed, place / str(seed), unbroken=seed in unbroken)

    found: list[dict[str, int]] = pool.each(list(kills), one)
    for (seed, wanted), counts in zip(kills.items(), found, strict=True):
        assert counts["most" if seed in unbroken else "kills"] == wanted
        assert counts["resumes"] >= wanted // 2
        assert counts["staged"] > 0
        assert counts["steps"] > 1
        assert counts["ends"] >= 1
    return found


@pytest.mark.parametrize("name", SAMPLERS)
def test_a_run_that_is_killed_over_and_over_trains_every_prompt_once(
    name: str, pool: ForkPool, tmp_path: Path, tell: Callable[[str], None]
) -> None:
    """Two chains with each sampler, failing rollouts and spares, one of them of a single run; every audit is clean."""
    kills = {seed: UNBROKEN.get((name, seed), SHORT) for seed in SEEDS.get(name, (1, 2))}
    unbroken = [seed for seed in kills if (name, seed) in UNBROKEN]

    found = chains(pool, name, kills, tmp_path, unbroken=unbroken)

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
