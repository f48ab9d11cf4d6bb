"""What a reply waits for when rows have to be cleared: before it, behind a fence of its own, or under a gate's permit.

Rule: the modes take turns on the same calls, round after round, each on a gate and a data plane of its own; differences
and ratios are taken within a round. Every key of every call is accounted for, whatever else is measured. Yield rule:
:func:`run_reply` blocks.

======================================  ===================================================================
bar                                     is
======================================  ===================================================================
reply_p50_inline_vs_ours                how much longer a reply takes if the clear comes before it (a clear of
                                        5 ms, 64 calls at once)
reply_p50_ours_minus_own_fence_us       how much longer it takes under the gate than with a fence of its own
drain_extra_clears                      how much longer a fence and drain takes than the same one with cleanup off, in
                                        clears as long as the one that it waited for (of 5 ms, one after the other
                                        without a rest); the longest of each round
clears_for_2048_keys                    clears for 1,024 calls of two keys that finish at once; the round that is
                                        farthest from the target
keys_lost                               keys that should have been cleared and were not, or the other way round;
                                        in the whole benchmark, in every mode that clears
keys_cleared_twice                      keys that were cleared again; likewise
calls_in_window                         puts and clears that ran while a checkpoint kept everybody out; likewise
======================================  ===================================================================
"""

from __future__ import annotations

import random
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from quiesce.bench.machine import describe, load_average
from quiesce.bench.reply_load import KEYS_PER_CALL, Load, Outcome, drive, drive_at_once
from quiesce.bench.reply_modes import COMPARED, MODES, Limits, Mode, lines_of
from quiesce.bench.reply_plane import Account, ReplyPlane
from quiesce.bench.reply_tables import answer_of, tables_of
from quiesce.bench.report import BenchReport
from quiesce.bench.stats import Spread, quiet_collector, ratios, rounded

__all__ = ["OURS", "run_reply"]

OURS: Final = "gate_permit"
_TARGETS: Final = {
    "reply_p50_inline_vs_ours": 5.0,
    "reply_p50_ours_minus_own_fence_us": 50.0,
    "drain_extra_clears": 1.0,
    "clears_for_2048_keys": 32.0,
    "keys_lost": 0.0,
    "keys_cleared_twice": 0.0,
    "calls_in_window": 0.0,
}
_AT_LEAST: Final = frozenset({"reply_p50_inline_vs_ours"})
_EXACTLY: Final = frozenset({"clears_for_2048_keys", "keys_lost", "keys_cleared_twice", "calls_in_window"})

_PUT_SECONDS: Final = 0.0002
_BATCH_CALLS: Final = 1024
_BATCH_THREADS: Final = 64
_FENCED_CALLS: Final = 16  # at once, while fences are measured
_FENCED_LIMITS: Final = Limits(batch_size=1, linger_seconds=0.0, max_pending=4)
_FENCED_SHARE: Final = 1.25  # of what one thread can clear, so that it always clears
_FENCE_EVERY_CLEARS: Final = 2.0
_FENCE_EVERY_SECONDS: Final = 0.01
_MIDDLE: Final = (0.25, 0.75)  # the part of a round in which its checkpoint is asked for


@dataclass(frozen=True, slots=True)
class _Plan:
    clears: tuple[float, ...]  # seconds of one clear
    calls: tuple[tuple[int, float], ...]  # calls at once, seconds that one generates
    rounds: int
    seconds: float
    saved_rounds: int  # with a checkpoint in each
    saved_seconds: float
    bar_clear: float
    bar_calls: tuple[int, float]
    bar_rounds: int
    bar_seconds: float
    fence_rounds: int
    fence_seconds: float
    shares: tuple[float, ...]  # of the calls that one thread can clear
    slow_clear: float
    slow_calls: int
    slow_seconds: float
    batch_clear: float
    batch_rounds: int


_FULL: Final = _Plan(
    clears=(0.001, 0.005, 0.02),
    calls=((1, 0.025), (16, 0.1), (64, 0.2), (256, 0.32)),
    rounds=2,
    seconds=0.3,
    saved_rounds=2,
    saved_seconds=1.0,
    bar_clear=0.005,
    bar_calls=(64, 0.2),
    bar_rounds=11,
    bar_seconds=0.35,
    fence_rounds=5,
    fence_seconds=0.36,
    shares=(0.5, 0.9, 1.25, 2.0),
    slow_clear=0.04,
    slow_calls=256,
    slow_seconds=0.7,
    batch_clear=0.005,
    batch_rounds=5,
)
_QUICK: Final = _Plan(
    clears=(0.001, 0.005),
    calls=((1, 0.01), (8, 0.05)),
    rounds=1,
    seconds=0.06,
    saved_rounds=1,
    saved_seconds=0.06,
    bar_clear=0.005,
    bar_calls=(8, 0.05),
    bar_rounds=2,
    bar_seconds=0.06,
    fence_rounds=1,
    fence_seconds=0.06,
    shares=(0.5, 2.0),
    slow_clear=0.02,
    slow_calls=32,
    slow_seconds=0.05,
    batch_clear=0.001,
    batch_rounds=1,
)


