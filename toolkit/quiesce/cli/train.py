"""``quiesce train``: run, stop and resume the reference run.

Rule: whatever ends the command, the run's folder says how to go on, and the exit code says whether something is unsaved.
The first interrupt or SIGTERM saves once and stops; a second one gives up at once.

Exit codes: 0 finished or stopped with everything saved; 1 failed, or the last save failed; 2 wrong arguments, configuration
or folder; 3 halted by a violation whose policy that is; 130 or 143 given up by a second interrupt or SIGTERM.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.util
import logging
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from quiesce.errors import (
    ConfigError,
    NothingToRestoreError,
    QuiesceError,
    RunFolderError,
)

if TYPE_CHECKING:
    from rich.console import Console

    from quiesce import Controller, Hub, RunSummary
    from quiesce.auditor import ViolationRecord
    from quiesce.checkpoint import RunFolder
    from quiesce.telemetry.enable import MetricsHandle
    from quiesce_grpo.display import TrainDisplay
    from quiesce_grpo.run_config import RunConfig

__all__ = ["CONFIG_FILE", "EXIT_HALTED", "METRICS_SNAPSHOT", "add_parser", "main_train"]

CONFIG_FILE: Final = "config.yaml"
"""The run's whole configuration, in its folder; a resume reads it."""

METRICS_SNAPSHOT: Final = "metrics.prom"
"""The run's metrics in the text exposition format, rewritten at every save and at the end."""

EXIT_HALTED: Final = 3
"""A violation halted the run, as its policy says."""

RUNS: Final = Path("runs")
"""Where run folders go unless ``--run-dir`` says otherwise."""

_JOURNAL: Final = "lineage.jsonl"

_NEEDED: Final = ("torch", "transformers", "torchdata", "reasoning_gym")
_EXTRA: Final = "the reference run needs packages that are not installed ({}): pip install 'quiesce[grpo]'"

_EPILOG: Final = """\
presets:
  tiny    a decoder learns to add two digits, on two CPU cores in minutes
  gpu     0.36 billion parameters on word problems, on an H100/H200-class card

examples:
  quiesce train tiny
  quiesce train tiny controller.max_steps=50 controller.sampler.name=windowed
  quiesce train my.yaml --run-dir runs/mine
  quiesce train --run-dir runs/mine --resume

exit codes:
  0    finished or stopped, and everything is saved
  1    the run or its last save failed
  2    wrong arguments, configuration or folder
  3    halted: an invariant is broken whose policy is to halt the run
       (controller.audit.policies); what could be saved is saved
  130  given up by a second Ctrl-C (143: by a second SIGTERM)
"""

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


