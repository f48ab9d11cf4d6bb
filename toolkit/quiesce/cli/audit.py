"""``quiesce audit``: prove from the files alone that nothing was lost and nothing was trained twice.

Rule: it only reads. Exit code 0 when everything holds, 1 on a violation, 2 when the path cannot be audited.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from quiesce.errors import UnusableAuditPathError

if TYPE_CHECKING:
    from rich.console import Console

    from quiesce.checkpoint.audit import AuditReport
    from quiesce.invariants import Violation

__all__ = ["EXIT_OK", "EXIT_UNUSABLE", "EXIT_VIOLATION", "add_parser", "main_audit", "print_report"]

EXIT_OK: Final = 0
EXIT_VIOLATION: Final = 1
EXIT_UNUSABLE: Final = 2

_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")
_BASE: Final = 1024


def add_parser(commands: Any) -> None:  # noqa: ANN401 - argparse's subparsers have no public type
    """Add the command to an argument parser's subcommands."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "audit",
        help="check a checkpoint or a whole run on disk",
        description=(
            "Check a checkpoint folder or a whole run folder, offline and read-only: digests, single owner, "
            "cursor against stamps, rows against index, conservation along the restored lineage."
        ),
        epilog="Exit codes: 0 everything holds, 1 a violation was found, 2 the path cannot be audited.",
    )
    parser.add_argument("path", type=Path, metavar="PATH", help="a checkpoint folder or a run folder")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.set_defaults(run=main_audit)


def main_audit(args: argparse.Namespace) -> int:
    """Run the command.

    Args:
        args: Has ``path`` and ``json``.

    Returns:
        The exit code.
    """
    from quiesce.checkpoint.audit import audit

    try:
        report = audit(Path(args.path))
    except UnusableAuditPathError as error:
        if args.json:
            print(json.dumps({"ok": False, "error": str(error)}))
        print(f"quiesce audit: {error}", file=sys.stderr)
        return EXIT_UNUSABLE
    if args.json:
        print(json.dumps(report.to_json(), indent=2, allow_nan=False))
    else:
        print_report(report)
    return EXIT_OK if report.ok else EXIT_VIOLATION


def print_report(report: AuditReport, console: Console | None = None) -> None:
    """Print a report for people; plain text where there is no terminal.

    Args:
        report: What was found.
        console: Where; None means standard output.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False) if console is None else console
    checkpoints = Table(
        title=f"Checkpoints of {report.path}", title_justify="left", box=None, padding=(0, 1, 0, 0)
    )
    checkpoints.add_column("checkpoint", no_wrap=True)
    for name in ("version", "cursor", "start"):
        checkpoints.add_column(name, justify="right", no_wrap=True)
    checkpoints.add_column("groups by owner")
    for name in ("rows", "size"):
        checkpoints.add_column(name, justify="right", no_wrap=True)
    checkpoints.add_column("verdict")
    for item in report.checkpoints:
        problem = "unreadable" if item.problem else f"{item.violations} violations"
        cells = (
            item.path.name,
            _shown(item.trainer_version),
            _shown(item.cursor),
            _shown(item.incarnation),
            ", ".join(f"{count} {owner}" for owner, count in item.groups.items() if count) or "none",
            str(item.rows),
            _size(item.num_bytes),
            problem if item.problem or item.violations else "ok",
        )
        checkpoints.add_row(*map(Text, cells))
    console.print(checkpoints)
    if report.prompts is not None:
        prompts = report.prompts
        console.print(
            f"Prompts along the restored lineage: {prompts.read} read = {prompts.trained} trained + "
            f"{prompts.dropped} dropped + {prompts.owned} owned",
            soft_wrap=True,
        )
    for violation in report.violations:
        _print_violation(violation, console)
    for note in report.notes:
        console.print(Text(f"note: {note}"), soft_wrap=True)
    if not report.violations:
        console.print(Text("Everything holds.", style="green"))
        return
    worst = sum(violation.severity == "critical" for violation in report.violations)
    verdict = f"{worst} critical violations, {len(report.violations) - worst} warnings."
    console.print(Text(verdict, style="bold red" if worst else "yellow"))


def _print_violation(violation: Violation, console: Console) -> None:
    from rich.text import Text

    style = "bold red" if violation.severity == "critical" else "yellow"
    console.print(
        Text.assemble((f"{violation.severity} {violation.invariant}", style), f": {violation.message}"),
        soft_wrap=True,
    )


def _shown(value: int | None) -> str:
    return "–" if value is None else str(value)


def _size(num_bytes: int) -> str:
    size = float(num_bytes)
    for unit in _UNITS[:-1]:
        if size < _BASE:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= _BASE
    return f"{size:.1f} {_UNITS[-1]}"
