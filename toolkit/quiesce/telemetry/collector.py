"""Answers a scrape: the observer's numbers, and what the attached primitives say about themselves right now.

Rule: a scrape never raises because of a source. A source that raises is counted and left out of that scrape,
so that a broken primitive costs its own series and nobody else's. Runs on the thread of whoever scrapes,
never on the event loop; nothing here suspends.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from operator import attrgetter, methodcaller
from typing import TYPE_CHECKING, Any, Final

from prometheus_client.core import InfoMetricFamily

from quiesce.telemetry import names
from quiesce.telemetry.deferred import DeferredMetrics
from quiesce.telemetry.exposed import KeptFamilies
from quiesce.telemetry.gpu import gpu_in_use, put_gpu
from quiesce.telemetry.histogram import Histogram, HistogramFamily, known

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric as Family

    from quiesce.accounting import AccountingStatistics
    from quiesce.barrier import BarrierStatistics
    from quiesce.buffer import BufferStatistics
    from quiesce.cleanup import CleanupStatistics
    from quiesce.dataplane.interface import DataPlaneStatistics
    from quiesce.ledger import LedgerStatistics
    from quiesce.observers import Hub
    from quiesce.snapshot_gate import GateStatistics
    from quiesce.spares import SpareStatistics
    from quiesce.telemetry.metrics import MetricsObserver
    from quiesce.telemetry.names import Metric

__all__ = ["QuiesceCollector"]

_ATTEMPTS: Final = 5
"""How often a source is read again that changed while it was read (it lives on another thread)."""

_INFO_LENGTH: Final = 100
"""Characters of an info label's value; names of classes are shorter."""

Values = dict[tuple[str, ...], float]
Ask = Callable[[Any], Any]
Put = Callable[[Any, dict[str, Values]], None]