def add_parser(commands: Any) -> None:  # noqa: ANN401 - argparse's subparsers have no public type
    """Add the command to an argument parser's subcommands."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "train",
        help="train a policy asynchronously with GRPO; kill it, resume it, lose nothing",
        usage=(
            "quiesce train [CONFIG.yaml | PRESET] [KEY=VALUE ...]\n"
            "                     [--run-dir DIR] [--resume] [--accept-suspect]"
        ),
        description=(
            "Train a policy with asynchronous GRPO on a verifiable task.\n"
            "The first Ctrl-C (or SIGTERM) saves once and stops, a second one gives up;\n"
            "--resume goes on from the newest checkpoint, also after a kill."
        ),
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "words",
        nargs="*",
        metavar="WORD",
        help="a YAML file or a preset (default: tiny), then overrides KEY=VALUE",
    )
    parser.add_argument(
        "--run-dir", type=Path, metavar="DIR", help="folder of the run (default: runs/NAME-DATE-TIME)"
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="go on with the run in --run-dir (default: the newest under runs/), with its own configuration",
    )
    parser.add_argument(
        "--accept-suspect",
        action="store_true",
        help="with --resume: also go on from a checkpoint that its verification refused",
    )
    parser.set_defaults(run=main_train)


def main_train(args: argparse.Namespace) -> int:
    """Run the command.

    Args:
        args: Has ``words``, ``run_dir``, ``resume`` and ``accept_suspect``.

    Returns:
        The exit code.
    """
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(f"quiesce train: {_EXTRA.format(', '.join(missing))}", file=sys.stderr)
        return 2
    from quiesce.checkpoint import RunFolder, files
    from quiesce_grpo.run_config import dump_config

    if args.accept_suspect and not args.resume:
        raise ConfigError("--accept-suspect", "goes with --resume")
    path = _run_dir(args)
    config = _config(args, path)
    path = path or RUNS / f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    try:
        folder = RunFolder.open(path, resume=args.resume)
    except RunFolderError as error:
        print(f"quiesce train: {error}", file=sys.stderr)
        return 2
    code = 1
    try:
        if not args.resume:
            with _writing(path):
                files.replace_durable(path / CONFIG_FILE, dump_config(config).encode())
        code = _train(config, folder, resume=args.resume, accept_suspect=args.accept_suspect)
    finally:
        try:
            folder.close()
        except OSError as error:
            print(f"quiesce train: {path / _JOURNAL} cannot be written: {error}", file=sys.stderr)
            code = 1
    return code


def _run_dir(args: argparse.Namespace) -> Path | None:
    path: Path | None = args.run_dir
    if path is not None:
        if args.resume and not path.is_dir():
            raise ConfigError("--run-dir", f"{path} is no run folder, so there is nothing to resume")
        return path
    if not args.resume:
        return None
    runs = [entry for entry in RUNS.iterdir() if (entry / CONFIG_FILE).is_file()] if RUNS.is_dir() else []
    if not runs:
        raise ConfigError("--resume", f"there is no run under {RUNS}/; name its folder with --run-dir")
    return max(runs, key=_last_active)


def _last_active(run: Path) -> float:
    return max((run / name).stat().st_mtime for name in (CONFIG_FILE, _JOURNAL) if (run / name).exists())


def _config(args: argparse.Namespace, path: Path | None) -> RunConfig:
    from quiesce_grpo.run_config import check_resumable, load_config

    words = list(args.words)
    source: str | Path | None = words.pop(0) if words and "=" not in words[0] else None
    if not args.resume or path is None:
        return _checked(load_config("tiny" if source is None else source, words))
    saved = path / CONFIG_FILE
    if source is not None:
        raise ConfigError(str(source), f"a resume takes its configuration from {saved}; override keys")
    if not saved.is_file():
        raise ConfigError("--resume", f"{path} has no {CONFIG_FILE}, so it is no run folder")
    config = load_config(saved, words)
    check_resumable(load_config(saved, []), config)
    return _checked(config)


def _checked(config: RunConfig) -> RunConfig:
    """Return a configuration of which the section that the run itself does not read can be used too."""
    from quiesce_dashboards.alert_settings import alert_config

    alert_config(config.alerts, config.metrics.objectives)
    return config


def _train(config: RunConfig, folder: RunFolder, *, resume: bool, accept_suspect: bool) -> int:
    from rich.console import Console

    from quiesce import default_hub
    from quiesce.telemetry.enable import enable_metrics
    from quiesce.telemetry.logs import LogObserver, configure_run_log
    from quiesce_grpo.display import TrainDisplay

    hub = default_hub()
    console = Console()
    metrics: MetricsHandle | None = None
    with contextlib.ExitStack() as stack:
        if config.metrics.enabled:
            with _writing(folder.path):
                metrics = enable_metrics(
                    config.name,
                    config.metrics.port,
                    config.metrics.host,
                    hub=hub,
                    run_dir=folder.path,
                    info={"engine": "quiesce_grpo"},
                    exporters=config.metrics.exporters,
                    spans_per_second=config.metrics.spans_per_second,
                    objectives=config.metrics.objectives,
                    settings={"alertmanager": {"alerts": config.alerts}},
                )
            stack.callback(_linger, metrics, config.metrics.linger_seconds)
            metrics.expect_checkpoints(steps=config.controller.save_every_steps)
        _say(console, f"run folder   {folder.path}")
        if metrics is not None:
            _say(console, f"metrics      {metrics.url}")
        with contextlib.ExitStack() as shown:
            display = shown.enter_context(
                TrainDisplay(hub, max_steps=config.controller.max_steps, console=console)
            )
            with _writing(folder.path):
                log = configure_run_log(folder.path, config.log_level, run=config.name)
            shown.callback(log.close)
            if metrics is not None:
                metrics.connect(log)
            console_log = _ConsoleLog()
            logging.getLogger("quiesce").addHandler(console_log)
            shown.callback(logging.getLogger("quiesce").removeHandler, console_log)
            files = _RunFiles(folder.path, config, metrics)
            shown.callback(files.close)
            for observer in (LogObserver(log), files):
                hub.subscribe(observer)
                shown.callback(hub.unsubscribe, observer)
            try:
                summary = asyncio.run(
                    _main(config, folder, hub, display, resume=resume, accept_suspect=accept_suspect)
                )
            except Exception as error:
                _advise(error, folder, began=files.began)
                raise
        # What is recorded is written by a thread, and the last of it, or all, when telemetry is closed.
        recorded = metrics is not None and "recorder" in metrics.telemetry.pipeline.lanes()
        return _tell(summary, folder, console, display.summary(summary), recorded=recorded)


class _ConsoleLog(logging.Handler):
    """Warnings and errors of Quiesce's loggers for a person: one line each; the run's log has the tracebacks."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)

    def emit(self, record: logging.LogRecord) -> None:
        """Print one message."""
        error = record.exc_info[1] if record.exc_info else None
        why = "" if error is None else f": {' '.join(str(error).split())}"
        # Looked up now: while the display draws, this is what prints above the drawing.
        print(f"{record.levelname.lower()}: {record.getMessage()}{why}", file=sys.stderr)


