"""A loss of power at any moment of a save: whatever a kernel may have made durable by then, a whole checkpoint is left."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

import pytest

from quiesce.checkpoint.audit import audit
from quiesce.checkpoint.journal import read_journal
from quiesce.checkpoint.restore import load_newest
from quiesce.checkpoint.runfolder import RunFolder
from quiesce.errors import NothingToRestoreError, QuiesceError
from tests.crash import disk_model
from tests.crash.disk_model import Disk, Image
from tests.crash.forkserver import ForkPool
from tests.crash.lives import SCENARIOS, decode
from tests.crash.operations import Operation

SUBSETS = 30
"""Random images of each moment, beside the systematic ones."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """A life that nobody ended, operation by operation.

    Attributes:
        past: What it started from.
        run: The run folder, relative to the disk's root.
        operations: What it did.
        published: The name of what it published.
        before: What may be the newest checkpoint until then; "" is none.
    """

    past: Path
    run: str
    operations: tuple[Operation, ...]
    published: str
    before: frozenset[str]
    later: frozenset[Operation]

    @property
    def publishes(self) -> int:
        """Which operation first shows the final name."""
        final = f"{self.run}/checkpoints/{self.published}"
        return next(
            number
            for number, operation in enumerate(self.operations)
            if final in {operation.path, operation.target}
        )

    @property
    def durable(self) -> int:
        """Which operation is the last one before the save may say that it is over."""
        return next(number for number, operation in enumerate(self.operations) if operation in self.later) - 1


@dataclass(slots=True)
class Explored:
    """What came of trying the images of a recorded life.

    Attributes:
        images: Distinct images.
        loaded: Those that differ in what a start reads, each of which was loaded.
        wrong: What did not hold, with the operation after which it did not.
    """

    images: int = 0
    loaded: int = 0
    wrong: list[str] = field(default_factory=list)


@pytest.fixture(scope="module", params=SCENARIOS)
def recorded(
    request: pytest.FixtureRequest, pool: ForkPool, tmp_path_factory: pytest.TempPathFactory
) -> Recorded:
    """Record a life of each scenario."""
    return record(request.param, pool, tmp_path_factory.mktemp("recorded"))


@pytest.fixture(scope="module")
def saved(pool: ForkPool, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """Record a life that goes on, saves, and deletes the oldest."""
    return record("save", pool, tmp_path_factory.mktemp("recorded"))


def record(scenario: str, pool: ForkPool, tmp: Path) -> Recorded:
    """Build a past, keep a copy, live it."""
    past, lived = tmp / "past", tmp / "lived"
    past.mkdir()
    pool.call("tests.crash.lives:build", path=str(past / "run"), scenario=scenario).value()
    shutil.copytree(past, lived)
    value = pool.call(
        "tests.crash.lives:live", path=str(lived / "run"), scenario=scenario, record=True
    ).value()
    published = {"first": "step_0", "serial": "step_2.1", "suspect": "step_2.suspect"}.get(scenario, "step_2")
    before = {"first": {""}, "serial": {"step_1", "step_2"}, "aside": {"step_1", "step_2"}}
    run = "run/new/run" if scenario == "first" else "run"
    operations = tuple(map(decode, value["operations"]))
    renamed = next(
        number
        for number, operation in enumerate(operations)
        if operation.target == f"{run}/checkpoints/{published}"
    )
    assert (operations[renamed + 1].kind, operations[renamed + 1].path) == ("fsync", f"{run}/checkpoints")
    return Recorded(
        past,
        run,
        operations,
        published,
        frozenset(before.get(scenario, {"step_1"})),
        frozenset(operations[renamed + 2 :]),
    )


# ---------------------------------------------------------------------------------------------------- the oracle


def explore(
    recorded: Recorded, place: Path, *, subsets: int = SUBSETS, since: int = -1, stop_at_first: bool = False
) -> Explored:
    """Lose power after every operation, in every way that the model has, and start again each time.

    Args:
        recorded: The life.
        place: Where images are put.
        subsets: Random images of each moment.
        since: The first operation after which to look.
        stop_at_first: Whether one wrong image is enough.
    """
    disk = Disk(recorded.past)
    found = Explored()
    asked: set[tuple[str, bool, bool]] = set()
    judged: set[tuple[str, bool, bool]] = set()
    published, durable = recorded.publishes, recorded.durable
    for number in range(-1, len(recorded.operations)):
        if number >= 0:
            disk.apply(recorded.operations[number])
        if number < since:
            continue
        for image in disk.images(number, subsets):
            name = disk_model.digest(image)
            moment = (name, number >= published, number >= durable)
            if moment in asked:
                continue
            asked.add(moment)
            told = (disk_model.digest(_read_by_a_start(image)), *moment[1:])
            if told in judged:
                continue
            judged.add(told)
            found.loaded += 1
            problem = _judge(recorded, image, place / str(found.loaded), told[1], told[2])
            if problem:
                after = recorded.operations[number].label if number >= 0 else "the start"
                found.wrong.append(f"after {after}: {problem}")
                if stop_at_first:
                    return found
    found.images = len({name for name, _, _ in asked})
    return found


def _read_by_a_start(image: Image) -> Image:
    """Leave out what a start only deletes."""
    return {
        name: content
        for name, content in image.items()
        if not any(".tmp-" in part or part.startswith("trash-") for part in PurePosixPath(name).parts)
    }


def _judge(recorded: Recorded, image: Image, place: Path, may_be_new: bool, must_be_new: bool) -> str:  # noqa: FBT001 - what the moment allows
    """Start from an image; return what is wrong, or ""."""
    disk_model.write(_read_by_a_start(image), place)
    run = place / recorded.run
    try:
        return _start(recorded, run, may_be_new, must_be_new)
    except (QuiesceError, AssertionError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        shutil.rmtree(place)


def _start(recorded: Recorded, run: Path, may_be_new: bool, must_be_new: bool) -> str:  # noqa: FBT001 - as above
    checkpoints = run / "checkpoints"
    allowed = {*recorded.before, *([recorded.published] if may_be_new else [])}
    if must_be_new:
        allowed = {recorded.published}
    if recorded.published.endswith(".suspect"):
        kept = sorted(path.name for path in checkpoints.glob("*.suspect"))
        if must_be_new and kept != [recorded.published]:
            return f"{kept} instead of the new suspect"
        allowed = {*recorded.before}
    try:
        name = load_newest(run, rename_corrupt=False).info.path.name
    except NothingToRestoreError:
        name = ""
    if name not in allowed:
        return f"{name or 'nothing'} is the newest, not one of {sorted(allowed)}"
    if not name:
        return ""
    # The audit loads every published checkpoint: one that is not whole is a finding.
    report = audit(run)
    planted = _planted(recorded)
    broken = [found for found in report.violations if found.evidence.get("checkpoint") != planted]
    if broken:
        return f"the audit finds {broken[0]}"
    with RunFolder.open(run, resume=True) as folder:
        if folder.next_incarnation() <= max(known.incarnation or 0 for known in report.checkpoints):
            return f"incarnation {folder.incarnation} was used before"
        read_journal(folder.journal.path)
    return ""


def _planted(recorded: Recorded) -> str:
    """Return the checkpoint that is corrupt from the start, where there is one."""
    ledger = recorded.past / "run" / "checkpoints" / "step_2" / "ledger.json"
    return "step_2" if ledger.is_file() and ledger.read_bytes() == b"{}" else ""


# ------------------------------------------------------------------------------------------------------ the claims


def test_a_loss_of_power_at_any_moment_leaves_a_whole_newest_checkpoint(
    recorded: Recorded,
    tmp_path: Path,
    tell: Callable[[str], None],
) -> None:
    """Every published name is whole in every image; the newest is the old or the new one, and the new one once reported."""
    found = explore(recorded, tmp_path)

    tell(f"{found.images} disk images, {found.loaded} of them different to a start")
    assert not found.wrong, f"{len(found.wrong)} of {found.loaded} images:\n" + "\n".join(found.wrong[:10])
    assert found.images > len(recorded.operations)
    assert found.loaded > 10


def without(operations: Iterable[Operation], fits: Callable[[Operation], bool]) -> tuple[Operation, ...]:
    """Leave operations out; at least one."""
    operations = tuple(operations)
    left = tuple(operation for operation in operations if not fits(operation))
    assert len(left) < len(operations), "the mutant changed nothing"
    return left


def every_sync(recorded: Recorded) -> list[str]:
    """Return each path of a checkpoint that a save syncs."""
    from_save = [
        operation
        for operation in recorded.operations
        if operation.kind == "fsync" and "checkpoints" in operation.path
    ]
    return list(dict.fromkeys(operation.path for operation in from_save))


def survivors(saved: Recorded, mutants: Iterable[tuple[str, tuple[Operation, ...]]], tmp: Path) -> list[str]:
    """Return the mutants in which no image shows anything wrong."""
    lived = []
    for number, (name, operations) in enumerate(mutants):
        place = tmp / str(number)
        place.mkdir()
        mutant = replace(saved, operations=operations)
        since = min(mutant.publishes, saved.publishes)
        if not explore(mutant, place, subsets=4, since=since, stop_at_first=True).wrong:
            lived.append(name)
    return lived


def test_a_save_that_forgets_any_one_of_its_syncs_is_caught(
    saved: Recorded, tmp_path: Path, tell: Callable[[str], None]
) -> None:
    """Not one fsync of a file or a folder of a checkpoint is there for nothing, and the model misses none."""
    mutants = [
        (path, tuple(op for op in saved.operations if (op.kind, op.path) != ("fsync", path)))
        for path in every_sync(saved)
    ]

    lived = survivors(saved, mutants, tmp_path)

    tell(f"{len(mutants) - len(lived)} of {len(mutants)} mutants caught")
    assert lived == []
    assert len(mutants) == 14


def moved(recorded: Recorded, what: Callable[[Operation], bool], to: int) -> tuple[Operation, ...]:
    """Do operations at another time: before the operation with that number."""
    chosen = [operation for operation in recorded.operations if what(operation)]
    assert chosen, "the mutant changed nothing"
    before = [operation for operation in recorded.operations[:to] if not what(operation)]
    return (*before, *chosen, *(operation for operation in recorded.operations[to:] if not what(operation)))


def of(kind: str, part: str, target: str = "") -> Callable[[Operation], bool]:
    """Tell operations of a kind about a path."""
    return lambda operation: operation.kind == kind and part in operation.path and target in operation.target


def in_place(recorded: Recorded) -> tuple[Operation, ...]:
    """Write under the final name from the start, as a save without a temporary folder would."""
    temporary = recorded.operations[recorded.publishes].path
    final = recorded.operations[recorded.publishes].target
    return tuple(
        replace(operation, path=operation.path.replace(temporary, final))
        for number, operation in enumerate(recorded.operations)
        if number != recorded.publishes
    )


def test_a_save_in_another_order_is_caught(
    saved: Recorded, tmp_path: Path, tell: Callable[[str], None]
) -> None:
    """Renaming too early, writing in place, deleting before writing, forgetting the journal or the counter: all are seen."""
    rename = saved.publishes
    first_of_save = next(
        number for number, operation in enumerate(saved.operations) if of("mkdir", ".tmp-")(operation)
    )
    manifest = next(
        number for number, operation in enumerate(saved.operations) if of("fsync", "manifest.json")(operation)
    )
    temporary = saved.operations[rename].path
    mutants = [
        (
            "the rename before the manifest is synced",
            moved(saved, lambda op: op is saved.operations[rename], manifest),
        ),
        (
            "the rename before anything is synced",
            tuple(
                op for op in saved.operations if not (op.kind == "fsync" and op.path.startswith(temporary))
            ),
        ),
        ("written in place, without a temporary folder", in_place(saved)),
        (
            "written in place, manifest first",
            manifest_first(saved, first_of_save),
        ),
        (
            "the oldest deleted without a rename",
            tuple(
                op if "trash-step_0" not in op.path else _under(op, "trash-step_0", "step_0")
                for op in without(saved.operations, of("rename", "step_0", "trash-"))
            ),
        ),
        (
            "the oldest deleted before its new name is durable",
            without(
                saved.operations,
                lambda op: op in saved.later and op.kind == "fsync" and op.path == "run/checkpoints",
            ),
        ),
        ("deleted before the new one is durable", deleted_first(saved, first_of_save)),
        (
            "the journal is not synced before publishing",
            without(saved.operations, of("fsync", "lineage.jsonl")),
        ),
        ("the counter is not synced", without(saved.operations, of("fsync", ".incarnation.new"))),
    ]

    lived = survivors(saved, mutants, tmp_path)

    tell(f"{len(mutants) - len(lived)} of {len(mutants)} mutants caught")
    assert lived == []


def manifest_first(recorded: Recorded, first_of_save: int) -> tuple[Operation, ...]:
    """Write in place, with the manifest before what it lists."""
    operations = in_place(recorded)
    chosen = [op for op in operations if "step_2/manifest.json" in op.path]
    rest = [op for op in operations if op not in chosen]
    return (*rest[: first_of_save + 1], *chosen, *rest[first_of_save + 1 :])


def deleted_first(recorded: Recorded, first_of_save: int) -> tuple[Operation, ...]:
    """Delete all that was there, then write, as a run that keeps one and is short of disk might."""
    past = recorded.past / "run" / "checkpoints" / "step_1"
    gone = []
    for path in sorted(past.rglob("*"), reverse=True):
        name = f"run/checkpoints/step_1/{path.relative_to(past)}"
        gone.append(Operation("rmdir" if path.is_dir() else "unlink", name))
    gone += [Operation("rmdir", "run/checkpoints/step_1"), Operation("fsync", "run/checkpoints")]
    operations = [replace(op) for op in recorded.operations]
    return (*operations[:first_of_save], *gone, *operations[first_of_save:])


def _under(operation: Operation, old: str, new: str) -> Operation:
    return replace(operation, path=operation.path.replace(old, new))
