"""The cases of every alert, for `promtool test rules`: six situations each.

Time is minutes; a series is scraped once a minute, and time begins at 0. A missed scrape is a stale marker, as
Prometheus itself writes one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Final

from quiesce.telemetry import names
from quiesce_dashboards.alerts import INVARIANT_ALERTS, OTHER_INVARIANT, Alert

__all__ = ["CASES", "SITUATIONS", "Case", "document"]

SITUATIONS: Final = ("fires", "silent", "restart", "missed scrape", "before the first scrape", "saves")
"""A case that fires, one that stays silent, one across a restart of the process, one across a missed scrape, one with the
violation before the first scrape, one with a save every ten minutes."""

MINUTE: Final = 60
HERE: Final = {"run": "r", "role": "controller", "instance": "host:9464", "job": "quiesce"}
THERE: Final = {**HERE, "instance": "host:9465"}
"""The process after a restart that took another port."""

GONE: Final = "_"
STALE: Final = "stale"
Run = tuple[float | str, int]
"""A value and how many scrapes in a row had it."""


@dataclass(frozen=True)
class Fired:
    """An alert that is firing."""

    labels: Mapping[str, str]
    value: str = ""
    kind: str = "none"
    instance: str = "host:9464 "


@dataclass(frozen=True)
class Case:
    """What was scraped, and what fires when (in minutes)."""

    situation: str
    series: Mapping[str, tuple[Run, ...]]
    fires: Mapping[int, tuple[Fired, ...]]
    note: str = ""


@dataclass
class Told:
    """Series under construction."""

    series: dict[str, tuple[Run, ...]] = field(default_factory=dict)

    def add(self, metric: names.Metric, *runs: Run, at: Mapping[str, str] = HERE, **labels: str) -> Told:
        """Add a series."""
        inside = ",".join(f'{key}="{value}"' for key, value in {**at, **labels}.items())
        self.series[f"{metric.name}{{{inside}}}"] = runs
        return self


def told(metric: names.Metric, *runs: Run, at: Mapping[str, str] = HERE, **labels: str) -> Told:
    """Begin with one series."""
    return Told().add(metric, *runs, at=at, **labels)


def started() -> Told:
    """The series that tells which processes there are."""
    return told(names.RUN_STARTED, (30, 800))


def saves(first: int = 10, every: int = 10, count: int = 30, offset: int = 0) -> tuple[Run, ...]:
    """The time of the last save, when there is one every so many minutes."""
    return ((0, first), *(((first + n * every) * MINUTE + offset, every) for n in range(count)))


def pulses(value: float, length: int, first: int = 10, every: int = 10, count: int = 30) -> tuple[Run, ...]:
    """A gauge that is up for a while at every save."""
    return ((0, first), *chain.from_iterable(((value, length), (0, every - length)) for _ in range(count)))


def steps(by: float, first: int = 10, every: int = 10, count: int = 60) -> tuple[Run, ...]:
    """A counter that grows at every save."""
    return ((0, first), *((by * (n + 1), every) for n in range(count)))


def document(alert: Alert, cases: Iterable[Case], rules: str) -> dict[str, Any]:
    """Return the file for `promtool test rules`."""
    tests = []
    for case in cases:
        assertions = [
            {
                "eval_time": f"{minute}m",
                "alertname": alert.name,
                "exp_alerts": [
                    {
                        "exp_labels": {"severity": alert.severity, **fired.labels},
                        "exp_annotations": alert.texts(
                            {
                                "instance": fired.instance,
                                "kind": fired.kind,
                                **fired.labels,
                                "value": fired.value,
                            }
                        ),
                    }
                    for fired in fired_then
                ],
            }
            for minute, fired_then in case.fires.items()
        ]
        tests.append(
            {
                "interval": "1m",
                "name": f"{alert.name}: {case.situation} {case.note}".strip(),
                "input_series": [
                    {"series": series, "values": _values(runs)} for series, runs in case.series.items()
                ],
                "alert_rule_test": assertions,
            }
        )
    return {"rule_files": [rules], "evaluation_interval": "1m", "tests": tests}


def _values(runs: tuple[Run, ...]) -> str:
    words = []
    for value, count in runs:
        if value == GONE:
            words.append(f"_x{count}")
        elif value == STALE:
            words += [STALE] * count
        else:
            words.append(f"{value}+0x{count - 1}")
    return " ".join(words)


def _invariant(invariant: str) -> tuple[Case, ...]:
    fired = (Fired({**HERE, "invariant": invariant}),)

    def last(*runs: Run) -> dict[str, tuple[Run, ...]]:
        return told(names.INVARIANT_LAST_VIOLATION, *runs, invariant=invariant).series

    other = "versions_grow" if invariant != "versions_grow" else "single_owner"
    quiet = told(names.INVARIANT_LAST_VIOLATION, (0, 90), invariant=invariant)
    quiet.add(names.INVARIANT_LAST_VIOLATION, (0, 10), (600, 80), invariant=other)
    return (
        Case("fires", last((0, 10), (600, 80)), {9: (), 10: fired, 39: fired, 45: fired, 55: ()}),
        Case("silent", quiet.series, {15: (), 60: ()}, "when another invariant is violated"),
        Case(
            "restart",
            last((0, 10), (600, 10), (STALE, 1), (GONE, 1), (600, 40)),
            {19: fired, 21: fired, 23: fired, 55: ()},
            "the resumed run reloads it",
        ),
        Case(
            "missed scrape", last((0, 10), (600, 5), (STALE, 1), (600, 20)), {14: fired, 15: fired, 16: fired}
        ),
        Case("before the first scrape", last((GONE, 10), (590, 80)), {9: (), 10: fired, 55: ()}),
        Case("saves", last(*saves(count=6)), {9: (), 10: fired, 35: fired, 69: fired}, "each shows it"),
        Case(
            "fires",
            last((0, 10), (600, 2), (STALE, 1), (GONE, 60)),
            {9: (), 10: fired, 12: fired, 25: fired, 39: fired, 49: fired, 51: ()},
            "also when the run halts at once, and its series are gone",
        ),
    )


# ------------------------------------------------------------------------------------------------- checkpoints


def _failing() -> tuple[Case, ...]:
    once = (Fired(HERE, "1"),)

    def failed(*runs: Run) -> Told:
        return told(names.CHECKPOINT_FAILURES, *runs)

    return (
        Case(
            "fires", failed((0, 20), (1, 10), (0, 40)).series, {20: (), 21: once, 29: once, 35: once, 41: ()}
        ),
        Case("silent", failed((0, 70)).series, {15: (), 45: ()}, "when every attempt works"),
        Case(
            "silent",
            failed((0, 10), (1, 1), (0, 60))
            .add(names.CHECKPOINT_ATTEMPTS, (0, 10), (1, 70), outcome="failed", reason="io")
            .add(names.CHECKPOINT_LAST_SUCCESS, (0, 11), (665, 70))
            .add(names.CHECKPOINT_PHASE_STARTED, (0, 10), (600, 1), (660, 19), (1800, 40), phase="drain")
            .add(names.CHECKPOINT_PHASE, (0, 71), phase="drain")
            .add(names.CHECKPOINT_ATTEMPTS, (0, 30), (1, 40), outcome="cancelled", reason="cancelled")
            .series,
            {11: (), 15: (), 31: (), 32: (), 45: ()},
            "when one failed, the next was published, and a later one is cancelled",
        ),
        Case(
            "silent",
            failed((0, 70))
            .add(names.CHECKPOINT_PHASE_STARTED, *saves(count=6), phase="drain")
            .add(names.CHECKPOINT_LAST_SUCCESS, (0, 70))
            .series,
            {15: (), 45: ()},
            "for a program that uses windows and publishes nothing",
        ),
        Case(
            "restart",
            failed((0, 20), (1, 5), (STALE, 1), (0, 40)).series,
            {24: once, 25: once, 40: ()},
            "the new process has not failed yet",
        ),
        Case(
            "missed scrape",
            failed((0, 20), (1, 5), (STALE, 1), (1, 10)).series,
            {24: once, 25: once, 26: once},
        ),
        Case("before the first scrape", failed((GONE, 10), (1, 20)).series, {10: (), 11: once}),
        Case(
            "saves",
            failed((0, 10), *((n, 10) for n in range(1, 7))).series,
            {10: (), 11: once, 20: (Fired(HERE, "2"),), 33: (Fired(HERE, "3"),), 65: (Fired(HERE, "6"),)},
            "each fails, one of them while the next is under way",
        ),
        Case(
            "saves",
            failed((0, 12), (1, 1), (0, 9), (1, 1), (0, 9), (1, 1), (0, 40)).series,
            {12: (), 13: (), 22: (), 35: (), 60: ()},
            "each fails once and is published at its second try",
        ),
    )


def _stalled() -> tuple[Case, ...]:
    def stuck(value: str, phase: str = "write") -> tuple[Fired, ...]:
        return (Fired({**HERE, "phase": phase}, value),)

    def phases(began: tuple[Run, ...], now: tuple[Run, ...], phase: str = "write") -> Told:
        quiet = told(names.CHECKPOINT_PHASE_STARTED, (0, 100), phase="stage").add(
            names.CHECKPOINT_PHASE, (0, 100), phase="stage"
        )
        return quiet.add(names.CHECKPOINT_PHASE_STARTED, *began, phase=phase).add(
            names.CHECKPOINT_PHASE, *now, phase=phase
        )

    began: tuple[Run, ...] = ((0, 10), (600, 60))
    going: tuple[Run, ...] = ((0, 10), (1, 60))
    blamed = phases(began, going, "drain").add(names.WINDOW_BLAME, (0, 9), (50, 61), kind="retry")
    return (
        Case("fires", phases(began, going).series, {30: (), 31: stuck("21m 0s"), 60: stuck("50m 0s")}),
        Case(
            "fires",
            blamed.series,
            {12: (), 13: (Fired({**HERE, "phase": "drain"}, "3m 0s", kind="retry"),)},
            "and names the kind of slots that windows wait for",
        ),
        Case(
            "silent",
            phases(began, ((0, 10), (1, 19), (0, 40))).series,
            {28: (), 31: (), 60: ()},
            "ended in time",
        ),
        Case(
            "restart",
            phases(((0, 10), (600, 25), (STALE, 1), (0, 20)), ((0, 10), (1, 25), (STALE, 1), (0, 20))).series,
            {34: stuck("24m 0s"), 35: stuck("24m 0s"), 40: ()},
            "ends it",
        ),
        Case(
            "missed scrape",
            phases(((0, 10), (600, 25), (STALE, 1), (600, 9)), ((0, 10), (1, 25), (STALE, 1), (1, 9))).series,
            {34: stuck("24m 0s"), 35: stuck("24m 0s"), 36: stuck("26m 0s")},
        ),
        Case(
            "before the first scrape",
            phases(((GONE, 40), (590, 10)), ((GONE, 40), (1, 10))).series,
            {39: (), 40: stuck("30m 10s")},
        ),
        Case("saves", phases(saves(count=6), pulses(1, 5, count=6)).series, {12: (), 34: (), 64: ()}),
    )


def _overdue() -> tuple[Case, ...]:
    def late(value: str) -> tuple[Fired, ...]:
        return (Fired({"run": "r"}, value),)

    def run(
        saved: tuple[Run, ...], began: tuple[Run, ...], every: tuple[Run, ...] = ((600, 130),)
    ) -> dict[str, Any]:
        return (
            told(names.CHECKPOINT_LAST_SUCCESS, *saved)
            .add(names.RUN_STARTED, *began)
            .add(names.CHECKPOINT_EXPECTED_INTERVAL, *every)
            .series
        )

    once: tuple[Run, ...] = ((0, 10), (600, 120))
    return (
        Case("fires", run(once, ((60, 130),)), {40: (), 41: late("31m 0s"), 90: late("1h 20m 0s")}),
        Case(
            "silent", run(once, ((60, 130),), ((0, 130),)), {41: (), 120: ()}, "when the run has no interval"
        ),
        Case(
            "restart",
            run(((0, 10), (600, 10), (0, 60)), ((60, 20), (1200, 60))),
            {45: (), 51: late("31m 0s")},
            "the time of a restart counts from its start",
        ),
        Case(
            "missed scrape",
            run(((0, 10), (600, 35), (STALE, 1), (600, 9)), ((60, 55),), ((600, 45), (STALE, 1), (600, 9))),
            {44: late("34m 0s"), 45: late("34m 0s"), 46: late("36m 0s")},
        ),
        Case(
            "before the first scrape",
            run(((GONE, 20), (0, 60)), ((GONE, 20), (100, 60)), ((GONE, 20), (600, 60))),
            {20: (), 32: late("30m 20s")},
            "began long ago and never saved",
        ),
        Case("saves", run(saves(count=12), ((60, 130),)), {9: (), 60: (), 125: ()}),
    )


# ------------------------------------------------------------------------------------------------- windows


def _window(
    late: tuple[Run, ...], blame: tuple[Run, ...], at: Mapping[str, str] = HERE, phase: str = "drain"
) -> Told:
    return (
        started()
        .add(names.WINDOW_OVER_OBJECTIVE, *late, at=at, phase=phase)
        .add(names.WINDOW_BLAME, *blame, at=at, kind="group_commit")
        .add(
            names.WINDOW_BLAME,
            *((value if isinstance(value, str) else value / 8, n) for value, n in blame),
            at=at,
            kind="retry",
        )
    )


def _breaches(fired: Callable[[str, str], Fired]) -> tuple[Case, ...]:
    """Cases of the two alerts that count windows over their objective; `fired` takes the count and the blame."""
    three: tuple[Run, ...] = ((0, 20), (1, 20), (2, 20), (3, 400))
    blame: tuple[Run, ...] = ((0, 20), (16, 20), (32, 20), (48, 400))
    one: tuple[Run, ...] = ((0, 20), (1, 400))
    moved = _window(((0, 20), (1, 20), (2, 10), (STALE, 1)), ((0, 20), (16, 20), (32, 10), (STALE, 1)))
    moved.series.update(
        _window(((GONE, 52), (0, 8), (1, 400)), ((GONE, 52), (0, 8), (16, 400)), THERE).series
    )
    return (
        Case(
            "fires",
            _window(three, blame).series,
            {59: (), 60: (fired("3", "48s"),), 300: (fired("3", "48s"),)},
        ),
        Case(
            "silent",
            _window(one, ((0, 20), (60, 400))).series,
            {25: (), 240: ()},
            "after one slow window in hours",
        ),
        Case(
            "restart",
            moved.series,
            {59: (), 61: (fired("3", "48.33s"),)},
            "on another port: the run's windows add up",
        ),
        Case(
            "missed scrape",
            _window(
                (*three[:3], (3, 10), (STALE, 1), (3, 9)), (*blame[:3], (48, 10), (STALE, 1), (48, 9))
            ).series,
            {69: (fired("3", "48s"),), 70: (fired("3", "48.7s"),), 71: (fired("3", "48s"),)},
        ),
        Case(
            "before the first scrape",
            _window(
                ((GONE, 10), (1, 10), (2, 10), (3, 10), (4, 90)),
                ((GONE, 10), (8, 10), (24, 10), (40, 10), (56, 90)),
            ).series,
            {39: (), 60: (fired("3", "48.48s"),)},
            "what was slow before it does not count, what comes does",
        ),
        Case("saves", _window(((0, 400),), steps(0.2, count=39)).series, {15: (), 390: ()}, "each in time"),
    )


def _drain_slow() -> tuple[Case, ...]:
    return _breaches(
        lambda _count, blame: Fired({"run": "r", "kind": "group_commit"}, blame, kind="group_commit")
    )


def _over_objective() -> tuple[Case, ...]:
    return _breaches(lambda count, _blame: Fired({"run": "r", "phase": "drain"}, count, kind="group_commit"))


def _budget() -> tuple[Case, ...]:
    def over(value: str) -> tuple[Fired, ...]:
        return (Fired({"run": "r"}, value),)

    def closed(*runs: Run, at: Mapping[str, str] = HERE) -> Told:
        return started().add(names.WINDOW_CLOSED, *runs, at=at)

    moved = closed((0, 10), (10, 15), (STALE, 1))
    moved.series.update(closed((GONE, 27), (0, 5), (10, 60), at=THERE).series)
    return (
        Case("fires", closed((0, 10), (10, 10), (20, 100)).series, {19: (), 20: over("20s"), 90: ()}),
        Case("silent", closed((0, 10), (15, 100)).series, {12: (), 60: ()}, "below its share"),
        Case("restart", moved.series, {31: (), 33: over("20.21s")}, "on another port: both halves add up"),
        Case(
            "missed scrape",
            closed((0, 10), (20, 10), (STALE, 1), (20, 10)).series,
            {19: over("20s"), 20: over("21.05s"), 21: over("20s")},
        ),
        Case(
            "before the first scrape",
            closed((GONE, 10), (100, 10), (120, 40)).series,
            {15: (), 40: over("20.33s")},
            "what was closed before it does not count, what comes does",
        ),
        Case("saves", closed(*steps(1)).series, {30: (), 120: ()}, "of a second each"),
        Case("saves", closed(*steps(4)).series, {30: (), 65: over("24s")}, "of four seconds each"),
    )


# ------------------------------------------------------------------------------------------------- gauges that last


def _lasting(
    metric: names.Metric, high: float, hold: int, fired: tuple[Fired, ...], **labels: str
) -> tuple[Case, ...]:
    """Cases of a gauge that has to be high for some minutes."""

    def gauge(*runs: Run) -> dict[str, tuple[Run, ...]]:
        return Told().add(metric, *runs, at={**HERE, **labels}).series

    on = 10 + hold
    return (
        Case("fires", gauge((0, 10), (high, 40), (0, 20)), {on - 1: (), on: fired, 49: fired, 60: ()}),
        Case(
            "silent",
            gauge((0, 10), (high, hold), (0, 40)),
            {on - 1: (), on: (), 40: ()},
            "when it is over in time",
        ),
        Case(
            "restart",
            gauge((0, 10), (high, hold + 5), (STALE, 1), (0, 40)),
            {on + 4: fired, on + 15: ()},
            "the new process is well",
        ),
        Case(
            "missed scrape",
            gauge((0, 10), (high, hold + 5), (STALE, 1), (high, 10)),
            {on + 4: fired, on + 5: fired, on + 6: fired},
        ),
        Case("before the first scrape", gauge((GONE, 10), (high, 40)), {on - 1: (), on: fired}),
        Case("saves", gauge(*pulses(high, 1, count=6)), {10: (), 21: (), 65: ()}),
    )


# ------------------------------------------------------------------------------------------------- counters


def _counting(
    metric: names.Metric,
    many: float,
    few: float,
    *,
    every: float | None = None,
    kept: tuple[str, ...] = (),
    **labels: str,
) -> tuple[Case, ...]:
    """Cases of a counter that must not grow much in an hour.

    Args:
        metric: The counter.
        many: A growth that is too much.
        few: One that is not.
        every: A growth at every save that is too much in an hour, if there is one.
        kept: Labels of its own that the alert keeps.
        labels: The counter's own.
    """

    def fired(value: float) -> tuple[Fired, ...]:
        return (Fired({**HERE, **{name: labels[name] for name in kept}}, f"{value:.0f}"),)

    def counter(*runs: Run) -> dict[str, tuple[Run, ...]]:
        return Told().add(metric, *runs, at={**HERE, **labels}).series

    each = many if every is None else every
    return (
        Case("fires", counter((0, 10), (many, 120)), {9: (), 10: fired(many), 60: fired(many), 80: ()}),
        Case("silent", counter((0, 10), (few, 120)), {12: (), 80: ()}),
        Case(
            "restart",
            counter((0, 10), (many, 10), (STALE, 1), (0, 5), (many, 60)),
            {19: fired(many), 22: fired(many), 27: fired(2 * many), 100: ()},
            "both lives count",
        ),
        Case(
            "missed scrape",
            counter((0, 10), (many, 5), (STALE, 1), (many, 20)),
            # `increase` extrapolates over the sample that is not there.
            {14: fired(many), 15: fired(many * 15 / 14), 16: fired(many)},
        ),
        Case("before the first scrape", counter((GONE, 10), (many, 120)), {9: (), 10: fired(many), 90: ()}),
        Case(
            "saves",
            counter(*steps(each)),
            {9: (), 65: fired(6 * each), 300: fired(6 * each)},
            "each adds to it",
        ),
    )


def _beside_another() -> tuple[Case, ...]:
    """Cases of an exporter that loses what another one takes."""
    grows: tuple[Run, ...] = ((0, 10), (500, 90))
    told_once = told(names.TELEMETRY_SPANS, *grows, fate="exported")
    recorded = told_once.add(names.TELEMETRY_SINK_SPANS, *grows, sink="recorder", fate="exported")
    taken = dict(recorded.series)
    lost = recorded.add(names.TELEMETRY_SINK_SPANS, *grows, sink="otlp", fate="failed").series
    return (
        Case("silent", taken, {10: (), 30: (), 80: ()}, "when the only exporter takes everything"),
        Case(
            "fires",
            lost,
            {
                9: (),
                10: (Fired({**HERE, "sink": "otlp"}, "500"),),
                30: (Fired({**HERE, "sink": "otlp"}, "500"),),
            },
            "for a collector that is away, though the recorder has every span",
        ),
    )


def _run_down() -> tuple[Case, ...]:
    up = names.Metric("up", "gauge", "Whether the last scrape worked")
    fired = (Fired(HERE),)
    after = (Fired(THERE, instance="host:9465 "),)

    def run(
        answers: tuple[Run, ...],
        seen: tuple[Run, ...],
        finished: tuple[Run, ...],
        at: Mapping[str, str] = HERE,
    ) -> dict[str, tuple[Run, ...]]:
        target = {key: at[key] for key in ("instance", "job")}
        return (
            told(up, *answers, at=target)
            .add(names.RUN_STARTED, *seen, at=at)
            .add(names.RUN_STATE, *finished, at=at, state="finished")
            .series
        )

    died: tuple[Run, ...] = ((1, 10), (0, 50))
    seen: tuple[Run, ...] = ((5, 10), (STALE, 1))
    going: tuple[Run, ...] = ((0, 10), (STALE, 1))
    # It was killed, so its target is still there; another process goes on, and Prometheus finds that too.
    killed = run(((1, 10), (0, 600)), seen, going)
    resumed = run(((GONE, 11), (1, 600)), ((GONE, 11), (640, 600)), ((GONE, 11), (0, 600)), THERE)
    sibling = run(((1, 600),), ((8, 600),), ((0, 600),), THERE)
    return (
        Case("fires", run(died, seen, going), {9: (), 11: (), 12: fired, 23: fired, 45: fired}),
        Case(
            "fires", killed, {12: fired, 90: fired, 340: fired, 372: ()}, "for six hours, if nobody resumes"
        ),
        Case(
            "fires",
            {**killed, **sibling},
            {11: (), 12: fired, 40: fired},
            "for one of two processes that began together",
        ),
        Case(
            "silent",
            run(died, seen, ((0, 9), (1, 1), (STALE, 1))),
            {12: (), 20: (), 40: ()},
            "after a clean end",
        ),
        Case(
            "silent",
            told(up, (0, 60), at={key: HERE[key] for key in ("instance", "job")}).series,
            {12: (), 50: ()},
            "for what never was a run",
        ),
        Case(
            "restart",
            run(((1, 10), (0, 1), (1, 50)), ((5, 10), (STALE, 1), (660, 50)), (*going, (0, 50))),
            {11: (), 13: (), 20: ()},
            "that is quick",
        ),
        Case(
            "restart",
            run(
                ((1, 10), (0, 2), (1, 5), (0, 20)),
                ((5, 10), (STALE, 1), (GONE, 1), (720, 5), (STALE, 1)),
                ((0, 9), (1, 1), (STALE, 1), (GONE, 1), (0, 5), (STALE, 1)),
            ),
            {14: (), 19: fired},
            "of a finished run, which then dies",
        ),
        Case("restart", {**killed, **resumed}, {12: (), 14: (), 40: ()}, "on another port"),
        Case(
            "restart",
            {
                **run(((GONE, 10), (1, 1), (0, 600)), ((GONE, 10), (590, 1), (STALE, 1)), ((GONE, 12),)),
                **run(((GONE, 12), (1, 600)), ((GONE, 12), (690, 600)), ((GONE, 12), (0, 600)), THERE),
            },
            {13: (), 14: (), 40: ()},
            "on another port, of a process that was scraped once",
        ),
        Case(
            "restart",
            {
                **killed,
                **run(
                    ((GONE, 11), (1, 10), (STALE, 1)),
                    ((GONE, 11), (640, 10), (STALE, 1)),
                    ((GONE, 11), (0, 9), (1, 1), (STALE, 1)),
                    THERE,
                ),
            },
            {14: (), 25: (), 60: ()},
            "on another port, and a clean end",
        ),
        Case(
            "restart",
            {
                **killed,
                **run(
                    ((GONE, 11), (1, 10), (0, 600)),
                    ((GONE, 11), (640, 10), (STALE, 1)),
                    ((GONE, 11), (0, 10), (STALE, 1)),
                    THERE,
                ),
            },
            {14: (), 22: (), 23: after, 60: after},
            "on another port, and that one is killed as well: it is the one that is down",
        ),
        Case(
            "missed scrape",
            run(((1, 10), (0, 1), (1, 50)), ((5, 10), (STALE, 1), (5, 50)), (*going, (0, 50))),
            {10: (), 12: (), 20: ()},
        ),
        Case(
            "before the first scrape",
            run(
                ((GONE, 10), (1, 1), (0, 30)),
                ((GONE, 10), (5, 1), (STALE, 1)),
                ((GONE, 10), (0, 1), (STALE, 1)),
            ),
            {11: (), 13: fired},
            "was scraped once in its life",
        ),
        Case("saves", run(((1, 70),), ((5, 70),), ((0, 70),)), {10: (), 65: ()}),
    )


CASES: Final[dict[str, tuple[Case, ...]]] = {
    **{
        alert: tuple(
            chain.from_iterable(
                _invariant(invariant) for invariant, named in INVARIANT_ALERTS.items() if named == alert
            )
        )
        for alert in dict.fromkeys(INVARIANT_ALERTS.values())
    },
    OTHER_INVARIANT: _invariant("my_own_check"),
    "QuiesceCheckpointFailing": _failing(),
    "QuiesceCheckpointStalled": _stalled(),
    "QuiesceCheckpointOverdue": _overdue(),
    "QuiesceDrainSlow": _drain_slow(),
    "QuiesceWindowOverObjective": _over_objective(),
    "QuiesceWindowBudget": _budget(),
    "QuiesceGateClosedTooLong": _lasting(
        names.GATE_CLOSED, 1, 2, (Fired({**HERE, "worker": "w0"}),), worker="w0"
    ),
    "QuiesceCleanupBacklog": _lasting(names.CLEANUP_QUEUE, 100, 10, (Fired(HERE, "100"),)),
    "QuiesceCleanupFailing": _counting(names.CLEANUP_FAILURES, 3, 2, every=1),
    "QuiesceAdmissionFallback": _counting(names.ADMISSION_COMMITS, 4, 0, path="fallback"),
    "QuiesceTelemetryDropping": (
        *_counting(names.TELEMETRY_SPANS, 200, 50, every=50, fate="dropped"),
        *_counting(names.OBSERVER_ERRORS, 2, 0),
        *_counting(names.TELEMETRY_SINK_SPANS, 200, 50, every=50, kept=("sink",), sink="otlp", fate="failed"),
        *_beside_another(),
    ),
    "QuiesceRunDown": _run_down(),
}
"""Cases by alert."""
