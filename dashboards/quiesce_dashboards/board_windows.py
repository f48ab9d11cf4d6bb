"""The dashboard of checkpoint windows: is it healthy, when did it last save, who waited, what is at risk; then why.

A checkpoint may come every second or every ten minutes. So durations are shown as the last value, which holds until the
next one, and counts as growth over windows that hold several scrapes; nothing is a rate of something that is rare.
"""

from __future__ import annotations

from quiesce.barrier import KINDS
from quiesce.telemetry import names
from quiesce.types import OWNERS, PHASES
from quiesce_dashboards.objectives import AlertConfig
from quiesce_dashboards.panels import (
    BAD,
    GOOD,
    NEUTRAL,
    NOTHING,
    WARN,
    Ask,
    Column,
    Section,
    above,
    heat,
    lines,
    mapped,
    number,
    states,
    stepped,
    table,
)
from quiesce_dashboards.queries import came, picked, quantile, sum_by
from quiesce_dashboards.shared import alerts_firing, open_violations, run_state

__all__ = ["windows"]

_WHOLE = "$__range"


def windows(config: AlertConfig) -> list[Section]:
    """Return the dashboard's parts.

    Args:
        config: The objectives.
    """
    return [
        Section("Is it healthy?", _health(config)),
        Section("Each window", _each(config)),
        Section("Who made windows slow, and who paid", _causes()),
        Section("What a checkpoint is made of", _detail()),
    ]


def _increase(metric: names.Metric, by: str) -> str:
    return sum_by([by] if by else [], f"increase({picked(metric)}[{_WHOLE}])")


def _health(config: AlertConfig) -> list[tuple[int, int, object]]:
    saved = sum_by([], picked(names.CHECKPOINT_LAST_SUCCESS), function="max")
    began = sum_by([], picked(names.RUN_STARTED), function="max")
    interval = sum_by([], picked(names.CHECKPOINT_EXPECTED_INTERVAL), function="max")
    started, under_way = picked(names.CHECKPOINT_PHASE_STARTED), picked(names.CHECKPOINT_PHASE)
    limits = ", ".join(f"{phase} {seconds:g} s" for phase, seconds in config.phase_limits.items())
    drain, exclusive = (config.window_objectives[phase] for phase in ("drain", "exclusive"))
    return [
        (3, 4, run_state()),
        (3, 4, alerts_firing()),
        (
            4,
            4,
            number(
                "Since the last checkpoint",
                "Age of the newest published checkpoint; before the first, age of the run. Good: less than the "
                "interval in which the run means to save. A crash now costs everything since then.",
                Ask(f"time() - (({saved} > 0) or {began})", instant=True),
                unit="s",
            ),
        ),
        (
            4,
            4,
            number(
                "Intervals since then",
                f"The same age in intervals in which the run means to save. Good: up to 1. At "
                f"{config.overdue_intervals:g} the alert QuiesceCheckpointOverdue fires. No data: the run has not "
                "said its interval yet.",
                Ask(f"(time() - (({saved} > 0) or {began})) / ({interval} > 0)", instant=True),
                unit="none",
                decimals=1,
                steps=above(1.5, config.overdue_intervals),
                empty="not known yet",
            ),
        ),
        (
            3,
            4,
            number(
                "Steps at risk",
                "Trainer steps that a crash would cost now. Good: fewer than the run trains between two saves.",
                Ask(sum_by([], picked(names.STEPS_SINCE_CHECKPOINT), function="max")),
                unit="none",
                decimals=0,
            ),
        ),
        (
            3,
            4,
            number(
                "Writers waited",
                "Time that slots of all kinds waited for windows, in the range shown. Good: milliseconds a window. "
                "It is the price that rollouts pay for checkpoints.",
                Ask(_increase(names.WINDOW_BLOCKED, ""), instant=True),
                unit="s",
            ),
        ),
        (
            4,
            4,
            number(
                "Trainer waited",
                "Time for which saving held the train pump up, in the range shown: a previous write, the fence, the "
                "window, staging. Good: a small part of the range.",
                Ask(_increase(names.TRAINER_STALL, ""), instant=True),
                unit="s",
            ),
        ),
        # The second row has the widths of the first, so that its columns stand below them.
        (
            3,
            4,
            number(
                "Phase under way",
                "The phase that a checkpoint is in now, and how long it has been. Good: none, or seconds. "
                f"QuiesceCheckpointStalled fires at the phase's limit, where this turns vermilion: {limits}.",
                Ask(
                    sum_by(["phase"], f"(time() - {started}) and {under_way} == 1", function="max"),
                    "{{phase}}",
                ),
                unit="s",
                decimals=1,
                text="value_and_name",
                empty="none",
                overrides=[
                    stepped(phase, above(limit / 2, limit)) for phase, limit in config.phase_limits.items()
                ],
            ),
        ),
        (
            3,
            4,
            number(
                "Saves that failed",
                "Attempts that failed or were refused, in the range shown. Good: 0. The last good checkpoint stays "
                "the newest; the table of attempts names the reason.",
                Ask(
                    sum_by(
                        [],
                        f"increase({picked(names.CHECKPOINT_ATTEMPTS, outcome=('failed', 'refused'))}[{_WHOLE}])",
                    ),
                    instant=True,
                ),
                decimals=0,
                steps=((None, GOOD), (0.5, BAD)),
            ),
        ),
        (4, 4, open_violations(config)),
        (
            4,
            4,
            number(
                "Finished groups at risk",
                "Prompt groups that were generated after the last cut: a crash has them generated again. Good: about "
                "what is generated between two saves.",
                Ask(sum_by([], picked(names.GROUPS_SINCE_CHECKPOINT), function="max")),
                unit="none",
                decimals=0,
            ),
        ),
        (
            3,
            4,
            number(
                "Barrier closed",
                "Share of the last hour in which no new slot was admitted, whatever the range shown. Good: below "
                f"{config.window_budget_ratio:.1%}, which is where the alert QuiesceWindowBudget is.",
                Ask(sum_by([], f"increase({picked(names.WINDOW_CLOSED)}[1h]) / 3600"), instant=True),
                unit="percentunit",
                decimals=3,
                steps=above(config.window_budget_ratio / 2, config.window_budget_ratio),
            ),
        ),
        (
            3,
            4,
            number(
                "Drain, last window",
                f"How long the last window waited for open slots to close. Good: below {drain:g} s. The panel of "
                "blame says which kind of slot it waited for.",
                Ask(sum_by([], picked(names.CHECKPOINT_PHASE_LAST, phase="drain"), function="max")),
                unit="s",
                steps=above(drain / 2, drain),
            ),
        ),
        (
            4,
            4,
            number(
                "Exclusive, last window",
                f"How long nothing could move in the last window. Good: below {1000 * exclusive:g} ms, usually less than a "
                "millisecond. It does not grow with the size of the model.",
                Ask(sum_by([], picked(names.CHECKPOINT_PHASE_LAST, phase="exclusive"), function="max")),
                unit="s",
                steps=above(exclusive / 2, exclusive),
            ),
        ),
    ]


