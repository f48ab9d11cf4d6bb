"""Lives of a run, to be cut short: each starts from what the one before left, saves, and is over.

The functions here run in children of the fork server. Everything in them is real but the prompts: the run folder with its
lock, counter and journal, the owners, the checkpointer, the restore, and a torch module whose every weight is the number
of the step, saved and loaded through :class:`~quiesce.checkpoint.trainer_state.StateDictTrainerState`. Rows live in memory:
a store's own files are no part of a save, and the next incarnation throws them away.

A life is one of :data:`SCENARIOS`; each has its own past (:func:`build`), and together they take every path on which a save,
a retention or a start changes the disk.
"""

from __future__ import annotations

import asyncio
import base64
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from quiesce.checkpoint.audit import audit
from quiesce.checkpoint.loading import (
    LoadedCheckpoint,
    checkpoint_info,
    find_checkpoints,
    load_checkpoint,
)
from quiesce.checkpoint.restore import RestoredRun, RestoreTargets, load_newest, restore_into
from quiesce.checkpoint.saver import SaveResult
from quiesce.checkpoint.trainer_state import StateDictTrainerState
from quiesce.errors import NothingToRestoreError, UnusableAuditPathError
from quiesce.samplers import WindowedSampler
from tests.crash.operations import Operation, Watch
from tests.save_rig import Rig, broken, staged_row

SCENARIOS = ("first", "save", "serial", "suspect", "leftovers", "corrupt", "aside")
"""What a life does, beside starting.

``first`` saves in a new folder; ``save`` goes on from a checkpoint, trains, saves and deletes the oldest; ``serial`` saves
twice at one step; ``suspect`` saves a cut that is refused, and replaces an older suspect; ``leftovers`` sweeps what dead
incarnations left; ``corrupt`` renames a corrupt newest checkpoint; ``aside`` goes on from an older checkpoint than the
newest.
"""

KEEP = 2

STAGED = "g0/c0 g0/c1 g1/final"
"""What comes back of a group in flight: every one has it."""

UNUSABLE = "g0/c3 g1/c0 g1/c1"
"""What it has staged besides, to no use."""


