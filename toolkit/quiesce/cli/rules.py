"""``quiesce rules``: write the alerting rules for Prometheus, or say whether a folder's are current.

Rule: ``check`` only reads. Exit code 0 when the files are current or were written, 1 when ``check`` found a stale or
missing one, 2 when the rules cannot be made as asked for.
"""

from __future__ import annotations

import argparse
from typing import Any, Final

from quiesce.cli.generated import EXIT_OK, EXIT_STALE, EXIT_UNUSABLE, Files, add_arguments, build_or_check

__all__ = ["EXIT_OK", "EXIT_STALE", "EXIT_UNUSABLE", "add_parser", "main_rules"]


_ACTIONS: Final = {"build": "write the files", "check": "say which files are missing or stale"}


def add_parser(commands: Any) -> None:  # noqa: ANN401 - argparse's subparsers have no public type
    """Add the command to an argument parser's subcommands."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "rules",
        help="write the alerting rules for Prometheus",
        description="Write the alerting rules for Prometheus, or check that a folder has them as they are now.",
        epilog="Exit codes: 0 written or current, 1 a file is missing or stale, 2 the rules cannot be made.",
    )
    add_arguments(parser, _ACTIONS)
    parser.set_defaults(run=main_rules)


def main_rules(args: argparse.Namespace) -> int:
    """Run the command.

    Args:
        args: Has ``action``, ``out``, ``config`` and ``runbooks``.

    Returns:
        The exit code.
    """
    return build_or_check("rules", "missing or stale", _files, args)


def _files() -> Files:
    from quiesce_dashboards.rules import GENERATED, build, check

    return GENERATED, build, check