def _each(config: AlertConfig) -> list[tuple[int, int, object]]:
    count = sum_by(["phase"], f"increase({picked(names.CHECKPOINT_PHASE_SECONDS, '_count')}[{_WHOLE}])")
    total = sum_by(["phase"], f"increase({picked(names.CHECKPOINT_PHASE_SECONDS, '_sum')}[{_WHOLE}])")
    last = sum_by(["phase"], picked(names.CHECKPOINT_PHASE_LAST), function="max")
    drain, exclusive = (config.window_objectives[phase] for phase in ("drain", "exclusive"))
    return [
        (
            12,
            8,
            lines(
                "Phases of the last checkpoint",
                "How long each phase took when it ran last; a value holds until the next checkpoint. Good: level. "
                "Only drain and exclusive stop writers; verify, write and publish go on beside the training. "
                "Empty: no checkpoint was tried yet.",
                Ask(last, "{{phase}}"),
                unit="s",
                stepped=True,
                logarithmic=True,
                named=PHASES,
            ),
        ),
        (
            12,
            8,
            lines(
                "The window against its objectives",
                f"Drain and exclusive phase of the last window. Good: drain below {drain:g} s, exclusive below "
                f"{1000 * exclusive:g} ms (the dashed lines). A growing drain is a slot that stays open: look at the blame.",
                Ask(
                    sum_by(
                        ["phase"],
                        picked(names.CHECKPOINT_PHASE_LAST, phase=("drain", "exclusive")),
                        function="max",
                    ),
                    "{{phase}}",
                ),
                unit="s",
                stepped=True,
                logarithmic=True,
                steps=((None, GOOD), (exclusive, WARN), (drain, BAD)),
                named=("drain", "exclusive"),
            ),
        ),
        *(
            (
                12,
                8,
                heat(
                    f"{phase.capitalize()} phase",
                    f"How many windows had {phase} phases of which length, with an exemplar for a slow one: it opens "
                    "the trace. Good: one dark band that stays where it is. Empty: no window in this range.",
                    Ask(
                        came(picked(names.CHECKPOINT_PHASE_SECONDS, "_bucket", phase=phase), ["le"]),
                        "{{le}}",
                        exemplar=True,
                        heatmap=True,
                    ),
                ),
            )
            for phase in ("exclusive", "drain")
        ),
        (
            14,
            8,
            table(
                "Phases over the whole range",
                "Each phase in the range shown: how often it ran, how long it took on average, at p95, and last. Good: "
                "p95 near the average. The p95 is that of the histogram's buckets.",
                Ask(count, table=True),
                Ask(f"{total} / ({count} > 0)", table=True),
                Ask(quantile(0.95, names.CHECKPOINT_PHASE_SECONDS, ["phase"], _WHOLE), table=True),
                Ask(last, table=True),
                columns=[
                    Column("phase", "phase"),
                    Column("Value #A", "times", "none", 0),
                    Column("Value #B", "mean", "s"),
                    Column("Value #C", "p95", "s"),
                    Column("Value #D", "last", "s"),
                ],
                sort="mean",
            ),
        ),
        (
            10,
            8,
            states(
                "Phase in progress",
                "What the checkpointer was doing whenever it was scraped. Good: short marks, and not for every save: what "
                "is over between two scrapes is not seen. A mark without end is a checkpoint that is stuck in that phase.",
                Ask(sum_by(["phase"], picked(names.CHECKPOINT_PHASE), function="max"), "{{phase}}"),
                mappings=mapped({0: ("idle", NOTHING), 1: ("in progress", NEUTRAL)}),
            ),
        ),
    ]


