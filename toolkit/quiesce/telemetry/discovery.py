"""A target file for Prometheus, so that a run is scraped without anybody editing a configuration.

Rule: the file is there exactly while the endpoint serves; it is replaced in one step, so Prometheus never reads half
of it. Nothing here suspends. The format is that of Prometheus' ``file_sd_configs``: a JSON list of
``{"targets": [...], "labels": {...}}``.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from quiesce.errors import ConfigError

__all__ = ["TargetFile", "write_atomically"]


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file in one step.

    Raises:
        OSError: If the folder cannot be written; nothing is left behind then.
    """
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        scratch.write_bytes(content)
        scratch.replace(path)
    except OSError:
        scratch.unlink(missing_ok=True)
        raise


class TargetFile:
    """One run's target in a folder that Prometheus watches.

    Args:
        folder: The folder, for instance of ``file_sd_configs: [{files: ["FOLDER/*.json"]}]``.
        run: The run's name.
        role: What the process is in the run.
        target: ``host:port`` to scrape.

    Raises:
        ConfigError: If there is no such folder.
        OSError: If it cannot be written.
    """

    def __init__(self, folder: Path, *, run: str, role: str, target: str) -> None:
        if not folder.is_dir():
            raise ConfigError("QUIESCE_SD_DIR", f"{folder} is not a folder")
        safe = re.sub(r"[^A-Za-z0-9_.-]", "_", f"{run}-{role}")
        self.path = folder / f"quiesce-{safe}-{os.getpid()}.json"
        # The run and the role are labels of every series already; a label of the same name here would be renamed.
        told = [{"targets": [target], "labels": {"job": "quiesce"}}]
        write_atomically(self.path, (json.dumps(told) + "\n").encode())

    def remove(self) -> None:
        """Take the target away; once gone it stays gone."""
        self.path.unlink(missing_ok=True)
