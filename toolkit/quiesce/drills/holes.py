"""Opening holes in live objects, and closing them again.

A hole is a method that does something else, once: a lock that is not taken, a check that is not made, an event that comes
late. What a drill breaks that way in the run's state stays broken; the hole itself must not outlive the drill.

Rule: whatever is opened here is closed by :meth:`Holes.close`, in the reverse order, also when the drill fails half-way.
Yield rule: the coroutines suspend; patches do not.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar

from quiesce.errors import DrillNotPossibleError
from quiesce.threads import DaemonExecutor

if TYPE_CHECKING:
    from quiesce.drills.target import DrillTarget
    from quiesce.types import BufferEntry, GroupRecord, PromptRef

__all__ = [
    "HOLD_SECONDS",
    "PATIENCE_SECONDS",
    "POLL_SECONDS",
    "SETTLE_SECONDS",
    "ForgedCut",
    "Holes",
    "NoSlot",
    "elsewhere",
    "forged",
]

P = ParamSpec("P")
T = TypeVar("T")

POLL_SECONDS: Final = 0.02
"""How often a drill looks whether something has come about that nobody tells it."""

SETTLE_SECONDS: Final = 0.3
"""How long a fault that may miss its moment is given before it is tried once more."""

HOLD_SECONDS: Final = 120.0
"""How long a train step is kept waiting at most; on a machine that is busy it takes the sweep a while to come by."""

PATIENCE_SECONDS: Final = 5.0
"""How long a thread of a drill is waited for."""


class ForgedCut:
    """What code that never asked for a slot would pass as its cut."""

    def check(self, *_: object, **__: object) -> None:
        """Let everything pass."""


def forged() -> Any:  # noqa: ANN401 - passes as any cut
    """Return a cut that proves nothing."""
    return ForgedCut()


class NoSlot:
    """Stands for a slot, and is none: whoever enters it changes state while nothing keeps a window out.

    Args:
        alone: Awaited before the body.
        left: Called after it.
    """

    def __init__(self, alone: Callable[[], Awaitable[None]], left: Callable[[], None]) -> None:
        self._alone = alone
        self._left = left

    async def __aenter__(self) -> Any:  # noqa: ANN401 - passes as any cut
        """Hand out a forged cut."""
        await self._alone()
        return forged()

    async def __aexit__(self, *exc: object) -> None:
        """Tell that the body is over."""
        self._left()


class Holes:
    """What one drill has opened.

    Args:
        drill: The drill's name, for messages.
        target: The run.
    """

    def __init__(self, drill: str, target: DrillTarget) -> None:
        self.drill = drill
        self._target = target
        self._before = {record.key for record in target.auditor.records.all()}
        self._closing = contextlib.ExitStack()
        self._mends: list[Callable[[], Awaitable[None]]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.broken_at: float | None = None
        """When something was broken, on the loop's clock; None until then."""
        self._executor = DaemonExecutor("quiesce-drill", 1)

    # ------------------------------------------------------------------------------------------------- opening

    def replace(self, owner: object, name: str, value: object) -> Callable[[], None]:
        """Give an object another attribute; return what puts the old one back, should that not have happened."""
        shadows = name in getattr(owner, "__dict__", {name: None})
        original = getattr(owner, name)
        object.__setattr__(owner, name, value)  # also where the object is frozen
        done = False

        def back() -> None:
            nonlocal done
            if done:
                return
            done = True
            if shadows:
                object.__setattr__(owner, name, original)
            else:
                object.__delattr__(owner, name)

        self._closing.callback(back)
        return back

    def once(
        self,
        owner: object,
        name: str,
        replacement: Callable[..., Any],
        *,
        when: Callable[..., bool] = lambda *_args, **_kwargs: True,
    ) -> threading.Event:
        """Replace a method for its next call, which gets the original first.

        Args:
            owner: Whose method.
            name: The method.
            replacement: What is called instead.
            when: Whether a call, by its arguments, is the one; others go to the original.

        Returns:
            What is set once it was called.
        """
        original = getattr(owner, name)
        taken = threading.Event()
        lock = threading.Lock()

        def called(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - passed on
            with lock:
                mine = not taken.is_set() and when(*args, **kwargs)
                if mine:
                    taken.set()
                    back()
            return replacement(original, *args, **kwargs) if mine else original(*args, **kwargs)

        back = self.replace(owner, name, called)
        return taken

    def item(self, mapping: MutableMapping[str, Any], key: str, value: object) -> None:
        """Give a mapping another value."""
        self.on_close(lambda original=mapping[key]: mapping.__setitem__(key, original))  # type: ignore[misc] # a default
        mapping[key] = value

    def in_the_next_window(self, call: Callable[[], object]) -> threading.Event:
        """Call something in the exclusive window of the next checkpoint, before its first part is captured.

        Args:
            call: Returns False if it has found nothing to do; then it is called again in the window after.

        Returns:
            What is set once it has done it.
        """
        sources = self._target.sources
        original = sources.sampler_state
        done = threading.Event()

        def state() -> Any:  # noqa: ANN401 - a SamplerState
            if not done.is_set() and call() is not False:
                done.set()
                back()
            return original()

        back = self.replace(sources, "sampler_state", state)
        return done

    def keep_from_training(self, mine: Callable[[str], bool]) -> threading.Event:
        """Have a train step wait that takes a group, until the drill is over: it would be gone before it was seen.

        Args:
            mine: Whether a group, by its id, is the one.

        Returns:
            What ends the wait before that.
        """
        plane, over = self._target.dataplane, threading.Event()
        get = plane.get

        def held(keys: Any, *given: Any) -> Any:  # noqa: ANN401 - passed on
            if any(mine(key.group_id) for key in keys):
                over.wait(HOLD_SECONDS)  # in the train pump's own thread
            return get(keys, *given)

        self.replace(plane, "get", held)
        self.on_close(over.set)
        return over

    def spawn(self, work: Callable[[], Awaitable[None]], name: str) -> None:
        """Run something beside the drill; it is cancelled when the drill is over."""
        from quiesce.barrier import detached

        async def run() -> None:
            await work()

        task = detached(run(), name=name)
        self._tasks.add(task)
        task.add_done_callback(_looked_at)
        self.on_close(task.cancel)

    def on_close(self, call: Callable[[], object]) -> None:
        """Have something called when the drill is over."""
        self._closing.callback(call)

    def mend(self, call: Callable[[], Awaitable[None]]) -> None:
        """Have something awaited when the drill is over, before its holes are closed."""
        self._mends.append(call)

    async def close(self) -> None:
        """Mend what is to be mended, and close everything."""
        try:
            while self._mends:
                await self._mends.pop()()
        finally:
            self._closing.close()
            self._executor.shutdown(wait=False)
            if self._tasks:
                await asyncio.wait(self._tasks)

    # ------------------------------------------------------------------------------------------------- waiting

    def broken(self) -> None:
        """Note that something is broken now, should the fault wait for its being seen itself."""
        self.broken_at = asyncio.get_running_loop().time()

    def fired(self, invariant: str) -> bool:
        """Whether a record of an invariant has begun since the drill did."""
        records = self._target.auditor.records.all()
        return any(record.invariant == invariant and record.key not in self._before for record in records)

    async def settle(self) -> None:
        """Wait for as long as what was just broken may take to show."""
        await asyncio.sleep(SETTLE_SECONDS)

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until something holds that nobody tells."""
        while not holds():  # noqa: ASYNC110 - nobody tells: that is what it is for
            await asyncio.sleep(POLL_SECONDS)

    async def in_thread(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a blocking call in a thread of the drill."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, lambda: call(*args, **kwargs))

    async def no_slot_open(self) -> None:
        """Wait until no slot is open; until the next await none will be."""
        barrier = self._target.owners.barrier
        await self.until(lambda: barrier.statistics().phase == "open" and not any(_active(barrier)))

    async def ready_group(self, invariant: str) -> BufferEntry:
        """Wait for a finished group that was never at fault, and that the next step will not take.

        Args:
            invariant: What it is to be at fault by.
        """
        return await self._picked(lambda: self.find_ready(invariant))

    def find_ready(self, invariant: str) -> BufferEntry | None:
        """Return such a group, if there is one now."""
        owners, known = self._target.owners, self._target.auditor.records.knows
        version = owners.versions.value
        fine = [
            entry
            for entry in owners.buffer.ready()
            if (entry.target_step is None or entry.target_step > version)
            and not known(invariant, entry.group_id)
        ]
        return max(reversed(fine), key=lambda entry: entry.target_step or 0, default=None)

    async def ended_group(self, invariant: str) -> PromptRef:
        """Wait for a group that was trained, that nobody owns, and that was never at fault."""
        return await self._picked(lambda: self._find_ended(invariant))

    def _find_ended(self, invariant: str) -> PromptRef | None:
        from quiesce.accounting import has_bit
        from quiesce.types import PromptRef

        known = self._target.auditor.records.knows
        for account in reversed(self._target.owners.accounting.capture().open):
            for position in range(account.read):
                ref = PromptRef(account.epoch, position, 0)
                if has_bit(account.trained, position) and not known(invariant, ref.group_id):
                    return ref
        return None

    async def flying_group(self, invariant: str) -> GroupRecord:
        """Wait for a group that is being generated, and was never at fault."""
        ledger, running = self._target.owners.ledger, self._target.rollouts
        known = self._target.auditor.records.knows

        def find() -> GroupRecord | None:
            names = frozenset(running.running)
            fine = (
                record
                for record in reversed(ledger.records())
                if record.phase == "admitted"
                and record.group_id in names
                and not known(invariant, record.group_id)
            )
            return next(fine, None)

        return await self._picked(find)

    async def _picked(self, find: Callable[[], T | None]) -> T:
        while True:
            found = find()
            if found is not None:
                return found
            await asyncio.sleep(POLL_SECONDS)

    def impossible(self, why: str) -> DrillNotPossibleError:
        """Return the error that says why this run has nothing to break."""
        return DrillNotPossibleError(self.drill, why)


def elsewhere(call: Callable[[], object]) -> threading.Thread:
    """Start a thread that holds no cut, wherever it is started."""
    thread = threading.Thread(
        target=contextvars.Context().run, args=(call,), name="quiesce-drill", daemon=True
    )
    thread.start()
    return thread


def _active(barrier: Any) -> Collection[int]:  # noqa: ANN401 - a barrier
    active: Collection[int] = barrier.statistics().active.values()
    return active


def _looked_at(task: asyncio.Task[None]) -> None:
    if not task.cancelled():
        task.exception()
