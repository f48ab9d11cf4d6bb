"""The dashboard of owners and invariants: who owns what, whether the account adds up, and whether everything holds."""

from __future__ import annotations

from quiesce.telemetry import names
from quiesce.types import OWNERS
from quiesce_dashboards.objectives import AlertConfig
from quiesce_dashboards.panels import (
    BAD,
    GOOD,
    NOTHING,
    Ask,
    Column,
    Section,
    lines,
    mapped,
    number,
    states,
    table,
)
from quiesce_dashboards.queries import came, matching, picked, quantile, sum_by
from quiesce_dashboards.shared import firing_alerts, open_violations, violated

__all__ = ["ownership"]

_GREW = "$__rate_interval"
_WHOLE = "$__range"


def ownership(config: AlertConfig) -> list[Section]:
    """Return the dashboard's parts.

    Args:
        config: The objectives.
    """
    return [
        Section("Does everything hold?", _holds(config)),
        Section("Who owns what", _owners()),
        Section("Cursor and versions", _cursor()),
        Section("Where groups go", _moves()),
    ]


def _holds(config: AlertConfig) -> list[tuple[int, int, object]]:
    read = sum_by([], picked(names.PROMPTS_READ))
    trained = sum_by([], picked(names.PROMPTS_TRAINED))
    dropped = sum_by([], picked(names.PROMPTS_DROPPED))
    owned = sum_by([], picked(names.GROUPS))
    cursor = sum_by([], picked(names.DISPATCH_CURSOR), function="max")
    stamped = sum_by([], picked(names.TARGET_STEP_MAX), function="max")
    active = sum_by(["invariant"], picked(names.INVARIANT_ACTIVE), function="max")
    broken = sum_by(["invariant"], violated(config), function="max")
    last, violations, checks = (
        sum_by(["invariant"], f"max_over_time({picked(metric)}[{_WHOLE}])", function=function)
        for metric, function in (
            (names.INVARIANT_LAST_VIOLATION, "max"),
            (names.INVARIANT_VIOLATIONS, "sum"),
            (names.INVARIANT_CHECKS, "sum"),
        )
    )
    return [
        (4, 5, open_violations(config, linked=False)),
        (
            4,
            5,
            number(
                "Prompts unaccounted for",
                "Prompts read, less those that were trained, dropped or are owned. Good: 0. Each prompt has exactly one "
                "place; a scrape between two of them may show a difference for one sample.",
                Ask(f"{read} - {trained} - {dropped} - {owned}"),
                unit="none",
                decimals=0,
                mappings=mapped({0: ("none", GOOD)}),
                steps=((None, BAD), (0, GOOD), (1, BAD)),
            ),
        ),
        (
            4,
            5,
            number(
                "Cursor ahead of stamps",
                "Dispatch cursor less the largest step that is stamped on a group. Good: 0 or more. Below 0, a resume "
                "would drop a batch without a word.",
                Ask(f"{cursor} - ({stamped} >= 0)"),
                unit="none",
                decimals=0,
                steps=((None, BAD), (0, GOOD)),
                empty="no stamps",
            ),
        ),
        (12, 5, firing_alerts(config)),
        (
            14,
            11,
            states(
                "Invariants",
                "Grey: nothing is known, because the invariant does not apply to this run or was not checked yet. Green: "
                f"it holds. Red: it was seen violated in the last {config.violation_seconds / 60:g} minutes. Good: green "
                "or grey.",
                Ask(f"{active} + 2 * {broken}", "{{invariant}}"),
                mappings=mapped(
                    {
                        0: ("not active", NOTHING),
                        1: ("holds", GOOD),
                        2: ("violated", BAD),
                        3: ("violated", BAD),
                    }
                ),
            ),
        ),
        (
            10,
            11,
            table(
                "Violations",
                "Each invariant that was violated in this run, as far as the range shows: how often, when last, and how "
                "often it was checked, by its processes together. Good: no row. The records with their evidence are in "
                "violations.jsonl of the run folder; `quiesce view` shows them, and `quiesce violations` closes them.",
                Ask(f"({last} > 0) * 1000", table=True),
                Ask(f"{violations} and {matching(['invariant'])} ({last} > 0)", table=True),
                Ask(f"{checks} and {matching(['invariant'])} ({last} > 0)", table=True),
                columns=[
                    Column("invariant", "invariant"),
                    Column("Value #A", "last violated", "dateTimeFromNow"),
                    Column("Value #B", "violations", "none", 0),
                    Column("Value #C", "checks", "none", 0),
                ],
                sort="last violated",
            ),
        ),
    ]


