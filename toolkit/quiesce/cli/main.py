"""The ``quiesce`` command: finds the subcommand and turns errors into one clear line and an exit code.

Rule: a failure that Quiesce names is one line on standard error, never a traceback; a bug is a traceback. Nothing heavy is
imported before the subcommand that needs it.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Final

from quiesce.cli import audit, bench, dashboards, drill, report, rules, skew, train, view, violations
from quiesce.cli import exec as exec_

__all__ = ["EXIT_FAILED", "EXIT_USAGE", "main"]

EXIT_FAILED: Final = 1
"""The command ran and failed."""

EXIT_USAGE: Final = 2
"""The command could not be run as it was asked for: arguments, configuration, a path."""

_INTERRUPTED: Final = 130
"""As a shell reports a command that an interrupt ended."""

_PIPE_CLOSED: Final = 141
"""As a shell reports a command whose reader went away."""

_EPILOG: Final = """\
start here:
  quiesce train tiny         train a tiny policy on two CPU cores in minutes
  quiesce train --resume     go on with the newest run under runs/
  quiesce audit runs/NAME    prove from its files that no prompt was lost or
                             trained twice
  quiesce report runs/NAME   one page about a run, from what it recorded
  quiesce view               the dashboards in a browser, live
  quiesce exec -- CMD        run your own training with telemetry switched on
  quiesce drill early-cursor break something on purpose, see who is paged
  quiesce skew               see the bug that the atomic cut prevents
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: Arguments without the program's name; None takes the process's.

    Returns:
        The exit code.
    """
    from quiesce.errors import ConfigError, QuiesceError

    try:
        args = _parse(argv)
        code: int = args.run(args)
    except QuiesceError as error:
        print(f"quiesce: {error}", *getattr(error, "__notes__", ()), sep="\n", file=sys.stderr)
        return EXIT_USAGE if isinstance(error, ConfigError) else EXIT_FAILED
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        # Whoever read the output has had enough (`| head`). What is still buffered would fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _PIPE_CLOSED
    return code


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    from quiesce import __version__

    parser = argparse.ArgumentParser(
        prog="quiesce",
        description=(
            "Checkpoints of asynchronous RL training as one atomic cut,\nand that cut made visible."
        ),
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"quiesce {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in (train, exec_, report, view, audit, violations, skew, drill, rules, dashboards, bench):
        module.add_parser(commands)
    args, rest = parser.parse_known_args(argv)
    # argparse takes a list of words only where it stands in one piece; options may stand among ours.
    unknown = [word for word in rest if word.startswith("-") or not hasattr(args, "words")]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if rest:
        args.words = [*args.words, *rest]
    return args


if __name__ == "__main__":
    sys.exit(main())