class _RunFiles:
    """Keeps two files of a run folder: its configuration, and at every save a snapshot of its metrics.

    Attributes:
        began: Whether the run got as far as running.
    """

    def __init__(self, path: Path, config: RunConfig, metrics: MetricsHandle | None) -> None:
        from quiesce.threads import DaemonExecutor

        self._path = path
        self._config = config
        self._metrics = metrics
        self._lock = threading.Lock()
        self._executor = DaemonExecutor("quiesce-metrics-snapshot", 1)
        self.began = False

    def run_state_changed(self, state: str) -> None:
        """Note the state; write the metrics for the last time while the run's primitives are still there."""
        self.began = self.began or state == "running"
        if state in {"finished", "failed"}:
            self._snapshot()

    def restore_ended(self, outcome: str, *_: object) -> None:
        """Keep a resume's configuration only now: one that the checkpoint does not fit must not stay behind."""
        if outcome == "completed":
            self._executor.submit(self._keep_config)

    def checkpoint_ended(self, *_: object) -> None:
        """Write the metrics soon."""
        self._executor.submit(self._snapshot)

    def close(self) -> None:
        """Wait for what is being written."""
        self._executor.shutdown()

    def _keep_config(self) -> None:
        from quiesce.checkpoint import files
        from quiesce_grpo.run_config import dump_config

        path, told = self._path / CONFIG_FILE, dump_config(self._config).encode()
        try:
            if path.read_bytes() != told:
                files.replace_durable(path, told)
        except OSError as error:
            print(f"warning: {path} keeps its old content: {error}", file=sys.stderr)

    def _snapshot(self) -> None:
        """A folder that cannot be written does not end the run."""
        if self._metrics is None:
            return
        path = self._path / METRICS_SNAPSHOT
        with self._lock:
            try:
                self._metrics.snapshot(path)
            except OSError as error:
                print(f"warning: {path} cannot be written: {error}", file=sys.stderr)


class _Stop:
    """What SIGINT and SIGTERM do: the first asks the run to save and stop, the second ends the process.

    Args:
        display: Told of both.
        folder: The run's folder.
    """

    def __init__(self, display: TrainDisplay, folder: RunFolder) -> None:
        self._display = display
        self._folder = folder
        self._controller: Controller | None = None
        self._asked = False

    def listen(self) -> None:
        """Take the signals over; they are read by the running loop."""
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._signalled, number)

    def watch(self, controller: Controller) -> None:
        """Learn whom to ask; a signal that came before is passed on."""
        self._controller = controller
        if self._asked:
            controller.request_stop()

    def _signalled(self, number: int) -> None:
        if self._asked:
            self._display.abandon()
            told = f"given up without saving; the newest checkpoint is whole: {_resume(self._folder)}"
            print(f"quiesce train: {told}", file=sys.__stderr__, flush=True)
            os._exit(128 + number)
        self._asked = True
        self._display.stopping(signal.Signals(number).name)
        if self._controller is not None:
            self._controller.request_stop()


