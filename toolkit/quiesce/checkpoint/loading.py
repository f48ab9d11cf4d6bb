"""Finding checkpoints, and proving that one is whole before a byte of it is believed.

Rule: the manifest's digests come first. A document is parsed from the very bytes whose digest was checked; a
file that the manifest does not list, a link, or a name that leaves the folder is never followed. Reading
changes nothing. Nothing here suspends: everything blocks on the disk and belongs in a thread.

======================================================  ====================================================
what is found                                           is
======================================================  ====================================================
a part missing, resized, altered, added, or a link      :class:`~quiesce.errors.CorruptCheckpointError`: an
                                                        older checkpoint may take its place
an error of the file system, another schema version,    :class:`~quiesce.errors.RestoreRefusedError`: what
a document that says something impossible although      is there is what was written, so going on without it
its digest is right                                     is a decision for a person
======================================================  ====================================================
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from quiesce.checkpoint import codec
from quiesce.checkpoint.documents import (
    DOCUMENTS,
    LEDGER_COUNT_KEY,
    LEDGER_DIGEST_KEY,
    MANIFEST,
    SCHEMA_VERSION,
    Manifest,
    from_documents,
    parse_manifest,
)
from quiesce.checkpoint.runfolder import CheckpointName
from quiesce.dataplane.shards import read_inventory, read_metadata, read_rows
from quiesce.errors import CorruptCheckpointError, DataPlaneError, DocumentError, RestoreRefusedError
from quiesce.invariants import CutFacts, LedgerSeal, RowFacts, Violation, check_cut, critical
from quiesce.staged_rows import staged_keys

if TYPE_CHECKING:
    from quiesce.checkpoint.cut import CutState
    from quiesce.dataplane.interface import Row, TensorLibrary
    from quiesce.types import GroupRecord, RowKey

__all__ = [
    "CHECKPOINTS",
    "TRAINER",
    "CheckpointInfo",
    "LoadedCheckpoint",
    "checkpoint_info",
    "checkpoints_folder",
    "find_checkpoints",
    "load_checkpoint",
    "scan_checkpoints",
]

CHECKPOINTS: Final = "checkpoints"
"""The folder of a run that holds its checkpoints."""

TRAINER: Final = "trainer"
"""The folder of a checkpoint that holds the trainer's state."""

_SUSPECT: Final = re.compile(r"(step_[0-9]+(?:\.[0-9]+)?)\.suspect", re.ASCII)
_CHUNK_BYTES: Final = 1 << 20
_FLAGS: Final = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_MAX_MANIFEST_BYTES: Final = 64 << 20


@dataclass(frozen=True, slots=True)
class CheckpointInfo:
    """A checkpoint by its name alone; nothing of it was read.

    Attributes:
        path: Its folder.
        name: Step and serial.
        suspect: Whether it broke a critical invariant when it was saved.
    """

    path: Path
    name: CheckpointName
    suspect: bool = False

    @property
    def step(self) -> int:
        """Trained steps."""
        return self.name.step


@dataclass(frozen=True, slots=True)
class LoadedCheckpoint:
    """A checkpoint that is whole: every file is what the manifest says, and every document was read.

    Attributes:
        info: Which one.
        manifest: Its manifest.
        state: The cut.
        inventory: The rows in its files: those that the cut counts, and staged ones of its ledger's groups.
        seals: What the row files and the manifest say about the ledger.
        violations: What does not hold of it, judged alone.
        verify_ns: Nanoseconds that verifying and reading it took.
    """

    info: CheckpointInfo
    manifest: Manifest
    state: CutState
    inventory: frozenset[RowKey]
    seals: tuple[LedgerSeal, ...]
    violations: tuple[Violation, ...]
    verify_ns: int = 0

    @property
    def trainer_directory(self) -> Path:
        """Where the trainer's state is."""
        return self.info.path / TRAINER

    def rows(self, *, tensors: TensorLibrary = "torch") -> Iterator[tuple[RowKey, Row]]:
        """Read the rows, one file in memory at a time.

        Raises:
            RowCorruptError: If a file has changed since it was verified.
        """
        return read_rows(self.info.path, self.manifest.row_files, tensors=tensors)

    def staged(self, ledger: Iterable[GroupRecord] | None = None) -> tuple[RowKey, ...]:
        """Return the keys of the usable staged rows, in the order of their encoded form.

        Args:
            ledger: Of which groups; None means all that its ledger holds.
        """
        ours = (key for key in self.inventory if key.incarnation == self.manifest.incarnation)
        return staged_keys(ours, self.state.ledger_minus_buffer() if ledger is None else ledger)

    def facts(self, parent: CutState | None = None) -> CutFacts:
        """Return what is known beside the cut, to judge it again with its parent."""
        return CutFacts(rows=RowFacts(self.inventory, on_disk=True), seals=self.seals, parent=parent)


