"""Tasks: deterministic prompts, verifiable rewards."""

from __future__ import annotations

import pickle

import pytest

from quiesce.errors import ConfigError
from quiesce_grpo.config import TaskConfig
from quiesce_grpo.errors import RewardError
from quiesce_grpo.tasks import Task, TaskItem


@pytest.mark.parametrize(
    "config", [TaskConfig(size=30), TaskConfig(name="gsm_symbolic", size=30, prompt="question", options={})]
)
def test_an_index_decides_the_prompt_in_any_process_and_order(config: TaskConfig) -> None:
    """Two datasets, one read backwards and one that went through pickle, hold the same prompts."""
    forwards, other = Task(config), pickle.loads(pickle.dumps(Task(config)))  # noqa: S301 - what a loader's worker does
    assert isinstance(other, Task)

    backwards = [other[index] for index in reversed(range(30))]

    assert [forwards[index] for index in range(30)] == backwards[::-1]


def test_the_seed_changes_the_prompts() -> None:
    """Another seed reads other prompts."""
    first = [Task(TaskConfig(size=20, seed=1))[index].prompt for index in range(20)]
    second = [Task(TaskConfig(size=20, seed=99))[index].prompt for index in range(20)]

    assert first != second


def test_the_prompt_of_chain_sum_is_the_bare_expression(task: Task) -> None:
    """Nothing but digits, one operator and the equals sign."""
    item = task[0]

    left, operator, right, equals = item.prompt.split()
    value = int(left) + int(right) if operator == "+" else int(left) - int(right)

    assert equals == "="
    assert item.answer == str(value)


def test_a_question_in_words_is_the_other_form() -> None:
    """The same task can be asked in words."""
    item = Task(TaskConfig(size=3, prompt="question"))[0]

    assert item.prompt.startswith("State the final answer")


def test_a_right_answer_earns_one_and_blanks_do_not_matter(task: Task) -> None:
    """The score is the task's own, on the stripped text."""
    item = task[3]

    assert task.score(item, f" {item.answer} ") == 1.0


def test_a_wrong_answer_earns_nothing_and_a_near_one_a_share(task: Task) -> None:
    """The right answer inside a longer text earns the share of it that is right."""
    item = TaskItem(index=0, prompt="1 + 2 =", answer="3", entry={"answer": "3"})

    assert task.score(item, "4") == 0.0
    assert task.score(item, "") == 0.0
    assert task.score(item, "13") == pytest.approx(0.5)


def test_a_score_that_is_no_number_is_refused(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken scorer is an error that names the task and the prompt, not a NaN in the loss."""
    monkeypatch.setattr(
        "reasoning_gym.arithmetic.chain_sum.ChainSumDataset.score_answer", lambda *_: float("nan")
    )

    with pytest.raises(RewardError, match="chain_sum scored prompt 2 with nan"):
        task.score(task[2], "1")


@pytest.mark.parametrize("index", [-1, 50])
def test_an_index_outside_the_epoch_is_refused(task: Task, index: int) -> None:
    """reasoning-gym would make up a prompt for any index."""
    with pytest.raises(IndexError, match=str(index)):
        task[index]


@pytest.mark.parametrize(
    "config, key",
    [
        (TaskConfig(name="no_such_task", options={}), "task.name"),
        (TaskConfig(options={"min_term": 2}), "task.options"),
        (TaskConfig(options={"min_terms": 0}), "task.options"),
        (TaskConfig(name="gsm_symbolic", options={}, prompt="expression"), "task.prompt"),
    ],
)
def test_an_impossible_task_is_refused_by_the_name_of_its_key(config: TaskConfig, key: str) -> None:
    """What reasoning-gym refuses is reported under the key that caused it."""
    with pytest.raises(ConfigError) as caught:
        Task(config)

    assert str(caught.value).startswith(f"{key}: ")
