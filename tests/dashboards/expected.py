"""What the recorded run, and the synthetic day, rightly say nothing about, each with the reason.

The tests hold both ways: what is not listed has data, and what is listed has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from quiesce.telemetry import names

__all__ = ["EITHER", "EMPTY", "EMPTY_DAY", "MOMENTARY", "QUIET", "UNLIT", "UNSEEN"]

_NO_GPU: Final = "there is no GPU, so its families do not exist"

EMPTY: Final[Mapping[str, str]] = {
    "quiesce-training / GPU memory / A": _NO_GPU,
    "quiesce-training / GPU utilization / A": _NO_GPU,
}
"""Expressions of dashboards, about the recorded run."""

EMPTY_DAY: Final[Mapping[str, str]] = {
    "quiesce-windows / Phase under way / A": "no checkpoint is under way when the day ends",
}
"""Expressions of dashboards, about the synthetic day."""

MOMENTARY: Final[Mapping[str, str]] = {
    "quiesce-windows / Phase under way / A": "no phase takes longer than the time between two scrapes",
}
"""Expressions of dashboards that have data only if a scrape falls into a moment: at most scrapes they have none."""

_NO_VIOLATION: Final = "the drill breaks another invariant"

QUIET: Final[Mapping[str, str]] = {
    "QuiesceOwnershipConflict": _NO_VIOLATION,
    "QuiescePromptsUnaccounted": _NO_VIOLATION,
    "QuiesceMutationInsideWindow": _NO_VIOLATION,
    "QuiesceCutNotAtomic": _NO_VIOLATION,
    "QuiesceRowsDiverged": _NO_VIOLATION,
    "QuiesceDigestMismatch": _NO_VIOLATION,
    "QuiesceVersionRegressed": _NO_VIOLATION,
    "QuiesceGateViolated": _NO_VIOLATION,
    "QuiesceInvariantViolated": _NO_VIOLATION,
    "QuiesceRowsOrphaned": _NO_VIOLATION,
    "QuiesceDrainSlow": "no drain takes half a second",
    "QuiesceWindowOverObjective": "no window is over its objective",
    "QuiesceWindowBudget": "windows take milliseconds of the hour",
    "QuiesceCleanupBacklog": "calls are cleared as they come",
    "QuiesceCleanupFailing": "every clear works",
    "QuiesceAdmissionFallback": "the sampler waits outside of a slot",
    "QuiesceTelemetryDropping": "no span is lost",
}
"""Alerts that the recorded run gives no cause for."""

EITHER: Final[Mapping[str, str]] = {
    "QuiesceCheckpointFailing": "whether a scrape falls between the refused save and the one after it is the pace's",
    "QuiesceCheckpointStalled": "whether a phase takes a sixtieth of its limit is the machine's",
    "QuiesceGateClosedTooLong": "whether a scrape falls into the milliseconds for which a gate is closed is chance",
    "QuiesceCheckpointOverdue": "whether the resume takes three intervals is the machine's",
}
"""Alerts that may have a cause or not."""

UNSEEN: Final[Mapping[str, str]] = {
    f'{names.INVARIANT_LAST_VIOLATION.name}{{invariant!~"{"|".join(names.INVARIANTS)}"}}': "nobody added a check",
}
"""Selectors of rules that select nothing of the recorded run."""

UNLIT: Final[Mapping[str, str]] = {
    f"{names.MUTATION_WAIT.name}_bucket": "no slot has to have waited, and one that has not waited has no exemplar",
}
"""Series that may be without exemplars in the recorded run."""
