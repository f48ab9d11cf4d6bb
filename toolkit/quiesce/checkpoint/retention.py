"""Keeping the last few usable checkpoints.

Rule: a checkpoint is deleted only while enough newer ones are known to be usable; a folder that is not usable
counts for nothing and is never touched. So the last good checkpoint is never deleted, whatever happened to
the others. Nothing here suspends: it blocks, and belongs in a thread.

Whether one is usable is proved by its digests once, and by the identity of its files (inode, size, times)
after that: only what somebody changed is read again.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Final

from quiesce.checkpoint import files
from quiesce.checkpoint.documents import MANIFEST
from quiesce.checkpoint.publish import read_manifest, retire

if TYPE_CHECKING:
    from quiesce.checkpoint.documents import Manifest
    from quiesce.checkpoint.runfolder import CheckpointName, RunFolder

__all__ = ["Retention", "is_usable"]

_LOG: Final = logging.getLogger("quiesce.checkpoint")

_Signature = tuple[tuple[str, int, int, int, int], ...]


def is_usable(folder: Path) -> bool:
    """Whether the manifest can be read and every file is what it says; reads them all."""
    manifest = read_manifest(folder)
    if manifest is None:
        return False
    try:
        return all(files.hash_file(folder / file.name, name=file.name) == file for file in manifest.files)
    except OSError:
        return False


class Retention:
    """Decides which checkpoints of a run folder stay.

    Args:
        run: The run folder.
        keep: How many usable checkpoints stay, at least 1.
    """

    def __init__(self, run: RunFolder, keep: int) -> None:
        if keep < 1:
            message = f"keep cannot be {keep}: a run needs a checkpoint to resume from"
            raise ValueError(message)
        self._run = run
        self._keep = keep
        self._proved: dict[str, _Signature] = {}

    def note_published(self, folder: Path, manifest: Manifest) -> None:
        """Take note of a checkpoint that was just written, so that it is not read again."""
        try:
            self._proved[folder.name] = _signature(folder, manifest)
        except OSError:
            self._proved.pop(folder.name, None)  # it is published all the same; its digests will be read

    def apply(self) -> list[CheckpointName]:
        """Delete what is older than the last ``keep`` usable checkpoints.

        Returns:
            What was deleted.

        Raises:
            OSError: If the disk refuses.
        """
        published = self._run.published()
        if len(published) <= self._keep:
            return []
        kept = 0
        deleted: list[CheckpointName] = []
        for name in reversed(published):
            folder = self._run.checkpoints / str(name)
            if kept >= self._keep:
                if read_manifest(folder) is None:
                    continue  # nothing is known of it: a person may want to look
                retire(self._run, folder)
                self._proved.pop(str(name), None)
                deleted.append(name)
            elif self._usable(folder):
                kept += 1
            else:
                _LOG.warning(
                    "checkpoint %s is not usable; it does not count as kept, and stays where it is", folder
                )
        return deleted

    def _usable(self, folder: Path) -> bool:
        manifest = read_manifest(folder)
        if manifest is None:
            return False
        try:
            signature = _signature(folder, manifest)
        except OSError:
            return False
        if self._proved.get(folder.name) == signature:
            return True
        if not is_usable(folder):
            self._proved.pop(folder.name, None)
            return False
        self._proved[folder.name] = signature
        return True


def _signature(folder: Path, manifest: Manifest) -> _Signature:
    found = []
    for name in sorted((*(file.name for file in manifest.files), MANIFEST)):
        status = (folder / name).stat()
        found.append((name, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns))
    return tuple(found)
