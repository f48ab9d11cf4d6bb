"""Makes spans of what was noted: the life of a save, a window, a group, a step, as a tree with links.

Rule: one thread tells the story, note by note, in the order in which things happened. What is open is kept by
its own name (a cut, a group, a rollout), never by a thread or a context, so a save that hops through tasks,
threads and executors is one trace. Every table is bounded; what is pushed out is ended as cut off. Nothing
here suspends.

The tree of a save::

    quiesce.checkpoint
    ├── quiesce.checkpoint.fence
    │   └── quiesce.gate.close                     one a worker
    ├── quiesce.window                             links to the slots that delayed it, names the last holder
    │   ├── quiesce.checkpoint.drain
    │   └── quiesce.checkpoint.exclusive
    │       └── quiesce.checkpoint.part            six
    ├── quiesce.checkpoint.verify
    ├── quiesce.checkpoint.stage
    ├── quiesce.checkpoint.write
    │   └── quiesce.checkpoint.fsync               one a file
    └── quiesce.checkpoint.publish

A window of a barrier that is used alone is a root.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from quiesce.telemetry import names
from quiesce.telemetry.finished import NO_ATTRIBUTES
from quiesce.telemetry.span_names import STEP_NUMBERS
from quiesce.telemetry.spans import NOTED_HOOKS, Note, RawNote
from quiesce.telemetry.tracing import Parent, SpanHandle, parent_in

if TYPE_CHECKING:
    from quiesce.telemetry.finished import AttributeValue, Link, SpanEvent
    from quiesce.telemetry.tracing import Identities, Tracing

__all__ = ["Delay", "Story", "Told"]

T = TypeVar("T")

_CUTS: Final = 64
_WINDOWS: Final = 64
_GROUPS: Final = 16_384
_ROLLOUTS: Final = 16_384
_DELAYERS: Final = 1_024
_LINKS: Final = 64
_MOVES: Final = 256
_WORKERS: Final = 4_096
_ENDS: Final = frozenset({"trained", "dropped"})
_MOVED: Final = "owner moved"
_ROLLOUT: Final = "quiesce.rollout"
_READ: Final = "read"
_LEDGER: Final = "ledger"
"""Who owns a group while it is generated."""
_GATE_OUTCOMES: Final = {"closed": "completed", "superseded": "cancelled"}

# A named tuple's own constructor is written in Python, and costs more.
_note: Final[Callable[[RawNote], Note]] = partial(tuple.__new__, Note)

Attributes = dict[str, "AttributeValue"]
Told = tuple[str, tuple[str, ...], int, SpanHandle, int]
"""A value that a span shows: metric, labels, nanoseconds (or a count), span, Unix nanoseconds of its end."""

Delay = tuple[str, str, int, int]
"""A slot that a window waited for: kind, task, and from when until when after the window's request, in nanoseconds."""

_Begun = tuple[Note, Attributes]
"""What has begun, and is made a span of when it ends: what was noted, and attributes for the case that it never does."""


@dataclass(slots=True)
class _Window:
    """A request for the exclusive side."""

    handle: SpanHandle
    drain: SpanHandle
    asked_ns: int
    opened_ns: int | None = None
    closed_ns: int | None = None
    exclusive: SpanHandle | None = None
    delayed_by: tuple[Delay, ...] = ()
    outcome: str = ""
    position: int = 0  # all slots that delayed it were recorded before


@dataclass(slots=True)
class _Save:
    """An attempt to save."""

    handle: SpanHandle
    phases: dict[str, SpanHandle] = field(default_factory=dict)
    events: list[SpanEvent] = field(default_factory=list)


class _Group:
    """The life of a prompt group."""

    __slots__ = ("events", "handle")

    def __init__(self, handle: SpanHandle) -> None:
        self.handle = handle
        self.events: list[SpanEvent] = []


