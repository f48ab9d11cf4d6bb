"""Owners to test: a ledger, a pool, a buffer and an account behind one barrier, and the groups that they move."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from quiesce.accounting import Accounting
from quiesce.barrier import DataPlaneCheckpointBarrier
from quiesce.buffer import ReplayBuffer
from quiesce.ledger import RolloutLedger
from quiesce.observers import Hub
from quiesce.spares import SparePool
from quiesce.testing import EventRecorder, strict_hub
from quiesce.types import BufferEntry, GroupRecord, PromptRef, RowKey


class Rows:
    """A data plane that only knows which keys it has."""

    def __init__(self) -> None:
        self.there: set[RowKey] = set()

    def missing(self, keys: Iterable[RowKey]) -> tuple[RowKey, ...]:
        """Return those that are not there."""
        return tuple(key for key in keys if key not in self.there)


@dataclass
class Owners:
    """Everything that can own a group, on one barrier."""

    recorder: EventRecorder = field(default_factory=EventRecorder)
    hub: Hub = field(init=False)
    barrier: DataPlaneCheckpointBarrier = field(init=False)
    ledger: RolloutLedger = field(init=False)
    spares: SparePool = field(init=False)
    rows: Rows = field(init=False)
    buffer: ReplayBuffer = field(init=False)
    accounting: Accounting = field(init=False)

    def __post_init__(self) -> None:
        """Build them."""
        self.hub = strict_hub(self.recorder)
        self.barrier = DataPlaneCheckpointBarrier(hub=self.hub)
        self.ledger = RolloutLedger(self.barrier)
        self.spares = SparePool(self.barrier)
        self.rows = Rows()
        self.buffer = ReplayBuffer(self.barrier, self.ledger, self.rows)
        self.accounting = Accounting(self.barrier)


def ref(position: int, epoch: int = 0) -> PromptRef:
    """Return the prompt at a position; its dataset index is something else."""
    return PromptRef(epoch, position, 1000 + position)


def record(position: int, **changes: object) -> GroupRecord:
    """Return the reserved group of a prompt."""
    prompt = ref(position)
    return GroupRecord(prompt.group_id, 0, prompt, **changes)  # type: ignore[arg-type] # passed on


def keys_of(group_id: str, attempt: int = 0, generations: int = 2) -> tuple[RowKey, ...]:
    """Return the final keys of a group."""
    return tuple(RowKey(1, group_id, generation, attempt) for generation in range(generations))


def entry(position: int, *, target_step: int | None = None) -> BufferEntry:
    """Return the entry of a finished group."""
    prompt = ref(position)
    return BufferEntry(
        group_id=prompt.group_id,
        admission_id=0,
        prompt=prompt,
        attempt=0,
        target_step=target_step,
        start_version=0,
        generated_from=0,
        generated_to=0,
        keys=keys_of(prompt.group_id),
    )
