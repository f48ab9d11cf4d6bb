"""Writes the dashboards that the repository carries, or checks them: `generate_dashboards.py [--check]`."""

from __future__ import annotations

import argparse
import sys

from quiesce.cli.dashboards import main_dashboards

if __name__ == "__main__":
    action = "check" if "--check" in sys.argv[1:] else "build"
    sys.exit(main_dashboards(argparse.Namespace(action=action, out=None, config=None, runbooks=None)))
