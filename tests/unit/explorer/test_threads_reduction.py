"""What the reduction leaves out leads to nothing new: it loses no outcome, no deadlock, and no order that matters."""

from __future__ import annotations

import random
from typing import Any

import pytest

from quiesce.explorer import explore_threads, switch_point, together
from quiesce.explorer import threads as threads_module
from quiesce.explorer.threads_footprints import Reduced
from tests.unit.explorer import thread_programs as programs
from tests.unit.explorer.thread_programs import Box

SAFE = tuple(step for step in Box.STEPS if not step.startswith("both"))
Script = list[list[str]]
Seen = tuple[bool, set[object], int]


def script_of(seed: int, *, steps: tuple[str, ...], longest: int, threads: tuple[int, ...]) -> Script:
    """Return what each of a few threads does."""
    draw = random.Random(seed)
    return [
        [draw.choice(steps) for _ in range(draw.randint(1, longest))] for _ in range(draw.choice(threads))
    ]


def explored(script: Script, most: int, **options: Any) -> Seen:  # noqa: ANN401 - of explore_threads()
    """Return whether a program deadlocks, how it ends, and in how many schedules."""
    ends: set[object] = set()

    def scenario() -> None:
        box = Box()

        def run(who: int, steps: list[str]) -> None:
            for what in steps:
                switch_point(what)
                box.step(what, who)

        together(*(lambda who=who, steps=steps: run(who + 1, steps) for who, steps in enumerate(script)))
        ends.add((box.x, box.y, tuple(box.log)))

    report = explore_threads(scenario, modules=[programs], max_schedules=most, shrink=False, **options)
    assert report.exhausted or report.failure is not None or report.schedules == most
    return report.failure is not None, ends, report.schedules if report.exhausted else -1


@pytest.mark.parametrize("seed", range(14))
def test_the_reduction_loses_no_outcome(seed: int) -> None:
    """Two threads and one or two steps each, in every schedule and in those that are left: the same ends."""
    script = script_of(seed, steps=SAFE, longest=1, threads=(2,))
    _, ends, schedules = explored(script, 5_000)
    failed, fewer, reduced = explored(script, 5_000, shared=())
    assert schedules > 0
    assert fewer == ends
    assert not failed
    assert 0 < reduced <= schedules


@pytest.mark.parametrize("seed", range(14))
def test_races_and_sleep_sets_agree_on_every_order_that_matters(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sleep sets alone run each class of equal schedules once; taking only what a race asks for runs as many."""
    script = script_of(100 + seed, steps=SAFE, longest=2, threads=(2, 3))
    failed, fewer, reduced = explored(script, 400, shared=())
    monkeypatch.setattr(threads_module, "Reduced", lambda **_: Reduced(races=False))
    asleep, ends, schedules = explored(script, 400, shared=())
    assert (failed, asleep) == (False, False)
    assert reduced == schedules
    if schedules > 0:
        assert fewer == ends


@pytest.mark.parametrize("seed", range(10))
def test_the_reduction_loses_no_deadlock(seed: int) -> None:
    """Locks in two orders, among other things: it is found by both, or by neither."""
    script = script_of(seed, steps=("both", "both the other way", "try", "wait"), longest=1, threads=(2,))
    assert explored(script, 5_000)[0] == explored(script, 5_000, shared=())[0]


def test_timeouts_at_any_moment_are_reduced_by_sleep_sets_alone() -> None:
    """The ends are the same."""
    script = [["await"], ["set"]]
    _, ends, schedules = explored(script, 5_000, timers="any")
    _, fewer, reduced = explored(script, 5_000, timers="any", shared=())
    assert ends == {(0, 0, ((1, "True"),)), (0, 0, ((1, "False"),))}
    assert fewer == ends
    assert reduced <= schedules
