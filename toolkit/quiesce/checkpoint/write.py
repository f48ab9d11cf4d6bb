"""Writing a captured cut into its temporary folder, while training goes on.

Two kinds of rows are written: those that the cut counts, which its index and unstarted claims name, and the usable staged
rows of its ledger's groups (:mod:`quiesce.staged_rows`), which are looked for in the snapshot and may be absent.

Rule: nothing outside the temporary folder is touched, and every file in it is fsynced and hashed when the
write is over. Rows, trainer state and documents are written side by side; when one fails, the others are
still awaited, because threads cannot be stopped and the folder must not be removed under them. Yield rule:
:func:`write_cut` suspends; the rest blocks and belongs in a thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine, Iterable
from concurrent.futures import Executor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from quiesce.checkpoint import documents, files
from quiesce.checkpoint.shielding import in_thread
from quiesce.dataplane.interface import FileDigest
from quiesce.staged_rows import staged_keys

if TYPE_CHECKING:
    from quiesce.checkpoint.cut import CapturedCut, CutState
    from quiesce.checkpoint.trainer_state import Staged
    from quiesce.dataplane.interface import RowsWritten
    from quiesce.types import RowKey

__all__ = [
    "TRAINER_FOLDER",
    "WrittenCut",
    "counted_rows",
    "manifest_of",
    "staged_rows",
    "write_cut",
    "write_rows",
]

TRAINER_FOLDER: Final = "trainer"
"""Where in a checkpoint the trainer's own files are."""


@dataclass(frozen=True, slots=True)
class WrittenCut:
    """A cut in its temporary folder, complete but for the manifest.

    Attributes:
        folder: The temporary folder.
        files: Every file in it.
        rows: What the data plane wrote.
    """

    folder: Path
    files: tuple[FileDigest, ...]
    rows: RowsWritten

    @property
    def num_bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    @property
    def part_bytes(self) -> dict[str, int]:
        """Bytes of the files of each part: ``rows``, ``trainer``, ``documents``; they add up to :attr:`num_bytes`."""
        rows = sum(file.size for file in self.rows.files)
        trainer = sum(file.size for file in self.files if file.name.startswith(f"{TRAINER_FOLDER}/"))
        return {"rows": rows, "trainer": trainer, "documents": self.num_bytes - rows - trainer}


def counted_rows(state: CutState) -> tuple[RowKey, ...]:
    """Return the rows that the cut counts: those that the buffer's index and unstarted claims name."""
    return tuple(key for entry in state.entries for key in entry.keys)


def staged_rows(captured: CapturedCut, present: Collection[RowKey] | None = None) -> tuple[RowKey, ...]:
    """Return the usable staged rows of the cut's ledger groups, as they were at the instant. Blocks.

    Args:
        captured: The cut, its snapshot not released yet.
        present: All keys of the snapshot, where somebody has read them already; they are a good part of the cost.
    """
    ledger = captured.state.ledger_minus_buffer()
    if not ledger:
        return ()
    return staged_keys(captured.snapshot.keys() if present is None else present, ledger)


def write_rows(folder: Path, captured: CapturedCut, *, suspect: bool = False) -> RowsWritten:
    """Create the temporary folder and write the rows into it. Blocks.

    Args:
        folder: The temporary folder; must not be there.
        captured: The cut.
        suspect: Whether the cut was refused, perhaps because rows are missing: then those that are there are written.

    Raises:
        OSError: If the disk refuses.
        DataPlaneError: If a row that the cut counts was not there at the instant.
    """
    files.make_folder(folder)
    return _snapshot_rows(folder, captured, suspect=suspect)


