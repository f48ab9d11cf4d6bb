"""The barrier between the sections that change restart-facing state and the checkpoint that reads it.

Think of a ticket booth. Whoever changes state takes a ticket (:meth:`DataPlaneCheckpointBarrier.mutation`,
the shared side); tickets do not exclude each other. The checkpoint closes the booth
(:meth:`DataPlaneCheckpointBarrier.checkpoint`, the exclusive side): it lets no new section in, waits until
the open ones are left, and then reads an instant at which nothing is half done. So the writers take the
*shared* side and the reader takes the *exclusive* one.

Rule: one first-in-first-out queue of slots and checkpoints. Consecutive slots enter together; a checkpoint
waits for the open slots and is served before every slot that asked after it. Nobody starves, in either
direction.

======================  ===========================================  =====================================
who                     waits for                                    unblocked by
======================  ===========================================  =====================================
a slot                  checkpoints that asked before it             their release, timeout or cancellation
a checkpoint            sections that asked before it                their release
======================  ===========================================  =====================================

The barrier is in one phase at a time: ``open``, ``drain`` (a checkpoint waits), ``exclusive`` (it is in) or
``poisoned``. Slots enter without waiting in the first one only.

Yield rule: entering suspends only if it has to wait; leaving never suspends. All state below is changed on
the loop's thread only, in steps without an await, so it needs no lock. Cancellation: a waiter that is
cancelled leaves the queue; one that was already granted gives the grant back in the same step; a body that is
cancelled is released in the same step.
"""

# Barrier and cuts are one protocol in one module, so they see each other's private state.
# ruff: noqa: SLF001

from __future__ import annotations

import asyncio
import secrets
import sys
import threading
import time
from collections import Counter, OrderedDict
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, Self, TypeVar, TypeVarTuple

from quiesce.errors import (
    BarrierPoisonedError,
    CutExpiredError,
    DrainTimeoutError,
    ForeignCutError,
    LockOrderError,
    NestedCutError,
    SectionReusedError,
    UnknownKindError,
    WrongLoopError,
    WrongSideError,
)
from quiesce.observers import HOOK_ERRORS, Hub, default_hub
from quiesce.threads import DaemonExecutor

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterable
    from concurrent.futures import Executor
    from types import TracebackType

__all__ = [
    "KINDS",
    "BarrierStatistics",
    "CheckpointCut",
    "Cut",
    "DataPlaneCheckpointBarrier",
    "Holder",
    "MutationCut",
    "detached",
    "held_cut",
    "require_no_cut",
]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
Side = Literal["mutation", "checkpoint"]
BarrierPhase = Literal["open", "drain", "exclusive", "poisoned"]

KINDS: Final = (
    "prompt_reservation",
    "admission",
    "group_commit",
    "group_removal",
    "advantage_writeback",
    "sample_clear",
    "substitution",
    "retry",
    "watchdog_abort",
    "recovery_restore",
)
"""The built-in kinds of mutation slots; a closed set, because they become metric labels."""

DEFAULT_DRAIN_TIMEOUT_SECONDS: Final = 60.0
"""How long a checkpoint drains before it gives up and names the holders; a slot should last milliseconds."""

DEFAULT_HUNG_THREAD_TIMEOUT_SECONDS: Final = 300.0
"""How long a thread inside a section may run before the barrier is poisoned; far above a sane disk stall."""

_HELD: ContextVar[Cut | None] = ContextVar("quiesce_held_cut", default=None)
"""The section that this context opened last. Only the cut's liveness counts, so nothing is reset on exit."""


_NOT_ASKED: Final = -1

# Looked up once: a slot costs about as much as ten of these look-ups.
_get_ident = threading.get_ident
if sys.version_info >= (3, 12):
    _current_task = asyncio.current_task
