"""How many lines of code something takes, counted from its source.

Rule: a line counts if there is code on it: blank lines, comments and docstrings do not. Nothing here suspends.
"""

from __future__ import annotations

import ast
import inspect
import io
import textwrap
import tokenize
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

__all__ = ["code_lines", "methods_behind"]

_NOT_CODE: Final = frozenset(
    {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    }
)


def code_lines(*parts: str | ModuleType | type | Callable[..., Any]) -> int:
    """Count the lines of code of modules, classes and functions, or of source text.

    Raises:
        OSError: If there is no source.
    """
    return sum(_count(part if isinstance(part, str) else inspect.getsource(part)) for part in parts)


def methods_behind(kind: type, name: str) -> tuple[Callable[..., Any], ...]:
    """Return a method of a class, and all methods of the class that it comes to call on itself."""
    methods = {found: value for found, value in vars(kind).items() if inspect.isfunction(value)}
    reached, to_read = [name], [name]
    while to_read:
        tree = ast.parse(textwrap.dedent(inspect.getsource(methods[to_read.pop()])))
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id == "self"
                and node.attr in methods
                and node.attr not in reached
            ):
                reached.append(node.attr)
                to_read.append(node.attr)
    return tuple(methods[found] for found in reached)


def _count(source: str) -> int:
    source = textwrap.dedent(source)
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NOT_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):  # a string that is a statement of its own documents something
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)
