"""The fork servers of the crash tests, and what those tests say of how much they tried."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.conftest import TRIED
from tests.crash.forkserver import ForkPool


@pytest.fixture(scope="session")
def pool() -> Iterator[ForkPool]:
    """Two servers, started once."""
    pool = ForkPool()
    yield pool
    pool.close()


@pytest.fixture
def tell(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Return a function that takes what a test tried; the summary shows it."""

    def told(what: str) -> None:
        record_property(TRIED, what)

    return told
