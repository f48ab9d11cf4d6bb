"""The page of problems from the field names tests that there are, and one at least for each problem."""

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PAGE = TESTS.parent / "docs/concepts/field-problems.md"


def named_in(path: Path) -> set[str]:
    """Return the tests of a file, those of a class behind its name."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        inside = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
        for part in inside:
            if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef) and part.name.startswith("test_"):
                found.add(prefix + part.name)
    return found


def problems(page: str) -> dict[str, list[str]]:
    """Return the tests that a page names, by problem."""
    parts = re.split(r"^### (.+)$", page, flags=re.MULTILINE)
    return {
        title: re.findall(r"^\* `([^`]+)`$", text, flags=re.MULTILINE)
        for title, text in zip(parts[1::2], parts[2::2], strict=True)
    }


def missing(named: str) -> str:
    """Return what is wrong with a test's name, or ""."""
    file, _, test = named.partition("::")
    path = TESTS / file
    if not path.is_file():
        return f"there is no tests/{file}"
    return "" if test in named_in(path) else f"tests/{file} has no {test}"


def test_every_test_that_the_page_names_exists() -> None:
    """A test that is renamed is renamed on the page as well."""
    named = {test for tests in problems(PAGE.read_text(encoding="utf-8")).values() for test in tests}
    assert len(named) > 80
    assert [found for found in map(missing, sorted(named)) if found] == []


def test_every_problem_has_a_test() -> None:
    """A problem without one would be a promise."""
    found = problems(PAGE.read_text(encoding="utf-8"))
    assert len(found) >= 20 + 25 + 3
    assert [title for title, tests in found.items() if not tests] == []


@pytest.mark.parametrize(
    "named, wrong",
    [
        ("unit/test_field_problems.py::test_every_problem_has_a_test", ""),
        (
            "unit/test_field_problems.py::test_no_such",
            "tests/unit/test_field_problems.py has no test_no_such",
        ),
        ("unit/test_nowhere.py::test_it", "there is no tests/unit/test_nowhere.py"),
    ],
)
def test_a_name_that_leads_nowhere_is_noticed(named: str, wrong: str) -> None:
    """Of a test, or of its file."""
    assert missing(named) == wrong
