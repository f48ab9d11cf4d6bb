"""``quiesce view``: the dashboards in a browser, from a real Prometheus beside a run, or over what it recorded.

Rule: the run is only read; what is started ends with the command. Exit code 0 when it was told to stop, 1 when the run
cannot be shown, 2 when an option cannot be used.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from quiesce.cli.train import CONFIG_FILE
from quiesce.errors import ConfigError, ExtraMissingError, ViewError

if TYPE_CHECKING:
    from quiesce.view.backend import Content
    from quiesce_dashboards.objectives import AlertConfig

__all__ = ["EXIT_FAILED", "EXIT_OK", "EXIT_UNUSABLE", "add_parser", "main_view", "read_content"]

EXIT_OK: Final = 0
EXIT_FAILED: Final = 1
EXIT_UNUSABLE: Final = 2

RUNS: Final = Path("runs")
_PACKAGES: Final = ("starlette", "uvicorn", "plotly", "markdown")
_LEAST_SECONDS: Final = 0.2
_MOST_SECONDS: Final = 60.0


def add_parser(commands: Any) -> None:  # noqa: ANN401 - argparse's subparsers have no public type
    """Add the command to an argument parser's subcommands."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "view",
        help="show the dashboards in a browser, live or from a recording",
        description=(
            "Start a Prometheus and an Alertmanager beside a run (or over what it recorded), and serve the dashboards "
            "on this machine. Both end with the command; everything is written into the folder view/ of the run."
        ),
        epilog="Exit codes: 0 told to stop, 1 the run cannot be shown, 2 an option cannot be used.",
    )
    parser.add_argument(
        "run_dirs",
        nargs="*",
        type=Path,
        metavar="RUN_DIR",
        help="run folders (default: the newest under runs/)",
    )
    parser.add_argument(
        "--port", type=int, metavar="N", help="port of the page (default: 9470, or a free one)"
    )
    parser.add_argument("--no-browser", action="store_true", help="only print the address")
    parser.add_argument("--prometheus", type=Path, metavar="PATH", help="the program to use")
    parser.add_argument("--alertmanager", type=Path, metavar="PATH", help="the program to use")
    parser.add_argument(
        "--interval",
        type=float,
        default=1.0,
        metavar="SECONDS",
        help="how often the run is scraped (default: 1)",
    )
    parser.add_argument(
        "--data", type=Path, metavar="DIR", help="where to write (default: the folder view/ of the first run)"
    )
    parser.set_defaults(run=main_view)


def main_view(args: argparse.Namespace) -> int:
    """Run the command.

    Args:
        args: Has ``run_dirs``, ``port``, ``no_browser``, ``prometheus``, ``alertmanager``, ``interval`` and ``data``.

    Returns:
        The exit code.
    """
    logging.basicConfig(level=logging.WARNING, format="quiesce view: %(message)s")
    try:
        return _view(args)
    except (ConfigError, ExtraMissingError) as error:
        _tell(str(error))
        return EXIT_UNUSABLE
    except (ViewError, OSError) as error:
        _tell(str(error))
        return EXIT_FAILED


def _view(args: argparse.Namespace) -> int:
    for package in _PACKAGES:
        if find_spec(package) is None:
            raise ExtraMissingError("quiesce view", package, "view")
    if not _LEAST_SECONDS <= args.interval <= _MOST_SECONDS:
        raise ConfigError("--interval", f"has to be {_LEAST_SECONDS:g} to {_MOST_SECONDS:g} seconds")
    from quiesce.view.folders import find_newest
    from quiesce.view.programs import find_programs
    from quiesce.view.session import listen, serve, wait_for_run

    programs = find_programs(args.prometheus, args.alertmanager)
    made = listen(args.port)
    folders: list[Path] = args.run_dirs
    watch = None if folders else RUNS
    if not folders:
        if find_newest(RUNS) is None:
            _tell(f"there is no run under {RUNS}/ yet; waiting for one (Ctrl-C ends it)")
        try:
            folders = [wait_for_run(lambda: find_newest(RUNS))]
        except KeyboardInterrupt:
            return EXIT_OK
    serve(
        folders,
        programs,
        read_content(_numbers(folders[0])),
        made,
        open_browser=not args.no_browser,
        tell=_tell,
        interval_seconds=args.interval,
        watch=watch,
        data=args.data,
    )
    return EXIT_OK


def _numbers(folder: Path) -> AlertConfig | None:
    """Return the numbers of rules in a run's configuration; None where it leaves all as they are."""
    from quiesce_dashboards.alert_settings import own_numbers

    path = folder / CONFIG_FILE
    try:
        return own_numbers(path)
    except ConfigError as error:
        # The folder may be another program's, and so its configuration.
        _tell(f"the rules keep their default numbers: {path}: {error}")
        return None


def read_content(config: AlertConfig | None = None) -> Content:
    """Read what the command shows: the dashboards, the rules and the address of the documentation.

    They are the generated files that are installed along, so this needs neither grafanalib nor a parser of PromQL; with
    numbers of one's own they are made anew, the dashboards where grafanalib is there. Never suspends; reads files.

    Args:
        config: The numbers of the rules and the dashboards; None takes the files as they are.

    Returns:
        Dashboards by uid, in the order of their files' names, and rules whose runbooks lead to an address of the caller's.
    """
    import json

    import yaml

    from quiesce.view.backend import Content
    from quiesce_dashboards.alerts import alert_of
    from quiesce_dashboards.objectives import RUNBOOKS
    from quiesce_dashboards.rules import ALERTS_FILE, GENERATED, render, rules_text

    texts = {
        path.name: path.read_text(encoding="utf-8") for path in (GENERATED / "dashboards").glob("*.json")
    }
    text = (GENERATED / ALERTS_FILE).read_text(encoding="utf-8")
    if config is not None:
        text = rules_text(config)
        with contextlib.suppress(ExtraMissingError):
            from quiesce_dashboards.dashboards import dashboard_files

            texts = dashboard_files(config)
    found = {}
    for name, made in sorted(texts.items()):
        found[json.loads(made).get("uid") or Path(name).stem] = made

    def rules(base: str) -> str:
        document = yaml.safe_load(text)
        for group in document["groups"]:
            for rule in group["rules"]:
                rule["annotations"]["runbook_url"] = f"{base}/{rule['alert']}"
        return render(document)

    return Content(found, rules, RUNBOOKS, alert_of)


def _tell(line: str) -> None:
    print(f"quiesce view: {line}", file=sys.stderr, flush=True)