def _causes() -> list[tuple[int, int, object]]:
    return [
        (
            12,
            8,
            lines(
                "Blame: what windows drained for",
                "Time that windows drained while a slot of the kind was open. Kinds overlap, so they may add up to more "
                "than the drain. Good: no kind stands out. The highest bar is where to look first.",
                Ask(came(picked(names.WINDOW_BLAME), ["kind"]), "{{kind}}", exemplar=False),
                unit="s",
                bars=True,
                stacked=True,
                named=KINDS,
            ),
        ),
        (
            12,
            8,
            lines(
                "Writer seconds lost",
                "Time that slots of the kind waited for windows. Good: about the length of the window for each that "
                "came in its way. Much more means that many writers queue behind it.",
                Ask(came(picked(names.WINDOW_BLOCKED), ["kind"]), "{{kind}}"),
                unit="s",
                bars=True,
                stacked=True,
                named=KINDS,
            ),
        ),
        (
            12,
            8,
            lines(
                "Trainer seconds lost",
                "Time for which saving held the train pump up, by cause. Good: none, or little. previous_write: "
                "checkpoints come faster than "
                "the disk writes them. fence: a worker is slow to answer. stage: copying the trainer's state.",
                Ask(came(picked(names.TRAINER_STALL), ["cause"]), "{{cause}}"),
                unit="s",
                bars=True,
                stacked=True,
                named=("previous_write", "fence", "window", "stage"),
            ),
        ),
        (
            12,
            8,
            lines(
                "Attempts by outcome",
                "Attempts to save. Good: completed only; skipped means that nothing had changed. failed and refused "
                "leave the last good checkpoint the newest.",
                Ask(came(picked(names.CHECKPOINT_ATTEMPTS), ["outcome"]), "{{outcome}}"),
                bars=True,
                stacked=True,
                named=("completed", "skipped", "cancelled", "failed", "refused"),
            ),
        ),
        (
            7,
            9,
            table(
                "Attempts over the whole range",
                "Outcome and reason of every attempt in the range shown. Good: completed, and skipped because nothing "
                "changed.",
                Ask(
                    sum_by(["outcome", "reason"], f"increase({picked(names.CHECKPOINT_ATTEMPTS)}[{_WHOLE}])")
                    + " > 0.5",
                    table=True,
                ),
                columns=[
                    Column("outcome", "outcome"),
                    Column("reason", "reason"),
                    Column("Value", "attempts", "none", 0),
                ],
                sort="attempts",
                empty="no attempt in this range",
            ),
        ),
        (
            10,
            9,
            table(
                "Kinds of slots over the whole range",
                "By kind of slot: time that windows drained for it, and time that it waited for windows. Good: both "
                "small beside the range. The first row is the kind to blame.",
                Ask(_increase(names.WINDOW_BLAME, "kind"), table=True),
                Ask(_increase(names.WINDOW_BLOCKED, "kind"), table=True),
                columns=[
                    Column("kind", "kind"),
                    Column("Value #A", "delayed windows for", "s"),
                    Column("Value #B", "waited for windows", "s"),
                ],
                sort="delayed windows for",
            ),
        ),
        (
            7,
            9,
            lines(
                "Windows over their objective",
                "Windows whose phase took longer than its objective, counted by the process itself. Good: none; a few "
                "in six hours raise the alert QuiesceWindowOverObjective.",
                Ask(came(picked(names.WINDOW_OVER_OBJECTIVE), ["phase"]), "{{phase}}"),
                bars=True,
                stacked=True,
                named=("drain", "exclusive"),
            ),
        ),
    ]


