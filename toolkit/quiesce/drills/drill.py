"""What a drill is, and what came of one.

Rule: plain values, which survive JSON. Nothing here suspends.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quiesce.drills.holes import Holes
    from quiesce.drills.target import DrillTarget

__all__ = ["Drill", "DrillResult", "Fired", "Inject"]

Inject = Callable[["DrillTarget", "Holes"], Awaitable[None]]
"""Opens a hole. It returns when something is broken; or, for what only a cut can show, when the next cut will be."""


@dataclass(frozen=True, slots=True)
class Drill:
    """An injected fault, and what it breaks.

    Attributes:
        name: Its name, in kebab-case.
        summary: What goes wrong, in one sentence.
        hole: The mistake in somebody's code through which a run could come to it.
        expected: The invariants that it breaks: these fire, once each, and no other.
        inject: Opens the hole.
        at_once: Whether no cut is needed to see it; False for what only a cut shows, None if either may come first.
        mentions: What the message of the first expected invariant says.
        options: Configuration of the controller that a run needs for it, by key.
    """

    name: str
    summary: str
    hole: str
    expected: tuple[str, ...]
    inject: Inject = field(compare=False, repr=False)
    at_once: bool | None = True
    mentions: str = ""
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def when(self) -> str:
        """When it is seen, in words."""
        return {True: "within a second", False: "at the next cut", None: "within a second, or at the cut"}[
            self.at_once
        ]


@dataclass(frozen=True, slots=True)
class Fired:
    """A record that began during a drill.

    Attributes:
        invariant: What does not hold.
        severity: How bad that is.
        seconds: How long after the hole did its work.
        key: The record's key.
        origin: Who saw it: ``live``, ``sweep`` or ``cut``.
        message: What it says.
        groups: Groups at fault.
    """

    invariant: str
    severity: str
    seconds: float
    key: str
    origin: str
    message: str
    groups: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DrillResult:
    """What came of a drill.

    Attributes:
        drill: Its name.
        expected: The invariants that it breaks in this run.
        fired: The records that began, in that order.
        inactive: Invariants that it would break too, which do not apply to this run, with the reasons.
        seconds: How long it took in all.
        booked: Groups at fault that were dropped for it, as a refused checkpoint would have done.
    """

    drill: str
    expected: tuple[str, ...]
    fired: tuple[Fired, ...]
    inactive: Mapping[str, str] = field(default_factory=dict, hash=False)
    seconds: float = 0.0
    booked: tuple[str, ...] = ()

    @property
    def missing(self) -> tuple[str, ...]:
        """Expected invariants that did not fire."""
        names = {fired.invariant for fired in self.fired}
        return tuple(name for name in self.expected if name not in names)

    @property
    def surplus(self) -> tuple[Fired, ...]:
        """Records that were not expected: of another invariant, or a second one of the same."""
        seen: set[str] = set()
        surplus = []
        for fired in self.fired:
            if fired.invariant not in self.expected or fired.invariant in seen:
                surplus.append(fired)
            seen.add(fired.invariant)
        return tuple(surplus)

    @property
    def ok(self) -> bool:
        """Whether exactly the expected invariants fired, once each."""
        return not self.missing and not self.surplus

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            **asdict(self),
            "ok": self.ok,
            "missing": list(self.missing),
            "surplus": [fired.invariant for fired in self.surplus],
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> DrillResult:
        """Build it from what :meth:`to_json` made.

        Raises:
            KeyError: If a value is missing.
            TypeError: If one is of another kind.
        """
        fired = tuple(
            Fired(**{**record, "groups": tuple(record.get("groups", ()))}) for record in values["fired"]
        )
        return cls(
            drill=values["drill"],
            expected=tuple(values["expected"]),
            fired=fired,
            inactive=dict(values["inactive"]),
            seconds=float(values["seconds"]),
            booked=tuple(values["booked"]),
        )
