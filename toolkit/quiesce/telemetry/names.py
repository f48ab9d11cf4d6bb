"""The one catalogue of what telemetry calls things: metrics with their labels and buckets, and log events.

Rule: a name, a label or a label value that is not in here is not emitted, and everything in here is emitted
(a test compares both ways). Reference pages, dashboards and rules are derived from these tables. Nothing here
suspends.

Conventions: ``quiesce_<thing>_<quantity>_<unit>`` in base units, ``_total`` on counters and on nothing else.
Label values are closed sets, so the number of series is known before a run starts; ids, steps and paths go to
logs and spans. Every series carries ``run`` and ``role`` beside the labels that are listed here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Final, Literal

from quiesce.barrier import KINDS
from quiesce.types import DROP_REASONS, ENDS, OUTCOMES, OWNERS, PHASES

__all__ = [
    "CONSTANT_LABELS",
    "LOG_EVENTS",
    "METRICS",
    "PREFIX",
    "ROLES",
    "Label",
    "LogEvent",
    "Metric",
    "log_event",
]

PREFIX: Final = "quiesce_"
"""What every metric name starts with."""

CONSTANT_LABELS: Final = ("run", "role")
"""Labels of every series: the run's name, and what the process is in it."""

OTHER: Final = "other"
"""The label value of anything that its closed set does not know, so that a surprise is still counted."""

MetricType = Literal["counter", "gauge", "histogram", "info"]

ROLES: Final = (
    "barrier",
    "ledger",
    "spares",
    "buffer",
    "accounting",
    "dataplane",
    "sampler",
    "trainer_version",
)
"""Roles under which primitives attach themselves to a hub; a family exists once a role that it needs is
there."""


# ----------------------------------------------------------------------------------------------------- labels


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

ADMISSION_PATHS: Final = ("transactional", "fallback")
"""How a batch was admitted: gate wait outside the slot, or a custom sampler's whole ``admit()`` inside."""

SLOT_STATES: Final = ("active", "waiting")
"""A mutation slot that is held, or that waits for a checkpoint window to end."""

OBJECTIVES: Final[Mapping[str, float]] = {"drain": 1.0, "exclusive": 0.005}
"""Seconds that a phase of the window is meant to stay under; longer ones are counted, not refused."""

WINDOW_PHASES: Final = tuple(OBJECTIVES)
"""The phases that make a checkpoint window."""

_KIND = Label("kind", KINDS, extended=True)
_PHASE = Label("phase", PHASES)
_OWNER = Label("owner", OWNERS)
_STATE = Label("state", SLOT_STATES)
_PART = Label("part", CUT_PARTS)
_INVARIANT = Label("invariant", INVARIANTS)


# ---------------------------------------------------------------------------------------------------- buckets


def _decades(lowest: int, highest: int) -> tuple[float, ...]:
    """Return 1, 2.5 and 5 of every decade from 10**lowest, and 10**highest as the last bound.

    Parsed from decimal text, so that a bound is the double nearest to what it says (1e-06, not 9.999e-07).
    """
    steps = [f"{mantissa}e{power}" for power in range(lowest, highest) for mantissa in ("1", "2.5", "5")]
    return tuple(float(text) for text in (*steps, f"1e{highest}"))


SLOT_BUCKETS: Final = _decades(-6, 2)
"""1 µs to 100 s, in seconds: a slot lasts microseconds, and one that waits for a hung drain a minute."""

PHASE_BUCKETS: Final = (*_decades(-4, 1), 20.0, 30.0, 45.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0, 3600.0)
"""100 µs to 1 h, in seconds: an exclusive phase of a fraction of a millisecond, and a write that hung for 20
minutes."""

VERSION_BUCKETS: Final = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0)
"""Trainer versions between a group's admission and its training."""


