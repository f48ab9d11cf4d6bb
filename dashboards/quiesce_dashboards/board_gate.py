"""The dashboard of snapshot gates, background cleanup and the data plane."""

from __future__ import annotations

from quiesce.telemetry import names
from quiesce_dashboards.objectives import AlertConfig, duration
from quiesce_dashboards.panels import (
    BAD,
    GOOD,
    NEUTRAL,
    Ask,
    Section,
    above,
    heat,
    lines,
    mapped,
    number,
    states,
)
from quiesce_dashboards.queries import came, picked, quantile, sum_by

__all__ = ["gate"]

_GREW = "$__rate_interval"
_WHOLE = "$__range"


def gate(config: AlertConfig) -> list[Section]:
    """Return the dashboard's parts.

    Args:
        config: The objectives.
    """
    return [
        Section("Now", _now(config)),
        Section("Gates", _gates()),
        Section("Cleanup", _cleanup(config)),
        Section("The data plane", _dataplane()),
    ]


def _now(config: AlertConfig) -> list[tuple[int, int, object]]:
    long = duration(config.gate_closed_seconds)
    return [
        (
            4,
            4,
            number(
                "Gates closed",
                "Snapshot gates that were closed at every scrape of the last "
                f"{config.gate_closed_seconds:g} s. Good: none. The alert QuiesceGateClosedTooLong stands for one that is. "
                "A gate that is closed for the moment of a window is not seen here.",
                Ask(sum_by([], f"min_over_time({picked(names.GATE_CLOSED)}[{long}])")),
                unit="none",
                decimals=0,
                mappings=mapped({0: ("none", GOOD)}),
                steps=((None, GOOD), (0.5, BAD)),
            ),
        ),
        (
            4,
            4,
            number(
                "Permits out",
                "Writers that hold a permit of a gate. A gate closes once its permits are back. Good: few.",
                Ask(sum_by([], picked(names.GATE_PERMITS))),
                unit="none",
                decimals=0,
            ),
        ),
        (
            4,
            4,
            number(
                "Calls to be cleared",
                "Calls whose rows are still to be cleared. Good: a few; from "
                f"{config.cleanup_backlog_calls} on the alert QuiesceCleanupBacklog fires, and replies begin to wait.",
                Ask(sum_by([], picked(names.CLEANUP_QUEUE))),
                unit="none",
                decimals=0,
                steps=above(config.cleanup_backlog_calls / 2, config.cleanup_backlog_calls),
            ),
        ),
        (
            4,
            4,
            number(
                "Clears that failed",
                "Tries to clear a batch that failed, in the range shown. Good: 0. Each is tried again.",
                Ask(sum_by([], f"increase({picked(names.CLEANUP_FAILURES)}[{_WHOLE}])"), instant=True),
                decimals=0,
                steps=((None, GOOD), (0.5, BAD)),
            ),
        ),
        (
            4,
            4,
            number(
                "Reply, p99",
                "Time from a call's last token to its answer, in the range shown. Good: the time of one put.",
                Ask(quantile(0.99, names.REPLY_SECONDS, [], _WHOLE), instant=True),
                unit="s",
                empty="no reply yet",
            ),
        ),
        (
            4,
            4,
            number(
                "Map used",
                "Used share of the data plane's map. Good: level, below a half: a map that is full refuses rows.",
                Ask(sum_by([], picked(names.DATAPLANE_MAP_USED), function="max")),
                unit="percentunit",
                decimals=1,
                steps=above(0.7, 0.9),
                empty="no map",
            ),
        ),
    ]


def _gates() -> list[tuple[int, int, object]]:
    return [
        (
            12,
            8,
            states(
                "Closed gates, by worker",
                "Whether each worker's gate was closed whenever it was scraped. Good: hardly a mark, for a window is over "
                "between two scrapes. A mark that goes on is a worker that was not reopened, or that does not answer.",
                Ask(sum_by(["worker"], picked(names.GATE_CLOSED), function="max"), "{{worker}}"),
                mappings=mapped({0: ("open", GOOD), 1: ("closed", NEUTRAL)}),
                empty="no snapshot gate",
            ),
        ),
        (
            12,
            8,
            lines(
                "Permits out, by worker",
                "Permits that are out. Good: they go to 0 when a gate closes. One that stays out is what a checkpoint "
                "waits for.",
                Ask(sum_by(["worker"], picked(names.GATE_PERMITS)), "{{worker}}"),
                unit="none",
                stepped=True,
            ),
        ),
        (
            12,
            8,
            lines(
                "Waiting for a permit",
                "How long writers waited for a permit. Good: the lowest bucket, 1 µs, but for windows, and then "
                "about their length.",
                Ask(quantile(0.5, names.GATE_WAIT), "median"),
                Ask(quantile(0.99, names.GATE_WAIT), "p99"),
                unit="s",
                named=("median", "p99"),
            ),
        ),
        (
            12,
            8,
            lines(
                "Closing a gate",
                "How long gates took to close: until no permit was out. Good: one clear at most. "
                "Empty: no gate was closed in this range.",
                Ask(quantile(0.5, names.GATE_CLOSE), "median"),
                Ask(quantile(0.99, names.GATE_CLOSE), "p99"),
                unit="s",
                named=("median", "p99"),
            ),
        ),
        (
            24,
            8,
            heat(
                "Reply latency",
                "How many calls were answered how long after their last token. Good: one band, at the time of one put: "
                "a clear is never in the way of a reply. Empty: no call was answered in this range.",
                Ask(
                    came(picked(names.REPLY_SECONDS, "_bucket"), ["le"]),
                    "{{le}}",
                    heatmap=True,
                ),
            ),
        ),
    ]


