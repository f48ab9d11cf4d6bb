"""Which batch may be admitted, which ready groups a step trains, and how many of them the step needs.

Rule: a sampler keeps one number, its dispatch cursor; everything else it derives from the owners that it is
shown. So drops, evictions, a short last batch or a restored run need no bookkeeping here, and nothing beside
the cursor is saved.

The four samplers, with D = dispatch cursor (starts at -1, one more for each admitted batch), W = trainer
version, S = ``max_staleness_versions``, L = ``max_lookahead_versions``, G = groups a step; a group's *start*
is W at its batch's admission:

================== ===================== ================ ================== ===================
(who)              windowed              weight_fifo      ready_first        in_order
================== ===================== ================ ================== ===================
waits while        never                 D >= W+S         D >= W+S           D >= W+L
stamp              none                  none             none               D after the advance
selects ready with max(0,W-S)<=start<=W  the oldest start start <= W         target = W
                                         in that window
evicts ready with  start < max(0,W-S)    the same         nothing            target < W
aborts unfinished  start < max(0,W-S)    nothing          nothing            nothing
capacity it needs  G                     G(S+1)           G(S+1)             G(L+1)
================== ===================== ================ ================== ===================

How a step ends up with a size (:meth:`Sampler.step_target`), and why it cannot wait for ever: a step needs G
groups only while more groups can come *before the trainer version moves*. None can come when the run has
admitted everything (``exhausted``), when the admission gate is shut until the version moves, or when the next
batch does not fit beside the groups that this step could train. Then the step takes all that is owned, and
with nothing owned behind a shut gate it is passed (0), because only the version that it ends with opens the
gate.

Yield rule: ``wait_until_admissible`` suspends until the trainer version opens the gate, on the version's own
signal, never by polling; nothing else suspends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final, Protocol, runtime_checkable

from quiesce.errors import ConfigError

if TYPE_CHECKING:
    from quiesce.barrier import DataPlaneCheckpointBarrier, MutationCut
    from quiesce.signals import TrainerVersion
    from quiesce.types import BufferEntry, GroupRecord

__all__ = [
    "START_CURSOR",
    "BuiltInSampler",
    "InOrderSampler",
    "OnePieceAdmissionSampler",
    "OwnersView",
    "ReadyFirstSampler",
    "Sampler",
    "SamplerStatistics",
    "TransactionalAdmissionSampler",
    "WeightFifoSampler",
    "WindowedSampler",
    "plan_step",
    "stamped_target",
    "unstamped_target",
]

START_CURSOR: Final = -1
"""The dispatch cursor before the first admission."""


@dataclass(frozen=True, slots=True)
class OwnersView:
    """What a sampler decides from: the owners at one moment, by reference.

    Take it between steps, when nothing is claimed for training; build it and act on it without an await in
    between.

    Attributes:
        ledger: All groups of the ledger, reserved and admitted.
        ready: The ready groups of the buffer, oldest first.
        exhausted: Whether nothing more can ever be admitted: reading has ended, and neither a spare nor a
            reserved group is left.
        capacity: How many admitted, ready and claimed groups there may be at once; the rollout pump waits for
            room for a whole batch before it admits it.
    """

    ledger: Collection[GroupRecord]
    ready: Collection[BufferEntry]
    exhausted: bool
    capacity: int

    def admitted(self) -> Iterator[tuple[GroupRecord, int]]:
        """Yield the unfinished groups that are admitted, each with its start version."""
        for record in self.ledger:
            if record.start_version is not None:  # admission is what sets it
                yield record, record.start_version

    def next_batch_fits(self, owned: int, groups_per_step: int) -> bool:
        """Tell whether the batch that is admitted next has room beside so many groups.

        Args:
            owned: The groups that stay until a step trains them; stale ones leave by themselves and do not
                count.
            groups_per_step: The size to expect of a batch that is not reserved yet.
        """
        batches = Counter(record.admission_id for record in self.ledger if record.phase == "reserved")
        size = batches[min(batches)] if batches else groups_per_step
        return owned + size <= self.capacity


class Sampler(Protocol):
    """What the controller, the checkpoint and the auditor need of a sampler.

    A sampler also has one of the two admission protocols: :class:`TransactionalAdmissionSampler`, as all
    built-in ones do, or :class:`OnePieceAdmissionSampler`.
    """

    @property
    def name(self) -> str:
        """What configuration and logs call it."""
        ...

    @property
    def stamps_target_steps(self) -> bool:
        """Whether an admission stamps its batch with the step that will train it."""
        ...

    @property
    def dispatch_cursor(self) -> int:
        """How many batches were admitted, less one."""
        ...

    def restore_cursor(self, cursor: int) -> None:
        """Set the dispatch cursor to exactly the saved value.

        Raises:
            ValueError: If it is below -1.
        """
        ...

    def required_capacity(self, groups_per_step: int) -> int:
        """Return the buffer capacity, in groups, below which the run could stand still."""
        ...

    def is_admissible(self, version: int) -> bool:
        """Tell whether the gate is open at that trainer version; pure."""
        ...

    def select(self, view: OwnersView, version: int, count: int) -> tuple[str, ...]:
        """Return up to ``count`` ids of ready groups that a step at that version may train, in order."""
        ...

    def step_target(self, view: OwnersView, version: int, groups_per_step: int) -> int | None:
        """Return how many groups the step at that version trains.

        Returns:
            A number of groups; 0 to pass the step without an optimizer step; None while that cannot be said
            yet.
        """
        ...

    def evictable(self, view: OwnersView, version: int) -> tuple[str, ...]:
        """Return the ids of the ready groups that no step will train any more."""
        ...

    def aborts(self, record: GroupRecord, version: int) -> bool:
        """Tell whether an unfinished group is so stale that its rollouts are to be aborted."""
        ...


@runtime_checkable
class TransactionalAdmissionSampler(Protocol):
    """Admission in two steps: a wait that holds nothing, then a commit inside an ``admission`` slot."""

    async def wait_until_admissible(self, versions: TrainerVersion) -> None:
        """Suspend until the gate is open; changes nothing, holds nothing."""
        ...

    def commit_admission(self, cut: MutationCut) -> int | None:
        """Advance the dispatch cursor by one and return the stamp of the batch, or None."""
        ...


@runtime_checkable
class OnePieceAdmissionSampler(Protocol):
    """Admission in one piece, for custom samplers: correct, but a checkpoint waits for its gate."""

    async def admit(self, versions: TrainerVersion) -> int | None:
        """Wait at the gate, advance the dispatch cursor by one, and return the batch's stamp or None."""
        ...