class Clock:
    """A part of the trainer's state that is no tensor."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        """Return it."""
        return {"step": self.step, "history": list(range(self.step))}

    def load_state_dict(self, state_dict: dict[str, Any], /) -> None:
        """Take it over."""
        self.step = state_dict["step"]
        assert state_dict["history"] == list(range(self.step))


class Life:
    """One incarnation of a run."""

    def __init__(self, path: Path, *, resume: bool, refuse: bool = False) -> None:
        import torch

        self.rig = Rig(path, resume=resume)
        self.module = torch.nn.Linear(3, 2)
        self.clock = Clock()
        self.trainer = StateDictTrainerState({"model": self.module, "clock": self.clock})
        self.options: dict[str, Any] = {"keep": KEEP, **({"verify": broken} if refuse else {})}
        self.rig.saver = self.rig.checkpointer(self.trainer, **self.options)
        self._learn(0)

    async def restore(self, loaded: LoadedCheckpoint) -> None:
        """Go on from a checkpoint, as the controller does."""
        rig = self.rig
        await self.trainer.load(loaded.trainer_directory)
        restored = await restore_into(
            loaded,
            RestoreTargets(
                staging=True,
                barrier=rig.barrier,
                sampler=WindowedSampler(rig.barrier),
                accounting=rig.accounting,
                spares=rig.spares,
                buffer=rig.buffer,
                ledger=rig.ledger,
                dataplane=rig.plane,
            ),
            incarnation=rig.run.incarnation,
        )
        state = loaded.state
        rig.run.record_restored(state)
        self._check_staged(restored)
        rig.cursor, rig.step, rig.position = restored.state.sampler.cursor, restored.step, restored.position
        rig.saver = rig.checkpointer(self.trainer, restored=state, **self.options)
        weights = {value for parameter in self.module.parameters() for value in parameter.flatten().tolist()}
        assert weights == {float(rig.step)}, f"weights of step {weights} in a checkpoint of step {rig.step}"
        assert self.clock.step == rig.step, (
            f"state of step {self.clock.step} in a checkpoint of step {rig.step}"
        )

    def _check_staged(self, restored: RestoredRun) -> None:
        """Every group in flight has its usable staged rows again, whatever the kill hit, and nobody else has any."""
        rig = self.rig
        expected = {one.group_id: tuple(rig.keys(one.group_id, STAGED)) for one in rig.ledger.records()}
        assert restored.staged == expected, f"staged rows {restored.staged} instead of {expected}"
        counted = [key for entry in rig.buffer.entries() for key in entry.keys]
        staged = [key for keys in expected.values() for key in keys]
        assert set(rig.plane.keys()) == {*counted, *staged}
        for key, row in zip(staged, rig.plane.get(staged), strict=True):
            assert np.array_equal(np.asarray(row["tokens"]), staged_row(key)["tokens"]), key

    async def train(self) -> None:
        """Take a step over the oldest ready group."""
        await self.rig.train([self.rig.buffer.ready()[0].group_id])
        self._learn(self.rig.step)

    async def work(self) -> None:
        """Finish a group, leave one in flight that has staged rows, take a step."""
        await self.rig.finished()
        await self.fly()
        await self.train()

    async def fly(self) -> None:
        """Read a prompt and stage rows of its group: chunks with a gap, and chunks beside a final row."""
        self.rig.stage(await self.rig.read(), f"{STAGED} {UNUSABLE}")

    async def save(self) -> SaveResult:
        """Save to the end."""
        return await self.rig.save()

    async def close(self) -> None:
        """End in order."""
        await self.rig.close()

    def _learn(self, step: int) -> None:
        import torch

        self.clock.step = step
        with torch.no_grad():
            for parameter in self.module.parameters():
                parameter.fill_(float(step))


# ------------------------------------------------------------------------------------------------------- the past


def build(path: str, scenario: str) -> None:
    """Write what a life of a scenario finds."""
    asyncio.run(_build(Path(path), scenario))


async def _build(path: Path, scenario: str) -> None:
    if scenario == "first":
        path.mkdir()
        return
    life = Life(path, resume=False)
    assert (await life.save()).outcome == "completed"
    for _ in range(2):
        await life.rig.finished()
    await life.work()
    assert (await life.save()).outcome == "completed"
    if scenario in {"corrupt", "aside"}:
        await life.work()
        life.options["keep"] = 9
        assert (await life.save()).outcome == "completed"
    if scenario == "suspect":
        life.rig.saver = life.rig.checkpointer(
            life.trainer, restored=load_newest(path).state, keep=KEEP, verify=broken
        )
        await life.fly()
        assert (await life.save()).outcome == "refused"
    await life.work()  # trained, and lost: the next life rolls it back
    await life.close()
    checkpoints = path / "checkpoints"
    if scenario == "corrupt":
        (checkpoints / "step_2" / "ledger.json").write_bytes(b"{}")
    if scenario == "leftovers":
        shutil.copytree(checkpoints / "step_1", checkpoints / "step_2.tmp-i00000001-cut-9")
        (checkpoints / "step_2.tmp-i00000001-cut-9" / "manifest.json").unlink()
        shutil.copytree(checkpoints / "step_0", checkpoints / "trash-step_0")
        (checkpoints / "trash-step_0" / "manifest.json").unlink()
        (path / ".incarnation.new").write_bytes(b"7")
        with (path / "lineage.jsonl").open("ab") as journal:
            journal.write(b'{"event":"tra')


# ------------------------------------------------------------------------------------------------------- the life


def live(
    path: str, scenario: str, label: str = "", when: str = "", *, record: bool = False
) -> dict[str, Any]:
    """Live a scenario to its end, or to an operation.

    Args:
        path: The run folder, as :func:`build` left it.
        scenario: Which one.
        label: The operation at which to be killed; "" for none.
        when: ``before`` or ``after`` it.
        record: Whether to return the operations with their data.

    Returns:
        ``labels`` of the operations, the ``started`` count of those before the first save, and with ``record`` the
        ``operations`` themselves; ``cuts`` that are published, by folder name.
    """

    def end(operation: Operation) -> None:
        if operation.label == label:
            os.kill(os.getpid(), signal.SIGKILL)

    nothing: Callable[[Operation], None] = lambda _: None  # noqa: E731 - two words
    watch = Watch(
        Path(path).parent,
        before=end if when == "before" else nothing,
        after=end if when == "after" else nothing,
    )
    marks: dict[str, int] = {}
    with watch.installed():
        asyncio.run(_live(Path(path), scenario, lambda mark: marks.update({mark: len(watch.seen)})))
    checkpoints = Path(path) / "checkpoints"
    cuts = {info.path.name: load_checkpoint(info).state.cut_id for info in find_checkpoints(checkpoints)}
    found: dict[str, Any] = {"labels": [operation.label for operation in watch.seen], "cuts": cuts, **marks}
    if record:
        found["operations"] = [encode(operation) for operation in watch.seen]
    return found


AUDITED = {
    "os.mkdir": "mkdir",
    "os.rename": "rename",
    "os.remove": "unlink",
    "os.rmdir": "rmdir",
    "os.truncate": "truncate",
}
"""What the interpreter reports of its own accord, whoever calls it, and what a watch calls it."""


def audited(path: str, scenario: str) -> dict[str, list[str]]:
    """Live a scenario, and compare what the watch saw with the interpreter's own audit events.

    Returns:
        ``reported`` changes of the folder, and those that are ``missing`` from what the watch saw.
    """
    root = str(Path(path).parent)
    reported: list[tuple[str, str]] = []

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event == "open":
            name, _, flags = args
            writing = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR) and flags & os.O_CREAT
            if isinstance(name, str) and writing and not os.path.lexists(name):
                reported.append(("create", name))
        elif event in AUDITED:
            name = args[0]
            # Reported before it is tried: what is not there cannot be deleted, and a descriptor has no name.
            absent = (
                event in {"os.remove", "os.rmdir"} and str(name).startswith("/") and not os.path.lexists(name)
            )
            if not absent and not isinstance(name, int):
                reported.append((AUDITED[event], str(name)))
        elif event in {"os.link", "os.symlink", "os.chmod", "os.chown", "os.utime", "shutil.move"}:
            reported.append((event, str(args[0])))

    watch = Watch(Path(root))
    sys.addaudithook(hook)
    with watch.installed():
        asyncio.run(_live(Path(path), scenario, lambda _: None))
    seen = {(operation.kind, os.path.basename(operation.path)) for operation in watch.seen}  # noqa: PTH119 - text
    # A name that is relative to a folder's descriptor comes without the folder, so names are compared by their last part.
    ours = [(kind, name) for kind, name in reported if name.startswith(root) or "/" not in name]
    missing = [
        f"{kind} {name}"
        for kind, name in ours
        if (kind, os.path.basename(name)) not in seen  # noqa: PTH119 - text
        and not (kind == "mkdir" and os.path.isdir(name))  # noqa: PTH112 - text; it was there, and stayed
    ]
    return {"reported": [f"{kind} {name}" for kind, name in ours], "missing": missing}


async def _live(path: Path, scenario: str, mark: Callable[[str], None]) -> None:
    if scenario == "first":
        life = Life(path / "new" / "run", resume=False)
        assert (await life.save()).outcome == "completed"
        mark("saved")
        await life.close()
        return
    life = Life(path, resume=True, refuse=scenario == "suspect")
    if scenario == "aside":
        info = checkpoint_info(path / "checkpoints" / "step_1")
        assert info is not None
        loaded = load_checkpoint(info)
    else:
        loaded = load_newest(path)
    await life.restore(loaded)
    await life.rig.saver.prepare()
    await life.work()
    mark("saving")
    result = await life.save()
    assert result.outcome == ("refused" if scenario == "suspect" else "completed"), result
    mark("saved")
    if scenario == "serial":
        await life.rig.finished()
        assert (await life.save()).outcome == "completed"
        mark("saved_again")
    await life.close()


def encode(operation: Operation) -> list[Any]:
    """Return an operation as JSON values."""
    data = base64.b64encode(operation.data).decode("ascii")
    return [operation.kind, operation.path, operation.target, data, operation.offset, operation.number]


def decode(value: list[Any]) -> Operation:
    """Return the operation that :func:`encode` got."""
    kind, path, target, data, offset, number = value
    return Operation(kind, path, target, base64.b64decode(data), offset, number)


# --------------------------------------------------------------------------------------------------- the life after


def resume(path: str, planted: list[str], *, go_on: bool = True) -> dict[str, Any]:
    """Do what the next start does, and prove that nothing was lost.

    Args:
        path: The run folder.
        planted: Names of checkpoints that are corrupt on purpose.
        go_on: Whether to train and save on, too.

    Returns:
        ``step``, ``cut`` and ``name`` of what was restored, or ``nothing`` if there was no checkpoint; the names that
        are ``left`` under ``checkpoints`` then.
    """
    return asyncio.run(_resume(Path(path), planted, go_on=go_on))


async def _resume(path: Path, planted: list[str], *, go_on: bool) -> dict[str, Any]:
    _check(path, planted)
    life = Life(path, resume=True)
    try:
        try:
            loaded = load_newest(path)
        except NothingToRestoreError:
            return {"nothing": True}
        state = loaded.state
        await life.restore(loaded)
        await life.rig.saver.prepare()
        left = life.rig.names()
        assert not [name for name in left if ".tmp-" in name or name.startswith("trash-")], left
        if go_on:
            await life.work()
            result = await life.save()
            assert result.outcome == "completed", result
            _check(path, [])
            assert load_newest(path).state.step == state.step + 1
        return {"step": state.step, "cut": state.cut_id, "name": loaded.info.path.name, "left": left}
    finally:
        await life.close()


def _check(path: Path, planted: list[str]) -> None:
    """Audit a run folder, every published checkpoint in it; only what is corrupt on purpose may be found."""
    try:
        report = audit(path)
    except UnusableAuditPathError:
        return  # no checkpoint yet
    found = [
        violation for violation in report.violations if violation.evidence.get("checkpoint") not in planted
    ]
    assert not found, found
