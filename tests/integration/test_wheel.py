"""The built wheel works by itself: in a clean environment, with the source out of reach."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("quiesce", "quiesce_grpo", "quiesce_exporters", "quiesce_dashboards")

pytestmark = pytest.mark.timeout(180)  # builds a wheel and an environment, on a machine that may be busy


def _run(*command: str | Path, cwd: Path) -> str:
    """Run a command outside the checkout and without the variables that could lead back into it."""
    env = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))
    }
    finished = subprocess.run(
        command, cwd=cwd, env=env, capture_output=True, text=True, check=False, timeout=150
    )
    assert finished.returncode == 0, f"{command}: {finished.stdout}{finished.stderr}"
    return finished.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a wheel built from this checkout with the build tools of the environment, without an index."""
    folder = tmp_path_factory.mktemp("wheel")
    _run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    (built,) = folder.glob("quiesce-*.whl")
    return built


@pytest.fixture(scope="module")
def clean(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the root of an environment that holds the wheel, and borrows the dependencies of this one.

    The borrowed folder is added as a plain path: its own `.pth` files, the editable installation of the
    checkout among them, are not read, so the wheel is the only `quiesce` there.
    """
    root = tmp_path_factory.mktemp("clean")
    _run(sys.executable, "-m", "venv", "--without-pip", root, cwd=root)
    python = root / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check")
    _run(*pip, "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=root)
    (site,) = root.glob("lib/python3*/site-packages")
    borrowed = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
    (site / "borrowed.pth").write_text("\n".join(borrowed), encoding="utf-8")
    return root


def test_the_wheel_holds_the_packages_with_their_types_and_nothing_else(wheel: Path) -> None:
    """Only the four packages are in the wheel, each marked as typed; no test, document or script is."""
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()

    tops = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == set(PACKAGES)
    assert {f"{package}/py.typed" for package in PACKAGES} <= set(names)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_is_imported_from_the_wheel(package: str, clean: Path) -> None:
    """Each package comes from the clean environment, and no folder of the checkout is on its path."""
    program = f"import sys, {package}; print({package}.__file__); print(*sys.path, sep='\\n')"

    file, *path = _run(clean / "bin" / "python", "-I", "-c", program, cwd=clean).splitlines()

    assert Path(file).is_relative_to(clean)
    roots = {ROOT, *(ROOT / root for root in ("toolkit", "exporters", "dashboards"))}
    assert roots.isdisjoint(Path(entry) for entry in path if entry)


def test_the_installed_command_says_what_it_can_do(clean: Path) -> None:
    """`quiesce --help` of the installed wheel lists its commands."""
    text = _run(clean / "bin" / "quiesce", "--help", cwd=clean)

    assert "train" in text
    assert "audit" in text