def _cleanup(config: AlertConfig) -> list[tuple[int, int, object]]:
    batches = sum_by([], f"increase({picked(names.CLEANUP_BATCH, '_count')}[{_GREW}])")
    calls = sum_by([], f"increase({picked(names.CLEANUP_BATCH, '_sum')}[{_GREW}])")
    return [
        (
            8,
            8,
            lines(
                "Queue of calls to be cleared",
                "The queue of background cleanup. Good: it goes back to 0. A queue that grows: rows are finished faster "
                "than they are cleared.",
                Ask(sum_by([], picked(names.CLEANUP_QUEUE)), "calls"),
                steps=((None, GOOD), (config.cleanup_backlog_calls, BAD)),
                stepped=True,
                named=("calls",),
            ),
        ),
        (
            8,
            8,
            lines(
                "Calls cleared together",
                "Mean size of a batch. Good: more than 1 under load: one clear for many calls.",
                Ask(f"{calls} / ({batches} > 0)", "calls in a batch"),
                stepped=True,
                named=("calls in a batch",),
            ),
        ),
        (
            8,
            8,
            lines(
                "Clearing a batch",
                "How long a clear takes, of failed tries too. Good: milliseconds, level. It bounds how long a gate takes "
                "to close.",
                Ask(quantile(0.5, names.CLEANUP_CLEAR), "median"),
                Ask(quantile(0.99, names.CLEANUP_CLEAR), "p99"),
                unit="s",
                named=("median", "p99"),
            ),
        ),
        (
            12,
            8,
            lines(
                "Keys cleared a second",
                "Rows that are cleared. Good: as many as are put, over time.",
                Ask(sum_by([], f"rate({picked(names.CLEANUP_KEYS)}[{_GREW}])"), "keys"),
                unit="suffix:keys/s",
                named=("keys",),
            ),
        ),
        (
            12,
            8,
            lines(
                "Failed clears",
                "Tries to clear a batch that failed. Good: none. Keys of a failed try are tried again, and swept at last.",
                Ask(came(picked(names.CLEANUP_FAILURES), []), "failed tries"),
                bars=True,
                named=("failed tries",),
            ),
        ),
    ]


def _dataplane() -> list[tuple[int, int, object]]:
    return [
        (
            12,
            8,
            lines(
                "Rows",
                "Rows in the data plane, those that a snapshot pins, and those whose clear waits for its release. Good: "
                "level; pinned rows go to 0 after each write.",
                Ask(sum_by([], picked(names.DATAPLANE_ROWS)), "rows"),
                Ask(sum_by([], picked(names.DATAPLANE_PINNED)), "pinned"),
                Ask(sum_by([], picked(names.DATAPLANE_DEFERRED)), "clear deferred"),
                named=("rows", "pinned", "clear deferred"),
            ),
        ),
        (
            12,
            8,
            lines(
                "Bytes",
                "Bytes that rows take. Good: level. Growth without more groups: rows that nobody clears.",
                Ask(sum_by([], picked(names.DATAPLANE_BYTES)), "bytes"),
                unit="bytes",
                named=("bytes",),
            ),
        ),
        (
            12,
            8,
            lines(
                "Operations, p99",
                "How long 99 of 100 operations of the data plane took at most. Good: level; snapshot stays short, because "
                "it runs inside the window.",
                Ask(quantile(0.99, names.DATAPLANE_OP, ["op"]), "{{op}}"),
                unit="s",
                logarithmic=True,
                named=("put", "get", "clear", "keys", "snapshot", "write"),
            ),
        ),
        (
            12,
            8,
            lines(
                "Operations a second",
                "How often the data plane is used, by operation. Good: put and clear keep pace.",
                Ask(
                    sum_by(["op"], f"rate({picked(names.DATAPLANE_OP, '_count')}[{_GREW}])"),
                    "{{op}}",
                ),
                unit="ops",
                named=("put", "get", "clear", "keys", "snapshot", "write"),
            ),
        ),
    ]
