"""The trainer: a step writes advantages back, moves the weights once, and can be resumed."""

from __future__ import annotations

import asyncio
import copy
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import pytest
import pytest_asyncio
import torch
from torch import Tensor

from quiesce import BufferEntry, PromptRef, RowKey, TrainBatch
from quiesce_grpo.config import GrpoConfig
from quiesce_grpo.errors import BatchError
from quiesce_grpo.grpo import group_advantages
from quiesce_grpo.policy import Policy, build_policy
from quiesce_grpo.sampling import token_logprobs
from quiesce_grpo.tokenizer import Tokenizer
from quiesce_grpo.trainer import GrpoTrainer
from tests.unit.grpo.conftest import MODEL

Row = dict[str, Tensor]
Build = Callable[..., GrpoTrainer]


class Written:
    """Records what a step writes back, and lets a test look at that moment."""

    def __init__(self) -> None:
        self.fields: list[Mapping[RowKey, Mapping[str, Any]]] = []
        self.then: Callable[[], None] = lambda: None

    async def __call__(self, fields: Mapping[RowKey, Mapping[str, Any]]) -> None:
        """Take the place of the controller's write-back slot."""
        self.fields.append(fields)
        self.then()


def batch_of(
    groups: Sequence[Sequence[Row]],
    written: Written | None = None,
    *,
    version: int = 3,
    start_version: int = 1,
) -> TrainBatch:
    """Return a batch of groups of rows."""
    entries = []
    for place, rows in enumerate(groups):
        prompt = PromptRef(epoch=0, position=place, index=place)
        entries.append(
            BufferEntry(
                group_id=prompt.group_id,
                admission_id=0,
                prompt=prompt,
                attempt=0,
                target_step=None,
                start_version=start_version,
                generated_from=start_version + 1,
                generated_to=start_version + 1,
                keys=tuple(RowKey(1, prompt.group_id, generation, 0) for generation in range(len(rows))),
            )
        )
    return TrainBatch(
        step=5,
        version=version,
        entries=tuple(entries),
        rows=tuple(tuple(rows) for rows in groups),
        _write_back=written or Written(),
    )


@pytest.fixture
def groups(policy: Policy, tokenizer: Tokenizer) -> list[list[Row]]:
    """Two groups of three rows of different lengths, on policy; the second one's rewards are equal."""
    made = []
    for prompt, rewards in (("1 + 2 =", [1.0, 0.0, 0.5]), ("9 - 4 - 1 =", [0.25, 0.25, 0.25])):
        rows = []
        for text, reward in zip(("3", "12", "-456"), rewards, strict=True):
            tokens = [*tokenizer.encode(text), tokenizer.eos_id]
            with torch.no_grad():
                scored = token_logprobs(policy, [tokenizer.encode(prompt)], [tokens], temperature=1.0)
            rows.append(
                {
                    "prompt_tokens": torch.tensor(tokenizer.encode(prompt), dtype=torch.int32),
                    "completion_tokens": torch.tensor(tokens, dtype=torch.int32),
                    "behaviour_logprobs": scored.logprobs[0].clone(),
                    "reward": torch.tensor([reward]),
                }
            )
        made.append(rows)
    return made


@pytest_asyncio.fixture
async def build(policy: Policy) -> AsyncIterator[Build]:
    """Build trainers of the policy (or a given one) that are closed at the end."""
    trainers: list[GrpoTrainer] = []

    def built(of: Policy | None = None, *, seed: int = 0, **settings: Any) -> GrpoTrainer:  # noqa: ANN401 - fields of GrpoConfig
        config = GrpoConfig(**{"learning_rate": 1e-2, "lr_warmup_steps": 0, **settings})
        trainers.append(GrpoTrainer(of or policy, config, temperature=1.0, max_new_tokens=6, seed=seed))
        return trainers[-1]

    yield built
    for trainer in trainers:
        trainer.close()