else:
    # CPython 3.11 wrote current_task() in Python, at a quarter of what a slot costs; this is the dictionary it looks in.
    _current_task = asyncio.tasks._current_tasks.get  # type: ignore[attr-defined] # typeshed knows what is public


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds, or waits for, a section.

    Attributes:
        kind: The slot's kind, or ``checkpoint``.
        task: Name of the task that opened it.
        age_seconds: How long it has been held or waited for.
        suspended_at: Where its task is suspended (function, file, line), as far as Python can tell.
    """

    kind: str
    task: str
    age_seconds: float
    suspended_at: str

    def __str__(self) -> str:
        """Return one readable clause for error messages."""
        return f"{self.kind} slot of task {self.task!r}, {self.age_seconds:.3f} s old, at {self.suspended_at}"


@dataclass(frozen=True, slots=True)
class BarrierStatistics:
    """What a barrier is doing right now.

    Attributes:
        phase: See the module's docstring.
        phase_age_seconds: How long it has been in that phase.
        active: Open slots by kind, every kind present.
        waiting: Waiting slots by kind, every kind present.
        waiting_checkpoints: Checkpoints that wait.
        oldest_active_seconds: Age of the oldest open slot by kind, 0 where none is open.
        longest_wait_seconds: Age of the longest current wait by kind, 0 where none waits.
        oldest_holder: The section that has been held the longest, or None.
        mutation_version: See :attr:`DataPlaneCheckpointBarrier.mutation_version`.
    """

    phase: BarrierPhase
    phase_age_seconds: float
    active: dict[str, int] = field(hash=False)
    waiting: dict[str, int] = field(hash=False)
    waiting_checkpoints: int
    oldest_active_seconds: dict[str, float] = field(hash=False)
    longest_wait_seconds: dict[str, float] = field(hash=False)
    oldest_holder: Holder | None
    mutation_version: int


class _Threads:
    """What :meth:`DataPlaneCheckpointBarrier.run_in_cut` started inside one section."""

    __slots__ = ("idents", "leaving", "running")

    def __init__(self) -> None:
        self.idents: set[int] = set()
        self.running = 0
        self.leaving: str | None = None  # the outcome, once the body is left but a thread still runs


class Cut:
    """A section of a barrier, and the token that proves that code runs inside it.

    Functions that change restart-facing state take a cut and call :meth:`check` first. ``async with`` enters
    the section.
    """

    __slots__ = (
        "_asked_ns",
        "_changed",
        "_opened_ns",
        "_outer",
        "_task",
        "_threads",
        "barrier",
        "kind",
        "live",
    )

    side: ClassVar[Side]

    # Set by _of(), and by mutation() itself: a constructor would cost a tenth of a slot.
    barrier: DataPlaneCheckpointBarrier
    kind: str
    live: bool
    """Whether the section is held right now."""
    _asked_ns: int
    _threads: _Threads | None
    # Set on the way in.
    _task: asyncio.Task[Any] | None
    _outer: Cut | None  # the innermost live cut of another barrier that the context held
    _opened_ns: int

    def _of(self, barrier: DataPlaneCheckpointBarrier, kind: str) -> Self:
        """Make it a section of that barrier, not entered yet."""
        self.barrier = barrier
        self.kind = kind
        self.live = False
        self._asked_ns = _NOT_ASKED
        self._threads = None
        return self

    def check(
        self, barrier: DataPlaneCheckpointBarrier, side: Side | None = None, *, changes: bool = True
    ) -> None:
        """Prove that the caller runs inside this section of that barrier.

        Args:
            barrier: The barrier that guards what is about to be changed or read.
            side: The side that is needed; None accepts both.
            changes: Whether state is about to be changed. Under the exclusive side this is what moves
                :attr:`DataPlaneCheckpointBarrier.mutation_version`.

        Raises:
            ForeignCutError: If another barrier issued the cut, or the calling thread is not its own.
            CutExpiredError: If the section has been left.
            WrongSideError: If it is the other side.
        """
        if self.barrier is not barrier:
            raise ForeignCutError(repr(self), f"something that barrier {barrier.name!r} guards")
        if not self.live:
            raise CutExpiredError(repr(self))
        if side is not None and side != self.side:
            raise WrongSideError(repr(self), side)
        ident = _get_ident()
        if ident != barrier._thread_ident and (self._threads is None or ident not in self._threads.idents):
            raise ForeignCutError(repr(self), f"thread {threading.current_thread().name!r}")
        if changes:
            self._changed = True

    def __bool__(self) -> bool:
        """Refuse: whether a cut *is there* and whether it is *live* are different questions."""
        message = "a cut has no truth value; ask .live, or compare with None"
        raise TypeError(message)

    def __repr__(self) -> str:
        """Name side, kind, barrier and state."""
        state = "live" if self.live else ("not entered" if self._asked_ns == _NOT_ASKED else "expired")
        return f"<{self.side} cut {self.kind!r} of barrier {self.barrier.name!r}, {state}>"

    def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> Awaitable[None]:
        """Leave the section; never suspends, and is done when the call returns, whoever awaits the result."""
        self.live = False
        barrier = self.barrier
        if barrier._phase == "open" and self._threads is None:
            # Nobody waits for this slot: what is left of _release().
            if not (hooks := barrier.hub.slot_closed):
                del barrier._open[self]
                barrier._version += 1
                self._task = None
                return barrier._left
            if exc_type is None:
                ended = barrier._clock()
                del barrier._open[self]
                barrier._version += 1
                self._task = None
                opened = self._opened_ns
                for hook in hooks:
                    try:
                        hook(self.kind, opened - self._asked_ns, ended - opened, "completed", ended)
                    except HOOK_ERRORS as error:
                        barrier.hub.raised("slot_closed", hook, error)
                return barrier._left
        if exc_type is None:
            outcome = "completed"
        else:
            outcome = "cancelled" if issubclass(exc_type, asyncio.CancelledError) else "failed"
        if self._threads is not None and self._threads.running:
            self._threads.leaving = outcome  # a thread still works in here: its end releases the section
        else:
            barrier._release(self, outcome)
        return barrier._left


class MutationCut(Cut):
    """The shared side: a short section that changes restart-facing state."""

    __slots__ = ()

    side: ClassVar[Side] = "mutation"

    async def __aenter__(self) -> Self:
        """Enter; suspends only if a checkpoint asked first."""
        barrier = self.barrier
        held = _HELD.get()
        if (
            barrier._phase == "open"
            and _get_ident() == barrier._thread_ident
            and (held is None or not (held.live or held._outer is not None))
            and self._asked_ns == _NOT_ASKED
            and (task := _current_task(barrier._loop)) is not None
        ):
            # There is nothing to refuse and nothing to wait for: what is left of _prepare().
            self._task = task
            self._outer = None
            self._asked_ns = self._opened_ns = barrier._clock()
            barrier._open[self] = None
        else:
            self._opened_ns = barrier._prepare(self)
            if barrier._phase == "open":
                barrier._open[self] = None
            else:
                await barrier._wait(self)
        self.live = True
        _HELD.set(self)
        if barrier.hub.slot_opened:
            try:
                barrier.hub.fire("slot_opened", self.kind, self._opened_ns - self._asked_ns, self._opened_ns)
            except BaseException:
                # A strict observer: __aexit__ will not be called, so give the slot back here.
                self.live = False
                barrier._release(self, "failed")
                raise
        return self


class CheckpointCut(Cut):
    """The exclusive side: nothing else is inside while it is held.

    Attributes:
        window_id: Names the window, and the cut that it captures.
    """

    __slots__ = ("_delayed_by", "_drain_timeout", "_timer", "window_id")

    side: ClassVar[Side] = "checkpoint"

    window_id: str
    _drain_timeout: float | None
    _timer: asyncio.TimerHandle | None
    _delayed_by: list[tuple[str, str, int, int]]

    @property
    def drain_ns(self) -> int:
        """Nanoseconds from the request to the moment at which the exclusive side was held."""
        return self._opened_ns - self._asked_ns

    async def __aenter__(self) -> Self:
        """Enter; suspends until every section that asked before is left.

        Raises:
            DrainTimeoutError: If that takes longer than the drain timeout.
        """
        barrier = self.barrier
        asked = barrier._prepare(self)
        if barrier.hub.window_requested:
            barrier.hub.fire("window_requested", self.window_id, asked)
        if barrier._phase == "open" and not barrier._open:
            self._opened_ns = asked
            barrier._window = self
            barrier._turn(asked)
        else:
            await barrier._wait(self)
        self.live = True
        _HELD.set(self)
        if barrier.hub.window_opened:
            try:
                delays = tuple(self._delayed_by)
                barrier.hub.fire("window_opened", self.window_id, self.drain_ns, delays, self._opened_ns)
            except BaseException:
                self.live = False
                barrier._release(self, "failed")
                raise
        return self


class DataPlaneCheckpointBarrier:
    """Shared mutation slots, exclusive checkpoint windows. See the module's docstring for the protocol.

    Example::

        barrier = DataPlaneCheckpointBarrier()

        async with barrier.mutation("group_commit") as cut:     # many at a time
            ledger.mark_group_admitted(cut, group_id, target_step=7, start_version=6)

        async with barrier.checkpoint(drain_timeout=60) as cut:  # alone
            records, ready = ledger.records(), buffer.ready()

    Args:
        kinds: Further kinds of slots, beside :data:`KINDS`.
        name: Appears in errors and logs.
        hub: Where hooks go; None means the process-wide hub.
        clock: Monotonic nanoseconds.
        hung_thread_timeout: Seconds after which a thread that hangs inside a section poisons the barrier.
        executor: Where :meth:`run_in_cut` runs its calls; None means a pool of its own. Never pass the loop's
            default one:
            calls that wait for a closed gate would fill it.
        window_ids: Makes the id of each window; for reproducible tests.
    """

    def __init__(
        self,
        *,
        kinds: Iterable[str] = (),
        name: str = "data-plane",
        hub: Hub | None = None,
        clock: Callable[[], int] = time.perf_counter_ns,
        hung_thread_timeout: float = DEFAULT_HUNG_THREAD_TIMEOUT_SECONDS,
        executor: Executor | None = None,
        window_ids: Callable[[], str] = lambda: secrets.token_hex(8),
    ) -> None:
        self.name = name
        self.kinds: tuple[str, ...] = tuple(dict.fromkeys((*KINDS, *kinds)))
        self.hub = default_hub() if hub is None else hub
        self.hung_thread_timeout = hung_thread_timeout
        self._known = frozenset(self.kinds)
        self._clock = clock
        self._executor = executor
        self._window_ids = window_ids
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread_ident = 0
        # What leaving returns, from binding on: to await a future that is done costs half of what a coroutine costs that
        # only returns.
        self._left: asyncio.Future[None]
        # The protocol's state. A waiting section is in _queue; a granted one is in _open (slots) or _window.
        self._queue: OrderedDict[Cut, asyncio.Future[None]] = OrderedDict()
        self._open: dict[Cut, None] = {}
        self._window: CheckpointCut | None = None
        self._asking: list[CheckpointCut] = []  # the checkpoints in _queue, first come first
        self._poison: tuple[str, float] | None = None
        self._phase: BarrierPhase = "open"
        self._version = 0
        self._since_ns = clock()
        self.hub.attach("barrier", self)

    def mutation(self, kind: str) -> MutationCut:
        """Return a mutation slot to enter with ``async with``.

        Args:
            kind: What the slot is for, one of :attr:`kinds`.

        Raises:
            UnknownKindError: Before anything waits.
        """
        if kind not in self._known:
            raise UnknownKindError(kind, self.kinds)
        cut = MutationCut()  # and then what _of() does
        cut.barrier = self
        cut.kind = kind
        cut.live = False
        cut._asked_ns = _NOT_ASKED
        cut._threads = None
        return cut

    def checkpoint(self, drain_timeout: float | None = DEFAULT_DRAIN_TIMEOUT_SECONDS) -> CheckpointCut:
        """Return a checkpoint window to enter with ``async with``.

        Args:
            drain_timeout: Seconds after which the checkpoint gives up, leaving the barrier open; None waits
                for ever.

        Raises:
            ValueError: If the timeout is negative.
        """
        if drain_timeout is not None and drain_timeout < 0:
            message = f"drain_timeout cannot be {drain_timeout}: it is seconds, or None to wait for ever"
            raise ValueError(message)
        cut = CheckpointCut()._of(self, "checkpoint")
        cut.window_id = self._window_ids()
        cut._changed = False
        cut._drain_timeout = drain_timeout
        cut._timer = None
        cut._delayed_by = []
        return cut

    @property
    def mutation_version(self) -> int:
        """Grows with every section that may have changed state, also when its body failed.

        Equal values at two moments mean that nothing restart-facing changed in between.
        """
        return self._version

    def restore_version(self, version: int) -> None:
        """Go on counting from a saved value, so that versions never go back within a lineage.

        Raises:
            ValueError: If that would go back.
        """
        if version < self._version:
            message = (
                f"mutation version of barrier {self.name!r} cannot go back from {self._version} to {version}"
            )
            raise ValueError(message)
        self._version = version

    async def run_in_cut(
        self, cut: Cut, function: Callable[[*Ts], T], *args: *Ts, record: Callable[[T], None] | None = None
    ) -> T:
        """Run a blocking call in a thread while the section is held, whatever happens to the caller.

        The section is not released while the thread runs, not even if the caller is cancelled. The call's
        result is never thrown away: ``record`` sees it, on the loop, before a cancellation goes on.

        Args:
            cut: The live section; code in the thread may :meth:`Cut.check` it.
            function: Called with ``args`` in the barrier's own executor, with the caller's context.
            *args: Its arguments.
            record: Called with the result, on the loop, whether or not the caller was cancelled.

        Raises:
            BarrierPoisonedError: If the call is still running after ``hung_thread_timeout`` seconds.
            CutError: If the cut does not prove anything here.
        """
        cut.check(self, changes=False)  # what changes state in there checks for itself
        loop = asyncio.get_running_loop()
        threads = cut._threads
        if threads is None:
            threads = cut._threads = _Threads()

        def call() -> T:
            ident = threading.get_ident()
            threads.idents.add(ident)
            try:
                return function(*args)
            except StopIteration as stop:  # a future cannot carry it: its waiter would wait for ever
                message = f"{_name(function)} raised StopIteration"
                raise RuntimeError(message) from stop
            finally:
                threads.idents.discard(ident)

        if self._executor is None:
            self._executor = DaemonExecutor(f"quiesce-cut-{self.name}")
        context = copy_context()
        future = loop.run_in_executor(self._executor, context.run, call)
        threads.running += 1
        future.add_done_callback(lambda done: self._thread_ended(cut, threads, done))
        cancelled = await self._outlast(future, f"{_name(function)} in {cut!r}")
        if cancelled is not None:
            failure = None if future.cancelled() else future.exception()
            if failure is not None:
                raise cancelled from failure
            if record is not None:
                try:
                    record(future.result())
                except Exception as error:
                    raise cancelled from error
            raise cancelled
        result = future.result()
        if record is not None:
            record(result)
        return result

    async def _outlast(self, future: asyncio.Future[Any], what: str) -> asyncio.CancelledError | None:
        """Wait for a thread, which cannot be stopped; return the cancellation that came meanwhile."""
        started = self._clock()
        deadline = asyncio.get_running_loop().time() + self.hung_thread_timeout
        cancelled: asyncio.CancelledError | None = None
        while not future.done():
            left = deadline - asyncio.get_running_loop().time()
            try:
                await asyncio.wait({future}, timeout=max(0.0, left))
            except asyncio.CancelledError as error:
                cancelled = error
            else:
                if not future.done():
                    raise self._poison_with(what, (self._clock() - started) / 1e9)
        return cancelled

    def statistics(self) -> BarrierStatistics:
        """Return what the barrier is doing right now; may be called from any thread."""
        now = self._clock()  # what opens while this runs has, for a moment, a negative age: hence the max()
        active, waiting = Counter[str](), Counter[str]()
        oldest = dict.fromkeys(self.kinds, 0.0)
        longest = dict.fromkeys(self.kinds, 0.0)
        first: Cut | None = self._window
        for slot in list(self._open):
            active[slot.kind] += 1
            oldest[slot.kind] = max(oldest[slot.kind], (now - slot._opened_ns) / 1e9)
            if first is None or slot._opened_ns < first._opened_ns:
                first = slot
        for section in list(self._queue):
            if section.side == "mutation":
                waiting[section.kind] += 1
                longest[section.kind] = max(longest[section.kind], (now - section._asked_ns) / 1e9)
        return BarrierStatistics(
            phase=self._phase,
            phase_age_seconds=max(0, now - self._since_ns) / 1e9,
            active={kind: active[kind] for kind in self.kinds},
            waiting={kind: waiting[kind] for kind in self.kinds},
            waiting_checkpoints=len(self._asking),
            oldest_active_seconds=oldest,
            longest_wait_seconds=longest,
            oldest_holder=None if first is None else self._holder(first, now),
            mutation_version=self._version,
        )

    def slots_now(self) -> list[tuple[str, int, int | None, asyncio.Task[Any] | None]]:
        """Return the slots that are open or wait right now; may be called from any thread.

        Returns:
            Of each its kind, when it asked and opened (None: it waits), by the barrier's clock, and its task.
        """
        slots: list[tuple[str, int, int | None, asyncio.Task[Any] | None]] = [
            (slot.kind, slot._asked_ns, slot._opened_ns, slot._task) for slot in list(self._open)
        ]
        return slots + [
            (section.kind, section._asked_ns, None, section._task)
            for section in list(self._queue)
            if section.side == "mutation"
        ]

    def draining_now(self, now_ns: int) -> list[tuple[str, tuple[tuple[str, str, int, int], ...]]]:
        """Return the windows that wait right now; may be called from any thread.

        Args:
            now_ns: The time, by the barrier's clock: until when a slot that is open delays them.

        Returns:
            Of each its id, and what has delayed it so far, as the hook ``window_abandoned`` tells it.
        """
        return [
            (cut.window_id, (*cut._delayed_by, *self._still_open(cut, now_ns))) for cut in list(self._asking)
        ]

    # ------------------------------------------------------------------------------------------ the protocol

    def _prepare(self, cut: Cut) -> int:
        """Refuse whatever must not enter, before anything waits; return the time of asking."""
        # A task of our loop is current, and this is our loop's thread: then this is that task.
        task = _current_task(self._loop) if _get_ident() == self._thread_ident else None
        if task is None:
            task = self._bind()
        held = _HELD.get()
        outer = None if held is None or not (held.live or held._outer is not None) else self._outer(held, cut)
        if cut._asked_ns != _NOT_ASKED:
            raise SectionReusedError(repr(cut))
        if self._poison is not None:
            raise BarrierPoisonedError(self.name, *self._poison)
        cut._task = task
        cut._outer = outer
        cut._asked_ns = now = self._clock()
        return now

    def _bind(self) -> asyncio.Task[Any] | None:
        """Bind to the running loop, the first time; return its current task, if there is one."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise WrongLoopError(self.name, "a section asked for outside any event loop") from None
        if self._loop is None:
            self._loop = loop
            self._thread_ident = threading.get_ident()
            self._left = asyncio.Future(loop=loop)
            self._left.set_result(None)
        elif loop is not self._loop:
            raise WrongLoopError(self.name, f"a section asked for in {loop!r}")
        return asyncio.current_task(loop)

    def _outer(self, held: Cut | None, cut: Cut) -> Cut | None:
        """Refuse to nest; return the innermost live cut of another barrier that this context holds."""
        outer: Cut | None = None
        while held is not None:
            if held.live:
                if held.barrier is self:
                    raise NestedCutError(self.name, f"a {cut.kind!r} section", repr(held))
                if outer is None:
                    outer = held
            held = held._outer
        return outer

    def _turn(self, now: int) -> None:
        """Note which phase the barrier is in now; after every step that may have changed it."""
        phase: BarrierPhase
        if self._poison is not None:
            phase = "poisoned"
        elif self._window is not None:
            phase = "exclusive"
        else:
            phase = "drain" if self._asking else "open"
        if phase != self._phase:
            self._phase = phase
            self._since_ns = now

    async def _wait(self, cut: Cut) -> None:
        """Queue up until granted. Cancelled after the grant, the grant is given back in the same step."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._queue[cut] = future
        if isinstance(cut, CheckpointCut):
            self._asking.append(cut)
            self._turn(cut._asked_ns)
            if cut._drain_timeout is not None:
                cut._timer = future.get_loop().call_later(cut._drain_timeout, self._give_up, cut)
        try:
            await future
        except BaseException as error:
            outcome = "cancelled" if isinstance(error, asyncio.CancelledError) else "failed"
            now = self._clock()
            if cut in self._open or cut is self._window:
                self._release(cut, outcome, entered=False)
            else:
                self._leave_queue(cut)
            if isinstance(cut, CheckpointCut):
                if self.hub.window_abandoned:
                    delays = (*cut._delayed_by, *self._still_open(cut, now))
                    self.hub.fire(
                        "window_abandoned", cut.window_id, now - cut._asked_ns, outcome, delays, now
                    )
            elif self.hub.slot_wait_abandoned:
                self.hub.fire("slot_wait_abandoned", cut.kind, now - cut._asked_ns, outcome, now)
            raise

    def _leave_queue(self, cut: Cut) -> None:
        """Take a waiter out, by identity, and serve those behind it."""
        if self._queue.pop(cut, None) is not None and isinstance(cut, CheckpointCut):
            self._stop_asking(cut)
        self._serve(self._clock())  # those behind it may be slots that only its request held back

    def _stop_asking(self, cut: CheckpointCut) -> None:
        self._asking.remove(cut)
        if cut._timer is not None:
            cut._timer.cancel()
            cut._timer = None

    def _serve(self, now: int) -> None:
        """Grant whatever stands at the head of the queue and may enter now."""
        while self._queue and self._window is None and self._poison is None:
            cut = next(iter(self._queue))
            future = self._queue[cut]
            if not future.done():  # done: its task was cancelled in this very step and is about to leave
                cut._opened_ns = now  # first, because statistics() may look from another thread
                if isinstance(cut, MutationCut):
                    self._open[cut] = None
                elif self._open:
                    break
                elif isinstance(cut, CheckpointCut):
                    self._window = cut
                future.set_result(None)
            del self._queue[cut]
            if isinstance(cut, CheckpointCut):
                self._stop_asking(cut)
        self._turn(now)

    def _release(self, cut: Cut, outcome: str, *, entered: bool = True) -> None:
        """End a granted section. The release comes first; reporting it cannot keep anybody out."""
        now = self._clock()
        if isinstance(cut, CheckpointCut):
            self._window = None
            self._turn(now)
            if cut._changed:
                self._version += 1
        else:
            del self._open[cut]
            if entered:
                self._version += 1
            for asking in self._asking:
                asking._delayed_by.append(self._delay(cut, asking, now))
        if self._queue:
            self._serve(now)
        cut._task = None  # whose context still refers to the cut: a cycle would keep the task and its result
        if not entered:
            return
        hold_ns = now - cut._opened_ns
        if isinstance(cut, CheckpointCut):
            if self.hub.window_closed:
                self.hub.fire("window_closed", cut.window_id, cut.drain_ns, hold_ns, outcome, now)
        elif self.hub.slot_closed:
            self.hub.fire("slot_closed", cut.kind, cut._opened_ns - cut._asked_ns, hold_ns, outcome, now)

    def _thread_ended(self, cut: Cut, threads: _Threads, done: asyncio.Future[Any]) -> None:
        if not done.cancelled():
            done.exception()  # looked at, lest asyncio complains when its caller was poisoned and gone
        threads.running -= 1
        if not threads.running and threads.leaving is not None:
            self._release(cut, threads.leaving)

    def _give_up(self, cut: CheckpointCut) -> None:
        """The drain timeout: leave the queue, and tell who held the checkpoint up."""
        future = self._queue.get(cut)
        if future is None or future.done():
            return
        now = self._clock()
        held: list[Cut] = [*([] if self._window is None else [self._window]), *self._open]
        error = DrainTimeoutError(cut._drain_timeout or 0.0, [self._holder(section, now) for section in held])
        future.set_exception(error)
        self._leave_queue(cut)

    def _poison_with(self, what: str, age_seconds: float) -> BarrierPoisonedError:
        """Never reopen: fail everybody who waits, and everybody who comes."""
        self._poison = (what, age_seconds)
        self._turn(self._clock())
        for future in list(self._queue.values()):
            if not future.done():
                future.set_exception(BarrierPoisonedError(self.name, what, age_seconds))
        return BarrierPoisonedError(self.name, what, age_seconds)

    # ------------------------------------------------------------------------------------------ who held whom

    @staticmethod
    def _task_name(task: asyncio.Task[Any] | None) -> str:
        return "no task" if task is None else task.get_name()

    def _holder(self, cut: Cut, now: int) -> Holder:
        task = cut._task  # once: seen from another thread, the section may be left at any moment
        age = max(0, now - cut._opened_ns) / 1e9
        return Holder(cut.kind, self._task_name(task), age, _suspended_at(task))

    def _delay(self, slot: Cut, window: CheckpointCut, until_ns: int) -> tuple[str, str, int, int]:
        asked = window._asked_ns
        opened = slot._opened_ns
        return slot.kind, self._task_name(slot._task), max(0, opened - asked), until_ns - asked

    def _still_open(self, window: CheckpointCut, now: int) -> list[tuple[str, str, int, int]]:
        return [self._delay(slot, window, now) for slot in list(self._open)]


def held_cut() -> Cut | None:
    """Return the live cut that this context holds, of whatever barrier, or None."""
    held = _HELD.get()
    while held is not None and not held.live:
        held = held._outer
    return held


def require_no_cut(what: str) -> None:
    """Refuse to start something that may wait long while this context holds a live cut.

    Args:
        what: What is about to start, for the message ("a generation call", "a permit").

    Raises:
        LockOrderError: If a live cut is held.
    """
    held = held_cut()
    if held is not None:
        raise LockOrderError(what, repr(held))


def detached(coroutine: Coroutine[Any, Any, T], *, name: str | None = None) -> asyncio.Task[T]:
    """Start a task whose context holds no cut, so that it never trips over the section that launched it."""
    context = copy_context()
    context.run(_HELD.set, None)
    return asyncio.get_running_loop().create_task(coroutine, name=name, context=context)


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", None) or repr(function)


def _suspended_at(task: asyncio.Task[Any] | None) -> str:
    """Say where a task is suspended: the innermost awaited coroutine's function, file and line."""
    if task is None:
        return "an unknown place"
    if task.done():
        return "its end (the task is done)"
    place = "its start"
    awaited: Any = task.get_coro()
    while awaited is not None:
        frame = getattr(awaited, "cr_frame", None) or getattr(awaited, "gi_frame", None)
        if frame is not None:
            code = frame.f_code
            place = f"{code.co_qualname} ({code.co_filename.rpartition('/')[2]}:{frame.f_lineno})"
        awaited = getattr(awaited, "cr_await", None) or getattr(awaited, "gi_yieldfrom", None)
    return place
