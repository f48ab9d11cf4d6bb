"""Write the reference pages of hooks and errors from their docstrings; with `--check`, only say which are stale."""

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import quiesce.errors
import quiesce_grpo.errors
from quiesce.observers import HOOKS, Observer
from quiesce.types import DROP_REASONS, OUTCOMES, OWNERS, PHASES

ROOT = Path(__file__).parents[1]
FENCE = "```"


def hooks_page() -> str:
    """Return the page about hooks as Markdown."""
    lines = [
        "# Hooks",
        "",
        "Generated from `quiesce.observers.Observer`; do not edit.",
        "",
        "A primitive calls a hook right after the change that it reports, on the thread that made it. An observer",
        "is any object with methods of these names; it needs none of them in particular, and need not inherit from",
        "`Observer`. Subscribe it with `default_hub().subscribe(observer)`, or give a `Hub` of your own to whatever",
        "you build.",
        "",
        "A hook must not await, block, or call back into the primitive. What it raises is logged once for each",
        "hook, counted every time in `hub.errors`, and swallowed, so that an observer can never end a run.",
        "`Hub(strict=True)` raises it instead; use that in tests. Durations are whole nanoseconds, and their names",
        "end in `ns`.",
        "",
        "| closed set | values |",
        "| --- | --- |",
    ]
    for name, values in (
        ("outcomes", OUTCOMES),
        ("phases of a checkpoint", PHASES),
        ("owners", OWNERS),
        ("reasons of a drop", DROP_REASONS),
    ):
        lines.append(f"| {name} | {', '.join(f'`{value}`' for value in values)} |")
    for name in HOOKS:
        hook = getattr(Observer, name)
        arguments = list(inspect.signature(hook).parameters.values())[1:]
        lines += ["", f"## `{name}`", "", _markdown(inspect.getdoc(hook) or "")]
        if arguments:
            lines += ["", "| argument | type |", "| --- | --- |"]
            lines += [f"| `{argument.name}` | `{_annotation(argument)}` |" for argument in arguments]
    return "\n".join(lines) + "\n"


def errors_page() -> str:
    """Return the page about errors as Markdown."""
    lines = [
        "# Errors",
        "",
        "Generated from `quiesce.errors` and `quiesce_grpo.errors`; do not edit.",
        "",
        "Every error that Quiesce raises on purpose is a `QuiesceError`, so one `except` catches them all. A message",
        "is one sentence that names what is at fault: the kind of a slot, a group, a path, a task. What a program may",
        "want to act on is an attribute too. Some are also the error of Python that they resemble (`TimeoutError`,",
        "`KeyError`), so that code that knows nothing of Quiesce treats them right. The command line prints the",
        "message and no traceback.",
    ]
    lines += _errors(quiesce.errors, "quiesce.errors")
    lines += _errors(quiesce_grpo.errors, "quiesce_grpo.errors")
    return "\n".join(lines) + "\n"


def _errors(module: ModuleType, title: str) -> Iterator[str]:
    doc = inspect.getdoc(module) or ""
    tree = inspect.cleandoc(doc.partition("::\n")[2])
    yield from ("", f"## `{title}`", "", f"{FENCE}text", tree, FENCE, "")
    yield from ("| error | raised when, or for | attributes |", "| --- | --- | --- |")
    for name, error in vars(module).items():
        if not (isinstance(error, type) and error.__module__ == module.__name__):
            continue
        said = (inspect.getdoc(error) or "").partition("\n\n")[0]
        said = re.sub("^Raised (when|for) ", "", _markdown(said))
        carried = dict.fromkeys(
            attribute
            for known in reversed(error.__mro__)
            if known.__module__ == module.__name__
            for attribute in re.findall(r"self\.(\w+) = ", inspect.getsource(known))
        )
        shown = ", ".join(f"`{attribute}`" for attribute in carried) or "none"
        yield f"| `{name}` | {said[:1].upper()}{said[1:]} | {shown} |"


def _annotation(argument: inspect.Parameter) -> str:
    return str(argument.annotation).replace("|", "or")


def _markdown(text: str) -> str:
    """Turn the markup of a docstring into Markdown."""
    text = re.sub(r":\w+:`~?(?:[\w.]+\.)?(\w+)`", r"`\1`", text)
    return text.replace("``", "`")


PAGES = {"docs/reference/hooks.md": hooks_page, "docs/reference/errors.md": errors_page}


def main() -> int:
    """Write or check every page.

    Returns:
        The exit status: 1 when `--check` found a stale page, 0 otherwise.
    """
    checking = "--check" in sys.argv[1:]
    stale = False
    for page, build in PAGES.items():
        path, told = ROOT / page, build()
        if path.exists() and path.read_text(encoding="utf-8") == told:
            continue
        stale = True
        if checking:
            print(f"{page} is stale: run scripts/generate_api.py")
        else:
            path.write_text(told, encoding="utf-8")
            print(f"wrote {page}")
    return 1 if checking and stale else 0


if __name__ == "__main__":
    sys.exit(main())
