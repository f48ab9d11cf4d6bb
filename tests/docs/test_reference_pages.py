"""The reference pages are current and complete."""

from __future__ import annotations

import builtins
import contextlib
import dataclasses
import io
import json
import re
import subprocess
import sys

import pytest

import quiesce.errors
import quiesce_grpo.errors
from quiesce.checkpoint.cut import PartStamp
from quiesce.checkpoint.documents import DOCUMENTS, Manifest
from quiesce.checkpoint.journal import EVENTS, JournalRecord
from quiesce.cli.main import main
from quiesce.invariants import INVARIANTS
from quiesce.telemetry import names
from quiesce_grpo import reference
from tests.docs.pages import ROOT, pages

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
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("command", ["train", "exec", "audit", "skew", "bench"])
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
            cut_id="c",
            incarnation=1,
            parent_cut=None,
            restored_from=None,
            step=0,
            trainer_version=0,
            mutation_version=0,
            created="",
            files=(),
            ledger_digest="",
            ledger_count=0,
            rows_count=0,
            rows_bytes=0,
            rows_stamp=PartStamp("c", 0),
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


@pytest.mark.parametrize("page", [page for page in pages() if not page.endswith("reference/metrics.md")])
def test_a_page_names_only_metrics_and_errors_that_there_are(page: str) -> None:
    """What is written like a metric is in the catalogue; what is written like an error can be raised."""
    text = (ROOT / page).read_text(encoding="utf-8")
    packages = {"quiesce_grpo", "quiesce_exporters", "quiesce_dashboards"}
    metrics = {re.sub("_(bucket|count|sum)$", "", name) for name in re.findall(r"\bquiesce_[a-z_]+", text)}
    known = {
        *vars(builtins),
        *vars(quiesce.errors),
        *vars(quiesce_grpo.errors),
        "CancelledError",
        "DeadlockError",
    }

    assert metrics - packages <= set(names.METRICS)
    assert set(re.findall(r"\b[A-Z][A-Za-z]+Error\b", text)) <= known


def test_the_page_about_ownership_has_every_invariant() -> None:
    """Each invariant that a cut is judged by has its line."""
    text = (ROOT / "docs" / "concepts" / "ownership.md").read_text(encoding="utf-8")

    assert [name for name in INVARIANTS if f"| `{name}` |" not in text] == []


def test_the_page_about_threads_has_every_pool() -> None:
    """Each pool of the toolkit that a run starts has its line; tools that are no part of a run have none."""
    apart = {"skew.py", "bench"}
    pools = set()
    for path in (ROOT / "toolkit" / "quiesce").rglob("*.py"):
        if not apart & set(path.relative_to(ROOT / "toolkit" / "quiesce").parts):
            found = re.findall(r'DaemonExecutor\(f?"(quiesce-[a-z-]+)', path.read_text(encoding="utf-8"))
            pools |= {name.rstrip("-") for name in found}
    text = (ROOT / "docs" / "concepts" / "threads-and-locks.md").read_text(encoding="utf-8")

    listed = tuple(name.rstrip("-") for name in re.findall("`(quiesce-[a-z-]+)", text))

    assert len(pools) >= 10
    assert sorted(name for name in pools if not name.startswith(listed)) == []
