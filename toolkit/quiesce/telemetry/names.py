"""The one catalogue of what telemetry calls things: metrics with their labels and buckets, spans, log events.

Rule: a name, a label or a label value that is not in here is not emitted, and everything in here is emitted
(a test compares both ways). Reference pages, dashboards and rules are derived from these tables. Nothing here
suspends.

Conventions: ``quiesce_<thing>_<quantity>_<unit>`` in base units, ``_total`` on counters and on nothing else.
Label values are closed sets, so the number of series is known before a run starts; ids, steps and paths go to
logs and spans. Every series carries ``run`` and ``role`` beside the labels that are listed here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import product
from typing import Final, Literal

from quiesce.barrier import KINDS
from quiesce.telemetry.labels import (
    ADMISSION_PATHS,
    CALL_BUCKETS,
    CHECKPOINT_PARTS,
    CHECKPOINT_REASONS,
    CUT_PARTS,
    DATAPLANE_OPS,
    ENDED,
    EXPORT_BUCKETS,
    GPU_MEMORY,
    IDLE_CAUSES,
    INVARIANTS,
    OBJECTIVES,
    OPERATION_BUCKETS,
    OTHER,
    PHASE_BUCKETS,
    RESTORE_PARTS,
    RESTORE_REASONS,
    ROLES,
    RUN_STATES,
    SINK_FATES,
    SLOT_BUCKETS,
    SLOT_STATES,
    SPAN_FATES,
    SPAN_SINKS,
    STALL_CAUSES,
    VERSION_BUCKETS,
    WAIT_BUCKETS,
    WINDOW_OPS,
    WINDOW_PHASES,
    WORK_BUCKETS,
    WORKER_LIMIT,
    Label,
)
from quiesce.telemetry.log_names import LOG_EVENTS, LogEvent, log_event
from quiesce.telemetry.span_names import COMMON_ATTRIBUTES, SPANS, SpanSpec, span_spec
from quiesce.types import DROP_REASONS, ENDS, OUTCOMES, OWNERS, PHASES

__all__ = [
    "ADMISSION_PATHS",
    "CALL_BUCKETS",
    "CHECKPOINT_PARTS",
    "CHECKPOINT_REASONS",
    "COMMON_ATTRIBUTES",
    "CONSTANT_LABELS",
    "CUT_PARTS",
    "DATAPLANE_OPS",
    "ENDED",
    "EXPORT_BUCKETS",
    "GPU_MEMORY",
    "IDLE_CAUSES",
    "INVARIANTS",
    "LOG_EVENTS",
    "METRICS",
    "OBJECTIVES",
    "OPERATION_BUCKETS",
    "OTHER",
    "PHASE_BUCKETS",
    "PREFIX",
    "RESTORE_PARTS",
    "RESTORE_REASONS",
    "ROLES",
    "RUN_STATES",
    "SINK_FATES",
    "SLOT_BUCKETS",
    "SLOT_STATES",
    "SPANS",
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
    "LogEvent",
    "Metric",
    "SpanSpec",
    "log_event",
    "span_spec",
]

PREFIX: Final = "quiesce_"
"""What every metric name starts with."""

CONSTANT_LABELS: Final = ("run", "role")
"""Labels of every series: the run's name, and what the process is in it."""

MetricType = Literal["counter", "gauge", "histogram", "info"]

