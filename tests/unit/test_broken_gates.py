"""Gates that lack one rule each: the claim that states the rule must notice, or it proves nothing."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

import pytest

from tests import gates
from tests.gates import broken_gate, started
from tests.unit import test_snapshot_gate as claims

BROKEN: list[tuple[str, str, str, Callable[..., Any]]] = [
    (
        "a late reopening opens a later close",
        "if self._closed and self._epoch <= epoch:",
        "if self._closed:",
        claims.test_a_first_reopening_that_is_overtaken_by_the_next_close_does_not_open_it_either,
    ),
    (
        "a reopening that says nothing new opens the gate",
        "            if epoch <= self._released:\n                return\n",
        "",
        claims.test_whatever_order_messages_arrive_in_each_checkpoint_keeps_its_own_window,
    ),
    (
        "a reopening releases only what has arrived",
        "            self._released = epoch\n",
        "            self._released = min(epoch, self._epoch)\n",
        claims.test_a_close_after_its_release_changes_nothing,
    ),
    (
        "a released epoch can still close",
        "if epoch > self._released and epoch > self._epoch:",
        "if epoch > self._epoch:",
        claims.test_a_close_after_its_release_changes_nothing,
    ),
    (
        "an earlier epoch replaces a later one",
        "if epoch > self._released and epoch > self._epoch:",
        "if epoch > self._released:",
        claims.test_a_late_close_neither_reports_nor_moves_a_later_one,
    ),
    (
        "drivers are not told apart",
        "            if epoch <= self._released:\n",
        "            if epoch.number <= self._released.number:\n",
        claims.test_a_new_driver_releases_whatever_older_ones_closed,
    ),
    (
        "a close drains on after its release",
        "while self._is_current(epoch) and self._permits:",
        "while self._permits:",
        claims.test_a_reopening_ends_a_close_that_still_drains,
    ),
    (
        "a reopening does not wake who drains",
        "                self._drained.notify_all()  # a close that is covered ends as superseded\n",
        "                pass\n",
        claims.test_a_reopening_ends_a_close_that_still_drains,
    ),
    (
        "a later close does not wake who drains",
        "                self._drained.notify_all()  # whoever drains for an epoch before this one is superseded\n",
        "",
        claims.test_a_draining_close_is_superseded_by_a_later_one,
    ),
    (
        "a close does not wait",
        "while self._is_current(epoch) and self._permits:",
        "while False:",
        claims.test_a_close_waits_for_the_permits_that_are_out_and_lets_no_more_out,
    ),
    (
        "a closing gate still grants",
        "                    self._granting = False\n",
        "",
        claims.test_a_close_waits_for_the_permits_that_are_out_and_lets_no_more_out,
    ),
    (
        "a release wakes no close",
        "                if gate._draining and not gate._permits:\n",
        "                if False:\n",
        claims.test_a_close_waits_for_the_permits_that_are_out_and_lets_no_more_out,
    ),
    (
        "a reopening lets nobody in",
        "                if self._waiting:\n                    self._let_in(now)\n",
        "                self._opened.notify_all()\n",
        claims.test_a_writer_that_waited_gets_in_between_two_closes_however_close_they_are,
    ),
    (
        "a second release goes unnoticed",
        "        elif state == _RELEASED:\n",
        "        elif False:\n",
        claims.test_a_permit_is_released_exactly_once,
    ),
    (
        "a cut may be held",
        "        require_no_cut(self._wanted)\n",
        "",
        claims.test_a_permit_cannot_be_asked_for_while_a_live_cut_is_held,
    ),
    (
        "a loop's thread may wait",
        "if timeout != 0 and not self._retired and on_a_loop():",
        "if False:",
        claims.test_a_thread_that_runs_an_event_loop_never_waits_at_a_gate,
    ),
    (
        "the dead are not told from the living",
        "not self._thread.is_alive()",
        "False",
        claims.test_a_thread_that_died_with_its_permit_keeps_the_gate_from_closing,
    ),
    (
        "an interrupted waiter keeps its grant",
        "            if permit._state == _LIVE:\n                permit.release()\n",
        "",
        claims.test_who_is_let_in_and_interrupted_gives_the_permit_back,
    ),
    (
        "retirement forgets no permits",
        "            while self._permits:\n                permit, _",
        "            while False:\n                permit, _",
        claims.test_a_retired_gate_counts_as_closed_and_lets_nobody_in,
    ),
    (
        "retirement wakes nobody",
        "            self._opened.notify_all()\n            self._drained.notify_all()\n        now",
        "        now",
        claims.test_retiring_ends_whatever_waits_at_the_gate,
    ),
    (
        "closed in any epoch will do",
        "(self._closed and self._is_current(epoch) and not self._permits)",
        "(self._closed and not self._permits)",
        claims.test_closed_in_names_one_epoch,
    ),
    (
        "closed with permits out will do",
        "(self._closed and self._is_current(epoch) and not self._permits)",
        "(self._closed and self._is_current(epoch))",
        claims.test_a_close_waits_for_the_permits_that_are_out_and_lets_no_more_out,
    ),
    (
        "every gate counts from one",
        "    return built * SEQUENCES_PER_GATE\n",
        "    return 0\n",
        claims.test_the_next_gate_of_a_hub_numbers_its_events_above_the_one_before,
    ),
]


@pytest.mark.parametrize(
    "old, new, claim", [broken[1:] for broken in BROKEN], ids=[broken[0] for broken in BROKEN]
)
def test_a_gate_without_the_rule_fails_the_claim(
    old: str, new: str, claim: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within a second: a claim that waits for what the rule brings about fails by its patience."""
    module = broken_gate(old, new)
    for name in ("SnapshotGate", "Epoch", "holds_permit"):
        monkeypatch.setattr(claims, name, getattr(module, name))
    for place in (claims, gates):
        monkeypatch.setattr(place, "PATIENCE", 0.5)

    def run() -> None:
        outcome = claim()
        if inspect.iscoroutine(outcome):
            asyncio.run(outcome)

    error = started(run).exception(20)

    assert error is not None, "the claim holds without its rule"