class _Cell(NamedTuple):
    """One point of the sweep over replies."""

    checkpoints: bool
    clear: float  # seconds
    calls: int  # at once
    generation: float  # seconds


@dataclass(slots=True)
class _Found:
    """What was measured, by mode."""

    replies: dict[tuple[_Cell, str], list[Outcome]] = field(default_factory=lambda: defaultdict(list))
    bars: dict[str, list[Outcome]] = field(default_factory=lambda: defaultdict(list))
    fences: dict[tuple[float, str], list[Outcome]] = field(default_factory=lambda: defaultdict(list))
    loads: dict[tuple[float, str], list[Outcome]] = field(default_factory=lambda: defaultdict(list))
    batches: dict[str, list[Account]] = field(default_factory=lambda: defaultdict(list))

    def accounts(self) -> list[tuple[str, Account]]:
        """Return the account of everything that was measured in a mode that clears, with the mode."""
        outcomes = [
            *((mode, found) for (_, mode), found in self.replies.items()),
            *self.bars.items(),
            *((mode, found) for (_, mode), found in self.fences.items()),
            *((mode, found) for (_, mode), found in self.loads.items()),
        ]
        accounts = [(mode, outcome.account) for mode, found in outcomes for outcome in found]
        accounts += [(mode, account) for mode, found in self.batches.items() for account in found]
        return [(mode, account) for mode, account in accounts if mode in COMPARED]


def run_reply(
    *, quick: bool = False, modes: Mapping[str, Callable[[ReplyPlane, Limits], Mode]] = MODES
) -> BenchReport:
    """Measure replies, and the checkpoints beside them.

    Args:
        quick: Cut sizes and rounds down, to see that it works; the bars keep their names.
        modes: The modes, by the names of :data:`~quiesce.bench.reply_modes.MODES`.

    Raises:
        Exception: What a mode raised.
    """
    plan = _QUICK if quick else _FULL
    machine = describe(Path(tempfile.gettempdir()))
    found = _Found()
    with quiet_collector():
        _measure_batches(plan, modes, found)
        _measure_bars(plan, modes, found)
        _measure_fences(plan, modes, found)
        _measure_loads(plan, modes, found)
        _measure_replies(plan, modes, found)
    machine["load_average_after"] = load_average()
    bars, spreads = _bars(plan, found)
    results = [
        *_headline_results(plan, found),
        *_reply_results(found),
        *_fence_results(found),
        *_load_results(plan, found),
        *_batch_results(plan, found),
        *_line_results(),
    ]
    return BenchReport(
        bench="reply",
        quick=quick,
        machine=machine,
        results=results,
        bars=bars,
        spreads=spreads,
        targets=_TARGETS,
        at_least=_AT_LEAST,
        exactly=_EXACTLY,
        tables=tables_of(results),
        answer=answer_of(results, bars, spreads),
    )


def _turn(names: tuple[str, ...], number: int) -> tuple[str, ...]:
    """Let each come first in turns."""
    first = number % len(names)
    return names[first:] + names[:first]


_Modes = Mapping[str, Callable[[ReplyPlane, Limits], Mode]]


def _drive(modes: _Modes, mode: str, clear: float, load: Load, limits: Limits = Limits()) -> Outcome:  # noqa: B008 - frozen
    return drive(partial(_make, modes[mode], limits), ReplyPlane(_PUT_SECONDS, clear), load)


def _make(kind: Callable[[ReplyPlane, Limits], Mode], limits: Limits, plane: ReplyPlane) -> Mode:
    return kind(plane, limits)


def _measure_batches(plan: _Plan, modes: _Modes, found: _Found) -> None:
    for number in range(plan.batch_rounds):
        for mode in _turn(COMPARED, number):
            plane = ReplyPlane(_PUT_SECONDS, plan.batch_clear)
            make = partial(_make, modes[mode], Limits())
            found.batches[mode].append(drive_at_once(make, plane, _BATCH_CALLS, _BATCH_THREADS))


