"""The stall watch: nothing moves, and the group that the run waits for is named."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from quiesce.buffer import Claim
from quiesce.errors import StallError
from quiesce.owners import Owners
from quiesce.stalls import StallWatch
from quiesce.testing import EventRecorder, in_virtual_time, strict_hub
from quiesce.types import GroupRecord
from tests.owners import entry, ref


def record(position: int, *, admission_id: int, admitted: bool) -> GroupRecord:
    """Return a ledger record."""
    prompt = ref(position)
    return GroupRecord(prompt.group_id, admission_id, prompt, phase="admitted" if admitted else "reserved")


class Scene:
    """Owners as the watch sees them, and the watch."""

    def __init__(
        self,
        *,
        records: tuple[GroupRecord, ...] = (),
        claims: tuple[Claim, ...] = (),
        report: float = 10.0,
        abort: float | None = None,
    ) -> None:
        self.owners = SimpleNamespace(
            moves=0,
            step=0,
            ledger=SimpleNamespace(records=lambda: records),
            buffer=SimpleNamespace(claims=lambda: claims),
        )
        self.recorder = EventRecorder()
        self.failures: list[BaseException] = []
        self.watch = StallWatch(
            cast("Owners", self.owners),
            report_seconds=report,
            abort_seconds=abort,
            fail=self.failures.append,
            hub=strict_hub(self.recorder),
        )

    @property
    def reports(self) -> list[tuple[Any, ...]]:
        """What was reported."""
        return self.recorder.of("stalled")


@in_virtual_time
async def test_a_stuck_rollout_of_the_oldest_batch_is_named() -> None:
    """The group to blame is an unfinished one of the batch that was admitted first, whatever the ledger's order is."""
    scene = Scene(
        records=(
            record(9, admission_id=2, admitted=True),
            record(4, admission_id=1, admitted=True),
            record(12, admission_id=3, admitted=False),
        )
    )
    watching = asyncio.create_task(scene.watch.run())

    await asyncio.sleep(11.5)
    watching.cancel()

    (what, group, age) = scene.reports[0]
    assert (what, group) == ("a rollout has not ended", ref(4).group_id)
    assert 10.0 <= age <= 11.0 + 1e-6


@pytest.mark.parametrize(
    "records, claims, what, group",
    [
        ((), (), "no prompt was read", ""),
        (
            (record(3, admission_id=0, admitted=False),),
            (),
            "a reserved batch was not admitted",
            ref(3).group_id,
        ),
        (
            (record(3, admission_id=0, admitted=True),),
            (Claim(0, (entry(1), entry(2))),),
            "a train step has not ended",
            ref(1).group_id,
        ),
    ],
)
def test_what_the_run_waits_for_is_told(
    records: tuple[GroupRecord, ...], claims: tuple[Claim, ...], what: str, group: str
) -> None:
    """A train step is blamed before rollouts, these before an admission, and that before the dataset."""
    assert Scene(records=records, claims=claims).watch.waiting_for() == (what, group)


@in_virtual_time
async def test_a_stall_is_reported_again_each_time_that_it_has_doubled() -> None:
    """A stall of an hour is not an alarm every ten seconds."""
    scene = Scene()
    watching = asyncio.create_task(scene.watch.run())

    await asyncio.sleep(85.0)
    watching.cancel()

    assert [round(age) for _, _, age in scene.reports] == [10, 20, 40, 80]


@pytest.mark.parametrize("what", ["moves", "step"])
@in_virtual_time
async def test_a_move_or_a_step_ends_a_stall(what: str) -> None:
    """As long as groups change owners or steps are taken, however slowly, nothing is reported."""
    scene = Scene(abort=30.0)
    watching = asyncio.create_task(scene.watch.run())

    for _ in range(20):
        await asyncio.sleep(8.0)
        setattr(scene.owners, what, getattr(scene.owners, what) + 1)
    watching.cancel()

    assert not scene.reports
    assert not scene.failures


@in_virtual_time
async def test_a_stall_past_the_abort_limit_halts_the_run_and_names_the_group() -> None:
    """The error that halts the run tells what it waited for, for how long, and for whom."""
    scene = Scene(records=(record(4, admission_id=1, admitted=True),), report=100.0, abort=20.0)

    await scene.watch.run()

    assert scene.watch.halted
    (error,) = scene.failures
    assert isinstance(error, StallError)
    assert error.group_id == ref(4).group_id
    assert "a rollout has not ended" in str(error)
    assert asyncio.get_running_loop().time() == pytest.approx(20.0, abs=2.1)


@in_virtual_time
async def test_without_an_abort_limit_a_stall_is_only_reported() -> None:
    """Null never halts anything."""
    scene = Scene(report=1.0)
    watching = asyncio.create_task(scene.watch.run())

    await asyncio.sleep(500.0)

    assert not watching.done()
    assert not scene.watch.halted
    watching.cancel()
