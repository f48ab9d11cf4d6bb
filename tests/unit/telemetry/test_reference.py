"""The reference page."""

from pathlib import Path

from quiesce.telemetry import names
from quiesce.telemetry.reference import page

COMMITTED = Path(__file__).parents[3] / "docs" / "reference" / "metrics.md"


def test_the_committed_page_is_what_the_catalogue_says() -> None:
    """Run `python -m quiesce.telemetry.reference > docs/reference/metrics.md` after a change."""
    assert COMMITTED.read_text() == page()


def test_every_metric_and_event_is_on_the_page_once() -> None:
    """Each has one row."""
    text = page()

    for metric in names.METRICS.values():
        assert text.count(f"\n| `{metric.name}` |") == 1
    for event in names.LOG_EVENTS:
        assert text.count(f"\n| `{event}` |") == 1
