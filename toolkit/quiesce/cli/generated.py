"""What ``quiesce rules`` and ``quiesce dashboards`` share: they write files, or say which are not what they should be.

Rule: what is needed to make them is imported by the loader, so that a missing extra is one clear line.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from quiesce.errors import ConfigError, ExtraMissingError

if TYPE_CHECKING:
    from quiesce_dashboards.objectives import AlertConfig

__all__ = ["EXIT_OK", "EXIT_STALE", "EXIT_UNUSABLE", "Files", "add_arguments", "build_or_check"]

EXIT_OK: Final = 0
EXIT_STALE: Final = 1
EXIT_UNUSABLE: Final = 2

Files = tuple[
    Path, Callable[[Any, "AlertConfig"], Sequence[Path]], Callable[[Any, "AlertConfig"], Sequence[str]]
]
"""Where files are committed, what writes them, and what names those that are not current."""


def add_arguments(parser: argparse.ArgumentParser, actions: Mapping[str, str]) -> None:
    """Add the arguments of both commands.

    Args:
        parser: The command's.
        actions: What ``build`` and ``check`` do.
    """
    parser.add_argument(
        "action", choices=tuple(actions), metavar="build|check", help="; ".join(actions.values())
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="the folder; otherwise the one that the package has them in"
    )
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="a YAML file with your numbers in a section `alerts`, such as a run's config.yaml",
    )
    parser.add_argument("--runbooks", metavar="URL", help="where the runbook pages are, if you keep your own")


def build_or_check(what: str, wrong: str, load: Callable[[], Files], args: argparse.Namespace) -> int:
    """Run the command.

    Args:
        what: Its name, which is also what the files are.
        wrong: What a file is that ``check`` names.
        load: Imports what makes the files.
        args: Has ``action``, ``out``, ``config`` and ``runbooks``.

    Returns:
        The exit code.
    """
    try:
        from quiesce_dashboards.alert_settings import read_alert_config
        from quiesce_dashboards.objectives import RUNBOOKS, AlertConfig

        if args.action == "build" and args.config is not None and args.out is None:
            raise ConfigError(
                "--out", "name a folder: what the package carries keeps the numbers that it has"
            )
        directory, build, check = load()
        folder: Path = directory if args.out is None else args.out
        config = (
            AlertConfig(runbook_base_url=args.runbooks or RUNBOOKS)
            if args.config is None
            else read_alert_config(args.config, runbooks=args.runbooks)
        )
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
