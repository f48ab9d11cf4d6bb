"""What stands in for ``threading`` and ``time`` while threads are explored: the same primitives, under control.

Each operation is a point, where others may come first; one that lets others go on (a release, a start) is followed by
another one, so that they may also come before the code behind it. What only looks at a clock, at the calling
thread or at a thread-local is none. Timeouts are kept in virtual time.

Rule: a primitive belongs to the schedule in which it was made; its state is changed only by the thread that runs. What it
does not offer is not controlled, and says so. Yield rule: as the originals, an operation blocks its thread.
"""

# Primitives are one protocol among themselves, so they see each other's private state.
# ruff: noqa: SLF001

from __future__ import annotations

import linecache
import re
import sys
import threading
import time
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from quiesce.explorer.threads_footprints import Key
from quiesce.explorer.threads_run import Actor, ThreadRun, outside, running

__all__ = [
    "THREADING",
    "TIME",
    "Barrier",
    "BoundedSemaphore",
    "Condition",
    "Event",
    "Lock",
    "Primitive",
    "RLock",
    "Semaphore",
    "StandIn",
    "Thread",
    "Timer",
    "current_run",
]

_ASSIGNED: Final = re.compile(r"(?:[\w\[\]]+\.)*(\w+)\s*(?::[^=]+)?=[^=]")
_NAMES: Final[dict[tuple[str, int], str]] = {}


def current_run() -> ThreadRun:
    """Return the schedule that runs.

    Raises:
        RuntimeError: If none does.
    """
    run = running()
    if run is None:
        raise RuntimeError("a controlled primitive is made only while threads are explored")
    return run


def _name_of(kind: str) -> str:
    """Name a new object after what it is assigned to, where the source tells."""
    code, line = outside(sys._getframe(1))
    if code is None:
        return kind
    place = (code.co_filename, line)
    if place not in _NAMES:
        assigned = _ASSIGNED.match(linecache.getline(*place).strip())
        _NAMES[place] = assigned.group(1) if assigned else kind
    return _NAMES[place]


class Primitive:
    """What all have: the schedule that they belong to, a name for traces and one for footprints."""

    def __init__(self) -> None:
        self._run = current_run()
        self._key = self._run.new_key()
        self._label = _name_of(type(self).__name__)

    def __repr__(self) -> str:
        """Name it."""
        return f"<explored {type(self).__name__} {self._label}>"

    def _timeout(self, timeout: float | None) -> int | None:
        if timeout is None or timeout == -1:
            return None
        return self._run.deadline(timeout)

    def waits_for(self) -> tuple[Key, ...]:
        """Return what a step that waits for it touches."""
        return (self._key,)

    def why(self) -> str:
        """Return what one waits for, as the end of a sentence."""
        return ""


class Lock(Primitive):
    """As ``threading.Lock``."""

    def __init__(self) -> None:
        super().__init__()
        self._owner: Actor | None = None

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:  # noqa: FBT001, FBT002 - as the original
        """Take it.

        Raises:
            ValueError: If the timeout makes no sense.
        """
        if not blocking and timeout != -1:
            raise ValueError("can't specify a timeout for a non-blocking call")
        if blocking and timeout < 0 and timeout != -1:
            raise ValueError("timeout value must be a non-negative number")
        if blocking:
            self._run.point(f"acquire {self._label}", self._free, self._timeout(timeout))
        else:
            self._run.point(f"try to acquire {self._label}")
        self._run.change(self._key)
        if self._owner is not None:
            return False
        self._owner = self._run.current
        return True

    def release(self) -> None:
        """Give it back, from any thread.

        Raises:
            RuntimeError: If nobody has it.
        """
        self._run.point(f"release {self._label}")
        if self._owner is None:
            raise RuntimeError("release unlocked lock")
        self._let_go()
        self._run.point(f"go on, {self._label} released")

    def locked(self) -> bool:
        """Return whether somebody has it."""
        self._run.point(f"look at {self._label}")
        self._run.read(self._key)
        return self._owner is not None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def why(self) -> str:
        """Return who has it."""
        return "" if self._owner is None else f", which {self._owner.name} holds,"

    def _free(self) -> bool:
        return self._owner is None

    def _let_go(self) -> None:
        self._run.change(self._key)
        self._owner = None

    # What a condition needs.

    def _is_owned(self) -> bool:
        return self._owner is not None

    def _save(self) -> int:
        self._let_go()
        return 1

    def _restore(self, depth: int) -> None:
        self._run.change(self._key)
        self._owner = self._run.current


