"""Every public module's `__all__` and reality agree, both ways; the reference run keeps to what is public."""

import ast
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = (
    ROOT / "toolkit/quiesce",
    ROOT / "toolkit/quiesce_grpo",
    ROOT / "exporters/quiesce_exporters",
    ROOT / "dashboards/quiesce_dashboards",
)


def _module_name(package: Path, file: Path) -> str:
    parts = file.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _public_modules() -> dict[str, Path]:
    """Return import name and file of every module without a part that starts with an underscore."""
    found = {
        _module_name(package, file): file for package in PACKAGES for file in sorted(package.rglob("*.py"))
    }
    return {
        name: file
        for name, file in found.items()
        if not any(part.startswith("_") for part in name.split("."))
    }


def _defined(file: Path) -> set[str]:
    """Return the public functions and classes that a module's own top level defines.

    What it imports is not its own. A constant or an alias may be public without being offered: it documents a
    limit or shortens a signature, and nobody has to import it.
    """
    return {
        node.name
        for node in ast.parse(file.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
    }


def _offered(name: str) -> set[str]:
    """Return a module's `__all__`; a module without one is a catalogue, which offers all that it defines."""
    module = importlib.import_module(name)
    listed = getattr(module, "__all__", None)
    if listed is None:
        return {entry for entry in vars(module) if not entry.startswith("_")}
    return set(listed)


MODULES = _public_modules()


def test_the_walk_finds_the_modules_of_every_package() -> None:
    """The walk sees all four packages, so that a moved root cannot empty this file's tests."""
    roots = {name.split(".")[0] for name in MODULES}

    assert roots == {"quiesce", "quiesce_grpo", "quiesce_exporters", "quiesce_dashboards"}


@pytest.mark.parametrize("name", sorted(MODULES))
def test_all_lists_every_public_function_and_class(name: str) -> None:
    """A public function or class is offered; one that should not be is private by its underscore."""
    assert sorted(_defined(MODULES[name]) - _offered(name)) == []


@pytest.mark.parametrize("name", sorted(MODULES))
def test_all_lists_nothing_that_the_module_lacks(name: str) -> None:
    """Every entry of `__all__` is there, public, and listed once; lazily loaded names count as there."""
    module = importlib.import_module(name)
    listed = list(getattr(module, "__all__", ()))

    assert [entry for entry in listed if not hasattr(module, entry)] == []
    assert [entry for entry in listed if entry.startswith("_") and entry != "__version__"] == []
    assert len(listed) == len(set(listed))


@pytest.mark.parametrize("name", sorted(name for name in MODULES if name.split(".")[0] == "quiesce_grpo"))
def test_the_reference_run_uses_only_the_public_api(name: str) -> None:
    """What `quiesce_grpo` imports from `quiesce` stands in the `__all__` of its module, or is a module."""
    private: list[str] = []
    for node in ast.walk(ast.parse(MODULES[name].read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "quiesce":
            public = _offered(node.module)
            private.extend(
                f"{node.module}.{alias.name}"
                for alias in node.names
                if alias.name not in public and f"{node.module}.{alias.name}" not in MODULES
            )

    assert private == []
