"""The programs of the distribution that tests start are at hand and run."""

import subprocess
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / ".tools" / "bin"

pytestmark = pytest.mark.distribution


@pytest.mark.parametrize("program", ["prometheus", "promtool", "alertmanager", "amtool"])
def test_a_fetched_program_says_its_version(program: str) -> None:
    """A program under `.tools/bin` runs without installation and names itself."""
    path = TOOLS / program
    assert path.exists(), f"{path} is missing; `make tools` fetches it"

    finished = subprocess.run([path, "--version"], capture_output=True, text=True, check=False, timeout=30)

    assert finished.returncode == 0, finished.stderr
    assert f"{program}, version" in finished.stdout + finished.stderr


def test_promtool_judges_rules(tmp_path: Path) -> None:
    """The fetched promtool does its work: it accepts a rule that parses and refuses one that does not."""
    rules = "groups: [{{name: g, rules: [{{record: 'quiesce:x', expr: '{expression}'}}]}}]\n"
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text(rules.format(expression="sum(rate(up[5m]))"), encoding="utf-8")
    bad.write_text(rules.format(expression="sum(rate(up[5m])"), encoding="utf-8")

    verdicts = [
        subprocess.run(
            [TOOLS / "promtool", "check", "rules", file], capture_output=True, check=False, timeout=30
        )
        for file in (good, bad)
    ]

    assert [verdict.returncode == 0 for verdict in verdicts] == [True, False]
