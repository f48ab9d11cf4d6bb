"""The part of a story about prompt groups: their owners, their rollouts, the batches of cleanup behind them.

Rule: as :mod:`quiesce.telemetry.story`. Most notes of a run are of this kind. Of a rollout a span is made when it ends,
unless a batch of cleanup asks for it before.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from quiesce.telemetry import names
from quiesce.telemetry.story_spans import LINKS, WORKERS, put
from quiesce.telemetry.tracing import parent_in

if TYPE_CHECKING:
    from quiesce.telemetry.finished import Link, SpanEvent
    from quiesce.telemetry.spans import Note
    from quiesce.telemetry.story_spans import Attributes, Begun, Maker
    from quiesce.telemetry.tracing import SpanHandle

__all__ = ["ENDS", "MOVED", "GroupStory"]

ENDS: Final = frozenset({"trained", "dropped"})
"""Where the life of a group ends."""

MOVED: Final = "owner moved"
"""The event of a group's span."""

_GROUPS: Final = 16_384
_ROLLOUTS: Final = 16_384
_MOVES: Final = 256
_ROLLOUT: Final = "quiesce.rollout"
_READ: Final = "read"
_LEDGER: Final = "ledger"
"""Who owns a group while it is generated."""


class _Group:
    """The life of a prompt group."""

    __slots__ = ("events", "handle")

    def __init__(self, handle: SpanHandle) -> None:
        self.handle = handle
        self.events: list[SpanEvent] = []