class QuiesceCollector:
    """A prometheus_client collector over one observer and one hub.

    Args:
        observer: Where hooks are counted.
        hub: Where primitives attached themselves.
        run: The run's name, a label of every series.
        role: What this process is in the run, a label of every series.
        info: Further values of ``quiesce_run_info``: ``engine``, or names that sources do not tell.
    """

    def __init__(
        self,
        observer: MetricsObserver,
        hub: Hub,
        *,
        run: str,
        role: str = "controller",
        info: Mapping[str, str] | None = None,
    ) -> None:
        self._observer = observer
        self._hub = hub
        self._constant = {"run": run, "role": role}
        self._kept = KeptFamilies(self._constant)
        self._told: tuple[dict[str, str], Family] | None = None
        self._workers: set[str] = set()
        self._cpu_ns = 0
        self.info = dict(info or {})
        """Values of ``quiesce_run_info`` that were given."""
        self.source_errors = 0
        """How often a source could not be read."""
        self._seen: set[str] = set()

    def describe(self) -> list[Family]:
        """Tell a registry nothing: what exists depends on what is attached when it is scraped."""
        return []

    def collect(self) -> Iterator[Family]:
        """Yield every family whose source was attached."""
        since = time.thread_time_ns()
        try:
            yield from self._collect()
        finally:  # what writes the families as text runs in between, and is a part of what a scrape costs
            self._cpu_ns += max(0, time.thread_time_ns() - since)

    def _collect(self) -> Iterator[Family]:
        if isinstance(self._observer, DeferredMetrics):
            self._observer.catch_up()
        sources = {role: self._hub.sources(role) for role in names.ROLES}
        self._seen |= self._hub.roles.copy()
        self._seen |= self._observer.seen.copy()
        if gpu_in_use():
            self._seen.add("gpu")
        pulled = self._pull(sources)
        slots = self._slot_families()
        for metric in names.METRICS.values():
            if metric.needs and not self._seen.intersection(metric.needs):
                continue
            family = self._observer.families.get(metric.name)
            if isinstance(family, HistogramFamily):
                yield self._kept.histograms(metric, self._children(family))
            elif family is not None:
                yield self._kept.numbers(metric, family.values.copy())
            elif metric.name in slots:
                yield self._kept.histograms(metric, slots[metric.name])
            elif metric is names.RUN_INFO:
                yield self._info(metric, sources)
            elif pulled.get(metric.name):
                yield self._kept.numbers(metric, pulled[metric.name])

    def _children(self, family: HistogramFamily) -> dict[tuple[str, ...], Histogram]:
        """Return the children that exist in a process like this one."""
        children, windows = family.children.copy(), family.metric.windows
        if windows and "barrier" not in self._seen:
            return {
                labels: child for labels, child in children.items() if labels[0] not in windows or child.count
            }
        return children

    # -------------------------------------------------------------------------------------------- formatting

    def _info(self, metric: Metric, sources: Mapping[str, list[Any]]) -> Family:
        said = {
            "sampler": _name(sources["sampler"]),
            "dataplane": self._backend(sources["dataplane"]),
            "engine": "",
            "version": _version(),
            **self.info,
        }
        told = {name: said[name][:_INFO_LENGTH] for name in metric.label_names}
        kept = self._told
        if kept is None or kept[0] != told:
            family = InfoMetricFamily(metric.family, metric.help, labels=tuple(self._constant))
            family.add_metric(tuple(self._constant.values()), told)
            kept = self._told = (told, family)
        return kept[1]

    def _slot_families(self) -> dict[str, dict[tuple[str, ...], Histogram]]:
        slots = self._observer.slots.copy()
        return {
            names.MUTATION_WAIT.name: {(kind,): numbers.wait for kind, numbers in slots.items()},
            names.MUTATION_HOLD.name: {(kind,): numbers.hold for kind, numbers in slots.items()},
        }

    # ----------------------------------------------------------------------------------------------- pulling

    def _pull(self, sources: Mapping[str, list[Any]]) -> dict[str, Values]:
        """Ask every attached primitive, and add up what several of one role say."""
        pulled: dict[str, Values] = {}
        readers: dict[str, tuple[Ask, Put]] = {
            **_READERS,
            "barrier": (_STATISTICS, self._put_barrier),
            "snapshot_gate": (_STATISTICS, self._put_gate),
        }
        for role, (ask, put) in readers.items():
            for source in sources[role]:
                self._read(source, ask, put, pulled)
        for auditor in self._hub.sources("auditor"):
            self._read(auditor, methodcaller("known"), lambda now, _: self._observer.audited(*now), pulled)
        for saver in self._hub.sources("checkpointer"):
            self._read(saver, _STATISTICS, lambda now, _: self._observer.saved(now.part_bytes), pulled)
        slots = self._observer.slots.copy()
        pulled[names.MUTATION_SECTIONS.name] = {
            (kind, outcome): count
            for kind, numbers in slots.items()
            for outcome, count in numbers.ended.items()
        }
        # A slot waits for nothing but checkpoint windows, so what it waited is what they cost it.
        pulled[names.WINDOW_BLOCKED.name] = {(kind,): numbers.wait.sum for kind, numbers in slots.items()}
        pulled[names.CAPABILITY.name] = {(role,): float(role in self._seen) for role in names.ROLES}
        if "gpu" in self._seen:
            put_gpu(pulled)
        slots_ns = self._observer.slot_cost_ns * self._observer.book.closed
        _add(pulled, names.TELEMETRY_CPU, (self._hub.fired_ns + slots_ns + self._cpu_ns) / 1e9)
        errors = sum(self._hub.errors.copy().values()) + self.source_errors
        pulled[names.OBSERVER_ERRORS.name] = {(): errors}
        return pulled

    def _read(self, source: object, ask: Ask, put: Put, pulled: dict[str, Values]) -> None:
        answer = self._ask(source, ask)
        if answer is None:
            return
        try:
            put(answer, pulled)
        except Exception:  # noqa: BLE001 - a foreign source may answer anything, and the scrape must answer
            self.source_errors += 1

    def _put_barrier(self, now: BarrierStatistics, pulled: dict[str, Values]) -> None:
        self._observer.add_kinds(now.active)
        for state, counts, ages in (
            ("active", now.active, now.oldest_active_seconds),
            ("waiting", now.waiting, now.longest_wait_seconds),
        ):
            for kind, count in counts.items():
                label = kind if kind in self._observer.slots else names.OTHER
                _add(pulled, names.MUTATION_SLOTS, count, label, state)
                _max(pulled, names.MUTATION_OLDEST, ages[kind], label, state)

    def _put_gate(self, now: GateStatistics, pulled: dict[str, Values]) -> None:
        if now.worker not in self._workers and len(self._workers) < names.WORKER_LIMIT:
            self._workers.add(now.worker)
        label = now.worker if now.worker in self._workers else names.OTHER
        if now.retired:  # a worker that was given up; its successor has a gate of its own
            _add(pulled, names.GATE_PERMITS, 0, label)
            _max(pulled, names.GATE_CLOSED, 0, label)
            return
        _add(pulled, names.GATE_PERMITS, now.permits, label)
        _max(pulled, names.GATE_CLOSED, float(now.closed), label)

    def _ask(self, source: object, ask: Ask) -> Any:  # noqa: ANN401 - whatever a primitive says
        for _ in range(_ATTEMPTS):
            try:
                return ask(source)
            except RuntimeError:  # "changed size during iteration": the loop's thread was faster; ask again
                continue
            except Exception:  # noqa: BLE001 - a scrape must answer whatever a source does
                break
        self.source_errors += 1
        return None

    def _backend(self, planes: list[Any]) -> str:
        answer = self._ask(planes[-1], _STATISTICS) if planes else None
        return str(getattr(answer, "backend", "")) or _name(planes)


