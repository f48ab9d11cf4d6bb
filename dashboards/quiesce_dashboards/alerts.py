"""Every alert: when it fires, how bad it is, what it says, and which invariants it stands for.

Rule: the list is the whole list, for Prometheus and for the process itself, which posts the same alerts under the
same names; :data:`INVARIANT_ALERTS` is the one table from invariants to alerts. Nothing here suspends.

The forms of the expressions are those that behave for events that are minutes apart. A rate over five minutes is
empty between two saves; a violation is the first value that its counter ever has, which ``increase`` does not see. So
violations are told by their time, breaches by an ``increase`` over hours, and what goes on right now by its age.

Texts have the fields ``{run}``, ``{role}``, ``{instance}``, ``{kind}``, ``{phase}``, ``{worker}``, ``{path}``,
``{what}``, ``{invariant}``, ``{sink}`` and ``{value}``; each alert only those that its expression leaves it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

from quiesce.invariants.violation import Severity
from quiesce.telemetry import names
from quiesce_dashboards.objectives import AlertConfig, duration
from quiesce_dashboards.queries import UP, grew, matching, series, sum_by

__all__ = ["INVARIANT_ALERTS", "OTHER_INVARIANT", "SOURCE", "Alert", "alert_of", "alerts"]

SOURCE: Final = ("run", "role", "instance", "job")
"""Labels that say which process of which run."""

INVARIANT_ALERTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "single_owner": "QuiesceOwnershipConflict",
        "conservation": "QuiescePromptsUnaccounted",
        "cursor_covers_buffer": "QuiesceCursorBufferSkew",
        "cursor_within_lookahead": "QuiesceCursorBufferSkew",
        "window_is_exclusive": "QuiesceMutationInsideWindow",
        "cut_is_one_instant": "QuiesceCutNotAtomic",
        "rows_present": "QuiesceRowsDiverged",
        "rows_not_orphaned": "QuiesceRowsOrphaned",
        "digest_matches": "QuiesceDigestMismatch",
        "gate_is_respected": "QuiesceGateViolated",
        "versions_grow": "QuiesceVersionRegressed",
        "checkpoint_progress": "QuiesceCheckpointStalled",
    }
)
"""The alert of each invariant. The last one is a warning of the auditor's, and fires the moment a phase is over its
budget; its alert is about the age of a phase that still runs."""

OTHER_INVARIANT: Final = "QuiesceInvariantViolated"
"""The alert of every check that a user has added."""

_Shown = Literal["", "duration", "count"]


@dataclass(frozen=True, slots=True)
class Alert:
    """One alert.

    Attributes:
        name: Its name, and its runbook page's.
        severity: ``critical`` pages somebody; ``warning`` can wait for the day.
        expression: When it holds, in PromQL.
        summary: One line: the run and what is wrong.
        description: What happened, where, whom to blame, and the next step.
        runbook: Address of its page.
        value: How the expression's value is shown.
        labels: Labels that the expression leaves.
        hold_seconds: How long the expression has to hold.
        keep_seconds: How long it goes on firing after the expression stopped to hold: over a missed scrape, or the
            gap of a restart.
    """

    name: str
    severity: Severity
    expression: str
    summary: str
    description: str
    runbook: str
    value: _Shown = ""
    labels: tuple[str, ...] = SOURCE
    hold_seconds: float = 0.0
    keep_seconds: float = 0.0

    def annotations(self) -> dict[str, str]:
        """Return the annotations of a Prometheus rule, with Prometheus' templates for the fields."""
        fields = {label: f"{{{{ $labels.{label} }}}}" for label in self.labels}
        fields["value"] = {
            "": "",
            "duration": "{{ $value | humanizeDuration }}",
            "count": '{{ $value | printf "%.0f" }}',
        }[self.value]
        fields.setdefault("instance", _INSTANCES)
        fields.setdefault("kind", _BLAMED)
        fields["sink"] = f"{{{{ with $labels.sink }}}}{_AT_SINK}{{{{ . }}}}{{{{ end }}}}"
        return self._texts(fields)

    def texts(self, fields: Mapping[str, str]) -> dict[str, str]:
        """Return the annotations with these values of the fields; an unknown one is left out as ``?``."""
        known = dict.fromkeys(("value", "kind", *names.CONSTANT_LABELS, *self.labels, "instance"), "?")
        return self._texts(
            {**known, **fields, "sink": f"{_AT_SINK}{fields['sink']}" if "sink" in fields else ""}
        )

    def _texts(self, fields: Mapping[str, str]) -> dict[str, str]:
        return {
            "summary": self.summary.format_map(fields),
            "description": self.description.format_map(fields),
            "runbook_url": self.runbook,
        }


