"""Writes the reference page of spans from the catalogue.

Rule: the page says what the catalogue says and nothing else, so that it cannot go stale (a test compares the
committed page). Run it as ``python -m quiesce.telemetry.span_reference > docs/reference/spans.md``. Nothing here
suspends.
"""

from __future__ import annotations

import sys

from quiesce.telemetry import names

__all__ = ["page"]


def page() -> str:
    """Return the page of spans as Markdown."""
    lines = [
        "# Spans",
        "",
        "Generated from `quiesce.telemetry.names`; do not edit. Any span may also have the attributes "
        + ", ".join(f"`{name}`" for name in names.COMMON_ATTRIBUTES)
        + ". A span that was open when the process ended has `quiesce.cut_off`; its duration says nothing. What "
        "failed or was refused has the status `ERROR`; what was cancelled or skipped has none, and says so in "
        "`quiesce.outcome`.",
        "",
        "A span without a parent is a root, or a child of the span that was current in the application.",
        "",
    ]
    for spec in names.SPANS.values():
        lines += [f"## `{spec.name}`", "", f"{spec.help}.", ""]
        lines += [f"Part of `{spec.parent}`.", ""] if spec.parent else []
        lines += [f"Links to {spec.links}.", ""] if spec.links else []
        lines += [f"Attributes: {_listed(spec.attributes)}.", ""]
    return "\n".join(lines).rstrip() + "\n"


def _listed(items: tuple[str, ...]) -> str:
    return ", ".join(f"`{item}`" for item in items) or "none"


if __name__ == "__main__":
    sys.stdout.write(page())
