"""A worker in threads: the real gate and the real cleanup over a store of rows, and scenarios with an oracle.

A *finishing call* is what ends a generation call: permit, put of the final row, release, then the keys of its chunk rows
go to cleanup. A *checkpoint* closes the gate, reads the store, and reopens. What must hold, whatever the order:

* the invariant ``gate_is_respected``, over the events of the gate;
* while a checkpoint reads, no put and no clear is half done, the gate is closed in its epoch, and of each call either
  the final row is there, or every chunk;
* every key that was given to cleanup is cleared once, or listed as outstanding, never both, never neither;
* at the end the gate is as new: open, no permit out, nobody waiting, and the next permit is there at once.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quiesce import cleanup, snapshot_gate
from quiesce.cleanup import BackgroundCleanup
from quiesce.errors import GateRetiredError
from quiesce.explorer import switch_point, together
from quiesce.invariants import gate_events
from quiesce.observers import Hub
from quiesce.snapshot_gate import CloseAnswer, Epoch, SnapshotGate
from quiesce.types import RowKey

__all__ = ["MODULES", "SCENARIOS", "SHARED", "GateScenario", "GateWorld", "WrongError"]

MODULES = (snapshot_gate, cleanup, sys.modules[__name__])
"""Where the primitives of threads are replaced, and whose classes' attributes threads share."""


class WrongError(AssertionError):
    """Something does not hold; ``rule`` says what.

    Attributes:
        rule: ``gate_is_respected``, ``reads_alone``, ``exactly_once`` or ``as_new``.
    """

    def __init__(self, rule: str, what: str) -> None:
        self.rule = rule
        super().__init__(f"{rule}: {what}")


def key(group: str, sequence: int | None = None) -> RowKey:
    """Return the key of a call's final row, or of one of its chunks."""
    return RowKey(1, group, 0, 0, sequence)


def epoch(number: int) -> Epoch:
    """Return an epoch of the only driver."""
    return Epoch(1, number)


class GateWorld:
    """One worker; a scenario builds a new one for each schedule.

    Args:
        calls: The calls that will end, by group; each has one chunk in the store.
        failing: How many clears raise.
        max_pending: Of the cleanup.
        batch_size: Of the cleanup.
    """

    gate_class: type[SnapshotGate] = SnapshotGate
    cleanup_class: type[BackgroundCleanup] = BackgroundCleanup

    def __init__(self, *calls: str, failing: int = 0, max_pending: int = 4, batch_size: int = 1) -> None:
        self.log = gate_events.GateEventLog()
        self.hub = Hub(strict=True)
        self.hub.subscribe(self.log)
        clock = time.perf_counter_ns
        self.gate = self.gate_class("0", hub=self.hub, clock=clock)
        self.cleanup = self.cleanup_class(
            self.gate,
            self.clear,
            max_pending=max_pending,
            batch_size=batch_size,
            hub=self.hub,
            clock=clock,
        )
        self.rows = {key(call, 0) for call in calls}
        self.calls = calls
        self.failing = failing
        self.changing = 0
        self.given: list[RowKey] = []
        self.cleared: list[RowKey] = []
        self.last = 0

    # --------------------------------------------------------------------------------------------- what threads do

    def write(self, group: str) -> None:
        """Make a call's row final, under a permit."""
        with self.gate.permit():
            self.put(group)

    def put(self, group: str) -> None:
        """Put the final row of a call; takes a while."""
        self.changing += 1
        switch_point("put")
        self.rows = self.rows | {key(group)}
        self.changing -= 1

    def finish(self, group: str) -> None:
        """End a generation call."""
        self.write(group)
        self.give(group)

    def give(self, group: str) -> None:
        """Hand the chunk of a call to cleanup."""
        self.given = [*self.given, key(group, 0)]
        self.cleanup.submit([key(group, 0)])

    def clear(self, keys: Sequence[RowKey]) -> None:
        """Clear rows; takes a while, and may fail before anything is gone."""
        self.changing += 1
        switch_point("clear")
        try:
            if self.failing:
                self.failing -= 1
                raise OSError("the store is busy")
            self.rows = self.rows - set(keys)
            self.cleared = [*self.cleared, *keys]
        finally:
            self.changing -= 1

    def checkpoint(self, number: int) -> CloseAnswer:
        """Close, read, reopen."""
        self.last = max(self.last, number)
        try:
            answer = self.gate.close_and_wait(epoch(number))
            if answer == "closed":
                self.look(number)
                switch_point("read")
                self.look(number)
            return answer
        finally:
            self.gate.reopen(epoch(number))

    def close(self, number: int) -> None:
        """Close, and leave the reopening to somebody else."""
        self.last = max(self.last, number)
        self.gate.close_and_wait(epoch(number))

    def look(self, number: int) -> None:
        """Judge what a checkpoint reads now."""
        if not self.gate.closed_in(epoch(number)):
            raise WrongError("reads_alone", f"the gate is not closed in epoch {number}")
        if self.changing:
            raise WrongError("reads_alone", f"{self.changing} puts or clears are half done")
        rows = self.rows
        lost = [call for call in self.calls if key(call) not in rows and key(call, 0) not in rows]
        if lost:
            raise WrongError("reads_alone", f"neither final row nor chunk is there of {lost}")

    # ------------------------------------------------------------------------------------------------------ the end

    def end(self, *, deadline_seconds: float = 60.0) -> None:
        """Shut down, then judge the whole run."""
        self.judge(self.cleanup.close(deadline_seconds))

    def judge(self, left: int | None = None) -> None:
        """Judge the whole run, once the thread of the cleanup has ended if there was a shutdown.

        Args:
            left: How many keys the shutdown said were left; what was under way then may have been cleared since.
        """
        if left is not None and self.cleanup._thread is not None:  # noqa: SLF001 - nobody else tells when it has ended
            self.cleanup._thread.join()  # noqa: SLF001 - as above
        outstanding = self.cleanup.outstanding()
        if left is not None and left < len(outstanding):
            raise WrongError("exactly_once", f"{left} keys are said to be left, {len(outstanding)} are")
        accounts = Counter(self.cleared) + Counter(outstanding)
        if accounts != Counter(self.given):
            raise WrongError(
                "exactly_once", f"given {self.given}, cleared {self.cleared}, outstanding {outstanding}"
            )
        statistics = self.gate.statistics()
        if statistics.closed or statistics.permits or statistics.waiting:
            raise WrongError("as_new", f"{statistics}")
        self.gate.permit(timeout=0).__enter__().release()
        found = gate_events.gate_is_respected(self.log.events)
        if found:
            raise WrongError("gate_is_respected", "; ".join(map(str, found)))


