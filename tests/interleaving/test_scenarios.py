"""The real primitives under every schedule of the scenarios, or as many as there is time for."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from quiesce.explorer import explore
from tests.interleaving.exploring import facts_of, record
from tests.interleaving.scenarios import SCENARIOS, Scenario
from tests.interleaving.world import World

DEFAULT_SCHEDULES = 250
SOAK_SCHEDULES = 1_000_000
"""At least so many in all, over the scenarios that a run of the tests does not explore to the end."""

EXHAUSTED = {
    "admission_during_save",
    "back_to_back_checkpoints",
    "cancelled_drain",
    "cancelled_threaded_window",
    "child_of_a_slot",
    "commit_during_save",
    "drain_timeout_reopens",
    "eviction_during_save",
    "foreign_and_expired_cuts",
    "gate_opens_after_the_checkpoint",
    "hung_generation_is_given_up",
    "late_commit_of_an_old_attempt",
    "occupied_step_is_refused",
    "one_piece_gate_is_named",
    "retry_during_save",
    "slow_writers_and_a_checkpoint",
    "spares_filled_and_drained_during_save",
    "stale_abort_during_commit",
    "task_started_in_the_window",
    "two_checkpoints_and_a_writer",
    "write_back_during_save",
}
"""Those that every run of the tests explores to the end."""

CAPPED = tuple(name for name in SCENARIOS if name not in EXHAUSTED)
"""Those that it does not."""

ENDLESS = tuple(name for name in CAPPED if SCENARIOS[name].strategy != "exhaustive")
"""Those of them that are explored by chance, and so never end; the others may, in the long run."""


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Failures of rollouts are logged; ten thousand times is too often."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def run(scenario: Scenario, schedules: int, kind: str) -> None:
    """Explore a scenario in the real world and note how far."""
    report = explore(
        lambda: scenario.body(World),
        strategy=scenario.strategy,
        timers=scenario.timers,
        max_schedules=schedules,
    ).check()
    record(kind, scenario.name, stands_for=scenario.stands_for, **facts_of(report))
    assert report.exhausted or report.schedules == schedules
    if kind == "scenario":
        assert report.exhausted == (scenario.name in EXHAUSTED)


@pytest.mark.timeout(300)  # nothing in it waits: it takes as long as the machine takes
@pytest.mark.parametrize("name", SCENARIOS)
def test_every_explored_schedule_keeps_the_invariants(name: str) -> None:
    """Small scenarios in every order, the others in the first few hundred or in random ones."""
    run(SCENARIOS[name], 2_000 if name in EXHAUSTED else DEFAULT_SCHEDULES, "scenario")


def share(total: int) -> int:
    """Return how many schedules each capped scenario gets, so that those that cannot end reach the total alone."""
    return -(-total // len(ENDLESS))


def test_the_long_run_adds_up_to_a_million_schedules() -> None:
    """Whatever the list of scenarios is, and however early the exhaustive ones among the capped come to an end."""
    assert set(SCENARIOS) >= EXHAUSTED
    assert {SCENARIOS[name].strategy for name in EXHAUSTED} == {"exhaustive"}
    assert share(SOAK_SCHEDULES) * len(ENDLESS) >= SOAK_SCHEDULES


@pytest.mark.soak
@pytest.mark.timeout(5 * 3600)
@pytest.mark.parametrize("name", CAPPED)
def test_a_million_schedules_keep_the_invariants(name: str) -> None:
    """The same for the scenarios that are not exhausted by default, a million schedules in all.

    The share of each is derived from the list itself: a million over the number of those that are explored by
    chance, rounded up. The exhaustive ones get as much on top, or come to their end before, so that the total
    does not fall short where one of them ends.
    """
    run(SCENARIOS[name], share(SOAK_SCHEDULES), "soak")
