"""Putting the controlled primitives into modules, and watching what threads share, for the time of an exploration.

In each given module everything is replaced that comes from ``threading``, ``queue`` or ``time``: the modules themselves,
whatever their name; functions and classes that were imported from them by name; and primitives that were made when
the module was imported, as globals or in classes, by new ones for each schedule. What cannot be replaced any
more is a class that derives from one of theirs, and it is refused.

Rule: everything is put back at the end. Nothing here suspends.
"""

from __future__ import annotations

import enum
import queue
import sys
import threading
import time
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final

from quiesce.explorer.threads_queues import QUEUE
from quiesce.explorer.threads_run import ThreadRun, running
from quiesce.explorer.threads_standins import THREADING, TIME, Primitive, StandIn

__all__ = ["Patches", "line_tracer"]

_MODULES: Final[tuple[tuple[types.ModuleType, StandIn], ...]] = (
    (threading, THREADING),
    (queue, QUEUE),
    (time, TIME),
)

_REPLACED: Final[dict[int, Any]] = {id(original): standin for original, standin in _MODULES} | {
    id(getattr(original, name)): value
    for original, standin in _MODULES
    for name, value in vars(standin).items()
    if not name.startswith("_") and hasattr(original, name)
}

_MADE: Final[dict[type, Callable[[Any], Any]]] = {
    type(threading.Lock()): lambda _: THREADING.Lock(),
    type(threading.RLock()): lambda _: THREADING.RLock(),
    threading.Condition: lambda _: THREADING.Condition(),
    threading.Event: lambda _: THREADING.Event(),
    threading.Semaphore: lambda made: THREADING.Semaphore(made._value),  # noqa: SLF001 - it has no public name
    threading.BoundedSemaphore: lambda made: THREADING.BoundedSemaphore(made._initial_value),  # noqa: SLF001 - as above
    queue.SimpleQueue: lambda _: QUEUE.SimpleQueue(),
    queue.Queue: lambda made: QUEUE.Queue(made.maxsize),
    queue.LifoQueue: lambda made: QUEUE.LifoQueue(made.maxsize),
    queue.PriorityQueue: lambda made: QUEUE.PriorityQueue(made.maxsize),
}
"""How to make a controlled one like a primitive that a module made when it was imported."""

_UNCHANGEABLE: Final = frozenset(
    {
        bool,
        bytes,
        complex,
        float,
        int,
        range,
        str,
        type(None),
        types.BuiltinFunctionType,
        types.FunctionType,
        types.MethodType,
        types.ModuleType,
        types.CodeType,
        type,
        StandIn,
    }
)

_MISSING: Final = object()

Owner = types.ModuleType | type


