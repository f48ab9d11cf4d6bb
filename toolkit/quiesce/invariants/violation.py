"""One finding: an invariant that does not hold, with its evidence.

Rule: a violation is a frozen value that explains itself; whoever receives it needs nothing else. Nothing here
suspends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["Severity", "Violation"]

Severity = Literal["critical", "warning"]


@dataclass(frozen=True, slots=True)
class Violation:
    """An invariant that does not hold.

    Attributes:
        invariant: Its name.
        severity: ``critical`` or ``warning``.
        message: One sentence that names what is at fault.
        groups: Ids of the prompt groups at fault, all of them.
        owners: The owners that contradict each other, where that is the fault.
        cut_id: The cut in which it was found.
        evidence: The values that contradict each other; JSON values only.
    """

    invariant: str
    severity: Severity
    message: str
    groups: tuple[str, ...] = ()
    owners: tuple[str, ...] = ()
    cut_id: str = ""
    evidence: Mapping[str, Any] = field(default_factory=dict, hash=False)

    @property
    def identity(self) -> tuple[str, tuple[str, ...], tuple[str, ...], str]:
        """What makes two findings the same one, whatever cut they were found in."""
        return (self.invariant, self.groups, self.owners, "" if self.groups else self.message)

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "invariant": self.invariant,
            "severity": self.severity,
            "message": self.message,
            "groups": list(self.groups),
            "owners": list(self.owners),
            "cut_id": self.cut_id,
            "evidence": dict(self.evidence),
        }

    def __str__(self) -> str:
        """Return one readable line."""
        return f"{self.severity} {self.invariant}: {self.message}"
