"""Fail when a generated file of the repository is not what its generator would write now.

Every `scripts/generate_*.py` is a generator; called with `--check` it writes nothing, prints what is stale
and exits with 1. The list is the folder, so a new generator is checked from its first day.
"""

import subprocess
import sys
from pathlib import Path


def main() -> int:
    """Run every generator in its checking mode.

    Returns:
        The exit status: 0 when every generated file is current, 1 otherwise.
    """
    generators = sorted(Path(__file__).parent.glob("generate_*.py"))
    stale = [
        generator.name
        for generator in generators
        if subprocess.run([sys.executable, str(generator), "--check"], check=False).returncode
    ]
    for name in stale:
        print(f"generated files: run scripts/{name} and commit what it writes", file=sys.stderr)
    print(f"generated files: {len(generators)} generators, {len(stale)} with stale files")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