def plan_step(
    sampler: Sampler, view: OwnersView, version: int, groups_per_step: int
) -> tuple[str, ...] | None:
    """Decide the next step: the one place where target and selection meet.

    Evict what :meth:`Sampler.evictable` names first. Claim what this returns in the same await-free step.

    Args:
        sampler: The sampler.
        view: The owners now.
        version: The trainer version now.
        groups_per_step: Groups of a full step.

    Returns:
        The ids to claim, in training order; an empty tuple to pass the step without an optimizer step, the
        version still advancing; None to wait until an owner moves, the run is exhausted, or a batch is
        admitted.
    """
    target = sampler.step_target(view, version, groups_per_step)
    if target is None:
        return None
    if target == 0:
        return ()
    chosen = sampler.select(view, version, target)
    return chosen if len(chosen) >= target else None


def unstamped_target(view: OwnersView, groups_per_step: int, *, owned: int, gate_open: bool) -> int | None:
    """Return the step target of a sampler that stamps no steps.

    Args:
        view: The owners now.
        groups_per_step: Groups of a full step.
        owned: Admitted and ready groups that the step could train.
        gate_open: Whether a batch can be admitted before the trainer version moves.
    """
    if owned >= groups_per_step:
        return groups_per_step
    if gate_open and not view.exhausted and view.next_batch_fits(owned, groups_per_step):
        return groups_per_step
    if owned:
        return owned
    # Nothing to train. Behind a shut gate only a passed step brings more; else more comes, or never does.
    return None if gate_open or view.exhausted else 0


