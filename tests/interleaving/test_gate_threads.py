"""The real gate and the real cleanup in threads, in every order of their steps, or in as many as there is time for."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from quiesce.explorer import Report, explore_threads, replay_threads
from tests.interleaving.exploring import facts_of, record
from tests.interleaving.gate_mutants import MUTANTS
from tests.interleaving.gate_world import MODULES, SCENARIOS, SHARED, GateWorld

DEFAULT_SCHEDULES = 50
SOAK_SCHEDULES = 10_000

EXHAUSTED = {
    "cleanup_and_checkpoint",
    "retired_while_waiting",
    "shutdown_while_closed",
    "writer_and_checkpoint",
    "writer_close_and_reopen",
}
"""Those that every run of the tests explores to the end."""

CAPPED = tuple(name for name in SCENARIOS if name not in EXHAUSTED)
"""Those that it does not: the first few orders, and a few that are drawn."""


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Failed clears and shutdowns are logged; ten thousand times is too often."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def note(kind: str, name: str, report: Report) -> None:
    """Write down how far a scenario was explored."""
    record(kind, name, stands_for=f"threads: {SCENARIOS[name].stands_for}", **facts_of(report))


@pytest.mark.parametrize("name", SCENARIOS)
def test_every_explored_order_respects_the_gate(name: str) -> None:
    """Small scenarios in every order, the others in the first ones."""
    body = SCENARIOS[name].body
    report = explore_threads(
        lambda: body(GateWorld),
        modules=MODULES,
        shared=SHARED,
        max_schedules=1_000 if name in EXHAUSTED else DEFAULT_SCHEDULES,
    ).check()
    note("scenario", name, report)
    assert report.exhausted == (name in EXHAUSTED)


@pytest.mark.parametrize("timers", ["idle", "any"])
@pytest.mark.parametrize("name", CAPPED)
def test_drawn_orders_respect_the_gate(name: str, timers: str) -> None:
    """The others by chance too, also with timeouts that are over at any moment; a seed repeats itself."""
    body = SCENARIOS[name].body
    explore_threads(
        lambda: body(GateWorld),
        modules=MODULES,
        strategy="pct",
        timers="any" if timers == "any" else "idle",
        max_schedules=40,
    ).check()


@pytest.mark.parametrize("name", MUTANTS)
def test_the_explorer_kills(name: str) -> None:
    """What is broken is noticed by the rule that it breaks; the real world survives the same schedule."""
    mutant = MUTANTS[name]
    body = SCENARIOS[mutant.scenario].body
    report = explore_threads(
        lambda: body(mutant.kind),
        modules=MODULES,
        shared=SHARED,
        strategy=mutant.strategy,
        max_schedules=500,
    )
    assert report.failure is not None, "it survived"
    assert mutant.rule == rule_of(report.failure.error), report.failure
    with pytest.raises(type(report.failure.error)) as again:
        replay_threads(lambda: body(mutant.kind), report.failure.schedule, modules=MODULES)
    assert rule_of(again.value) == mutant.rule
    replay_threads(lambda: body(GateWorld), report.failure.schedule, modules=MODULES)
    record(
        "mutant",
        name,
        invariant=mutant.rule,
        scenario=mutant.scenario,
        what=(mutant.kind.__doc__ or "").strip(),
        schedules=report.schedules,
        schedule=report.failure.schedule,
        error=str(report.failure.error),
    )


def rule_of(error: BaseException) -> str:
    """Return the rule that an error says is broken."""
    return str(getattr(error, "rule", type(error).__name__))


def test_gate_and_cleanup_both_have_mutants() -> None:
    """There are enough of them, and each of the oracle's rules has one."""
    gates = [name for name, mutant in MUTANTS.items() if mutant.kind.gate_class is not GateWorld.gate_class]
    cleanups = [
        name for name, mutant in MUTANTS.items() if mutant.kind.cleanup_class is not GateWorld.cleanup_class
    ]
    assert len(gates) >= 6
    assert len(cleanups) >= 5
    assert {mutant.rule for mutant in MUTANTS.values()} >= {
        "gate_is_respected",
        "reads_alone",
        "exactly_once",
        "as_new",
        "DeadlockError",
    }


@pytest.mark.soak
@pytest.mark.timeout(3 * 3600)
@pytest.mark.parametrize("name", CAPPED)
def test_the_long_way_respects_the_gate(name: str) -> None:
    """The scenarios that are not exhausted by default, to their end or to ten thousand orders."""
    body = SCENARIOS[name].body
    report = explore_threads(
        lambda: body(GateWorld), modules=MODULES, shared=SHARED, max_schedules=SOAK_SCHEDULES
    ).check()
    note("soak", name, report)
    assert report.exhausted or report.schedules == SOAK_SCHEDULES
