"""``quiesce report``: one page about a run, from what it recorded, that opens without a server.

Rule: the run is only read. Exit code 0 when the page is written, 1 when it cannot be, 2 when the folder has no
recording.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, Final

from quiesce.errors import ExtraMissingError, NoRecordingError

__all__ = ["EXIT_FAILED", "EXIT_OK", "EXIT_UNUSABLE", "add_parser", "main_report"]

EXIT_OK: Final = 0
EXIT_FAILED: Final = 1
EXIT_UNUSABLE: Final = 2


def add_parser(commands: Any) -> None:  # noqa: ANN401 - argparse's subparsers have no public type
    """Add the command to an argument parser's subcommands."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "report",
        help="write one HTML page about a run, from what it recorded",
        description=(
            "Write one self-contained HTML page about a run, from the files in its folder telemetry/: phases of "
            "each save, what saving cost, slots, groups, training, invariants. The run may still go on."
        ),
        epilog="Exit codes: 0 written, 1 it cannot be written, 2 the folder has no recording.",
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="a run folder")
    parser.add_argument(
        "-o", "--output", type=Path, metavar="FILE", help="where to write it (default: RUN_DIR/report.html)"
    )
    parser.set_defaults(run=main_report)


def main_report(args: argparse.Namespace) -> int:
    """Run the command.

    Args:
        args: Has ``run_dir`` and ``output``.

    Returns:
        The exit code.
    """
    from quiesce.report import write_report

    try:
        path = write_report(args.run_dir, args.output)
    except NoRecordingError as error:
        print(f"quiesce report: {error}", file=sys.stderr)
        return EXIT_UNUSABLE
    except (ExtraMissingError, OSError) as error:
        print(f"quiesce report: {error}", file=sys.stderr)
        return EXIT_FAILED
    print(f"{path} ({path.stat().st_size / 2**20:.1f} MiB)")
    return EXIT_OK
