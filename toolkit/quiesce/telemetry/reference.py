"""Writes the reference page of metrics and log events from the catalogue.

Rule: the page says what the catalogue says and nothing else, so that it cannot go stale (a test compares the
committed page). Run it as ``python -m quiesce.telemetry.reference > docs/reference/metrics.md``. Nothing here
suspends.
"""

from __future__ import annotations

import sys

from quiesce.telemetry import names

__all__ = ["page"]

_AREAS = (
    ("Mutation slots", ("mutation_",)),
    ("The checkpoint", ("checkpoint_", "cut_", "steps_since", "groups_since")),
    ("What a checkpoint costs", ("window_", "trainer_stall")),
    ("Restoring", ("restore_",)),
    ("Admission", ("admission_", "dispatch_", "trainer_version", "target_step")),
    ("Ownership", ("groups_moved", "groups", "prompts_")),
    ("The data plane", ("dataplane_",)),
    ("Snapshot gates and cleanup", ("snapshot_gate_", "cleanup_", "reply_")),
    ("Invariants", ("invariant_",)),
    ("Training", ("train_", "tokens_", "groups_trained", "staleness_")),
    ("The device", ("gpu_",)),
    ("The run, and telemetry itself", ("run_", "capability", "telemetry_")),
)
"""Headings, and what the names under them start with after the common prefix; the longest match counts."""


_INTRODUCTION = (
    "Generated from `quiesce.telemetry.names`; do not edit. Every series also carries the labels "
    + " and ".join(f"`{label}`" for label in names.CONSTANT_LABELS)
    + ". Label values are closed sets, and every child exists at zero from the first scrape on. A family "
    "exists once a part that it needs was attached; `quiesce_capability` says which were. In a process without a "
    "barrier, operations of the data plane that belong to saving and restoring ("
    + ", ".join(f"`{op}`" for op in names.WINDOW_OPS)
    + ") have series once there was one."
)

_LOG_INTRODUCTION = (
    "One JSON object a line in `log.jsonl` of the run folder, and in the recording's `events` files, which are there "
    "without a log, too. Every line has `timestamp`, `level`, `event`, `run` and `role`, and `step`, `cut_id`, `trace_id` "
    "and `span_id` where they are known: the last two are those of the outermost span of the cut, or of the restore, the "
    "step or the group that the line is about."
)


def page() -> str:
    """Return the page as Markdown."""
    lines = [
        "# Metrics and log events",
        "",
        _INTRODUCTION,
        "",
    ]
    for heading, _ in _AREAS:
        metrics = [metric for metric in names.METRICS.values() if _area(metric) == heading]
        lines += [f"## {heading}", "", "| metric | type | labels | what it says | exists with |"]
        lines += ["| --- | --- | --- | --- | --- |", *map(_row, metrics), ""]
    lines += ["## Label values", "", "| label | of | values |", "| --- | --- | --- |"]
    lines += [*_label_rows(), ""]
    lines += ["## Buckets", "", "Upper bounds, in the metric's unit; `+Inf` is always there.", ""]
    lines += ["| upper bounds | of |", "| --- | --- |", *_bucket_rows(), ""]
    lines += [
        "## Log events",
        "",
        _LOG_INTRODUCTION,
        "",
        "| event | level | written when | fields |",
        "| --- | --- | --- | --- |",
    ]
    lines += [
        f"| `{event.name}` | {event.level} | {event.help} | {_code(event.fields)} |"
        for event in names.LOG_EVENTS.values()
    ]
    return "\n".join(lines) + "\n"


def _area(metric: names.Metric) -> str:
    short = metric.name.removeprefix(names.PREFIX)
    found = [
        (len(start), heading) for heading, starts in _AREAS for start in starts if short.startswith(start)
    ]
    return max(found)[1]


def _row(metric: names.Metric) -> str:
    parts = " or ".join(metric.needs) or "always"
    return f"| `{metric.name}` | {metric.type} | {_code(metric.label_names)} | {metric.help} | {parts} |"


def _label_rows() -> list[str]:
    used: dict[names.Label, list[str]] = {}
    for metric in names.METRICS.values():
        for label in metric.labels:
            used.setdefault(label, []).append(metric.name)
    rows = []
    for label, of in used.items():
        if label.constant:
            values = "fixed for the run"
        else:
            values = ", ".join(f"`{value}`" if value else "(empty)" for value in label.values)
            values += ", and the kinds that a barrier was given" if label.extended else ""
        rows.append(f"| `{label.name}` | {_code(tuple(of))} | {values} |")
    return rows


def _bucket_rows() -> list[str]:
    used: dict[tuple[float, ...], list[str]] = {}
    for metric in names.METRICS.values():
        if metric.buckets:
            used.setdefault(metric.buckets, []).append(metric.name)
    return [
        f"| {', '.join(f'{bound:g}' for bound in buckets)} | {_code(tuple(of))} |"
        for buckets, of in used.items()
    ]


def _code(items: tuple[str, ...]) -> str:
    return ", ".join(f"`{item}`" for item in items) or "none"


if __name__ == "__main__":
    sys.stdout.write(page())
