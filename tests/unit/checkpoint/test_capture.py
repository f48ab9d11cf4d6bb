"""What the window reads."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quiesce.checkpoint.capture import CutSources, capture
from quiesce.checkpoint.cut import PARTS, CapturedCut
from quiesce.errors import CutExpiredError, ForeignCutError
from quiesce.observers import Hub
from tests.save_rig import Rig


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    """A run in memory."""
    rig = Rig(tmp_path / "run")
    yield rig
    await rig.close()


def sources(rig: Rig, **changes: Any) -> CutSources:  # noqa: ANN401 - whatever is replaced
    """Return where the rig's parts are read from."""
    return replace(
        CutSources(
            barrier=rig.barrier,
            sampler_state=rig.sampler_state,
            position=lambda: rig.position,
            accounting=rig.accounting,
            spares=rig.spares,
            buffer=rig.buffer,
            ledger=rig.ledger,
            dataplane=rig.plane,
        ),
        **changes,
    )


async def captured(rig: Rig, **changes: Any) -> CapturedCut:  # noqa: ANN401 - whatever is replaced
    """Capture in a window of its own."""
    async with rig.barrier.checkpoint() as cut:
        return capture(
            cut,
            sources(rig, **changes),
            incarnation=1,
            parent_cut=None,
            step=rig.step,
            trainer_version=rig.step,
        )


async def test_all_parts_carry_the_cut_and_one_mutation_version(rig: Rig) -> None:
    """Six stamps that agree with each other and with the cut."""
    await rig.finished()
    version = rig.barrier.mutation_version
    found = await captured(rig)
    assert tuple(found.state.stamps) == PARTS
    assert {(stamp.cut_id, stamp.mutation_version) for stamp in found.state.stamps.values()} == {
        (found.state.cut_id, version)
    }
    assert found.snapshot.cut_id == found.state.cut_id
    found.snapshot.release()


async def test_capturing_changes_nothing(rig: Rig) -> None:
    """Two captures in a row are of one mutation version, so that the second save can be skipped."""
    first, second = await captured(rig), await captured(rig)
    assert first.state.mutation_version == second.state.mutation_version == rig.barrier.mutation_version
    first.snapshot.release()
    second.snapshot.release()


async def test_what_writers_do_afterwards_does_not_change_a_capture(rig: Rig) -> None:
    """Reading, committing and training after the window leave the captured records as they were."""
    group, flying = await rig.finished(), await rig.read()
    found = await captured(rig)
    rig.put(flying)
    await rig.commit(flying)
    await rig.train([group])
    await rig.read()
    state = found.state
    assert [entry.group_id for entry in state.ready] == [group]
    assert [record.group_id for record in state.ledger] == [flying]
    assert (state.position.position, state.accounting.read, state.accounting.trained) == (2, 2, 0)
    assert found.snapshot.missing(state.ready[0].keys) == ()
    found.snapshot.release()


async def test_a_capture_outside_its_window_is_refused(rig: Rig) -> None:
    """The cut has to be live, and of the barrier that guards the parts."""
    async with rig.barrier.checkpoint() as cut:
        pass
    with pytest.raises(CutExpiredError):
        capture(cut, sources(rig), incarnation=1, parent_cut=None, step=0, trainer_version=0)
    other = Rig(rig.run.path.parent / "other")
    async with other.barrier.checkpoint() as foreign:
        with pytest.raises(ForeignCutError):
            capture(foreign, sources(rig), incarnation=1, parent_cut=None, step=0, trainer_version=0)
    await other.close()


async def test_a_failing_observer_does_not_leak_the_snapshot(rig: Rig) -> None:
    """The snapshot is the last part: when its hook raises, nobody else knows of the pin yet."""

    class Fails:
        def cut_part_captured(self, cut_id: str, part: str, ns: int) -> None:
            if part == "rows":
                raise LookupError(part)

    hub = Hub(strict=True)
    hub.subscribe(Fails())
    with pytest.raises(LookupError):
        await captured(rig, hub=hub)
    assert rig.plane.statistics().open_snapshots == 0
    assert rig.barrier.statistics().phase == "open"