# ---------------------------------------------------------------------------------------------------- metrics


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
    """

    name: str
    type: MetricType
    help: str
    labels: tuple[Label, ...] = ()
    unit: str = ""
    buckets: tuple[float, ...] = ()
    needs: tuple[str, ...] = ()
    children: tuple[tuple[str, ...], ...] | None = None

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
) -> Metric:
    base = short.removesuffix("_total")
    unit = next((unit for unit in ("seconds", "bytes", "ratio") if base.endswith(f"_{unit}")), "")
    metric = Metric(PREFIX + short, type_, help_, labels, unit, buckets, needs, children)
    METRICS[metric.name] = metric
    return metric


_WINDOWS = ("barrier",)
_GROUPS = ("ledger", "spares", "buffer")
_TRAINING = ("trainer_version",)

# Mutation slots.
MUTATION_WAIT = _define(
    "mutation_wait_seconds",
    "histogram",
    "Time from asking for a mutation slot to holding it or giving up; 0 unless a window was in the way",
    _KIND,
    needs=_WINDOWS,
    buckets=SLOT_BUCKETS,
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
CHECKPOINT_BYTES = _define(
    "checkpoint_bytes",
    "gauge",
    "Size of the last published checkpoint",
    Label("part", ("all",)),
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
    buckets=SLOT_BUCKETS,
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


# ------------------------------------------------------------------------------------------------- log events


@dataclass(frozen=True, slots=True)
class LogEvent:
    """One event of the run log.

    Attributes:
        name: The line's ``event``.
        level: Its level.
        help: When it is written.
        fields: Fields beside ``timestamp``, ``level``, ``run``, ``role``, ``step`` and ``cut_id``.
    """

    name: str
    level: Literal["debug", "info", "warning", "error", "critical"]
    help: str
    fields: tuple[str, ...] = ()


LOG_EVENTS: Final[dict[str, LogEvent]] = {
    event.name: event
    for event in (
        LogEvent("run.state", "info", "The run started, runs, stops, finished or failed", ("state",)),
        LogEvent("run.stalled", "error", "Nothing moved for a while", ("what", "group_id", "age_seconds")),
        LogEvent(
            "checkpoint.published",
            "info",
            "A checkpoint was published",
            ("groups", "rows", "bytes", "drain_seconds", "exclusive_seconds", "phases"),
        ),
        LogEvent("checkpoint.skipped", "info", "An attempt to save had nothing to do", ("reason",)),
        LogEvent(
            "checkpoint.not_published",
            "error",
            "An attempt to save failed, was refused or cancelled; the last good checkpoint stays the newest",
            ("outcome", "reason", "groups", "phases"),
        ),
        LogEvent(
            "window.given_up",
            "warning",
            "A checkpoint gave up before it was exclusive",
            ("outcome", "drain_seconds", "delayed_by"),
        ),
        LogEvent("trainer.stalled", "debug", "Saving held the train pump up", ("cause", "seconds")),
        LogEvent(
            "train.step",
            "debug",
            "A trainer step ended",
            ("version", "seconds", "groups", "outcome", "metrics"),
        ),
        LogEvent("restore.completed", "info", "A run was restored from a checkpoint", ("groups", "parts")),
        LogEvent(
            "restore.refused", "error", "A restore was refused or failed", ("outcome", "reason", "parts")
        ),
        LogEvent(
            "sampler.fell_back",
            "warning",
            "A custom sampler admits in one piece, so its gate wait holds a slot that checkpoints wait for",
            ("sampler",),
        ),
        LogEvent(
            "invariant.violated",
            "critical",
            "An invariant does not hold",
            ("invariant", "severity", "message", "groups", "owners", "evidence"),
        ),
        LogEvent("metrics.serving", "info", "Where metrics can be scraped", ("url", "port", "pid")),
        LogEvent(
            "log.record",
            "info",
            "A message of Quiesce's own Python loggers, at that message's level",
            ("logger", "message"),
        ),
    )
}
"""Every event that the run log has, by name."""


def log_event(name: str) -> LogEvent:
    """Return an event of the catalogue.

    Raises:
        KeyError: If the catalogue does not have it.
    """
    return LOG_EVENTS[name]
