"""The part of a story about training: its steps, the syncs of its weights, and the restore that it began with.

Rule: as :mod:`quiesce.telemetry.story`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from quiesce.telemetry import names
from quiesce.telemetry.span_names import STEP_NUMBERS
from quiesce.telemetry.tracing import parent_in

if TYPE_CHECKING:
    from quiesce.telemetry.finished import Link
    from quiesce.telemetry.spans import Note
    from quiesce.telemetry.story_spans import Attributes, Begun, Maker
    from quiesce.telemetry.tracing import SpanHandle

__all__ = ["RestoreStory", "TrainingStory"]


class TrainingStory:
    """Tells of steps and syncs.

    Args:
        maker: Makes the spans.
    """

    def __init__(self, maker: Maker) -> None:
        self._maker = maker
        self._step: SpanHandle | None = None
        self._last_step: tuple[str, Link] | None = None
        self._sync: Begun | None = None

    def link_of(self, name: str) -> Link | None:
        """Return the span of the step (``step 7``) that began last; from any thread."""
        step = self._last_step
        return None if step is None or step[0] != name else step[1]

    def train_step_started(self, note: Note, step: int, version: int) -> None:
        """Begin a step; one that nobody ended is cut off."""
        self._cut_step(note.at_ns)
        about: Attributes = {"quiesce.step": step, "quiesce.version": version}
        start = self._maker.unix(note.at_ns)
        self._step = self._maker.start("quiesce.train.step", parent_in(note.context), start, about)
        self._last_step = (f"step {step}", self._step.link)

    def train_step_ended(
        self,
        note: Note,
        step: int,
        version: int,
        ns: int,
        groups: int,
        outcome: str,
        metrics: Mapping[str, float],
    ) -> None:
        """End a step, with its numbers."""
        handle, self._step = self._step, None
        end = self._maker.unix(note.at_ns)
        if handle is None:
            about: Attributes = {"quiesce.step": step, "quiesce.version": version}
            handle = self._maker.start("quiesce.train.step", parent_in(note.context), end - ns, about)
        said: Attributes = {"quiesce.groups": groups}
        said.update((f"quiesce.{name}", float(metrics[name])) for name in STEP_NUMBERS if name in metrics)
        self._maker.tracing.end(handle, end, outcome=outcome, attributes=said)
        if outcome == "completed":
            self._maker.told.append((names.TRAIN_STEP_SECONDS.name, (), ns, handle, end))

    def weight_sync_started(self, note: Note, version: int) -> None:
        """Remember that weights are on their way."""
        self._sync = (note, {"quiesce.version": version})

    def weight_synced(self, note: Note, version: int, ns: int, outcome: str) -> None:
        """Make a span of a sync."""
        self._sync = None
        about: Attributes = {"quiesce.version": version}
        self._maker.emit("quiesce.weight_sync", parent_in(note.context), note.at_ns, ns, outcome, about)

    def cut_off_sync(self, at_ns: int) -> None:
        """End the sync that goes on as cut off."""
        begun, self._sync = self._sync, None
        if begun is not None:
            self._maker.cut_begun("quiesce.weight_sync", parent_in(begun[0].context), begun, at_ns)

    def cut_off(self, at_ns: int) -> None:
        """End the step that goes on as cut off."""
        self._cut_step(at_ns)
        self._step = None

    def _cut_step(self, at_ns: int) -> None:
        if self._step is not None:
            self._maker.cut(self._step, at_ns)


class RestoreStory:
    """Tells of the restore.

    Args:
        maker: Makes the spans.
        restored: Told when one ended well, by the monotonic clock.
    """

    def __init__(self, maker: Maker, restored: Callable[[int], None]) -> None:
        self._maker = maker
        self._restored = restored
        self._restore: tuple[Begun, Link | None] | None = None

    def restore_started(self, note: Note, identity: Link | None = None) -> None:
        """Remember that a restore goes on, and its identifiers where they are ours."""
        self.cut_off(note.at_ns)  # nobody said how the one before ended
        self._restore = ((note, {}), identity)

    def restore_ended(
        self,
        note: Note,
        outcome: str,
        reason: str,
        parts: Mapping[str, int],
        groups: Mapping[str, int],
    ) -> None:
        """Make spans of a restore and of its parts."""
        begun, self._restore = self._restore, None
        unix, tracing = self._maker.unix, self._maker.tracing
        end = note.at_ns
        start, first, identity = end - sum(parts.values()), note, None
        if begun is not None:
            (first, _), identity = begun
            start = min(first.at_ns, end)
        handle = tracing.begin(
            "quiesce.restore",
            parent_in(first.context),
            unix(start),
            {"quiesce.reason": reason, "quiesce.groups": sum(groups.values())},
            (),
            identity,
        )
        error = reason if outcome in {"failed", "refused"} else ""
        # The first part began with the restore, and the last one ended with it; what lies between is nobody's.
        last = len(parts) - 1
        at, left = start, sum(parts.values())
        for number, (part, ns) in enumerate(parts.items()):
            if number:
                at = max(at, end - left)
            left -= ns
            child = self._maker.start("quiesce.restore.part", handle, unix(at), {"quiesce.part": part})
            at = end if number == last else min(at + ns, end)
            ended = outcome if number == last else "completed"
            tracing.end(child, unix(at), outcome=ended, error=error if number == last else "")
        tracing.end(handle, unix(end), outcome=outcome, error=error)
        if outcome == "completed":
            self._restored(end)

    def cut_off(self, at_ns: int) -> None:
        """End the restore that goes on as cut off."""
        restore, self._restore = self._restore, None
        if restore is not None:
            begun, identity = restore
            parent = parent_in(begun[0].context)
            self._maker.cut_begun("quiesce.restore", parent, begun, at_ns, identity)