_AT_SINK: Final = " at the exporter "
"""What stands before an exporter's name, where one is to blame."""

_INSTANCES: Final = (
    '{{ range query (printf "quiesce_run_started_timestamp_seconds{run=%q}" $labels.run) }}'
    "{{ .Labels.instance }} {{ else }}unknown {{ end }}"
)
"""The processes of a run, for alerts that sum over them, so that a restart on another port changes nothing."""

_BLAMED: Final = (
    '{{ with query (printf "topk(1, sum by (kind) '
    '(increase(quiesce_window_blame_seconds_total{run=%q}[6h])) > 0)" $labels.run) }}'
    '{{ . | first | label "kind" }}{{ else }}none{{ end }}'
)
"""The kind of slots that windows waited for longest."""


def alerts(config: AlertConfig | None = None) -> tuple[Alert, ...]:
    """Return every alert, the critical ones first.

    Args:
        config: The numbers; None takes the defaults.
    """
    config = AlertConfig() if config is None else config
    made = [
        *(_violated(config, name, *row) for name, row in _VIOLATIONS.items()),
        *(make(config) for make in _OTHERS),
    ]
    return tuple(sorted(made, key=lambda alert: alert.severity != "critical"))


def alert_of(invariant: str) -> str:
    """Return the alert that stands for an invariant; those that users added have one in common.

    Args:
        invariant: Its name.
    """
    return INVARIANT_ALERTS.get(invariant, OTHER_INVARIANT)


# ------------------------------------------------------------------------------------------------- invariants

_CHECKS_NEXT: Final = (
    "The cut that shows it is kept as step_N.suspect and the last good checkpoint stays the newest. Next: read event "
    "invariant.violated in log.jsonl of the run folder, it names the groups; then run quiesce audit on the folder."
)

