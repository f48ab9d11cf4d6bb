"""The machine that something was measured on, without saying whose it is.

Rule: it names what moves the numbers (interpreter, processors, memory, file system, load), and nothing that
identifies the host. Nothing here suspends; it reads a few small files of the system.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from pathlib import Path
from typing import Any, Final

__all__ = ["describe", "load_average"]

_LIBRARIES: Final = ("lmdb", "numpy", "torch")


def describe(folder: Path) -> dict[str, Any]:
    """Describe the machine.

    Args:
        folder: Where checkpoints and stores of the measurement go; its file system is named.
    """
    return {
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "quiesce": _version("quiesce"),
        "libraries": {name: _version(name) for name in _LIBRARIES},
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "processors": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "file_system": _file_system(folder),
        "switch_interval_s": sys.getswitchinterval(),
        "load_average": load_average(),
    }


def load_average() -> float:
    """Return how many processes wanted to run, on average over the last minute."""
    return round(os.getloadavg()[0], 2)


def _version(library: str) -> str | None:
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _file_system(folder: Path) -> str:
    """Return the type of the file system that a folder is on, as the system calls it."""
    try:
        lines = Path("/proc/mounts").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ""
    resolved = folder.resolve()
    best: tuple[int, str] = (-1, "")
    for line in lines:
        _, mounted, kind, *_ = line.split()
        point = Path(mounted.replace("\\040", " "))
        if resolved.is_relative_to(point):
            best = max(best, (len(point.parts), kind))
    return best[1]
