"""The part of a story about saves: their phases, the gates that close for them, what they held up.

Rule: as :mod:`quiesce.telemetry.story`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from quiesce.telemetry import names
from quiesce.telemetry.story_spans import WORKERS, put
from quiesce.telemetry.tracing import parent_in

if TYPE_CHECKING:
    from quiesce.telemetry.finished import SpanEvent
    from quiesce.telemetry.spans import Note
    from quiesce.telemetry.story_spans import Attributes, Begun, Maker
    from quiesce.telemetry.tracing import Parent, SpanHandle

__all__ = ["SaveStory"]

_CUTS: Final = 64
_GATE_OUTCOMES: Final = {"closed": "completed", "superseded": "cancelled"}


@dataclass(slots=True)
class _Save:
    """An attempt to save."""

    handle: SpanHandle
    phases: dict[str, SpanHandle] = field(default_factory=dict)
    events: list[SpanEvent] = field(default_factory=list)


class SaveStory:
    """Tells of saves.

    Args:
        maker: Makes the spans.
    """

    def __init__(self, maker: Maker) -> None:
        self._maker = maker
        self._saves: OrderedDict[str, _Save] = OrderedDict()
        self._gates: OrderedDict[tuple[str, str], Begun] = OrderedDict()  # by worker and epoch
        self._stalled_ns = 0

    def span_of(self, cut_id: str) -> SpanHandle | None:
        """Return the span of a save that goes on."""
        save = self._saves.get(cut_id)
        return None if save is None else save.handle

    # ------------------------------------------------------------------------------------------------- hooks

    def phase_started(self, note: Note, cut_id: str, phase: str) -> None:
        """Begin a phase, and with the first one the save."""
        save = self._saves.get(cut_id) or self._begin(note, cut_id)
        if phase not in names.WINDOW_PHASES:  # the barrier tells their times exactly
            save.phases[phase] = self._maker.start(
                f"quiesce.checkpoint.{phase}",
                save.handle,
                self._maker.unix(note.at_ns),
                {"quiesce.cut_id": cut_id},
            )

    def phase_ended(self, note: Note, cut_id: str, phase: str, ns: int, outcome: str) -> None:
        """End a phase."""
        save = self._saves.get(cut_id)
        handle = None if save is None else save.phases.pop(phase, None)
        if handle is not None:
            self._maker.end_phase(handle, phase, ns, note.at_ns, outcome, {})

    def file_synced(self, note: Note, cut_id: str, ns: int, num_bytes: int) -> None:
        """Make a span of what ``fsync`` took, in the phase that writes."""
        save = self._saves.get(cut_id)
        parent = None if save is None else save.phases.get("write") or save.handle
        about: Attributes = {"quiesce.cut_id": cut_id, "quiesce.bytes": num_bytes}
        self._maker.emit("quiesce.checkpoint.fsync", parent, note.at_ns, ns, "completed", about)

    def checkpoint_ended(
        self,
        note: Note,
        cut_id: str,
        step: int,
        outcome: str,
        reason: str,
        groups: Mapping[str, int],
        rows: int,
        num_bytes: int,
    ) -> None:
        """End a save, and the phase that it ended in."""
        save = self._saves.pop(cut_id, None)
        about: Attributes = {
            "quiesce.step": step,
            "quiesce.reason": reason,
            "quiesce.rows": rows,
            "quiesce.bytes": num_bytes,
            "quiesce.groups": sum(groups.values()),
        }
        if save is None:  # it ended before its first phase
            self._maker.emit(
                "quiesce.checkpoint",
                parent_in(note.context),
                note.at_ns,
                self._stalled_ns,
                outcome,
                {"quiesce.cut_id": cut_id, **about},
            )
            self._stalled_ns = 0
            return
        end = self._maker.unix(note.at_ns)
        for handle in save.phases.values():
            self._maker.tracing.end(handle, end, outcome=outcome)
        self._maker.tracing.end(
            save.handle,
            end,
            outcome=outcome,
            attributes=about,
            events=save.events,
            error=reason if outcome in {"failed", "refused"} else "",
        )

    def trainer_stalled(self, note: Note, cause: str, ns: int) -> None:
        """Note in the save what the trainer waited for."""
        if cause == "previous_write":  # its save has no name yet
            self._stalled_ns = ns
        elif self._saves:
            self._stall(next(reversed(self._saves.values())), note.at_ns, cause, ns)

    def invariant_violated(self, note: Note, violation: Any) -> None:  # noqa: ANN401 - a Violation, as the hook says
        """Note it in the save whose cut shows it."""
        save = self._saves.get(str(getattr(violation, "cut_id", "")))
        if save is not None:
            about: Attributes = {
                "quiesce.invariant": str(getattr(violation, "invariant", "")),
                "quiesce.message": str(violation),
            }
            save.events.append(("invariant violated", self._maker.unix(note.at_ns), about))

    def gate_closing(self, note: Note, worker: str, sequence: int, epoch: str) -> None:
        """Remember that a gate closes."""
        begun: Begun = (note, {"quiesce.worker": worker, "quiesce.epoch": epoch})
        put(self._gates, (worker, epoch), begun, WORKERS)

    def gate_closed(self, note: Note, worker: str, sequence: int, epoch: str, ns: int, outcome: str) -> None:
        """Make a span of the close, whatever it came to."""
        self._gates.pop((worker, epoch), None)
        handle = self._maker.emit(
            "quiesce.gate.close",
            self._fence(note),
            note.at_ns,
            ns,
            _GATE_OUTCOMES.get(outcome, "failed"),
            {"quiesce.worker": worker, "quiesce.epoch": epoch, "quiesce.answer": outcome},
        )
        self._maker.told.append((names.GATE_CLOSE.name, (), ns, handle, self._maker.unix(note.at_ns)))

    # --------------------------------------------------------------------------------------------------- end

    def cut_off_gates(self, at_ns: int) -> None:
        """End the gates that close as cut off."""
        for begun in self._gates.values():
            self._maker.cut_begun("quiesce.gate.close", self._fence(begun[0]), begun, at_ns)
        self._gates.clear()

    def cut_off(self, at_ns: int) -> None:
        """End the saves that go on as cut off."""
        for save in self._saves.values():
            self._cut(save, at_ns)
        self._saves.clear()

    def _begin(self, note: Note, cut_id: str) -> _Save:
        """Begin a save: when it was asked for, which is before what it waited for without a name."""
        stalled_ns, self._stalled_ns = self._stalled_ns, 0
        start = self._maker.unix(note.at_ns - stalled_ns)
        save = _Save(self._maker.start_cut("quiesce.checkpoint", cut_id, parent_in(note.context), start))
        if stalled_ns:
            self._stall(save, note.at_ns, "previous_write", stalled_ns)
        pushed_out = put(self._saves, cut_id, save, _CUTS)
        if pushed_out is not None:
            self._cut(pushed_out, note.at_ns)
        return save

    def _stall(self, save: _Save, at_ns: int, cause: str, ns: int) -> None:
        about: Attributes = {"quiesce.cause": cause, "quiesce.seconds": ns / 1e9}
        save.events.append(("trainer stalled", self._maker.unix(at_ns), about))

    def _fence(self, note: Note) -> SpanHandle | Parent | None:
        """Return the span that a gate closes in: the fence of the save that has one now."""
        fences = [save.phases["fence"] for save in self._saves.values() if "fence" in save.phases]
        return fences[-1] if fences else parent_in(note.context)

    def _cut(self, save: _Save, at_ns: int) -> None:
        for handle in save.phases.values():
            self._maker.cut(handle, at_ns)
        self._maker.cut(save.handle, at_ns, save.events)
