"""What ``quiesce rules`` and ``quiesce dashboards`` share: they write files, or say which are not what they should be.

Rule: what is needed to make them is imported by the loader, so that a missing extra is one clear line.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from quiesce.errors import ConfigError, ExtraMissingError

if TYPE_CHECKING:
    from quiesce_dashboards.objectives import AlertConfig

__all__ = ["EXIT_OK", "EXIT_STALE", "EXIT_UNUSABLE", "Files", "build_or_check"]

EXIT_OK: Final = 0
EXIT_STALE: Final = 1
EXIT_UNUSABLE: Final = 2

Files = tuple[
    Path, Callable[[Any, "AlertConfig"], Sequence[Path]], Callable[[Any, "AlertConfig"], Sequence[str]]
]
"""Where files are committed, what writes them, and what names those that are not current."""


def build_or_check(what: str, wrong: str, load: Callable[[], Files], args: argparse.Namespace) -> int:
    """Run the command.

    Args:
        what: Its name, which is also what the files are.
        wrong: What a file is that ``check`` names.
        load: Imports what makes the files.
        args: Has ``action``, ``out`` and ``runbooks``.

    Returns:
        The exit code.
    """
    try:
        from quiesce_dashboards.objectives import AlertConfig

        directory, build, check = load()
        folder: Path = directory if args.out is None else args.out
        config = AlertConfig() if args.runbooks is None else AlertConfig(runbook_base_url=args.runbooks)
        if args.action == "check":
            stale = check(folder, config)
            for name in stale:
                print(f"quiesce {what}: {folder / name} is {wrong}", file=sys.stderr)
            if not stale:
                print(f"The {what} in {folder} are current.")
            return EXIT_STALE if stale else EXIT_OK
        written = build(folder, config)
    except (ConfigError, ExtraMissingError, OSError) as error:
        print(f"quiesce {what}: {error}", file=sys.stderr)
        return EXIT_UNUSABLE
    for path in written:
        print(path)
    if not written:
        print(f"The {what} in {folder} are current.")
    return EXIT_OK