def checkpoints_folder(path: Path) -> Path:
    """Return a run folder's folder of checkpoints, or the path itself if it is such a folder."""
    inside = path / CHECKPOINTS
    return inside if inside.is_dir() else path


def checkpoint_info(path: Path) -> CheckpointInfo | None:
    """Return which checkpoint a folder is by its name, or None."""
    found = _SUSPECT.fullmatch(path.name)
    name = CheckpointName.parse(found[1] if found else path.name)
    return None if name is None else CheckpointInfo(path, name, suspect=found is not None)


def find_checkpoints(folder: Path) -> list[CheckpointInfo]:
    """Return the published checkpoints in a folder, newest first; usable or not.

    Those being written, retired, renamed aside, corrupt or suspect are not among them.

    Raises:
        RestoreRefusedError: If the folder cannot be read.
    """
    return [info for info in scan_checkpoints(folder) if not info.suspect]


def scan_checkpoints(folder: Path) -> list[CheckpointInfo]:
    """Return the published and the suspect checkpoints in a folder, newest first.

    A suspect one counts as older than a published one of its step.

    Raises:
        RestoreRefusedError: If the folder cannot be read.
    """
    try:
        paths = sorted(Path(entry.path) for entry in os.scandir(folder))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RestoreRefusedError(folder, "checkpoints", f"cannot be listed: {error.strerror}") from error
    found = [info for info in map(checkpoint_info, paths) if info is not None]
    return sorted(found, key=lambda info: (info.name, not info.suspect), reverse=True)


def load_checkpoint(info: CheckpointInfo, *, accept_violations: bool = False) -> LoadedCheckpoint:
    """Verify a checkpoint file by file, then read it.

    Args:
        info: Which one.
        accept_violations: Return one that breaks a critical invariant too, with its violations.

    Raises:
        CorruptCheckpointError: If a part is missing, is not what the manifest says, or is not listed there.
        RestoreRefusedError: If it is whole, but cannot be used.
    """
    path, since = info.path, time.perf_counter_ns()
    names = _listing(path)
    manifest = _manifest(path)
    if manifest.step != info.step:
        raise CorruptCheckpointError(
            path, MANIFEST, f"it is of step {manifest.step}, the folder of {info.step}"
        )
    contents = _verify(path, manifest, names)
    try:
        state = from_documents(contents.__getitem__, manifest)
    except DocumentError as error:
        raise RestoreRefusedError(path, error.file, f"{error.path}: {error.problem}") from error
    inventory, seals = _rows(path, manifest)
    loaded = LoadedCheckpoint(info, manifest, state, inventory, seals, ())
    violations = check_cut(state, loaded.facts())
    worst = critical(violations)
    if worst and not accept_violations:
        raise RestoreRefusedError(
            path, worst[0].invariant, f"{worst[0].message} ({len(worst)} critical violations in all)"
        )
    elapsed = time.perf_counter_ns() - since
    return replace(loaded, violations=tuple(violations), verify_ns=elapsed)


def _listing(path: Path) -> set[str]:
    """Return the names of all files in a checkpoint; refuse whatever is no plain file or folder."""
    if path.is_symlink() or not path.is_dir():
        raise CorruptCheckpointError(path, ".", "it is not a folder")
    found: set[str] = set()
    pending = [path]
    while pending:
        folder = pending.pop()
        try:
            entries = list(os.scandir(folder))
        except OSError as error:
            part = str(folder.relative_to(path))
            raise RestoreRefusedError(path, part, f"cannot be listed: {error.strerror}") from error
        for entry in entries:
            name = str(Path(entry.path).relative_to(path))
            if entry.is_dir(follow_symlinks=False):
                pending.append(Path(entry.path))
            elif entry.is_file(follow_symlinks=False):
                found.add(name)
            else:
                raise CorruptCheckpointError(path, name, "it is a link or a special file")
    return found


