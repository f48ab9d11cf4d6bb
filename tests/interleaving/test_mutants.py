"""Every invariant has at least two broken worlds that the explorer kills, each by a schedule that is written down."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator

import pytest

from quiesce.explorer import explore, replay
from quiesce.invariants import INVARIANTS
from tests.interleaving.exploring import invariants_of, record
from tests.interleaving.mutants import MUTANTS
from tests.interleaving.scenarios import SCENARIOS
from tests.interleaving.world import World

LIVE = {"window_is_exclusive", "checkpoint_progress"}
"""Invariants of events rather than of a cut."""


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Mutants log a lot."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("name", MUTANTS)
def test_the_explorer_kills(name: str) -> None:
    """The invariant that was broken is the one that notices, and the schedule that shows it can be replayed."""
    mutant = MUTANTS[name]
    scenario = SCENARIOS[mutant.scenario]
    report = explore(
        lambda: scenario.body(mutant.kind),
        strategy=scenario.strategy,
        timers=scenario.timers,
        max_schedules=2_000,
    )
    assert report.failure is not None, "it survived"
    assert mutant.invariant in invariants_of(report.failure.error), report.failure
    with pytest.raises(type(report.failure.error)) as again:
        replay(lambda: scenario.body(mutant.kind), report.failure.schedule)
    assert mutant.invariant in invariants_of(again.value)
    replay(lambda: scenario.body(World), report.failure.schedule)  # the real world survives that schedule
    record(
        "mutant",
        name,
        invariant=mutant.invariant,
        scenario=mutant.scenario,
        what=(mutant.kind.__doc__ or "").strip(),
        schedules=report.schedules,
        schedule=report.failure.schedule,
        error=str(report.failure.error),
    )


def test_every_invariant_has_two_mutants() -> None:
    """None is left out; ``gate_is_respected`` comes with the gate."""
    counted = Counter(mutant.invariant for mutant in MUTANTS.values())
    assert set(counted) == set(INVARIANTS) | LIVE
    assert min(counted.values()) >= 2
