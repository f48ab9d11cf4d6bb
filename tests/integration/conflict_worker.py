"""One of several processes of a run that share its folder; it reports a conflict when a test tells it to.

Arguments: its number, the run folder.
"""

from __future__ import annotations

import sys
from pathlib import Path

from quiesce.invariants import Violation
from quiesce.observers import default_hub
from quiesce.telemetry.enable import enable_metrics
from quiesce.telemetry.logs import LogObserver, configure_run_log


def main() -> None:
    """Report a conflict of the group that each line names, and stay until killed."""
    number, folder = sys.argv[1:]
    role = f"worker-{number}"
    log = configure_run_log(Path(folder), run="conflicts", role=role)
    enable_metrics("conflicts", 0, role=role, run_dir=folder, exporters=["recorder"], log=log)
    default_hub().subscribe(LogObserver(log))
    print("ready", flush=True)  # noqa: T201 - how it talks to the test
    for line in sys.stdin:
        group = line.strip()
        message = f"group {group} has two owners"
        found = Violation("single_owner", "critical", message, (group,), ("ledger", "buffer"))
        default_hub().fire("invariant_violated", found)
        print("reported", flush=True)  # noqa: T201 - as above


if __name__ == "__main__":
    main()
