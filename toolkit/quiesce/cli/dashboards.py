"""``quiesce dashboards``: write the Grafana dashboards, or say whether a folder's are current.

Rule: ``check`` only reads. Exit code 0 when the files are current or were written, 1 when ``check`` found one that is stale,
missing or left over, 2 when the dashboards cannot be made as asked for.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, Final

from quiesce.errors import ConfigError, ExtraMissingError

__all__ = ["EXIT_OK", "EXIT_STALE", "EXIT_UNUSABLE", "add_parser", "main_dashboards"]

EXIT_OK: Final = 0
EXIT_STALE: Final = 1
EXIT_UNUSABLE: Final = 2

_ACTIONS: Final = {"build": "write the files", "check": "say which files are missing, stale or left over"}


def add_parser(commands: Any) -> None:  # noqa: ANN401 - argparse's subparsers have no public type
    """Add the command to an argument parser's subcommands."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "dashboards",
        help="write the Grafana dashboards",
        description="Write the Grafana dashboards as JSON, or check that a folder has them as they are now.",
        epilog="Exit codes: 0 written or current, 1 a file is missing or stale, 2 the dashboards cannot be made.",
    )
    parser.add_argument(
        "action", choices=tuple(_ACTIONS), metavar="build|check", help="; ".join(_ACTIONS.values())
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="the folder; otherwise the one that the package has them in"
    )
    parser.add_argument("--runbooks", metavar="URL", help="where the runbook pages are, if you keep your own")
    parser.set_defaults(run=main_dashboards)


def main_dashboards(args: argparse.Namespace) -> int:
    """Run the command.

    Args:
        args: Has ``action``, ``out`` and ``runbooks``.

    Returns:
        The exit code.
    """
    try:
        from quiesce_dashboards.dashboards import DIRECTORY, build, check
        from quiesce_dashboards.objectives import AlertConfig

        folder: Path = DIRECTORY if args.out is None else args.out
        config = AlertConfig() if args.runbooks is None else AlertConfig(runbook_base_url=args.runbooks)
        if args.action == "check":
            stale = check(folder, config)
            for name in stale:
                print(f"quiesce dashboards: {folder / name} is missing, stale or left over", file=sys.stderr)
            if not stale:
                print(f"The dashboards in {folder} are current.")
            return EXIT_STALE if stale else EXIT_OK
        written = build(folder, config)
    except (ConfigError, ExtraMissingError, OSError) as error:
        print(f"quiesce dashboards: {error}", file=sys.stderr)
        return EXIT_UNUSABLE
    for path in written:
        print(path)
    if not written:
        print(f"The dashboards in {folder} are current.")
    return EXIT_OK
