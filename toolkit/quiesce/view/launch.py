"""Becomes a program that ends when the process that started it ends, whatever ends that one.

Rule: this file is run by path and imports nothing but the standard library; once the kernel knows whose death ends it,
it executes the program, which keeps that. Called as ``python -I -S launch.py PARENT_PID PROGRAM ARGUMENT…``.

The kernel's means is ``prctl(PR_SET_PDEATHSIG)``. It could be set between fork and exec in the parent too, but not
safely in a process with threads. It counts the death of the *thread* that forked, so who starts something through this
file does that from a thread that lives for as long as the process: the main thread.
"""

import ctypes
import os
import signal
import sys

__all__: list[str] = []

_PR_SET_PDEATHSIG = 1
_EXIT_NO_PARENT = 125
_EXIT_NOT_EXECUTABLE = 126


def _main() -> int:
    parent, program = int(sys.argv[1]), sys.argv[2]
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        sys.stderr.write(f"launch: prctl: {os.strerror(ctypes.get_errno())}\n")
        return _EXIT_NO_PARENT
    if os.getppid() != parent:  # it died before the kernel was told
        return _EXIT_NO_PARENT
    try:
        os.execv(program, sys.argv[2:])  # noqa: S606 - the program that quiesce view found
    except OSError as error:
        sys.stderr.write(f"{program} cannot be executed: {error.strerror}\n")
    return _EXIT_NOT_EXECUTABLE


if __name__ == "__main__":
    sys.exit(_main())