_VIOLATIONS: Final[Mapping[str, tuple[Severity, str, str]]] = {
    "QuiesceOwnershipConflict": (
        "critical",
        "a prompt group has two owners",
        f"a group is in two of ledger, spares, buffer and training; it may be trained twice. {_CHECKS_NEXT}",
    ),
    "QuiescePromptsUnaccounted": (
        "critical",
        "prompts that were read are unaccounted for",
        f"a prompt is neither owned nor trained nor dropped, or is so twice: it is lost or counted double. {_CHECKS_NEXT}",
    ),
    "QuiesceCursorBufferSkew": (
        "critical",
        "the dispatch cursor contradicts what was admitted",
        (
            "the cursor is behind a stamped step, ahead of its gate, or not the number of admissions; a resume "
            f"from such a cut drops a batch in silence. {_CHECKS_NEXT}"
        ),
    ),
    "QuiesceMutationInsideWindow": (
        "critical",
        "state changed inside a checkpoint window",
        (
            "a slot opened or a group changed hands while the window was exclusive, so the cut is not one moment. "
            "Next: read event invariant.violated in log.jsonl, its evidence names the move; look for a change that "
            "is made outside barrier.mutation()."
        ),
    ),
    "QuiesceCutNotAtomic": (
        "critical",
        "the parts of a checkpoint are of different moments",
        f"the six parts of a cut do not carry one cut id and one mutation version. {_CHECKS_NEXT}",
    ),
    "QuiesceRowsDiverged": (
        "critical",
        "rows that the buffer names are missing",
        f"the data plane lacks rows of a group that counts as finished; its step could not be trained. {_CHECKS_NEXT}",
    ),
    "QuiesceDigestMismatch": (
        "critical",
        "the ledger is not the one that the rows were saved with",
        f"digest or count of the ledger differ from what the row files carry. {_CHECKS_NEXT}",
    ),
    "QuiesceVersionRegressed": (
        "critical",
        "a version went back",
        (
            "trainer version or mutation version are lower than before in the same lineage; an old process may "
            "still write. Next: see that only one process has the run folder (run.lock, event run.state in "
            "log.jsonl), then quiesce audit."
        ),
    ),
    "QuiesceGateViolated": (
        "critical",
        "something was written behind a closed snapshot gate",
        (
            "a permit was granted, or a clear began, while a worker's gate was closed for a checkpoint. Next: read event "
            "invariant.violated in log.jsonl for the worker and the epoch; do not resume from the newest "
            "checkpoint before quiesce audit has passed it."
        ),
    ),
    OTHER_INVARIANT: (
        "critical",
        "a check of your own does not hold",
        (
            "it is one that was added in the configuration. Next: read event invariant.violated in log.jsonl of "
            "the run folder, it has the check's message and evidence; whoever wrote the check knows what follows."
        ),
    ),
    "QuiesceRowsOrphaned": (
        "warning",
        "rows stay behind that nobody owns",
        (
            "the data plane holds rows that no owner and no clear knows; they only cost room. Next: compare "
            "quiesce_dataplane_rows with quiesce_groups, and look at cleanup failures."
        ),
    ),
}
"""Severity, what is wrong, and the description, by alert."""


def _violated(config: AlertConfig, name: str, severity: Severity, wrong: str, description: str) -> Alert:
    found = tuple(invariant for invariant, alert in INVARIANT_ALERTS.items() if alert == name)
    metric = names.INVARIANT_LAST_VIOLATION
    told = (
        series(metric, invariant=found) if found else series(metric, without={"invariant": names.INVARIANTS})
    )
    # A run that stops at what it found takes its series along: what it said last counts for as long as it is shown.
    last = f"last_over_time({told}[{duration(config.violation_seconds)}])"
    return Alert(
        name=name,
        severity=severity,
        expression=f"{last} > 0\nand\ntime() - {last} < {config.violation_seconds:g}",
        summary=f"Run {{run}}: {wrong}",
        description=f"On {{instance}} ({{role}}) invariant {{invariant}} does not hold: {description}",
        runbook=config.runbook(name),
        labels=(*SOURCE, "invariant"),
        keep_seconds=600,
    )


# ------------------------------------------------------------------------------------------------- checkpoints


def _checkpoint_failing(config: AlertConfig) -> Alert:
    name = "QuiesceCheckpointFailing"
    return Alert(
        name=name,
        severity="critical",
        expression=f"{series(names.CHECKPOINT_FAILURES)} > 0",
        summary="Run {run}: the last attempt to save failed",
        description=(
            "On {instance} ({role}) an attempt to save failed or was refused, and none has been published since "
            "(attempts in a row: {value}). A crash now goes back to the checkpoint before. Next: "
            "read event checkpoint.not_published in log.jsonl for the reason; the kind of slots that "
            "windows waited for most is {kind}."
        ),
        runbook=config.runbook(name),
        value="count",
        hold_seconds=config.failing_seconds,
        keep_seconds=600,
    )


