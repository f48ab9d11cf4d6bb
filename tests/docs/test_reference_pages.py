"""The reference pages are current and complete."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import re
import subprocess
import sys

import pytest

from quiesce.checkpoint.documents import DOCUMENTS, Manifest
from quiesce.checkpoint.cut import PartStamp
from quiesce.checkpoint.journal import EVENTS, JournalRecord
from quiesce.cli.main import main
from quiesce_grpo import reference
from tests.docs.pages import ROOT

REFERENCE = ROOT / "docs" / "reference"


def test_the_configuration_page_is_what_the_classes_say() -> None:
    """Run `python scripts/generate_reference.py` after a change."""
    assert (REFERENCE / "configuration.md").read_text(encoding="utf-8") == reference.page()


def test_a_stale_configuration_page_is_told(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The module's own check tells a current page from a stale one."""
    page = tmp_path_factory.mktemp("page") / "configuration.md"
    page.write_text(reference.page(), encoding="utf-8")

    current = reference.main(["--check", str(page)])
    page.write_text(reference.page().replace("max_steps", "most_steps"), encoding="utf-8")
    stale = reference.main(["--check", str(page)])

    assert (current, stale) == (0, 1)


def test_the_pages_of_hooks_and_errors_are_what_the_docstrings_say() -> None:
    """Run `python scripts/generate_api.py` after a change."""
    done = subprocess.run(
        [sys.executable, "scripts/generate_api.py", "--check"],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("command", ["train", "audit", "skew"])
def test_the_page_of_the_command_line_has_every_option(command: str) -> None:
    """Each option of a command's help has its line in that command's section, and no other is there."""
    text = (REFERENCE / "command-line.md").read_text(encoding="utf-8")
    section = text.partition(f"## `quiesce {command}`")[2].partition("\n## ")[0]
    told = io.StringIO()
    with contextlib.redirect_stdout(told), pytest.raises(SystemExit):
        main([command, "--help"])

    offered = set(re.findall(r"^  (?:-h, )?(--[a-z-]+)", told.getvalue(), re.MULTILINE)) - {"--help"}

    assert offered, "the help was not understood"
    assert set(re.findall(r"^\| `(--[a-z-]+)", section, re.MULTILINE)) == offered


def test_the_page_of_the_command_line_has_every_command() -> None:
    """Each command of `quiesce --help` has a section."""
    told = io.StringIO()
    with contextlib.redirect_stdout(told), pytest.raises(SystemExit):
        main(["--help"])
    commands = re.findall(r"^    ([a-z]+) ", told.getvalue(), re.MULTILINE)
    text = (REFERENCE / "command-line.md").read_text(encoding="utf-8")

    assert len(commands) >= 3
    assert [name for name in commands if f"\n## `quiesce {name}`\n" not in text] == []


def test_the_page_of_the_run_folder_has_every_field() -> None:
    """Each field of a manifest and of a journal line, each event and each document is named."""
    text = (REFERENCE / "run-folder.md").read_text(encoding="utf-8")
    manifest = json.loads(
        Manifest(
            cut_id="c", incarnation=1, parent_cut=None, restored_from=None, step=0, trainer_version=0,
            mutation_version=0, created="", files=(), ledger_digest="", ledger_count=0, rows_count=0,
            rows_bytes=0, rows_stamp=PartStamp("c", 0),
            groups={"ledger": 0, "spares": 0, "buffer": 0, "training": 0},
        ).to_bytes()
    )
    inner = [f"{name}.{field}" for name in ("lineage", "ledger", "rows") for field in manifest[name]]
    wanted = [
        *manifest,
        *inner,
        *(field.name for field in dataclasses.fields(JournalRecord)),
        *EVENTS,
        *DOCUMENTS,
    ]

    assert [name for name in wanted if f"`{name}`" not in text] == []
