"""PromQL from the catalogue of metrics: a name, a label or a value that is not in it is refused.

Rule: every expression of a rule or a panel is put together from these functions, and judged as a whole by
:func:`check_expression`, so that a renamed metric breaks the build and not the page at night. Nothing here
suspends.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from quiesce.errors import ExtraMissingError
from quiesce.telemetry import names

if TYPE_CHECKING:
    from types import ModuleType

__all__ = [
    "ALERTS",
    "TARGET_LABELS",
    "UP",
    "VARIABLES",
    "came",
    "check_expression",
    "firing",
    "grew",
    "matching",
    "metrics_of",
    "newest",
    "picked",
    "quantile",
    "series",
    "sum_by",
]

TARGET_LABELS: Final = ("instance", "job")
"""Labels that Prometheus itself adds to what it scrapes."""

UP: Final = "up"
"""The one metric that is Prometheus' own: whether the last scrape of a target worked."""

ALERTS: Final = "ALERTS"
"""The series that Prometheus writes of its rules: 1 for each alert that is pending or firing."""

_ALERT_LABELS: Final = ("alertname", "alertstate", "severity")

VARIABLES: Final = ("job", "run", "instance", "kind")
"""The variables of dashboards that stand for values of labels of the same names."""

_INTERVALS: Final = {"$__rate_interval": "4m", "$__interval": "1m", "$__range_s": "3600", "$__range": "1h"}
"""What Grafana puts in by itself, with a value to judge an expression by."""

_SUFFIXES: Final = {"histogram": ("_bucket", "_sum", "_count")}

Value = str | Sequence[str]


def series(
    metric: names.Metric,
    suffix: str = "",
    /,
    *,
    without: Mapping[str, Value] | None = None,
    **matchers: Value,
) -> str:
    """Return a selector of a metric's series.

    Args:
        metric: From the catalogue.
        suffix: ``_bucket``, ``_sum`` or ``_count`` of a histogram.
        without: Values by label that are left out.
        matchers: Values by label; several values match any of them.

    Raises:
        ValueError: If the catalogue has no such metric, label or value.
    """
    if names.METRICS.get(metric.name) is not metric:
        raise ValueError(f"{metric.name} is not a metric of the catalogue")
    if (suffix or metric.type == "histogram") and suffix not in _SUFFIXES.get(metric.type, ()):
        raise ValueError(f"{metric.name} is a {metric.type}: it has no series {metric.name}{suffix}")
    parts = []
    both = (("=", "=~", matchers), ("!=", "!~", without or {}))
    for label, wanted, operators in (
        (label, wanted, operators) for *operators, given in both for label, wanted in given.items()
    ):
        values = (wanted,) if isinstance(wanted, str) else tuple(wanted)
        for value in values:
            _check_value(metric, suffix, label, value)
        operator = operators[0] if len(values) == 1 else operators[1]
        parts.append(f'{label}{operator}"{"|".join(values)}"')
    inside = "{" + ",".join(parts) + "}" if parts else ""
    return f"{metric.name}{suffix}{inside}"


def picked(
    metric: names.Metric,
    suffix: str = "",
    /,
    *,
    without: Mapping[str, Value] | None = None,
    **matchers: Value,
) -> str:
    """Return a selector of those series of a metric that a dashboard's variables pick.

    Args:
        metric: From the catalogue.
        suffix: ``_bucket``, ``_sum`` or ``_count`` of a histogram.
        without: Values by label that are left out.
        matchers: Values by label; several values match any of them.

    Raises:
        ValueError: If the catalogue has no such metric, label or value.
    """
    chosen = ['job=~"$job"', 'run="$run"', 'instance=~"$instance"']
    if "kind" not in matchers and any(label.name == "kind" and label.extended for label in metric.labels):
        chosen.append('kind=~"$kind"')
    said = series(metric, suffix, without=without, **matchers)
    name, _, rest = said.partition("{")
    return f"{name}{{{','.join([*chosen, *filter(None, [rest.removesuffix('}')])])}}}"


