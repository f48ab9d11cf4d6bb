"""``quiesce train``: run, stop and resume the reference run.

Rule: whatever ends the command, the run's folder says how to go on, and the exit code says whether something is unsaved.
The first interrupt or SIGTERM saves once and stops; a second one gives up at once.

Exit codes: 0 finished or stopped with everything saved; 1 failed, or the last save failed; 2 wrong arguments, configuration
or folder; 130 given up by a second interrupt.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from quiesce.errors import ConfigError, RunFolderError

if TYPE_CHECKING:
    from rich.console import Console

    from quiesce import Controller, Hub, RunSummary
    from quiesce.checkpoint import RunFolder
    from quiesce.telemetry.enable import MetricsHandle
    from quiesce_grpo.run_config import RunConfig

__all__ = ["CONFIG_FILE", "METRICS_SNAPSHOT", "add_parser", "main_train"]

CONFIG_FILE: Final = "config.yaml"
"""The run's whole configuration, in its folder; a resume reads it."""

METRICS_SNAPSHOT: Final = "metrics.prom"
"""The run's metrics in the text exposition format, rewritten at every save and at the end."""

RUNS: Final = Path("runs")
"""Where run folders go unless ``--run-dir`` says otherwise."""

_EXTRA: Final = (
    "the reference run needs torch, transformers, torchdata and reasoning-gym: pip install 'quiesce[grpo]'"
)


