"""Finds Prometheus, promtool and Alertmanager, and says how to get them.

Rule: a path that the user named is used or refused; otherwise the first that can be executed counts, in this order:
``.tools/bin`` of the checkout (``make tools``), then ``PATH``. Nothing here suspends; everything blocks for the time
of a file look-up.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from quiesce.errors import ViewError

__all__ = ["INSTALL", "Programs", "environment_of", "find_programs", "prepare_alertmanager"]

INSTALL: Final = "install both with `apt-get install prometheus prometheus-alertmanager`, or run `make tools`"
"""How to get what is missing."""

_CHECKOUT: Final = Path(__file__).resolve().parents[3]
_NAMES: Final = {
    "prometheus": ("prometheus",),
    "promtool": ("promtool",),
    "alertmanager": ("alertmanager", "prometheus-alertmanager"),
}
_SHARE: Final = Path("/usr/share/prometheus/alertmanager")
"""Where Debian's Alertmanager looks for its templates: the path is compiled in."""


@dataclass(frozen=True, slots=True)
class Programs:
    """What was found.

    Attributes:
        prometheus: The server.
        promtool: Makes blocks of recorded samples; None if it is not there, and then nothing recorded can be shown.
        alertmanager: None if it is not there.
    """

    prometheus: Path
    promtool: Path | None
    alertmanager: Path | None


def find_programs(
    prometheus: Path | None = None, alertmanager: Path | None = None, *, checkout: Path = _CHECKOUT
) -> Programs:
    """Find the programs.

    Args:
        prometheus: The one to use; promtool is looked for beside it first.
        alertmanager: The one to use.
        checkout: The folder whose ``.tools/bin`` is looked into first.

    Raises:
        ViewError: If there is no Prometheus, or a named program cannot be executed.
    """
    tools = checkout / ".tools" / "bin"
    server = _named("--prometheus", prometheus) or _found("prometheus", [tools])
    if server is None:
        raise ViewError("Prometheus 2.42 or later is needed and was not found", INSTALL)
    beside = [server.parent, server.resolve().parent, tools]
    return Programs(
        server,
        _found("promtool", beside),
        _named("--alertmanager", alertmanager) or _found("alertmanager", beside),
    )


def environment_of(program: Path) -> dict[str, str]:
    """Return the environment for a program: little, so that no secret of the shell is handed on.

    A program that was unpacked beside its libraries finds them.
    """
    told = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR", "TZ") if name in os.environ}
    path = program.resolve()
    libraries = os.environ.get("LD_LIBRARY_PATH", "")
    if path.parts[-3:-1] == ("usr", "bin") and path.parents[2] != Path("/"):
        found = [
            str(each) for each in (path.parents[2] / "usr" / "lib").glob("*-linux-gnu*") if each.is_dir()
        ]
        libraries = ":".join([*found, *([libraries] if libraries else [])])
    if libraries:
        told["LD_LIBRARY_PATH"] = libraries
    return told


def prepare_alertmanager(program: Path, folder: Path) -> Path:
    """Return an Alertmanager that finds its templates, to be started in that folder.

    The distribution compiles an absolute path into it. Where its package is not installed but only unpacked, a copy
    has a relative path of the same length in its place, and the templates lie beside the copy.

    Args:
        program: The one that was found.
        folder: Where a copy may be written.

    Raises:
        OSError: If the copy cannot be written.
    """
    original = program.resolve()
    if original.parts[-3:-1] != ("usr", "bin") or _SHARE.is_dir():
        return program
    templates = original.parents[2] / str(_SHARE).lstrip("/")
    if not templates.is_dir():
        return program
    compiled = str(_SHARE).encode()
    here = f"./{'share':/>{len(compiled) - 2}}".encode()  # slashes in a row are one
    copy = folder / "alertmanager"
    if copy.exists():
        return copy
    content = original.read_bytes()
    if compiled not in content:
        return program
    copy.write_bytes(content.replace(compiled, here))
    copy.chmod(0o755)
    shutil.copytree(templates, folder / "share", ignore=shutil.ignore_patterns("ui"), dirs_exist_ok=True)
    return copy


def _named(option: str, path: Path | None) -> Path | None:
    if path is None:
        return None
    if not path.is_file() or not os.access(path, os.X_OK):
        raise ViewError(f"{option}: {path} is not a program that can be executed", INSTALL)
    return path.absolute()


def _found(name: str, folders: Iterable[Path]) -> Path | None:
    for folder in folders:
        for each in _NAMES[name]:
            if os.access(folder / each, os.X_OK) and (folder / each).is_file():
                return folder / each
    for each in _NAMES[name]:
        found = shutil.which(each)
        if found:
            return Path(found)
    return None
