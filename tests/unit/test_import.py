"""`import quiesce` is light: a process pays for nothing that it does not use."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "opentelemetry", "grafanalib", "prometheus_client", "structlog", "numpy")
"""Top-level packages that `import quiesce` must not load; each is imported where it is used."""


HEAVY_FOR_EVERYBODY = ("torch", "grafanalib", "numpy")
"""Of those, what even the use of every public name must not load: only a call that needs one does."""


def _loaded_by(program: str) -> frozenset[str]:
    """Return the names of every module that a fresh interpreter imports for a program."""
    finished = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", program],
        capture_output=True,
        text=True,
        check=True,
        timeout=55,
    )
    lines = (line for line in finished.stderr.splitlines() if line.startswith("import time:"))
    return frozenset(line.rsplit("|", 1)[1].strip() for line in lines)


def _of(package: str, loaded: frozenset[str]) -> list[str]:
    return sorted(name for name in loaded if name == package or name.startswith(f"{package}."))


@pytest.fixture(scope="module")
def by_import() -> frozenset[str]:
    """Return what `import quiesce` loads."""
    return _loaded_by("import quiesce")


@pytest.fixture(scope="module")
def by_names() -> frozenset[str]:
    """Return what the lookup of every public name of `quiesce` loads."""
    return _loaded_by("import quiesce; [getattr(quiesce, name) for name in quiesce.__all__]")


def test_the_list_of_loaded_modules_is_a_real_one(by_import: frozenset[str]) -> None:
    """The list holds what is known to be loaded, so that the absence of a module from it says something."""
    assert _of("quiesce", by_import) != []
    assert _of("site", by_import) != []


@pytest.mark.parametrize("package", HEAVY)
def test_import_quiesce_does_not_load(package: str, by_import: frozenset[str]) -> None:
    """No module of a heavy package is loaded by `import quiesce`."""
    assert _of(package, by_import) == []


@pytest.mark.parametrize("package", HEAVY_FOR_EVERYBODY)
def test_the_public_names_do_not_load(package: str, by_names: frozenset[str]) -> None:
    """No module of torch and its like is loaded by looking at the public names either."""
    assert _of(package, by_names) == []
