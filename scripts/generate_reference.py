"""Write the pages of docs/reference/ that are generated; with `--check`, only say which are stale.

A page is what a module of the toolkit prints: the module owns the words, this file only knows where they go.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = {
    "docs/reference/configuration.md": "quiesce_grpo.reference",
    "docs/reference/metrics.md": "quiesce.telemetry.reference",
    "docs/reference/spans.md": "quiesce.telemetry.span_reference",
}
"""Each generated page and the module that prints it."""


def main() -> int:
    """Write or check every page.

    Returns:
        The exit status: 1 when `--check` found a stale page, 0 otherwise.
    """
    checking = "--check" in sys.argv[1:]
    stale = False
    for page, module in PAGES.items():
        path = ROOT / page
        printed = subprocess.run([sys.executable, "-m", module], check=True, capture_output=True, cwd=ROOT)
        if path.exists() and path.read_bytes() == printed.stdout:
            continue
        stale = True
        if checking:
            print(f"{page} is not what {module} prints now")
        else:
            path.write_bytes(printed.stdout)
            print(f"wrote {page}")
    return 1 if checking and stale else 0


if __name__ == "__main__":
    sys.exit(main())
