"""Notes the rare hooks, for the converter to make spans of.

Rule: a hook here reads a clock, makes one tuple and appends it; what it means is worked out elsewhere, off the
loop, by :class:`~quiesce.telemetry.story.Story`. A note that finds no room is counted. Nothing here suspends.

What is noted here need not be noted again by what counts the same hooks: :attr:`SpanObserver.count` is given each note
once, when notes are gathered, and those that find no room at once.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from quiesce.telemetry.tracing import RESTORE

if TYPE_CHECKING:
    from quiesce.telemetry.slots import SlotRecorder
    from quiesce.telemetry.tracing import Identities

__all__ = ["NOTED_HOOKS", "NOTES", "Note", "RawNote", "SpanObserver"]

NOTES: Final = 1 << 15
"""Notes that may wait for the converter."""

NOTED_HOOKS: Final = (
    "window_requested",
    "window_opened",
    "window_closed",
    "window_abandoned",
    "cut_part_captured",
    "phase_started",
    "phase_ended",
    "file_synced",
    "checkpoint_ended",
    "trainer_stalled",
    "owner_moved",
    "train_step_started",
    "train_step_ended",
    "rollout_started",
    "rollout_ended",
    "weight_sync_started",
    "weight_synced",
    "gate_closing",
    "gate_closed",
    "clear_started",
    "clear_ended",
    "tokens_reused",
    "restore_started",
    "restore_ended",
    "invariant_violated",
)
"""What a span, or an event of one, is made of."""


_PATIENCE_SECONDS: Final = 0.2

_BEGINNINGS: Final = frozenset({"window_requested", "phase_started"})
"""Hooks that may be the first about a cut, which is their first argument."""

_RESTORE: Final = "restore_started"


class Note(NamedTuple):
    """What a note says about one call of a hook; while it waits it is a plain tuple, which is cheaper to make.

    Attributes:
        hook: Its name.
        args: Its arguments.
        at_ns: When, by the monotonic clock.
        position: How many slots had been recorded by then: those that came before it.
        context: The application's OpenTelemetry context, or None where there is none.
    """

    hook: str
    args: tuple[object, ...]
    at_ns: int
    position: int
    context: object


RawNote = tuple[str, tuple[Any, ...], int, int, object]
"""A note that waits."""


class SpanObserver:
    """Notes hooks. Subscribe it to a hub, and give it to a converter.

    Args:
        recorder: Knows how many slots were recorded.
        identities: Draws the identifiers of a cut when it begins.
        clock: Monotonic nanoseconds; the same clock as the barriers'.

    Attributes:
        current: Returns the OpenTelemetry context that a span belongs in; None while the application has not
            loaded OpenTelemetry.
        noted: How many notes there were.
        dropped: How many found no room.
        begun: Told the name of a cut that begins, again until its identifiers are known; must not raise.
        count: Given every note once, in order but for those that find no room; must not raise.
    """

    def __init__(
        self,
        recorder: SlotRecorder,
        identities: Identities,
        *,
        clock: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._recorder = recorder
        self.identities = identities
        self.begun: Callable[[str], object] | None = None
        self._clock = clock
        self._notes: deque[RawNote] = deque()
        self._gathered: deque[RawNote] = deque()
        self._gathering = threading.Lock()
        self.count: Callable[[Sequence[RawNote]], None] | None = None
        self.current: Callable[[], object] | None = None
        self.noted = 0
        self.dropped = 0
        for hook in NOTED_HOOKS:
            setattr(self, hook, self._beginning(hook) if hook in _BEGINNINGS else self._noting(hook))
        setattr(self, _RESTORE, self._restoring())

    def _noting(self, hook: str) -> Callable[..., None]:
        """Return the method of a hook, with everything at hand that it needs: it is called in the run's steps."""
        notes, gathered, clock, recorder = self._notes, self._gathered, self._clock, self._recorder
        add = notes.append

        def note(*args: object) -> None:
            self.noted += 1
            if len(notes) + len(gathered) >= NOTES:
                self.dropped += 1
                if self.count is not None:
                    self.count(((hook, args, 0, 0, None),))
                return
            current = self.current
            add((hook, args, clock(), recorder.position, None if current is None else current()))

        return note

    def _beginning(self, hook: str) -> Callable[..., None]:
        """Return the method of a hook that may be the first about a cut."""
        note = self._noting(hook)

        def begin(*args: object) -> None:
            cut_id = str(args[0])
            known = self.identities.draw(cut_id, None if self.current is None else self.current())
            note(*args)
            if not known and self.begun is not None:
                self.begun(cut_id)

        return begin

    def _restoring(self) -> Callable[[], None]:
        """Return the method of the hook that begins a restore, which has no name; its note has its identifiers."""
        note = self._noting(_RESTORE)

        def begin() -> None:
            self.identities.forget(RESTORE)
            self.identities.draw(RESTORE, None if self.current is None else self.current())
            note(self.identities.of(RESTORE))

        return begin

    @property
    def waiting(self) -> int:
        """Notes that nobody has taken yet."""
        return len(self._notes) + len(self._gathered)

    def gather(self) -> None:
        """Have the notes counted that were not yet; from any thread."""
        # With a limit, because a signal may have interrupted, for good, whoever is gathering.
        if not self._gathering.acquire(timeout=_PATIENCE_SECONDS):
            return
        try:
            next_note = self._notes.popleft
            notes = [next_note() for _ in range(len(self._notes))]
            self._gathered.extend(notes)
            if notes and self.count is not None:
                self.count(notes)
        finally:
            self._gathering.release()

    def take(self, limit: int) -> list[RawNote]:
        """Take the oldest notes, so many at most; for one thread at a time."""
        self.gather()
        next_note = self._gathered.popleft
        return [next_note() for _ in range(min(limit, len(self._gathered)))]
