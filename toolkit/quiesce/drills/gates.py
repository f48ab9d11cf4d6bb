"""Faults of the snapshot gate, and of counters that only grow.

What the gate does wrong here it does because one line of it is left out for one call: the flag that a close sets, the wait
for permits, the comparison of epochs.

Rule: each is a mistake that a run could contain, done to the live run. Yield rule: every fault suspends.
"""

# What is wrong is private state of a gate, a barrier, a version: that is what these holes are made of.
# ruff: noqa: SLF001

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Final

from quiesce.drills.drill import Drill
from quiesce.drills.holes import PATIENCE_SECONDS, elsewhere
from quiesce.snapshot_gate import Epoch

if TYPE_CHECKING:
    from types import TracebackType

    from quiesce.drills.holes import Holes
    from quiesce.drills.target import DrillTarget
    from quiesce.snapshot_gate import CloseAnswer, Permit, SnapshotGate

__all__ = ["GATES"]

_LEAST_VERSION: Final = 2


async def _closed_gate_grants(target: DrillTarget, holes: Holes) -> None:
    gate = target.gate

    def enter() -> None:
        with gate._lock:
            gate._granting = True  # as if the close had not cleared it
        try:
            with gate.permit(timeout=PATIENCE_SECONDS):
                pass
        finally:
            with gate._lock:
                gate._granting = not (gate._closed or gate._retired)

    holes.in_the_next_window(lambda: elsewhere(enter).join(PATIENCE_SECONDS))


async def _gate_closes_over_a_permit(target: DrillTarget, holes: Holes) -> None:
    gate, done, granted = target.gate, threading.Event(), threading.Event()

    def hold() -> None:
        with gate.permit():
            granted.set()
            done.wait()

    def let_go() -> None:
        done.set()
        holder.join(PATIENCE_SECONDS)

    holder = elsewhere(hold)
    holes.on_close(done.set)
    await holes.until(granted.is_set)
    # The first question is whether to wait for permits, the next whether the close still counts.
    holes.once(gate, "_is_current", lambda _is_current, _epoch: False)
    holes.in_the_next_window(let_go)


class _GivenBackEarly:
    """A permit that is given back before what it is for."""

    def __init__(self, gate: SnapshotGate, go: threading.Event) -> None:
        self._gate = gate
        self._go = go
        self.taken = threading.Event()
        self.over = threading.Event()

    def __enter__(self) -> Permit:
        permit = self._gate.enter()
        permit.release()
        self.taken.set()
        self._go.wait()
        return permit

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.over.set()


async def _clear_under_a_closed_gate(target: DrillTarget, holes: Holes) -> None:
    gate, go = target.gate, threading.Event()
    early = _GivenBackEarly(gate, go)

    def clear_now() -> bool:
        if not early.taken.is_set():
            return False
        go.set()
        early.over.wait(PATIENCE_SECONDS)
        return True

    holes.once(gate, "permit", lambda _permit, *_: early)
    holes.on_close(go.set)
    holes.in_the_next_window(clear_now)


async def _epoch_goes_back(target: DrillTarget, holes: Holes) -> None:
    gate = target.gate

    def replayed(close: Any, epoch: Epoch, timeout: float | None = None) -> CloseAnswer:  # noqa: ANN401 - passed on
        with gate._lock:
            released = gate._released
            gate._epoch = gate._released = Epoch(0, 0)  # what it has been told is forgotten
        answer: CloseAnswer = close(Epoch(epoch.incarnation, epoch.number - 1), timeout)
        with gate._lock:
            gate._epoch, gate._released = epoch, released
        return answer

    holes.once(gate, "close_and_wait", replayed, when=lambda epoch, *_: epoch.number > 1)


async def _trainer_version_goes_back(target: DrillTarget, holes: Holes) -> None:
    versions = target.owners.versions
    await holes.until(lambda: versions.value >= _LEAST_VERSION)
    versions._value -= 1


async def _mutation_version_goes_back(target: DrillTarget, holes: Holes) -> None:
    barrier = target.owners.barrier
    await holes.until(lambda: barrier.mutation_version >= _LEAST_VERSION)
    lost = barrier.mutation_version // 2
    barrier._version -= lost

    def found_again() -> None:
        barrier._version += lost  # no cut would be published until it has caught up

    holes.on_close(found_again)


GATES = (
    Drill(
        "closed-gate-grants-a-permit",
        "A writer gets a permit while the gate is closed for a checkpoint.",
        "a close that does not stop the fast path",
        ("gate_is_respected",),
        _closed_gate_grants,
        at_once=False,
        mentions="granted a permit while closed",
    ),
    Drill(
        "gate-closes-over-a-permit",
        "A close is answered although a permit is out.",
        "a close that does not wait",
        ("gate_is_respected",),
        _gate_closes_over_a_permit,
        at_once=False,
        mentions="permits out",
    ),
    Drill(
        "clear-under-a-closed-gate",
        "Rows are cleared inside a window, under a permit that was given back before.",
        "a cleanup that takes its permit for too little",
        ("gate_is_respected",),
        _clear_under_a_closed_gate,
        at_once=False,
        mentions="started a clear",
    ),
    Drill(
        "epoch-goes-back",
        "The gate is closed for an epoch of the past.",
        "a driver that was restarted and counts anew, and a gate that has forgotten",
        ("gate_is_respected",),
        _epoch_goes_back,
        at_once=False,
        mentions="after epoch",
    ),
    Drill(
        "trainer-version-goes-back",
        "The trainer reports a version that is older than the one before.",
        "a trainer that was restarted from its own, older state",
        ("versions_grow",),
        _trainer_version_goes_back,
        mentions="trainer version",
    ),
    Drill(
        "mutation-version-goes-back",
        "The barrier counts its mutations from an earlier number.",
        "a restore that does not carry the count on",
        ("versions_grow",),
        _mutation_version_goes_back,
        mentions="mutation version",
    ),
)