def stamped_target(view: OwnersView, version: int, cursor: int) -> int | None:
    """Return the step target of a sampler that stamps steps: what is ready, once no more can be.

    Args:
        view: The owners now.
        version: The trainer version, which is the step.
        cursor: The dispatch cursor.
    """
    if cursor < version:
        return None  # the step's batch is not admitted yet, and the gate is open for it
    if any(record.target_step == version for record in view.ledger):
        return None  # it will be ready, or leave
    if view.exhausted and not view.ledger and not view.ready:
        return None  # there are no further steps
    return sum(entry.target_step == version for entry in view.ready)


@dataclass(frozen=True, slots=True)
class SamplerStatistics:
    """What a sampler is doing.

    Attributes:
        name: Its name.
        dispatch_cursor: See :attr:`Sampler.dispatch_cursor`.
        stamps_target_steps: See :attr:`Sampler.stamps_target_steps`.
    """

    name: str
    dispatch_cursor: int
    stamps_target_steps: bool


class BuiltInSampler:
    """What the four built-in samplers share: the cursor, the gate and the two-step admission.

    Args:
        barrier: The barrier whose cuts :meth:`commit_admission` accepts.
    """

    name: ClassVar[str]
    stamps_target_steps: ClassVar[bool] = False

    def __init__(self, barrier: DataPlaneCheckpointBarrier) -> None:
        self._barrier = barrier
        self._cursor = START_CURSOR

    @property
    def dispatch_cursor(self) -> int:
        """How many batches were admitted, less one."""
        return self._cursor

    def restore_cursor(self, cursor: int) -> None:
        """Set the dispatch cursor to exactly the saved value.

        Raises:
            ValueError: If it is below -1.
        """
        if cursor < START_CURSOR:
            raise ValueError(f"a dispatch cursor cannot be {cursor}: it starts at {START_CURSOR}")
        self._cursor = cursor

    def is_admissible(self, version: int) -> bool:
        """Tell whether the gate is open at that trainer version; pure."""
        raise NotImplementedError

    async def wait_until_admissible(self, versions: TrainerVersion) -> None:
        """Suspend until the trainer version opens the gate.

        Cancellation: leaves no trace.
        """
        await versions.wait_until(self.is_admissible)

    def commit_admission(self, cut: MutationCut) -> int | None:
        """Advance the dispatch cursor by one; await-free.

        Args:
            cut: The ``admission`` slot that the caller holds.

        Returns:
            The stamp of the batch, or None.

        Raises:
            CutError: If the cut proves nothing here; the cursor stays.
        """
        cut.check(self._barrier, "mutation")
        self._cursor += 1
        return self._cursor if self.stamps_target_steps else None

    def evictable(self, view: OwnersView, version: int) -> tuple[str, ...]:
        """Return the ids of the ready groups that no step will train any more."""
        return ()

    def aborts(self, record: GroupRecord, version: int) -> bool:
        """Tell whether an unfinished group is so stale that its rollouts are to be aborted."""
        return False

    def statistics(self) -> SamplerStatistics:
        """Return name, cursor and whether steps are stamped."""
        return SamplerStatistics(self.name, self._cursor, self.stamps_target_steps)


