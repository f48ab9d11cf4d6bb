"""The small frozen records that every primitive passes around.

Rule: a record is replaced, never edited, so a reference to it is a snapshot of it. Nothing here suspends.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

from quiesce.errors import RowKeyError

__all__ = [
    "DROP_REASONS",
    "ENDS",
    "OUTCOMES",
    "OWNERS",
    "PHASES",
    "BufferEntry",
    "GroupPhase",
    "GroupRecord",
    "PromptRef",
    "RowKey",
    "group_ids",
]

OWNERS: Final = ("ledger", "spares", "buffer", "training")
"""Where a live prompt group can be."""

ENDS: Final = ("trained", "dropped")
"""How a prompt group ends."""

OUTCOMES: Final = ("completed", "failed", "cancelled", "skipped", "refused")
"""How a section, a phase or an attempt ends."""

PHASES: Final = ("fence", "drain", "exclusive", "verify", "stage", "write", "publish")
"""The phases of a checkpoint; the window is ``drain`` and ``exclusive``."""

DROP_REASONS: Final = ("failed", "stale_abort", "evicted", "violation")
"""Why a group was dropped: its rollouts failed for good, it aged out unfinished, it aged out in the buffer,
or a checkpoint's verification found it at fault."""

GroupPhase = Literal["reserved", "admitted"]


@dataclass(frozen=True, slots=True)
class PromptRef:
    """A prompt by reference, never its payload.

    Attributes:
        epoch: Which pass over the dataset read it, from 0.
        position: Its 0-based place in that epoch's reading order; accounting counts positions.
        index: Its index in the dataset; a restore reads the payload again with it.
    """

    epoch: int
    position: int
    index: int

    @property
    def group_id(self) -> str:
        """The id of the one prompt group that this reading can become."""
        return f"e{self.epoch:03d}-p{self.position:07d}"


@dataclass(frozen=True, slots=True)
class GroupRecord:
    """A ledger entry: a group from its reservation until it is buffered, dropped or substituted.

    Attributes:
        group_id: Stable id, also across restores.
        admission_id: The batch that it was reserved with; minted in admission order.
        prompt: The prompt by reference.
        phase: ``reserved``, then ``admitted``, once each.
        target_step: The step stamped at admission, or None (samplers that stamp nothing; reserved groups).
        start_version: The trainer version at its batch's admission; None while reserved.
        attempt: 0-based number of the rollout attempt that the ledger waits for.
    """

    group_id: str
    admission_id: int
    prompt: PromptRef
    phase: GroupPhase = "reserved"
    target_step: int | None = None
    start_version: int | None = None
    attempt: int = 0


# Numbers are padded with zeros to a least width, and only to that: so what matches is what `encode` makes.
_KEY = re.compile(
    r"i(\d{8})/([A-Za-z0-9_.:-]{1,96})/a(\d{2}|[1-9]\d{2,5})/g(\d{3}|[1-9]\d{3,5})/(?:final|c(\d{6}|[1-9]\d{6,8}))",
    re.ASCII,
)
_PADDED_KEY = re.compile(
    r"i\d{8}/[A-Za-z0-9_.:-]{1,96}/a\d{2,6}/g\d{3,6}/(?:final|c\d{6,9})",
    re.ASCII,
)


@dataclass(frozen=True, slots=True)
class RowKey:
    """The key of one row in the data plane.

    Attributes:
        incarnation: The incarnation of the run that put it.
        group_id: The prompt group.
        generation: 0-based generation within the group.
        attempt: The rollout attempt that produced it.
        sequence: None for the final row; 0, 1, … for the chunk rows that are staged while a call generates.
    """

    incarnation: int
    group_id: str
    generation: int
    attempt: int
    sequence: int | None = None

    def encode(self) -> str:
        """Return the ASCII form, under 200 bytes; keys of one group share a prefix."""
        tail = "final" if self.sequence is None else f"c{self.sequence:06d}"
        return f"i{self.incarnation:08d}/{self.group_id}/a{self.attempt:02d}/g{self.generation:03d}/{tail}"

    @classmethod
    def decode(cls, text: str) -> RowKey:
        """Parse what :meth:`encode` made.

        Raises:
            RowKeyError: If the text is anything else.
        """
        found = _KEY.fullmatch(text)
        if found is None:
            if _PADDED_KEY.fullmatch(text):
                raise RowKeyError(
                    text, "not in canonical form: a number is padded with more zeros than it needs"
                )
            raise RowKeyError(text, "expected iNNNNNNNN/<group>/aNN/gNNN/final or …/cNNNNNN")
        incarnation, group_id, attempt, generation, sequence = found.groups()
        return cls(
            int(incarnation),
            group_id,
            int(generation),
            int(attempt),
            None if sequence is None else int(sequence),
        )

    @staticmethod
    def prefix(incarnation: int, group_id: str, attempt: int | None = None) -> str:
        """Return the text that all keys of a group (or of one of its attempts) start with."""
        group = f"i{incarnation:08d}/{group_id}/"
        return group if attempt is None else f"{group}a{attempt:02d}/"


@dataclass(frozen=True, slots=True)
class BufferEntry:
    """A finished group in the replay buffer's index.

    Attributes:
        group_id: The prompt group.
        admission_id: The batch that it was admitted with.
        prompt: The prompt by reference.
        attempt: The attempt that finished.
        target_step: The step stamped at admission, or None.
        start_version: The trainer version at its batch's admission; staleness is counted from here.
        generated_from: Oldest weight version that generated a token of it.
        generated_to: Newest weight version that generated a token of it.
        keys: Final row of each generation, in generation order.
        stats: Small finite numbers to show (mean reward, tokens).
    """

    group_id: str
    admission_id: int
    prompt: PromptRef
    attempt: int
    target_step: int | None
    start_version: int
    generated_from: int
    generated_to: int
    keys: tuple[RowKey, ...]
    stats: Mapping[str, float] = field(default_factory=dict)


def group_ids(items: Sequence[GroupRecord | BufferEntry]) -> tuple[str, ...]:
    """Return the ids of records or entries, in order."""
    return tuple(item.group_id for item in items)
