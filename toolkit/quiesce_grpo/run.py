"""Wires a reference run together: task, policy, engine and trainer around the controller.

Rule: only the public API of ``quiesce`` is used, so this is also the worked example for another trainer.
Yield rule: :func:`train` suspends; whatever blocks (building, warming up, staging) runs in a thread.
"""

from __future__ import annotations

import asyncio
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from quiesce import Controller, Hub, IndexedDataset, RunSummary, StatefulLoaderSource
from quiesce.checkpoint import RunFolder, StateDictTrainerState
from quiesce.errors import ConfigError, QuiesceError
from quiesce.threads import DaemonExecutor
from quiesce_grpo.run_config import RunConfig

__all__ = ["build_source", "train"]

P = ParamSpec("P")
T = TypeVar("T")


async def train(
    config: RunConfig,
    folder: RunFolder,
    *,
    resume: bool = False,
    accept_suspect: bool = False,
    hub: Hub | None = None,
    on_controller: Callable[[Controller], None] = lambda _controller: None,
    on_phase: Callable[[str], None] = lambda _phase: None,
) -> RunSummary:
    """Run until the end of the configured steps or epochs, or until the controller is asked to stop.

    Args:
        config: The run.
        folder: Its folder, open.
        resume: Go on from the newest checkpoint of the folder; there is no warm-up then.
        accept_suspect: Also from one that a checkpoint's verification refused.
        hub: Where hooks go; None means the process-wide hub.
        on_controller: Called with the controller before it starts; for stop requests.
        on_phase: Called with what is being prepared, to show it.

    Raises:
        QuiesceError: What :meth:`quiesce.Controller.run` raises.
    """
    executor = DaemonExecutor("grpo-setup", 1)
    loop = asyncio.get_running_loop()

    def build() -> tuple[Any, Any, Any]:
        import torch

        from quiesce_grpo.policy import build_policy
        from quiesce_grpo.tasks import Task
        from quiesce_grpo.tokenizer import build_tokenizer
        from quiesce_grpo.warmup import warm_up

        if config.model.threads:
            torch.set_num_threads(config.model.threads)
        torch.manual_seed(config.seed)
        on_phase("reading the task")
        task = Task(config.task)
        tokenizer = _loading(config.model.path, build_tokenizer, config.model)
        on_phase("building the policy")
        policy = _loading(config.model.path, build_policy, config.model, tokenizer, seed=config.seed)
        if config.warmup.steps and not resume:
            on_phase(f"warming up, {config.warmup.steps} supervised steps")
            warm_up(policy, tokenizer, task, config.warmup, seed=config.seed)
        return task, tokenizer, policy

    task, tokenizer, policy = await loop.run_in_executor(executor, build)
    from quiesce_grpo.engine import RolloutEngine
    from quiesce_grpo.trainer import GrpoTrainer

    trainer = GrpoTrainer(
        policy,
        config.grpo,
        temperature=config.engine.temperature,
        max_new_tokens=config.engine.max_new_tokens,
        seed=config.seed,
    )
    try:
        async with RolloutEngine(policy, tokenizer, task, config.engine, seed=config.seed, hub=hub) as engine:

            async def sync_weights(version: int) -> None:
                engine.sync_weights(version, await trainer.weights())

            controller = Controller(
                config.controller,
                generate=engine.generate,
                workers=engine,
                train_step=trainer.train_step,
                sync_weights=sync_weights,
                source=build_source(config, task),
                trainer_state=StateDictTrainerState(trainer.state()),
                folder=folder,
                accept_suspect=accept_suspect,
                hub=hub,
            )
            on_controller(controller)
            return await controller.run(resume=resume)
    finally:
        trainer.close()
        executor.shutdown(wait=False)


def _loading(path: str | None, build: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Build from a model's path; what transformers says of one that it cannot load is one error with the key."""
    if path is not None and path.startswith(("/", ".", "~")) and not Path(path).is_dir():
        raise ConfigError("model.path", f"there is no folder {path}")
    try:
        return build(*args, **kwargs)
    except (OSError, ValueError) as error:
        if isinstance(error, QuiesceError) or path is None:
            raise
        raise ConfigError("model.path", f"cannot load {path!r}: {' '.join(str(error).split())}") from error


def build_source(config: RunConfig, task: Any) -> StatefulLoaderSource:  # noqa: ANN401 - quiesce_grpo.tasks.Task; importing it loads torch
    """Return a ``StatefulDataLoader`` over a task, as the controller reads it.

    Args:
        config: Batch size, epochs, worker processes, seed.
        task: The dataset.
    """
    import torch
    from torchdata.stateful_dataloader import StatefulDataLoader

    workers = config.loader.workers
    with warnings.catch_warnings():
        # torchdata 0.11 calls what torch 2.13 deprecated whenever a loader is built; it says nothing about this run.
        warnings.filterwarnings("ignore", "'set_vital' is deprecated", UserWarning)
        loader: StatefulDataLoader[Any] = StatefulDataLoader(
            IndexedDataset(task),
            batch_size=config.controller.groups_per_step,
            shuffle=config.loader.shuffle,
            generator=torch.Generator().manual_seed(config.seed) if config.loader.shuffle else None,
            num_workers=workers,
            collate_fn=list,
            worker_init_fn=_leave_interrupts_alone if workers else None,
            # Forking a process that has threads can deadlock the child.
            multiprocessing_context="forkserver" if workers else None,
        )
    return StatefulLoaderSource(loader, epochs=config.loader.epochs)


def _leave_interrupts_alone(_worker: int) -> None:
    """Ctrl-C reaches every process of a terminal; a worker that ends on it would fail the stop's last save."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