SHARED = (Hub, gate_events.GateEventLog)
"""Classes beside those whose attributes threads share."""

Body = Callable[[type[GateWorld]], None]


@dataclass(frozen=True, slots=True)
class GateScenario:
    """A scenario.

    Attributes:
        name: Its name.
        body: Runs it in a world of a class.
        stands_for: What it is about.
    """

    name: str
    body: Body
    stands_for: str


SCENARIOS: dict[str, GateScenario] = {}


def scenario(body: Body) -> Body:
    """Register a scenario."""
    SCENARIOS[body.__name__] = GateScenario(body.__name__, body, (body.__doc__ or "").strip().rstrip("."))
    return body


@scenario
def writer_and_checkpoint(kind: type[GateWorld]) -> None:
    """A put while a checkpoint closes, reads and reopens."""
    world = kind("a")
    together(writer=lambda: world.write("a"), checkpoint=lambda: world.checkpoint(1))
    world.judge()


@scenario
def writer_close_and_reopen(kind: type[GateWorld]) -> None:
    """The checkpoint is given up: its reopen comes whenever it likes, also before the close."""
    world = kind("a")
    together(
        writer=lambda: world.write("a"),
        closer=lambda: world.close(1),
        reopener=lambda: world.gate.reopen(epoch(1)),
    )
    world.judge()


@scenario
def two_writers_and_checkpoint(kind: type[GateWorld]) -> None:
    """Two puts while a checkpoint closes, reads and reopens."""
    world = kind("a", "b")
    together(
        one=lambda: world.write("a"),
        two=lambda: world.write("b"),
        checkpoint=lambda: world.checkpoint(1),
    )
    world.judge()


@scenario
def two_writers_wait_for_a_reopen(kind: type[GateWorld]) -> None:
    """Two puts come while the gate is closed; both are let in by one reopen."""
    world = kind("a", "b")
    world.gate.close_and_wait(epoch(1))
    together(
        one=lambda: world.write("a"),
        two=lambda: world.write("b"),
        reopener=lambda: world.gate.reopen(epoch(1)),
    )
    world.judge()


@scenario
def cleanup_and_checkpoint(kind: type[GateWorld]) -> None:
    """A clear while a checkpoint closes, reads and reopens."""
    world = kind("a")
    world.put("a")
    world.give("a")
    world.cleanup.start()
    world.checkpoint(1)
    world.end()