def _measure_bars(plan: _Plan, modes: _Modes, found: _Found) -> None:
    calls, generation = plan.bar_calls
    for number in range(plan.bar_rounds):
        load = Load(calls, generation, plan.bar_seconds, seed=number)
        for mode in _turn(COMPARED, number):
            found.bars[mode].append(_drive(modes, mode, plan.bar_clear, load))


def _measure_fences(plan: _Plan, modes: _Modes, found: _Found) -> None:
    """Ask for checkpoints at any time while clears follow one another without a rest."""
    for clear in plan.clears:
        for number in range(plan.fence_rounds):
            draw = random.Random(number)
            every = _FENCE_EVERY_SECONDS + _FENCE_EVERY_CLEARS * clear
            at, checkpoints = every, list[float]()
            while at < plan.fence_seconds:
                checkpoints.append(at)
                at += every + draw.uniform(0, 2 * clear)
            load = Load(
                _FENCED_CALLS,
                _FENCED_CALLS * clear / _FENCED_SHARE,
                plan.fence_seconds,
                tuple(checkpoints),
                number,
            )
            for mode in _turn(tuple(MODES), number):
                found.fences[clear, mode].append(_drive(modes, mode, clear, load, _FENCED_LIMITS))


def _measure_loads(plan: _Plan, modes: _Modes, found: _Found) -> None:
    """Ask for fewer calls and for more than one thread can clear."""
    for number, share in enumerate(plan.shares):
        generation = plan.slow_calls / (share * _capacity(plan.slow_clear))
        load = Load(plan.slow_calls, generation, plan.slow_seconds, seed=number)
        for mode in _turn(COMPARED, number):
            found.loads[share, mode].append(_drive(modes, mode, plan.slow_clear, load))


def _measure_replies(plan: _Plan, modes: _Modes, found: _Found) -> None:
    for checkpoints in (False, True):
        seconds = plan.saved_seconds if checkpoints else plan.seconds
        for number in range(plan.saved_rounds if checkpoints else plan.rounds):
            draw = random.Random(number)
            for clear in plan.clears:
                for calls, generation in plan.calls:
                    at = (seconds * draw.uniform(*_MIDDLE),) if checkpoints else ()
                    load = Load(calls, generation, seconds, at, number)
                    for mode in _turn(COMPARED, number):
                        cell = _Cell(checkpoints, clear, calls, generation)
                        found.replies[cell, mode].append(_drive(modes, mode, clear, load))


def _capacity(clear: float) -> float:
    """Return the calls per second that one thread can clear."""
    return Limits().batch_size / clear


def _p50s(outcomes: Sequence[Outcome]) -> list[float]:
    return [statistics.median(outcome.replies) for outcome in outcomes]


def _extra_clears(found: _Found, clear: float, mode: str) -> Spread:
    """Return how much longer the longest fence of each round took than the same one with cleanup off, in clears."""
    longest = [
        max(
            (one.drain_seconds - other.drain_seconds) / (one.clear_seconds or clear)
            for one, other in zip(outcome.fences, off.fences, strict=True)
        )
        for outcome, off in zip(found.fences[clear, mode], found.fences[clear, "off"], strict=True)
    ]
    return Spread.of(longest)


def _bars(plan: _Plan, found: _Found) -> tuple[dict[str, float], dict[str, Spread]]:
    """Return each bar, and the spread behind those that are medians over rounds."""
    ours = _p50s(found.bars[OURS])
    own = _p50s(found.bars["own_fence"])
    spreads = {
        "reply_p50_inline_vs_ours": ratios(_p50s(found.bars["inline"]), ours),
        "reply_p50_ours_minus_own_fence_us": Spread.of(
            [one - other for one, other in zip(ours, own, strict=True)], 1e6
        ),
        "drain_extra_clears": _extra_clears(found, plan.bar_clear, OURS),
    }
    accounts = [account for _, account in found.accounts()]
    target = _TARGETS["clears_for_2048_keys"]
    clears = [account.clears for account in found.batches[OURS]]
    return {
        **{name: spread.median for name, spread in spreads.items()},
        "clears_for_2048_keys": max(clears, key=lambda number: abs(number - target)),
        "keys_lost": sum(account.lost for account in accounts),
        "keys_cleared_twice": sum(account.twice for account in accounts),
        "calls_in_window": sum(account.in_window for account in accounts),
    }, spreads


