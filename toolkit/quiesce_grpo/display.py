"""What a person sees of a run: progress while it goes on, and a summary at its end.

Rule: the display is an observer like any other; it counts in hooks and draws in a thread of its own, so that a slow
terminal costs the training nothing. Without a terminal it prints plain lines of at most 80 columns and no escape codes.
Nothing here suspends.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from quiesce import Hub, RunSummary
from quiesce.types import OWNERS

if TYPE_CHECKING:
    from quiesce.auditor import Auditor, ViolationRecord

__all__ = ["TrainDisplay"]

REFRESHES_PER_SECOND: Final = 4
PLAIN_LINE_SECONDS: Final = 5.0
"""Without a terminal: at most one progress line in so many seconds, and one for every save."""

EDGE_STEPS: Final = 10
"""The summary compares the mean reward of so many first and last steps."""

_HELD_UP: Final = {
    "drain": "new slots, the trainer",
    "exclusive": "every slot, the trainer",
    "stage": "the trainer",
    "write": "nobody",
    "publish": "nobody",
}
"""Who waits while a phase of a checkpoint goes on."""

_LABEL: Final = 13

_NAMED: Final = 3
"""Invariants whose names are shown; of more, the number."""


class TrainDisplay:
    """Shows one run; a context manager that draws while it is entered.

    Args:
        hub: Where the run reports.
        max_steps: Steps at which the run ends, or None.
        console: Where to draw.
    """

    def __init__(self, hub: Hub, *, max_steps: int | None, console: Console) -> None:
        self._hub = hub
        self._max_steps = max_steps
        self._console = console
        self._started = time.monotonic()
        self._last_line = 0.0
        self._phase = "starting"
        self._stopping = False
        self._step = 0
        self._staleness: float | None = None
        self._first_rewards: list[float] = []
        self._last_rewards: deque[float] = deque(maxlen=EDGE_STEPS)
        self._saves: dict[str, int] = {}
        self._last_save = "none yet"
        self._seconds: dict[str, list[float]] = {}
        self._resumed = False
        self._reused: dict[str, int] = {}
        self._auditor: Auditor | None = None
        self._live: Live | None = None

    # -------------------------------------------------------------------------------------------- hooks

    def run_state_changed(self, state: str) -> None:
        """Note the state."""
        if state == "running":
            auditors = self._hub.sources("auditor")
            self._auditor = auditors[-1] if auditors else None  # kept: the summary comes when the run is gone
            versions = self._hub.sources("trainer_version")
            self._step = versions[-1].value if versions else 0  # a resumed run does not begin at 0
        if not self._stopping:
            self._phase = {"running": "training"}.get(state, state)

    def restore_ended(
        self, outcome: str, reason: str, parts: Mapping[str, int], groups: Mapping[str, int]
    ) -> None:
        """Say what a resume brought back."""
        if outcome == "completed":
            self._resumed = True
            self._say(f"restored: {_counts(groups)}, in {sum(parts.values()) / 1e9:.2f} s")

    def tokens_reused(self, group_id: str, tokens: int) -> None:
        """Note that a call went on from staged tokens; from a worker's thread."""
        self._reused[group_id] = tokens

    def train_step_ended(
        self, step: int, version: int, ns: int, groups: int, outcome: str, metrics: Mapping[str, float]
    ) -> None:
        """Note a step."""
        if outcome not in {"completed", "skipped"}:
            return
        self._step = step
        self._staleness = metrics.get("staleness", self._staleness)
        reward = metrics.get("reward")
        if reward is not None:
            if len(self._first_rewards) < EDGE_STEPS:
                self._first_rewards.append(reward)
            self._last_rewards.append(reward)
        if self._live is None and time.monotonic() - self._last_line >= PLAIN_LINE_SECONDS:
            self._last_line = time.monotonic()
            self._say(self._progress_line())

    def phase_ended(self, cut_id: str, phase: str, ns: int, outcome: str) -> None:
        """Note how long a phase of a checkpoint took."""
        # The barrier tells how long it drained and was exclusive more exactly: see window_closed.
        if outcome == "completed" and phase not in {"drain", "exclusive"}:
            self._seconds.setdefault(phase, []).append(ns / 1e9)

    def window_closed(
        self, window_id: str, drain_ns: int, exclusive_ns: int, outcome: str, closed_ns: int
    ) -> None:
        """Note how long a window drained, and how long it was exclusive."""
        if outcome == "completed":
            self._seconds.setdefault("drain", []).append(drain_ns / 1e9)
            self._seconds.setdefault("exclusive", []).append(exclusive_ns / 1e9)

    def checkpoint_ended(
        self,
        cut_id: str,
        step: int,
        outcome: str,
        reason: str,
        groups: Mapping[str, int],
        rows: int,
        num_bytes: int,
    ) -> None:
        """Note a save."""
        self._saves[outcome] = self._saves.get(outcome, 0) + 1
        if outcome == "completed":
            self._last_save = f"step {step}, written in {self._last('write')}"
            if self._live is None:
                self._say(f"saved step {step}: {self._window()}, written in {self._last('write')}")
        elif outcome != "skipped":
            self._last_save = f"step {step} not saved: {outcome} ({reason})"
            if self._live is None:
                self._say(self._last_save)

    # ------------------------------------------------------------------------------------------ drawing

    def preparing(self, what: str) -> None:
        """Show what is being prepared before the run starts."""
        if not self._stopping:
            self._phase = what
        if self._live is None:
            self._say(what)

    def stopping(self, by: str) -> None:
        """Show that a signal asked the run to stop."""
        self._stopping = True
        self._phase = f"{by}: saving once, then stopping; again gives up at once"
        if self._live is None:
            self._say(self._phase)

    def abandon(self) -> None:
        """Leave a usable terminal behind at once, from any thread: the process is about to vanish."""
        if self._live is not None:
            self._console.show_cursor()

    def __enter__(self) -> Self:
        """Subscribe, and start drawing if there is a terminal."""
        self._hub.subscribe(self)
        if self._console.is_terminal:
            self._live = Live(
                get_renderable=self._draw,
                console=self._console,
                refresh_per_second=REFRESHES_PER_SECOND,
                transient=True,
            )
            self._live.start()
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Stop drawing."""
        if self._live is not None:
            self._live.stop()
            self._live = None
        self._hub.unsubscribe(self)

    def summary(self, summary: RunSummary) -> RenderableType:
        """Return what the end of a run shows: what was trained, and what saving cost."""
        return Group(*self._facts(summary), *self._costs())

    def _facts(self, summary: RunSummary) -> Iterator[Text]:
        dropped = sum(summary.dropped.values())
        owned = summary.read - summary.trained - dropped
        yield _fact(
            "prompts", f"{summary.read} read: {summary.trained} trained, {dropped} dropped, {owned} owned"
        )
        if self._first_rewards:
            first, last = self._first_rewards, self._last_rewards
            yield _fact(
                "mean reward",
                f"{statistics.fmean(first):.3f} in the first {len(first)} steps since the start, "
                f"{statistics.fmean(last):.3f} in the last {len(last)}",
            )
        if self._resumed:
            yield _fact("reused", self._reuse())
        saves = ", ".join(f"{count} {outcome}" for outcome, count in self._saves.items())
        yield _fact("saves", saves or "none")
        if self._auditor is not None:
            yield _fact("violations", self._violations() or "none", "" if not self._open() else "bold red")
        yield _fact("wall time", f"{time.monotonic() - self._started:.1f} s")

    def _costs(self) -> Iterator[Text]:
        known = {phase: seconds for phase in _HELD_UP if (seconds := self._seconds.get(phase))}
        if not known:
            return
        yield Text()
        yield Text(
            f"{'saving took':<{_LABEL}}{'median ms':>12}{'largest ms':>12}   and held up", style="bold"
        )
        for phase, seconds in known.items():
            median, largest = statistics.median(seconds) * 1e3, max(seconds) * 1e3
            yield Text(f"{'  ' + phase:<{_LABEL}}{median:>12.3f}{largest:>12.3f}   {_HELD_UP[phase]}")
        yield Text()

    def _draw(self) -> RenderableType:
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="bold")
        grid.add_column()
        elapsed = f"{time.monotonic() - self._started:.0f} s"
        if self._max_steps:
            steps = Table.grid(padding=(0, 1))
            bar = ProgressBar(total=self._max_steps, completed=min(self._step, self._max_steps), width=30)
            steps.add_row(f"{self._step}/{self._max_steps}", bar, elapsed)
            grid.add_row("step", steps)
        else:
            grid.add_row("step", f"{self._step}, {elapsed}")
        grid.add_row("now", self._phase)
        grid.add_row("reward", self._reward())
        staleness = (
            "–" if self._staleness is None else f"{self._staleness:.2f} versions, mean of the last step"
        )
        grid.add_row("staleness", staleness)
        grid.add_row("groups", _counts(self._groups()))
        grid.add_row("cursor", f"{self._cursor()}, trainer version {self._version()}")
        if self._resumed:
            grid.add_row("reused", self._reuse())
        grid.add_row("last window", self._window())
        grid.add_row("last save", self._last_save)
        if violations := self._violations():
            grid.add_row("violations", Text(violations, style="bold red"))
        return grid

    def _progress_line(self) -> str:
        of = f"/{self._max_steps}" if self._max_steps else ""
        mean = f"{statistics.fmean(self._last_rewards):.3f}" if self._last_rewards else "–"
        staleness = "–" if self._staleness is None else f"{self._staleness:.1f}"
        owned = "  ".join(f"{owner} {count}" for owner, count in self._groups().items() if count)
        if broken := len(self._open()):
            owned = f"{broken} violation{'s' if broken > 1 else ''} open"
        return (
            f"step {self._step}{of}  reward {mean}  staleness {staleness}  "
            f"cursor {self._cursor()}  {owned or 'no groups'}"
        )

    def _say(self, line: str) -> None:
        self._console.print(line, highlight=False, soft_wrap=True, markup=False)

    def _reward(self) -> str:
        recent = tuple(self._last_rewards)
        if not recent:
            return "–"
        return f"{recent[-1]:.3f}, mean of the last {len(recent)} steps {statistics.fmean(recent):.3f}"

    def _reuse(self) -> str:
        reused = tuple(self._reused.values())
        return f"{sum(reused)} staged tokens of {len(reused)} groups"

    def _open(self) -> tuple[ViolationRecord, ...]:
        return () if self._auditor is None else self._auditor.records.open()

    def _violations(self) -> str:
        """Return how many violations are open, and of what; "" without any."""
        counts = Counter(record.invariant for record in self._open())
        if not counts:
            return ""
        told = [f"{invariant} {count}x" if count > 1 else invariant for invariant, count in counts.items()]
        more = f" and {len(told) - _NAMED} more" if len(told) > _NAMED else ""
        return f"{counts.total()} open: {', '.join(told[:_NAMED])}{more}"

    def _groups(self) -> dict[str, int]:
        counts = dict.fromkeys(OWNERS, 0)
        for ledger in self._hub.sources("ledger"):
            counts["ledger"] += len(ledger)
        for spares in self._hub.sources("spares"):
            counts["spares"] += len(spares)
        for buffer in self._hub.sources("buffer"):
            stats = buffer.statistics()
            counts["buffer"] += stats.ready
            counts["training"] += stats.training
        return counts

    def _cursor(self) -> str:
        samplers = self._hub.sources("sampler")
        return str(samplers[-1].dispatch_cursor) if samplers else "–"

    def _version(self) -> str:
        versions = self._hub.sources("trainer_version")
        return str(versions[-1].value) if versions else "–"

    def _window(self) -> str:
        return f"drain {self._last('drain', 3)}, exclusive {self._last('exclusive', 3)}"

    def _last(self, phase: str, digits: int = 0) -> str:
        seconds = self._seconds.get(phase)
        return f"{seconds[-1] * 1e3:.{digits}f} ms" if seconds else "–"


def _counts(groups: Mapping[str, int]) -> str:
    return ", ".join(f"{groups.get(owner, 0)} {owner}" for owner in OWNERS)


def _fact(name: str, value: str, style: str = "") -> Text:
    return Text.assemble((f"{name:<{_LABEL}}", "bold"), (value, style))
