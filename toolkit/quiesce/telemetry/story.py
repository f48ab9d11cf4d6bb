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

A window of a barrier that is used alone is a root. Each part of the story has a module of its own, and in it a method for
each hook that it tells of, which is given the note and what the hook was called with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING, Final

from quiesce.telemetry.spans import NOTED_HOOKS, Note, RawNote
from quiesce.telemetry.story_groups import ENDS, MOVED, GroupStory
from quiesce.telemetry.story_saves import SaveStory
from quiesce.telemetry.story_spans import Maker, Told
from quiesce.telemetry.story_training import RestoreStory, TrainingStory
from quiesce.telemetry.story_windows import WindowStory

if TYPE_CHECKING:
    from quiesce.telemetry.finished import Link
    from quiesce.telemetry.story_windows import Delay
    from quiesce.telemetry.tracing import Identities, Tracing

__all__ = ["Story"]

# A named tuple's own constructor is written in Python, and costs more.
_note: Final[Callable[[RawNote], Note]] = partial(tuple.__new__, Note)


class Story:
    """Turns notes into spans.

    Args:
        tracing: Makes them.
        unix: Turns the monotonic clock's nanoseconds into Unix nanoseconds.
        identities: The identifiers of a cut's outermost span, which the log names.

    Attributes:
        windows: What slots ask.
    """

    def __init__(self, tracing: Tracing, unix: Callable[[int], int], identities: Identities) -> None:
        self._unix = unix
        self._maker = Maker(tracing, unix, identities)
        self._saves = SaveStory(self._maker)
        self._groups = GroupStory(self._maker)
        self._training = TrainingStory(self._maker)
        self._restore = RestoreStory(self._maker, self._restored)
        self.windows = WindowStory(self._maker, self._saves.span_of)
        parts = (self._saves, self.windows, self._groups, self._training, self._restore)
        self._tellers: dict[str, Callable[..., None]] = {
            hook: getattr(part, hook) for hook in NOTED_HOOKS for part in parts if hasattr(part, hook)
        }

    def tell(self, notes: Iterable[RawNote], wrong: Callable[[str], None]) -> None:
        """Go on with notes; of a kind that is not known, nothing is told.

        Args:
            notes: In the order in which they were made.
            wrong: Called with the hook of a note that cannot be told, while its error is handled; the others are.
        """
        groups, moves, move = self._groups.groups, self._groups.moves, self._groups.move
        tellers, offset = self._tellers, self._unix(0)
        for note in notes:
            hook, args, at_ns, _, _ = note
            try:
                # Most notes are of a group that goes from one owner to the next, so this is spelled out.
                if hook == "owner_moved" and args[2] not in ENDS and args[0] in groups:
                    about = moves.get(args[1:]) or move(*args[1:])
                    groups[args[0]].events.append((MOVED, at_ns + offset, about))
                elif (method := tellers.get(hook)) is not None:
                    method(_note(note), *args)
            except Exception:  # noqa: BLE001 - a hook was given something odd; the rest goes on
                wrong(hook)

    def take_told(self) -> list[Told]:
        """Return what spans have shown since the last look, for exemplars."""
        told, self._maker.told = self._maker.told, []
        return told

    def link_of(self, name: str) -> Link | None:
        """Return the span of a group that lives, or of a step (``step 7``) that began last; from any thread."""
        return self._groups.link_of(name) or self._training.link_of(name)

    def cut_off(self, at_ns: int, delays: Iterable[tuple[str, tuple[Delay, ...]]] = ()) -> None:
        """End everything that is open, marked as cut off, inner spans first.

        Args:
            at_ns: When, by the monotonic clock.
            delays: Of windows that still wait, what has delayed each of them until then.
        """
        self._saves.cut_off_gates(at_ns)
        self._groups.cut_off_clears(at_ns)
        self._training.cut_off_sync(at_ns)
        self._restore.cut_off(at_ns)
        self.windows.cut_off(at_ns, delays)
        self._saves.cut_off(at_ns)
        self._training.cut_off(at_ns)
        self._groups.cut_off_rollouts(at_ns)
        self._groups.cut_off(at_ns)

    def _restored(self, at_ns: int) -> None:
        self._groups.restored_ns = at_ns
