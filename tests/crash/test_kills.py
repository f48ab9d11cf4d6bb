"""SIGKILL before and after every operation that changes a run folder: of a save, a retention, and a start."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.crash.forkserver import ForkPool, ForkServer
from tests.crash.lives import SCENARIOS

PUBLISHED = {
    "first": (
        "run/new/run",
        "rename run/new/run/checkpoints/step_0.tmp -> run/new/run/checkpoints/step_0 #0",
    ),
    "serial": ("run", "rename run/checkpoints/step_2.tmp -> run/checkpoints/step_2.1 #0"),
}
"""Where the run folder is, and which operation publishes; for a scenario that is not here, the next."""
SAVE = ("run", "rename run/checkpoints/step_2.tmp -> run/checkpoints/step_2 #0")

SETS_ASIDE = "rename run/checkpoints/step_2 -> run/checkpoints/aside-step_2-i00000002 #0"

PUBLISHES = {
    "first": ("", "step_0"),
    "save": ("step_1", "step_2"),
    "serial": ("step_2", "step_2.1"),
    "suspect": ("step_1", "step_1"),
    "leftovers": ("step_1", "step_2"),
    "corrupt": ("step_1", "step_2"),
    "aside": ("step_1", "step_2"),
}
"""What a start finds as the newest checkpoint, by whether the operation that publishes has happened."""

UNIQUE = ("leftovers", "corrupt", "aside", "suspect")
"""Scenarios of which only those operations are killed at that ``save`` does not have."""


@dataclass(frozen=True, slots=True)
class Past:
    """What the lives of a scenario start from, and what one does that nobody kills.

    Attributes:
        path: The folder to copy; the run folder is in it.
        labels: Its operations, in the order of one run.
        marks: How many of them came before what.
    """

    path: Path
    labels: list[str]
    marks: dict[str, Any]


@pytest.fixture(scope="module")
def pasts(pool: ForkPool, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Past]:
    """Build every scenario's past, and live each once without a kill."""
    found = {}
    for scenario in SCENARIOS:
        path = tmp_path_factory.mktemp(f"past-{scenario}")
        pool.call("tests.crash.lives:build", path=str(path / "run"), scenario=scenario).value()
        lived = tmp_path_factory.mktemp(f"lived-{scenario}") / "life"
        shutil.copytree(path, lived)
        value = pool.call("tests.crash.lives:live", path=str(lived / "run"), scenario=scenario).value()
        found[scenario] = Past(path, value.pop("labels"), value)
    return found


def has_happened(labels: list[str], operation: str, killed_at: str, when: str) -> bool:
    """Whether an operation was over when a life was killed."""
    if operation not in labels:
        return False
    at, of_operation = labels.index(killed_at), labels.index(operation)
    return at > of_operation or (at == of_operation and when == "after")


def points(pasts: dict[str, Past], scenario: str) -> list[str]:
    """Return the operations of a scenario to kill at: all of a save, and of the others what a save does not have.

    What goes into a temporary folder is the same files in every scenario.
    """
    past = pasts[scenario]
    labels = past.labels
    if scenario == "first":
        return [label for label in labels if "/step_0.tmp/" not in label]
    if scenario == "serial":
        return [label for label in labels[past.marks["saved"] :] if "/step_2.tmp/" not in label]
    if scenario in UNIQUE:
        known = set(pasts["save"].labels)
        return [label for label in labels if label not in known]
    return labels


GO_ON_EVERY = 4
"""After one kill in so many, the next life also trains, saves and is audited once more."""


@pytest.mark.timeout(240)  # nothing in it waits: it takes as long as the machine takes
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_kill_at_any_operation_leaves_a_whole_newest_checkpoint(
    scenario: str,
    when: str,
    pool: ForkPool,
    pasts: dict[str, Past],
    tmp_path: Path,
    tell: Callable[[str], None],
) -> None:
    """Before the rename that publishes the start finds the old checkpoint, after it the new one; nothing else is left."""
    past = pasts[scenario]
    run, publishes = PUBLISHED.get(scenario, SAVE)
    kills = list(enumerate(points(pasts, scenario)))

    def kill(server: ForkServer, point: tuple[int, str]) -> str:
        number, label = point
        place = tmp_path / str(number)
        shutil.copytree(past.path, place)
        ended = server.call(
            "tests.crash.lives:live", path=str(place / "run"), scenario=scenario, label=label, when=when
        )
        if not ended.killed:
            return f"{when} {label}: not killed, but {ended.code} {ended.error}"
        after = server.call(
            "tests.crash.lives:resume",
            path=str(place / run),
            planted=["step_2"] if scenario == "corrupt" else [],
            go_on=number % GO_ON_EVERY == 0,
        )
        shutil.rmtree(place)
        if after.code:
            return f"{when} {label}: {after.error}"
        expected = PUBLISHES[scenario][has_happened(past.labels, publishes, label, when)]
        if scenario == "aside" and not has_happened(past.labels, SETS_ASIDE, label, when):
            expected = "step_2"  # the other lineage's: nothing of it was undone yet
        found = after.result.get("name", "")
        return "" if found == expected else f"{when} {label}: {found!r} instead of {expected!r}"

    wrong = [said for said in pool.each(kills, kill) if said]

    tell(f"{len(kills)} kills")
    assert not wrong, f"{len(wrong)} of {len(kills)} kills:\n" + "\n".join(wrong[:10])
    assert kills


def test_the_points_cover_every_kind_of_operation(pasts: dict[str, Past]) -> None:
    """A sweep that missed the renames or the deletions would prove little."""
    everywhere = {label for scenario in SCENARIOS for label in points(pasts, scenario)}

    kinds = {label.split(" ")[0] for label in everywhere}

    assert kinds == {"create", "write", "truncate", "fsync", "close", "mkdir", "rename", "unlink", "rmdir"}
    for name in (
        "manifest.json", "trainer/model-00001-of-00001.safetensors", "rows-00000.safetensors", "lineage.jsonl",
        "incarnation", "run.lock", "trash-step_0", "trash-step_1", "corrupt-step_2", "aside-step_2", "step_2.suspect",
        "step_2.1", "violations.json", "trash-step_1.suspect",
    ):  # fmt: skip
        assert any(name in label for label in everywhere), name
