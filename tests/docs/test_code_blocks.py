"""What the documentation shows can be run: Python is run, what it prints is compared, commands are known."""

from __future__ import annotations

import ast
import contextlib
import io
import json
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from quiesce.cli.main import main
from quiesce_grpo.run_config import load_config
from tests.docs.pages import ROOT, Block, blocks, commands, pages

PYTHON_PAGES = [page for page in pages() if blocks(page, "python")]
FILTERS = (
    "error",
    "ignore:'set_vital' is deprecated:UserWarning",
    "ignore:This process:DeprecationWarning",
)
"""Warnings are errors there too, with the exceptions that the tests make."""

MAX_FRAGMENTS = 2
"""Blocks in all pages that may be shown without being run."""

RUNNER = """
import contextlib, io, json, sys, types

module = types.ModuleType("page")
sys.modules["page"] = module
sys.path.insert(0, "")
printed = []
for line, text, page in json.load(open("blocks.json")):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile("\\n" * (line - 1) + text, page, "exec"), module.__dict__)
    printed.append(out.getvalue())
json.dump(printed, open("printed.json", "w"))
"""


@pytest.mark.timeout(120)
@pytest.mark.parametrize("page", PYTHON_PAGES)
def test_the_python_of_a_page_runs_and_prints_what_the_page_says(page: str, tmp_path: Path) -> None:
    """Run a page's blocks in order, as one reader would, in an empty folder."""
    running: list[Block] = []
    expected: dict[int, Block] = {}
    for block in blocks(page, "python", "text", "yaml"):
        if block.treatment == "file":
            (tmp_path / block.detail).write_text(block.text, encoding="utf-8")
        elif block.treatment == "prints":
            expected[len(running) - 1] = block
        elif block.language == "python" and block.treatment == "run":
            running.append(block)
    told = [(block.line, block.text, page) for block in running]
    (tmp_path / "blocks.json").write_text(json.dumps(told), encoding="utf-8")

    options = [option for chosen in FILTERS for option in ("-W", chosen)]
    done = subprocess.run(
        [sys.executable, *options, "-c", RUNNER], cwd=tmp_path, capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr
    printed = json.loads((tmp_path / "printed.json").read_text(encoding="utf-8"))
    for number, block in expected.items():
        assert printed[number].strip() == block.text.strip(), (
            f"{block} is not what the block before it prints"
        )


def test_blocks_that_are_not_run_are_rare_and_say_why() -> None:
    """A fragment parses and has a reason; there are hardly any."""
    fragments = [
        block for page in pages() for block in blocks(page, "python") if block.treatment == "fragment"
    ]

    for block in fragments:
        ast.parse(block.text, str(block))
        assert block.detail, f"{block} does not say why it is not run"
    assert len(fragments) <= MAX_FRAGMENTS, [str(block) for block in fragments]


def test_most_pages_that_teach_have_code() -> None:
    """The pages were found and read: each how-to has Python or commands in it."""
    how_tos = [page for page in pages() if page.startswith("docs/how-to/")]

    assert len(how_tos) >= 6
    for page in how_tos:
        assert blocks(page, "python") or commands(page), page


@pytest.mark.parametrize("page", [page for page in pages() if blocks(page, "console", "bash")])
def test_commands_parse(page: str) -> None:
    """Bash takes every command, and every script."""
    scripts = [command for _, command in commands(page)]
    scripts += [block.text for block in blocks(page, "bash")]

    assert scripts, f"{page} has console blocks without a command"
    for script in scripts:
        done = subprocess.run(["bash", "-n"], input=script, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{page}: {script}: {done.stderr}"


@pytest.mark.parametrize("page", [page for page in pages() if commands(page)])
def test_commands_name_what_there_is(page: str) -> None:
    """Each `quiesce` command has the options that it is shown with, each key and each make target exists."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for block, command in commands(page):
        words = [word for word in _simple(command) if not word.startswith("TORCH")]
        program = words[0].rpartition("/")[2] if words else ""
        if program == "make":
            named = {word for word in words[1:] if "=" not in word}
            assert named <= targets, f"{block}: {command}"
            words = [
                "quiesce",
                "train",
                *(part for word in words if word.startswith("ARGS=") for part in word[5:].split()),
            ]
            if "train" not in named:
                continue
        elif program != "quiesce":
            continue
        options = {word.partition("=")[0] for word in words if word.startswith("-")}
        assert options <= _options(words[1] if len(words) > 1 and not words[1].startswith("-") else ""), (
            f"{block}: {command}"
        )
        overrides = [word for word in words[2:] if re.fullmatch(r"[a-z_]+(\.[a-z_]+)*=.*", word)]
        if overrides and words[1] == "train":
            load_config("tiny", [word for word in overrides if "module:" not in word])


def _simple(command: str) -> list[str]:
    """Return the words of a command up to the first operator of the shell, or to another command that it runs."""
    words = shlex.split(command, comments=True)
    ends = [number for number, word in enumerate(words) if word in {"|", "&", "&&", ";", ">", "--"}]
    return words[: min(ends, default=len(words))]


@cache
def _options(command: str) -> set[str]:
    """Return the options that the help of a command names."""
    told = io.StringIO()
    with contextlib.redirect_stdout(told), pytest.raises(SystemExit) as ended:
        main([*([command] if command else []), "--help"])
    assert ended.value.code == 0, f"there is no command {command!r}"
    return set(re.findall(r"(?<![\w-])--?[a-z][a-z-]*", told.getvalue()))
