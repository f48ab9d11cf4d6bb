"""One of several processes of a run that Prometheus scrapes; it does as a test tells it, a word a line.

Arguments: its number, the folder of targets, its own folder.
"""

from __future__ import annotations

import asyncio
import sys

from quiesce import DataPlaneCheckpointBarrier, enable_metrics

SLOTS = 10


async def main() -> None:
    """Serve, hold one slot open, count when told to, and stay until killed."""
    number, targets, folder = sys.argv[1:]
    handle = enable_metrics("many", 0, role=f"worker-{number}", sd_dir=targets, run_dir=folder)
    barrier = DataPlaneCheckpointBarrier()

    async def hold() -> None:
        async with barrier.mutation("group_commit"):
            await asyncio.Event().wait()

    held = asyncio.create_task(hold())
    await asyncio.sleep(0)
    print(handle.url, flush=True)  # noqa: T201 - how it talks to the test
    while await asyncio.to_thread(sys.stdin.readline):
        for _ in range(SLOTS):
            async with barrier.mutation("retry"):
                pass
        assert handle.telemetry.flush(20)
        print("counted", flush=True)  # noqa: T201 - as above
    held.cancel()


if __name__ == "__main__":
    asyncio.run(main())
