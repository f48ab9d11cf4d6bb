"""``quiesce drill``: break something on purpose, and see that it is found and that somebody is paged.

Rule: without a run folder it breaks a run of its own, of a few seconds, in a temporary folder; a run that goes on is broken
only if it was started with drills allowed. Exit codes: 0 exactly the expected invariants fired; 1 others did, or not all; 2
it could not be done as it was asked for.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

if TYPE_CHECKING:
    from rich.console import Console

    from quiesce.drills import Drill, DrillResult
    from quiesce.observers import Hub
    from quiesce.telemetry.enable import MetricsHandle

__all__ = ["EXIT_NOT_AS_EXPECTED", "EXIT_OK", "EXIT_USAGE", "add_parser", "main_drill"]

EXIT_OK: Final = 0
EXIT_NOT_AS_EXPECTED: Final = 1
EXIT_USAGE: Final = 2

THROW_AWAY_PATIENCE: Final = 30.0
RUNNING_PATIENCE: Final = 900.0
SERVED_LINGER: Final = 60.0

ANSWER_SECONDS: Final = 30.0
"""How long a running run may take to begin with a request, if no other drill is before it."""

POLL_SECONDS: Final = 0.2
JOBS: Final = 3

_EPILOG: Final = """\
examples:
  quiesce drill --list                          what can be broken
  quiesce drill early-cursor                    in a run of its own, in seconds
  quiesce drill early-cursor --run-dir runs/X   in a run that was started with
                                                controller.audit.drills=true
  quiesce drill early-cursor --serve 9464 --linger 120
                                                long enough for your Prometheus
  QUIESCE_ALERTMANAGER=http://alerts:9093 \\
  quiesce drill early-cursor --exporter alertmanager
                                                straight to Alertmanager

A drill in a running run costs it a few prompt groups, which count as dropped,
and perhaps one checkpoint, which is refused.

exit codes:
  0  exactly the expected invariants fired, once each
  1  others fired, or not all of them did
  2  it could not be done as it was asked for
"""

_SEEN_BY: Final = {"live": "event", "sweep": "sweep", "cut": "cut"}
_STATES: Final = {
    "asked": "asked; the run has not begun with it",
    "starting": "a run is starting",
    "looking": "looking for something to break",
    "armed": "the hole is open; the next checkpoint will show it",
    "broken": "broken; waiting for the auditor",
    "fired": "found; looking whether anything else fires",
}


def add_parser(commands: Any) -> None:  # noqa: ANN401 - argparse's subparsers have no public type
    """Add the command to an argument parser's subcommands."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "drill",
        help="break something on purpose, and see who is paged",
        description=(
            "Inject a fault into a run, and tell whether exactly the invariants that it\nbreaks fired."
        ),
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", nargs="?", metavar="NAME", help="which drill; see --list")
    parser.add_argument("--list", action="store_true", help="list the drills, and what each of them breaks")
    parser.add_argument("--all", action="store_true", help="do every drill, each in a throw-away run")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument(
        "--run-dir", type=Path, metavar="DIR", help="the folder of a running run (default: a throw-away run)"
    )
    parser.add_argument(
        "--timeout",
        type=_seconds,
        metavar="S",
        help=f"how long to wait for something to break, and for it to be found "
        f"(default: {THROW_AWAY_PATIENCE:g} s; with --run-dir {RUNNING_PATIENCE:g} s)",
    )
    own = parser.add_argument_group("the throw-away run")
    own.add_argument("--serve", type=int, metavar="PORT", help="serve its metrics there (0: any free port)")
    own.add_argument(
        "--exporter",
        action="append",
        default=[],
        metavar="NAME",
        help="also export to it (alertmanager, webhook, otlp, …), set up by its environment variables; may be repeated",
    )
    own.add_argument(
        "--linger",
        type=_seconds,
        metavar="S",
        help=f"keep it running so long after the drill (default: 0; with --serve {SERVED_LINGER:g} s)",
    )
    own.add_argument("--run", dest="run_name", metavar="NAME", help="its name (default: drill-NAME)")
    own.add_argument("--keep", type=Path, metavar="DIR", help="keep its folder there")
    parser.set_defaults(run=main_drill)


