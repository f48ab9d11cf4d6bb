"""Saves that the end of their process cut off: where each one was, for how long, and what it waited for.

Rule: a time that was cut off is a lower bound, so it is kept apart from the times of what came to its end. Nothing here
suspends.

A process that is told to end exports what is open as cut off. One that is killed outright cannot: what is known of it is
that its last sample still had a phase going on, and that nothing tells of that phase's end.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from quiesce.telemetry import names
from quiesce.telemetry.checkpoint_metrics import blame_ns
from quiesce.telemetry.finished import FinishedSpan
from quiesce.types import PHASES

__all__ = ["CUT_OFF_OUTCOME", "UNFINISHED", "CutOff", "CutOffs", "Holder", "LastSample", "Phases"]

CUT_OFF_OUTCOME: Final = "cut off"
"""What the page says of the outcome of something that never had one."""

UNFINISHED: Final = "unfinished"
"""The same of something that may still go on."""

_MOST: Final = 20_000
"""Saves and slots that are kept until it is known what they have to do with each other."""

_SAME_SECONDS: Final = 0.05
"""How far two tellings of one moment may be apart: a span's and a sample's."""

_PREFIX: Final = "quiesce.checkpoint."
_CUT: Final = "quiesce.cut_id"
_HOLDER: Final = "quiesce.last_holder."

_PHASE_KEYS: Final = {f'{names.CHECKPOINT_PHASE.name}{{phase="{phase}"}}': phase for phase in PHASES}
_SINCE_KEYS: Final = {f'{names.CHECKPOINT_PHASE_STARTED.name}{{phase="{phase}"}}': phase for phase in PHASES}


@dataclass(frozen=True, slots=True)
class Holder:
    """A slot that was still open.

    Attributes:
        kind: Its kind.
        task: The name of its task; "" where it is not told.
        held_seconds: How long it had been held.
        at_least: Whether it may have been held for longer: only the time is known for which it was waited for.
    """

    kind: str
    task: str
    held_seconds: float
    at_least: bool = False


@dataclass(slots=True)
class CutOff:
    """A save, or a window, that did not come to its end.

    Attributes:
        cut_id: Its id; "" where nothing but a sample tells of it.
        unix_time: When it began, as far as is known.
        ended: When the process ended, or the last that is known of it.
        phase: The phase that it was in; "" for none.
        seconds: How long it had been in that phase, or under way.
        step: The trainer's step, or None.
        holders: The slots that it waited for, the one that was held longest first.
        waiting: How many slots waited for it to end.
        killed: Whether the process could not tell of its end, so that only a sample tells of the save.
        over: Whether the process is known to have ended: it told so, or the run was started again.
        blame: Seconds by kind of slot for which it drained.
        blocked: Seconds by kind that slots had waited for it.
        closed: Seconds for which the barrier admitted no slot.
    """

    cut_id: str
    unix_time: float
    ended: float
    phase: str = ""
    seconds: float = 0.0
    step: int | None = None
    holders: tuple[Holder, ...] = ()
    waiting: int = 0
    killed: bool = False
    over: bool = True
    blame: dict[str, float] = field(default_factory=dict)
    blocked: dict[str, float] = field(default_factory=dict)
    closed: float = 0.0

    @property
    def outcome(self) -> str:
        """What the page says of its outcome."""
        return CUT_OFF_OUTCOME if self.over else UNFINISHED


@dataclass(frozen=True, slots=True)
class LastSample:
    """What the last sample of a process said of the phase that went on.

    Attributes:
        writer: Who told.
        unix_time: When.
        phase: The phase.
        since: When it had begun, in Unix seconds.
    """

    writer: str
    unix_time: float
    phase: str
    since: float


class Phases:
    """Which phase goes on in each process, by its samples."""

    def __init__(self) -> None:
        self._now: dict[str, dict[str, float]] = {}
        self._since: dict[str, dict[str, float]] = {}
        self._at: dict[str, float] = {}

    def sample(self, writer: str, unix_time: float, values: Mapping[str, float | None]) -> None:
        """Take a sample: of a process's series those that changed."""
        self._at[writer] = unix_time
        for keys, kept in ((_PHASE_KEYS, self._now), (_SINCE_KEYS, self._since)):
            found = {keys[key]: values[key] or 0.0 for key in keys.keys() & values.keys()}
            if found:
                kept.setdefault(writer, {}).update(found)

    def going_on(self) -> list[LastSample]:
        """Return the phases that the last samples of the processes had going on."""
        return [
            LastSample(writer, self._at[writer], phase, self._since.get(writer, {}).get(phase, 0.0))
            for writer, phases in self._now.items()
            for phase, on in phases.items()
            if on == 1
        ]


@dataclass(slots=True)
class _Draft:
    """Spans of one save, among them one that was cut off."""

    begin_ns: int
    end_ns: int
    step: int | None = None
    open: dict[str, int] = field(default_factory=dict)  # phase -> when it began
    told: Holder | None = None
    window: tuple[int, int] = (0, 0)
    window_ns: int = 0


@dataclass(frozen=True, slots=True)
class _Slot:
    """A slot that was open, or waited, when its process ended."""

    kind: str
    opened_ns: int
    end_ns: int
    held: bool
    links: tuple[tuple[int, int], ...]


