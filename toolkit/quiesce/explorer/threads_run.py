"""One schedule of threads: they are real, exactly one of them runs, and somebody else chooses which goes on.

A controlled thread stops at each *point*, before the operation that it is about to do. Whatever it does from there
to its next point is one step. At a point it asks who goes on: if that is another thread, it wakes that one and
waits, so that no two run at once. A thread that cannot do its operation (a lock is held, a queue is empty) is no
choice until it can.

What may run next, in the order in which choices are numbered: the thread that ran last, if it can go on; the
other threads that can, in the order in which they were started; and the next timer, with ``timers="idle"`` only once
no thread can run (code takes no time), with ``timers="any"`` always. So choice 0 is the plain order, without
preemption.

A schedule is over when the scenario has returned and every thread that is no daemon has ended, or as soon as one
raises. Threads that are left are unwound: each gets an exception at the point where it stands.

Rule: deterministic; the same choices lead through the same steps, and time is virtual. Yield rule:
:meth:`ThreadRun.explore` blocks for as long as the schedule takes, :meth:`ThreadRun.point` until the calling thread is
chosen.
"""

from __future__ import annotations

import linecache
import os
import queue
import sys
import threading
from bisect import insort
from collections.abc import Callable, Sequence
from math import ceil
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final, NamedTuple

from quiesce.explorer.loop import PATIENCE_STEPS, Timers
from quiesce.explorer.steps import Step
from quiesce.explorer.threads_footprints import STEPS_OF_ONE_THREAD, Footprint, Key

__all__ = ["Actor", "Place", "StuckError", "ThreadRun", "UnwoundError", "outside", "running"]

START_NS: Final = 1_000 * 10**9
"""Where virtual time starts; not 0, so that no code takes the first moment for "not yet"."""

ROUNDING_NS: Final = 1e-3
"""What the difference of two floats in seconds may be off by, so that equal deadlines stay equal."""

STUBBORN: Final = 1_000
"""So often a thread may catch what unwinds it and go on, before it is left where it is."""

_HERE: Final = str(Path(__file__).parent) + os.sep
_STANDARD: Final = (_HERE, threading.__file__, queue.__file__)


class UnwoundError(BaseException):
    """Unwinds a thread whose schedule is over."""


class StuckError(TimeoutError):
    """A thread does not come back to a point: it blocks on something that the explorer does not control."""


class Place(NamedTuple):
    """Where a step of a thread begins, for the trace.

    Attributes:
        thread: The thread's name.
        what: What it is about to do; "" if that is what the line says.
        code: The code that does it, or None for what is no code's.
        line: Its line.
    """

    thread: str
    what: str
    code: CodeType | None
    line: int

    def __str__(self) -> str:
        """Return it as one line."""
        if self.code is None:
            return f"{self.thread}: {self.what}"
        what = self.what or linecache.getline(self.code.co_filename, self.line).strip()
        return f"{self.thread}: {what} ({self.where})"

    @property
    def where(self) -> str:
        """The place in the source."""
        return "" if self.code is None else f"{Path(self.code.co_filename).name}:{self.line}"


class Actor:
    """A controlled thread.

    Attributes:
        path: Which thread it is, the same in every run: the number of each ancestor among its siblings, then its own.
        name: Its name, which no other thread of the run has.
        ident: What ``get_ident`` returns in it.
        daemon: Whether the schedule does not wait for it.
        work: What it does.
        step: Its next step.
        ready: Whether it can take that step; None if it always can.
        deadline: When it can take it anyway, in virtual nanoseconds; None for never.
        done: Whether it has ended.
        thread: The stand-in for ``threading.Thread``, if there is one.
    """

    __slots__ = (
        "baton",
        "children",
        "daemon",
        "deadline",
        "done",
        "ident",
        "made",
        "name",
        "path",
        "ready",
        "real",
        "refusals",
        "step",
        "steps",
        "thread",
        "work",
    )

    def __init__(self, path: tuple[int, ...], name: str, work: Callable[[], object], *, daemon: bool) -> None:
        self.path = path
        self.name = name
        self.daemon = daemon
        self.work = work
        self.step: Step | None = None
        self.steps = 0
        self.ready: Callable[[], object] | None = None
        self.deadline: int | None = None
        self.done = False
        self.thread: Any = None
        self.baton = threading.Lock()
        self.baton.acquire()
        self.real: threading.Thread | None = None
        self.ident = int("1" + "".join(f"{number:04d}" for number in path))
        self.children = 0
        self.made = 0
        self.refusals = 0

    @property
    def key(self) -> Key:
        """Its name among the things that threads share."""
        return ("thread", *self.path)

    def __lt__(self, other: Actor) -> bool:
        """Return whether it was started first, or by a thread that was."""
        return self.path < other.path