def _reply_numbers(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return what the calls waited for, and how their keys were cleared."""
    replies = [seconds for outcome in outcomes for seconds in outcome.replies]
    accounts = [outcome.account for outcome in outcomes]
    clears = sum(account.clears for account in accounts)
    return {
        "calls": len(replies),
        "reply_s": Spread.of(replies).to_json(),
        "reply_p99_s": rounded(_p99(replies)),
        "clears": clears,
        "keys_per_clear": rounded(sum(account.cleared for account in accounts) / max(1, clears)),
        "peak_backlog_keys": max(account.peak_backlog for account in accounts),
    } | _account_numbers(accounts)


def _account_numbers(accounts: Sequence[Account]) -> dict[str, int]:
    return {
        "keys": sum(account.obsolete for account in accounts),
        "keys_lost": sum(account.lost for account in accounts),
        "keys_cleared_twice": sum(account.twice for account in accounts),
        "calls_in_window": sum(account.in_window for account in accounts),
    }


def _fence_numbers(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    fences = [fence for outcome in outcomes for fence in outcome.fences]
    drains = [fence.drain_seconds for fence in fences]
    return {
        "drain_s": Spread.of(drains).to_json(),
        "drain_max_s": rounded(max(drains)),
        "clears_waited_for": max(fence.clears for fence in fences),
        "closed_max_s": rounded(max(fence.closed_seconds for fence in fences)),
    }


def _p99(values: Sequence[float]) -> float:
    """Return the value that 99 of 100 do not exceed (the nearest rank)."""
    ordered = sorted(values)
    return ordered[-(-99 * len(ordered) // 100) - 1]


def _headline_results(plan: _Plan, found: _Found) -> list[dict[str, Any]]:
    calls, generation = plan.bar_calls
    return [
        {
            "measured": "headline",
            "mode": mode,
            "clear_s": plan.bar_clear,
            "calls_at_once": calls,
            "calls_per_second": rounded(calls / generation),
        }
        | _reply_numbers(outcomes)
        for mode, outcomes in found.bars.items()
    ]


def _reply_results(found: _Found) -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = []
    for (cell, mode), outcomes in sorted(
        found.replies.items(), key=lambda item: (item[0][0], COMPARED.index(item[0][1]))
    ):
        result = {
            "measured": "replies",
            "mode": mode,
            "clear_s": cell.clear,
            "calls_at_once": cell.calls,
            "calls_per_second": rounded(cell.calls / cell.generation),
            "checkpoints": cell.checkpoints,
        } | _reply_numbers(outcomes)
        results.append(result | (_fence_numbers(outcomes) if cell.checkpoints else {}))
    return results


def _fence_results(found: _Found) -> list[dict[str, Any]]:
    return [
        {
            "measured": "fences",
            "mode": mode,
            "clear_s": clear,
            "extra_clears": _extra_clears(found, clear, mode).to_json(),
        }
        | _fence_numbers(outcomes)
        | _account_numbers([outcome.account for outcome in outcomes])
        for (clear, mode), outcomes in sorted(
            found.fences.items(), key=lambda item: (item[0][0], list(MODES).index(item[0][1]))
        )
    ]


def _load_results(plan: _Plan, found: _Found) -> list[dict[str, Any]]:
    return [
        {
            "measured": "load",
            "mode": mode,
            "clear_s": plan.slow_clear,
            "calls_at_once": plan.slow_calls,
            "share": share,
            "calls_per_second": rounded(share * _capacity(plan.slow_clear)),
            "answered_per_second": rounded(
                sum(len(outcome.replies) for outcome in outcomes)
                / sum(outcome.took_seconds for outcome in outcomes)
            ),
        }
        | _reply_numbers(outcomes)
        for (share, mode), outcomes in sorted(
            found.loads.items(), key=lambda item: (item[0][0], COMPARED.index(item[0][1]))
        )
    ]


def _batch_results(plan: _Plan, found: _Found) -> list[dict[str, Any]]:
    return [
        {
            "measured": "batches",
            "mode": mode,
            "clear_s": plan.batch_clear,
            "calls": _BATCH_CALLS,
            "keys_per_call": KEYS_PER_CALL,
            "batch_size": Limits().batch_size,
            "clears": [account.clears for account in found.batches[mode]],
        }
        | _account_numbers(found.batches[mode])
        for mode in COMPARED
    ]


def _line_results() -> list[dict[str, Any]]:
    results = []
    for mode in COMPARED:
        lines = lines_of(mode)
        results.append(
            {
                "measured": "lines",
                "mode": mode,
                "call": lines.call,
                "checkpoint": lines.checkpoint,
                "cleanup": lines.cleanup,
                "fence": lines.fence,
                "thread": lines.thread,
                "total": lines.total,
            }
        )
    return results