class Patches:
    """What is replaced and watched in one exploration.

    Args:
        modules: Where primitives are replaced.
        watched: Classes whose attributes are watched, or None to watch nothing.

    Raises:
        TypeError: If a class of a module derives from a primitive that can no longer be replaced.
    """

    def __init__(self, modules: Sequence[types.ModuleType], watched: Sequence[type] | None) -> None:
        self._names: list[tuple[Owner, str, Any]] = []
        self._made: list[tuple[Owner, str, Any]] = []
        for module in modules:
            own = _classes_of(module)
            _refuse_derived(module, own)
            owners: list[Owner] = [module, *own]
            for owner in owners:
                for name, value in list(vars(owner).items()):
                    if id(value) in _REPLACED:
                        self._names.append((owner, name, _REPLACED[id(value)]))
                    elif type(value) in _MADE:
                        self._made.append((owner, name, value))
        self._watched = (
            []
            if watched is None
            else _watchable([*watched, *(each for module in modules for each in _classes_of(module))])
        )

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Replace and watch, until the end of the block."""
        with ExitStack() as stack:
            for owner, name, value in self._names:
                _set(stack, owner, name, value)
            for owner, name, made in self._made:
                _set(stack, owner, name, made)  # so that what a schedule leaves there is put back
            for watched in self._watched:
                _watch(stack, watched)
            yield

    def renew(self) -> None:
        """Make new primitives for what modules made when they were imported; called in each schedule, at its start."""
        for owner, name, made in self._made:
            setattr(owner, name, _MADE[type(made)](made))


def _classes_of(module: types.ModuleType) -> list[type]:
    return [
        value
        for value in vars(module).values()
        if isinstance(value, type) and value.__module__ == module.__name__
    ]


def _refuse_derived(module: types.ModuleType, own: Iterable[type]) -> None:
    theirs = (threading.Thread, threading.Condition, threading.Event, threading.Semaphore, queue.Queue)
    for derived in own:
        if issubclass(derived, theirs):
            raise TypeError(
                f"{module.__name__}.{derived.__qualname__} derives from a class of the standard library that cannot be"
                " replaced after the module was imported: let it have one instead of being one"
            )


def _set(stack: ExitStack, owner: Owner, name: str, value: object) -> None:
    before = vars(owner).get(name, _MISSING)
    setattr(owner, name, value)
    if before is _MISSING:
        stack.callback(delattr, owner, name)
    else:
        stack.callback(setattr, owner, name, before)


# ------------------------------------------------------------------------------------------------------ watching


def _watchable(classes: Iterable[type]) -> list[type]:
    """Leave out what has no attributes that change, or cannot be watched."""
    found = dict.fromkeys(classes)
    return [
        each
        for each in found
        if not issubclass(each, tuple | BaseException | enum.Enum | threading.local | Primitive)
        and not getattr(each, "_is_protocol", False)
    ]


def _watch(stack: ExitStack, watched: type) -> None:
    get, put, remove = (getattr(watched, name) for name in ("__getattribute__", "__setattr__", "__delattr__"))

    def getattribute(self: object, name: str) -> Any:  # noqa: ANN401 - the attribute
        value = get(self, name)
        run = running()
        if run is not None and not name.startswith("__"):
            _note_read(run, self, name, value)
        return value

    def setattribute(self: object, name: str, value: object) -> None:
        put(self, name, value)
        run = running()
        if run is not None:
            if not run.knows(self) and sys._getframe(1).f_code.co_name == "__init__":  # noqa: SLF001 - as tracebacks do
                run.name(self)
            run.change((*run.key_of(self), name))
            if not _is_fixed(value) and not run.knows(value):
                run.name(value)

    def delattribute(self: object, name: str) -> None:
        remove(self, name)
        run = running()
        if run is not None:
            run.change((*run.key_of(self), name))

    for name, value in (
        ("__getattribute__", getattribute),
        ("__setattr__", setattribute),
        ("__delattr__", delattribute),
    ):
        _set(stack, watched, name, value)
    _WATCHED.add(watched)
    _FIXED.clear()
    stack.callback(_WATCHED.discard, watched)
    stack.callback(_FIXED.clear)


_WATCHED: Final[set[type]] = set()
_FIXED: Final[dict[type, bool]] = {}
"""What was found out about classes, as long as the same ones are watched."""


def _note_read(run: ThreadRun, owner: object, name: str, value: object) -> None:
    if type(value) is types.MethodType and value.__self__ is owner:
        return  # it is its class's
    key = (*run.key_of(owner), name)
    if _is_fixed(value):
        run.read(key)
    else:
        run.change(key)
        run.change(run.key_of(value))


def _is_fixed(value: object) -> bool:
    """Return whether what is seen of a value in one moment stays so, or is noted by itself."""
    kind = type(value)
    fixed = _FIXED.get(kind)
    if fixed is None:
        fixed = _FIXED[kind] = (
            kind in _UNCHANGEABLE
            or issubclass(kind, Primitive | type | enum.Enum | threading.local | BaseException)
            or not _WATCHED.isdisjoint(kind.__mro__)
        )
    return fixed or (isinstance(value, tuple) and all(map(_is_fixed, value)))


# -------------------------------------------------------------------------------------------------------- lines


def line_tracer(modules: Sequence[types.ModuleType]) -> Callable[[types.FrameType, str, Any], Any]:
    """Return what makes every line of modules a point, for ``sys.settrace``."""
    files = frozenset(module.__file__ for module in modules)

    def on_line(_: types.FrameType, event: str, __: object) -> Any:  # noqa: ANN401 - of sys.settrace
        if event == "line":
            run = running()
            if run is not None:
                run.point("")
        return on_line

    def on_call(frame: types.FrameType, _: str, __: object) -> Any:  # noqa: ANN401 - as above
        return on_line if frame.f_code.co_filename in files else None

    return on_call
