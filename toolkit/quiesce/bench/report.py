"""What a benchmark found: one JSON object for programs, tables for people and for the documentation.

Rule: tables are made of the same numbers as the JSON object, and say nothing that is not in it. Nothing here
suspends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from quiesce.bench.stats import Spread, rounded

__all__ = ["BenchReport", "Table", "shown", "shown_spread"]

_Kind = Literal["at_most", "at_least", "exactly"]
_SIGNS: Final[dict[_Kind, str]] = {"at_most": "≤", "at_least": "≥", "exactly": "="}


@dataclass(frozen=True, slots=True)
class Table:
    """A table of text.

    Attributes:
        title: What it shows.
        columns: The columns' headings.
        rows: The cells, as many in a row as there are columns.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def to_markdown(self) -> str:
        """Return it as a Markdown table; every column but the first is aligned to the right."""
        rules = ["---", *("---:" for _ in self.columns[1:])]
        lines = [self.columns, tuple(rules), *self.rows]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchReport:
    """What one benchmark found.

    Attributes:
        bench: Its name.
        quick: Whether sizes and rounds were cut down: then the bars show that it works, not what it costs.
        machine: See :func:`quiesce.bench.machine.describe`.
        results: What was measured.
        bars: The numbers that are promised to stay below a target.
        spreads: The spread behind each bar, where it is a median over rounds.
        targets: The target of each bar: at most that, unless it is in one of the next two.
        at_least: The bars whose target is a least value.
        exactly: The bars that have to be their target.
        tables: The same for people.
        answer: The same in a few lines of prose, where the benchmark was made to answer a question.
        parts: The same in parts, where it fills several pages of the documentation; each part's name is its page's.
    """

    bench: str
    quick: bool
    machine: Mapping[str, Any]
    results: Sequence[Mapping[str, Any]]
    bars: Mapping[str, float]
    spreads: Mapping[str, Spread]
    targets: Mapping[str, float]
    at_least: frozenset[str]
    tables: tuple[Table, ...]
    exactly: frozenset[str] = frozenset()
    answer: tuple[str, ...] = ()
    parts: tuple[BenchReport, ...] = ()

    @property
    def missed(self) -> tuple[str, ...]:
        """The bars that are beyond their targets; meaningless for quick runs."""
        return tuple(name for name, value in self.bars.items() if not self._met(name, value))

    def to_json(self) -> dict[str, Any]:
        """Return the whole as one object."""
        return {
            "bench": self.bench,
            "quick": self.quick,
            "machine": dict(self.machine),
            "results": [dict(result) for result in self.results],
            "bars": {name: rounded(value) for name, value in self.bars.items()},
            "spreads": {name: spread.to_json() for name, spread in self.spreads.items()},
            "targets": {name: {self._kind(name): target} for name, target in self.targets.items()},
            "missed": [] if self.quick else list(self.missed),
            **({"answer": list(self.answer)} if self.answer else {}),
        }

    def bars_table(self) -> Table:
        """Return the bars as a table."""
        rows = []
        for name, value in self.bars.items():
            sign = _SIGNS[self._kind(name)]
            verdict = "–" if self.quick else ("met" if self._met(name, value) else "missed")
            spread = self.spreads.get(name)
            rows.append(
                (
                    f"`{name}`",
                    shown(value),
                    "–" if spread is None else f"{shown(spread.low)} … {shown(spread.high)}",
                    "–" if spread is None else str(spread.rounds),
                    f"{sign} {shown(self.targets[name])}",
                    verdict,
                )
            )
        return Table("Bars", ("bar", "measured", "quartiles", "rounds", "target", "verdict"), tuple(rows))

    def _kind(self, name: str) -> _Kind:
        if name in self.exactly:
            return "exactly"
        return "at_least" if name in self.at_least else "at_most"

    def _met(self, name: str, value: float) -> bool:
        target, kind = self.targets[name], self._kind(name)
        if kind == "exactly":
            return value == target
        return value >= target if kind == "at_least" else value <= target


def shown(value: float) -> str:
    """Return a number for people: three significant digits, thousands separated."""
    if value == 0:
        return "0"
    if abs(value) >= 1000:  # noqa: PLR2004 - from here on the separator helps
        return f"{float(f'{value:.3g}'):,.0f}"
    text = f"{value:.3g}"
    return f"{float(text):f}".rstrip("0").rstrip(".") if "e" in text else text


def shown_spread(spread: Spread) -> str:
    """Return a median with its quartiles for people."""
    return f"{shown(spread.median)} ({shown(spread.low)}–{shown(spread.high)})"