def firing() -> str:
    """Return a selector of the alerts of the chosen run that fire."""
    return f'{ALERTS}{{alertname=~"Quiesce.*",alertstate="firing",run="$run"}}'


def came(selector: str, labels: Sequence[str]) -> str:
    """Return an expression for what counters grew by between a point of a query and the point before it.

    Each event is in one point, at whatever step and whatever scrape interval, and counts as what it is: the difference
    of two values that a step lies between. ``increase`` over a window of several scrapes shows a rare event in each
    point that is less than the window away; over a window of a step it misses what came between two windows. Only
    where a process began anew in between, or where there was nothing before, is the growth estimated.

    Args:
        selector: The counters.
        labels: What to sum them up by.
    """
    grown = f"{selector} - {selector} offset $__interval >= 0 unless resets({selector}[$__interval]) > 0"
    return sum_by(labels, f"{grown}\nor increase({selector}[$__interval])")


def newest(selector: str, by: Sequence[str]) -> str:
    """Return an expression for the series that were told last, of those that differ in other labels than these.

    A gauge that says things in its labels is another series once one of them changes. Prometheus marks the old one
    as gone; in blocks that were made of a recording nothing can, so it stays for as long as a value holds.

    Args:
        selector: The gauge.
        by: The labels that tell apart what tells it.
    """
    latest = sum_by(by, f"timestamp({selector})", function="max")
    return f"{selector} and timestamp({selector}) == {matching(by)} group_left () {latest}"


def quantile(
    share: float, metric: names.Metric, by: Sequence[str] = (), window: str = "$__rate_interval"
) -> str:
    """Return an expression for a quantile of a histogram of the chosen run.

    Args:
        share: Which, 0 to 1.
        metric: The histogram.
        by: Labels to keep.
        window: A PromQL duration.

    Raises:
        ValueError: If the metric is no histogram, or has no such label.
    """
    inside = sum_by(["le", *by], f"increase({picked(metric, '_bucket')}[{window}])")
    return f"histogram_quantile({share:g}, {inside})"


def sum_by(labels: Sequence[str], expression: str, *, function: str = "sum") -> str:
    """Return an aggregation that keeps these labels.

    Raises:
        ValueError: If no metric has such a label.
    """
    return f"{function} {_grouping('by', labels)} ({expression})"


def matching(labels: Sequence[str]) -> str:
    """Return the ``on (…)`` of a match of two vectors.

    Raises:
        ValueError: If no metric has such a label.
    """
    return _grouping("on", labels)


def grew(selector: str, labels: Sequence[str], window: str, more_than: float) -> str:
    """Return an expression that holds when counters grew by more than so much within a window.

    A counter that is scraped for the first time has grown from nothing: ``increase`` sees no growth between a
    process's start and its first scrape, so a counter that was not there a window ago counts as a whole.

    Args:
        selector: The counters.
        labels: What to sum them up by.
        window: A PromQL duration.
        more_than: The growth.
    """
    total = sum_by(labels, selector)
    grown = sum_by(labels, f"increase({selector}[{window}])")
    before = sum_by(labels, f"{selector} offset {window}")
    # Summed after the comparison with what was there before, so both sides have the same labels.
    return f"{grown} > {more_than:g}\nor\n({total} > {more_than:g} unless {matching(labels)} {before})"


def check_expression(expression: str) -> None:
    """Judge an expression by the catalogue.

    Raises:
        ValueError: If it does not parse, or names a metric, a label or a value that does not exist.
        ExtraMissingError: If the parser is not installed.
    """
    parser = _parser()
    tree = parser.parse(_readable(expression))
    known = {label for selector in _selectors(tree) for label in _check_selector(selector)}

    def grouping(node: Any) -> None:  # noqa: ANN401 - any node of the tree
        modifier = getattr(node, "modifier", None)
        labels = getattr(modifier, "labels", None) or getattr(
            getattr(modifier, "matching", None), "labels", None
        )
        for label in labels or ():
            if label not in known:
                raise ValueError(f"no metric of the expression has the label {label!r}: {expression}")

    parser.walk(tree, grouping)


