"""Rules that hold for every test: nothing is skipped in silence, and a test may say how much it tried."""

from collections.abc import Generator
from typing import cast

import pytest
from hypothesis import settings

# The same examples every time: a suite that gates a change must not fail by luck, nor for a slow machine.
settings.register_profile("steady", derandomize=True, deadline=None)
settings.load_profile("steady")

TRIED = "tried"
"""The property with which a test that tries many things says how many; the summary shows it."""


MADE_ONCE = frozenset(
    {
        "test_bad_input",
        "test_bench",
        "test_bench_auditor",
        "test_bench_telemetry",
        "test_cli_train",
        "test_expressions",
        "test_reply",
        "test_spans_of_a_run",
        "test_tampering",
        "test_telemetry_faults",
        "test_telemetry_foreign",
        "test_telemetry_run",
        "test_torn_writes",
        "test_wheel",
    }
)
"""Modules whose tests share what takes seconds to make: one process runs all of each, so that it is made once."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep the tests of a module together where they share what is costly."""
    for item in items:
        if item.path.stem in MADE_ONCE:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn a skipped test into a failed one: what cannot run is named, never passed over.

    An expected failure (`xfail`) is reported as skipped too, and stays what it is.
    """
    report = yield
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = cast("tuple[str, int, str]", report.longrepr)[2]
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} was skipped, which counts as a failure here: {reason}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Turn a module that skips itself at import into an error of collection, for the same reason."""
    report = yield
    if report.skipped:
        reason = cast("tuple[str, int, str]", report.longrepr)[2]
        report.outcome = "failed"
        report.longrepr = f"{report.nodeid} skipped itself, which counts as a failure here: {reason}"
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say what was tried; properties travel with a report, whichever process ran the test."""
    told = sorted(
        f"{report.location[2]}: {what}"
        for outcome in ("passed", "failed")
        for report in terminalreporter.getreports(outcome)
        for name, what in report.user_properties
        if name == TRIED
    )
    if told:
        terminalreporter.section("what was tried")
        for line in told:
            terminalreporter.write_line(line)
