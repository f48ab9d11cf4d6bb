"""What telemetry takes from a training run: the reference run with and without it, in turns, in one process.

Rule: everything is counted while the run is in its steps, not while it is built or warmed up, and a run with
telemetry is one that anybody gets: the metrics endpoint, spans, and the recorder writing into the run's folder. Runs
take turns in one process, so that the same libraries are loaded and the same memory is warm. Blocks.

The reference run is an example beside the toolkit, so it is looked up by its name: where it is not installed, or lacks
a package, training is not measured.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from quiesce.telemetry.enable import MetricsHandle

__all__ = ["TrainingCosts", "main", "measure_training"]

_NEEDED: Final = ("torch", "transformers", "torchdata", "reasoning_gym", "quiesce_grpo")
_CPU: Final = "quiesce_telemetry_cpu_seconds"


@dataclass(frozen=True, slots=True)
class TrainingCosts:
    """What runs took, in pairs: the first of each with telemetry, the second without.

    Attributes:
        steps: Optimizer steps of each run.
        cpu_ratio: By pair: telemetry's processor time over the process's, in the run with telemetry.
        steps_per_second: By pair: with telemetry, without.
    """

    steps: int
    cpu_ratio: tuple[float, ...]
    steps_per_second: tuple[tuple[float, float], ...]


def measure_training(pairs: int, steps: int, warm_up: int) -> TrainingCosts | None:
    """Measure pairs of runs, in a process of their own.

    Args:
        pairs: How many; which of a pair comes first alternates.
        steps: Optimizer steps of each run.
        warm_up: Supervised steps before.

    Returns:
        What they took, or None where the reference run cannot be run.
    """
    if any(importlib.util.find_spec(name) is None for name in _NEEDED):
        return None
    told = json.dumps({"pairs": pairs, "steps": steps, "warm_up": warm_up})
    run = subprocess.run(  # noqa: S603 - this interpreter, and a module of ours
        [sys.executable, "-m", "quiesce.bench.telemetry_training", told],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    found = json.loads(run.stdout.splitlines()[-1])
    on = [run for run in found if run["telemetry"]]
    off = [run for run in found if not run["telemetry"]]
    return TrainingCosts(
        steps,
        tuple(run["telemetry_cpu_s"] / run["cpu_s"] for run in on),
        tuple((steps / ours["seconds"], steps / bare["seconds"]) for ours, bare in zip(on, off, strict=True)),
    )


def main() -> int:
    """Be the process: the first argument is a JSON object with ``pairs``, ``steps`` and ``warm_up``."""
    told = json.loads(sys.argv[1])
    _run(1, told["warm_up"], telemetry=True)  # before it counts: libraries, caches, lazily built state
    found = []
    for number in range(told["pairs"]):
        pair = [(True, _run(told["steps"], told["warm_up"], telemetry=True))] if number % 2 == 0 else []
        pair.append((False, _run(told["steps"], told["warm_up"], telemetry=False)))
        if number % 2:
            pair.append((True, _run(told["steps"], told["warm_up"], telemetry=True)))
        found += [{"telemetry": telemetry, **took} for telemetry, took in pair]
    sys.stdout.write(json.dumps(found) + "\n")
    return 0


class _Clock:
    """Notes when a run is in its steps, and the processor time of the process by then; cheap, for hooks are timed."""

    def __init__(self) -> None:
        self.began: tuple[float, float] | None = None
        self.ended: tuple[float, float] | None = None

    def run_state_changed(self, state: str) -> None:
        """Begin when the run is running."""
        if state == "running":
            self.began = time.perf_counter(), time.process_time()

    def train_step_ended(self, *_: object) -> None:
        """End, until there is a further step."""
        self.ended = time.perf_counter(), time.process_time()

    def took(self) -> dict[str, float]:
        """Return seconds by the clock, and of the process's processors."""
        if self.began is None or self.ended is None:
            raise RuntimeError("the run took no step")
        return {"seconds": self.ended[0] - self.began[0], "cpu_s": self.ended[1] - self.began[1]}


def _telemetry_cpu(handle: MetricsHandle | None) -> float:
    """Return what the run itself says about its telemetry since its beginning, as a scrape would."""
    if handle is None:
        return 0.0
    return sum(
        sample.value
        for family in handle.collector.collect()
        if family.name == _CPU
        for sample in family.samples
        if sample.name == f"{_CPU}_total"
    )


def _run(steps: int, warm_up: int, *, telemetry: bool) -> dict[str, float]:
    from quiesce.checkpoint import RunFolder
    from quiesce.observers import Hub
    from quiesce.telemetry.enable import enable_metrics

    load_config = importlib.import_module("quiesce_grpo.run_config").load_config
    train = importlib.import_module("quiesce_grpo.run").train
    config = load_config(
        "tiny",
        [f"controller.max_steps={steps}", f"controller.save_every_steps={steps}", f"warmup.steps={warm_up}"],
    )
    hub = Hub()
    with tempfile.TemporaryDirectory(prefix="quiesce-bench-") as place:
        folder = RunFolder.open(Path(place) / "run", resume=False)
        handle = enable_metrics("bench", 0, hub=hub, run_dir=folder.path) if telemetry else None
        clock = _Clock()
        hub.subscribe(clock)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of libraries, about nothing that is measured
                asyncio.run(train(config, folder, hub=hub))
            told = _telemetry_cpu(handle)
        finally:
            if handle is not None:
                handle.close()
            folder.close()
    return {**clock.took(), "telemetry_cpu_s": told}


if __name__ == "__main__":
    sys.exit(main())