class RLock(Lock):
    """As ``threading.RLock``."""

    def __init__(self) -> None:
        super().__init__()
        self._depth = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:  # noqa: FBT001, FBT002 - as the original
        """Take it, or take it once more; once more is no point, since nobody can tell."""
        if self._owner is self._run.current:
            self._depth += 1
            return True
        taken = super().acquire(blocking, timeout)
        if taken:
            self._depth = 1
        return taken

    def release(self) -> None:
        """Give it back; others get it once it is given back as often as it was taken.

        Raises:
            RuntimeError: If the calling thread does not have it.
        """
        if self._owner is not self._run.current:
            self._run.point(f"release {self._label}")
            raise RuntimeError("cannot release un-acquired lock")
        if self._depth > 1:
            self._depth -= 1
            return
        super().release()

    def _let_go(self) -> None:
        self._depth = 0
        super()._let_go()

    def _is_owned(self) -> bool:
        return self._owner is self._run.current

    def _save(self) -> int:
        depth = self._depth
        self._let_go()
        return depth

    def _restore(self, depth: int) -> None:
        super()._restore(depth)
        self._depth = depth


class _Waiter:
    """A thread in a condition."""

    __slots__ = ("_condition", "notified")

    def __init__(self, condition: Condition) -> None:
        self._condition = condition
        self.notified = False

    def ready(self) -> bool:
        return self.notified and self._condition._lock._free()

    def waits_for(self) -> tuple[Key, ...]:
        return (self._condition._key, self._condition._lock._key)

    def why(self) -> str:
        return self._condition._lock.why() if self.notified else ", which nobody notifies,"


class Condition(Primitive):
    """As ``threading.Condition``."""

    def __init__(self, lock: Lock | None = None) -> None:
        super().__init__()
        self._lock = RLock() if lock is None else lock
        if lock is None:
            self._lock._label = self._label
        self._waiters: list[_Waiter] = []
        self.acquire = self._lock.acquire
        self.release = self._lock.release

    def __enter__(self) -> bool:
        return self._lock.__enter__()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until notified, or until the timeout is over; return whether it was notified.

        Raises:
            RuntimeError: If the calling thread does not have the lock.
        """
        if not self._lock._is_owned():
            raise RuntimeError("cannot wait on un-acquired lock")
        return self._wait(None if timeout is None else self._run.deadline(timeout))

    def _wait(self, deadline: int | None) -> bool:
        run = self._run
        run.point(f"wait on {self._label}")
        waiter = _Waiter(self)
        self._waiters.append(waiter)
        depth = self._lock._save()
        run.change(self._key)
        run.point(f"be woken from {self._label}", waiter.ready, deadline)
        run.change(self._key)
        woken = waiter.notified
        if not woken:
            # As in the original, a notification that comes right now is wasted on this one.
            run.point(f"give up waiting on {self._label}")
            run.change(self._key)
            if not waiter.notified:
                self._waiters.remove(waiter)
        if not self._lock._free():
            run.point(f"acquire {self._lock._label} again", self._lock._free)
        self._lock._restore(depth)
        return woken

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:  # noqa: ANN401 - the predicate's
        """Wait until a predicate holds, or until the timeout is over; return what it returned last."""
        run = self._run
        deadline = None if timeout is None else run.deadline(timeout)
        found = predicate()
        while not found:
            run.read(("clock",))
            if deadline is not None and deadline <= run.now:
                break
            if not self._lock._is_owned():
                raise RuntimeError("cannot wait on un-acquired lock")
            self._wait(deadline)
            found = predicate()
        return found

    def notify(self, n: int = 1) -> None:
        """Wake so many of those that wait, the first come first.

        Raises:
            RuntimeError: If the calling thread does not have the lock.
        """
        if not self._lock._is_owned():
            raise RuntimeError("cannot notify on un-acquired lock")
        self._run.point(f"notify {n} of {self._label}")
        self._run.change(self._key)
        woken, self._waiters = self._waiters[:n], self._waiters[n:]
        for waiter in woken:
            waiter.notified = True

    def notify_all(self) -> None:
        """Wake all that wait."""
        self.notify(len(self._waiters) or 1)

    notifyAll = notify_all  # noqa: N815 - as the original


class Event(Primitive):
    """As ``threading.Event``."""

    def __init__(self) -> None:
        super().__init__()
        self._flag = False

    def is_set(self) -> bool:
        """Return whether it is set."""
        self._run.point(f"look at {self._label}")
        self._run.read(self._key)
        return self._flag

    def set(self) -> None:
        """Set it; whoever waits goes on."""
        self._turn(to=True)
        self._run.point(f"go on, {self._label} set")

    def clear(self) -> None:
        """Unset it."""
        self._turn(to=False)

    def _turn(self, *, to: bool) -> None:
        self._run.point(f"{'set' if to else 'clear'} {self._label}")
        self._run.change(self._key)
        self._flag = to

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set, or until the timeout is over; return whether it is set."""
        deadline = None if timeout is None else self._run.deadline(timeout)
        self._run.point(f"wait for {self._label}", self._ready, deadline)
        self._run.read(self._key)
        return self._flag

    def _ready(self) -> bool:
        return self._flag

    def why(self) -> str:
        """Return what is missing."""
        return ", which nobody sets,"


