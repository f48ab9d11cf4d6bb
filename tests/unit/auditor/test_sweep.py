"""The slow sweep's judgement of one group, and of rows."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from quiesce.auditor import Pace
from quiesce.auditor.shadow import BUFFER, DROPPED, LEDGER, LOST, NONE, TRAINED
from quiesce.auditor.sweep import judge_group
from quiesce.testing import in_virtual_time
from quiesce.types import PromptRef, RowKey
from tests.unit.auditor.rig import Rig, kinds, only


@pytest.mark.parametrize(
    "shadow, holders, account",
    [
        (NONE, [], ""),
        (LEDGER, ["ledger"], "read"),
        (BUFFER, ["buffer"], "read"),
        (TRAINED, [], "trained"),
        (DROPPED, [], "dropped"),
    ],
)
def test_agreement_is_no_fault(shadow: int, holders: list[str], account: str) -> None:
    """Events, owner and account say the same."""
    found = judge_group(
        shadow, holders, read=account != "", trained=account == "trained", dropped=account == "dropped"
    )

    assert found is None


@pytest.mark.parametrize(
    "shadow, holders, account, invariant, says",
    [
        (LEDGER, ["ledger", "buffer"], "read", "single_owner", "ledger and buffer"),
        (LEDGER, ["buffer"], "read", "single_owner", "owned by buffer, but by its events ledger"),
        (TRAINED, ["ledger"], "read", "conservation", "it is trained"),
        (LEDGER, ["ledger"], "trained", "conservation", "although booked as trained"),
        (LEDGER, ["ledger"], "", "conservation", "never read"),
        (LEDGER, [], "read", "conservation", "lost"),
        (NONE, [], "read", "conservation", "lost"),
        (LEDGER, [], "dropped", "conservation", "booked as dropped"),
        (TRAINED, [], "dropped", "conservation", "booked as dropped"),
        (LOST, [], "read", "conservation", "lost"),
        (LEDGER, [], "", "conservation", "never read"),
        (TRAINED, [], "trained dropped", "conservation", "both"),
    ],
)
def test_each_contradiction_has_its_name(
    shadow: int, holders: list[str], account: str, invariant: str, says: str
) -> None:
    """Two owners are one invariant, everything about ends and readings the other."""
    found = judge_group(
        shadow, holders, read=account != "", trained="trained" in account, dropped="dropped" in account
    )

    assert found is not None
    assert found.invariant == invariant
    assert says in found.what


async def test_what_is_wrong_is_reported_once_and_the_shadow_goes_on_from_there() -> None:
    """A second pass over the same fault finds nothing new."""
    rig = Rig()
    auditor = rig.auditor()
    group, *_ = await rig.read(3, to_spares=True)
    async with rig.owners.barrier.mutation("substitution") as cut:
        rig.owners.spares.take(cut)

    for _ in range(3):
        await auditor.sweep.once()
    async with rig.owners.barrier.mutation("group_removal") as cut:
        rig.owners.condemn(cut, [group])
    await auditor.sweep.once()

    assert (only(auditor).groups, only(auditor).count) == ((group,), 1)
    assert auditor.events.shadow.get(group) == DROPPED


async def test_owners_of_groups_that_no_position_names_are_counted() -> None:
    """A record that appears from nowhere, under a name that was never read, shows in the numbers after two passes."""
    rig = Rig()
    auditor = rig.auditor()
    await rig.read(2)
    stranger = dict.fromkeys(["stranger"], rig.owners.ledger.records()[0])
    rig.owners.ledger._records |= stranger  # noqa: SLF001 - the hole

    await auditor.sweep.once()
    assert kinds(auditor) == {}
    await auditor.sweep.once()

    assert "+1 groups" in only(auditor).message


@in_virtual_time
async def test_a_row_without_an_owner_is_reported_once_it_has_stayed() -> None:
    """A put that ends a moment after its group was dropped is cleared a moment later, and is no fault."""
    rig = Rig(pace=Pace(least_seconds=0.0, rest=0.0, orphan_seconds=0.5))
    auditor = rig.auditor()
    await rig.read(1)
    lost = RowKey(1, PromptRef(0, 0, 0).group_id, 0, 7)
    brief = RowKey(1, PromptRef(0, 0, 0).group_id, 1, 7)
    rig.dataplane.put({lost: {"x": np.zeros(1)}, brief: {"x": np.zeros(1)}})

    await auditor.sweep.once()
    rig.dataplane.clear([brief])
    await asyncio.sleep(0.4)
    await auditor.sweep.once()
    assert kinds(auditor) == {}
    await asyncio.sleep(0.2)
    await auditor.sweep.once()
    await auditor.sweep.once()

    record = only(auditor)
    assert record.invariant == "rows_not_orphaned"
    assert record.evidence["orphans"] == [lost.encode()]
    assert record.count == 1


async def test_rows_of_the_ledgers_attempt_and_those_on_their_way_out_are_owned() -> None:
    """A rollout may be putting them now; a queued clear explains itself."""
    rig = Rig(pace=Pace(least_seconds=0.0, rest=0.0, orphan_seconds=0.0))
    auditor = rig.auditor()
    group, gone = await rig.read(2)
    mine, queued = RowKey(1, group, 0, 0), RowKey(1, gone, 0, 0)
    rig.dataplane.put({mine: {"x": np.zeros(1)}, queued: {"x": np.zeros(1)}})
    async with rig.owners.barrier.mutation("group_removal") as cut:
        rig.owners.drop(cut, gone, "failed")
        rig.owners.clears.hand_over([queued])

    await auditor.sweep.once()
    await auditor.sweep.once()

    assert kinds(auditor) == {}


async def test_a_store_that_fails_costs_the_sweep_a_slice_and_the_run_nothing() -> None:
    """It is counted, and the owners are compared the next time."""
    rig = Rig()
    auditor = rig.auditor()
    await rig.read(1)
    rig.dataplane.close()

    await auditor.sweep.once()

    assert auditor.statistics().sweep_failures >= 1
    assert kinds(auditor) == {}


async def test_counters_that_went_back_are_seen_without_an_event() -> None:
    """Trainer version, step and mutation version, each once."""
    rig = Rig()
    auditor = rig.auditor()
    await rig.read(1)
    rig.owners.versions.advance(5)
    rig.owners.step = 5
    auditor.sweep.look()
    rig.owners.versions._value = 4  # noqa: SLF001 - the hole
    rig.owners.step = 3
    rig.owners.barrier._version = 0  # noqa: SLF001 - the hole

    auditor.sweep.look()
    auditor.sweep.look()

    names = [name for record in auditor.records.all() for name in record.evidence["back"]]
    assert names == ["trainer version", "step", "mutation version"]
