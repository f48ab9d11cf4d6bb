"""What stands where on the page: its sections, and the numbers at its top.

Rule: whatever has no data is a sentence that says why, never an empty chart. Nothing here suspends.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from quiesce.report.charts import (
    Section,
    ranked,
    total_of,
)
from quiesce.report.data import RunData
from quiesce.report.progress import gauge, groups, reused, steps, steps_ahead, tokens
from quiesce.report.saves import cut_table, phase_histograms, phase_table, phases_over_time, saves_lead
from quiesce.report.slots import percentiles, slot_table, slow_table, stacked
from quiesce.report.tables import invariants, notes, restores, violations
from quiesce.report.words import count_of, duration, share_of
from quiesce.telemetry import names

__all__ = ["sections", "tiles"]


def sections(data: RunData) -> list[Section]:
    """Make the page's sections."""
    return [
        Section(
            "saves", "Saves", saves_lead(data), [phases_over_time(data), cut_table(data), phase_table(data)]
        ),
        Section(
            "phases",
            "How long phases take",
            "Of all saves alike, however they ended: one count for each time a phase came to its end.",
            phase_histograms(data),
        ),
        Section(
            "cost",
            "What saving costs",
            "A window waits for the slots that are open, slots wait for the window, and the trainer for both.",
            [
                stacked(data, names.WINDOW_BLAME, "Drain blame by kind", "No window waited for a slot."),
                stacked(
                    data, names.WINDOW_BLOCKED, "Writer time lost by kind", "No slot waited for a window."
                ),
                stacked(
                    data,
                    names.TRAINER_STALL,
                    "Trainer time lost to saving, by cause",
                    "No save that ended held the trainer up."
                    if data.cut_offs
                    else "No save held the trainer up.",
                ),
                stacked(
                    data,
                    names.TRAIN_IDLE,
                    "Trainer time idle, by cause",
                    "The trainer never waited for anything.",
                ),
            ],
        ),
        Section(
            "slots",
            "Mutation slots",
            "Percentiles are estimated from histograms, as Prometheus does it.",
            [
                percentiles(
                    data,
                    names.MUTATION_WAIT.name,
                    "Slot wait, 99th percentile of those that waited",
                    "No slot that ended had to wait.",
                    waited=True,
                ),
                percentiles(
                    data,
                    names.MUTATION_HOLD.name,
                    "Slot hold, 99th percentile",
                    "No slot ended while the run recorded.",
                ),
                slot_table(data),
                slow_table(data),
            ],
        ),
        Section(
            "groups",
            "Groups and steps",
            "Who owns prompt groups, and how far the sampler and the trainer have come.",
            [groups(data), steps(data), steps_ahead(data)],
        ),
        Section(
            "training",
            "Training",
            "As the trainer reported it.",
            [
                gauge(data, names.TRAIN_REWARD.name, "Reward", "The trainer reported no reward.", wide=True),
                gauge(data, names.TRAIN_LOSS.name, "Loss", "The trainer reported no loss."),
                gauge(data, names.TRAIN_KL.name, "KL divergence", "The trainer computes no KL divergence."),
                tokens(data),
                reused(data),
            ],
        ),
        Section(
            "invariants",
            "Invariants",
            "What the auditor checked while the run went on and at every save; what was never checked is not known to hold.",
            [invariants(data), violations(data)],
        ),
        Section(
            "restores",
            "Restores and warnings",
            "How the run came back, and what its log complained about.",
            [restores(data), notes(data)],
        ),
    ]


def tiles(data: RunData) -> list[tuple[str, str, str]]:
    """Return the numbers at the top: what, how much, and in which respect."""
    saves = data.outcomes
    exclusive = sorted(save.phases["exclusive"] for save in data.saves if "exclusive" in save.phases)
    drain = sorted(save.phases["drain"] for save in data.saves if "drain" in save.phases)
    broken = sum(grown.total for grown in data.counters.get(names.INVARIANT_VIOLATIONS.name, {}).values())
    left = sum(record.open for record in data.violations)
    checked = sum(grown.total for grown in data.counters.get(names.INVARIANT_CHECKS.name, {}).values())
    found = [
        (
            "Saves",
            str(saves.get("completed", 0)),
            ", ".join(f"{count} {outcome}" for outcome, count in saves.items() if outcome != "completed")
            or ("all completed" if saves else "none attempted"),
        ),
        ("Exclusive, median", duration(_middle(exclusive)), f"longest {duration(_last(exclusive))}"),
        ("Drain, median", duration(_middle(drain)), _longest_drain(data, drain)),
        (
            "Writer time lost",
            duration(total_of(data, names.WINDOW_BLOCKED.name)),
            f"closed for {duration(total_of(data, names.WINDOW_CLOSED.name))}",
        ),
        (
            "Trainer time lost",
            duration(total_of(data, names.TRAINER_STALL.name)),
            f"{share_of(total_of(data, names.TRAINER_STALL.name), data.ended - data.started)} of the run",
        ),
        (
            "Invariant violations",
            count_of(max(broken, len(data.violations))),
            f"{count_of(left)} open, in {count_of(checked)} checks"
            if left
            else f"in {count_of(checked)} checks",
        ),
    ]
    version = data.latest.get(names.TRAINER_VERSION.name, {}).get("")
    reward = data.latest.get(names.TRAIN_REWARD.name, {}).get("", math.nan)
    if version is not None:
        last = "no reward" if math.isnan(reward) else f"reward {reward:.3g}"
        found.insert(0, ("Trainer version", count_of(version), last))
    return found


def _longest_drain(data: RunData, ended: Sequence[float]) -> str:
    """Say how long the longest drain was: one that was cut off was at least as long as it had been."""
    cut = max((cut.seconds for cut in data.cut_offs if cut.phase == "drain"), default=0.0)
    if ended and ended[-1] >= cut:
        return f"longest {duration(ended[-1])}"
    return f"longest over {duration(cut)}" if cut else "longest –"


def _middle(values: Sequence[float]) -> float | None:
    return ranked(values, 0.5) if values else None


def _last(values: Sequence[float]) -> float | None:
    return values[-1] if values else None