_KIND = Label("kind", KINDS, extended=True)
_PHASE = Label("phase", PHASES)
_OWNER = Label("owner", OWNERS)
_STATE = Label("state", SLOT_STATES)
_PART = Label("part", CUT_PARTS)
_INVARIANT = Label("invariant", INVARIANTS)
_WORKER = Label("worker", constant=True)


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric family.

    Attributes:
        name: The full name as it is scraped (with ``_total`` for a counter and ``_info`` for an info).
        type: Prometheus type.
        help: One line for people.
        labels: Labels beside the constant ones.
        unit: Base unit that the name carries, or "".
        buckets: Upper bounds of a histogram, in the unit.
        needs: Roles of which one must have been attached for the family to exist; () means always.
        children: The label values that exist; None means every combination of the labels' values.
        windows: Values of the one label that belong to checkpoint windows: in a process without a barrier, of which
            there are many, their children exist once they happen.
    """

    name: str
    type: MetricType
    help: str
    labels: tuple[Label, ...] = ()
    unit: str = ""
    buckets: tuple[float, ...] = ()
    needs: tuple[str, ...] = ()
    children: tuple[tuple[str, ...], ...] | None = None
    windows: tuple[str, ...] = ()

    @property
    def label_names(self) -> tuple[str, ...]:
        """Names of the labels beside the constant ones."""
        return tuple(label.name for label in self.labels)

    @property
    def family(self) -> str:
        """The name without the suffix that Prometheus formats add to it."""
        return self.name.removesuffix(
            "_total" if self.type == "counter" else "_info" if self.type == "info" else ""
        )

    def label_sets(self, kinds: Iterable[str] = KINDS) -> tuple[tuple[str, ...], ...]:
        """Return the label values of every child.

        Args:
            kinds: The kinds of slots of the attached barriers.
        """
        if self.children is not None:
            return self.children
        return tuple(product(*(tuple(kinds) if label.extended else label.values for label in self.labels)))


METRICS: Final[dict[str, Metric]] = {}
"""Every metric family by its full name, in the order of the reference page."""


def _define(
    short: str,
    type_: MetricType,
    help_: str,
    *labels: Label,
    needs: tuple[str, ...] = (),
    buckets: tuple[float, ...] = (),
    children: tuple[tuple[str, ...], ...] | None = None,
    windows: tuple[str, ...] = (),
) -> Metric:
    base = short.removesuffix("_total")
    unit = next((unit for unit in ("seconds", "bytes", "ratio") if base.endswith(f"_{unit}")), "")
    metric = Metric(PREFIX + short, type_, help_, labels, unit, buckets, needs, children, windows)
    METRICS[metric.name] = metric
    return metric


_WINDOWS = ("barrier",)
_GROUPS = ("ledger", "spares", "buffer")
_TRAINING = ("trainer_version",)
_GATES = ("snapshot_gate",)
_CLEANUP = ("cleanup",)
_ENGINES = ("engine",)
_GPU = ("gpu",)
_TRACING = ("tracing",)

# Mutation slots.
MUTATION_WAIT = _define(
    "mutation_wait_seconds",
    "histogram",
    "Time from asking for a mutation slot to holding it or giving up; 0 unless a window was in the way",
    _KIND,
    needs=_WINDOWS,
    buckets=WAIT_BUCKETS,
)
MUTATION_HOLD = _define(
    "mutation_hold_seconds",
    "histogram",
    "Time for which a mutation slot was held",
    _KIND,
    needs=_WINDOWS,
    buckets=SLOT_BUCKETS,
)
MUTATION_SECTIONS = _define(
    "mutation_sections_total",
    "counter",
    "Mutation slots that ended, by outcome; one that was given up while it still waited counts too",
    _KIND,
    Label("outcome", ENDED),
    needs=_WINDOWS,
)
MUTATION_SLOTS = _define(
    "mutation_slots",
    "gauge",
    "Mutation slots that are held, or wait, right now",
    _KIND,
    _STATE,
    needs=_WINDOWS,
)
MUTATION_OLDEST = _define(
    "mutation_oldest_seconds",
    "gauge",
    "Age of the oldest mutation slot that is held, or waits, right now; 0 without one",
    _KIND,
    _STATE,
    needs=_WINDOWS,
)

# The checkpoint.
CHECKPOINT_PHASE_SECONDS = _define(
    "checkpoint_phase_seconds",
    "histogram",
    "Duration of the phases of a checkpoint",
    _PHASE,
    Label("outcome", ENDED),
    needs=_WINDOWS,
    buckets=PHASE_BUCKETS,
)
CHECKPOINT_PHASE_LAST = _define(
    "checkpoint_phase_last_seconds",
    "gauge",
    "Duration of the phase when it ran last, whatever its outcome; 0 before the first",
    _PHASE,
    needs=_WINDOWS,
)
CHECKPOINT_PHASE = _define(
    "checkpoint_phase",
    "gauge",
    "1 while a checkpoint is in the phase, else 0",
    _PHASE,
    needs=_WINDOWS,
)
CHECKPOINT_PHASE_STARTED = _define(
    "checkpoint_phase_started_timestamp_seconds",
    "gauge",
    "Unix time at which the phase began that runs, or ran last; 0 before the first",
    _PHASE,
    needs=_WINDOWS,
)
CUT_PART = _define(
    "cut_part_seconds",
    "gauge",
    "Time that capturing a part of the last cut took, inside the exclusive phase",
    _PART,
    needs=_WINDOWS,
)
CHECKPOINT_ATTEMPTS = _define(
    "checkpoint_attempts_total",
    "counter",
    "Attempts to save, by outcome and reason (empty when completed)",
    Label("outcome", OUTCOMES),
    Label("reason", CHECKPOINT_REASONS),
    needs=_WINDOWS,
    children=(("completed", ""), *product(OUTCOMES[1:], CHECKPOINT_REASONS[1:])),
)
CHECKPOINT_FAILURES = _define(
    "checkpoint_failures_since_success",
    "gauge",
    "Attempts to save that failed or were refused since a checkpoint was last published; 0 once one is",
    needs=_WINDOWS,
)
CHECKPOINT_BYTES = _define(
    "checkpoint_bytes",
    "gauge",
    "Size of the last published checkpoint: all of it, and by part where Quiesce's checkpointer wrote it",
    Label("part", CHECKPOINT_PARTS),
    needs=_WINDOWS,
)
CHECKPOINT_GROUPS = _define(
    "checkpoint_groups",
    "gauge",
    "Prompt groups in the last published checkpoint, by owner",
    _OWNER,
    needs=_WINDOWS,
)
CHECKPOINT_ROWS = _define("checkpoint_rows", "gauge", "Rows in the last published checkpoint", needs=_WINDOWS)
CHECKPOINT_LAST_SUCCESS = _define(
    "checkpoint_last_success_timestamp_seconds",
    "gauge",
    "Unix time at which a checkpoint was last published; 0 before the first",
    needs=_WINDOWS,
)
CHECKPOINT_EXPECTED_INTERVAL = _define(
    "checkpoint_expected_interval_seconds",
    "gauge",
    "Seconds in which the run means to publish a checkpoint; 0 when it has not said, or cannot say yet",
    needs=_WINDOWS,
)
STEPS_SINCE_CHECKPOINT = _define(
    "steps_since_checkpoint",
    "gauge",
    "Trainer steps that a crash would cost: those after the last published cut",
    needs=_WINDOWS,
)
GROUPS_SINCE_CHECKPOINT = _define(
    "groups_since_checkpoint",
    "gauge",
    "Finished prompt groups that a crash would cost: those buffered after the last published cut",
    needs=_WINDOWS,
)

# What a checkpoint costs.
WINDOW_BLAME = _define(
    "window_blame_seconds_total",
    "counter",
    "Time that windows drained while a slot of the kind was open; kinds overlap and may sum past the drain",
    _KIND,
    needs=_WINDOWS,
)
WINDOW_BLOCKED = _define(
    "window_blocked_seconds_total",
    "counter",
    "Writer time lost: what slots of the kind waited for checkpoint windows",
    _KIND,
    needs=_WINDOWS,
)
WINDOW_CLOSED = _define(
    "window_closed_seconds_total",
    "counter",
    "Time for which the barrier admitted no new slot: drain and exclusive phase, of given-up windows too",
    needs=_WINDOWS,
)
WINDOW_OVER_OBJECTIVE = _define(
    "window_over_objective_total",
    "counter",
    "Windows whose phase took longer than its objective",
    Label("phase", WINDOW_PHASES),
    needs=_WINDOWS,
)
TRAINER_STALL = _define(
    "trainer_stall_seconds_total",
    "counter",
    "Time for which saving held the train pump up",
    Label("cause", STALL_CAUSES),
    needs=_WINDOWS,
)
TRAIN_IDLE = _define(
    "train_idle_seconds_total",
    "counter",
    "Time for which the train pump had nothing to train on, or waited for weights to be synchronised",
    Label("cause", IDLE_CAUSES),
    needs=_TRAINING,
)

# Restoring.
RESTORE_SECONDS = _define(
    "restore_seconds",
    "gauge",
    "Time that a part of the last restore took; 0 without one",
    Label("part", RESTORE_PARTS),
    needs=_WINDOWS,
)
RESTORE_GROUPS = _define(
    "restore_groups_total",
    "counter",
    "Prompt groups that were restored, by the owner that they were saved with",
    Label("from", OWNERS),
    needs=_WINDOWS,
)
RESTORE_REFUSALS = _define(
    "restore_refusals_total",
    "counter",
    "Restores that were refused or failed",
    Label("reason", RESTORE_REASONS),
    needs=_WINDOWS,
)

RESTORE_TOKENS_REUSED = _define(
    "restore_tokens_reused_total",
    "counter",
    "Tokens that resumed generation calls did not generate again, because staged rows had them",
    needs=_WINDOWS,
)

# Admission.
ADMISSION_WAIT = _define(
    "admission_wait_seconds",
    "histogram",
    "Time that a batch waited at the sampler's gate",
    needs=("sampler",),
    buckets=PHASE_BUCKETS,
)
ADMISSION_COMMITS = _define(
    "admission_commits_total",
    "counter",
    "Batches that were admitted, by path",
    Label("path", ADMISSION_PATHS),
    needs=("sampler",),
)
DISPATCH_CURSOR = _define(
    "dispatch_cursor",
    "gauge",
    "Admitted batches minus one: the sampler's dispatch cursor",
    needs=("sampler",),
)
TRAINER_VERSION = _define("trainer_version", "gauge", "Version of the trainer's weights", needs=_TRAINING)
TARGET_STEP_MAX = _define(
    "target_step_max",
    "gauge",
    "Largest target step stamped on a group of the owner (buffer: claimed ones too); -1 without one",
    Label("owner", ("ledger", "buffer")),
    needs=("ledger", "buffer"),
)

# Ownership.
GROUPS = _define("groups", "gauge", "Prompt groups that the owner holds right now", _OWNER, needs=_GROUPS)
GROUPS_MOVED = _define(
    "groups_moved_total",
    "counter",
    "Moves of prompt groups from owner to owner",
    Label("from", ("read", *OWNERS)),
    Label("to", (*OWNERS, *ENDS)),
    needs=_GROUPS,
    children=tuple(
        (source, target) for source in ("read", *OWNERS) for target in (*OWNERS, *ENDS) if source != target
    ),
)
PROMPTS_READ = _define(
    "prompts_read_total",
    "counter",
    "Prompts read from the dataset, along the restored lineage: read = trained + dropped + owned",
    needs=("accounting",),
)
PROMPTS_TRAINED = _define(
    "prompts_trained_total",
    "counter",
    "Prompts whose group was trained, along the restored lineage",
    needs=("accounting",),
)
PROMPTS_DROPPED = _define(
    "prompts_dropped_total",
    "counter",
    "Prompts whose group was dropped, along the restored lineage",
    Label("reason", DROP_REASONS),
    needs=("accounting",),
)

# The data plane.
DATAPLANE_ROWS = _define("dataplane_rows", "gauge", "Rows in the data plane", needs=("dataplane",))
DATAPLANE_BYTES = _define(
    "dataplane_bytes", "gauge", "Bytes that rows take in the data plane", needs=("dataplane",)
)
DATAPLANE_PINNED = _define(
    "dataplane_pinned_rows", "gauge", "Rows that the oldest unreleased snapshot keeps", needs=("dataplane",)
)
DATAPLANE_DEFERRED = _define(
    "dataplane_deferred_clears",
    "gauge",
    "Rows whose clear waits for a snapshot's release",
    needs=("dataplane",),
)
DATAPLANE_MAP_USED = _define(
    "dataplane_map_used_ratio", "gauge", "Used share of the data plane's map, 0 to 1", needs=("dataplane",)
)
DATAPLANE_OP = _define(
    "dataplane_op_seconds",
    "histogram",
    "Duration of data plane operations, of failed ones too",
    Label("op", DATAPLANE_OPS),
    needs=("dataplane",),
    buckets=OPERATION_BUCKETS,
    windows=WINDOW_OPS,
)

# The snapshot gate, and cleanup.
GATE_PERMITS = _define(
    "snapshot_gate_permits",
    "gauge",
    "Permits of the worker's snapshot gate that are out",
    _WORKER,
    needs=_GATES,
)
GATE_CLOSED = _define(
    "snapshot_gate_closed",
    "gauge",
    "1 while the worker's snapshot gate is closed for a checkpoint, else 0",
    _WORKER,
    needs=_GATES,
)
GATE_WAIT = _define(
    "snapshot_gate_wait_seconds",
    "histogram",
    "Time that writers waited for a permit of a snapshot gate",
    needs=_GATES,
    buckets=WORK_BUCKETS,
)
GATE_CLOSE = _define(
    "snapshot_gate_close_seconds",
    "histogram",
    "Time that a snapshot gate took to close: until no permit was out, or it gave up",
    needs=_GATES,
    buckets=WORK_BUCKETS,
)
CLEANUP_QUEUE = _define(
    "cleanup_queue_calls", "gauge", "Calls whose rows are still to be cleared", needs=_CLEANUP
)
CLEANUP_BATCH = _define(
    "cleanup_batch_calls",
    "histogram",
    "Calls whose rows were cleared together",
    needs=_CLEANUP,
    buckets=CALL_BUCKETS,
)
CLEANUP_CLEAR = _define(
    "cleanup_clear_seconds",
    "histogram",
    "Time that clearing a batch took, of failed tries too",
    needs=_CLEANUP,
    buckets=WORK_BUCKETS,
)
CLEANUP_KEYS = _define("cleanup_keys_total", "counter", "Keys whose rows were cleared", needs=_CLEANUP)
CLEANUP_FAILURES = _define(
    "cleanup_failures_total", "counter", "Tries to clear a batch that failed", needs=_CLEANUP
)
REPLY_SECONDS = _define(
    "reply_seconds",
    "histogram",
    "Time from a generation call's last token to its answer",
    needs=_ENGINES,
    buckets=WORK_BUCKETS,
)

# Invariants.
INVARIANT_ACTIVE = _define(
    "invariant_active",
    "gauge",
    "1 once the invariant was checked in this process; 0 means that nothing is known about it",
    _INVARIANT,
    needs=_WINDOWS,
)
INVARIANT_CHECKS = _define(
    "invariant_checks_total", "counter", "Checks of the invariant", _INVARIANT, needs=_WINDOWS
)
INVARIANT_VIOLATIONS = _define(
    "invariant_violations_total", "counter", "Violations of the invariant", _INVARIANT, needs=_WINDOWS
)
INVARIANT_LAST_VIOLATION = _define(
    "invariant_last_violation_timestamp_seconds",
    "gauge",
    "Unix time of the invariant's last violation; 0 without one",
    _INVARIANT,
    needs=_WINDOWS,
)

# Training.
TRAIN_REWARD = _define(
    "train_reward", "gauge", "Mean reward of the last step; NaN before the first", needs=_TRAINING
)
TRAIN_LOSS = _define("train_loss", "gauge", "Loss of the last step; NaN before the first", needs=_TRAINING)
TRAIN_KL = _define(
    "train_kl", "gauge", "KL divergence of the last step; NaN where none is computed", needs=_TRAINING
)
TOKENS_GENERATED = _define(
    "tokens_generated_total",
    "counter",
    "Tokens that rollouts generated, of dropped groups too",
    needs=_TRAINING,
)
GROUPS_TRAINED = _define("groups_trained_total", "counter", "Prompt groups trained by steps", needs=_TRAINING)
STALENESS = _define(
    "staleness_versions",
    "histogram",
    "Mean staleness of each step's groups: trainer versions between a group's admission and its training",
    needs=_TRAINING,
    buckets=VERSION_BUCKETS,
)
TRAIN_STEP_SECONDS = _define(
    "train_step_seconds", "histogram", "Duration of trainer steps", needs=_TRAINING, buckets=PHASE_BUCKETS
)

# The device.
GPU_MEMORY_BYTES = _define(
    "gpu_memory_bytes",
    "gauge",
    "Memory of the process's current CUDA device",
    Label("kind", GPU_MEMORY),
    needs=_GPU,
)
GPU_UTILIZATION = _define(
    "gpu_utilization_ratio", "gauge", "Share of time in which the CUDA device was busy, 0 to 1", needs=_GPU
)

# The run, and telemetry itself.
RUN_INFO = _define(
    "run_info",
    "info",
    "What the run is made of",
    *(Label(name, constant=True) for name in ("sampler", "dataplane", "engine", "version")),
)
RUN_STARTED = _define("run_started_timestamp_seconds", "gauge", "Unix time at which metrics were switched on")
RUN_STATE = _define(
    "run_state", "gauge", "1 for the state that the run is in, else 0", Label("state", RUN_STATES)
)
CAPABILITY = _define(
    "capability", "gauge", "1 if such a part was attached, so that its metrics exist", Label("name", ROLES)
)
OBSERVER_ERRORS = _define(
    "telemetry_observer_errors_total",
    "counter",
    "Hooks that raised and sources that could not be read; training went on without them",
)
TELEMETRY_SPANS = _define(
    "telemetry_spans_total",
    "counter",
    "Spans by fate: taken by a sink, left out past the budget, lost for want of room or time, or refused",
    Label("fate", SPAN_FATES),
    needs=_TRACING,
)
TELEMETRY_SINK_SPANS = _define(
    "telemetry_sink_spans_total",
    "counter",
    "Spans that a sink was to be given, by what became of them there, whatever became of them elsewhere",
    Label("sink", SPAN_SINKS),
    Label("fate", SINK_FATES),
    needs=_TRACING,
)
TELEMETRY_EXPORT = _define(
    "telemetry_export_seconds",
    "histogram",
    "Time that a sink took for what it was given at once",
    needs=_TRACING,
    buckets=EXPORT_BUCKETS,
)
TELEMETRY_CPU = _define(
    "telemetry_cpu_seconds_total",
    "counter",
    "Processor time of telemetry: its threads as measured, its hooks as estimated from samples",
)