def _checkpoint_stalled(config: AlertConfig) -> Alert:
    name = "QuiesceCheckpointStalled"
    parts = [
        f"time() - {series(names.CHECKPOINT_PHASE_STARTED, phase=phase)} > {seconds:g} "
        f"and {series(names.CHECKPOINT_PHASE, phase=phase)} == 1"
        for phase, seconds in config.phase_limits.items()
    ]
    return Alert(
        name=name,
        severity="critical",
        expression="\nor\n".join(f"({part})" for part in parts),
        summary="Run {run}: a checkpoint is stuck in phase {phase}",
        description=(
            "On {instance} ({role}) phase {phase} of a checkpoint has gone on for {value}. In fence, drain and "
            "exclusive everybody waits for it, in stage the trainer, in the others the next save. Windows "
            "waited longest for slots of kind {kind}. Next: read quiesce_mutation_oldest_seconds for who holds "
            "a slot; for write and publish look at the disk of the run folder."
        ),
        runbook=config.runbook(name),
        value="duration",
        labels=(*SOURCE, "phase"),
        keep_seconds=120,
    )


def _checkpoint_overdue(config: AlertConfig) -> Alert:
    name = "QuiesceCheckpointOverdue"
    success, started = series(names.CHECKPOINT_LAST_SUCCESS), series(names.RUN_STARTED)
    newest = sum_by(("run",), f"({success} > 0) or {started}", function="max")
    expected = sum_by(("run",), f"{series(names.CHECKPOINT_EXPECTED_INTERVAL)} > 0", function="max")
    return Alert(
        name=name,
        severity="warning",
        expression=f"time() - {newest} > {config.overdue_intervals:g} * {expected}",
        summary="Run {run}: no checkpoint for {value}",
        description=(
            "The newest checkpoint of run {run} (process {instance}) is {value} old, more than "
            f"{config.overdue_intervals:g} times the interval that the run expects. A crash costs all of that. "
            "Next: see whether steps are still trained (quiesce_trainer_version); if they are, read "
            "checkpoint.not_published in log.jsonl. Windows waited longest for slots of kind {kind}."
        ),
        runbook=config.runbook(name),
        value="duration",
        labels=("run",),
        keep_seconds=300,
    )


# ------------------------------------------------------------------------------------------------- the window


def _drain_slow(config: AlertConfig) -> Alert:
    name = "QuiesceDrainSlow"
    over = series(names.WINDOW_OVER_OBJECTIVE, phase="drain")
    blame = sum_by(("run", "kind"), f"increase({series(names.WINDOW_BLAME)}[6h])")
    late = sum_by(("run",), f"increase({over}[6h])")
    objective = config.window_objectives["drain"]
    return Alert(
        name=name,
        severity="warning",
        # The kind with the most of the blame, in runs with several slow drains: one alone proves nothing.
        expression=(
            f"topk by (run) (1, {blame} > {objective:g})\n"
            f"and {matching(('run',))} {late} > {config.breaches + 0.5:g}"
        ),
        summary="Run {run}: windows drain slowly, because of slots of kind {kind}",
        description=(
            f"More than {config.breaches} drains of run {{run}} (process {{instance}}) in 6 h took over "
            f"{objective:g} s. Slots "
            "of kind {kind} were open for {value} of drains, more than any other kind. New slots and the trainer wait "
            "meanwhile. Next: read event window.given_up in log.jsonl, or the spans of such slots, for "
            "what they await inside."
        ),
        runbook=config.runbook(name),
        value="duration",
        labels=("run", "kind"),
        keep_seconds=300,
    )


def _window_over_objective(config: AlertConfig) -> Alert:
    name = "QuiesceWindowOverObjective"
    objectives = ", ".join(f"{phase} {seconds:g} s" for phase, seconds in config.window_objectives.items())
    over = sum_by(("run", "phase"), f"increase({series(names.WINDOW_OVER_OBJECTIVE)}[6h])")
    return Alert(
        name=name,
        severity="warning",
        expression=f"{over} > {config.breaches + 0.5:g}",
        summary="Run {run}: phase {phase} of checkpoint windows is over its objective",
        description=(
            "{value} windows of run {run} (process {instance}) in 6 h had a {phase} over its objective ("
            + objectives
            + "). "
            "Windows waited longest for slots of kind {kind}. Next: for drain, look at that kind; for exclusive, at "
            "quiesce_cut_part_seconds, which says which of the six parts takes the time."
        ),
        runbook=config.runbook(name),
        value="count",
        labels=("run", "phase"),
        keep_seconds=300,
    )