class ThreadRun:
    """Runs one schedule; see the module's docstring.

    Args:
        choose: Returns the index of the step to take.
        timers: When timers fire.
        max_steps: Steps after which the schedule counts as endless.
        patience_seconds: Real seconds that a step may take; None for any number.
        tracer: Given to ``sys.settrace`` in each thread, or None.

    Attributes:
        trace: The steps that were taken.
        footprint: What the last one touched.
        now: The virtual time, in nanoseconds.
        current: The thread that runs.
        actors: All threads, in the order of their paths.
    """

    def __init__(
        self,
        *,
        choose: Callable[[Sequence[Step]], int],
        timers: Timers,
        max_steps: int,
        patience_seconds: float | None,
        tracer: Callable[[FrameType, str, Any], Any] | None = None,
    ) -> None:
        self.trace: list[Step] = []
        self.footprint = Footprint()
        self.now = START_NS
        self.actors: list[Actor] = []
        self.current = Actor((), "nobody", _nothing, daemon=True)
        self._choose = choose
        self._timers_any = timers == "any"
        self._max_steps = max_steps
        self._patience = patience_seconds
        self._tracer = tracer
        self._names: dict[str, int] = {}
        self._keys: dict[int, tuple[Key, object]] = {}  # with the object, so that no other gets its id
        self._in_a_row = 0
        self._choosing = False
        self._over = False
        self._error: BaseException | None = None
        self._controller = threading.Lock()
        self._controller.acquire()

    # ------------------------------------------------------------------------------------------- running a schedule

    def explore(self, scenario: Callable[[], object]) -> None:
        """Run a scenario to its end along the chosen steps, then unwind the threads that are left.

        Raises:
            BaseException: What the scenario, or a thread, raises; DeadlockError if no thread can go on; StuckError if
                one blocks on something that is not controlled.
        """
        global _RUN  # noqa: PLW0603 - one schedule runs at a time, whoever asks
        if _RUN is not None:
            raise RuntimeError("threads are explored already: explorations do not nest")
        _RUN = self
        try:
            self.spawn("scenario", scenario, daemon=False)
            self._hand_over(None)
            self._wait_for_the_end()
        finally:
            self._over = True
            try:
                self._unwind()
            finally:
                _RUN = None
        if self._error is not None:
            raise self._error

    def _wait_for_the_end(self) -> None:
        seen = -1
        while not self._controller.acquire(timeout=-1 if self._patience is None else self._patience):
            if len(self.trace) == seen or self._over:
                self._over = True
                frames = sys._current_frames()  # noqa: SLF001 - the only way to look there
                code, line = outside(frames.get(_ident(self.current) or 0), _STANDARD)
                place = Place(self.current.name, "", code, line).where or "nowhere"
                self._error = StuckError(
                    f"thread {self.current.name!r} has not come back to a point for {self._patience} s: it blocks at"
                    f" {place} on something that the explorer does not control, such as a real lock, a file or a"
                    " socket, or it computes for that long; name the module that makes the lock among `modules`"
                )
                return
            seen = len(self.trace)

    def _unwind(self) -> None:
        stuck = self.current if isinstance(self._error, StuckError) else None
        for actor in self.actors:
            if actor.real is None or actor is stuck:
                continue
            if not actor.done:
                actor.baton.release()
            actor.real.join(self._patience)
            if actor.real.is_alive() and self._error is None:
                self._error = StuckError(
                    f"thread {actor.name!r} cannot be ended: it blocks, or catches BaseException and goes on"
                )

    def spawn(self, name: str, work: Callable[[], object], *, daemon: bool) -> Actor:
        """Start a thread; it takes its first step when it is chosen."""
        parent = self.current
        path = (*parent.path, parent.children)
        parent.children += 1
        self._names[name] = count = self._names.get(name, 0) + 1
        actor = Actor(path, name if count == 1 else f"{name} #{count}", work, daemon=daemon)
        actor.step = self._step(actor, "begin", None, 0)
        insort(self.actors, actor)
        self.change(actor.key)
        return actor

    def _run(self, actor: Actor) -> None:
        """Do a thread's work; the body of its real thread."""
        error: BaseException | None = None
        self.read(actor.key)
        if self._tracer is not None:
            sys.settrace(self._tracer)
        try:
            actor.work()
        except UnwoundError:
            pass
        except BaseException as raised:  # noqa: BLE001 - whatever breaks a thread breaks the scenario
            error = raised
        if self._tracer is not None:
            sys.settrace(None)
        if self._over:
            return
        actor.done = True
        self.change(actor.key)
        if error is not None and not (isinstance(error, SystemExit) and actor.path != (0,)):
            self._finish(error)
        elif all(other.done or other.daemon for other in self.actors):
            self._finish(None)
        else:
            self._hand_over(None)

    def _finish(self, error: BaseException | None) -> None:
        self._over = True
        self._error = error
        self._controller.release()

    # ----------------------------------------------------------------------------------------------- taking a step

    def point(
        self,
        what: str,
        ready: Callable[[], object] | None = None,
        deadline: int | None = None,
        *,
        placed: bool = True,
    ) -> None:
        """Let others come first; return when the calling thread is chosen to go on.

        Args:
            what: What it is about to do, for the trace.
            ready: Whether it can; None if it always can.
            deadline: When it goes on anyway, from :meth:`deadline`; None for never.
            placed: Whether the trace says where.

        Raises:
            UnwoundError: If the schedule is over.
            RuntimeError: If the calling thread is not controlled.
        """
        actor = self.current
        if self._over or self._choosing or threading.get_ident() != _ident(actor):
            self._out_of_turn(actor)
            return
        code, line = outside(sys._getframe(1)) if placed else (None, 0)  # noqa: SLF001 - what tracebacks are made of
        actor.step = self._step(actor, what, code, line)
        actor.ready = ready
        actor.deadline = deadline
        if not self._hand_over(actor):
            actor.baton.acquire()
            if self._over:
                raise UnwoundError

    def _out_of_turn(self, actor: Actor) -> None:
        mine = threading.get_ident()
        known = next((other for other in self.actors if _ident(other) == mine), None)
        if self._over:
            if known is None:
                return  # an object that outlives its schedule is looked at
            known.refusals += 1
            if known.refusals > STUBBORN:
                known.baton.acquire()
            raise UnwoundError
        if known is None:
            raise RuntimeError(
                f"thread {threading.current_thread().name!r} uses what explored threads share, but is not controlled:"
                " name the module that starts it among `modules`"
            )
        # Garbage that is collected while a step is chosen: what its finalizer does belongs to the step that ends.

    def _step(self, actor: Actor, what: str, code: CodeType | None, line: int) -> Step:
        actor.steps += 1
        seq = actor.ident * STEPS_OF_ONE_THREAD + actor.steps
        return Step("point", seq, Place(actor.name, what, code, line), actor.name)

    def _hand_over(self, actor: Actor | None) -> bool:
        """Choose who goes on, and wake it; return whether that is ``actor``, which asks."""
        self._choosing = True
        try:
            following = self._next(actor)
        except BaseException as error:  # noqa: BLE001 - it ends the schedule, whoever happened to ask
            self._finish(error)
            return False
        finally:
            self._choosing = False
        self._in_a_row = self._in_a_row + 1 if following is self.current else 0
        self.current = following
        if following is actor:
            return True
        if following.real is None:
            # A new real thread for each run: nothing in a threading.local, nor in a context, is left from another.
            following.real = threading.Thread(
                target=self._run, args=(following,), name=following.name, daemon=True
            )
            following.real.start()
        else:
            following.baton.release()
        return False

    def _next(self, actor: Actor | None) -> Actor:
        while True:
            chosen = self._candidates(actor)
            steps = [self._pending(other) for other in chosen]
            timer = None
            if self._timers_any or not steps:
                timer = self._first_timer(chosen)
                if timer is not None:
                    steps.append(self._timer_step(timer))
            if not steps:
                raise self._deadlock()
            if len(self.trace) >= self._max_steps:
                raise TimeoutError(f"the scenario has not ended after {self._max_steps} steps")
            index = self._choose(steps)
            self.trace.append(steps[index])
            self.footprint = Footprint()
            if index < len(chosen):
                return chosen[index]
            self.footprint.anything = True
            self.now = max(self.now, timer or 0)

    def _candidates(self, actor: Actor | None) -> list[Actor]:
        """Return the threads that can go on, the one that asks first."""
        chosen = [
            other
            for other in self.actors
            if not other.done
            and (
                other.ready is None
                or (other.deadline is not None and other.deadline <= self.now)
                or other.ready()
            )
        ]
        if actor is not None and len(chosen) > 1 and actor in chosen:
            chosen.remove(actor)
            if self._in_a_row < PATIENCE_STEPS:  # a thread that polls would never let others come
                chosen.insert(0, actor)
        return chosen

    def _pending(self, actor: Actor) -> Step:
        assert actor.step is not None  # noqa: S101 - it has one from the start
        return actor.step

    def _first_timer(self, chosen: Sequence[Actor]) -> int | None:
        return min(
            (
                actor.deadline
                for actor in self.actors
                if not actor.done and actor.deadline is not None and actor not in chosen
            ),
            default=None,
        )

    def _timer_step(self, deadline: int) -> Step:
        passed = (deadline - START_NS) / 1e9
        return Step(
            "point", -1, Place("time", f"it is {passed:g} s later than at the start", None, 0), "time"
        )

    def blocked(self) -> list[tuple[Step, Footprint]]:
        """Return the steps that threads cannot take now, and what each of them would touch at least."""
        found = []
        able = self._candidates(None)
        for actor in self.actors:
            if not actor.done and actor not in able:
                touched = Footprint()
                waits_for = getattr(getattr(actor.ready, "__self__", None), "waits_for", None)
                touched.changed.update(waits_for() if waits_for is not None else ())
                found.append((self._pending(actor), touched))
        return found

    def _deadlock(self) -> BaseException:
        from quiesce.testing import DeadlockError

        waiting = {}
        for actor in self.actors:
            if not actor.done:
                place = self._pending(actor).what
                held = getattr(getattr(actor.ready, "__self__", None), "why", None)
                waiting[actor.name] = (
                    f"waits to {place.what}{held() if held else ''}{place.where and f' at {place.where}'}"
                )
        return DeadlockError(waiting)

    # ------------------------------------------------------------------------------------------ what primitives need

    def deadline(self, timeout: float | None) -> int | None:
        """Return when a timeout is over; None if it never is."""
        if timeout is None:
            return None
        if timeout <= 0:
            return self.now
        return self.now + max(1, ceil(timeout * 1e9 - ROUNDING_NS))

    def read(self, key: Key) -> None:
        """Note that the step looks at something."""
        self.footprint.read.add(key)

    def change(self, key: Key) -> None:
        """Note that the step changes something."""
        self.footprint.changed.add(key)

    def new_key(self) -> Key:
        """Return a name for a new object: the same in every run in which the thread has done the same before."""
        actor = self.current
        actor.made += 1
        return (*actor.path, "made", actor.made)

    def name(self, thing: object) -> Key:
        """Name an object that is being made, and is not a primitive."""
        key = self.new_key()
        self._keys[id(thing)] = (key, thing)
        return key

    def key_of(self, thing: object) -> Key:
        """Return the name of an object that is not a primitive.

        One that nobody has named has no name of its own, since whoever happens to come first would choose it: it shares
        one with all such objects of its class.
        """
        known = self._keys.get(id(thing))
        return ("found", type(thing)) if known is None else known[0]

    def knows(self, thing: object) -> bool:
        """Return whether an object has a name."""
        return id(thing) in self._keys


def _ident(actor: Actor) -> int | None:
    return actor.real.ident if actor.real is not None else None


def _nothing() -> None:
    """Do nothing."""


def outside(frame: FrameType | None, inside: str | tuple[str, ...] = _HERE) -> tuple[CodeType | None, int]:
    """Return the code, and its line, that called into this package, or into what else is named."""
    while frame is not None and frame.f_code.co_filename.startswith(inside):
        frame = frame.f_back
    return (None, 0) if frame is None else (frame.f_code, frame.f_lineno)


_RUN: ThreadRun | None = None


def running() -> ThreadRun | None:
    """Return the schedule that runs now, or None."""
    return _RUN
