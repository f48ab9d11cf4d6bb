"""Labels of metrics with their closed sets of values, and the buckets of histograms.

Rule: a label has a closed set of values, so the number of series is known before a run starts; where a
primitive has the set, it is the primitive's. Nothing here suspends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

__all__ = [
    "ADMISSION_PATHS",
    "CALL_BUCKETS",
    "CHECKPOINT_PARTS",
    "CHECKPOINT_REASONS",
    "CUT_PARTS",
    "DATAPLANE_OPS",
    "ENDED",
    "EXPORT_BUCKETS",
    "GPU_MEMORY",
    "IDLE_CAUSES",
    "INVARIANTS",
    "OBJECTIVES",
    "OPERATION_BUCKETS",
    "OTHER",
    "PHASE_BUCKETS",
    "RESTORE_PARTS",
    "RESTORE_REASONS",
    "ROLES",
    "RUN_STATES",
    "SINK_FATES",
    "SLOT_BUCKETS",
    "SLOT_STATES",
    "SPAN_FATES",
    "SPAN_SINKS",
    "STALL_CAUSES",
    "VERSION_BUCKETS",
    "WAIT_BUCKETS",
    "WINDOW_OPS",
    "WINDOW_PHASES",
    "WORKER_LIMIT",
    "WORK_BUCKETS",
    "Label",
]

OTHER: Final = "other"
"""The label value of anything that its closed set does not know, so that a surprise is still counted."""

ROLES: Final = (
    "barrier",
    "ledger",
    "spares",
    "buffer",
    "accounting",
    "dataplane",
    "sampler",
    "trainer_version",
    "snapshot_gate",
    "cleanup",
    "engine",
    "gpu",
    "tracing",
)
"""Roles of the parts of a run, mostly those under which primitives attach themselves to a hub; a family exists
once a role that it needs is there."""


@dataclass(frozen=True, slots=True)
class Label:
    """A label and the values that it can have.

    Attributes:
        name: The label's name.
        values: The closed set.
        extended: Whether the barrier's own further kinds are added when it attaches.
        constant: Whether the value is not from a set but fixed for the run (a sampler's class name, say).
    """

    name: str
    values: tuple[str, ...] = ()
    extended: bool = False
    constant: bool = False


ENDED: Final = ("completed", "failed", "cancelled")
"""Outcomes of what can only run to its end, raise, or be cancelled: sections, phases."""

CHECKPOINT_REASONS: Final = (
    "",
    "nothing_changed",
    "not_needed",
    "drain_timeout",
    "invariant",
    "disk",
    "permission",
    "io",
    "previous_write",
    "superseded",
    "cancelled",
    "error",
    OTHER,
)
"""Why an attempt to save ended otherwise than completed."""

RESTORE_REASONS: Final = (
    "nothing_usable",
    "part_missing",
    "corrupt",
    "schema",
    "suspect",
    "cursor",
    "capacity",
    "rows",
    "config",
    "error",
    OTHER,
)
"""Why a restore refused."""

RESTORE_PARTS: Final = (
    "verify",
    "documents",
    "rows",
    "prompts",
    "trainer",
    OTHER,
)
"""What the time of a restore is split into."""

CHECKPOINT_PARTS: Final = ("all", "rows", "trainer", "documents")
"""What the size of a checkpoint is told of: all of it, and what it is made of."""

CUT_PARTS: Final = ("cursor", "position", "spares", "buffer", "ledger", "rows")
"""The six artifacts of a cut, in the order in which they are captured."""

INVARIANTS: Final = (
    "single_owner",
    "conservation",
    "cursor_covers_buffer",
    "cursor_within_lookahead",
    "window_is_exclusive",
    "cut_is_one_instant",
    "rows_present",
    "rows_not_orphaned",
    "digest_matches",
    "gate_is_respected",
    "versions_grow",
    "checkpoint_progress",
)
"""What the auditor checks."""

RUN_STATES: Final = ("starting", "running", "stopping", "finished", "failed")
"""The life of a run."""

STALL_CAUSES: Final = ("previous_write", "fence", "window", "stage")
"""What a save holds the trainer up with."""

IDLE_CAUSES: Final = ("groups", "sync")
"""What a trainer waits for when it does not train: groups to train on, weights to be synchronised."""

DATAPLANE_OPS: Final = ("put", "get", "clear", "keys", "snapshot", "write")
"""Operations of a data plane."""

WINDOW_OPS: Final = ("keys", "snapshot", "write")
"""Those of them that saving and restoring do: a process without a barrier seldom does any."""

ADMISSION_PATHS: Final = ("transactional", "fallback")
"""How a batch was admitted: gate wait outside the slot, or a custom sampler's whole ``admit()`` inside."""

SLOT_STATES: Final = ("active", "waiting")
"""A mutation slot that is held, or that waits for a checkpoint window to end."""

OBJECTIVES: Final[Mapping[str, float]] = {"drain": 1.0, "exclusive": 0.005}
"""Seconds that a phase of the window is meant to stay under; longer ones are counted, not refused."""

WINDOW_PHASES: Final = tuple(OBJECTIVES)
"""The phases that make a checkpoint window."""

SPAN_FATES: Final = ("exported", "sampled", "dropped", "failed")
"""What becomes of a span: taken by a sink, left out past the budget, lost for want of room or time, refused
by every sink."""

SPAN_SINKS: Final = ("recorder", "otlp", "wandb", OTHER)
"""Sinks that are given spans, by the names under which they are switched on, and those that are not ours."""

SINK_FATES: Final = ("exported", "dropped", "failed")
"""What becomes of a span at one sink: taken, lost for want of room or time, refused."""

GPU_MEMORY: Final = ("allocated", "reserved", "total")
"""Memory of a GPU: in tensors, kept by the allocator, and all there is."""

WORKER_LIMIT: Final = 16
"""Workers with series of their own; further ones are added up as ``other``."""


def _decades(lowest: int, highest: int) -> tuple[float, ...]:
    """Return 1, 2.5 and 5 of every decade from 10**lowest, and 10**highest as the last bound.

    Parsed from decimal text, so that a bound is the double nearest to what it says (1e-06, not 9.999e-07).
    """
    steps = [f"{mantissa}e{power}" for power in range(lowest, highest) for mantissa in ("1", "2.5", "5")]
    return tuple(float(text) for text in (*steps, f"1e{highest}"))


SLOT_BUCKETS: Final = _decades(-6, 2)
"""1 µs to 100 s, in seconds: a slot lasts microseconds, and one that holds up a drain a minute."""

WAIT_BUCKETS: Final = (1e-06, 1e-04, 3e-04, 1e-03, 3e-03, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
"""1 µs to 100 s, in seconds, of a slot's wait: there is none, below the first, or it is for a checkpoint window."""

WORK_BUCKETS: Final = (1e-04, 1e-03, 3e-03, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 60.0)
"""100 µs to 1 min, in seconds, of what a rollout worker waits for or does: there are many workers, and each has few
series."""

OPERATION_BUCKETS: Final = (1e-04, 1e-03, 0.01, 0.1, 1.0, 10.0)
"""100 µs to 10 s, in seconds: an operation of a data plane, of which a worker has several kinds."""

EXPORT_BUCKETS: Final = (0.01, 0.1, 1.0, 10.0)
"""10 ms to 10 s, in seconds: a sink is well, slow, or waits for its time limit."""

PHASE_BUCKETS: Final = (*_decades(-4, 1), 20.0, 30.0, 45.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0, 3600.0)
"""100 µs to 1 h, in seconds: an exclusive phase of a fraction of a millisecond, and a write that hung for 20
minutes."""

VERSION_BUCKETS: Final = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0)
"""Trainer versions between a group's admission and its training."""

CALL_BUCKETS: Final = (1.0, 4.0, 16.0, 64.0)
"""Calls whose rows are cleared together."""