async def _main(
    config: RunConfig,
    folder: RunFolder,
    hub: Hub,
    display: TrainDisplay,
    *,
    resume: bool,
    accept_suspect: bool,
) -> RunSummary:
    stop = _Stop(display, folder)
    stop.listen()
    display.preparing("loading torch and transformers")
    from quiesce_grpo.run import train

    return await train(
        config,
        folder,
        resume=resume,
        accept_suspect=accept_suspect,
        hub=hub,
        on_controller=stop.watch,
        on_phase=display.preparing,
    )


def _tell(
    summary: RunSummary,
    folder: RunFolder,
    console: Console,
    table: Any,  # noqa: ANN401 - something that rich draws
    *,
    recorded: bool,
) -> int:
    from quiesce.telemetry.recording import FOLDER as RECORDED

    console.print(f"run {summary.outcome} at step {summary.step}", style="bold", highlight=False)
    console.print(table)
    path = folder.path
    _say(console, f"checkpoints  {folder.checkpoints}")
    _say(console, f"files        {path}/{{{CONFIG_FILE},log.jsonl,{_JOURNAL},{METRICS_SNAPSHOT}}}")
    if recorded or (path / RECORDED).is_dir():
        _say(console, f"recording    {path / RECORDED}")
        _say(console, f"report       quiesce report {shlex.quote(str(path))}")
        _say(console, f"dashboards   quiesce view {shlex.quote(str(path))}")
    _say(console, f"prove it     quiesce audit {shlex.quote(str(path))}")
    if any(record.open for record in _violations(path)):
        _say(console, f"look into    quiesce violations {shlex.quote(str(path))}")
    last = summary.last_save
    if summary.save_failed and last is not None:
        kept = f" (kept as {last.path}; --accept-suspect resumes from it)" if last.path else ""
        print(
            f"quiesce train: the last save failed: {last.error or last.reason}{kept}; the checkpoint before it is "
            f"whole, go on from it with: {_resume(folder)}",
            file=sys.stderr,
        )
    if summary.halted_by is not None:
        record = summary.halted_by
        print(
            f"quiesce train: halted: {record.severity} {record.invariant}: {record.message}\n"
            f"look into it with: quiesce violations {shlex.quote(str(path))}\n"
            f"then go on with: {_resume(folder)}",
            file=sys.stderr,
        )
        return EXIT_HALTED
    if summary.save_failed:
        return 1
    if summary.outcome == "stopped":
        _say(console, f"go on with   {_resume(folder)}")
    return 0


def _violations(path: Path) -> list[ViolationRecord]:
    from quiesce.auditor import read_violations

    try:
        return read_violations(path)
    except OSError as error:
        print(f"warning: the violations in {path} cannot be read: {error}", file=sys.stderr)
        return []


def _say(console: Console, line: str) -> None:
    console.print(line, highlight=False, soft_wrap=True, markup=False)


def _resume(folder: RunFolder) -> str:
    return f"quiesce train --run-dir {shlex.quote(str(folder.path))} --resume"


def _advise(error: Exception, folder: RunFolder, *, began: bool) -> None:
    """Add to a failure how to go on from it."""
    if isinstance(error, NothingToRestoreError):
        error.add_note(
            "the run ended before its first checkpoint and trained nothing: start it again in another folder"
        )
    elif began and folder.published():
        error.add_note(f"go on from the newest checkpoint with: {_resume(folder)}")


@contextlib.contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Let an error of the operating system say which run folder it is about."""
    try:
        yield
    except OSError as error:
        if isinstance(error, QuiesceError):
            raise
        raise RunFolderError(str(path), f"cannot be written ({error})") from error


def _linger(metrics: MetricsHandle, seconds: float) -> None:
    """Serve metrics a while longer, for one last scrape; a signal ends only the wait: everything is saved."""
    if seconds > 0:
        over = threading.Event()
        for number in _SIGNALS:
            signal.signal(number, lambda *_: over.set())
        over.wait(seconds)
    metrics.close()
