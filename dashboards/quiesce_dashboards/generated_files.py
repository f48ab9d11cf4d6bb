"""Files that are generated and committed: written by renaming, compared by their bytes. Nothing here suspends."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

__all__ = ["stale", "write"]


def stale(folder: Path, files: Mapping[str, str]) -> list[str]:
    """Return the names of files that are not there with this text.

    Args:
        folder: Where they are.
        files: Text by name.
    """
    return [
        name
        for name, text in files.items()
        if not (folder / name).is_file() or (folder / name).read_bytes() != text.encode()
    ]


def write(folder: Path, files: Mapping[str, str]) -> list[Path]:
    """Write what is stale, each file by renaming; return what was written.

    Args:
        folder: Where; it is made.
        files: Text by name.

    Raises:
        OSError: If a file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name in stale(folder, files):
        scratch = folder / f".{name}.tmp"
        scratch.write_text(files[name], encoding="utf-8")
        scratch.replace(folder / name)
        written.append(folder / name)
    return written