def _add(pulled: dict[str, Values], metric: Metric, value: float, *labels: str) -> None:
    values = pulled.setdefault(metric.name, {})
    values[labels] = values.get(labels, 0.0) + value


def _max(pulled: dict[str, Values], metric: Metric, value: float, *labels: str) -> None:
    values = pulled.setdefault(metric.name, {})
    values[labels] = max(values.get(labels, value), value)


def _set(pulled: dict[str, Values], metric: Metric, value: float, *labels: str) -> None:
    """Set a value; sources come oldest first, so the newest one wins."""
    pulled.setdefault(metric.name, {})[labels] = value


def _put_ledger(now: LedgerStatistics, pulled: dict[str, Values]) -> None:
    _add(pulled, names.GROUPS, now.reserved + now.admitted, "ledger")
    _max(pulled, names.TARGET_STEP_MAX, _stamp(now.target_step_max), "ledger")


def _put_spares(now: SpareStatistics, pulled: dict[str, Values]) -> None:
    _add(pulled, names.GROUPS, now.spares, "spares")


def _put_buffer(now: BufferStatistics, pulled: dict[str, Values]) -> None:
    _add(pulled, names.GROUPS, now.ready, "buffer")
    _add(pulled, names.GROUPS, now.training, "training")
    _max(pulled, names.TARGET_STEP_MAX, _stamp(now.target_step_max), "buffer")


def _put_accounting(now: AccountingStatistics, pulled: dict[str, Values]) -> None:
    _add(pulled, names.PROMPTS_READ, now.read)
    _add(pulled, names.PROMPTS_TRAINED, now.trained)
    for reason, count in now.dropped.items():
        _add(pulled, names.PROMPTS_DROPPED, count, reason)


def _put_dataplane(now: DataPlaneStatistics, pulled: dict[str, Values]) -> None:
    _add(pulled, names.DATAPLANE_ROWS, now.rows)
    _add(pulled, names.DATAPLANE_BYTES, now.num_bytes)
    _add(pulled, names.DATAPLANE_PINNED, now.pinned_rows)
    _add(pulled, names.DATAPLANE_DEFERRED, now.deferred_clears)
    _max(pulled, names.DATAPLANE_MAP_USED, now.map_used_ratio)


def _put_cleanup(now: CleanupStatistics, pulled: dict[str, Values]) -> None:
    _add(pulled, names.CLEANUP_QUEUE, now.pending_calls)


def _ask_tracing(source: Any) -> tuple[Mapping[str, float], Mapping[tuple[str, str], int]]:  # noqa: ANN401 - whatever is attached
    return source.totals(), source.pipeline.sink_fates()


def _put_tracing(
    now: tuple[Mapping[str, float], Mapping[tuple[str, str], int]], pulled: dict[str, Values]
) -> None:
    totals, at_sinks = now
    for fate in names.SPAN_FATES:
        _add(pulled, names.TELEMETRY_SPANS, totals[fate], fate)
    for sink, fate in names.TELEMETRY_SINK_SPANS.label_sets():
        _add(pulled, names.TELEMETRY_SINK_SPANS, 0, sink, fate)
    for (sink, fate), count in at_sinks.items():
        _add(pulled, names.TELEMETRY_SINK_SPANS, count, known(sink, names.SPAN_SINKS), fate)
    _add(pulled, names.TELEMETRY_CPU, totals["cpu_seconds"])


def _put_cursor(cursor: int, pulled: dict[str, Values]) -> None:
    _set(pulled, names.DISPATCH_CURSOR, cursor)


def _put_version(value: int, pulled: dict[str, Values]) -> None:
    _set(pulled, names.TRAINER_VERSION, value)


_STATISTICS: Final = methodcaller("statistics")

_READERS: Final[dict[str, tuple[Ask, Put]]] = {
    "ledger": (_STATISTICS, _put_ledger),
    "spares": (_STATISTICS, _put_spares),
    "buffer": (_STATISTICS, _put_buffer),
    "accounting": (_STATISTICS, _put_accounting),
    "dataplane": (_STATISTICS, _put_dataplane),
    "cleanup": (_STATISTICS, _put_cleanup),
    "tracing": (_ask_tracing, _put_tracing),
    "sampler": (attrgetter("dispatch_cursor"), _put_cursor),
    "trainer_version": (attrgetter("value"), _put_version),
}
"""How to ask a primitive of each role, and where its answer goes; the barrier's needs the observer too."""


def _stamp(step: int | None) -> int:
    return -1 if step is None else step


def _name(sources: Iterable[Any]) -> str:
    """Name the newest source of a role: its ``name``, or its class."""
    found = ""
    for source in sources:
        found = str(getattr(source, "name", "") or type(source).__name__)
    return found


@cache
def _version() -> str:
    try:
        return version("quiesce")
    except PackageNotFoundError:  # run from a source tree that was never installed
        return ""
