"""``quiesce exec``: run a command with telemetry switched on, without touching its code.

Rule: it sets variables of the environment, says what it set, and becomes the command: the same process, the same exit
code, the same signals. Telemetry starts in whichever process of the command first builds a barrier, a ledger, or
another part of Quiesce. Exit codes: the command's; 1 when a named port is taken; 2 when it cannot be run; 126 and 127,
as a shell's, when the command cannot be executed or is not there.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
import time
from pathlib import Path
from typing import Any, Final

__all__ = ["EXIT_NOT_EXECUTABLE", "EXIT_NOT_FOUND", "add_parser", "environment_of", "main_exec"]

EXIT_NOT_EXECUTABLE: Final = 126
EXIT_NOT_FOUND: Final = 127

_EPILOG: Final = """\
example:
  quiesce exec --run ppo-7b --port 9464 -- python train.py --steps 1000

The command has to use Quiesce somewhere: a barrier is enough. What else can be
set in the environment is listed under "switching on" in the documentation.
"""


def add_parser(commands: Any) -> None:  # noqa: ANN401 - argparse's subparsers have no public type
    """Add the command to an argument parser's subcommands."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "exec",
        help="run a command with telemetry switched on",
        description="Run a command with metrics, spans and a recording switched on, without touching its code.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    # `run` is the function that the command line calls.
    parser.add_argument(
        "--run", dest="run_name", metavar="NAME", help="the run's name (default: the command's)"
    )
    parser.add_argument(
        "--port", metavar="N", help="port of the metrics endpoint (default: 9464, or a free one)"
    )
    parser.add_argument("--host", metavar="ADDRESS", help="address to listen on (default: loopback only)")
    parser.add_argument(
        "--run-dir", type=Path, metavar="DIR", help="where to record (default: a new folder under runs/)"
    )
    parser.add_argument("--no-record", action="store_true", help="record nothing")
    parser.add_argument("--sd-dir", type=Path, metavar="DIR", help="write a Prometheus file_sd target there")
    parser.add_argument(
        "--otlp",
        metavar="URL",
        help="also export to that OpenTelemetry collector (http/protobuf, or what OTEL_EXPORTER_OTLP_PROTOCOL says)",
    )
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="what to run")
    parser.set_defaults(run=main_exec)


def main_exec(args: argparse.Namespace) -> int:
    """Become the command.

    Args:
        args: Has ``run_name``, ``port``, ``host``, ``run_dir``, ``no_record``, ``sd_dir``, ``otlp``, ``command``.

    Returns:
        An exit code, only if the command could not be executed.

    Raises:
        ConfigError: If there is no command, or an option cannot be used.
        PortUnavailableError: If the named port is taken.
    """
    from quiesce.errors import ConfigError

    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        raise ConfigError("COMMAND", "there is nothing to run; write it after --")
    environment = environment_of(args, command)
    try:
        os.execvpe(command[0], command, {**os.environ, **environment})  # noqa: S606 - the user's own command
    except FileNotFoundError:
        print(f"quiesce exec: there is no command {command[0]!r}", file=sys.stderr)
        return EXIT_NOT_FOUND
    except OSError as error:
        print(f"quiesce exec: {command[0]} cannot be executed: {error.strerror}", file=sys.stderr)
        return EXIT_NOT_EXECUTABLE


def environment_of(args: argparse.Namespace, command: list[str]) -> dict[str, str]:
    """Return the variables to set for a command, and make the folders that they name.

    Args:
        args: The parsed options.
        command: The command's words.

    Raises:
        ConfigError: If an option cannot be used.
        PortUnavailableError: If the named port is taken.
        RunFolderError: If the folder of the recording cannot be made.
    """
    from quiesce.telemetry.settings import SWITCH, read_settings

    run = args.run_name or _name_of(command)
    told: dict[str, str] = {SWITCH: "1", "QUIESCE_RUN": run}
    exporters = [name for name in os.environ.get("QUIESCE_EXPORTERS", "").split(",") if name]
    if args.port is not None:
        told["QUIESCE_PORT"] = args.port
    if args.host is not None:
        told["QUIESCE_HOST"] = args.host
    if args.sd_dir is not None:
        told["QUIESCE_SD_DIR"] = str(args.sd_dir.absolute())
    if args.otlp is not None:
        told["OTEL_EXPORTER_OTLP_ENDPOINT"] = args.otlp
        exporters.append("otlp")
    settings = read_settings({**os.environ, **told})
    if settings.port and settings.serves:
        _check_port(settings.host or "127.0.0.1", settings.port)
    # Another rank, or the process that started this one, serves and records.
    if settings.serves and not args.no_record:
        folder = args.run_dir or Path("runs") / f"{run}-{time.strftime('%Y%m%d-%H%M%S')}"
        _make(folder)
        told["QUIESCE_RUN_DIR"] = str(folder.absolute())
        exporters.append("recorder")
        where = shlex.quote(str(folder))
        ways = f"quiesce report {where}, or quiesce view {where}"
        print(f"quiesce exec: recording to {folder}; look at it with: {ways}", file=sys.stderr)
    told["QUIESCE_EXPORTERS"] = ",".join(dict.fromkeys(exporters))
    return told


def _name_of(command: list[str]) -> str:
    """Return the stem of the script, or else of the program."""
    scripts = [Path(word).stem for word in command if word.endswith(".py")]
    return scripts[0] if scripts else Path(command[0]).name


def _make(folder: Path) -> None:
    from quiesce.errors import RunFolderError

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunFolderError(str(folder), f"cannot be made ({error.strerror})") from error


def _check_port(host: str, port: int) -> None:
    """Refuse a port that is taken before the command starts: later it could cost only the telemetry."""
    import socket

    from quiesce.errors import PortUnavailableError

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise PortUnavailableError(host, port, str(error.strerror)) from error