class Semaphore(Primitive):
    """As ``threading.Semaphore``."""

    def __init__(self, value: int = 1) -> None:
        if value < 0:
            raise ValueError("semaphore initial value must be >= 0")
        super().__init__()
        self._value = value

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:  # noqa: FBT001, FBT002 - as the original
        """Take one.

        Raises:
            ValueError: If the timeout makes no sense.
        """
        if not blocking and timeout is not None:
            raise ValueError("can't specify timeout for non-blocking acquire")
        if blocking:
            deadline = None if timeout is None else self._run.deadline(timeout)
            self._run.point(f"acquire {self._label}", self._ready, deadline)
        else:
            self._run.point(f"try to acquire {self._label}")
        self._run.change(self._key)
        if self._value == 0:
            return False
        self._value -= 1
        return True

    def release(self, n: int = 1) -> None:
        """Give some back.

        Raises:
            ValueError: If it is none.
        """
        if n < 1:
            raise ValueError("n must be one or more")
        self._run.point(f"release {self._label}")
        self._give(n)
        self._run.point(f"go on, {self._label} released")

    def _give(self, n: int) -> None:
        self._run.change(self._key)
        self._value += n

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()

    def _ready(self) -> bool:
        return self._value > 0

    def why(self) -> str:
        """Return what is missing."""
        return ", of which none is left,"


class BoundedSemaphore(Semaphore):
    """As ``threading.BoundedSemaphore``."""

    def __init__(self, value: int = 1) -> None:
        super().__init__(value)
        self._initial = value

    def _give(self, n: int) -> None:
        if self._value + n > self._initial:
            raise ValueError("Semaphore released too many times")
        super()._give(n)


class Barrier(threading.Barrier):
    """As ``threading.Barrier``: the original, on a controlled condition."""

    def __init__(
        self, parties: int, action: Callable[[], None] | None = None, timeout: float | None = None
    ) -> None:
        super().__init__(parties, action, timeout)
        self._cond = Condition(Lock())


