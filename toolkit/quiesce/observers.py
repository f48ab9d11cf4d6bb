"""The hooks that primitives call, and the hub that carries them to whoever listens.

Rule: telemetry can never hurt the training. A hook is called synchronously after the state change that it
reports is complete; it must not await, block, or call back into the primitive. What it raises is logged once
per hook, counted each time, and swallowed (``strict=True`` raises it again, for tests). Nothing here
suspends.

An observer is a plain object with any of the methods of :class:`Observer`; it need not inherit from it. Hooks
take plain arguments because building an event object costs more than the call. Durations are nanoseconds
(``ns``), measured once, by the primitive. Where a last argument says when (``opened_ns``, ``ended_ns``), it is
the reading of the primitive's own monotonic clock from which the duration was computed, so that events of one
primitive can be matched exactly.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from asyncio import CancelledError
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["HOOKS", "HOOK_ERRORS", "Hub", "Observer", "default_hub"]

_LOG: Final = logging.getLogger("quiesce.observers")

HOOK_ERRORS: Final = (Exception, CancelledError)
"""What a hook can raise without hurting anybody; it does not await, so the second is no cancellation of its
caller."""


class Observer:
    """The catalogue of hooks: what each reports, and its arguments. Every method is optional.

    Hooks come in pairs that name an ``outcome``: ``completed``, ``failed``, ``cancelled``, ``skipped`` or
    ``refused``.
    """

    def slot_opened(self, kind: str, wait_ns: int, opened_ns: int) -> None:
        """A mutation slot opened after waiting ``wait_ns``."""

    def slot_closed(self, kind: str, wait_ns: int, hold_ns: int, outcome: str, ended_ns: int) -> None:
        """A mutation slot closed after being held for ``hold_ns``."""

    def slot_wait_abandoned(self, kind: str, wait_ns: int, outcome: str, ended_ns: int) -> None:
        """A slot that was still waiting was given up."""

    def window_requested(self, window_id: str, asked_ns: int) -> None:
        """A checkpoint asked for the exclusive side; the drain begins when it is the next to be served."""

    def window_opened(
        self,
        window_id: str,
        drain_ns: int,
        delayed_by: tuple[tuple[str, str, int, int], ...],
        opened_ns: int,
    ) -> None:
        """The exclusive side is held.

        ``delayed_by`` has (kind, task name, from ns, to ns) for each slot that was waited for: the part of
        the drain, counted from its request, in which that slot was open.
        """

    def window_closed(
        self, window_id: str, drain_ns: int, exclusive_ns: int, outcome: str, closed_ns: int
    ) -> None:
        """The exclusive side was released; a slot that it blocked opened at ``closed_ns``."""

    def window_abandoned(
        self,
        window_id: str,
        drain_ns: int,
        outcome: str,
        delayed_by: tuple[tuple[str, str, int, int], ...],
        ended_ns: int,
    ) -> None:
        """A checkpoint gave up before it was exclusive (drain timeout, cancellation)."""

    def cut_part_captured(self, cut_id: str, part: str, ns: int) -> None:
        """One of the six artifacts was captured inside the window."""

    def phase_started(self, cut_id: str, phase: str) -> None:
        """A phase of a checkpoint began."""

    def phase_ended(self, cut_id: str, phase: str, ns: int, outcome: str) -> None:
        """A phase of a checkpoint ended."""

    def file_synced(self, cut_id: str, ns: int, num_bytes: int) -> None:
        """A file of a checkpoint that is being written was made durable, in a thread; ``ns`` is the fsync alone."""

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
        """One attempt to save ended; ``groups`` counts the captured groups by owner."""

    def trainer_stalled(self, cause: str, ns: int) -> None:
        """The train pump was held up by saving: ``previous_write``, ``fence``, ``window`` or ``stage``."""

    def owner_moved(self, group_id: str, source: str, target: str, reason: str) -> None:
        """A group changed hands. ``source`` may be ``read``; ``target`` may be ``trained`` or ``dropped``."""

    def prompts_read(self, count: int) -> None:
        """Prompts were read and counted."""

    def admission_waited(self, ns: int) -> None:
        """The wait at the admission gate ended."""

    def admission_committed(self, path: str, cursor: int, target_step: int | None, groups: int) -> None:
        """A batch was admitted by the ``transactional`` or the ``fallback`` path."""

    def sampler_fell_back(self, sampler: str) -> None:
        """A custom sampler has a one-piece ``admit()``, so its gate wait holds a slot."""

    def version_advanced(self, version: int) -> None:
        """The trainer version advanced."""

    def train_step_started(self, step: int, version: int) -> None:
        """An optimizer step began; ``step`` counts it already, as its end does."""

    def train_step_ended(
        self, step: int, version: int, ns: int, groups: int, outcome: str, metrics: Mapping[str, float]
    ) -> None:
        """An optimizer step ended (``skipped``: a step whose target was 0 groups)."""

    def train_idled(self, cause: str, ns: int) -> None:
        """The train pump waited, for ``groups`` or for a ``sync`` of weights; a wait that lasts is told second by second."""

    def weight_sync_started(self, version: int) -> None:
        """Giving the workers the weights of that version began."""

    def weight_synced(self, version: int, ns: int, outcome: str) -> None:
        """Giving the workers the weights of that version ended."""

    def rollout_started(self, group_id: str, attempt: int) -> None:
        """A rollout attempt began."""

    def rollout_ended(self, group_id: str, attempt: int, ns: int, outcome: str, tokens: int) -> None:
        """A rollout attempt ended."""

    def permit_granted(self, worker: str, sequence: int, wait_ns: int) -> None:
        """A snapshot gate let a writer in; ``sequence`` orders the events of one gate."""

    def permit_released(self, worker: str, sequence: int, hold_ns: int) -> None:
        """A writer left its gate."""

    def gate_closing(self, worker: str, sequence: int, epoch: str) -> None:
        """A gate stopped granting permits, for the close of that epoch."""

    def gate_closed(self, worker: str, sequence: int, epoch: str, ns: int, outcome: str) -> None:
        """A close ended: ``closed``, ``superseded`` by a reopen, or ``failed`` (its time was up)."""

    def gate_reopened(self, worker: str, sequence: int, epoch: str, closed_ns: int) -> None:
        """A gate that was closed grants permits again."""

    def clear_started(self, worker: str, sequence: int, keys: int) -> None:
        """Cleanup got its permit, and clears; ``sequence`` is the permit's."""

    def clear_ended(
        self,
        worker: str,
        calls: int,
        keys: int,
        ns: int,
        outcome: str,
        rollouts: tuple[tuple[str, int], ...],
    ) -> None:
        """A batch of cleanup ended: the keys of so many calls, cleared together.

        ``rollouts`` names the calls whose keys they are: group and attempt of each.
        """

    def reply_sent(self, worker: str, ns: int) -> None:
        """A generation call was answered ``ns`` after its last token."""

    def tokens_reused(self, group_id: str, tokens: int) -> None:
        """A resumed generation call went on from staged tokens."""

    def dataplane_operated(self, op: str, ns: int, rows: int, outcome: str) -> None:
        """The data plane finished ``put``, ``get``, ``clear``, ``keys``, ``snapshot`` or ``write``."""

    def restore_started(self) -> None:
        """A restore began: a checkpoint is looked for, and verified; a corrupt one ends it, and the next one begins."""

    def restore_ended(
        self, outcome: str, reason: str, parts: Mapping[str, int], groups: Mapping[str, int]
    ) -> None:
        """A restore ended; ``parts`` has nanoseconds by part, ``groups`` the restored groups by owner.

        Parts are in the order in which they were done; the last one of a restore that did not complete is where it
        ended.
        """

    def invariant_checked(self, name: str) -> None:
        """An invariant was evaluated."""

    def invariant_violated(self, violation: Any) -> None:  # noqa: ANN401 - a Violation; importing it would be a cycle
        """An invariant does not hold."""

    def stalled(self, what: str, group_id: str, age_seconds: float) -> None:
        """Nothing moved for a while; ``group_id`` is the group that the run waits for."""

    def run_state_changed(self, state: str) -> None:
        """The run is ``starting``, ``running``, ``stopping``, ``finished`` or ``failed``."""


