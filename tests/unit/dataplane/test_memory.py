"""The data plane in memory: what its contract suite cannot see."""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from quiesce.barrier import DataPlaneCheckpointBarrier
from quiesce.dataplane import MemoryDataPlane
from quiesce.errors import ForkedDataPlaneError
from quiesce.observers import Hub
from quiesce.types import RowKey


class Counting(dict[str, bytes]):
    """A dictionary that notes every way of looking at its entries."""

    touched = 0

    def __iter__(self) -> Iterator[str]:
        self.touched += len(self)
        return super().__iter__()

    def __getitem__(self, name: str) -> bytes:
        self.touched += 1
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:  # noqa: ANN401 - dict's signature
        """Count one entry."""
        self.touched += 1
        return super().get(name, default)

    def items(self) -> Any:  # noqa: ANN401 - dict's signature
        """Count all entries."""
        self.touched += len(self)
        return super().items()

    def copy(self) -> Any:  # noqa: ANN401 - dict's signature
        """Count all entries."""
        self.touched += len(self)
        return super().copy()


async def test_a_snapshot_touches_no_row() -> None:
    """Its cost is the same for no row and for a thousand: it looks at none of them."""
    hub = Hub(strict=True)
    barrier, plane = DataPlaneCheckpointBarrier(hub=hub), MemoryDataPlane(1, hub=hub)
    plane.put({RowKey(1, "g", number, 0): {"x": torch.ones(1)} for number in range(1000)})
    rows = plane._rows = Counting(plane._rows)  # noqa: SLF001 - looking at it is the point
    async with barrier.checkpoint() as cut:
        snapshot = plane.snapshot(cut)
    assert (rows.touched, snapshot.rows) == (0, 1000)
    assert len(list(snapshot.keys())) == 1000
    assert rows.touched >= 1000
    snapshot.release()


async def test_only_changed_rows_are_noted() -> None:
    """An open snapshot costs memory for the rows that changed since, not for all."""
    hub = Hub(strict=True)
    barrier, plane = DataPlaneCheckpointBarrier(hub=hub), MemoryDataPlane(1, hub=hub)
    keys = [RowKey(1, "g", number, 0) for number in range(100)]
    plane.put({key: {"x": torch.ones(1)} for key in keys})
    async with barrier.checkpoint() as cut:
        snapshot = plane.snapshot(cut)
    plane.clear(keys[:3])
    plane.put({keys[0]: {"x": torch.ones(1)}})
    assert len(snapshot.before) == 3  # type: ignore[attr-defined] # this backend's notes
    snapshot.release()


def test_a_forked_child_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A child's rows would be put into a copy that nobody reads."""
    plane = MemoryDataPlane(1, hub=Hub(strict=True))
    monkeypatch.setattr(os, "getpid", lambda: 4711)
    with pytest.raises(ForkedDataPlaneError, match="used in its forked child 4711"):
        plane.put({RowKey(1, "g", 0, 0): {"x": torch.ones(1)}})


async def test_any_barrier_s_live_window_will_do_without_one() -> None:
    """A plane that was given no barrier still asks for a live exclusive cut."""
    hub = Hub(strict=True)
    plane = MemoryDataPlane(1, hub=hub)
    async with DataPlaneCheckpointBarrier(hub=hub).checkpoint() as cut:
        plane.snapshot(cut).release()