class _Stale(BuiltInSampler):
    """What the three samplers share that count staleness from a group's start version."""

    def __init__(self, barrier: DataPlaneCheckpointBarrier, max_staleness_versions: int) -> None:
        super().__init__(barrier)
        self._staleness = _window("sampler.max_staleness_versions", max_staleness_versions)

    def is_admissible(self, version: int) -> bool:
        """Tell whether D < W + S."""
        return self._cursor < version + self._staleness

    def required_capacity(self, groups_per_step: int) -> int:
        """Return G(S+1): every batch that the gate lets in before the oldest is trained."""
        return groups_per_step * (self._staleness + 1)

    def oldest_start(self, version: int) -> int:
        """Return the oldest start version that is not stale."""
        return max(0, version - self._staleness)

    def _in_window(self, start: int, version: int) -> bool:
        return self.oldest_start(version) <= start <= version

    def _stale_entries(self, view: OwnersView, version: int) -> tuple[str, ...]:
        return tuple(
            entry.group_id for entry in view.ready if entry.start_version < self.oldest_start(version)
        )


class WindowedSampler(_Stale):
    """Trains whatever is fresh enough, and gives up what is not.

    Nothing waits at a gate, so the buffer's capacity is what bounds the lookahead. Groups that age out of the
    window are evicted when ready and aborted when unfinished.

    Args:
        barrier: The barrier whose cuts :meth:`commit_admission` accepts.
        max_staleness_versions: S, how many versions a group's start may lie behind the trainer.
        sample_freshest_first: Train the newest start first, instead of the order in which groups became
            ready.
    """

    name = "windowed"

    def __init__(
        self,
        barrier: DataPlaneCheckpointBarrier,
        max_staleness_versions: int = 1,
        *,
        sample_freshest_first: bool = False,
    ) -> None:
        super().__init__(barrier, max_staleness_versions)
        self._freshest_first = sample_freshest_first

    def is_admissible(self, version: int) -> bool:
        """Return True: this sampler has no gate."""
        return True

    def required_capacity(self, groups_per_step: int) -> int:
        """Return G."""
        return groups_per_step

    def select(self, view: OwnersView, version: int, count: int) -> tuple[str, ...]:
        """Return up to ``count`` ready groups of the staleness window."""
        fresh = [entry for entry in view.ready if self._in_window(entry.start_version, version)]
        if self._freshest_first:
            fresh.sort(key=lambda entry: -entry.start_version)  # stable: the buffer's order within a start
        return tuple(entry.group_id for entry in fresh[:count])

    def step_target(self, view: OwnersView, version: int, groups_per_step: int) -> int | None:
        """Return G, or all that is fresh and owned when nothing more can be admitted."""
        owned = sum(self._in_window(start, version) for start in _starts(view))
        return unstamped_target(view, groups_per_step, owned=owned, gate_open=True)

    def evictable(self, view: OwnersView, version: int) -> tuple[str, ...]:
        """Return the ready groups whose start is older than the window."""
        return self._stale_entries(view, version)

    def aborts(self, record: GroupRecord, version: int) -> bool:
        """Tell whether an unfinished group's start is older than the window."""
        return record.start_version is not None and record.start_version < self.oldest_start(version)


class WeightFifoSampler(_Stale):
    """Trains groups in the order of the weights that they started from.

    Only the oldest start that anybody owns is trained, also while it is still unfinished: a fast batch never
    overtakes a slow one.

    Args:
        barrier: The barrier whose cuts :meth:`commit_admission` accepts.
        max_staleness_versions: S, how far the dispatch cursor may run ahead of the trainer version.
    """

    name = "weight_fifo"

    def __init__(self, barrier: DataPlaneCheckpointBarrier, max_staleness_versions: int = 1) -> None:
        super().__init__(barrier, max_staleness_versions)

    def select(self, view: OwnersView, version: int, count: int) -> tuple[str, ...]:
        """Return up to ``count`` ready groups of the oldest start that ledger or buffer own."""
        oldest = self._oldest_owned(view, version)
        ids = (entry.group_id for entry in view.ready if entry.start_version == oldest)
        return tuple(ids)[:count]

    def step_target(self, view: OwnersView, version: int, groups_per_step: int) -> int | None:
        """Return min(G, owned groups with the oldest start)."""
        oldest = self._oldest_owned(view, version)
        if oldest is None:
            # All that the gate let in was dropped or has aged out. The gate opens with the version: pass the
            # step.
            return None if view.exhausted or self.is_admissible(version) else 0
        return min(groups_per_step, sum(start == oldest for start in _starts(view)))

    def evictable(self, view: OwnersView, version: int) -> tuple[str, ...]:
        """Return the ready groups whose start is older than the window."""
        return self._stale_entries(view, version)

    def _oldest_owned(self, view: OwnersView, version: int) -> int | None:
        return min((start for start in _starts(view) if self._in_window(start, version)), default=None)


