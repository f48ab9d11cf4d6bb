"""What :mod:`quiesce.bench.reply` measured, for people: tables, and the answer to a question in two lines.

Rule: everything is made of the results and the bars as programs read them, and the words stay true whatever the numbers
are. Nothing here suspends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from quiesce.bench.report import Table, shown, shown_spread
from quiesce.bench.stats import Spread

__all__ = ["answer_of", "tables_of"]


_ANSWER: Final = ("headline", "lines")


def answer_of(
    results: Sequence[Mapping[str, Any]], bars: Mapping[str, float], spreads: Mapping[str, Spread]
) -> tuple[str, str]:
    """Return in two lines what is gained by clearing after the reply, and what differs with a second fence."""
    of = {(result["measured"], result["mode"]): result for result in results if result["measured"] in _ANSWER}
    inline, own, ours = (of["headline", mode] for mode in ("inline", "own_fence", "gate_permit"))
    longer = shown(bars["reply_p50_inline_vs_ours"])
    difference = shown_spread(spreads["reply_p50_ours_minus_own_fence_us"])
    extra = {
        result["mode"]: shown(result["extra_clears"]["median"])
        for result in results
        if result["measured"] == "fences" and result["clear_s"] == ours["clear_s"]
    }
    lines = {mode: of["lines", mode] for mode in ("own_fence", "gate_permit")}
    gain = (
        f"With clears of {ours['clear_s'] * 1e3:g} ms and {ours['calls_at_once']} calls at once, a reply takes "
        f"{_ms(ours['reply_s']['median'])} ms if the clear is left to the background under a gate's permit, and "
        f"{_ms(inline['reply_s']['median'])} ms if the clear comes first (p50; p99 {_ms(ours['reply_p99_s'])} and "
        f"{_ms(inline['reply_p99_s'])} ms): {longer} times as long."
    )
    fence = (
        f"Behind a fence of its own instead, a reply takes {_ms(own['reply_s']['median'])} ms (p99 "
        f"{_ms(own['reply_p99_s'])} ms; the permit's p50 minus that: {difference} µs), the longest of a few "
        f"checkpoints waits {extra['own_fence']} clears longer than with cleanup off (under the permit: "
        f"{extra['gate_permit']}), and the code has {lines['own_fence']['total']} lines, "
        f"{lines['own_fence']['fence']} of them for the fence and its reservations (under the permit: "
        f"{lines['gate_permit']['total']}, {lines['gate_permit']['fence']} of them)."
    )
    return gain, fence


def tables_of(results: Sequence[Mapping[str, Any]]) -> tuple[Table, ...]:
    """Return the tables, from what was measured."""

    def of(measured: str) -> list[Mapping[str, Any]]:
        return [result for result in results if result["measured"] == measured]

    return (
        _reply_table("Replies, without checkpoints", of("replies"), checkpoints=False),
        _reply_table("Replies, with a checkpoint every second", of("replies"), checkpoints=True),
        _fence_table(of("fences")),
        _load_table(of("load")),
        Table(
            "Many calls of two keys that finish at once",
            ("mode", "calls", "keys", "clears, in each round", "keys lost", "keys cleared twice"),
            tuple(
                (
                    result["mode"],
                    f"{result['calls']:,}",
                    f"{result['calls'] * result['keys_per_call']:,}",
                    ", ".join(f"{number:,}" for number in result["clears"]),
                    str(result["keys_lost"]),
                    str(result["keys_cleared_twice"]),
                )
                for result in of("batches")
            ),
        ),
        Table(
            "Lines of code",
            (
                "mode",
                "finishing call",
                "checkpoint",
                "cleanup",
                "of it fence and reservations",
                "of it the thread",
                "together",
            ),
            tuple(
                (
                    result["mode"],
                    *(
                        str(result[part])
                        for part in ("call", "checkpoint", "cleanup", "fence", "thread", "total")
                    ),
                )
                for result in of("lines")
            ),
        ),
    )


def _ms(seconds: float) -> str:
    return shown(seconds * 1e3)


def _ms_spread(spread: Mapping[str, Any]) -> str:
    scaled = {name: spread[name] * 1e3 for name in ("median", "low", "high")}
    return shown_spread(Spread(**scaled, rounds=spread["rounds"]))


def _reply_table(title: str, results: Sequence[Mapping[str, Any]], *, checkpoints: bool) -> Table:
    columns: tuple[str, ...] = (
        "clear",
        "calls at once",
        "calls/s",
        "mode",
        "reply p50, ms (quartiles)",
        "p99, ms",
        "calls",
        "clears",
        "keys per clear",
        "backlog at most, keys",
    )
    rows = []
    for result in results:
        if result["checkpoints"] != checkpoints:
            continue
        row: tuple[str, ...] = (
            f"{result['clear_s'] * 1e3:g} ms",
            str(result["calls_at_once"]),
            shown(result["calls_per_second"]),
            result["mode"],
            _ms_spread(result["reply_s"]),
            _ms(result["reply_p99_s"]),
            f"{result['calls']:,}",
            f"{result['clears']:,}",
            shown(result["keys_per_clear"]),
            f"{result['peak_backlog_keys']:,}",
        )
        if checkpoints:
            row += (_ms(result["drain_s"]["median"]), _ms(result["drain_max_s"]))
        rows.append(row)
    if checkpoints:
        columns += ("fence and drain p50, ms", "at most, ms")
    return Table(title, columns, tuple(rows))


def _fence_table(results: Sequence[Mapping[str, Any]]) -> Table:
    return Table(
        "Fence and drain, while clears follow one another without a rest",
        (
            "clear",
            "mode",
            "checkpoints",
            "p50, ms (quartiles)",
            "at most, ms",
            "clears waited for, at most",
            "longest of a round beyond cleanup off, in clears (quartiles)",
        ),
        tuple(
            (
                f"{result['clear_s'] * 1e3:g} ms",
                result["mode"],
                str(result["drain_s"]["rounds"]),
                _ms_spread(result["drain_s"]),
                _ms(result["drain_max_s"]),
                str(result["clears_waited_for"]),
                "–" if result["mode"] == "off" else shown_spread(Spread(**result["extra_clears"])),
            )
            for result in results
        ),
    )


def _load_table(results: Sequence[Mapping[str, Any]]) -> Table:
    return Table(
        "Replies against what one thread can clear",
        (
            "asked for",
            "calls/s",
            "mode",
            "answered/s",
            "reply p50, ms (quartiles)",
            "p99, ms",
            "calls",
            "keys per clear",
            "backlog at most, keys",
        ),
        tuple(
            (
                f"{result['share']:.0%}",
                shown(result["calls_per_second"]),
                result["mode"],
                shown(result["answered_per_second"]),
                _ms_spread(result["reply_s"]),
                _ms(result["reply_p99_s"]),
                f"{result['calls']:,}",
                shown(result["keys_per_clear"]),
                f"{result['peak_backlog_keys']:,}",
            )
            for result in results
        ),
    )
