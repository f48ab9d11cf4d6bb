"""Writes docs/reference/dashboards.md, or checks it: `generate_dashboards_reference.py [--check]`."""

import sys
from pathlib import Path

from quiesce_dashboards.reference import page

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "dashboards.md"


def main() -> int:
    """Write, or with ``--check`` only compare.

    Returns:
        The exit status: 1 when the page is stale, 0 otherwise.
    """
    text = page()
    if PAGE.exists() and PAGE.read_bytes() == text.encode():
        return 0
    if "--check" in sys.argv[1:]:
        print(f"docs/reference/{PAGE.name} is not what quiesce_dashboards.reference prints now")
        return 1
    PAGE.write_text(text, encoding="utf-8")
    print(f"wrote docs/reference/{PAGE.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
