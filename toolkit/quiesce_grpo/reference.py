"""Writes the reference page of a run's configuration from the classes that define it.

Rule: the page says what the docstrings and defaults say and nothing else, so that it cannot go stale (a test compares
the committed page). Run it as ``python -m quiesce_grpo.reference > docs/reference/configuration.md``; with
``--check PAGE`` it only tells whether that page is current. Nothing here suspends.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path
from types import UnionType
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from quiesce_grpo.run_config import FIXED_KEYS, PRESETS, RunConfig

__all__ = ["main", "page"]

_INTRODUCTION: Final = """\
Generated from the classes that define the settings; do not edit.

A configuration is a YAML file of sections with keys. Each key can be set on the command line too, as
`section.key=value` behind the file or preset; the value is YAML. What is not set has the default below. A key that does
not exist, a value of the wrong type and a combination that cannot work are refused before anything starts, and the
message begins with the key. The run folder keeps the whole configuration in `config.yaml`, which a resume reads.

A resume may change keys, but for those that decide which prompts are read and which policy is trained: {kept}.

Times are seconds. Sizes are prompt groups, unless a key says otherwise."""

_FENCE: Final = "```"


def page() -> str:
    """Return the page as Markdown."""
    top: list[str] = []
    sections: list[str] = []
    for key, of, default, text in _fields(RunConfig):
        if isinstance(of, type) and dataclasses.is_dataclass(of):
            sections += _section(key, of, text)
        else:
            top.append(_row(key, of, default, text))
    kept = ", ".join(f"`{key}`" for key in FIXED_KEYS)
    lines = [
        "# Configuration",
        "",
        _INTRODUCTION.format(kept=kept),
        "",
        "## At the top",
        "",
        *_HEAD,
        *top,
        "",
        *sections,
    ]
    lines += [
        "## Presets",
        "",
        "A preset is a configuration that ships with the package. What it leaves out has its default.",
    ]
    for name in PRESETS:
        told = (resources.files("quiesce_grpo") / "presets" / f"{name}.yaml").read_text(encoding="utf-8")
        lines += ["", f"### `{name}`", "", f"{_FENCE}yaml", told.rstrip(), _FENCE]
    return "\n".join(lines) + "\n"


_HEAD: Final = ("| key | type | default | meaning |", "| --- | --- | --- | --- |")


def _section(key: str, of: type, text: str) -> Iterator[str]:
    """Yield the lines of a section: its own keys, then the sections inside it."""
    yield from (f"## `{key}`", "", _first_paragraph(of) or text, "", *_HEAD)
    inner: list[tuple[str, type, str]] = []
    for name, kind, default, said in _fields(of):
        if isinstance(kind, type) and dataclasses.is_dataclass(kind):
            inner.append((f"{key}.{name}", kind, said))
        else:
            yield _row(f"{key}.{name}", kind, default, said)
    yield ""
    for name, kind, said in inner:
        yield from _section(name, kind, said)


def _fields(of: type) -> Iterator[tuple[str, Any, Any, str]]:
    """Yield name, type, default and description of each field of a dataclass."""
    hints = get_type_hints(of)
    told = {**_in_class_docstring(of), **_below_each_field(of)}
    for field in dataclasses.fields(of):
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        yield field.name, hints[field.name], default, told[field.name]


def _below_each_field(of: type) -> dict[str, str]:
    """Return the docstrings that stand below the fields of a class."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(of))).body
    assert isinstance(tree, ast.ClassDef)  # noqa: S101 - tells the type checker what the source of a class is
    found = {}
    for field, below in zip(tree.body, tree.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(below, ast.Expr)
            and isinstance(below.value, ast.Constant)
        ):
            found[field.target.id] = _markdown(str(below.value.value))
    return found


def _in_class_docstring(of: type) -> dict[str, str]:
    """Return what the section ``Attributes`` of a class's docstring says about each field."""
    _, _, attributes = (inspect.getdoc(of) or "").partition("Attributes:\n")
    found = re.findall(r"^    (\w+): ((?:.|\n(?!    \w+: ))*)", attributes, re.MULTILINE)
    return {name: _markdown(text) for name, text in found}


def _first_paragraph(of: type) -> str:
    return _markdown((inspect.getdoc(of) or "").partition("\n\n")[0])


def _markdown(text: str) -> str:
    """Turn the markup of a docstring into Markdown on one line."""
    text = re.sub(r":\w+:`~?(?:[\w.]+\.)?(\w+)`", r"`\1`", " ".join(text.split()))
    return text.replace("``", "`").replace("|", "\\|")


def _row(key: str, of: Any, default: Any, text: str) -> str:  # noqa: ANN401 - a type, and a value of it
    return f"| `{key}` | {_type(of)} | {_value(default)} | {text} |"


def _type(of: Any) -> str:  # noqa: ANN401 - whatever an annotation may be
    """Return a type in the words of YAML."""
    origin = get_origin(of)
    if origin is Literal:
        return "one of " + ", ".join(f"`{choice}`" for choice in get_args(of))
    if origin in {Union, UnionType}:
        return " or ".join(_type(one) for one in get_args(of))
    if origin in {list, tuple}:
        return "list of texts"
    if origin is not None:
        return "keys with values"
    names = {int: "whole number", float: "number", bool: "true or false", str: "text", type(None): "null"}
    return names.get(of, "any")


def _value(default: Any) -> str:  # noqa: ANN401 - a value of a setting
    if isinstance(default, list | tuple):
        return ", ".join(f"`{_plain(value)}`" for value in default) or "none"
    if isinstance(default, dict):
        return ", ".join(f"`{name}: {_plain(value)}`" for name, value in default.items()) or "none"
    return f"`{_plain(default)}`" if default != "" else "empty"


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def main(argv: Sequence[str]) -> int:
    """Print the page, or with ``--check PAGE`` tell whether that file is current.

    Args:
        argv: Arguments without the program's name.

    Returns:
        The exit status: 1 if the page is stale, 0 otherwise.
    """
    told = page()
    if argv[:1] != ["--check"]:
        sys.stdout.write(told)
        return 0
    if Path(argv[1]).read_text(encoding="utf-8") == told:
        return 0
    sys.stderr.write(f"{argv[1]} is stale: run python -m quiesce_grpo.reference > {argv[1]}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
