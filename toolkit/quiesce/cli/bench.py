"""``quiesce bench``: what the primitives cost, measured here and now.

Rule: it prints what was measured and judges nothing, unless it is asked to (``--check``). Exit code 0; 1 with
``--check`` when a bar was missed; 2 when it cannot be run.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from rich.console import Console

    from quiesce.bench import BenchReport

__all__ = ["BENCHES", "EXIT_MISSED", "add_parser", "main_bench", "print_bench"]

BENCHES: Final = ("slots", "window", "restore", "reply", "auditor")
EXIT_MISSED: Final = 1

_EPILOG: Final = """\
benchmarks:
  slots     a mutation slot and the drain of queued waiters, against the shape
            that they replace; and what telemetry adds to a slot, to slots at a
            steady rate and to a training run (five minutes)
  window    how long a save keeps everybody else out, against groups, bytes and
            the latency of the file system, in three modes (about ten minutes,
            20 GiB of disk)
  restore   how long a resume takes, against groups and bytes (minutes, 6 GiB)
  reply     what a generation call's reply waits for when rows are cleared: in the
            call, behind a fence of its own, under the gate's permit (three minutes)
  auditor   an event that the auditor judges, what it keeps for a group, judging a
            cut, and how much later the event loop is while it sweeps a million
            groups (five minutes, 2 GiB of memory, 1 GiB of disk)

exit codes:
  0  measured
  1  a bar was missed, with --check
  2  wrong arguments, or a package is missing
"""


def add_parser(commands: Any) -> None:  # noqa: ANN401 - argparse's subparsers have no public type
    """Add the command to an argument parser's subcommands."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "bench",
        help="measure what a slot, a checkpoint window, a resume, a reply and the auditor cost",
        description=(
            "Measure what the primitives cost, each beside a baseline in the same process, in turns: medians "
            "over rounds, with their quartiles."
        ),
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("bench", choices=BENCHES, metavar="NAME", help=f"one of {', '.join(BENCHES)}")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument(
        "--quick", action="store_true", help="small sizes and few rounds, to see that it works"
    )
    parser.add_argument("--check", action="store_true", help="fail when a bar is missed")
    parser.add_argument(
        "--dir",
        type=Path,
        metavar="DIR",
        help="where stores and checkpoints go meanwhile (default: a temporary folder)",
    )
    parser.add_argument(
        "--docs",
        type=Path,
        metavar="DIR",
        help="also put the numbers into their page in DIR, and draw its plot",
    )
    parser.set_defaults(run=main_bench)


def main_bench(args: argparse.Namespace) -> int:
    """Run the command.

    Args:
        args: Has ``bench``, ``json``, ``quick``, ``check``, ``dir`` and ``docs``.

    Returns:
        The exit code.
    """
    from quiesce.bench.page import update_page

    report = _run(args)
    if args.json:
        print(json.dumps(report.to_json(), indent=2, allow_nan=False))
    else:
        print_bench(report)
    if args.docs is not None:
        for path in update_page(report, args.docs):
            print(f"wrote {path}", file=sys.stderr)
    missed = () if report.quick else report.missed
    for name in missed:
        print(f"quiesce bench: {name} is beyond its target", file=sys.stderr)
    return EXIT_MISSED if args.check and missed else 0


def print_bench(report: BenchReport, console: Console | None = None) -> None:
    """Print a report for people; plain text where there is no terminal.

    Args:
        report: What was measured.
        console: Where; None means standard output.
    """
    from rich.console import Console
    from rich.table import Table as RichTable

    console = Console(highlight=False) if console is None else console
    for table in (*report.tables, report.bars_table()):
        shown = RichTable(title=table.title, title_justify="left")
        for number, column in enumerate(table.columns):
            shown.add_column(column, justify="right" if number else "left")
        for row in table.rows:
            shown.add_row(*(cell.strip("`") for cell in row))
        console.print(shown)
    for line in report.answer:
        console.print(line)
    if report.quick:
        console.print("Quick: sizes and rounds were cut down, so the bars say nothing about cost.")


def _run(args: argparse.Namespace) -> BenchReport:
    from quiesce.bench import run_auditor, run_reply, run_restore, run_slots, run_window
    from quiesce.errors import ConfigError

    if args.dir is not None and not args.dir.is_dir():
        raise ConfigError("--dir", f"{args.dir} is not a folder")
    if args.bench == "slots":
        return run_slots(quick=args.quick)
    if args.bench == "reply":
        return run_reply(quick=args.quick)
    measure = {"window": run_window, "restore": run_restore, "auditor": run_auditor}[args.bench]
    return measure(quick=args.quick, folder=args.dir)
