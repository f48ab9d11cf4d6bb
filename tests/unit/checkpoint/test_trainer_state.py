"""The adapter for plain state_dict objects: clones, no pickle, strict on the way back."""

from __future__ import annotations

import asyncio
import pickle
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quiesce.checkpoint.trainer_state import RandomState, StateDictTrainerState, Stateful
from quiesce.errors import TrainerStateError


class Holder:
    """A part whose state is whatever it is given."""

    def __init__(self, state: dict[str, Any]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""
        return self.state

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Take over a state."""
        self.state = state_dict


def trainer(seed: int, width: int = 4) -> dict[str, Any]:
    """Build a model with an optimizer and a scheduler."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(3, width), torch.nn.BatchNorm1d(width), torch.nn.Linear(width, 1)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (step + 1))
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def train(parts: dict[str, Any], steps: int, seed: int) -> None:
    """Take some optimizer steps."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        loss = parts["model"](torch.randn(8, 3, generator=generator)).square().mean()
        loss.backward()
        parts["optimizer"].step()
        parts["optimizer"].zero_grad()
        parts["scheduler"].step()


async def saved(state: StateDictTrainerState, folder: Path) -> Path:
    """Stage and write a state."""
    staged = await state.stage()
    folder.mkdir()
    await staged.write(folder)
    return folder


def tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return a model's tensors, as they are now."""
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


async def test_a_loaded_trainer_goes_on_exactly_as_the_saved_one_would(tmp_path: Path) -> None:
    """Model, optimizer moments and scheduler all come back: later steps give the same bits."""
    first = trainer(1)
    train(first, 3, seed=5)
    folder = await saved(StateDictTrainerState(first), tmp_path / "trainer")
    second = trainer(2)
    await StateDictTrainerState(second).load(folder)
    train(first, 3, seed=6)
    train(second, 3, seed=6)
    for name, tensor in tensors_of(first["model"]).items():
        assert torch.equal(tensor, second["model"].state_dict()[name]), name
    assert first["scheduler"].get_last_lr() == second["scheduler"].get_last_lr()


async def test_training_after_staging_does_not_change_what_is_written(tmp_path: Path) -> None:
    """The copy is a copy on the CPU too, where a tensor could be handed out as it is."""
    parts = trainer(1)
    state = StateDictTrainerState(parts)
    at_the_cut = tensors_of(parts["model"])
    staged = await state.stage()
    train(parts, 2, seed=5)
    (tmp_path / "trainer").mkdir()
    await staged.write(tmp_path / "trainer")
    other = trainer(2)
    await StateDictTrainerState(other).load(tmp_path / "trainer")
    for name, tensor in at_the_cut.items():
        assert torch.equal(tensor, other["model"].state_dict()[name]), name


async def test_nothing_is_pickled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither on the way out nor on the way in; files are safetensors and JSON."""

    def refuse(*args: Any, **more: Any) -> Any:  # noqa: ANN401 - stands in for pickle
        message = "pickled"
        raise AssertionError(message)

    # Classes stay classes: torch derives from them in modules that it imports when they are first needed.
    for kind in (pickle.Pickler, pickle.Unpickler):
        monkeypatch.setattr(pickle, kind.__name__, type(kind.__name__, (kind,), {"__init__": refuse}))
    for name in ("dump", "dumps", "load", "loads"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr(torch, "save", refuse)
    monkeypatch.setattr(torch, "load", refuse)
    parts = trainer(1)
    train(parts, 1, seed=5)
    folder = await saved(StateDictTrainerState(parts), tmp_path / "trainer")
    await StateDictTrainerState(trainer(2)).load(folder)
    assert {path.suffix for path in folder.iterdir()} == {".safetensors", ".json"}


async def test_staging_writing_and_loading_run_in_a_thread_of_their_own(tmp_path: Path) -> None:
    """A state_dict that gathers shards takes seconds; the event loop goes on meanwhile."""
    seen: list[str] = []

    class Noting(Holder):
        def state_dict(self) -> dict[str, Any]:
            seen.append(threading.current_thread().name)
            return super().state_dict()

        def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
            seen.append(threading.current_thread().name)
            super().load_state_dict(state_dict)

    state = StateDictTrainerState({"part": Noting({"a": torch.ones(2)})})
    await state.load(await saved(state, tmp_path / "trainer"))
    assert len(seen) >= 2
    assert all(name.startswith("quiesce-trainer-state") for name in seen)


async def test_every_value_comes_back_as_it_was(tmp_path: Path) -> None:
    """Dtypes, views, empty tensors and scalars; tuples, integer keys, None, infinities and bytes."""
    values: dict[str, Any] = {
        "tensors": {
            "bf16": torch.randn(3, 5).bfloat16(),
            "transposed": torch.arange(12.0).reshape(3, 4).t(),
            "slice": torch.arange(1000)[10:13],
            "empty": torch.zeros(0, 7),
            "scalar": torch.tensor(3.5, dtype=torch.float64),
            "bool": torch.tensor([True, False]),
            "bytes": torch.randint(0, 255, (16,), dtype=torch.uint8),
        },
        "state": {0: {"step": torch.tensor(7.0)}, 1: {}},
        "groups": [{"lr": 1e-3, "betas": (0.9, 0.999), "params": [0, 1], "maximize": False, "fused": None}],
        "odd": (float("inf"), -3, "text", b"\x00\xff", [[]], {}),
    }
    target = Holder({})
    await StateDictTrainerState({"part": target}).load(
        await saved(StateDictTrainerState({"part": Holder(values)}), tmp_path / "trainer")
    )
    for name, tensor in values["tensors"].items():
        loaded = target.state["tensors"][name]
        assert loaded.dtype == tensor.dtype
        assert torch.equal(loaded, tensor), name
    assert torch.equal(target.state["state"][0]["step"], torch.tensor(7.0))
    assert target.state["state"][1] == {}
    assert target.state["groups"] == values["groups"]
    assert target.state["odd"] == values["odd"]
    assert type(target.state["groups"][0]["betas"]) is tuple


async def test_a_large_state_is_cut_into_files(tmp_path: Path) -> None:
    """The writer holds one file in memory; a slice of a large tensor costs what the slice holds."""
    large = torch.arange(4096.0)
    part = Holder({f"t{number}": large[number * 256 : (number + 1) * 256] for number in range(16)})
    folder = await saved(StateDictTrainerState({"part": part}, shard_bytes=4096), tmp_path / "trainer")
    sizes = [path.stat().st_size for path in folder.glob("*.safetensors")]
    assert len(sizes) == 4
    assert max(sizes) < 8192
    target = Holder({})
    await StateDictTrainerState({"part": target}).load(folder)
    assert torch.equal(torch.cat([target.state[f"t{number}"] for number in range(16)]), large)


async def test_a_state_without_a_tensor_is_a_document_alone(tmp_path: Path) -> None:
    """There may be nothing for torch to write."""
    folder = await saved(StateDictTrainerState({"part": Holder({"step": 3})}), tmp_path / "trainer")
    target = Holder({})
    await StateDictTrainerState({"part": target}).load(folder)
    assert target.state == {"step": 3}
    assert [path.name for path in folder.iterdir()] == ["state.json"]


@pytest.mark.parametrize(
    "now,problem",
    [
        ({"model": torch.nn.Linear(3, 4), "more": torch.nn.Linear(1, 1)}, r"missing \['more'\]"),
        ({}, r"unexpected \['model'\]"),
        ({"model": torch.nn.Linear(3, 5)}, r"model\['weight'\]: .*\(4, 3\).*\(5, 3\)"),
        ({"model": torch.nn.Linear(3, 4, bias=False)}, r"model\['bias'\]: the trainer has no such"),
        ({"model": torch.nn.Linear(3, 4).double()}, r"model\['weight'\]: .*float32.*float64"),
        ({"model": torch.nn.Sequential(torch.nn.Linear(3, 4))}, r"0.weight.*not in the checkpoint"),
    ],
)
async def test_a_state_that_does_not_fit_is_refused_before_anything_is_changed(
    tmp_path: Path, now: dict[str, Stateful], problem: str
) -> None:
    """The message names part and tensor; the trainer is as it was."""
    folder = await saved(StateDictTrainerState({"model": torch.nn.Linear(3, 4)}), tmp_path / "trainer")
    before = {name: tensors_of(part) for name, part in now.items() if isinstance(part, torch.nn.Module)}
    with pytest.raises(TrainerStateError, match=problem):
        await StateDictTrainerState(now).load(folder)
    for name, tensors in before.items():
        after = now[name].state_dict()
        assert all(torch.equal(tensor, after[key]) for key, tensor in tensors.items())


async def test_an_optimizer_of_another_model_is_refused(tmp_path: Path) -> None:
    """Its moments would have other shapes."""
    small, large = trainer(1), trainer(1, width=8)
    train(small, 1, seed=5)
    train(large, 1, seed=5)
    folder = await saved(StateDictTrainerState({"optimizer": small["optimizer"]}), tmp_path / "trainer")
    with pytest.raises(TrainerStateError, match=r"optimizer\['state'\]\[0\]"):
        await StateDictTrainerState({"optimizer": large["optimizer"]}).load(folder)


@pytest.mark.parametrize("value", [object(), {1.5: 1}, torch.eye(2).to_sparse(), {"x"}])
async def test_what_cannot_be_stored_is_refused_when_it_is_staged(value: object) -> None:
    """Not days later, when somebody needs it; the place is named."""
    with pytest.raises(Exception, match=r"odd"):
        await StateDictTrainerState({"part": Holder({"odd": value})}).stage()


async def test_a_document_and_files_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    """A tensor that only one of the two knows is named."""
    one = await saved(StateDictTrainerState({"part": Holder({"a": torch.ones(1)})}), tmp_path / "one")
    two = await saved(
        StateDictTrainerState({"part": Holder({"a": torch.ones(1), "b": torch.ones(1)})}), tmp_path / "two"
    )
    (one / "state.json").replace(two / "state.json")
    with pytest.raises(TrainerStateError, match="000001/part/b"):
        await StateDictTrainerState({"part": Holder({})}).load(two)


def test_a_part_without_the_two_methods_is_refused_at_once() -> None:
    """As is a name that could be a path."""
    with pytest.raises(TrainerStateError, match="no state_dict"):
        StateDictTrainerState({"part": object()})  # type: ignore[dict-item]  # the mistake under test
    with pytest.raises(TrainerStateError, match="without '/'"):
        StateDictTrainerState({"a/b": Holder({})})


async def test_random_generators_draw_on_where_they_stood(tmp_path: Path) -> None:
    """Python's, torch's, numpy's, and one of the caller's own."""
    own = torch.Generator().manual_seed(3)
    state = StateDictTrainerState({"random": RandomState({"own": own})})
    folder = await saved(state, tmp_path / "trainer")

    def draw() -> list[float]:
        return [
            random.random(),
            float(torch.rand(1)),
            float(np.random.rand()),  # noqa: NPY002 - the global generator is what is saved
            float(torch.rand(1, generator=own)),
        ]

    expected = draw()
    assert draw() != expected
    await state.load(folder)
    assert draw() == expected
    with pytest.raises(TrainerStateError, match="own"):
        await StateDictTrainerState({"random": RandomState()}).load(folder)


async def test_a_cancelled_staging_has_ended_when_the_cancellation_arrives() -> None:
    """The next step of the trainer must not run into a copy that still goes on."""
    inside, go_on = threading.Event(), threading.Event()

    class Slow(Holder):
        def state_dict(self) -> dict[str, Any]:
            inside.set()
            assert go_on.wait(30)
            return super().state_dict()

    task = asyncio.create_task(StateDictTrainerState({"part": Slow({})}).stage())
    assert await asyncio.to_thread(inside.wait, 30)
    task.cancel()
    await asyncio.sleep(0)
    assert not task.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