def main_drill(args: argparse.Namespace) -> int:
    """Run the command.

    Args:
        args: The parsed options.

    Returns:
        The exit code.

    Raises:
        ConfigError: If the options contradict each other, or there is no such drill.
    """
    from quiesce.drills import DRILLS, find_drill
    from quiesce.errors import DrillError

    _check(args)
    if args.list:
        _list(DRILLS.values(), as_json=args.json)
        return EXIT_OK
    try:
        if args.all:
            return _all(list(DRILLS.values()), args)
        drill = find_drill(args.name)
        if args.run_dir is not None:
            return _in_a_running_run(drill, args)
        return _in_a_throw_away_run(drill, args)
    except DrillError as error:
        if args.json:
            print(json.dumps({"ok": False, "drill": args.name, "error": str(error)}))
        print(f"quiesce drill: {error}", file=sys.stderr)
        return EXIT_USAGE


def _check(args: argparse.Namespace) -> None:
    from quiesce.errors import ConfigError

    wanted = [bool(args.name), args.list, args.all]
    if sum(wanted) != 1:
        raise ConfigError("NAME", "name one drill, or give --list or --all alone")
    of_its_own = ("serve", "linger", "run_name", "keep")
    given = [name for name in of_its_own if getattr(args, name) is not None] + ["exporter"] * bool(
        args.exporter
    )
    if given and (args.run_dir is not None or args.all):
        option = "--" + given[0].removesuffix("_name")
        where = "--run-dir" if args.run_dir is not None else "--all"
        raise ConfigError(option, f"is of a throw-away run, and does not go with {where}")
    if args.run_dir is not None and args.all:
        raise ConfigError("--all", "a running run is broken by one drill at a time: name it")


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        message = f"{text} is no number of seconds"
        raise argparse.ArgumentTypeError(message)
    return value


# -------------------------------------------------------------------------------------------- a run of its own


def _in_a_throw_away_run(drill: Drill, args: argparse.Namespace) -> int:
    from quiesce.drills.throwaway import throw_away
    from quiesce.observers import Hub

    run = args.run_name or f"drill-{drill.name}"
    serving = args.serve is not None
    linger = args.linger if args.linger is not None else SERVED_LINGER if serving else 0.0
    hub = Hub()
    with _folder(args.keep) as folder, contextlib.ExitStack() as stack:
        # The run makes its own folder; telemetry needs one before that.
        folder.mkdir(parents=True, exist_ok=True)
        metrics = _telemetry(stack, hub, run, folder, args)
        status = stack.enter_context(_Status(f"drill {drill.name}", quiet=args.json))
        if metrics is not None:
            status.say(f"metrics      {metrics.url} (run {run!r})")

        async def stay() -> None:
            if linger > 0:
                status.show(f"over; the run goes on for {linger:g} s more, Ctrl-C ends it")
                await asyncio.sleep(linger)

        done: list[DrillResult] = []

        def told(result: DrillResult) -> None:
            done.append(result)
            status.end()
            _tell(drill, result, run, args)

        try:
            thrown = asyncio.run(
                throw_away(
                    drill,
                    folder,
                    hub=hub,
                    patience=args.timeout or THROW_AWAY_PATIENCE,
                    before_end=stay,
                    told=told,
                    progress=lambda state: status.show(_STATES[state]),
                )
            )
        except KeyboardInterrupt:
            if not done:
                raise
            return _code(done[0])
    if thrown.error:
        print(f"quiesce drill: after the drill {thrown.error}", file=sys.stderr)
        return EXIT_NOT_AS_EXPECTED
    if args.keep is not None and not args.json:
        print(f"folder       {args.keep}")
    return _code(thrown.result)


@contextlib.contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    from quiesce.errors import ConfigError

    if keep is not None:
        if keep.exists() and any(keep.iterdir()):
            raise ConfigError("--keep", f"{keep} is not empty")
        yield keep
        return
    with tempfile.TemporaryDirectory(prefix="quiesce-drill-", ignore_cleanup_errors=True) as temporary:
        yield Path(temporary) / "run"


def _telemetry(
    stack: contextlib.ExitStack, hub: Hub, run: str, folder: Path, args: argparse.Namespace
) -> MetricsHandle | None:
    """Switch on what was asked for; the log is written in any case."""
    from quiesce.telemetry.enable import enable_metrics
    from quiesce.telemetry.logs import LogObserver, configure_run_log
    from quiesce.telemetry.settings import read_settings

    log = configure_run_log(folder, run=run)
    stack.callback(log.close)
    hub.subscribe(LogObserver(log))
    quiet = logging.NullHandler()  # what is wrong is shown in the end, in the table
    logging.getLogger("quiesce").addHandler(quiet)
    stack.callback(logging.getLogger("quiesce").removeHandler, quiet)
    exporters = tuple(dict.fromkeys((*read_settings().exporters, *args.exporter)))
    if args.serve is None and not exporters:
        return None
    metrics = enable_metrics(
        run, args.serve or 0, hub=hub, run_dir=folder, info={"engine": "drill"}, exporters=exporters
    )
    stack.callback(metrics.close)
    metrics.telemetry.connect(log)
    return metrics