@scenario
def cleanup_close_and_reopen(kind: type[GateWorld]) -> None:
    """A clear while a checkpoint is given up."""
    world = kind("a")
    world.put("a")
    world.give("a")
    world.cleanup.start()
    together(closer=lambda: world.close(1), reopener=lambda: world.gate.reopen(epoch(1)))
    world.end()


@scenario
def late_reopen_in_the_next_window(kind: type[GateWorld]) -> None:
    """The reopen of one checkpoint, sent again, arrives in the window of the next."""
    world = kind("a")

    def driver() -> None:
        world.gate.close_and_wait(epoch(1))
        world.gate.reopen(epoch(1))
        world.checkpoint(2)

    together(driver=driver, late=lambda: world.gate.reopen(epoch(1)), writer=lambda: world.write("a"))
    world.judge()


@scenario
def late_close(kind: type[GateWorld]) -> None:
    """The close of a checkpoint that was given up arrives late, perhaps in the next window or after it."""
    world = kind("a")

    def driver() -> None:
        world.gate.reopen(epoch(1))
        world.checkpoint(2)

    together(
        late=lambda: world.gate.close_and_wait(epoch(1)),
        driver=driver,
        writer=lambda: world.write("a"),
    )
    world.judge()


@scenario
def finishing_call_and_checkpoint(kind: type[GateWorld]) -> None:
    """Permit, put, release, submit, while the clear and a checkpoint come in between."""
    world = kind("a")
    world.cleanup.start()
    together(call=lambda: world.finish("a"), checkpoint=lambda: world.checkpoint(1))
    world.end()


@scenario
def full_queue_and_checkpoint(kind: type[GateWorld]) -> None:
    """Three calls end with room for one in the queue, while the gate closes."""
    world = kind("a", "b", "c", max_pending=1)
    world.cleanup.start()
    together(
        one=lambda: world.finish("a"),
        two=lambda: world.finish("b"),
        three=lambda: world.finish("c"),
        checkpoint=lambda: world.checkpoint(1),
    )
    world.end()


@scenario
def two_checkpoints_and_calls(kind: type[GateWorld]) -> None:
    """Two checkpoints in a row while two calls end, and the first reopen is sent twice."""
    world = kind("a", "b", batch_size=2)
    world.cleanup.start()

    def driver() -> None:
        world.checkpoint(1)
        together(next=lambda: world.checkpoint(2), late=lambda: world.gate.reopen(epoch(1)))

    together(one=lambda: world.finish("a"), two=lambda: world.finish("b"), driver=driver)
    world.end()


@scenario
def shutdown_while_closed(kind: type[GateWorld]) -> None:
    """The worker shuts down within a deadline while the gate is closed; it opens later."""
    world = kind("a")
    world.put("a")
    world.give("a")
    world.gate.close_and_wait(epoch(1))
    world.cleanup.start()
    left = world.cleanup.close(1.0)
    if left != 1:
        raise WrongError("exactly_once", f"{left} keys are left although the gate was closed all the time")
    world.gate.reopen(epoch(1))
    world.judge(left)


@scenario
def shutdown_beside_checkpoint(kind: type[GateWorld]) -> None:
    """The worker shuts down without waiting, while a checkpoint closes, reads and reopens."""
    world = kind("a")
    world.put("a")
    world.give("a")
    world.cleanup.start()
    left, _ = together(shutdown=lambda: world.cleanup.close(0.0), checkpoint=lambda: world.checkpoint(1))
    world.judge(left)


@scenario
def failing_clear_and_checkpoint(kind: type[GateWorld]) -> None:
    """A clear fails, and is tried again under a permit of its own, while a checkpoint comes."""
    world = kind("a", failing=1)
    world.put("a")
    world.give("a")
    world.cleanup.start()
    time.sleep(cleanup.RETRY_PAUSE_SECONDS)  # the clear is tried again at this very moment
    world.checkpoint(1)
    world.end()


@scenario
def retired_while_waiting(kind: type[GateWorld]) -> None:
    """A worker is given up while a call waits at its closed gate: the call is refused, not forgotten."""
    world = kind("a")
    refused: list[str] = []

    def writer() -> None:
        try:
            world.write("a")
        except GateRetiredError:
            refused.append("a")

    world.gate.close_and_wait(epoch(1))
    together(writer=writer, giving_up=lambda: world.gate.retire("its call hung"))
    if refused != ["a"]:
        raise WrongError("as_new", "the call was let in")
