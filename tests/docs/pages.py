"""The code blocks of the documentation, and what the comment above a block asks for.

A comment on the line above a fence says how the block is treated:

* ``<!-- file: NAME -->``: the block is a file; it is written under that name and not run;
* ``<!-- prints -->``: the block is what the Python block before it prints;
* ``<!-- fragment: REASON -->``: the block is a piece of something larger, so it is only parsed.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

__all__ = ["ROOT", "Block", "blocks", "commands", "pages"]

ROOT: Final = Path(__file__).parents[2]

_BLOCK: Final = re.compile(
    r"^(?:<!-- (?P<treatment>\w+)(?:: (?P<detail>[^\n]*?))? -->\n+)?"
    r"```(?P<language>\w+)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        page: Where it stands, relative to the repository's root.
        line: The line of its first line of text, from 1.
        language: What the fence says.
        text: Its text.
        treatment: ``run``, ``file``, ``prints`` or ``fragment``.
        detail: The file's name, or the reason.
    """

    page: str
    line: int
    language: str
    text: str
    treatment: str = "run"
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[str]:
    """Return every page of the documentation, relative to the root."""
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
    return [str(path.relative_to(ROOT)) for path in found]


def blocks(page: str, *languages: str) -> list[Block]:
    """Return a page's blocks in these languages, in order."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return [
        Block(
            page,
            text.count("\n", 0, found.start("text")) + 1,
            found["language"],
            found["text"],
            found["treatment"] or "run",
            found["detail"] or "",
        )
        for found in _BLOCK.finditer(text)
        if found["language"] in languages
    ]


def commands(page: str) -> list[tuple[Block, str]]:
    """Return each command of a page's ``console`` blocks: what stands behind a ``$``, continued lines joined."""
    found = []
    for block in blocks(page, "console"):
        text = block.text.replace("\\\n", " ")
        found += [(block, line[2:].strip()) for line in text.splitlines() if line.startswith("$ ")]
    return found
