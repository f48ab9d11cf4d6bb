"""The users' own checks: an object with a name and any of the methods below.

::

    class RewardsAreFinite:
        name = "rewards_are_finite"
        severity = "critical"                       # or "warning", which is the default

        def train_step_ended(self, step, version, ns, groups, outcome, metrics):     # any hook of Observer
            if not math.isfinite(metrics.get("reward", 0.0)):
                return f"step {step} has reward {metrics['reward']}"

        def sweep(self, owners):                    # about four times a second, on the event loop: be quick
            ...

        def check_cut(self, state, facts):          # over each captured cut, in a thread
            ...

Each method returns None if all is well, a sentence, a :class:`~quiesce.invariants.Violation`, or several of them.

Rule: a check that raises is switched off and reported as inactive; it can never hurt the run. Nothing here suspends.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Final

from quiesce.errors import ConfigError
from quiesce.invariants.violation import Severity, Violation
from quiesce.observers import HOOK_ERRORS, HOOKS

if TYPE_CHECKING:
    from quiesce.checkpoint.cut import CutState
    from quiesce.invariants.facts import CutFacts
    from quiesce.owners import Owners

__all__ = ["UserCheck", "load_checks"]

_LOG: Final = logging.getLogger("quiesce.auditor")
_OWN: Final = ("sweep", "check_cut")


class UserCheck:
    """A user's check, guarded: what it returns becomes findings, what it raises switches it off.

    Args:
        inner: The user's object.
        report: Takes findings of its hooks and of its ``sweep``.

    Raises:
        ConfigError: If it has no name, an unknown severity, or none of the methods.

    Attributes:
        name: Its name; violations carry it as their invariant.
        severity: ``critical`` or ``warning``.
        policy: Its default policy.
        problem: Why it is inactive, or "".
        listens: Whether it has hooks, and is to be subscribed.
    """

    def __init__(self, inner: object, report: Callable[[Violation], None] = lambda _violation: None) -> None:
        self._inner = inner
        self._report = report
        what = type(inner).__qualname__
        name, severity = getattr(inner, "name", None), getattr(inner, "severity", "warning")
        if not isinstance(name, str) or not name:
            raise ConfigError("auditor.checks", f"{what} has no name")
        if severity not in {"critical", "warning"}:
            raise ConfigError(
                "auditor.checks", f"severity of {what} is {severity!r}, not critical or warning"
            )
        self.name = name
        self.severity: Severity = "critical" if severity == "critical" else "warning"
        default = "refuse_checkpoints" if self.severity == "critical" else "warn"
        self.policy: str = getattr(inner, "policy", default)
        self.problem = ""
        hooks = [hook for hook in HOOKS if callable(getattr(inner, hook, None))]
        if not hooks and not any(callable(getattr(inner, own, None)) for own in _OWN):
            raise ConfigError("auditor.checks", f"{what} has neither sweep(), check_cut() nor a hook")
        self.listens = bool(hooks)
        for hook in hooks:
            setattr(self, hook, self._hook(hook))

    def bind(self, report: Callable[[Violation], None]) -> None:
        """Say who takes findings."""
        self._report = report

    def sweep(self, owners: Owners) -> None:
        """Have it look at the owners."""
        for violation in self._asked("sweep", owners):
            self._report(violation)

    def check_cut(self, state: CutState, facts: CutFacts) -> list[Violation]:
        """Have it judge a cut; returns what it found, reports nothing."""
        return self._asked("check_cut", state, facts)

    def _hook(self, hook: str) -> Callable[..., None]:
        def seen(*args: Any) -> None:  # noqa: ANN401 - passed on
            for violation in self._asked(hook, *args):
                self._report(violation)

        return seen

    def _asked(self, method: str, *args: Any) -> list[Violation]:  # noqa: ANN401 - passed on
        call = getattr(self._inner, method, None)
        if self.problem or not callable(call):
            return []
        try:
            return list(self._read(call(*args)))
        except HOOK_ERRORS as error:
            self.problem = f"{method}() raised {type(error).__name__}: {error}"
            _LOG.exception("check %r is switched off: its %s() raised", self.name, method)
            return []

    def _read(self, answer: object) -> Iterable[Violation]:
        if answer is None:
            return
        if isinstance(answer, Violation):
            yield answer
        elif isinstance(answer, str):
            yield Violation(self.name, self.severity, answer, evidence={"check": self.name})
        elif isinstance(answer, Iterable):
            for part in answer:
                yield from self._read(part)
        else:
            message = f"returned {type(answer).__qualname__}, not a sentence or a violation"
            raise TypeError(message)


def load_checks(
    given: Iterable[object], options: Mapping[str, Mapping[str, Any]] | None = None
) -> tuple[UserCheck, ...]:
    """Build checks from objects and from references ``module:ClassName``.

    Args:
        given: Objects, classes without arguments, or references.
        options: Keyword arguments of a class, by reference.

    Raises:
        ConfigError: If a reference cannot be imported, a class cannot be built, or two have one name.
    """
    found: dict[str, UserCheck] = {}
    for item in given:
        built = _built(item, (options or {}).get(item, {})) if isinstance(item, str) else item
        check = UserCheck(built() if isinstance(built, type) else built)
        if check.name in found:
            raise ConfigError("auditor.checks", f"two checks are named {check.name!r}")
        found[check.name] = check
    return tuple(found.values())


def _built(reference: str, options: Mapping[str, Any]) -> object:
    module_name, colon, class_name = reference.partition(":")
    if not (module_name and colon and class_name):
        raise ConfigError("auditor.checks", f"{reference!r} is not module:ClassName")
    try:
        factory = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise ConfigError("auditor.checks", f"{reference!r} cannot be loaded: {error}") from error
    if not callable(factory):
        raise ConfigError("auditor.checks", f"{reference!r} is not a class")
    try:
        built: object = factory(**options)
    except TypeError as error:
        raise ConfigError("auditor.checks", f"{reference!r} cannot be built: {error}") from error
    return built
