"""A run to look at: slots, a save and a step ten times a second, until its standard input ends.

Called as ``python view_run.py RUN FOLDER``; a line ``violate`` has an invariant violated.
"""

import asyncio
import sys
import threading
from typing import Any

import quiesce
from quiesce.invariants import Violation
from quiesce.observers import default_hub


def _listen(over: threading.Event) -> None:
    severity: Any = "critical"
    for line in sys.stdin:
        if line.strip() == "violate":
            found = Violation("single_owner", severity, "e000-p0000017 has two owners.", ("e000-p0000017",))
            default_hub().fire("invariant_violated", found)
    over.set()


async def _train(metrics: Any, over: threading.Event) -> None:  # noqa: ANN401 - telemetry.enable is imported late
    barrier = quiesce.DataPlaneCheckpointBarrier()
    step = 0
    while not over.is_set():
        step += 1
        for _ in range(5):
            async with barrier.mutation("group_commit"):
                await asyncio.sleep(0.015)
        async with barrier.checkpoint():
            await asyncio.sleep(0.005)
        metrics.step(step, reward=0.5, groups=4)


def main() -> None:
    """Run until nobody listens any more."""
    over = threading.Event()
    threading.Thread(target=_listen, args=(over,), daemon=True).start()
    with quiesce.enable_metrics(sys.argv[1], port=0, run_dir=sys.argv[2]) as metrics:
        asyncio.run(_train(metrics, over))


if __name__ == "__main__":
    main()
