"""Claims about hooks and the hub: telemetry can never hurt what it watches."""

from __future__ import annotations

import gc
import inspect
import logging
from asyncio import CancelledError

import pytest

from quiesce.observers import HOOKS, Hub, Observer, default_hub
from quiesce.testing import EventRecorder, strict_hub


class Listens:
    """Listens to one hook."""

    def __init__(self) -> None:
        self.heard: list[str] = []

    def slot_opened(self, kind: str, wait_ns: int, opened_ns: int) -> None:
        """Note the kind."""
        self.heard.append(kind)


class Raises:
    """Raises in one hook."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = ValueError("hostile") if error is None else error

    def slot_opened(self, kind: str, wait_ns: int, opened_ns: int) -> None:
        """Raise."""
        raise self.error


def test_a_hook_reaches_every_observer_that_has_it() -> None:
    """In the order of subscription."""
    hub, order = Hub(), list[str]()

    class Named(Listens):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def slot_opened(self, kind: str, wait_ns: int, opened_ns: int) -> None:
            order.append(self.name)

    for name in "ab":
        hub.subscribe(Named(name))
    hub.fire("slot_opened", "retry", 1, 1)
    assert order == ["a", "b"]


def test_nobody_listens_costs_nothing() -> None:
    """A hook without observers is an empty tuple, so the caller's truth test is false."""
    hub = Hub()
    hub.subscribe(Listens())
    assert hub.slot_opened
    assert [hook for hook in HOOKS if getattr(hub, hook)] == ["slot_opened"]


def test_a_subclass_of_observer_costs_only_the_hooks_that_it_overrides() -> None:
    """The empty methods of the catalogue are never called."""

    class One(Observer):
        def version_advanced(self, version: int) -> None:
            pass

    hub = Hub()
    hub.subscribe(One())
    assert [hook for hook in HOOKS if getattr(hub, hook)] == ["version_advanced"]


def test_what_a_hook_raises_is_swallowed_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """Training goes on, with less telemetry."""
    hub, listens = Hub(), Listens()
    hub.subscribe(Raises())
    hub.subscribe(listens)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            hub.fire("slot_opened", "retry", 0, 0)
    assert hub.errors == {"slot_opened": 3}
    assert listens.heard == ["retry"] * 3
    records = [record for record in caplog.records if record.name == "quiesce.observers"]
    assert [record.exc_info is not None for record in records] == [True]


def test_a_cancellation_raised_by_a_hook_is_swallowed_too() -> None:
    """A hook does not await, so it cannot be its caller's cancellation."""
    hub = Hub()
    hub.subscribe(Raises(CancelledError()))
    hub.fire("slot_opened", "retry", 0, 0)
    assert hub.errors == {"slot_opened": 1}


def test_ctrl_c_in_a_hook_is_not_swallowed() -> None:
    """Who wants the process to stop is obeyed."""
    hub = Hub()
    hub.subscribe(Raises(KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        hub.fire("slot_opened", "retry", 0, 0)


def test_a_strict_hub_raises() -> None:
    """So that tests see what an observer does wrong."""
    hub = strict_hub(Raises())
    with pytest.raises(ValueError, match="hostile"):
        hub.fire("slot_opened", "retry", 0, 0)
    assert hub.errors == {"slot_opened": 1}


def test_subscribing_twice_changes_nothing() -> None:
    """An observer hears each call once."""
    hub, listens = Hub(), Listens()
    hub.subscribe(listens)
    hub.subscribe(listens)
    hub.fire("slot_opened", "retry", 0, 0)
    assert listens.heard == ["retry"]


def test_an_equal_observer_is_another_observer() -> None:
    """Observers are told apart by identity."""

    class Equal(Listens):
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = None  # type: ignore[assignment] # an observer need not be hashable either

    hub, one, other = Hub(), Equal(), Equal()
    hub.subscribe(one)
    hub.subscribe(other)
    hub.unsubscribe(one)
    hub.fire("slot_opened", "retry", 0, 0)
    assert (one.heard, other.heard) == ([], ["retry"])


def test_an_object_without_a_hook_is_refused() -> None:
    """A typo in a method's name would otherwise be silence."""

    class Typo:
        def slot_openend(self, kind: str, wait_ns: int) -> None:
            pass

    with pytest.raises(TypeError, match="Typo has none of the hook methods"):
        Hub().subscribe(Typo())


def test_unsubscribing_ends_the_calls() -> None:
    """Also from inside a hook; unsubscribing a stranger changes nothing."""
    hub, listens = Hub(), Listens()

    class Leaves:
        calls = 0

        def slot_opened(self, kind: str, wait_ns: int, opened_ns: int) -> None:
            self.calls += 1
            hub.unsubscribe(self)

    leaves = Leaves()
    hub.subscribe(leaves)
    hub.subscribe(listens)
    hub.unsubscribe(Listens())
    for _ in range(2):
        hub.fire("slot_opened", "retry", 0, 0)
    assert (leaves.calls, listens.heard) == (1, ["retry", "retry"])


def test_sources_are_found_by_role_oldest_first() -> None:
    """Collectors pull from whatever is there."""
    hub, one, two, other = Hub(), Listens(), Listens(), Listens()
    hub.attach("barrier", one)
    hub.attach("ledger", other)
    hub.attach("barrier", two)
    assert hub.sources("barrier") == [one, two]
    assert hub.sources("nothing") == []


def test_a_source_is_held_weakly() -> None:
    """Registering a primitive does not keep it alive."""
    hub, source = Hub(), Listens()
    hub.attach("barrier", source)
    del source
    gc.collect()
    assert hub.sources("barrier") == []


def test_a_source_without_a_truth_value_is_a_source() -> None:
    """Primitives refuse bool(); the hub does not ask them."""

    class Source:
        def __bool__(self) -> bool:
            raise TypeError

    hub, source = Hub(), Source()
    hub.attach("ledger", source)
    assert hub.sources("ledger") == [source]


def test_there_is_one_process_wide_hub() -> None:
    """Primitives that are given none share it."""
    assert default_hub() is default_hub()
    assert not default_hub().strict


def test_every_hook_of_the_catalogue_is_documented_synchronous_and_plain() -> None:
    """A hook takes named positional arguments, returns nothing and says what it reports."""
    for hook in HOOKS:
        method = getattr(Observer, hook)
        assert method.__doc__, hook
        assert not inspect.iscoroutinefunction(method), hook
        parameters = list(inspect.signature(method).parameters.values())[1:]
        assert {parameter.kind for parameter in parameters} <= {inspect.Parameter.POSITIONAL_OR_KEYWORD}, hook


def test_the_recorder_hears_every_hook() -> None:
    """None of the catalogue is missing."""
    recorder = EventRecorder()
    hub = strict_hub(recorder)
    for hook in HOOKS:
        hub.fire(hook)
    assert recorder.hooks() == list(HOOKS)