def _manifest(path: Path) -> Manifest:
    data = b"".join(_chunks(path, MANIFEST, _MAX_MANIFEST_BYTES))
    try:
        body = codec.parse_json(data, file=MANIFEST)
        version = body.get("schema_version") if isinstance(body, dict) else None
        if type(version) is int and version != SCHEMA_VERSION:
            raise RestoreRefusedError(
                path, MANIFEST, f"schema version {version} is not {SCHEMA_VERSION}: another release wrote it"
            )
        return parse_manifest(data)
    except DocumentError as error:
        raise CorruptCheckpointError(path, MANIFEST, f"{error.path}: {error.problem}") from error


def _verify(path: Path, manifest: Manifest, names: set[str]) -> dict[str, bytes]:
    """Check every file against the manifest; return the control documents' verified bytes."""
    contents: dict[str, bytes] = {}
    for file in manifest.files:
        if file.name not in names:
            raise CorruptCheckpointError(path, file.name, "it is missing")
    extra = sorted(names - {file.name for file in manifest.files} - {MANIFEST})
    if extra:
        raise CorruptCheckpointError(path, extra[0], "the manifest does not list it")
    for file in manifest.files:
        digest, size, kept = hashlib.sha256(), 0, bytearray()
        limit = codec.MAX_DOCUMENT_BYTES if file.name in DOCUMENTS else None
        for chunk in _chunks(path, file.name, limit):
            digest.update(chunk)
            size += len(chunk)
            if limit is not None:
                kept += chunk
        if size != file.size:
            raise CorruptCheckpointError(path, file.name, f"it has {size} bytes instead of {file.size}")
        if digest.hexdigest() != file.sha256:
            raise CorruptCheckpointError(path, file.name, "its content has changed: the SHA-256 differs")
        if limit is not None:
            contents[file.name] = bytes(kept)
    return contents


def _chunks(path: Path, name: str, limit: int | None) -> Iterator[bytes]:
    """Read a regular file in pieces, following no link."""
    try:
        fd = os.open(path / name, _FLAGS)
    except FileNotFoundError:
        raise CorruptCheckpointError(path, name, "it is missing") from None
    except OSError as error:
        raise RestoreRefusedError(path, name, f"cannot be opened: {error.strerror}") from error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise CorruptCheckpointError(path, name, "it is not a regular file")
        if limit is not None and status.st_size > limit:
            raise CorruptCheckpointError(path, name, f"its {status.st_size} bytes are more than {limit}")
        while chunk := os.read(fd, _CHUNK_BYTES):
            yield chunk
    except OSError as error:
        raise RestoreRefusedError(path, name, f"cannot be read: {error.strerror}") from error
    finally:
        os.close(fd)


def _rows(path: Path, manifest: Manifest) -> tuple[frozenset[RowKey], tuple[LedgerSeal, ...]]:
    """Read which rows there are, and what each shard's metadata says about its cut and its ledger."""
    seals = [LedgerSeal(MANIFEST, manifest.ledger_digest, manifest.ledger_count)]
    name = "rows"
    try:
        for name in manifest.row_files:
            metadata = read_metadata(path / name)
            stamp = (metadata.get("cut_id"), metadata.get("mutation_version"))
            expected = (manifest.rows_stamp.cut_id, str(manifest.rows_stamp.mutation_version))
            if stamp != expected:
                raise RestoreRefusedError(
                    path, name, f"its rows are of cut {stamp[0]!r}, not {expected[0]!r}"
                )
            count = metadata.get(LEDGER_COUNT_KEY, "")
            if not re.fullmatch(r"[0-9]{1,12}", count, re.ASCII):
                raise RestoreRefusedError(path, name, f"its metadata has no {LEDGER_COUNT_KEY}")
            seals.append(LedgerSeal(name, metadata.get(LEDGER_DIGEST_KEY, ""), int(count)))
        inventory = frozenset(read_inventory(path, manifest.row_files))
    except DataPlaneError as error:
        raise RestoreRefusedError(path, name, str(error)) from error
    except OSError as error:
        raise RestoreRefusedError(path, name, f"cannot be read: {error.strerror}") from error
    if not manifest.row_files:
        raise RestoreRefusedError(path, "rows", "the manifest lists no row file")
    if len(inventory) != manifest.rows_count:
        raise RestoreRefusedError(
            path, "rows", f"{len(inventory)} rows in the files, {manifest.rows_count} in the manifest"
        )
    return inventory, tuple(seals)