class Thread(Primitive):
    """As ``threading.Thread``, for threads that the explorer runs."""

    def __init__(
        self,
        group: None = None,
        target: Callable[..., object] | None = None,
        name: str | None = None,
        args: Iterable[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        super().__init__()
        maker = self._run.current
        self._target = target
        self._args = tuple(args)
        self._kwargs = dict(kwargs or {})
        self.name = f"{maker.name}'s thread {maker.made}" if name is None else name
        self.daemon = maker.daemon if daemon is None else daemon
        self._actor: Actor | None = None

    @property
    def ident(self) -> int | None:
        """What ``get_ident`` returns in it; None before it is started."""
        return None if self._actor is None else self._actor.ident

    native_id = ident

    def start(self) -> None:
        """Start it.

        Raises:
            RuntimeError: If it was started before.
        """
        if self._actor is not None:
            raise RuntimeError("threads can only be started once")
        self._run.point(f"start {self.name}")
        self._actor = self._run.spawn(self.name, self.run, daemon=self.daemon)
        self._actor.thread = self
        self._run.point(f"go on, {self.name} started")

    def run(self) -> None:
        """Do its work."""
        if self._target is not None:
            self._target(*self._args, **self._kwargs)

    def join(self, timeout: float | None = None) -> None:
        """Wait until it has ended, or until the timeout is over.

        Raises:
            RuntimeError: If it was not started, or is the calling thread.
        """
        if self._actor is None:
            raise RuntimeError("cannot join thread before it is started")
        if self._actor is self._run.current:
            raise RuntimeError("cannot join current thread")
        deadline = None if timeout is None else self._run.deadline(timeout)
        self._run.point(f"join {self.name}", self._ended, deadline)
        self._run.read(self._actor.key)

    def is_alive(self) -> bool:
        """Return whether it was started and has not ended."""
        self._run.point(f"look at {self.name}")
        if self._actor is None:
            return False
        self._run.read(self._actor.key)
        return not self._actor.done

    def waits_for(self) -> tuple[Key, ...]:
        """Return what a step that waits for its end touches."""
        return () if self._actor is None else (self._actor.key,)

    def _ended(self) -> bool:
        return self._actor is not None and self._actor.done

    def why(self) -> str:
        """Return what is missing."""
        return ", which does not end,"

    @classmethod
    def of(cls, actor: Actor) -> Thread:
        """Return the thread of an actor, also of one that was not started by code."""
        if actor.thread is None:
            thread = cls.__new__(cls)
            thread._run = current_run()
            thread._key = actor.key
            thread._label = thread.name = actor.name
            thread._target, thread._args, thread._kwargs = None, (), {}
            thread.daemon = actor.daemon
            thread._actor = actor
            actor.thread = thread
        found: Thread = actor.thread
        return found


class Timer(Thread):
    """As ``threading.Timer``."""

    def __init__(
        self,
        interval: float,
        function: Callable[..., object],
        args: Iterable[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self.interval = interval
        self.function = function
        self.args = tuple(args or ())
        self.kwargs = dict(kwargs or {})
        self.finished = Event()

    def cancel(self) -> None:
        """Stop it, if it has not begun."""
        self.finished.set()

    def run(self) -> None:
        """Wait, then call the function."""
        self.finished.wait(self.interval)
        if not self.finished.is_set():
            self.function(*self.args, **self.kwargs)
        self.finished.set()


# ------------------------------------------------------------------------------------------------ the modules


class StandIn(types.ModuleType):
    """A module of which some names are replaced; the others are the original's, or refused."""

    def __init__(
        self, original: types.ModuleType, names: Mapping[str, object], refused: Iterable[str]
    ) -> None:
        super().__init__(original.__name__, original.__doc__)
        self.__dict__.update(names)
        self._original = original
        self._refused = frozenset(refused)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - whatever is there
        if name in self._refused:
            raise NotImplementedError(f"{self.__name__}.{name} is not controlled by the explorer of threads")
        return getattr(self._original, name)


def _now() -> int:
    run = current_run()
    run.read(("clock",))
    return run.now


def _seconds() -> float:
    return _now() / 1e9


def _sleep(seconds: float) -> None:
    if seconds < 0:
        raise ValueError("sleep length must be non-negative")
    run = current_run()
    run.point(f"sleep for {seconds:g} s", _never, run.deadline(seconds))
    run.read(("clock",))


def _never() -> bool:
    return False


def _get_ident() -> int:
    return current_run().current.ident


def _current_thread() -> Thread:
    return Thread.of(current_run().current)


def _main_thread() -> Thread:
    return Thread.of(current_run().actors[0])


def _enumerate() -> list[Thread]:
    run = current_run()
    run.point("look at all threads")
    run.footprint.anything = True
    return [Thread.of(actor) for actor in run.actors if not actor.done]


def _active_count() -> int:
    return len(_enumerate())


THREADING: Final = StandIn(
    threading,
    {
        "Lock": Lock,
        "RLock": RLock,
        "Condition": Condition,
        "Event": Event,
        "Semaphore": Semaphore,
        "BoundedSemaphore": BoundedSemaphore,
        "Barrier": Barrier,
        "Thread": Thread,
        "Timer": Timer,
        "get_ident": _get_ident,
        "get_native_id": _get_ident,
        "current_thread": _current_thread,
        "main_thread": _main_thread,
        "enumerate": _enumerate,
        "active_count": _active_count,
    },
    {"_start_new_thread", "_allocate_lock", "setprofile", "settrace"},
)
"""In place of ``threading``; ``threading.local`` is the original, since each schedule has new threads."""

TIME: Final = StandIn(
    time,
    {
        "monotonic": _seconds,
        "monotonic_ns": _now,
        "perf_counter": _seconds,
        "perf_counter_ns": _now,
        "time": _seconds,
        "time_ns": _now,
        "sleep": _sleep,
    },
    {},
)
"""In place of ``time``."""
