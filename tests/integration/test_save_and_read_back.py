"""What a save writes is what a restore loads and an audit passes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quiesce.checkpoint.audit import audit
from quiesce.checkpoint.loading import find_checkpoints
from quiesce.checkpoint.restore import load_newest
from quiesce.checkpoint.trainer_state import RandomState, StateDictTrainerState
from tests.save_rig import Rig, broken


@pytest.mark.parametrize("lmdb", [False, True])
async def test_a_saved_run_is_loaded_whole_and_passes_the_audit(tmp_path: Path, lmdb: bool) -> None:  # noqa: FBT001 - a test's axis
    """Groups in every state, a real model, several checkpoints: read back equal, and without a violation."""
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    trainer = StateDictTrainerState({"model": model, "optimizer": optimizer, "random": RandomState()})
    rig = Rig(tmp_path / "run", lmdb=lmdb)
    rig.saver = rig.checkpointer(trainer, keep=3)
    await rig.save()
    for _ in range(2):
        model(torch.ones(3, 4)).sum().backward()
        optimizer.step()
        await rig.train([await rig.finished(), await rig.finished()])
        await rig.finished()
        await rig.read()
        result = await rig.save()
        assert result.outcome == "completed", result
    assert rig.seen.violations == []
    weights = model.weight.detach().clone()
    await rig.close()

    loaded = load_newest(tmp_path / "run", rename_corrupt=False)
    assert loaded.state.step == 2
    assert loaded.state.cut_id == result.cut_id
    assert len(loaded.state.entries) == 2
    assert len(loaded.state.ledger) == 2
    with torch.no_grad():
        model.weight.zero_()
    await trainer.load(loaded.trainer_directory)
    assert torch.equal(model.weight, weights)
    report = audit(tmp_path / "run")
    assert report.ok, report
    assert [str(info.path.name) for info in find_checkpoints(tmp_path / "run" / "checkpoints")] == [
        "step_2",
        "step_1",
        "step_0",
    ]


async def test_a_suspect_is_no_checkpoint_for_a_restore(tmp_path: Path) -> None:
    """The last good one is loaded although the suspect is newer."""
    rig = Rig(tmp_path / "run", verify=broken)
    good = await rig.save()
    await rig.read()
    rig.step = 1
    assert (await rig.save()).outcome == "refused"
    await rig.close()
    assert load_newest(tmp_path / "run", rename_corrupt=False).state.cut_id == good.cut_id