def add_parser(commands: Any) -> None:  # noqa: ANN401 - argparse's subparsers have no public type
    """Add the command to an argument parser's subcommands."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "train",
        help="train a policy asynchronously with GRPO; kill it, resume it, lose nothing",
        usage="quiesce train [CONFIG.yaml | PRESET] [KEY=VALUE ...] [--run-dir DIR] [--resume] [--accept-suspect]",
        description=(
            "Train a policy with asynchronous GRPO on a verifiable task. The first Ctrl-C (or SIGTERM) saves once and stops; "
            "`--resume` goes on from the newest checkpoint."
        ),
        epilog=(
            "Presets: tiny (two CPU cores, under three minutes), gpu (one H100/H200-class card). "
            "Example: quiesce train tiny controller.max_steps=50 controller.sampler.name=windowed. "
            "Exit codes: 0 everything is saved, 1 the run or its last save failed, 2 wrong arguments or folder."
        ),
    )
    parser.add_argument(
        "words",
        nargs="*",
        metavar="CONFIG.yaml | PRESET | KEY=VALUE",
        help="a YAML file or a preset (default: tiny), then overrides such as controller.max_steps=50",
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
    try:
        import torch  # noqa: F401 - whether the extra is there
        import torchdata  # noqa: F401 - as torch
        import transformers  # noqa: F401 - as torch

        from quiesce_grpo.run_config import RunConfig, dump_config
    except ModuleNotFoundError as error:
        print(f"quiesce train: {_EXTRA} ({error})", file=sys.stderr)
        return 2
    from quiesce.checkpoint import RunFolder

    if args.accept_suspect and not args.resume:
        raise ConfigError("--accept-suspect", "goes with --resume")
    path = _run_dir(args)
    config = _config(args, path)
    assert isinstance(config, RunConfig)  # noqa: S101 - tells the type checker what a lazy import returned
    path = path or RUNS / f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    try:
        folder = RunFolder.open(path, resume=args.resume)
    except RunFolderError as error:
        print(f"quiesce train: {error}", file=sys.stderr)
        return 2
    with folder:
        (path / CONFIG_FILE).write_text(dump_config(config), encoding="utf-8")
        return _train(config, folder, resume=args.resume, accept_suspect=args.accept_suspect)


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
    return max(runs, key=lambda entry: (entry / CONFIG_FILE).stat().st_mtime)


def _config(args: argparse.Namespace, path: Path | None) -> RunConfig:
    from quiesce_grpo.run_config import load_config

    words = list(args.words)
    source: str | Path | None = words.pop(0) if words and "=" not in words[0] else None
    if args.resume and path is not None:
        if source is not None:
            raise ConfigError(
                str(source), f"a resume takes its configuration from {path / CONFIG_FILE}; override keys"
            )
        source = path / CONFIG_FILE
        if not source.is_file():
            raise ConfigError("--resume", f"{path} has no {CONFIG_FILE}, so it is no run folder")
    return load_config("tiny" if source is None else source, words)


def _train(config: RunConfig, folder: RunFolder, *, resume: bool, accept_suspect: bool) -> int:
    from rich.console import Console

    from quiesce import default_hub
    from quiesce.telemetry.enable import enable_metrics
    from quiesce.telemetry.logs import LogObserver, configure_run_log
    from quiesce_grpo.display import TrainDisplay

    hub = default_hub()
    console = Console()
    metrics: MetricsHandle | None = None
    if config.metrics.enabled:
        metrics = enable_metrics(
            config.name,
            config.metrics.port,
            config.metrics.host,
            hub=hub,
            run_dir=folder.path,
            info={"engine": "quiesce_grpo"},
        )
        metrics.expect_checkpoints(steps=config.controller.save_every_steps)
    try:
        where = None if metrics is None else metrics.url
        console.print(
            f"run folder {folder.path}" + (f", metrics at {where}" if where else ""), highlight=False
        )
        with TrainDisplay(
            hub, max_steps=config.controller.max_steps, console=console, where=where
        ) as display:
            log = configure_run_log(
                folder.path, config.log_level, run=config.name, console=sys.stderr, console_level="warning"
            )
            observer = LogObserver(log)
            snapshots = _Snapshots(metrics, folder.path / METRICS_SNAPSHOT)
            hub.subscribe(observer)
            hub.subscribe(snapshots)
            try:
                summary = asyncio.run(
                    _main(
                        config, folder, hub, display.preparing, resume=resume, accept_suspect=accept_suspect
                    )
                )
            finally:
                hub.unsubscribe(observer)
                hub.unsubscribe(snapshots)
                snapshots.write()
                log.close()
        return _tell(summary, folder, console, display.summary(summary))
    finally:
        if metrics is not None:
            metrics.close(linger=config.metrics.linger_seconds)


class _Snapshots:
    """Writes the metrics into the run folder at every save, in a thread of its own."""

    def __init__(self, metrics: MetricsHandle | None, path: Path) -> None:
        from quiesce.threads import DaemonExecutor

        self._metrics = metrics
        self._path = path
        self._executor = DaemonExecutor("quiesce-metrics-snapshot", 1)

    def checkpoint_ended(self, *_: object) -> None:
        """Write soon."""
        self._executor.submit(self.write)

    def write(self) -> None:
        """Write now; a folder that cannot be written is the log's business, not the run's."""
        if self._metrics is not None:
            try:
                self._metrics.snapshot(self._path)
            except OSError as error:
                print(f"quiesce train: {self._path} cannot be written: {error}", file=sys.stderr)


async def _main(
    config: RunConfig,
    folder: RunFolder,
    hub: Hub,
    on_phase: Callable[[str], None],
    *,
    resume: bool,
    accept_suspect: bool,
) -> RunSummary:
    from quiesce_grpo.run import train

    loop = asyncio.get_running_loop()
    controllers: list[Controller] = []
    asked = False

    def stop(number: int) -> None:
        nonlocal asked
        if asked:
            # The person means it. Nothing is lost: the last published checkpoint is whole.
            os._exit(128 + number)
        asked = True
        for controller in controllers:
            controller.request_stop()

    def on_controller(controller: Controller) -> None:
        controllers.append(controller)
        if asked:
            controller.request_stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    return await train(
        config,
        folder,
        resume=resume,
        accept_suspect=accept_suspect,
        hub=hub,
        on_controller=on_controller,
        on_phase=on_phase,
    )


def _tell(summary: RunSummary, folder: RunFolder, console: Console, table: Any) -> int:  # noqa: ANN401 - something that rich draws
    console.print(f"run {summary.outcome} at step {summary.step}", style="bold", highlight=False)
    console.print(table)
    path = folder.path
    last = summary.last_save
    console.print(f"checkpoints  {folder.checkpoints}", highlight=False, soft_wrap=True)
    console.print(
        f"files        {path}/{{{CONFIG_FILE},log.jsonl,lineage.jsonl,{METRICS_SNAPSHOT}}}",
        highlight=False,
        soft_wrap=True,
        markup=False,
    )
    console.print(f"prove it     quiesce audit {path}", highlight=False, soft_wrap=True)
    if summary.save_failed:
        problem = "" if last is None else f": {last.error or last.reason}"
        print(
            f"quiesce train: the last save failed{problem}; the checkpoint before it is whole, "
            f"go on from it with: quiesce train --run-dir {path} --resume",
            file=sys.stderr,
        )
        return 1
    if summary.outcome == "stopped":
        console.print(
            f"go on with   quiesce train --run-dir {path} --resume", highlight=False, soft_wrap=True
        )
    return 0