class Story:
    """Turns notes into spans.

    Args:
        tracing: Makes them.
        unix: Turns the monotonic clock's nanoseconds into Unix nanoseconds.
        identities: The identifiers of a cut's outermost span, which the log names.
    """

    def __init__(self, tracing: Tracing, unix: Callable[[int], int], identities: Identities) -> None:
        self._tracing = tracing
        self._identities = identities
        self._unix = unix
        self._saves: OrderedDict[str, _Save] = OrderedDict()
        self._windows: OrderedDict[str, _Window] = OrderedDict()  # open ones
        self._finishing: list[_Window] = []  # over, but for slots whose records are still to be read
        self._recent: deque[_Window] = deque(maxlen=_WINDOWS)
        self.last_asked_ns = -1
        """When a window asked last."""
        self._delayers: OrderedDict[tuple[str, int], deque[Link]] = OrderedDict()
        self._groups: OrderedDict[str, _Group] = OrderedDict()
        # Of a rollout a span is made when it ends; of one that goes on its start is kept, and the span of its group.
        self._rolling: OrderedDict[tuple[str, int], tuple[int, SpanHandle]] = OrderedDict()
        self._rollouts: OrderedDict[tuple[str, int], SpanHandle] = OrderedDict()
        self._step: SpanHandle | None = None
        self._last_step: tuple[str, Link] | None = None
        self._gates: OrderedDict[tuple[str, str], _Begun] = OrderedDict()  # by worker and epoch
        self._clears: OrderedDict[str, _Begun] = OrderedDict()  # by worker
        self._sync: _Begun | None = None
        self._restore: tuple[_Begun, Link | None] | None = None
        self._restored_ns: int | None = None
        self._stalled_ns = 0
        self.told: list[Told] = []
        """Durations since the last look, for exemplars."""
        self._tellers: dict[str, Callable[..., None]] = {
            hook: getattr(self, f"_{hook}") for hook in NOTED_HOOKS if hasattr(self, f"_{hook}")
        }
        self._moves: dict[tuple[str, str, str], Attributes] = {}

    # --------------------------------------------------------------------------------------------- slots ask

    def tell(self, notes: Iterable[RawNote], wrong: Callable[[str], None]) -> None:
        """Go on with notes; of a kind that is not known, nothing is told.

        Args:
            notes: In the order in which they were made.
            wrong: Called with the hook of a note that cannot be told, while its error is handled; the others are.
        """
        groups, moves, tellers, offset = self._groups, self._moves, self._tellers, self._unix(0)
        for note in notes:
            hook, args, at_ns, _, _ = note
            try:
                # Most notes are of a group that goes from one owner to the next, so this is spelled out.
                if hook == "owner_moved" and args[2] not in _ENDS and args[0] in groups:
                    about = moves.get(args[1:]) or self._move(*args[1:])
                    groups[args[0]].events.append((_MOVED, at_ns + offset, about))
                elif (method := tellers.get(hook)) is not None:
                    method(_note(note), *args)
            except Exception:  # noqa: BLE001 - a hook was given something odd; the rest goes on
                wrong(hook)

    def overlapped(self, opened_ns: int, ended_ns: int) -> bool:
        """Say whether a window asked while a slot was open."""
        return any(opened_ns <= window.asked_ns <= ended_ns for window in self._recent)

    def note_delayer(self, kind: str, ended_ns: int, link: Link) -> None:
        """Remember the span of a slot that was open while a window asked; several may have left at once."""
        known = self._delayers.get((kind, ended_ns))
        if known is None:
            _put(self._delayers, (kind, ended_ns), deque((link,), _DELAYERS), _DELAYERS)
        else:
            known.append(link)

    def blockers(self, asked_ns: int, opened_ns: int) -> tuple[Link, ...]:
        """Return the windows that a slot waited for, the last one first.

        A slot opens in the very step in which the last of them is released, so that one is known by its time;
        one before it was released in the step in which the next was opened. Windows of other barriers that
        overlap in time are told apart by this. Where no time matches (a window that gave up), those are
        returned that had asked before the slot and were not over yet.
        """
        before = [
            window
            for window in reversed(self._recent)
            if window.asked_ns <= asked_ns and (window.closed_ns is None or window.closed_ns > asked_ns)
        ]
        chain: list[_Window] = []
        until: int | None = opened_ns
        for window in before:
            if window.closed_ns == until:
                chain.append(window)
                until = window.opened_ns
        return tuple(window.handle.link for window in (chain or before)[:_LINKS])

    # ----------------------------------------------------------------------------------------------- windows

    def _window_requested(self, note: Note, window_id: str, asked_ns: int) -> None:
        save = self._saves.get(window_id)
        parent = parent_in(note.context) if save is None else save.handle
        start = self._unix(asked_ns)
        about: Attributes = {"quiesce.cut_id": window_id}
        if save is None:
            handle = self._start_cut("quiesce.window", window_id, parent, start)
        else:
            handle = self._start("quiesce.window", parent, start, about)
        drain = self._start("quiesce.checkpoint.drain", handle, start, about)
        window = _Window(handle, drain, asked_ns)
        pushed_out = _put(self._windows, window_id, window, _WINDOWS)
        if pushed_out is not None:
            self._cut_window(pushed_out, note.at_ns)
        self._recent.append(window)
        self.last_asked_ns = max(self.last_asked_ns, asked_ns)

    def _window_opened(
        self,
        note: Note,
        window_id: str,
        drain_ns: int,
        delayed_by: tuple[Delay, ...],
        opened_ns: int,
    ) -> None:
        window = self._windows.get(window_id)
        if window is None:
            return
        window.opened_ns = opened_ns
        window.delayed_by = delayed_by
        window.position = note.position
        self._end_phase(window.drain, "drain", drain_ns, opened_ns, "completed", _last_holder(delayed_by))
        window.exclusive = self._start(
            "quiesce.checkpoint.exclusive",
            window.handle,
            self._unix(opened_ns),
            {"quiesce.cut_id": window_id},
        )

    def _window_closed(
        self, note: Note, window_id: str, drain_ns: int, exclusive_ns: int, outcome: str, closed_ns: int
    ) -> None:
        window = self._windows.pop(window_id, None)
        if window is None:
            return
        window.closed_ns = closed_ns
        window.outcome = outcome
        if window.exclusive is not None:
            self._end_phase(window.exclusive, "exclusive", exclusive_ns, closed_ns, outcome, {})
        self._finishing.append(window)

    def _window_abandoned(
        self,
        note: Note,
        window_id: str,
        drain_ns: int,
        outcome: str,
        delayed_by: tuple[Delay, ...],
        ended_ns: int,
    ) -> None:
        window = self._windows.pop(window_id, None)
        if window is None:
            return
        window.closed_ns = ended_ns
        window.outcome = outcome
        window.delayed_by = delayed_by
        window.position = note.position
        self._end_phase(window.drain, "drain", drain_ns, ended_ns, outcome, _last_holder(delayed_by))
        self._finishing.append(window)

    def finish_windows(self, read: int) -> None:
        """End the windows that are over, once the slots that delayed them have been read.

        Args:
            read: How many slot records have been read.
        """
        waiting = []
        for window in self._finishing:
            if window.position > read:
                waiting.append(window)
                continue
            self._end_window(window, window.closed_ns or window.asked_ns, window.outcome)
        self._finishing = waiting

    def _end_window(self, window: _Window, at_ns: int, outcome: str, *, cut_off: bool = False) -> None:
        """End a window, linked to the slots that delayed it: to so many as left last, if there were very many."""
        links: list[Link] = []
        for kind, _, _, until in sorted(window.delayed_by, key=_until, reverse=True):
            left = self._delayers.get((kind, window.asked_ns + until))
            if left is None:
                continue
            links.append(left.popleft())
            if not left:
                del self._delayers[kind, window.asked_ns + until]
        about: Attributes = {"quiesce.delayed_by": len(window.delayed_by), **_last_holder(window.delayed_by)}
        end = self._unix(at_ns)
        self._tracing.end(
            window.handle, end, outcome=outcome, attributes=about, links=links[:_LINKS], cut_off=cut_off
        )

    def _cut_part_captured(self, note: Note, cut_id: str, part: str, ns: int) -> None:
        window = self._windows.get(cut_id)
        parent = None if window is None else window.exclusive
        self._emit(
            "quiesce.checkpoint.part",
            parent,
            note.at_ns,
            ns,
            "completed",
            {"quiesce.cut_id": cut_id, "quiesce.part": part},
        )

    # --------------------------------------------------------------------------------------------- the save

    def _phase_started(self, note: Note, cut_id: str, phase: str) -> None:
        save = self._saves.get(cut_id)
        if save is None:
            handle = self._start_cut(
                "quiesce.checkpoint",
                cut_id,
                parent_in(note.context),
                self._unix(note.at_ns - self._stalled_ns),
            )
            save = _Save(handle)
            if self._stalled_ns:
                self._stall(save, note.at_ns, "previous_write", self._stalled_ns)
            self._stalled_ns = 0
            pushed_out = _put(self._saves, cut_id, save, _CUTS)
            if pushed_out is not None:
                self._cut_save(pushed_out, note.at_ns)
        if phase not in names.WINDOW_PHASES:  # the barrier tells their times exactly
            save.phases[phase] = self._start(
                f"quiesce.checkpoint.{phase}",
                save.handle,
                self._unix(note.at_ns),
                {"quiesce.cut_id": cut_id},
            )

    def _phase_ended(self, note: Note, cut_id: str, phase: str, ns: int, outcome: str) -> None:
        save = self._saves.get(cut_id)
        handle = None if save is None else save.phases.pop(phase, None)
        if handle is not None:
            self._end_phase(handle, phase, ns, note.at_ns, outcome, {})

    def _end_phase(
        self,
        handle: SpanHandle,
        phase: str,
        ns: int,
        at_ns: int,
        outcome: str,
        attributes: Mapping[str, AttributeValue],
    ) -> None:
        end = self._unix(at_ns)
        self._tracing.end(handle, end, outcome=outcome, attributes=attributes)
        label = outcome if outcome in names.ENDED else "failed"
        self.told.append((names.CHECKPOINT_PHASE_SECONDS.name, (phase, label), ns, handle, end))

    def _file_synced(self, note: Note, cut_id: str, ns: int, num_bytes: int) -> None:
        save = self._saves.get(cut_id)
        parent = None if save is None else save.phases.get("write") or save.handle
        about: Attributes = {"quiesce.cut_id": cut_id, "quiesce.bytes": num_bytes}
        self._emit("quiesce.checkpoint.fsync", parent, note.at_ns, ns, "completed", about)

    def _checkpoint_ended(
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
        save = self._saves.pop(cut_id, None)
        about: Attributes = {
            "quiesce.step": step,
            "quiesce.reason": reason,
            "quiesce.rows": rows,
            "quiesce.bytes": num_bytes,
            "quiesce.groups": sum(groups.values()),
        }
        if save is None:  # it ended before its first phase
            self._emit(
                "quiesce.checkpoint",
                parent_in(note.context),
                note.at_ns,
                self._stalled_ns,
                outcome,
                {"quiesce.cut_id": cut_id, **about},
            )
            self._stalled_ns = 0
            return
        for handle in save.phases.values():
            self._tracing.end(handle, self._unix(note.at_ns), outcome=outcome)
        self._tracing.end(
            save.handle,
            self._unix(note.at_ns),
            outcome=outcome,
            attributes=about,
            events=save.events,
            error=reason if outcome in {"failed", "refused"} else "",
        )

    def _trainer_stalled(self, note: Note, cause: str, ns: int) -> None:
        if cause == "previous_write":  # its save has no name yet
            self._stalled_ns = ns
        elif self._saves:
            self._stall(next(reversed(self._saves.values())), note.at_ns, cause, ns)

    def _stall(self, save: _Save, at_ns: int, cause: str, ns: int) -> None:
        about: Attributes = {"quiesce.cause": cause, "quiesce.seconds": ns / 1e9}
        save.events.append(("trainer stalled", self._unix(at_ns), about))

    def _invariant_violated(self, note: Note, violation: Any) -> None:  # noqa: ANN401 - a Violation, as the hook says
        save = self._saves.get(str(getattr(violation, "cut_id", "")))
        if save is not None:
            about: Attributes = {
                "quiesce.invariant": str(getattr(violation, "invariant", "")),
                "quiesce.message": str(violation),
            }
            save.events.append(("invariant violated", self._unix(note.at_ns), about))

    def _fence(self, note: Note) -> SpanHandle | Parent | None:
        """Return the span that a gate closes in: the fence of the save that has one now."""
        fences = [save.phases["fence"] for save in self._saves.values() if "fence" in save.phases]
        return fences[-1] if fences else parent_in(note.context)

    def _gate_closing(self, note: Note, worker: str, sequence: int, epoch: str) -> None:
        begun: _Begun = (note, {"quiesce.worker": worker, "quiesce.epoch": epoch})
        _put(self._gates, (worker, epoch), begun, _WORKERS)

    def _gate_closed(self, note: Note, worker: str, sequence: int, epoch: str, ns: int, outcome: str) -> None:
        self._gates.pop((worker, epoch), None)
        handle = self._emit(
            "quiesce.gate.close",
            self._fence(note),
            note.at_ns,
            ns,
            _GATE_OUTCOMES.get(outcome, "failed"),
            {"quiesce.worker": worker, "quiesce.epoch": epoch, "quiesce.answer": outcome},
        )
        self.told.append((names.GATE_CLOSE.name, (), ns, handle, self._unix(note.at_ns)))

    # ----------------------------------------------------------------------------------------------- restore

    def _restore_started(self, note: Note, identity: Link | None = None) -> None:
        self._cut_restore(note.at_ns)  # nobody said how it ended
        self._restore = ((note, {}), identity)

    def _cut_restore(self, at_ns: int) -> None:
        if self._restore is not None:
            begun, identity = self._restore
            self._cut_note("quiesce.restore", parent_in(begun[0].context), begun, at_ns, identity)
        self._restore = None

    def _restore_ended(
        self,
        note: Note,
        outcome: str,
        reason: str,
        parts: Mapping[str, int],
        groups: Mapping[str, int],
    ) -> None:
        begun, self._restore = self._restore, None
        end = note.at_ns
        start, first, identity = end - sum(parts.values()), note, None
        if begun is not None:
            (first, _), identity = begun
            start = min(first.at_ns, end)
        handle = self._tracing.begin(
            "quiesce.restore",
            parent_in(first.context),
            self._unix(start),
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
            child = self._start("quiesce.restore.part", handle, self._unix(at), {"quiesce.part": part})
            at = end if number == last else min(at + ns, end)
            ended = outcome if number == last else "completed"
            self._tracing.end(child, self._unix(at), outcome=ended, error=error if number == last else "")
        self._tracing.end(handle, self._unix(end), outcome=outcome, error=error)
        if outcome == "completed":
            self._restored_ns = end

    # ---------------------------------------------------------------------------------- groups and training

    def _owner_moved(self, note: Note, group_id: str, source: str, target: str, reason: str) -> None:
        group = self._groups.get(group_id) or self._group(note, group_id, source)
        about = self._moves.get((source, target, reason)) or self._move(source, target, reason)
        group.events.append((_MOVED, self._unix(note.at_ns), about))
        if target not in _ENDS:
            return
        del self._groups[group_id]
        outcome = "completed"
        if target == "dropped":
            outcome = "failed" if reason in {"failed", "violation"} else "cancelled"
        said: Attributes = {"quiesce.end": target, "quiesce.reason": reason}
        self._tracing.end(
            group.handle,
            self._unix(note.at_ns),
            outcome=outcome,
            attributes=said,
            events=group.events,
            error=reason if outcome == "failed" else "",
        )

    def link_of(self, name: str) -> Link | None:
        """Return the span of a group that lives, or of a step (``step 7``) that began last; from any thread."""
        group = self._groups.get(name)
        if group is not None:
            return group.handle.link
        step = self._last_step
        return None if step is None or step[0] != name else step[1]

    def _group(self, note: Note, group_id: str, source: str) -> _Group:
        """Begin the life of a group: when it is read, or with the restore that it came back by."""
        about: Attributes = {"quiesce.group_id": group_id, "quiesce.from": source}
        since = note.at_ns if source == _READ or self._restored_ns is None else self._restored_ns
        handle = self._start("quiesce.group", parent_in(note.context), self._unix(since), about)
        group = _Group(handle)
        pushed_out = _put(self._groups, group_id, group, _GROUPS)
        if pushed_out is not None:
            self._cut_group(pushed_out, note.at_ns)
        return group

    def _move(self, source: str, target: str, reason: str) -> Attributes:
        """Return what a move says: one dictionary for all that are alike, which nobody changes."""
        about: Attributes = {"quiesce.from": source, "quiesce.to": target}
        if reason:
            about["quiesce.reason"] = reason
        if len(self._moves) >= _MOVES:  # reasons are a closed set, but nobody enforces it here
            self._moves.clear()
        self._moves[source, target, reason] = about
        return about

    def _tokens_reused(self, note: Note, group_id: str, tokens: int) -> None:
        group = self._groups.get(group_id)
        if group is not None:
            group.events.append(("tokens reused", self._unix(note.at_ns), {"quiesce.tokens": tokens}))

    def _rollout_started(self, note: Note, group_id: str, attempt: int) -> None:
        group = self._groups.get(group_id) or self._group(note, group_id, _LEDGER)
        if len(self._rolling) >= _ROLLOUTS:
            self._cut(self._begun_rollout(next(iter(self._rolling))), note.at_ns)
        self._rolling[group_id, attempt] = (note.at_ns, group.handle)

    def _rollout_ended(
        self, note: Note, group_id: str, attempt: int, ns: int, outcome: str, tokens: int
    ) -> None:
        rollout = (group_id, attempt)
        began = self._rolling.pop(rollout, None)
        offset = self._unix(0)
        if began is None:
            made = self._rollouts.get(rollout)
            if made is not None:
                said: Attributes = {"quiesce.tokens": tokens}
                self._tracing.end(made, note.at_ns + offset, outcome=outcome, attributes=said)
            return
        handle = self._tracing.emit(
            _ROLLOUT,
            parent=began[1],
            start_ns=began[0] + offset,
            end_ns=note.at_ns + offset,
            outcome=outcome,
            attributes={"quiesce.group_id": group_id, "quiesce.attempt": attempt, "quiesce.tokens": tokens},
        )
        if len(self._rollouts) >= _ROLLOUTS:
            self._cut(
                self._rollouts.popitem(last=False)[1], note.at_ns
            )  # unless it has ended, as nearly all have
        self._rollouts[rollout] = handle

    def _rollout(self, rollout: tuple[str, int]) -> SpanHandle | None:
        """Return the span of a rollout, if it is remembered; that of one which goes on is made for whoever asks."""
        return self._begun_rollout(rollout) if rollout in self._rolling else self._rollouts.get(rollout)

    def _begun_rollout(self, rollout: tuple[str, int]) -> SpanHandle:
        began, group = self._rolling.pop(rollout)
        about: Attributes = {"quiesce.group_id": rollout[0], "quiesce.attempt": rollout[1]}
        handle = self._start(_ROLLOUT, group, self._unix(began), about)
        self._rollouts[rollout] = handle
        return handle

    def _train_step_started(self, note: Note, step: int, version: int) -> None:
        if self._step is not None:
            self._cut(self._step, note.at_ns)
        self._step = self._start(
            "quiesce.train.step",
            parent_in(note.context),
            self._unix(note.at_ns),
            {"quiesce.step": step, "quiesce.version": version},
        )
        self._last_step = (f"step {step}", self._step.link)

    def _train_step_ended(
        self,
        note: Note,
        step: int,
        version: int,
        ns: int,
        groups: int,
        outcome: str,
        metrics: Mapping[str, float],
    ) -> None:
        handle, self._step = self._step, None
        end = self._unix(note.at_ns)
        if handle is None:
            about: Attributes = {"quiesce.step": step, "quiesce.version": version}
            handle = self._start("quiesce.train.step", parent_in(note.context), end - ns, about)
        said: Attributes = {"quiesce.groups": groups}
        said.update((f"quiesce.{name}", float(metrics[name])) for name in STEP_NUMBERS if name in metrics)
        self._tracing.end(handle, end, outcome=outcome, attributes=said)
        if outcome == "completed":
            self.told.append((names.TRAIN_STEP_SECONDS.name, (), ns, handle, end))

    def _weight_sync_started(self, note: Note, version: int) -> None:
        self._sync = (note, {"quiesce.version": version})

    def _weight_synced(self, note: Note, version: int, ns: int, outcome: str) -> None:
        self._sync = None
        about: Attributes = {"quiesce.version": version}
        self._emit("quiesce.weight_sync", parent_in(note.context), note.at_ns, ns, outcome, about)

    def _clear_started(self, note: Note, worker: str, sequence: int, keys: int) -> None:
        begun: _Begun = (note, {"quiesce.worker": worker, "quiesce.keys": keys})
        _put(self._clears, worker, begun, _WORKERS)

    def _clear_ended(
        self,
        note: Note,
        worker: str,
        calls: int,
        keys: int,
        ns: int,
        outcome: str,
        rollouts: Iterable[tuple[str, int]] = (),
    ) -> None:
        known = map(self._rollout, rollouts)
        links = [handle.link for handle in known if handle is not None][:_LINKS]
        about: Attributes = {"quiesce.worker": worker, "quiesce.calls": calls, "quiesce.keys": keys}
        self._clears.pop(worker, None)
        # A fresh root: the batch serves many calls and belongs to none of them.
        handle = self._emit("quiesce.cleanup.batch", None, note.at_ns, ns, outcome, about, links)
        end = self._unix(note.at_ns)
        self.told.append((names.CLEANUP_CLEAR.name, (), ns, handle, end))
        if outcome == "completed":
            self.told.append((names.CLEANUP_BATCH.name, (), calls, handle, end))

    # ----------------------------------------------------------------------------------------------- the end

    def cut_off(self, at_ns: int, delays: Iterable[tuple[str, tuple[Delay, ...]]] = ()) -> None:
        """End everything that is open, marked as cut off, inner spans first.

        Args:
            at_ns: When, by the monotonic clock.
            delays: Of windows that still wait, what has delayed each of them until then.
        """
        for window_id, delayed_by in delays:
            waits = self._windows.get(window_id)
            if waits is not None and waits.opened_ns is None:
                waits.delayed_by = delayed_by
        for gate in self._gates.values():
            self._cut_note("quiesce.gate.close", self._fence(gate[0]), gate, at_ns)
        for clearing in self._clears.values():
            self._cut_note("quiesce.cleanup.batch", None, clearing, at_ns)
        if self._sync is not None:
            self._cut_note("quiesce.weight_sync", parent_in(self._sync[0].context), self._sync, at_ns)
        self._sync = None
        self._cut_restore(at_ns)
        for window in (*self._finishing, *self._windows.values()):
            self._cut_window(window, at_ns)
        for save in self._saves.values():
            self._cut_save(save, at_ns)
        for rollout in list(self._rolling):
            self._begun_rollout(rollout)
        for handle in (*([] if self._step is None else [self._step]), *self._rollouts.values()):
            self._cut(handle, at_ns)
        for group in self._groups.values():
            self._cut_group(group, at_ns)
        self._finishing = []
        self._step = None
        tables: tuple[OrderedDict[Any, Any], ...] = (
            self._gates,
            self._clears,
            self._windows,
            self._saves,
            self._rollouts,
            self._groups,
        )
        for table in tables:
            table.clear()

    def _cut(
        self,
        handle: SpanHandle,
        at_ns: int,
        events: Iterable[SpanEvent] = (),
        attributes: Mapping[str, AttributeValue] = NO_ATTRIBUTES,
    ) -> None:
        end = self._unix(at_ns)
        self._tracing.end(handle, end, outcome="", attributes=attributes, events=tuple(events), cut_off=True)

    def _cut_note(
        self,
        name: str,
        parent: SpanHandle | Parent | None,
        begun: _Begun,
        at_ns: int,
        identity: Link | None = None,
    ) -> None:
        """Tell what began, and has not ended; its span is made only now."""
        note, about = begun
        self._cut(self._tracing.begin(name, parent, self._unix(note.at_ns), about, (), identity), at_ns)

    def _cut_window(self, window: _Window, at_ns: int) -> None:
        if window.exclusive is not None:
            self._cut(window.exclusive, at_ns)
        self._cut(window.drain, at_ns, attributes=_last_holder(window.delayed_by))
        self._end_window(window, at_ns, "", cut_off=True)

    def _cut_save(self, save: _Save, at_ns: int) -> None:
        for handle in save.phases.values():
            self._cut(handle, at_ns)
        self._cut(save.handle, at_ns, save.events)

    def _cut_group(self, group: _Group, at_ns: int) -> None:
        self._cut(group.handle, at_ns, group.events)

    # ------------------------------------------------------------------------------------------------ making

    def _start(
        self,
        name: str,
        parent: SpanHandle | Parent | None,
        start_ns: int,
        attributes: Mapping[str, AttributeValue],
    ) -> SpanHandle:
        return self._tracing.begin(name, parent, start_ns, attributes, (), None)

    def _start_cut(
        self, name: str, cut_id: str, parent: SpanHandle | Parent | None, start_ns: int
    ) -> SpanHandle:
        """Open a cut's outermost span, with the identifiers that lines of the log name already."""
        handle = self._tracing.start(
            name,
            parent=parent,
            start_ns=start_ns,
            attributes={"quiesce.cut_id": cut_id},
            identity=self._identities.of(cut_id),
        )
        self._identities.know(cut_id, handle.link)
        return handle

    def _emit(
        self,
        name: str,
        parent: SpanHandle | Parent | None,
        at_ns: int,
        ns: int,
        outcome: str,
        attributes: Mapping[str, AttributeValue],
        links: Iterable[Link] = (),
    ) -> SpanHandle:
        end = self._unix(at_ns)
        return self._tracing.emit(
            name,
            parent=parent,
            start_ns=end - ns,
            end_ns=end,
            outcome=outcome,
            attributes=attributes,
            links=tuple(links),
        )


def _put(table: OrderedDict[Any, T], key: object, value: T, limit: int) -> T | None:
    """Put something into a bounded table, and return what was pushed out: the oldest."""
    pushed_out = table.popitem(last=False)[1] if len(table) >= limit and key not in table else None
    table[key] = value
    return pushed_out


def _until(delay: Delay) -> int:
    """Return until when a slot delayed a window."""
    return delay[3]


def _last_holder(delayed_by: tuple[Delay, ...]) -> Attributes:
    """Name the slot that was waited for the longest; of several that are still open, the one that opened first."""
    if not delayed_by:
        return {}
    kind, task, _, until = max(delayed_by, key=_until)
    return {
        "quiesce.last_holder.kind": kind,
        "quiesce.last_holder.task": task,
        "quiesce.last_holder.seconds": until / 1e9,
    }
