"""The fork servers of the crash tests, and a few lines at the end that say how much was tried."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.crash.forkserver import ForkPool

TOLD = pytest.StashKey[dict[str, str]]()


@pytest.fixture(scope="session")
def pool() -> Iterator[ForkPool]:
    """Two servers, started once."""
    pool = ForkPool()
    yield pool
    pool.close()


@pytest.fixture
def tell(request: pytest.FixtureRequest) -> Callable[[str], None]:
    """Return a function that takes what a test tried; the summary shows it."""

    def told(what: str) -> None:
        request.config.stash.setdefault(TOLD, {})[request.node.name] = what

    return told


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say what was tried."""
    told = config.stash.get(TOLD, {})
    if told:
        terminalreporter.section("what the crash tests tried")
        for name in sorted(told):
            terminalreporter.write_line(f"{name}: {told[name]}")