def _window_budget(config: AlertConfig) -> Alert:
    name = "QuiesceWindowBudget"
    closed = sum_by(("run",), f"increase({series(names.WINDOW_CLOSED)}[1h])")
    return Alert(
        name=name,
        severity="warning",
        expression=f"{closed} > {config.window_budget_ratio:g} * 3600",
        summary="Run {run}: checkpoint windows take more than their share of the time",
        description=(
            "The barrier of run {run} (process {instance}) was closed for {value} of the last hour, over "
            f"{config.window_budget_ratio:.1%} of it. Writers and trainer wait meanwhile; windows waited "
            "longest for slots of kind {kind}. Next: save less often, or shorten what that kind does inside its slot."
        ),
        runbook=config.runbook(name),
        value="duration",
        labels=("run",),
        keep_seconds=300,
    )


# ------------------------------------------------------------------------------------------------- gate and cleanup


def _gate_closed(config: AlertConfig) -> Alert:
    name = "QuiesceGateClosedTooLong"
    return Alert(
        name=name,
        severity="warning",
        expression=f"{series(names.GATE_CLOSED)} == 1",
        summary="Run {run}: the snapshot gate of worker {worker} stays closed",
        description=(
            "On {instance} ({role}) the gate of worker {worker} has been closed for over "
            f"{config.gate_closed_seconds:g} s. Its finished calls wait, and fail after their permit's wait. "
            "Next: see whether a checkpoint is under way (quiesce_checkpoint_phase); if none is, the worker "
            "has not heard that it reopened, and log.jsonl says what it answers."
        ),
        runbook=config.runbook(name),
        labels=(*SOURCE, "worker"),
        hold_seconds=config.gate_closed_seconds,
        keep_seconds=60,
    )


def _cleanup_backlog(config: AlertConfig) -> Alert:
    name = "QuiesceCleanupBacklog"
    return Alert(
        name=name,
        severity="warning",
        expression=f"{series(names.CLEANUP_QUEUE)} > {config.cleanup_backlog_calls:g}",
        summary="Run {run}: {value} calls wait for their rows to be cleared",
        description=(
            "On {instance} ({role}) the cleanup has had a backlog for ten minutes ({value} calls). At 128 "
            "finishing calls wait for room, and replies get slow. Next: compare quiesce_cleanup_clear_seconds "
            "with quiesce_snapshot_gate_closed: slow clears, or gates that are closed too long."
        ),
        runbook=config.runbook(name),
        value="count",
        hold_seconds=600,
        keep_seconds=300,
    )


def _cleanup_failing(config: AlertConfig) -> Alert:
    name = "QuiesceCleanupFailing"
    return Alert(
        name=name,
        severity="warning",
        expression=grew(series(names.CLEANUP_FAILURES), SOURCE, "1h", config.cleanup_failures + 0.5),
        summary="Run {run}: clearing rows fails",
        description=(
            "On {instance} ({role}) {value} clears failed in the last hour. Each is tried three times and then "
            "given up; what is given up stays as extra rows. Nothing is lost, the store fills up. Next: "
            "log.jsonl has the store's error; look at quiesce_dataplane_map_used_ratio."
        ),
        runbook=config.runbook(name),
        value="count",
        keep_seconds=300,
    )


# ------------------------------------------------------------------------------------------------- the rest


