"""Writes the alert rules that the repository carries, or checks them: `generate_rules.py [--check]`."""

from __future__ import annotations

import argparse
import sys

from quiesce.cli.rules import main_rules

if __name__ == "__main__":
    action = "check" if "--check" in sys.argv[1:] else "build"
    sys.exit(main_rules(argparse.Namespace(action=action, out=None, config=None, runbooks=None)))
