"""Every expression of every panel, variable, annotation and rule, asked of a real Prometheus that saw a real run.

The run trains, is killed and resumes; a Prometheus with the generated rules scrapes it once a second. Told again at 15 s and
at 60 s, its samples answer what Grafana would ask there. What is rightly empty is listed with the reason, and what is
listed has to be empty. Each test asks all expressions and tells all failures: what takes time is the run.
"""

from __future__ import annotations

import fcntl
import math
import os
import pickle
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Final

import promql_parser
import pytest

from quiesce_dashboards.alerts import alerts
from quiesce_dashboards.queries import metrics_of
from tests.dashboards import synthetic
from tests.dashboards.expected import EITHER, EMPTY, EMPTY_DAY, MOMENTARY, QUIET, UNLIT, UNSEEN
from tests.dashboards.grafana import (
    Expression,
    Scope,
    all_expressions,
    dashboards,
    left_open,
    listed_by,
    picked,
)
from tests.dashboards.recorded import RUN, Recording, Series, Server, backfilled, record, selector

pytestmark = [
    pytest.mark.distribution,
    pytest.mark.timeout(600),  # the fixture trains, or waits for another process that does
]

DASHBOARDS: Final = dashboards()
EXPRESSIONS: Final = {
    expression.where: expression for uid in DASHBOARDS for expression in all_expressions(uid, DASHBOARDS[uid])
}
VARIABLES: Final = {
    (uid, variable["name"]): variable
    for uid, dashboard in DASHBOARDS.items()
    for variable in dashboard["templating"]["list"]
    if variable["type"] == "query"
}
RULES: Final = {alert.name: alert.expression for alert in alerts()}

INTERVALS: Final[Mapping[int, float]] = {1: 900, 15: 900, 60: 3600}
"""Seconds between scrapes, and the range that is looked at."""

LIVING: Final = f'quiesce_run_started_timestamp_seconds{{run="{RUN}"}}'
"""Is there whenever a process of the run is."""

OTHER: Final = "other"
"""A second run at the same time."""

