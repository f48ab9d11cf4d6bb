"""Checkpoints: one instant of a run, captured inside the window, written outside, restored and audited.

::

    cut.py            what a captured cut is
    capture.py        the six artifacts, read inside the window
    fence.py          keeping workers out around the window
    trainer_state.py  the trainer's part
    saver.py          one attempt to save, from the previous write to retention
    write.py          the temporary folder
    publish.py        manifest and rename
    retention.py      the last few usable ones stay
    runfolder.py      lock, incarnations, names
    journal.py        what happened along the lineage
    files.py          every file operation of a save
    codec.py, reader.py, documents.py   control state as strict JSON
    restore.py, audit.py                reading it back, and proving it

Importing this package imports neither torch nor numpy.
"""

from quiesce.checkpoint.capture import CutSources, capture
from quiesce.checkpoint.cut import PARTS, CapturedCut, CommittedPosition, CutState, PartStamp, SamplerState
from quiesce.checkpoint.fence import Fence, NoFence
from quiesce.checkpoint.journal import Journal, JournalRecord, read_journal, surviving
from quiesce.checkpoint.restore import RestoredRun, RestoreTargets, load_newest, restore_into
from quiesce.checkpoint.runfolder import CheckpointName, RunFolder
from quiesce.checkpoint.saver import Checkpointer, CheckpointerStatistics, SaveResult
from quiesce.checkpoint.trainer_state import (
    NoTrainerState,
    RandomState,
    Staged,
    StateDictTrainerState,
    Stateful,
    TrainerState,
)

__all__ = [
    "PARTS",
    "CapturedCut",
    "CheckpointName",
    "Checkpointer",
    "CheckpointerStatistics",
    "CommittedPosition",
    "CutSources",
    "CutState",
    "Fence",
    "Journal",
    "JournalRecord",
    "NoFence",
    "NoTrainerState",
    "PartStamp",
    "RandomState",
    "RestoreTargets",
    "RestoredRun",
    "RunFolder",
    "SamplerState",
    "SaveResult",
    "Staged",
    "StateDictTrainerState",
    "Stateful",
    "TrainerState",
    "capture",
    "load_newest",
    "read_journal",
    "restore_into",
    "surviving",
]
