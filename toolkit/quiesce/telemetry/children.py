"""Whether this process is one that ``multiprocessing`` made: a loader's worker, a pool's, a rank that a script spawned.

Rule: telemetry that nobody asked this very process for is its parent's. A child inherits the variables that switch
telemetry on, and a spawned one runs its parent's script again, with whatever switches telemetry on in it; neither is
about the child. Processes that a launcher starts (``torchrun``, ``srun``, Ray) are none of these. Nothing here suspends,
and nothing here loads ``multiprocessing``: a process that has not loaded it is no child of it.
"""

from __future__ import annotations

import sys

__all__ = ["is_being_prepared", "is_child"]

_SERVER = "multiprocessing.forkserver"


def is_child() -> bool:
    """Return whether ``multiprocessing`` made this process, or is about to make some of it."""
    return is_being_prepared() or (_has_it() and _parent_is_known())


def is_being_prepared() -> bool:
    """Return whether the parent's modules are being imported again, for the sake of what the parent has sent.

    That is so in a spawned child until it has what it is to call, and in the server that ``forkserver`` forks its
    children from as long as it lives: that one calls nothing of anybody's.
    """
    if not _has_it():
        return False
    from multiprocessing import process

    # What `multiprocessing` itself looks at to refuse a child that begins children while it is imported. The process's
    # parent and its name are told later.
    if getattr(process.current_process(), "_inheriting", False):
        return True
    return process.parent_process() is None and any(_SERVER in word for word in sys.orig_argv)


def _has_it() -> bool:
    return "multiprocessing.process" in sys.modules


def _parent_is_known() -> bool:
    from multiprocessing import process

    return process.parent_process() is not None
