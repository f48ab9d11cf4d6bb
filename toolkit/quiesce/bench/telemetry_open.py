"""Slots at a steady rate with every span exported over OTLP: who exports, what it costs, and what arrived.

Rule: every measurement is a process of its own, the ways take turns in each round, and differences are taken within a
round. What arrived is counted by the receiver, not by the sender. Blocks.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from quiesce.bench.stats import Spread
from quiesce.bench.telemetry_load import WAYS
from quiesce.bench.telemetry_receiver import Receiver, receiver
from quiesce.errors import ExtraMissingError
from quiesce.telemetry.sinks import find_sink

__all__ = ["WAYS", "OpenLoop", "measure_open_loop"]

_PATIENCE_SECONDS: Final = 120.0


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """What was found.

    Attributes:
        runs: By rate and way, what each round's process said, with ``arrived``: the spans that the receiver counted.
    """

    runs: Mapping[tuple[int, str], Sequence[Mapping[str, Any]]]

    def spread(self, rate: int, way: str, what: str) -> Spread:
        """Return one number's spread over the rounds."""
        return Spread.of([run[what] for run in self.runs[rate, way]])

    def over_none(self, rate: int, way: str, what: str) -> Spread:
        """Return by how much a number is more than without telemetry, in the same round."""
        pairs = zip(self.runs[rate, way], self.runs[rate, WAYS[0]], strict=True)
        return Spread.of([run[what] - bare[what] for run, bare in pairs])

    def accounted(self, rate: int, way: str) -> float:
        """Return the share of all slots whose span arrived, or was counted as sampled out."""
        runs = self.runs[rate, way]
        slots = sum(run["slots_with_warm_up"] for run in runs)
        return float(sum(run["arrived"] + run["spans"]["sampled"] for run in runs) / slots)


def measure_open_loop(rates: Sequence[int], rounds: int, seconds: float) -> OpenLoop:
    """Measure each way at each rate.

    Args:
        rates: Slots a second.
        rounds: Rounds; each way comes first in turn.
        seconds: How long slots come, each time.

    Raises:
        ExporterMissingError: If the OTLP exporter is not installed.
        ExtraMissingError: If a package that it needs is not.
    """
    find_sink("otlp")
    try:
        importlib.import_module("opentelemetry.proto")
    except ImportError as missing:
        raise ExtraMissingError("the open-loop measurement", "opentelemetry-proto", "otlp") from missing
    runs: dict[tuple[int, str], list[dict[str, Any]]] = {(rate, way): [] for rate in rates for way in WAYS}
    with receiver() as arriving:
        for number in range(rounds):
            first = number % len(WAYS)
            for rate in rates:
                for way in WAYS[first:] + WAYS[:first]:
                    runs[rate, way].append(_run(arriving, rate, way, seconds))
    return OpenLoop(runs)


def _run(arriving: Receiver, rate: int, way: str, seconds: float) -> dict[str, Any]:
    # OpenTelemetry's variables are the user's, and may switch off or send elsewhere what is measured here.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")}
    environment["OTEL_EXPORTER_OTLP_ENDPOINT"] = arriving.url
    before = arriving.spans
    run = subprocess.run(  # noqa: S603 - this interpreter, and a module of ours
        [
            sys.executable,
            "-m",
            "quiesce.bench.telemetry_load",
            json.dumps({"way": way, "rate": rate, "seconds": seconds}),
        ],
        check=True,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        timeout=_PATIENCE_SECONDS,
    )
    found: dict[str, Any] = json.loads(run.stdout)
    found["arrived"] = arriving.spans - before
    return found