class ReadyFirstSampler(_Stale):
    """Trains whatever is ready first, and never gives a group up.

    Args:
        barrier: The barrier whose cuts :meth:`commit_admission` accepts.
        max_staleness_versions: S, how far the dispatch cursor may run ahead of the trainer version.
    """

    name = "ready_first"

    def __init__(self, barrier: DataPlaneCheckpointBarrier, max_staleness_versions: int = 1) -> None:
        super().__init__(barrier, max_staleness_versions)

    def select(self, view: OwnersView, version: int, count: int) -> tuple[str, ...]:
        """Return up to ``count`` ready groups, in the buffer's order."""
        ids = (entry.group_id for entry in view.ready if entry.start_version <= version)
        return tuple(ids)[:count]

    def step_target(self, view: OwnersView, version: int, groups_per_step: int) -> int | None:
        """Return G, or all that is owned when nothing more can be admitted before the version moves."""
        owned = sum(start <= version for start in _starts(view))
        return unstamped_target(view, groups_per_step, owned=owned, gate_open=self.is_admissible(version))


class InOrderSampler(BuiltInSampler):
    """Trains batches in the order of their admission: each is stamped with its step.

    Args:
        barrier: The barrier whose cuts :meth:`commit_admission` accepts.
        max_lookahead_versions: L, how many steps ahead of the trainer a batch may be stamped.
    """

    name = "in_order"
    stamps_target_steps = True

    def __init__(self, barrier: DataPlaneCheckpointBarrier, max_lookahead_versions: int = 1) -> None:
        super().__init__(barrier)
        self._lookahead = _window("sampler.max_lookahead_versions", max_lookahead_versions)

    def is_admissible(self, version: int) -> bool:
        """Tell whether D < W + L."""
        return self._cursor < version + self._lookahead

    def required_capacity(self, groups_per_step: int) -> int:
        """Return G(L+1): the step in training and every step that may be stamped ahead of it."""
        return groups_per_step * (self._lookahead + 1)

    def select(self, view: OwnersView, version: int, count: int) -> tuple[str, ...]:
        """Return up to ``count`` ready groups stamped with this step, in the order in which they were read.

        The order in which rollouts happened to finish would make two runs of one seed train differently.
        """
        stamped = [entry for entry in view.ready if entry.target_step == version]
        stamped.sort(key=lambda entry: (entry.prompt.epoch, entry.prompt.position))
        return tuple(entry.group_id for entry in stamped[:count])

    def step_target(self, view: OwnersView, version: int, groups_per_step: int) -> int | None:
        """Return what is ready with this step's stamp, once D >= W and the ledger holds none of it."""
        return stamped_target(view, version, self._cursor)

    def evictable(self, view: OwnersView, version: int) -> tuple[str, ...]:
        """Return the ready groups whose step has passed."""
        return tuple(
            entry.group_id
            for entry in view.ready
            if entry.target_step is not None and entry.target_step < version
        )


def _starts(view: OwnersView) -> Iterator[int]:
    """Yield the start version of every admitted and every ready group."""
    for _, start in view.admitted():
        yield start
    for entry in view.ready:
        yield entry.start_version


def _window(key: str, value: int) -> int:
    if value < 0:
        raise ConfigError(key, f"must be 0 or more versions, not {value}")
    return value