def _owners() -> list[tuple[int, int, object]]:
    return [
        (
            16,
            8,
            lines(
                "Groups by owner",
                "Prompt groups that each owner holds. Good: level within the capacity of the run. ledger: in flight; "
                "buffer: finished; training: claimed by the step that runs; spares: in reserve.",
                Ask(sum_by(["owner"], picked(names.GROUPS)), "{{owner}}"),
                stacked=True,
                named=OWNERS,
            ),
        ),
        (
            8,
            8,
            lines(
                "Prompts, along the lineage",
                "Prompts read, trained and dropped, from the first start on, over resumes. Good: read runs ahead of "
                "trained by what is owned; dropped stays flat.",
                Ask(sum_by([], picked(names.PROMPTS_READ)), "read"),
                Ask(sum_by([], picked(names.PROMPTS_TRAINED)), "trained"),
                Ask(sum_by([], picked(names.PROMPTS_DROPPED)), "dropped"),
                stepped=True,
                named=("read", "trained", "dropped"),
            ),
        ),
    ]


def _cursor() -> list[tuple[int, int, object]]:
    return [
        (
            12,
            8,
            lines(
                "Cursor, version and stamps",
                "Dispatch cursor, trainer version, and the largest step stamped in ledger and buffer. Good: the cursor "
                "on top, ahead of the version by the lookahead at most, and no stamp above the cursor.",
                Ask(sum_by([], picked(names.DISPATCH_CURSOR), function="max"), "cursor"),
                Ask(sum_by([], picked(names.TRAINER_VERSION), function="max"), "trainer version"),
                Ask(
                    sum_by(["owner"], picked(names.TARGET_STEP_MAX), function="max") + " >= 0",
                    "largest step in {{owner}}",
                ),
                unit="none",
                stepped=True,
                named=(
                    "cursor",
                    "trainer version",
                    "largest step in ledger",
                    "largest step in buffer",
                ),
            ),
        ),
        (
            12,
            8,
            lines(
                "Lookahead",
                "How far the dispatch cursor is ahead of the trainer version. Good: at the sampler's lookahead, level. "
                "It shrinks when rollouts cannot keep up.",
                Ask(
                    f"{sum_by([], picked(names.DISPATCH_CURSOR), function='max')} - "
                    f"{sum_by([], picked(names.TRAINER_VERSION), function='max')}",
                    "steps ahead",
                ),
                unit="none",
                stepped=True,
                low=None,
                named=("steps ahead",),
            ),
        ),
        (
            12,
            8,
            lines(
                "Admissions",
                "Batches that the sampler admitted, by path. Good: transactional. fallback is a custom sampler that "
                "waits at its gate inside a slot, so that checkpoints wait for it.",
                Ask(
                    came(picked(names.ADMISSION_COMMITS), ["path"]),
                    "{{path}}",
                ),
                bars=True,
                stacked=True,
                named=("transactional", "fallback"),
            ),
        ),
        (
            12,
            8,
            lines(
                "Wait at the sampler's gate",
                "How long batches waited until the sampler admitted them. Good: about a step: the trainer sets the pace. "
                "Near 0: rollouts are what training waits for. Empty: nothing was admitted in this range.",
                Ask(quantile(0.5, names.ADMISSION_WAIT), "median"),
                Ask(quantile(0.95, names.ADMISSION_WAIT), "p95"),
                unit="s",
                named=("median", "p95"),
            ),
        ),
    ]


def _moves() -> list[tuple[int, int, object]]:
    moved = sum_by(["from", "to"], f"rate({picked(names.GROUPS_MOVED)}[{_GREW}])")
    total = sum_by(["from", "to"], f"increase({picked(names.GROUPS_MOVED)}[{_WHOLE}])")
    dropped = came(picked(names.PROMPTS_DROPPED), ["reason"])
    return [
        (
            12,
            8,
            lines(
                "Moves a second",
                "Groups that go from one owner to the next. Good: read to ledger, ledger to buffer, buffer to training "
                "and training to trained at the same pace.",
                Ask(f"{moved} > 0", "{{from}} to {{to}}"),
                unit="suffix:groups/s",
            ),
        ),
        (
            6,
            8,
            table(
                "Moves over the whole range",
                "How many groups went which way in the range shown. Good: as many out of each owner as into it, and "
                "few dropped.",
                Ask(f"{total} > 0.5", table=True),
                columns=[Column("from", "from"), Column("to", "to"), Column("Value", "groups", "none", 0)],
                sort="groups",
                empty="no move in this range",
            ),
        ),
        (
            6,
            8,
            lines(
                "Dropped prompts",
                "Prompts whose group was dropped, by reason. Good: none. violation: a refused checkpoint blamed it; "
                "failed: it could not be generated.",
                Ask(dropped, "{{reason}}"),
                bars=True,
                stacked=True,
                named=("failed", "stale_abort", "evicted", "violation"),
            ),
        ),
    ]