def metrics_of(expression: str) -> set[str]:
    """Return the names of the metrics that an expression reads.

    Raises:
        ValueError: If it does not parse.
        ExtraMissingError: If the parser is not installed.
    """
    return {str(selector.name) for selector in _selectors(_parser().parse(_readable(expression)))}


def _readable(expression: str) -> str:
    """Put a value in for each interval that Grafana puts in."""
    for name, value in _INTERVALS.items():
        expression = expression.replace(name, value)
    return expression


def _parser() -> ModuleType:
    try:
        import promql_parser
    except ImportError:
        raise ExtraMissingError("checking rules", "promql-parser", "dashboards") from None
    return promql_parser


def _selectors(tree: Any) -> list[Any]:  # noqa: ANN401 - any node of the tree
    found: list[Any] = []

    def visit(node: Any) -> None:  # noqa: ANN401 - as above
        if type(node).__name__ == "VectorSelector":
            found.append(node)

    _parser().walk(tree, visit)
    return found


def _check_selector(selector: Any) -> set[str]:  # noqa: ANN401 - the parser's node
    """Return the labels that the selected series have."""
    name = str(selector.name)
    matchers = [(str(item.name), str(item.value), str(item.op)) for item in selector.matchers.matchers]
    if name == ALERTS:
        for label, _, _ in matchers:
            if label not in (*_ALERT_LABELS, *names.CONSTANT_LABELS, *TARGET_LABELS):
                raise ValueError(f"{ALERTS} has no label {label!r}")
        # An alert keeps the labels of what it is about.
        carried = {label.name for each in names.METRICS.values() for label in each.labels}
        return {*_ALERT_LABELS, *names.CONSTANT_LABELS, *TARGET_LABELS, *carried}
    if name == UP:
        for label, _, _ in matchers:
            if label not in TARGET_LABELS:
                raise ValueError(f"{UP} has no label {label!r}")
        return set(TARGET_LABELS)
    metric, suffix = _find(name)
    for label, value, operator in matchers:
        for one in value.split("|") if operator.endswith("Re") else (value,):
            _check_value(metric, suffix, label, one)
    return {
        *metric.label_names,
        *names.CONSTANT_LABELS,
        *TARGET_LABELS,
        *(("le",) if suffix == "_bucket" else ()),
    }


def _find(name: str) -> tuple[names.Metric, str]:
    metric = names.METRICS.get(name)
    if metric is not None and metric.type != "histogram":
        return metric, ""
    for suffix in _SUFFIXES["histogram"]:
        metric = names.METRICS.get(name.removesuffix(suffix)) if name.endswith(suffix) else None
        if metric is not None and metric.type == "histogram":
            return metric, suffix
    raise ValueError(f"there is no metric {name}")


def _check_value(metric: names.Metric, suffix: str, label: str, value: str) -> None:
    if label in names.CONSTANT_LABELS or label in TARGET_LABELS:
        return
    if value.startswith("$"):
        if value.removeprefix("$") != label or label not in VARIABLES:
            raise ValueError(f"{metric.name}: {label}={value!r} is not the variable of that label")
        return
    if label == "le" and suffix == "_bucket":
        if value != "+Inf" and float(value) not in metric.buckets:
            raise ValueError(f"{metric.name} has no bucket {value}")
        return
    known: Mapping[str, Any] = {each.name: each for each in metric.labels}
    if label not in known:
        raise ValueError(f"{metric.name} has no label {label!r}")
    declared = known[label]
    if not (declared.constant or declared.extended) and value not in declared.values:
        raise ValueError(f"{metric.name} has no {label}={value!r}")


def _grouping(word: str, labels: Sequence[str]) -> str:
    known = {label.name for metric in names.METRICS.values() for label in metric.labels}
    for label in labels:
        if label not in {*known, *names.CONSTANT_LABELS, *TARGET_LABELS, *_ALERT_LABELS, "le"}:
            raise ValueError(f"no metric has a label {label!r}")
    return f"{word} ({', '.join(labels)})"