def _all(drills: Sequence[Drill], args: argparse.Namespace) -> int:
    """Do every drill, some at a time, each in a run of its own."""
    from quiesce.drills.throwaway import throw_away
    from quiesce.errors import DrillError
    from quiesce.observers import Hub

    found: dict[str, DrillResult | str] = {}

    async def do(drill: Drill, free: asyncio.Semaphore, status: _Status) -> None:
        async with free:
            with _folder(None) as folder:
                try:
                    thrown = await throw_away(
                        drill, folder, hub=Hub(), patience=args.timeout or THROW_AWAY_PATIENCE
                    )
                    found[drill.name] = thrown.error or thrown.result
                except DrillError as error:
                    found[drill.name] = str(error)
            status.show(f"{len(found)} of {len(drills)} are over")

    async def do_all(status: _Status) -> None:
        free = asyncio.Semaphore(JOBS)
        await asyncio.gather(*(do(drill, free, status) for drill in drills))

    quiet = logging.NullHandler()
    logging.getLogger("quiesce").addHandler(quiet)
    try:
        with _Status("drills", quiet=args.json) as status:
            asyncio.run(do_all(status))
    finally:
        logging.getLogger("quiesce").removeHandler(quiet)
    ordered = [(drill, found[drill.name]) for drill in drills]
    if args.json:
        print(json.dumps([_json_of(drill, result) for drill, result in ordered], indent=2))
    else:
        _print_all(ordered)
    good = all(not isinstance(result, str) and result.ok for _, result in ordered)
    return EXIT_OK if good else EXIT_NOT_AS_EXPECTED


# -------------------------------------------------------------------------------------------------- a running run


def _in_a_running_run(drill: Drill, args: argparse.Namespace) -> int:
    from quiesce.drills import requests
    from quiesce.errors import ConfigError, DrillRefusedError

    run: Path = args.run_dir
    try:
        request = requests.ask(run, drill.name, patience=args.timeout or RUNNING_PATIENCE)
    except OSError as error:
        raise ConfigError("--run-dir", f"{run} cannot be asked: {error}") from error
    folder = run / requests.FOLDER
    with _Status(f"drill {drill.name}", quiet=args.json) as status:
        status.show(_STATES["asked"])
        try:
            answer = _await_answer(run, folder, request.id, status)
        except BaseException:
            requests.withdraw(run, request.id)
            raise
    if answer.result is None:
        raise DrillRefusedError(run, answer.error or "it gave no answer")
    _tell(drill, answer.result, str(run), args)
    return _code(answer.result)


def _await_answer(run: Path, folder: Path, request: str, status: _Status) -> Any:  # noqa: ANN401 - an Answer
    from quiesce.drills import requests
    from quiesce.errors import DrillRefusedError

    asked = time.monotonic()
    while True:
        answer = requests.read_answer(folder, request)
        if answer is not None and answer.final:
            return answer
        if answer is not None:
            status.show(_STATES.get(answer.state, answer.state))
        else:
            late = time.monotonic() - asked > ANSWER_SECONDS
            if late and not requests.is_busy(folder):
                raise DrillRefusedError(run, f"it has not looked at the request for {ANSWER_SECONDS:g} s")
        try:
            requests.desk_of(run)
        except DrillRefusedError:
            answer = requests.read_answer(folder, request)  # written as the very last thing, perhaps
            if answer is not None and answer.final:
                return answer
            raise DrillRefusedError(run, "it ended before the drill was over") from None
        time.sleep(POLL_SECONDS)


# ------------------------------------------------------------------------------------------------------- telling


class _Status:
    """One line that says where a drill is: redrawn on a terminal, printed once for each change elsewhere.

    Args:
        what: What the line begins with.
        quiet: Whether nothing is said.
    """

    def __init__(self, what: str, *, quiet: bool) -> None:
        from rich.console import Console

        self._console = Console(stderr=True, highlight=False, quiet=quiet)
        self._what = what
        self._last = ""
        self._spinner = self._console.status(what) if self._console.is_terminal and not quiet else None

    def __enter__(self) -> Self:
        if self._spinner is not None:
            self._spinner.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.end()

    def show(self, state: str) -> None:
        """Say where it is."""
        if state == self._last:
            return
        self._last = state
        if self._spinner is not None:
            self._spinner.update(f"{self._what}: {state}")
            self._spinner.start()
        else:
            self._console.print(f"{self._what}: {state}", soft_wrap=True, markup=False)

    def say(self, line: str) -> None:
        """Print a line that stays."""
        self._console.print(line, soft_wrap=True, markup=False)

    def end(self) -> None:
        """Take the line away."""
        if self._spinner is not None:
            self._spinner.stop()


