"""What the process's CUDA devices hold and do, where it uses any.

Rule: torch is never imported for this, and a device is only asked about once the process itself has begun to
use CUDA: asking earlier would start the driver, after which a forked child cannot use the device. Nothing
here suspends.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any, Final

from quiesce.telemetry import names

__all__ = ["gpu_in_use", "put_gpu"]

Values = dict[tuple[str, ...], float]

_PERCENT: Final = 100.0


def gpu_in_use() -> bool:
    """Return whether this process has begun to use CUDA through torch."""
    cuda = _cuda()
    return cuda is not None and bool(cuda.is_initialized())


def put_gpu(pulled: dict[str, Values]) -> None:
    """Add up what the devices that the process has memory on hold, and how busy they are.

    Utilisation needs NVIDIA's management library; without it there is none.

    Args:
        pulled: Label values and value by metric name; added to.
    """
    cuda = _cuda()
    if cuda is None or not cuda.is_initialized():
        return
    memory = dict.fromkeys(names.GPU_MEMORY, 0.0)
    busy = []
    for device in range(cuda.device_count()):
        reserved = float(cuda.memory_reserved(device))
        if not reserved:
            continue
        memory["allocated"] += float(cuda.memory_allocated(device))
        memory["reserved"] += reserved
        memory["total"] += float(cuda.get_device_properties(device).total_memory)
        # Without the management library, or where that does not know the device, there is no figure.
        with contextlib.suppress(Exception):
            busy.append(float(cuda.utilization(device)) / _PERCENT)
    pulled[names.GPU_MEMORY_BYTES.name] = {(kind,): value for kind, value in memory.items()}
    if busy:
        pulled[names.GPU_UTILIZATION.name] = {(): sum(busy) / len(busy)}


def _cuda() -> Any:  # noqa: ANN401 - torch.cuda, which is not imported here
    return getattr(sys.modules.get("torch"), "cuda", None)
