"""``quiesce dashboards``: write the Grafana dashboards, or say whether a folder's are current.

Rule: ``check`` only reads. Exit code 0 when the files are current or were written, 1 when ``check`` found one that is stale,
missing or left over, 2 when the dashboards cannot be made as asked for.
"""

from __future__ import annotations

import argparse
from typing import Any, Final

from quiesce.cli.generated import EXIT_OK, EXIT_STALE, EXIT_UNUSABLE, Files, add_arguments, build_or_check

__all__ = ["EXIT_OK", "EXIT_STALE", "EXIT_UNUSABLE", "add_parser", "main_dashboards"]


_ACTIONS: Final = {"build": "write the files", "check": "say which files are missing, stale or left over"}


def add_parser(commands: Any) -> None:  # noqa: ANN401 - argparse's subparsers have no public type
    """Add the command to an argument parser's subcommands."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "dashboards",
        help="write the Grafana dashboards",
        description="Write the Grafana dashboards as JSON, or check that a folder has them as they are now.",
        epilog="Exit codes: 0 written or current, 1 a file is missing or stale, 2 the dashboards cannot be made.",
    )
    add_arguments(parser, _ACTIONS)
    parser.set_defaults(run=main_dashboards)


def main_dashboards(args: argparse.Namespace) -> int:
    """Run the command.

    Args:
        args: Has ``action``, ``out``, ``config`` and ``runbooks``.

    Returns:
        The exit code.
    """
    return build_or_check("dashboards", "missing, stale or left over", _files, args)


def _files() -> Files:
    from quiesce_dashboards.dashboards import DIRECTORY, build, check

    return DIRECTORY, build, check
