"""Lets ``python -m quiesce.cli`` do what ``quiesce`` does."""

import sys

from quiesce.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
