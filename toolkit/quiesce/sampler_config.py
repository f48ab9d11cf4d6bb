"""Samplers from configuration: a built-in one by name, or a custom class by ``module:ClassName``.

Rule: a custom sampler is checked when it is built and each time that it answers, so that a member it lacks or
a promise it breaks is an error that names the sampler and the member, never a run that stands still. Yield
rule: a custom sampler's own ``wait_until_admissible`` or ``admit`` may suspend; nothing else does.

What a custom class must provide; it is built with ``sampler.options`` as keyword arguments:

* ``dispatch_cursor``, an attribute or property: -1 at first, one more for each admitted batch;
* ``restore_cursor(cursor)``: set it to exactly that value (also used to take back a refused admission);
* ``select(view, version, count)``: up to ``count`` ids of ready groups, in training order;
* its admission. In two steps, which is recommended: ``async wait_until_admissible(versions)`` waits and
  changes nothing, and ``commit_admission(cut)`` adds one to the cursor and returns the stamp or None, without
  an await. Or in one piece, the fallback: ``async admit(versions)`` does both;
* ``is_admissible(version)``, whether the gate is open at that version, or ``step_target(view, version,
  count)``, how many groups the step needs. Only a class with ``stamps_target_steps = True`` needs neither.

What it may provide, and what holds otherwise:

* ``name``: the reference, ``module:ClassName``;
* ``stamps_target_steps``: False. If it is true, each admission must return the step that will train its
  batch;
* ``required_capacity(groups_per_step)``: ``groups_per_step``;
* ``evictable(view, version)``: with stamps, the ready groups whose step has passed; without, none;
* ``aborts(record, version)``: False;
* ``step_target``: with stamps, what is ready with the stamp once D >= W and the ledger holds none of it.
  Without, ``count``, or all that is owned and neither evictable nor aborted when nothing more can come before
  the version moves;
* ``is_admissible``: always True.

Example, a gate that holds the run strictly on policy::

    class OnPolicy:
        def __init__(self) -> None:
            self.dispatch_cursor = -1

        def restore_cursor(self, cursor: int) -> None:
            self.dispatch_cursor = cursor

        def is_admissible(self, version: int) -> bool:
            return self.dispatch_cursor < version

        async def wait_until_admissible(self, versions: TrainerVersion) -> None:
            await versions.wait_until(self.is_admissible)

        def commit_admission(self, cut: MutationCut) -> int | None:
            self.dispatch_cursor += 1
            return None

        def select(self, view: OwnersView, version: int, count: int) -> tuple[str, ...]:
            return tuple(entry.group_id for entry in view.ready)[:count]
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from quiesce.errors import ConfigError, SamplerContractError
from quiesce.observers import Hub, default_hub
from quiesce.samplers import (
    START_CURSOR,
    InOrderSampler,
    OwnersView,
    ReadyFirstSampler,
    Sampler,
    SamplerStatistics,
    WeightFifoSampler,
    WindowedSampler,
    stamped_target,
    unstamped_target,
)

if TYPE_CHECKING:
    from quiesce.barrier import DataPlaneCheckpointBarrier, MutationCut
    from quiesce.signals import TrainerVersion
    from quiesce.types import GroupRecord

__all__ = [
    "BUILT_IN_SAMPLERS",
    "CustomSampler",
    "OnePieceCustomSampler",
    "SamplerConfig",
    "TwoStepCustomSampler",
    "adapt_sampler",
    "build_sampler",
]

BUILT_IN_SAMPLERS: Final = ("windowed", "weight_fifo", "ready_first", "in_order")
"""Names of the built-in samplers."""


@dataclass(frozen=True)
class SamplerConfig:
    """Which sampler a run uses.

    Attributes:
        name: ``windowed``, ``weight_fifo``, ``ready_first``, ``in_order``, or ``module:ClassName`` for a
            custom class.
        max_staleness_versions: Versions that a group's start may lie behind the trainer (all but
            ``in_order``).
        max_lookahead_versions: Steps ahead of the trainer that a batch may be stamped (``in_order``).
        sample_freshest_first: Train the newest start first (``windowed``).
        options: Keyword arguments of a custom class.
    """

    name: str = "in_order"
    max_staleness_versions: int = 1
    max_lookahead_versions: int = 1
    sample_freshest_first: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def gate_window(self) -> int | None:
        """How far the cursor may be ahead of the trainer version; None without a gate, or a custom one."""
        if self.name in ("weight_fifo", "ready_first"):
            return self.max_staleness_versions
        return self.max_lookahead_versions if self.name == "in_order" else None


def build_sampler(
    config: SamplerConfig, barrier: DataPlaneCheckpointBarrier, hub: Hub | None = None
) -> Sampler:
    """Build the sampler that a configuration names.

    Args:
        config: What to build.
        barrier: The barrier whose cuts its admissions are committed under.
        hub: Where collectors find it; None means the process-wide hub.

    Raises:
        ConfigError: If a value is impossible; the message starts with its key.
        SamplerContractError: If a custom class lacks a member or cannot be built with its options.
    """
    sampler = _custom(config, barrier) if ":" in config.name else _built_in(config, barrier)
    (default_hub() if hub is None else hub).attach("sampler", sampler)
    return sampler


def adapt_sampler(inner: object, barrier: DataPlaneCheckpointBarrier, name: str) -> CustomSampler:
    """Wrap a custom sampler in what the controller needs; the module's docstring says what it must provide.

    Args:
        inner: The custom sampler.
        barrier: The barrier whose cuts its admissions are committed under.
        name: What to call it, if it has no ``name`` of its own.

    Raises:
        SamplerContractError: If it lacks a member.
    """
    if _has(inner, "wait_until_admissible") and _has(inner, "commit_admission"):
        return TwoStepCustomSampler(inner, barrier, name)
    return OnePieceCustomSampler(inner, barrier, name)


class CustomSampler:
    """A custom sampler with the defaults filled in and its promises checked.

    Args:
        inner: The custom sampler.
        barrier: The barrier whose cuts its admissions are committed under.
        reference: Its ``module:ClassName``.
    """

    def __init__(self, inner: object, barrier: DataPlaneCheckpointBarrier, reference: str) -> None:
        self._inner: Any = inner
        self._barrier = barrier
        own_name = getattr(inner, "name", None)
        self.name: str = own_name if isinstance(own_name, str) and own_name else reference
        self.stamps_target_steps = bool(getattr(inner, "stamps_target_steps", False))
        for member in ("select", "restore_cursor"):
            if not _has(inner, member):
                raise SamplerContractError(self.name, f"lacks the method {member}()")
        if not hasattr(inner, "dispatch_cursor"):
            raise SamplerContractError(self.name, "lacks dispatch_cursor")
        if self.dispatch_cursor != START_CURSOR:
            raise SamplerContractError(
                self.name, f"dispatch_cursor must start at {START_CURSOR}, not {self.dispatch_cursor}"
            )
        if not (self.stamps_target_steps or _has(inner, "is_admissible") or _has(inner, "step_target")):
            raise SamplerContractError(
                self.name,
                "lacks is_admissible() or step_target(): without stamps, one of them must tell a step that "
                "no more groups can come, or a dropped group would make it wait for ever",
            )

    @property
    def dispatch_cursor(self) -> int:
        """How many batches were admitted, less one.

        Raises:
            SamplerContractError: If the custom sampler's cursor is no integer.
        """
        cursor = self._inner.dispatch_cursor
        if not isinstance(cursor, int) or isinstance(cursor, bool):
            raise SamplerContractError(self.name, f"dispatch_cursor must be an int, not {cursor!r}")
        return cursor

    def restore_cursor(self, cursor: int) -> None:
        """Set the dispatch cursor to exactly the saved value.

        Raises:
            ValueError: If it is below -1.
            SamplerContractError: If the custom sampler does not take it.
        """
        if cursor < START_CURSOR:
            raise ValueError(f"a dispatch cursor cannot be {cursor}: it starts at {START_CURSOR}")
        self._inner.restore_cursor(cursor)
        if self.dispatch_cursor != cursor:
            raise SamplerContractError(
                self.name,
                f"restore_cursor({cursor}) must set dispatch_cursor to it, not to {self.dispatch_cursor}",
            )

    def required_capacity(self, groups_per_step: int) -> int:
        """Return what the custom sampler requires, or G."""
        if _has(self._inner, "required_capacity"):
            return int(self._inner.required_capacity(groups_per_step))
        return groups_per_step

    def is_admissible(self, version: int) -> bool:
        """Tell whether its gate is open at that version; a gate that it does not show counts as open."""
        return bool(self._inner.is_admissible(version)) if _has(self._inner, "is_admissible") else True

    def select(self, view: OwnersView, version: int, count: int) -> tuple[str, ...]:
        """Return what it selects.

        Raises:
            SamplerContractError: If that is not up to ``count`` different ids of ready groups.
        """
        ids = tuple(self._inner.select(view, version, count))
        if len(ids) > count or len(set(ids)) < len(ids):
            raise SamplerContractError(
                self.name, f"select() must return up to {count} different groups, not {', '.join(ids)}"
            )
        self._require_ready("select", ids, view)
        return ids

    def step_target(self, view: OwnersView, version: int, groups_per_step: int) -> int | None:
        """Return its own step target, or the default one.

        Raises:
            SamplerContractError: If its own is neither None nor a number of groups.
        """
        if _has(self._inner, "step_target"):
            target: object = self._inner.step_target(view, version, groups_per_step)
            if target is None or (isinstance(target, int) and not isinstance(target, bool) and target >= 0):
                return target
            raise SamplerContractError(
                self.name, f"step_target() must return None or a number of groups, not {target!r}"
            )
        if self.stamps_target_steps:
            return stamped_target(view, version, self.dispatch_cursor)
        lost = set(self.evictable(view, version))
        owned = sum(not self.aborts(record, version) for record, _ in view.admitted())
        owned += sum(entry.group_id not in lost for entry in view.ready)
        return unstamped_target(view, groups_per_step, owned=owned, gate_open=self.is_admissible(version))

    def evictable(self, view: OwnersView, version: int) -> tuple[str, ...]:
        """Return what it gives up, or what the default does.

        Raises:
            SamplerContractError: If that names a group that is not ready.
        """
        if _has(self._inner, "evictable"):
            ids = tuple(dict.fromkeys(self._inner.evictable(view, version)))
            self._require_ready("evictable", ids, view)
            return ids
        if not self.stamps_target_steps:
            return ()
        return tuple(
            entry.group_id
            for entry in view.ready
            if entry.target_step is not None and entry.target_step < version
        )

    def aborts(self, record: GroupRecord, version: int) -> bool:
        """Tell whether it aborts an unfinished group; False by default."""
        return bool(self._inner.aborts(record, version)) if _has(self._inner, "aborts") else False

    def statistics(self) -> SamplerStatistics:
        """Return name, cursor and whether steps are stamped."""
        return SamplerStatistics(self.name, self.dispatch_cursor, self.stamps_target_steps)

    def _require_ready(self, member: str, ids: tuple[str, ...], view: OwnersView) -> None:
        strangers = sorted(set(ids) - {entry.group_id for entry in view.ready})
        if strangers:
            raise SamplerContractError(
                self.name, f"{member}() returned groups that are not ready: {', '.join(strangers)}"
            )

    def _checked(self, member: str, before: int, stamp: object) -> int | None:
        """Check what one admission did to the cursor, and its stamp."""
        cursor = self.dispatch_cursor
        if cursor != before + 1:
            raise SamplerContractError(
                self.name,
                f"{member}() must advance dispatch_cursor by one: it went from {before} to {cursor}",
            )
        if not self.stamps_target_steps:
            if stamp is not None:
                raise SamplerContractError(
                    self.name, f"{member}() returned stamp {stamp!r} although stamps_target_steps is not set"
                )
            return None
        if not isinstance(stamp, int) or isinstance(stamp, bool) or not 0 <= stamp <= cursor:
            raise SamplerContractError(
                self.name, f"{member}() must return a step from 0 to the cursor {cursor}, not {stamp!r}"
            )
        return stamp


class TwoStepCustomSampler(CustomSampler):
    """A custom sampler with the two-step admission: it waits outside the barrier, like a built-in one."""

    def __init__(self, inner: object, barrier: DataPlaneCheckpointBarrier, reference: str) -> None:
        super().__init__(inner, barrier, reference)
        _require_async(self.name, inner, "wait_until_admissible")

    async def wait_until_admissible(self, versions: TrainerVersion) -> None:
        """Suspend until the custom sampler's gate is open.

        Raises:
            SamplerContractError: If the wait moved the cursor.
        """
        before = self.dispatch_cursor
        await self._inner.wait_until_admissible(versions)
        if self.dispatch_cursor != before:
            raise SamplerContractError(
                self.name,
                f"wait_until_admissible() moved dispatch_cursor from {before} to {self.dispatch_cursor}; "
                "only commit_admission() may, inside its slot",
            )

    def commit_admission(self, cut: MutationCut) -> int | None:
        """Let the custom sampler advance its cursor by one.

        Raises:
            CutError: If the cut proves nothing here; the custom sampler is not asked.
            SamplerContractError: If the cursor did not move by one, or the stamp is impossible.
        """
        cut.check(self._barrier, "mutation")
        before = self.dispatch_cursor
        return self._checked("commit_admission", before, self._inner.commit_admission(cut))


class OnePieceCustomSampler(CustomSampler):
    """A custom sampler whose admission is one piece, so that its gate wait holds a slot: the fallback."""

    def __init__(self, inner: object, barrier: DataPlaneCheckpointBarrier, reference: str) -> None:
        super().__init__(inner, barrier, reference)
        missing = [
            member for member in ("wait_until_admissible", "commit_admission") if not _has(inner, member)
        ]
        if not _has(inner, "admit"):
            raise SamplerContractError(
                self.name, f"lacks {'() and '.join(missing)}() (or admit(), which holds up checkpoints)"
            )
        _require_async(self.name, inner, "admit")

    async def admit(self, versions: TrainerVersion) -> int | None:
        """Let the custom sampler wait at its gate and advance its cursor by one.

        Raises:
            SamplerContractError: If the cursor did not move by one, or the stamp is impossible.
        """
        before = self.dispatch_cursor
        return self._checked("admit", before, await self._inner.admit(versions))


def _has(inner: object, member: str) -> bool:
    return callable(getattr(inner, member, None))


def _require_async(name: str, inner: object, member: str) -> None:
    if not inspect.iscoroutinefunction(getattr(inner, member)):
        raise SamplerContractError(name, f"{member}() must be an async method")


def _built_in(config: SamplerConfig, barrier: DataPlaneCheckpointBarrier) -> Sampler:
    if config.name not in BUILT_IN_SAMPLERS:
        known = ", ".join(BUILT_IN_SAMPLERS)
        raise ConfigError(
            "sampler.name", f"unknown sampler {config.name!r}; known are {known}, or module:ClassName"
        )
    if config.options:
        given = ", ".join(config.options)
        raise ConfigError(
            "sampler.options", f"only a custom class takes options, {config.name!r} does not: {given}"
        )
    if config.sample_freshest_first and config.name != "windowed":
        raise ConfigError("sampler.sample_freshest_first", f"only 'windowed' can, {config.name!r} cannot")
    if config.name == "windowed":
        return WindowedSampler(
            barrier, config.max_staleness_versions, sample_freshest_first=config.sample_freshest_first
        )
    if config.name == "weight_fifo":
        return WeightFifoSampler(barrier, config.max_staleness_versions)
    if config.name == "ready_first":
        return ReadyFirstSampler(barrier, config.max_staleness_versions)
    return InOrderSampler(barrier, config.max_lookahead_versions)


def _custom(config: SamplerConfig, barrier: DataPlaneCheckpointBarrier) -> Sampler:
    module_name, _, class_name = config.name.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError("sampler.name", f"cannot import {module_name!r}: {error}") from error
    except ValueError as error:  # an empty module name
        raise ConfigError("sampler.name", f"{config.name!r} is not module:ClassName") from error
    factory = getattr(module, class_name, None)
    if not callable(factory):
        raise ConfigError("sampler.name", f"module {module_name!r} has no class {class_name!r}")
    try:
        inner = factory(**config.options)
    except TypeError as error:
        given = ", ".join(config.options) or "none"
        raise SamplerContractError(
            config.name, f"cannot be built with its options ({given}): {error}"
        ) from error
    return adapt_sampler(inner, barrier, config.name)
