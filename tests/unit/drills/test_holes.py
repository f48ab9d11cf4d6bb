"""Patches of live objects, and their undoing."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest

from quiesce.auditor.record import Records
from quiesce.drills.holes import Holes


class Gate:
    """Some live object."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def close(self, epoch: str) -> str:
        """Do something."""
        self.calls.append(epoch)
        return f"closed {epoch}"


@dataclasses.dataclass(frozen=True, slots=True)
class Sources:
    """A frozen one that keeps a function."""

    state: Any


@pytest.fixture
def holes() -> Holes:
    """Return holes in a run that has nothing yet."""
    target: Any = SimpleNamespace(auditor=SimpleNamespace(records=Records()))
    return Holes("d", target)


async def test_a_patch_is_undone_and_leaves_no_trace(holes: Holes) -> None:
    """The method is the class's again; the object's own attributes are what they were."""
    gate = Gate()
    holes.replace(gate, "close", lambda epoch: f"not {epoch}")
    assert gate.close("1") == "not 1"

    await holes.close()

    assert gate.close("2") == "closed 2"
    assert set(vars(gate)) == {"calls"}


async def test_a_frozen_object_gets_its_own_value_back(holes: Holes) -> None:
    """What is an attribute there, not a method, is put back as it was."""
    before, instead = object(), object()
    sources = Sources(before)
    holes.replace(sources, "state", instead)
    assert sources.state is instead

    await holes.close()

    assert sources.state is before


async def test_patches_over_each_other_are_undone_in_the_reverse_order(holes: Holes) -> None:
    """The innermost is what the first one found."""
    gate = Gate()
    gate.close = lambda epoch: f"own {epoch}"  # type: ignore[method-assign] # as a user's wrapper would
    own = gate.close
    holes.replace(gate, "close", lambda epoch: f"first {epoch}")
    holes.replace(gate, "close", lambda epoch: f"second {epoch}")

    await holes.close()

    assert gate.close is own


async def test_once_means_the_next_call_that_is_meant(holes: Holes) -> None:
    """Others go to the original; after the one, the method is as before."""
    gate = Gate()
    taken = holes.once(
        gate, "close", lambda close, epoch: close(epoch) + "!", when=lambda epoch: epoch == "2"
    )

    assert gate.close("1") == "closed 1"
    assert not taken.is_set()
    assert gate.close("2") == "closed 2!"
    assert taken.is_set()
    assert set(vars(gate)) == {"calls"}
    assert gate.close("2") == "closed 2"
    await holes.close()
    assert gate.calls == ["1", "2", "2"]


async def test_a_hole_that_was_not_used_is_closed_too(holes: Holes) -> None:
    """A drill that is given up leaves nothing armed."""
    gate = Gate()
    holes.once(gate, "close", lambda *_: "never")

    await holes.close()

    assert gate.close("1") == "closed 1"


async def test_what_is_mended_is_mended_before_the_holes_close(holes: Holes) -> None:
    """A mend may need what the hole keeps out; and holes are closed although one fails."""
    gate, order = Gate(), list[str]()

    async def mend() -> None:
        order.append(gate.close("1"))
        raise ValueError("it cannot be mended")

    holes.replace(gate, "close", lambda epoch: f"not {epoch}")
    holes.on_close(lambda: order.append("closed"))
    holes.mend(mend)
    with pytest.raises(ValueError, match="cannot be mended"):
        await holes.close()

    assert order == ["not 1", "closed"]
    assert gate.close("2") == "closed 2"


async def test_a_value_of_a_mapping_comes_back(holes: Holes) -> None:
    """A budget that was tightened for the drill."""
    budgets: dict[str, Any] = {"write": 600.0}
    holes.item(budgets, "write", 0.5)
    assert budgets == {"write": 0.5}

    await holes.close()

    assert budgets == {"write": 600.0}
