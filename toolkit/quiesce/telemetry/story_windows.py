"""The part of a story about windows: what delayed each, and which one a slot waited for.

Rule: as :mod:`quiesce.telemetry.story`. A window is over before the records of the slots that delayed it are read, so
its span ends once they have been.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from quiesce.telemetry.story_spans import LINKS, put
from quiesce.telemetry.tracing import parent_in

if TYPE_CHECKING:
    from quiesce.telemetry.finished import Link
    from quiesce.telemetry.spans import Note
    from quiesce.telemetry.story_spans import Attributes, Maker
    from quiesce.telemetry.tracing import SpanHandle

__all__ = ["Delay", "WindowStory"]

_WINDOWS: Final = 64
_DELAYERS: Final = 1_024

Delay = tuple[str, str, int, int]
"""A slot that a window waited for: kind, task, and from when until when after the window's request, in nanoseconds."""


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


class WindowStory:
    """Tells of windows.

    Args:
        maker: Makes the spans.
        save_of: Returns the span of a save by the name of its cut; None where a barrier is used alone.

    Attributes:
        last_asked_ns: When a window asked last.
    """

    def __init__(self, maker: Maker, save_of: Callable[[str], SpanHandle | None]) -> None:
        self._maker = maker
        self._save_of = save_of
        self._open: OrderedDict[str, _Window] = OrderedDict()
        self._finishing: list[_Window] = []  # over, but for slots whose records are still to be read
        self._recent: deque[_Window] = deque(maxlen=_WINDOWS)
        self._delayers: OrderedDict[tuple[str, int], deque[Link]] = OrderedDict()
        self.last_asked_ns = -1

    # --------------------------------------------------------------------------------------------- slots ask

    def overlapped(self, opened_ns: int, ended_ns: int) -> bool:
        """Say whether a window asked while a slot was open."""
        return any(opened_ns <= window.asked_ns <= ended_ns for window in self._recent)

    def note_delayer(self, kind: str, ended_ns: int, link: Link) -> None:
        """Remember the span of a slot that was open while a window asked; several may have left at once."""
        known = self._delayers.get((kind, ended_ns))
        if known is None:
            put(self._delayers, (kind, ended_ns), deque((link,), _DELAYERS), _DELAYERS)
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
        return tuple(window.handle.link for window in (chain or before)[:LINKS])

    # ------------------------------------------------------------------------------------------------- hooks

    def window_requested(self, note: Note, window_id: str, asked_ns: int) -> None:
        """Begin a window, in its save if it has one, and its drain."""
        save = self._save_of(window_id)
        start = self._maker.unix(asked_ns)
        about: Attributes = {"quiesce.cut_id": window_id}
        if save is None:
            handle = self._maker.start_cut("quiesce.window", window_id, parent_in(note.context), start)
        else:
            handle = self._maker.start("quiesce.window", save, start, about)
        drain = self._maker.start("quiesce.checkpoint.drain", handle, start, about)
        window = _Window(handle, drain, asked_ns)
        pushed_out = put(self._open, window_id, window, _WINDOWS)
        if pushed_out is not None:
            self._cut(pushed_out, note.at_ns)
        self._recent.append(window)
        self.last_asked_ns = max(self.last_asked_ns, asked_ns)

    def window_opened(
        self,
        note: Note,
        window_id: str,
        drain_ns: int,
        delayed_by: tuple[Delay, ...],
        opened_ns: int,
    ) -> None:
        """End the drain, which names its last holder, and begin the exclusive phase."""
        window = self._open.get(window_id)
        if window is None:
            return
        window.opened_ns = opened_ns
        self._end_drain(window, note, drain_ns, delayed_by, opened_ns, "completed")
        window.exclusive = self._maker.start(
            "quiesce.checkpoint.exclusive",
            window.handle,
            self._maker.unix(opened_ns),
            {"quiesce.cut_id": window_id},
        )

    def window_closed(
        self, note: Note, window_id: str, drain_ns: int, exclusive_ns: int, outcome: str, closed_ns: int
    ) -> None:
        """End the exclusive phase; the window ends when the slots that delayed it are known."""
        window = self._open.pop(window_id, None)
        if window is None:
            return
        window.closed_ns = closed_ns
        window.outcome = outcome
        if window.exclusive is not None:
            self._maker.end_phase(window.exclusive, "exclusive", exclusive_ns, closed_ns, outcome, {})
        self._finishing.append(window)

    def window_abandoned(
        self,
        note: Note,
        window_id: str,
        drain_ns: int,
        outcome: str,
        delayed_by: tuple[Delay, ...],
        ended_ns: int,
    ) -> None:
        """End the drain of a window that never opened, likewise."""
        window = self._open.pop(window_id, None)
        if window is None:
            return
        window.closed_ns = ended_ns
        window.outcome = outcome
        self._end_drain(window, note, drain_ns, delayed_by, ended_ns, outcome)
        self._finishing.append(window)

    def cut_part_captured(self, note: Note, cut_id: str, part: str, ns: int) -> None:
        """Make a span of a part, in the exclusive phase."""
        window = self._open.get(cut_id)
        parent = None if window is None else window.exclusive
        about: Attributes = {"quiesce.cut_id": cut_id, "quiesce.part": part}
        self._maker.emit("quiesce.checkpoint.part", parent, note.at_ns, ns, "completed", about)

    # --------------------------------------------------------------------------------------------------- end

    def finish(self, read: int) -> None:
        """End the windows that are over, once the slots that delayed them have been read.

        Args:
            read: How many slot records have been read.
        """
        waiting = []
        for window in self._finishing:
            if window.position > read:
                waiting.append(window)
                continue
            self._end(window, window.closed_ns or window.asked_ns, window.outcome)
        self._finishing = waiting

    def cut_off(self, at_ns: int, delays: Iterable[tuple[str, tuple[Delay, ...]]]) -> None:
        """End all that are open as cut off; of those that still wait, given what has delayed each until then."""
        for window_id, delayed_by in delays:
            waits = self._open.get(window_id)
            if waits is not None and waits.opened_ns is None:
                waits.delayed_by = delayed_by
        for window in (*self._finishing, *self._open.values()):
            self._cut(window, at_ns)
        self._finishing = []
        self._open.clear()

    def _end_drain(
        self,
        window: _Window,
        note: Note,
        drain_ns: int,
        delayed_by: tuple[Delay, ...],
        at_ns: int,
        outcome: str,
    ) -> None:
        window.delayed_by = delayed_by
        window.position = note.position
        self._maker.end_phase(window.drain, "drain", drain_ns, at_ns, outcome, _last_holder(delayed_by))

    def _end(self, window: _Window, at_ns: int, outcome: str, *, cut_off: bool = False) -> None:
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
        end = self._maker.unix(at_ns)
        self._maker.tracing.end(
            window.handle, end, outcome=outcome, attributes=about, links=links[:LINKS], cut_off=cut_off
        )

    def _cut(self, window: _Window, at_ns: int) -> None:
        if window.exclusive is not None:
            self._maker.cut(window.exclusive, at_ns)
        self._maker.cut(window.drain, at_ns, attributes=_last_holder(window.delayed_by))
        self._end(window, at_ns, "", cut_off=True)


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
