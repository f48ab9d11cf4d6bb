"""Turns the runbook pages into HTML, so that an alert leads to its page without a documentation site.

Rule: a page is one of the files that are there, so no name leads out of the folder. A link from one runbook to another
leads to that page here; other links lead to the documentation on the web. Nothing here suspends.
"""

from __future__ import annotations

import html
import re
from pathlib import Path
from typing import Final

import markdown

__all__ = ["FOLDERS", "find_runbooks", "render_runbook"]

FOLDERS: Final = (
    Path(__file__).with_name("runbooks"),
    Path(__file__).resolve().parents[3] / "docs" / "runbooks",
)
"""Where the pages are: in the installed package, or in a checkout."""

INDEX: Final = "index"
_RELATIVE: Final = re.compile(r'href="(?![a-z]+:|#|/)([^"#]*)(#[^"]*)?"')
_EXTENSIONS: Final = ("tables", "fenced_code", "admonition", "toc", "sane_lists")
_PAGE: Final = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title} · Quiesce</title>
<link rel="icon" href="/page/icon.svg" type="image/svg+xml">
<style>
:root {{ --fg: #1c2126; --bg: #fff; --soft: #f2f4f6; --line: #d0d5da; --link: #0b5cad; }}
@media (prefers-color-scheme: dark) {{
  :root {{ --fg: #dde2e7; --bg: #14171a; --soft: #1e2328; --line: #3a4148; --link: #7db7f0; }}
}}
body {{ color: var(--fg); background: var(--bg); font: 16px/1.55 system-ui, sans-serif; max-width: 52rem;
  margin: 0 auto; padding: 1.5rem 1rem 4rem; }}
a {{ color: var(--link); }}
pre, code {{ background: var(--soft); font: .9em/1.45 ui-monospace, monospace; border-radius: 4px; }}
code {{ padding: .1em .3em; }}
pre {{ padding: .8rem 1rem; overflow-x: auto; }}
pre code {{ padding: 0; }}
table {{ border-collapse: collapse; display: block; overflow-x: auto; }}
td, th {{ border: 1px solid var(--line); padding: .35rem .6rem; text-align: left; vertical-align: top; }}
nav {{ border-bottom: 1px solid var(--line); padding-bottom: .6rem; }}
</style>
</head>
<body>
<nav><a href="/">Dashboards</a> · <a href="/runbooks/">All runbooks</a></nav>
<main>
{content}
</main>
</body>
</html>
"""


def find_runbooks(folders: tuple[Path, ...] = FOLDERS) -> dict[str, Path]:
    """Return the pages by name.

    Args:
        folders: Where to look; the first that has any counts.
    """
    for folder in folders:
        found = {path.stem: path for path in sorted(folder.glob("*.md"))}
        if found:
            return found
    return {}


def render_runbook(name: str, pages: dict[str, Path], documentation: str) -> str | None:
    """Return a page as HTML, or None if there is none of that name.

    Args:
        name: The alert, or ``index``.
        pages: What :func:`find_runbooks` returned.
        documentation: Address of the folder ``runbooks`` of the documentation on the web.

    Raises:
        OSError: If the page cannot be read.
    """
    path = pages.get(name)
    if path is None:
        return None
    content = markdown.markdown(path.read_text(encoding="utf-8"), extensions=list(_EXTENSIONS))

    def lead(found: re.Match[str]) -> str:
        target, anchor = html.unescape(found[1]), found[2] or ""
        stem = target.removesuffix(".md")
        if stem in pages:
            return f'href="/runbooks/{"" if stem == INDEX else stem}{anchor}"'
        web = (
            f"{documentation.rstrip('/')}/{stem}.html"
            if target.endswith(".md")
            else f"{documentation}/{target}"
        )
        return f'href="{html.escape(web)}{anchor}" rel="noreferrer"'

    title = html.escape("Runbooks" if name == INDEX else name)
    return _PAGE.format(title=title, content=_RELATIVE.sub(lead, content))
