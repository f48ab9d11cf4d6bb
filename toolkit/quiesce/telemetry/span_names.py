"""The spans, with their attributes and the span that each is part of.

Rule: a span, or an attribute of one, that is not in here is not made; every span that is in here can be (a
test compares both ways). Names are dotted, as OpenTelemetry's are. Nothing here suspends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["COMMON_ATTRIBUTES", "SPANS", "STEP_NUMBERS", "SpanSpec", "span_spec"]

COMMON_ATTRIBUTES: Final = ("quiesce.outcome", "quiesce.error", "quiesce.cut_off")
"""Attributes that any span may have: how it ended, what went wrong, and whether the process ended it."""

STEP_NUMBERS: Final = ("reward", "loss", "kl", "staleness")
"""What a trainer may report about a step that its span carries."""


@dataclass(frozen=True, slots=True)
class SpanSpec:
    """One kind of span.

    Attributes:
        name: Its dotted name.
        help: What it covers.
        attributes: Keys that it may have beside the common ones.
        parent: The span that it is part of; "" for a root, or a child of the application's current span.
        links: What its links point to, or "".
    """

    name: str
    help: str
    attributes: tuple[str, ...] = ()
    parent: str = ""
    links: str = ""


_CUT = "quiesce.cut_id"
_HOLDER = ("quiesce.last_holder.kind", "quiesce.last_holder.task", "quiesce.last_holder.seconds")


def _phase(phase: str, help_: str, *attributes: str, parent: str = "quiesce.checkpoint") -> SpanSpec:
    return SpanSpec(f"quiesce.checkpoint.{phase}", help_, (_CUT, *attributes), parent)


SPANS: Final[dict[str, SpanSpec]] = {
    spec.name: spec
    for spec in (
        SpanSpec(
            "quiesce.slot",
            "A mutation slot, from asking to leaving; past the budget only interesting ones and a sample",
            ("quiesce.kind", "quiesce.wait_seconds", "quiesce.held"),
            links="the windows that it waited for",
        ),
        SpanSpec(
            "quiesce.checkpoint",
            "An attempt to save, from the fence (or the wait for the previous write) to the publication",
            (
                _CUT,
                "quiesce.step",
                "quiesce.reason",
                "quiesce.rows",
                "quiesce.bytes",
                "quiesce.groups",
            ),
        ),
        _phase("fence", "Closing the snapshot gates"),
        SpanSpec(
            "quiesce.window",
            "The barrier admits no new slot: the drain and the exclusive phase; a root without a checkpoint",
            (_CUT, "quiesce.delayed_by", *_HOLDER),
            "quiesce.checkpoint",
            "the slots that delayed it, the 64 that left last if there were more",
        ),
        _phase("drain", "Waiting for open slots; names the last holder", *_HOLDER, parent="quiesce.window"),
        _phase("exclusive", "Capturing the cut, alone", parent="quiesce.window"),
        _phase(
            "part",
            "Capturing one of the six artifacts",
            "quiesce.part",
            parent="quiesce.checkpoint.exclusive",
        ),
        _phase("verify", "Checking the cut's invariants"),
        _phase("stage", "Copying the trainer's state aside"),
        _phase("write", "Writing the cut to a temporary folder"),
        _phase("fsync", "Making a file durable", "quiesce.bytes", parent="quiesce.checkpoint.write"),
        _phase("publish", "Making the checkpoint the newest"),
        SpanSpec(
            "quiesce.restore",
            "Restoring a run from a checkpoint, from looking for one to the last group; its parts follow each other",
            ("quiesce.reason", "quiesce.groups"),
        ),
        SpanSpec(
            "quiesce.restore.part",
            "One part of a restore; the last one of a restore that did not complete ended as it did",
            ("quiesce.part",),
            "quiesce.restore",
        ),
        SpanSpec(
            "quiesce.train.step",
            "An optimizer step",
            (
                "quiesce.step",
                "quiesce.version",
                "quiesce.groups",
                *(f"quiesce.{name}" for name in STEP_NUMBERS),
            ),
        ),
        SpanSpec(
            "quiesce.rollout",
            "One attempt to generate a group: one generation call",
            ("quiesce.group_id", "quiesce.attempt", "quiesce.tokens"),
            "quiesce.group",
        ),
        SpanSpec("quiesce.weight_sync", "Giving the workers new weights", ("quiesce.version",)),
        SpanSpec(
            "quiesce.gate.close",
            "A worker's snapshot gate closing: until no permit is out",
            ("quiesce.worker", "quiesce.epoch", "quiesce.answer"),
            "quiesce.checkpoint.fence",
        ),
        SpanSpec(
            "quiesce.cleanup.batch",
            "Clearing the rows of several calls together",
            ("quiesce.worker", "quiesce.calls", "quiesce.keys"),
            links="the rollouts whose rows are cleared",
        ),
        SpanSpec(
            "quiesce.group",
            "A prompt group's life, from reserved (or restored) to trained or dropped; each change of owner is an event",
            ("quiesce.group_id", "quiesce.from", "quiesce.end", "quiesce.reason"),
        ),
    )
}
"""Every span, by name."""


def span_spec(name: str) -> SpanSpec:
    """Return a span of the catalogue.

    Raises:
        KeyError: If the catalogue does not have it.
    """
    return SPANS[name]
