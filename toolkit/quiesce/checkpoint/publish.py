"""Making a written cut the newest checkpoint, in one rename.

Rule: the manifest is the last file, the rename is the last step, and everything before it is durable by then,
so a crash leaves either the previous newest checkpoint or the new one. Whoever is not the current incarnation
touches nothing. Nothing here suspends: it blocks, and belongs in a thread.

A checkpoint of the same lineage is never replaced: a further cut at its step gets the next serial. A folder
that another lineage left and that would count as newer is renamed aside, because it holds a future that did
not happen.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from quiesce.checkpoint import files
from quiesce.checkpoint.documents import MANIFEST, Manifest, parse_manifest
from quiesce.checkpoint.runfolder import CheckpointName
from quiesce.errors import DocumentError

if TYPE_CHECKING:
    from collections.abc import Collection

    from quiesce.checkpoint.runfolder import RunFolder

__all__ = [
    "SUSPECT_SUFFIX",
    "publish",
    "publish_suspect",
    "read_manifest",
    "retire",
    "set_newer_aside",
    "set_undone_aside",
]

SUSPECT_SUFFIX: Final = ".suspect"


def publish(run: RunFolder, folder: Path, manifest: Manifest, lineage: Collection[str]) -> Path:
    """Publish a written cut.

    Args:
        run: The run folder.
        folder: The temporary folder, complete but for the manifest.
        manifest: The manifest.
        lineage: The published cuts that this run descends from.

    Returns:
        Where it is now.

    Raises:
        IncarnationSupersededError: If a later incarnation has started.
        OSError: If the disk refuses.
    """
    _seal(run, folder, manifest)
    run.check_incarnation()
    name = _free_name(run, manifest, lineage)
    set_newer_aside(run, name, lineage, others_only=False)
    target = run.checkpoints / str(name)
    run.check_incarnation()
    files.rename(folder, target)
    files.fsync_folder(run.checkpoints)
    return target


def publish_suspect(run: RunFolder, folder: Path, manifest: Manifest) -> Path:
    """Keep a cut that broke a critical invariant where no restore finds it; the suspect before it goes.

    Raises:
        IncarnationSupersededError: If a later incarnation has started.
        OSError: If the disk refuses.
    """
    _seal(run, folder, manifest)
    run.check_incarnation()
    target = run.checkpoints / f"step_{manifest.step}{SUSPECT_SUFFIX}"
    for known in sorted(run.checkpoints.glob(f"step_*{SUSPECT_SUFFIX}")):
        retire(run, known)
    run.check_incarnation()
    files.rename(folder, target)
    files.fsync_folder(run.checkpoints)
    return target


def retire(run: RunFolder, path: Path) -> None:
    """Delete a checkpoint: a rename first, so that a crash leaves a whole checkpoint or none under its name.

    Raises:
        OSError: If the disk refuses; what could not be deleted is swept at the next start.
    """
    trash = _unused(run.checkpoints, f"trash-{path.name}")
    files.rename(path, trash)
    files.fsync_folder(run.checkpoints)
    files.remove_tree(trash)


def set_newer_aside(
    run: RunFolder, name: CheckpointName, lineage: Collection[str], *, others_only: bool = True
) -> list[Path]:
    """Rename away what another lineage published and would be found instead of ``name``.

    Args:
        run: The run folder.
        name: The newest checkpoint that is to count.
        lineage: The published cuts that this run descends from.
        others_only: Whether a folder with that very name stays.

    Returns:
        Where they are now.

    Raises:
        OSError: If the disk refuses.
    """
    moved = []
    for known in run.published():
        if known < name or (others_only and known == name) or _is_ours(run, known, lineage):
            continue
        aside = _unused(run.checkpoints, f"aside-{known}-i{run.incarnation:08d}")
        files.rename(run.checkpoints / str(known), aside)
        moved.append(aside)
    if moved:
        files.fsync_folder(run.checkpoints)
    return moved


def set_undone_aside(run: RunFolder, cut_id: str, step: int, lineage: Collection[str]) -> list[Path]:
    """Rename away what a restore of a cut undoes: what another lineage published that counts as newer.

    Args:
        run: The run folder.
        cut_id: The restored cut.
        step: Its step.
        lineage: The published cuts that this run descends from, that one included.

    Returns:
        Where they are now.

    Raises:
        OSError: If the disk refuses.
    """
    restored = max(
        (
            name
            for name in run.published()
            if (manifest := read_manifest(run.checkpoints / str(name))) is not None
            and manifest.cut_id == cut_id
        ),
        default=CheckpointName(step),
    )
    return set_newer_aside(run, restored, lineage)


def read_manifest(folder: Path) -> Manifest | None:
    """Return a checkpoint's manifest, or None if it has none that can be read."""
    try:
        return parse_manifest(files.read(folder / MANIFEST))
    except (OSError, DocumentError):
        return None


def _seal(run: RunFolder, folder: Path, manifest: Manifest) -> None:
    files.write_durable(folder / MANIFEST, manifest.to_bytes())
    files.fsync_folder(folder)
    # No checkpoint may know of a step that the journal lacks.
    run.journal.sync()


def _free_name(run: RunFolder, manifest: Manifest, lineage: Collection[str]) -> CheckpointName:
    taken = [
        name.serial for name in run.published() if name.step == manifest.step and _is_ours(run, name, lineage)
    ]
    return CheckpointName(manifest.step, max(taken) + 1 if taken else 0)


def _is_ours(run: RunFolder, name: CheckpointName, lineage: Collection[str]) -> bool:
    manifest = read_manifest(run.checkpoints / str(name))
    return manifest is not None and (manifest.incarnation == run.incarnation or manifest.cut_id in lineage)


def _unused(folder: Path, name: str) -> Path:
    def candidates() -> Iterator[Path]:
        yield folder / name
        number = 1
        while True:
            yield folder / f"{name}.{number}"
            number += 1

    return next(path for path in candidates() if not path.exists())