Answer = dict[tuple[tuple[str, str], ...], list[tuple[float, float]]]


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Recording:
    """The run, as it was scraped; of several processes that test, one records it for all."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    kept = root / "recording.pickle"
    with (root / "recording.lock").open("w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            scope = Scope(1.0, 0.0, 900.0, _everything())
            asked = [each.read(scope) for each in EXPRESSIONS.values() if each.exemplar]
            made = record(tmp_path_factory.mktemp("recorded"), asked)
            kept.write_bytes(pickle.dumps(made))
        told = pickle.loads(kept.read_bytes())  # noqa: S301 - written above
    assert isinstance(told, Recording)
    return told


@pytest.fixture(scope="module")
def end() -> float:
    """Unix time of the last scrape of everything that is told again."""
    return math.floor(time.time()) - 60.0


@pytest.fixture(scope="module")
def servers(
    recording: Recording, end: float, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[int, Server]]:
    """A Prometheus for each interval."""
    folder = tmp_path_factory.mktemp("told")
    with ExitStack() as stack:
        yield {
            interval: stack.enter_context(
                backfilled(folder / f"every-{interval}", interval, recording.told_at(interval, end))
            )
            for interval in INTERVALS
        }


def _everything() -> dict[str, str]:
    """Return a choice for every variable that needs no Prometheus to be made: the run, and all of the rest."""
    return {name: ".*" for _, name in VARIABLES} | {"datasource": "", "run": RUN}


def scope_of(
    server: Server,
    uid: str,
    interval: int,
    end: float,
    run: str = RUN,
    span: float = 0,
    chosen: Mapping[str, list[str]] | None = None,
) -> Scope:
    """Return what a dashboard reads its expressions in: this run, and all values of what takes several, or the chosen."""
    values: dict[str, Any] = {"datasource": "", "run": run, **(chosen or {})}
    scope = Scope(float(interval), end - (span or INTERVALS[interval]), end, values)
    for variable in DASHBOARDS[uid]["templating"]["list"]:
        if variable["type"] == "query" and variable["name"] not in values:
            values[variable["name"]] = variable.get("allValue") or listed(server, variable, scope)
    return scope


def listed(server: Server, variable: Mapping[str, Any], scope: Scope) -> list[str]:
    """Return the values that Grafana lists for a variable."""
    asked, label = listed_by(variable)
    read = Expression(variable["name"], asked).read(scope)
    if label is not None:
        return picked(
            variable, server.get(f"label/{label}/values", match=read, start=scope.begin, end=scope.end)
        )
    lines = [
        f"{selector({'__name__': '', **one['metric']})} {one['value'][1]}"
        for one in server.instant(read, scope.end)
    ]
    return picked(variable, lines)


def answer(
    server: Server, expression: Expression, scope: Scope, change: Callable[[str], str] = str
) -> Answer:
    """Return what a panel gets: series with the points that are numbers."""
    text = change(expression.read(scope))
    if expression.instant:
        result = [{**one, "values": [one["value"]]} for one in server.instant(text, scope.end)]
    else:
        result = server.ranged(text, scope.begin, scope.end, expression.interval(scope))
    told = {
        tuple(sorted(one["metric"].items())): [
            (float(at), float(value)) for at, value in one["values"] if not math.isnan(float(value))
        ]
        for one in result
    }
    return {labels: points for labels, points in told.items() if points}


def uid_of(where: str) -> str:
    """Return the dashboard that an expression is of."""
    return where.partition(" / ")[0]


def selectors_of(expression: str) -> set[str]:
    """Return what an expression reads, without ranges and offsets."""
    signs = {"Equal": "=", "NotEqual": "!=", "Re": "=~", "NotRe": "!~"}
    found = set()

    def visit(node: Any) -> None:  # noqa: ANN401 - any node of the tree
        if type(node).__name__ == "VectorSelector":
            inside = ",".join(
                f'{each.name}{signs[str(each.op).partition(".")[2]]}"{each.value}"'
                for each in node.matchers.matchers
            )
            found.add(f"{node.name}{{{inside}}}")

    promql_parser.walk(promql_parser.parse(expression), visit)
    return found


# ------------------------------------------------------------------------------------------------- one run


def test_there_is_something_to_ask() -> None:
    """Five dashboards, with a good many expressions; what is listed as empty exists, and has a reason."""
    assert len(DASHBOARDS) == 5
    assert len(EXPRESSIONS) > 60
    assert {*EMPTY, *EMPTY_DAY, *MOMENTARY} <= set(EXPRESSIONS)
    assert {*QUIET, *EITHER} <= set(RULES)
    assert not set(QUIET) & set(EITHER)
    assert all(
        (
            *EMPTY.values(),
            *QUIET.values(),
            *EITHER.values(),
            *UNSEEN.values(),
            *EMPTY_DAY.values(),
            *MOMENTARY.values(),
        )
    )


def test_every_expression_returns_data_or_is_listed(servers: dict[int, Server], end: float) -> None:
    """At one scrape a second, in fifteen and in sixty seconds; what is listed is empty at each."""
    wrong = []
    for interval, server in servers.items():
        scopes = {uid: scope_of(server, uid, interval, end) for uid in DASHBOARDS}
        for where, expression in EXPRESSIONS.items():
            found = bool(answer(server, expression, scopes[uid_of(where)]))
            if where not in MOMENTARY and found == (where in EMPTY):
                what = "returns data, but is listed as empty" if found else "is empty"
                wrong.append(f"every {interval} s: {where} {what}: {expression.text}")
    assert not wrong, "\n".join(wrong)


def test_what_is_excused_as_momentary_is(servers: dict[int, Server], end: float) -> None:
    """What a scrape meets by chance is not there at most of them; what is there at most of them needs no excuse."""
    wrong = []
    for interval, server in servers.items():
        for where in MOMENTARY:
            expression = EXPRESSIONS[where]
            scope = scope_of(server, uid_of(where), interval, end)
            told = answer(server, expression, scope)
            met = {at for points in told.values() for at, _ in points}
            lived = server.ranged(LIVING, scope.begin, scope.end, expression.interval(scope))
            every = {at for one in lived for at, _ in one["values"]}
            if len(met) > len(every) / 2:
                wrong.append(f"every {interval} s: {where} is there at {len(met)} of {len(every)} points")
    assert not wrong, "\n".join(wrong)


def test_one_instance_and_one_kind_can_be_chosen(servers: dict[int, Server], end: float) -> None:
    """Each expression has data of the process and of the kind that were chosen, and of no other where it lets one choose."""
    wrong = []
    server = servers[15]
    [newest] = server.instant(f"topk(1, {LIVING})", end)
    chosen = {"instance": [newest["metric"]["instance"]], "kind": ["group_commit"]}
    for where, expression in EXPRESSIONS.items():
        if where in {*EMPTY, *MOMENTARY}:
            continue
        told = answer(server, expression, scope_of(server, uid_of(where), 15, end, chosen=chosen))
        others = {
            f"{label}={value}"
            for labels in told
            for label, value in labels
            if label in chosen and value not in chosen[label] and f"${label}" in expression.text
        }
        if not told or others:
            wrong.append(f"{where}: {', '.join(sorted(others)) or 'is empty'}: {expression.text}")
    assert not wrong, "\n".join(wrong)


def test_every_expression_returns_data_as_prometheus_3_reads_ranges(
    servers: dict[int, Server], end: float
) -> None:
    """Scrapes are on the beat here, and so are steps: a range has one sample less than before, and still enough."""
    wrong = []
    for interval, server in servers.items():
        for where, expression in EXPRESSIONS.items():
            scope = scope_of(server, uid_of(where), interval, end)
            if "[" not in expression.text or where in {*EMPTY, *MOMENTARY}:
                continue
            if not answer(server, expression, scope, left_open):
                wrong.append(f"every {interval} s: {where}: {left_open(expression.read(scope))}")
    assert not wrong, "\n".join(wrong)


def test_every_variable_lists_values(servers: dict[int, Server], end: float) -> None:
    """Each variable has something to choose from, and the run is among the runs."""
    for interval, server in servers.items():
        scope = Scope(float(interval), end - INTERVALS[interval], end, _everything())
        for (uid, name), variable in VARIABLES.items():
            values = listed(server, variable, scope)
            assert values, (uid, name)
            assert name != "run" or values == [RUN]


def test_every_rule_returns_data_or_is_listed(servers: dict[int, Server], end: float) -> None:
    """A rule that is quiet has a reason, and what it reads is there all the same."""
    wrong, unseen = [], set()
    for interval, server in servers.items():
        begin, step = end - INTERVALS[interval], interval
        for name, expression in RULES.items():
            if name not in EITHER and bool(server.ranged(expression, begin, end, step)) == (name in QUIET):
                wrong.append(f"every {interval} s: {name} is {'not ' if name in QUIET else ''}quiet")
            unseen |= {each for each in selectors_of(expression) if not server.ranged(each, begin, end, step)}
    assert not wrong, "\n".join(wrong)
    assert unseen == set(UNSEEN)


def test_exemplars_lead_to_traces(recording: Recording) -> None:
    """Each panel that asks for exemplars gets some, with the trace of one observation in each."""
    assert len(recording.exemplars) >= 2
    without = []
    for expression, told in recording.exemplars.items():
        ids = [one["labels"]["trace_id"] for series in told for one in series["exemplars"]]
        assert all(re.fullmatch(r"[0-9a-f]{32}", each) for each in ids)
        if not ids and not any(metric in UNLIT for metric in metrics_of(expression)):
            without.append(expression)
    assert not without, "\n".join(without)


def test_a_restart_leaves_every_panel_whole(
    recording: Recording, servers: dict[int, Server], end: float
) -> None:
    """The run was killed and resumed on another port: every range goes on behind that, and now is the new life's."""
    restarted = end - (recording.end - recording.killed) * 15
    wrong = []
    for where, expression in EXPRESSIONS.items():
        scope = scope_of(servers[15], uid_of(where), 15, end)
        if " / annotation " in where:
            # Saves are a minute apart here, and so may be the points of an annotation.
            scope, expression = replace(scope, begin=scope.begin - 60), replace(expression, minimum=15.0)  # noqa: PLW2901 - of this turn
        told = answer(servers[15], expression, scope)
        if where in {*EMPTY, *MOMENTARY}:
            continue
        if not any(at > restarted for points in told.values() for at, _ in points):
            wrong.append(f"{where}: {expression.text}")
    assert not wrong, "\n".join(wrong)