async def write_cut(
    folder: Path,
    captured: CapturedCut,
    staged: Staged,
    executor: Executor,
    *,
    rows: RowsWritten | None = None,
    suspect: bool = False,
    present: Collection[RowKey] | None = None,
) -> WrittenCut:
    """Write everything but the manifest.

    Args:
        folder: The temporary folder; must not be there, unless ``rows`` says that rows are in it already.
        captured: The cut.
        staged: The trainer's state.
        executor: Where blocking work runs; needs two threads.
        rows: What was written inside the window already, for data planes that hold no instant.
        suspect: Whether the cut was refused, perhaps because rows are missing: then those that are there are written.
        present: All keys of the snapshot, where somebody has read them already.

    Raises:
        OSError: If the disk refuses.
        QuiesceError: If something of the cut cannot be written.
    """
    if rows is None:
        await in_thread(executor, files.make_folder, folder)
    trainer = folder / TRAINER_FOLDER
    await in_thread(executor, files.make_folder, trainer)

    written, of_trainer, of_documents = cast(
        "tuple[RowsWritten, tuple[FileDigest, ...], tuple[FileDigest, ...]]",
        await _all(
            _rows(folder, captured, executor, rows, suspect=suspect, present=present),
            _trainer(trainer, staged, executor),
            in_thread(executor, _write_documents, folder, captured.state),
        ),
    )
    return WrittenCut(folder, (*written.files, *of_trainer, *of_documents), written)


def manifest_of(written: WrittenCut, state: CutState, *, restored_from: str | None) -> documents.Manifest:
    """Return the manifest that binds the files to the cut."""
    ledger = state.ledger_minus_buffer()
    return documents.Manifest(
        cut_id=state.cut_id,
        incarnation=state.incarnation,
        parent_cut=state.parent_cut,
        restored_from=restored_from,
        step=state.step,
        trainer_version=state.trainer_version,
        mutation_version=state.mutation_version,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        files=written.files,
        ledger_digest=documents.ledger_digest(ledger),
        ledger_count=len(ledger),
        rows_count=written.rows.rows,
        rows_bytes=written.rows.num_bytes,
        rows_stamp=state.stamps["rows"],
        groups=documents.groups_by_owner(state),
    )


async def _rows(
    folder: Path,
    captured: CapturedCut,
    executor: Executor,
    rows: RowsWritten | None,
    *,
    suspect: bool,
    present: Collection[RowKey] | None,
) -> RowsWritten:
    if rows is not None:
        return rows
    return await in_thread(
        executor, lambda: _snapshot_rows(folder, captured, suspect=suspect, present=present)
    )


def _snapshot_rows(
    folder: Path, captured: CapturedCut, *, suspect: bool, present: Collection[RowKey] | None = None
) -> RowsWritten:
    keys = counted_rows(captured.state)
    if suspect:
        missing = frozenset(captured.snapshot.missing(keys))
        keys = tuple(key for key in keys if key not in missing)
    keys += staged_rows(captured, present)
    return captured.snapshot.write(folder, keys, documents.rows_metadata(captured.state))


async def _trainer(folder: Path, staged: Staged, executor: Executor) -> tuple[FileDigest, ...]:
    await staged.write(folder)
    return await in_thread(executor, _seal, folder)


def _write_documents(folder: Path, state: CutState) -> tuple[FileDigest, ...]:
    contents = documents.to_documents(state)
    return tuple(files.write_durable(folder / name, content) for name, content in contents.items())


def _seal(folder: Path) -> tuple[FileDigest, ...]:
    """Sync and hash whatever a trainer wrote, folders included."""
    found: list[FileDigest] = []
    for path, is_folder in files.tree(folder):
        if is_folder:
            files.fsync_folder(path)
        else:
            found.append(files.hash_and_sync(path, name=path.relative_to(folder.parent).as_posix()))
    files.fsync_folder(folder)
    return tuple(found)


async def _all(*parts: Coroutine[Any, Any, Any]) -> list[Any]:
    """Await all, whatever happens to any of them; then raise the first failure."""
    # gather() with return_exceptions ends only when every part has, also when it is cancelled itself.
    results = await asyncio.gather(*parts, return_exceptions=True)
    for failure in _failures(results):
        raise failure
    return results


def _failures(results: Iterable[Any]) -> list[BaseException]:
    return [result for result in results if isinstance(result, BaseException)]
