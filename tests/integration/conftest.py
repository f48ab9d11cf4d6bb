"""Fixtures that the tests of the command line share."""

from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from tests.integration.cli_process import Gate, Zygote


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give tests here, which wait for real programs on a machine that may be busy, more than the others' limit."""
    for item in items:
        if Path(__file__).parent in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(300))


@pytest.fixture(scope="session")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Generator[Zygote]:
    """The process that runs of the command line are forked from."""
    process = Zygote(tmp_path_factory.mktemp("zygote"))
    yield process
    process.close()


@pytest.fixture
def gate(tmp_path: Path) -> Generator[Callable[..., Gate]]:
    """Makes gates, and closes them."""
    made = []

    def make(place: str, nth: int = 1, after: str = "") -> Gate:
        made.append(Gate(tmp_path, place, nth, after))
        return made[-1]

    yield make
    for one in made:
        one.close()