def _admission_fallback(config: AlertConfig) -> Alert:
    name = "QuiesceAdmissionFallback"
    return Alert(
        name=name,
        severity="warning",
        expression=grew(series(names.ADMISSION_COMMITS, path="fallback"), SOURCE, "1h", 0),
        summary="Run {run}: the sampler admits in one piece, and holds checkpoints up",
        description=(
            "On {instance} ({role}) {value} batches were admitted by a sampler that waits at its gate inside a "
            "slot of kind admission. A checkpoint has to wait for that gate, and gives up at its drain "
            "timeout. Next: give the sampler wait_until_admissible() and commit_admission(); event "
            "sampler.fell_back in log.jsonl names it."
        ),
        runbook=config.runbook(name),
        value="count",
        keep_seconds=300,
    )


def _telemetry_dropping(config: AlertConfig) -> Alert:
    name = "QuiesceTelemetryDropping"
    many = config.lost_spans + 0.5
    # Another exporter that takes a span does not make up for one that does not, so each is counted by itself.
    sinks = series(names.TELEMETRY_SINK_SPANS, fate=("dropped", "failed"))
    parts = (
        grew(sinks, (*SOURCE, "sink"), "1h", many),
        grew(series(names.TELEMETRY_SPANS, fate="dropped"), SOURCE, "1h", many),
        grew(series(names.OBSERVER_ERRORS), SOURCE, "1h", 0),
    )
    return Alert(
        name=name,
        severity="warning",
        expression="\nor\n".join(parts),
        summary="Run {run}: telemetry loses what it should show",
        description=(
            "On {instance} ({role}) spans were lost or hooks raised{sink}: {value} in the last hour. Training is not "
            "affected, but what you see is not all there is. Next: compare quiesce_telemetry_sink_spans_total by sink and "
            "fate with quiesce_telemetry_observer_errors_total; log.jsonl names the exporter or the hook, once each."
        ),
        runbook=config.runbook(name),
        value="count",
        labels=(*SOURCE, "sink"),
        keep_seconds=300,
    )


_REMEMBERED: Final = "6h"
"""How long a process that does not answer is known for. It is long past a night's first look; then the alert ends."""


def _run_down(config: AlertConfig) -> Alert:
    name = "QuiesceRunDown"
    began = f"last_over_time({series(names.RUN_STARTED)}[{_REMEMBERED}])"
    finished = f"last_over_time({series(names.RUN_STATE, state='finished')}[{_REMEMBERED}]) == 1"
    # When it answered last: to the minute; of one that did not live for as long, when it began.
    answered = f"max_over_time(timestamp({series(names.RUN_STARTED)})[{_REMEMBERED}:1m]) or {began}"
    newest = sum_by(("run", "role"), began, function="max")
    return Alert(
        name=name,
        severity="warning",
        # A process that was killed leaves its target behind. One that began after it went on with the run, on another
        # port; one that was there all along is another rank, and stands for nobody but itself.
        expression=(
            f"{began}\nand {matching(('instance', 'job'))} ({UP} == 0)\n"
            f"unless {matching(SOURCE)} ({finished})\n"
            f"unless {matching(SOURCE)} (({answered}) < {matching(('run', 'role'))} group_left () {newest})"
        ),
        summary="Run {run} is down",
        description=(
            "{instance} ({role}) of run {run} does not answer, and had not finished when it was last seen. It "
            "was killed, failed, or cannot be reached. Next: see whether its process lives (run.lock in the "
            "run folder names it); if not, quiesce audit the folder and go on with quiesce train --resume."
        ),
        runbook=config.runbook(name),
        hold_seconds=config.run_down_seconds,
    )


_OTHERS: Final[Sequence[Callable[[AlertConfig], Alert]]] = (
    _checkpoint_failing,
    _checkpoint_stalled,
    _drain_slow,
    _window_over_objective,
    _window_budget,
    _checkpoint_overdue,
    _gate_closed,
    _cleanup_backlog,
    _cleanup_failing,
    _admission_fallback,
    _telemetry_dropping,
    _run_down,
)
