"""Writes the metrics of a run for node_exporter's textfile collector, where nothing can be scraped: under Slurm.

Rule: the file is whole at any time and gone when the run is: it is replaced by renaming, and removed at close.
It has no timestamps, because node_exporter takes none; how old it is, ``node_textfile_mtime_seconds`` says,
which is how a run that was killed is told from one that goes on. Blocks for as long as a small file takes to
write; a forked child writes and removes nothing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.samples import Sample

from quiesce.errors import ConfigError

if TYPE_CHECKING:
    from quiesce.telemetry.finished import FinishedSpan
    from quiesce.telemetry.sinks import SinkContext

__all__ = ["DIRECTORY_VARIABLE", "Textfile", "make_textfile"]

DIRECTORY_VARIABLE: Final = "QUIESCE_TEXTFILE_DIR"
"""Names the folder that node_exporter was started with (``--collector.textfile.directory``)."""

_MODE: Final = 0o644  # node_exporter runs as a user of its own
_UNSAFE: Final = re.compile(r"[^A-Za-z0-9_.-]+")


class Textfile:
    """A sink that keeps one ``.prom`` file up to date.

    Args:
        directory: node_exporter's folder.
        run: The run's name.
        role: What this process is in the run.

    Attributes:
        path: The file. Two processes of a run need roles that differ, as their series do.
    """

    takes_spans = False  # the format has none

    def __init__(self, directory: Path | str, *, run: str, role: str) -> None:
        self._labels = {"run": run, "role": role}
        self._pid = os.getpid()
        self._closed = False
        name = _UNSAFE.sub("_", f"quiesce-{run}-{role}")
        self.path = Path(directory) / f"{name}.prom"
        # node_exporter reads what ends in .prom, and nothing else.
        self._scratch = self.path.with_name(f".{name}.{self._pid}.tmp")

    def spans(self, batch: Sequence[FinishedSpan]) -> None:
        """Take no spans: the format has none."""

    def samples(self, families: Sequence[Metric], unix_time: float) -> None:
        """Write a snapshot.

        Raises:
            OSError: If it cannot be written; the last one stays.
        """
        if self._closed or self._pid != os.getpid():
            return
        registry = CollectorRegistry(support_collectors_without_names=True)
        registry.register(_Snapshot(families, self._labels))
        text = generate_latest(registry)
        try:
            self._scratch.write_bytes(text)
            self._scratch.chmod(_MODE)
            self._scratch.replace(self.path)
        except OSError:
            self._scratch.unlink(missing_ok=True)
            raise

    def events(self, events: Sequence[Mapping[str, object]]) -> None:
        """Take no log events: the format has none."""

    def close(self, deadline_seconds: float) -> None:
        """Remove the file, so that no scrape shows a run that is over."""
        if self._closed or self._pid != os.getpid():
            return
        self._closed = True
        self.path.unlink(missing_ok=True)


class _Snapshot(Collector):
    """Families as the format has them: without timestamps, every sample with its run and role."""

    def __init__(self, families: Sequence[Metric], labels: Mapping[str, str]) -> None:
        self._families = families
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        """Yield the families."""
        for family in self._families:
            plain = Metric(family.name, family.documentation, family.type)
            plain.samples = [
                Sample(sample.name, {**self._labels, **sample.labels}, sample.value)
                for sample in family.samples
            ]
            yield plain


def make_textfile(context: SinkContext) -> Textfile:
    """Make the sink; the entry point ``textfile``.

    Args:
        context: Its setting ``directory`` names node_exporter's folder; else the environment does, as
            :data:`DIRECTORY_VARIABLE`.

    Raises:
        ConfigError: If neither names a folder that is there.
    """
    directory = context.settings.get("directory") or os.environ.get(DIRECTORY_VARIABLE)
    if not directory:
        raise ConfigError(
            "textfile.directory", f"name the folder that node_exporter reads, here or as {DIRECTORY_VARIABLE}"
        )
    path = Path(str(directory))
    if not path.is_dir():
        raise ConfigError("textfile.directory", f"{path} is not a folder")
    return Textfile(path, run=context.run, role=context.role)