class GroupStory:
    """Tells of groups.

    Args:
        maker: Makes the spans.

    Attributes:
        groups: Those that live, by their id.
        moves: What moves say, by source, target and reason.
        restored_ns: When a restore ended: groups that it brought live since then.
    """

    def __init__(self, maker: Maker) -> None:
        self._maker = maker
        self.groups: OrderedDict[str, _Group] = OrderedDict()
        self.moves: dict[tuple[str, str, str], Attributes] = {}
        self.restored_ns: int | None = None
        # Of a rollout that goes on its start is kept, and the span of its group.
        self._rolling: OrderedDict[tuple[str, int], tuple[int, SpanHandle]] = OrderedDict()
        self._rollouts: OrderedDict[tuple[str, int], SpanHandle] = OrderedDict()
        self._clears: OrderedDict[str, Begun] = OrderedDict()  # by worker

    def link_of(self, group_id: str) -> Link | None:
        """Return the span of a group that lives; from any thread."""
        group = self.groups.get(group_id)
        return None if group is None else group.handle.link

    def move(self, source: str, target: str, reason: str) -> Attributes:
        """Return what a move says: one dictionary for all that are alike, which nobody changes."""
        about: Attributes = {"quiesce.from": source, "quiesce.to": target}
        if reason:
            about["quiesce.reason"] = reason
        if len(self.moves) >= _MOVES:  # reasons are a closed set, but nobody enforces it here
            self.moves.clear()
        self.moves[source, target, reason] = about
        return about

    # ------------------------------------------------------------------------------------------------- hooks

    def owner_moved(self, note: Note, group_id: str, source: str, target: str, reason: str) -> None:
        """Note it in the group's life, which begins and ends with such a move."""
        group = self.groups.get(group_id) or self._begin(note, group_id, source)
        about = self.moves.get((source, target, reason)) or self.move(source, target, reason)
        at = self._maker.unix(note.at_ns)
        group.events.append((MOVED, at, about))
        if target not in ENDS:
            return
        del self.groups[group_id]
        outcome = "completed"
        if target == "dropped":
            outcome = "failed" if reason in {"failed", "violation"} else "cancelled"
        said: Attributes = {"quiesce.end": target, "quiesce.reason": reason}
        self._maker.tracing.end(
            group.handle,
            at,
            outcome=outcome,
            attributes=said,
            events=group.events,
            error=reason if outcome == "failed" else "",
        )

    def tokens_reused(self, note: Note, group_id: str, tokens: int) -> None:
        """Note it in the group's life."""
        group = self.groups.get(group_id)
        if group is not None:
            event = ("tokens reused", self._maker.unix(note.at_ns), {"quiesce.tokens": tokens})
            group.events.append(event)

    def rollout_started(self, note: Note, group_id: str, attempt: int) -> None:
        """Remember that a rollout goes on."""
        group = self.groups.get(group_id) or self._begin(note, group_id, _LEDGER)
        if len(self._rolling) >= _ROLLOUTS:
            self._maker.cut(self._begun_rollout(next(iter(self._rolling))), note.at_ns)
        self._rolling[group_id, attempt] = (note.at_ns, group.handle)

    def rollout_ended(
        self, note: Note, group_id: str, attempt: int, ns: int, outcome: str, tokens: int
    ) -> None:
        """Make a span of a rollout, or end it."""
        rollout = (group_id, attempt)
        began = self._rolling.pop(rollout, None)
        offset = self._maker.unix(0)
        if began is None:
            made = self._rollouts.get(rollout)
            if made is not None:
                said: Attributes = {"quiesce.tokens": tokens}
                self._maker.tracing.end(made, note.at_ns + offset, outcome=outcome, attributes=said)
            return
        handle = self._maker.tracing.emit(
            _ROLLOUT,
            parent=began[1],
            start_ns=began[0] + offset,
            end_ns=note.at_ns + offset,
            outcome=outcome,
            attributes={"quiesce.group_id": group_id, "quiesce.attempt": attempt, "quiesce.tokens": tokens},
        )
        if len(self._rollouts) >= _ROLLOUTS:
            oldest = self._rollouts.popitem(last=False)[1]
            self._maker.cut(oldest, note.at_ns)  # unless it has ended, as nearly all have
        self._rollouts[rollout] = handle

    def clear_started(self, note: Note, worker: str, sequence: int, keys: int) -> None:
        """Remember that a batch of cleanup goes on."""
        begun: Begun = (note, {"quiesce.worker": worker, "quiesce.keys": keys})
        put(self._clears, worker, begun, WORKERS)

    def clear_ended(
        self,
        note: Note,
        worker: str,
        calls: int,
        keys: int,
        ns: int,
        outcome: str,
        rollouts: Iterable[tuple[str, int]] = (),
    ) -> None:
        """Make a span of a batch of cleanup, or of a try that failed, linked to the rollouts whose rows it clears."""
        known = map(self._rollout, rollouts)
        links = [handle.link for handle in known if handle is not None][:LINKS]
        about: Attributes = {"quiesce.worker": worker, "quiesce.calls": calls, "quiesce.keys": keys}
        self._clears.pop(worker, None)
        # A fresh root: the batch serves many calls and belongs to none of them.
        handle = self._maker.emit("quiesce.cleanup.batch", None, note.at_ns, ns, outcome, about, links)
        end = self._maker.unix(note.at_ns)
        self._maker.told.append((names.CLEANUP_CLEAR.name, (), ns, handle, end))
        if outcome == "completed":
            self._maker.told.append((names.CLEANUP_BATCH.name, (), calls, handle, end))

    # --------------------------------------------------------------------------------------------------- end

    def cut_off_clears(self, at_ns: int) -> None:
        """End the batches of cleanup that go on as cut off."""
        for begun in self._clears.values():
            self._maker.cut_begun("quiesce.cleanup.batch", None, begun, at_ns)
        self._clears.clear()

    def cut_off_rollouts(self, at_ns: int) -> None:
        """End the rollouts that go on as cut off."""
        for rollout in list(self._rolling):
            self._begun_rollout(rollout)
        for handle in self._rollouts.values():
            self._maker.cut(handle, at_ns)
        self._rollouts.clear()

    def cut_off(self, at_ns: int) -> None:
        """End the groups that live as cut off."""
        for group in self.groups.values():
            self._maker.cut(group.handle, at_ns, group.events)
        self.groups.clear()

    def _begin(self, note: Note, group_id: str, source: str) -> _Group:
        """Begin the life of a group: when it is read, or with the restore that it came back by."""
        about: Attributes = {"quiesce.group_id": group_id, "quiesce.from": source}
        since = note.at_ns if source == _READ or self.restored_ns is None else self.restored_ns
        handle = self._maker.start("quiesce.group", parent_in(note.context), self._maker.unix(since), about)
        group = _Group(handle)
        pushed_out = put(self.groups, group_id, group, _GROUPS)
        if pushed_out is not None:
            self._maker.cut(pushed_out.handle, note.at_ns, pushed_out.events)
        return group

    def _rollout(self, rollout: tuple[str, int]) -> SpanHandle | None:
        """Return the span of a rollout, if it is remembered; that of one which goes on is made for whoever asks."""
        return self._begun_rollout(rollout) if rollout in self._rolling else self._rollouts.get(rollout)

    def _begun_rollout(self, rollout: tuple[str, int]) -> SpanHandle:
        began, group = self._rolling.pop(rollout)
        about: Attributes = {"quiesce.group_id": rollout[0], "quiesce.attempt": rollout[1]}
        handle = self._maker.start(_ROLLOUT, group, self._maker.unix(began), about)
        self._rollouts[rollout] = handle
        return handle