_TIMED: Final = 32
"""Each so-many-th call of a hook is timed, for what telemetry costs."""

HOOKS: Final = tuple(name for name in vars(Observer) if not name.startswith("_"))
"""Names of all hooks."""


class Hub:
    """Carries hooks from primitives to observers, and lets collectors find the primitives.

    ``hub.slot_closed`` (and every other hook name) is a tuple of bound methods, rebuilt when the set of
    observers changes, so a hot path pays one attribute load and one truth test when nobody listens::

        if hub.slot_closed:
            hub.fire("slot_closed", kind, wait_ns, hold_ns, outcome)

    Args:
        strict: Raise what a hook raises. For tests.
    """

    # With slots, because a hot path looks at hooks: an instance dictionary of so many names is a slow one.
    __slots__ = (
        "__weakref__",
        "_fired",
        "_lock",
        "_logged",
        "_observers",
        "_on_first_attach",
        "_sources",
        "_timed",
        "_timed_ns",
        "errors",
        "roles",
        "strict",
        *HOOKS,
    )

    strict: bool
    errors: dict[str, int]
    """How often each hook raised."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> tuple[Callable[..., None], ...]: ...

    def __init__(self, *, strict: bool = False) -> None:
        self.strict = strict
        self.errors = {}
        self._observers: tuple[tuple[object, bool], ...] = ()
        self._timed: dict[str, tuple[bool, ...]] = {}
        self._sources: list[tuple[str, weakref.ref[Any]]] = []
        self._on_first_attach: Callable[[], None] | None = None
        self.roles: set[str] = set()
        """Roles of all primitives that attached themselves, also of those that are gone."""
        self._fired = 0
        self._timed_ns = 0
        self._lock = threading.Lock()
        self._logged: set[tuple[str, int]] = set()
        self._rebuild()

    def subscribe(self, observer: object, *, timed: bool = False) -> None:
        """Add an observer; adding it twice changes nothing.

        Args:
            observer: The observer.
            timed: Whether its hooks are a part of what telemetry costs, see :attr:`fired_ns`.

        Raises:
            TypeError: If it has none of the hook methods.
        """
        if not any(callable(getattr(observer, name, None)) for name in HOOKS):
            message = f"{type(observer).__qualname__} has none of the hook methods: {', '.join(HOOKS)}"
            raise TypeError(message)
        with self._lock:
            if not any(known is observer for known, _ in self._observers):
                self._observers = (*self._observers, (observer, timed))
                self._rebuild()

    def unsubscribe(self, observer: object) -> None:
        """Remove an observer; removing a stranger changes nothing."""
        with self._lock:
            self._observers = tuple(known for known in self._observers if known[0] is not observer)
            self._rebuild()

    def attach(self, role: str, source: object) -> None:
        """Register a primitive (weakly) so that collectors can pull its ``statistics()``.

        Args:
            role: What it is: ``barrier``, ``ledger``, ``spares``, ``buffer``, ``dataplane``, ``sampler``, …
            source: The primitive.
        """
        with self._lock:
            self._sources = [known for known in self._sources if known[1]() is not None]
            self._sources.append((role, weakref.ref(source)))
            self.roles.add(role)
            waiting, self._on_first_attach = self._on_first_attach, None
        if waiting is not None:
            waiting()

    def on_first_attach(self, call: Callable[[], None] | None) -> None:
        """Have something called when a primitive attaches itself for the first time; at once if one has.

        Args:
            call: Must not raise: the primitive is being built. None calls nothing any more.
        """
        with self._lock:
            if call is None or not self._sources:
                self._on_first_attach = call
                return
        call()

    def renew(self) -> None:
        """In a forked child: have a lock that no thread of the parent held."""
        self._lock = threading.Lock()

    def sources(self, role: str) -> list[Any]:
        """Return the live primitives of a role, oldest first."""
        with self._lock:
            found = [ref() for known, ref in self._sources if known == role]
        return [source for source in found if source is not None]

    def fire(self, hook: str, *args: object) -> None:
        """Call one hook of every observer that has it; the module's rule says what happens if one raises."""
        self._fired += 1
        if not self._fired % _TIMED:
            self._fire_timed(hook, args)
            return
        for method in getattr(self, hook):
            try:
                method(*args)
            except HOOK_ERRORS as error:
                self.raised(hook, method, error)

    def _fire_timed(self, hook: str, args: tuple[object, ...]) -> None:
        clock = time.thread_time_ns
        for method, timed in zip(getattr(self, hook), self._timed[hook], strict=False):
            before = clock()
            since = clock()
            try:
                method(*args)
            except HOOK_ERRORS as error:
                self.raised(hook, method, error)
            finally:
                # Asking for the time is a call of the system's that is as long as a hook: what it takes is taken off.
                if timed:
                    self._timed_ns += max(0, clock() - since - (since - before))

    @property
    def fired_ns(self) -> int:
        """Estimated processor time of the hooks of telemetry that :meth:`fire` called; each so-many-th is timed."""
        return self._timed_ns * _TIMED

    def raised(self, hook: str, method: Callable[..., None], error: BaseException) -> None:
        """Do what the module's rule says with what a hook raised; for a hot path that calls hooks itself.

        Raises:
            BaseException: The error, on a strict hub.
        """
        self.errors[hook] = self.errors.get(hook, 0) + 1
        if self.strict:
            raise error
        seen = (hook, id(getattr(method, "__self__", method)))
        if seen not in self._logged:
            self._logged.add(seen)
            _LOG.error(
                "observer hook %s raised; training goes on with less telemetry (logged once)",
                hook,
                exc_info=error,
            )

    def _rebuild(self) -> None:
        base = vars(Observer)
        for name in HOOKS:
            methods, of_telemetry = [], []
            for observer, timed in self._observers:
                method = getattr(observer, name, None)
                # An Observer subclass that does not override a hook should cost nothing for it.
                if callable(method) and getattr(method, "__func__", None) is not base[name]:
                    methods.append(method)
                    of_telemetry.append(timed)
            self._timed[name] = tuple(of_telemetry)
            setattr(self, name, tuple(methods))


_DEFAULT = Hub()


def default_hub() -> Hub:
    """Return the process-wide hub, which every primitive uses unless it is given one of its own."""
    return _DEFAULT
