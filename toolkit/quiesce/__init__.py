"""Quiesce: the checkpoint of an asynchronous RL post-training run as one atomic cut."""

# Layout, from the inside out; a module imports only what stands above it.
#
#   errors, types, observers        the error tree; frozen records; the hooks that primitives call, and their hub
#   threads, signals                executors whose threads are daemons; waiting without polling
#   barrier                         mutation slots, the checkpoint window, cut tokens      <- start reading here
#   ledger, spares, accounting      who owns a group before it is buffered; what became of every prompt
#   dataplane/, buffer              where rows live; the index of finished groups
#   snapshot_gate, gate_handles,    permits for threads that make rows final; the fence over many workers' gates; clears
#     gate_fence, cleanup             in the background, which take such permits
#   staged_rows, staging, workers   the tokens of a call that is still generating, as rows; the workers' side of a run
#   samplers, sampler_config,       what may be admitted, trained, evicted; by name or module:ClassName;
#     admission                     the gate wait outside, the committed cursor advance inside
#   checkpoint/                     capture (in the window), write and publish (outside), restore, audit
#   invariants/                     what must hold over a cut, as named pure functions
#   prompts, owners                 reading ahead and committing; all owners in one place, and every move between them
#   auditor/                        the invariants, proved while a run goes on; records of what does not hold
#   dispatch, rollouts, training,   the rollout pump, its workers, the train pump,
#     stalls, sweep, controller     the stall watch, the sweep of orphaned rows; the controller that runs them
#   telemetry/                      the catalogue of names; metrics and logs, which subscribe to the hub
#   testing, explorer/              helpers for tests: an event recorder, a fake clock, a virtual-time loop; every schedule
#   report/                         one page from a run's recording
#   bench/, skew                    what a slot and a window cost; the bug that the cut prevents, replayed
#   cli/                            the `quiesce` command

import os
from typing import TYPE_CHECKING, Any

from quiesce import errors as errors
from quiesce.accounting import Accounting as Accounting
from quiesce.admission import Admission as Admission
from quiesce.admission import Admitted as Admitted
from quiesce.barrier import CheckpointCut as CheckpointCut
from quiesce.barrier import Cut as Cut
from quiesce.barrier import DataPlaneCheckpointBarrier as DataPlaneCheckpointBarrier
from quiesce.barrier import MutationCut as MutationCut
from quiesce.barrier import detached as detached
from quiesce.buffer import ReplayBuffer as ReplayBuffer
from quiesce.controller import Controller as Controller
from quiesce.controller import RunSummary as RunSummary
from quiesce.controller_config import ControllerConfig as ControllerConfig
from quiesce.ledger import RolloutLedger as RolloutLedger
from quiesce.observers import Hub as Hub
from quiesce.observers import Observer as Observer
from quiesce.observers import default_hub as default_hub
from quiesce.prompts import IndexedDataset as IndexedDataset
from quiesce.prompts import SequenceSource as SequenceSource
from quiesce.prompts import StatefulLoaderSource as StatefulLoaderSource
from quiesce.rollouts import GenerationRequest as GenerationRequest
from quiesce.rollouts import GroupResult as GroupResult
from quiesce.sampler_config import SamplerConfig as SamplerConfig
from quiesce.samplers import TransactionalAdmissionSampler as TransactionalAdmissionSampler
from quiesce.signals import TrainerVersion as TrainerVersion
from quiesce.spares import SparePool as SparePool
from quiesce.training import TrainBatch as TrainBatch
from quiesce.types import BufferEntry as BufferEntry
from quiesce.types import GroupRecord as GroupRecord
from quiesce.types import PromptRef as PromptRef
from quiesce.types import RowKey as RowKey

if TYPE_CHECKING:
    from quiesce.telemetry.enable import enable_metrics as enable_metrics

__version__ = "0.1.0"

__all__ = [
    "Accounting",
    "Admission",
    "Admitted",
    "BufferEntry",
    "CheckpointCut",
    "Controller",
    "ControllerConfig",
    "Cut",
    "DataPlaneCheckpointBarrier",
    "GenerationRequest",
    "GroupRecord",
    "GroupResult",
    "Hub",
    "IndexedDataset",
    "MutationCut",
    "Observer",
    "PromptRef",
    "ReplayBuffer",
    "RolloutLedger",
    "RowKey",
    "RunSummary",
    "SamplerConfig",
    "SequenceSource",
    "SparePool",
    "StatefulLoaderSource",
    "TrainBatch",
    "TrainerVersion",
    "TransactionalAdmissionSampler",
    "default_hub",
    "detached",
    "enable_metrics",
    "errors",
]


def __getattr__(name: str) -> Any:  # noqa: ANN401 - a module attribute can be anything
    """Import what needs prometheus_client only when it is asked for."""
    if name == "enable_metrics":
        from quiesce.telemetry.enable import enable_metrics

        return enable_metrics
    message = f"module {__name__!r} has no attribute {name!r}"
    raise AttributeError(message)


if os.environ.get("QUIESCE_METRICS"):
    # Nothing is started here: telemetry starts when this process builds something that reports.
    from quiesce.telemetry.autostart import arm

    arm()
