"""``quiesce violations``: what the auditor of a run found, and a way to say that somebody has looked into it.

Rule: it reads a run's ``violations.jsonl``, and only adds lines to it that close records; a run that goes on meanwhile loses
nothing by that. Exit code 0 when no violation is open, 1 when one is, 2 when the folder is none of a run or has no such
record.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from rich.console import Console

    from quiesce.auditor import ViolationRecord

__all__ = [
    "EXIT_NONE_OPEN",
    "EXIT_OPEN",
    "EXIT_UNUSABLE",
    "add_parser",
    "main_violations",
    "print_violations",
]

EXIT_NONE_OPEN: Final = 0
EXIT_OPEN: Final = 1
EXIT_UNUSABLE: Final = 2

_OF_A_RUN: Final = ("violations.jsonl", "lineage.jsonl", "config.yaml", "run.lock")
"""Files of which a run's folder has at least one."""

_SHOWN_EVENTS: Final = 20

_EPILOG: Final = """\
A record stays open, also in the incarnations that resume the run, until it is
closed here. A fault that is seen again is open again.

exit codes:
  0    no violation is open
  1    a violation is open
  2    the folder is no run folder, or has no record of that key
"""


def add_parser(commands: Any) -> None:  # noqa: ANN401 - argparse's subparsers have no public type
    """Add the command to an argument parser's subcommands."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "violations",
        help="list what the auditor of a run found; close what was looked into",
        description="List the violations of a run, those that are open first.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("path", type=Path, metavar="RUN_DIR", help="a run folder")
    parser.add_argument("--show", metavar="KEY", help="one record, with its evidence and last events")
    parser.add_argument(
        "--close", metavar="KEY", action="append", default=[], help="close a record; may be repeated"
    )
    parser.add_argument("--close-all", action="store_true", help="close every open record")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.set_defaults(run=main_violations)


def main_violations(args: argparse.Namespace) -> int:
    """Run the command.

    Args:
        args: Has ``path``, ``show``, ``close``, ``close_all`` and ``json``.

    Returns:
        The exit code.
    """
    from quiesce.auditor import read_violations

    path: Path = args.path
    if not any((path / name).exists() for name in _OF_A_RUN):
        return _refuse(args, f"{path} is no run folder")
    try:
        records = {record.key: record for record in read_violations(path)}
    except OSError as error:
        return _refuse(args, f"{path} cannot be read: {error}")
    unknown = [key for key in (*args.close, *([args.show] if args.show else [])) if key not in records]
    if unknown:
        known = ", ".join(records) or "none"
        return _refuse(args, f"{path} has no record {', '.join(unknown)}; there are {known}")
    wanted = records.values() if args.close_all else [records[key] for key in dict.fromkeys(args.close)]
    closed = [record for record in wanted if record.open]
    try:
        _close(path, closed)
    except OSError as error:
        return _refuse(args, f"the violations of {path} cannot be closed: {error}")
    found = [records[args.show]] if args.show else list(records.values())
    if args.json:
        print(json.dumps(_told(path, found, closed), indent=2, default=str))
    else:
        print_violations(path, found, closed=closed, whole=bool(args.show))
    return EXIT_OPEN if any(record.open for record in found) else EXIT_NONE_OPEN


def print_violations(
    path: Path,
    records: Sequence[ViolationRecord],
    *,
    closed: Sequence[ViolationRecord] = (),
    whole: bool = False,
    console: Console | None = None,
) -> None:
    """Print records for people; plain text where there is no terminal.

    Args:
        path: The run folder.
        records: What to print, oldest first.
        closed: Those of them that were closed just now.
        whole: Whether to print evidence and events too.
        console: Where; None means standard output.
    """
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False) if console is None else console
    for record in sorted(records, key=lambda record: not record.open):
        state, style = "open", "bold red" if record.severity == "critical" else "yellow"
        if not record.open:
            state, style = "closed", "dim"
        head = f"{record.key}  {state}  {record.severity} {record.invariant}"
        console.print(Text(head, style=style), soft_wrap=True)
        for line in _lines(record, whole=whole):
            console.print(Text(f"  {line}"), soft_wrap=True)
    if closed:
        console.print(Text(f"closed {', '.join(record.key for record in closed)}"), soft_wrap=True)
    still = sum(record.open for record in records)
    if whole and records:
        return
    if still:
        console.print(Text(f"{still} open of {len(records)}.", style="bold red"))
    else:
        told = "None is open." if records else f"The auditor of {path} has found nothing."
        console.print(Text(told, style="green"), soft_wrap=True)


def _lines(record: ViolationRecord, *, whole: bool) -> list[str]:
    lines = [record.message]
    if record.groups and not all(group in record.message for group in record.groups):
        more = record.groups_total - len(record.groups)
        lines.append(f"groups    {', '.join(record.groups)}" + (f" and {more} more" if more > 0 else ""))
    if record.owners:
        lines.append(f"owners    {', '.join(record.owners)}")
    seen = {"live": "an event", "sweep": "the sweep", "cut": "a checkpoint's verification"}[record.origin]
    again = f", {record.count} times, last {_time(record.last_unix)}" if record.count > 1 else ""
    lines.append(f"seen      {_time(record.first_unix)} by {seen}, incarnation {record.incarnation}{again}")
    if record.cut_id:
        lines.append(f"cut       {record.cut_id}")
    if record.trace_id:
        lines.append(f"trace     {record.trace_id}")
    if "drill" in record.evidence:
        lines.append(f"drill     {record.evidence['drill']}: it was injected on purpose")
    if whole:
        lines += ["evidence  " + json.dumps(record.evidence, default=str)]
        lines += ["event     " + json.dumps(event, default=str) for event in record.events[-_SHOWN_EVENTS:]]
    return lines


def _time(unix: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix))


def _told(
    path: Path, records: Sequence[ViolationRecord], closed: Sequence[ViolationRecord]
) -> dict[str, Any]:
    return {
        "run_dir": str(path),
        "open": sum(record.open for record in records),
        "closed": [record.key for record in closed],
        "violations": [record.to_json() for record in sorted(records, key=lambda record: not record.open)],
    }


def _close(path: Path, records: Sequence[ViolationRecord]) -> None:
    from quiesce.auditor import ViolationJournal

    for record in records:
        record.open = False
    try:
        ViolationJournal(path).append(record.to_json() for record in records)
    except OSError:
        for record in records:
            record.open = True
        raise


def _refuse(args: argparse.Namespace, problem: str) -> int:
    if args.json:
        print(json.dumps({"error": problem}))
    print(f"quiesce violations: {problem}", file=sys.stderr)
    return EXIT_UNUSABLE
