"""Writes the manifests of rules and dashboards for Kubernetes, or checks them: `generate_kubernetes.py [--check]`."""

from __future__ import annotations

import sys

from quiesce_dashboards.kubernetes import MANIFESTS, build, check


def main() -> int:
    """Write, or with ``--check`` only compare.

    Returns:
        The exit status: 1 when a manifest is stale, 0 otherwise.
    """
    if "--check" not in sys.argv[1:]:
        for path in build():
            print(path)
        return 0
    stale = check()
    for name in stale:
        print(f"{MANIFESTS / name} is missing or stale", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