def differs(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Return whether any weight differs."""
    return any(not torch.equal(one[name], other[name]) for name in one)


async def test_advantages_are_written_back_before_the_weights_move(
    build: Build, policy: Policy, groups: list[list[Row]]
) -> None:
    """One field of shape [1] for each row, under its own key, while the weights are still the old ones."""
    trainer, written = build(), Written()
    before = policy.weights()
    at_write_back: list[Mapping[str, Tensor]] = []
    written.then = lambda: at_write_back.append(policy.weights())

    await trainer.train_step(batch_of(groups, written))

    (fields,) = written.fields
    expected = torch.cat(
        [group_advantages(torch.tensor([1.0, 0.0, 0.5])), group_advantages(torch.tensor([0.25, 0.25, 0.25]))]
    )
    torch.testing.assert_close(torch.cat([row["advantage"] for row in fields.values()]), expected)
    assert [key.generation for key in fields] == [0, 1, 2, 0, 1, 2]
    assert {tuple(row["advantage"].shape) for row in fields.values()} == {(1,)}
    assert not differs(before, at_write_back[0])
    assert differs(before, policy.weights())


async def test_advantages_that_are_there_are_not_written_again(build: Build, groups: list[list[Row]]) -> None:
    """Rows are immutable: what an earlier try of the step wrote stays, and no slot is taken for nothing."""
    written = Written()
    for group in groups:
        for row in group:
            row["advantage"] = torch.zeros(1)

    await build().train_step(batch_of(groups, written))

    assert written.fields == []


async def test_a_step_raises_the_probability_of_what_was_better(
    build: Build, policy: Policy, groups: list[list[Row]]
) -> None:
    """The best completion of the first group gains, the worst one loses."""
    trainer = build(learning_rate=1e-3)
    prompts = [row["prompt_tokens"].tolist() for row in groups[0]]
    completions = [row["completion_tokens"].tolist() for row in groups[0]]

    await trainer.train_step(batch_of(groups))

    with torch.no_grad():
        now = token_logprobs(policy, prompts, completions, temperature=1.0).logprobs.sum(-1)
    before = torch.stack([row["behaviour_logprobs"].sum() for row in groups[0]])
    assert float(now[0] - before[0]) > 0 > float(now[1] - before[1])


async def test_groups_without_differences_move_nothing(
    build: Build, policy: Policy, groups: list[list[Row]]
) -> None:
    """Zero advantages give a zero gradient, and the metrics say so."""
    before = policy.weights()

    metrics = await build().train_step(batch_of([groups[1]]))

    assert metrics["constant_groups"] == 1.0
    assert metrics["grad_norm"] == 0.0
    assert not differs(before, policy.weights())


async def test_metrics_say_what_the_batch_was(build: Build, groups: list[list[Row]]) -> None:
    """On policy: ratio and weight one, no drift; rewards, staleness and tokens as they are in the batch."""
    metrics = await build().train_step(batch_of(groups, version=3, start_version=1))

    assert metrics["reward"] == pytest.approx((1.5 + 0.75) / 6)
    assert metrics["staleness"] == 2.0
    assert metrics["weights_lag"] == 1.0
    assert metrics["constant_groups"] == 0.5
    assert metrics["tokens"] == 2 * (2 + 3 + 5)
    assert metrics["ratio"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["importance_weight"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["kl"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["clip_fraction"] == metrics["skipped_updates"] == 0.0
    assert metrics["entropy"] > 0.0


async def test_a_batch_in_pieces_is_the_same_step(
    build: Build, policy: Policy, tokenizer: Tokenizer, groups: list[list[Row]]
) -> None:
    """Gradients accumulated over two rows at a time equal those of all at once."""
    other = build_policy(MODEL, tokenizer, seed=7)

    whole = await build().train_step(batch_of(groups))
    pieces = await build(other, rows_per_forward=2).train_step(batch_of(groups))

    assert pieces["loss"] == pytest.approx(whole["loss"], abs=1e-6)
    assert pieces["grad_norm"] == pytest.approx(whole["grad_norm"], rel=1e-4)
    assert pieces["entropy"] == pytest.approx(whole["entropy"], rel=1e-4)


@pytest.mark.parametrize("correction", ["sequence", "decoupled"])
async def test_several_updates_a_batch_are_several_optimizer_steps(
    build: Build, groups: list[list[Row]], correction: str
) -> None:
    """Three parts of a batch move the schedule by three, and later parts see ratios that moved."""
    trainer = build(updates_per_batch=3, correction=correction)

    metrics = await trainer.train_step(batch_of([groups[0]]))

    assert trainer.scheduler.last_epoch == 3
    assert metrics["tokens"] == 2 + 3 + 5
    assert metrics["kl"] > 0.0


async def test_the_kl_penalty_pulls_towards_the_policy_that_training_began_with(
    build: Build, groups: list[list[Row]]
) -> None:
    """The reference does not move with the policy and is a part of the checkpoint."""
    trainer = build(kl_coefficient=0.1)

    first = await trainer.train_step(batch_of(groups))
    second = await trainer.train_step(batch_of(groups))

    assert first["kl_reference"] == pytest.approx(0.0, abs=1e-6)
    assert second["kl_reference"] > 1e-6
    assert "reference" in trainer.state()
    assert "reference" not in build().state()


async def test_the_learning_rate_rises_and_falls_as_configured(build: Build, groups: list[list[Row]]) -> None:
    """Two steps up, two steps down to half."""
    trainer = build(learning_rate=1e-3, lr_warmup_steps=2, lr_decay_steps=2, lr_final_fraction=0.5)

    rates = [(await trainer.train_step(batch_of(groups)))["learning_rate"] for _ in range(6)]

    assert rates == pytest.approx([0.5e-3, 1e-3, 1e-3, 0.75e-3, 0.5e-3, 0.5e-3])


async def test_a_gradient_that_is_not_finite_is_skipped_and_counted(
    build: Build, policy: Policy, groups: list[list[Row]]
) -> None:
    """One bad row costs its update, not the weights."""
    groups[0][0]["behaviour_logprobs"][0] = float("nan")
    before = policy.weights()

    metrics = await build().train_step(batch_of(groups))

    assert metrics["skipped_updates"] == 1.0
    assert not differs(before, policy.weights())


async def test_a_row_that_lacks_a_field_is_named(build: Build, groups: list[list[Row]]) -> None:
    """By step, group and field, before anything is written or moved."""
    written = Written()
    del groups[1][0]["behaviour_logprobs"]

    with pytest.raises(BatchError, match="step 5, group e000-p0000001: a row lacks behaviour_logprobs"):
        await build().train_step(batch_of(groups, written))

    assert written.fields == []


async def test_a_row_whose_fields_do_not_fit_together_is_named(build: Build, groups: list[list[Row]]) -> None:
    """One log-probability for each completion token."""
    groups[0][1]["behaviour_logprobs"] = torch.zeros(7)

    with pytest.raises(BatchError, match="3 completion tokens and 7 log-probabilities"):
        await build().train_step(batch_of(groups))


async def test_an_empty_batch_is_refused(build: Build) -> None:
    """A step without groups is passed by the controller, never trained."""
    with pytest.raises(BatchError, match="no row to train on"):
        await build().train_step(batch_of([]))


async def test_a_cancelled_step_is_seen_through(
    build: Build, policy: Policy, groups: list[list[Row]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever saves after the cancellation finds the optimizer's step complete, never half-made."""
    trainer = build()
    began, release = threading.Event(), threading.Event()
    inner = Policy.logits

    def logits(of: Policy, *arguments: Any, **named: Any) -> Tensor:  # noqa: ANN401 - passed on
        began.set()
        assert release.wait(30.0)
        return inner(of, *arguments, **named)

    monkeypatch.setattr(Policy, "logits", logits)
    before = policy.weights()
    task = asyncio.create_task(trainer.train_step(batch_of(groups)))
    assert await asyncio.to_thread(began.wait, 30.0)

    task.cancel()
    await asyncio.sleep(0)
    still_running = not task.done()
    release.set()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert still_running
    assert differs(before, policy.weights())
    assert trainer.scheduler.last_epoch == 1


async def test_a_loaded_trainer_goes_on_exactly_where_the_saved_one_was(
    build: Build, tokenizer: Tokenizer, groups: list[list[Row]]
) -> None:
    """Model, optimizer, schedule and shuffle together: the next step gives bit-identical weights."""
    settings = {"updates_per_batch": 2, "lr_warmup_steps": 3}
    saved = build(**settings)
    await saved.train_step(batch_of(groups))
    state = {name: copy.deepcopy(part.state_dict()) for name, part in saved.state().items()}

    loaded = build(build_policy(MODEL, tokenizer, seed=1234), seed=77, **settings)
    for name, part in loaded.state().items():
        part.load_state_dict(state[name])
    first = await saved.train_step(batch_of(groups))
    second = await loaded.train_step(batch_of(groups))

    assert first == second
    assert not differs(saved.policy.weights(), loaded.policy.weights())


async def test_the_optimizers_state_is_complete_before_its_first_step_and_changes_nothing(
    build: Build, policy: Policy, tokenizer: Tokenizer, groups: list[list[Row]]
) -> None:
    """The entries of step 0 are those of step 1, and the first step is that of an optimizer without any."""
    other = build_policy(MODEL, tokenizer, seed=7)
    filled, lazy = build(), build(other)
    lazy.optimizer.state.clear()
    at_start = filled.optimizer.state_dict()["state"]
    names = {place: set(values) for place, values in at_start.items()}

    await filled.train_step(batch_of(groups))
    await lazy.train_step(batch_of(groups))

    assert names == {place: set(values) for place, values in filled.optimizer.state_dict()["state"].items()}
    assert len(names) == len(list(policy.model.parameters()))
    assert not differs(policy.weights(), other.weights())


async def test_weights_are_handed_over_as_a_copy(build: Build, groups: list[list[Row]]) -> None:
    """The next step does not change what the engine was given."""
    trainer = build()
    handed = await trainer.weights()
    before = {name: value.clone() for name, value in handed.items()}

    await trainer.train_step(batch_of(groups))

    assert not differs(before, handed)
    assert differs(before, await trainer.weights())