def _detail() -> list[tuple[int, int, object]]:
    return [
        (
            12,
            8,
            lines(
                "Parts of the last cut",
                "What the exclusive phase spent on each of the six parts. Good: tens of microseconds each; the part "
                "that grows with the number of groups is the one to look at. Empty: nothing was cut yet.",
                Ask(sum_by(["part"], picked(names.CUT_PART), function="max"), "{{part}}"),
                unit="s",
                stepped=True,
                logarithmic=True,
                named=("cursor", "position", "spares", "buffer", "ledger", "rows"),
            ),
        ),
        (
            12,
            8,
            lines(
                "Work at risk",
                "Steps and finished groups that a crash would cost, and attempts to save that failed since the last "
                "checkpoint. Good: a saw tooth that falls to 0 at each save, and no failed attempt. "
                "A line that only rises: nothing is saved any more.",
                Ask(sum_by([], picked(names.STEPS_SINCE_CHECKPOINT), function="max"), "steps"),
                Ask(sum_by([], picked(names.GROUPS_SINCE_CHECKPOINT), function="max"), "finished groups"),
                Ask(sum_by([], picked(names.CHECKPOINT_FAILURES), function="max"), "failed attempts"),
                stepped=True,
                named=("steps", "finished groups", "failed attempts"),
            ),
        ),
        (
            8,
            8,
            lines(
                "Groups in the last checkpoint",
                "Prompt groups in the last published checkpoint, by owner. Good: level; it follows the sizes of buffer "
                "and dispatch.",
                Ask(sum_by(["owner"], picked(names.CHECKPOINT_GROUPS), function="max"), "{{owner}}"),
                stepped=True,
                stacked=True,
                named=OWNERS,
            ),
        ),
        (
            8,
            8,
            lines(
                "Size of the last checkpoint",
                "Bytes of the last published checkpoint: all of it, and the trainer's state, rows and documents in it. "
                "Good: level.",
                Ask(sum_by(["part"], picked(names.CHECKPOINT_BYTES), function="max"), "{{part}}"),
                unit="bytes",
                stepped=True,
                named=("all", "trainer", "rows", "documents"),
            ),
        ),
        (
            8,
            8,
            lines(
                "Rows in the last checkpoint",
                "Rows of the data plane in the last published checkpoint. Good: level; it follows the groups that are "
                "in the buffer.",
                Ask(sum_by([], picked(names.CHECKPOINT_ROWS), function="max"), "rows"),
                stepped=True,
                named=("rows",),
            ),
        ),
        (
            8,
            7,
            table(
                "The last restore",
                "How long each part of the last restore took. Good: seconds. Empty: this process was not resumed.",
                Ask(sum_by(["part"], picked(names.RESTORE_SECONDS), function="max") + " > 0", table=True),
                columns=[Column("part", "part"), Column("Value", "took", "s")],
                sort="took",
                empty="not resumed",
            ),
        ),
        (
            8,
            7,
            table(
                "Groups that were restored",
                "Prompt groups that this process restored, by the owner that they were saved with. Good: all that the "
                "checkpoint had.",
                Ask(sum_by(["from"], picked(names.RESTORE_GROUPS)) + " > 0", table=True),
                columns=[Column("from", "saved as"), Column("Value", "groups", "none", 0)],
                sort="groups",
                empty="not resumed",
            ),
        ),
        (
            4,
            7,
            number(
                "Restores refused",
                "Restores that were refused or failed in this process, for whatever reason. Good: 0.",
                Ask(sum_by([], picked(names.RESTORE_REFUSALS))),
                decimals=0,
                steps=((None, GOOD), (0.5, BAD)),
            ),
        ),
        (
            4,
            7,
            number(
                "Tokens not generated again",
                "Tokens of calls that a checkpoint had cut and that a resume went on from. Good: what was staged.",
                Ask(sum_by([], picked(names.RESTORE_TOKENS_REUSED))),
                decimals=0,
            ),
        ),
    ]