class CutOffs:
    """Finds saves that were cut off, and what each of them waited for.

    Args:
        going_on: What the last samples had going on.
        newest: The process that began last, which may still run.
    """

    def __init__(self, going_on: Iterable[LastSample] = (), newest: str = "") -> None:
        self._newest = newest
        self._drafts: OrderedDict[str, _Draft] = OrderedDict()
        self._slots: OrderedDict[int, _Slot] = OrderedDict()
        self._count = 0
        self._going_on = list(going_on)

    def span(self, span: FinishedSpan) -> None:
        """Take one span, cut off or not."""
        name = span.name
        phase = name[len(_PREFIX) :] if name.startswith(_PREFIX) else ""
        if phase in PHASES and self._going_on:
            since = span.start_ns / 1e9
            self._going_on = [
                last
                for last in self._going_on
                if last.phase != phase or abs(last.since - since) > _SAME_SECONDS
            ]
        if not span.cut_off:
            return
        if name == "quiesce.slot":
            self._slot(span)
        elif phase in PHASES or name in {"quiesce.checkpoint", "quiesce.window"}:
            self._part(span, phase)

    def over(self, cut_id: str, writer: str, unix_time: float) -> None:
        """Take it that the log tells how a save ended."""
        self._drafts.pop(cut_id, None)
        self._going_on = [
            last for last in self._going_on if last.writer != writer or last.unix_time > unix_time
        ]

    def found(self) -> Iterator[CutOff]:
        """Yield the saves that were cut off."""
        for cut_id, draft in self._drafts.items():
            yield self._whole(cut_id, draft)
        for last in self._going_on:
            begin = min(last.since or last.unix_time, last.unix_time)
            seconds = last.unix_time - begin
            over = last.writer != self._newest
            yield CutOff("", begin, last.unix_time, last.phase, seconds, killed=True, over=over)

    def _part(self, span: FinishedSpan, phase: str) -> None:
        said = span.attributes
        cut_id = str(said.get(_CUT, ""))
        draft = self._drafts.get(cut_id)
        if draft is None:
            draft = self._drafts[cut_id] = _Draft(span.start_ns, span.end_ns)
            if len(self._drafts) > _MOST:
                self._drafts.popitem(last=False)
        draft.begin_ns = min(draft.begin_ns, span.start_ns)
        draft.end_ns = max(draft.end_ns, span.end_ns)
        step = said.get("quiesce.step")
        draft.step = step if isinstance(step, int) else draft.step
        if phase:
            draft.open[phase] = span.start_ns
        if span.name == "quiesce.window":
            draft.window = (span.trace_id, span.span_id)
            draft.window_ns = span.start_ns
        kind = said.get(f"{_HOLDER}kind")
        if kind is not None:
            seconds = said.get(f"{_HOLDER}seconds", 0.0)
            held = float(seconds) if isinstance(seconds, int | float) else 0.0
            draft.told = Holder(str(kind), str(said.get(f"{_HOLDER}task", "")), held, at_least=True)

    def _slot(self, span: FinishedSpan) -> None:
        said = span.attributes
        held = said.get("quiesce.held") is not False
        waited = said.get("quiesce.wait_seconds", 0.0)
        asked = int(waited * 1e9) if isinstance(waited, int | float) and held else 0
        self._count += 1
        self._slots[self._count] = _Slot(
            str(said.get("quiesce.kind", "")), span.start_ns + asked, span.end_ns, held, span.links
        )
        if len(self._slots) > _MOST:
            self._slots.popitem(last=False)

    def _whole(self, cut_id: str, draft: _Draft) -> CutOff:
        phase, since = max(draft.open.items(), key=lambda item: item[1], default=("", draft.begin_ns))
        end = draft.end_ns
        cut = CutOff(cut_id, draft.begin_ns / 1e9, end / 1e9, phase, (end - since) / 1e9, draft.step)
        if draft.window_ns:
            cut.closed = (end - draft.window_ns) / 1e9
        together = [slot for slot in self._slots.values() if abs(slot.end_ns - end) < _SAME_SECONDS * 1e9]
        if phase == "drain":
            holding = [slot for slot in together if slot.held and slot.opened_ns <= since]
            holding.sort(key=lambda slot: slot.opened_ns)
            kinds = [slot.kind for slot in holding]
            told = draft.told
            tasks = {told.kind: told.task} if told is not None and kinds.count(told.kind) == 1 else {}
            cut.holders = tuple(
                Holder(slot.kind, tasks.get(slot.kind, ""), (end - slot.opened_ns) / 1e9) for slot in holding
            )
            if not holding and told is not None:
                cut.holders = (told,)
            blame = blame_ns((slot.kind, "", 0, end - since) for slot in holding)
            cut.blame = {kind: ns / 1e9 for kind, ns in blame.items()}
        for slot in together:
            if not slot.held and draft.window in slot.links:
                cut.waiting += 1
                lost = (end - slot.opened_ns) / 1e9
                cut.blocked[slot.kind] = cut.blocked.get(slot.kind, 0.0) + lost
        return cut