def _code(result: DrillResult) -> int:
    return EXIT_OK if result.ok else EXIT_NOT_AS_EXPECTED


def _json_of(drill: Drill, result: DrillResult | str) -> dict[str, Any]:
    from quiesce_dashboards.alerts import alert_of

    if isinstance(result, str):
        return {"ok": False, "drill": drill.name, "error": result}
    alerts = {fired.invariant: alert_of(fired.invariant) for fired in result.fired}
    return {**result.to_json(), "alerts": alerts}


def _tell(drill: Drill, result: DrillResult, run: str, args: argparse.Namespace) -> None:
    if args.json:
        print(json.dumps({**_json_of(drill, result), "run": run}, indent=2), flush=True)
    else:
        _print_result(drill, result, run)


def _console() -> Console:
    from rich.console import Console

    return Console(highlight=False)


def _print_result(drill: Drill, result: DrillResult, run: str) -> None:
    from rich.table import Table
    from rich.text import Text

    from quiesce_dashboards.alerts import alert_of

    console = _console()
    console.print(Text.assemble((f"drill {drill.name}", "bold"), f" in {run}"), soft_wrap=True)
    console.print(Text(f"{drill.summary} The hole: {drill.hole}."), soft_wrap=True)
    table = Table(box=None, padding=(0, 2, 0, 0), title_justify="left")
    for name in ("invariant", "fired", "after", "seen by", "alert"):
        table.add_column(name, no_wrap=name != "alert", overflow="fold")
    surplus = result.surplus
    for fired in result.fired:
        wanted = fired not in surplus
        table.add_row(
            fired.invariant,
            Text("yes", style="green") if wanted else Text("unexpected", style="bold red"),
            f"{fired.seconds:.2f} s",
            _SEEN_BY.get(fired.origin, fired.origin),
            alert_of(fired.invariant),
        )
    for name in result.missing:
        table.add_row(name, Text("NO", style="bold red"), "–", "–", alert_of(name))
    for name in result.inactive:
        table.add_row(name, Text("no", style="dim"), "–", "–", "–")
    console.print(table)
    for fired in result.fired:
        console.print(Text(f"  {fired.message} (record {fired.key})"), soft_wrap=True)
    for name, why in result.inactive.items():
        console.print(Text(f"  {name} does not apply to this run: {why}", style="dim"), soft_wrap=True)
    if result.booked:
        console.print(Text(f"  dropped for it: {_some(result.booked)}"), soft_wrap=True)
    if result.ok:
        console.print(Text("Exactly what it breaks fired, once each.", style="bold green"))
        return
    wrong = [f"{name} did not fire" for name in result.missing]
    wrong += [f"{fired.invariant} fired, which was not expected" for fired in surplus]
    console.print(Text(f"Not as expected: {'; '.join(wrong)}.", style="bold red"), soft_wrap=True)


def _some(names: Sequence[str]) -> str:
    shown = 3
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return f"{', '.join(names[:shown])}{more}"


def _print_all(ordered: Sequence[tuple[Drill, DrillResult | str]]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("drill", "fired", "after", "verdict"):
        table.add_column(name, no_wrap=name == "drill")
    for drill, result in ordered:
        if isinstance(result, str):
            table.add_row(drill.name, "–", "–", Text(result, style="bold red"))
            continue
        after = max((fired.seconds for fired in result.fired), default=0.0)
        verdict = Text("as expected", style="green") if result.ok else Text("wrong", style="bold red")
        names = ", ".join(fired.invariant for fired in result.fired) or "nothing"
        table.add_row(drill.name, names, f"{after:.2f} s", verdict)
    _console().print(table)


def _list(drills: Any, *, as_json: bool) -> None:  # noqa: ANN401 - a view of a mapping
    from rich.table import Table

    if as_json:
        told = [
            {
                "name": drill.name,
                "summary": drill.summary,
                "hole": drill.hole,
                "expected": list(drill.expected),
                "when": drill.when,
            }
            for drill in drills
        ]
        print(json.dumps(told, indent=2))
        return
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("drill", no_wrap=True)
    table.add_column("breaks", no_wrap=True)
    table.add_column("what goes wrong")
    for drill in drills:
        table.add_row(drill.name, "\n".join(drill.expected), drill.summary)
    _console().print(table)