def test_a_run_that_was_resumed_is_not_down(servers: dict[int, Server], end: float) -> None:
    """Its first life was killed, and the target of that is still asked in vain; the second life stands in for it."""
    for interval, server in servers.items():
        assert server.instant("up == 0", end)
        assert server.ranged(RULES["QuiesceRunDown"], end - INTERVALS[interval], end, interval)
        assert not server.instant(RULES["QuiesceRunDown"], end)


# ------------------------------------------------------------------------------------------------- two runs


@pytest.fixture(scope="module")
def both(recording: Recording, end: float, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A Prometheus with two runs: the recorded one, and another with three times as much of everything."""
    told = recording.told_at(15, end)
    other: Series = {}
    for labels, samples in told.items():
        pairs = dict(labels)
        pairs.update({"run": OTHER} if "run" in pairs else {})
        pairs.update({"instance": f"127.0.0.2:{pairs['instance'][-4:]}"} if "instance" in pairs else {})
        if tuple(sorted(pairs.items())) not in told:
            factor = 1 if pairs["__name__"].endswith("_timestamp_seconds") else 3
            other[tuple(sorted(pairs.items()))] = [(at, factor * value) for at, value in samples]
    with backfilled(tmp_path_factory.mktemp("two") / "runs", 15, told, other) as server:
        yield server


def test_another_run_changes_nothing(servers: dict[int, Server], both: Server, end: float) -> None:
    """A panel that shows one run says the same, whatever else runs."""
    wrong = []
    for where, expression in EXPRESSIONS.items():
        alone = answer(servers[15], expression, scope_of(servers[15], uid_of(where), 15, end))
        beside = answer(both, expression, scope_of(both, uid_of(where), 15, end))
        if not _alike(alone, beside):
            wrong.append(f"{where}: {expression.text}")
    assert not wrong, "\n".join(wrong)


def _alike(one: Answer, other: Answer) -> bool:
    return one.keys() == other.keys() and all(
        len(points) == len(other[labels])
        and all(
            mine[0] == theirs[0] and math.isclose(mine[1], theirs[1], rel_tol=1e-9, abs_tol=1e-12)
            for mine, theirs in zip(points, other[labels], strict=True)
        )
        for labels, points in one.items()
    )


def test_the_other_run_can_be_chosen(both: Server, end: float) -> None:
    """The variable lists both runs, and the other's panels have data as well."""
    for uid in DASHBOARDS:
        scope = scope_of(both, uid, 15, end, OTHER)
        assert sorted(listed(both, VARIABLES[uid, "run"], scope)) == sorted((RUN, OTHER))
        for where, expression in EXPRESSIONS.items():
            if uid_of(where) == uid and where not in {*EMPTY, *MOMENTARY}:
                assert answer(both, expression, scope), where


# ------------------------------------------------------------------------------------------------- one day


def test_a_day_is_drawn(end: float, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Saves every ten minutes are seen over a day, in few enough points and series, in time."""
    wrong = []
    folder = tmp_path_factory.mktemp("day") / "server"
    with backfilled(folder, synthetic.SCRAPE, text=lambda: synthetic.day(end)) as server:
        states = server.instant("quiesce_run_state == 1", end)
        assert [one["metric"]["state"] for one in states] == [synthetic.STATE]
        for where, expression in EXPRESSIONS.items():
            scope = scope_of(server, uid_of(where), synthetic.SCRAPE, end, synthetic.RUN, synthetic.DAY)
            began = time.monotonic()
            told = answer(server, expression, scope)
            took = time.monotonic() - began
            most = max(map(len, told.values()), default=0)
            if (
                bool(told) == (where in EMPTY_DAY)
                or took > 10
                or most > 1.6 * expression.points
                or len(told) > 80
            ):
                wrong.append(f"{where}: {len(told)} series, {most} points, {took:.1f} s: {expression.text}")
    assert not wrong, "\n".join(wrong)
